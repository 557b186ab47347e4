//! Stages that end in a figure: goodput, time to detect a death, memory of a session.

use std::collections::VecDeque;
use std::time::Instant;

use barewire_dataplane::error::Error;
use barewire_dataplane::node::Node;
use barewire_dataplane::psn::Psn;
use barewire_dataplane::types::Instant as Moment;
use barewire_dataplane::wire::{self, AckOp, Base, Op, OpenOp, Ty};
use barewire_driver::frame::{ETH_HDR_LEN, RxFrame};
use barewire_driver::port::{MacAddr, Station, Tx};

use super::{for_seeds, nightly};
use crate::ledger::ensure;
use crate::net::NetStats;
use crate::plan::Plan;
use crate::rig::Rig;
use crate::rng::Rng;
use crate::world::{caps, guarded};

const KIB: usize = 1024;
const MS: u64 = 1_000_000;

/// Goal: bars B5 and B6. Method: sixteen messages of 64 KiB always under way from one node to
/// another, 10 Gbit/s, 5 us one way; with and without exponential reordering; the mean of four
/// seeds. Line is what the
/// cable can carry in payload with our headers, preambles and gaps.
#[test]
fn goodput() {
    let start = Instant::now();
    println!("goodput: MTU reorder loss: goodput / ((1 - loss) x line)");
    let plain = [(0.0, 0.99), (0.001, 0.99), (0.01, 0.99), (0.05, 0.97), (0.2, 0.90)];
    let reorder = [(0.0, 0.90), (0.001, 0.90), (0.01, 0.90), (0.05, 0.90), (0.1, 0.85)];
    let mut short = Vec::new();
    for mtu in [1500, 4160] {
        for (jitter_us, bars) in [(0, plain), (20, reorder)] {
            for (loss, bar) in bars {
                let seeds = 1..=if loss == 0.0 { 1 } else { 4 };
                let sum: f64 = (seeds.clone())
                    .map(|seed| {
                        let mut plan = stream_plan(seed, mtu, loss);
                        plan.link.jitter_ns = f64::from(jitter_us) * 1000.0;
                        stream(plan, 64 * KIB, if nightly() { 8192 } else { 1024 })
                    })
                    .sum();
                let share = sum / f64::from(*seeds.end() as u32);
                let line = format!("goodput: {mtu} {jitter_us} us {loss}: {share:.4} (bar {bar})");
                println!("{line}");
                if share < bar {
                    short.push(line);
                }
            }
        }
    }
    println!("goodput: time {:.1} s", start.elapsed().as_secs_f64());
    assert!(short.is_empty(), "below the bars of `delay.rs`: {short:#?}");
}

/// Goal: a session fills a path on which a thousand packets are under way, also where some get
/// lost. Method: 100 Gbit/s, 50 us one way, 1,500 bytes, and sixteen messages of 256 KiB under way;
/// beside it a window of 256 packets, which is 0.3 of the path.
#[test]
fn a_long_fat_path_is_filled() {
    println!("long fat path: window loss: goodput / ((1 - loss) x line)");
    let rows = [(4096, 0.0, 0.93), (4096, 0.0001, 0.85), (4096, 0.001, 0.80), (256, 0.0, 0.2)];
    let mut short = Vec::new();
    for (window, loss, bar) in rows {
        let mut plan = stream_plan(1, 1500, loss);
        plan.node.windows = [window; 4];
        (plan.link.bps, plan.link.latency_ns) = (100_000_000_000, 50_000);
        let share = stream(plan, 256 * KIB, 512);
        let line = format!("long fat path: {window} {loss}: {share:.4} (bar {bar})");
        println!("{line}");
        if share < bar || window == 256 && share > 0.31 {
            short.push(line);
        }
    }
    assert!(short.is_empty(), "out of bounds: {short:#?}");
}

