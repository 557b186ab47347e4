//! One contiguous run of elements: from operation, type and sharing to a loop.

use super::complex::Complex;
use super::elem::{Bits, Elem, Num, Ordered};
#[cfg(target_arch = "x86_64")]
use super::f80::F80;
use super::fpenv::IeeeDefaults;
use super::lock::{LOCAL, WideLock};
use super::small::{Bf16, E4m3, E5m2, F16};
use super::{AtomicOp, Datatype, Sharing, WordFold};

/// Addresses of the elements and operands of one run.
#[derive(Clone, Copy)]
pub(super) struct Part {
    /// Aligned for the type.
    pub(super) target: *mut u8,
    /// At any address, as the next two.
    pub(super) operand: *const u8,
    pub(super) compare: *const u8,
    /// Null if no result is wanted.
    pub(super) result: *mut u8,
    /// Elements.
    pub(super) count: usize,
}

impl Part {
    /// Operand `i`.
    ///
    /// # Safety
    /// As `exec`, with `i < count` and an operation that has an operand.
    #[inline(always)]
    unsafe fn operand<E: Elem>(&self, i: usize) -> E {
        // SAFETY: inside the operand, by the caller's word.
        unsafe { E::load(self.operand.add(i * E::LEN)) }
    }

    /// Compare operand `i`.
    ///
    /// # Safety
    /// As `exec`, with `i < count` and an operation that has a compare operand.
    #[inline(always)]
    unsafe fn compare<E: Elem>(&self, i: usize) -> E {
        // SAFETY: inside the compare operand, by the caller's word.
        unsafe { E::load(self.compare.add(i * E::LEN)) }
    }
}

/// Whether `op` is defined on `ty`, on this processor: the groups of docs/atomics.md.
#[inline]
pub(super) const fn has_meaning(op: AtomicOp, ty: Datatype) -> bool {
    MEANINGS[op as usize] & 1 << ty as u8 != 0
}

/// Bit `ty` of entry `op`.
static MEANINGS: [u32; AtomicOp::ALL.len()] = {
    use AtomicOp::{Band, Bor, Bxor, CswapGe, CswapGt, CswapLe, CswapLt, Max, Min, Mswap};
    let mut meanings = [0; AtomicOp::ALL.len()];
    let mut at = 0;
    while at < meanings.len() * Datatype::ALL.len() {
        let op = AtomicOp::ALL[at / Datatype::ALL.len()];
        let ty = Datatype::ALL[at % Datatype::ALL.len()];
        let meaning = match op {
            Bor | Band | Bxor | Mswap => ty.is_integer(),
            Min | Max | CswapLe | CswapLt | CswapGe | CswapGt => !ty.is_complex(),
            _ => true,
        };
        if meaning && (!ty.is_extended() || cfg!(target_arch = "x86_64")) {
            meanings[op as usize] |= 1 << ty as u8;
        }
        at += 1;
    }
    meanings
};

/// Executes one run of elements.
///
/// # Safety
/// `has_meaning(op, ty)`. At `part.target`, `count` elements aligned to [`Datatype::align`] are
/// readable and writable; at `operand` and `compare`, as many are readable if `op` uses them;
/// `result` is null or as many are writable there, and it overlaps none of the others.
pub(super) unsafe fn exec(op: AtomicOp, ty: Datatype, part: Part, sharing: Sharing) {
    // SAFETY: passed on.
    unsafe {
        match sharing {
            Sharing::Single => exec_in(op, ty, part, Plain),
            Sharing::Shared => exec_in(op, ty, part, Atomic(&LOCAL)),
            Sharing::SharedBy(locks) => exec_in(op, ty, part, Atomic(locks)),
        }
    }
}

/// Sets `part.count` elements at `part.target` to `first op operand`.
///
/// # Safety
/// `has_meaning(op, ty)`, and `op` has one operand and always stores. `count` elements are writable
/// at `part.target` and readable at `part.operand` and `first`; each of these is the target or does
/// not overlap it.
pub(super) unsafe fn combine(op: AtomicOp, ty: Datatype, part: Part, first: *const u8) {
    // SAFETY: passed on.
    unsafe { exec_in(op, ty, part, From(first)) }
}

