//! VMware's vmxnet3, revision 1 of its interface (`vmxnet3_defs.h` and `upt1_defs.h`; QEMU's
//! `vmxnet3`).
//!
//! One receive and one transmit queue, no offloads, one buffer per frame. The device reads its
//! configuration from memory when it is activated, and executes commands written to a register.
//! Polled; a sleeping thread is woken by the receive queue's vector, which the device masks each
//! time that it signals.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed};

use vfio_bindings::bindings::vfio;

use super::device::{Bar, Device, TailRegister};
use super::error::VfioError;
use super::nic::{Buffers, LentFrame, Nic, NicCaps, Rings};
use super::ring::desc::DESC_LEN;
use super::ring::virtq::DeviceViolation;
use super::ring::vmxnet3::{COUNT_MIN, LEN_MAX, RxRing, TxRing};
use super::sys::Access;
use super::{StartedNic, VfioSettings};
use crate::frame::ETH_HDR_LEN;
use crate::port::MacAddr;

/// Registers of BAR 0: doorbells and interrupt masks.
mod doorbell {
    /// Mask of a vector: 1 or 0. Eight bytes for each.
    pub(super) const IMR: usize = 0x000;
    pub(super) const TXPROD: usize = 0x600;
    pub(super) const RXPROD: usize = 0x800;
    pub(super) const LEN: usize = 0xc00;
}

/// Registers of BAR 1.
mod reg {
    /// Supported revisions of the interface, one bit each; and of its data path (UPT).
    pub(super) const VRRS: usize = 0x00;
    pub(super) const UVRS: usize = 0x08;
    /// Address of the shared area.
    pub(super) const DSAL: usize = 0x10;
    pub(super) const DSAH: usize = 0x18;
    pub(super) const CMD: usize = 0x20;
    pub(super) const MACL: usize = 0x28;
    pub(super) const MACH: usize = 0x30;
    pub(super) const LEN: usize = 0x48;
}

/// Commands.
mod cmd {
    pub(super) const ACTIVATE: u32 = 0xcafe_0000;
    pub(super) const QUIESCE: u32 = 0xcafe_0001;
    pub(super) const RESET: u32 = 0xcafe_0002;
    pub(super) const UPDATE_RX_MODE: u32 = 0xcafe_0003;
    pub(super) const GET_STATS: u32 = 0xf00d_0001;
    pub(super) const GET_LINK: u32 = 0xf00d_0002;
    pub(super) const GET_PERM_MAC_LO: u32 = 0xf00d_0003;
    pub(super) const GET_PERM_MAC_HI: u32 = 0xf00d_0004;
    pub(super) const GET_CONF_INTR: u32 = 0xf00d_0008;
}

/// The first revision, in both registers.
const REVISION: u32 = 1;
const LINK_UP: u32 = 1;

/// Offsets in the shared area (`Vmxnet3_DriverShared`).
mod shared {
    pub(super) const MAGIC: usize = 0;
    pub(super) const SIZE: usize = 4;
    pub(super) const GUEST_OS: usize = 12;
    pub(super) const REVISION: usize = 16;
    pub(super) const UPT_REVISION: usize = 20;
    pub(super) const QUEUES: usize = 40;
    pub(super) const QUEUES_LEN: usize = 52;
    pub(super) const MTU: usize = 56;
    pub(super) const RX_BUFFERS_PER_FRAME: usize = 60;
    pub(super) const TX_QUEUES: usize = 62;
    pub(super) const RX_QUEUES: usize = 63;
    pub(super) const AUTO_MASK: usize = 80;
    pub(super) const VECTORS: usize = 81;
    pub(super) const EVENT_VECTOR: usize = 82;
    pub(super) const RX_MODE: usize = 120;
    pub(super) const MULTICAST_TABLE: usize = 128;
    pub(super) const VLANS: usize = 136;
    pub(super) const VLANS_LEN: usize = 512;
    /// Events, written by the device: 64 bits, of which the low 32 are used.
    pub(super) const EVENTS: usize = 696;
    pub(super) const LEN: usize = 720;
}

