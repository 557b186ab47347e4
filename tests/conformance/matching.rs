//! Section C.5: which message goes to which receive.

use std::collections::VecDeque;

use barewire::flags::{CqFlags, OpFlags};
use barewire::*;
use proptest::prelude::*;

use crate::harness::*;

/// X50: the nine tagged calls.
#[test]
fn x50_the_nine_tagged_calls() {
    let p = Pair::default();
    let (to, any) = (p.a.peer, FI_ADDR_UNSPEC);
    p.b.ep.trecv(Buf::zeroed(10), any, 1, 0, 1).unwrap();
    p.b.ep.trecvv(vec![Buf::zeroed(4), Buf::zeroed(6)], any, 2, 0, 2).unwrap();
    p.b.ep.trecvmsg(tagged(Buf::zeroed(10), any, 3, 3), PLAIN).unwrap();
    for tag in 4..=6 {
        p.b.ep.trecv(Buf::zeroed(10), any, tag, 0, tag).unwrap();
    }
    let msg = TaggedMsg { data: 33, ..tagged(buf(10, 3), to, 3, 3) };
    p.a.ep.tsendmsg(msg, OpFlags::REMOTE_CQ_DATA).unwrap();
    p.a.ep
        .tsendv(vec![Buf::from(&pattern(10, 2)[..3]), Buf::from(&pattern(10, 2)[3..])], to, 2, 2)
        .unwrap();
    p.a.ep.tsend(buf(10, 1), to, 1, 1).unwrap();
    p.a.ep.tinject(&pattern(10, 4), to, 4).unwrap();
    p.a.ep.tsenddata(buf(10, 5), 55, to, 5, 5).unwrap();
    p.a.ep.tinjectdata(&pattern(10, 6), 66, to, 6).unwrap();
    let mut seen = Vec::new();
    for _ in 0..6 {
        let got = p.at_b();
        assert!(got.flags.contains(CqFlags::RECV | CqFlags::TAGGED));
        assert_eq!((got.tag, got.len), (got.op_context, 10));
        if let Bufs::One(b) = &got.bufs {
            assert_eq!(b[..], pattern(10, got.tag)[..]);
        } else {
            let parts = got.bufs.into_many().unwrap();
            assert_eq!(parts.concat_bytes(), pattern(10, got.tag));
        }
        seen.push((got.tag, got.data));
    }
    seen.sort_unstable();
    assert_eq!(seen, [(1, 0), (2, 0), (3, 33), (4, 0), (5, 55), (6, 66)]);
    for _ in 0..4 {
        assert!(p.at_a().flags.contains(CqFlags::SEND | CqFlags::TAGGED));
    }
    p.all_is_back();
}

trait ConcatBytes {
    fn concat_bytes(&self) -> Vec<u8>;
}

impl ConcatBytes for Vec<Buf> {
    fn concat_bytes(&self) -> Vec<u8> {
        self.iter().flat_map(|b| b.iter().copied()).collect()
    }
}

/// What a caller of the model test does next.
#[derive(Clone, Debug)]
enum Step {
    Send { from_a: bool, tag: u64 },
    Recv { src: u8, tag: u64, ignore: u64 },
    Cancel { back: usize },
    Peek { tag: u64, ignore: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tag = 0_u64..4;
    let ignore = prop_oneof![Just(0_u64), Just(1), Just(u64::MAX)];
    let step = prop_oneof![
        4 => (any::<bool>(), tag.clone()).prop_map(|(from_a, tag)| Step::Send { from_a, tag }),
        4 => (0_u8..3, tag.clone(), ignore.clone())
            .prop_map(|(src, tag, ignore)| Step::Recv { src, tag, ignore }),
        1 => (0_usize..4).prop_map(|back| Step::Cancel { back }),
        1 => (tag, ignore).prop_map(|(tag, ignore)| Step::Peek { tag, ignore }),
    ];
    proptest::collection::vec(step, 1..60)
}

/// The rule of the man page, in words that a reader can check: posted receives in the order of
/// posting, unexpected messages in the order of arrival.
#[derive(Default)]
struct Model {
    posted: VecDeque<(u64, FiAddr, u64, u64)>,
    unexpected: VecDeque<(FiAddr, u64, u64)>,
}

impl Model {
    fn fits((src, tag, ignore): (FiAddr, u64, u64), from: FiAddr, sent: u64) -> bool {
        (src == FI_ADDR_UNSPEC || src == from) && (tag | ignore) == (sent | ignore)
    }

    /// The context of the receive that takes it.
    fn arrives(&mut self, from: FiAddr, tag: u64, id: u64) -> Option<u64> {
        let at = self.posted.iter().position(|&(_, s, t, i)| Self::fits((s, t, i), from, tag));
        match at {
            Some(at) => self.posted.remove(at).map(|r| r.0),
            None => {
                self.unexpected.push_back((from, tag, id));
                None
            }
        }
    }

