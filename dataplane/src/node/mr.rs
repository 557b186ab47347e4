//! Memory regions: memory that peers may read and write, by key.
//!
//! A key is 64 random bits, drawn anew at every registration, or a number that the application
//! chose. The lower 20 bits of a drawn key are the region's slot, encrypted by a keyed hash of the
//! other 44 bits: the key leads to its region, and known keys reveal nothing about the next key. A
//! look-up compares all 64 bits. When a region closes, its slot gets a key with other random bits,
//! so a packet in flight that names the old key finds no region, and nothing is written once
//! [`Responder::mr_close`] has returned.
//!
//! A look-up yields (region, offset): an offset in the lent memory, checked against its length.

use std::collections::HashMap;
#[expect(
    deprecated,
    reason = "the one keyed hash of the standard library that takes its keys"
)]
use std::hash::{Hasher, SipHasher};
use std::ops::{Index, IndexMut};

use barewire_driver::mem::IoBuf;

use super::{CntrId, EpId, Eps, Node, NodeSettings, Responder, SepId};
use crate::error::{Error, Result};
use crate::flags::MrAccess;
use crate::idx::{CntrIdx, EpIdx, MrIdx, PeerIdx, ResponseIdx};
use crate::plant::{Bug, planted};
use crate::proto::atomic::Sharing;
use crate::rel::sent::BodyRef;
use crate::slab::{Handle, Slab};
use crate::wire::{DataOp, NackReason, RemoteRange, RespOp, Ty};

/// Bits of a key that are the region's slot.
const SLOT_BITS: u32 = 20;

const SLOT_MASK: u64 = (1 << SLOT_BITS) - 1;

impl Node {
    /// Maximum regions that a node can be set to ([`NodeSettings::mr_max`]).
    pub const MR_MAX: usize = 1 << SLOT_BITS;
}

/// A memory region of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MrId(pub(crate) Handle<MrIdx>);

/// A region to register. `buf` stays lent until [`Responder::mr_close`] has returned.
#[derive(Debug)]
pub struct MrReq {
    /// The memory.
    pub buf: IoBuf,
    /// The permitted kinds of access.
    pub access: MrAccess,
    /// The application's key; `None` draws one that cannot be guessed.
    pub requested_key: Option<u64>,
    /// Remote addresses are addresses of this process (`FI_MR_VIRT_ADDR`); otherwise they are
    /// offsets from 0.
    pub virt_addr: bool,
    /// The one endpoint that peers must address to reach the region (`FI_MR_ENDPOINT`); `None`: any
    /// endpoint.
    pub ep: Option<EpId>,
    /// Other agents that change the memory by atomics: processes that registered the same memory,
    /// or threads of this one. All values but [`Sharing::Single`] cost locked instructions.
    pub sharing: Sharing,
}

/// The endpoints that peers must address to reach a region.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scope {
    /// An endpoint or a context.
    Ep(EpId),
    /// Any receive context of a scalable endpoint.
    Sep(SepId),
}

/// An operation of a peer that names regions, identified among all operations of its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Accessor {
    pub(super) peer: PeerIdx,
    /// This node's session id.
    pub(super) sid: u32,
    pub(super) number: AccessNumber,
}

/// Identifies the operation in its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessNumber {
    /// The write or atomic operation with this sequence number.
    Change(u16),
    /// The read whose bytes go to this slot of the initiator, with this generation.
    Read(u32, u32),
}

/// How many operations may use a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Uses {
    Any,
    /// One operation, which has not arrived yet.
    One,
    /// This operation, which has not ended.
    By(Accessor),
    /// One operation, which has ended.
    Spent,
}

/// A registered region.
#[derive(Debug)]
pub struct Mr {
    pub(crate) key: u64,
    pub(crate) buf: IoBuf,
    /// Remote address of the first byte.
    pub(crate) base: u64,
    pub(crate) access: MrAccess,
    pub(crate) scope: Option<Scope>,
    pub(crate) sharing: Sharing,
    by_app: bool,
    uses: Uses,
    /// Counters of remote reads and writes, `NONE` if not bound.
    pub(crate) read_cntr: CntrIdx,
    pub(crate) write_cntr: CntrIdx,
    /// Packets in flight that carry bytes of the region, and READs being answered from it.
    pub(crate) readers: u32,
}

/// The memory regions of a node. A call that names a closed region returns [`Error::BadFd`].
#[derive(Debug)]
pub struct Mrs {
    table: Slab<Mr, (), MrIdx>,
    /// Regions whose key the application chose.
    by_key: HashMap<u64, MrIdx>,
    /// Region of the last atomic operation: likely the region of the next one.
    pub(super) last: MrIdx,
    /// Keys drawn so far.
    drawn: u64,
    /// Secret seed of the drawn keys.
    secret: [u64; 2],
}

