//! The atomics under kfabric's names.

use barewire::flags::{CqFlags, MrMode};
use barewire::kfi::*;
use barewire::*;

use crate::harness::*;
use crate::rma::{bytes, plan, region, whole};

/// K5: one engine. Each pair that a family has is run under both names, each on a region of its
/// own with the same bytes: memory and old values are the same. K1: a base read fills its buffer.
#[test]
fn every_pair_does_the_same_under_both_names() {
    let pair = Pair::new(&plan(MrMode::empty()));
    let a = &pair.a.ep;
    let ((fi, to_fi), (kfi, to_kfi)) = (region(&pair, 32), region(&pair, 32));
    let (operand, compare) = (pattern(32, 2), pattern(32, 1));
    let (mut ran, mut refused) = (0, 0);
    for kind in AtomicKind::ALL {
        for (op, ty) in (0..21).flat_map(|op| (0..21).map(move |ty| (op, ty))) {
            let what = TypedOp { op, datatype: ty };
            let (valid, kfi_valid) = match kind {
                AtomicKind::Base => (a.atomicvalid(what), kfi_atomicvalid(a, what)),
                AtomicKind::Fetch => (a.fetch_atomicvalid(what), kfi_fetch_atomicvalid(a, what)),
                AtomicKind::Compare => {
                    (a.compare_atomicvalid(what), kfi_compare_atomicvalid(a, what))
                }
            };
            if kind == AtomicKind::Base && op == KFI_ATOMIC_READ {
                assert!(valid.is_err(), "libfabric has no base read");
                continue;
            }
            assert_eq!(valid, kfi_valid);
            if let Err(e) = valid {
                assert_eq!(e.fi_errno(), KFI_EOPNOTSUPP);
                refused += 1;
                continue;
            }
            let len = Datatype::try_from(ty).unwrap().size();
            let (x, c) = (&operand[..len], &compare[..len]);
            for mr in [&fi, &kfi] {
                mr.store(0, &pattern(32, 1)).unwrap();
            }
            let (x, result) = (if op == KFI_ATOMIC_READ { &[] } else { x }, || Buf::zeroed(len));
            match kind {
                AtomicKind::Base => {
                    a.atomic(what, x, to_fi, 1).unwrap();
                    kfi_atomic(a, what, x.into(), to_kfi, 2).unwrap();
                }
                AtomicKind::Fetch => {
                    a.fetch_atomic(what, x, result(), to_fi, 1).unwrap();
                    kfi_fetch_atomic(a, what, x, result(), to_kfi, 2).unwrap();
                }
                AtomicKind::Compare => {
                    a.compare_atomic(what, x, c, result(), to_fi, 1).unwrap();
                    kfi_compare_atomic(a, what, (x, c), result(), to_kfi, 2).unwrap();
                }
            }
            let mut done = [pair.at_a(), pair.at_a()];
            done.sort_by_key(|c| c.op_context);
            let [one, two] = done.map(|c| (c.flags, c.bufs.into_one().map(|b| b.to_vec())));
            assert_eq!(one, two, "{kind:?} {what:?}");
            assert_eq!(bytes(&fi, 0, 32), bytes(&kfi, 0, 32), "{kind:?} {what:?}");
            ran += 1;
        }
    }
    println!("kfi: pairs executed {ran}, refused {refused}");
    assert_eq!(ran, 546);
    let what = TypedOp { op: KFI_ATOMIC_READ, datatype: KFI_UINT32 };
    kfi.store(0, &pattern(32, 7)).unwrap();
    kfi_atomicv(a, what, vec![Buf::zeroed(8)], to_kfi, 3).unwrap();
    let got = pair.at_a().bufs.into_many().unwrap();
    assert_eq!(got[0][..], pattern(8, 7)[..]);
    kfi_atomic(a, what, Buf::zeroed(4), to_kfi, 4).unwrap();
    let got = pair.at_a().bufs.into_many().unwrap();
    assert_eq!(got[0][..], pattern(8, 7)[..4]);
    assert!(kfi_inject_atomic(a, what, &[0; 4], to_kfi).is_err());
    drop((fi, kfi));
    pair.all_is_back();
}

