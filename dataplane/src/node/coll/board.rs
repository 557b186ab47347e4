//! Calls of a group whose members all share a segment: through its memory, without a message.
//!
//! Whether a group has a [`Board`] is settled once, when it is joined: each member tells all others
//! the name of its slot, or that it has none, in the messages of the join. All find the same, so
//! that a group never goes two ways. Which calls go through it follows from the call alone, which
//! all members have alike too.
//!
//! Calls are made in their order, one at a time: a member puts what it contributes, waits until
//! those have put theirs whose contribution it needs, and computes its result from all of them in
//! the order of ranks. A call that goes by messages is put as well, without contents, so that the
//! members find out if they do not call the same.
//!
//! Nobody waits in a call: a turn looks whether the member that is waited for has put something.
//! After [`PATIENCE_NS`] the members that have not are watched like those that owe a message.

use std::collections::VecDeque;

use barewire_driver::board::{BOARD_MEMBERS_MAX, BODY_MAX, Board};
use barewire_driver::mem::atomic::{AtomicOp, Datatype};
use barewire_driver::mem::{IoBuf, Scratch, Span};

use super::control::{ASK_NS, DISAGREE};
use super::{Group, Kind, LAYOUT_WORD, User};
use crate::error::{Error, Result};
use crate::idx::{CallIdx, GroupIdx, PeerIdx};
use crate::node::{EpId, FrameSink, Node};
use crate::proto::coll::Shape;
use crate::proto::coll::plan::Layout;
use crate::types::Instant;

/// How long a member that has put nothing is waited for before somebody asks whether it lives.
const PATIENCE_NS: u64 = 1_000_000;

/// Longest time between two looks of a member that sleeps, nanoseconds: a wake-up can be missed.
const LOOK_NS: u64 = 1_000_000;

/// Bytes that the members of a call put together at most. More is cheaper by messages, of which
/// fewer bytes reach each member.
const TOGETHER_MAX: u64 = 32 << 10;

/// How the members of a group share memory.
#[derive(Debug)]
pub(super) enum Shared {
    /// They do not.
    No,
    /// A board is to be asked for when the join begins.
    Wanted,
    /// This member has a slot. The others may not.
    Offered(Box<dyn Board>),
    /// They do.
    Yes(Box<Calls>),
}

/// The calls of a group with a board.
#[derive(Debug)]
pub(super) struct Calls {
    first: First,
    queue: VecDeque<Call>,
}

/// How far the first call has come.
#[derive(Debug)]
struct First {
    board: Box<dyn Board>,
    /// Its number, and whether what this member has for it was put.
    number: u32,
    is_put: bool,
    /// The first rank that was not seen in the step at hand.
    next: u32,
    /// All members are known to have put something for the call before it.
    is_synced: bool,
    /// What this member put for that call.
    last_mark: u64,
    /// When it was looked last who is late, if it was seen to wait, and the peers that are watched
    /// for it.
    since: Option<Instant>,
    watched: Vec<PeerIdx>,
    /// What another member has put, while it is computed with.
    scratch: Scratch,
}

/// A call in the order of its group.
#[derive(Debug)]
struct Call {
    mark: u64,
    /// `None` if it goes by messages.
    through: Option<Through>,
}

/// A call through the board.
#[derive(Debug)]
pub(super) struct Through {
    pub(super) shape: Shape,
    pub(super) reduce: Option<(AtomicOp, Datatype)>,
    pub(super) input: Span,
    pub(super) out: Span,
    pub(super) user: User,
}

/// How far the first call of a group has come.
enum Step {
    /// It waits for a member to put something.
    Waits,
    Ended,
    Disagree,
}

/// Words of the exchange of a join behind the first: a name for each member of a group that may
/// have a board.
pub(super) fn name_words(members: usize) -> usize {
    if members <= BOARD_MEMBERS_MAX { members } else { 0 }
}

