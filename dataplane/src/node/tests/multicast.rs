//! Multicast groups: who receives, who does not, and what strangers can do.

use barewire_driver::port::MacAddr;

use super::*;
use crate::psn::Psn;
use crate::seal::{Keyring, Mode, PreSharedKey};
use crate::types::GroupAddr;
use crate::wire::{self, Base, McastOp, Op, Ty, WireError};

const CAPS: Caps = Caps::MULTICAST
    .union(Caps::MSG)
    .union(Caps::TAGGED)
    .union(Caps::SEND)
    .union(Caps::RECV)
    .union(Caps::SOURCE)
    .union(Caps::DIRECTED_RECV)
    .union(Caps::MULTI_RECV);

fn group(n: u8) -> GroupAddr {
    GroupAddr::new(MacAddr([1, 0, 0x5e, 0, 0, n]), 7).unwrap()
}

/// An end whose endpoint may join groups.
fn member(station: u8, settings: NodeSettings) -> End {
    let mut end = end_with(station, 1500, false, settings);
    let attr = EpAttr { caps: CAPS, ..EpAttr::default() };
    end.ep = open_ep(&mut end.node, (end.cq, end.av), attr);
    end
}

fn recv(end: &mut End, len: usize, src: FiAddr, context: u64) -> IoBuf {
    let (buf, look) = shared(len);
    let (kind, flags) = (MsgKind::Msg, OpFlags::empty());
    let req = RecvReq { kind, buf, src, tag: 0, ignore: 0, context, flags };
    end.node.post_recv(Instant(1), end.ep, req).unwrap();
    look
}

fn send(end: &mut End, text: &[u8], dest: FiAddr, flags: OpFlags) -> Result<()> {
    let (kind, tag, data, context, no_completion) = (MsgKind::Msg, 0, 4711, 9, false);
    let buf = IoBuf::leaked(text);
    let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
    end.node.post_send(Instant(1), end.ep, req)
}

fn sent(end: &mut End) -> Vec<Vec<u8>> {
    let mut out = VecDeque::new();
    end.node.transmit(Instant(2), &mut sink(&mut out));
    out.into()
}

fn read(end: &mut End) -> Vec<Cqe> {
    let mut out = [Cqe::default(); 64];
    let n = end.node.cq_read(end.cq, &mut out).unwrap_or(0);
    out[..n].to_vec()
}

fn give(end: &mut End, frames: &[Vec<u8>]) {
    for bytes in frames {
        end.node.on_frame(Instant(3), &RxFrame::new(bytes));
    }
}

/// What a node counts of groups: sent, received, dropped, of other groups.
fn counted(end: &End) -> [u64; 4] {
    let c = end.node.counters();
    [c.tx_mcast, c.rx_mcast, c.rx_mcast_dropped, c.rx_mcast_other]
}

