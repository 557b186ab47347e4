//! What a node knows of another node, and the session with it.
//!
//! A peer is a station and, where keys are of tenants, a key. It has at most one session at a time,
//! named by an index and a generation that this side chose (`sid`) and by those that the other side
//! chose (`remote_sid`). A session is set up by three packets: OPEN, OPEN with an echo, and any
//! packet that names the echo's sender's sid; nothing that an application sent is in the first two,
//! so a stale OPEN can waste a record but not repeat a message. The states:
//!
//! | state | meaning | leaves by |
//! |---|---|---|
//! | `Idle` | no session | something to send; an OPEN, with proof where that is wanted |
//! | `Opening` | our OPEN is out | an OPEN that echoes ours; an OPEN that crossed it |
//! | `Answered` | we answered theirs | a packet that names our sid; an OPEN that echoes ours |
//! | `Open` | both know | silence, RST, close |

use std::mem::offset_of;

use barewire_driver::hint::cold;
use barewire_driver::port::Station;

use super::Avs;
use super::path::Path;
use crate::idx::{
    AvIdx, OooIdx, PeerIdx, PullIdx, ReassemblyIdx, RecvIdx, ResponseIdx, SentIdx, TxIdx,
    UnexpectedIdx,
};
use crate::plant::{Bug, planted};
use crate::proto::blocks::UNIT;
use crate::proto::matching::Src;
use crate::rel::psn::Psn;
use crate::rel::rtt::Rtt;
use crate::rel::sack::RcvBitmap;
use crate::rel::sent::{SendWindow, Sent, SentPool};
use crate::slab::{Line, List, NONE, Queue};
use crate::table::{Table, Vacant};
use crate::types::{FiAddr, Instant, Tenant};
use crate::wire::{BASE_LEN, Base, EagerMsg, FrameHead, PackOp, Ty};

/// Packets received before an acknowledgement of their own leaves, on a lossy port and on one that
/// loses nothing.
pub(super) const ACK_EVERY: u8 = 16;
pub(super) const ACK_EVERY_LOSSLESS: u8 = 128;

/// Bits of a session name that are the peer's index; the rest is a generation.
pub(crate) const SLOT_BITS: u32 = 20;

/// Probes without an answer before a peer may be dead.
pub(crate) const PROBES_MIN: u8 = 8;

/// Credits given with an OPEN.
pub(crate) const GRANT_FIRST: u32 = 16;

/// Credits a busy peer may hold.
pub(crate) const GRANT_MAX: u32 = 4096;

/// See the table above.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum State {
    #[default]
    Idle,
    Opening,
    Answered,
    Open,
}

/// An eager message in several packets (MSGM) of which some have arrived.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reassembly {
    pub(crate) to: ReassemblyDst,
    /// Length of the message, bytes.
    pub(crate) len: u64,
    /// Offset of the next segment, bytes.
    pub(crate) off: u64,
    /// Its remote CQ data.
    pub(crate) imm: Option<u64>,
}

/// Destination of the segments of a message.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReassemblyDst {
    /// Into a posted receive, from `base` of its buffer.
    Recv { recv: RecvIdx, base: u64 },
    /// Into an unexpected message.
    Store { msg: UnexpectedIdx },
    /// Nowhere. For the sender it is taken.
    Nowhere,
}

/// The peers of a node.
pub(crate) type Peers = Table<Peer, Line, PeerIdx>;

/// The address that a vector has for an endpoint of a peer, cached from the last look-up. Any
/// change of the vector's entries for the peer, and another life of the peer, drops it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceName {
    /// `NONE` if the vector does not have it, [`LONG`] if its name there is too long for this.
    addr: u32,
    ep: u16,
    av: u16,
}

/// See [`SourceName`].
const LONG: u32 = NONE - 1;

impl Default for SourceName {
    fn default() -> Self {
        Self::UNKNOWN
    }
}

