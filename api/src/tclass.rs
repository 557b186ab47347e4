//! Traffic classes of libfabric, and their DSCP and priority marks.
//!
//! The port marks all frames alike, so a domain has one class: that of its attributes, else that of
//! the endpoint attributes.
//!
//! Source: fi_endpoint(3), "Traffic Class"; RFC 4594 and RFC 8622 for the code points of what the
//! labels describe, IEEE 802.1Q for the priorities.

use barewire_driver::open::Mark;

/// No class: `FI_TC_UNSPEC`.
pub const TC_UNSPEC: u32 = 0;
/// A code point in the lower 6 bits: `FI_TC_DSCP`, as `fi_tc_dscp_set` makes it.
pub const TC_DSCP: u32 = 0x100;
/// `FI_TC_BEST_EFFORT`, the first of the labels.
pub const TC_BEST_EFFORT: u32 = 0x200;
/// `FI_TC_LOW_LATENCY`.
pub const TC_LOW_LATENCY: u32 = 0x201;
/// `FI_TC_DEDICATED_ACCESS`.
pub const TC_DEDICATED_ACCESS: u32 = 0x202;
/// `FI_TC_BULK_DATA`.
pub const TC_BULK_DATA: u32 = 0x203;
/// `FI_TC_SCAVENGER`.
pub const TC_SCAVENGER: u32 = 0x204;
/// `FI_TC_NETWORK_CTRL`.
pub const TC_NETWORK_CTRL: u32 = 0x205;

/// Code points: low-latency data (AF21), expedited forwarding, high-throughput data (AF11), lower
/// effort, network control (CS6).
const AF21: u8 = 18;
const EF: u8 = 46;
const AF11: u8 = 10;
const LE: u8 = 1;
const CS6: u8 = 48;
/// The priority below best effort, which is 0.
const BACKGROUND: u8 = 1;

/// The marks of a class. `None`: it is unspecified, or none.
pub(crate) fn mark_of(tclass: u32) -> Option<Mark> {
    let (dscp, pcp) = match tclass {
        TC_BEST_EFFORT => (0, 0),
        TC_LOW_LATENCY => (AF21, 3),
        TC_DEDICATED_ACCESS => (EF, 5),
        TC_BULK_DATA => (AF11, 2),
        TC_SCAVENGER => (LE, BACKGROUND),
        TC_NETWORK_CTRL => (CS6, 6),
        // The selector of a class is in the upper three bits (RFC 2474).
        _ if tclass & !0x3f == TC_DSCP => match (tclass & 0x3f) as u8 {
            LE => (LE, BACKGROUND),
            // AF11 to AF13: of the class of bulk data, which is not below best effort.
            dscp @ (10 | 12 | 14) => (dscp, 2),
            dscp => (dscp, dscp >> 3),
        },
        _ => return None,
    };
    Some(Mark { dscp, pcp })
}

/// Whether the classes of an endpoint and its domain are valid: each is known or unspecified, and
/// they do not contradict each other.
pub(crate) fn is_fit(domain: u32, ep: u32) -> bool {
    let is_known = |class: u32| class == TC_UNSPEC || mark_of(class).is_some();
    let is_one = domain == TC_UNSPEC || ep == TC_UNSPEC || mark_of(domain) == mark_of(ep);
    if !is_known(domain) || !is_known(ep) {
        tracing::warn!("tclass {domain:#x} of the domain, {ep:#x} of the endpoint: no such class");
    } else if !is_one {
        tracing::warn!(
            "tclass {ep:#x} of the endpoint is another than {domain:#x} of its domain, whose port \
             marks all frames alike: open a domain for each class"
        );
    }
    is_known(domain) && is_known(ep) && is_one
}

/// Whether an endpoint of class `ep` can be opened in a domain of class `domain`: the class is
/// unspecified, or has the marks of the port.
pub(crate) fn is_of(domain: u32, ep: u32) -> bool {
    let fits = ep == TC_UNSPEC || mark_of(ep).is_some() && mark_of(domain) == mark_of(ep);
    if !fits {
        tracing::warn!(
            "tclass {ep:#x} of an endpoint: its domain was opened with {domain:#x}, and its port \
             marks all frames alike: open a domain for each class"
        );
    }
    fits
}

/// The class of a domain with these attributes of its own and of its endpoints.
pub(crate) fn of_domain(domain: u32, ep: u32) -> u32 {
    match domain {
        TC_UNSPEC => ep,
        class => class,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_class_has_marks() {
        for (class, dscp, pcp) in [
            (TC_BEST_EFFORT, 0, 0),
            (TC_LOW_LATENCY, 18, 3),
            (TC_DEDICATED_ACCESS, 46, 5),
            (TC_BULK_DATA, 10, 2),
            (TC_SCAVENGER, 1, 1),
            (TC_NETWORK_CTRL, 48, 6),
            (TC_DSCP, 0, 0),
            (TC_DSCP | 26, 26, 3),
            (TC_DSCP | 63, 63, 7),
            (TC_DSCP | 8, 8, 1),
            (TC_DSCP | 12, 12, 2),
        ] {
            assert_eq!(mark_of(class), Some(Mark { dscp, pcp }), "{class:#x}");
        }
        for class in [TC_UNSPEC, 7, 0x140, 0x1ff, 0x206, 0x300, u32::MAX] {
            assert_eq!(mark_of(class), None, "{class:#x}");
        }
    }

    #[test]
    fn a_domain_has_one_class() {
        for (domain, ep, fits, is) in [
            (0, 0, true, 0),
            (0, TC_BULK_DATA, true, TC_BULK_DATA),
            (TC_BULK_DATA, 0, true, TC_BULK_DATA),
            (TC_BULK_DATA, TC_DSCP | 10, true, TC_BULK_DATA),
            (TC_BULK_DATA, TC_DSCP | 8, false, TC_BULK_DATA),
            (TC_DSCP | 46, TC_LOW_LATENCY, false, TC_DSCP | 46),
            (7, 0, false, 7),
            (0, 7, false, 7),
        ] {
            let got = (is_fit(domain, ep), of_domain(domain, ep));
            assert_eq!(got, (fits, is), "{domain:#x} {ep:#x}");
        }
    }
}
