//! Work that waits for a counter: fi_trigger(3).

use barewire::flags::op_flags;
use barewire::raw::{MsgKind, RawEndpoint, RawRecv, RawSend};
use barewire::work::{Condition, RawOp, RawWork};
use barewire::{AtomicKind, Cntr, Error, Result};

use crate::abi::*;
use crate::atomic;
use crate::cntr::CntrObject;
use crate::domain::Domain;
use crate::ep::{EpObject, number};
use crate::msg::list;
use crate::object::class_of;
use crate::rma;

/// The condition in the context of an operation with `FI_TRIGGER`.
///
/// # Safety
/// It is the address of a `struct fi_triggered_context`, or 0.
pub(crate) unsafe fn condition_of(context: u64) -> Result<Condition> {
    let at: *const TriggeredContext = std::ptr::with_exposed_provenance(context as usize);
    // SAFETY: the caller's promise.
    let said = unsafe { at.as_ref() }.ok_or(Error::Invalid("context: NULL"))?;
    if said.event_type != FI_TRIGGER_THRESHOLD {
        return Err(Error::NoSys);
    }
    // SAFETY: as above; the type says which member of the union it is, which is no longer than
    // the place.
    let when = unsafe { (&raw const said.trigger).cast::<TriggerThreshold>().read() };
    // SAFETY: as above; the counter is open as long as something waits for it.
    Ok(unsafe { counter(when.cntr)? }.reaching(when.threshold as u64))
}

/// # Safety
/// A counter that is open, or NULL.
unsafe fn counter<'a>(at: *mut FidCntr) -> Result<&'a Cntr> {
    // SAFETY: the caller's promise.
    unsafe {
        if class_of(at.cast())? != FI_CLASS_CNTR {
            return Err(Error::Invalid("cntr: not a counter"));
        }
        Ok(&CntrObject::of(at)?.cntr)
    }
}

/// # Safety
/// An endpoint that is open, or NULL.
unsafe fn endpoint<'a>(at: *mut FidEp) -> Result<&'a RawEndpoint> {
    // SAFETY: the caller's promise.
    unsafe {
        match class_of(at.cast())? {
            FI_CLASS_EP | FI_CLASS_TX_CTX | FI_CLASS_RX_CTX | FI_CLASS_SRX_CTX => {
                Ok(&EpObject::of(at)?.ep)
            }
            _ => Err(Error::Invalid("ep: not an endpoint")),
        }
    }
}

/// # Safety
/// The structure that the type of the work says is there, or NULL.
unsafe fn given<'a, T>(at: P) -> Result<&'a T> {
    // SAFETY: the caller's promise.
    unsafe { at.cast::<T>().as_ref() }.ok_or(Error::Invalid("op: NULL"))
}

/// The parts of a request besides its operation.
struct Post<'a> {
    domain: &'a Domain,
    name: u64,
    when: Condition,
    completion: Option<&'a Cntr>,
}

impl Post<'_> {
    /// # Safety
    /// As [`queue`], of the operation.
    unsafe fn post(self, op: RawOp<'_>) -> Result<()> {
        let Self { domain, name, when, completion } = self;
        // SAFETY: the caller's promise is that of the raw API.
        unsafe { domain.domain.raw_queue_work(RawWork { name, when, completion, op }) }
    }
}

/// `FI_QUEUE_WORK`.
///
/// # Safety
/// The request is whole, and what it names stays as fi_trigger(3) says.
pub(crate) unsafe fn queue(domain: &Domain, work: *const DeferredWork) -> Result<()> {
    // SAFETY: the caller's promise; copies, as the program may use the request anew for another.
    unsafe {
        let said = work.as_ref().ok_or(Error::Invalid("work: NULL"))?;
        let when = counter(said.triggering_cntr)?.reaching(said.threshold);
        let completion = said.completion_cntr;
        let completion = if completion.is_null() { None } else { Some(counter(completion)?) };
        let post = Post { domain, name: name(work), when, completion };
        match said.op_type {
            FI_OP_SEND | FI_OP_RECV => message(said, post),
            FI_OP_TSEND | FI_OP_TRECV => tagged(said, post),
            FI_OP_READ | FI_OP_WRITE => {
                let o = given::<OpRma>(said.op)?;
                let ep = endpoint(o.ep)?;
                rma::on_msg(&o.msg, o.flags, |call, flags| {
                    let read = said.op_type == FI_OP_READ;
                    post.post(if read {
                        RawOp::Read(ep, call, flags)
                    } else {
                        RawOp::Write(ep, call, flags)
                    })
                })
            }
            FI_OP_ATOMIC | FI_OP_FETCH_ATOMIC | FI_OP_COMPARE_ATOMIC => atomics(said, post),
            FI_OP_CNTR_SET | FI_OP_CNTR_ADD => {
                let o = given::<OpCntr>(said.op)?;
                let cntr = counter(o.cntr)?;
                let set = said.op_type == FI_OP_CNTR_SET;
                post.post(if set { RawOp::Set(cntr, o.value) } else { RawOp::Add(cntr, o.value) })
            }
            _ => Err(Error::NoSys),
        }
    }
}

