//! Shared receive contexts: receives that several endpoints take their messages from.
//!
//! A context is an endpoint record that no message names. Messages for the endpoints that share it
//! are matched in its tables, which keep the receives and unexpected messages of all of them in one
//! order. Once matched, the receive belongs to the endpoint: it completes in the endpoint's queue,
//! is counted by its counters, and ends with it. The queue is not known when a receive is posted,
//! so the completion entry is reserved at the match. Without room the message waits, and so do
//! later ones to the same endpoint; other endpoints continue.
//!
//! Multi-receives, peeks and buffered receives need receives of an endpoint's own, and are refused
//! here.

use super::ops::RecvFlags;
use super::post::recv_wr;
use super::recv::{MsgHead, Receives};
use super::{CntrId, EpAttr, EpId, Eps, MsgKind, Objects, Receiving, RecvReq, Sessions};
use crate::error::{Error, Result};
use crate::flags::Caps;
use crate::idx::{AvIdx, CntrIdx, CqIdx, EpIdx, RecvIdx};
use crate::proto::matching::Src;
use crate::types::Instant;

/// An ended receive of a context, out of its tables, for whose error entry no sharing endpoint had
/// room.
#[derive(Debug)]
pub(super) struct EndedRecv {
    srx: EpIdx,
    recv: RecvIdx,
    err: Error,
}

const KINDS: [MsgKind; 2] = [MsgKind::Msg, MsgKind::Tagged];

/// Capabilities that a context may request.
const CAPS: Caps = Caps::MSG.union(Caps::TAGGED).union(Caps::RECV).union(Caps::ANY_DIRECTED_RECV);

impl Eps {
    /// Creates a shared receive context. Receives may be posted to it at once.
    /// [`ep_close`](super::Node::ep_close) closes it once no endpoint shares it any more; receives
    /// without a message then end without a completion.
    ///
    /// Only the attributes for receives are used.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn srx_open(&mut self, attr: EpAttr) -> Result<EpId> {
        if attr.rx_size == 0 {
            return Err(Error::Invalid("queue size must not be 0"));
        }
        let caps = (attr.caps & CAPS) | Caps::RECV;
        let attr = EpAttr { caps, buffered_recv: false, number: None, ..attr };
        let srx = self.record(attr, u16::MAX)?;
        let ep = &mut self[srx.0.idx()];
        ep.sharers = Some(0);
        ep.rx_selective = true;
        ep.enable(true);
        Ok(srx)
    }

    /// Lets an endpoint take its receives from a context. `connected`: it has one peer only, and an
    /// address vector of its own, so sources cannot be named to the context any more.
    ///
    /// # Errors
    /// - [`Error::BadFd`]: one of them was closed. [`Error::OpBadState`]: the endpoint is enabled.
    /// - [`Error::Invalid`]: `srx` is no context, or the endpoint has one.
    /// - [`Error::OpNotSupp`]: the endpoint buffers receives.
    pub fn bind_srx(&mut self, ep: EpId, srx: EpId, connected: bool) -> Result<()> {
        let sharers = self.by_handle(srx.0).ok_or(Error::BadFd)?.sharers;
        let sharers = sharers.ok_or(Error::Invalid("bind: not a shared receive context"))?;
        let e = self.by_handle_mut(ep.0).ok_or(Error::BadFd)?;
        if e.enabled {
            return Err(Error::OpBadState);
        }
        if e.srx != EpIdx::NONE {
            return Err(Error::Invalid("a shared receive context is bound"));
        }
        if e.buffered {
            return Err(Error::OpNotSupp("FI_BUFFERED_RECV with a shared receive context"));
        }
        e.srx = srx.0.idx();
        let context = &mut self[srx.0.idx()];
        context.sharers = Some(sharers + 1);
        if connected {
            context.caps.remove(Caps::ANY_DIRECTED_RECV);
        }
        Ok(())
    }

    /// Sources named by a context's receives are looked up in the address vector of its endpoints,
    /// which must be the same for all.
    pub(super) fn srx_take_av(&mut self, e: EpIdx) -> Result<()> {
        let (av, srx) = (self[e].av, self[e].srx);
        let Some(context) = self.get_mut(srx) else { return Ok(()) };
        if context.av == AvIdx::NONE {
            context.av = av;
        } else if context.av != av && context.caps.intersects(Caps::ANY_DIRECTED_RECV) {
            return Err(Error::Invalid("the shared context has another address vector"));
        }
        Ok(())
    }

    /// Ends the sharing of endpoint `e`, which has no operation left.
    pub(super) fn srx_leave(&mut self, e: EpIdx) {
        let srx = std::mem::replace(&mut self[e].srx, EpIdx::NONE);
        let Some(context) = self.get_mut(srx) else { return };
        let left = context.sharers.unwrap_or(0).saturating_sub(1);
        context.sharers = Some(left);
        if left == 0 {
            // Its endpoints held the address vector; the next endpoint may have another.
            context.av = AvIdx::NONE;
        }
    }

    /// The record whose tables hold the receives and unexpected messages of endpoint `e`: its own
    /// or its context's.
    #[inline]
    pub(super) fn matching_of(&self, e: EpIdx) -> EpIdx {
        let srx = self[e].srx;
        if srx == EpIdx::NONE { e } else { srx }
    }
}