/// Whether calls of this shape go through a board.
pub(super) fn fits(shape: &Shape) -> bool {
    let blocks = match shape.kind {
        Kind::Barrier => 0,
        Kind::Alltoall | Kind::ReduceScatter | Kind::Scatter => u64::from(shape.n),
        Kind::Broadcast | Kind::Allreduce | Kind::Allgather | Kind::Reduce | Kind::Gather => 1,
    };
    let len = shape.block().saturating_mul(blocks);
    len <= BODY_MAX as u64 && len * u64::from(shape.n) <= TOGETHER_MAX
}

impl Through {
    /// What this member contributes.
    fn body(&self) -> (&Span, usize) {
        let s = &self.shape;
        match s.kind {
            Kind::Broadcast if s.me == s.root => (&self.out, s.block() as usize),
            Kind::Broadcast => (&Span::EMPTY, 0),
            kind => (&self.input, (s.block() * kind.blocks_in(s.n, s.me, s.root)) as usize),
        }
    }

    /// The ranks whose contributions this member needs.
    #[inline]
    fn needs(&self) -> std::ops::Range<u32> {
        let s = &self.shape;
        match s.kind {
            Kind::Broadcast | Kind::Scatter => s.root..s.root + 1,
            Kind::Reduce | Kind::Gather if s.me != s.root => 0..0,
            _ => 0..s.n,
        }
    }

    /// Computes this member's result.
    fn compute(&self, board: &dyn Board, number: u32, scratch: &Scratch) {
        let s = &self.shape;
        let (block, out) = (s.block() as usize, &IoBuf::one(self.out.again()));
        let mine = s.me as usize * block;
        match s.kind {
            Kind::Barrier => {}
            Kind::Broadcast if s.me == s.root => {}
            Kind::Broadcast => board.take(s.root, number, 0, (out, 0), block),
            Kind::Scatter => board.take(s.root, number, mine, (out, 0), block),
            Kind::Reduce | Kind::Gather if s.me != s.root => {}
            Kind::Allreduce | Kind::Reduce => {
                if !self.reduce_words(board, number) {
                    self.reduce(board, number, 0, scratch);
                }
            }
            Kind::ReduceScatter => self.reduce(board, number, mine, scratch),
            Kind::Allgather | Kind::Gather | Kind::Alltoall => {
                let from = if s.kind == Kind::Alltoall { mine } else { 0 };
                for rank in 0..s.n {
                    board.take(rank, number, from, (out, rank as usize * block), block);
                }
            }
        }
    }

    /// Reduces what the members have at `from`, from the first to the last.
    fn reduce(&self, board: &dyn Board, number: u32, from: usize, scratch: &Scratch) {
        let Some((op, ty)) = self.reduce else { unreachable!("only reductions compute") };
        let (s, out, other) = (&self.shape, &IoBuf::one(self.out.again()), scratch.io());
        let block = s.block() as usize;
        board.take(0, number, from, (out, 0), block);
        for rank in 1..s.n {
            board.take(rank, number, from, (&other, 0), block);
            let sum = out.combine(0, op, ty, s.count as usize, (out, 0), (&other, 0));
            assert!(sum.is_ok(), "a block is in the result and in a body");
        }
    }
}

impl Through {
    /// [`reduce`](Self::reduce) from the start, of one element of 8 bytes that a processor has
    /// instructions for. False for all others.
    fn reduce_words(&self, board: &dyn Board, number: u32) -> bool {
        let (Some((op, ty)), 1, 8) = (self.reduce, self.shape.count, self.shape.size) else {
            return false;
        };
        let sum = &self.out;
        if !sum.set_word_at(0, board.first_word(0, number).to_le()) {
            return false;
        }
        (1..self.shape.n).all(|rank| {
            let other = u128::from(board.first_word(rank, number));
            sum.atomic_word(0, op, ty, other, false).is_some()
        })
    }
}

impl Calls {
    /// Of a group whose members have met.
    fn new(board: Box<dyn Board>) -> Option<Self> {
        let first = First {
            board,
            number: 1,
            is_put: false,
            next: 0,
            // Before the first there is nothing to be taken.
            is_synced: true,
            last_mark: 0,
            since: None,
            watched: Vec::new(),
            scratch: Scratch::new(BODY_MAX)?,
        };
        Some(Self { first, queue: VecDeque::new() })
    }

