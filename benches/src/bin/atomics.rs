//! What remote atomics cost: instructions of a fetch-and-add against those of an eager message, its
//! rate at a target whose application sleeps against one that polls, and nanoseconds per element of
//! every operation on every type.

use barewire::{AtomicKind, AtomicOp, Datatype, EpAddr, Progress};
use barewire_benches::count::{instructions, steady};
use barewire_benches::duo::{First, Rounds, Second, Task, start};
use barewire_benches::end::Made;
use barewire_benches::remote::RemoteEnd;
use barewire_benches::{Args, Report, Row};
use barewire_dataplane::proto::atomic::valid;
use barewire_driver::clock::now_ns;
use barewire_driver::port::MacAddr;

/// Operands, compare values and results.
const MEMORY: usize = 3 * (32 << 10);

/// Operations that are not counted: the session opens, tables are touched.
const WARM_UP: u64 = 20_000;

/// Place of a word that says to the second process that it is over.
const FLAG_AT: usize = MEMORY;

const FADD: (AtomicKind, AtomicOp, Datatype) = (AtomicKind::Fetch, AtomicOp::Sum, Datatype::Uint64);

fn main() {
    let args = Args::read();
    if let Some(case) = &args.steady {
        if let Err(why) = run_case(case, args.count) {
            eprintln!("{case}: {why}");
            std::process::exit(1);
        }
        return;
    }
    let mut report = Report::new("atomics", &args);
    if args.wants("fadd-u64-instructions") {
        let counted = count_instructions(&args, &mut report);
        counted.unwrap_or_else(|why| report.skip("fadd-u64-instructions", &why));
    }
    if args.wants("fadd-target-sleeps") {
        let measured = sleeping_target(&args, &mut report);
        measured.unwrap_or_else(|why| report.skip("fadd-target-sleeps", &why));
    }
    table(&args, &mut report).unwrap_or_else(|why| report.skip("table", &why));
}

fn count_instructions(args: &Args, report: &mut Report) -> Made<()> {
    let (few, many) = (args.size(10_000, 100), args.size(60_000, 200));
    let fadd = instructions("fadd-u64", few, many)?;
    let message = instructions("message-64B", few, many)?;
    let row = Row::new("fadd-u64-instructions", fadd, "instr/op")
        .against("eager message of 64 B", message, fadd / message)
        .count(many - few)
        .note("bar 1.15");
    report.row(row);
    Ok(())
}

/// Runs `case` for `count` operations, in the function that the tools look at.
fn run_case(case: &str, count: u64) -> Made<()> {
    let spec = format!("shm:bench-atomics-{}", std::process::id());
    let mut pair = pair(&spec)?;
    match case {
        "fadd-u64" => {
            fadds(&mut pair, WARM_UP)?;
            steady(|| fadds(&mut pair, count))
        }
        "message-64B" => {
            messages(&mut pair, WARM_UP)?;
            steady(|| messages(&mut pair, count))
        }
        _ => Err("no such case".to_owned()),
    }
}

/// Two ends of one thread.
fn pair(spec: &str) -> Made<[RemoteEnd; 2]> {
    let open = || RemoteEnd::open(spec, MEMORY, Progress::Manual);
    let mut pair = [open()?, open()?];
    for i in 0..2 {
        let addr = pair[1 - i].addr();
        pair[i].connect(addr);
    }
    Ok(pair)
}

/// One operation after the other, from the first to the second end.
#[inline(never)]
fn repeat(
    pair: &mut [RemoteEnd; 2],
    what: (AtomicKind, AtomicOp, Datatype),
    elements: usize,
    count: u64,
) -> Made<()> {
    each(pair, count, |end| end.atomic(what, elements))
}

/// One fetch-and-add after the other.
#[inline(never)]
fn fadds(pair: &mut [RemoteEnd; 2], count: u64) -> Made<()> {
    each(pair, count, RemoteEnd::fadd)
}

/// One operation that `post` posts after the other, to its completion.
#[inline(always)]
fn each(
    [a, b]: &mut [RemoteEnd; 2],
    count: u64,
    mut post: impl FnMut(&mut RemoteEnd) -> bool,
) -> Made<()> {
    for _ in 0..count {
        if !post(a) {
            return Err("refused".to_owned());
        }
        let mut turns = 0;
        loop {
            b.poll();
            if a.poll().sent > 0 {
                break;
            }
            turns += 1;
            if turns > 100_000_000 {
                return Err("an operation never completes".to_owned());
            }
        }
    }
    Ok(())
}

/// One message after the other.
#[inline(never)]
fn messages([a, b]: &mut [RemoteEnd; 2], count: u64) -> Made<()> {
    for _ in 0..count {
        if !b.recv(0, 64) || !a.send(0, 64) {
            return Err("refused in steady state".to_owned());
        }
        let (mut received, mut sent) = (0, 0);
        for turn in 0.. {
            if received == 0 {
                received += b.poll().received;
            }
            if sent == 0 {
                sent += a.poll().sent;
            }
            if received + sent == 2 {
                break;
            }
            if turn > 100_000_000 {
                return Err("a message did not arrive".to_owned());
            }
        }
    }
    Ok(())
}

