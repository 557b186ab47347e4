//! Intel's gigabit NICs: the 82574L (datasheet revision 3.4; QEMU's `e1000e`), the 82540EM, 82544GC
//! and 82545EM ("PCI/PCI-X Family of Gigabit Ethernet Controllers Software Developer's Manual",
//! revision 4.0; QEMU's `e1000`, `e1000-82544gc` and `e1000-82545em`), and the 82576 (datasheet
//! revision 2.61; QEMU's `igb`, from 8.0 on).
//!
//! One receive and one transmit ring, every frame in one buffer. Polled: every interrupt cause is
//! masked, but that of a received frame while somebody sleeps. What the chips do differently is
//! [`Chip`].

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::time::{Duration, Instant};

use vfio_bindings::bindings::vfio;

use super::device::{Bar, Device, Tail};
use super::error::VfioError;
use super::nic::{Buffers, Facts, Lent, Nic};
use super::ring::desc::DESC_LEN;
use super::ring::e1000::{Addrs, Advanced, Format, Legacy, RxRing, TxRing};
use super::ring::virtq::Broken;
use super::sys::Access;
use super::{Started, VfioSettings};
use crate::frame::ETH_HDR_LEN;
use crate::port::MacAddr;

/// Registers, by their offset in BAR 0.
mod reg {
    pub(super) const CTRL: usize = 0x0000;
    pub(super) const STATUS: usize = 0x0008;
    pub(super) const MDIC: usize = 0x0020;
    pub(super) const ICR: usize = 0x00c0;
    pub(super) const IMS: usize = 0x00d0;
    pub(super) const IMC: usize = 0x00d8;
    pub(super) const RCTL: usize = 0x0100;
    pub(super) const TCTL: usize = 0x0400;
    pub(super) const TIPG: usize = 0x0410;
    pub(super) const RDBAL: usize = 0x2800;
    pub(super) const RDBAH: usize = 0x2804;
    pub(super) const RDLEN: usize = 0x2808;
    pub(super) const SRRCTL: usize = 0x280c;
    pub(super) const RDH: usize = 0x2810;
    pub(super) const RDT: usize = 0x2818;
    pub(super) const RDTR: usize = 0x2820;
    pub(super) const RXDCTL: usize = 0x2828;
    pub(super) const TDBAL: usize = 0x3800;
    pub(super) const TDBAH: usize = 0x3804;
    pub(super) const TDLEN: usize = 0x3808;
    pub(super) const TDH: usize = 0x3810;
    pub(super) const TDT: usize = 0x3818;
    pub(super) const TXDCTL: usize = 0x3828;
    pub(super) const CRCERRS: usize = 0x4000;
    pub(super) const MPC: usize = 0x4010;
    pub(super) const RLPML: usize = 0x5004;
    pub(super) const RFCTL: usize = 0x5008;
    /// 128 words: the hash filter of group addresses.
    pub(super) const MTA: usize = 0x5200;
    pub(super) const RAL0: usize = 0x5400;
    pub(super) const RAH0: usize = 0x5404;
    pub(super) const LEN: usize = 0x20000;
}

const CTRL_FULL_DUPLEX: u32 = 1 << 0;
const CTRL_MASTER_DISABLE: u32 = 1 << 2;
const CTRL_AUTO_SPEED: u32 = 1 << 5;
const CTRL_LINK_UP: u32 = 1 << 6;
const CTRL_RESET: u32 = 1 << 26;

const STATUS_LINK_UP: u32 = 1 << 1;
const STATUS_MASTER: u32 = 1 << 19;

/// Causes of an interrupt: a frame was received, and how the 82574's queue 0 says it.
const CAUSE_RX: u32 = 1 << 7;
const CAUSE_RX_QUEUE: u32 = 1 << 20;

const RCTL_ENABLE: u32 = 1 << 1;
const RCTL_ALL_STATIONS: u32 = 1 << 3;
const RCTL_ALL_GROUPS: u32 = 1 << 4;
const RCTL_LONG: u32 = 1 << 5;
const RCTL_BROADCAST: u32 = 1 << 15;
const RCTL_STRIP_CRC: u32 = 1 << 26;