    /// Whether `rank` has yet to put what the first call waits for.
    fn lacks(&self, rank: u32) -> bool {
        self.queue.front().is_some_and(|call| self.first.lacks(call, rank))
    }
}

impl First {
    /// Does what the first call, `call`, asks for until it has to wait. `members` is how many there
    /// are.
    #[inline]
    fn step(&mut self, call: &Call, members: u32) -> Step {
        let number = self.number;
        if !self.is_put {
            if !self.is_synced
                && let Some(step) = self.sync(members)
            {
                return step;
            }
            let (body, len) = call.through.as_ref().map_or((&Span::EMPTY, 0), Through::body);
            self.board.put(number, call.mark, body, len);
            self.is_put = true;
            self.next = call.through.as_ref().map_or(0, |through| through.needs().start);
        }
        let mut all = false;
        if let Some(through) = &call.through {
            let needs = through.needs();
            while self.next < needs.end {
                match self.board.mark(self.next, number) {
                    None => return Step::Waits,
                    Some(mark) if mark != call.mark => return Step::Disagree,
                    Some(_) => self.next += 1,
                }
            }
            all = needs.len() == members as usize;
            through.compute(&*self.board, number, &self.scratch);
        }
        self.board.done(number);
        (self.is_synced, self.last_mark) = (all, call.mark);
        (self.number, self.is_put, self.next) = (number.wrapping_add(1), false, 0);
        self.since = None;
        Step::Ended
    }

    /// Sees that all have put something for the call before: what is put now is put over what was
    /// put for the call before that. Says what else it comes to.
    #[inline(never)]
    fn sync(&mut self, members: u32) -> Option<Step> {
        let last = self.number.wrapping_sub(1);
        while self.next < members {
            match self.board.mark(self.next, last) {
                Some(mark) if mark != self.last_mark => return Some(Step::Disagree),
                None if self.board.mark(self.next, self.number).is_none() => {
                    return Some(Step::Waits);
                }
                _ => self.next += 1,
            }
        }
        None
    }

    /// Whether the member that is waited for has put something.
    fn may_go_on(&self) -> bool {
        let last = self.number.wrapping_sub(1);
        self.board.mark(self.next, self.number).is_some()
            || !self.is_put && self.board.mark(self.next, last).is_some()
    }

    fn lacks(&self, call: &Call, rank: u32) -> bool {
        if self.board.mark(rank, self.number).is_some() {
            return false;
        }
        if !self.is_put {
            return self.board.mark(rank, self.number.wrapping_sub(1)).is_none();
        }
        call.through.as_ref().is_some_and(|through| through.needs().contains(&rank))
    }

    /// Whether it is time to look who is late.
    fn is_late(&self, now: Instant) -> bool {
        self.since.is_none_or(|since| now.since(since) >= PATIENCE_NS)
    }
}

impl Group {
    /// Why calls through the board can never end, if a member that the first one waits for is gone.
    /// Calls by messages end by these: who was ahead may have left before it could put them.
    #[inline]
    fn lost_on_board(&self) -> Option<Error> {
        let Shared::Yes(calls) = &self.shared else { return None };
        if calls.queue.iter().all(|call| call.through.is_none()) {
            return None;
        }
        (0..).zip(&self.members).find_map(|(rank, m)| {
            let err = m.gone?;
            (rank != self.me && calls.lacks(rank)).then_some(err)
        })
    }
}

impl Group {
    /// Whether the first call through the board waits for `rank`.
    pub(super) fn lacks_on_board(&self, rank: u32) -> bool {
        matches!(&self.shared, Shared::Yes(calls) if calls.lacks(rank))
    }
}

