//! Many senders and one receiver behind one port of a switch whose buffer is short: what every
//! gather, every all-to-all and every server meets on Ethernet.

use std::collections::VecDeque;
use std::time::Instant;

use super::nightly;
use crate::arena::Buf;
use crate::net::{ETH_GAP, NetStats};
use crate::plan::Plan;
use crate::rig::Rig;

const KIB: usize = 1024;
const MS: u64 = 1_000_000;

/// Least goodput, most frames that find no room, least share of the slowest sender over the mean.
const BARS: [f64; 3] = [0.85, 0.12, 0.05];

/// Headers of a packet of messages, its checksum, and the Ethernet header.
const HEADERS: usize = 16 + 22 + 4 + 14;

/// One case.
#[derive(Clone, Copy, Debug)]
struct Case {
    senders: usize,
    /// Bytes of a message, and messages that each sender has under way.
    len: usize,
    under_way: usize,
    /// Bytes that the port holds.
    buffer: u64,
    /// How long a frame waits there until it is marked, if any is.
    mark_ns: Option<u64>,
    bps: u64,
    /// How long it lasts at least.
    least_ns: u64,
}

/// What came of it.
#[derive(Clone, Copy, Debug)]
struct Outcome {
    /// Goodput over what the port can carry.
    goodput: f64,
    /// Of the frames, those that found no room.
    overflowed: f64,
    /// Messages of the slowest sender over the mean.
    slowest: f64,
}

/// Goal: a port that many send to carries about what it can, drops little, and starves nobody.
/// Method: 8 to 64 senders at 10 Gbit/s, 5 us one way, with messages that are sent at once and
/// messages that are pulled, by way of a port of the same rate that holds 128 KiB or 1 MiB.
#[test]
fn incast() {
    let start = Instant::now();
    println!("incast: senders, length x under way, buffer, mark: goodput overflowed slowest");
    let (buffers, marks): (&[usize], &[_]) = match nightly() {
        true => (&[128, 256, 512, 1024, 4096], &[None, Some(20_000)]),
        false => (&[128, 1024], &[None]),
    };
    let mut bad = Vec::new();
    for &kib in buffers {
        for (len, under_way) in [(8 * KIB, 4), (64, 64), (256 * KIB, 1)] {
            for senders in [8, 32, 64] {
                for &mark_ns in marks {
                    let buffer = (kib * KIB) as u64;
                    let (bps, least_ns) = (10_000_000_000, 50 * MS);
                    let case = Case { senders, len, under_way, buffer, mark_ns, bps, least_ns };
                    bad.extend(is_out_of_bounds(case));
                }
            }
        }
    }
    println!("incast: time {:.1} s", start.elapsed().as_secs_f64());
    assert!(bad.is_empty(), "out of bounds {BARS:?}: {bad:#?}");
}

/// Goal: the same where it lasts, so that windows which a standing queue keeps small begin to
/// compete for it. Method: 1 Gbit/s for four seconds.
#[test]
fn incast_that_lasts() {
    let mut bad = Vec::new();
    for kib in [128, 1024] {
        for (len, under_way, senders) in [(8 * KIB, 4, 64), (64 * KIB, 4, 8)] {
            let (buffer, bps, least_ns) = ((kib * KIB) as u64, 1_000_000_000, 4000 * MS);
            let case = Case { senders, len, under_way, buffer, mark_ns: None, bps, least_ns };
            bad.extend(is_out_of_bounds(case));
        }
    }
    assert!(bad.is_empty(), "out of bounds {BARS:?}: {bad:#?}");
}