/// Offsets in a queue's description (`Vmxnet3_TxQueueDesc`, `Vmxnet3_RxQueueDesc`).
mod queue {
    /// Receive queue: the device wants RXPROD to be written (`updateRxProd`). One byte.
    pub(super) const UPDATE_RX_PROD: usize = 0;
    pub(super) const COMMANDS: usize = 16;
    /// Receive queue: its second ring.
    pub(super) const COMMANDS2: usize = 24;
    pub(super) const COMPLETIONS: usize = 32;
    pub(super) const COMMANDS_COUNT: usize = 56;
    pub(super) const COMMANDS2_COUNT: usize = 60;
    pub(super) const COMPLETIONS_COUNT: usize = 64;
    pub(super) const VECTOR: usize = 72;
    /// Receive queue: frames without a buffer, and damaged frames, since activation.
    pub(super) const NO_BUFFER: usize = 152;
    pub(super) const BAD: usize = 160;
    pub(super) const LEN: usize = 256;
}

const MAGIC: u32 = 0xbabe_fee1;
/// Guest OS type: 64 bits, Linux (there is no value for other software).
const GUEST_OS: u32 = 2 | 1 << 2;

const RX_UNICAST: u32 = 1;
const RX_BROADCAST: u32 = 4;
const RX_ALL_MULTICAST: u32 = 8;
const RX_PROMISCUOUS: u32 = 16;

/// Events: a transmit or receive queue was stopped.
const EVENT_QUEUE_ERROR: u64 = 1 | 2;

/// Vector of the receive queue, and of everything else, which stays masked.
const RX_VECTOR: u8 = 0;
const OTHER_VECTOR: u8 = 1;

/// Largest MTU of the interface's first revision.
const MTU_MAX: usize = 9000;

/// Marker of a counter that the device has not written.
const UNWRITTEN: u64 = u64::MAX;

/// Offsets in the area that the device reads and writes.
#[derive(Clone, Copy, Debug)]
struct Layout {
    /// Descriptors of a ring, and bytes of a receive buffer.
    rx_count: usize,
    tx_count: usize,
    rx_stride: usize,
}

impl Layout {
    const SHARED: usize = 0;
    /// Aligned to 128: the transmit queue's description, then the receive queue's.
    const QUEUES: usize = 1024;
    /// The receive queue's second ring, which has no buffers.
    const EMPTY_RING: usize = Self::QUEUES + 2 * queue::LEN;
    const RINGS: usize = Self::EMPTY_RING + COUNT_MIN as usize * DESC_LEN;

    /// Commands and completions of the receive queue.
    fn rx(&self) -> [usize; 2] {
        [Self::RINGS, Self::RINGS + self.rx_count * DESC_LEN]
    }

    /// Commands and completions of the transmit queue.
    fn tx(&self) -> [usize; 2] {
        let at = Self::RINGS + 2 * self.rx_count * DESC_LEN;
        [at, at + self.tx_count * DESC_LEN]
    }

    fn buffers(&self) -> usize {
        (self.tx()[1] + self.tx_count * DESC_LEN).next_multiple_of(4096)
    }

    fn len(&self) -> usize {
        self.buffers() + self.rx_count * self.rx_stride
    }

