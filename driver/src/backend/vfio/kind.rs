//! The kinds of NICs that have a driver here, and the PCI ids that tell them.

/// A kind of NIC: one driver each.
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

/// Vendor and device of what has a driver here.
const IDS: [((u16, u16), Kind); 38] = [
    ((0x1af4, 0x1041), Kind::VirtioNet),
    ((0x1af4, 0x1000), Kind::VirtioNet),
    ((0x8086, 0x10d3), Kind::Intel82574L),
    ((0x8086, 0x100e), Kind::Intel8254x),
    ((0x8086, 0x100c), Kind::Intel8254x),
    ((0x8086, 0x100f), Kind::Intel8254x),
    ((0x8086, 0x10c9), Kind::Intel82576),
    ((0x8086, 0x10e8), Kind::Intel82576),
    ((0x8086, 0x150a), Kind::Intel82576),
    ((0x8086, 0x1526), Kind::Intel82576),
    ((0x8086, 0x150e), Kind::Intel82580),
    ((0x8086, 0x150f), Kind::Intel82580),
    ((0x8086, 0x1510), Kind::Intel82580),
    ((0x8086, 0x1511), Kind::Intel82580),
    ((0x8086, 0x1516), Kind::Intel82580),
    ((0x8086, 0x1527), Kind::Intel82580),
    ((0x8086, 0x0438), Kind::Intel82580),
    ((0x8086, 0x043a), Kind::Intel82580),
    ((0x8086, 0x043c), Kind::Intel82580),
    ((0x8086, 0x0440), Kind::Intel82580),
    ((0x8086, 0x1521), Kind::IntelI350),
    ((0x8086, 0x1522), Kind::IntelI350),
    ((0x8086, 0x1523), Kind::IntelI350),
    ((0x8086, 0x1524), Kind::IntelI350),
    ((0x8086, 0x1546), Kind::IntelI350),
    ((0x8086, 0x1f40), Kind::IntelI354),
    ((0x8086, 0x1f41), Kind::IntelI354),
    ((0x8086, 0x1f45), Kind::IntelI354),
    ((0x8086, 0x1533), Kind::IntelI210),
    ((0x8086, 0x1536), Kind::IntelI210),
    ((0x8086, 0x1537), Kind::IntelI210),
    ((0x8086, 0x1538), Kind::IntelI210),
    ((0x8086, 0x157b), Kind::IntelI210),
    ((0x8086, 0x157c), Kind::IntelI210),
    ((0x8086, 0x1539), Kind::IntelI211),
    ((0x8086, 0x10ca), Kind::Intel82576Vf),
    ((0x8086, 0x1520), Kind::IntelI350Vf),
    ((0x15ad, 0x07b0), Kind::Vmxnet3),
];

impl Kind {
    /// The kind of the device of this vendor and number, if there is a driver for it.
    pub fn of(id: (u16, u16)) -> Option<Self> {
        IDS.iter().find(|known| known.0 == id).map(|known| known.1)
    }

    /// What people call it.
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
    let mut line = String::new();
    let mut last = None;
    for ((vendor, device), kind) in IDS {
        if last.replace(kind) != Some(kind) {
            let between = if line.is_empty() { "" } else { "; " };
            line.push_str(&format!("{between}{}", kind.name()));
        }
        line.push_str(&format!(" {vendor:04x}:{device:04x}"));
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an id has one driver, and what is nobody's has none: another NIC of a vendor whose
    /// cards are known is not driven as one of those.
    #[test]
    fn an_id_is_of_one_kind_or_none() {
        for (i, (id, kind)) in IDS.iter().enumerate() {
            assert_eq!(Kind::of(*id), Some(*kind));
            assert!(!IDS[..i].iter().any(|(other, _)| other == id), "{id:x?} stands twice");
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