impl Eps {
    /// Frees a receive of context `s` without a completion: no queue can report it.
    fn drop_shared(&mut self, posted: &mut Receives, s: EpIdx, kind: MsgKind, recv: RecvIdx) {
        self[s].matcher[kind as usize].unlink_posted(&mut posted.pool, recv);
        self.free_recv(posted, recv);
    }
}

impl Receiving<'_> {
    pub(super) fn srx_close(&mut self, now: Instant, s: EpIdx) -> Result<()> {
        if self.sessions.eps[s].sharers != Some(0) {
            return Err(Error::Busy);
        }
        for kind in KINDS {
            while let Some(recv) =
                self.sessions.eps[s].matcher[kind as usize].first_posted(&self.sessions.posted.pool)
            {
                self.sessions.eps.drop_shared(self.sessions.posted, s, kind, recv);
            }
        }
        let Sessions { observed, posted, eps, .. } = &mut self.sessions;
        observed.losses.unended.retain(|one| {
            if one.srx == s {
                eps.free_recv(posted, one.recv);
            }
            one.srx != s
        });
        self.close_deferred_eps(now, s);
        self.sessions.eps.free(s);
        Ok(())
    }

    /// Posts a receive to context `s`, for the context itself or for `owner`, a deferred endpoint
    /// of it.
    pub(super) fn post_shared(
        &mut self,
        now: Instant,
        (s, owner): (EpIdx, EpIdx),
        src: Src,
        mut req: RecvReq,
    ) -> Result<()> {
        let it = &mut self.sessions.eps[owner];
        if it.rx_used >= it.rx_size || self.sessions.posted.pool.is_full() {
            return Err(Error::Again);
        }
        it.rx_used += 1;
        let wr = recv_wr(owner, it.rx_selective, false, &req);
        let matcher = &mut self.sessions.eps[s].matcher[req.kind as usize];
        let found = matcher.match_unexpected(self.sessions.unexpected, req.tag, req.ignore, src);
        self.sessions.posted.post(matcher, (req.tag, req.ignore, src), wr, &mut req.buf);
        if found.is_some() {
            self.retry_shared_unexpected(now, s);
        }
        Ok(())
    }

    /// Delivers, in order, the unexpected messages of context `s` that have a receive and whose
    /// endpoints have room.
    pub(super) fn retry_shared_unexpected(&mut self, now: Instant, s: EpIdx) {
        for kind in KINDS {
            loop {
                let (eps, posted) = (&self.sessions.eps, &self.sessions.posted.pool);
                let matcher = &eps[s].matcher[kind as usize];
                let found = matcher.find_unexpected(self.sessions.unexpected, |m| {
                    !eps[m.payload.ep].cq_blocked
                        && matcher.match_posted(posted, m.src, m.tag).is_some()
                });
                let Some(msg) = found else { break };
                let (head, e) =
                    (self.sessions.unexpected.head(msg), self.sessions.unexpected[msg].payload.ep);
                // If its endpoint has no room, that waits from now on; messages of other endpoints
                // are tried.
                let src = self.sessions.peers[head.peer].src(head.peer, head.src_ep);
                if let Some(recv) = self.sessions.objects().target_shared(e, &head, src) {
                    self.sessions.eps.unmatch(self.sessions.unexpected, msg);
                    self.deliver_unexpected(now, msg, recv, 0);
                }
            }
        }
    }
}

