//! A switch between the processes of a node and a NIC that one process has to own.
//!
//! The [`Switch`] owns the NIC and is the switch of a segment of shared memory. Its stations
//! ([`SwitchedPort`]) send everything to it; it forwards to the NIC what is for others, and to a
//! station what comes for that. The frame is copied from the sender's ring to where the NIC reads
//! it, and from where the NIC wrote it to the receiver's ring.
//!
//! # What it promises
//! What a wire does. A frame that the NIC has no room for is kept, and rings are read no further
//! until it has left, so senders feel a slow link as a full ring. A frame to a station whose ring
//! is full is dropped: one that does not read holds up nobody. Rings are read by turns, a bounded
//! number of bytes at once.
//!
//! It has no state that a frame depends on. One that is killed and started again loses the frames
//! that were in its rings, and the fabric repeats those.
//!
//! # Trust
//! A station sends as itself: a frame with another source address than its own is dropped. Heads
//! are copied before they are looked at, what follows is never looked at. Who may write the
//! segment's file is another matter (its mode is 0600): processes of one user trust each other.

mod port;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

use crate::backend::any_port::AnyPort;
use crate::backend::shm::{self, LOOK, ShmPort, ShmSettings, Uplink};
use crate::error::OpenError;
use crate::frame::{Body, ETH_HDR_LEN, ETHERTYPE, RxFrame, TxFrame};
use crate::port::{MacAddr, Port, PortCaps, PortCounters, PortGone, PortWaiter, Tx};

pub use port::SwitchedPort;

/// Frames moved at once in one direction.
const BURST: usize = 64;
/// Bytes of a frame that are copied before they are looked at: what a frame of the fabric has at
/// least, its Ethernet header, prologue and base.
const HEAD_LEN: usize = 32;
/// Places for addresses of stations: four times as many as there are.
const PLACES: usize = 4096;

/// What a switch counted since it was started. Every frame that it was given has its place here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchCounters {
    /// Frames from stations that the NIC took.
    pub to_nic: u64,
    /// Frames from the NIC that a station got, or all, of a group's.
    pub from_nic: u64,
    /// Frames from one station to another.
    pub between: u64,
    /// Frames of a station with another's source address: dropped.
    pub spoofed: u64,
    /// Frames that are none of the fabric, or longer than the other side carries: dropped.
    pub malformed: u64,
    /// Frames to an address that nobody has: those from the NIC that are for no station, and those
    /// that the NIC knows no way for. Dropped.
    pub unknown: u64,
    /// Frames to a station whose ring was full: dropped.
    pub full: u64,
}

/// What a switch counted of one station.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StationCounters {
    /// Its address.
    pub mac: MacAddr,
    /// Its process, as numbered where it lives.
    pub pid: u32,
    /// Bytes that it sent, and what its ring puts around them.
    pub sent: u64,
    /// Bytes that it was sent, likewise.
    pub received: u64,
    /// Frames of it that were forwarded, and frames to it alone that it got.
    pub frames: StationFrames,
}

/// Frames of one station since it joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StationFrames {
    /// Frames of it that were taken, to wherever they went.
    pub sent: u64,
    /// Frames to it alone that it got.
    pub received: u64,
    /// Frames to it alone that its ring had no room for: dropped.
    pub full: u64,
    /// Frames of it with another's source address: dropped.
    pub spoofed: u64,
    /// Frames of it that are none of the fabric, or too long: dropped.
    pub malformed: u64,
}

/// See the module's documentation.
pub struct Switch {
    stations: ShmPort,
    nic: AnyPort,
    /// Longest frame that both sides carry.
    frame_max: usize,
    /// Frames that the NIC had no room for.
    held: Backlog,
    /// Frames from one station to another, until the rings can be written.
    turning: Backlog,
    counters: SwitchCounters,
    here: Addresses,
    waiter: Option<Arc<dyn PortWaiter>>,
    bell: shm::Bell,
}

