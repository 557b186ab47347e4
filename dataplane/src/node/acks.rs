//! Acknowledgements on a lossy port: which packets request one, and when it is sent.
//!
//! An ACK packet costs both ends a frame, so a stream of packets gets one ACK for many. But a
//! program that has sent a single message may wait for nothing else. The sender knows: it requests
//! an acknowledgement (AR) with the last packet of a message that is alone in flight or follows a
//! pause, and with the packet that closes its window. Packets in quick succession request none; the
//! receiver acknowledges several of them at once. If the last packet of a burst requested none, the
//! sender requests it by a PING.
//!
//! The receiver acknowledges a packet with AR in the turn that received it ([`Peer::quick_ack`]),
//! since a program that has got the awaited message may compute next and not poll again for long.
//! If the program usually answers at once, the ACK waits for the first turn that finds no frame, so
//! that the answer carries it, like TCP's quick and delayed acknowledgements. Packets without AR
//! are acknowledged after [`ACK_EVERY`](super::peer::ACK_EVERY) of them or [`ACK_DELAY_NS`]. So the
//! wait is bounded even if a PING is lost, or if other traffic leaves no pause to send one.

use std::collections::VecDeque;

use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::hint::cold;
use barewire_driver::mem::InlineBytes;
use barewire_driver::port::Tx;

use super::fast_rma::PeerBase;
use super::packet::Packet;
use super::peer::{Peer, Peers, State, ack_time, slot_of};
use super::{Control, Due, DynSink, FrameSink, InPlaceFrame, Node, Sending, Todo};
use crate::idx::{PeerIdx, TxIdx};
use crate::rel::congestion::CongestionControl;
use crate::rel::psn::Psn;
use crate::rel::rtt;
use crate::rel::sent::SendWindow;
use crate::types::Instant;
use crate::wire::{self, AckOp, BASE_LEN, Base, BaseOut, BaseWords, HeadOut, TRAILER_LEN, Ty};

/// How long the acknowledgement of a packet without AR waits for further packets, nanoseconds:
/// about as long as [`ACK_EVERY`](super::peer::ACK_EVERY) of the longest frames take between two
/// processes.
pub(super) const ACK_DELAY_NS: u64 = 20_000;

/// Pause after which a sender sends a PING for packets without AR, nanoseconds.
const PING_AFTER_NS: u64 = 1_000;

/// With less of [`Peer::tx_quota`] left than this, an ACK refreshes it, so that the sender of a
/// stream need not.
const QUOTA_LOW: u16 = 16;

/// Capacity of each queue, in peers.
const QUEUE: usize = 4096;

/// Peers to which an acknowledgement is due, and peers from which one is due, on a lossy port. A
/// queue entry may be out of date: it is checked against the peer's record.
#[derive(Debug)]
pub(super) struct Acks {
    /// Peers to which an acknowledgement has become due since the queue was last served.
    owing: VecDeque<PeerIdx>,
    /// When the first of the frames to be acknowledged arrived.
    owed_since: Option<Instant>,
    /// One of these frames had AR.
    requested: bool,
    /// The acknowledgement is due at once: see [`Peer::quick_ack`].
    quick: bool,
    /// The last quick ACK, until the next turn judges whether it should have been delayed.
    quick_sent: Option<QuickAck>,
    /// Peers with packets in flight of which the last had no AR, at most [`QUEUE`]: for further
    /// peers the acknowledgement takes a little longer.
    tails: VecDeque<PeerIdx>,
    /// A packet whose acknowledgement a completion waits for was sent since the last turn.
    fresh: bool,
    /// The first turn after the last such packet was sent: not the time of sending, as writing the
    /// frame may take long.
    last_sent_at: Instant,
    /// Number of received frames at the last turn that read it.
    seen_frames: u64,
}

/// A quick ACK that was sent.
#[derive(Clone, Copy, Debug)]
struct QuickAck {
    peer: PeerIdx,
    at: Instant,
    /// The PSN of the next packet to the peer at that time.
    nxt: Psn,
}

impl Acks {
    pub(super) fn new() -> Self {
        let queue = || VecDeque::with_capacity(QUEUE);
        let (owing, tails) = (queue(), queue());
        let last_sent_at = Instant(0);
        Self {
            owing,
            owed_since: None,
            requested: false,
            quick: false,
            quick_sent: None,
            tails,
            fresh: false,
            last_sent_at,
            seen_frames: 0,
        }
    }

