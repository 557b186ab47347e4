//! Any Linux network interface, through a raw socket: real Ethernet frames without a driver of our
//! own.
//!
//! Needs CAP_NET_RAW in the network namespace, which `unshare -Urn` gives to anybody in one of his
//! own. Frames arrive in a ring that the kernel writes and this process reads (`ring`), and leave
//! by one system call a [`flush`](Port::flush), however many they are, past the queueing discipline
//! (`socket`). The kernel passes us frames of our EtherType to our address or to a group, without a
//! VLAN tag; everything else on the wire is not even counted. What we send is filled up with zeros
//! to 60 bytes, as the wire would do with whatever its driver has at hand.
//!
//! # Addresses
//! The first process on an interface gets the interface's own address. Another one, or any on `lo`,
//! which has none, gets a random local one, for which the interface is made to listen as well. The
//! claim is a name in the network namespace that ends with the process. As on any NIC, frames to
//! another address of the same interface do not come back: processes of one machine meet on `shm`
//! (or on `lo`, where everything comes back).
//!
//! # When the interface changes
//! A port that is down, has no carrier, or carries less than before loses frames, as a cable does
//! that is pulled; the log says so in one line with the command that mends it, and so does the end.
//! The fabric repeats what was lost, and after T_dead its operations end. [`PortGone`] is only what
//! does not come back: the interface was removed, or its MTU stays below ours while we send longer
//! frames. A new name changes nothing.

mod link;
mod ring;
mod socket;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::Bell;
use super::batch::Batch;
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, ETHERTYPE, TxFrame};
use crate::port::{
    MTU_MIN, MacAddr, Port, PortCaps, PortCounters, PortGone, PortWaiter, RxSink, Tx,
};

use link::{Asker, Watch};
use ring::{RxRing, Slot};

pub use link::{Link, links, other_names};

/// Largest MTU of a port; interfaces such as `lo` have more.
pub const MTU_MAX: usize = 65_520;

/// Shortest frame on a wire, without its check sequence.
const FRAME_MIN: usize = 60;
/// Frames lent at once; a larger `max` of `rx_burst` is cut to this.
const BURST: usize = 64;
/// Polls between two looks at what else may have happened.
const LOOK_EVERY: u32 = 4096;
/// Least time between two looks at the interface when frames are refused.
const RELOOK_NS: u64 = 1_000_000;
/// How long a lowered MTU may refuse our frames before the port is given up.
const TOO_LONG_NS: u64 = 2_000_000_000;
/// Until frames that the kernel had no room for are offered again.
const RETRY_NS: u64 = 50_000;
/// How long one frame may find no room. A ring that is full has room again after microseconds; some
/// drivers say the same of a frame that the other end does not take, for ever.
const NO_ROOM_NS: u64 = 5_000_000;

/// Which interface, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AfPacketSettings {
    /// Name of the interface, such as `eth0`.
    pub interface: String,
    /// This port's address. Default: the interface's own, or a random local one if that is taken.
    pub mac: Option<MacAddr>,
    /// Largest number of bytes after the Ethernet header, 256 to what the interface carries.
    /// Default: what it carries, at most [`MTU_MAX`].
    pub mtu: Option<usize>,
    /// Frames that can wait to be received. Default: as many as fit 8 MiB, 128 to 4,096. The
    /// kernel holds the memory; frames that find no room are lost and counted.
    pub ring_count: Option<usize>,
    /// EtherType of the frames. Default [`ETHERTYPE`], which is what the fabric sends.
    pub ethertype: u16,
    /// Frames to every address are received, not only those to this port's and to groups: for who
    /// passes them on. Default: no.
    pub promiscuous: bool,
}

impl AfPacketSettings {
    /// The settings of the interface `name`.
    pub fn named(name: &str) -> Self {
        let interface = name.to_owned();
        let promiscuous = false;
        Self {
            interface,
            mac: None,
            mtu: None,
            ring_count: None,
            ethertype: ETHERTYPE,
            promiscuous,
        }
    }

    /// Whether a port could be opened with them; changes nothing.
    ///
    /// # Errors
    /// Why not.
    pub fn check(&self) -> Result<(), OpenError> {
        let asker = Asker::new().map_err(|e| self.os("cannot ask for interfaces", &e))?;
        self.find(&asker)?;
        socket::open().map(drop).map_err(|e| no_socket(self, &e))
    }

    fn port(&self) -> String {
        format!("afpacket:{}", self.interface)
    }

    fn refuse(&self, errno: i32, why: impl Into<String>, mend: impl Into<String>) -> OpenError {
        OpenError::Device { port: self.port(), why: why.into(), mend: mend.into(), errno }
    }

