//! The provider's name in libfabric (`FI_BAREWIRE_AS`), and the conventions that programs expect
//! with it.
//!
//! A program that selects `tcp` by name expects IP addresses, domains that are interfaces of the
//! kernel, and a protocol number. Of two providers with the same name libfabric selects the one
//! with the higher version, so this one has the highest possible version.

use std::ffi::CStr;
use std::net::IpAddr;
use std::sync::OnceLock;

use barewire::info::{PROTOCOL, PROV_NAME};
use barewire::names::{has_address, interface_at};
use barewire::settings::{BadSetting, KnownAs, Settings};

use crate::abi::{EpAttr, FI_EP_MSG, FI_PROTO_RXM, FI_PROTO_SOCK_TCP, version};
use crate::host;

/// FI_PROTO_XNET, which headers before 1.17 do not name.
const FI_PROTO_XNET: u32 = 25;

/// Default port of a program that selects `tcp`: one that reaches other hosts.
const TCP_PORT: &str = "auto";

/// The name. Fixed from the first call on, since libfabric keeps it.
pub(crate) fn known_as() -> KnownAs {
    static NAME: OnceLock<KnownAs> = OnceLock::new();
    // With a misspelt name another provider would be selected, and `fi_getinfo` of this one not be
    // called, so the warning is printed here.
    *NAME.get_or_init(|| {
        host::name_set().unwrap_or_else(|e| {
            host::warn_on_stderr(&host::line_of(&e));
            KnownAs::default()
        })
    })
}

/// Whether the provider has the name of one whose addresses are IP addresses.
pub(crate) fn uses_ip_addresses() -> bool {
    known_as() != KnownAs::Barewire
}

/// Name and version in the provider's record. For `tcp;ofi_rxm` it is `ofi_rxm`: libfabric puts the
/// name of an answer before it.
pub(crate) fn record() -> (&'static CStr, u32) {
    match known_as() {
        KnownAs::Barewire => (c"barewire", version(0, 1)),
        KnownAs::Tcp => (c"tcp", version(0xffff, 0)),
        KnownAs::TcpRxm => (c"ofi_rxm", version(0xffff, 0)),
    }
}

/// The provider's name as programs see it.
pub(crate) fn full_name() -> &'static str {
    match known_as() {
        KnownAs::Barewire => PROV_NAME,
        KnownAs::Tcp => "tcp",
        KnownAs::TcpRxm => "tcp;ofi_rxm",
    }
}

/// The provider name in an answer, which libfabric completes with that of the record.
pub(crate) fn lower_name() -> Option<&'static str> {
    (known_as() == KnownAs::TcpRxm).then_some("tcp")
}

/// Whether a list of providers in hints includes this one. libfabric has compared the last name.
pub(crate) fn is_among(list: &str) -> bool {
    let mut names = list.split([',', ';']).map(str::trim);
    if uses_ip_addresses() {
        names.all(|name| ["tcp", "ofi_rxm"].contains(&name) || name.starts_with('^'))
    } else {
        !list.trim().starts_with('^') && names.any(|name| name == PROV_NAME)
    }
}

/// Whether endpoints of a type are supported under this name.
pub(crate) fn offers(ep_type: u32) -> bool {
    known_as() != KnownAs::TcpRxm || ep_type != FI_EP_MSG
}

/// `fi_ep_attr.protocol` of endpoints of a type.
pub(crate) fn protocol(ep_type: u32) -> u32 {
    match known_as() {
        KnownAs::Barewire => PROTOCOL,
        KnownAs::Tcp if ep_type == FI_EP_MSG => FI_PROTO_SOCK_TCP,
        KnownAs::Tcp => FI_PROTO_XNET,
        KnownAs::TcpRxm => FI_PROTO_RXM,
    }
}

/// `fi_ep_attr.protocol` of hints: [`PROTOCOL`] if it is the protocol of this provider's endpoints.
pub(crate) fn protocol_of(attr: &EpAttr) -> u32 {
    let is_ours = attr.protocol == protocol(attr.r#type);
    if is_ours { PROTOCOL } else { attr.protocol }
}

/// The port of a domain name: an interface stands for the port of the settings, or for `auto` on
/// that interface.
pub(crate) fn port_of(domain: &str) -> String {
    if !uses_ip_addresses() || !has_address(domain) {
        return domain.to_owned();
    }
    let set = host::settings().ok().and_then(|s| s.port).filter(|port| port != TCP_PORT);
    let is_loopback = interface_at(IpAddr::from([127, 0, 0, 1])).as_deref() == Some(domain);
    set.unwrap_or_else(|| match is_loopback {
        // The loopback interface means this host, at the address by which others reach it.
        true => TCP_PORT.to_owned(),
        false => format!("{TCP_PORT}:{domain}"),
    })
}

/// Settings of the environment, and the port that goes with the name if they have none.
///
/// # Errors
/// [`BadSetting`]: of the first invalid parameter.
pub(crate) fn settings() -> Result<Settings, BadSetting> {
    let read = host::settings()?;
    let default = || uses_ip_addresses().then(|| TCP_PORT.to_owned());
    Ok(Settings { port: read.port.clone().or_else(default), ..read })
}

/// As [`settings`]; logs the error.
///
/// # Errors
/// [`barewire::Error::Invalid`]: a parameter has an invalid value.
pub(crate) fn settings_or_warn() -> barewire::Result<Settings> {
    settings().map_err(|e| {
        host::warn_on_stderr(&host::line_of(&e));
        barewire::Error::Invalid("environment")
    })
}
