//! What uncounted 8-byte fetches do not check: what they take for granted was found out before, and
//! who changes it takes it back.

use super::atomic::{Call, bytes_of, fetch_adds, lie, short_pair, words};
use super::rma::{ALL, Region};
use super::*;
use crate::proto::atomic::AtomicKind::{Base, Fetch};
use crate::rel::sent::WINDOW_LOSSLESS;
use crate::wire::{self, RespOp};

/// Another endpoint for `end`, with what it takes for atomic operations and no more, of so many
/// requests at once.
fn bare(end: &mut End, tx_size: usize) -> EpId {
    let caps = Caps::TAGGED | Caps::ATOMIC;
    open_ep(&mut end.node, (end.cq, end.av), EpAttr { caps, tx_size, ..EpAttr::default() })
}

/// Two nodes with endpoints of these capabilities. Where nobody counts what is done to them,
/// fetches are usual.
pub(super) fn pair_with(caps: Caps) -> Pair {
    let ends = [1, 2].map(|station| {
        let mut end = end(station, 1500, true);
        end.node.ep_close(Instant(0), end.ep).unwrap();
        let attr = EpAttr { caps, ..EpAttr::default() };
        end.ep = open_ep(&mut end.node, (end.cq, end.av), attr);
        end
    });
    Pair::of(ends)
}

/// The same with a session, a region of the second, and one fetch behind them.
fn usual_pair() -> (Pair, Region) {
    let mut pair = pair_with(Caps::TAGGED | Caps::ATOMIC);
    let region = pair.region(1, 64, ALL);
    pair.short = Some(0);
    let zero = [0; 8];
    for _ in 0..2 {
        pair.atomic(Call::sum(Fetch, &zero, RmaList::one(0, 1, region.key)), 8).unwrap();
        pair.run(1_000_000);
        assert_eq!(pair.outcomes(0), [(1, None)]);
    }
    (pair, region)
}

/// What the first has sent goes to the second, which answers at once.
fn answer_all(pair: &mut Pair) {
    let [from, to] = &mut pair.ends;
    for bytes in from.out.drain(..) {
        to.node.on_frame_with(&pair.now, &RxFrame::new(&bytes), sink(&mut to.out));
    }
}

