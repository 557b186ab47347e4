//! Messages that are announced and then claimed by the name they were announced with.

use super::*;

/// A pair whose second end announces what comes.
fn announcing() -> Pair {
    let mut pair = Pair::new(1500, false);
    let End { node, cq, av, ep, .. } = &mut pair.ends[1];
    let attr = EpAttr { buffered_recv: true, ..EpAttr::default() };
    *ep = open_ep(node, (*cq, *av), attr);
    let addr = node.addr_of(*ep).unwrap();
    let End { node, av, peer, .. } = &mut pair.ends[0];
    *peer = node.sessions().av_insert(pair.now, *av, addr).unwrap();
    pair
}

/// Sends a message of `len` bytes and returns the entry that announces it.
fn announced(pair: &mut Pair, len: usize, flags: OpFlags) -> Cqe {
    pair.send(0, IoBuf::leaked(&bytes(len)), 5, flags, 9).unwrap();
    pair.run(1_000_000);
    let [cqe] = pair.read(1)[..] else { panic!("one entry") };
    cqe
}

/// Goal: an entry tells of the message what is known, and the message is claimed once, by the name
/// that the entry has; the next message in its place has another one.
#[test]
fn each_announced_message_has_a_name_of_its_own() {
    let mut pair = announcing();
    let known = CqFlags::RECV | CqFlags::BUFFERED_RECV | CqFlags::TAGGED;
    let mut names = std::collections::BTreeSet::new();
    for round in 0..4 {
        let data = [OpFlags::empty(), OpFlags::REMOTE_CQ_DATA][round % 2];
        let cqe = announced(&mut pair, 100, data);
        let with_data = round % 2 == 1;
        assert_eq!(cqe.flags.contains(CqFlags::REMOTE_CQ_DATA), with_data);
        assert_eq!(cqe.flags - CqFlags::REMOTE_CQ_DATA, known);
        let data = if with_data { 4711 } else { 0 };
        assert_eq!((cqe.len, cqe.tag, cqe.data), (100, 5, data));
        for old in &names {
            let again = pair.recv(1, IoBuf::leaked(&[0; 100]), 5, OpFlags::CLAIM, *old);
            assert!(matches!(again, Err(Error::Invalid(_))), "{again:?}");
        }
        assert!(names.insert(cqe.op_context), "a name comes again");
        let (buf, look) = shared(100);
        pair.recv(1, buf, 5, OpFlags::CLAIM, cqe.op_context).unwrap();
        let got: Vec<u64> = pair.read(1).iter().map(|cqe| cqe.op_context).collect();
        assert_eq!((got, contents(&look)), (vec![cqe.op_context], bytes(100)));
    }
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// Goal: an entry says that it shows less than the message.
#[test]
fn a_long_message_is_announced_with_its_first_bytes() {
    let mut pair = announcing();
    for (len, more) in [(0, false), (256, false), (257, true), (1000, true)] {
        let cqe = announced(&mut pair, len, OpFlags::empty());
        assert_eq!((cqe.len, cqe.flags.contains(CqFlags::MORE)), (len as u64, more), "{len}");
        let flags = OpFlags::CLAIM | OpFlags::DISCARD;
        pair.recv(1, IoBuf::EMPTY, 5, flags, cqe.op_context).unwrap();
        assert_eq!(pair.read(1).len(), 1);
    }
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// Goal: a message is taken out of matching once. Method: one of which segments are missing is
/// claimed by a peek before it could be announced.
#[test]
fn a_claimed_message_is_matched_once() {
    let mut pair = announcing();
    announced(&mut pair, 8, OpFlags::empty());
    pair.send(0, IoBuf::leaked(&bytes(3000)), 6, OpFlags::empty(), 9).unwrap();
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    assert_eq!(out.len(), 3, "segments");
    let first = out.pop_front().unwrap();
    pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&first));
    let claim = OpFlags::PEEK | OpFlags::CLAIM;
    pair.recv(1, IoBuf::EMPTY, 6, claim, 3).unwrap();
    assert_eq!(pair.read(1).iter().map(|cqe| cqe.op_context).collect::<Vec<_>>(), [3]);
    pair.run(5_000_000);
    assert_eq!(pair.read(1), []);
    let (buf, look) = shared(3000);
    pair.recv(1, buf, 6, OpFlags::CLAIM, 3).unwrap();
    let got: Vec<u64> = pair.read(1).iter().map(|cqe| cqe.op_context).collect();
    assert_eq!((got, contents(&look)), (vec![3], bytes(3000)));
}
