//! A member's part in a call through a board: what it puts, whose contributions it needs, and how
//! its result is computed from them.
//!
//! A call whose contributions do not fit on the board is made in rounds: each is the same call on
//! the next slice of every block. A reduction of long vectors to one or to all of several members
//! takes two rounds a slice: first each member reduces its share of the slice, then the reduced
//! shares are put for those who need them. So a contribution is read once, not by every member.

use std::ops::Range;

use barewire_driver::backend::any_board::AnyBoard;
use barewire_driver::board::{Board, LONG_MAX, SHORT_MAX};
use barewire_driver::mem::atomic::{AtomicOp, Datatype, WordFold, word_fold};
use barewire_driver::mem::{IoBuf, Scratch, Span};

use super::super::Kind;
use crate::proto::coll::Shape;

/// Bytes of a vector from which its reduction is shared among more than two members.
const SHARED_MIN: usize = 8 << 10;

/// Bytes up to which two members use the board. Messages are faster beyond: one member's copies
/// into the ring overlap with the other's out of it.
const PAIR_MAX: usize = 8 << 10;

/// Slices are multiples of this, so that they consist of whole elements of every type.
const UNIT: usize = 64;

/// Bytes of the vectors that are reduced at a time, which stay in the first-level cache.
const CHUNK: usize = 4096;

/// A member's part in a call of a group with a board, derived from the arguments that are equal on
/// all members.
#[derive(Clone, Copy, Debug)]
pub(in crate::node::coll) struct Part {
    /// Number of the [checked](super::super::CheckedCall) call.
    pub(super) number: u64,
    /// The mark of the call: part of every message, and of every contribution on the board.
    pub(super) mark: u64,
    pub(super) shape: Shape,
    reduce: Option<(AtomicOp, Datatype)>,
    /// The call goes through the board.
    pub(in crate::node::coll) by_board: bool,
    /// Some member has a long contribution, which is written in rounds.
    pub(super) is_long: bool,
    /// Bytes of the contribution to a call that is not long.
    pub(super) len: usize,
    /// Rounds of the call.
    pub(super) rounds: u32,
    /// Bytes of each block in a round but for the last slice, which may be shorter.
    slice: usize,
    /// Each slice takes two rounds.
    is_shared: bool,
    /// The range of ranks whose contributions this member needs.
    pub(super) needs: (u32, u32),
    pub(super) result: Outcome,
    /// This member gets a result of a call with blocks.
    has_result: bool,
}

/// What a member does when it has the contributions that it needs.
#[derive(Clone, Copy, Debug)]
pub(super) enum Outcome {
    Nothing,
    /// Reduction of one word of each member.
    Word(WordFold),
    /// A computation with blocks.
    Blocks,
}

/// A round of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Round {
    /// The slice of every block, bytes.
    at: usize,
    len: usize,
    stage: Stage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The call is made on the slice.
    Whole,
    /// Each member reduces its share of the slice.
    Reduce,
    /// The reduced shares are exchanged.
    Exchange,
}

/// Memory of a group for reductions: this member's share of a slice, reduced, and at these places
/// the first operand, the next one, and the sum so far, each of a [`CHUNK`].
#[derive(Debug)]
pub(super) struct Workspace(Scratch);

const FIRST: usize = LONG_MAX;
const OTHER: usize = FIRST + CHUNK;
const SUM: usize = OTHER + CHUNK;

impl Workspace {
    /// `None` if there is no memory.
    pub(super) fn new() -> Option<Self> {
        Scratch::new(SUM + CHUNK).map(Self)
    }
}

/// Blocks in the contribution of the member that puts the most.
fn most_blocks(shape: &Shape) -> usize {
    match shape.kind {
        Kind::Barrier => 0,
        Kind::Alltoall | Kind::ReduceScatter | Kind::Scatter => shape.n as usize,
        Kind::Broadcast | Kind::Allreduce | Kind::Allgather | Kind::Reduce | Kind::Gather => 1,
    }
}

