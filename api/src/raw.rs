//! The raw API: data calls that take addresses, for the C provider.
//!
//! It differs from the safe API in its memory and in failed injects. Contexts are returned
//! unchanged, so a queue belongs to one API: endpoints of the other cannot be bound to it. Calls
//! without a context (`fi_inject` and the like) write no entry when they fail, unlike those of the
//! safe API: a C program would take its context for one of its own. A bound counter counts such a
//! failure as an error, and the log names the peer.
//!
//! # The promise of the unsafe calls
//! From the call until the operation has ended (its entry was read, its counter has counted it, or
//! the call was refused; for an inject call until it returns), every piece of memory that the call
//! names is mapped, readable for a send and writable for a receive, and during a receive nothing
//! else reads or writes it. For a multi-receive buffer this holds until the entry with
//! `FI_MULTI_RECV`. A piece of length 0 may have any address. The list itself is only read during
//! the call.

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ops::{Deref, Range};
use std::os::fd::RawFd;
use std::ptr;
use std::sync::Arc;

use barewire_dataplane::node::{
    AtomicReq, CollAttr, CollCall, CollReq, CollWord, FastAtomic, FastCall, FastRead, FastWrite,
    ReadReq, RecvReq, RmaIov, SendReq, WriteReq,
};
pub use barewire_dataplane::node::{CollKind, MsgKind};
use barewire_dataplane::proto::atomic::AtomicKind;
pub use barewire_dataplane::types::{CqErr, Cqe};
use barewire_dataplane::types::{FiAddr, NO_ENTRY};
use barewire_driver::mem::{IOV_LIMIT, IoBuf, Span};

use crate::atomic::{TypedOp, elements};
use crate::cq::{CqAttr, CqInner, prov_strerror};
use crate::deferred::Op;
use crate::domain::Domain;
use crate::ep::EpCommon;
use crate::errno::{Error, Result};
use crate::flags::{BindFlags, OpFlags};
use crate::info::{Info, RxAttr, TxAttr};
use crate::inner::{DomainRef, Shared};
use crate::lock::Entry;
use crate::mr::{MrAttr, RawMr};
use crate::rma::{Remote, list};

/// A piece of memory (`struct iovec`).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct IoVec {
    /// Address.
    pub base: *mut u8,
    /// Bytes.
    pub len: usize,
}

impl IoVec {
    /// No memory.
    pub const EMPTY: Self = Self { base: ptr::null_mut(), len: 0 };
}

/// The arguments of a send.
#[derive(Clone, Copy, Debug)]
pub struct RawSend<'a> {
    /// Untagged or tagged.
    pub kind: MsgKind,
    /// Gather list.
    pub iov: &'a [IoVec],
    /// Destination.
    pub dest: FiAddr,
    /// Tag; 0 for an untagged message.
    pub tag: u64,
    /// Remote CQ data.
    pub data: u64,
    /// Comes back in the completion.
    pub context: u64,
}

/// The arguments of a receive.
#[derive(Clone, Copy, Debug)]
pub struct RawRecv<'a> {
    /// Untagged or tagged.
    pub kind: MsgKind,
    /// Scatter list.
    pub iov: &'a [IoVec],
    /// Source.
    pub src: FiAddr,
    /// Tag; 0 for an untagged message.
    pub tag: u64,
    /// Bits of the tag that are ignored.
    pub ignore: u64,
    /// Comes back in the completion.
    pub context: u64,
}

/// A send of memory in one piece.
struct OneSend {
    kind: MsgKind,
    one: IoVec,
    dest: FiAddr,
    tag: u64,
    data: u64,
    context: u64,
    flags: OpFlags,
    no_completion: bool,
}

/// An endpoint of the raw API.
pub struct RawEndpoint(EpCommon);

impl Deref for RawEndpoint {
    type Target = EpCommon;

    fn deref(&self) -> &EpCommon {
        &self.0
    }
}

impl RawEndpoint {
    pub(crate) fn open(dom: &DomainRef, info: &Info) -> Result<Self> {
        EpCommon::open(dom, info).map(Self)
    }

    pub(crate) fn of_common(ep: EpCommon) -> Self {
        Self(ep)
    }

