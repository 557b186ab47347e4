//! What the names of all kinds of ports have in common.

use std::any::Any;
use std::fmt::Display;
use std::net::SocketAddr;
use std::num::{IntErrorKind, ParseFloatError, ParseIntError};
use std::str::FromStr;

use crate::error::OpenError;

/// What a port of this machine is called, and whether it can be opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortInfo {
    /// What to write to open it, or its kind if there is nothing to open.
    pub spec: String,
    /// What it is.
    pub what: String,
    /// Why it cannot be opened and what to do, in one line; `None` if it can.
    pub why_not: Option<String>,
}

/// What stands around the frames that a device is to take.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outer {
    /// A tag of this VLAN.
    pub(super) vlan: Option<u16>,
    /// A datagram to this place.
    pub(super) place: Option<SocketAddr>,
}

/// What is wrong with `spec`, or with the part of it that is given, and what to write instead. A
/// memif's secret is not told: errors go to logs.
pub(super) fn bad(spec: &str, why: impl Into<String>) -> OpenError {
    const SECRET: &str = "secret=";
    let mut told = spec.to_owned();
    let mut from = 0;
    while let Some(at) = told[from..].find(SECRET) {
        from += at + SECRET.len();
        let end = told[from..].find([',', ')']).map_or(told.len(), |len| from + len);
        told.replace_range(from..end, "...");
    }
    OpenError::BadSpec { spec: told, why: why.into() }
}

/// The value of an option of `spec`.
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
        bad(spec, format!("\"{value}\"{why}"))
    })
}

/// An option and its value; "" if it has none.
pub(super) fn pair(part: &str) -> (&str, &str) {
    part.split_once('=').unwrap_or((part, ""))
}

/// What a port of this kind is at, and its options: `None` if nothing is written behind the colon.
pub(super) fn place_and_options<'a>(
    spec: &'a str,
    kind: &str,
) -> Option<(&'a str, impl Iterator<Item = (&'a str, &'a str)>)> {
    let mut parts = spec.strip_prefix(kind)?.strip_prefix(':')?.split(',');
    let place = parts.next().filter(|place| !place.is_empty())?;
    Some((place, parts.map(pair)))
}

/// There is no such option, but those that are `known`.
pub(super) fn no_option(spec: &str, key: &str, known: &str) -> OpenError {
    bad(spec, format!("no option \"{key}\"; there are {known}"))
}

/// The value of an option that is `yes` or `no`.
pub(super) fn yes_or_no(spec: &str, key: &str, value: &str) -> Result<bool, OpenError> {
    match value {
        "yes" => Ok(true),
        "no" => Ok(false),
        _ => Err(bad(spec, format!("write {key}=yes or {key}=no"))),
    }
}

/// Where in `spec` begins what stands behind these wrappers, each written with its parenthesis, in
/// any order. `None` if one has no end.
pub(super) fn behind(spec: &str, wrappers: &[&str]) -> Option<usize> {
    let mut at = 0;
    while wrappers.iter().any(|wrapper| spec[at..].starts_with(wrapper)) {
        at += spec[at..].find("):")? + 2;
    }
    Some(at)
}

/// Splits `kind(options):rest`.
pub(super) fn wrapped(spec: &str) -> Result<(&str, &str, &str), OpenError> {
    let parts = || {
        let open = spec.find('(')?;
        // A capture's path may hold a parenthesis; what ends the options is the one with a colon.
        let close = spec.find("):")?;
        let options = spec.get(open + 1..close)?;
        Some((&spec[..=close], options, &spec[close + 2..]))
    };
    parts().ok_or_else(|| {
        let kind = spec.split([':', ',', '(']).next().unwrap_or("");
        bad(spec, format!("a port around a port is written {kind}(OPTION=VALUE,...):PORT"))
    })
}
