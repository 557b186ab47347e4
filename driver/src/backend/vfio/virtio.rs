//! virtio-net as a modern PCI device (virtio 1.2, sections 4.1 and 5.1).
//!
//! One pair of split queues, no offloads, one buffer per frame. The device has to offer
//! VIRTIO_F_VERSION_1 and VIRTIO_F_ACCESS_PLATFORM: without the second it bypasses the IOMMU and
//! would take IOVAs for physical addresses.

use std::ptr::NonNull;
use std::time::{Duration, Instant};

use vfio_bindings::bindings::vfio;

use super::device::{Bar, Device, DmaArea, poll_until};
use super::error::VfioError;
use super::netq::{Doorbell, HDR_LEN, NetQueues, QueueMemory};
use super::nic::{Nic, NicCaps};
use super::ring::virtq::{Layout, Virtq};
use super::sys::Access;
use super::{StartedNic, VfioSettings};
use crate::frame::ETH_HDR_LEN;
use crate::port::MacAddr;

/// Offsets in `struct virtio_pci_common_cfg`.
mod common {
    pub(super) const DEVICE_FEATURE_SELECT: usize = 0;
    pub(super) const DEVICE_FEATURE: usize = 4;
    pub(super) const DRIVER_FEATURE_SELECT: usize = 8;
    pub(super) const DRIVER_FEATURE: usize = 12;
    pub(super) const CONFIG_MSIX: usize = 16;
    pub(super) const STATUS: usize = 20;
    pub(super) const GENERATION: usize = 21;
    pub(super) const QUEUE_SELECT: usize = 22;
    pub(super) const QUEUE_SIZE: usize = 24;
    pub(super) const QUEUE_MSIX: usize = 26;
    pub(super) const QUEUE_ENABLE: usize = 28;
    pub(super) const QUEUE_NOTIFY_OFF: usize = 30;
    pub(super) const QUEUE_DESC: usize = 32;
    pub(super) const QUEUE_DRIVER: usize = 40;
    pub(super) const QUEUE_DEVICE: usize = 48;
    pub(super) const LEN: usize = 56;
}

/// Bits of the device's status.
mod status {
    pub(super) const ACKNOWLEDGE: u8 = 1;
    pub(super) const DRIVER: u8 = 2;
    pub(super) const DRIVER_OK: u8 = 4;
    pub(super) const FEATURES_OK: u8 = 8;
    pub(super) const NEEDS_RESET: u8 = 64;
}

/// Feature bits.
mod feature {
    pub(super) const MTU: u64 = 1 << 3;
    pub(super) const MAC: u64 = 1 << 5;
    pub(super) const STATUS: u64 = 1 << 16;
    pub(super) const CTRL_VQ: u64 = 1 << 17;
    pub(super) const CTRL_RX: u64 = 1 << 18;
    pub(super) const CTRL_MAC_ADDR: u64 = 1 << 23;
    pub(super) const VERSION_1: u64 = 1 << 32;
    pub(super) const ACCESS_PLATFORM: u64 = 1 << 33;
    pub(super) const ORDER_PLATFORM: u64 = 1 << 36;
    /// Features that are accepted if offered.
    pub(super) const WANTED: u64 = MTU
        | MAC
        | STATUS
        | CTRL_VQ
        | CTRL_RX
        | CTRL_MAC_ADDR
        | VERSION_1
        | ACCESS_PLATFORM
        | ORDER_PLATFORM;
}

/// Offsets in `struct virtio_net_config`.
const CONFIG_STATUS: usize = 6;
const STATUS_LINK_UP: u16 = 1;
const CONFIG_MTU: usize = 10;

/// Commands of the control queue: class and number.
const RX_PROMISC: [u8; 2] = [0, 0];
const RX_ALLMULTI: [u8; 2] = [0, 1];
const MAC_ADDR_SET: [u8; 2] = [1, 1];

/// Largest MTU that is used, even if the device offers more.
const MTU_MAX: usize = 9216;

/// No MSI-X vector.
const NO_VECTOR: u16 = 0xffff;

/// Default number of descriptors.
const COUNT: u16 = 256;

/// Limit on each step of the device's initialisation.
const TIMEOUT: Duration = Duration::from_secs(1);

