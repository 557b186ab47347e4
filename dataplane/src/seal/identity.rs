//! Identities in certificates, and the peers that a node accepts.

use std::fmt;

use webpki::EndEntityCert;

/// Longest name, bytes: the limit of SPIFFE.
const NAME_MAX: usize = 2048;

const SPIFFE: &str = "spiffe://";

/// The identity in a certificate: a SPIFFE ID, or else DNS names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// 1 SPIFFE ID, or 1 or more DNS names in lower case.
    names: Vec<String>,
}

impl Identity {
    /// The identity in a certificate, whose names are not validated otherwise. `None` if it has no
    /// well-formed name, or a SPIFFE ID beside another URI, which SPIFFE forbids.
    pub(super) fn of(cert: &EndEntityCert<'_>) -> Option<Self> {
        let mut uris = cert.valid_uri_names();
        if let Some(first) = uris.next() {
            let more = uris.any(|uri| uri.starts_with(SPIFFE));
            if first.starts_with(SPIFFE) || more {
                let alone = cert.valid_uri_names().count() == 1;
                let is_id = alone && is_spiffe_id(first);
                return is_id.then(|| Self { names: vec![first.to_owned()] });
            }
        }
        let whole = cert.valid_dns_names().filter(|name| is_dns(name));
        let names: Vec<String> = whole.map(str::to_ascii_lowercase).collect();
        (!names.is_empty()).then_some(Self { names })
    }

    /// The trust domain, if the identity is a SPIFFE ID.
    fn trust_domain(&self) -> Option<&str> {
        let rest = self.names[0].strip_prefix(SPIFFE)?;
        rest.split('/').next()
    }
}

impl fmt::Display for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names[0])
    }
}

fn is_spiffe_id(uri: &str) -> bool {
    let Some(rest) = uri.strip_prefix(SPIFFE).filter(|_| uri.len() <= NAME_MAX) else {
        return false;
    };
    let (domain, path) = rest.split_once('/').map_or((rest, None), |(d, p)| (d, Some(p)));
    let small = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b"-._".contains(&b);
    let any = |b: u8| small(b) || b.is_ascii_uppercase();
    let is_segment = |s: &str| !s.is_empty() && s != "." && s != ".." && s.bytes().all(any);
    !domain.is_empty()
        && domain.bytes().all(small)
        && path.is_none_or(|path| path.split('/').all(is_segment))
}

fn is_dns(name: &str) -> bool {
    let any = |b: u8| b.is_ascii_alphanumeric() || b"-_.".contains(&b);
    !name.is_empty() && name.len() <= 253 && name.bytes().all(any)
}

/// A pattern of peers' names: one name, or all with a common prefix or suffix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PeerId {
    name: String,
    kind: Match,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Match {
    Whole,
    /// Names that begin with the pattern, which ends in a slash.
    Below,
    /// DNS names with one label before the pattern, which begins with a dot.
    Host,
}

impl PeerId {
    /// Parses `spiffe://domain/path`, `spiffe://domain/path/*` (all IDs below), a DNS name, or
    /// `*.domain` (all names with one more label). `None` for any other text.
    pub fn parse(text: &str) -> Option<Self> {
        let of = |name: &str, kind| Some(Self { name: name.to_owned(), kind });
        if text.starts_with(SPIFFE) {
            return match text.strip_suffix("/*") {
                Some(above) => {
                    of(&text[..text.len() - 1], Match::Below).filter(|_| is_spiffe_id(above))
                }
                None => of(text, Match::Whole).filter(|_| is_spiffe_id(text)),
            };
        }
        let lower = text.to_ascii_lowercase();
        match lower.strip_prefix("*.") {
            Some(domain) => of(&lower[1..], Match::Host).filter(|_| is_dns(domain)),
            None => of(&lower, Match::Whole).filter(|_| is_dns(&lower)),
        }
    }

    fn names(&self, name: &str) -> bool {
        match self.kind {
            Match::Whole => name == self.name,
            Match::Below => name.starts_with(&self.name),
            Match::Host => {
                let label = name.strip_suffix(&self.name);
                label.is_some_and(|label| !label.is_empty() && !label.contains('.'))
            }
        }
    }
}

/// Whether node `own` accepts `peer`, whose certificate is valid: if a pattern of the list matches;
/// without a list, if the peer is of the node's own trust domain; any peer if the node's own name
/// is no SPIFFE ID.
pub(super) fn admits(own: &Identity, list: &[PeerId], peer: &Identity) -> bool {
    if list.is_empty() {
        let domain = own.trust_domain();
        return domain.is_none() || domain == peer.trust_domain();
    }
    list.iter().any(|id| peer.names.iter().any(|name| id.names(name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(name: &str) -> Identity {
        Identity { names: vec![name.to_owned()] }
    }

    #[test]
    fn a_list_names_whom_it_says() {
        let own = who("spiffe://a.org/job");
        for (list, peer, want) in [
            ("", "spiffe://a.org/other", true),
            ("", "spiffe://a.org", true),
            ("", "spiffe://b.org/job", false),
            ("", "host.a.org", false),
            ("spiffe://b.org/job", "spiffe://b.org/job", true),
            ("spiffe://b.org/job", "spiffe://b.org/job/1", false),
            ("spiffe://b.org/job/*", "spiffe://b.org/job/1/2", true),
            ("spiffe://b.org/job/*", "spiffe://b.org/job", false),
            ("spiffe://b.org/job/*", "spiffe://b.org/jobs/1", false),
            ("spiffe://b.org/*", "spiffe://b.org.evil/x", false),
            ("*.a.org", "n7.a.org", true),
            ("*.a.org", "x.n7.a.org", false),
            ("*.a.org", ".a.org", false),
            ("N7.a.org", "n7.a.org", true),
        ] {
            let list: Vec<PeerId> = list.split_terminator(',').filter_map(PeerId::parse).collect();
            assert_eq!(admits(&own, &list, &who(peer)), want, "{list:?} {peer}");
        }
        assert!(admits(&who("n1.a.org"), &[], &who("spiffe://b.org/x")));
    }

    #[test]
    fn an_invalid_name_is_refused() {
        for bad in [
            "",
            "*",
            "*.",
            "spiffe://",
            "spiffe:///x",
            "spiffe://A.org/x",
            "spiffe://a.org/",
            "spiffe://a.org/x//y",
            "spiffe://a.org/../x",
            "spiffe://a.org/x*",
            "a b",
            "x.*.org",
            "spiffe://*/x",
            "spiffe://a.org/x/*/y",
            "spiffe://a.org:80/x",
        ] {
            assert_eq!(PeerId::parse(bad), None, "{bad}");
        }
    }
}
