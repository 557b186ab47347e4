//! Calls of a group whose members all share a memory segment: through that memory, without
//! messages.
//!
//! Whether a group has a [`Board`] is decided once, at the join: each member sends all others the
//! name of its slot, or that it has none, in the messages of the join. All members come to the same
//! result, so a group never uses both ways. Which calls use the board follows from the call alone,
//! which is the same on all members too.
//!
//! Calls are made in order, one at a time: a member puts its contribution on the board, waits until
//! the members whose contributions it needs have put theirs, and computes its result from all of
//! them in the order of ranks. Long calls do so in [rounds](part). A call by messages is put as
//! well, without contents, so that members detect calls that differ.
//!
//! No thread blocks in a call: a turn polls whether the awaited member has put its contribution.
//! After [`PATIENCE_NS`] the members that have not are watched like those that owe a message.

use std::collections::VecDeque;

use barewire_driver::backend::any_board::AnyBoard;
use barewire_driver::board::{BOARD_MEMBERS_MAX, Board, LEAVES};
use barewire_driver::hint::{cold, outlined};
use barewire_driver::mem::Span;
use barewire_driver::port::Station;

pub(super) use self::part::Part;
use self::part::{Outcome, Workspace};
use super::control::{ASK_NS, DISAGREE};
use super::{Caller, Coll, Group, Kind, LAYOUT_WORD, mix};
use crate::error::{Error, Result};
use crate::idx::{CallIdx, GroupIdx, PeerIdx};
use crate::node::{Collectives, FrameSink, Node, NodeCounters, Objects, Peers};
use crate::plant::{Bug, planted};
use crate::proto::coll::plan::{Layout, Model};
use crate::types::Instant;

/// Time that a member which has put nothing is waited for before its liveness is checked,
/// nanoseconds.
const PATIENCE_NS: u64 = 1_000_000;

/// Rounds of a call that a turn makes at most: messages continue between them.
const TURN_ROUNDS: u32 = 4;

/// Longest interval between two polls of a member that sleeps, nanoseconds: a wake-up can be
/// missed.
const POLL_NS: u64 = 1_000_000;

/// The state of a group's board.
#[derive(Debug)]
pub(super) enum BoardState {
    /// The group has no board.
    Unused,
    /// A board is to be requested when the join begins.
    Wanted,
    /// This member has a slot. The others may have none.
    Offered(Box<AnyBoard>),
    /// All members share the board.
    Attached(Box<Calls>),
}

/// The calls of a group with a board.
#[derive(Debug)]
pub(super) struct Calls {
    first: FirstCall,
    /// Whether the first call waits. If not, there are no calls behind it.
    is_busy: bool,
    /// This member's part in the first call, or in the last call that was first.
    part: Part,
    /// The buffers of the first call.
    buffers: CallBuffers,
    /// The calls behind the first.
    queue: VecDeque<(Part, CallBuffers)>,
}

/// Progress of the first call.
#[derive(Debug)]
struct FirstCall {
    board: AnyBoard,
    /// Number of the round on the board, and whether this member's contribution has been put.
    number: u32,
    is_put: bool,
    /// Index of the round in its call.
    round: u32,
    /// The next round was left to the next turn, whether or not it has to wait.
    yields: bool,
    /// The first rank whose contribution has not been seen in the present step.
    next: u32,
    /// The last round to which all members are known to have put their contribution, and the one
    /// that they are waited for to put if this member's contribution has no room before.
    synced: u32,
    goal: u32,
    /// The mark that this member put last. It stands for all rounds so far, so that members that
    /// differed in one differ in all later ones: not every member sees every other's.
    mark: u64,
    /// The marks of the last rounds, by their number modulo [`LEAVES`].
    marks: [u64; LEAVES as usize],
    /// Time of the last check for late members, if the call was seen to wait, and the peers that
    /// are watched for it.
    since: Option<Instant>,
    watched: Vec<PeerIdx>,
    /// The members' contributions while they are computed with: one word of each, or longer ones.
    words: Box<[u64]>,
    space: Workspace,
}

