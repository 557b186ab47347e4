//! A port with two sides under one address. Near stations, which are processes of this node, are
//! reached through a segment of shared memory, all others through another port, the far one.
//!
//! The segment's member has the address of the far port, so a station has one address from
//! everywhere, and a sender need not know where it is. A frame goes to the near side if its
//! destination is a member of the segment at that moment, else to the far side. While the ring of a
//! near member is full, its frames wait and never take the far side. After it has left or died they
//! do, and [`presence`](Port::presence) reports it.
//!
//! # Trust
//! A received frame is lent as [near](RxFrame::is_near) if it was in a ring of the segment, which
//! only a process of this user can have written. What the far side receives is never near, whatever
//! its source address: that can be forged.
//!
//! # End of the port
//! The port is gone when its far side is. A segment is never gone; presence reports near stations.

use std::ops::DerefMut;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

use super::shm::{RECHECK, ShmBoard, ShmPort, ShmSettings, WakeSocket};
use crate::clock;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, RxFrame, TxFrame};
use crate::hint::cold;
use crate::port::{
    FastPort, InPlaceTx, LossyTx, Port, PortCaps, PortCounters, PortGone, PortWaiter, Presence,
    RxSink, Station, Tx, brief,
};

/// Bursts with near frames after which the far side is polled although its last poll was empty. A
/// poll may cost a system call.
const FAR_SKIPS_MAX: u32 = 64;
/// Time after a frame within which more frames of that side are expected, nanoseconds. While near
/// frames are expected and far ones are not, the far side is polled every [`Near::gap_ns`] only.
const BUSY_NS: u64 = 100_000;
/// [`Near::gap_ns`] as a multiple of the time that a poll of the far side takes.
const GAP_POLLS: u64 = 32;
/// Consecutive polls of an empty near side that need not read the clock, which costs as much as the
/// rest of such a poll. A program that polls less often from now on sees a far frame late once, by
/// this many polls.
const UNTIMED_POLLS: u32 = 4;
/// Longest time between two checks of [`Near::may_skip_far`] after which polls may skip the clock,
/// nanoseconds.
const QUICK_NS: u64 = 1_500;
/// Number of polls of the far side that are timed.
const TIMED_POLLS: u32 = 64;
/// Entries of the cache of far addresses; two that share one evict each other.
const FAR_CACHE_LEN: usize = 64;

/// Name of the segment that the processes of this user in this network namespace share.
///
/// # Errors
/// There is no /proc.
pub fn node_segment() -> Result<String, OpenError> {
    use std::os::unix::fs::MetadataExt;
    // The thread's: a thread can be in another namespace than its process.
    let path = "/proc/thread-self/ns/net";
    let meta = std::fs::metadata(path).map_err(|e| {
        let hint = "; mount /proc, or name a segment: near=shm:NAME";
        OpenError::os("cannot tell the network namespace from", path, e, hint)
    })?;
    Ok(format!("node-{}", meta.ino()))
}

/// A port as the far side of [`Near`].
pub trait FarPort: DerefMut<Target = dyn Port> + Send + 'static {
    /// [`Port::rx_burst`] with a sink of known type.
    ///
    /// # Errors
    /// As there.
    fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> Result<usize, PortGone>;

    /// As [`FastPort::rx_poll`], if it is one; else `None`.
    fn rx_poll(&mut self, sink: &mut impl RxSink) -> Option<usize>;

    /// As [`FastPort::count`], if it is one.
    fn count_polls(&mut self, polls: u32);
}