impl SourceName {
    /// No vector has this number: a node has 1,024 of them.
    pub(crate) const UNKNOWN: Self = Self { addr: NONE, ep: 0, av: u16::MAX };

    /// What vector `at` calls endpoint `ep` of peer `p`, which lives as `inc`; `None` if it does
    /// not have it.
    #[inline(always)]
    pub(crate) fn of(
        &mut self,
        (at, av): (AvIdx, &Avs),
        (p, inc): (PeerIdx, u64),
        ep: u16,
    ) -> Option<FiAddr> {
        if self.ep != ep || u32::from(self.av) != at.get() {
            self.look_up((at, av), (p, inc), ep);
        }
        if self.addr < LONG {
            return Some(FiAddr::from(self.addr));
        }
        if self.addr == NONE { None } else { Self::long((at, av), (p, inc), ep) }
    }

    #[inline(never)]
    fn look_up(&mut self, (at, av): (AvIdx, &Avs), (p, inc): (PeerIdx, u64), ep: u16) {
        let short = |addr| u32::try_from(addr).unwrap_or(LONG).min(LONG);
        let addr = av[at].av.reverse(p, inc, ep).map_or(NONE, short);
        *self = Self { addr, ep, av: at.get() as u16 };
    }

    /// A name of a user's that is longer than an index.
    #[cold]
    fn long((at, av): (AvIdx, &Avs), (p, inc): (PeerIdx, u64), ep: u16) -> Option<FiAddr> {
        av[at].av.reverse(p, inc, ep)
    }
}

