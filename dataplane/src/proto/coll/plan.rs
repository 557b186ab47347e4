//! The choice of an algorithm: the cheapest by a cost model of the network that all members share.
//!
//! The model is the usual one: `alpha` for a small message from one program to the other, `o` of
//! processor time per message at either side, `beta` per byte of a link, `gamma` per byte reduced.
//! It uses integers only, and no value that differs between members: each member sends the others
//! the numbers of its port, and all choose with the largest.

use barewire_driver::port::PortCaps;

use super::{Kind, Shape};

/// The cost of a message, a byte and an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Model {
    /// One-way time of a small message, nanoseconds.
    pub alpha_ns: u32,
    /// Processor time of a message, at the sender and again at the receiver, nanoseconds.
    pub o_ns: u32,
    /// Time of a byte on a link, picoseconds.
    pub beta_ps: u32,
    /// Time of a byte that is reduced, picoseconds.
    pub gamma_ps: u32,
    /// The operator's choice.
    pub force: Force,
}

/// Upper bounds of the numbers: a tenth of a second, a millisecond, 8 Mbit/s. With these, the sums
/// of a schedule's fixed costs fit in 64 bits.
const MOST_ALPHA_NS: u32 = 100_000_000;
const MOST_O_NS: u32 = 1_000_000;
const MOST_PS: u32 = 1_000_000;

/// An operator's choice in place of the model's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Force {
    /// The model decides.
    #[default]
    No,
    /// Algorithms with few rounds, at any length.
    Latency,
    /// Algorithms that move each byte as few times as possible.
    Bandwidth,
}

impl Default for Model {
    /// [`MEMORY`](Self::MEMORY).
    fn default() -> Self {
        Self::MEMORY
    }
}

/// Number of words in which members exchange the numbers of a model.
pub const MODEL_WORDS: usize = 4;

impl Model {
    /// Between processes of one machine, through memory: measured over `shm`.
    pub const MEMORY: Self =
        Self { alpha_ns: 400, o_ns: 80, beta_ps: 120, gamma_ps: 60, force: Force::No };

    /// The model of a port and its link, for stations on other nodes. Not measured:
    /// docs/collectives.md gives the basis of the numbers.
    pub fn of_port(caps: &PortCaps) -> Self {
        if caps.lossless {
            return Self::MEMORY;
        }
        // A link of unknown speed counts as 10 Gbit/s.
        let link_bps = if caps.link_bps == 0 { 10_000_000_000 } else { caps.link_bps };
        let link_ps = u32::try_from(8_000_000_000_000 / link_bps).unwrap_or(u32::MAX);
        let (alpha_ns, o_ns, least_ps) =
            if caps.via_kernel { (10_000, 1000, 440) } else { (2500, 100, 1) };
        let beta_ps = link_ps.clamp(least_ps, MOST_PS);
        Self { alpha_ns, o_ns, beta_ps, ..Self::MEMORY }
    }

    /// The numbers, encoded for the other members.
    pub fn to_words(&self) -> [u64; MODEL_WORDS] {
        [self.alpha_ns, self.o_ns, self.beta_ps, self.gamma_ps].map(u64::from)
    }

    /// The model of these numbers, which come from other members and are not trusted.
    pub fn from_words(words: [u64; MODEL_WORDS], force: Force) -> Self {
        let most = [MOST_ALPHA_NS, MOST_O_NS, MOST_PS, MOST_PS];
        let [alpha_ns, o_ns, beta_ps, gamma_ps] =
            std::array::from_fn(|i| words[i].min(u64::from(most[i])) as u32);
        Self { alpha_ns, o_ns, beta_ps, gamma_ps, force }
    }

    const fn alpha(&self) -> u64 {
        self.alpha_ns as u64 * 1000
    }

    const fn o(&self) -> u64 {
        self.o_ns as u64 * 1000
    }

    /// Cost of a round of `messages` at once that carry `bytes` together.
    fn round(&self, messages: u64, bytes: u64) -> u64 {
        (self.alpha() + messages * 2 * self.o()).saturating_add(self.wire(bytes))
    }

    fn wire(&self, bytes: u64) -> u64 {
        bytes.saturating_mul(u64::from(self.beta_ps))
    }

    fn compute(&self, bytes: u64) -> u64 {
        bytes.saturating_mul(u64::from(self.gamma_ps))
    }
}

/// How the members of a group are spread over nodes. The same on all members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    /// Members of each node, which share its link and reach each other by memory. 1 if the members
    /// are spread otherwise, or if that is unknown.
    pub local: u32,
    /// Members of a node have consecutive ranks. Otherwise their ranks differ by the number of
    /// nodes.
    pub packed: bool,
}