    /// Records that the last packet of a request that waits for its acknowledgement was sent to
    /// `peer` in slot `p`; `ar` if it has AR.
    #[inline(always)]
    pub(super) fn note_sent(&mut self, todo: &mut Todo, p: PeerIdx, peer: &mut Peer, ar: bool) {
        self.fresh = true;
        *todo |= Todo::ACKS;
        peer.lacks_ar = !ar;
        if ar {
            return;
        }
        if !peer.in_tail_queue && self.tails.len() < QUEUE {
            peer.in_tail_queue = true;
            self.tails.push_back(p);
        }
    }

    /// Records whether packet `psn` of `peer` has AR.
    #[inline(always)]
    pub(super) fn note_ar(&mut self, peer: &mut Peer, psn: Psn, ar: bool) {
        if ar {
            peer.ar_psn = psn;
            self.requested = true;
            self.quick |= peer.quick_ack;
        }
    }

    /// Records one more packet of peer `p` to acknowledge, the `owed`-th since the last
    /// acknowledgement. Its acknowledgement may wait for further packets.
    #[inline(always)]
    pub(super) fn owe(&mut self, todo: &mut Todo, now: Instant, (p, owed): (PeerIdx, u8)) {
        if self.owed_since.is_none() {
            self.owed_since = Some(now);
            *todo |= Todo::ACKS;
        }
        if owed == 1 {
            self.owing.push_back(p);
        }
    }

    /// Records that an ACK packet has to echo a congestion mark to peer `p`, even if another packet
    /// carries the acknowledgement before.
    fn owe_echo(&mut self, todo: &mut Todo, now: Instant, p: PeerIdx) {
        self.owed_since.get_or_insert(now);
        *todo |= Todo::ACKS;
        self.owing.push_back(p);
    }

    /// Records that a separate ACK packet is about to be sent to `peer` in slot `p`. If the last
    /// packet that arrived had AR, the next ACK is a quick one.
    #[inline(always)]
    fn note_quick(&mut self, now: Instant, p: PeerIdx, peer: &mut Peer) {
        let had_ar = peer.last_had_ar();
        if had_ar && peer.quick_ack {
            self.quick_sent = Some(QuickAck { peer: p, at: now, nxt: peer.snd.nxt });
        }
        peer.quick_ack = had_ar;
    }

    /// Whether the quick ACK of an earlier turn is still to be [judged](Self::judge_quick_ack).
    #[inline(always)]
    pub(super) fn has_quick_sent(&self) -> bool {
        self.quick_sent.is_some()
    }

    /// Records the number of frames received so far.
    #[inline(always)]
    pub(super) fn note_frames(&mut self, received: u64) {
        self.seen_frames = received;
    }

    /// Whether a turn at `now`, with `received` frames so far, has no acknowledgement and no PING
    /// to send.
    #[inline(always)]
    pub(super) fn has_nothing_due(&mut self, now: Instant, received: u64) -> bool {
        if self.is_ping_due(now) && !self.tails.is_empty() {
            return cold(false);
        }
        if self.is_ack_due(now, self.seen_frames == received) {
            return false;
        }
        self.seen_frames = received;
        true
    }

    /// Whether the next turn has to check for due acknowledgements or PINGs.
    #[inline(always)]
    pub(super) fn is_waiting(&self) -> bool {
        self.fresh
            || self.owed_since.is_some()
            || !self.tails.is_empty()
            || self.quick_sent.is_some()
    }

    /// Whether PINGs are due for packets without AR: the pause since the last of them is over.
    #[inline(always)]
    fn is_ping_due(&mut self, now: Instant) -> bool {
        if self.fresh {
            (self.fresh, self.last_sent_at) = (false, now);
        }
        self.is_pause(now)
    }

    /// Whether acknowledgements are due; `idle` if no frame has arrived since the last turn.
    #[inline(always)]
    fn is_ack_due(&mut self, now: Instant, idle: bool) -> bool {
        let Some(since) = self.owed_since else {
            // The packet with AR was refused or dropped.
            (self.requested, self.quick) = (false, false);
            return false;
        };
        self.quick || idle && self.requested || now.since(since) >= ACK_DELAY_NS
    }

    /// Whether the pause since the last packet that a completion waits for is over.
    #[inline(always)]
    fn is_pause(&self, now: Instant) -> bool {
        now.since(self.last_sent_at) >= PING_AFTER_NS
    }

