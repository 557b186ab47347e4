//! The algorithms, one round at a time.
//!
//! A program is a few phases, a phase is a sequence of rounds, and a round is generated on demand,
//! only from the rank and the number of the round: a group of a hundred thousand needs no more
//! memory than one of two. A reduction's operands are in the order of ranks wherever two members
//! compute the same result, so that the results are the same to the bit.

use super::plan::{Layout, Plan, Radices, WINDOW, levels};
use super::{Comm, Kind, Local, Place, Round, Shape, Slice};

/// A member's schedule.
#[derive(Clone, Debug)]
pub struct Program {
    shape: Shape,
    phases: Phases,
    /// In a call in lanes: the first and the last phase are among the members of a node, those
    /// between among the members of a lane. Otherwise all phases are among all members.
    layout: Layout,
    scratch_len: u64,
    phase: usize,
    level: u32,
}

/// The phases, in order.
type Phases = [Phase; 4];

/// A list of phases, padded with [`Phase::None`].
fn phases<const N: usize>(list: [Phase; N]) -> Phases {
    let mut phases = [Phase::None; 4];
    phases[..N].copy_from_slice(&list);
    phases
}

/// A set of members at equal distances that this member is part of.
#[derive(Clone, Copy, Debug)]
struct MemberSet {
    first: u32,
    stride: u32,
    n: u32,
    me: u32,
}

impl MemberSet {
    /// All members of a call.
    fn all(s: &Shape) -> Self {
        Self { first: 0, stride: 1, n: s.n, me: s.me }
    }

    /// The members on this member's node, if they have this `layout`.
    fn node(s: &Shape, layout: Layout) -> Self {
        Self::of(s.me, s.n, (layout.local, layout.packed))
    }

    /// The members with this member's position on their nodes.
    fn lane(s: &Shape, layout: Layout) -> Self {
        Self::of(s.me, s.n, (s.n / layout.local, !layout.packed))
    }

    /// A set of `size` of all `n` members: consecutive ones, or those at a distance of the number
    /// of such sets.
    fn of(me: u32, n: u32, (size, in_a_row): (u32, bool)) -> Self {
        if in_a_row {
            Self { first: me / size * size, stride: 1, n: size, me: me % size }
        } else {
            let stride = n / size;
            Self { first: me % stride, stride, n: size, me: me / stride }
        }
    }

    fn rank(&self, i: u32) -> u32 {
        self.first + i * self.stride
    }
}

/// A part of an algorithm. Relative ranks count from the root.
#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Nothing.
    None,
    /// Copies within this member.
    Copy(Local),
    Barrier {
        k: u32,
    },
    /// The bytes at a place go from the root to all members.
    Down {
        k: u32,
        at: Place,
        len: u64,
    },
    /// Vectors are reduced towards the root.
    Up {
        k: u32,
        from: Place,
        acc: Place,
        slots: Place,
        len: u64,
    },
    /// Each member's part goes from the root to the member.
    PartsDown {
        k: u32,
        held: TreeParts,
    },
    /// Each member's part goes to the root.
    PartsUp {
        k: u32,
        held: TreeParts,
    },
    /// Each member's part goes to all members.
    Allgather {
        k: u32,
        parts: Parts,
        own: Option<Place>,
    },
    /// The last members send their vectors to the first ones.
    FoldIn {
        members: u32,
        from: Place,
        to: Place,
        slot: Place,
        len: u64,
    },
    /// Whole vectors are exchanged and reduced.
    Multiply {
        radices: Radices,
        members: u32,
        from: Place,
        other: Place,
        slots: Place,
        len: u64,
    },
    /// The last members get the result from the first ones.
    FoldOut {
        members: u32,
        len: u64,
    },
    /// Parts are exchanged and reduced, fewer in each round.
    Split {
        radices: Radices,
        parts: Parts,
        acc: Accumulator,
    },
    /// Parts are exchanged with every other member and reduced.
    Pairs {
        parts: Parts,
        acc: Accumulator,
    },
    AlltoallBruck {
        k: u32,
    },
    AlltoallDirect,
}

/// A vector in as many consecutive parts as members.
#[derive(Clone, Copy, Debug)]
struct Parts {
    at: Place,
    n: u32,
    count: u64,
    size: u64,
    /// `count` elements are divided among the parts; otherwise each part has `count`.
    divided: bool,
}

