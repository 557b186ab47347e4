//! AF_XDP: a network interface with its kernel driver, bypassing the kernel's stack.
//!
//! XDP programs on the interface (`program`) redirect frames of the fabric's EtherType to a socket
//! of this process and pass all others to the kernel. The socket's frames are in memory of this
//! process (`umem`): a received frame is lent in place, a frame to send is written in place, and
//! rings (`ring`) hand frames to the kernel and back. If the driver can, the device reads and
//! writes that memory itself (zero-copy), on several queues only if asked to; otherwise the kernel
//! copies.
//!
//! The program is attached by a BPF link, which ends with the last process that holds it, however
//! the process ends: nothing is left attached, and while no socket is bound the interface works as
//! before. Needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF; the latter two not in a user namespace.
//!
//! # Queues
//! An interface with several receive queues distributes frames over them (RSS), and a socket
//! receives from one. So a port has a socket on each queue, all with the same umem, and polls them
//! in turn (`queue`). It sends by the first queue only, which keeps the order of frames.
//!
//! # Several processes
//! Ports on different queues share the interface (`sharing`), each with a station of its own. A
//! port receives frames to groups, and frames that arrive by queues of other ports, from the
//! kernel's stack (`stack_rx`). On an interface with one queue processes go through a
//! [`switch`](super::switch).
//!
//! # When the interface changes
//! As for [`afpacket`](super::afpacket).

mod bpf;
mod opening;
mod program;
mod queue;
mod ring;
mod sharing;
mod socket;
mod stack_rx;
pub mod survey;
#[cfg(test)]
mod tests;
mod umem;

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use super::WakeEvent;
use super::frame_queue::FrameQueue;
use super::netdev::filter::ArpSocket;
use super::netdev::{
    Accept, Link, LinkMonitor, LinkState, PortRequest, SOCKETS_MAX, Shared, StationClaim, Waiter,
    join_accepted, raw_socket,
};
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, ETHERTYPE, RxFrame, TxFrame};
use crate::hint::cold;
use crate::mem::SHORT;
use crate::port::{Port, PortCaps, PortCounters, PortGone, PortWaiter, RxSink, Station, Tx};
use opening::{BoundSockets, QueueSet, xdp_error};
use queue::{Queue, QueueScheduler};
use ring::{Desc, RingError};
use sharing::QueueShare;
use socket::{RxRings, TxRings};
use stack_rx::StackReceiver;
use umem::{RxDesc, Umem};

pub use bpf::XdpMode;

/// Lengths of a umem chunk, bytes; the longest is a page.
const CHUNK_LENS: [usize; 2] = [2048, 4096];
/// Bytes that the kernel keeps free before a received frame.
const HEADROOM: usize = 256;
/// Largest MTU of a port: a frame lies in one chunk.
pub const MTU_MAX: usize = CHUNK_LENS[1] - HEADROOM - ETH_HDR_LEN;
/// Bytes of receive chunks per queue and of all queues, unless `ring=` is set. For one queue, with
/// the chunks to send from, less than the 8 MiB that a process may lock on most systems.
const RX_LEN: usize = 4 << 20;
const RX_LEN_ALL: usize = 32 << 20;
/// Chunks to send from; also entries of the TX ring.
const TX_COUNT: u32 = 512;
/// Receive chunks of a queue, a power of two.
pub const RING_COUNTS: std::ops::RangeInclusive<usize> = 64..=16_384;

/// Receive queues that a port can have.
pub const QUEUES_MAX: u32 = SOCKETS_MAX as u32 - 1;