/// One peer. `repr(C)`: the fields lie in the order of their declaration, sorted by cache line,
/// since with many peers each record is found out of cache.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Peer {
    // The first line, with the head of the slot: all that receiving a message on the fast path
    // touches.
    /// When the last packet of the peer arrived, or when we began to wait for it: the time of the
    /// turn.
    pub(crate) last_rx: Instant,
    /// The peer's address: see [`Station::word`].
    pub(crate) addr: u64,
    /// The source address of the last message's sender.
    pub(crate) source: SourceName,
    /// Our name for the session, 0 while idle.
    pub(crate) sid: u32,
    /// The next packet in order.
    pub(crate) rcv_nxt: Psn,
    /// Credits we granted.
    pub(crate) granted: u32,
    /// Credits that the peer has used.
    pub(crate) consumed: u32,
    /// The numbers of this node and of the peer in frames from it, in the lower and the upper half.
    pub(crate) numbers: u32,
    /// Short tagged messages that may be received back to back without a check of this record. Any
    /// other packet from the peer, or a change of its credit, sets it to 0.
    pub(crate) rx_quota: u16,
    /// Packets received since the last acknowledgement; saturates.
    pub(crate) owed: u8,
    /// [`fast_path`](Self::fast_path), and no packet before the next one in order is missing,
    /// refused or part of an unfinished message. [`note_order`](Self::note_order) sets it.
    pub(crate) in_order: bool,
    /// The first two words of it end the line.
    pub(crate) snd: SendWindow,

    // The second line: what sending a message on the fast path touches besides.
    /// Their name for the session.
    pub(crate) remote_sid: u32,
    /// The life of the peer that the session is with, or that the application named; 0 any.
    pub(crate) inc: u64,
    /// Credits that we have used, of those that the peer granted.
    pub(crate) credit_used: u32,
    /// Most bytes after the Ethernet header that both ends take.
    pub(crate) frame_max: u32,
    pub(crate) state: State,
    /// The session is open, and `Node::takes_fast_path` allows the fast path for it.
    pub(crate) fast_path: bool,
    /// What the path to it promises.
    pub(crate) path: Path,
    /// The next packet in order was refused for this reason and has to be replaced.
    pub(crate) refused: u8,
    /// [`is_steady`](Self::is_steady) was true when last evaluated, and nothing has happened since
    /// that would change it.
    pub(crate) steady: bool,
    /// Stands in the queue of peers to be served.
    pub(crate) queued: bool,
    /// Messages of one credit that may be sent on the fast path without a check of this record.
    /// Whatever else is sent to the peer or queued for it sets it to 0.
    pub(crate) tx_quota: u16,

    // Lines three to five: what serving the peer touches if only an acknowledgement is due, or
    // nothing.
    /// When its timer fires at the latest; `u64::MAX` if none is armed.
    pub(crate) timer_at: Instant,
    /// Transmit requests not yet sent in full, in order.
    pub(crate) send_q: Queue<0, TxIdx>,
    /// Transmit requests with bytes that the peer asked for.
    pub(crate) rndv_data_q: Queue<0, TxIdx>,
    /// Pulls that have a PULL or an END to send.
    pub(crate) rndv_ctl_q: Queue<0, PullIdx>,
    /// Responses to the peer's one-sided operations that have packets to send.
    pub(crate) resp_q: Queue<0, ResponseIdx>,
    /// The packet received last, and when, as [`ack_time`] says it.
    pub(crate) rx_newest: Psn,
    pub(crate) rx_at: u32,
    /// The last packet received that asked for an acknowledgement.
    pub(crate) ar_psn: Psn,
    /// The refusal of the next packet.
    pub(crate) nack: Nack,
    /// Credits the peer should hold, at most [`GRANT_MAX`].
    pub(crate) target: u16,
    /// Number of the next one-sided operation to the peer.
    pub(crate) rma_seq: u16,
    /// Responses to the peer's one-sided operations, those in flight included.
    pub(crate) responses: u16,
    /// Answers that we wait for: one for each operation of the fast path, and one for each other
    /// packet of an atomic operation.
    pub(crate) answers: u8,
    /// Those of `answers` that are of atomic packets of the slow path.
    pub(crate) long_answers: u8,
    /// An acknowledgement must go out in this turn.
    pub(crate) ack_now: bool,
    /// An acknowledgement that is asked for leaves in the turn that received the packet. False
    /// while the program is known to send something at once, which carries it.
    pub(crate) quick_ack: bool,
    /// Probes without an answer; where the port tells presence, also those that were left out.
    /// While there are any, the inlined receive functions are closed, since they do not reset this
    /// count.
    pub(crate) probes: u8,
    /// Duplicates received since the last ACK packet.
    pub(crate) dups: u8,
    /// The packet received last was a retransmission.
    pub(crate) rx_resent: bool,
    /// A packet came with a mark of congestion since the last ACK packet.
    pub(crate) marked: bool,
    /// The peer takes ACKs that say so.
    pub(crate) takes_echo: bool,
    pub(crate) has_nop_for: bool,
    /// An OPEN must go out in this turn.
    pub(crate) want_open: bool,
    /// PINGs that must go out in this turn; while the session opens, how often its OPEN is still
    /// repeated before the peer is dead.
    pub(crate) pings: u8,
    /// The packet that left last did not ask for an acknowledgement, and somebody waits for it.
    pub(crate) unasked: bool,
    /// It stands in the queue of peers that `unasked` is set for.
    pub(crate) is_listed_unasked: bool,
    /// A NOP must go out, so that the receiver of an unfinished message learns that it ends there.
    pub(crate) want_nop: bool,
    pub(crate) rcv: RcvBitmap,
    /// When the last probe or OPEN went out.
    pub(crate) probe_at: Instant,
    /// The message of which some segments have arrived.
    pub(crate) reassembly: ReassemblyIdx,
    /// Messages of collectives that we wait for.
    pub(crate) coll_waits: u32,
    /// All transmit requests to this peer, in the order of their posting.
    pub(crate) wrs: List<1, u32, TxIdx>,
    /// Sequence number of the peer's one-sided operation of which a packet was refused or given up;
    /// `NONE` if none. With [`WITHDRAWN`](Self::WITHDRAWN) its later packets are answered.
    pub(crate) bad_seq: u32,
    /// All pulls from this peer.
    pub(crate) pulls: List<1, u32, PullIdx>,
    /// Packets that arrived out of order and wait for an earlier one.
    pub(crate) reorder_buf: List<0, u32, OooIdx>,

    // The rest is cold.
    /// Bytes that the peer's unfinished write or atomic operation has written so far, and above
    /// [`WRITTEN_BITS`](Self::WRITTEN_BITS) its sequence number.
    pub(crate) written: u64,
    /// When the oldest packet in flight was sent, or the last progress was made.
    pub(crate) progress_at: Instant,
    /// When packets that were overtaken are declared lost; 0 if none was.
    pub(crate) reorder_at: Instant,
    /// The pulls that wait for room in the pull window, in the order in which they may ask.
    pub(crate) pull_wait: Queue<2, PullIdx>,
    /// The PSN of a refused packet without a record, if [`has_nop_for`](Self::has_nop_for): a NOP
    /// with that PSN must go out.
    pub(crate) nop_for: Psn,
    /// The packet that asked for credit, if [`has_asked`](Self::has_asked).
    pub(crate) asked_at: Psn,
    pub(crate) epoch: u32,
    pub(crate) peer_epoch: u32,
    /// Epochs up to this one of `inc` are over.
    pub(crate) closed_epoch: u32,
    /// Address vector entries that name this peer.
    pub(crate) av_refs: u32,
    /// Unexpected messages of this peer.
    pub(crate) unexpected: u32,
    /// Bytes that pulls from this peer have asked for and not received.
    pub(crate) pull_out: u32,
    pub(crate) rtt: Rtt,
    /// Reads on the slow path that have bytes missing.
    pub(crate) reads: u8,
    /// Timeouts in a row; while nothing is in flight, PINGs in a row that brought no credit.
    pub(crate) backoff: u8,
    /// The tail probe of this flight is out.
    pub(crate) probed: bool,
    /// It stands in the queue of peers that wait for free blocks.
    pub(crate) wants_blocks: bool,
    /// Stands in the queue of peers that have pulls waiting.
    pub(crate) in_pull_queue: bool,
    /// Credit was asked for, and none of it was used since.
    pub(crate) has_asked: bool,
    /// Its frames are shorter than both ends accept: longer ones are searched for.
    pub(crate) searches: bool,
    /// The session is wanted here: OPEN is repeated until it is open.
    pub(crate) opens: bool,
    /// [`inc`](Self::inc) is known from an OPEN alone that anybody can have sent.
    pub(crate) is_life_claimed: bool,
    /// Whose key sessions with it are under.
    pub(crate) tenant: Tenant,
    /// Most bytes after the Ethernet header that both ends of the open session accept, whatever the
    /// path carries; 0 in the session with ourselves.
    pub(crate) frame_most: u16,
    /// Credit used by the packet that was refused, whose sender may not know it.
    pub(crate) refused_units: u16,
}