/// What has ended has no name: nor has its slot, while nobody uses it.
#[test]
fn an_operation_that_has_ended_is_not_answered_again() {
    let (mut pair, region) = short_pair();
    fetch_adds(&mut pair, &region, 3);
    pair.run(2_000_000);
    assert_eq!(pair.outcomes(0), [(0, None), (1, None), (2, None)]);
    for slot in 0..3 {
        for dst_gen in 0..6 {
            let resp = RespOp { dst_op: slot | 1 << 31, dst_gen, ..RespOp::default() };
            lie(&mut pair, resp, 0);
        }
    }
    assert_eq!(pair.ends[0].node.counters().rx_stray, 18);
    assert_eq!(pair.outcomes(0), []);
    // The list of free slots is whole.
    fetch_adds(&mut pair, &region, 4);
    pair.run(2_000_000);
    assert_eq!(pair.outcomes(0).len(), 4);
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// A counter that is bound to an endpoint counts what ends from then on, what was under way before
/// as well.
#[test]
fn a_counter_counts_what_is_under_way() {
    for (events, each) in [(CntrEvents::Comp, 1), (CntrEvents::Bytes, 8)] {
        let (mut pair, region) = usual_pair();
        fetch_adds(&mut pair, &region, 3);
        let End { node, ep, .. } = &mut pair.ends[0];
        let cntr = node.cntrs.open(events).unwrap();
        node.operations().ep_bind_cntr(*ep, cntr, BindFlags::READ).unwrap();
        for (more, ended, all) in [(0, 3, 3), (2, 2, 5)] {
            fetch_adds(&mut pair, &region, more);
            pair.run(2_000_000);
            assert_eq!(pair.outcomes(0).len(), ended);
            assert_eq!(pair.ends[0].node.cntrs.read(cntr), Ok(all * each));
        }
    }
}

/// One call is told of and the next is not, as each of them says.
#[test]
fn each_call_says_whether_it_is_told_of() {
    let (mut pair, region) = usual_pair();
    let End { node, cq, av, .. } = &mut pair.ends[0];
    let caps = Caps::TAGGED | Caps::ATOMIC;
    let ep = node.eps.open(EpAttr { caps, ..EpAttr::default() }).unwrap();
    let flags = BindFlags::TRANSMIT | BindFlags::RECV | BindFlags::SELECTIVE_COMPLETION;
    node.objects().ep_bind_cq(ep, *cq, flags).unwrap();
    node.objects().ep_bind_av(ep, *av).unwrap();
    node.ep_enable(ep).unwrap();
    let always = std::mem::replace(&mut pair.ends[0].ep, ep);
    let one = bytes_of(&[1]);
    for (ep, asks) in [(ep, true), (always, false)] {
        pair.ends[0].ep = ep;
        for context in 0..40 {
            let told = !drawn(context).is_multiple_of(3);
            let unheard = drawn(context).is_multiple_of(5);
            let flags = if told { OpFlags::COMPLETION } else { OpFlags::empty() };
            let rma = RmaList::one(0, 1, region.key);
            let call = Call { context: context as u64, flags, ..Call::sum(Fetch, &one, rma) };
            let before = pair.short;
            if unheard {
                let (now, dest) = (pair.now, pair.ends[0].peer);
                let (result, _) = shared(8);
                let mut req = call.req(dest, result);
                req.no_completion = true;
                let End { node, ep, out, .. } = &mut pair.ends[0];
                let mut short = req.fast().unwrap();
                assert!(node.try_atomic(*ep, &mut short, &mut sink(out), || now));
            } else {
                pair.atomic(call, 8).unwrap();
                assert_eq!(pair.short, before.map(|taken| taken + 1));
            }
            pair.run(1_000_000);
            let told = (told || !asks) && !unheard;
            assert_eq!(pair.outcomes(0).len(), usize::from(told), "call {context}");
        }
    }
}

/// What an endpoint has not been asked yet it knows nothing of, whatever nothing looks like; and of
/// what it may not do, and of flags that nobody knows, it never knows anything.
#[test]
fn nothing_is_right_unasked() {
    let (mut pair, region) = usual_pair();
    let now = pair.now;
    let one = bytes_of(&[1]);
    let refused = |pair: &mut Pair, ep, call: Call<'_>, len| {
        let (dest, result) = (pair.ends[0].peer, shared(len).0);
        let End { node, out, .. } = &mut pair.ends[0];
        let mut req = call.req(dest, result);
        !node.try_atomic(ep, &mut req.fast().unwrap(), &mut sink(out), || now)
    };
    let fresh = bare(&mut pair.ends[0], 256);
    let sum = |kind, addr| Call::sum(kind, &one, RmaList::one(addr, 1, region.key));
    let none = RmaList::one(0, 0, region.key);
    let nothing = Call { op: 0, ty: 0, operand: &[], rma: none, ..sum(Fetch, 0) };
    assert!(refused(&mut pair, fresh, nothing, 0));
    let odd = OpFlags::from_bits_retain(1 << 63);
    assert!(refused(&mut pair, fresh, Call { flags: odd, ..sum(Fetch, 0) }, 8));
    assert!(!refused(&mut pair, fresh, sum(Fetch, 0), 8));
    assert!(refused(&mut pair, fresh, Call { flags: odd, ..sum(Fetch, 0) }, 8));
    assert!(refused(&mut pair, fresh, Call { op: 1 << 16 | 2, ..sum(Fetch, 0) }, 8));
    assert!(refused(&mut pair, fresh, Call { ty: 1 << 16 | 7, ..sum(Fetch, 0) }, 8));
    // An old value needs room, and what fetches none must have none.
    assert!(refused(&mut pair, fresh, sum(Base, 0), 8));
    assert!(refused(&mut pair, fresh, sum(Fetch, 0), 0));
    let caps = Caps::ATOMIC | Caps::WRITE;
    let End { node, cq, av, .. } = &mut pair.ends[0];
    let writes = open_ep(node, (*cq, *av), EpAttr { caps, ..EpAttr::default() });
    assert!(!refused(&mut pair, writes, sum(Base, 0), 0));
    assert!(refused(&mut pair, writes, sum(Fetch, 0), 8));
}

/// Goal: answers are all that fetches are answered by, however many are under way.
#[test]
fn fetches_ask_for_no_acknowledgement() {
    let (mut pair, region) = usual_pair();
    let acks = pair.ends[1].node.counters().tx_acks;
    fetch_adds(&mut pair, &region, 64);
    for bytes in &pair.ends[0].out {
        assert!(!wire::Base::parse(&RxFrame::new(bytes)).unwrap().ar);
    }
    pair.run(100_000);
    assert_eq!(pair.outcomes(0).len(), 64);
    assert_eq!(pair.ends[1].node.counters().tx_acks, acks);
}

