//! Two processes of the command over a real segment: what they measure, what they publish, and
//! what happens when one of them dies.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStderr, ChildStdout, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::Value;

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_barewire"));
    command.args(args).stdin(Stdio::null()).env_remove("BAREWIRE_PORT");
    // A peer that was killed is noticed soon enough for a test.
    command.env("BAREWIRE_T_DEAD_MS", "1000");
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().unwrap()
}

/// A segment of our own.
fn segment() -> String {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let number = COUNT.fetch_add(1, Ordering::Relaxed);
    format!("shm:cli-{}-{number}", std::process::id())
}

fn objects(output: &Output) -> Vec<Value> {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{stderr}", output.status);
    // Both sides end in order, which is nothing to warn of.
    assert!(!stderr.contains("WARN"), "{stderr}");
    lines(&text)
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// A server, ended with the test.
struct Server {
    child: Child,
    lines: BufReader<ChildStdout>,
    addr: String,
    port: String,
}

impl Server {
    fn start(port: &str) -> Self {
        Self::start_by(command, port)
    }

    fn start_by(command: impl Fn(&[&str]) -> Command, port: &str) -> Self {
        let mut child = command(&["pingpong", "--listen", "--json", "--port", port])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        let said: Value = serde_json::from_str(&line).unwrap();
        let addr = said["listening"].as_str().unwrap().to_owned();
        Self { child, lines, addr, port: port.to_owned() }
    }

    fn next_line(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).unwrap();
        serde_json::from_str(&line).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
        // The last one of a segment was killed: the next user of the name would tidy up, and there
        // is none.
        let name = self.port.trim_start_matches("shm:");
        let _ =
            std::fs::remove_file(format!("/dev/shm/barewire-{}-{name}", nix::unistd::geteuid()));
    }
}

/// Every length from nothing over injected, eager and pulled, both matchings, every byte compared.
#[test]
fn pingpong_and_bench_carry_every_kind_of_message() {
    for tagged in [&[][..], &["--tagged"]] {
        for what in ["pingpong", "bench"] {
            let port = segment();
            let args = [what, "--spawn", "--verify", "--json", "--port", &port];
            let sizes = ["--iterations", "40", "--size", "0,1,8,256,257,4k,100k,1m"];
            let lines = objects(&run(&[&args[..], &sizes, tagged].concat()));
            assert_eq!(lines.len(), 8, "{what}");
            for line in lines {
                assert_eq!(line["n"], 40, "{line}");
                assert_eq!(line["verified"], true, "{line}");
                assert_eq!(line["tagged"], !tagged.is_empty(), "{line}");
                assert!(line["p50_ns"].as_u64() >= line["min_ns"].as_u64(), "{line}");
                assert!(line["p99_ns"].as_u64().is_some_and(|ns| ns > 0), "{line}");
                assert!(line["rate"].as_f64().is_some_and(|rate| rate > 0.0), "{line}");
            }
        }
    }
}

/// Goal: a slow path is measured in the time that was asked for, and not warmed up for longer.
#[test]
fn a_slow_path_is_not_warmed_up_for_long() {
    let port = format!("fault(delay_us=8000):{}", segment());
    let begun = Instant::now();
    let args = ["pingpong", "--spawn", "--json", "--size", "8,8,8", "--iterations", "2"];
    let lines = objects(&run(&[&args[..], &["--port", &port]].concat()));
    assert_eq!(lines.len(), 3);
    // 1,000 messages to and fro would take 16 s each time.
    assert!(begun.elapsed().as_secs() < 20, "{:?}", begun.elapsed());
}

/// Goal: a port that does not open is what is wrong, and not the host that nobody can find through
/// it.
#[test]
fn a_port_that_does_not_open_is_to_blame() {
    for command in ["pingpong", "bench", "ping"] {
        for (port, why) in [
            ("udp:203.0.113.0/24", "no interface of this host fits"),
            ("udp:203.0.113.9", "no interface of this host has that address"),
            ("foo:eth0", "no such kind of port"),
        ] {
            let failed = run(&[command, "--port", port, "10.0.0.1"]);
            let said = String::from_utf8_lossy(&failed.stderr).into_owned();
            assert_eq!(failed.status.code(), Some(1), "{command}: {said}");
            assert!(said.starts_with("barewire: port ") && said.contains(why), "{command}: {said}");
        }
    }
}

/// Goal: over udp a listener is found by its host, by name or number, and its UDP port; a host that
/// nobody knows is told at once.
#[test]
fn a_listener_on_udp_is_found_by_its_host() {
    let mut server = command(&["pingpong", "--listen", "--json", "--port", "udp:127.0.0.1"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let said: Value = serde_json::from_str(&line).unwrap();
    let service = said["port"].as_str().unwrap().rsplit_once(':').unwrap().1.to_owned();
    for host in ["127.0.0.1", "localhost"] {
        let peer = format!("{host}:{service}");
        let port = [
            "--port",
            "afpacket:zz*|udp:127.0.0.0/8",
            "--iterations",
            "10",
            "--size",
            "8",
            "--json",
        ];
        let lines = objects(&run(&[&["pingpong", peer.as_str()], &port[..]].concat()));
        assert_eq!((lines.len(), &lines[0]["n"]), (1, &10.into()));
    }
    server.kill().unwrap();
    server.wait().unwrap();
    for (host, says) in [
        ("no-host.invalid", "no-host.invalid: the system's resolver"),
        ("2001:db8::1", "the port carries IPv4"),
        ("127.0.0.1:http", "http: a service is a number"),
    ] {
        let output = command(&["pingpong", host, "--port", "udp:127.0.0.1"]).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains(says), "{host}: {said}");
    }
}

/// A key file that only its owner reads.
fn key_file(dir: &Path, name: &str, byte: u8) -> PathBuf {
    let path = dir.join(name);
    std::fs::write(&path, [byte; 32]).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    path
}

/// Goal: over a wire two sides with one key file exchange every kind of message, and one with
/// another key, or with none, is refused with its own code after a second, and both say why.
#[test]
fn pingpong_with_a_key_file() {
    const PORT: &str = "udp:127.0.0.1,near=no";
    let dir = tempfile::tempdir().unwrap();
    let [right, wrong] =
        [("right", 1), ("wrong", 2)].map(|(n, byte)| key_file(dir.path(), n, byte));
    let (right, wrong) = (right.to_str().unwrap(), wrong.to_str().unwrap());
    let log = std::fs::File::create(dir.path().join("log")).unwrap();
    let args = ["pingpong", "--listen", "--json", "--port", PORT, "--key-file", right];
    let mut child = command(&args).stdout(Stdio::piped()).stderr(log).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    let said: Value = serde_json::from_str(&line).unwrap();
    let addr = said["listening"].as_str().unwrap().to_owned();
    let server = Server { child, lines, addr: addr.clone(), port: String::new() };
    let client = ["pingpong", &addr, "--port", PORT, "--json", "--iterations", "20"];
    let client = [&client[..], &["--size", "0,8,1400,9k,100k", "--verify"]].concat();
    let ping = |key: &[&str]| {
        let args = ["ping", &addr, "--port", PORT, "--json", "--count", "3", "--interval", "0.01"];
        let output = command(&[&args[..], key].concat()).output().unwrap();
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code().unwrap(), said["verdict"].as_str().unwrap().to_owned())
    };
    assert_eq!(ping(&["--key-file", right]), (0, "ok".to_owned()));
    assert_eq!(ping(&["--key-file", wrong]), (12, "other_key".to_owned()));
    assert_eq!(ping(&[]), (12, "no_key".to_owned()));
    for (key, code, says) in [
        (&["--key-file", wrong][..], "FI_EACCES", "has another key"),
        (&[], "FI_ENOKEY", "has a key, and this side has none"),
    ] {
        let begun = Instant::now();
        let mut client = command(&[&client[..], key].concat());
        let output = client.env("BAREWIRE_T_DEAD_MS", "5000").output().unwrap();
        let took = begun.elapsed();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let told = said.contains(code) && said.contains(says);
        assert!(output.status.code() == Some(1) && told, "{said}");
        let last = said.lines().last().unwrap();
        assert!(last.contains("give both sides the same --key-file"), "{said}");
        assert!((1.0..3.0).contains(&took.as_secs_f64()), "{took:?}: {said}");
    }
    let gone = dir.path().join("gone");
    let output = run(&[&client[..], &["--key-file", gone.to_str().unwrap()]].concat());
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("gone") && said.contains("name a file that is there"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(!said.contains("memory"), "{said}");
    let key = ["--key-file", right];
    for line in objects(&run(&[&client[..], &key].concat())) {
        assert_eq!((&line["n"], &line["verified"]), (&20.into(), &true.into()), "{line}");
    }
    let pid = server.child.id().to_string();
    let domain = objects(&run(&["stats", "--json", "--pid", &pid])).remove(0);
    let sum = |of: &str| -> u64 {
        let claims = domain["refused_seals"].as_array().unwrap().iter();
        claims.map(|claim| claim[of].as_u64().unwrap()).sum()
    };
    let node = |of: &str| domain["node_counters"][of].as_u64().unwrap();
    assert!(sum("forged") > 0 && sum("forged") <= node("rx_forged"), "{domain}");
    assert!(sum("clear") > 0 && sum("clear") <= node("rx_clear"), "{domain}");
    drop(server);
    let log = std::fs::read_to_string(dir.path().join("log")).unwrap();
    // Both clients were the same station, which is told of once.
    assert!(log.contains("has another key"), "{log}");
    std::fs::set_permissions(right, std::fs::Permissions::from_mode(0o644)).unwrap();
    let output = command(&[&client[..], &key].concat()).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("chmod 600"), "{output:?}");
}

