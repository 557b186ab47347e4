//! Completion queues (fi_cq(3)): one entry for each completed operation.

use std::fmt;
use std::os::fd::RawFd;
use std::sync::Arc;

use barewire_dataplane::idx::CqIdx;
use barewire_dataplane::node::{CqId, CqReader, NoReader, Node, Reader};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::{CqErr, Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, ProvErrno};
use barewire_driver::hint::cold;

use crate::buf::{Buf, Bufs, OpEnd, OpTable, Piece};
use crate::errno::{self, Error, Result};
use crate::flags::CqFlags;
use crate::inner::{Core, DomainRef, EntryReader, Shared};
use crate::lock::Guard;
use crate::wait::{Target, WaitObj, timeout_of};

/// Which fields of a completion are filled (`enum fi_cq_format`); the others are 0. Flags are
/// always filled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum CqFormat {
    /// `FI_CQ_FORMAT_UNSPEC`: all fields, as `Tagged`.
    #[default]
    Unspec,
    /// `FI_CQ_FORMAT_CONTEXT`: `op_context`.
    Context,
    /// `FI_CQ_FORMAT_MSG`: also `len`.
    Msg,
    /// `FI_CQ_FORMAT_DATA`: also `buf` (a [`Piece`] in the safe API) and `data`.
    Data,
    /// `FI_CQ_FORMAT_TAGGED`: also `tag`.
    Tagged,
}

impl CqFormat {
    /// Whether the format has every field.
    #[inline]
    fn is_whole(self) -> bool {
        matches!(self, Self::Unspec | Self::Tagged)
    }
}

/// When a blocking read wakes (`enum fi_cq_wait_cond`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum WaitCond {
    /// `FI_CQ_COND_NONE`: as soon as the queue has an entry.
    #[default]
    None,
    /// `FI_CQ_COND_THRESHOLD`: when the queue has as many entries as the call asks for, or an error
    /// entry.
    Threshold,
}

/// Attributes of a completion queue (`struct fi_cq_attr`).
#[derive(Clone, Copy, Debug, Default)]
pub struct CqAttr {
    /// Entries, rounded up to a power of two. 0 means 4,096, or the number of operations that the
    /// endpoints bound to the queue can have outstanding at once, if that is larger. Each posted
    /// operation reserves an entry: a full queue refuses posts with `FI_EAGAIN` and loses nothing.
    pub size: usize,
    /// The queue grows beyond `size` to what a size of 0 would give, if that is more.
    pub grows: bool,
    /// Which fields are filled.
    pub format: CqFormat,
    /// Wait object of the queue.
    pub wait_obj: WaitObj,
    /// When a blocking read wakes.
    pub wait_cond: WaitCond,
}

const DEFAULT_SIZE: usize = 4096;

/// One completed operation, with its buffers.
#[derive(Debug)]
pub struct Completion {
    /// The operation's context, unchanged; for an announced buffered message, the context by which
    /// a receive claims or discards it.
    pub op_context: u64,
    /// Kind of the operation, and `REMOTE_CQ_DATA`, `MULTI_RECV` and the like.
    pub flags: CqFlags,
    /// Bytes received; 0 for sends.
    pub len: usize,
    /// Remote CQ data if `flags` has `REMOTE_CQ_DATA`.
    pub data: u64,
    /// The tag of a tagged message.
    pub tag: u64,
    /// The sender, for `readfrom`; [`FI_ADDR_UNSPEC`] (`FI_ADDR_NOTAVAIL`) if it is not known or
    /// the endpoint has no `FI_SOURCE`.
    pub src: FiAddr,
    /// The buffers of the operation, given back.
    pub bufs: Bufs,
    /// The message, if it was placed in a multi-receive buffer.
    pub piece: Option<Piece>,
}

