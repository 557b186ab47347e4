//! Intel's gigabit NICs: the 82574L (datasheet revision 3.4; QEMU's `e1000e`), the 82540EM, 82544GC
//! and 82545EM ("PCI/PCI-X Family of Gigabit Ethernet Controllers Software Developer's Manual",
//! revision 4.0; QEMU's `e1000`, `e1000-82544gc` and `e1000-82545em`), and the 82576 (datasheet
//! revision 2.61; QEMU's `igb`, from 8.0 on) with its successors: 82580, I350, I354, I210, I211.
//!
//! One receive and one transmit ring, one buffer per frame. Polled: all interrupt causes are
//! masked, except that of received frames while a thread sleeps. Differences between the chips are
//! in [`Chip`].

use std::marker::PhantomData;
use std::time::{Duration, Instant};

use vfio_bindings::bindings::vfio;

use super::device::{Bar, Device, poll_until};
use super::e1000q::{
    self, BUFFER_LENS, FCS_LEN, MTU_MAX, Queues, StatsCounter, TXDCTL_MULTI_QUEUE, await_register,
    await_reset, disable_queues,
};
use super::error::VfioError;
use super::igb::{self, ChipModel};
use super::nic::{Nic, NicCaps};
use super::ring::e1000::{Advanced, Format, Legacy};
use super::{StartedNic, VfioSettings};
use crate::frame::ETH_HDR_LEN;
use crate::port::MacAddr;

