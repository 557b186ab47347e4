//! Remote atomics on the application's memory: every operation on every type, element by element.
//!
//! The entry [`IoBuf::atomic`] validates everything (bounds, alignment, operand lengths, whether
//! the operation is defined on the type) before it touches the first byte, so that a refused
//! operation has changed nothing. The results are specified in docs/atomics.md and compared with a
//! C compiler's by the suite `atomics`.
//!
//! A region is either [`Sharing::Single`], changed by one thread only and so by plain loads and
//! stores that the compiler turns into vectors, or shared, and then by compare-and-swap or, where
//! an element is too wide for that, under a lock. The unit of atomicity is the element, never the
//! array. This file knows no packet, no key and no access right.

mod complex;
mod elem;
mod exec;
#[cfg(target_arch = "x86_64")]
mod f80;
mod fpenv;
mod lock;
mod process_lock;
mod small;
#[cfg(test)]
mod tests;

use std::sync::atomic::{AtomicU64, Ordering};

use thiserror::Error;

pub use self::lock::{LocalLocks, WideLock};
pub use self::process_lock::ProcessLocks;
use super::{IoBuf, Span, U128_LEN};
use crate::hint::cold;

/// An `enum` of libfabric with its numbers, which begin with 0 and leave none out.
macro_rules! numbered {
    ($(#[$doc:meta])* pub enum $name:ident {
        $($(#[$of:meta])* $variant:ident = $number:literal,)*
    }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[repr(u8)]
        pub enum $name {
            $($(#[$of])* $variant = $number,)*
        }

        impl $name {
            /// Each, in the order of their numbers.
            pub const ALL: [Self; [$($number),*].len()] = [$(Self::$variant),*];
        }

        impl TryFrom<u32> for $name {
            type Error = UnknownNumber;

            fn try_from(number: u32) -> Result<Self, UnknownNumber> {
                Self::ALL.get(number as usize).copied().ok_or(UnknownNumber(number))
            }
        }
    };
}

/// A number that names no operation or no type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("no such operation or datatype: {0}")]
pub struct UnknownNumber(pub u32);

numbered! {
    /// `enum fi_op`, with libfabric's numbers.
    pub enum AtomicOp {
        /// `FI_MIN`: the smaller stays.
        Min = 0,
        /// `FI_MAX`: the larger stays.
        Max = 1,
        /// `FI_SUM`; integers wrap.
        Sum = 2,
        /// `FI_PROD`; integers wrap.
        Prod = 3,
        /// `FI_LOR`: 1 if either is not zero, else 0.
        Lor = 4,
        /// `FI_LAND`: 1 if neither is zero, else 0.
        Land = 5,
        /// `FI_BOR`.
        Bor = 6,
        /// `FI_BAND`.
        Band = 7,
        /// `FI_LXOR`: 1 if exactly one is not zero, else 0.
        Lxor = 8,
        /// `FI_BXOR`.
        Bxor = 9,
        /// `FI_ATOMIC_READ`: the target's value is the result.
        Read = 10,
        /// `FI_ATOMIC_WRITE`: the operand replaces the target's value.
        Write = 11,
        /// `FI_CSWAP`: the operand replaces the value if compare == value.
        Cswap = 12,
        /// `FI_CSWAP_NE`: ... if compare != value.
        CswapNe = 13,
        /// `FI_CSWAP_LE`: ... if compare <= value.
        CswapLe = 14,
        /// `FI_CSWAP_LT`: ... if compare < value.
        CswapLt = 15,
        /// `FI_CSWAP_GE`: ... if compare >= value.
        CswapGe = 16,
        /// `FI_CSWAP_GT`: ... if compare > value.
        CswapGt = 17,
        /// `FI_MSWAP`: the bits set in compare are taken from the operand.
        Mswap = 18,
        /// `FI_DIFF`, of libfabric 2.0: the operand is subtracted; integers wrap.
        Diff = 19,
    }
}

impl AtomicOp {
    /// Whether it takes a compare operand.
    pub const fn compares(self) -> bool {
        self as u8 >= Self::Cswap as u8 && self as u8 <= Self::Mswap as u8
    }
}

numbered! {
    /// `enum fi_datatype`, with libfabric's numbers; from `FI_INT128` on those of libfabric 2.0.
    pub enum Datatype {
        /// `FI_INT8`.
        Int8 = 0,
        /// `FI_UINT8`.
        Uint8 = 1,
        /// `FI_INT16`.
        Int16 = 2,
        /// `FI_UINT16`.
        Uint16 = 3,
        /// `FI_INT32`.
        Int32 = 4,
        /// `FI_UINT32`.
        Uint32 = 5,
        /// `FI_INT64`.
        Int64 = 6,
        /// `FI_UINT64`.
        Uint64 = 7,
        /// `FI_FLOAT`: IEEE binary32.
        Float = 8,
        /// `FI_DOUBLE`: IEEE binary64.
        Double = 9,
        /// `FI_FLOAT_COMPLEX`: real part, then imaginary part.
        FloatComplex = 10,
        /// `FI_DOUBLE_COMPLEX`.
        DoubleComplex = 11,
        /// `FI_LONG_DOUBLE`: the x87's 10 bytes and 6 bytes of padding.
        LongDouble = 12,
        /// `FI_LONG_DOUBLE_COMPLEX`: two of them.
        LongDoubleComplex = 13,
        /// `FI_INT128`.
        Int128 = 14,
        /// `FI_UINT128`.
        Uint128 = 15,
        /// `FI_FLOAT16`: IEEE binary16.
        Float16 = 16,
        /// `FI_BFLOAT16`: the upper half of an IEEE binary32.
        Bfloat16 = 17,
        /// `FI_FLOAT8_E4M3`: OCP's, without infinities.
        Float8E4M3 = 18,
        /// `FI_FLOAT8_E5M2`: OCP's.
        Float8E5M2 = 19,
    }
}

/// Three bits for each type, the first in the lowest.
const fn by_type(values: [u64; Datatype::ALL.len()]) -> u64 {
    let (mut word, mut i) = (0, 0);
    while i < values.len() {
        word |= values[i] << (3 * i);
        i += 1;
    }
    word
}

impl Datatype {
    /// Bytes of one element, in memory and on the wire; C's `sizeof`.
    pub const fn size(self) -> usize {
        1 << self.size_log2()
    }

    /// Every size is a power of two: three bits of a word for each type, which costs a shift.
    const fn size_log2(self) -> u32 {
        const SIZES: u64 = by_type([0, 0, 1, 1, 2, 2, 3, 3, 2, 3, 3, 4, 4, 5, 4, 4, 1, 1, 0, 0]);
        (SIZES >> (3 * self as u32)) as u32 & 7
    }

    /// What a target address must be a multiple of: C's alignment, but never more than 8 (rule
    /// S10), since allocators for 8-byte alignment exist that know nothing of `long double`.
    pub const fn align(self) -> usize {
        const ALIGNS: u64 = by_type([0, 0, 1, 1, 2, 2, 3, 3, 2, 3, 2, 3, 3, 3, 3, 3, 1, 1, 0, 0]);
        1 << ((ALIGNS >> (3 * self as u32)) as u32 & 7)
    }

    /// Whether it is one of the ten integers.
    pub const fn is_integer(self) -> bool {
        (self as u8) < Self::Float as u8 || matches!(self, Self::Int128 | Self::Uint128)
    }

    /// Whether it is one of the three complex types.
    pub const fn is_complex(self) -> bool {
        matches!(self, Self::FloatComplex | Self::DoubleComplex | Self::LongDoubleComplex)
    }

    /// Whether it is made of `long double`s, which only x86-64 has in this form.
    pub const fn is_extended(self) -> bool {
        matches!(self, Self::LongDouble | Self::LongDoubleComplex)
    }
}

/// Concurrent updaters of a region by atomics.
#[derive(Clone, Copy, Default)]
pub enum Sharing {
    /// None. Plain loads and stores, no locked instruction.
    #[default]
    Single,
    /// Other threads of this process, through this function; and, for naturally aligned elements of
    /// up to 8 bytes, users of the processor's atomic instructions.
    Shared,
    /// As `Shared`, with wider elements under locks that are shared with other processes.
    SharedBy(&'static dyn WideLock),
}

impl Sharing {
    /// Whether there are concurrent updaters.
    #[inline(always)]
    pub const fn is_shared(&self) -> bool {
        !matches!(self, Self::Single)
    }
}

impl std::fmt::Debug for Sharing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Single => "Single",
            Self::Shared => "Shared",
            Self::SharedBy(_) => "SharedBy",
        })
    }
}

/// Errors of an atomic. Memory and result are unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum AtomicFault {
    /// The elements are not all inside the memory.
    #[error("elements outside the memory")]
    Bounds,
    /// The first element's address is not a multiple of [`Datatype::align`].
    #[error("element address not aligned to its type")]
    Misaligned,
    /// An element spans two pieces of memory.
    #[error("element straddles two pieces of memory")]
    Straddles,
    /// The operation is not defined on the type, or this processor does not support the type.
    #[error("operation has no meaning on the type")]
    Unsupported,
    /// An operand's length does not match operation, type and count.
    #[error("operand of the wrong length")]
    Operand,
}

