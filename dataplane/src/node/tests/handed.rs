//! A completion that never lies in its queue is the one that would have been read from it.

use super::*;

/// Endpoint and queue of the second node beside its own, with so many entries.
fn another(pair: &mut Pair, entries: usize) -> (EpId, CqId, FiAddr) {
    let [from, to] = &mut pair.ends;
    let cq = to.node.cqs.open(entries).unwrap();
    let caps = Caps::MSG | Caps::TAGGED | Caps::MULTI_RECV;
    let ep = open_ep(&mut to.node, (cq, to.av), EpAttr { caps, ..EpAttr::default() });
    let addr = to.node.addr_of(ep).unwrap();
    (ep, cq, from.node.sessions().av_insert(pair.now, from.av, addr).unwrap())
}

/// Posts a receive; false if there is no room for it.
fn post(pair: &mut Pair, ep: EpId, context: u64, flags: OpFlags) -> bool {
    let multi = flags.contains(OpFlags::MULTI_RECV);
    let (kind, len) = if multi { (MsgKind::Msg, 4096) } else { (MsgKind::Tagged, 64) };
    let (buf, src, tag, ignore) = (IoBuf::leaked(&vec![0; len]), FI_ADDR_UNSPEC, 0, 0);
    let req = RecvReq { kind, buf, src, tag, ignore, context, flags };
    let (node, now) = (&mut pair.ends[1].node, pair.now);
    node.objects().try_post_recv(ep, &req) || node.post_recv(now, ep, req).is_ok()
}

fn send(pair: &mut Pair, kind: MsgKind, dest: FiAddr) {
    let (buf, flags) = (IoBuf::leaked(&bytes(64)), OpFlags::empty());
    let (tag, data, context, no_completion) = (0, 0, 0, true);
    let mut req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
    let (End { node, ep, out, .. }, now) = (&mut pair.ends[0], pair.now);
    if !node.try_send(*ep, &mut req, &mut sink(out), || now) {
        node.post_send(now, *ep, req).unwrap();
        node.transmit(now, &mut sink(out));
    }
}

/// Lets the second node take what is under way, reading `cq` if it is empty; says what was handed
/// to who reads.
fn deliver(pair: &mut Pair, cq: Option<CqId>) -> Vec<u64> {
    let mut handed = Vec::new();
    for bytes in std::mem::take(&mut pair.ends[0].out) {
        let (frame, now, node) = (RxFrame::new(&bytes), pair.now, &mut pair.ends[1].node);
        match cq.filter(|cq| node.cqs[cq.0.idx()].cq.is_empty()) {
            Some(cq) => {
                let put = |cqe: &Cqe| handed.push(cqe.op_context);
                node.on_frame_read(&now, &frame, NoReply, CqReader { cq: &cq, put });
            }
            None => node.on_frame(now, &frame),
        }
    }
    handed
}

fn read(pair: &mut Pair, cq: CqId, most: usize) -> Vec<u64> {
    let mut ended = Vec::new();
    pair.ends[1].node.cq_take(cq, most, |cqe| ended.push(cqe.op_context));
    ended
}

/// Goal: whoever reads, and whether a completion is handed to him or lies in the queue first, it is
/// told once and in order, and room is where it would be. Method: all drawn; a reader of another
/// queue gets nothing.
#[test]
fn completions_are_told_once_and_in_order() {
    let (mut handed, mut lain) = (0, 0);
    for seed in 0..40 {
        let mut pair = Pair::new(9000, true);
        let (ep, cq, dest) = another(&mut pair, 64);
        let (_, other, _) = another(&mut pair, 64);
        let (mut posted, mut told, mut sent) = (0, Vec::new(), 0);
        for turn in 0..600 {
            let draw = drawn(seed * 10_000 + turn);
            match draw % 8 {
                0..3 if posted < told.len() as u64 + 40 => {
                    posted += u64::from(post(&mut pair, ep, posted, OpFlags::empty()));
                }
                3..6 if sent < posted => {
                    send(&mut pair, MsgKind::Tagged, dest);
                    sent += 1;
                }
                6 => {
                    let read = read(&mut pair, cq, [0, 1, 64, 64][draw / 8 % 4]);
                    lain += read.len();
                    told.extend(read);
                }
                _ => {
                    let by = [None, Some(other), Some(cq), Some(cq)][draw / 8 % 4];
                    let got = deliver(&mut pair, by);
                    assert!(got.is_empty() || by == Some(cq));
                    handed += got.len();
                    told.extend(got);
                }
            }
            let node = &pair.ends[1].node;
            let (it, queue) = (&node.eps[ep.0.idx()], &node.cqs[cq.0.idx()].cq);
            let open: usize = it.matcher.iter().map(|matcher| matcher.posted_len()).sum();
            assert_eq!((it.rx_used - it.rx_reserved_total()) as usize, open);
            assert_eq!(queue.reserved(), it.rx_used as usize);
            if (draw / 64).is_multiple_of(32) {
                pair.run(5_000);
            }
        }
        deliver(&mut pair, None);
        pair.run(1_000_000);
        told.extend(read(&mut pair, cq, usize::MAX));
        assert!(told.iter().copied().eq(0..sent), "seed {seed}: {told:?}");
    }
    assert!(handed > 1000 && lain > 100, "{handed} were handed, {lain} lay in the queue");
}

