//! Scalable endpoints: several transmit and several receive contexts under one address.
//!
//! A context is an endpoint record with queues of its own. Receive context `i` has the number of
//! the scalable endpoint plus `i`, so that an address can name it; numbers of contexts that are not
//! open stay reserved. An address that names a context also carries `i`, since the numbers behind
//! the last context belong to other endpoints. No message names a transmit context. It sends under
//! the number of the scalable endpoint, so a look-up of its messages' source yields the one
//! address.

use super::ep::SIDE;
use super::ep::{Ep, with_directions};
use super::{EpAttr, EpId, Eps, Node, Objects, SepId};
use crate::error::{Error, Result};
use crate::flags::Caps;
use crate::idx::{EpIdx, SepIdx};
use crate::slab::Slab;
use crate::types::EpAddr;

/// Maximum scalable endpoints of a node.
const SEPS: usize = 4096;

/// The endpoint of each number.
#[derive(Debug)]
pub(crate) struct Numbers {
    /// Endpoint slot by number, [`UNUSED_SLOT`](super::ep::Ep::UNUSED_SLOT) if the number is
    /// unused: zero pages that the kernel supplies on first touch. The table has an entry for every
    /// number, so a look-up needs no bounds check.
    at: Box<[u32; 1 << 16]>,
    /// Numbers reserved by scalable endpoints.
    kept: Slab<Sep, (), SepIdx>,
}

impl Default for Numbers {
    fn default() -> Self {
        let at: Box<[_]> = vec![Ep::UNUSED_SLOT.get(); 1 << 16].into();
        let at = at.try_into().expect("the lengths are equal");
        Self { at, kept: Slab::with_capacity(SEPS) }
    }
}

impl Numbers {
    /// The endpoint with this number, or [`Ep::UNUSED_SLOT`].
    #[inline(always)]
    pub(super) fn ep(&self, number: u16) -> EpIdx {
        EpIdx::of(self.at[usize::from(number)])
    }

    /// Assigns the number to `ep`, or frees it ([`UNUSED_SLOT`](Ep::UNUSED_SLOT)).
    pub(super) fn set(&mut self, number: u16, ep: EpIdx) {
        self.at[usize::from(number)] = ep.get();
    }
}

/// The numbers of a scalable endpoint.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sep {
    first: u16,
    count: u16,
}

impl Sep {
    pub(super) fn has(&self, number: u16) -> bool {
        number >= self.first && number - self.first < self.count
    }
}

/// The capabilities of an endpoint that a transmit context keeps.
pub fn transmit_caps(caps: Caps) -> Caps {
    let others = Caps::RECV | Caps::REMOTE_READ | Caps::REMOTE_WRITE;
    one_way(caps, others, Caps::SEND, Caps::READ | Caps::WRITE)
}

/// The capabilities of an endpoint that a receive context keeps.
pub fn receive_caps(caps: Caps) -> Caps {
    let others = Caps::SEND | Caps::READ | Caps::WRITE;
    one_way(caps, others, Caps::RECV, Caps::REMOTE_READ | Caps::REMOTE_WRITE)
}

/// Removes the `others`, and kinds of operations that then have no direction left, as these would
/// stand for both directions.
fn one_way(caps: Caps, others: Caps, messages: Caps, one_sided: Caps) -> Caps {
    let mut caps = with_directions(caps) - others - Caps::COLLECTIVE;
    if !caps.intersects(messages) {
        caps -= Caps::MSG | Caps::TAGGED;
    }
    if !caps.intersects(one_sided) {
        caps -= Caps::RMA | Caps::ATOMIC;
    }
    caps
}

