//! A network interface that keeps its driver, past the kernel's stack: AF_XDP.
//!
//! A program on the interface (`program`) gives frames of our EtherType to a socket of ours and
//! leaves everything else to the kernel. The socket's frames lie in memory of this process
//! (`umem`): a received one is lent where it was put, one to send is written where it is sent
//! from, and four rings (`ring`) say which is whose. Where the driver can, the device reads and
//! writes that memory itself (zero-copy); elsewhere the kernel copies.
//!
//! The program is attached by a link, which ends with the process however that does: nothing stays
//! behind, and while no socket is there the interface is as it was. Needs CAP_NET_RAW,
//! CAP_NET_ADMIN and CAP_BPF; the latter two not in a user namespace.
//!
//! # One process, one queue
//! An interface runs one program, so one process has it; others of the node go through its
//! [`switch`](super::switch). An interface with several receive queues spreads frames over them as
//! its driver likes, and the socket hears one. So it is opened only if there is one, or if the
//! queue is named, to which somebody then has to steer our frames.
//!
//! # When the interface changes
//! As for [`afpacket`](super::afpacket).

mod bpf;
mod program;
mod ring;
mod socket;
pub mod survey;
#[cfg(test)]
mod tests;
mod umem;

use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::time::Duration;

use super::Bell;
use super::hairpin::Hairpin;
use super::lock::NotInChildren;
use super::netdev::filter::ArpSocket;
use super::netdev::hold;
use super::netdev::{
    Accept, Asker, Claim, Ear, Link, Shared, Waiter, Wanted, Watched, join, raw_socket,
};
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, ETHERTYPE, RxFrame, TxFrame};
use crate::mem::{Arena, Hugepages, SHORT};
use crate::port::{Port, PortCaps, PortCounters, PortGone, PortWaiter, RxSink, Station, Tx};
use program::Take;
use ring::{Broken, Desc};
use socket::Rings;
use umem::{Received, Umem};

pub use bpf::XdpMode;

/// Lengths of chunks; one is at most a page.
const CHUNK_LENS: [usize; 2] = [2048, 4096];
/// What the kernel keeps free before a received frame.
const HEADROOM: usize = 256;
/// Largest MTU of a port: a frame lies in one chunk.
pub const MTU_MAX: usize = CHUNK_LENS[1] - HEADROOM - ETH_HDR_LEN;
/// Bytes to receive into, unless `ring=` says otherwise. With those to send from less than the
/// 8 MiB that a process may lock on most systems.
const RX_LEN: usize = 4 << 20;
/// Chunks to send from.
const TX_COUNT: u32 = 512;
/// Chunks to receive into, a power of two.
pub const RING_COUNTS: std::ops::RangeInclusive<usize> = 64..=16_384;

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
/// How long opening waits for the kernel to clean up after a process that has just ended: to detach
/// its program, which it does at once, and to give its queue back, for which every processor has to
/// have been idle or switched.
const DETACHED: Duration = Duration::from_secs(1);
const UNBOUND: Duration = Duration::from_secs(5);

/// Which interface, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpSettings {
    /// Name of the interface, such as `eth0`.
    pub interface: String,
    /// The queue to use, from 0. Default: the only one.
    pub queue: Option<u32>,
    /// Where the program runs. Default: in the driver, and in the stack where the driver cannot.
    pub mode: Option<XdpMode>,
    /// Whether the device may read and write our memory itself. Default: where the driver can.
    pub zero_copy: bool,
    /// Whether a poll that finds nothing makes the kernel look for frames, in place of interrupts.
    /// Each such poll is then a system call. Default: no.
    pub busy_poll: bool,
    /// This port's address. Default: the interface's MAC and the first number that is free; a
    /// random MAC where it has none.
    pub station: Option<Station>,
    /// Largest number of bytes after the Ethernet header, 256 to what the interface carries.
    /// Default: what it carries, at most [`MTU_MAX`].
    pub mtu: Option<usize>,
    /// Frames that can wait to be received, a power of two of [`RING_COUNTS`]. Default: as many as
    /// fit 4 MiB, 2,048 or (above an MTU of 1,778) 1,024.
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
        Self {
            interface: name.to_owned(),
            queue: None,
            mode: None,
            zero_copy: true,
            busy_poll: false,
            station: None,
            mtu: None,
            ring_count: None,
            accept: Accept::Own,
            place: None,
            vlan: None,
        }
    }

    /// Whether a port could be opened with them, as far as can be seen; changes nothing.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), OpenError> {
        let wanted = self.wanted();
        let asker = Asker::new().map_err(|e| wanted.os("cannot ask for interfaces", &e))?;
        let (link, _) = wanted.find(&asker)?;
        self.queue_of(&asker, &link, &wanted)?;
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
        let queue = self.queue.map_or_else(String::new, |queue| format!(",queue={queue}"));
        Wanted {
            port: format!("xdp:{}{queue}", self.interface),
            interface: &self.interface,
            station: self.station,
            mtu: self.mtu,
            mtu_max: MTU_MAX,
        }
    }

    /// The queue to use.
    fn queue_of(&self, asker: &Asker, link: &Link, wanted: &Wanted<'_>) -> Result<u32, OpenError> {
        let (name, count) = (&link.name, asker.rx_queues(&link.name));
        let queue = self.queue.unwrap_or(0);
        if queue >= count {
            let why = match count {
                1 => format!("{name} has one receive queue, 0"),
                _ => format!("{name} has {count} receive queues, 0 to {}", count - 1),
            };
            return Err(wanted.refuse(libc::EINVAL, why, "write one of them, as in queue=0"));
        }
        if self.queue.is_none() && count > 1 {
            let why =
                format!("{name} spreads frames over {count} receive queues, a port hears one");
            let mend = steer(name, count - 1, self.place);
            return Err(wanted.refuse(libc::EINVAL, why, mend));
        }
        Ok(queue)
    }
}

