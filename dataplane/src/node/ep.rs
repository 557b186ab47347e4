//! Endpoints: the objects that they are bound to, and their life from open to close.

use super::fast_op::{Fetch, Form};
use super::ops::{RecvFlags, WrFlags};
use super::rma::{READ, REMOTE_READ, REMOTE_WRITE, WRITE};
use super::route::Route;
use super::{
    AvId, CntrId, CqId, CqTable, Cqs, EpAttr, EpId, Eps, MsgKind, Node, Objects, Operations,
    Receiving, Sessions, Todo,
};
use crate::error::{Error, Result};
use crate::flags::{BindFlags, Caps, OpFlags};
use crate::idx::{AvIdx, CntrIdx, CqIdx, EpIdx, PeerIdx, PullIdx, RecvIdx, TxIdx, UnexpectedIdx};
use crate::plant::{Bug, planted};
use crate::proto::matching::Matcher;
use crate::table::Vacant;
use crate::types::{EpAddr, Instant};
use crate::wire::EndStatus;

/// Bit in which the number of an endpoint differs from that of its hidden endpoint for collectives.
/// Automatically assigned numbers are below it, so their hidden endpoints conflict with no number.
pub(crate) const SIDE: u16 = 1 << 15;

/// Counters of one endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpCounters {
    /// Number of the endpoint.
    pub number: u16,
    /// Sends completed.
    // Not next to `sent_bytes`: the compiler would update both with one vector addition, which
    // takes three times as many instructions.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
    /// Bytes of the sends.
    pub sent_bytes: u64,
    /// Bytes of the messages received.
    pub received_bytes: u64,
    /// Operations that ended in an error.
    pub errors: u64,
    /// Messages waiting for a receive now.
    pub unexpected: u32,
    /// Receives posted now.
    pub posted: u32,
}

/// Completion levels.
pub(super) const LEVELS: OpFlags = OpFlags::INJECT_COMPLETE
    .union(OpFlags::TRANSMIT_COMPLETE)
    .union(OpFlags::DELIVERY_COMPLETE)
    .union(OpFlags::MATCH_COMPLETE);

/// Flags that any receive may carry.
pub(super) const RECV_FLAGS: OpFlags =
    OpFlags::MORE.union(OpFlags::COMPLETION).union(LEVELS).union(OpFlags::INJECT);

/// Maximum number of receives, or one-sided operations, that an endpoint reserves room for at once.
const RESERVE_MAX: usize = 32;

/// Whether an endpoint with `left` reservations may also keep the reservation of a receive or
/// operation that has ended. If any reservation is left, nothing waits for room.
#[inline(always)]
pub(super) fn may_reserve_more(left: u16) -> bool {
    (1..RESERVE_MAX as u16).contains(&left)
}