/// Shortest frame on a wire, without its check sequence.
const FRAME_MIN: usize = 60;
/// Frames lent at once; a larger `max` of `rx_burst` is cut to this.
const BURST: usize = 64;
/// Polls between two checks of counters and link changes.
const POLLS_PER_CHECK: u32 = 4096;
/// Polls between two receptions from the ARP socket, each a system call.
const POLLS_PER_ARP: u32 = 256;
/// Time until frames that the kernel had no room for are offered again.
const RETRY_NS: u64 = 50_000;
/// System calls for one burst at most. In copy mode the kernel sends 32 frames per call.
const KICKS_MAX: u32 = 2 * TX_COUNT / 32;
/// Frames to the port itself that may wait.
const HAIRPIN_FRAMES: usize = 64;
/// Which of an interface's receive queues a port uses.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Queues {
    /// All.
    #[default]
    All,
    /// These, from 0, [`QUEUES_MAX`] at most.
    These(RangeInclusive<u32>),
    /// The first that no process has claimed.
    Free,
}

/// Settings of a port.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct XdpSettings {
    /// Name of the interface, such as `eth0`.
    pub interface: String,
    /// The receive queues to use. Frames leave by the first. Default: all.
    pub queues: Queues,
    /// Where the program runs. Default: in the driver; in the kernel's stack if the driver cannot.
    pub mode: Option<XdpMode>,
    /// Whether the device may read and write the umem itself (zero-copy), if the driver can.
    /// Default: if the port has one queue. The kernel's own traffic on such a queue waits in the
    /// same ring, so a process that does not poll would stop all reception of the interface.
    pub zero_copy: Option<bool>,
    /// Whether a poll that finds nothing makes the kernel look for frames, in place of interrupts.
    /// Each such poll is then a system call. Default: no.
    pub busy_poll: bool,
    /// This port's address. Default: the interface's MAC and the first number that is free; a
    /// random MAC where it has none.
    pub station: Option<Station>,
    /// Largest number of bytes after the Ethernet header, 256 to what the interface carries.
    /// Default: what it carries, at most [`MTU_MAX`].
    pub mtu: Option<usize>,
    /// Frames that can wait to be received in each queue, a power of two of [`RING_COUNTS`].
    /// Default: as many as fit 4 MiB, 2,048 or (above an MTU of 1,778) 1,024; fewer if those of
    /// all queues would take more than 32 MiB, or more than this process may lock.
    pub ring_count: Option<usize>,
    /// Which frames the port accepts.
    pub accept: Accept,
    /// Accept datagrams to this address and UDP port, and ARP or neighbour discovery of the
    /// address, instead of frames of the fabric; overrides `accept`.
    pub udp_addr: Option<SocketAddr>,
    /// Accept frames with the tag of this VLAN, 0 to 4,094, instead of untagged ones. They are lent
    /// with the tag.
    pub vlan: Option<u16>,
}

impl XdpSettings {
    /// The settings of the interface `name`.
    pub fn named(name: &str) -> Self {
        Self { interface: name.to_owned(), ..Self::default() }
    }

    /// Whether a port could probably be opened with these settings; changes nothing.
    ///
    /// # Errors
    /// The first obstacle, and how to remove it.
    pub fn check(&self) -> Result<(), OpenError> {
        let request = self.request();
        let (query, link, _) = request.find()?;
        self.queues_of(query.rx_queues(&link.name), &link, &request)?;
        self.check_here()
    }

    /// Whether the kernel has AF_XDP and permits it to this process; changes nothing.
    ///
    /// # Errors
    /// The first obstacle, and how to remove it.
    pub fn check_here(&self) -> Result<(), OpenError> {
        let request = self.request();
        raw_socket().map_err(|e| xdp_error(&request, &e))?;
        socket::open().map_err(|e| xdp_error(&request, &e))?;
        bpf::socket_map(1).map(drop).map_err(|e| xdp_error(&request, &e))
    }

