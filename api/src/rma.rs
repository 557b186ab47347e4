//! Remote memory: the nine calls of fi_rma(3), safe API; the raw one is in [`crate::raw`].
//!
//! All calls return at once. [`crate::msg`] lists the errors of a refused call; in addition
//! [`Error::Invalid`]: the remote ranges and the buffers have different lengths, or there are more
//! than 8 ranges; and [`Error::OpNotSupp`]: the endpoint lacks `FI_RMA`, or `FI_READ` or
//! `FI_WRITE`.
//!
//! A write completes when the target has executed it, under every completion level; if the target
//! refuses the key, the access or the range, the operation ends with an error entry
//! (`FI_EKEYREJECTED`, `FI_EACCES`), also for the inject calls.

use barewire_dataplane::node::{ReadReq, RmaIov, RmaList, WriteReq};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::{FI_ADDR_UNSPEC, FiAddr};
use barewire_driver::mem::IoBuf;

use crate::buf::{Buf, Bufs, PostError, PostResult};
use crate::ep::{Endpoint, EpCommon};
use crate::errno::{Error, Result};
use crate::flags::OpFlags;
pub use crate::info::RMA_IOV_LIMIT;

/// The argument of `readmsg` and `writemsg` (`struct fi_msg_rma`).
#[derive(Debug)]
pub struct RmaMsg {
    /// Local memory: a scatter list of a read, a gather list of a write.
    pub bufs: Bufs,
    /// The peer whose memory is accessed.
    pub addr: FiAddr,
    /// Ranges of remote memory, in all as many bytes as `bufs`.
    pub rma_iov: Vec<RmaIov>,
    /// Comes back in the completion.
    pub context: u64,
    /// Remote CQ data, used with [`OpFlags::REMOTE_CQ_DATA`].
    pub data: u64,
}

impl Default for RmaMsg {
    fn default() -> Self {
        let (bufs, rma_iov) = (Bufs::None, Vec::new());
        Self { bufs, addr: FI_ADDR_UNSPEC, rma_iov, context: 0, data: 0 }
    }
}

/// A peer, an address in its memory, and the key of the region.
#[derive(Clone, Copy, Debug)]
pub struct Remote {
    /// The peer.
    pub dest: FiAddr,
    /// Address in the region, as its owner addresses it: from 0, or virtual (`FI_MR_VIRT_ADDR`).
    pub addr: u64,
    /// Key of the region.
    pub key: u64,
}

impl Remote {
    /// The one range of `len` bytes or elements.
    pub(crate) fn range(&self, len: usize) -> RmaList {
        RmaList::one(self.addr, len as u64, self.key)
    }
}

/// A list of ranges as the node takes it.
pub(crate) fn list(ranges: &[RmaIov]) -> Result<RmaList> {
    let mut list = RmaList::default();
    if ranges.iter().all(|range| list.push(*range)) {
        Ok(list)
    } else {
        Err(Error::Invalid("rma_iov_count: above 8"))
    }
}

impl Endpoint {
    /// Lends `bufs` to an operation that `post` posts with the context that it is given.
    pub(crate) fn post_one_sided(
        &self,
        bufs: Bufs,
        context: u64,
        mut flags: OpFlags,
        post: impl FnOnce(&mut Engine, IoBuf, u64, OpFlags) -> Result<()>,
    ) -> PostResult {
        let how = self.tx_kind(flags);
        // The operation table needs the completion of every operation that holds memory.
        flags |= OpFlags::COMPLETION;
        let mut core = match self.dom.enter() {
            Ok(core) => core,
            Err(error) => return Err(PostError { error, bufs }),
        };
        let (key, buf) = core.ops.lend(self.object, how, context, bufs)?;
        let posted = post(&mut core.engine, buf, key.0, flags);
        core.posted(&self.dom);
        posted.map_err(|error| core.ops.refuse(key, error))
    }

    fn post_write(
        &self,
        bufs: Bufs,
        to: impl FnOnce(usize) -> Result<(FiAddr, RmaList)>,
        data: u64,
        context: u64,
        flags: OpFlags,
    ) -> PostResult {
        self.post_one_sided(bufs, context, flags, |engine, buf, context, flags| {
            let (dest, rma) = to(buf.len())?;
            let no_completion = false;
            let req = WriteReq { buf, dest, rma, data, context, flags, no_completion };
            engine.post_write(self.id, req)
        })
    }

