//! VFIO backend: a user-space driver for a NIC that the kernel has handed over through VFIO.
//!
//! ```text
//!  VfioPort          counts, filters, lends; the same for every NIC
//!    nic::Nic        what a driver does: send, flush, take, release
//!      virtio        virtio-net: `netq` (data path) over `ring::virtq`
//!      e1000         Intel 82574L, 8254x, and 82576 to I211, whose link is `igb`'s: `e1000q`
//!                    (data path) over `ring::e1000`
//!      igbvf         a virtual function of an 82576 or I350: the same, and a `mailbox`
//!      vmxnet3       VMware vmxnet3 over `ring::vmxnet3`
//!    device          container, group, device, registers, memory that the device reaches
//!      sys, iova     the kernel's calls; addresses behind the IOMMU
//!    survey          the NICs of this machine and what keeps them from being used
//! ```
//!
//! A frame to send is copied once, into a buffer that the device only reads. A received frame is
//! lent in the buffer that the device wrote. All memory that the device can access is allocated
//! when the port opens: one area that it reads and writes (rings and receive buffers), and one that
//! it only reads. The IOMMU enforces both.
//!
//! Every value that the device writes is validated before it becomes an address (`ring`). If the
//! device violates its protocol, was reset, lost bus mastering, or its removal is requested, the
//! port becomes [gone](PortGone) and the device is released at once, whatever the application does.
//! The device's state is checked every 50 ms.
//!
//! # Adding a NIC
//! A file that implements [`nic::Nic`] and has a `start` function; a [`Kind`] and its PCI ids in
//! `kind.rs`; a match arm in `open_kind`, which does not compile without it.

mod device;
mod e1000;
mod e1000q;
pub(crate) mod error;
mod igb;
mod igbvf;
mod iova;
mod kind;
mod mailbox;
pub mod netq;
pub mod nic;
pub mod ring;
pub mod survey;
#[doc(hidden)]
pub mod sys;
mod virtio;
mod vmxnet3;

pub use error::VfioError;
pub use iova::IovaSpace;
pub use kind::Kind;

use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::Duration;

use nix::sys::eventfd::EventFd;

use super::WakeEvent;
use super::frame_queue::FrameQueue;
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, RxFrame, TxFrame};
use crate::mem::{Hugepages, SHORT};
use crate::port::{MacAddr, Port, PortCaps, PortCounters, PortGone, PortWaiter, RxSink, Tx};
use device::{Device, DmaArea, Interrupt};
use nic::{LentFrame, Nic, NicCaps, Rings};

/// Frames lent per burst; a larger `max` of `rx_burst` is cut to this.
const BURST: usize = 64;
/// Interval between health checks, which cost a few microseconds each. A pulled cable has to be
/// logged within 100 ms.
const HEALTH_CHECK_NS: u64 = 50_000_000;
/// The same after a sleep: with the next one (`POLL_INTERVAL_ARMED`) no more than the 100 ms.
const HEALTH_CHECK_AWAKE_NS: u64 = 10_000_000;
/// Polls between two reads of the clock. The first poll after a sleep always reads it.
const POLLS_PER_CLOCK_READ: u32 = 32;
/// Descriptors of a queue if the settings do not say.
const RING_COUNT: u16 = 256;
/// Frames to the port's own address that can be queued.
const HAIRPIN_FRAMES: usize = 64;

