use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32};

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
    unsafe { (at(base, bytes.len()), at(base, bytes.len())) }
}

/// # Safety
/// As [`Span::from_raw`].
unsafe fn at(base: *mut u8, len: usize) -> IoBuf {
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

/// Goal: words are what a sum of 8 bytes changes: each of them and nothing else, and none if the
/// memory does not begin with one.
#[test]
fn words_are_where_the_long_way_finds_them() {
    [false, true].into_iter().for_each(compare_words);
}

fn compare_words(shared: bool) {
    let start: Vec<u8> = (0..83).map(|i| i as u8 ^ 0xa5).collect();
    let (short, long) = (memory(&start), memory(&start));
    let words = Words::of(short.0.as_one().unwrap(), shared).unwrap();
    let far = [u64::MAX - 7, 1 << 63, 1 << 61, 1 << 32]
        .into_iter()
        .flat_map(|at| at..at.saturating_add(8));
    for (n, at) in (0..200).chain(far).enumerate() {
        let operand = (u64::MAX / 3).wrapping_mul(n as u64 + 1);
        let mut old = [0; 8];
        let (op, ty, bytes_of) = (AtomicOp::Sum, Datatype::Uint64, operand.to_le_bytes());
        let offset = usize::try_from(at).unwrap();
        let done = long.0.atomic(offset, op, ty, 1, &bytes_of, &[], &mut old, Sharing::Single);
        let old = done.ok().map(|()| u64::from_le_bytes(old));
        assert_eq!(words.fetch_add(at, operand), old, "at {at:#x}");
        assert_eq!(bytes(&short.1), bytes(&long.1));
    }
    for skip in 1..8 {
        let piece = memory(&start).0.piece(skip, 64);
        assert!(Words::of(piece.as_one().unwrap(), shared).is_none());
    }
    assert_eq!(Words::NONE.fetch_add(0, 1), None);
    assert_eq!(Words::of(&Span::EMPTY, shared).unwrap().fetch_add(0, 1), None);
}

/// Goal: words are reduced to the bits that `combine` gives of one after the other; only integers
/// are.
#[test]
fn words_are_reduced_as_memory_is() {
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut next = || {
        seed = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        seed.rotate_left(23) >> (seed % 3 * 31)
    };
    for (op, ty) in AtomicOp::ALL.into_iter().flat_map(|op| Datatype::ALL.map(|ty| (op, ty))) {
        let is_long = matches!(ty, Datatype::Int64 | Datatype::Uint64);
        let Some(fold) = word_fold(op, ty) else {
            assert!(!is_long || !reduces(op, ty), "{op:?} {ty:?}");
            continue;
        };
        assert!(is_long && reduces(op, ty), "{op:?} {ty:?}");
        for len in 1..=9 {
            let words: Vec<u64> = (0..len).map(|_| next()).collect();
            let (sum, look) = memory(&words[0].to_ne_bytes());
            for word in &words[1..] {
                let (other, _) = memory(&word.to_ne_bytes());
                sum.combine(0, op, ty, 1, (&sum, 0), (&other, 0)).unwrap();
            }
            let mut bytes = [0; 8];
            look.read_at(0, &mut bytes);
            assert_eq!(fold(&words), u64::from_ne_bytes(bytes), "{op:?} {ty:?} {words:x?}");
        }
        assert_eq!(fold(&[]), 0);
    }
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
            if count == 1 && ty.is_integer() && [4, 8].contains(&len) {
                let shared = round % 2 == 1;
                let (target, look) = memory(&[vec![0xa5; at], before.clone()].concat());
                let mut operands = [0; U128_LEN];
                operands[..len].copy_from_slice(&operand);
                operands[len..2 * len].copy_from_slice(&compare);
                let old = target
                    .first()
                    .unwrap()
                    .atomic_word(at, op, ty, u128::from_le_bytes(operands), shared)
                    .unwrap();
                let result = old.to_le_bytes()[..len].to_vec();
                assert_eq!((bytes(&look), result), single, "{op:?} {ty:?} round {round}");
            }
        }
    }
}

/// Goal: what is not one aligned word inside the memory, of which others change nothing, is left to
/// [`IoBuf::atomic`].
#[test]
fn a_word_that_is_none_is_not_touched() {
    let (target, look) = memory(&[7; 64]);
    let word =
        |offset, ty| target.first().unwrap().atomic_word(offset, AtomicOp::Sum, ty, 1, false);
    for (size, ty) in [(8, Datatype::Uint64), (4, Datatype::Int32)] {
        for offset in [1, 2, size / 2, size + 1, 65 - size, 64, 65, usize::MAX - size + 1] {
            assert_eq!(word(offset, ty), None, "{ty:?} at {offset}");
        }
    }
    for ty in Datatype::ALL {
        if !ty.is_integer() || ![4, 8].contains(&ty.size()) {
            assert_eq!(word(0, ty), None, "{ty:?}");
        }
    }
    assert_eq!(bytes(&look), [7; 64]);
    assert_eq!(word(56, Datatype::Uint64), Some(u64::from_le_bytes([7; 8])));
    assert_eq!(bytes(&look)[55..58], [7, 8, 7]);
}