    /// As [`crate::Endpoint::bind_cq`], for a queue of this API.
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "fi_ep_bind")]
    pub fn bind_cq(&self, cq: &RawCq, flags: BindFlags) -> Result<()> {
        self.0.bind_cq_inner(&cq.0, flags)
    }

    pub(crate) fn open_srx(dom: &DomainRef, attr: &RxAttr) -> Result<Self> {
        EpCommon::open_srx(dom, attr).map(Self)
    }

    /// Takes the endpoint's receives from `srx`, a shared receive context of
    /// [`crate::Domain::raw_srx_context`]. The endpoint's own receive calls are refused from now
    /// on.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: `srx` is of another domain or no shared receive context, or one is
    ///   already bound.
    /// - [`Error::OpBadState`]: the endpoint is enabled.
    /// - [`Error::OpNotSupp`]: the endpoint buffers receives.
    ///
    /// Source: fi_endpoint(3), "SHARED CONTEXTS".
    #[doc(alias = "fi_ep_bind")]
    pub fn bind_srx(&self, srx: &Arc<Self>) -> Result<()> {
        self.0.bind_srx_inner(srx, Arc::clone(srx) as _)
    }

    /// An alias of the endpoint (`fi_ep_alias`) with other default flags for sends, or with `recv`
    /// for receives. The endpoint stays open until its last alias is dropped.
    ///
    /// # Errors
    /// [`Error::BadFlags`]: a flag is neither allowed as a default flag of that direction nor
    /// `FI_TRIGGER`.
    #[doc(alias = "fi_ep_alias")]
    pub fn alias(self: &Arc<Self>, flags: OpFlags, recv: bool) -> Result<Self> {
        let alias = Self(EpCommon::alias(self, Arc::clone(self) as _));
        alias.0.set_alias_flags(flags, recv)?;
        Ok(alias)
    }

    /// Ends the connection, if there is one, and turns the loop until the peer has the message, at
    /// most for T_dead.
    pub fn end_connection(&self) {
        if self.connected.is_some() {
            // It may never have been connected.
            let _ = self.shutdown();
            crate::cm::connected::linger(&self.dom);
        }
    }

    /// Turns the loop until all injected messages are acknowledged or their peers are dead. For a
    /// program that closes the endpoint right after its last inject and counts on it to arrive,
    /// while the receiver still computes.
    pub fn linger(&self) {
        // The death of a peer ends its outstanding operations.
        loop {
            let Ok(mut core) = self.dom.enter_control() else { return };
            if core.engine.gone().is_some()
                || !matches!(core.node().operations().ep_owes(self.id), Ok(1..))
            {
                return;
            }
            core.turn_if_manual(&self.dom);
            drop(core);
            std::thread::yield_now();
        }
    }

    /// As [`crate::Endpoint::cancel`]; also an operation with `FI_TRIGGER` whose condition has not
    /// been met.
    ///
    /// # Errors
    /// As there. [`Error::Again`]: the queue has no room for the entry. The operation was not
    /// cancelled.
    #[doc(alias = "fi_cancel")]
    pub fn cancel(&self, context: u64) -> Result<()> {
        let mut core = self.dom.enter_control()?;
        match core.node().operations().cancel(self.id, context) {
            Err(Error::NoData) => core.cancel_triggered(self.id, context),
            other => other,
        }?;
        core.posted(&self.dom);
        Ok(())
    }

    /// `fi_send` and `fi_tsend`, `fi_sendv` and `fi_tsendv` with the endpoint's flags; with
    /// `more_flags` [`OpFlags::REMOTE_CQ_DATA`], `fi_senddata` and `fi_tsenddata`.
    ///
    /// # Errors
    /// Those of [`crate::msg`].
    ///
    /// # Safety
    /// The [promise](self) of the module.
    #[inline(always)]
    pub unsafe fn send(&self, send: RawSend<'_>, more_flags: OpFlags) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.sendmsg(send, self.tx_op_flags() | more_flags) }
    }

    /// Fast path of [`send`](Self::send) without flags: for a send that needs no further check, in
    /// a domain that can be entered at once. False, and nothing has happened, if
    /// [`send`](Self::send) has to be called.
    ///
    /// # Safety
    /// The [promise](self) of the module.
    #[inline(always)]
    pub unsafe fn try_send_fast(&self, send: RawSend<'_>) -> bool {
        let RawSend { kind, iov, dest, tag, data, context } = send;
        let (dest, flags, no_completion) = (self.to(dest), self.tx_op_flags(), false);
        let [one] = *iov else { return false };
        // SAFETY: the caller's promise is that of `from_raw`.
        let buf = IoBuf::one(unsafe { Span::from_raw(one.base, one.len) });
        let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
        self.try_send_now(&req)
    }

    /// Sends at once, if no earlier send to the peer is queued and the lock can be entered at once.
    #[inline(always)]
    fn try_send_now(&self, req: &SendReq) -> bool {
        // Looked up once for all that follows.
        let (shared, id): (&Shared, _) = (&self.dom, self.id);
        let Some(mut core) = shared.lock.enter_open() else { return false };
        let sent = core.engine.try_send_cached(id, req);
        if sent {
            core.posted(shared);
        }
        core.leave();
        sent
    }

    /// `fi_sendmsg` and `fi_tsendmsg`: `flags` in place of the endpoint's.
    ///
    /// # Errors
    /// Those of [`crate::msg`].
    ///
    /// # Safety
    /// The [promise](self) of the module.
    #[inline(always)]
    pub unsafe fn sendmsg(&self, send: RawSend<'_>, flags: OpFlags) -> Result<()> {
        let RawSend { kind, iov, dest, tag, data, context } = send;
        let (dest, no_completion) = (self.to(dest), false);
        let [one] = *iov else {
            let send = RawSend { kind, iov, dest, tag, data, context };
            // SAFETY: the caller's promise is the same.
            return unsafe { self.sendmsg_long(send, flags) };
        };
        // SAFETY: the caller's promise is the same.
        unsafe {
            self.send_one(OneSend { kind, one, dest, tag, data, context, flags, no_completion })
        }
    }

    /// Sends memory in one piece, to a destination that is [`EpCommon::to`]'s.
    ///
    /// # Safety
    /// The [promise](self) of the module.
    #[inline(always)]
    unsafe fn send_one(&self, send: OneSend) -> Result<()> {
        // Destructured and rebuilt for the call, so that the fields of the fast path stay in
        // registers.
        let OneSend { kind, one, dest, tag, data, context, flags, no_completion } = send;
        // SAFETY: the caller's promise is that of `from_raw`.
        let buf = IoBuf::one(unsafe { Span::from_raw(one.base, one.len) });
        let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
        if self.try_send_now(&req) {
            return Ok(());
        }
        // Passed in parts, so that nothing is spilled for a rare call. SAFETY: the caller's promise
        // is the same.
        unsafe { self.send_one_long((kind, no_completion), one, dest, tag, (data, context), flags) }
    }

    /// The general form of [`send_one`](Self::send_one), on any port and with all checks.
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    unsafe fn send_one_long(
        &self,
        (kind, no_completion): (MsgKind, bool),
        one: IoVec,
        dest: FiAddr,
        tag: u64,
        (data, context): (u64, u64),
        flags: OpFlags,
    ) -> Result<()> {
        // Built in place, so that it is never copied.
        let req = || {
            // SAFETY: the caller's promise is that of `from_raw`.
            let buf = IoBuf::one(unsafe { Span::from_raw(one.base, one.len) });
            SendReq { kind, buf, dest, tag, data, context, flags, no_completion }
        };
        if self.dom.caps.lossless || self.dom.caps.near_mtu > 0 {
            let mut core = self.dom.enter()?;
            if core.engine.try_send_inline(self.id, &req()) {
                core.posted(&self.dom);
                core.leave();
                return Ok(());
            }
        }
        self.post_send(req())
    }

    /// The rest of [`sendmsg`](Self::sendmsg), to a destination that is [`EpCommon::to`]'s.
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    unsafe fn sendmsg_long(&self, send: RawSend<'_>, flags: OpFlags) -> Result<()> {
        // SAFETY: the caller's promise is the same; the destination comes out as it goes in.
        self.post_send(unsafe { self.send_req(send, flags)? })
    }

    /// A send as the node takes it.
    ///
    /// # Safety
    /// The [promise](self) of the module.
    pub(crate) unsafe fn send_req(&self, send: RawSend<'_>, flags: OpFlags) -> Result<SendReq> {
        let RawSend { kind, iov, dest, tag, data, context } = send;
        // SAFETY: the caller's promise is the same.
        let (buf, dest, no_completion) = (unsafe { io(iov)? }, self.to(dest), false);
        if buf.len() as u64 > self.max_msg_size {
            return Err(Error::MsgTooLong);
        }
        Ok(SendReq { kind, buf, dest, tag, data, context, flags, no_completion })
    }

    #[inline]
    fn post_send(&self, req: SendReq) -> Result<()> {
        if req.flags.contains(OpFlags::TRIGGER) {
            let flags = req.flags - OpFlags::TRIGGER;
            return self.trigger(req.context, Op::Send(SendReq { flags, ..req }));
        }
        let mut core = self.dom.enter()?;
        let posted = if req.buf.len() as u64 > self.max_msg_size {
            Err(Error::MsgTooLong)
        } else {
            core.engine.post_send(self.id, req)
        };
        core.posted(&self.dom);
        core.leave();
        posted
    }

    /// `fi_inject` and `fi_tinject`, and with `data` `fi_injectdata` and `fi_tinjectdata`.
    ///
    /// # Errors
    /// Those of [`crate::msg`].
    ///
    /// # Safety
    /// `len` bytes at `base` are readable until the call returns.
    #[inline]
    pub unsafe fn inject(
        &self,
        kind: MsgKind,
        (base, len): (*const u8, usize),
        dest: FiAddr,
        tag: u64,
        data: Option<u64>,
    ) -> Result<()> {
        let mut flags = OpFlags::INJECT;
        flags.set(OpFlags::REMOTE_CQ_DATA, data.is_some());
        let one = IoVec { base: base.cast_mut(), len };
        let (data, dest, context) = (data.unwrap_or(0), self.to(dest), NO_ENTRY);
        let no_completion = true;
        // SAFETY: readable during the call, which is as long as an inject keeps it; it only reads.
        unsafe {
            self.send_one(OneSend { kind, one, dest, tag, data, context, flags, no_completion })
        }
    }

    /// `fi_recv` and `fi_trecv`, `fi_recvv` and `fi_trecvv` with the endpoint's flags.
    ///
    /// # Errors
    /// Those of [`crate::msg`].
    ///
    /// # Safety
    /// The [promise](self) of the module.
    #[inline(always)]
    pub unsafe fn recv(&self, recv: RawRecv<'_>) -> Result<()> {
        let flags = match recv.kind {
            MsgKind::Msg => self.rx_op_flags(),
            MsgKind::Tagged => self.tagged_op_flags(),
        };
        // SAFETY: the caller's promise is the same.
        unsafe { self.recvmsg(recv, flags) }
    }

    /// Fast path of [`recv`](Self::recv), in a domain that can be entered at once. False, and
    /// nothing has happened, if [`recv`](Self::recv) has to be called.
    ///
    /// # Safety
    /// The [promise](self) of the module.
    #[inline(always)]
    pub unsafe fn try_recv_fast(&self, recv: RawRecv<'_>) -> bool {
        let RawRecv { kind, iov, src, tag, ignore, context } = recv;
        let [one] = *iov else { return false };
        self.try_recv_now(|| {
            let (src, flags) = (self.from(src), self.rx_op_flags());
            // SAFETY: the caller's promise is that of `from_raw`.
            let buf = IoBuf::one(unsafe { Span::from_raw(one.base, one.len) });
            RecvReq { kind, buf, src, tag, ignore, context, flags }
        })
    }

    /// Posts the receive that `req` makes, if the lock can be entered at once and nothing else has
    /// to be done.
    #[inline(always)]
    fn try_recv_now(&self, req: impl FnOnce() -> RecvReq) -> bool {
        let Some(mut core) = self.dom.lock.enter_open() else { return false };
        // A posted receive completes nothing and sets no deadline, so no watcher is notified.
        let posted = core.engine.try_post_recv_reserved(self.id, &req());
        core.leave();
        posted
    }

    /// `fi_recvmsg` and `fi_trecvmsg`: `flags` in place of the endpoint's.
    ///
    /// # Errors
    /// Those of [`crate::msg`].
    ///
    /// # Safety
    /// The [promise](self) of the module.
    #[inline(always)]
    pub unsafe fn recvmsg(&self, recv: RawRecv<'_>, flags: OpFlags) -> Result<()> {
        let RawRecv { kind, iov, src, tag, ignore, context } = recv;
        let src = self.from(src);
        let [one] = *iov else {
            // SAFETY: the caller's promise is the same.
            return unsafe {
                self.recvmsg_long(RawRecv { kind, iov, src, tag, ignore, context }, flags)
            };
        };
        // SAFETY: the caller's promise is that of `from_raw`.
        let buf = IoBuf::one(unsafe { Span::from_raw(one.base, one.len) });
        let req = || RecvReq { kind, buf, src, tag, ignore, context, flags };
        if self.try_recv_now(req) {
            return Ok(());
        }
        // As in `send_one`.
        // SAFETY: the caller's promise is the same.
        unsafe { self.recv_one_long(kind, one, src, tag, (ignore, context), flags) }
    }

    /// The rest of [`recvmsg`](Self::recvmsg), of memory in one piece and from a source that is
    /// [`EpCommon::from`]'s.
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    unsafe fn recv_one_long(
        &self,
        kind: MsgKind,
        one: IoVec,
        src: FiAddr,
        tag: u64,
        (ignore, context): (u64, u64),
        flags: OpFlags,
    ) -> Result<()> {
        // SAFETY: the caller's promise is that of `from_raw`.
        let buf = IoBuf::one(unsafe { Span::from_raw(one.base, one.len) });
        let req = RecvReq { kind, buf, src, tag, ignore, context, flags };
        let mut core = self.dom.enter()?;
        if core.engine.try_post_recv(self.id, &req) {
            core.posted(&self.dom);
            core.leave();
            return Ok(());
        }
        drop(core);
        let iov = [one];
        let recv = RawRecv { kind, iov: &iov, src, tag, ignore, context };
        // SAFETY: the caller's promise is the same.
        unsafe { self.recvmsg_long(recv, flags) }
    }

    /// The rest of [`recvmsg`](Self::recvmsg), from a source that is [`EpCommon::from`]'s.
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    unsafe fn recvmsg_long(&self, recv: RawRecv<'_>, flags: OpFlags) -> Result<()> {
        // SAFETY: the caller's promise is the same; the source comes out as it goes in.
        let req = unsafe { self.recv_req(recv, flags)? };
        if flags.contains(OpFlags::TRIGGER) {
            let flags = flags - OpFlags::TRIGGER;
            return self.trigger(req.context, Op::Recv(RecvReq { flags, ..req }));
        }
        let mut core = self.dom.enter()?;
        if flags.contains(OpFlags::PEEK) {
            // A program that peeks in a loop makes progress.
            core.turn_if_manual(&self.dom);
        }
        let posted = core.engine.post_recv(self.id, req);
        core.posted(&self.dom);
        core.leave();
        posted
    }

    /// A receive as the node takes it.
    ///
    /// # Safety
    /// The [promise](self) of the module.
    pub(crate) unsafe fn recv_req(&self, recv: RawRecv<'_>, flags: OpFlags) -> Result<RecvReq> {
        let RawRecv { kind, iov, src, tag, ignore, context } = recv;
        // SAFETY: the caller's promise is the same.
        let (buf, src) = (unsafe { io(iov)? }, self.from(src));
        Ok(RecvReq { kind, buf, src, tag, ignore, context, flags })
    }
}