/// K4, K5, K6: the 13 calls of the SYNOPSIS of kfi_atomic, with what the C arguments are here:
/// `datatype` and `op` are a [`What`]; `dest_addr`, `addr` and `key` a [`Remote`]; a buffer with
/// its count or length a slice or [`Buf`]; `desc` is not needed. Does not compile if one is missing
/// or differs.
#[test]
fn the_names_and_arguments_are_those_of_the_synopsis() {
    // kfi_atomic(ep, buf, count, desc, dest_addr, addr, key, datatype, op, context)
    let _: fn(&Endpoint, TypedOp, Buf, Remote, u64) -> PostResult = kfi_atomic;
    // kfi_atomicv(ep, iov, desc, count, dest_addr, addr, key, datatype, op, context)
    let _: fn(&Endpoint, TypedOp, Vec<Buf>, Remote, u64) -> PostResult = kfi_atomicv;
    // kfi_atomicmsg(ep, msg, flags)
    let _: fn(&Endpoint, AtomicMsg<'_>, Bufs, KfiFlags) -> PostResult = kfi_atomicmsg;
    // kfi_inject_atomic(ep, buf, count, dest_addr, addr, key, datatype, op)
    let _: fn(&Endpoint, TypedOp, &[u8], Remote) -> Result<()> = kfi_inject_atomic;
    // kfi_fetch_atomic(ep, buf, count, desc, result, result_desc, dest_addr, addr, key, ...)
    let _: fn(&Endpoint, TypedOp, &[u8], Buf, Remote, u64) -> PostResult = kfi_fetch_atomic;
    // kfi_fetch_atomicv(ep, iov, desc, count, resultv, result_desc, result_count, ...)
    type FetchV = fn(&Endpoint, TypedOp, &[&[u8]], Vec<Buf>, Remote, u64) -> PostResult;
    let _: FetchV = kfi_fetch_atomicv;
    // kfi_fetch_atomicmsg(ep, msg, resultv, result_desc, result_count, flags)
    let _: fn(&Endpoint, AtomicMsg<'_>, Bufs, KfiFlags) -> PostResult = kfi_fetch_atomicmsg;
    // kfi_compare_atomic(ep, buf, count, desc, compare, compare_desc, result, result_desc, ...)
    type Two<'a> = (&'a [u8], &'a [u8]);
    let _: fn(&Endpoint, TypedOp, Two<'_>, Buf, Remote, u64) -> PostResult = kfi_compare_atomic;
    // kfi_compare_atomicv(ep, iov, desc, count, comparev, compare_desc, compare_count, ...)
    type Lists<'a> = (&'a [&'a [u8]], &'a [&'a [u8]]);
    let _: for<'a> fn(&Endpoint, TypedOp, Lists<'a>, Vec<Buf>, Remote, u64) -> PostResult =
        |ep, what, lists, bufs, to, context| {
            kfi_compare_atomicv(ep, what, lists, bufs, to, context)
        };
    // kfi_compare_atomicmsg(ep, msg, comparev, compare_desc, compare_count, resultv, ..., flags)
    let _: fn(&Endpoint, AtomicMsg<'_>, &[&[u8]], Bufs, KfiFlags) -> PostResult =
        kfi_compare_atomicmsg;
    // kfi_atomicvalid(ep, datatype, op, count), and of the other families
    let valid: [fn(&Endpoint, TypedOp) -> Result<usize>; 3] =
        [kfi_atomicvalid, kfi_fetch_atomicvalid, kfi_compare_atomicvalid];
    assert_eq!(valid.len() + 10, 13);
    // enum kfi_datatype and enum kfi_op, in their order; the errors.
    let types = [KFI_INT8, KFI_UINT8, KFI_INT16, KFI_UINT16, KFI_INT32, KFI_UINT32, KFI_INT64];
    assert_eq!(types, [0, 1, 2, 3, 4, 5, 6]);
    let types = [KFI_UINT64, KFI_FLOAT, KFI_DOUBLE, KFI_FLOAT_COMPLEX, KFI_DOUBLE_COMPLEX];
    assert_eq!(types, [7, 8, 9, 10, 11]);
    assert_eq!([KFI_LONG_DOUBLE, KFI_LONG_DOUBLE_COMPLEX], [12, 13]);
    let ops = [KFI_MIN, KFI_MAX, KFI_SUM, KFI_PROD, KFI_LOR, KFI_LAND, KFI_BOR, KFI_BAND];
    assert_eq!(ops, [0, 1, 2, 3, 4, 5, 6, 7]);
    let ops = [KFI_LXOR, KFI_BXOR, KFI_ATOMIC_READ, KFI_ATOMIC_WRITE, KFI_CSWAP, KFI_CSWAP_NE];
    assert_eq!(ops, [8, 9, 10, 11, 12, 13]);
    let ops = [KFI_CSWAP_LE, KFI_CSWAP_LT, KFI_CSWAP_GE, KFI_CSWAP_GT, KFI_MSWAP];
    assert_eq!(ops, [14, 15, 16, 17, 18]);
    let errors = [KFI_EAGAIN.fi_errno(), KFI_EMSGSIZE.fi_errno(), KFI_EOPNOTSUPP];
    assert_eq!(errors, [11, 90, 95]);
}

/// K2: KFI_REMOTE_SIGNAL raises a completion at the target, by each of the three `msg` calls; a
/// flag that is not known is refused.
#[test]
fn a_remote_signal_is_a_completion_at_the_target() {
    let pair = Pair::new(&plan(MrMode::empty()));
    let (a, (mr, to)) = (&pair.a.ep, region(&pair, 64));
    let word = [1, 0, 0, 0, 0, 0, 0, 0];
    let operands: [&[u8]; 1] = [&word];
    let msg = |op, data| AtomicMsg {
        operands: &operands,
        addr: to.dest,
        rma_iov: vec![RmaIov { addr: 8, len: 1, key: to.key }],
        op: TypedOp { op, datatype: KFI_UINT64 },
        context: data,
        data,
    };
    let signal = KfiFlags::REMOTE_SIGNAL | KfiFlags::COMPLETION;
    kfi_atomicmsg(a, msg(KFI_SUM, 1), (), signal).unwrap();
    kfi_fetch_atomicmsg(a, msg(KFI_SUM, 2), Buf::zeroed(8), signal).unwrap();
    kfi_compare_atomicmsg(a, msg(KFI_CSWAP, 3), &[&word], Buf::zeroed(8), signal).unwrap();
    kfi_atomicmsg(a, msg(KFI_ATOMIC_READ, 4), Buf::zeroed(8), KfiFlags::FENCE).unwrap();
    for data in 1..4 {
        let told = pair.at_b();
        assert!(told.flags.contains(CqFlags::ATOMIC | CqFlags::REMOTE_CQ_DATA));
        assert_eq!(told.data, data);
    }
    let mut done: Vec<_> = (0..4).map(|_| pair.at_a()).collect();
    done.sort_by_key(|c| c.op_context);
    assert_eq!(whole(done.pop().unwrap()), 2_u64.to_le_bytes());
    let unknown = KfiFlags::from_bits_retain(1 << 3);
    let refused = kfi_fetch_atomicmsg(a, msg(KFI_SUM, 5), Buf::zeroed(8), unknown);
    assert_eq!(refusal(refused, 8), Error::BadFlags);
    drop(mr);
    pair.all_is_back();
}