impl Parts {
    /// Bytes before part `i`.
    fn before(&self, i: u32) -> u64 {
        if !self.divided {
            return u64::from(i) * self.count * self.size;
        }
        // In 128 bits, since count times members may exceed 64.
        let at = u128::from(i) * u128::from(self.count) / u128::from(self.n);
        at as u64 * self.size
    }

    fn len(&self, lo: u32, hi: u32) -> u64 {
        self.before(hi) - self.before(lo)
    }

    /// Parts `lo..hi`.
    fn range(&self, lo: u32, hi: u32) -> (Place, u64) {
        (self.at.plus(self.before(lo)), self.len(lo, hi))
    }

    /// `count` parts from `lo`, wrapping around after the last.
    fn ring(&self, lo: u32, count: u32) -> Slice {
        let end = (lo + count).min(self.n);
        let rest = count - (end - lo);
        Slice { pieces: [self.range(lo, end), self.range(0, rest)] }
    }
}

/// Where a member of a tree stores the parts that pass through it, by relative rank.
#[derive(Clone, Copy, Debug)]
enum TreeParts {
    /// All parts, in the order of ranks.
    All(Parts),
    /// The member's own part at one place, those of its subtree at another, in relative order.
    Own { own: Place, rest: Place, block: u64 },
}

/// Where the parts of a reduction are accumulated: part `first` is at `at`.
#[derive(Clone, Copy, Debug)]
struct Accumulator {
    at: Place,
    first: u32,
    slots: Place,
    /// Final place of the member's own part.
    out: Place,
}

impl Program {
    /// The schedule of one member for `plan`.
    pub fn new(shape: Shape, plan: &Plan) -> Self {
        let (phases, scratch_len) = match *plan {
            Plan::Alone => (phases([alone(&shape)]), 0),
            Plan::Dissemination { k } => (phases([Phase::Barrier { k }]), 0),
            Plan::Tree { k } => tree(&shape, k),
            Plan::ScatterAllgather { k, ag } => {
                let parts = divided(&shape, Place::out(0));
                let down = Phase::PartsDown { k, held: TreeParts::All(parts) };
                (phases([down, Phase::Allgather { k: ag, parts, own: None }]), 0)
            }
            Plan::Multiply { radices, members } => multiply(&shape, radices, members),
            Plan::Split { radices, k } => reduce_scatter(&shape, Some(radices), k),
            Plan::Pairs { k } => reduce_scatter(&shape, None, k),
            Plan::Bruck { k } if shape.kind == Kind::Alltoall => {
                let room = 4 * u64::from(shape.n) * shape.block();
                (phases([Phase::AlltoallBruck { k }]), room)
            }
            Plan::Bruck { k } => {
                let parts = blocks(&shape, Place::out(0));
                let own = Some(Place::input(0));
                (phases([Phase::Allgather { k, parts, own }]), 0)
            }
            Plan::Direct => (phases([Phase::AlltoallDirect]), 0),
            Plan::Lanes { layout, radices, k } => lanes(&shape, layout, &radices, k),
        };
        let layout = match *plan {
            Plan::Lanes { layout, .. } => layout,
            _ => Layout::FLAT,
        };
        Self { shape, phases, layout, scratch_len, phase: 0, level: 0 }
    }

    /// Bytes of memory that the schedule needs besides the caller's.
    pub fn scratch_len(&self) -> u64 {
        self.scratch_len
    }

    /// The shape of the schedule's call.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// The members of the present phase.
    fn members(&self) -> MemberSet {
        match (self.layout, self.phase) {
            (Layout::FLAT, _) => MemberSet::all(&self.shape),
            (layout, 1 | 2) => MemberSet::lane(&self.shape, layout),
            (layout, _) => MemberSet::node(&self.shape, layout),
        }
    }

    /// Writes the next round that is not empty to `out`; false if there is none.
    pub fn next_round(&mut self, out: &mut Round) -> bool {
        while let Some(phase) = self.phases.get(self.phase) {
            out.clear();
            let members = self.members();
            let s = &Shape { n: members.n, me: members.me, ..self.shape };
            let mut builder =
                RoundBuilder { s, members, phase: self.phase, level: self.level, out };
            if !builder.build(phase) {
                (self.phase, self.level) = (self.phase + 1, 0);
                continue;
            }
            self.level += 1;
            if !out.is_empty() {
                return true;
            }
        }
        false
    }
}