/// Goal: a path that marks frames which meet a long queue keeps its goodput, and its queue is
/// short. Method: the stream of [`goodput`] by way of a transmitter with room for 4,096 frames,
/// which marks those that wait for more than 10 us, and one that marks none.
#[test]
fn marks_keep_a_queue_short() {
    let [plain, marked] = [None, Some(10_000)].map(|mark_ns| {
        let mut plan = stream_plan(1, 1500, 0.0);
        (plan.link.tx_ring, plan.link.mark_ns) = (4096, mark_ns);
        let (share, stats) = stream_with_stats(plan, 64 * KIB, 1024);
        let queue_us = stats.queued_ns as f64 / stats.frames as f64 / 1000.0;
        println!("marks {mark_ns:?}: {share:.4}, {queue_us:.1} us, {} marked", stats.marked);
        (share, queue_us, stats.marked)
    });
    assert!(plain.2 == 0 && marked.2 > 100);
    assert!(marked.0 > 0.97, "goodput {} with marks, and no more than 0.97", marked.0);
    assert!(marked.1 < 10.0 && marked.1 < plain.1 / 1.5, "{} of {} us", marked.1, plain.1);
}

/// Goal: a session whose path becomes longer, as its route changes, nearly fills it within three
/// seconds, and at last as a new session does, with as short a queue: it takes the longer round
/// trip for the path's and no more for a queue. Method: the stream of [`goodput`] at 1 Gbit/s, and
/// 1 ms one way instead of 5 us after a while; the fourth second after it, and the sixteenth.
#[test]
fn a_path_that_becomes_longer_is_filled_again() {
    const BEFORE: u64 = 500;
    const LONGER_NS: u64 = MS;
    const SECOND: u64 = 1_000 * MS;
    let mut plan = stream_plan(1, 1500, 0.0);
    plan.link.bps = 1_000_000_000;
    let mut rig = Rig::new(plan.clone(), 2);
    plan.link.latency_ns = LONGER_NS;
    let (new, stats) = stream_with_stats(plan, 64 * KIB, 3000);
    let new_queue_us = stats.queued_ns as f64 / stats.frames as f64 / 1000.0;
    let (mut longer_at, mut from, mut ends) = (0, (0, 0, rig.net.stats), VecDeque::from([4, 16]));
    let mut seen = Vec::new();
    stream_on(&mut rig, 64 * KIB, u64::MAX, |rig, got| {
        if got == BEFORE {
            rig.net.link.latency_ns = LONGER_NS;
            longer_at = rig.net.now;
        }
        let Some(end) = ends.front().map(|end| longer_at + end * SECOND) else { return false };
        if got < BEFORE || rig.net.now < end - SECOND {
            from = (rig.net.now, got, rig.net.stats);
        } else if rig.net.now >= end {
            let (at, count, before) = from;
            let (queued, frames) =
                (rig.net.stats.queued_ns - before.queued_ns, rig.net.stats.frames - before.frames);
            let share = share_of_line(rig, 64 * KIB, got - count, at);
            seen.push((share, queued as f64 / frames as f64 / 1000.0));
            ends.pop_front();
        }
        true
    });
    println!(
        "longer path: {seen:.4?} (share, us of queue); a new session {new:.4}, {new_queue_us:.4}"
    );
    let [soon, at_last] = [seen[0].0 / new, seen[1].0 / new];
    assert!(soon > 0.8 && at_last > 0.95, "{soon} and {at_last} of a new session's {new}");
    assert!(seen[1].1 < 2.0 * new_queue_us + 50.0, "a queue of {} us", seen[1].1);
}

