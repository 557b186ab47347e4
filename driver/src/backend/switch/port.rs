//! The port of a station behind a switch.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::attach::Request;
use super::reattach::{Attachment, Bell, Link, NextAttachment, ReattachThread};
use crate::backend::shm::{RECHECK, ShmPort, ShmSettings, Uplink, version};
use crate::backend::{self, readable, sleep};
use crate::error::OpenError;
use crate::frame::{RxFrame, TxFrame, WriteBody, WriteHead};
use crate::hint::cold;
use crate::port::{
    FastPort, InPlaceTx, LossyTx, MTU_MIN, Port, PortCaps, PortCounters, PortGone, PortWaiter,
    RxSink, Tx,
};

/// Longest round trip that the switches of both nodes add while they wait to be scheduled.
const SWITCH_NS: u64 = 100_000;

/// A port whose frames a switch forwards to its uplink. The other stations of the segment are
/// reached through the switch as well.
///
/// Frames may be lost, as on a wire. Those sent while no switch runs are, and are counted
/// ([`PortCounters::tx_dropped`]).
pub struct SwitchedPort {
    caps: PortCaps,
    link: Link,
    damages: bool,
    /// Frames sent while there was no switch.
    lost: u64,
    /// Counters of former segments and connections.
    past_counters: PortCounters,
    waiter: Arc<Waiter>,
    /// Where the way to the next switch arrives.
    next: Arc<NextAttachment>,
    _reattach: Option<ReattachThread>,
}

impl SwitchedPort {
    /// Joins the segment of a switch of our user, without a thread: it stays a member, and has no
    /// part in a switch of another build. `name` is the spec that opens the port again. `None` if
    /// the segment never had a switch: nothing is left behind.
    ///
    /// # Errors
    /// Those of joining.
    pub fn open(segment: &ShmSettings, name: String) -> Result<Option<Self>, OpenError> {
        let Some((port, uplink)) = join(segment, &name)? else { return Ok(None) };
        let attachment = Attachment::in_segment(port, uplink)?;
        Ok(Some(Self::at(attachment, NextAttachment::empty(), None, name)?))
    }

    /// As [`open`](Self::open). A thread then keeps a connection to the switch, waits for the
    /// switch's end, and attaches to the next one, whose segment may be another.
    ///
    /// # Errors
    /// As there, and those of starting a thread.
    pub fn open_watched(segment: &ShmSettings, name: String) -> Result<Option<Self>, OpenError> {
        let Some((port, uplink)) = join(segment, &name)? else { return Ok(None) };
        let request = request(segment.switch_socket(), segment);
        let (next, thread) = ReattachThread::of_member(request, segment, &port)?;
        let attachment = Attachment::in_segment(port, uplink)?;
        Ok(Some(Self::at(attachment, next, Some(thread), name)?))
    }

    /// Asks the switch at `socket`, of any user, for a way to it, with the address that `segment`
    /// asks for; the segment's name stands in messages. Otherwise as
    /// [`open_watched`](Self::open_watched). `None` without a switch: at once if there is no
    /// socket, after `patience` if nobody listens at it.
    ///
    /// # Errors
    /// Those of joining, and that the switch does not serve this user.
    pub fn attach(
        socket: PathBuf,
        segment: &ShmSettings,
        name: String,
        patience: Duration,
    ) -> Result<Option<Self>, OpenError> {
        Self::attach_by(request(socket, segment), segment, name, patience)
    }

    /// As [`attach`](Self::attach), of a build whose segments have the layout `version`.
    #[cfg(test)]
    pub(super) fn attach_as(
        version: u64,
        socket: PathBuf,
        segment: &ShmSettings,
        name: String,
    ) -> Result<Option<Self>, OpenError> {
        let request = Request { version, ..request(socket, segment) };
        Self::attach_by(request, segment, name, Duration::ZERO)
    }

    fn attach_by(
        request: Request,
        segment: &ShmSettings,
        name: String,
        patience: Duration,
    ) -> Result<Option<Self>, OpenError> {
        let opened = ReattachThread::open(request, segment, patience)?;
        let Some((attachment, next, thread)) = opened else { return Ok(None) };
        Ok(Some(Self::at(attachment, next, Some(thread), name)?))
    }

