//! Any device that DPDK drives: NICs, and its virtual ones (`dpdk:net_tap0,iface=bw0`).
//!
//! DPDK itself is started once in the process, by the first port ([`eal`]), and each port is a
//! device with one queue each way ([`device`]). What is special about a driver stands in [`pmd`],
//! and what memif takes besides in [`irq_guard`], [`listener`] and [`relay`].
//!
//! A frame to send is copied into a packet buffer and waits, with others, for
//! [`Port::flush`] or for a full burst; what the device's queue has no room for stays with the
//! port, in order, and [`Port::tx`] answers [`Tx::Full`] until it is gone. The ends of a pair of
//! rings keep nothing back: what is in the ring is in the receiver's memory. A received one is lent
//! where the driver put it; one that lies in several buffers is joined first. The buffers of others
//! are sent with next, where frames stay in memory ([`mbuf_cache`]). Memory of the application is
//! lent to a driver only if that copies within the call ([`extbuf`]): the contract of `tx` ends
//! with it.
//!
//! One thread at a time uses a port; a thread is made known to DPDK the first time it does, for
//! the sake of its stock of packet buffers.

mod device;
mod eal;
mod extbuf;
mod failure;
mod irq_guard;
mod link;
mod listener;
mod mbuf_cache;
mod pmd;
mod relay;
mod spec;
mod steer;
#[cfg(test)]
mod tests;
mod wait;

use std::ptr::null_mut;
use std::sync::atomic::AtomicU8;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use barewire_dpdk_sys as sys;

use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, HeadBuf, RxFrame, TxFrame, WriteBody, WriteHead};
use crate::hint::cold;
use crate::mem::{Hugepages, SHORT};
use crate::port::{
    FastPort, InPlaceTx, MacAddr, Port, PortCaps, PortCounters, PortGone, PortWaiter, ReplyTx,
    RxSink, Tx,
};
use device::{Device, Ring};
use eal::Eal;
use extbuf::ExtBuf;
use failure::Failure;
use mbuf_cache::{MbufCache, Order, prefetch_received};

pub(crate) use spec::parse;

/// Frames that are sent at once.
const TX_BURST: usize = 32;
/// Frames that are received at once; a larger `max` is cut to this. Of jumbo frames as few as leave
/// room in the nearest cache, of 32 or 48 KiB: what a driver has copied is copied on, and where it
/// goes takes as much.
const RX_BURST: usize = 32;
const RX_BURST_LEN: usize = 20 << 10;
const RX_JUMBO: usize = 2048;
/// Frames from this length on are lent to a driver that copies: what it takes to describe one is
/// about what it takes to copy that much.
const EXTBUF_LEN: usize = 512;
/// Ethernet's shortest frame, without its check sequence.
const FRAME_MIN: usize = 60;

/// Polls between two readings of the clock for what is looked at now and then, and how often that
/// is.
const POLLS: i32 = 1024;
const LOOK_NS: u64 = 50_000_000;

/// How long a lowered MTU may cost frames before the port is given up.
const TOO_LONG_NS: u64 = 2_000_000_000;

/// Time that a memif's connection may take.
const CONNECT_NS: u64 = 500_000_000;

/// After how long a port that keeps frames back wants to be polled.
const RETRY_NS: u64 = 20_000;

