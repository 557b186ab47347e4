//! Tables that are full.

use super::atomic::{Call, fetch_adds};
use super::rma::ALL;
use super::*;
use crate::idx::PeerIdx;
use crate::node::rma::SpareBuffers;
use crate::node::rma_in::OldValues;
use crate::proto::atomic::AtomicKind::Fetch;
use crate::rel::sent::SentPool;
use crate::wire::RespOp;

/// Goal: tables that the machine has no address space for are an error, and not the end of the
/// process.
#[test]
fn a_node_is_not_made_without_room_for_its_tables() {
    let made = |settings: NodeSettings| {
        Node::new(NodeSettings { incarnation: 1, seed: 1, ..settings }, &caps(1, 1500, false))
    };
    let default = NodeSettings::default;
    let many = 1 << 25;
    for settings in [
        NodeSettings { tx_wr_max: many, ..default() },
        NodeSettings { rx_wr_max: many, ..default() },
        NodeSettings { unexpected_bytes: 1 << 40, ..default() },
        NodeSettings { unexpected_bytes: 1 << 10, ..default() },
    ] {
        assert!(matches!(made(settings), Err(Error::Invalid(_))));
    }
    // Unless the machine has so much, or lets programs reserve what it has not.
    let all = NodeSettings { unexpected_bytes: 1 << 39, ..default() };
    if all.check_room().is_err() {
        assert!(matches!(made(all), Err(Error::NoMem)));
    }
}

/// Goal: packets for which no record is left wait until others are acknowledged, and the node is
/// called again after a pause, not at once and for ever.
#[test]
fn packets_wait_for_records() {
    let mut pair = Pair::new(1500, false);
    for context in 0..6 {
        // Too long to share a frame.
        pair.recv(1, IoBuf::leaked(&[0; 1000]), 5, OpFlags::empty(), context).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 1000]), 5, OpFlags::empty(), context).unwrap();
        if context == 0 {
            pair.run(1_000_000);
            assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
            pair.ends[0].node.sent = SentPool::with_capacity(2);
        }
    }
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    assert_eq!(out.len(), 2);
    assert!(node.port.blocked, "it is called again at once");
    pair.run(1_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (5, 5));
}

/// Answers of a burst that the port does not take at its end find records, however many others were
/// added in the same burst.
#[test]
fn answers_of_a_burst_have_records_if_they_cannot_leave() {
    let settings = NodeSettings { peer_max: 4, ..NodeSettings::default() };
    let ends = [1, 2].map(|station| end_with(station, 1500, true, settings.clone()));
    let mut pair = Pair::of(ends);
    let region = pair.region(1, 64, ALL);
    pair.short = Some(0);
    for _ in 0..2 {
        pair.atomic(Call::sum(Fetch, &[0; 8], RmaList::one(0, 1, region.key)), 8).unwrap();
        pair.run(1_000_000);
        assert_eq!(pair.outcomes(0), [(1, None)]);
    }
    fetch_adds(&mut pair, &region, 3);
    let (now, [from, to]) = (pair.now, &mut pair.ends);
    for bytes in from.out.drain(..) {
        to.node.on_frame(now, &RxFrame::new(&bytes));
    }
    assert!(to.node.has_answers() && to.node.responses.is_empty());
    let p = PeerIdx::of(0);
    while to.node.responder().response_room(p).is_ok() {
        let none = OldValues::of_len(0, &mut SpareBuffers::default());
        to.node.responder().answer_op(p, RespOp::default(), none);
    }
    to.node.send_answers(now, &mut |_: &TxFrame<'_>| Tx::Full);
    assert_eq!(to.node.responses.free_count(), 0);
}
