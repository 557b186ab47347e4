//! Cost of collectives: in a model of time, where every member runs the schedules that nodes run,
//! on a virtual clock instead of a network; among real endpoints on a segment, all in one thread,
//! in instructions and time per member; and between two processes, one on each processor.
//!
//! In the model a message costs `o` of processor time at the sender and again at the receiver, and
//! `beta` per byte on the sender's and on the receiver's link (at the same time, as with a
//! cut-through switch); its latency is `alpha`. A reduced or copied byte costs `gamma`. Every
//! member has one processor; the network between the links has unlimited capacity. In a cluster the
//! members of a node share its link, with the headers of their frames, and reach each other through
//! memory. The reference of a modelled case is the minimum of the formulas of docs/collectives.md
//! over all radices; that of a real case is as many 8-byte messages as there are members.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use barewire_benches::count::{instructions, steady, warm_up};
use barewire_benches::duo::{Rounds, Task, start};
use barewire_benches::end::BenchResult;
use barewire_benches::group::{Group, Rank};
use barewire_benches::pair::{How, exchange, segment, shm_pair};
use barewire_benches::{Args, Report, Row, Sample};
use barewire_dataplane::proto::coll::plan::{Force, Layout, Model, choose, levels};
use barewire_dataplane::proto::coll::program::Program;
use barewire_dataplane::proto::coll::run::{Action, Run};
use barewire_dataplane::proto::coll::{Kind, Local, Shape};
use barewire_driver::clock::now_ns;

/// A fast Ethernet: 2.5 us one way, 60 ns a message, 100 Gbit/s, 30 GB/s.
const MODEL: Model =
    Model { alpha_ns: 2500, o_ns: 60, beta_ps: 80, gamma_ps: 33, force: Force::No };

/// Time in picoseconds.
type Time = u64;

const ALPHA: Time = MODEL.alpha_ns as Time * 1000;
const O: Time = MODEL.o_ns as Time * 1000;
const BETA: Time = MODEL.beta_ps as Time;
const GAMMA: Time = MODEL.gamma_ps as Time;

/// Placement of the members.
#[derive(Clone, Copy)]
struct Cluster {
    /// Members per node, which have consecutive ranks and share the node's link.
    per_node: u32,
    /// Latency of a message within a node.
    near: Time,
    /// Time per byte on a node's link.
    beta: Time,
    /// Overhead of a frame on the link, bytes: headers, checksums, preamble and gap.
    head: u64,
}

/// One link per member.
const APART: Cluster = Cluster { per_node: 1, near: ALPHA, beta: BETA, head: 0 };

/// Sixteen ranks per node, 50 Gbit/s, and the latency of a cache line to another processor.
const NODES: Cluster = Cluster { per_node: 16, near: 400_000, beta: 160, head: 126 };

struct Member {
    run: Run,
    /// When the processor is idle.
    cpu: Time,
    /// By sender and step: posted receives (positive) or arrived messages (negative).
    open: HashMap<(u32, u16), i32>,
    end: Option<Time>,
}

type Arrival = (Time, u64, u32, u32, u16, Time);

/// When a node's link is idle, in each direction.
#[derive(Clone, Copy, Default)]
struct NodeLink {
    tx: Time,
    rx: Time,
}

struct World {
    cluster: Cluster,
    members: Vec<Member>,
    links: Vec<NodeLink>,
    /// (time, number, to, from, step, remaining time on the receiver's link).
    arrivals: BinaryHeap<Reverse<Arrival>>,
    sent: u64,
}

