//! Frames for a port that arrive by a queue of another process, or of nobody.
//!
//! A socket only hears the queue that it is bound to, and the NIC draws the queue. So the program
//! of a queue passes on what is for another station, and what is for a group, and a port that has
//! not all queues hears these from the kernel's stack: by a raw socket, at the price of
//! [`afpacket`](crate::backend::afpacket). Where the NIC is told to lead a port's frames to its
//! queues, nothing comes this way.

use std::io;
use std::os::fd::RawFd;

use super::super::netdev::ring::{self, RxRing, Slot};
use super::super::netdev::{Accept, Link, filter};
use super::XdpSettings;
use crate::frame::ETHERTYPE;
use crate::port::{PortCounters, RxSink, Station};

/// Frames that can wait, unless `ring=` says otherwise. The kernel holds the memory.
const COUNT: usize = 512;

/// What hears them.
pub(super) struct Strays {
    ring: RxRing,
    fd: RawFd,
    /// The kernel said that it lost frames.
    is_losing: bool,
    /// One to a station has come; it has been told.
    news: News,
}

/// What is known of frames to a station, which do not have to come this way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum News {
    None,
    Come,
    Told,
}

impl Strays {
    /// Has the raw socket `fd`, which has to stay open as long as this, hear frames to `station` of
    /// `frame_max` bytes at most.
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
        let program = filter::of_station(ETHERTYPE, accept.filter(station), (None, has_nics_mac));
        filter::attach(fd, program)?;
        let count = settings.ring_count.unwrap_or(COUNT);
        let ring = RxRing::new(fd, frame_max, Some(count), None)?;
        filter::bind(fd, link, ETHERTYPE)?;
        Ok(Self { ring, fd, is_losing: false, news: News::None })
    }

    /// Lends `max` frames at most, and says how many. A poll that finds none is one load.
    #[inline]
    pub(super) fn lend(
        &mut self,
        max: usize,
        sink: &mut dyn RxSink,
        counters: &mut PortCounters,
    ) -> usize {
        let mut count = 0;
        while count < max {
            let lost = match self.ring.look() {
                Slot::Empty => break,
                Slot::Unfit { lost } => {
                    counters.rx_dropped += 1;
                    lost
                }
                Slot::Frame { start, len, lost } => {
                    let frame = self.ring.frame(start, len);
                    if self.news == News::None
                        && frame.first_chunk().is_some_and(|[first]: [u8; 1]| first & 1 == 0)
                    {
                        self.news = News::Come;
                    }
                    sink.frame(&frame);
                    counters.received(len);
                    lost
                }
            };
            self.is_losing |= lost;
            // One that is not lent counts too: a sender who does nothing else must not keep us.
            count += 1;
            let offset = self.ring.advance();
            self.ring.give_back(offset);
        }
        count
    }

    /// Frames that found no room since the last call.
    pub(super) fn lost(&mut self) -> u64 {
        if std::mem::take(&mut self.is_losing) { ring::lost(self.fd) } else { 0 }
    }

    /// Whether, for the first time, one to a station has come.
    pub(super) fn is_news(&mut self) -> bool {
        let is_news = self.news == News::Come;
        if is_news {
            self.news = News::Told;
        }
        is_news
    }
}