/// Which device, and how it is set up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DpdkSettings {
    /// Name of the device as DPDK has it: the driver and a number (`net_tap0`), or the address of
    /// a PCI device (`0000:05:00.0`).
    pub device: String,
    /// What the driver is told, as `key=value` with commas between. Default: nothing.
    pub args: String,
    /// Bytes after the Ethernet header. Default: that of the interface below, where there is one,
    /// otherwise 1500, since packet buffers take memory for the largest frame.
    pub mtu: Option<usize>,
    /// Address to answer to. Default: the device's, or a random one if it has none.
    pub mac: Option<MacAddr>,
    /// Descriptors of each queue, as far as the driver lets one choose. Default 512: what one
    /// sender has underway at 64 KiB and an MTU of 1500, ten times.
    pub ring_len: usize,
    /// Packet buffers. Default, and least: what queues and caches can hold, about 2000.
    pub mbuf_count: Option<usize>,
    /// Whether DPDK uses hugepages. Decided by the first port of the process. Default: if there
    /// are any.
    pub hugepages: Hugepages,
    /// Whether frames carry a checksum, which both ends of a link have to agree on. Default: not
    /// where they go through memory of this machine alone, a pair of rings or a memif.
    pub crc: Option<bool>,
    /// Two memifs that lead to each other, with no switch between, and whoever ends one waits until
    /// the other side has read it out. Frames are not kept to be sent again then. Both ends have to
    /// say the same. Default: no.
    pub lossless: bool,
    /// Frames of this EtherType are steered to the port, where the NIC can. Default: everything
    /// comes.
    pub ethertype: Option<u16>,
    /// Frames to every address are received, not only those to this port's and to groups: for who
    /// passes them on. Default: no.
    pub promiscuous: bool,
}

impl Default for DpdkSettings {
    fn default() -> Self {
        Self {
            device: String::new(),
            args: String::new(),
            mtu: None,
            mac: None,
            ring_len: 512,
            mbuf_count: None,
            hugepages: Hugepages::IfFree,
            crc: None,
            lossless: false,
            ethertype: None,
            promiscuous: false,
        }
    }
}

impl DpdkSettings {
    /// The value of a key that the driver is told.
    fn arg(&self, key: &str) -> Option<&str> {
        self.args.split(',').find_map(|arg| arg.strip_prefix(key)?.strip_prefix('='))
    }
}