/// Goal: members receive, with remote CQ data and with the source if it is known; other groups,
/// and who has left, do not, and the send completes at once.
#[test]
fn members_receive_and_nobody_else() {
    let [mut a, mut b, mut c] = [1, 2, 3].map(|n| member(n, NodeSettings::default()));
    let at_a = a.node.multicast().join(a.ep, group(1), Caps::empty()).unwrap();
    let at_b = b.node.multicast().join(b.ep, group(1), Caps::RECV).unwrap();
    c.node.multicast().join(c.ep, group(2), Caps::empty()).unwrap();
    let addr = a.node.addr_of(a.ep).unwrap();
    for known in [false, true] {
        let mut from = FI_ADDR_UNSPEC;
        if known {
            from = b.node.sessions().av_insert(Instant(0), b.av, addr).unwrap();
        }
        let look = recv(&mut b, 16, from, 5);
        let also = recv(&mut c, 16, FI_ADDR_UNSPEC, 6);
        send(&mut a, b"hello", at_a.addr(), OpFlags::REMOTE_CQ_DATA).unwrap();
        let done = read(&mut a);
        assert_eq!((done.len(), done[0].op_context), (1, 9));
        let frames = sent(&mut a);
        assert_eq!((frames.len(), &frames[0][..6]), (1, &[0xff; 6][..]));
        give(&mut b, &frames);
        give(&mut c, &frames);
        let got = read(&mut b);
        assert_eq!(got.len(), 1);
        assert_eq!((got[0].op_context, got[0].len, got[0].data), (5, 5, 4711));
        assert_eq!(got[0].src, from);
        assert_eq!(&contents(&look)[..6], b"hello\xEE");
        assert_eq!(contents(&also), [0xEE; 16]);
        assert!(read(&mut c).is_empty());
    }
    assert_eq!((counted(&a), counted(&b), counted(&c)), ([2, 0, 0, 0], [0, 2, 0, 0], [0, 0, 0, 2]));
    let _look = recv(&mut b, 16, FI_ADDR_UNSPEC, 5);
    b.node.groups.leave(at_b).unwrap();
    assert_eq!(b.node.groups.leave(at_b), Err(Error::BadFd));
    send(&mut a, b"hello", at_a.addr(), OpFlags::MULTICAST).unwrap();
    give(&mut b, &sent(&mut a));
    assert!(read(&mut b).is_empty());
    assert_eq!(counted(&b), [0, 2, 0, 1]);
}

/// Goal: the sender does not hear itself, neither at once nor when its frame comes back; another
/// endpoint of the node does, once; and one that is closed is in no group.
#[test]
fn the_sender_does_not_hear_itself() {
    let mut end = member(1, NodeSettings::default());
    let sender = end.ep;
    let attr = EpAttr { caps: CAPS, ..EpAttr::default() };
    let other = open_ep(&mut end.node, (end.cq, end.av), attr);
    let to = end.node.multicast().join(sender, group(1), Caps::empty()).unwrap().addr();
    end.node.multicast().join(other, group(1), Caps::empty()).unwrap();
    for (ep, context) in [(sender, 1), (other, 2), (other, 3)] {
        end.ep = ep;
        recv(&mut end, 8, FI_ADDR_UNSPEC, context);
    }
    end.ep = sender;
    send(&mut end, b"all", to, OpFlags::empty()).unwrap();
    let frames = sent(&mut end);
    give(&mut end, &frames);
    let contexts: Vec<_> = read(&mut end).iter().map(|cqe| cqe.op_context).collect();
    assert_eq!(contexts, [9, 2]);
    assert_eq!(end.node.counters().rx_not_ours, 1);
    end.node.ep_close(Instant(4), other).unwrap();
    send(&mut end, b"all", to, OpFlags::empty()).unwrap();
    sent(&mut end);
    assert_eq!(counted(&end), [2, 1, 0, 0]);
}

/// Goal: what cannot be sent or joined is refused for its cause, and leaves nothing.
#[test]
fn invalid_multicast_calls_are_refused() {
    let mut end = member(1, NodeSettings::default());
    let ep = end.ep;
    assert!(matches!(send(&mut end, b"x", 1 << 44 | 1, OpFlags::empty()), Err(Error::Invalid(_))));
    let at = end.node.multicast().join(ep, group(1), Caps::empty()).unwrap();
    assert!(matches!(
        end.node.multicast().join(ep, group(1), Caps::empty()),
        Err(Error::Invalid(_))
    ));
    let mine = end.node.multicast().join(ep, group(2), Caps::RECV).unwrap();
    assert!(matches!(
        send(&mut end, b"x", mine.addr(), OpFlags::empty()),
        Err(Error::OpNotSupp(_))
    ));
    let peer = "barewire://02:00:00:00:00:09/1".parse().unwrap();
    let peer = end.node.sessions().av_insert(Instant(0), end.av, peer).unwrap();
    let flagged = send(&mut end, b"x", peer, OpFlags::MULTICAST);
    assert!(matches!(flagged, Err(Error::Invalid(_))), "{flagged:?}");
    for flag in [OpFlags::DELIVERY_COMPLETE, OpFlags::MATCH_COMPLETE, OpFlags::FENCE] {
        assert_eq!(send(&mut end, b"x", at.addr(), flag), Err(Error::BadFlags));
    }
    let max = end.node.port.mc_max();
    assert_eq!(max, 1500 - 26 - McastOp::LEN - 4);
    let long = vec![1; max + 1];
    assert_eq!(send(&mut end, &long, at.addr(), OpFlags::empty()), Err(Error::MsgTooLong));
    let imm = OpFlags::REMOTE_CQ_DATA;
    assert_eq!(send(&mut end, &long[..max - 7], at.addr(), imm), Err(Error::MsgTooLong));
    assert_eq!(send(&mut end, &long[..257], at.addr(), OpFlags::INJECT), Err(Error::MsgTooLong));
    assert!(sent(&mut end).is_empty() && read(&mut end).is_empty());
    send(&mut end, &long[..max], at.addr(), OpFlags::empty()).unwrap();
    assert_eq!(sent(&mut end)[0].len(), 1514);
    let plain = open_ep(&mut end.node, (end.cq, end.av), EpAttr::default());
    assert!(matches!(
        end.node.multicast().join(plain, group(1), Caps::empty()),
        Err(Error::OpNotSupp(_))
    ));
}

