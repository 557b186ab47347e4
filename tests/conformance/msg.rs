//! Section A.1: the nine calls of fi_msg, their flags, and buffered receive.

use barewire::flags::{BindFlags, Caps, CqFlags, Mode, OpFlags};
use barewire::opt::*;
use barewire::*;
use barewire_driver::backend::fault::{Fault, FaultSettings};
use barewire_driver::port::Port;

use crate::harness::*;

/// Sizes around every limit: inject 256, the loopback's frame of 9,000 bytes, eager 64 KiB, and
/// one that is pulled in several pieces.
const SIZES: &[usize] = &[0, 1, 255, 256, 257, 8_950, 8_999, 9_000, 9_001, 65_535, 65_536, 65_537];

/// M1, M4: one message for one posted buffer, whole, of any length; the completion says how long it
/// was and gives the buffers back. The same when the message comes first.
#[test]
fn m1_m4_a_message_of_any_length_arrives_whole() {
    let p = Pair::default();
    for late in [false, true] {
        for &len in SIZES.iter().chain(&[1 << 20]) {
            let post = || p.b.ep.recv(Buf::zeroed(len + 7), FI_ADDR_UNSPEC, 11).unwrap();
            if !late {
                post();
            }
            p.a.ep.send(buf(len, 3), p.a.peer, 22).unwrap();
            if late {
                p.settle();
                post();
            }
            let got = p.at_b();
            assert_eq!((got.op_context, got.len), (11, len));
            assert_eq!(got.flags, CqFlags::RECV | CqFlags::MSG);
            assert!(got.bytes() == &pattern(len, 3)[..], "{len} bytes arrived changed");
            let sent = p.at_a();
            assert_eq!((sent.op_context, sent.flags), (22, CqFlags::SEND | CqFlags::MSG));
            assert!(sent.bufs.into_one().unwrap()[..] == pattern(len, 3)[..]);
        }
    }
    p.all_is_back();
}

/// M4: the same while another one talks with both, where the tests run with one: it is far from a
/// near pair, or near to one of a far pair.
#[test]
fn m4_messages_arrive_beside_those_of_another() {
    let p = Pair::default();
    for n in 0..100 {
        p.b.ep.recv(Buf::zeroed(600), FI_ADDR_UNSPEC, n).unwrap();
        p.a.ep.send(buf(600, n), p.a.peer, n).unwrap();
        let got = p.at_b();
        assert_eq!((got.op_context, got.bytes()), (n, &pattern(600, n)[..]));
        assert_eq!(p.at_a().op_context, n);
    }
    let Some(before) = p.exchanges() else { return p.all_is_back() };
    // Of every length, with each of the two.
    until("ten messages of the other", || {
        p.turn();
        p.exchanges().filter(|now| *now >= before + 10)
    });
    p.all_is_back();
    let near = p.a.domain.near_counters().unwrap().expect("a near side").rx_frames;
    let all = p.a.domain.port_counters().unwrap().rx_frames;
    assert!(near > 0 && all > near, "{near} near frames of {all}");
}

/// M1: posted buffers are taken in the order of their posting, whoever may fill them.
#[test]
fn m1_receives_match_in_posting_order() {
    let p = Pair::default();
    // From B itself, from anybody, from A.
    p.b.ep.recv(Buf::zeroed(1), p.b.me, 1).unwrap();
    p.b.ep.recv(Buf::zeroed(1), FI_ADDR_UNSPEC, 2).unwrap();
    p.b.ep.recv(Buf::zeroed(1), p.b.peer, 3).unwrap();
    p.a.ep.inject(&[1], p.a.peer).unwrap();
    p.a.ep.inject(&[2], p.a.peer).unwrap();
    let (first, second) = (p.at_b(), p.at_b());
    assert_eq!((first.op_context, first.bytes()), (2, &[1][..]));
    assert_eq!((second.op_context, second.bytes()), (3, &[2][..]));
    p.b.ep.inject(&[3], p.b.me).unwrap();
    assert_eq!(p.at_b().op_context, 1);
    p.all_is_back();
}