impl Default for Completion {
    fn default() -> Self {
        Self {
            op_context: 0,
            flags: CqFlags::empty(),
            len: 0,
            data: 0,
            tag: 0,
            src: FI_ADDR_UNSPEC,
            bufs: Bufs::None,
            piece: None,
        }
    }
}

impl Completion {
    /// Takes the operation's buffer, if it has one buffer.
    #[inline]
    pub fn take_buf(&mut self) -> Option<Buf> {
        self.bufs.take_one()
    }

    /// The bytes received: those of the piece, or the first `len` of the single buffer; else empty.
    pub fn bytes(&self) -> &[u8] {
        match (&self.piece, &self.bufs) {
            (Some(piece), _) => piece,
            (None, Bufs::One(buf)) => &buf[..self.len.min(buf.len())],
            _ => &[],
        }
    }

    fn new(cqe: &Cqe, format: CqFormat, ended: OpEnd) -> Self {
        let OpEnd { context, bufs, piece, .. } = ended;
        let cqe = trim(*cqe, format);
        Self {
            op_context: context,
            flags: cqe.flags,
            len: cqe.len as usize,
            data: cqe.data,
            tag: cqe.tag,
            src: cqe.src,
            bufs,
            piece,
        }
    }

    /// Fills itself from `cqe`, with the buffers that `ops` gives back. False if the completion is
    /// silent.
    #[inline(always)]
    fn fill(&mut self, ops: &mut OpTable, cqe: &Cqe, cq: &CqInner) -> bool {
        // The application has usually moved the buffers of the last completion out.
        if !matches!(self.bufs, Bufs::None) || self.piece.is_some() {
            self.drop_memory();
        }
        let ended = if cq.whole { ops.complete_one(cqe) } else { cold(None) };
        let Some((context, bufs)) = ended else {
            // A copy, so that the compiler can keep `cqe` itself in registers.
            let cqe = *cqe;
            return cold(self.fill_any(ops, &cqe, cq));
        };
        bufs.move_to(&mut self.bufs);
        (self.op_context, self.flags, self.src) = (context, cqe.flags, cqe.src);
        (self.len, self.data, self.tag) = (cqe.len as usize, cqe.data, cqe.tag);
        true
    }

    #[cold]
    #[inline(never)]
    fn drop_memory(&mut self) {
        (self.bufs, self.piece) = (Bufs::None, None);
    }

    /// The rest of [`fill`](Self::fill).
    #[inline(never)]
    fn fill_any(&mut self, ops: &mut OpTable, cqe: &Cqe, cq: &CqInner) -> bool {
        let ended = ops.complete(cqe, None);
        if ended.silent {
            return false;
        }
        *self = Self::new(cqe, cq.format, ended);
        true
    }
}

/// Result of [`CqInner::take_first`].
enum FirstRead {
    /// One entry was taken, and the queue is empty now.
    One,
    /// One entry was taken, and the queue has more.
    More,
    /// No shown entry was taken: [`CqInner::take_rest`] has to go on.
    Other,
    /// The queue is empty after a turn of the loop that moved `moved` frames.
    None { moved: usize },
}

/// Reads one entry of a queue of the safe API into `to`.
struct FirstReader<'a> {
    cq: &'a CqInner,
    to: &'a mut Completion,
    /// Set when an entry was taken: true if the entry is shown to the application.
    taken: &'a mut Option<bool>,
}

impl EntryReader for FirstReader<'_> {
    #[inline(always)]
    fn turn(self, engine: &mut Engine, ops: &mut OpTable) -> Option<usize> {
        engine.fast_turn(FirstWithOps { first: self, ops })
    }

    #[inline(always)]
    fn take_one(self, cq: CqId, node: &mut Node, ops: &mut OpTable) -> Option<bool> {
        node.cqs.take_one(cq, FirstWithOps { first: self, ops })
    }
}

/// [`FirstReader`], with the table of lent buffers.
struct FirstWithOps<'a, 'b> {
    first: FirstReader<'a>,
    ops: &'b mut OpTable,
}

