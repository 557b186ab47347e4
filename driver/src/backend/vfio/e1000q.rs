//! A receive and a transmit queue of Intel's gigabit NICs: memory, registers, and the way of a
//! frame. Every frame lies in one buffer.
//!
//! Whoever has the other registers of the NIC (`e1000` of a whole one, `igbvf` of a virtual
//! function) starts, watches and stops it.

use std::ptr::NonNull;
use std::time::Duration;

use super::VfioSettings;
use super::device::{Bar, Device, DmaArea, Tail, Words, becomes};
use super::error::VfioError;
use super::nic::{Buffers, Lent, Rings};
use super::ring::desc::DESC_LEN;
use super::ring::e1000::{Addrs, Format, RxRing, TxRing};
use super::ring::virtq::Broken;
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

/// The queue is on: RXDCTL and TXDCTL of the 82576 and its successors.
pub(super) const DCTL_ENABLE: u32 = 1 << 25;
/// Their values for a queue that is on. Descriptors are fetched when fewer than 8 are left in the
/// device, and written back one by one: an erratum of the 82576 has its functions forget to write
/// back at a threshold (WTHRESH) of 0.
const RXDCTL_ONE_OF_SEVERAL: u32 = DCTL_ENABLE | 8 | 8 << 8 | 1 << 16;
pub(super) const TXDCTL_ONE_OF_SEVERAL: u32 = DCTL_ENABLE | 8 | 1 << 8 | 1 << 16;
/// Advanced descriptors, one buffer a frame. The lowest bits are the buffer's length in KiB.
const SRRCTL_ADVANCED: u32 = 1 << 25;
/// A frame for which there is no buffer is dropped, instead of holding up the other queues.
const SRRCTL_DROP: u32 = 1 << 31;

/// Longest frame of the 82574 without its check sequence is 9,230 bytes; the others carry 16,128.
pub(super) const MTU_MAX: usize = 9216;
/// Bytes of the frame check sequence.
pub(super) const FCS_LEN: usize = 4;

/// Receive buffers that the device is told of at once, or a quarter of them where that is less.
const TOLD_AT_ONCE: u32 = 32;

/// Sizes of receive buffers that the devices know.
pub(super) const BUFFER_LENS: [usize; 4] = [2048, 4096, 8192, 16_384];

/// Both queues and their buffers.
pub(super) struct Queues<F: Format> {
    bar: Bar,
    rx: RxRing<F>,
    rx_buffers: Buffers,
    /// Where the device finds the rings.
    ring_iovas: [u64; 2],
    /// Descriptors of each.
    counts: [usize; 2],
    /// Taken and not given back.
    lent: u32,
    /// Given back, and the device does not know it yet.
    untold: u32,
    /// As many as that are told at once: a register costs more than the frame.
    told_at_once: u32,
    tx: TxRing<F>,
    tx_buffers: Buffers,
    is_queued: bool,
    /// Frames that came damaged or of a length that cannot be.
    dropped: u64,
    rx_tail: Tail,
    tx_tail: Tail,
}

impl<F: Format> Queues<F> {
    /// Queues for frames of `mtu` bytes after the header, and the areas that the device has to
    /// reach for them. The device knows nothing of them yet.
    ///
    /// # Errors
    /// There is no memory for them that the device can reach.
    pub(super) fn new(
        device: &Device,
        bar: &Bar,
        settings: &VfioSettings,
        mtu: usize,
    ) -> Result<(Self, Vec<DmaArea>), VfioError> {
        let counts = settings.counts(8);
        let [rx_count, tx_count] = counts;
        let frame_max = ETH_HDR_LEN + mtu;
        // The check sequence is counted until it is stripped.
        let rx_stride = BUFFER_LENS.into_iter().find(|&len| len >= frame_max + FCS_LEN);
        let rx_stride = rx_stride.expect("the largest holds every frame");
        let tx_stride = frame_max.next_multiple_of(64);
        let container = device.container();
        let (tx_ring_at, buffers_at) = (rx_count * DESC_LEN, (rx_count + tx_count) * DESC_LEN);
        let buffers_at = buffers_at.next_multiple_of(4096);
        let len = buffers_at + rx_count * rx_stride;
        let shared = container.area(len, Access::ReadWrite, settings.hugepages)?;
        let sent = container.area(tx_count * tx_stride, Access::Read, settings.hugepages)?;
        let rx_at = Addrs { first: shared.iova() + buffers_at as u64, stride: rx_stride as u64 };
        let tx_at = Addrs { first: sent.iova(), stride: tx_stride as u64 };
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
            untold: 0,
            told_at_once: (rx_count as u32 / 4).min(TOLD_AT_ONCE),
            tx,
            tx_buffers,
            is_queued: false,
            dropped: 0,
            rx_tail: bar.tail(reg::RDT),
            tx_tail: bar.tail(reg::TDT),
        };
        Ok((queues, vec![shared, sent]))
    }

    /// Bytes of a receive buffer: one of `BUFFER_LENS`.
    pub(super) fn rx_stride(&self) -> usize {
        self.rx_buffers.stride()
    }

    /// Tells the device where the rings are. `txdctl` is the value of TXDCTL.
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

    /// Chooses advanced descriptors, where a receive queue has a choice; `drops` as `SRRCTL_DROP`.
    pub(super) fn choose_format(&self, drops: bool) {
        let drops = if drops { SRRCTL_DROP } else { 0 };
        let format = self.rx_stride() as u32 >> 10 | SRRCTL_ADVANCED | drops;
        self.bar.write32(reg::SRRCTL, format);
    }

    /// Switches the receive queue on, where it has a switch.
    ///
    /// # Errors
    /// It stays off.
    pub(super) fn switch_on(&self, device: &Device) -> Result<(), VfioError> {
        self.bar.write32(reg::RXDCTL, RXDCTL_ONE_OF_SEVERAL);
        await_register(&self.bar, |bar| bar.read32(reg::RXDCTL) & DCTL_ENABLE != 0)
            .map_err(|()| device.fault("its queue does not start"))
    }

    /// Whether the receive queue is on, where it has a switch, and as it was programmed: a reset
    /// leaves the first of a card on, and without a ring.
    pub(super) fn are_on(&self) -> bool {
        let has_ring = self.bar.read32(reg::RDLEN) == (self.counts[0] * DESC_LEN) as u32;
        has_ring && self.bar.read32(reg::RXDCTL) & DCTL_ENABLE != 0
    }

    /// Gives the device the receive buffers.
    pub(super) fn offer(&self) {
        self.rx_tail.set(self.rx.tail());
    }

    /// Frames that the device handed over and could not be used.
    pub(super) fn dropped(&self) -> u64 {
        self.dropped
    }
}