impl Switch {
    /// Makes a switch of a NIC and a segment. The NIC takes frames to every address
    /// (promiscuous), or stations that have another than its own are not reached.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(segment: &ShmSettings, nic: Box<dyn Port>) -> Result<Self, OpenError> {
        let PortCaps { mtu, rto_floor_ns, link_bps, lossless, .. } = *nic.caps();
        if lossless {
            return Err(OpenError::BadSpec {
                spec: nic.caps().name.clone(),
                why: "a switch may lose frames; leave out lossless=yes, at the other end too"
                    .into(),
            });
        }
        let uplink = Uplink {
            mtu: mtu as u32,
            rto_floor_us: i32::try_from(rto_floor_ns / 1000).unwrap_or(i32::MAX) as u32,
            damages: nic.damages(),
            link_bps,
        };
        let stations = ShmPort::open_switch(segment, uplink)?;
        let bell = stations.bell().map_err(|source| OpenError::Os {
            what: "cannot make a socket to sleep on for",
            path: stations.path().into(),
            source,
            hint: "; raise the limit on open files: ulimit -n 65536",
        })?;
        // What either side carries.
        let frame_max = ETH_HDR_LEN + mtu.min(stations.caps().mtu);
        Ok(Self {
            stations,
            waiter: nic.waiter(),
            nic: AnyPort::from(nic),
            frame_max,
            held: Backlog::new(2 * BURST, frame_max),
            turning: Backlog::new(BURST, frame_max),
            counters: SwitchCounters::default(),
            here: Addresses::default(),
            bell,
        })
    }

    /// The segment that its stations are in, as a port's name.
    pub fn segment(&self) -> &str {
        &self.stations.caps().name
    }

    /// The NIC.
    pub fn nic(&self) -> &PortCaps {
        self.nic.caps()
    }

    /// What the NIC's port counted.
    pub fn nic_counters(&self) -> PortCounters {
        self.nic.counters()
    }

    /// What was counted.
    pub fn counters(&self) -> SwitchCounters {
        self.counters
    }

    /// What was counted of each station that is here now.
    pub fn stations(&self) -> Vec<StationCounters> {
        let of = |(mac, pid)| {
            let (received, sent) = self.stations.traffic(mac).unwrap_or_default();
            let frames = self.here.frames(mac.frame_word());
            StationCounters { mac, pid, sent, received, frames }
        };
        self.stations.stations().map(of).collect()
    }

    /// Forwards what waits, a burst in each direction, and says how many frames that were. Never
    /// blocks or allocates.
    ///
    /// # Errors
    /// [`PortGone`]: the NIC has.
    pub fn turn(&mut self) -> Result<usize, PortGone> {
        Ok(self.upward()? + self.downward()?)
    }

    /// Sleeps until there may be something to forward, or for `timeout`.
    pub fn sleep(&self, timeout: Duration) {
        let timeout = timeout.min(LOOK);
        if !self.bell.lie_down() {
            match &self.waiter {
                Some(waiter) => {
                    waiter.wait_or(self.bell.fd(), timeout);
                }
                None => std::thread::sleep(timeout),
            }
        }
        self.bell.get_up();
    }

    /// Sends frames that the NIC had no room for, in order. Returns how many have gone; those that
    /// are left still find no room.
    fn send_held(&mut self) -> Result<usize, PortGone> {
        let mut gone = 0;
        while let Some(bytes) = self.held.first() {
            match self.nic.tx(&TxFrame::whole(bytes))? {
                Tx::Sent => self.counters.to_nic += 1,
                Tx::NoRoute => self.counters.unknown += 1,
                Tx::Full => {
                    self.nic.flush()?;
                    break;
                }
            }
            self.held.drop_first();
            gone += 1;
        }
        Ok(gone)
    }

    /// From the stations.
    fn upward(&mut self) -> Result<usize, PortGone> {
        let mut moved = self.send_held()?;
        if !self.held.is_empty() {
            return Ok(moved);
        }
        let Self { stations, nic, held, turning, counters, here, frame_max, .. } = self;
        here.refresh(stations);
        let mut gone = None;
        moved += stations.receive_from(BURST, |sender, frame| {
            let of_sender = here.frames_mut(sender);
            let Some(head) = head_of(frame, *frame_max) else {
                counters.malformed += 1;
                of_sender.malformed += 1;
                return;
            };
            let [dst, src] = addresses(&head);
            if src != sender {
                counters.spoofed += 1;
                of_sender.spoofed += 1;
                return;
            }
            of_sender.sent += 1;
            let out = forwarded(&head, frame);
            if here.has(dst) || dst & GROUP != 0 {
                turning.push(&out);
                if dst & GROUP == 0 {
                    return;
                }
            }
            if gone.is_some() {
                return;
            }
            match if held.is_empty() { nic.tx(&out) } else { Ok(Tx::Full) } {
                Ok(Tx::Sent) => counters.to_nic += 1,
                Ok(Tx::NoRoute) => counters.unknown += 1,
                // Twice a burst fits, and no more is read until it is empty.
                Ok(Tx::Full) => held.push(&out),
                Err(why) => gone = Some(why),
            }
        });
        if let Some(gone) = gone {
            return Err(gone);
        }
        while let Some(bytes) = self.turning.first() {
            // As long as a head: it was forwarded.
            let dst = bytes.first_chunk().map_or(0, |head| addresses(head)[0]);
            let of_receiver = self.here.frames_mut(dst);
            match self.stations.tx(&TxFrame::whole(bytes))? {
                Tx::Sent => {
                    self.counters.between += 1;
                    of_receiver.received += 1;
                }
                Tx::Full => {
                    self.counters.full += 1;
                    of_receiver.full += 1;
                }
                Tx::NoRoute => self.counters.unknown += 1,
            }
            self.turning.drop_first();
        }
        if moved > 0 {
            self.nic.flush()?;
        }
        Ok(moved)
    }

    /// From the NIC.
    fn downward(&mut self) -> Result<usize, PortGone> {
        let Self { stations, nic, counters, here, frame_max, .. } = self;
        let mut sink = |frame: &RxFrame<'_>| {
            let Some(head) = head_of(frame, *frame_max) else {
                counters.malformed += 1;
                return;
            };
            let of_receiver = here.frames_mut(addresses(&head)[0]);
            match stations.tx(&forwarded(&head, frame)) {
                Ok(Tx::Sent) => {
                    counters.from_nic += 1;
                    of_receiver.received += 1;
                }
                Ok(Tx::Full) => {
                    counters.full += 1;
                    of_receiver.full += 1;
                }
                Ok(Tx::NoRoute) | Err(_) => counters.unknown += 1,
            }
        };
        let moved = nic.rx_burst(BURST, &mut sink)?;
        self.stations.flush()?;
        Ok(moved)
    }
}