/// The calls of a group through its board after they were advanced.
enum BoardProgress {
    /// There is none.
    Idle,
    /// The first waits for a member.
    Waits,
    /// The first has waited for [`PATIENCE_NS`] since the last check.
    Late,
    /// The first waits for a member that is gone.
    Lost,
    /// A member makes another call.
    Disagree,
}

/// The arguments of a call that differ between calls of the same part.
#[derive(Debug)]
pub(super) struct CallBuffers {
    /// The member's contribution, and its result.
    body: Span,
    out: Span,
    /// `None` if the call goes by messages.
    caller: Option<Caller>,
}

/// Result of a step of the first call.
enum Step {
    /// The call waits for a contribution, or for the next turn.
    Waits,
    Ended,
    Disagree,
}

/// Words of the exchange of a join behind the first ones: the name of a slot for each member of a
/// group that may have a board.
pub(super) fn name_words(members: usize) -> usize {
    if members <= BOARD_MEMBERS_MAX { members } else { 0 }
}

impl Calls {
    /// The calls of a group whose `members` have joined.
    fn new(board: AnyBoard, members: usize) -> Option<Self> {
        let first = FirstCall {
            board,
            number: 1,
            is_put: false,
            round: 0,
            yields: false,
            next: 0,
            synced: 0,
            goal: 0,
            mark: 0,
            marks: [0; LEAVES as usize],
            since: None,
            watched: Vec::new(),
            words: vec![0; members].into(),
            space: Workspace::new()?,
        };
        let buffers = CallBuffers { body: Span::EMPTY, out: Span::EMPTY, caller: None };
        Some(Self { first, is_busy: false, part: Part::NONE, buffers, queue: VecDeque::new() })
    }

    /// Appends a call. If there is no other, it is the first and progresses at once.
    #[inline(always)]
    fn add(&mut self, part: &Part, buffers: CallBuffers) -> AddOutcome {
        if self.is_busy {
            self.queue.push_back((*part, buffers));
            return cold(AddOutcome::Queued);
        }
        if let Step::Ended = self.first.step(part, &buffers) {
            return AddOutcome::Ended;
        }
        if self.part.number != part.number {
            cold(());
            self.part = *part;
        }
        (self.is_busy, self.buffers) = (true, buffers);
        AddOutcome::Waiting
    }

    /// Advances the first call, if there is one.
    #[inline(always)]
    fn step(&mut self) -> Step {
        if self.is_busy { self.first.step(&self.part, &self.buffers) } else { cold(Step::Waits) }
    }

    /// Ends the first call and makes the next one the first, if there is one. Returns the caller of
    /// the ended call, if it went through the board.
    #[inline(always)]
    fn end_first(&mut self) -> Option<Caller> {
        let caller = self.buffers.caller;
        if self.queue.is_empty() {
            self.is_busy = false;
        } else {
            cold(());
            self.next_is_first();
        }
        caller
    }

    #[inline(never)]
    fn next_is_first(&mut self) {
        if let Some(next) = self.queue.pop_front() {
            (self.part, self.buffers) = next;
        }
    }

    /// The callers of the calls through the board, in order.
    fn callers(&self) -> impl Iterator<Item = Caller> {
        let first = if self.is_busy { self.buffers.caller } else { None };
        first.into_iter().chain(self.queue.iter().filter_map(|(_, buffers)| buffers.caller))
    }

    /// Whether the first call waits for the contribution of `rank`.
    fn awaits(&self, rank: u32) -> bool {
        self.is_busy && self.first.awaits(&self.part, rank)
    }
}

impl FirstCall {
    /// Advances the first call until it has to wait, or has made [`TURN_ROUNDS`].
    #[inline(always)]
    fn step(&mut self, part: &Part, buffers: &CallBuffers) -> Step {
        if part.is_long {
            return cold(self.step_rounds(part, buffers));
        }
        self.step_round::<false>(part, buffers)
    }