/// How a NIC is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VfioSettings {
    /// Its PCI address with the domain, such as `0000:05:00.0`.
    pub bdf: String,
    /// MAC address of the port. Default: the device's own.
    pub mac: Option<MacAddr>,
    /// Largest number of bytes after the Ethernet header. Default 1,500, or the device's value. A
    /// larger MTU needs a network whose switches carry it, and costs as many bytes per buffer.
    pub mtu: Option<usize>,
    /// Receive buffers, a power of two. Default 256, enough for a burst of 20 us of full frames at
    /// 10 Gbit/s.
    pub rx_count: Option<u16>,
    /// Transmit buffers, a power of two. Default 256.
    pub tx_count: Option<u16>,
    /// Promiscuous mode: receives frames to every address, not only to this port's and to multicast
    /// addresses. For ports that forward frames. Default: off.
    pub promiscuous: bool,
    /// Whether its memory is allocated from hugepages. Default: if any are free. One hugepage of 2
    /// MiB per direction suffices for the default sizes, and needs fewer entries of the IOTLB.
    pub hugepages: Hugepages,
}

impl VfioSettings {
    /// Default settings of the NIC at this PCI address.
    pub fn at(bdf: &str) -> Self {
        Self { bdf: bdf.to_owned(), ..Self::default() }
    }

    /// Descriptors of both queues, powers of two from `least` to 4096.
    fn counts(&self, least: u16) -> [usize; 2] {
        let count = |asked: Option<u16>| asked.unwrap_or(RING_COUNT).clamp(least, 4096).ilog2();
        [self.rx_count, self.tx_count].map(|asked| 1 << count(asked))
    }
}

/// A running NIC, and the memory that it can access.
struct StartedNic<N> {
    nic: N,
    caps: NicCaps,
    areas: Vec<DmaArea>,
    /// Signalled by the device when a frame arrives, if [`Nic::set_interrupt`] enabled it.
    interrupt: Option<Interrupt>,
}

/// Opens and starts the NIC.
///
/// # Errors
/// [`OpenError::Vfio`]; the NIC is as it was, but for having been reset.
pub fn open(settings: &VfioSettings) -> Result<Box<dyn Port>, OpenError> {
    let device = Device::open(&settings.bdf)?;
    let (vendor, number) = (device.config_u16(0)?, device.config_u16(2)?);
    match Kind::of((vendor, number)) {
        Some(kind) => open_kind(kind, device, settings),
        None => {
            let bdf = device.bdf.clone();
            Err(VfioError::Unknown { bdf, vendor, device: number }.into())
        }
    }
}

/// Opens the NIC and drives it as one of this kind, whatever its PCI id says. For tests of kinds
/// that no test machine has, on a NIC with the same registers.
///
/// # Errors
/// As [`open`].
#[doc(hidden)]
pub fn open_as(settings: &VfioSettings, kind: Kind) -> Result<Box<dyn Port>, OpenError> {
    open_kind(kind, Device::open(&settings.bdf)?, settings)
}

/// Starts the driver of this kind and returns the port.
fn open_kind(
    kind: Kind,
    device: Device,
    settings: &VfioSettings,
) -> Result<Box<dyn Port>, OpenError> {
    match kind {
        Kind::VirtioNet => open_with(device, settings, virtio::start),
        Kind::Intel82574L => open_with(device, settings, e1000::starter(&e1000::I82574)),
        Kind::Intel8254x => open_with(device, settings, e1000::starter(&e1000::I8254X)),
        Kind::Intel82576 => open_with(device, settings, e1000::starter(&e1000::I82576)),
        Kind::Intel82580 => open_with(device, settings, e1000::starter(&e1000::I82580)),
        Kind::IntelI350 => open_with(device, settings, e1000::starter(&e1000::I350)),
        Kind::IntelI354 => open_with(device, settings, e1000::starter(&e1000::I354)),
        Kind::IntelI210 => open_with(device, settings, e1000::starter(&e1000::I210)),
        Kind::IntelI211 => open_with(device, settings, e1000::starter(&e1000::I211)),
        Kind::Intel82576Vf | Kind::IntelI350Vf => open_with(device, settings, igbvf::start),
        Kind::Vmxnet3 => open_with(device, settings, vmxnet3::start),
    }
}