impl Index<MrIdx> for Mrs {
    type Output = Mr;

    #[inline(always)]
    fn index(&self, idx: MrIdx) -> &Mr {
        &self.table[idx]
    }
}

impl IndexMut<MrIdx> for Mrs {
    #[inline(always)]
    fn index_mut(&mut self, idx: MrIdx) -> &mut Mr {
        &mut self.table[idx]
    }
}

impl Mr {
    /// Whether agents other than this thread change the region by atomics.
    #[inline(always)]
    pub(super) fn is_shared(&self) -> bool {
        self.sharing.is_shared()
    }

    /// Whether any number of operations may use the region.
    #[inline]
    pub(super) fn is_reusable(&self) -> bool {
        self.uses == Uses::Any
    }

    /// Whether operation `of` may use the region, as far as the number of operations is concerned.
    fn is_for(&self, of: Accessor) -> bool {
        match self.uses {
            Uses::Any | Uses::One => true,
            Uses::By(other) => of == other,
            Uses::Spent => false,
        }
    }
}

impl Eps {
    /// Whether endpoint `e` is in `scope`.
    fn in_scope(&self, scope: Scope, e: EpIdx) -> bool {
        match scope {
            Scope::Ep(ep) => ep.0 == self.handle(e),
            Scope::Sep(sep) => self.sep(sep).is_ok_and(|sep| sep.has(self[e].number)),
        }
    }
}

impl Mrs {
    /// An empty table for a node with these settings.
    pub(super) fn new(s: &NodeSettings) -> Self {
        Self {
            table: Slab::with_capacity(s.mr_max),
            by_key: HashMap::new(),
            last: MrIdx::NONE,
            drawn: 0,
            secret: [s.seed, s.incarnation],
        }
    }

    /// The key that peers name the region by.
    pub fn key(&self, mr: MrId) -> Result<u64> {
        Ok(self.table.by_handle(mr.0).ok_or(Error::BadFd)?.key)
    }

    /// Copies `out.len()` bytes at `offset` of a region to `out`. Peers may be writing them
    /// meanwhile.
    ///
    /// # Errors
    /// [`Error::BadFd`]: the region was closed. [`Error::Invalid`]: the range is not inside it.
    pub fn load(&self, mr: MrId, offset: usize, out: &mut [u8]) -> Result<()> {
        let mr = self.table.by_handle(mr.0).ok_or(Error::BadFd)?;
        inside(&mr.buf, offset, out.len())?;
        mr.buf.read_at(offset, out);
        Ok(())
    }

    /// Copies `bytes` to `offset` of a region.
    ///
    /// # Errors
    /// As [`load`](Self::load).
    pub fn store(&mut self, mr: MrId, offset: usize, bytes: &[u8]) -> Result<()> {
        let mr = self.table.by_handle(mr.0).ok_or(Error::BadFd)?;
        inside(&mr.buf, offset, bytes.len())?;
        mr.buf.write_at(offset, bytes);
        Ok(())
    }

    /// Draws a key for `slot` that no region has.
    fn draw_key(&mut self, slot: MrIdx) -> u64 {
        loop {
            self.drawn += 1;
            let random = self.keyed_hash(self.drawn) & !SLOT_MASK;
            let key = random | self.scramble(random, slot.get());
            if self.of_key(key).is_none() {
                return key;
            }
        }
    }

    /// A keyed hash, which no peer can compute: its key is the seed, which a live domain takes from
    /// the kernel.
    fn keyed_hash(&self, word: u64) -> u64 {
        #[expect(deprecated, reason = "see the import")]
        let mut hash = SipHasher::new_with_keys(self.secret[0], self.secret[1]);
        hash.write_u64(word);
        hash.finish()
    }

    /// The lower bits of a drawn key with the upper bits of `key`, for a slot; and the inverse.
    fn scramble(&self, key: u64, slot: u32) -> u64 {
        // Domain separation from `draw_key`, whose inputs count from 1.
        (self.keyed_hash(!(key >> SLOT_BITS)) ^ u64::from(slot)) & SLOT_MASK
    }

