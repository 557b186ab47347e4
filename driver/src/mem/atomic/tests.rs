use super::*;
use crate::mem::{IoBuf, Span};

/// A word at a multiple of 64, at which the tests put their elements.
#[repr(align(64))]
struct Memory([u8; 8192]);

/// Leaked memory at a multiple of 64, as a target and as a second look at it.
fn memory(bytes: &[u8]) -> (IoBuf, IoBuf) {
    let leaked = Box::leak(Box::new(Memory([0; 8192])));
    leaked.0[..bytes.len()].copy_from_slice(bytes);
    let base = leaked.0.as_mut_ptr();
    // SAFETY: leaked memory stays mapped and writable, and the reference to it ends here.
    unsafe { (one(base, bytes.len()), one(base, bytes.len())) }
}

/// # Safety
/// As [`Span::from_raw`].
unsafe fn one(base: *mut u8, len: usize) -> IoBuf {
    // SAFETY: passed on.
    IoBuf::one(unsafe { Span::from_raw(base, len) })
}

/// All bytes.
fn bytes(of: &IoBuf) -> Vec<u8> {
    let mut bytes = vec![0; of.len()];
    of.read_at(0, &mut bytes);
    bytes
}

/// Every operation that means something on every type.
fn pairs() -> impl Iterator<Item = (AtomicOp, Datatype)> {
    let all = AtomicOp::ALL.iter().flat_map(|op| Datatype::ALL.iter().map(move |ty| (*op, *ty)));
    all.filter(|(op, ty)| exec::has_meaning(*op, *ty))
}

/// Goal: a refusal names its cause and changes neither memory nor result.
#[test]
fn a_refused_atomic_changes_nothing() {
    let (target, look) = memory(&[7; 64]);
    let (same, _) = memory(&[7; 64]);
    let operand = [1; 128];
    let run = |offset, op, ty, count, operand: &[u8], compare: &[u8], room: usize| {
        let mut result = vec![9; room];
        let done =
            target.atomic(offset, op, ty, count, operand, compare, &mut result, Sharing::Single);
        assert_eq!((bytes(&look), result), (bytes(&same), vec![9; room]));
        done
    };
    use AtomicFault::{Bounds, Misaligned, Operand, Unsupported};
    use AtomicOp::{Band, Cswap, Min, Sum};
    use Datatype::{Double, DoubleComplex, FloatComplex, LongDouble, Uint32, Uint64};
    let u64s = |offset, count: usize| {
        run(offset, Sum, Uint64, count, &operand[..count.min(16) * 8], &[], 0)
    };
    assert_eq!(u64s(0, 9), Err(Bounds));
    assert_eq!(u64s(64, 1), Err(Bounds));
    assert_eq!(u64s(65, 0), Err(Bounds));
    assert_eq!(u64s(usize::MAX - 6, 1), Err(Bounds));
    assert_eq!(u64s(0, usize::MAX / 4), Err(Bounds));
    assert_eq!(u64s(4, 1), Err(Misaligned));
    assert_eq!(u64s(64, 0), Ok(()));
    assert_eq!(run(2, Sum, Uint32, 1, &operand[..4], &[], 4), Err(Misaligned));
    assert_eq!(run(2, Sum, FloatComplex, 1, &operand[..8], &[], 8), Err(Misaligned));
    assert_eq!(run(4, Sum, DoubleComplex, 1, &operand[..16], &[], 0), Err(Misaligned));
    assert_eq!(run(4, Sum, LongDouble, 1, &operand[..16], &[], 0), Err(Misaligned));
    assert_eq!(run(0, Band, Double, 1, &operand[..8], &[], 0), Err(Unsupported));
    assert_eq!(run(0, Min, FloatComplex, 1, &operand[..8], &[], 8), Err(Unsupported));
    assert_eq!(run(0, Sum, Uint64, 1, &operand[..7], &[], 0), Err(Operand));
    assert_eq!(run(0, Sum, Uint64, 1, &[], &[], 8), Err(Operand));
    assert_eq!(run(0, Sum, Uint64, 2, &operand[..16], &[], 8), Err(Operand));
    assert_eq!(run(0, Cswap, Uint64, 1, &operand[..8], &[], 8), Err(Operand));
}

/// Goal: elements run on from one piece of memory to the next, and one that would lie in two is
/// refused, wherever it is in the array.
#[test]
fn elements_lie_in_one_piece_each() {
    let (target, look) = memory(&[1; 64]);
    let base = target.addr_at(0) as *mut u8;
    let pieces = |cut: usize| {
        let mut pieces = IoBuf::EMPTY;
        // SAFETY: both pieces are inside the leaked memory.
        unsafe {
            assert!(pieces.push(Span::from_raw(base, cut)));
            assert!(pieces.push(Span::from_raw(base.wrapping_add(cut), 64 - cut)));
        }
        pieces
    };
    let operand = [1; 64];
    let mut result = [0; 64];
    for cut in [20, 28] {
        let done = pieces(cut).atomic(
            0,
            AtomicOp::Sum,
            Datatype::Uint64,
            8,
            &operand,
            &[],
            &mut result,
            Sharing::Single,
        );
        assert_eq!(done, Err(AtomicFault::Straddles));
        assert_eq!((bytes(&look), result), (vec![1; 64], [0; 64]));
    }
    for sharing in [Sharing::Single, Sharing::Shared] {
        let (op, ty) = (AtomicOp::Sum, Datatype::Uint64);
        pieces(24).atomic(0, op, ty, 8, &operand, &[], &mut result, sharing).unwrap();
    }
    assert_eq!((bytes(&look), result), (vec![3; 64], [2; 64]));
}

/// `len` bytes of a seeded generator: xorshift64*.
fn noise(seed: &mut u64, len: usize) -> Vec<u8> {
    let mut byte = || {
        *seed ^= *seed >> 12;
        *seed ^= *seed << 25;
        *seed ^= *seed >> 27;
        (seed.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 56) as u8
    };
    (0..len).map(|_| byte()).collect()
}

/// Goal: the way a region is shared changes no value. Method: every operation on every type, over
/// random bits (which are NaNs and invalid encodings as well), with bytes of few values so that
/// comparisons hit, in all three ways.
#[test]
fn sharing_changes_no_value() {
    static LOCKS: LocalLocks = LocalLocks::new();
    let mut seed = 0x9e37_79b9_7f4a_7c15;
    for (op, ty) in pairs() {
        for round in 0..40 {
            let count = 1 + round % 9;
            let len = count * ty.size();
            let mut draw = || {
                let mut bytes = noise(&mut seed, len);
                if round % 2 == 0 {
                    bytes.iter_mut().for_each(|b| *b = if *b < 128 { 0 } else { 0x40 });
                }
                bytes
            };
            let (before, operand, compare) = (draw(), draw(), draw());
            // A float complex may lie at a multiple of 4, where no instruction changes it.
            let at = if round % 3 == 0 { ty.align() } else { 0 };
            let run = |sharing| {
                let (target, look) = memory(&[vec![0xa5; at], before.clone()].concat());
                let mut result = vec![0; len];
                target.atomic(at, op, ty, count, &operand, &compare, &mut result, sharing).unwrap();
                (bytes(&look), result)
            };
            let single = run(Sharing::Single);
            assert_eq!(run(Sharing::Shared), single, "{op:?} {ty:?} round {round}");
            assert_eq!(run(Sharing::SharedBy(&LOCKS)), single, "{op:?} {ty:?} round {round}");
        }
    }
}