    /// The memory that the device reads at activation: everything before the rings.
    fn configuration(&self, iova: u64, mtu: usize, rx_mode: u32, auto_mask: bool) -> Vec<u8> {
        let mut bytes = vec![0; Self::RINGS];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        let addr = |at: usize| (iova + at as u64).to_le_bytes();
        for (at, value) in [
            (shared::MAGIC, MAGIC),
            (shared::SIZE, shared::LEN as u32),
            (shared::GUEST_OS, GUEST_OS),
            (shared::REVISION, REVISION),
            (shared::UPT_REVISION, REVISION),
            (shared::QUEUES_LEN, 2 * queue::LEN as u32),
            (shared::MTU, mtu as u32),
            (shared::RX_MODE, rx_mode),
        ] {
            put(at, &value.to_le_bytes());
        }
        put(shared::QUEUES, &addr(Self::QUEUES));
        put(shared::RX_BUFFERS_PER_FRAME, &1_u16.to_le_bytes());
        put(shared::TX_QUEUES, &[1]);
        put(shared::RX_QUEUES, &[1]);
        put(shared::AUTO_MASK, &[auto_mask.into()]);
        put(shared::VECTORS, &[2]);
        put(shared::EVENT_VECTOR, &[OTHER_VECTOR]);
        // An empty multicast list. QEMU reads its address nevertheless, which has to be mapped.
        put(shared::MULTICAST_TABLE, &addr(Self::SHARED));
        put(shared::VLANS, &[0xff; shared::VLANS_LEN]);
        let directions = [(self.tx(), self.tx_count, OTHER_VECTOR), (self.rx(), self.rx_count, 0)];
        for (n, ([commands, completions], count, vector)) in directions.into_iter().enumerate() {
            let base = Self::QUEUES + n * queue::LEN;
            put(base + queue::COMMANDS, &addr(commands));
            put(base + queue::COMPLETIONS, &addr(completions));
            for at in [queue::COMMANDS_COUNT, queue::COMPLETIONS_COUNT] {
                put(base + at, &(count as u32).to_le_bytes());
            }
            put(base + queue::VECTOR, &[vector]);
        }
        let rx = Self::QUEUES + queue::LEN;
        put(rx + queue::COMMANDS2, &addr(Self::EMPTY_RING));
        put(rx + queue::COMMANDS2_COUNT, &COUNT_MIN.to_le_bytes());
        bytes
    }
}

/// Words in the area that the device writes at run time.
struct SharedWords(NonNull<u8>);

// SAFETY: the words are atomic.
unsafe impl Send for SharedWords {}

impl SharedWords {
    #[inline]
    fn at(&self, at: usize) -> &AtomicU64 {
        assert!(at + 8 <= Layout::RINGS && at.is_multiple_of(8));
        // SAFETY: inside the part of the area before the rings, which is mapped for as long as the
        // driver lives (`start`), and aligned, as the area is to a page.
        unsafe { self.0.add(at).cast::<AtomicU64>().as_ref() }
    }

    /// A word of the receive queue's description.
    #[inline]
    fn rx(&self, at: usize) -> &AtomicU64 {
        self.at(Layout::QUEUES + queue::LEN + at)
    }
}

/// Frames that the device dropped, by its counters in memory, which it may fill with anything: they
/// add less than 2^32 frames per reading, so that no sum of a port's counters overflows.
#[derive(Debug, Default)]
struct DeviceDrops {
    /// Sum of the counters as last read.
    last: u64,
    frames: u64,
}

impl DeviceDrops {
    fn update(&mut self, said: [u64; 2]) {
        let now = said[0].saturating_add(said[1]);
        self.frames += now.saturating_sub(self.last).min(u32::MAX.into());
        self.last = now;
    }
}

/// A started vmxnet3.
pub(super) struct Vmxnet3 {
    doorbells: Bar,
    registers: Bar,
    words: SharedWords,
    rx: RxRing,
    rx_buffers: Buffers,
    is_lent: bool,
    tx: TxRing,
    tx_buffers: Buffers,
    is_queued: bool,
    /// Frames dropped by the driver; and by the device.
    dropped: u64,
    dropped_by_device: DeviceDrops,
    rx_tail: TailRegister,
    tx_tail: TailRegister,
}