/// The version of the DPDK that this build is linked with, such as `DPDK 22.11.11`.
pub fn version() -> String {
    eal::version()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Mbuf = *mut sys::rte_mbuf;

/// A port on a device of DPDK.
pub struct DpdkPort {
    caps: PortCaps,
    port: u16,
    frame_max: usize,
    /// Shorter frames are filled up to this.
    frame_min: usize,
    short_max: usize,
    /// Bytes may change on the way.
    damages: bool,
    /// The thread that used the port last, as [`this_thread`] names it.
    user: usize,
    /// Frames taken and not yet handed to the device: `tx[tx_at..tx_end]`.
    tx: [Mbuf; TX_BURST],
    tx_at: usize,
    tx_end: usize,
    mbuf_cache: MbufCache,
    /// Where it receives from and sends to, if it is one end of a pair of rings.
    rings: Option<[Ring; 2]>,
    order: Order,
    /// What it lends memory with, if its driver copies at once.
    extbuf: Option<ExtBuf>,
    rx: [Mbuf; RX_BURST],
    /// A packet that came alone and was lent; null if there is none. It is kept or given back by
    /// the next poll: whoever waits for it answers first.
    held: Mbuf,
    /// Frames that the device is asked for at a time.
    rx_step: usize,
    /// Where a frame of several buffers is joined.
    whole: Box<[u8]>,
    counters: PortCounters,
    polls_to_look: i32,
    looked_ns: u64,
    /// What the interface below carried when it was last looked at.
    interface_mtu: usize,
    /// Length of the longest frame sent since then, if it was not a short one.
    longest: usize,
    /// Since when frames have been too long for it.
    too_long_ns: Option<u64>,
    link: Link,
    irq_guard: Option<Arc<irq_guard::Member>>,
    waiter: Arc<wait::Nap>,
    /// The process that opened the port; a forked child is another.
    pid: u32,
    /// Taken when the port is dropped.
    device: Option<Device>,
    eal: &'static Eal,
}

// SAFETY: the raw pointers are packet buffers of the port's own pool, which any thread may use;
// what a thread has to have been made known for is asked for in every call (`user`).
unsafe impl Send for DpdkPort {}

/// What is known of the link, and what is being done about it.
struct Link {
    is_up: bool,
    /// Bursts may be called.
    is_started: bool,
    /// It is the client of a memif, who has to connect anew when the server has gone.
    reconnects: bool,
    /// When it last began to connect.
    tried_ns: u64,
    /// A restart that EAL's thread is at.
    restart: Option<Arc<AtomicU8>>,
}

const RESTARTING: u8 = 0;
const RESTARTED: u8 = 1;
const REFUSED: u8 = 2;

impl DpdkPort {
    /// Starts DPDK if it does not run, and brings the device up.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind but DPDK itself.
    pub fn open(settings: &DpdkSettings) -> Result<Self, OpenError> {
        let name = format!("dpdk:{}", settings.device);
        let refused =
            |failure: Failure| OpenError::device(&name, failure.errno, failure.why, failure.mend);
        pmd::check(settings).map_err(refused)?;
        let eal = eal::start(settings.hugepages).map_err(refused)?;
        let wanted = settings.clone();
        let (opened, said) = eal.run(move || Device::open(&wanted));
        let device = opened.map_err(|failure| {
            let cause = eal::because(&said, failure.errno);
            refused(match failure.why.as_str() {
                "" => probe_failed(settings, &cause, failure.errno),
                _ if said.is_empty() => failure,
                why => Failure { why: format!("{why} ({cause})"), ..failure },
            })
        })?;
        Ok(Self::over(device, eal, settings))
    }

    fn over(device: Device, eal: &'static Eal, settings: &DpdkSettings) -> Self {
        let caps = PortCaps {
            lossless: device.is_lossless(settings),
            rto_floor_ns: device.pmd.rto_floor_ns,
            // Drivers of the kernel's interfaces are for trials: `afpacket:` and `xdp:` are better.
            via_kernel: false,
            link_bps: device.link_bps,
            ..PortCaps::new(device.mac, device.mtu, spec::text(settings))
        };
        // The zero-copy kind keeps what it sends until the other side has read it.
        let copies = device.pmd.is("net_memif") && settings.arg("zero-copy") != Some("yes");
        let link = Link {
            is_up: link::link(device.port).0,
            is_started: device.is_started,
            reconnects: device.pmd.is("net_memif") && settings.arg("role") != Some("server"),
            tried_ns: now_ns(),
            restart: None,
        };
        Self {
            interface_mtu: caps.mtu,
            longest: 0,
            too_long_ns: None,
            caps,
            port: device.port,
            frame_max: device.frame_max,
            frame_min: if device.pmd.pads { FRAME_MIN } else { 0 },
            short_max: SHORT.min(device.frame_max),
            damages: settings.crc.unwrap_or(!device.pmd.is_memory()),
            user: 0,
            tx: [null_mut(); TX_BURST],
            tx_at: 0,
            tx_end: 0,
            mbuf_cache: MbufCache::new(device.frame_max, device.pmd.recycles()),
            rings: device.rings(),
            order: Order::new(),
            extbuf: copies.then(|| ExtBuf::new(device.pool)).flatten(),
            rx: [null_mut(); RX_BURST],
            held: null_mut(),
            rx_step: rx_step(device.frame_max),
            whole: vec![0; device.frame_max].into(),
            counters: PortCounters::default(),
            polls_to_look: POLLS,
            looked_ns: now_ns(),
            link,
            irq_guard: device.irq_guard.clone(),
            waiter: Arc::default(),
            pid: std::process::id(),
            device: Some(device),
            eal,
        }
    }

    /// Hands frames to the device as long as it takes any, and says whether it took all.
    #[inline]
    fn push(&mut self) -> bool {
        // SAFETY: frames of ours, from `tx_at` to `tx_end` in `tx`.
        self.tx_at += unsafe {
            let from = self.tx.as_mut_ptr().add(self.tx_at);
            self.burst(from, self.tx_end - self.tx_at)
        };
        if self.tx_at < self.tx_end {
            return false;
        }
        (self.tx_at, self.tx_end) = (0, 0);
        true
    }

    /// Hands frames to the device, and says how many it took.
    ///
    /// # Safety
    /// `count` packets of the port's lie at `frames`. Those that were taken are no longer its own.
    #[inline(always)]
    unsafe fn burst(&mut self, frames: *mut Mbuf, count: usize) -> usize {
        if !self.link.is_started {
            return cold(0);
        }
        // SAFETY: the port is started, this thread is the only one to use it (`&mut self`), and
        // the rest is the caller's promise.
        let send = || unsafe { sys::tx_burst(self.port, 0, frames, count as u16) };
        guarded(&self.irq_guard, send).into()
    }

    /// Makes room for one more frame, or says that there is none.
    #[cold]
    #[inline(never)]
    fn make_room(&mut self) -> bool {
        if self.tx_at == 0 {
            self.push();
        }
        if self.tx_at > 0 {
            self.tx.copy_within(self.tx_at..self.tx_end, 0);
            (self.tx_at, self.tx_end) = (0, self.tx_end - self.tx_at);
        }
        self.tx_end < TX_BURST
    }

    /// Takes the frame that the device had no room for out of the queue, into the stock.
    #[cold]
    fn take_back(&mut self) {
        self.mbuf_cache.put_back(self.tx[self.tx_at]);
        (self.tx_at, self.tx_end) = (0, 0);
        self.counters.tx_full += 1;
    }

    /// Lends a long frame to the driver, after those that wait, and says whether it was sent. None
    /// if it has to be copied.
    #[inline(never)]
    fn lend_out(&mut self, frame: &TxFrame<'_>) -> Option<bool> {
        let body = frame.body_in_one_piece()?;
        let mut extbuf = self.extbuf.take()?;
        let mut sent = self.tx_end == 0 || self.push();
        if sent {
            let mut packet = extbuf.describe(frame, body);
            // SAFETY: one packet, of ours as long as the loan has a hold on it.
            sent = unsafe { self.burst(&mut packet, 1) } == 1;
            extbuf.end(sent);
        }
        self.extbuf = Some(extbuf);
        Some(sent)
    }

    /// Copies the frame into a packet buffer.
    #[inline(always)]
    fn fill(&mut self, mbuf: Mbuf, frame: &TxFrame<'_>, len: usize) {
        // SAFETY: a buffer from the stock, which nobody else has. It has room for `frame_max` bytes
        // behind `data_off` (`Pmd::room`), which `len` and `frame_min` do not exceed. It overlaps
        // no memory of the frame. `copy_short_to_raw` needs what is asked for.
        unsafe {
            let data = (*mbuf).buf_addr.cast::<u8>().add(usize::from((*mbuf).data_off));
            let short = len <= self.short_max && frame.fits_short_copy();
            match frame.body_in_one_piece() {
                Some(body) if short => frame.copy_short_to_raw(body, data),
                _ => {
                    self.longest = self.longest.max(len);
                    frame.copy_to_raw(data);
                }
            }
            let mut wire_len = len;
            if len < self.frame_min {
                data.add(len).write_bytes(0, self.frame_min - len);
                wire_len = self.frame_min;
            }
            (*mbuf).data_len = wire_len as u16;
            (*mbuf).pkt_len = wire_len as u32;
        }
    }

    /// Takes at most `max` frames from the device, into `rx`, which has room.
    #[inline(always)]
    fn take(&mut self, max: usize) -> usize {
        let has_none = self.rings.is_some_and(|[from, _]| from.is_empty());
        if !self.held.is_null() {
            self.settle();
        }
        if has_none {
            return 0;
        }
        if self.rings.is_some() {
            // Now, and not when the ring has said which it is: that is one wait the less.
            self.order.prefetch();
        }
        let (max, rx) = (max.min(RX_BURST), self.rx.as_mut_ptr());
        // SAFETY: the port is started, this thread is the only one to use it (`&mut self`), and
        // `rx` has room for `max`.
        let count =
            guarded(&self.irq_guard, || unsafe { sys::rx_burst(self.port, 0, rx, max as u16) });
        usize::from(count).min(max)
    }

    /// Lends what `rx[..count]` holds, and keeps the buffers or gives them back. Says how many were
    /// lent and not dropped.
    #[inline(always)]
    fn lend(&mut self, count: usize, sink: &mut impl RxSink) -> usize {
        if let Some([_, to]) = self.rings {
            // What comes is most often answered.
            to.warm();
        }
        if count > 1 {
            return self.lend_many(count, sink);
        }
        let mbuf = self.rx[0];
        let lent = self.lend_one::<true>(mbuf, sink);
        // Not before: whoever is lent the frame may send, and must not send with this.
        self.held = mbuf;
        usize::from(lent)
    }

    /// Keeps the packet that is held, or gives it back.
    #[inline(never)]
    fn settle(&mut self) {
        let mbuf = std::mem::replace(&mut self.held, null_mut());
        self.order.came(mbuf);
        // SAFETY: the packet is ours, and nobody has borrowed it since it was lent.
        if !unsafe { self.mbuf_cache.keep(mbuf) } {
            self.rx[0] = mbuf;
            self.free(1);
        }
    }

    /// As [`lend`](Self::lend), for more than one frame.
    #[inline(never)]
    fn lend_many(&mut self, count: usize, sink: &mut impl RxSink) -> usize {
        let rx = &self.rx[..count];
        rx.iter().for_each(|&mbuf| prefetch_received(mbuf));
        for &mbuf in rx {
            // SAFETY: a received packet, which is ours.
            sink.prefetch(&unsafe { first_piece(mbuf) });
        }
        let (mut lent, mut left) = (0, 0);
        for i in 0..count {
            let mbuf = self.rx[i];
            self.order.came(mbuf);
            lent += usize::from(self.lend_one::<false>(mbuf, sink));
            // SAFETY: the packet is ours and nobody borrows it any more.
            if !unsafe { self.mbuf_cache.keep(mbuf) } {
                self.rx[left] = mbuf;
                left += 1;
            }
        }
        if left > 0 {
            self.free(left);
        }
        lent
    }

    /// Lends a packet that has come, or drops it, and says which. One that came alone (`ALONE`) may
    /// be answered meanwhile.
    #[inline(always)]
    fn lend_one<const ALONE: bool>(&mut self, mbuf: Mbuf, sink: &mut impl RxSink) -> bool {
        // SAFETY: a received packet, which is ours: `data_len` bytes lie at `data_off`.
        let (pieces, len, first) =
            unsafe { ((*mbuf).nb_segs, (*mbuf).pkt_len as usize, first_piece(mbuf)) };
        if len > self.frame_max || len < ETH_HDR_LEN {
            self.counters.rx_dropped += 1;
            return cold(false);
        }
        self.counters.received(len);
        if pieces > 1 {
            cold(());
            // SAFETY: as above; `whole` has `frame_max` bytes.
            let joined = unsafe { join(mbuf, &mut self.whole) };
            lend_joined(&self.whole[..joined], sink);
        } else if ALONE {
            // To send (`ReplyTx`) takes none of the buffers that were received.
            sink.frame_with(&first, ReplyTx(self));
        } else {
            sink.frame(&first);
        }
        true
    }

    /// Gives the packets in `rx[..count]` back to where they are from.
    #[inline(never)]
    fn free(&mut self, count: usize) {
        let packets = &mut self.rx[..count];
        // SAFETY: packets of ours, of which nobody borrows anything.
        unsafe { sys::rte_pktmbuf_free_bulk(packets.as_mut_ptr(), count as u32) };
    }

    /// [`Port::rx_burst`], for a sink of known type.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> Result<usize, PortGone> {
        let thread = this_thread();
        if thread != self.user {
            self.enter(thread);
        }
        self.polls_to_look -= 1;
        if self.polls_to_look <= 0 {
            self.polls_to_look = POLLS;
            self.look()?;
        }
        if self.tx_end != 0 {
            self.push();
        }
        if !self.link.is_started {
            return self.look_while_down();
        }
        let max = max.min(RX_BURST);
        let (mut total, mut lent) = (0, 0);
        loop {
            let step = self.rx_step.min(max - total);
            let count = self.take(step);
            if count > 0 {
                lent += self.lend(count, sink);
            }
            total += count;
            if count < step || total == max {
                return Ok(lent);
            }
        }
    }

    /// Makes the calling thread known to DPDK.
    #[cold]
    fn enter(&mut self, thread: usize) {
        self.user = thread;
        wait::register();
    }

    /// Looks at what changes seldom.
    #[cold]
    #[inline(never)]
    fn look(&mut self) -> Result<(), PortGone> {
        let now = now_ns();
        if now.saturating_sub(self.looked_ns) < LOOK_NS {
            return Ok(());
        }
        self.looked_ns = now;
        self.look_at_restart();
        let Some(device) = &self.device else { return Ok(()) };
        if let Some((name, index)) = &device.interface
            && !pmd::has_interface(*index)
        {
            let why = format!("interface {name} was removed; ip link shows those left");
            return Err(PortGone::new(&self.caps.name, &why));
        }
        let below = device.interface.as_ref().filter(|_| device.pmd.follows_interface());
        if let Some(mtu) = below.and_then(|(name, _)| super::netdev::interface_mtu(name)) {
            self.look_at_mtu(mtu, now)?;
        }
        // SAFETY: asks about a port that exists.
        if unsafe { sys::rte_eth_dev_is_removed(self.port) } == 1 {
            return Err(PortGone::new(&self.caps.name, "the device was unplugged"));
        }
        let (is_up, _bps) = link::link(self.port);
        if is_up != self.link.is_up {
            tracing::info!(port = self.caps.name, "link is {}", if is_up { "up" } else { "down" });
            self.link.is_up = is_up;
            self.link.tried_ns = 0;
        }
        // A connection that is being made is left alone: a server panics over one that ends early.
        let is_tried = self.link.is_started && now < self.link.tried_ns + CONNECT_NS;
        if !is_up && !is_tried && self.link.reconnects && self.link.restart.is_none() {
            self.link.tried_ns = now;
            self.restart();
        }
        Ok(())
    }

    /// Sees whether the interface below still carries our frames. The driver says nothing of those
    /// that it does not: the kernel drops them, while shorter ones keep the peer alive.
    fn look_at_mtu(&mut self, mtu: usize, now: u64) -> Result<(), PortGone> {
        let (port, was) = (&self.caps.name, self.caps.mtu);
        let interface = self.device.as_ref().and_then(|device| device.interface.as_ref());
        let name = interface.map_or("the interface", |(name, _)| name);
        if mtu != self.interface_mtu && mtu < was {
            tracing::warn!(
                port,
                "the mtu of {name} is {mtu} now, longer frames are lost until: ip link set {name} \
                 mtu {was}"
            );
        }
        self.interface_mtu = mtu;
        let is_too_long = std::mem::take(&mut self.longest) > ETH_HDR_LEN + mtu;
        if mtu >= was {
            self.too_long_ns = None;
        } else if is_too_long && now - *self.too_long_ns.get_or_insert(now) >= TOO_LONG_NS {
            let why = format!(
                "the mtu of {name} was lowered to {mtu} while in use; ip link set {name} mtu \
                 {was}, and open it again"
            );
            return Err(PortGone::new(port, &why));
        }
        Ok(())
    }

    /// Has EAL's thread connect the device anew. No burst is called until it has.
    fn restart(&mut self) {
        let state = Arc::new(AtomicU8::new(RESTARTING));
        let (told, port, was_started) = (Arc::clone(&state), self.port, self.link.is_started);
        self.link.is_started = false;
        self.link.restart = Some(state);
        self.eal.post(move || {
            let state =
                if device::restart(port, was_started).is_ok() { RESTARTED } else { REFUSED };
            told.store(state, Release);
        });
    }

    fn look_at_restart(&mut self) {
        let Some(state) = &self.link.restart else { return };
        match state.load(Acquire) {
            RESTARTING => return,
            state => self.link.is_started = state == RESTARTED,
        }
        self.link.restart = None;
    }
}