/// See the module's documentation.
pub struct Near<F> {
    caps: PortCaps,
    /// Boxed, like a segment without a far side.
    near: Box<ShmPort>,
    far: F,
    far_frame_max: usize,
    /// Whether a frame may go to the far side, by its head; all may if `None`.
    wire_filter: Option<fn(&[u8]) -> bool>,
    /// Stations that were no members when the segment's epoch was `epoch`; all ones for none.
    far_cache: Box<[u64; FAR_CACHE_LEN]>,
    epoch: u64,
    /// Frames whose destination is no near member; and those of them that were too long for the far
    /// side, or that `wire_filter` refused.
    not_near: u64,
    unsendable: u64,
    /// Whether a frame was sent to the side and not flushed.
    near_sent: bool,
    far_sent: bool,
    /// Polls without the far side since its last poll, and whether that one had frames.
    far_skips: u32,
    far_had_frames: bool,
    /// Pause between two polls of the far side while near frames come, nanoseconds; 0 until a poll
    /// was timed.
    gap_ns: u64,
    /// Polls of the far side that are still to be timed.
    timed_polls_left: u32,
    /// Times of the last poll of the far side, of the last near frame and of the last far frame.
    far_polled_ns: u64,
    near_frame_ns: u64,
    far_frame_ns: u64,
    /// Whether near frames were received since the last call of
    /// [`may_skip_far`](Self::may_skip_far).
    near_had_frames: bool,
    /// Whether the near side has more frames than the last poll could take.
    near_has_more: bool,
    /// Time of the last call of [`may_skip_far`](Self::may_skip_far), and whether it followed the
    /// one before within [`QUICK_NS`].
    last_check_ns: u64,
    polls_quickly: bool,
    /// Polls left that need neither the clock nor the far side, and whether one was made since the
    /// clock was read.
    untimed_polls: u32,
    has_skipped_clock: bool,
    /// Error of a send: the far side is gone.
    gone: Option<PortGone>,
    waiter: Option<Arc<Waiter>>,
}

impl<F: FarPort> Near<F> {
    /// As [`ShmPort::board`]: of near stations alone.
    pub(in crate::backend) fn board(&mut self, members: &[Station]) -> Option<ShmBoard> {
        self.near.board(members)
    }

    /// Joins a segment under the address of `far`. `name` is the port name that opens the whole
    /// again.
    ///
    /// # Errors
    /// Those of joining, with `far` as it was.
    pub fn join(segment: &ShmSettings, far: F, name: String) -> Result<Self, (F, OpenError)> {
        let far_caps = far.caps();
        let near = match ShmPort::open(&ShmSettings {
            station: Some(far_caps.station),
            ..segment.clone()
        }) {
            Ok(near) => Box::new(near),
            Err(why) => return Err((far, why)),
        };
        let near_mtu = near.caps().mtu;
        let far_frame_max = ETH_HDR_LEN + far_caps.mtu;
        let caps = PortCaps {
            mtu: far_caps.mtu.min(near_mtu),
            gather: false,
            near_mtu,
            name,
            ..far_caps.clone()
        };
        let waiter = match (far.waiter(), near.wake_socket()) {
            (Some(far), Ok(wake_socket)) => {
                Some(Arc::new(Waiter { wake_socket, far, is_woken: AtomicBool::new(false) }))
            }
            (None, _) => None,
            (_, Err(why)) => return Err((far, wake_socket_error(why))),
        };
        Ok(Self {
            caps,
            near,
            far,
            far_frame_max,
            wire_filter: None,
            far_cache: Box::new([u64::MAX; FAR_CACHE_LEN]),
            epoch: 0,
            not_near: 0,
            unsendable: 0,
            near_sent: false,
            far_sent: false,
            far_skips: 0,
            far_had_frames: false,
            gap_ns: 0,
            timed_polls_left: TIMED_POLLS,
            far_polled_ns: 0,
            near_frame_ns: 0,
            far_frame_ns: 0,
            near_had_frames: false,
            near_has_more: false,
            last_check_ns: 0,
            polls_quickly: false,
            untimed_polls: 0,
            has_skipped_clock: false,
            gone: None,
            waiter,
        })
    }

    /// Whether the address was looked up as far since the last member joined or left.
    #[inline]
    fn is_far(&mut self, key: u64) -> bool {
        let epoch = self.near.epoch();
        if epoch != self.epoch {
            self.epoch = epoch;
            self.far_cache.fill(u64::MAX);
        }
        self.far_cache[far_cache_slot(key)] == key
    }