/// The PEM files of a side: certificate, private key and roots.
fn papers(dir: &Path, name: &str, [cert, key, roots]: [&str; 3]) -> [String; 3] {
    let put = |what: &str, text: &str, mode: u32| {
        let path = dir.join(format!("{name}.{what}"));
        std::fs::write(&path, text).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path.to_str().unwrap().to_owned()
    };
    [put("crt", cert, 0o644), put("key", key, 0o600), put("roots", roots, 0o644)]
}

fn ca(name: &str) -> rcgen::CertifiedIssuer<'static, rcgen::KeyPair> {
    let mut params = rcgen::CertificateParams::default();
    params.distinguished_name.push(rcgen::DnType::CommonName, name);
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    rcgen::CertifiedIssuer::self_signed(params, rcgen::KeyPair::generate().unwrap()).unwrap()
}

type Issuer = rcgen::CertifiedIssuer<'static, rcgen::KeyPair>;

/// Papers of this SPIFFE ID, of `ca`, that trust that and `root`.
fn issued(dir: &Path, (file, id): (&str, &str), ca: &Issuer, root: &Issuer) -> [String; 3] {
    let mut params = rcgen::CertificateParams::default();
    params.subject_alt_names = vec![rcgen::SanType::URI(id.try_into().unwrap())];
    let key = rcgen::KeyPair::generate().unwrap();
    let cert = params.signed_by(&key, ca).unwrap().pem();
    papers(dir, file, [&cert, &key.serialize_pem(), &(ca.pem() + &root.pem())])
}

fn cert_args(papers: &[String; 3]) -> [&str; 6] {
    ["--cert", &papers[0], "--cert-key", &papers[1], "--roots", &papers[2]]
}

/// A side that listens with these papers, and its log.
fn listens_with(dir: &Path, papers: &[String; 3], more: &[&str]) -> (Server, PathBuf) {
    const PORT: &str = "udp:127.0.0.1,near=no";
    let path = dir.join("log");
    let log = std::fs::File::create(&path).unwrap();
    let args = ["pingpong", "--listen", "--json", "--port", PORT];
    let mut server = command(&[&args[..], &cert_args(papers), more].concat());
    let mut child = server.stdout(Stdio::piped()).stderr(log).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    lines.read_line(&mut line).unwrap();
    let said: Value = serde_json::from_str(&line).unwrap();
    let addr = said["listening"].as_str().unwrap().to_owned();
    (Server { child, lines, addr, port: String::new() }, path)
}

fn client_of(addr: &str, papers: &[String; 3]) -> std::process::Output {
    let args = ["pingpong", addr, "--port", "udp:127.0.0.1,near=no", "--json"];
    let more = ["--iterations", "20", "--size", "0,8,1400,9k,100k", "--verify"];
    let mut client = command(&[&args[..], &more, &cert_args(papers)].concat());
    client.env("BAREWIRE_T_DEAD_MS", "5000").output().unwrap()
}

