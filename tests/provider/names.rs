//! Servers that clients know by host and service: X1 (node, service and `FI_SOURCE` give the
//! address), X19 (formats of addresses) and X21 (`fi_av_insertsvc`, `fi_av_insertsym`).

use std::io::{BufRead, BufReader, Lines, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};

use barewire_tests::cluster::{CONTROL, Cluster};
use barewire_tests::nodes::{FABRIC, or_skip};

use super::{Bench, compile, finish, succeed, text, with};

/// Two hosts, `node0` and `node1`, which know each other's names, and the program.
struct Hosts<'a> {
    bench: &'a Bench,
    cluster: Cluster,
    program: PathBuf,
    _dirs: [tempfile::TempDir; 2],
}

impl Hosts<'_> {
    /// The program on a host, over its port.
    fn program(&self, node: usize, port: &str, args: &[&str]) -> Command {
        let mut command = self.bench.using(self.cluster.command(node, &self.program));
        command.args(args).env("FI_BAREWIRE_PORT", port);
        command
    }

    /// A server on host 1 and a client on host 0, each with its node and service.
    fn talk(&self, ports: [&str; 2], server: [&str; 2], client: [&str; 2], format: &str) -> String {
        let serving = self.serve(1, ports[1], [server[0], server[1], format]);
        serving.asked(self.program(0, ports[0], &["ask", client[0], client[1], format]))
    }

    /// A server on a host, when it is up.
    fn serve(&self, node: usize, port: &str, args: [&str; 3]) -> Serving {
        let mut command = self.program(node, port, &["serve", args[0], args[1], args[2]]);
        command.env("FI_LOG_LEVEL", "warn").stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut said: Vec<String> = Vec::new();
        while said.last().is_none_or(|line| line != "up") {
            said.push(lines.next().unwrap_or_else(|| panic!("{args:?}: {said:?}")).unwrap());
        }
        Serving { child, lines, said }
    }
}

/// A server that waits for its client.
struct Serving {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    said: Vec<String>,
}

impl Serving {
    /// Runs its client, and returns what both said.
    fn asked(mut self, mut client: Command) -> String {
        self.said.push(succeed(&mut client, 60));
        self.said.extend(self.lines.map(Result::unwrap));
        assert!(self.child.wait().unwrap().success(), "{:?}", self.said);
        self.said.join("\n")
    }

    /// Kills it, and returns its log.
    fn kill(mut self) -> String {
        self.child.kill().unwrap();
        text(&self.child.wait_with_output().unwrap())
    }
}

/// A port on which services are asked for.
const WIRE: &str = "afpacket:fab0";

fn with_hosts(test: impl FnOnce(&Hosts)) {
    with_many(2, test);
}

fn with_many(count: usize, test: impl FnOnce(&Hosts)) {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let program = compile(dirs[0].path(), &["cc", "-lfabric"], "names.c");
        let Some(cluster) = or_skip(Cluster::new(count, dirs[1].path())) else { return };
        for node in 0..count {
            let ip = format!("addr add 2001:db8::{}/64 dev {FABRIC} nodad", node + 1);
            cluster.nodes().ip(node, &ip).unwrap();
        }
        test(&Hosts { bench, cluster, program, _dirs: dirs });
    });
}

/// Goal: over `udp:` a client finds a server of another host by its IPv4 address or its name and a
/// service, whether that is a UDP port of the fabric or any other number, in both forms of
/// addresses.
#[test]
fn a_server_on_another_host_is_found_by_number_and_name_over_udp() {
    let port = format!("udp:{CONTROL}");
    let port = [port.as_str(), &port];
    with_hosts(|hosts| {
        for format in ["native", "in"] {
            for service in ["7471", "52001"] {
                hosts.talk(port, ["-", service], ["10.79.0.2", service], format);
            }
            hosts.talk(port, ["node1", "9228"], ["node1", "9228"], format);
            hosts.talk(port, ["10.79.0.2", "9228"], ["node1", "9228"], format);
        }
        let said = hosts.talk(port, ["-", "7471"], ["node1", "7471"], "in");
        for line in [
            "source 10.79.0.2:7471",
            "name 10.79.0.2:7471",
            "destination 10.79.0.2:7471",
            "name 10.79.0.1:52000",
        ] {
            assert!(said.lines().any(|said| said == line), "no {line} in\n{said}");
        }
        // Who names no service is the first process of its host, and found as that.
        let said = hosts.talk(port, ["-", "-"], ["node1", "-"], "in");
        assert!(said.contains("name 10.79.0.2:52000\n"), "{said}");
    });
}