/// Bytes of every block in a round of a call of this shape; `None` if the call does not go through
/// a board.
fn slice_of(shape: &Shape) -> Option<usize> {
    let (block, blocks) = (shape.block() as usize, most_blocks(shape));
    let len = block * blocks;
    let by_messages = shape.n == 2 && len > PAIR_MAX;
    let slice = if len <= LONG_MAX { block } else { LONG_MAX / blocks / UNIT * UNIT };
    (!by_messages).then_some(slice)
}

impl Part {
    /// The part in no call.
    pub(in crate::node::coll) const NONE: Self = Self {
        number: 0,
        mark: 0,
        shape: Shape::NONE,
        reduce: None,
        by_board: false,
        is_long: false,
        len: 0,
        rounds: 1,
        slice: 0,
        is_shared: false,
        needs: (0, 0),
        result: Outcome::Nothing,
        has_result: false,
    };

    /// The part in the call with this number and this mark.
    pub(in crate::node::coll) fn of(
        (number, mark): (u64, u64),
        shape: Shape,
        reduce: Option<(AtomicOp, Datatype)>,
        has_board: bool,
    ) -> Self {
        let by_messages = Self { number, mark, ..Self::NONE };
        let Some(slice) = slice_of(&shape).filter(|_| has_board) else { return by_messages };
        let Shape { kind, n, me, root, .. } = shape;
        let block = shape.block() as usize;
        let is_shared =
            matches!(kind, Kind::Allreduce | Kind::Reduce) && n > 2 && block >= SHARED_MIN;
        let slices = if slice == 0 { 1 } else { block.div_ceil(slice) as u32 };
        let rounds = if is_shared { 2 * slices } else { slices };
        let needs = match kind {
            Kind::Broadcast | Kind::Scatter => (root, root + 1),
            Kind::Gather if me != root => (0, 0),
            Kind::Reduce if me != root && !is_shared => (0, 0),
            _ => (0, n),
        };
        let is_word = (shape.count, shape.size) == (1, size_of::<u64>() as u64);
        let fold = reduce.filter(|_| is_word).and_then(|(op, ty)| word_fold(op, ty));
        let has_result = match kind {
            Kind::Barrier => false,
            Kind::Broadcast => me != root,
            Kind::Gather | Kind::Reduce => me == root,
            _ => true,
        };
        let result = match fold {
            _ if is_shared => Outcome::Blocks,
            _ if !has_result => Outcome::Nothing,
            Some(fold) if kind != Kind::ReduceScatter => Outcome::Word(fold),
            _ => Outcome::Blocks,
        };
        let part = Self {
            shape,
            reduce,
            by_board: true,
            is_long: rounds > 1 || slice * most_blocks(&shape) > SHORT_MAX,
            rounds,
            slice,
            is_shared,
            needs,
            result,
            has_result,
            ..by_messages
        };
        let len = if part.is_long { 0 } else { part.blocks() * block };
        Self { len, ..part }
    }

    /// Number of the checked call: 0 before the first.
    pub(in crate::node::coll) fn number(&self) -> u64 {
        self.number
    }

    /// Blocks in this member's contribution.
    fn blocks(&self) -> usize {
        let Shape { kind, n, me, root, .. } = self.shape;
        match kind {
            Kind::Broadcast => usize::from(me == root),
            kind => kind.blocks_in(n, me, root) as usize,
        }
    }

    /// Round `i` of the call.
    fn round(&self, i: u32) -> Round {
        let (i, stage) = match (self.is_shared, i % 2) {
            (false, _) => (i, Stage::Whole),
            (true, 0) => (i / 2, Stage::Reduce),
            (true, _) => (i / 2, Stage::Exchange),
        };
        let at = i as usize * self.slice;
        Round { at, len: self.slice.min(self.shape.block() as usize - at), stage }
    }

    /// The bytes of a slice of `len` bytes that `rank` reduces.
    fn share(&self, rank: u32, len: usize) -> Range<usize> {
        let units = len.div_ceil(UNIT);
        let bound = |rank: u32| (units * rank as usize / self.shape.n as usize * UNIT).min(len);
        bound(rank)..bound(rank + 1)
    }

