//! Checks of the keys that endpoints and regions name.

use barewire_dataplane::seal::PreSharedKey;

use crate::errno::{Error, Result};
use crate::inner::{Core, DomainRef};

/// Whether these bytes are a key of the domain: that of its attributes, or one of its list.
///
/// # Errors
/// [`Error::OpBadState`] as for every call.
pub(crate) fn is_auth_key(dom: &DomainRef, key: &[u8]) -> Result<bool> {
    let Some(key) = PreSharedKey::new(key, dom.settings.seal) else { return Ok(false) };
    let mut core = dom.enter_control()?;
    Ok(core.auth_keys.opened_with(&key) || core.node().openings.lists_key(&key))
}

/// Refuses an endpoint's key that is not a key of its domain.
///
/// # Errors
/// [`Error::Invalid`].
pub(crate) fn check_endpoint(dom: &DomainRef, key: &[u8]) -> Result<()> {
    if key.is_empty()
        || !dom.enter_control()?.node().openings.has_tenants() && is_auth_key(dom, key)?
    {
        return Ok(());
    }
    tracing::warn!(
        "an endpoint with an auth_key of its own: a domain has one for all of its endpoints, so \
         open a domain for each key, or one with FI_AV_AUTH_KEY"
    );
    Err(Error::Invalid("auth_key of the endpoint: not the domain's"))
}

/// Refuses a call that is not supported with keys of address vectors.
///
/// # Errors
/// [`Error::OpNotSupp`].
pub(crate) fn needs_one_key(core: &mut Core) -> Result<()> {
    match core.node().openings.has_tenants() {
        true => Err(Error::OpNotSupp("FI_AV_AUTH_KEY: only with connectionless endpoints")),
        false => Ok(()),
    }
}
