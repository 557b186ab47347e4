//! Packet capture: a port that wraps another and writes its frames, both ways, to a pcapng file.
//!
//! Link type Ethernet, nanosecond timestamps, direction in `epb_flags`. Frames that the port below
//! did not accept are not written. A failed write is counted and logged, and ends the capture but
//! never the port: an incomplete block would make the rest unreadable. A slow reader of a
//! pipe does not block the port: frames that find no room are dropped, and the next frame carries
//! their number (`epb_dropcount`).
//!
//! Source: PCAP Next Generation file format, draft-ietf-opsawg-pcapng, sections 4.1 to 4.3.

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::Path;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use super::tapped::{Record, Tapped};
use crate::clock::now_ns;
use crate::file::Appender;
use crate::frame::TxFrame;
use crate::port::Port;

pub use super::tapped::Direction;

/// Bytes that are buffered before a write.
const BUFFER_LEN: usize = 256 << 10;
/// Bytes that wait for the reader of a pipe at most.
const BACKLOG_MAX: usize = 4 << 20;
/// Time between two writes to a slow reader.
const RETRY_NS: u64 = 1_000_000;
/// How long the end of a capture waits for a slow reader.
const END_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a frame stays in the buffer at most, while the port is polled.
const FLUSH_NS: u64 = 100_000_000;
/// Interval of synchronization with the wall clock: [`now_ns`] drifts by up to some 50 us a second,
/// and captures of two hosts are to be comparable.
const RESYNC_NS: u64 = 1_000_000_000;
/// Backward steps of a synchronization up to this are clamped, so that times do not decrease. A
/// larger step is one of the wall clock.
const CLAMP_NS: u64 = 1_000_000;

/// Writes a pcapng file of one interface.
pub struct PcapWriter<W: Write> {
    to: W,
    buffer: Vec<u8>,
    /// Bytes of the buffer that are written.
    written: usize,
    /// The last write found no room.
    is_slow: bool,
    /// Frames dropped for lack of room: all, and those that no later frame has reported yet.
    dropped: u64,
    unreported: u64,
    /// Offset from [`now_ns`] to nanoseconds since 1970.
    epoch_ns: u64,
    synced_ns: u64,
    /// Time of the last frame.
    last: u64,
    flushed_ns: u64,
    failed: bool,
    /// Frames written or buffered.
    pub frames: u64,
    /// Frames after a failed write, with one for the write itself.
    pub lost_frames: u64,
}

impl<W: Write> PcapWriter<W> {
    /// Starts a file with an interface called `name`.
    ///
    /// # Errors
    /// Those of `to`.
    pub fn new(mut to: W, name: &str) -> io::Result<Self> {
        let mut head = Vec::new();
        // Section: byte order magic, version 1.0, length unknown.
        block(&mut head, 0x0a0d_0d0a, |b| {
            b.extend(0x1a2b_3c4d_u32.to_le_bytes());
            b.extend([1, 0, 0, 0]);
            b.extend(u64::MAX.to_le_bytes());
        });
        // Interface: link type 1 is Ethernet, no snap length; if_name, if_tsresol 10^-9.
        block(&mut head, 1, |b| {
            b.extend([1, 0, 0, 0, 0, 0, 0, 0]);
            let name = &name.as_bytes()[..name.len().min(255)];
            option(b, 2, name);
            option(b, 9, &[9]);
            option(b, 0, &[]);
        });
        to.write_all(&head)?;
        let (epoch_ns, now) = clock_offset();
        Ok(Self {
            to,
            buffer: Vec::with_capacity(BUFFER_LEN + (1 << 17)),
            written: 0,
            is_slow: false,
            dropped: 0,
            unreported: 0,
            epoch_ns,
            synced_ns: now,
            last: 0,
            flushed_ns: now,
            failed: false,
            frames: 0,
            lost_frames: 0,
        })
    }

    /// Appends a frame that passed at `at_ns` of [`now_ns`]; `fill` writes its `len` bytes.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn frame(
        &mut self,
        at_ns: u64,
        direction: Direction,
        len: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> io::Result<()> {
        if self.failed {
            self.lost_frames += 1;
            return Ok(());
        }
        if self.is_slow && self.buffer.len() - self.written + len > BACKLOG_MAX {
            (self.dropped, self.unreported) = (self.dropped + 1, self.unreported + 1);
            return Ok(());
        }
        let unreported = std::mem::take(&mut self.unreported);
        let at = at_ns.wrapping_add(self.epoch_ns);
        let at = if self.last.wrapping_sub(at) < CLAMP_NS { self.last } else { at };
        self.last = at;
        block(&mut self.buffer, 6, |b| {
            b.extend(0_u32.to_le_bytes());
            b.extend(((at >> 32) as u32).to_le_bytes());
            b.extend((at as u32).to_le_bytes());
            b.extend((len as u32).to_le_bytes());
            b.extend((len as u32).to_le_bytes());
            let start = b.len();
            b.resize(start + len.next_multiple_of(4), 0);
            fill(&mut b[start..start + len]);
            option(b, 2, &(direction as u32).to_le_bytes());
            if unreported > 0 {
                option(b, 4, &unreported.to_le_bytes());
            }
            option(b, 0, &[]);
        });
        self.frames += 1;
        let is_full = !self.is_slow && self.buffer.len() >= BUFFER_LEN;
        if is_full { self.flush(at_ns) } else { Ok(()) }
    }

