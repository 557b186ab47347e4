//! Goodput of writes to, or reads from, memory of another process that only polls, against tagged
//! messages of the same length, which use rendezvous; and instructions of a write or read of 8
//! bytes against an eager message.
//!
//! Messages and operations move the bytes in the same direction between the same processors: a
//! write is compared with messages that the first process sends, a read with those that it
//! receives. The receiving side has most of the work, and two processors are rarely equally fast.

use barewire::Progress;
use barewire_benches::duo::{First, Rounds, Second, Task, start};
use barewire_benches::end::{BenchResult, Done};
use barewire_benches::remote::{RemoteEnd, count_instructions, steady_case};
use barewire_benches::{Args, Report};
use barewire_driver::clock::now_ns;

const LEN: usize = 64 << 10;

/// Operations in flight.
const WINDOW: usize = 16;

/// Offset of the word that the first process writes when it has finished with the second one's
/// memory.
const FLAG_AT: usize = LEN * WINDOW;

/// Command of the second process: receive `count` messages.
const SINK: u64 = 0;
/// Command: poll until the flag is `count`.
const LEND: u64 = 1;
/// Command: send `count` messages.
const FEED: u64 = 2;

fn main() {
    let args = Args::read_or_run(steady_case);
    let mut report = Report::new("rma", &args);
    count_instructions(&[("write-8B", "bar 1.4"), ("read-8B", "bar 1.4")], &args, &mut report);
    for (case, how, message) in
        [("write-64KiB", How::Write, How::Send), ("read-64KiB", How::Read, How::Receive)]
    {
        if args.wants(case) {
            let measured = measure(case, [how, message], &args, &mut report);
            measured.unwrap_or_else(|why| report.skip(case, &why));
        }
    }
}

#[derive(Clone, Copy)]
enum How {
    Send,
    Receive,
    Write,
    Read,
}

fn measure(
    case: &str,
    [how, message]: [How; 2],
    args: &Args,
    report: &mut Report,
) -> BenchResult<()> {
    let (rounds, count) = (args.size(15, 2), args.size(4000, 64));
    let mut link = Link::open(case)?;
    let before = link.first.line_ns()?;
    let pairs = Rounds::measure(rounds, || {
        let messages = link.stream(message, count)?;
        Ok((link.stream(how, count)?, messages))
    })?;
    let row = pairs.row(case, "GB/s", "tagged rendezvous").placed(before, link.first.line_ns()?);
    let note = format!("window {WINDOW}, bar 1.0, {}", pairs.span());
    report.row(row.count(rounds * count).note(note));
    Ok(())
}

/// Two processes with an endpoint each.
struct Link {
    first: First,
    end: RemoteEnd,
    /// Last value of the flag.
    flag: u64,
}

impl Link {
    fn open(case: &str) -> BenchResult<Self> {
        let spec = format!("shm:bench-rma-{case}-{}", std::process::id());
        let first = start(|second| serve(second, &spec))?;
        let mut end = RemoteEnd::open(&spec, FLAG_AT + 8, Progress::Manual)?;
        end.join(|mac| first.exchange_station(mac));
        Ok(Self { first, end, flag: 0 })
    }

    /// Transfers `LEN` bytes `count` times; returns GB/s.
    fn stream(&mut self, how: How, count: u64) -> BenchResult<f64> {
        let Self { first, end, flag } = self;
        *flag += 1;
        let begin = now_ns();
        first.begin(match how {
            How::Send => Task { what: SINK, len: LEN, count },
            How::Receive => Task { what: FEED, len: LEN, count },
            How::Write | How::Read => Task { what: LEND, len: LEN, count: *flag },
        });
        all(end, how, count);
        let mut took = now_ns() - begin;
        let mut open = 0;
        if let How::Write | How::Read = how {
            end.set_word(FLAG_AT, *flag);
            while !end.write(FLAG_AT, 8) {
                end.poll();
            }
            open = 1;
        }
        first.finish(|| open -= end.poll().sent)?;
        if let How::Send = how {
            // The last completion proves delivery, now or soon.
            took = now_ns() - begin;
        }
        // A later completion would be counted in the next stream.
        while open > 0 {
            open -= end.poll().sent;
        }
        Ok((LEN as u64 * count) as f64 / took as f64)
    }
}

/// Runs `count` operations, with [`WINDOW`] in flight, to the last completion.
fn all(end: &mut RemoteEnd, how: How, count: u64) {
    let (mut posted, mut ended) = (0, 0);
    while ended < count {
        if posted < count && posted - ended < WINDOW as u64 {
            let at = posted as usize % WINDOW * LEN;
            posted += u64::from(match how {
                How::Send => end.send(at, LEN),
                How::Receive => end.recv(at, LEN),
                How::Write => end.write(at, LEN),
                How::Read => end.read(at, LEN),
            });
        }
        let Done { sent, received } = end.poll();
        ended += sent + received;
    }
}

/// The second process.
fn serve(second: &Second, spec: &str) -> BenchResult<()> {
    let mut end = RemoteEnd::open(spec, FLAG_AT + 8, Progress::Manual)?;
    end.join(|mac| second.exchange_station(mac));
    second.serve(
        &mut end,
        |end| {
            end.poll();
        },
        |end, task| {
            match task.what {
                SINK => all(end, How::Receive, task.count),
                FEED => all(end, How::Send, task.count),
                _ => {
                    while end.word(FLAG_AT) != task.count {
                        end.poll();
                    }
                }
            }
            Ok(())
        },
    )
}
