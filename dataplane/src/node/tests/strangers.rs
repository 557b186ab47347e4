//! Who may open a session, and who reaches what over one.

use super::rma::ALL;
use super::*;
use crate::node::peer::State;
use crate::rel::psn::Psn;
use crate::wire::{self, Base, MsgOp, Op, OpenOp, Ty};

/// The station of a stranger.
const UNKNOWN: Station = Station::at([2, 0, 0, 0, 0, 9]);

fn strict() -> NodeSettings {
    NodeSettings { by_name: false, ..NodeSettings::default() }
}

/// Hands `node` a packet of the stranger, and says which packets it answers.
fn say(node: &mut Node, dst_sid: u32, op: &Op) -> Vec<Vec<u8>> {
    let (dst, crc) = (node.port.station, node.port.far.has_crc());
    let (ty, src) = (if matches!(op, Op::Open(_)) { Ty::Open } else { Ty::Msg }, UNKNOWN);
    let (ar, rtx, psn, cack, grant, plen) = (false, false, Psn(1), Psn(0), 0, 0);
    let base = Base { dst, src, ty, ar, rtx, ce: false, crc, dst_sid, psn, cack, grant, plen };
    node.on_frame(Instant(5_000_000), &RxFrame::new(&wire::frame(&base, op, &[])));
    let mut out = VecDeque::new();
    node.transmit(Instant(5_000_000), &mut sink(&mut out));
    out.into()
}

fn open(target_inc: u64) -> Op {
    let (sid, epoch, inc, max_frame, window) = (5, 1, 77, 1500, 256);
    Op::Open(OpenOp { sid, epoch, inc, max_frame, window, target_inc, ..OpenOp::default() })
}

fn kinds(answers: &[Vec<u8>]) -> Vec<Ty> {
    let kind = |bytes: &Vec<u8>| Base::parse(&RxFrame::new(bytes)).unwrap().ty;
    answers.iter().map(kind).collect()
}

/// Goal: the address is the capability. A node that is not reached by name makes no session with
/// who does not name its incarnation, and keeps nothing of him; one that does is let in; and a node
/// that became reachable by name lets in both.
#[test]
fn only_who_names_the_incarnation_gets_a_session() {
    let mut node = end_with(1, 1500, false, strict()).node;
    let mine = node.settings().incarnation;
    for (target, count) in [(0, 1), (mine + 1, 1), (0, 2)] {
        assert_eq!(kinds(&say(&mut node, 0, &open(target))), [Ty::Rst], "target {target}");
        assert_eq!((node.counters().rx_unnamed, node.statistics().levels().peers), (count, 0));
    }
    assert_eq!(kinds(&say(&mut node, 0, &open(mine))), [Ty::Open]);
    let mut named = end_with(1, 1500, false, strict()).node;
    named.control().reach_by_name();
    assert_eq!(kinds(&say(&mut named, 0, &open(0))), [Ty::Open]);
    assert_eq!(named.counters().rx_unnamed, 0);
}

/// Goal: nobody learns the incarnation by asking. Method: everything that a stranger is answered.
#[test]
fn no_answer_to_a_stranger_tells_the_incarnation() {
    for settings in [strict(), NodeSettings::default()] {
        let by_name = settings.by_name;
        let mut node = end_with(1, 1500, false, settings).node;
        let inc = 0x0123_4567_89ab_cdef;
        node.settings.incarnation = inc;
        let mut said = say(&mut node, 0, &open(4711));
        said.extend(say(&mut node, 0x0010_0007, &Op::Msg(MsgOp::default())));
        assert_eq!(kinds(&said), [Ty::Rst, Ty::Rst]);
        if !by_name {
            said.extend(say(&mut node, 0, &open(0)));
        }
        let told = said.iter().flat_map(|bytes| bytes.windows(8)).any(|w| w == inc.to_le_bytes());
        assert!(!told, "by name: {by_name}");
    }
}

