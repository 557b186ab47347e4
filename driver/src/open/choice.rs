//! Patterns and alternatives in port names, so that one name serves all nodes.
//!
//! `PORT|PORT|...` is the first port that would open. Instead of an interface, `afpacket:`, `xdp:`
//! and `udp:` accept a glob pattern (`en*`, with `*` and `?`) or a network (`10.1.0.0/16`): the
//! first interface whose name, alternative name or address matches. A suffix `/96` selects IPv6 for
//! an address, network or interface of `udp:` (`[2001:db8::]/96`, `eth0/96`, `en*/96`). `vfio:`
//! accepts a glob pattern of PCI addresses, or of vendor and device ids (`8086:15*`). `auto` is
//! `afpacket` on an interface that is up and has an address, or `udp` there, or `shm`;
//! `auto:PATTERN` is the first two on matching interfaces.

use std::net::{IpAddr, Ipv4Addr};

use super::host_port::{HostText, device_of, split_host_port};
use super::spec::bad_spec;
use crate::backend::inet::{Prefix, addresses, host_bits, host_text};
use crate::backend::netdev::{Link, alt_names, links};
use crate::backend::vfio::survey::{self, NicInfo};
use crate::error::OpenError;

/// Kinds of ports that accept patterns of interfaces.
const KINDS: &[&str] = &["afpacket", "udp", "xdp"];

/// Kinds that `auto` tries, in this order: they have no requirements on the interface.
const AUTO: &[&str] = &["afpacket", "udp"];

/// Resolves `spec` to a port of this node. Returns `spec` itself unless it has a pattern or
/// alternatives; otherwise logs the result and why others were refused. Costs the system calls of
/// [`check`](super::check) for each.
///
/// # Errors
/// None of them would open: the reason of each, or the list of interfaces.
pub fn choose(spec: &str) -> Result<String, OpenError> {
    if !has_choice(spec) {
        return Ok(spec.to_owned());
    }
    let mut refused = Vec::new();
    for one in alternatives(spec) {
        let ports = expand(one).unwrap_or_else(|why| {
            refused.push(why);
            Vec::new()
        });
        for port in ports {
            match super::check_one(&port) {
                Ok(()) => {
                    let passed: String = refused.iter().map(|why| format!("; {why}")).collect();
                    tracing::info!("port {spec} is {port} here{passed}");
                    return Ok(port);
                }
                Err(why) => refused.push(why),
            }
        }
    }
    if refused.len() == 1 {
        return Err(refused.remove(0));
    }
    let each: Vec<String> = refused.iter().map(ToString::to_string).collect();
    Err(bad_spec(spec, each.join("; ")))
}

/// Whether `spec` has a pattern or alternatives.
pub(super) fn has_choice(spec: &str) -> bool {
    alternatives(spec).len() > 1
        || device_of(spec).is_some_and(|device| pattern_in(device).is_some())
}

/// Splits at `|` outside of parentheses.
pub(super) fn alternatives(spec: &str) -> Vec<&str> {
    let (mut depth, mut from, mut all) = (0_usize, 0, Vec::new());
    for (at, c) in spec.char_indices() {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            '|' if depth == 0 => {
                all.push(spec[from..at].trim());
                from = at + 1;
            }
            _ => {}
        }
    }
    all.push(spec[from..].trim());
    all
}

