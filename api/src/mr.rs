//! Memory regions: what peers may read, write and change by atomics, named by a key.
//!
//! Local buffers need no registration (`FI_MR_LOCAL` is never required). How peers name memory
//! follows the domain's `mr_mode`: from 0, or with `FI_MR_VIRT_ADDR` by address; keys are the
//! application's own if it asks for one, unless `FI_MR_PROV_KEY` (or `FI_MR_BASIC`, which has it)
//! says that it takes ours: 64 random bits.
//!
//! While a region is open, peers may write its bytes at any time, so there is no borrowing them:
//! [`Mr::load`] and [`Mr::store`] copy.

pub(crate) mod table;

use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use barewire_dataplane::flags::MrAccess;
use barewire_dataplane::node::{MrId, MrReq};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::proto::atomic::Sharing;
use barewire_driver::mem::IoBuf;
use barewire_driver::mem::atomic::ProcessLocks;

use crate::buf::{Buf, RegionBufs};
use crate::cntr::{Cntr, CntrInner};
use crate::ep::EpCommon;
use crate::errno::{Error, Result, refused_by_system};
use crate::flags::{Access, BindFlags, MrMode};
pub use crate::info::MR_IOV_LIMIT;
use crate::inner::DomainRef;

/// Bytes of a raw key (`FI_MR_RAW`).
pub const RAW_KEY_LEN: usize = 8;

/// Attributes of a registration (`struct fi_mr_attr`).
#[derive(Clone, Copy, Debug, Default)]
pub struct MrAttr {
    /// Access rights. At least one bit.
    pub access: Access,
    /// The key that the application requests; with `None` the provider chooses 64 random bits
    /// (`FI_MR_PROV_KEY`).
    pub requested_key: Option<u64>,
    /// Comes back in events of the region.
    pub context: u64,
    /// The key is good for one operation of a peer (`FI_MR_SINGLE_USE`): when the first operation
    /// begins, the key becomes unknown to all others, and when it has ended, to all. An operation
    /// that is refused before it has moved a byte has not begun; one that fails later has used the
    /// key. The region stays open, and its memory lent, until it is closed.
    pub single_use: bool,
    /// Other flags of the call. None is supported.
    pub flags: u64,
    /// Which others change the memory by atomics.
    pub shared: Shared,
}

/// Which threads and processes change the memory of a region by atomics beside the domain that
/// registers it. All but [`Alone`](Self::Alone) cost locked instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Shared {
    /// If peers may write: other processes if the memory is a shared mapping, and always the
    /// threads of this process, by atomic instructions of the processor. Otherwise, and for memory
    /// that the region owns, none.
    #[default]
    Mapped,
    /// Nobody.
    Alone,
    /// Threads of this process, by the processor's atomic instructions on elements of up to 8 bytes
    /// or through other domains that registered the same memory.
    Process,
    /// Domains of other processes, on a port of the same name, that registered the same memory.
    Name,
}

/// A registered region, without the ownership of its memory. It is never accessed mutably, so that
/// two regions cannot be swapped under their owners.
pub struct MrCommon {
    pub(crate) dom: DomainRef,
    pub(crate) id: MrId,
    key: u64,
    /// Remote address of the first byte.
    base: u64,
    context: u64,
    access: Access,
    /// Keeps bound counters open.
    cntrs: Mutex<Vec<Arc<CntrInner>>>,
}

impl MrCommon {
    fn register(
        dom: &DomainRef,
        buf: IoBuf,
        count: usize,
        attr: &MrAttr,
        sharing: Sharing,
    ) -> Result<Self> {
        if attr.flags != 0 {
            return Err(Error::BadFlags);
        }
        if count == 0 || count > MR_IOV_LIMIT {
            return Err(Error::Invalid("iov_count: 1 to 8 pieces"));
        }
        if buf.is_empty() {
            return Err(Error::Invalid("length: a region has at least one byte"));
        }
        let mut core = dom.enter_control()?;
        let mode = core.mrs.mode;
        let virt_addr = mode.intersects(MrMode::VIRT_ADDR | MrMode::BASIC);
        let base = if virt_addr { buf.addr_at(0) as u64 } else { 0 };
        let req = MrReq {
            buf,
            access: MrAccess::from_bits_truncate(attr.access.bits()),
            requested_key: attr
                .requested_key
                .filter(|_| !mode.intersects(MrMode::PROV_KEY | MrMode::BASIC)),
            virt_addr,
            ep: None,
            sharing,
        };
        let id = core.node().responder().mr_reg(req)?;
        if attr.single_use {
            core.node().responder().mr_single_use(id)?;
        }
        let key = core.node().mrs.key(id)?;
        core.mrs.open += 1;
        let (context, access) = (attr.context, attr.access);
        Ok(Self { dom: dom.clone(), id, key, base, context, access, cntrs: Mutex::default() })
    }

