//! Link and PHY of the 82576's family, and the features of a card that would delay frames. Rings,
//! filters and interrupts are the same in all models (`e1000`, `e1000q`).
//!
//! Registers and fields have the names of the I210's datasheet: "Access to Shared Resources",
//! "Programming Interface", and of PHPM "PHY Power Management". Which model has which feature, how
//! its media are started, and its errata, are as in Linux's driver `igb`. Only the 82576 was
//! tested, in QEMU; the others run against the register model below.

use std::time::{Duration, Instant};

use super::device::RegisterAccess;
use super::e1000q::{self, await_register};
use super::error::VfioError;

/// Registers, by their offset in BAR 0.
mod reg {
    pub(super) const CTRL: usize = 0x0000;
    pub(super) const STATUS: usize = 0x0008;
    /// EEC on the 82576 and the I210.
    pub(super) const EECD: usize = 0x0010;
    pub(super) const CTRL_EXT: usize = 0x0018;
    pub(super) const MDIC: usize = 0x0020;
    /// SERDESCTL.
    pub(super) const SCTL: usize = 0x0024;
    pub(super) const MDICNFG: usize = 0x0e04;
    pub(super) const PHPM: usize = 0x0e14;
    pub(super) const EEER: usize = 0x0e30;
    pub(super) const IPCNFG: usize = 0x0e38;
    pub(super) const RXPBSIZE: usize = 0x2404;
    pub(super) const DMACR: usize = 0x2508;
    pub(super) const TXPBSIZE: usize = 0x3404;
    pub(super) const TQAVCTRL: usize = 0x3570;
    pub(super) const PCS_CFG: usize = 0x4200;
    pub(super) const PCS_LCTL: usize = 0x4208;
    pub(super) const PCS_LSTAT: usize = 0x420c;
    pub(super) const SWSM: usize = 0x5b50;
    pub(super) const SW_FW_SYNC: usize = 0x5b5c;
}

/// Features of a model of the family.
#[derive(Debug)]
pub(super) struct ChipModel {
    /// Registers that the 82580 introduced: PHPM, MDICNFG, DMACR.
    is_82580_or_later: bool,
    /// IPCNFG and EEER: Energy-Efficient Ethernet (IEEE 802.3az).
    has_eee: bool,
    /// I210 and I211: the PHY's registers are paged by its register 22, and the board may have no
    /// flash.
    is_i210: bool,
    /// TQAVCTRL, RXPBSIZE, TXPBSIZE: packet buffers may have been partitioned for TSN.
    has_tsn: bool,
    /// STATUS reports a backplane of 2.5 Gbit/s.
    has_2500: bool,
}

/// The 82576.
pub(super) const I82576: ChipModel = ChipModel {
    is_82580_or_later: false,
    has_eee: false,
    is_i210: false,
    has_tsn: false,
    has_2500: false,
};
/// The 82580, also inside of the DH89xx.
pub(super) const I82580: ChipModel = ChipModel { is_82580_or_later: true, ..I82576 };
/// The I350.
pub(super) const I350: ChipModel = ChipModel { has_eee: true, ..I82580 };
/// The I354, inside of a processor.
pub(super) const I354: ChipModel = ChipModel { has_2500: true, ..I350 };
/// The I211.
pub(super) const I211: ChipModel = ChipModel { is_i210: true, ..I350 };
/// The I210.
pub(super) const I210: ChipModel = ChipModel { has_tsn: true, ..I211 };

const CTRL_FULL_DUPLEX: u32 = 1 << 0;
const CTRL_MASTER_DISABLE: u32 = 1 << 2;
const CTRL_LINK_UP: u32 = 1 << 6;
const CTRL_SPEED: u32 = 3 << 8;
const CTRL_SPEED_1000: u32 = 2 << 8;
/// Speed and duplex are forced, not negotiated by the PHY.
const CTRL_FORCED: u32 = 1 << 11 | 1 << 12;