impl World {
    /// Runs one call, in which member `late` begins `by` later. Returns when the last member has
    /// ended.
    fn run(cluster: Cluster, layout: Layout, shape: Shape, late: u32, by: Time) -> (Time, u64) {
        let (plan, _) = choose(&shape, layout, &Model { beta_ps: cluster.beta as u32, ..MODEL });
        let member = |me| Member {
            run: Run::new(Program::new(Shape { me, ..shape }, &plan)),
            cpu: if me == late { by } else { 0 },
            open: HashMap::new(),
            end: None,
        };
        let members = (0..shape.n).map(member).collect();
        let links = vec![NodeLink::default(); shape.n.div_ceil(cluster.per_node) as usize];
        let mut w = Self { cluster, members, links, arrivals: BinaryHeap::new(), sent: 0 };
        for me in 0..shape.n {
            w.advance(me);
        }
        while let Some(Reverse((at, number, to, from, step, wire))) = w.arrivals.pop() {
            if wire > 0 {
                // The first byte has arrived. The last one arrives when the link is done with the
                // message.
                let link = &mut w.links[cluster.node_of(to)];
                link.rx = link.rx.max(at) + wire;
                w.arrivals.push(Reverse((link.rx, number, to, from, step, 0)));
                continue;
            }
            let m = &mut w.members[to as usize];
            m.cpu = m.cpu.max(at) + O;
            let open = m.open.entry((from, step)).or_default();
            *open -= 1;
            if *open >= 0 {
                m.run.received();
            }
            w.advance(to);
        }
        let ends = w.members.iter().map(|m| m.end.expect("everybody ends"));
        (ends.max().unwrap_or(0), w.sent)
    }

    /// Runs member `me` until it waits.
    fn advance(&mut self, me: u32) {
        loop {
            let m = &mut self.members[me as usize];
            match m.run.action() {
                Action::Wait => return,
                Action::Done => {
                    let end = m.cpu;
                    m.end.get_or_insert(end);
                    return;
                }
                Action::Local(local) => m.cpu += GAMMA * bytes_of(&local),
                Action::Recv(comm) => {
                    let open = m.open.entry((comm.rank, comm.step)).or_default();
                    *open += 1;
                    let here = *open <= 0;
                    m.run.done();
                    if here {
                        m.run.received();
                    }
                    continue;
                }
                Action::Send(comm, round) => {
                    m.cpu += O;
                    m.run.done();
                    m.run.sent(round);
                    self.sent += 1;
                    let (start, len) = (m.cpu, comm.slice.len());
                    let (at, wire) = self.send(me, comm.rank, start, len);
                    self.arrivals.push(Reverse((at, self.sent, comm.rank, me, comm.step, wire)));
                    continue;
                }
            }
            m.run.done();
        }
    }
}

impl World {
    /// When the first byte of a message arrives that is ready at `start`, and the message's time on
    /// the receiver's link.
    fn send(&mut self, from: u32, to: u32, start: Time, len: u64) -> (Time, Time) {
        let Cluster { near, beta, head, .. } = self.cluster;
        let (node, other) = (self.cluster.node_of(from), self.cluster.node_of(to));
        if node == other {
            return (start + near + GAMMA * len, 0);
        }
        let (link, wire) = (&mut self.links[node], beta * (len + head));
        let start = start.max(link.tx);
        link.tx = start + wire;
        (start + ALPHA, wire)
    }
}

impl Cluster {
    fn layout(&self) -> Layout {
        Layout { local: self.per_node, packed: true }
    }

    fn node_of(&self, member: u32) -> usize {
        (member / self.per_node) as usize
    }
}

fn bytes_of(local: &Local) -> u64 {
    match *local {
        Local::Copy { len, count, .. } => len * count,
        Local::Reduce { len, .. } => len,
    }
}