    /// Whether the next packet of `snd` gets AR. `ends` if it is the last packet of a request whose
    /// completion waits for it, with `own` other packets of the request in flight. `now` is the
    /// time of the last turn.
    #[inline(always)]
    pub(super) fn requests_ar(&self, now: Instant, snd: &SendWindow, own: u32, ends: bool) -> bool {
        let is_resting = !self.fresh && self.is_pause(now);
        snd.asks_ack(ends && (snd.in_flight() == own || is_resting))
    }

    /// When an acknowledgement or a PING is due next; `last_turn_at` is the time of the last turn.
    pub(super) fn due(&self, last_turn_at: Instant) -> Option<Instant> {
        let ack =
            self.owed_since.map(|at| if self.requested { last_turn_at } else { at + ACK_DELAY_NS });
        let ping = if self.fresh { last_turn_at } else { self.last_sent_at + PING_AFTER_NS };
        let ping = (!self.tails.is_empty()).then_some(ping);
        [ack, ping].into_iter().flatten().min()
    }

    /// Records that packet `psn`, of type `ty`, had AR.
    #[inline]
    pub(super) fn on_ack_request(
        &mut self,
        peers: &mut Peers,
        due: &mut Due,
        p: PeerIdx,
        (ty, psn): (Ty, Psn),
    ) {
        let peer = &mut peers[p];
        if peer.path.is_lossless() || !ty.is_reliable() || ty == Ty::Nop {
            peer.ack_now = true;
            due.make_ready(peers, p);
        } else {
            self.note_ar(peer, psn, true);
            due.todo |= Todo::ACKS;
        }
    }

    /// Judges the quick ACK of an earlier turn: if the program has sent a packet to the peer soon
    /// after it, that packet should have carried the acknowledgement.
    #[cold]
    pub(super) fn judge_quick_ack(&mut self, peers: &mut Peers, now: Instant) {
        let Some(QuickAck { peer, at, nxt }) = self.quick_sent.take() else { return };
        if let Some(peer) = peers.get_mut(peer)
            && peer.snd.nxt != nxt
            && now.since(at) < ACK_DELAY_NS
        {
            peer.quick_ack = false;
        }
    }
}

impl Peer {
    /// Processes an echoed congestion mark: packets to the peer meet a long queue.
    #[cold]
    #[inline(never)]
    pub(super) fn on_echo(&mut self, now: Instant) {
        if !self.path.is_lossless() {
            self.snd.cwnd.on_mark(now, &self.rtt);
            self.note_window();
        }
    }
}

impl Node {
    /// Sends a PING to each peer whose last packet in flight had no AR, once the pause is over.
    pub(super) fn probe_tails(&mut self, now: Instant) {
        if !self.acks.is_ping_due(now) {
            return;
        }
        while let Some(p) = self.acks.tails.pop_front() {
            let Some(peer) = self.peers.get_mut(p) else { continue };
            peer.in_tail_queue = false;
            // A held packet gets AR when it is sent.
            let needs_ping =
                std::mem::take(&mut peer.lacks_ar) && !self.packs.holds_for(p, &self.tx);
            if needs_ping && peer.state == State::Open && peer.snd.in_flight() > 0 {
                peer.request_ping();
                self.counters.tx_asks += 1;
                self.due.make_ready(&mut self.peers, p);
            }
        }
    }

    /// Whether acknowledgements are due in a turn at `now`.
    #[inline(always)]
    pub fn owes_acks(&mut self, now: Instant) -> bool {
        self.acks.is_ack_due(now, self.acks.seen_frames == self.counters.rx_frames)
    }