impl Node {
    /// Asks the port of a join that begins where the members are, and tells them the layout and the
    /// name of a board, if they all share memory.
    pub(super) fn offer_board(&mut self, o: CallIdx, out: &mut dyn FrameSink) {
        let op = &self.coll.ops[o];
        let (Some(words), g) = (&op.words, op.group) else { return };
        let group = &mut self.coll.groups[g];
        if !matches!(group.shared, Shared::Wanted) {
            return;
        }
        group.shared = Shared::No;
        let stations: Vec<_> = group.members.iter().map(|m| self.peers[m.peer].station()).collect();
        let mut is_near = |station| station == self.station || out.is_near(station);
        let near = (0..).zip(&stations).filter(|&(_, &station)| is_near(station));
        let near: Vec<u32> = near.map(|(rank, _)| rank).collect();
        let layout = Layout::of(group.members.len() as u32, &near).to_word();
        for (i, word) in [layout, !layout].into_iter().enumerate() {
            words.io().write_at(8 * (LAYOUT_WORD + i), &word.to_le_bytes());
        }
        if let Some(board) = out.board(&stations) {
            let at = 8 * (super::JOIN_WORDS + group.me as usize);
            words.io().write_at(at, &board.name().to_le_bytes());
            group.shared = Shared::Offered(board);
        }
    }

    /// The members of a group have told each other the `names` of their slots, 0 for none.
    ///
    /// # Errors
    /// [`Error::NoMem`]: a member has lied, or died, or there is no memory.
    pub(super) fn meet_on_board(&mut self, g: GroupIdx, names: &[u64]) -> Result<()> {
        let group = &mut self.coll.groups[g];
        let shared = std::mem::replace(&mut group.shared, Shared::No);
        let Shared::Offered(mut board) = shared else { return Ok(()) };
        if names.is_empty() || names.contains(&0) {
            return Ok(());
        }
        let calls = board.meet(group.gid, names).then(|| Calls::new(board)).flatten();
        group.shared = Shared::Yes(Box::new(calls.ok_or(Error::NoMem)?));
        Ok(())
    }

    /// A call through a board has ended well.
    #[inline]
    fn end_on_board(&mut self, ep: EpId, user: User) {
        self.counters.colls_done += 1;
        self.counters.colls_shared += 1;
        self.complete_call(ep, user);
    }

    /// Puts a call in the order of its group, if that has a board: `through` it, or else by
    /// messages. If none is before it, it goes on at once, and then with
    /// [`drive_board`](Self::drive_board).
    pub(super) fn call_on_board(&mut self, g: GroupIdx, mark: u64, through: Option<Through>) {
        let group = &mut self.coll.groups[g];
        let Shared::Yes(calls) = &mut group.shared else { return };
        let call = Call { mark, through };
        let is_first = calls.queue.is_empty();
        if is_first && matches!(calls.first.step(&call, group.members.len() as u32), Step::Ended) {
            if let Some(through) = call.through {
                let ep = group.ep;
                self.end_on_board(ep, through.user);
            }
            return;
        }
        group.ops += u32::from(call.through.is_some());
        calls.queue.push_back(call);
        if is_first {
            self.coll.on_boards.push(g);
            self.coll.asks_at.get_or_insert(self.polled_at + ASK_NS);
            if group.lost_on_board().is_some() {
                self.drive_board(self.polled_at, g);
            }
        }
    }

    /// Lets the calls of a group through its board go on as far as they can.
    pub(super) fn drive_board(&mut self, now: Instant, g: GroupIdx) {
        loop {
            let Some(group) = self.coll.groups.get_mut(g) else { return };
            let Shared::Yes(calls) = &mut group.shared else { return };
            let Some(call) = calls.queue.front() else { return };
            match calls.first.step(call, group.members.len() as u32) {
                Step::Waits => {
                    if let Some(err) = group.lost_on_board() {
                        self.abort_group(now, g, err);
                    }
                    return;
                }
                Step::Disagree => return self.abort_group(now, g, DISAGREE),
                Step::Ended => {}
            }
            let through = calls.queue.pop_front().and_then(|call| call.through);
            let (is_last, ep) = (calls.queue.is_empty(), group.ep);
            group.ops -= u32::from(through.is_some());
            if !calls.first.watched.is_empty() {
                self.unwatch(g);
            }
            if is_last {
                self.coll.on_boards.retain(|&other| other != g);
            }
            if let Some(through) = through {
                self.end_on_board(ep, through.user);
            }
            if is_last {
                return;
            }
        }
    }

