//! Posting: checks a call, takes a record for it, and queues it or completes it.
//!
//! A refused call has no side effect (R1). Everything that can be refused is checked before the
//! first table is touched, and every accepted operation has its place in a completion queue.

use barewire_driver::mem::Span;

use super::ep::{Ep, LEVELS, RECV_FLAGS};
use super::ops::{RecvFlags, RecvWr, TxWr, WrFlags};
use super::packet::Joined;
use super::{
    Avs, EpId, Eps, MsgKind, Node, Objects, Openings, Operations, Peers, Posting, Receiving,
    RecvReq, SendReq, UnexpectedMsg,
};
use crate::av::AvEntry;
use crate::error::{Error, Result};
use crate::flags::{Caps, CqFlags, OpFlags};
use crate::idx::{EpIdx, PeerIdx, RecvIdx, TxIdx, UnexpectedIdx};
use crate::plant::{Bug, planted};
use crate::proto::matching::{Src, UnexpectedPool};
use crate::types::{CqErr, Cqe, FI_ADDR_UNSPEC, Instant, ProvErrno, Tenant};
use crate::wire::EndStatus;

/// Flags that any send may carry.
const SEND_FLAGS: OpFlags = OpFlags::REMOTE_CQ_DATA
    .union(OpFlags::MORE)
    .union(OpFlags::COMPLETION)
    .union(OpFlags::INJECT)
    .union(LEVELS);

impl Ep {
    /// Whether an unexpected message waits that the receive would match, on an endpoint with one
    /// sender. Peeks and claims search themselves.
    fn has_matching_unexpected(
        &self,
        unexpected: &UnexpectedPool<UnexpectedMsg>,
        req: &RecvReq,
    ) -> bool {
        let special = OpFlags::PEEK | OpFlags::CLAIM | OpFlags::DISCARD;
        let matcher = &self.matcher[req.kind as usize];
        let found = matcher.match_unexpected(unexpected, req.tag, req.ignore, Src::ANY);
        req.flags.intersects(special) || found.is_some()
    }
}

/// What the source of a receive may name.
struct RecvSources<'a> {
    avs: &'a Avs,
    peers: &'a Peers,
    /// The tenants.
    openings: &'a Openings,
}

impl Eps {
    /// The checks of a send that do not depend on free resources. Returns the endpoint's slot and
    /// the destination.
    #[inline]
    fn check_send(&self, avs: &Avs, ep: EpId, req: &SendReq) -> Result<(EpIdx, AvEntry)> {
        let e = self.by_handle(ep.0).ok_or(Error::BadFd)?;
        if !e.enabled || e.is_over {
            return Err(Error::OpBadState);
        }
        let kind = kind_cap(req.kind);
        if !e.caps.contains(Caps::SEND | kind) {
            return Err(Error::OpNotSupp("FI_SEND with FI_MSG or FI_TAGGED was not requested"));
        }
        let mut allowed = SEND_FLAGS;
        if e.caps.contains(Caps::FENCE) {
            allowed |= OpFlags::FENCE;
        }
        if !allowed.contains(req.flags) {
            return Err(Error::BadFlags);
        }
        let len = req.buf.len() as u64;
        let inject = req.flags.contains(OpFlags::INJECT);
        if len > Node::MAX_MSG_SIZE || inject && len > Node::INJECT_SIZE as u64 {
            return Err(Error::MsgTooLong);
        }
        let entry = avs[e.av].av.lookup(req.dest);
        let entry = entry.ok_or(Error::Invalid("destination is not in the AV"))?;
        Ok((ep.0.idx(), entry))
    }