/// Copies what is looked at of a frame of the fabric that is no longer than `frame_max`.
fn head_of(frame: &RxFrame<'_>, frame_max: usize) -> Option<[u8; HEAD_LEN]> {
    let head: [u8; HEAD_LEN] = frame.first_chunk()?;
    let is_ours = head[12..ETH_HDR_LEN] == ETHERTYPE.to_be_bytes() && frame.len() <= frame_max;
    is_ours.then_some(head)
}

fn forwarded<'a>(head: &'a [u8; HEAD_LEN], frame: &'a RxFrame<'a>) -> TxFrame<'a> {
    TxFrame { head, body: Body::Frame { frame, offset: HEAD_LEN }, tail: &[] }
}

/// Of an address as it lies in a frame: it is a group's.
const GROUP: u64 = 1;

/// Destination and source of a frame, as [`MacAddr::frame_word`] has them.
fn addresses(head: &[u8; HEAD_LEN]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, ..] = *head;
    [MacAddr([a, b, c, d, e, f]), MacAddr([g, h, i, j, k, l])].map(MacAddr::frame_word)
}

/// The stations' addresses, and what was counted of each.
struct Addresses {
    /// Of the segment when they were read.
    epoch: u64,
    /// Each at the first free place from its own on; 0 for none, which no station has.
    places: Box<[u64; PLACES]>,
    /// Of the station in each place; the last is of addresses that no station has.
    frames: Box<[StationFrames]>,
    /// The address looked for last, and its place.
    last: (u64, usize),
}