/// Goal: messages of no byte and of the longest length arrive whole, with and without remote CQ
/// data.
#[test]
fn the_shortest_and_the_longest_arrive() {
    let [mut a, mut b] = [1, 2].map(|n| member(n, NodeSettings::default()));
    let at_a = a.node.multicast().join(a.ep, group(1), Caps::empty()).unwrap();
    b.node.multicast().join(b.ep, group(1), Caps::empty()).unwrap();
    let max = a.node.port.mc_max();
    let text: Vec<u8> = (0..max).map(|i| i as u8).collect();
    let imm = OpFlags::REMOTE_CQ_DATA;
    for (len, flags) in [(0, OpFlags::empty()), (max, OpFlags::empty()), (0, imm), (max - 8, imm)] {
        let look = recv(&mut b, max, FI_ADDR_UNSPEC, 5);
        send(&mut a, &text[..len], at_a.addr(), flags).unwrap();
        give(&mut b, &sent(&mut a));
        let got = read(&mut b);
        let data = if flags == imm { 4711 } else { 0 };
        assert_eq!((got.len(), got[0].len, got[0].data), (1, len as u64, data), "{len}");
        let memory = contents(&look);
        assert_eq!(memory[..len], text[..len]);
        assert!(memory[len..].iter().all(|&b| b == 0xEE), "{len}: more was written");
    }
}

/// Goal: the messages of a sender that restarted, whose numbers begin again, are no copies of those
/// of its earlier life, and copies of those are still dropped.
#[test]
fn a_sender_that_restarted_is_heard() {
    let mut b = member(2, NodeSettings::default());
    b.node.multicast().join(b.ep, group(1), Caps::empty()).unwrap();
    for incarnation in [5, 6, 7] {
        let mut a = member(1, NodeSettings::default());
        a.node.settings.incarnation = incarnation;
        let at_a = a.node.multicast().join(a.ep, group(1), Caps::empty()).unwrap();
        for n in 0..4 {
            recv(&mut b, 8, FI_ADDR_UNSPEC, n);
            send(&mut a, &[n as u8; 3], at_a.addr(), OpFlags::empty()).unwrap();
            let frames = sent(&mut a);
            give(&mut b, &frames);
            let contexts: Vec<_> = read(&mut b).iter().map(|cqe| cqe.op_context).collect();
            assert_eq!(contexts, [n], "message {n} of life {incarnation}");
            give(&mut b, &frames);
        }
    }
    assert_eq!((counted(&b), b.node.counters().rx_duplicate), ([0, 12, 0, 0], 12));
}

