//! Rate of 64 B messages in one direction between two processes, window 64: each transmitted at
//! once, and with `FI_MORE`, which lets several share a frame.

use barewire_benches::duo::{First, Second, Task, start};
use barewire_benches::end::{BenchResult, End, RawEnd};
use barewire_benches::{Args, Report, Row, Sample};
use barewire_driver::clock::now_ns;

const LEN: usize = 64;
const WINDOW: u64 = 64;

/// One of this many messages is sent without `FI_MORE`.
const GROUP: u64 = 16;

/// Command of the second process: receive `count` messages.
const SINK: u64 = 0;

fn main() {
    let args = Args::read();
    let mut report = Report::new("rate", &args);
    if let Err(why) = measure(&args, &mut report) {
        report.skip("all", &why);
    }
}

/// A segment, a memif that may lose frames, and a lossless memif.
fn links() -> [(&'static str, [String; 2]); 3] {
    let id = std::process::id();
    let memif = |options: &str| {
        ["server", "client"].map(|role| format!("memif:@bench-rate-{id},role={role}{options}"))
    };
    let segment = format!("shm:bench-rate-{id}");
    [
        ("shm", [segment.clone(), segment]),
        ("memif", memif(",lossless=yes,crc=no")),
        ("memif-lossy", memif(",crc=no")),
    ]
}

fn measure(args: &Args, report: &mut Report) -> BenchResult<()> {
    for (link, [ours, theirs]) in links() {
        let cases = [(format!("{link}-64B"), false), (format!("{link}-64B-more"), true)];
        if !cases.iter().any(|(case, _)| args.wants(case)) {
            continue;
        }
        let mut first = start(|second| serve(second, &theirs))?;
        let mut end = RawEnd::open(&ours, LEN * WINDOW as usize)?;
        end.join(|mac| first.exchange_station(mac));
        for (case, more) in cases.iter().filter(|(case, _)| args.wants(case)) {
            measure_case((case, *more), args, (&mut first, &mut end), report)?;
        }
    }
    Ok(())
}

fn measure_case(
    (case, more): (&str, bool),
    args: &Args,
    (first, end): (&mut First, &mut RawEnd),
    report: &mut Report,
) -> BenchResult<()> {
    let (rounds, count) = (args.size(15, 2), args.size(500_000, 2000));
    let before = first.line_ns()?;
    let mut sample = Sample::default();
    for round in 0..=rounds {
        let begun = now_ns();
        first.begin(Task { what: SINK, len: LEN, count });
        stream(end, count, more);
        first.finish(|| {
            end.poll();
        })?;
        if round > 0 {
            sample.push(count as f64 * 1e3 / (now_ns() - begun) as f64);
        }
    }
    let after = first.line_ns()?;
    let row = Row::new(case, sample.median(), "M messages/s").spread(&sample);
    report.row(row.placed(before, after).note("window 64"));
    Ok(())
}

fn stream(end: &mut RawEnd, count: u64, more: bool) {
    let (mut posted, mut done) = (0, 0);
    while done < count {
        if posted < count && posted - done < WINDOW {
            let at = (posted % WINDOW) as usize * LEN;
            let more = more && posted % GROUP != GROUP - 1 && posted + 1 < count;
            if end.send(at, LEN, more) {
                posted += 1;
                continue;
            }
        }
        done += end.poll().sent;
    }
}

/// The second process.
fn serve(second: &Second, spec: &str) -> BenchResult<()> {
    let mut end = RawEnd::open(spec, LEN * WINDOW as usize)?;
    end.join(|mac| second.exchange_station(mac));
    second.serve(
        &mut end,
        |end| {
            end.poll();
        },
        |end, task| {
            let (mut posted, mut done) = (0, 0);
            while done < task.count {
                if posted < task.count && posted - done < WINDOW {
                    let at = (posted % WINDOW) as usize * LEN;
                    posted += u64::from(end.recv(at, LEN));
                    continue;
                }
                done += end.poll().received;
            }
            Ok(())
        },
    )
}