    /// [`step`](Self::step) of a call with long contributions.
    #[inline(never)]
    fn step_rounds(&mut self, part: &Part, buffers: &CallBuffers) -> Step {
        self.yields = false;
        for _ in 0..TURN_ROUNDS {
            let step = self.step_round::<true>(part, buffers);
            if !matches!(step, Step::Ended) {
                return step;
            }
            self.round = (self.round + 1) % part.rounds;
            if self.round == 0 {
                return Step::Ended;
            }
        }
        self.yields = true;
        Step::Waits
    }

    /// Advances a round of the first call, which is the only one of a short call, until it has to
    /// wait.
    #[inline(always)]
    fn step_round<const LONG: bool>(&mut self, part: &Part, buffers: &CallBuffers) -> Step {
        let (number, (start, end)) = (self.number, part.needs);
        if !self.is_put {
            // Rounds whose contributions have room on the board.
            let depth = if LONG { 2 } else { LEAVES };
            if number.wrapping_sub(self.synced) >= depth
                && !planted(Bug::ContributionOverwritten)
                && let Some(step) = self.sync(number.wrapping_sub(depth / 2))
            {
                return step;
            }
            if LONG {
                let (body, board) = (buffers.body.again(), (&mut self.board, number));
                part.write_round(self.round, body, board, &self.space);
            }
            self.mark = mix(self.mark, part.mark);
            self.marks[(number % LEAVES) as usize] = self.mark;
            self.board.put(number, self.mark, &buffers.body, part.len);
            (self.is_put, self.next) = (true, start);
        }
        if self.next < end {
            let differs;
            let (ranks, words) = (self.next..end, &mut *self.words);
            (self.next, differs) = self.board.collect(ranks, number, self.mark, words);
            if self.next < end {
                return if differs { Step::Disagree } else { Step::Waits };
            }
        }
        match part.result {
            Outcome::Nothing => {}
            Outcome::Word(fold) => {
                let is_set = buffers.out.set_word_at(0, fold(&self.words));
                assert!(is_set, "a result is as long as a block");
            }
            Outcome::Blocks => {
                let memory = (buffers.body.again(), buffers.out.again());
                let (round, board) = (if LONG { self.round } else { 0 }, (&self.board, number));
                part.compute(round, memory, board, &self.space);
            }
        }
        if !matches!(part.result, Outcome::Nothing)
            && let Some(rank) = self.board.replaced(start..end, number)
        {
            // The slot of that member was reused, so the member is gone: its loss ends the group.
            self.next = rank;
            return cold(Step::Waits);
        }
        self.board.done(number);
        if (start, end) == (0, self.words.len() as u32) {
            self.synced = number;
        }
        (self.number, self.is_put, self.next) = (number.wrapping_add(1), false, 0);
        self.since = None;
        Step::Ended
    }

    /// Waits until all members have put their contribution to the earlier round `goal`, and so have
    /// read those to the rounds before it. Returns a step if the call cannot proceed.
    #[inline(never)]
    fn sync(&mut self, goal: u32) -> Option<Step> {
        self.goal = goal;
        let own = self.marks[(goal % LEAVES) as usize];
        // A member that has put this may be writing the mark of the next round over that of `goal`.
        let last = goal.wrapping_add(LEAVES - 1);
        while self.next < self.words.len() as u32 {
            match self.board.mark(self.next, goal) {
                Some(mark) if mark != own && self.board.mark(self.next, last).is_none() => {
                    return Some(Step::Disagree);
                }
                None if !self.board.is_past(self.next, goal) => return Some(Step::Waits),
                _ => self.next += 1,
            }
        }
        self.synced = goal;
        None
    }

    /// Whether `rank` has put its contribution to the round that it is waited for in.
    fn has_put(&self, rank: u32) -> bool {
        if self.is_put {
            return self.board.mark(rank, self.number).is_some();
        }
        self.board.mark(rank, self.goal).is_some() || self.board.is_past(rank, self.goal)
    }

    /// Whether the awaited member has put its contribution, or none is awaited.
    fn can_proceed(&self) -> bool {
        self.yields || self.has_put(self.next)
    }

    fn awaits(&self, part: &Part, rank: u32) -> bool {
        let is_needed = !self.is_put || (part.needs.0..part.needs.1).contains(&rank);
        !self.yields && is_needed && !self.has_put(rank)
    }

