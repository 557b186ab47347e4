//! Keys as libfabric's calls name them: the one of a domain, which its endpoints and regions may
//! name too, and those of address vectors (`FI_AV_AUTH_KEY`), each of another tenant.

use barewire_dataplane::seal::{Mode, PreSharedKey};
use barewire_dataplane::types::{FiAddr, Tenant};

use crate::errno::{Error, Result};
use crate::info::AuthKey;

/// The keys of a domain that are asked for by their bytes.
#[derive(Default)]
pub(crate) struct AuthKeys {
    /// The one that the domain was opened with, also where frames are not sealed.
    domain: Option<PreSharedKey>,
    /// Those of address vectors.
    tenants: Vec<(Tenant, AuthKey)>,
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

    /// Notes the key of a tenant, if it is not known.
    pub(crate) fn add(&mut self, tenant: Tenant, key: &[u8]) {
        if self.of_tenant(tenant).is_err() {
            self.tenants.push((tenant, AuthKey(key.to_vec())));
        }
    }

    /// The key of a tenant.
    ///
    /// # Errors
    /// [`Error::Invalid`]: there is none.
    pub(crate) fn of_tenant(&self, tenant: Tenant) -> Result<&AuthKey> {
        let known = self.tenants.iter().find(|(of, _)| *of == tenant);
        known.map(|(_, key)| key).ok_or(Error::Invalid("fi_addr: no key has this handle"))
    }

    /// Overwrites the key of a tenant.
    pub(crate) fn remove(&mut self, tenant: Tenant) {
        self.tenants.retain(|(of, _)| *of != tenant);
    }
}

/// The tenant whose key a handle names, if there is one.
///
/// # Errors
/// [`Error::Invalid`]: no handle looks so.
pub(crate) fn tenant_of(key: FiAddr) -> Result<Tenant> {
    Tenant::of_handle(key).ok_or(Error::Invalid("fi_addr: not the handle of a key"))
}