/// Goal: both ends of an ordinary pair name each other, so that neither has to be reached by name,
/// also after one of them has lost the session, and a peer that restarted is told apart from one
/// that did not.
#[test]
fn peers_that_know_their_addresses_need_no_name() {
    for lossless in [true, false] {
        let mut pair = Pair::of([1, 2].map(|station| end_with(station, 1500, lossless, strict())));
        for (round, i) in [0, 1, 0, 1].into_iter().enumerate() {
            pair.recv(1 - i, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
            pair.send(i, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
            pair.run(3_000_000);
            assert_eq!((pair.read(1 - i).len(), pair.read(i).len()), (1, 1), "round {round}");
            let station = pair.ends[1 - i].node.port.station;
            let now = pair.now;
            pair.ends[i].node.sessions().drop_session(now, station);
            // Who still has the session learns of it by the next packet.
            pair.send(1 - i, IoBuf::leaked(&[1; 8]), 1, OpFlags::DELIVERY_COMPLETE, 3).unwrap();
            pair.run(3_000_000);
            assert_eq!(pair.read_err(1 - i).err, Error::ConnReset);
            let known = pair.ends[1 - i].node.peers.iter().next().unwrap().1.inc;
            assert_eq!(known, pair.ends[i].node.settings().incarnation, "the same life");
        }
        assert!(pair.ends.iter().all(|end| end.node.counters().rx_unnamed == 0));
    }
}

/// Two nodes that are not reached by name, of which the first knows the other by its name alone,
/// which is returned.
fn by_name_alone(lossless: bool) -> (Pair, EpAddr) {
    let mut pair = Pair::of([1, 2].map(|station| end_with(station, 1500, lossless, strict())));
    let other = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
    // The address that it got with the others is taken out again, before it was used.
    pair.ends[0] = end_with(1, 1500, lossless, strict());
    let End { node, av, peer, .. } = &mut pair.ends[0];
    *peer = node.sessions().av_insert(Instant(0), *av, EpAddr { incarnation: 0, ..other }).unwrap();
    (pair, other)
}

/// Goal: who learns the full address while its OPEN by name is under way gets a session by it, and
/// what is posted by that address does not end with the refusal of the name. Method: the address is
/// inserted before the refusal arrives.
#[test]
fn an_address_that_comes_behind_an_open_by_name_holds() {
    for lossless in [true, false] {
        let (mut pair, other) = by_name_alone(lossless);
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 9, OpFlags::empty(), 2).unwrap();
        let (now, End { node, av, peer, out, .. }) = (pair.now, &mut pair.ends[0]);
        node.transmit(now, &mut sink(out));
        assert_eq!(kinds(out.make_contiguous()), [Ty::Open]);
        *peer = node.sessions().av_insert(now, *av, other).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 3).unwrap();
        pair.run(3_000_000);
        let ended = |got: Vec<Cqe>| got.iter().map(|cqe| cqe.op_context).collect::<Vec<_>>();
        assert_eq!(ended(pair.read(1)), [1], "lossless: {lossless}");
        assert_eq!(ended(pair.read(0)), [2, 3], "lossless: {lossless}");
        assert_eq!(pair.ends[1].node.counters().rx_unnamed, 1);
    }
}