const TCTL_ENABLE: u32 = 1 << 1;
const TCTL_PAD: u32 = 1 << 3;
/// Collision threshold and distance as the datasheet recommends for full duplex.
const TCTL_COLLISIONS: u32 = 0x0f << 4 | 0x3f << 12;
/// Inter-packet gap for copper.
const TIPG_COPPER: u32 = 8 | 8 << 10 | 6 << 20;
/// Write descriptors back one by one, thresholds counted in descriptors.
const TXDCTL_EACH: u32 = 1 << 16 | 1 << 24;
/// What the 82574's datasheet wants set beside it.
const TXDCTL_COUNT: u32 = 1 << 22;

/// The queue is on: RXDCTL and TXDCTL of the 82576.
const DCTL_ENABLE: u32 = 1 << 25;
/// Advanced descriptors, one buffer a frame. The lowest bits are the buffer's length in KiB.
const SRRCTL_ADVANCED: u32 = 1 << 25;

/// Writes register 0 of PHY 1 (MDIC): it negotiates, and begins anew.
const MDIC_NEGOTIATE: u32 = 1 << 26 | 1 << 21 | 0x1200;
const MDIC_READY: u32 = 1 << 28;

const RAH_VALID: u32 = 1 << 31;

/// What the chips of the family do differently, and the format of their descriptors.
pub(super) struct Chip<F> {
    /// How it interrupts, as VFIO counts the kinds. One for all causes is enough.
    interrupt: u32,
    /// Causes that say that a frame was received.
    cause_rx: u32,
    /// Value of TXDCTL.
    txdctl: u32,
    /// Of PCI Express: transfers are ended before a reset (CTRL, STATUS).
    is_express: bool,
    /// What is beside the ring for a receive queue.
    queue: Queue,
    format: PhantomData<F>,
}

/// How a receive queue is set up.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Queue {
    /// There is one, it is on, and has one format of descriptors.
    Plain,
    /// RFCTL chooses the format.
    Format,
    /// One of several: SRRCTL chooses the format, and RXDCTL switches it on. The PHY begins to
    /// negotiate when it is told.
    OfSeveral,
}

/// The 82574L.
pub(super) const I82574: Chip<Legacy> = Chip {
    interrupt: vfio::VFIO_PCI_MSI_IRQ_INDEX,
    cause_rx: CAUSE_RX | CAUSE_RX_QUEUE,
    txdctl: TXDCTL_EACH | TXDCTL_COUNT,
    is_express: true,
    queue: Queue::Format,
    format: PhantomData,
};

/// The 82540EM, 82544GC and 82545EM.
pub(super) const I8254X: Chip<Legacy> = Chip {
    interrupt: vfio::VFIO_PCI_INTX_IRQ_INDEX,
    cause_rx: CAUSE_RX,
    txdctl: TXDCTL_EACH,
    is_express: false,
    queue: Queue::Plain,
    format: PhantomData,
};

/// The 82576: one of its queues.
pub(super) const I82576: Chip<Advanced> = Chip {
    interrupt: vfio::VFIO_PCI_MSI_IRQ_INDEX,
    cause_rx: CAUSE_RX,
    txdctl: DCTL_ENABLE,
    is_express: true,
    queue: Queue::OfSeveral,
    format: PhantomData,
};

/// Longest frame of the 82574 without its check sequence is 9,230 bytes; the others carry 16,128.
const MTU_MAX: usize = 9216;
const MTU_USUAL: usize = 1500;
const COUNT: u16 = 256;

/// Receive buffers that the device is told of at once, or a quarter of them where that is less.
const TOLD_AT_ONCE: u32 = 32;

/// Sizes of receive buffers that the device knows, and their bits in RCTL.
const BUFFER_LENS: [(usize, u32); 4] =
    [(2048, 0), (4096, 1 << 25 | 3 << 16), (8192, 1 << 25 | 2 << 16), (16_384, 1 << 25 | 1 << 16)];

/// A started NIC of the family.
pub(super) struct E1000<F: Format> {
    chip: &'static Chip<F>,
    bar: Bar,
    rx: RxRing<F>,
    rx_buffers: Buffers,
    /// Taken and not given back.
    lent: u32,
    /// Given back, and the device does not know it yet.
    untold: u32,
    /// As many as that are told at once: a register costs more than the frame.
    told_at_once: u32,
    tx: TxRing<F>,
    tx_buffers: Buffers,
    is_queued: bool,
    dropped: u64,
    /// What `LOSSES` said last, where reading does not clear them.
    losses: [u32; LOSSES.len()],
    rx_tail: Tail,
    tx_tail: Tail,
}