    /// Whether the check for late members is due.
    fn is_late(&self, now: Instant) -> bool {
        self.since.is_none_or(|since| now.since(since) >= PATIENCE_NS)
    }
}

impl Group {
    /// The error with which calls through the board end if a member that the first one waits for is
    /// gone. Calls by messages end by their messages: a member that was ahead may have left before
    /// it could put them.
    #[inline]
    fn lost_on_board(&self) -> Option<Error> {
        if self.is_whole { None } else { cold(self.lost_on_board_slow()) }
    }

    /// The state of the first call through the board, which lacks contributions: it fails if a
    /// member that it waits for is gone.
    #[inline(never)]
    fn check_waiting(&mut self, now: Instant) -> BoardProgress {
        if self.lost_on_board().is_some() {
            return BoardProgress::Lost;
        }
        let BoardState::Attached(calls) = &mut self.shared else { return BoardProgress::Idle };
        if !calls.is_busy {
            return BoardProgress::Idle;
        }
        let first = &mut calls.first;
        // A call that was not seen to wait before is late after the patience has passed.
        if first.is_late(now) && first.since.replace(now).is_some() {
            return BoardProgress::Late;
        }
        BoardProgress::Waits
    }

    /// The slow part of [`lost_on_board`](Self::lost_on_board), for a group with a lost member.
    fn lost_on_board_slow(&self) -> Option<Error> {
        let BoardState::Attached(calls) = &self.shared else { return None };
        calls.callers().next()?;
        (0..).zip(&self.members).find_map(|(rank, m)| {
            let err = m.lost?;
            (rank != self.me && calls.awaits(rank)).then_some(err)
        })
    }
}

impl Group {
    /// Appends the last [checked](super::CheckedCall) call to the order of the group, if the group
    /// has a board: through the board with the source and the result that `buffers` has, or else by
    /// messages. If no call is before it, it progresses at once, and then with
    /// [`drive_boards`](Node::drive_boards).
    #[inline(always)]
    pub(super) fn add_call(&mut self, buffers: Option<(Caller, Span, Span)>) -> AddOutcome {
        let BoardState::Attached(calls) = &mut self.shared else { return AddOutcome::Queued };
        let part = &self.checked.part;
        let buffers = match buffers {
            Some((caller, source, out)) => {
                let is_out = part.shape.kind == Kind::Broadcast;
                let body = if is_out { out.again() } else { source };
                CallBuffers { body, out, caller: Some(caller) }
            }
            None => CallBuffers { body: Span::EMPTY, out: Span::EMPTY, caller: None },
        };
        let by_board = buffers.caller.is_some();
        let added = calls.add(part, buffers);
        if by_board && !matches!(added, AddOutcome::Ended) {
            self.ops += 1;
        }
        added
    }
}

/// Result of appending a call to the order of its group.
pub(super) enum AddOutcome {
    /// Other calls are before it, or the group has no order.
    Queued,
    /// The call has succeeded, and left no state.
    Ended,
    /// The call is the first, and waits.
    Waiting,
}

impl Group {
    /// Whether the first call through the board waits for `rank`.
    pub(super) fn awaits_on_board(&self, rank: u32) -> bool {
        matches!(&self.shared, BoardState::Attached(calls) if calls.awaits(rank))
    }
}

impl Coll {
    /// Attaches the board after the members have exchanged the `names` of their slots, 0 for none.
    ///
    /// # Errors
    /// [`Error::NoMem`]: a member's name is wrong, a member died, or there is no memory.
    pub(super) fn agree_on_board(&mut self, g: GroupIdx, names: &[u64]) -> Result<()> {
        let group = &mut self.groups[g];
        let shared = std::mem::replace(&mut group.shared, BoardState::Unused);
        let BoardState::Offered(mut board) = shared else { return Ok(()) };
        if names.is_empty() || names.contains(&0) {
            return Ok(());
        }
        let attached = board.attach(group.gid, names);
        let calls = attached.then(|| Calls::new(*board, names.len())).flatten();
        group.shared = BoardState::Attached(Box::new(calls.ok_or(Error::NoMem)?));
        Ok(())
    }