/// Goal: a session beside TCP connections, which fill the switch's port until it overflows, gets a
/// part of the port, and leaves them one. Method: the stream of [`goodput`] for thirty seconds at 1
/// Gbit/s, by way of a port with 128 KiB and 1 MiB, beside one connection and four; the fourth and
/// fifth second, and the last twenty.
#[test]
fn a_stream_beside_tcp_gets_a_part() {
    const SECOND: u64 = 1_000 * MS;
    let mut short = Vec::new();
    println!("beside tcp: buffer, connections, seconds: of the port, of a fair part; of theirs");
    for buffer in [128 * KIB, 1024 * KIB] {
        for connections in [1, 4] {
            let mut plan = stream_plan(1, 1500, 0.0);
            (plan.link.bps, plan.link.port_bytes) = (1_000_000_000, Some(buffer as u64));
            let mut rig = Rig::new(plan, 2);
            (0..connections).for_each(|_| rig.net.open_tcp(1));
            let begun = rig.net.now;
            let mut spans = VecDeque::from([(3, 5), (10, 30)]);
            let (mut from, mut seen) = ((0, 0, 0), Vec::new());
            stream_on(&mut rig, 64 * KIB, u64::MAX, |rig, got| {
                let Some(&(first, end)) = spans.front() else { return false };
                let theirs: u64 = rig.net.tcps.iter().map(|tcp| tcp.arrived).sum();
                let here = (rig.net.now, got, theirs);
                if rig.net.now < begun + first * SECOND {
                    from = here;
                } else if rig.net.now >= begun + end * SECOND {
                    seen.push((first, end, from, here));
                    spans.pop_front();
                }
                true
            });
            for (first, end, from, to) in seen {
                let port = 125_000_000.0 * (to.0 - from.0) as f64 / 1e9;
                let ours = ((to.1 - from.1) * 64 * KIB as u64) as f64 / port;
                let theirs = ((to.2 - from.2) * 1514) as f64 / port;
                let fair = 1.0 / f64::from(connections + 1);
                let of_fair = (ours / fair, theirs / (1.0 - fair));
                let line = format!(
                    "beside tcp: {:>4} KiB {connections} {first:>2} to {end:>2} s: {ours:.3}, \
                     {:.2}; {:.2}",
                    buffer / KIB,
                    of_fair.0,
                    of_fair.1,
                );
                println!("{line}");
                if of_fair.0 < 0.3 || of_fair.1 < 0.3 {
                    short.push(line);
                }
            }
        }
    }
    assert!(short.is_empty(), "less than a third of a fair part: {short:#?}");
}

/// A stream of long messages.
fn stream_plan(seed: u64, mtu: usize, loss: f64) -> Plan {
    let mut plan = Plan::calm(seed, 0);
    plan.link.mtu = vec![mtu; 2];
    plan.link.loss = loss;
    plan.link.rx_ring = 4096;
    plan.caller.poll_ns = 100.0;
    plan.node.pull_window = 4 << 20;
    plan.node.eager_max = 16 << 10;
    plan
}

/// Goodput of `total` messages of `len` bytes, sixteen at a time, over what is possible.
fn stream(plan: Plan, len: usize, total: u64) -> f64 {
    stream_with_stats(plan, len, total).0
}

/// The same, and what the link counted.
fn stream_with_stats(plan: Plan, len: usize, total: u64) -> (f64, NetStats) {
    let mut rig = Rig::new(plan, 2);
    let from = rig.net.now;
    stream_on(&mut rig, len, total, |_, _| true);
    (share_of_line(&rig, len, total, from), rig.net.stats)
}

/// Goodput of `count` messages of `len` bytes since `from`, over what is possible.
fn share_of_line(rig: &Rig, len: usize, count: u64, from: u64) -> f64 {
    let link = &rig.plan.link;
    let seconds = (rig.net.now - from) as f64 / 1e9;
    let headers = 2 + 16 + 16 + 4;
    let on_cable = (link.mtu[0] + 14) as f64 + crate::net::ETH_GAP as f64;
    let line = link.bps as f64 / 8.0 * (link.mtu[0] - headers) as f64 / on_cable;
    (count as usize * len) as f64 / seconds / (line * (1.0 - link.loss))
}