/// Whether `op` on `ty` is one of the 164 pairs that reductions have: the ten operations from
/// `Min` to `Bxor` where they have a meaning.
pub const fn reduces(op: AtomicOp, ty: Datatype) -> bool {
    op as u8 <= AtomicOp::Bxor as u8 && exec::has_meaning(op, ty)
}

/// Reduces 8-byte elements, each a word as in memory, from first to last, to the bits that repeated
/// [`IoBuf::combine`] gives. No words give 0.
pub type WordFold = fn(&[u64]) -> u64;

/// The reduction of words by `op`, if the type is an 8-byte integer and `op` is one of the ten.
pub fn word_fold(op: AtomicOp, ty: Datatype) -> Option<WordFold> {
    match ty {
        Datatype::Int64 => exec::fold_of::<i64>(op),
        Datatype::Uint64 => exec::fold_of::<u64>(op),
        _ => None,
    }
}

impl Span {
    /// Performs `op` on the 4- or 8-byte integer at `offset`; by atomic instructions if `shared`,
    /// else the caller has exclusive access. `operands` holds the operand and behind it the compare
    /// value. Returns the value before the operation. `None`, and nothing done, for another type or
    /// an invalid argument.
    #[inline(always)]
    pub fn atomic_word(
        &self,
        offset: usize,
        op: AtomicOp,
        ty: Datatype,
        operands: u128,
        shared: bool,
    ) -> Option<u64> {
        let size = match ty {
            Datatype::Int64 | Datatype::Uint64 => 8,
            Datatype::Int32 | Datatype::Uint32 => 4,
            _ => return None,
        };
        let target = self.inside(offset, size)?;
        if target as usize & (size - 1) != 0 {
            return cold(None);
        }
        let mut old = [0; 8];
        let operands: [u8; U128_LEN] = operands.to_le_bytes();
        let operand = operands.as_ptr();
        let (compare, result) = (operand.wrapping_add(size), old.as_mut_ptr());
        let part = exec::Part { target, operand, compare, result, count: 1 };
        // SAFETY: one element, aligned to its size, lies inside lent memory (`inside`); operand
        // and compare value are `2 * size <= U128_LEN` bytes; the result has 8 and overlaps
        // nothing; every operation has a meaning on these types.
        let done = unsafe { exec::exec_word(op, ty, part, shared) };
        done.then(|| u64::from_le_bytes(old))
    }
}

