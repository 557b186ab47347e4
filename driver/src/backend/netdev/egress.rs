//! Egress processing of an interface: queueing disciplines and filters, which frames of a port that
//! bypasses the stack do not pass.
//!
//! Source: Linux, Documentation/netlink/specs/tc.yaml.

use super::link::{attributes, dump, parse_messages, text};

/// Processing of frames that leave an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Egress {
    /// Queueing disciplines such as `htb`, without those that only queue, which interfaces have by
    /// default.
    pub disciplines: Vec<String>,
    /// There are tc filters (`tc filter show dev eth0 egress`). Filters of nft are not detected.
    pub is_filtered: bool,
}

impl Egress {
    /// Whether frames leave without shaping or filters.
    pub fn is_plain(&self) -> bool {
        self.disciplines.is_empty() && !self.is_filtered
    }
}

/// Disciplines that neither shape frames nor drop them while there is room.
const PLAIN: &[&str] = &[
    "noqueue",
    "noop",
    "mq",
    "mqprio",
    "multiq",
    "prio",
    "pfifo_fast",
    "pfifo",
    "bfifo",
    "sfq",
    "codel",
    "fq_codel",
    "fq",
    "fq_pie",
    "pie",
    "ingress",
    CLSACT,
];
/// The discipline that egress filters need. A query of egress filters at `ingress` returns ingress
/// ones.
const CLSACT: &str = "clsact";

const TCA_KIND: u16 = 1;
/// Parent of egress filters: `TC_H_CLSACT` and `TC_H_MIN_EGRESS`.
const AT_EGRESS: u32 = 0xffff_fff3;
/// `struct tcmsg`: family, interface, handle, parent, info.
const TCMSG_LEN: usize = 20;

/// Egress processing of each of the interfaces with these indices. Empty if the kernel does not
/// reply.
pub fn egress(indices: &[u32]) -> Vec<Egress> {
    let mut all = Vec::new();
    dump(libc::RTM_GETQDISC, &[0; TCMSG_LEN], |bytes| parse_disciplines(bytes, &mut all));
    indices.iter().map(|&index| of_interface(index, &all, has_filters)).collect()
}

/// Egress processing of the interface `index`, from `all` disciplines with their interfaces.
fn of_interface(index: u32, all: &[(u32, String)], has_filters: fn(u32) -> bool) -> Egress {
    let kinds = || all.iter().filter(|(of, _)| *of == index).map(|(_, kind)| kind);
    let mut disciplines: Vec<String> = Vec::new();
    for kind in kinds().filter(|kind| !PLAIN.contains(&kind.as_str())) {
        if !disciplines.contains(kind) {
            disciplines.push(kind.clone());
        }
    }
    let is_filtered = kinds().any(|kind| kind == CLSACT) && has_filters(index);
    Egress { disciplines, is_filtered }
}

/// Whether an interface with `clsact` has egress filters.
fn has_filters(index: u32) -> bool {
    let mut found = false;
    let mut header = [0; TCMSG_LEN];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[12..16].copy_from_slice(&AT_EGRESS.to_ne_bytes());
    dump(libc::RTM_GETTFILTER, &header, |bytes| {
        parse_messages(bytes, libc::RTM_NEWTFILTER, |_| found = true)
    });
    found
}

/// Parses disciplines from netlink messages. False: these were the last.
fn parse_disciplines(bytes: &[u8], all: &mut Vec<(u32, String)>) -> bool {
    parse_messages(bytes, libc::RTM_NEWQDISC, |message| {
        let Some(header) = message.first_chunk::<TCMSG_LEN>() else { return };
        let index = u32::from_ne_bytes([header[4], header[5], header[6], header[7]]);
        let kinds = attributes(&message[TCMSG_LEN..]).filter(|(kind, _)| *kind == TCA_KIND);
        all.extend(kinds.map(|(_, kind)| (index, text(kind))));
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(index: u32, kind: &[u8]) -> Vec<u8> {
        let attr_len = (4 + kind.len()) as u16;
        let mut body = vec![0; TCMSG_LEN];
        body[4..8].copy_from_slice(&index.to_ne_bytes());
        body.extend([attr_len, TCA_KIND].map(u16::to_ne_bytes).as_flattened());
        body.extend(kind);
        body.resize(body.len().next_multiple_of(4), 0);
        let mut all = (16 + body.len() as u32).to_ne_bytes().to_vec();
        all.extend(libc::RTM_NEWQDISC.to_ne_bytes());
        all.extend([0; 10]);
        all.extend(body);
        all
    }

    /// Goal: the disciplines of one interface are found that do something, each once, and no prefix
    /// of the kernel's words makes a panic.
    #[test]
    fn disciplines_are_taken_from_the_kernels_words() {
        let of: [(u32, &[u8]); 8] = [
            (7, b"mq\0"),
            (7, b"htb\0"),
            (8, b"cake\0"),
            (7, b"fq_codel\0"),
            (7, b"htb\0"),
            (7, b"netem\0"),
            (7, b"ingress\0"),
            (8, b"clsact\0"),
        ];
        let bytes = of.map(|(index, kind)| message(index, kind)).concat();
        let mut all = Vec::new();
        assert!(parse_disciplines(&bytes, &mut all));
        let found = of_interface(7, &all, |_| true);
        assert_eq!(found.disciplines, ["htb", "netem"]);
        assert!(!found.is_plain() && Egress::default().is_plain());
        // The filters of `ingress` are no others'.
        assert!(!found.is_filtered);
        assert!(of_interface(8, &all, |_| true).is_filtered);
        assert!(!of_interface(8, &all, |_| false).is_filtered);
        for len in 0..bytes.len() {
            parse_disciplines(&bytes[..len], &mut Vec::new());
            let mut flipped = bytes.clone();
            flipped[len] ^= 0xff;
            parse_disciplines(&flipped, &mut Vec::new());
        }
        // The loopback interface has what this machine gave it, and one that is not there nothing.
        assert_eq!(egress(&[1, u32::MAX >> 1])[1], Egress::default());
    }
}