/// The minimum of the formulas over all radices.
fn bound(s: &Shape) -> Time {
    let n = u64::from(s.n);
    let m = s.block();
    let over = |f: &dyn Fn(u64, u64) -> Time| {
        (2..=s.n.clamp(2, 64)).map(|k| f(levels(s.n, k), u64::from(k) - 1)).min().unwrap_or(0)
    };
    let share = |bytes: u64| (u128::from(bytes) * u128::from(n - 1) / u128::from(n)) as u64;
    match s.kind {
        Kind::Barrier => over(&|rounds, r| rounds * (ALPHA + 2 * r * O)),
        Kind::Allreduce => {
            let small = over(&|rounds, r| rounds * (ALPHA + r * (2 * O + m * (BETA + GAMMA))));
            let large = over(&|rounds, r| 2 * rounds * (ALPHA + 2 * r * O));
            small.min(large + 2 * BETA * share(m) + GAMMA * share(m))
        }
        Kind::Allgather => over(&|rounds, r| rounds * (ALPHA + 2 * r * O)) + BETA * m * (n - 1),
        Kind::Alltoall => {
            let direct = ALPHA + (n - 1) * (2 * O + m * BETA);
            let bruck = over(&|rounds, r| {
                rounds * (ALPHA + 2 * r * O + (BETA + 2 * GAMMA) * (m * n / (r + 1) * r))
            });
            direct.min(bruck)
        }
        _ => unreachable!("the other kinds have no row"),
    }
}

fn shape(kind: Kind, n: u32, bytes: u64) -> Shape {
    let (count, size) = if kind == Kind::Barrier { (0, 0) } else { (bytes / 8, 8) };
    Shape { kind, n, me: 0, root: 0, count, size, in_place: false }
}

fn name(kind: Kind, bytes: u64, n: u32) -> String {
    let kind_name = format!("{kind:?}").to_lowercase();
    match (kind, bytes) {
        (Kind::Barrier, _) => format!("sim-barrier-{n}"),
        (_, b) if b >= 1 << 20 => format!("sim-{kind_name}-{}MiB-{n}", b >> 20),
        (_, b) if b >= 1 << 10 => format!("sim-{kind_name}-{}KiB-{n}", b >> 10),
        (_, b) => format!("sim-{kind_name}-{b}B-{n}"),
    }
}

fn main() {
    let args = Args::read_or_run(run_case);
    let mut report = Report::new("collectives", &args);
    // First, as it forks.
    if let Err(why) = pinned(&args, &mut report) {
        report.skip(PINNED[0], &why);
    }
    for n in [2, 4, 8] {
        for (call, bars) in CALLS {
            for way in WAYS {
                let bar = bars.into_iter().find(|bar| bar.0 == n && way.is_empty());
                counted((call, n, way), bar.map(|bar| bar.1), &args, &mut report);
                if let Err(why) = timed((call, n, way), &args, &mut report) {
                    report.skip(&format!("shm-{call}-{n}{way}"), &why);
                }
            }
        }
    }
    modelled(&args, &mut report);
    clustered(&args, &mut report);
    straggler(&args, &mut report);
}

/// The point-to-point message that collectives are compared with.
const MESSAGE: (How, usize) = (How::Send, 8);

/// The calls, with the limits of instructions per member, by number of members.
const CALLS: [(&str, [(u64, f64); 3]); 2] = [
    ("allreduce-8B", [(2, 450.0), (4, 600.0), (8, 800.0)]),
    ("barrier", [(2, 300.0), (4, 400.0), (8, 550.0)]),
];

/// Suffixes of the transports between members: the segment's memory, or messages.
const WAYS: [&str; 2] = ["", "-messages"];

/// A call, the number of members, and the transport.
type Case = (&'static str, u64, &'static str);

fn kind_of(call: &str) -> Kind {
    if call == "barrier" { Kind::Barrier } else { Kind::Allreduce }
}

/// Runs `case` for `count` times in the function whose instructions are counted.
fn run_case(case: &str, count: u64) -> BenchResult<()> {
    if case == "shm-message-8B" {
        let mut pair = shm_pair("collectives", 4096)?;
        exchange(&mut pair, MESSAGE, warm_up(count) / 4)?;
        return steady(|| exchange(&mut pair, MESSAGE, count));
    }
    let case = case.strip_prefix("shm-").ok_or("no such case")?;
    let (case, by_messages) = match case.strip_suffix(WAYS[1]) {
        Some(case) => (case, true),
        None => (case, false),
    };
    let (call, n) = case.rsplit_once('-').ok_or("no such case")?;
    let n = n.parse().map_err(|_| "no such case")?;
    let (kind, mut group) = (kind_of(call), Group::open(&segment("collectives"), n, by_messages)?);
    group.call(kind, warm_up(count) / 4)?;
    steady(|| group.call(kind, count))
}

