//! Half a round trip of a tagged message between two processes on a shared-memory segment, against
//! half a round trip of a cache line between the same two processors in the same rounds.

use barewire_benches::duo::{First, Rounds, Second, Task, start};
use barewire_benches::end::{Done, End, Made, RawEnd};
use barewire_benches::{Args, Report, Row, Sample};
use barewire_driver::clock::now_ns;

const MEMORY: usize = 64 << 10;

/// Round trips that are timed together: the clock costs as much as a fifth of one.
const CHUNK: u64 = 50;

/// The second process answers `count` messages of `len` bytes.
const ECHO: u64 = 0;
const ECHO_INJECTED: u64 = 1;

struct Case {
    name: &'static str,
    len: usize,
    inject: bool,
}

const CASES: [Case; 4] = [
    Case { name: "shm-8B", len: 8, inject: false },
    Case { name: "shm-8B-inject", len: 8, inject: true },
    Case { name: "shm-64B", len: 64, inject: false },
    Case { name: "shm-4KiB", len: 4096, inject: false },
];

fn main() {
    let args = Args::read();
    let mut report = Report::new("latency", &args);
    if let Err(why) = measure(&args, &mut report) {
        report.skip("all", &why);
    }
}

fn measure(args: &Args, report: &mut Report) -> Made<()> {
    let spec = format!("shm:bench-latency-{}", std::process::id());
    let mut first = start(|second| serve(second, &spec))?;
    let mut end = RawEnd::open(&spec, MEMORY)?;
    end.join(|mac| first.meet(mac));
    let rounds = args.size(21, 2);
    report.row(Row::new("floor", clock_floor(), "ns").note("reading the clock"));
    for case in CASES.iter().filter(|case| args.wants(case.name)) {
        run(case, rounds, args.size(20_000, 500), &mut first, &mut end, report)?;
    }
    Ok(())
}

/// What reading the clock costs, nanoseconds.
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
) -> Made<()> {
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

/// Half round trips, nanoseconds, the mean of every `chunk` of them.
fn ping_pong(
    case: &Case,
    count: u64,
    chunk: u64,
    first: &mut First,
    end: &mut RawEnd,
) -> Made<Sample> {
    let mut chunks = Sample::with_capacity((count / chunk) as usize);
    let what = if case.inject { ECHO_INJECTED } else { ECHO };
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

/// The second process.
fn serve(second: &Second, spec: &str) -> Made<()> {
    let mut end = RawEnd::open(spec, MEMORY)?;
    end.join(|mac| second.meet(mac));
    second.serve(
        &mut end,
        |end| {
            end.poll();
        },
        |end, task| {
            let case = Case { name: "", len: task.len, inject: task.what == ECHO_INJECTED };
            let mut sends = 0;
            end.recv(0, task.len);
            for i in 1..=task.count {
                let mut received = 0;
                while received == 0 {
                    let new = end.poll();
                    received += new.received;
                    sends -= new.sent;
                }
                send(end, &case, &mut sends);
                if i < task.count {
                    end.recv(0, task.len);
                }
            }
            while sends > 0 {
                sends -= end.poll().sent;
            }
            Ok(())
        },
    )
}
