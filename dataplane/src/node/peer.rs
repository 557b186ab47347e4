//! What a node knows of another node, and the session with it.
//!
//! A peer is a MAC. It has at most one session at a time, named by an index and a generation that
//! this side chose (`sid`) and by those that the other side chose (`remote_sid`). A session is set
//! up by three packets: OPEN, OPEN with an echo, and any packet that names the echo's sender's
//! sid; nothing that an application sent is in the first two, so a stale OPEN can waste a record
//! but not repeat a message. The states:
//!
//! | state | meaning | leaves by |
//! |---|---|---|
//! | `Idle` | no session | something to send; an OPEN, with proof where that is wanted |
//! | `Opening` | our OPEN is out | an OPEN that echoes ours; an OPEN that crossed it |
//! | `Answered` | we answered theirs | a packet that names our sid; an OPEN that echoes ours |
//! | `Open` | both know | silence, RST, close |

use std::mem::offset_of;

use barewire_driver::frame::ETH_HDR_LEN;
use barewire_driver::hint::cold;
use barewire_driver::port::MacAddr;

use super::AvTable;
use super::path::Path;
use crate::plant::{Bug, planted};
use crate::proto::blocks::UNIT;
use crate::rel::psn::Psn;
use crate::rel::rtt::Rtt;
use crate::rel::sack::RcvBitmap;
use crate::rel::sent::{SendWindow, SentPool, WINDOW};
use crate::slab::{Line, List, NONE, Queue, Slab};
use crate::table::{Table, Vacant};
use crate::types::{FI_ADDR_UNSPEC, FiAddr, Instant};
use crate::wire::{Base, EagerMsg, Ty, mac_word};

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

/// A message that arrives in several packets, while only some of them are here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reassembly {
    pub(crate) to: ReassemblyDst,
    /// Its length.
    pub(crate) len: u64,
    /// Where the next piece begins.
    pub(crate) off: u64,
    /// Its remote CQ data.
    pub(crate) imm: Option<u64>,
}

/// Where the pieces of a message go.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ReassemblyDst {
    /// Into a posted receive, from `base` of its buffer.
    Recv { recv: u32, base: u64 },
    /// Into an unexpected message.
    Store { msg: u32 },
}

/// The peers of a node.
pub(crate) type Peers = Table<Peer, Line>;

/// What an address vector calls an endpoint of a peer, as it was found there last: who hears the
/// same endpoint again need not look there. Whoever changes what a vector says of the peer forgets
/// it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SourceName {
    /// `NONE` if the vector does not have it.
    addr: u32,
    ep: u16,
    av: u16,
}

impl Default for SourceName {
    fn default() -> Self {
        Self::UNKNOWN
    }
}

impl SourceName {
    /// No vector has this number: a node has 1,024 of them.
    pub(crate) const UNKNOWN: Self = Self { addr: NONE, ep: 0, av: u16::MAX };

    /// What vector number `at` calls endpoint `ep` of peer `p`; [`FI_ADDR_UNSPEC`] if nothing.
    #[inline(always)]
    pub(crate) fn of(&mut self, (at, av): (u32, &Slab<AvTable>), p: u32, ep: u16) -> FiAddr {
        if self.ep != ep || u32::from(self.av) != at {
            self.look_up((at, av), p, ep);
        }
        if self.addr == NONE { FI_ADDR_UNSPEC } else { FiAddr::from(self.addr) }
    }

    #[inline(never)]
    fn look_up(&mut self, (at, av): (u32, &Slab<AvTable>), p: u32, ep: u16) {
        let addr = av[at].av.reverse(p, ep).map_or(NONE, |addr| addr as u32);
        *self = Self { addr, ep, av: at as u16 };
    }
}

