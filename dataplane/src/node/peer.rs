//! Record of a peer and of the session with it.
//!
//! A peer is a station and, where keys belong to tenants, a key. It has at most one session at a
//! time, named by an index and a generation that this end chose (`sid`) and by those that the other
//! end chose (`remote_sid`). A session is set up by three packets: OPEN, OPEN with an echo, and any
//! packet that names the sid of the echo's sender. The first two carry nothing of an application,
//! so a stale OPEN can waste a record but not repeat a message. The states:
//!
//! | state | meaning | leaves by |
//! |---|---|---|
//! | `Idle` | no session | an operation to send; an OPEN, with proof where it is required |
//! | `Opening` | our OPEN was sent | an OPEN that echoes ours; an OPEN that crossed it |
//! | `Answered` | its OPEN was answered | a packet that names our sid; an OPEN that echoes ours |
//! | `Open` | set up at both ends | silence, RST, close |

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

/// Packets received before a separate acknowledgement is sent, on a lossy port and on a lossless
/// one.
pub(super) const ACK_EVERY: u8 = 16;
pub(super) const ACK_EVERY_LOSSLESS: u8 = 128;

/// Bits of a sid that are the peer's index; the other bits are a generation.
pub(crate) const SLOT_BITS: u32 = 20;

/// Unanswered probes before a peer may be declared dead.
pub(crate) const PROBES_MIN: u8 = 8;

/// Credits granted with an OPEN.
pub(crate) const GRANT_FIRST: u32 = 16;

/// Maximum credits of a busy peer.
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
    /// Nowhere: dropped, but accepted as far as the sender knows.
    Nowhere,
}

/// The peers of a node.
pub(crate) type Peers = Table<Peer, Line, PeerIdx>;

/// The address that a vector has for an endpoint of a peer, cached from the last look-up. Any
/// change of the vector's entries for the peer, and another incarnation of the peer, invalidates
/// it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceName {
    /// `NONE` if the vector lacks the endpoint, [`LONG`] if its address there does not fit this
    /// field.
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
    /// No vector has this number: a node has at most 1,024 of them.
    pub(crate) const UNKNOWN: Self = Self { addr: NONE, ep: 0, av: u16::MAX };

    /// The address in vector `at` of endpoint `ep` of peer `p` with incarnation `inc`; `None` if
    /// the vector lacks it.
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
        if self.addr == NONE { None } else { Self::lookup_long((at, av), (p, inc), ep) }
    }

    #[inline(never)]
    fn look_up(&mut self, (at, av): (AvIdx, &Avs), (p, inc): (PeerIdx, u64), ep: u16) {
        let short = |addr| u32::try_from(addr).unwrap_or(LONG).min(LONG);
        let addr = av[at].av.reverse(p, inc, ep).map_or(NONE, short);
        *self = Self { addr, ep, av: at.get() as u16 };
    }

    /// An address set by the user that is longer than an index.
    #[cold]
    fn lookup_long((at, av): (AvIdx, &Avs), (p, inc): (PeerIdx, u64), ep: u16) -> Option<FiAddr> {
        av[at].av.reverse(p, inc, ep)
    }
}

