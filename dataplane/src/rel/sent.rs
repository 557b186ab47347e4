//! The packets a session has in flight.
//!
//! Packets are numbered without holes, and each has a record until it is acknowledged in order.
//! Records are found by number: see `flight.rs`. A record holds all that a
//! retransmission needs except the payload, which stays in the application's memory or in a pool.
//!
//! Loss is found by time (RFC 8985): a packet is lost when one that was sent later than it, by more
//! than the reordering allowance, has arrived; of two that were sent at once, the one with the
//! higher number is the later. The timer behind it is the caller's.
//!
//! On a lossless port only packets whose acknowledgement a completion waits for have a record.

use std::mem::offset_of;
use std::ops::{Index, IndexMut};

use barewire_driver::hint::cold;
use bitflags::bitflags;

pub use crate::rel::congestion::{WINDOW, WINDOW_LOSSLESS};

use crate::idx::{EpIdx, MrIdx, PackIdx, ResponseIdx, RingIdx, SentIdx, TxIdx};
use crate::rel::congestion::{CongestionControl, Controller};
use crate::rel::flight::{Group, Ring, Rings};
use crate::rel::psn::Psn;
use crate::rel::rtt::Rtt;
use crate::slab::{Line, Slab};
use crate::types::Instant;
use crate::wire::{AckOp, NopOp, RemoteRange, Ty};

/// Longest operation header of a reliable packet, with its eight bytes of remote CQ data.
pub const RELIABLE_OP_MAX: usize = 48;

bitflags! {
    /// What counters hear when a peer has bytes of a region that it reads. The initiator knows how
    /// long its read is; here it is several READs, and each may be of another region.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ReadCounts: u8 {
        /// The endpoint's: the read ends with them.
        const ENDS = 1;
        /// The region's: what the read wants of it ends with them.
        const REGION_ENDS = 1 << 1;
        /// The endpoint's: how many they are.
        const BYTES = 1 << 2;
        /// The region's: how many they are.
        const REGION_BYTES = 1 << 3;
    }
}

impl ReadCounts {
    /// What remains for bytes that others of the same READ follow.
    pub const fn without_end(self) -> Self {
        self.difference(Self::ENDS.union(Self::REGION_ENDS))
    }
}

/// Where the payload of a packet lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyRef {
    /// Nowhere: there is none.
    None,
    /// `len` bytes at `offset` of the memory of transmit request `wr`.
    Wr {
        /// The request.
        wr: TxIdx,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u32,
    },
    /// `len` bytes at `offset` of the operands that atomic request `wr` keeps.
    Operands {
        /// The request.
        wr: TxIdx,
        /// First byte.
        offset: u32,
        /// Number of bytes.
        len: u32,
    },
    /// `len` bytes at `offset` of a memory region that a peer reads.
    Mr {
        /// The region.
        mr: MrIdx,
        /// First byte.
        offset: u64,
        /// Number of bytes.
        len: u32,
        /// The endpoint that the peer reads through, `NONE` once that is closed.
        ep: EpIdx,
        /// What counters hear when the peer has the bytes.
        counts: ReadCounts,
    },
    /// The old values that answer an atomic operation.
    Response {
        /// The answer's record.
        response: ResponseIdx,
    },
    /// The first `len` bytes of a buffer of the aggregation pool, which hold several messages.
    Pack {
        /// The buffer.
        buf: PackIdx,
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
    /// The transmit request that waits for it, or [`TxIdx::NONE`].
    pub wr: TxIdx,
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
    /// Was sent more than once.
    pub rtx: bool,
    /// The peer refused it, and has been sent a NOP in its place since, or will be.
    pub refused: bool,
    /// Its payload.
    pub body: BodyRef,
    /// The operation header.
    pub op: [u8; RELIABLE_OP_MAX],
}