/// Cases of two processes, one on each processor.
const PINNED: [&str; 2] = ["pinned-allreduce-8B", "pinned-barrier"];

/// Time of a call of two processes, one on each processor, against a round trip of a cache line
/// between them; the bar is two.
fn pinned(args: &Args, report: &mut Report) -> BenchResult<()> {
    let cases: Vec<&str> = PINNED.into_iter().filter(|case| args.wants(case)).collect();
    if cases.is_empty() {
        return Ok(());
    }
    let spec = segment("collectives-pinned");
    let call_of = |what: u64| kind_of(PINNED[what as usize].trim_start_matches("pinned-"));
    let mut first = start(|second| {
        let mut rank = Rank::join(&spec, 1, |station| second.exchange_station(station))?;
        second.serve(&mut rank, Rank::poll, |rank, task| rank.call(call_of(task.what), task.count))
    })?;
    let mut rank = Rank::join(&spec, 0, |station| first.exchange_station(station))?;
    let (calls, rounds) = (args.size(50_000, 100), args.size(21, 2));
    for case in cases {
        let what = PINNED.iter().position(|name| *name == case).expect("it is one of them") as u64;
        let before = first.line_ns()?;
        let measured = Rounds::measure(rounds, || {
            let line = first.line_ns()?;
            first.begin(Task { what, len: 8, count: calls });
            let begun = now_ns();
            rank.call(call_of(what), calls)?;
            let each = (now_ns() - begun) as f64 / calls as f64;
            first.finish(|| rank.poll())?;
            Ok((each, line))
        })?;
        let row =
            measured.row(case, "ns", "cache line round trip").placed(before, first.line_ns()?);
        report.row(row.note(format!("bar 2, {} in {rounds} rounds", measured.span())));
    }
    Ok(())
}

/// Instructions per member of a call, against its limit or one message per member.
fn counted((call, n, way): Case, bar: Option<f64>, args: &Args, report: &mut Report) {
    let case = format!("instr-{call}-{n}{way}");
    if !args.wants(&case) {
        return;
    }
    let (few, many) = (args.size(2000, 50), args.size(12_000, 100));
    let all = instructions(&format!("shm-{call}-{n}{way}"), few, many);
    if let Some(bar) = bar {
        match all {
            Ok(all) => {
                let row = Row::new(case, all / n as f64, "instr/member").count(many - few);
                report.row(row.against("bar", bar, all / n as f64 / bar));
            }
            Err(why) => report.skip(&case, &why),
        }
        return;
    }
    let both = all.and_then(|all| Ok((all, instructions("shm-message-8B", few, many)?)));
    match both {
        Ok((all, one)) => {
            let (each, of_messages) = (all / n as f64, one * n as f64);
            let to = format!("{n} messages");
            let row = Row::new(case, each, "instr/member").count(many - few);
            report.row(row.against(to, of_messages, each / of_messages));
        }
        Err(why) => report.skip(&case, &why),
    }
}

/// Time per member of a call. One thread runs all members, so a member's time is the total divided
/// by their number.
fn timed((call, n, way): Case, args: &Args, report: &mut Report) -> BenchResult<()> {
    let case = format!("shm-{call}-{n}{way}");
    if !args.wants(&case) {
        return Ok(());
    }
    let by_messages = !way.is_empty();
    let mut group = Group::open(&segment(&case), n as usize, by_messages)?;
    let mut pair = shm_pair("collectives", 4096)?;
    let (calls, rounds) = (args.size(20_000, 100), args.size(11, 2));
    let (mut each, mut messages, mut ratios) =
        (Sample::default(), Sample::default(), Sample::default());
    for round in 0..=rounds {
        let start = now_ns();
        group.call(kind_of(call), calls)?;
        let between = now_ns();
        exchange(&mut pair, MESSAGE, calls)?;
        let (all, one) = ((between - start) as f64, (now_ns() - between) as f64);
        // The first round opens the sessions.
        if round > 0 {
            let (a, b) = (all / (calls * n) as f64, one * n as f64 / calls as f64);
            each.push(a);
            messages.push(b);
            ratios.push(a / b);
        }
    }
    let row = Row::new(case, each.median(), "ns/member").against(
        format!("{n} messages"),
        messages.median(),
        ratios.median(),
    );
    report.row(row.spread(&each).note(format!("{calls} calls a round")));
    Ok(())
}

