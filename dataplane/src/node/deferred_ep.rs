//! Deferred endpoints: endpoint records through which deferred work is posted. To peers their
//! operations are operations of the endpoint, but they complete only on demand and are counted by
//! one counter of the deferred endpoint.
//!
//! A deferred endpoint is an endpoint record that no message names. It has the number, the queues
//! and the address vector of its endpoint. Receives posted through it are in the endpoint's
//! matching tables, in order with all others, but belong to the deferred endpoint. It ends with its
//! endpoint, or earlier, when it is idle and its counter is closed.
//!
//! A shared receive context has deferred endpoints as well. Once matched, their receives belong to
//! a deferred endpoint, with the same counter, of the endpoint that the message was for.

use super::ops::RecvFlags;
use super::post::recv_wr;
use super::rma::{READ, WRITE};
use super::{CntrId, EpAttr, EpId, Eps, Objects, Receiving, RecvReq};
use crate::error::{Error, Result};
use crate::flags::{Caps, CqFlags};
use crate::idx::{AvIdx, CntrIdx, CqIdx, EpIdx};
use crate::proto::matching::Src;
use crate::types::{CqErr, Cqe, FI_ADDR_UNSPEC, Instant, ProvErrno};

impl Eps {
    fn deferred_eps(&self, which: impl Fn(EpIdx, &super::ep::Ep) -> bool) -> Vec<EpIdx> {
        self.iter().filter(|(i, ep)| which(*i, ep)).map(|(i, _)| i).collect()
    }
}

impl Receiving<'_> {
    /// Posts a receive of deferred endpoint `t` to its endpoint's tables.
    pub(super) fn post_deferred_recv(
        &mut self,
        now: Instant,
        t: EpIdx,
        src: Src,
        mut req: RecvReq,
    ) -> Result<()> {
        let e = self.sessions.eps[t].deferred_for;
        if self.sessions.eps[e].sharers.is_some() {
            return self.post_shared(now, (e, t), src, req);
        }
        if self.sessions.eps[e].srx != EpIdx::NONE {
            return Err(Error::OpNotSupp("receives are posted to the shared context"));
        }
        self.sessions.eps.make_room(self.sessions.cqs, self.sessions.eps[t].rx_cq);
        let deferred = &mut self.sessions.eps[t];
        if deferred.rx_used >= deferred.rx_size || self.sessions.posted.pool.is_full() {
            return Err(Error::Again);
        }
        if !self.sessions.cqs[deferred.rx_cq].cq.reserve() {
            return Err(Error::Again);
        }
        deferred.rx_used += 1;
        // The fast path treats simple receives as the endpoint's own, so this one must not be
        // simple.
        let mut wr = recv_wr(t, true, false, &req);
        wr.is -= RecvFlags::SIMPLE;
        let matcher = &mut self.sessions.eps[e].matcher[req.kind as usize];
        let found = matcher.match_unexpected(self.sessions.unexpected, req.tag, req.ignore, src);
        let recv = self.sessions.posted.post(matcher, (req.tag, req.ignore, src), wr, &mut req.buf);
        if self.sessions.eps[e].cq_blocked {
            self.retry_ep_waiters(now, e);
        } else if let Some(msg) = found {
            self.sessions.eps[e].matcher[req.kind as usize]
                .unlink_posted(&mut self.sessions.posted.pool, recv);
            self.sessions.eps.unmatch(self.sessions.unexpected, msg);
            self.deliver_unexpected(now, msg, recv, 0);
        }
        Ok(())
    }

    /// Ends the deferred endpoints of endpoint `e`. Its receives have ended already.
    pub(super) fn close_deferred_eps(&mut self, now: Instant, e: EpIdx) {
        if !self.sessions.eps[e].has_deferred {
            return;
        }
        for t in self.sessions.eps.deferred_eps(|_, deferred| deferred.deferred_for == e) {
            self.sessions.close_sends(now, t);
            self.close_receives(now, t);
            self.sessions.objects().free_deferred_ep(t);
        }
    }
}