/// Goal: over a wire whose addresses are MACs a client finds a server of another host by IPv4, IPv6
/// and name, in each form of addresses, and by a `sockaddr` that the program made itself, whichever
/// interface of the host has the address.
#[test]
fn a_server_on_another_host_is_found_on_a_wire() {
    with_hosts(|hosts| {
        for format in ["native", "in", "in6"] {
            for host in ["10.78.0.2", "10.79.0.2", "2001:db8::2", "node1"] {
                let serving = hosts.serve(1, WIRE, ["-", "7471", format]);
                let said = serving.asked(hosts.program(0, WIRE, &["ask1", host, "7471", format]));
                if host == "10.78.0.2" && format == "in" {
                    assert!(said.contains("name 10.78.0.2:7471"), "{said}");
                    assert!(said.contains("destination 10.78.0.2:7471"), "{said}");
                }
                if host == "2001:db8::2" && format == "in6" {
                    assert!(said.contains("destination [2001:db8::2]:7471"), "{said}");
                }
            }
        }
        for (host, format) in [("10.78.0.2", "in"), ("2001:db8::2", "in6")] {
            let serving = hosts.serve(1, WIRE, [host, "9228", format]);
            serving.asked(hosts.program(0, WIRE, &["bare", host, "9228", format]));
        }
        // Who names no service is found as the first that serves one.
        let serving = hosts.serve(1, WIRE, ["-", "-", "in"]);
        let said = serving.asked(hosts.program(0, WIRE, &["ask1", "node1", "52000", "in"]));
        assert!(said.contains("name 10.78.0.2:52000"), "{said}");
        let mapped = format!("udp:{CONTROL}");
        let serving = hosts.serve(1, &mapped, ["-", "7471", "in6"]);
        let said = serving.asked(hosts.program(0, &mapped, &["ask", "10.79.0.2", "7471", "in6"]));
        assert!(said.contains("destination [::ffff:10.79.0.2]:7471"), "{said}");
    });
}

/// Goal: what is found is what is there: a server that restarted, and one whose NIC got another
/// MAC, are found again; of two on a host that ask for one service the second is told so; and two
/// hosts that have the same address are told of, by the client and by who was there first.
#[test]
fn names_on_a_wire_follow_who_serves_them() {
    with_many(3, |hosts| {
        let ask = || hosts.program(0, WIRE, &["ask1", "10.78.0.2", "7471", "in"]);
        hosts.serve(1, WIRE, ["-", "7471", "in"]).kill();
        hosts.serve(1, WIRE, ["-", "7471", "in"]).asked(ask());
        let nodes = hosts.cluster.nodes();
        nodes.ip(1, &format!("link set {FABRIC} address 02:00:00:00:77:01")).unwrap();
        let serving = hosts.serve(1, WIRE, ["-", "7471", "in"]);
        let mut second = hosts.program(1, WIRE, &["serve", "-", "7471", "in"]);
        let said = text(&finish(second.env("FI_LOG_LEVEL", "warn"), 30));
        assert!(said.contains("-98") && said.contains("another process of this host"), "{said}");
        serving.asked(ask());
        // The same from the same host, through memory.
        let serving = hosts.serve(1, WIRE, ["-", "7471", "in"]);
        serving.asked(hosts.program(1, WIRE, &["ask1", "localhost", "7471", "in"]));

        for node in [1, 2] {
            nodes.ip(node, &format!("addr add 10.78.0.50/24 dev {FABRIC}")).unwrap();
        }
        let servers = [1, 2].map(|node| hosts.serve(node, WIRE, ["-", "7471", "in"]));
        let mut client = hosts.program(0, WIRE, &["ask1", "10.78.0.50", "7471", "in"]);
        let said = text(&finish(client.env("FI_LOG_LEVEL", "warn"), 60));
        assert!(said.contains("say that they serve service 7471 there"), "{said}");
        let [first, _] = servers.map(Serving::kill);
        assert!(first.contains("says that it serves 7471 at an address of this host"), "{first}");
    });
}

/// `barewire switch` on a host, until it is dropped.
struct Switch(Child);