/// M2, M5: gather and scatter lists, with uneven and empty pieces and an exact end.
#[test]
fn m2_m5_lists_are_one_message() {
    let p = Pair::default();
    let cuts: [(&[usize], &[usize]); 4] = [
        (&[1, 0, 99, 1], &[50, 51]),
        (&[101], &[0, 1, 0, 100]),
        (&[9_000, 1, 80_000], &[44_500, 44_501]),
        (&[1; 8], &[2, 2, 2, 2]),
    ];
    for (from, to) in cuts {
        let total: usize = from.iter().sum();
        let whole = pattern(total, 5);
        let mut rest = &whole[..];
        let pieces: Vec<Buf> = from
            .iter()
            .map(|&n| {
                let (piece, tail) = rest.split_at(n);
                rest = tail;
                Buf::from(piece)
            })
            .collect();
        p.b.ep.recvv(to.iter().map(|&n| Buf::zeroed(n)).collect(), FI_ADDR_UNSPEC, 1).unwrap();
        p.a.ep.sendv(pieces, p.a.peer, 2).unwrap();
        let got = p.at_b();
        assert_eq!(got.len, total);
        let parts = got.bufs.into_many().unwrap();
        let joined: Vec<u8> = parts.iter().flat_map(|b| b.iter().copied()).collect();
        assert!(joined == whole, "{from:?} into {to:?}");
        assert_eq!(p.at_a().bufs.into_many().unwrap().len(), from.len());
    }
    p.all_is_back();
}

/// M3, M6: the `msg` calls with each flag alone.
#[test]
fn m3_m6_msg_calls_with_each_flag() {
    let p = Pair::default();
    let tx = [
        PLAIN,
        OpFlags::COMPLETION,
        OpFlags::MORE,
        OpFlags::INJECT,
        OpFlags::INJECT_COMPLETE,
        OpFlags::TRANSMIT_COMPLETE,
        OpFlags::DELIVERY_COMPLETE,
        OpFlags::MATCH_COMPLETE,
        OpFlags::FENCE,
        OpFlags::REMOTE_CQ_DATA,
        OpFlags::COMPLETION | OpFlags::FENCE | OpFlags::REMOTE_CQ_DATA | OpFlags::DELIVERY_COMPLETE,
    ];
    let rx = [PLAIN, OpFlags::COMPLETION, OpFlags::MORE, OpFlags::TRANSMIT_COMPLETE];
    for (i, flags) in tx.into_iter().enumerate() {
        let rx_flags = rx[i % rx.len()];
        p.b.ep.recvmsg(untagged(Buf::zeroed(100), FI_ADDR_UNSPEC, 1), rx_flags).unwrap();
        let msg = Msg { data: 0xabcd, ..untagged(buf(100, 2), p.a.peer, 2) };
        p.a.ep.sendmsg(msg, flags).unwrap();
        let got = p.at_b();
        assert_eq!(got.bytes(), pattern(100, 2), "{flags:?}");
        let has_data = flags.contains(OpFlags::REMOTE_CQ_DATA);
        assert_eq!(got.flags.contains(CqFlags::REMOTE_CQ_DATA), has_data, "{flags:?}");
        assert_eq!(got.data, if has_data { 0xabcd } else { 0 });
        assert_eq!(p.at_a().op_context, 2, "{flags:?}");
    }
    p.all_is_back();
}