/// Offset of the end of a field from the start of the slot, bytes.
macro_rules! end_of {
    ($field:ident: $ty:ty) => {
        Peers::HEAD_LEN + offset_of!(Peer, $field) + size_of::<$ty>()
    };
}

const _: () = {
    assert!(end_of!(snd: u64) == 64, "a message that comes takes one line");
    assert!(
        end_of!(tx_quota: u16) <= Peer::HOT,
        "one that goes takes two, 14 bytes of them for `Controller`"
    );
    assert!(end_of!(reorder_buf: List<0, u32, OooIdx>) <= Peer::WARM);
    assert!(Peers::SLOT_LEN <= 384, "a session has half a kilobyte, with its share of the tables");
};

/// How and when a NACK is sent. Packed, so that its neighbours share a line.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, packed(2))]
pub(crate) struct Nack {
    /// A NACK must go out.
    pub(crate) want: bool,
    /// Packets in a row whose key no region has.
    bad_keys: u8,
    /// If that is more than [`BAD_KEYS_MAX`], the NACK waits until then, in units of
    /// 2^[`NACK_UNIT_BITS`] ns.
    after: u32,
}

/// Wrong keys in a row after which each further NACK waits a millisecond: a guard against guessing
/// keys.
const BAD_KEYS_MAX: u8 = 64;