/// Goal: what a program gathers in bursts, computing between them, takes little longer than the
/// port needs for it, whatever window each sender has left from the burst before; longer if what
/// finds no room is the end of a burst, which only a timer misses. Method: all senders send at
/// once, and again ten milliseconds after all of it has arrived; twenty bursts.
#[test]
fn gathers_in_bursts() {
    const BURSTS: usize = 20;
    let (bps, least_ns) = (10_000_000_000, 0);
    println!("bursts: senders, length x each, buffer: mean most of the least time, dropped");
    let mut slow = Vec::new();
    for kib in [128, 1024] {
        for (senders, len, under_way, bar) in
            [(8, 8 * KIB, 4, 3.0), (64, 8 * KIB, 4, 3.0), (64, 256 * KIB, 1, 1.1)]
        {
            let buffer = (kib * KIB) as u64;
            let case = Case { senders, len, under_way, buffer, mark_ns: None, bps, least_ns };
            let (took, overflowed) = bursts(case, BURSTS);
            let least_ns = 8e9 * (senders * under_way * on_cable(len)) as f64 / bps as f64 + 10e3;
            // Windows and round trips are those of earlier bursts from the sixth on.
            let took = &took[5..];
            let mean = took.iter().sum::<u64>() as f64 / took.len() as f64 / least_ns;
            let most = took.iter().max().map_or(0.0, |most| *most as f64) / least_ns;
            let line = format!(
                "bursts: {senders:>2} {len:>6} x {under_way} {kib:>4} KiB: {mean:.2} {most:.2} of \
                 {:.0} us, {overflowed:.3}",
                least_ns / 1e3,
            );
            println!("{line}");
            if mean > bar {
                slow.push(line);
            }
        }
    }
    assert!(slow.is_empty(), "too slow: {slow:#?}");
}

/// How long each burst takes, nanoseconds, and the share of the frames that found no room.
fn bursts(case: Case, count: usize) -> (Vec<u64>, f64) {
    let Case { senders, len, under_way, .. } = case;
    let mut rig = Rig::new(plan_of(&case), senders + 1);
    let peers: Vec<_> = (1..=senders).map(|host| rig.peer(host, 0, 1)).collect();
    let per_burst = senders * under_way;
    let mut bufs: Vec<VecDeque<Buf>> = Vec::new();
    for host in 0..=senders {
        let n = if host == 0 { 2 * per_burst } else { 2 * under_way };
        bufs.push((0..n).map(|_| rig.at(host).arena.take(len).expect("memory")).collect());
    }
    let mut took = Vec::new();
    for _ in 0..count {
        let from = rig.net.now;
        let mut take = |host: usize| {
            let buf = bufs[host].pop_front().expect("twice as many");
            bufs[host].push_back(buf);
            buf
        };
        for _ in 0..per_burst {
            assert!(rig.recv(0, None, take(0), 0));
        }
        for host in 1..=senders {
            for _ in 0..under_way {
                assert!(rig.send(host, peers[host - 1], take(host), 0));
            }
        }
        let (mut got, mut done) = (0, 0);
        while got < per_burst || done < per_burst {
            let (more, polled) = rig.step(from + 10_000 * MS);
            assert!(more, "{got} of {per_burst}");
            let Some(host) = polled else { continue };
            while rig.read(host).is_some() {
                if host == 0 {
                    got += 1;
                    if got == per_burst {
                        took.push(rig.net.now - from);
                    }
                } else {
                    done += 1;
                }
            }
        }
        let until = rig.net.now + 10 * MS;
        rig.run_to(until);
    }
    (took, rig.net.stats.overflowed as f64 / rig.net.stats.frames as f64)
}

/// Plays a case, prints what came of it, and returns that if it is out of the bounds.
fn is_out_of_bounds(case: Case) -> Option<String> {
    let Case { senders, len, under_way, buffer, mark_ns, .. } = case;
    let Outcome { goodput, overflowed, slowest } = run(case);
    let line = format!(
        "incast: {senders:>2} {len:>6} x {under_way:>2} {:>4} KiB {:>2} us: \
         {goodput:.3} {overflowed:.3} {slowest:.2}",
        buffer as usize / KIB,
        mark_ns.unwrap_or(0) / 1000,
    );
    println!("{line}");
    let is_bad = goodput < BARS[0] || overflowed > BARS[1] || slowest < BARS[2];
    is_bad.then_some(line)
}