    fn tx_far(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        // The destination is a near station that has just left, and the far side cannot carry the
        // frame, or must not.
        let wire_filter = self.wire_filter.is_none_or(|wire_filter| wire_filter(frame.head));
        if frame.len() > self.far_frame_max || !wire_filter {
            self.unsendable += 1;
            return Ok(Tx::NoRoute);
        }
        let sent = self.far.tx(frame).inspect_err(|gone| self.gone = Some(gone.clone()))?;
        self.far_sent |= sent == Tx::Sent;
        Ok(sent)
    }

    /// To the far side first, which may refuse the frame; the near side drops frames without room.
    #[cold]
    fn tx_group(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        if self.tx_far(frame)? == Tx::Full {
            return Ok(Tx::Full);
        }
        self.near_sent = true;
        self.near.tx(frame)
    }

    #[inline]
    fn receive_far(&mut self, max: usize, sink: &mut impl RxSink) -> Result<usize, PortGone> {
        self.far_skips = 0;
        let got = match self.timed_polls_left {
            0 => self.far.receive(max, sink)?,
            _ => self.receive_far_timed(max, sink)?,
        };
        self.far_had_frames = got > 0;
        Ok(got)
    }

    /// Receives from the far side, and times the poll if it is empty. The shortest time counts,
    /// since the thread may be preempted.
    #[inline(never)]
    fn receive_far_timed(&mut self, max: usize, sink: &mut impl RxSink) -> Result<usize, PortGone> {
        let start = clock::now_ns();
        let got = self.far.receive(max, sink)?;
        if got == 0 {
            let gap_ns = GAP_POLLS * (clock::now_ns() - start);
            self.gap_ns = if self.gap_ns == 0 { gap_ns } else { self.gap_ns.min(gap_ns) };
            self.timed_polls_left -= 1;
        }
        Ok(got)
    }

    /// The near side, for sending to a station that is known to be near.
    #[inline(always)]
    pub fn segment(&mut self) -> &mut Box<ShmPort> {
        &mut self.near
    }

    /// Whether the last near frame went to `dst`, as [`Station::word`] has it: the next one to it
    /// needs no look-up.
    #[inline(always)]
    pub fn is_last_near(&self, dst: u64) -> bool {
        self.near.is_last(dst)
    }

    /// The far side, for a frame that is written in place: if `dst` is known to be no member, and
    /// every frame may leave, since such a frame cannot be looked at before.
    #[inline(always)]
    pub fn wire_to(&mut self, dst: u64) -> Option<&mut F> {
        (self.wire_filter.is_none() && self.is_far(dst)).then_some(&mut self.far)
    }

    /// The far side.
    pub(in crate::backend) fn far(&mut self) -> &mut F {
        &mut self.far
    }

    /// [`FastPort::rx_poll`] of the near side. `None`, and nothing was taken, if it has more than
    /// one frame, if the far side is due to be polled, or if that may be: there is no near frame,
    /// and no poll without the clock is [left](Self::may_skip_clock).
    #[inline(always)]
    pub fn rx_near(&mut self, sink: &mut impl RxSink) -> Option<usize> {
        if self.far_skips >= FAR_SKIPS_MAX || self.far_had_frames {
            return cold(None);
        }
        let polled = self.near.rx_poll(&mut AsNear(sink));
        self.near_has_more = polled.is_none();
        let got = polled?;
        if got == 0 {
            self.untimed_polls = self.untimed_polls.checked_sub(1)?;
            self.has_skipped_clock = true;
            return Some(0);
        }
        self.far_skips += 1;
        self.near_had_frames = true;
        Some(got)
    }

    /// As [`FastPort::rx_poll`], of both sides, once the far side is due to be polled.
    #[inline(always)]
    pub fn rx_poll(&mut self, sink: &mut impl RxSink) -> Option<usize> {
        if self.far_skips >= FAR_SKIPS_MAX || self.timed_polls_left > 0 || self.gone.is_some() {
            return cold(None);
        }
        let near = self.near.rx_poll(&mut AsNear(sink))?;
        if near > 0 {
            self.far_skips += 1;
            self.near_had_frames = true;
            return Some(near);
        }
        let far = self.far.rx_poll(sink)?;
        self.far_skips = 0;
        self.far_had_frames = far > 0;
        Some(far)
    }

