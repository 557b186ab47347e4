//! Keys as libfabric's calls name them: the one of a domain, which its endpoints and regions may
//! name too, and those of address vectors (`FI_AV_AUTH_KEY`), each of another tenant.

use barewire_dataplane::node::AvId;
use barewire_dataplane::seal::{Mode, PreSharedKey};
use barewire_dataplane::types::{FiAddr, Tenant};

use crate::errno::{Error, Result};
use crate::info::AuthKey;

/// No key of the vector has the handle.
const UNKNOWN: Error = Error::Invalid("fi_addr: no key has this handle");

/// The keys of a domain that are asked for by their bytes.
#[derive(Default)]
pub(crate) struct AuthKeys {
    /// The one that a domain was opened with whose frames are not sealed. Otherwise its node has
    /// the list.
    domain: Option<PreSharedKey>,
    tenants: Vec<Listed>,
}

/// The key of a tenant.
struct Listed {
    tenant: Tenant,
    key: AuthKey,
    /// The address vectors that it was added to and not removed from.
    avs: Vec<AvId>,
}

impl AuthKeys {
    /// Of a domain that was opened with `auth_key`, empty if without one.
    pub(crate) fn of(auth_key: &[u8], seal: Mode) -> Self {
        Self { domain: PreSharedKey::new(auth_key, seal), tenants: Vec::new() }
    }

    /// Whether the domain was opened with this key.
    pub(crate) fn opened_with(&self, key: &PreSharedKey) -> bool {
        self.domain.as_ref().is_some_and(|own| own.is(key))
    }

    /// Notes that the key of a tenant was added to `av`.
    pub(crate) fn add(&mut self, tenant: Tenant, key: &[u8], av: AvId) {
        match self.tenants.iter_mut().find(|listed| listed.tenant == tenant) {
            Some(Listed { avs, .. }) if avs.contains(&av) => {}
            Some(Listed { avs, .. }) => avs.push(av),
            None => self.tenants.push(Listed { tenant, key: AuthKey::new(key), avs: vec![av] }),
        }
    }

    /// Takes `av` from those that have the key of a tenant, and says whether it was the last.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it was none of them.
    pub(crate) fn leave(&mut self, tenant: Tenant, av: AvId) -> Result<bool> {
        let listed = self.tenants.iter_mut().find(|listed| listed.tenant == tenant);
        let listed = listed.ok_or(UNKNOWN)?;
        let at = listed.avs.iter().position(|of| *of == av).ok_or(UNKNOWN)?;
        listed.avs.swap_remove(at);
        Ok(listed.avs.is_empty())
    }

    /// The tenants whose keys were added to `av`.
    pub(crate) fn of_av(&self, av: AvId) -> Vec<Tenant> {
        let theirs = self.tenants.iter().filter(|listed| listed.avs.contains(&av));
        theirs.map(|listed| listed.tenant).collect()
    }

    /// The key of a tenant.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is none.
    pub(crate) fn of_tenant(&self, tenant: Tenant) -> Result<&AuthKey> {
        let known = self.tenants.iter().find(|listed| listed.tenant == tenant);
        known.map(|listed| &listed.key).ok_or(UNKNOWN)
    }

    /// Overwrites the key of a tenant.
    pub(crate) fn remove(&mut self, tenant: Tenant) {
        self.tenants.retain(|listed| listed.tenant != tenant);
    }
}

/// The tenant whose key a handle names, if there is one.
///
/// # Errors
/// [`Error::Invalid`]: no handle looks so.
pub(crate) fn tenant_of(key: FiAddr) -> Result<Tenant> {
    Tenant::of_handle(key).ok_or(Error::Invalid("fi_addr: not the handle of a key"))
}
