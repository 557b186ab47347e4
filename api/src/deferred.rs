//! The table of [`crate::work`]: operations that wait for a counter, ready to be posted.

use barewire_dataplane::node::{
    AtomicReq, CntrId, EpId, Node, ReadReq, RecvReq, SendReq, WriteReq,
};
use barewire_dataplane::proto::atomic::AtomicOp;
use barewire_driver::mem::{IoBuf, Scratch};

use crate::errno::{Error, Result};
use crate::flags::OpFlags;

/// The condition that a counter has reached a threshold; see [`crate::Cntr::reaching`].
#[derive(Clone, Copy, Debug)]
pub struct Condition {
    /// Identifies the counter's domain: the address of its shared part.
    pub(crate) dom: usize,
    pub(crate) cntr: CntrId,
    pub(crate) threshold: u64,
}

/// Reads the condition out of the `struct fi_triggered_context` that the context of an operation
/// with `FI_TRIGGER` points to.
///
/// # Errors
/// [`Error::Invalid`], [`Error::NoSys`]: the context has no supported condition.
pub type ConditionReader = unsafe fn(context: u64) -> Result<Condition>;

/// An operation as it will be posted.
#[derive(Debug)]
pub(crate) enum Op {
    Send(SendReq),
    Recv(RecvReq),
    Write(WriteReq),
    Read(ReadReq),
    Atomic(Box<AtomicReq>),
    Set(CntrId, u64),
    Add(CntrId, u64),
}

impl Op {
    /// Context of its completion; `None` for an operation on a counter.
    fn context(&self) -> Option<u64> {
        Some(match self {
            Self::Send(req) => req.context,
            Self::Recv(req) => req.context,
            Self::Write(req) => req.context,
            Self::Read(req) => req.context,
            Self::Atomic(req) => req.context,
            Self::Set(..) | Self::Add(..) => return None,
        })
    }

    /// Copies the bytes of an operation with `FI_INJECT`, since its caller may reuse that memory
    /// when the call returns. Returns the copy, which the operation reads and which has to live as
    /// long as it; `None` for every other operation.
    ///
    /// # Errors
    /// [`Error::MsgTooLong`]: more bytes than the inject size. [`Error::NoMem`].
    pub(crate) fn take_injected(&mut self) -> Result<Option<Scratch>> {
        let (flags, parts) = match self {
            Self::Send(req) => (req.flags, [Some(&mut req.buf), None]),
            Self::Write(req) => (req.flags, [Some(&mut req.buf), None]),
            Self::Atomic(req) if req.op != AtomicOp::Read as u32 => {
                let AtomicReq { flags, operand, compare, .. } = &mut **req;
                (*flags, [Some(operand), Some(compare)])
            }
            _ => return Ok(None),
        };
        if flags.contains(OpFlags::INJECT) { take_copy(parts).map(Some) } else { Ok(None) }
    }
}

/// Copies the memory of each part, of which no byte is used any more, and lends the copy in its
/// place.
fn take_copy(parts: [Option<&mut IoBuf>; 2]) -> Result<Scratch> {
    let parts = parts.into_iter().flatten();
    let copy = Scratch::new(2 * Node::INJECT_SIZE).ok_or(Error::NoMem)?;
    for (at, part) in (0..).step_by(Node::INJECT_SIZE).zip(parts) {
        let len = part.len();
        if len > Node::INJECT_SIZE {
            return Err(Error::MsgTooLong);
        }
        part.copy_to(0, &copy.io(), at, len);
        *part = copy.io().share(at, len);
    }
    Ok(copy)
}

/// An operation that waits for a counter.
#[derive(Debug)]
pub(crate) struct DeferredOp {
    pub(crate) when: Condition,
    /// Name of deferred work. `None` for a triggered operation, for which only successes of the
    /// counter count.
    pub(crate) name: Option<u64>,
    /// The endpoint that it is posted to, and the endpoint whose close drops it.
    pub(crate) ep: Option<(EpId, EpId)>,
    pub(crate) completion: Option<CntrId>,
    pub(crate) op: Op,
    /// The memory that an injected operation reads.
    pub(crate) _injected: Option<Scratch>,
}

/// All waiting operations of a domain.
#[derive(Debug, Default)]
pub(crate) struct DeferredTable {
    /// Sorted by threshold, then by submission.
    pub(crate) list: Vec<DeferredOp>,
}

impl DeferredTable {
    #[inline(always)]
    pub(crate) fn any(&self) -> bool {
        !self.list.is_empty()
    }

    pub(crate) fn add(&mut self, new: DeferredOp) {
        let at = self.list.partition_point(|old| old.when.threshold <= new.when.threshold);
        self.list.insert(at, new);
    }

    /// Whether an operation waits for a counter, changes it, or will be counted by it.
    pub(crate) fn uses(&self, cntr: CntrId) -> bool {
        let changes = |op: &Op| matches!(op, Op::Set(c, _) | Op::Add(c, _) if *c == cntr);
        self.list
            .iter()
            .any(|w| w.when.cntr == cntr || w.completion == Some(cntr) || changes(&w.op))
    }

    /// Index of the first triggered operation of endpoint `ep` with this context.
    pub(crate) fn triggered(&self, ep: EpId, context: u64) -> Option<usize> {
        let its = |w: &DeferredOp| w.name.is_none() && w.ep.is_some_and(|(_, of)| of == ep);
        self.list.iter().position(|w| its(w) && w.op.context() == Some(context))
    }

    /// Drops the operations of endpoint `ep`, which is closed.
    pub(crate) fn end(&mut self, ep: EpId) {
        self.list.retain(|w| w.ep.is_none_or(|(_, of)| of != ep));
    }
}
