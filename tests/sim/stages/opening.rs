//! What happens before a session is open, and paths that carry less than both of their ends.

use std::time::Instant;

use barewire_dataplane::error::Error;
use barewire_dataplane::psn::Psn;
use barewire_dataplane::types::FiAddr;
use barewire_dataplane::wire::{self, Base, Op, OpenOp, Ty};
use barewire_driver::frame::{ETH_HDR_LEN, RxFrame};

use super::hostile::Pair;
use super::{for_seeds, nightly};
use crate::ledger::{Checked, ensure};
use crate::net::Net;
use crate::plan::Plan;
use crate::rig::Rig;
use crate::rng::Rng;
use crate::world::guarded;

const MS: u64 = 1_000_000;

/// Runs `body` for the daily or nightly number of seeds.
fn stage(name: &str, count: u64, body: fn(u64) -> Checked) {
    let start = Instant::now();
    let count = if nightly() { 20 * count } else { count };
    let sum = for_seeds(name, count, |seed, sum| {
        guarded(|| body(seed))?;
        sum.runs += 1;
        Ok(())
    });
    sum.print(name, start);
}

/// Two nodes that both take 9,000 bytes, and what may happen to their frames.
fn jumbo(seed: u64, r: &mut Rng) -> Plan {
    let mut plan = Plan::calm(seed, 0);
    plan.link.mtu = vec![9000; 2];
    plan.link.latency_ns = r.pick(&[300, 5_000, 50_000]);
    plan.link.loss = r.pick(&[0.0, 0.0, 0.02]);
    plan.node.eager_max = r.pick(&[4096, 64 << 10]);
    plan
}

/// Goal: a path that carries less than both of its ends is found before data is lost, and one that
/// comes to carry less does not hang anybody. Method: each direction has a limit of its own, drawn
/// from below the least frame to above the longest; messages of many frames must arrive both ways.
/// Then a limit falls under a session that is open: what is under way ends within its bound, and
/// what comes after that arrives.
#[test]
fn narrow_paths() {
    stage("narrow_paths", 60, narrow);
}

pub(crate) fn narrow(seed: u64) -> Checked {
    let mut r = Rng::new(seed, 8);
    let mut rig = Rig::new(jumbo(seed, &mut r), 2);
    let limits = [9000, 9000, 4000, 1500, 1400, 256];
    for (from, to) in [(0, 1), (1, 0)] {
        rig.net.narrow(from, to, r.pick(&limits));
    }
    // Frames that are lost for their length would have to be sent again.
    rig.net.tap = Some(Vec::new());
    let mut pair = Pair::new(&mut rig);
    pair.exchange(&mut rig, &mut r, 6)?;
    let sent = rig.net.tap.take().unwrap_or_default();
    let narrowest = sent.iter().filter(|f| is_data(f)).map(Vec::len).max().unwrap_or(0);
    ensure!(narrowest > 200, "only frames of {narrowest} bytes were used");
    let (from, to) = if r.chance(0.5) { (0, 1) } else { (1, 0) };
    rig.net.narrow(from, to, r.pick(&[256, 1000, 1500]));
    dip(&mut rig, &pair, from)?;
    pair.exchange(&mut rig, &mut r, 4)
}

fn is_data(frame: &[u8]) -> bool {
    Base::parse(&RxFrame::new(frame)).is_ok_and(|base| base.ty.is_reliable())
}

/// A message of many frames from `from` on a path that may not carry them any more: it arrives, or
/// ends within the bound of progress.
fn dip(rig: &mut Rig, pair: &Pair, from: usize) -> Checked {
    const ID: u64 = 1 << 40;
    let (to, len) = (1 - from, 60_000);
    let into = rig.at(to).arena.take(len)?;
    ensure!(rig.recv(to, Some(pair.peers[to]), into, ID), "receive refused");
    let buf = rig.at(from).arena.take(len)?;
    ensure!(rig.send(from, pair.peers[from], buf, ID), "message refused");
    // T_dead of repetitions at each end at most, one after the other, and the probes between.
    let t_dead = rig.plan.node.t_dead_ns;
    let until = rig.net.now + 3 * t_dead;
    rig.run_to(until);
    for host in [from, to] {
        let ended = rig.read(host).map(|c| (c.op_context, Error::Again));
        let ended = ended.or_else(|| rig.error(host).map(|e| (e.cqe.op_context, e.err)));
        if ended.is_none() && host == to {
            // A receive waits for the next message if nothing of this one came.
            rig.forget(to, ID)?;
            continue;
        }
        let (context, err) = ended.ok_or("an operation did not end")?;
        let fits = [Error::Again, Error::HostUnreach, Error::ConnReset, Error::Canceled];
        ensure!(context == ID && fits.contains(&err), "operation {context} ended: {err}");
    }
    Ok(())
}