/// One endpoint.
#[derive(Debug)]
pub struct Ep {
    pub(crate) number: u16,
    /// Index of this receive context in its scalable endpoint, 0 if the endpoint is no such
    /// context.
    pub(crate) rx_ctx: u8,
    pub(crate) enabled: bool,
    /// The connection is over: the endpoint sends nothing, and receives only messages that have
    /// arrived.
    pub(crate) is_over: bool,
    /// Every peer may send to the endpoint, in its address vector or not.
    pub(crate) admits_all: bool,
    /// The endpoint is enabled, and has the capabilities to send and to receive messages of each
    /// [`MsgKind`].
    pub(crate) may_send: [bool; 2],
    pub(crate) may_recv: [bool; 2],
    /// `may_send`, and every send writes a completion and no counter counts it: the fast path
    /// checks nothing else of the endpoint.
    pub(crate) fast_send: [bool; 2],
    /// Receives of each [`MsgKind`] whose room is reserved: they count in `rx_used` and have
    /// completion entries, so they are posted without a check. Above 0 only if the endpoint may
    /// receive and no unexpected message waits.
    pub(crate) rx_reserved: [u16; 2],
    /// Reserved receives that may no longer be posted without a check, but whose room has yet to be
    /// released.
    pub(crate) rx_reserved_idle: u16,
    /// One-sided operations whose room is reserved: they count in `tx_used` and have completion
    /// entries, so the fast path posts them without a check.
    pub(crate) ops_reserved: u16,
    /// Flags that force the slow path of a receive. Under selective completion a missing
    /// `COMPLETION` does too.
    pub(crate) rx_slow_flags: OpFlags,
    /// Every success writes a completion, with or without `COMPLETION`: no selective completion is
    /// bound.
    pub(crate) sig_all: bool,
    /// The endpoint is enabled, and has the capabilities of one-sided operations of each [`Form`].
    pub(crate) may_rma: [bool; Form::ALL.len()],
    pub(crate) caps: Caps,
    /// Slots of the bound objects, `NONE` if not bound.
    pub(crate) tx_cq: CqIdx,
    pub(crate) rx_cq: CqIdx,
    pub(crate) tx_selective: bool,
    pub(crate) rx_selective: bool,
    pub(crate) av: AvIdx,
    pub(crate) route: Route,
    pub(crate) fetch: Fetch,
    pub(crate) tx_cntr: CntrIdx,
    pub(crate) rx_cntr: CntrIdx,
    /// Counters of one-sided operations, indexed by the constants in `rma.rs`.
    pub(crate) rma_cntr: [CntrIdx; 4],
    pub(crate) tx_size: u32,
    pub(crate) rx_size: u32,
    pub(crate) tx_used: u32,
    pub(crate) rx_used: u32,
    pub(crate) tx_op_flags: OpFlags,
    pub(crate) rx_op_flags: OpFlags,
    pub(crate) min_multi_recv: u64,
    pub(crate) buffered: bool,
    /// Minimum number of bytes of a message that a buffered-receive event shows, and the message
    /// length above which the event shows no more than that.
    pub(crate) buffered_min: usize,
    pub(crate) buffered_limit: usize,
    /// A message could not be delivered because a queue was full: later messages must not overtake
    /// it.
    pub(crate) cq_blocked: bool,
    /// The shared receive context of the endpoint, `NONE` if it has receives of its own.
    pub(crate) srx: EpIdx,
    /// Number of endpoints that share this record, if it is a shared receive context.
    pub(crate) sharers: Option<u32>,
    /// The endpoint that this is a [deferred endpoint](super::deferred_ep) of, `NONE` if it is no
    /// deferred endpoint.
    pub(crate) deferred_for: EpIdx,
    /// The endpoint has or had a deferred endpoint.
    pub(crate) has_deferred: bool,
    /// Matchers of untagged and of tagged messages.
    pub(crate) matcher: [Matcher; 2],
    /// Messages that a peek or an announcement has taken out of matching: (context, message).
    pub(crate) claimed: Vec<(u64, UnexpectedIdx)>,
    pub(crate) counters: EpCounters,
}

impl Vacant for Ep {
    fn vacant() -> Self {
        Self { claimed: Vec::new(), ..Self::new(0, &EpAttr::default()) }
    }
}

impl Ep {
    /// The slot that no endpoint uses: the value of an unused endpoint number.
    pub(super) const UNUSED_SLOT: EpIdx = EpIdx::of(0);

    /// A record that is not enabled.
    fn new(number: u16, attr: &EpAttr) -> Self {
        let caps = with_directions(attr.caps);
        let matcher = || {
            let mut matcher = Matcher::new();
            matcher.shut(true);
            matcher
        };
        Self {
            number,
            rx_ctx: 0,
            enabled: false,
            is_over: false,
            admits_all: false,
            may_send: [false; 2],
            may_recv: [false; 2],
            fast_send: [false; 2],
            rx_reserved: [0; 2],
            rx_reserved_idle: 0,
            ops_reserved: 0,
            rx_slow_flags: OpFlags::all(),
            sig_all: true,
            may_rma: [false; Form::ALL.len()],
            caps,
            tx_cq: CqIdx::NONE,
            rx_cq: CqIdx::NONE,
            tx_selective: false,
            rx_selective: false,
            av: AvIdx::NONE,
            route: Route::NONE,
            fetch: Fetch::NONE,
            tx_cntr: CntrIdx::NONE,
            rx_cntr: CntrIdx::NONE,
            rma_cntr: [CntrIdx::NONE; 4],
            tx_size: attr.tx_size.min(1 << 30) as u32,
            rx_size: attr.rx_size.min(1 << 30) as u32,
            tx_used: 0,
            rx_used: 0,
            tx_op_flags: attr.tx_op_flags,
            rx_op_flags: attr.rx_op_flags,
            min_multi_recv: 64,
            buffered: attr.buffered_recv,
            buffered_min: 0,
            buffered_limit: usize::MAX,
            cq_blocked: false,
            srx: EpIdx::NONE,
            sharers: None,
            deferred_for: EpIdx::NONE,
            has_deferred: false,
            matcher: [matcher(), matcher()],
            claimed: Vec::with_capacity(64),
            counters: EpCounters { number, ..EpCounters::default() },
        }
    }

