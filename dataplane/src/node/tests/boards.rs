//! Collectives of members that share memory, through a board.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use barewire_driver::backend::any_board::AnyBoard;
use barewire_driver::board::{Board, LEAVES};
use barewire_driver::mem::Span;
use barewire_driver::mem::atomic::{AtomicOp, Datatype};

use super::groups::Team;
use super::*;

/// What a member has put for a call: the number, the mark, the bytes.
#[derive(Clone, Debug, Default)]
struct Leaf {
    call: u32,
    mark: u64,
    body: Vec<u8>,
}

/// A member's leaves and areas, and the last call of which it needs nothing any more.
#[derive(Debug, Default)]
struct Slot {
    leaves: [Leaf; LEAVES as usize],
    areas: [Vec<u8>; 2],
    done: u32,
}

type Slots = Arc<Mutex<Vec<Slot>>>;

/// A member's view of the slots. The rank is the place in the names.
#[derive(Debug)]
struct Shared {
    slots: Slots,
    own: usize,
    members: Vec<usize>,
}

impl Shared {
    fn new(slots: &Slots) -> Self {
        let mut all = slots.lock().unwrap();
        all.push(Slot::default());
        Self { slots: Arc::clone(slots), own: all.len() - 1, members: Vec::new() }
    }

    fn leaf(&self, rank: u32, call: u32) -> Leaf {
        let slot = &self.slots.lock().unwrap()[self.members[rank as usize]];
        slot.leaves[(call % LEAVES) as usize].clone()
    }
}

impl Board for Shared {
    fn name(&self) -> u64 {
        self.own as u64 + 1
    }

    fn attach(&mut self, _: u32, names: &[u64]) -> bool {
        self.members = names.iter().map(|&name| name as usize - 1).collect();
        true
    }

    fn put(&mut self, call: u32, mark: u64, body: &Span, len: usize) {
        let mut bytes = vec![0; len];
        IoBuf::one(body.again()).read_at(0, &mut bytes);
        let mut all = self.slots.lock().unwrap();
        all[self.own].leaves[(call % LEAVES) as usize] = Leaf { call, mark, body: bytes };
    }

    fn write(&mut self, call: u32, at: usize, (from, from_at): (&IoBuf, usize), len: usize) {
        let area = &mut self.slots.lock().unwrap()[self.own].areas[call as usize % 2];
        area.resize(area.len().max(at + len), 0);
        from.read_at(from_at, &mut area[at..at + len]);
    }

    fn mark(&self, rank: u32, call: u32) -> Option<u64> {
        let leaf = self.leaf(rank, call);
        (leaf.call == call).then_some(leaf.mark)
    }

    fn read(&self, rank: u32, call: u32, at: usize, (to, to_at): (&IoBuf, usize), len: usize) {
        let leaf = self.leaf(rank, call);
        assert_eq!(leaf.call, call, "what is taken was put over");
        to.write_at(to_at, &leaf.body[at..at + len]);
    }

    fn is_past(&self, rank: u32, call: u32) -> bool {
        self.leaf(rank, call).call > call
    }

    fn read_long(&self, rank: u32, call: u32, at: usize, (to, to_at): (&IoBuf, usize), len: usize) {
        assert_eq!(self.leaf(rank, call).call, call, "what is taken was put over");
        let slot = &self.slots.lock().unwrap()[self.members[rank as usize]];
        to.write_at(to_at, &slot.areas[call as usize % 2][at..at + len]);
    }

    fn first_word(&self, rank: u32, call: u32) -> u64 {
        let mut word = self.leaf(rank, call).body;
        word.resize(8, 0);
        u64::from_le_bytes(word.try_into().unwrap())
    }

    fn collect(&self, ranks: Range<u32>, call: u32, mark: u64, words: &mut [u64]) -> (u32, bool) {
        let end = ranks.end;
        for rank in ranks {
            let put = self.mark(rank, call);
            if put != Some(mark) {
                return (rank, put.is_some());
            }
            words[rank as usize] = self.first_word(rank, call);
        }
        (end, false)
    }

    fn replaced(&mut self, _: Range<u32>, _: u32) -> Option<u32> {
        None
    }

    fn done(&mut self, call: u32) {
        self.slots.lock().unwrap()[self.own].done = call;
    }
}

/// A wire between processes that share memory.
struct Wire<'a>(&'a mut VecDeque<Vec<u8>>, &'a Slots);

impl FrameSink for Wire<'_> {
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        sink(self.0)(frame)
    }

    fn board(&mut self, _: &[Station]) -> Option<AnyBoard> {
        Some((Box::new(Shared::new(self.1)) as Box<dyn Board>).into())
    }
}