const _: () = {
    type Records = Slab<Sent, Line>;
    assert!(Records::SLOT_LEN == 128, "a record takes two lines");
    assert!(Records::HEAD_LEN + offset_of!(Sent, body) < 64, "what is acknowledged takes one");
};

impl Sent {
    /// A packet sent for the first time, with the first `op_len` bytes of `op`.
    #[inline(always)]
    pub fn new(
        psn: Psn,
        ty: Ty,
        (op, op_len): (&[u8; RELIABLE_OP_MAX], usize),
        body: BodyRef,
        wr: TxIdx,
        at: Instant,
    ) -> Self {
        Self {
            psn,
            wr,
            first_at: at,
            at,
            units: 0,
            ty,
            op_len: op_len as u8,
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

    /// The round trip that an acknowledgement shows, which was measured on this packet. The peer
    /// says which copy of it arrived, so one that was sent again without need is measured as well.
    #[inline(always)]
    pub fn round_trip(&self, now: Instant, ack: &AckOp) -> Option<u64> {
        // The answer to a probe names a packet that arrived long ago, as long as the delay field
        // can say or longer. Taken as a round trip, each would be longer than the last.
        if ack.delay == u16::MAX {
            return None;
        }
        let sent_at = if ack.resent { self.at } else { self.first_at };
        Some(now.since(sent_at).saturating_sub(u64::from(ack.delay) * 64).max(1))
    }

    /// Becomes a NOP: keeps PSN and cost, and carries nothing.
    pub fn become_nop(&mut self) {
        let one_sided = matches!(self.ty, Ty::Write | Ty::Atomic);
        let drops = if one_sided { RemoteRange::unfinished(&self.op) } else { None };
        let nop = NopOp { units: self.units, cuts: self.ty == Ty::MsgM, drops };
        self.op_len = nop.emit(&mut self.op) as u8;
        (self.ty, self.body, self.wr) = (Ty::Nop, BodyRef::None, TxIdx::NONE);
    }
}

/// The records of all sessions of a node.
#[derive(Debug)]
pub struct SentPool {
    records: Slab<Sent, Line, SentIdx>,
    rings: Rings,
}

impl SentPool {
    /// Bytes of address space that `n` records take.
    pub fn room(n: usize) -> usize {
        Slab::<Sent, Line, SentIdx>::SLOT_LEN.saturating_mul(n)
    }

    /// Room for `n` records, of which no memory is touched before it is used.
    ///
    /// # Panics
    /// As [`Slab::with_capacity`].
    pub fn with_capacity(n: usize) -> Self {
        Self { records: Slab::with_lines(n), rings: Rings::default() }
    }

    /// Whether no record is free.
    #[inline(always)]
    pub fn is_full(&self) -> bool {
        self.records.is_full()
    }

    /// Records in use.
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Whether no record is in use.
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Prefetches the record that will be given out next.
    #[inline(always)]
    pub fn prefetch_free(&self) {
        self.records.prefetch_free();
    }

    /// All records, to change them.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sent> {
        self.records.iter_mut().map(|(_, sent)| sent)
    }

    /// Gives a record that stands in no flight back.
    ///
    /// # Panics
    /// If it is not in use.
    #[inline(always)]
    pub fn discard(&mut self, idx: SentIdx) {
        self.records.discard(idx);
    }

    /// [`discard`](Self::discard), and what it held.
    ///
    /// # Panics
    /// If it is not in use.
    pub fn free(&mut self, idx: SentIdx) -> Sent {
        self.records.free(idx)
    }
}

impl Index<SentIdx> for SentPool {
    type Output = Sent;