/// The arguments of an RMA operation of the raw API.
#[derive(Clone, Copy, Debug)]
pub struct RawRma<'a> {
    /// Local memory.
    pub iov: &'a [IoVec],
    /// The peer whose memory is accessed.
    pub dest: FiAddr,
    /// Ranges of remote memory.
    pub rma_iov: &'a [RmaIov],
    /// Remote CQ data of a write.
    pub data: u64,
    /// Comes back in the completion.
    pub context: u64,
}

impl RawEndpoint {
    /// `fi_write` and `fi_writev`; with `more_flags` [`OpFlags::REMOTE_CQ_DATA`] `fi_writedata`.
    ///
    /// # Errors
    /// Those of [`crate::rma`].
    ///
    /// # Safety
    /// The [promise](self) of the file; a write reads the memory.
    pub unsafe fn write(&self, write: RawRma<'_>, more_flags: OpFlags) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.writemsg(write, self.rma_op_flags() | more_flags) }
    }

    /// `fi_writemsg`: `flags` in place of the endpoint's.
    ///
    /// # Errors
    /// Those of [`crate::rma`].
    ///
    /// # Safety
    /// As [`write`](Self::write).
    pub unsafe fn writemsg(&self, write: RawRma<'_>, flags: OpFlags) -> Result<()> {
        let RawRma { iov, dest, rma_iov, context, .. } = write;
        if let (&[one], &[range]) = (iov, rma_iov) {
            let call = self.fast_call(dest, range, context, flags);
            // SAFETY: the caller's promise is that of `from_raw`.
            let buf = IoBuf::one(unsafe { Span::from_raw(one.base, one.len) });
            let mut core = self.dom.enter()?;
            if core.engine.try_write(self.id, &mut FastWrite { buf: &buf, call }) {
                core.posted(&self.dom);
                core.leave();
                return Ok(());
            }
        }
        // SAFETY: the caller's promise is the same.
        unsafe { self.writemsg_long(write, flags) }
    }