    /// Enables or disables calls and messages of the endpoint, and recomputes the fast-path flags.
    pub(super) fn enable(&mut self, enabled: bool) {
        self.enabled = enabled;
        let posts = enabled && !self.is_over;
        let may =
            |caps| [Caps::MSG, Caps::TAGGED].map(|kind| posts && self.caps.contains(caps | kind));
        (self.may_send, self.may_recv) = (may(Caps::SEND), may(Caps::RECV));
        if self.srx != EpIdx::NONE || self.sharers.is_some() || self.deferred_for != EpIdx::NONE {
            self.may_recv = [false; 2];
        }
        self.may_rma = Form::ALL.map(|form| posts && self.caps.contains(form.caps()));
        let simple = self.rx_cntr == CntrIdx::NONE && !self.caps.contains(Caps::SOURCE_ERR);
        for (matcher, may) in self.matcher.iter_mut().zip(self.may_recv) {
            matcher.shut(!may || !simple || self.cq_blocked);
        }
        self.sig_all = !self.tx_selective;
        let signaled = self.sig_all && self.tx_cntr == CntrIdx::NONE;
        self.fast_send = self.may_send.map(|may| may && signaled);
        (self.route, self.fetch) = (Route::NONE, Fetch::NONE);
        let asked = if self.rx_selective { OpFlags::COMPLETION } else { OpFlags::empty() };
        self.rx_slow_flags = OpFlags::from_bits_retain(!RECV_FLAGS.bits()) | asked;
        self.stop_reserving(MsgKind::Msg);
        self.stop_reserving(MsgKind::Tagged);
    }

    /// Whether receives of `kind` are matched by their source as well.
    pub(super) fn is_directed(&self, kind: MsgKind) -> bool {
        let asked = self.caps & Caps::ANY_DIRECTED_RECV;
        match kind {
            MsgKind::Tagged => !asked.is_empty(),
            // FI_EXACT_DIRECTED_RECV modifies another capability; alone it is one itself.
            MsgKind::Msg => {
                asked.contains(Caps::DIRECTED_RECV) || asked == Caps::EXACT_DIRECTED_RECV
            }
        }
    }

    /// Whether receives of `kind` have to name their source.
    pub(super) fn is_exact(&self, kind: MsgKind) -> bool {
        self.caps.contains(Caps::EXACT_DIRECTED_RECV) && self.is_directed(kind)
    }

    /// Messages received so far: the matcher counts those of the fast path.
    pub(super) fn received(&self) -> u64 {
        let short: u64 = self.matcher.iter().map(Matcher::taken).sum();
        self.counters.received + short
    }

    /// Makes every post of a receive of `kind` check again: no reservation is used.
    pub(super) fn stop_reserving(&mut self, kind: MsgKind) {
        self.rx_reserved_idle += std::mem::take(&mut self.rx_reserved[kind as usize]);
    }

    /// Reserves room for receives of `kind`: at least for one, at most for an eighth of the free
    /// room. False, and nothing is reserved, if there is no room, if something waits for room, if
    /// the endpoint may not receive from any source, or if it has unexpected messages.
    #[cold]
    #[inline(never)]
    pub(super) fn reserve_receives(&mut self, cqs: &mut Cqs, kind: usize) -> bool {
        if !self.may_recv[kind] || self.cq_blocked || self.matcher[kind].unexpected_len() != 0 {
            return false;
        }
        if self.is_exact([MsgKind::Msg, MsgKind::Tagged][kind]) {
            return false;
        }
        let Some(table) = cqs.get_mut(self.rx_cq).filter(|table| !table.cq_blocked) else {
            return false;
        };
        let idle = std::mem::take(&mut self.rx_reserved_idle).into();
        table.cq.unreserve_many(idle);
        self.rx_used -= idle;
        let n = table.reserve_ahead(self.rx_size.saturating_sub(self.rx_used) as usize);
        self.rx_used += u32::from(n);
        self.rx_reserved[kind] += n;
        n > 0
    }

    /// [`reserve_receives`](Self::reserve_receives) for one-sided operations.
    #[cold]
    #[inline(never)]
    pub(super) fn reserve_ops(&mut self, cqs: &mut Cqs) -> bool {
        let Some(table) = cqs.get_mut(self.tx_cq).filter(|table| !table.cq_blocked) else {
            return false;
        };
        let n = table.reserve_ahead(self.tx_size.saturating_sub(self.tx_used) as usize);
        self.tx_used += u32::from(n);
        self.ops_reserved += n;
        n > 0
    }

    /// Releases all room reserved for receives.
    pub(super) fn release_receives(&mut self, cqs: &mut Cqs) {
        let n = self.rx_reserved_total();
        if n > 0 {
            (self.rx_reserved, self.rx_reserved_idle) = ([0; 2], 0);
            self.rx_used -= n;
            cqs[self.rx_cq].cq.unreserve_many(n);
        }
    }

