//! Schedules on plain memory: every kind, many groups, every algorithm, any order of events,
//! compared with the definition. Messages are read when they arrive, not when they are posted, so a
//! schedule that overwrites a buffer in flight is detected.

use std::collections::{HashMap, VecDeque};

use barewire_driver::mem::atomic::{AtomicOp, Datatype};
use barewire_driver::mem::{IoBuf, Scratch};
use barewire_driver::port::{PortCaps, Station};

use super::plan::{Force, Layout, MODEL_WORDS, Model, Plan, RADIX_MAX, choose, factors};
use super::program::Program;
use super::run::{Action, Run};
use super::{Area, Kind, Local, Place, Round, Shape, Slice};

/// Bytes of canary before and after every memory.
const GUARD: usize = 24;
const CANARY: u8 = 0xa5;

struct Member {
    run: Run,
    areas: [Vec<u8>; 3],
    in_place: bool,
    /// Receives posted, by sender and step.
    posted: HashMap<(u32, u16), VecDeque<Slice>>,
    done: bool,
}

struct Flight {
    from: usize,
    to: usize,
    step: u16,
    slice: Slice,
    bytes: Vec<u8>,
    round: u32,
    arrived: bool,
}

/// The calls of all members of one group.
struct Group {
    members: Vec<Member>,
    flights: Vec<Flight>,
    reduce: (AtomicOp, Datatype),
    rng: u64,
}

impl Member {
    fn area(&mut self, area: Area) -> &mut Vec<u8> {
        match area {
            Area::In if self.in_place => &mut self.areas[1],
            Area::In => &mut self.areas[0],
            Area::Out => &mut self.areas[1],
            Area::Scratch => &mut self.areas[2],
        }
    }

    fn bytes(&mut self, at: Place, len: u64) -> &mut [u8] {
        let from = GUARD + at.off as usize;
        let area = self.area(at.area);
        assert!(from + len as usize <= area.len() - GUARD, "{at:?} + {len} is outside");
        &mut area[from..from + len as usize]
    }

    fn read(&mut self, slice: &Slice) -> Vec<u8> {
        slice.pieces.iter().flat_map(|&(at, len)| self.bytes(at, len).to_vec()).collect()
    }

    fn compute(&mut self, local: Local, (op, ty): (AtomicOp, Datatype)) {
        match local {
            Local::Copy { from, to, len, count, from_step, to_step } => {
                for i in 0..count as i64 {
                    let at = |p: Place, step: i64| Place {
                        area: p.area,
                        off: (p.off as i64 + i * step) as u64,
                    };
                    let bytes = self.bytes(at(from, from_step), len).to_vec();
                    self.bytes(at(to, to_step), len).copy_from_slice(&bytes);
                }
            }
            Local::Reduce { a, b, to, len } => {
                let pair = [self.bytes(a, len).to_vec(), self.bytes(b, len).to_vec()];
                let [a, b] = pair.map(|bytes| IoBuf::leaked_scratch(&bytes));
                let sum = Scratch::new(len as usize).unwrap();
                let count = len as usize / ty.size();
                sum.io().combine(0, op, ty, count, (&a.io(), 0), (&b.io(), 0)).unwrap();
                sum.io().read_at(0, self.bytes(to, len));
            }
        }
    }
}

/// Creates scratch memory that holds a copy of `bytes`.
trait LeakedScratch {
    fn leaked_scratch(bytes: &[u8]) -> Scratch;
}

impl LeakedScratch for IoBuf {
    fn leaked_scratch(bytes: &[u8]) -> Scratch {
        let s = Scratch::new(bytes.len()).unwrap();
        s.io().write_at(0, bytes);
        s
    }
}

impl Group {
    fn random(&mut self, below: usize) -> usize {
        self.rng ^= self.rng << 13;
        self.rng ^= self.rng >> 7;
        self.rng ^= self.rng << 17;
        (self.rng >> 11) as usize % below
    }