/// One peer. `repr(C)`: the fields lie in the order of their declaration, sorted by cache line,
/// since with many peers each record is out of cache when needed.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Peer {
    // First line, with the head of the slot: all that receiving a message on the fast path touches.
    /// When the last packet of the peer arrived, or when this end began to wait for it: the time of
    /// the turn.
    pub(crate) last_rx: Instant,
    /// The peer's address: see [`Station::word`].
    pub(crate) addr: u64,
    /// Source address of the last received message.
    pub(crate) source: SourceName,
    /// The sid chosen by this end, 0 while idle.
    pub(crate) sid: u32,
    /// PSN of the next packet in order.
    pub(crate) rcv_nxt: Psn,
    /// Credits granted to the peer.
    pub(crate) granted: u32,
    /// Credits that the peer has used.
    pub(crate) consumed: u32,
    /// The numbers of this node (lower half) and of the peer (upper half) in frames from the peer.
    pub(crate) numbers: u32,
    /// Short tagged messages that may be received back to back without a check of this record. Any
    /// other packet from the peer, and any change of its credit, sets it to 0.
    pub(crate) rx_quota: u16,
    /// Packets received since the last acknowledgement; saturates.
    pub(crate) owed: u8,
    /// [`fast_path`](Self::fast_path), and no packet before the next one in order is missing,
    /// refused or part of an unfinished message. [`note_order`](Self::note_order) sets it.
    pub(crate) in_order: bool,
    /// The first two words of this field end the line.
    pub(crate) snd: SendWindow,

    // Second line: what sending a message on the fast path touches besides.
    /// The sid chosen by the peer.
    pub(crate) remote_sid: u32,
    /// Incarnation of the peer in the session, or the one that the application named; 0: any.
    pub(crate) inc: u64,
    /// Credits used, of those granted by the peer.
    pub(crate) credit_used: u32,
    /// Longest frame that both ends accept, bytes after the Ethernet header.
    pub(crate) frame_max: u32,
    pub(crate) state: State,
    /// The session is open, and `Node::takes_fast_path` allows the fast path for it.
    pub(crate) fast_path: bool,
    /// Guarantees of the path to the peer.
    pub(crate) path: Path,
    /// NACK reason of the next packet in order, which was refused and has to be replaced.
    pub(crate) refused: u8,
    /// [`is_steady`](Self::is_steady) was true when last evaluated, and nothing has happened since
    /// that would change it.
    pub(crate) steady: bool,
    /// Is in the queue of peers to be served.
    pub(crate) queued: bool,
    /// Messages of one credit that may be sent on the fast path without a check of this record. Any
    /// other packet sent to the peer or queued for it sets it to 0.
    pub(crate) tx_quota: u16,

    // Lines three to five: what serving the peer touches if at most an acknowledgement is due.
    /// Time of the peer's timer, which may fire earlier; `u64::MAX` if not armed.
    pub(crate) timer_at: Instant,
    /// Transmit requests not yet sent in full, in order.
    pub(crate) send_q: Queue<0, TxIdx>,
    /// Transmit requests with bytes that the peer pulls.
    pub(crate) rndv_data_q: Queue<0, TxIdx>,
    /// Pulls that have a PULL or an END to send.
    pub(crate) rndv_ctl_q: Queue<0, PullIdx>,
    /// Responses to the peer's one-sided operations that have packets to send.
    pub(crate) resp_q: Queue<0, ResponseIdx>,
    /// The last packet received, and its time in units of [`ack_time`].
    pub(crate) rx_newest: Psn,
    pub(crate) rx_at: u32,
    /// The last packet received with AR.
    pub(crate) ar_psn: Psn,
    /// NACK for the next packet.
    pub(crate) nack: Nack,
    /// Credits that the peer should hold, at most [`GRANT_MAX`].
    pub(crate) target: u16,
    /// Number of the next one-sided operation to the peer.
    pub(crate) rma_seq: u16,
    /// Responses to the peer's one-sided operations, those in flight included.
    pub(crate) responses: u16,
    /// Outstanding answers of the peer: one for each operation of the fast path, and one for each
    /// other packet of an atomic operation.
    pub(crate) answers: u8,
    /// The part of `answers` for atomic packets of the slow path.
    pub(crate) long_answers: u8,
    /// An acknowledgement must go out in this turn.
    pub(crate) ack_now: bool,
    /// A requested acknowledgement leaves in the turn that received the packet. False while the
    /// program is known to send at once, which carries it.
    pub(crate) quick_ack: bool,
    /// Unanswered probes; where the port tells presence, including skipped ones. While not 0 the
    /// inlined receive functions are disabled, since they do not reset this count.
    pub(crate) probes: u8,
    /// Duplicates received since the last ACK packet.
    pub(crate) dups: u8,
    /// The last packet received was a retransmission.
    pub(crate) rx_resent: bool,
    /// A packet arrived with a congestion mark since the last ACK packet.
    pub(crate) marked: bool,
    /// The peer accepts ACKs that echo a mark.
    pub(crate) takes_echo: bool,
    pub(crate) has_nop_for: bool,
    /// An OPEN must go out in this turn.
    pub(crate) want_open: bool,
    /// PINGs that must go out in this turn; while the session opens, how often its OPEN is still
    /// repeated before the peer is declared dead.
    pub(crate) pings: u8,
    /// The last packet sent had no AR, and a completion waits for its acknowledgement.
    pub(crate) lacks_ar: bool,
    /// Is in the queue of peers with `lacks_ar`.
    pub(crate) in_tail_queue: bool,
    /// A NOP must go out, so that the receiver of an unfinished message learns that no more
    /// follows.
    pub(crate) want_nop: bool,
    pub(crate) rcv: RcvBitmap,
    /// When the last probe or OPEN went out.
    pub(crate) probe_at: Instant,
    /// The message of which some segments have arrived.
    pub(crate) reassembly: ReassemblyIdx,
    /// Messages of collectives awaited from the peer.
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

    // The following fields are cold.
    /// Bytes written so far by the peer's unfinished write or atomic operation and, above
    /// [`WRITTEN_BITS`](Self::WRITTEN_BITS), its sequence number.
    pub(crate) written: u64,
    /// When the oldest packet in flight was sent, or of the last progress.
    pub(crate) progress_at: Instant,
    /// When reordered packets that are missing are declared lost; 0 if none is missing.
    pub(crate) reorder_at: Instant,
    /// The pulls that wait for room in the pull window, in the order in which they will be served.
    pub(crate) pull_wait: Queue<2, PullIdx>,
    /// The PSN of a refused packet without a record, if [`has_nop_for`](Self::has_nop_for): a NOP
    /// with that PSN must go out.
    pub(crate) nop_for: Psn,
    /// The packet that requested credit, if [`has_requested_credit`](Self::has_requested_credit).
    pub(crate) credit_requested_at: Psn,
    pub(crate) epoch: u32,
    pub(crate) peer_epoch: u32,
    /// Epochs of `inc` up to this one have ended.
    pub(crate) closed_epoch: u32,
    /// Address vector entries that name this peer.
    pub(crate) av_refs: u32,
    /// Unexpected messages of this peer.
    pub(crate) unexpected: u32,
    /// Bytes requested by pulls from this peer and not received.
    pub(crate) pull_out: u32,
    pub(crate) rtt: Rtt,
    /// Reads on the slow path with missing bytes.
    pub(crate) reads: u8,
    /// Consecutive timeouts; while nothing is in flight, consecutive PINGs that brought no credit.
    pub(crate) backoff: u8,
    /// The tail probe of this flight was sent.
    pub(crate) probed: bool,
    /// Is in the queue of peers that wait for free blocks.
    pub(crate) wants_blocks: bool,
    /// Is in the queue of peers with waiting pulls.
    pub(crate) in_pull_queue: bool,
    /// Credit was requested, and none of it was used since.
    pub(crate) has_requested_credit: bool,
    /// Its frames are shorter than both ends accept: a search for the longest that passes is under
    /// way.
    pub(crate) searches: bool,
    /// This end wants the session: its OPEN is repeated until the session is open.
    pub(crate) opens: bool,
    /// [`inc`](Self::inc) is known only from an OPEN that any station can have sent.
    pub(crate) is_life_claimed: bool,
    /// The tenant whose key sessions with the peer use.
    pub(crate) tenant: Tenant,
    /// Longest frame that both ends of the open session accept, bytes after the Ethernet header,
    /// whatever the path carries; 0 in the session with this node itself.
    pub(crate) frame_most: u16,
    /// Credit used by the refused packet, which its sender may not know of.
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