/// Sends `total` messages of `len` bytes, sixteen at a time, and tells `each` how many have
/// arrived, until it says no.
fn stream_on(rig: &mut Rig, len: usize, total: u64, mut each: impl FnMut(&mut Rig, u64) -> bool) {
    let peer = rig.peer(0, 1, 2);
    let from = rig.net.now;
    let (mut sent, mut got) = (0, 0);
    for i in 0..16 {
        let r = rig.at(1).arena.take(len).expect("fresh memory");
        assert!(rig.recv(1, None, r, i));
        let s = rig.at(0).arena.take(len).expect("fresh memory");
        assert!(rig.send(0, peer, s, i));
        sent += 1;
    }
    let mut bufs: Vec<_> = (0..16).map(|_| rig.at(0).arena.take(len).expect("memory")).collect();
    let mut recvs: Vec<_> = (0..16).map(|_| rig.at(1).arena.take(len).expect("memory")).collect();
    while got < total {
        let (more, polled) = rig.step(from + 60_000 * MS);
        assert!(more, "the stream stopped after {got} of {total} messages");
        match polled {
            Some(0) => {
                while rig.read(0).is_some() {
                    if sent < total {
                        // Sixteen lent, sixteen at hand: the one used longest ago is free again.
                        let buf = bufs.remove(0);
                        bufs.push(buf);
                        assert!(rig.send(0, peer, buf, sent));
                        sent += 1;
                    }
                }
            }
            Some(1) => {
                while rig.read(1).is_some() {
                    got += 1;
                    if !each(rig, got) {
                        return;
                    }
                    let buf = recvs.remove(0);
                    recvs.push(buf);
                    assert!(rig.recv(1, None, buf, got));
                }
            }
            _ => {}
        }
    }
}

/// Goal: a peer that dies ends every operation, not before T_dead and not after 1.1 times it; one
/// that restarts is noticed when it answers (B9). Method: mixed operations, the target killed at a
/// random moment, restarted in half of the seeds.
#[test]
fn true_death() {
    let start = Instant::now();
    let sum = for_seeds("true_death", if nightly() { 3_000 } else { 300 }, |seed, sum| {
        guarded(|| death(seed))?;
        sum.runs += 1;
        Ok(())
    });
    sum.print("true_death", start);
}

fn death(seed: u64) -> Result<(), String> {
    let mut r = Rng::new(seed, 6);
    let mut plan = Plan::calm(seed, 0);
    let t_dead = plan.node.t_dead_ns;
    plan.link.loss = if r.chance(0.3) { 0.1 * r.unit() } else { 0.0 };
    let mut rig = Rig::new(plan, 2);
    // Whom nobody meant in particular may well be his successor.
    let back = r.chance(0.5);
    let peer = rig.peer(0, 1, if back { 2 } else { r.pick(&[0, 2]) });
    let count = r.range(1, 40);
    for i in 0..count {
        let len = r.pick(&[0, 8, 300, 5000, 60_000, 70_000]);
        let buf = rig.at(0).arena.take(len)?;
        ensure!(rig.send(0, peer, buf, i), "send {i} of {count} refused");
        if r.chance(0.5) {
            let buf = rig.at(1).arena.take(70_000)?;
            ensure!(rig.recv(1, None, buf, i), "receive {i} refused");
        }
    }
    // A first contact, so that the peer was there; then any moment of the rest.
    rig.run_to(rig.net.now + 30_000 + r.below(300_000));
    rig.kill(1);
    let killed = rig.net.now;
    if back {
        rig.start(1, 77);
    }
    let mut last = killed;
    let mut first = u64::MAX;
    let mut errors = 0;
    let (mut done, limit) = (0, killed + 3 * t_dead);
    while done < count {
        while rig.read(0).is_some() {
            done += 1;
        }
        while let Some(e) = rig.error(0) {
            let due = if back { Error::ConnReset } else { Error::HostUnreach };
            ensure!(e.err == due, "an operation ended in {:?}, not {due:?}", e.err);
            (last, first) = (rig.net.now, first.min(rig.net.now));
            (done, errors) = (done + 1, errors + 1);
            while rig.read(0).is_some() {
                done += 1;
            }
        }
        if done < count {
            let (more, _) = rig.step(limit);
            ensure!(more, "{done} of {count} operations ended in three T_dead");
        }
    }
    let (first, last) = (first.saturating_sub(killed), last - killed);
    if errors > 0 && back {
        ensure!(last <= 200 * MS, "a restarted peer was noticed after {last} ns");
    } else if errors > 0 {
        // The last frame heard may have been under way when its sender died.
        let early = t_dead.saturating_sub(MS);
        ensure!(first >= early, "declared dead {first} ns after the death");
        ensure!(last <= t_dead + t_dead / 10, "the last operation ended {last} ns after the death");
    }
    Ok(())
}

