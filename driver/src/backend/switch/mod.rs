//! A software switch between the processes of a node and a NIC that one process has to own.
//!
//! The [`Switch`] owns the NIC and joins a shared-memory segment in the role of its switch.
//! Stations ([`SwitchedPort`]) send every frame to the switch. It forwards frames for other nodes
//! to the NIC, and frames from the NIC to the station with the destination address. A frame is
//! copied once each way: from the sender's ring to the NIC's buffer, and from the NIC's buffer to
//! the receiver's ring.
//!
//! # Service
//! That of a wire. A frame that the NIC has no room for is kept, and no ring is read until it has
//! left, so senders see a slow link as a full ring. A frame to a station whose ring is full is
//! dropped: a station that does not read holds up no other. Segments are served round robin, a
//! bounded number of bytes at a time.
//!
//! The switch has no state that a frame depends on. A restart loses the frames in its rings, which
//! the fabric retransmits. A process that outlives its switch may be of another build than the next
//! one. If their segments differ in layout, its frames pass its connection (`relays`).
//!
//! # Trust
//! A frame whose source address is not its station's is dropped. A frame's head is copied before it
//! is checked; the bytes behind the head are never read.
//!
//! Processes of the switch's own user join its segment by the file's name, and can harm the switch
//! as they can by a signal. Processes of other users attach through a socket ([`Switch::serve`])
//! and get a segment for their user alone, in a sealed memfd. The switch trusts nothing in there:
//! it keeps each user's addresses itself, whatever the segment says, and makes a bounded number of
//! system calls per turn for the segment. So processes of one user can harm each other, and no
//! other user's.

mod attach;
mod clients;
mod forwarding;
mod handshake;
mod listener;
pub(super) mod port;
mod reattach;
mod relayed;
mod relays;
mod reserved;
mod stale;

#[cfg(test)]
mod tests;

use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags};

use crate::backend::any_port::AnyPort;
use crate::backend::frame_queue::FrameQueue;
use crate::backend::shm::{self, NO_WAKE_SOCKET, RECHECK, ShmPort, ShmSettings, Uplink};
use crate::backend::{readable, sleep};
use crate::error::{OPEN_FILES, OpenError};
use crate::frame::{
    Body, DST_NUMBER_AT, ETH_HDR_LEN, ETHERTYPE, FRAME_MIN, RxFrame, SRC_NUMBER_AT, TxFrame,
    word_at,
};
use crate::port::{Port, PortCaps, PortCounters, PortGone, PortWaiter, Station, Tx};

pub(crate) use attach::listener_pid;
pub use attach::{RUN_DIR, socket_in};
pub use listener::{CLIENTS_MAX, OwnSocket, ServedUsers};
pub use port::SwitchedPort;

use clients::Clients;
use forwarding::{ForwardingTable, Owner};
use listener::NOT_A_CLIENT;
use relays::Relays;
use reserved::Reserved;

/// Frames moved at once in one direction.
const BURST: usize = 64;
/// Frames of a ring that take as long as the system call for a relayed one.
const RELAYED_COST: usize = 4;
/// Bytes of a frame that are copied before they are checked: the fabric's shortest frame, which is
/// its Ethernet header, prologue and base.
const HEAD_LEN: usize = FRAME_MIN;
/// Consecutive sleeps without a frame before the switch sleeps for the full timeout.
const IDLE_SLEEPS: u32 = 16;
/// Turns between two calls of `housekeep`.
const HOUSEKEEPING_EVERY: u32 = 1024;