    /// The checks of a receive that do not depend on free resources. Returns the endpoint's slot
    /// and the source.
    #[inline]
    fn check_recv<'a>(
        &self,
        unexpected: &UnexpectedPool<UnexpectedMsg>,
        from: impl FnOnce() -> RecvSources<'a>,
        ep: EpId,
        req: &RecvReq,
    ) -> Result<(EpIdx, Src)> {
        let e = self.by_handle(ep.0).ok_or(Error::BadFd)?;
        if !e.enabled {
            return Err(Error::OpBadState);
        }
        if !e.caps.contains(Caps::RECV | kind_cap(req.kind)) {
            return Err(Error::OpNotSupp("FI_RECV with FI_MSG or FI_TAGGED was not requested"));
        }
        if e.srx != EpIdx::NONE {
            return Err(Error::OpNotSupp("receives are posted to the shared context"));
        }
        if e.is_over && !e.has_matching_unexpected(unexpected, req) {
            return Err(Error::OpBadState);
        }
        let plain = RECV_FLAGS.contains(req.flags) && req.src == FI_ADDR_UNSPEC;
        if plain && !e.caps.contains(Caps::EXACT_DIRECTED_RECV) {
            return Ok((ep.0.idx(), Src::ANY));
        }
        self.check_rare_recv(&from(), e, ep.0.idx(), req)
    }

    /// The part of [`check_recv`](Self::check_recv) for receives with a flag or a source.
    fn check_rare_recv(
        &self,
        from: &RecvSources<'_>,
        e: &Ep,
        idx: EpIdx,
        req: &RecvReq,
    ) -> Result<(EpIdx, Src)> {
        let mut allowed = RECV_FLAGS;
        let own = e.sharers.is_none() && e.deferred_for == EpIdx::NONE;
        if own && e.caps.contains(multi_cap(req.kind)) {
            allowed |= OpFlags::MULTI_RECV;
        }
        if own && req.kind == MsgKind::Tagged {
            allowed |= OpFlags::PEEK;
        }
        if own && req.kind == MsgKind::Tagged || e.buffered {
            allowed |= OpFlags::CLAIM | OpFlags::DISCARD;
        }
        let named = self.get(e.deferred_for).unwrap_or(e);
        let by_key = req.flags.contains(OpFlags::AUTH_KEY);
        let directed = named.is_directed(req.kind);
        if from.openings.has_tenants() && directed {
            allowed |= OpFlags::AUTH_KEY;
        }
        if !allowed.contains(req.flags) || !special_ok(req, e.buffered) {
            return Err(Error::BadFlags);
        }
        // Checked first: a receive that names no key must not match the messages of every tenant.
        let src = if by_key {
            let tenant =
                Tenant::of_handle(req.src).filter(|&tenant| from.openings.lists_tenant(tenant));
            let tenant = tenant.ok_or(Error::Invalid("source is not the handle of a key"))?;
            if planted(Bug::TenantNotMatched) { Src::ANY } else { Src::any_of(tenant) }
        } else if !directed {
            Src::ANY
        } else if req.src == FI_ADDR_UNSPEC {
            // A claim or discard names an announced message by its context.
            let by_name = OpFlags::CLAIM | OpFlags::DISCARD;
            let matches = req.flags.contains(OpFlags::PEEK) || !req.flags.intersects(by_name);
            if matches && named.is_exact(req.kind) {
                return Err(Error::Invalid("FI_EXACT_DIRECTED_RECV: no source is named"));
            }
            Src::ANY
        } else {
            let entry = from.avs.get(named.av).and_then(|table| table.av.lookup(req.src));
            let entry = entry.ok_or(Error::Invalid("source is not in the AV"))?;
            // An address that names a context matches as one that names none: all contexts send
            // under the one address.
            from.peers[entry.peer].src(entry.peer, entry.inserted_ep())
        };
        Ok((idx, src))
    }
}

impl Node {
    /// Posts a message. It leaves with the next [`transmit`](Self::transmit).
    ///
    /// # Errors
    /// Nothing was sent, nothing will complete:
    /// - [`Error::OpBadState`]: the endpoint is not enabled, or its connection is over.
    ///   [`Error::BadFd`]: it was closed.
    /// - [`Error::OpNotSupp`]: it has no `FI_SEND`, or not `FI_MSG` or `FI_TAGGED`.
    /// - [`Error::BadFlags`]: a flag is unknown here or was not granted (`FI_FENCE`,
    ///   `FI_MULTICAST`), or does not go with a multicast group.
    /// - [`Error::Invalid`]: `dest` is not in the address vector, and no group that the endpoint
    ///   is in; or with `FI_MULTICAST` it is not a group.
    /// - [`Error::MsgTooLong`]: above [`Self::MAX_MSG_SIZE`], or injected and above
    ///   [`Self::INJECT_SIZE`], or longer than a frame holds and to a group.
    /// - [`Error::ConnReset`]: once after a session with the peer was lost, if messages of this
    ///   endpoint that were reported as sent may have been lost with it.
    /// - [`Error::Again`]: the transmit queue or the completion queue is full.
    #[inline]
    pub fn post_send(&mut self, now: Instant, ep: EpId, req: SendReq) -> Result<()> {
        if self.join(|| now, ep, &req) != Joined::No {
            return Ok(());
        }
        self.posting().post_message(now, ep, req)
    }

