//! The end of transmit requests: completion, failure, cancellation.

use super::ops::WrFlags;
use super::peer::Peers;
use super::tx::TxWrs;
use super::{Cntrs, Cqs, Eps, Node, Objects, Operations};
use crate::cntr::Done;
use crate::error::Error;
use crate::flags::CqFlags;
use crate::idx::{EpIdx, TxIdx};
use crate::rel::sent::BodyRef;
use crate::types::{CqErr, Cqe, FI_ADDR_UNSPEC, ProvErrno};
use crate::wire::{AtomicOp, Ty};

impl TxWrs {
    /// Writes the success completion of message `w`.
    #[inline(always)]
    fn complete_sent(&self, (eps, cqs, cntrs): (&mut Eps, &mut Cqs, &mut Cntrs), w: TxIdx) {
        let wr = &self[w];
        let flags = send_flags(wr.flags);
        let cqe = Cqe { op_context: wr.context, flags, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        let wanted = wr.flags.contains(WrFlags::CQE);
        let ep = &mut eps[wr.ep];
        ep.counters.sent += 1;
        ep.counters.sent_bytes += wr.len;
        let (cntr, cq) = (ep.tx_cntr, &mut cqs[ep.tx_cq].cq);
        if wanted {
            cq.push(cqe);
        } else {
            cq.unreserve();
        }
        cntrs.count(cntr, Done::one(wr.len));
    }

    /// Frees the record of request `w` and its place in the transmit queue.
    #[inline(always)]
    fn release(&mut self, (peers, eps): (&mut Peers, &mut Eps), w: TxIdx) {
        let ep = self[w].ep;
        self.unlink(peers, w);
        self.wrs.discard(w);
        if ep != EpIdx::NONE {
            eps[ep].tx_used -= 1;
        }
    }
}

impl Node {
    /// Completes request `w`, of which nothing is outstanding.
    #[inline(never)]
    pub(super) fn finish_wr(&mut self, w: TxIdx) {
        let wr = &self.tx[w];
        let p = wr.peer;
        if wr.flags.intersects(WrFlags::RMA | WrFlags::GROUP) {
            return self.operations().finish_wr(w);
        }
        if !wr.flags.contains(WrFlags::REPORTED) {
            self.tx.complete_sent((&mut self.eps, &mut self.cqs, &mut self.cntrs), w);
        }
        self.tx.release((&mut self.peers, &mut self.eps), w);
        // A fenced request may be waiting for this one.
        if !self.peers[p].send_q.is_empty() {
            self.due.make_ready(&mut self.peers, p);
        }
    }
}

impl Operations<'_> {
    /// Completes request `w` if nothing of it is outstanding.
    #[inline]
    pub(super) fn try_complete(&mut self, w: TxIdx) {
        if self.tx[w].is_done() {
            self.finish_wr(w);
        }
    }

    /// Completes request `w`, of which nothing is outstanding.
    #[inline(never)]
    pub(super) fn finish_wr(&mut self, w: TxIdx) {
        self.report_wr(w);
        self.drop_wr(w);
    }

    /// Frees request `w`, whose outcome has been reported.
    #[inline]
    pub(super) fn drop_wr(&mut self, w: TxIdx) {
        let p = self.tx[w].peer;
        self.free_wr(w);
        // A fenced request may be waiting for this one.
        if !self.objects.peers[p].send_q.is_empty() {
            self.objects.due.make_ready(self.objects.peers, p);
        }
    }

    /// Detaches the memory of a request from its packets in flight: they keep their PSNs and are
    /// retransmitted without payload.
    pub(crate) fn abandon_wr(&mut self, w: TxIdx) {
        let wr = &self.tx[w];
        let p = wr.peer;
        let half = wr.sent > 0
            && wr.sent < wr.len
            && !wr.flags.intersects(WrFlags::ANNOUNCED | WrFlags::ALL_SENT | WrFlags::RMA);
        let next = if wr.flags.contains(WrFlags::RMA) { TxIdx::NONE } else { wr.next_packed() };
        self.objects.peers[p].snd.for_each(self.sent, |entry| {
            if let BodyRef::Pack { .. } = entry.body {
                if entry.wr == w {
                    entry.wr = next;
                }
            } else if entry.wr == w {
                match entry.ty {
                    // The target has or will get the request and will answer it: the record waits
                    // for the answer.
                    Ty::Read => (entry.body, entry.wr) = (BodyRef::None, TxIdx::NONE),
                    Ty::Atomic if AtomicOp::fetches(&entry.op) => {
                        AtomicOp::withdraw(&mut entry.op);
                        (entry.body, entry.wr) = (BodyRef::None, TxIdx::NONE);
                    }
                    Ty::Msg
                    | Ty::Pack
                    | Ty::MsgM
                    | Ty::Rndv
                    | Ty::Pull
                    | Ty::Data
                    | Ty::End
                    | Ty::Nop
                    | Ty::Write
                    | Ty::Atomic
                    | Ty::Resp => entry.become_nop(),
                    Ty::Ack
                    | Ty::Nack
                    | Ty::Who
                    | Ty::Probe
                    | Ty::Ping
                    | Ty::Rst
                    | Ty::Open
                    | Ty::Mcast => unreachable!("control packets are not kept"),
                }
            }
        });
        for (_, other) in self.tx.wrs.iter_mut() {
            let is_packed = other.flags.contains(WrFlags::PACKED);
            if other.peer == p && is_packed && other.next_packed() == w {
                other.set_next_packed(next);
            }
        }
        if half {
            self.objects.peers[p].want_nop = true;
            self.objects.due.make_ready(self.objects.peers, p);
        }
    }

