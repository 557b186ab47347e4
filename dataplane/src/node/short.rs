//! The short way: what nearly every message takes on a port that loses nothing.
//!
//! A message that nothing stands before leaves in the call that posts it, without a record, since
//! nobody will ask for it again; one that is next in order and fits its receive is placed without
//! the questions that other packets raise. Both functions here ask all their questions first and
//! change nothing unless the answer is yes; if it is no, the long way (`post`, `input`) begins from
//! the start and knows every case. Whatever they do, the long way would have done.

use barewire_driver::frame::{Body, ETH_HDR_LEN, RxFrame, TxFrame};
use barewire_driver::port::Tx;

use super::ep::Ep;
use super::input::ACK_EVERY_LOSSLESS;
use super::peer::{Inbound, slot_of};
use super::recv::MsgHead;
use super::{EpId, FrameSink, MsgKind, Node, SendReq};
use crate::flags::{Caps, CqFlags, OpFlags};
use crate::plant::{Bug, planted};
use crate::proto::blocks::units;
use crate::proto::matching::Src;
use crate::rel::psn::Psn;
use crate::slab::NONE;
use crate::types::{Cqe, FI_ADDR_UNSPEC, Instant};
use crate::wire::{IMM_LEN, MsgOp, PlainMsg};

/// Flags of a send that need no record.
const SEND_FLAGS: OpFlags = OpFlags::REMOTE_CQ_DATA
    .union(OpFlags::COMPLETION)
    .union(OpFlags::INJECT)
    .union(OpFlags::INJECT_COMPLETE)
    .union(OpFlags::TRANSMIT_COMPLETE);

impl Node {
    /// Whether a frame that the port took arrives, so that nothing is sent twice or timed.
    #[inline]
    pub fn is_lossless(&self) -> bool {
        self.lossless
    }

    /// Whether [`transmit`](Self::transmit) has something to do other than to look at the time.
    #[inline]
    pub fn has_due(&self) -> bool {
        !(self.ready.is_empty() && self.replies.is_empty() && self.looped.is_empty())
    }

    /// Posts a message and sends it in the same breath, if nothing stands before it and nothing
    /// about it is out of the ordinary: as [`post_send`](Self::post_send) and then
    /// [`transmit`](Self::transmit). False if not: nothing has happened, and those two are to be
    /// called, also to learn what is wrong with the call if anything is.
    ///
    /// `clock` is read after the message has left, and only if somebody has to wait for the peer
    /// from then on.
    #[inline]
    pub fn send_now(
        &mut self,
        ep: EpId,
        req: &SendReq,
        out: &mut impl FrameSink,
        clock: impl FnOnce() -> Instant,
    ) -> bool {
        if !self.ready.is_empty() || self.gone {
            return false;
        }
        let Some(ep) = self.eps.by_handle_mut(ep.0) else { return false };
        let tagged = req.kind == MsgKind::Tagged;
        let len = req.buf.len();
        if !may_send(ep, req, self.eager_one) {
            return false;
        }
        let Some(entry) = self.avs[ep.av].av.lookup(req.dest) else { return false };
        let (p, dst_ep, inc) = (entry.peer, entry.ep, entry.addr.incarnation);
        let Some(peer) = self.peers.get_mut(p) else { return false };
        let cost = units(len as u64);
        let imm = req.flags.contains(OpFlags::REMOTE_CQ_DATA).then_some(req.data);
        let in_flight = peer.snd.in_flight();
        let cq = &mut self.cqs[ep.tx_cq].cq;
        if !peer.plain
            || inc != 0 && inc != peer.inc
            || peer.txq.head != NONE
            || !peer.snd.open()
            || cost > peer.credits()
            || PlainMsg::LEN_MAX + len > peer.frame_max as usize + ETH_HDR_LEN
            || !cq.has_room()
        {
            return false;
        }
        let msg = PlainMsg {
            dst_sid: peer.remote_sid,
            psn: peer.snd.nxt,
            cack: peer.rcv_nxt,
            grant: peer.granted as u16,
            plen: len as u16,
            op: MsgOp { dst_ep, src_ep: ep.number, tagged, imm, tag: req.tag, len: 0 },
        };
        let (head, head_len) = msg.emit(&PlainMsg::head(peer.mac, self.mac), in_flight % 64 == 63);
        let body = Body::Io { buf: &req.buf, offset: 0, len };
        if out.send(&TxFrame { head: &head[..head_len], body, tail: &[] }) != Tx::Sent {
            return false;
        }
        self.counters.tx_frames += 1;
        self.counters.msgs_sent += 1;
        ep.counters.sent += 1;
        ep.counters.sent_bytes += len as u64;
        if !req.no_completion && (!ep.tx_selective || req.flags.contains(OpFlags::COMPLETION)) {
            let flags = CqFlags::SEND | if tagged { CqFlags::TAGGED } else { CqFlags::MSG };
            let (op_context, src) = (req.context, FI_ADDR_UNSPEC);
            cq.push_free(Cqe { op_context, flags, src, ..Cqe::default() });
        }
        let cntr = ep.tx_cntr;
        peer.credit_used = peer.credit_used.wrapping_add(cost);
        if peer.rcv.is_empty() {
            (peer.owed, peer.ack_now) = (0, false);
        }
        if in_flight == 0 || peer.timer_at == Instant(u64::MAX) {
            self.wait_from(clock(), p);
        } else {
            peer.snd.number();
        }
        if cntr != NONE {
            self.count(cntr, true);
        }
        true
    }