/// Two members of a group with a board.
struct Sharers {
    team: Team,
    groups: [GroupId; 2],
    slots: Slots,
}

impl Sharers {
    fn new() -> Self {
        let mut team = Team::new(NodeSettings::default());
        let groups = [0, 1].map(|i| team.join(i, JoinModel::Collective(1)).unwrap());
        let mut it = Self { team, groups, slots: Slots::default() };
        it.run(1000);
        assert_eq!([0, 1].map(|i| it.team.pair.ends[i].node.coll.check(it.groups[i])), [Ok(()); 2]);
        assert_eq!(it.slots.lock().unwrap().len(), 2, "each has a slot");
        it
    }

    fn run(&mut self, turns: usize) {
        let pair = &mut self.team.pair;
        for _ in 0..turns {
            for End { node, out, .. } in &mut pair.ends {
                node.transmit(pair.now, &mut Wire(out, &self.slots));
            }
            for i in 0..2 {
                for bytes in std::mem::take(&mut pair.ends[i].out) {
                    pair.ends[1 - i].node.on_frame(pair.now, &RxFrame::new(&bytes));
                }
            }
            pair.now = pair.now + 5_000;
        }
    }

    /// Member `i` calls a collective of `count` elements, with its [`source`]. Returns its result.
    fn call(&mut self, i: usize, call: Call, count: u64, context: u64) -> IoBuf {
        let Call { kind, op, ty, root } = call;
        let (group, root) = (self.groups[i], self.team.members[i][root]);
        let what = CollWord::new(kind, op, Some(ty));
        let call = match kind {
            CollKind::Barrier => CollCall::barrier(group),
            _ => CollCall { what, group, count, root },
        };
        let req = CollReq { call, role: None, context, flags: OpFlags::empty() };
        let mut result = IoBuf::EMPTY;
        let lend = |source_len: usize, result_len: usize| {
            let is_own = kind == CollKind::Broadcast && self.team.members[i][i] == root;
            let (out, look) = match is_own {
                true => IoBuf::leaked_pair(&source(i, result_len)),
                false => shared(result_len),
            };
            result = look;
            let span = |mut buf: IoBuf| buf.take_one().unwrap_or(Span::EMPTY);
            (span(IoBuf::leaked(&source(i, source_len))), span(out))
        };
        self.team.pair.ends[i].node.coll_post(self.team.eps[i], &req, lend).unwrap();
        result
    }

    fn told(&mut self, i: usize) -> Vec<u64> {
        self.team.pair.read(i).iter().map(|cqe| cqe.op_context).collect()
    }
}

/// What members call alike.
#[derive(Clone, Copy)]
struct Call {
    kind: CollKind,
    op: Option<AtomicOp>,
    ty: Datatype,
    root: usize,
}

/// What member `i` contributes.
fn source(i: usize, len: usize) -> Vec<u8> {
    (0..len).map(|at| (1 + i * 100 + at) as u8).collect()
}

/// The result of member `me` of two in a call of blocks of `len` bytes, which are numbers or, if
/// there are eight, may be one.
fn expected(call: Call, me: usize, len: usize) -> Vec<u8> {
    let of = |i: usize, blocks: usize| source(i, blocks * len);
    let sum = |blocks| -> Vec<u8> {
        of(0, blocks).iter().zip(of(1, blocks)).map(|(a, b)| a.wrapping_add(b)).collect()
    };
    let mine = |all: Vec<u8>| all[me * len..][..len].to_vec();
    let at_root = |all: Vec<u8>| if me == call.root { all } else { Vec::new() };
    match call.kind {
        CollKind::Barrier => Vec::new(),
        CollKind::Broadcast => of(call.root, 1),
        CollKind::Scatter => mine(of(call.root, 2)),
        CollKind::Alltoall => [mine(of(0, 2)), mine(of(1, 2))].concat(),
        CollKind::Allgather => [of(0, 1), of(1, 1)].concat(),
        CollKind::Gather => at_root([of(0, 1), of(1, 1)].concat()),
        CollKind::Allreduce => sum(1),
        CollKind::Reduce => at_root(sum(1)),
        CollKind::ReduceScatter => mine(sum(2)),
    }
}

/// All kinds of calls, with each root.
fn calls() -> Vec<Call> {
    use CollKind::*;
    let sum = Some(AtomicOp::Sum);
    let kinds = [Barrier, Broadcast, Scatter, Alltoall, Allgather, Gather];
    let moves = kinds.map(|kind| (kind, None));
    let reductions = [Allreduce, Reduce, ReduceScatter].map(|kind| (kind, sum));
    let kinds = moves.into_iter().chain(reductions);
    let of = |(kind, op)| [0, 1].map(|root| Call { kind, op, ty: Datatype::Uint8, root });
    kinds.flat_map(of).collect()
}