impl Eps {
    /// Creates a scalable endpoint with `rx_count` receive contexts, 1 to [`Node::CTX_MAX`], none
    /// of them open. It has the given number, or the lowest number that is followed by enough free
    /// ones.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: the number of contexts is out of range, or too large for the given
    ///   number.
    /// - [`Error::AddrInUse`]: one of the numbers is taken.
    /// - [`Error::NoMem`]: there are not as many free numbers in a row.
    pub fn sep_open(&mut self, number: Option<u16>, rx_count: usize) -> Result<SepId> {
        if !(1..=Node::CTX_MAX).contains(&rx_count) {
            return Err(Error::Invalid("rx_ctx_cnt: 1 to 256"));
        }
        let count = rx_count as u16;
        let last = u16::MAX - (count - 1);
        let first = match number {
            Some(n) if n > last => return Err(Error::Invalid("rx_ctx_cnt: past the last number")),
            Some(n) if !self.are_free(n, count) => return Err(Error::AddrInUse),
            Some(n) => n,
            None => {
                let mut all = 0..SIDE - count;
                all.find(|&n| self.are_free(n, count)).ok_or(Error::NoMem)?
            }
        };
        let idx = self.numbers.kept.alloc(Sep { first, count }).ok_or(Error::NoMem)?;
        Ok(SepId(self.numbers.kept.handle(idx)))
    }

    /// Opens a transmit context, which all calls treat as an endpoint, closing included. The number
    /// in the attributes and capabilities to receive are ignored.
    ///
    /// # Errors
    /// [`Error::BadFd`]: the scalable endpoint was closed. Else as [`open`](Self::open).
    pub fn sep_tx_open(&mut self, sep: SepId, attr: EpAttr) -> Result<EpId> {
        let number = self.sep(sep)?.first;
        let attr = EpAttr { caps: transmit_caps(attr.caps), buffered_recv: false, ..attr };
        attr.check_context()?;
        self.record(attr, number)
    }

    /// Opens receive context `idx`, which all calls treat as an endpoint, closing included. The
    /// number in the attributes and capabilities to send are ignored.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: there are fewer contexts. [`Error::Busy`]: the context is open.
    /// - [`Error::BadFd`]: the scalable endpoint was closed.
    ///
    /// Else as [`open`](Self::open).
    pub fn sep_rx_open(&mut self, sep: SepId, idx: usize, attr: EpAttr) -> Result<EpId> {
        let Sep { first, count } = self.sep(sep)?;
        if idx >= usize::from(count) {
            return Err(Error::Invalid("index: the scalable endpoint has fewer contexts"));
        }
        let number = first + idx as u16;
        if self.slot(number) != Ep::UNUSED_SLOT {
            return Err(Error::Busy);
        }
        let attr = EpAttr { caps: receive_caps(attr.caps), ..attr };
        attr.check_context()?;
        let ep = self.add(attr, number)?;
        self[ep.0.idx()].rx_ctx = idx as u8;
        Ok(ep)
    }

    /// Closes a scalable endpoint.
    ///
    /// # Errors
    /// [`Error::Busy`]: a context of it is open. [`Error::BadFd`]: it was closed before.
    pub fn sep_close(&mut self, sep: SepId) -> Result<()> {
        let it = self.sep(sep)?;
        if self.iter().any(|(_, ep)| ep.sharers.is_none() && it.has(ep.number)) {
            return Err(Error::Busy);
        }
        self.numbers.kept.free(sep.0.idx());
        Ok(())
    }

    /// Whether an endpoint has this number, or a scalable endpoint reserves it.
    pub(super) fn is_taken(&self, number: u16) -> bool {
        self.slot(number) != Ep::UNUSED_SLOT || self.is_reserved(number)
    }

    /// Whether a scalable endpoint reserves the number.
    pub(super) fn is_reserved(&self, number: u16) -> bool {
        self.numbers.kept.iter().any(|(_, sep)| sep.has(number))
    }

    fn are_free(&self, first: u16, count: u16) -> bool {
        (first..=first + (count - 1)).all(|n| !self.is_taken(n))
    }

    pub(super) fn sep(&self, sep: SepId) -> Result<Sep> {
        self.numbers.kept.by_handle(sep.0).copied().ok_or(Error::BadFd)
    }
}

impl Node {
    /// Maximum contexts of each direction of a scalable endpoint.
    pub const CTX_MAX: usize = 256;
}

impl Objects<'_> {
    /// The address of receive context 0, and of all contexts through an address vector that names
    /// contexts.
    ///
    /// # Errors
    /// [`Error::BadFd`]: it was closed.
    pub fn sep_addr(&self, sep: SepId) -> Result<EpAddr> {
        let ep = self.eps.sep(sep)?.first;
        Ok(EpAddr { station: self.port.station, ep, incarnation: self.settings.incarnation })
    }
}
