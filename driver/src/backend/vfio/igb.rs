//! What the members of the 82576's family do differently: the link, the PHY, and what of a card
//! would delay frames. Rings, filters and interrupts are the same in all of them (`e1000`,
//! `e1000q`).
//!
//! Registers and fields have the names of the I210's datasheet: "Access to Shared Resources",
//! "Programming Interface", and of PHPM "PHY Power Management". Which member has which, how its
//! media come up, and what its errata are, is as Intel's driver in Linux (`igb`) has it. Only the
//! 82576 was seen here, in QEMU; the others ran against the model of registers below.

use std::time::{Duration, Instant};

use super::device::Words;
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

/// A member of the family.
#[derive(Debug)]
pub(super) struct Member {
    /// PHPM and MDICNFG beside MDIC, DMACR: what the 82580 brought.
    is_82580_or_later: bool,
    /// IPCNFG and EEER: the line may sleep between frames (IEEE 802.3az).
    has_eee: bool,
    /// The PHY's registers lie in pages, which its register 22 chooses, and the board may have no
    /// flash: the I210 and the I211.
    is_i210: bool,
    /// Packet buffers may have been divided for TSN: TQAVCTRL, RXPBSIZE, TXPBSIZE.
    has_tsn: bool,
    /// STATUS tells a backplane of 2.5 Gbit/s.
    has_2500: bool,
}

/// The 82576.
pub(super) const I82576: Member = Member {
    is_82580_or_later: false,
    has_eee: false,
    is_i210: false,
    has_tsn: false,
    has_2500: false,
};
/// The 82580, also inside of the DH89xx.
pub(super) const I82580: Member = Member { is_82580_or_later: true, ..I82576 };
/// The I350.
pub(super) const I350: Member = Member { has_eee: true, ..I82580 };
/// The I354, inside of a processor.
pub(super) const I354: Member = Member { has_2500: true, ..I350 };
/// The I211.
pub(super) const I211: Member = Member { is_i210: true, ..I350 };
/// The I210.
pub(super) const I210: Member = Member { has_tsn: true, ..I211 };

const CTRL_FULL_DUPLEX: u32 = 1 << 0;
const CTRL_MASTER_DISABLE: u32 = 1 << 2;
const CTRL_LINK_UP: u32 = 1 << 6;
const CTRL_SPEED: u32 = 3 << 8;
const CTRL_SPEED_1000: u32 = 2 << 8;
/// Speed and duplex are not the PHY's to say.
const CTRL_FORCED: u32 = 1 << 11 | 1 << 12;

const EECD_READ_DONE: u32 = 1 << 9;
const EECD_HAS_FLASH: u32 = 1 << 19;

/// Low switches the power of a cage for a module on.
const CTRL_EXT_SDP3: u32 = 1 << 7;

const MDIC_WRITE: u32 = 1 << 26;
const MDIC_READ: u32 = 2 << 26;
/// The PHY inside, where MDIC has its number; later ones have it in MDICNFG.
const MDIC_PHY_1: u32 = 1 << 21;
const MDIC_READY: u32 = 1 << 28;
const MDIC_ERROR: u32 = 1 << 30;
/// The PHY is an external one.
const MDICNFG_EXTERNAL: u32 = 1 << 31;

/// Register 0 of every PHY: it has power, negotiates, and begins anew.
const PHY_CONTROL: u32 = 0;
const PHY_NEGOTIATE: u16 = 0x1200;
const PHY_PAGE: u32 = 22;
/// The I210's PHY has no clock: page 252, register 14. An erratum that Intel's drivers mend by
/// power cycles of the PHY; it happens at power-up to some boards without a flash.
const PHY_CLOCK: (u16, u32) = (252, 14);
const PHY_NO_CLOCK: u16 = 0xff;

/// Low power link up in D0, and Go Link Disconnect.
const PHPM_SLOW_OR_OFF: u32 = 1 << 1 | 1 << 5;

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

/// SMBI: a driver of this port has SWSM, or whoever read it last. SWESMBI: the driver's side has
/// SW_FW_SYNC, not the firmware.
const SWSM_SOFTWARE: u32 = 1 << 0;
const SWSM_SYNC: u32 = 1 << 1;

