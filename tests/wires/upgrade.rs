//! Switches that are replaced, under load, by those of a build whose segments have another layout.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use barewire_tests::nodes::{FABRIC, Nodes, or_skip};
use barewire_tests::rng::Rng;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::capture::barewire;
use crate::members::{Told, all_to_all};
use crate::supervisor::Worker;
use crate::switch::{NIC, PORT};
use crate::users::{ALICE, nodes, start_as};
use crate::{kills, start};

/// Makes the command one of a build with another layout; in test builds alone.
const PRETEND: (&str, &str) = ("BAREWIRE_TEST_LAYOUT", "4711");

/// The command `barewire switch` in a node.
struct SwitchProcess {
    child: Child,
    is_other: bool,
}

impl SwitchProcess {
    /// Starts it, of another build if `is_other`, and returns when it forwards.
    fn start(nodes: &Nodes, node: usize, is_other: bool) -> Self {
        let mut command = nodes.command(node, barewire().unwrap());
        command.args(["switch", "--json", "--port", NIC]).envs(is_other.then_some(PRETEND));
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let said: Vec<String> = lines
            .by_ref()
            .map_while(Result::ok)
            .take_while(|line| !line.starts_with("a switch on"))
            .collect();
        assert!(child.try_wait().unwrap().is_none(), "{said:?}");
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, is_other }
    }

    /// Ends it, by `kill -9` or as systemd does. Then it reports: the relayed stations and others.
    fn end(mut self, signal: Signal) -> Option<[usize; 2]> {
        kill(Pid::from_raw(self.child.id() as i32), signal).unwrap();
        let mut report = String::new();
        self.child.stdout.take().unwrap().read_to_string(&mut report).unwrap();
        self.child.wait().unwrap();
        let report: serde_json::Value = serde_json::from_str(report.lines().last()?).unwrap();
        let frames = &report["frames"];
        assert!(frames["spoofed"] == 0 && frames["malformed"] == 0, "{report}");
        let stations = report["stations"].as_array().unwrap();
        let relayed = stations.iter().filter(|of| of["relayed"] == true).count();
        Some([relayed, stations.len() - relayed])
    }
}

impl Drop for SwitchProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
    }
}

/// Goal: an upgrade or a downgrade of the switch to a build with another segment layout, under
/// load, fails no operation of processes that run, whatever their user, and changes no byte; near
/// peers never notice. Method: `barewire switch` of either node is ended at random times, by
/// kill -9 or as systemd does, and started again as of the other build, while members send all to
/// all. What the switches report says that each build served them its way.
#[test]
fn switches_of_another_layout_take_over() {
    let Some(nodes) = nodes() else { return };
    let places = [(0, 0), (0, 0), (0, ALICE), (1, 0), (1, ALICE)];
    let begin = |i: usize| match places[i] {
        (node, 0) => start(&nodes, node, "member", PORT),
        (node, uid) => start_as(&nodes, node, uid, "member", PORT),
    };
    replace_switches(&nodes, places.len(), begin, kills(12), 31);
}

/// The same without a privilege: switches of the processes' own user alone.
#[test]
fn own_switches_of_another_layout_take_over() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    assert!(NIC.contains(FABRIC));
    let begin = |i: usize| start(&nodes, i % 2, "member", PORT);
    replace_switches(&nodes, 4, begin, kills(8), 32);
}

fn replace_switches(
    nodes: &Nodes,
    count: usize,
    begin: impl Fn(usize) -> Worker,
    times: u32,
    seed: u64,
) {
    let Some(_) = or_skip(barewire()) else { return };
    println!("seed {seed}");
    let mut rng = Rng::new(seed, 0);
    let mut owners = [0, 1].map(|node| Some(SwitchProcess::start(nodes, node, false)));
    let (mut replaced, mut next) = (0, Instant::now());
    // Stations that were served through a socket, and through memory, by either build.
    let mut served = [[0; 2]; 2];
    while replaced < times {
        let told = all_to_all(count, &begin, || {
            std::thread::sleep(Duration::from_millis(1));
            if Instant::now() < next || replaced == times {
                return;
            }
            let node = rng.index(2);
            let old = owners[node].take().unwrap();
            let is_other = old.is_other;
            let signal = rng.pick(&[Signal::SIGKILL, Signal::SIGTERM]);
            if let Some([relayed, others]) = old.end(signal) {
                served[usize::from(is_other)][0] += relayed;
                served[usize::from(is_other)][1] += others;
            }
            std::thread::sleep(Duration::from_millis(rng.index(50) as u64));
            owners[node] = Some(SwitchProcess::start(nodes, node, !is_other));
            replaced += 1;
            next = Instant::now() + Duration::from_millis(300 + rng.index(300) as u64);
        });
        check(&told, count);
    }
    println!("{replaced} replaced; stations by socket and memory: {served:?}");
    assert!(served[0][0] == 0 && served[0][1] > 0, "{served:?}");
    assert!(served[1][0] > 0 && served[1][1] == 0, "{served:?}");
}

/// Every member has a session with each other one, and none with a near one repeated a packet.
fn check(told: &[(String, Told)], count: usize) {
    let sessions = told.iter().flat_map(|(_, of)| of.sessions.values());
    let near: Vec<_> = sessions.filter(|(frame, _)| *frame == 65_520).collect();
    assert!(told.iter().all(|(_, of)| of.sessions.len() == count - 1), "{told:?}");
    assert!(near.len() >= 2 && near.iter().all(|(_, repeated)| *repeated == 0), "{told:?}");
}