    /// The rest of [`writemsg`](Self::writemsg).
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    unsafe fn writemsg_long(&self, write: RawRma<'_>, flags: OpFlags) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        let req = unsafe { self.write_req(write, flags - OpFlags::TRIGGER)? };
        if flags.contains(OpFlags::TRIGGER) {
            return self.trigger(req.context, Op::Write(req));
        }
        let mut core = self.dom.enter()?;
        let posted = core.engine.post_write(self.id, req);
        core.posted(&self.dom);
        posted
    }

    /// `fi_inject_write` and, with `data`, `fi_inject_writedata`.
    ///
    /// # Errors
    /// Those of [`crate::rma`].
    ///
    /// # Safety
    /// `len` bytes at `base` are readable until the call returns.
    pub unsafe fn inject_write(
        &self,
        (base, len): (*const u8, usize),
        to: Remote,
        data: Option<u64>,
    ) -> Result<()> {
        // SAFETY: readable during the call, which is as long as an inject keeps it; it only reads.
        let buf = IoBuf::one(unsafe { Span::from_raw(base.cast_mut(), len) });
        crate::rma::inject(self, buf, to, data, NO_ENTRY)
    }

    /// `fi_read` and `fi_readv`.
    ///
    /// # Errors
    /// Those of [`crate::rma`].
    ///
    /// # Safety
    /// The [promise](self) of the file; a read writes the memory.
    pub unsafe fn read(&self, read: RawRma<'_>) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.readmsg(read, self.rma_op_flags() - OpFlags::INJECT) }
    }