/// One peer. In the order of their declaration, which is that of lines of the cache: a node with
/// many peers finds each of them out of it.
#[derive(Debug, Default)]
#[repr(C)]
pub(crate) struct Peer {
    // The first line, with the head of the slot: to receive a message of the fast path takes no
    // other.
    /// Time of the turn in which the peer was last heard, or in which we began to wait for it.
    pub(crate) last_rx: Instant,
    /// Its address, as it stands in a frame.
    pub(crate) mac_word: u64,
    /// What the sender of the last message is called.
    pub(crate) source: SourceName,
    /// Our name for the session, 0 while idle.
    pub(crate) sid: u32,
    /// The next packet in order.
    pub(crate) rcv_nxt: Psn,
    /// Credits we granted.
    pub(crate) granted: u32,
    /// Those of them that the peer used.
    pub(crate) consumed: u32,
    /// Usual messages that may be taken one after the other before there is a question to this
    /// record. Whatever else arrives from the peer, or changes what it may send, sets it to 0.
    pub(crate) rx_quota: u16,
    /// Messages of one credit that may leave by the fast path without a further question to this
    /// record. Whatever else is sent to the peer, or queued, sets it to 0.
    pub(crate) tx_quota: u16,
    /// Packets received since the last acknowledgement, or more than anybody waits for.
    pub(crate) owed: u8,
    /// An acknowledgement must go out in this turn.
    pub(crate) ack_now: bool,
    /// Probes without an answer. While there are any, the next packet in order takes none of the
    /// shortest paths, as those do not count them off.
    pub(crate) probes: u8,
    /// [`fast_path`](Self::fast_path), and the next packet in order may be taken as it is: none is
    /// early, refused or half of a message. [`note_order`](Self::note_order) sets it.
    pub(crate) in_order: bool,
    /// Its first two words end the line.
    pub(crate) snd: SendWindow,

    // In the second: what else it takes to send one.
    /// Their name for the session.
    pub(crate) remote_sid: u32,
    /// The life of the peer that the session is with, or that the application named; 0 any.
    pub(crate) inc: u64,
    /// Credits that are used, of those that the peer granted.
    pub(crate) credit_used: u32,
    /// Largest number of bytes after the Ethernet header that both take.
    pub(crate) frame_max: u32,
    pub(crate) state: State,
    /// The session is open, and what nothing is lost of is not checked for damage: most messages
    /// take the fast path.
    pub(crate) fast_path: bool,
    /// What the path to it promises.
    pub(crate) path: Path,
    /// The next packet in order was refused for this reason and has to be replaced.
    pub(crate) refused: u8,
    /// [`is_steady`](Self::is_steady) has said so, and nothing has happened since that would make
    /// it say anything else.
    pub(crate) steady: bool,
    /// Stands in the queue of peers to be served.
    pub(crate) queued: bool,
    /// Credits the peer should hold, at most [`GRANT_MAX`].
    pub(crate) target: u16,

    // In the third, fourth and fifth: what it takes to serve a peer to which an acknowledgement is
    // due, or to know that nothing else is.
    /// When the wheel calls at the latest; the end of time if it will not.
    pub(crate) timer_at: Instant,
    /// Transmit requests not yet sent in full, in order.
    pub(crate) send_q: Queue<0>,
    /// Transmit requests with bytes that the peer asked for.
    pub(crate) rndv_data_q: Queue<0>,
    /// Pulls that have a PULL or an END to send.
    pub(crate) rndv_ctl_q: Queue<0>,
    /// Answers to the peer's one-sided operations that have packets to send.
    pub(crate) resp_q: Queue<0>,
    /// The packet received last, and when, as [`ack_time`] says it.
    pub(crate) rx_newest: Psn,
    pub(crate) rx_at: u32,
    /// The refusal of the next packet.
    pub(crate) nack: Nack,
    /// Number of the next one-sided operation to the peer.
    pub(crate) rma_seq: u16,
    /// Answers to the peer's one-sided operations, those in flight included.
    pub(crate) responses: u16,
    /// Answers that are missing: one for each record of the fast path of one-sided operations, and
    /// one for each other atomic packet.
    pub(crate) answers: u8,
    /// Those of atomic packets that have no such record.
    pub(crate) long_answers: u8,
    /// Packets that arrived again since the last acknowledgement of its own.
    pub(crate) dups: u8,
    /// The packet received last came as one that was sent again.
    pub(crate) rx_resent: bool,
    pub(crate) has_nop_for: bool,
    /// An OPEN must go out in this turn.
    pub(crate) want_open: bool,
    /// PINGs that must go out in this turn; while the session opens, how often its OPEN is still
    /// repeated before the peer is dead.
    pub(crate) pings: u8,
    /// The packet that left last did not ask for an acknowledgement, and somebody waits for it.
    pub(crate) unasked: bool,
    /// Stands in the queue of such peers.
    pub(crate) is_listed_unasked: bool,
    /// A NOP must go out, so that the receiver of half a message learns that it ends there.
    pub(crate) want_nop: bool,
    pub(crate) rcv: RcvBitmap,
    /// When the last probe or OPEN went out.
    pub(crate) probe_at: Instant,
    /// The message that is half here, `NONE` if none is.
    pub(crate) reassembly: u32,
    /// Messages of collectives that are waited for.
    pub(crate) coll_waits: u32,
    /// All transmit requests to this peer, in the order of their posting.
    pub(crate) wrs: List<1>,
    /// Number of the peer's operation of which a packet was refused or given up, `NONE` if none
    /// was. With [`WITHDRAWN`](Self::WITHDRAWN) its later packets are answered.
    pub(crate) bad_seq: u32,
    /// All pulls from this peer.
    pub(crate) pulls: List<1>,
    /// Packets that arrived before one they have to wait for.
    pub(crate) reorder_buf: List<0>,