    fn at(
        attachment: Attachment,
        next: Arc<NextAttachment>,
        reattach: Option<ReattachThread>,
        name: String,
    ) -> Result<Self, OpenError> {
        let Attachment { link, bell, station, uplink } = attachment;
        let hint = "; raise the limit on open files: ulimit -n 65536";
        let no_event = |e| OpenError::os("cannot make an event for", &name, e, hint);
        let wake = backend::WakeEvent::new().map_err(no_event)?;
        let caps = PortCaps {
            rto_floor_ns: u64::from(uplink.rto_floor_us) * 1000 + SWITCH_NS,
            via_kernel: uplink.via_kernel,
            link_bps: uplink.link_bps,
            ..PortCaps::new(station, mtu_of(&link, uplink), name)
        };
        let (bell, for_waiter) = (Mutex::new(Arc::new(bell)), Arc::clone(&next));
        let waiter = Arc::new(Waiter { bell, wake, next: for_waiter });
        let (damages, past_counters) = (uplink.damages, PortCounters::default());
        Ok(Self { caps, link, damages, lost: 0, past_counters, waiter, next, _reattach: reattach })
    }

    /// Moves to the segment of the next switch, or to the connection to it.
    #[cold]
    #[inline(never)]
    fn move_to_next(&mut self) {
        let Some(Attachment { link, bell, uplink, .. }) = self.next.take() else { return };
        let mtu = mtu_of(&link, uplink);
        if mtu < self.caps.mtu {
            let (port, was) = (&self.caps.name, self.caps.mtu);
            tracing::warn!(port, mtu, was, "the next switch carries less: longer frames are lost");
        }
        self.past_counters = self.total_counters();
        self.damages |= uplink.damages;
        *self.waiter.bell.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(bell);
        self.link = link;
    }

    /// Counters of this segment or connection, and of former ones.
    fn total_counters(&self) -> PortCounters {
        let here = match &self.link {
            Link::Segment(port) => port.counters(),
            Link::Relayed(port) => port.counters,
        };
        PortCounters { tx_no_route: 0, ..self.past_counters + here }
    }

    /// Whether the way to the next switch has arrived.
    #[cfg(test)]
    pub(super) fn has_next(&self) -> bool {
        self.next.is_ready()
    }

    /// Whether frames pass the connection to the switch, not a segment.
    pub fn is_relayed(&self) -> bool {
        matches!(self.link, Link::Relayed(_))
    }

    /// The connection's socket, if frames pass it.
    #[cfg(test)]
    pub(super) fn relayed_socket(&self) -> Option<std::os::fd::RawFd> {
        match &self.link {
            Link::Segment(_) => None,
            Link::Relayed(port) => Some(port.socket()),
        }
    }

    /// As [`Port::rx_burst`], which cannot fail here, for a sink of known type.
    #[inline(always)]
    pub fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> usize {
        if self.next.is_ready() {
            self.move_to_next();
        }
        match &mut self.link {
            Link::Segment(port) => port.receive(max, &mut FromSwitch(sink)),
            Link::Relayed(port) => port.receive(max, sink),
        }
    }
}

/// What a process of this build asks the switch at `socket`.
fn request(socket: PathBuf, segment: &ShmSettings) -> Request {
    let is_own = socket == segment.switch_socket();
    Request { path: socket, station: segment.station, version: version(), is_own }
}

/// Joins the segment of a switch of our user, which need not run. `None` if it never had one.
fn join(segment: &ShmSettings, name: &str) -> Result<Option<(ShmPort, Uplink)>, OpenError> {
    let (port, uplink) = ShmPort::open_leaf(segment)?;
    if (uplink.mtu as usize) < MTU_MIN {
        return Ok(None);
    }
    if !port.has_switch() {
        tracing::warn!(port = %name, "no switch runs: frames are lost until one does");
    }
    Ok(Some((port, uplink)))
}

/// Lends frames that the switch forwarded, of which none can be answered in place.
struct FromSwitch<'a, S>(&'a mut S);

