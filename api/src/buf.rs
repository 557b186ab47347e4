//! Owned buffers, and the table that owns them while an operation uses them.
//!
//! An operation of the safe API takes its buffers by value and its completion gives them back. In
//! between the domain owns them (`OpTable`). So no act of the application (dropping the endpoint,
//! leaking a completion, ending a thread) can free memory that the dataplane may still write.
//!
//! Invariants of this file, on which every `unsafe` block in it rests:
//! - the bytes of a [`Buf`] are reached through it alone: it is not `Clone`, and lends them by
//!   borrow;
//! - an `IoBuf` made by `OpTable::lend` names bytes of buffers that stay in the table until the
//!   operation ends. The node drops its `IoBuf` before it writes the completion that ends it, or
//!   when it refuses the post, and only these two remove the buffers from the table;
//! - one made by `OpTable::lend_if` names bytes of a buffer that goes to the table, to stay there
//!   in the same way, once the node has taken the operation; if it has not, it has dropped the
//!   `IoBuf`;
//! - an `IoBuf` made by `RegionBufs::new` names bytes of buffers that stay until the node has
//!   closed the region and dropped it;
//! - bytes of a [`SharedBuf`] that a completion has announced ([`Piece`]) are never written again
//!   while the piece lives: the node places messages one after the other, and a buffer with live
//!   pieces is not lent a second time.

use std::fmt;
use std::mem::{self, ManuallyDrop, MaybeUninit};
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;
use std::sync::Arc;

use barewire_dataplane::flags::{CqFlags, OpFlags};
use barewire_dataplane::types::Cqe;
use barewire_driver::hint::cold;
use barewire_driver::mem::{IOV_LIMIT, IoBuf, Span};

use crate::errno::{Error, Result};

/// Bytes on the heap that a send reads or a receive fills: a `Vec<u8>` whose memory never moves.
///
/// Conversion from and to a `Vec` copies nothing. The spare capacity of the `Vec` is zeroed and can
/// be used as well ([`set_len`](Self::set_len)).
pub struct Buf {
    base: NonNull<u8>,
    /// Bytes that an operation uses, at most `capacity`.
    len: usize,
    /// Allocated bytes. All of them are initialised.
    capacity: usize,
}

// SAFETY: a `Buf` owns its bytes like a `Vec<u8>`, which is `Send` and `Sync`.
unsafe impl Send for Buf {}
// SAFETY: as above.
unsafe impl Sync for Buf {}

impl Buf {
    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        vec![0; len].into()
    }

    /// Sets the number of bytes that the next operation uses.
    ///
    /// # Errors
    /// [`Error::Invalid`] if the buffer is shorter. Nothing changed.
    pub fn set_len(&mut self, len: usize) -> Result<()> {
        if len > self.capacity {
            return Err(Error::Invalid("length: the buffer is shorter"));
        }
        self.len = len;
        Ok(())
    }

    /// The largest length that [`set_len`](Self::set_len) takes.
    pub fn len_max(&self) -> usize {
        self.capacity
    }

    /// The bytes as a vector again.
    pub fn into_vec(self) -> Vec<u8> {
        let b = ManuallyDrop::new(self);
        // SAFETY: base and capacity came from a `Vec<u8>` that was taken apart, and all bytes are
        // initialised, of which `len` are some; `b` is not dropped.
        unsafe { Vec::from_raw_parts(b.base.as_ptr(), b.len, b.capacity) }
    }

    fn span(&self) -> Span {
        // SAFETY: the caller puts `self` into the table, where it stays until the operation is
        // over: see the invariants of the file.
        unsafe { Span::from_raw(self.base.as_ptr(), self.len) }
    }
}

impl From<Vec<u8>> for Buf {
    fn from(v: Vec<u8>) -> Self {
        let mut v = ManuallyDrop::new(v);
        let (len, capacity) = (v.len(), v.capacity());
        v.spare_capacity_mut().fill(MaybeUninit::new(0));
        // SAFETY: a vector's pointer is never null.
        let base = unsafe { NonNull::new_unchecked(v.as_mut_ptr()) };
        Self { base, len, capacity }
    }
}

impl From<&[u8]> for Buf {
    fn from(bytes: &[u8]) -> Self {
        bytes.to_vec().into()
    }
}

impl Default for Buf {
    #[inline]
    fn default() -> Self {
        Self { base: NonNull::dangling(), len: 0, capacity: 0 }
    }
}