impl Layout {
    /// The layout of members without a known node.
    pub const FLAT: Self = Self { local: 1, packed: true };

    /// The layout in which `ranks`, of a group of `n`, are the members on the node of one of them.
    /// [`FLAT`](Self::FLAT) if there is no such layout, or only one node.
    pub fn of(n: u32, ranks: &[u32]) -> Self {
        let local = ranks.len() as u32;
        if local < 2 || local >= n || !n.is_multiple_of(local) {
            return Self::FLAT;
        }
        let (nodes, first) = (n / local, ranks[0]);
        let lie = |from: u32, stride: u32| {
            (0..).zip(ranks).all(|(i, &rank): (u32, _)| rank == from + i * stride)
        };
        match () {
            () if lie(first / local * local, 1) => Self { local, packed: true },
            () if lie(first % nodes, nodes) => Self { local, packed: false },
            () => Self::FLAT,
        }
    }

    /// The layout as a word for the comparison between members: 0 for [`FLAT`](Self::FLAT).
    pub fn to_word(self) -> u64 {
        if self.local < 2 { 0 } else { u64::from(self.local) << 1 | u64::from(self.packed) }
    }

    /// The layout of a group of `n` with this [word](Self::to_word).
    pub fn from_word(word: u64, n: u32) -> Self {
        let (local, packed) = ((word >> 1) as u32, word & 1 != 0);
        let fits = word >> 33 == 0 && local >= 2 && local < n && n.is_multiple_of(local);
        if fits { Self { local, packed } } else { Self::FLAT }
    }
}

/// A factorisation of the number of members: factor `i` is the number of members that exchange with
/// each other in round `i`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Radices {
    len: u8,
    radix: [u8; 20],
}

impl Radices {
    /// The factors.
    pub fn as_slice(&self) -> &[u8] {
        &self.radix[..usize::from(self.len)]
    }

    fn push(mut self, radix: u32) -> Self {
        self.radix[usize::from(self.len)] = radix as u8;
        self.len += 1;
        self
    }
}

/// Maximum number of members that exchange with each other in one round.
pub const RADIX_MAX: u32 = 32;

/// Messages of a pairwise exchange that a member has in progress at once.
pub const WINDOW: u32 = 16;

/// An algorithm, with its radices but without memory places.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Plan {
    /// One member: only copies.
    Alone,
    /// Barrier: in each round every member notifies `k - 1` others.
    Dissemination {
        /// Radix.
        k: u32,
    },
    /// Broadcast, reduce, scatter, gather: a tree of radix `k`.
    Tree {
        /// Radix.
        k: u32,
    },
    /// Broadcast: the parts are distributed by a tree of radix `k`, then [`Plan::Bruck`] of radix
    /// `ag`.
    ScatterAllgather {
        /// Radix of the tree.
        k: u32,
        /// Radix of the allgather.
        ag: u32,
    },
    /// Allreduce: recursive multiplying among the first members, whose number is the product of the
    /// factors; the other members send them their vectors before, and get the result afterwards.
    Multiply {
        /// The factors.
        radices: Radices,
        /// Their product.
        members: u32,
    },
    /// Reductions: a reduce-scatter by recursive splitting, followed by the operation that
    /// completes the kind.
    Split {
        /// Factorisation of the number of members.
        radices: Radices,
        /// Radix of the allgather or gather tree that follows.
        k: u32,
    },
    /// Allreduce of members that share links: each node reduces by parts, one part at each member;
    /// the members with the same part reduce it across the nodes; and each node gathers the parts.
    /// So every byte crosses a link once in each direction, whatever the number of members behind
    /// it.
    Lanes {
        /// Where the members are.
        layout: Layout,
        /// Factorisations of the members of a node, and of the nodes.
        radices: [Radices; 2],
        /// Radix of the allgather in a node, and across them.
        k: [u32; 2],
    },
    /// As `Split`, with a pairwise reduce-scatter, for numbers with large prime factors.
    Pairs {
        /// Radix of the allgather or gather tree that follows.
        k: u32,
    },
    /// Allgather with radix `k`; alltoall with as many rounds.
    Bruck {
        /// Radix.
        k: u32,
    },
    /// Alltoall by direct exchange.
    Direct,
}

