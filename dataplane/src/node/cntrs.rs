//! The counters of a node.

use super::CntrId;
use crate::cntr::{Cntr, CntrEvents, Done};
use crate::error::{Error, Result};
use crate::idx::CntrIdx;
use crate::slab::Slab;

/// The counters of a node. A call that names a closed counter returns [`Error::BadFd`].
pub(super) type Cntrs = Slab<CntrTable, (), CntrIdx>;

/// A counter, and the number of objects bound to it.
#[derive(Debug, Default)]
pub struct CntrTable {
    pub(crate) cntr: Cntr,
    pub(crate) bound: u32,
}

impl Cntrs {
    /// Creates a counter of `events`, with value 0.
    ///
    /// # Errors
    /// [`Error::NoMem`]: too many counters.
    pub fn open(&mut self, events: CntrEvents) -> Result<CntrId> {
        let table = CntrTable { cntr: Cntr::of(events), bound: 0 };
        let idx = self.alloc(table).ok_or(Error::NoMem)?;
        Ok(CntrId(self.handle(idx)))
    }

    /// The value.
    pub fn read(&self, cntr: CntrId) -> Result<u64> {
        Ok(self.cntr(cntr)?.cntr.read())
    }

    /// The error value.
    pub fn readerr(&self, cntr: CntrId) -> Result<u64> {
        Ok(self.cntr(cntr)?.cntr.readerr())
    }

    /// Adds to the value.
    pub fn add(&mut self, cntr: CntrId, n: u64) -> Result<()> {
        self.cntr_mut(cntr)?.cntr.add(n);
        Ok(())
    }

    /// Adds to the error value.
    pub fn adderr(&mut self, cntr: CntrId, n: u64) -> Result<()> {
        self.cntr_mut(cntr)?.cntr.adderr(n);
        Ok(())
    }

    /// Sets the value.
    pub fn set(&mut self, cntr: CntrId, v: u64) -> Result<()> {
        self.cntr_mut(cntr)?.cntr.set(v);
        Ok(())
    }

    /// Sets the error value.
    pub fn seterr(&mut self, cntr: CntrId, v: u64) -> Result<()> {
        self.cntr_mut(cntr)?.cntr.seterr(v);
        Ok(())
    }

    pub(super) fn cntr(&self, cntr: CntrId) -> Result<&CntrTable> {
        self.by_handle(cntr.0).ok_or(Error::BadFd)
    }

    fn cntr_mut(&mut self, cntr: CntrId) -> Result<&mut CntrTable> {
        self.by_handle_mut(cntr.0).ok_or(Error::BadFd)
    }

    /// Counts successes in a counter, if it is bound: not [`CntrIdx::NONE`].
    #[inline]
    pub(crate) fn count(&mut self, cntr: CntrIdx, done: Done) {
        if cntr != CntrIdx::NONE {
            self[cntr].cntr.count(done);
        }
    }

    /// Counts one failed operation in a counter, if it is bound, also if the counter counts bytes.
    #[inline]
    pub(crate) fn count_failed(&mut self, cntr: CntrIdx) {
        if cntr != CntrIdx::NONE {
            self[cntr].cntr.adderr(1);
        }
    }

    /// Whether a bound counter counts bytes.
    #[inline]
    pub(crate) fn counts_bytes(&self, cntr: CntrIdx) -> bool {
        cntr != CntrIdx::NONE && self[cntr].cntr.counts_bytes()
    }
}
