//! One receive and one transmit queue of Intel's gigabit NICs: memory, registers and data path. One
//! buffer per frame.
//!
//! The owner of the other registers (`e1000` for a physical NIC, `igbvf` for a virtual function)
//! starts, monitors and stops the NIC.

use std::ptr::NonNull;
use std::time::Duration;

use super::VfioSettings;
use super::device::{Bar, Device, DmaArea, RegisterAccess, TailRegister, poll_until};
use super::error::VfioError;
use super::nic::{Buffers, LentFrame, Rings};
use super::ring::desc::DESC_LEN;
use super::ring::e1000::{BufferAddrs, Format, RxRing, TxRing};
use super::ring::virtq::DeviceViolation;
use super::sys::Access;
use crate::frame::ETH_HDR_LEN;

/// Registers of queue 0, by their offset in BAR 0.
mod reg {
    pub(super) const RDBAL: usize = 0x2800;
    pub(super) const RDBAH: usize = 0x2804;
    pub(super) const RDLEN: usize = 0x2808;
    pub(super) const SRRCTL: usize = 0x280c;
    pub(super) const RDH: usize = 0x2810;
    pub(super) const RDT: usize = 0x2818;
    pub(super) const RXDCTL: usize = 0x2828;
    pub(super) const TDBAL: usize = 0x3800;
    pub(super) const TDBAH: usize = 0x3804;
    pub(super) const TDLEN: usize = 0x3808;
    pub(super) const TDH: usize = 0x3810;
    pub(super) const TDT: usize = 0x3818;
    pub(super) const TXDCTL: usize = 0x3828;
}

/// RXDCTL and TXDCTL of the 82576 and its successors: the queue is enabled.
pub(super) const DCTL_ENABLE: u32 = 1 << 25;
/// Values of both for an enabled queue. Descriptors are prefetched when fewer than 8 are left in
/// the device, and written back one by one: an erratum of the 82576 loses write-backs of its
/// virtual functions at a threshold (WTHRESH) of 0.
const RXDCTL_MULTI_QUEUE: u32 = DCTL_ENABLE | 8 | 8 << 8 | 1 << 16;
pub(super) const TXDCTL_MULTI_QUEUE: u32 = DCTL_ENABLE | 8 | 1 << 8 | 1 << 16;
/// Advanced descriptors, one buffer per frame. The lowest bits are the buffer's length in KiB.
const SRRCTL_ADVANCED: u32 = 1 << 25;
/// A frame without a free buffer is dropped instead of stalling the other queues.
const SRRCTL_DROP: u32 = 1 << 31;

/// Limit of the 82574, whose longest frame is 9,230 bytes without FCS; the others carry 16,128.
pub(super) const MTU_MAX: usize = 9216;
/// Bytes of the frame check sequence.
pub(super) const FCS_LEN: usize = 4;

/// Shortest frame without FCS. The devices pad shorter ones as well (TCTL, PSP), but an 8254x may
/// damage those, and the others need 17 bytes: workarounds of Linux's `e1000`, `e1000e` and `igb`.
const TX_LEN_MIN: usize = 60;

/// Receive buffers per write of the tail register, or a quarter of the ring if that is less.
const REFILL_BATCH_MAX: u32 = 32;

/// Receive buffer sizes that the devices support.
pub(super) const BUFFER_LENS: [usize; 4] = [2048, 4096, 8192, 16_384];

/// Both queues and their buffers.
pub(super) struct Queues<F: Format> {
    bar: Bar,
    rx: RxRing<F>,
    rx_buffers: Buffers,
    /// IOVAs of the rings.
    ring_iovas: [u64; 2],
    /// Descriptors of each.
    counts: [usize; 2],
    /// Receive buffers that the port holds.
    lent: u32,
    /// Returned buffers that are not yet published by the tail register.
    refill_pending: u32,
    /// Buffers per write of the tail register, which costs more than handling a frame.
    refill_batch: u32,
    tx: TxRing<F>,
    tx_buffers: Buffers,
    is_queued: bool,
    /// Damaged frames, or of an invalid length.
    dropped: u64,
    rx_tail: TailRegister,
    tx_tail: TailRegister,
}