    fn request(&self) -> PortRequest<'_> {
        let queues = match &self.queues {
            Queues::All => String::new(),
            Queues::These(of) => format!(",queue={}", range_text(of)),
            Queues::Free => ",queue=free".to_owned(),
        };
        PortRequest {
            port: format!("xdp:{}{queues}", self.interface),
            interface: &self.interface,
            station: self.station,
            mtu: self.mtu,
            mtu_max: MTU_MAX,
        }
    }

    /// Whether these queues may be zero-copy.
    fn may_zero_copy(&self, queues: &RangeInclusive<u32>) -> bool {
        self.zero_copy.unwrap_or(queues.start() == queues.end())
    }

    /// The queues to use, of `count`; the first for [`Queues::Free`].
    fn queues_of(
        &self,
        count: u32,
        link: &Link,
        request: &PortRequest<'_>,
    ) -> Result<RangeInclusive<u32>, OpenError> {
        let name = &link.name;
        let queues = match &self.queues {
            Queues::All => 0..=count - 1,
            Queues::These(queues) => queues.clone(),
            Queues::Free => 0..=0,
        };
        if *queues.end() >= count {
            let why = match count {
                1 => format!("{name} has one receive queue, 0"),
                _ => format!("{name} has {count} receive queues, 0 to {}", count - 1),
            };
            return Err(request.refuse(libc::EINVAL, why, "write some of them, as in queue=0"));
        }
        if queues.end() - queues.start() >= QUEUES_MAX {
            let why = format!(
                "{name} spreads frames over {count} receive queues, a port hears {QUEUES_MAX}"
            );
            return Err(request.refuse(libc::EINVAL, why, queue_advice(name, self.udp_addr)));
        }
        Ok(queues)
    }
}

