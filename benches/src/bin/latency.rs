//! Half round trip of a tagged message between two processes on a shared-memory segment, against
//! half a round trip of a cache line between the same two processors in the same rounds; and
//! between two processes of a node that also have a port out of the node, against a segment alone.

use barewire_benches::duo::{First, Rounds, Second, Task, start};
use barewire_benches::end::{BenchResult, Done, End, RawEnd};
use barewire_benches::{Args, Report, Row, Sample};
use barewire_driver::clock::now_ns;

const MEMORY: usize = 64 << 10;

/// Round trips per timed chunk: reading the clock costs up to a fifth of one.
const CHUNK: u64 = 50;

/// Command of the second process: the number of the endpoint from bit 1 on, and this bit for
/// injected messages.
const INJECTED: u64 = 1;

/// Ports out of the node, with the segment as their near side.
const OUT: [(&str, &str); 2] = [("near-udp-8B", "udp:lo"), ("near-afpacket-8B", "afpacket:lo")];

struct Case {
    name: &'static str,
    len: usize,
    inject: bool,
    /// Number of the endpoint.
    end: u64,
}

const CASES: [Case; 4] = [
    Case { name: "shm-8B", len: 8, inject: false, end: 0 },
    Case { name: "shm-8B-inject", len: 8, inject: true, end: 0 },
    Case { name: "shm-64B", len: 64, inject: false, end: 0 },
    Case { name: "shm-4KiB", len: 4096, inject: false, end: 0 },
];

fn main() {
    let args = Args::read();
    let mut report = Report::new("latency", &args);
    if let Err(why) = measure(&args, &mut report) {
        report.skip("all", &why);
    }
}

fn measure(args: &Args, report: &mut Report) -> BenchResult<()> {
    let spec = format!("shm:bench-latency-{}", std::process::id());
    let rounds = args.size(21, 2);
    for (name, port) in OUT.into_iter().filter(|(name, _)| args.wants(name)) {
        let port = format!("{port},near={spec}");
        if let Err(why) = measure_near((name, &spec, &port), rounds, args, report) {
            report.skip(name, &why);
        }
    }
    let mut first = start(|second| serve(second, &[&spec]))?;
    let mut end = RawEnd::open(&spec, MEMORY)?;
    end.join(|mac| first.exchange_station(mac));
    report.row(Row::new("floor", clock_floor(), "ns").note("reading the clock"));
    for case in CASES.iter().filter(|case| args.wants(case.name)) {
        run(case, rounds, args.size(20_000, 500), &mut first, &mut end, report)?;
    }
    Ok(())
}

/// Half round trips between processes with `port` out of their node, against a segment alone.
fn measure_near(
    (name, segment, port): (&'static str, &str, &str),
    rounds: u64,
    args: &Args,
    report: &mut Report,
) -> BenchResult<()> {
    // Fails here if the port cannot be opened; the second process could not open it either.
    drop(RawEnd::open(port, MEMORY)?);
    let mut first = start(|second| serve(second, &[segment, port]))?;
    let mut ends = Vec::new();
    for spec in [segment, port] {
        let mut end = RawEnd::open(spec, MEMORY)?;
        end.join(|mac| first.exchange_station(mac));
        ends.push(end);
    }
    let count = args.size(20_000, 500);
    let alone = Case { name, len: 8, inject: false, end: 0 };
    let near = Case { end: 1, ..alone };
    let before = first.line_ns()?;
    let rounds = Rounds::measure(rounds, || {
        let value = ping_pong(&near, count, CHUNK, &mut first, &mut ends[1])?.median();
        let reference = ping_pong(&alone, count, CHUNK, &mut first, &mut ends[0])?.median();
        Ok((value, reference))
    })?;
    let row = rounds.row(name, "ns half trip", "segment alone");
    report.row(row.placed(before, first.line_ns()?).note(rounds.span()));
    Ok(())
}

/// Cost of reading the clock, nanoseconds.
fn clock_floor() -> f64 {
    let start = now_ns();
    for _ in 0..10_000 {
        std::hint::black_box(now_ns());
    }
    (now_ns() - start) as f64 / 10_000.0
}

fn run(
    case: &Case,
    rounds: u64,
    count: u64,
    first: &mut First,
    end: &mut RawEnd,
    report: &mut Report,
) -> BenchResult<()> {
    let (mut pairs, mut single) = (Rounds::default(), Sample::default());
    let before = first.line_ns()?;
    for round in 0..=rounds {
        let line = first.line_ns()?;
        let chunks = ping_pong(case, count, CHUNK, first, end)?;
        let singles = ping_pong(case, count / 4, 1, first, end)?;
        // The first round opens the session and touches the memory.
        if round > 0 {
            pairs.push(chunks.median(), line / 2.0);
            single.extend(&singles);
        }
    }
    let after = first.line_ns()?;
    let row = pairs.row(case.name, "ns half trip", "cache line half trip").spread(&single);
    let note = format!("{} in {rounds} rounds", pairs.span());
    report.row(row.placed(before, after).note(note));
    Ok(())
}

/// Half round trips in nanoseconds, the mean of every `chunk` of them.
fn ping_pong(
    case: &Case,
    count: u64,
    chunk: u64,
    first: &mut First,
    end: &mut RawEnd,
) -> BenchResult<Sample> {
    let mut chunks = Sample::with_capacity((count / chunk) as usize);
    let what = case.end << 1 | if case.inject { INJECTED } else { 0 };
    first.begin(Task { what, len: case.len, count });
    let mut sends = 0;
    end.recv(0, case.len);
    let mut at = now_ns();
    for i in 1..=count {
        send(end, case, &mut sends);
        let mut done = Done::default();
        while done.received == 0 {
            let new = end.poll();
            done.received += new.received;
            sends -= new.sent;
        }
        if i < count {
            end.recv(0, case.len);
        }
        if i % chunk == 0 {
            let now = now_ns();
            chunks.push((now - at) as f64 / (2 * chunk) as f64);
            at = now;
        }
    }
    while sends > 0 {
        sends -= end.poll().sent;
    }
    first.finish(|| {
        end.poll();
    })?;
    Ok(chunks)
}

#[inline]
fn send(end: &mut RawEnd, case: &Case, sends: &mut u64) {
    let sent =
        if case.inject { end.inject(1024, case.len) } else { end.send(1024, case.len, false) };
    assert!(sent, "a queue that is empty takes a message");
    *sends += u64::from(!case.inject);
}

/// The second process, with an endpoint on each of `specs`.
fn serve(second: &Second, specs: &[&str]) -> BenchResult<()> {
    let mut ends = Vec::new();
    for spec in specs {
        let mut end = RawEnd::open(spec, MEMORY)?;
        end.join(|mac| second.exchange_station(mac));
        ends.push(end);
    }
    second.serve(
        &mut ends,
        |ends| {
            for end in ends {
                end.poll();
            }
        },
        |ends, task| {
            let inject = task.what & INJECTED != 0;
            let case = Case { name: "", len: task.len, inject, end: task.what >> 1 };
            echo(&mut ends[case.end as usize], &case, task.count);
            Ok(())
        },
    )
}

/// Echoes `count` messages.
fn echo(end: &mut RawEnd, case: &Case, count: u64) {
    let mut sends = 0;
    end.recv(0, case.len);
    for i in 1..=count {
        let mut received = 0;
        while received == 0 {
            let new = end.poll();
            received += new.received;
            sends -= new.sent;
        }
        send(end, case, &mut sends);
        if i < count {
            end.recv(0, case.len);
        }
    }
    while sends > 0 {
        sends -= end.poll().sent;
    }
}