    /// Posts a receive, or with `PEEK`, `CLAIM` and `DISCARD` queries a message that has arrived.
    ///
    /// # Errors
    /// Nothing was posted, nothing will complete:
    /// - [`Error::OpBadState`]: the endpoint is not enabled, or its connection is over.
    ///   [`Error::BadFd`]: it was closed.
    /// - [`Error::OpNotSupp`]: it has no `FI_RECV`, or not `FI_MSG` or `FI_TAGGED`.
    /// - [`Error::BadFlags`]: a flag is unknown here or was not granted, or the combination of
    ///   `PEEK`, `CLAIM`, `DISCARD` and `MULTI_RECV` means nothing.
    /// - [`Error::Invalid`]: with `FI_DIRECTED_RECV`, `src` is not in the address vector, or with
    ///   `AUTH_KEY` not the handle of a key; with `FI_EXACT_DIRECTED_RECV` it is
    ///   [`FI_ADDR_UNSPEC`]; or a claim names no announced message.
    /// - [`Error::Again`]: the receive queue, which peeks and claims need no place in, or the
    ///   completion queue is full.
    #[inline]
    pub fn post_recv(&mut self, now: Instant, ep: EpId, mut req: RecvReq) -> Result<()> {
        let Self { eps, unexpected, avs, peers, openings, .. } = &*self;
        let from = || RecvSources { avs, peers, openings };
        let (e, src) = eps.check_recv(unexpected, from, ep, &req)?;
        let special = OpFlags::PEEK | OpFlags::CLAIM | OpFlags::DISCARD;
        if req.flags.intersects(special) {
            return self.receiving().post_special(now, e, src, req);
        }
        let ep = &mut self.eps[e];
        if ep.sharers.is_some() {
            return self.receiving().post_shared(now, (e, e), src, req);
        }
        if ep.deferred_for != EpIdx::NONE {
            return self.receiving().post_deferred_recv(now, e, src, req);
        }
        self.eps.make_recv_room(&mut self.cqs, e);
        let ep = &mut self.eps[e];
        if ep.rx_used >= ep.rx_size || self.posted.pool.is_full() {
            return Err(Error::Again);
        }
        if !self.cqs[ep.rx_cq].cq.reserve() {
            return Err(Error::Again);
        }
        ep.rx_used += 1;
        let multi = req.flags.contains(OpFlags::MULTI_RECV);
        let (tag, ignore, kind) = (req.tag, req.ignore, req.kind);
        let wr = recv_wr(e, ep.rx_selective, multi, &req);
        let matcher = &mut ep.matcher[kind as usize];
        let cq_blocked = ep.cq_blocked;
        let found = if multi || cq_blocked || matcher.unexpected_len() == 0 {
            None
        } else {
            matcher.match_unexpected(&self.unexpected, tag, ignore, src)
        };
        let recv = self.posted.post(matcher, (tag, ignore, src), wr, &mut req.buf);
        if cq_blocked {
            // The messages that wait for room in the queue may be for an older receive than this
            // one.
            self.receiving().retry_ep_waiters(now, e);
        } else if let Some(msg) = found {
            matcher.unlink_posted(&mut self.posted.pool, recv);
            self.eps.unmatch(&mut self.unexpected, msg);
            self.receiving().deliver_unexpected(now, msg, recv, 0);
        } else if multi {
            self.receiving().fill_multi(now, e, kind, recv);
            self.objects().end_receives_if_over(e);
        }
        Ok(())
    }
}