/// The 8-byte words of a span, for sequential updates.
///
/// Like the span, they belong to the operation that the memory was lent to.
#[derive(Debug)]
pub struct Words {
    base: *mut u8,
    count: u64,
    /// Others change them by atomic instructions.
    shared: bool,
}

// SAFETY: as a span, whose address and promise it is.
unsafe impl Send for Words {}

impl Words {
    /// No memory.
    pub const NONE: Self = Self { base: std::ptr::null_mut(), count: 0, shared: false };

    /// Those of `span`, if it begins with one: its address is a multiple of 8. Bytes behind the
    /// last are none of them. Others change them by atomic instructions if they are `shared`.
    pub fn of(span: &Span, shared: bool) -> Option<Self> {
        let (base, count) = (span.base(), span.len() as u64 / 8);
        (base as usize & 7 == 0).then_some(Self { base, count, shared })
    }

    /// Adds `operand` to the word at byte `at`, as [`AtomicOp::Sum`]
    /// does on [`Datatype::Uint64`]. Returns the value before. `None`, and nothing done, if at this
    /// byte no word begins.
    #[inline(always)]
    pub fn fetch_add(&self, at: u64, operand: u64) -> Option<u64> {
        // Of a byte within a word, or beyond all memory, this is larger than any count.
        let i = at.rotate_right(3);
        if i >= self.count {
            return cold(None);
        }
        let target = self.base.wrapping_add(i as usize * 8);
        if self.shared {
            // SAFETY: word `i` of `count` is aligned (`of`) and lies inside lent memory, and others
            // change it by atomic instructions while it is lent (`of`).
            let word = unsafe { AtomicU64::from_ptr(target.cast()) };
            return Some(word.fetch_add(operand, Ordering::AcqRel));
        }
        let (operand, mut old) = (operand.to_le_bytes(), [0; 8]);
        let (operand, result) = (operand.as_ptr(), old.as_mut_ptr());
        let part = exec::Part { target, operand, compare: operand, result, count: 1 };
        // SAFETY: word `i` of `count` is aligned (`of`) and lies inside lent memory; operand and
        // result have 8 bytes of our own; every operation has a meaning on the type.
        let done = unsafe { exec::exec_word(AtomicOp::Sum, Datatype::Uint64, part, false) };
        done.then(|| u64::from_le_bytes(old))
    }
}

