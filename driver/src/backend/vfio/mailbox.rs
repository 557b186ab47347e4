//! Mailbox of a virtual function (VF) of an 82576 or an I350: requests to the driver of its
//! physical function (PF) for settings that a VF cannot change itself (82576's datasheet, revision
//! 2.61, section 7.10.2.9, whose names the bits of V2PMAILBOX have; the message numbers are those
//! that all PF drivers share).
//!
//! The mailbox has sixteen words of memory, which one side owns at a time, and a register with a
//! bit for each event. Each message is answered by its number with an ACK or NACK flag. Every wait
//! is bounded, whatever the register says: the PF driver may be absent, and is not trusted.

use std::cell::Cell;
use std::time::{Duration, Instant};

use super::device::RegisterAccess;
use crate::port::MacAddr;

/// Registers, by their offset in BAR 0.
mod reg {
    pub(super) const VMBMEM: usize = 0x0800;
    pub(super) const V2PMAILBOX: usize = 0x0c40;
}

/// Bits of V2PMAILBOX. REQ: a message to the PF was written. ACK: the PF's message was read. Both
/// release the memory.
const REQ: u32 = 1 << 0;
const ACK: u32 = 1 << 1;
/// VFU: the VF owns the memory. PFU: the PF owns it.
const VFU: u32 = 1 << 2;
const PFU: u32 = 1 << 3;
/// PFSTS: the PF wrote a message. Reading the register clears this and RSTD.
const PFSTS: u32 = 1 << 4;
/// RSTI: the PF is in reset. RSTD: its driver has finished the reset.
const RSTI: u32 = 1 << 6;
const RSTD: u32 = 1 << 7;

/// Words of the longest message sent.
const WORDS: usize = 3;

/// Message numbers, in the lower half of the first word.
const MSG_NUMBER_MASK: u32 = 0xffff;
const MSG_RESET: u32 = 1;
const MSG_SET_MAC: u32 = 2;
const MSG_SET_MAX_LEN: u32 = 5;
const MSG_SET_PROMISCUOUS: u32 = 6;
/// Unsolicited message of the PF: a keep-alive.
const MSG_PF_ALIVE: u32 = 0x0100;
/// Flags of `MSG_SET_PROMISCUOUS`: all multicast frames, all unicast frames.
const FLAG_ALL_MULTICAST: u32 = 0x02 << 16;
const FLAG_ALL_UNICAST: u32 = 0x01 << 16;
/// Flags of a reply.
const REPLY_ACK: u32 = 1 << 31;
const REPLY_NACK: u32 = 1 << 30;

/// Longest wait for a reply, which an interrupt handler of the kernel writes.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);
/// Interval between two reads of the register.
const POLL_INTERVAL: Duration = Duration::from_micros(20);

/// Why a request has no valid reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MailboxError {
    /// No reply in time.
    Timeout,
    /// First word of a reply that does not match the request.
    UnexpectedReply(u32),
}

/// The mailbox of one VF.
pub(super) struct Mailbox<W> {
    regs: W,
    timeout: Duration,
    /// A reset of the PF was observed: reading the register clears its bit.
    pf_reset_seen: Cell<bool>,
}

impl<W: RegisterAccess> Mailbox<W> {
    /// The mailbox at these registers.
    pub(super) fn new(regs: W) -> Self {
        Self { regs, timeout: REPLY_TIMEOUT, pf_reset_seen: Cell::new(false) }
    }

    /// Whether the PF, and so its VFs, were reset since [`send_reset`](Self::send_reset). Costs a
    /// register read.
    pub(super) fn was_pf_reset(&self) -> bool {
        self.read_status();
        self.pf_reset_seen.get()
    }

    /// Reads V2PMAILBOX and remembers its reset bits.
    fn read_status(&self) -> u32 {
        let bits = self.regs.read(reg::V2PMAILBOX);
        if bits & (RSTI | RSTD) != 0 {
            self.pf_reset_seen.set(true);
        }
        bits
    }

    /// Reports the reset of this VF, which the PF requires before other requests. Returns the MAC
    /// address that the PF assigned, if any.
    ///
    /// # Errors
    /// [`MailboxError`].
    pub(super) fn send_reset(&self) -> Result<Option<[u8; 6]>, MailboxError> {
        let until = Instant::now() + self.timeout;
        while self.read_status() & (RSTI | RSTD) != 0 {
            sleep_before(until)?;
        }
        self.pf_reset_seen.set(false);
        let (is_granted, [low, high]) = self.request([MSG_RESET, 0, 0])?;
        Ok(is_granted.then(|| MacAddr::from_registers(low, high).0))
    }

    /// Requests this MAC address. `false`: refused.
    ///
    /// # Errors
    /// [`MailboxError`].
    pub(super) fn set_mac(&self, mac: [u8; 6]) -> Result<bool, MailboxError> {
        let [low, high] = MacAddr(mac).registers();
        Ok(self.request([MSG_SET_MAC, low, high])?.0)
    }

