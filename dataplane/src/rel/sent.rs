//! The send window of a session: its packets in flight.
//!
//! Packets have consecutive PSNs, and each has a record until it is acknowledged in order. Records
//! are found by PSN: see `flight.rs`. A record holds everything that a retransmission needs except
//! the payload, which stays in the application's memory or in a pool.
//!
//! Loss detection is by time (RFC 8985): a packet is lost once a packet that was sent later, by
//! more than the reordering allowance, has arrived; of two packets sent at the same time, the one
//! with the higher PSN counts as later. The caller runs the timer.
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
    /// Which counters are incremented when the peer has received bytes of a region that it reads.
    /// The initiator knows the length of its read; here it arrives as several READs, and each may
    /// be of another region.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct ReadCounts: u8 {
        /// The endpoint's operation counter: the read ends with these bytes.
        const ENDS = 1;
        /// The region's operation counter: the read's part of this region ends with these bytes.
        const REGION_ENDS = 1 << 1;
        /// The endpoint's byte counter.
        const BYTES = 1 << 2;
        /// The region's byte counter.
        const REGION_BYTES = 1 << 3;
    }
}

impl ReadCounts {
    /// The counters for bytes that are followed by others of the same READ.
    pub const fn without_end(self) -> Self {
        self.difference(Self::ENDS.union(Self::REGION_ENDS))
    }
}

