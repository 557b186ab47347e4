//! Small messages packed into one packet (PACK).
//!
//! A small message with `FI_MORE`, or one posted while the window is closed, is written to a packet
//! that stays open for later messages until the peer is served next. Where frames are expensive, a
//! message to a peer with packets in flight also opens a packet, which is held
//! ([`nagle`](super::nagle)). Sending then costs one packet for all messages, and one transmit
//! request stands for the packet; each message has a note with the data for its completion. Credit
//! is charged when a message is written, and returned if the packet never leaves.
//!
//! Messages that wait singly (for credit, or for a session) are packed when they leave, in
//! `output`. On a lossless path nothing is packed: there a frame costs little more than copying the
//! message.
//!
//! At the receiver, each message of a packet whose receive is simple takes the fast path.

use barewire_driver::frame::RxFrame;

use super::complete::send_flags;
use super::fast_eager::{WholeMsg, place_eager};
use super::nagle::Nagle;
use super::ops::{TxWr, WrFlags};
use super::output::PACK_MSG_MAX;
use super::packet::{Joined, Step};
use super::peer::State;
use super::post::wants_cqe;
use super::route::Route;
use super::tx::TxWrs;
use super::{
    Cqs, EpId, Eps, FrameSink, MsgKind, NoReader, Node, Objects, Operations, Peers, Posting,
    SendReq, Transmitter,
};
use crate::cntr::Done;
use crate::error::Error;
use crate::flags::{CqFlags, OpFlags};
use crate::idx::{EpIdx, PackIdx, PeerIdx, TxIdx};
use crate::plant::{Bug, planted};
use crate::proto::blocks::units;
use crate::rel::sent::BodyRef;
use crate::types::{CqErr, Cqe, FI_ADDR_UNSPEC, Instant, ProvErrno};
use crate::wire::{MsgOp, PackOp, PackRecords, Ty, record_len};

/// Flags of a message that may be packed: flags with which it completes at the acknowledgement of
/// the packet.
const JOIN_FLAGS: OpFlags = OpFlags::MORE
    .union(OpFlags::COMPLETION)
    .union(OpFlags::INJECT)
    .union(OpFlags::TRANSMIT_COMPLETE)
    .union(OpFlags::DELIVERY_COMPLETE)
    .union(OpFlags::REMOTE_CQ_DATA);

/// Buffers for packed messages.
#[derive(Debug)]
pub(crate) struct Packs {
    pub(crate) bytes: Vec<Vec<u8>>,
    /// Notes of the messages in each buffer, if one request stands for all of them.
    notes: Vec<Vec<CompletionNote>>,
    pub(crate) free: Vec<PackIdx>,
    /// The request of the open packet, or [`TxIdx::NONE`].
    pub(super) open: TxIdx,
    pub(super) nagle: Nagle,
}

/// Data for the completion of a packed message.
#[derive(Clone, Copy, Debug)]
struct CompletionNote {
    context: u64,
    tag: u64,
    len: u32,
    /// Length of the message's record in the packet, bytes.
    size: u16,
    /// A success writes a completion.
    cqe: bool,
}

impl Packs {
    /// `count` buffers for frames of `len` bytes; `holds`: messages are also packed without
    /// `FI_MORE`.
    pub(super) fn new(count: usize, len: usize, holds: bool) -> Self {
        let most = usize::from(PackOp::COUNT_MAX).min(len / MsgOp::LEN);
        Self {
            bytes: (0..count).map(|_| Vec::with_capacity(len)).collect(),
            notes: (0..count).map(|_| Vec::with_capacity(most)).collect(),
            free: (0..count as u32).map(PackIdx::of).collect(),
            open: TxIdx::NONE,
            nagle: Nagle::new(holds),
        }
    }

    /// Whether a packet for peer `p` is held; `tx` are the requests.
    pub(super) fn holds_for(&self, p: PeerIdx, tx: &TxWrs) -> bool {
        self.nagle.holds() && tx.wrs.get(self.open).is_some_and(|wr| wr.peer == p)
    }