/// Goal: whoever leaves or closes hears what came until then, and the others hear all; what was
/// sent before its sender left still leaves; and who joins again hears what comes from then on.
#[test]
fn members_leave_while_messages_arrive() {
    let [mut a, mut b] = [1, 2].map(|n| member(n, NodeSettings::default()));
    let at_a = a.node.multicast().join(a.ep, group(1), Caps::empty()).unwrap();
    let attr = || EpAttr { caps: CAPS, ..EpAttr::default() };
    let eps: Vec<EpId> = (0..4).map(|_| open_ep(&mut b.node, (b.cq, b.av), attr())).collect();
    let join = |b: &mut End, i: usize| b.node.multicast().join(eps[i], group(1), Caps::empty());
    let ids: Vec<_> = (0..4).map(|i| join(&mut b, i).unwrap()).collect();
    let post = |b: &mut End, i: usize| {
        b.ep = eps[i];
        recv(b, 8, FI_ADDR_UNSPEC, i as u64);
    };
    let mut heard_of = |b: &mut End, posted: &[usize]| {
        posted.iter().for_each(|&i| post(b, i));
        send(&mut a, b"all", at_a.addr(), OpFlags::empty()).unwrap();
        give(b, &sent(&mut a));
        let mut contexts: Vec<_> = read(b).iter().map(|cqe| cqe.op_context).collect();
        contexts.sort_unstable();
        contexts
    };
    assert_eq!(heard_of(&mut b, &[0, 1, 2, 3]), [0, 1, 2, 3]);
    b.node.groups.leave(ids[1]).unwrap();
    // Its receive stays, for messages of peers.
    assert_eq!(heard_of(&mut b, &[0, 1, 2, 3]), [0, 2, 3]);
    b.node.ep_close(Instant(4), eps[0]).unwrap();
    read(&mut b);
    assert_eq!(heard_of(&mut b, &[2, 3]), [2, 3]);
    b.node.groups.leave(ids[3]).unwrap();
    assert_eq!(heard_of(&mut b, &[2]), [2]);
    join(&mut b, 1).unwrap();
    assert_eq!(heard_of(&mut b, &[2]), [1, 2]);
    b.node.groups.leave(ids[2]).unwrap();

    let again = join(&mut b, 3).unwrap();
    b.ep = eps[3];
    send(&mut b, b"last", again.addr(), OpFlags::empty()).unwrap();
    b.node.groups.leave(again).unwrap();
    assert_eq!(sent(&mut b).len(), 1, "what was sent is gone with its sender");
}