/// A pattern that matches interfaces or cards.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Pattern<'a> {
    /// A glob of interface names, and whether their IPv6 rather than IPv4 addresses are used.
    Names(&'a str, bool),
    /// An IPv4 network and its prefix length.
    Network(Ipv4Addr, u32),
    /// An IPv6 prefix of 96 bits.
    Prefix(Prefix),
    /// Any interface that is up and has an address.
    Any,
    /// A glob of PCI addresses, or of vendor and device ids.
    Cards(&'a str),
    /// An invalid network.
    Invalid(&'a str),
}

/// The kind of a device, its pattern, and the rest behind the pattern.
fn pattern_in(device: &str) -> Option<(&str, Pattern<'_>, &str)> {
    let (host_port, options) = device.split_at(device.find(',').unwrap_or(device.len()));
    let (kind, host_port) = host_port.split_once(':').unwrap_or((host_port, ""));
    if kind == "auto" && host_port.is_empty() {
        return Some((kind, Pattern::Any, options));
    }
    if kind == "vfio" && host_port.contains(['*', '?']) {
        return Some((kind, Pattern::Cards(host_port), options));
    }
    if kind != "auto" && !KINDS.contains(&kind) {
        return None;
    }
    // A UDP port may follow.
    let (host, port) = split_host_port(host_port);
    let end = host_port.len() - port.map_or(0, |port| port.len() + 1);
    let suffix = &device[device.len() - options.len() - (host_port.len() - end)..];
    Some((kind, pattern_of(kind, host, &host_port[..end])?, suffix))
}

/// Parses `host` of a port of this kind as a pattern; `text` is how it was written.
fn pattern_of<'a>(kind: &str, host: HostText<'a>, text: &'a str) -> Option<Pattern<'a>> {
    let has_choice = kind == "auto" || host.host.contains(['*', '?']);
    let ip: Option<IpAddr> = host.host.parse().ok();
    match (host.bits, ip) {
        (Some("96"), Some(ip @ IpAddr::V6(_))) if host.in_brackets => {
            // With host bits it is an address, not a network.
            let is_net = host_bits(ip).is_unspecified();
            is_net.then_some(Pattern::Prefix(Prefix::of(ip)))
        }
        (Some(bits), Some(IpAddr::V4(ip))) if !host.in_brackets => match bits.parse() {
            Ok(bits @ 0..=32) => Some(Pattern::Network(ip, bits)),
            _ => Some(Pattern::Invalid(text)),
        },
        (Some("96"), None) if has_choice && !host.in_brackets => {
            Some(Pattern::Names(host.host, true))
        }
        (Some("96"), None) if kind == "udp" && !host.host.contains('.') => None,
        (None, _) if has_choice && !host.in_brackets => Some(Pattern::Names(host.host, false)),
        (None, _) => None,
        (Some(_), _) => Some(Pattern::Invalid(text)),
    }
}

/// Expands a pattern to the matching ports of this node; a name without a pattern to itself.
fn expand(spec: &str) -> Result<Vec<String>, OpenError> {
    let device = device_of(spec).unwrap_or("");
    let Some((kind, pattern, suffix)) = pattern_in(device) else {
        return Ok(vec![spec.to_owned()]);
    };
    if let Pattern::Invalid(text) = pattern {
        let why = format!("\"{text}\" is no network; write 10.1.0.0/16, or [2001:db8::]/96");
        return Err(bad_spec(spec, why));
    }
    let wrapper = &spec[..spec.len() - device.len()];
    if let Pattern::Cards(glob) = pattern {
        let nics = survey::nics();
        let ports =
            matching_nics(glob, &nics).map(|nic| format!("{wrapper}vfio:{}{suffix}", nic.bdf));
        let found: Vec<_> = ports.collect();
        let refusal = || bad_spec(spec, no_card_message(spec, &nics));
        return (!found.is_empty()).then_some(found).ok_or_else(refusal);
    }
    let fits = matching_links(&pattern);
    let mut found = Vec::new();
    for kind in if kind == "auto" { AUTO } else { std::slice::from_ref(&kind) } {
        for (link, ip) in &fits {
            match (*kind, ip) {
                ("udp", Some(ip)) => {
                    found.push(format!("{wrapper}udp:{}{suffix}", host_text(*ip)));
                }
                ("udp", None) => {}
                _ => found.push(format!("{wrapper}{kind}:{}{suffix}", link.name)),
            }
        }
    }
    if pattern == Pattern::Any {
        found.push(format!("{wrapper}shm"));
    }
    match found.is_empty() {
        true => Err(bad_spec(spec, no_match_message(spec))),
        false => Ok(found),
    }
}

fn no_match_message(spec: &str) -> String {
    let here = addresses();
    let list = links().into_iter().map(|link| {
        let ips = here.iter().filter(|(name, _)| *name == link.name);
        let ips: String = ips.map(|(_, ip)| format!(" {}", host_text(*ip))).collect();
        format!("{}{ips}", link.name)
    });
    let list = list.collect::<Vec<_>>().join(", ");
    format!("no interface of this host fits {spec}; there are {list}")
}

/// The NICs with a driver here whose PCI address, or vendor and device ids, match; by address.
fn matching_nics<'a>(glob: &str, nics: &'a [NicInfo]) -> impl Iterator<Item = &'a NicInfo> {
    let glob = glob.to_ascii_lowercase();
    nics.iter().filter(move |nic| {
        nic.has_driver && (matches_glob(&glob, &nic.bdf) || matches_glob(&glob, &nic.ids_text()))
    })
}

fn no_card_message(spec: &str, nics: &[NicInfo]) -> String {
    let list = nics.iter().map(|nic| format!("{} ({})", nic.bdf, nic.ids_text()));
    let list = list.collect::<Vec<_>>().join(", ");
    let there = if list.is_empty() { "no PCI network card".to_owned() } else { list };
    format!("no card of this host fits {spec} and has a driver here; there is {there}")
}