    /// Executes one random event; false if there is none.
    fn step(&mut self) -> bool {
        let members = self.members.len();
        let first = self.random(members + self.flights.len());
        for i in 0..members + self.flights.len() {
            let at = (first + i) % (members + self.flights.len());
            let did =
                if at < members { self.step_member(at) } else { self.step_flight(at - members) };
            if did {
                return true;
            }
        }
        false
    }

    fn step_member(&mut self, at: usize) -> bool {
        let reduce = self.reduce;
        let m = &mut self.members[at];
        match m.run.action() {
            Action::Recv(comm) => {
                m.posted.entry((comm.rank, comm.step)).or_default().push_back(comm.slice);
            }
            Action::Send(comm, round) => {
                let bytes = m.read(&comm.slice);
                let (to, step, slice) = (comm.rank as usize, comm.step, comm.slice);
                assert_ne!(to, at, "a message to oneself");
                self.flights.push(Flight {
                    from: at,
                    to,
                    step,
                    slice,
                    bytes,
                    round,
                    arrived: false,
                });
                self.members[at].run.done();
                return true;
            }
            Action::Local(local) => m.compute(local, reduce),
            Action::Wait => return false,
            Action::Done => return !std::mem::replace(&mut m.done, true),
        }
        self.members[at].run.done();
        true
    }

    fn step_flight(&mut self, at: usize) -> bool {
        let f = &self.flights[at];
        if f.arrived {
            let f = self.flights.remove(at);
            self.members[f.from].run.sent(f.round);
            return true;
        }
        // Messages between two members with one step arrive in order.
        let (from, to, step) = (f.from, f.to, f.step);
        let same = |g: &Flight| !g.arrived && (g.from, g.to, g.step) == (from, to, step);
        if self.flights[..at].iter().any(same) {
            return false;
        }
        let posted = self.members[to].posted.get_mut(&(from as u32, step));
        let Some(slice) = posted.and_then(VecDeque::pop_front) else { return false };
        let bytes = self.members[from].read(&self.flights[at].slice);
        assert_eq!(bytes, self.flights[at].bytes, "what was being sent was written");
        assert_eq!(slice.len() as usize, bytes.len(), "{from} to {to}, step {step:#x}");
        let mut rest = &bytes[..];
        for (place, len) in slice.pieces {
            let (piece, more) = rest.split_at(len as usize);
            self.members[to].bytes(place, len).copy_from_slice(piece);
            rest = more;
        }
        self.members[to].run.received();
        self.flights[at].arrived = true;
        true
    }
}

/// The source buffer of `member`.
fn input(member: u32, elements: u64, float: bool) -> Vec<u8> {
    let word = |i: u64| {
        let x = (u64::from(member) << 32 ^ i).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        if float { (1.0 + (x >> 12) as f64 / 3.0).to_bits() } else { x }
    };
    (0..elements).flat_map(|i| word(i).to_le_bytes()).collect()
}

/// Runs one call of a whole group under `plan`, compares it with the definition, and returns the
/// results.
fn check(shape: Shape, plan: &Plan, float: bool, seed: u64) -> Vec<Vec<u8>> {
    let reduce = (AtomicOp::Sum, if float { Datatype::Double } else { Datatype::Uint64 });
    let members = (0..shape.n).map(|me| {
        let s = Shape { me, ..shape };
        let blocks = |n: u64| (n * s.count * s.size) as usize;
        let source = blocks(s.kind.blocks_in(s.n, me, s.root));
        let result = blocks(s.kind.blocks_out(s.n, me, s.root));
        let program = Program::new(s, plan);
        let scratch = program.scratch_len() as usize;
        let with_guards = |len: usize| vec![CANARY; len + 2 * GUARD];
        let mut areas = [with_guards(source), with_guards(result), with_guards(scratch)];
        let elements = s.count * s.kind.blocks_in(s.n, me, s.root);
        let filled = if s.kind == Kind::Broadcast && me == s.root || s.in_place { 1 } else { 0 };
        let own = input(me, if s.kind == Kind::Broadcast { s.count } else { elements }, float);
        if s.kind != Kind::Broadcast || me == s.root {
            let len = own.len().min(areas[filled].len() - 2 * GUARD);
            areas[filled][GUARD..GUARD + len].copy_from_slice(&own[..len]);
        }
        let run = Run::new(program);
        Member { run, areas, in_place: s.in_place, posted: HashMap::new(), done: false }
    });
    let members = members.collect();
    let mut g = Group { members, flights: Vec::new(), reduce, rng: seed | 1 };
    while g.step() {}
    assert!(g.members.iter().all(|m| m.done), "{shape:?} {plan:?}: somebody waits for ever");
    for (me, m) in g.members.iter().enumerate() {
        assert!(m.posted.values().all(VecDeque::is_empty), "{shape:?} {plan:?}: {me}");
        for area in &m.areas {
            let ends = area[..GUARD].iter().chain(&area[area.len() - GUARD..]);
            assert!(ends.into_iter().all(|&b| b == CANARY), "{shape:?} {plan:?}: {me} overran");
        }
    }
    let out = |m: &Member| m.areas[1][GUARD..m.areas[1].len() - GUARD].to_vec();
    let results: Vec<_> = g.members.iter().map(out).collect();
    if !float {
        for me in 0..shape.n {
            let s = Shape { me, ..shape };
            let want = expected(&s);
            assert_eq!(results[me as usize], want, "{s:?} {plan:?}");
        }
    }
    results
}