impl Drop for Buf {
    fn drop(&mut self) {
        // SAFETY: the parts of a `Vec` that was taken apart in `From`, or of an empty one; the
        // vector made here is the only owner and frees the memory.
        drop(unsafe { Vec::from_raw_parts(self.base.as_ptr(), self.len, self.capacity) });
    }
}

impl Deref for Buf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes, owned by `self`; an operation that writes them
        // owns the `Buf`, so nobody writes while it is borrowed here.
        unsafe { slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }
}

impl DerefMut for Buf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` is the only borrow.
        unsafe { slice::from_raw_parts_mut(self.base.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Buf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Buf({} bytes)", self.len)
    }
}

/// A buffer for many messages (`FI_MULTI_RECV`): each completion hands out its [`Piece`] while the
/// rest still receives.
#[derive(Debug)]
pub struct SharedBuf(Arc<Buf>);

impl SharedBuf {
    /// The buffer, if no [`Piece`] of it is alive.
    ///
    /// # Errors
    /// The shared buffer itself, if a piece is alive.
    pub fn into_buf(self) -> std::result::Result<Buf, Self> {
        Arc::try_unwrap(self.0).map_err(Self)
    }

    /// Whether no [`Piece`] of it is alive. Only then it can be posted.
    pub fn is_unique(&mut self) -> bool {
        // Not `strong_count`: this one also orders what the last piece's reader did before us.
        Arc::get_mut(&mut self.0).is_some()
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.0.len == 0
    }
}

impl From<Buf> for SharedBuf {
    fn from(buf: Buf) -> Self {
        Self(Arc::new(buf))
    }
}

/// One message in a [`SharedBuf`].
#[derive(Clone)]
pub struct Piece {
    buf: Arc<Buf>,
    offset: usize,
    len: usize,
}

impl Piece {
    /// Where the message starts in its buffer, bytes.
    pub fn offset(&self) -> usize {
        self.offset
    }
}

impl Deref for Piece {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `piece_of` checked that the range lies inside the initialised bytes of `buf`,
        // which the `Arc` keeps alive. Other bytes of the buffer may be written meanwhile, these
        // are not: see the invariants of the file.
        unsafe { slice::from_raw_parts(self.buf.base.as_ptr().add(self.offset), self.len) }
    }
}

impl fmt::Debug for Piece {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Piece({}..{})", self.offset, self.offset + self.len)
    }
}

/// The memory of one operation.
#[derive(Debug, Default)]
pub enum Bufs {
    /// None, for an empty message and for operations that move no data.
    #[default]
    None,
    /// One buffer.
    One(Buf),
    /// A scatter or gather list of at most 8.
    Many(Vec<Buf>),
    /// A buffer for many messages.
    Shared(SharedBuf),
}

impl From<()> for Bufs {
    fn from((): ()) -> Self {
        Self::None
    }
}

impl From<Buf> for Bufs {
    fn from(b: Buf) -> Self {
        Self::One(b)
    }
}

impl From<Vec<Buf>> for Bufs {
    fn from(v: Vec<Buf>) -> Self {
        Self::Many(v)
    }
}

impl From<SharedBuf> for Bufs {
    fn from(b: SharedBuf) -> Self {
        Self::Shared(b)
    }
}

impl Bufs {
    /// The buffer of [`Bufs::One`].
    pub fn into_one(self) -> Option<Buf> {
        if let Self::One(b) = self { Some(b) } else { None }
    }

    /// Takes the buffer of [`Bufs::One`] and leaves [`Bufs::None`].
    #[inline]
    pub(crate) fn take_one(&mut self) -> Option<Buf> {
        let Self::One(buf) = self else { return None };
        // SAFETY: the buffer moves out: what it leaves is written over and not dropped.
        unsafe {
            let buf = ptr::read(buf);
            ptr::write(self, Self::None);
            Some(buf)
        }
    }

    /// Moves the buffers to `slot`, which holds none and is not dropped, and leaves [`Bufs::None`].
    #[inline(always)]
    pub(crate) fn move_to(&mut self, slot: &mut Self) {
        debug_assert!(matches!(slot, Self::None));
        // SAFETY: two places, of which each is borrowed alone; the original is written over and not
        // dropped. (A copy of the whole in one step, not by way of a value.)
        unsafe {
            ptr::copy_nonoverlapping(self, slot, 1);
            ptr::write(self, Self::None);
        }
    }

    /// The list of [`Bufs::Many`].
    pub fn into_many(self) -> Option<Vec<Buf>> {
        if let Self::Many(v) = self { Some(v) } else { None }
    }

    /// The buffer of [`Bufs::Shared`].
    pub fn into_shared(self) -> Option<SharedBuf> {
        if let Self::Shared(b) = self { Some(b) } else { None }
    }

    /// Bytes that an operation uses.
    pub(crate) fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::One(b) => b.len,
            Self::Many(v) => v.iter().map(|b| b.len).sum(),
            Self::Shared(b) => b.len(),
        }
    }

    fn io(&mut self) -> Result<IoBuf> {
        match self {
            Self::None => Ok(IoBuf::EMPTY),
            Self::One(b) => Ok(IoBuf::one(b.span())),
            Self::Shared(b) => {
                if b.is_unique() {
                    Ok(IoBuf::one(b.0.span()))
                } else {
                    Err(Error::Busy)
                }
            }
            Self::Many(v) if v.len() > IOV_LIMIT => Err(Error::Invalid("iov_count: above 8")),
            Self::Many(v) => {
                let mut io = IoBuf::EMPTY;
                for b in v {
                    // A span cannot fail to fit: the count was checked, and the lengths of buffers
                    // in one address space do not overflow.
                    assert!(io.push(b.span()));
                }
                Ok(io)
            }
        }
    }
}

/// The error of a refused call, with the buffers that it did not take.
#[derive(Debug, thiserror::Error)]
#[error("{error}")]
pub struct PostError {
    /// The reason. Nothing was queued.
    pub error: Error,
    /// The caller's buffers.
    pub bufs: Bufs,
}

/// Result of a call that posts an operation.
pub type PostResult = std::result::Result<(), PostError>;

impl From<PostError> for Error {
    fn from(r: PostError) -> Self {
        r.error
    }
}

/// Key of an operation of the safe API, which the node carries as the operation's context: a slot
/// index, 31 bits of generation above it, and bit 63, which tells it from an address and from a
/// context of the node's own. A key is unique until the generation wraps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct OpKey(pub(crate) u64);

const KEY_BIT: u64 = 1 << 63;

impl OpKey {
    /// The key of a slot that was never used.
    fn fresh(idx: u32) -> Self {
        Self(KEY_BIT | u64::from(idx))
    }

    fn idx(self) -> u32 {
        self.0 as u32
    }

    /// The same slot, one generation later.
    #[inline(always)]
    fn next(self) -> Self {
        Self(self.0.wrapping_add(1 << 32) | KEY_BIT)
    }
}

/// A slot of the operation table: the part of an operation that the node does not know.
#[derive(Debug)]
struct Op {
    /// Key of the operation; of a free slot, the key of its next operation.
    key: OpKey,
    /// The next free slot while this one is.
    next: u32,
    /// Number of the endpoint object, for `cancel` and `claim`.
    ep: u32,
    kind: OpKind,
    /// Context of the application.
    context: u64,
    /// The claimed message, of kind [`OpKind::Claim`].
    claims: Option<Claim>,
    /// None while the slot is free.
    bufs: Bufs,
}

/// A message that a receive claims.
#[derive(Clone, Copy, Debug)]
struct Claim {
    /// Context under which the node announced the message. The completion carries it.
    announced: u64,
    /// Kind of the receive.
    kind: OpKind,
}

/// How a completion changes the operation's slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OpKind {
    /// The slot is free.
    Free,
    /// The first completion ends it.
    Once,
    /// As `Once`, but success is not shown (`FI_SELECTIVE_COMPLETION` without `FI_COMPLETION`).
    Silent,
    /// Ends with the completion that says `FI_MULTI_RECV`.
    Multi,
    /// A peek with `FI_CLAIM`: success keeps the key for the claim that follows.
    Reserve,
    /// Reserved by a peek, nothing posted.
    Reserved,
    /// Claims an announced message; [`Claim`] has the kind of the receive.
    Claim,
}

impl Op {
    /// A free slot, the last one.
    fn fresh(idx: u32) -> Self {
        Self {
            key: OpKey::fresh(idx),
            next: NO_OP,
            ep: 0,
            kind: OpKind::Free,
            context: 0,
            claims: None,
            bufs: Bufs::None,
        }
    }

    fn in_use(&self) -> bool {
        self.kind != OpKind::Free
    }

    /// Takes a slot that is free.
    #[inline(always)]
    fn begin(&mut self, (ep, kind, context): (u32, OpKind, u64), bufs: Bufs) -> OpKey {
        debug_assert!(!self.in_use() && matches!(self.bufs, Bufs::None));
        (self.ep, self.kind, self.context) = (ep, kind, context);
        // The old value is `Bufs::None`: forgetting it spares the check of `drop`.
        mem::forget(mem::replace(&mut self.bufs, bufs));
        self.key
    }

    /// Puts the slot at the head of the free list. The caller still has to take its buffers.
    #[inline(always)]
    fn free(&mut self, free: &mut u32) {
        self.next = mem::replace(free, self.key.idx());
        (self.key, self.kind) = (self.key.next(), OpKind::Free);
    }
}

/// The pending operations of the safe API. Its memory is allocated once and never grows.
pub(crate) struct OpTable {
    ops: Vec<Op>,
    free: u32,
    room: usize,
    /// Operations that claim an announced message. While it is 0, completions skip the search.
    claiming: usize,
}

const NO_OP: u32 = u32::MAX;

/// An operation that ended or a message that arrived, for the application.
#[derive(Debug)]
pub(crate) struct OpEnd {
    pub(crate) context: u64,
    pub(crate) bufs: Bufs,
    pub(crate) piece: Option<Piece>,
    /// Success of an operation without a requested completion.
    pub(crate) silent: bool,
}

impl OpTable {
    pub(crate) fn new(room: usize) -> Self {
        Self { ops: Vec::with_capacity(room), free: NO_OP, room, claiming: 0 }
    }

    /// Puts the buffers of an operation into the table and lends them to the node.
    ///
    /// # Errors
    /// [`Error::Again`] if the table is full, [`Error::Invalid`] for too long a list,
    /// [`Error::Busy`] for a shared buffer with living pieces; the buffers come back.
    pub(crate) fn lend(
        &mut self,
        ep: u32,
        kind: OpKind,
        context: u64,
        mut bufs: Bufs,
    ) -> std::result::Result<(OpKey, IoBuf), PostError> {
        let io = match bufs.io() {
            Ok(io) => io,
            Err(error) => return Err(PostError { error, bufs }),
        };
        if self.free == NO_OP {
            if self.ops.len() == self.room {
                return Err(PostError { error: Error::Again, bufs });
            }
            self.free = self.ops.len() as u32;
            self.ops.push(Op::fresh(self.free));
        }
        let op = &mut self.ops[self.free as usize];
        self.free = op.next;
        Ok((op.begin((ep, kind, context), bufs), io))
    }

    /// Lends one buffer to an operation that `post` begins under the key that it is given. If
    /// `post` returns false it has dropped the `IoBuf`, and the buffer comes back. `post` is called
    /// only if the free list has a slot.
    ///
    /// # Errors
    /// The buffer: nothing has happened.
    #[inline(always)]
    pub(crate) fn lend_if(
        &mut self,
        what: (u32, OpKind, u64),
        buf: Buf,
        post: impl FnOnce(OpKey, IoBuf) -> bool,
    ) -> std::result::Result<(), Buf> {
        let Some(op) = self.ops.get_mut(self.free as usize) else { return cold(Err(buf)) };
        // If `post` panics the node may still use the memory, so it must not be freed.
        let buf = ManuallyDrop::new(buf);
        let begun = post(op.key, IoBuf::one(buf.span()));
        let buf = ManuallyDrop::into_inner(buf);
        if !begun {
            return cold(Err(buf));
        }
        self.free = op.next;
        op.begin(what, Bufs::One(buf));
        Ok(())
    }

    /// Takes back the buffers of an operation that the node refused.
    pub(crate) fn refuse(&mut self, key: OpKey, error: Error) -> PostError {
        let bufs = self.find(key).map(|idx| self.release(idx)).unwrap_or_default();
        PostError { error, bufs }
    }

    /// Notes that operation `key` claims the message announced with context `announced`, which its
    /// completion carries.
    pub(crate) fn claims(&mut self, key: OpKey, announced: u64) {
        if let Some(idx) = self.find(key) {
            let op = &mut self.ops[idx];
            debug_assert!(op.claims.is_none());
            op.claims = Some(Claim { announced, kind: op.kind });
            op.kind = OpKind::Claim;
            self.claiming += 1;
        }
    }

    /// The reservation that a peek of endpoint `ep` made under `context`.
    pub(crate) fn reserved(&self, ep: u32, context: u64) -> Option<OpKey> {
        self.search(|op| op.kind == OpKind::Reserved && op.ep == ep && op.context == context)
    }

    /// The operations of endpoint `ep` with `context` that have not been reported, some of which
    /// may have ended.
    pub(crate) fn posted(&self, ep: u32, context: u64) -> impl Iterator<Item = OpKey> {
        let wanted = move |op: &Op| {
            op.in_use() && op.kind != OpKind::Reserved && op.ep == ep && op.context == context
        };
        self.ops.iter().filter(move |op| wanted(op)).map(|op| op.key)
    }

    fn search(&self, wanted: impl Fn(&Op) -> bool) -> Option<OpKey> {
        self.ops.iter().find(|op| op.in_use() && wanted(op)).map(|op| op.key)
    }

    /// Lends `bufs` under a key that a peek reserved.
    pub(crate) fn lend_reserved(
        &mut self,
        key: OpKey,
        mut bufs: Bufs,
        kind: OpKind,
    ) -> std::result::Result<IoBuf, PostError> {
        let io = match bufs.io() {
            Ok(io) => io,
            Err(error) => return Err(PostError { error, bufs }),
        };
        let Some(idx) = self.find(key) else {
            return Err(PostError { error: Error::Invalid("context: nothing is reserved"), bufs });
        };
        self.ops[idx].bufs = bufs;
        self.ops[idx].kind = kind;
        Ok(io)
    }

    /// Takes back the buffers of a refused claim; the reservation stays.
    pub(crate) fn refuse_reserved(&mut self, key: OpKey, error: Error) -> PostError {
        let bufs = match self.find(key) {
            None => Bufs::None,
            Some(idx) => {
                self.ops[idx].kind = OpKind::Reserved;
                mem::take(&mut self.ops[idx].bufs)
            }
        };
        PostError { error, bufs }
    }

    /// Forgets the reservations of a closed endpoint. A peek whose completion has not been read
    /// reserves nothing any more.
    pub(crate) fn forget_reserved(&mut self, ep: u32) {
        for idx in 0..self.ops.len() {
            let op = &mut self.ops[idx];
            if !op.in_use() || op.ep != ep {
                continue;
            }
            match op.kind {
                OpKind::Reserve => op.kind = OpKind::Once,
                OpKind::Reserved => drop(self.release(idx)),
                _ => {}
            }
        }
    }

    /// As [`complete`](Self::complete) of a success, for an operation of kind [`OpKind::Once`]: its
    /// context and its buffers, to be moved out of the slot. `None`, and nothing has happened, for
    /// any other.
    #[inline(always)]
    pub(crate) fn complete_one(&mut self, cqe: &Cqe) -> Option<(u64, &mut Bufs)> {
        let op = self.ops.get_mut(cqe.op_context as u32 as usize)?;
        if op.key.0 != cqe.op_context
            || op.kind != OpKind::Once
            || cqe.flags.contains(CqFlags::BUFFERED_RECV)
        {
            return cold(None);
        }
        op.free(&mut self.free);
        Some((op.context, &mut op.bufs))
    }

    /// Translates a completion of the node and, if it ends its operation, takes the buffers out of
    /// the slot.
    pub(crate) fn complete(&mut self, cqe: &Cqe, failed: Option<Error>) -> OpEnd {
        let mut ended =
            OpEnd { context: cqe.op_context, bufs: Bufs::None, piece: None, silent: false };
        let Some(idx) = self.find_for(cqe) else { return ended };
        let op = &mut self.ops[idx];
        ended.context = op.context;
        match op.claims.map_or(op.kind, |claim| claim.kind) {
            OpKind::Multi => {
                ended.piece = piece_of(&op.bufs, cqe);
                let last = cqe.flags.contains(CqFlags::MULTI_RECV);
                if last || failed == Some(Error::Canceled) || failed == Some(Error::NetDown) {
                    ended.bufs = self.release(idx);
                }
            }
            OpKind::Reserve if failed.is_none() => op.kind = OpKind::Reserved,
            kind => {
                ended.silent = kind == OpKind::Silent && failed.is_none();
                ended.bufs = self.release(idx);
            }
        }
        ended
    }

    fn find_for(&self, cqe: &Cqe) -> Option<usize> {
        if cqe.flags.contains(CqFlags::BUFFERED_RECV) {
            return None; // an announcement
        }
        if let Some(idx) = self.find(OpKey(cqe.op_context)) {
            return Some(idx);
        }
        if self.claiming == 0 {
            return None; // an error of an inject call
        }
        let wanted = |claim: Claim| claim.announced == cqe.op_context;
        self.ops.iter().position(|op| op.claims.is_some_and(wanted))
    }

    fn find(&self, key: OpKey) -> Option<usize> {
        let idx = key.idx() as usize;
        self.ops.get(idx).is_some_and(|op| op.key == key && op.in_use()).then_some(idx)
    }

    fn release(&mut self, idx: usize) -> Bufs {
        let op = &mut self.ops[idx];
        if op.claims.take().is_some() {
            self.claiming -= 1;
        }
        op.free(&mut self.free);
        mem::take(&mut op.bufs)
    }

    /// Operations in the table, for leak checks.
    pub(crate) fn in_use(&self) -> usize {
        self.ops.iter().filter(|op| op.in_use()).count()
    }
}

/// The bytes of the message that `cqe` announces in a multi-receive buffer.
fn piece_of(bufs: &Bufs, cqe: &Cqe) -> Option<Piece> {
    let Bufs::Shared(SharedBuf(buf)) = bufs else { return None };
    let received = cqe.flags.contains(CqFlags::RECV) && cqe.buf != 0;
    if !received {
        return None;
    }
    let offset = (cqe.buf as usize).checked_sub(buf.base.as_ptr() as usize);
    let inside = offset.filter(|&o| o <= buf.len && cqe.len as usize <= buf.len - o);
    let offset = inside.expect("the node placed a message outside its buffer");
    Some(Piece { buf: Arc::clone(buf), offset, len: cqe.len as usize })
}

/// Buffers of a memory region, lent to the node by [`new`](Self::new). Only [`take`](Self::take),
/// after the region is closed, gives them back. If they are dropped before, their memory is leaked,
/// since peers may still write it.
pub(crate) struct RegionBufs(ManuallyDrop<Vec<Buf>>);

impl RegionBufs {
    /// Takes the buffers and lends their memory to a region.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there are more than 8.
    pub(crate) fn new(bufs: Vec<Buf>) -> Result<(Self, IoBuf)> {
        let mut io = IoBuf::EMPTY;
        for b in &bufs {
            if !io.push(b.span()) {
                return Err(Error::Invalid("iov_count: 1 to 8 pieces"));
            }
        }
        Ok((Self(ManuallyDrop::new(bufs)), io))
    }

    /// Gives the buffers back. For `mr.rs` alone, once the `IoBuf` that [`new`](Self::new) made is
    /// gone: the node has closed the region, or has refused it.
    pub(crate) fn take(&mut self) -> Vec<Buf> {
        mem::take(&mut *self.0)
    }
}

/// Lends two lists for the duration of `call`: operands and compare values of the atomic calls.
pub(crate) fn with_borrowed_pair<R>(
    a: &[&[u8]],
    b: &[&[u8]],
    call: impl FnOnce(IoBuf, IoBuf) -> R,
) -> Result<R> {
    let lend = |list: &[&[u8]]| {
        let mut io = IoBuf::EMPTY;
        for bytes in list {
            let base = ptr::from_ref(*bytes).cast::<u8>().cast_mut();
            // SAFETY: an atomic call only reads them, copies them before it returns and drops the
            // `IoBuf`s; the bytes are borrowed until then.
            if !io.push(unsafe { Span::from_raw(base, bytes.len()) }) {
                return Err(Error::Invalid("iov_count: above 8"));
            }
        }
        Ok(io)
    };
    Ok(call(lend(a)?, lend(b)?))
}

/// Lends `bytes` for the duration of `call`: the source of the inject calls of the safe API.
#[inline]
pub(crate) fn with_borrowed<R>(bytes: &[u8], call: impl FnOnce(IoBuf) -> R) -> R {
    let base = ptr::from_ref(bytes).cast::<u8>().cast_mut();
    // SAFETY: an inject call only reads the bytes, copies them before it returns and drops the
    // `IoBuf`; `bytes` is borrowed until then.
    call(IoBuf::one(unsafe { Span::from_raw(base, bytes.len()) }))
}

/// Kind of an operation with these flags.
#[inline(always)]
pub(crate) fn kind_of(flags: OpFlags, silent: bool) -> OpKind {
    if flags.contains(OpFlags::MULTI_RECV) {
        OpKind::Multi
    } else if flags.contains(OpFlags::PEEK | OpFlags::CLAIM) && !flags.contains(OpFlags::DISCARD) {
        OpKind::Reserve
    } else if silent {
        OpKind::Silent
    } else {
        OpKind::Once
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cqe(key: OpKey, flags: CqFlags) -> Cqe {
        Cqe { op_context: key.0, flags, ..Cqe::default() }
    }

    #[test]
    fn a_buffer_is_a_vector_that_keeps_its_place() {
        let v: Vec<u8> = (0..100).collect();
        let at = v.as_ptr();
        let mut b = Buf::from(v);
        b.set_len(10).unwrap();
        assert_eq!(b.set_len(101), Err(Error::Invalid("length: the buffer is shorter")));
        b[0] = 77;
        b.set_len(100).unwrap();
        let v = b.into_vec();
        assert_eq!((v.as_ptr(), v[0], v[99]), (at, 77, 99));
    }

    #[test]
    fn buffers_come_back_once_and_with_their_context() {
        let mut t = OpTable::new(2);
        let (key, io) = t.lend(1, OpKind::Once, 42, Buf::zeroed(8).into()).unwrap();
        io.write_at(0, &[1, 2, 3]);
        let ended = t.complete(&cqe(key, CqFlags::RECV), None);
        assert_eq!(ended.context, 42);
        assert_eq!(&ended.bufs.into_one().unwrap()[..4], &[1, 2, 3, 0]);
        let again = t.complete(&cqe(key, CqFlags::RECV), None);
        assert!(matches!(again.bufs, Bufs::None), "a stale key found something");
        assert_eq!(t.in_use(), 0);
    }

    /// Goal: a buffer is lent if the operation begins, and otherwise returned unchanged.
    #[test]
    fn a_buffer_is_lent_if_the_operation_begins() {
        let mut t = OpTable::new(2);
        let what = (1, OpKind::Once, 5);
        let fresh = t.lend_if(what, Buf::zeroed(4), |_, _| unreachable!("no slot was used"));
        let buf = fresh.unwrap_err();
        let (stale, _) = t.lend(1, OpKind::Once, 1, Bufs::None).unwrap();
        t.refuse(stale, Error::Again);
        let (at, mut named) = (buf.as_ptr(), None);
        let refused = t.lend_if(what, buf, |key, _| {
            named = Some(key);
            false
        });
        let buf = refused.unwrap_err();
        assert_eq!((buf.as_ptr(), t.in_use(), named == Some(stale)), (at, 0, false));
        let begun = t.lend_if(what, buf, |key, io| {
            io.write_at(0, &[9]);
            Some(key) == named
        });
        assert!(begun.is_ok());
        let key = t.posted(1, 5).next().unwrap();
        assert_eq!((Some(key), t.in_use()), (named, 1));
        assert!(t.complete_one(&cqe(stale, CqFlags::SEND)).is_none());
        let (context, bufs) = t.complete_one(&cqe(key, CqFlags::SEND)).unwrap();
        let back = bufs.take_one().unwrap();
        assert_eq!((context, back.as_ptr(), back[0]), (5, at, 9));
        assert!(t.complete_one(&cqe(key, CqFlags::SEND)).is_none());
        assert_eq!(t.in_use(), 0);
        let (next, _) = t.lend(1, OpKind::Once, 1, Bufs::None).unwrap();
        assert!(next != key && next != stale, "a name was given out twice");
    }

    /// Goal: what does not end with its first completion, or is not to be shown, is left to
    /// [`OpTable::complete`].
    #[test]
    fn only_what_ends_and_is_shown_completes_at_once() {
        let mut t = OpTable::new(1);
        for kind in [OpKind::Silent, OpKind::Multi, OpKind::Reserve] {
            let (key, _) = t.lend(1, kind, 5, Bufs::None).unwrap();
            let done = cqe(key, CqFlags::RECV | CqFlags::MULTI_RECV);
            assert!(t.complete_one(&done).is_none() && t.in_use() == 1, "{kind:?}");
            assert_eq!(t.complete(&done, None).silent, kind == OpKind::Silent);
            t.forget_reserved(1);
        }
        let (key, _) = t.lend(1, OpKind::Silent, 5, Bufs::None).unwrap();
        t.claims(key, 77);
        let announced = Cqe { op_context: 77, flags: CqFlags::RECV, ..Cqe::default() };
        assert!(t.complete_one(&announced).is_none());
        let ended = t.complete(&announced, None);
        assert_eq!((ended.context, ended.silent, t.in_use(), t.claiming), (5, true, 0, 0));
        let (key, _) = t.lend(1, OpKind::Once, 5, Bufs::None).unwrap();
        assert!(t.complete_one(&cqe(key, CqFlags::BUFFERED_RECV)).is_none());
        assert_eq!(t.in_use(), 1);
    }

    #[test]
    fn room_beyond_the_length_can_be_used() {
        let mut v = Vec::with_capacity(64);
        v.extend_from_slice(&[7; 8]);
        let mut b = Buf::from(v);
        assert!(b.len() == 8 && b.len_max() >= 64);
        b.set_len(64).unwrap();
        assert_eq!(b[..], [&[7; 8][..], &[0; 56]].concat()[..]);
    }

    #[test]
    fn a_full_table_gives_the_buffer_back() {
        let mut t = OpTable::new(1);
        let (key, _io) = t.lend(1, OpKind::Once, 1, Bufs::None).unwrap();
        let refused = t.lend(1, OpKind::Once, 2, Buf::zeroed(3).into()).unwrap_err();
        assert_eq!(refused.error, Error::Again);
        assert_eq!(refused.bufs.into_one().unwrap().len(), 3);
        t.refuse(key, Error::Again);
        assert!(t.lend(1, OpKind::Once, 2, Bufs::None).is_ok());
    }

    #[test]
    fn nine_pieces_are_too_many() {
        let mut t = OpTable::new(1);
        let nine: Vec<Buf> = (0..9).map(|_| Buf::zeroed(1)).collect();
        let refused = t.lend(1, OpKind::Once, 0, nine.into()).unwrap_err();
        assert_eq!(refused.error.fi_errno(), 22);
        assert_eq!(refused.bufs.into_many().unwrap().len(), 9);
    }

    #[test]
    fn a_multi_receive_buffer_is_lent_again_only_without_pieces() {
        let mut t = OpTable::new(2);
        let shared = SharedBuf::from(Buf::zeroed(64));
        let base = shared.0.base.as_ptr() as u64;
        let (key, io) = t.lend(1, OpKind::Multi, 5, shared.into()).unwrap();
        io.write_at(8, b"hello");
        let mut first = cqe(key, CqFlags::RECV | CqFlags::MSG);
        (first.buf, first.len) = (base + 8, 5);
        let piece = t.complete(&first, None).piece.unwrap();
        assert_eq!((&*piece, piece.offset()), (&b"hello"[..], 8));
        let last = t.complete(&cqe(key, CqFlags::MULTI_RECV), None);
        let back = last.bufs.into_shared().unwrap();
        let refused = t.lend(1, OpKind::Multi, 5, back.into()).unwrap_err();
        assert_eq!(refused.error, Error::Busy);
        drop(piece);
        assert!(t.lend(1, OpKind::Multi, 5, refused.bufs).is_ok());
    }

    #[test]
    fn a_claiming_peek_keeps_its_name_until_the_claim() {
        let mut t = OpTable::new(2);
        let (key, _) = t.lend(3, OpKind::Reserve, 9, Bufs::None).unwrap();
        assert_eq!(t.reserved(3, 9), None);
        t.complete(&cqe(key, CqFlags::RECV), None);
        assert_eq!(t.reserved(3, 9), Some(key));
        assert_eq!(t.reserved(4, 9), None);
        t.lend_reserved(key, Buf::zeroed(4).into(), OpKind::Once).unwrap();
        assert_eq!(t.posted(3, 9).next(), Some(key));
        let ended = t.complete(&cqe(key, CqFlags::RECV), None);
        assert_eq!(ended.bufs.into_one().unwrap().len(), 4);
        assert_eq!(t.in_use(), 0);
        let (key, _) = t.lend(3, OpKind::Reserve, 9, Bufs::None).unwrap();
        t.complete(&cqe(key, CqFlags::RECV), Some(Error::NoMsg));
        assert_eq!((t.reserved(3, 9), t.in_use()), (None, 0));
    }
}