/// The commands that lead our frames to one queue of an interface.
fn steer(name: &str, queue: u32, place: Option<SocketAddr>) -> String {
    let ours = place.map_or_else(
        || format!("ether proto {ETHERTYPE:#06x}"),
        |place| {
            let version = if place.is_ipv4() { 4 } else { 6 };
            format!("udp{version} dst-ip {} dst-port {}", place.ip(), place.port())
        },
    );
    format!(
        "ethtool -L {name} combined 1, or ethtool -N {name} flow-type {ours} action {queue} and \
         queue={queue} here"
    )
}

/// Logs what the interface gives a port that is opened.
fn tell(caps: &PortCaps, link: &Link, queue: u32, mode: XdpMode, is_zero_copy: bool) {
    let PortCaps { station, mtu, name: port, .. } = caps;
    let place = match mode {
        XdpMode::Native => "the driver",
        XdpMode::Generic => "the kernel's stack",
    };
    let copies = if is_zero_copy { "not copied" } else { "copied by the kernel" };
    tracing::info!(%port, %station, mtu, queue, "the program runs in {place}, frames are {copies}");
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
    rings: Rings,
    /// The kernel holds its pages until the socket is closed, also when this is gone.
    umem: Umem,
    burst: Box<[Received; BURST]>,
    counters: PortCounters,
    /// Frames that the kernel had lost when it was asked last.
    lost: u64,
    polls: u32,
    is_zero_copy: bool,
    is_busy_polling: bool,
    /// The kernel did not take all that was published.
    is_kick_due: bool,
    /// Errors that have been logged.
    told: Vec<i32>,
    watched: Watched,
    hairpin: Hairpin,
    gone: Option<PortGone>,
    /// The program, for as long as it is open; before the socket, so that frames pass it again.
    _link: NotInChildren,
    _map: OwnedFd,
    shared: Arc<Shared>,
    _claims: (NotInChildren, Claim),
    /// Keeps the interface listening to our address.
    _member: NotInChildren,
}

/// A socket with its program and its memory.
struct Bound {
    socket: NotInChildren,
    rings: Rings,
    umem: Umem,
    link: NotInChildren,
    map: OwnedFd,
    mode: XdpMode,
}