    /// Writes the buffer, or as much as there is room for if writes do not block.
    ///
    /// # Errors
    /// Those of the target, once: the capture ends there, and later frames are counted as lost
    /// without an error.
    pub fn flush(&mut self, now: u64) -> io::Result<()> {
        self.flushed_ns = now;
        if self.failed || self.buffer.is_empty() {
            return Ok(());
        }
        let written = self.write();
        self.is_slow = written.as_ref().is_err_and(|why| why.kind() == ErrorKind::WouldBlock);
        if self.is_slow {
            // In proportion to what was written.
            if self.written > self.buffer.len() / 2 {
                self.buffer.drain(..self.written);
                self.written = 0;
            }
            return Ok(());
        }
        self.buffer.clear();
        self.written = 0;
        if written.is_err() {
            self.failed = true;
            self.lost_frames += 1;
        }
        written
    }

    /// Writes the rest of the buffer.
    fn write(&mut self) -> io::Result<()> {
        while self.written < self.buffer.len() {
            match self.to.write(&self.buffer[self.written..]) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(len) => self.written += len,
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(why) => return Err(why),
            }
        }
        self.to.flush()
    }

    /// Writes the rest, and waits a while for a slow reader.
    fn finish(&mut self) {
        log(self.flush(now_ns()));
        let begun = Instant::now();
        while self.is_slow && begun.elapsed() < END_TIMEOUT {
            std::thread::sleep(Duration::from_nanos(RETRY_NS));
            log(self.flush(now_ns()));
        }
        let rest = self.buffer.len() - self.written;
        if self.dropped > 0 || rest > 0 {
            let (dropped, frames) = (self.dropped, self.frames);
            tracing::warn!(
                "the reader of the capture was too slow: {dropped} frames are not in it beside \
                 {frames} that are, and its last {rest} bytes"
            );
        }
    }

    /// The target of the writes.
    pub fn target(&self) -> &W {
        &self.to
    }
}

/// The offset from [`now_ns`] to nanoseconds since 1970, and the current [`now_ns`].
fn clock_offset() -> (u64, u64) {
    let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let now = now_ns();
    ((since_1970.as_nanos() as u64).wrapping_sub(now), now)
}

impl<W: Write> Drop for PcapWriter<W> {
    fn drop(&mut self) {
        self.finish();
    }
}

fn log(written: io::Result<()>) {
    if let Err(error) = written {
        tracing::error!(%error, "cannot write the capture; it ends here, the port continues");
    }
}

/// Appends a block: type, length, what `body` appends, length.
fn block(to: &mut Vec<u8>, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
    let start = to.len();
    to.extend(kind.to_le_bytes());
    to.extend([0; 4]);
    body(to);
    let len = (to.len() - start + 4) as u32;
    to.extend(len.to_le_bytes());
    to[start + 4..start + 8].copy_from_slice(&len.to_le_bytes());
}

fn option(to: &mut Vec<u8>, code: u16, value: &[u8]) {
    to.extend(code.to_le_bytes());
    to.extend((value.len() as u16).to_le_bytes());
    to.extend(value);
    to.resize(to.len() + (4 - value.len() % 4) % 4, 0);
}

impl<W: Write + Send + 'static> Record for PcapWriter<W> {
    fn note(&mut self, at_ns: u64, direction: Direction, frame: &TxFrame<'_>) {
        let fill = |to: &mut [u8]| {
            frame.copy_to(to);
        };
        log(self.frame(at_ns, direction, frame.len(), fill));
    }

    fn tick(&mut self) {
        if !self.buffer.is_empty() {
            let now = now_ns();
            let pause = if self.is_slow { RETRY_NS } else { FLUSH_NS };
            if now.wrapping_sub(self.flushed_ns) > pause {
                log(self.flush(now));
            }
            if now.wrapping_sub(self.synced_ns) > RESYNC_NS {
                (self.epoch_ns, self.synced_ns) = clock_offset();
            }
        }
    }
}

