//! Cost of remote atomics: instructions of a fetch-and-add against those of an eager message; its
//! rate at a target whose application sleeps against one that polls; and nanoseconds per element of
//! every operation on every datatype.

use barewire::{AtomicKind, AtomicOp, Datatype, Progress};
use barewire_benches::duo::{First, Rounds, Second, Task, start};
use barewire_benches::end::BenchResult;
use barewire_benches::remote::{FADD, RemoteEnd, count_instructions, each, pair, steady_case};
use barewire_benches::{Args, Report, Row};
use barewire_dataplane::proto::atomic::valid;
use barewire_driver::clock::now_ns;

/// Bytes for operands, compare values and results.
const MEMORY: usize = 3 * (32 << 10);

/// Offset of the word that tells the second process to stop.
const FLAG_AT: usize = MEMORY;

fn main() {
    let args = Args::read_or_run(steady_case);
    let mut report = Report::new("atomics", &args);
    count_instructions(&[("fadd-u64", "bar 1.15"), ("add-u64", "bar 1.4")], &args, &mut report);
    if args.wants("fadd-target-sleeps") {
        let measured = sleeping_target(&args, &mut report);
        measured.unwrap_or_else(|why| report.skip("fadd-target-sleeps", &why));
    }
    table(&args, &mut report).unwrap_or_else(|why| report.skip("table", &why));
}

/// Runs operations one after the other, from the first to the second endpoint.
#[inline(never)]
fn repeat(
    pair: &mut [RemoteEnd; 2],
    what: (AtomicKind, AtomicOp, Datatype),
    elements: usize,
    count: u64,
) -> BenchResult<()> {
    each(pair, count, |end| end.atomic(what, elements))
}

/// Fetch-and-adds a second at a sleeping target with a progress thread, against a target that
/// polls.
fn sleeping_target(args: &Args, report: &mut Report) -> BenchResult<()> {
    let (rounds, count) = (args.size(15, 2), args.size(100_000, 200));
    let mut sleeping = Link::open("sleeps", Progress::Auto)?;
    let mut active = Link::open("polls", Progress::Manual)?;
    let before = active.first.line_ns()?;
    let pairs = Rounds::measure(rounds, || {
        let polled = active.fadds(count)?;
        Ok((sleeping.fadds(count)?, polled))
    })?;
    let row = pairs.row("fadd-target-sleeps", "op/s", "a target that polls");
    let row = row.placed(before, active.first.line_ns()?).count(rounds * count);
    report.row(row.note(format!("one at a time, bar 0.9, {}", pairs.span())));
    Ok(())
}

/// Two processes with an endpoint each.
struct Link {
    first: First,
    end: RemoteEnd,
    flag: u64,
}

impl Link {
    fn open(case: &str, progress: Progress) -> BenchResult<Self> {
        let spec = format!("shm:bench-atomics-{case}-{}", std::process::id());
        let first = start(|second| serve(second, &spec, progress))?;
        let mut end = RemoteEnd::open(&spec, FLAG_AT + 8, Progress::Manual)?;
        end.join(|mac| first.exchange_station(mac));
        Ok(Self { first, end, flag: 0 })
    }

    /// Operations a second, one at a time.
    fn fadds(&mut self, count: u64) -> BenchResult<f64> {
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
        // A later completion would be counted in the next round.
        while written == 0 {
            written += end.poll().sent;
        }
        Ok(count as f64 * 1e9 / took as f64)
    }
}

/// The second process: polls, or leaves progress to the domain's thread and sleeps.
fn serve(second: &Second, spec: &str, progress: Progress) -> BenchResult<()> {
    let mut end = RemoteEnd::open(spec, FLAG_AT + 8, progress)?;
    end.join(|mac| second.exchange_station(mac));
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

/// Array lengths of the table, elements.
const ELEMENTS: [usize; 3] = [1, 64, 512];

/// The case that prints the table as in `docs/benchmarks.md`.
const TABLE: &str = "table";

/// Columns of the table.
const TYPES: [&str; Datatype::ALL.len()] = [
    "i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64", "f32", "f64", "c32", "c64", "ld", "cld",
    "i128", "u128", "f16", "bf16", "e4m3", "e5m2",
];

/// Rows of the table, by operation.
const OPS: [&str; AtomicOp::ALL.len()] = [
    "MIN",
    "MAX",
    "SUM",
    "PROD",
    "LOR",
    "LAND",
    "BOR",
    "BAND",
    "LXOR",
    "BXOR",
    "ATOMIC_READ",
    "ATOMIC_WRITE",
    "CSWAP",
    "CSWAP_NE",
    "CSWAP_LE",
    "CSWAP_LT",
    "CSWAP_GE",
    "CSWAP_GT",
    "MSWAP",
    "DIFF",
];

/// Every operation on every datatype, in the first form that supports it, for arrays of three
/// lengths: a row for each, or all in one table.
fn table(args: &Args, report: &mut Report) -> BenchResult<()> {
    let spec = format!("shm:bench-atomics-table-{}", std::process::id());
    let mut pair = pair([&spec, &spec], MEMORY)?;
    let budget = args.size(20_000, 4);
    let as_table = args.only.as_deref() == Some(TABLE);
    for elements in ELEMENTS {
        if as_table {
            let types = TYPES.join(" | ");
            let bar = "---|".repeat(TYPES.len());
            println!("\nns an element, {elements} at a time:\n\n| `FI_` | {types} |\n|---|{bar}");
        }
        for op in AtomicOp::ALL {
            let mut line = format!("| {}", OPS[op as usize]);
            for ty in Datatype::ALL {
                let kinds = AtomicKind::ALL.into_iter().find(|kind| valid(*kind, op, ty));
                let kind = kinds.filter(|_| elements * ty.size() <= 4096);
                let case = format!("{op:?}-{ty:?}-{elements}").to_lowercase();
                let Some(kind) = kind.filter(|_| as_table || args.wants(&case)) else {
                    line += " | ";
                    continue;
                };
                let count = (budget / elements as u64).max(20);
                let mut once = || element_ns(&mut pair, (kind, op, ty), elements, count);
                if as_table {
                    let mut runs = [once()?, once()?, once()?];
                    runs.sort_by(f64::total_cmp);
                    let decimals = usize::from(runs[1] < 100.0);
                    line += &format!(" | {:.decimals$}", runs[1]);
                } else {
                    let what = format!("{kind:?}, one thread at both ends, to the completion");
                    report.row(Row::new(case, once()?, "ns/element").count(count).note(what));
                }
            }
            if as_table {
                println!("{line} |");
            }
        }
    }
    Ok(())
}

/// Nanoseconds per element of an operation, from the call to the completion.
fn element_ns(
    pair: &mut [RemoteEnd; 2],
    what: (AtomicKind, AtomicOp, Datatype),
    elements: usize,
    count: u64,
) -> BenchResult<f64> {
    repeat(pair, what, elements, count / 10)?;
    let begin = now_ns();
    repeat(pair, what, elements, count)?;
    Ok((now_ns() - begin) as f64 / (count * elements as u64) as f64)
}
