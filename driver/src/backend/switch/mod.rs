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
//! are copied before they are looked at, what follows is never looked at.
//!
//! Processes of the switch's own user join its segment by the file's name, and can harm it as they
//! can by a signal. Those of other users ask at a socket ([`Switch::serve`]) and get a segment of
//! their user's own, in memory without a name that cannot be made shorter. Nothing in there is
//! believed: which addresses a user has is the switch's own knowledge, whatever the segment says,
//! and what costs system calls is done a few times a turn. So processes of one user can harm each
//! other, and nobody else.

mod addresses;
mod door;
mod greeting;
mod guest;
mod guests;
mod left;
mod line;
mod port;
mod reserved;

#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use crate::backend::any_port::AnyPort;
use crate::backend::frame_queue::FrameQueue;
use crate::backend::shm::{self, LOOK, NO_BELL, ShmPort, ShmSettings, Uplink};
use crate::backend::{readable, sleep};
use crate::error::{OPEN_FILES, OpenError};
use crate::frame::{
    Body, DST_NUMBER_AT, ETH_HDR_LEN, ETHERTYPE, FRAME_MIN, RxFrame, SRC_NUMBER_AT, TxFrame,
    word_at,
};
use crate::port::{Port, PortCaps, PortCounters, PortGone, PortWaiter, Station, Tx};

pub use door::{GUESTS_MAX, Guests};
pub use guest::{RUN_DIR, socket_in};
pub use port::SwitchedPort;

use addresses::{Addresses, Owner};
use door::{Door, OTHERS};
use guests::Lobby;
use reserved::Reserved;

/// Frames moved at once in one direction.
const BURST: usize = 64;
/// Bytes of a frame that are copied before they are looked at: what a frame of the fabric has at
/// least, its Ethernet header, prologue and base.
const HEAD_LEN: usize = FRAME_MIN;
/// Sleeps in a row without a frame after which the next ones are long.
const QUIET: u32 = 16;
/// Turns between two looks at who comes and goes.
const ATTEND_EVERY: u32 = 1024;

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
    /// that the NIC knows no way for. And frames of a station that has left or, where users are
    /// [apart](Switch::serve), to another user's. Dropped.
    pub unknown: u64,
    /// Frames to a station whose ring was full, and to a group while the NIC was: dropped.
    pub full: u64,
}

/// What a switch counted of one station.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StationCounters {
    /// Its address.
    pub station: Station,
    /// Its process: as numbered where it lives, or of another user as numbered here.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
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

/// A segment that a switch is in.
struct Stations {
    port: ShmPort,
    bell: shm::Bell,
    uid: u32,
    /// Copies made of frames to groups that its turns have yet to pay for, [`BURST`] a turn.
    owed: usize,
}

impl Stations {
    fn new(port: ShmPort, uid: u32, epoll: &Epoll) -> Result<Self, OpenError> {
        let bell = port.bell()?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, OTHERS);
        let no_bell = |e| OpenError::os(NO_BELL, port.path(), e, OPEN_FILES);
        epoll.add(bell.fd(), event).map_err(no_bell)?;
        Ok(Self { port, bell, uid, owed: 0 })
    }
}

/// See the module's documentation.
pub struct Switch {
    /// That of its own user, then those of others.
    segments: Vec<Stations>,
    /// The segment whose turn it is.
    next: usize,
    lobby: Option<Lobby>,
    /// What its segments are made from.
    settings: ShmSettings,
    uplink: Uplink,
    /// Whether users do not reach each other.
    is_apart: bool,
    nic: AnyPort,
    /// Whether frames are [shown](Self::record).
    is_recorded: bool,
    /// Longest frame that both sides carry.
    frame_max: usize,
    /// Frames that the NIC had no room for.
    held: FrameQueue,
    /// Frames from one station to another, until the rings can be written.
    turning: FrameQueue,
    counters: SwitchCounters,
    /// The epoch of its own user's segment when `here` was renewed.
    epoch: u64,
    here: Addresses,
    turns: u32,
    /// Sleeps since the last frame.
    quiet: u32,
    waiter: Option<Arc<dyn PortWaiter>>,
    /// What it sleeps on besides the NIC.
    epoll: Epoll,
}