    /// [`release_receives`](Self::release_receives) for one-sided operations.
    pub(super) fn release_ops(&mut self, cqs: &mut Cqs) {
        let n = u32::from(std::mem::take(&mut self.ops_reserved));
        if n > 0 {
            self.tx_used -= n;
            if !planted(Bug::OpsReservationLeaked) {
                cqs[self.tx_cq].cq.unreserve_many(n);
            }
        }
    }

    /// Whether any posted operation has not ended.
    pub(super) fn is_in_use(&self) -> bool {
        self.tx_used > self.ops_reserved.into() || self.rx_used > self.rx_reserved_total()
    }

    /// Receives that have reserved room and are not posted.
    pub(crate) fn rx_reserved_total(&self) -> u32 {
        self.rx_reserved.iter().chain([&self.rx_reserved_idle]).map(|&n| u32::from(n)).sum()
    }

    /// Records whether a message waits for room in a completion queue.
    pub(super) fn set_cq_blocked(&mut self, cq_blocked: bool) {
        self.cq_blocked = cq_blocked;
        self.enable(self.enabled);
    }

    /// Whether the endpoint takes messages that name receive context `rx_ctx`. A message that names
    /// no context goes to the endpoint that has the number.
    #[inline(always)]
    pub(crate) fn is_named(&self, rx_ctx: u8) -> bool {
        rx_ctx == 0 || rx_ctx == self.rx_ctx
    }

    pub(crate) fn matcher_of(&mut self, kind: MsgKind) -> &mut Matcher {
        &mut self.matcher[kind as usize]
    }
}

impl CqTable {
    /// Reserves completion entries in advance for an endpoint with `room` places left in its own
    /// queue. Returns their number: at least one, at most an eighth of the free entries; 0 if no
    /// entry is free.
    fn reserve_ahead(&mut self, room: usize) -> u16 {
        let room = room.min(self.cq.room());
        let n = (room / 8).clamp(1, RESERVE_MAX).min(room) as u16;
        self.cq.reserve_many(n.into());
        self.has_reserved = true;
        n
    }
}

impl Eps {
    /// Creates a record that no endpoint number leads to yet.
    pub(super) fn record(&mut self, attr: EpAttr, number: u16) -> Result<EpId> {
        let idx = self.alloc(Ep::new(number, &attr)).ok_or(Error::NoMem)?;
        Ok(EpId(self.handle(idx)))
    }

    /// Creates an endpoint, not yet enabled.
    ///
    /// # Errors
    /// - [`Error::AddrInUse`]: another endpoint of this domain has the number.
    /// - [`Error::Invalid`]: a queue size is 0.
    /// - [`Error::OpNotSupp`]: a capability that endpoints of this provider do not have.
    /// - [`Error::NoMem`]: there are 32,768 endpoints already.
    pub fn open(&mut self, attr: EpAttr) -> Result<EpId> {
        attr.check()?;
        let number = match attr.number {
            Some(n) if self.is_taken(n) => return Err(Error::AddrInUse),
            Some(n) => n,
            None => (0..SIDE).find(|&n| !self.is_taken(n)).ok_or(Error::NoMem)?,
        };
        self.add(attr, number)
    }

    /// Creates the record of an endpoint whose number is free.
    pub(super) fn add(&mut self, attr: EpAttr, number: u16) -> Result<EpId> {
        let ep = self.record(attr, number)?;
        self.numbers.set(number, ep.0.idx());
        Ok(ep)
    }

    /// Changes the number of an endpoint that is not enabled.
    ///
    /// # Errors
    /// - [`Error::OpBadState`]: it is enabled. [`Error::BadFd`]: it was closed.
    /// - [`Error::AddrInUse`]: another endpoint has the number.
    /// - [`Error::Invalid`]: it is a context, which has no number of its own.
    pub fn set_number(&mut self, ep: EpId, number: u16) -> Result<()> {
        let e = self.by_handle(ep.0).ok_or(Error::BadFd)?;
        let (enabled, old) = (e.enabled, e.number);
        if e.sharers.is_some() || self.is_reserved(old) {
            return Err(Error::Invalid("a context has no address of its own"));
        }
        if enabled {
            return Err(Error::OpBadState);
        }
        if number == old {
            return Ok(());
        }
        if self.is_taken(number) {
            return Err(Error::AddrInUse);
        }
        self.numbers.set(old, Ep::UNUSED_SLOT);
        self.numbers.set(number, ep.0.idx());
        let e = &mut self[ep.0.idx()];
        (e.number, e.counters.number) = (number, number);
        Ok(())
    }