/// Goal: short messages that pass do not keep a session alive whose oldest packet does not. Method:
/// a message of many frames on a path that has come to carry less, and behind it short ones, one
/// after the other at some pause: everything has ended when T_dead and the first timeouts are over.
#[test]
fn talk_on_narrow_paths() {
    stage("talk_on_narrow_paths", 30, talk);
}

pub(crate) fn talk(seed: u64) -> Checked {
    const LONG: u64 = 1 << 40;
    let mut r = Rng::new(seed, 11);
    let mut plan = jumbo(seed, &mut r);
    (plan.node.tx_wr_max, plan.node.cq_size, plan.link.loss) = (2048, 4096, 0.0);
    let pause = r.pick(&[50, 200, 1000, 1000, 2000, 4000, 8000, 16_000]) * 1000;
    let mut rig = Rig::new(plan, 2);
    let mut pair = Pair::new(&mut rig);
    pair.exchange(&mut rig, &mut r, 4)?;
    rig.net.narrow(0, 1, 1000);
    let begun = rig.net.now;
    // Four timeouts of at most 64 ms come before the clock.
    let limit = rig.plan.node.t_dead_ns + 300 * MS;
    let into = rig.at(1).arena.take(60_000)?;
    ensure!(rig.recv(1, Some(pair.peers[1]), into, LONG), "receive refused");
    let long = rig.at(0).arena.take(60_000)?;
    ensure!(rig.send(0, pair.peers[0], long, LONG), "message refused");
    let mut next = LONG;
    loop {
        let t = rig.net.now;
        rig.run_to(t + pause);
        while rig.read(0).is_some() {}
        if let Some(e) = rig.error(0) {
            // Who pulls the long message may be the first to give it up.
            let fits = [Error::HostUnreach, Error::ConnReset];
            ensure!(fits.contains(&e.err), "ended by {}", e.err);
            return Ok(());
        }
        let took = rig.net.now - begun;
        ensure!(took < limit, "after {} ms and {} short messages", took / MS, next - LONG);
        let buf = rig.at(0).arena.take(8)?;
        next += u64::from(rig.send(0, pair.peers[0], buf, next + 1));
    }
}

/// Stations that somebody pretends to be.
const FORGED: std::ops::Range<usize> = 2..60;

fn open_frame(src: usize, op: OpenOp, len: usize) -> Vec<u8> {
    let base = Base {
        dst: Net::station(0),
        src: Net::station(src),
        ty: Ty::Open,
        ar: false,
        rtx: false,
        ce: false,
        crc: true,
        dst_sid: op.echo_sid,
        psn: Psn(7),
        cack: Psn(0),
        grant: 0,
        plen: 0,
    };
    let mut bytes = wire::frame(&base, &Op::Open(op), &[]);
    bytes.resize(len.max(bytes.len()), 0);
    bytes
}

fn an_open(r: &mut Rng, inc: u64) -> OpenOp {
    OpenOp {
        sid: r.next() as u32 | 1,
        epoch: r.next() as u32 | 1,
        inc,
        max_frame: 1500,
        window: 256,
        grant: 16,
        ..OpenOp::default()
    }
}

/// Goal: forged OPENs bring no more frames and bytes out of a node than came in, and take nothing
/// from its peers. Method: 10,000 a second from changing stations, of all lengths, some with
/// cookies that nobody made and some twice, while two honest nodes exchange messages.
#[test]
fn open_floods() {
    stage("open_floods", 10, flood);
}

pub(crate) fn flood(seed: u64) -> Checked {
    let mut r = Rng::new(seed, 9);
    let mut plan = Plan::calm(seed, 0);
    (plan.hosts, plan.link.mtu) = (FORGED.end, vec![1500; FORGED.end]);
    (plan.node.peer_max, plan.node.unexpected_bytes) = (64, r.pick(&[64 << 10, 1 << 20]));
    let mut rig = Rig::new(plan, 2);
    rig.stray = Some(Vec::new());
    let mut pair = Pair::new(&mut rig);
    let (mut frames, mut bytes) = ([0_u64; FORGED.end], [0_usize; FORGED.end]);
    for round in 0..40 {
        for _ in 0..20 {
            let src = FORGED.start + r.index(FORGED.len());
            let mut op = an_open(&mut r, src as u64 + 1000);
            if r.chance(0.3) {
                op.cookie = r.next();
            }
            let frame = open_frame(src, op, r.pick(&[0, 0, 300, ETH_HDR_LEN + 1500]));
            for _ in 0..r.pick(&[1, 1, 2]) {
                (frames[src], bytes[src]) = (frames[src] + 1, bytes[src] + frame.len());
                rig.net.inject(0, &frame);
            }
            let t = rig.net.now;
            rig.run_to(t + MS / 10);
        }
        if round % 4 == 0 {
            pair.exchange(&mut rig, &mut r, 1)?;
        }
        let node = &rig.at(0).node;
        let half_open = node.statistics().session_infos().filter(|s| s.state == "answered").count();
        ensure!(half_open <= 16, "{half_open} sessions are half open");
    }
    // Nothing is repeated to who does not answer.
    let t = rig.net.now;
    rig.run_to(t + 400 * MS);
    for (to, frame) in rig.stray.take().unwrap_or_default() {
        ensure!(frames[to] > 0 && bytes[to] >= frame.len(), "more than came in to station {to}");
        (frames[to], bytes[to]) = (frames[to] - 1, bytes[to] - frame.len());
    }
    pair.exchange(&mut rig, &mut r, 4)
}

