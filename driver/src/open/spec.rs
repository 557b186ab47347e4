//! Parsing that all kinds of port names share.

use std::any::Any;
use std::fmt::Display;
use std::net::SocketAddr;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::str::FromStr;

use crate::error::OpenError;

/// A port of this machine, and whether it can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// Its name, or its kind if there is nothing to open.
    pub spec: String,
    /// Description.
    pub what: String,
    /// Why it cannot be opened, and the remedy, in one line; `None` if it can.
    pub why_not: Option<String>,
}

/// Encapsulation of the frames that a device receives.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Encapsulation {
    /// VLAN id.
    pub(super) vlan: Option<u16>,
    /// Destination address of UDP datagrams.
    pub(super) udp_addr: Option<SocketAddr>,
}

/// An error in `spec` or a part of it, with what to write instead. A memif's secret is redacted:
/// errors go to logs.
pub(super) fn bad_spec(spec: &str, why: impl Into<String>) -> OpenError {
    const SECRET: &str = "secret=";
    let mut redacted = spec.to_owned();
    let mut from = 0;
    while let Some(at) = redacted[from..].find(SECRET) {
        from += at + SECRET.len();
        let end = redacted[from..].find([',', ')']).map_or(redacted.len(), |len| from + len);
        redacted.replace_range(from..end, "...");
    }
    OpenError::BadSpec { spec: redacted, why: why.into() }
}

/// Parses the value of an option of `spec`.
pub(super) fn parse<T: FromStr>(spec: &str, value: &str) -> Result<T, OpenError>
where
    T::Err: Display + 'static,
{
    value.parse().map_err(|e: T::Err| {
        let any: &dyn Any = &e;
        let why = match any.downcast_ref::<ParseIntError>().map(ParseIntError::kind) {
            Some(IntErrorKind::PosOverflow | IntErrorKind::NegOverflow) => " is too large".into(),
            Some(_) => " is not a number; write digits alone, as in 1500".into(),
            None if any.is::<ParseFloatError>() => " is not a number; write one, as in 0.01".into(),
            None => format!(": {e}"),
        };
        bad_spec(spec, format!("\"{value}\"{why}"))
    })
}

/// Splits an option into key and value; the value is "" if there is none.
pub(super) fn split_option(part: &str) -> (&str, &str) {
    part.split_once('=').unwrap_or((part, ""))
}

/// The device or address of a port of this kind, and its options; `None` if it is empty.
pub(super) fn device_and_options<'a>(
    spec: &'a str,
    kind: &str,
) -> Option<(&'a str, impl Iterator<Item = (&'a str, &'a str)>)> {
    let mut parts = spec.strip_prefix(kind)?.strip_prefix(':')?.split(',');
    let device = parts.next().filter(|device| !device.is_empty())?;
    Some((device, parts.map(split_option)))
}

/// The error for an unknown option; `known` lists the supported ones.
pub(super) fn no_option(spec: &str, key: &str, known: &str) -> OpenError {
    bad_spec(spec, format!("no option \"{key}\"; there are {known}"))
}

/// Parses `yes` or `no`.
pub(super) fn yes_or_no(spec: &str, key: &str, value: &str) -> Result<bool, OpenError> {
    match value {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(bad_spec(spec, format!("write {key}=yes or {key}=no"))),
    }
}

/// Offset in `spec` behind any sequence of these wrappers, each written with its parenthesis.
/// `None` if one is not closed.
pub(super) fn skip_wrappers(spec: &str, wrappers: &[&str]) -> Option<usize> {
    let mut at = 0;
    while wrappers.iter().any(|wrapper| spec[at..].starts_with(wrapper)) {
        at += spec[at..].find("):")? + 2;
    }
    Some(at)
}

/// Splits `kind(options):rest`.
pub(super) fn split_wrapper(spec: &str) -> Result<(&str, &str, &str), OpenError> {
    let parts = || {
        let open = spec.find('(')?;
        // A capture's path may hold a parenthesis; what ends the options is the one with a colon.
        let close = spec.find("):")?;
        let options = spec.get(open + 1..close)?;
        Some((&spec[..=close], options, &spec[close + 2..]))
    };
    parts().ok_or_else(|| {
        let kind = spec.split([':', ',', '(']).next().unwrap_or("");
        bad_spec(spec, format!("a port around a port is written {kind}(OPTION=VALUE,...):PORT"))
    })
}