    // From here on nothing is needed for any of that.
    /// Bytes that the peer's write, of which packets are still to come, has written so far, and
    /// above [`WRITTEN_BITS`](Self::WRITTEN_BITS) of them its number.
    pub(crate) written: u64,
    /// When the oldest packet in flight was sent, or the last progress was made.
    pub(crate) progress_at: Instant,
    /// When packets that were overtaken are lost, if not 0.
    pub(crate) reorder_at: Instant,
    pub(crate) rtt: Rtt,
    /// The pulls that wait for room in the pull window, in the order in which they may ask.
    pub(crate) pull_wait: Queue<2>,
    /// A packet that was refused and has no entry, if [`has_nop_for`](Self::has_nop_for): a NOP
    /// with its number must go out.
    pub(crate) nop_for: Psn,
    /// The packet that asked for credit, if [`has_asked`](Self::has_asked).
    pub(crate) asked_at: Psn,
    pub(crate) epoch: u32,
    pub(crate) peer_epoch: u32,
    /// Epochs up to this one of `inc` are over.
    pub(crate) closed_epoch: u32,
    /// Address vector entries that name this peer.
    pub(crate) av_refs: u32,
    /// Messages of this peer that wait for a receive.
    pub(crate) unexpected: u32,
    /// Bytes that pulls from this peer have asked for and that are not here.
    pub(crate) pull_out: u32,
    /// The last of the operations of the fast path that wait for an acknowledgement, or
    /// [`NO_OP`](Self::NO_OP).
    pub(crate) last_unacked: u16,
    /// Reads, but those of the fast path, that have bytes missing.
    pub(crate) reads: u8,
    /// Timeouts in a row; while nothing is in flight, PINGs in a row that brought no credit.
    pub(crate) backoff: u8,
    /// The tail probe of this flight is out.
    pub(crate) probed: bool,
    /// Stands in the list of peers that wait for free blocks.
    pub(crate) wants_blocks: bool,
    /// Stands in the queue of peers that have pulls waiting.
    pub(crate) in_pull_queue: bool,
    /// Credit was asked for, and none of it was used since.
    pub(crate) has_asked: bool,
    /// The session is wanted here: OPEN is repeated until it is open.
    pub(crate) opens: bool,
    /// [`inc`](Self::inc) is known from an OPEN alone that anybody can have sent.
    pub(crate) is_life_claimed: bool,
    /// The lesser of what both ends of an open session accept, bytes after the Ethernet header; 0
    /// in the session with ourselves.
    pub(crate) frame_most: u16,
}

/// A field ends so many bytes after the beginning of the slot.
macro_rules! end_of {
    ($field:ident: $ty:ty) => {
        Peers::HEAD_LEN + offset_of!(Peer, $field) + size_of::<$ty>()
    };
}

const _: () = {
    assert!(end_of!(snd: u64) == 64, "a message that comes takes one line");
    assert!(end_of!(target: u16) <= Peer::HOT, "one that goes takes two");
    assert!(end_of!(reorder_buf: List<0>) <= Peer::WARM);
    assert!(Peers::SLOT_LEN <= 384, "a session has half a kilobyte, with its share of the tables");
};