/// Goal: a message that waits for room in a queue does not wait for ever because what is read of
/// the queue never lies in it.
#[test]
fn a_message_that_waits_for_queue_room_is_delivered() {
    let mut pair = Pair::new(9000, true);
    let (ep, cq, dest) = another(&mut pair, 64);
    let multi = {
        let [from, to] = &mut pair.ends;
        let caps = Caps::MSG | Caps::TAGGED | Caps::MULTI_RECV;
        let ep = open_ep(&mut to.node, (cq, to.av), EpAttr { caps, ..EpAttr::default() });
        let addr = to.node.addr_of(ep).unwrap();
        (ep, from.node.sessions().av_insert(pair.now, from.av, addr).unwrap())
    };
    for context in 0..4 {
        post(&mut pair, ep, context, OpFlags::empty());
        send(&mut pair, MsgKind::Tagged, dest);
        pair.run(1_000_000);
        assert_eq!(read(&mut pair, cq, 1), [context], "it opens the session");
    }
    post(&mut pair, multi.0, 999, OpFlags::MULTI_RECV);
    while post(&mut pair, ep, 5, OpFlags::empty()) {}
    send(&mut pair, MsgKind::Msg, multi.1);
    pair.run(1_000_000);
    let table = &pair.ends[1].node.cqs[cq.0.idx()];
    assert!(table.cq_blocked && table.cq.is_empty(), "all of the queue is for other receives");
    let (mut told, mut turns) = (Vec::new(), 0);
    while !told.contains(&999) {
        send(&mut pair, MsgKind::Tagged, dest);
        told.extend(deliver(&mut pair, Some(cq)));
        if told.len() <= turns {
            told.extend(read(&mut pair, cq, 1));
        }
        post(&mut pair, ep, 6, OpFlags::empty());
        turns += 1;
        assert!(turns < 3, "{told:?}");
    }
}

/// No endpoint has room of a queue in advance that somebody else waits for.
#[test]
fn no_endpoint_reserves_queue_room_that_another_waits_for() {
    let mut pair = Pair::new(9000, true);
    let (ep, cq, _) = another(&mut pair, 64);
    for context in 0..3 {
        post(&mut pair, ep, context, OpFlags::empty());
    }
    let level = |pair: &Pair| {
        let node = &pair.ends[1].node;
        (node.eps[ep.0.idx()].rx_reserved_total(), node.cqs[cq.0.idx()].cq.reserved())
    };
    let (reserved_rx, reserved) = level(&pair);
    assert!(reserved_rx > 0 && reserved == 3 + reserved_rx as usize);
    pair.ends[1].node.objects().mark_starved(cq.0.idx());
    assert_eq!(level(&pair), (0, 3));
    for context in 3..6 {
        assert!(post(&mut pair, ep, context, OpFlags::empty()));
    }
    assert_eq!(level(&pair), (0, 6));
    pair.ends[1].node.receiving().retry_cq_waiters(cq.0.idx());
    for context in 6..9 {
        assert!(post(&mut pair, ep, context, OpFlags::empty()));
    }
    assert!(level(&pair).0 > 0, "nobody waits any more");
}

/// What passes has nothing to send, and whatever has is asked to: by time, for a peer, an answer.
#[test]
fn time_passes_where_nothing_is_due() {
    let mut pair = Pair::new(9000, true);
    pair.recv(1, IoBuf::EMPTY, 1, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::EMPTY, 1, OpFlags::empty(), 2).unwrap();
    let node = &mut pair.ends[0].node;
    assert!(!node.passes(pair.now), "an OPEN is to leave");
    pair.run(1_000_000);
    let dest = pair.ends[0].peer;
    send(&mut pair, MsgKind::Tagged, dest);
    let node = &mut pair.ends[0].node;
    assert!(node.passes(pair.now + 5_000));
    let due = node.next_deadline().expect("somebody waits for the peer");
    assert!(!node.passes(due), "a timer is due");
}