    /// As [`FastPort::count`], of both sides.
    pub fn count(&mut self, polls: u32) {
        self.near.count(polls);
        self.far.count_polls(polls);
    }

    /// Follows [`may_skip_far`](Self::may_skip_far) if nothing is due soon: the next polls that
    /// find the near side empty need not read the clock, if polls follow each other quickly.
    #[inline(always)]
    pub fn may_skip_clock(&mut self) {
        if self.polls_quickly {
            self.untimed_polls = UNTIMED_POLLS;
        }
    }

    /// Whether a poll has skipped the clock since it was last read.
    #[inline(always)]
    pub fn has_skipped_clock(&self) -> bool {
        self.has_skipped_clock
    }

    /// The next poll that finds the near side empty does not skip the clock.
    pub fn must_read_clock(&mut self) {
        self.untimed_polls = 0;
    }

    /// Whether a poll at `now_ns` that found the near side empty may skip the far side: near frames
    /// are expected, far ones are not, and the far side was empty a moment ago.
    #[inline(always)]
    pub fn may_skip_far(&mut self, now_ns: u64) -> bool {
        let since = now_ns.wrapping_sub(std::mem::replace(&mut self.last_check_ns, now_ns));
        self.polls_quickly = since < QUICK_NS;
        (self.untimed_polls, self.has_skipped_clock) = (0, false);
        if std::mem::take(&mut self.near_had_frames) {
            self.near_frame_ns = now_ns;
        }
        if self.far_had_frames {
            self.far_frame_ns = now_ns;
        }
        let may_skip = !std::mem::take(&mut self.near_has_more)
            && now_ns.wrapping_sub(self.far_polled_ns) < self.gap_ns
            && now_ns.wrapping_sub(self.near_frame_ns) < BUSY_NS
            && now_ns.wrapping_sub(self.far_frame_ns) >= BUSY_NS
            && self.far_skips < FAR_SKIPS_MAX;
        if !may_skip {
            self.far_polled_ns = now_ns;
        }
        may_skip
    }

    /// [`Port::rx_burst`], for a sink of known type.
    ///
    /// The near side is polled first, which costs a few loads; then the far side, unless the near
    /// one had frames and the far one was empty last time. While the near side keeps having frames,
    /// the far one comes first from time to time.
    ///
    /// # Errors
    /// As there.
    #[inline(never)]
    pub fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> Result<usize, PortGone> {
        if let Some(gone) = &self.gone {
            cold(());
            return Err(gone.clone());
        }
        if self.far_skips >= FAR_SKIPS_MAX {
            let got = self.receive_far(max, sink)?;
            return Ok(got + self.near.receive(max - got, &mut AsNear(sink)));
        }
        let got = self.near.receive(max, &mut AsNear(sink));
        if got == max {
            self.far_skips = FAR_SKIPS_MAX;
            return Ok(got);
        }
        if got > 0 && !self.far_had_frames {
            self.far_skips += 1;
            return Ok(got);
        }
        Ok(got + self.receive_far(max - got, sink)?)
    }
}

fn far_cache_slot(key: u64) -> usize {
    (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 58) as usize
}

/// The error of a wake-up socket, with a remedy for errors other than the limit on open files.
fn wake_socket_error(why: OpenError) -> OpenError {
    match why {
        OpenError::Os { what, path, source, .. }
            if !matches!(source.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) =>
        {
            OpenError::os(what, path, source, "; do without: near=no")
        }
        why => why,
    }
}

/// Lends the frames in a ring of the segment.
struct AsNear<'a, S>(&'a mut S);