const EECD_READ_DONE: u32 = 1 << 9;
const EECD_HAS_FLASH: u32 = 1 << 19;

/// SDP3 low powers the cage of a module.
const CTRL_EXT_SDP3: u32 = 1 << 7;

const MDIC_WRITE: u32 = 1 << 26;
const MDIC_READ: u32 = 2 << 26;
/// Address of the internal PHY in MDIC; later models have it in MDICNFG.
const MDIC_PHY_1: u32 = 1 << 21;
const MDIC_READY: u32 = 1 << 28;
const MDIC_ERROR: u32 = 1 << 30;
/// The PHY is external.
const MDICNFG_EXTERNAL: u32 = 1 << 31;

/// Register 0 of every PHY: power up, enable and restart auto-negotiation.
const PHY_CONTROL: u32 = 0;
const PHY_NEGOTIATE: u16 = 0x1200;
const PHY_PAGE: u32 = 22;
/// The I210's PHY has no clock: page 252, register 14. An erratum that Intel's drivers mend by
/// power cycles of the PHY; it happens at power-up to some boards without a flash.
const PHY_CLOCK: (u16, u32) = (252, 14);
const PHY_NO_CLOCK: u16 = 0xff;

/// Low power link up in D0, and Go Link Disconnect.
const PHPM_LPLU_OR_GO_LINKD: u32 = 1 << 1 | 1 << 5;

/// 100 and 1,000 Mbit/s with sleep are offered.
const IPCNFG_EEE: u32 = 1 << 2 | 1 << 3;
/// Sleep to send, to receive, for flow control.
const EEER_SLEEP: u32 = 7 << 16;

/// What the datasheet has them begin with: 34 KiB to receive, 20 KiB to send.
const I210_RXPBSIZE: u32 = 0x0000_00a2;
const I210_TXPBSIZE: u32 = 0x0400_0014;

/// No loopback between SerDes and PCS, which a reset leaves.
const SCTL_NO_LOOPBACK: u32 = 0x0400;
const PCS_CFG_ENABLE: u32 = 1 << 3;
const PCS_LINK_FORCED: u32 = 1 << 0 | 1 << 5;
const PCS_1000_FULL: u32 = 1 << 2 | 1 << 3;
const PCS_SPEED_FORCED: u32 = 1 << 4;
const PCS_PAUSE_FORCED: u32 = 1 << 7;
const PCS_NEGOTIATE: u32 = 1 << 16 | 1 << 17;
const PCS_TIMEOUT: u32 = 1 << 18;
const PCS_LINK_OK: u32 = 1 << 0;

/// The SKU has 2.5 Gbit/s, and they are not overridden.
const STATUS_2500: u32 = 1 << 12;
const STATUS_NOT_2500: u32 = 1 << 13;

/// SMBI: a driver of this port owns SWSM, or a reader has just acquired it. SWESMBI: the driver,
/// not the firmware, owns SW_FW_SYNC.
const SWSM_SMBI: u32 = 1 << 0;
const SWSM_SWESMBI: u32 = 1 << 1;

/// Attempts to lock the PHY, and their interval: a second in all, as in Intel's drivers.
const LOCK_TRIES: usize = 200;
const LOCK_RETRY: Duration = Duration::from_millis(5);
/// Limit on the time of all attempts while the firmware holds SWSM: each takes 100 ms.
const LOCK_WAIT: Duration = Duration::from_secs(3);
/// Attempts after which a software lock is considered stale, left by a killed process: a live
/// driver holds it for a few milliseconds.
const LOCK_TRIES_BEFORE_STEAL: usize = 20;

/// Errors of a port's PHY.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PhyError {
    /// The firmware holds its lock.
    Locked,
    /// See [`PHY_CLOCK`].
    NoClock,
    /// It does not respond on MDIO.
    Unresponsive,
}