/// Goal: the six bytes of padding of a long double decide nothing, and are zero in what is written
/// and returned (rule S6).
#[test]
#[cfg(target_arch = "x86_64")]
fn padding_is_ignored_and_written_as_zero() {
    let one = |padding: u8| {
        let mut bytes = vec![0; 16];
        bytes[7..10].copy_from_slice(&[0x80, 0xff, 0x3f]);
        bytes[10..].fill(padding);
        bytes
    };
    let run = |op, ty: Datatype, sharing| {
        let parts = ty.size() / 16;
        let (target, look) = memory(&one(0x11).repeat(parts));
        let (operand, compare) = (one(0x22).repeat(parts), one(0x33).repeat(parts));
        let mut result = vec![0; ty.size()];
        target.atomic(0, op, ty, 1, &operand, &compare, &mut result, sharing).unwrap();
        assert_eq!(result, one(0).repeat(parts), "{op:?} {ty:?}");
        bytes(&look)
    };
    for ty in [Datatype::LongDouble, Datatype::LongDoubleComplex] {
        let parts = ty.size() / 16;
        for sharing in [Sharing::Single, Sharing::Shared] {
            // A swap that takes place although the padding differs, and one that does not.
            assert_eq!(run(AtomicOp::Cswap, ty, sharing), one(0).repeat(parts));
            assert_eq!(run(AtomicOp::CswapNe, ty, sharing), one(0x11).repeat(parts));
            assert_eq!(run(AtomicOp::Write, ty, sharing), one(0).repeat(parts));
            assert_eq!(run(AtomicOp::Read, ty, sharing), one(0x11).repeat(parts));
            for ops in [AtomicOp::Sum, AtomicOp::Prod, AtomicOp::Lxor] {
                let after = run(ops, ty, sharing);
                let padding = after.chunks(16).flat_map(|part| &part[10..]);
                assert!(padding.copied().all(|b| b == 0), "{ops:?} {ty:?}");
            }
        }
    }
}

/// Goal: subnormals and rounding are IEEE's whatever the thread runs with, and the thread runs on
/// with what it had (rule S8). Method: flush to zero, round up, and cut the x87 to 53 bits.
#[test]
#[cfg(target_arch = "x86_64")]
fn the_threads_float_settings_do_not_count() {
    fn set(mxcsr: u32, x87: u16) {
        // SAFETY: loads two control registers with valid values; what floats the test itself
        // computes meanwhile, none, would be rounded otherwise.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", "fldcw [{}]",
                in(reg) &raw const mxcsr, in(reg) &raw const x87, options(nostack));
        }
    }
    fn now() -> (u32, u16) {
        let (mut mxcsr, mut x87) = (0_u32, 0_u16);
        // SAFETY: stores two control registers to the variables given.
        unsafe {
            std::arch::asm!("stmxcsr [{}]", "fnstcw [{}]",
                in(reg) &raw mut mxcsr, in(reg) &raw mut x87, options(nostack));
        }
        (mxcsr & !0x3f, x87)
    }
    // Subnormals, and sums that are rounded: 1 and a little less than half a unit in the last
    // place, for a long double a little more than nothing.
    let f32s = [1_u32, 0x0070_0000, 0x3f80_0000, 0x337f_ffff].map(u32::to_le_bytes).concat();
    let f64s = [1_u64, 0x000f << 48, 0x3ff0 << 48, 0x3c9f << 48].map(u64::to_le_bytes).concat();
    let f80s = [1_u64, 0, 1 << 63, 0x3fff, 0xffff << 47, 0x3fbe, (1 << 63) | 1, 0x3fff];
    let f80s = f80s.map(u64::to_le_bytes).concat();
    let types = [
        (Datatype::Float, &f32s),
        (Datatype::Double, &f64s),
        (Datatype::FloatComplex, &f32s),
        (Datatype::DoubleComplex, &f64s),
        (Datatype::LongDouble, &f80s),
        (Datatype::LongDoubleComplex, &f80s),
    ];
    let run = || {
        let mut all = Vec::new();
        for (ty, values) in &types {
            for op in [AtomicOp::Sum, AtomicOp::Prod, AtomicOp::Lor, AtomicOp::Cswap] {
                let count = values.len() / ty.size();
                let (target, look) = memory(values);
                // Every value with the one before it.
                let mut operand = values.to_vec();
                operand.rotate_right(ty.size());
                let zeros = vec![0; values.len()];
                target
                    .atomic(0, op, *ty, count, &operand, &zeros, &mut [], Sharing::Single)
                    .unwrap();
                all.push(bytes(&look));
            }
        }
        all
    };
    let usual = now();
    let wanted = run();
    // Flush to zero, subnormals are zero, round up; double precision, round down.
    for (mxcsr, x87) in [(0xdfc0, 0x067f), (0x9fc0, 0x027f), (0x5f80, 0x0b7f)] {
        set(mxcsr, x87);
        let got = run();
        let after = now();
        set(usual.0, usual.1);
        assert_eq!(got, wanted, "under {mxcsr:x} {x87:x}");
        assert_eq!(after, (mxcsr, x87));
    }
}

