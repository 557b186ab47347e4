//! Traffic classes of networks: DSCP and VLAN priority in the frames of a port.

use super::choice::choose;
use super::spec::skip_wrappers;
use crate::error::OpenError;

/// DSCP and PCP of a traffic class, for the headers that a port has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    /// Differentiated services code point of datagrams, 0 to 63.
    pub dscp: u8,
    /// Priority code point of VLAN tags, 0 to 7.
    pub pcp: u8,
}

/// Resolves `spec` and adds `dscp=` to its IP header and `pcp=` to its VLAN tag, unless it has the
/// option already. A port without such headers stays as it is.
///
/// # Errors
/// As [`choose`].
pub fn with_mark(spec: &str, mark: Mark) -> Result<String, OpenError> {
    let mut spec = choose(spec)?;
    for (kind, key, value) in
        [("ip(", "dscp=", mark.dscp), ("vlan(", "pcp=", mark.pcp), ("udp:", "dscp=", mark.dscp)]
    {
        let wrappers: Vec<&str> =
            ["fault(", "pcap(", "ip(", "vlan("].into_iter().filter(|w| *w != kind).collect();
        let Some(at) = skip_wrappers(&spec, &wrappers).filter(|at| spec[*at..].starts_with(kind))
        else {
            continue;
        };
        let len = match kind {
            "udp:" => Some(spec.len() - at),
            _ => spec[at..].find("):"),
        };
        let Some(end) = len.map(|len| at + len) else { continue };
        if !spec[at..end].split(',').any(|part| part.starts_with(key)) {
            spec.insert_str(end, &format!(",{key}{value}"));
        }
    }
    Ok(spec)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_go_where_there_is_room() {
        let mark = Mark { dscp: 46, pcp: 5 };
        for (spec, is) in [
            ("udp:127.0.0.1", "udp:127.0.0.1,dscp=46"),
            ("udp:127.0.0.0/8:52007,near=no", "udp:127.0.0.1:52007,near=no,dscp=46"),
            ("fault():udp:[::1]/96", "fault():udp:[::1]/96,dscp=46"),
            ("udp:127.0.0.1,dscp=0", "udp:127.0.0.1,dscp=0"),
            ("ip(10.1.1.7/24):vfio:x,mtu=9", "ip(10.1.1.7/24,dscp=46):vfio:x,mtu=9"),
            (
                "pcap(file=a):ip(10.1.1.7/24,ttl=9):fault():vlan(100):xdp:eth0",
                "pcap(file=a):ip(10.1.1.7/24,ttl=9,dscp=46):fault():vlan(100,pcp=5):xdp:eth0",
            ),
            ("vlan(100,pcp=3):afpacket:eth0", "vlan(100,pcp=3):afpacket:eth0"),
            ("ip(10.1.1.7/24", "ip(10.1.1.7/24"),
            ("afpacket:eth0", "afpacket:eth0"),
            ("shm", "shm"),
        ] {
            assert_eq!(with_mark(spec, mark).unwrap(), is, "{spec}");
        }
    }
}