/// Executes one element if its type is a 4- or 8-byte integer, and returns whether it is: by one
/// locked instruction if `shared`, else by plain accesses.
///
/// # Safety
/// As [`exec`] with a count of 1; if `shared`, the element is aligned to its size.
#[inline(always)]
pub(super) unsafe fn exec_word(op: AtomicOp, ty: Datatype, part: Part, shared: bool) -> bool {
    // SAFETY: passed on; the type is the one that `ty` names.
    unsafe {
        match ty {
            Datatype::Int64 => one::<i64>(op, part, shared),
            Datatype::Uint64 => one::<u64>(op, part, shared),
            Datatype::Int32 => one::<i32>(op, part, shared),
            Datatype::Uint32 => one::<u32>(op, part, shared),
            _ => return false,
        }
    }
    true
}

/// # Safety
/// As [`exec`].
unsafe fn exec_in(op: AtomicOp, ty: Datatype, part: Part, mode: impl Mode) {
    // Moving floats needs no rounding, and comparing them does: subnormals might equal zero.
    let _defaults = (!ty.is_integer()).then(IeeeDefaults::enter);
    // SAFETY: passed on; the type is the one that `ty` names.
    unsafe {
        match ty {
            Datatype::Int8 => integer::<i8>(op, part, mode),
            Datatype::Uint8 => integer::<u8>(op, part, mode),
            Datatype::Int16 => integer::<i16>(op, part, mode),
            Datatype::Uint16 => integer::<u16>(op, part, mode),
            Datatype::Int32 => integer::<i32>(op, part, mode),
            Datatype::Uint32 => integer::<u32>(op, part, mode),
            Datatype::Int64 => integer::<i64>(op, part, mode),
            Datatype::Uint64 => integer::<u64>(op, part, mode),
            Datatype::Int128 => integer::<i128>(op, part, mode),
            Datatype::Uint128 => integer::<u128>(op, part, mode),
            Datatype::Float16 => real::<F16>(op, part, mode),
            Datatype::Bfloat16 => real::<Bf16>(op, part, mode),
            Datatype::Float8E4M3 => real::<E4m3>(op, part, mode),
            Datatype::Float8E5M2 => real::<E5m2>(op, part, mode),
            Datatype::Float => real::<f32>(op, part, mode),
            Datatype::Double => real::<f64>(op, part, mode),
            Datatype::FloatComplex => any::<Complex<f32>>(op, part, mode),
            Datatype::DoubleComplex => any::<Complex<f64>>(op, part, mode),
            #[cfg(target_arch = "x86_64")]
            Datatype::LongDouble => real::<F80>(op, part, mode),
            #[cfg(target_arch = "x86_64")]
            Datatype::LongDoubleComplex => any::<Complex<F80>>(op, part, mode),
            #[cfg(not(target_arch = "x86_64"))]
            Datatype::LongDouble | Datatype::LongDoubleComplex => {
                unreachable!("has_meaning refuses it")
            }
        }
    }
}

/// Executes one element by the formulas of `integer`, `real` and `any`.
///
/// # Safety
/// As [`exec_word`] for elements `E`.
#[inline(always)]
unsafe fn one<E: Ordered + Bits>(op: AtomicOp, part: Part, shared: bool) {
    // SAFETY: element 0 of target and result; the operands are those that the operation has.
    unsafe {
        let at = if shared { swap_one::<E>(op, part) } else { set_one::<E>(op, part) };
        if !part.result.is_null() {
            at.store(part.result);
        }
    }
}

/// The reduction of words that are elements `E` by `op`, if it is a reduction.
pub(super) fn fold_of<E: Ordered + Bits>(op: AtomicOp) -> Option<WordFold> {
    Some(match op {
        AtomicOp::Min => fold::<E, 0>,
        AtomicOp::Max => fold::<E, 1>,
        AtomicOp::Sum => fold::<E, 2>,
        AtomicOp::Prod => fold::<E, 3>,
        AtomicOp::Lor => fold::<E, 4>,
        AtomicOp::Land => fold::<E, 5>,
        AtomicOp::Bor => fold::<E, 6>,
        AtomicOp::Band => fold::<E, 7>,
        AtomicOp::Lxor => fold::<E, 8>,
        AtomicOp::Bxor => fold::<E, 9>,
        _ => return None,
    })
}