/// Goal: a node that answers and sends at the same time never has more packets in flight than the
/// window holds, whether answers count as what may be sent or are alone.
#[test]
fn answers_leave_the_window_as_it_is() {
    for alone in [false, true] {
        let (mut pair, region) = usual_pair();
        let p = pair.ends[1].node.peers.iter().next().unwrap().0;
        let [from, to] = &mut pair.ends;
        let peer = &mut to.node.peers[p];
        peer.snd.credit += 4000;
        peer.snd.una = peer.snd.nxt;
        assert_eq!(u32::from(peer.tx_room()), WINDOW_LOSSLESS - 1);
        from.node.peers.iter_mut().for_each(|(_, peer)| peer.granted += 4000);
        fetch_adds(&mut pair, &region, 60);
        let send = |pair: &mut Pair| {
            let End { node, ep, peer: dest, out, .. } = &mut pair.ends[1];
            let (kind, buf, dest) = (MsgKind::Tagged, IoBuf::leaked(&[7; 64]), *dest);
            let (flags, context, no_completion) = (OpFlags::empty(), 0, true);
            let mut req =
                SendReq { kind, buf, dest, tag: 0, data: 0, context, flags, no_completion };
            node.try_send(*ep, &mut req, &mut sink(out), || pair.now)
        };
        let peer = &mut pair.ends[1].node.peers[p];
        if alone {
            // As if there had been no room to send to.
            peer.tx_quota = peer.tx_room();
        } else {
            assert!(send(&mut pair));
        }
        let left = pair.ends[1].node.peers[p].tx_quota;
        let executed = pair.ends[1].node.counters().rma_executed;
        answer_all(&mut pair);
        assert_eq!(pair.ends[1].node.counters().rma_executed, executed + 60);
        let counted = left - pair.ends[1].node.peers[p].tx_quota;
        assert_eq!(counted, 60 - u16::from(alone));
        while send(&mut pair) {
            let peer = &pair.ends[1].node.peers[p];
            assert!(peer.snd.in_flight() <= WINDOW_LOSSLESS);
        }
        let peer = &pair.ends[1].node.peers[p];
        assert!(peer.snd.in_flight() > WINDOW_LOSSLESS - 64);
    }
}

/// Goal: an answer of a session that has ended since its request came goes to nobody.
#[test]
fn an_answer_leaves_in_its_session_alone() {
    for ends in [false, true] {
        let (mut pair, region) = usual_pair();
        fetch_adds(&mut pair, &region, 3);
        let [from, to] = &mut pair.ends;
        for bytes in from.out.drain(..) {
            to.node.on_frame(pair.now, &RxFrame::new(&bytes));
        }
        assert!(to.node.has_answers());
        if ends {
            to.node.sessions().drop_session(pair.now, from.node.port.station);
        }
        to.node.send_answers(pair.now, &mut sink(&mut to.out));
        let answers = if ends { 0 } else { 3 };
        assert_eq!((to.out.len(), to.node.has_answers()), (answers, false), "ends: {ends}");
    }
}

/// Fetches of two endpoints that share a queue, some of which ask for room and some of which do
/// not: one is refused if, and only if, one of the queues is full.
#[test]
fn room_that_was_taken_in_advance_is_given_back() {
    for (entries, places) in [(8, 16), (16, 6), (32, 32)] {
        let mut pair = pair_with(Caps::TAGGED | Caps::ATOMIC);
        let region = pair.region(1, 64, ALL);
        let end = &mut pair.ends[0];
        end.cq = end.node.cqs.open(entries).unwrap();
        let eps = [bare(end, places), bare(end, places)];
        let (mut used, mut unread, mut short) = ([0, 0], 0, 0);
        let one = bytes_of(&[1]);
        for step in 0..3000 {
            match drawn(step) % 12 {
                0 => {
                    pair.run(1_000_000);
                    (unread, used) = (unread + used[0] + used[1], [0, 0]);
                    let node = &pair.ends[0].node;
                    assert_eq!(node.cqs.ready(pair.ends[0].cq), Ok(unread));
                    assert_eq!(node.statistics().levels().cq_reserved, 0);
                }
                1 => {
                    let End { node, cq, .. } = &mut pair.ends[0];
                    let most = drawn(step * 7) % 9;
                    let read = node.cq_take(*cq, most, |_| ()).unwrap_or(0);
                    assert_eq!(read, most.min(unread));
                    unread -= read;
                }
                draw => {
                    let i = draw % 2;
                    pair.ends[0].ep = eps[i];
                    pair.short = (draw < 8).then_some(0);
                    let full = used[i] == places || used[0] + used[1] + unread == entries;
                    let rma = RmaList::one(8, 1, region.key);
                    let posted = pair.atomic(Call::sum(Fetch, &one, rma), 8).map(|_| ());
                    assert_eq!(posted, if full { Err(Error::Again) } else { Ok(()) }, "{step}");
                    used[i] += usize::from(!full);
                    short += pair.short.unwrap_or(0);
                }
            }
        }
        assert!(short > 100, "{short}");
        pair.run(1_000_000);
        let End { node, cq, .. } = &mut pair.ends[0];
        for ep in eps {
            node.ep_close(pair.now, ep).unwrap();
        }
        assert_eq!(node.cqs[cq.0.idx()].cq.reserved(), 0);
    }
}