/// Starts the device.
///
/// # Errors
/// [`VfioError`]; the device has been reset.
pub(super) fn start<F: Format>(
    device: &Device,
    settings: &VfioSettings,
    chip: &'static Chip<F>,
) -> Result<Started<E1000<F>>, VfioError> {
    let bar = device.bar(0)?;
    if bar.len() < reg::LEN {
        return Err(device.fault("its registers are too few"));
    }
    reset(device, &bar, chip)?;
    let facts = facts(device, &bar, settings)?;
    let counts = [settings.rx_count, settings.tx_count];
    let counts = counts.map(|count| {
        let count = count.unwrap_or(COUNT).clamp(8, 4096);
        1_usize << count.ilog2()
    });
    let [rx_count, tx_count] = counts;
    let frame_max = ETH_HDR_LEN + facts.mtu;
    // Four more for the check sequence, which is counted until it is stripped.
    let rx_len = BUFFER_LENS.iter().find(|(len, _)| *len >= frame_max + 4);
    let &(rx_stride, rx_bits) = rx_len.expect("the largest holds every frame");
    let tx_stride = frame_max.next_multiple_of(64);
    let container = device.container();
    let (tx_ring_at, buffers_at) = (rx_count * DESC_LEN, (rx_count + tx_count) * DESC_LEN);
    let buffers_at = buffers_at.next_multiple_of(4096);
    let len = buffers_at + rx_count * rx_stride;
    let shared = container.area(len, Access::ReadWrite, settings.hugepages)?;
    let sent = container.area(tx_count * tx_stride, Access::Read, settings.hugepages)?;
    let rx_at = Addrs { first: shared.iova() + buffers_at as u64, stride: rx_stride as u64 };
    let tx_at = Addrs { first: sent.iova(), stride: tx_stride as u64 };
    // SAFETY: `add` stays inside the area, whose length was computed from the same offsets. Rings
    // and buffers are disjoint parts of the two areas, which go when the port has stopped the NIC.
    let (rx, tx, rx_buffers, tx_buffers) = unsafe {
        (
            RxRing::new(shared.base(), rx_count as u32, rx_at),
            TxRing::new(shared.base().add(tx_ring_at), tx_count as u32, tx_at),
            Buffers::new(shared.base().add(buffers_at), rx_stride, rx_count),
            Buffers::new(sent.base(), tx_stride, tx_count),
        )
    };
    device.set_bus_master(true)?;
    let ring = shared.iova();
    for (at, value) in [
        (reg::RDBAL, ring as u32),
        (reg::RDBAH, (ring >> 32) as u32),
        (reg::RDLEN, (rx_count * DESC_LEN) as u32),
        (reg::RDH, 0),
        (reg::RDT, 0),
        (reg::RDTR, 0),
    ] {
        bar.write32(at, value);
    }
    match chip.queue {
        Queue::Plain => {}
        // Legacy descriptors.
        Queue::Format => bar.write32(reg::RFCTL, 0),
        Queue::OfSeveral => {
            bar.write32(reg::SRRCTL, rx_stride as u32 >> 10 | SRRCTL_ADVANCED);
            bar.write32(reg::RLPML, frame_max as u32 + 4);
        }
    }
    let ring = shared.iova() + tx_ring_at as u64;
    for (at, value) in [
        (reg::TDBAL, ring as u32),
        (reg::TDBAH, (ring >> 32) as u32),
        (reg::TDLEN, (tx_count * DESC_LEN) as u32),
        (reg::TDH, 0),
        (reg::TDT, 0),
        (reg::TXDCTL, chip.txdctl),
        (reg::TIPG, TIPG_COPPER),
        (reg::TCTL, TCTL_ENABLE | TCTL_PAD | TCTL_COLLISIONS),
    ] {
        bar.write32(at, value);
    }
    let long = if frame_max > 1514 { RCTL_LONG } else { 0 };
    let all = if settings.promiscuous { RCTL_ALL_STATIONS } else { 0 };
    let kinds = RCTL_ALL_GROUPS | RCTL_BROADCAST | all;
    let is_of_several = chip.queue == Queue::OfSeveral;
    let rx_bits = if is_of_several { 0 } else { rx_bits };
    let receive = RCTL_ENABLE | RCTL_STRIP_CRC | kinds | long | rx_bits;
    bar.write32(reg::RCTL, receive);
    if is_of_several {
        bar.write32(reg::RXDCTL, DCTL_ENABLE);
        let is_on = |bar: &Bar| bar.read32(reg::RXDCTL) & DCTL_ENABLE != 0;
        await_register(&bar, is_on).map_err(|()| device.fault("its queue does not start"))?;
    }
    bar.write32(reg::RDT, rx.tail());
    let (rx_tail, tx_tail) = (bar.tail(reg::RDT), bar.tail(reg::TDT));
    let nic = E1000 {
        chip,
        bar,
        rx,
        rx_buffers,
        lent: 0,
        untold: 0,
        told_at_once: (rx_count as u32 / 4).min(TOLD_AT_ONCE),
        tx,
        tx_buffers,
        is_queued: false,
        dropped: 0,
        losses: [0; LOSSES.len()],
        rx_tail,
        tx_tail,
    };
    let interrupt = device.interrupt(chip.interrupt);
    Ok(Started { nic, facts, areas: vec![shared, sent], interrupt })
}

