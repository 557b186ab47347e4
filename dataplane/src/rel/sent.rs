//! The packets a session has in flight.
//!
//! Packets are numbered without holes and listed in that order until acknowledged in order. An
//! entry holds all that a retransmission needs except the payload, which stays in the application's
//! memory or in a pool.
//!
//! Loss is found by time (RFC 8985): a packet is lost when one that was sent later than it, by more
//! than the reordering allowance, has arrived; of two that were sent at once, the one with the
//! higher number is the later. The timer behind it is the caller's.
//!
//! On a lossless port only packets whose acknowledgement a completion waits for have an entry.

use std::mem::offset_of;

use barewire_driver::hint::cold;

pub use crate::rel::congestion::WINDOW;

use crate::rel::congestion::{CongestionControl, Controller};
use crate::rel::psn::Psn;
use crate::rel::rtt::Rtt;
use crate::slab::{Line, Link, Linked, List, NONE, Slab};
use crate::types::Instant;
use crate::wire::{AckOp, NopOp, RemoteRange, Ty};

/// Longest operation header of a reliable packet, with its eight bytes of remote CQ data.
pub const OP_MAX: usize = 48;

/// Where the payload of a packet lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyRef {
    /// Nowhere: there is none.
    None,
    /// `len` bytes at `offset` of the memory of transmit request `wr`.
    Wr {
        /// The request.
        wr: u32,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u32,
    },
    /// `len` bytes at `offset` of the operands that atomic request `wr` keeps.
    Operands {
        /// The request.
        wr: u32,
        /// First byte.
        offset: u32,
        /// Number of bytes.
        len: u32,
    },
    /// `len` bytes at `offset` of a memory region that a peer reads.
    Mr {
        /// The region.
        mr: u32,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u32,
        /// The peer's operation ends with it: endpoint whose counter counts it, or `NONE`.
        ends: u32,
        /// Its access to this region ends with it.
        region_ends: bool,
    },
    /// The old values that answer an atomic operation.
    Response {
        /// The answer's record.
        response: u32,
    },
    /// The first `len` bytes of a buffer of the aggregation pool, which hold several messages.
    Pack {
        /// The buffer.
        buf: u32,
        /// Number of bytes.
        len: u32,
    },
}

/// One packet in flight. `repr(C)`: the fields that an acknowledgement touches share a cache line;
/// the rest is for retransmission.
#[derive(Debug)]
#[repr(C)]
pub struct Sent {
    /// Its number.
    pub psn: Psn,
    /// The transmit request that waits for it, or [`NONE`].
    pub wr: u32,
    pub(crate) link: Link,
    /// When it was sent first, and last.
    pub first_at: Instant,
    /// See `first_at`.
    pub at: Instant,
    /// Eager units it used.
    pub units: u32,
    /// Its type.
    pub ty: Ty,
    /// Length of its operation header in `op`.
    pub op_len: u8,
    /// The peer has it, out of order.
    pub sacked: bool,
    /// To be sent again.
    pub lost: bool,
    /// Was sent more than once.
    pub rtx: bool,
    /// The peer refused it, and has been sent a NOP in its place since, or will be.
    pub refused: bool,
    /// Its payload.
    pub body: BodyRef,
    /// The operation header.
    pub op: [u8; OP_MAX],
}

const _: () = {
    assert!(SentPool::SLOT_LEN == 128, "an entry takes two lines");
    assert!(SentPool::HEAD_LEN + offset_of!(Sent, body) < 64, "what is acknowledged takes one");
};

impl Sent {
    /// A packet sent for the first time, with the first `op_len` bytes of `op`.
    #[inline(always)]
    pub fn new(
        psn: Psn,
        ty: Ty,
        (op, op_len): (&[u8; OP_MAX], usize),
        body: BodyRef,
        wr: u32,
        at: Instant,
    ) -> Self {
        Self {
            psn,
            wr,
            link: Link::default(),
            first_at: at,
            at,
            units: 0,
            ty,
            op_len: op_len as u8,
            sacked: false,
            lost: false,
            rtx: false,
            refused: false,
            body,
            op: *op,
        }
    }