/// Starts a NIC by `driver` and returns the port.
fn open_with<N: Nic>(
    device: Device,
    settings: &VfioSettings,
    driver: impl Fn(&Device, &VfioSettings) -> Result<StartedNic<N>, VfioError>,
) -> Result<Box<dyn Port>, OpenError> {
    let started = start(&device, || driver(&device, settings))?;
    Ok(Box::new(VfioPort::new(started, device, settings)))
}

/// Starts a NIC. If that fails for a reason of the device, resets it (by FLR if it has it) and
/// tries once more.
fn start<N>(
    device: &Device,
    start: impl Fn() -> Result<StartedNic<N>, VfioError>,
) -> Result<StartedNic<N>, VfioError> {
    match start() {
        Err(VfioError::Device { why, .. }) if device.reset().is_ok() => {
            tracing::warn!(bdf = device.bdf, why, "reset; starting it again");
            start()
        }
        started => started,
    }
}

/// A port over a user-space NIC driver.
pub struct VfioPort<N: Nic> {
    caps: PortCaps,
    /// Own MAC address as [`MacAddr::frame_word`] has it.
    own_mac: u64,
    /// Promiscuous: frames to other addresses are delivered as well.
    is_promiscuous: bool,
    /// Bytes of the longest frame.
    frame_max: usize,
    live: Option<OpenNic<N>>,
    /// Scratch array for one burst, kept so that it need not be initialised for each.
    lent: Box<[LentFrame; BURST]>,
    /// Set once `live` is `None`: the reason.
    gone: Option<PortGone>,
    counters: PortCounters,
    /// Polls until the next read of the clock.
    polls_left: u32,
    /// Time of the last health check, and the interval after which the next is due.
    checked_ns: u64,
    check_interval_ns: u64,
    hairpin: FrameQueue,
    waiter: Option<Arc<RxWaiter>>,
    /// Polls without a sleep until interrupts are disabled; 0: they are disabled.
    armed_polls: u32,
    /// The link was up at the last health check.
    had_link: bool,
}

/// What the port owns while the device is usable. Dropped in this order: the driver stops the NIC,
/// its memory is unmapped, the device is closed.
struct OpenNic<N: Nic> {
    nic: N,
    _areas: Vec<DmaArea>,
    device: Option<Device>,
}

impl<N: Nic> Drop for OpenNic<N> {
    fn drop(&mut self) {
        // A forked child must not touch the registers, which it shares with the owner.
        if self.device.as_ref().is_none_or(Device::is_owner) {
            self.nic.stop();
        }
    }
}

/// Mask of the destination address in the first eight bytes of a frame.
const ADDR_BITS: u64 = (1 << 48) - 1;

impl<N: Nic> VfioPort<N> {
    fn new(started: StartedNic<N>, device: Device, settings: &VfioSettings) -> Self {
        let StartedNic { nic, caps, areas, interrupt } = started;
        let request = device.request_event();
        let live = OpenNic { nic, _areas: areas, device: Some(device) };
        let port = Self::with(live, caps, &settings.bdf, Events { interrupt, request });
        Self { is_promiscuous: settings.promiscuous, ..port }
    }

    /// A port over a driver without a VFIO device, such as a model in a test.
    pub fn over(nic: N, caps: NicCaps, bdf: &str) -> Self {
        let live = OpenNic { nic, _areas: Vec::new(), device: None };
        Self::with(live, caps, bdf, Events::default())
    }