impl Reader for FirstWithOps<'_, '_> {
    #[inline(always)]
    fn reads(&self, cq: CqIdx) -> bool {
        self.first.cq.id.is_at(cq)
    }

    #[inline(always)]
    fn take(self, cqe: &Cqe) {
        let FirstReader { cq, to, taken } = self.first;
        *taken = Some(to.fill(self.ops, cqe, cq));
    }
}

/// Clears the fields that the format does not have.
#[inline]
fn trim(mut cqe: Cqe, format: CqFormat) -> Cqe {
    if format.is_whole() {
        return cqe;
    }
    cqe.tag = 0;
    if format < CqFormat::Data {
        (cqe.data, cqe.buf) = (0, 0);
    }
    if format < CqFormat::Msg {
        cqe.len = 0;
    }
    cqe
}

/// One failed operation (`struct fi_cq_err_entry`), with its buffers.
#[derive(Debug)]
pub struct CompletionError {
    /// As for a success; `len` is the number of bytes placed. All fields are filled, whatever the
    /// format.
    pub entry: Completion,
    /// Bytes that did not fit, for [`Error::Trunc`].
    pub olen: usize,
    /// The error.
    pub err: Error,
    /// Whether the peer may have executed the operation.
    pub prov_errno: ProvErrno,
    /// The address of an unknown sender (`FI_SOURCE_ERR`), to be inserted by `Av::insert`.
    pub err_data: Option<EpAddr>,
}

impl fmt::Display for CompletionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "operation {:#x}: {} ({})", self.entry.op_context, self.err, prov(self))
    }
}

fn prov(e: &CompletionError) -> &'static str {
    prov_strerror(e.prov_errno as i32)
}

/// The text of a `prov_errno`.
pub(crate) fn prov_strerror(prov_errno: i32) -> &'static str {
    match prov_errno {
        0 => "nothing to add",
        1 => "the peer has not executed it",
        2 => "the peer may have executed it",
        3 => "the peer has no such endpoint",
        _ => "unknown provider error",
    }
}

/// The part that queues of the safe and of the raw API share.
pub(crate) struct CqInner {
    pub(crate) dom: DomainRef,
    pub(crate) id: CqId,
    pub(crate) raw: bool,
    format: CqFormat,
    /// The format has every field.
    whole: bool,
    cond: WaitCond,
    wait_obj: WaitObj,
    watch: Option<usize>,
}

impl CqInner {
    pub(crate) fn open(dom: &DomainRef, attr: CqAttr, raw: bool) -> Result<Arc<Self>> {
        let waits = attr.wait_obj.waits()?;
        let (size, grows) = match attr.size {
            0 => (DEFAULT_SIZE, true),
            size => (size, attr.grows),
        };
        if waits {
            dom.prepare_wait(attr.wait_obj)?;
        }
        let mut core = dom.enter_control()?;
        let id = match grows {
            true => core.node().cqs.open_to_fit(size)?,
            false => core.node().cqs.open(size)?,
        };
        let mut watch = None;
        if waits {
            match core.watch.open(Target::Cq(id), attr.wait_obj == WaitObj::Fd) {
                Ok(idx) => watch = Some(idx),
                Err(e) => {
                    core.node().objects().cq_close(id)?;
                    return Err(e);
                }
            }
        }
        drop(core);
        Ok(Arc::new(Self {
            dom: dom.clone(),
            id,
            raw,
            format: attr.format,
            whole: attr.format.is_whole(),
            cond: attr.wait_cond,
            wait_obj: attr.wait_obj,
            watch,
        }))
    }

    /// Takes up to `most` entries and lends each to `put`. Turns the loop if the queue is empty.
    #[inline(always)]
    pub(crate) fn read_cqes(&self, most: usize, put: impl FnMut(&Cqe)) -> Result<usize> {
        // Looked up once for all that follows.
        let shared: &Shared = &self.dom;
        let mut core = shared.enter()?;
        let read = self.cqes(shared, &mut core, most, put);
        leave_after_read(core, read)
    }

