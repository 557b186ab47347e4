//! DPDK backend: ports on NICs and virtual devices of DPDK (`dpdk:net_tap0,iface=bw0`).
//!
//! EAL is initialised once per process, by the first port ([`eal`]). Each port is one ethdev with
//! one receive and one transmit queue ([`device`]). Properties of drivers are in [`pmd`]; memif
//! additionally needs [`irq_guard`], [`listener`] and [`relay`].
//!
//! A frame to send is copied into an mbuf and queued until [`Port::flush`] or a full burst. Frames
//! for which the device's queue has no room stay with the port, in order, and [`Port::tx`] answers
//! [`Tx::Full`] until they are sent. A port on a pair of rings queues nothing: a frame in the ring
//! is in the receiver's memory. A received frame is lent in the driver's mbuf; a multi-segment
//! packet is linearised first. Where frames stay in memory, received mbufs are reused for sending
//! ([`mbuf_cache`]). Application memory is lent to a driver only if the driver copies within the
//! call ([`extbuf`]), since `tx` may not keep it.
//!
//! One thread at a time uses a port. A thread is registered with DPDK at its first use, so that it
//! has an mbuf cache.

mod device;
mod eal;
mod extbuf;
mod failure;
mod irq_guard;
mod link;
mod listener;
mod mbuf_cache;
mod pmd;
mod private_dir;
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
use mbuf_cache::{MbufCache, RxOrderPredictor, prefetch_received};

pub(crate) use spec::parse;

/// Frames per transmit burst.
const TX_BURST: usize = 32;
/// Frames per receive burst; a larger `max` is cut to this. For jumbo frames as few as fit the L1
/// cache of 32 or 48 KiB, since frames that the driver has copied are copied once more.
const RX_BURST: usize = 32;
const RX_BURST_LEN: usize = 20 << 10;
const RX_JUMBO: usize = 2048;
/// Frames from this length on are lent to a driver that copies: describing one costs about as much
/// as copying this many bytes.
const EXTBUF_LEN_MIN: usize = 512;
/// Ethernet's shortest frame, without FCS.
const FRAME_MIN: usize = 60;

/// Polls between two reads of the clock, and interval of the device checks.
const POLLS_PER_CHECK: i32 = 1024;
const CHECK_NS: u64 = 50_000_000;

/// How long a lowered MTU may drop frames before the port is gone.
const MTU_GRACE_NS: u64 = 2_000_000_000;

/// Time limit of a memif's connection attempt.
const CONNECT_NS: u64 = 500_000_000;

/// Interval at which a port with queued frames is to be polled.
const RETRY_NS: u64 = 20_000;

/// Settings of a DPDK device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DpdkSettings {
    /// DPDK's name of the device: the driver and a number (`net_tap0`), or a PCI address
    /// (`0000:05:00.0`).
    pub device: String,
    /// Device arguments, as `key=value` separated by commas. Default: none.
    pub args: String,
    /// MTU. Default: that of the interface below, if there is one, otherwise 1500, since mbufs are
    /// sized for the largest frame.
    pub mtu: Option<usize>,
    /// MAC address. Default: the device's, or a random one if it has none.
    pub mac: Option<MacAddr>,
    /// Descriptors of each queue, as far as the driver supports it. Default 512: ten times what one
    /// sender has in flight at 64 KiB and an MTU of 1500.
    pub ring_len: usize,
    /// Number of mbufs. Default and minimum: what queues and caches can hold, about 2000.
    pub mbuf_count: Option<usize>,
    /// Whether EAL uses hugepages. Decided by the first port of the process. Default: if any are
    /// free.
    pub hugepages: Hugepages,
    /// Whether frames carry a checksum; both ends of a link have to agree. Default: no on memory of
    /// this machine (a pair of rings or a memif), else yes.
    pub crc: Option<bool>,
    /// For a memif: it is connected to its peer without a switch, and a process that closes it
    /// waits until the peer has drained it. Frames are then not kept for retransmission. Both ends
    /// have to agree. Default: no.
    pub lossless: bool,
    /// Steers frames of this EtherType to the port, if the NIC supports it. Default: no steering.
    pub ethertype: Option<u16>,
    /// Promiscuous mode: receives frames to every address, not only to this port's and to multicast
    /// addresses. For ports that forward frames. Default: off.
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
    /// Value of a device argument.
    fn arg(&self, key: &str) -> Option<&str> {
        self.args.split(',').find_map(|arg| arg.strip_prefix(key)?.strip_prefix('='))
    }
}

