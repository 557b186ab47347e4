//! Validity of atomic operations: which operation has a meaning on which type, in which form of
//! call.
//!
//! One table answers the three valid calls, `fi_query_atomic`, the call that starts an atomic and
//! the target that executes it: 546 of the 640 combinations of form, operation and type. The
//! computations are in `driver::mem::atomic` and docs/atomics.md. No wire format here.

pub use barewire_driver::mem::atomic::{AtomicFault, AtomicOp, Datatype, Sharing, UnknownNumber};

/// Maximum bytes of each operand of a call: count times size of the type, for the base, the fetch
/// and the compare form alike (B.5). Operands longer than a packet are split.
pub const OPERAND_LEN_MAX: usize = 4096;

/// The form of a call: its operands and results.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AtomicKind {
    /// `fi_atomic`: an operand, no result.
    Base,
    /// `fi_fetch_atomic`: an operand; the result is the values before the operation.
    Fetch,
    /// `fi_compare_atomic`: operand and compare values; the result is the values before the
    /// operation.
    Compare,
}

impl AtomicKind {
    /// All forms.
    pub const ALL: [Self; 3] = [Self::Base, Self::Fetch, Self::Compare];
}

/// Whether `op` on `ty` is executed in the form `kind`. Other combinations are refused with
/// `FI_EOPNOTSUPP`.
///
/// Pairs with `long double` parts are valid where the processor has the type (x86-64).
pub const fn valid(kind: AtomicKind, op: AtomicOp, ty: Datatype) -> bool {
    if ty.is_extended() && !cfg!(target_arch = "x86_64") {
        return false;
    }
    TYPES[kind as usize][op as usize] & 1 << ty as u8 != 0
}

/// [`types`] of every form and operation: a look-up costs one load.
static TYPES: [[u32; AtomicOp::ALL.len()]; AtomicKind::ALL.len()] = {
    let mut all = [[0; AtomicOp::ALL.len()]; AtomicKind::ALL.len()];
    let mut at = 0;
    while at < AtomicOp::ALL.len() * AtomicKind::ALL.len() {
        let (kind, op) = (at / AtomicOp::ALL.len(), at % AtomicOp::ALL.len());
        all[kind][op] = types(AtomicKind::ALL[kind], AtomicOp::ALL[op]);
        at += 1;
    }
    all
};

/// Maximum elements of `ty` in one call of any form.
pub const fn count_max(ty: Datatype) -> usize {
    OPERAND_LEN_MAX / ty.size()
}

/// Bit `ty` is set for the ten integers.
const INTEGERS: u32 = 0x0_c0ff;
/// Bits of all types but the complex ones: the types that have an order.
const ORDERED: u32 = 0xf_d3ff;
/// Bits of all types.
const ALL: u32 = 0xf_ffff;

