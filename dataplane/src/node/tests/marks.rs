//! Marks of congestion: noticed by the receiver, echoed to the sender, whose window shrinks.

use super::*;
use crate::node::peer::{Peer, State};
use crate::rel::congestion::CongestionControl;
use crate::seal::{Keyring, Mode, PreSharedKey};
use crate::wire::{BASE_LEN, Ty};

const LEN: usize = 1 << 20;

/// A message from end 0 to end 1 and perhaps one back, both of which arrive within `ns`.
fn exchange(pair: &mut Pair, back: bool, ns: u64) {
    for i in 0..=usize::from(back) {
        let (to, seen) = shared(LEN);
        pair.recv(1 - i, to, 5, OpFlags::empty(), 1).unwrap();
        pair.send(i, IoBuf::leaked(&bytes(LEN)), 5, OpFlags::empty(), 2).unwrap();
        if !back || i == 1 {
            pair.run(ns);
            assert!(
                (0..2).map(|end| pair.read(end).len()).sum::<usize>() == 2 << usize::from(back)
            );
            assert!(contents(&seen) == bytes(LEN));
        }
    }
}

fn peer(pair: &mut Pair, i: usize) -> &mut Peer {
    pair.ends[i].node.peers.iter_mut().next().unwrap().1
}

fn window(pair: &mut Pair, i: usize) -> u32 {
    peer(pair, i).snd.cwnd.window()
}

fn pairs() -> [Pair; 3] {
    let keyed = |station| {
        let key = PreSharedKey::with_key_frames(&[7; 32], Mode::Encrypted, 5).unwrap();
        let keys = Keyring::new(vec![key], [station; 32]);
        end_with(station, 1500, false, NodeSettings { keys, ..NodeSettings::default() })
    };
    let short = Pair { short: Some(0), ..Pair::new(1500, false) };
    [Pair::new(1500, false), short, Pair::of([1, 2].map(keyed))]
}

/// Goal: a mark on packets one way shrinks the window that they were sent by, and not the other
/// one, although both ways carry data; and every byte arrives.
#[test]
fn a_mark_shrinks_the_senders_window() {
    for mut pair in pairs() {
        exchange(&mut pair, true, 50_000_000);
        let [plain, back] = [0, 1].map(|i| window(&mut pair, i));
        assert!(plain > 200 && back > 200, "too small to see a mark: windows of {plain}, {back}");
        for i in 0..2 {
            let c = pair.ends[i].node.counters();
            assert_eq!((c.rx_marked, c.tx_echoes, c.rx_echoes), (0, 0, 0));
        }
        pair.marks = [false, true];
        exchange(&mut pair, false, 50_000_000);
        let (marked, sender) = (pair.ends[1].node.counters(), pair.ends[0].node.counters());
        assert!(marked.rx_marked > 700 && marked.tx_echoes > 1);
        assert_eq!((sender.rx_echoes, sender.tx_echoes), (marked.tx_echoes, 0));
        assert!(marked.tx_echoes <= marked.tx_acks);
        assert!(window(&mut pair, 0) < plain / 2, "{} of {plain}", window(&mut pair, 0));
        assert!(window(&mut pair, 1) >= back, "what came back were acknowledgements alone");
    }
}

/// Goal: two nodes that only acknowledge do not go on about it for ever.
#[test]
fn a_marked_acknowledgement_is_not_answered() {
    let [mut pair, ..] = pairs();
    pair.marks = [true; 2];
    exchange(&mut pair, true, 50_000_000);
    let before = pair.frames;
    pair.run(20_000_000);
    assert_eq!(pair.frames, before);
}

/// Goal: an echo leaves although packets with data carry the acknowledgement all the time, and
/// once the port has room.
#[test]
fn an_echo_is_owed_until_it_has_left() {
    let [mut pair, ..] = pairs();
    exchange(&mut pair, true, 50_000_000);
    let p = peer(&mut pair, 1);
    let (slot, sid, src) = (p.slot(), p.sid, p.station());
    let mut bytes = vec![0; BASE_LEN + Ty::Nop.op_len()];
    crate::wire::Base { ty: Ty::Msg, dst_sid: sid, src, ..p.base(src, Ty::Msg) }
        .emit(bytes.first_chunk_mut().unwrap());
    let (now, node) = (pair.now, &mut pair.ends[1].node);
    let frame = RxFrame::new(&bytes).with_mark(true);
    node.note_mark(now, &frame);
    node.peers[slot].carried_ack();
    node.note_mark(now, &frame);
    let later = now + 100_000;
    node.send_acks(later, &mut |_: &TxFrame<'_>| Tx::Full);
    assert!(node.peers[slot].marked && node.owes_acks(later + 100_000));
    let mut out = VecDeque::new();
    node.send_acks(later + 100_000, &mut sink(&mut out));
    assert_eq!((out.len(), node.counters().tx_echoes), (1, 1));
    assert_eq!(out[0][14] & 31, Ty::Ack as u8);
    assert!(out[0][15] & 0x10 != 0 && !node.peers[slot].marked);
    // Strangers, and frames of no session, owe nothing.
    for (at, change) in [(16, 1), (6, 2), (14, Ty::Msg as u8 ^ Ty::Ack as u8)] {
        let mut other = bytes.clone();
        other[at] ^= change;
        for cut in [0, 13, 39, other.len()] {
            node.note_mark(later, &RxFrame::new(&other[..cut]).with_mark(true));
        }
    }
    assert!(!node.peers[slot].marked);
    // Nor does one to a peer that does not take it.
    node.peers[slot].takes_echo = false;
    node.note_mark(later, &frame);
    assert!(!node.peers[slot].marked && node.peers[slot].state == State::Open);
}

/// Goal: under a key only an authentic frame tells of a mark.
#[test]
fn a_forged_frame_tells_of_no_mark() {
    let [.., mut pair] = pairs();
    exchange(&mut pair, true, 50_000_000);
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    let frame = out.pop_front().expect("it leaves at once");
    let mut forged = frame.clone();
    *forged.last_mut().unwrap() ^= 1;
    for (bytes, tells) in [(&forged, false), (&frame, true), (&frame, false)] {
        let now = pair.now;
        peer(&mut pair, 1).marked = false;
        pair.ends[1].node.on_frame(now, &RxFrame::new(bytes).with_mark(true));
        assert_eq!(peer(&mut pair, 1).marked, tells);
    }
}