/// Goal: a port without room delays messages, and refuses new ones once the queue is full.
#[test]
fn a_full_port_is_waited_for() {
    let mut end = member(1, NodeSettings::default());
    let at = end.node.multicast().join(end.ep, group(1), Caps::empty()).unwrap();
    let mut posted = 0;
    while send(&mut end, &[posted], at.addr(), OpFlags::empty()).is_ok() {
        end.node.transmit(Instant(2), &mut |_: &TxFrame<'_>| Tx::Full);
        posted += 1;
    }
    assert_eq!(posted, 64);
    assert_eq!(send(&mut end, b"x", at.addr(), OpFlags::empty()), Err(Error::Again));
    assert!(end.node.next_deadline().is_some());
    let frames = sent(&mut end);
    assert_eq!(frames.len(), 64);
    assert!(frames.iter().zip(0..).all(|(frame, n)| frame[64] == n));
    assert_eq!(send(&mut end, b"x", at.addr(), OpFlags::empty()), Ok(()));
}

/// A MCAST of a station that nobody knows.
fn forged(crc: bool, inc: u64, payload: &[u8]) -> Vec<u8> {
    numbered(0, crc, inc, payload)
}

/// The same with this number.
fn numbered(number: u32, crc: bool, inc: u64, payload: &[u8]) -> Vec<u8> {
    let base = Base {
        dst: Station::BROADCAST,
        src: Station::at([2, 0, 0, 0, 0, 0x66]),
        ty: Ty::Mcast,
        ar: false,
        rtx: false,
        ce: false,
        crc,
        dst_sid: 0,
        psn: Psn(number),
        cack: Psn(0),
        grant: 0,
        plen: 0,
    };
    let op = McastOp { group: group(1), src_ep: 3, inc, imm: None };
    wire::frame(&base, &Op::Mcast(op), payload)
}

/// Goal: a flood of a stranger takes posted receives and nothing else: no peer, block, session,
/// answer or unexpected message; and no receive that names a source.
#[test]
fn a_flood_by_a_stranger_is_dropped() {
    let mut end = member(1, NodeSettings::default());
    end.node.multicast().join(end.ep, group(1), Caps::empty()).unwrap();
    let peer = "barewire://02:00:00:00:00:09/3".parse().unwrap();
    let peer = end.node.sessions().av_insert(Instant(0), end.av, peer).unwrap();
    recv(&mut end, 4, peer, 1);
    let before = end.node.statistics().levels();
    let frame = |number| numbered(number, true, 5, b"flood");
    give(&mut end, &(0..1000).map(frame).collect::<Vec<_>>());
    assert_eq!(counted(&end), [0, 0, 1000, 0]);
    assert_eq!(end.node.statistics().levels(), before);
    assert!(sent(&mut end).is_empty() && read(&mut end).is_empty());
    recv(&mut end, 4, FI_ADDR_UNSPEC, 2);
    // A copy of the last one is none more.
    give(&mut end, &[frame(999)]);
    assert_eq!(end.node.counters().rx_duplicate, 1);
    give(&mut end, &[frame(1000)]);
    let End { node, cq, .. } = &mut end;
    let err = node.receiving().cq_readerr(*cq).unwrap();
    assert_eq!((err.err, err.cqe.op_context, err.olen), (Error::Trunc, 2, 1));
}

/// Goal: of a frame that is cut anywhere, or has any bit flipped, nothing is taken if it has a
/// checksum, and without one it is counted or delivered, and no more.
#[test]
fn damaged_frames_are_counted() {
    for crc in [true, false] {
        let settings = NodeSettings { crc: Some(crc), ..NodeSettings::default() };
        let mut end = member(1, settings);
        end.node.multicast().join(end.ep, group(1), Caps::empty()).unwrap();
        let before = end.node.statistics().levels();
        let good = forged(crc, 5, b"payload");
        for len in 0..good.len() {
            give(&mut end, &[good[..len].to_vec()]);
        }
        for bit in 0..good.len() * 8 {
            let mut bytes = good.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            give(&mut end, &[bytes]);
        }
        assert_eq!(end.node.statistics().levels(), before);
        assert!(sent(&mut end).len() <= 256, "answers to strangers are limited");
        if crc {
            let stations = counted(&end)[2];
            // The addresses of Ethernet's header are not under the checksum.
            assert!(stations <= 48, "{stations} damaged ones were taken");
        } else {
            assert!(end.node.counters().rx_wire[WireError::McastGroup.index()] > 0);
        }
    }
}

/// Goal: with peers that have to be inserted, a stranger reaches no member.
#[test]
fn strangers_are_refused_where_peers_are_inserted() {
    let settings = NodeSettings { inserted: true, ..NodeSettings::default() };
    let mut end = member(1, settings);
    end.node.multicast().join(end.ep, group(1), Caps::empty()).unwrap();
    recv(&mut end, 8, FI_ADDR_UNSPEC, 1);
    let frame = forged(true, 5, b"hi");
    give(&mut end, std::slice::from_ref(&frame));
    assert_eq!((end.node.counters().rx_not_inserted, counted(&end)), (1, [0; 4]));
    let it = "barewire://02:00:00:00:00:66/3#5".parse().unwrap();
    let it = end.node.sessions().av_insert(Instant(0), end.av, it).unwrap();
    // Another life of it is somebody else.
    give(&mut end, &[forged(true, 6, b"hi")]);
    assert_eq!(end.node.counters().rx_not_inserted, 2);
    give(&mut end, &[frame]);
    let got = read(&mut end);
    assert_eq!((got.len(), got[0].src, got[0].len), (1, it, 2));
}

/// Goal: a node that seals joins no group, and drops what comes to one without a claim against its
/// sender.
#[test]
fn a_node_with_a_key_has_no_groups() {
    let key = PreSharedKey::with_key_frames(&[7; 32], Mode::Encrypted, 5).unwrap();
    let keys = Keyring::new(vec![key], [1; 32]);
    let mut end = member(1, NodeSettings { keys, ..NodeSettings::default() });
    let joined = end.node.multicast().join(end.ep, group(1), Caps::empty());
    assert!(matches!(joined, Err(Error::OpNotSupp(_))), "{joined:?}");
    recv(&mut end, 8, FI_ADDR_UNSPEC, 1);
    give(&mut end, &[forged(false, 5, b"hi"), forged(true, 5, b"hi")]);
    assert_eq!((end.node.counters().rx_clear, counted(&end)), (2, [0; 4]));
    assert!(end.node.observed.claims().is_empty() && read(&mut end).is_empty());
}

/// Goal: only an enabled endpoint for messages, which takes them as they come, joins a group, and
/// in directions that it has.
#[test]
fn an_endpoint_joins_in_the_directions_that_it_has() {
    let mut end = member(1, NodeSettings::default());
    let (queues, plain) = ((end.cq, end.av), EpAttr { caps: CAPS, ..EpAttr::default() });
    let unsupported = |end: &mut End, attr: EpAttr, directions| {
        let ep = open_ep(&mut end.node, queues, attr);
        let got = end.node.multicast().join(ep, group(1), directions);
        assert!(matches!(got, Err(Error::OpNotSupp(_))), "{got:?}");
    };
    unsupported(&mut end, EpAttr { buffered_recv: true, ..plain }, Caps::empty());
    unsupported(&mut end, EpAttr { caps: CAPS - Caps::MSG, ..plain }, Caps::empty());
    let one_way = [(Caps::SEND, Caps::RECV), (Caps::RECV, Caps::SEND)];
    for (has, other) in one_way {
        let attr = EpAttr { caps: CAPS - other, ..plain };
        unsupported(&mut end, attr, other);
        unsupported(&mut end, attr, Caps::SEND | Caps::RECV);
        for directions in [Caps::empty(), has] {
            let ep = open_ep(&mut end.node, queues, attr);
            let to = end.node.multicast().join(ep, group(1), directions).unwrap().addr();
            end.ep = ep;
            let sends = send(&mut end, b"x", to, OpFlags::empty());
            assert_eq!(sends.is_ok(), has == Caps::SEND, "{has:?}: {sends:?}");
        }
    }
    let shut = end.node.eps.open(plain).unwrap();
    assert_eq!(end.node.multicast().join(shut, group(1), Caps::empty()), Err(Error::OpBadState));
}

/// Goal: a node has 256 memberships at most, and one that is left makes room; further joins do not
/// lengthen the queue of 64 frames.
#[test]
fn memberships_and_queued_frames_are_bounded() {
    let mut end = member(1, NodeSettings::default());
    let first = end.node.multicast().join(end.ep, group(0), Caps::empty()).unwrap();
    let mut posted = 0;
    for n in 1..=255 {
        if n % 32 == 1 {
            while send(&mut end, b"x", first.addr(), OpFlags::empty()).is_ok() {
                posted += 1;
            }
        }
        end.node.multicast().join(end.ep, group(n), Caps::empty()).unwrap();
    }
    assert_eq!(posted, 64);
    let other = GroupAddr::new(MacAddr([1, 0, 0x5e, 0, 1, 0]), 7).unwrap();
    let mut join = || end.node.multicast().join(end.ep, other, Caps::empty());
    assert_eq!(join(), Err(Error::NoMem));
    end.node.groups.leave(first).unwrap();
    let mut join = || end.node.multicast().join(end.ep, other, Caps::empty());
    assert!(join().is_ok());
    assert_eq!(sent(&mut end).len(), 64);
}