    fn with(live: OpenNic<N>, caps: NicCaps, bdf: &str, events: Events) -> Self {
        let NicCaps { mac, mtu, link_bps } = caps;
        let wake = WakeEvent::new().ok();
        // A link that is down at the start was logged by the driver.
        let had_link = live.nic.has_link() != Some(false);
        Self {
            caps: PortCaps { link_bps, ..PortCaps::new(mac, mtu, format!("vfio:{bdf}")) },
            own_mac: mac.frame_word(),
            is_promiscuous: false,
            frame_max: ETH_HDR_LEN + mtu,
            live: Some(live),
            lent: Box::new([LentFrame::NONE; BURST]),
            gone: None,
            counters: PortCounters::default(),
            polls_left: POLLS_PER_CLOCK_READ,
            checked_ns: now_ns(),
            check_interval_ns: HEALTH_CHECK_NS,
            hairpin: FrameQueue::new(HAIRPIN_FRAMES, ETH_HDR_LEN + mtu),
            waiter: wake.map(|wake| {
                let (has_slept, is_armed) = (AtomicBool::new(false), AtomicBool::new(false));
                Arc::new(RxWaiter { wake, events, has_slept, is_armed })
            }),
            armed_polls: 0,
            had_link,
        }
    }

    /// Releases the device and records the reason.
    #[cold]
    fn mark_gone(&mut self, why: &str) -> PortGone {
        tracing::error!(port = self.caps.name, why, "port is gone");
        self.counters = self.counters();
        self.live = None;
        let gone = PortGone::new(&self.caps.name, why);
        self.gone = Some(gone.clone());
        gone
    }

    #[cold]
    fn gone_error(&self) -> PortGone {
        self.gone.clone().unwrap_or_else(|| PortGone::new(&self.caps.name, "it was closed"))
    }

    /// Enables interrupts after a sleep, and disables them after [`ARMED_POLLS`] polls without one.
    #[cold]
    fn update_interrupts(&mut self) {
        let (Some(waiter), Some(live)) = (&self.waiter, &mut self.live) else { return };
        let has_slept = waiter.has_slept.swap(false, Relaxed);
        if has_slept {
            (self.polls_left, self.check_interval_ns) = (0, HEALTH_CHECK_AWAKE_NS);
        }
        let Some(interrupt) = &waiter.events.interrupt else { return };
        if has_slept {
            // Also if they are enabled: this acknowledges the last interrupt.
            live.nic.set_interrupt(true);
            if let Some(device) = &live.device {
                device.unmask(interrupt);
            }
            self.armed_polls = ARMED_POLLS;
        } else {
            self.armed_polls -= 1;
            if self.armed_polls == 0 {
                live.nic.set_interrupt(false);
            }
        }
        // Stored before the poll that follows, so that a thread that sleeps after it can rely on an
        // interrupt.
        waiter.is_armed.store(self.armed_polls != 0, Release);
    }

    /// Reads the clock, and checks the device's health if that is due.
    #[cold]
    fn check_health(&mut self) -> Result<(), PortGone> {
        self.polls_left = POLLS_PER_CLOCK_READ;
        let now = now_ns();
        let interval = std::mem::replace(&mut self.check_interval_ns, HEALTH_CHECK_NS);
        if now - self.checked_ns < interval {
            return Ok(());
        }
        self.checked_ns = now;
        let Some(live) = &mut self.live else { return Err(self.gone_error()) };
        let trouble = live.device.as_ref().and_then(Device::bus_fault);
        match trouble.map_or_else(|| live.nic.health(), Err) {
            Ok(()) => self.log_link_change(),
            Err(why) => return Err(self.mark_gone(&why)),
        }
        Ok(())
    }

    /// Logs a change of the link state.
    fn log_link_change(&mut self) {
        let link = self.live.as_ref().and_then(|live| live.nic.has_link());
        let Some(has_link) = link.filter(|&has_link| has_link != self.had_link) else { return };
        self.had_link = has_link;
        let port = &self.caps.name;
        if has_link {
            tracing::info!(%port, "carries frames again");
        } else {
            tracing::warn!(%port, "has no carrier, frames are lost: is the cable in?");
        }
    }

    #[cold]
    fn tx_full(&mut self) -> Tx {
        if let Some(live) = &mut self.live {
            // No descriptor completes before the device knows of the queued ones.
            live.nic.rings().tx_flush();
        }
        self.counters.tx_full += 1;
        Tx::Full
    }
}

