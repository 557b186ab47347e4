//! AF_PACKET: any Linux network interface through a raw socket, with the kernel's driver.
//!
//! Needs CAP_NET_RAW in the network namespace, which `unshare -Urn` gives to any user in a new one.
//! Frames arrive in a ring that the kernel writes and this process reads (`netdev::ring`), and
//! leave by one system call per [`flush`](Port::flush) for any number of frames. They bypass the
//! queueing discipline and the filters of `tc` unless these are asked for (`socket`); egress
//! filters of `nft` see them in any case since Linux 5.16. The kernel delivers frames of the
//! fabric's EtherType to the port's station or to a group, without a VLAN tag; other frames are not
//! even counted. Frames shorter than 60 bytes are padded with zeros here: a NIC's driver may pad
//! them with old bytes of its memory.
//!
//! # Addresses
//! Processes on an interface have its MAC, each with a number of its own; on `lo`, which has no
//! MAC, each has a random one. A MAC other than the interface's is added to its address filter. The
//! claim of a station is a name in the network namespace that ends with the process. As on any NIC,
//! frames to another station of the same interface are not looped back: processes of one machine
//! communicate by `shm` (or `lo`, which loops all frames back).
//!
//! # When the interface changes
//! While the interface is down, has no carrier, or has a lower MTU, frames are lost as on an
//! unplugged cable; one log line reports that with the command that resolves it, and another the
//! end. The fabric retransmits lost frames, and after T_dead its operations fail. [`PortGone`] is
//! for permanent failures: the interface was removed, or its MTU stays below the port's while
//! longer frames are sent. A new name has no effect.

mod socket;

use std::io;
use std::net::SocketAddr;
use std::os::fd::AsRawFd;
use std::sync::Arc;

use super::WakeEvent;
use super::batch::Batch;
use super::lock::NotInChildren;
use super::netdev::ring::{self, RxRing, Slot};
use super::netdev::{
    Accept, DriverInfo, LinkMonitor, LinkQuery, LinkState, PortRequest, Shared, StationClaim,
    Waiter, filter, join_accepted, join_groups, raw_socket,
};
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, ETHERTYPE, TxFrame};
use crate::port::{Port, PortCaps, PortCounters, PortGone, PortWaiter, RxSink, Station, Tx};

/// Largest MTU of a port; interfaces such as `lo` have more.
pub const MTU_MAX: usize = 65_520;

/// Shortest frame on a wire, without its check sequence.
const FRAME_MIN: usize = 60;
/// Drivers of interfaces with a bus address and without a card that segments datagrams.
const VIRTUAL_DRIVERS: &[&str] = &["virtio_net", "tun"];
/// Longest IPv4 datagram.
const DATAGRAM_MAX: usize = 65_535;
/// Datagrams that can wait on an interface with GRO: 32 MiB, with slots of 128 KiB.
const GRO_SLOTS: usize = 256;
/// Frames lent at once; a larger `max` of `rx_burst` is cut to this.
const BURST: usize = 64;
/// Polls between two checks of drop counters and link changes.
const POLLS_PER_CHECK: u32 = 4096;
/// Time until frames that the kernel had no room for are offered again.
const RETRY_NS: u64 = 50_000;
/// How long one frame may find no room. A full ring has room again after microseconds; some drivers
/// report the same for a frame that the other end never accepts.
const NO_ROOM_NS: u64 = 5_000_000;
/// The same after a frame that found none in that time: egress filters refuse frames so.
const NO_ROOM_AGAIN_NS: u64 = 200_000;

/// Settings of a port.
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
    /// Which frames the port accepts.
    pub accept: Accept,
    /// Accept datagrams to this address and UDP port, and ARP or neighbour discovery of the
    /// address, instead of frames of `ethertype`; overrides `accept`.
    pub udp_addr: Option<SocketAddr>,
    /// Accept frames with the tag of this VLAN, 0 to 4,094, instead of untagged ones. The kernel
    /// strips the tag of a received frame; a sent frame has it in its bytes.
    pub vlan: Option<u16>,
    /// Whether frames leave through the interface's queueing discipline and `tc` filters, which may
    /// delay or drop them. Default: no.
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
            udp_addr: None,
            vlan: None,
            qdisc: false,
        }
    }

    /// Whether a port could be opened with these settings; changes nothing.
    ///
    /// # Errors
    /// The first obstacle, and how to remove it.
    pub fn check(&self) -> Result<(), OpenError> {
        let request = self.request();
        request.find()?;
        raw_socket().map(drop).map_err(|e| no_socket(&request, &e))
    }

    /// Bytes of the longest frame that may arrive, and how many can wait. Datagrams of the kernel's
    /// stack may arrive coalesced if no card has segmented them.
    fn rx_limits(&self, query: &LinkQuery, name: &str, frame_max: usize) -> (usize, Option<usize>) {
        let DriverInfo { driver, bus, .. } = query.driver_info(name);
        // Without a bus address it is virtual, such as a VLAN or a tunnel.
        let is_card =
            bus.is_some() && !driver.is_some_and(|driver| VIRTUAL_DRIVERS.contains(&&*driver));
        if self.udp_addr.is_none() || is_card {
            return (frame_max, self.ring_count);
        }
        (ETH_HDR_LEN + DATAGRAM_MAX, Some(self.ring_count.unwrap_or(GRO_SLOTS)))
    }

    fn request(&self) -> PortRequest<'_> {
        PortRequest {
            port: format!("afpacket:{}", self.interface),
            interface: &self.interface,
            station: self.station,
            mtu: self.mtu,
            mtu_max: MTU_MAX,
        }
    }
}

