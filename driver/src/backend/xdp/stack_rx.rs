//! Reception from the kernel's stack: frames for a port that arrive by a queue of another process,
//! or of none.
//!
//! An AF_XDP socket receives only from its own queue, and the NIC chooses the queue. The program of
//! a queue passes on frames for other stations and for groups, and a port without all queues
//! receives these by a raw socket, at the cost of [`afpacket`](crate::backend::afpacket). If the
//! NIC steers the port's frames to its queues, no unicast frame arrives this way.

use std::io;
use std::os::fd::RawFd;

use super::super::netdev::ring::{self, RxRing, Slot};
use super::super::netdev::{Accept, Link, filter};
use super::XdpSettings;
use crate::frame::ETHERTYPE;
use crate::port::{PortCounters, RxSink, Station};

/// Frames that can wait, unless `ring=` is set. The kernel holds the memory.
const COUNT: usize = 512;

/// A raw socket's receive ring for such frames.
pub(super) struct StackReceiver {
    ring: RxRing,
    fd: RawFd,
    /// The kernel has reported drops that are not counted yet.
    has_kernel_drops: bool,
    /// The warning about unicast frames that arrive this way.
    warning: SteeringWarning,
}

/// State of the warning about unicast frames, which the NIC could steer to the port's queues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SteeringWarning {
    None,
    Due,
    Logged,
}

impl StackReceiver {
    /// Sets up the raw socket `fd`, which has to outlive this, to receive frames to `station` of at
    /// most `frame_max` bytes.
    ///
    /// # Errors
    /// Those of the system calls.
    pub(super) fn new(
        fd: RawFd,
        link: &Link,
        settings: &XdpSettings,
        (station, frame_max): (Station, usize),
    ) -> io::Result<Self> {
        let accept = settings.accept;
        let has_nics_mac = station.mac == link.mac && accept != Accept::All;
        let program = filter::frames(ETHERTYPE, accept.filter(station), (None, has_nics_mac));
        filter::attach(fd, program)?;
        let count = settings.ring_count.unwrap_or(COUNT);
        let ring = RxRing::new(fd, frame_max, Some(count), None)?;
        filter::bind(fd, link, ETHERTYPE)?;
        Ok(Self { ring, fd, has_kernel_drops: false, warning: SteeringWarning::None })
    }

    /// Lends at most `max` frames, and returns their number. An empty poll costs one load.
    #[inline]
    pub(super) fn lend(
        &mut self,
        max: usize,
        sink: &mut dyn RxSink,
        counters: &mut PortCounters,
    ) -> usize {
        let mut count = 0;
        while count < max {
            let lost = match self.ring.peek() {
                Slot::Empty => break,
                Slot::Rejected { lost } => {
                    counters.rx_dropped += 1;
                    lost
                }
                Slot::Frame { start, len, lost } => {
                    let frame = self.ring.frame(start, len);
                    if self.warning == SteeringWarning::None
                        && frame.first_chunk().is_some_and(|[first]: [u8; 1]| first & 1 == 0)
                    {
                        self.warning = SteeringWarning::Due;
                    }
                    sink.frame(&frame);
                    counters.received(len);
                    lost
                }
            };
            self.has_kernel_drops |= lost;
            // Rejected frames count too: a sender of such frames must not keep this loop busy.
            count += 1;
            let offset = self.ring.advance();
            self.ring.release(offset);
        }
        count
    }

    /// Frames that found no room since the last call. A system call if there are some.
    pub(super) fn lost(&mut self) -> u64 {
        if std::mem::take(&mut self.has_kernel_drops) { ring::lost(self.fd) } else { 0 }
    }

    /// Whether the first unicast frame has arrived. True once.
    pub(super) fn take_warning(&mut self) -> bool {
        let is_due = self.warning == SteeringWarning::Due;
        if is_due {
            self.warning = SteeringWarning::Logged;
        }
        is_due
    }
}
