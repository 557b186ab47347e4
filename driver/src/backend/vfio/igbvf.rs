//! A virtual function of Intel's 82576 (datasheet revision 2.61, sections 7.10.2 and 8.26; QEMU's
//! `igb`, from 8.0 on) or I350: one queue of a card whose physical function the kernel drives. The
//! registers of both are the same.
//!
//! Its descriptors and ring registers are those of the whole card (`e1000q`). Its address, the
//! length of its frames and what else of the filters there is belong to the driver of the physical
//! function, which is asked through the [`mailbox`](super::mailbox). The card's switch passes
//! frames between functions, and to the wire. When the physical function is reset, so are all
//! virtual ones.

use std::time::Duration;

use vfio_bindings::bindings::vfio;

use super::device::{Bar, Device};
use super::e1000q::{
    Counter, FCS_LEN, MTU_MAX, Queues, STATUS_LINK_UP, TXDCTL_ONE_OF_SEVERAL, await_reset,
    link_bps, switch_off,
};
use super::error::VfioError;
use super::mailbox::{Mailbox, Trouble};
use super::nic::{Facts, Nic};
use super::ring::e1000::Advanced;
use super::survey::{self, Physical};
use super::{Started, VfioSettings};
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

/// The function's first message of three, in EIMS, EIMC and EIAC; and all of them.
const MESSAGE: u32 = 1 << 0;
const MESSAGES: u32 = 7;
/// IVAR0: the receive queue signals by the first message.
const IVAR_RX: u32 = 1 << 7;

/// A started virtual function.
pub(super) struct IgbVf {
    bar: Bar,
    mailbox: Mailbox<Bar>,
    queues: Queues<Advanced>,
    /// Frames for which there was no buffer.
    lost: u64,
    /// RQDPC.
    losses: Counter,
}

/// Starts the function.
///
/// # Errors
/// [`VfioError`]; the function has been reset.
pub(super) fn start(device: &Device, settings: &VfioSettings) -> Result<Started<IgbVf>, VfioError> {
    let bar = device.bar(0)?;
    if bar.len() < reg::LEN {
        return Err(device.fault("its registers are too few"));
    }
    let mtu = device.mtu(settings.mtu, MTU_MAX)?;
    reset(device, &bar)?;
    let asked = Asked { device, mailbox: Mailbox::new(bar.clone()) };
    let mac = asked.mac(settings.mac)?;
    asked.frames(mtu, settings.promiscuous)?;
    let link_bps = link_bps(bar.read32(reg::STATUS));
    if link_bps == 0 {
        tracing::warn!(bdf = device.bdf, "the link is down");
    }
    let (queues, areas) = Queues::new(device, &bar, settings, mtu)?;
    device.set_bus_master(true)?;
    queues.program(TXDCTL_ONE_OF_SEVERAL);
    // A function that does not keep up must not hold up the card's others.
    queues.choose_format(true);
    if let Err(why) = queues.switch_on(device) {
        silence(&bar);
        await_reset(&bar, reg::STATUS);
        return Err(why);
    }
    queues.offer();
    let interrupt = device.interrupt(vfio::VFIO_PCI_MSIX_IRQ_INDEX);
    // Without a pause between two, and taken back by itself when it is signalled.
    for (at, value) in [(reg::EITR0, 0), (reg::EIAC, MESSAGE), (reg::IVAR0, IVAR_RX)] {
        bar.write32(at, value);
    }
    let facts = Facts { mac, mtu, link_bps };
    let nic = IgbVf { bar, mailbox: asked.mailbox, queues, lost: 0, losses: Counter::default() };
    Ok(Started { nic, facts, areas, interrupt })
}

/// Ends every transfer of the function.
fn silence(bar: &Bar) {
    bar.write32(reg::EIMC, MESSAGES);
    // What is stuck is reset all the same.
    switch_off(bar);
    bar.write32(reg::CTRL, CTRL_RESET);
}