    /// The region's key, as peers name it.
    #[doc(alias = "fi_mr_key")]
    pub fn key(&self) -> u64 {
        self.key
    }

    /// The descriptor for the `desc` argument of data calls, which need none.
    #[doc(alias = "fi_mr_desc")]
    pub fn desc(&self) -> u64 {
        self.key
    }

    /// What names the region where keys are raw (`FI_MR_RAW`): its base address and its key in
    /// bytes, for [`Domain::mr_map_raw`](crate::Domain::mr_map_raw) of a peer.
    #[doc(alias = "fi_mr_raw_attr")]
    pub fn raw_attr(&self) -> (u64, [u8; RAW_KEY_LEN]) {
        (self.base, self.key.to_le_bytes())
    }

    /// What was given as context.
    pub fn context(&self) -> u64 {
        self.context
    }

    /// What the region may be used for.
    pub fn access(&self) -> Access {
        self.access
    }

    /// Binds a counter of what peers do with the region: `REMOTE_WRITE` counts writes and atomics
    /// that may change it, also fetching ones, `REMOTE_READ` reads and fetching atomics. Who binds
    /// both has each access counted once.
    ///
    /// # Errors
    /// - [`Error::BadFlags`]: neither, or another flag.
    /// - [`Error::Invalid`]: the counter is of another domain, or one is bound already. Nothing is
    ///   bound then.
    #[doc(alias = "fi_mr_bind")]
    pub fn bind_cntr(&self, cntr: &Cntr, flags: BindFlags) -> Result<()> {
        let both = BindFlags::REMOTE_READ | BindFlags::REMOTE_WRITE;
        if flags.is_empty() || !both.contains(flags) {
            return Err(Error::BadFlags);
        }
        if !Arc::ptr_eq(self.dom.arc(), cntr.0.dom.arc()) {
            return Err(Error::Invalid("the counter is of another domain"));
        }
        let mut core = self.dom.enter_control()?;
        let [reads, writes] =
            [BindFlags::REMOTE_READ, BindFlags::REMOTE_WRITE].map(|flag| flags.contains(flag));
        core.node().responder().mr_bind_cntr(self.id, cntr.0.id, reads, writes)?;
        drop(core);
        let mut cntrs = self.cntrs.lock().unwrap_or_else(PoisonError::into_inner);
        cntrs.push(Arc::clone(&cntr.0));
        Ok(())
    }

    /// Binds the one endpoint that peers reach the region through (`FI_MR_ENDPOINT`).
    ///
    /// # Errors
    /// [`Error::Invalid`]: the endpoint is of another domain.
    #[doc(alias = "fi_mr_bind")]
    pub fn bind_ep(&self, ep: &EpCommon) -> Result<()> {
        if !Arc::ptr_eq(self.dom.arc(), ep.dom.arc()) {
            return Err(Error::Invalid("the endpoint is of another domain"));
        }
        self.dom.enter_control()?.node().responder().mr_bind_ep(self.id, ep.id)
    }

    /// Ends the registration. False if this is another thread than that of an owned domain.
    fn end(&mut self) -> bool {
        let Ok(mut core) = self.dom.lock.enter_to_close() else { return false };
        let now = Engine::now();
        if let Err(e) = core.node().responder().mr_close(self.id) {
            tracing::error!("closing a region: {e}");
        }
        core.mrs.open -= 1;
        // Peers that read the region get an error.
        core.engine.after_post(now);
        core.posted(&self.dom);
        true
    }
}

/// A region of buffers that it owns (`struct fid_mr`). Dropping it closes it.
pub struct Mr {
    common: MrCommon,
    bufs: RegionBufs,
    ended: bool,
}

impl std::ops::Deref for Mr {
    type Target = MrCommon;

    fn deref(&self) -> &MrCommon {
        &self.common
    }
}

impl Mr {
    pub(crate) fn register(dom: &DomainRef, bufs: Vec<Buf>, attr: &MrAttr) -> Result<Self> {
        let count = bufs.len();
        let (mut bufs, io) = RegionBufs::new(bufs)?;
        // Only the region owns the memory.
        match MrCommon::register(dom, io, count, attr, Sharing::Single) {
            Ok(common) => Ok(Self { common, bufs, ended: false }),
            Err(e) => {
                bufs.take();
                Err(e)
            }
        }
    }

    /// Copies `out.len()` bytes at `offset` of the region out. Each byte is as some peer or this
    /// process left it; several may be of different writes.
    ///
    /// # Errors
    /// [`Error::Invalid`]: they are not all inside.
    pub fn load(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        self.dom.enter_control()?.node().mrs.load(self.id, offset, out)
    }