/// M7: an injected message leaves its source free at once, completes without an entry, and counts.
#[test]
fn m7_inject_copies_and_counts_but_writes_no_entry() {
    let plan = Plan::default();
    let mut ports = ports(2).into_iter();
    let b = Side::new(ports.next().unwrap(), &plan);
    let domain =
        the_fabric().domain_on(&plan.info, plan.settings.clone(), ports.next().unwrap()).unwrap();
    let (cq, av) = (domain.cq_open(plan.cq).unwrap(), domain.av_open(AvAttr::default()).unwrap());
    let cntr = domain.cntr_open(CntrAttr::default()).unwrap();
    let ep = domain.endpoint(&plan.info).unwrap();
    ep.bind_cq(&cq, BOTH).unwrap();
    ep.bind_cntr(&cntr, BindFlags::TRANSMIT).unwrap();
    ep.bind_av(&av).unwrap();
    ep.enable().unwrap();
    let mut to = [0];
    av.insert(&[b.ep.getname().unwrap()], &mut to).unwrap();
    let mut source = [0; 256];
    for n in 0..100_u8 {
        b.ep.recv(Buf::zeroed(256), FI_ADDR_UNSPEC, u64::from(n)).unwrap();
        source.fill(n);
        until("room to inject", || match ep.inject(&source[..usize::from(n) + 100], to[0]) {
            Ok(()) => Some(()),
            Err(Error::Again) => {
                let _ = cq.read(&mut []);
                None
            }
            Err(e) => panic!("{e}"),
        });
        source.fill(0xff);
        let got = until("the message", || {
            domain.progress().unwrap();
            b.read()
        });
        assert_eq!(got.bytes(), &[n; 256][..usize::from(n) + 100]);
    }
    until("the counter", || {
        // On a port that may lose frames it waits for acknowledgements.
        assert!(b.read().is_none());
        (cntr.read() == Ok(100)).then_some(())
    });
    assert_eq!((cntr.readerr(), cq.read(&mut [Completion::default()])), (Ok(0), Err(Error::Again)));
}

/// M8, M9, MF1: eight bytes for the receiver's completion, with any message.
#[test]
fn m8_m9_mf1_remote_cq_data() {
    let p = Pair::default();
    for data in [0, 1, u64::MAX] {
        for len in [0, 8, 256, 9_001, 70_000] {
            p.b.ep.recv(Buf::zeroed(len), FI_ADDR_UNSPEC, 1).unwrap();
            p.a.ep.senddata(buf(len, 1), data, p.a.peer, 2).unwrap();
            let got = p.at_b();
            assert_eq!((got.data, got.len), (data, len));
            assert_eq!(got.flags, CqFlags::RECV | CqFlags::MSG | CqFlags::REMOTE_CQ_DATA);
            assert!(got.bytes() == &pattern(len, 1)[..]);
            assert!(!p.at_a().flags.contains(CqFlags::REMOTE_CQ_DATA));
            if len <= 256 {
                p.b.ep.recv(Buf::zeroed(len), FI_ADDR_UNSPEC, 1).unwrap();
                p.a.ep.injectdata(&pattern(len, 1), data, p.a.peer).unwrap();
                let got = p.at_b();
                assert_eq!((got.data, got.bytes()), (data, &pattern(len, 1)[..]));
                assert!(got.flags.contains(CqFlags::REMOTE_CQ_DATA));
            }
        }
    }
    p.all_is_back();
}

/// MF3: `FI_COMPLETION` matters on a queue bound with `FI_SELECTIVE_COMPLETION` only; there, what
/// does not ask is not reported, unless it fails. (X39)
#[test]
fn mf3_x39_selective_completion() {
    for selective in [false, true] {
        let mut plan = Plan::default();
        plan.bind.set(BindFlags::SELECTIVE_COMPLETION, selective);
        let p = Pair::new(&plan);
        for flags in [PLAIN, OpFlags::COMPLETION] {
            let shown = !selective || flags.contains(OpFlags::COMPLETION);
            p.b.ep.recvmsg(untagged(Buf::zeroed(9), FI_ADDR_UNSPEC, 1), flags).unwrap();
            p.a.ep.sendmsg(untagged(buf(9, 1), p.a.peer, 2), flags).unwrap();
            p.settle();
            assert_eq!(p.a.read().is_some(), shown, "{selective} {flags:?}");
            assert_eq!(p.b.read().is_some(), shown, "{selective} {flags:?}");
        }
        p.b.ep.recvmsg(untagged(Buf::zeroed(4), FI_ADDR_UNSPEC, 3), PLAIN).unwrap();
        p.a.ep.sendmsg(untagged(buf(9, 1), p.a.peer, 4), PLAIN).unwrap();
        assert_eq!(p.error_at_b().err, Error::Trunc);
        p.settle();
        let _ = p.a.read();
        p.all_is_back();
    }
    // A default flag of the endpoint asks for plain calls.
    let mut plan = Plan::default();
    plan.bind |= BindFlags::SELECTIVE_COMPLETION;
    plan.info.tx_attr.op_flags = OpFlags::COMPLETION;
    plan.info.rx_attr.op_flags = OpFlags::COMPLETION;
    let p = Pair::new(&plan);
    p.b.ep.recv(Buf::zeroed(4), FI_ADDR_UNSPEC, 3).unwrap();
    p.a.ep.send(buf(4, 1), p.a.peer, 4).unwrap();
    p.at_a();
    p.at_b();
}