/// Goal: no update of a shared element is lost to the processor's own atomic instructions,
/// whichever way the engine takes. Method: one thread adds to a word by them and another by the
/// engine.
#[test]
fn nothing_is_lost_beside_the_processors_own_atomics() {
    const ROUNDS: u64 = 300_000;
    type Way = fn(&IoBuf, Datatype);
    let long: Way = |target, ty| {
        let (one, size) = (1_u64.to_le_bytes(), ty.size());
        let (op, sharing) = (AtomicOp::Sum, Sharing::Shared);
        target.atomic(0, op, ty, 1, &one[..size], &[], &mut [], sharing).unwrap();
    };
    let array: Way = |target, ty| {
        let (ones, size) = ([1_u64.to_le_bytes(), [0; 8]].concat(), ty.size());
        let operand = [&ones[..size], &ones[8..8 + size]].concat();
        let (op, mut old) = (AtomicOp::Sum, vec![0; 2 * size]);
        target.atomic(0, op, ty, 2, &operand, &[], &mut old, Sharing::Shared).unwrap();
    };
    let word: Way = |target, ty| {
        target.first().unwrap().atomic_word(0, AtomicOp::Sum, ty, 1, true).unwrap();
    };
    let words: Way = |target, _| {
        Words::of(target.as_one().unwrap(), true).unwrap().fetch_add(0, 1).unwrap();
    };
    let all = [Datatype::Uint8, Datatype::Int16, Datatype::Uint32, Datatype::Uint64];
    let ways = all.map(|ty| (ty, long)).into_iter().chain(all.map(|ty| (ty, array)));
    let ways = ways.chain(all[2..].iter().map(|ty| (*ty, word)));
    for (ty, way) in ways.chain([(Datatype::Uint64, words)]) {
        let (target, look) = memory(&[0; 16]);
        let base = target.first().unwrap().base();
        // SAFETY: 16 bytes of leaked memory at a multiple of 64, which is changed by atomics alone.
        let add: Box<dyn Fn() + Send> = unsafe {
            match ty.size() {
                1 => adder(AtomicU8::from_ptr(base), |n| n.fetch_add(1, Ordering::Relaxed)),
                2 => adder(AtomicU16::from_ptr(base.cast()), |n| n.fetch_add(1, Ordering::Relaxed)),
                4 => adder(AtomicU32::from_ptr(base.cast()), |n| n.fetch_add(1, Ordering::Relaxed)),
                _ => adder(AtomicU64::from_ptr(base.cast()), |n| n.fetch_add(1, Ordering::Relaxed)),
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(move || (0..ROUNDS).for_each(|_| add()));
            (0..ROUNDS).for_each(|_| way(&target, ty));
        });
        let size = ty.size();
        assert_eq!(bytes(&look)[..size], (2 * ROUNDS).to_le_bytes()[..size], "{ty:?}");
    }
}

fn adder<A: Sync, N: 'static>(word: &'static A, add: fn(&A) -> N) -> Box<dyn Fn() + Send> {
    Box::new(move || drop(add(word)))
}

/// Adds 1 to the element at 0 of each target, `rounds` times, from a thread each.
fn add_ones(targets: Vec<IoBuf>, ty: Datatype, one: &[u8], rounds: usize, sharing: Sharing) {
    let start = std::sync::Barrier::new(targets.len());
    let start = &start;
    std::thread::scope(|scope| {
        for target in targets {
            scope.spawn(move || {
                start.wait();
                let mut result = vec![0; ty.size()];
                for _ in 0..rounds {
                    target.atomic(0, AtomicOp::Sum, ty, 1, one, &[], &mut result, sharing).unwrap();
                }
            });
        }
    });
}

