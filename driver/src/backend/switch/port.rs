//! The port of a station behind a switch.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::reattach::{Attachment, NextAttachment, ReattachThread};
use crate::backend::shm::{NO_WAKE_SOCKET, RECHECK, ShmPort, ShmSettings, Uplink, WakeSocket};
use crate::backend::{self, readable, sleep};
use crate::error::{OPEN_FILES, OpenError};
use crate::frame::{RxFrame, TxFrame, WriteBody, WriteHead};
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
    port: ShmPort,
    damages: bool,
    /// Frames sent while there was no switch.
    lost: u64,
    /// Counters of former segments.
    past_counters: PortCounters,
    waiter: Arc<Waiter>,
    /// Where the segment of the next switch arrives.
    next: Arc<NextAttachment>,
    /// Only behind a switch of another user.
    reattach: Option<ReattachThread>,
}

impl SwitchedPort {
    /// Joins the segment of a switch of our user. `name` is the spec that opens the port again.
    /// `None` if the segment never had a switch: nothing is left behind.
    ///
    /// # Errors
    /// Those of joining.
    pub fn open(segment: &ShmSettings, name: String) -> Result<Option<Self>, OpenError> {
        let (port, uplink) = ShmPort::open_leaf(segment)?;
        if (uplink.mtu as usize) < MTU_MIN {
            return Ok(None);
        }
        if !port.has_switch() {
            tracing::warn!(port = %name, "no switch runs: frames are lost until one does");
        }
        let bell = port.wake_socket()?;
        let attachment = Attachment { port, bell, uplink };
        Ok(Some(Self::at(attachment, NextAttachment::empty(), None, name)?))
    }

    /// Asks the switch at `socket`, of any user, for a segment, with the address that `segment`
    /// asks for; the segment's name stands in messages. Otherwise as [`open`](Self::open). `None`
    /// without a switch: at once if there is no socket, after `patience` if nobody listens at it. A
    /// thread then waits for the switch's end, and joins the segment of the next one.
    ///
    /// # Errors
    /// Those of joining, and that the switch does not serve this user.
    pub fn attach(
        socket: PathBuf,
        segment: &ShmSettings,
        name: String,
        patience: Duration,
    ) -> Result<Option<Self>, OpenError> {
        let Some((attachment, next, reattach)) = ReattachThread::open(socket, segment, patience)?
        else {
            return Ok(None);
        };
        Ok(Some(Self::at(attachment, next, Some(reattach), name)?))
    }

    fn at(
        attachment: Attachment,
        next: Arc<NextAttachment>,
        reattach: Option<ReattachThread>,
        name: String,
    ) -> Result<Self, OpenError> {
        let Attachment { port, bell, uplink } = attachment;
        let caps = PortCaps {
            mtu: mtu_of(&port, uplink),
            lossless: false,
            rto_floor_ns: u64::from(uplink.rto_floor_us) * 1000 + SWITCH_NS,
            via_kernel: uplink.via_kernel,
            tells_presence: false,
            link_bps: uplink.link_bps,
            name,
            ..port.caps().clone()
        };
        let no_socket = |e| OpenError::os(NO_WAKE_SOCKET, port.path(), e, OPEN_FILES);
        let wake = backend::WakeEvent::new().map_err(no_socket)?;
        let (bell, for_waiter) = (Mutex::new(Arc::new(bell)), Arc::clone(&next));
        let waiter = Arc::new(Waiter { bell, wake, next: for_waiter });
        let (damages, past_counters) = (uplink.damages, PortCounters::default());
        Ok(Self { caps, port, damages, lost: 0, past_counters, waiter, next, reattach })
    }

    /// Moves to the segment of the next switch.
    #[cold]
    #[inline(never)]
    fn move_to_next(&mut self) {
        let Some(Attachment { port, bell, uplink }) = self.next.take() else { return };
        let mtu = mtu_of(&port, uplink);
        if mtu < self.caps.mtu {
            let (port, was) = (&self.caps.name, self.caps.mtu);
            tracing::warn!(port, mtu, was, "the next switch carries less: longer frames are lost");
        }
        self.past_counters = self.total_counters();
        self.damages |= uplink.damages;
        *self.waiter.bell.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(bell);
        self.port = port;
    }

    /// Counters of this segment and of former ones.
    fn total_counters(&self) -> PortCounters {
        PortCounters { tx_no_route: 0, ..self.past_counters + self.port.counters() }
    }

    /// Whether the segment of the next switch has arrived.
    #[cfg(test)]
    pub(super) fn has_next(&self) -> bool {
        self.next.is_ready()
    }

    /// Whether the switch is of another user.
    pub fn is_switch_client(&self) -> bool {
        self.reattach.is_some()
    }

    /// As [`Port::rx_burst`], which cannot fail here, for a sink of known type.
    #[inline(always)]
    pub fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> usize {
        if self.next.is_ready() {
            self.move_to_next();
        }
        self.port.receive(max, &mut FromSwitch(sink))
    }
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

/// MTU behind a switch: the least of the uplink's and the segment's.
fn mtu_of(port: &ShmPort, uplink: Uplink) -> usize {
    (uplink.mtu as usize).min(port.caps().mtu)
}

impl InPlaceTx for SwitchedPort {
    #[inline(always)]
    fn tx_in_place<const H: usize, R: WriteBody>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: &R,
    ) -> bool {
        self.port.tx_in_place(dst, head, rest)
    }
}

impl FastPort for SwitchedPort {
    #[inline(always)]
    fn rx_poll(&mut self, sink: &mut impl RxSink) -> Option<usize> {
        self.port.rx_poll(&mut FromSwitch(sink))
    }

    fn count(&mut self, polls: u32) {
        self.port.count(polls);
    }
}

impl Port for SwitchedPort {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        match self.port.tx(frame)? {
            Tx::NoRoute => {
                self.lost += 1;
                Ok(Tx::Sent)
            }
            sent => Ok(sent),
        }
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        self.port.flush()
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
        self.port.lacks_memory()
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        Some(Arc::clone(&self.waiter) as Arc<dyn PortWaiter>)
    }
}

/// Sleeps on the socket that the switch sends wake-ups to.
struct Waiter {
    /// Of the segment that the port is a member of.
    bell: Mutex<Arc<WakeSocket>>,
    wake: backend::WakeEvent,
    next: Arc<NextAttachment>,
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
                let mut fds = [bell.fd().as_raw_fd(), self.wake.fd(), also].map(readable);
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