/// Shift from nanoseconds to units of 131 us; eight of them are a millisecond.
const NACK_UNIT_BITS: u32 = 17;

impl Nack {
    /// Notes whether a packet's key was wrong (`bad`).
    #[inline]
    pub(crate) fn note_key(&mut self, now: Instant, bad: bool) {
        if !bad {
            self.bad_keys = 0;
            return;
        }
        self.bad_keys = self.bad_keys.saturating_add(1);
        self.after = ((now.0 >> NACK_UNIT_BITS) as u32).wrapping_add(8);
    }

    /// Whether a NACK must go out now.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.want && self.waits(now).is_none()
    }

    /// Until when a NACK that must go out has to wait; `None` if it need not.
    pub(crate) fn waits(&self, now: Instant) -> Option<Instant> {
        if !self.want || self.bad_keys <= BAD_KEYS_MAX {
            return None;
        }
        let unit = now.0 >> NACK_UNIT_BITS;
        let left = self.after.wrapping_sub(unit as u32) as i32;
        (left > 0).then(|| Instant((unit + left as u64) << NACK_UNIT_BITS))
    }
}

impl Vacant for Peer {
    /// Closed for the fast path in both directions.
    fn vacant() -> Self {
        Self::default()
    }
}

impl Peer {
    /// Bytes at the start of a slot that messages on the fast path touch.
    pub(crate) const HOT: usize = 128;

    /// Bytes at the start of a slot that serving the peer touches.
    pub(crate) const WARM: usize = 320;

    /// See [`bad_seq`](Self::bad_seq). No operation's number has this bit.
    pub(crate) const WITHDRAWN: u32 = 1 << 16;

    /// Bits of [`written`](Self::written) that count bytes.
    pub(crate) const WRITTEN_BITS: u32 = 48;

    /// One at `station` with the key of `tenant`, of the node at `own`.
    pub(crate) fn new(station: Station, tenant: Tenant, own: Station, now: Instant) -> Self {
        Self {
            addr: station.word(),
            tenant,
            numbers: u32::from(own.number) | u32::from(station.number) << 16,
            target: GRANT_FIRST as u16,
            timer_at: Instant(u64::MAX),
            rx_at: ack_time(now),
            progress_at: now,
            probe_at: now,
            reassembly: ReassemblyIdx::NONE,
            bad_seq: NONE,
            ..Self::default()
        }
    }

    pub(crate) fn station(&self) -> Station {
        Station::from_word(self.addr)
    }

    /// What tells it from other peers.
    pub(crate) fn who(&self) -> (Station, Tenant) {
        (self.station(), self.tenant)
    }

    /// What names the session with it among those with keys.
    pub(crate) fn session(&self) -> (u64, u32) {
        (self.addr, self.remote_sid)
    }

    /// Its endpoint `ep`, as the sender of a message, where `p` is the number of the peer.
    #[inline(always)]
    pub(crate) fn src(&self, p: PeerIdx, ep: u16) -> Src {
        Src::of(p, ep).under(self.tenant)
    }

    /// Whether a frame's addresses are those of the peer and of this node, whose own is `own`.
    #[inline(always)]
    pub(crate) fn is_from(&self, own: u64, head: &FrameHead) -> bool {
        // The upper two bytes of the words are another field of the frame, or the number.
        ((head.dst ^ own) | (head.src ^ self.addr)) << 16 == 0
            && head.numbers == u64::from(self.numbers)
    }