impl IoBuf {
    /// Executes `op` on `count` elements of type `ty` from `offset`, in ascending order.
    ///
    /// `operand` and `compare` hold `count` elements, little-endian, at any address; an operation
    /// that does not use one (`Read`: the operand; all but `Cswap*` and `Mswap`: compare) ignores
    /// it, and it may be empty. `result` receives the values before the operation if it has room
    /// for `count` elements; empty, it asks for none.
    ///
    /// Each element is updated atomically according to `sharing`, the array as a whole is not.
    /// Elements that keep their value because a comparison failed are not written. Allocates
    /// nothing.
    ///
    /// # Errors
    /// See [`AtomicFault`]: nothing was read into `result` or written.
    #[allow(clippy::too_many_arguments)] // the fields of one packet, each used once
    pub fn atomic(
        &self,
        offset: usize,
        op: AtomicOp,
        ty: Datatype,
        count: usize,
        operand: &[u8],
        compare: &[u8],
        result: &mut [u8],
        sharing: Sharing,
    ) -> Result<(), AtomicFault> {
        let (len, first) = self.check_atomic(offset, ty, count)?;
        let needs_operand = op != AtomicOp::Read;
        if !exec::has_meaning(op, ty) {
            return Err(AtomicFault::Unsupported);
        }
        if (needs_operand && operand.len() != len)
            || (op.compares() && compare.len() != len)
            || !(result.is_empty() || result.len() == len)
        {
            return Err(AtomicFault::Operand);
        }
        let to = if result.is_empty() { std::ptr::null_mut() } else { result.as_mut_ptr() };
        let (operand, compare) = (operand.as_ptr(), compare.as_ptr());
        // SAFETY, for both ways: `exec` and `exec_word` need
        // - `count` aligned elements at `target`, readable and writable: a piece has `n` bytes
        //   inside a lent span, and `check_atomic` found start and length of every piece to be
        //   multiples of alignment and size;
        // - operand and compare readable for as many bytes if `op` uses them: their lengths were
        //   just compared with `len`, and `done + n <= len`;
        // - result null or writable, overlapping nothing: an exclusive borrow of `len` bytes;
        // - a meaningful pair: just checked.
        let part = |target, done: usize, n: usize| exec::Part {
            target,
            operand: operand.wrapping_add(done),
            compare: compare.wrapping_add(done),
            result: if to.is_null() { to } else { to.wrapping_add(done) },
            count: n >> ty.size_log2(),
        };
        // Counters and locks: most atomics are one word, and that deserves a fast path.
        if let (Some(piece), 1) = (first, count) {
            let shared = !matches!(sharing, Sharing::Single);
            // SAFETY: as said above; these types are aligned to their sizes.
            if unsafe { exec::exec_word(op, ty, part(piece, 0, len), shared) } {
                return Ok(());
            }
        }
        // SAFETY: as said above.
        self.each(offset, len, |piece, done, n| unsafe {
            exec::exec(op, ty, part(piece, done, n), sharing);
        });
        Ok(())
    }