/// Whether and when a NACK is sent. Packed, so that it shares a cache line with its neighbours.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, packed(2))]
pub(crate) struct Nack {
    /// A NACK must go out.
    pub(crate) want: bool,
    /// Consecutive packets whose key no region has.
    bad_keys: u8,
    /// If `bad_keys` exceeds [`BAD_KEYS_MAX`], the NACK waits until this time, in units of
    /// 2^[`NACK_UNIT_BITS`] ns.
    after: u32,
}

/// Consecutive wrong keys after which each further NACK is delayed by a millisecond: a guard
/// against guessing keys.
const BAD_KEYS_MAX: u8 = 64;

/// Shift from nanoseconds to units of 131 us; eight of them are a millisecond.
const NACK_UNIT_BITS: u32 = 17;

impl Nack {
    /// Records whether a packet's key was wrong (`bad`).
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

    /// Until when a pending NACK is delayed; `None` if it is not.
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
    /// Disabled for the fast path in both directions.
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

    /// A peer at `station` with the key of `tenant`, for the node at `own`.
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

    /// Identity of the peer: its station and tenant.
    pub(crate) fn identity(&self) -> (Station, Tenant) {
        (self.station(), self.tenant)
    }

    /// Name of the session among the sealed ones.
    pub(crate) fn session(&self) -> (u64, u32) {
        (self.addr, self.remote_sid)
    }