/// Location of a packet's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BodyRef {
    /// No payload.
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
        /// The endpoint that the peer reads through, `NONE` once it is closed.
        ep: EpIdx,
        /// The counters to increment when the peer has received the bytes.
        counts: ReadCounts,
    },
    /// The old values in the response to an atomic operation.
    Response {
        /// The response's record.
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

/// One packet in flight. `repr(C)`: the fields that an acknowledgement accesses share a cache line;
/// the others are for retransmission.
#[derive(Debug)]
#[repr(C)]
pub struct Sent {
    /// The packet's PSN.
    pub psn: Psn,
    /// The transmit request that waits for the acknowledgement, or [`TxIdx::NONE`].
    pub wr: TxIdx,
    /// Time of the first transmission.
    pub first_at: Instant,
    /// Time of the last transmission.
    pub at: Instant,
    /// Eager units that the packet used.
    pub units: u32,
    /// The packet's type.
    pub ty: Ty,
    /// Length of the operation header in `op`, bytes.
    pub op_len: u8,
    /// Whether the packet was retransmitted.
    pub rtx: bool,
    /// Whether the peer refused the packet; a NOP replaces it.
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
    /// A packet sent for the first time, with the first `op_len` bytes of `op` as its header.
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

    /// Whether it was sent after, or is, the packet with this send time and PSN.
    fn is_later(&self, (at, psn): (Instant, Psn)) -> bool {
        self.at > at || self.at == at && self.psn.since(psn) >= 0
    }

    /// The round-trip sample of an acknowledgement that was measured on this packet. The peer
    /// reports which copy of the packet arrived, so a spuriously retransmitted packet yields a
    /// sample as well.
    #[inline(always)]
    pub fn round_trip(&self, now: Instant, ack: &AckOp) -> Option<u64> {
        // The answer to a probe names a packet whose arrival is as long ago as the delay field can
        // express, or longer. As samples, such round trips would grow without limit.
        if ack.delay == u16::MAX {
            return None;
        }
        let sent_at = if ack.resent { self.at } else { self.first_at };
        Some(now.since(sent_at).saturating_sub(u64::from(ack.delay) * 64).max(1))
    }

    /// Turns the packet into a NOP: PSN and cost stay, header and payload go.
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
    /// Address space that `n` records take, bytes.
    pub fn room(n: usize) -> usize {
        Slab::<Sent, Line, SentIdx>::SLOT_LEN.saturating_mul(n)
    }

    /// A pool of `n` records. A record's memory is not touched before its first use.
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

    /// Prefetches the record that will be allocated next.
    #[inline(always)]
    pub fn prefetch_free(&self) {
        self.records.prefetch_free();
    }

    /// All records, mutable.
    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Sent> {
        self.records.iter_mut().map(|(_, sent)| sent)
    }

    /// Frees a record that is in no ring.
    ///
    /// # Panics
    /// If it is not in use.
    #[inline(always)]
    pub fn discard(&mut self, idx: SentIdx) {
        self.records.discard(idx);
    }

    /// [`discard`](Self::discard) that returns the record.
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

/// What an acknowledgement newly reported out of order.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sacked {
    /// Number of packets.
    pub count: u32,
    /// Send time and PSN of the packet among them that was sent last.
    pub newest: Option<(Instant, Psn)>,
}

/// A packet that was acknowledged in order.
#[derive(Clone, Copy, Debug)]
pub struct Acked {
    /// The packet's record.
    pub idx: SentIdx,
    /// The packet's PSN.
    pub psn: Psn,
    /// See [`Sent::wr`].
    pub wr: TxIdx,
    /// See [`Sent::at`].
    pub at: Instant,
    /// Whether it was acknowledged out of order before.
    pub sacked: bool,
    /// See [`Sent::rtx`].
    pub rtx: bool,
    /// Whether its payload is memory of request `wr`, so that nothing else must be freed with it.
    pub of_request: bool,
}

/// Error: an acknowledgement of packets that were never sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AckOfUnsent;

/// The send window of a session. In order of declaration: the first two fields are used most.
/// Packet counts fit 16 bits, since at most [`WINDOW`] packets have a record.
#[derive(Debug, Default)]
#[repr(C)]
pub struct SendWindow<C = Controller> {
    /// Oldest unacknowledged packet.
    pub una: Psn,
    /// Eager units that the peer has granted since the session began. (It is here to be next to the
    /// acknowledgement, which nearly every packet carries as well; this file does not use it.)
    pub credit: u32,
    /// PSN of the next packet.
    pub nxt: Psn,
    /// Packets marked lost and not yet retransmitted.
    pub lost: u16,
    /// Packets with a record that the peer has received.
    sacked: u16,
    /// Number of packets with a record. The oldest of them is `first`.
    kept: u16,
    /// Most packets in flight: the peer's window, at most [`WINDOW`].
    limit: u16,
    first: Psn,
    /// The session's retransmission ring, if any packet has a record.
    ring: RingIdx,
    /// Speculative retransmissions by a timer; the peer may report them as duplicates.
    speculative: u16,
    /// The congestion window.
    pub cwnd: C,
}

impl<C: CongestionControl> SendWindow<C> {
    /// A window without packets in flight, whose first packet will be `first`. The peer's window is
    /// [`WINDOW_LOSSLESS`] packets until [`set_limit`](Self::set_limit).
    pub fn new(first: Psn) -> Self {
        let limit = WINDOW_LOSSLESS as u16;
        Self { una: first, nxt: first, first, limit, ..Self::default() }
    }

    /// Sets the peer's window to `window` packets, of which at most `own` are used.
    pub fn set_limit(&mut self, window: u16, own: u32) {
        self.limit = own.min(window.into()).min(WINDOW) as u16;
    }

    /// Most packets in flight, regardless of congestion.
    #[inline(always)]
    pub fn limit(&self) -> u32 {
        self.limit.into()
    }

    /// Acknowledged PSN and granted credit, packed as in a packet, in its number of lower bits: see
    /// [`EagerTaggedView::ack_credit`](crate::wire::EagerTaggedView::ack_credit).
    #[inline(always)]
    pub fn ack_credit(&self) -> u64 {
        u64::from(self.una.0) | u64::from(self.credit) << 32
    }

    /// Packets sent and not acknowledged in order.
    pub fn in_flight(&self) -> u32 {
        self.nxt.0.wrapping_sub(self.una.0)
    }

    /// Packets with a record in flight: neither acknowledged nor marked lost.
    #[inline]
    pub fn pipe(&self) -> u32 {
        u32::from(self.kept) - u32::from(self.sacked) - u32::from(self.lost)
    }

    /// Whether the window permits another packet.
    #[inline]
    pub fn open(&self) -> bool {
        self.in_flight() < self.limit() && self.room() > 0
    }

    /// Whether the next packet requests an acknowledgement: if neither a later packet nor a timer
    /// will (`alone`), or if the packet fills the window.
    #[inline]
    pub fn asks_ack(&self, alone: bool) -> bool {
        alone || self.room() <= 1 || self.in_flight() + 1 == self.limit()
    }

    /// Room in the congestion window, packets.
    #[inline]
    pub fn room(&self) -> u32 {
        self.cwnd.window().saturating_sub(self.pipe())
    }

    /// Whether a lost packet may be retransmitted.
    #[inline]
    pub fn may_resend(&self) -> bool {
        self.pipe() < self.cwnd.window()
    }

    /// Whether no packet has a record.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.kept == 0
    }

    /// Assigns the next PSN to a packet without a record.
    pub fn number(&mut self) -> Psn {
        let psn = self.nxt;
        self.nxt = psn.next();
        psn
    }

    /// Records the packet with the PSN assigned last, and returns its record.
    ///
    /// # Panics
    /// If no record is free; the caller must check that before.
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

    /// The record of the packet with the PSN assigned last.
    #[inline]
    pub fn last(&self, pool: &SentPool) -> Option<SentIdx> {
        self.by_psn(pool, self.nxt.add(u32::MAX))
    }

    /// Whether `cack` acknowledges only what was sent.
    pub fn check(&self, cack: Psn) -> Result<(), AckOfUnsent> {
        let ahead = cack.0.wrapping_sub(self.una.0);
        let behind = self.una.0.wrapping_sub(cack.0);
        // An old, overtaken acknowledgement is at most a few windows back.
        if ahead <= self.in_flight() || behind <= u32::MAX / 2 { Ok(()) } else { Err(AckOfUnsent) }
    }

    /// Advances `una` to `cack` (already checked) and returns whether it moved. Records of packets
    /// before it stay until [`pop_acked`](Self::pop_acked) has removed them.
    pub fn advance(&mut self, cack: Psn) -> bool {
        if cack.since(self.una) <= 0 {
            return false;
        }
        self.una = cack;
        true
    }

    /// Removes the oldest record if its packet is acknowledged in order. The caller frees it in the
    /// pool.
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

    /// Removes the oldest record. Returns it, and whether its packet was acknowledged out of order.
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
            pool.rings.release(self.ring);
        } else {
            let next = self.first.next();
            let found = ring.find(next, self.nxt, |group| group.kept);
            self.first = found.expect("as many are kept as are counted");
        }
        (idx, sacked)
    }

    /// Removes any record, at the end of a session.
    pub fn pop_any(&mut self, pool: &mut SentPool) -> Option<SentIdx> {
        (self.kept > 0).then(|| self.pop(pool).0)
    }

    /// [`Sent::round_trip`] of the packet that an acknowledgement names, if it has a record.
    pub fn round_trip(&self, pool: &SentPool, now: Instant, ack: &AckOp) -> Option<u64> {
        pool[self.by_psn(pool, ack.newest)?].round_trip(now, ack)
    }

    /// Marks the packets that the peer has received out of order: bit `j` of word `i` of `sack` is
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
                // The ring is defined only for packets between these two.
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
                // The first copy arrived: the send time of the last one is no sample.
                return;
            }
        }
        if news.newest.is_none_or(|than| entry.is_later(than)) {
            news.newest = Some((entry.at, entry.psn));
        }
    }

    /// Marks as lost every packet that was sent more than the reordering allowance before `newest`,
    /// a packet that has arrived. Returns when the oldest of the other packets would be lost, if it
    /// is not acknowledged by then.
    pub fn detect(
        &mut self,
        pool: &mut SentPool,
        now: Instant,
        newest: (Instant, Psn),
        rtt: &Rtt,
    ) -> Option<Instant> {
        let (allowance, known) = (rtt.reorder_ns(), self.lost);
        let mut again: Option<Instant> = None;
        self.scan_in_flight(pool, |entry| {
            if entry.is_later(newest) {
                return if entry.rtx { LossCheck::InFlight } else { LossCheck::Stop };
            }
            if allowance == 0 || entry.at + allowance < newest.0 {
                return LossCheck::Lost;
            }
            let due = entry.at + allowance + rtt.srtt_ns();
            again = Some(again.map_or(due, |a| a.min(due)));
            LossCheck::InFlight
        });
        self.report_loss(now, known, rtt);
        again
    }

    /// Marks as lost the unacknowledged packets that were sent before `before`: the timer expired.
    pub fn expire(&mut self, pool: &mut SentPool, now: Instant, before: Instant, rtt: &Rtt) {
        let known = self.lost;
        self.scan_in_flight(pool, |entry| match entry.at <= before {
            true => LossCheck::Lost,
            false if entry.rtx => LossCheck::InFlight,
            false => LossCheck::Stop,
        });
        self.report_loss(now, known, rtt);
    }

    /// Calls `check` for every packet in flight, oldest first. Packets behind one that was sent
    /// once were also last sent later than it.
    fn scan_in_flight(&mut self, pool: &mut SentPool, mut check: impl FnMut(&Sent) -> LossCheck) {
        let mut next = self.first;
        while let Some(psn) = self.find(pool, next, Group::under_way) {
            next = psn.next();
            let ring = &mut pool.rings[self.ring];
            match check(&pool.records[ring.record(psn)]) {
                LossCheck::InFlight => {}
                LossCheck::Stop => return,
                LossCheck::Lost => {
                    let (group, bit) = ring.slot(psn);
                    group.lost |= bit;
                    self.lost += 1;
                }
            }
        }
    }

    /// Reports to the congestion control the packets that are lost beyond the `known` ones.
    fn report_loss(&mut self, now: Instant, known: u16, rtt: &Rtt) {
        if self.lost > known {
            self.cwnd.on_loss(now, (self.lost - known).into(), rtt);
        }
    }

    /// A packet was refused: it must be sent again as a NOP, whatever was reported of it. False if
    /// it was refused before: the NOP is in flight, and a timer repeats it. If every NACK caused a
    /// NOP, each duplicated NOP would be refused after the packet behind it, endlessly on a path
    /// with a long delay.
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

    /// A timer fired: retransmits packet `psn`, which has a record, speculatively.
    pub fn retransmit_speculatively(&mut self, pool: &mut SentPool, psn: Psn) {
        self.speculative = self.speculative.saturating_add(1);
        self.mark_lost(pool, psn);
    }

    /// [Speculatively retransmits](Self::retransmit_speculatively) the oldest packets in flight
    /// until the window has room: undetected losses would otherwise fill the window as long as
    /// nothing is sent.
    pub fn make_room(&mut self, pool: &mut SentPool) {
        while !self.may_resend() {
            let Some(psn) = self.find(pool, self.first, Group::under_way) else { return };
            self.retransmit_speculatively(pool, psn);
        }
    }

    /// The number of `dups` duplicates that were not speculative retransmissions: those were
    /// retransmitted because later packets had overtaken them.
    pub fn non_speculative(&mut self, dups: u8) -> u8 {
        let expected = self.speculative.min(dups.into());
        self.speculative -= expected;
        dups - expected as u8
    }

    /// Marks packet `psn`, which has a record, as lost.
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

    /// The oldest packet that the peer has not received.
    pub fn oldest(&self, pool: &SentPool) -> Option<Psn> {
        self.find(pool, self.first, |group| group.kept & !group.sacked)
    }

    /// The newest packet that the peer has not received, for a tail-loss probe.
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

    /// Unmarks a lost packet that is being retransmitted.
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

    /// Calls `f` for the records, oldest first, until it returns false.
    pub fn for_each_while(&self, pool: &mut SentPool, mut f: impl FnMut(&mut Sent) -> bool) {
        let mut next = self.first;
        // Behind the last record the PSNs may wrap around the ring: later packets may have no
        // record.
        for _ in 0..self.kept {
            let Some(psn) = self.find(pool, next, |group| group.kept) else { return };
            next = psn.next();
            let idx = pool.rings[self.ring].record(psn);
            if !f(&mut pool[idx]) {
                return;
            }
        }
    }

    /// Whether the peer has received packet `psn`, which has a record.
    #[inline]
    pub(crate) fn is_sacked(&self, pool: &SentPool, psn: Psn) -> bool {
        pool.rings[self.ring].is(psn, |group| group.sacked)
    }

    /// The session's ring, if any packet has a record.
    #[inline(always)]
    fn ring<'a>(&self, pool: &'a SentPool) -> Option<&'a Ring> {
        (self.kept > 0).then(|| &pool.rings[self.ring])
    }

    /// The first packet from `from` on with a bit in the bitmap `of`.
    #[inline]
    fn find(&self, pool: &SentPool, from: Psn, of: impl Fn(&Group) -> u64) -> Option<Psn> {
        self.ring(pool)?.find(from, self.nxt, of)
    }
}

/// Result of a loss check of one packet.
enum LossCheck {
    /// The packet is lost.
    Lost,
    /// The packet is not lost; check the next.
    InFlight,
    /// Neither this packet nor a later one is lost.
    Stop,
}

#[cfg(test)]
mod tests;