/// `FI_CANCEL_WORK`.
pub(crate) fn cancel(domain: &Domain, work: *const DeferredWork) -> Result<()> {
    domain.domain.raw_cancel_work(name(work))
}

/// `FI_FLUSH_WORK`: of the counter that the request names, or all.
///
/// # Safety
/// The request is whole, or NULL.
pub(crate) unsafe fn flush(domain: &Domain, work: *const DeferredWork) -> Result<()> {
    // SAFETY: the caller's promise.
    let cntr = unsafe { work.as_ref() }.map_or(std::ptr::null_mut(), |w| w.triggering_cntr);
    // SAFETY: as above.
    let cntr = if cntr.is_null() { None } else { Some(unsafe { counter(cntr)? }) };
    domain.domain.raw_flush_work(cntr)
}

fn name(work: *const DeferredWork) -> u64 {
    work.expose_provenance() as u64
}

/// # Safety
/// As [`queue`].
unsafe fn message(said: &DeferredWork, post: Post<'_>) -> Result<()> {
    let kind = MsgKind::Msg;
    // SAFETY: the caller's promise.
    unsafe {
        let o = given::<OpMsg>(said.op)?;
        let (m, ep, flags) = (&o.msg, endpoint(o.ep)?, op_flags(o.flags)?);
        let (iov, context) = (list(m.msg_iov, m.iov_count)?, number(m.context));
        post.post(if said.op_type == FI_OP_SEND {
            let (dest, tag, data) = (m.addr, 0, m.data);
            RawOp::Send(ep, RawSend { kind, iov, dest, tag, data, context }, flags)
        } else {
            let (src, tag, ignore) = (m.addr, 0, 0);
            RawOp::Recv(ep, RawRecv { kind, iov, src, tag, ignore, context }, flags)
        })
    }
}

/// # Safety
/// As [`queue`].
unsafe fn tagged(said: &DeferredWork, post: Post<'_>) -> Result<()> {
    let kind = MsgKind::Tagged;
    // SAFETY: the caller's promise.
    unsafe {
        let o = given::<OpTagged>(said.op)?;
        let (m, ep, flags) = (&o.msg, endpoint(o.ep)?, op_flags(o.flags)?);
        let (iov, context) = (list(m.msg_iov, m.iov_count)?, number(m.context));
        post.post(if said.op_type == FI_OP_TSEND {
            let (dest, tag, data) = (m.addr, m.tag, m.data);
            RawOp::Send(ep, RawSend { kind, iov, dest, tag, data, context }, flags)
        } else {
            let (src, tag, ignore) = (m.addr, m.tag, m.ignore);
            RawOp::Recv(ep, RawRecv { kind, iov, src, tag, ignore, context }, flags)
        })
    }
}

/// # Safety
/// As [`queue`].
unsafe fn atomics(said: &DeferredWork, post: Post<'_>) -> Result<()> {
    let none = atomic::EMPTY;
    // SAFETY: the caller's promise.
    unsafe {
        let (kind, ep, msg, lists, flags) = match said.op_type {
            FI_OP_FETCH_ATOMIC => {
                let o = given::<OpFetchAtomic>(said.op)?;
                let results = (o.fetch.msg_iov.cast_const(), o.fetch.iov_count);
                (AtomicKind::Fetch, o.ep, &o.msg, (none, results), o.flags)
            }
            FI_OP_COMPARE_ATOMIC => {
                let o = given::<OpCompareAtomic>(said.op)?;
                let results = (o.fetch.msg_iov.cast_const(), o.fetch.iov_count);
                let compares = (o.compare.msg_iov, o.compare.iov_count);
                (AtomicKind::Compare, o.ep, &o.msg, (compares, results), o.flags)
            }
            _ => {
                let o = given::<OpAtomicWork>(said.op)?;
                (AtomicKind::Base, o.ep, &o.msg, (none, none), o.flags)
            }
        };
        let ep = endpoint(ep)?;
        atomic::on_msg(kind, msg, lists, flags, |call, flags| {
            post.post(RawOp::Atomic(ep, call, flags))
        })
    }
}