    fn post_read(
        &self,
        bufs: Bufs,
        from: impl FnOnce(usize) -> Result<(FiAddr, RmaList)>,
        context: u64,
        flags: OpFlags,
    ) -> PostResult {
        self.post_one_sided(bufs, context, flags, |engine, buf, context, flags| {
            let (dest, rma) = from(buf.len())?;
            engine.post_read(self.id, ReadReq { buf, dest, rma, context, flags })
        })
    }

    /// Reads remote memory into `buf`.
    ///
    /// # Errors
    /// See the [module](self).
    ///
    /// Source: fi_rma(3), "fi_read".
    #[doc(alias = "fi_read")]
    pub fn read(&self, buf: impl Into<Bufs>, from: Remote, context: u64) -> PostResult {
        let flags = self.rma_op_flags() - OpFlags::INJECT;
        self.post_read(buf.into(), |len| Ok((from.dest, from.range(len))), context, flags)
    }

    /// As [`read`](Self::read), into at most 8 buffers, one after the other.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_readv")]
    pub fn readv(&self, bufs: Vec<Buf>, from: Remote, context: u64) -> PostResult {
        self.read(bufs, from, context)
    }

    /// As [`readv`](Self::readv), from a list of remote ranges, with flags in place of the
    /// endpoint's.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_readmsg")]
    pub fn readmsg(&self, msg: RmaMsg, flags: OpFlags) -> PostResult {
        let RmaMsg { bufs, addr, rma_iov, context, .. } = msg;
        self.post_read(bufs, |_| Ok((addr, list(&rma_iov)?)), context, flags)
    }

    /// Writes `buf` to remote memory.
    ///
    /// # Errors
    /// See the [module](self).
    ///
    /// Source: fi_rma(3), "fi_write".
    #[doc(alias = "fi_write")]
    pub fn write(&self, buf: impl Into<Bufs>, to: Remote, context: u64) -> PostResult {
        let flags = self.rma_op_flags();
        self.post_write(buf.into(), |len| Ok((to.dest, to.range(len))), 0, context, flags)
    }

    /// As [`write`](Self::write), from at most 8 buffers, one after the other.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_writev")]
    pub fn writev(&self, bufs: Vec<Buf>, to: Remote, context: u64) -> PostResult {
        self.write(bufs, to, context)
    }

    /// As [`writev`](Self::writev), to a list of remote ranges, with flags in place of the
    /// endpoint's.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_writemsg")]
    pub fn writemsg(&self, msg: RmaMsg, flags: OpFlags) -> PostResult {
        let RmaMsg { bufs, addr, rma_iov, context, data } = msg;
        self.post_write(bufs, |_| Ok((addr, list(&rma_iov)?)), data, context, flags)
    }

    /// As [`write`](Self::write), and the target's queue gets a completion with `data`.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_writedata")]
    pub fn writedata(
        &self,
        buf: impl Into<Bufs>,
        data: u64,
        to: Remote,
        context: u64,
    ) -> PostResult {
        let flags = self.rma_op_flags() | OpFlags::REMOTE_CQ_DATA;
        self.post_write(buf.into(), |len| Ok((to.dest, to.range(len))), data, context, flags)
    }

    /// Writes `buf`, at most `inject_size` bytes, and lets the caller reuse it at once. Success
    /// writes no completion.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_inject_write")]
    pub fn inject_write(&self, buf: &[u8], to: Remote) -> Result<()> {
        self.inject_remote(buf, to, None)
    }

    /// As [`inject_write`](Self::inject_write), and the target's queue gets a completion with
    /// `data`.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_inject_writedata")]
    pub fn inject_writedata(&self, buf: &[u8], data: u64, to: Remote) -> Result<()> {
        self.inject_remote(buf, to, Some(data))
    }

    fn inject_remote(&self, bytes: &[u8], to: Remote, data: Option<u64>) -> Result<()> {
        crate::buf::with_borrowed(bytes, |buf| inject(self, buf, to, data, 0))
    }
}

/// `fi_inject_write` and `fi_inject_writedata`. An error entry has `context`.
pub(crate) fn inject(
    ep: &EpCommon,
    buf: IoBuf,
    to: Remote,
    data: Option<u64>,
    context: u64,
) -> Result<()> {
    let mut flags = OpFlags::INJECT;
    flags.set(OpFlags::REMOTE_CQ_DATA, data.is_some());
    let (rma, data) = (to.range(buf.len()), data.unwrap_or(0));
    let no_completion = true;
    let req = WriteReq { buf, dest: ep.to(to.dest), rma, data, context, flags, no_completion };
    let mut core = ep.dom.enter()?;
    let posted = core.engine.post_write(ep.id, req);
    core.posted(&ep.dom);
    posted
}