/// A window of the device's registers, located by a PCI capability.
struct RegisterWindow {
    bar: Bar,
    at: usize,
    len: usize,
}

impl RegisterWindow {
    /// Offset in the BAR of `at` in this window.
    fn at(&self, at: usize, len: usize) -> usize {
        assert!(at + len <= self.len, "outside the window");
        self.at + at
    }

    fn read8(&self, at: usize) -> u8 {
        self.bar.read8(self.at(at, 1))
    }

    fn read16(&self, at: usize) -> u16 {
        self.bar.read16(self.at(at, 2))
    }

    fn read32(&self, at: usize) -> u32 {
        self.bar.read32(self.at(at, 4))
    }

    fn write8(&self, at: usize, value: u8) {
        self.bar.write8(self.at(at, 1), value);
    }

    fn write16(&self, at: usize, value: u16) {
        self.bar.write16(self.at(at, 2), value);
    }

    fn write32(&self, at: usize, value: u32) {
        self.bar.write32(self.at(at, 4), value);
    }

    fn write64(&self, at: usize, value: u64) {
        self.bar.write64(self.at(at, 8), value);
    }
}

/// A started virtio NIC.
pub(super) struct Virtio {
    queues: NetQueues,
    common: RegisterWindow,
    /// The device configuration, if it has the link status.
    link: Option<RegisterWindow>,
    /// Keeps the doorbells mapped.
    _notify: Bar,
}

impl Virtio {
    fn status(&self) -> u8 {
        self.common.read8(common::STATUS)
    }
}

/// Starts the device.
///
/// # Errors
/// [`VfioError`]; the device has been reset.
pub(super) fn start(
    device: &Device,
    settings: &VfioSettings,
) -> Result<StartedNic<Virtio>, VfioError> {
    let windows = RegisterWindows::find(device)?;
    let setup = Setup { device, windows, features: 0 };
    let started = setup.run(settings);
    if started.is_err() {
        // No DMA any more: the memory is freed.
        let _ = device.set_bus_master(false);
    }
    started
}

/// The parts of the device's registers.
struct RegisterWindows {
    common: RegisterWindow,
    notify: RegisterWindow,
    notify_step: usize,
    config: RegisterWindow,
}

/// A capability that locates a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Capability {
    kind: u8,
    bar: u8,
    offset: u32,
    len: u32,
    /// Bytes from one doorbell to the next.
    notify_step: u32,
}

/// Virtio's capabilities in a configuration space.
fn capabilities(space: &[u8; 256]) -> Vec<Capability> {
    let word = |at: usize| {
        let bytes = space.get(at..).and_then(|rest| rest.first_chunk());
        bytes.map_or(0, |bytes| u32::from_le_bytes(*bytes))
    };
    let mut found = Vec::new();
    // Bit 4 of the status register: there is a capability list.
    let mut at = if space[6] & 0x10 != 0 { usize::from(space[0x34] & 0xfc) } else { 0 };
    // Bounds a cyclic list: 256 bytes have room for no more.
    for _ in 0..48 {
        if !(0x40..=0xf0).contains(&at) {
            break;
        }
        let (id, next, kind, bar) = (space[at], space[at + 1], space[at + 3], space[at + 4]);
        if id == 0x09 {
            let (offset, len) = (word(at + 8), word(at + 12));
            found.push(Capability { kind, bar, offset, len, notify_step: word(at + 16) });
        }
        at = usize::from(next & 0xfc);
    }
    found
}

impl RegisterWindows {
    fn find(device: &Device) -> Result<Self, VfioError> {
        let mut space = [0; 256];
        device.config(0, &mut space)?;
        let capabilities = capabilities(&space);
        let mut bars: Vec<(u8, Bar)> = Vec::new();
        let mut window = |kind: u8, len_min: usize| {
            let found = capabilities.iter().find(|c| c.kind == kind && c.bar <= 5);
            let found =
                found.ok_or_else(|| device.device_error("it is no modern virtio device"))?;
            let bar = match bars.iter().find(|(index, _)| *index == found.bar) {
                Some((_, bar)) => bar.clone(),
                None => {
                    let bar = device.bar(found.bar)?;
                    bars.push((found.bar, bar.clone()));
                    bar
                }
            };
            let (at, len) = (found.offset as usize, found.len as usize);
            if len < len_min || at % 4 != 0 || at > bar.len() || len > bar.len() - at {
                return Err(device.device_error("its registers lie outside its BAR"));
            }
            Ok((RegisterWindow { bar, at, len }, found.notify_step as usize))
        };
        let (common, _) = window(1, common::LEN)?;
        let (notify, notify_step) = window(2, 2)?;
        let (config, _) = window(4, CONFIG_MTU + 2)?;
        Ok(Self { common, notify, notify_step, config })
    }
}

