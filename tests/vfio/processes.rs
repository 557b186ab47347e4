//! Two processes with a NIC each, joined by a hub.

use std::time::Duration;

use barewire::*;

use crate::machine::{deaf_time, nic};
use crate::supervisor::{PATIENCE, Rng, Worker};
use crate::worker::{Node, T_DEAD, nap, open, pattern, settings};

fn ports() -> Option<[String; 2]> {
    Some([format!("vfio:{}", nic(0)?), format!("vfio:{}", nic(1)?)])
}

fn wait(node: &Node, context: u64) -> Completion {
    let mut one = [Completion::default()];
    let start = std::time::Instant::now();
    loop {
        match node.cq.read(&mut one) {
            Ok(_) if one[0].op_context == context => return std::mem::take(&mut one[0]),
            Ok(_) => {}
            Err(Error::Again) => nap(),
            Err(_) => panic!("{}", node.cq.readerr().unwrap()),
        }
        assert!(start.elapsed() < PATIENCE, "no completion");
    }
}

pub(crate) fn there_and_back(mine: &str, theirs: &str, lens: &[usize]) {
    let mut quiet = settings();
    quiet.t_dead = Duration::from_secs(10);
    let node = open(mine, quiet);
    let mut echo = Worker::start("echo", "echo", theirs);
    echo.say(&format!("PEER {}", node.ep.getname().unwrap()));
    let peer = node.knows(&echo.addr.clone());
    for &len in lens {
        echo.say(&format!("SIZE {len}"));
        node.ep.trecv(Buf::zeroed(len), peer, len as u64, 0, 1).unwrap();
        let sent = pattern(len, len as u64);
        node.ep.tsend(Buf::from(sent.clone()), peer, len as u64, 2).unwrap();
        let got = wait(&node, 1);
        assert_eq!((got.len, got.src), (len, peer));
        assert!(got.bytes() == sent, "{len} bytes came back changed");
        // The echo's send needs us until it has ended.
        while !echo.try_answer("ECHOED") {
            let _ = node.domain.progress();
            nap();
        }
    }
    echo.say("END");
    echo.finish();
}

/// Lengths around every limit of the port and the protocol.
#[test]
fn messages_of_every_length_survive_the_round_trip() {
    let Some([a, b]) = ports() else { return };
    let lens = [0, 1, 255, 256, 257, 1400, 1500, 1501, 16_383, 16_384, 16_385, 1 << 20];
    there_and_back(&a, &b, &lens);
}

#[test]
fn messages_in_jumbo_frames() {
    let Some([a, b]) = ports() else { return };
    let [a, b] = [a, b].map(|port| format!("{port},mtu=9000"));
    there_and_back(&a, &b, &[0, 8900, 9000, 9001, 1 << 20]);
}

/// Goal: two NICs of one machine talk by IPv4 with no kernel on the way.
#[test]
fn messages_inside_ip() {
    let Some([a, b]) = ports() else { return };
    let [a, b] = [format!("ip(10.78.5.1/24):{a}"), format!("ip(10.78.5.2/24):{b}")];
    there_and_back(&a, &b, &[0, 1, 256, 257, 1457, 1458, 1459, 16_385, 1 << 20]);
}

/// Goal: the same by IPv6: the NICs hear the groups that questions for addresses go to. Not virtual
/// functions, whose driver does not ask for groups (`docs/wires.md`, "IPv6").
#[test]
fn messages_inside_ipv6() {
    let Some([a, b]) = ports() else { return };
    let of_function = format!("/sys/bus/pci/devices/{}/physfn", nic(0).unwrap_or_default());
    if std::path::Path::new(&of_function).exists() {
        return;
    }
    let ip = |host: u8, port: &str| format!("ip([2001:db8::a4e:5{host:02x}]/96):{port}");
    there_and_back(&ip(1, &a), &ip(2, &b), &[0, 1, 257, 1437, 1438, 1439, 16_385, 1 << 20]);
}

/// One frame in twenty is lost on the way out of either NIC, some change their order or arrive
/// twice.
#[test]
fn messages_over_a_bad_link() {
    let Some([a, b]) = ports() else { return };
    let bad = |port| format!("fault(loss=0.05,dup=0.01,reorder=0.02,corrupt=0.01,seed=3):{port}");
    there_and_back(&bad(a), &bad(b), &[0, 1, 256, 1499, 1500, 1501, 16_385, 300_000]);
}

fn introduce(a: &mut Worker, b: &mut Worker) {
    let (to_a, to_b) = (format!("PEER {}", b.addr), format!("PEER {}", a.addr));
    a.say(&to_a);
    b.say(&to_b);
}

fn drained(worker: &mut Worker) -> Vec<u64> {
    let answer = worker.answer("DRAINED");
    answer.split_whitespace().map(|n| n.parse().unwrap()).collect()
}

/// Goal: kill -9 of either process leaves the NIC fit for the next one, and every operation of the
/// survivor ends in time. The kernel has to stop the device that the dead process left running.
#[test]
fn kill_9_of_either_process() {
    let Some(ports) = ports() else { return };
    let deaf = nic(0).map_or(Duration::ZERO, |nic| deaf_time(&nic));
    kills(&ports, deaf, 4);
}

/// Kills one of two processes and the other by turns, `rounds` times, and has each time a fresh one
/// take its place; the NICs hear nothing for `deaf` after their start.
pub(crate) fn kills(ports: &[String; 2], deaf: Duration, rounds: usize) {
    let mut rng = Rng::new(5);
    let start = |n: usize| Worker::start(&format!("worker {n}"), "traffic", &ports[n]);
    let mut pair = [start(0), start(1)];
    {
        let [a, b] = &mut pair;
        introduce(a, b);
    }
    for round in 0..rounds {
        std::thread::sleep(deaf + Duration::from_millis(50 + rng.below(300)));
        let victim = round % 2;
        let [a, b] = pair;
        let (dead, mut alive) = if victim == 0 { (a, b) } else { (b, a) };
        dead.kill();
        alive.say("KILLED");
        let numbers = drained(&mut alive);
        let (ms, starved) = (numbers[0], numbers[1]);
        let bound = T_DEAD.as_millis() as u64 * 11 / 10;
        assert!(ms <= bound + starved, "{ms} ms, not {bound}; {starved} ms starved");
        let mut fresh = start(victim);
        introduce(&mut alive, &mut fresh);
        pair = if victim == 0 { [fresh, alive] } else { [alive, fresh] };
    }
    std::thread::sleep(deaf + Duration::from_millis(500));
    for worker in &mut pair {
        worker.say("QUIET");
    }
    let counts: Vec<Vec<u64>> = pair.iter_mut().map(drained).collect();
    assert!(counts.iter().all(|c| c[4] > 0), "the last two never talked: {counts:?}");
    for worker in &mut pair {
        worker.say("STOP");
    }
    for mut worker in pair {
        let levels = worker.answer("LEVELS");
        assert!(levels.starts_with("0 "), "{}: something did not come back: {levels}", worker.name);
        worker.finish();
    }
    println!("{rounds} kills, {counts:?}");
}
