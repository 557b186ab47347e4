//! The `Port` trait that every backend implements, its capabilities and its counters.
//!
//! No frames are queued between a port and its user. A frame to send is described by the caller and
//! copied by the port directly into device memory (one copy); a received frame is lent to the
//! caller in device memory and copied once, to its destination in the application (one copy). So
//! neither side allocates, and frames have no owner.

use std::any::Any;
use std::ops::Add;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use crate::frame::{LongBody, PrefixedBody, RxFrame, TxFrame, WriteBody, WriteHead};
use crate::hint::cold;
use crate::mem::{InlineBytes, IoBuf, SHORT};

pub use crate::mac::{BadMac, MacAddr};
pub use crate::station::Station;

/// Smallest MTU that the fabric can work with.
pub const MTU_MIN: usize = 256;

/// Fixed facts of a port, true for its life.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortCaps {
    /// Station address of the port, which frames to it carry.
    pub station: Station,
    /// Largest number of bytes after the 14-byte Ethernet header that a frame may carry, either
    /// way. At least [`MTU_MIN`] or the fabric does not open on this port.
    pub mtu: usize,
    /// A unicast frame that [`Port::tx`] answered [`Tx::Sent`] for is in the receiver's memory,
    /// unchanged and in order: it can be lost only with the receiver, and survives the sender.
    pub lossless: bool,
    /// [`Port::tx`] can take the body of a frame from registered memory without copying it.
    pub gather: bool,
    /// Floor of the retransmission timeout, nanoseconds: below it the timer would only fire on
    /// scheduling noise. 100,000 on hardware, 1,000,000 through a kernel.
    pub rto_floor_ns: u64,
    /// Frames pass a kernel's network stack: one frame costs as much as many small messages.
    pub via_kernel: bool,
    /// [`Port::presence`] answers for every station, so silence says nothing about a peer's life.
    pub tells_presence: bool,
    /// [`mtu`](Self::mtu) of frames to and from near stations: processes of this node that the port
    /// reaches through shared memory ([`Port::is_near`]). 0 on ports without near stations. Towards
    /// near stations the port is lossless, does not corrupt frames and reports presence, whatever
    /// the other fields say.
    pub near_mtu: usize,
    /// Link speed, bit/s, as the device reports it; 0 if it does not.
    pub link_bps: u64,
    /// The name that opens this port again, such as `shm:job7`.
    pub name: String,
}

impl PortCaps {
    /// Capabilities common to most ports: lossy, hardware, no gather, no presence, unknown link
    /// speed.
    pub fn new(station: impl Into<Station>, mtu: usize, name: impl Into<String>) -> Self {
        Self {
            station: station.into(),
            mtu,
            lossless: false,
            gather: false,
            rto_floor_ns: 100_000,
            via_kernel: false,
            tells_presence: false,
            near_mtu: 0,
            link_bps: 0,
            name: name.into(),
        }
    }
}

/// Result of [`Port::tx`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tx {
    /// The port has the frame; its bytes may be reused.
    Sent,
    /// The ring (the port's, or on a shared segment the receiver's) has no room. The frame was not
    /// taken: retry later. Back-pressure, not an error.
    Full,
    /// No station on the segment has the destination address, and the port can tell. The frame was
    /// not taken.
    NoRoute,
}

/// State of the process with a station address, as far as the port knows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// The port cannot tell (any wire), or frames of a dead process are still to be received.
    #[default]
    Unknown,
    /// The process lives: it runs, sleeps, computes or is stopped.
    Present,
    /// The process lives, and the port had no memory for the last frame to it.
    Starved,
    /// No process has the address, and every frame sent from it has been received.
    Absent,
}