/// Ends every transfer and begins a reset (82574's datasheet, section 4.6.3.2).
fn silence<F>(bar: &Bar, chip: &Chip<F>) {
    bar.write32(reg::IMC, !0);
    bar.write32(reg::RCTL, 0);
    bar.write32(reg::TCTL, TCTL_PAD);
    if chip.is_express {
        bar.write32(reg::CTRL, bar.read32(reg::CTRL) | CTRL_MASTER_DISABLE);
        // All ones, of a device that was pulled out, never clears. One that is stuck is reset all
        // the same.
        let ended = |s: u32| s & STATUS_MASTER == 0 || s == !0;
        let _ = await_register(bar, |bar| ended(bar.read32(reg::STATUS)));
    }
    bar.write32(reg::CTRL, bar.read32(reg::CTRL) | CTRL_RESET);
}

/// Waits until a register `is` as wanted.
///
/// # Errors
/// It was not within 100 ms.
fn await_register(bar: &Bar, is: impl Fn(&Bar) -> bool) -> Result<(), ()> {
    let until = Instant::now() + Duration::from_millis(100);
    while !is(bar) {
        if Instant::now() > until {
            return Err(());
        }
        std::thread::yield_now();
    }
    Ok(())
}

/// Silences and resets the device, and brings the link up.
fn reset<F>(device: &Device, bar: &Bar, chip: &Chip<F>) -> Result<(), VfioError> {
    silence(bar, chip);
    // No register may be touched for a microsecond; the rest is the reading of the EEPROM.
    std::thread::sleep(Duration::from_millis(5));
    let until = Instant::now() + Duration::from_secs(1);
    while bar.read32(reg::CTRL) & CTRL_RESET != 0 {
        if Instant::now() > until {
            return Err(device.fault("it does not leave reset"));
        }
        std::thread::yield_now();
    }
    bar.write32(reg::IMC, !0);
    bar.read32(reg::ICR);
    let up = CTRL_FULL_DUPLEX | CTRL_AUTO_SPEED | CTRL_LINK_UP;
    let ends = if chip.is_express { CTRL_MASTER_DISABLE } else { 0 };
    bar.write32(reg::CTRL, bar.read32(reg::CTRL) & !ends | up);
    if chip.queue == Queue::OfSeveral {
        bar.write32(reg::MDIC, MDIC_NEGOTIATE);
        let is_done = |bar: &Bar| bar.read32(reg::MDIC) & MDIC_READY != 0;
        await_register(bar, is_done).map_err(|()| device.fault("its PHY does not answer"))?;
    }
    Ok(())
}