    /// Whether the endpoint may send and receive.
    ///
    /// # Errors
    /// [`Error::OpBadState`]: it is not enabled. [`Error::BadFd`]: it was closed.
    pub fn check_enabled(&self, ep: EpId) -> Result<()> {
        let e = self.by_handle(ep.0).ok_or(Error::BadFd)?;
        if e.enabled { Ok(()) } else { Err(Error::OpBadState) }
    }

    /// Default flags of the transmit and receive calls that take no flags.
    pub fn op_flags(&self, ep: EpId) -> Result<(OpFlags, OpFlags)> {
        let e = self.by_handle(ep.0).ok_or(Error::BadFd)?;
        Ok((e.tx_op_flags, e.rx_op_flags))
    }

    /// Sets the flags that [`op_flags`](Self::op_flags) returns.
    pub fn set_op_flags(&mut self, ep: EpId, tx: OpFlags, rx: OpFlags) -> Result<()> {
        let e = self.by_handle_mut(ep.0).ok_or(Error::BadFd)?;
        (e.tx_op_flags, e.rx_op_flags) = (tx, rx);
        Ok(())
    }

    /// `FI_OPT_MIN_MULTI_RECV`: a multi-receive buffer is released when its free tail is shorter.
    pub fn set_min_multi_recv(&mut self, ep: EpId, bytes: usize) -> Result<()> {
        self.by_handle_mut(ep.0).ok_or(Error::BadFd)?.min_multi_recv = bytes as u64;
        Ok(())
    }

    /// See [`set_min_multi_recv`](Self::set_min_multi_recv). Default 64.
    pub fn min_multi_recv(&self, ep: EpId) -> Result<usize> {
        Ok(self.by_handle(ep.0).ok_or(Error::BadFd)?.min_multi_recv as usize)
    }

    /// `FI_OPT_BUFFERED_MIN` and `FI_OPT_BUFFERED_LIMIT`: bytes that a buffered-receive event
    /// shows at least, at most 256, and the message length above which it shows no more.
    ///
    /// # Errors
    /// [`Error::BadFd`]; [`Error::Invalid`] for a minimum above 256.
    pub fn set_buffered(&mut self, ep: EpId, min: usize, limit: usize) -> Result<()> {
        if min > crate::proto::blocks::UNIT {
            return Err(Error::Invalid("FI_OPT_BUFFERED_MIN is at most 256"));
        }
        let e = self.by_handle_mut(ep.0).ok_or(Error::BadFd)?;
        (e.buffered_min, e.buffered_limit) = (min, limit);
        Ok(())
    }
}

impl EpAttr {
    /// Checks whether the attributes describe an endpoint that can exist.
    pub(super) fn check(&self) -> Result<()> {
        if self.tx_size == 0 || self.rx_size == 0 {
            return Err(Error::Invalid("queue size must not be 0"));
        }
        Ok(())
    }

    /// [`check`](Self::check) of a context of a scalable endpoint. A context joins no multicast
    /// group.
    pub(super) fn check_context(&self) -> Result<()> {
        if self.caps.intersects(Caps::MULTICAST) {
            return Err(Error::OpNotSupp("FI_MULTICAST of a scalable endpoint"));
        }
        self.check()
    }
}

impl Node {
    /// Lets the endpoint send and receive.
    ///
    /// # Errors
    /// - [`Error::NoAv`], [`Error::NoCq`]: it has no address vector, or a direction it has the
    ///   capability for has no completion queue (a counter alone does not do: errors need a queue).
    /// - [`Error::Invalid`]: its shared context has another address vector to look sources up in.
    /// - [`Error::OpBadState`]: it is enabled.
    pub fn ep_enable(&mut self, ep: EpId) -> Result<()> {
        let e = self.eps.by_handle_mut(ep.0).ok_or(Error::BadFd)?;
        if e.enabled {
            return Err(Error::OpBadState);
        }
        if e.av == AvIdx::NONE {
            return Err(Error::NoAv);
        }
        if e.caps.intersects(Caps::SEND | Caps::READ | Caps::WRITE | Caps::COLLECTIVE)
            && e.tx_cq == CqIdx::NONE
            || e.caps.contains(Caps::RECV) && e.rx_cq == CqIdx::NONE
        {
            return Err(Error::NoCq);
        }
        self.eps.srx_take_av(ep.0.idx())?;
        self.coll_enable(ep)?;
        self.eps[ep.0.idx()].enable(true);
        Ok(())
    }

    /// The address by which peers reach the endpoint.
    ///
    /// # Errors
    /// [`Error::BadFd`].
    pub fn addr_of(&self, ep: EpId) -> Result<EpAddr> {
        let ep = self.eps.by_handle(ep.0).ok_or(Error::BadFd)?.number;
        Ok(EpAddr { station: self.port.station, ep, incarnation: self.settings.incarnation })
    }

