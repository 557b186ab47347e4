//! The element types: representation in memory and arithmetic.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::complex::{Complex, Real};
#[cfg(target_arch = "x86_64")]
use super::f80::F80;
use super::small::{Bf16, E4m3, E5m2, F16};

/// A value of one element.
///
/// # Safety
/// Every pattern of its bits is a value, or `load` makes one of it.
pub(super) unsafe trait Elem: Copy {
    const LEN: usize = size_of::<Self>();

    /// Reads an element at any address.
    ///
    /// # Safety
    /// `LEN` bytes at `at` are readable.
    #[inline(always)]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: readable by the caller's word; unaligned is declared, and every bit pattern is a
        // value by the trait's.
        unsafe { at.cast::<Self>().read_unaligned() }
    }

    /// Writes an element at any address.
    ///
    /// # Safety
    /// `LEN` bytes at `at` are writable.
    #[inline(always)]
    unsafe fn store(self, at: *mut u8) {
        // SAFETY: writable by the caller's word; unaligned is declared.
        unsafe { at.cast::<Self>().write_unaligned(self) }
    }

    /// Atomically replaces the element by `f` of it, or leaves it if `f` returns `None`; returns
    /// the old value. `None`, with nothing done, if there is no atomic instruction for this type at
    /// this address.
    ///
    /// # Safety
    /// `LEN` bytes at `at` are readable and writable, and `at` is aligned as C aligns the type or
    /// to 8.
    unsafe fn swap(at: *mut u8, f: impl Fn(Self) -> Option<Self>) -> Option<Self> {
        let _ = (at, f);
        None
    }
}

/// Operations of every type.
pub(super) trait Num: Elem {
    fn sum(self, other: Self) -> Self;
    fn diff(self, other: Self) -> Self;
    fn prod(self, other: Self) -> Self;
    /// C's truth: not equal to zero. A NaN is true.
    fn truth(self) -> bool;
    fn of_truth(truth: bool) -> Self;
    fn same(self, other: Self) -> bool;
}

/// What types with an order can do as well. False with a NaN.
pub(super) trait Ordered: Num {
    fn less(self, other: Self) -> bool;

    #[inline(always)]
    fn less_or_same(self, other: Self) -> bool {
        self.less(other) || self.same(other)
    }
}

/// What integers can do as well.
pub(super) trait Bits: Num {
    fn or(self, other: Self) -> Self;
    fn and(self, other: Self) -> Self;
    fn xor(self, other: Self) -> Self;
    fn not(self) -> Self;
}

/// Memory layout of a primitive whose bits fit an atomic word.
macro_rules! word_elem {
    ($elem:ty, $word:ty, $atomic:ty, $to:expr, $from:expr) => {
        // SAFETY: a primitive, or two of them, and each of its bit patterns is a value.
        unsafe impl Elem for $elem {
            #[inline(always)]
            unsafe fn swap(at: *mut u8, f: impl Fn(Self) -> Option<Self>) -> Option<Self> {
                if at as usize % size_of::<$word>() != 0 {
                    return None; // a float complex at a multiple of 4
                }
                // SAFETY: `from_ptr` needs a mapped, aligned word (the caller's word and the line
                // above) that is reached by atomic accesses as long as the reference lives, which
                // is this call: regions reached in other ways as well are D2 in docs/memory.md.
                let word = unsafe { <$atomic>::from_ptr(at.cast()) };
                let step = |bits| f($from(bits)).map($to);
                let old = match word.fetch_update(Ordering::AcqRel, Ordering::Acquire, step) {
                    Ok(old) | Err(old) => old,
                };
                Some($from(old))
            }
        }
    };
}

macro_rules! integer {
    ($int:ty, $word:ty, $atomic:ty) => {
        word_elem!($int, $word, $atomic, |v: $int| v as $word, |w: $word| w as $int);
        integer!($int);
    };
    ($int:ty) => {
        impl Num for $int {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                self.wrapping_add(other)
            }

            #[inline(always)]
            fn diff(self, other: Self) -> Self {
                self.wrapping_sub(other)
            }

            #[inline(always)]
            fn prod(self, other: Self) -> Self {
                self.wrapping_mul(other)
            }

            #[inline(always)]
            fn truth(self) -> bool {
                self != 0
            }

            #[inline(always)]
            fn of_truth(truth: bool) -> Self {
                Self::from(truth)
            }

            #[inline(always)]
            fn same(self, other: Self) -> bool {
                self == other
            }
        }

        impl Ordered for $int {
            #[inline(always)]
            fn less(self, other: Self) -> bool {
                self < other
            }
        }

        impl Bits for $int {
            #[inline(always)]
            fn or(self, other: Self) -> Self {
                self | other
            }

            #[inline(always)]
            fn and(self, other: Self) -> Self {
                self & other
            }

            #[inline(always)]
            fn xor(self, other: Self) -> Self {
                self ^ other
            }

            #[inline(always)]
            fn not(self) -> Self {
                !self
            }
        }
    };
}