impl Default for Addresses {
    fn default() -> Self {
        // No segment has that many changes.
        let frames = vec![StationFrames::default(); PLACES + 1].into_boxed_slice();
        Self { epoch: u64::MAX, places: Box::new([0; PLACES]), frames, last: (0, PLACES) }
    }
}

impl Addresses {
    /// Reads them anew, if a station came or went.
    #[inline]
    fn refresh(&mut self, stations: &ShmPort) {
        let epoch = stations.epoch();
        if epoch == self.epoch {
            return;
        }
        self.epoch = epoch;
        let were: Vec<_> = self.places.iter().copied().zip(self.frames.iter().copied()).collect();
        self.places.fill(0);
        self.frames.fill(StationFrames::default());
        self.last = (0, PLACES);
        for (mac, _) in stations.stations() {
            let key = mac.frame_word();
            let free = self.from(key).find(|&i| self.places[i] == 0);
            let free = free.expect("four places for each");
            self.places[free] = key;
            let known = were.iter().find(|(was, _)| *was == key);
            self.frames[free] = known.map_or_else(StationFrames::default, |(_, frames)| *frames);
        }
    }

    fn has(&self, key: u64) -> bool {
        self.place(key) < PLACES
    }

    /// What was counted of a station.
    fn frames(&self, key: u64) -> StationFrames {
        self.frames[self.place(key)]
    }

    /// As [`frames`](Self::frames), to count: in vain if no station has the address.
    #[inline]
    fn frames_mut(&mut self, key: u64) -> &mut StationFrames {
        if self.last.0 != key {
            self.last = (key, self.place(key));
        }
        &mut self.frames[self.last.1]
    }

    /// The place of an address; [`PLACES`] if no station has it.
    fn place(&self, key: u64) -> usize {
        let ended = self.from(key).find(|&i| self.places[i] == key || self.places[i] == 0);
        ended.filter(|&i| self.places[i] == key && key != 0).unwrap_or(PLACES)
    }

    /// The places from that of `key` on.
    fn from(&self, key: u64) -> impl Iterator<Item = usize> + use<> {
        let first = (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - PLACES.ilog2())) as usize;
        (first..first + PLACES).map(|i| i % PLACES)
    }
}

/// Frames that wait, in memory of the switch's own.
struct Backlog {
    places: Box<[(usize, Box<[u8]>)]>,
    first: usize,
    count: usize,
}

impl Backlog {
    /// Room for `count` frames of `len` bytes.
    fn new(count: usize, len: usize) -> Self {
        let place = || (0, vec![0; len].into_boxed_slice());
        Self { places: (0..count).map(|_| place()).collect(), first: 0, count: 0 }
    }

    fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// # Panics
    /// If there is no room for one more, or the frame is longer than a place.
    fn push(&mut self, frame: &TxFrame<'_>) {
        assert!(self.count < self.places.len());
        let at = (self.first + self.count) % self.places.len();
        let (len, bytes) = &mut self.places[at];
        *len = frame.copy_to(bytes);
        self.count += 1;
    }

    fn first(&self) -> Option<&[u8]> {
        let (len, bytes) = &self.places[self.first];
        (self.count > 0).then(|| &bytes[..*len])
    }

    fn drop_first(&mut self) {
        self.first = (self.first + 1) % self.places.len();
        self.count -= 1;
    }
}
