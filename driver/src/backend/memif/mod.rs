//! A memif: Ethernet frames in memory shared by two processes (VPP, DPDK, or another barewire).
//!
//! One side, the *server*, listens on a socket; the other, the *client*, connects and brings the
//! memory: a region with two descriptor rings and their buffers (`region`). A thread (`control`)
//! exchanges the handshake messages (`proto`), so that connections are made and their end is
//! detected whether or not the port is polled. The port adopts the connection, and alone reads and
//! writes the rings (`ring`).
//!
//! A frame to send is copied once, into the receiver's buffer. A received frame is lent in place.
//!
//! # Link state
//! Without a connection [`Port::tx`] returns [`Tx::Full`], and a client tries to connect 20 times a
//! second. Frames that the peer sent before it disconnected are received first.
//!
//! # Trust
//! The peer may be any process that can open the socket. Its messages are checked on arrival, and
//! memory that could be truncated is refused. Values in a ring are read once and checked against
//! private state (`ring`); an impossible one ends the connection. An invalid descriptor costs its
//! frame ([`PortCounters::rx_dropped`]). Frames are lent as [`RxFrame`], which can only be copied
//! from. Neither the peer's use of a descriptor nor its silence can block us (`wake`, `control`).

mod adversary;
mod control;
mod handshake;
#[cfg(test)]
mod model;
mod proto;
mod region;
mod ring;
#[cfg(test)]
mod tests;
mod wait;
mod wake;

#[doc(hidden)]
pub use adversary::wild_peer;

use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, HeadBuf, RxFrame, TxFrame, WriteBody, WriteHead};
use crate::hint::cold;
use crate::mem::{SHORT, prefetch_long};
use crate::port::{
    FastPort, InPlaceTx, MTU_MIN, MacAddr, Port, PortCaps, PortCounters, PortGone, PortWaiter,
    ReplyTx, RxSink, Tx,
};
use control::Control;
use region::{ClientMemory, Conn, Layout};
use ring::{Broken, Pushed, Receiver, RxItem, Sender, chain_max};
use wait::{Shared, Waiter};

/// Largest: with its Ethernet header a frame is 64 KiB.
pub const MTU_MAX: usize = 65_536 - ETH_HDR_LEN;

const MTU: usize = 1500;
/// Buffer size of other implementations, and our minimum.
const BSIZE: usize = 2048;
/// Bytes of buffers that a ring has at least, unless a size was asked for: more than two processors
/// keep in the caches that each has for itself. A line that waits there is fetched from the other
/// processor, one that had to make room from the larger cache that they share, which is twice as
/// fast for long frames.
const RING_BYTES: usize = 2 << 20;
const LOG2_RING: u8 = 10;

/// Frames lent at once; a larger `max` is cut to this.
const BURST: usize = 32;
/// Polls between two checks of the connection.
const CHECK_EVERY: i32 = 64;
/// Frames are published to the receiver in batches of at most this many bytes.
const PUBLISH_BYTES: usize = 8192;

/// Which side of a memif.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// Listens; has no memory of its own. VPP's `master`.
    Server,
    /// Connects, and brings the memory. VPP's `slave`.
    #[default]
    Client,
}

/// Where a memif is, and how it is set up.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemifSettings {
    /// A path (`/run/vpp/memif.sock`), or `@` and a name in the abstract namespace (`@job7`).
    pub socket: String,
    /// The interface on that socket. Default 0.
    pub id: u32,
    /// Which side. Default: the client.
    pub role: Role,
    /// What the client has to know, 1 to 24 bytes. Default: nothing.
    pub secret: Option<String>,
    /// Descriptors of a ring, as a logarithm, 4 to 14; the client's counts. Default 10 (1024), or
    /// fewer if the buffers of a ring then still take 2 MiB.
    pub log2_ring: Option<u8>,
    /// Bytes of a buffer, 270 to 65,536; the client's counts. Default 2048, or what the MTU needs.
    pub bsize: Option<usize>,
    /// Largest number of bytes after the Ethernet header, 256 to [`MTU_MAX`] and what fits a
    /// buffer. Default: what fits if a buffer's length is given, otherwise 1500.
    pub mtu: Option<usize>,
    /// Address to answer to. Default: a random local one.
    pub mac: Option<MacAddr>,
    /// Frames carry a checksum, which both ends have to agree on. Default: no, since they stay in
    /// this machine's memory.
    pub crc: bool,
    /// Two ports of ours that lead to each other, with no switch between. Frames are not kept to be
    /// sent again then. Both ends have to say the same. Default: no.
    pub lossless: bool,
}

