//! Work that waits for a counter: triggered operations (`FI_TRIGGER`) and deferred work
//! (`FI_QUEUE_WORK`), for the raw API.
//!
//! Operations are stored ready to post until the counter has reached the threshold. A triggered
//! operation is then posted as if it were called at that time, except that injected bytes are
//! copied when it is queued. Deferred work goes through a deferred endpoint of its endpoint, so
//! that it writes a completion only with `FI_COMPLETION`, and is counted by the counter of the
//! request. An operation that cannot be posted then ends with an error entry.
//!
//! Counters are checked after every turn of the loop, and after every call that changes one.

use barewire_dataplane::node::{AtomicReq, CntrId, EpId, ReadReq, RecvReq, SendReq, WriteReq};

use crate::cntr::Cntr;
pub use crate::deferred::{Condition, ConditionReader};
use crate::deferred::{DeferredOp, Op};
use crate::domain::Domain;
use crate::ep::EpCommon;
use crate::errno::{Error, Result};
use crate::flags::{Caps, OpFlags};
use crate::inner::{Core, DomainRef};
use crate::raw::{RawAtomic, RawEndpoint, RawRecv, RawRma, RawSend};

impl Cntr {
    /// The condition that the counter has reached `threshold`. The counter cannot be closed while
    /// work waits for it.
    pub fn reaching(&self, threshold: u64) -> Condition {
        Condition { dom: self.0.dom.name(), cntr: self.0.id, threshold }
    }
}

/// Deferred work (`struct fi_deferred_work`).
pub struct RawWork<'a> {
    /// Identifies the request when it is cancelled.
    pub name: u64,
    /// When the work is posted. Successes and failures of the counter are added up.
    pub when: Condition,
    /// Counts its completion. `None` for an operation on a counter.
    pub completion: Option<&'a Cntr>,
    /// The operation.
    pub op: RawOp<'a>,
}