/// Tries to take the PHY, and time between two: a second in all, as Intel's drivers have it.
const LOCK_TRIES: usize = 200;
const LOCK_RETRY: Duration = Duration::from_millis(5);
/// Time after which there is no further try, where the firmware keeps SWSM: each takes 100 ms.
const LOCK_WAIT: Duration = Duration::from_secs(3);
/// Tries after which the PHY was left locked by a process that was killed: what a driver does with
/// it takes a few milliseconds.
const LOCK_TRIES_ALIVE: usize = 20;

/// What is wrong with the PHY of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PhyTrouble {
    /// The firmware does not let go of it.
    Kept,
    /// See [`PHY_CLOCK`].
    NoClock,
    /// It does not answer.
    Mute,
}

impl PhyTrouble {
    /// The error of the NIC at `bdf` that has it.
    pub(super) fn of(self, bdf: &str) -> VfioError {
        let bdf = bdf.to_owned();
        match self {
            Self::Kept => VfioError::PhyKept { bdf },
            Self::NoClock => VfioError::PhyNoClock { bdf },
            Self::Mute => VfioError::Device { bdf, why: "its PHY does not answer".into() },
        }
    }
}

/// Where the frames of a port go: CTRL_EXT, LINK_MODE.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Medium {
    /// The PHY inside, and copper.
    Copper,
    /// A backplane (1000BASE-KX).
    Backplane,
    /// A PHY outside, over SGMII.
    Sgmii,
    /// Fibre, or a backplane that negotiates.
    SerDes,
}

impl Medium {
    fn of<W: Words>(words: &W) -> Self {
        let modes = [Self::Copper, Self::Backplane, Self::Sgmii, Self::SerDes];
        modes[(words.read(reg::CTRL_EXT) >> 22 & 3) as usize]
    }

    /// The link is told by the PCS alone; STATUS does not have it.
    fn is_pcs_alone(self) -> bool {
        match self {
            Self::Copper | Self::Sgmii => false,
            Self::Backplane | Self::SerDes => true,
        }
    }
}

/// After a reset of the port: lets it negotiate, and switches off what makes frames wait (the line
/// asleep, DMA coalescing). The link comes later, or not.
///
/// # Errors
/// [`PhyTrouble`]: there will be no link.
pub(super) fn bring_up<W: Words>(words: &W, member: &Member) -> Result<(), PhyTrouble> {
    // The EEPROM is read into the registers after a reset. A board without one never says so.
    let _ = await_register(words, |words| words.read(reg::EECD) & EECD_READ_DONE != 0);
    let clear = |at: usize, bits: u32| words.write(at, words.read(at) & !bits);
    if member.is_82580_or_later {
        words.write(reg::DMACR, 0);
        clear(reg::PHPM, PHPM_SLOW_OR_OFF);
    }
    if member.has_eee {
        clear(reg::IPCNFG, IPCNFG_EEE);
        clear(reg::EEER, EEER_SLEEP);
    }
    if member.has_tsn {
        words.write(reg::TQAVCTRL, 0);
        words.write(reg::RXPBSIZE, I210_RXPBSIZE);
        words.write(reg::TXPBSIZE, I210_TXPBSIZE);
    }
    let medium = Medium::of(words);
    let ctrl = words.read(reg::CTRL) & !(CTRL_MASTER_DISABLE | CTRL_SPEED | CTRL_FORCED);
    let forced = if medium.is_pcs_alone() { CTRL_SPEED_1000 | CTRL_FORCED } else { 0 };
    words.write(reg::CTRL, ctrl | CTRL_FULL_DUPLEX | CTRL_LINK_UP | forced);
    match medium {
        Medium::Copper => Phy::lock(words)?.negotiate(member),
        Medium::Sgmii => {
            pcs(words, PCS_TIMEOUT, PCS_NEGOTIATE);
            // One behind I2C, in a module, negotiates by itself.
            if member.is_82580_or_later && words.read(reg::MDICNFG) & MDICNFG_EXTERNAL != 0 {
                Phy::lock(words)?.negotiate(member)?;
            }
            Ok(())
        }
        Medium::SerDes => {
            pcs(words, 0, PCS_1000_FULL | PCS_NEGOTIATE);
            Ok(())
        }
        Medium::Backplane => {
            pcs(words, 0, PCS_1000_FULL | PCS_SPEED_FORCED | PCS_PAUSE_FORCED);
            Ok(())
        }
    }
}