/// What to do with a frame after a send error.
enum TxErrorAction {
    /// Drop it.
    Drop,
    /// Keep it and those behind it.
    Wait,
    /// Send it again at once.
    Retry,
}

/// See the module's documentation.
pub struct AfPacket {
    caps: PortCaps,
    frame_max: usize,
    ring: RxRing,
    batch: Batch,
    /// Send socket for datagrams, if the kernel supports GSO on it.
    sender: Option<NotInChildren>,
    burst: Box<[(usize, usize, usize); BURST]>,
    counters: PortCounters,
    polls: u32,
    /// The kernel has reported drops, which are counted at the next check.
    has_kernel_drops: bool,
    link_state: LinkState,
    /// The frame that finds no room, by its index, and since when.
    no_room: Option<(usize, u64)>,
    /// How long a frame may find no room.
    no_room_ns: u64,
    /// Frames leave through the queueing discipline.
    qdisc: bool,
    /// Errors that have been logged.
    logged_errnos: Vec<i32>,
    monitor: Arc<LinkMonitor>,
    shared: Arc<Shared>,
    _claim: StationClaim,
}

impl AfPacket {
    /// Opens a port on an interface.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(settings: &AfPacketSettings) -> Result<Self, OpenError> {
        let request = settings.request();
        let (query, link, mtu) = request.find()?;
        let socket = raw_socket().map_err(|e| no_socket(&request, &e))?;
        let (station, claim) = request.claim(&link, settings.accept)?;
        let frame_max = ETH_HDR_LEN + mtu;
        let os = |e: io::Error| request.os("cannot set up the raw socket", &e);
        // Before the state of the interface is used: later changes are detected.
        let monitor = Arc::new(LinkMonitor::new().map_err(os)?);
        let fd = socket.as_raw_fd();
        let is_any = settings.udp_addr.is_some() || settings.vlan.is_some();
        let bound_to = if is_any { socket::ANY } else { settings.ethertype };
        let program = match settings.udp_addr {
            Some(udp_addr) => filter::datagrams(udp_addr, settings.vlan),
            None => filter::frames(
                settings.ethertype,
                settings.accept.filter(station),
                (settings.vlan, station.mac == link.mac && settings.accept != Accept::All),
            ),
        };
        socket::prepare(fd, program, settings.qdisc).map_err(os)?;
        let sender = match settings.udp_addr {
            Some(_) => socket::sender(&link, settings.qdisc).map_err(os)?,
            None => None,
        };
        let batch = match sender {
            Some(_) => Batch::raw(frame_max, FRAME_MIN),
            None => Batch::new(frame_max, FRAME_MIN),
        };
        let (rx_max, ring_count) = settings.rx_limits(&query, &link.name, frame_max);
        let ring = RxRing::new(fd, rx_max, ring_count, settings.vlan);
        let ring = ring.map_err(|e| request.os("no memory for the receive ring", &e))?;
        join_accepted(fd, &link, settings.accept, station.mac).map_err(os)?;
        join_groups(fd, &link, settings.udp_addr).map_err(os)?;
        filter::bind(fd, &link, bound_to).map_err(os)?;
        let bell = WakeEvent::new().map_err(os)?;
        let caps = PortCaps {
            rto_floor_ns: 1_000_000,
            via_kernel: true,
            link_bps: link.bps,
            ..PortCaps::new(station, mtu, &request.port)
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
            has_kernel_drops: false,
            link_state: LinkState::new(query, link),
            no_room: None,
            no_room_ns: NO_ROOM_NS,
            qdisc: settings.qdisc,
            logged_errnos: Vec::new(),
            shared: Arc::new(Shared {
                sockets: vec![socket],
                monitor: Some(Arc::clone(&monitor)),
                bell,
                arp: None,
            }),
            monitor,
            _claim: claim,
        })
    }

    /// Sends queued frames, as far as the kernel has room.
    fn push(&mut self) -> Result<(), PortGone> {
        let receiver = &self.shared.sockets[0];
        let fd = self.sender.as_ref().unwrap_or(receiver).as_raw_fd();
        while let Err(e) = self.batch.send(fd) {
            match self.on_tx_error(e.raw_os_error().unwrap_or(libc::EIO))? {
                TxErrorAction::Retry => {}
                TxErrorAction::Wait => return Ok(()),
                TxErrorAction::Drop => {
                    self.batch.drop_first();
                    self.counters.tx_dropped += 1;
                    self.no_room = None;
                }
            }
        }
        self.clear_no_room();
        Ok(())
    }

    /// All queued frames have left.
    fn clear_no_room(&mut self) {
        if self.no_room.take().is_some() {
            self.no_room_ns = NO_ROOM_NS;
        }
    }

    #[cold]
    fn on_tx_error(&mut self, errno: i32) -> Result<TxErrorAction, PortGone> {
        match errno {
            libc::EINTR => return Ok(TxErrorAction::Retry),
            libc::EAGAIN => return Ok(TxErrorAction::Wait),
            _ => self.link_state.refresh(&self.caps, false)?,
        }
        let link = self.link_state.link();
        match errno {
            // The discipline or a filter has dropped it, which is intended: a retry would exceed
            // the shaped rate and delay the frames behind it.
            libc::ENOBUFS if self.qdisc => {
                if self.first_time(errno) {
                    let port = &self.caps.name;
                    tracing::info!(%port, "the queueing discipline or a filter drops frames");
                }
                Ok(TxErrorAction::Drop)
            }
            // The driver's ring is full, or a filter has dropped it.
            libc::ENOBUFS if link.is_up && link.has_carrier => Ok(self.no_room()),
            libc::EMSGSIZE => self.link_state.too_long(&self.caps).map(|()| TxErrorAction::Drop),
            libc::ENOBUFS | libc::ENETDOWN | libc::ENXIO | libc::ENODEV => Ok(TxErrorAction::Drop),
            _ => {
                if self.first_time(errno) {
                    let (port, error) = (&self.caps.name, io::Error::from_raw_os_error(errno));
                    tracing::warn!(%port, %error, "the kernel refuses a frame; it is lost");
                }
                Ok(TxErrorAction::Drop)
            }
        }
    }

    /// The kernel has no room for the first frame.
    fn no_room(&mut self) -> TxErrorAction {
        let (now, first) = (now_ns(), self.batch.first());
        let since = match self.no_room {
            Some((frame, since)) if frame == first => since,
            _ => {
                self.clear_no_room();
                self.no_room = Some((first, now));
                now
            }
        };
        if now.saturating_sub(since) < self.no_room_ns {
            return TxErrorAction::Wait;
        }
        self.no_room_ns = NO_ROOM_AGAIN_NS;
        if self.first_time(libc::ENOBUFS) {
            let port = &self.caps.name;
            tracing::warn!(
                %port,
                "the driver has no room for frames, or a filter at egress drops them: \
                 nft list ruleset"
            );
        }
        TxErrorAction::Drop
    }

    /// Whether this error has not been logged, which it is now.
    fn first_time(&mut self, errno: i32) -> bool {
        let first_time = !self.logged_errnos.contains(&errno);
        if first_time {
            self.logged_errnos.push(errno);
        }
        first_time
    }

    /// What is looked after now and then.
    #[cold]
    fn check_link(&mut self) -> Result<(), PortGone> {
        if !self.batch.is_empty() {
            self.push()?;
        }
        if self.has_kernel_drops {
            self.has_kernel_drops = false;
            self.counters.rx_dropped += ring::lost(self.shared.sockets[0].as_raw_fd());
        }
        if self.monitor.take_changes(self.polls.is_multiple_of(POLLS_PER_CHECK)) {
            self.link_state.refresh(&self.caps, true)?;
        }
        Ok(())
    }

    /// Finds the frames of a burst and says how many slots they are in.
    #[inline]
    fn gather(&mut self, max: usize, sink: &mut dyn RxSink) -> usize {
        let mut count = 0;
        while count < max {
            match self.ring.peek() {
                Slot::Empty => break,
                Slot::Rejected { lost } => {
                    self.has_kernel_drops |= lost;
                    self.counters.rx_dropped += 1;
                    let offset = self.ring.advance();
                    self.ring.release(offset);
                    // One a burst: a sender who does nothing else must not keep us here.
                    break;
                }
                Slot::Frame { start, len, lost } => {
                    self.has_kernel_drops |= lost;
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
fn no_socket(request: &PortRequest<'_>, e: &io::Error) -> OpenError {
    if e.raw_os_error() != Some(libc::EPERM) {
        return request.os("cannot open a raw socket", e);
    }
    let mend = format!(
        "sudo setcap cap_net_raw+ep PROGRAM, or run it as root, or start a switch as root, which \
         this port then uses: sudo barewire switch --port afpacket:{}, or use udp:ADDRESS, which \
         needs no privilege",
        request.interface
    );
    request.refuse(libc::EPERM, "a raw socket needs CAP_NET_RAW", mend)
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
        let pending = !self.batch.is_empty() || self.has_kernel_drops || self.monitor.is_notified();
        if pending || self.polls.is_multiple_of(POLLS_PER_CHECK) {
            self.check_link()?;
        }
        let count = self.gather(max.min(BURST).min(self.ring.slot_count()), sink);
        for i in 0..count {
            let (offset, start, len) = self.burst[i];
            sink.frame(&self.ring.frame(start, len));
            self.ring.release(offset);
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