/// Parts in which every member has as many elements.
fn blocks(s: &Shape, at: Place) -> Parts {
    Parts { at, n: s.n, count: s.count, size: s.size, divided: false }
}

/// Parts among which the elements of one vector are divided.
fn divided(s: &Shape, at: Place) -> Parts {
    Parts { divided: true, ..blocks(s, at) }
}

fn alone(s: &Shape) -> Phase {
    let moves = !matches!(s.kind, Kind::Barrier | Kind::Broadcast) && !s.in_place;
    if moves {
        Phase::Copy(Local::copy(Place::input(0), Place::out(0), s.block()))
    } else {
        Phase::None
    }
}

fn tree(s: &Shape, k: u32) -> (Phases, u64) {
    let (len, is_root) = (s.block(), s.me == s.root);
    let below = (u64::from(below(s, k)) - 1) * len;
    let only = |phase| phases([phase]);
    match s.kind {
        Kind::Broadcast => (only(Phase::Down { k, at: Place::out(0), len }), 0),
        Kind::Reduce => {
            let acc = if is_root { Place::out(0) } else { Place::scratch(0) };
            let (from, slots) = (Place::input(0), Place::scratch(len));
            (only(Phase::Up { k, from, acc, slots, len }), u64::from(k) * len)
        }
        Kind::Scatter if is_root => {
            let parts = blocks(s, Place::input(0));
            let own = Local::copy(parts.range(s.me, s.me + 1).0, Place::out(0), len);
            (phases([Phase::PartsDown { k, held: TreeParts::All(parts) }, Phase::Copy(own)]), 0)
        }
        Kind::Scatter => {
            let held = TreeParts::Own { own: Place::out(0), rest: Place::scratch(0), block: len };
            (only(Phase::PartsDown { k, held }), below)
        }
        _ if is_root => {
            let parts = blocks(s, Place::out(0));
            let own = Local::copy(Place::input(0), parts.range(s.me, s.me + 1).0, len);
            (phases([Phase::PartsUp { k, held: TreeParts::All(parts) }, Phase::Copy(own)]), 0)
        }
        _ => {
            let held = TreeParts::Own { own: Place::input(0), rest: Place::scratch(0), block: len };
            (only(Phase::PartsUp { k, held }), below)
        }
    }
}

fn multiply(s: &Shape, radices: Radices, members: u32) -> (Phases, u64) {
    let len = s.block();
    let most = radices.as_slice().iter().map(|&r| u64::from(r)).max().unwrap_or(2);
    let (start, other, slots) = (Place::scratch(0), Place::scratch(len), Place::scratch(2 * len));
    let room = (most + 1) * len;
    let folded = members < s.n;
    // A place that the first round sends from must not be overwritten at its end.
    let moved = s.in_place || folded && s.me < s.n - members;
    let from = if moved { start } else { Place::input(0) };
    let first = if folded {
        // Members that receive no vector have nothing to do, unless their source is the result.
        Phase::FoldIn { members, from: Place::input(0), to: from, slot: slots, len }
    } else if s.in_place {
        Phase::Copy(Local::copy(Place::input(0), start, len))
    } else {
        Phase::None
    };
    let middle = Phase::Multiply { radices, members, from, other, slots, len };
    let last = if folded { Phase::FoldOut { members, len } } else { Phase::None };
    (phases([first, middle, last]), room)
}