    /// Whether some call through a board is under way.
    #[inline(always)]
    pub(crate) fn has_calls_on_boards(&self) -> bool {
        !self.coll.on_boards.is_empty()
    }

    /// Whether some call through a board may go on.
    pub(super) fn boards_are_due(&self) -> bool {
        self.coll.on_boards.iter().any(|&g| match &self.coll.groups[g].shared {
            Shared::Yes(calls) => calls.first.may_go_on(),
            _ => false,
        })
    }

    /// Whether a call through a board has waited for long.
    pub(super) fn boards_are_late(&self, now: Instant) -> bool {
        self.coll.on_boards.iter().any(|&g| match &self.coll.groups[g].shared {
            Shared::Yes(calls) => calls.first.is_late(now),
            _ => false,
        })
    }

    /// When boards are to be looked at even if nobody wakes us.
    pub(super) fn boards_deadline(&self) -> Option<Instant> {
        if !self.has_calls_on_boards() {
            return None;
        }
        let pause = if self.boards_are_due() { 0 } else { LOOK_NS };
        Some(self.polled_at + pause)
    }

    /// Lets all calls through boards go on, and watches who is late. Returns how many have ended
    /// well.
    pub(crate) fn drive_boards(&mut self, now: Instant) -> usize {
        let before = self.counters.colls_done;
        let mut at = 0;
        while let Some(&g) = self.coll.on_boards.get(at) {
            self.drive_board(now, g);
            if self.coll.on_boards.get(at) != Some(&g) {
                continue;
            }
            at += 1;
            let Shared::Yes(calls) = &mut self.coll.groups[g].shared else { continue };
            match calls.first.since {
                Some(_) if !calls.first.is_late(now) => {}
                since => {
                    calls.first.since = Some(now);
                    if since.is_some() {
                        self.watch_late(now, g);
                    }
                }
            }
        }
        (self.counters.colls_done - before) as usize
    }

    /// Watches the members that the first call of a group waits for, like those that owe a message.
    fn watch_late(&mut self, now: Instant, g: GroupIdx) {
        let group = &self.coll.groups[g];
        let Shared::Yes(calls) = &group.shared else { return };
        let lacks = |&(rank, _): &(u32, _)| rank != group.me && calls.lacks(rank);
        let late = (0..).zip(&group.members).filter(lacks).map(|(_, member)| member.peer);
        let late: Vec<PeerIdx> = late.filter(|p| !calls.first.watched.contains(p)).collect();
        for p in late {
            self.begin_to_wait(now, p);
            self.peers[p].coll_waits += 1;
            if let Shared::Yes(calls) = &mut self.coll.groups[g].shared {
                calls.first.watched.push(p);
            }
            self.kick_silent(now, p);
        }
    }

    /// The call that others were watched for has ended.
    #[cold]
    fn unwatch(&mut self, g: GroupIdx) {
        let Shared::Yes(calls) = &mut self.coll.groups[g].shared else { return };
        for p in std::mem::take(&mut calls.first.watched) {
            self.peers[p].coll_waits -= 1;
        }
    }

    /// A group is over: its calls through the board end with an error.
    pub(super) fn fail_board(&mut self, g: GroupIdx, err: Error) {
        self.unwatch(g);
        self.coll.on_boards.retain(|&other| other != g);
        let group = &mut self.coll.groups[g];
        let Shared::Yes(calls) = std::mem::replace(&mut group.shared, Shared::No) else { return };
        let ep = group.ep;
        for through in calls.queue.into_iter().filter_map(|call| call.through) {
            self.coll.groups[g].ops -= 1;
            self.fail_call(ep, through.user, err);
        }
    }
}