/// The cheapest plan and its cost in picoseconds, for members with this `layout`.
pub fn choose(shape: &Shape, layout: Layout, model: &Model) -> (Plan, u64) {
    let n = shape.n;
    if n == 1 {
        return (Plan::Alone, 0);
    }
    let alone = *model;
    // For plans that ignore nodes: all members of a node send by its link at once.
    let model = &Model { beta_ps: model.beta_ps.saturating_mul(layout.local), ..alone };
    let bytes = shape.block();
    let mut best = Best { plan: None, force: model.force };
    match shape.kind {
        Kind::Barrier => {
            for k in radixes(n) {
                best.offer(
                    Plan::Dissemination { k },
                    levels(n, k) * model.round(u64::from(k) - 1, 0),
                    true,
                );
            }
        }
        Kind::Broadcast => {
            for k in radixes(n) {
                best.offer(Plan::Tree { k }, tree_cost(n, k, bytes, model), true);
            }
            let (k, tree) = best_subtree(n, bytes, model);
            let (ag, gather) = best_bruck(n, bytes / u64::from(n), model);
            best.offer(Plan::ScatterAllgather { k, ag }, tree.saturating_add(gather), false);
        }
        Kind::Scatter | Kind::Gather => {
            let (k, cost) = best_subtree(n, bytes.saturating_mul(u64::from(n)), model);
            best.offer(Plan::Tree { k }, cost, true);
        }
        Kind::Allgather => {
            let (k, cost) = best_bruck(n, bytes, model);
            best.offer(Plan::Bruck { k }, cost, true);
        }
        Kind::Alltoall => alltoall(&mut best, n, bytes, model),
        Kind::Allreduce => {
            allreduce(&mut best, n, bytes, model);
            lanes(&mut best, n, layout, bytes, &alone);
        }
        Kind::Reduce => {
            for k in radixes(n) {
                let reduced = levels(n, k) * (u64::from(k) - 1);
                let extra = model.compute(bytes).saturating_mul(reduced);
                let cost = tree_cost(n, k, bytes, model).saturating_add(extra);
                best.offer(Plan::Tree { k }, cost, true);
            }
            let (k, gather) = best_subtree(n, bytes, model);
            scatter_reduce(&mut best, n, bytes, k, gather, model);
        }
        Kind::ReduceScatter => {
            scatter_reduce(&mut best, n, bytes.saturating_mul(u64::from(n)), 2, 0, model);
        }
    }
    let (plan, cost, _) = best.plan.expect("every kind has a plan");
    (plan, cost)
}

struct Best {
    plan: Option<(Plan, u64, bool)>,
    force: Force,
}

impl Best {
    /// Offers a plan. `quick`: the plan has few rounds.
    fn offer(&mut self, plan: Plan, cost: u64, quick: bool) {
        let forced = match self.force {
            Force::No => None,
            Force::Latency => Some(true),
            Force::Bandwidth => Some(false),
        };
        let better = match self.plan {
            None => true,
            Some((_, old, was)) if forced.is_none() || was == quick => cost < old,
            Some(_) => forced == Some(quick),
        };
        if better {
            self.plan = Some((plan, cost, quick));
        }
    }
}

fn radixes(n: u32) -> impl Iterator<Item = u32> {
    2..=n.clamp(2, RADIX_MAX)
}

/// Rounds of radix `k` that reach `n` members.
pub fn levels(n: u32, k: u32) -> u64 {
    let (mut reach, mut rounds) = (1, 0);
    while reach < u64::from(n) {
        reach *= u64::from(k);
        rounds += 1;
    }
    rounds
}

fn tree_cost(n: u32, k: u32, bytes: u64, model: &Model) -> u64 {
    let round = model.round(u64::from(k) - 1, bytes.saturating_mul(u64::from(k) - 1));
    round.saturating_mul(levels(n, k))
}

/// The best radix of a tree by which every member's part of `total` bytes is distributed or
/// gathered.
fn best_subtree(n: u32, total: u64, model: &Model) -> (u32, u64) {
    let rounds = |k: u32| levels(n, k) * model.round(u64::from(k) - 1, 0);
    let cost = |k: u32| rounds(k).saturating_add(model.wire(total));
    radixes(n).map(|k| (k, cost(k))).min_by_key(|&(_, cost)| cost).expect("radix 2 at least")
}

fn best_bruck(n: u32, block: u64, model: &Model) -> (u32, u64) {
    best_subtree(n, block.saturating_mul(u64::from(n) - 1), model)
}

fn alltoall(best: &mut Best, n: u32, bytes: u64, model: &Model) {
    for k in radixes(n) {
        // In every round all but one in `k` of the blocks move, and are copied twice.
        let moved = bytes.saturating_mul(u64::from(n)) / u64::from(k) * (u64::from(k) - 1);
        let copied = model.compute(moved).saturating_mul(2);
        let round = model.round(u64::from(k) - 1, moved).saturating_add(copied);
        best.offer(Plan::Bruck { k }, round.saturating_mul(levels(n, k)), true);
    }
    let all = u64::from(n) - 1;
    let waits = all.div_ceil(u64::from(WINDOW)) * model.alpha();
    let each = (2 * model.o()).saturating_add(model.wire(bytes));
    best.offer(Plan::Direct, each.saturating_mul(all).saturating_add(waits), false);
}