/// How the refusal of a packet is said. Packed, for the sake of its neighbours.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C, packed(2))]
pub(crate) struct Nack {
    /// It must be said.
    pub(crate) want: bool,
    /// Packets in a row whose key no region has.
    bad_keys: u8,
    /// Until when the refusal waits if these are too many, in units of [`NACK_UNIT_BITS`].
    after: u32,
}

/// Wrong keys in a row after which a peer hears of each further one only a millisecond later.
const BAD_KEYS_MAX: u8 = 64;

/// Nanoseconds are shifted by so much to units of 131 us, of which eight are a millisecond.
const NACK_UNIT_BITS: u32 = 17;

impl Nack {
    /// Notes whether the key of a packet was one.
    #[inline]
    pub(crate) fn note_key(&mut self, now: Instant, bad: bool) {
        if !bad {
            self.bad_keys = 0;
            return;
        }
        self.bad_keys = self.bad_keys.saturating_add(1);
        self.after = ((now.0 >> NACK_UNIT_BITS) as u32).wrapping_add(8);
    }

    /// Whether it must be said, and now.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        self.want && self.waits(now).is_none()
    }

    /// Until when it waits, if it must be said and waits.
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
    /// Nothing is taken from it on the fast path, and nothing leaves for it.
    fn vacant() -> Self {
        Self::default()
    }
}

impl Peer {
    /// Bytes at the start of a slot that a message of the fast path touches.
    pub(crate) const HOT: usize = 128;

    /// Bytes at the start of a slot that are looked at when the peer is served.
    pub(crate) const WARM: usize = 320;

    /// In [`last_unacked`](Self::last_unacked): no operation.
    pub(crate) const NO_OP: u16 = u16::MAX;

    /// See [`bad_seq`](Self::bad_seq). No operation's number has this bit.
    pub(crate) const WITHDRAWN: u32 = 1 << 16;

    /// Bits of [`written`](Self::written) that count bytes.
    pub(crate) const WRITTEN_BITS: u32 = 48;

    pub(crate) fn new(mac: MacAddr, now: Instant) -> Self {
        Self {
            mac_word: mac_word(mac),
            target: GRANT_FIRST as u16,
            timer_at: Instant(u64::MAX),
            rx_at: ack_time(now),
            progress_at: now,
            probe_at: now,
            reassembly: NONE,
            bad_seq: NONE,
            last_unacked: Self::NO_OP,
            ..Self::default()
        }
    }

    pub(crate) fn mac(&self) -> MacAddr {
        let [a, b, c, d, e, f, ..] = self.mac_word.to_le_bytes();
        MacAddr([a, b, c, d, e, f])
    }

    /// What every packet of type `ty` to the peer starts with, from station `src`; its number, if
    /// it has one, is the next.
    #[inline]
    pub(crate) fn base(&self, src: MacAddr, ty: Ty) -> Base {
        Base {
            dst: self.mac(),
            src,
            ty,
            ar: false,
            rtx: false,
            crc: self.path.has_crc(),
            dst_sid: self.remote_sid,
            psn: self.snd.nxt,
            cack: self.rcv_nxt,
            grant: self.granted as u16,
            plen: 0,
        }
    }

    /// The congestion window may have become smaller: no more may leave at once than it has room
    /// for.
    #[inline]
    pub(crate) fn note_window(&mut self) {
        self.tx_quota = self.tx_quota.min(self.snd.room() as u16);
    }

    /// A packet has gone out, and with it the acknowledgement of all that came, if none is early.
    #[inline]
    pub(crate) fn carried_ack(&mut self) {
        if self.rcv.is_empty() {
            (self.owed, self.ack_now) = (0, false);
        }
    }

    /// Numbers the packet that has just gone out.
    #[inline]
    pub(crate) fn number(&mut self, now: Instant) -> Psn {
        if self.snd.in_flight() == 0 {
            self.probe_at = now;
        }
        self.snd.number()
    }