/// The number 1 of a type.
fn one_of(ty: Datatype) -> Vec<u8> {
    let (target, look) = memory(&vec![0; ty.size()]);
    let one = [1_u8; 32];
    let run = |op, operand: &[u8]| {
        target.atomic(0, op, ty, 1, operand, &[], &mut [], Sharing::Single).unwrap();
    };
    // Something that is not zero, whatever the type: true is 1.
    run(AtomicOp::Lor, &one[..ty.size()]);
    bytes(&look)
}

/// Goal: no addition to a shared element is lost, for every type (S13). Method: four threads add 1
/// to one element; the sum is what one thread gets by as many additions.
#[test]
fn shared_sums_are_exact() {
    static LOCKS: LocalLocks = LocalLocks::new();
    const ROUNDS: usize = 100_000;
    for ty in Datatype::ALL.into_iter().filter(|ty| exec::has_meaning(AtomicOp::Sum, *ty)) {
        let one = one_of(ty);
        let (alone, wanted) = memory(&vec![0; ty.size()]);
        add_ones(vec![alone], ty, &one, 4 * ROUNDS, Sharing::Single);
        for sharing in [Sharing::Shared, Sharing::SharedBy(&LOCKS)] {
            let (first, look) = memory(&vec![0; ty.size()]);
            let base = first.addr_at(0) as *mut u8;
            let more = (1..4).map(|_| {
                // SAFETY: the same leaked memory, changed by atomics only.
                unsafe { at(base, ty.size()) }
            });
            let targets = std::iter::once(first).chain(more).collect();
            add_ones(targets, ty, &one, ROUNDS, sharing);
            assert_eq!(bytes(&look), bytes(&wanted), "{ty:?} {sharing:?}");
        }
    }
}

/// Goal: an element of 8, 16 or 32 bytes is read as a whole (AR1). Method: one thread writes
/// elements whose bytes are all alike, another reads.
#[test]
fn shared_reads_are_not_torn() {
    for ty in [Datatype::Uint64, Datatype::DoubleComplex, Datatype::LongDoubleComplex] {
        if !exec::has_meaning(AtomicOp::Write, ty) {
            continue;
        }
        let (writer, reader) = memory(&vec![0; ty.size()]);
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for i in 0..200_000 {
                    let (op, new) = (AtomicOp::Write, vec![i as u8; ty.size()]);
                    writer.atomic(0, op, ty, 1, &new, &[], &mut [], Sharing::Shared).unwrap();
                }
            });
            scope.spawn(move || {
                let mut got = vec![0; ty.size()];
                for _ in 0..200_000 {
                    reader
                        .atomic(0, AtomicOp::Read, ty, 1, &[], &[], &mut got, Sharing::Shared)
                        .unwrap();
                    // The padding of a long double is always zero in what is returned.
                    let mut value = got.chunks(16).flat_map(|part| match ty {
                        Datatype::LongDoubleComplex => &part[..10],
                        _ => part,
                    });
                    assert!(value.all(|b| *b == got[0]), "{ty:?}: {got:x?}");
                }
            });
        });
    }
}

/// A forked process that ends with 0, or is killed.
#[cfg(target_arch = "x86_64")]
struct Child(nix::unistd::Pid);

#[cfg(target_arch = "x86_64")]
impl Child {
    /// Runs `f`, which must not allocate: another thread may have held the allocator's lock.
    fn run(f: impl FnOnce()) -> Self {
        // SAFETY: the child only runs `f`, which computes and locks what this process does not
        // hold, and then leaves without any destructor.
        match unsafe { nix::unistd::fork() }.unwrap() {
            nix::unistd::ForkResult::Parent { child } => Self(child),
            nix::unistd::ForkResult::Child => {
                f();
                // SAFETY: _exit has no preconditions.
                unsafe { libc::_exit(0) }
            }
        }
    }

    fn ended_well(&self) -> bool {
        use nix::sys::wait::{WaitStatus, waitpid};
        waitpid(self.0, None).unwrap() == WaitStatus::Exited(self.0, 0)
    }
}

/// Killed, if it has not ended, and waited for.
#[cfg(target_arch = "x86_64")]
impl Drop for Child {
    fn drop(&mut self) {
        // Both fail for a child that `ended_well` has waited for.
        let _ = nix::sys::signal::kill(self.0, nix::sys::signal::SIGKILL);
        let _ = nix::sys::wait::waitpid(self.0, None);
    }
}

