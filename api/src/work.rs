//! Work that waits for a counter: triggered operations (`FI_TRIGGER`) and deferred work
//! (`FI_QUEUE_WORK`), for the raw API.
//!
//! Both are kept here, as they will be posted, until the counter has reached the threshold. A
//! triggered operation is then posted as if it had been called at that time, but for what it
//! injects, which the call has read. Deferred work goes through a deferred endpoint of its
//! endpoint, so that it completes only with `FI_COMPLETION` and is counted by the counter that the
//! request names. What cannot be posted then ends with an error entry.
//!
//! Counters are looked at after every turn of the loop, and after every call that changes one.

use barewire_dataplane::node::{AtomicReq, CntrId, EpId, ReadReq, RecvReq, SendReq, WriteReq};

use crate::cntr::Cntr;
pub use crate::deferred::{Condition, ConditionOf};
use crate::deferred::{Op, Waiting};
use crate::domain::Domain;
use crate::ep::EpCommon;
use crate::errno::{Error, Result};
use crate::flags::{Caps, OpFlags};
use crate::inner::{Core, DomainRef};
use crate::raw::{RawAtomic, RawEndpoint, RawRecv, RawRma, RawSend};

impl Cntr {
    /// That the counter has reached `threshold`. Work that waits for it keeps the counter from
    /// being closed.
    pub fn reaching(&self, threshold: u64) -> Condition {
        Condition { dom: self.0.dom.name(), cntr: self.0.id, threshold }
    }
}

/// Deferred work (`struct fi_deferred_work`).
pub struct RawWork<'a> {
    /// Names the request when it is cancelled.
    pub name: u64,
    /// When it is done: successes and failures of the counter together count.
    pub when: Condition,
    /// Counts its end. None for an operation on a counter.
    pub completion: Option<&'a Cntr>,
    /// What is done.
    pub op: RawOp<'a>,
}

/// What deferred work does. Flags are in place of the endpoint's.
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

/// What became of an attempt to do something that waits.
enum Tried {
    Done,
    /// There is no room now.
    Again,
}

impl Core {
    /// Does everything whose time has come.
    #[cold]
    pub(crate) fn release(&mut self) {
        // What is done may change counters.
        while self.release_one() {}
    }

    /// Does the first that can be done and says whether there was one. What finds no room keeps
    /// back those that wait for the same counter.
    fn release_one(&mut self) -> bool {
        let mut full: Vec<CntrId> = Vec::new();
        for at in 0..self.works.list.len() {
            let Waiting { when, name, .. } = self.works.list[at];
            let node = self.engine.node();
            let ended = node.cntrs.read(when.cntr).unwrap_or(0);
            let failed =
                if name.is_some() { node.cntrs.readerr(when.cntr).unwrap_or(0) } else { 0 };
            if ended.saturating_add(failed) < when.threshold || full.contains(&when.cntr) {
                continue;
            }
            match self.try_one(at) {
                Tried::Done => {
                    self.works.list.remove(at);
                    return true;
                }
                Tried::Again => full.push(when.cntr),
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
        let at = self.works.triggered(ep, context).ok_or(Error::NoData)?;
        let recv = matches!(self.works.list[at].op, Op::Recv(_));
        self.node().objects().fail_unposted(ep, context, recv, Error::Canceled)?;
        self.works.list.remove(at);
        Ok(())
    }

    fn try_one(&mut self, at: usize) -> Tried {
        let Self { engine, works, .. } = self;
        let Waiting { ep, op, .. } = &works.list[at];
        let node = engine.node_mut();
        let Some((ep, _)) = *ep else {
            // A counter that something waits for is not closed.
            let _ = match *op {
                Op::Set(cntr, value) => node.cntrs.set(cntr, value),
                Op::Add(cntr, value) => node.cntrs.add(cntr, value),
                _ => Ok(()),
            };
            return Tried::Done;
        };
        let (posted, context, recv) = match op {
            Op::Send(req) => (engine.post_send(ep, again(req)), req.context, false),
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
            Op::Set(..) | Op::Add(..) => return Tried::Done,
        };
        match posted {
            Ok(()) => Tried::Done,
            Err(Error::Again) => Tried::Again,
            Err(why) => match engine.node_mut().objects().fail_unposted(ep, context, recv, why) {
                Err(Error::Again) => Tried::Again,
                // Told, or the endpoint is closed and there is nobody to tell.
                _ => Tried::Done,
            },
        }
    }
}

fn again(req: &SendReq) -> SendReq {
    SendReq { buf: req.buf.again(), ..*req }
}

impl EpCommon {
    /// Says how conditions are read out of the contexts of this endpoint's operations. Without,
    /// `FI_TRIGGER` is refused.
    pub fn set_condition_of(&self, read: ConditionOf) {
        // Once for each endpoint: the same again changes nothing.
        let _ = self.condition_of.set(read);
    }

    /// Keeps an operation with `FI_TRIGGER`, whose flag has been taken away, until the condition
    /// that its context says is met.
    ///
    /// # Errors
    /// - [`Error::BadFlags`]: the endpoint has no `FI_TRIGGER`.
    /// - [`Error::OpBadState`]: the endpoint is not enabled.
    /// - [`Error::Invalid`], [`Error::NoSys`]: the context says no condition of this domain.
    /// - [`Error::MsgTooLong`]: it is injected, and too long for that. [`Error::NoMem`].
    pub(crate) fn trigger(&self, context: u64, mut op: Op) -> Result<()> {
        let read = self.condition_of.get().filter(|_| self.caps().contains(Caps::TRIGGER));
        let read = read.ok_or(Error::BadFlags)?;
        // SAFETY: `set_condition_of` was given what reads contexts of this endpoint's operations,
        // and this is one of an operation with `FI_TRIGGER`.
        let when = unsafe { read(context)? };
        let _injected = op.take_injected()?;
        let ep = Some((self.id, self.id));
        let waiting = Waiting { when, name: None, ep, completion: None, op, _injected };
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
        submit(&self.dom, &mut core, Waiting { when, name, ep, completion, op, _injected: None })
    }
}

fn submit(dom: &DomainRef, core: &mut Core, waiting: Waiting) -> Result<()> {
    if waiting.when.dom != dom.name() {
        return Err(Error::Invalid("the counter is of another domain"));
    }
    core.works.add(waiting);
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
                    let waiting = Waiting { when, name, ep, completion, op, _injected: None };
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
        let list = &mut core.works.list;
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
        let flushed = |w: &Waiting| w.name.is_some() && only.is_none_or(|c| w.when.cntr == c);
        self.dom.enter_control()?.works.list.retain(|w| !flushed(w));
        Ok(())
    }
}