    /// Takes one entry, as [`read_cqes`](Self::read_cqes) does, of a queue that was just found
    /// empty. `None` means that an entry was taken: this result fits a register.
    #[inline(always)]
    pub(crate) fn read_one_of_turn(
        &self,
        mut core: Guard<'_, Core>,
        mut put: impl FnMut(&Cqe),
    ) -> Option<Result<usize>> {
        let (moved, taken) = self.turn(&self.dom, &mut core, &mut put);
        let reader = CqReader { cq: &self.id, put: &mut put };
        if taken || core.node().cqs.take_one(self.id, reader) == Some(true) {
            core.note_progress();
            core.leave();
            return None;
        }
        let read = self.cqes_after_turn(&mut core, moved, 1, put);
        Some(leave_after_read(core, read))
    }

    /// Takes entries; turns the loop first if the queue is empty.
    #[inline(always)]
    pub(crate) fn cqes(
        &self,
        shared: &Shared,
        core: &mut Core,
        most: usize,
        mut put: impl FnMut(&Cqe),
    ) -> Result<usize> {
        match core.node().cq_take(self.id, most, &mut put) {
            None => self.cqes_of_turn(shared, core, most, put),
            // An error entry is next: a turn of the loop would not change that.
            Some(0) => cold(Self::empty_reason(core, self.id, shared)),
            Some(n) => {
                core.note_entry_read(shared);
                Ok(n)
            }
        }
    }

    /// Takes entries after a turn of the loop.
    #[inline(always)]
    fn cqes_of_turn(
        &self,
        shared: &Shared,
        core: &mut Core,
        most: usize,
        mut put: impl FnMut(&Cqe),
    ) -> Result<usize> {
        if most == 0 {
            let moved = core.turn_here_if_manual(shared, NoReader);
            return cold(self.cqes_after_turn(core, moved, most, put));
        }
        let (moved, taken) = self.turn(shared, core, &mut put);
        if taken {
            core.note_progress();
            return Ok(1);
        }
        self.cqes_after_turn(core, moved, most, put)
    }

    /// Turns the loop for the empty queue. The first completion may go directly to `put`, without
    /// an entry in the queue. Returns the number of frames moved, and whether `put` was called.
    #[inline(always)]
    fn turn(&self, shared: &Shared, core: &mut Core, put: impl FnOnce(&Cqe)) -> (usize, bool) {
        let mut taken = false;
        let put = |cqe: &Cqe| {
            put(cqe);
            taken = true;
        };
        let moved = core.turn_here_if_manual(shared, CqReader { cq: &self.id, put });
        (moved, taken)
    }

    /// Takes entries after a turn of the loop that moved `moved` frames.
    #[inline(always)]
    fn cqes_after_turn(
        &self,
        core: &mut Core,
        moved: usize,
        most: usize,
        mut put: impl FnMut(&Cqe),
    ) -> Result<usize> {
        let mut taken = core.node().cq_take(self.id, most, &mut put);
        // The program may not poll again soon, so a second turn may follow.
        if taken.is_none() && core.note_moved(&self.dom, moved) {
            taken = core.node().cq_take(self.id, most, put);
        }
        match taken {
            None => self.empty_after_turn(core),
            Some(0) => cold(Self::empty_reason(core, self.id, &self.dom)),
            Some(n) => {
                core.note_progress();
                Ok(n)
            }
        }
    }

    /// Fast path: takes the next entry if nothing else has to be done. `None` if the queue is
    /// empty: the lock stays held for [`read_one_of_turn`](Self::read_one_of_turn). False, and
    /// nothing has happened, if [`read_cqes`](Self::read_cqes) has to do it.
    #[inline(always)]
    pub(crate) fn read_one(&self, put: impl FnOnce(&Cqe)) -> Option<bool> {
        let Some(mut core) = self.dom.lock.enter_open() else { return Some(false) };
        let taken = core.take_one(self.id, CqReader { cq: &self.id, put });
        if taken.is_none() {
            core.stay();
        } else {
            core.leave();
        }
        taken
    }