impl<F: Format> Rings for Queues<F> {
    #[inline]
    fn tx(&mut self, len: usize, fill: impl FnOnce(NonNull<u8>)) -> Result<bool, Broken> {
        assert!(len <= self.tx_buffers.stride(), "longer than a buffer");
        let Some(i) = self.tx.place() else { return Ok(false) };
        fill(self.tx_buffers.at(i as usize));
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
    fn rx_take(&mut self, max: usize, mut each: impl FnMut(Lent)) -> Result<usize, Broken> {
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
            self.rx.give_back(self.lent);
            self.untold += std::mem::take(&mut self.lent);
            if self.untold >= self.told_at_once {
                self.untold = 0;
                self.rx_tail.set(self.rx.tail());
            }
        }
    }
}

/// Switches both queues off, and waits for what they are doing; not for ever.
pub(super) fn switch_off(bar: &Bar) {
    for queue in [reg::RXDCTL, reg::TXDCTL] {
        bar.write32(queue, 0);
    }
    // All ones, of a device that was pulled out, never clears.
    let is_off = |word: u32| word & DCTL_ENABLE == 0 || word == !0;
    let _ = await_register(bar, |bar| {
        is_off(bar.read32(reg::RXDCTL)) && is_off(bar.read32(reg::TXDCTL))
    });
}

/// Waits until a register `is` as wanted.
///
/// # Errors
/// It was not within 100 ms.
pub(super) fn await_register<W: Words>(words: &W, is: impl Fn(&W) -> bool) -> Result<(), ()> {
    becomes(Duration::from_millis(100), || is(words)).then_some(()).ok_or(())
}

/// Waits until a reset that was written has arrived: the device reaches no memory from then on.
/// `register` is any of its; none may be touched for a microsecond after the write.
pub(super) fn await_reset(bar: &Bar, register: usize) {
    std::thread::sleep(Duration::from_millis(1));
    // The answer comes behind the write.
    bar.read32(register);
}

/// The link speed in bit/s that STATUS says, 0 without a link.
pub(super) fn link_bps(status: u32) -> u64 {
    match (status & STATUS_LINK_UP != 0, status >> 6 & 3) {
        (false, _) => 0,
        (true, 0) => 10_000_000,
        (true, 1) => 100_000_000,
        (true, _) => 1_000_000_000,
    }
}

/// There is a link: STATUS.
pub(super) const STATUS_LINK_UP: u32 = 1 << 1;

/// A counter of the device's. The datasheets have reading clear it, and QEMU's 82540 does not.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counter {
    /// What it said last, as long as it has never gone back.
    last: u32,
    clears: bool,
}

impl Counter {
    /// How far it went on since this was last called. Until the first time that it is seen to have
    /// gone back, what came between two readings may be missed.
    pub(super) fn fresh(&mut self, read: impl Fn() -> u32) -> u32 {
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

    use super::*;

    /// Goal: what a counter counts is counted once, whether or not reading clears it. Method: a
    /// counter that goes on now and then, also between two readings.
    #[test]
    fn a_counter_is_counted_once() {
        for clears in [true, false] {
            let (value, between) = (Cell::new(0), Cell::new(0));
            let read = || {
                let said = value.get();
                value.set(if clears { 0 } else { said } + between.take());
                said
            };
            let (mut counter, mut sum, mut expected) = (Counter::default(), 0, 0);
            let steps = [(0, 1), (5, 0), (0, 0), (9, 3), (0, 1), (1, 1), (2, 5), (0, 0), (40, 2)];
            for (more, meanwhile) in steps {
                value.set(value.get() + more);
                between.set(meanwhile);
                expected += more + meanwhile;
                sum += counter.fresh(read);
            }
            sum += counter.fresh(read);
            assert_eq!(sum, expected, "clears: {clears}");
        }
    }
}