/// The result by the definition.
fn expected(s: &Shape) -> Vec<u8> {
    let (n, count) = (s.n, s.count);
    let words = |member: u32, elements: u64| -> Vec<u64> {
        let bytes = input(member, elements, false);
        bytes.chunks(8).map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect()
    };
    let block = |member: u32, blocks: u64, i: u32| -> Vec<u64> {
        let from = (u64::from(i) * count) as usize;
        words(member, blocks * count)[from..from + count as usize].to_vec()
    };
    let sum = |blocks: u64, i: u32| -> Vec<u64> {
        let mut sum = vec![0_u64; count as usize];
        for m in 0..n {
            for (s, w) in sum.iter_mut().zip(block(m, blocks, i)) {
                *s = s.wrapping_add(w);
            }
        }
        sum
    };
    let all = |f: &dyn Fn(u32) -> Vec<u64>| (0..n).flat_map(f).collect::<Vec<u64>>();
    let result: Vec<u64> = match s.kind {
        Kind::Barrier => vec![],
        Kind::Broadcast => words(s.root, count),
        Kind::Alltoall => all(&|m| block(m, n.into(), s.me)),
        Kind::Allreduce => sum(1, 0),
        Kind::Allgather => all(&|m| block(m, 1, 0)),
        Kind::ReduceScatter => sum(n.into(), s.me),
        Kind::Reduce if s.me == s.root => sum(1, 0),
        Kind::Scatter => block(s.root, n.into(), s.me),
        Kind::Gather if s.me == s.root => all(&|m| block(m, 1, 0)),
        Kind::Reduce | Kind::Gather => vec![],
    };
    result.iter().flat_map(|w| w.to_le_bytes()).collect()
}

fn shape(kind: Kind, n: u32, root: u32, count: u64) -> Shape {
    Shape { kind, n, me: 0, root, count, size: 8, in_place: false }
}

/// Every layout of `n` members on more than one node.
fn layouts(n: u32) -> Vec<Layout> {
    let locals = (2..n).filter(|local| n.is_multiple_of(*local));
    locals.flat_map(|local| [true, false].map(|packed| Layout { local, packed })).collect()
}