    /// Sets `count` elements from `offset` to `a op b`, element by element, where `a` and `b` are
    /// memory and an offset in it: the reductions of collectives. Any alignment will do. Either
    /// operand may be the very elements that are set; otherwise they must not overlap them.
    ///
    /// The order counts: for a NaN, for zeros of different sign, `a op b` may differ from `b op a`.
    /// Nobody else changes the elements meanwhile. Allocates nothing.
    ///
    /// # Errors
    /// [`AtomicFault::Unsupported`]: `op` has no meaning on `ty`, or is none of the ten from `Min`
    /// to `Bxor`. [`AtomicFault::Bounds`]: elements are not all inside, or not in one piece.
    /// Nothing was written.
    pub fn combine(
        &self,
        offset: usize,
        op: AtomicOp,
        ty: Datatype,
        count: usize,
        a: (&Self, usize),
        b: (&Self, usize),
    ) -> Result<(), AtomicFault> {
        if !reduces(op, ty) {
            return Err(AtomicFault::Unsupported);
        }
        let len = count.checked_mul(ty.size()).ok_or(AtomicFault::Bounds)?;
        if len == 0 {
            return Ok(());
        }
        let target = self.in_first(offset, len).ok_or(AtomicFault::Bounds)?;
        let a = a.0.in_first(a.1, len).ok_or(AtomicFault::Bounds)?;
        let b = b.0.in_first(b.1, len).ok_or(AtomicFault::Bounds)?;
        let null = std::ptr::null_mut();
        let part = exec::Part { target, operand: b, compare: b, result: null, count };
        // SAFETY: three times `len` bytes inside lent spans, `target` writable by the lender's
        // promise; the pair has a meaning.
        unsafe { exec::combine(op, ty, part, a) };
        Ok(())
    }

    /// Checks where `count` elements from `offset` lie, and returns their length in bytes and, if
    /// they are all in the first span, their address.
    #[inline]
    fn check_atomic(
        &self,
        offset: usize,
        ty: Datatype,
        count: usize,
    ) -> Result<(usize, Option<*mut u8>), AtomicFault> {
        let len = count.checked_mul(ty.size()).ok_or(AtomicFault::Bounds)?;
        let check = |piece: *mut u8, n: usize| {
            if n & (ty.size() - 1) != 0 {
                Err(AtomicFault::Straddles)
            } else if piece as usize & (ty.align() - 1) != 0 && n != 0 {
                Err(AtomicFault::Misaligned)
            } else {
                Ok(())
            }
        };
        if let Some(piece) = self.in_first(offset, len) {
            return check(piece, len).map(|()| (len, Some(piece)));
        }
        if offset > self.len() || len > self.len() - offset {
            return Err(AtomicFault::Bounds);
        }
        let mut checked = Ok(());
        self.each(offset, len, |piece, _, n| checked = checked.and_then(|()| check(piece, n)));
        checked.map(|()| (len, None))
    }
}
