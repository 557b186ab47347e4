//! Programs that choose `tcp` by its name and know hosts by their IP address (`FI_BAREWIRE_AS`),
//! under Debian's libfabric: X1, X19, and endpoints of both types.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use barewire_tests::cluster::{CONTROL, Cluster};
use barewire_tests::nodes::{FABRIC, or_skip};

use super::{Bench, compile, finish, succeed, text, with};

const NAMES: [&str; 2] = ["tcp", "tcp;ofi_rxm"];

/// The ports of a wire and of UDP on the hosts of a cluster, and none, which is `auto`.
fn ports() -> [Option<String>; 3] {
    [Some(format!("afpacket:{FABRIC}")), Some(format!("udp:{FABRIC}")), None]
}

/// `command` over `port`, for which we are called `name`; without one it runs on libfabric's.
fn under(bench: &Bench, command: Command, name: Option<&str>, port: Option<&str>) -> Command {
    let mut command = bench.seeing(command);
    if let Some(name) = name {
        command.env("FI_BAREWIRE_AS", name);
    }
    if let Some(port) = port {
        command.env("FI_BAREWIRE_PORT", port);
    }
    command
}

fn with_hosts(packages: &[(&str, &str)], test: impl FnOnce(&Bench, &Cluster)) {
    with(packages, |bench| {
        let dir = tempfile::tempdir().unwrap();
        let Some(cluster) = or_skip(Cluster::new(2, dir.path())) else { return };
        test(bench, &cluster);
    });
}

/// Goal: under either name the provider is the only one of that name, with what goes with it; who
/// does not ask for that gets libfabric's; and a name that is none is told.
#[test]
fn the_name_is_ours_when_that_is_set_and_libfabrics_otherwise() {
    with(&[("fi_info", "libfabric-bin")], |bench| {
        let info = |name, port, args: &[&str]| {
            let mut command = under(bench, Command::new("fi_info"), name, port);
            text(&finish(command.args(args), 30))
        };
        for (name, protocol) in NAMES.into_iter().zip(["FI_PROTO_XNET", "FI_PROTO_RXM"]) {
            let said = info(Some(name), Some("udp:127.0.0.1"), &["-p", name, "-t", "FI_EP_RDM"]);
            for line in
                [&format!("provider: {name}"), "domain: lo", &format!("    protocol: {protocol}")]
            {
                assert!(said.lines().any(|said| said.trim() == line.trim()), "no {line}: {said}");
            }
            assert_eq!(said.matches("provider: ").count(), 1, "{said}");
            let said = info(Some(name), None, &["-p", "barewire"]);
            assert!(!said.contains("provider: "), "one name at a time: {said}");
        }
        let said = info(Some("tcp"), Some("shm"), &["-p", "tcp", "-t", "FI_EP_MSG"]);
        assert!(said.contains("protocol: FI_PROTO_SOCK_TCP"), "{said}");
        assert_eq!(said.matches("provider: ").count(), 1, "{said}");
        let said = info(Some("tcp"), Some("shm"), &["-e"]);
        assert!(said.contains("FI_BAREWIRE_PORT") && !said.contains("FI_TCP_T_DEAD"), "{said}");

        let said = info(None, None, &["-p", "tcp"]);
        assert!(said.contains("provider: tcp") && !said.contains("ethernet"), "{said}");
        let said = info(Some("tpc"), None, &["-p", "tcp"]);
        assert!(
            said.contains("BAREWIRE_AS=\"tpc\": expected barewire, tcp or tcp;ofi_rxm"),
            "{said}"
        );
    });
}