/// Fetch-and-adds a second at a target that has a thread for its loop and sleeps, against one that
/// turns its loop itself.
fn sleeping_target(args: &Args, report: &mut Report) -> Made<()> {
    let (rounds, count) = (args.size(15, 2), args.size(100_000, 200));
    let mut sleeping = Link::open("sleeps", Progress::Auto)?;
    let mut active = Link::open("polls", Progress::Manual)?;
    let before = active.first.line_ns()?;
    let mut pairs = Rounds::default();
    for round in 0..=rounds {
        let reference = active.fadds(count)?;
        let value = sleeping.fadds(count)?;
        if round > 0 {
            pairs.push(value, reference);
        }
    }
    let after = active.first.line_ns()?;
    let (low, high) = pairs.ratio_range();
    let row = Row::new("fadd-target-sleeps", pairs.value() * 1e9, "op/s")
        .against("a target that polls", pairs.reference() * 1e9, pairs.ratio())
        .placed(before, after)
        .count(rounds * count)
        .note(format!("one at a time, bar 0.9, ratios {low:.2} to {high:.2}"));
    report.row(row);
    Ok(())
}

/// Two processes with an end each.
struct Link {
    first: First,
    end: RemoteEnd,
    flag: u64,
}

impl Link {
    fn open(case: &str, progress: Progress) -> Made<Self> {
        let spec = format!("shm:bench-atomics-{case}-{}", std::process::id());
        let first = start(|second| serve(second, &spec, progress))?;
        let mut end = RemoteEnd::open(&spec, FLAG_AT + 8, Progress::Manual)?;
        let peer = first.meet(end.addr().mac);
        end.connect(addr_at(&end, peer));
        Ok(Self { first, end, flag: 0 })
    }

    /// Operations a nanosecond, one at a time.
    fn fadds(&mut self, count: u64) -> Made<f64> {
        let Self { first, end, flag } = self;
        *flag += 1;
        first.begin(Task { what: 0, len: 0, count: *flag });
        let begin = now_ns();
        for _ in 0..count {
            while !end.atomic(FADD, 1) {
                end.poll();
            }
            while end.poll().sent == 0 {}
        }
        let took = now_ns() - begin;
        end.set_word(FLAG_AT, *flag);
        while !end.write(FLAG_AT, 8) {
            end.poll();
        }
        let mut written = 0;
        first.finish(|| written += end.poll().sent)?;
        // What completed later would be taken for one of the next round.
        while written == 0 {
            written += end.poll().sent;
        }
        Ok(count as f64 / took as f64)
    }
}

fn addr_at(end: &RemoteEnd, mac: MacAddr) -> EpAddr {
    EpAddr { mac, incarnation: 0, ..end.addr() }
}

/// The second process: turns its loop, or leaves that to the thread of its domain and sleeps.
fn serve(second: &Second, spec: &str, progress: Progress) -> Made<()> {
    let mut end = RemoteEnd::open(spec, FLAG_AT + 8, progress)?;
    let peer = second.meet(end.addr().mac);
    end.connect(addr_at(&end, peer));
    second.serve(
        &mut end,
        |end| {
            end.poll();
        },
        |end, task| {
            while end.word(FLAG_AT) != task.count {
                if progress == Progress::Auto {
                    std::thread::sleep(std::time::Duration::from_millis(1));
                } else {
                    end.poll();
                }
            }
            Ok(())
        },
    )
}

/// Every operation on every type, in the first form that has it, for arrays of three lengths.
fn table(args: &Args, report: &mut Report) -> Made<()> {
    let spec = format!("shm:bench-atomics-table-{}", std::process::id());
    let mut pair = pair(&spec)?;
    let budget = args.size(20_000, 4);
    for elements in [1, 64, 512] {
        for op in AtomicOp::ALL {
            for ty in Datatype::ALL {
                let kinds = AtomicKind::ALL.into_iter().find(|kind| valid(*kind, op, ty));
                let Some(kind) = kinds.filter(|_| elements * ty.size() <= 4096) else { continue };
                let case = format!("{op:?}-{ty:?}-{elements}").to_lowercase();
                if !args.wants(&case) {
                    continue;
                }
                let count = (budget / elements as u64).max(20);
                repeat(&mut pair, (kind, op, ty), elements, count / 10)?;
                let begin = now_ns();
                repeat(&mut pair, (kind, op, ty), elements, count)?;
                let ns = (now_ns() - begin) as f64 / (count * elements as u64) as f64;
                let what = format!("{kind:?}, one thread at both ends, to the completion");
                report.row(Row::new(case, ns, "ns/element").count(count).note(what));
            }
        }
    }
    Ok(())
}
