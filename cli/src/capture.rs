//! `barewire capture`: writes what passes on a segment or a device to a pcapng file.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::rc::Rc;
use std::time::{Duration, Instant};

use barewire_driver::backend::pcap::{Direction, PcapWriter};
use barewire_driver::clock::now_ns;
use barewire_driver::frame::RxFrame;
use barewire_driver::port::Station;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::decrypt::{Decryptor, copy};
use crate::fail::Fail;
use crate::perf::parse_size;
use crate::recording::{self, Recording};
use crate::sources::Sources;
use crate::stats::station;

/// Captures the frames of a port to a pcapng file, until Ctrl-C
///
/// Of a segment it captures the frames between all processes, of any other port what each of your
/// processes that has it open sends and receives (as root: everybody's), from shortly after its
/// start; a frame between two such processes appears twice. It takes no privilege, and works where
/// tcpdump sees nothing: past the kernel. Frames to near peers are in the segment (barewire info).
/// Where a `barewire switch` owns the device and may be read, the switch is asked: one that root
/// runs captures the frames of all users.
///
/// It never blocks a process: frames that arrive faster than it writes are missed and counted.
/// While a capture runs, each frame is copied once more; without one that costs nothing. A process
/// that does not poll begins at its next poll. BAREWIRE_STATS=0 in its environment excludes it. To
/// record a program from its first frame on, use the port pcap(file=FILE):PORT.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  the capture ended and the file is complete
  1  there is no such port, or the file cannot be written; nothing is said of a pipe whose reader
     has gone
  2  wrong arguments

Examples:
  barewire capture -o run.pcapng                     this user's segment
  barewire capture --port shm:job7 -o job7.pcapng    another one
  barewire capture --port udp:eth0 -o a.pcapng       my processes on that address
  sudo barewire capture --port vfio:0000:05:00.0 -o a.pcapng    of all users of a NIC
  barewire capture --peer 02:00:00:00:00:09 -o a.pcapng    of one station
  barewire capture -o a.pcapng --files 10 --file-size 100m
                 a.1.pcapng and so on, of which the last ten are kept: to wait for a rare event
  barewire capture --keys secrets.log --read sealed.pcapng -o opened.pcapng
                 decrypts, with the secrets that BAREWIRE_KEY_LOG=secrets.log has written
  barewire capture -o - --count 100 | tshark -r -
  wireshark -X lua_script:docs/barewire.lua run.pcapng
                 in a checkout; the package's Wireshark has the dissector already

Environment:
  BAREWIRE_PORT  the segment if --port is not given (default: this user's, shm)")]
pub(crate) struct CaptureArgs {
    /// The segment (shm or shm:NAME) or any other port, as the processes name it; options and
    /// what stands around a device do not matter.
    #[arg(long, default_value_t = crate::usual_port())]
    port: String,
    /// The file to write; an existing one is truncated; - for standard output.
    #[arg(short, long)]
    output: PathBuf,
    /// Only frames from or to this station: MAC[.NUMBER], or IP:PORT of a udp port. Can be
    /// repeated.
    #[arg(long, value_name = "ADDR", value_parser = station)]
    peer: Vec<Station>,
    /// Starts a new file after this many bytes, at least 64k.
    #[arg(long, value_name = "BYTES", value_parser = file_size)]
    file_size: Option<u64>,
    /// Keeps only the last N files.
    #[arg(long, requires = "file_size", value_parser = clap::value_parser!(u64).range(1..))]
    files: Option<u64>,
    /// Decrypts sealed frames with the secrets in this file, which BAREWIRE_KEY_LOG has written.
    #[arg(long, value_name = "FILE")]
    keys: Option<PathBuf>,
    /// Decrypts the frames of this recording (pcapng or pcap) instead of capturing.
    #[arg(long, value_name = "FILE", requires = "keys",
        conflicts_with_all = ["peer", "file_size", "files", "count", "seconds"])]
    read: Option<PathBuf>,
    /// Exits after this many frames.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Exits after this many seconds.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=SECONDS_MAX))]
    seconds: Option<u64>,
}