    /// Keeps the packet numbered last, whose entry is `idx`.
    #[inline]
    pub(crate) fn keep(&mut self, now: Instant, sent: &mut SentPool, idx: u32) {
        if self.snd.is_empty() {
            self.begin_flight(now);
        }
        self.snd.push(sent, idx);
        self.steady = false;
    }

    /// Its slot, while a session with it is open.
    #[inline(always)]
    pub(crate) fn slot(&self) -> u32 {
        slot_of(self.sid)
    }

    /// A packet goes out, and none was in flight.
    #[inline]
    pub(crate) fn begin_flight(&mut self, now: Instant) {
        self.progress_at = now;
        self.probed = false;
        self.backoff = 0;
    }

    /// Whether what is to be sent waits for credit alone, and nothing is in flight whose loss
    /// would be seen.
    pub(crate) fn is_stalled(&self) -> bool {
        self.snd.is_empty() && !self.send_q.is_empty()
    }

    /// Whether the next packet in order may take the fast path.
    #[inline]
    pub(crate) fn is_in_order(&self) -> bool {
        self.fast_path && self.refused == 0 && self.reassembly == NONE && self.rcv.is_empty()
    }

    /// Whether a packet that leaves now without a record starts the peer's silence, so that the
    /// clock has to be read. A peer that was heard in this `turn` is waited for since then.
    #[inline(always)]
    pub(super) fn begins_to_wait(&self, turn: Instant) -> bool {
        self.snd.in_flight() == 0 && self.last_rx != turn || self.timer_at == Instant(u64::MAX)
    }

    /// A packet leaves without a record: if it is the first of a flight, the peer is probed when
    /// it has been silent since `now`.
    #[inline(always)]
    pub(super) fn probe_from(&mut self, now: Instant) {
        if self.snd.in_flight() == 0 {
            self.probe_at = now;
        }
    }

    /// As [`begins_to_wait`](Self::begins_to_wait), but the other way round; and if nobody does, a
    /// packet that is the first of a flight need not [be said](Self::probe_from) to be. (That is
    /// no harm if it does not leave: a peer of whom nothing is in flight was heard just now.)
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

    /// A packet says by its `cack` alone all that an acknowledgement would, if none is early.
    #[inline(always)]
    pub(crate) fn carried_ack_in_order(&mut self) {
        if self.in_order {
            (self.owed, self.ack_now) = (0, false);
        }
    }

    /// To be called when a packet has been taken on the slow path.
    #[inline]
    pub(crate) fn note_order(&mut self) {
        self.in_order = self.is_in_order() || self.in_order && planted(Bug::InOrderKept);
        (self.rx_quota, self.steady) = (0, false);
    }

    /// Whether the next packet in order may be taken as it is, and nobody waits for what it
    /// acknowledges and grants. Whoever makes the peer ready, or keeps something for an
    /// acknowledgement, clears [`steady`](Self::steady).
    #[inline(always)]
    pub(crate) fn is_steady(&self) -> bool {
        let kept = !self.snd.is_empty() || self.last_unacked != Self::NO_OP;
        let probed = self.probes > 0;
        self.in_order && !self.any_waits() && !kept && !probed && self.bad_seq == NONE
    }

    /// How many usual messages in order could be taken now one after the other without our owing
    /// the peer an acknowledgement or credits, when one in `ack_every` is acknowledged.
    pub(crate) fn rx_room(&self, ack_every: u8) -> u16 {
        if !self.in_order || self.probes > 0 {
            return 0;
        }
        let credits = self.outstanding().saturating_sub(self.low());
        let acks = (ack_every - 1).saturating_sub(self.owed);
        credits.min(acks.into()) as u16
    }

    /// Our name of the session and the number of the next packet, as they stand in it: see
    /// [`EagerTaggedView::sid_psn`](crate::wire::EagerTaggedView::sid_psn) and
    /// [`BaseWords::sid_psn`](crate::wire::BaseWords::sid_psn).
    #[inline(always)]
    pub(crate) fn next_sid_psn(&self) -> u64 {
        u64::from(self.sid) | u64::from(self.rcv_nxt.0) << 32
    }

