//! A NIC of our own: taken from the kernel through VFIO, driven from this process.
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
//! A frame to send is copied once, into a buffer that the device only reads; a received one is lent
//! where the device put it. All memory that the device can reach is reserved when the port opens:
//! one area that it reads and writes (rings and receive buffers), one that it only reads. The IOMMU
//! holds it to that.
//!
//! What the device writes is checked before it becomes an address (`ring`); a device that breaks
//! its rules, was reset, lost its bus mastering or is wanted back makes the port
//! [gone](PortGone) and is released at once, whatever the application does. This is looked at
//! every 50 ms.
//!
//! # Adding a NIC
//! A file that implements [`nic::Nic`] and has a `start`; a [`Kind`] and its ids in `kind.rs`; an
//! arm in `open`, without which it does not compile.

mod device;
mod e1000;
mod e1000q;
mod error;
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

use super::Bell;
use super::frame_queue::FrameQueue;
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, RxFrame, TxFrame};
use crate::mem::{Hugepages, SHORT};
use crate::port::{MacAddr, Port, PortCaps, PortCounters, PortGone, PortWaiter, RxSink, Tx};
use device::{Device, DmaArea, Interrupt};
use nic::{Facts, Lent, Nic, Rings};

/// Frames lent at once; a larger `max` of `rx_burst` is cut to this.
const BURST: usize = 64;
/// Time between two looks at the device's state, which cost a few microseconds: whoever pulled a
/// cable is to read of it within 100 ms.
const CHECK_NS: u64 = 50_000_000;
/// Polls between two looks at the clock; a poll after a sleep looks anyway.
const CLOCK_EVERY: u32 = 32;
/// Buffers of a queue where the settings do not say.
const COUNT: u16 = 256;
/// Frames to ourselves that may wait.
const OWN_FRAMES: usize = 64;

/// How a NIC is opened.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VfioSettings {
    /// Its PCI address with the domain, such as `0000:05:00.0`.
    pub bdf: String,
    /// The station's address. Default: the one that the device was made with.
    pub mac: Option<MacAddr>,
    /// Largest number of bytes after the Ethernet header. Default 1,500, or what the device says;
    /// larger ones need a network whose switches carry them. Costs as many bytes per buffer.
    pub mtu: Option<usize>,
    /// Receive buffers, a power of two. Default 256, at which a burst of 20 us at 10 Gbit/s of
    /// full frames fits; costs a buffer each.
    pub rx_count: Option<u16>,
    /// Transmit buffers, a power of two. Default 256.
    pub tx_count: Option<u16>,
    /// Frames to every address are received, not only those to this port's and to groups: for who
    /// passes them on. Default: no.
    pub promiscuous: bool,
    /// Whether its memory lies in hugepages. Default: if any are free. One of 2 MiB for each
    /// direction does for the default sizes; fewer entries of the IOMMU's cache are needed then.
    pub hugepages: Hugepages,
}

impl VfioSettings {
    /// The settings of the NIC at this PCI address.
    pub fn at(bdf: &str) -> Self {
        Self { bdf: bdf.to_owned(), ..Self::default() }
    }

    /// Buffers of both queues, powers of two from `least` to 4096.
    fn counts(&self, least: u16) -> [usize; 2] {
        let count = |asked: Option<u16>| asked.unwrap_or(COUNT).clamp(least, 4096).ilog2();
        [self.rx_count, self.tx_count].map(|asked| 1 << count(asked))
    }
}

/// A NIC that runs, and the memory that it reaches.
struct Started<N> {
    nic: N,
    facts: Facts,
    areas: Vec<DmaArea>,
    /// Signalled by the device when a frame arrives and [`Nic::set_interrupt`] asked for it.
    interrupt: Option<Interrupt>,
}