    /// Whether it was sent after a packet with this time and number, or is that packet.
    fn is_later(&self, (at, psn): (Instant, Psn)) -> bool {
        self.at > at || self.at == at && self.psn.since(psn) >= 0
    }

    /// Becomes a NOP: keeps PSN and cost, and carries nothing.
    pub fn become_nop(&mut self) {
        let one_sided = matches!(self.ty, Ty::Write | Ty::Atomic);
        let drops = if one_sided { RemoteRange::unfinished(&self.op) } else { None };
        let nop = NopOp { units: self.units, cuts: self.ty == Ty::MsgM, drops };
        self.op_len = nop.emit(&mut self.op) as u8;
        (self.ty, self.body, self.wr) = (Ty::Nop, BodyRef::None, NONE);
    }
}

impl Linked<0> for Sent {
    fn link(&mut self) -> &mut Link {
        &mut self.link
    }

    fn link_ref(&self) -> &Link {
        &self.link
    }
}

/// Shared by all sessions of a node.
pub type SentPool = Slab<Sent, Line>;

/// What an acknowledgement reported for the first time.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sacked {
    /// Packets.
    pub count: u32,
    /// When the one that was sent last was sent, and its number.
    pub newest: Option<(Instant, Psn)>,
}

/// A packet acknowledged in order.
#[derive(Clone, Copy, Debug)]
pub struct Acked {
    /// Its entry.
    pub idx: u32,
    /// See [`Sent::wr`].
    pub wr: u32,
    /// See [`Sent::at`].
    pub at: Instant,
    /// See [`Sent::sacked`].
    pub sacked: bool,
    /// See [`Sent::rtx`].
    pub rtx: bool,
    /// Its payload is memory of request `wr`: nothing else is to be freed with it.
    pub of_request: bool,
}

/// An acknowledgement that no honest peer sends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckOfUnsent;

/// The send side of a session. In the order of declaration: the first two are used most. Counts of
/// packets fit 16 bits, as no more than [`WINDOW`] are listed.
#[derive(Debug, Default)]
#[repr(C)]
pub struct SendWindow<C = Controller> {
    /// Oldest packet not acknowledged.
    pub una: Psn,
    /// Credits the peer granted since the session began. (Here, behind the other thing that nearly
    /// every packet says; not looked at in this file.)
    pub credit: u32,
    /// Next packet to number.
    pub nxt: Psn,
    /// Packets marked lost and not yet sent again.
    pub lost: u16,
    /// Packets listed that the peer has.
    sacked: u16,
    /// Packets retransmitted because a timer fired; the peer may report them as duplicates.
    guesses: u16,
    /// The congestion window.
    pub cwnd: C,
    list: List<0>,
}

impl<C: CongestionControl> SendWindow<C> {
    /// Nothing in flight; the first packet will be `first`.
    pub fn new(first: Psn) -> Self {
        let (lost, sacked, guesses) = (0, 0, 0);
        let (cwnd, list) = (C::default(), List::default());
        Self { una: first, credit: 0, nxt: first, lost, sacked, guesses, cwnd, list }
    }

    /// What the peer has acknowledged and granted, as they stand in a packet, in as many of the
    /// lower bits: see [`EagerTaggedView::ack_credit`](crate::wire::EagerTaggedView::ack_credit).
    #[inline(always)]
    pub fn ack_credit(&self) -> u64 {
        u64::from(self.una.0) | u64::from(self.credit) << 32
    }

    /// Packets sent and not acknowledged in order.
    pub fn in_flight(&self) -> u32 {
        self.nxt.0.wrapping_sub(self.una.0)
    }