impl<N: Nic> Port for VfioPort<N> {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    #[inline]
    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        assert!(frame.head.len() >= ETH_HDR_LEN && len <= self.frame_max);
        let Some(live) = &mut self.live else { return Err(self.gone_error()) };
        let dst = frame.head.first_chunk().map_or(0, |dst| u64::from_le_bytes(*dst));
        if dst & ADDR_BITS == self.own_mac {
            return Ok(self.hairpin.tx(frame, &mut self.counters));
        }
        let usual = frame.body_in_one_piece().filter(|_| len <= SHORT && frame.fits_short_copy());
        // SAFETY: a transmit buffer has room for a header and `mtu` bytes (`Rings`), and the frame
        // is no longer (checked above). The buffer is DMA memory, which no head, body or tail of a
        // frame overlaps. The fast path is for short frames of the usual layout, as was just
        // checked.
        let fill = |place: NonNull<u8>| unsafe {
            match usual {
                Some(body) => frame.copy_short_to_raw(body, place.as_ptr()),
                None => frame.copy_to_raw(place.as_ptr()),
            }
        };
        match live.nic.rings().tx(len, fill) {
            Ok(true) => {}
            Ok(false) => return Ok(self.tx_full()),
            Err(broken) => return Err(self.mark_gone(&broken.to_string())),
        }
        self.counters.sent(len);
        Ok(Tx::Sent)
    }

    #[inline]
    fn flush(&mut self) -> Result<(), PortGone> {
        match &mut self.live {
            Some(live) => {
                live.nic.rings().tx_flush();
                Ok(())
            }
            None => Err(self.gone_error()),
        }
    }

    #[inline]
    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        if let Some(waiter) = &self.waiter
            && (waiter.has_slept.load(Relaxed) || self.armed_polls != 0)
        {
            self.update_interrupts();
        }
        match self.polls_left.checked_sub(1) {
            Some(left) => self.polls_left = left,
            None => self.check_health()?,
        }
        let Some(live) = &mut self.live else { return Err(self.gone_error()) };
        let (lent, own_mac, all) = (&mut *self.lent, self.own_mac, self.is_promiscuous);
        // SAFETY: a driver lends whole buffers that the device has written, until they are released
        // below. The device no longer writes there (D1); a device that does so regardless can only
        // make a copy a mixture (D2).
        let frame = |lent: LentFrame| unsafe { RxFrame::from_raw(lent.base, lent.len) };
        let mut kept = 0;
        let taken = live.nic.rings().rx_take(max.min(BURST), |one| {
            let dst = frame(one).first_chunk::<8>().map_or(0, u64::from_le_bytes);
            // To this port, or multicast: the lowest bit of the first byte.
            if dst & ADDR_BITS == own_mac || dst & 1 != 0 || all {
                sink.prefetch(&frame(one));
                lent[kept] = one;
                kept += 1;
            }
        });
        let taken = match taken {
            Ok(taken) => taken,
            Err(broken) => return Err(self.mark_gone(&broken.to_string())),
        };
        let mut byte_count = 0;
        for &lent in &lent[..kept] {
            sink.frame(&frame(lent));
            byte_count += lent.len as u64;
        }
        self.counters.rx_bytes += byte_count;
        self.counters.rx_frames += kept as u64;
        self.counters.rx_dropped += (taken - kept) as u64;
        // Also releases the buffers of frames that the driver dropped itself.
        live.nic.rings().rx_release();
        if !self.hairpin.is_empty() {
            kept += self.hairpin.rx_burst(max - kept, sink, &mut self.counters);
        }
        Ok(kept)
    }

    fn counters(&self) -> PortCounters {
        let by_nic = self.live.as_ref().map_or(0, |live| live.nic.dropped());
        PortCounters { rx_dropped: self.counters.rx_dropped + by_nic, ..self.counters }
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        let waiter = self.waiter.as_ref()?;
        Some(Arc::clone(waiter) as Arc<dyn PortWaiter>)
    }
}