/// MF5: what `FI_MORE` holds back leaves with a call without it, and when the queue is read. On a
/// port that may lose frames: on one that does not, nothing is held back.
#[test]
fn mf5_more_is_a_hint_that_does_not_strand_messages() {
    let settings = FaultSettings { loss: f64::MIN_POSITIVE, ..FaultSettings::default() };
    let lossy = |port| Box::new(Fault::new(port, settings, "fault")) as Box<dyn Port>;
    let plan = Plan::default();
    let p = Pair::with(&plan, &plan, ports(2).into_iter().map(lossy).collect());
    p.meet();
    for n in 0..10 {
        p.b.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, n).unwrap();
    }
    let only_b = || {
        (0..200)
            .filter_map(|_| {
                p.b.domain.progress().unwrap();
                p.b.read()
            })
            .count()
    };
    let frames = || p.a.domain.port_counters().unwrap().tx_frames;
    let before = frames();
    // Few enough for the credit that a new session has.
    for n in 0..5 {
        p.a.ep.sendmsg(untagged(buf(8, n), p.a.peer, n), OpFlags::MORE).unwrap();
    }
    p.a.ep.sendmsg(untagged(buf(8, 5), p.a.peer, 5), PLAIN).unwrap();
    assert_eq!(only_b(), 6);
    assert!(frames() - before < 6, "six messages with FI_MORE took a frame each");
    p.settle();
    while p.a.read().is_some() {}
    for n in 6..10 {
        p.a.ep.sendmsg(untagged(buf(8, n), p.a.peer, n), OpFlags::MORE).unwrap();
    }
    assert_eq!(only_b(), 0, "nothing was held back, so this shows nothing");
    let _ = p.a.cq.read(&mut [Completion::default()]);
    assert_eq!(only_b(), 4, "the last one had FI_MORE, and nobody followed");
}

/// MF7, X54: one buffer takes many messages, each with its place in it; it is released when less
/// than `FI_OPT_MIN_MULTI_RECV` is free, and a message that does not fit is cut.
#[test]
fn mf7_x54_multi_receive() {
    let p = Pair::default();
    p.b.ep.setopt(FI_OPT_MIN_MULTI_RECV, 100).unwrap();
    assert_eq!(p.b.ep.getopt(FI_OPT_MIN_MULTI_RECV), Ok(100));
    for (lens, released_after) in [
        (&[300, 300, 300][..], 3), // the tail is exactly the minimum, then nothing fits it
        (&[300, 300, 301][..], 3), // one byte less than the minimum
        (&[1000][..], 1),
        (&[0, 0, 950][..], 3),
    ] {
        let shared = SharedBuf::from(Buf::zeroed(1000));
        let msg = untagged(shared, FI_ADDR_UNSPEC, 77);
        p.b.ep.recvmsg(msg, OpFlags::MULTI_RECV).unwrap();
        let mut offset = 0;
        let mut pieces = Vec::new();
        let mut back = None;
        for (i, &len) in lens.iter().enumerate() {
            p.a.ep.send(buf(len, i as u64), p.a.peer, 1).unwrap();
            p.at_a();
            let mut got = p.at_b();
            assert_eq!((got.op_context, got.len), (77, len));
            if len > 0 {
                let piece = got.piece.take().unwrap();
                assert_eq!((piece.offset(), &*piece), (offset, &pattern(len, i as u64)[..]));
                pieces.push(piece);
            }
            offset += len;
            if got.flags.contains(CqFlags::MULTI_RECV) {
                back = got.bufs.into_shared();
                assert_eq!(i + 1, released_after, "{lens:?}");
            }
        }
        if 1000 - offset >= 100 {
            // Still posted: a message longer than the rest is cut and ends it.
            assert!(back.is_none(), "{lens:?}");
            p.a.ep.send(buf(500, 9), p.a.peer, 1).unwrap();
            p.at_a();
            let e = p.error_at_b();
            assert_eq!((e.err, e.entry.len, e.olen), (Error::Trunc, 1000 - offset, 400));
        }
        let back = back.or_else(|| {
            let release = p.at_b();
            assert!(release.flags.contains(CqFlags::MULTI_RECV), "{release:?}");
            release.bufs.into_shared()
        });
        let back = back.expect("the buffer comes back with its release");
        // With a living piece it is not taken again.
        if !pieces.is_empty() {
            let refused = p.b.ep.recvmsg(untagged(back, FI_ADDR_UNSPEC, 1), OpFlags::MULTI_RECV);
            assert_eq!(refusal(refused, 1000), Error::Busy);
        }
        p.all_is_back();
    }
}