/// The table: the types on which `op` has a meaning in the form `kind`.
const fn types(kind: AtomicKind, op: AtomicOp) -> u32 {
    use AtomicKind::{Base, Compare, Fetch};
    use AtomicOp::*;
    match (kind, op) {
        (Base | Fetch, Min | Max) => ORDERED,
        (Base | Fetch, Sum | Diff | Prod | Lor | Land | Lxor | Write) => ALL,
        (Base | Fetch, Bor | Band | Bxor) => INTEGERS,
        (Fetch, Read) => ALL,
        (Compare, Cswap | CswapNe) => ALL,
        (Compare, CswapLe | CswapLt | CswapGe | CswapGt) => ORDERED,
        (Compare, Mswap) => INTEGERS,
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use barewire_driver::mem::IoBuf;

    /// The combinations in a form's part of the table.
    fn pairs(kind: AtomicKind) -> Vec<(AtomicOp, Datatype)> {
        let all =
            AtomicOp::ALL.iter().flat_map(|op| Datatype::ALL.iter().map(move |ty| (*op, *ty)));
        all.filter(|(op, ty)| valid(kind, *op, *ty)).collect()
    }

    /// Goal: the counts of the acceptance list, and the number of cells of all forms.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_table_has_546_pairs() {
        let counts = AtomicKind::ALL.map(|kind| pairs(kind).len());
        assert_eq!(counts, [204, 224, 118]);
        assert_eq!(counts.iter().sum::<usize>(), 546);
        // 12 operations have a base form, 13 a fetch form, 7 a compare form.
        assert_eq!((12 + 13 + 7) * Datatype::ALL.len() - 546, 94);
    }

    /// The matrix of libfabric's documentation, one row an operation: `I` the integers, `F` float,
    /// double and the floats of 16 and 8 bits, `C` the complex of the first two, `L` long double,
    /// `Z` its complex.
    const GROUPS: &[(AtomicKind, &str, &str)] = &[
        (AtomicKind::Base, "Min Max", "IFL"),
        (AtomicKind::Base, "Sum Diff Prod Lor Land Lxor Write", "IFCLZ"),
        (AtomicKind::Base, "Bor Band Bxor", "I"),
        (AtomicKind::Fetch, "Min Max", "IFL"),
        (AtomicKind::Fetch, "Sum Diff Prod Lor Land Lxor Read Write", "IFCLZ"),
        (AtomicKind::Fetch, "Bor Band Bxor", "I"),
        (AtomicKind::Compare, "Cswap CswapNe", "IFCLZ"),
        (AtomicKind::Compare, "CswapLe CswapLt CswapGe CswapGt", "IFL"),
        (AtomicKind::Compare, "Mswap", "I"),
    ];

    fn letter(ty: Datatype) -> char {
        match ty {
            Datatype::Float | Datatype::Double | Datatype::Float16 => 'F',
            Datatype::Bfloat16 | Datatype::Float8E4M3 | Datatype::Float8E5M2 => 'F',
            Datatype::FloatComplex | Datatype::DoubleComplex => 'C',
            Datatype::LongDouble => 'L',
            Datatype::LongDoubleComplex => 'Z',
            _ => 'I',
        }
    }

    /// Goal: the table equals B.2 in each of 3 x 20 x 20 cells.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_table_is_the_groups() {
        for kind in AtomicKind::ALL {
            for op in AtomicOp::ALL {
                for ty in Datatype::ALL {
                    let name = format!("{op:?}");
                    let wanted = GROUPS.iter().any(|(group, ops, types)| {
                        *group == kind
                            && ops.split(' ').any(|op| op == name)
                            && types.contains(letter(ty))
                    });
                    assert_eq!(valid(kind, op, ty), wanted, "{kind:?} {op:?} {ty:?}");
                }
            }
        }
    }

    /// Goal: the document lists the pairs of the table, and the sizes.
    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_document_is_the_table() {
        let doc = include_str!("../../../docs/atomics.md");
        let rows: Vec<Vec<&str>> = doc
            .lines()
            .filter(|line| line.starts_with("| `FI_"))
            .map(|line| line.split('|').map(str::trim).collect())
            .collect();
        let is_op = |row: &&Vec<&str>| row[2].contains("fetch") || row[2] == "compare";
        let class = |ty: Datatype| match () {
            () if ty.is_integer() => "int",
            () if ty.is_complex() => "complex",
            () => "real",
        };
        let mut promised = 0;
        for (row, op) in rows.iter().filter(is_op).zip(AtomicOp::ALL) {
            let name = row[1].replace(['`', '_'], "").replacen("FI", "", 1).replace("ATOMIC", "");
            assert_eq!(name, format!("{op:?}").to_uppercase());
            for kind in AtomicKind::ALL {
                let form = format!("{kind:?}").to_lowercase();
                for ty in Datatype::ALL {
                    let wanted = row[2].split(' ').any(|f| f == form)
                        && row[3].split(' ').any(|types| types == class(ty));
                    assert_eq!(valid(kind, op, ty), wanted, "{kind:?} {op:?} {ty:?}");
                    promised += usize::from(wanted);
                }
            }
        }
        assert_eq!(promised, 546);
        let mut sized = 0;
        for row in rows.iter().filter(|row| !is_op(row)) {
            for name in row[1].split(' ') {
                let name = name.replace(['`', '_'], "").replacen("FI", "", 1);
                let ty =
                    Datatype::ALL.into_iter().find(|t| name == format!("{t:?}").to_uppercase());
                let ty = ty.expect("a type of the table");
                assert_eq!([row[2], row[3]], [ty.size().to_string(), ty.align().to_string()]);
                sized += 1;
            }
        }
        assert_eq!(sized, 20);
    }

    /// Goal: the engine executes what the table allows and refuses an operation on a type that no
    /// form allows.
    #[test]
    fn the_engine_agrees_with_the_table() {
        for op in AtomicOp::ALL {
            for ty in Datatype::ALL {
                let allowed = AtomicKind::ALL.iter().any(|kind| valid(*kind, op, ty));
                let target = IoBuf::leaked(&[0; 40]);
                let at = target.addr_at(0).next_multiple_of(8) - target.addr_at(0);
                let (operand, mut result) = ([0; 32], [0; 32]);
                let operand = &operand[..ty.size()];
                let result = &mut result[..ty.size()];
                let done = target.atomic(at, op, ty, 1, operand, operand, result, Sharing::Single);
                let wanted = if allowed { Ok(()) } else { Err(AtomicFault::Unsupported) };
                assert_eq!(done, wanted, "{op:?} {ty:?}");
            }
        }
    }

    /// Goal: libfabric's numbers, and no others. The anchors are from its rdma/fabric.h.
    #[test]
    fn numbers_are_libfabrics() {
        for number in 0..20 {
            assert_eq!(AtomicOp::try_from(number).unwrap() as u32, number);
        }
        for number in 0..20 {
            assert_eq!(Datatype::try_from(number).unwrap() as u32, number);
        }
        assert_eq!(AtomicOp::try_from(10), Ok(AtomicOp::Read));
        assert_eq!(AtomicOp::try_from(12), Ok(AtomicOp::Cswap));
        assert_eq!(AtomicOp::try_from(18), Ok(AtomicOp::Mswap));
        assert_eq!(AtomicOp::try_from(19), Ok(AtomicOp::Diff));
        assert_eq!(Datatype::try_from(8), Ok(Datatype::Float));
        assert_eq!(Datatype::try_from(12), Ok(Datatype::LongDouble));
        assert_eq!(Datatype::try_from(14), Ok(Datatype::Int128));
        assert_eq!(Datatype::try_from(19), Ok(Datatype::Float8E5M2));
        for number in [20, 21, 255, 256, u32::MAX] {
            assert_eq!(AtomicOp::try_from(number), Err(UnknownNumber(number)));
        }
        for number in [20, 21, 255, 256, u32::MAX] {
            assert_eq!(Datatype::try_from(number), Err(UnknownNumber(number)));
        }
    }

    /// Goal: every form carries at least 4,096 bytes of whole elements.
    #[test]
    fn counts_fill_the_operand() {
        for ty in Datatype::ALL {
            assert_eq!(count_max(ty) * ty.size(), 4096, "{ty:?}");
        }
    }
}