    /// Whether a message may be packed, so that [`join`](Node::join) is worth trying first.
    #[inline(always)]
    pub(crate) fn joins(&self, req: &SendReq) -> bool {
        req.flags.contains(OpFlags::MORE) || self.open != TxIdx::NONE
    }
}

impl Packs {
    /// Whether the packet of request `wr` has room for one more record of `size` bytes.
    fn has_room_for(&self, wr: &TxWr, size: usize) -> bool {
        let (bytes, notes) = (&self.bytes[wr.pack_buf().at()], &self.notes[wr.pack_buf().at()]);
        wr.len as usize + size <= bytes.len() && notes.len() < notes.capacity()
    }

    /// The open packet, if `msg` of endpoint `e`, with a record of `size` bytes, may join it: the
    /// messages of a packet are refused together, so they have one kind and one destination
    /// endpoint.
    #[inline]
    fn open_for(
        &self,
        tx: &TxWrs,
        (p, e): (PeerIdx, EpIdx),
        msg: &MsgOp,
        size: usize,
    ) -> Option<TxIdx> {
        let w = self.open;
        let wr = tx.wrs.get(w)?;
        let tagged = wr.flags.contains(WrFlags::TAGGED);
        let is_it = (wr.peer, wr.ep, wr.dst_ep, tagged) == (p, e, msg.dst_ep, msg.tagged);
        // Only the last request of the queue may take another message: no message may overtake
        // another.
        let is_last = wr.queue.next == TxIdx::NONE;
        (is_it && is_last && self.has_room_for(wr, size)).then_some(w)
    }

    /// Writes the record of `msg`, `size` bytes, to the packet of request `w`. `cqe`: a success of
    /// the message writes a completion.
    #[inline]
    fn write_record(
        &mut self,
        (eps, cqs, peers, tx): (&mut Eps, &mut Cqs, &mut Peers, &mut TxWrs),
        w: TxIdx,
        req: &SendReq,
        msg: &MsgOp,
        (size, cqe): (usize, bool),
    ) {
        let (len, cost) = (req.buf.len(), units(req.buf.len() as u64));
        let wr = &mut tx[w];
        let ep = &mut eps[wr.ep];
        cqs[ep.tx_cq].cq.reserve_free();
        ep.tx_used += 1;
        let peer = &mut peers[wr.peer];
        peer.credit_used = peer.credit_used.wrapping_add(cost);
        (wr.len, wr.tag, wr.data) = (wr.len + size as u64, wr.tag + 1, wr.data + u64::from(cost));
        if req.flags.contains(OpFlags::INJECT) {
            // The program may reuse its memory, but the endpoint still counts the request.
            wr.flags |= WrFlags::INJECTED;
        }
        let buf = wr.pack_buf();
        let record = &mut self.bytes[buf.at()][wr.len as usize - size..][..size];
        // Padding of the record.
        record[size - 8..].fill(0);
        let from = msg.emit(record);
        req.buf.read_start(&mut record[from..from + len]);
        let (context, tag, len) = (req.context, req.tag, len as u32);
        self.notes[buf.at()].push(CompletionNote { context, tag, len, size: size as u16, cqe });
    }
}