impl MemifSettings {
    /// The settings of a client of `socket`.
    pub fn at(socket: &str) -> Self {
        Self { socket: socket.to_owned(), ..Self::default() }
    }

    /// The string that opens the port.
    fn name(&self) -> String {
        let mut name = format!("memif:{}", self.socket);
        let mut add = |key: &str, value: Option<String>| {
            name.extend(value.map(|value| format!(",{key}={value}")));
        };
        add("role", (self.role == Role::Server).then(|| "server".into()));
        add("id", (self.id != 0).then(|| self.id.to_string()));
        // A list of ports does not contain it.
        add("secret", self.secret.as_ref().map(|_| "...".into()));
        add("rsize", self.log2_ring.map(|n| n.to_string()));
        add("bsize", self.bsize.map(|n| n.to_string()));
        add("mtu", self.mtu.map(|n| n.to_string()));
        add("mac", self.mac.map(|mac| mac.to_string()));
        add("crc", self.crc.then(|| "yes".into()));
        add("lossless", self.lossless.then(|| "yes".into()));
        name
    }

    fn bad(&self, why: impl Into<String>) -> OpenError {
        OpenError::BadSpec { spec: self.name(), why: why.into() }
    }

    /// Whether a port could be opened with them, as far as can be seen; changes nothing.
    pub(crate) fn check_path(&self) -> Result<(), OpenError> {
        self.check()?;
        control::no_directory(self).map_or(Ok(()), Err)
    }

    fn check(&self) -> Result<(), OpenError> {
        let is_named = match self.socket.strip_prefix('@') {
            Some(name) => !name.is_empty(),
            None => self.socket.starts_with('/'),
        };
        // What the kernel has room for in an address, less one.
        if !is_named || self.socket.len() > 107 {
            return Err(self.bad(
                "a socket is a path from / or an abstract name, 107 bytes at most; write \
                 memif:/run/vpp/memif.sock or memif:@job7",
            ));
        }
        if !self.secret.as_ref().is_none_or(|s| (1..=proto::SECRET_LEN).contains(&s.len())) {
            return Err(self.bad("a secret is 1 to 24 bytes"));
        }
        if !self.log2_ring.is_none_or(|n| (4..=proto::LOG2_RING_MAX).contains(&n)) {
            return Err(self.bad("rsize= is the logarithm of a ring's length, 4 to 14"));
        }
        let bsize_max = MTU_MAX + ETH_HDR_LEN;
        if !self.bsize.is_none_or(|n| (MTU_MIN + ETH_HDR_LEN..=bsize_max).contains(&n)) {
            return Err(self.bad("bsize= is the length of a buffer, 270 to 65536"));
        }
        if self.mac.is_some_and(|mac| !mac.is_single()) {
            let why = "a station's address has an even first byte; write mac=02:00:00:00:00:01";
            return Err(self.bad(why));
        }
        let (mtu, max) = (self.mtu(), self.bsize.unwrap_or(bsize_max) - ETH_HDR_LEN);
        OpenError::check_mtu(mtu, max).map(drop)
    }

    fn mtu(&self) -> usize {
        self.mtu.unwrap_or_else(|| self.bsize.map_or(MTU, |bsize| bsize - ETH_HDR_LEN))
    }

    /// The memory that a client makes.
    fn layout(&self) -> Layout {
        let needed = (self.mtu() + ETH_HDR_LEN).next_multiple_of(64).max(BSIZE);
        let bsize = self.bsize.unwrap_or(needed);
        let enough = RING_BYTES.div_ceil(bsize).next_power_of_two().ilog2() as u8;
        Layout { log2_ring: self.log2_ring.unwrap_or(LOG2_RING.min(enough)), bsize }
    }
}

/// Makes what a memif takes for a moment, to see that this process may: a socket, and memory that
/// cannot shrink, with its events.
///
/// # Errors
/// [`OpenError`]: what it may not, and what mends it. Nothing is left behind.
pub fn check_here() -> Result<(), OpenError> {
    static CHECKS: AtomicU32 = AtomicU32::new(0);
    let (process, check) = (std::process::id(), CHECKS.fetch_add(1, Relaxed));
    let socket = format!("@barewire-check-{process}-{check}");
    let settings = MemifSettings { role: Role::Server, ..MemifSettings::at(&socket) };
    drop(Memif::open(&settings)?);
    let made =
        ClientMemory::new(Layout { log2_ring: 4, bsize: BSIZE }).and_then(ClientMemory::connected);
    made.map(drop).map_err(|e| control::no_resources(&settings, &e))
}