/// Calls a burst, if it may begin.
#[inline(always)]
fn guarded(irq_guard: &Option<Arc<irq_guard::Member>>, burst: impl FnOnce() -> u16) -> u16 {
    let Some(irq_guard) = irq_guard else { return burst() };
    if !irq_guard.begin() {
        return 0;
    }
    let count = burst();
    irq_guard.end();
    count
}

/// Frames of at most `frame_max` bytes that a device is asked for at a time.
fn rx_step(frame_max: usize) -> usize {
    if frame_max < RX_JUMBO { RX_BURST } else { (RX_BURST_LEN / frame_max).max(1) }
}

/// The first buffer of a packet.
///
/// # Safety
/// `mbuf` is a received packet that stays the caller's as long as the frame is used.
#[inline(always)]
unsafe fn first_piece<'a>(mbuf: Mbuf) -> RxFrame<'a> {
    // SAFETY: `data_len` bytes at `data_off` of a packet's buffer are mapped.
    unsafe {
        let data = (*mbuf).buf_addr.cast::<u8>().add(usize::from((*mbuf).data_off));
        RxFrame::from_raw(data, usize::from((*mbuf).data_len))
    }
}

/// Copies a packet of several buffers to `whole` and says how long it is.
///
/// # Safety
/// As [`first_piece`].
#[cold]
#[inline(never)]
unsafe fn join(mbuf: Mbuf, whole: &mut [u8]) -> usize {
    let (mut at, mut piece) = (0, mbuf);
    while !piece.is_null() {
        // SAFETY: every buffer of the chain is part of the packet.
        let (frame, next) = unsafe { (first_piece(piece), (*piece).next) };
        let Some(room) = whole.get_mut(at..at + frame.len()) else { break };
        frame.copy_to(0, room);
        (at, piece) = (at + frame.len(), next);
    }
    at
}

