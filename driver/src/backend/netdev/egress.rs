//! What the kernel does to frames that leave an interface, and does not to those that bypass it.
//!
//! Source: Linux, Documentation/netlink/specs/tc.yaml.

use super::link::{attributes, dump, take_messages, text};

/// What is done to frames that leave an interface.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Egress {
    /// Its queueing disciplines, such as `htb`, but for those that only queue, which an interface
    /// has by itself.
    pub disciplines: Vec<String>,
    /// There are filters (`tc filter show dev eth0 egress`). Those of nft are not looked for.
    pub is_filtered: bool,
}

impl Egress {
    /// Whether anything is done to them.
    pub fn is_plain(&self) -> bool {
        self.disciplines.is_empty() && !self.is_filtered
    }
}

/// Disciplines that neither shape nor drop what there is room for, or none.
const PLAIN: &[&str] = &[
    "noqueue",
    "noop",
    "mq",
    "pfifo_fast",
    "pfifo",
    "bfifo",
    "fq_codel",
    "fq",
    "ingress",
    "clsact",
];

const TCA_KIND: u16 = 1;
/// Where filters of frames that leave are, beside any discipline: `TC_H_CLSACT` and
/// `TC_H_MIN_EGRESS`.
const AT_EGRESS: u32 = 0xffff_fff3;
/// `struct tcmsg`: family, interface, handle, parent, info.
const TCMSG_LEN: usize = 20;

/// What is done to frames that leave the interface `index`. Nothing where the kernel does not say.
pub fn egress(index: u32) -> Egress {
    let mut found = Egress::default();
    dump(libc::RTM_GETQDISC, &[0; TCMSG_LEN], |bytes| take_disciplines(bytes, index, &mut found));
    let mut header = [0; TCMSG_LEN];
    header[4..8].copy_from_slice(&index.to_ne_bytes());
    header[12..16].copy_from_slice(&AT_EGRESS.to_ne_bytes());
    dump(libc::RTM_GETTFILTER, &header, |bytes| {
        take_messages(bytes, libc::RTM_NEWTFILTER, |_| found.is_filtered = true)
    });
    found
}

/// Takes the disciplines of an interface out of messages of the kernel. False: these were the last.
fn take_disciplines(bytes: &[u8], index: u32, found: &mut Egress) -> bool {
    take_messages(bytes, libc::RTM_NEWQDISC, |message| {
        if message.get(4..8) != Some(&index.to_ne_bytes()) {
            return;
        }
        let of = attributes(message.get(TCMSG_LEN..).unwrap_or(&[]));
        let kinds = of.filter(|(kind, _)| *kind == TCA_KIND).map(|(_, kind)| text(kind));
        for kind in kinds.filter(|kind| !PLAIN.contains(&kind.as_str())) {
            if !found.disciplines.contains(&kind) {
                found.disciplines.push(kind);
            }
        }
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
        let of: [(u32, &[u8]); 6] = [
            (7, b"mq\0"),
            (7, b"htb\0"),
            (8, b"cake\0"),
            (7, b"fq_codel\0"),
            (7, b"htb\0"),
            (7, b"netem\0"),
        ];
        let bytes = of.map(|(index, kind)| message(index, kind)).concat();
        let mut found = Egress::default();
        assert!(take_disciplines(&bytes, 7, &mut found));
        assert_eq!(found.disciplines, ["htb", "netem"]);
        assert!(!found.is_plain() && Egress::default().is_plain());
        for len in 0..bytes.len() {
            take_disciplines(&bytes[..len], 7, &mut Egress::default());
            let mut flipped = bytes.clone();
            flipped[len] ^= 0xff;
            take_disciplines(&flipped, 7, &mut Egress::default());
        }
        // The loopback interface has what this machine gave it, and one that is not there nothing.
        egress(1);
        assert_eq!(egress(u32::MAX >> 1), Egress::default());
    }
}