impl<S: RxSink> RxSink for FromSwitch<'_, S> {
    #[inline]
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        self.0.prefetch(frame);
    }

    #[inline]
    fn frame(&mut self, frame: &RxFrame<'_>) {
        self.0.frame(frame);
    }

    #[inline(always)]
    fn frame_with(&mut self, frame: &RxFrame<'_>, back: impl InPlaceTx) {
        self.0.frame_with(frame, LossyTx(back));
    }
}

/// MTU behind a switch: the least of the uplink's and the link's.
fn mtu_of(link: &Link, uplink: Uplink) -> usize {
    match link {
        Link::Segment(port) => port.caps().mtu.min(uplink.mtu as usize),
        Link::Relayed(port) => port.mtu(),
    }
}

impl InPlaceTx for SwitchedPort {
    #[inline(always)]
    fn tx_in_place<const H: usize, R: WriteBody>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: &R,
    ) -> bool {
        match &mut self.link {
            Link::Segment(port) => port.tx_in_place(dst, head, rest),
            Link::Relayed(_) => cold(false),
        }
    }
}

impl FastPort for SwitchedPort {
    #[inline(always)]
    fn rx_poll(&mut self, sink: &mut impl RxSink) -> Option<usize> {
        match &mut self.link {
            Link::Segment(port) => port.rx_poll(&mut FromSwitch(sink)),
            Link::Relayed(_) => cold(None),
        }
    }

    fn count(&mut self, polls: u32) {
        if let Link::Segment(port) = &mut self.link {
            port.count(polls);
        }
    }
}

impl Port for SwitchedPort {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let sent = match &mut self.link {
            Link::Segment(port) => port.tx(frame)?,
            Link::Relayed(port) => port.tx(frame),
        };
        match sent {
            Tx::NoRoute => {
                self.lost += 1;
                Ok(Tx::Sent)
            }
            sent => Ok(sent),
        }
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        match &mut self.link {
            Link::Segment(port) => port.flush(),
            Link::Relayed(_) => Ok(()),
        }
    }

    fn rx_burst(&mut self, max: usize, mut sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        Ok(self.receive(max, &mut sink))
    }

    fn counters(&self) -> PortCounters {
        let counters = self.total_counters();
        PortCounters { tx_dropped: counters.tx_dropped + self.lost, ..counters }
    }

    fn damages(&self) -> bool {
        self.damages
    }

    fn lacks_memory(&self) -> bool {
        matches!(&self.link, Link::Segment(port) if port.lacks_memory())
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        Some(Arc::clone(&self.waiter) as Arc<dyn PortWaiter>)
    }
}

/// Sleeps on the socket that the switch sends wake-ups to, or frames.
struct Waiter {
    /// Of the segment that the port is a member of, or of its connection.
    bell: Mutex<Arc<Bell>>,
    wake: backend::WakeEvent,
    next: Arc<NextAttachment>,
}

impl Bell {
    /// Asks for wake-ups. True if something may have come already.
    fn arm(&self) -> bool {
        matches!(self, Self::Segment(bell) if bell.arm())
    }

    fn disarm(&self) {
        if let Self::Segment(bell) = self {
            bell.disarm();
        }
    }

    /// Descriptor to wait at.
    fn fd(&self) -> libc::c_int {
        match self {
            Self::Segment(bell) => bell.fd().as_raw_fd(),
            Self::Relayed(connection) => connection.waitable_fd(),
        }
    }
}

impl PortWaiter for Waiter {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let also = backend::raw(also);
        loop {
            // The port may have moved to another segment since the last round.
            let bell = Arc::clone(&self.bell.lock().unwrap_or_else(PoisonError::into_inner));
            let left = until.saturating_duration_since(Instant::now());
            let has_come = bell.arm() || self.next.is_ready();
            let is_over = has_come || left.is_zero() || {
                let mut fds = [bell.fd(), self.wake.fd(), also].map(readable);
                // The switch may have read the old state: check again after `RECHECK`.
                let is_rung = sleep(&mut fds, left.min(RECHECK));
                if is_rung {
                    self.wake.clear();
                }
                is_rung
            };
            bell.disarm();
            if is_over {
                return has_come || !left.is_zero();
            }
        }
    }

    fn wake(&self) {
        self.wake.ring();
    }
}