    /// Asks again how many usual messages may be taken, on a port that loses nothing, and says
    /// whether one may: an acknowledgement may have left since.
    #[cold]
    #[inline(never)]
    pub(crate) fn refill_rx_quota(&mut self) -> bool {
        self.rx_quota = self.rx_room(ACK_EVERY_LOSSLESS);
        self.rx_quota > 0
    }

    /// How many messages of one credit could be sent now one after the other, in a frame each.
    pub(crate) fn tx_room(&self) -> u16 {
        let holds = self.frame_max as usize + ETH_HDR_LEN >= EagerMsg::AROUND_MAX + UNIT;
        if !self.fast_path || !holds || self.send_q.head != NONE || !self.snd.open() {
            return 0;
        }
        // On a port that loses nothing the second is never less than the third. One is left for an
        // answer that leaves when nothing is in flight, which is not counted here.
        let window = WINDOW - self.snd.in_flight().max(1);
        self.credits().min(self.snd.room()).min(window) as u16
    }

    /// Notes which packet has just arrived.
    #[inline]
    pub(crate) fn note_arrival(&mut self, now: Instant, psn: Psn, resent: bool) {
        (self.rx_newest, self.rx_at, self.rx_resent) = (psn, ack_time(now), resent);
    }

    /// Counts off `n` answers to operations that are none of the fast path. Whatever the peer says,
    /// those of the fast path are counted off one by one.
    pub(crate) fn answered(&mut self, n: u16) {
        let n = u16::from(self.long_answers).min(n) as u8;
        (self.answers, self.long_answers) = (self.answers - n, self.long_answers - n);
    }

    /// Records of the fast path of one-sided operations.
    pub(crate) fn fast_ops(&self) -> u8 {
        self.answers - self.long_answers
    }

    /// Whether anything waits to be sent, for room, credit or an answer.
    #[inline(always)]
    pub(crate) fn any_waits(&self) -> bool {
        // All bits of a head are set if nothing is in the list.
        let heads =
            self.send_q.head & self.rndv_data_q.head & self.rndv_ctl_q.head & self.resp_q.head;
        heads != NONE
    }

    /// Credits left to send with.
    pub(crate) fn credits(&self) -> u32 {
        self.snd.credit.wrapping_sub(self.credit_used)
    }

    /// Of fewer credits than this the peer is granted more.
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

    /// Whether the peer was asked often enough to be dead if it does not answer: a session that
    /// opens by two OPENs more than the first, one that is open by [`PROBES_MIN`] probes.
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
                    || self.reassembly != NONE
                    || !self.reorder_buf.is_empty()
                    // Answers that cannot be sent: a station that is gone would have them for ever.
                    || self.responses > 0
                    || self.coll_waits > 0
            }
        }
    }

    /// An operation is about to wait for it: if none did, its silence counts from now.
    #[inline]
    pub(crate) fn begin_to_wait(&mut self, now: Instant) {
        if !self.owes() {
            self.last_rx = now;
            self.probes = 0;
            self.probe_at = now;
        }
    }

    /// Whether the session could be forgotten without anybody noticing.
    pub(crate) fn is_idle(&self) -> bool {
        self.wrs.is_empty()
            && self.fast_ops() == 0
            && self.pulls.is_empty()
            && self.reorder_buf.is_empty()
            && self.responses == 0
            && self.unexpected == 0
            && self.snd.in_flight() == 0
            && self.reassembly == NONE
            && self.coll_waits == 0
    }
}

/// A time in the unit of an acknowledgement's delay. Wraps after minutes; a delay above four
/// milliseconds says only that.
#[inline]
pub(crate) const fn ack_time(now: Instant) -> u32 {
    (now.0 / 64) as u32
}

/// The index in a session name.
pub(crate) const fn slot_of(sid: u32) -> u32 {
    sid & ((1 << SLOT_BITS) - 1)
}

/// The session name after `sid` for the same slot; never 0.
pub(crate) const fn next_sid(slot: u32, generation: u32) -> u32 {
    slot | (1 + generation % GENERATIONS) << SLOT_BITS
}

/// Generations of a slot before a name comes back. 0 is none of them, so that no name is 0.
pub(crate) const GENERATIONS: u32 = (1 << (32 - SLOT_BITS)) - 1;

const _: () = assert!(NONE > 1 << SLOT_BITS);