    /// Frees a request whose completion has been written.
    #[inline(always)]
    pub(crate) fn free_wr(&mut self, w: TxIdx) {
        let wr = &self.tx[w];
        let rma = wr.flags.contains(WrFlags::RMA).then(|| wr.rma());
        if wr.flags.contains(WrFlags::GROUP) {
            self.free_group(w);
        }
        self.tx.release((self.objects.peers, self.objects.eps), w);
        if let Some(rma) = rma {
            self.free_rma(rma);
        }
    }

    /// Writes the success completion of a request, once.
    #[inline(always)]
    pub(crate) fn report_wr(&mut self, w: TxIdx) {
        let wr = &mut self.tx[w];
        if wr.flags.contains(WrFlags::REPORTED) {
            return;
        }
        wr.flags |= WrFlags::REPORTED;
        if wr.flags.intersects(WrFlags::RMA | WrFlags::GROUP) {
            let one_sided = wr.flags.contains(WrFlags::RMA);
            return if one_sided { self.report_rma(w) } else { self.report_group(w) };
        }
        let Objects { eps, cqs, cntrs, .. } = &mut self.objects;
        self.tx.complete_sent((eps, cqs, cntrs), w);
    }

    /// Ends a request with an error completion, unless its success was already written.
    pub(crate) fn fail_wr(&mut self, w: TxIdx, err: Error, prov_errno: ProvErrno) {
        self.report_failure(w, err, prov_errno);
        self.drop_wr(w);
    }

    /// Ends a request whose endpoint is being closed. The record stays if the peer has pulled part
    /// of the message and must be informed that the rest will not come.
    pub(crate) fn cancel_wr(&mut self, w: TxIdx) {
        self.report_failure(w, Error::Canceled, ProvErrno::UnknownOutcome);
        let wr = &mut self.tx[w];
        if wr.pulled == 0 || wr.flags.contains(WrFlags::ALL_SENT) {
            self.free_wr(w);
            return;
        }
        let (e, p) = (std::mem::replace(&mut wr.ep, EpIdx::NONE), wr.peer);
        self.objects.eps[e].tx_used -= 1;
        self.tx.bufs[w.at()] = barewire_driver::mem::IoBuf::EMPTY;
        let wr = &mut self.tx[w];
        if !wr.flags.contains(WrFlags::IN_RNDV_DATA_Q) {
            wr.flags |= WrFlags::IN_RNDV_DATA_Q;
            self.objects.peers[p].rndv_data_q.push_back(self.tx, w);
        }
        self.objects.due.make_ready(self.objects.peers, p);
    }

    fn report_failure(&mut self, w: TxIdx, err: Error, prov_errno: ProvErrno) {
        let wr = &mut self.tx[w];
        if wr.ep != EpIdx::NONE && !wr.flags.contains(WrFlags::REPORTED) {
            wr.flags |= WrFlags::REPORTED;
            if wr.flags.contains(WrFlags::GROUP) {
                return self.fail_group(w, err, prov_errno);
            }
            let one_sided = wr.flags.contains(WrFlags::RMA);
            let (op_context, tag, e, p) = (wr.context, wr.tag, wr.ep, wr.peer);
            // Bytes that a refused write has written nevertheless.
            let olen = if one_sided { wr.pulled } else { 0 };
            let (flags, cntr) = if one_sided {
                self.rma_outcome(w)
            } else {
                (send_flags(wr.flags), self.objects.eps[e].tx_cntr)
            };
            let cqe = Cqe { op_context, flags, tag, src: FI_ADDR_UNSPEC, ..Cqe::default() };
            let failure = CqErr { cqe, olen, err, prov_errno, err_data: None };
            self.objects.report_op_failure((e, p), failure, cntr);
        }
    }
}

pub(super) fn send_flags(flags: WrFlags) -> CqFlags {
    CqFlags::SEND | if flags.contains(WrFlags::TAGGED) { CqFlags::TAGGED } else { CqFlags::MSG }
}