impl Node {
    /// Posts a small message by writing it to the open packet of its destination, or to a new
    /// packet if it has `FI_MORE` or is held.
    pub(crate) fn join(
        &mut self,
        clock: impl FnOnce() -> Instant,
        id: EpId,
        req: &SendReq,
    ) -> Joined {
        let (len, e) = (req.buf.len(), id.0.idx());
        let tagged = req.kind == MsgKind::Tagged;
        let Some(ep) = self.eps.by_handle_mut(id.0) else { return Joined::No };
        if self.port.lossless
            || len as u64 > PACK_MSG_MAX
            || self.port.gone
            || !ep.may_send[usize::from(tagged)]
            || !JOIN_FLAGS.contains(req.flags)
            || req.flags.contains(OpFlags::INJECT) && len > Self::INJECT_SIZE
            || ep.tx_used >= ep.tx_size
            || !self.cqs[ep.tx_cq].cq.has_room()
        {
            return Joined::No;
        }
        if ep.route.dest != req.dest && !ep.find_route((&self.avs, &self.peers), req.dest) {
            return Joined::No;
        }
        let Route { peer: p, ends: [dst_ep, src_ep], inc, .. } = ep.route;
        let cost = units(len as u64);
        let cqe = wants_cqe(req, ep.tx_selective);
        let Some(peer) = self.peers.get(p) else { return Joined::No };
        let may = peer.state == State::Open && peer.fast_path && !peer.path.is_lossless();
        if !may || peer.credits() < cost {
            return Joined::No;
        }
        let imm = req.flags.contains(OpFlags::REMOTE_CQ_DATA).then_some(req.data);
        let msg = MsgOp { dst_ep, rx_ctx: 0, src_ep, tagged, imm, tag: req.tag, len: len as u16 };
        let size = record_len(imm.is_some(), len);
        let more = req.flags.contains(OpFlags::MORE);
        let waits = more || !peer.snd.open();
        let w = match self.packs.open_for(&self.tx, (p, e), &msg, size) {
            Some(w) => w,
            None => {
                let in_flight = peer.snd.in_flight();
                let held = !waits && self.packs.nagle.wants(p, in_flight);
                let opens = (waits || held) && size <= self.peers[p].pack_room();
                let w = opens
                    .then(|| self.posting().open_pack(clock, (p, e), &msg, (inc, held)))
                    .flatten();
                let Some(w) = w else { return Joined::No };
                w
            }
        };
        let Self { eps, cqs, peers, tx, packs, .. } = self;
        packs.write_record((eps, cqs, peers, tx), w, req, &msg, (size, cqe));
        self.packs.nagle.note_message(p);
        if self.packs.nagle.holds() {
            if self.packs.has_room_for(&self.tx[w], size) {
                return Joined::Waits;
            }
            self.packs.release_held(&self.tx, &mut self.peers, &mut self.due);
        }
        if more { Joined::Waits } else { Joined::Leaves }
    }
}

impl Posting<'_> {
    /// Opens a packet for `msg` of endpoint `e`, which may be held, if there is room and no other
    /// request is queued for the peer.
    #[inline(never)]
    fn open_pack(
        &mut self,
        clock: impl FnOnce() -> Instant,
        (p, e): (PeerIdx, EpIdx),
        msg: &MsgOp,
        (inc, held): (u64, bool),
    ) -> Option<TxIdx> {
        let last = self.sessions.tx.wrs.get(self.sessions.peers[p].send_q.tail);
        // Not behind a request that waits for credit: the packet would wait as well.
        let may = last.is_none_or(|last| last.flags.contains(WrFlags::GROUP));
        if !may || self.sessions.tx.is_full() {
            return None;
        }
        let buf = self.sessions.packs.free.pop()?;
        // The held packet is for another peer, or for messages that may not share a packet with
        // this one.
        self.sessions.packs.release_held(self.sessions.tx, self.sessions.peers, self.sessions.due);
        let room = self.sessions.peers[p].pack_room();
        self.sessions.packs.bytes[buf.at()].resize(room, 0);
        self.sessions.packs.notes[buf.at()].clear();
        let mut flags = WrFlags::GROUP;
        flags.set(WrFlags::TAGGED, msg.tagged);
        let wr = TxWr::new(0, (p, e), (msg.dst_ep, msg.src_ep), flags);
        let w = self.sessions.tx.alloc(TxWr { pull_gen: buf.get(), ..wr });
        let now = clock();
        if !held {
            self.queue_wr(now, p, w, inc);
        } else if self.sessions.operations().enqueue_wr(now, p, w, inc) {
            self.sessions.packs.hold(self.sessions.due, now);
        }
        self.sessions.packs.open = w;
        Some(w)
    }
}