/// Powers a module's cage and starts the PCS without the bits `not` of PCS_LCTL and with those of
/// `how`.
fn pcs<W: Words>(words: &W, not: u32, how: u32) {
    words.write(reg::SCTL, SCTL_NO_LOOPBACK);
    words.write(reg::CTRL_EXT, words.read(reg::CTRL_EXT) & !CTRL_EXT_SDP3);
    words.write(reg::PCS_CFG, words.read(reg::PCS_CFG) | PCS_CFG_ENABLE);
    let not = not | PCS_LINK_FORCED | PCS_SPEED_FORCED | PCS_PAUSE_FORCED | PCS_NEGOTIATE;
    words.write(reg::PCS_LCTL, words.read(reg::PCS_LCTL) & !not | how);
}

/// The link speed in bit/s, 0 without a link.
pub(super) fn link_bps<W: Words>(words: &W, member: &Member) -> u64 {
    let status = words.read(reg::STATUS);
    let bps = match Medium::of(words).is_pcs_alone() {
        true if words.read(reg::PCS_LSTAT) & PCS_LINK_OK == 0 => 0,
        true => 1_000_000_000,
        false => e1000q::link_bps(status),
    };
    let is_2500 = member.has_2500 && status & (STATUS_2500 | STATUS_NOT_2500) == STATUS_2500;
    if bps == 1_000_000_000 && is_2500 { 2_500_000_000 } else { bps }
}

/// The PHY of a port, which its firmware uses as well: ours until this is dropped.
struct Phy<'a, W: Words> {
    words: &'a W,
    /// Ours in SW_FW_SYNC.
    bit: u32,
}

impl<'a, W: Words> Phy<'a, W> {
    /// Takes the PHY. What a killed process left locked is taken after a tenth of a second.
    ///
    /// # Errors
    /// [`PhyTrouble::Kept`]: not within a second, or three. It is locked as it was.
    fn lock(words: &'a W) -> Result<Self, PhyTrouble> {
        let port = words.read(reg::STATUS) >> 2 & 3;
        let bit = [1 << 1, 1 << 2, 1 << 5, 1 << 6][port as usize];
        let until = Instant::now() + LOCK_WAIT;
        for n in 0..LOCK_TRIES {
            let is_ours = with_sync(words, |sync| {
                let is_taken = sync & (bit << 16) != 0 || n < LOCK_TRIES_ALIVE && sync & bit != 0;
                (!is_taken).then_some(sync | bit)
            });
            if is_ours {
                return Ok(Self { words, bit });
            }
            if Instant::now() > until {
                break;
            }
            std::thread::sleep(LOCK_RETRY);
        }
        Err(PhyTrouble::Kept)
    }

    /// Lets it negotiate anew.
    fn negotiate(&self, member: &Member) -> Result<(), PhyTrouble> {
        if member.is_i210 {
            let has_flash = self.words.read(reg::EECD) & EECD_HAS_FLASH != 0;
            let (page, register) = PHY_CLOCK;
            // A PHY outside may have no pages, and does not answer to this.
            if !has_flash && self.write(PHY_PAGE, page).is_ok() {
                let clock = self.read(register);
                let _ = self.write(PHY_PAGE, 0);
                if clock.is_ok_and(|word| word & PHY_NO_CLOCK == PHY_NO_CLOCK) {
                    return Err(PhyTrouble::NoClock);
                }
            }
            let _ = self.write(PHY_PAGE, 0);
        }
        self.write(PHY_CONTROL, PHY_NEGOTIATE).map_err(|()| PhyTrouble::Mute)
    }

    fn write(&self, register: u32, value: u16) -> Result<(), ()> {
        self.mdic(MDIC_WRITE | register << 16 | u32::from(value)).map(|_| ())
    }

    fn read(&self, register: u32) -> Result<u16, ()> {
        self.mdic(MDIC_READ | register << 16)
    }

    /// Does what MDIC is told, and gives the value.
    fn mdic(&self, word: u32) -> Result<u16, ()> {
        self.words.write(reg::MDIC, word | MDIC_PHY_1);
        await_register(self.words, |words| words.read(reg::MDIC) & MDIC_READY != 0)?;
        let said = self.words.read(reg::MDIC);
        if said & MDIC_ERROR != 0 { Err(()) } else { Ok(said as u16) }
    }
}

