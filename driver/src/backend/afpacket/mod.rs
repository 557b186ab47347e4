//! Any Linux network interface, through a raw socket: real Ethernet frames without a driver of our
//! own.
//!
//! Needs CAP_NET_RAW in the network namespace, which `unshare -Urn` gives to anybody in one of his
//! own. Frames arrive in a ring that the kernel writes and this process reads (`netdev::ring`),
//! and leave by one system call a [`flush`](Port::flush), however many they are, past the queueing
//! discipline and the filters of `tc` unless they are asked for (`socket`); those of `nft` at
//! egress see them in any case since Linux 5.16. The kernel passes us frames of our EtherType to
//! our address or to a group, without a VLAN tag; everything else on the wire is not even counted.
//! A frame shorter than 60 bytes is padded with zeros here: the NIC's driver may pad it with old
//! bytes of its memory.
//!
//! # Addresses
//! Processes on an interface have its MAC, each with a number of its own; on `lo`, which has none,
//! each has a random one. The interface is made to listen for a MAC that is not its own. The
//! claim is a name in the network namespace that ends with the process. As on any NIC, frames to
//! another station of the same interface do not come back: processes of one machine meet on `shm`
//! (or on `lo`, where everything comes back).
//!
//! # When the interface changes
//! A port that is down, has no carrier, or carries less than before loses frames, as a cable does
//! that is pulled; the log says so in one line with the command that mends it, and so does the end.
//! The fabric repeats what was lost, and after T_dead its operations end. [`PortGone`] is only what
//! does not come back: the interface was removed, or its MTU stays below ours while we send longer
//! frames. A new name changes nothing.

mod socket;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::Bell;
use super::batch::Batch;
use super::lock::NotInChildren;
use super::netdev::ring::{self, RxRing, Slot};
use super::netdev::{
    Accept, Asker, Claim, DriverInfo, Ear, Shared, Waiter, Wanted, Watched, filter, join_accepted,
    join_for, raw_socket,
};
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, ETHERTYPE, TxFrame};
use crate::port::{Port, PortCaps, PortCounters, PortGone, PortWaiter, RxSink, Station, Tx};

/// Largest MTU of a port; interfaces such as `lo` have more.
pub const MTU_MAX: usize = 65_520;

/// Shortest frame on a wire, without its check sequence.
const FRAME_MIN: usize = 60;
/// Drivers of interfaces that have a place on a bus and no card to cut datagrams.
const UNCUT: &[&str] = &["virtio_net", "tun"];
/// Longest IPv4 datagram.
const DATAGRAM_MAX: usize = 65_535;
/// Datagrams that can wait on such an interface: 32 MiB, as a slot takes 128 KiB.
const TRAINS: usize = 256;
/// Frames lent at once; a larger `max` of `rx_burst` is cut to this.
const BURST: usize = 64;
/// Polls between two looks at what else may have happened.
const LOOK_EVERY: u32 = 4096;
/// Until frames that the kernel had no room for are offered again.
const RETRY_NS: u64 = 50_000;
/// How long one frame may find no room. A ring that is full has room again after microseconds; some
/// drivers say the same of a frame that the other end does not take, for ever.
const NO_ROOM_NS: u64 = 5_000_000;
/// The same after one that found none in that time: so does a filter at egress refuse frames.
const NO_ROOM_AGAIN_NS: u64 = 200_000;

/// Which interface, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfPacketSettings {
    /// Name of the interface, such as `eth0`.
    pub interface: String,
    /// This port's address. Default: the interface's MAC and the first number that is free; a
    /// random MAC where it has none.
    pub station: Option<Station>,
    /// Largest number of bytes after the Ethernet header, 256 to what the interface carries.
    /// Default: what it carries, at most [`MTU_MAX`].
    pub mtu: Option<usize>,
    /// Frames that can wait to be received. Default: as many as fit 8 MiB, 128 to 4,096. The
    /// kernel holds the memory; frames that find no room are lost and counted.
    pub ring_count: Option<usize>,
    /// EtherType of the frames. Default [`ETHERTYPE`], which is what the fabric sends.
    pub ethertype: u16,
    /// Which frames it takes.
    pub accept: Accept,
    /// Datagrams to this place are taken, and ARP or neighbour discovery that concerns its address,
    /// in place of frames of `ethertype`; whatever `accept` says.
    pub place: Option<SocketAddr>,
    /// Frames with the tag of this VLAN are taken, 0 to 4,094, in place of those without one. The
    /// kernel takes the tag off a received frame; a sent one has it in its bytes.
    pub vlan: Option<u16>,
    /// Whether frames leave through the interface's queueing discipline and the `tc` filters before
    /// it, which may delay or drop them. Default: no, past these.
    pub qdisc: bool,
}