    /// What a system call said that has no better explanation.
    fn os(&self, what: &str, e: &io::Error) -> OpenError {
        let errno = e.raw_os_error().unwrap_or(libc::EIO);
        let mend = match errno {
            libc::EMFILE | libc::ENFILE => "raise the limit on open files: ulimit -n 65536",
            _ => "choose another port, see: barewire info",
        };
        self.refuse(errno, format!("{what}: {e}"), mend)
    }

    /// The interface, if it can be used.
    fn find(&self, asker: &Asker) -> Result<Link, OpenError> {
        let name = &self.interface;
        let link = asker.link(name).map_err(|e| {
            if e.raw_os_error() != Some(libc::ENODEV) {
                return self.os("cannot ask for the interface", &e);
            }
            let names: Vec<String> = links().into_iter().map(|link| link.name).collect();
            let mend = format!("there are {} (ip link)", names.join(", "));
            self.refuse(libc::ENODEV, "no such interface", mend)
        })?;
        if !link.is_ethernet {
            let mend = "send the frames inside UDP: udp:ADDRESS";
            return Err(self.refuse(libc::EPROTONOSUPPORT, "it carries no Ethernet frames", mend));
        }
        if !link.is_up {
            let mend = format!("ip link set {name} up");
            return Err(self.refuse(libc::ENETDOWN, "the interface is down", mend));
        }
        let max = link.mtu.min(MTU_MAX);
        let mtu = self.mtu.unwrap_or(max);
        if max < MTU_MIN {
            let why = format!("it carries {max} bytes a frame, the fabric needs {MTU_MIN}");
            return Err(self.refuse(libc::EINVAL, why, format!("ip link set {name} mtu 1500")));
        }
        if !(MTU_MIN..=max).contains(&mtu) {
            return Err(OpenError::BadMtu { mtu, min: MTU_MIN, max });
        }
        Ok(link)
    }

    /// The address to use and what keeps it ours.
    fn claim(&self, link: &Link) -> Result<(MacAddr, OwnedFd), OpenError> {
        let taken = |e: &io::Error| e.raw_os_error() == Some(libc::EADDRINUSE);
        if let Some(mac) = self.mac {
            if mac.is_group() || mac == MacAddr::default() {
                let why = format!("{mac} is no station's address: its first byte must be even");
                return Err(self.refuse(libc::EINVAL, why, "write mac=02:00:00:00:00:01"));
            }
            return match socket::claim(link.index, mac) {
                Ok(claim) => Ok((mac, claim)),
                Err(e) if taken(&e) => {
                    let why = format!("address {mac} is in use by another process");
                    let mend = "choose another (mac=...) or none";
                    Err(self.refuse(libc::EADDRINUSE, why, mend))
                }
                Err(e) => Err(self.os("cannot claim an address", &e)),
            };
        }
        if link.mac != MacAddr::default() {
            match socket::claim(link.index, link.mac) {
                Ok(claim) => return Ok((link.mac, claim)),
                Err(e) if taken(&e) => {}
                Err(e) => return Err(self.os("cannot claim an address", &e)),
            }
        }
        let mac = MacAddr::random();
        let claim = socket::claim(link.index, mac).map_err(|e| self.os("cannot claim", &e))?;
        if link.mac != MacAddr::default() {
            let interface = &link.name;
            tracing::info!(%interface, taken = %link.mac, %mac, "another process has the address");
        }
        Ok((mac, claim))
    }
}

/// What the port's thread shares with those that sleep on it.
struct Shared {
    socket: OwnedFd,
    watch: Watch,
    bell: Bell,
    /// A sleeper saw something other than a frame.
    look: AtomicBool,
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
    burst: Box<[(usize, usize, usize); BURST]>,
    counters: PortCounters,
    polls: u32,
    /// The kernel said that it lost frames; how many is asked at the next look.
    losing: bool,
    asker: Asker,
    /// The interface when it was looked at last, and when that was.
    link: Link,
    looked_ns: u64,
    /// Since when frames are refused as too long.
    too_long_ns: Option<u64>,
    /// The frame that finds no room, by its place, and since when.
    no_room: Option<(usize, u64)>,
    /// Errors that have been logged.
    told: Vec<i32>,
    shared: Arc<Shared>,
    _claim: OwnedFd,
}