    /// The numbers in frames to the peer.
    #[inline(always)]
    pub(crate) fn numbers_out(&self) -> u32 {
        self.numbers.rotate_left(16)
    }

    /// The base of a packet of type `ty` to the peer, from `src`. A reliable packet takes the next
    /// PSN.
    #[inline]
    pub(crate) fn base(&self, src: Station, ty: Ty) -> Base {
        Base {
            dst: self.station(),
            src,
            ty,
            ar: false,
            rtx: false,
            ce: false,
            crc: self.path.has_crc(),
            dst_sid: self.remote_sid,
            psn: self.snd.nxt,
            cack: self.rcv_nxt,
            grant: self.granted as u16,
            plen: 0,
        }
    }

    /// The congestion window may have shrunk: the quota shrinks with it.
    #[inline]
    pub(crate) fn note_window(&mut self) {
        self.tx_quota = self.tx_quota.min(self.snd.room() as u16);
    }

    /// A packet has gone out and carried the acknowledgement of everything received, if no packet
    /// is missing.
    #[inline]
    pub(crate) fn carried_ack(&mut self) {
        if self.rcv.is_empty() {
            (self.owed, self.ack_now) = (0, false);
        }
    }

    /// Numbers the packet that has just gone out.
    #[inline(always)]
    pub(crate) fn number(&mut self, now: Instant) -> Psn {
        self.probe_from(now);
        self.snd.number()
    }

    /// [`number`](Self::number) for a packet without a record, by a road on which the clock was not
    /// read: `turn` is the time of this turn. False, and nothing has happened, if the clock must be
    /// read, since [the peer's silence counts](Self::begins_to_wait) from now.
    #[inline(always)]
    pub(super) fn number_by_turn(&mut self, turn: Instant) -> bool {
        if self.begins_to_wait(turn) {
            return false;
        }
        self.number(turn);
        true
    }

    /// Numbers the packet that has just gone out and records it for retransmission. Returns the
    /// record that `made` makes with the number. The caller has seen that one is free.
    #[inline(always)]
    pub(crate) fn number_and_keep(
        &mut self,
        now: Instant,
        pool: &mut SentPool,
        made: impl FnOnce(Psn) -> Sent,
    ) -> SentIdx {
        let psn = self.number(now);
        if self.snd.is_empty() {
            self.begin_flight(now);
        }
        self.steady = false;
        self.snd.keep(pool, made(psn))
    }

    /// Its slot, while a session with it is open.
    #[inline(always)]
    pub(crate) fn slot(&self) -> PeerIdx {
        slot_of(self.sid)
    }

    /// Starts a flight: a packet goes out and none was in flight.
    #[inline]
    pub(crate) fn begin_flight(&mut self, now: Instant) {
        self.progress_at = now;
        self.probed = false;
        self.backoff = 0;
    }

    /// Whether queued messages wait for credit alone, and nothing is in flight whose loss would be
    /// noticed.
    pub(crate) fn is_stalled(&self) -> bool {
        self.snd.is_empty() && !self.send_q.is_empty()
    }

    /// Whether the silence of the peer counts from a packet that is sent now without a record, so
    /// that the clock must be read. Silence of a peer that was heard in this `turn` counts from the
    /// turn.
    #[inline(always)]
    pub(super) fn begins_to_wait(&self, turn: Instant) -> bool {
        self.snd.in_flight() == 0 && self.last_rx != turn || self.timer_at == Instant(u64::MAX)
    }

    /// A packet is sent. If it opens a flight, the peer is probed when it has been silent since
    /// `now`.
    #[inline(always)]
    fn probe_from(&mut self, now: Instant) {
        if self.snd.in_flight() == 0 {
            self.probe_at = now;
        }
    }

