//! Keys by their bytes, as libfabric's calls name them: the key of a domain, which its endpoints
//! and regions may name, and the keys of address vectors (`FI_AV_AUTH_KEY`), one for each tenant.

use barewire_dataplane::node::AvId;
use barewire_dataplane::seal::{Mode, PreSharedKey};
use barewire_dataplane::types::{FiAddr, Tenant};

use crate::errno::{Error, Result};
use crate::info::AuthKey;

/// No key of the vector has the handle.
const UNKNOWN: Error = Error::Invalid("fi_addr: no key has this handle");

/// The keys of a domain that calls name by their bytes.
#[derive(Default)]
pub(crate) struct AuthKeys {
    /// The key of a domain whose frames are not sealed. If they are, the node has the list.
    domain: Option<PreSharedKey>,
    tenants: Vec<TenantKey>,
}

/// The key of a tenant.
struct TenantKey {
    tenant: Tenant,
    key: AuthKey,
    /// The address vectors that have the key.
    avs: Vec<AvId>,
}

impl AuthKeys {
    /// The keys of a domain that was opened with `auth_key`, empty for none.
    pub(crate) fn of(auth_key: &[u8], seal: Mode) -> Self {
        Self { domain: PreSharedKey::new(auth_key, seal), tenants: Vec::new() }
    }

    /// Whether the domain was opened with this key.
    pub(crate) fn opened_with(&self, key: &PreSharedKey) -> bool {
        self.domain.as_ref().is_some_and(|own| own.is(key))
    }

    /// Notes that the key of a tenant was added to `av`.
    pub(crate) fn add(&mut self, tenant: Tenant, key: &[u8], av: AvId) {
        match self.tenants.iter_mut().find(|tenant_key| tenant_key.tenant == tenant) {
            Some(TenantKey { avs, .. }) if avs.contains(&av) => {}
            Some(TenantKey { avs, .. }) => avs.push(av),
            None => self.tenants.push(TenantKey { tenant, key: AuthKey::new(key), avs: vec![av] }),
        }
    }

    /// Removes the key of a tenant from `av`, and returns whether it was the last vector with the
    /// key.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `av` does not have the key.
    pub(crate) fn remove_from_av(&mut self, tenant: Tenant, av: AvId) -> Result<bool> {
        let tenant_key = self.tenants.iter_mut().find(|tenant_key| tenant_key.tenant == tenant);
        let tenant_key = tenant_key.ok_or(UNKNOWN)?;
        let at = tenant_key.avs.iter().position(|of| *of == av).ok_or(UNKNOWN)?;
        tenant_key.avs.swap_remove(at);
        Ok(tenant_key.avs.is_empty())
    }

    /// The tenants whose keys were added to `av`.
    pub(crate) fn of_av(&self, av: AvId) -> Vec<Tenant> {
        let theirs = self.tenants.iter().filter(|tenant_key| tenant_key.avs.contains(&av));
        theirs.map(|tenant_key| tenant_key.tenant).collect()
    }

    /// The key of a tenant.
    ///
    /// # Errors
    /// [`Error::Invalid`]: no such key.
    pub(crate) fn of_tenant(&self, tenant: Tenant) -> Result<&AuthKey> {
        let known = self.tenants.iter().find(|tenant_key| tenant_key.tenant == tenant);
        known.map(|tenant_key| &tenant_key.key).ok_or(UNKNOWN)
    }

    /// Overwrites the key of a tenant.
    pub(crate) fn remove(&mut self, tenant: Tenant) {
        self.tenants.retain(|tenant_key| tenant_key.tenant != tenant);
    }
}

/// The tenant of a key handle.
///
/// # Errors
/// [`Error::Invalid`]: `key` is not a handle.
pub(crate) fn tenant_of(key: FiAddr) -> Result<Tenant> {
    Tenant::of_handle(key).ok_or(Error::Invalid("fi_addr: not the handle of a key"))
}
