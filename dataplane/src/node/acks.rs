//! Acknowledgements on a lossy port: which packets ask for one, and when one is sent.
//!
//! An ACK packet is a frame that both ends pay for, so a stream of packets gets one ACK for many.
//! But a program that has sent a single message may wait for nothing else. The sender can tell: it
//! asks for an acknowledgement (AR) with the last packet of a message that is alone in flight or
//! follows a pause, and with the packet that closes its window. Packets in quick succession do not
//! ask; the receiver acknowledges them after several. If the last packet of a burst did not ask,
//! the sender asks by a PING.
//!
//! The receiver acknowledges a packet that asks in the turn that received it ([`Peer::quick_ack`]),
//! since a program that has what it polled for may compute next and not poll again for long. If the
//! program usually answers at once, the ACK waits for the first turn that finds no frame, so that
//! the answer carries it: as TCP's quick and delayed acknowledgements. Packets that do not ask are
//! acknowledged after [`ACK_EVERY`](super::peer::ACK_EVERY) of them or [`ACK_DELAY_NS`]. So the
//! wait is bounded even if a PING is lost, or if other traffic leaves no pause to send one.

use std::collections::VecDeque;

use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::hint::cold;
use barewire_driver::mem::InlineBytes;
use barewire_driver::port::Tx;

use super::fast_rma::BaseTo;
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

/// How long the acknowledgement of a packet that did not ask waits for further packets,
/// nanoseconds: about as long as [`ACK_EVERY`](super::peer::ACK_EVERY) of the longest frames take
/// between two processes.
pub(super) const ACK_DELAY_NS: u64 = 20_000;

/// The pause after which a sender asks about packets that did not ask, nanoseconds.
const ASK_AFTER_NS: u64 = 1_000;

/// With less of [`Peer::tx_quota`] left than this, an ACK refreshes it: in a stream, before the
/// sender has to.
const QUOTA_LOW: u16 = 16;

/// Peers that a queue has room for.
const QUEUE: usize = 4096;

/// Peers that we owe an acknowledgement, and peers that owe us one, on a lossy port. An entry of a
/// queue may be out of date: it is checked against the peer's record.
#[derive(Debug)]
pub(super) struct Acks {
    /// Peers that we owe an acknowledgement since the queue was last served.
    owing: VecDeque<PeerIdx>,
    /// When the first of the frames to be acknowledged arrived.
    owed_since: Option<Instant>,
    /// One of those frames asked for its acknowledgement.
    soon: bool,
    /// And it is due at once: see [`Peer::quick_ack`].
    quick: bool,
    /// The last quick ACK, until the next turn looks whether it was better delayed.
    quick_sent: Option<QuickAck>,
    /// Peers with packets in flight that did not ask, at most [`QUEUE`]: for others the
    /// acknowledgement takes a little longer.
    unasked: VecDeque<PeerIdx>,
    /// A packet whose acknowledgement a completion waits for was sent since the last turn.
    fresh: bool,
    /// The first turn after the last such packet was sent: not the time of sending, as writing the
    /// frame may take long.
    left_at: Instant,
    /// Received frames as counted by the last turn that looked.
    seen_frames: u64,
}

/// A quick ACK that has left.
#[derive(Clone, Copy, Debug)]
struct QuickAck {
    peer: PeerIdx,
    at: Instant,
    /// The number of the next packet to the peer then.
    nxt: Psn,
}

impl Acks {
    pub(super) fn new() -> Self {
        let queue = || VecDeque::with_capacity(QUEUE);
        let (owing, unasked) = (queue(), queue());
        let left_at = Instant(0);
        Self {
            owing,
            owed_since: None,
            soon: false,
            quick: false,
            quick_sent: None,
            unasked,
            fresh: false,
            left_at,
            seen_frames: 0,
        }
    }

    /// Notes that the last packet of a request that waits for its acknowledgement was sent to
    /// `peer` in slot `p`; `ar` if it asks.
    #[inline(always)]
    pub(super) fn left(&mut self, todo: &mut Todo, p: PeerIdx, peer: &mut Peer, ar: bool) {
        self.fresh = true;
        *todo |= Todo::ACKS;
        peer.unasked = !ar;
        if ar {
            return;
        }
        if !peer.is_listed_unasked && self.unasked.len() < QUEUE {
            peer.is_listed_unasked = true;
            self.unasked.push_back(p);
        }
    }

    /// Notes whether packet `psn` of `peer` asks for its acknowledgement.
    #[inline(always)]
    pub(super) fn note_ar(&mut self, peer: &mut Peer, psn: Psn, ar: bool) {
        if ar {
            peer.ar_psn = psn;
            self.soon = true;
            self.quick |= peer.quick_ack;
        }
    }