/// Starts the device.
///
/// # Errors
/// [`VfioError`]; the device has been reset.
pub(super) fn start(
    device: &Device,
    settings: &VfioSettings,
) -> Result<StartedNic<Vmxnet3>, VfioError> {
    let (doorbells, registers) = (device.bar(0)?, device.bar(1)?);
    if doorbells.len() < doorbell::LEN || registers.len() < reg::LEN {
        return Err(device.device_error("its registers are too few"));
    }
    reset(device, &registers)?;
    let caps = caps(device, &registers, settings)?;
    let stride = (ETH_HDR_LEN + caps.mtu).next_multiple_of(64);
    assert!(stride <= LEN_MAX, "MTU_MAX sees to it");
    let [rx_count, tx_count] = settings.counts(COUNT_MIN as u16);
    let layout = Layout { rx_count, tx_count, rx_stride: stride };
    let container = device.container();
    let shared = container.alloc_dma(layout.len(), Access::ReadWrite, settings.hugepages)?;
    let sent = container.alloc_dma(tx_count * stride, Access::Read, settings.hugepages)?;
    let (rx_iova, tx_iova) = (shared.iova() + layout.buffers() as u64, sent.iova());
    let interrupt = device.interrupt(vfio::VFIO_PCI_MSIX_IRQ_INDEX);
    let all = if settings.promiscuous { RX_PROMISCUOUS } else { 0 };
    let rx_mode = RX_UNICAST | RX_BROADCAST | RX_ALL_MULTICAST | all;
    let auto_mask = command(&registers, cmd::GET_CONF_INTR) >> 2 & 3 == 0;
    let bytes = layout.configuration(shared.iova(), caps.mtu, rx_mode, auto_mask);
    // SAFETY: `add` stays inside the area, of `layout.len()` bytes at least, and so does what is
    // copied to its start, which the device does not know yet. The parts of the two areas are
    // disjoint, and the areas go when the port has stopped the NIC.
    let (rx, tx, rx_buffers, tx_buffers) = unsafe {
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), shared.base().as_ptr(), bytes.len());
        let place = |at: usize| shared.base().add(at);
        let stride_of = |i: u32| u64::from(i) * stride as u64;
        (
            RxRing::new(layout.rx().map(place), rx_count as u32, stride, |i| {
                rx_iova + stride_of(i)
            }),
            TxRing::new(layout.tx().map(place), tx_count as u32, |i| tx_iova + stride_of(i)),
            Buffers::new(place(layout.buffers()), stride, rx_count),
            Buffers::new(sent.base(), stride, tx_count),
        )
    };
    let nic = Vmxnet3 {
        rx_tail: doorbells.tail_register(doorbell::RXPROD),
        tx_tail: doorbells.tail_register(doorbell::TXPROD),
        doorbells,
        registers,
        words: SharedWords(shared.base()),
        rx,
        rx_buffers,
        is_lent: false,
        tx,
        tx_buffers,
        is_queued: false,
        dropped: 0,
        dropped_by_device: DeviceDrops::default(),
    };
    device.set_bus_master(true)?;
    nic.activate(device, shared.iova(), caps.mac)?;
    Ok(StartedNic { nic, caps, areas: vec![shared, sent], interrupt })
}

/// Executes a command and returns its result.
fn command(registers: &Bar, command: u32) -> u32 {
    registers.write32(reg::CMD, command);
    registers.read32(reg::CMD)
}

/// Resets the device and selects the first revision of the interface.
fn reset(device: &Device, registers: &Bar) -> Result<(), VfioError> {
    command(registers, cmd::RESET);
    for register in [reg::VRRS, reg::UVRS] {
        if registers.read32(register) & REVISION == 0 {
            return Err(device.device_error("it does not know the first revision of its interface"));
        }
        registers.write32(register, REVISION);
    }
    Ok(())
}

fn caps(device: &Device, registers: &Bar, settings: &VfioSettings) -> Result<NicCaps, VfioError> {
    let low = command(registers, cmd::GET_PERM_MAC_LO);
    let high = command(registers, cmd::GET_PERM_MAC_HI);
    let mac = device.mac(settings.mac, MacAddr::from_registers(low, high))?;
    let mtu = device.mtu(settings.mtu, MTU_MAX)?;
    let link = command(registers, cmd::GET_LINK);
    let link_bps = if link & LINK_UP == 0 {
        tracing::warn!(bdf = device.bdf, "the link is down");
        0
    } else {
        u64::from(link >> 16) * 1_000_000
    };
    Ok(NicCaps { mac, mtu, link_bps })
}

