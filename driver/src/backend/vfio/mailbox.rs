//! The mailbox of a virtual function of an 82576 or an I350: how it asks the driver of its physical
//! function for what it cannot set itself (82576's datasheet, revision 2.61, section 7.10.2.9; the
//! numbers of the messages are those that the drivers of the physical function have in common).
//!
//! Sixteen words, which one of the two owns at a time, and a register with a bit for each event.
//! Each message gets an answer: its number, and whether it was granted or refused. Every wait has
//! an end, whatever the register says: the driver of the physical function may not be there, and is
//! believed nothing.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::device::Words;
use crate::port::MacAddr;

/// Registers, by their offset in BAR 0.
mod reg {
    pub(super) const VMBMEM: usize = 0x0800;
    pub(super) const V2PMAILBOX: usize = 0x0c40;
}

/// Bits of V2PMAILBOX. A request is there, an answer was read; both free the words.
const REQUEST: u32 = 1 << 0;
const ACK: u32 = 1 << 1;
/// We have the words, the other side has them.
const OURS: u32 = 1 << 2;
const THEIRS: u32 = 1 << 3;
/// Something was written for us. Reading the register clears this and `RESET_DONE`.
const CAME: u32 = 1 << 4;
/// The physical function is reset and its driver has not begun; it has since.
const RESET: u32 = 1 << 6;
const RESET_DONE: u32 = 1 << 7;

/// Words of the longest message that is sent here.
const WORDS: usize = 3;

/// Numbers of messages, in the lower half of the first word.
const NUMBER: u32 = 0xffff;
const SAY_RESET: u32 = 1;
const SET_MAC: u32 = 2;
const SET_LEN: u32 = 5;
const SET_ALL: u32 = 6;
/// From the physical function, unasked: it still runs.
const HERE: u32 = 0x0100;
/// With `SET_ALL`: frames to every group, to every station.
const ALL_GROUPS: u32 = 0x02 << 16;
const ALL_STATIONS: u32 = 0x01 << 16;
/// In an answer.
const GRANTED: u32 = 1 << 31;
const REFUSED: u32 = 1 << 30;

/// How long an answer may take. The other side is an interrupt of the kernel.
const PATIENCE: Duration = Duration::from_secs(1);
/// Between two looks.
const NAP: Duration = Duration::from_micros(20);

/// Why there is no answer that is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Trouble {
    /// None came in time.
    Silent,
    /// This is the answer's first word, and not one to what was asked.
    Strange(u32),
}

/// The mailbox of one virtual function.
pub(super) struct Mailbox<W> {
    words: W,
    patience: Duration,
    /// The physical function was seen to be reset: reading clears what says so.
    was_reset: Cell<bool>,
}

impl<W: Words> Mailbox<W> {
    /// The mailbox of these registers.
    pub(super) fn new(words: W) -> Self {
        Self { words, patience: PATIENCE, was_reset: Cell::new(false) }
    }

    /// Whether the physical function was reset since [`say_reset`](Self::say_reset), and all its
    /// virtual ones with it. Costs a read of a register.
    pub(super) fn is_over(&self) -> bool {
        self.bits();
        self.was_reset.get()
    }

    /// What V2PMAILBOX says.
    fn bits(&self) -> u32 {
        let bits = self.words.read(reg::V2PMAILBOX);
        if bits & (RESET | RESET_DONE) != 0 {
            self.was_reset.set(true);
        }
        bits
    }

    /// Says that the function was reset, without which nothing else is granted. The six bytes of
    /// the station's address that the physical function has for it, if it has one.
    ///
    /// # Errors
    /// [`Trouble`].
    pub(super) fn say_reset(&self) -> Result<Option<[u8; 6]>, Trouble> {
        let until = Instant::now() + self.patience;
        while self.bits() & (RESET | RESET_DONE) != 0 {
            nap(until)?;
        }
        self.was_reset.set(false);
        let (is_granted, [low, high]) = self.ask([SAY_RESET, 0, 0])?;
        Ok(is_granted.then(|| MacAddr::from_registers(low, high).0))
    }

    /// Asks for this station's address. `false`: it is refused.
    ///
    /// # Errors
    /// [`Trouble`].
    pub(super) fn set_mac(&self, mac: [u8; 6]) -> Result<bool, Trouble> {
        let [low, high] = MacAddr(mac).registers();
        Ok(self.ask([SET_MAC, low, high])?.0)
    }

    /// Asks for frames of up to `len` bytes with header and check sequence. `false`: it is refused.
    ///
    /// # Errors
    /// [`Trouble`].
    pub(super) fn set_len(&self, len: u32) -> Result<bool, Trouble> {
        Ok(self.ask([SET_LEN, len, 0])?.0)
    }