/// A range of queues as written in a port's name.
fn range_text(range: &RangeInclusive<u32>) -> String {
    let (first, last) = (range.start(), range.end());
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

/// The commands that reduce an interface's queues to what a port can use, or steer the port's
/// frames to one queue.
fn queue_advice(name: &str, addr: Option<SocketAddr>) -> String {
    let ours = addr.map_or_else(
        || format!("ether proto {ETHERTYPE:#06x}"),
        |addr| {
            let version = if addr.is_ipv4() { 4 } else { 6 };
            format!("udp{version} dst-ip {} dst-port {}", addr.ip(), addr.port())
        },
    );
    format!(
        "ethtool -L {name} combined {QUEUES_MAX}, or ethtool -N {name} flow-type {ours} action 0 \
         and queue=0 here"
    )
}

/// The command that steers a port's frames to its queue `first`. A NIC cannot distinguish frames to
/// ports that share its MAC.
fn steering_command(link: &Link, station: Station, first: u32) -> String {
    let (name, mac) = (&link.name, station.mac);
    if mac != link.mac {
        return format!("ethtool -N {name} flow-type ether dst {mac} action {first}");
    }
    format!(
        "ethtool -N {name} flow-type ether proto {ETHERTYPE:#06x} action {first}, or if other \
         processes share the interface, give each an address (mac=02:00:00:00:00:01) and: \
         ethtool -N {name} flow-type ether dst 02:00:00:00:00:01 action {first}"
    )
}

/// Logs the properties of an opened port.
fn log_opened(
    caps: &PortCaps,
    link: &Link,
    queues: &str,
    bound: &BoundSockets,
    is_zero_copy: bool,
) {
    let PortCaps { station, mtu, name: port, .. } = caps;
    let copies = if is_zero_copy { "not copied" } else { "copied by the kernel" };
    let ring = bound.ring_count;
    let place = bound.mode.place();
    tracing::info!(
        %port, %station, mtu, queues, ring,
        "the program runs in {place}, frames are {copies}"
    );
    if link.mtu > MTU_MAX {
        let interface = link.mtu;
        tracing::info!(%port, mtu, interface, "frames are no longer than a buffer");
    }
}

/// See the module's documentation.
pub struct Xdp {
    caps: PortCaps,
    /// The station's MAC and number, as [`TxFrame::dst_word`] has them.
    own: u64,
    frame_max: usize,
    /// Bytes of the longest frame that the interface carries now, at most `frame_max`.
    link_frame_max: usize,
    queues: Box<[Queue]>,
    /// The number of the first.
    first: u32,
    scheduler: QueueScheduler,
    tx_rings: TxRings,
    /// The kernel keeps its pages until the socket is closed, also after this is dropped.
    umem: Umem,
    burst: Box<[RxDesc; BURST]>,
    counters: PortCounters,
    /// Frames that the kernel had dropped at the last check.
    lost: u64,
    polls: u32,
    is_zero_copy: bool,
    is_busy_polling: bool,
    /// The queue of the next busy poll.
    busy_at: usize,
    /// Published frames that the kernel has not read yet need another call.
    is_kick_due: bool,
    /// Errors that have been logged.
    logged_errnos: Vec<i32>,
    link_state: LinkState,
    hairpin: FrameQueue,
    /// For a port without all queues of the interface.
    stack_rx: Option<StackReceiver>,
    gone: Option<PortGone>,
    _map: OwnedFd,
    monitor: Arc<LinkMonitor>,
    shared: Arc<Shared>,
    /// The claimed queues, and the share of the program.
    _share: QueueShare,
    _claim: StationClaim,
}

impl Xdp {
    /// Opens a port on an interface. Takes some seconds at most if a process that had it has just
    /// ended.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(settings: &XdpSettings) -> Result<Self, OpenError> {
        let request = settings.request();
        let (query, link, mtu) = request.find()?;
        let os = |e: io::Error| request.os("cannot set up the socket", &e);
        let member = raw_socket().map_err(|e| xdp_error(&request, &e))?;
        let (set, claims) = QueueSet::acquire(settings, &request, &query, &link)?;
        let (station, claim) = request.claim(&link, settings.accept)?;
        let monitor = Arc::new(LinkMonitor::new().map_err(os)?);
        join_accepted(member.as_raw_fd(), &link, settings.accept, station.mac).map_err(os)?;
        let stack_rx = set.uses_stack_rx.then(|| {
            let of = (station, ETH_HDR_LEN + mtu);
            StackReceiver::new(member.as_raw_fd(), &link, settings, of)
        });
        let stack_rx = stack_rx.transpose().map_err(os)?;
        let text = range_text(&set.numbers);
        let bound = opening::bind(settings, &request, &link, station, (&set, claims))?;
        let is_busy_polling = settings.busy_poll;
        for queue in bound.queues.iter().filter(|_| is_busy_polling) {
            let busy = super::busy_poll(queue.fd);
            busy.map_err(|e| request.os("the kernel has no busy polling", &e))?;
        }
        let bell = WakeEvent::new().map_err(os)?;
        let arp = settings.udp_addr.map(|addr| ArpSocket::new(&link, addr, settings.vlan));
        let arp = arp.transpose().map_err(os)?;
        let caps = PortCaps {
            rto_floor_ns: 1_000_000,
            via_kernel: true,
            link_bps: link.bps,
            ..PortCaps::new(station, mtu, &request.port)
        };
        let is_zero_copy = socket::is_zero_copy(bound.queues[0].fd);
        log_opened(&caps, &link, &text, &bound, is_zero_copy);
        let frame_max = ETH_HDR_LEN + mtu;
        let BoundSockets { mut sockets, queues, tx_rings, umem, map, share, .. } = bound;
        // Keeps the port's MAC in the interface's address filter.
        sockets.push(member);
        Ok(Self {
            own: station.word(),
            caps,
            frame_max,
            link_frame_max: frame_max,
            scheduler: QueueScheduler::new(queues.len()),
            queues: queues.into(),
            first: *set.numbers.start(),
            tx_rings,
            umem,
            burst: Box::new([RxDesc::default(); BURST]),
            counters: PortCounters::default(),
            lost: 0,
            polls: 0,
            is_zero_copy,
            is_busy_polling,
            busy_at: 0,
            is_kick_due: false,
            logged_errnos: Vec::new(),
            link_state: LinkState::new(query, link),
            hairpin: FrameQueue::new(HAIRPIN_FRAMES, frame_max),
            stack_rx,
            gone: None,
            _map: map,
            shared: Arc::new(Shared { sockets, monitor: Some(Arc::clone(&monitor)), bell, arp }),
            monitor,
            _share: share,
            _claim: claim,
        })
    }

    /// Publishes written TX entries, and kicks the kernel if it needs a call.
    fn publish_tx(&mut self) -> Result<(), PortGone> {
        self.tx_rings.tx.publish();
        self.is_kick_due = false;
        if !self.tx_rings.tx.needs_wakeup() {
            return Ok(());
        }
        let mut left = None;
        for _ in 0..KICKS_MAX {
            let Err(e) = socket::kick(self.queues[0].fd) else { return Ok(()) };
            match e.raw_os_error().unwrap_or(libc::EIO) {
                libc::EINTR => {}
                // The kernel has sent its maximum per call, or has no room.
                libc::EAGAIN | libc::EBUSY | libc::ENOBUFS => {
                    let now = self.tx_rings.tx.unread();
                    let now = now.map_err(|broken| self.fail(broken))?;
                    if now == 0 {
                        return Ok(());
                    }
                    if self.is_zero_copy || left == Some(now) {
                        break;
                    }
                    left = Some(now);
                }
                errno => {
                    self.refresh_link(false)?;
                    self.log_once(errno);
                    break;
                }
            }
        }
        self.is_kick_due = true;
        Ok(())
    }

    /// Logs a send error once, but for those that a link change explains.
    #[cold]
    fn log_once(&mut self, errno: i32) {
        if !matches!(errno, libc::ENETDOWN | libc::ENXIO) && !self.logged_errnos.contains(&errno) {
            self.logged_errnos.push(errno);
            let (port, error) = (&self.caps.name, io::Error::from_raw_os_error(errno));
            tracing::warn!(%port, %error, "the kernel does not send; frames wait");
        }
    }

    /// Frees the chunks of completed frames.
    #[inline(never)]
    fn reclaim(&mut self) -> Result<(), PortGone> {
        let Self { tx_rings, umem, .. } = self;
        let mut sent = || {
            while let Some(addr) = tx_rings.completion.take()? {
                umem.reclaim_tx(addr)?;
            }
            Ok(())
        };
        let done = sent();
        self.tx_rings.completion.release();
        done.map_err(|broken| self.fail(broken))
    }

    /// A chunk to send from, if one is free and the TX ring has room.
    #[inline]
    fn chunk(&mut self) -> Result<Option<u64>, PortGone> {
        let chunk = self.free_chunk()?;
        if chunk.is_some() {
            return Ok(chunk);
        }
        self.reclaim()?;
        let chunk = self.free_chunk()?;
        if chunk.is_some() {
            return Ok(chunk);
        }
        // Frames are completed only after they were published.
        self.publish_tx()?;
        self.reclaim()?;
        self.free_chunk()
    }

    #[inline]
    fn free_chunk(&mut self) -> Result<Option<u64>, PortGone> {
        // The kernel may complete a frame before it releases the frame's TX entry.
        let room = self.tx_rings.tx.room().map_err(|broken| self.fail(broken))?;
        Ok(if room > 0 { self.umem.alloc_tx() } else { None })
    }

    /// Counts a frame as lost on the wire: it is longer than the interface carries now, or the
    /// interface is down.
    #[cold]
    fn lost_frame(&mut self, len: usize) -> Tx {
        self.counters.tx_dropped += 1;
        self.counters.sent(len);
        Tx::Sent
    }

    /// A ring is corrupt: the port has failed for good.
    #[cold]
    fn fail(&mut self, RingError(why): RingError) -> PortGone {
        tracing::error!(port = %self.caps.name, "{why}");
        let gone = PortGone::new(&self.caps.name, why);
        self.gone = Some(gone.clone());
        gone
    }

    /// What is refreshed after now and then.
    #[cold]
    fn housekeeping(&mut self) -> Result<(), PortGone> {
        if let Some(gone) = &self.gone {
            return Err(gone.clone());
        }
        if self.is_kick_due {
            self.publish_tx()?;
        }
        let anyway = self.polls.is_multiple_of(POLLS_PER_CHECK);
        if anyway {
            let lost =
                self.queues.iter().map(|queue| socket::dropped_frames(queue.fd)).sum::<u64>();
            self.counters.rx_dropped += lost.saturating_sub(self.lost);
            self.lost = lost;
            self.check_stack_rx();
        }
        if self.monitor.take_changes(anyway) { self.refresh_link(true) } else { Ok(()) }
    }

    /// Counts drops of the stack receiver, and logs once that frames arrive there.
    fn check_stack_rx(&mut self) {
        let Some(stack_rx) = &mut self.stack_rx else { return };
        self.counters.rx_dropped += stack_rx.lost();
        if stack_rx.take_warning() {
            let port = &self.caps.name;
            let mend = steering_command(self.link_state.link(), self.caps.station, self.first);
            tracing::warn!(
                %port,
                "frames to this port arrive by other queues and come through the kernel's stack, \
                 as slow as afpacket; where the NIC can, lead them here: {mend}"
            );
        }
    }

    fn refresh_link(&mut self, changed: bool) -> Result<(), PortGone> {
        let refreshed = self.link_state.refresh(&self.caps, changed);
        refreshed.inspect_err(|gone| self.gone = Some(gone.clone()))?;
        self.link_frame_max = self.frame_max.min(ETH_HDR_LEN + self.link_state.link().mtu);
        Ok(())
    }

    /// Collects a burst of frames from a queue and returns their number.
    #[inline]
    fn collect_burst(
        &mut self,
        at: usize,
        max: usize,
        sink: &mut dyn RxSink,
    ) -> Result<usize, RingError> {
        let rings = &mut self.queues[at].rings;
        let mut count = 0;
        while count < max {
            let Some(desc) = rings.rx.take()? else { break };
            let received = self.umem.reclaim_rx(desc)?;
            if !(ETH_HDR_LEN..=self.frame_max).contains(&received.len) {
                self.counters.rx_dropped += 1;
                release(rings, &mut self.umem, received.chunk)?;
                // One per burst: a sender of such frames must not keep this loop busy.
                break;
            }
            sink.prefetch(&frame(&self.umem, received));
            self.burst[count] = received;
            count += 1;
        }
        rings.rx.release();
        Ok(count)
    }

    /// Lends a burst of frames from the first queue that has some, and returns their number.
    #[inline]
    fn receive(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, RingError> {
        let mut at = self.scheduler.first();
        let mut count = 0;
        for _ in 0..self.queues.len() {
            count = self.collect_burst(at, max, sink)?;
            // Or a dropped frame, whose chunk has been returned.
            if count > 0 || self.queues[at].rings.fill.is_pending() {
                self.scheduler.delivered(at, count.max(1));
                break;
            }
            at = self.scheduler.after(at);
        }
        let Queue { rings, fd } = &mut self.queues[at];
        for received in &self.burst[..count] {
            sink.frame(&frame(&self.umem, *received));
            release(rings, &mut self.umem, received.chunk)?;
            self.counters.received(received.len);
        }
        if rings.fill.is_pending() {
            rings.fill.publish();
            if self.is_zero_copy && rings.fill.needs_wakeup() {
                socket::kick_rx(*fd);
            }
        } else if self.is_busy_polling {
            socket::kick_rx(self.queues[self.busy_at].fd);
            self.busy_at = self.scheduler.after(self.busy_at);
        } else if self.is_zero_copy {
            self.wake_starved_queues()?;
        }
        Ok(count)
    }

    /// Calls the kernel for buffers that it has not taken. It asks for a call when it finds none,
    /// which may be after we have published some and refreshed: then no frame would ever arrive.
    #[inline]
    fn wake_starved_queues(&mut self) -> Result<(), RingError> {
        for Queue { rings, fd } in &mut self.queues {
            if rings.fill.has_wakeup_flag() && cold(rings.fill.unread()?) > 0 {
                socket::kick_rx(*fd);
            }
        }
        Ok(())
    }
}

/// The received frame, until its chunk is returned.
#[inline]
fn frame(umem: &Umem, received: RxDesc) -> RxFrame<'_> {
    // SAFETY: `at` has seen that the bytes lie in the umem, which stays mapped as long as it is
    // borrowed. The kernel writes them only after `release`; anything else would be a mixture of
    // bytes (D2).
    unsafe { RxFrame::from_raw(umem.at(received.offset, received.len), received.len) }
}