    /// Its endpoint `ep` as the source of a message; `p` is the number of the peer.
    #[inline(always)]
    pub(crate) fn src(&self, p: PeerIdx, ep: u16) -> Src {
        Src::of(p, ep).with_tenant(self.tenant)
    }

    /// Whether a frame's addresses are those of the peer and of this node (`own`).
    #[inline(always)]
    pub(crate) fn is_from(&self, own: u64, head: &FrameHead) -> bool {
        // The upper two bytes of the words hold another field of the frame, or the number.
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

    /// The congestion window may have shrunk: reduces the quota accordingly.
    #[inline]
    pub(crate) fn note_window(&mut self) {
        self.tx_quota = self.tx_quota.min(self.snd.room() as u16);
    }

    /// A packet was sent that acknowledges everything received, if no packet is missing.
    #[inline]
    pub(crate) fn carried_ack(&mut self) {
        if self.rcv.is_empty() {
            (self.owed, self.ack_now) = (0, false);
        }
    }

    /// Assigns the PSN of the packet that was just sent.
    #[inline(always)]
    pub(crate) fn number(&mut self, now: Instant) -> Psn {
        self.probe_from(now);
        self.snd.number()
    }

    /// As [`number`](Self::number), for a packet without a record on a path that does not read the
    /// clock: `turn` is the time of this turn. False, and nothing has happened, if the clock must
    /// be read, since [the peer's silence counts](Self::begins_to_wait) from now.
    #[inline(always)]
    pub(super) fn number_by_turn(&mut self, turn: Instant) -> bool {
        if self.begins_to_wait(turn) {
            return false;
        }
        self.number(turn);
        true
    }

    /// Assigns the PSN of the packet that was just sent and records the packet for retransmission.
    /// Returns the record that `made` makes with the PSN. The caller has checked that a record is
    /// free.
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

    /// The slot of the peer, while a session with it is open.
    #[inline(always)]
    pub(crate) fn slot(&self) -> PeerIdx {
        slot_of(self.sid)
    }

    /// Starts a flight: a packet is sent and none was in flight.
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

    /// Whether the silence of the peer counts from a packet sent now without a record, so that the
    /// clock must be read. If a packet of the peer arrived in this `turn`, silence counts from the
    /// turn.
    #[inline(always)]
    pub(super) fn begins_to_wait(&self, turn: Instant) -> bool {
        self.snd.in_flight() == 0 && self.last_rx != turn || self.timer_at == Instant(u64::MAX)
    }

    /// A packet is sent. If it starts a flight, the peer is probed once it has been silent since
    /// `now`.
    #[inline(always)]
    fn probe_from(&mut self, now: Instant) {
        if self.snd.in_flight() == 0 {
            self.probe_at = now;
        }
    }

    /// Negation of [`begins_to_wait`](Self::begins_to_wait): the timer is armed and a packet of the
    /// peer arrived in this turn, so the clock is not read. Restarts the probe interval if the
    /// packet starts a flight, as [`probe_from`](Self::probe_from) does. (Harmless if the packet
    /// does not leave: with nothing in flight, a packet of the peer arrived in this turn.)
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

    /// Whether one more packet of a lossless path may arrive before any is acknowledged.
    #[inline(always)]
    pub(super) fn may_owe_ack(&self) -> bool {
        self.owed < ACK_EVERY_LOSSLESS - 1
    }

    /// Counts one more packet of a lossless path to acknowledge. True if an acknowledgement has
    /// become due: the caller [queues](super::Due::make_ready) the peer.
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

    /// Longest message that fits in one frame together with any optional header, bytes.
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
        // On a lossless path congestion leaves at least the window. One place is reserved for an
        // answer that is sent when nothing is in flight, which is not counted here.
        let window = self.snd.limit() - self.snd.in_flight().max(1);
        self.credits().min(self.snd.room()).min(window) as u16
    }

