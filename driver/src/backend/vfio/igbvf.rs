//! A virtual function of Intel's 82576 (datasheet revision 2.61, sections 7.10.2 and 8.26; QEMU's
//! `igb`, from 8.0 on) or I350, whose physical function the kernel drives. Has one queue pair. The
//! registers of both models are the same.
//!
//! Descriptors and ring registers are those of the physical function (`e1000q`). The MAC address,
//! the frame length and the receive filter are set by the driver of the physical function, upon
//! requests through the [`mailbox`](super::mailbox). The card's embedded switch forwards frames
//! between functions, and to the wire. A reset of the physical function resets all virtual
//! functions.

use std::time::Duration;

use vfio_bindings::bindings::vfio;

use super::device::{Bar, Device};
use super::e1000q::{
    FCS_LEN, MTU_MAX, Queues, STATUS_LINK_UP, StatsCounter, TXDCTL_MULTI_QUEUE, await_reset,
    disable_queues, link_bps,
};
use super::error::VfioError;
use super::mailbox::{Mailbox, MailboxError};
use super::nic::{Nic, NicCaps};
use super::ring::e1000::Advanced;
use super::survey::{self, PhysicalFunction};
use super::{StartedNic, VfioSettings};
use crate::frame::ETH_HDR_LEN;
use crate::port::MacAddr;

/// Registers, by their offset in BAR 0.
mod reg {
    pub(super) const CTRL: usize = 0x0000;
    pub(super) const STATUS: usize = 0x0008;
    pub(super) const EIMS: usize = 0x1524;
    pub(super) const EIMC: usize = 0x1528;
    pub(super) const EIAC: usize = 0x152c;
    pub(super) const EITR0: usize = 0x1680;
    pub(super) const IVAR0: usize = 0x1700;
    pub(super) const RQDPC: usize = 0x2830;
    pub(super) const LEN: usize = 0x4000;
}

const CTRL_RESET: u32 = 1 << 26;

/// Bits of EIMS, EIMC and EIAC: the first of three MSI-X vectors, and all of them.
const RX_VECTOR: u32 = 1 << 0;
const ALL_VECTORS: u32 = 7;
/// IVAR0: maps the receive queue to vector 0.
const IVAR_RX_VALID: u32 = 1 << 7;

/// A started virtual function.
pub(super) struct IgbVf {
    bar: Bar,
    mailbox: Mailbox<Bar>,
    queues: Queues<Advanced>,
    /// Frames dropped because no buffer was posted.
    missed: u64,
    /// RQDPC.
    missed_counter: StatsCounter,
}

/// Starts the function.
///
/// # Errors
/// [`VfioError`]; the function has been reset.
pub(super) fn start(
    device: &Device,
    settings: &VfioSettings,
) -> Result<StartedNic<IgbVf>, VfioError> {
    let bar = device.bar(0)?;
    if bar.len() < reg::LEN {
        return Err(device.device_error("its registers are too few"));
    }
    let mtu = device.mtu(settings.mtu, MTU_MAX)?;
    reset(device, &bar)?;
    let requests = PfRequests { device, mailbox: Mailbox::new(bar.clone()) };
    let mac = requests.negotiate_mac(settings.mac)?;
    requests.negotiate_rx_filter(mtu, settings.promiscuous)?;
    let link_bps = link_bps(bar.read32(reg::STATUS));
    if link_bps == 0 {
        tracing::warn!(bdf = device.bdf, "the link is down");
    }
    let (queues, areas) = Queues::new(device, &bar, settings, mtu)?;
    device.set_bus_master(true)?;
    queues.program(TXDCTL_MULTI_QUEUE);
    // A slow function must not stall the other functions of the card.
    queues.set_descriptor_format(true);
    if let Err(why) = queues.enable_rx(device) {
        quiesce(&bar);
        await_reset(&bar, reg::STATUS);
        return Err(why);
    }
    queues.post_rx_buffers();
    let interrupt = device.interrupt(vfio::VFIO_PCI_MSIX_IRQ_INDEX);
    // No throttling (EITR), and the mask is cleared automatically (EIAC).
    for (at, value) in [(reg::EITR0, 0), (reg::EIAC, RX_VECTOR), (reg::IVAR0, IVAR_RX_VALID)] {
        bar.write32(at, value);
    }
    let caps = NicCaps { mac, mtu, link_bps };
    let nic = IgbVf {
        bar,
        mailbox: requests.mailbox,
        queues,
        missed: 0,
        missed_counter: StatsCounter::default(),
    };
    Ok(StartedNic { nic, caps, areas, interrupt })
}