    /// Negation of [`begins_to_wait`](Self::begins_to_wait): the timer runs and the peer was heard
    /// in this turn, so no clock is read. Restarts the probe interval if the packet opens a flight,
    /// as [`probe_from`](Self::probe_from) does. (Harmless if the packet does not leave: with
    /// nothing in flight the peer was heard just now.)
    #[inline(always)]
    pub(super) fn needs_no_clock(&mut self, turn: Instant) -> bool {
        if self.snd.in_flight() == 0 {
            if self.last_rx != turn {
                return cold(false);
            }
            self.probe_at = turn;
        }
        self.timer_at != Instant(u64::MAX) || cold(false)
    }

    /// [`carried_ack`](Self::carried_ack) for the fast path, with the flag that is in cache.
    #[inline(always)]
    pub(crate) fn carried_ack_in_order(&mut self) {
        if self.in_order {
            (self.owed, self.ack_now) = (0, false);
        }
    }

    /// Whether one more packet of a lossless path may come before any is acknowledged.
    #[inline(always)]
    pub(super) fn may_owe_ack(&self) -> bool {
        self.owed < ACK_EVERY_LOSSLESS - 1
    }

    /// Notes that one more packet of a lossless path is to be acknowledged. True: that makes enough
    /// of them, and the caller [queues](super::Due::make_ready) the peer.
    #[inline(always)]
    pub(super) fn owe_ack_lossless(&mut self) -> bool {
        self.rx_quota = self.rx_quota.saturating_sub(1);
        if self.may_owe_ack() {
            self.owed += 1;
            return false;
        }
        self.owed = self.owed.saturating_add(1);
        self.ack_now = true;
        cold(true)
    }

    /// Longest message that fits in one frame, whatever stands beside it, bytes.
    pub(crate) fn eager_room(&self) -> usize {
        self.path.room(self.frame_max, EagerMsg::LEN_MAX - BASE_LEN)
    }

    /// How many messages of one credit, each in one frame, could be sent now.
    pub(crate) fn tx_room(&self) -> u16 {
        if !self.fast_path
            || self.eager_room() < UNIT
            || self.send_q.head != TxIdx::NONE
            || !self.snd.open()
        {
            return 0;
        }
        // On a lossless path congestion leaves at least the window. One place is left free for an
        // answer that is sent when nothing is in flight, which is not counted here.
        let window = self.snd.limit() - self.snd.in_flight().max(1);
        self.credits().min(self.snd.room()).min(window) as u16
    }

    /// Whether the packet that arrived last asked for an acknowledgement.
    #[inline(always)]
    pub(crate) fn has_asked_last(&self) -> bool {
        self.ar_psn == self.rx_newest
    }

    /// Notes which packet has just arrived.
    #[inline]
    pub(crate) fn note_arrival(&mut self, now: Instant, psn: Psn, resent: bool) {
        (self.rx_newest, self.rx_at, self.rx_resent) = (psn, ack_time(now), resent);
    }

    /// Counts off `n` answers to packets of the slow path, at most as many as are missing. Those of
    /// the fast path are counted off one by one.
    pub(crate) fn answered(&mut self, n: u16) {
        let n = u16::from(self.long_answers).min(n) as u8;
        (self.answers, self.long_answers) = (self.answers - n, self.long_answers - n);
    }

    /// Operations of the fast path in flight.
    pub(crate) fn fast_ops(&self) -> u8 {
        self.answers - self.long_answers
    }

    /// Whether anything is queued to be sent, for lack of room, credit or an answer.
    #[inline(always)]
    pub(crate) fn has_queued(&self) -> bool {
        // The head of an empty list has all bits set.
        let heads = self.send_q.head.get()
            & self.rndv_data_q.head.get()
            & self.rndv_ctl_q.head.get()
            & self.resp_q.head.get();
        heads != NONE
    }

    /// Credits left to send with.
    pub(crate) fn credits(&self) -> u32 {
        self.snd.credit.wrapping_sub(self.credit_used)
    }