    /// Packets listed that are neither acknowledged nor marked lost: those under way.
    #[inline]
    pub fn pipe(&self) -> u32 {
        self.list.len - u32::from(self.sacked) - u32::from(self.lost)
    }

    /// Whether another packet may be numbered and sent.
    #[inline]
    pub fn open(&self) -> bool {
        self.in_flight() < WINDOW && self.room() > 0
    }

    /// Whether the next packet asks for an acknowledgement: if no later packet or timer will
    /// (`alone`), or if it closes the window.
    #[inline]
    pub fn asks(&self, alone: bool) -> bool {
        alone || self.room() <= 1 || self.in_flight() == WINDOW - 1
    }

    /// Room in the congestion window, packets.
    #[inline]
    pub fn room(&self) -> u32 {
        self.cwnd.window().saturating_sub(self.pipe())
    }

    /// Whether a lost packet may be sent again.
    #[inline]
    pub fn may_resend(&self) -> bool {
        self.pipe() < self.cwnd.window()
    }

    /// Whether no entry is held.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Numbers a packet that needs no entry.
    pub fn number(&mut self) -> Psn {
        let psn = self.nxt;
        self.nxt = psn.next();
        psn
    }

    /// Keeps the entry `idx` of the packet numbered last.
    pub fn push(&mut self, pool: &mut SentPool, idx: u32) {
        self.list.push_back(pool, idx);
    }

    /// Records the packet numbered last. The caller has checked that an entry is free.
    #[inline(always)]
    pub fn keep(&mut self, pool: &mut SentPool, mut sent: Sent) {
        sent.link = self.list.end();
        let idx = pool.alloc_with(|_| sent).expect("a free slot was seen");
        self.list.add(pool, idx);
    }

    /// The entry kept last.
    pub fn last(&self) -> Option<u32> {
        (self.list.tail != NONE).then_some(self.list.tail)
    }

    /// Whether `cack` acknowledges only what was sent.
    pub fn check(&self, cack: Psn) -> Result<(), AckOfUnsent> {
        let ahead = cack.0.wrapping_sub(self.una.0);
        let behind = self.una.0.wrapping_sub(cack.0);
        // An old acknowledgement that was overtaken lies at most a few windows back.
        if ahead <= self.in_flight() || behind <= u32::MAX / 2 { Ok(()) } else { Err(AckOfUnsent) }
    }

    /// Moves `una` up to `cack` (already checked) and says whether it moved. Entries before it stay
    /// listed until [`pop_acked`](Self::pop_acked) has given them back.
    pub fn advance(&mut self, cack: Psn) -> bool {
        if cack.since(self.una) <= 0 {
            return false;
        }
        self.una = cack;
        true
    }

    /// Unlinks the oldest entry if it is acknowledged in order. The caller frees it in the pool.
    #[inline(always)]
    pub fn pop_acked(&mut self, pool: &mut SentPool) -> Option<Acked> {
        let idx = self.list.head;
        if idx == NONE {
            return None;
        }
        let entry = &pool[idx];
        if entry.psn.since(self.una) >= 0 {
            return None;
        }
        let &Sent { wr, link, at, sacked, rtx, .. } = entry;
        let of_request = wr != NONE && matches!(entry.body, BodyRef::Wr { .. });
        if entry.lost || sacked {
            cold(());
            self.lost -= u16::from(entry.lost);
            self.sacked -= u16::from(sacked);
        }
        self.list.cut(pool, idx, link);
        Some(Acked { idx, wr, at, sacked, rtx, of_request })
    }

    /// Gives back any entry, for the end of a session.
    pub fn pop_any(&mut self, pool: &mut SentPool) -> Option<u32> {
        (self.lost, self.sacked) = (0, 0);
        self.list.pop_front(pool)
    }