    /// Requests frames of up to `len` bytes, with header and FCS. `false`: refused.
    ///
    /// # Errors
    /// [`MailboxError`].
    pub(super) fn set_max_frame_len(&self, len: u32) -> Result<bool, MailboxError> {
        Ok(self.request([MSG_SET_MAX_LEN, len, 0])?.0)
    }

    /// Requests all multicast frames, and with `unicast` all unicast frames. `false`: refused.
    ///
    /// # Errors
    /// [`MailboxError`].
    pub(super) fn set_promiscuous(&self, unicast: bool) -> Result<bool, MailboxError> {
        let unicast = if unicast { FLAG_ALL_UNICAST } else { 0 };
        Ok(self.request([MSG_SET_PROMISCUOUS | FLAG_ALL_MULTICAST | unicast, 0, 0])?.0)
    }

    /// Sends a message and waits for its reply. Returns whether it is an ACK, and its other two
    /// words.
    fn request(&self, message: [u32; WORDS]) -> Result<(bool, [u32; 2]), MailboxError> {
        let until = Instant::now() + self.timeout;
        self.lock(until)?;
        for (i, word) in message.into_iter().enumerate() {
            self.regs.write(reg::VMBMEM + 4 * i, word);
        }
        self.regs.write(reg::V2PMAILBOX, REQ);
        loop {
            while self.read_status() & PFSTS == 0 {
                sleep_before(until)?;
            }
            self.lock(until)?;
            let [first, rest @ ..] = [0, 1, 2].map(|i: usize| self.regs.read(reg::VMBMEM + 4 * i));
            self.regs.write(reg::V2PMAILBOX, ACK);
            let is_one = matches!(first & (REPLY_ACK | REPLY_NACK), REPLY_ACK | REPLY_NACK);
            match first & MSG_NUMBER_MASK {
                number if number == message[0] & MSG_NUMBER_MASK && is_one => {
                    return Ok((first & REPLY_ACK != 0, rest));
                }
                MSG_PF_ALIVE => sleep_before(until)?,
                _ => return Err(MailboxError::UnexpectedReply(first)),
            }
        }
    }

    /// Acquires ownership of the memory (VFU).
    fn lock(&self, until: Instant) -> Result<(), MailboxError> {
        loop {
            self.regs.write(reg::V2PMAILBOX, VFU);
            if self.read_status() & (VFU | PFU) == VFU {
                return Ok(());
            }
            sleep_before(until)?;
        }
    }
}