impl Posting<'_> {
    /// [`Node::post_send`] of a message that joins no open packet.
    pub(super) fn post_message(&mut self, now: Instant, ep: EpId, mut req: SendReq) -> Result<()> {
        let (e, entry) = match self.sessions.eps.check_send(self.sessions.avs, ep, &req) {
            Ok(checked) => checked,
            Err(error) => return self.post_to_group(ep, &req, error),
        };
        self.sessions.control().report_loss(e, entry.peer)?;
        let len = req.buf.len() as u64;
        self.sessions.eps.make_send_room(self.sessions.cqs, e);
        let ep = &mut self.sessions.eps[e];
        if ep.tx_used >= ep.tx_size || self.sessions.tx.wrs.free_count() == 0 {
            return Err(Error::Again);
        }
        if !self.sessions.cqs[ep.tx_cq].cq.reserve() {
            return Err(Error::Again);
        }
        ep.tx_used += 1;
        let flags = wr_flags(&req, ep.tx_selective);
        let src_ep = ep.number;
        let AvEntry { peer: p, ep: dst_ep, rx_ctx, incarnation } = entry;
        let wr = TxWr::new(req.context, (p, e), (dst_ep, src_ep), flags);
        let w = self.sessions.tx.alloc(TxWr { rx_ctx, tag: req.tag, data: req.data, len, ..wr });
        self.sessions.tx.keep_memory(w, &mut req.buf);
        self.queue_wr(now, p, w, incarnation);
        self.sessions.packs.nagle.note_message(p);
        Ok(())
    }

    /// Queues request `w` for peer `p`, whose address named incarnation `inc`, to leave with the
    /// next transmit.
    pub(super) fn queue_wr(&mut self, now: Instant, p: PeerIdx, w: TxIdx, inc: u64) {
        if self.sessions.operations().enqueue_wr(now, p, w, inc) {
            self.sessions.control().schedule(now, p);
        }
    }
}

impl Receiving<'_> {
    /// Executes peek, claim and discard. All of them complete at once.
    fn post_special(&mut self, now: Instant, e: EpIdx, src: Src, req: RecvReq) -> Result<()> {
        let (peek, claim) = (req.flags.contains(OpFlags::PEEK), req.flags.contains(OpFlags::CLAIM));
        let discard = req.flags.contains(OpFlags::DISCARD);
        let ep = &mut self.sessions.eps[e];
        let claimed = ep.claimed.iter().position(|&(context, _)| context == req.context);
        if !peek && claimed.is_none() {
            return Err(Error::Invalid("no message was claimed or announced with this context"));
        }
        if peek && claim && claimed.is_some() {
            return Err(Error::Invalid("a message is claimed with this context already"));
        }
        self.sessions.eps.make_recv_room(self.sessions.cqs, e);
        let ep = &mut self.sessions.eps[e];
        // The receive table may be full of receives that do not match this message, and nothing
        // else frees a record for the claim.
        let takes_record = !peek && !discard;
        if takes_record && self.sessions.posted.pool.is_full()
            || !self.sessions.cqs[ep.rx_cq].cq.reserve()
        {
            return Err(Error::Again);
        }
        if !peek {
            let (_, msg) = ep.claimed.swap_remove(claimed.expect("checked above"));
            if discard {
                self.sessions.objects().report_peek(e, msg, &req);
                self.discard_unexpected(now, msg, EndStatus::Discarded);
                return Ok(());
            }
            return self.receive_claimed(now, e, msg, req);
        }
        let (matcher, cq) = (&ep.matcher[req.kind as usize], ep.rx_cq);
        let Some(msg) =
            matcher.match_unexpected(self.sessions.unexpected, req.tag, req.ignore, src)
        else {
            let flags = CqFlags::RECV | CqFlags::TAGGED;
            let (op_context, tag) = (req.context, req.tag);
            let cqe = Cqe { op_context, flags, tag, src: FI_ADDR_UNSPEC, ..Cqe::default() };
            // A peek that finds no message is an answer, which no counter counts as a failure.
            let (err, prov_errno) = (Error::NoMsg, ProvErrno::None);
            self.sessions.cqs[cq].cq.push_err(CqErr {
                cqe,
                olen: 0,
                err,
                prov_errno,
                err_data: None,
            });
            return Ok(());
        };
        self.sessions.objects().report_peek(e, msg, &req);
        if discard {
            self.discard_unexpected(now, msg, EndStatus::Discarded);
        } else if claim {
            self.sessions.eps.unmatch(self.sessions.unexpected, msg);
            self.sessions.unexpected[msg].payload.claimed = true;
            self.sessions.eps[e].claimed.push((req.context, msg));
        }
        Ok(())
    }

    fn receive_claimed(
        &mut self,
        now: Instant,
        e: EpIdx,
        msg: UnexpectedIdx,
        mut req: RecvReq,
    ) -> Result<()> {
        let ep = &mut self.sessions.eps[e];
        if self.sessions.unexpected[msg].payload.dead {
            let flags = CqFlags::RECV | CqFlags::TAGGED;
            let (op_context, tag) = (req.context, self.sessions.unexpected[msg].tag);
            let cqe = Cqe { op_context, flags, tag, src: FI_ADDR_UNSPEC, ..Cqe::default() };
            self.sessions.objects().error_to(e, cqe, Error::ConnReset);
            self.sessions.objects().free_unexpected(msg);
            return Ok(());
        }
        ep.rx_used += 1;
        let kind = req.kind;
        let wr = recv_wr(e, ep.rx_selective, false, &req);
        let matcher = &mut ep.matcher[kind as usize];
        let tag = self.sessions.unexpected[msg].tag;
        let recv = self.sessions.posted.post(matcher, (tag, 0, Src::ANY), wr, &mut req.buf);
        matcher.unlink_posted(&mut self.sessions.posted.pool, recv);
        self.deliver_unexpected(now, msg, recv, 0);
        Ok(())
    }
}