/// Stops all DMA of the function and resets it.
fn quiesce(bar: &Bar) {
    bar.write32(reg::EIMC, ALL_VECTORS);
    // A queue that does not stop is reset anyway.
    disable_queues(bar);
    bar.write32(reg::CTRL, CTRL_RESET);
}

fn reset(device: &Device, bar: &Bar) -> Result<(), VfioError> {
    if bar.read32(reg::STATUS) == !0 {
        return Err(device.device_error("it does not answer"));
    }
    quiesce(bar);
    // No register access for a microsecond; the rest of the time is for the driver of the physical
    // function, which is notified of the reset.
    std::thread::sleep(Duration::from_millis(5));
    Ok(())
}

/// Requests to the driver of the physical function.
struct PfRequests<'a> {
    device: &'a Device,
    mailbox: Mailbox<Bar>,
}

impl PfRequests<'_> {
    /// Reports the reset and negotiates the MAC address: the `wanted` one, else the one that the
    /// physical function assigned, else a random one.
    fn negotiate_mac(&self, wanted: Option<MacAddr>) -> Result<MacAddr, VfioError> {
        let given = self.mailbox.send_reset().map_err(|error| self.vfio_error(error))?;
        let given = given.map(MacAddr).filter(|given| *given != MacAddr::default());
        if let Some(group) = given.filter(|given| given.is_group()) {
            let why = format!("it was given the address {group}, which is a group's");
            return Err(self.device.device_error(why));
        }
        let mac = wanted.or(given).unwrap_or_else(MacAddr::random);
        if Some(mac) != given {
            let is_granted = self.mailbox.set_mac(mac.0);
            if !is_granted.map_err(|error| self.vfio_error(error))? {
                let physical = self.physical();
                let bdf = self.device.bdf.clone();
                return Err(VfioError::MacRefused { bdf, mac, physical });
            }
        }
        Ok(mac)
    }

    /// Requests frames of the MTU's length, and multicast or promiscuous reception.
    fn negotiate_rx_filter(&self, mtu: usize, is_promiscuous: bool) -> Result<(), VfioError> {
        let len = (ETH_HDR_LEN + mtu + FCS_LEN) as u32;
        let is_granted =
            self.mailbox.set_max_frame_len(len).map_err(|error| self.vfio_error(error))?;
        if !is_granted {
            let why = format!("its physical function lets it have no frames of {len} bytes");
            return Err(self.device.device_error(why));
        }
        let all =
            self.mailbox.set_promiscuous(is_promiscuous).map_err(|error| self.vfio_error(error))?;
        match (all, is_promiscuous) {
            (true, _) => Ok(()),
            (false, true) => Err(VfioError::PromiscuousRefused {
                bdf: self.device.bdf.clone(),
                physical: self.physical(),
            }),
            (false, false) => {
                let bdf = &self.device.bdf;
                tracing::debug!(bdf, "frames to groups other than broadcast do not reach it");
                Ok(())
            }
        }
    }

    fn physical(&self) -> PhysicalFunction {
        survey::physical_of(&self.device.bdf).unwrap_or_default()
    }

    fn vfio_error(&self, error: MailboxError) -> VfioError {
        match error {
            MailboxError::Timeout => VfioError::PfUnresponsive {
                bdf: self.device.bdf.clone(),
                physical: self.physical(),
            },
            MailboxError::UnexpectedReply(word) => {
                self.device.device_error(format!("its physical function answers {word:#010x}"))
            }
        }
    }
}

impl Nic for IgbVf {
    type Rings = Queues<Advanced>;

    #[inline(always)]
    fn rings(&mut self) -> &mut Queues<Advanced> {
        &mut self.queues
    }

    fn set_interrupt(&mut self, wanted: bool) {
        self.bar.write32(if wanted { reg::EIMS } else { reg::EIMC }, RX_VECTOR);
    }

    fn dropped(&self) -> u64 {
        self.queues.dropped() + self.missed
    }

    fn health(&mut self) -> Result<(), String> {
        if self.bar.read32(reg::STATUS) == !0 {
            return Err("the device no longer answers; was it unplugged?".into());
        }
        if self.mailbox.was_pf_reset() {
            let why = "its physical function was reset (its interface was set down or changed, or \
                       its driver reloaded); open the port again once it is up";
            return Err(why.into());
        }
        if !self.queues.is_rx_enabled() {
            return Err("the device was reset or stopped under us; open the port again".into());
        }
        self.missed += u64::from(self.missed_counter.delta(|| self.bar.read32(reg::RQDPC)));
        Ok(())
    }

    fn has_link(&self) -> Option<bool> {
        Some(self.bar.read32(reg::STATUS) & STATUS_LINK_UP != 0)
    }

    fn stop(&mut self) {
        quiesce(&self.bar);
        await_reset(&self.bar, reg::STATUS);
    }
}