/// Counters of a switch since its start. Every received frame is in exactly one of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SwitchCounters {
    /// Frames from stations that the NIC took.
    pub to_nic: u64,
    /// Frames from the NIC that a station received; for a group address, all stations.
    pub from_nic: u64,
    /// Frames from one station to another.
    pub between: u64,
    /// Frames whose source address is not the sending station's: dropped.
    pub spoofed: u64,
    /// Frames without the fabric's EtherType, or longer than the other side carries: dropped.
    pub malformed: u64,
    /// Frames to an unknown address: from the NIC for no station, or to the NIC without a route.
    /// Also frames of a station that has left and, where users are [apart](Switch::serve), frames
    /// to another user's station. Dropped.
    pub unknown: u64,
    /// Frames to a station whose ring was full, and to a group while the NIC was full: dropped.
    pub full: u64,
}

/// Counters of one station behind a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StationCounters {
    /// Its address.
    pub station: Station,
    /// Its process: in the process's own pid namespace or, for another user, in the switch's.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Ring bytes from the station: frames, length words and padding. Of a relayed one: frames.
    pub sent: u64,
    /// Ring bytes to the station, likewise.
    pub received: u64,
    /// Frames from the station, and unicast frames to it.
    pub frames: StationFrames,
    /// Whether its frames pass a socket: its process is of a build with another segment layout.
    pub is_relayed: bool,
}

/// Frames of one station since it joined.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StationFrames {
    /// Frames from the station that passed all checks, for any destination.
    pub sent: u64,
    /// Unicast frames that the station received.
    pub received: u64,
    /// Unicast frames that its ring had no room for: dropped.
    pub full: u64,
    /// Frames from the station with another source address: dropped.
    pub spoofed: u64,
    /// Frames from the station without the fabric's EtherType, or too long: dropped.
    pub malformed: u64,
}

/// The switch's port on one segment: that of its own user, or that of a user it serves.
struct SegmentPort {
    port: ShmPort,
    bell: shm::WakeSocket,
    uid: u32,
    /// Stations of the user whose frames pass their connections; `None` until there is one.
    relays: Option<Relays>,
    /// Copies made of this segment's group frames, and the cost of relayed ones, that are not yet
    /// charged to its turns, each of which pays for [`BURST`] (as in deficit round robin).
    debt: usize,
}

impl SegmentPort {
    fn new(port: ShmPort, uid: u32, epoll: &Epoll) -> Result<Self, OpenError> {
        let bell = port.wake_socket()?;
        let event = EpollEvent::new(EpollFlags::EPOLLIN, NOT_A_CLIENT);
        let no_socket = |e| OpenError::os(NO_WAKE_SOCKET, port.path(), e, OPEN_FILES);
        epoll.add(bell.fd(), event).map_err(no_socket)?;
        Ok(Self { port, bell, uid, relays: None, debt: 0 })
    }

    /// The relays, made at the first call.
    fn relays(&mut self, frame_max: usize, epoll: &Epoll) -> Option<&mut Relays> {
        if self.relays.is_none() {
            self.relays = Relays::new(frame_max, epoll).ok();
        }
        self.relays.as_mut()
    }

    /// Receives frames, each with its sender's address: up to [`BURST`], half of which relayed
    /// stations may have. Those are charged to later turns.
    fn receive_from(&mut self, mut each: impl FnMut(u64, &RxFrame<'_>)) -> usize {
        let relayed = match &mut self.relays {
            Some(relays) => relays.receive_from(BURST / 2, &mut each),
            None => 0,
        };
        self.debt += relayed * RELAYED_COST;
        relayed + self.port.receive_from(BURST - relayed, each)
    }

    /// As [`Port::tx`].
    #[inline]
    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        if let Some(relays) = &mut self.relays {
            if frame.dst_word() & GROUP != 0 {
                relays.tx_group(frame);
            } else {
                let sent = relays.tx(frame);
                if sent != Tx::NoRoute {
                    return Ok(sent);
                }
            }
        }
        self.port.tx(frame)
    }
}