impl<F: Format> Queues<F> {
    /// Allocates queues for frames of `mtu` bytes after the header, with their DMA areas. Touches
    /// no register.
    ///
    /// # Errors
    /// No DMA memory is left.
    pub(super) fn new(
        device: &Device,
        bar: &Bar,
        settings: &VfioSettings,
        mtu: usize,
    ) -> Result<(Self, Vec<DmaArea>), VfioError> {
        let counts = settings.counts(8);
        let [rx_count, tx_count] = counts;
        let frame_max = ETH_HDR_LEN + mtu;
        // The FCS counts towards the length until it is stripped.
        let rx_stride = BUFFER_LENS.into_iter().find(|&len| len >= frame_max + FCS_LEN);
        let rx_stride = rx_stride.expect("the largest holds every frame");
        let tx_stride = frame_max.next_multiple_of(64);
        let container = device.container();
        let (tx_ring_at, buffers_at) = (rx_count * DESC_LEN, (rx_count + tx_count) * DESC_LEN);
        let buffers_at = buffers_at.next_multiple_of(4096);
        let len = buffers_at + rx_count * rx_stride;
        let shared = container.alloc_dma(len, Access::ReadWrite, settings.hugepages)?;
        let sent = container.alloc_dma(tx_count * tx_stride, Access::Read, settings.hugepages)?;
        let rx_at =
            BufferAddrs { first: shared.iova() + buffers_at as u64, stride: rx_stride as u64 };
        let tx_at = BufferAddrs { first: sent.iova(), stride: tx_stride as u64 };
        // SAFETY: `add` stays inside the area, whose length was computed from the same offsets.
        // Rings and buffers are disjoint parts of the two areas, which go when the port has stopped
        // the NIC.
        let (rx, tx, rx_buffers, tx_buffers) = unsafe {
            (
                RxRing::new(shared.base(), rx_count as u32, rx_at),
                TxRing::new(shared.base().add(tx_ring_at), tx_count as u32, tx_at),
                Buffers::new(shared.base().add(buffers_at), rx_stride, rx_count),
                Buffers::new(sent.base(), tx_stride, tx_count),
            )
        };
        let queues = Self {
            bar: bar.clone(),
            rx,
            rx_buffers,
            ring_iovas: [shared.iova(), shared.iova() + tx_ring_at as u64],
            counts,
            lent: 0,
            refill_pending: 0,
            refill_batch: (rx_count as u32 / 4).min(REFILL_BATCH_MAX),
            tx,
            tx_buffers,
            is_queued: false,
            dropped: 0,
            rx_tail: bar.tail_register(reg::RDT),
            tx_tail: bar.tail_register(reg::TDT),
        };
        Ok((queues, vec![shared, sent]))
    }

    /// Bytes of a receive buffer: one of `BUFFER_LENS`.
    pub(super) fn rx_stride(&self) -> usize {
        self.rx_buffers.stride()
    }

    /// Programs the ring registers. `txdctl` is the value of TXDCTL.
    pub(super) fn program(&self, txdctl: u32) {
        let [rx, tx] = self.ring_iovas;
        let [rx_len, tx_len] = self.counts.map(|count| (count * DESC_LEN) as u32);
        for (at, value) in [
            (reg::RDBAL, rx as u32),
            (reg::RDBAH, (rx >> 32) as u32),
            (reg::RDLEN, rx_len),
            (reg::RDH, 0),
            (reg::RDT, 0),
            (reg::TDBAL, tx as u32),
            (reg::TDBAH, (tx >> 32) as u32),
            (reg::TDLEN, tx_len),
            (reg::TDH, 0),
            (reg::TDT, 0),
            (reg::TXDCTL, txdctl),
        ] {
            self.bar.write32(at, value);
        }
    }

    /// Selects advanced descriptors (chips with SRRCTL). `drops` sets `SRRCTL_DROP`.
    pub(super) fn set_descriptor_format(&self, drops: bool) {
        let drops = if drops { SRRCTL_DROP } else { 0 };
        let format = self.rx_stride() as u32 >> 10 | SRRCTL_ADVANCED | drops;
        self.bar.write32(reg::SRRCTL, format);
    }