/// Goal: each collective has its result through the board, whoever calls first, and each member
/// says when it needs nothing of it any more. Method: all kinds, with each root and two lengths.
#[test]
fn every_kind_goes_through_the_board() {
    let mut it = Sharers::new();
    let mut done = 0;
    for call in calls() {
        for (first, len) in [(0, 5), (1, 5), (0, 1)] {
            let mut results = [IoBuf::EMPTY, IoBuf::EMPTY];
            for i in [first, 1 - first] {
                results[i] = it.call(i, call, len as u64, 7);
            }
            it.run(4);
            done += 1;
            let what = format!("{:?} of {len}, root {}, {first} first", call.kind, call.root);
            for (i, result) in results.iter().enumerate() {
                assert_eq!(it.told(i), [7], "{what}: {i}");
                assert_eq!(contents(result), expected(call, i, len), "{what}: {i}");
                assert_eq!(it.team.pair.ends[i].node.counters().colls_shared, done, "{what}");
            }
            let slots = it.slots.lock().unwrap();
            assert!(slots.iter().all(|slot| u64::from(slot.done) == done), "{what}: {slots:?}");
        }
    }
}

/// Goal: one word of each member is reduced to one word.
#[test]
fn words_are_reduced() {
    let mut it = Sharers::new();
    let (kind, op, ty) = (CollKind::Allreduce, Some(AtomicOp::Sum), Datatype::Uint64);
    let call = Call { kind, op, ty, root: 0 };
    for context in 1..5 {
        let results = [0, 1].map(|i| it.call(i, call, 1, context));
        it.run(4);
        let word = |i| u64::from_le_bytes(source(i, 8).try_into().unwrap());
        let sum = word(0).wrapping_add(word(1)).to_le_bytes();
        assert_eq!(results.map(|result| contents(&result)), [sum.to_vec(), sum.to_vec()]);
        assert_eq!([0, 1].map(|i| it.told(i)), [[context], [context]]);
    }
}

/// Goal: calls of one member wait for the other one's, and end in their order.
#[test]
fn calls_wait_behind_each_other() {
    let mut it = Sharers::new();
    let calls = calls();
    let some: Vec<Call> = calls.into_iter().step_by(2).collect();
    let mine: Vec<IoBuf> = (0..).zip(&some).map(|(n, &call)| it.call(0, call, 3, n)).collect();
    it.run(4);
    let early = it.told(0).len();
    assert!(early < some.len());
    for (n, &call) in (0..).zip(&some) {
        it.call(1, call, 3, n);
        it.run(4);
    }
    let all: Vec<u64> = (0..some.len() as u64).collect();
    assert_eq!((it.told(1), it.told(0)), (all.clone(), all[early..].to_vec()));
    for (call, result) in some.iter().zip(&mine) {
        assert_eq!(contents(result), expected(*call, 0, 3), "{:?}", call.kind);
    }
}

/// Goal: who leaves a group hears of what it has called, and so does who waits for it.
#[test]
fn calls_end_with_their_group() {
    for leaver in [0, 1] {
        let mut it = Sharers::new();
        let call = Call { kind: CollKind::Barrier, op: None, ty: Datatype::Uint8, root: 0 };
        it.call(0, call, 0, 7);
        it.run(4);
        assert_eq!(it.told(0), [0; 0]);
        let (now, group) = (it.team.pair.now, it.groups[leaver]);
        it.team.pair.ends[leaver].node.collectives().coll_close(now, group).unwrap();
        it.run(1000);
        let err = it.team.pair.read_err(0);
        let why = [Error::Canceled, Error::ConnRefused][leaver];
        assert_eq!((err.cqe.op_context, err.err), (7, why), "{leaver} leaves");
    }
}

/// Goal: a member that is late is watched, and the call ends if it is dead.
#[test]
fn a_call_ends_with_a_member_that_is_dead() {
    let mut it = Sharers::new();
    let call = Call { kind: CollKind::Barrier, op: None, ty: Datatype::Uint8, root: 0 };
    it.call(0, call, 0, 7);
    for _ in 0..7_000 {
        let pair = &mut it.team.pair;
        let End { node, out, .. } = &mut pair.ends[0];
        node.transmit(pair.now, &mut Wire(out, &it.slots));
        out.clear();
        pair.now = pair.now + 100_000;
    }
    assert_eq!(it.team.pair.ends[0].node.cqs.ready(it.team.pair.ends[0].cq), Ok(1));
    let err = it.team.pair.read_err(0);
    assert_eq!((err.cqe.op_context, err.err), (7, Error::HostUnreach));
}