impl AfPacketSettings {
    /// The settings of the interface `name`.
    pub fn named(name: &str) -> Self {
        let interface = name.to_owned();
        Self {
            interface,
            station: None,
            mtu: None,
            ring_count: None,
            ethertype: ETHERTYPE,
            accept: Accept::Own,
            place: None,
            vlan: None,
            qdisc: false,
        }
    }

    /// Whether a port could be opened with them; changes nothing.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), OpenError> {
        let wanted = self.wanted();
        wanted.find()?;
        raw_socket().map(drop).map_err(|e| no_socket(&wanted, &e))
    }

    /// The longest frame that may arrive, and how many can wait. Datagrams of the kernel's stack
    /// may come as trains, where no card has cut them.
    fn receives(&self, asker: &Asker, name: &str, frame_max: usize) -> (usize, Option<usize>) {
        let DriverInfo { driver, bus, .. } = asker.driver_info(name);
        // One without a place on a bus stands in memory or on others, as a VLAN or a tunnel does.
        let is_card = bus.is_some() && !driver.is_some_and(|driver| UNCUT.contains(&&*driver));
        if self.place.is_none() || is_card {
            return (frame_max, self.ring_count);
        }
        (ETH_HDR_LEN + DATAGRAM_MAX, Some(self.ring_count.unwrap_or(TRAINS)))
    }

    fn wanted(&self) -> Wanted<'_> {
        Wanted {
            port: format!("afpacket:{}", self.interface),
            interface: &self.interface,
            station: self.station,
            mtu: self.mtu,
            mtu_max: MTU_MAX,
        }
    }
}

/// What to do with a frame that the kernel refused.
enum Refused {
    /// It is lost.
    Lose,
    /// It waits, and those behind it.
    Wait,
    /// It is offered again at once.
    Again,
}

/// See the module's documentation.
pub struct AfPacket {
    caps: PortCaps,
    frame_max: usize,
    ring: RxRing,
    batch: Batch,
    /// What datagrams leave by, if the kernel can send several as one.
    sender: Option<NotInChildren>,
    burst: Box<[(usize, usize, usize); BURST]>,
    counters: PortCounters,
    polls: u32,
    /// The kernel said that it lost frames; how many is asked at the next look.
    losing: bool,
    watched: Watched,
    /// The frame that finds no room, by its place, and since when.
    no_room: Option<(usize, u64)>,
    /// How long it may find none.
    no_room_ns: u64,
    /// Frames leave through the queueing discipline.
    qdisc: bool,
    /// Errors that have been logged.
    told: Vec<i32>,
    ear: Arc<Ear>,
    shared: Arc<Shared>,
    _claim: Claim,
}

