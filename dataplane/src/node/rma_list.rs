//! The remote ranges of a one-sided operation.

/// A range of a remote region (`fi_rma_iov`, `fi_rma_ioc`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RmaIov {
    /// First byte, as the region's owner addresses it.
    pub addr: u64,
    /// Bytes; of an atomic operation, elements.
    pub len: u64,
    /// Key of the region.
    pub key: u64,
}

/// Up to [`RmaList::MAX`] remote ranges.
#[derive(Clone, Copy, Debug, Default)]
pub struct RmaList {
    count: usize,
    iov: [RmaIov; Self::MAX],
}

impl RmaList {
    /// Most ranges of one operation (`rma_iov_limit`).
    pub const MAX: usize = 8;

    /// One range.
    pub fn one(addr: u64, len: u64, key: u64) -> Self {
        let mut list = Self::default();
        list.push(RmaIov { addr, len, key });
        list
    }

    /// Appends a range and says whether there was room.
    pub fn push(&mut self, range: RmaIov) -> bool {
        let room = self.count < Self::MAX;
        if room {
            self.iov[self.count] = range;
            self.count += 1;
        }
        room
    }

    /// The ranges.
    pub fn as_slice(&self) -> &[RmaIov] {
        &self.iov[..self.count]
    }

    /// The sum of the lengths, `None` if that is above 2^64.
    pub(super) fn total(&self) -> Option<u64> {
        self.as_slice().iter().try_fold(0_u64, |sum, range| sum.checked_add(range.len))
    }
}