impl Objects<'_> {
    /// Takes a receive of the context for a message to endpoint `e`; the receive then belongs to
    /// `e`.
    pub(super) fn target_shared(&mut self, e: EpIdx, head: &MsgHead, src: Src) -> Option<RecvIdx> {
        let (s, kind) = (self.eps[e].srx, head.kind() as usize);
        let matcher = &self.eps[s].matcher[kind];
        let recv = matcher.match_posted(&self.posted.pool, src, head.tag)?;
        if !self.reserve_for(e) {
            self.eps[e].set_cq_blocked(true);
            return None;
        }
        self.eps[s].matcher[kind].unlink_posted(&mut self.posted.pool, recv);
        self.transfer_recv(recv, e);
        Some(recv)
    }

    /// Reserves an entry in the receive queue of endpoint `e`. If no entry is free, its messages
    /// are retried when the queue is read.
    fn reserve_for(&mut self, e: EpIdx) -> bool {
        let cq = self.eps[e].rx_cq;
        self.eps.make_room(self.cqs, cq);
        let room = self.cqs[cq].cq.reserve();
        if !room {
            self.mark_starved(cq);
        }
        room
    }

    /// Transfers a receive of a context to endpoint `e`.
    fn transfer_recv(&mut self, recv: RecvIdx, e: EpIdx) {
        let from = self.posted[recv].payload.ep;
        let to = if self.eps[from].deferred_for == EpIdx::NONE {
            e
        } else {
            self.deferred_sibling(from, e)
        };
        let wr = &mut self.posted[recv].payload;
        wr.ep = to;
        wr.is.set(RecvFlags::SIGNALED, wr.is(RecvFlags::SIGNALED) || !self.eps[to].rx_selective);
        self.eps[from].rx_used -= 1;
        self.eps[to].rx_used += 1;
    }

    /// The deferred endpoint of endpoint `e` with the same counter as deferred endpoint `t`; `e`
    /// itself if it can have none.
    #[cold]
    fn deferred_sibling(&mut self, t: EpIdx, e: EpIdx) -> EpIdx {
        let cntr = self.eps[t].tx_cntr;
        let cntr = (cntr != CntrIdx::NONE).then(|| CntrId(self.cntrs.handle(cntr)));
        self.deferred_ep(EpId(self.eps.handle(e)), cntr).map_or(e, |deferred| deferred.0.idx())
    }

    /// Cancels a receive of context `s`. An endpoint that shares the context reports it.
    pub(super) fn cancel_shared(&mut self, s: EpIdx, kind: MsgKind, recv: RecvIdx) -> Result<()> {
        if self.eps[s].sharers == Some(0) {
            self.eps.drop_shared(self.posted, s, kind, recv);
            return Ok(());
        }
        if self.end_shared(s, kind, recv, Error::Canceled) { Ok(()) } else { Err(Error::Again) }
    }

    /// An endpoint that shares context `s`, with an entry reserved in its receive queue.
    pub(super) fn sharer_with_room(&mut self, s: EpIdx) -> Option<EpIdx> {
        let bound = |ep: &super::ep::Ep| ep.srx == s && ep.rx_cq != CqIdx::NONE;
        let sharers: Vec<EpIdx> =
            self.eps.iter().filter(|(_, ep)| bound(ep)).map(|(e, _)| e).collect();
        sharers.into_iter().find(|&e| self.reserve_for(e))
    }

    /// Ends a receive of context `s` with an error entry of an endpoint that has room for it.
    pub(super) fn end_shared(
        &mut self,
        s: EpIdx,
        kind: MsgKind,
        recv: RecvIdx,
        err: Error,
    ) -> bool {
        let Some(e) = self.sharer_with_room(s) else { return false };
        self.eps[s].matcher[kind as usize].unlink_posted(&mut self.posted.pool, recv);
        self.transfer_recv(recv, e);
        self.fail_recv(recv, err);
        true
    }

    /// Ends a receive of context `s` that takes no message any more, as soon as an endpoint that
    /// shares the context has room for the error. False, and nothing has changed, if no endpoint
    /// shares it.
    pub(super) fn end_shared_in_time(
        &mut self,
        s: EpIdx,
        kind: MsgKind,
        recv: RecvIdx,
        err: Error,
    ) -> bool {
        let is_shared = self.eps[s].sharers != Some(0);
        if is_shared {
            self.eps[s].matcher[kind as usize].unlink_posted(&mut self.posted.pool, recv);
            self.observed.losses.unended.push(EndedRecv { srx: s, recv, err });
            self.end_waiting_receives();
        }
        is_shared
    }

    /// Ends the receives that wait for room, as far as there is room now.
    pub(super) fn end_waiting_receives(&mut self) {
        for one in std::mem::take(&mut self.observed.losses.unended) {
            match self.sharer_with_room(one.srx) {
                Some(e) => {
                    self.transfer_recv(one.recv, e);
                    self.fail_recv(one.recv, one.err);
                }
                None => self.observed.losses.unended.push(one),
            }
        }
    }

    /// Ends the receives of contexts, as far as the queues have room for the errors: the port is
    /// gone.
    pub(super) fn srx_port_gone(&mut self) {
        let contexts: Vec<EpIdx> =
            (self.eps.iter()).filter(|(_, ep)| ep.sharers.is_some()).map(|(s, _)| s).collect();
        for s in contexts {
            for kind in KINDS {
                while let Some(recv) =
                    self.eps[s].matcher[kind as usize].first_posted(&self.posted.pool)
                {
                    if !self.end_shared(s, kind, recv, Error::NetDown) {
                        break;
                    }
                }
            }
        }
    }
}