/// See the module's documentation.
pub struct Switch {
    /// First the segment of its own user, then one for each served user.
    segments: Vec<SegmentPort>,
    /// The segment whose turn it is.
    next: usize,
    clients: Option<Clients>,
    /// Settings that segments are made with.
    settings: ShmSettings,
    uplink: Uplink,
    /// Whether frames between stations of different users are dropped.
    isolates_users: bool,
    nic: AnyPort,
    /// Whether frames are [recorded](Self::record).
    is_recorded: bool,
    /// Longest frame that both sides carry.
    frame_max: usize,
    /// Frames that the NIC had no room for, in order.
    nic_queue: FrameQueue,
    /// Frames from one station to another, until the receivers' rings are written.
    local_queue: FrameQueue,
    counters: SwitchCounters,
    /// The epoch of its own user's segment at the last rebuild of `forwarding`.
    epoch: u64,
    forwarding: ForwardingTable,
    turns: u32,
    /// Sleeps since the last frame.
    idle_sleeps: u32,
    waiter: Option<Arc<dyn PortWaiter>>,
    /// Descriptors to sleep on besides the NIC: wake-up sockets, listener and connections.
    epoll: Epoll,
}

impl Switch {
    /// Makes a switch of a NIC and a segment. The NIC takes frames to every number behind its
    /// address. SegmentPort of another address are reached if it takes frames to all (promiscuous).
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
        let own = SegmentPort::new(port, nix::unistd::geteuid().as_raw(), &epoll)?;
        Ok(Self {
            segments: vec![own],
            next: 0,
            clients: None,
            settings: segment.clone(),
            uplink,
            isolates_users: false,
            waiter: nic.waiter(),
            nic: AnyPort::from(nic),
            is_recorded: false,
            frame_max,
            nic_queue: FrameQueue::new(2 * BURST, frame_max),
            local_queue: FrameQueue::new(BURST, frame_max),
            counters: SwitchCounters::default(),
            epoch: u64::MAX,
            forwarding: ForwardingTable::default(),
            turns: 0,
            idle_sleeps: 0,
            epoll,
        })
    }

    /// Serves processes of other users too, which attach at `socket`: at most `per_user` of each
    /// user, and never more than [`CLIENTS_MAX`]. They reach stations of all users, as on a wire,
    /// unless users are to be kept `apart`.
    ///
    /// # Errors
    /// [`OpenError`]: the socket cannot be made.
    pub fn serve(
        &mut self,
        socket: &Path,
        clients: ServedUsers,
        apart: bool,
        per_user: usize,
    ) -> Result<(), OpenError> {
        self.isolates_users = apart;
        if clients != ServedUsers::None {
            let all = self.clients.get_or_insert_with(Clients::new);
            // First: while the listener replaces a dead switch's socket, the record has no socket
            // beside it.
            all.reserved = Some(Reserved::read(socket));
            all.listener.open(socket, clients, per_user, &self.epoll)?;
        }
        Ok(())
    }

    /// Serves processes of its own user at `socket`: those of a build whose segments have another
    /// layout, through their connections.
    ///
    /// # Errors
    /// [`OpenError`]: the socket cannot be watched.
    pub fn serve_own(&mut self, socket: OwnSocket) -> Result<(), OpenError> {
        if socket.has_replaced {
            self.segments[0].port.skip_addresses();
        }
        let clients = self.clients.get_or_insert_with(Clients::new);
        clients.listener.add_own(socket, &self.epoll)
    }

    /// Port name of the segment of its own user, as `shm:NAME`.
    pub fn segment(&self) -> &str {
        &self.segments[0].port.caps().name
    }

    /// The NIC.
    pub fn nic(&self) -> &PortCaps {
        self.nic.caps()
    }

    /// Counters of the NIC's port.
    pub fn nic_counters(&self) -> PortCounters {
        self.nic.counters()
    }

    /// Counters since the start.
    pub fn counters(&self) -> SwitchCounters {
        self.counters
    }

    /// Records frames to the NIC, from the NIC and between stations to the monitors in `segment`:
    /// as [`AnyPort::record`].
    ///
    /// # Errors
    /// As there.
    pub fn record(&mut self, segment: &ShmSettings) -> Result<bool, OpenError> {
        self.is_recorded = false;
        self.is_recorded = self.nic.record(segment)?;
        Ok(self.is_recorded)
    }

    /// Counters of each current station.
    pub fn stations(&self) -> Vec<StationCounters> {
        let own = self.segments[0].port.stations().map(|(station, pid)| (station, pid, 0));
        let clients = self.clients.iter().flat_map(|clients| clients.stations(&self.segments));
        let of = |(station, pid, i): (Station, u32, usize)| {
            let SegmentPort { port, uid, relays, .. } = &self.segments[i];
            let relayed = relays.as_ref().and_then(|relays| relays.traffic(station));
            let (received, sent) = relayed.or_else(|| port.traffic(station)).unwrap_or_default();
            let (frames, is_relayed) = (self.forwarding.frames(station.word()), relayed.is_some());
            StationCounters { station, pid, uid: *uid, sent, received, frames, is_relayed }
        };
        own.chain(clients).map(of).collect()
    }

    /// Forwards up to a burst in each direction of each segment, and returns the number of frames.
    /// Never blocks; allocates when a station joins or leaves.
    ///
    /// # Errors
    /// [`PortGone`] of the NIC.
    pub fn turn(&mut self) -> Result<usize, PortGone> {
        self.turns = self.turns.wrapping_add(1);
        if self.turns.is_multiple_of(HOUSEKEEPING_EVERY) {
            self.housekeep();
        }
        let epoch = self.segments[0].port.epoch();
        if epoch != self.epoch {
            self.epoch = epoch;
            self.rebuild_forwarding();
        }
        let moved = self.forward_to_nic()? + self.forward_from_nic()?;
        if moved > 0 {
            self.idle_sleeps = 0;
        }
        Ok(moved)
    }

    /// Sleeps until there may be a frame to forward, or for `timeout`. A frame without a wake-up
    /// waits for a millisecond or, after 16 sleeps without a frame, for `timeout`. Three senders
    /// leave one: a sender killed before its wake-up, the first whose wake-up fails, and one that
    /// read the switch as awake and was descheduled before it published its frame.
    pub fn sleep(&mut self, timeout: Duration) {
        self.idle_sleeps = self.idle_sleeps.saturating_add(1);
        let until = Instant::now() + timeout;
        // A sender that missed our sleep flag has its frame visible after `RECHECK`.
        if !self.wait(timeout.min(RECHECK)) && self.may_sleep_long() {
            let has_frame = self.segments.iter_mut().any(|of| of.port.sweep_all());
            if !has_frame {
                self.wait(until.saturating_duration_since(Instant::now()));
            }
        }
        self.segments.iter().for_each(|of| of.bell.disarm());
        self.housekeep();
    }

    /// Whether every event is known to wake the switch ([`shm::WakeSocket::has_missed_wakeup`]).
    fn may_sleep_long(&self) -> bool {
        let has_missed_wakeup = self.segments.iter().any(|of| of.bell.has_missed_wakeup());
        // No event tells that the NIC has room again.
        self.idle_sleeps > IDLE_SLEEPS
            && self.waiter.is_some()
            && self.nic_queue.is_empty()
            && !has_missed_wakeup
    }

    /// Sets the sleep flag of every segment, so that senders wake us until it is cleared, and waits
    /// for at most `timeout`. False if only time has passed.
    fn wait(&self, timeout: Duration) -> bool {
        // All of them: arming one says nothing of the others' frames.
        let ready = self.segments.iter().filter(|of| of.bell.arm()).count();
        ready > 0
            || match &self.waiter {
                Some(waiter) => waiter.wait_or(Some(self.epoll.0.as_fd()), timeout),
                None => sleep(&mut [readable(self.epoll.0.as_raw_fd())], timeout),
            }
    }

    /// Admits and removes stations of other users.
    fn housekeep(&mut self) {
        let Self { clients: Some(clients), segments, epoll, settings, uplink, nic, .. } = self
        else {
            return;
        };
        let (nic, frame_max) = (nic.caps().station.mac, self.frame_max);
        if clients.process_events(
            segments,
            epoll,
            &clients::SegmentTemplate { settings, uplink: *uplink, nic, frame_max },
        ) {
            self.next = 0;
            self.rebuild_forwarding();
        }
    }

    /// Rebuilds the forwarding table from the segments and the clients.
    fn rebuild_forwarding(&mut self) {
        let owner = |segment: usize| Owner { segment, uid: self.segments[segment].uid };
        let own = self.segments[0].port.stations().map(|(station, _)| (station, owner(0)));
        let clients = self.clients.iter().flat_map(|clients| clients.stations(&self.segments));
        // Clients first: their addresses are the switch's own knowledge, not only a segment's.
        let all = clients.map(|(station, _, i)| (station, owner(i))).chain(own);
        let all: Vec<_> = all.collect();
        self.forwarding.rebuild(&all);
    }

    /// Sends frames that the NIC had no room for, in order. Returns how many left the queue; the
    /// NIC has no room for the others yet.
    fn flush_nic_queue(&mut self) -> Result<usize, PortGone> {
        let mut sent = 0;
        while let Some(bytes) = self.nic_queue.first() {
            match self.nic.tx(&TxFrame::whole(bytes))? {
                Tx::Sent => self.counters.to_nic += 1,
                Tx::NoRoute => self.counters.unknown += 1,
                Tx::Full => {
                    self.nic.flush()?;
                    break;
                }
            }
            self.nic_queue.drop_first();
            sent += 1;
        }
        Ok(sent)
    }

    /// Forwards frames from stations, one burst per segment.
    fn forward_to_nic(&mut self) -> Result<usize, PortGone> {
        let mut moved = self.flush_nic_queue()?;
        for _ in 0..self.segments.len() {
            if !self.nic_queue.is_empty() {
                break;
            }
            let i = self.next;
            self.next = (i + 1) % self.segments.len();
            // A segment whose group frames were copied to every station skips as many bursts.
            let debt = std::mem::take(&mut self.segments[i].debt);
            if debt > 0 {
                self.segments[i].debt = debt.saturating_sub(BURST);
                continue;
            }
            let taken = self.forward_burst(i)?;
            if taken > 0 {
                self.forward_local(i)?;
            }
            moved += taken;
        }
        if moved > 0 {
            self.nic.flush()?;
        }
        Ok(moved)
    }

    /// Forwards a burst of frames from segment `i` to the NIC or to `local_queue`.
    fn forward_burst(&mut self, i: usize) -> Result<usize, PortGone> {
        let Self { segments, nic, nic_queue, local_queue, counters, forwarding, frame_max, .. } =
            self;
        let (isolates_users, is_recorded) = (self.isolates_users, self.is_recorded);
        let segment = &mut segments[i];
        let (uid, mut debt) = (segment.uid, 0);
        let copies = forwarding.count();
        let mut gone = None;
        let moved = segment.receive_from(|sender, frame| {
            let (owner, of_sender) = forwarding.lookup_mut(sender);
            // Only in the segment of the switch's own user is a station's address taken from there.
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
            // A station of another user has to be in the table.
            if i > 0 && owner.is_none() {
                counters.unknown += 1;
                return;
            }
            of_sender.sent += 1;
            let out = forwarded(&head, frame);
            if let Some(to) = forwarding.owner(dst) {
                match isolates_users && to.uid != uid {
                    true => counters.unknown += 1,
                    false => enqueue(local_queue, &out),
                }
                return;
            }
            if dst & GROUP != 0 {
                enqueue(local_queue, &out);
                debt += if i > 0 { copies } else { 0 };
            }
            if gone.is_some() {
                return;
            }
            match if nic_queue.is_empty() { nic.tx(&out) } else { Ok(Tx::Full) } {
                Ok(Tx::Sent) => counters.to_nic += 1,
                // Not queued: name resolution repeats its group frames, and stations reach each
                // other while the NIC has no link.
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
                // The queue holds two bursts, and no ring is read until it is empty.
                Ok(Tx::Full) => enqueue(nic_queue, &out),
                Err(why) => gone = Some(why),
            }
        });
        segment.debt += debt;
        gone.map_or(Ok(moved), Err)
    }

    /// Forwards `local_queue`: frames of segment `from` to one station, or to all in reach.
    fn forward_local(&mut self, from: usize) -> Result<(), PortGone> {
        while let Some(bytes) = self.local_queue.first() {
            // Never shorter than a head: checked by `head_of`.
            let dst = bytes.first_chunk().map_or(0, |head| addresses(head)[0]);
            let (owner, of_receiver) = self.forwarding.lookup_mut(dst);
            let frame = TxFrame::whole(bytes);
            let is_for_all = dst & GROUP != 0;
            if owner.is_none() && is_for_all {
                let reached =
                    if self.isolates_users { from..from + 1 } else { 0..self.segments.len() };
                for of in &mut self.segments[reached] {
                    of.tx(&frame)?;
                }
                self.counters.between += 1;
                self.local_queue.drop_first();
                continue;
            }
            let to = owner.map_or(0, |owner| owner.segment);
            match self.segments[to].tx(&frame)? {
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
            self.local_queue.drop_first();
        }
        Ok(())
    }

    /// Forwards a burst of frames from the NIC.
    fn forward_from_nic(&mut self) -> Result<usize, PortGone> {
        let Self { segments, nic, counters, forwarding, frame_max, .. } = self;
        let mut sink = |frame: &RxFrame<'_>| {
            let Some(head) = head_of(frame, *frame_max) else {
                counters.malformed += 1;
                return;
            };
            let dst = addresses(&head)[0];
            let (owner, of_receiver) = forwarding.lookup_mut(dst);
            let out = forwarded(&head, frame);
            if owner.is_none() && dst & GROUP != 0 {
                // Stations whose ring is full lose the frame, as on a wire.
                segments.iter_mut().for_each(|of| drop(of.tx(&out)));
                counters.from_nic += 1;
                return;
            }
            // A station not yet in the table can only be of the switch's own user.
            let to = owner.map_or(0, |owner| owner.segment);
            match segments[to].tx(&out) {
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

/// Copies the head of a frame; `None` without the fabric's EtherType, or beyond `frame_max` bytes.
fn head_of(frame: &RxFrame<'_>, frame_max: usize) -> Option<[u8; HEAD_LEN]> {
    let head: [u8; HEAD_LEN] = frame.first_chunk()?;
    let is_ours = head[12..ETH_HDR_LEN] == ETHERTYPE.to_be_bytes() && frame.len() <= frame_max;
    is_ours.then_some(head)
}

fn forwarded<'a>(head: &'a [u8; HEAD_LEN], frame: &'a RxFrame<'a>) -> TxFrame<'a> {
    TxFrame { head, body: Body::Frame { frame, offset: HEAD_LEN }, tail: &[] }
}

/// Appends a frame to a queue.
///
/// # Panics
/// If the queue is full.
fn enqueue(nic_queue: &mut FrameQueue, frame: &TxFrame<'_>) {
    assert!(nic_queue.push(frame), "no burst is taken that does not fit");
}

/// The bit of an address in frame order that marks a group.
const GROUP: u64 = 1;

/// Destination and source of a frame, as [`Station::word`] has them.
fn addresses(head: &[u8; HEAD_LEN]) -> [u64; 2] {
    [word_at(head, 0, DST_NUMBER_AT), word_at(head, 6, SRC_NUMBER_AT)]
}