/// One end of a memif.
pub struct Memif {
    caps: PortCaps,
    frame_max: usize,
    short_max: usize,
    damages: bool,
    polls_to_check: i32,
    /// The epoch of `shared` at the last update of `live`.
    epoch: u32,
    live: Option<Live>,
    /// Size of the ring for which the last too long frame was logged, slots; 0: none.
    logged_short_ring: u16,
    counters: PortCounters,
    burst: [(*const u8, u32); BURST],
    /// A frame that is in several buffers of a ring.
    whole: Box<[u8]>,
    shared: Arc<Shared>,
    /// The process that opened the port; a forked child is another.
    pid: u32,
    /// Taken when the port is dropped.
    control: Option<Control>,
}

/// The rings of a connection.
struct Live {
    tx: Sender,
    rx: Receiver,
    /// Bytes written since the last publish.
    unpublished: usize,
    conn: Arc<Conn>,
}

// SAFETY: the raw pointers are addresses in mappings that `live` keeps, used through `&mut self` or
// for atomics; nothing is tied to the thread.
unsafe impl Send for Memif {}

impl Memif {
    /// Opens a server's socket, or connects to one; a client whose server is not there yet goes on
    /// trying.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(settings: &MemifSettings) -> Result<Self, OpenError> {
        settings.check()?;
        let mtu = settings.mtu();
        let shared = Arc::new(Shared::new().map_err(|e| control::no_resources(settings, &e))?);
        let control = Control::start(settings, settings.layout(), &shared)?;
        let mac = settings.mac.unwrap_or_else(MacAddr::random);
        let caps = PortCaps {
            lossless: settings.lossless,
            rto_floor_ns: 1_000_000,
            ..PortCaps::new(mac, mtu, settings.name())
        };
        tracing::debug!(port = %caps.name, station = %caps.station, mtu, "opened");
        let frame_max = ETH_HDR_LEN + mtu;
        Ok(Self {
            caps,
            frame_max,
            short_max: SHORT.min(frame_max),
            damages: settings.crc,
            polls_to_check: CHECK_EVERY,
            epoch: 0,
            live: None,
            logged_short_ring: 0,
            counters: PortCounters::default(),
            burst: [(std::ptr::null(), 0); BURST],
            whole: vec![0; frame_max].into(),
            shared,
            pid: std::process::id(),
            control: Some(control),
        })
    }

    /// Takes note of a new connection or of the end of the current one.
    #[cold]
    #[inline(never)]
    fn update_connection(&mut self) {
        // Acquire: the changes that the epoch was raised for.
        let epoch = self.shared.epoch.load(Acquire);
        if let Some(live) = self.live.as_mut().filter(|live| live.conn.is_down.load(Acquire)) {
            live.rx.close();
            live.tx.close();
            if live.rx.pending().is_ok_and(|count| count > 0) {
                // Frames that were sent before the peer left are received first.
                return;
            }
            self.live = None;
        }
        if self.live.is_none() {
            self.live = self.shared.adopt().map(Live::new);
            self.publish_rx_index();
        }
        let is_stopping = |live: &Live| live.conn.is_down.load(Acquire);
        if !self.live.as_ref().is_some_and(is_stopping) {
            self.epoch = epoch;
            self.shared.mark_seen(epoch);
        }
    }

    /// Calls [`update_connection`](Self::update_connection) if the epoch has changed.
    #[inline(always)]
    fn check_connection(&mut self) {
        if self.shared.epoch.load(Relaxed) != self.epoch {
            self.update_connection();
        }
    }

    /// Publishes the receive index, which a sleeping waiter compares with the ring.
    #[inline(always)]
    fn publish_rx_index(&self) {
        if let Some(live) = &self.live {
            // Relaxed: a waiter that reads an old index sees frames, or checks again later.
            self.shared.rx_at.store(live.rx.at(), Relaxed);
        }
    }

    /// Ends the connection after the peer wrote invalid ring indices.
    #[cold]
    #[inline(never)]
    fn disconnect_broken(&mut self) {
        self.counters.rx_dropped += 1;
        let Some(live) = self.live.take() else { return };
        tracing::error!(port = self.caps.name, "invalid ring indices from the peer; disconnecting");
        live.conn.is_broken.store(true, Relaxed);
        if let Some(control) = &self.control {
            control.wake();
        }
        self.update_connection();
    }

    #[inline(always)]
    fn push(&mut self, frame: &TxFrame<'_>, len: usize) -> Result<Pushed, Broken> {
        if self.live.is_none() {
            self.check_connection();
        }
        let Some(live) = &mut self.live else { return Ok(Pushed::Full) };
        let pushed = live.tx.push(&live.conn, frame, len, self.short_max, &mut self.whole)?;
        live.unpublished += len;
        if pushed != Pushed::Sent || live.unpublished > PUBLISH_BYTES || self.caps.lossless {
            live.publish();
        }
        Ok(pushed)
    }

    /// Drops a frame of `len` bytes that does not fit the longest chain of the client's buffers. On
    /// a lossless port this ends the connection.
    #[cold]
    #[inline(never)]
    fn drop_too_long(&mut self, len: usize) {
        self.counters.tx_dropped += 1;
        let Some(live) = &mut self.live else { return };
        let (port, slots) = (&self.caps.name, live.conn.tx.ring.count());
        // Once for all connections with rings of this size.
        if std::mem::replace(&mut self.logged_short_ring, slots) != slots {
            let most = chain_max(slots);
            tracing::error!(
                port,
                "a frame of {len} bytes does not fit {most} of the client's {slots} buffers, which \
                 is what one frame may take, and is dropped; write a smaller mtu= here, or there a \
                 larger bsize= or rsize="
            );
        }
        if self.caps.lossless {
            self.disconnect_broken();
        }
    }

    /// Collects received frames in `burst`, at most `max`, and returns their number.
    #[inline(always)]
    fn collect_burst(&mut self, max: usize, sink: &mut impl RxSink) -> Result<usize, Broken> {
        let Some(live) = &mut self.live else { return Ok(0) };
        let mut left = live.rx.pending()?;
        if left == 0 {
            return Ok(0);
        }
        live.rx.prefetch_next();
        let mut count = 0;
        while left > 0 && count < max {
            match live.rx.take(&live.conn, self.frame_max) {
                RxItem::Frame(base, len) => {
                    // SAFETY: `len` bytes at `base` are mapped as long as `live` is there (`take`).
                    sink.prefetch(&unsafe { RxFrame::from_raw(base, len as usize) });
                    self.burst[count] = (base, len);
                    count += 1;
                }
                RxItem::Bad => self.counters.rx_dropped += 1,
                RxItem::Chain if count > 0 => break,
                RxItem::Chain => {
                    if let Some(len) = live.rx.copy_chain(&live.conn, left, &mut self.whole) {
                        self.burst[0] = (self.whole.as_ptr(), len as u32);
                        return Ok(1);
                    }
                    self.counters.rx_dropped += 1;
                    break;
                }
            }
            left -= 1;
        }
        if count == 0 {
            // Slots of dropped frames are released although nothing is lent.
            self.release();
        }
        Ok(count)
    }

    /// [`Port::rx_burst`], which cannot fail here, for a sink of known type.
    #[inline(always)]
    pub fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> usize {
        self.polls_to_check -= 1;
        if self.live.is_none() || self.polls_to_check <= 0 {
            self.polls_to_check = CHECK_EVERY;
            self.check_connection();
        }
        let count = match self.collect_burst(max.min(BURST), sink) {
            Ok(0) => return 0,
            Ok(count) => count,
            Err(Broken) => {
                self.disconnect_broken();
                return 0;
            }
        };
        let mut bytes = 0;
        for &(base, len) in &self.burst[..count] {
            prefetch_long(base, len as usize);
            // SAFETY: mapped as long as `live` is there, or `whole`; the other side does not write
            // it before it is given back below. That anybody else might is D2.
            sink.frame(&unsafe { RxFrame::from_raw(base, len as usize) });
            bytes += u64::from(len);
        }
        self.counters.rx_frames += count as u64;
        self.counters.rx_bytes += bytes;
        self.release();
        count
    }

    /// Releases the slots of received frames, and publishes the receive index.
    #[inline(always)]
    fn release(&mut self) {
        if let Some(live) = &mut self.live {
            live.rx.release();
        }
        self.publish_rx_index();
    }
}