/// The device is gone: unplugged, removed, or its segment destroyed. The port is unusable for good.
///
/// Boxed, so that a `Result` with it stays two words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("port {} is gone: {}", .0.port, .0.why)]
pub struct PortGone(Box<Gone>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Gone {
    port: String,
    why: String,
}

impl PortGone {
    /// The port named `port` ([`PortCaps::name`]) is gone; `why` is the reason, for the log.
    #[cold]
    pub fn new(port: &str, why: &str) -> Self {
        Self(Box::new(Gone { port: port.into(), why: why.into() }))
    }

    /// [`PortCaps::name`] of the port.
    pub fn port(&self) -> &str {
        &self.0.port
    }

    /// What happened.
    pub fn why(&self) -> &str {
        &self.0.why
    }
}

/// Receives the frames of a burst.
pub trait RxSink {
    /// Called for every frame of the burst before [`frame`](Self::frame) is called for the first,
    /// to prefetch the memory that handling the frame needs. Does nothing by default.
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        let _ = frame;
    }

    /// Handles one frame, which starts with the Ethernet header. The loan ends when this returns.
    fn frame(&mut self, frame: &RxFrame<'_>);

    /// As [`frame`](Self::frame), from a port through which replies can be sent during the loan.
    /// Sends none by default.
    #[inline(always)]
    fn frame_with(&mut self, frame: &RxFrame<'_>, back: impl InPlaceTx)
    where
        Self: Sized,
    {
        let _ = back;
        self.frame(frame);
    }
}

/// Sends short frames to `dst` (a [`Station::word`]): `H` bytes that `head` writes, all of them,
/// and a body. Wakes a sleeping receiver. Returns false, and nothing has happened, if the frame
/// cannot be written into the ring at once; the caller then uses [`Port::tx`].
pub trait InPlaceTx {
    /// [`PortCaps::lossless`], if the port's type alone determines it.
    const LOSSLESS: bool = false;

    /// Sends the head and `rest`.
    fn tx_in_place<const H: usize, R: WriteBody>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: &R,
    ) -> bool;

    /// Sends the head and `few`.
    #[inline(always)]
    fn tx_inline<const H: usize>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        few: InlineBytes,
    ) -> bool {
        self.tx_in_place(dst, head, &few)
    }

    /// Sends `word` (if any), all of `body`, and the checksum `crc` (if any, little-endian) behind
    /// the head. False also if the body is not contiguous.
    #[inline(always)]
    fn tx_checked<const H: usize>(
        &mut self,
        dst: u64,
        (body, crc): (&IoBuf, Option<u32>),
        word: Option<u64>,
        head: &impl WriteHead<H>,
    ) -> bool {
        let Some(rest) = PrefixedBody::of(word, body, 0, body.len()) else { return cold(false) };
        self.tx_in_place(dst, head, &rest.with(crc))
    }

    /// As [`tx_checked`](Self::tx_checked), without a checksum.
    #[inline(always)]
    fn tx_short<const H: usize>(
        &mut self,
        dst: u64,
        body: &IoBuf,
        word: Option<u64>,
        head: &impl WriteHead<H>,
    ) -> bool {
        let sent = self.begin_short(dst, body, word, head);
        if sent {
            self.finish();
        }
        sent
    }

    /// As [`tx_short`](Self::tx_short), but the wake-up of a sleeping receiver may be deferred to
    /// [`finish`](Self::finish), which has to be called next if this returned true. The caller can
    /// do its own bookkeeping in between without spilling registers over a call.
    #[inline(always)]
    fn begin_short<const H: usize>(
        &mut self,
        dst: u64,
        body: &IoBuf,
        word: Option<u64>,
        head: &impl WriteHead<H>,
    ) -> bool {
        let Some(rest) = PrefixedBody::of(word, body, 0, body.len()) else { return cold(false) };
        self.begin_in_place(dst, head, &rest)
    }

    /// As [`tx_in_place`](Self::tx_in_place), with the deferred wake-up of
    /// [`begin_short`](Self::begin_short).
    #[inline(always)]
    fn begin_in_place<const H: usize, R: WriteBody>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: &R,
    ) -> bool {
        self.tx_in_place(dst, head, rest)
    }

    /// Completes the last frame sent by a `begin_` method.
    #[inline(always)]
    fn finish(&mut self) {}

    /// Sends `len` bytes at `at` of `body`. False also if they exceed a frame, are out of range or
    /// not contiguous.
    #[inline(always)]
    fn tx_part<const H: usize>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        body: &IoBuf,
        at: usize,
        len: usize,
    ) -> bool {
        if H + len > SHORT {
            cold(());
            return LongBody::of(body, at, len).is_some_and(|rest| self.tx_long(dst, head, rest));
        }
        let Some(rest) = PrefixedBody::of(None, body, at, len) else { return cold(false) };
        self.tx_in_place(dst, head, &rest)
    }

    /// As [`tx_in_place`](Self::tx_in_place), not inlined, since most frames are short.
    #[doc(hidden)]
    #[inline(never)]
    fn tx_long<const H: usize, R: WriteBody>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: R,
    ) -> bool {
        self.tx_in_place(dst, head, &rest)
    }
}

/// The transmit side of a port during the loan of a frame. Not the port itself, which could be
/// replaced while its memory is lent.
pub(crate) struct ReplyTx<'a, P>(pub(crate) &'a mut P);

impl<P: InPlaceTx> InPlaceTx for ReplyTx<'_, P> {
    const LOSSLESS: bool = P::LOSSLESS;

    #[inline(always)]
    fn tx_in_place<const H: usize, R: WriteBody>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: &R,
    ) -> bool {
        self.0.tx_in_place(dst, head, rest)
    }
}

/// The transmit side of a port inside another port, without the promise of [`InPlaceTx::LOSSLESS`],
/// which is that of its own type.
pub(crate) struct LossyTx<B>(pub(crate) B);