    /// Notes one more packet of peer `p` to acknowledge, the `owed`-th since the last
    /// acknowledgement. It may wait for further packets.
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

    /// Notes that an acknowledgement has to echo a mark to peer `p`, also if another packet carries
    /// it before.
    fn owe_echo(&mut self, todo: &mut Todo, now: Instant, p: PeerIdx) {
        self.owed_since.get_or_insert(now);
        *todo |= Todo::ACKS;
        self.owing.push_back(p);
    }

    /// Notes that an ACK packet is about to leave alone for `peer` in slot `p`. If the last packet
    /// that arrived asked for it, the next one is to be quick.
    #[inline(always)]
    fn note_quick(&mut self, now: Instant, p: PeerIdx, peer: &mut Peer) {
        let asked = peer.has_asked_last();
        if asked && peer.quick_ack {
            self.quick_sent = Some(QuickAck { peer: p, at: now, nxt: peer.snd.nxt });
        }
        peer.quick_ack = asked;
    }

    /// Whether the quick ACK of an earlier turn is to be [judged](Self::judge_quick_ack).
    #[inline(always)]
    pub(super) fn has_quick_sent(&self) -> bool {
        self.quick_sent.is_some()
    }

    /// Notes that `received` frames have arrived so far.
    #[inline(always)]
    pub(super) fn note_frames(&mut self, received: u64) {
        self.seen_frames = received;
    }

    /// Whether a turn at `now`, with `received` frames so far, has no acknowledgement to send and
    /// no PING.
    #[inline(always)]
    pub(super) fn passes(&mut self, now: Instant, received: u64) -> bool {
        if self.must_ask(now) && !self.unasked.is_empty() {
            return cold(false);
        }
        if self.is_owed(now, self.seen_frames == received) {
            return false;
        }
        self.seen_frames = received;
        true
    }

    /// Whether the next turn has to look for acknowledgements to send or PINGs.
    #[inline(always)]
    pub(super) fn is_waiting(&self) -> bool {
        self.fresh
            || self.owed_since.is_some()
            || !self.unasked.is_empty()
            || self.quick_sent.is_some()
    }

    /// Whether PINGs are due for packets that did not ask: the pause has passed since the last of
    /// them.
    #[inline(always)]
    fn must_ask(&mut self, now: Instant) -> bool {
        if self.fresh {
            (self.fresh, self.left_at) = (false, now);
        }
        self.is_pause(now)
    }

    /// Whether owed acknowledgements are due; `idle` if no frame has arrived since the last turn.
    #[inline(always)]
    fn is_owed(&mut self, now: Instant, idle: bool) -> bool {
        let Some(since) = self.owed_since else {
            // The packet that asked was refused or dropped.
            (self.soon, self.quick) = (false, false);
            return false;
        };
        self.quick || idle && self.soon || now.since(since) >= ACK_DELAY_NS
    }

    /// Whether the pause since the last packet that a completion waits for has passed.
    #[inline(always)]
    fn is_pause(&self, now: Instant) -> bool {
        now.since(self.left_at) >= ASK_AFTER_NS
    }

    /// Whether the next packet of `snd` asks for an acknowledgement. `ends` if it is the last
    /// packet of a request whose completion waits for it, with `own` other packets of the request
    /// in flight. `now` is the time of the last turn.
    #[inline(always)]
    pub(super) fn asks(&self, now: Instant, snd: &SendWindow, own: u32, ends: bool) -> bool {
        let is_resting = !self.fresh && self.is_pause(now);
        snd.asks(ends && (snd.in_flight() == own || is_resting))
    }

    /// When an acknowledgement or a PING is due next; `last_turn_at` is the last turn.
    pub(super) fn due(&self, last_turn_at: Instant) -> Option<Instant> {
        let owed =
            self.owed_since.map(|at| if self.soon { last_turn_at } else { at + ACK_DELAY_NS });
        let ask = if self.fresh { last_turn_at } else { self.left_at + ASK_AFTER_NS };
        let ask = (!self.unasked.is_empty()).then_some(ask);
        [owed, ask].into_iter().flatten().min()
    }

