//! `barewire capture`: writes what passes on a segment to a pcapng file.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::OpenOptions;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use barewire_driver::backend::pcap::{Direction, PcapWriter};
use barewire_driver::backend::shm::Monitor;
use barewire_driver::clock::now_ns;
use barewire_driver::open;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::fail::Fail;

/// Writes every frame that passes on a segment to a pcapng file, until Ctrl-C
///
/// Sees what all processes of the segment send each other, from shortly after it starts. It holds
/// nobody up: frames that come faster than it can write are missed and counted. Every sender
/// copies its frames once more while a capture runs. To record a single program instead, give it
/// the port pcap(file=FILE):PORT.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  the capture was ended, and the file holds what was seen
  1  the segment cannot be joined, or the file cannot be written
  2  called wrongly

Examples:
  barewire capture -o run.pcapng                     this user's segment
  barewire capture --port shm:job7 -o job7.pcapng    another one
  barewire capture -o - --count 100 | tshark -r - -X lua_script:docs/barewire.lua
  wireshark -X lua_script:docs/barewire.lua run.pcapng

Environment:
  BAREWIRE_PORT  the segment where --port is not given (default: this user's, shm)")]
pub(crate) struct CaptureArgs {
    /// The segment: shm or shm:NAME.
    #[arg(long, env = "BAREWIRE_PORT", hide_env = true, default_value = "shm")]
    port: String,
    /// The file, which is emptied first; - for standard output.
    #[arg(short, long)]
    output: PathBuf,
    /// Ends after so many frames.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Ends after so many seconds.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    seconds: Option<u64>,
}

/// Frames of several senders are put into the order of their times; one that comes later than this
/// after its time may stand in the wrong place.
const SETTLE_NS: u64 = 20_000_000;
/// Bytes that wait for that at most.
const HELD_MAX: usize = 64 << 20;
/// How often what is buffered is written, so that a reader of a pipe sees it.
const WRITE_NS: u64 = 100_000_000;

/// Captures until a signal, the count or the time.
///
/// # Errors
/// The segment cannot be joined or the file not be written.
pub(crate) fn run(args: &CaptureArgs) -> Result<ExitCode, Fail> {
    let signals = signals()?;
    let mut monitor = open::monitor(&args.port).map_err(Fail::new)?;
    let cannot = |why| Fail::new(format!("{}: {why}", args.output.display()));
    let file = create(&args.output).map_err(cannot)?;
    let writer = PcapWriter::new(file, monitor.name()).map_err(cannot)?;
    let mut sorter = Sorter { writer, held: BinaryHeap::new(), held_len: 0, taken: 0 };
    eprintln!("capturing on {}; Ctrl-C ends it", monitor.name());
    let until = args.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let count = args.count.unwrap_or(u64::MAX);
    let mut written = now_ns();
    while sorter.taken < count {
        let got = read(&mut monitor, &mut sorter, count)?;
        let now = now_ns();
        sorter.write_until(now.saturating_sub(SETTLE_NS));
        if now - written > WRITE_NS {
            sorter.writer.flush(now);
            written = now;
        }
        if sorter.writer.lost_frames > 0 {
            let what = format!("{} cannot be written any more", args.output.display());
            return Err(Fail::new(what).mend("is there room? df -h"));
        }
        let is_over = until.is_some_and(|until| Instant::now() >= until);
        if is_over || signals.read_signal().map_err(Fail::new)?.is_some() {
            break;
        }
        if got == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    sorter.write_until(u64::MAX);
    sorter.writer.flush(now_ns());
    eprintln!("{} frames, {} missed", sorter.writer.frames, monitor.missed());
    if sorter.writer.lost_frames > 0 {
        return Err(Fail::new(format!("{} is not complete", args.output.display())));
    }
    Ok(ExitCode::SUCCESS)
}

/// Takes what is there, without going over `count` frames in all.
fn read(monitor: &mut Monitor, sorter: &mut Sorter, count: u64) -> Result<usize, Fail> {
    let max = usize::try_from(count - sorter.taken).unwrap_or(usize::MAX).min(64);
    let got = monitor.read(max, |at_ns, frame, len| {
        let mut bytes = vec![0; len];
        // Cannot fail: the frame says that it has as many.
        if frame.copy_to(0, &mut bytes) {
            sorter.take(at_ns, bytes);
        }
    });
    got.map_err(Fail::new)
}

/// Blocks the signals that end a command which runs until then, so that they are read like a file
/// and what is left to do is done before we go.
pub(crate) fn signals() -> Result<SignalFd, Fail> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set.thread_block().map_err(Fail::new)?;
    SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC).map_err(Fail::new)
}

/// Opens the file for us alone: it holds what programs said to each other.
fn create(path: &Path) -> std::io::Result<Box<dyn Write>> {
    if path == Path::new("-") {
        return Ok(Box::new(std::io::stdout()));
    }
    let mut options = OpenOptions::new();
    let file = options.write(true).create(true).truncate(true).mode(0o600).open(path)?;
    Ok(Box::new(file))
}

/// Holds frames back until no earlier one will come.
struct Sorter {
    writer: PcapWriter<Box<dyn Write>>,
    /// Time, number and bytes; the number keeps frames of one time in the order in which they came.
    held: BinaryHeap<Reverse<(u64, u64, Vec<u8>)>>,
    held_len: usize,
    taken: u64,
}

impl Sorter {
    fn take(&mut self, at_ns: u64, bytes: Vec<u8>) {
        self.held_len += bytes.len();
        self.held.push(Reverse((at_ns, self.taken, bytes)));
        self.taken += 1;
    }

    /// Writes what was sent before `limit_ns`, and more if too much is held.
    fn write_until(&mut self, limit_ns: u64) {
        while let Some(Reverse((at_ns, _, _))) = self.held.peek() {
            if *at_ns >= limit_ns && self.held_len <= HELD_MAX {
                break;
            }
            if let Some(Reverse((at_ns, _, bytes))) = self.held.pop() {
                self.held_len -= bytes.len();
                let fill = |to: &mut [u8]| to.copy_from_slice(&bytes);
                self.writer.frame(at_ns, Direction::In, bytes.len(), fill);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_written_in_the_order_of_their_times() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.pcapng");
        let writer = PcapWriter::new(create(&path).unwrap(), "shm:x").unwrap();
        let mut sorter = Sorter { writer, held: BinaryHeap::new(), held_len: 0, taken: 0 };
        for (at_ns, byte) in [(30, 3), (10, 1), (20, 2), (40, 4), (10, 9)] {
            sorter.take(at_ns, vec![0xe0 + byte; 16]);
        }
        sorter.write_until(40);
        assert_eq!((sorter.writer.frames, sorter.held.len()), (4, 1));
        sorter.write_until(u64::MAX);
        sorter.writer.flush(0);
        let file = std::fs::read(&path).unwrap();
        let runs = file.chunk_by(|a, b| a == b).filter(|run| run.len() == 16 && run[0] > 0xe0);
        let order: Vec<u8> = runs.map(|run| run[0] - 0xe0).collect();
        assert_eq!(order, [1, 9, 2, 3, 4]);
    }
}