impl AfPacket {
    /// Opens a port on an interface.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(settings: &AfPacketSettings) -> Result<Self, OpenError> {
        let wanted = settings.wanted();
        let (asker, link, mtu) = wanted.find()?;
        let socket = raw_socket().map_err(|e| no_socket(&wanted, &e))?;
        let (station, claim) = wanted.claim(&link, settings.accept)?;
        let frame_max = ETH_HDR_LEN + mtu;
        let os = |e: io::Error| wanted.os("cannot set up the raw socket", &e);
        // Before the look at the interface counts: what changes from now on is heard.
        let ear = Arc::new(Ear::new().map_err(os)?);
        let fd = socket.as_raw_fd();
        let is_any = settings.place.is_some() || settings.vlan.is_some();
        let bound_to = if is_any { socket::ANY } else { settings.ethertype };
        let program = match settings.place {
            Some(place) => filter::of_place(place, settings.vlan),
            None => filter::of_station(
                settings.ethertype,
                settings.accept.filter(station),
                (settings.vlan, station.mac == link.mac && settings.accept != Accept::All),
            ),
        };
        socket::prepare(fd, program, settings.qdisc).map_err(os)?;
        let sender = match settings.place {
            Some(_) => socket::sender(&link, settings.qdisc).map_err(os)?,
            None => None,
        };
        let batch = match sender {
            Some(_) => Batch::raw(frame_max, FRAME_MIN),
            None => Batch::new(frame_max, FRAME_MIN),
        };
        let (rx_max, ring_count) = settings.receives(&asker, &link.name, frame_max);
        let ring = RxRing::new(fd, rx_max, ring_count, settings.vlan);
        let ring = ring.map_err(|e| wanted.os("no memory for the receive ring", &e))?;
        join_accepted(fd, &link, settings.accept, station.mac).map_err(os)?;
        join_for(fd, &link, settings.place).map_err(os)?;
        filter::bind(fd, &link, bound_to).map_err(os)?;
        let bell = Bell::new().map_err(os)?;
        let caps = PortCaps {
            rto_floor_ns: 1_000_000,
            via_kernel: true,
            link_bps: link.bps,
            ..PortCaps::new(station, mtu, &wanted.port)
        };
        tracing::debug!(port = %caps.name, %station, mtu, "opened");
        Ok(Self {
            caps,
            frame_max,
            ring,
            batch,
            sender,
            burst: Box::new([(0, 0, 0); BURST]),
            counters: PortCounters::default(),
            polls: 0,
            losing: false,
            watched: Watched::new(asker, link),
            no_room: None,
            no_room_ns: NO_ROOM_NS,
            qdisc: settings.qdisc,
            told: Vec::new(),
            shared: Arc::new(Shared {
                sockets: vec![socket],
                ear: Some(Arc::clone(&ear)),
                bell,
                arp: None,
            }),
            ear,
            _claim: claim,
        })
    }

    /// Gives what was taken to the kernel, as far as it has room.
    fn push(&mut self) -> Result<(), PortGone> {
        let receiver = &self.shared.sockets[0];
        let fd = self.sender.as_ref().unwrap_or(receiver).as_raw_fd();
        while let Err(e) = self.batch.send(fd) {
            match self.refused(e.raw_os_error().unwrap_or(libc::EIO))? {
                Refused::Again => {}
                Refused::Wait => return Ok(()),
                Refused::Lose => {
                    self.batch.drop_first();
                    self.counters.tx_dropped += 1;
                    self.no_room = None;
                }
            }
        }
        self.found_room();
        Ok(())
    }

    /// All that waited has left.
    fn found_room(&mut self) {
        if self.no_room.take().is_some() {
            self.no_room_ns = NO_ROOM_NS;
        }
    }

    #[cold]
    fn refused(&mut self, errno: i32) -> Result<Refused, PortGone> {
        match errno {
            libc::EINTR => return Ok(Refused::Again),
            libc::EAGAIN => return Ok(Refused::Wait),
            _ => self.watched.relook(&self.caps, false)?,
        }
        let link = self.watched.link();
        match errno {
            // The discipline, or a filter before it, has dropped it. That is meant: offered again
            // it would be more than is let out, and would hold up what is behind it.
            libc::ENOBUFS if self.qdisc => {
                if self.is_new(errno) {
                    let port = &self.caps.name;
                    tracing::info!(%port, "the queueing discipline or a filter drops frames");
                }
                Ok(Refused::Lose)
            }
            // The driver's ring is full, or a filter has dropped it.
            libc::ENOBUFS if link.is_up && link.has_carrier => Ok(self.no_room()),
            libc::EMSGSIZE => self.watched.too_long(&self.caps).map(|()| Refused::Lose),
            libc::ENOBUFS | libc::ENETDOWN | libc::ENXIO | libc::ENODEV => Ok(Refused::Lose),
            _ => {
                if self.is_new(errno) {
                    let (port, error) = (&self.caps.name, io::Error::from_raw_os_error(errno));
                    tracing::warn!(%port, %error, "the kernel refuses a frame; it is lost");
                }
                Ok(Refused::Lose)
            }
        }
    }

    /// The kernel has no room for the first frame.
    fn no_room(&mut self) -> Refused {
        let (now, first) = (now_ns(), self.batch.first());
        let since = match self.no_room {
            Some((frame, since)) if frame == first => since,
            _ => {
                self.found_room();
                self.no_room = Some((first, now));
                now
            }
        };
        if now.saturating_sub(since) < self.no_room_ns {
            return Refused::Wait;
        }
        self.no_room_ns = NO_ROOM_AGAIN_NS;
        if self.is_new(libc::ENOBUFS) {
            let port = &self.caps.name;
            tracing::warn!(
                %port,
                "the driver has no room for frames, or a filter at egress drops them: \
                 nft list ruleset"
            );
        }
        Refused::Lose
    }

    /// Whether this error has not been logged, which it is now.
    fn is_new(&mut self, errno: i32) -> bool {
        let is_new = !self.told.contains(&errno);
        if is_new {
            self.told.push(errno);
        }
        is_new
    }

    /// What is looked after now and then.
    #[cold]
    fn look_around(&mut self) -> Result<(), PortGone> {
        if !self.batch.is_empty() {
            self.push()?;
        }
        if self.losing {
            self.losing = false;
            self.counters.rx_dropped += ring::lost(self.shared.sockets[0].as_raw_fd());
        }
        if self.ear.heard(self.polls.is_multiple_of(LOOK_EVERY)) {
            self.watched.relook(&self.caps, true)?;
        }
        Ok(())
    }

    /// Finds the frames of a burst and says how many slots they are in.
    #[inline]
    fn gather(&mut self, max: usize, sink: &mut dyn RxSink) -> usize {
        let mut count = 0;
        while count < max {
            match self.ring.look() {
                Slot::Empty => break,
                Slot::Unfit { lost } => {
                    self.losing |= lost;
                    self.counters.rx_dropped += 1;
                    let offset = self.ring.advance();
                    self.ring.give_back(offset);
                    // One a burst: a sender who does nothing else must not keep us here.
                    break;
                }
                Slot::Frame { start, len, lost } => {
                    self.losing |= lost;
                    sink.prefetch(&self.ring.frame(start, len));
                    self.burst[count] = (self.ring.advance(), start, len);
                    count += 1;
                }
            }
        }
        count
    }
}