integer!(i8, u8, AtomicU8);
integer!(u8, u8, AtomicU8);
integer!(i16, u16, AtomicU16);
integer!(u16, u16, AtomicU16);
integer!(i32, u32, AtomicU32);
integer!(u32, u32, AtomicU32);
integer!(i64, u64, AtomicU64);
integer!(u64, u64, AtomicU64);
integer!(i128);
integer!(u128);

// SAFETY: each of their bit patterns is a value.
unsafe impl Elem for i128 {}
// SAFETY: as above.
unsafe impl Elem for u128 {}

word_elem!(f32, u32, AtomicU32, f32::to_bits, f32::from_bits);
word_elem!(f64, u64, AtomicU64, f64::to_bits, f64::from_bits);
word_elem!(Complex<f32>, u64, AtomicU64, complex_to_bits, complex_from_bits);

/// A float of 16 or 8 bits.
macro_rules! small {
    ($small:ident, $word:ty, $atomic:ty) => {
        word_elem!($small, $word, $atomic, |v: $small| v.0, $small);

        impl Num for $small {
            #[inline(always)]
            fn sum(self, other: Self) -> Self {
                Self::nearest(self.value() + other.value())
            }

            #[inline(always)]
            fn diff(self, other: Self) -> Self {
                Self::nearest(self.value() - other.value())
            }

            #[inline(always)]
            fn prod(self, other: Self) -> Self {
                Self::nearest(self.value() * other.value())
            }

            #[inline(always)]
            fn truth(self) -> bool {
                self.value() != 0.0
            }

            #[inline(always)]
            fn of_truth(truth: bool) -> Self {
                if truth { Self::ONE } else { Self::ZERO }
            }

            #[inline(always)]
            fn same(self, other: Self) -> bool {
                self.value() == other.value()
            }
        }

        impl Ordered for $small {
            #[inline(always)]
            fn less(self, other: Self) -> bool {
                self.value() < other.value()
            }
        }
    };
}

small!(F16, u16, AtomicU16);
small!(Bf16, u16, AtomicU16);
small!(E4m3, u8, AtomicU8);
small!(E5m2, u8, AtomicU8);

fn complex_to_bits(v: Complex<f32>) -> u64 {
    u64::from(v.re.to_bits()) | u64::from(v.im.to_bits()) << 32
}

fn complex_from_bits(bits: u64) -> Complex<f32> {
    Complex { re: f32::from_bits(bits as u32), im: f32::from_bits((bits >> 32) as u32) }
}

// The parts of the words above, and the operands of every type, are read in the host's order.
const _: () = assert!(cfg!(target_endian = "little"), "operands on the wire are little-endian");

// SAFETY: two primitives, and each of their bit patterns is a value.
unsafe impl Elem for Complex<f64> {}

impl<R: Real + Elem> Num for R {
    #[inline(always)]
    fn sum(self, other: Self) -> Self {
        self.add(other)
    }

    #[inline(always)]
    fn diff(self, other: Self) -> Self {
        self.sub(other)
    }

    #[inline(always)]
    fn prod(self, other: Self) -> Self {
        self.mul(other)
    }

    #[inline(always)]
    fn truth(self) -> bool {
        !self.equals(R::ZERO)
    }

    #[inline(always)]
    fn of_truth(truth: bool) -> Self {
        if truth { R::ONE } else { R::ZERO }
    }

    #[inline(always)]
    fn same(self, other: Self) -> bool {
        self.equals(other)
    }
}

impl<R: Real + Elem> Ordered for R {
    #[inline(always)]
    fn less(self, other: Self) -> bool {
        Real::less(self, other)
    }
}

impl<R: Real> Num for Complex<R>
where
    Self: Elem,
{
    #[inline(always)]
    fn sum(self, other: Self) -> Self {
        Complex::sum(self, other)
    }

    #[inline(always)]
    fn diff(self, other: Self) -> Self {
        Self { re: self.re.sub(other.re), im: self.im.sub(other.im) }
    }

    #[inline(always)]
    fn prod(self, other: Self) -> Self {
        self.product(other)
    }

    #[inline(always)]
    fn truth(self) -> bool {
        !self.equals(Self { re: R::ZERO, im: R::ZERO })
    }

    #[inline(always)]
    fn of_truth(truth: bool) -> Self {
        Self { re: if truth { R::ONE } else { R::ZERO }, im: R::ZERO }
    }

    #[inline(always)]
    fn same(self, other: Self) -> bool {
        self.equals(other)
    }
}

// SAFETY: `load` clears the padding, and each pattern of the other bits is a value.
#[cfg(target_arch = "x86_64")]
unsafe impl Elem for F80 {
    #[inline(always)]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: two words that are readable by the caller's word; unaligned is declared.
        let [significand, exponent] = unsafe { at.cast::<[u64; 2]>().read_unaligned() };
        Self::from_words(significand, exponent)
    }
}

// SAFETY: `load` makes each half as that of `F80` does.
#[cfg(target_arch = "x86_64")]
unsafe impl Elem for Complex<F80> {
    #[inline(always)]
    unsafe fn load(at: *const u8) -> Self {
        // SAFETY: the two halves of the 32 bytes that the caller vouches for.
        unsafe { Self { re: F80::load(at), im: F80::load(at.add(F80::LEN)) } }
    }
}