    /// Asks for frames to every group, and with `stations` to every station. `false`: it is
    /// refused.
    ///
    /// # Errors
    /// [`Trouble`].
    pub(super) fn set_all(&self, stations: bool) -> Result<bool, Trouble> {
        let stations = if stations { ALL_STATIONS } else { 0 };
        Ok(self.ask([SET_ALL | ALL_GROUPS | stations, 0, 0])?.0)
    }

    /// Sends a message, waits for its answer, and says whether that grants it, and the two words
    /// behind.
    fn ask(&self, message: [u32; WORDS]) -> Result<(bool, [u32; 2]), Trouble> {
        let until = Instant::now() + self.patience;
        self.take(until)?;
        for (i, word) in message.into_iter().enumerate() {
            self.words.write(reg::VMBMEM + 4 * i, word);
        }
        self.words.write(reg::V2PMAILBOX, REQUEST);
        loop {
            while self.bits() & CAME == 0 {
                nap(until)?;
            }
            self.take(until)?;
            let [first, rest @ ..] = [0, 1, 2].map(|i: usize| self.words.read(reg::VMBMEM + 4 * i));
            self.words.write(reg::V2PMAILBOX, ACK);
            let is_one = matches!(first & (GRANTED | REFUSED), GRANTED | REFUSED);
            match first & NUMBER {
                number if number == message[0] & NUMBER && is_one => {
                    return Ok((first & GRANTED != 0, rest));
                }
                HERE => nap(until)?,
                _ => return Err(Trouble::Strange(first)),
            }
        }
    }

    /// Takes the words.
    fn take(&self, until: Instant) -> Result<(), Trouble> {
        loop {
            self.words.write(reg::V2PMAILBOX, OURS);
            if self.bits() & (OURS | THEIRS) == OURS {
                return Ok(());
            }
            nap(until)?;
        }
    }
}