    /// Closes the endpoint. Every operation of it that is not complete gets an error entry with
    /// [`Error::Canceled`] before this returns, and none of its memory is touched afterwards.
    ///
    /// # Errors
    /// [`Error::BadFd`]: it was closed before. [`Error::Busy`]: it is a shared context in use.
    pub fn ep_close(&mut self, now: Instant, ep: EpId) -> Result<()> {
        let idx = self.eps.by_handle(ep.0).map(|_| ep.0.idx()).ok_or(Error::BadFd)?;
        if self.eps[idx].sharers.is_some() {
            return self.receiving().srx_close(now, idx);
        }
        self.eps[idx].enable(false);
        self.eps[idx].release_receives(&mut self.cqs);
        self.eps[idx].release_ops(&mut self.cqs);
        self.target.revoke_grants();
        self.collectives().coll_ep_closed(now, idx);
        self.groups.forget_ep(idx);
        self.sessions().close_sends(now, idx);
        self.receiving().close_receives(now, idx);
        self.responder().stop_counting_reads(idx);
        self.objects().drop_late(idx);
        self.eps.srx_leave(idx);
        self.receiving().close_deferred_eps(now, idx);
        self.observed.losses.forget_ep(idx);
        let e = self.eps.free(idx);
        // A transmit context's number belongs to its scalable endpoint.
        if self.eps.slot(e.number) == idx {
            self.eps.numbers.set(e.number, Ep::UNUSED_SLOT);
        }
        self.objects().unbind(&e);
        Ok(())
    }
}

impl Receiving<'_> {
    /// Ends the receives of endpoint `idx` and discards its unexpected messages.
    pub(super) fn close_receives(&mut self, now: Instant, idx: EpIdx) {
        let pulls: Vec<PullIdx> = (self.sessions.pulls.records.iter())
            .filter(|(_, pull)| {
                pull.recv != RecvIdx::NONE && self.sessions.posted[pull.recv].payload.ep == idx
            })
            .map(|(i, _)| i)
            .collect();
        for pull in pulls {
            let recv = std::mem::replace(&mut self.sessions.pulls[pull].recv, RecvIdx::NONE);
            self.sessions.operations().pull_engine().end_pull(pull, EndStatus::Closed);
            self.sessions.objects().cancel_placing(recv);
        }
        let peers: Vec<PeerIdx> = self.sessions.peers.iter().map(|(i, _)| i).collect();
        for p in peers {
            if let Some(recv) = self.sessions.reassemblies.placing(&self.sessions.peers[p])
                && self.sessions.posted[recv].payload.ep == idx
            {
                self.sessions.reassemblies.take(&mut self.sessions.peers[p]);
                self.sessions.objects().cancel_placing(recv);
            }
        }
        let unexpected: Vec<UnexpectedIdx> = (self.sessions.unexpected.iter())
            .filter(|(_, m)| m.payload.ep == idx)
            .map(|(i, _)| i)
            .collect();
        for msg in unexpected {
            // Discarding may have ended the session of a peer with too many pulls, and freed this
            // message with it.
            if self.sessions.unexpected.get(msg).is_some() {
                self.discard_unexpected(now, msg, EndStatus::Closed);
            }
        }
        for kind in [MsgKind::Msg, MsgKind::Tagged] {
            while let Some(recv) = self.sessions.eps[idx].matcher[kind as usize]
                .first_posted(&self.sessions.posted.pool)
            {
                self.sessions.eps[idx].matcher[kind as usize]
                    .unlink_posted(&mut self.sessions.posted.pool, recv);
                self.sessions.objects().fail_recv(recv, Error::Canceled);
            }
        }
        self.sessions.eps[idx].claimed.clear();
    }
}

impl Sessions<'_> {
    /// Ends the sends of endpoint `idx`. A packet in flight keeps its PSN as a NOP, so that the
    /// session continues.
    pub(super) fn close_sends(&mut self, now: Instant, idx: EpIdx) {
        let wrs: Vec<TxIdx> =
            self.tx.wrs.iter().filter(|(_, wr)| wr.ep == idx).map(|(i, _)| i).collect();
        for w in wrs {
            let p = self.tx[w].peer;
            self.operations().abandon_wr(w);
            self.operations().cancel_wr(w);
            self.control().arm_timer(now, p);
        }
        self.operations().cancel_fast_ops(idx);
    }
}