/// Registers, by their offset in BAR 0.
mod reg {
    pub(super) const CTRL: usize = 0x0000;
    pub(super) const STATUS: usize = 0x0008;
    pub(super) const ICR: usize = 0x00c0;
    pub(super) const IMS: usize = 0x00d0;
    pub(super) const IMC: usize = 0x00d8;
    pub(super) const RCTL: usize = 0x0100;
    pub(super) const TCTL: usize = 0x0400;
    pub(super) const TIPG: usize = 0x0410;
    pub(super) const RDTR: usize = 0x2820;
    pub(super) const CRCERRS: usize = 0x4000;
    pub(super) const MPC: usize = 0x4010;
    pub(super) const RLPML: usize = 0x5004;
    pub(super) const RFCTL: usize = 0x5008;
    /// 128 words: the multicast hash filter.
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

const STATUS_MASTER: u32 = 1 << 19;

/// Interrupt causes of a received frame: of all chips, and of the 82574's queue 0.
const CAUSE_RX: u32 = 1 << 7;
const CAUSE_RX_QUEUE: u32 = 1 << 20;

const RCTL_ENABLE: u32 = 1 << 1;
const RCTL_UNICAST_PROMISC: u32 = 1 << 3;
const RCTL_MULTICAST_PROMISC: u32 = 1 << 4;
const RCTL_LONG_PACKET: u32 = 1 << 5;
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
/// Required by the 82574's datasheet.
const TXDCTL_COUNT: u32 = 1 << 22;

const RAH_VALID: u32 = 1 << 31;

/// Differences between the chips of the family, and their descriptor format.
pub(super) struct Chip<F> {
    /// VFIO index of its interrupt: one vector for all causes is enough.
    interrupt: u32,
    /// Causes of a received frame.
    cause_rx: u32,
    /// Value of TXDCTL.
    txdctl: u32,
    /// PCI Express: bus mastering is disabled before a reset (CTRL, STATUS).
    is_express: bool,
    /// Setup of the receive queue.
    queue: RxQueueKind,
    format: PhantomData<F>,
}

/// Setup of a receive queue.
enum RxQueueKind {
    /// One queue, always enabled, with one descriptor format.
    Plain,
    /// One queue, whose format RFCTL selects.
    Format,
    /// Several queues: SRRCTL selects the format, RXDCTL enables the queue. Link and PHY are those
    /// of the 82576's family.
    MultiQueue(&'static ChipModel),
}

/// The 82574L.
pub(super) const I82574: Chip<Legacy> = Chip {
    interrupt: vfio::VFIO_PCI_MSI_IRQ_INDEX,
    cause_rx: CAUSE_RX | CAUSE_RX_QUEUE,
    txdctl: TXDCTL_EACH | TXDCTL_COUNT,
    is_express: true,
    queue: RxQueueKind::Format,
    format: PhantomData,
};

/// The 82540EM, 82544GC and 82545EM.
pub(super) const I8254X: Chip<Legacy> = Chip {
    interrupt: vfio::VFIO_PCI_INTX_IRQ_INDEX,
    cause_rx: CAUSE_RX,
    txdctl: TXDCTL_EACH,
    is_express: false,
    queue: RxQueueKind::Plain,
    format: PhantomData,
};

/// The 82576 and its successors, of whose queues one pair is used.
const fn multi_queue(model: &'static ChipModel) -> Chip<Advanced> {
    Chip {
        interrupt: vfio::VFIO_PCI_MSI_IRQ_INDEX,
        cause_rx: CAUSE_RX,
        txdctl: TXDCTL_MULTI_QUEUE,
        is_express: true,
        queue: RxQueueKind::MultiQueue(model),
        format: PhantomData,
    }
}

/// The 82576.
pub(super) const I82576: Chip<Advanced> = multi_queue(&igb::I82576);
/// The 82580, also inside of the DH89xx.
pub(super) const I82580: Chip<Advanced> = multi_queue(&igb::I82580);
/// The I350.
pub(super) const I350: Chip<Advanced> = multi_queue(&igb::I350);
/// The I354.
pub(super) const I354: Chip<Advanced> = multi_queue(&igb::I354);
/// The I210.
pub(super) const I210: Chip<Advanced> = multi_queue(&igb::I210);
/// The I211.
pub(super) const I211: Chip<Advanced> = multi_queue(&igb::I211);

/// RCTL buffer size bits for each of [`BUFFER_LENS`].
const BUFFER_BITS: [u32; BUFFER_LENS.len()] =
    [0, 1 << 25 | 3 << 16, 1 << 25 | 2 << 16, 1 << 25 | 1 << 16];

/// A started NIC of the family.
pub(super) struct E1000<F: Format> {
    chip: &'static Chip<F>,
    bar: Bar,
    queues: Queues<F>,
    /// Frames that the device dropped.
    missed: u64,
    /// State of each of `DROP_COUNTERS`.
    drop_counters: [StatsCounter; DROP_COUNTERS.len()],
}

/// Returns the function that starts a device as this chip: see [`start`].
pub(super) fn starter<F: Format>(
    chip: &'static Chip<F>,
) -> impl Fn(&Device, &VfioSettings) -> Result<StartedNic<E1000<F>>, VfioError> {
    move |device, settings| start(device, settings, chip)
}

/// Starts the device.
///
/// # Errors
/// [`VfioError`]; the device has been reset.
fn start<F: Format>(
    device: &Device,
    settings: &VfioSettings,
    chip: &'static Chip<F>,
) -> Result<StartedNic<E1000<F>>, VfioError> {
    let bar = device.bar(0)?;
    if bar.len() < reg::LEN {
        return Err(device.device_error("its registers are too few"));
    }
    reset(device, &bar, chip)?;
    let caps = caps(device, &bar, settings, chip)?;
    let (queues, areas) = Queues::new(device, &bar, settings, caps.mtu)?;
    if let RxQueueKind::MultiQueue(_) = chip.queue {
        // A reset leaves the first queues enabled, and ring addresses may be changed only while a
        // queue is disabled.
        disable_queues(&bar);
    }
    device.set_bus_master(true)?;
    queues.program(chip.txdctl);
    let frame_max = ETH_HDR_LEN + caps.mtu;
    let rx_len = BUFFER_LENS.iter().position(|&len| len == queues.rx_stride());
    let mut rx_bits = BUFFER_BITS[rx_len.expect("buffers have one of these lengths")];
    match chip.queue {
        RxQueueKind::Plain => bar.write32(reg::RDTR, 0),
        RxQueueKind::Format => {
            bar.write32(reg::RDTR, 0);
            // Legacy descriptors.
            bar.write32(reg::RFCTL, 0);
        }
        RxQueueKind::MultiQueue(_) => {
            queues.set_descriptor_format(false);
            bar.write32(reg::RLPML, (frame_max + FCS_LEN) as u32);
            rx_bits = 0;
        }
    }
    bar.write32(reg::TIPG, TIPG_COPPER);
    bar.write32(reg::TCTL, TCTL_ENABLE | TCTL_PAD | TCTL_COLLISIONS);
    let long = if frame_max > 1514 { RCTL_LONG_PACKET } else { 0 };
    let all = if settings.promiscuous { RCTL_UNICAST_PROMISC } else { 0 };
    let kinds = RCTL_MULTICAST_PROMISC | RCTL_BROADCAST | all;
    bar.write32(reg::RCTL, RCTL_ENABLE | RCTL_STRIP_CRC | kinds | long | rx_bits);
    if let RxQueueKind::MultiQueue(_) = chip.queue
        && let Err(why) = queues.enable_rx(device)
    {
        quiesce(&bar, chip);
        await_reset(&bar, reg::STATUS);
        return Err(why);
    }
    queues.post_rx_buffers();
    let nic = E1000 { chip, bar, queues, missed: 0, drop_counters: Default::default() };
    let interrupt = device.interrupt(chip.interrupt);
    Ok(StartedNic { nic, caps, areas, interrupt })
}

/// Stops all DMA and starts a reset (82574's datasheet, section 4.6.3.2).
fn quiesce<F>(bar: &Bar, chip: &Chip<F>) {
    bar.write32(reg::IMC, !0);
    bar.write32(reg::RCTL, 0);
    bar.write32(reg::TCTL, TCTL_PAD);
    if chip.is_express {
        bar.write32(reg::CTRL, bar.read32(reg::CTRL) | CTRL_MASTER_DISABLE);
        // An unplugged device reads as all ones. A device that does not stop is reset anyway.
        let ended = |s: u32| s & STATUS_MASTER == 0 || s == !0;
        let _ = await_register(bar, |bar| ended(bar.read32(reg::STATUS)));
    }
    bar.write32(reg::CTRL, bar.read32(reg::CTRL) | CTRL_RESET);
}

/// Stops and resets the device, and starts the link.
fn reset<F>(device: &Device, bar: &Bar, chip: &Chip<F>) -> Result<(), VfioError> {
    quiesce(bar, chip);
    // No register access for a microsecond; the rest of the time is the EEPROM load.
    std::thread::sleep(Duration::from_millis(5));
    if !poll_until(Duration::from_secs(1), || bar.read32(reg::CTRL) & CTRL_RESET == 0) {
        return Err(device.device_error("it does not leave reset"));
    }
    bar.write32(reg::IMC, !0);
    bar.read32(reg::ICR);
    match chip.queue {
        RxQueueKind::MultiQueue(model) => {
            igb::bring_up(bar, model).map_err(|trouble| trouble.of(&device.bdf))
        }
        RxQueueKind::Plain | RxQueueKind::Format => {
            let up = CTRL_FULL_DUPLEX | CTRL_AUTO_SPEED | CTRL_LINK_UP;
            let ends = if chip.is_express { CTRL_MASTER_DISABLE } else { 0 };
            bar.write32(reg::CTRL, bar.read32(reg::CTRL) & !ends | up);
            Ok(())
        }
    }
}

/// The link speed in bit/s, 0 without a link.
fn link_bps<F>(bar: &Bar, chip: &Chip<F>) -> u64 {
    match chip.queue {
        RxQueueKind::MultiQueue(model) => igb::link_bps(bar, model),
        RxQueueKind::Plain | RxQueueKind::Format => e1000q::link_bps(bar.read32(reg::STATUS)),
    }
}

fn caps<F>(
    device: &Device,
    bar: &Bar,
    settings: &VfioSettings,
    chip: &Chip<F>,
) -> Result<NicCaps, VfioError> {
    let (low, high) = (bar.read32(reg::RAL0), bar.read32(reg::RAH0));
    let own = MacAddr::from_registers(low, high);
    let own = if high & RAH_VALID != 0 { own } else { MacAddr::default() };
    let mac = device.mac(settings.mac, own)?;
    let [low, high] = mac.registers();
    bar.write32(reg::RAL0, low);
    bar.write32(reg::RAH0, high | RAH_VALID);
    for i in 0..128 {
        bar.write32(reg::MTA + 4 * i, 0);
    }
    let mtu = device.mtu(settings.mtu, MTU_MAX)?;
    // Auto-negotiation takes a few seconds. Without a link the port opens too.
    let until = Instant::now() + Duration::from_secs(4);
    let mut bps = link_bps(bar, chip);
    while bps == 0 && Instant::now() < until {
        std::thread::sleep(Duration::from_millis(10));
        bps = link_bps(bar, chip);
    }
    if bps == 0 {
        tracing::warn!(bdf = device.bdf, "the link is down");
    }
    Ok(NicCaps { mac, mtu, link_bps: bps })
}

/// Counters of dropped frames: no buffer, and CRC errors.
const DROP_COUNTERS: [usize; 2] = [reg::MPC, reg::CRCERRS];

impl<F: Format> Nic for E1000<F> {
    type Rings = Queues<F>;