/// Lends a frame that had to be joined.
#[cold]
#[inline(never)]
fn lend_joined(whole: &[u8], sink: &mut impl RxSink) {
    sink.frame(&RxFrame::new(whole));
}

/// A number that no other living thread has, and never 0.
#[inline(always)]
fn this_thread() -> usize {
    thread_local!(static ME: u8 = const { 0 });
    ME.with(|me| std::ptr::from_ref(me).addr())
}

/// What to say of a device that no driver took.
fn probe_failed(settings: &DpdkSettings, cause: &str, errno: i32) -> Failure {
    let device = &settings.device;
    if pmd::is_pci(device) || !pmd::Pmd::of(device).is("") {
        return Failure::new(errno, format!("no driver took it: {cause}"));
    }
    let driver = device.trim_end_matches(|c: char| c.is_ascii_digit());
    let mend = "docs/dpdk.md has names, and dpkg -l 'librte-net-*' shows what is installed";
    Failure::new(errno, format!("DPDK has no driver called {driver}")).mend(mend)
}

impl Port for DpdkPort {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    #[inline]
    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        // In every build: a longer frame would be written past its buffer.
        assert!(frame.head.len() >= ETH_HDR_LEN && len <= self.frame_max, "frame of {len} bytes");
        let thread = this_thread();
        if thread != self.user {
            self.enter(thread);
        }
        if len >= EXTBUF_LEN
            && self.extbuf.is_some()
            && let Some(sent) = self.lend_out(frame)
        {
            return Ok(self.counted(sent, len));
        }
        let has_room = self.tx_end < TX_BURST || self.make_room();
        let pool = self.device.as_ref().filter(|_| has_room).map(|device| device.pool);
        let Some(mbuf) = pool.and_then(|pool| self.mbuf_cache.take(pool)) else {
            return Ok(self.counted(false, len));
        };
        self.fill(mbuf, frame, len);
        self.tx[self.tx_end] = mbuf;
        self.tx_end += 1;
        if self.caps.lossless && !self.push() {
            // What was answered `Sent` has to be where the receiver finds it without us.
            self.take_back();
            return Ok(Tx::Full);
        }
        Ok(self.counted(true, len))
    }

    #[inline]
    fn flush(&mut self) -> Result<(), PortGone> {
        if self.tx_end != 0 {
            self.push();
        }
        self.mbuf_cache.warm();
        Ok(())
    }

    fn rx_burst(&mut self, max: usize, mut sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        self.receive(max, &mut sink)
    }

    fn counters(&self) -> PortCounters {
        self.counters
    }

    fn damages(&self) -> bool {
        self.damages
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        Some(Arc::clone(&self.waiter) as Arc<dyn PortWaiter>)
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        (self.tx_end != 0).then(|| now_ns() + RETRY_NS)
    }
}