/// Wraps `inner` and creates (or truncates) the file at `path`.
///
/// # Errors
/// Those of creating and writing the file.
pub fn recorded(inner: Box<dyn Port>, path: &Path, spec: &str) -> io::Result<Box<dyn Port>> {
    Ok(Box::new(recorded_in(File::create(path)?, inner, spec)?))
}

fn recorded_in(
    file: File,
    inner: Box<dyn Port>,
    spec: &str,
) -> io::Result<Tapped<PcapWriter<Appender>>> {
    let mut caps = inner.caps().clone();
    let writer = PcapWriter::new(Appender::from(file), &caps.name)?;
    writer.target().never_wait()?;
    caps.name = format!("{spec}:{}", caps.name);
    Ok(Tapped::new(Some(inner), caps, writer))
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use nix::sys::signal::{SigSet, Signal};
    use nix::sys::signalfd::{SfdFlags, SignalFd};

    use super::*;
    use crate::alone::is_alone;
    use crate::backend::loopback::Loopback;
    use crate::frame::RxFrame;
    use crate::port::Tx;

    fn u32_at(b: &[u8], at: usize) -> u32 {
        u32::from_le_bytes(b[at..at + 4].try_into().unwrap())
    }

    /// Reads the file back by the block lengths alone: (direction, time, frame).
    fn read(path: &Path) -> Vec<(u32, u64, Vec<u8>)> {
        let file = std::fs::read(path).unwrap();
        let (mut at, mut found) = (0, Vec::new());
        let mut kinds = Vec::new();
        while at < file.len() {
            let (kind, len) = (u32_at(&file, at), u32_at(&file, at + 4) as usize);
            assert_eq!((len % 4, u32_at(&file, at + len - 4) as usize), (0, len));
            kinds.push(kind);
            if kind == 6 {
                let n = u32_at(&file, at + 20) as usize;
                let time =
                    u64::from(u32_at(&file, at + 12)) << 32 | u64::from(u32_at(&file, at + 16));
                let flags = at + 28 + n.next_multiple_of(4);
                assert_eq!(file[flags..flags + 4], [2, 0, 4, 0]);
                found.push((u32_at(&file, flags + 4), time, file[at + 28..at + 28 + n].to_vec()));
            }
            at += len;
        }
        assert_eq!(kinds[..2], [0x0a0d_0d0a, 1]);
        found
    }

    #[test]
    fn frames_of_both_ways_are_in_the_file() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.pcapng");
        let (a, mut b) = Loopback::pair();
        let (mac_a, mac_b) = (a.caps().station.mac, b.caps().station.mac);
        let mut a = recorded(Box::new(a), &path, "pcap(file=x)").unwrap();
        let out = [&mac_b.0[..], &[1; 20]].concat();
        let back = [&mac_a.0[..], &[2; 61]].concat();
        assert_eq!(a.tx(&TxFrame::whole(&out)), Ok(Tx::Sent));
        assert_eq!(b.tx(&TxFrame::whole(&back)), Ok(Tx::Sent));
        let nobody = [&[2; 6][..], &[3; 20]].concat();
        assert_eq!(a.tx(&TxFrame::whole(&nobody)), Ok(Tx::NoRoute));
        let mut seen = 0;
        let mut sink = |_: &RxFrame<'_>| seen += 1;
        a.rx_burst(8, &mut sink).unwrap();
        // The buffer goes out by itself while the port is polled.
        std::thread::sleep(std::time::Duration::from_millis(120));
        a.rx_burst(8, &mut sink).unwrap();
        assert_eq!(seen, 1);
        let found = read(&path);
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        assert!(found.iter().all(|f| now - f.1 < 60_000_000_000), "times are those of the day");
        let frames: Vec<_> = found.into_iter().map(|(way, _, f)| (way, f)).collect();
        assert_eq!(frames, [(2, out.clone()), (1, back)]);
        assert_eq!(a.tx(&TxFrame::whole(&out)), Ok(Tx::Sent));
        drop(a);
        assert_eq!(read(&path).len(), 3);
    }

    /// Goal: the times of a long capture follow the wall clock despite drift, and do not decrease
    /// for that. Method: a clock that is off, a little or by far, either way.
    #[test]
    fn times_follow_the_wall_clock() {
        let day = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        for off in [200_000, 200_000_u64.wrapping_neg(), 1 << 40, (1_u64 << 40).wrapping_neg()] {
            let mut writer = PcapWriter::new(Vec::new(), "x").unwrap();
            writer.epoch_ns = writer.epoch_ns.wrapping_add(off);
            let put = |writer: &mut PcapWriter<Vec<u8>>| {
                writer.frame(now_ns(), Direction::Out, 14, |to| to.fill(1)).unwrap();
                writer.last
            };
            let first = put(&mut writer);
            writer.synced_ns = writer.synced_ns.wrapping_sub(2 * RESYNC_NS);
            writer.tick();
            let second = put(&mut writer);
            assert!(second.abs_diff(day()) < 60_000_000_000, "{off}");
            assert!(second >= first || first - second > CLAMP_NS, "{off}: {first}, {second}");
        }
    }

    #[test]
    fn a_full_disk_ends_the_capture_and_not_the_port() {
        let (a, mut b) = Loopback::pair();
        let mac = b.caps().station.mac;
        // The header is written at once, so the file fails from the start.
        assert!(PcapWriter::new(File::create("/dev/full").unwrap(), "x").is_err());
        let dir = tempfile::tempdir().unwrap();
        let file = File::create(dir.path().join("x")).unwrap();
        let mut a = recorded_in(file, Box::new(a), "pcap(file=x)").unwrap();
        a.record.to = File::create("/dev/full").unwrap().into();
        let frame = [&mac.0[..], &[1; 20]].concat();
        for i in 0..3 {
            assert_eq!(a.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
            assert_eq!(a.record.flush(now_ns()).is_err(), i == 0, "told once");
            assert_eq!(b.rx_burst(8, &mut |_: &RxFrame<'_>| {}), Ok(1), "frame {i}");
        }
        assert_eq!(a.record.lost_frames, 3);
    }

    /// Goal: a pipe whose reader has left ends the capture and not the program, also one that does
    /// nothing about the signal, as those in C; and a signal that the program itself holds back
    /// stays where it is.
    #[test]
    fn a_pipe_without_reader_ends_the_capture() {
        if !is_alone("backend::pcap::tests::a_pipe_without_reader_ends_the_capture", |_| ()) {
            return;
        }
        // SAFETY: the action of a program in C that says nothing.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        let broken = || {
            let (reader, writer) = io::pipe().unwrap();
            let to = Appender::from(File::from(OwnedFd::from(writer)));
            let mut writer = PcapWriter::new(to, "x").unwrap();
            drop(reader);
            writer.frame(now_ns(), Direction::Out, 14, |to| to.fill(1)).unwrap();
            writer.flush(now_ns()).is_err()
        };
        let pipe = SigSet::from(Signal::SIGPIPE);
        let is_pending = || {
            let fd = SignalFd::with_flags(&pipe, SfdFlags::SFD_NONBLOCK).unwrap();
            fd.read_signal().unwrap().is_some()
        };
        assert!(broken());
        assert!(!SigSet::thread_get_mask().unwrap().contains(Signal::SIGPIPE));
        pipe.thread_block().unwrap();
        assert!(broken() && !is_pending());
        // SAFETY: a signal that this thread holds back.
        unsafe { libc::pthread_kill(libc::pthread_self(), libc::SIGPIPE) };
        assert!(broken() && is_pending());
    }

    /// Goal: a slow or stopped reader of a pipe blocks no frame of the port; the capture has whole
    /// blocks and the number of dropped frames. Method: more frames than pipe and backlog hold.
    #[test]
    fn a_slow_reader_of_a_pipe_holds_up_nobody() {
        let (a, mut b) = Loopback::pair();
        let mac = b.caps().station.mac;
        let (mut reader, writer) = io::pipe().unwrap();
        let to = File::from(OwnedFd::from(writer));
        let mut a = recorded_in(to, Box::new(a), "pcap(file=x)").unwrap();
        let frame = [&mac.0[..], &[1; 1400]].concat();
        let (begun, sent) = (Instant::now(), 6000);
        for _ in 0..sent {
            assert_eq!(a.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
            assert_eq!(b.rx_burst(8, &mut |_: &RxFrame<'_>| {}), Ok(1));
        }
        assert!(begun.elapsed() < Duration::from_secs(5));
        let dropped = a.record.dropped;
        assert!(dropped > 1000 && dropped < sent, "{dropped}");
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x");
        let mut copy = File::create(&path).unwrap();
        let reads = std::thread::spawn(move || io::copy(&mut reader, &mut copy).unwrap());
        while a.record.is_slow {
            a.rx_burst(8, &mut |_: &RxFrame<'_>| {}).unwrap();
        }
        assert_eq!(a.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
        assert_eq!((a.record.dropped, a.record.frames), (dropped, sent - dropped + 1));
        drop(a);
        reads.join().unwrap();
        assert_eq!(read(&path).len() as u64, sent - dropped + 1);
        // The last block: flags, the count, no more options, the length of the block.
        let file = std::fs::read(&path).unwrap();
        let count = &file[file.len() - 20..file.len() - 8];
        assert_eq!(
            (count[..4].to_vec(), &count[4..]),
            (vec![4, 0, 8, 0], &dropped.to_le_bytes()[..])
        );
    }
}