impl Xdp {
    /// Opens a port on an interface. Takes some seconds at most if a process that had it has just
    /// ended.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(settings: &XdpSettings) -> Result<Self, OpenError> {
        let wanted = settings.wanted();
        let asker = Asker::new().map_err(|e| wanted.os("cannot ask for interfaces", &e))?;
        let (link, mtu) = wanted.find(&asker)?;
        let queue = settings.queue_of(&asker, &link, &wanted)?;
        let os = |e: io::Error| wanted.os("cannot set up the socket", &e);
        let member = raw_socket().map_err(|e| no_xdp(&wanted, &e))?;
        let owner =
            hold(&format!("barewire-xdp-{}", link.index)).map_err(|e| taken(&wanted, &e))?;
        let (station, claim) = wanted.claim(&link, settings.accept)?;
        let ear = Ear::new().map_err(os)?;
        if settings.accept == Accept::All && !link.is_loopback {
            join(member.as_raw_fd(), &link, None).map_err(os)?;
        } else if station.mac != link.mac && !link.is_loopback {
            join(member.as_raw_fd(), &link, Some(station.mac)).map_err(os)?;
        }
        let bound = bind(settings, &wanted, &link, queue, station)?;
        let fd = bound.socket.as_raw_fd();
        let is_busy_polling = settings.busy_poll;
        if is_busy_polling {
            socket::busy_poll(fd).map_err(|e| wanted.os("the kernel has no busy polling", &e))?;
        }
        let bell = Bell::new().map_err(os)?;
        let arp = settings.place.map(|place| ArpSocket::new(&link, place, settings.vlan));
        let arp = arp.transpose().map_err(os)?;
        let caps = PortCaps {
            station,
            mtu,
            lossless: false,
            gather: false,
            rto_floor_ns: 1_000_000,
            via_kernel: true,
            tells_presence: false,
            near_mtu: 0,
            link_bps: link.bps,
            name: wanted.port.clone(),
        };
        let is_zero_copy = socket::is_zero_copy(fd);
        tell(&caps, &link, queue, bound.mode, is_zero_copy);
        let frame_max = ETH_HDR_LEN + mtu;
        let Bound { socket, rings, umem, link: program, map, .. } = bound;
        Ok(Self {
            own: station.word(),
            caps,
            frame_max,
            carries: frame_max,
            rings,
            umem,
            burst: Box::new([Received::default(); BURST]),
            counters: PortCounters::default(),
            lost: 0,
            polls: 0,
            is_zero_copy,
            is_busy_polling,
            is_kick_due: false,
            told: Vec::new(),
            watched: Watched::new(asker, link),
            hairpin: Hairpin::new(OWN_FRAMES, frame_max),
            gone: None,
            _link: program,
            _map: map,
            shared: Arc::new(Shared { socket, ear, bell, arp }),
            _claims: (owner, claim),
            _member: member,
        })
    }

    fn fd(&self) -> RawFd {
        self.shared.socket.as_raw_fd()
    }

    /// Shows the kernel what was written, and calls it if it has to be called.
    fn push(&mut self) -> Result<(), PortGone> {
        self.rings.tx.publish();
        self.is_kick_due = false;
        if !self.rings.tx.needs_wakeup() {
            return Ok(());
        }
        let mut left = None;
        for _ in 0..KICKS {
            let Err(e) = socket::kick(self.fd()) else { return Ok(()) };
            match e.raw_os_error().unwrap_or(libc::EIO) {
                libc::EINTR => {}
                // It has sent as many as it sends in a call, or has no room.
                libc::EAGAIN | libc::EBUSY | libc::ENOBUFS => {
                    let now = self.rings.tx.unread();
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
        let Self { rings, umem, .. } = self;
        let mut sent = || {
            while let Some(addr) = rings.completion.take()? {
                umem.sent(addr)?;
            }
            Ok(())
        };
        let done = sent();
        self.rings.completion.release();
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
        let room = self.rings.tx.room().map_err(|broken| self.lose(broken))?;
        Ok(if room > 0 { self.umem.take() } else { None })
    }

    /// A frame is as if lost on the way: it is longer than the interface carries now, or the
    /// interface is down and nothing leaves.
    #[cold]
    fn lost_frame(&mut self, len: usize) -> Tx {
        self.counters.tx_dropped += 1;
        self.counters.tx_frames += 1;
        self.counters.tx_bytes += len as u64;
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
            let lost = socket::lost(self.fd());
            self.counters.rx_dropped += lost.saturating_sub(self.lost);
            self.lost = lost;
        }
        if self.shared.ear.heard(anyway) { self.relook(true) } else { Ok(()) }
    }

    fn relook(&mut self, heard: bool) -> Result<(), PortGone> {
        let looked = self.watched.relook(&self.caps, heard);
        looked.inspect_err(|gone| self.gone = Some(gone.clone()))?;
        self.carries = self.frame_max.min(ETH_HDR_LEN + self.watched.link().mtu);
        Ok(())
    }

    /// Finds the frames of a burst and says how many there are.
    #[inline]
    fn gather(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, Broken> {
        let mut count = 0;
        while count < max {
            let Some(desc) = self.rings.rx.take()? else { break };
            let received = self.umem.received(desc)?;
            if !(ETH_HDR_LEN..=self.frame_max).contains(&received.len) {
                self.counters.rx_dropped += 1;
                give_back(&mut self.rings, &mut self.umem, received.chunk)?;
                // One a burst: a sender who does nothing else must not keep us here.
                break;
            }
            sink.prefetch(&frame(&self.umem, received));
            self.burst[count] = received;
            count += 1;
        }
        Ok(count)
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
fn give_back(rings: &mut Rings, umem: &mut Umem, chunk: u32) -> Result<(), Broken> {
    // Twice as many entries as chunks, since the kernel shows a frame before it says that it has
    // read the entry of its buffer.
    if rings.fill.room()? == 0 {
        return Err(Broken("the kernel returned buffers that it has not read the entries of"));
    }
    rings.fill.put(umem.give(chunk));
    Ok(())
}

/// A socket on `queue` to which the interface gives frames to `station`.
fn bind(
    settings: &XdpSettings,
    wanted: &Wanted<'_>,
    link: &Link,
    queue: u32,
    station: Station,
) -> Result<Bound, OpenError> {
    let os = |e: io::Error| wanted.os("cannot set up the socket", &e);
    let chunk_len = CHUNK_LENS
        .into_iter()
        .find(|len| HEADROOM + ETH_HDR_LEN + link.mtu <= *len)
        .unwrap_or(CHUNK_LENS[1]);
    let rx_count = settings.ring_count.unwrap_or(RX_LEN / chunk_len) as u32;
    let len = (rx_count + TX_COUNT) as usize * chunk_len;
    let arena = Arena::new(len, Hugepages::IfFree);
    let block = arena.ok().and_then(|arena| arena.block(len));
    let block = block.ok_or_else(|| {
        let why = format!("no memory for buffers of {len} bytes");
        wanted.refuse(libc::ENOMEM, why, "write a smaller ring=, such as ring=256")
    })?;
    let mut umem = Umem::new(block, chunk_len, rx_count as usize);
    let socket = socket::open().map_err(|e| no_xdp(wanted, &e))?;
    let fd = socket.as_raw_fd();
    socket::register(fd, &umem, chunk_len).map_err(|e| match e.raw_os_error() {
        Some(libc::ENOBUFS) => {
            let why = format!("its buffers of {len} bytes are more than this process may lock");
            wanted.refuse(libc::ENOBUFS, why, "raise the limit: ulimit -l unlimited")
        }
        _ => os(e),
    })?;
    let mut rings = socket::rings(&socket, rx_count, TX_COUNT).map_err(os)?;
    for chunk in 0..rx_count {
        rings.fill.put(umem.give(chunk));
    }
    rings.fill.publish();
    let map = bpf::socket_map(queue + 1).map_err(|e| no_xdp(wanted, &e))?;
    let take = match settings.place {
        Some(place) => Take::Datagrams(place),
        None => Take::Frames(ETHERTYPE, settings.accept.filter(station)),
    };
    let program = program::program(map.as_raw_fd(), take, settings.vlan);
    let program = bpf::load(&program).map_err(|e| no_xdp(wanted, &e))?;
    let (program, mode) = attach(settings, wanted, link, &program)?;
    let copies = mode == XdpMode::Generic || !settings.zero_copy;
    patient(UNBOUND, || socket::bind(fd, link.index, queue, copies)).map_err(|e| {
        match e.raw_os_error() {
            Some(libc::EBUSY) => {
                let why = format!("another AF_XDP socket has queue {queue} of {}", link.name);
                wanted.refuse(libc::EBUSY, why, "see who: ss --xdp -p")
            }
            _ => os(e),
        }
    })?;
    socket::enlarge(fd);
    bpf::put(&map, queue, fd).map_err(os)?;
    Ok(Bound { socket, rings, umem, link: program, map, mode })
}

/// Attaches the program where it can run.
fn attach(
    settings: &XdpSettings,
    wanted: &Wanted<'_>,
    link: &Link,
    program: &OwnedFd,
) -> Result<(NotInChildren, XdpMode), OpenError> {
    let name = &link.name;
    let is_taken = |e: &io::Error| matches!(e.raw_os_error(), Some(libc::EBUSY | libc::EEXIST));
    let busy = || {
        let why = "another XDP program is attached to the interface";
        let mend = format!("see which and end it: ip link show dev {name}; bpftool link");
        wanted.refuse(libc::EBUSY, why, mend)
    };
    if settings.mode != Some(XdpMode::Generic) {
        match patient(DETACHED, || bpf::attach(program, link.index, XdpMode::Native)) {
            Ok(link) => return Ok((link, XdpMode::Native)),
            Err(e) if is_taken(&e) => return Err(busy()),
            Err(e) if settings.mode == Some(XdpMode::Native) => {
                let why = format!("its driver takes no XDP program at mtu {}: {e}", link.mtu);
                let mend =
                    format!("lower its mtu (ip link set {name} mtu 3498), or leave out mode=");
                return Err(wanted.refuse(libc::EOPNOTSUPP, why, mend));
            }
            Err(error) => {
                let port = &wanted.port;
                tracing::info!(%port, mtu = link.mtu, %error, "its driver takes no XDP program");
            }
        }
    }
    match patient(DETACHED, || bpf::attach(program, link.index, XdpMode::Generic)) {
        Ok(link) => Ok((link, XdpMode::Generic)),
        Err(e) if is_taken(&e) => Err(busy()),
        Err(e) => Err(wanted.os("cannot attach a program", &e)),
    }
}

/// Tries until it is not busy any more: the kernel takes a moment to clean up after a process that
/// was killed.
fn patient<T>(long: Duration, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let until = now_ns() + long.as_nanos() as u64;
    loop {
        match attempt() {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) && now_ns() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            done => return done,
        }
    }
}

/// Why there is no socket, map or program.
fn no_xdp(wanted: &Wanted<'_>, e: &io::Error) -> OpenError {
    let name = wanted.interface;
    match e.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            let why = "AF_XDP needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF";
            let mend = format!(
                "sudo setcap cap_net_raw,cap_net_admin,cap_bpf+ep PROGRAM, or run it as root, or \
                 start a switch as root, which this port then uses: sudo barewire switch \
                 --port xdp:{name}"
            );
            wanted.refuse(libc::EPERM, why, mend)
        }
        Some(libc::EAFNOSUPPORT | libc::EINVAL) => {
            let why = format!("this kernel has no AF_XDP (CONFIG_XDP_SOCKETS, 5.9 or newer): {e}");
            wanted.refuse(libc::EAFNOSUPPORT, why, format!("use afpacket:{name}"))
        }
        _ => wanted.os("cannot open an AF_XDP socket", e),
    }
}

/// Why the interface is not ours to take.
fn taken(wanted: &Wanted<'_>, e: &io::Error) -> OpenError {
    if e.raw_os_error() != Some(libc::EADDRINUSE) {
        return wanted.os("cannot claim the interface", e);
    }
    let mend = format!(
        "let a switch have it, which processes then share by the same name: barewire switch \
         --port xdp:{}",
        wanted.interface
    );
    wanted.refuse(libc::EBUSY, "a process has the interface already", mend)
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
            let sent = self.hairpin.push(frame);
            let is_sent = sent == Tx::Sent;
            self.counters.tx_frames += u64::from(is_sent);
            self.counters.tx_bytes += if is_sent { len as u64 } else { 0 };
            self.counters.tx_full += u64::from(!is_sent);
            return Ok(sent);
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
        self.rings.tx.put(Desc { addr: chunk, len: wire_len as u32, options: 0 });
        self.counters.tx_frames += 1;
        self.counters.tx_bytes += len as u64;
        Ok(Tx::Sent)
    }

    #[inline]
    fn flush(&mut self) -> Result<(), PortGone> {
        if self.rings.tx.is_pending() { self.push() } else { Ok(()) }
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        self.polls = self.polls.wrapping_add(1);
        let pointed = self.shared.ear.is_pointed();
        let pending = self.is_kick_due || self.gone.is_some() || pointed;
        if pending || self.polls.is_multiple_of(LOOK_EVERY) {
            self.look_around()?;
        }
        let mut count = self.gather(max.min(BURST), sink).map_err(|broken| self.lose(broken))?;
        self.rings.rx.release();
        for i in 0..count {
            let received = self.burst[i];
            sink.frame(&frame(&self.umem, received));
            let given = give_back(&mut self.rings, &mut self.umem, received.chunk);
            given.map_err(|broken| self.lose(broken))?;
            self.counters.rx_frames += 1;
            self.counters.rx_bytes += received.len as u64;
        }
        if self.rings.fill.is_pending() {
            self.rings.fill.publish();
            if self.is_zero_copy && self.rings.fill.needs_wakeup() {
                socket::kick_rx(self.fd());
            }
        } else if self.is_busy_polling {
            socket::kick_rx(self.fd());
        }
        if let Some(arp) = &self.shared.arp
            && (pointed || self.polls.is_multiple_of(ARP_EVERY))
        {
            let heard = arp.lend(max - count, sink);
            self.counters.rx_frames += heard as u64;
            count += heard;
        }
        if !self.hairpin.is_empty() {
            let (own, bytes) = self.hairpin.lend(max - count, sink);
            self.counters.rx_frames += own as u64;
            self.counters.rx_bytes += bytes;
            count += own;
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