/// Takes the NIC and starts it.
///
/// # Errors
/// [`OpenError::Vfio`]; the NIC is as it was, but for having been reset.
pub fn open(settings: &VfioSettings) -> Result<Box<dyn Port>, OpenError> {
    let device = Device::open(&settings.bdf)?;
    let (vendor, number) = (device.config_u16(0)?, device.config_u16(2)?);
    match Kind::of((vendor, number)) {
        Some(kind) => run_as(kind, device, settings),
        None => {
            let bdf = device.bdf.clone();
            Err(VfioError::Unknown { bdf, vendor, device: number }.into())
        }
    }
}

/// Takes the NIC and starts it as one of this kind, whatever it is: for tests of kinds that no
/// machine here has on one that has the same registers.
///
/// # Errors
/// As [`open`].
#[doc(hidden)]
pub fn open_as(settings: &VfioSettings, kind: Kind) -> Result<Box<dyn Port>, OpenError> {
    run_as(kind, Device::open(&settings.bdf)?, settings)
}

/// Starts a NIC of this kind and makes a port of it.
fn run_as(kind: Kind, device: Device, settings: &VfioSettings) -> Result<Box<dyn Port>, OpenError> {
    match kind {
        Kind::VirtioNet => run(device, settings, virtio::start),
        Kind::Intel82574L => run(device, settings, e1000::starts(&e1000::I82574)),
        Kind::Intel8254x => run(device, settings, e1000::starts(&e1000::I8254X)),
        Kind::Intel82576 => run(device, settings, e1000::starts(&e1000::I82576)),
        Kind::Intel82580 => run(device, settings, e1000::starts(&e1000::I82580)),
        Kind::IntelI350 => run(device, settings, e1000::starts(&e1000::I350)),
        Kind::IntelI354 => run(device, settings, e1000::starts(&e1000::I354)),
        Kind::IntelI210 => run(device, settings, e1000::starts(&e1000::I210)),
        Kind::IntelI211 => run(device, settings, e1000::starts(&e1000::I211)),
        Kind::Intel82576Vf | Kind::IntelI350Vf => run(device, settings, igbvf::start),
        Kind::Vmxnet3 => run(device, settings, vmxnet3::start),
    }
}

/// Starts a NIC and makes a port of it.
fn run<N: Nic>(
    device: Device,
    settings: &VfioSettings,
    driver: impl Fn(&Device, &VfioSettings) -> Result<Started<N>, VfioError>,
) -> Result<Box<dyn Port>, OpenError> {
    let started = start(&device, || driver(&device, settings))?;
    Ok(Box::new(VfioPort::new(started, device, settings)))
}

/// Starts a NIC; one that does not behave is reset (FLR where it has it) and started once more.
fn start<N>(
    device: &Device,
    start: impl Fn() -> Result<Started<N>, VfioError>,
) -> Result<Started<N>, VfioError> {
    match start() {
        Err(VfioError::Device { why, .. }) if device.reset().is_ok() => {
            tracing::warn!(bdf = device.bdf, why, "reset; starting it again");
            start()
        }
        started => started,
    }
}

/// A port that a driver of ours moves the frames of.
pub struct VfioPort<N: Nic> {
    caps: PortCaps,
    /// The station's address as the first six bytes of a frame, read as one number.
    own: u64,
    /// Frames to other addresses are received as well.
    is_promiscuous: bool,
    /// Bytes of the longest frame.
    frame_max: usize,
    live: Option<Live<N>>,
    /// Room for a burst, so that it need not be cleared for each.
    lent: Box<[Lent; BURST]>,
    /// Why there is no `live` any more.
    gone: Option<PortGone>,
    counters: PortCounters,
    /// Polls until the next look at the clock.
    polls_left: u32,
    /// When the device's state was looked at last.
    checked_ns: u64,
    hairpin: FrameQueue,
    waiting: Option<Arc<Waiting>>,
    /// Polls after which interrupts are switched off, unless somebody sleeps before; 0: they are.
    armed_polls: u32,
    /// The link was up when it was looked at last.
    had_link: bool,
}

/// What goes when the port does, in this order: the driver stops the NIC, its memory is unmapped,
/// the device is given back.
struct Live<N: Nic> {
    nic: N,
    _areas: Vec<DmaArea>,
    device: Option<Device>,
}