impl Objects<'_> {
    /// The deferred endpoint of `ep` whose operations are counted by `cntr`, or by no counter;
    /// created if there is none. The posting calls accept it like an endpoint.
    ///
    /// # Errors
    /// - [`Error::OpBadState`]: the endpoint is not enabled. [`Error::BadFd`]: one was closed.
    /// - [`Error::NoMem`]: there are too many endpoints.
    pub fn deferred_ep(&mut self, ep: EpId, cntr: Option<CntrId>) -> Result<EpId> {
        let e = self.eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        if !e.enabled || e.deferred_for != EpIdx::NONE {
            return Err(Error::OpBadState);
        }
        let at = match cntr {
            Some(cntr) => self.cntrs.by_handle(cntr.0).map(|_| cntr.0.idx()).ok_or(Error::BadFd)?,
            None => CntrIdx::NONE,
        };
        let idx = ep.0.idx();
        let known = self.eps.iter().find(|(_, t)| t.deferred_for == idx && t.tx_cntr == at);
        if let Some((deferred, _)) = known {
            return Ok(EpId(self.eps.handle(deferred)));
        }
        let attr = EpAttr {
            number: None,
            caps: e.caps - Caps::COLLECTIVE,
            tx_size: e.tx_size as usize,
            rx_size: e.rx_size as usize,
            buffered_recv: false,
            ..EpAttr::default()
        };
        // A context has no lasting address vector: it has that of its present endpoints.
        let av = if e.sharers.is_some() { AvIdx::NONE } else { e.av };
        let (number, queues) = (e.number, (e.tx_cq, e.rx_cq));
        let deferred = self.eps.record(attr, number)?;
        let t = &mut self.eps[deferred.0.idx()];
        t.deferred_for = idx;
        ((t.tx_cq, t.rx_cq), t.av) = (queues, av);
        (t.tx_selective, t.rx_selective) = (true, true);
        (t.tx_cntr, t.rx_cntr) = (at, at);
        (t.rma_cntr[READ], t.rma_cntr[WRITE]) = (at, at);
        t.enable(true);
        for (cq, ops) in [(queues.0, [t.tx_size, 0]), (queues.1, [0, t.rx_size])] {
            if let Some(table) = self.cqs.get_mut(cq) {
                table.bind(ops, self.settings);
            }
        }
        if let Some(table) = self.avs.get_mut(av) {
            table.bound += 1;
        }
        if let Some(table) = self.cntrs.get_mut(at) {
            table.bound += 4;
        }
        self.eps[idx].has_deferred = true;
        Ok(deferred)
    }

    /// Reports that an operation of `ep`, accepted to be posted later, could not be posted: by an
    /// error entry in its queue for sends or, if `recv`, for receives, and by its counter. For a
    /// shared context the entry goes to an endpoint that shares it, if there is one.
    ///
    /// # Errors
    /// [`Error::Again`]: the queue is full; nothing was reported. [`Error::BadFd`]: the endpoint
    /// was closed.
    pub fn fail_unposted(&mut self, ep: EpId, context: u64, recv: bool, err: Error) -> Result<()> {
        let e = self.eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        let (mut cq, cntr) = if recv { (e.rx_cq, e.rx_cntr) } else { (e.tx_cq, e.tx_cntr) };
        let s = e.deferred_for;
        if let Some(sharers) = self.eps.get(s).and_then(|context| context.sharers) {
            if sharers == 0 {
                self.cntrs.count_failed(cntr);
                return Ok(());
            }
            cq = self.sharer_with_room(s).map_or(CqIdx::NONE, |e| self.eps[e].rx_cq);
            if cq == CqIdx::NONE {
                return Err(Error::Again);
            }
        } else {
            if cq == CqIdx::NONE {
                return Err(Error::Again);
            }
            self.eps.make_room(self.cqs, cq);
            if !self.cqs[cq].cq.reserve() {
                return Err(Error::Again);
            }
        }
        let flags = if recv { CqFlags::RECV } else { CqFlags::SEND };
        let cqe = Cqe { op_context: context, flags, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        let prov_errno = ProvErrno::NotExecuted;
        self.cqs[cq].cq.push_err(CqErr { cqe, olen: 0, err, prov_errno, err_data: None });
        self.cntrs.count_failed(cntr);
        Ok(())
    }

    /// Ends the idle deferred endpoints that counter `c` counts for.
    pub(super) fn leave_cntr(&mut self, c: CntrIdx) {
        let idle = |t: &super::ep::Ep| t.tx_cntr == c && !t.is_in_use();
        for t in self
            .eps
            .deferred_eps(|_, deferred| deferred.deferred_for != EpIdx::NONE && idle(deferred))
        {
            self.free_deferred_ep(t);
        }
    }

    fn free_deferred_ep(&mut self, t: EpIdx) {
        let deferred = &mut self.eps[t];
        deferred.release_receives(self.cqs);
        deferred.release_ops(self.cqs);
        self.observed.losses.forget_ep(t);
        let deferred = self.eps.free(t);
        self.unbind(&deferred);
    }
}