    /// `fi_readmsg`: `flags` in place of the endpoint's.
    ///
    /// # Errors
    /// Those of [`crate::rma`].
    ///
    /// # Safety
    /// As [`read`](Self::read).
    pub unsafe fn readmsg(&self, read: RawRma<'_>, flags: OpFlags) -> Result<()> {
        let RawRma { iov, dest, rma_iov, context, .. } = read;
        if let (&[one], &[range]) = (iov, rma_iov) {
            let call = self.fast_call(dest, range, context, flags);
            // SAFETY: the caller's promise is that of `from_raw`.
            let mut buf = IoBuf::one(unsafe { Span::from_raw(one.base, one.len) });
            let mut core = self.dom.enter()?;
            if core.engine.try_read(self.id, &mut FastRead { buf: &mut buf, call }) {
                core.posted(&self.dom);
                core.leave();
                return Ok(());
            }
        }
        // SAFETY: the caller's promise is the same.
        unsafe { self.readmsg_long(read, flags) }
    }

    /// The rest of [`readmsg`](Self::readmsg).
    ///
    /// # Safety
    /// As there.
    #[inline(never)]
    unsafe fn readmsg_long(&self, read: RawRma<'_>, flags: OpFlags) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        let req = unsafe { self.read_req(read, flags - OpFlags::TRIGGER)? };
        if flags.contains(OpFlags::TRIGGER) {
            return self.trigger(req.context, Op::Read(req));
        }
        let mut core = self.dom.enter()?;
        let posted = core.engine.post_read(self.id, req);
        core.posted(&self.dom);
        posted
    }

    /// The common part of the fast paths of one-sided operations.
    #[inline(always)]
    fn fast_call(&self, dest: FiAddr, range: RmaIov, context: u64, flags: OpFlags) -> FastCall {
        let dest = self.to(dest);
        FastCall { dest, range, context, flags, no_completion: false }
    }

    /// A write as the node takes it.
    ///
    /// # Safety
    /// The [promise](self) of the module.
    pub(crate) unsafe fn write_req(&self, write: RawRma<'_>, flags: OpFlags) -> Result<WriteReq> {
        let RawRma { iov, dest, rma_iov, data, context } = write;
        // SAFETY: the caller's promise is the same.
        let (buf, rma) = (unsafe { io(iov)? }, list(rma_iov)?);
        let (dest, no_completion) = (self.to(dest), false);
        Ok(WriteReq { buf, dest, rma, data, context, flags, no_completion })
    }

    /// A read as the node takes it.
    ///
    /// # Safety
    /// The [promise](self) of the module.
    pub(crate) unsafe fn read_req(&self, read: RawRma<'_>, flags: OpFlags) -> Result<ReadReq> {
        let RawRma { iov, dest, rma_iov, context, .. } = read;
        // SAFETY: the caller's promise is the same.
        let (buf, rma) = (unsafe { io(iov)? }, list(rma_iov)?);
        Ok(ReadReq { buf, dest: self.to(dest), rma, context, flags })
    }
}

/// The arguments of an atomic operation of the raw API. Lists count bytes, not elements.
#[derive(Clone, Copy, Debug)]
pub struct RawAtomic<'a> {
    /// Base, fetch or compare.
    pub kind: AtomicKind,
    /// Operation and datatype.
    pub op: TypedOp,
    /// Operands; ignored by an atomic read.
    pub operands: &'a [IoVec],
    /// Compare values; empty unless `kind` is `Compare`.
    pub compares: &'a [IoVec],
    /// Buffers for the old values; empty if `kind` is `Base`.
    pub results: &'a [IoVec],
    /// The peer whose memory is accessed.
    pub dest: FiAddr,
    /// Ranges of remote memory.
    pub rma_iov: &'a [RmaIov],
    /// Remote CQ data.
    pub data: u64,
    /// Comes back in the completion.
    pub context: u64,
}

impl RawEndpoint {
    /// `fi_atomic`, `fi_fetch_atomic` and `fi_compare_atomic`, and their `v` forms.
    ///
    /// # Errors
    /// Those of [`crate::atomic`].
    ///
    /// # Safety
    /// The [promise](self) of the file: operands and compare values are read until the call
    /// returns, results are written until the operation has completed.
    #[inline(always)]
    pub unsafe fn atomic(&self, call: RawAtomic<'_>) -> Result<()> {
        // SAFETY: the caller's promise is the same.
        unsafe { self.atomicmsg(call, self.rma_op_flags()) }
    }

    /// The `msg` calls: `flags` in place of the endpoint's.
    ///
    /// # Errors
    /// Those of [`crate::atomic`].
    ///
    /// # Safety
    /// As [`atomic`](Self::atomic).
    #[inline(always)]
    pub unsafe fn atomicmsg(&self, call: RawAtomic<'_>, flags: OpFlags) -> Result<()> {
        let RawAtomic { kind, op, operands, compares, results, dest, rma_iov, data, context } =
            call;
        let lists = (in_one_piece(operands), in_one_piece(compares), in_one_piece(results));
        let (&[range], (Some(operand), Some(compare), Some(result))) = (rma_iov, lists) else {
            let lists = [operands, compares, results];
            // SAFETY: the caller's promise is the same.
            return unsafe {
                self.atomic_long((kind, op), lists, (dest, rma_iov), (data, context), flags)
            };
        };
        let mut core = self.dom.enter()?;
        // SAFETY: the caller's promise is that of `from_raw`, for each of the three.
        let lend = |one: IoVec| unsafe { Span::from_raw(one.base, one.len) };
        let mut req = FastAtomic {
            kind,
            op: op.op,
            ty: op.datatype,
            operand: &lend(operand),
            compare: &lend(compare),
            result: &mut IoBuf::one(lend(result)),
            call: self.fast_call(dest, range, context, flags),
        };
        if core.engine.try_atomic(self.id, &mut req) {
            core.posted(&self.dom);
            core.leave();
            return Ok(());
        }
        drop(core);
        // Rebuilt from parts, as in `send_one`.
        let memory = [operand, compare, result];
        // SAFETY: the caller's promise is the same.
        unsafe { self.atomic_far((kind, op), memory, (dest, range), (data, context), flags) }
    }