impl Live {
    fn new(conn: Arc<Conn>) -> Self {
        let (tx, rx) = (Sender::new(&conn.tx), Receiver::new(&conn.rx));
        Self { tx, rx, unpublished: 0, conn }
    }

    /// Publishes written frames to the receiver, and wakes it if it sleeps.
    #[inline(always)]
    fn publish(&mut self) {
        self.unpublished = 0;
        if self.tx.has_unpublished() {
            self.tx.publish();
            if self.tx.has_to_wake() {
                self.conn.tx.event.ring();
            }
        }
    }
}

impl Port for Memif {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    #[inline]
    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        // In every build: a longer frame would be written past its buffer.
        assert!(frame.head.len() >= ETH_HDR_LEN && len <= self.frame_max, "frame of {len} bytes");
        match self.push(frame, len) {
            Ok(Pushed::Sent) => {
                self.counters.sent(len);
                return Ok(Tx::Sent);
            }
            Ok(Pushed::Full) => {}
            Ok(Pushed::Long) => {
                self.drop_too_long(len);
                return Ok(Tx::Sent);
            }
            Err(Broken) => self.disconnect_broken(),
        }
        self.counters.tx_full += 1;
        Ok(Tx::Full)
    }

    #[inline]
    fn flush(&mut self) -> Result<(), PortGone> {
        if let Some(live) = &mut self.live {
            live.publish();
            if live.tx.prefetch_buffer(&live.conn).is_err() {
                self.disconnect_broken();
            }
        }
        Ok(())
    }

    fn rx_burst(&mut self, max: usize, mut sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        Ok(self.receive(max, &mut sink))
    }

    fn counters(&self) -> PortCounters {
        self.counters
    }

    fn damages(&self) -> bool {
        self.damages
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        Some(Arc::new(Waiter(Arc::clone(&self.shared))))
    }
}

