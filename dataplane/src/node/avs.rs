//! The address vectors of a node.

use super::AvId;
use crate::av::{Av, AvEntry};
use crate::error::{Error, Result};
use crate::idx::AvIdx;
use crate::slab::Slab;
use crate::types::{FiAddr, Tenant};

/// See the module. A call that names a vector which was closed is [`Error::BadFd`].
pub(super) type Avs = Slab<AvTable, (), AvIdx>;

/// An address vector, and the number of objects bound to it.
#[derive(Debug)]
pub struct AvTable {
    pub(crate) av: Av,
    pub(crate) bound: u32,
}

impl Avs {
    /// From now on the highest `rx_ctx_bits` bits of an address, at most 16, name a receive context
    /// of a scalable endpoint, and its index stands in the others. 0: all is index.
    ///
    /// # Errors
    /// [`Error::Invalid`]: too many bits. [`Error::BadFd`]: it was closed.
    pub fn name_contexts(&mut self, av: AvId, rx_ctx_bits: u32) -> Result<()> {
        if rx_ctx_bits > u16::BITS {
            return Err(Error::Invalid("rx_ctx_bits: at most 16"));
        }
        self.by_handle_mut(av.0).ok_or(Error::BadFd)?.av.name_contexts(rx_ctx_bits);
        Ok(())
    }

    /// From now on completions call an address of the vector, and a tenant, by the name that its
    /// user gives it ([`av_set_user_id`](super::Objects::av_set_user_id)), and one without by
    /// [`FI_ADDR_UNSPEC`](crate::types::FI_ADDR_UNSPEC).
    pub fn name_by_user_id(&mut self, av: AvId) -> Result<()> {
        self.by_handle_mut(av.0).ok_or(Error::BadFd)?.av.name_by_user_id();
        Ok(())
    }

    /// Whether [`av_name_by_user_id`](Self::name_by_user_id) was called.
    pub fn is_by_user_id(&self, av: AvId) -> Result<bool> {
        Ok(self.by_handle(av.0).ok_or(Error::BadFd)?.av.is_by_user_id())
    }

    /// Lets error completions call a tenant by `user_id`.
    pub fn set_tenant_user_id(&mut self, av: AvId, tenant: Tenant, user_id: FiAddr) -> Result<()> {
        let table = self.by_handle_mut(av.0).ok_or(Error::BadFd)?;
        table.av.set_key_user_id(tenant.handle(), user_id);
        Ok(())
    }

    /// What is inserted under an index.
    ///
    /// # Errors
    /// [`Error::Invalid`]: nothing. [`Error::BadFd`]: the vector was closed.
    pub(super) fn entry(&self, av: AvId, addr: FiAddr) -> Result<AvEntry> {
        let table = self.by_handle(av.0).ok_or(Error::BadFd)?;
        table.av.lookup(addr).ok_or(Error::Invalid("address not in the AV"))
    }

    /// All indexes in use, in order.
    pub fn addrs(&self, av: AvId) -> Result<Vec<FiAddr>> {
        let table = self.by_handle(av.0).ok_or(Error::BadFd)?;
        Ok(table.av.iter().map(|(addr, _)| addr).collect())
    }
}