/// The steps of virtio 1.2, section 3.1.1.
struct Setup<'a> {
    device: &'a Device,
    windows: RegisterWindows,
    features: u64,
}

impl Setup<'_> {
    fn run(mut self, settings: &VfioSettings) -> Result<StartedNic<Virtio>, VfioError> {
        self.device.set_bus_master(true)?;
        self.reset()?;
        self.add_status(status::ACKNOWLEDGE);
        self.add_status(status::DRIVER);
        self.negotiate()?;
        let caps = self.caps(settings)?;
        let stride = (HDR_LEN + ETH_HDR_LEN + caps.mtu).next_multiple_of(64);
        let rx_count = self.queue_count(0, settings.rx_count)?;
        let tx_count = self.queue_count(1, settings.tx_count)?;
        let queue_len = |count: u16| NetQueues::queue_len(count).next_multiple_of(64);
        let (rx_len, tx_len) = (queue_len(rx_count), queue_len(tx_count));
        let container = self.device.container();
        let control_at = rx_len + tx_len;
        let buffers_at = control_at + CONTROL_LEN;
        let len = buffers_at + usize::from(rx_count) * stride;
        let shared = container.alloc_dma(len, Access::ReadWrite, settings.hugepages)?;
        // The device only reads transmit buffers.
        let len = usize::from(tx_count) * stride;
        let sent = container.alloc_dma(len, Access::Read, settings.hugepages)?;
        let mut interrupt = self.device.interrupt(vfio::VFIO_PCI_MSIX_IRQ_INDEX);
        self.windows.common.write16(common::CONFIG_MSIX, NO_VECTOR);
        let vector = if interrupt.is_some() { 0 } else { NO_VECTOR };
        let rx_bell = self.enable_queue(0, &shared, 0, rx_count, vector)?;
        if self.windows.common.read16(common::QUEUE_MSIX) != vector {
            tracing::warn!(bdf = self.device.bdf, "no interrupt vector left; polling instead");
            interrupt = None;
        }
        let tx_bell = self.enable_queue(1, &shared, rx_len, tx_count, NO_VECTOR)?;
        let rx = QueueMemory {
            queue: area_ptr(&shared, 0),
            count: rx_count,
            buffers: area_ptr(&shared, buffers_at),
            buffers_iova: shared.iova() + buffers_at as u64,
            stride,
            doorbell: rx_bell,
        };
        let tx = QueueMemory {
            queue: area_ptr(&shared, rx_len),
            count: tx_count,
            buffers: sent.base(),
            buffers_iova: sent.iova(),
            stride,
            doorbell: tx_bell,
        };
        // SAFETY: the queues and buffers are disjoint parts of two areas, zeroed and of the lengths
        // that were just computed; they and the registers go when the port has stopped the NIC.
        let queues = unsafe { NetQueues::new(&rx, &tx) };
        let control = self.control(&shared, control_at)?;
        let begun = self.set_driver_ok(&queues, control, (&shared, control_at), settings);
        if begun.is_err() {
            // No DMA any more: the memory is freed.
            let _ = self.reset();
            let _ = self.device.set_bus_master(false);
        }
        begun?;
        let RegisterWindows { common, notify, config, .. } = self.windows;
        let link = (self.features & feature::STATUS != 0).then_some(config);
        let nic = Virtio { queues, common, link, _notify: notify.bar };
        Ok(StartedNic { nic, caps, areas: vec![shared, sent], interrupt })
    }

    fn read_status(&self) -> u8 {
        self.windows.common.read8(common::STATUS)
    }

    /// Sets DRIVER_OK and the receive filter. The device may use its memory from then on, even
    /// after an error.
    fn set_driver_ok(
        &self,
        queues: &NetQueues,
        control: Option<Control>,
        (area, at): (&DmaArea, usize),
        settings: &VfioSettings,
    ) -> Result<(), VfioError> {
        self.add_status(status::DRIVER_OK);
        if self.read_status() & status::DRIVER_OK == 0 {
            return Err(self.device.device_error("it does not start"));
        }
        queues.start();
        match control {
            Some(mut control) => self.set_filter(&mut control, area, at, settings),
            None => Ok(()),
        }
    }

    fn add_status(&self, bit: u8) {
        self.windows.common.write8(common::STATUS, self.read_status() | bit);
    }

    fn reset(&self) -> Result<(), VfioError> {
        self.windows.common.write8(common::STATUS, 0);
        match poll_until(TIMEOUT, || self.read_status() == 0) {
            true => Ok(()),
            false => Err(self.device.device_error("it does not reset")),
        }
    }

    fn negotiate(&mut self) -> Result<(), VfioError> {
        let mut offered = 0;
        for half in 0..2 {
            self.windows.common.write32(common::DEVICE_FEATURE_SELECT, half);
            let bits = self.windows.common.read32(common::DEVICE_FEATURE);
            offered |= u64::from(bits) << (32 * half);
        }
        if offered & feature::ACCESS_PLATFORM == 0 {
            return Err(VfioError::NoAccessPlatform { bdf: self.device.bdf.clone() });
        }
        if offered & feature::VERSION_1 == 0 {
            return Err(self.device.device_error("it is no modern virtio device"));
        }
        self.features = offered & feature::WANTED;
        for half in 0..2 {
            self.windows.common.write32(common::DRIVER_FEATURE_SELECT, half);
            self.windows
                .common
                .write32(common::DRIVER_FEATURE, (self.features >> (32 * half)) as u32);
        }
        self.add_status(status::FEATURES_OK);
        if self.read_status() & status::FEATURES_OK == 0 {
            return Err(self.device.device_error("it takes back the features that it offered"));
        }
        Ok(())
    }

    /// Reads the device configuration, again if its generation changed meanwhile.
    fn caps(&self, settings: &VfioSettings) -> Result<NicCaps, VfioError> {
        let config = &self.windows.config;
        let (mut mac, mut mtu): (_, usize);
        let until = Instant::now() + TIMEOUT;
        loop {
            let generation = self.windows.common.read8(common::GENERATION);
            let byte = |i| config.read8(i);
            mac = MacAddr([0, 1, 2, 3, 4, 5].map(byte));
            mtu = config.read16(CONFIG_MTU).into();
            if self.windows.common.read8(common::GENERATION) == generation {
                break;
            }
            if Instant::now() > until {
                return Err(self.device.device_error("its configuration does not settle"));
            }
        }
        if self.features & feature::STATUS != 0
            && config.read16(CONFIG_STATUS) & STATUS_LINK_UP == 0
        {
            tracing::warn!(bdf = self.device.bdf, "the link is down");
        }
        let has = |bit| self.features & bit != 0;
        let own = if has(feature::MAC) { mac } else { MacAddr::default() };
        let mac = self.device.mac(settings.mac, own)?;
        let said = Some(mtu).filter(|_| has(feature::MTU));
        let max = said.map_or(MTU_MAX, |said| said.min(MTU_MAX));
        let mtu = self.device.mtu(settings.mtu.or(said.map(|_| max)), max)?;
        Ok(NicCaps { mac, mtu, link_bps: 0 })
    }

    /// Number of descriptors of queue `index`.
    fn queue_count(&self, index: u16, requested: Option<u16>) -> Result<u16, VfioError> {
        self.windows.common.write16(common::QUEUE_SELECT, index);
        let max = self.windows.common.read16(common::QUEUE_SIZE);
        if max == 0 || self.windows.common.read16(common::QUEUE_ENABLE) != 0 {
            return Err(self.device.device_error(format!("it has no queue {index}")));
        }
        let count = requested.unwrap_or(COUNT).min(max).min(1 << 15);
        // Split queues require a power of two.
        Ok(1 << count.max(1).ilog2())
    }

    /// Programs address and MSI-X vector of queue `index`, enables it, and returns its doorbell.
    fn enable_queue(
        &self,
        index: u16,
        area: &DmaArea,
        at: usize,
        count: u16,
        vector: u16,
    ) -> Result<Doorbell, VfioError> {
        let layout = Layout::of(count);
        let iova = area.iova() + at as u64;
        self.windows.common.write16(common::QUEUE_SELECT, index);
        self.windows.common.write16(common::QUEUE_SIZE, count);
        self.windows.common.write16(common::QUEUE_MSIX, vector);
        self.windows.common.write64(common::QUEUE_DESC, iova + layout.desc as u64);
        self.windows.common.write64(common::QUEUE_DRIVER, iova + layout.avail as u64);
        self.windows.common.write64(common::QUEUE_DEVICE, iova + layout.used as u64);
        let notify = &self.windows.notify;
        let at = usize::from(self.windows.common.read16(common::QUEUE_NOTIFY_OFF))
            * self.windows.notify_step;
        if at + 2 > notify.len || !at.is_multiple_of(2) {
            return Err(self.device.device_error("a doorbell lies outside its BAR"));
        }
        self.windows.common.write16(common::QUEUE_ENABLE, 1);
        Ok(Doorbell { register: notify.bar.register(notify.at(at, 2)), queue: index })
    }

    /// The control queue, if the device has one.
    fn control(&self, area: &DmaArea, at: usize) -> Result<Option<Control>, VfioError> {
        if self.features & feature::CTRL_VQ == 0 {
            return Ok(None);
        }
        // Without VIRTIO_NET_F_MQ it follows the first pair.
        let index = 2;
        let count = self.queue_count(index, Some(CONTROL_COUNT))?;
        if count < 2 {
            return Err(self.device.device_error("its control queue is too short"));
        }
        let bell = self.enable_queue(index, area, at, count, NO_VECTOR)?;
        // SAFETY: `CONTROL_LEN` zeroed bytes at `at` are set aside for this queue and its command.
        let queue = unsafe { Virtq::new(area_ptr(area, at), count) };
        Ok(Some(Control { queue, bell }))
    }

    /// Sets the receive filter: own address and multicast, promiscuous if requested. The port
    /// filters as well: a device without these commands delivers everything.
    fn set_filter(
        &self,
        control: &mut Control,
        area: &DmaArea,
        at: usize,
        settings: &VfioSettings,
    ) -> Result<(), VfioError> {
        if let Some(mac) = settings.mac {
            if self.features & feature::CTRL_MAC_ADDR == 0 {
                return Err(self
                    .device
                    .option_error("its address cannot be changed; leave out mac="));
            }
            control.command(self.device, area, at, MAC_ADDR_SET, &mac.0)?;
        }
        if self.features & feature::CTRL_RX != 0 {
            control.command(self.device, area, at, RX_ALLMULTI, &[1])?;
            control.command(self.device, area, at, RX_PROMISC, &[settings.promiscuous.into()])?;
        }
        Ok(())
    }
}