    /// The message that it takes.
    fn post(&mut self, context: u64, want: (FiAddr, u64, u64)) -> Option<u64> {
        let at = self.unexpected.iter().position(|&(from, tag, _)| Self::fits(want, from, tag));
        match at {
            Some(at) => self.unexpected.remove(at).map(|m| m.2),
            None => {
                self.posted.push_back((context, want.0, want.1, want.2));
                None
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    /// X50, X52: tag, mask and source filter, posted and unexpected, with cancels and peeks in
    /// between, against a model. Two senders: A, and B to itself.
    #[test]
    fn x50_x52_matching_is_the_models(steps in steps()) {
        let p = Pair::default();
        let mut model = Model::default();
        let (mut posts, mut id) = (0_u64, 0_u64);
        let mut expected = Vec::new();
        let mut got = Vec::new();
        for step in steps {
            match step {
                Step::Send { from_a, tag } => {
                    id += 1;
                    let (ep, to, from) = if from_a {
                        (&p.a.ep, p.a.peer, p.b.peer)
                    } else {
                        (&p.b.ep, p.b.me, p.b.me)
                    };
                    ep.tinject(&id.to_le_bytes(), to, tag).unwrap();
                    if let Some(context) = model.arrives(from, tag, id) {
                        expected.push((context, id));
                    }
                    p.arrived();
                }
                Step::Recv { src, tag, ignore } => {
                    posts += 1;
                    let src = [FI_ADDR_UNSPEC, p.b.peer, p.b.me][usize::from(src)];
                    p.b.ep.trecv(Buf::zeroed(8), src, tag, ignore, posts).unwrap();
                    if let Some(id) = model.post(posts, (src, tag, ignore)) {
                        expected.push((posts, id));
                    }
                }
                Step::Cancel { back } => {
                    let Some(&(context, ..)) = model.posted.get(back) else { continue };
                    model.posted.retain(|r| r.0 != context);
                    p.b.ep.cancel(context).unwrap();
                    collect(&p.b, &mut got);
                    let e = p.b.cq.readerr().unwrap();
                    prop_assert_eq!((e.err, e.entry.op_context), (Error::Canceled, context));
                }
                Step::Peek { tag, ignore } => {
                    collect(&p.b, &mut got);
                    let mut msg = tagged((), FI_ADDR_UNSPEC, tag, 0);
                    msg.ignore = ignore;
                    p.b.ep.trecvmsg(msg, OpFlags::PEEK).unwrap();
                    let want = (FI_ADDR_UNSPEC, tag, ignore);
                    let there = model.unexpected.iter().find(|m| Model::fits(want, m.0, m.1));
                    let mut out = [Completion::default()];
                    match (there, p.b.cq.read(&mut out)) {
                        (Some(&(from, tag, _)), Ok(1)) => {
                            prop_assert_eq!((out[0].tag, out[0].len, out[0].src), (tag, 8, from));
                        }
                        (None, Err(Error::Avail)) => {
                            prop_assert_eq!(p.b.cq.readerr().unwrap().err, Error::NoMsg);
                        }
                        (there, read) => prop_assert!(false, "{there:?}, but {read:?}"),
                    }
                }
            }
            collect(&p.b, &mut got);
        }
        p.settle();
        collect(&p.b, &mut got);
        expected.sort_unstable();
        got.sort_unstable();
        prop_assert_eq!(got, expected);
    }
}

/// Reads what B received, as context and message.
fn collect(b: &Side, got: &mut Vec<(u64, u64)>) {
    let mut out = [Completion::default()];
    while b.cq.read(&mut out).is_ok() {
        let id = u64::from_le_bytes(out[0].bytes().try_into().unwrap());
        got.push((out[0].op_context, id));
    }
}

/// X50: untagged and tagged messages never meet.
#[test]
fn x50_two_worlds() {
    let p = Pair::default();
    p.b.ep.recv(Buf::zeroed(4), FI_ADDR_UNSPEC, 1).unwrap();
    p.a.ep.tsend(buf(4, 1), p.a.peer, 0, 1).unwrap();
    p.at_a();
    p.settle();
    assert!(p.b.read().is_none());
    p.b.ep.trecv(Buf::zeroed(4), FI_ADDR_UNSPEC, 0, u64::MAX, 2).unwrap();
    assert_eq!(p.at_b().op_context, 2);
    p.a.ep.send(buf(4, 1), p.a.peer, 1).unwrap();
    assert_eq!(p.at_b().op_context, 1);
}

/// X51: a peek shows a message and leaves it; a claiming peek reserves it; a claim receives it,
/// with FI_DISCARD drops it, and a discarding peek drops it at once.
#[test]
fn x51_peek_claim_discard() {
    let p = Pair::default();
    for (n, len) in [(0, 40), (1, 40), (2, 40), (3, 70_000), (4, 70_000)] {
        p.a.ep.tsend(buf(len, n), p.a.peer, n, n).unwrap();
    }
    p.settle();
    let peek = |tag, context, flags| {
        p.b.ep.trecvmsg(tagged((), FI_ADDR_UNSPEC, tag, context), OpFlags::PEEK | flags).unwrap();
        p.at_b()
    };
    for _ in 0..2 {
        let c = peek(1, 71, PLAIN);
        assert_eq!((c.op_context, c.tag, c.len, c.src), (71, 1, 40, p.b.peer));
    }
    // Reserved: nobody else sees it any more.
    assert_eq!(peek(1, 71, OpFlags::CLAIM).len, 40);
    p.b.ep.trecvmsg(tagged((), FI_ADDR_UNSPEC, 1, 5), OpFlags::PEEK).unwrap();
    assert_eq!(p.error_at_b().err, Error::NoMsg);
    let twice = p.b.ep.trecvmsg(tagged((), FI_ADDR_UNSPEC, 2, 99), OpFlags::CLAIM);
    assert_eq!(refusal(twice, 0).fi_errno(), errno::FI_EINVAL, "nothing is claimed as 99");
    assert_eq!(peek(3, 73, OpFlags::CLAIM).len, 70_000);
    p.b.ep.trecvmsg(tagged(Buf::zeroed(70_000), FI_ADDR_UNSPEC, 3, 73), OpFlags::CLAIM).unwrap();
    let got = p.at_b();
    assert_eq!((got.op_context, got.tag), (73, 3));
    assert!(got.bytes() == &pattern(70_000, 3)[..]);
    p.b.ep.trecvmsg(tagged(Buf::zeroed(40), FI_ADDR_UNSPEC, 1, 71), OpFlags::CLAIM).unwrap();
    assert_eq!(p.at_b().bytes(), pattern(40, 1));
    let again = p.b.ep.trecvmsg(tagged((), FI_ADDR_UNSPEC, 1, 71), OpFlags::CLAIM);
    assert_eq!(refusal(again, 0).fi_errno(), errno::FI_EINVAL);
    assert_eq!(peek(2, 72, OpFlags::DISCARD).len, 40);
    peek(4, 74, OpFlags::CLAIM);
    let drop_it = OpFlags::CLAIM | OpFlags::DISCARD;
    p.b.ep.trecvmsg(tagged((), FI_ADDR_UNSPEC, 4, 74), drop_it).unwrap();
    assert_eq!(p.at_b().op_context, 74);
    p.b.ep.trecv(Buf::zeroed(40), FI_ADDR_UNSPEC, 0, u64::MAX, 1).unwrap();
    assert_eq!(p.at_b().tag, 0, "only the first is left");
    // Every send ended well, also those that were dropped.
    let sent: Vec<u64> = (0..5).map(|_| p.at_a().op_context).collect();
    assert_eq!(sent.iter().sum::<u64>(), 10);
    p.all_is_back();
}

/// X55: a hundred thousand messages before the first receive: memory is bounded, the sender is told
/// to wait, nothing is lost and the order stays.
#[test]
fn x55_unexpected_messages_are_bounded() {
    let mut plan = Plan::default();
    plan.settings.unexpected_bytes = Some(1 << 20);
    let p = Pair::new(&plan);
    let total = 100_000_u64;
    let (mut sent, mut stuck) = (0_u64, 0);
    // Nobody receives: the sender must be stopped, not the receiver drowned.
    while stuck < 2_000 {
        match p.a.ep.tinject(&sent.to_le_bytes(), p.a.peer, 1) {
            Ok(()) => (sent, stuck) = (sent + 1, 0),
            Err(e) => {
                assert_eq!(e, Error::Again);
                stuck += 1;
            }
        }
        p.turn();
    }
    assert!(sent > 100 && sent < total, "{sent} messages went out");
    let stored = p.b.domain.levels().unwrap().node;
    assert!(stored.blocks * 256 <= 1 << 20, "{stored:?}");
    let mut next = 0;
    while next < total {
        while sent < total && p.a.ep.tinject(&sent.to_le_bytes(), p.a.peer, 1).is_ok() {
            sent += 1;
        }
        match p.b.ep.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 1, 0, next) {
            Ok(()) => {
                let got = p.at_b();
                assert_eq!((got.op_context, got.bytes()), (next, &next.to_le_bytes()[..]));
                next += 1;
            }
            Err(r) => assert_eq!(r.error, Error::Again),
        }
    }
    p.all_is_back();
}