/// X53: a tagged buffer takes many messages that match, each under its own tag.
#[test]
fn x53_tagged_multi_receive() {
    let p = Pair::default();
    let flags = OpFlags::MULTI_RECV;
    let shared = || SharedBuf::from(Buf::zeroed(300));
    let post =
        |buf| p.b.ep.trecvmsg(TaggedMsg { ignore: 3, ..tagged(buf, u64::MAX, 4, 77) }, flags);
    post(shared()).unwrap();
    let mut pieces = Vec::new();
    for (i, tag) in [5, 7, 4].into_iter().enumerate() {
        p.a.ep.tsend(buf(100, tag), p.a.peer, tag, 1).unwrap();
        p.at_a();
        let mut got = p.at_b();
        assert_eq!((got.op_context, got.len, got.tag), (77, 100, tag));
        let piece = got.piece.take().unwrap();
        assert_eq!((piece.offset(), &*piece), (i * 100, &pattern(100, tag)[..]));
        pieces.push(piece);
        let last = got.flags.contains(CqFlags::MULTI_RECV);
        assert_eq!((last, got.bufs.into_shared().is_some()), (i == 2, i == 2));
    }
    drop(pieces);
    p.all_is_back();
    // Its ports are no others' while it has them.
    drop(p);
    // One that has FI_MULTI_RECV alone.
    let mut plan = Plan::default();
    plan.info.caps -= Caps::TAGGED_MULTI_RECV;
    let p = Pair::new(&plan);
    let refused = p.b.ep.trecvmsg(tagged(shared(), u64::MAX, 4, 77), flags);
    assert_eq!(refusal(refused, 300), Error::BadFlags);
}

