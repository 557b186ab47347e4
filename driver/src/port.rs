//! The one trait every device implements, and what a device says of itself.
//!
//! Frames are not queued between a port and its user. A frame to send is described by the caller
//! and copied by the port straight into device memory (one copy in); a frame received is lent to
//! the caller where the device put it and is copied once, to where the application wants it (one
//! copy out). So neither side allocates and a frame has no owner to forget it.

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
    /// The address that frames to this port alone carry.
    pub station: Station,
    /// Largest number of bytes after the 14-byte Ethernet header that a frame may carry, either
    /// way. At least [`MTU_MIN`] or the fabric does not open on this port.
    pub mtu: usize,
    /// A unicast frame that [`Port::tx`] answered [`Tx::Sent`] for lies, unchanged and in order, in
    /// the receiver's memory: it can be lost only with the receiver, and survives the sender.
    pub lossless: bool,
    /// [`Port::tx`] can take the body of a frame from registered memory without copying it.
    pub gather: bool,
    /// Round trip below which a retransmission timer would only fire on scheduling noise,
    /// nanoseconds: 100,000 on hardware, 1,000,000 through a kernel.
    pub rto_floor_ns: u64,
    /// Frames pass the network stack of a kernel: one costs as much as many small messages.
    pub via_kernel: bool,
    /// [`Port::presence`] answers for every station, so silence says nothing about a peer's life.
    pub tells_presence: bool,
    /// [`mtu`](Self::mtu) of frames to and from near stations, on a port that has such besides the
    /// others: processes of this node that it reaches through memory ([`Port::is_near`]). 0 on all
    /// other ports. To near stations the port loses and damages nothing, and it tells their
    /// presence, whatever is said here of the others.
    pub near_mtu: usize,
    /// Link speed, bit/s, as the device reports it; 0 if it does not.
    pub link_bps: u64,
    /// The string that would open this port again, such as `shm:job7`.
    pub name: String,
}

impl PortCaps {
    /// A lossy port on hardware that gathers nothing, tells no presence and does not know its
    /// speed, which is what most have in common.
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

/// What became of a frame given to [`Port::tx`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tx {
    /// The port has it; its bytes may be reused.
    Sent,
    /// The ring (the port's, or on a shared segment the receiver's) has no room. The frame was not
    /// taken: try again after a while. Back-pressure, not an error.
    Full,
    /// Nobody on the segment has the destination address, and the port can tell. Not taken.
    NoRoute,
}

/// What a port knows of the process behind a station address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Presence {
    /// The port cannot tell (any wire), or frames of a dead station are still to be received.
    #[default]
    Unknown,
    /// The process lives: it runs, sleeps, computes or is stopped.
    Present,
    /// The process lives, and the port lacked memory when the last frame to it was to be sent.
    Starved,
    /// Nobody has the address, and every frame sent from it has been received.
    Absent,
}

