//! 64 B messages a second in one direction between two processes, window 64, each on its way at
//! once and with `FI_MORE`, which lets several share a frame.

use barewire_benches::duo::{Second, Task, start};
use barewire_benches::end::{End, Made, RawEnd};
use barewire_benches::{Args, Report, Row, Sample};
use barewire_driver::clock::now_ns;

const LEN: usize = 64;
const WINDOW: u64 = 64;

/// Messages after which one goes without `FI_MORE`.
const GROUP: u64 = 16;

/// The second process receives `count` messages.
const SINK: u64 = 0;

fn main() {
    let args = Args::read();
    let mut report = Report::new("rate", &args);
    if let Err(why) = measure(&args, &mut report) {
        report.skip("all", &why);
    }
}

fn measure(args: &Args, report: &mut Report) -> Made<()> {
    let spec = format!("shm:bench-rate-{}", std::process::id());
    let mut first = start(|second| serve(second, &spec))?;
    let mut end = RawEnd::open(&spec, LEN * WINDOW as usize)?;
    end.join(|mac| first.meet(mac));
    let (rounds, count) = (args.size(15, 2), args.size(500_000, 2000));
    for (case, more) in [("shm-64B", false), ("shm-64B-more", true)] {
        if !args.wants(case) {
            continue;
        }
        let before = first.line_ns()?;
        let mut sample = Sample::default();
        for round in 0..=rounds {
            let begun = now_ns();
            first.begin(Task { what: SINK, len: LEN, count });
            stream(&mut end, count, more);
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
    }
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
fn serve(second: &Second, spec: &str) -> Made<()> {
    let mut end = RawEnd::open(spec, LEN * WINDOW as usize)?;
    end.join(|mac| second.meet(mac));
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
