//! Calls on a board whose members die.

use std::ops::Range;

use barewire_driver::mem::IoBuf;
use barewire_driver::mem::atomic::{AtomicOp, Datatype};

use super::*;
use crate::proto::coll::Shape;

/// The mark that all members put.
const MARK: u64 = 9;

/// The slots of two members. Both have put their contributions, until the slot of the second is
/// reused by another process after it was collected.
#[derive(Debug, Default)]
struct ReusedSlot {
    is_reused: bool,
}

impl Board for ReusedSlot {
    fn name(&self) -> u64 {
        1
    }

    fn attach(&mut self, _: u32, _: &[u64]) -> bool {
        true
    }

    fn put(&mut self, _: u32, _: u64, _: &Span, _: usize) {}

    fn write(&mut self, _: u32, _: usize, _: (&IoBuf, usize), _: usize) {}

    fn mark(&self, rank: u32, _: u32) -> Option<u64> {
        (!self.is_reused || rank == 0).then_some(MARK)
    }

    fn is_past(&self, _: u32, _: u32) -> bool {
        false
    }

    fn read(&self, _: u32, _: u32, _: usize, _: (&IoBuf, usize), _: usize) {}

    fn read_long(&self, _: u32, _: u32, _: usize, _: (&IoBuf, usize), _: usize) {}

    fn first_word(&self, _: u32, _: u32) -> u64 {
        0
    }

    fn collect(&self, ranks: Range<u32>, call: u32, _: u64, _: &mut [u64]) -> (u32, bool) {
        let end = ranks.end;
        (ranks.into_iter().find(|&rank| self.mark(rank, call).is_none()).unwrap_or(end), false)
    }

    fn replaced(&mut self, ranks: Range<u32>, _: u32) -> Option<u32> {
        self.is_reused = true;
        ranks.contains(&1).then_some(1)
    }

    fn done(&mut self, _: u32) {
        assert!(!self.is_reused, "the contribution was read from a reused slot");
    }
}

/// Goal: a contribution read from a slot that was reused meanwhile gives no result: the call waits
/// for the former member, whose loss ends it.
#[test]
fn a_call_that_read_a_reused_slot_does_not_succeed() {
    let sums = Some((AtomicOp::Sum, Datatype::Uint64));
    for (kind, count, reduce) in [
        (Kind::Allreduce, 1, sums),
        (Kind::Allreduce, 2, sums),
        (Kind::Allgather, 2, None),
        (Kind::Barrier, 0, None),
    ] {
        let in_place = false;
        let shape = Shape { kind, n: 2, me: 0, root: 0, count, size: 8, in_place };
        let part = Part::of((1, MARK), shape, reduce, true);
        assert!(part.by_board);
        let board = AnyBoard::from(Box::<ReusedSlot>::default() as Box<dyn Board>);
        let mut calls = Calls::new(board, 2).unwrap();
        let memory = || IoBuf::leaked(&[0; 32]).take_one().unwrap();
        let caller = Some(Caller { context: 1, wanted: true });
        let added = calls.add(&part, CallBuffers { body: memory(), out: memory(), caller });
        // A barrier reads nothing.
        let ends = kind == Kind::Barrier;
        assert_eq!(
            (matches!(added, AddOutcome::Ended), calls.awaits(1)),
            (ends, !ends),
            "{kind:?}"
        );
    }
}

/// The slots of members that have put [`MARK`] for all calls up to `last`. If that is not the last
/// of all, rank 1 has put another mark for call 4, or is about to put that for call 12.
#[derive(Debug)]
struct Ahead {
    last: u32,
}

impl Board for Ahead {
    fn name(&self) -> u64 {
        1
    }

    fn attach(&mut self, _: u32, _: &[u64]) -> bool {
        true
    }

    fn put(&mut self, _: u32, _: u64, _: &Span, _: usize) {}

    fn write(&mut self, _: u32, _: usize, _: (&IoBuf, usize), _: usize) {}

    fn mark(&self, rank: u32, call: u32) -> Option<u64> {
        let differs = u64::from((rank, call) == (1, 4) && self.last < u32::MAX);
        (call <= self.last).then_some(MARK + differs)
    }

    fn is_past(&self, _: u32, _: u32) -> bool {
        false
    }

    fn read(&self, _: u32, _: u32, _: usize, _: (&IoBuf, usize), _: usize) {}

    fn read_long(&self, _: u32, _: u32, _: usize, _: (&IoBuf, usize), _: usize) {}

    fn first_word(&self, _: u32, _: u32) -> u64 {
        0
    }

    fn collect(&self, ranks: Range<u32>, _: u32, _: u64, _: &mut [u64]) -> (u32, bool) {
        (ranks.end, false)
    }

    fn replaced(&mut self, _: Range<u32>, _: u32) -> Option<u32> {
        None
    }

    fn done(&mut self, _: u32) {}
}

/// Goal: the mark of a later call, which a member ahead writes over the one that is compared, is no
/// disagreement; another mark for the compared call is.
#[test]
fn a_mark_that_is_being_overwritten_is_no_disagreement() {
    for (last, agrees) in [(11, true), (10, false)] {
        let in_place = false;
        let shape =
            Shape { kind: Kind::Broadcast, n: 2, me: 0, root: 0, count: 8, size: 1, in_place };
        let part = Part::of((1, MARK), shape, None, true);
        let board = AnyBoard::from(Box::new(Ahead { last }) as Box<dyn Board>);
        let mut calls = Calls::new(board, 2).unwrap();
        let memory = || IoBuf::leaked(&[0; 8]).take_one().unwrap();
        let caller = Some(Caller { context: 1, wanted: true });
        for call in 1..=8 {
            let added = calls.add(&part, CallBuffers { body: memory(), out: memory(), caller });
            let ends = agrees || call < 8;
            assert_eq!(matches!(added, AddOutcome::Ended), ends, "{last} {call}");
        }
        assert!(agrees || matches!(calls.step(), Step::Disagree));
    }
}

/// Goal: a call of many rounds that never has to wait leaves the turn after some of them, and
/// neither sleeps nor awaits a member then.
#[test]
fn a_turn_makes_some_rounds() {
    const SLICES: usize = 2 * TURN_ROUNDS as usize + 1;
    let (count, in_place) = ((SLICES * barewire_driver::board::LONG_MAX) as u64, false);
    let shape = Shape { kind: Kind::Broadcast, n: 3, me: 1, root: 0, count, size: 1, in_place };
    let part = Part::of((1, MARK), shape, None, true);
    let board = AnyBoard::from(Box::new(Ahead { last: u32::MAX }) as Box<dyn Board>);
    let mut calls = Calls::new(board, 3).unwrap();
    let out = IoBuf::leaked(&vec![0; count as usize]).take_one().unwrap();
    let caller = Some(Caller { context: 1, wanted: true });
    let added = calls.add(&part, CallBuffers { body: out.again(), out, caller });
    assert!(matches!(added, AddOutcome::Waiting));
    for _ in 0..2 {
        assert!(calls.first.can_proceed() && !calls.awaits(0) && !calls.awaits(2));
        let ends = calls.first.number as usize > 2 * TURN_ROUNDS as usize;
        assert_eq!(matches!(calls.step(), Step::Ended), ends);
    }
    assert_eq!(calls.first.number as usize, SLICES + 1);
}