    /// Whether any call through a board is in progress.
    #[inline(always)]
    pub(crate) fn has_calls_on_boards(&self) -> bool {
        !self.on_boards.is_empty()
    }

    /// Whether any call through a board may make progress.
    pub(super) fn boards_are_due(&self) -> bool {
        self.on_boards.iter().any(|&g| match &self.groups[g].shared {
            BoardState::Attached(calls) => calls.first.can_proceed(),
            _ => false,
        })
    }

    /// Whether a call through a board has waited too long.
    pub(super) fn boards_are_late(&self, now: Instant) -> bool {
        self.on_boards.iter().any(|&g| match &self.groups[g].shared {
            BoardState::Attached(calls) => calls.first.is_late(now),
            _ => false,
        })
    }

    /// Time at which boards are to be polled even without a wake-up.
    pub(super) fn boards_deadline(&self, now: Instant) -> Option<Instant> {
        if !self.has_calls_on_boards() {
            return None;
        }
        let pause = if self.boards_are_due() { 0 } else { POLL_NS };
        Some(now + pause)
    }

    /// Registers group `g`, whose first call waits after [`Group::add_call`]. Returns whether a
    /// member is gone, so that the call may have to end.
    #[inline(always)]
    pub(super) fn register_waiting_call(&mut self, now: Instant, g: GroupIdx) -> bool {
        self.on_boards.push(g);
        self.asks_at.get_or_insert(now + ASK_NS);
        !self.groups[g].is_whole
    }

    /// Ends the watching of peers for a call that has ended.
    #[cold]
    fn unwatch(&mut self, g: GroupIdx, peers: &mut Peers) {
        let BoardState::Attached(calls) = &mut self.groups[g].shared else { return };
        for p in std::mem::take(&mut calls.first.watched) {
            peers[p].coll_waits -= 1;
        }
    }

    /// Gives a join that begins the port's view of the members: the layout, the cost of messages to
    /// them, and the name of a board slot if all of them share memory.
    pub(super) fn offer_board(
        &mut self,
        peers: &Peers,
        own: Station,
        o: CallIdx,
        out: &mut dyn FrameSink,
    ) {
        let op = &self.ops[o];
        let (Some(words), g) = (&op.words, op.group) else { return };
        let group = &mut self.groups[g];
        if !matches!(group.shared, BoardState::Wanted) {
            return;
        }
        group.shared = BoardState::Unused;
        let stations: Vec<_> = group.members.iter().map(|m| peers[m.peer].station()).collect();
        let mut is_near = |station| station == own || out.is_near(station);
        let near = (0..).zip(&stations).filter(|&(_, &station)| is_near(station));
        let near: Vec<u32> = near.map(|(rank, _)| rank).collect();
        let layout = Layout::of(group.members.len() as u32, &near).to_word();
        let is_near = near.len() == group.members.len();
        let model = if is_near { Model::MEMORY } else { self.model };
        for (i, word) in [layout, !layout].into_iter().chain(model.to_words()).enumerate() {
            words.io().write_at(8 * (LAYOUT_WORD + i), &word.to_le_bytes());
        }
        if let Some(board) = out.board(&stations) {
            let at = 8 * (super::JOIN_WORDS + group.me as usize);
            words.io().write_at(at, &board.name().to_le_bytes());
            group.shared = BoardState::Offered(Box::new(board));
        }
    }
}

impl NodeCounters {
    /// Counts a call through a board that has succeeded.
    #[inline(always)]
    pub(super) fn count_shared(&mut self) {
        self.colls_done += 1;
        self.colls_shared += 1;
    }
}

impl Node {
    /// Advances all calls through boards, and watches late members. Returns the number of calls
    /// that have succeeded.
    pub(crate) fn drive_boards(&mut self, now: Instant) -> usize {
        let before = self.counters.colls_done;
        let mut at = 0;
        while let Some(&g) = self.coll.on_boards.get(at) {
            let waits = match self.objects().advance_board(now, g) {
                BoardProgress::Waits => true,
                BoardProgress::Idle => false,
                rare => {
                    let node = &mut *self;
                    outlined(move || node.collectives().settle_board(now, g, rare))
                }
            };
            if waits {
                at += 1;
            } else if self.coll.on_boards.get(at) == Some(&g) {
                self.coll.on_boards.swap_remove(at);
            }
        }
        (self.counters.colls_done - before) as usize
    }
}