    /// Writes what this member puts in round `i` of a long call, whose contribution is `body`.
    #[inline(never)]
    pub(super) fn write_round(
        &self,
        i: u32,
        body: Span,
        (board, call): (&mut AnyBoard, u32),
        space: &Workspace,
    ) {
        let Round { at, len, stage } = self.round(i);
        if stage == Stage::Exchange {
            let share = self.share(self.shape.me, len).len();
            return board.write(call, 0, (&space.0.io(), 0), share);
        }
        let (block, body) = (self.shape.block() as usize, IoBuf::one(body));
        for b in 0..self.blocks() {
            board.write(call, b * len, (&body, b * block + at), len);
        }
    }

    /// Computes what round `i` of a call with blocks adds to the result in `out`; `body` is this
    /// member's contribution.
    #[inline(never)]
    pub(super) fn compute(
        &self,
        i: u32,
        (body, out): (Span, Span),
        (board, call): (&AnyBoard, u32),
        space: &Workspace,
    ) {
        let (s, Round { at, len, stage }) = (&self.shape, self.round(i));
        let (block, out) = (s.block() as usize, &IoBuf::one(out));
        let (body, space) = (&IoBuf::one(body), &space.0.io());
        let all = Contributions { board, call, is_long: self.is_long, body, space };
        // This member's block in what others put, and in its own contribution.
        let (theirs, own) = (s.me as usize * len, s.me as usize * block + at);
        match (stage, s.kind) {
            (Stage::Reduce, _) => {
                let Range { start, end } = self.share(s.me, len);
                self.reduce((all.space, 0), &all, (start, at + start), end - start);
            }
            _ if !self.has_result => {}
            (Stage::Exchange, _) => {
                for rank in 0..s.n {
                    let Range { start, end } = self.share(rank, len);
                    let to = (out, at + start);
                    if rank == s.me {
                        all.space.copy_to(0, to.0, to.1, end - start);
                    } else {
                        all.read(rank, 0, to, end - start);
                    }
                }
            }
            (Stage::Whole, Kind::Barrier) => {}
            (Stage::Whole, Kind::Broadcast) => all.read(s.root, 0, (out, at), len),
            (Stage::Whole, Kind::Scatter) => self.take(s.root, &all, (theirs, own), (out, at), len),
            (Stage::Whole, Kind::Allreduce | Kind::Reduce) => {
                self.reduce((out, at), &all, (0, at), len);
            }
            (Stage::Whole, Kind::ReduceScatter) => {
                self.reduce((out, at), &all, (theirs, own), len);
            }
            (Stage::Whole, Kind::Allgather | Kind::Gather | Kind::Alltoall) => {
                let from = if s.kind == Kind::Alltoall { (theirs, own) } else { (0, at) };
                for rank in 0..s.n {
                    self.take(rank, &all, from, (out, rank as usize * block + at), len);
                }
            }
        }
    }

    /// Copies `len` bytes of the contribution of `rank` to the result: from offset `theirs` on of
    /// what another member has put, or from `own` on of this member's, whose place on the board
    /// stays in the caches of those who read it.
    fn take(
        &self,
        rank: u32,
        all: &Contributions<'_>,
        (theirs, own): (usize, usize),
        (out, to): (&IoBuf, usize),
        len: usize,
    ) {
        if rank == self.shape.me {
            all.body.copy_to(own, out, to, len);
        } else {
            all.read(rank, theirs, (out, to), len);
        }
    }

    /// Reduces `len` bytes of the members' contributions, which begin at the offsets of
    /// [`take`](Self::take), in the order of ranks. Every byte of this member's is read before the
    /// result is written at its place, which may be the same memory.
    fn reduce(
        &self,
        (out, to): (&IoBuf, usize),
        all: &Contributions<'_>,
        (theirs, own): (usize, usize),
        len: usize,
    ) {
        let Some((op, ty)) = self.reduce else { unreachable!("only reductions compute") };
        let Shape { n, me, size, .. } = self.shape;
        for at in (0..len).step_by(CHUNK) {
            let part = CHUNK.min(len - at);
            let operand = |rank: u32, place: usize| {
                if rank == me {
                    return (all.body, own + at);
                }
                all.read(rank, theirs + at, (all.space, place), part);
                (all.space, place)
            };
            let mut sum = operand(0, FIRST);
            for rank in 1..n {
                let target = if rank == n - 1 { (out, to + at) } else { (all.space, SUM) };
                let other = operand(rank, OTHER);
                let count = part / size as usize;
                let done = target.0.combine(target.1, op, ty, count, sum, other);
                assert!(done.is_ok(), "a slice is in the result and in a body");
                sum = target;
            }
        }
    }
}