/// A [`WordFold`] of elements `E` by the operation with number `OP`.
fn fold<E: Ordered + Bits, const OP: usize>(words: &[u64]) -> u64 {
    const { assert!(E::LEN == size_of::<u64>()) };
    let Some((&first, rest)) = words.split_first() else { return 0 };
    let mut sum = first;
    for word in rest {
        let (target, operand) = ((&raw mut sum).cast(), (&raw const *word).cast());
        let (compare, result) = (std::ptr::null(), std::ptr::null_mut());
        let part = Part { target, operand, compare, result, count: 1 };
        // SAFETY: target and operand are a word each, as long as the element, that nobody else
        // changes; a reduction compares nothing.
        unsafe { one::<E>(AtomicOp::ALL[OP], part, false) };
    }
    sum
}

/// Updates one element by plain accesses, and returns its old value.
///
/// # Safety
/// As [`exec_word`] for elements `E`.
#[inline(always)]
unsafe fn set_one<E: Ordered + Bits>(op: AtomicOp, part: Part) -> E {
    // SAFETY: element 0 of the target.
    unsafe {
        let at = E::load(part.target);
        if let Some(value) = next::<E>(op, part, at) {
            value.store(part.target);
        }
        at
    }
}

/// Updates one element by the processor's atomic instructions, and returns its old value. Not
/// inlined, so that the plain path saves no registers for the loop.
///
/// # Safety
/// As [`exec_word`] for elements `E`, and `shared`.
#[inline(never)]
unsafe fn swap_one<E: Ordered + Bits>(op: AtomicOp, part: Part) -> E {
    // SAFETY: element 0 of the target, aligned to its size.
    let old = unsafe { E::swap(part.target, |at| next::<E>(op, part, at)) };
    old.expect("a word aligned to its size has no lock")
}

/// New value of an element with the value `at`; `None` if it is unchanged.
///
/// # Safety
/// As [`exec`] for elements `E` and a count of 1.
#[inline(always)]
unsafe fn next<E: Ordered + Bits>(op: AtomicOp, part: Part, at: E) -> Option<E> {
    // SAFETY: element 0 of the operands that the operation has.
    unsafe {
        let new = || part.operand::<E>(0);
        let compare = || part.compare::<E>(0);
        let logical = |f: fn(bool, bool) -> bool| E::of_truth(f(at.truth(), new().truth()));
        let swap_if = |swap: bool| if swap { Some(new()) } else { None };
        match op {
            AtomicOp::Min => Some(if new().less(at) { new() } else { at }),
            AtomicOp::Max => Some(if at.less(new()) { new() } else { at }),
            AtomicOp::Sum => Some(at.sum(new())),
            AtomicOp::Prod => Some(at.prod(new())),
            AtomicOp::Lor => Some(logical(|a, b| a | b)),
            AtomicOp::Land => Some(logical(|a, b| a & b)),
            AtomicOp::Bor => Some(at.or(new())),
            AtomicOp::Band => Some(at.and(new())),
            AtomicOp::Lxor => Some(logical(|a, b| a ^ b)),
            AtomicOp::Bxor => Some(at.xor(new())),
            AtomicOp::Read => None,
            AtomicOp::Write => Some(new()),
            AtomicOp::Cswap => swap_if(compare().same(at)),
            AtomicOp::CswapNe => swap_if(!compare().same(at)),
            AtomicOp::CswapLe => swap_if(compare().less_or_same(at)),
            AtomicOp::CswapLt => swap_if(compare().less(at)),
            AtomicOp::CswapGe => swap_if(at.less_or_same(compare())),
            AtomicOp::CswapGt => swap_if(at.less(compare())),
            AtomicOp::Mswap => Some(new().and(compare()).or(at.and(compare().not()))),
            AtomicOp::Diff => Some(at.diff(new())),
        }
    }
}

/// How elements are updated.
trait Mode {
    /// For every element in ascending order: the result is its value, and its new value is
    /// `f(index, value)`, unless that is `None`.
    ///
    /// # Safety
    /// As [`exec`] for elements `E`; `f` is called with indexes below the count.
    unsafe fn update<E: Elem>(&self, part: Part, f: impl Fn(usize, E) -> Option<E>);
}