    /// The low-water mark: with fewer credits left the peer is granted more.
    #[inline(always)]
    pub(crate) fn low(&self) -> u32 {
        u32::from(self.target / 2)
    }

    /// Credits the peer still holds.
    pub(crate) fn outstanding(&self) -> u32 {
        self.granted.wrapping_sub(self.consumed)
    }

    /// A PING must go out in this turn.
    pub(crate) fn ask(&mut self) {
        self.pings = self.pings.max(1);
    }

    /// Whether the peer was probed often enough to be dead if it does not answer: an opening
    /// session by two OPENs after the first, an open one by [`PROBES_MIN`] probes.
    pub(crate) fn was_asked(&self) -> bool {
        match self.state {
            State::Open => self.probes >= PROBES_MIN,
            _ => self.backoff >= 2,
        }
    }

    /// Whether the peer owes us something, so that its silence counts.
    pub(crate) fn owes(&self) -> bool {
        match self.state {
            State::Idle => false,
            State::Opening | State::Answered => !self.wrs.is_empty() || self.coll_waits > 0,
            State::Open => {
                if planted(Bug::NoKeepalive) {
                    return self.snd.in_flight() > 0;
                }
                self.snd.in_flight() > 0
                    || !self.wrs.is_empty()
                    || self.fast_ops() > 0
                    || !self.pulls.is_empty()
                    || self.reassembly != ReassemblyIdx::NONE
                    || !self.reorder_buf.is_empty()
                    // Responses that cannot be sent: if the peer is gone they would stay for ever.
                    || self.responses > 0
                    || self.coll_waits > 0
            }
        }
    }

    /// An operation starts to wait for the peer. If it is the first, the peer's silence counts from
    /// now.
    #[inline]
    pub(crate) fn begin_to_wait(&mut self, now: Instant) {
        if !self.owes() {
            self.last_rx = now;
            self.probes = 0;
            self.probe_at = now;
        }
    }

    /// Whether the session holds nothing, so that its record may be reused.
    pub(crate) fn is_idle(&self) -> bool {
        self.wrs.is_empty()
            && self.fast_ops() == 0
            && self.pulls.is_empty()
            && self.reorder_buf.is_empty()
            && self.responses == 0
            && self.unexpected == 0
            && self.snd.in_flight() == 0
            && self.reassembly == ReassemblyIdx::NONE
            && self.coll_waits == 0
    }

    /// Whether the peer was asked for credit and has answered without granting enough.
    pub(super) fn credit_is_short(&self) -> bool {
        self.has_asked && self.snd.una.since(self.asked_at) > 0
    }

    /// Payload bytes that fit behind `op_len` bytes of operation header.
    #[inline]
    pub(super) fn payload_max(&self, op_len: usize) -> usize {
        self.path.room(self.frame_max, op_len)
    }

    /// Bytes of PACK records that fit one packet.
    #[inline]
    pub(super) fn pack_room(&self) -> usize {
        self.payload_max(PackOp::LEN).min(usize::from(u16::MAX) - 64)
    }
}

/// A time in units of an acknowledgement's delay, 64 ns. Wraps after minutes. A delay saturates at
/// four milliseconds.
#[inline]
pub(crate) const fn ack_time(now: Instant) -> u32 {
    (now.0 / 64) as u32
}

/// The index in a session name.
pub(crate) const fn slot_of(sid: u32) -> PeerIdx {
    PeerIdx::of(sid & ((1 << SLOT_BITS) - 1))
}

/// The session name after `sid` for the same slot; never 0.
pub(crate) const fn next_sid(slot: PeerIdx, generation: u32) -> u32 {
    slot.get() | (1 + generation % GENERATIONS) << SLOT_BITS
}

/// Generations of a slot before a name comes back. 0 is none of them, so that no name is 0.
pub(crate) const GENERATIONS: u32 = (1 << (32 - SLOT_BITS)) - 1;

const _: () = assert!(NONE > 1 << SLOT_BITS);