impl<N: Nic> Drop for Live<N> {
    fn drop(&mut self) {
        // A forked child has the same registers before it and must not touch them.
        if self.device.as_ref().is_none_or(Device::is_ours) {
            self.nic.stop();
        }
    }
}

/// The bits of an address in the first eight bytes of a frame.
const ADDR_BITS: u64 = (1 << 48) - 1;

impl<N: Nic> VfioPort<N> {
    fn new(started: Started<N>, device: Device, settings: &VfioSettings) -> Self {
        let Started { nic, facts, areas, interrupt } = started;
        let request = device.request();
        let live = Live { nic, _areas: areas, device: Some(device) };
        let port = Self::with(live, facts, &settings.bdf, Events { interrupt, request });
        Self { is_promiscuous: settings.promiscuous, ..port }
    }

    /// A port over a driver whose device is looked after elsewhere: a model in a test.
    pub fn over(nic: N, facts: Facts, bdf: &str) -> Self {
        let live = Live { nic, _areas: Vec::new(), device: None };
        Self::with(live, facts, bdf, Events::default())
    }

    fn with(live: Live<N>, facts: Facts, bdf: &str, events: Events) -> Self {
        let Facts { mac, mtu, link_bps } = facts;
        let wake = Bell::new().ok();
        // One that is down has been told of by the driver.
        let had_link = live.nic.has_link() != Some(false);
        Self {
            caps: PortCaps { link_bps, ..PortCaps::new(mac, mtu, format!("vfio:{bdf}")) },
            own: mac.frame_word(),
            is_promiscuous: false,
            frame_max: ETH_HDR_LEN + mtu,
            live: Some(live),
            lent: Box::new([Lent::NONE; BURST]),
            gone: None,
            counters: PortCounters::default(),
            polls_left: CLOCK_EVERY,
            checked_ns: now_ns(),
            hairpin: FrameQueue::new(OWN_FRAMES, ETH_HDR_LEN + mtu),
            waiting: wake.map(|wake| {
                let (has_slept, is_armed) = (AtomicBool::new(false), AtomicBool::new(false));
                Arc::new(Waiting { wake, events, has_slept, is_armed })
            }),
            armed_polls: 0,
            had_link,
        }
    }

    /// Gives the device up and remembers why.
    #[cold]
    fn lose(&mut self, why: &str) -> PortGone {
        tracing::error!(port = self.caps.name, why, "port is gone");
        self.counters = self.counters();
        self.live = None;
        let gone = PortGone::new(&self.caps.name, why);
        self.gone = Some(gone.clone());
        gone
    }

    #[cold]
    fn still_gone(&self) -> PortGone {
        self.gone.clone().unwrap_or_else(|| PortGone::new(&self.caps.name, "it was closed"))
    }