    /// Notes that packet `psn`, of type `ty`, asked for an acknowledgement.
    #[inline]
    pub(super) fn asked_for_ack(
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

    /// Judges the quick ACK of an earlier turn: if the program has sent something to the peer since
    /// then, and soon, that had better carried it.
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
    /// Takes the echo of a mark: what was sent to the peer meets a long queue.
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
    /// Sends a PING to each peer with packets in flight that did not ask, once the pause has
    /// passed.
    pub(super) fn probe_tails(&mut self, now: Instant) {
        if !self.acks.must_ask(now) {
            return;
        }
        while let Some(p) = self.acks.unasked.pop_front() {
            let Some(peer) = self.peers.get_mut(p) else { continue };
            peer.is_listed_unasked = false;
            // What is held asks when it leaves.
            let asks = std::mem::take(&mut peer.unasked) && !self.packs.holds_for(p, &self.tx);
            if asks && peer.state == State::Open && peer.snd.in_flight() > 0 {
                peer.ask();
                self.counters.tx_asks += 1;
                self.due.make_ready(&mut self.peers, p);
            }
        }
    }

    /// Whether owed acknowledgements are due in a turn at `now`.
    #[inline(always)]
    pub fn owes_acks(&mut self, now: Instant) -> bool {
        self.acks.is_owed(now, self.acks.seen_frames == self.counters.rx_frames)
    }

    /// Sends an ACK for all packets that no packet sent since has acknowledged. An ACK that cannot
    /// leave now is left to the next [`transmit`](Self::transmit).
    pub fn send_acks(&mut self, now: Instant, out: &mut impl FrameSink) {
        if self.openings.seals.is_some() {
            return self.through_seals(out, |node, out| node.send_acks(now, &mut DynSink(out)));
        }
        let since = self.acks.owed_since.take().unwrap_or(now);
        (self.acks.soon, self.acks.quick) = (false, false);
        while let Some(p) = self.acks.owing.pop_front() {
            let Some(peer) = self.peers.get_mut(p) else { continue };
            let echoes = peer.marked;
            if peer.owed == 0 && !echoes || peer.state != State::Open {
                // What the program sent has carried it. Too late, if it asked.
                peer.quick_ack |= peer.has_asked_last() && now.since(since) >= ACK_DELAY_NS;
                continue;
            }
            peer.ack_now = true;
            // An echo alone says nothing of the acknowledgement, which something else has carried.
            if !peer.queued && peer.owed > 0 {
                self.acks.note_quick(now, p, peer);
            }
            if (echoes || !peer.queued) && !self.send_ack(now, p, out) {
                self.due.make_ready(&mut self.peers, p);
                if echoes {
                    // The port is full, which is all that keeps an ACK, so the others wait as well.
                    self.acks.owe_echo(&mut self.due.todo, now, p);
                    break;
                }
            }
        }
        self.due.todo.set(Todo::ACKS, self.acks.is_waiting());
    }

    /// Notes that `frame` came with a mark: a queue on its way is long. If it is a reliable packet
    /// of a session, the next ACK packet tells its sender.
    #[cold]
    #[inline(never)]
    pub(super) fn note_mark(&mut self, now: Instant, frame: &RxFrame<'_>) {
        self.counters.rx_marked += 1;
        let Some(raw) = Base::parse_raw(frame) else { return };
        let p = slot_of(raw.dst_sid);
        let Some(peer) = self.peers.get_mut(p) else { return };
        let is_its = peer.sid == raw.dst_sid && peer.station() == raw.src;
        // An ACK is not answered, or two nodes would answer each other for ever.
        let is_reliable = Ty::try_from(raw.ty).is_ok_and(Ty::is_reliable);
        // What came through memory has met no queue of a router.
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
            let frame = AckTo::new(BaseTo { peer, src: &self.port.addr }, &op);
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

    /// Takes an ACK packet of an open session, with a checksum if `crc`. False if the frame is
    /// anything else: nothing has happened.
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
    /// session has room for it.
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

    /// [`Acks::asks`] for the next packet to a peer on a lossy path; `w` is its request, `NONE`
    /// if there is none.
    #[inline]
    pub(super) fn asks(&self, p: PeerIdx, w: TxIdx, ends: bool) -> bool {
        let own = if w == TxIdx::NONE { 0 } else { self.tx[w].unacked };
        self.acks.asks(self.turn.polled_at, &self.peers[p].snd, own, ends)
    }
}

impl Control<'_> {
    /// Lets the next [`transmit`](Node::transmit) acknowledge every packet received, due or not; on
    /// a lossy path again if the peer may still wait, as the last acknowledgement may be lost.
    ///
    /// For a node about to close: its peers would otherwise find its process gone while they wait.
    pub fn acknowledge_all(&mut self) {
        let now = self.turn.polled_at;
        // Who waits has repeated a packet since then.
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

/// An ACK packet about to be sent, without SACK: no packet is missing.
struct AckTo<'a> {
    base: BaseTo<'a>,
    op: [u8; AckOp::LEN],
    crc: Option<u32>,
}

impl<'a> AckTo<'a> {
    /// Length without a checksum, bytes.
    const LEN: usize = BASE_LEN + AckOp::LEN;

    #[inline(always)]
    fn new(base: BaseTo<'a>, op: &AckOp) -> Self {
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