/// The device is gone: unplugged, removed, or its segment destroyed. Nothing will work again.
///
/// A pointer, so that a result that may hold it stays two words.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("port {} is gone: {}", .0.port, .0.why)]
pub struct PortGone(Box<Gone>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Gone {
    port: String,
    why: String,
}

impl PortGone {
    /// The port named `port` ([`PortCaps::name`]) is gone, and `why`, for a person.
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

/// Takes the frames of a receive burst.
pub trait RxSink {
    /// Called for every frame of the burst before [`frame`](Self::frame) is called for the first,
    /// so that the memory a frame will need can be on its way. Does nothing by default.
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        let _ = frame;
    }

    /// Takes one frame, Ethernet header first. It is gone when this returns.
    fn frame(&mut self, frame: &RxFrame<'_>);

    /// As [`frame`](Self::frame), from a port that can send short answers while it lends. Sends
    /// none by default.
    #[inline(always)]
    fn frame_with(&mut self, frame: &RxFrame<'_>, back: impl InPlaceTx)
    where
        Self: Sized,
    {
        let _ = back;
        self.frame(frame);
    }
}

/// Sends short frames: `H` bytes that `head` writes, all of them, and what follows them, to `dst`,
/// a [`Station::word`]. Whoever sleeps is woken. False, and nothing has happened, if there is more
/// to it than to write it.
pub trait InPlaceTx {
    /// [`PortCaps::lossless`], where the type of the port alone says so.
    const LOSSLESS: bool = false;

    /// Sends `rest` behind the head.
    fn tx_in_place<const H: usize, R: WriteBody>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: &R,
    ) -> bool;

    /// Sends `few` behind the head.
    #[inline(always)]
    fn tx_inline<const H: usize>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        few: InlineBytes,
    ) -> bool {
        self.tx_in_place(dst, head, &few)
    }

    /// Sends `word`, if there is one, then all of `body`, and then `crc`, if there is one, as it
    /// stands in a frame. False also if the body is not in one piece.
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

    /// As [`tx_short`](Self::tx_short), but that whoever sleeps is woken may be left to
    /// [`finish`](Self::finish), which is to be called next if this was true: so who has more to
    /// do for the frame can do it first, and keeps nothing over a call.
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

    /// As [`tx_in_place`](Self::tx_in_place), with the rest as in
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

    /// Does what is left of the frame that was sent last.
    #[inline(always)]
    fn finish(&mut self) {}

    /// Sends `len` bytes from `at` of `body`. False also if they are more than a frame holds, or
    /// not all there in one piece.
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

    /// As [`tx_in_place`](Self::tx_in_place), by itself, since most frames are short.
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

/// The sending side of a port that lends a frame. (Not the port itself, which could be exchanged
/// for another while its memory is lent.)
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

/// The sending side of a port inside of another one, which does not promise what that one's type
/// does.
pub(crate) struct Inside<B>(pub(crate) B);

impl<B: InPlaceTx> InPlaceTx for Inside<B> {
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

/// A port whose type is known where it is used, so that nothing stands between a node and it: most
/// often a short frame can be written at once, and the few that have come be taken, and there is
/// nothing else to ask. Neither finds that the port has gone, and so it is with [`Port::tx`] and
/// [`Port::flush`] of such a port.
pub trait FastPort: Port + InPlaceTx {
    /// What most polls are: takes what has come and says how many frames that were, none if none.
    /// `None`, and nothing was taken, if there is more to look at: then it is for
    /// [`Port::rx_burst`]. It is not counted as a poll: see [`count`](Self::count).
    fn rx_poll(&mut self, sink: &mut impl RxSink) -> Option<usize>;

    /// Counts as many polls as were made by [`rx_poll`](Self::rx_poll) since the last
    /// [`Port::rx_burst`], so that the next one looks after the port as often as it should.
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

/// What a port counted since it was opened. Every frame that was not passed on has its cause here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PortCounters {
    /// Frames lent to the sink, and their bytes with Ethernet headers.
    // Not beside their bytes: the compiler would add to both at once, which takes three times as
    // many instructions.
    pub rx_frames: u64,
    /// Frames taken from the caller.
    pub tx_frames: u64,
    /// Bytes of `rx_frames`.
    pub rx_bytes: u64,
    /// Bytes of `tx_frames`.
    pub tx_bytes: u64,
    /// Calls that answered [`Tx::Full`].
    pub tx_full: u64,
    /// Calls that answered [`Tx::NoRoute`].
    pub tx_no_route: u64,
    /// Received frames dropped by the port: malformed, too long, or their sender died half way.
    pub rx_dropped: u64,
    /// Frames the port itself lost on the way out: a full ring for a group address, longer than
    /// the other side takes, or on purpose (the `fault` port).
    pub tx_dropped: u64,
}

impl PortCounters {
    /// Counts a frame of `len` bytes taken from the caller.
    #[inline(always)]
    pub(crate) fn sent(&mut self, len: usize) {
        self.tx_frames += 1;
        self.tx_bytes += len as u64;
    }

    /// Counts a frame of `len` bytes lent to the sink.
    #[inline(always)]
    pub(crate) fn received(&mut self, len: usize) {
        self.rx_frames += 1;
        self.rx_bytes += len as u64;
    }

    /// Counts what [`Port::tx`] answers for a frame of `len` bytes, and returns it.
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

    /// What two ports counted together, or one after the other.
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

/// Moves whole Ethernet frames (no frame check sequence). One thread at a time uses a port.
pub trait Port: Send + Any {
    /// Fixed facts, true for the port's life.
    fn caps(&self) -> &PortCaps;

    /// Sends one frame, or says why not. Never blocks or allocates.
    ///
    /// `frame.len()` is at most 14 + [`PortCaps::mtu`]; a longer one is a bug of the caller and
    /// panics. A port may keep frames back until [`flush`](Self::flush).
    ///
    /// # Errors
    /// [`PortGone`]: the frame was not sent, and no later one will be.
    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone>;

    /// Makes what [`tx`](Self::tx) took visible to the other side now. Called once per poll turn
    /// that sent something.
    ///
    /// # Errors
    /// [`PortGone`].
    fn flush(&mut self) -> Result<(), PortGone>;

    /// Lends at most `max` received frames to `sink`, oldest first, and says how many: fewer than
    /// wait, if that is better, but none only if none does or one was dropped, which
    /// [`PortCounters::rx_dropped`] then shows. Never blocks or allocates.
    ///
    /// # Errors
    /// [`PortGone`]: no further frame will come.
    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone>;

    /// What was counted so far.
    fn counters(&self) -> PortCounters;

    /// The port that this one stands around, if it is made of one. What this one does not say of
    /// itself below, as far as it concerns no address, is what that one says.
    fn below(&self) -> Option<&dyn Port> {
        None
    }

    /// The part of [`counters`](Self::counters) that was sent to near stations and came from them,
    /// on a port that has such.
    fn near_counters(&self) -> Option<PortCounters> {
        None
    }

    /// Whether frames wait ([`Tx::Full`]) because the port was refused memory for them, as on a
    /// segment whose file system is full. Asked when something has waited for long.
    fn lacks_memory(&self) -> bool {
        self.below().is_some_and(|below| below.lacks_memory())
    }

    /// Whether a frame may arrive with other bytes than it was sent with: through cables, switches
    /// and buses it may, in this machine's memory not. Where it may, a node sends and demands a
    /// checksum. Both ends of a link have to say the same. By default: if frames can be lost, they
    /// can be damaged.
    fn damages(&self) -> bool {
        !self.caps().lossless
    }

    /// What else is known of `station`, for the operator's log: where its host is, or which process
    /// it is. `None` if the port does not know. May make system calls.
    fn station(&self, station: Station) -> Option<String> {
        self.below()?.station(station)
    }

    /// Bytes that went to `station` and came from it, frames with what the
    /// port puts around them, since the two met; `None` if the port does not know. Costs a search.
    fn traffic(&self, station: Station) -> Option<(u64, u64)> {
        self.below()?.traffic(station)
    }

    /// A handle on which another thread can sleep until a frame may have come, or `None` if this
    /// port can only be polled.
    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        self.below()?.waiter()
    }

    /// Whether the process that is `station` lives. May take a system call: for
    /// timers, not for each frame. Ports with [`PortCaps::tells_presence`] answer; the others say
    /// [`Presence::Unknown`].
    fn presence(&mut self, _station: Station) -> Presence {
        Presence::Unknown
    }

    /// Whether `station` is a process of this node that frames reach through
    /// memory now. Those that come from it are [so as well](RxFrame::is_near). Asked when a session
    /// begins, not for each frame. Never, on a port whose [`PortCaps::near_mtu`] is 0.
    fn is_near(&mut self, _station: Station) -> bool {
        false
    }

    /// Lets only frames leave this machine's memory whose first bytes, Ethernet header and all of
    /// ours before the payload, `may_leave` allows. A frame for a process of this node that has
    /// just gone would else go out by the wire: such a frame finds [`Tx::NoRoute`]. Nothing to do
    /// for a port with one way.
    fn set_wire_filter(&mut self, _may_leave: fn(head: &[u8]) -> bool) {}

    /// When the port itself wants to be polled again even if no frame comes (a `fault` port that
    /// holds a delayed frame), in the time of [`crate::clock::now_ns`].
    fn next_deadline_ns(&self) -> Option<u64> {
        self.below()?.next_deadline_ns()
    }
}

/// Sleeps until a port may have something to receive.
pub trait PortWaiter: Send + Sync {
    /// Returns when a frame may be there, after `timeout` at the latest, at once if one is there
    /// already. May return early for no reason.
    ///
    /// The sender wakes the sleeper. A frame whose wake-up failed is found by a look: on shared
    /// memory and behind a switch after 1 ms at the latest; on memif after 32 ms, or 1 ms if one
    /// of the last 32 wake-ups failed or the other side has no event; on vfio, where an interrupt
    /// may get lost, after 90 ms, or 1 ms without interrupts; on dpdk, which has none, after half
    /// a millisecond. The kernel wakes who sleeps on a socket (afpacket, xdp, udp): nobody looks.
    /// A port that is made of shared memory and another looks every millisecond.
    fn wait(&self, timeout: Duration) {
        self.wait_or(None, timeout);
    }

    /// As [`wait`](Self::wait), and returns as well when `also` can be read, which is left unread:
    /// for a port that is made of two. False if nothing but time has passed; true if in doubt.
    /// Who cannot sleep on it returns after 1 ms.
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool;

    /// Makes one `wait` that runs now, or the next one, return at once.
    fn wake(&self);

    /// Whether a frame ends a `wait`. Where it does not, `wait` is a short nap between two polls.
    fn has_interrupt(&self) -> bool {
        true
    }
}

/// How long to sleep for `timeout` without a look at `also`: 1 ms at most, if there is one.
pub(crate) fn brief(also: Option<BorrowedFd<'_>>, timeout: Duration) -> Duration {
    also.map_or(timeout, |_| timeout.min(Duration::from_millis(1)))
}