/// The matching interfaces, sorted by index, each with its matching address.
fn matching_links(pattern: &Pattern<'_>) -> Vec<(Link, Option<IpAddr>)> {
    let (here, others) = (addresses(), alt_names());
    let fit = |link: Link| {
        let mut ips = here.iter().filter(|(name, _)| *name == link.name).map(|(_, ip)| *ip);
        let ip = match pattern {
            Pattern::Network(net, bits) => {
                let fits = |ip: &IpAddr| {
                    Prefix::V4.host(*ip).is_some_and(|ip| is_in_network(ip, *net, *bits))
                };
                Some(ips.find(fits)?)
            }
            Pattern::Prefix(prefix) => Some(ips.find(|ip| prefix.contains(*ip))?),
            Pattern::Names(names, is_v6) => {
                let mut also = others.iter().filter(|(index, _)| *index == link.index);
                let by_name = matches_glob(names, &link.name)
                    || also.any(|(_, name)| matches_glob(names, name));
                // Loopback is matched only by patterns that begin with lo.
                if !by_name || link.is_loopback && !names.starts_with("lo") {
                    return None;
                }
                ips.find(|ip| ip.is_ipv6() == *is_v6)
            }
            _ if link.is_loopback || !link.is_up || !link.has_carrier => return None,
            _ => Some(ips.find(IpAddr::is_ipv4)?),
        };
        Some((link, ip))
    };
    links().into_iter().filter_map(fit).collect()
}

fn is_in_network(ip: Ipv4Addr, net: Ipv4Addr, bits: u32) -> bool {
    let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
    u32::from(ip) & mask == u32::from(net) & mask
}