impl FastPort for Memif {
    /// Receives one frame, if there is exactly one.
    #[inline(always)]
    fn rx_poll(&mut self, sink: &mut impl RxSink) -> Option<usize> {
        let Some(live) = &mut self.live else { return cold(None) };
        match live.rx.pending() {
            Ok(0) => return Some(0),
            Ok(1) => {}
            // Each is looked at before the first is taken.
            _ => return cold(None),
        }
        live.rx.prefetch_next();
        match live.rx.take(&live.conn, self.frame_max) {
            RxItem::Frame(base, len) => {
                // SAFETY: mapped as long as `live` is there, and to send (`ReplyTx`) leaves that
                // where it is and writes to the other ring. The other side does not write the frame
                // before it is given back below. That anybody else might is D2.
                sink.frame_with(&unsafe { RxFrame::from_raw(base, len as usize) }, ReplyTx(self));
                self.counters.received(len as usize);
                self.release();
                Some(1)
            }
            // Still there, and for `join`.
            RxItem::Chain => cold(None),
            RxItem::Bad => {
                self.counters.rx_dropped += 1;
                self.release();
                cold(Some(0))
            }
        }
    }

    #[inline]
    fn count(&mut self, polls: u32) {
        self.polls_to_check = self.polls_to_check.saturating_sub_unsigned(polls);
    }
}

impl InPlaceTx for Memif {
    /// Writes the frame to the next buffer of the ring.
    #[inline(always)]
    fn tx_in_place<const H: usize, R: WriteBody>(
        &mut self,
        _dst: u64,
        head: &impl WriteHead<H>,
        rest: &R,
    ) -> bool {
        let len = H + rest.size();
        let Some(live) = &mut self.live else { return cold(false) };
        if len > if R::LONG { self.frame_max } else { self.short_max } {
            return cold(false);
        }
        let Some(to) = live.tx.reserve_short(&live.conn, len) else { return cold(false) };
        // SAFETY: `len` bytes at `to` are mapped, and no frame lies there (`reserve_short`); no
        // more than `SHORT`, unless it is long, of which `H` are the head's. From the end to the
        // start, as in `copy_short_to_raw`.
        unsafe {
            rest.fill(to.add(H));
            head.fill(&mut HeadBuf::at(to));
        }
        live.tx.commit(len as u32);
        live.publish();
        self.counters.sent(len);
        // What it finds broken is found again by who sends next.
        let _ = live.tx.prefetch_buffer(&live.conn);
        true
    }
}

impl Drop for Memif {
    fn drop(&mut self) {
        // A child forked from the process that opened it has no thread and no part in the memif.
        if self.pid != std::process::id() {
            return;
        }
        if let Some(live) = &mut self.live {
            live.publish();
        }
        if let Some(control) = self.control.take() {
            control.end();
        }
    }
}