    #[inline(always)]
    fn index(&self, idx: SentIdx) -> &Sent {
        &self.records[idx]
    }
}

impl IndexMut<SentIdx> for SentPool {
    #[inline(always)]
    fn index_mut(&mut self, idx: SentIdx) -> &mut Sent {
        &mut self.records[idx]
    }
}

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
    pub idx: SentIdx,
    /// Its number.
    pub psn: Psn,
    /// See [`Sent::wr`].
    pub wr: TxIdx,
    /// See [`Sent::at`].
    pub at: Instant,
    /// It was reported out of order before.
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
/// packets fit 16 bits, as no more than [`WINDOW`] have a record.
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
    /// Packets with a record that the peer has.
    sacked: u16,
    /// Packets with a record, and the oldest of them.
    kept: u16,
    /// Packets that may be in flight: what the peer accepts, at most [`WINDOW`].
    limit: u16,
    first: Psn,
    /// Where the records stand in the pool's rings, if there are any.
    ring: RingIdx,
    /// Packets retransmitted because a timer fired; the peer may report them as duplicates.
    guesses: u16,
    /// The congestion window.
    pub cwnd: C,
}

impl<C: CongestionControl> SendWindow<C> {
    /// Nothing in flight; the first packet will be `first`. The peer accepts [`WINDOW_LOSSLESS`]
    /// packets until it [says](Self::set_limit) how many.
    pub fn new(first: Psn) -> Self {
        let limit = WINDOW_LOSSLESS as u16;
        Self { una: first, nxt: first, first, limit, ..Self::default() }
    }

    /// The peer accepts `window` packets, of which at most `own` are used.
    pub fn set_limit(&mut self, window: u16, own: u32) {
        self.limit = own.min(window.into()).min(WINDOW) as u16;
    }

