//! A network interface that keeps its driver, past the kernel's stack: AF_XDP.
//!
//! Programs on the interface (`program`) give frames of our EtherType to a socket of ours and
//! leave everything else to the kernel. The socket's frames lie in memory of this process
//! (`umem`): a received one is lent where it was put, one to send is written where it is sent
//! from, and rings (`ring`) say which is whose. Where the driver can, the device reads and
//! writes that memory itself (zero-copy), on several queues only if asked to; elsewhere the
//! kernel copies.
//!
//! What is attached is so by a link, which ends with the last process that has it, however that
//! does: nothing stays behind, and while no socket is there the interface is as it was. Needs
//! CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF; the latter two not in a user namespace.
//!
//! # Queues
//! An interface with several receive queues spreads frames over them as its driver likes, and a
//! socket hears one. So a port has a socket on each queue, all with the same memory, and looks at
//! them by turns (`queue`). It sends by the first: what leaves in order stays so.
//!
//! # Several processes
//! Ports on different queues share the interface (`door`), each under a station of its own. Frames
//! to a port that arrive by queues of others, and those to groups, it hears from the kernel's stack
//! (`strays`). On an interface of one queue processes go through a [`switch`](super::switch).
//!
//! # When the interface changes
//! As for [`afpacket`](super::afpacket).

mod bound;
mod bpf;
mod door;
mod program;
mod queue;
mod ring;
mod socket;
mod strays;
pub mod survey;
#[cfg(test)]
mod tests;
mod umem;

use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;

use super::Bell;
use super::frame_queue::FrameQueue;
use super::netdev::filter::ArpSocket;
use super::netdev::{
    Accept, Claim, Ear, Link, SOCKETS_MAX, Shared, Waiter, Wanted, Watched, join_accepted,
    raw_socket,
};
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, ETHERTYPE, RxFrame, TxFrame};
use crate::hint::cold;
use crate::mem::SHORT;
use crate::port::{Port, PortCaps, PortCounters, PortGone, PortWaiter, RxSink, Station, Tx};
use bound::{Bound, Part, no_xdp};
use door::Door;
use queue::{Queue, Turns};
use ring::{Broken, Desc};
use socket::{Receiving, Sending};
use strays::Strays;
use umem::{Received, Umem};

pub use bpf::XdpMode;

/// Lengths of chunks; one is at most a page.
const CHUNK_LENS: [usize; 2] = [2048, 4096];
/// What the kernel keeps free before a received frame.
const HEADROOM: usize = 256;
/// Largest MTU of a port: a frame lies in one chunk.
pub const MTU_MAX: usize = CHUNK_LENS[1] - HEADROOM - ETH_HDR_LEN;
/// Bytes to receive into for each queue and for all, unless `ring=` says otherwise. For one queue,
/// with those to send from, less than the 8 MiB that a process may lock on most systems.
const RX_LEN: usize = 4 << 20;
const RX_LEN_ALL: usize = 32 << 20;
/// Chunks to send from.
const TX_COUNT: u32 = 512;
/// Chunks to receive into of a queue, a power of two.
pub const RING_COUNTS: std::ops::RangeInclusive<usize> = 64..=16_384;

/// Receive queues that a port can have.
pub const QUEUES_MAX: u32 = SOCKETS_MAX as u32 - 1;

/// Shortest frame on a wire, without its check sequence.
const FRAME_MIN: usize = 60;
/// Frames lent at once; a larger `max` of `rx_burst` is cut to this.
const BURST: usize = 64;
/// Polls between two looks at what else may have happened.
const LOOK_EVERY: u32 = 4096;
/// Polls between two looks at what ARP has come, which is a system call.
const ARP_EVERY: u32 = 256;
/// Until frames that the kernel had no room for are offered again.
const RETRY_NS: u64 = 50_000;
/// Calls for one burst at most. The kernel sends 32 frames a call where it copies.
const KICKS: u32 = 2 * TX_COUNT / 32;
/// Frames to ourselves that may wait.
const OWN_FRAMES: usize = 64;
/// Which of an interface's receive queues a port has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Queues {
    /// All.
    #[default]
    All,
    /// These, from 0, [`QUEUES_MAX`] at most.
    These(RangeInclusive<u32>),
    /// The first that no process has.
    Free,
}