    /// The region with this key.
    #[inline]
    fn of_key(&self, key: u64) -> Option<MrIdx> {
        let same = |mr: &Mr| mr.key == key || planted(Bug::KeyPartlyChecked);
        if self.table.get(self.last).is_some_and(|mr| mr.key == key) {
            return Some(self.last);
        }
        let slot = MrIdx::of(self.scramble(key, key as u32) as u32);
        if self.table.get(slot).is_some_and(|mr| same(mr) && !mr.by_app) {
            return Some(slot);
        }
        if self.by_key.is_empty() { None } else { self.by_key.get(&key).copied() }
    }

    /// Finds `len` bytes at the start of `range`, if a packet for endpoint `e` has this access to
    /// them. Returns the region and the offset in it.
    #[inline]
    pub(super) fn lookup(
        &self,
        eps: &Eps,
        e: EpIdx,
        range: &RemoteRange,
        len: u64,
        need: MrAccess,
    ) -> std::result::Result<(MrIdx, usize), NackReason> {
        let m = self.of_key(range.rkey).ok_or(NackReason::BadKey)?;
        let mr = &self[m];
        let offset = range.addr.checked_sub(mr.base);
        let end = offset.and_then(|at| at.checked_add(len));
        let inside = end.is_some_and(|end| end <= mr.buf.len() as u64);
        let scope = mr.scope.is_none_or(|scope| eps.in_scope(scope, e));
        match offset {
            Some(at) if inside && scope && mr.access.contains(need) => Ok((m, at as usize)),
            _ => Err(NackReason::BadAccess),
        }
    }
}