impl Operations<'_> {
    /// [`queue_wr`](Posting::queue_wr) without scheduling the peer for transmission. False if the
    /// request has ended instead.
    pub(super) fn enqueue_wr(&mut self, now: Instant, p: PeerIdx, w: TxIdx, inc: u64) -> bool {
        self.turn.tick(now);
        self.objects.peers[p].begin_to_wait(now);
        let peer = &mut self.objects.peers[p];
        peer.wrs.push_back(self.tx, w);
        if inc != 0 {
            self.tx[w].flags |= WrFlags::NAMED;
            if peer.inc == 0 {
                peer.inc = inc;
            }
        }
        if self.objects.port.gone || inc != 0 && peer.inc != 0 && inc != peer.inc {
            // The address names an earlier incarnation of the peer, which will never answer.
            let err = if self.objects.port.gone { Error::NetDown } else { Error::ConnReset };
            self.fail_wr(w, err, ProvErrno::NotExecuted);
            return false;
        }
        self.tx[w].flags |= WrFlags::IN_SEND_Q;
        if !planted(Bug::StaleTxQuota) {
            peer.tx_quota = 0;
        }
        peer.send_q.push_back(self.tx, w);
        true
    }

    /// Cancels the oldest receive posted with `context`, or a send that has not begun to leave. It
    /// completes with [`Error::Canceled`].
    ///
    /// # Errors
    /// [`Error::NoData`]: there is none; it completes, or has completed, by itself.
    /// [`Error::BadFd`]: the endpoint was closed. [`Error::Again`]: no endpoint that shares
    /// the context has room for the entry in its queue.
    pub fn cancel(&mut self, ep: EpId, context: u64) -> Result<()> {
        self.objects.eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        let e = ep.0.idx();
        for kind in [MsgKind::Msg, MsgKind::Tagged] {
            let matcher = &mut self.objects.eps[e].matcher[kind as usize];
            let found =
                matcher.find_posted(&self.objects.posted.pool, |r| r.payload.context == context);
            let Some(recv) = found else { continue };
            if self.objects.eps[e].sharers.is_some() {
                return self.objects.cancel_shared(e, kind, recv);
            }
            if planted(Bug::CancelledReceiveMatches) {
                self.objects.complete_with_error(recv, Error::Canceled);
                return Ok(());
            }
            self.objects.end_unfilled(e, kind, recv);
            return Ok(());
        }
        let unsent = self.tx.wrs.iter().find(|(_, wr)| {
            wr.ep == e
                && wr.context == context
                && wr.sent == 0
                && wr.flags.contains(WrFlags::IN_SEND_Q)
                && !wr.flags.contains(WrFlags::GROUP)
        });
        match unsent.map(|(w, _)| w) {
            Some(w) => self.fail_wr(w, Error::Canceled, ProvErrno::NotExecuted),
            None if self.cancel_packed(e, context) => {}
            None => return Err(Error::NoData),
        }
        Ok(())
    }
}

impl Objects<'_> {
    /// Completes a peek or a discard with the header fields of the message.
    fn report_peek(&mut self, e: EpIdx, msg: UnexpectedIdx, req: &RecvReq) {
        let tag = self.unexpected[msg].tag;
        let m = &self.unexpected[msg].payload;
        let mut flags = CqFlags::RECV;
        flags |= if m.tagged { CqFlags::TAGGED } else { CqFlags::MSG };
        if m.imm.is_some() {
            flags |= CqFlags::REMOTE_CQ_DATA;
        }
        let ep = &self.eps[e];
        let src = self.avs[ep.av].av.reverse(m.peer, m.inc, m.src_ep).unwrap_or(FI_ADDR_UNSPEC);
        let cqe = Cqe {
            op_context: req.context,
            flags,
            len: m.msg_len,
            buf: 0,
            data: m.imm.unwrap_or(0),
            tag,
            src,
        };
        self.cqs[ep.rx_cq].cq.push(cqe);
    }

    /// Takes a receive out of matching and cancels it. A multi-receive with messages being placed
    /// ends with the last of them.
    pub(super) fn end_unfilled(&mut self, e: EpIdx, kind: MsgKind, recv: RecvIdx) {
        self.eps[e].matcher[kind as usize].unlink_posted(&mut self.posted.pool, recv);
        let wr = &mut self.posted[recv].payload;
        wr.is |= RecvFlags::CLOSED;
        if wr.active == 0 {
            self.fail_recv(recv, Error::Canceled);
        }
    }
}