impl AfPacket {
    /// Opens a port on an interface.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(settings: &AfPacketSettings) -> Result<Self, OpenError> {
        let asker = Asker::new().map_err(|e| settings.os("cannot ask for interfaces", &e))?;
        let link = settings.find(&asker)?;
        let socket = socket::open().map_err(|e| no_socket(settings, &e))?;
        let (mac, claim) = settings.claim(&link)?;
        let mtu = settings.mtu.unwrap_or(link.mtu.min(MTU_MAX));
        let frame_max = ETH_HDR_LEN + mtu;
        let os = |e: io::Error| settings.os("cannot set up the raw socket", &e);
        // Before the look at the interface counts: what changes from now on is heard.
        let watch = Watch::new().map_err(os)?;
        let fd = socket.as_raw_fd();
        let filter = (!settings.promiscuous).then_some(mac);
        socket::prepare(fd, settings.ethertype, filter).map_err(os)?;
        let ring = RxRing::new(fd, frame_max, settings.ring_count);
        let ring = ring.map_err(|e| settings.os("no memory for the receive ring", &e))?;
        if settings.promiscuous && !link.is_loopback {
            socket::join(fd, &link, None).map_err(os)?;
        } else if mac != link.mac && !link.is_loopback {
            socket::join(fd, &link, Some(mac)).map_err(os)?;
        }
        socket::bind(fd, &link, settings.ethertype).map_err(os)?;
        let bell = Bell::new().map_err(os)?;
        let look = AtomicBool::new(true);
        let caps = PortCaps {
            mac,
            mtu,
            lossless: false,
            gather: false,
            rto_floor_ns: 1_000_000,
            tells_presence: false,
            near_mtu: 0,
            link_bps: link.bps,
            name: settings.port(),
        };
        tracing::debug!(port = %caps.name, %mac, mtu, "opened");
        Ok(Self {
            caps,
            frame_max,
            ring,
            batch: Batch::new(frame_max, FRAME_MIN, false),
            burst: Box::new([(0, 0, 0); BURST]),
            counters: PortCounters::default(),
            polls: 0,
            losing: false,
            asker,
            link,
            looked_ns: 0,
            too_long_ns: None,
            no_room: None,
            told: Vec::new(),
            shared: Arc::new(Shared { socket, watch, bell, look }),
            _claim: claim,
        })
    }

    /// Gives what was taken to the kernel, as far as it has room.
    fn push(&mut self) -> Result<(), PortGone> {
        let fd = self.shared.socket.as_raw_fd();
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
        self.no_room = None;
        Ok(())
    }

    #[cold]
    fn refused(&mut self, errno: i32) -> Result<Refused, PortGone> {
        match errno {
            libc::EINTR => return Ok(Refused::Again),
            libc::EAGAIN => return Ok(Refused::Wait),
            _ => self.relook()?,
        }
        match errno {
            // The driver's ring is full, or there is no cable.
            libc::ENOBUFS if self.link.is_up && self.link.has_carrier => Ok(self.no_room()),
            libc::EMSGSIZE => self.too_long(),
            libc::ENOBUFS | libc::ENETDOWN | libc::ENXIO | libc::ENODEV => Ok(Refused::Lose),
            _ => {
                if !self.told.contains(&errno) {
                    self.told.push(errno);
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
        match self.no_room {
            Some((frame, since)) if frame == first => {
                if now.saturating_sub(since) < NO_ROOM_NS {
                    Refused::Wait
                } else {
                    Refused::Lose
                }
            }
            _ => {
                self.no_room = Some((first, now));
                Refused::Wait
            }
        }
    }

    /// A frame is longer than the interface carries now.
    fn too_long(&mut self) -> Result<Refused, PortGone> {
        let now = now_ns();
        let since = *self.too_long_ns.get_or_insert(now);
        if now - since < TOO_LONG_NS {
            return Ok(Refused::Lose);
        }
        let Link { name, mtu, .. } = &self.link;
        let was = self.caps.mtu;
        let why = format!(
            "the mtu of {name} was lowered to {mtu} while in use; ip link set {name} mtu {was}, \
             and open it again"
        );
        Err(self.gone(&why))
    }

    /// Nothing will work again; for whoever reads logs, and for the fabric.
    fn gone(&self, why: &str) -> PortGone {
        tracing::error!(port = %self.caps.name, "{why}");
        PortGone::new(&self.caps.name, why)
    }

    /// What is looked after now and then.
    #[cold]
    fn look_around(&mut self) -> Result<(), PortGone> {
        if !self.batch.is_empty() {
            self.push()?;
        }
        if self.losing {
            self.losing = false;
            self.counters.rx_dropped += socket::lost(self.shared.socket.as_raw_fd());
        }
        let looked = self.shared.look.swap(false, Relaxed);
        if (looked || self.polls.is_multiple_of(LOOK_EVERY)) && self.shared.watch.heard() {
            self.looked_ns = 0;
            self.relook()?;
        }
        Ok(())
    }

    /// Asks what has become of the interface, and tells what has changed.
    fn relook(&mut self) -> Result<(), PortGone> {
        let now = now_ns();
        if now.saturating_sub(self.looked_ns) < RELOOK_NS && self.looked_ns != 0 {
            return Ok(());
        }
        self.looked_ns = now;
        let link = match self.asker.link_at(self.link.index) {
            Ok(link) => link,
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {
                let name = &self.link.name;
                let why = format!("interface {name} was removed; see: ip link, and open it again");
                return Err(self.gone(&why));
            }
            Err(error) => {
                tracing::warn!(port = %self.caps.name, %error, "cannot ask for the interface");
                return Ok(());
            }
        };
        let was = std::mem::replace(&mut self.link, link);
        self.tell(&was);
        Ok(())
    }

    fn tell(&mut self, was: &Link) {
        let Self { link: now, caps, .. } = self;
        let (port, name) = (&caps.name, &now.name);
        if was.name != now.name {
            tracing::warn!(%port, "{} is called {name} now; the port goes on", was.name);
        }
        if was.is_up && !now.is_up {
            tracing::warn!(%port, "{name} is down, frames are lost until: ip link set {name} up");
        } else if now.is_up && was.has_carrier && !now.has_carrier {
            tracing::warn!(%port, "{name} has no carrier, frames are lost: is the cable in?");
        } else if now.is_up && now.has_carrier && !(was.is_up && was.has_carrier) {
            tracing::info!(%port, "{name} carries frames again");
        }
        if was.mtu != now.mtu && now.mtu < caps.mtu {
            let mtu = caps.mtu;
            tracing::warn!(
                %port,
                "the mtu of {name} is {} now, longer frames are lost until: ip link set {name} \
                 mtu {mtu}", now.mtu
            );
        }
        if now.mtu >= caps.mtu {
            self.too_long_ns = None;
        }
        if was.mac != now.mac && was.mac == caps.mac {
            let mac = caps.mac;
            tracing::warn!(
                %port,
                "{name} has another address now, frames to us are lost until: ip link set {name} \
                 address {mac}"
            );
        }
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
fn no_socket(settings: &AfPacketSettings, e: &io::Error) -> OpenError {
    if e.raw_os_error() != Some(libc::EPERM) {
        return settings.os("cannot open a raw socket", e);
    }
    let mend = "sudo setcap cap_net_raw+ep PROGRAM, or run it as root, or use udp:ADDRESS, which \
                needs no privilege";
    settings.refuse(libc::EPERM, "a raw socket needs CAP_NET_RAW", mend)
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
        self.counters.tx_frames += 1;
        self.counters.tx_bytes += len as u64;
        Ok(Tx::Sent)
    }

    #[inline]
    fn flush(&mut self) -> Result<(), PortGone> {
        if self.batch.is_empty() { Ok(()) } else { self.push() }
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        self.polls = self.polls.wrapping_add(1);
        let pending = !self.batch.is_empty() || self.losing || self.shared.look.load(Relaxed);
        if pending || self.polls.is_multiple_of(LOOK_EVERY) {
            self.look_around()?;
        }
        let count = self.gather(max.min(BURST).min(self.ring.slot_count()), sink);
        for i in 0..count {
            let (offset, start, len) = self.burst[i];
            sink.frame(&self.ring.frame(start, len));
            self.ring.give_back(offset);
            self.counters.rx_frames += 1;
            self.counters.rx_bytes += len as u64;
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

struct Waiter(Arc<Shared>);

impl Waiter {
    fn sleep(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let Shared { socket, watch, bell, look } = &*self.0;
        let fds = [socket.as_raw_fd(), watch.fd(), bell.fd(), super::raw(also)];
        let mut fds = fds.map(super::readable);
        let came = super::sleep(&mut fds, timeout);
        let [frames, changes, woken, _] = fds;
        if changes.revents != 0 || frames.revents & libc::POLLERR != 0 {
            // An interface that went down is an error of the socket until somebody takes it.
            super::clear_error(socket.as_raw_fd());
            look.store(true, Relaxed);
        }
        if woken.revents != 0 {
            bell.clear();
        }
        came
    }
}

impl PortWaiter for Waiter {
    fn wait(&self, timeout: Duration) {
        self.sleep(None, timeout);
    }

    fn wait_or(&self, also: BorrowedFd<'_>, timeout: Duration) -> bool {
        self.sleep(Some(also), timeout)
    }

    fn wake(&self) {
        self.0.bell.ring();
    }
}