impl<W: Words> Drop for Phy<'_, W> {
    fn drop(&mut self) {
        // One that stays locked is a killed process's to the next who wants it.
        let unlocks = || with_sync(self.words, |sync| Some(sync & !self.bit));
        let _ = (0..LOCK_TRIES_ALIVE).any(|_| unlocks());
    }
}

/// Changes SW_FW_SYNC, which SWSM guards, or does not; says whether.
fn with_sync<W: Words>(words: &W, change: impl Fn(u32) -> Option<u32>) -> bool {
    // SMBI: reading it takes it. The driver of a port that was killed leaves it set, and whoever
    // has had it for that long was: as Intel's drivers for the I210, which then clear it once.
    let _ = await_register(words, |words| words.read(reg::SWSM) & SWSM_SOFTWARE == 0);
    // SWESMBI: it stays unset while the firmware changes SW_FW_SYNC.
    let is_ours = await_register(words, |words| {
        words.write(reg::SWSM, words.read(reg::SWSM) | SWSM_SYNC);
        words.read(reg::SWSM) & SWSM_SYNC != 0
    });
    let changed = is_ours.ok().and_then(|()| change(words.read(reg::SW_FW_SYNC)));
    if let Some(sync) = changed {
        words.write(reg::SW_FW_SYNC, sync);
    }
    words.write(reg::SWSM, words.read(reg::SWSM) & !(SWSM_SOFTWARE | SWSM_SYNC));
    changed.is_some()
}

#[cfg(test)]
mod tests {
    use std::cell::{Cell, RefCell};
    use std::collections::BTreeMap;

    use super::*;

    /// The registers of a card, and its PHY.
    #[derive(Default)]
    struct Card {
        words: RefCell<BTreeMap<usize, u32>>,
        /// The PHY's registers by page and number; the page that register 22 chose.
        phy: RefCell<BTreeMap<(u16, u32), u16>>,
        page: Cell<u16>,
        has_pages: bool,
        /// It answers nothing.
        is_mute: bool,
        /// Looks at SW_FW_SYNC until the firmware is done with the PHY.
        firmware: Cell<u32>,
        /// When the firmware is done with SW_FW_SYNC, for now.
        guarded_until: Cell<Option<Instant>>,
    }

    /// What only some have.
    const LATER: [usize; 3] = [reg::MDICNFG, reg::PHPM, reg::DMACR];
    const EEE: [usize; 2] = [reg::IPCNFG, reg::EEER];
    const TSN: [usize; 3] = [reg::TQAVCTRL, reg::RXPBSIZE, reg::TXPBSIZE];

    const MEMBERS: [(&str, &Member); 6] = [
        ("82576", &I82576),
        ("82580", &I82580),
        ("I350", &I350),
        ("I354", &I354),
        ("I211", &I211),
        ("I210", &I210),
    ];