impl Responder<'_> {
    /// Registers memory, so that peers which know the key can access it.
    ///
    /// # Errors
    /// - [`Error::NoKey`]: a region has the requested key.
    /// - [`Error::Invalid`]: the last byte's remote address would be above 2^64.
    /// - [`Error::NoMem`]: the node has as many regions as its setting allows.
    /// - [`Error::BadFd`]: the endpoint was closed.
    pub fn mr_reg(&mut self, req: MrReq) -> Result<MrId> {
        if let Some(ep) = req.ep {
            self.objects.eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        }
        let base = if req.virt_addr { req.buf.addr_at(0) as u64 } else { 0 };
        if base.checked_add(req.buf.len() as u64).is_none() {
            return Err(Error::Invalid("region ends above 2^64"));
        }
        if req.requested_key.is_some_and(|key| self.mrs.of_key(key).is_some()) {
            return Err(Error::NoKey);
        }
        let slot = self.mrs.table.vacant().ok_or(Error::NoMem)?;
        let key = match req.requested_key {
            Some(key) => {
                self.mrs.by_key.insert(key, slot);
                key
            }
            None => self.mrs.draw_key(slot),
        };
        let by_app = req.requested_key.is_some();
        let MrReq { buf, access, ep, sharing, .. } = req;
        let scope = ep.map(Scope::Ep);
        let mr = Mr {
            key,
            buf,
            base,
            access,
            scope,
            sharing,
            by_app,
            uses: Uses::Any,
            read_cntr: CntrIdx::NONE,
            write_cntr: CntrIdx::NONE,
            readers: 0,
        };
        let idx = self.mrs.table.fill(mr);
        Ok(MrId(self.mrs.table.handle(idx)))
    }

    /// Binds a counter of remote accesses: of `reads` (fetching atomics included), of `writes` (all
    /// atomics that may change the region), or of both.
    ///
    /// # Errors
    /// [`Error::BadFd`]: the region or the counter was closed. [`Error::Invalid`]: a counter is
    /// bound already. Nothing is bound then.
    pub fn mr_bind_cntr(
        &mut self,
        mr: MrId,
        cntr: CntrId,
        reads: bool,
        writes: bool,
    ) -> Result<()> {
        let table = self.objects.cntrs.by_handle_mut(cntr.0).ok_or(Error::BadFd)?;
        let mr = self.mrs.table.by_handle_mut(mr.0).ok_or(Error::BadFd)?;
        let places = [(reads, &mut mr.read_cntr), (writes, &mut mr.write_cntr)];
        if places.iter().any(|(wanted, place)| *wanted && **place != CntrIdx::NONE) {
            return Err(Error::Invalid("a counter is bound for these accesses"));
        }
        for (_, place) in places.into_iter().filter(|(wanted, _)| *wanted) {
            *place = cntr.0.idx();
            table.bound += 1;
        }
        self.target.revoke_grants();
        Ok(())
    }

    /// Restricts the region to peers that address endpoint `ep`.
    ///
    /// # Errors
    /// [`Error::BadFd`]: the region or the endpoint was closed.
    pub fn mr_bind_ep(&mut self, mr: MrId, ep: EpId) -> Result<()> {
        self.objects.eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        self.mr_limit(mr, Scope::Ep(ep))
    }

    /// Restricts the region to peers that address a receive context of `sep`, one that is open or
    /// one that is opened later.
    ///
    /// # Errors
    /// [`Error::BadFd`]: the region or the scalable endpoint was closed.
    pub fn mr_bind_sep(&mut self, mr: MrId, sep: SepId) -> Result<()> {
        self.objects.eps.sep(sep)?;
        self.mr_limit(mr, Scope::Sep(sep))
    }

    /// Limits the region to one operation of a peer (`FI_MR_SINGLE_USE`). As soon as the first
    /// operation begins, its key is unknown to any other; when that operation has ended, to all. An
    /// operation whose first packet is refused has not begun; one that fails later still uses up
    /// the region.
    ///
    /// # Errors
    /// [`Error::BadFd`]: the region was closed.
    pub fn mr_single_use(&mut self, mr: MrId) -> Result<()> {
        self.mrs.table.by_handle_mut(mr.0).ok_or(Error::BadFd)?.uses = Uses::One;
        self.target.revoke_grants();
        Ok(())
    }

    /// Notes that operation `of` has used region `m`; the operation ends if `last`.
    #[inline]
    pub(super) fn note_use(&mut self, m: MrIdx, of: Accessor, last: bool) {
        let mr = &mut self.mrs[m];
        if !mr.is_reusable() {
            mr.uses = if last { Uses::Spent } else { Uses::By(of) };
        }
    }

    fn mr_limit(&mut self, mr: MrId, scope: Scope) -> Result<()> {
        self.mrs.table.by_handle_mut(mr.0).ok_or(Error::BadFd)?.scope = Some(scope);
        self.target.revoke_grants();
        Ok(())
    }

    /// Closes a region. When this returns none of its bytes is read or written any more: packets
    /// that name its key are refused, and READs being answered end with an error at their
    /// initiator.
    ///
    /// # Errors
    /// [`Error::BadFd`]: it was closed before.
    pub fn mr_close(&mut self, mr: MrId) -> Result<()> {
        self.mrs.table.by_handle(mr.0).ok_or(Error::BadFd)?;
        let m = mr.0.idx();
        if self.mrs[m].readers > 0 {
            self.end_readers(m);
        }
        let mr = self.mrs.table.free(m);
        self.target.revoke_grants();
        if mr.by_app {
            self.mrs.by_key.remove(&mr.key);
        }
        for cntr in [mr.read_cntr, mr.write_cntr].into_iter().filter(|&c| c != CntrIdx::NONE) {
            self.objects.cntrs[cntr].bound -= 1;
        }
        Ok(())
    }

    /// Fails the reads of region `m` that are being answered, those in flight included.
    fn end_readers(&mut self, m: MrIdx) {
        let responses: Vec<ResponseIdx> = (self.responses.iter())
            .filter(|(_, response)| response.reads(m))
            .map(|(j, _)| j)
            .collect();
        for j in responses {
            self.fail_response(j, NackReason::BadKey);
        }
        for entry in self.sent.iter_mut() {
            let BodyRef::Mr { mr, len, .. } = entry.body else { continue };
            if mr != m {
                continue;
            }
            const { assert!(DataOp::LEN == RespOp::LEN) };
            let (dst_op, dst_gen) = DataOp::puller(&entry.op);
            let status = Some(NackReason::BadKey);
            let len = RespOp { dst_op, dst_gen, offset: len, status }.emit(&mut entry.op);
            (entry.ty, entry.op_len, entry.body) = (Ty::Resp, len as u8, BodyRef::None);
        }
    }

    /// [`Mrs::lookup`] for operation `of`; also counts refusals.
    #[inline]
    pub(super) fn mr_find(
        &mut self,
        (e, of): (EpIdx, Accessor),
        range: &RemoteRange,
        len: u64,
        need: MrAccess,
    ) -> std::result::Result<(MrIdx, usize), NackReason> {
        let found = self.mrs.lookup(self.objects.eps, e, range, len, need);
        let found = match found {
            Ok((m, _)) if !self.mrs[m].is_for(of) => Err(NackReason::BadKey),
            _ => found,
        };
        match found {
            Err(NackReason::BadKey) => self.objects.counters.rx_bad_key += 1,
            Err(_) => self.objects.counters.rx_bad_access += 1,
            Ok(_) => {}
        }
        found
    }
}

fn inside(buf: &IoBuf, offset: usize, len: usize) -> Result<()> {
    let fits = offset <= buf.len() && len <= buf.len() - offset;
    if fits { Ok(()) } else { Err(Error::Invalid("bytes are not all inside the region")) }
}