/// Longest time of a capture, seconds: a hundred years.
const SECONDS_MAX: u64 = 100 * 365 * 86_400;
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
    let mut decryptor = args.keys.as_deref().map(Decryptor::new).transpose()?;
    if let Some((from, decryptor)) = args.read.as_ref().zip(decryptor.as_mut()) {
        return copy(from, &args.output, decryptor);
    }
    let signals = Rc::new(signals()?);
    if args.file_size.is_some() && args.output == Path::new("-") {
        return Err(Fail::usage("--file-size needs a file: -o NAME"));
    }
    let mut sources = Sources::open(&args.port)?;
    let files = Files::new(args, sources.name(), Rc::clone(&signals));
    let mut sorter = Sorter::new(files, args.peer.clone(), decryptor)?;
    eprintln!("capturing on {}; Ctrl-C ends it", sources.summary());
    let until = args.seconds.map(|seconds| Instant::now() + Duration::from_secs(seconds));
    let count = args.count.unwrap_or(u64::MAX);
    let mut written = now_ns();
    while sorter.taken < count {
        let got = read(&mut sources, &mut sorter, count)?;
        let now = now_ns();
        sorter.write_until(now.saturating_sub(SETTLE_NS))?;
        if now - written > WRITE_NS {
            sorter.flush(now)?;
            written = now;
        }
        let is_over = until.is_some_and(|until| Instant::now() >= until);
        if is_over || signals.read_signal().map_err(Fail::new)?.is_some() {
            break;
        }
        if got == 0 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    sorter.write_until(u64::MAX)?;
    sorter.flush(now_ns())?;
    eprintln!("{} frames, {} missed", sorter.written + sorter.writer.frames, sources.missed());
    if sorter.taken == 0 && sorter.others > 0 {
        eprintln!("{} others, none with --peer; barewire stats lists stations", sorter.others);
    }
    if let Some(decryptor) = &sorter.decryptor {
        eprintln!("{}", decryptor.summary());
    }
    Ok(ExitCode::SUCCESS)
}

/// Reads available frames, up to `count` frames in all.
fn read(sources: &mut Sources, sorter: &mut Sorter, count: u64) -> Result<usize, Fail> {
    let max = usize::try_from(count - sorter.taken).unwrap_or(usize::MAX);
    sources.read(max, |at_ns, way, frame, len| {
        if !sorter.wants(frame) {
            sorter.others += 1;
            return;
        }
        let mut bytes = vec![0; len];
        // Cannot fail: the frame says that it has as many.
        if frame.copy_to(0, &mut bytes) {
            sorter.take(at_ns, way, bytes);
        }
    })
}

/// Blocks the signals that end a long-running command, so that they are read from a descriptor and
/// the command ends in order.
pub(crate) fn signals() -> Result<SignalFd, Fail> {
    let mut set = SigSet::empty();
    set.add(Signal::SIGINT);
    set.add(Signal::SIGTERM);
    set.thread_block().map_err(Fail::new)?;
    SignalFd::with_flags(&set, SfdFlags::SFD_NONBLOCK | SfdFlags::SFD_CLOEXEC).map_err(Fail::new)
}

fn file_size(text: &str) -> Result<u64, String> {
    let least = 64 << 10;
    match parse_size(text)? {
        len if len >= least => Ok(len),
        _ => Err("a file has 64k at least".to_owned()),
    }
}

/// The sequence of capture files.
struct Files {
    path: PathBuf,
    /// Bytes after which the next file begins; `None` for one file.
    len_max: Option<u64>,
    /// Number of files that are kept.
    kept: Option<u64>,
    /// The captured port, for the headers of the files.
    name: String,
    /// Signals that end the wait for the reader of a pipe.
    signals: Option<Rc<SignalFd>>,
    /// Number of the current file, from 1.
    number: u64,
    /// Bytes of frames in it.
    len: u64,
}

/// Most overhead of a frame in a file, bytes: its block header and padding.
const AROUND: u64 = 48;