/// The phases of the plans that begin with a reduce-scatter: by splitting, or in pairs.
fn reduce_scatter(s: &Shape, radices: Option<Radices>, k: u32) -> (Phases, u64) {
    let (me, n) = (s.me, s.n);
    let collect = |parts: Parts, acc: Accumulator| match radices {
        Some(radices) => Phase::Split { radices, parts, acc },
        None => Phase::Pairs { parts, acc },
    };
    if s.kind == Kind::ReduceScatter {
        let parts = blocks(s, Place::input(0));
        // After the first round a member works only on its part of the vector.
        let width = radices.map_or(1, |r| n / u32::from(r.as_slice()[0]));
        let held = u64::from(width) * s.block();
        let slots = match radices {
            Some(r) => held * u64::from(r.as_slice()[0] - 1),
            None => u64::from(WINDOW.min(n - 1)) * s.block(),
        };
        let first = me / width * width;
        let (at, slots_at) = (Place::scratch(0), Place::scratch(held));
        let acc = Accumulator { at, first, slots: slots_at, out: Place::out(0) };
        return (phases([collect(parts, acc)]), held + slots);
    }
    let parts = divided(s, Place::input(0));
    let whole = s.kind == Kind::Allreduce || me == s.root;
    let (at, before) = if whole { (Place::out(0), 0) } else { (Place::scratch(0), s.block()) };
    let held = divided(s, at);
    let acc =
        Accumulator { at, first: 0, slots: Place::scratch(before), out: held.range(me, me + 1).0 };
    let slots = match radices {
        Some(r) => split_slots(&r, s.count, s.size),
        // A part has at most one element more than the average.
        None => (s.count / u64::from(n) + 1) * s.size * u64::from(WINDOW.min(n - 1)),
    };
    let rest = if s.kind == Kind::Allreduce {
        Phase::Allgather { k, parts: held, own: None }
    } else {
        Phase::PartsUp { k, held: TreeParts::All(held) }
    };
    (phases([collect(parts, acc), rest]), before + slots)
}

/// An allreduce in lanes: see [`Plan::Lanes`].
fn lanes(s: &Shape, layout: Layout, radices: &[Radices; 2], k: [u32; 2]) -> (Phases, u64) {
    let (node, lane) = (MemberSet::node(s, layout), MemberSet::lane(s, layout));
    let part_of = |at: Place, members: &MemberSet, count: u64| Parts {
        at,
        n: members.n,
        count,
        size: s.size,
        divided: true,
    };
    let input = part_of(Place::input(0), &node, s.count);
    let whole = part_of(Place::out(0), &node, s.count);
    let (own, len) = whole.range(node.me, node.me + 1);
    let slots = Place::scratch(0);
    let acc = |parts: &Parts, me: u32| {
        let out = parts.range(me, me + 1).0;
        Accumulator { at: parts.at, first: 0, slots, out }
    };
    let inner = part_of(own, &lane, len / s.size);
    let all = [
        Phase::Split { radices: radices[0], parts: input, acc: acc(&whole, node.me) },
        Phase::Split { radices: radices[1], parts: inner, acc: acc(&inner, lane.me) },
        Phase::Allgather { k: k[1], parts: inner, own: None },
        Phase::Allgather { k: k[0], parts: whole, own: None },
    ];
    let slots = [(&radices[0], s.count), (&radices[1], len / s.size)];
    let slots = slots.map(|(radices, count)| split_slots(radices, count, s.size));
    (all, slots[0].max(slots[1]))
}

/// Maximum bytes that the members of a round of a reduce-scatter of one vector send to each member.
fn split_slots(radices: &Radices, count: u64, size: u64) -> u64 {
    let mut parts = 1;
    let rounds = radices.as_slice().iter().map(|&r| {
        parts *= u64::from(r);
        // A part has at most one element more than the average.
        (count / parts + 1) * size * (u64::from(r) - 1)
    });
    rounds.max().unwrap_or(0)
}

/// This member's relative rank.
fn relative(s: &Shape) -> u32 {
    (s.me + s.n - s.root) % s.n
}

/// Members of the subtree of radix `k` at this member, itself included.
fn below(s: &Shape, k: u32) -> u32 {
    let vr = relative(s);
    match lowest_digit(vr, k) {
        None => s.n,
        Some(pos) => k.pow(pos).min(s.n - vr),
    }
}

/// The position of the lowest digit of `v` to base `k` that is not 0.
fn lowest_digit(mut v: u32, k: u32) -> Option<u32> {
    let mut pos = 0;
    while v > 0 && v.is_multiple_of(k) {
        v /= k;
        pos += 1;
    }
    (v > 0).then_some(pos)
}

/// Generates one round.
struct RoundBuilder<'a> {
    /// The call, from the view of the members of the phase.
    s: &'a Shape,
    members: MemberSet,
    phase: usize,
    level: u32,
    out: &'a mut Round,
}