/// X53: with `FI_TAGGED_DIRECTED_RECV` tagged receives alone look at the sender; with
/// `FI_EXACT_DIRECTED_RECV` they have to name him, but to claim what a peek has found.
#[test]
fn x53_directed_receives() {
    let mut plan = Plan::default();
    plan.info.caps -= Caps::DIRECTED_RECV;
    plan.info.caps |= Caps::TAGGED_DIRECTED_RECV | Caps::EXACT_DIRECTED_RECV;
    let p = Pair::new(&plan);
    let own = p.b.knows(p.b.ep.getname().unwrap());
    // The untagged one for itself takes the other's; the tagged one leaves it to the next.
    p.b.ep.recv(buf(10, 0), own, 1).unwrap();
    p.b.ep.trecv(buf(10, 0), own, 7, 0, 2).unwrap();
    p.b.ep.trecv(buf(10, 0), p.b.peer, 7, 0, 3).unwrap();
    p.a.ep.send(buf(10, 5), p.a.peer, 1).unwrap();
    p.a.ep.tsend(buf(10, 6), p.a.peer, 7, 1).unwrap();
    for context in [1, 3] {
        p.at_a();
        assert_eq!(p.at_b().op_context, context);
    }
    p.b.ep.cancel(2).unwrap();
    assert_eq!(p.error_at_b().err, Error::Canceled);
    let refused = p.b.ep.trecv(buf(10, 0), FI_ADDR_UNSPEC, 7, 0, 4);
    assert!(matches!(refusal(refused, 10), Error::Invalid(_)));
    p.b.ep.recv(buf(10, 0), FI_ADDR_UNSPEC, 5).unwrap();
    p.a.ep.send(buf(10, 5), p.a.peer, 1).unwrap();
    p.at_a();
    assert_eq!(p.at_b().op_context, 5);
    p.a.ep.tsend(buf(10, 6), p.a.peer, 8, 1).unwrap();
    p.at_a();
    let peek = OpFlags::PEEK | OpFlags::CLAIM;
    until("the message", || {
        p.turn();
        p.b.ep.trecvmsg(tagged(Bufs::None, p.b.peer, 8, 6), peek).unwrap();
        p.b.read().filter(|c| c.op_context == 6)
    });
    p.b.ep.trecvmsg(tagged(buf(10, 0), FI_ADDR_UNSPEC, 8, 6), OpFlags::CLAIM).unwrap();
    assert_eq!(p.at_b().len, 10);
    p.all_is_back();
}

/// MF7: the release is reported on a selective queue as well, and a cancelled buffer comes back.
#[test]
fn mf7_release_and_cancel() {
    let mut plan = Plan::default();
    plan.bind |= BindFlags::SELECTIVE_COMPLETION;
    let p = Pair::new(&plan);
    let post = || {
        let shared = SharedBuf::from(Buf::zeroed(128));
        p.b.ep.recvmsg(untagged(shared, FI_ADDR_UNSPEC, 5), OpFlags::MULTI_RECV).unwrap();
    };
    post();
    p.a.ep.inject(&[1; 100], p.a.peer).unwrap();
    until("the release", || {
        p.turn();
        p.b.read()
            .filter(|c| c.flags.contains(CqFlags::MULTI_RECV))
            .map(|c| c.bufs.into_shared().unwrap())
    });
    post();
    p.b.ep.cancel(5).unwrap();
    let e = p.error_at_b();
    assert_eq!(e.err, Error::Canceled);
    assert!(e.entry.bufs.into_shared().is_some());
    p.all_is_back();
}

/// MF11, X66: a fenced message, and what follows it, waits for everything before it to the same
/// peer. A large message has to be pulled; a fenced small one behind it must not pass it.
#[test]
fn mf11_fence_keeps_order_behind_large_messages() {
    let p = Pair::default();
    p.b.ep.trecv(Buf::zeroed(1 << 20), FI_ADDR_UNSPEC, 1, 0, 1).unwrap();
    p.b.ep.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 2, 0, 2).unwrap();
    p.b.ep.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 3, 0, 3).unwrap();
    p.a.ep.tsend(buf(1 << 20, 1), p.a.peer, 1, 1).unwrap();
    p.a.ep.tsendmsg(tagged(buf(8, 2), p.a.peer, 2, 2), OpFlags::FENCE).unwrap();
    p.a.ep.tsend(buf(8, 3), p.a.peer, 3, 3).unwrap();
    let order: Vec<u64> = (0..3).map(|_| p.at_b().op_context).collect();
    assert_eq!(order, [1, 2, 3]);
    // Another peer is not held up.
    p.a.ep.tsend(buf(1 << 20, 1), p.a.peer, 1, 1).unwrap();
    p.a.ep.tsendmsg(tagged(buf(8, 2), p.a.peer, 2, 2), OpFlags::FENCE).unwrap();
    p.a.ep.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 4, 0, 40).unwrap();
    p.a.ep.tinject(&[1; 8], p.a.me, 4).unwrap();
    until("the message to ourselves", || p.a.read().filter(|c| c.op_context == 40));
}