/// The members' contributions to a round.
struct Contributions<'a> {
    board: &'a AnyBoard,
    call: u32,
    is_long: bool,
    /// This member's contribution to the call.
    body: &'a IoBuf,
    /// The memory of a [`Workspace`].
    space: &'a IoBuf,
}

impl Contributions<'_> {
    /// Copies `len` bytes from offset `at` of what `rank` has put.
    fn read(&self, rank: u32, at: usize, to: (&IoBuf, usize), len: usize) {
        if self.is_long {
            self.board.read_long(rank, self.call, at, to, len);
        } else {
            self.board.read(rank, self.call, at, to, len);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUMS: Option<(AtomicOp, Datatype)> = Some((AtomicOp::Sum, Datatype::Uint32));

    fn part_of(kind: Kind, n: u32, me: u32, count: u64) -> Part {
        let shape = Shape { kind, n, me, root: 1, count, size: 4, in_place: false };
        Part::of((1, 2), shape, SUMS.filter(|_| kind.reduces()), true)
    }

    /// Goal: the rounds of a call cover every byte of a block once, in order, in slices of whole
    /// elements whose contributions fit on the board; and the shares of a slice do the same.
    #[test]
    fn rounds_and_shares_cover_a_block_once() {
        let counts = [0, 1, 15, 2047, 2048, 8000, 32_747, 32_748, 100_000, 1_000_003];
        for kind in Kind::ALL {
            for (n, count) in [2, 3, 5, 64].into_iter().flat_map(|n| counts.map(|count| (n, count)))
            {
                let part = part_of(kind, n, 0, count);
                if !part.by_board {
                    assert!(n == 2 && count > 1024, "{kind:?} {n} {count}");
                    continue;
                }
                let mut end = 0;
                for i in 0..part.rounds {
                    let Round { at, len, stage } = part.round(i);
                    let is_second = part.is_shared && i % 2 == 1;
                    assert_eq!(stage == Stage::Exchange, is_second);
                    assert_eq!(at + if is_second { len } else { 0 }, end, "{kind:?} {n} {count}");
                    assert!(len.is_multiple_of(4) && len * most_blocks(&part.shape) <= LONG_MAX);
                    assert!(len > 0 || count == 0 || kind == Kind::Barrier);
                    end = at + len;
                    let mut share_end = 0;
                    for rank in 0..n {
                        let share = part.share(rank, len);
                        assert_eq!((share.start, share.len() % 4), (share_end, 0));
                        share_end = share.end;
                    }
                    assert_eq!(share_end, len);
                }
                assert_eq!(end as u64, part.shape.block(), "{kind:?} {n} {count}");
            }
        }
    }

    /// Goal: a short call takes one round and puts its contribution at once; of a long one each
    /// member puts only what others need.
    #[test]
    fn short_calls_take_one_round() {
        let part = part_of(Kind::Allreduce, 8, 0, 256);
        assert_eq!((part.rounds, part.len, part.is_shared), (1, 1024, false));
        let part = part_of(Kind::Allreduce, 8, 0, 2048);
        assert_eq!((part.rounds, part.len, part.is_shared), (2, 0, true));
        let part = part_of(Kind::Broadcast, 8, 0, 256);
        assert_eq!((part.rounds, part.len, part.needs), (1, 0, (1, 2)));
        let part = part_of(Kind::Alltoall, 64, 3, 600);
        assert_eq!((part.rounds, part.len, part.blocks()), (2, 0, 64));
    }
}