/// Which interface, and how.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct XdpSettings {
    /// Name of the interface, such as `eth0`.
    pub interface: String,
    /// The receive queues to use. Frames leave by the first. Default: all.
    pub queues: Queues,
    /// Where the program runs. Default: in the driver, and in the stack where the driver cannot.
    pub mode: Option<XdpMode>,
    /// Whether the device may read and write our memory itself, where the driver can. Default: if
    /// the port has one queue. The kernel's own traffic on such a queue waits in the same ring, so
    /// a process that does not poll would stop all that the interface receives.
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
    /// Which frames it takes.
    pub accept: Accept,
    /// Datagrams to this place are taken, and ARP or neighbour discovery that concerns its address,
    /// in place of frames of the fabric; whatever `accept` says.
    pub place: Option<SocketAddr>,
    /// Frames with the tag of this VLAN are taken, 0 to 4,094, in place of those without one, and
    /// are lent with it.
    pub vlan: Option<u16>,
}

impl XdpSettings {
    /// The settings of the interface `name`.
    pub fn named(name: &str) -> Self {
        Self { interface: name.to_owned(), ..Self::default() }
    }

    /// Whether a port could be opened with them, as far as can be seen; changes nothing.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), OpenError> {
        let wanted = self.wanted();
        let (asker, link, _) = wanted.find()?;
        self.queues_of(asker.rx_queues(&link.name), &link, &wanted)?;
        self.check_here()
    }

    /// Whether the kernel has AF_XDP and gives it to this process; changes nothing.
    ///
    /// # Errors
    /// Why not.
    pub fn check_here(&self) -> Result<(), OpenError> {
        let wanted = self.wanted();
        raw_socket().map_err(|e| no_xdp(&wanted, &e))?;
        socket::open().map_err(|e| no_xdp(&wanted, &e))?;
        bpf::socket_map(1).map(drop).map_err(|e| no_xdp(&wanted, &e))
    }

    fn wanted(&self) -> Wanted<'_> {
        let queues = match &self.queues {
            Queues::All => String::new(),
            Queues::These(of) => format!(",queue={}", range_text(of)),
            Queues::Free => ",queue=free".to_owned(),
        };
        Wanted {
            port: format!("xdp:{}{queues}", self.interface),
            interface: &self.interface,
            station: self.station,
            mtu: self.mtu,
            mtu_max: MTU_MAX,
        }
    }

    /// Whether the frames of these queues may be left uncopied.
    fn may_zero_copy(&self, queues: &RangeInclusive<u32>) -> bool {
        self.zero_copy.unwrap_or(queues.start() == queues.end())
    }

    /// The queues to use, of `count`; the first if any one will do.
    fn queues_of(
        &self,
        count: u32,
        link: &Link,
        wanted: &Wanted<'_>,
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
            return Err(wanted.refuse(libc::EINVAL, why, "write some of them, as in queue=0"));
        }
        if queues.end() - queues.start() >= QUEUES_MAX {
            let why = format!(
                "{name} spreads frames over {count} receive queues, a port hears {QUEUES_MAX}"
            );
            return Err(wanted.refuse(libc::EINVAL, why, steer(name, self.place)));
        }
        Ok(queues)
    }
}