impl Vmxnet3 {
    fn command(&self, number: u32) -> u32 {
        command(&self.registers, number)
    }

    fn set_mask(&self, vector: u8, is_masked: bool) {
        self.doorbells.write32(doorbell::IMR + 8 * usize::from(vector), is_masked.into());
    }

    fn activate(&self, device: &Device, iova: u64, mac: MacAddr) -> Result<(), VfioError> {
        self.registers.write32(reg::DSAL, iova as u32);
        self.registers.write32(reg::DSAH, (iova >> 32) as u32);
        let answer = self.command(cmd::ACTIVATE);
        if answer != 0 {
            // No DMA any more: the memory is freed.
            self.command(cmd::RESET);
            let _ = device.set_bus_master(false);
            return Err(device.device_error(format!("it does not start, and answers {answer:#x}")));
        }
        let [low, high] = mac.registers();
        self.registers.write32(reg::MACL, low);
        self.registers.write32(reg::MACH, high);
        for vector in [RX_VECTOR, OTHER_VECTOR] {
            self.set_mask(vector, true);
        }
        self.rx_tail.set(self.rx.tail());
        self.command(cmd::UPDATE_RX_MODE);
        Ok(())
    }
}

impl Rings for Vmxnet3 {
    #[inline]
    fn tx(&mut self, len: usize, fill: impl FnOnce(NonNull<u8>)) -> Result<bool, DeviceViolation> {
        assert!(len <= self.tx_buffers.stride(), "longer than a buffer");
        let Some(i) = self.tx.next_slot()? else { return Ok(false) };
        fill(self.tx_buffers.at(i as usize));
        self.tx.push(len);
        self.is_queued = true;
        Ok(true)
    }

    #[inline]
    fn tx_flush(&mut self) {
        if std::mem::take(&mut self.is_queued) {
            self.tx_tail.set(self.tx.tail());
        }
    }

    #[inline]
    fn rx_take(
        &mut self,
        max: usize,
        mut each: impl FnMut(LentFrame),
    ) -> Result<usize, DeviceViolation> {
        let mut count = 0;
        for _ in 0..max {
            let Some(got) = self.rx.take()? else { break };
            self.is_lent = true;
            let Some(frame) = self.rx_buffers.lend(got) else {
                self.dropped += 1;
                continue;
            };
            each(frame);
            count += 1;
        }
        Ok(count)
    }

    #[inline]
    fn rx_release(&mut self) {
        if std::mem::take(&mut self.is_lent) {
            self.rx.refill();
            // The device polls generation bits, unless it requests the register write.
            if self.words.rx(queue::UPDATE_RX_PROD).load(Relaxed).to_ne_bytes()[0] != 0 {
                self.rx_tail.set(self.rx.tail());
            }
        }
    }
}

impl Nic for Vmxnet3 {
    type Rings = Self;

    #[inline(always)]
    fn rings(&mut self) -> &mut Self {
        self
    }

    fn set_interrupt(&mut self, wanted: bool) {
        self.set_mask(RX_VECTOR, !wanted);
    }

    fn dropped(&self) -> u64 {
        self.dropped + self.dropped_by_device.frames
    }

    fn health(&mut self) -> Result<(), String> {
        // A running device writes its counters upon this command.
        let counters = [queue::NO_BUFFER, queue::BAD].map(|at| self.words.rx(at));
        counters[0].store(UNWRITTEN, Relaxed);
        self.registers.write32(reg::CMD, cmd::GET_STATS);
        if self.registers.read32(reg::VRRS) == !0 {
            return Err("the device no longer answers; was it unplugged?".into());
        }
        let said = counters.map(|counter| u64::from_le(counter.load(Acquire)));
        if said[0] == UNWRITTEN {
            return Err("the device was reset or stopped under us; open the port again".into());
        }
        self.dropped_by_device.update(said);
        let events = u64::from_le(self.words.at(shared::EVENTS).load(Relaxed));
        if events & EVENT_QUEUE_ERROR != 0 {
            return Err(format!("the device stopped a queue, events {events:#x}"));
        }
        Ok(())
    }