fn facts(device: &Device, bar: &Bar, settings: &VfioSettings) -> Result<Facts, VfioError> {
    let (low, high) = (bar.read32(reg::RAL0), bar.read32(reg::RAH0));
    let [a, b, c, d] = low.to_le_bytes();
    let [e, f, ..] = high.to_le_bytes();
    let own = MacAddr([a, b, c, d, e, f]);
    let is_sound = high & RAH_VALID != 0 && !own.is_group() && own != MacAddr::default();
    let mac = match settings.mac {
        Some(mac) => mac,
        None if is_sound => own,
        None => return Err(device.fault("it has no address; give it one with mac=")),
    };
    let [a, b, c, d, e, f] = mac.0;
    bar.write32(reg::RAL0, u32::from_le_bytes([a, b, c, d]));
    bar.write32(reg::RAH0, u32::from_le_bytes([e, f, 0, 0]) | RAH_VALID);
    for i in 0..128 {
        bar.write32(reg::MTA + 4 * i, 0);
    }
    let mtu = settings.mtu.unwrap_or(MTU_USUAL);
    if mtu > MTU_MAX {
        return Err(device.fault(format!("it carries an MTU of {MTU_MAX}, not {mtu}")));
    }
    // A cable that was just plugged in takes a few seconds; without one the port opens too.
    let until = Instant::now() + Duration::from_secs(4);
    let mut status = bar.read32(reg::STATUS);
    while status & STATUS_LINK_UP == 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
        status = bar.read32(reg::STATUS);
    }
    let link_bps = match (status & STATUS_LINK_UP != 0, status >> 6 & 3) {
        (false, _) => {
            tracing::warn!(bdf = device.bdf, "the link is down");
            0
        }
        (true, 0) => 10_000_000,
        (true, 1) => 100_000_000,
        (true, _) => 1_000_000_000,
    };
    Ok(Facts { mac, mtu, link_bps })
}

/// Frames that were lost: for want of a buffer, and damaged.
const LOSSES: [usize; 2] = [reg::MPC, reg::CRCERRS];

/// How far a counter went on since this was last called. `last` is what it said then. The
/// datasheets have reading clear it, and QEMU's 82540 does not.
fn fresh(read: impl Fn() -> u32, last: &mut u32) -> u32 {
    match (read(), read()) {
        // More came between the two.
        (first, second) if second < first => first.wrapping_add(second),
        (_, second) => second.wrapping_sub(std::mem::replace(last, second)),
    }
}

impl<F: Format> Nic for E1000<F> {
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
            let len = usize::from(got.len);
            if !got.is_good || len < ETH_HDR_LEN || len > self.rx_buffers.stride() {
                self.dropped += 1;
                continue;
            }
            each(Lent { base: self.rx_buffers.at(got.id as usize).as_ptr(), len });
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

    fn set_interrupt(&mut self, wanted: bool) {
        if wanted {
            // Reading takes back what has been signalled, so that the next cause is signalled anew.
            self.bar.read32(reg::ICR);
            self.bar.write32(reg::IMS, self.chip.cause_rx);
        } else {
            self.bar.write32(reg::IMC, !0);
        }
    }

    fn dropped(&self) -> u64 {
        self.dropped
    }

    fn health(&mut self) -> Result<(), String> {
        if self.bar.read32(reg::STATUS) == !0 {
            return Err("the device no longer answers; was it unplugged?".into());
        }
        if self.bar.read32(reg::RCTL) & RCTL_ENABLE == 0 {
            return Err("the device was reset or stopped under us; open the port again".into());
        }
        for (register, last) in LOSSES.into_iter().zip(&mut self.losses) {
            self.dropped += u64::from(fresh(|| self.bar.read32(register), last));
        }
        Ok(())
    }

    fn has_link(&self) -> Option<bool> {
        Some(self.bar.read32(reg::STATUS) & STATUS_LINK_UP != 0)
    }

    fn stop(&mut self) {
        silence(&self.bar, self.chip);
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
            let (mut last, mut sum, mut expected) = (0, 0, 0);
            for (more, meanwhile) in [(0, 0), (5, 0), (0, 0), (9, 3), (1, 0), (0, 0), (40, 2)] {
                value.set(value.get() + more);
                between.set(meanwhile);
                expected += more + meanwhile;
                sum += fresh(read, &mut last);
            }
            sum += fresh(read, &mut last);
            assert_eq!(sum, expected, "clears: {clears}");
        }
    }
}