/// Where frames get lost, the turn that finds a frame that asked acknowledges it. If the program
/// is to have the time to answer, the next turn that finds no frame does, and one that finds more
/// waits for as long as an acknowledgement may wait.
#[test]
fn time_passes_where_no_acknowledgement_is_due() {
    let mut pair = Pair::new(9000, false);
    assert!(pair.ends[0].node.passes(pair.now), "nothing was posted");
    for i in 0..2 {
        pair.recv(1, IoBuf::EMPTY, 1, OpFlags::empty(), i).unwrap();
        pair.send(0, IoBuf::EMPTY, 1, OpFlags::empty(), i).unwrap();
        assert!(!pair.ends[0].node.passes(pair.now), "a message is to leave");
        if i == 0 {
            pair.run(1_000_000);
        }
    }
    let End { node, out, .. } = &mut pair.ends[0];
    assert_eq!(node.transmit(pair.now, &mut sink(out)), 1);
    assert!(node.passes(pair.now), "it waits for the peer alone");
    let frame = out.pop_front().expect("it left");
    let node = &mut pair.ends[1].node;
    let (p, _) = node.peers.iter().next().expect("they have met");
    assert!(node.peers[p].quick_ack);
    node.peers[p].quick_ack = false;
    node.on_frame(pair.now, &RxFrame::new(&frame));
    assert!(node.passes(pair.now + 1), "more frames may follow");
    assert!(!node.passes(pair.now + 2), "none has");
    let (sent, mut acks) = (node.counters.tx_acks, VecDeque::new());
    assert_eq!(node.transmit(pair.now + 2, &mut sink(&mut acks)), 1);
    assert_eq!(node.counters.tx_acks, sent + 1);
    assert!(node.passes(pair.now + 3));
    assert!(node.peers[p].quick_ack, "the program did not answer");
    pair.run(100_000);
    pair.recv(1, IoBuf::EMPTY, 1, OpFlags::empty(), 3).unwrap();
    pair.send(0, IoBuf::EMPTY, 1, OpFlags::empty(), 3).unwrap();
    let End { node, out, .. } = &mut pair.ends[0];
    assert_eq!(node.transmit(pair.now, &mut sink(out)), 1);
    let frame = out.pop_front().expect("it left");
    let node = &mut pair.ends[1].node;
    assert!(node.passes(pair.now));
    node.on_frame(pair.now, &RxFrame::new(&frame));
    assert!(!node.passes(pair.now), "the program may compute next");
}

/// Who ends in order leaves nobody waiting: what has arrived is acknowledged although the sender
/// did not ask, so that no peer learns only from the port that the process has ended.
#[test]
fn a_node_that_goes_acknowledges_what_came() {
    for lossless in [true, false] {
        let mut pair = Pair::new(9000, lossless);
        for i in 0..2 {
            pair.recv(1, IoBuf::EMPTY, 1, OpFlags::empty(), i).unwrap();
            pair.send(0, IoBuf::EMPTY, 1, OpFlags::INJECT, i).unwrap();
            pair.run(if i == 0 { 1_000_000 } else { 5_000 });
        }
        let waits = |pair: &Pair| pair.ends[0].node.peers.iter().any(|(_, peer)| peer.owes());
        assert!(waits(&pair) || !lossless, "it was acknowledged at once");
        pair.ends[1].node.control().acknowledge_all();
        pair.run(10_000);
        assert!(!waits(&pair));
    }
}

/// The last acknowledgement may get lost: on a lossy path it goes again, as long as the peer may
/// wait for it.
#[test]
fn a_node_that_goes_acknowledges_again() {
    let mut pair = Pair::new(9000, false);
    pair.recv(1, IoBuf::EMPTY, 1, OpFlags::empty(), 0).unwrap();
    pair.send(0, IoBuf::EMPTY, 1, OpFlags::INJECT, 0).unwrap();
    pair.run(1_000_000);
    let (node, now) = (&mut pair.ends[1].node, pair.now);
    let mut acks_at = |now| {
        let mut acks = VecDeque::new();
        node.turn.tick(now);
        node.control().acknowledge_all();
        node.transmit(now, &mut sink(&mut acks))
    };
    assert_eq!([acks_at(now), acks_at(now)], [1, 1]);
    assert_eq!(acks_at(now + 1_000_000_000), 0, "nobody waits so long");
}