/// Goal: completions that are handed to who reads the queue and those that lie in it are told once
/// and in order, and room is where it would be. Method: all drawn; a reader of another queue gets
/// nothing.
#[test]
fn fetches_are_told_once_and_in_order() {
    let (mut handed, mut lain) = (0, 0);
    for seed in 0..30 {
        let (mut pair, region) = usual_pair();
        let other = pair.ends[0].node.cqs.open(16).unwrap();
        let (ep, cq) = (pair.ends[0].ep, pair.ends[0].cq);
        let (mut posted, mut told) = (0, Vec::new());
        let one = bytes_of(&[1]);
        for turn in 0..500 {
            let draw = drawn(seed * 10_000 + turn);
            match draw % 8 {
                0..3 => {
                    let rma = RmaList::one(0, 1, region.key);
                    let call = Call { context: posted, ..Call::sum(Fetch, &one, rma) };
                    posted += u64::from(pair.atomic(call, 8).is_ok());
                }
                3 => {
                    let node = &mut pair.ends[0].node;
                    let before = told.len();
                    node.cq_take(cq, [0, 1, 64][draw / 8 % 3], |cqe| told.push(cqe.op_context));
                    lain += told.len() - before;
                }
                4 => answer_all(&mut pair),
                _ => {
                    let by = [None, Some(other), Some(cq), Some(cq)][draw / 8 % 4];
                    let [to, from] = &mut pair.ends;
                    let node = &mut to.node;
                    for bytes in from.out.drain(..) {
                        let frame = RxFrame::new(&bytes);
                        let Some(cq) = by.filter(|by| node.cqs[by.0.idx()].cq.is_empty()) else {
                            node.on_frame(pair.now, &frame);
                            continue;
                        };
                        let before = told.len();
                        let put = |cqe: &Cqe| told.push(cqe.op_context);
                        node.on_frame_read(&pair.now, &frame, NoReply, CqReader { cq: &cq, put });
                        handed += told.len() - before;
                        assert!(told.len() == before || by != Some(other));
                    }
                }
            }
            let node = &pair.ends[0].node;
            let (it, queue) = (&node.eps[ep.0.idx()], &node.cqs[cq.0.idx()].cq);
            let under_way = posted - told.len() as u64 - queue.ready() as u64;
            assert_eq!(u64::from(it.tx_used) - u64::from(it.ops_reserved), under_way);
            assert_eq!(queue.reserved(), (it.tx_used + it.rx_reserved_total()) as usize);
        }
        pair.run(1_000_000);
        pair.ends[0].node.cq_take(cq, usize::MAX, |cqe| told.push(cqe.op_context));
        assert!(told.iter().copied().eq(0..posted), "seed {seed}: {told:?}");
    }
    assert!(handed > 1000 && lain > 100, "{handed} were handed, {lain} lay in the queue");
}

/// A queue that others wait for room of lends none, and gets back what ends, whoever reads it.
#[test]
fn completion_queue_room_that_others_wait_for_is_not_reserved() {
    let (mut pair, region) = usual_pair();
    fetch_adds(&mut pair, &region, 1);
    let End { node, ep, cq, .. } = &mut pair.ends[0];
    assert!(node.eps[ep.0.idx()].ops_reserved > 0);
    node.objects().mark_starved(cq.0.idx());
    assert_eq!(node.eps[ep.0.idx()].ops_reserved, 0);
    answer_all(&mut pair);
    let [End { node, ep, cq, .. }, from] = &mut pair.ends;
    let answer = from.out.pop_front().unwrap();
    let (cq, put) = (*cq, |_: &Cqe| panic!("it is the queue's"));
    node.on_frame_read(&pair.now, &RxFrame::new(&answer), NoReply, CqReader { cq: &cq, put });
    assert_eq!((node.cqs.ready(cq), node.eps[ep.0.idx()].ops_reserved), (Ok(1), 0));
    let one = bytes_of(&[1]);
    let call = || Call::sum(Fetch, &one, RmaList::one(0, 1, region.key));
    let short = |pair: &mut Pair| {
        pair.short = Some(0);
        pair.atomic(call(), 8).unwrap();
        pair.short == Some(1)
    };
    assert!(!short(&mut pair));
    let End { node, ep, cq, .. } = &mut pair.ends[0];
    assert_eq!(node.eps[ep.0.idx()].ops_reserved, 0);
    node.receiving().retry_cq_waiters(cq.0.idx());
    pair.run(1_000_000);
    assert_eq!(pair.outcomes(0).len(), 2);
    assert!(short(&mut pair));
}