    /// Sends an ACK for all packets whose acknowledgement no later packet has carried. An ACK for
    /// which the port has no room is left to the next [`transmit`](Self::transmit).
    pub fn send_acks(&mut self, now: Instant, out: &mut impl FrameSink) {
        if self.openings.seals.is_some() {
            return self.through_seals(out, |node, out| node.send_acks(now, &mut DynSink(out)));
        }
        let since = self.acks.owed_since.take().unwrap_or(now);
        (self.acks.requested, self.acks.quick) = (false, false);
        while let Some(p) = self.acks.owing.pop_front() {
            let Some(peer) = self.peers.get_mut(p) else { continue };
            let echoes = peer.marked;
            if peer.owed == 0 && !echoes || peer.state != State::Open {
                // A packet of the program has carried it: too late, if AR was set.
                peer.quick_ack |= peer.last_had_ar() && now.since(since) >= ACK_DELAY_NS;
                continue;
            }
            peer.ack_now = true;
            // An echo alone does not judge the acknowledgement, which another packet has carried.
            if !peer.queued && peer.owed > 0 {
                self.acks.note_quick(now, p, peer);
            }
            if (echoes || !peer.queued) && !self.send_ack(now, p, out) {
                self.due.make_ready(&mut self.peers, p);
                if echoes {
                    // Only a full port holds an ACK back, so the others wait as well.
                    self.acks.owe_echo(&mut self.due.todo, now, p);
                    break;
                }
            }
        }
        self.due.todo.set(Todo::ACKS, self.acks.is_waiting());
    }

    /// Records that `frame` arrived with a congestion mark: a queue on its path is long. If it is a
    /// reliable packet of a session, the next ACK packet echoes the mark.
    #[cold]
    #[inline(never)]
    pub(super) fn note_mark(&mut self, now: Instant, frame: &RxFrame<'_>) {
        self.counters.rx_marked += 1;
        let Some(raw) = Base::parse_raw(frame) else { return };
        let p = slot_of(raw.dst_sid);
        let Some(peer) = self.peers.get_mut(p) else { return };
        let is_its = peer.sid == raw.dst_sid && peer.station() == raw.src;
        // An ACK is not echoed, or two nodes would answer each other for ever.
        let is_reliable = Ty::try_from(raw.ty).is_ok_and(Ty::is_reliable);
        // A frame that came through memory has met no queue of a router.
        let is_new = peer.takes_echo && !peer.marked && !peer.path.is_lossless();
        if is_its && is_reliable && is_new && peer.state == State::Open {
            peer.marked = true;
            self.acks.owe_echo(&mut self.due.todo, now, p);
        }
    }

    /// Sends an ACK packet, with a SACK of packets received out of order.
    pub(super) fn send_ack(&mut self, now: Instant, p: PeerIdx, out: &mut impl FrameSink) -> bool {
        let peer = &self.peers[p];
        let mut op = AckOp {
            delay: ack_time(now).wrapping_sub(peer.rx_at).min(u32::from(u16::MAX)) as u16,
            newest: peer.rx_newest,
            dups: peer.dups,
            resent: peer.rx_resent,
            ..AckOp::default()
        };
        let sent = if peer.rcv.is_empty() && peer.addr != self.port.addr && !peer.marked {
            let frame = AckTo::new(PeerBase { peer, src: &self.port.addr }, &op);
            let len = AckTo::LEN + frame.inline_bytes().len();
            let sent = out.send_in_place(&frame);
            self.sending().left(p, (Ty::Ack, len), sent)
        } else {
            self.sending().send_sack(p, &mut op, out)
        };
        if sent != Tx::Sent {
            return cold(false);
        }
        let peer = &mut self.peers[p];
        (peer.owed, peer.ack_now, peer.dups) = (0, false, 0);
        if std::mem::take(&mut peer.marked) {
            self.counters.tx_echoes += 1;
        }
        self.counters.tx_acks += 1;
        true
    }

    /// Processes an ACK packet of an open session, with a checksum if `crc`. False if the frame is
    /// anything else: then nothing has happened.
    #[inline(always)]
    pub(super) fn rx_ack(&mut self, now: Instant, frame: &RxFrame<'_>, crc: bool) -> bool {
        let Some((base_words, op)) = BaseWords::ack(frame, crc) else { return false };
        let p = slot_of(base_words.dst_sid());
        let Some(peer) = self.peers.get(p) else { return false };
        let ours = peer.sid == base_words.dst_sid()
            && peer.state == State::Open
            && peer.is_from(self.port.addr, &base_words.head);
        let path = peer.path;
        if !ours || !path.admits(crc, frame.is_near()) {
            return false;
        }
        self.control().count_received(p, frame);
        if self.take_ack_and_credit(now, p, base_words.cack, base_words.grant()) {
            self.on_ack_frame(now, p, base_words.cack, (&op, frame));
            let peer = &mut self.peers[p];
            if peer.tx_quota < QUOTA_LOW && !path.is_lossless() {
                peer.tx_quota = peer.tx_room();
            }
        }
        true
    }
}