impl Transmitter<'_> {
    /// Sends the PACK at the head of the queue.
    pub(super) fn send_group(
        &mut self,
        now: Instant,
        p: PeerIdx,
        w: TxIdx,
        out: &mut dyn FrameSink,
    ) -> Step {
        if !self.port.can_keep(self.sent) {
            return Step::Full;
        }
        let wr = &self.tx[w];
        let (count, len, cost) = (wr.tag as u16, wr.len as u32, wr.data as u32);
        let body = BodyRef::Pack { buf: wr.pack_buf(), len };
        let mut op = [0; PackOp::LEN];
        PackOp { count }.emit(&mut op);
        let mut packet = self.sending().data_packet(p, Ty::Pack, &op, body, w, true);
        if self.packs.nagle.applies() {
            // Many completions wait for the packet: requesting an acknowledgement costs each side
            // one frame less than a PING.
            packet.ar = true;
            self.packs.note_shared(p, count);
        }
        if !self.sending().send_numbered(now, p, packet, true, out) {
            return Step::Full;
        }
        let peer = &mut self.peers[p];
        peer.has_requested_credit = false;
        if let Some(idx) = peer.snd.last(self.sent) {
            self.sent[idx].units = cost;
        }
        if self.packs.open == w {
            self.packs.close_open(self.due);
        }
        self.tx[w].sent = u64::from(len);
        self.operations().all_sent(p, w);
        Step::Sent
    }
}

impl Operations<'_> {
    /// Writes the success completions of all messages of a packet.
    pub(super) fn report_group(&mut self, w: TxIdx) {
        let wr = &self.tx[w];
        let (ep, flags) = (&mut self.objects.eps[wr.ep], send_flags(wr.flags));
        let (cntr, cq) = (ep.tx_cntr, &mut self.objects.cqs[ep.tx_cq].cq);
        let notes = &self.packs.notes[wr.pack_buf().at()];
        let mut done = Done { ops: notes.len() as u64, bytes: 0 };
        for note in notes {
            done.bytes += u64::from(note.len);
            if note.cqe {
                let op_context = note.context;
                cq.push(Cqe { op_context, flags, src: FI_ADDR_UNSPEC, ..Cqe::default() });
            } else {
                cq.unreserve();
            }
        }
        ep.counters.sent += done.ops;
        ep.counters.sent_bytes += done.bytes;
        self.objects.cntrs.count(cntr, done);
    }

    /// Writes error completions for all messages of a packet.
    pub(super) fn fail_group(&mut self, w: TxIdx, err: Error, prov_errno: ProvErrno) {
        let wr = &self.tx[w];
        let (ends, buf, flags) = ((wr.ep, wr.peer), wr.pack_buf(), send_flags(wr.flags));
        for i in 0..self.packs.notes[buf.at()].len() {
            let note = self.packs.notes[buf.at()][i];
            self.objects.fail_packed(ends, flags, note, err, prov_errno);
        }
    }

    /// Cancels the message posted with `context` in a packet of endpoint `e` that has not left: it
    /// ends with an error completion. False, and nothing has changed, if there is none.
    pub(super) fn cancel_packed(&mut self, e: EpIdx, context: u64) -> bool {
        let found = self.tx.wrs.iter().find_map(|(w, wr)| {
            let waits = wr.flags.contains(WrFlags::GROUP | WrFlags::IN_SEND_Q) && wr.sent == 0;
            let notes = (wr.ep == e && waits).then(|| &self.packs.notes[wr.pack_buf().at()])?;
            Some((w, notes.iter().position(|note| note.context == context)?))
        });
        let Some((w, i)) = found else { return false };
        let wr = &mut self.tx[w];
        let (buf, p, flags) = (wr.pack_buf(), wr.peer, send_flags(wr.flags));
        let notes = &mut self.packs.notes[buf.at()];
        if notes.len() == 1 {
            self.fail_wr(w, Error::Canceled, ProvErrno::NotExecuted);
            return true;
        }
        let at: usize = notes[..i].iter().map(|note| usize::from(note.size)).sum();
        let note = notes.remove(i);
        let (size, cost) = (usize::from(note.size), units(note.len.into()));
        self.packs.bytes[buf.at()].copy_within(at + size..wr.len as usize, at);
        (wr.len, wr.tag, wr.data) = (wr.len - size as u64, wr.tag - 1, wr.data - u64::from(cost));
        let peer = &mut self.objects.peers[p];
        peer.credit_used = peer.credit_used.wrapping_sub(cost);
        self.objects.eps[e].tx_used -= 1;
        self.objects.fail_packed((e, p), flags, note, Error::Canceled, ProvErrno::NotExecuted);
        true
    }

    /// Frees the parts of a packet besides its request: notes, buffer, and its credit if it never
    /// left.
    pub(super) fn free_group(&mut self, w: TxIdx) {
        let wr = &self.tx[w];
        // The caller subtracts the request itself, like any other.
        self.objects.eps[wr.ep].tx_used -= wr.tag as u32 - 1;
        if !wr.flags.contains(WrFlags::ALL_SENT) {
            let peer = &mut self.objects.peers[wr.peer];
            peer.credit_used = peer.credit_used.wrapping_sub(wr.data as u32);
            self.packs.free.push(wr.pack_buf());
        }
        if self.packs.open == w {
            let p = wr.peer;
            if self.packs.nagle.holds() && self.objects.peers[p].state == State::Open {
                // The packet was to request the acknowledgement of the packets in flight.
                self.objects.peers[p].request_ping();
                self.objects.due.make_ready(self.objects.peers, p);
            }
            self.packs.close_open(self.objects.due);
        }
    }
}

