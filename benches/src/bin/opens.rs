//! Cost of forged OPENs for active sessions: messages a second between two endpoints over memory
//! while a third station sends one of them 10,000 OPENs a second from stations that do not exist,
//! against the rate without. Interleaved, all in one thread, so that the forger's own time is
//! included; per processor time of that thread, which other processes do not shorten.

use barewire_benches::duo::Rounds;
use barewire_benches::end::{BenchResult, End, RawEnd};
use barewire_benches::pair::{How, exchange, joined};
use barewire_benches::{Args, Report};
use barewire_driver::backend::shm::{ShmPort, ShmSettings};
use barewire_driver::frame::TxFrame;
use barewire_driver::port::{Port, Tx};
use barewire_tests::forge::open_of_nobody;
use barewire_tests::rng::Rng;

const LEN: usize = 64;

/// OPENs a second of processor time.
const RATES: [u64; 2] = [10_000, 100_000];

/// Messages between two checks of the OPENs that are due.
const BATCH: u64 = 50;

/// Frames prepared in advance.
const FRAMES: usize = 4096;

fn main() {
    let args = Args::read();
    let mut report = Report::new("opens", &args);
    if let Err(why) = measure(&args, &mut report) {
        report.skip("all", &why);
    }
}

fn measure(args: &Args, report: &mut Report) -> BenchResult<()> {
    let name = format!("bench-opens-{}", std::process::id());
    let spec = format!("shm:{name}");
    let mut pair = joined([RawEnd::open(&spec, LEN)?, RawEnd::open(&spec, LEN)?]);
    let mut port = ShmPort::open(&ShmSettings::named(&name)).map_err(|e| e.to_string())?;
    let victim = pair[1].addr();
    let mut rng = Rng::new(1, 1);
    // An attacker that knows the address gets further than one that does not.
    let frames: Vec<Vec<u8>> = (0..FRAMES)
        .map(|_| open_of_nobody(&mut rng, victim.station, victim.incarnation, false))
        .collect();
    let (rounds, time_ns) = (args.size(41, 2), args.size(50_000_000, 1_000_000));
    for rate in RATES {
        let case = format!("shm-64B-opens-{rate}");
        if !args.wants(&case) {
            continue;
        }
        let (mut sent, mut full) = (0, 0);
        let measured = Rounds::measure(rounds, || {
            let without = stream(&mut pair, time_ns, |_| {})?;
            let mut due = 0;
            let with = stream(&mut pair, time_ns, |since_ns| {
                while due < since_ns * rate / 1_000_000_000 {
                    let frame = TxFrame::whole(&frames[due as usize % FRAMES]);
                    match port.tx(&frame) {
                        Ok(Tx::Full) | Err(_) => full += 1,
                        Ok(_) => sent += 1,
                    }
                    due += 1;
                }
            })?;
            Ok((with, without))
        })?;
        let (low, high) = measured.ratio_middle();
        let row = measured.row(&case, "M messages/s", "no OPENs").count(rounds);
        let note = format!("middle half {low:.3} to {high:.3}; {sent} OPENs sent, {full} refused");
        report.row(row.note(note));
    }
    Ok(())
}

/// Processor time of this thread.
fn own_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec, which lives through it; Linux has the clock.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Million messages a second during `time_ns` of processor time. `between` is called between
/// batches with the time since the start.
fn stream(pair: &mut [RawEnd; 2], time_ns: u64, mut between: impl FnMut(u64)) -> BenchResult<f64> {
    let (start, mut count) = (own_ns(), 0);
    loop {
        exchange(pair, (How::Send, LEN), BATCH)?;
        count += BATCH;
        let since_ns = own_ns() - start;
        if since_ns >= time_ns {
            return Ok(count as f64 * 1e3 / since_ns as f64);
        }
        between(since_ns);
    }
}