    fn has_link(&self) -> Option<bool> {
        Some(self.command(cmd::GET_LINK) & LINK_UP != 0)
    }

    fn stop(&mut self) {
        self.set_mask(RX_VECTOR, true);
        self.command(cmd::QUIESCE);
        self.command(cmd::RESET);
    }
}

#[cfg(test)]
mod tests {
    use super::super::ring::vmxnet3::ALIGN;
    use super::*;

    /// Goal: a device's counters are counted, and whatever they hold, sums of counters do not
    /// overflow and never decrease. Method: a device that drops frames, then nonsense for the 20
    /// health checks of each second of a day.
    #[test]
    fn counters_of_the_device_are_bounded() {
        let mut drops = DeviceDrops::default();
        for (said, frames) in [([0, 0], 0), ([3, 1], 4), ([3, 1], 4), ([10, 1], 11)] {
            drops.update(said);
            assert_eq!(drops.frames, frames);
        }
        for _ in 0..20 * 60 * 60 * 24 {
            let before = drops.frames;
            drops.update([u64::MAX, u64::MAX]);
            drops.update([0, 0]);
            assert!(drops.frames >= before && drops.frames < 1 << 54);
        }
    }

    /// Goal: the configuration has the layout of the interface, with its parts disjoint and
    /// aligned. Method: offsets counted by hand from `vmxnet3_defs.h`.
    #[test]
    fn the_configuration_has_the_layout_of_the_interface() {
        let iova = 0x12_3450_0000;
        let layout = Layout { rx_count: 64, tx_count: 32, rx_stride: 1536 };
        let bytes = layout.configuration(iova, 1500, 13, true);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        let long = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) - iova;
        assert_eq!((word(0), word(4), word(12), word(16), word(20)), (MAGIC, 720, 6, 1, 1));
        assert_eq!(
            (long(40), word(52), word(56), &bytes[60..64]),
            (1024, 512, 1500, &[1, 0, 1, 1][..])
        );
        assert_eq!((&bytes[80..84], word(120), word(124)), (&[1, 2, 1, 0][..], 13, 0));
        assert!(bytes[136..648].iter().all(|&b| b == 0xff));
        assert!(bytes[648..1024].iter().all(|&b| b == 0));
        let (tx, rx) = (1024, 1280);
        assert_eq!([long(tx + 16), long(tx + 32)], layout.tx().map(|at| at as u64));
        assert_eq!([long(rx + 16), long(rx + 32)], layout.rx().map(|at| at as u64));
        assert_eq!((word(tx + 56), word(tx + 60), word(tx + 64)), (32, 0, 32));
        assert_eq!((word(rx + 56), word(rx + 60), word(rx + 64)), (64, 32, 64));
        assert_eq!((bytes[tx + 72], bytes[rx + 72]), (1, 0));
        let [[a, b], [c, d]] = [layout.rx(), layout.tx()];
        let parts = [
            (Layout::SHARED, shared::LEN),
            (Layout::QUEUES, 2 * queue::LEN),
            (long(rx + 24) as usize, 32 * DESC_LEN),
            (a, 64 * DESC_LEN),
            (b, 64 * DESC_LEN),
            (c, 32 * DESC_LEN),
            (d, 32 * DESC_LEN),
            (layout.buffers(), 64 * 1536),
        ];
        for (i, (at, len)) in parts.iter().enumerate() {
            let next = parts.get(i + 1).map_or(layout.len(), |next| next.0);
            assert!(at + len <= next, "part {i}");
            assert!(at.is_multiple_of(if i < 2 { 128 } else { ALIGN }), "part {i}");
        }
    }
}