impl Files {
    fn new(args: &CaptureArgs, name: &str, signals: Rc<SignalFd>) -> Self {
        let (path, name, signals) = (args.output.clone(), name.to_owned(), Some(signals));
        Self { path, len_max: args.file_size, kept: args.files, name, signals, number: 0, len: 0 }
    }

    /// Counts a frame of `len` bytes, and returns whether the next file has to begin before it.
    fn add(&mut self, len: usize) -> bool {
        let len = len as u64 + AROUND;
        let is_full = self.len > 0 && self.len_max.is_some_and(|max| self.len + len > max);
        self.len = if is_full { len } else { self.len + len };
        is_full
    }

    /// Begins the next file, and removes the oldest one beyond the limit.
    fn next(&mut self) -> Result<Writer, Fail> {
        self.number += 1;
        let path = self.path_of(self.number);
        let file = Recording::create(&path, self.signals.clone());
        let writer = file.and_then(|file| PcapWriter::new(file, &self.name));
        let writer = writer.map_err(|why| recording::fail(&path, &why))?;
        if let Some(old) = self.kept.and_then(|kept| self.number.checked_sub(kept))
            && old > 0
        {
            // The file may have been removed already.
            let _ = std::fs::remove_file(self.path_of(old));
        }
        Ok(writer)
    }

    /// `a.pcapng`, or the seventh of several: `a.7.pcapng`.
    fn path_of(&self, number: u64) -> PathBuf {
        match (self.len_max, self.path.extension()) {
            (None, _) => self.path.clone(),
            (_, Some(kind)) => {
                let mut numbered = std::ffi::OsString::from(format!("{number}."));
                numbered.push(kind);
                self.path.with_extension(numbered)
            }
            (_, None) => self.path.with_extension(number.to_string()),
        }
    }
}

type Writer = PcapWriter<Recording>;

/// Time, number, bytes, and whether the frame was sent; the number keeps frames of the same time in
/// the order of arrival.
type PendingFrame = (u64, u64, Vec<u8>, bool);

/// Sorts frames by time: holds each back until no earlier one is expected.
struct Sorter {
    files: Files,
    writer: Writer,
    /// Frames in the files before this one.
    written: u64,
    /// Stations whose frames are captured; empty for all.
    peers: Vec<Station>,
    /// Number of frames of other stations.
    others: u64,
    held: BinaryHeap<Reverse<PendingFrame>>,
    held_len: usize,
    taken: u64,
    /// Decrypts sealed frames.
    decryptor: Option<Decryptor>,
}

impl Sorter {
    fn new(
        mut files: Files,
        peers: Vec<Station>,
        decryptor: Option<Decryptor>,
    ) -> Result<Self, Fail> {
        let writer = files.next()?;
        let (held, others) = (BinaryHeap::new(), 0);
        Ok(Self {
            files,
            writer,
            written: 0,
            peers,
            others,
            held,
            held_len: 0,
            taken: 0,
            decryptor,
        })
    }

    /// Whether a frame is from or to a selected station.
    fn wants(&self, frame: &RxFrame<'_>) -> bool {
        let is_wanted = |station| self.peers.contains(&station);
        self.peers.is_empty() || frame.stations().into_iter().flatten().any(is_wanted)
    }

    fn take(&mut self, at_ns: u64, way: Direction, bytes: Vec<u8>) {
        self.held_len += bytes.len();
        self.held.push(Reverse((at_ns, self.taken, bytes, way == Direction::Out)));
        self.taken += 1;
    }

    /// Writes the frames before `limit_ns`, and more if too many bytes are held.
    fn write_until(&mut self, limit_ns: u64) -> Result<(), Fail> {
        while let Some(Reverse((at_ns, ..))) = self.held.peek() {
            if *at_ns >= limit_ns && self.held_len <= HELD_MAX {
                break;
            }
            if let Some(Reverse((at_ns, _, mut bytes, is_sent))) = self.held.pop() {
                self.held_len -= bytes.len();
                if let Some(decryptor) = &mut self.decryptor {
                    decryptor.open(&mut bytes)?;
                }
                if self.files.add(bytes.len()) {
                    self.turn_over()?;
                }
                let fill = |to: &mut [u8]| to.copy_from_slice(&bytes);
                let way = if is_sent { Direction::Out } else { Direction::In };
                let written = self.writer.frame(at_ns, way, bytes.len(), fill);
                self.written_or(written)?;
            }
        }
        Ok(())
    }

