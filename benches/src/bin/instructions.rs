//! Cost of one message: instructions, allocations and system calls for posting a receive, sending,
//! and polling until both completions. One thread runs both ends, so nothing idles.

use barewire_benches::count::{Counting, allocations, instructions, steady, syscalls, warm_up};
use barewire_benches::end::{BenchResult, End, NodeEnd, RawEnd, SafeEnd};
use barewire_benches::pair::{How, exchange, joined, segment, shm_pair};
use barewire_benches::{Args, Report, Row};

#[global_allocator]
static ALLOC: Counting = Counting;

const LEN: usize = 64;

fn main() {
    let args = Args::read_or_run(run_case);
    let mut report = Report::new("instructions", &args);
    let (few, many) = (args.size(10_000, 100), args.size(60_000, 200));
    let cases = [
        ("shm-tagged-64B", Some((600.0, "bar 600, aim 450"))),
        ("shm-tagged-64B-inject", None),
        ("shm-tagged-64B-safe", None),
        ("node-tagged-64B", None),
        ("near-tagged-64B", None),
        ("far-tagged-64B", None),
        ("lossy-tagged-64B", None),
        ("lossy-tagged-64B-inject", None),
        ("lossy-crc-tagged-64B", None),
        ("lossy-stream-64B", None),
        ("lossy-more-64B", None),
    ];
    for (case, bar) in cases.into_iter().filter(|(case, _)| args.wants(case)) {
        match instructions(case, few, many) {
            Ok(n) => {
                let mut row = Row::new(case, n, "instr/message").count(many - few);
                if let Some((bar, note)) = bar {
                    row = row.against("bar", bar, n / bar).note(note);
                }
                report.row(row);
            }
            Err(why) => report.skip(case, &why),
        }
    }
    if args.wants("floor") {
        match instructions("floor", few, many) {
            Ok(n) => report.row(Row::new("floor", n, "instr/message").count(many - few)),
            Err(why) => report.skip("floor", &why),
        }
    }
    if args.wants("allocations") {
        match count_allocations(args.size(100_000, 1000)) {
            Ok((per, n)) => report.row(Row::new("allocations", per, "per message").count(n)),
            Err(why) => report.skip("allocations", &why),
        }
    }
    if args.wants("syscalls") {
        match syscalls("shm-tagged-64B", few, many) {
            Ok(n) => report.row(Row::new("syscalls", n, "per message").count(many - few)),
            Err(why) => report.skip("syscalls", &why),
        }
    }
}

/// Runs `case` for `count` messages in the function whose instructions are counted.
fn run_case(case: &str, count: u64) -> BenchResult<()> {
    let how = if case.ends_with("inject") { How::Inject } else { How::Send };
    match case {
        "floor" => steady(|| {
            for i in 0..count {
                std::hint::black_box(i);
            }
        }),
        "shm-tagged-64B" | "shm-tagged-64B-inject" => {
            let mut pair = shm_pair("instructions", 4096)?;
            exchange(&mut pair, (how, LEN), warm_up(count))?;
            steady(|| exchange(&mut pair, (how, LEN), count))?;
        }
        "shm-tagged-64B-safe" => {
            let spec = segment("instructions");
            let open = || SafeEnd::open(&spec, 8, LEN);
            let mut pair = joined([open()?, open()?]);
            exchange(&mut pair, (how, LEN), warm_up(count))?;
            steady(|| exchange(&mut pair, (how, LEN), count))?;
        }
        "node-tagged-64B" => {
            let spec = segment("instructions");
            let open = |n| NodeEnd::open_on(&spec, n, 4096);
            let mut pair = joined([open(1)?, open(2)?]);
            exchange(&mut pair, (how, LEN), warm_up(count))?;
            steady(|| exchange(&mut pair, (how, LEN), count))?;
        }
        "near-tagged-64B" => {
            let near = format!("near={}", segment("instructions"));
            let mut pair = memif_pair([&near, &near])?;
            exchange(&mut pair, (how, LEN), warm_up(count))?;
            steady(|| exchange(&mut pair, (how, LEN), count))?;
        }
        "far-tagged-64B" => {
            let near = |node| format!("crc=no,near={}", segment(node));
            let mut pair = memif_pair([&near("instructions-1"), &near("instructions-2")])?;
            // The near port first times empty polls of the far side.
            pair.iter_mut().for_each(|end| (0..1000).for_each(|_| _ = end.poll()));
            exchange(&mut pair, (how, LEN), warm_up(count) / 4)?;
            steady(|| exchange(&mut pair, (how, LEN), count))?;
        }
        "lossy-tagged-64B" | "lossy-tagged-64B-inject" => {
            let mut pair = memif_pair(["crc=no"; 2])?;
            exchange(&mut pair, (how, LEN), warm_up(count) / 4)?;
            steady(|| exchange(&mut pair, (how, LEN), count))?;
        }
        "lossy-crc-tagged-64B" => {
            let mut pair = memif_pair(["crc=yes"; 2])?;
            exchange(&mut pair, (how, LEN), warm_up(count) / 4)?;
            steady(|| exchange(&mut pair, (how, LEN), count))?;
        }
        "lossy-stream-64B" | "lossy-more-64B" => {
            let more = case == "lossy-more-64B";
            let mut pair = memif_pair(["crc=no"; 2])?;
            exchange_many(&mut pair, more, warm_up(count) / 4)?;
            steady(|| exchange_many(&mut pair, more, count))?;
        }
        _ => return Err("no such case".to_owned()),
    }
    Ok(())
}

/// Two raw-API endpoints on a memif, which announces loss but loses nothing, with the given
/// options.
fn memif_pair([server, client]: [&str; 2]) -> BenchResult<[RawEnd; 2]> {
    let open = |role, option| {
        let spec = format!("memif:@bench-instructions-{},role={role},{option}", std::process::id());
        RawEnd::open(&spec, 4096)
    };
    Ok(joined([open("server", server)?, open("client", client)?]))
}

/// Sends `count` messages from the first to the second endpoint, sixteen at a time. With `more` all
/// but the last of the sixteen have `FI_MORE`.
#[inline(never)]
fn exchange_many(pair: &mut [RawEnd; 2], more: bool, count: u64) -> BenchResult<()> {
    const TOGETHER: u64 = 16;
    let [a, b] = pair;
    for _ in 0..count.div_ceil(TOGETHER) {
        for i in 0..TOGETHER {
            if !b.recv(0, LEN) || !a.send(0, LEN, more && i + 1 < TOGETHER) {
                return Err("refused in steady state".to_owned());
            }
        }
        let (mut received, mut done) = (0, 0);
        for _ in 0..100_000_000 {
            received += b.poll().received;
            done += a.poll().sent;
            if received + done == 2 * TOGETHER {
                break;
            }
        }
        if received + done != 2 * TOGETHER {
            return Err("a message did not arrive".to_owned());
        }
    }
    Ok(())
}

/// Allocations per message in steady state.
fn count_allocations(n: u64) -> BenchResult<(f64, u64)> {
    let mut pair = shm_pair("instructions", 4096)?;
    exchange(&mut pair, (How::Send, LEN), warm_up(n))?;
    exchange(&mut pair, (How::Inject, LEN), warm_up(n))?;
    let before = allocations();
    exchange(&mut pair, (How::Send, LEN), n)?;
    exchange(&mut pair, (How::Inject, LEN), n)?;
    Ok(((allocations() - before) as f64 / (2 * n) as f64, 2 * n))
}