    #[inline(always)]
    fn rings(&mut self) -> &mut Queues<F> {
        &mut self.queues
    }

    fn set_interrupt(&mut self, wanted: bool) {
        if wanted {
            // Reading clears the pending causes, so that the next one is signalled.
            self.bar.read32(reg::ICR);
            self.bar.write32(reg::IMS, self.chip.cause_rx);
        } else {
            self.bar.write32(reg::IMC, !0);
        }
    }

    fn dropped(&self) -> u64 {
        self.queues.dropped() + self.missed
    }

    fn health(&mut self) -> Result<(), String> {
        if self.bar.read32(reg::STATUS) == !0 {
            return Err("the device no longer answers; was it unplugged?".into());
        }
        if self.bar.read32(reg::RCTL) & RCTL_ENABLE == 0 {
            return Err("the device was reset or stopped under us; open the port again".into());
        }
        for (register, counter) in DROP_COUNTERS.into_iter().zip(&mut self.drop_counters) {
            self.missed += u64::from(counter.delta(|| self.bar.read32(register)));
        }
        Ok(())
    }

    fn has_link(&self) -> Option<bool> {
        Some(link_bps(&self.bar, self.chip) != 0)
    }

    fn stop(&mut self) {
        quiesce(&self.bar, self.chip);
        await_reset(&self.bar, reg::STATUS);
    }
}