impl Switch {
    fn start(hosts: &Hosts, node: usize) -> Self {
        let program = hosts.bench.dir.join("barewire");
        let mut command = hosts.bench.seeing(hosts.cluster.command(node, program));
        command.args(["switch", "--json", "--port", WIRE]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let said = BufReader::new(child.stderr.as_mut().unwrap()).lines().next();
        let said = said.unwrap_or_else(|| panic!("no switch on node {node}")).unwrap();
        assert!(said.starts_with("a switch on afpacket:fab0"), "{said}");
        Self(child)
    }

    /// Ends it, and returns what it counted.
    fn end(mut self) -> String {
        let pid = nix::unistd::Pid::from_raw(self.0.id() as i32);
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
        let mut said = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        said
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Goal: a server is found by the address and by the name of its host where both sides are behind
/// `barewire switch`, and through memory by a client of its own host; and none where none is.
#[test]
fn a_server_behind_a_switch_is_found() {
    with_hosts(|hosts| {
        if !hosts.bench.dir.join("barewire").is_file() {
            println!("SKIPPED: the command is not built: cargo build -p barewire-cli");
            return;
        }
        let switches = [0, 1].map(|node| Switch::start(hosts, node));
        for (client, host, format) in [
            (0, "10.78.0.2", "in"),
            (0, "node1", "native"),
            (0, "2001:db8::2", "in6"),
            (1, "10.78.0.2", "in"),
        ] {
            let serving = hosts.serve(1, WIRE, ["-", "7471", format]);
            serving.asked(hosts.program(client, WIRE, &["ask1", host, "7471", format]));
        }
        let mut client = hosts.program(0, WIRE, &["none", "10.78.0.2", "7471", "in"]);
        let said = succeed(client.env("FI_LOG_LEVEL", "warn"), 30);
        assert!(said.contains("none answered that it serves service 7471"), "{said}");
        for switch in switches {
            let said = switch.end();
            let counted: serde_json::Value = serde_json::from_str(&said).unwrap();
            let sent = counted["frames"]["to_nic"].as_u64().unwrap_or(0);
            assert!(sent > 10, "not through the switch: {said}");
        }
    });
}

/// Goal: a process finds a server of its own host as well, whichever of its addresses it names.
#[test]
fn a_server_of_the_own_host_is_found_too() {
    let port = format!("udp:{FABRIC}");
    with_hosts(|hosts| {
        for node in ["127.0.0.1", "localhost", "10.78.0.2"] {
            let args = ["serve", "localhost", "7471", "in"];
            let mut command = hosts.program(1, &port, &args);
            let mut serving = command.stdout(Stdio::piped()).spawn().unwrap();
            let mut lines = BufReader::new(serving.stdout.take().unwrap()).lines();
            assert!(lines.any(|line| line.unwrap() == "up"));
            succeed(&mut hosts.program(1, &port, &["ask", node, "7471", "in"]), 60);
            assert!(serving.wait().unwrap().success());
        }
    });
}

/// Goal: a name that leads to nobody is `FI_ENODATA` at once, and the log says who was asked.
#[test]
fn names_of_nobody_are_no_data_and_say_who_was_asked() {
    let udp = format!("udp:{FABRIC}");
    with_hosts(|hosts| {
        for (port, args, says) in [
            (udp.as_str(), ["none", "no-host.invalid", "7", "native"], "resolver says: "),
            (&udp, ["none", "203.0.113.1", "7", "native"], "no way to 203.0.113.1 from 10.78.0.1"),
            (&udp, ["none", "2001:db8::1", "7", "in"], "the port carries IPv4"),
            (&udp, ["none", "2001:db8::1", "7", "in6"], "the port carries IPv4"),
            (WIRE, ["none", "10.78.0.2", "7", "in"], "none answered that it serves service 7"),
            (WIRE, ["none", "2001:db8::7", "7", "in6"], "none answered that it serves service 7"),
            (WIRE, ["none", "10.78.0.77", "-", "native"], "none answered that it serves a service"),
            (WIRE, ["none", "node1", "7", "native"], "(10.79.0.2): every station on the segment"),
            (
                WIRE,
                ["none", "no-host.invalid", "7", "in"],
                "by a broadcast, and within 300 ms none",
            ),
            (&udp, ["none", "10.78.0.2", "http", "in"], "a service is a number"),
            ("shm", ["none", "10.78.0.2", "7", "in"], "this port resolves no other host"),
        ] {
            let bound = match (port, args[1]) {
                // As long as the system's resolver takes.
                (_, "no-host.invalid") => u32::MAX,
                (WIRE, _) => 600,
                _ => 300,
            };
            // Numbers of namespaces come again: for half a minute a switch that another test killed
            // is waited for, 2 s each time.
            let mut tries: Vec<u32> = Vec::new();
            while tries.iter().all(|ms| *ms >= bound) {
                assert!(tries.len() < 12, "{args:?} over {port} took {tries:?} ms");
                if !tries.is_empty() {
                    std::thread::sleep(std::time::Duration::from_secs(3));
                }
                let mut command = hosts.program(0, port, &args);
                let said = succeed(command.env("FI_LOG_LEVEL", "warn"), 30);
                assert!(said.contains("ok nobody\n") && said.contains(says), "{args:?}: {said}");
                let ms = said.lines().find_map(|line| line.strip_prefix("told after "));
                tries.push(ms.unwrap().trim_end_matches(" ms").parse().unwrap());
            }
        }
        // A source that is not the port's, and a UDP port that is settled.
        for (port, node, service) in
            [(udp.clone(), "10.78.0.2", "7471"), (format!("{udp}:52000"), "10.78.0.1", "7471")]
        {
            let mut command = hosts.program(0, &port, &["serve", node, service, "in"]);
            let output = finish(command.env("FI_LOG_LEVEL", "warn"), 30);
            let said = text(&output);
            assert!(said.contains("-61") && said.contains("port"), "{said}");
        }
    });
}

/// Goal: `fi_pingpong HOST` runs between two hosts over `udp:` and a wire, by number and by name,
/// and over `ip(...)` by its address.
#[test]
fn fi_pingpong_finds_a_host() {
    with(&[("fi_pingpong", "libfabric-bin")], |_| {});
    with_hosts(|hosts| {
        let udp = format!("udp:{CONTROL}");
        let on = |node: usize, port: &str, args: &[&str]| {
            let mut command = hosts.bench.using(hosts.cluster.command(node, "fi_pingpong"));
            command.args(["-p", "barewire", "-e", "rdm", "-I", "50"]).args(args);
            command.env("FI_BAREWIRE_PORT", port.replace("NODE", &(node + 1).to_string()));
            command
        };
        let ip = format!("ip(10.78.0.NODE/24):{WIRE}");
        let ports = [udp.as_str(), WIRE];
        let hosts_of = ports.iter().flat_map(|port| [(*port, "10.79.0.2"), (*port, "node1")]);
        for (port, host) in hosts_of.chain([(ip.as_str(), "10.78.0.2")]) {
            let mut server = on(1, port, &[]);
            let mut serving = server.stdout(Stdio::null()).spawn().unwrap();
            let start = std::time::Instant::now();
            // The client gives up at once if the server does not listen yet.
            let said = loop {
                let output = finish(&mut on(0, port, &[host]), 60);
                if output.status.success() || start.elapsed().as_secs() > 20 {
                    break text(&output);
                }
                std::thread::sleep(std::time::Duration::from_millis(100));
            };
            assert!(said.lines().any(|line| line.starts_with("1m ")), "{host}: {said}");
            assert!(serving.wait().unwrap().success());
        }
    });
}

/// Goal: one setting serves all nodes: a network, a pattern of names, among which other names of an
/// interface, and preferences, of which each node takes the first that would open; the log says
/// which it is and why.
#[test]
fn one_setting_names_the_port_of_each_node() {
    with_hosts(|hosts| {
        for node in ["node0", "node1"] {
            let mut command = Command::new(hosts.cluster.agent());
            let added =
                command.args([node, "ip link property add dev fab0 altname rail7"]).output();
            if !added.is_ok_and(|output| output.status.success()) {
                println!("SKIPPED: ip link knows no altname here: sudo apt-get install iproute2");
                return;
            }
        }
        for port in [
            "udp:10.78.0.0/16",
            "udp:fab*",
            "udp:rail?",
            "udp:rail7",
            "afpacket:zz*|udp:fab?",
            "vfio:fffe:00:00.0|udp:10.78.0.0/24,mtu=900",
        ] {
            hosts.talk([port; 2], ["-", "7471"], ["10.78.0.2", "7471"], "in");
        }
        for (port, is) in [
            ("afpacket:10.78.0.0/16", "afpacket:fab0"),
            ("afpacket:rail*", "afpacket:fab0"),
            ("udp:10.79.0.0/16:52007,near=no", "udp:10.79.0.1:52007,near=no"),
            ("udp:fab*|shm", "udp:10.78.0.1"),
            ("auto:10.79.0.0/16", "afpacket:ctl0"),
        ] {
            let mut command = hosts.bench.using(hosts.cluster.command(0, "fi_info"));
            command.env("FI_BAREWIRE_PORT", port).env("FI_LOG_LEVEL", "info");
            let said = succeed(&mut command, 30);
            assert!(said.contains(&format!("domain: {is}\n")), "{port}: {said}");
            assert!(said.contains(&format!("port {port} is {is} here")), "{port}: {said}");
        }
        // Nothing fits: told once, by default, with what there is.
        let mut command = hosts.bench.using(hosts.cluster.command(0, "fi_info"));
        let output = finish(command.env("FI_BAREWIRE_PORT", "udp:192.0.2.0/24"), 30);
        let said = text(&output);
        let lines: Vec<_> = said.lines().filter(|line| line.contains("fits udp:")).collect();
        let there = "fab0 10.78.0.1 [2001:db8::1]/96, ctl0 10.79.0.1";
        assert!(lines.len() == 1 && lines[0].contains(there), "{said}");
    });
}