impl FastPort for DpdkPort {
    #[inline(always)]
    fn rx_poll(&mut self, sink: &mut impl RxSink) -> Option<usize> {
        if this_thread() != self.user || self.tx_end != 0 || !self.link.is_started {
            return cold(None);
        }
        let count = self.take(self.rx_step);
        Some(if count > 0 { self.lend(count, sink) } else { 0 })
    }

    #[inline]
    fn count(&mut self, polls: u32) {
        self.polls_to_look = self.polls_to_look.saturating_sub_unsigned(polls);
    }
}

impl InPlaceTx for DpdkPort {
    /// It goes where the port leads to.
    #[inline(always)]
    fn tx_in_place<const H: usize, R: WriteBody>(
        &mut self,
        _dst: u64,
        head: &impl WriteHead<H>,
        rest: &R,
    ) -> bool {
        let len = H + rest.size();
        let len_max = if R::LONG { self.copied_max() } else { self.short_max };
        let is_short = len <= len_max && len >= self.frame_min;
        if !is_short || this_thread() != self.user || self.tx_end != 0 {
            return cold(false);
        }
        if self.mbuf_cache.is_empty() && !self.refill_cache() {
            return cold(false);
        }
        let Some(mut mbuf) = self.mbuf_cache.take_cached() else { return cold(false) };
        if R::LONG {
            self.longest = self.longest.max(len);
        }
        // SAFETY: the buffer is ours alone, of the pool's own, and has room for `len` bytes, no
        // more than `SHORT`, unless it is long, of which `H` are the head's. From the end to the
        // start, as in `copy_short_to_raw`.
        unsafe {
            let data = (*mbuf).buf_addr.cast::<u8>().add(usize::from((*mbuf).data_off));
            rest.fill(data.add(H));
            head.fill(&mut HeadBuf::at(data));
            (*mbuf).data_len = len as u16;
            (*mbuf).pkt_len = len as u32;
        }
        // SAFETY: one packet of ours.
        if unsafe { self.burst(&mut mbuf, 1) } == 0 {
            self.mbuf_cache.put_back(mbuf);
            return cold(false);
        }
        self.counters.sent(len);
        self.mbuf_cache.warm();
        true
    }
}