/// Goal: a client that chooses by name, looks for the domain of its interface and hands on nothing
/// but IP address and port reaches another host over every kind of port.
#[test]
fn a_client_that_chooses_by_name_reaches_a_host_by_its_ip_address() {
    with_hosts(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench, cluster| {
        if !Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["cc", "-lfabric"], "chosen.c");
        for (name, port) in NAMES.iter().flat_map(|name| ports().map(|port| (*name, port))) {
            let on = |node: usize, args: &[&str]| {
                let mut command = cluster.command(node, &program);
                command.args(args);
                under(bench, command, Some(name), port.as_deref())
            };
            // An address of another interface is one of the host, but on `udp:`.
            let is_udp = port.as_deref().is_some_and(|port| port.starts_with("udp"));
            let (interface, network) =
                if is_udp { (FABRIC, "10.78.0") } else { (CONTROL, "10.79.0") };
            let mut server = on(1, &[name, interface, &format!("{network}.2")]);
            let mut serving = server.stdout(Stdio::piped()).spawn().unwrap();
            let mut lines =
                BufReader::new(serving.stdout.take().unwrap()).lines().map(Result::unwrap);
            let line = lines.find(|line| line.starts_with("at ")).unwrap_or_default();
            let at = line.trim_start_matches("at ");
            assert!(at.starts_with("10.7"), "{name} {port:?}: {line}");
            let args = [name, interface, &format!("{network}.1"), at];
            let said = succeed(&mut on(0, &args), 60);
            assert!(said.contains("ok end"), "{name} {port:?}: {said}");
            assert!(serving.wait().unwrap().success(), "{:?}", lines.collect::<Vec<_>>());
        }
    });
}

/// Goal: of the clients that are not run here those are answered which can be, as docs/provider.md
/// says of each. Method: their own hints.
#[test]
fn clients_that_are_not_run_are_answered() {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["cc", "-lfabric"], "clients.c");
        for name in NAMES {
            let mut command = Command::new(&program);
            command.args([name, "lo", "127.0.0.1"]);
            let said = succeed(&mut under(bench, command, Some(name), Some("udp:127.0.0.1")), 60);
            assert!(said.contains("ok end\n") && !said.contains("BAD"), "{name}: {said}");
        }
    });
}

/// A `fi_pingpong` server on host 1 and its client on host 0, each under a name; what the client
/// said.
fn pingpong(
    bench: &Bench,
    cluster: &Cluster,
    args: &[&str],
    names: [Option<&str>; 2],
    port: Option<&str>,
) -> Output {
    let on = |node: usize, more: &[&str]| {
        let mut command = cluster.command(node, "fi_pingpong");
        command.args(["-I", "20"]).args(args).args(more);
        under(bench, command, names[node], port)
    };
    let mut serving = on(1, &[]).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let start = Instant::now();
    // The client gives up at once if the server does not listen yet.
    let output = loop {
        let output = finish(&mut on(0, &["10.79.0.2"]), 60);
        if !text(&output).contains("failed to connect") || start.elapsed().as_secs() > 20 {
            break output;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    };
    if !output.status.success() {
        let _ = serving.kill();
    }
    serving.wait().unwrap();
    output
}

/// Goal: `fi_pingpong -p tcp HOST` runs between two hosts with both types of endpoints.
#[test]
fn fi_pingpong_runs_under_the_name_of_tcp() {
    with_hosts(&[("fi_pingpong", "libfabric-bin")], |bench, cluster| {
        for port in ports() {
            for (name, ep) in [("tcp", "rdm"), ("tcp", "msg"), ("tcp;ofi_rxm", "rdm")] {
                let args = ["-p", name, "-e", ep];
                let output = pingpong(bench, cluster, &args, [Some(name); 2], port.as_deref());
                let said = text(&output);
                assert!(said.lines().any(|l| l.starts_with("1m ")), "{name} {ep} {port:?}: {said}");
            }
        }
    });
}

/// Goal: a job of which one side still is on libfabric's tcp ends with an error, whichever side.
#[test]
fn a_job_of_both_kinds_of_tcp_is_refused() {
    with_hosts(&[("fi_pingpong", "libfabric-bin")], |bench, cluster| {
        for port in ports() {
            for names in [[Some("tcp"), None], [None, Some("tcp")]] {
                let args = ["-p", "tcp", "-e", "msg"];
                let start = Instant::now();
                let output = pingpong(bench, cluster, &args, names, port.as_deref());
                assert!(!output.status.success(), "{names:?} {port:?}: {}", text(&output));
                assert!(start.elapsed().as_secs() < 20, "{names:?} {port:?}");
                println!("{names:?} {port:?} {:?} {}", start.elapsed(), text(&output));
            }
        }
    });
}