    /// The entry with only the fields of the queue's format.
    pub(crate) fn trimmed(&self, cqe: &Cqe) -> Cqe {
        trim(*cqe, self.format)
    }

    /// Ends a read that found the queue empty after a turn of the loop.
    #[inline(always)]
    fn empty_after_turn(&self, core: &mut Core) -> Result<usize> {
        // Most queues have no wait object, and this path then makes no call.
        if self.watch.is_some() {
            cold(());
            self.clear_wait_fd(core);
        }
        Err(Error::Again)
    }

    /// The reason why no entry was taken of queue `id`, which is not empty: an error entry, or no
    /// room.
    #[cold]
    #[inline(never)]
    fn empty_reason(core: &mut Core, id: CqId, shared: &Shared) -> Result<usize> {
        let why = core.node().cqs.empty_reason(id);
        match why {
            // A program that reads nothing but errors still makes progress.
            Err(Error::Avail) => core.note_entry_read(shared),
            // A read without room turns the loop: fi_cq(3), "fi_cq_read".
            Ok(_) => core.turn_if_manual(shared),
            Err(_) => {}
        }
        why
    }

    #[inline(never)]
    fn clear_wait_fd(&self, core: &mut Core) {
        if let Some(idx) = self.watch {
            let Core { engine, watch, .. } = core;
            watch.clear_fd(idx, engine.node());
        }
    }

    /// As [`Cq::read`].
    #[inline(always)]
    fn read(&self, out: &mut [Completion]) -> Result<usize> {
        // Looked up once for all that follows.
        let shared: &Shared = &self.dom;
        let mut core = shared.enter()?;
        let read = match self.take_first(shared, &mut core, out) {
            FirstRead::One => {
                core.leave();
                return Ok(1);
            }
            FirstRead::More => self.take_rest(&mut core, out, 1),
            FirstRead::Other => self.take_rest(&mut core, out, 0),
            FirstRead::None { moved } => self.take_after_turn(&mut core, out, moved),
        };
        leave_after_read(core, read)
    }

    /// Reads entries and takes their buffers out of the table; turns the loop if there is none.
    fn take(&self, core: &mut Core, out: &mut [Completion]) -> Result<usize> {
        match self.take_first(&self.dom, core, out) {
            FirstRead::One => Ok(1),
            FirstRead::More => self.take_rest(core, out, 1),
            FirstRead::Other => self.take_rest(core, out, 0),
            FirstRead::None { moved } => self.take_after_turn(core, out, moved),
        }
    }

    /// Takes the first entry with its buffers if it is a plain one. Turns the loop if the queue is
    /// empty.
    #[inline(always)]
    fn take_first(&self, shared: &Shared, core: &mut Core, out: &mut [Completion]) -> FirstRead {
        let [to, rest @ ..] = out else { return FirstRead::Other };
        let mut taken = None;
        match core.take_one(self.id, FirstReader { cq: self, to, taken: &mut taken }) {
            Some(true) if taken != Some(true) => cold(FirstRead::Other),
            Some(true) if rest.is_empty() || core.node().cqs.is_empty(self.id) => FirstRead::One,
            Some(true) => FirstRead::More,
            // An error entry is next, or the loop has to be turned.
            Some(false) => cold(FirstRead::Other),
            None => {
                let mut taken = None;
                let first = FirstReader { cq: self, to, taken: &mut taken };
                let moved = core.turn_here_if_manual(shared, first);
                let Some(shown) = taken else { return FirstRead::None { moved } };
                core.note_progress();
                if shown { FirstRead::One } else { cold(FirstRead::Other) }
            }
        }
    }