/// Eventfds of the device.
#[derive(Default)]
struct Events {
    /// Signalled when a frame has arrived.
    interrupt: Option<Interrupt>,
    /// Signalled when the device's removal is requested. Read by [`Device::bus_fault`].
    request: Option<Arc<EventFd>>,
}

/// Sleeps until a frame arrives or another thread calls `wake`.
///
/// The first sleep after a period of polling is short: the poll that follows it enables interrupts,
/// and later sleeps are long.
struct RxWaiter {
    wake: WakeEvent,
    events: Events,
    /// A thread has slept since the last poll.
    has_slept: AtomicBool,
    /// Interrupts are enabled.
    is_armed: AtomicBool,
}

/// Longest sleep without and with interrupts.
const POLL_INTERVAL: Duration = Duration::from_millis(1);
const POLL_INTERVAL_ARMED: Duration = Duration::from_millis(90);
/// Polls without a sleep after which interrupts are disabled. Each interrupt costs about a system
/// call in the kernel, and a thread that polls does not need it.
const ARMED_POLLS: u32 = 256;

impl PortWaiter for RxWaiter {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let armed = self.is_armed.load(Acquire);
        let Events { interrupt, request } = &self.events;
        // poll(2) ignores a negative descriptor.
        let fd = |event: Option<&EventFd>| event.map_or(-1, AsRawFd::as_raw_fd);
        let interrupt = interrupt.as_ref().filter(|_| armed).map(|interrupt| &interrupt.event);
        let request = request.as_deref().filter(|_| armed);
        let fds = [self.wake.fd(), fd(interrupt), fd(request), super::raw(also)];
        let mut fds = fds.map(super::readable);
        let signalled = super::sleep(
            &mut fds,
            timeout.min(if armed { POLL_INTERVAL_ARMED } else { POLL_INTERVAL }),
        );
        self.wake.clear();
        if let Some(interrupt) = interrupt {
            let _ = interrupt.read();
        }
        self.has_slept.store(true, Relaxed);
        // Without interrupts the caller has to poll.
        signalled || !armed
    }

    fn wake(&self) {
        self.wake.ring();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU8;
    use std::time::Instant;

    use tracing::Level;

    use super::ring::virtq::DeviceViolation;
    use super::*;
    use crate::backend::logged::Logged;

    /// A device without frames. Link state: 0 down, 1 up, 2 unknown.
    struct IdleNic(Arc<AtomicU8>);

    impl Rings for IdleNic {
        fn tx(&mut self, _: usize, _: impl FnOnce(NonNull<u8>)) -> Result<bool, DeviceViolation> {
            Ok(false)
        }

        fn tx_flush(&mut self) {}

        fn rx_take(
            &mut self,
            _: usize,
            _: impl FnMut(LentFrame),
        ) -> Result<usize, DeviceViolation> {
            Ok(0)
        }

        fn rx_release(&mut self) {}
    }

    impl Nic for IdleNic {
        type Rings = Self;

        fn rings(&mut self) -> &mut Self {
            self
        }

        fn set_interrupt(&mut self, _: bool) {}

        fn dropped(&self) -> u64 {
            0
        }

        fn health(&mut self) -> Result<(), String> {
            Ok(())
        }

        fn has_link(&self) -> Option<bool> {
            [Some(false), Some(true), None][usize::from(self.0.load(Relaxed))]
        }

        fn stop(&mut self) {}
    }

    struct NullSink;

    impl RxSink for NullSink {
        fn frame(&mut self, _: &RxFrame<'_>) {}
    }

    fn quiet(link: &Arc<AtomicU8>) -> VfioPort<IdleNic> {
        let caps = NicCaps { mac: MacAddr([2, 0, 0, 0, 0, 1]), mtu: 1500, link_bps: 0 };
        VfioPort::over(IdleNic(Arc::clone(link)), caps, "0000:01:00.0")
    }

    /// Goal: a lost link is logged once, and its return once; an unknown state is not logged.
    /// Method: a device of which only the link changes, polled.
    #[test]
    fn a_lost_link_is_logged_once() {
        let kept = Logged::default();
        tracing::subscriber::with_default(kept.clone(), || {
            let link = Arc::new(AtomicU8::new(1));
            let mut port = quiet(&link);
            let poll = |port: &mut VfioPort<IdleNic>| {
                let begun = Instant::now();
                while begun.elapsed() < 3 * Duration::from_nanos(HEALTH_CHECK_NS) {
                    port.rx_burst(32, &mut NullSink).unwrap();
                }
            };
            let lines = || kept.lines().len();
            poll(&mut port);
            assert_eq!(lines(), 0);
            for (state, count) in [(0, 1), (0, 1), (2, 1), (1, 2), (2, 2), (0, 3)] {
                link.store(state, Relaxed);
                poll(&mut port);
                assert_eq!(lines(), count, "{:?}", kept.lines());
            }
        });
        let lines = kept.lines();
        assert_eq!(
            lines.iter().map(|l| l.0).collect::<Vec<_>>(),
            [Level::WARN, Level::INFO, Level::WARN]
        );
        assert!(lines[0].1.contains("vfio:0000:01:00.0"), "{lines:?}");
        assert!(lines[0].1.contains("no carrier, frames are lost"), "{lines:?}");
        assert!(lines[1].1.contains("carries frames again"), "{lines:?}");
    }

    /// Goal: a lost link is logged within 100 ms however seldom the port is polled: each
    /// millisecond without interrupts, or after each sleep with them.
    #[test]
    fn a_lost_link_is_logged_in_time_if_polls_are_rare() {
        // `tracing` caches for all threads whether a line is wanted, by the first thread that
        // reaches it: without a subscriber here the test above would miss its lines.
        let _kept = tracing::subscriber::set_default(Logged::default());
        for is_armed in [false, true] {
            let link = Arc::new(AtomicU8::new(1));
            let mut port = quiet(&link);
            let waiter = Arc::clone(port.waiter.as_ref().unwrap());
            let nap = || {
                // The model has no interrupt.
                waiter.is_armed.store(is_armed, Relaxed);
                waiter.wait(Duration::from_secs(1));
            };
            for _ in 0..3 {
                nap();
                port.rx_burst(32, &mut NullSink).unwrap();
            }
            link.store(0, Relaxed);
            let begun = Instant::now();
            while port.had_link {
                nap();
                port.rx_burst(32, &mut NullSink).unwrap();
            }
            // Margin for a loaded machine.
            assert!(begun.elapsed() < Duration::from_millis(300), "{:?}", begun.elapsed());
        }
    }

    /// Goal: a lost link is logged within 100 ms although a frame ends a sleep between two checks,
    /// after which a whole sleep follows. Method: the poll after such a sleep, 20 ms after a check,
    /// finds the link lost.
    #[test]
    fn a_lost_link_is_logged_by_the_poll_after_a_short_sleep() {
        let _kept = tracing::subscriber::set_default(Logged::default());
        let link = Arc::new(AtomicU8::new(1));
        let mut port = quiet(&link);
        let waiter = Arc::clone(port.waiter.as_ref().unwrap());
        std::thread::sleep(Duration::from_nanos(HEALTH_CHECK_NS));
        for (state, has_link) in [(1, true), (0, false), (1, true)] {
            link.store(state, Relaxed);
            std::thread::sleep(Duration::from_millis(20));
            waiter.wake();
            waiter.wait(Duration::from_secs(1));
            port.rx_burst(32, &mut NullSink).unwrap();
            assert_eq!(port.had_link, has_link);
        }
    }
}