/// Whether `name` matches the glob `pattern`.
fn matches_glob(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    // Position of the last `*`, and the length that it matched.
    let mut star: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(c) if *c == b'?' || *c == name[n] => (p, n) = (p + 1, n + 1),
            _ => {
                let Some((at, took)) = star else { return false };
                star = Some((at, took + 1));
                (p, n) = (at + 1, took + 1);
            }
        }
    }
    pattern[p..].iter().all(|c| *c == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_fit_a_pattern_as_in_a_shell() {
        for (pattern, name, fits) in [
            ("en*", "enp3s0f1", true),
            ("en*", "eth0", false),
            ("*", "", true),
            ("", "", true),
            ("", "x", false),
            ("e?h0", "eth0", true),
            ("e?h0", "eh0", false),
            ("*s0*1", "enp3s0f11", true),
            ("*s0*1", "enp3s0f12", false),
            ("a*b*c", "aXbXbXc", true),
        ] {
            assert_eq!(matches_glob(pattern, name), fits, "{pattern} {name}");
        }
        let net = Ipv4Addr::new(10, 1, 0, 0);
        assert!(is_in_network(Ipv4Addr::new(10, 1, 255, 1), net, 16));
        assert!(!is_in_network(Ipv4Addr::new(10, 2, 0, 1), net, 16));
        assert!(is_in_network(Ipv4Addr::new(192, 0, 2, 1), net, 0) && is_in_network(net, net, 32));
    }

    #[test]
    fn bars_stand_between_ports_but_not_in_parentheses() {
        assert_eq!(alternatives("udp:a|shm"), ["udp:a", "shm"]);
        assert_eq!(alternatives("pcap(file=a|b):udp:x | shm"), ["pcap(file=a|b):udp:x", "shm"]);
        assert_eq!(alternatives(""), [""]);
        for spec in ["udp:10.0.0.1", "udp:10.0.0.1:52000,near=yes", "afpacket:eth0,mtu=9000"] {
            assert!(!has_choice(spec) && choose(spec).unwrap() == spec, "{spec}");
        }
        for spec in ["", "fault(", "shm:x", "memif:/run/x?.sock", "vfio:05:00.0", "rocket:*"] {
            assert!(!has_choice(spec) && choose(spec).unwrap() == spec, "{spec}");
        }
        for spec in ["udp:127.0.0.0/8", "fault():afpacket:e*", "vlan(7):vfio:*,mtu=900", "auto"] {
            assert!(has_choice(spec), "{spec}");
        }
    }

    /// Goal: no text panics, and what has no pattern stays as it was written.
    /// Method: texts of the pieces that there are, in any order.
    #[test]
    fn any_text_is_looked_at() {
        const PIECES: &[&str] = &[
            "fault(",
            "pcap(file=",
            "):",
            ":",
            ",",
            "|",
            "udp",
            "udp:",
            "afpacket:",
            "auto",
            "/",
            "10.1.0.0",
            "/16",
            "/96",
            "[2001:db8::]",
            "[",
            "*",
            "?",
            "é",
            "52000",
            "mtu=9",
            "(",
            ")",
            "lo",
            "shm",
            "vfio:",
        ];
        let mut state = 1_u64;
        let mut next = |n: usize| {
            state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            (state >> 33) as usize % n
        };
        let mut open = 0;
        for _ in 0..100_000 {
            let spec: String = (0..next(10)).map(|_| PIECES[next(PIECES.len())]).collect();
            open += usize::from(has_choice(&spec));
            if !has_choice(&spec) {
                assert_eq!(choose(&spec).unwrap(), spec);
            }
            for one in alternatives(&spec) {
                let device = device_of(one).unwrap_or("");
                if let Some((kind, _, suffix)) = pattern_in(device) {
                    assert!(device.starts_with(kind) && device.ends_with(suffix), "{spec}");
                }
            }
        }
        assert!((1_000..99_000).contains(&open), "{open}");
    }

    #[test]
    fn a_pattern_becomes_what_is_there() {
        for (spec, is) in [
            ("udp:127.0.0.0/8", "udp:127.0.0.1"),
            ("udp:127.0.0.0/8:52007,mtu=900", "udp:127.0.0.1:52007,mtu=900"),
            ("fault(loss=0.1):udp:lo*,near=no", "fault(loss=0.1):udp:127.0.0.1,near=no"),
            ("udp:203.0.113.1|udp:127.0.0.1", "udp:127.0.0.1"),
            ("udp:203.0.113.1|udp:127.0.0.0/8|shm", "udp:127.0.0.1"),
            ("afpacket:lo?*|shm:x", "shm:x"),
            ("xdp:lo?*|shm:x", "shm:x"),
            ("vfio:fffe:*|shm:x", "shm:x"),
        ] {
            assert_eq!(choose(spec).unwrap(), is, "{spec}");
        }
    }

    /// Goal: a pattern takes cards by address or by kind, in the order of their addresses, and none
    /// without a driver here.
    #[test]
    fn cards_fit_by_their_address_or_their_kind() {
        let nic = |bdf: &str, id, has_driver| NicInfo {
            bdf: bdf.to_owned(),
            id,
            has_driver,
            driver: None,
            interfaces: Vec::new(),
            group: None,
            group_blockers: Vec::new(),
            numa_node: None,
            physical: None,
        };
        let nics = [
            nic("0000:01:00.0", (0x15b3, 0x1017), false),
            nic("0000:05:00.0", (0x8086, 0x10d3), true),
            nic("0000:05:00.1", (0x8086, 0x10c9), true),
            nic("0000:81:00.0", (0x1af4, 0x1041), true),
        ];
        for (glob, fit) in [
            ("*", &["0000:05:00.0", "0000:05:00.1", "0000:81:00.0"][..]),
            ("0000:0?:00.*", &["0000:05:00.0", "0000:05:00.1"]),
            ("*.1", &["0000:05:00.1"]),
            ("8086:10C*", &["0000:05:00.1"]),
            ("1af4:*", &["0000:81:00.0"]),
            ("15b3:*", &[]),
        ] {
            let found: Vec<_> = matching_nics(glob, &nics).map(|nic| nic.bdf.as_str()).collect();
            assert_eq!(found, fit, "{glob}");
        }
        let said = no_card_message("vfio:15b3:*", &nics[..2]);
        assert!(said.ends_with("there is 0000:01:00.0 (15b3:1017), 0000:05:00.0 (8086:10d3)"));
        assert!(no_card_message("vfio:*", &[]).ends_with("there is no PCI network card"));
    }

    #[test]
    fn an_error_without_a_match_lists_the_candidates() {
        for (spec, says) in [
            ("udp:203.0.113.0/24", "of this host fits udp:203.0.113.0/24; there are lo"),
            ("udp:10.1/16", "\"10.1/16\" is no network; write 10.1.0.0/16"),
            ("udp:10.1.0.0/33", "is no network"),
            ("afpacket:zz*", "no interface of this host fits"),
            ("vfio:fffe:*", "no card of this host fits vfio:fffe:*"),
            ("udp:203.0.113.1|afpacket:nothing0", "this host has"),
            ("udp:203.0.113.1|afpacket:nothing0", "no such interface"),
        ] {
            let e = choose(spec).unwrap_err().to_string();
            assert!(e.contains(says) && !e.contains('\n'), "{spec}: {e}");
        }
    }
}