/// Returns a chunk to the fill ring; the kernel sees it once the ring is published.
#[inline]
fn release(rings: &mut RxRings, umem: &mut Umem, chunk: u32) -> Result<(), RingError> {
    // Twice as many entries as chunks: the kernel delivers a frame before it releases the fill
    // entry of its chunk.
    if rings.fill.room()? == 0 {
        return Err(RingError("the kernel returned buffers that it has not read the entries of"));
    }
    rings.fill.put(umem.lend_rx(chunk));
    Ok(())
}

impl Port for Xdp {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        assert!(frame.head.len() >= ETH_HDR_LEN && len <= self.frame_max, "frame of {len} bytes");
        if let Some(gone) = &self.gone {
            return Err(gone.clone());
        }
        if frame.dst_word() == self.own {
            return Ok(self.hairpin.tx(frame, &mut self.counters));
        }
        if len > self.link_frame_max {
            self.refresh_link(false)?;
        }
        if len > self.link_frame_max {
            self.link_state
                .too_long(&self.caps)
                .inspect_err(|gone| self.gone = Some(gone.clone()))?;
            return Ok(self.lost_frame(len));
        }
        let Some(chunk) = self.chunk()? else {
            if !self.link_state.link().is_up {
                return Ok(self.lost_frame(len));
            }
            self.counters.tx_full += 1;
            return Ok(Tx::Full);
        };
        let wire_len = len.max(FRAME_MIN);
        let at = self.umem.at(chunk as usize, wire_len);
        let usual = frame.body_in_one_piece().filter(|_| len <= SHORT && frame.fits_short_copy());
        // SAFETY: `wire_len` bytes lie in a chunk of the umem that is ours until it is published
        // (`at`), which no frame's head, body or tail lies in. The fast path is for short and usual
        // frames, as was just seen.
        unsafe {
            match usual {
                Some(body) => frame.copy_short_to_raw(body, at),
                None => frame.copy_to_raw(at),
            }
            at.add(len).write_bytes(0, wire_len - len);
        }
        self.tx_rings.tx.put(Desc { addr: chunk, len: wire_len as u32, options: 0 });
        self.counters.sent(len);
        Ok(Tx::Sent)
    }

    #[inline]
    fn flush(&mut self) -> Result<(), PortGone> {
        if self.tx_rings.tx.is_pending() { self.publish_tx() } else { Ok(()) }
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        self.polls = self.polls.wrapping_add(1);
        let notified = self.monitor.is_notified();
        let pending = self.is_kick_due || self.gone.is_some() || notified;
        if pending || self.polls.is_multiple_of(POLLS_PER_CHECK) {
            self.housekeeping()?;
        }
        let received = self.receive(max.min(BURST), sink);
        let mut count = received.map_err(|broken| self.fail(broken))?;
        if let Some(arp) = &self.shared.arp
            && (notified || self.polls.is_multiple_of(POLLS_PER_ARP))
        {
            let heard = arp.lend(max - count, sink);
            self.counters.rx_frames += heard as u64;
            count += heard;
        }
        if let Some(stack_rx) = &mut self.stack_rx {
            count += stack_rx.lend(max.min(BURST) - count, sink, &mut self.counters);
        }
        if !self.hairpin.is_empty() {
            count += self.hairpin.rx_burst(max - count, sink, &mut self.counters);
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
        if !self.hairpin.is_empty() {
            return Some(now_ns());
        }
        self.is_kick_due.then(|| now_ns() + RETRY_NS)
    }
}
