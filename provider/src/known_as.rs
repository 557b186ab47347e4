//! The name under which libfabric knows us (`FI_BAREWIRE_AS`), and what programs expect with it.
//!
//! A program that selects `tcp` by name expects IP addresses, domains that are interfaces of the
//! kernel, and a protocol number. Of two providers with the same name libfabric selects the one
//! with the higher version, so ours is the highest possible.

use std::ffi::CStr;
use std::net::IpAddr;
use std::sync::OnceLock;

use barewire::info::{PROTOCOL, PROV_NAME};
use barewire::names::{has_address, interface_at};
use barewire::settings::KnownAs;

use crate::abi::{EpAttr, FI_EP_MSG, FI_PROTO_RXM, FI_PROTO_SOCK_TCP, version};
use crate::addr::Form;
use crate::host;

/// FI_PROTO_XNET, which headers before 1.17 do not name.
const FI_PROTO_XNET: u32 = 25;

/// The port of a program that chose `tcp` and names none: it wants to reach other hosts.
const TCP_PORT: &str = "auto";

/// The name. Fixed from the first call on, as libfabric keeps it.
pub(crate) fn known_as() -> KnownAs {
    static NAME: OnceLock<KnownAs> = OnceLock::new();
    // Another provider would serve whoever wrote it wrong, and `fi_getinfo` not be ours to tell.
    *NAME.get_or_init(|| {
        host::name_set().unwrap_or_else(|e| {
            host::warn_aloud(&host::line_of(&e));
            KnownAs::default()
        })
    })
}

/// Whether we stand in for a provider whose addresses are those of IP.
pub(crate) fn by_ip() -> bool {
    known_as() != KnownAs::Barewire
}

/// Name and version of our record. `tcp;ofi_rxm` is the record of `ofi_rxm`, before whose name
/// libfabric sets that of an answer.
pub(crate) fn record() -> (&'static CStr, u32) {
    match known_as() {
        KnownAs::Barewire => (c"barewire", version(0, 1)),
        KnownAs::Tcp => (c"tcp", version(0xffff, 0)),
        KnownAs::TcpRxm => (c"ofi_rxm", version(0xffff, 0)),
    }
}

/// The provider's name as programs see it.
pub(crate) fn whole() -> &'static str {
    match known_as() {
        KnownAs::Barewire => PROV_NAME,
        KnownAs::Tcp => "tcp",
        KnownAs::TcpRxm => "tcp;ofi_rxm",
    }
}

/// The name in an answer, before libfabric completes it with that of the record.
pub(crate) fn lower() -> Option<&'static str> {
    (known_as() == KnownAs::TcpRxm).then_some("tcp")
}

/// Whether a list of providers in hints leaves room for us. libfabric has compared the last name.
pub(crate) fn is_among(list: &str) -> bool {
    let mut names = list.split([',', ';']).map(str::trim);
    if by_ip() {
        names.all(|name| ["tcp", "ofi_rxm"].contains(&name) || name.starts_with('^'))
    } else {
        !list.trim().starts_with('^') && names.any(|name| name == PROV_NAME)
    }
}

/// Whether endpoints of a type are offered.
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

/// `fi_ep_attr.protocol` of hints, as ours if it is the one of our endpoints.
pub(crate) fn protocol_of(attr: &EpAttr) -> u32 {
    let is_ours = attr.protocol == protocol(attr.r#type);
    if is_ours { PROTOCOL } else { attr.protocol }
}

/// The port of a domain of this name: an interface stands for the port that is set, or for what
/// `auto` makes of it.
pub(crate) fn port_of(domain: &str) -> String {
    if !by_ip() || !has_address(domain) {
        return domain.to_owned();
    }
    let set = host::settings().ok().and_then(|s| s.port).filter(|port| port != TCP_PORT);
    let is_loopback = interface_at(IpAddr::from([127, 0, 0, 1])).as_deref() == Some(domain);
    set.unwrap_or_else(|| match is_loopback {
        // This host, at the address that others reach it by.
        true => TCP_PORT.to_owned(),
        false => format!("{TCP_PORT}:{domain}"),
    })
}

/// The port that is used where none is set, if it is not the crate's.
pub(crate) fn usual_port() -> Option<String> {
    by_ip().then(|| TCP_PORT.to_owned())
}

/// The name of a domain in an answer: the interface that the program named or has the address of,
/// else the one that has the port's.
pub(crate) fn domain_name(port: Option<&str>, named: Option<&str>, form: Form) -> Option<String> {
    let own = || match form {
        Form::SockaddrIn(names) | Form::SockaddrIn6(names) if by_ip() => {
            interface_at(names.own_ip())
        }
        _ => None,
    };
    named.map(str::to_owned).filter(|_| by_ip()).or_else(own).or_else(|| port.map(str::to_owned))
}