/// Goal: two processes that share memory and a domain name are one actor (AR8), and one of them
/// may die with a lock held. Method: a forked child adds to the same elements by the same locks;
/// then children are killed while they add, and the parent still gets every lock.
#[test]
#[cfg(target_arch = "x86_64")]
fn processes_share_locks() {
    const ROUNDS: usize = 300_000;
    let dir = tempfile::tempdir().unwrap();
    let locks = ProcessLocks::open(&dir.path().join("locks")).unwrap();
    let file = tempfile::tempfile_in(dir.path()).unwrap();
    file.set_len(4096).unwrap();
    let shared = memmap2::MmapOptions::new().map_raw(&file).unwrap();
    for ty in [Datatype::LongDouble, Datatype::DoubleComplex, Datatype::LongDoubleComplex] {
        let one_value = one_of(ty);
        let (alone, wanted) = memory(&vec![0; ty.size()]);
        add_ones(vec![alone], ty, &one_value, 2 * ROUNDS, Sharing::Single);
        // SAFETY: `shared` is mapped until the end of the test, longer than any element, and
        // reached through this only.
        let target = unsafe { at(shared.as_mut_ptr(), ty.size()) };
        target.write_at(0, &vec![0; ty.size()]);
        let add = |rounds| {
            let sharing = Sharing::SharedBy(locks);
            for _ in 0..rounds {
                let op = AtomicOp::Sum;
                target.atomic(0, op, ty, 1, &one_value, &[], &mut [], sharing).unwrap();
            }
        };
        // Both go when both are there, each having counted itself.
        // SAFETY: as for `target`, at another place of the same mapping.
        let there = unsafe { at(shared.as_mut_ptr().wrapping_add(2048), 8) };
        there.write_at(0, &[0; 8]);
        let meet = || {
            let (ty, one) = (Datatype::Uint64, 1_u64.to_le_bytes());
            let mut seen = [0; 8];
            there.atomic(0, AtomicOp::Sum, ty, 1, &one, &[], &mut [], Sharing::Shared).unwrap();
            while u64::from_le_bytes(seen) < 2 {
                std::thread::yield_now();
                let op = AtomicOp::Read;
                there.atomic(0, op, ty, 1, &[], &[], &mut seen, Sharing::Shared).unwrap();
            }
        };
        let child = Child::run(|| {
            meet();
            add(ROUNDS);
        });
        meet();
        add(ROUNDS);
        assert!(child.ended_well());
        assert_eq!(bytes(&target), bytes(&wanted), "{ty:?}");
        for _ in 0..50 {
            let child = Child::run(|| add(50_000_000));
            add(2_000);
            drop(child);
            add(1);
        }
    }
}

/// Goal: whoever opens the table gets the one table, and what is no table is refused.
#[test]
fn a_table_of_locks_is_one_and_checked() {
    use std::io::ErrorKind::{InvalidData, NotFound};
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("locks");
    let opened: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..4).map(|_| scope.spawn(|| ProcessLocks::open(&path).unwrap())).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(opened.iter().all(|locks| std::ptr::eq(*locks, opened[0])));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "a draft is left");
    let refused = |name: &str, bytes: Option<&[u8]>| {
        let path = dir.path().join(name);
        if let Some(bytes) = bytes {
            std::fs::write(&path, bytes).unwrap();
        }
        ProcessLocks::open(&path).unwrap_err().kind()
    };
    assert_eq!(refused("short", Some(&[0; 100])), InvalidData);
    let len = std::fs::metadata(&path).unwrap().len() as usize;
    assert_eq!(refused("blank", Some(&vec![0; len])), InvalidData);
    assert_eq!(refused("no/such/place", None), NotFound);
}

/// Goal: tables whose processes have died go when another is made beside them; those in use and
/// whatever else lies there stay.
#[test]
fn tables_of_the_dead_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    ProcessLocks::open(&at("x-locks-used")).unwrap();
    // What nobody has opened is as if whoever had it were dead.
    for dead in ["x-locks-dead", "y-locks-dead", "x-locks-draft.1.0"] {
        std::fs::copy(at("x-locks-used"), at(dead)).unwrap();
    }
    std::fs::write(at("x-locks-short"), [0; 100]).unwrap();
    std::os::unix::fs::symlink(at("y-locks-dead"), at("x-locks-link")).unwrap();
    ProcessLocks::open(&at("x-locks-new")).unwrap();
    let left = std::fs::read_dir(dir.path()).unwrap();
    let mut left: Vec<_> = left.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    left.sort();
    let stays = ["draft.1.0", "link", "new", "short", "used"].map(|name| format!("x-locks-{name}"));
    assert_eq!(left, [&stays[..], &["y-locks-dead".to_owned()]].concat());
}