    /// Enables the receive queue (chips with an enable bit in RXDCTL).
    ///
    /// # Errors
    /// It does not become enabled.
    pub(super) fn enable_rx(&self, device: &Device) -> Result<(), VfioError> {
        self.bar.write32(reg::RXDCTL, RXDCTL_MULTI_QUEUE);
        await_register(&self.bar, |bar| bar.read32(reg::RXDCTL) & DCTL_ENABLE != 0)
            .map_err(|()| device.device_error("its queue does not start"))
    }

    /// Whether the receive queue is still enabled and programmed: after a reset the first queue of
    /// a card is enabled, but without a ring.
    pub(super) fn is_rx_enabled(&self) -> bool {
        let has_ring = self.bar.read32(reg::RDLEN) == (self.counts[0] * DESC_LEN) as u32;
        has_ring && self.bar.read32(reg::RXDCTL) & DCTL_ENABLE != 0
    }

    /// Publishes the receive buffers to the device.
    pub(super) fn post_rx_buffers(&self) {
        self.rx_tail.set(self.rx.tail());
    }

    /// Received frames that were invalid.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }
}

impl<F: Format> Rings for Queues<F> {
    #[inline]
    fn tx(&mut self, len: usize, fill: impl FnOnce(NonNull<u8>)) -> Result<bool, DeviceViolation> {
        assert!(len <= self.tx_buffers.stride(), "longer than a buffer");
        let Some(i) = self.tx.next_slot() else { return Ok(false) };
        let buffer = self.tx_buffers.at(i as usize);
        fill(buffer);
        // SAFETY: buffers have a multiple of 64 bytes (`new`), and the device does not have this
        // one yet.
        let len = if len < TX_LEN_MIN { unsafe { pad(buffer, len) } } else { len };
        self.tx.push(len as u16);
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
            let Some(got) = self.rx.take() else { break };
            self.lent += 1;
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
        if self.lent > 0 {
            self.rx.refill(self.lent);
            self.refill_pending += std::mem::take(&mut self.lent);
            if self.refill_pending >= self.refill_batch {
                self.refill_pending = 0;
                self.rx_tail.set(self.rx.tail());
            }
        }
    }
}

/// Pads a frame of `len` bytes at `frame` with zeros, and returns its new length.
///
/// # Safety
/// [`TX_LEN_MIN`] bytes at `frame` are writable, and `len` is less.
#[inline]
unsafe fn pad(frame: NonNull<u8>, len: usize) -> usize {
    // SAFETY: the caller's promise.
    unsafe { frame.add(len).write_bytes(0, TX_LEN_MIN - len) };
    TX_LEN_MIN
}

/// Disables both queues and waits until they have stopped, for a limited time.
pub(super) fn disable_queues(bar: &Bar) {
    for queue in [reg::RXDCTL, reg::TXDCTL] {
        bar.write32(queue, 0);
    }
    // An unplugged device reads as all ones.
    let is_off = |word: u32| word & DCTL_ENABLE == 0 || word == !0;
    let _ = await_register(bar, |bar| {
        is_off(bar.read32(reg::RXDCTL)) && is_off(bar.read32(reg::TXDCTL))
    });
}

/// Polls registers until `is` returns true.
///
/// # Errors
/// Not within 100 ms.
pub(super) fn await_register<W: RegisterAccess>(
    regs: &W,
    is: impl Fn(&W) -> bool,
) -> Result<(), ()> {
    poll_until(Duration::from_millis(100), || is(regs)).then_some(()).ok_or(())
}

/// Waits until a reset has taken effect: no DMA from then on. `register` is any readable one; none
/// may be accessed for a microsecond after the write.
pub(super) fn await_reset(bar: &Bar, register: usize) {
    std::thread::sleep(Duration::from_millis(1));
    // The read completes after the posted write.
    bar.read32(register);
}