/// Every algorithm for `kind` and `n`.
fn plans(kind: Kind, n: u32) -> Vec<Plan> {
    if n == 1 {
        return vec![Plan::Alone];
    }
    let radixes = || [2, 3, 4, 7, n.min(RADIX_MAX)].into_iter().filter(|&k| k <= n.max(2));
    // Cheap messages give small factors, expensive rounds give large ones.
    let all_factors = |n: u32| {
        [(0, 1), (1, 0), (3, 1)]
            .into_iter()
            .filter_map(move |(f, e)| factors(n, f, e).map(|(_, radices)| radices))
    };
    let mut plans = Vec::new();
    for k in radixes() {
        match kind {
            Kind::Barrier => plans.push(Plan::Dissemination { k }),
            Kind::Allgather | Kind::Alltoall => plans.push(Plan::Bruck { k }),
            Kind::Broadcast => {
                plans.extend([Plan::Tree { k }, Plan::ScatterAllgather { k, ag: 2 }]);
            }
            Kind::Reduce => plans.extend([Plan::Tree { k }, Plan::Pairs { k }]),
            Kind::Scatter | Kind::Gather => plans.push(Plan::Tree { k }),
            Kind::Allreduce | Kind::ReduceScatter => plans.push(Plan::Pairs { k }),
        }
        if kind.reduces() {
            plans.extend(all_factors(n).map(|radices| Plan::Split { radices, k }));
        }
    }
    if kind == Kind::Alltoall {
        plans.push(Plan::Direct);
    }
    if kind == Kind::Allreduce {
        for members in n.div_ceil(2).max(2)..=n {
            let plan = |radices| Plan::Multiply { radices, members };
            plans.extend(all_factors(members).map(plan));
        }
        for layout in layouts(n) {
            let each = |n: u32| all_factors(n).next_back().expect("small factors");
            let radices = [each(layout.local), each(n / layout.local)];
            plans.extend([[2, 2], [3, 4]].map(|k| Plan::Lanes { layout, radices, k }));
        }
    }
    plans.dedup();
    plans
}

/// Goal: every algorithm computes the defined result, for any group, root and count, in any order
/// of events, and touches no other memory.
#[test]
fn every_algorithm_is_right_for_every_group() {
    let mut seed = 1;
    for n in (1..=13).chain([16, 17, 32]) {
        for kind in Kind::ALL {
            let roots = if kind.has_root() { vec![0, n / 2, n - 1] } else { vec![0] };
            let mut counts = vec![0, 1, u64::from(n) - 1, n.into(), u64::from(n) + 1, 45];
            counts.dedup();
            if kind == Kind::Barrier {
                counts = vec![0];
            }
            for plan in plans(kind, n) {
                for &root in &roots {
                    for &count in &counts {
                        seed += 1;
                        check(shape(kind, n, root, count), &plan, false, seed * 0x9e37);
                    }
                }
            }
        }
    }
}

/// Goal: the plans that the model chooses are right too, for long vectors and larger groups, in
/// place or not.
#[test]
fn plans_chosen_by_the_model_are_right() {
    for n in [2, 3, 5, 8, 13, 17, 37] {
        for kind in Kind::ALL {
            for force in [Force::No, Force::Latency, Force::Bandwidth] {
                for count in [1, 300] {
                    let model = Model { force, ..Model::default() };
                    let s = shape(kind, n, 0, if kind == Kind::Barrier { 0 } else { count });
                    let s = Shape { root: if kind.has_root() { n / 2 } else { 0 }, ..s };
                    let (plan, _) = choose(&s, Layout::FLAT, &model);
                    check(s, &plan, false, 7);
                    if matches!(kind, Kind::Allreduce | Kind::Reduce) && n <= 17 {
                        check_in_place(s, &plan);
                    }
                }
            }
        }
    }
}

/// In place: the root of a reduce, and every member of an allreduce, has source and result in one
/// memory.
fn check_in_place(s: Shape, plan: &Plan) {
    if s.kind == Kind::Allreduce {
        check(Shape { in_place: true, ..s }, plan, false, 3);
    }
}

/// Goal: all members of an allreduce have the same bits, whatever the order of events, and so does
/// a later run (CR9).
#[test]
fn floats_are_the_same_bits_on_all_members_and_in_all_runs() {
    for n in [2, 3, 4, 7, 8, 12, 16, 17] {
        for plan in plans(Kind::Allreduce, n) {
            let s = shape(Kind::Allreduce, n, 0, 37);
            let first = check(s, &plan, true, 5);
            for seed in [77, 1234] {
                let again = check(s, &plan, true, seed * 0xabcd);
                assert_eq!(first, again, "{n} {plan:?}");
            }
            assert!(first.iter().all(|r| *r == first[0]), "{n} {plan:?}");
        }
    }
}