/// Goal: two processes with certificates of one root exchange every kind of message; one of another
/// root, or with another name, is refused with its code after a second, and both say why.
#[test]
fn pingpong_with_certificates() {
    let dir = tempfile::tempdir().unwrap();
    let (root, other) = (ca("root"), ca("other"));
    let of = |name, id, ca: &Issuer| issued(dir.path(), (name, id), ca, &root);
    let right = of("right", "spiffe://a.org/job/1", &root);
    let foreign = of("foreign", "spiffe://a.org/job/2", &other);
    let named = of("named", "spiffe://a.org/web/1", &root);
    let own = of("server", "spiffe://a.org/job/0", &root);
    let ids = ["--peer-ids", "spiffe://a.org/job/*"];
    let pinged = |addr: &str, papers: &[String; 3]| {
        let args = ["ping", addr, "--port", "udp:127.0.0.1,near=no", "--count", "3"];
        command(&[&args[..], &cert_args(papers)].concat()).output().unwrap().status.code()
    };
    for bad in [&foreign, &named] {
        let (server, log) = listens_with(dir.path(), &own, &ids);
        assert_eq!(pinged(&server.addr, &right), Some(0));
        let args = ["doctor", "--port", "udp:127.0.0.1,near=no", "--peer", &server.addr];
        let output = command(&[&args[..], &cert_args(&right)].concat()).output().unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        let begun = Instant::now();
        let output = client_of(&server.addr, bad);
        let took = begun.elapsed();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let told = said.contains("FI_EACCES") && said.contains("refuses this side's certificate");
        assert!(output.status.code() == Some(1) && told, "{said}");
        assert!((1.0..3.0).contains(&took.as_secs_f64()), "{took:?}: {said}");
        assert_eq!(pinged(&server.addr, bad), Some(12));
        let output = client_of(&server.addr, &right);
        for line in objects(&output) {
            assert_eq!((&line["n"], &line["verified"]), (&20.into(), &true.into()), "{line}");
        }
        drop(server);
        let log = std::fs::read_to_string(log).unwrap();
        let says = if bad == &named {
            "of spiffe://a.org/web/1 that has no name that this side accepts"
        } else {
            "leads to none of this side's roots"
        };
        assert!(log.contains(says), "{log}");
    }
    let short = ["ping", "127.0.0.1:50001", "--port", "udp:127.0.0.1,near=no,mtu=400"];
    let output = command(&[&short[..], &cert_args(&right)].concat()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let is_told = said.lines().count() == 1 && said.contains("with the certificates a session");
    assert!(output.status.code() == Some(1) && is_told, "{said}");
    // The files of another, and a key beside.
    let mixed = [right[0].clone(), own[1].clone(), right[2].clone()];
    let says = |output: std::process::Output| String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(says(client_of("127.0.0.1:1", &mixed)).contains("not that of the certificate"));
    // A certificate that no peer with these roots would take: told where it is, by each command.
    let alone = [
        foreign[0].clone(),
        foreign[1].clone(),
        papers(dir.path(), "alone", ["", "", &root.pem()])[2].clone(),
    ];
    assert!(says(client_of("127.0.0.1:1", &alone)).contains("leads to none of the roots"));
    doctor_tells_of_certificates(&alone, &right);
    let key = key_file(dir.path(), "key", 1);
    let args = ["pingpong", "--listen", "--port", "udp:127.0.0.1", "--key-file"];
    let args = [&args[..], &[key.to_str().unwrap()], &cert_args(&right)].concat();
    assert!(says(command(&args).output().unwrap()).contains("a certificate or keys, not both"));
}

/// Goal: what a domain would say of a certificate is told beforehand: with a port and without, also
/// whether it fits the frames of the port.
fn doctor_tells_of_certificates(alone: &[String; 3], right: &[String; 3]) {
    let doctor = |papers| {
        let output = command(&[&["doctor", "--json"][..], &cert_args(papers)].concat()).output();
        let output = output.unwrap();
        let is_well = output.status.success();
        let checks = lines(&String::from_utf8(output.stdout).unwrap());
        let check = checks.into_iter().find(|check| check["check"] == "certificate").unwrap();
        assert_eq!(is_well, check["status"] == "ok", "{check}");
        check
    };
    let (bad, good) = (doctor(alone), doctor(right));
    let on = |port: &str, papers| {
        let args = ["doctor", "--json", "--port", port];
        let output = command(&[&args[..], &cert_args(papers)].concat()).output().unwrap();
        let checks = lines(&String::from_utf8(output.stdout).unwrap());
        (output.status.code(), checks[1]["found"].to_string())
    };
    let (code, found) = on("udp:127.0.0.1", alone);
    assert!(code == Some(1) && found.contains("leads to none of the roots"), "{found}");
    let (code, found) = on("udp:127.0.0.1,mtu=400", right);
    assert!(code == Some(1) && found.contains("begins with a frame of"), "{found}");
    let (code, found) = on("udp:127.0.0.1", right);
    assert!(code == Some(0) && found.contains("spiffe://a.org/job/1"), "{found}");
    assert!(bad["status"] == "missing" && good["status"] == "ok", "{bad} {good}");
    assert!(bad["found"].as_str().unwrap().contains("leads to none of the roots"), "{bad}");
    assert!(bad["mend"].as_str().unwrap().contains("BAREWIRE_ROOTS_FILE"), "{bad}");
}

/// Goal: the commands of `docs/security.md` make what two processes understand each other by.
#[test]
fn pingpong_with_certificates_of_openssl() {
    if Command::new("openssl").arg("version").output().is_err() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let doc = include_str!("../../docs/security.md");
    let script = doc.split("## A certificate").nth(1).unwrap().split("```").nth(1).unwrap();
    let made = Command::new("sh").args(["-ec", script]).current_dir(dir.path()).output().unwrap();
    assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let papers = |n: u8| [at(&format!("n{n}.pem")), at(&format!("n{n}.key")), at("ca.pem")];
    let (server, _) = listens_with(dir.path(), &papers(1), &[]);
    for line in objects(&client_of(&server.addr, &papers(2))) {
        assert_eq!((&line["n"], &line["verified"]), (&20.into(), &true.into()), "{line}");
    }
}

/// Goal: what a key seals is recorded sealed, and read with the secrets that the domain wrote
/// because it was told to, and with nothing else. Method: messages with known bytes over UDP,
/// recorded by the port of the client.
#[test]
fn a_recording_is_read_with_the_secrets_of_its_sessions() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).to_str().unwrap().to_owned();
    let key = key_file(dir.path(), "key", 1);
    let (key, secrets, sealed) = (key.to_str().unwrap(), at("secrets"), at("sealed.pcapng"));
    let keyed = |args: &[&str]| command(&[args, &["--key-file", key]].concat());
    let server = Server::start_by(keyed, "udp:127.0.0.1,near=no");
    let port = format!("pcap(file={sealed}):udp:127.0.0.1,near=no");
    let args = ["pingpong", &server.addr, "--port", &port, "--json", "--iterations", "20"];
    let client = || {
        let mut client = keyed(&[&args[..], &["--size", "64,5000", "--verify"]].concat());
        client.env("BAREWIRE_KEY_LOG", &secrets);
        client.output().unwrap()
    };
    let output = client();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && said.contains("can read what was recorded"), "{said}");
    let mode = std::fs::metadata(&secrets).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);

    let read = |keys: &str, from: &str| {
        let opened = at("opened.pcapng");
        let output = run(&["capture", "--keys", keys, "--read", from, "-o", &opened]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{said}");
        (std::fs::read(opened).unwrap(), said)
    };
    let recorded = std::fs::read(&sealed).unwrap();
    let count = frames(&recorded).len();
    let (opened, said) = read(&secrets, &sealed);
    assert!(said.ends_with(" opened, 0 stay sealed\n"), "{said}");
    assert_eq!((messages_in(&recorded), frames(&opened).len()), (0, count));
    assert!(messages_in(&opened) >= 40, "{} messages of {count} frames", messages_in(&opened));
    check_with_tshark(&at("opened.pcapng"), count);

    std::fs::write(at("none"), "# nobody's\n\n").unwrap();
    let (closed, said) = read(&at("none"), &sealed);
    assert!(said.contains(" 0 opened, "), "{said}");
    assert_eq!(messages_in(&closed), 0);
    let one = std::fs::read_to_string(&secrets).unwrap();
    assert_eq!(one.lines().count(), 2, "a line for each direction");
    std::fs::write(at("wrong"), one.replace(" encrypted 22 ", " encrypted 22 00")).unwrap();
    std::fs::write(at("other"), flipped(&one)).unwrap();
    assert_eq!(messages_in(&read(&at("other"), &sealed).0), 0, "another secret");
    for (keys, from, says) in [
        (&*at("wrong"), &*sealed, "line 1: not the secret"),
        ("/nowhere", &*sealed, "; start one of the processes with BAREWIRE_KEY_LOG=/nowhere"),
        ("/", &*sealed, "; may this user read it? ls -l /"),
        (&*secrets, &*secrets, "neither pcapng nor pcap"),
    ] {
        let output = run(&["capture", "--keys", keys, "--read", from, "-o", &at("x")]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(1) && said.contains(says), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
    check_where_it_is_written(&secrets, &sealed, &at("opened.pcapng"));
    // A line that is half written does not hide the others.
    std::fs::write(at("half"), format!("barewire-3 02\n{one}")).unwrap();
    let (whole, said) = read(&at("half"), &sealed);
    assert!(whole == opened && said.contains("line 1: not the secret"), "{said}");
    // Others could read it: nothing is opened, and nothing written.
    std::fs::set_permissions(&secrets, std::fs::Permissions::from_mode(0o640)).unwrap();
    let output = client();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("chmod 600"), "{said}");
    assert_eq!(std::fs::read_to_string(&secrets).unwrap(), one);
}

/// A recording is not written over itself, and a result is nobody else's, also in a file that was
/// there.
fn check_where_it_is_written(secrets: &str, sealed: &str, opened: &str) {
    let recorded = std::fs::read(sealed).unwrap();
    let output = run(&["capture", "--keys", secrets, "--read", sealed, "-o", sealed]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(1) && said.contains("another file"), "{said}");
    assert_eq!(std::fs::read(sealed).unwrap(), recorded);
    std::fs::set_permissions(opened, std::fs::Permissions::from_mode(0o644)).unwrap();
    let output = run(&["capture", "--keys", secrets, "--read", sealed, "-o", opened]);
    assert!(output.status.success());
    assert_eq!(std::fs::metadata(opened).unwrap().permissions().mode() & 0o777, 0o600);
}

/// The text with the last digit of each line another one.
fn flipped(text: &str) -> String {
    let other = |line: &str| {
        let (rest, last) = line.split_at(line.len() - 1);
        format!("{rest}{}\n", if last == "0" { "1" } else { "0" })
    };
    text.lines().map(other).collect()
}

/// Frames of a recording that hold the first bytes of a message of `pingpong --verify`.
fn messages_in(recording: &[u8]) -> usize {
    let first = |number: u64| {
        const STEP: u64 = 0x9e37_79b9_7f4a_7c15;
        let mixed = number.wrapping_add(1).wrapping_mul(STEP);
        (mixed ^ mixed >> 32).to_le_bytes()
    };
    let known: Vec<_> = (0..10_000).map(first).collect();
    let known: std::collections::HashSet<[u8; 8]> = known.into_iter().collect();
    let holds = |frame: &[u8]| frame.windows(8).any(|w| known.contains(w));
    frames(recording).iter().filter(|(_, frame)| holds(frame)).count()
}

/// Goal: over a wire too a listener is found by its host, and by the service that it printed; a
/// service that nobody serves is told, with who was asked.
#[test]
fn a_listener_on_a_wire_is_found_by_its_host() {
    let args = ["pingpong", "--listen", "--json", "--port", "afpacket:lo"];
    let mut server = command(&args).stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(server.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let Ok(said) = serde_json::from_str::<Value>(&line) else {
        server.wait().unwrap();
        println!("SKIPPED: no raw socket: sudo setcap cap_net_raw+ep, or run as root");
        return;
    };
    let addr = said["listening"].as_str().unwrap();
    let service = addr.rsplit_once('/').unwrap().1.split('#').next().unwrap();
    for host in ["127.0.0.1", "localhost", "[::1]"] {
        let peer = format!("{host}:{service}");
        let args = ["pingpong", &peer, "--port", "afpacket:lo", "--iterations", "10"];
        let lines = objects(&run(&[&args[..], &["--size", "8", "--json"]].concat()));
        assert_eq!((lines.len(), &lines[0]["n"]), (1, &10.into()));
    }
    let (mac, _) = addr.trim_start_matches("barewire://").split_once('/').unwrap();
    for peer in [&*format!("127.0.0.1:{service}"), &format!("localhost:{service}"), "localhost"] {
        let output = run(&["ping", "--port", "afpacket:lo", peer, "--count", "3", "--json"]);
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!((output.status.code(), &said["verdict"]), (Some(0), &"ok".into()), "{said}");
        assert_eq!(said["peer"], mac, "{peer}");
    }
    server.kill().unwrap();
    server.wait().unwrap();
    for (what, host) in
        [("pingpong", "192.0.2.1:7"), ("ping", "192.0.2.1:7"), ("ping", "localhost:7")]
    {
        let output = run(&[what, host, "--port", "afpacket:lo"]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let says = "within 300 ms none answered that it serves service 7 there";
        assert!(output.status.code() == Some(1) && said.contains(says), "{said}");
    }
}

/// Every operation on memory of the other side, checked: on a good segment and on a bad one.
#[test]
fn bench_works_on_memory_of_the_other_side() {
    for bad in ["", "fault(loss=0.02,dup=0.02,reorder=0.02,seed=7):"] {
        for (op, size) in
            [("write", "0,8,100k"), ("read", "0,8,100k"), ("fadd", "8"), ("cswap", "8")]
        {
            let port = format!("{bad}{}", segment());
            let args = ["bench", "--spawn", "--verify", "--json", "--port", &port, "--op", op];
            let sizes = ["--iterations", "300", "--size", size];
            let output = run(&[&args[..], &sizes].concat());
            assert!(output.status.success(), "{op}: {output:?}");
            // The last acknowledgement of a side that ends may be lost, which is told.
            let lines = match bad {
                "" => objects(&output),
                _ => lines(&String::from_utf8_lossy(&output.stdout)),
            };
            assert_eq!(lines.len(), size.split(',').count(), "{op}");
            for line in lines {
                assert_eq!((&line["run"], &line["n"]), (&op.into(), &300.into()), "{line}");
                assert!(line["p50_ns"].as_u64() >= line["min_ns"].as_u64(), "{line}");
                assert!(line["rate"].as_f64().is_some_and(|rate| rate > 0.0), "{line}");
            }
        }
    }
}

/// Each of the nine collectives among three processes, checked.
#[test]
fn bench_calls_every_collective() {
    for op in [
        "barrier",
        "broadcast",
        "alltoall",
        "allreduce",
        "allgather",
        "reduce-scatter",
        "reduce",
        "scatter",
        "gather",
    ] {
        let port = segment();
        let size = if op == "barrier" { "0" } else { "8,4k" };
        let args = ["bench", "--spawn", "3", "--verify", "--json", "--port", &port, "--op", op];
        let mut bench = command(&[&args[..], &["--iterations", "50", "--size", size]].concat());
        // Three processes that never sleep share few processors; who waits for one is no news here.
        let lines = objects(&bench.env("BAREWIRE_T_DEAD_MS", "10000").output().unwrap());
        assert_eq!(lines.len(), size.split(',').count(), "{op}");
        for line in lines {
            assert_eq!((&line["run"], &line["n"]), (&op.into(), &50.into()), "{line}");
        }
    }
}

/// Goal: a reader that has gone ends a bench without a word, be it lines or a table that it does
/// not read. Method: a pipe whose other end is closed.
#[test]
fn bench_of_a_collective_that_nobody_reads_ends_quietly() {
    for json in [&["--json"][..], &[]] {
        let port = segment();
        let args = ["bench", "--spawn", "2", "--iterations", "5", "--size", "8", "--op", "gather"];
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut bench = command(&[&args[..], &["--port", &port], json].concat());
        let output = bench.stdout(writer).stderr(Stdio::piped()).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!((output.status.code(), &*said), (Some(1), ""), "{json:?}");
    }
}

/// What the network loses, repeats, reorders and damages is made good.
#[test]
fn a_bad_segment_delivers_every_byte() {
    let port = format!("fault(loss=0.02,dup=0.02,reorder=0.02,corrupt=0.02,seed=7):{}", segment());
    let args = ["bench", "--spawn", "--verify", "--json", "--port", &port];
    let lines = objects(&run(&[&args[..], &["--iterations", "300", "--size", "64,64k"]].concat()));
    assert_eq!(lines.len(), 2);
}

#[test]
fn a_table_has_a_row_for_every_size() {
    let port = segment();
    let output =
        run(&["pingpong", "--spawn", "--iterations", "10", "--size", "8,64k", "--port", &port]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}");
    let rows: Vec<&str> = text.lines().collect();
    assert_eq!(rows.len(), 4, "{text}");
    assert!(rows[2].contains("8 B") && rows[3].contains("64 KiB"), "{text}");
}

/// One client after the other, the second after the first was killed in the middle.
#[test]
fn a_server_outlives_a_client_that_is_killed() {
    let port = segment();
    let mut server = Server::start(&port);
    let addr = server.addr.clone();
    let mut doomed = command(&["pingpong", &addr, "--seconds", "60", "--port", &port])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(400));
    doomed.kill().unwrap();
    doomed.wait().unwrap();
    let args = ["bench", &addr, "--verify", "--json", "--iterations", "50", "--size", "1k"];
    // The server finds out that the first one is dead before it serves the second.
    let lines = (0..3).find_map(|_| {
        let output = run(&[&args[..], &["--port", &port]].concat());
        output.status.success().then(|| objects(&output))
    });
    assert_eq!(lines.unwrap()[0]["n"], 50);
    let said = std::iter::repeat_with(|| server.next_line());
    let mut streams = said.skip_while(|line| line["run"] != "stream" || line["received"] != 50);
    assert_eq!(streams.next().unwrap()["wrong"], 0);
}

#[test]
fn a_client_without_a_server_says_so_on_one_line() {
    let port = segment();
    let gone = Server::start(&port).addr.clone();
    let output = run(&["pingpong", &gone, "--port", &port]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    // Beside the log, which says that the session ended.
    let (log, said): (Vec<_>, Vec<_>) = text.lines().partition(|line| line.contains(" WARN "));
    assert_eq!((log.len(), said.len()), (1, 1), "{text}");
    assert!(log[0].contains(" ended: ") && log[0].contains("FI_EHOSTUNREACH: sends 1"), "{text}");
    assert!(said[0].contains("pingpong --listen"), "{text}");
}

#[test]
fn a_port_that_cannot_be_is_one_line() {
    for port in ["dpdk:0", "shm:a/b", "wifi", "fault(loss=2):shm"] {
        let output = run(&["pingpong", "--listen", "--port", port]);
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{port}");
        assert_eq!(text.lines().count(), 1, "{port}: {text}");
    }
}

#[test]
fn a_wrong_call_is_exit_code_2() {
    for args in [
        &["pingpong"][..],
        &["pingpong", "nonsense"],
        &["exporter", "--listen", "9829"],
        &["pingpong", "barwire://02:00:00:00:00:09/0", "--port", "udp:127.0.0.1"],
        &["pingpong", "--listen", "--spawn"],
        &["pingpong", "--once", "--spawn"],
        &["pingpong", "--spawn", "3"],
        &["bench", "--spawn", "--window", "0"],
        &["bench", "--spawn", "--size", "4x"],
        &["bench", "--spawn", "--op", "divide"],
        &["bench", "--spawn", "--op", "write", "--tagged"],
        &["bench", "--spawn", "--op", "fadd", "--size", "64"],
        &["bench", "--spawn", "--seconds", "0"],
        &["bench", "--spawn", "--cpu", "100000"],
        &["stats", "--watch", "--interval", "0"],
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {output:?}");
    }
    for (args, says) in [
        (&["pingpong"][..], "give --spawn, --listen, or the address that the other side printed"),
        (&["bench"], "give --spawn, --listen, or the address that the other side printed"),
        (&["bench", "--op", "barrier"], "--op barrier needs --spawn N"),
        (&["bench", "--op", "reduce-scatter"], "--op reduce-scatter needs --spawn N"),
        (&["pingpong", "--listen", "--cert", "a.pem"], "--cert-key is missing"),
        (&["ping", "10.1.1.1:52000"], "give its MAC"),
        (&["pingpong", "node7"], "hosts are known on ports that leave the machine"),
    ] {
        let output = run(args);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.code() == Some(2) && said.contains(says), "{args:?}: {said}");
    }
}

#[test]
fn stats_shows_what_a_running_process_counts() {
    let port = segment();
    let server = Server::start(&port);
    let args = ["bench", &server.addr, "--json", "--iterations", "500", "--size", "64"];
    objects(&run(&[&args[..], &["--port", &port]].concat()));
    // It publishes while it polls, at most 10 ms late.
    std::thread::sleep(Duration::from_millis(100));
    let pid = server.child.id().to_string();
    let domains = objects(&run(&["stats", "--json", "--pid", &pid]));
    assert_eq!(domains.len(), 1);
    let domain = &domains[0];
    assert_eq!(domain["port"], port);
    assert!(server.addr.contains(domain["mac"].as_str().unwrap()), "{domain}");
    assert!(domain["node_counters"]["msgs_received"].as_u64().unwrap() >= 500, "{domain}");
    assert!(domain["endpoints"][0]["received"].as_u64().unwrap() >= 500, "{domain}");
    assert_eq!(domain["sessions"].as_array().unwrap().len(), 1, "{domain}");
    assert!(domain["sessions"][0]["rx_packets"].as_u64().unwrap() >= 500, "{domain}");
    let text = String::from_utf8(run(&["stats", "--pid", &pid]).stdout).unwrap();
    assert!(text.contains("msgs_received") && text.contains("session with"), "{text}");
}

/// The answer of a server to a request, as it came.
fn ask(at: &str, request: &str) -> String {
    let mut stream = std::net::TcpStream::connect(at).unwrap();
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

/// Goal: the exporter says over HTTP what a running process counts, at the loopback address and
/// nowhere else, and ends by a signal.
#[test]
fn the_exporter_is_scraped() {
    let port = segment();
    let server = Server::start(&port);
    let args = ["bench", &server.addr, "--json", "--iterations", "500", "--size", "64"];
    objects(&run(&[&args[..], &["--port", &port]].concat()));
    let (mut exporter, at) = exporter();
    let at = &*at;
    assert!(at.starts_with("127.0.0.1:"), "{at}");
    let get = |what: &str| {
        ask(at, &format!("GET {what} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))
    };
    std::thread::sleep(Duration::from_millis(100));
    let page = get("/metrics");
    let (head, body) = page.split_once("\r\n\r\n").unwrap();
    assert!(
        head.starts_with("HTTP/1.1 200") && head.contains("text/plain; version=0.0.4"),
        "{head}"
    );
    // The body may come in pieces, each behind its length.
    let lines = body.lines().filter(|line| line.starts_with(['#', 'b'])).map(|l| Ok(l.to_owned()));
    let scrape = prometheus_parse::Scrape::parse(lines).unwrap();
    let pid = server.child.id().to_string();
    let ours = |s: &&prometheus_parse::Sample| s.labels.get("pid") == Some(&*pid);
    let received = "barewire_node_msgs_received_total";
    let sample = scrape.samples.iter().filter(ours).find(|s| s.metric == received).unwrap();
    assert!(
        matches!(sample.value, prometheus_parse::Value::Counter(n) if n >= 500.0),
        "{sample:?}"
    );
    assert!(get("/").starts_with("HTTP/1.1 200") && get("/x").starts_with("HTTP/1.1 404"));
    let put = ask(at, "DELETE /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    assert!(put.starts_with("HTTP/1.1 405"), "{put}");
    let taken = run(&["exporter", "--listen", at]);
    assert_eq!(taken.status.code(), Some(1));
    assert_eq!(String::from_utf8(taken.stderr).unwrap().lines().count(), 1);
    let prometheus = run(&["stats", "--prometheus", "--no-sessions", "--pid", &pid]);
    let text = String::from_utf8(prometheus.stdout).unwrap();
    assert!(text.contains(received) && !text.contains("peer="), "{text}");
    end(&mut exporter);
}

/// An exporter, and the address that it listens at.
fn exporter() -> (Child, String) {
    let mut exporter = command(&["exporter", "--listen", "127.0.0.1:0", "--json"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut said = String::new();
    BufReader::new(exporter.stdout.take().unwrap()).read_line(&mut said).unwrap();
    let said: Value = serde_json::from_str(&said).unwrap();
    let url = said["listening"].as_str().unwrap();
    let at = url.strip_prefix("http://").unwrap().strip_suffix("/metrics").unwrap();
    (exporter, at.to_owned())
}

/// Goal: the exporter ends although a client does not read its answers. Method: as many requests on
/// a connection as go, until their answers fill it.
#[test]
fn the_exporter_ends_beside_a_client_that_does_not_read() {
    let (mut exporter, at) = exporter();
    let mut slow = std::net::TcpStream::connect(at).unwrap();
    slow.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
    for _ in 0..60_000 {
        if slow.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").is_err() {
            break;
        }
    }
    std::thread::sleep(Duration::from_secs(2));
    terminate(&exporter);
    ends_soon(&mut exporter);
}

/// Goal: a switch says over HTTP what it counts, it alone, and as long as it runs.
#[test]
fn a_switch_offers_its_counters() {
    let other = Server::start(&segment());
    let dir = tempfile::tempdir().unwrap();
    let port = format!("memif:{},role=server", dir.path().join("nic.sock").display());
    let mut switch = command(&["switch", "--port", &port, "--metrics=127.0.0.1:0"])
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(switch.stderr.take().unwrap()).lines().map_while(Result::ok);
    let url = lines.find_map(|line| {
        Some(line.strip_prefix("its counters are at http://")?.strip_suffix("/metrics")?.to_owned())
    });
    let url = url.unwrap();
    assert!(url.starts_with("127.0.0.1:") && lines.any(|line| line.contains("Ctrl-C ends it")));
    let get = || ask(&url, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n");
    let until = std::time::Instant::now() + Duration::from_secs(10);
    while !get().contains("barewire_switch_forwarded_frames_total{") {
        assert!(std::time::Instant::now() < until, "{}", get());
    }
    assert!(!get().contains(&format!("\"{}\"", other.child.id())), "another process's");
    terminate(&switch);
    assert_eq!(ends_soon(&mut switch), Some(0));
    let none = command(&["switch", "--port", &port, "--metrics"])
        .env("BAREWIRE_STATS", "0")
        .output()
        .unwrap();
    let why = String::from_utf8(none.stderr).unwrap();
    assert_eq!(none.status.code(), Some(2));
    assert!(why.contains("unset BAREWIRE_STATS"), "{why}");
}

/// Goal: a screen of what runs, where there is no terminal: rates, and what waits for what.
#[test]
fn top_shows_what_runs() {
    let port = segment();
    let server = Server::start(&port);
    let args = ["bench", &server.addr, "--json", "--iterations", "100000000", "--size", "64"];
    let mut client = command(&[&args[..], &["--port", &port]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let pid = server.child.id().to_string();
    let screen = run(&["top", "--pid", &pid, "--interval", "0.5"]);
    let screen = String::from_utf8(screen.stdout).unwrap();
    let cells = |lines: usize| -> Vec<&str> {
        screen.lines().nth(lines).unwrap().split_whitespace().collect()
    };
    assert!(screen.starts_with("barewire top - 1 domain, 1 peer, by waiting"), "{screen}");
    let (domain, peer) = (cells(2), cells(4));
    assert_eq!((domain[0], domain[1], domain[6]), (&*pid, &*port, "1"), "{screen}");
    assert_ne!((domain[2], domain[4]), ("0", "0"), "{screen}");
    assert_eq!((peer[0], peer[2]), (&*pid, "near"), "{screen}");
    client.kill().unwrap();
    client.wait().unwrap();
}

/// Goal: how long round trips of a running process take is told on demand.
#[test]
fn round_trips_of_a_running_process_are_told() {
    let none = run(&["stats", "--round-trips", "0.1", "--pid", "4194303"]);
    assert_eq!(String::from_utf8(none.stdout).unwrap(), "no domain of process 4194303 is open\n");
    let port = format!("fault(loss=0.001,seed=3):{}", segment());
    let server = Server::start(&port);
    let args = ["bench", &server.addr, "--json", "--iterations", "100000000", "--size", "64"];
    let mut client = command(&[&args[..], &["--port", &port]].concat())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let pid = client.id().to_string();
    let told = objects(&run(&["stats", "--round-trips", "0.5", "--json", "--pid", &pid])).remove(0);
    client.kill().unwrap();
    client.wait().unwrap();
    let ns = |name: &str| told[name].as_u64().unwrap();
    assert!(ns("n") > 10 && 0 < ns("p50_ns") && ns("p50_ns") <= ns("p99_ns"), "{told}");
    let lengths = told["lengths"].as_array().unwrap().iter();
    assert_eq!(lengths.map(|l| l["count"].as_u64().unwrap()).sum::<u64>(), ns("n"), "{told}");
}

/// Ends a command in order.
fn end(child: &mut Child) {
    terminate(child);
    child.wait().unwrap();
}

fn terminate(child: &Child) {
    use nix::sys::signal::{Signal, kill};
    kill(nix::unistd::Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
}

/// The exit code of a command that ends within ten seconds.
fn ends_soon(child: &mut Child) -> Option<i32> {
    for _ in 0..1000 {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    panic!("it does not end");
}

/// A switch on one end of a memif, and the port of the other; ended with the test.
struct Switch {
    child: Child,
    port: String,
}

impl Switch {
    fn start() -> Self {
        Self::start_with(&[])
    }

    fn start_with(options: &[&str]) -> Self {
        let port = format!("memif:@cli-{}", segment().replace(':', "-"));
        let args = [&["switch", "--port", &port], options].concat();
        let child = command(&args).stderr(Stdio::null()).spawn().unwrap();
        let switch = Self { child, port };
        let pid = switch.child.id().to_string();
        for _ in 0..500 {
            if !objects(&run(&["stats", "--json", "--pid", &pid])).is_empty() {
                return switch;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        panic!("the switch publishes nothing");
    }

    fn published(&self) -> Value {
        objects(&run(&["stats", "--json", "--pid", &self.child.id().to_string()])).remove(0)
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// Goal: what a switch forwards is read from outside, by station; doctor knows it, and a second
/// one is told of it before it starts.
#[test]
fn a_switch_shows_what_it_forwards() {
    let switch = Switch::start();
    let other = format!("{},role=server,switch=no,near=no", switch.port);
    let server = Server::start(&format!("{},switch=yes", switch.port));
    let args = ["pingpong", &server.addr, "--port", &other, "--json", "--iterations", "300"];
    objects(&run(&[&args[..], &["--size", "64"]].concat()));
    std::thread::sleep(Duration::from_millis(500));
    let shown = switch.published();
    assert_eq!((&shown["kind"], &shown["port"]), (&"switch".into(), &switch.port.clone().into()));
    assert!(shown["frames"]["to_nic"].as_u64().unwrap() >= 300, "{shown}");
    assert!(shown["nic_counters"]["tx_frames"].as_u64().unwrap() >= 300, "{shown}");
    let station = &shown["stations"][0];
    assert_eq!(station["pid"], server.child.id());
    // What it announced before the other end was there went nowhere.
    let count = |name: &str| shown["frames"][name].as_u64().unwrap();
    assert_eq!(station["sent"], count("to_nic") + count("full"), "{shown}");
    assert!(station["received"].as_u64().unwrap() >= 300, "{shown}");
    let text = run(&["stats"]).stdout;
    assert!(String::from_utf8(text).unwrap().contains("switch, process"));
    let check = run(&["switch", "--check", "--port", &switch.port]);
    let said = String::from_utf8(check.stderr).unwrap();
    assert_eq!(check.status.code(), Some(1));
    assert!(said.contains(&format!("has a switch, process {}", switch.child.id())), "{said}");
    let doctor = String::from_utf8(run(&["doctor"]).stdout).unwrap();
    assert!(
        doctor.contains(&format!("{}: process {}", switch.port, switch.child.id())),
        "{doctor}"
    );
    let second = run(&["switch", "--port", &switch.port]);
    let said = String::from_utf8(second.stderr).unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(said.contains(&format!("has a switch, process {}", switch.child.id())), "{said}");
    // The port is what a process opens: one behind the switch.
    let check = &objects(&run(&["doctor", "--json", "--port", &switch.port]))[0];
    assert_eq!(check["status"], "ok", "{check}");
    assert!(check["found"].as_str().unwrap().contains("switch=yes"), "{check}");
}

/// Goal: a switch whose output nobody reads any more ends in order, and leaves nothing that its
/// processes would take for a switch.
#[test]
fn a_switch_that_nobody_reads_leaves_nothing() {
    let name = format!("cli-{}", segment().replace(':', "-"));
    let args = ["switch", "--port", &format!("memif:@{name}"), "--every", "1"];
    let mut command = command(&args);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains(&name), "{line}");
    assert_eq!(ends_soon(&mut child), Some(1));
    let mut said = String::new();
    child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(!said.contains("barewire:"), "{said}");
    let stats = format!(".{}.", child.id());
    let left = ["/dev/shm", "/run/barewire"].iter().flat_map(std::fs::read_dir).flatten();
    let left = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let of_it = |file: &String| {
        file.contains(&format!("{name}.")) || file.contains("stats") && file.contains(&stats)
    };
    assert_eq!(left.filter(of_it).collect::<Vec<_>>(), Vec::<String>::new());
}

/// A command as another user, who has no privilege.
fn as_user(uid: u32) -> impl Fn(&[&str]) -> Command {
    move |args| {
        let mut command = command(args);
        command.uid(uid).gid(uid);
        command
    }
}

/// Goal: users who may not open a device go through root's switch by the device's name, each seen
/// there with his number; whom it is not for hears what to ask for.
#[test]
fn users_go_through_the_switch_of_root() {
    const ALICE: u32 = 65_534;
    const BOB: u32 = 47_111;
    if !nix::unistd::geteuid().is_root() {
        println!("SKIPPED: only root can be several users");
        return;
    }
    if as_user(ALICE)(&["--version"]).output().is_err() {
        println!("SKIPPED: other users cannot run this build where it lies");
        return;
    }
    let switch = Switch::start();
    let port = format!("{},switch=yes", switch.port);
    let server = Server::start_by(as_user(ALICE), &port);
    let args = ["pingpong", &server.addr, "--port", &port, "--json", "--iterations", "300"];
    objects(&as_user(BOB)(&[&args[..], &["--size", "64"]].concat()).output().unwrap());
    // Somebody to be seen.
    let other = Server::start_by(as_user(BOB), &port);
    std::thread::sleep(Duration::from_millis(500));
    let shown = switch.published();
    assert!(shown["frames"]["between"].as_u64().unwrap() >= 600, "{shown}");
    let stations = shown["stations"].as_array().unwrap();
    for (uid, pid) in [(ALICE, server.child.id()), (BOB, other.child.id())] {
        assert!(stations.iter().any(|s| (&s["uid"], &s["pid"]) == (&uid.into(), &pid.into())));
    }
    let doctor = as_user(ALICE)(&["doctor"]).output().unwrap().stdout;
    let doctor = String::from_utf8(doctor).unwrap();
    assert!(doctor.contains("another user's at /run/barewire/switch-memif"), "{doctor}");
    for closed in [&["--user", "root"][..], &["--user", "1", "--user", "2"], &["--group", "root"]] {
        let switch = Switch::start_with(closed);
        let port = format!("{},switch=yes", switch.port);
        let asked = as_user(BOB)(&["pingpong", "--listen", "--port", &port]).output().unwrap();
        let said = String::from_utf8(asked.stderr).unwrap();
        assert_eq!(asked.status.code(), Some(1), "{said}");
        assert!(said.contains("--user") && said.contains("--group"), "{said}");
    }
}

/// Goal: a station that answers, one that is not there, one that restarted and one that does not
/// poll are told apart, by words and exit codes, beside what the process does.
#[test]
fn ping_tells_what_is_wrong_with_a_station() {
    let port = segment();
    let server = Server::start(&port);
    let ping = |addr: &str, more: &[&str]| {
        let args = ["ping", "--port", &port, addr, "--json", "--count", "3", "--interval", "0.001"];
        let output = run(&[&args[..], more].concat());
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(said["exit_code"], output.status.code().unwrap());
        (output.status.code().unwrap(), said)
    };
    let (code, said) = ping(&server.addr, &[]);
    assert_eq!((code, &said["verdict"]), (0, &"ok".into()), "{said}");
    assert_eq!(said["lengths"].as_array().unwrap().len(), 3, "{said}");
    assert!(said["station"].as_str().unwrap().contains(&server.child.id().to_string()), "{said}");
    let (code, said) = ping("02:00:00:00:00:01", &[]);
    assert_eq!((code, &said["verdict"]), (7, &"no_route".into()), "{said}");
    let (bare, _) = server.addr.split_once('#').unwrap();
    let (code, said) = ping(&format!("{bare}#1234"), &[]);
    assert_eq!((code, &said["verdict"]), (6, &"other_life".into()), "{said}");
    let pid = nix::unistd::Pid::from_raw(server.child.id() as i32);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGSTOP).unwrap();
    let (code, said) = ping(&server.addr, &["--timeout", "1.5"]);
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGCONT).unwrap();
    assert_eq!((code, &said["verdict"]), (11, &"not_polled".into()), "{said}");
    let doctor = run(&["doctor", "--port", &port, "--peer", &server.addr]);
    assert!(doctor.status.success(), "{doctor:?}");
    let text = String::from_utf8(doctor.stdout).unwrap();
    assert!(text.starts_with("ok       port") && text.contains("65534"), "{text}");
}

#[test]
fn info_opens_what_works_and_explains_the_rest() {
    let ports = objects(&run(&["info", "--json"]));
    let shm = ports.iter().find(|port| port["port"] == "shm").unwrap();
    assert_eq!(shm["works"], true, "{shm}");
    assert!(shm["mtu"].as_u64().unwrap() >= 256, "{shm}");
    for port in ports.iter().filter(|port| port["works"] == false) {
        assert!(port["why_not"].is_string(), "{port}");
    }
    let settings = objects(&run(&["info", "--settings", "--json"]));
    assert!(settings.iter().any(|s| s["variable"] == "BAREWIRE_T_DEAD_MS" && s["value"] == "1000"));
}

/// Goal: a variable that is empty is as if it were not set.
#[test]
fn an_empty_variable_is_none() {
    let args = ["capture", "--seconds", "1", "-o", "/dev/null"];
    let output = command(&args).env("BAREWIRE_PORT", "").output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success() && said.starts_with("capturing on shm"), "{said}");
}

/// The frames of a pcapng file of ours: time and bytes.
fn frames(file: &[u8]) -> Vec<(u64, Vec<u8>)> {
    let word = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
    let (mut at, mut frames) = (0, Vec::new());
    while at < file.len() {
        let len = word(at + 4) as usize;
        assert_eq!(word(at + len - 4) as usize, len, "block at {at}");
        if word(at) == 6 {
            let time = u64::from(word(at + 12)) << 32 | u64::from(word(at + 16));
            frames.push((time, file[at + 28..at + 28 + word(at + 20) as usize].to_vec()));
        }
        at += len;
    }
    frames
}

/// A bench between two other processes is captured whole, in order, and ended with Ctrl-C. What
/// was captured is what tshark with our dissector calls barewire.
#[test]
fn capture_sees_what_others_send() {
    let port = segment();
    let server = Server::start(&port);
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("run.pcapng");
    let file = path.to_str().unwrap();
    let mut capture =
        command(&["capture", "--port", &port, "-o", file]).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(capture.stderr.take().unwrap());
    let mut line = String::new();
    said.read_line(&mut line).unwrap();
    assert!(line.starts_with(&format!("capturing on {port}")), "{line}");
    // All of it fits into the capture's rings, should the capture not get to run.
    let args = ["pingpong", &server.addr, "--json", "--iterations", "200", "--size", "64"];
    objects(&run(&[&args[..], &["--port", &port, "--verify"]].concat()));
    std::thread::sleep(Duration::from_millis(100));
    let pid = nix::unistd::Pid::from_raw(i32::try_from(capture.id()).unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    assert_eq!(capture.wait().unwrap().code(), Some(0));
    line.clear();
    said.read_line(&mut line).unwrap();
    let bytes = std::fs::read(&path).unwrap();
    let frames = frames(&bytes);
    assert_eq!(line, format!("{} frames, 0 missed\n", frames.len()));
    // 200 there and 200 back, and the warm-up before.
    assert!(frames.len() > 400, "{line}");
    assert!(frames.iter().all(|(_, frame)| frame[12..14] == [0x88, 0xb5]));
    assert!(frames.windows(2).all(|two| two[0].0 <= two[1].0), "out of order");
    check_with_tshark(file, frames.len());
}

fn check_with_tshark(file: &str, count: usize) {
    if Command::new("tshark").arg("--version").output().is_err() {
        println!("SKIPPED: tshark is not installed (apt-get install tshark)");
        return;
    }
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/barewire.lua");
    let output = Command::new("tshark")
        .args(["-r", file, "-X", &format!("lua_script:{script}")])
        .args(["-Y", "barewire && !barewire.refused", "-T", "fields", "-e", "frame.number"])
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert_eq!(text.lines().count(), count, "{}", String::from_utf8_lossy(&output.stderr));
}

/// Goal: who asked for frames of a station that has none learns that there were others.
#[test]
fn capture_tells_of_frames_of_others() {
    let port = segment();
    let args =
        ["capture", "--port", &port, "-o", "-", "--seconds", "2", "--peer", "02:00:00:00:00:09"];
    let capture = command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    objects(&run(&["pingpong", "--spawn", "--json", "--iterations", "50", "--port", &port]));
    let output = capture.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("\n0 frames, "), "{said}");
    assert!(said.contains(" others, none with --peer; barewire stats lists stations"), "{said}");
}

#[test]
fn capture_ends_after_a_count() {
    let port = segment();
    let capture = command(&["capture", "--port", &port, "-o", "-", "--count", "10"])
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    objects(&run(&["pingpong", "--spawn", "--json", "--iterations", "50", "--port", &port]));
    let output = capture.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(0));
    assert_eq!(frames(&output.stdout).len(), 10);
}

/// Goal: a segment that nobody is in, of a mistyped name perhaps, is not waited at without a word.
#[test]
fn capture_says_that_nobody_is_there() {
    let port = segment();
    let said = |port: &str| {
        let output = run(&["capture", "--port", port, "-o", "/dev/null", "--seconds", "1"]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        String::from_utf8(output.stderr).unwrap().lines().next().unwrap().to_owned()
    };
    let nobody = format!("capturing on {port}, which no process has open yet; Ctrl-C ends it");
    assert_eq!(said(&port), nobody);
    let _server = Server::start(&port);
    assert_eq!(said(&port), format!("capturing on {port}; Ctrl-C ends it"));
}

/// Goal: of one station nothing else is written, and of many files the last stay, each whole.
#[test]
fn capture_is_of_one_peer_and_in_a_ring_of_files() {
    let port = segment();
    let (one, other) = (Server::start(&port), Server::start(&port));
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("a.pcapng");
    let mac = |server: &Server| server.addr["barewire://".len()..][..17].to_owned();
    let args = ["capture", "--port", &port, "-o", path.to_str().unwrap(), "--peer", &mac(&one)];
    let ring = ["--file-size", "64k", "--files", "3"];
    let mut capture = command(&[&args[..], &ring].concat()).stderr(Stdio::piped()).spawn().unwrap();
    let mut said = BufReader::new(capture.stderr.take().unwrap());
    said.read_line(&mut String::new()).unwrap();
    for server in [&one, &other, &one] {
        let args = ["pingpong", &server.addr, "--json", "--iterations", "500", "--size", "4k"];
        objects(&run(&[&args[..], &["--port", &port]].concat()));
        std::thread::sleep(Duration::from_millis(150));
    }
    end(&mut capture);
    let mut files: Vec<_> = std::fs::read_dir(&dir).unwrap().flatten().map(|e| e.path()).collect();
    files.sort();
    let number = |path: &std::path::PathBuf| -> u64 {
        let name = path.file_name().unwrap().to_str().unwrap();
        name.strip_prefix("a.").unwrap().strip_suffix(".pcapng").unwrap().parse().unwrap()
    };
    let mut numbers: Vec<u64> = files.iter().map(number).collect();
    numbers.sort_unstable();
    assert_eq!(numbers.len(), 3, "{files:?}");
    assert!(numbers[0] > 1 && numbers[2] == numbers[0] + 2, "{numbers:?}");
    let mac = mac(&one).split(':').map(|b| u8::from_str_radix(b, 16).unwrap()).collect::<Vec<_>>();
    for file in &files {
        let bytes = std::fs::read(file).unwrap();
        let frames = frames(&bytes);
        assert!(!frames.is_empty() && bytes.len() < 65 << 10, "{file:?}");
        let is_its = |frame: &[u8]| frame[..6] == *mac || frame[6..12] == *mac;
        assert!(frames.iter().all(|(_, frame)| is_its(frame)), "{file:?}");
    }
}

/// Goal: what goes through a switch is seen by the name of its device.
#[test]
fn capture_sees_what_a_switch_forwards() {
    let switch = Switch::start();
    let capture = command(&["capture", "--port", &switch.port, "-o", "-", "--count", "20"])
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let server = Server::start(&format!("{},switch=yes", switch.port));
    let other = format!("{},role=server,switch=no,near=no", switch.port);
    let args = ["pingpong", &server.addr, "--port", &other, "--json", "--iterations", "100"];
    objects(&run(&[&args[..], &["--size", "64"]].concat()));
    let output = capture.wait_with_output().unwrap();
    let frames = frames(&output.stdout);
    assert_eq!(frames.len(), 20);
    assert!(frames.iter().all(|(_, frame)| frame[12..14] == [0x88, 0xb5]));
}

#[test]
fn capture_says_why_it_cannot() {
    for (port, out) in [("udp:1", "-"), ("fault(loss=0.1):shm", "-"), ("shm", "/no/such/x")] {
        let output = run(&["capture", "--port", port, "-o", out]);
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{port} {out}: {text}");
        assert_eq!(text.lines().count(), 1, "{port} {out}: {text}");
    }
}

/// A capture whose standard output is a pipe, and its first line on standard error.
fn capture_to_pipe(port: &str, output: &str) -> (Child, BufReader<ChildStderr>) {
    let mut capture = command(&["capture", "--port", port, "-o", output])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(capture.stderr.take().unwrap());
    (capture, said)
}

/// The exit code, in at most `patience`.
fn code_within(child: &mut Child, patience: Duration) -> Option<i32> {
    let begun = Instant::now();
    while begun.elapsed() < patience {
        if let Some(status) = child.try_wait().unwrap() {
            return status.code();
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    panic!("still runs after {patience:?}");
}

/// Goal: `barewire capture -o - | head` ends without a word, with frames to write and without.
#[test]
fn capture_ends_with_its_reader() {
    for has_frames in [false, true] {
        let port = segment();
        let (mut capture, mut said) = capture_to_pipe(&port, "-");
        let mut head = [0; 28];
        let mut reader = capture.stdout.take().unwrap();
        reader.read_exact(&mut head).unwrap();
        if has_frames {
            objects(&run(&["pingpong", "--spawn", "--json", "--iterations", "9", "--port", &port]));
        }
        drop(reader);
        assert_eq!(code_within(&mut capture, Duration::from_secs(20)), Some(1));
        let mut text = String::new();
        said.read_to_string(&mut text).unwrap();
        assert!(text.starts_with("capturing on ") && text.lines().count() == 1, "{text}");
    }
}

/// Goal: a signal ends a capture that waits for the reader of a pipe, full or not open yet.
#[test]
fn capture_that_waits_for_a_reader_hears_signals() {
    use nix::sys::signal::{Signal, kill};
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("x.pcapng");
    nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).unwrap();
    for (output, signal) in [("-", Signal::SIGTERM), (fifo.to_str().unwrap(), Signal::SIGINT)] {
        let port = segment();
        let (mut capture, mut said) = capture_to_pipe(&port, output);
        if output == "-" {
            said.read_line(&mut String::new()).unwrap();
            // Far more than a pipe takes.
            let args = ["pingpong", "--spawn", "--json", "--iterations", "500", "--size", "4k"];
            objects(&run(&[&args[..], &["--port", &port]].concat()));
        }
        std::thread::sleep(Duration::from_millis(500));
        assert!(capture.try_wait().unwrap().is_none());
        kill(nix::unistd::Pid::from_raw(capture.id() as i32), signal).unwrap();
        assert_eq!(code_within(&mut capture, Duration::from_secs(20)), Some(1));
        let mut text = String::new();
        said.read_to_string(&mut text).unwrap();
        assert_eq!(text, format!("barewire: {output}: ended before its reader took everything\n"));
    }
}

/// Goal: what a stranger sends where client and server speak to each other ends no run. Method: a
/// third endpoint sends both of them what neither can have said, more of each than receives wait
/// for it, while a run goes on.
#[test]
fn frames_of_other_stations_do_not_end_a_run() {
    let port = segment();
    let stderr = tempfile::NamedTempFile::new().unwrap();
    let to = stderr.reopen().unwrap();
    let mut server = Server::start_by(
        |args| {
            let mut command = command(args);
            command.stderr(to.try_clone().unwrap());
            command
        },
        &port,
    );
    let args = ["pingpong", &server.addr, "--port", &port, "--json", "--seconds", "2"];
    let client = command(&[&args[..], &["--size", "8,64"]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // Said after the warm-up, of which each run has one.
    let served = server.next_line();
    let stranger = Stranger::on(&port);
    let of_other_side = |kind: u8| {
        let mut record = [0; 64];
        record[..7].copy_from_slice(&[0x62, 0x77, 0x70, 0x70, 2, 0, kind]);
        record.to_vec()
    };
    for (addr, kind) in [(served["client"].as_str().unwrap(), 5), (&server.addr, 2)] {
        for said in [vec![], vec![0; 64], vec![7; 65], vec![1; 4096], of_other_side(kind)] {
            for _ in 0..9 {
                stranger.say(addr, &said);
            }
        }
    }
    let output = client.wait_with_output().unwrap();
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{told}");
    assert_eq!(lines(std::str::from_utf8(&output.stdout).unwrap()).len(), 2);
    let at_server = std::fs::read_to_string(stderr.path()).unwrap();
    for told in [told, at_server] {
        assert_eq!(told.matches("a control message is dropped").count(), 1, "{told}");
        assert_eq!(told.lines().count(), 1, "{told}");
    }
    let args = ["pingpong", &server.addr, "--port", &port, "--json", "--iterations", "9"];
    objects(&run(&args));
}

/// An endpoint that sends what it likes as a control message of a measurement.
struct Stranger {
    ep: barewire::Endpoint,
    av: barewire::Av,
    domain: barewire::Domain,
    cq: barewire::Cq,
}

impl Stranger {
    fn on(port: &str) -> Self {
        use barewire::{AvAttr, CqAttr, DomainAttr, Info, Settings, flags::BindFlags};
        let settings = Settings { port: Some(port.to_owned()), ..Settings::default() };
        let domain_attr = DomainAttr { name: Some(port.to_owned()), ..DomainAttr::default() };
        let hints = Info { domain_attr, ..Info::default() };
        let none = barewire::flags::InfoFlags::empty();
        let version = barewire::API_VERSION;
        let infos = barewire::getinfo_with(&settings, version, None, None, none, Some(&hints));
        let mut info = infos.unwrap().remove(0);
        let fabric = barewire::fabric(&info.fabric_attr).unwrap();
        let domain = fabric.domain_with(&info, settings).unwrap();
        let cq = domain.cq_open(CqAttr::default()).unwrap();
        let av = domain.av_open(AvAttr::default()).unwrap();
        info.src_addr = None;
        let ep = domain.endpoint(&info).unwrap();
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
        ep.bind_av(&av).unwrap();
        ep.enable().unwrap();
        Self { ep, av, domain, cq }
    }

    /// Sends, and waits until it has arrived.
    fn say(&self, addr: &str, bytes: &[u8]) {
        let mut peer = [barewire::FI_ADDR_UNSPEC];
        self.av.insert(&[addr.parse().unwrap()], &mut peer).unwrap();
        let mut buf = barewire::Buf::from(bytes.to_vec());
        while let Err(refused) = self.ep.tsend(buf, peer[0], 0x6261_7265_0000_0001, 1) {
            assert_eq!(refused.error, barewire::Error::Again);
            buf = refused.bufs.into_one().unwrap();
            self.domain.progress().unwrap();
        }
        let (begun, mut one) = (Instant::now(), [barewire::Completion::default()]);
        while let Err(why) = self.cq.read(&mut one) {
            assert_eq!(why, barewire::Error::Again, "{:?}", self.cq.readerr());
            assert!(begun.elapsed() < Duration::from_secs(20), "nobody takes it");
        }
    }
}
