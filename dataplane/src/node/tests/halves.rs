//! Messages that end half way.

use super::*;

/// Goal: the receiver learns that the rest of a message will not come, and is not told so of one of
/// which nothing came. Method: the sender's endpoint is closed when so many segments have left.
#[test]
fn the_receiver_learns_that_a_message_ends_half_way() {
    for left in [0, 1, 2] {
        let mut pair = Pair::new(1500, false);
        let mut sent = 0;
        for len in [8, 3000] {
            pair.recv(1, IoBuf::leaked(&vec![0; len]), 5, OpFlags::empty(), 1).unwrap();
            pair.send(0, IoBuf::leaked(&bytes(len)), 5, OpFlags::empty(), 2).unwrap();
            if len == 8 {
                pair.run(1_000_000);
                assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
            }
        }
        let End { node, ep, out, .. } = &mut pair.ends[0];
        node.transmit(pair.now, &mut |frame: &TxFrame<'_>| {
            if sent == left {
                return Tx::Full;
            }
            sent += 1;
            sink(out)(frame)
        });
        assert_eq!(sent, left);
        node.ep_close(pair.now, *ep).unwrap();
        let (_, peer) = node.peers.iter().next().unwrap();
        assert_eq!(peer.want_nop, left > 0, "{left} segments have left");
        for bytes in std::mem::take(out) {
            pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&bytes));
        }
        let filled = |pair: &Pair| !pair.ends[1].node.reassemblies.is_empty();
        assert_eq!(filled(&pair), left > 0);
        pair.run(10_000_000);
        assert!(!filled(&pair), "{left} segments have left");
    }
}

/// Goal: a receive that has a message before all of it is there fails with the rest, and nothing is
/// left of either.
#[test]
fn a_receive_of_a_message_that_ends_half_way_fails() {
    let mut pair = Pair::new(1500, false);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    pair.run(1_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    pair.send(0, IoBuf::leaked(&bytes(3000)), 5, OpFlags::empty(), 2).unwrap();
    let now = pair.now;
    let End { node, ep, out, .. } = &mut pair.ends[0];
    node.transmit(now, &mut |frame: &TxFrame<'_>| match out.is_empty() {
        true => sink(out)(frame),
        false => Tx::Full,
    });
    let first = out.pop_front().unwrap();
    node.ep_close(now, *ep).unwrap();
    pair.ends[1].node.on_frame(now, &RxFrame::new(&first));
    pair.recv(1, IoBuf::leaked(&[0; 3000]), 5, OpFlags::empty(), 7).unwrap();
    assert_eq!(pair.ends[1].node.cqs.ready(pair.ends[1].cq), Ok(0), "the rest is awaited");
    pair.run(10_000_000);
    let err = pair.read_err(1);
    assert_eq!((err.err, err.cqe.op_context), (Error::ConnReset, 7));
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// Goal: whatever is done to a message while its segments arrive, its end leaves nothing behind.
/// Method: behind the first segment it is discarded, or received; a multi-receive, which it fills,
/// is posted before or behind that segment.
#[test]
fn the_last_segment_ends_what_the_first_began() {
    const LEN: usize = 3000;
    let cases = [("discarded", false), ("received", false), ("multi", true), ("multi", false)];
    for (what, early) in cases {
        let mut pair = Pair::new(1500, false);
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
        pair.run(1_000_000);
        assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
        let tag = if what == "multi" { u64::MAX } else { 5 };
        let (buf, look) = shared(LEN);
        let (flags, context) = match what {
            "discarded" => (OpFlags::PEEK | OpFlags::DISCARD, 7),
            "received" => (OpFlags::empty(), 8),
            _ => (OpFlags::MULTI_RECV, 9),
        };
        let mut buf = Some(if what == "discarded" { IoBuf::EMPTY } else { buf });
        if early {
            pair.recv(1, buf.take().unwrap(), tag, flags, context).unwrap();
        }
        pair.send(0, IoBuf::leaked(&bytes(LEN)), tag, OpFlags::REMOTE_CQ_DATA, 2).unwrap();
        let End { node, out, .. } = &mut pair.ends[0];
        node.transmit(pair.now, &mut sink(out));
        let first = out.pop_front().unwrap();
        pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&first));
        assert!(!pair.ends[1].node.reassemblies.is_empty());
        if let Some(buf) = buf {
            pair.recv(1, buf, tag, flags, context).unwrap();
        }
        pair.run(20_000_000);
        let got: Vec<_> = pair.read(1).iter().map(|c| (c.op_context, c.data)).collect();
        assert_eq!(got, [(context, 4711)], "{what}, early: {early}");
        if what != "discarded" {
            assert_eq!(&contents(&look)[..LEN], bytes(LEN), "{what}, early: {early}");
        }
        assert_eq!(pair.read(0).len(), 1);
        pair.run(600_000_000);
        pair.assert_quiet();
    }
}