/// Goal: the plan does not depend on the member that chooses.
#[test]
fn all_members_choose_the_same() {
    for n in [2, 6, 10_007] {
        for kind in Kind::ALL {
            let s = shape(kind, n, 0, 100);
            let plan = choose(&s, Layout::FLAT, &Model::default());
            for me in [1, n - 1] {
                for in_place in [false, true] {
                    let other = Shape { me, root: me, in_place, ..s };
                    assert_eq!(choose(&other, Layout::FLAT, &Model::default()), plan);
                }
            }
        }
    }
}

/// Goal: the model's numbers are those of the port, and another port makes another algorithm
/// cheapest.
#[test]
fn numbers_are_those_of_the_port() {
    let caps = |lossless, via_kernel, link_bps| PortCaps {
        station: Station::at([2, 0, 0, 0, 0, 1]),
        mtu: 1500,
        lossless,
        gather: false,
        rto_floor_ns: 0,
        via_kernel,
        tells_presence: lossless,
        near_mtu: 0,
        link_bps,
        name: String::new(),
    };
    let numbers = |lossless, via_kernel, link_bps| {
        Model::of_port(&caps(lossless, via_kernel, link_bps)).to_words()
    };
    assert_eq!(numbers(true, false, 10_000_000), Model::MEMORY.to_words());
    assert_eq!(numbers(false, false, 100_000_000_000), [2500, 100, 80, 60]);
    assert_eq!(numbers(false, false, 0), [2500, 100, 800, 60]);
    assert_eq!(numbers(false, true, 1_000_000_000), [10_000, 1000, 8000, 60]);
    // A kernel is slower than the link; and some links are slower than the model can express.
    assert_eq!(numbers(false, true, 400_000_000_000), [10_000, 1000, 440, 60]);
    assert_eq!(numbers(false, false, 1), [2500, 100, 1_000_000, 60]);
    assert_eq!(numbers(false, false, u64::MAX), [2500, 100, 1, 60]);
    let plan = |port| choose(&shape(Kind::Allreduce, 8, 0, 400), Layout::FLAT, &port).0;
    let memory = plan(Model::of_port(&caps(true, false, 0)));
    let slow = plan(Model::of_port(&caps(false, true, 1_000_000_000)));
    assert!(matches!(memory, Plan::Multiply { .. }) != matches!(slow, Plan::Multiply { .. }));
}

/// Goal: whatever numbers other members send, there is a plan, and its cost does not overflow.
#[test]
fn no_numbers_are_too_large() {
    for words in [[0; MODEL_WORDS], [u64::MAX; MODEL_WORDS], [1, u64::MAX, 0, u64::MAX]] {
        let model = Model::from_words(words, Force::No);
        let again = Model::from_words(model.to_words(), Force::No);
        assert_eq!(model, again);
        for n in [2, 6, 8191, 1 << 20] {
            let layout = Layout::of(n, &[0, 1]);
            for kind in Kind::ALL {
                for count in [0, 1, 1 << 29] {
                    let s = shape(kind, n, 0, if kind == Kind::Barrier { 0 } else { count });
                    choose(&s, layout, &model);
                }
            }
        }
    }
}

/// Goal: the number of rounds grows with the logarithm of the group.
#[test]
fn few_rounds_reach_many() {
    let model = Model { alpha_ns: 2500, o_ns: 60, beta_ps: 80, gamma_ps: 33, force: Force::No };
    for (n, most) in [(64, 2), (1024, 4), (10_000, 4), (100_000, 6)] {
        for kind in [Kind::Barrier, Kind::Allreduce] {
            let s = shape(kind, n, 0, 1);
            let (plan, _) = choose(&s, Layout::FLAT, &model);
            let mut program = Program::new(s, &plan);
            let (mut round, mut rounds) = (Round::default(), 0);
            while program.next_round(&mut round) {
                rounds += 1;
            }
            assert!(rounds <= most, "{kind:?} of {n}: {rounds} rounds by {plan:?}");
        }
    }
}