impl PhyError {
    /// The error of the NIC at `bdf`.
    pub(super) fn of(self, bdf: &str) -> VfioError {
        let bdf = bdf.to_owned();
        match self {
            Self::Locked => VfioError::PhyLockedByFirmware { bdf },
            Self::NoClock => VfioError::PhyNoClock { bdf },
            Self::Unresponsive => VfioError::Device { bdf, why: "its PHY does not answer".into() },
        }
    }
}

/// Medium of a port: CTRL_EXT, LINK_MODE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Medium {
    /// Copper, by the internal PHY.
    Copper,
    /// A backplane (1000BASE-KX).
    Backplane,
    /// An external PHY, over SGMII.
    Sgmii,
    /// Fibre, or a backplane with auto-negotiation.
    SerDes,
}

impl Medium {
    fn of<W: RegisterAccess>(regs: &W) -> Self {
        let modes = [Self::Copper, Self::Backplane, Self::Sgmii, Self::SerDes];
        modes[(regs.read(reg::CTRL_EXT) >> 22 & 3) as usize]
    }

    /// The link state is in the PCS only, not in STATUS.
    fn is_pcs_only(self) -> bool {
        match self {
            Self::Copper | Self::Sgmii => false,
            Self::Backplane | Self::SerDes => true,
        }
    }
}

/// Starts the link after a reset of the port, and disables features that delay frames (EEE, DMA
/// coalescing). Does not wait for the link.
///
/// # Errors
/// [`PhyError`]: there will be no link.
pub(super) fn bring_up<W: RegisterAccess>(regs: &W, model: &ChipModel) -> Result<(), PhyError> {
    // The EEPROM is loaded into the registers after a reset. A board without one never sets the
    // bit.
    let _ = await_register(regs, |regs| regs.read(reg::EECD) & EECD_READ_DONE != 0);
    let clear = |at: usize, bits: u32| regs.write(at, regs.read(at) & !bits);
    if model.is_82580_or_later {
        regs.write(reg::DMACR, 0);
        clear(reg::PHPM, PHPM_LPLU_OR_GO_LINKD);
    }
    if model.has_eee {
        clear(reg::IPCNFG, IPCNFG_EEE);
        clear(reg::EEER, EEER_SLEEP);
    }
    if model.has_tsn {
        regs.write(reg::TQAVCTRL, 0);
        regs.write(reg::RXPBSIZE, I210_RXPBSIZE);
        regs.write(reg::TXPBSIZE, I210_TXPBSIZE);
    }
    let medium = Medium::of(regs);
    let ctrl = regs.read(reg::CTRL) & !(CTRL_MASTER_DISABLE | CTRL_SPEED | CTRL_FORCED);
    let forced = if medium.is_pcs_only() { CTRL_SPEED_1000 | CTRL_FORCED } else { 0 };
    regs.write(reg::CTRL, ctrl | CTRL_FULL_DUPLEX | CTRL_LINK_UP | forced);
    match medium {
        Medium::Copper => Phy::lock(regs)?.negotiate(model),
        Medium::Sgmii => {
            start_pcs(regs, PCS_TIMEOUT, PCS_NEGOTIATE);
            // A PHY in a module, behind I2C, negotiates by itself.
            if model.is_82580_or_later && regs.read(reg::MDICNFG) & MDICNFG_EXTERNAL != 0 {
                Phy::lock(regs)?.negotiate(model)?;
            }
            Ok(())
        }
        Medium::SerDes => {
            start_pcs(regs, 0, PCS_1000_FULL | PCS_NEGOTIATE);
            Ok(())
        }
        Medium::Backplane => {
            start_pcs(regs, 0, PCS_1000_FULL | PCS_SPEED_FORCED | PCS_PAUSE_FORCED);
            Ok(())
        }
    }
}

