//! A station's port behind a switch.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::line::{Line, Next, Place};
use crate::backend::shm::{Bell, LOOK, NO_BELL, ShmPort, ShmSettings, Uplink};
use crate::backend::{self, readable, sleep};
use crate::error::{OPEN_FILES, OpenError};
use crate::frame::{RxFrame, TxFrame, WriteBody, WriteHead};
use crate::port::{
    FastPort, InPlaceTx, Inside, MTU_MIN, Port, PortCaps, PortCounters, PortGone, PortWaiter,
    RxSink, Tx,
};

/// Longest round trip that the switch adds, both nodes', while they find processors to run on.
const SWITCH_NS: u64 = 100_000;

/// A port whose frames a switch forwards to its uplink. The other stations of the segment are
/// reached through the switch as well.
///
/// It promises what a wire does: frames get lost, among them all that are sent while no switch
/// runs. Those are counted ([`PortCounters::tx_dropped`]).
pub struct SwitchedPort {
    caps: PortCaps,
    port: ShmPort,
    damages: bool,
    /// Frames sent while there was no switch.
    lost: u64,
    /// What was counted in segments that are no more.
    past: PortCounters,
    waiter: Arc<Waiter>,
    /// The segment of the switch after this one.
    next: Arc<Next>,
    /// To a switch of another user.
    line: Option<Line>,
}

impl SwitchedPort {
    /// Joins the segment of a switch of our user. `name` is what opens the port again. `None` if
    /// the segment never had one: nothing is left behind.
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
        let bell = port.bell()?;
        let place = Place { port, bell, uplink };
        Ok(Some(Self::at(place, Next::never(), None, name)?))
    }

    /// Asks the switch at `socket`, of whatever user, for a segment: in the rest as
    /// [`open`](Self::open), with the address that `segment` asks for and its name in messages.
    /// `None` if there is no switch: at once if there is no socket, after `patience` if nobody
    /// listens at it. A thread then waits for the switch's end, and joins the next one's.
    ///
    /// # Errors
    /// Those of joining, and that the switch does not serve us.
    pub fn ask(
        socket: PathBuf,
        segment: &ShmSettings,
        name: String,
        patience: Duration,
    ) -> Result<Option<Self>, OpenError> {
        let Some((place, next, line)) = Line::open(socket, segment, patience)? else {
            return Ok(None);
        };
        Ok(Some(Self::at(place, next, Some(line), name)?))
    }

    fn at(
        place: Place,
        next: Arc<Next>,
        line: Option<Line>,
        name: String,
    ) -> Result<Self, OpenError> {
        let Place { port, bell, uplink } = place;
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
        let no_bell = |e| OpenError::os(NO_BELL, port.path(), e, OPEN_FILES);
        let wake = backend::Bell::new().map_err(no_bell)?;
        let (bell, for_waiter) = (Mutex::new(Arc::new(bell)), Arc::clone(&next));
        let waiter = Arc::new(Waiter { bell, wake, next: for_waiter });
        let (damages, past) = (uplink.damages, PortCounters::default());
        Ok(Self { caps, port, damages, lost: 0, past, waiter, next, line })
    }

    /// Goes on in the segment of the next switch.
    #[cold]
    #[inline(never)]
    fn move_on(&mut self) {
        let Some(Place { port, bell, uplink }) = self.next.take() else { return };
        let mtu = mtu_of(&port, uplink);
        if mtu < self.caps.mtu {
            let (port, was) = (&self.caps.name, self.caps.mtu);
            tracing::warn!(port, mtu, was, "the next switch carries less: longer frames are lost");
        }
        self.past = self.so_far();
        self.damages |= uplink.damages;
        *self.waiter.bell.lock().unwrap_or_else(PoisonError::into_inner) = Arc::new(bell);
        self.port = port;
    }

    /// What was counted in this segment and those before.
    fn so_far(&self) -> PortCounters {
        PortCounters { tx_no_route: 0, ..self.past + self.port.counters() }
    }

    /// Whether the next switch's segment is there to go on in.
    #[cfg(test)]
    pub(super) fn has_next(&self) -> bool {
        self.next.is_there()
    }

    /// Whether it goes through the switch of another user.
    pub fn is_guest(&self) -> bool {
        self.line.is_some()
    }

    /// As [`Port::rx_burst`], which cannot fail here, for a sink of known type.
    #[inline(always)]
    pub fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> usize {
        if self.next.is_there() {
            self.move_on();
        }
        self.port.receive(max, &mut FromSwitch(sink))
    }
}

/// Lends what the switch forwarded.
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
        self.0.frame_with(frame, Inside(back));
    }
}

/// Largest MTU behind a switch.
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
        let counters = self.so_far();
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

/// Sleeps on a socket on which the switch rings.
struct Waiter {
    /// Of the segment that the port is in.
    bell: Mutex<Arc<Bell>>,
    wake: backend::Bell,
    next: Arc<Next>,
}

impl PortWaiter for Waiter {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let also = backend::raw(also);
        loop {
            // Another than the last time, if the port has moved meanwhile.
            let bell = Arc::clone(&self.bell.lock().unwrap_or_else(PoisonError::into_inner));
            let left = until.saturating_duration_since(Instant::now());
            let has_come = bell.lie_down() || self.next.is_there();
            let is_over = has_come || left.is_zero() || {
                let mut fds = [bell.fd().as_raw_fd(), self.wake.fd(), also].map(readable);
                // The switch may not have seen that we lie down.
                let is_rung = sleep(&mut fds, left.min(LOOK));
                if is_rung {
                    self.wake.clear();
                }
                is_rung
            };
            bell.get_up();
            if is_over {
                return has_come || !left.is_zero();
            }
        }
    }

    fn wake(&self) {
        self.wake.ring();
    }
}