impl Objects<'_> {
    /// Advances the calls of a group through its board as far as possible.
    #[inline(always)]
    fn advance_board(&mut self, now: Instant, g: GroupIdx) -> BoardProgress {
        loop {
            let Some(group) = self.coll.groups.get_mut(g) else { return cold(BoardProgress::Idle) };
            let BoardState::Attached(calls) = &mut group.shared else {
                return cold(BoardProgress::Idle);
            };
            match calls.step() {
                Step::Waits => return group.check_waiting(now),
                Step::Disagree => return cold(BoardProgress::Disagree),
                Step::Ended => {}
            }
            let (caller, has_watched) = (calls.end_first(), !calls.first.watched.is_empty());
            let (is_last, ep) = (!calls.is_busy, group.ep);
            group.ops -= u32::from(caller.is_some());
            if has_watched {
                self.coll.unwatch(g, self.peers);
            }
            if let Some(caller) = caller {
                self.counters.count_shared();
                self.complete_call(ep, caller);
            }
            if is_last {
                return BoardProgress::Idle;
            }
        }
    }
}

impl Collectives<'_> {
    /// Advances the calls of a group through its board, as [`Node::drive_boards`] does for all
    /// groups.
    pub(super) fn drive_group(&mut self, now: Instant, g: GroupIdx) {
        let progress = self.sessions.objects().advance_board(now, g);
        if !self.settle_board(now, g, progress) {
            self.sessions.coll.on_boards.retain(|&other| other != g);
        }
    }

    /// Ends a group whose calls through the board have failed, and watches the late members of one
    /// that waits. Returns whether a call waits: if not, the group is to be removed from those with
    /// calls, unless it has ended and was removed.
    #[inline(never)]
    fn settle_board(&mut self, now: Instant, g: GroupIdx, progress: BoardProgress) -> bool {
        let err = match progress {
            BoardProgress::Idle => return false,
            BoardProgress::Waits => return true,
            BoardProgress::Late => {
                self.watch_late(now, g);
                return true;
            }
            BoardProgress::Lost => self.sessions.coll.groups[g].lost_on_board(),
            BoardProgress::Disagree => Some(DISAGREE),
        };
        if let Some(err) = err {
            self.abort_group(now, g, err);
        }
        false
    }

    /// Watches the members that the first call of a group waits for, like members that owe a
    /// message.
    fn watch_late(&mut self, now: Instant, g: GroupIdx) {
        let group = &self.sessions.coll.groups[g];
        let BoardState::Attached(calls) = &group.shared else { return };
        let awaits = |&(rank, _): &(u32, _)| rank != group.me && calls.awaits(rank);
        let late = (0..).zip(&group.members).filter(awaits).map(|(_, member)| member.peer);
        let late: Vec<PeerIdx> = late.filter(|p| !calls.first.watched.contains(p)).collect();
        for p in late {
            self.sessions.peers[p].begin_to_wait(now);
            self.sessions.peers[p].coll_waits += 1;
            if let BoardState::Attached(calls) = &mut self.sessions.coll.groups[g].shared {
                calls.first.watched.push(p);
            }
            self.sessions.control().probe_silent(now, p);
        }
    }
}

impl Objects<'_> {
    /// Ends the calls of an ended group through the board with an error.
    pub(super) fn fail_board(&mut self, g: GroupIdx, err: Error) {
        self.coll.unwatch(g, self.peers);
        self.coll.on_boards.retain(|&other| other != g);
        let group = &mut self.coll.groups[g];
        let BoardState::Attached(calls) = std::mem::replace(&mut group.shared, BoardState::Unused)
        else {
            return;
        };
        let ep = group.ep;
        for caller in calls.callers() {
            self.coll.groups[g].ops -= 1;
            self.fail_call(ep, caller, err);
        }
    }
}

mod part;
#[cfg(test)]
mod tests;