fn plan_of(case: &Case) -> Plan {
    let hosts = case.senders + 1;
    let mut plan = Plan::calm(1, 0);
    plan.hosts = hosts;
    plan.link.mtu = vec![1500; hosts];
    (plan.link.port_bytes, plan.link.mark_ns) = (Some(case.buffer), case.mark_ns);
    plan.link.bps = case.bps;
    plan.link.rx_ring = 4096;
    plan.caller.poll_ns = 200.0;
    plan.node.eager_max = 16 << 10;
    plan.node.pull_window = 4 << 20;
    plan.node.unexpected_bytes = 8 << 20;
    plan.node.peer_max = hosts;
    plan.node.rx_wr_max = 2 * case.senders * case.under_way;
    plan.node.cq_size = 2 * plan.node.rx_wr_max.max(256);
    plan
}

/// Bytes on the cable of a message.
fn on_cable(len: usize) -> usize {
    let frames = len.div_ceil(1514 - HEADERS);
    len + frames * (HEADERS + ETH_GAP as usize)
}

/// The senders send for a while, which begins once each has got a message through.
fn run(case: Case) -> Outcome {
    let Case { senders, len, under_way, .. } = case;
    let plan = plan_of(&case);
    let bytes_per_s = plan.link.bps as f64 / 8.0;
    let mut rig = Rig::new(plan, senders + 1);
    let mut bufs: Vec<VecDeque<Buf>> = (0..=senders).map(|_| VecDeque::new()).collect();
    let peers: Vec<_> = (1..=senders).map(|host| rig.peer(host, 0, 1)).collect();
    for (host, bufs) in bufs.iter_mut().enumerate() {
        // Twice as many buffers as operations: the one used longest ago is free.
        let count = if host == 0 { senders * under_way } else { under_way };
        for i in 0..2 * count {
            let buf = rig.at(host).arena.take(len).expect("fresh memory");
            match (i < count, host) {
                (true, 0) => assert!(rig.recv(0, None, buf, 0)),
                (true, _) => assert!(rig.send(host, peers[host - 1], buf, 0)),
                (false, _) => bufs.push_back(buf),
            }
        }
    }
    // Twenty messages of each, or more.
    let all_ns = 20e9 * (senders * on_cable(len)) as f64 / bytes_per_s;
    let lasts = case.least_ns.max(all_ns as u64);
    let (mut from, mut until) = (u64::MAX, rig.net.now + 2_000 * MS);
    let (mut got, mut done, mut open) = (0_usize, vec![0_u64; senders + 1], 0);
    let mut before = NetStats::default();
    while let (true, polled) = rig.step(until) {
        let Some(host) = polled else { continue };
        if from == u64::MAX && open == senders {
            (from, until) = (rig.net.now + 5 * MS, rig.net.now + 5 * MS + lasts);
            done.fill(0);
        }
        let counts = rig.net.now >= from;
        if !counts {
            before = rig.net.stats;
        }
        while rig.read(host).is_some() {
            let buf = bufs[host].pop_front().expect("as many as are under way");
            bufs[host].push_back(buf);
            if host == 0 {
                got += usize::from(counts);
                assert!(rig.recv(0, None, buf, 0));
            } else {
                open += usize::from(from == u64::MAX && done[host] == 0);
                done[host] += u64::from(counts || from == u64::MAX);
                assert!(rig.send(host, peers[host - 1], buf, 0));
            }
        }
    }
    assert!(from < until, "{open} of {senders} senders got a message through in two seconds");
    let after = rig.net.stats;
    let frames = (after.frames - before.frames).max(1) as f64;
    let seconds = (until - from) as f64 / 1e9;
    let least = done[1..].iter().min().map_or(0, |n| *n) as f64;
    Outcome {
        goodput: (got * on_cable(len)) as f64 / seconds / bytes_per_s,
        overflowed: (after.overflowed - before.overflowed) as f64 / frames,
        slowest: least * senders as f64 / done.iter().sum::<u64>().max(1) as f64,
    }
}