/// Goal: what waits for a peer is ended by nobody who cannot hear the peer's frames, and goes out
/// with the session that the peer does confirm. Method: station 1 is played by the stage: its OPEN
/// is answered, an operation waits for it, and OPENs of another life and of another session come
/// without proof. And a peer that restarts is asked for proof, and gets its session.
#[test]
fn blind_opens() {
    stage("blind_opens", 20, blind);
}

pub(crate) fn blind(seed: u64) -> Checked {
    let mut r = Rng::new(seed, 10);
    strangers_end_nothing(seed, &mut r)?;
    // Two nodes, one of which comes back in another life.
    let mut rig = Rig::new(jumbo(seed, &mut r), 2);
    let mut pair = Pair::new(&mut rig);
    pair.exchange(&mut rig, &mut r, 2)?;
    rig.kill(1);
    let t = rig.net.now;
    rig.run_to(t + r.range(1, 20) * MS);
    rig.start(1, 77);
    pair.peers[1] = rig.peer(1, 0, 1);
    if r.chance(0.5) {
        pair.peers[0] = rig.peer(0, 1, 77);
    } else {
        pair.peers[0] = rig.peer(0, 1, 0);
        // Whoever restarted speaks first.
        pair.message(&mut rig, 1, 100)?;
    }
    pair.exchange(&mut rig, &mut r, 2)
}

fn strangers_end_nothing(seed: u64, r: &mut Rng) -> Checked {
    const LIFE: u64 = 500;
    let mut plan = Plan::calm(seed, 0);
    plan.link.mtu = vec![1500; 2];
    let mut rig = Rig::new(plan, 1);
    rig.stray = Some(Vec::new());
    let whole = ETH_HDR_LEN + 1500;
    let first = an_open(r, LIFE);
    rig.net.inject(0, &open_frame(1, first, whole));
    let t = rig.net.now;
    rig.run_to(t + MS / 10);
    let named: FiAddr = rig.peer(0, 1, if r.chance(0.5) { LIFE } else { 0 });
    let buf = rig.at(0).arena.take(64)?;
    ensure!(rig.send(0, named, buf, 5), "message refused");
    for _ in 0..r.range(1, 8) {
        let life = LIFE + 1 + r.below(100);
        let other = an_open(r, life);
        rig.net.inject(0, &open_frame(1, other, whole));
        let t = rig.net.now;
        rig.run_to(t + r.range(1, 2000) * 1_000);
    }
    ensure!(rig.error(0).is_none(), "a stranger's OPEN ended an operation");
    // The peer has lost its session and opens the next.
    let again = OpenOp { epoch: first.epoch.wrapping_add(2) | 1, sid: first.sid ^ 2, ..first };
    rig.net.inject(0, &open_frame(1, again, whole));
    let t = rig.net.now;
    rig.run_to(t + 5 * MS);
    ensure!(rig.error(0).is_none(), "the peer's next OPEN ended an operation");
    let heard = rig.stray.take().unwrap_or_default();
    let answer = heard.iter().rev().find_map(|(_, bytes)| {
        let frame = RxFrame::new(bytes);
        let base = Base::parse(&frame).ok()?;
        Some((base, OpenOp::parse(&frame, &base).ok()?))
    });
    let (base, op) = answer.ok_or("no answer to the peer's next OPEN")?;
    ensure!(op.echo_epoch == again.epoch, "an answer to another OPEN");
    // Confirmed, it carries what waited.
    let ping = Base {
        dst: base.src,
        src: base.dst,
        ty: Ty::Ping,
        ar: true,
        dst_sid: op.sid,
        psn: Psn(7),
        cack: base.psn,
        ..base
    };
    rig.stray = Some(Vec::new());
    rig.net.inject(0, &wire::frame(&ping, &Op::Ping, &[]));
    let t = rig.net.now;
    rig.run_to(t + 5 * MS);
    let heard = rig.stray.take().unwrap_or_default();
    ensure!(heard.iter().any(|(_, bytes)| is_data(bytes)), "what waited does not go out");
    Ok(())
}