    /// The rest of [`take`](Self::take) after a turn that gave the reader no completion.
    #[inline(never)]
    fn take_after_turn(
        &self,
        core: &mut Core,
        out: &mut [Completion],
        moved: usize,
    ) -> Result<usize> {
        let mut one = Cqe::default();
        self.cqes_after_turn(core, moved, 1, |cqe| one = *cqe)?;
        let shown = out[0].fill_any(&mut core.ops, &one, self);
        self.take_rest(core, out, usize::from(shown))
    }

    /// The general rest of [`take`](Self::take), after the first `n` entries.
    #[inline(never)]
    fn take_rest(&self, core: &mut Core, out: &mut [Completion], mut n: usize) -> Result<usize> {
        if out.is_empty() {
            return self.cqes(&self.dom, core, 0, |_| {});
        }
        while n < out.len() {
            let mut one = [Cqe::default()];
            let read = if n == 0 {
                self.cqes(&self.dom, core, 1, |cqe| one[0] = *cqe)
            } else {
                core.node().cq_read(self.id, &mut one)
            };
            match read {
                Ok(_) => n += usize::from(out[n].fill_any(&mut core.ops, &one[0], self)),
                Err(_) if n > 0 => break,
                Err(e) => return Err(e),
            }
        }
        Ok(n)
    }

    pub(crate) fn readerr_raw(&self) -> Result<CqErr> {
        self.dom.enter()?.node().receiving().cq_readerr(self.id)
    }

    fn readerr(&self) -> Result<CompletionError> {
        let mut core = self.dom.enter()?;
        let e = core.node().receiving().cq_readerr(self.id)?;
        let ended = core.ops.complete(&e.cqe, Some(e.err));
        Ok(CompletionError {
            entry: Completion::new(&e.cqe, CqFormat::Tagged, ended),
            olen: e.olen as usize,
            err: e.err,
            prov_errno: e.prov_errno,
            err_data: e.err_data,
        })
    }

    /// Blocks until `read` succeeds, or fails otherwise than with [`Error::Again`].
    pub(crate) fn sread(
        &self,
        threshold: usize,
        timeout_ms: i32,
        mut read: impl FnMut(&Self, &mut Core) -> Result<usize>,
    ) -> Result<usize> {
        let Some(idx) = self.watch else { return Err(Error::NoSys) };
        let least = if self.cond == WaitCond::Threshold { threshold.max(1) } else { 1 };
        let attempt = |core: &mut Core| {
            if least > 1 && !self.has_threshold(core, least) {
                return None;
            }
            match read(self, core) {
                Err(Error::Again) => None,
                other => Some(other),
            }
        };
        let timeout = timeout_of(timeout_ms);
        match self.dom.wait_for(idx, timeout, attempt, |(ready, _)| (ready, 0))? {
            Some(answer) => answer,
            None => Err(Error::Again),
        }
    }

    /// Whether the queue has `least` entries or an error entry.
    fn has_threshold(&self, core: &mut Core, least: usize) -> bool {
        core.turn_if_manual(&self.dom);
        let ready = core.node().cqs.ready(self.id).unwrap_or(0);
        ready >= least || core.node().cqs.empty_reason(self.id) == Err(Error::Avail)
    }

    pub(crate) fn signal(&self) -> Result<()> {
        let Some(idx) = self.watch else { return Err(Error::NoSys) };
        self.dom.enter()?.watch.signal(idx);
        self.dom.sleep.notify();
        Ok(())
    }

    pub(crate) fn wait_fd(&self) -> Result<RawFd> {
        let idx = self.watch.filter(|_| self.wait_obj == WaitObj::Fd).ok_or(Error::NoSys)?;
        self.dom.enter_control()?.watch.fd(idx).ok_or(Error::NoSys)
    }

