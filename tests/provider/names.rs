//! Servers that clients know by host and service: X1 (node, service and `FI_SOURCE` give the
//! address), X19 (formats of addresses) and X21 (`fi_av_insertsvc`, `fi_av_insertsym`).

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

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
        let args = ["serve", server[0], server[1], format];
        let mut command = self.program(1, ports[1], &args);
        let mut serving = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(serving.stdout.take().unwrap()).lines();
        let mut said: Vec<String> = Vec::new();
        while said.last().is_none_or(|line| line != "up") {
            said.push(lines.next().unwrap_or_else(|| panic!("{args:?}: {said:?}")).unwrap());
        }
        let asked = self.program(0, ports[0], &["ask", client[0], client[1], format]);
        said.push(succeed(&mut { asked }, 60));
        said.extend(lines.map(Result::unwrap));
        assert!(serving.wait().unwrap().success(), "{said:?}");
        said.join("\n")
    }
}

fn with_hosts(test: impl FnOnce(&Hosts)) {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        if !Path::new("/usr/include/rdma/fabric.h").exists() {
            println!("SKIPPED: no rdma/fabric.h: sudo apt-get install libfabric-dev");
            return;
        }
        let dirs = [(); 2].map(|()| tempfile::tempdir().unwrap());
        let program = compile(dirs[0].path(), &["cc", "-lfabric"], "names.c");
        let Some(cluster) = or_skip(Cluster::new(2, dirs[1].path())) else { return };
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
            (&udp, ["none", "2001:db8::1", "7", "in"], "udp ports carry IPv4"),
            (&udp, ["none", "10.78.0.2", "7", "in6"], "FI_SOCKADDR_IN6"),
            (&udp, ["none", "10.78.0.2", "http", "in"], "a service is a number"),
            ("shm", ["none", "10.78.0.2", "7", "in"], "nobody else is known by name"),
        ] {
            let mut command = hosts.program(0, port, &args);
            let said = succeed(command.env("FI_LOG_LEVEL", "warn"), 30);
            assert!(said.contains("ok nobody\n") && said.contains(says), "{args:?}: {said}");
            // A name takes as long as the resolver does.
            let ms = said.lines().find_map(|line| line.strip_prefix("told after "));
            let ms: u32 = ms.unwrap().trim_end_matches(" ms").parse().unwrap();
            assert!(ms < 300 || says.contains("resolver"), "{args:?}: {said}");
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

/// Goal: `fi_pingpong HOST` runs between two hosts over `udp:`, by number and by name.
#[test]
fn fi_pingpong_finds_a_host_over_udp() {
    with(&[("fi_pingpong", "libfabric-bin")], |_| {});
    with_hosts(|hosts| {
        let port = format!("udp:{CONTROL}");
        let on = |node: usize, args: &[&str]| {
            let mut command = hosts.bench.using(hosts.cluster.command(node, "fi_pingpong"));
            command.args(["-p", "barewire", "-e", "rdm", "-I", "50"]).args(args);
            command.env("FI_BAREWIRE_PORT", &port);
            command
        };
        for host in ["10.79.0.2", "node1"] {
            let mut server = on(1, &[]);
            let mut serving = server.stdout(Stdio::null()).spawn().unwrap();
            let start = std::time::Instant::now();
            // The client gives up at once if the server does not listen yet.
            let said = loop {
                let output = finish(&mut on(0, &[host]), 60);
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
        let there = "there are lo 127.0.0.1, fab0 10.78.0.1, ctl0 10.79.0.1";
        assert!(lines.len() == 1 && lines[0].contains(there), "{said}");
    });
}