fn allreduce(best: &mut Best, n: u32, bytes: u64, model: &Model) {
    let volume = model.wire(bytes).saturating_add(model.compute(bytes));
    let each = volume.saturating_add(2 * model.o());
    let fold = model.round(1, bytes).saturating_mul(2).saturating_add(model.compute(bytes));
    let whole = factors(n, model.alpha(), each);
    if let Some((cost, radices)) = whole {
        best.offer(Plan::Multiply { radices, members: n }, cost, true);
    }
    // Candidates that need a fold: the next smaller numbers, and the power of two.
    let near = (n.saturating_sub(64).max(n / 2)..n).rev();
    let power = 1 << n.ilog2();
    for members in near.chain([power]).filter(|&m| m > 1 && m < n && 2 * m >= n && whole.is_none())
    {
        if let Some((cost, radices)) = factors(members, model.alpha(), each) {
            let cost = cost.saturating_add(fold);
            best.offer(Plan::Multiply { radices, members }, cost, true);
        }
    }
    let (k, gather) = best_bruck(n, bytes / u64::from(n), model);
    scatter_reduce(best, n, bytes, k, gather, model);
}

/// Offers [`Plan::Lanes`]. The node's link is divided among the lanes.
fn lanes(best: &mut Best, n: u32, layout: Layout, bytes: u64, model: &Model) {
    let near = Model { force: model.force, ..Model::MEMORY };
    let Layout { local, .. } = layout;
    if local < 2 {
        return;
    }
    let (nodes, part) = (n / local, bytes / u64::from(local));
    let shared = Model { beta_ps: model.beta_ps.saturating_mul(local), ..*model };
    let stage = |n: u32, bytes: u64, model: &Model| {
        let (cost, radices) = factors(n, model.alpha(), 2 * model.o())?;
        let moved = bytes / u64::from(n) * (u64::from(n) - 1);
        let (k, gather) = best_bruck(n, bytes / u64::from(n), model);
        let volume = model.wire(moved).saturating_add(model.compute(moved));
        Some((cost.saturating_add(volume).saturating_add(gather), radices, k))
    };
    if let (Some((inside, near_radices, near_k)), Some((across, far_radices, far_k))) =
        (stage(local, bytes, &near), stage(nodes, part, &shared))
    {
        let (radices, k) = ([near_radices, far_radices], [near_k, far_k]);
        best.offer(Plan::Lanes { layout, radices, k }, inside.saturating_add(across), false);
    }
}

/// Offers the plans that begin with a reduce-scatter of `total` bytes and continue at cost `rest`.
fn scatter_reduce(best: &mut Best, n: u32, total: u64, k: u32, rest: u64, model: &Model) {
    let part = total / u64::from(n) * (u64::from(n) - 1);
    let volume = model.wire(part).saturating_add(model.compute(part)).saturating_add(rest);
    if let Some((cost, radices)) = factors(n, model.alpha(), 2 * model.o()) {
        best.offer(Plan::Split { radices, k }, cost.saturating_add(volume), false);
    }
    let all = u64::from(n) - 1;
    let rounds = all.div_ceil(u64::from(WINDOW));
    let pairs = rounds * model.alpha() + all * 2 * model.o();
    best.offer(Plan::Pairs { k }, pairs.saturating_add(volume), false);
}

/// The factors of `n` for which the rounds cost least, if a round costs `fixed`, plus `each` for
/// every other member in it; `None` if a prime factor is above [`RADIX_MAX`].
pub fn factors(n: u32, fixed: u64, each: u64) -> Option<(u64, Radices)> {
    let mut best = None;
    search(n, 2, fixed, each, (0, Radices::default()), &mut best);
    best
}

fn search(
    n: u32,
    from: u32,
    fixed: u64,
    each: u64,
    (cost, radices): (u64, Radices),
    best: &mut Option<(u64, Radices)>,
) {
    if n == 1 {
        if best.is_none_or(|(old, _)| cost < old) {
            *best = Some((cost, radices));
        }
        return;
    }
    for r in from..=n.min(RADIX_MAX) {
        if n.is_multiple_of(r) {
            let round = each.saturating_mul(u64::from(r) - 1).saturating_add(fixed);
            let cost = cost.saturating_add(round);
            search(n / r, r, fixed, each, (cost, radices.push(r)), best);
        }
    }
}