impl Operations<'_> {
    /// Binds a counter for sends (`TRANSMIT`), receives (`RECV`), and the one-sided operations that
    /// this endpoint issues (`READ`, `WRITE`; fetching atomics are reads) or is the target of
    /// (`REMOTE_READ`, `REMOTE_WRITE`; these count only with `FI_RMA_EVENT`). The endpoint may be
    /// enabled already: operations that end from then on are counted.
    ///
    /// # Errors
    /// As [`ep_bind_cq`](Objects::ep_bind_cq).
    pub fn ep_bind_cntr(&mut self, ep: EpId, cntr: CntrId, flags: BindFlags) -> Result<()> {
        if flags.is_empty() || flags.contains(BindFlags::SELECTIVE_COMPLETION) {
            return Err(Error::BadFlags);
        }
        let table = self.objects.cntrs.by_handle_mut(cntr.0).ok_or(Error::BadFd)?;
        let e = self.objects.eps.by_handle_mut(ep.0).ok_or(Error::BadFd)?;
        let (tx, rx) = (flags.contains(BindFlags::TRANSMIT), flags.contains(BindFlags::RECV));
        let one_sided = [
            (BindFlags::READ, READ),
            (BindFlags::WRITE, WRITE),
            (BindFlags::REMOTE_READ, REMOTE_READ),
            (BindFlags::REMOTE_WRITE, REMOTE_WRITE),
        ];
        let wanted =
            one_sided.into_iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, at)| at);
        let mut taken = wanted.clone().map(|at| e.rma_cntr[at]);
        if tx && e.tx_cntr != CntrIdx::NONE
            || rx && e.rx_cntr != CntrIdx::NONE
            || taken.any(|c| c != CntrIdx::NONE)
        {
            return Err(Error::Invalid("a counter is bound for this direction"));
        }
        if tx {
            e.tx_cntr = cntr.0.idx();
            table.bound += 1;
        }
        if rx {
            e.rx_cntr = cntr.0.idx();
            table.bound += 1;
        }
        for which in wanted {
            e.rma_cntr[which] = cntr.0.idx();
            table.bound += 1;
        }
        if e.enabled {
            // A counter disables parts of the fast path.
            e.enable(true);
            self.count_fast_ops(ep.0.idx());
        }
        Ok(())
    }

    /// Number of operations of the endpoint that have completed for the application but may still
    /// be retransmitted: injected operations, and operations that completed when their source could
    /// be reused.
    ///
    /// # Errors
    /// [`Error::BadFd`].
    pub fn ep_owes(&self, ep: EpId) -> Result<usize> {
        self.objects.eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        let done = WrFlags::INJECTED | WrFlags::REPORTED;
        let owed =
            self.tx.wrs.iter().filter(|(_, wr)| wr.ep == ep.0.idx() && wr.flags.intersects(done));
        Ok(owed.count())
    }
}