fn kind_cap(kind: MsgKind) -> Caps {
    match kind {
        MsgKind::Msg => Caps::MSG,
        MsgKind::Tagged => Caps::TAGGED,
    }
}

fn multi_cap(kind: MsgKind) -> Caps {
    match kind {
        MsgKind::Msg => Caps::MULTI_RECV,
        MsgKind::Tagged => Caps::TAGGED_MULTI_RECV,
    }
}

/// Whether the combination of `PEEK`, `CLAIM`, `DISCARD` and `MULTI_RECV` has a meaning.
fn special_ok(req: &RecvReq, buffered: bool) -> bool {
    let f = req.flags;
    let special = f.intersects(OpFlags::PEEK | OpFlags::CLAIM | OpFlags::DISCARD);
    let multi = f.contains(OpFlags::MULTI_RECV);
    let all = f.contains(OpFlags::PEEK | OpFlags::CLAIM | OpFlags::DISCARD);
    let bare_discard =
        f.contains(OpFlags::DISCARD) && !f.intersects(OpFlags::PEEK | OpFlags::CLAIM) && !buffered;
    !(special && multi || all || bare_discard)
}

#[inline(always)]
pub(super) fn recv_wr(e: EpIdx, selective: bool, multi: bool, req: &RecvReq) -> RecvWr {
    let one = req.buf.as_one();
    let signaled = !selective || req.flags.contains(OpFlags::COMPLETION);
    let mut is = RecvFlags::empty();
    is.set(RecvFlags::SIMPLE, signaled && !multi && one.is_some());
    is.set(RecvFlags::TAGGED, req.kind == MsgKind::Tagged);
    is.set(RecvFlags::SIGNALED, signaled);
    is.set(RecvFlags::LIST, one.is_none());
    is.set(RecvFlags::MULTI, multi);
    let buf = one.map_or(Span::EMPTY, Span::again);
    RecvWr { context: req.context, used: 0, buf, ep: e, is, active: 0 }
}

/// Whether a success of the request writes a completion.
#[inline(always)]
pub(super) fn wants_cqe(req: &SendReq, selective: bool) -> bool {
    !req.no_completion && (!selective || req.flags.contains(OpFlags::COMPLETION))
}

pub(super) fn wr_flags(req: &SendReq, selective: bool) -> WrFlags {
    let f = req.flags;
    let cqe = wants_cqe(req, selective);
    let mut flags = WrFlags::empty();
    flags.set(WrFlags::TAGGED, req.kind == MsgKind::Tagged);
    flags.set(WrFlags::IMM, f.contains(OpFlags::REMOTE_CQ_DATA));
    flags.set(WrFlags::INJECTED, f.contains(OpFlags::INJECT));
    flags.set(WrFlags::FENCE, f.contains(OpFlags::FENCE));
    flags.set(WrFlags::MORE, f.contains(OpFlags::MORE));
    flags.set(WrFlags::CQE, cqe);
    let matched = f.contains(OpFlags::MATCH_COMPLETE) && !planted(Bug::MatchCompleteOnArrival);
    flags.set(WrFlags::MATCH, matched);
    flags.set(WrFlags::DELIVERY, f.contains(OpFlags::DELIVERY_COMPLETE));
    // An injected message completes early if it requests no level beyond the reuse of its source.
    let copied = f.contains(OpFlags::INJECT) || planted(Bug::InjectCompleteUncopied);
    let early = copied
        && f.contains(OpFlags::INJECT_COMPLETE)
        && !f.intersects(OpFlags::DELIVERY_COMPLETE | OpFlags::MATCH_COMPLETE);
    flags.set(WrFlags::EARLY, early);
    flags
}