    /// Copies `bytes` to `offset` of the region.
    ///
    /// # Errors
    /// [`Error::Invalid`]: they do not fit.
    pub fn store(&self, offset: usize, bytes: &[u8]) -> Result<()> {
        self.dom.enter_control()?.node().mrs.store(self.id, offset, bytes)
    }

    /// Ends the registration and gives the memory back: nothing is written to it any more.
    #[doc(alias = "fi_close")]
    pub fn close(mut self) -> Vec<Buf> {
        self.ended = true;
        if self.common.end() { self.bufs.take() } else { Vec::new() }
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        if !self.ended && self.common.end() {
            self.bufs.take();
        }
        // Else the memory stays, since peers may still write it.
    }
}

/// A region of memory that the caller keeps. Dropping it closes it.
pub struct RawMr {
    common: MrCommon,
    /// Where its pieces are. Sub-regions hold it as well.
    pieces: Arc<[Range<usize>]>,
    /// The pieces of the region that it is a part of.
    _base: Option<Arc<[Range<usize>]>>,
}

impl RawMr {
    pub(crate) fn register(
        dom: &DomainRef,
        buf: IoBuf,
        pieces: Vec<Range<usize>>,
        attr: &MrAttr,
    ) -> Result<Self> {
        let count = pieces.len();
        let remote = attr.access.intersects(Access::REMOTE_WRITE);
        let shared = match attr.shared {
            Shared::Mapped if !remote => Shared::Alone,
            Shared::Mapped if is_shared_mapping(&buf) => Shared::Name,
            // The program may use the processor's atomics on what it registers.
            Shared::Mapped => Shared::Process,
            other => other,
        };
        let sharing = match shared {
            Shared::Name => Sharing::SharedBy(locks(&dom.caps.name)?),
            Shared::Process => Sharing::Shared,
            Shared::Mapped | Shared::Alone => Sharing::Single,
        };
        let common = MrCommon::register(dom, buf, count, attr, sharing)?;
        Ok(Self { common, pieces: pieces.into(), _base: None })
    }

    /// As [`register`](Self::register), of a part of `base`.
    pub(crate) fn register_in(
        base: &Self,
        dom: &DomainRef,
        buf: IoBuf,
        pieces: Vec<Range<usize>>,
        attr: &MrAttr,
    ) -> Result<Self> {
        if !Arc::ptr_eq(dom.arc(), base.dom.arc()) {
            return Err(Error::Invalid("base_mr: a region of another domain"));
        }
        let holds = |piece: &Range<usize>| {
            base.pieces.iter().any(|of| of.start <= piece.start && piece.end <= of.end)
        };
        if !pieces.iter().all(holds) {
            return Err(Error::Invalid("base_mr: the range is not inside of it"));
        }
        let mut part = Self::register(dom, buf, pieces, attr)?;
        part._base = Some(Arc::clone(&base.pieces));
        Ok(part)
    }

    /// Whether the region has sub-regions, which have to be closed before its memory is freed.
    pub fn has_parts(&self) -> bool {
        Arc::strong_count(&self.pieces) > 1
    }
}

/// Whether any byte of `buf` lies in a mapping that other processes may have as well.
fn is_shared_mapping(buf: &IoBuf) -> bool {
    let Ok(maps) = std::fs::read_to_string("/proc/self/maps") else {
        // Then it may be.
        return true;
    };
    let mut shared = maps.lines().filter_map(|line| {
        let mut words = line.split(' ');
        let (from, to) = words.next()?.split_once('-')?;
        let range = usize::from_str_radix(from, 16).ok()?..usize::from_str_radix(to, 16).ok()?;
        words.next()?.ends_with('s').then_some(range)
    });
    // Not page by page: some programs register all memory there is.
    shared.any(|range| buf.touches(&range))
}

/// The locks that all processes with a domain on a port of this name share.
fn locks(port: &str) -> Result<&'static ProcessLocks> {
    let name: String =
        port.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let path = format!("/dev/shm/barewire-{}-locks-{name}", nix::unistd::geteuid());
    ProcessLocks::open(path.as_ref()).map_err(|e| {
        let what = format!("{path}, the locks of shared regions");
        match e.raw_os_error() {
            Some(errno @ (libc::EMFILE | libc::ENFILE | libc::ENOSPC | libc::ENOMEM)) => {
                refused_by_system(&what, errno)
            }
            _ => {
                tracing::error!("{what}: {e}; remove it if nobody uses it");
                Error::Invalid("locks of shared regions")
            }
        }
    })
}

impl std::ops::Deref for RawMr {
    type Target = MrCommon;

    fn deref(&self) -> &MrCommon {
        &self.common
    }
}

impl Drop for RawMr {
    fn drop(&mut self) {
        if !self.common.end() {
            tracing::error!("a region of an owned domain was closed by another thread: it stays");
        }
    }
}