/// Waits a little.
///
/// # Errors
/// [`Trouble::Silent`] if `until` has come.
fn nap(until: Instant) -> Result<(), Trouble> {
    if Instant::now() > until {
        return Err(Trouble::Silent);
    }
    std::thread::sleep(NAP);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::*;

    use super::*;

    type Message = [u32; WORDS];

    /// The other side: what it says to each message, one after the other.
    struct Card<A> {
        answer: A,
        words: RefCell<[u32; 16]>,
        bits: Cell<u32>,
        asked: RefCell<Vec<Message>>,
        /// Said when the last was read.
        says: RefCell<Vec<Message>>,
    }

    impl<A: Fn(Message) -> Vec<Message>> Card<A> {
        fn new(answer: A) -> Self {
            let (words, bits) = (RefCell::new([0; 16]), Cell::new(RESET_DONE | CAME));
            Self { answer, words, bits, asked: RefCell::default(), says: RefCell::default() }
        }

        fn say(&self) {
            if let Some(next) = self.says.borrow_mut().pop() {
                self.words.borrow_mut()[..WORDS].copy_from_slice(&next);
                self.bits.set(self.bits.get() | CAME);
            }
        }
    }

    impl<A: Fn(Message) -> Vec<Message>> Words for &Card<A> {
        fn read(&self, at: usize) -> u32 {
            if at != 0xc40 {
                return self.words.borrow()[(at - 0x800) / 4];
            }
            let bits = self.bits.get();
            self.bits.set(bits & !(CAME | RESET_DONE));
            bits
        }

        fn write(&self, at: usize, value: u32) {
            let has_words = self.bits.get() & (OURS | THEIRS) == OURS;
            if at != 0xc40 {
                assert!(has_words, "words that the other side may be writing");
                self.words.borrow_mut()[(at - 0x800) / 4] = value;
                return;
            }
            let bits = self.bits.get() & !OURS;
            let is_free = bits & THEIRS == 0;
            self.bits.set(bits | if is_free { value & OURS } else { 0 });
            if value & REQUEST != 0 {
                let message = *self.words.borrow().first_chunk().unwrap();
                self.asked.borrow_mut().push(message);
                let mut says = (self.answer)(message);
                says.reverse();
                *self.says.borrow_mut() = says;
            }
            if value & (REQUEST | ACK) != 0 {
                self.say();
            }
        }
    }

    fn mailbox<W: Words>(words: W) -> Mailbox<W> {
        Mailbox { patience: Duration::from_millis(30), ..Mailbox::new(words) }
    }

    const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];

    /// Goal: each message is the one that drivers of the physical function know, and its answer is
    /// taken for what it says, also behind others that were not asked for. Method: a model that
    /// grants, and one that refuses.
    #[test]
    fn a_function_is_told_what_it_asks() {
        for is_granted in [true, false] {
            let bit = if is_granted { 1 << 31 } else { 1 << 30 };
            let here = [0x2000_0100, 7, 7];
            let card = Card::new(|[first, ..]| {
                vec![here, here, [first | bit | 1 << 29, 0x1200_5452, 0x5634]]
            });
            let mailbox = mailbox(&card);
            assert_eq!(mailbox.say_reset(), Ok(is_granted.then_some(MAC)));
            assert_eq!(mailbox.set_mac(MAC), Ok(is_granted));
            assert_eq!(mailbox.set_len(1518), Ok(is_granted));
            assert_eq!(mailbox.set_all(false), Ok(is_granted));
            assert_eq!(mailbox.set_all(true), Ok(is_granted));
            let expected = [
                [1, 0, 0],
                [2, 0x1200_5452, 0x5634],
                [5, 1518, 0],
                [0x2_0006, 0, 0],
                [0x3_0006, 0, 0],
            ];
            assert_eq!(*card.asked.borrow(), expected);
            assert!(!mailbox.is_over());
        }
    }

    /// Goal: a reset of the other side is told until this one says that it was reset as well.
    /// Method: it comes back before anybody has looked, or while something is asked.
    #[test]
    fn a_reset_of_the_other_side_is_told() {
        for (bits, asks) in [(RESET, false), (RESET_DONE, false), (RESET_DONE, true)] {
            let card = Card::new(|[first, ..]| vec![[first | 1 << 31, 0, 0]]);
            let mailbox = mailbox(&card);
            assert!(mailbox.say_reset().is_ok() && !mailbox.is_over());
            card.bits.set(bits);
            assert!(!asks || mailbox.set_len(1518).is_ok());
            assert!(mailbox.is_over());
            card.bits.set(0);
            assert!(mailbox.is_over());
            assert!(mailbox.say_reset().is_ok() && !mailbox.is_over());
        }
    }

    /// Goal: who is not there is not waited for. Method: models that say nothing, or nothing but
    /// that they are there; that keep the words; that stay in reset; that were pulled out.
    #[test]
    fn who_does_not_answer_is_given_up() {
        let ends = |asks: &dyn Fn() -> Result<Option<[u8; 6]>, Trouble>| {
            let start = Instant::now();
            assert_eq!(asks(), Err(Trouble::Silent));
            assert!(start.elapsed() < Duration::from_secs(5));
        };
        let silent = Card::new(|_| Vec::new());
        ends(&|| mailbox(&silent).say_reset());
        let busy = Card::new(|_| vec![[HERE, 0, 0]; 1_000_000]);
        ends(&|| mailbox(&busy).say_reset());
        let grants = |[first, ..]: Message| vec![[first | GRANTED, 0, 0]];
        for bits in [THEIRS, RESET] {
            let card = Card::new(grants);
            card.bits.set(bits);
            ends(&|| mailbox(&card).say_reset());
            assert!(card.asked.borrow().is_empty());
        }
        for word in [0, !0] {
            ends(&|| mailbox(Always(word)).say_reset());
        }
    }

    /// Goal: an answer to something else is none, nor is one that neither grants nor refuses, or
    /// does both. Method: models that say so.
    #[test]
    fn what_is_no_answer_is_not_taken_for_one() {
        for word in [2 | GRANTED, 5 | REFUSED, GRANTED, 1, 1 | GRANTED | REFUSED, !0, 0] {
            let card = Card::new(|_| vec![[word, 0, 0]]);
            assert_eq!(mailbox(&card).say_reset(), Err(Trouble::Strange(word)), "{word:#x}");
        }
    }

    /// Registers that all say the same.
    struct Always(u32);

    impl Words for Always {
        fn read(&self, _: usize) -> u32 {
            self.0
        }

        fn write(&self, _: usize, _: u32) {}
    }

    /// Registers that say anything.
    struct Noise(RefCell<std::vec::IntoIter<u32>>);

    impl Words for Noise {
        fn read(&self, _: usize) -> u32 {
            self.0.borrow_mut().next().unwrap_or(0)
        }

        fn write(&self, _: usize, _: u32) {}
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Goal: whatever the registers say, every call ends. Method: random words, then zeros.
        #[test]
        fn every_call_ends(words in proptest::collection::vec(any::<u32>(), 0..60)) {
            let mailbox = mailbox(Noise(RefCell::new(words.into_iter())));
            let start = Instant::now();
            let _ = mailbox.say_reset();
            let _ = mailbox.set_mac(MAC);
            prop_assert!(start.elapsed() < Duration::from_secs(5));
        }
    }
}