/// Powers a module's cage and starts the PCS, with the bits `clear` of PCS_LCTL cleared and those
/// of `set` set.
fn start_pcs<W: RegisterAccess>(regs: &W, clear: u32, set: u32) {
    regs.write(reg::SCTL, SCTL_NO_LOOPBACK);
    regs.write(reg::CTRL_EXT, regs.read(reg::CTRL_EXT) & !CTRL_EXT_SDP3);
    regs.write(reg::PCS_CFG, regs.read(reg::PCS_CFG) | PCS_CFG_ENABLE);
    let clear = clear | PCS_LINK_FORCED | PCS_SPEED_FORCED | PCS_PAUSE_FORCED | PCS_NEGOTIATE;
    regs.write(reg::PCS_LCTL, regs.read(reg::PCS_LCTL) & !clear | set);
}

/// The link speed in bit/s, 0 without a link.
pub(super) fn link_bps<W: RegisterAccess>(regs: &W, model: &ChipModel) -> u64 {
    let status = regs.read(reg::STATUS);
    let bps = match Medium::of(regs).is_pcs_only() {
        true if regs.read(reg::PCS_LSTAT) & PCS_LINK_OK == 0 => 0,
        true => 1_000_000_000,
        false => e1000q::link_bps(status),
    };
    let is_2500 = model.has_2500 && status & (STATUS_2500 | STATUS_NOT_2500) == STATUS_2500;
    if bps == 1_000_000_000 && is_2500 { 2_500_000_000 } else { bps }
}

/// Lock of a port's PHY, which its firmware uses as well. Unlocked when dropped.
struct Phy<'a, W: RegisterAccess> {
    regs: &'a W,
    /// The port's software bit in SW_FW_SYNC.
    bit: u32,
}

impl<'a, W: RegisterAccess> Phy<'a, W> {
    /// Locks the PHY. A stale lock of a killed process is taken over after a tenth of a second.
    ///
    /// # Errors
    /// the lock was not free within one to three seconds. It is left as it was.
    fn lock(regs: &'a W) -> Result<Self, PhyError> {
        let port = regs.read(reg::STATUS) >> 2 & 3;
        let bit = [1 << 1, 1 << 2, 1 << 5, 1 << 6][port as usize];
        let until = Instant::now() + LOCK_WAIT;
        for n in 0..LOCK_TRIES {
            let is_ours = update_sw_fw_sync(regs, |sync| {
                let is_taken =
                    sync & (bit << 16) != 0 || n < LOCK_TRIES_BEFORE_STEAL && sync & bit != 0;
                (!is_taken).then_some(sync | bit)
            });
            if is_ours {
                return Ok(Self { regs, bit });
            }
            if Instant::now() > until {
                break;
            }
            std::thread::sleep(LOCK_RETRY);
        }
        Err(PhyError::Locked)
    }

    /// Restarts auto-negotiation.
    fn negotiate(&self, model: &ChipModel) -> Result<(), PhyError> {
        if model.is_i210 {
            let has_flash = self.regs.read(reg::EECD) & EECD_HAS_FLASH != 0;
            let (page, register) = PHY_CLOCK;
            // An external PHY may have no pages, and does not respond to this.
            if !has_flash && self.write(PHY_PAGE, page).is_ok() {
                let clock = self.read(register);
                let _ = self.write(PHY_PAGE, 0);
                if clock.is_ok_and(|word| word & PHY_NO_CLOCK == PHY_NO_CLOCK) {
                    return Err(PhyError::NoClock);
                }
            }
            let _ = self.write(PHY_PAGE, 0);
        }
        self.write(PHY_CONTROL, PHY_NEGOTIATE).map_err(|()| PhyError::Unresponsive)
    }

    fn write(&self, register: u32, value: u16) -> Result<(), ()> {
        self.mdic(MDIC_WRITE | register << 16 | u32::from(value)).map(|_| ())
    }

    fn read(&self, register: u32) -> Result<u16, ()> {
        self.mdic(MDIC_READ | register << 16)
    }

    /// Executes an MDIC command and returns the data.
    fn mdic(&self, word: u32) -> Result<u16, ()> {
        self.regs.write(reg::MDIC, word | MDIC_PHY_1);
        await_register(self.regs, |regs| regs.read(reg::MDIC) & MDIC_READY != 0)?;
        let said = self.regs.read(reg::MDIC);
        if said & MDIC_ERROR != 0 { Err(()) } else { Ok(said as u16) }
    }
}