    /// Flushes buffered frames, and checks that the reader has not closed the pipe.
    fn flush(&mut self, now: u64) -> Result<(), Fail> {
        let mut written = self.writer.flush(now);
        if written.is_ok() {
            written = self.writer.target().check_reader();
        }
        self.written_or(written)
    }

    fn written_or(&self, written: io::Result<()>) -> Result<(), Fail> {
        written.map_err(|why| recording::fail(&self.files.path_of(self.files.number), &why))
    }

    /// Continues in the next file.
    fn turn_over(&mut self) -> Result<(), Fail> {
        self.flush(now_ns())?;
        let full = std::mem::replace(&mut self.writer, self.files.next()?);
        self.written += full.frames;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files() -> Files {
        let (path, name) = (PathBuf::new(), "shm:x".to_owned());
        Files { path, len_max: None, kept: None, name, signals: None, number: 0, len: 0 }
    }

    /// Goal: no file is longer than was asked for, the last ones stay, and no frame is lost but
    /// with its file.
    #[test]
    fn a_ring_of_files_has_a_bound() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.pcapng");
        let (len_max, kept) = (Some(10_000), Some(3));
        let mut sorter =
            Sorter::new(Files { path, len_max, kept, ..files() }, Vec::new(), None).unwrap();
        for at_ns in 0..100 {
            sorter.take(at_ns, Direction::In, vec![1; 900 + at_ns as usize]);
        }
        sorter.write_until(u64::MAX).unwrap();
        sorter.flush(0).unwrap();
        assert_eq!(sorter.written + sorter.writer.frames, 100);
        let name = |n| dir.path().join(format!("x.{n}.pcapng"));
        assert_eq!(std::fs::read_dir(&dir).unwrap().count(), 3);
        for n in sorter.files.number - 2..=sorter.files.number {
            // The head of a file takes a hundred bytes.
            let len = std::fs::metadata(name(n)).unwrap().len();
            assert!(len < 10_100, "{len}");
        }
    }

    /// Goal: the files of a ring have the name that was asked for, which need not be text.
    #[test]
    fn a_name_that_is_no_text_keeps_its_bytes() {
        use std::os::unix::ffi::OsStrExt;
        let path = PathBuf::from(std::ffi::OsStr::from_bytes(b"a\xff.pc\xfe"));
        let of = |len_max| Files { path: path.clone(), len_max, ..files() }.path_of(7);
        assert_eq!(of(None), path);
        assert_eq!(of(Some(1)).as_os_str().as_bytes(), b"a\xff.7.pc\xfe");
    }

    #[test]
    fn frames_are_written_in_the_order_of_their_times() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.pcapng");
        let files = Files { path: path.clone(), ..files() };
        let mut sorter = Sorter::new(files, Vec::new(), None).unwrap();
        for (at_ns, byte) in [(30, 3), (10, 1), (20, 2), (40, 4), (10, 9)] {
            sorter.take(at_ns, Direction::In, vec![0xe0 + byte; 16]);
        }
        sorter.write_until(40).unwrap();
        assert_eq!((sorter.writer.frames, sorter.held.len()), (4, 1));
        sorter.write_until(u64::MAX).unwrap();
        sorter.flush(0).unwrap();
        let file = std::fs::read(&path).unwrap();
        let runs = file.chunk_by(|a, b| a == b).filter(|run| run.len() == 16 && run[0] > 0xe0);
        let order: Vec<u8> = runs.map(|run| run[0] - 0xe0).collect();
        assert_eq!(order, [1, 9, 2, 3, 4]);
    }
}