impl Objects<'_> {
    /// Marks queue `cq` as one that something waits for room in: until it has been served, no
    /// endpoint reserves entries in advance.
    #[cold]
    pub(super) fn mark_starved(&mut self, cq: CqIdx) {
        self.due.todo |= Todo::ROOM;
        let table = &mut self.cqs[cq];
        table.cq_blocked = true;
        if std::mem::take(&mut table.has_reserved) {
            self.eps.release_reserved(self.cqs, cq);
        }
    }

    /// Binds a completion queue for the directions in `flags` (`TRANSMIT`, `RECV`), optionally with
    /// `SELECTIVE_COMPLETION`.
    ///
    /// # Errors
    /// - [`Error::BadFd`]: one of them was closed.
    /// - [`Error::BadFlags`]: no direction, or another flag.
    /// - [`Error::Invalid`]: a queue is bound for the direction already.
    pub fn ep_bind_cq(&mut self, ep: EpId, cq: CqId, flags: BindFlags) -> Result<()> {
        let directions = BindFlags::TRANSMIT | BindFlags::RECV;
        if !flags.intersects(directions)
            || !(directions | BindFlags::SELECTIVE_COMPLETION).contains(flags)
        {
            return Err(Error::BadFlags);
        }
        let table = self.cqs.by_handle_mut(cq.0).ok_or(Error::BadFd)?;
        let e = self.eps.by_handle_mut(ep.0).ok_or(Error::BadFd)?;
        let (tx, rx) = (flags.contains(BindFlags::TRANSMIT), flags.contains(BindFlags::RECV));
        if tx && e.tx_cq != CqIdx::NONE || rx && e.rx_cq != CqIdx::NONE {
            return Err(Error::Invalid("a completion queue is bound for this direction"));
        }
        let selective = flags.contains(BindFlags::SELECTIVE_COMPLETION);
        let mut ops = [0; 2];
        if tx {
            (e.tx_cq, e.tx_selective) = (cq.0.idx(), selective);
            ops[0] = e.tx_size;
        }
        if rx {
            (e.rx_cq, e.rx_selective) = (cq.0.idx(), selective);
            ops[1] = e.rx_size;
        }
        table.bind(ops, self.settings);
        if e.enabled {
            e.enable(true);
        }
        Ok(())
    }

    /// Binds the address vector.
    ///
    /// # Errors
    /// - [`Error::BadFd`]: one of them was closed. [`Error::OpBadState`]: the endpoint is enabled.
    /// - [`Error::Invalid`]: a vector is bound already.
    pub fn ep_bind_av(&mut self, ep: EpId, av: AvId) -> Result<()> {
        let table = self.avs.by_handle_mut(av.0).ok_or(Error::BadFd)?;
        let e = self.eps.by_handle_mut(ep.0).ok_or(Error::BadFd)?;
        if e.enabled {
            return Err(Error::OpBadState);
        }
        if e.av != AvIdx::NONE {
            return Err(Error::Invalid("an address vector is bound"));
        }
        e.av = av.0.idx();
        table.bound += 1;
        Ok(())
    }

    /// Ends the connection of an endpoint: receives that no message has begun to fill end with
    /// [`Error::Canceled`], and nothing can be sent any more. Messages that have arrived without a
    /// receive can still be received. No effect on a closed endpoint.
    pub fn ep_disconnect(&mut self, ep: EpId) {
        let Some(record) = self.eps.by_handle_mut(ep.0) else { return };
        let e = ep.0.idx();
        record.is_over = true;
        let enabled = record.enabled;
        record.enable(enabled);
        self.eps[e].release_receives(self.cqs);
        self.eps[e].release_ops(self.cqs);
        self.end_receives_if_over(e);
    }

    /// Ends the receives of endpoint `e` if its connection is over and every message that has
    /// arrived is in its receive: no other message will arrive.
    pub(super) fn end_receives_if_over(&mut self, e: EpIdx) {
        if !self.eps[e].is_over || self.eps[e].cq_blocked {
            return;
        }
        for kind in [MsgKind::Msg, MsgKind::Tagged] {
            while let Some(recv) =
                self.eps[e].matcher[kind as usize].first_posted(&self.posted.pool)
            {
                self.end_unfilled(e, kind, recv);
            }
        }
    }

    /// Unbinds the objects of a freed record.
    pub(super) fn unbind(&mut self, e: &Ep) {
        self.counters.msgs_sent += e.counters.sent;
        self.counters.msgs_received += e.received();
        for (cq, ops) in [(e.tx_cq, [e.tx_size, 0]), (e.rx_cq, [0, e.rx_size])] {
            if let Some(table) = self.cqs.get_mut(cq) {
                table.unbind(ops);
            }
        }
        let cntrs = [e.tx_cntr, e.rx_cntr].into_iter().chain(e.rma_cntr);
        for cntr in cntrs.filter(|&c| c != CntrIdx::NONE) {
            self.cntrs[cntr].bound -= 1;
        }
        if e.av != AvIdx::NONE {
            self.avs[e.av].bound -= 1;
        }
    }

    /// Ends the receive of a message whose rest will not arrive. A multi-receive that is still in
    /// matching, or that takes another message, continues.
    pub(super) fn cancel_placing(&mut self, recv: RecvIdx) {
        let wr = &mut self.posted[recv].payload;
        wr.active -= 1;
        let (e, multi) = (wr.ep, wr.is(RecvFlags::MULTI));
        let last = wr.active == 0 && (!multi || wr.is(RecvFlags::CLOSED));
        if multi {
            // Each message placed into a multi-receive has a completion entry of its own reserved.
            let cq = self.eps[e].rx_cq;
            self.cqs[cq].cq.unreserve();
        }
        if last {
            self.fail_recv(recv, Error::Canceled);
        }
    }
}

/// Completes a set of capabilities: `FI_MSG` or `FI_TAGGED` alone stand for both directions,
/// `FI_RMA` or `FI_ATOMIC` for all four.
pub(super) fn with_directions(mut caps: Caps) -> Caps {
    let groups = [
        (Caps::MSG | Caps::TAGGED, Caps::SEND | Caps::RECV),
        (
            Caps::RMA | Caps::ATOMIC,
            Caps::READ | Caps::WRITE | Caps::REMOTE_READ | Caps::REMOTE_WRITE,
        ),
    ];
    for (kinds, directions) in groups {
        if caps.intersects(kinds) && !caps.intersects(directions) {
            caps |= directions;
        }
    }
    caps
}