/// Sleeps for [`POLL_INTERVAL`].
///
/// # Errors
/// [`MailboxError::Timeout`] if `until` has passed.
fn sleep_before(until: Instant) -> Result<(), MailboxError> {
    if Instant::now() > until {
        return Err(MailboxError::Timeout);
    }
    std::thread::sleep(POLL_INTERVAL);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::*;

    use super::*;

    type Message = [u32; WORDS];

    /// Model of the PF: `answer` returns the messages that it sends in response to one.
    struct PfModel<A> {
        answer: A,
        regs: RefCell<[u32; 16]>,
        bits: Cell<u32>,
        requests: RefCell<Vec<Message>>,
        /// Messages to send, each once the previous one was read.
        replies: RefCell<Vec<Message>>,
    }

    impl<A: Fn(Message) -> Vec<Message>> PfModel<A> {
        fn new(answer: A) -> Self {
            let (regs, bits) = (RefCell::new([0; 16]), Cell::new(RSTD | PFSTS));
            Self { answer, regs, bits, requests: RefCell::default(), replies: RefCell::default() }
        }

        fn send_next(&self) {
            if let Some(next) = self.replies.borrow_mut().pop() {
                self.regs.borrow_mut()[..WORDS].copy_from_slice(&next);
                self.bits.set(self.bits.get() | PFSTS);
            }
        }
    }

    impl<A: Fn(Message) -> Vec<Message>> RegisterAccess for &PfModel<A> {
        fn read(&self, at: usize) -> u32 {
            if at != 0xc40 {
                return self.regs.borrow()[(at - 0x800) / 4];
            }
            let bits = self.bits.get();
            self.bits.set(bits & !(PFSTS | RSTD));
            bits
        }

        fn write(&self, at: usize, value: u32) {
            let has_words = self.bits.get() & (VFU | PFU) == VFU;
            if at != 0xc40 {
                assert!(has_words, "words that the other side may be writing");
                self.regs.borrow_mut()[(at - 0x800) / 4] = value;
                return;
            }
            let bits = self.bits.get() & !VFU;
            let is_free = bits & PFU == 0;
            self.bits.set(bits | if is_free { value & VFU } else { 0 });
            if value & REQ != 0 {
                let message = *self.regs.borrow().first_chunk().unwrap();
                self.requests.borrow_mut().push(message);
                let mut replies = (self.answer)(message);
                replies.reverse();
                *self.replies.borrow_mut() = replies;
            }
            if value & (REQ | ACK) != 0 {
                self.send_next();
            }
        }
    }

    fn mailbox<W: RegisterAccess>(regs: W) -> Mailbox<W> {
        Mailbox { timeout: Duration::from_millis(30), ..Mailbox::new(regs) }
    }

    const MAC: [u8; 6] = [0x52, 0x54, 0, 0x12, 0x34, 0x56];

    /// Goal: each message is encoded as PF drivers expect, and its reply is decoded, also after
    /// unsolicited messages. Method: a model that acknowledges, and one that refuses.
    #[test]
    fn requests_and_replies_are_encoded_as_pf_drivers_expect() {
        for is_granted in [true, false] {
            let bit = if is_granted { 1 << 31 } else { 1 << 30 };
            let here = [0x2000_0100, 7, 7];
            let pf = PfModel::new(|[first, ..]| {
                vec![here, here, [first | bit | 1 << 29, 0x1200_5452, 0x5634]]
            });
            let mailbox = mailbox(&pf);
            assert_eq!(mailbox.send_reset(), Ok(is_granted.then_some(MAC)));
            assert_eq!(mailbox.set_mac(MAC), Ok(is_granted));
            assert_eq!(mailbox.set_max_frame_len(1518), Ok(is_granted));
            assert_eq!(mailbox.set_promiscuous(false), Ok(is_granted));
            assert_eq!(mailbox.set_promiscuous(true), Ok(is_granted));
            let expected = [
                [1, 0, 0],
                [2, 0x1200_5452, 0x5634],
                [5, 1518, 0],
                [0x2_0006, 0, 0],
                [0x3_0006, 0, 0],
            ];
            assert_eq!(*pf.requests.borrow(), expected);
            assert!(!mailbox.was_pf_reset());
        }
    }

    /// Goal: a reset of the PF is reported until the VF sends its own reset. Method: the reset ends
    /// before anybody has read the register, or during a request.
    #[test]
    fn a_reset_of_the_pf_is_reported() {
        for (bits, asks) in [(RSTI, false), (RSTD, false), (RSTD, true)] {
            let pf = PfModel::new(|[first, ..]| vec![[first | 1 << 31, 0, 0]]);
            let mailbox = mailbox(&pf);
            assert!(mailbox.send_reset().is_ok() && !mailbox.was_pf_reset());
            pf.bits.set(bits);
            assert!(!asks || mailbox.set_max_frame_len(1518).is_ok());
            assert!(mailbox.was_pf_reset());
            pf.bits.set(0);
            assert!(mailbox.was_pf_reset());
            assert!(mailbox.send_reset().is_ok() && !mailbox.was_pf_reset());
        }
    }

    /// Goal: requests to an absent PF time out. Method: models that never reply, that only send
    /// keep-alives, that keep the memory, that stay in reset, that were unplugged.
    #[test]
    fn an_absent_pf_times_out() {
        let ends = |asks: &dyn Fn() -> Result<Option<[u8; 6]>, MailboxError>| {
            let start = Instant::now();
            assert_eq!(asks(), Err(MailboxError::Timeout));
            assert!(start.elapsed() < Duration::from_secs(5));
        };
        let silent = PfModel::new(|_| Vec::new());
        ends(&|| mailbox(&silent).send_reset());
        let busy = PfModel::new(|_| vec![[MSG_PF_ALIVE, 0, 0]; 1_000_000]);
        ends(&|| mailbox(&busy).send_reset());
        let grants = |[first, ..]: Message| vec![[first | REPLY_ACK, 0, 0]];
        for bits in [PFU, RSTI] {
            let pf = PfModel::new(grants);
            pf.bits.set(bits);
            ends(&|| mailbox(&pf).send_reset());
            assert!(pf.requests.borrow().is_empty());
        }
        for word in [0, !0] {
            ends(&|| mailbox(Always(word)).send_reset());
        }
    }

    /// Goal: a reply with another number, or with neither or both of ACK and NACK, is an error.
    /// Method: models that send such replies.
    #[test]
    fn an_unexpected_reply_is_an_error() {
        for word in [2 | REPLY_ACK, 5 | REPLY_NACK, REPLY_ACK, 1, 1 | REPLY_ACK | REPLY_NACK, !0, 0]
        {
            let pf = PfModel::new(|_| vec![[word, 0, 0]]);
            assert_eq!(
                mailbox(&pf).send_reset(),
                Err(MailboxError::UnexpectedReply(word)),
                "{word:#x}"
            );
        }
    }

    /// Registers that all have the same value.
    struct Always(u32);

    impl RegisterAccess for Always {
        fn read(&self, _: usize) -> u32 {
            self.0
        }

        fn write(&self, _: usize, _: u32) {}
    }

    /// Registers with random values.
    struct Noise(RefCell<std::vec::IntoIter<u32>>);

    impl RegisterAccess for Noise {
        fn read(&self, _: usize) -> u32 {
            self.0.borrow_mut().next().unwrap_or(0)
        }

        fn write(&self, _: usize, _: u32) {}
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        /// Goal: every call ends, whatever the registers hold. Method: random values, then zeros.
        #[test]
        fn every_call_ends(regs in proptest::collection::vec(any::<u32>(), 0..60)) {
            let mailbox = mailbox(Noise(RefCell::new(regs.into_iter())));
            let start = Instant::now();
            let _ = mailbox.send_reset();
            let _ = mailbox.set_mac(MAC);
            prop_assert!(start.elapsed() < Duration::from_secs(5));
        }
    }
}
