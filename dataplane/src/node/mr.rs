//! Memory regions: what peers may read and write, by key.
//!
//! A key is 64 random bits, drawn anew at every registration, or the application's own number. The
//! lower 20 bits of a drawn one are the region's slot, disguised by a keyed hash of the other 44:
//! so it leads to its region, and who knows any number of keys knows nothing of the next one.
//! Whoever looks one up compares all 64 bits. The slot of a closed region goes to the next one with
//! other random bits, so a packet that is still on its way when a region closes finds nobody, and
//! nothing is written once [`Responder::mr_close`] has returned.
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
    /// Most regions that a node can be set to ([`NodeSettings::mr_max`]).
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
    /// What may be done with it.
    pub access: MrAccess,
    /// The application's key; `None` draws one that cannot be guessed.
    pub requested_key: Option<u64>,
    /// Remote addresses are addresses of this process (`FI_MR_VIRT_ADDR`), else offsets from 0.
    pub virt_addr: bool,
    /// The one endpoint that peers reach it through (`FI_MR_ENDPOINT`); `None`: any.
    pub ep: Option<EpId>,
    /// Which other agents change the memory by atomics: processes that registered the same memory,
    /// or threads of this one. All but [`Sharing::Single`] cost locked instructions.
    pub sharing: Sharing,
}

/// The only way for peers to reach a region.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Scope {
    /// An endpoint or a context.
    Ep(EpId),
    /// Any receive context of a scalable endpoint.
    Sep(SepId),
}

/// An operation of a peer that names regions, among all that its session has under way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Accessor {
    pub(super) peer: PeerIdx,
    /// This node's name for the session.
    pub(super) sid: u32,
    pub(super) number: AccessNumber,
}

/// Which one it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AccessNumber {
    /// The write or the atomic operation with this sequence number.
    Change(u16),
    /// The read whose bytes go to this slot of the initiator, of this generation.
    Read(u32, u32),
}

/// How many operations a region is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Uses {
    Any,
    /// One, which has not come.
    One,
    /// That one, which has not ended.
    By(Accessor),
    /// One, which has ended.
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
    /// READs being answered and packets in flight that carry its bytes.
    pub(crate) readers: u32,
}

/// The regions of a node. A call that names one which was closed is [`Error::BadFd`].
#[derive(Debug)]
pub struct Mrs {
    table: Slab<Mr, (), MrIdx>,
    /// Those whose key the application chose.
    by_key: HashMap<u64, MrIdx>,
    /// The one of the last atomic operation: likely the next one's.
    pub(super) last: MrIdx,
    /// Keys drawn so far.
    drawn: u64,
    /// What draws them.
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
    /// Whether others than this thread change it by atomics.
    #[inline(always)]
    pub(super) fn is_shared(&self) -> bool {
        self.sharing.is_shared()
    }

    /// Whether any number of operations may use it.
    #[inline]
    pub(super) fn is_reusable(&self) -> bool {
        self.uses == Uses::Any
    }

    /// Whether its key is one for operation `of`, as far as their number goes.
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
    /// None, at a node with these settings.
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

    /// Copies `out.len()` bytes at `offset` of a region out, while peers may be writing them.
    ///
    /// # Errors
    /// [`Error::BadFd`]: it was closed. [`Error::Invalid`]: they are not all inside.
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

    /// A key for `slot` that no region has.
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

    /// A hash that nobody outside can compute: its key is the seed, which a live domain takes from
    /// the kernel.
    fn keyed_hash(&self, word: u64) -> u64 {
        #[expect(deprecated, reason = "see the import")]
        let mut hash = SipHasher::new_with_keys(self.secret[0], self.secret[1]);
        hash.write_u64(word);
        hash.finish()
    }

    /// The lower bits of a drawn key whose upper bits are those of `key`, for a slot; and back.
    fn scramble(&self, key: u64, slot: u32) -> u64 {
        // Another input than any of `draw_key`, which counts from 1.
        (self.keyed_hash(!(key >> SLOT_BITS)) ^ u64::from(slot)) & SLOT_MASK
    }

    /// The region with this key.
    #[inline]
    fn of_key(&self, key: u64) -> Option<MrIdx> {
        let same = |mr: &Mr| mr.key == key || planted(Bug::KeyHalfChecked);
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
    /// them. Returns region and offset.
    #[inline]
    pub(super) fn look(
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
    /// Registers memory, and so lets peers that know the key reach it.
    ///
    /// # Errors
    /// - [`Error::NoKey`]: a region has the requested key.
    /// - [`Error::Invalid`]: the last byte's remote address would be above 2^64.
    /// - [`Error::NoMem`]: there are as many regions as the node was set to.
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

    /// Binds a counter of remote accesses: of `reads`, which fetching atomics are too, of `writes`,
    /// which all atomics are that may change the region, or of both.
    ///
    /// # Errors
    /// [`Error::BadFd`]: one of them was closed. [`Error::Invalid`]: one is bound already.
    /// Nothing is bound then.
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

    /// Makes `ep` the one endpoint that peers reach the region through.
    ///
    /// # Errors
    /// [`Error::BadFd`]: one of them was closed.
    pub fn mr_bind_ep(&mut self, mr: MrId, ep: EpId) -> Result<()> {
        self.objects.eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        self.mr_limit(mr, Scope::Ep(ep))
    }

    /// Lets peers reach the region through the receive contexts of `sep` alone, those that are open
    /// and those to come.
    ///
    /// # Errors
    /// [`Error::BadFd`]: one of them was closed.
    pub fn mr_bind_sep(&mut self, mr: MrId, sep: SepId) -> Result<()> {
        self.objects.eps.sep(sep)?;
        self.mr_limit(mr, Scope::Sep(sep))
    }

    /// Makes the region good for one operation of a peer (`FI_MR_SINGLE_USE`). As soon as the first
    /// one begins, its key is unknown to any other; when that has ended, to all. An operation whose
    /// first packet is refused has not begun; one that fails later leaves the region to nobody.
    ///
    /// # Errors
    /// [`Error::BadFd`]: it was closed.
    pub fn mr_single_use(&mut self, mr: MrId) -> Result<()> {
        self.mrs.table.by_handle_mut(mr.0).ok_or(Error::BadFd)?.uses = Uses::One;
        self.target.revoke_grants();
        Ok(())
    }

    /// Operation `of` has used region `m`, and ends if `last`.
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

    /// [`Mrs::look`] for operation `of`, which counts refusals.
    #[inline]
    pub(super) fn mr_find(
        &mut self,
        (e, of): (EpIdx, Accessor),
        range: &RemoteRange,
        len: u64,
        need: MrAccess,
    ) -> std::result::Result<(MrIdx, usize), NackReason> {
        let found = self.mrs.look(self.objects.eps, e, range, len, need);
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