impl Sending<'_> {
    /// Sends the ACK packet `op` with the echo of a mark and a SACK, as far as a frame of the
    /// session has room.
    #[cold]
    #[inline(never)]
    fn send_sack(&mut self, p: PeerIdx, op: &mut AckOp, out: &mut impl FrameSink) -> Tx {
        let peer = &self.peers[p];
        if peer.addr == self.port.addr {
            return self.emit(p, &Packet::control(Ty::Ack, peer.snd.nxt, &op.head()), out);
        }
        let (mut words, room) = ([0; AckOp::WORDS_MAX], self.peers[p].payload_max(AckOp::LEN) / 8);
        let fit = room.min(words.len());
        op.count = peer.rcv.sack(peer.rcv_nxt, &mut words[..fit]) as u8;
        let mut bytes = [0; BASE_LEN + AckOp::LEN_MAX + TRAILER_LEN];
        let (fixed, rest) = bytes.split_first_chunk_mut().expect("it is more than a base");
        Base { ce: peer.marked, ..peer.base(self.port.station, Ty::Ack) }.emit(fixed);
        let mut len = BASE_LEN + op.emit(&words, rest);
        if peer.path.has_crc() {
            let crc = wire::crc_of_head(&bytes[..len]).to_le_bytes();
            bytes[len..][..TRAILER_LEN].copy_from_slice(&crc);
            len += TRAILER_LEN;
        }
        let sent = out.send(&TxFrame::whole(&bytes[..len]));
        self.left(p, (Ty::Ack, len), sent)
    }

    /// [`Acks::requests_ar`] for the next packet to a peer on a lossy path; `w` is its request,
    /// `NONE` if there is none.
    #[inline]
    pub(super) fn requests_ar(&self, p: PeerIdx, w: TxIdx, ends: bool) -> bool {
        let own = if w == TxIdx::NONE { 0 } else { self.tx[w].unacked };
        self.acks.requests_ar(self.turn.polled_at, &self.peers[p].snd, own, ends)
    }
}

impl Control<'_> {
    /// Makes the next [`transmit`](Node::transmit) acknowledge every packet received, due or not;
    /// on a lossy path even twice if the peer may still wait, as the last acknowledgement may be
    /// lost.
    ///
    /// For a node about to close: otherwise its peers would find its process ended while they wait.
    pub fn acknowledge_all(&mut self) {
        let now = self.turn.polled_at;
        // A peer that still waits has repeated a packet since then.
        let may_wait =
            |peer: &Peer| !peer.path.is_lossless() && now.since(peer.last_rx) < 2 * rtt::RTO_MAX_NS;
        let owing = |peer: &Peer| peer.state == State::Open && (peer.owed > 0 || may_wait(peer));
        let all = self.peers.iter().filter(|(_, peer)| owing(peer));
        let all: Vec<PeerIdx> = all.map(|(p, _)| p).collect();
        for p in all {
            self.peers[p].ack_now = true;
            self.due.make_ready(self.peers, p);
        }
    }
}

/// An ACK packet to be sent, without SACK: no packet is missing.
struct AckTo<'a> {
    base: PeerBase<'a>,
    op: [u8; AckOp::LEN],
    crc: Option<u32>,
}

impl<'a> AckTo<'a> {
    /// Length without a checksum, bytes.
    const LEN: usize = BASE_LEN + AckOp::LEN;

    #[inline(always)]
    fn new(base: PeerBase<'a>, op: &AckOp) -> Self {
        let mut frame = Self { base, op: op.head(), crc: None };
        if base.peer.path.has_crc() {
            let mut bytes = [0; Self::LEN];
            frame.put(&mut bytes);
            frame.crc = Some(wire::crc_of_head(&bytes));
        }
        frame
    }
}

impl InPlaceFrame<{ AckTo::LEN }> for AckTo<'_> {
    #[inline(always)]
    fn dst(&self) -> u64 {
        self.base.peer.addr
    }

    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        self.base.put_with((Ty::Ack, self.base.peer.path.has_crc()), 0, false, out);
        out.set::<BASE_LEN, { AckOp::LEN }>(self.op);
    }

    #[inline(always)]
    fn inline_bytes(&self) -> InlineBytes {
        self.crc.map_or(InlineBytes::NONE, |crc| InlineBytes::one(crc.into(), TRAILER_LEN))
    }
}