impl<B: InPlaceTx> InPlaceTx for LossyTx<B> {
    #[inline(always)]
    fn tx_in_place<const H: usize, R: WriteBody>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: &R,
    ) -> bool {
        self.0.tx_in_place(dst, head, rest)
    }
}

/// A port whose static type is known to the node, so that its fast path is inlined: usually a short
/// frame can be written at once, and the few pending frames be received, without other checks.
/// Neither method detects a lost device, and [`Port::tx`] and [`Port::flush`] of such a port do not
/// either.
pub trait FastPort: Port + InPlaceTx {
    /// Fast receive poll: receives the pending frames and returns their number. `None`, and nothing
    /// was received, if [`Port::rx_burst`] has to be called instead. Polls are not counted here:
    /// see [`count`](Self::count).
    fn rx_poll(&mut self, sink: &mut impl RxSink) -> Option<usize>;

    /// Adds the number of [`rx_poll`](Self::rx_poll) calls since the last [`Port::rx_burst`], so
    /// that the port's periodic checks keep their interval.
    fn count(&mut self, polls: u32);
}

impl RxSink for &mut dyn RxSink {
    #[inline]
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        (**self).prefetch(frame);
    }

    #[inline]
    fn frame(&mut self, frame: &RxFrame<'_>) {
        (**self).frame(frame);
    }
}

impl<F: FnMut(&RxFrame<'_>)> RxSink for F {
    fn frame(&mut self, frame: &RxFrame<'_>) {
        self(frame);
    }
}

/// Counters of a port since it was opened. Every frame that was not delivered is counted by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames lent to the sink, and their bytes with Ethernet headers.
    // Not next to the byte counter: the compiler would update both by one vector addition, which
    // takes three times as many instructions.
    pub rx_frames: u64,
    /// Frames accepted from the caller.
    pub tx_frames: u64,
    /// Bytes of `rx_frames`.
    pub rx_bytes: u64,
    /// Bytes of `tx_frames`.
    pub tx_bytes: u64,
    /// Calls that answered [`Tx::Full`].
    pub tx_full: u64,
    /// Calls that answered [`Tx::NoRoute`].
    pub tx_no_route: u64,
    /// Received frames dropped by the port: malformed, too long, or incomplete because the sender
    /// died.
    pub rx_dropped: u64,
    /// Sent frames dropped by the port: a full ring for a multicast frame, longer than the
    /// receiver's MTU, or on purpose (the `fault` port).
    pub tx_dropped: u64,
}

impl PortCounters {
    /// Counts a sent frame of `len` bytes.
    #[inline(always)]
    pub(crate) fn sent(&mut self, len: usize) {
        self.tx_frames += 1;
        self.tx_bytes += len as u64;
    }

    /// Counts a received frame of `len` bytes.
    #[inline(always)]
    pub(crate) fn received(&mut self, len: usize) {
        self.rx_frames += 1;
        self.rx_bytes += len as u64;
    }

    /// Counts the result of [`Port::tx`] for a frame of `len` bytes, and returns it.
    #[inline]
    pub(crate) fn tried(&mut self, answer: Tx, len: usize) -> Tx {
        match answer {
            Tx::Sent => self.sent(len),
            Tx::Full => self.tx_full += 1,
            Tx::NoRoute => self.tx_no_route += 1,
        }
        answer
    }
}

impl Add for PortCounters {
    type Output = Self;

    /// Sum of the counters of two ports, or of two periods.
    fn add(self, other: Self) -> Self {
        Self {
            rx_frames: self.rx_frames + other.rx_frames,
            tx_frames: self.tx_frames + other.tx_frames,
            rx_bytes: self.rx_bytes + other.rx_bytes,
            tx_bytes: self.tx_bytes + other.tx_bytes,
            tx_full: self.tx_full + other.tx_full,
            tx_no_route: self.tx_no_route + other.tx_no_route,
            rx_dropped: self.rx_dropped + other.rx_dropped,
            tx_dropped: self.tx_dropped + other.tx_dropped,
        }
    }
}

/// Sends and receives whole Ethernet frames (without FCS). One thread at a time uses a port.
pub trait Port: Send + Any {
    /// Fixed facts, true for the port's life.
    fn caps(&self) -> &PortCaps;

    /// Sends one frame, or returns why not. Never blocks or allocates.
    ///
    /// `frame.len()` is at most 14 + [`PortCaps::mtu`]; a longer frame is a bug of the caller and
    /// panics. A port may queue frames until [`flush`](Self::flush).
    ///
    /// # Errors
    /// [`PortGone`]: the frame was not sent, and no later one will be.
    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone>;

    /// Makes the frames accepted by [`tx`](Self::tx) visible to the receiver. Called once per poll
    /// turn that sent something.
    ///
    /// # Errors
    /// [`PortGone`].
    fn flush(&mut self) -> Result<(), PortGone>;