impl RoundBuilder<'_> {
    /// False if the phase has no such round.
    fn build(&mut self, phase: &Phase) -> bool {
        match *phase {
            Phase::None => false,
            Phase::Copy(local) => {
                self.out.after.push(local);
                self.level == 0
            }
            Phase::Barrier { k } => self.barrier(k),
            Phase::Down { k, at, len } => self.down(k, |_, _| Slice::one(at, len)),
            Phase::PartsDown { k, held } => {
                let s = *self.s;
                self.down(k, move |vr, span| tree_slice(&s, &held, vr, span))
            }
            Phase::Up { k, from, acc, slots, len } => self.up(k, from, acc, slots, len),
            Phase::PartsUp { k, held } => self.parts_up(k, &held),
            Phase::Allgather { k, parts, own } => self.allgather(k, &parts, own),
            Phase::FoldIn { members, from, to, slot, len } => {
                self.fold_in(members, from, to, slot, len)
            }
            Phase::Multiply { radices, members, from, other, slots, len } => {
                self.multiply(&radices, members, (from, other, slots), len)
            }
            Phase::FoldOut { members, len } => self.fold_out(members, len),
            Phase::Split { radices, parts, acc } => self.split(&radices, &parts, &acc),
            Phase::Pairs { parts, acc } => self.pairs(&parts, &acc),
            Phase::AlltoallBruck { k } => self.alltoall_bruck(k),
            Phase::AlltoallDirect => self.alltoall_direct(),
        }
    }

    /// Distinguishes the messages of this phase and `level` from others.
    fn step(&self, level: u32) -> u16 {
        (self.phase as u16) << 9 | (level as u16 & 511)
    }

    /// Whether a message is sent: one without bytes only if no message of the call has any.
    fn carries(&self, slice: &Slice) -> bool {
        !slice.is_empty() || self.s.count == 0 || self.s.kind == Kind::Barrier
    }

    fn send(&mut self, rank: u32, level: u32, slice: Slice) {
        if self.carries(&slice) {
            let (rank, step) = (self.members.rank(rank), self.step(level));
            self.out.sends.push(Comm { rank, step, slice });
        }
    }

    fn recv(&mut self, rank: u32, level: u32, slice: Slice) {
        if self.carries(&slice) {
            let (rank, step) = (self.members.rank(rank), self.step(level));
            self.out.recvs.push(Comm { rank, step, slice });
        }
    }

    fn absolute(&self, vr: u32) -> u32 {
        (vr + self.s.root) % self.s.n
    }

    /// `k` to the power of this level, if it is below the number of members.
    fn stride(&self, k: u32) -> Option<u32> {
        k.checked_pow(self.level).filter(|&stride| stride < self.s.n)
    }

    fn barrier(&mut self, k: u32) -> bool {
        let Some(stride) = self.stride(k) else { return false };
        let (me, n) = (self.s.me, self.s.n);
        for i in 1..k {
            let Some(dist) = i.checked_mul(stride).filter(|&dist| dist < n) else { break };
            self.recv((me + n - dist) % n, self.level, Slice::EMPTY);
            self.send((me + dist) % n, self.level, Slice::EMPTY);
        }
        true
    }

    /// Down a tree: first from the parent, then to all children, the largest subtree first.
    fn down(&mut self, k: u32, slice: impl Fn(u32, u32) -> Slice) -> bool {
        let (vr, n) = (relative(self.s), self.s.n);
        let lowest = lowest_digit(vr, k);
        match (self.level, lowest) {
            (0, None) => {}
            (0, Some(pos)) => {
                let parent = vr - vr / k.pow(pos) % k * k.pow(pos);
                let from = self.absolute(parent);
                self.recv(from, pos, slice(vr, below(self.s, k)));
            }
            (1, _) => {
                let top = lowest.unwrap_or(levels(n, k) as u32);
                for pos in (0..top).rev() {
                    for child in children(vr, k, pos, n) {
                        let span = k.pow(pos).min(n - child);
                        self.send(self.absolute(child), pos, slice(child, span));
                    }
                }
            }
            _ => return false,
        }
        true
    }

    fn up(&mut self, k: u32, from: Place, acc: Place, slots: Place, len: u64) -> bool {
        let (vr, n) = (relative(self.s), self.s.n);
        if self.stride(k).is_none() || lowest_digit(vr, k).is_some_and(|pos| pos < self.level) {
            return false;
        }
        // A member with children has the next rank as a child, whose vector comes first.
        let mut sum = if self.level == 0 || vr + 1 == n { from } else { acc };
        if lowest_digit(vr, k) == Some(self.level) {
            let stride = k.pow(self.level);
            let parent = self.absolute(vr - vr / stride % k * stride);
            self.send(parent, self.level, Slice::one(sum, len));
            return true;
        }
        for (i, child) in children(vr, k, self.level, n).enumerate() {
            let slot = slots.plus(i as u64 * len);
            self.recv(self.absolute(child), self.level, Slice::one(slot, len));
            self.out.after.push(Local::Reduce { a: sum, b: slot, to: acc, len });
            sum = acc;
        }
        true
    }

    fn parts_up(&mut self, k: u32, held: &TreeParts) -> bool {
        let (vr, n) = (relative(self.s), self.s.n);
        if self.stride(k).is_none() || lowest_digit(vr, k).is_some_and(|pos| pos < self.level) {
            return false;
        }
        if lowest_digit(vr, k) == Some(self.level) {
            let stride = k.pow(self.level);
            let parent = self.absolute(vr - vr / stride % k * stride);
            let slice = tree_slice(self.s, held, vr, below(self.s, k));
            self.send(parent, self.level, slice);
            return true;
        }
        for child in children(vr, k, self.level, n) {
            let span = k.pow(self.level).min(n - child);
            let slice = tree_slice(self.s, held, child, span);
            self.recv(self.absolute(child), self.level, slice);
        }
        true
    }

    fn allgather(&mut self, k: u32, parts: &Parts, own: Option<Place>) -> bool {
        let Some(held) = self.stride(k) else { return false };
        let (me, n) = (self.s.me, self.s.n);
        if let Some(own) = own.filter(|_| self.level == 0) {
            let (to, len) = parts.range(me, me + 1);
            self.out.before.push(Local::copy(own, to, len));
        }
        for i in 1..k {
            let Some(dist) = i.checked_mul(held).filter(|&dist| dist < n) else { break };
            let count = held.min(n - dist);
            let (left, right) = ((me + n - dist) % n, (me + dist) % n);
            self.recv(right, self.level, parts.ring(right, count));
            self.send(left, self.level, parts.ring(me, count));
        }
        true
    }

    fn fold_in(&mut self, members: u32, from: Place, to: Place, slot: Place, len: u64) -> bool {
        let (me, n) = (self.s.me, self.s.n);
        if self.level > 0 {
            return false;
        }
        if me >= members {
            self.send(me - members, 0, Slice::one(from, len));
        } else if me < n - members {
            self.recv(me + members, 0, Slice::one(slot, len));
            self.out.after.push(Local::Reduce { a: from, b: slot, to, len });
        } else if from != to {
            self.out.after.push(Local::copy(from, to, len));
        }
        true
    }

    fn fold_out(&mut self, members: u32, len: u64) -> bool {
        let (me, n) = (self.s.me, self.s.n);
        if self.level > 0 {
            return false;
        }
        let result = Slice::one(Place::out(0), len);
        if me >= members {
            self.recv(me - members, 0, result);
        } else if me < n - members {
            self.send(me + members, 0, result);
        }
        true
    }

    fn multiply(
        &mut self,
        radices: &Radices,
        members: u32,
        (from, other, slots): (Place, Place, Place),
        len: u64,
    ) -> bool {
        let radices = radices.as_slice();
        let level = self.level as usize;
        let Some(&r) = radices.get(level).filter(|_| self.s.me < members) else { return false };
        let r = u32::from(r);
        let stride: u32 = radices[..level].iter().map(|&r| u32::from(r)).product();
        let digit = self.s.me / stride % r;
        let base = self.s.me - digit * stride;
        // Alternating buffers, so that a round never writes what it sends, and the last one writes
        // the result.
        let result = |level: usize| {
            if (radices.len() - 1 - level).is_multiple_of(2) { Place::out(0) } else { other }
        };
        let mine = if level == 0 { from } else { result(level - 1) };
        let slot = |d: u32| slots.plus(u64::from(d - u32::from(d > digit)) * len);
        for i in 1..r {
            let d = (digit + i) % r;
            self.recv(base + d * stride, self.level, Slice::one(slot(d), len));
            self.send(base + d * stride, self.level, Slice::one(mine, len));
        }
        let value = |d: u32| if d == digit { mine } else { slot(d) };
        self.fold(r, digit, value, result(level), len);
        true
    }

    /// Reduces the values `0..count` in their order into `to`. Value `mine` is only overwritten if
    /// it is at `to`.
    fn fold(&mut self, count: u32, mine: u32, value: impl Fn(u32) -> Place, to: Place, len: u64) {
        if len == 0 {
            return;
        }
        let sum = if mine == 0 { to } else { value(0) };
        for d in 1..count {
            let a = if d == 1 { value(0) } else { sum };
            let to = if d == count - 1 { to } else { sum };
            self.out.after.push(Local::Reduce { a, b: value(d), to, len });
        }
    }

    fn split(&mut self, radices: &Radices, parts: &Parts, acc: &Accumulator) -> bool {
        let radices = radices.as_slice();
        let level = self.level as usize;
        let Some(&r) = radices.get(level) else { return false };
        let r = u32::from(r);
        // The parts for which this member and those it still exchanges with are responsible.
        let earlier: u32 = radices[..level].iter().map(|&r| u32::from(r)).product();
        let held = self.s.n / earlier;
        let (lo, width) = (self.s.me / held * held, held / r);
        let digit = (self.s.me - lo) / width;
        let within = (self.s.me - lo) % width;
        let collected = |part: u32| acc.at.plus(parts.before(part) - parts.before(acc.first));
        let from = |part: u32| {
            if level == 0 { parts.at.plus(parts.before(part)) } else { collected(part) }
        };
        let mine = lo + digit * width;
        let len = parts.len(mine, mine + width);
        let slot = |d: u32| acc.slots.plus(u64::from(d - u32::from(d > digit)) * len);
        for i in 1..r {
            let d = (digit + i) % r;
            let (rank, theirs) = (lo + d * width + within, lo + d * width);
            self.recv(rank, self.level, Slice::one(slot(d), len));
            let out = Slice::one(from(theirs), parts.len(theirs, theirs + width));
            self.send(rank, self.level, out);
        }
        let to = if level + 1 == radices.len() { acc.out } else { collected(mine) };
        let value = |d: u32| if d == digit { from(mine) } else { slot(d) };
        self.fold(r, digit, value, to, len);
        true
    }

    fn pairs(&mut self, parts: &Parts, acc: &Accumulator) -> bool {
        let (me, n) = (self.s.me, self.s.n);
        let first = 1 + self.level * WINDOW;
        if first >= n {
            return false;
        }
        let (own, len) = parts.range(me, me + 1);
        let mut sum = if self.level == 0 { own } else { acc.out };
        for i in first..n.min(first + WINDOW) {
            let (from, to) = ((me + n - i) % n, (me + i) % n);
            let slot = acc.slots.plus(u64::from(i - first) * len);
            let (at, bytes) = parts.range(to, to + 1);
            self.recv(from, self.level, Slice::one(slot, len));
            self.send(to, self.level, Slice::one(at, bytes));
            if len > 0 {
                self.out.after.push(Local::Reduce { a: sum, b: slot, to: acc.out, len });
            }
            sum = acc.out;
        }
        true
    }

    fn alltoall_direct(&mut self) -> bool {
        let (me, n, len) = (self.s.me, self.s.n, self.s.block());
        let at = |rank: u32| u64::from(rank) * len;
        let first = 1 + self.level * WINDOW;
        if first >= n {
            return false;
        }
        if self.level == 0 {
            // While the other blocks are in progress.
            let own = Local::copy(Place::input(at(me)), Place::out(at(me)), len);
            self.out.after.push(own);
        }
        // Every block has a place of its own.
        self.out.free = true;
        for i in first..n.min(first + WINDOW) {
            let (from, to) = ((me + n - i) % n, (me + i) % n);
            self.recv(from, self.level, Slice::one(Place::out(at(from)), len));
            self.send(to, self.level, Slice::one(Place::input(at(to)), len));
        }
        true
    }

    /// Block `t` of the working copy is for the member `t` ranks further. In round `j` the blocks
    /// whose digit `j` is `d` move `d` times `k` to the power of `j` ranks, all in one message.
    fn alltoall_bruck(&mut self, k: u32) -> bool {
        let Some(stride) = self.stride(k) else { return false };
        let (me, n, len) = (self.s.me, self.s.n, self.s.block());
        let all = u64::from(n) * len;
        let at = |block: u32| u64::from(block) * len;
        let work = Place::scratch(0);
        let packed = Place::scratch(all * (1 + u64::from(self.level & 1)));
        let arrived = Place::scratch(3 * all);
        if self.level == 0 {
            let before = &mut self.out.before;
            before.push(Local::copy(Place::input(at(me)), work, at(n - me)));
            before.push(Local::copy(Place::input(0), work.plus(at(n - me)), at(me)));
        }
        let mut used = 0;
        for d in 1..k {
            let Some(dist) = d.checked_mul(stride).filter(|&dist| dist < n) else { break };
            let runs = BlockRuns::new(n, dist, stride, stride.saturating_mul(k));
            let bytes = at(runs.blocks());
            runs.each(len, |block, offset, run| {
                let from = work.plus(at(block));
                self.out.before.push(run.copy(from, packed.plus(used + offset), false));
                let to = work.plus(at(block));
                self.out.after.push(run.copy(arrived.plus(used + offset), to, true));
            });
            self.recv((me + n - dist) % n, self.level, Slice::one(arrived.plus(used), bytes));
            self.send((me + dist) % n, self.level, Slice::one(packed.plus(used), bytes));
            used += bytes;
        }
        if stride.checked_mul(k).is_none_or(|next| next >= n) {
            // Block `t` came from the member `t` ranks before.
            let back = -(len as i64);
            let turned = |from: u32, to: u32, count: u32| Local::Copy {
                from: work.plus(at(from)),
                to: Place::out(at(to)),
                len,
                count: u64::from(count),
                from_step: len as i64,
                to_step: back,
            };
            self.out.after.push(turned(0, me, me + 1));
            if me + 1 < n {
                self.out.after.push(turned(me + 1, n - 1, n - 1 - me));
            }
        }
        true
    }
}