impl Objects<'_> {
    /// Takes messages from the front of a packet, as long as each has a simple receive that it
    /// fits. Returns their number.
    pub(super) fn take_records(
        &mut self,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        records: &mut PackRecords<'_, '_>,
    ) -> u16 {
        let mut taken = 0;
        loop {
            let before = records.clone();
            let Some(Ok((mut msg, off, len))) = records.next() else { break };
            if taken > 0 && planted(Bug::PackedCqDataDropped) {
                msg.imm = None;
            }
            if !self.take_record(p, frame, &msg, (off, len)) {
                *records = before;
                break;
            }
            taken += 1;
        }
        if taken > 0 {
            self.blocks.regrant(self.peers, self.due, p);
        }
        taken
    }

    #[inline]
    fn take_record(
        &mut self,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        msg: &MsgOp,
        (off, len): (usize, usize),
    ) -> bool {
        let e = self.eps.slot(msg.dst_ep);
        if self.settings.inserted && !planted(Bug::FastPathWithoutLookup) {
            return false;
        }
        let Some(ep) = self.eps.get_mut(e) else { return false };
        let (peer, cost) = (&mut self.peers[p], units(len as u64));
        if !ep.is_named(msg.rx_ctx) || peer.outstanding() < cost {
            return false;
        }
        let whole = WholeMsg { op: msg, offset: off, len };
        let to = (ep, &mut *self.posted, (&*self.avs, &mut *self.cqs));
        if !place_eager(to, (p, peer), frame, &whole, || true, NoReader) {
            return false;
        }
        peer.consumed = peer.consumed.wrapping_add(cost);
        self.blocks.give_back(cost);
        true
    }

    /// Writes the error completion of a packed message of endpoint `e` to a peer.
    fn fail_packed(
        &mut self,
        (e, p): (EpIdx, PeerIdx),
        flags: CqFlags,
        note: CompletionNote,
        err: Error,
        prov_errno: ProvErrno,
    ) {
        let CompletionNote { context: op_context, tag, .. } = note;
        let cqe = Cqe { op_context, flags, tag, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        let failure = CqErr { cqe, olen: 0, err, prov_errno, err_data: None };
        self.report_op_failure((e, p), failure, self.eps[e].tx_cntr);
    }
}