/// A range as it is written in the name of a port.
fn range_text(range: &RangeInclusive<u32>) -> String {
    let (first, last) = (range.start(), range.end());
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

/// The commands that make the queues of an interface as few as a port hears, or lead our frames to
/// one of them.
fn steer(name: &str, place: Option<SocketAddr>) -> String {
    let ours = place.map_or_else(
        || format!("ether proto {ETHERTYPE:#06x}"),
        |place| {
            let version = if place.is_ipv4() { 4 } else { 6 };
            format!("udp{version} dst-ip {} dst-port {}", place.ip(), place.port())
        },
    );
    format!(
        "ethtool -L {name} combined {QUEUES_MAX}, or ethtool -N {name} flow-type {ours} action 0 \
         and queue=0 here"
    )
}

/// The command that leads frames to a port to its queue `first`. Of ports that share the NIC's MAC
/// nothing that a NIC looks at tells whose a frame is.
fn lead(link: &Link, station: Station, first: u32) -> String {
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

/// Logs what the interface gives a port that is opened.
fn tell(caps: &PortCaps, link: &Link, queues: &str, bound: &Bound, is_zero_copy: bool) {
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
    /// The station's address as the first six bytes of a frame, read as one number.
    own: u64,
    frame_max: usize,
    /// Bytes of the longest frame that the interface carries now, if that is less.
    carries: usize,
    queues: Box<[Queue]>,
    /// The number of the first.
    first: u32,
    turns: Turns,
    sending: Sending,
    /// The kernel holds its pages until the socket is closed, also when this is gone.
    umem: Umem,
    burst: Box<[Received; BURST]>,
    counters: PortCounters,
    /// Frames that the kernel had lost when it was asked last.
    lost: u64,
    polls: u32,
    is_zero_copy: bool,
    is_busy_polling: bool,
    /// The queue for which the kernel is made to look next, when polling busily.
    busy_at: usize,
    /// The kernel did not take all that was published.
    is_kick_due: bool,
    /// Errors that have been logged.
    told: Vec<i32>,
    watched: Watched,
    hairpin: FrameQueue,
    /// Of a port that has not all queues.
    strays: Option<Strays>,
    gone: Option<PortGone>,
    _map: OwnedFd,
    ear: Arc<Ear>,
    shared: Arc<Shared>,
    /// Our queues, and our share of the program.
    _door: Door,
    _claim: Claim,
}

impl Xdp {
    /// Opens a port on an interface. Takes some seconds at most if a process that had it has just
    /// ended.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(settings: &XdpSettings) -> Result<Self, OpenError> {
        let wanted = settings.wanted();
        let (asker, link, mtu) = wanted.find()?;
        let os = |e: io::Error| wanted.os("cannot set up the socket", &e);
        let member = raw_socket().map_err(|e| no_xdp(&wanted, &e))?;
        let (part, claims) = Part::take(settings, &wanted, &asker, &link)?;
        let (station, claim) = wanted.claim(&link, settings.accept)?;
        let ear = Arc::new(Ear::new().map_err(os)?);
        join_accepted(member.as_raw_fd(), &link, settings.accept, station.mac).map_err(os)?;
        let strays = part.has_strays.then(|| {
            let of = (station, ETH_HDR_LEN + mtu);
            Strays::new(member.as_raw_fd(), &link, settings, of)
        });
        let strays = strays.transpose().map_err(os)?;
        let text = range_text(&part.numbers);
        let bound = bound::bind(settings, &wanted, &link, station, (&part, claims))?;
        let is_busy_polling = settings.busy_poll;
        for queue in bound.queues.iter().filter(|_| is_busy_polling) {
            let busy = socket::busy_poll(queue.fd);
            busy.map_err(|e| wanted.os("the kernel has no busy polling", &e))?;
        }
        let bell = Bell::new().map_err(os)?;
        let arp = settings.place.map(|place| ArpSocket::new(&link, place, settings.vlan));
        let arp = arp.transpose().map_err(os)?;
        let caps = PortCaps {
            rto_floor_ns: 1_000_000,
            via_kernel: true,
            link_bps: link.bps,
            ..PortCaps::new(station, mtu, &wanted.port)
        };
        let is_zero_copy = socket::is_zero_copy(bound.queues[0].fd);
        tell(&caps, &link, &text, &bound, is_zero_copy);
        let frame_max = ETH_HDR_LEN + mtu;
        let Bound { mut sockets, queues, sending, umem, map, door, .. } = bound;
        // Keeps the interface listening to our address.
        sockets.push(member);
        Ok(Self {
            own: station.word(),
            caps,
            frame_max,
            carries: frame_max,
            turns: Turns::new(queues.len()),
            queues: queues.into(),
            first: *part.numbers.start(),
            sending,
            umem,
            burst: Box::new([Received::default(); BURST]),
            counters: PortCounters::default(),
            lost: 0,
            polls: 0,
            is_zero_copy,
            is_busy_polling,
            busy_at: 0,
            is_kick_due: false,
            told: Vec::new(),
            watched: Watched::new(asker, link),
            hairpin: FrameQueue::new(OWN_FRAMES, frame_max),
            strays,
            gone: None,
            _map: map,
            shared: Arc::new(Shared { sockets, ear: Some(Arc::clone(&ear)), bell, arp }),
            ear,
            _door: door,
            _claim: claim,
        })
    }

    /// Shows the kernel what was written, and calls it if it has to be called.
    fn push(&mut self) -> Result<(), PortGone> {
        self.sending.tx.publish();
        self.is_kick_due = false;
        if !self.sending.tx.needs_wakeup() {
            return Ok(());
        }
        let mut left = None;
        for _ in 0..KICKS {
            let Err(e) = socket::kick(self.queues[0].fd) else { return Ok(()) };
            match e.raw_os_error().unwrap_or(libc::EIO) {
                libc::EINTR => {}
                // It has sent as many as it sends in a call, or has no room.
                libc::EAGAIN | libc::EBUSY | libc::ENOBUFS => {
                    let now = self.sending.tx.unread();
                    let now = now.map_err(|broken| self.lose(broken))?;
                    if now == 0 {
                        return Ok(());
                    }
                    if self.is_zero_copy || left == Some(now) {
                        break;
                    }
                    left = Some(now);
                }
                errno => {
                    self.relook(false)?;
                    self.tell(errno);
                    break;
                }
            }
        }
        self.is_kick_due = true;
        Ok(())
    }

    /// Logs an error of the kernel's once, but those that the interface's state says better.
    #[cold]
    fn tell(&mut self, errno: i32) {
        if !matches!(errno, libc::ENETDOWN | libc::ENXIO) && !self.told.contains(&errno) {
            self.told.push(errno);
            let (port, error) = (&self.caps.name, io::Error::from_raw_os_error(errno));
            tracing::warn!(%port, %error, "the kernel does not send; frames wait");
        }
    }

    /// Takes back the chunks of frames that have left.
    #[inline(never)]
    fn reclaim(&mut self) -> Result<(), PortGone> {
        let Self { sending, umem, .. } = self;
        let mut sent = || {
            while let Some(addr) = sending.completion.take()? {
                umem.sent(addr)?;
            }
            Ok(())
        };
        let done = sent();
        self.sending.completion.release();
        done.map_err(|broken| self.lose(broken))
    }

    /// A chunk to send from with an entry to name it, if there are.
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
        // Nothing is sent before the kernel has heard of what is there.
        self.push()?;
        self.reclaim()?;
        self.free_chunk()
    }

    #[inline]
    fn free_chunk(&mut self) -> Result<Option<u64>, PortGone> {
        // The kernel may say that a frame has left before it says that it has read the entry.
        let room = self.sending.tx.room().map_err(|broken| self.lose(broken))?;
        Ok(if room > 0 { self.umem.take() } else { None })
    }

    /// A frame is as if lost on the way: it is longer than the interface carries now, or the
    /// interface is down and nothing leaves.
    #[cold]
    fn lost_frame(&mut self, len: usize) -> Tx {
        self.counters.tx_dropped += 1;
        self.counters.sent(len);
        Tx::Sent
    }

    /// The kernel cannot be believed any more.
    #[cold]
    fn lose(&mut self, Broken(why): Broken) -> PortGone {
        tracing::error!(port = %self.caps.name, "{why}");
        let gone = PortGone::new(&self.caps.name, why);
        self.gone = Some(gone.clone());
        gone
    }

    /// What is looked after now and then.
    #[cold]
    fn look_around(&mut self) -> Result<(), PortGone> {
        if let Some(gone) = &self.gone {
            return Err(gone.clone());
        }
        if self.is_kick_due {
            self.push()?;
        }
        let anyway = self.polls.is_multiple_of(LOOK_EVERY);
        if anyway {
            let lost = self.queues.iter().map(|queue| socket::lost(queue.fd)).sum::<u64>();
            self.counters.rx_dropped += lost.saturating_sub(self.lost);
            self.lost = lost;
            self.look_at_strays();
        }
        if self.ear.heard(anyway) { self.relook(true) } else { Ok(()) }
    }

    /// Counts what of them was lost, and tells the log once that there are some.
    fn look_at_strays(&mut self) {
        let Some(strays) = &mut self.strays else { return };
        self.counters.rx_dropped += strays.lost();
        if strays.is_news() {
            let port = &self.caps.name;
            let mend = lead(self.watched.link(), self.caps.station, self.first);
            tracing::warn!(
                %port,
                "frames to this port arrive by other queues and come through the kernel's stack, \
                 as slow as afpacket; where the NIC can, lead them here: {mend}"
            );
        }
    }

    fn relook(&mut self, heard: bool) -> Result<(), PortGone> {
        let looked = self.watched.relook(&self.caps, heard);
        looked.inspect_err(|gone| self.gone = Some(gone.clone()))?;
        self.carries = self.frame_max.min(ETH_HDR_LEN + self.watched.link().mtu);
        Ok(())
    }

    /// Finds the frames of a burst from a queue and says how many there are.
    #[inline]
    fn gather(&mut self, at: usize, max: usize, sink: &mut dyn RxSink) -> Result<usize, Broken> {
        let rings = &mut self.queues[at].rings;
        let mut count = 0;
        while count < max {
            let Some(desc) = rings.rx.take()? else { break };
            let received = self.umem.received(desc)?;
            if !(ETH_HDR_LEN..=self.frame_max).contains(&received.len) {
                self.counters.rx_dropped += 1;
                give_back(rings, &mut self.umem, received.chunk)?;
                // One a burst: a sender who does nothing else must not keep us here.
                break;
            }
            sink.prefetch(&frame(&self.umem, received));
            self.burst[count] = received;
            count += 1;
        }
        rings.rx.release();
        Ok(count)
    }

    /// Lends a burst of frames from the first queue that has some, and says how many.
    #[inline]
    fn receive(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, Broken> {
        let mut at = self.turns.first();
        let mut count = 0;
        for _ in 0..self.queues.len() {
            count = self.gather(at, max, sink)?;
            // Or one that was given back at once.
            if count > 0 || self.queues[at].rings.fill.is_pending() {
                self.turns.delivered(at, count.max(1));
                break;
            }
            at = self.turns.after(at);
        }
        let Queue { rings, fd } = &mut self.queues[at];
        for received in &self.burst[..count] {
            sink.frame(&frame(&self.umem, *received));
            give_back(rings, &mut self.umem, received.chunk)?;
            self.counters.received(received.len);
        }
        if rings.fill.is_pending() {
            rings.fill.publish();
            if self.is_zero_copy && rings.fill.needs_wakeup() {
                socket::kick_rx(*fd);
            }
        } else if self.is_busy_polling {
            socket::kick_rx(self.queues[self.busy_at].fd);
            self.busy_at = self.turns.after(self.busy_at);
        } else if self.is_zero_copy {
            self.wake_sleepers()?;
        }
        Ok(count)
    }

    /// Calls the kernel for buffers that it has not taken. It asks for a call when it finds none,
    /// which may be after we have published some and looked: then no frame would ever arrive.
    #[inline]
    fn wake_sleepers(&mut self) -> Result<(), Broken> {
        for Queue { rings, fd } in &mut self.queues {
            if rings.fill.asks_for_wakeup() && cold(rings.fill.unread()?) > 0 {
                socket::kick_rx(*fd);
            }
        }
        Ok(())
    }
}

/// The received frame, until its chunk is given back.
#[inline]
fn frame(umem: &Umem, received: Received) -> RxFrame<'_> {
    // SAFETY: `at` has seen that the bytes lie in the umem, which stays mapped as long as it is
    // borrowed. The kernel writes them only after `give_back`; anything else would be a mixture of
    // bytes (D2).
    unsafe { RxFrame::from_raw(umem.at(received.offset, received.len), received.len) }
}