    /// A card as the kernel's driver or a reset may leave it: everything that delays is on, the
    /// link is cut, the PHY without power and on another page.
    fn card(name: &str, medium: u32) -> Card {
        let has_pages = ["I210", "I211"].contains(&name);
        let mut words = BTreeMap::from([
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
            words.insert(at, if at == reg::MDICNFG { 0 } else { !0 });
        }
        let phy = BTreeMap::from([((0, 0), 0x0800), ((252, 14), 0x0012), ((7, 0), 0x5555)]);
        let page = Cell::new(if has_pages { 7 } else { 0 });
        let (words, phy) = (RefCell::new(words), RefCell::new(phy));
        Card { words, phy, page, has_pages, ..Card::default() }
    }

    impl Card {
        fn word(&self, at: usize) -> u32 {
            self.words.borrow()[&at]
        }

        fn set(&self, at: usize, word: u32) {
            self.words.borrow_mut().insert(at, word);
        }

        fn phy(&self, page: u16, register: u32) -> u16 {
            self.phy.borrow()[&(page, register)]
        }

        /// Does what MDIC is told, and says what it holds then.
        fn mdic(&self, word: u32) -> u32 {
            assert_eq!(self.word(reg::SW_FW_SYNC) & 1 << 2, 1 << 2, "the PHY is not ours");
            assert_eq!(self.word(reg::SW_FW_SYNC) & 1 << 18, 0, "the firmware has the PHY");
            if self.is_mute {
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

    impl Words for Card {
        fn read(&self, at: usize) -> u32 {
            let word = *self.words.borrow().get(&at).unwrap_or_else(|| panic!("{at:#x} is read"));
            if at == reg::SWSM {
                self.set(at, word | SWSM_SOFTWARE);
            }
            if at == reg::SW_FW_SYNC && self.firmware.get() > 0 {
                self.firmware.set(self.firmware.get() - 1);
                return word | 1 << 18;
            }
            word
        }

        fn write(&self, at: usize, word: u32) {
            assert!(self.words.borrow().contains_key(&at), "{at:#x} is written");
            let is_guarded = self.guarded_until.get().is_some_and(|until| Instant::now() < until);
            let word = match at {
                reg::MDIC => self.mdic(word),
                reg::SWSM if is_guarded => word & !SWSM_SYNC,
                _ => word,
            };
            let guard = self.word(reg::SWSM) & SWSM_SYNC;
            assert!(at != reg::SW_FW_SYNC || guard != 0, "SW_FW_SYNC is not ours");
            self.set(at, word);
        }
    }

    /// Goal: each member negotiates after a reset, whatever its driver before us left, with what
    /// delays frames off, and only by registers that it has. Method: a model of the registers of
    /// each, which refuses others; its PHY without power, on another page where there are pages,
    /// and in use by the firmware for a while.
    #[test]
    fn every_member_comes_up() {
        for (name, member) in MEMBERS {
            let card = card(name, 0);
            card.firmware.set(3);
            assert_eq!(bring_up(&card, member), Ok(()), "{name}");
            assert_eq!(card.phy(0, 0), PHY_NEGOTIATE, "{name}");
            assert_eq!(card.page.get(), 0, "{name}");
            assert_eq!(card.word(reg::CTRL), 1 << 30 | CTRL_FULL_DUPLEX | CTRL_LINK_UP, "{name}");
            // Others' from here on.
            assert_eq!((card.word(reg::SWSM), card.word(reg::SW_FW_SYNC)), (0, 0), "{name}");
            if member.is_82580_or_later {
                assert_eq!((card.word(reg::DMACR), card.word(reg::PHPM)), (0, !0x22), "{name}");
            }
            if member.has_eee {
                let eee = (card.word(reg::IPCNFG), card.word(reg::EEER));
                assert_eq!(eee, (!0xc, !0x7_0000), "{name}");
            }
            if member.has_tsn {
                assert_eq!(TSN.map(|at| card.word(at)), [0, 0xa2, 0x0400_0014]);
            }
            // What is for fibre is not touched.
            assert_eq!((card.word(reg::SCTL), card.word(reg::PCS_CFG)), (0x0410, 0), "{name}");
        }
    }

    /// Goal: fibre, backplanes and PHYs outside are brought up by the PCS, whose negotiation ends
    /// by time but over SGMII, and a PHY outside that MDIC reaches negotiates as well.
    #[test]
    fn other_media_come_up() {
        for (name, member) in MEMBERS {
            for (medium, ctrl, lctl) in
                [(1, 0x1a41, 0x4_009c), (2, 0x41, 0x3_0000), (3, 0x1a41, 0x7_000c)]
            {
                let card = card(name, medium);
                assert_eq!(bring_up(&card, member), Ok(()), "{name}, {medium}");
                assert_eq!(card.word(reg::CTRL), 1 << 30 | ctrl, "{name}, {medium}");
                assert_eq!(card.word(reg::PCS_LCTL), lctl, "{name}, {medium}");
                assert_eq!((card.word(reg::SCTL), card.word(reg::PCS_CFG)), (0x0400, 8));
                assert_eq!(card.word(reg::CTRL_EXT), medium << 22 | 1, "{name}, {medium}");
                assert_eq!(card.phy(0, 0), 0x0800, "{name}, {medium}: nobody asked for it");
            }
            if member.is_82580_or_later {
                let card = card(name, 2);
                card.set(reg::MDICNFG, MDICNFG_EXTERNAL);
                assert_eq!(bring_up(&card, member), Ok(()));
                assert_eq!(card.phy(0, 0), PHY_NEGOTIATE, "{name}");
            }
        }
    }

    /// Goal: the link's speed is what the card says where it says it: STATUS for copper, the PCS
    /// for fibre, and 2.5 Gbit/s where there are any.
    #[test]
    fn the_link_is_told() {
        for (name, member) in MEMBERS {
            let says = |medium, status, pcs| {
                let card = card(name, medium);
                card.set(reg::STATUS, status);
                card.set(reg::PCS_LSTAT, pcs);
                link_bps(&card, member)
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

    /// Goal: an I210 whose PHY has no clock is told; one with a flash is not asked; a lock that a
    /// killed process left is no obstacle; a PHY that does not answer is told. Method: the model;
    /// each in bounded time.
    #[test]
    fn what_is_wrong_with_a_card_is_told() {
        let start = std::time::Instant::now();
        let clockless = card("I210", 0);
        clockless.phy.borrow_mut().insert((252, 14), 0x12ff);
        assert_eq!(bring_up(&clockless, &I210), Ok(()), "it has a flash");
        clockless.set(reg::EECD, EECD_READ_DONE);
        for member in [&I210, &I211] {
            assert_eq!(bring_up(&clockless, member), Err(PhyTrouble::NoClock));
            assert_eq!((clockless.page.get(), clockless.word(reg::SW_FW_SYNC)), (0, 0));
        }
        let sound = card("I210", 0);
        // Nor does a card without a flash say that it was read.
        sound.set(reg::EECD, 0);
        assert_eq!(bring_up(&sound, &I210), Ok(()));
        for (name, member) in MEMBERS {
            let left = card(name, 0);
            left.set(reg::SWSM, SWSM_SOFTWARE | SWSM_SYNC);
            left.set(reg::SW_FW_SYNC, 1 << 2 | 1 << 6);
            assert_eq!(bring_up(&left, member), Ok(()), "{name}");
            assert_eq!(left.word(reg::SW_FW_SYNC), 1 << 6, "another port's is not ours");
            let mute = Card { is_mute: true, ..card(name, 0) };
            assert_eq!(bring_up(&mute, member), Err(PhyTrouble::Mute), "{name}");
            assert_eq!((mute.word(reg::SWSM), mute.word(reg::SW_FW_SYNC)), (0, 0), "{name}");
        }
        assert!(start.elapsed() < Duration::from_secs(30), "{:?}", start.elapsed());
    }

    /// Goal: a firmware that has the PHY, or the word that says who has it, is waited for as long
    /// as Intel's drivers wait, and nothing is touched meanwhile; one that keeps it is told in
    /// bounded time. Method: the model, which refuses accesses that are not ours.
    #[test]
    fn the_firmware_is_waited_for() {
        let slow = card("I210", 0);
        slow.firmware.set(150);
        // And what a killed process left.
        slow.set(reg::SW_FW_SYNC, 1 << 2);
        assert_eq!(bring_up(&slow, &I210), Ok(()));
        assert_eq!(slow.word(reg::SW_FW_SYNC), 0);
        let guarded = card("I210", 0);
        guarded.guarded_until.set(Some(Instant::now() + Duration::from_millis(300)));
        assert_eq!(bring_up(&guarded, &I210), Ok(()));
        assert_eq!((guarded.word(reg::SWSM), guarded.word(reg::SW_FW_SYNC)), (0, 0));
        let start = Instant::now();
        let kept = card("I210", 0);
        kept.firmware.set(u32::MAX);
        assert_eq!(bring_up(&kept, &I210), Err(PhyTrouble::Kept));
        let never = card("I210", 0);
        never.guarded_until.set(Some(start + Duration::from_secs(3600)));
        assert_eq!(bring_up(&never, &I210), Err(PhyTrouble::Kept));
        assert_eq!((kept.word(reg::SWSM), never.word(reg::SWSM)), (0, 0));
        assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    }

    /// Goal: the message says what helps, and not a reset where that does not.
    #[test]
    fn trouble_with_a_phy_is_told_with_what_helps() {
        let told = |trouble: PhyTrouble| trouble.of("0000:05:00.0").to_string();
        let clock = told(PhyTrouble::NoClock);
        let (back, again) = ("--unbind 0000:05:00.0", "--bind 0000:05:00.0");
        assert!(clock.contains("without a clock") && clock.contains(back), "{clock}");
        assert!(clock.ends_with(again) && !clock.contains("/reset"), "{clock}");
        let kept = told(PhyTrouble::Kept);
        assert!(kept.contains("keeps its PHY to itself") && !kept.contains("/reset"), "{kept}");
        assert!(kept.ends_with(back), "{kept}");
        assert!(told(PhyTrouble::Mute).ends_with("/sys/bus/pci/devices/0000:05:00.0/reset"));
    }
}
