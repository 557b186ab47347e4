//! Registration of local buffers.
//!
//! Nothing here needs it: buffers that are not registered are staged through frames, and no mode
//! bit asks for it (`FI_MR_LOCAL` is never required). It exists for applications that register
//! anyway, and gives descriptors and keys that hold once remote access arrives.

use std::collections::HashMap;
use std::hash::{BuildHasher, RandomState};

use crate::buf::Buf;
use crate::errno::{Error, Result};
use crate::flags::Access;
use crate::inner::DomainRef;

/// Most pieces that one registration may have (`mr_iov_limit`).
pub const MR_IOV_LIMIT: usize = 8;

/// What a registration asks for (`struct fi_mr_attr`).
#[derive(Clone, Copy, Debug, Default)]
pub struct MrAttr {
    /// What may be done with the memory. At least one bit.
    pub access: Access,
    /// The key that the application wants; `None` lets us choose an unguessable one
    /// (`FI_MR_PROV_KEY`).
    pub requested_key: Option<u64>,
    /// Comes back in events of the region.
    pub context: u64,
    /// Flags of the call: none is known.
    pub flags: u64,
}

/// The registrations of a domain.
#[derive(Default)]
pub(crate) struct MrTable {
    by_key: HashMap<u64, Entry>,
}

struct Entry {
    access: Access,
    len: usize,
}

impl MrTable {
    fn add(&mut self, attr: &MrAttr, len: usize) -> Result<u64> {
        let key = match attr.requested_key {
            Some(key) if self.by_key.contains_key(&key) => return Err(Error::NoKey),
            Some(key) => key,
            None => loop {
                // A fresh hasher's secret is the kernel's random number.
                let key = RandomState::new().hash_one(self.by_key.len());
                if key != u64::MAX && !self.by_key.contains_key(&key) {
                    break key;
                }
            },
        };
        self.by_key.insert(key, Entry { access: attr.access, len });
        Ok(key)
    }

    /// Regions and bytes registered, for `barewire stats` and tests.
    pub(crate) fn level(&self) -> (usize, usize) {
        (self.by_key.len(), self.by_key.values().map(|e| e.len).sum())
    }

    /// What a key allows.
    pub(crate) fn access(&self, key: u64) -> Option<Access> {
        self.by_key.get(&key).map(|e| e.access)
    }
}

/// A registered region of local memory (`struct fid_mr`).
pub struct Mr {
    dom: DomainRef,
    key: u64,
    bufs: Vec<Buf>,
    context: u64,
}

impl Mr {
    pub(crate) fn register(dom: &DomainRef, bufs: Vec<Buf>, attr: &MrAttr) -> Result<Self> {
        let len = bufs.iter().map(|b| b.len()).sum();
        let key = add(dom, attr, bufs.len(), len)?;
        Ok(Self { dom: dom.clone(), key, bufs, context: attr.context })
    }

    /// The region's key, as peers will name it.
    #[doc(alias = "fi_mr_key")]
    pub fn key(&self) -> u64 {
        self.key
    }

    /// The descriptor for the `desc` argument of raw data calls, which need none.
    #[doc(alias = "fi_mr_desc")]
    pub fn desc(&self) -> u64 {
        self.key
    }

    /// What was given as context.
    pub fn context(&self) -> u64 {
        self.context
    }

    /// What the region may be used for.
    pub fn access(&self) -> Access {
        let core = self.dom.enter();
        core.ok().and_then(|c| c.mrs.access(self.key)).unwrap_or_default()
    }

    /// Ends the registration and gives the memory back.
    #[doc(alias = "fi_close")]
    pub fn close(mut self) -> Vec<Buf> {
        std::mem::take(&mut self.bufs)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        remove(&self.dom, self.key);
    }
}

/// Adds a region of `len` bytes in `count` pieces.
pub(crate) fn add(dom: &DomainRef, attr: &MrAttr, count: usize, len: usize) -> Result<u64> {
    if attr.flags != 0 {
        return Err(Error::BadFlags);
    }
    if attr.access.is_empty() {
        return Err(Error::Invalid("access: no bit is set"));
    }
    if count == 0 || count > MR_IOV_LIMIT {
        return Err(Error::Invalid("iov_count: 1 to 8 pieces"));
    }
    if len == 0 {
        return Err(Error::Invalid("length: a region has at least one byte"));
    }
    dom.enter()?.mrs.add(attr, len)
}

pub(crate) fn remove(dom: &DomainRef, key: u64) {
    if let Ok(mut core) = dom.lock.enter_to_close() {
        core.mrs.by_key.remove(&key);
    }
}