/// Goal: who closes leaves no peer on a wire waiting for T_dead. Over memory the port tells.
#[test]
fn a_node_that_goes_tells_its_peers_on_wires() {
    for lossless in [true, false] {
        let mut pair = Pair::new(9000, lossless);
        pair.recv(1, IoBuf::EMPTY, 1, OpFlags::empty(), 0).unwrap();
        pair.send(0, IoBuf::EMPTY, 1, OpFlags::DELIVERY_COMPLETE, 0).unwrap();
        pair.run(1_000_000);
        assert_eq!(pair.read(0).len(), 1);
        assert!(!pair.ends[1].node.sessions().leave_sessions(), "there is one");
        // Under way when the node goes, which takes nothing any more.
        pair.send(0, IoBuf::EMPTY, 1, OpFlags::DELIVERY_COMPLETE, 1).unwrap();
        let End { node, out, .. } = &mut pair.ends[0];
        node.transmit(pair.now, &mut sink(out));
        out.clear();
        pair.run(10_000);
        let Some(Notice::SessionEnded(told)) = pair.ends[0].node.observed.notice() else {
            assert!(lossless, "it was not told");
            continue;
        };
        assert_eq!((told.reason, lossless), (EndReason::Closed, false));
        let err = pair.read_err(0);
        assert_eq!((err.err, err.cqe.op_context), (Error::ConnReset, 1));
    }
}

/// A receive for which the endpoint has no room in advance is posted by a call.
#[test]
fn a_receive_at_hand_asks_nobody() {
    let mut pair = Pair::new(9000, true);
    let (ep, ..) = another(&mut pair, 64);
    let node = &mut pair.ends[1].node;
    let req = |context| {
        let (kind, buf, flags) = (MsgKind::Tagged, IoBuf::leaked(&[0; 64]), OpFlags::empty());
        RecvReq { kind, buf, src: FI_ADDR_UNSPEC, tag: 0, ignore: 0, context, flags }
    };
    assert!(!node.objects().try_post_recv_reserved(ep, &req(0)));
    node.post_recv(pair.now, ep, req(0)).unwrap();
    assert!(!node.objects().try_post_recv_reserved(ep, &req(1)), "nothing was taken in advance");
    // The first fills a record that was never used.
    assert!(!node.objects().try_post_recv(ep, &req(1)));
    let left = node.eps[ep.0.idx()].rx_reserved;
    assert_eq!(left, [0, 7], "an eighth");
    node.post_recv(pair.now, ep, req(1)).unwrap();
    node.operations().cancel(ep, 1).unwrap();
    assert!(node.objects().try_post_recv_reserved(ep, &req(2)));
    assert_eq!(node.eps[ep.0.idx()].rx_reserved, [0, 6]);
}

/// Goal: a message that waits for room in a queue is told once sends that write no completion have
/// ended, although nothing is ever read of the queue.
#[test]
fn room_that_nobody_reads_is_found() {
    let mut pair = Pair::new(9000, false);
    let (ep, cq, dest) = another(&mut pair, 8);
    let inject = |pair: &mut Pair, flags| {
        let (kind, buf, no_completion) = (MsgKind::Tagged, IoBuf::leaked(&bytes(8)), true);
        let (tag, data, context) = (7, 0, 0);
        let End { node, peer, .. } = &mut pair.ends[1];
        let req = SendReq { kind, buf, dest: *peer, tag, data, context, flags, no_completion };
        node.post_send(pair.now, ep, req)
    };
    inject(&mut pair, OpFlags::INJECT).unwrap();
    pair.run(5_000_000);
    post(&mut pair, ep, 999, OpFlags::MULTI_RECV);
    while inject(&mut pair, OpFlags::INJECT).is_ok() {}
    send(&mut pair, MsgKind::Msg, dest);
    deliver(&mut pair, None);
    let table = &pair.ends[1].node.cqs[cq.0.idx()];
    assert!(table.cq_blocked && table.cq.is_empty(), "all of the queue is for the sends");
    pair.run(5_000_000);
    assert_eq!(read(&mut pair, cq, 1), [999]);
    assert!(!pair.ends[1].node.due.todo.contains(Todo::ROOM));
}