/// MF9, MF10: a delivery is complete when the peer has the message, not before.
#[test]
fn mf9_mf10_delivery_waits_for_the_peer() {
    let p = Pair::default();
    p.meet();
    p.a.ep.sendmsg(untagged(buf(64, 1), p.a.peer, 1), OpFlags::DELIVERY_COMPLETE).unwrap();
    assert!((0..2_000).all(|_| p.a.read().is_none()), "nobody has seen the message yet");
    // Kept as unexpected is delivered.
    assert_eq!(p.at_a().op_context, 1);
    p.b.ep.recv(Buf::zeroed(64), FI_ADDR_UNSPEC, 2).unwrap();
    assert_eq!(p.at_b().bytes(), pattern(64, 1));
}

fn buffered() -> Pair {
    let mut plan = Plan::default();
    plan.info.mode |= Mode::BUFFERED_RECV;
    let p = Pair::with(&Plan::default(), &plan, ports(2));
    p.b.ep.setopt(FI_OPT_BUFFERED_MIN, 64).unwrap();
    p.b.ep.setopt(FI_OPT_BUFFERED_LIMIT, 128).unwrap();
    p
}

/// MB1, MB2, MB5, X56: a message is announced by a completion that names it, with `FI_MORE` when
/// not all of it is shown.
#[test]
fn mb1_mb2_mb5_x56_messages_are_announced() {
    let p = buffered();
    assert_eq!(p.b.ep.getopt(FI_OPT_BUFFERED_MIN), Ok(64));
    assert_eq!(p.b.ep.getopt(FI_OPT_BUFFERED_LIMIT), Ok(128));
    for len in [0, 32, 50_000, 90_000] {
        p.a.ep.senddata(buf(len, 1), 9, p.a.peer, 1).unwrap();
        let told = p.at_b();
        assert!(told.flags.contains(CqFlags::BUFFERED_RECV | CqFlags::RECV | CqFlags::MSG));
        assert!(told.flags.contains(CqFlags::REMOTE_CQ_DATA));
        assert_eq!((told.len, told.data), (len, 9));
        assert_eq!(told.flags.contains(CqFlags::MORE), len > 256, "{len}: {:?}", told.flags);
        let to = untagged(Buf::zeroed(len), FI_ADDR_UNSPEC, told.op_context);
        p.b.ep.recvmsg(to, OpFlags::CLAIM).unwrap();
        let got = p.at_b();
        assert_eq!((got.op_context, got.len), (told.op_context, len));
        assert!(got.bytes() == &pattern(len, 1)[..]);
        p.at_a();
    }
    p.all_is_back();
}

/// MB3, MB4, MF2, MF4: announced messages are claimed or discarded in any order, each once.
#[test]
fn mb3_mb4_mf2_mf4_claim_and_discard() {
    let p = buffered();
    let mut told = Vec::new();
    for n in 0..6 {
        p.a.ep.send(buf(1000, n), p.a.peer, n).unwrap();
        told.push(p.at_b().op_context);
        p.at_a();
    }
    for n in [4, 0, 2] {
        let to = untagged(Buf::zeroed(1000), FI_ADDR_UNSPEC, told[n]);
        p.b.ep.recvmsg(to, OpFlags::CLAIM).unwrap();
        assert_eq!(p.at_b().bytes(), pattern(1000, n as u64));
    }
    for (n, flags) in [(5, OpFlags::CLAIM | OpFlags::DISCARD), (1, OpFlags::DISCARD)] {
        p.b.ep.recvmsg(untagged((), FI_ADDR_UNSPEC, told[n]), flags).unwrap();
        assert_eq!(p.at_b().op_context, told[n], "the completion reports the discard");
    }
    for n in [0, 1, 4] {
        let again = p.b.ep.recvmsg(untagged((), FI_ADDR_UNSPEC, told[n]), OpFlags::CLAIM);
        assert_eq!(refusal(again, 0).fi_errno(), errno::FI_EINVAL, "{n} was taken before");
    }
    let to = untagged(Buf::zeroed(10), FI_ADDR_UNSPEC, told[3]);
    p.b.ep.recvmsg(to, OpFlags::CLAIM).unwrap();
    assert_eq!(p.error_at_b().olen, 990);
    p.all_is_back();
}
