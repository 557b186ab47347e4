//! Supported NICs and their PCI ids.

/// A supported kind of NIC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Virtio-net (virtio 1.2, section 5.1), modern or transitional.
    VirtioNet,
    /// Intel's 82574L.
    Intel82574L,
    /// Intel's 82540EM and its sisters for PCI and PCI-X, 82544GC and 82545EM.
    Intel8254x,
    /// Intel's 82576.
    Intel82576,
    /// Intel's 82580, also the one inside of a DH89xx.
    Intel82580,
    /// Intel's I350.
    IntelI350,
    /// Intel's I354, inside of a processor.
    IntelI354,
    /// Intel's I210.
    IntelI210,
    /// Intel's I211.
    IntelI211,
    /// A virtual function of Intel's 82576.
    Intel82576Vf,
    /// A virtual function of Intel's I350.
    IntelI350Vf,
    /// VMware's vmxnet3.
    Vmxnet3,
}

const VIRTIO: u16 = 0x1af4;
const INTEL: u16 = 0x8086;
const VMWARE: u16 = 0x15ad;

/// Kind, vendor and device ids of the supported NICs.
const IDS: [(Kind, u16, &[u16]); 12] = [
    (Kind::VirtioNet, VIRTIO, &[0x1041, 0x1000]),
    (Kind::Intel82574L, INTEL, &[0x10d3]),
    (Kind::Intel8254x, INTEL, &[0x100e, 0x100c, 0x100f]),
    (Kind::Intel82576, INTEL, &[0x10c9, 0x10e8, 0x150a, 0x1526]),
    (
        Kind::Intel82580,
        INTEL,
        &[0x150e, 0x150f, 0x1510, 0x1511, 0x1516, 0x1527, 0x0438, 0x043a, 0x043c, 0x0440],
    ),
    (Kind::IntelI350, INTEL, &[0x1521, 0x1522, 0x1523, 0x1524, 0x1546]),
    (Kind::IntelI354, INTEL, &[0x1f40, 0x1f41, 0x1f45]),
    (Kind::IntelI210, INTEL, &[0x1533, 0x1536, 0x1537, 0x1538, 0x157b, 0x157c]),
    (Kind::IntelI211, INTEL, &[0x1539]),
    (Kind::Intel82576Vf, INTEL, &[0x10ca]),
    (Kind::IntelI350Vf, INTEL, &[0x1520]),
    (Kind::Vmxnet3, VMWARE, &[0x07b0]),
];

impl Kind {
    /// The kind of NIC with this vendor and device id, if it is supported.
    pub fn of((vendor, device): (u16, u16)) -> Option<Self> {
        let known = IDS.iter().find(|(_, of, ids)| *of == vendor && ids.contains(&device));
        known.map(|(kind, ..)| *kind)
    }

    /// Marketing name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::VirtioNet => "virtio-net",
            Self::Intel82574L => "Intel 82574L",
            Self::Intel8254x => "Intel 8254x",
            Self::Intel82576 => "Intel 82576",
            Self::Intel82580 => "Intel 82580",
            Self::IntelI350 => "Intel I350",
            Self::IntelI354 => "Intel I354",
            Self::IntelI210 => "Intel I210",
            Self::IntelI211 => "Intel I211",
            Self::Intel82576Vf => "Intel 82576 virtual function",
            Self::IntelI350Vf => "Intel I350 virtual function",
            Self::Vmxnet3 => "VMware vmxnet3",
        }
    }
}

/// All kinds with their ids, in one line.
pub(super) fn list() -> String {
    let all = IDS.map(|(kind, vendor, ids)| {
        let ids = ids.iter().map(|device| format!(" {vendor:04x}:{device:04x}"));
        format!("{}{}", kind.name(), ids.collect::<String>())
    });
    all.join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an id has one driver, and what is nobody's has none: another NIC of a vendor whose
    /// cards are known is not driven as one of those.
    #[test]
    fn an_id_is_of_one_kind_or_none() {
        let all =
            IDS.iter().flat_map(|(kind, vendor, ids)| ids.iter().map(|id| (*kind, (*vendor, *id))));
        let all: Vec<_> = all.collect();
        assert_eq!(all.len(), 38);
        for (i, (kind, id)) in all.iter().enumerate() {
            assert_eq!(Kind::of(*id), Some(*kind));
            assert!(!all[..i].iter().any(|(_, other)| other == id), "{id:x?} stands twice");
        }
        assert_eq!(Kind::of((0x8086, 0x1521)), Some(Kind::IntelI350));
        assert_eq!(Kind::of((0x8086, 0x1520)), Some(Kind::IntelI350Vf));
        // An I225 and an 82599.
        assert_eq!(Kind::of((0x8086, 0x15f3)), None);
        assert_eq!(Kind::of((0x8086, 0x10fb)), None);
        assert_eq!(Kind::of((0x10d3, 0x8086)), None);
        assert_eq!(
            list(),
            "virtio-net 1af4:1041 1af4:1000; Intel 82574L 8086:10d3; Intel 8254x 8086:100e \
             8086:100c 8086:100f; Intel 82576 8086:10c9 8086:10e8 8086:150a 8086:1526; \
             Intel 82580 8086:150e 8086:150f 8086:1510 8086:1511 8086:1516 8086:1527 8086:0438 \
             8086:043a 8086:043c 8086:0440; Intel I350 8086:1521 8086:1522 8086:1523 8086:1524 \
             8086:1546; Intel I354 8086:1f40 8086:1f41 8086:1f45; Intel I210 8086:1533 \
             8086:1536 8086:1537 8086:1538 8086:157b 8086:157c; Intel I211 8086:1539; \
             Intel 82576 virtual function 8086:10ca; Intel I350 virtual function 8086:1520; \
             VMware vmxnet3 15ad:07b0"
        );
    }
}