/// Pointer to offset `at` of an area.
fn area_ptr(area: &DmaArea, at: usize) -> NonNull<u8> {
    assert!(at < area.len());
    // SAFETY: inside the area.
    unsafe { area.base().add(at) }
}

/// Descriptors of the control queue, and bytes of the queue and its command buffer.
const CONTROL_COUNT: u16 = 16;
const CONTROL_LEN: usize = Layout::of(CONTROL_COUNT).len + 64;

/// The control queue, which carries one command at a time.
struct Control {
    queue: Virtq,
    bell: Doorbell,
}

impl Control {
    /// Sends a command and waits for its answer.
    fn command(
        &mut self,
        device: &Device,
        area: &DmaArea,
        at: usize,
        command: [u8; 2],
        data: &[u8],
    ) -> Result<(), VfioError> {
        let at = at + Layout::of(CONTROL_COUNT).len;
        let bytes = [&command[..], data].concat();
        let (answer_at, unanswered) = (at + 32, 0xff_u8);
        assert!(bytes.len() <= 32 && at + 64 <= area.len());
        let base = area_ptr(area, at).as_ptr();
        // SAFETY: 64 bytes from `base` belong to commands; the device has none of them now.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), base, bytes.len());
            base.add(32).write_volatile(unanswered);
        }
        self.queue.describe(0, area.iova() + at as u64, bytes.len() as u32, false);
        self.queue.describe(1, area.iova() + answer_at as u64, 1, true);
        self.queue.chain(0, 1);
        // One command at a time, so descriptor 0 is always free.
        assert!(self.queue.next() == Some(0) && self.queue.post());
        self.queue.publish();
        self.bell.kick();
        let until = Instant::now() + TIMEOUT;
        loop {
            match self.queue.take() {
                Ok(Some(_)) => break,
                Ok(None) if Instant::now() < until => std::thread::yield_now(),
                Ok(None) => {
                    return Err(device.device_error("it does not answer on its control queue"));
                }
                Err(why) => return Err(device.device_error(why.to_string())),
            }
        }
        // SAFETY: as above.
        let answer = unsafe { base.add(32).read_volatile() };
        if answer == 0 {
            Ok(())
        } else {
            Err(device.device_error("it refuses to filter addresses"))
        }
    }
}