    /// Packets that may be in flight, whatever the path has room for.
    #[inline(always)]
    pub fn limit(&self) -> u32 {
        self.limit.into()
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

    /// Packets with a record that are neither acknowledged nor marked lost: those under way.
    #[inline]
    pub fn pipe(&self) -> u32 {
        u32::from(self.kept) - u32::from(self.sacked) - u32::from(self.lost)
    }

    /// Whether another packet may be numbered and sent.
    #[inline]
    pub fn open(&self) -> bool {
        self.in_flight() < self.limit() && self.room() > 0
    }

    /// Whether the next packet asks for an acknowledgement: if no later packet or timer will
    /// (`alone`), or if it closes the window.
    #[inline]
    pub fn asks(&self, alone: bool) -> bool {
        alone || self.room() <= 1 || self.in_flight() + 1 == self.limit()
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

    /// Whether no packet has a record.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.kept == 0
    }

    /// Numbers a packet that needs no record.
    pub fn number(&mut self) -> Psn {
        let psn = self.nxt;
        self.nxt = psn.next();
        psn
    }

    /// Records the packet numbered last, and returns its record. The caller has seen that one is
    /// free.
    ///
    /// # Panics
    /// If none is.
    #[inline(always)]
    pub fn keep(&mut self, pool: &mut SentPool, sent: Sent) -> SentIdx {
        let psn = sent.psn;
        let idx = pool.records.alloc_with(|_| sent).expect("a free record was seen");
        if self.kept == 0 {
            (self.first, self.ring) = (psn, pool.rings.take());
        }
        self.ring = pool.rings.put(self.ring, self.first, psn, idx);
        self.kept += 1;
        idx
    }

    /// The record of the packet numbered last.
    #[inline]
    pub fn last(&self, pool: &SentPool) -> Option<SentIdx> {
        self.by_psn(pool, self.nxt.add(u32::MAX))
    }

    /// Whether `cack` acknowledges only what was sent.
    pub fn check(&self, cack: Psn) -> Result<(), AckOfUnsent> {
        let ahead = cack.0.wrapping_sub(self.una.0);
        let behind = self.una.0.wrapping_sub(cack.0);
        // An old acknowledgement that was overtaken lies at most a few windows back.
        if ahead <= self.in_flight() || behind <= u32::MAX / 2 { Ok(()) } else { Err(AckOfUnsent) }
    }

    /// Moves `una` up to `cack` (already checked) and says whether it moved. Records of packets
    /// before it stay until [`pop_acked`](Self::pop_acked) has taken them out.
    pub fn advance(&mut self, cack: Psn) -> bool {
        if cack.since(self.una) <= 0 {
            return false;
        }
        self.una = cack;
        true
    }

    /// Takes the oldest record out if its packet is acknowledged in order. The caller frees it in
    /// the pool.
    #[inline(always)]
    pub fn pop_acked(&mut self, pool: &mut SentPool) -> Option<Acked> {
        if self.kept == 0 || self.first.since(self.una) >= 0 {
            return None;
        }
        let (idx, sacked) = self.pop(pool);
        let entry = &pool[idx];
        let &Sent { psn, wr, at, rtx, .. } = entry;
        let of_request = wr != TxIdx::NONE && matches!(entry.body, BodyRef::Wr { .. });
        Some(Acked { idx, psn, wr, at, sacked, rtx, of_request })
    }

    /// Takes the oldest record out. Returns it, and whether the peer has reported its packet.
    #[inline(always)]
    fn pop(&mut self, pool: &mut SentPool) -> (SentIdx, bool) {
        let ring = &mut pool.rings[self.ring];
        let (group, bit) = ring.slot(self.first);
        let idx = group.record(self.first);
        group.kept &= !bit;
        let mut sacked = false;
        if (group.sacked | group.lost) & bit != 0 {
            cold(());
            sacked = group.sacked & bit != 0;
            self.sacked -= u16::from(sacked);
            self.lost -= u16::from(group.lost & bit != 0);
            group.sacked &= !bit;
            group.lost &= !bit;
        }
        self.kept -= 1;
        if self.kept == 0 {
            pool.rings.give_back(self.ring);
        } else {
            let next = self.first.next();
            let found = ring.find(next, self.nxt, |group| group.kept);
            self.first = found.expect("as many are kept as are counted");
        }
        (idx, sacked)
    }

    /// Takes out any record, for the end of a session.
    pub fn pop_any(&mut self, pool: &mut SentPool) -> Option<SentIdx> {
        (self.kept > 0).then(|| self.pop(pool).0)
    }

    /// [`Sent::round_trip`] of the packet that an acknowledgement names, if that has a record.
    pub fn round_trip(&self, pool: &SentPool, now: Instant, ack: &AckOp) -> Option<u64> {
        pool[self.by_psn(pool, ack.newest)?].round_trip(now, ack)
    }

    /// Marks what the peer holds out of order: bit `j` of word `i` of `sack` says that it has
    /// packet `cack + 1 + 64 i + j`.
    pub fn on_sack(
        &mut self,
        pool: &mut SentPool,
        now: Instant,
        sack: &[u64],
        cack: Psn,
        rtt: &mut Rtt,
    ) -> Sacked {
        let mut news = Sacked::default();
        if self.kept == 0 {
            return news;
        }
        for (i, word) in sack.iter().enumerate() {
            let from = cack.add(1 + 64 * i as u32);
            let unknown = |group: &Group| group.kept & !group.sacked;
            let mut fresh = word & pool.rings[self.ring].bits(from, unknown);
            while fresh != 0 {
                let psn = from.add(fresh.trailing_zeros());
                fresh &= fresh - 1;
                // The ring says nothing of packets that are not between these two.
                if self.first.since(psn) <= 0 && psn.since(self.nxt) < 0 {
                    self.note_sacked(pool, now, psn, rtt, &mut news);
                }
            }
        }
        news
    }

    fn note_sacked(
        &mut self,
        pool: &mut SentPool,
        now: Instant,
        psn: Psn,
        rtt: &mut Rtt,
        news: &mut Sacked,
    ) {
        let ring = &mut pool.rings[self.ring];
        let idx = ring.record(psn);
        let (group, bit) = ring.slot(psn);
        group.sacked |= bit;
        self.sacked += 1;
        self.lost -= u16::from(group.lost & bit != 0);
        group.lost &= !bit;
        news.count += 1;
        let entry = &pool[idx];
        if entry.rtx {
            rtt.on_resent_arrived();
            if now.since(entry.at) < rtt.min_ns() {
                // The first copy arrived: the time of this one says nothing.
                return;
            }
        }
        if news.newest.is_none_or(|than| entry.is_later(than)) {
            news.newest = Some((entry.at, entry.psn));
        }
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
        let mut again: Option<Instant> = None;
        self.each_under_way(pool, |entry| {
            if entry.is_later(newest) {
                return if entry.rtx { Found::Passed } else { Found::Enough };
            }
            if allowance == 0 || entry.at + allowance < newest.0 {
                return Found::Lost;
            }
            let due = entry.at + allowance + rtt.srtt_ns();
            again = Some(again.map_or(due, |a| a.min(due)));
            Found::Passed
        });
        self.report_loss(now, known, rtt);
        again
    }

    /// Marks as lost what was sent before `before` and is not acknowledged: the timer expired.
    pub fn expire(&mut self, pool: &mut SentPool, now: Instant, before: Instant, rtt: &Rtt) {
        let known = self.lost;
        self.each_under_way(pool, |entry| match entry.at <= before {
            true => Found::Lost,
            false if entry.rtx => Found::Passed,
            false => Found::Enough,
        });
        self.report_loss(now, known, rtt);
    }

    /// Asks `look` of every packet under way, oldest first. Later ones than a packet that was sent
    /// once were sent later, the last time too.
    fn each_under_way(&mut self, pool: &mut SentPool, mut look: impl FnMut(&Sent) -> Found) {
        let mut next = self.first;
        while let Some(psn) = self.find(pool, next, Group::under_way) {
            next = psn.next();
            let ring = &mut pool.rings[self.ring];
            match look(&pool.records[ring.record(psn)]) {
                Found::Passed => {}
                Found::Enough => return,
                Found::Lost => {
                    let (group, bit) = ring.slot(psn);
                    group.lost |= bit;
                    self.lost += 1;
                }
            }
        }
    }

    /// Tells the congestion control of what is lost beyond the packets that were `known` to be.
    fn report_loss(&mut self, now: Instant, known: u16, rtt: &Rtt) {
        if self.lost > known {
            self.cwnd.on_loss(now, (self.lost - known).into(), rtt);
        }
    }

    /// A packet was refused: it must be sent again as a NOP, whatever was reported of it. False if
    /// that is known already: the NOP is under way, and a timer repeats it. If every NACK were
    /// answered, each duplicated answer would be refused by the packet behind it, endlessly on a
    /// path with a long delay.
    #[must_use]
    pub fn on_refused(&mut self, pool: &mut SentPool, idx: SentIdx) -> bool {
        let entry = &mut pool[idx];
        if std::mem::replace(&mut entry.refused, true) {
            return false;
        }
        let psn = entry.psn;
        let (group, bit) = pool.rings[self.ring].slot(psn);
        self.sacked -= u16::from(group.sacked & bit != 0);
        group.sacked &= !bit;
        self.mark_lost(pool, psn);
        true
    }

    /// A timer fired: retransmits packet `psn`, which has a record, in case it is lost.
    pub fn guess(&mut self, pool: &mut SentPool, psn: Psn) {
        self.guesses = self.guesses.saturating_add(1);
        self.mark_lost(pool, psn);
    }

    /// Gives up the oldest packets under way, as [`guess`](Self::guess) does, until another one may
    /// be sent: packets lost unnoticed would otherwise fill the window as long as nothing is sent.
    pub fn make_room(&mut self, pool: &mut SentPool) {
        while !self.may_resend() {
            let Some(psn) = self.find(pool, self.first, Group::under_way) else { return };
            self.guess(pool, psn);
        }
    }

    /// Of `dups` duplicates, those that were retransmitted because later packets had overtaken
    /// them.
    pub fn overtaken(&mut self, dups: u8) -> u8 {
        let guessed = self.guesses.min(dups.into());
        self.guesses -= guessed;
        dups - guessed as u8
    }

    /// Marks one packet lost, which has a record.
    fn mark_lost(&mut self, pool: &mut SentPool, psn: Psn) {
        let (group, bit) = pool.rings[self.ring].slot(psn);
        if group.under_way() & bit != 0 {
            group.lost |= bit;
            self.lost += 1;
        }
    }

    /// The record of the oldest packet marked lost.
    pub fn first_lost(&self, pool: &SentPool) -> Option<SentIdx> {
        let psn = self.find(pool, self.first, |group| group.lost)?;
        Some(pool.rings[self.ring].record(psn))
    }

    /// The oldest packet the peer does not have.
    pub fn oldest(&self, pool: &SentPool) -> Option<Psn> {
        self.find(pool, self.first, |group| group.kept & !group.sacked)
    }

    /// The newest packet the peer does not have, for a tail probe.
    pub fn newest(&self, pool: &SentPool) -> Option<Psn> {
        let ring = self.ring(pool)?;
        ring.find_last(self.first, self.nxt, |group| group.kept & !group.sacked)
    }

    /// The record of packet `psn`.
    #[inline]
    pub fn by_psn(&self, pool: &SentPool, psn: Psn) -> Option<SentIdx> {
        let ring = self.ring(pool)?;
        let between = psn.since(self.first) >= 0 && psn.since(self.nxt) < 0;
        if between { ring.find_record(psn) } else { None }
    }

    /// Takes the mark off a packet that is being sent again.
    pub fn on_resent(&mut self, pool: &mut SentPool, idx: SentIdx, now: Instant) {
        let entry = &mut pool[idx];
        (entry.rtx, entry.at) = (true, now);
        let psn = entry.psn;
        let (group, bit) = pool.rings[self.ring].slot(psn);
        self.lost -= u16::from(group.lost & bit != 0);
        group.lost &= !bit;
    }

    /// Calls `f` for every record, oldest first.
    pub fn for_each(&self, pool: &mut SentPool, mut f: impl FnMut(&mut Sent)) {
        self.for_each_while(pool, |entry| {
            f(entry);
            true
        });
    }

    /// Calls `f` for the records, oldest first, until it says false.
    pub fn for_each_while(&self, pool: &mut SentPool, mut f: impl FnMut(&mut Sent) -> bool) {
        let mut next = self.first;
        // Behind the last record the ring may go round: later packets need not have one.
        for _ in 0..self.kept {
            let Some(psn) = self.find(pool, next, |group| group.kept) else { return };
            next = psn.next();
            let idx = pool.rings[self.ring].record(psn);
            if !f(&mut pool[idx]) {
                return;
            }
        }
    }

    /// Whether the peer has packet `psn`, which has a record.
    #[inline]
    pub(crate) fn is_sacked(&self, pool: &SentPool, psn: Psn) -> bool {
        pool.rings[self.ring].is(psn, |group| group.sacked)
    }

    /// Its ring, if any packet has a record.
    #[inline(always)]
    fn ring<'a>(&self, pool: &'a SentPool) -> Option<&'a Ring> {
        (self.kept > 0).then(|| &pool.rings[self.ring])
    }

    /// The first packet from `from` on with a record that `of` picks.
    #[inline]
    fn find(&self, pool: &SentPool, from: Psn, of: impl Fn(&Group) -> u64) -> Option<Psn> {
        self.ring(pool)?.find(from, self.nxt, of)
    }
}

/// What is to be done with a packet that was looked at.
enum Found {
    /// It is lost.
    Lost,
    /// Nothing.
    Passed,
    /// Nothing, neither with it nor with later ones.
    Enough,
}

#[cfg(test)]
mod tests;