    /// Switches interrupts on when somebody has slept, and off when nobody has for a while.
    #[cold]
    fn after_sleep(&mut self) {
        let (Some(waiting), Some(live)) = (&self.waiting, &mut self.live) else { return };
        let has_slept = waiting.has_slept.swap(false, Relaxed);
        if has_slept {
            self.polls_left = 0;
        }
        let Some(interrupt) = &waiting.events.interrupt else { return };
        if has_slept {
            // Also if they are on: what was signalled has been heard.
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
        // Before the poll that follows: whoever sleeps after it may rely on it.
        waiting.is_armed.store(self.armed_polls != 0, Release);
    }

    /// Looks at the clock, and when it is time at the device's state.
    #[cold]
    fn check(&mut self) -> Result<(), PortGone> {
        self.polls_left = CLOCK_EVERY;
        let now = now_ns();
        if now - self.checked_ns < CHECK_NS {
            return Ok(());
        }
        self.checked_ns = now;
        let Some(live) = &mut self.live else { return Err(self.still_gone()) };
        let trouble = live.device.as_ref().and_then(Device::trouble);
        match trouble.map_or_else(|| live.nic.health(), Err) {
            Ok(()) => self.look_for_link(),
            Err(why) => return Err(self.lose(&why)),
        }
        Ok(())
    }

    /// Says so if the link went or came.
    fn look_for_link(&mut self) {
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
            // Nothing becomes free before the device has heard of what is queued.
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
        let Some(live) = &mut self.live else { return Err(self.still_gone()) };
        let dst = frame.head.first_chunk().map_or(0, |dst| u64::from_le_bytes(*dst));
        if dst & ADDR_BITS == self.own {
            return Ok(self.hairpin.tx(frame, &mut self.counters));
        }
        let usual = frame.body_in_one_piece().filter(|_| len <= SHORT && frame.fits_short_copy());
        // SAFETY: a place has room for a header and `mtu` bytes (`Rings`), and the frame is no
        // longer (checked above). It is device memory, which no frame's head, body or tail lies in.
        // The fast path is for short and usual frames, as was just seen.
        let fill = |place: NonNull<u8>| unsafe {
            match usual {
                Some(body) => frame.copy_short_to_raw(body, place.as_ptr()),
                None => frame.copy_to_raw(place.as_ptr()),
            }
        };
        match live.nic.rings().tx(len, fill) {
            Ok(true) => {}
            Ok(false) => return Ok(self.tx_full()),
            Err(broken) => return Err(self.lose(&broken.to_string())),
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
            None => Err(self.still_gone()),
        }
    }

    #[inline]
    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        if let Some(waiting) = &self.waiting
            && (waiting.has_slept.load(Relaxed) || self.armed_polls != 0)
        {
            self.after_sleep();
        }
        match self.polls_left.checked_sub(1) {
            Some(left) => self.polls_left = left,
            None => self.check()?,
        }
        let Some(live) = &mut self.live else { return Err(self.still_gone()) };
        let (lent, own, all) = (&mut *self.lent, self.own, self.is_promiscuous);
        // SAFETY: a driver lends what the device wrote to one of its buffers, whole and until it is
        // released below; the device writes there no more (D1), and a writer who does so
        // regardless can only make a copy a mixture (D2).
        let frame = |lent: Lent| unsafe { RxFrame::from_raw(lent.base, lent.len) };
        let mut kept = 0;
        let taken = live.nic.rings().rx_take(max.min(BURST), |one| {
            let dst = frame(one).first_chunk::<8>().map_or(0, u64::from_le_bytes);
            // Ours or a group's: the lowest bit of the first byte.
            if dst & ADDR_BITS == own || dst & 1 != 0 || all {
                sink.prefetch(&frame(one));
                lent[kept] = one;
                kept += 1;
            }
        });
        let taken = match taken {
            Ok(taken) => taken,
            Err(broken) => return Err(self.lose(&broken.to_string())),
        };
        let mut byte_count = 0;
        for &lent in &lent[..kept] {
            sink.frame(&frame(lent));
            byte_count += lent.len as u64;
        }
        self.counters.rx_bytes += byte_count;
        self.counters.rx_frames += kept as u64;
        self.counters.rx_dropped += (taken - kept) as u64;
        // Also of frames that the driver dropped by itself.
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
        let waiting = self.waiting.as_ref()?;
        Some(Arc::clone(waiting) as Arc<dyn PortWaiter>)
    }
}

/// Events of the device.
#[derive(Default)]
struct Events {
    /// A frame has arrived.
    interrupt: Option<Interrupt>,
    /// Somebody wants the device back. Read by [`Device::trouble`].
    request: Option<Arc<EventFd>>,
}

/// Sleeping until a frame arrives or another thread wakes the sleeper.
///
/// The first sleep after a time of polling is short: the poll that follows it switches interrupts
/// on, and from then on sleeps are long.
struct Waiting {
    wake: Bell,
    events: Events,
    /// Somebody has since the last poll.
    has_slept: AtomicBool,
    /// The device interrupts.
    is_armed: AtomicBool,
}

/// Longest time between two looks at the rings, without interrupts and with them.
const LOOK: Duration = Duration::from_millis(1);
const LOOK_ARMED: Duration = Duration::from_millis(90);
/// Polls in which nobody slept, after which interrupts are switched off: each costs a system call's
/// time in the kernel, and they are of no use to who polls.
const ARMED_POLLS: u32 = 256;