    /// The round trip that an acknowledgement shows, if the packet it names is still listed. The
    /// peer says which copy of it arrived, so one that was sent again without need is measured as
    /// well.
    pub fn round_trip(&self, pool: &SentPool, now: Instant, ack: &AckOp) -> Option<u64> {
        // The answer to a probe names a packet that arrived long ago, as long as the delay field
        // can say or longer. Taken as a round trip, each would be longer than the last.
        if ack.delay == u16::MAX {
            return None;
        }
        let entry = &pool[self.by_psn(pool, ack.newest)?];
        let sent_at = if ack.resent { entry.at } else { entry.first_at };
        Some(now.since(sent_at).saturating_sub(u64::from(ack.delay) * 64).max(1))
    }

    /// Marks what the peer holds out of order.
    pub fn on_sack(
        &mut self,
        pool: &mut SentPool,
        now: Instant,
        ack: &AckOp,
        cack: Psn,
        rtt: &mut Rtt,
    ) -> Sacked {
        let mut news = Sacked::default();
        let mut at = self.first();
        while let Some(idx) = at {
            at = self.list.next(pool, idx);
            let entry = &mut pool[idx];
            let dist = entry.psn.since(cack);
            if dist < 1 {
                continue;
            }
            let (word, bit) = ((dist as usize - 1) / 64, (dist as usize - 1) % 64);
            if word >= usize::from(ack.count) {
                break;
            }
            if ack.words[word] >> bit & 1 == 0 || entry.sacked {
                continue;
            }
            entry.sacked = true;
            self.sacked += 1;
            news.count += 1;
            if entry.lost {
                entry.lost = false;
                self.lost -= 1;
            }
            if entry.rtx {
                rtt.on_resent_arrived();
                if now.since(entry.at) < rtt.min_ns() {
                    // The first copy arrived: the time of this one says nothing.
                    continue;
                }
            }
            if news.newest.is_none_or(|than| entry.is_later(than)) {
                news.newest = Some((entry.at, entry.psn));
            }
        }
        news
    }

    /// Marks as lost every packet sent more than the reordering allowance before `newest`, a packet
    /// that has arrived. Returns when the oldest of the others would be lost, if it is not
    /// acknowledged by then.
    pub fn detect(
        &mut self,
        pool: &mut SentPool,
        now: Instant,
        newest: (Instant, Psn),
        rtt: &Rtt,
    ) -> Option<Instant> {
        let (allowance, known) = (rtt.reorder_ns(), self.lost);
        let mut at = self.first();
        let mut again: Option<Instant> = None;
        while let Some(idx) = at {
            at = self.list.next(pool, idx);
            let entry = &mut pool[idx];
            if entry.sacked || entry.lost || entry.is_later(newest) {
                continue;
            }
            if allowance == 0 || entry.at + allowance < newest.0 {
                entry.lost = true;
                self.lost += 1;
            } else {
                let due = entry.at + allowance + rtt.srtt_ns();
                again = Some(again.map_or(due, |a| a.min(due)));
            }
        }
        self.tell_loss(now, known);
        again
    }

    /// Marks as lost what was sent before `before` and is not acknowledged: the timer expired.
    pub fn expire(&mut self, pool: &mut SentPool, now: Instant, before: Instant) {
        let known = self.lost;
        let mut at = self.first();
        while let Some(idx) = at {
            at = self.list.next(pool, idx);
            let entry = &mut pool[idx];
            if !entry.sacked && !entry.lost && entry.at <= before {
                entry.lost = true;
                self.lost += 1;
            }
        }
        self.tell_loss(now, known);
    }

    /// Tells the congestion control of what is lost beyond the packets that were `known` to be.
    fn tell_loss(&mut self, now: Instant, known: u16) {
        if self.lost > known {
            self.cwnd.on_loss(now, (self.lost - known).into());
        }
    }

