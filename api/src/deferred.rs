//! Operations that wait for a counter, ready to be posted: the table of [`crate::work`].

use barewire_dataplane::node::{
    AtomicReq, CntrId, EpId, Node, ReadReq, RecvReq, SendReq, WriteReq,
};
use barewire_dataplane::proto::atomic::AtomicOp;
use barewire_driver::mem::{IoBuf, Scratch};

use crate::errno::{Error, Result};
use crate::flags::OpFlags;

/// That a counter has reached a threshold; see [`crate::Cntr::reaching`].
#[derive(Clone, Copy, Debug)]
pub struct Condition {
    /// Address of the shared part of the counter's domain, to be compared.
    pub(crate) dom: usize,
    pub(crate) cntr: CntrId,
    pub(crate) threshold: u64,
}

/// Reads the condition out of the `struct fi_triggered_context` that the context of an operation
/// with `FI_TRIGGER` points to.
///
/// # Errors
/// [`Error::Invalid`], [`Error::NoSys`]: there is none that can be waited for.
pub type ConditionOf = unsafe fn(context: u64) -> Result<Condition>;

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
    /// What its completion says as context; none of an operation on a counter.
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

    /// Reads what an operation with `FI_INJECT` sends, since its caller may use that memory anew
    /// when the call returns. Returns the copy that the operation reads from then on, to be kept
    /// as long as it waits; `None` for every other operation.
    ///
    /// # Errors
    /// [`Error::MsgTooLong`]: more bytes than an inject has. [`Error::NoMem`].
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

/// What waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    pub(crate) when: Condition,
    /// The name of deferred work, none of a triggered operation, which failures of the counter do
    /// not release.
    pub(crate) name: Option<u64>,
    /// The endpoint it is posted to, and that which it ends with.
    pub(crate) ep: Option<(EpId, EpId)>,
    pub(crate) completion: Option<CntrId>,
    pub(crate) op: Op,
    /// The memory that an injected operation reads.
    pub(crate) _injected: Option<Scratch>,
}

/// All that waits in a domain.
#[derive(Debug, Default)]
pub(crate) struct Works {
    /// By thresholds, and in the order of submission where they are the same.
    pub(crate) list: Vec<Waiting>,
}

impl Works {
    #[inline(always)]
    pub(crate) fn any(&self) -> bool {
        !self.list.is_empty()
    }

    pub(crate) fn add(&mut self, new: Waiting) {
        let at = self.list.partition_point(|old| old.when.threshold <= new.when.threshold);
        self.list.insert(at, new);
    }

    /// Whether something waits for a counter, or will be counted by it.
    pub(crate) fn uses(&self, cntr: CntrId) -> bool {
        let changes = |op: &Op| matches!(op, Op::Set(c, _) | Op::Add(c, _) if *c == cntr);
        self.list
            .iter()
            .any(|w| w.when.cntr == cntr || w.completion == Some(cntr) || changes(&w.op))
    }

    /// The place of the first triggered operation of endpoint `ep` with this context.
    pub(crate) fn triggered(&self, ep: EpId, context: u64) -> Option<usize> {
        let its = |w: &Waiting| w.name.is_none() && w.ep.is_some_and(|(_, of)| of == ep);
        self.list.iter().position(|w| its(w) && w.op.context() == Some(context))
    }

    /// Endpoint `ep` is closed.
    pub(crate) fn end(&mut self, ep: EpId) {
        self.list.retain(|w| w.ep.is_none_or(|(_, of)| of != ep));
    }
}