impl PortWaiter for Waiting {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let armed = self.is_armed.load(Acquire);
        let Events { interrupt, request } = &self.events;
        // A descriptor below 0 is not looked at.
        let fd = |event: Option<&EventFd>| event.map_or(-1, AsRawFd::as_raw_fd);
        let interrupt = interrupt.as_ref().filter(|_| armed).map(|interrupt| &interrupt.event);
        let request = request.as_deref().filter(|_| armed);
        let fds = [self.wake.fd(), fd(interrupt), fd(request), super::raw(also)];
        let mut fds = fds.map(super::readable);
        let came = super::sleep(&mut fds, timeout.min(if armed { LOOK_ARMED } else { LOOK }));
        self.wake.clear();
        if let Some(interrupt) = interrupt {
            let _ = interrupt.read();
        }
        self.has_slept.store(true, Relaxed);
        // Without interrupts whoever sleeps has to poll.
        came || !armed
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

    use super::ring::virtq::Broken;
    use super::*;
    use crate::backend::logged::Logged;

    /// A device without frames: 0 its link is down, 1 up, 2 it does not say.
    struct Quiet(Arc<AtomicU8>);

    impl Rings for Quiet {
        fn tx(&mut self, _: usize, _: impl FnOnce(NonNull<u8>)) -> Result<bool, Broken> {
            Ok(false)
        }

        fn tx_flush(&mut self) {}

        fn rx_take(&mut self, _: usize, _: impl FnMut(Lent)) -> Result<usize, Broken> {
            Ok(0)
        }

        fn rx_release(&mut self) {}
    }

    impl Nic for Quiet {
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

    struct Nobody;

    impl RxSink for Nobody {
        fn frame(&mut self, _: &RxFrame<'_>) {}
    }

    fn quiet(link: &Arc<AtomicU8>) -> VfioPort<Quiet> {
        let facts = Facts { mac: MacAddr([2, 0, 0, 0, 0, 1]), mtu: 1500, link_bps: 0 };
        VfioPort::over(Quiet(Arc::clone(link)), facts, "0000:01:00.0")
    }

    /// Goal: a cable that is pulled is told once, and once that it is back; a device that does not
    /// say is not asked again. Method: a device of which only the link changes, polled.
    #[test]
    fn a_cable_that_is_pulled_is_told() {
        let kept = Logged::default();
        tracing::subscriber::with_default(kept.clone(), || {
            let link = Arc::new(AtomicU8::new(1));
            let mut port = quiet(&link);
            let poll = |port: &mut VfioPort<Quiet>| {
                let begun = Instant::now();
                while begun.elapsed() < 3 * Duration::from_nanos(CHECK_NS) {
                    port.rx_burst(32, &mut Nobody).unwrap();
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

    /// Goal: word of a cable is there within 100 ms, however seldom the port is polled: each
    /// millisecond, as by who sleeps without interrupts, or after each sleep with them.
    #[test]
    fn a_cable_is_told_of_in_time_by_who_polls_seldom() {
        // `tracing` remembers for all threads whether anybody wants a line, by who comes to it
        // first: without a log here the test above would miss its lines.
        let _kept = tracing::subscriber::set_default(Logged::default());
        for is_armed in [false, true] {
            let link = Arc::new(AtomicU8::new(1));
            let mut port = quiet(&link);
            let waiting = Arc::clone(port.waiting.as_ref().unwrap());
            let nap = || {
                // No device is there to interrupt.
                waiting.is_armed.store(is_armed, Relaxed);
                waiting.wait(Duration::from_secs(1));
            };
            for _ in 0..3 {
                nap();
                port.rx_burst(32, &mut Nobody).unwrap();
            }
            link.store(0, Relaxed);
            let begun = Instant::now();
            while port.had_link {
                nap();
                port.rx_burst(32, &mut Nobody).unwrap();
            }
            // On a machine that does something else as well.
            assert!(begun.elapsed() < Duration::from_millis(300), "{:?}", begun.elapsed());
        }
    }
}