impl<W: RegisterAccess> Drop for Phy<'_, W> {
    fn drop(&mut self) {
        // If this fails, the next driver takes the lock for a stale one.
        let unlocks = || update_sw_fw_sync(self.regs, |sync| Some(sync & !self.bit));
        let _ = (0..LOCK_TRIES_BEFORE_STEAL).any(|_| unlocks());
    }
}

/// Changes SW_FW_SYNC under the SWSM semaphore if `change` returns a value. Returns whether it did.
fn update_sw_fw_sync<W: RegisterAccess>(regs: &W, change: impl Fn(u32) -> Option<u32>) -> bool {
    // SMBI: reading it acquires it. A killed driver leaves it set, so a holder that keeps it this
    // long is taken for dead, as in Intel's drivers for the I210, which then clear it once.
    let _ = await_register(regs, |regs| regs.read(reg::SWSM) & SWSM_SMBI == 0);
    // SWESMBI: it cannot be set while the firmware changes SW_FW_SYNC.
    let is_ours = await_register(regs, |regs| {
        regs.write(reg::SWSM, regs.read(reg::SWSM) | SWSM_SWESMBI);
        regs.read(reg::SWSM) & SWSM_SWESMBI != 0
    });
    let changed = is_ours.ok().and_then(|()| change(regs.read(reg::SW_FW_SYNC)));
    if let Some(sync) = changed {
        regs.write(reg::SW_FW_SYNC, sync);
    }
    regs.write(reg::SWSM, regs.read(reg::SWSM) & !(SWSM_SMBI | SWSM_SWESMBI));
    changed.is_some()
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;

    use super::*;

    /// Model of a card's registers and its PHY.
    #[derive(Default)]
    struct Card {
        regs: RefCell<BTreeMap<usize, u32>>,
        /// The PHY's registers by page and number; the page that register 22 chose.
        phy: RefCell<BTreeMap<(u16, u32), u16>>,
        page: Cell<u16>,
        has_pages: bool,
        /// It does not respond.
        is_unresponsive: bool,
        /// Reads of SW_FW_SYNC until the firmware releases the PHY.
        firmware: Cell<u32>,
        /// Until when the firmware holds SW_FW_SYNC.
        guarded_until: Cell<Option<Instant>>,
    }

    /// Registers that only some models have.
    const LATER: [usize; 3] = [reg::MDICNFG, reg::PHPM, reg::DMACR];
    const EEE: [usize; 2] = [reg::IPCNFG, reg::EEER];
    const TSN: [usize; 3] = [reg::TQAVCTRL, reg::RXPBSIZE, reg::TXPBSIZE];

    const MODELS: [(&str, &ChipModel); 6] = [
        ("82576", &I82576),
        ("82580", &I82580),
        ("I350", &I350),
        ("I354", &I354),
        ("I211", &I211),
        ("I210", &I210),
    ];

    /// A card as the kernel's driver or a reset may leave it: all features that delay frames
    /// enabled, the link forced, the PHY powered down and on another page.
    fn card(name: &str, medium: u32) -> Card {
        let has_pages = ["I210", "I211"].contains(&name);
        let mut regs = BTreeMap::from([
            (reg::CTRL, CTRL_MASTER_DISABLE | CTRL_SPEED | CTRL_FORCED | 1 << 30),
            (reg::STATUS, 1 << 2),
            (reg::EECD, EECD_READ_DONE | EECD_HAS_FLASH),
            (reg::CTRL_EXT, medium << 22 | CTRL_EXT_SDP3 | 1),
            (reg::MDIC, 0),
            (reg::SCTL, 0x0410),
            (reg::PCS_CFG, 0),
            (reg::PCS_LCTL, PCS_LINK_FORCED | PCS_SPEED_FORCED | PCS_PAUSE_FORCED | PCS_TIMEOUT),
            (reg::PCS_LSTAT, 0),
            (reg::SWSM, 0),
            (reg::SW_FW_SYNC, 0),
        ]);
        let has = [("82576", 0), ("82580", 1), ("I350", 2), ("I354", 2), ("I211", 2), ("I210", 3)];
        let level = has.iter().find(|has| has.0 == name).unwrap().1;
        for at in [&LATER[..], &EEE, &TSN][..level].concat() {
            regs.insert(at, if at == reg::MDICNFG { 0 } else { !0 });
        }
        let phy = BTreeMap::from([((0, 0), 0x0800), ((252, 14), 0x0012), ((7, 0), 0x5555)]);
        let page = Cell::new(if has_pages { 7 } else { 0 });
        let (regs, phy) = (RefCell::new(regs), RefCell::new(phy));
        Card { regs, phy, page, has_pages, ..Card::default() }
    }

    impl Card {
        fn word(&self, at: usize) -> u32 {
            self.regs.borrow()[&at]
        }

        fn set(&self, at: usize, word: u32) {
            self.regs.borrow_mut().insert(at, word);
        }

        fn phy(&self, page: u16, register: u32) -> u16 {
            self.phy.borrow()[&(page, register)]
        }

        /// Executes an MDIC command, and returns its new value.
        fn mdic(&self, word: u32) -> u32 {
            assert_eq!(self.word(reg::SW_FW_SYNC) & 1 << 2, 1 << 2, "the PHY is not ours");
            assert_eq!(self.word(reg::SW_FW_SYNC) & 1 << 18, 0, "the firmware has the PHY");
            if self.is_unresponsive {
                return word;
            }
            let register = word >> 16 & 31;
            let at = (if self.has_pages { self.page.get() } else { 0 }, register);
            if word & MDIC_READ == MDIC_READ {
                let value = self.phy.borrow().get(&at).copied();
                let value = value.map_or(MDIC_ERROR, u32::from);
                return word & !0xffff | value | MDIC_READY;
            }
            if self.has_pages && register == PHY_PAGE {
                self.page.set(word as u16);
            } else {
                self.phy.borrow_mut().insert(at, word as u16);
            }
            word | MDIC_READY
        }
    }

    impl RegisterAccess for Card {
        fn read(&self, at: usize) -> u32 {
            let word = *self.regs.borrow().get(&at).unwrap_or_else(|| panic!("{at:#x} is read"));
            if at == reg::SWSM {
                self.set(at, word | SWSM_SMBI);
            }
            if at == reg::SW_FW_SYNC && self.firmware.get() > 0 {
                self.firmware.set(self.firmware.get() - 1);
                return word | 1 << 18;
            }
            word
        }

        fn write(&self, at: usize, word: u32) {
            assert!(self.regs.borrow().contains_key(&at), "{at:#x} is written");
            let is_guarded = self.guarded_until.get().is_some_and(|until| Instant::now() < until);
            let word = match at {
                reg::MDIC => self.mdic(word),
                reg::SWSM if is_guarded => word & !SWSM_SWESMBI,
                _ => word,
            };
            let guard = self.word(reg::SWSM) & SWSM_SWESMBI;
            assert!(at != reg::SW_FW_SYNC || guard != 0, "SW_FW_SYNC is not ours");
            self.set(at, word);
        }
    }

    /// Goal: each model negotiates after a reset, whatever the previous driver left, with the
    /// features that delay frames disabled, and by registers that it has. Method: a register model
    /// of each, which refuses others; its PHY powered down, on another page where there are pages,
    /// and locked by the firmware for a while.
    #[test]
    fn every_model_comes_up() {
        for (name, model) in MODELS {
            let card = card(name, 0);
            card.firmware.set(3);
            assert_eq!(bring_up(&card, model), Ok(()), "{name}");
            assert_eq!(card.phy(0, 0), PHY_NEGOTIATE, "{name}");
            assert_eq!(card.page.get(), 0, "{name}");
            assert_eq!(card.word(reg::CTRL), 1 << 30 | CTRL_FULL_DUPLEX | CTRL_LINK_UP, "{name}");
            // All locks are released.
            assert_eq!((card.word(reg::SWSM), card.word(reg::SW_FW_SYNC)), (0, 0), "{name}");
            if model.is_82580_or_later {
                assert_eq!((card.word(reg::DMACR), card.word(reg::PHPM)), (0, !0x22), "{name}");
            }
            if model.has_eee {
                let eee = (card.word(reg::IPCNFG), card.word(reg::EEER));
                assert_eq!(eee, (!0xc, !0x7_0000), "{name}");
            }
            if model.has_tsn {
                assert_eq!(TSN.map(|at| card.word(at)), [0, 0xa2, 0x0400_0014]);
            }
            // Registers of fibre are not touched.
            assert_eq!((card.word(reg::SCTL), card.word(reg::PCS_CFG)), (0x0410, 0), "{name}");
        }
    }

    /// Goal: fibre, backplanes and external PHYs are started by the PCS, whose negotiation times
    /// out but over SGMII, and an external PHY on MDIO negotiates as well.
    #[test]
    fn other_media_come_up() {
        for (name, model) in MODELS {
            for (medium, ctrl, lctl) in
                [(1, 0x1a41, 0x4_009c), (2, 0x41, 0x3_0000), (3, 0x1a41, 0x7_000c)]
            {
                let card = card(name, medium);
                assert_eq!(bring_up(&card, model), Ok(()), "{name}, {medium}");
                assert_eq!(card.word(reg::CTRL), 1 << 30 | ctrl, "{name}, {medium}");
                assert_eq!(card.word(reg::PCS_LCTL), lctl, "{name}, {medium}");
                assert_eq!((card.word(reg::SCTL), card.word(reg::PCS_CFG)), (0x0400, 8));
                assert_eq!(card.word(reg::CTRL_EXT), medium << 22 | 1, "{name}, {medium}");
                assert_eq!(card.phy(0, 0), 0x0800, "{name}, {medium}: nobody asked for it");
            }
            if model.is_82580_or_later {
                let card = card(name, 2);
                card.set(reg::MDICNFG, MDICNFG_EXTERNAL);
                assert_eq!(bring_up(&card, model), Ok(()));
                assert_eq!(card.phy(0, 0), PHY_NEGOTIATE, "{name}");
            }
        }
    }

    /// Goal: the link speed is read from the right register: STATUS for copper, the PCS for fibre,
    /// and 2.5 Gbit/s where supported.
    #[test]
    fn the_link_speed_is_read_from_the_right_register() {
        for (name, model) in MODELS {
            let says = |medium, status, pcs| {
                let card = card(name, medium);
                card.set(reg::STATUS, status);
                card.set(reg::PCS_LSTAT, pcs);
                link_bps(&card, model)
            };
            for medium in [0, 2] {
                let speeds = [0, 2, 0x42, 0x82].map(|status| says(medium, status, 0));
                assert_eq!(speeds, [0, 10_000_000, 100_000_000, 1_000_000_000], "{name}");
            }
            let fast = if name == "I354" { 2_500_000_000 } else { 1_000_000_000 };
            for medium in [1, 3] {
                let links = [(2, 0), (0, 1), (0x1000, 1), (0x3000, 1), (0x1000, 0)];
                let speeds = links.map(|(status, pcs)| says(medium, status, pcs));
                assert_eq!(speeds, [0, 1_000_000_000, fast, 1_000_000_000, 0], "{name}");
            }
        }
    }

    /// Goal: an I210 whose PHY has no clock is an error; with a flash it is not checked; a stale
    /// lock of a killed process is taken over; a PHY that does not respond is an error. Method: the
    /// model, in bounded time.
    #[test]
    fn faults_of_a_phy_are_errors() {
        let start = std::time::Instant::now();
        let clockless = card("I210", 0);
        clockless.phy.borrow_mut().insert((252, 14), 0x12ff);
        assert_eq!(bring_up(&clockless, &I210), Ok(()), "it has a flash");
        clockless.set(reg::EECD, EECD_READ_DONE);
        for model in [&I210, &I211] {
            assert_eq!(bring_up(&clockless, model), Err(PhyError::NoClock));
            assert_eq!((clockless.page.get(), clockless.word(reg::SW_FW_SYNC)), (0, 0));
        }
        let sound = card("I210", 0);
        // A card without a flash does not report the end of the EEPROM load.
        sound.set(reg::EECD, 0);
        assert_eq!(bring_up(&sound, &I210), Ok(()));
        for (name, model) in MODELS {
            let left = card(name, 0);
            left.set(reg::SWSM, SWSM_SMBI | SWSM_SWESMBI);
            left.set(reg::SW_FW_SYNC, 1 << 2 | 1 << 6);
            assert_eq!(bring_up(&left, model), Ok(()), "{name}");
            assert_eq!(left.word(reg::SW_FW_SYNC), 1 << 6, "another port's is not ours");
            let unresponsive = Card { is_unresponsive: true, ..card(name, 0) };
            assert_eq!(bring_up(&unresponsive, model), Err(PhyError::Unresponsive), "{name}");
            assert_eq!(
                (unresponsive.word(reg::SWSM), unresponsive.word(reg::SW_FW_SYNC)),
                (0, 0),
                "{name}"
            );
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }

    /// Goal: a firmware that holds the PHY, or SW_FW_SYNC, is waited for as long as Intel's drivers
    /// wait, and nothing is accessed meanwhile; one that keeps it is an error in bounded time.
    /// Method: the model, which refuses accesses without the lock.
    #[test]
    fn the_firmware_is_waited_for() {
        let slow = card("I210", 0);
        slow.firmware.set(150);
        // And a stale lock of a killed process.
        slow.set(reg::SW_FW_SYNC, 1 << 2);
        assert_eq!(bring_up(&slow, &I210), Ok(()));
        assert_eq!(slow.word(reg::SW_FW_SYNC), 0);
        let guarded = card("I210", 0);
        guarded.guarded_until.set(Some(Instant::now() + Duration::from_millis(300)));
        assert_eq!(bring_up(&guarded, &I210), Ok(()));
        assert_eq!((guarded.word(reg::SWSM), guarded.word(reg::SW_FW_SYNC)), (0, 0));
        let start = Instant::now();
        let locked = card("I210", 0);
        locked.firmware.set(u32::MAX);
        assert_eq!(bring_up(&locked, &I210), Err(PhyError::Locked));
        let never = card("I210", 0);
        never.guarded_until.set(Some(start + Duration::from_secs(3600)));
        assert_eq!(bring_up(&never, &I210), Err(PhyError::Locked));
        assert_eq!((locked.word(reg::SWSM), never.word(reg::SWSM)), (0, 0));
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }

    /// Goal: the message names the command that helps, and a reset only where that helps.
    #[test]
    fn phy_errors_name_the_command_that_helps() {
        let told = |trouble: PhyError| trouble.of("0000:05:00.0").to_string();
        let clock = told(PhyError::NoClock);
        let (back, again) = ("--unbind 0000:05:00.0", "--bind 0000:05:00.0");
        assert!(clock.contains("without a clock") && clock.contains(back), "{clock}");
        assert!(clock.ends_with(again) && !clock.contains("/reset"), "{clock}");
        let locked = told(PhyError::Locked);
        assert!(
            locked.contains("keeps its PHY to itself") && !locked.contains("/reset"),
            "{locked}"
        );
        assert!(locked.ends_with(back), "{locked}");
        assert!(told(PhyError::Unresponsive).ends_with("/sys/bus/pci/devices/0000:05:00.0/reset"));
    }
}