impl Nic for Virtio {
    type Rings = NetQueues;

    #[inline(always)]
    fn rings(&mut self) -> &mut NetQueues {
        &mut self.queues
    }

    fn set_interrupt(&mut self, wanted: bool) {
        self.queues.set_interrupt(wanted);
    }

    fn dropped(&self) -> u64 {
        self.queues.dropped()
    }

    fn health(&mut self) -> Result<(), String> {
        let wanted = status::DRIVER_OK | status::FEATURES_OK;
        match self.status() {
            0xff => Err("the device no longer answers; was it unplugged?".into()),
            s if s & status::NEEDS_RESET != 0 => Err("the device asks for a reset".into()),
            s if s & wanted != wanted => {
                Err("the device was reset or stopped under us; open the port again".into())
            }
            _ => Ok(()),
        }
    }

    fn has_link(&self) -> Option<bool> {
        // A 16-bit read is atomic.
        let config = self.link.as_ref()?;
        Some(config.read16(CONFIG_STATUS) & STATUS_LINK_UP != 0)
    }

    fn stop(&mut self) {
        self.common.write8(common::STATUS, 0);
        poll_until(Duration::from_millis(100), || matches!(self.status(), 0 | 0xff));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Configuration space with QEMU's capability list: MSI-X, then the windows of virtio.
    fn space() -> [u8; 256] {
        let mut space = [0; 256];
        space[6] = 0x10;
        space[0x34] = 0x98;
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        put(0x98, &[0x11, 0x84, 0, 0]);
        let word = |n: u32| n.to_le_bytes();
        put(
            0x84,
            &[&[9, 0x70, 20, 2, 4, 0, 0, 0][..], &word(0x3000), &word(0x1000), &word(4)].concat(),
        );
        put(0x70, &[&[9, 0x40, 16, 4, 4, 0, 0, 0][..], &word(0x2000), &word(0x1000)].concat());
        put(0x40, &[&[9, 0, 16, 1, 4, 0, 0, 0][..], &word(0), &word(0x1000)].concat());
        space
    }

    #[test]
    fn windows_are_found_through_the_list() {
        let found = capabilities(&space());
        let kinds: Vec<(u8, u8, u32)> = found.iter().map(|c| (c.kind, c.bar, c.offset)).collect();
        assert_eq!(kinds, [(2, 4, 0x3000), (4, 4, 0x2000), (1, 4, 0)]);
        assert_eq!(found[0].notify_step, 4);
    }

    #[test]
    fn a_list_that_leads_back_or_out_ends() {
        let mut looped = space();
        looped[0x41] = 0x84;
        assert!((3..=48).contains(&capabilities(&looped).len()));
        for at in 0..256 {
            for value in [0, 0x3c, 0xf0, 0xfc, 0xff] {
                let mut bad = space();
                bad[at] = value;
                capabilities(&bad);
            }
        }
        let mut none = space();
        none[6] = 0;
        assert!(capabilities(&none).is_empty());
    }
}