    /// The rest of [`atomicmsg`](Self::atomicmsg) for single pieces, on ports other than a segment.
    ///
    /// # Safety
    /// As [`atomic`](Self::atomic).
    #[inline(never)]
    unsafe fn atomic_far(
        &self,
        (kind, op): (AtomicKind, TypedOp),
        memory: [IoVec; 3],
        (dest, range): (FiAddr, RmaIov),
        (data, context): (u64, u64),
        flags: OpFlags,
    ) -> Result<()> {
        // SAFETY: the caller's promise is that of `from_raw`, for each of the three.
        let [operand, compare, result] =
            memory.map(|one| unsafe { Span::from_raw(one.base, one.len) });
        let mut req = FastAtomic {
            kind,
            op: op.op,
            ty: op.datatype,
            operand: &operand,
            compare: &compare,
            result: &mut IoBuf::one(result),
            call: self.fast_call(dest, range, context, flags),
        };
        let mut core = self.dom.enter()?;
        if core.engine.atomic_far(self.id, &mut req) {
            core.posted(&self.dom);
            core.leave();
            return Ok(());
        }
        drop(core);
        let (lists, remote) = (memory.each_ref().map(std::slice::from_ref), (dest, &[range][..]));
        // SAFETY: the caller's promise is the same.
        unsafe { self.atomic_long((kind, op), lists, remote, (data, context), flags) }
    }

    /// The rest of [`atomicmsg`](Self::atomicmsg).
    ///
    /// # Safety
    /// As [`atomic`](Self::atomic).
    #[inline(never)]
    unsafe fn atomic_long(
        &self,
        (kind, op): (AtomicKind, TypedOp),
        [operands, compares, results]: [&[IoVec]; 3],
        (dest, rma_iov): (FiAddr, &[RmaIov]),
        (data, context): (u64, u64),
        flags: OpFlags,
    ) -> Result<()> {
        let call =
            RawAtomic { kind, op, operands, compares, results, dest, rma_iov, data, context };
        // SAFETY: the caller's promise is the same.
        let req = unsafe { self.atomic_req(&call, flags - OpFlags::TRIGGER)? };
        if flags.contains(OpFlags::TRIGGER) {
            return self.trigger(req.context, Op::Atomic(Box::new(req)));
        }
        let mut core = self.dom.enter()?;
        let posted = core.engine.post_atomic(self.id, req);
        core.posted(&self.dom);
        posted
    }

    /// An atomic operation as the node takes it.
    ///
    /// # Safety
    /// The [promise](self) of the module.
    pub(crate) unsafe fn atomic_req(
        &self,
        call: &RawAtomic<'_>,
        flags: OpFlags,
    ) -> Result<AtomicReq> {
        // SAFETY: the caller's promise is the same, for each of the three.
        let operand = unsafe { io(call.operands)? };
        // SAFETY: as above.
        let compare = unsafe { io(call.compares)? };
        // SAFETY: as above.
        let result = unsafe { io(call.results)? };
        let RawAtomic { kind, op, dest, data, context, .. } = *call;
        let dest = self.to(dest);
        let (op, ty, rma, no_completion) = (op.op, op.datatype, list(call.rma_iov)?, false);
        Ok(AtomicReq {
            kind,
            op,
            ty,
            operand,
            compare,
            result,
            dest,
            rma,
            data,
            context,
            flags,
            no_completion,
        })
    }

    /// `fi_inject_atomic`.
    ///
    /// # Errors
    /// Those of [`crate::atomic`].
    ///
    /// # Safety
    /// The operand is readable until the call returns.
    pub unsafe fn inject_atomic(&self, op: TypedOp, operand: IoVec, to: Remote) -> Result<()> {
        let rma = to.range(elements(op, operand.len));
        // SAFETY: readable during the call, which is as long as it is kept; it is only read.
        let operand = unsafe { io(&[operand])? };
        crate::atomic::inject(self, op, operand, (to.dest, rma), NO_ENTRY)
    }
}

/// The arguments of a collective of the raw API. Lengths follow from `count` and the kind
/// (fi_collective(3)). A broadcast has `buf` alone.
#[derive(Clone, Copy, Debug)]
pub struct RawCollective {
    /// The collective.
    pub kind: CollKind,
    /// Source.
    pub buf: *mut u8,
    /// Result; may be the source for an allreduce and a reduce.
    pub result: *mut u8,
    /// Elements of a block.
    pub count: usize,
    /// `enum fi_datatype`, [`crate::coll::FI_VOID`] for a barrier.
    pub datatype: u32,
    /// `enum fi_op`; ignored by collectives that do not reduce.
    pub op: u32,
    /// The group.
    pub coll_addr: FiAddr,
    /// The root, if the kind has one.
    pub root_addr: FiAddr,
    /// `FI_SEND` or `FI_RECV` of a broadcast, and `FI_COMPLETION`, by libfabric's values.
    pub flags: u64,
    /// Comes back in the completion.
    pub context: u64,
}

impl RawEndpoint {
    /// The nine calls of `struct fi_ops_collective`, and `fi_barrier2`. The lengths of a member's
    /// buffers are those of [`CollKind::blocks_in`] and `blocks_out`; a buffer of length 0 may be
    /// null.
    ///
    /// # Errors
    /// Those of [`crate::coll`].
    ///
    /// # Safety
    /// The [promise](self) of the file, for the source (read) and the result (written).
    pub unsafe fn collective(&self, call: RawCollective) -> Result<()> {
        let (role, flags) = crate::coll::role_of(call.kind, call.flags, self.tx_op_flags())?;
        let RawCollective { kind, buf, context, .. } = call;
        let result = if kind == CollKind::Broadcast { buf } else { call.result };
        let req = CollReq { call: call_of(&call)?, role, context, flags };
        let mut core = self.dom.enter()?;
        // SAFETY: the caller's promise: as many bytes as the call has are there.
        let lend = |at: *mut u8, len: usize| unsafe { Span::from_raw(at, len) };
        let both = |source_len, result_len| (lend(buf, source_len), lend(result, result_len));
        self.post_collective(&mut core, &req, both)?;
        core.posted(&self.dom);
        core.leave();
        Ok(())
    }
}

