//! Bytes a second that one process writes to, or reads from, memory of another that does nothing
//! but turn its loop, against tagged messages of the same length, which are rendezvous; and what a
//! write or read of 8 bytes costs, in instructions, against an eager message.

use barewire::{EpAddr, Progress};
use barewire_benches::duo::{First, Rounds, Second, Task, start};
use barewire_benches::end::Made;
use barewire_benches::remote::{RemoteEnd, count_instructions, steady_case};
use barewire_benches::{Args, Report, Row};
use barewire_driver::clock::now_ns;
use barewire_driver::port::MacAddr;

const LEN: usize = 64 << 10;

/// Operations in flight.
const WINDOW: usize = 16;

/// Place of a word that the first process writes when it is done with the second one's memory.
const FLAG_AT: usize = LEN * WINDOW;

/// The second process receives `count` messages.
const SINK: u64 = 0;
/// It turns its loop until the flag is `count`.
const LEND: u64 = 1;

fn main() {
    let args = Args::read_or_run(steady_case);
    let mut report = Report::new("rma", &args);
    count_instructions(&[("write-8B", "no bar"), ("read-8B", "no bar")], &args, &mut report);
    for (case, how) in [("write-64KiB", How::Write), ("read-64KiB", How::Read)] {
        if args.wants(case) {
            let measured = measure(case, how, &args, &mut report);
            measured.unwrap_or_else(|why| report.skip(case, &why));
        }
    }
}

#[derive(Clone, Copy)]
enum How {
    Send,
    Write,
    Read,
}

fn measure(case: &str, how: How, args: &Args, report: &mut Report) -> Made<()> {
    let (rounds, count) = (args.size(15, 2), args.size(4000, 64));
    let mut link = Link::open(case)?;
    let before = link.first.line_ns()?;
    let mut pairs = Rounds::default();
    for round in 0..=rounds {
        let reference = link.stream(How::Send, count)?;
        let value = link.stream(how, count)?;
        if round > 0 {
            pairs.push(value, reference);
        }
    }
    let after = link.first.line_ns()?;
    let (low, high) = pairs.ratio_range();
    let row = Row::new(case, pairs.value(), "GB/s")
        .against("tagged rendezvous", pairs.reference(), pairs.ratio())
        .placed(before, after)
        .count(rounds * count)
        .note(format!("window {WINDOW}, bar 1.0, ratios {low:.2} to {high:.2}"));
    report.row(row);
    Ok(())
}

/// Two processes with an end each.
struct Link {
    first: First,
    end: RemoteEnd,
    /// What the flag was last.
    flag: u64,
}

impl Link {
    fn open(case: &str) -> Made<Self> {
        let spec = format!("shm:bench-rma-{case}-{}", std::process::id());
        let first = start(|second| serve(second, &spec))?;
        let mut end = RemoteEnd::open(&spec, FLAG_AT + 8, Progress::Manual)?;
        let peer = first.meet(end.addr().mac);
        end.connect(addr_at(&end, peer));
        Ok(Self { first, end, flag: 0 })
    }

    /// Moves `count` times `LEN` bytes and says how many GB/s that was.
    fn stream(&mut self, how: How, count: u64) -> Made<f64> {
        let Self { first, end, flag } = self;
        *flag += 1;
        let begin = now_ns();
        first.begin(match how {
            How::Send => Task { what: SINK, len: LEN, count },
            How::Write | How::Read => Task { what: LEND, len: LEN, count: *flag },
        });
        let (mut posted, mut done) = (0, 0);
        while done < count {
            if posted < count && posted - done < WINDOW as u64 {
                let at = posted as usize % WINDOW * LEN;
                posted += u64::from(match how {
                    How::Send => end.send(at, LEN),
                    How::Write => end.write(at, LEN),
                    How::Read => end.read(at, LEN),
                });
            }
            done += end.poll().sent;
        }
        let took = match how {
            // Its last completion says that the receiver has it, or will have.
            How::Send => None,
            How::Write | How::Read => Some(now_ns() - begin),
        };
        if took.is_some() {
            end.set_word(FLAG_AT, *flag);
            while !end.write(FLAG_AT, 8) {
                done += end.poll().sent;
            }
            posted += 1;
        }
        first.finish(|| done += end.poll().sent)?;
        let took = took.unwrap_or_else(|| now_ns() - begin);
        // What completed later would be taken for one of the next stream.
        while done < posted {
            done += end.poll().sent;
        }
        Ok((LEN as u64 * count) as f64 / took as f64)
    }
}

fn addr_at(end: &RemoteEnd, mac: MacAddr) -> EpAddr {
    EpAddr { mac, incarnation: 0, ..end.addr() }
}

/// The second process.
fn serve(second: &Second, spec: &str) -> Made<()> {
    let mut end = RemoteEnd::open(spec, FLAG_AT + 8, Progress::Manual)?;
    let peer = second.meet(end.addr().mac);
    end.connect(addr_at(&end, peer));
    second.serve(
        &mut end,
        |end| {
            end.poll();
        },
        |end, task| {
            if task.what == LEND {
                while end.word(FLAG_AT) != task.count {
                    end.poll();
                }
                return Ok(());
            }
            let (mut posted, mut done) = (0, 0);
            while done < task.count {
                if posted < task.count && posted - done < WINDOW as u64 {
                    posted += u64::from(end.recv(posted as usize % WINDOW * LEN, LEN));
                    continue;
                }
                done += end.poll().received;
            }
            Ok(())
        },
    )
}