/// Why there is no raw socket.
fn no_socket(wanted: &Wanted<'_>, e: &io::Error) -> OpenError {
    if e.raw_os_error() != Some(libc::EPERM) {
        return wanted.os("cannot open a raw socket", e);
    }
    let mend = format!(
        "sudo setcap cap_net_raw+ep PROGRAM, or run it as root, or start a switch as root, which \
         this port then uses: sudo barewire switch --port afpacket:{}, or use udp:ADDRESS, which \
         needs no privilege",
        wanted.interface
    );
    wanted.refuse(libc::EPERM, "a raw socket needs CAP_NET_RAW", mend)
}

impl Port for AfPacket {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        assert!(frame.head.len() >= ETH_HDR_LEN && len <= self.frame_max, "frame of {len} bytes");
        if self.batch.is_full() {
            self.push()?;
            if self.batch.is_full() {
                self.counters.tx_full += 1;
                return Ok(Tx::Full);
            }
        }
        self.batch.push(frame, None);
        self.counters.sent(len);
        Ok(Tx::Sent)
    }

    #[inline]
    fn flush(&mut self) -> Result<(), PortGone> {
        if self.batch.is_empty() { Ok(()) } else { self.push() }
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        self.polls = self.polls.wrapping_add(1);
        let pending = !self.batch.is_empty() || self.losing || self.ear.is_pointed();
        if pending || self.polls.is_multiple_of(LOOK_EVERY) {
            self.look_around()?;
        }
        let count = self.gather(max.min(BURST).min(self.ring.slot_count()), sink);
        for i in 0..count {
            let (offset, start, len) = self.burst[i];
            sink.frame(&self.ring.frame(start, len));
            self.ring.give_back(offset);
            self.counters.received(len);
        }
        Ok(count)
    }

    fn counters(&self) -> PortCounters {
        self.counters
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        Some(Arc::new(Waiter(Arc::clone(&self.shared))))
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        (!self.batch.is_empty()).then(|| now_ns() + RETRY_NS)
    }
}