    /// Clears the descriptor if the queue is empty, so that a thread may sleep on it.
    pub(crate) fn trywait(&self) -> Result<()> {
        let Some(idx) = self.watch else { return Err(Error::NoSys) };
        let mut core = self.dom.enter()?;
        core.turn_if_manual(&self.dom);
        let Core { engine, watch, .. } = &mut *core;
        if watch.pending(idx, engine.node()) {
            watch.take_signal(idx);
            return Err(Error::Again);
        }
        watch.clear_fd(idx, engine.node());
        Ok(())
    }
}

impl Drop for CqInner {
    fn drop(&mut self) {
        // In an owned domain another thread cannot close the queue: it is then closed with the
        // domain.
        let Ok(mut core) = self.dom.lock.enter_to_close() else { return };
        if !self.raw {
            drain(&mut core, self.id);
        }
        if let Some(idx) = self.watch {
            core.watch.close(idx);
        }
        if let Err(e) = core.node().objects().cq_close(self.id) {
            // Endpoints keep their queues open, so none is bound any more.
            tracing::error!("closing a completion queue: {e}");
        }
    }
}

/// Releases the lock after a read. Yields the processor now and then after many empty reads.
#[inline(always)]
fn leave_after_read(mut core: Guard<'_, Core>, read: Result<usize>) -> Result<usize> {
    let in_vain = read.is_err() && core.note_empty_read();
    core.leave();
    if in_vain {
        cold(());
        std::thread::yield_now();
    }
    read
}

/// Frees the buffers of unread completions.
fn drain(core: &mut Core, id: CqId) {
    let mut one = [Cqe::default()];
    loop {
        match core.node().cq_read(id, &mut one) {
            Ok(n) if n > 0 => drop(core.ops.complete(&one[0], None)),
            Err(Error::Avail) => match core.node().receiving().cq_readerr(id) {
                Ok(e) => drop(core.ops.complete(&e.cqe, Some(e.err))),
                Err(_) => return,
            },
            _ => return,
        }
    }
}

/// A completion queue of the safe API (`struct fid_cq`).
///
/// Reading it turns the loop of a domain with manual progress.
pub struct Cq(pub(crate) Arc<CqInner>);

impl Cq {
    /// Takes at most `out.len()` completions, oldest first, and returns their number.
    ///
    /// Old contents of `out` are dropped. A read stops before an error entry. With an empty `out`
    /// nothing is taken and the loop is turned: 0 if the queue has a completion.
    ///
    /// # Errors
    /// - [`Error::Again`]: the queue is empty.
    /// - [`Error::Avail`]: the next entry is an error; [`readerr`](Self::readerr) takes it.
    ///
    /// Source: fi_cq(3), "fi_cq_read".
    #[doc(alias = "fi_cq_read")]
    #[inline]
    pub fn read(&self, out: &mut [Completion]) -> Result<usize> {
        self.0.read(out)
    }

    /// As [`read`](Self::read), and copies the senders to `src`, which is at least as long as
    /// `out`. [`FI_ADDR_UNSPEC`] stands for an unknown sender.
    ///
    /// # Errors
    /// As [`read`](Self::read). [`Error::Invalid`] if `src` is shorter; nothing was read.
    #[doc(alias = "fi_cq_readfrom")]
    pub fn readfrom(&self, out: &mut [Completion], src: &mut [FiAddr]) -> Result<usize> {
        if src.len() < out.len() {
            return Err(Error::Invalid("src_addr: shorter than the buffer"));
        }
        let n = self.read(out)?;
        copy_sources(&out[..n], src);
        Ok(n)
    }

    /// Takes the error entry at the head.
    ///
    /// # Errors
    /// [`Error::Again`]: the next entry is no error entry, or the queue is empty.
    ///
    /// Source: fi_cq(3), "fi_cq_readerr".
    #[doc(alias = "fi_cq_readerr")]
    pub fn readerr(&self) -> Result<CompletionError> {
        self.0.readerr()
    }