/// Goal: an idle session costs at most 512 bytes. Method: 10^5 stations open a session with one
/// node; what the node allocated more than with one session, divided. Allocated, not touched: this
/// is the upper bound.
#[test]
fn memory_per_peer() {
    const PEERS: usize = 100_000;
    let start = Instant::now();
    let one = bytes_with(1);
    let many = bytes_with(PEERS);
    let each = (many - one) as f64 / (PEERS - 1) as f64;
    println!(
        "memory_per_peer: peers {PEERS} bytes per idle session {each:.0} (bar 512, aim 256) \
         time {:.1} s",
        start.elapsed().as_secs_f64()
    );
    assert!(each <= 512.0, "{each:.0} bytes per idle session");
}

/// Bytes that a node holds with `peers` sessions.
fn bytes_with(peers: usize) -> isize {
    let mut plan = Plan::calm(1, 0);
    plan.node.peer_max = peers;
    let before = crate::alloc::held();
    let mut node = Node::new(plan.node.settings(1, 1), &caps(&plan, 0)).expect("a valid plan");
    let mut now = Moment(1_000_000);
    for i in 0..peers {
        let src = MacAddr::from_u64(0x0200_1000_0000 + i as u64).into();
        now = now + 100_000;
        open_session(&mut node, now, src);
    }
    for _ in 0..100 {
        now = now + 1_000_000;
        node.transmit(now, &mut |_: &barewire_driver::frame::TxFrame<'_>| Tx::Sent);
    }
    let open = node.statistics().session_infos().filter(|s| s.state == "open").count();
    assert_eq!(open, peers, "sessions open");
    crate::alloc::held() - before
}

/// Plays the peer at `src` until its session with `node` is open.
fn open_session(node: &mut Node, now: Moment, src: Station) {
    let base = Base {
        dst: crate::net::Net::station(0),
        src,
        ty: Ty::Open,
        ar: false,
        rtx: false,
        ce: false,
        crc: true,
        dst_sid: 0,
        psn: Psn(7),
        cack: Psn(0),
        grant: 0,
        plen: 0,
    };
    let open = OpenOp {
        sid: 5,
        epoch: 1,
        inc: src.mac.to_u64(),
        target_inc: 1,
        max_frame: 1500,
        window: 256,
        grant: 16,
        ..OpenOp::default()
    };
    let mut bytes = wire::frame(&base, &Op::Open(open), &[]);
    // Of full length, which so is known to pass.
    bytes.resize(ETH_HDR_LEN + open.max_frame as usize, 0);
    node.on_frame(now, &RxFrame::new(&bytes));
    let mut answer = None;
    node.transmit(now, &mut |f: &barewire_driver::frame::TxFrame<'_>| {
        let mut bytes = vec![0; f.len()];
        f.copy_to(&mut bytes);
        answer = Some(bytes);
        Tx::Sent
    });
    let answer = answer.expect("an OPEN is answered");
    let frame = RxFrame::new(&answer);
    let got = Base::parse(&frame).expect("our own frame");
    let theirs = OpenOp::parse(&frame, &got).expect("an OPEN in answer");
    let base = Base { dst_sid: theirs.sid, psn: Psn(7), cack: got.psn, ..base };
    let ack = AckOp { newest: Psn(got.psn.0.wrapping_sub(1)), ..AckOp::default() };
    let bytes = wire::frame(&base, &Op::Ack(ack, [0; AckOp::WORDS_MAX]), &[]);
    node.on_frame(now, &RxFrame::new(&bytes));
}
