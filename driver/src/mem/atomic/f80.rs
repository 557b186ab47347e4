//! `long double` of x86-64: the x87's extended precision, which Rust has no type for.

use std::arch::asm;
use std::cmp::Ordering;

use super::complex::Real;

/// 10 bytes of value and 6 of padding, which is zero in every `F80` (rule S6).
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub(super) struct F80 {
    significand: u64,
    /// Sign and exponent in the low 16 bits, padding above.
    exponent: u64,
}

const SIGN: u64 = 1 << 15;

impl F80 {
    /// The value of 16 bytes in memory, with the padding cleared.
    #[inline]
    pub(super) const fn from_words(significand: u64, exponent: u64) -> Self {
        Self { significand, exponent: exponent & 0xffff }
    }

    fn cmp(self, other: Self) -> Option<Ordering> {
        let (above, equal, unordered): (u8, u8, u8);
        // SAFETY: loads ten bytes of each value, compares, and pops both again; exceptions are
        // masked (`IeeeDefaults`). The register stack is empty at entry by the ABI, declared
        // clobbered, and empty at the end.
        unsafe {
            asm!(
                "fld tbyte ptr [{a}]",
                "fld tbyte ptr [{b}]",
                "fucomip st(0), st(1)",
                "fstp st(0)",
                "seta {above}",
                "sete {equal}",
                "setp {unordered}",
                a = in(reg) &raw const self,
                b = in(reg) &raw const other,
                above = out(reg_byte) above,
                equal = out(reg_byte) equal,
                unordered = out(reg_byte) unordered,
                out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                options(nostack, readonly),
            );
        }
        // `b` was on top, so "above" says that it is the larger.
        match (unordered, equal, above) {
            (1, ..) => None,
            (_, 1, _) => Some(Ordering::Equal),
            (_, _, 1) => Some(Ordering::Less),
            _ => Some(Ordering::Greater),
        }
    }
}

/// One arithmetic instruction on two values: `a op b`, rounded once to 64 bits of significand.
macro_rules! x87 {
    ($name:ident, $instruction:literal) => {
        #[inline]
        fn $name(self, other: Self) -> Self {
            let mut sum = Self::ZERO;
            // SAFETY: loads ten bytes of each value, leaves one result and stores its ten bytes
            // into `sum`, whose padding stays zero; exceptions are masked (`IeeeDefaults`). The
            // register stack is empty at entry by the ABI, declared clobbered, empty at the end.
            unsafe {
                asm!(
                    "fld tbyte ptr [{a}]",
                    "fld tbyte ptr [{b}]",
                    $instruction,
                    "fstp tbyte ptr [{sum}]",
                    a = in(reg) &raw const self,
                    b = in(reg) &raw const other,
                    sum = in(reg) &raw mut sum,
                    out("st(0)") _, out("st(1)") _, out("st(2)") _, out("st(3)") _,
                    out("st(4)") _, out("st(5)") _, out("st(6)") _, out("st(7)") _,
                    options(nostack, preserves_flags),
                );
            }
            sum
        }
    };
}

impl Real for F80 {
    const ZERO: Self = Self::from_words(0, 0);
    const ONE: Self = Self::from_words(1 << 63, 0x3fff);
    const INFINITY: Self = Self::from_words(1 << 63, 0x7fff);

    x87!(add, "faddp st(1), st(0)");
    x87!(sub, "fsubp st(1), st(0)");
    x87!(mul, "fmulp st(1), st(0)");

    fn equals(self, other: Self) -> bool {
        self.cmp(other) == Some(Ordering::Equal)
    }

    fn less(self, other: Self) -> bool {
        self.cmp(other) == Some(Ordering::Less)
    }

    fn copysign(self, sign: Self) -> Self {
        Self { exponent: self.exponent & !SIGN | sign.exponent & SIGN, ..self }
    }
}
