//! A station's port behind a switch.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::backend::shm::{Bell, LOOK, ShmPort, ShmSettings};
use crate::backend::{self, readable, sleep};
use crate::error::OpenError;
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
    waiter: Arc<Waiter>,
}

impl SwitchedPort {
    /// Joins the segment of a switch. `name` is what opens the port again. `None` if the segment
    /// never had one: nothing is left behind.
    ///
    /// # Errors
    /// Those of joining.
    pub fn open(segment: &ShmSettings, name: String) -> Result<Option<Self>, OpenError> {
        let (port, uplink) = ShmPort::open_leaf(segment)?;
        let mtu = (uplink.mtu as usize).min(port.caps().mtu);
        if mtu < MTU_MIN {
            return Ok(None);
        }
        if !port.has_switch() {
            tracing::warn!(port = %name, "no switch runs: frames are lost until one does");
        }
        let caps = PortCaps {
            mtu,
            lossless: false,
            rto_floor_ns: u64::from(uplink.rto_floor_us) * 1000 + SWITCH_NS,
            tells_presence: false,
            link_bps: uplink.link_bps,
            name,
            ..port.caps().clone()
        };
        let waiter = Waiter::new(&port).map_err(|source| OpenError::Os {
            what: "cannot make a socket to sleep on for",
            path: port.path().into(),
            source,
            hint: "; raise the limit on open files: ulimit -n 65536",
        })?;
        let damages = uplink.damages;
        Ok(Some(Self { caps, port, damages, lost: 0, waiter: Arc::new(waiter) }))
    }

    /// As [`Port::rx_burst`], which cannot fail here, for a sink of known type.
    #[inline(always)]
    pub fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> usize {
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

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        self.port.rx_burst(max, sink)
    }

    fn counters(&self) -> PortCounters {
        let counters = self.port.counters();
        PortCounters { tx_no_route: 0, tx_dropped: counters.tx_dropped + self.lost, ..counters }
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
    bell: Bell,
    wake: backend::Bell,
}

impl Waiter {
    fn new(port: &ShmPort) -> io::Result<Self> {
        Ok(Self { bell: port.bell()?, wake: backend::Bell::new()? })
    }

    fn sleep(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let until = Instant::now() + timeout;
        let also = backend::raw(also);
        let has_come = loop {
            if self.bell.lie_down() {
                break true;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break false;
            }
            let mut fds = [self.bell.fd().as_raw_fd(), self.wake.fd(), also].map(readable);
            // The switch may not have seen that we lie down.
            if sleep(&mut fds, left.min(LOOK)) {
                self.wake.clear();
                break true;
            }
        };
        self.bell.get_up();
        has_come
    }
}

impl PortWaiter for Waiter {
    fn wait(&self, timeout: Duration) {
        self.sleep(None, timeout);
    }

    fn wake(&self) {
        self.wake.ring();
    }

    fn wait_or(&self, also: BorrowedFd<'_>, timeout: Duration) -> bool {
        self.sleep(Some(also), timeout)
    }
}
