//! Receives that look for messages that have come.

use super::*;

/// Posts a receive of end 1 for a message with `tag`.
fn look(pair: &mut Pair, buf: IoBuf, tag: u64, flags: OpFlags, context: u64) -> Result<()> {
    pair.recv(1, buf, tag, flags, context)
}

/// A pair in which messages with these tags and lengths have come.
fn waiting(messages: &[(u64, usize)]) -> Pair {
    let mut pair = Pair::new(1500, false);
    for &(tag, len) in messages {
        pair.send(0, IoBuf::leaked(&bytes(len)), tag, OpFlags::empty(), 1).unwrap();
        pair.run(1_000_000);
    }
    assert_eq!(pair.read(0).len(), messages.len());
    pair
}

/// Context, tag and length of the only completion at end 1.
fn told(pair: &mut Pair) -> (u64, u64, u64) {
    let [cqe] = pair.read(1)[..] else { panic!("one completion") };
    assert!(cqe.flags.contains(CqFlags::RECV | CqFlags::TAGGED), "{cqe:?}");
    (cqe.op_context, cqe.tag, cqe.len)
}

/// Goal: a peek tells of a message and leaves it, or that there is none.
#[test]
fn a_peek_leaves_what_it_finds() {
    let mut pair = waiting(&[(5, 100)]);
    look(&mut pair, IoBuf::EMPTY, 6, OpFlags::PEEK, 21).unwrap();
    let err = pair.read_err(1);
    assert_eq!((err.err, err.cqe.op_context, err.cqe.tag), (Error::NoMsg, 21, 6));
    assert_eq!(err.cqe.flags, CqFlags::RECV | CqFlags::TAGGED);
    for context in [22, 23] {
        look(&mut pair, IoBuf::EMPTY, 5, OpFlags::PEEK, context).unwrap();
        assert_eq!(told(&mut pair), (context, 5, 100));
    }
    let (buf, seen) = shared(100);
    look(&mut pair, buf, 5, OpFlags::empty(), 24).unwrap();
    assert_eq!((told(&mut pair), contents(&seen)), ((24, 5, 100), bytes(100)));
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// Goal: what is claimed is for the receive with its context alone, and what is discarded for none.
#[test]
fn claimed_and_discarded_messages_are_not_matched() {
    const PEEK: OpFlags = OpFlags::PEEK;
    let mut pair = waiting(&[(5, 100), (5, 50), (5, 20), (5, 7)]);
    look(&mut pair, IoBuf::EMPTY, 5, PEEK | OpFlags::CLAIM, 31).unwrap();
    assert_eq!(told(&mut pair), (31, 5, 100));
    look(&mut pair, IoBuf::EMPTY, 5, PEEK | OpFlags::DISCARD, 32).unwrap();
    assert_eq!(told(&mut pair), (32, 5, 50));
    look(&mut pair, IoBuf::EMPTY, 5, PEEK | OpFlags::CLAIM, 33).unwrap();
    assert_eq!(told(&mut pair), (33, 5, 20));
    let twice = look(&mut pair, IoBuf::EMPTY, 5, PEEK | OpFlags::CLAIM, 33);
    assert!(matches!(twice, Err(Error::Invalid(_))), "{twice:?}");
    for flags in [OpFlags::CLAIM, OpFlags::CLAIM | OpFlags::DISCARD] {
        let nothing = look(&mut pair, IoBuf::EMPTY, 5, flags, 39);
        assert!(matches!(nothing, Err(Error::Invalid(_))), "{nothing:?}");
    }
    let (buf, seen) = shared(100);
    look(&mut pair, buf, 5, OpFlags::CLAIM, 31).unwrap();
    assert_eq!((told(&mut pair), contents(&seen)), ((31, 5, 100), bytes(100)));
    look(&mut pair, IoBuf::EMPTY, 5, OpFlags::CLAIM | OpFlags::DISCARD, 33).unwrap();
    assert_eq!(told(&mut pair), (33, 5, 20));
    look(&mut pair, IoBuf::leaked(&[0; 100]), 5, OpFlags::empty(), 34).unwrap();
    assert_eq!(told(&mut pair), (34, 5, 7));
    pair.run(600_000_000);
    pair.assert_quiet();
}
