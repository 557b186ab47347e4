//! Which frames the fast path takes.

use super::*;

/// Goal: the fast path takes the message that is next, and declines any other without effect.
/// Method: two messages, the second one first; and the first one of another station or session.
#[test]
fn the_fast_path_takes_the_next_message_alone() {
    for lossless in [true, false] {
        let mut pair = Pair::new(1500, lossless);
        pair.short = Some(0);
        for context in 0..4 {
            pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), context).unwrap();
            pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), context).unwrap();
            pair.run(1_000_000);
        }
        assert_eq!((pair.read(0).len(), pair.read(1).len()), (4, 4));
        for context in 4..6 {
            pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), context).unwrap();
            pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), context).unwrap();
        }
        let now = pair.now;
        let [first, second] = [0, 1].map(|i| pair.ends[0].out[i].clone());
        let mut take = |bytes: &[u8]| {
            let (node, frame) = (&mut pair.ends[1].node, RxFrame::new(bytes));
            match lossless {
                true => node.rx_eager::<false>(now, &frame),
                false => node.rx_eager::<true>(now, &frame),
            }
        };
        assert!(!take(&second), "lossless {lossless}");
        // The last byte of the source, and the highest of the session's name.
        for at in [11, 19] {
            let mut other = first.clone();
            other[at] ^= 0x40;
            assert!(!take(&other), "lossless {lossless}, byte {at}");
        }
        assert!(take(&first) && take(&second), "lossless {lossless}");
        assert!(!take(&second), "once");
        let got: Vec<u64> = pair.read(1).iter().map(|cqe| cqe.op_context).collect();
        assert_eq!(got, [4, 5]);
    }
}

/// Goal: so it is with the segments behind the first of a message.
#[test]
fn the_fast_path_takes_the_next_segment_alone() {
    let mut pair = Pair::new(1500, true);
    for len in [8, 3000] {
        pair.recv(1, IoBuf::leaked(&vec![0; len]), 5, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&bytes(len)), 5, OpFlags::empty(), 2).unwrap();
        if len == 8 {
            pair.run(1_000_000);
            assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
        }
    }
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    let (now, frames) = (pair.now, std::mem::take(out));
    assert_eq!(frames.len(), 3);
    let node = &mut pair.ends[1].node;
    let mut take = |i: usize| node.rx_segment(now, &RxFrame::new(&frames[i]));
    assert!(!take(0), "the first finds the receive");
    node.on_frame(now, &RxFrame::new(&frames[0]));
    let mut take = |i: usize| node.rx_segment(now, &RxFrame::new(&frames[i]));
    assert!(!take(2) && take(1) && !take(1));
    pair.ends[1].node.on_frame(now, &RxFrame::new(&frames[2]));
    assert_eq!(pair.read(1).len(), 1);
}

/// Goal: the last segment of a message opens the fast path to the message behind it.
#[test]
fn the_fast_path_is_open_behind_the_last_segment() {
    let mut pair = Pair::new(1500, true);
    for len in [8, 3000, 8] {
        pair.recv(1, IoBuf::leaked(&vec![0; len]), 5, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&bytes(len)), 5, OpFlags::empty(), 2).unwrap();
        if pair.now == Instant(1) {
            pair.run(1_000_000);
            assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
        }
    }
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    let (now, frames) = (pair.now, std::mem::take(out));
    assert_eq!(frames.len(), 4);
    let node = &mut pair.ends[1].node;
    node.on_frame(now, &RxFrame::new(&frames[0]));
    let message = RxFrame::new(&frames[3]);
    assert!(!node.rx_eager::<false>(now, &message), "the one before it is not there");
    assert!((1..3).all(|i| node.rx_segment(now, &RxFrame::new(&frames[i]))));
    assert!(node.rx_eager::<false>(now, &message));
    assert_eq!(pair.read(1).len(), 2);
}