/// The schedules on a virtual clock.
fn modelled(args: &Args, report: &mut Report) {
    let sizes: &[u32] = if args.quick { &[2, 8] } else { &[2, 8, 64, 1024, 10_000] };
    let most: &[u32] = if args.quick { &[] } else { &[100_000] };
    let cases: [(Kind, u64, u32, bool); 6] = [
        (Kind::Barrier, 0, u32::MAX, true),
        (Kind::Allreduce, 8, u32::MAX, true),
        (Kind::Allreduce, 1 << 20, u32::MAX, false),
        (Kind::Allgather, 8, u32::MAX, false),
        (Kind::Alltoall, 8, u32::MAX, false),
        (Kind::Alltoall, 64 << 10, 1024, false),
    ];
    for (kind, bytes, largest, far) in cases {
        let far = if far { most } else { &[] };
        for &n in sizes.iter().chain(far).filter(|&&n| n <= largest) {
            let case = name(kind, bytes, n);
            if !args.wants(&case) {
                continue;
            }
            let shape = shape(kind, n, bytes);
            let (time, messages) = World::run(APART, Layout::FLAT, shape, 0, 0);
            let (us, least) = (time as f64 / 1e6, bound(&shape) as f64 / 1e6);
            let bar = if bytes > 4096 { "1.10" } else { "1.15" };
            let note = format!("bar {bar}, {} messages a member", messages / u64::from(n));
            report.row(Row::new(case, us, "us").against("bound", least, us / least).note(note));
        }
    }
}

/// Eight nodes of sixteen ranks, against schedules that ignore nodes.
fn clustered(args: &Args, report: &mut Report) {
    const RANKS: u32 = 8 * NODES.per_node;
    let all = Kind::Allreduce;
    for (kind, bytes) in [(Kind::Barrier, 0), (all, 8), (all, 64 << 10), (all, 1 << 20)] {
        let case = format!("{}-8x16", name(kind, bytes, RANKS));
        if !args.wants(&case) {
            continue;
        }
        let shape = shape(kind, RANKS, bytes);
        let time = |layout| World::run(NODES, layout, shape, 0, 0).0 as f64 / 1e6;
        let (aware, flat) = (time(NODES.layout()), time(Layout::FLAT));
        // The minimum time of the links: each byte once in each direction, except a node's own
        // part.
        let links = (2 * NODES.beta * bytes * 7 / 8) as f64 / 1e6;
        let least = links.max(bound(&shape) as f64 / 1e6);
        let row = Row::new(case, aware, "us").against("flat", flat, aware / flat);
        report.row(row.note(format!("bound {least:.2}")));
    }
}

/// One member begins 100 us late: how much later all have ended.
fn straggler(args: &Args, report: &mut Report) {
    let late = 100_000_000;
    for n in [64, 1024] {
        let case = format!("sim-straggler-allreduce-8B-{n}");
        if !args.wants(&case) || args.quick && n > 64 {
            continue;
        }
        let shape = shape(Kind::Allreduce, n, 8);
        let on_time = World::run(APART, Layout::FLAT, shape, 0, 0).0;
        let worst = (0..n)
            .step_by(n as usize / 16)
            .map(|m| World::run(APART, Layout::FLAT, shape, m, late).0)
            .max();
        let extra = (worst.unwrap_or(0) - on_time) as f64 / 1e6;
        let row = Row::new(case, extra, "us").against("its delay", 100.0, extra / 100.0);
        report.row(row.note("bar 1.05"));
    }
}