fn reset(device: &Device, bar: &Bar) -> Result<(), VfioError> {
    if bar.read32(reg::STATUS) == !0 {
        return Err(device.fault("it does not answer"));
    }
    silence(bar);
    // No register may be touched for a microsecond; the rest is for the physical function, which
    // hears of it.
    std::thread::sleep(Duration::from_millis(5));
    Ok(())
}

/// What the driver of the physical function is asked.
struct Asked<'a> {
    device: &'a Device,
    mailbox: Mailbox<Bar>,
}

impl Asked<'_> {
    /// Says that the function was reset, and agrees on its address: the `wanted` one, or what it is
    /// given, or one of our own.
    fn mac(&self, wanted: Option<MacAddr>) -> Result<MacAddr, VfioError> {
        let given = self.mailbox.say_reset().map_err(|trouble| self.trouble(trouble))?;
        let given = given.map(MacAddr).filter(|given| *given != MacAddr::default());
        if let Some(group) = given.filter(|given| given.is_group()) {
            let why = format!("it was given the address {group}, which is a group's");
            return Err(self.device.fault(why));
        }
        let mac = wanted.or(given).unwrap_or_else(MacAddr::random);
        if Some(mac) != given {
            let is_granted = self.mailbox.set_mac(mac.0);
            if !is_granted.map_err(|trouble| self.trouble(trouble))? {
                let physical = self.physical();
                let bdf = self.device.bdf.clone();
                return Err(VfioError::MacRefused { bdf, mac, physical });
            }
        }
        Ok(mac)
    }

    /// Asks for frames of the MTU's length, and for those to groups, or to everybody.
    fn frames(&self, mtu: usize, is_promiscuous: bool) -> Result<(), VfioError> {
        let len = (ETH_HDR_LEN + mtu + FCS_LEN) as u32;
        let is_granted = self.mailbox.set_len(len).map_err(|trouble| self.trouble(trouble))?;
        if !is_granted {
            let why = format!("its physical function lets it have no frames of {len} bytes");
            return Err(self.device.fault(why));
        }
        let all = self.mailbox.set_all(is_promiscuous).map_err(|trouble| self.trouble(trouble))?;
        match (all, is_promiscuous) {
            (true, _) => Ok(()),
            (false, true) => {
                Err(VfioError::NoSwitch { bdf: self.device.bdf.clone(), physical: self.physical() })
            }
            (false, false) => {
                let bdf = &self.device.bdf;
                tracing::debug!(bdf, "frames to groups other than broadcast do not reach it");
                Ok(())
            }
        }
    }

    fn physical(&self) -> Physical {
        survey::physical_of(&self.device.bdf).unwrap_or_default()
    }

    fn trouble(&self, trouble: Trouble) -> VfioError {
        match trouble {
            Trouble::Silent => VfioError::PhysicalSilent {
                bdf: self.device.bdf.clone(),
                physical: self.physical(),
            },
            Trouble::Strange(word) => {
                self.device.fault(format!("its physical function answers {word:#010x}"))
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
        self.bar.write32(if wanted { reg::EIMS } else { reg::EIMC }, MESSAGE);
    }

    fn dropped(&self) -> u64 {
        self.queues.dropped() + self.lost
    }

    fn health(&mut self) -> Result<(), String> {
        if self.bar.read32(reg::STATUS) == !0 {
            return Err("the device no longer answers; was it unplugged?".into());
        }
        if self.mailbox.is_over() {
            let why = "its physical function was reset (its interface was set down or changed, or \
                       its driver reloaded); open the port again once it is up";
            return Err(why.into());
        }
        if !self.queues.are_on() {
            return Err("the device was reset or stopped under us; open the port again".into());
        }
        self.lost += u64::from(self.losses.fresh(|| self.bar.read32(reg::RQDPC)));
        Ok(())
    }

    fn has_link(&self) -> Option<bool> {
        Some(self.bar.read32(reg::STATUS) & STATUS_LINK_UP != 0)
    }

    fn stop(&mut self) {
        silence(&self.bar);
        await_reset(&self.bar, reg::STATUS);
    }
}
