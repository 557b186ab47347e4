//! How long frames may be is found although the peer is slow.

use super::*;
use crate::node::peer::State;

/// Goal: a peer that gets no processor is not taken for a path that carries less. Method: it polls
/// every 20 ms, and as long as its ring is full, that is for 200 ms, only short frames reach it.
#[test]
fn a_starved_peer_is_no_narrow_path() {
    assert_eq!(found(200), 1500);
}

/// Goal: a path that does carry less is found to, however slow the peer is.
#[test]
fn a_slow_peer_on_a_narrow_path_is_reached() {
    assert_eq!(found(u64::MAX), 256);
}

/// The frame length of a session whose long frames are lost for so many milliseconds.
fn found(narrow_ms: u64) -> u32 {
    let mut pair = Pair::new(1500, false);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
    for ms in 0..2_000 {
        turn(&mut pair, 0);
        if ms % 20 == 0 {
            for bytes in std::mem::take(&mut pair.ends[0].out) {
                if ms >= narrow_ms || bytes.len() <= 300 {
                    pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&bytes));
                }
            }
            turn(&mut pair, 1);
            for bytes in std::mem::take(&mut pair.ends[1].out) {
                if ms >= narrow_ms || bytes.len() <= 300 {
                    pair.ends[0].node.on_frame(pair.now, &RxFrame::new(&bytes));
                }
            }
        }
        pair.now = pair.now + 1_000_000;
    }
    assert_eq!(pair.read(1).len(), 1, "the message arrives");
    let (_, peer) = pair.ends[0].node.peers.iter().next().expect("one");
    assert_eq!(peer.state, State::Open);
    peer.frame_max
}

fn turn(pair: &mut Pair, i: usize) {
    let End { node, out, .. } = &mut pair.ends[i];
    node.transmit(pair.now, &mut sink(out));
}
