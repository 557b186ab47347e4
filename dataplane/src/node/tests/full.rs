//! Tables that are full.

use super::*;
use crate::rel::sent::SentPool;

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
