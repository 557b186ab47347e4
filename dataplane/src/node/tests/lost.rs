//! Whoever has lost a message with a session is told.

use super::*;
use crate::idx::PeerIdx;

/// The peer that was there first.
const FIRST: PeerIdx = PeerIdx::of(0);

/// Posts a receive at `i` that names the other end.
fn recv_from_peer(pair: &mut Pair, i: usize, tag: u64, context: u64) {
    let end = &mut pair.ends[i];
    let (kind, buf, src) = (MsgKind::Tagged, IoBuf::leaked(&[0; 8]), end.peer);
    let flags = OpFlags::empty();
    let req = RecvReq { kind, buf, src, tag, ignore: 0, context, flags };
    end.node.post_recv(pair.now, end.ep, req).unwrap();
}

fn send(pair: &mut Pair, flags: OpFlags, context: u64) -> Result<()> {
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, flags, context)
}

/// A pair with an open session.
fn open_pair(lossless: bool) -> Pair {
    let mut pair = Pair::new(1500, lossless);
    pair.short = Some(0);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    send(&mut pair, OpFlags::empty(), 2).unwrap();
    pair.run(1_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    pair
}

/// The second end forgets the session, and the first learns of it.
fn lose_session(pair: &mut Pair) {
    let now = pair.now;
    let station = pair.ends[0].node.port.station;
    pair.ends[1].node.sessions().drop_session(now, station);
    pair.run(2_000_000);
    assert_eq!(pair.ends[0].node.counters.sessions_reset, 1);
}

/// Goal: a message that was told of as sent is not lost in silence: the next post is refused, once,
/// with nothing executed, and the one after it goes out on a session that works like any other.
#[test]
fn the_next_post_tells_of_a_message_that_was_lost() {
    let mut pair = open_pair(true);
    for context in 3..6 {
        send(&mut pair, OpFlags::empty(), context).unwrap();
    }
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    assert_eq!(pair.read(0).len(), 3, "sent, as far as anybody knows");
    lose_session(&mut pair);
    assert_eq!(send(&mut pair, OpFlags::empty(), 6), Err(Error::ConnReset));
    assert_eq!(pair.read(0), [], "nothing was executed");
    for round in 0..20 {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
        send(&mut pair, OpFlags::empty(), 7).unwrap();
        pair.run(1_000_000);
        assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1), "round {round}");
    }
    assert!(pair.ends[0].node.peers[FIRST].fast_path, "all is as it was");
}

/// Each endpoint is told for itself, also if another has opened a session meanwhile; one that is
/// closed is not.
#[test]
fn each_endpoint_is_told_once() {
    let mut pair = open_pair(true);
    let End { node, cq, av, .. } = &mut pair.ends[0];
    let more = [(); 2].map(|()| open_ep(node, (*cq, *av), EpAttr::default()));
    send(&mut pair, OpFlags::empty(), 3).unwrap();
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    lose_session(&mut pair);
    assert_eq!(send(&mut pair, OpFlags::empty(), 4), Err(Error::ConnReset));
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    send(&mut pair, OpFlags::empty(), 4).unwrap();
    pair.run(1_000_000);
    let now = pair.now;
    pair.ends[0].node.ep_close(now, more[1]).unwrap();
    let first = std::mem::replace(&mut pair.ends[0].ep, more[0]);
    assert_eq!(send(&mut pair, OpFlags::empty(), 5), Err(Error::ConnReset));
    assert_eq!(send(&mut pair, OpFlags::empty(), 5), Ok(()));
    pair.ends[0].ep = first;
    assert_eq!(send(&mut pair, OpFlags::empty(), 6), Ok(()));
    assert!(!pair.ends[0].node.observed.losses.has_report(FIRST), "nobody is left to be told");
}

/// Where every message has a record, only what nobody waits for is told of by the next post.
#[test]
fn a_lost_inject_is_told_by_the_next_post() {
    for flags in [OpFlags::INJECT, OpFlags::empty()] {
        let mut pair = open_pair(false);
        send(&mut pair, flags, 3).unwrap();
        let End { node, out, .. } = &mut pair.ends[0];
        node.transmit(pair.now, &mut sink(out));
        out.clear();
        lose_session(&mut pair);
        assert_eq!(pair.read_err(0).err, Error::ConnReset);
        let inject = flags.contains(OpFlags::INJECT);
        let refused = send(&mut pair, OpFlags::empty(), 4);
        assert_eq!(refused, if inject { Err(Error::ConnReset) } else { Ok(()) });
    }
}

