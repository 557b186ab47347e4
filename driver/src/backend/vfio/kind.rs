//! The kinds of NICs that have a driver here, and the PCI ids that tell them.

/// A kind of NIC: one driver each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Virtio-net (virtio 1.2, section 5.1), modern or transitional.
    VirtioNet,
    /// Intel's 82574L.
    Intel82574L,
}

/// Vendor and device of what has a driver here.
const IDS: [((u16, u16), Kind); 3] = [
    ((0x1af4, 0x1041), Kind::VirtioNet),
    ((0x1af4, 0x1000), Kind::VirtioNet),
    ((0x8086, 0x10d3), Kind::Intel82574L),
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
        }
    }
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
        assert_eq!(Kind::of((0x8086, 0x1521)), None);
        assert_eq!(Kind::of((0x10d3, 0x8086)), None);
        assert_ne!(Kind::VirtioNet.name(), Kind::Intel82574L.name());
    }
}