impl DpdkPort {
    /// Takes buffers from the pool, and says whether it had some. Who answers a frame while it is
    /// lent has that one's buffer only afterwards, and may have had no other.
    #[cold]
    #[inline(never)]
    fn refill_cache(&mut self) -> bool {
        if !self.held.is_null() {
            self.settle();
        }
        !self.mbuf_cache.is_empty()
            || self.device.as_ref().is_some_and(|device| self.mbuf_cache.fill(device.pool))
    }

    /// Length of the longest frame that is not lent to the driver.
    #[inline(always)]
    fn copied_max(&self) -> usize {
        if self.extbuf.is_some() { self.frame_max.min(EXTBUF_LEN - 1) } else { self.frame_max }
    }

    /// Counts a frame of `len` bytes that was taken, or for which there was no room.
    #[inline(always)]
    fn counted(&mut self, is_sent: bool, len: usize) -> Tx {
        if !is_sent {
            self.counters.tx_full += 1;
            return Tx::Full;
        }
        self.counters.sent(len);
        Tx::Sent
    }

    /// A poll of a device that is being connected.
    #[cold]
    fn look_while_down(&mut self) -> Result<usize, PortGone> {
        self.look_at_restart();
        if self.link.restart.is_none() {
            self.look()?;
        }
        Ok(0)
    }
}

impl Drop for DpdkPort {
    fn drop(&mut self) {
        // A child forked from the process that opened it has no device, nor a thread of EAL.
        let Some(mut device) = self.device.take().filter(|_| self.pid == std::process::id()) else {
            return;
        };
        while self.link.restart.is_some() {
            std::thread::yield_now();
            self.look_at_restart();
        }
        self.push();
        device.is_started = self.link.is_started;
        // SAFETY: packet buffers that nobody else has.
        unsafe {
            let left = self.tx_end - self.tx_at;
            sys::rte_pktmbuf_free_bulk(self.tx.as_mut_ptr().add(self.tx_at), left as u32);
        }
        if !self.held.is_null() {
            self.settle();
        }
        self.mbuf_cache.empty();
        if let Some(extbuf) = self.extbuf.take() {
            extbuf.free();
        }
        self.eal.run(move || device.close());
    }
}