    /// As [`read`](Self::read), but sleeps up to `timeout_ms` milliseconds (negative: for ever)
    /// until the queue has an entry; with [`WaitCond::Threshold`], until it has `cond` entries or
    /// an error entry.
    ///
    /// # Errors
    /// As [`read`](Self::read); [`Error::Again`] when the time is over or the queue was
    /// [signalled](Self::signal). [`Error::NoSys`]: it was opened with `FI_WAIT_NONE`.
    #[doc(alias = "fi_cq_sread")]
    pub fn sread(&self, out: &mut [Completion], cond: usize, timeout_ms: i32) -> Result<usize> {
        self.0.sread(cond, timeout_ms, |cq, core| cq.take(core, out))
    }

    /// As [`sread`](Self::sread), with the senders.
    ///
    /// # Errors
    /// As [`sread`](Self::sread) and [`readfrom`](Self::readfrom).
    #[doc(alias = "fi_cq_sreadfrom")]
    pub fn sreadfrom(
        &self,
        out: &mut [Completion],
        src: &mut [FiAddr],
        cond: usize,
        timeout_ms: i32,
    ) -> Result<usize> {
        if src.len() < out.len() {
            return Err(Error::Invalid("src_addr: shorter than the buffer"));
        }
        let n = self.sread(out, cond, timeout_ms)?;
        copy_sources(&out[..n], src);
        Ok(n)
    }

    /// Makes the current blocking read, or else the next one, return `FI_EAGAIN`.
    ///
    /// # Errors
    /// [`Error::NoSys`]: the queue was opened with `FI_WAIT_NONE`.
    #[doc(alias = "fi_cq_signal")]
    pub fn signal(&self) -> Result<()> {
        self.0.signal()
    }

    /// The text of a `prov_errno`.
    #[doc(alias = "fi_cq_strerror")]
    pub fn strerror(&self, prov_errno: i32) -> &'static str {
        prov_strerror(prov_errno)
    }

    /// The eventfd of a queue opened with `FI_WAIT_FD` (`FI_GETWAIT`): readable while the queue may
    /// have an entry. Call `Fabric::trywait` before sleeping on it. It is closed with the queue.
    ///
    /// # Errors
    /// [`Error::NoSys`]: the queue was opened with another wait object.
    pub fn wait_fd(&self) -> Result<RawFd> {
        self.0.wait_fd()
    }

    /// Closes the queue. Unread entries are dropped and their buffers freed.
    ///
    /// # Errors
    /// [`Error::Busy`]: an endpoint is bound to the queue, which is given back.
    #[doc(alias = "fi_close")]
    pub fn close(self) -> std::result::Result<(), (Error, Self)> {
        if Arc::strong_count(&self.0) > 1 { Err((Error::Busy, self)) } else { Ok(()) }
    }
}

fn copy_sources(from: &[Completion], to: &mut [FiAddr]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = from.src;
    }
}

/// The text of an error entry's `err`.
pub fn strerror(err: Error) -> &'static str {
    errno::strerror(err.fi_errno())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_format_clears_what_it_does_not_have() {
        let full =
            Cqe { op_context: 1, flags: CqFlags::RECV, len: 2, buf: 3, data: 4, tag: 5, src: 6 };
        let fields = |f| {
            let e = trim(full, f);
            assert_eq!((e.op_context, e.flags, e.src), (1, CqFlags::RECV, 6));
            (e.len, e.buf, e.data, e.tag)
        };
        assert_eq!(fields(CqFormat::Context), (0, 0, 0, 0));
        assert_eq!(fields(CqFormat::Msg), (2, 0, 0, 0));
        assert_eq!(fields(CqFormat::Data), (2, 3, 4, 0));
        assert_eq!(fields(CqFormat::Tagged), (2, 3, 4, 5));
        assert_eq!(fields(CqFormat::Unspec), (2, 3, 4, 5));
    }
}