/// Goal: the refusal of an OPEN by name does not end the session that the refusing node itself
/// began meanwhile, with what was sent over it. Method: both OPENs cross, and the refusal comes in
/// time, or again when the session is open.
#[test]
fn a_refused_name_does_not_end_the_session_of_the_other_side() {
    for (lossless, late) in [(true, false), (false, false), (true, true), (false, true)] {
        let (mut pair, _) = by_name_alone(lossless);
        for i in [0, 1] {
            pair.recv(i, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
            pair.send(i, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
            let (now, End { node, out, .. }) = (pair.now, &mut pair.ends[i]);
            node.transmit(now, &mut sink(out));
            assert_eq!(kinds(out.make_contiguous()), [Ty::Open]);
        }
        // One refuses, the other has taken its OPEN before it hears of that.
        let ([one, other], now) = (&mut pair.ends, pair.now);
        let (by_name, named) = (one.out.pop_back().unwrap(), other.out.pop_back().unwrap());
        other.node.on_frame(now, &RxFrame::new(&by_name));
        one.node.on_frame(now, &RxFrame::new(&named));
        other.node.transmit(now, &mut sink(&mut other.out));
        assert_eq!(kinds(other.out.make_contiguous()), [Ty::Rst]);
        let refusal = if late { other.out.pop_back() } else { None };
        pair.run(1_000_000);
        if let Some(bytes) = refusal {
            pair.ends[0].node.on_frame(pair.now, &RxFrame::new(&bytes));
        }
        pair.run(3_000_000);
        for i in [0, 1] {
            let mut got: Vec<_> = pair.read(i).iter().map(|cqe| cqe.op_context).collect();
            got.sort_unstable();
            assert_eq!(got, [1, 2], "at {i}, lossless: {lossless}, late: {late}");
        }
        assert!(pair.ends.iter().all(|end| end.node.counters().sessions_reset == 0));
    }
}

/// Goal: with [`NodeSettings::inserted`] only peers in the vector of an endpoint reach it or a
/// region through it, by every way a packet can take, and others are told so. Method: the address
/// is taken out of the vector, put in, and taken out again; each time everything is tried twice,
/// since the first try opens the session and makes the fast path free.
#[test]
fn only_inserted_peers_reach_an_endpoint_or_a_region() {
    for (lossless, short) in [(true, None), (true, Some(0)), (false, None)] {
        let inserted = NodeSettings { inserted: true, ..NodeSettings::default() };
        let mut pair = Pair::of([end(1, 1500, lossless), end_with(2, 1500, lossless, inserted)]);
        pair.short = short;
        let region = pair.region(1, 64, ALL);
        let rma = || RmaList::one(0, 8, region.key);
        let (theirs, av) = (pair.ends[1].peer, pair.ends[1].av);
        let from = pair.ends[1].node.objects().av_lookup(av, theirs).unwrap();
        for known in [false, true, false] {
            let (now, node) = (pair.now, &mut pair.ends[1].node);
            if known {
                assert_eq!(node.sessions().av_insert(now, av, from), Ok(theirs));
            } else {
                node.objects().av_remove(av, theirs).unwrap();
            }
            for _ in 0..2 {
                if known {
                    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
                }
                let flags = OpFlags::DELIVERY_COMPLETE;
                pair.send(0, IoBuf::leaked(&[1; 8]), 1, flags, 2).unwrap();
                pair.run(3_000_000);
                pair.write(&[7; 8], rma(), OpFlags::empty(), 3).unwrap();
                pair.run(3_000_000);
                pair.read_to(IoBuf::leaked(&[0; 8]), rma(), 4).unwrap();
                pair.run(3_000_000);
                let refused = [Error::ConnRefused, Error::Access, Error::Access];
                let refused = refused.map(|e| (!known).then_some(e));
                let want: Vec<_> = [2, 3, 4].into_iter().zip(refused).collect();
                assert_eq!(pair.outcomes(0), want, "{lossless} {short:?}");
                assert_eq!(pair.outcomes(1).len(), usize::from(known));
            }
            let written = if known { [7; 8] } else { [0xEE; 8] };
            assert_eq!(region.bytes()[..8], written);
            region.assert_guards();
            // For the next round.
            pair.ends[1].node.mrs.store(region.id, 0, &[0xEE; 8]).unwrap();
        }
        assert_eq!(pair.ends[1].node.counters().rx_not_inserted, 12);
    }
}

/// An OPEN of the station `n`, for somebody who names its receiver's life.
fn open_of(node: &mut Node, now: Instant, n: u32) -> Vec<Vec<u8>> {
    let [_, a, b, c] = n.to_be_bytes();
    let (dst, crc, src) =
        (node.port.station, node.port.far.has_crc(), Station::at([6, 0, 0, a, b, c]));
    let (ty, ar, rtx, psn) = (Ty::Open, false, false, Psn(1));
    let (cack, grant, plen, dst_sid) = (Psn(0), 0, 0, 0);
    let base = Base { dst, src, ty, ar, rtx, ce: false, crc, dst_sid, psn, cack, grant, plen };
    let op = open(node.settings().incarnation);
    node.on_frame(now, &RxFrame::new(&wire::frame(&base, &op, &[])));
    let mut out = VecDeque::new();
    node.transmit(now, &mut sink(&mut out));
    out.into()
}

/// Goal: a flood of OPENs takes a bounded part of a node's time, and keeps no memory. Method: 1,000
/// stations in each of some milliseconds: the budget's OPENs are looked at, of which the first make
/// half-open sessions and the others are asked for proof, one frame each; beyond it an OPEN brings
/// no frame, no session and nothing but a count.
#[test]
fn the_cost_of_a_flood_of_opens_is_bounded() {
    const PER_MS: u32 = 1000;
    const LOOKED_AT: u32 = 16;
    let mut node = end_with(1, 1500, false, strict()).node;
    for ms in 1..20 {
        let now = Instant(u64::from(ms) * 1_000_000);
        let mut answers = Vec::new();
        for n in 0..PER_MS {
            let got = open_of(&mut node, now, ms * PER_MS + n);
            assert!(got.len() <= 1 && (n < LOOKED_AT || got.is_empty()), "OPEN {n}: {got:?}");
            answers.extend(got);
        }
        assert_eq!(kinds(&answers), vec![Ty::Open; LOOKED_AT as usize]);
        let counters = node.counters();
        let limited = u64::from(ms * (PER_MS - LOOKED_AT));
        assert_eq!(counters.rx_open_limited, limited);
        assert_eq!(counters.tx_challenges, u64::from((ms - 1) * LOOKED_AT));
        assert_eq!(
            node.statistics().levels().peers,
            LOOKED_AT as usize,
            "only the first made sessions"
        );
    }
}

/// Goal: remote CQ data that waits for room in its queue is told of with a name that its sender has
/// then. Method: receives have taken all of the room; meanwhile the address is taken out of the
/// vector.
#[test]
fn data_that_waits_for_room_names_nobody_who_has_no_name() {
    for known in [true, false] {
        let mut pair = Pair::new(1500, true);
        let region = pair.region(1, 64, ALL);
        for i in 0..128 {
            pair.recv(1, IoBuf::leaked(&[0; 8]), 9, OpFlags::empty(), i).unwrap();
        }
        let rma = RmaList::one(0, 8, region.key);
        pair.write(&[7; 8], rma, OpFlags::REMOTE_CQ_DATA, 3).unwrap();
        pair.run(3_000_000);
        let End { node, ep, cq, av, peer, .. } = &mut pair.ends[1];
        assert_eq!((node.cqs.ready(*cq), node.statistics().levels().late), (Ok(0), 1));
        if !known {
            node.objects().av_remove(*av, *peer).unwrap();
        }
        node.operations().cancel(*ep, 5).unwrap();
        assert_eq!(pair.read_err(1).err, Error::Canceled);
        let told: Vec<_> = pair.read(1).iter().map(|cqe| cqe.src).collect();
        assert_eq!(told, [if known { 0 } else { FI_ADDR_UNSPEC }]);
    }
}

/// Goal: an OPEN that answers none of ours keeps nothing of its sender, of whom nothing is known:
/// his record could take the place of a peer with an open session. Method: a node whose table is
/// full of such peers, which no vector names, and many of these OPENs.
#[test]
fn an_answer_to_nobody_displaces_nobody() {
    const PEERS: u32 = 4;
    let settings = NodeSettings { peer_max: PEERS as usize, ..strict() };
    let mut node = end_with(1, 1500, false, settings).node;
    let ms = 1_000_000;
    for n in 0..PEERS {
        let now = Instant(u64::from(n + 1) * ms);
        let answer = open_of(&mut node, now, n).pop().unwrap();
        let frame = RxFrame::new(&answer);
        let base = Base::parse(&frame).unwrap();
        let sid = wire::OpenOp::parse(&frame, &base).unwrap().sid;
        let (dst, src, cack) = (base.src, base.dst, base.psn);
        let ping = Base { dst, src, ty: Ty::Ping, ar: true, dst_sid: sid, cack, ..base };
        node.on_frame(now, &RxFrame::new(&wire::frame(&ping, &Op::Ping, &[])));
    }
    let live = |node: &Node| node.peers.iter().filter(|(_, p)| p.state == State::Open).count();
    assert_eq!(live(&node), PEERS as usize);
    for n in 0..500 {
        let now = Instant(u64::from(PEERS + 1 + n) * ms);
        let (dst, crc, src) =
            (node.port.station, node.port.far.has_crc(), Station::at([6, 1, 0, 0, 1, n as u8]));
        let src = Station { number: (n >> 8) as u16, ..src };
        let (ty, ar, rtx, psn) = (Ty::Open, false, false, Psn(1));
        let (cack, grant, plen, dst_sid) = (Psn(0), 0, 0, 9);
        let base = Base { dst, src, ty, ar, rtx, ce: false, crc, dst_sid, psn, cack, grant, plen };
        let Op::Open(op) = open(node.settings().incarnation) else { unreachable!() };
        let op = Op::Open(OpenOp { echo_sid: 9, echo_epoch: 9, ..op });
        node.on_frame(now, &RxFrame::new(&wire::frame(&base, &op, &[])));
        let mut out = VecDeque::new();
        node.transmit(now, &mut sink(&mut out));
        assert!(kinds(out.make_contiguous()).contains(&Ty::Rst));
    }
    assert_eq!((live(&node), node.statistics().levels().peers), (PEERS as usize, PEERS as usize));
}

/// Goal: a message has the source that names the life of the peer which sent it. Method: two
/// messages, one that nobody has asked for, and then those of another process at the same station,
/// which is inserted before the last.
#[test]
fn the_source_names_the_life_that_sent() {
    for lossless in [true, false] {
        let mut pair = Pair::new(1500, lossless);
        let (any, none) = (OpFlags::empty(), IoBuf::leaked(&[0; 8]));
        let sources = |cqes: Vec<Cqe>| cqes.iter().map(|cqe| cqe.src).collect::<Vec<_>>();
        let old = pair.ends[1].peer;
        pair.recv(1, none.again(), 0, any, 0).unwrap();
        for tag in [0, 1] {
            pair.send(0, IoBuf::leaked(&[1; 8]), tag, any, tag).unwrap();
        }
        pair.run(3_000_000);
        assert_eq!((pair.read(0).len(), sources(pair.read(1))), (2, vec![old]));

        let ends = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
        let mut next = end(1, 1500, lossless);
        next.node.settings.incarnation = 999;
        next.peer = next.node.sessions().av_insert(pair.now, next.av, ends).unwrap();
        pair.ends[0] = next;
        for tag in [2, 3] {
            pair.recv(1, none.again(), tag, any, tag).unwrap();
            pair.send(0, IoBuf::leaked(&[1; 8]), tag, any, tag).unwrap();
            pair.run(1_500_000_000);
        }
        assert_eq!(sources(pair.read(1)), [FI_ADDR_UNSPEC; 2]);
        pair.recv(1, none.again(), 1, any, 1).unwrap();
        assert_eq!(sources(pair.read(1)), [old], "what came before is of the first");

        let addr = pair.ends[0].node.addr_of(pair.ends[0].ep).unwrap();
        let End { node, av, .. } = &mut pair.ends[1];
        let new = node.sessions().av_insert(pair.now, *av, addr).unwrap();
        pair.recv(1, none.again(), 4, any, 4).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 4, any, 4).unwrap();
        pair.run(3_000_000);
        assert_eq!(sources(pair.read(1)), [new]);
        assert_ne!(new, old);
    }
}

/// Goal: an OPEN without proof is limited also where the one before it was of the same life and
/// station, whom the application names without a life, or not at all; and what is remembered of
/// them does not grow. Method: one station opens session after session.
#[test]
fn opens_of_one_station_are_limited_too() {
    const PER_MS: u32 = 100;
    for by_name in [false, true] {
        let mut node = end_with(1, 1500, false, strict()).node;
        if by_name {
            let av = node.sessions().av_open(8).unwrap();
            let addr = EpAddr { station: UNKNOWN, ep: 1, incarnation: 0 };
            node.sessions().av_insert(Instant(0), av, addr).unwrap();
        }
        let (dst, crc) = (node.port.station, node.port.far.has_crc());
        let (ty, src, ar, rtx, psn) = (Ty::Open, UNKNOWN, false, false, Psn(1));
        let (cack, grant, plen, dst_sid) = (Psn(0), 0, 0, 0);
        let base = Base { dst, src, ty, ar, rtx, ce: false, crc, dst_sid, psn, cack, grant, plen };
        let Op::Open(op) = open(node.settings().incarnation) else { unreachable!() };
        for n in 0..20 * PER_MS {
            let now = Instant(u64::from(1 + n / PER_MS) * 1_000_000);
            let op = Op::Open(OpenOp { epoch: 1 + n, sid: 1 + n, ..op });
            node.on_frame(now, &RxFrame::new(&wire::frame(&base, &op, &[])));
            let half_open = node.openings.half_open_count();
            assert!(half_open <= 16, "{half_open} half-open sessions after OPEN {n}");
        }
        let limited = node.counters().rx_open_limited;
        assert_eq!(limited, 20 * u64::from(PER_MS - 16), "by name: {by_name}");
    }
}

/// Goal: what is meant for a life of a peer that has ended does not reach the present one, also
/// after an OPEN of nobody's claimed a third one. Method: that OPEN comes between messages by name
/// and by the old address.
#[test]
fn a_claimed_life_opens_no_way_from_one_life_to_the_next() {
    for lossless in [true, false] {
        let (mut pair, other) = by_name_alone(lossless);
        pair.ends[1].node.control().reach_by_name();
        let by_name = pair.ends[0].peer;
        let End { node, av, peer, .. } = &mut pair.ends[0];
        let gone = EpAddr { incarnation: 555, ..other };
        *peer = node.sessions().av_insert(pair.now, *av, gone).unwrap();
        let gone = *peer;
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
        pair.run(3_000_000);
        assert_eq!(pair.read_err(0).err, Error::ConnReset);

        let (src, node) = (pair.ends[1].node.port.station, &mut pair.ends[0].node);
        let (dst, crc, ty) = (node.port.station, node.port.far.has_crc(), Ty::Open);
        let (ar, rtx, psn, cack, grant, plen) = (false, false, Psn(1), Psn(0), 0, 0);
        let dst_sid = 0;
        let base = Base { dst, src, ty, ar, rtx, ce: false, crc, dst_sid, psn, cack, grant, plen };
        let op = open(node.settings().incarnation);
        node.on_frame(pair.now, &RxFrame::new(&wire::frame(&base, &op, &[])));
        pair.ends[0].peer = by_name;
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 3).unwrap();
        let life = |pair: &Pair| pair.ends[0].node.peers.iter().next().unwrap().1.inc;
        assert_eq!(life(&pair), 77, "what the OPEN claims");
        for _ in 0..1000 {
            if life(&pair) != 0 {
                pair.run(5_000);
            }
        }
        assert_eq!(life(&pair), 0);
        pair.ends[0].peer = gone;
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 4).unwrap();
        for context in [5, 6] {
            pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), context).unwrap();
        }
        pair.run(3_000_000);
        assert_eq!(pair.read(1).len(), 1, "lossless: {lossless}");
        let failure = pair.read_err(0);
        assert_eq!((failure.cqe.op_context, failure.err), (4, Error::ConnReset));
        assert_eq!(pair.read(0).len(), 1);
    }
}