/// A fetch that finds no record goes as whole as it came.
#[test]
fn a_fetch_without_a_record_is_left_alone() {
    let settings = NodeSettings { tx_wr_max: 4, ..NodeSettings::default() };
    let mut pair = Pair::of([end_with(1, 1500, true, settings), end(2, 1500, true)]);
    let region = pair.region(1, 64, ALL);
    let one = bytes_of(&[1]);
    let sum = || Call::sum(Fetch, &one, RmaList::one(0, 1, region.key));
    pair.atomic(sum(), 8).unwrap();
    pair.run(1_000_000);
    pair.short = Some(0);
    for _ in 0..8 {
        pair.atomic(sum(), 8).unwrap();
    }
    assert_eq!(pair.short, Some(4));
    assert_eq!(pair.atomic(sum(), 8).unwrap_err(), Error::Again);
    pair.run(1_000_000);
    assert_eq!(pair.outcomes(0).len(), 9);
    assert_eq!(words(&region.bytes())[0], u64::from_le_bytes([0xEE; 8]).wrapping_add(9));
}

/// Goal: an answer whose length is not that of the result is no success: less than the old value,
/// or bytes for an add that wants none. Nor does the answer to an add hold the old value.
#[test]
fn an_answer_of_another_length_is_no_success() {
    const PLEN_AT: usize = 30;
    for (kind, len) in [(Fetch, 8), (Base, 0)] {
        let (mut pair, region) = usual_pair();
        let one = bytes_of(&[1]);
        let add = || Call::sum(kind, &one, RmaList::one(0, 1, region.key));
        pair.atomic(add(), len).unwrap();
        answer_all(&mut pair);
        pair.run(1_000_000);
        assert_eq!(pair.outcomes(0), [(1, None)]);
        pair.atomic(add(), len).unwrap();
        answer_all(&mut pair);
        let mut answer = pair.ends[1].out.pop_front().unwrap();
        assert_eq!(usize::from(answer[PLEN_AT]), len);
        let told = answer[RespOp::HEAD..].iter().any(|&byte| byte != 0);
        assert_eq!(told, kind == Fetch, "the old value goes to who asked for it");
        answer[PLEN_AT] ^= 8;
        pair.ends[0].node.on_frame(pair.now, &RxFrame::new(&answer));
        assert_eq!(pair.only_error(1).err, Error::ConnReset);
    }
}

/// Whatever is uncommon in the header of a fetch is found, and nothing happens to the
/// region.
#[test]
fn a_usual_fetch_is_so_in_every_word() {
    let (mut pair, region) = usual_pair();
    fetch_adds(&mut pair, &region, 1);
    let frame = pair.ends[0].out.pop_front().unwrap();
    let was = words(&region.bytes());
    for at in 0..frame.len() - 8 {
        // Not what others have asked, the type; nor that the frame acknowledges a little less, and
        // of the operation its name, its number, and the endpoint that it is from.
        if [12..16, 24..25, 42..44, 46..48, 64..72, 76..80].iter().any(|free| free.contains(&at)) {
            continue;
        }
        for bit in 0..8 {
            // Another word of the region.
            if at == 56 && (3..6).contains(&bit) {
                continue;
            }
            let mut frame = frame.clone();
            frame[at] ^= 1 << bit;
            let [_, to] = &mut pair.ends;
            let (frame, out) = (RxFrame::new(&frame), &mut sink(&mut to.out));
            let taken = to.node.rx_add(pair.now, &frame, out);
            assert!(!taken, "byte {at} bit {bit}");
        }
    }
    for len in 0..frame.len() {
        let [_, to] = &mut pair.ends;
        let (frame, out) = (RxFrame::new(&frame[..len]), &mut sink(&mut to.out));
        assert!(!to.node.rx_add(pair.now, &frame, out), "{len} bytes");
    }
    assert_eq!(words(&region.bytes()), was);
    let [_, to] = &mut pair.ends;
    let (frame, out) = (RxFrame::new(&frame), &mut sink(&mut to.out));
    assert!(to.node.rx_add(pair.now, &frame, out));
    assert_eq!(words(&region.bytes())[0], was[0].wrapping_add(1));
}