/// Plain loads and stores, for exclusive access.
struct Plain;

impl Mode for Plain {
    #[inline(always)]
    unsafe fn update<E: Elem>(&self, part: Part, f: impl Fn(usize, E) -> Option<E>) {
        let Part { target, result, count, .. } = part;
        // Two loops without a branch on the result inside, so that both become vectors.
        if result.is_null() {
            for i in 0..count {
                // SAFETY: element `i < count` of the target.
                unsafe {
                    let at = target.add(i * E::LEN);
                    if let Some(new) = f(i, E::load(at)) {
                        new.store(at);
                    }
                }
            }
        } else {
            for i in 0..count {
                // SAFETY: element `i < count` of the target and of the result.
                unsafe {
                    let at = target.add(i * E::LEN);
                    let old = E::load(at);
                    if let Some(new) = f(i, old) {
                        new.store(at);
                    }
                    old.store(result.add(i * E::LEN));
                }
            }
        }
    }
}

/// Plain loads and stores, with the old values taken from another address.
struct From(*const u8);

/// Bytes that [`From`] computes before it stores them: no store then stands between the loads of
/// one vector and the next, whatever the memory may have in common.
const BATCH: usize = 512;

impl Mode for From {
    #[inline(always)]
    unsafe fn update<E: Elem>(&self, part: Part, f: impl Fn(usize, E) -> Option<E>) {
        let Part { target, count, .. } = part;
        let step = BATCH / E::LEN;
        let mut batch = [std::mem::MaybeUninit::<E>::uninit(); BATCH];
        let mut at = 0;
        while at < count {
            let n = step.min(count - at);
            for (i, slot) in batch[..n].iter_mut().enumerate() {
                // SAFETY: element `at + i < count` of what the caller vouches for.
                let old = unsafe { E::load(self.0.add((at + i) * E::LEN)) };
                slot.write(f(at + i, old).unwrap_or(old));
            }
            for (i, slot) in batch[..n].iter().enumerate() {
                // SAFETY: element `at + i < count` of the target; the slot was just written.
                unsafe { slot.assume_init().store(target.add((at + i) * E::LEN)) };
            }
            at += n;
        }
    }
}

/// Atomic: by one instruction if there is one, else under a lock.
struct Atomic<'a>(&'a dyn WideLock);

impl Mode for Atomic<'_> {
    #[inline(always)]
    unsafe fn update<E: Elem>(&self, part: Part, f: impl Fn(usize, E) -> Option<E>) {
        let Part { target, result, count, .. } = part;
        for i in 0..count {
            // SAFETY: element `i < count` of the target and, unless null, of the result; the
            // target is aligned as `swap` asks, and wide elements are changed under the lock.
            unsafe {
                let at = target.add(i * E::LEN);
                let old = match E::swap(at, |old| f(i, old)) {
                    Some(old) => old,
                    None => locked(self.0, at, |old| f(i, old)),
                };
                if !result.is_null() {
                    old.store(result.add(i * E::LEN));
                }
            }
        }
    }
}

/// Updates one element under its lock and returns its old value.
///
/// # Safety
/// `E::LEN` bytes at `at` are readable and writable.
unsafe fn locked<E: Elem>(locks: &dyn WideLock, at: *mut u8, f: impl Fn(E) -> Option<E>) -> E {
    let mut was = None;
    locks.with(at as usize, &mut || {
        // SAFETY: readable and writable by the caller's word; alone among those who lock.
        unsafe {
            let old = E::load(at);
            if let Some(new) = f(old) {
                new.store(at);
            }
            was = Some(old);
        }
    });
    was.expect("a lock calls what it is given")
}