    /// A packet was refused: it must be sent again as a NOP, whatever was reported of it. False if
    /// that is known already: the NOP is under way, and a timer repeats it. If every NACK were
    /// answered, each duplicated answer would be refused by the packet behind it, endlessly on a
    /// path with a long delay.
    #[must_use]
    pub fn on_refused(&mut self, pool: &mut SentPool, idx: u32) -> bool {
        if std::mem::replace(&mut pool[idx].refused, true) {
            return false;
        }
        if std::mem::take(&mut pool[idx].sacked) {
            self.sacked -= 1;
        }
        self.mark_lost(pool, idx);
        true
    }

    /// A timer fired: retransmits packet `idx` in case it is lost.
    pub fn guess(&mut self, pool: &mut SentPool, idx: u32) {
        self.guesses = self.guesses.saturating_add(1);
        self.mark_lost(pool, idx);
    }

    /// Gives up the oldest packets under way, as [`guess`](Self::guess) does, until another one may
    /// be sent: packets lost unnoticed would otherwise fill the window as long as nothing is sent.
    pub fn make_room(&mut self, pool: &mut SentPool) {
        while !self.may_resend() {
            let Some(idx) = self.find(pool, |e| !e.sacked && !e.lost) else { return };
            self.guess(pool, idx);
        }
    }

    /// Of `dups` duplicates, those that were retransmitted because later packets had overtaken
    /// them.
    pub fn overtaken(&mut self, dups: u8) -> u8 {
        let guessed = self.guesses.min(dups.into());
        self.guesses -= guessed;
        dups - guessed as u8
    }

    /// Marks one packet lost.
    pub fn mark_lost(&mut self, pool: &mut SentPool, idx: u32) {
        let entry = &mut pool[idx];
        if !entry.lost && !entry.sacked {
            entry.lost = true;
            self.lost += 1;
        }
    }

    /// The oldest packet marked lost.
    pub fn first_lost(&self, pool: &SentPool) -> Option<u32> {
        self.find(pool, |e| e.lost)
    }

    /// The oldest packet the peer does not have.
    pub fn oldest(&self, pool: &SentPool) -> Option<u32> {
        self.find(pool, |e| !e.sacked)
    }

    /// The newest packet the peer does not have, for a tail probe.
    pub fn newest(&self, pool: &SentPool) -> Option<u32> {
        let mut at = self.list.tail;
        while at != NONE {
            if !pool[at].sacked {
                return Some(at);
            }
            at = pool[at].link.prev;
        }
        None
    }

    /// The entry numbered `psn`.
    pub fn by_psn(&self, pool: &SentPool, psn: Psn) -> Option<u32> {
        self.find(pool, |e| e.psn == psn)
    }

    /// Takes the mark off a packet that is being sent again.
    pub fn on_resent(&mut self, pool: &mut SentPool, idx: u32, now: Instant) {
        let entry = &mut pool[idx];
        if entry.lost {
            entry.lost = false;
            self.lost -= 1;
        }
        entry.rtx = true;
        entry.at = now;
    }

    /// Calls `f` for every entry, oldest first.
    pub fn for_each(&self, pool: &mut SentPool, mut f: impl FnMut(&mut Sent)) {
        self.for_each_while(pool, |entry| {
            f(entry);
            true
        });
    }

    /// Calls `f` for the entries, oldest first, until it says false.
    pub fn for_each_while(&self, pool: &mut SentPool, mut f: impl FnMut(&mut Sent) -> bool) {
        let mut at = self.first();
        while let Some(idx) = at {
            if !f(&mut pool[idx]) {
                return;
            }
            at = self.list.next(pool, idx);
        }
    }

    fn first(&self) -> Option<u32> {
        (self.list.head != NONE).then_some(self.list.head)
    }

    fn find(&self, pool: &SentPool, f: impl Fn(&Sent) -> bool) -> Option<u32> {
        let mut at = self.first();
        while let Some(idx) = at {
            if f(&pool[idx]) {
                return Some(idx);
            }
            at = self.list.next(pool, idx);
        }
        None
    }
}