impl<S: RxSink> RxSink for AsNear<'_, S> {
    #[inline]
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        self.0.prefetch(&frame.as_near());
    }

    #[inline]
    fn frame(&mut self, frame: &RxFrame<'_>) {
        self.0.frame(&frame.as_near());
    }

    #[inline(always)]
    fn frame_with(&mut self, frame: &RxFrame<'_>, back: impl InPlaceTx) {
        self.0.frame_with(&frame.as_near(), LossyTx(back));
    }
}

impl<F: FarPort> Port for Near<F> {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let (dst, key) = (frame.dst(), frame.dst_word());
        if !self.near.is_last(key) {
            if dst.is_group() {
                return self.tx_group(frame);
            }
            if self.is_far(key) {
                return self.tx_far(frame);
            }
        }
        match self.near.tx(frame)? {
            Tx::NoRoute => {
                self.not_near += 1;
                self.far_cache[far_cache_slot(key)] = key;
                self.tx_far(frame)
            }
            sent => {
                self.near_sent = true;
                Ok(sent)
            }
        }
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        if std::mem::take(&mut self.near_sent) {
            self.near.flush()?;
        }
        if !std::mem::take(&mut self.far_sent) {
            return Ok(());
        }
        self.far.flush().inspect_err(|gone| self.gone = Some(gone.clone()))
    }

    fn rx_burst(&mut self, max: usize, mut sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        self.receive(max, &mut sink)
    }

    fn counters(&self) -> PortCounters {
        let (near, far) = (self.near.counters(), self.far.counters());
        // Counted by the far side, to which these frames were passed.
        let tx_no_route = near.tx_no_route - self.not_near + self.unsendable;
        PortCounters { tx_no_route, ..near } + far
    }

    fn near_counters(&self) -> Option<PortCounters> {
        Some(self.near.counters())
    }

    fn lacks_memory(&self) -> bool {
        self.near.lacks_memory() || self.far.lacks_memory()
    }

    fn damages(&self) -> bool {
        self.far.damages()
    }

    fn station(&self, station: Station) -> Option<String> {
        self.near.station(station).or_else(|| self.far.station(station))
    }

    fn traffic(&self, station: Station) -> Option<(u64, u64)> {
        match (self.near.traffic(station), self.far.traffic(station)) {
            (Some(near), Some(far)) => Some((near.0 + far.0, near.1 + far.1)),
            (near, far) => near.or(far),
        }
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        let waiter = self.waiter.as_ref()?;
        Some(Arc::clone(waiter) as Arc<dyn PortWaiter>)
    }

    /// For near stations; for one that was near: whether it still is.
    fn presence(&mut self, station: Station) -> Presence {
        match self.near.presence(station) {
            Presence::Absent if self.caps.tells_presence => self.far.presence(station),
            presence => presence,
        }
    }

    fn is_near(&mut self, station: Station) -> bool {
        self.near.has(station)
    }

    fn set_wire_filter(&mut self, wire_filter: fn(&[u8]) -> bool) {
        self.wire_filter = Some(wire_filter);
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        self.far.next_deadline_ns()
    }
}

/// Sleeps on both sides: on the far side's event, and on a socket that near senders write to.
struct Waiter {
    wake_socket: WakeSocket,
    far: Arc<dyn PortWaiter>,
    is_woken: AtomicBool,
}

impl PortWaiter for Waiter {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let until = Instant::now() + brief(also, timeout);
        loop {
            let has_event = self.wake_socket.arm() || self.is_woken.swap(false, SeqCst);
            let left = until.saturating_duration_since(Instant::now());
            if has_event || left.is_zero() {
                break;
            }
            // A near sender may not have seen that this side is going to sleep.
            if self.far.wait_or(Some(self.wake_socket.fd()), left.min(RECHECK)) {
                break;
            }
        }
        self.wake_socket.disarm();
        true
    }

    fn wake(&self) {
        self.is_woken.store(true, SeqCst);
        self.far.wake();
    }

    fn has_interrupt(&self) -> bool {
        self.far.has_interrupt()
    }
}

#[cfg(test)]
mod tests;