/// Link speed in bit/s from STATUS, 0 without a link.
pub(super) fn link_bps(status: u32) -> u64 {
    match (status & STATUS_LINK_UP != 0, status >> 6 & 3) {
        (false, _) => 0,
        (true, 0) => 10_000_000,
        (true, 1) => 100_000_000,
        (true, _) => 1_000_000_000,
    }
}

/// STATUS: link up.
pub(super) const STATUS_LINK_UP: u32 = 1 << 1;

/// A statistics register. It is cleared by reading according to the datasheets, but not in QEMU's
/// 82540; this detects which.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct StatsCounter {
    /// Last value, while no decrease was seen.
    last: u32,
    clears: bool,
}

impl StatsCounter {
    /// Increase since the last call. Until a decrease is seen for the first time, counts between
    /// two reads may be missed.
    pub(super) fn delta(&mut self, read: impl Fn() -> u32) -> u32 {
        let (first, second) = (read(), read());
        self.clears |= first < self.last || second < first;
        if self.clears {
            self.last = 0;
            return first.wrapping_add(second);
        }
        second - std::mem::replace(&mut self.last, second)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::super::ring::e1000::{Advanced, Legacy};
    use super::super::ring::model::{Device, IntelDevice, Iommu};
    use super::*;
    use crate::mem::{Arena, Block, Hugepages};

    const COUNT: usize = 8;
    /// Bytes of a buffer, and of each of the two areas, which are mapped at these IOVAs.
    const STRIDE: usize = 2048;
    const AREA_LEN: usize = 4096 + COUNT * STRIDE;
    const IOVAS: [u64; 2] = [0x10_0000, 0x20_0000];

    /// Queues in memory, and the device's ends: the receive ring's and the transmit ring's.
    struct Card<F: Format> {
        queues: Queues<F>,
        rx: IntelDevice<F>,
        tx: IntelDevice<F>,
        iommu: Iommu,
        _areas: [Block; 2],
    }

    fn card<F: Device>() -> Card<F> {
        let areas = [0, 1].map(|_| {
            let block = Arena::new(AREA_LEN, Hugepages::No).unwrap().block(AREA_LEN).unwrap();
            let base = NonNull::new(block.as_mut_ptr()).unwrap();
            (block, base)
        });
        let [shared, sent] = [areas[0].1, areas[1].1];
        let bar = Bar::in_memory(0x4000);
        let addrs = |first: u64| BufferAddrs { first, stride: STRIDE as u64 };
        let mut iommu = Iommu::default();
        let count = COUNT as u32;
        // SAFETY: rings and buffers are disjoint parts of the two areas, which the card keeps.
        let (queues, rx, tx) = unsafe {
            iommu.map(IOVAS[0], shared, AREA_LEN, true);
            iommu.map(IOVAS[1], sent, AREA_LEN, false);
            let (tx_ring, buffers) = (shared.add(COUNT * DESC_LEN), shared.add(4096));
            let queues = Queues {
                rx: RxRing::new(shared, count, addrs(IOVAS[0] + 4096)),
                rx_buffers: Buffers::new(buffers, STRIDE, COUNT),
                ring_iovas: [IOVAS[0], IOVAS[0] + (COUNT * DESC_LEN) as u64],
                counts: [COUNT; 2],
                lent: 0,
                refill_pending: 0,
                refill_batch: 2,
                tx: TxRing::new(tx_ring, count, addrs(IOVAS[1])),
                tx_buffers: Buffers::new(sent, STRIDE, COUNT),
                is_queued: false,
                dropped: 0,
                rx_tail: bar.tail_register(reg::RDT),
                tx_tail: bar.tail_register(reg::TDT),
                bar,
            };
            (queues, IntelDevice::new(shared, count), IntelDevice::new(tx_ring, count))
        };
        queues.post_rx_buffers();
        Card { queues, rx, tx, iommu, _areas: areas.map(|area| area.0) }
    }

    /// Goal: a short frame leaves with zeros up to 60 bytes and with nothing of the frame before,
    /// a longer one as it is; the doorbell is rung once for all. Method: frames of every length to
    /// 128, each in a buffer that a longer frame has used, against the model.
    fn short_frames_leave_padded<F: Device>() {
        let Card { mut queues, mut tx, iommu, _areas, .. } = card::<F>();
        let mut send = |len: usize, byte: u8| {
            let fill = |place: NonNull<u8>| {
                // SAFETY: a buffer has more bytes.
                unsafe { place.write_bytes(byte, len) }
            };
            assert_eq!(queues.tx(len, fill), Ok(true));
            let tail = queues.bar.read32(reg::TDT);
            assert!(!tx.has_next(tail), "before the doorbell");
            queues.tx_flush();
            let tail = queues.bar.read32(reg::TDT);
            assert!(tx.has_next(tail));
            let frame = tx.send(&iommu);
            assert!(!tx.has_next(tail));
            frame
        };
        for _ in 0..2 * COUNT {
            assert_eq!(send(1514, 0xa5), [0xa5; 1514]);
        }
        for len in ETH_HDR_LEN..128 {
            let frame = send(len, 0x5a);
            assert_eq!(frame.len(), len.max(60));
            assert_eq!(frame[..len], vec![0x5a; len], "{len}");
            assert!(frame[len..].iter().all(|&byte| byte == 0), "{len}: {frame:02x?}");
        }
    }

    #[test]
    fn short_frames_leave_padded_with_zeros() {
        short_frames_leave_padded::<Legacy>();
        short_frames_leave_padded::<Advanced>();
    }

    /// Goal: whatever length and flags a device writes, a lent frame lies in its own buffer, others
    /// are dropped and counted, and each buffer goes back. Method: every length with the flags of a
    /// whole frame, against the model.
    fn any_length_stays_in_its_buffer<F: Device>() {
        let Card { mut queues, rx, _areas, .. } = card::<F>();
        let base = queues.rx_buffers.at(0).as_ptr();
        for len in 0..=u16::MAX {
            let i = u32::from(len) % COUNT as u32;
            let (_, word) = F::received_words(0, len.into());
            rx.scribble(i, 0, !0);
            rx.scribble(i, 1, word);
            let mut lent = Vec::new();
            let before = queues.dropped();
            queues.rx_take(64, |frame| lent.push(frame)).unwrap();
            queues.rx_release();
            let is_frame = (ETH_HDR_LEN..=STRIDE).contains(&usize::from(len));
            assert_eq!(
                (lent.len(), queues.dropped() - before),
                (is_frame.into(), (!is_frame).into())
            );
            if let [frame] = lent[..] {
                assert_eq!(frame.len, usize::from(len));
                assert_eq!(frame.base, base.wrapping_add(i as usize * STRIDE).cast_const());
            }
        }
        // The last one is the unused one now.
        for i in 0..COUNT as u32 - 1 {
            let own = IOVAS[0] + 4096 + u64::from(i) * STRIDE as u64;
            assert!(!F::OVERWRITES_ADDRESS || rx.addr(i) == own, "{i}");
        }
    }

    #[test]
    fn any_length_of_a_hostile_device_stays_in_its_buffer() {
        any_length_stays_in_its_buffer::<Legacy>();
        any_length_stays_in_its_buffer::<Advanced>();
    }

    /// Goal: every event is counted once, whether or not reading clears the register. Method: a
    /// counter that increases now and then, also between two reads.
    #[test]
    fn a_counter_is_counted_once() {
        for clears in [true, false] {
            let (value, between) = (Cell::new(0), Cell::new(0));
            let read = || {
                let said = value.get();
                value.set(if clears { 0 } else { said } + between.take());
                said
            };
            let (mut counter, mut sum, mut expected) = (StatsCounter::default(), 0, 0);
            let steps = [(0, 1), (5, 0), (0, 0), (9, 3), (0, 1), (1, 1), (2, 5), (0, 0), (40, 2)];
            for (more, meanwhile) in steps {
                value.set(value.get() + more);
                between.set(meanwhile);
                expected += more + meanwhile;
                sum += counter.delta(read);
            }
            sum += counter.delta(read);
            assert_eq!(sum, expected, "clears: {clears}");
        }
    }
}