/// # Safety
/// As [`exec`] for elements `E`.
#[inline(never)]
unsafe fn integer<E: Ordered + Bits>(op: AtomicOp, part: Part, mode: impl Mode) {
    // SAFETY: in every arm, `update` calls with indexes below the count, and the operands read are
    // those that the operation has.
    unsafe {
        match op {
            AtomicOp::Bor => {
                mode.update::<E>(part, move |i, at| Some(at.or(part.operand(i))));
            }
            AtomicOp::Band => {
                mode.update::<E>(part, move |i, at| Some(at.and(part.operand(i))));
            }
            AtomicOp::Bxor => {
                mode.update::<E>(part, move |i, at| Some(at.xor(part.operand(i))));
            }
            AtomicOp::Mswap => mode.update::<E>(part, move |i, at| {
                let mask: E = part.compare(i);
                Some(part.operand::<E>(i).and(mask).or(at.and(mask.not())))
            }),
            _ => real::<E>(op, part, mode),
        }
    }
}

/// # Safety
/// As [`exec`] for elements `E`.
#[inline(never)]
unsafe fn real<E: Ordered>(op: AtomicOp, part: Part, mode: impl Mode) {
    // SAFETY: in every arm, `update` calls with indexes below the count, and the operands read are
    // those that the operation has.
    unsafe {
        match op {
            // The value in memory stays if they are equal or one is a NaN (rule S3).
            AtomicOp::Min => mode.update::<E>(part, move |i, at| {
                let new: E = part.operand(i);
                Some(if new.less(at) { new } else { at })
            }),
            AtomicOp::Max => mode.update::<E>(part, move |i, at| {
                let new: E = part.operand(i);
                Some(if at.less(new) { new } else { at })
            }),
            AtomicOp::CswapLe => {
                swap_if::<E>(part, mode, |compare, at| compare.less_or_same(at));
            }
            AtomicOp::CswapLt => swap_if::<E>(part, mode, |compare, at| compare.less(at)),
            AtomicOp::CswapGe => {
                swap_if::<E>(part, mode, |compare, at| at.less_or_same(compare));
            }
            AtomicOp::CswapGt => swap_if::<E>(part, mode, |compare, at| at.less(compare)),
            _ => any::<E>(op, part, mode),
        }
    }
}

/// # Safety
/// As [`exec`] for elements `E`.
#[inline(never)]
unsafe fn any<E: Num>(op: AtomicOp, part: Part, mode: impl Mode) {
    // SAFETY: in every arm, `update` calls with indexes below the count, and the operands read are
    // those that the operation has.
    unsafe {
        match op {
            AtomicOp::Sum => mode.update::<E>(part, move |i, at| Some(at.sum(part.operand(i)))),
            AtomicOp::Diff => mode.update::<E>(part, move |i, at| Some(at.diff(part.operand(i)))),
            AtomicOp::Prod => mode.update::<E>(part, move |i, at| Some(at.prod(part.operand(i)))),
            AtomicOp::Lor => logical::<E>(part, mode, |a, b| a | b),
            AtomicOp::Land => logical::<E>(part, mode, |a, b| a & b),
            AtomicOp::Lxor => logical::<E>(part, mode, |a, b| a ^ b),
            AtomicOp::Read => mode.update::<E>(part, |_, _| None),
            AtomicOp::Write => mode.update::<E>(part, move |i, _| Some(part.operand(i))),
            AtomicOp::Cswap => swap_if::<E>(part, mode, |compare, at| compare.same(at)),
            AtomicOp::CswapNe => swap_if::<E>(part, mode, |compare, at| !compare.same(at)),
            _ => unreachable!("has_meaning refuses it"),
        }
    }
}

/// # Safety
/// As [`exec`] for elements `E`, with an operand.
#[inline(always)]
unsafe fn logical<E: Num>(part: Part, mode: impl Mode, f: impl Fn(bool, bool) -> bool) {
    // SAFETY: passed on.
    unsafe {
        mode.update::<E>(part, move |i, at| {
            Some(E::of_truth(f(at.truth(), part.operand::<E>(i).truth())))
        });
    }
}

/// Stores the operand where `f(compare, value)` holds: compare stands on the left.
///
/// # Safety
/// As [`exec`] for elements `E`, with both operands.
#[inline(always)]
unsafe fn swap_if<E: Num>(part: Part, mode: impl Mode, f: impl Fn(E, E) -> bool) {
    // SAFETY: passed on.
    unsafe {
        mode.update::<E>(part, move |i, at| f(part.compare(i), at).then(|| part.operand(i)));
    }
}