    /// The first packet of a flight has left: numbers it, and the peer's silence counts from now.
    ///
    /// A timer that is armed is never too late on a port that loses nothing: what is due moves on
    /// only.
    fn wait_from(&mut self, now: Instant, p: u32) {
        self.tick(now);
        self.begin_to_wait(now, p);
        let peer = &mut self.peers[p];
        peer.probe_at = now;
        peer.snd.number();
        if peer.timer_at == Instant(u64::MAX) {
            self.arm_timer(now, p);
        }
    }

    /// Takes a frame that holds a whole message which is next in order and has a receive. False if
    /// it holds anything else: nothing has happened.
    #[inline(always)]
    pub(super) fn take_plain(&mut self, now: Instant, frame: &RxFrame<'_>) -> bool {
        let Some(([dst, src], msg)) = PlainMsg::parse(frame) else { return false };
        let p = slot_of(msg.dst_sid);
        let Some(peer) = self.peers.get_mut(p) else { return false };
        if !peer.plain
            || dst != self.mac
            || src != peer.mac
            || msg.dst_sid != peer.sid
            || msg.psn != peer.rcv_nxt
            || peer.refused != 0
            || peer.inbound != Inbound::None
            || !peer.rcv.is_empty()
        {
            return false;
        }
        // An acknowledgement or a grant that somebody waits for goes the long way.
        let acked = msg.cack.0.wrapping_sub(peer.snd.una.0);
        let granted = msg.grant.wrapping_sub(peer.credit as u16);
        if acked != 0 || granted != 0 {
            let waited_for = peer.txq.head != NONE
                || peer.dataq.head != NONE
                || peer.ctlq.head != NONE
                || peer.jobq.head != NONE
                || !peer.snd.is_empty();
            if waited_for || acked > peer.snd.in_flight() || granted >= 1 << 15 {
                return false;
            }
        }
        let cost = units(u64::from(msg.plen));
        let Some(&e) = self.by_number.get(usize::from(msg.op.dst_ep)) else { return false };
        let Some(ep) = self.eps.get_mut(e) else { return false };
        let MsgOp { src_ep, tagged, tag, imm, .. } = msg.op;
        let kind = if tagged { Caps::TAGGED } else { Caps::MSG };
        let is_open = ep.enabled && ep.caps.contains(Caps::RECV | kind) && !ep.starved;
        if !is_open || peer.outstanding() < cost {
            return false;
        }
        let matcher = &mut ep.matcher[usize::from(tagged)];
        let from = Src::of(p, src_ep);
        let found = matcher.take_posted(&mut self.posted, from, tag, |wr| !wr.multi);
        let Some(recv) = found else { return false };
        let wr = &self.posted[recv].payload;
        if wr.multi {
            // It was not taken out.
            return false;
        }
        peer.consumed = peer.consumed.wrapping_add(cost);
        peer.heard = self.active_ns;
        peer.probes = 0;
        peer.snd.una = msg.cack;
        peer.credit = peer.credit.wrapping_add(u32::from(granted));
        peer.rcv_nxt = Psn(msg.psn.0.wrapping_add(1));
        peer.owed = peer.owed.saturating_add(1);
        let ack = peer.owed >= ACK_EVERY_LOSSLESS;
        let regrant = peer.outstanding() < peer.target / 2 || !self.starved.is_empty();
        let len = usize::from(msg.plen);
        let buf = &self.recv_bufs[recv as usize];
        let n = len.min(buf.len());
        if n > 0 {
            frame.copy_to_io(PlainMsg::LEN + imm.map_or(0, |_| IMM_LEN), buf, 0, n);
        }
        if !planted(Bug::CreditNotReturned) {
            self.blocks_unpromised += cost as usize;
        }
        let plain = n == len && wr.cqe && ep.rx_cntr == NONE && !ep.caps.contains(Caps::SOURCE_ERR);
        if plain {
            let av = &self.avs[ep.av].av;
            let mut flags = CqFlags::RECV | if tagged { CqFlags::TAGGED } else { CqFlags::MSG };
            flags.set(CqFlags::REMOTE_CQ_DATA, imm.is_some());
            let src = if ep.caps.contains(Caps::SOURCE) {
                av.reverse_near(p, src_ep, &mut peer.src_hint)
            } else {
                FI_ADDR_UNSPEC
            };
            let (op_context, data, len) = (wr.context, imm.unwrap_or(0), n as u64);
            self.counters.msgs_received += 1;
            ep.counters.received += 1;
            ep.counters.received_bytes += len;
            ep.rx_used -= 1;
            let cq = &mut self.cqs[ep.rx_cq].cq;
            cq.push(Cqe { op_context, flags, len, buf: 0, data, tag, src });
            self.posted.free(recv);
        } else {
            let head = MsgHead { peer: p, src_ep, tagged, tag, imm, len: len as u64 };
            self.complete_recv(recv, &head, 0, n as u64);
        }
        if ack || regrant {
            self.after_plain(now, p, ack);
        }
        true
    }

    /// What a message makes us owe to its sender.
    #[cold]
    fn after_plain(&mut self, now: Instant, p: u32, ack: bool) {
        self.regrant(now, p);
        if ack {
            self.peers[p].ack_now = true;
            self.make_ready(p);
        }
    }
}

/// Whether the call is one that the endpoint takes, and that needs no record.
#[inline(always)]
fn may_send(ep: &Ep, req: &SendReq, eager_one: usize) -> bool {
    let tagged = req.kind == MsgKind::Tagged;
    let kind = if tagged { Caps::TAGGED } else { Caps::MSG };
    let inject = req.flags.contains(OpFlags::INJECT);
    ep.enabled
        && ep.caps.contains(Caps::SEND | kind)
        && SEND_FLAGS.contains(req.flags)
        && req.buf.len() <= if inject { Node::INJECT_SIZE } else { eager_one }
        && ep.tx_used < ep.tx_size
}