/// The relative ranks one level below `vr`.
fn children(vr: u32, k: u32, pos: u32, n: u32) -> impl Iterator<Item = u32> {
    let stride = k.pow(pos);
    (1..k).map_while(move |d| vr.checked_add(d.checked_mul(stride)?).filter(|&c| c < n))
}

/// The parts of relative ranks `vr..vr + span`, where the member stores them.
fn tree_slice(s: &Shape, held: &TreeParts, vr: u32, span: u32) -> Slice {
    match *held {
        TreeParts::All(parts) => parts.ring((vr + s.root) % s.n, span),
        TreeParts::Own { own, rest, block } => {
            let from = vr - relative(s);
            if from > 0 {
                let at = rest.plus(u64::from(from - 1) * block);
                return Slice::one(at, u64::from(span) * block);
            }
            Slice { pieces: [(own, block), (rest, u64::from(span - 1) * block)] }
        }
    }
}

/// Blocks `first..first + run`, repeated every `period`, below `n`.
struct BlockRuns {
    n: u32,
    first: u32,
    run: u32,
    period: u32,
    whole: u32,
    rest: u32,
}

/// Copies of equal runs.
struct Run {
    bytes: u64,
    count: u32,
    period: u64,
}

impl Run {
    /// A copy from runs to contiguous bytes, or back if `spread`.
    fn copy(&self, from: Place, to: Place, spread: bool) -> Local {
        let (bytes, period) = (self.bytes as i64, self.period as i64);
        let (from_step, to_step) = if spread { (bytes, period) } else { (period, bytes) };
        let count = u64::from(self.count);
        Local::Copy { from, to, len: self.bytes, count, from_step, to_step }
    }
}

impl BlockRuns {
    fn new(n: u32, first: u32, run: u32, period: u32) -> Self {
        let (mut whole, mut rest) = (0, 0);
        if first < n {
            let span = n - first;
            whole = span / period;
            let tail = span - whole * period;
            if tail >= run {
                whole += 1;
            } else {
                rest = tail;
            }
        }
        Self { n, first, run, period, whole, rest }
    }

    fn blocks(&self) -> u32 {
        debug_assert!(self.first < self.n);
        self.whole * self.run + self.rest
    }

    /// Calls `f(first block, bytes before, runs)`.
    fn each(&self, len: u64, mut f: impl FnMut(u32, u64, &Run)) {
        let (bytes, period) = (u64::from(self.run) * len, u64::from(self.period) * len);
        if self.whole > 0 {
            f(self.first, 0, &Run { bytes, count: self.whole, period });
        }
        if self.rest > 0 {
            let block = self.first + self.whole * self.period;
            let run = Run { bytes: u64::from(self.rest) * len, count: 1, period };
            f(block, u64::from(self.whole) * bytes, &run);
        }
    }
}