/// The operation of deferred work. Flags replace the endpoint's default flags.
pub enum RawOp<'a> {
    /// `FI_OP_SEND` and `FI_OP_TSEND`.
    Send(&'a RawEndpoint, RawSend<'a>, OpFlags),
    /// `FI_OP_RECV` and `FI_OP_TRECV`.
    Recv(&'a RawEndpoint, RawRecv<'a>, OpFlags),
    /// `FI_OP_WRITE`.
    Write(&'a RawEndpoint, RawRma<'a>, OpFlags),
    /// `FI_OP_READ`.
    Read(&'a RawEndpoint, RawRma<'a>, OpFlags),
    /// `FI_OP_ATOMIC`, `FI_OP_FETCH_ATOMIC` and `FI_OP_COMPARE_ATOMIC`.
    Atomic(&'a RawEndpoint, RawAtomic<'a>, OpFlags),
    /// `FI_OP_CNTR_SET`.
    Set(&'a Cntr, u64),
    /// `FI_OP_CNTR_ADD`.
    Add(&'a Cntr, u64),
}

/// Result of an attempt to post a waiting operation.
enum Attempt {
    Done,
    /// A queue or table has no room now.
    NoRoom,
}

impl Core {
    /// Posts all operations whose condition is met.
    #[cold]
    pub(crate) fn release(&mut self) {
        // A posted operation may change counters.
        while self.post_next_ready() {}
    }

    /// Posts the first operation whose condition is met and returns whether there was one. An
    /// operation without room holds back later ones of the same counter.
    fn post_next_ready(&mut self) -> bool {
        let mut full: Vec<CntrId> = Vec::new();
        for at in 0..self.deferred.list.len() {
            let DeferredOp { when, name, .. } = self.deferred.list[at];
            let node = self.engine.node();
            let ended = node.cntrs.read(when.cntr).unwrap_or(0);
            let failed =
                if name.is_some() { node.cntrs.readerr(when.cntr).unwrap_or(0) } else { 0 };
            if ended.saturating_add(failed) < when.threshold || full.contains(&when.cntr) {
                continue;
            }
            match self.try_post(at) {
                Attempt::Done => {
                    self.deferred.list.remove(at);
                    return true;
                }
                Attempt::NoRoom => full.push(when.cntr),
            }
        }
        false
    }

    /// Cancels the first triggered operation of endpoint `ep` with this context that still waits.
    /// It completes with [`Error::Canceled`].
    ///
    /// # Errors
    /// [`Error::NoData`]: there is none. [`Error::Again`]: its queue is full, and it waits on.
    pub(crate) fn cancel_triggered(&mut self, ep: EpId, context: u64) -> Result<()> {
        let at = self.deferred.triggered(ep, context).ok_or(Error::NoData)?;
        let recv = matches!(self.deferred.list[at].op, Op::Recv(_));
        self.node().objects().fail_unposted(ep, context, recv, Error::Canceled)?;
        self.deferred.list.remove(at);
        Ok(())
    }

    fn try_post(&mut self, at: usize) -> Attempt {
        let Self { engine, deferred, .. } = self;
        let DeferredOp { ep, op, .. } = &deferred.list[at];
        let node = engine.node_mut();
        let Some((ep, _)) = *ep else {
            // A counter that something waits for is not closed.
            let _ = match *op {
                Op::Set(cntr, value) => node.cntrs.set(cntr, value),
                Op::Add(cntr, value) => node.cntrs.add(cntr, value),
                _ => Ok(()),
            };
            return Attempt::Done;
        };
        let (posted, context, recv) = match op {
            Op::Send(req) => (engine.post_send(ep, reborrow(req)), req.context, false),
            Op::Recv(req) => {
                let again = RecvReq { buf: req.buf.again(), ..*req };
                (engine.post_recv(ep, again), req.context, true)
            }
            Op::Write(req) => {
                let again = WriteReq { buf: req.buf.again(), ..*req };
                (engine.post_write(ep, again), req.context, false)
            }
            Op::Read(req) => {
                let again = ReadReq { buf: req.buf.again(), ..*req };
                (engine.post_read(ep, again), req.context, false)
            }
            Op::Atomic(req) => {
                let (operand, compare) = (req.operand.again(), req.compare.again());
                let again = AtomicReq { operand, compare, result: req.result.again(), ..**req };
                (engine.post_atomic(ep, again), req.context, false)
            }
            Op::Set(..) | Op::Add(..) => return Attempt::Done,
        };
        match posted {
            Ok(()) => Attempt::Done,
            Err(Error::Again) => Attempt::NoRoom,
            Err(why) => match engine.node_mut().objects().fail_unposted(ep, context, recv, why) {
                Err(Error::Again) => Attempt::NoRoom,
                // The error entry is written, or the endpoint is closed and no entry is needed.
                _ => Attempt::Done,
            },
        }
    }
}

fn reborrow(req: &SendReq) -> SendReq {
    SendReq { buf: req.buf.again(), ..*req }
}

impl EpCommon {
    /// Says how conditions are read out of the contexts of this endpoint's operations. Without,
    /// `FI_TRIGGER` is refused.
    pub fn set_condition_reader(&self, read: ConditionReader) {
        // Once for each endpoint: the same again changes nothing.
        let _ = self.condition_reader.set(read);
    }

    /// Keeps an operation with `FI_TRIGGER`, whose flag has been removed, until the condition in
    /// its context is met.
    ///
    /// # Errors
    /// - [`Error::BadFlags`]: the endpoint has no `FI_TRIGGER`.
    /// - [`Error::OpBadState`]: the endpoint is not enabled.
    /// - [`Error::Invalid`], [`Error::NoSys`]: the context has no condition of this domain.
    /// - [`Error::MsgTooLong`]: it is injected, and too long for that. [`Error::NoMem`].
    pub(crate) fn trigger(&self, context: u64, mut op: Op) -> Result<()> {
        let read = self.condition_reader.get().filter(|_| self.caps().contains(Caps::TRIGGER));
        let read = read.ok_or(Error::BadFlags)?;
        // SAFETY: `set_condition_reader` was given what reads contexts of this endpoint's
        // operations, and this is one of an operation with `FI_TRIGGER`.
        let when = unsafe { read(context)? };
        let _injected = op.take_injected()?;
        let ep = Some((self.id, self.id));
        let waiting = DeferredOp { when, name: None, ep, completion: None, op, _injected };
        let mut core = self.dom.enter()?;
        core.node().eps.check_enabled(self.id)?;
        submit(&self.dom, &mut core, waiting)
    }

    /// Keeps deferred work, to be posted through a deferred endpoint.
    fn defer(&self, work: &RawWork<'_>, op: Op) -> Result<()> {
        if !self.caps().contains(Caps::TRIGGER) {
            return Err(Error::OpNotSupp("FI_TRIGGER was not requested"));
        }
        if work.when.dom != self.dom.name() {
            return Err(Error::Invalid("triggering_cntr: of another domain"));
        }
        if matches!(op, Op::Recv(_)) && self.shares_receives() {
            return Err(Error::OpNotSupp("receives are posted to the shared context"));
        }
        let completion = work.completion.map(|cntr| cntr.0.id);
        let mut core = self.dom.enter_control()?;
        let deferred = core.node().objects().deferred_ep(self.id, completion)?;
        let (when, name, ep) = (work.when, Some(work.name), Some((deferred, self.id)));
        // Its memory is read when its time has come, whatever its flags: fi_trigger(3).
        submit(&self.dom, &mut core, DeferredOp { when, name, ep, completion, op, _injected: None })
    }
}

fn submit(dom: &DomainRef, core: &mut Core, waiting: DeferredOp) -> Result<()> {
    if waiting.when.dom != dom.name() {
        return Err(Error::Invalid("the counter is of another domain"));
    }
    core.deferred.add(waiting);
    core.release();
    core.posted(dom);
    Ok(())
}

impl Domain {
    /// Queues deferred work (`FI_QUEUE_WORK`), which begins at once if its condition is met.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: a counter or endpoint is of another domain, a list is too long, or an
    ///   operation on a counter names a completion counter.
    /// - [`Error::OpNotSupp`]: the endpoint has no `FI_TRIGGER`, or takes its receives from a
    ///   shared context: those are deferred there.
    /// - [`Error::OpBadState`]: the endpoint is not enabled.
    /// - [`Error::MsgTooLong`]: the message is longer than the endpoint sends.
    ///
    /// What else the operation can be refused for ends in an error entry when its time has come.
    ///
    /// # Safety
    /// The [promise](crate::raw) of the raw API, from this call until the work has ended or been
    /// cancelled; operands of atomic operations are read until then as well.
    ///
    /// Source: fi_trigger(3), "DEFERRED WORK QUEUES".
    pub unsafe fn raw_queue_work(&self, work: RawWork<'_>) -> Result<()> {
        let known = |cntr: &Cntr| cntr.0.dom.name() == self.dom.name();
        if work.completion.is_some_and(|cntr| !known(cntr)) {
            return Err(Error::Invalid("completion_cntr: of another domain"));
        }
        // SAFETY: the caller's promise is that of the functions that take lists.
        let (ep, op) = unsafe {
            match work.op {
                RawOp::Send(ep, send, flags) => (ep, Op::Send(ep.send_req(send, flags)?)),
                RawOp::Recv(ep, recv, flags) => (ep, Op::Recv(ep.recv_req(recv, flags)?)),
                RawOp::Write(ep, rma, flags) => (ep, Op::Write(ep.write_req(rma, flags)?)),
                RawOp::Read(ep, rma, flags) => (ep, Op::Read(ep.read_req(rma, flags)?)),
                RawOp::Atomic(ep, call, flags) => {
                    (ep, Op::Atomic(Box::new(ep.atomic_req(&call, flags)?)))
                }
                RawOp::Set(cntr, value) | RawOp::Add(cntr, value) => {
                    if work.completion.is_some() || !known(cntr) {
                        return Err(Error::Invalid("an operation on a counter of this domain"));
                    }
                    let set = matches!(work.op, RawOp::Set(..));
                    let op = if set { Op::Set } else { Op::Add };
                    let (when, op) = (work.when, op(cntr.0.id, value));
                    let (name, ep, completion) = (Some(work.name), None, None);
                    let waiting = DeferredOp { when, name, ep, completion, op, _injected: None };
                    return submit(&self.dom, &mut *self.dom.enter_control()?, waiting);
                }
            }
        };
        if ep.dom.name() != self.dom.name() {
            return Err(Error::Invalid("ep: of another domain"));
        }
        ep.defer(&work, op)
    }

    /// Cancels the first deferred work of this name that still waits (`FI_CANCEL_WORK`).
    ///
    /// # Errors
    /// [`Error::NoData`]: there is none.
    pub fn raw_cancel_work(&self, name: u64) -> Result<()> {
        let mut core = self.dom.enter_control()?;
        let list = &mut core.deferred.list;
        let at = list.iter().position(|w| w.name == Some(name)).ok_or(Error::NoData)?;
        list.remove(at);
        Ok(())
    }

    /// Cancels all deferred work, or what waits for one counter (`FI_FLUSH_WORK`).
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    pub fn raw_flush_work(&self, cntr: Option<&Cntr>) -> Result<()> {
        let only = cntr.map(|cntr| cntr.0.id);
        let flushed = |w: &DeferredOp| w.name.is_some() && only.is_none_or(|c| w.when.cntr == c);
        self.dom.enter_control()?.deferred.list.retain(|w| !flushed(w));
        Ok(())
    }
}