    /// Whether the last packet that arrived had AR.
    #[inline(always)]
    pub(crate) fn last_had_ar(&self) -> bool {
        self.ar_psn == self.rx_newest
    }

    /// Records which packet has just arrived.
    #[inline]
    pub(crate) fn note_arrival(&mut self, now: Instant, psn: Psn, resent: bool) {
        (self.rx_newest, self.rx_at, self.rx_resent) = (psn, ack_time(now), resent);
    }

    /// Counts `n` answers to packets of the slow path, at most as many as are outstanding. Answers
    /// of the fast path are counted one by one.
    pub(crate) fn answered(&mut self, n: u16) {
        let n = u16::from(self.long_answers).min(n) as u8;
        (self.answers, self.long_answers) = (self.answers - n, self.long_answers - n);
    }

    /// Operations of the fast path in flight.
    pub(crate) fn fast_ops(&self) -> u8 {
        self.answers - self.long_answers
    }

    /// Whether anything is queued for sending, for lack of room, credit or an answer.
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

    /// Requests a PING in this turn.
    pub(crate) fn request_ping(&mut self) {
        self.pings = self.pings.max(1);
    }

    /// Whether the peer was probed often enough to be declared dead if it does not answer: an
    /// opening session by two OPENs after the first, an open one by [`PROBES_MIN`] probes.
    pub(crate) fn was_probed(&self) -> bool {
        match self.state {
            State::Open => self.probes >= PROBES_MIN,
            _ => self.backoff >= 2,
        }
    }

    /// Whether the peer owes an answer, so that its silence counts.
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
                    // Responses that cannot be sent: without a verdict on the peer they would stay
                    // for ever.
                    || self.responses > 0
                    || self.coll_waits > 0
            }
        }
    }

    /// An operation starts to wait for the peer. If it is the first one, the peer's silence counts
    /// from now.
    #[inline]
    pub(crate) fn begin_to_wait(&mut self, now: Instant) {
        if !self.owes() {
            self.last_rx = now;
            self.probes = 0;
            self.probe_at = now;
        }
    }

    /// Whether the session holds no resources, so that its record may be reused.
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

    /// Whether credit was requested and the peer has answered without granting enough.
    pub(super) fn credit_is_short(&self) -> bool {
        self.has_requested_credit && self.snd.una.since(self.credit_requested_at) > 0
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

/// The peer index in a sid.
pub(crate) const fn slot_of(sid: u32) -> PeerIdx {
    PeerIdx::of(sid & ((1 << SLOT_BITS) - 1))
}

/// The sid after `sid` for the same slot; never 0.
pub(crate) const fn next_sid(slot: PeerIdx, generation: u32) -> u32 {
    slot.get() | (1 + generation % GENERATIONS) << SLOT_BITS
}

/// Generations of a slot before a sid repeats. Generation 0 is not used, so that no sid is 0.
pub(crate) const GENERATIONS: u32 = (1 << (32 - SLOT_BITS)) - 1;

const _: () = assert!(NONE > 1 << SLOT_BITS);