/// Converts a call of the raw API. The node checks the combination.
///
/// # Errors
/// [`Error::Invalid`]: `coll_addr` is no group.
#[inline]
fn call_of(raw: &RawCollective) -> Result<CollCall> {
    let group = crate::coll::group_of(raw.coll_addr)?;
    if raw.kind == CollKind::Barrier {
        return Ok(CollCall::barrier(group));
    }
    let what = CollWord::of_numbers(raw.kind, raw.op, raw.datatype);
    Ok(CollCall { what, group, count: raw.count as u64, root: raw.root_addr })
}

impl Domain {
    /// As [`endpoint`](Self::endpoint), of the raw API.
    ///
    /// # Errors
    /// As [`endpoint`](Self::endpoint).
    pub fn raw_endpoint(&self, info: &Info) -> Result<RawEndpoint> {
        RawEndpoint::open(&self.dom, info)
    }

    /// Opens a shared receive context of the raw API: receives posted to it take the messages of
    /// every endpoint that it is [bound](RawEndpoint::bind_srx) to, and complete in the queue of
    /// the endpoint that the message was for. The context has no queue itself: a receive that is
    /// cancelled, or left at the loss of the port, is reported by an endpoint that shares the
    /// context; receives that are left when it is closed are not reported. Multi-receives and peeks
    /// are refused here: they are per endpoint. `FI_DIRECTED_RECV` takes sources of the endpoints'
    /// address vector, so all of them share one; it is not granted once a connected endpoint shares
    /// the context.
    ///
    /// # Errors
    /// - [`Error::BadFlags`]: `attr.op_flags` has `FI_MULTI_RECV`, or a flag that is no receive
    ///   flag.
    /// - [`Error::NoMem`]: the domain has no room for another context.
    #[doc(alias = "fi_srx_context")]
    pub fn raw_srx_context(&self, attr: &RxAttr) -> Result<RawEndpoint> {
        RawEndpoint::open_srx(&self.dom, attr)
    }

    /// Refuses attributes of a transmit context beyond those that [`getinfo`](crate::getinfo)
    /// offers.
    ///
    /// # Errors
    /// [`Error::BadFlags`]: a default flag that is no transmit flag. [`Error::Invalid`]: another
    /// attribute.
    pub fn check_tx_attr(&self, attr: &TxAttr) -> Result<()> {
        crate::info::check_tx(attr, &self.dom.settings)
    }

    /// As [`cq_open`](Self::cq_open), for endpoints of the raw API.
    ///
    /// # Errors
    /// As [`cq_open`](Self::cq_open).
    pub fn raw_cq_open(&self, attr: CqAttr) -> Result<RawCq> {
        CqInner::open(&self.dom, attr, true).map(RawCq)
    }

    /// `fi_query_collective` by libfabric's numbers.
    ///
    /// # Errors
    /// As [`query_collective`](Self::query_collective); [`Error::OpNotSupp`] for a number that is
    /// no collective.
    pub fn raw_query_collective(
        &self,
        coll: u32,
        op: u32,
        datatype: u32,
        flags: u64,
    ) -> Result<CollAttr> {
        let kind = CollKind::ALL.get(coll as usize).copied();
        self.query_collective(
            kind.ok_or(Error::OpNotSupp("no such collective"))?,
            op,
            datatype,
            flags,
        )
    }

    /// Registers memory of the caller, in at most 8 pieces.
    ///
    /// # Errors
    /// As [`mr_reg`](Self::mr_reg).
    ///
    /// # Safety
    /// Until the region is dropped the memory is mapped, readable and writable, and no Rust
    /// reference to it is alive while a peer that knows the key may use it.
    pub unsafe fn raw_mr_reg(&self, iov: &[IoVec], attr: &MrAttr) -> Result<RawMr> {
        // SAFETY: the caller's promise covers the life of the list.
        let buf = unsafe { io(iov)? };
        RawMr::register(&self.dom, buf, pieces(iov), attr)
    }

    /// Registers a part of the region `base` with its own key and access rights (`base_mr`). The
    /// rights need not be fewer, and the part can be a base itself. `base` has to be dropped after
    /// it ([`RawMr::has_parts`]).
    ///
    /// # Errors
    /// As [`mr_reg`](Self::mr_reg); also [`Error::Invalid`]: a piece is not inside a piece of
    /// `base`, or `base` is of another domain.
    ///
    /// # Safety
    /// As of [`raw_mr_reg`](Self::raw_mr_reg).
    pub unsafe fn raw_mr_reg_in(
        &self,
        base: &RawMr,
        iov: &[IoVec],
        attr: &MrAttr,
    ) -> Result<RawMr> {
        // SAFETY: the caller's promise covers the life of the list.
        let buf = unsafe { io(iov)? };
        RawMr::register_in(base, &self.dom, buf, pieces(iov), attr)
    }
}

/// Address ranges of the pieces of a list.
fn pieces(iov: &[IoVec]) -> Vec<Range<usize>> {
    let range = |piece: &IoVec| {
        let from = piece.base.addr();
        from..from.saturating_add(piece.len)
    };
    iov.iter().map(range).collect()
}

/// Lends a list.
///
/// # Safety
/// The [promise](self) of the module.
#[inline]
unsafe fn io(iov: &[IoVec]) -> Result<IoBuf> {
    if let [one] = iov {
        // SAFETY: the caller's promise is that of `from_raw`.
        return Ok(IoBuf::one(unsafe { Span::from_raw(one.base, one.len) }));
    }
    if iov.len() > IOV_LIMIT {
        return Err(Error::Invalid("iov_count: above 8"));
    }
    let mut buf = IoBuf::EMPTY;
    for piece in iov {
        // SAFETY: as above.
        if !buf.push(unsafe { Span::from_raw(piece.base, piece.len) }) {
            return Err(Error::MsgTooLong);
        }
    }
    Ok(buf)
}