impl Switch {
    /// Makes a switch of a NIC and a segment. The NIC takes frames to every number behind its
    /// address. Stations of another address are reached if it takes frames to all (promiscuous).
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(segment: &ShmSettings, nic: Box<dyn Port>) -> Result<Self, OpenError> {
        let PortCaps { mtu, rto_floor_ns, link_bps, lossless, station, via_kernel, .. } =
            *nic.caps();
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
            via_kernel,
            link_bps,
            mac: station.mac,
        };
        let port = ShmPort::open_switch(segment, uplink)?;
        let no_epoll = |e| OpenError::os("cannot watch", port.path(), e, OPEN_FILES);
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).map_err(no_epoll)?;
        // What either side carries.
        let frame_max = ETH_HDR_LEN + mtu.min(port.caps().mtu);
        let own = Stations::new(port, nix::unistd::geteuid().as_raw(), &epoll)?;
        Ok(Self {
            segments: vec![own],
            next: 0,
            lobby: None,
            settings: segment.clone(),
            uplink,
            is_apart: false,
            waiter: nic.waiter(),
            nic: AnyPort::from(nic),
            is_recorded: false,
            frame_max,
            held: FrameQueue::new(2 * BURST, frame_max),
            turning: FrameQueue::new(BURST, frame_max),
            counters: SwitchCounters::default(),
            epoch: u64::MAX,
            here: Addresses::default(),
            turns: 0,
            quiet: 0,
            epoll,
        })
    }

    /// Serves processes of other users too, which ask at `socket`, `per_user` of each user at most
    /// and never more than [`GUESTS_MAX`]. They reach those of any user, as on a wire, unless users
    /// are to be kept `apart`.
    ///
    /// # Errors
    /// [`OpenError`]: the socket cannot be made.
    pub fn serve(
        &mut self,
        socket: &Path,
        guests: Guests,
        apart: bool,
        per_user: usize,
    ) -> Result<(), OpenError> {
        self.is_apart = apart;
        if guests != Guests::None {
            // First: while the door replaces a dead one's socket there is none beside the record.
            let reserved = Reserved::read(socket);
            let door = Door::open(socket, guests, per_user, &self.epoll)?;
            self.lobby = Some(Lobby::new(reserved, door));
        }
        Ok(())
    }

    /// The segment that stations of its own user are in, as a port's name.
    pub fn segment(&self) -> &str {
        &self.segments[0].port.caps().name
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

    /// Shows what goes to the NIC, comes from it, and passes between stations to who records it in
    /// `segment`: as [`AnyPort::record`].
    ///
    /// # Errors
    /// As there.
    pub fn record(&mut self, segment: &ShmSettings) -> Result<bool, OpenError> {
        self.is_recorded = false;
        self.is_recorded = self.nic.record(segment)?;
        Ok(self.is_recorded)
    }

    /// What was counted of each station that is here now.
    pub fn stations(&self) -> Vec<StationCounters> {
        let own = self.segments[0].port.stations().map(|(station, pid)| (station, pid, 0));
        let guests = self.lobby.iter().flat_map(|lobby| lobby.stations(&self.segments));
        let of = |(station, pid, i): (Station, u32, usize)| {
            let Stations { port, uid, .. } = &self.segments[i];
            let (received, sent) = port.traffic(station).unwrap_or_default();
            let frames = self.here.frames(station.word());
            StationCounters { station, pid, uid: *uid, sent, received, frames }
        };
        own.chain(guests).map(of).collect()
    }

    /// Forwards what waits, a burst in each direction of each segment, and says how many frames
    /// that were. Never blocks; allocates when somebody comes or goes.
    ///
    /// # Errors
    /// [`PortGone`]: the NIC has.
    pub fn turn(&mut self) -> Result<usize, PortGone> {
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(ATTEND_EVERY) {
            self.attend();
        }
        let epoch = self.segments[0].port.epoch();
        if epoch != self.epoch {
            self.epoch = epoch;
            self.renew();
        }
        let moved = self.upward()? + self.downward()?;
        if moved > 0 {
            self.quiet = 0;
        }
        Ok(moved)
    }

    /// Sleeps until there may be something to forward, or for `timeout`. A frame that wakes nobody
    /// waits for a millisecond or, while none has come for 16 sleeps, for `timeout`: one whose
    /// sender was killed before it rang, that of the first to ring in vain, or one whose sender
    /// read early that we are awake, and stood still.
    pub fn sleep(&mut self, timeout: Duration) {
        self.quiet = self.quiet.saturating_add(1);
        let until = Instant::now() + timeout;
        // Who did not see us lie down has been seen by now.
        if !self.nap(timeout.min(LOOK)) && self.may_oversleep() {
            let is_missed = self.segments.iter_mut().any(|of| of.port.look_everywhere());
            if !is_missed {
                self.nap(until.saturating_duration_since(Instant::now()));
            }
        }
        self.segments.iter().for_each(|of| of.bell.get_up());
        self.attend();
    }

    /// Whether all that comes wakes us, as far as is known ([`shm::Bell::is_deaf`]).
    fn may_oversleep(&self) -> bool {
        let is_deaf = self.segments.iter().any(|of| of.bell.is_deaf());
        // Nobody tells that the NIC has room again.
        self.quiet > QUIET && self.waiter.is_some() && self.held.is_empty() && !is_deaf
    }

    /// Lies down for `timeout` at most, and says whether anything but time has passed. Who sends
    /// rings from then on, until we get up.
    fn nap(&self, timeout: Duration) -> bool {
        // All of them: each sees what the others' stations do only when it is asked.
        let waiting = self.segments.iter().filter(|of| of.bell.lie_down()).count();
        waiting > 0
            || match &self.waiter {
                Some(waiter) => waiter.wait_or(Some(self.epoll.0.as_fd()), timeout),
                None => sleep(&mut [readable(self.epoll.0.as_raw_fd())], timeout),
            }
    }

    /// Lets stations of other users come and go.
    fn attend(&mut self) {
        let Self { lobby: Some(lobby), segments, epoll, settings, uplink, nic, .. } = self else {
            return;
        };
        let nic = nic.caps().station.mac;
        if lobby.attend(segments, epoll, &guests::House { settings, uplink: *uplink, nic }) {
            self.next = 0;
            self.renew();
        }
    }

    /// Reads anew who is where.
    fn renew(&mut self) {
        let owner = |segment: usize| Owner { segment, uid: self.segments[segment].uid };
        let own = self.segments[0].port.stations().map(|(station, _)| (station, owner(0)));
        let guests = self.lobby.iter().flat_map(|lobby| lobby.stations(&self.segments));
        // Of one address that two have, it is a guest's: that is not what the segment says alone.
        let all = guests.map(|(station, _, i)| (station, owner(i))).chain(own);
        let all: Vec<_> = all.collect();
        self.here.renew(&all);
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
        for _ in 0..self.segments.len() {
            if !self.held.is_empty() {
                break;
            }
            let i = self.next;
            self.next = (i + 1) % self.segments.len();
            // Whose frames went to everybody lets the others go first, for as long as that took.
            let owed = std::mem::take(&mut self.segments[i].owed);
            if owed > 0 {
                self.segments[i].owed = owed.saturating_sub(BURST);
                continue;
            }
            let taken = self.take_burst(i)?;
            if taken > 0 {
                self.between(i)?;
            }
            moved += taken;
        }
        if moved > 0 {
            self.nic.flush()?;
        }
        Ok(moved)
    }

    /// A burst of frames from one segment, to the NIC or to where they turn.
    fn take_burst(&mut self, i: usize) -> Result<usize, PortGone> {
        let Self { segments, nic, held, turning, counters, here, frame_max, .. } = self;
        let (is_apart, is_recorded) = (self.is_apart, self.is_recorded);
        let Stations { port, uid, owed, .. } = &mut segments[i];
        let copies = here.count();
        let mut gone = None;
        let moved = port.receive_from(BURST, |sender, frame| {
            let (owner, of_sender) = here.look(sender);
            // In the segment of its own user, a station is who it says.
            if owner.is_some_and(|owner| owner.segment != i) {
                counters.spoofed += 1;
                return;
            }
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
            // One of another user has to be known.
            if i > 0 && owner.is_none() {
                counters.unknown += 1;
                return;
            }
            of_sender.sent += 1;
            let out = forwarded(&head, frame);
            if let Some(to) = here.owner(dst) {
                match is_apart && to.uid != *uid {
                    true => counters.unknown += 1,
                    false => hold(turning, &out),
                }
                return;
            }
            if dst & GROUP != 0 {
                hold(turning, &out);
                *owed += if i > 0 { copies } else { 0 };
            }
            if gone.is_some() {
                return;
            }
            match if held.is_empty() { nic.tx(&out) } else { Ok(Tx::Full) } {
                Ok(Tx::Sent) => counters.to_nic += 1,
                // Who looks for a server by its name asks again; and stations reach each other
                // while the NIC leads nowhere.
                Ok(refused) if dst & GROUP != 0 => {
                    match refused {
                        Tx::Full => counters.full += 1,
                        _ => counters.unknown += 1,
                    }
                    if is_recorded {
                        nic.show(&out);
                    }
                }
                Ok(Tx::NoRoute) => counters.unknown += 1,
                // Twice a burst fits, and no more is read until it is empty.
                Ok(Tx::Full) => hold(held, &out),
                Err(why) => gone = Some(why),
            }
        });
        gone.map_or(Ok(moved), Err)
    }

    /// From a station of segment `from` to another, or to all that it reaches.
    fn between(&mut self, from: usize) -> Result<(), PortGone> {
        while let Some(bytes) = self.turning.first() {
            // As long as a head: it was forwarded.
            let dst = bytes.first_chunk().map_or(0, |head| addresses(head)[0]);
            let (owner, of_receiver) = self.here.look(dst);
            let frame = TxFrame::whole(bytes);
            let is_for_all = dst & GROUP != 0;
            if owner.is_none() && is_for_all {
                let reached = if self.is_apart { from..from + 1 } else { 0..self.segments.len() };
                for of in &mut self.segments[reached] {
                    of.port.tx(&frame)?;
                }
                self.counters.between += 1;
                self.turning.drop_first();
                continue;
            }
            let to = owner.map_or(0, |owner| owner.segment);
            match self.segments[to].port.tx(&frame)? {
                Tx::Sent => {
                    if self.is_recorded {
                        self.nic.show(&frame);
                    }
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
        Ok(())
    }

    /// From the NIC.
    fn downward(&mut self) -> Result<usize, PortGone> {
        let Self { segments, nic, counters, here, frame_max, .. } = self;
        let mut sink = |frame: &RxFrame<'_>| {
            let Some(head) = head_of(frame, *frame_max) else {
                counters.malformed += 1;
                return;
            };
            let dst = addresses(&head)[0];
            let (owner, of_receiver) = here.look(dst);
            let out = forwarded(&head, frame);
            if owner.is_none() && dst & GROUP != 0 {
                // What some do not get is lost, as on a wire.
                segments.iter_mut().for_each(|of| drop(of.port.tx(&out)));
                counters.from_nic += 1;
                return;
            }
            // Stations that came just now are of its own user.
            let to = owner.map_or(0, |owner| owner.segment);
            match segments[to].port.tx(&out) {
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
        for of in &mut self.segments {
            of.port.flush()?;
        }
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

/// Puts a frame to those that wait.
///
/// # Panics
/// If there is no room for one more.
fn hold(held: &mut FrameQueue, frame: &TxFrame<'_>) {
    assert!(held.push(frame), "no burst is taken that does not fit");
}

/// Of an address as it lies in a frame: it is a group's.
const GROUP: u64 = 1;

/// Destination and source of a frame, as [`Station::word`] has them.
fn addresses(head: &[u8; HEAD_LEN]) -> [u64; 2] {
    [word_at(head, 0, DST_NUMBER_AT), word_at(head, 6, SRC_NUMBER_AT)]
}