/// Receives that name the peer end with the session; those that take messages of anybody stay, and
/// so do all of them if the peer closes it in good order.
#[test]
fn receives_that_name_the_peer_end_with_its_session() {
    for closes in [false, true] {
        let mut pair = open_pair(true);
        recv_from_peer(&mut pair, 0, 5, 10);
        recv_from_peer(&mut pair, 0, 6, 11);
        pair.recv(0, IoBuf::leaked(&[0; 8]), 7, OpFlags::empty(), 12).unwrap();
        let reason = if closes { EndReason::Closed } else { EndReason::Silent };
        let now = pair.now;
        pair.ends[0].node.sessions().end_session(now, FIRST, reason);
        let posted = pair.ends[0].node.statistics().levels().posted;
        assert_eq!(posted, if closes { 3 } else { 1 });
        if !closes {
            let failed = [pair.read_err(0), pair.read_err(0)].map(|e| (e.cqe.op_context, e.err));
            assert_eq!(failed, [(10, Error::HostUnreach), (11, Error::HostUnreach)]);
        }
    }
}

/// A receive that names the peer and that a message of it is filling ends once, with the session.
#[test]
fn a_receive_that_is_being_filled_ends_with_the_session() {
    for (lossless, len) in [(true, 300_000), (false, 300_000), (true, 3_000), (false, 3_000)] {
        let mut pair = open_pair(lossless);
        let end = &mut pair.ends[1];
        let (kind, buf, src) = (MsgKind::Msg, IoBuf::leaked(&vec![0; 400_000]), end.peer);
        let flags = OpFlags::MULTI_RECV;
        let req = RecvReq { kind, buf, src, tag: 0, ignore: 0, context: 10, flags };
        end.node.post_recv(pair.now, end.ep, req).unwrap();
        // The rest of the message does not come.
        let End { node, out, .. } = &mut pair.ends[0];
        node.transmit(pair.now, &mut sink(out));
        pair.send(0, IoBuf::leaked(&vec![1; len]), u64::MAX, OpFlags::empty(), 3).unwrap();
        let End { node, out, .. } = &mut pair.ends[0];
        node.transmit(pair.now, &mut sink(out));
        let frames = std::mem::take(&mut pair.ends[0].out);
        let now = pair.now;
        let node = &mut pair.ends[1].node;
        let filled = frames.iter().any(|bytes| {
            node.on_frame(now, &RxFrame::new(bytes));
            node.posted.pool.iter().any(|(_, receive)| receive.payload.active == 1)
        });
        assert!(filled, "{len} bytes, {} frames", frames.len());
        node.sessions().end_session(now, FIRST, EndReason::Silent);
        assert_eq!(node.statistics().levels().posted, 0);
        let mut told = Vec::new();
        while let Ok(err) = node.receiving().cq_readerr(pair.ends[1].cq) {
            told.push((err.cqe.op_context, err.err));
        }
        // The message, and then the receive, which takes no other one.
        assert!(told.iter().all(|&(context, _)| context == 10), "{told:?}");
        assert_eq!(told.last(), Some(&(10, Error::HostUnreach)));
    }
}

/// Goal: a loss is forgotten with the life of the peer that it concerned, and with no other peer's.
#[test]
fn a_loss_is_forgotten_with_its_peer_alone() {
    for own in [false, true] {
        let mut pair = open_pair(true);
        send(&mut pair, OpFlags::empty(), 3).unwrap();
        let End { node, av, out, .. } = &mut pair.ends[0];
        node.transmit(pair.now, &mut sink(out));
        let addr = EpAddr { station: Station::at([2, 7, 0, 0, 0, 9]), ep: 3, incarnation: 5 };
        node.sessions().av_insert(pair.now, *av, addr).unwrap();
        lose_session(&mut pair);
        let node = &mut pair.ends[0].node;
        assert!(node.observed.losses.has_report(FIRST));
        let other = node.peers.iter().map(|(p, _)| p).find(|&p| p != FIRST).unwrap();
        node.control().note_life(if own { FIRST } else { other }, 77);
        assert_eq!(node.observed.losses.has_report(FIRST), !own);
    }
}

/// A deferred endpoint that has ended is told of nothing, nor is the next endpoint in its place.
#[test]
fn errors_of_a_closed_deferred_endpoint_are_dropped() {
    let mut pair = open_pair(false);
    let End { node, ep, cq, av, .. } = &mut pair.ends[0];
    let (ep, cq, av, cntr) = (*ep, *cq, *av, node.cntrs.open(CntrEvents::Comp).unwrap());
    let deferred = node.objects().deferred_ep(ep, Some(cntr)).unwrap();
    pair.ends[0].ep = deferred;
    send(&mut pair, OpFlags::INJECT, 3).unwrap();
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    out.clear();
    lose_session(&mut pair);
    let node = &mut pair.ends[0].node;
    assert!(node.observed.losses.has_report(FIRST));
    node.objects().cntr_close(cntr).unwrap();
    let next = open_ep(node, (cq, av), EpAttr::default());
    assert_eq!(next.0.idx(), deferred.0.idx(), "the place is taken again");
    pair.ends[0].ep = next;
    assert_eq!(send(&mut pair, OpFlags::empty(), 4), Ok(()));
}