/// A list of at most one piece as a piece.
#[inline(always)]
fn in_one_piece(iov: &[IoVec]) -> Option<IoVec> {
    match *iov {
        [] => Some(IoVec::EMPTY),
        [one] => Some(one),
        _ => None,
    }
}

/// Result of [`RawCq::take_one`].
#[must_use]
pub enum TakeOne<'a> {
    /// An entry was taken.
    Taken,
    /// The queue is empty.
    Empty(EmptyCq<'a>),
    /// Nothing was done: [`RawCq::take`] has to be called.
    Other,
}

/// An empty queue whose domain this thread holds locked as long as this exists: any other call on
/// the domain, or the drop of one of its objects, would deadlock. (One word, which is passed in a
/// register.)
#[must_use]
#[repr(transparent)]
pub struct EmptyCq<'a> {
    /// The domain is locked by a guard that stayed, which this one resumes.
    cq: &'a CqInner,
    on_this_thread: PhantomData<*const ()>,
}

impl EmptyCq<'_> {
    /// As [`RawCq::take`] of one entry. `None` if one was taken.
    #[inline(always)]
    pub fn take(self, put: impl FnMut(&Cqe)) -> Option<Result<usize>> {
        let cq = ManuallyDrop::new(self).cq;
        // SAFETY: a guard stayed on this thread, from which `self` cannot go, and it is resumed
        // once: `self` is not dropped.
        let core = unsafe { cq.dom.lock.resume() };
        cq.read_one_of_turn(core, put)
    }
}

impl Drop for EmptyCq<'_> {
    fn drop(&mut self) {
        // SAFETY: as in `take`, which did not happen.
        drop(unsafe { self.cq.dom.lock.resume() });
    }
}

/// A completion queue of the raw API, with the entries of the node.
pub struct RawCq(pub(crate) Arc<CqInner>);

impl RawCq {
    /// As [`crate::Cq::read`] and `readfrom`.
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "fi_cq_read")]
    #[inline]
    pub fn read(&self, out: &mut [Cqe]) -> Result<usize> {
        let mut to = out.iter_mut();
        self.take(to.len(), |cqe| {
            if let Some(to) = to.next() {
                *to = self.0.trimmed(cqe);
            }
        })
    }

    /// As [`read`](Self::read) of at most `most` entries, but lends each entry to `put` in place,
    /// with all fields, whatever the format.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn take(&self, most: usize, put: impl FnMut(&Cqe)) -> Result<usize> {
        self.0.read_cqes(most, put)
    }

    /// Fast path: takes the next entry and lends it to `put`, if nothing else has to be done.
    #[inline(always)]
    pub fn take_one(&self, put: impl FnOnce(&Cqe)) -> TakeOne<'_> {
        match self.0.read_one(put) {
            Some(true) => TakeOne::Taken,
            Some(false) => TakeOne::Other,
            None => TakeOne::Empty(EmptyCq { cq: &self.0, on_this_thread: PhantomData }),
        }
    }

    /// Number of entries, error entries included, after a turn of the loop.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    #[doc(alias = "fi_poll")]
    pub fn ready(&self) -> Result<usize> {
        let mut core = self.0.dom.enter()?;
        core.turn_if_manual(&self.0.dom);
        core.node().cqs.ready(self.0.id)
    }

    /// As [`crate::Cq::readerr`].
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "fi_cq_readerr")]
    pub fn readerr(&self) -> Result<CqErr> {
        self.0.readerr_raw()
    }

    /// As [`crate::Cq::sread`], lending entries as [`take`](Self::take) does.
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "fi_cq_sread")]
    pub fn sread(
        &self,
        most: usize,
        mut put: impl FnMut(&Cqe),
        cond: usize,
        timeout_ms: i32,
    ) -> Result<usize> {
        self.0.sread(cond, timeout_ms, |cq, core| cq.cqes(&cq.dom, core, most, &mut put))
    }

    /// As [`crate::Cq::signal`].
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "fi_cq_signal")]
    pub fn signal(&self) -> Result<()> {
        self.0.signal()
    }

    /// As [`crate::Cq::wait_fd`].
    ///
    /// # Errors
    /// As there.
    pub fn wait_fd(&self) -> Result<RawFd> {
        self.0.wait_fd()
    }

    /// The text of a `prov_errno`.
    #[doc(alias = "fi_cq_strerror")]
    pub fn strerror(&self, prov_errno: i32) -> &'static str {
        prov_strerror(prov_errno)
    }

    /// As [`crate::Cq::close`].
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "fi_close")]
    pub fn close(self) -> std::result::Result<(), (Error, Self)> {
        if Arc::strong_count(&self.0) > 1 { Err((Error::Busy, self)) } else { Ok(()) }
    }
}

/// The promise of `FI_THREAD_DOMAIN`, made once instead of checked at every call. It covers data
/// calls only: posts, reads of queues and counters, and waits. Control calls (open, bind, enable,
/// register, insert, look up, query, cancel, close) may come from any thread, and wait until no
/// data call is inside.
#[derive(Debug)]
pub struct SerialPromise(());

impl SerialPromise {
    /// Makes the promise.
    ///
    /// # Safety
    /// As long as any object of the domain lives, one thread at a time makes data calls on the
    /// domain and its objects, and each call happens before the next. Data calls may overlap once a
    /// queue with a wait object other than `FI_WAIT_NONE`, or a counter with `FI_WAIT_FD`, was
    /// opened.
    ///
    /// Source: fi_domain(3), "Multi-threading Support".
    pub unsafe fn new() -> Self {
        Self(())
    }

    pub(crate) fn entry(self) -> Entry {
        Entry::Serial
    }
}