    /// Lends at most `max` received frames to `sink`, oldest first, and returns their number. It
    /// may be less than the number of pending frames, but 0 only if none is pending or one was
    /// dropped, which [`PortCounters::rx_dropped`] then shows. Never blocks or allocates.
    ///
    /// # Errors
    /// [`PortGone`]: no further frame will come.
    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone>;

    /// The counters so far.
    fn counters(&self) -> PortCounters;

    /// The wrapped port, if this port wraps one. The default methods below that take no station
    /// address delegate to it.
    fn below(&self) -> Option<&dyn Port> {
        None
    }

    /// The share of [`counters`](Self::counters) that near stations caused; `None` on ports without
    /// near stations.
    fn near_counters(&self) -> Option<PortCounters> {
        None
    }

    /// Whether [`Tx::Full`] is caused by a lack of memory, as on a segment whose file system is
    /// full. Called when a frame has waited for long.
    fn lacks_memory(&self) -> bool {
        self.below().is_some_and(|below| below.lacks_memory())
    }

    /// Whether frames may be corrupted on the way: on cables, switches and buses yes, in this
    /// machine's memory no. If so, a node sends and requires a checksum; both ends of a link have
    /// to agree. Default: a lossy port may corrupt frames.
    fn damages(&self) -> bool {
        !self.caps().lossless
    }

    /// Description of `station` for the log: the address of its host, or its process. `None` if
    /// unknown. May make system calls.
    fn station(&self, station: Station) -> Option<String> {
        self.below()?.station(station)
    }

    /// Bytes sent to and received from `station` since the first contact, including the port's
    /// encapsulation; `None` if unknown. Costs a table lookup.
    fn traffic(&self, station: Station) -> Option<(u64, u64)> {
        self.below()?.traffic(station)
    }

    /// A handle on which a thread can sleep until a frame may have arrived, or `None` if the port
    /// can only be polled.
    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        self.below()?.waiter()
    }

    /// Whether the process of `station` lives. May take a system call: for timers, not for each
    /// frame. Ports without [`PortCaps::tells_presence`] return [`Presence::Unknown`].
    fn presence(&mut self, _station: Station) -> Presence {
        Presence::Unknown
    }

    /// Whether `station` is a process of this node that is currently reached through shared memory.
    /// Its frames are [near](RxFrame::is_near) as well. Called when a session begins, not for each
    /// frame. Always false if [`PortCaps::near_mtu`] is 0.
    fn is_near(&mut self, _station: Station) -> bool {
        false
    }

    /// Restricts the frames that may leave this machine's memory to those whose head (Ethernet and
    /// fabric headers) `may_leave` accepts; others get [`Tx::NoRoute`]. Otherwise a frame for a
    /// process of this node that has just ended would go out on the wire. Ignored by ports with one
    /// side only.
    fn set_wire_filter(&mut self, _may_leave: fn(head: &[u8]) -> bool) {}

    /// Time at which the port has to be polled even if no frame arrives (for instance a `fault`
    /// port that holds a delayed frame), by [`crate::clock::now_ns`].
    fn next_deadline_ns(&self) -> Option<u64> {
        self.below()?.next_deadline_ns()
    }
}

/// Sleeps until a port may have a frame to receive.
pub trait PortWaiter: Send + Sync {
    /// Returns when a frame may be pending, at once if one is, after `timeout` at the latest. May
    /// return spuriously.
    ///
    /// The sender wakes the sleeper. A lost wake-up is compensated by polling: on shared memory and
    /// behind a switch every 1 ms; on memif every 32 ms, or 1 ms if one of the last 32 wake-ups was
    /// lost or the peer has no eventfd; on vfio, where an interrupt may be lost, every 90 ms, or 1
    /// ms without interrupts; on dpdk, which has no interrupts, every half millisecond. On sockets
    /// (afpacket, xdp, udp) the kernel wakes the sleeper, without polling. A port with a
    /// shared-memory side and another one polls every millisecond.
    fn wait(&self, timeout: Duration) {
        self.wait_or(None, timeout);
    }

    /// As [`wait`](Self::wait), and returns as well when `also` becomes readable, which is not
    /// read: for a port with two sides. False only if the timeout has passed; true in doubt. A
    /// waiter that cannot poll `also` returns after 1 ms.
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool;

    /// Makes the current `wait`, or else the next one, return at once.
    fn wake(&self);

    /// Whether an arriving frame ends a `wait`. Otherwise `wait` is a short sleep between two
    /// polls.
    fn has_interrupt(&self) -> bool {
        true
    }
}

/// The timeout of a waiter that cannot poll `also`: at most 1 ms if there is one.
pub(crate) fn brief(also: Option<BorrowedFd<'_>>, timeout: Duration) -> Duration {
    also.map_or(timeout, |_| timeout.min(Duration::from_millis(1)))
}