/// Gives the kernel a chunk to receive into, which it sees once the ring is published.
#[inline]
fn give_back(rings: &mut Receiving, umem: &mut Umem, chunk: u32) -> Result<(), Broken> {
    // Twice as many entries as chunks, since the kernel shows a frame before it says that it has
    // read the entry of its buffer.
    if rings.fill.room()? == 0 {
        return Err(Broken("the kernel returned buffers that it has not read the entries of"));
    }
    rings.fill.put(umem.give(chunk));
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
        if len > self.carries {
            self.relook(false)?;
        }
        if len > self.carries {
            self.watched.too_long(&self.caps).inspect_err(|gone| self.gone = Some(gone.clone()))?;
            return Ok(self.lost_frame(len));
        }
        let Some(chunk) = self.chunk()? else {
            if !self.watched.link().is_up {
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
        self.sending.tx.put(Desc { addr: chunk, len: wire_len as u32, options: 0 });
        self.counters.sent(len);
        Ok(Tx::Sent)
    }

    #[inline]
    fn flush(&mut self) -> Result<(), PortGone> {
        if self.sending.tx.is_pending() { self.push() } else { Ok(()) }
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        self.polls = self.polls.wrapping_add(1);
        let pointed = self.ear.is_pointed();
        let pending = self.is_kick_due || self.gone.is_some() || pointed;
        if pending || self.polls.is_multiple_of(LOOK_EVERY) {
            self.look_around()?;
        }
        let received = self.receive(max.min(BURST), sink);
        let mut count = received.map_err(|broken| self.lose(broken))?;
        if let Some(arp) = &self.shared.arp
            && (pointed || self.polls.is_multiple_of(ARP_EVERY))
        {
            let heard = arp.lend(max - count, sink);
            self.counters.rx_frames += heard as u64;
            count += heard;
        }
        if let Some(strays) = &mut self.strays {
            count += strays.lend(max.min(BURST) - count, sink, &mut self.counters);
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
