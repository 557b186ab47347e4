//! Bytes a second in one direction between two processes: long messages against a copy in memory
//! of the same length, and messages over a link that loses frames against one that cannot.
//!
//! *Lossless* is the plain `shm` port behind a `fault` port that does nothing: nothing is kept for
//! repetition there, and most of what makes a session reliable rests. The case `loss-0%` is a port
//! that says it may lose frames and loses none: what reliability costs by itself. The others are
//! noted against that as well, which is what the repair of losses costs.

use barewire_benches::duo::Rounds;
use barewire_benches::end::{Made, Memory};
use barewire_benches::stream::{Stream, WINDOW};
use barewire_benches::{Args, Report};
use barewire_driver::clock::now_ns;

fn main() {
    let args = Args::read();
    let mut report = Report::new("goodput", &args);
    for (case, len) in [("shm-1MiB", 1 << 20), ("shm-64KiB", 64 << 10)] {
        if args.wants(case) {
            let measured = plain(case, len, &args, &mut report);
            measured.unwrap_or_else(|why| report.skip(case, &why));
        }
    }
    for percent in ["0", "0.1", "1", "5"] {
        let case = format!("shm-64KiB-loss-{percent}%");
        if args.wants(&case) {
            let measured = lossy(&case, percent, &args, &mut report);
            measured.unwrap_or_else(|why| report.skip(&case, &why));
        }
    }
}

/// Messages of `len` bytes against copies of `len` bytes.
fn plain(case: &str, len: usize, args: &Args, report: &mut Report) -> Made<()> {
    let rounds = args.size(15, 2);
    let count = args.size((256 << 20) / len as u64, 64);
    let mut link = open("shm:", case, len)?;
    let (from, to) = (Memory::from_page(len * WINDOW), Memory::from_page(len * WINDOW));
    let before = link.first.line_ns()?;
    let pairs = Rounds::measure(rounds, || {
        let copy = copy_rate(&from, &to, len, count);
        Ok((link.run(count)?, copy))
    })?;
    let row = pairs.row(case, "GB/s", "memcpy").placed(before, link.first.line_ns()?);
    report.row(row.count(rounds * count).note(format!("window {WINDOW}, {}", pairs.span())));
    Ok(())
}

/// 64 KiB messages over a port that drops frames at random, against one that cannot lose any, and,
/// in the note, against one that could.
///
/// Every so many rounds all three are opened anew: in which pages a link's memory lies makes it up
/// to a tenth faster or slower than another for as long as it lasts.
fn lossy(case: &str, percent: &str, args: &Args, report: &mut Report) -> Made<()> {
    const LEN: usize = 64 << 10;
    let loss: f64 = percent.parse().map_err(|_| "loss")?;
    let (openings, rounds, count) = (args.size(9, 1), args.size(5, 2), args.size(2000, 32));
    // Less than one frame in the life of a machine.
    let least = 1e-18;
    let loss = if loss > 0.0 { loss / 100.0 } else { least };
    let mut lines = Vec::new();
    let (mut pairs, mut repairs) = (Rounds::default(), Rounds::default());
    for opening in 0..openings {
        let link = |name: &str, loss: f64| {
            let port = format!("fault(loss={loss},seed={}):shm:", 7 + opening);
            open(&port, &format!("{case}-{name}{opening}"), LEN)
        };
        let (mut lossy, mut clean) = (link("a", loss)?, link("b", 0.0)?);
        let mut careful = link("c", least)?;
        lines.push(clean.first.line_ns()?);
        for round in 0..=rounds {
            let reference = clean.run(count)?;
            let value = lossy.run(count)?;
            let whole = careful.run(count)?;
            if round > 0 {
                pairs.push(value, reference);
                repairs.push(value, whole);
            }
        }
        lines.push(clean.first.line_ns()?);
    }
    let row = pairs.row(case, "GB/s", "lossless").placed(lines[0], lines[lines.len() - 1]);
    let whole = format!("{:.3} of what might be lost and is not", repairs.ratio());
    let (low, high) = lines.iter().fold((f64::MAX, 0.0), |(l, h), &n| (n.min(l), n.max(h)));
    let line = format!("line {low:.0} to {high:.0} ns");
    let note = format!("window {WINDOW}, {} in {openings} openings, {line}; {whole}", pairs.span());
    report.row(row.count(openings * rounds * count).note(note));
    Ok(())
}

/// Copies on one core, in GB/s, over as many buffers as the messages use.
fn copy_rate(from: &Memory, to: &Memory, len: usize, count: u64) -> f64 {
    let start = now_ns();
    for i in 0..count as usize {
        let at = i % WINDOW * len;
        let (src, dst) = (from.at(at, len), to.at(at, len));
        // SAFETY: `at` checked that `len` bytes are there; two allocations do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
        std::hint::black_box(dst);
    }
    (len as u64 * count) as f64 / (now_ns() - start) as f64
}

/// Two processes on the ports `prefix` + a segment of their own.
fn open(prefix: &str, case: &str, len: usize) -> Made<Stream> {
    let case: String = case.chars().filter(char::is_ascii_alphanumeric).collect();
    let spec = format!("{prefix}bench-{case}-{}", std::process::id());
    Stream::open([&spec; 2], len, None)
}