/// Version of the linked DPDK, such as `DPDK 22.11.11`.
pub fn version() -> String {
    eal::version()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

type Mbuf = *mut sys::rte_mbuf;

/// A port on a DPDK device.
pub struct DpdkPort {
    caps: PortCaps,
    port: u16,
    frame_max: usize,
    /// Shorter frames are padded to this length.
    frame_min: usize,
    short_max: usize,
    /// Frames may be corrupted on the way.
    damages: bool,
    /// The thread that used the port last, by [`this_thread`]. It is registered with DPDK.
    registered_thread: usize,
    /// Frames taken and not yet handed to the device: `tx[tx_at..tx_end]`.
    tx: [Mbuf; TX_BURST],
    tx_at: usize,
    tx_end: usize,
    mbuf_cache: MbufCache,
    /// The rings to receive from and to send to, for one end of a pair of rings.
    rings: Option<[Ring; 2]>,
    rx_order: RxOrderPredictor,
    /// For drivers that copy within the call: mbufs that point to application memory.
    extbuf: Option<ExtBuf>,
    rx: [Mbuf; RX_BURST],
    /// A received mbuf that was lent alone; null if there is none. The next poll recycles or frees
    /// it, so that a reply is sent first.
    held: Mbuf,
    /// Frames per call of `rte_eth_rx_burst`.
    rx_step: usize,
    /// Buffer in which a multi-segment packet is linearised.
    linear: Box<[u8]>,
    counters: PortCounters,
    polls_to_check: i32,
    checked_ns: u64,
    /// MTU of the interface below at the last check.
    interface_mtu: usize,
    /// Longest frame sent since the last check; short frames are not counted.
    longest_tx: usize,
    /// Since when frames exceed that MTU.
    too_long_ns: Option<u64>,
    link: LinkState,
    irq_guard: Option<Arc<irq_guard::BurstGuard>>,
    waiter: Arc<wait::PollWaiter>,
    /// Process id of the opener; a forked child has another one.
    pid: u32,
    /// Taken when the port is dropped.
    device: Option<Device>,
    eal: &'static Eal,
}

// SAFETY: the raw pointers are mbufs of the port's own pool, which any thread may use; every call
// checks that its thread is registered (`registered_thread`).
unsafe impl Send for DpdkPort {}

/// State of the link, and of its reconnection.
struct LinkState {
    is_up: bool,
    /// Bursts may be called.
    is_started: bool,
    /// A memif client, which reconnects when the server has gone.
    reconnects: bool,
    /// Start of the last connection attempt.
    connect_started_ns: u64,
    /// State of a restart that is running in EAL's thread.
    restart: Option<Arc<AtomicU8>>,
}

const RESTART_PENDING: u8 = 0;
const RESTART_DONE: u8 = 1;
const RESTART_FAILED: u8 = 2;

impl DpdkPort {
    /// Initialises EAL if necessary, and starts the device.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind but EAL itself.
    pub fn open(settings: &DpdkSettings) -> Result<Self, OpenError> {
        let name = format!("dpdk:{}", settings.device);
        let refused =
            |failure: Failure| OpenError::device(&name, failure.errno, failure.why, failure.mend);
        pmd::check(settings).map_err(refused)?;
        let eal = eal::start(settings.hugepages).map_err(refused)?;
        let wanted = settings.clone();
        let (opened, log_lines) = eal.run(move || Device::open(&wanted));
        let device = opened.map_err(|failure| {
            let cause = eal::log_cause(&log_lines, failure.errno);
            refused(match failure.why.as_str() {
                "" => probe_failed(settings, &cause, failure.errno),
                _ if log_lines.is_empty() => failure,
                why => Failure { why: format!("{why} ({cause})"), ..failure },
            })
        })?;
        Ok(Self::over(device, eal, settings))
    }

    fn over(device: Device, eal: &'static Eal, settings: &DpdkSettings) -> Self {
        let caps = PortCaps {
            lossless: device.is_lossless(settings),
            rto_floor_ns: device.pmd.rto_floor_ns,
            // Drivers on kernel interfaces are for tests: `afpacket:` and `xdp:` are better.
            via_kernel: false,
            link_bps: device.link_bps,
            ..PortCaps::new(device.mac, device.mtu, spec::text(settings))
        };
        // In zero-copy mode memif references sent buffers until the peer has read them.
        let copies = device.pmd.is("net_memif") && settings.arg("zero-copy") != Some("yes");
        let link = LinkState {
            is_up: link::link(device.port).0,
            is_started: device.is_started,
            reconnects: device.pmd.is("net_memif") && settings.arg("role") != Some("server"),
            connect_started_ns: now_ns(),
            restart: None,
        };
        Self {
            interface_mtu: caps.mtu,
            longest_tx: 0,
            too_long_ns: None,
            caps,
            port: device.port,
            frame_max: device.frame_max,
            frame_min: if device.pmd.pads { FRAME_MIN } else { 0 },
            short_max: SHORT.min(device.frame_max),
            damages: settings.crc.unwrap_or(!device.pmd.is_memory()),
            registered_thread: 0,
            tx: [null_mut(); TX_BURST],
            tx_at: 0,
            tx_end: 0,
            mbuf_cache: MbufCache::new(device.frame_max, device.pmd.can_recycle_rx()),
            rings: device.rings(),
            rx_order: RxOrderPredictor::new(),
            extbuf: copies.then(|| ExtBuf::new(device.pool)).flatten(),
            rx: [null_mut(); RX_BURST],
            held: null_mut(),
            rx_step: rx_step(device.frame_max),
            linear: vec![0; device.frame_max].into(),
            counters: PortCounters::default(),
            polls_to_check: POLLS_PER_CHECK,
            checked_ns: now_ns(),
            link,
            irq_guard: device.irq_guard.clone(),
            waiter: Arc::default(),
            pid: std::process::id(),
            device: Some(device),
            eal,
        }
    }

    /// Passes the queued frames to the device. True if it took all.
    #[inline]
    fn push(&mut self) -> bool {
        // SAFETY: `tx[tx_at..tx_end]` are mbufs of the port.
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

    /// Passes frames to the device and returns how many it took.
    ///
    /// # Safety
    /// `count` mbufs of the port are at `frames`. Those that were taken belong to the driver.
    #[inline(always)]
    unsafe fn burst(&mut self, frames: *mut Mbuf, count: usize) -> usize {
        if !self.link.is_started {
            return cold(0);
        }
        // SAFETY: the port is started, this thread is the only one to use it (`&mut self`), and
        // the rest is the caller's promise.
        let send = || unsafe { sys::tx_burst(self.port, 0, frames, count as u16) };
        guarded_burst(&self.irq_guard, send).into()
    }

    /// Makes room for one more frame in `tx`; false if there is none.
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

    /// Moves the frame that the device had no room for from `tx` back to the mbuf cache.
    #[cold]
    fn undo_tx(&mut self) {
        self.mbuf_cache.put_back(self.tx[self.tx_at]);
        (self.tx_at, self.tx_end) = (0, 0);
        self.counters.tx_full += 1;
    }

    /// Sends a long frame by reference, after the queued ones, and returns whether it was sent.
    /// `None` if it has to be copied.
    #[inline(never)]
    fn tx_extbuf(&mut self, frame: &TxFrame<'_>) -> Option<bool> {
        let body = frame.body_in_one_piece()?;
        let mut extbuf = self.extbuf.take()?;
        let mut sent = self.tx_end == 0 || self.push();
        if sent {
            let mut packet = extbuf.describe(frame, body);
            // SAFETY: one packet, on which the port holds a reference.
            sent = unsafe { self.burst(&mut packet, 1) } == 1;
            extbuf.finish(sent);
        }
        self.extbuf = Some(extbuf);
        Some(sent)
    }

    /// Copies the frame into a packet buffer.
    #[inline(always)]
    fn fill(&mut self, mbuf: Mbuf, frame: &TxFrame<'_>, len: usize) {
        // SAFETY: an mbuf from the cache, which the port owns. It has room for `frame_max` bytes
        // behind `data_off` (`Pmd::mbuf_room`), which `len` and `frame_min` do not exceed. It
        // overlaps no memory of the frame. The preconditions of `copy_short_to_raw` are checked.
        unsafe {
            let data = (*mbuf).buf_addr.cast::<u8>().add(usize::from((*mbuf).data_off));
            let short = len <= self.short_max && frame.fits_short_copy();
            match frame.body_in_one_piece() {
                Some(body) if short => frame.copy_short_to_raw(body, data),
                _ => {
                    self.longest_tx = self.longest_tx.max(len);
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

    /// Receives at most `max` frames into `rx`.
    #[inline(always)]
    fn take(&mut self, max: usize) -> usize {
        let has_none = self.rings.is_some_and(|[from, _]| from.is_empty());
        if !self.held.is_null() {
            self.recycle_held();
        }
        if has_none {
            return 0;
        }
        if self.rings.is_some() {
            // Prefetched before the ring is read, which saves one dependent cache miss.
            self.rx_order.prefetch();
        }
        let (max, rx) = (max.min(RX_BURST), self.rx.as_mut_ptr());
        // SAFETY: the port is started, this thread is the only one to use it (`&mut self`), and
        // `rx` has room for `max`.
        let count = guarded_burst(&self.irq_guard, || unsafe {
            sys::rx_burst(self.port, 0, rx, max as u16)
        });
        usize::from(count).min(max)
    }

    /// Lends `rx[..count]` to the sink, and recycles or frees the mbufs. Returns how many frames
    /// were lent.
    #[inline(always)]
    fn lend(&mut self, count: usize, sink: &mut impl RxSink) -> usize {
        if let Some([_, to]) = self.rings {
            // A received frame is usually answered.
            to.prefetch_for_tx();
        }
        if count > 1 {
            return self.lend_many(count, sink);
        }
        let mbuf = self.rx[0];
        let lent = self.lend_one::<true>(mbuf, sink);
        // Kept until the next poll: a reply must not be sent in the mbuf that is lent.
        self.held = mbuf;
        usize::from(lent)
    }

    /// Recycles the held mbuf, or frees it.
    #[inline(never)]
    fn recycle_held(&mut self) {
        let mbuf = std::mem::replace(&mut self.held, null_mut());
        self.rx_order.record(mbuf);
        // SAFETY: the port owns the packet, and the loan has ended.
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
            sink.prefetch(&unsafe { first_segment(mbuf) });
        }
        let (mut lent, mut left) = (0, 0);
        for i in 0..count {
            let mbuf = self.rx[i];
            self.rx_order.record(mbuf);
            lent += usize::from(self.lend_one::<false>(mbuf, sink));
            // SAFETY: the port owns the packet, and the loan has ended.
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

    /// Lends or drops a received packet; true if it was lent. A packet that was received alone
    /// (`ALONE`) may be answered during the loan.
    #[inline(always)]
    fn lend_one<const ALONE: bool>(&mut self, mbuf: Mbuf, sink: &mut impl RxSink) -> bool {
        // SAFETY: a received packet, which is ours: `data_len` bytes lie at `data_off`.
        let (segment_count, len, first) =
            unsafe { ((*mbuf).nb_segs, (*mbuf).pkt_len as usize, first_segment(mbuf)) };
        if len > self.frame_max || len < ETH_HDR_LEN {
            self.counters.rx_dropped += 1;
            return cold(false);
        }
        self.counters.received(len);
        if segment_count > 1 {
            cold(());
            // SAFETY: as above; `linear` has `frame_max` bytes.
            let joined = unsafe { linearize(mbuf, &mut self.linear) };
            lend_linearized(&self.linear[..joined], sink);
        } else if ALONE {
            // Sending (`ReplyTx`) takes no received mbuf.
            sink.frame_with(&first, ReplyTx(self));
        } else {
            sink.frame(&first);
        }
        true
    }

    /// Returns the packets in `rx[..count]` to their pools.
    #[inline(never)]
    fn free(&mut self, count: usize) {
        let packets = &mut self.rx[..count];
        // SAFETY: packets of the port, whose loans have ended.
        unsafe { sys::rte_pktmbuf_free_bulk(packets.as_mut_ptr(), count as u32) };
    }

    /// [`Port::rx_burst`], for a sink of known type.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> Result<usize, PortGone> {
        let thread = this_thread();
        if thread != self.registered_thread {
            self.register_thread(thread);
        }
        self.polls_to_check -= 1;
        if self.polls_to_check <= 0 {
            self.polls_to_check = POLLS_PER_CHECK;
            self.check_device()?;
        }
        if self.tx_end != 0 {
            self.push();
        }
        if !self.link.is_started {
            return self.receive_while_down();
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

    /// Registers the calling thread with DPDK.
    #[cold]
    fn register_thread(&mut self, thread: usize) {
        self.registered_thread = thread;
        wait::register_thread();
    }

    /// Checks link, interface and device, every 50 ms.
    #[cold]
    #[inline(never)]
    fn check_device(&mut self) -> Result<(), PortGone> {
        let now = now_ns();
        if now.saturating_sub(self.checked_ns) < CHECK_NS {
            return Ok(());
        }
        self.checked_ns = now;
        self.check_restart();
        let Some(device) = &self.device else { return Ok(()) };
        if let Some((name, index)) = &device.interface
            && !pmd::has_interface(*index)
        {
            let why = format!("interface {name} was removed; ip link shows those left");
            return Err(PortGone::new(&self.caps.name, &why));
        }
        let below = device.interface.as_ref().filter(|_| device.pmd.follows_interface());
        if let Some(mtu) = below.and_then(|(name, _)| super::netdev::interface_mtu(name)) {
            self.check_interface_mtu(mtu, now)?;
        }
        // SAFETY: asks about a port that exists.
        if unsafe { sys::rte_eth_dev_is_removed(self.port) } == 1 {
            return Err(PortGone::new(&self.caps.name, "the device was unplugged"));
        }
        let (is_up, _bps) = link::link(self.port);
        if is_up != self.link.is_up {
            tracing::info!(port = self.caps.name, "link is {}", if is_up { "up" } else { "down" });
            self.link.is_up = is_up;
            self.link.connect_started_ns = 0;
        }
        // A pending connection is not interrupted: a memif server panics if a client leaves early.
        let is_connecting = self.link.is_started && now < self.link.connect_started_ns + CONNECT_NS;
        if !is_up && !is_connecting && self.link.reconnects && self.link.restart.is_none() {
            self.link.connect_started_ns = now;
            self.restart();
        }
        Ok(())
    }

    /// Checks that the interface below still carries the port's frames. The driver does not report
    /// those that it does not: the kernel drops them, while shorter ones keep the peer alive.
    fn check_interface_mtu(&mut self, mtu: usize, now: u64) -> Result<(), PortGone> {
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
        let is_too_long = std::mem::take(&mut self.longest_tx) > ETH_HDR_LEN + mtu;
        if mtu >= was {
            self.too_long_ns = None;
        } else if is_too_long && now - *self.too_long_ns.get_or_insert(now) >= MTU_GRACE_NS {
            let why = format!(
                "the mtu of {name} was lowered to {mtu} while in use; ip link set {name} mtu \
                 {was}, and open it again"
            );
            return Err(PortGone::new(port, &why));
        }
        Ok(())
    }

    /// Restarts the device in EAL's thread. No burst is called until it is done.
    fn restart(&mut self) {
        let state = Arc::new(AtomicU8::new(RESTART_PENDING));
        let (result, port, was_started) = (Arc::clone(&state), self.port, self.link.is_started);
        self.link.is_started = false;
        self.link.restart = Some(state);
        self.eal.post(move || {
            let state = if device::restart(port, was_started).is_ok() {
                RESTART_DONE
            } else {
                RESTART_FAILED
            };
            result.store(state, Release);
        });
    }

    fn check_restart(&mut self) {
        let Some(state) = &self.link.restart else { return };
        match state.load(Acquire) {
            RESTART_PENDING => return,
            state => self.link.is_started = state == RESTART_DONE,
        }
        self.link.restart = None;
    }
}

/// Calls a burst unless `irq_guard` forbids it.
#[inline(always)]
fn guarded_burst(
    irq_guard: &Option<Arc<irq_guard::BurstGuard>>,
    burst: impl FnOnce() -> u16,
) -> u16 {
    let Some(irq_guard) = irq_guard else { return burst() };
    if !irq_guard.begin() {
        return 0;
    }
    let count = burst();
    irq_guard.end();
    count
}

/// Frames of at most `frame_max` bytes per call of `rte_eth_rx_burst`.
fn rx_step(frame_max: usize) -> usize {
    if frame_max < RX_JUMBO { RX_BURST } else { (RX_BURST_LEN / frame_max).max(1) }
}

/// The first segment of a packet.
///
/// # Safety
/// `mbuf` is a received packet that stays the caller's as long as the frame is used.
#[inline(always)]
unsafe fn first_segment<'a>(mbuf: Mbuf) -> RxFrame<'a> {
    // SAFETY: `data_len` bytes at `data_off` of a packet's buffer are mapped.
    unsafe {
        let data = (*mbuf).buf_addr.cast::<u8>().add(usize::from((*mbuf).data_off));
        RxFrame::from_raw(data, usize::from((*mbuf).data_len))
    }
}

/// Copies a multi-segment packet to `linear` and returns its length.
///
/// # Safety
/// As [`first_segment`].
#[cold]
#[inline(never)]
unsafe fn linearize(mbuf: Mbuf, linear: &mut [u8]) -> usize {
    let (mut at, mut segment) = (0, mbuf);
    while !segment.is_null() {
        // SAFETY: every buffer of the chain is part of the packet.
        let (frame, next) = unsafe { (first_segment(segment), (*segment).next) };
        let Some(room) = linear.get_mut(at..at + frame.len()) else { break };
        frame.copy_to(0, room);
        (at, segment) = (at + frame.len(), next);
    }
    at
}

/// Lends a linearised frame.
#[cold]
#[inline(never)]
fn lend_linearized(linear: &[u8], sink: &mut impl RxSink) {
    sink.frame(&RxFrame::new(linear));
}

/// A number that is unique among living threads, and never 0.
#[inline(always)]
fn this_thread() -> usize {
    thread_local!(static ME: u8 = const { 0 });
    ME.with(|me| std::ptr::from_ref(me).addr())
}

/// The error for a device that no driver took.
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
        if thread != self.registered_thread {
            self.register_thread(thread);
        }
        if len >= EXTBUF_LEN_MIN
            && self.extbuf.is_some()
            && let Some(sent) = self.tx_extbuf(frame)
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
            // A frame that was answered `Sent` has to be in the receiver's memory.
            self.undo_tx();
            return Ok(Tx::Full);
        }
        Ok(self.counted(true, len))
    }

    #[inline]
    fn flush(&mut self) -> Result<(), PortGone> {
        if self.tx_end != 0 {
            self.push();
        }
        self.mbuf_cache.prefetch_for_tx();
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
        if this_thread() != self.registered_thread || self.tx_end != 0 || !self.link.is_started {
            return cold(None);
        }
        let count = self.take(self.rx_step);
        Some(if count > 0 { self.lend(count, sink) } else { 0 })
    }

    #[inline]
    fn count(&mut self, polls: u32) {
        self.polls_to_check = self.polls_to_check.saturating_sub_unsigned(polls);
    }
}

impl InPlaceTx for DpdkPort {
    /// The destination is ignored: there is one link.
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
        if !is_short || this_thread() != self.registered_thread || self.tx_end != 0 {
            return cold(false);
        }
        if self.mbuf_cache.is_empty() && !self.refill_cache() {
            return cold(false);
        }
        let Some(mut mbuf) = self.mbuf_cache.take_cached() else { return cold(false) };
        if R::LONG {
            self.longest_tx = self.longest_tx.max(len);
        }
        // SAFETY: the port owns the mbuf, which is of its own pool and has room for `len` bytes (at
        // most `SHORT`, unless it is long), of which `H` are the head's. Written from the end to
        // the start, as in `copy_short_to_raw`.
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
        self.mbuf_cache.prefetch_for_tx();
        true
    }
}

impl DpdkPort {
    /// Refills the mbuf cache; false if it stays empty. The mbuf of a frame that is being answered
    /// is recycled only afterwards, and may be the only one.
    #[cold]
    #[inline(never)]
    fn refill_cache(&mut self) -> bool {
        if !self.held.is_null() {
            self.recycle_held();
        }
        !self.mbuf_cache.is_empty()
            || self.device.as_ref().is_some_and(|device| self.mbuf_cache.refill(device.pool))
    }

    /// Longest frame that is copied rather than sent by reference.
    #[inline(always)]
    fn copied_max(&self) -> usize {
        if self.extbuf.is_some() { self.frame_max.min(EXTBUF_LEN_MIN - 1) } else { self.frame_max }
    }

    /// Counts a frame of `len` bytes as sent, or as [`Tx::Full`].
    #[inline(always)]
    fn counted(&mut self, is_sent: bool, len: usize) -> Tx {
        if !is_sent {
            self.counters.tx_full += 1;
            return Tx::Full;
        }
        self.counters.sent(len);
        Tx::Sent
    }

    /// Polls a device that is not started.
    #[cold]
    fn receive_while_down(&mut self) -> Result<usize, PortGone> {
        self.check_restart();
        if self.link.restart.is_none() {
            self.check_device()?;
        }
        Ok(0)
    }
}

impl Drop for DpdkPort {
    fn drop(&mut self) {
        // A forked child has neither the device nor EAL's thread.
        let Some(mut device) = self.device.take().filter(|_| self.pid == std::process::id()) else {
            return;
        };
        while self.link.restart.is_some() {
            std::thread::yield_now();
            self.check_restart();
        }
        self.push();
        device.is_started = self.link.is_started;
        // SAFETY: packet buffers that nobody else has.
        unsafe {
            let left = self.tx_end - self.tx_at;
            sys::rte_pktmbuf_free_bulk(self.tx.as_mut_ptr().add(self.tx_at), left as u32);
        }
        if !self.held.is_null() {
            self.recycle_held();
        }
        self.mbuf_cache.drain();
        if let Some(extbuf) = self.extbuf.take() {
            extbuf.free();
        }
        self.eal.run(move || device.close());
    }
}
