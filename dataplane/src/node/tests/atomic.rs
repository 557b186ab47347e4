//! Atomic operations between two nodes. What each computes is compared with a C compiler elsewhere
//! (`tests/atomics`); here is what the wire, the checks and the loss of frames do to them.

use super::fetch::pair_with;
use super::rma::{ALL, Region};
use super::*;
use crate::flags::MrAccess;
use crate::idx::FastOpIdx;
use crate::node::rma_out::ANSWERS_MAX;
use crate::proto::atomic::{
    AtomicKind, AtomicOp, Datatype, OPERAND_LEN_MAX, Sharing, count_max, valid,
};
use crate::rel::psn::Psn;
use crate::slab::Handle;
use crate::types::ProvErrno;
use crate::wire::{self, Base as WireBase, Op, RespOp, Ty};

use AtomicKind::{Base, Compare, Fetch};

const U64: u32 = Datatype::Uint64 as u32;
const SUM: u32 = AtomicOp::Sum as u32;
const CSWAP: u32 = AtomicOp::Cswap as u32;

/// An atomic call; `result` is filled in by [`Pair::atomic`].
pub(super) struct Call<'a> {
    pub(super) kind: AtomicKind,
    pub(super) op: u32,
    pub(super) ty: u32,
    pub(super) operand: &'a [u8],
    pub(super) compare: &'a [u8],
    pub(super) rma: RmaList,
    pub(super) flags: OpFlags,
    pub(super) context: u64,
}

impl<'a> Call<'a> {
    pub(super) fn sum(kind: AtomicKind, operand: &'a [u8], rma: RmaList) -> Self {
        let (op, ty, compare) = (SUM, U64, &[][..]);
        Self { kind, op, ty, operand, compare, rma, flags: OpFlags::empty(), context: 1 }
    }

    /// The request, to `dest`, with this memory for old values.
    pub(super) fn req(self, dest: FiAddr, result: IoBuf) -> AtomicReq {
        let Self { kind, op, ty, operand, compare, rma, flags, context } = self;
        let (operand, compare) = (IoBuf::leaked(operand), IoBuf::leaked(compare));
        let (data, no_completion) = (4711, false);
        AtomicReq {
            kind,
            op,
            ty,
            operand,
            compare,
            result,
            dest,
            rma,
            data,
            context,
            flags,
            no_completion,
        }
    }
}

impl Pair {
    /// Posts `call` with room for `len` bytes of old values, and returns a look at them.
    pub(super) fn atomic(&mut self, call: Call<'_>, len: usize) -> Result<IoBuf> {
        let (result, look) = shared(len);
        let end = &mut self.ends[0];
        let mut req = call.req(end.peer, result);
        if let Some(taken) = &mut self.short
            && let Some(mut short) = req.fast()
            && end.node.try_atomic(end.ep, &mut short, &mut sink(&mut end.out), || self.now)
        {
            *taken += 1;
            return Ok(look);
        }
        end.node.posting().post_atomic(self.now, end.ep, req)?;
        Ok(look)
    }
}

pub(super) fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().unwrap())).collect()
}

pub(super) fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|w| w.to_le_bytes()).collect()
}

/// AR6: all three families, every count that is a limit somewhere, at several MTUs, with and
/// without loss: the target's words and the old values are right, and there is one completion.
#[test]
fn arrays_of_every_length_come_back_right() {
    for (lossless, drop) in [(true, 0), (false, 0), (false, 5)] {
        for mtu in [256, 1500, 65_535] {
            let mut pair = Pair::new(mtu, lossless);
            (pair.drop, pair.scatter) = (drop, true);
            let region = pair.region(1, 8 * 600, ALL);
            let limit = crate::node::atomic_valid(Fetch, SUM, U64).unwrap();
            assert_eq!(limit * 8, OPERAND_LEN_MAX);
            for count in [1, 2, 3, 8, 16, 17, 31, 32, 33, limit - 1, limit] {
                let what = format!("lossless {lossless} mtu {mtu} count {count}");
                let before = words(&region.bytes());
                let add: Vec<u64> = (0..count as u64).map(|i| i * 3 + 1).collect();
                let mut list = RmaList::default();
                let key = region.key;
                let first = count as u64 / 3;
                list.push(RmaIov { addr: 16, len: first, key });
                list.push(RmaIov { addr: 16 + first * 8, len: count as u64 - first, key });
                let added: Vec<u64> = before[2..][..count]
                    .iter()
                    .zip(&add)
                    .map(|(a, b)| a.wrapping_add(*b))
                    .collect();
                for (i, kind) in [Base, Fetch].into_iter().enumerate() {
                    let len = if kind == Base { 0 } else { count * 8 };
                    let look = pair.atomic(Call::sum(kind, &bytes_of(&add), list), len).unwrap();
                    pair.run(if drop > 0 { 200_000_000 } else { 2_000_000 });
                    let done = pair.read(0);
                    assert_eq!(done.len(), 1, "{what}");
                    let way = [CqFlags::WRITE, CqFlags::READ][i];
                    assert_eq!(done[0].flags, CqFlags::ATOMIC | way, "{what}");
                    if kind == Fetch {
                        assert_eq!(words(&contents(&look)), added, "{what}");
                    }
                }
                let twice: Vec<u64> =
                    added.iter().zip(&add).map(|(a, b)| a.wrapping_add(*b)).collect();
                assert_eq!(words(&region.bytes())[2..][..count], twice, "{what}");
                // Every other word matches and is swapped.
                let new: Vec<u64> = (0..count as u64).map(|i| i << 32).collect();
                let mut guess = twice.clone();
                guess.iter_mut().step_by(2).for_each(|w| *w ^= 1);
                let call = Call {
                    kind: Compare,
                    op: CSWAP,
                    compare: &bytes_of(&guess),
                    ..Call::sum(Compare, &[], list)
                };
                let new_bytes = bytes_of(&new);
                let look = pair.atomic(Call { operand: &new_bytes, ..call }, count * 8).unwrap();
                pair.run(if drop > 0 { 200_000_000 } else { 2_000_000 });
                assert_eq!(pair.read(0).len(), 1, "{what}");
                assert_eq!(words(&contents(&look)), twice, "{what}");
                let swapped: Vec<u64> =
                    (0..count).map(|i| if i % 2 == 0 { twice[i] } else { new[i] }).collect();
                assert_eq!(words(&region.bytes())[2..][..count], swapped, "{what}");
                region.assert_guards();
            }
            pair.run(600_000_000);
            pair.assert_quiet();
        }
    }
}

/// Rows of A.0.2 and A.0.1: what the call refuses, with no side effect; AR2: lists that count
/// different numbers of elements; AR15: pairs that are none, by the answer of the one table.
#[test]
fn impossible_calls_are_refused() {
    let mut pair = Pair::new(1500, true);
    let region = pair.region(1, 8192, ALL);
    let one = RmaList::one(0, 1, region.key);
    let word = [1; 8];
    // One that is possible, so that the fast path is open.
    pair.short = Some(0);
    for _ in 0..2 {
        let read = AtomicOp::Read as u32;
        pair.atomic(Call { op: read, ..Call::sum(Fetch, &[], one) }, 8).unwrap();
        pair.run(5_000_000);
        assert_eq!(pair.read(0).len(), 1);
    }
    assert_eq!(pair.short, Some(1));
    let frames = pair.ends[0].node.counters().tx_frames;
    let supp = |r: Result<IoBuf>| assert!(matches!(r, Err(Error::OpNotSupp(_))), "{r:?}");
    let call = |kind, op, ty| Call { kind, op, ty, compare: &word, ..Call::sum(kind, &word, one) };
    let mut refused = 0;
    for kind in AtomicKind::ALL {
        for op in 0..21 {
            for ty in 0..21 {
                let pair_of = AtomicOp::try_from(op).ok().zip(Datatype::try_from(ty).ok());
                if !pair_of.is_some_and(|(op, ty)| valid(kind, op, ty)) {
                    supp(pair.atomic(call(kind, op, ty), 8));
                    assert!(crate::node::atomic_valid(kind, op, ty).is_err());
                    refused += 1;
                }
            }
        }
    }
    assert_eq!(refused, 3 * 21 * 21 - 546);
    supp(pair.atomic(call(Base, 99, U64), 8));
    supp(pair.atomic(call(Base, SUM, 99), 8));
    let sum = |rma| Call { rma, ..Call::sum(Fetch, &word, one) };
    let none = Error::Invalid("no element");
    assert_eq!(pair.atomic(sum(RmaList::one(0, 0, region.key)), 8).unwrap_err(), none);
    let many = count_max(Datatype::Uint64) as u64 + 1;
    let many = pair.atomic(sum(RmaList::one(0, many, region.key)), 8).unwrap_err();
    assert_eq!(many, Error::MsgTooLong);
    let differ = Error::Invalid("element counts differ");
    assert_eq!(pair.atomic(sum(RmaList::one(0, 2, region.key)), 8).unwrap_err(), differ);
    assert_eq!(pair.atomic(sum(one), 16).unwrap_err(), differ);
    let flags = OpFlags::from_bits_retain(1 << 62);
    assert_eq!(pair.atomic(Call { flags, ..sum(one) }, 8).unwrap_err(), Error::BadFlags);
    let long = [1; 264];
    let rma = RmaList::one(0, 33, region.key);
    let inject = Call { flags: OpFlags::INJECT, ..Call::sum(Base, &long, rma) };
    assert_eq!(pair.atomic(inject, 0).unwrap_err(), Error::MsgTooLong);
    pair.run(5_000_000);
    assert_eq!(pair.ends[0].node.cqs.ready(pair.ends[0].cq), Ok(0));
    assert_eq!(pair.ends[0].node.counters().tx_frames, frames);
    assert_eq!(pair.short, Some(1));
    region.assert_untouched();
}

/// AR3, AR4: rights x family, misalignment, bounds, keys: one error entry each, nothing is changed.
#[test]
fn protection_holds_for_atomics() {
    for (lossless, short) in [(true, None), (true, Some(0)), (false, None)] {
        let mut pair = Pair::new(1500, lossless);
        pair.short = short;
        let all = pair.region(1, 4096, ALL);
        let readable = pair.region(1, 4096, MrAccess::REMOTE_READ);
        let writable = pair.region(1, 4096, MrAccess::REMOTE_WRITE);
        let closed = pair.region(1, 4096, ALL);
        pair.ends[1].node.responder().mr_close(closed.id).unwrap();
        let unaligned = Error::Invalid("elements are not aligned at the target");
        let atomic_read = AtomicOp::Read as u32;
        let probes = [
            (Base, SUM, 1, all.key ^ 1 << 33, 0, Error::KeyRejected),
            (Fetch, SUM, 300, all.key ^ 1 << 33, 0, Error::KeyRejected),
            (Compare, CSWAP, 300, closed.key, 0, Error::KeyRejected),
            (Base, SUM, 1, all.key, 4096, Error::Access),
            (Base, SUM, 400, all.key, 4000, Error::Access),
            (Fetch, SUM, 1, all.key, u64::MAX - 7, Error::Access),
            (Base, SUM, 1, readable.key, 0, Error::Access),
            (Fetch, SUM, 1, readable.key, 0, Error::Access),
            (Compare, CSWAP, 1, readable.key, 0, Error::Access),
            (Fetch, SUM, 1, writable.key, 0, Error::Access),
            (Fetch, atomic_read, 1, writable.key, 0, Error::Access),
            (Compare, CSWAP, 1, writable.key, 0, Error::Access),
            (Base, SUM, 1, all.key, 4, unaligned),
            (Fetch, SUM, 1, all.key, 1, unaligned),
        ];
        for (kind, op, count, key, addr, err) in probes {
            let bytes = vec![1; count * 8];
            let rma = RmaList::one(addr, count as u64, key);
            let len = if kind == Base { 0 } else { count * 8 };
            let call = Call { op, compare: &bytes, context: 9, ..Call::sum(kind, &bytes, rma) };
            let look = pair.atomic(call, len).unwrap();
            pair.run(2_000_000);
            let got = pair.only_error(9);
            let what = format!("{kind:?} {op} x {count} at {addr}");
            // Of 400 words at 4000 the first packet is refused already only if it is the first.
            if count < 400 {
                assert_eq!(got.prov_errno, ProvErrno::NotExecuted, "{what}");
            }
            assert_eq!(got.err, err, "{what}");
            assert!(contents(&look).iter().all(|&b| b == 0xEE), "{what}");
        }
        for region in [&all, &readable, &writable, &closed] {
            region.assert_untouched();
        }
        // A read needs the right to read alone, and takes no operand.
        let rma = RmaList::one(8, 2, readable.key);
        let call = Call { op: atomic_read, ..Call::sum(Fetch, &[], rma) };
        let look = pair.atomic(call, 16).unwrap();
        pair.run(2_000_000);
        assert_eq!(pair.read(0).len(), 1);
        assert_eq!(contents(&look), [0xEE; 16]);
        // The first found no session, three are base operations, two are long and one cannot be.
        assert!(pair.short.is_none_or(|taken| taken >= 8), "{:?}", pair.short);
        pair.run(600_000_000);
        pair.assert_quiet();
    }
}

/// What a target has found to be allowed it forgets with everything that it depends on: bounds,
/// alignment and flags are looked at in every packet, and a region that has been closed, narrowed
/// or registered anew is another one, and so is the endpoint.
#[test]
fn cached_access_checks_are_invalidated() {
    let mut pair = Pair::new(1500, true);
    // Without FI_RMA_EVENT nothing counts but the counter of a region.
    let End { node, ep, cq, av, .. } = &mut pair.ends[1];
    let number = Some(node.addr_of(*ep).unwrap().ep);
    node.ep_close(pair.now, *ep).unwrap();
    let attr = EpAttr { number, caps: Caps::ATOMIC, ..EpAttr::default() };
    *ep = open_ep(node, (*cq, *av), attr);
    let word = bytes_of(&[1]);
    let of = |buf, access, requested_key| {
        let (virt_addr, ep, sharing) = (false, None, Sharing::Single);
        MrReq { buf, access, requested_key, virt_addr, ep, sharing }
    };
    let mut region = pair.region_of(1, 64, |buf| of(buf, ALL, Some(5)));
    let add =
        |addr, key| Call { context: 9, ..Call::sum(Fetch, &word, RmaList::one(addr, 1, key)) };
    pair.short = Some(0);
    let expect = |pair: &mut Pair, addr, key, err| {
        (0..3).for_each(|_| fetch_ends_with(pair, add(addr, key), err));
    };
    let unaligned = Error::Invalid("elements are not aligned at the target");
    expect(&mut pair, 56, 5, None);
    expect(&mut pair, 57, 5, Some(Error::Access));
    expect(&mut pair, u64::MAX - 7, 5, Some(Error::Access));
    expect(&mut pair, 1, 5, Some(unaligned));
    expect(&mut pair, 0, 6, Some(Error::KeyRejected));
    expect(&mut pair, 0, 5, None);
    let sum = u64::from_le_bytes([0xEE; 8]) + 3;
    assert_eq!(words(&region.bytes())[0], sum);
    assert_eq!(words(&region.bytes())[7], sum);
    // A counter that is bound late counts from then on.
    let node = &mut pair.ends[1].node;
    let cntr = node.cntrs.open(CntrEvents::Comp).unwrap();
    // Bound for both or for neither.
    let writes = node.cntrs.open(CntrEvents::Comp).unwrap();
    node.responder().mr_bind_cntr(region.id, writes, false, true).unwrap();
    assert!(node.responder().mr_bind_cntr(region.id, cntr, true, true).is_err());
    node.responder().mr_bind_cntr(region.id, cntr, true, false).unwrap();
    expect(&mut pair, 8, 5, None);
    assert_eq!(pair.ends[1].node.cntrs.read(cntr), Ok(3));
    // Narrowed to an endpoint that is not the one asked for.
    let caps = Caps::ATOMIC;
    let other = pair.ends[1].node.eps.open(EpAttr { caps, ..EpAttr::default() }).unwrap();
    pair.ends[1].node.responder().mr_bind_ep(region.id, other).unwrap();
    expect(&mut pair, 0, 5, Some(Error::Access));
    let own = pair.ends[1].ep;
    pair.ends[1].node.responder().mr_bind_ep(region.id, own).unwrap();
    expect(&mut pair, 0, 5, None);
    // Closed, and its key and slot given to memory that may only be read, and to shorter memory.
    for (len, access, err) in [(64, MrAccess::REMOTE_READ, Error::Access), (8, ALL, Error::Access)]
    {
        expect(&mut pair, 0, 5, None);
        expect(&mut pair, 16, 5, None);
        pair.ends[1].node.responder().mr_close(region.id).unwrap();
        expect(&mut pair, 16, 5, Some(Error::KeyRejected));
        let next = pair.region_of(1, len, |buf| of(buf, access, Some(5)));
        expect(&mut pair, 16, 5, Some(err));
        pair.ends[1].node.responder().mr_close(next.id).unwrap();
        next.assert_untouched();
        region = pair.region_of(1, 64, |buf| of(buf, ALL, Some(5)));
    }
    expect(&mut pair, 0, 5, None);
    assert!(pair.short >= Some(50), "{:?}", pair.short);
    // The endpoint goes.
    pair.ends[1].node.ep_close(pair.now, own).unwrap();
    let look = pair.atomic(add(0, 5), 8).unwrap();
    pair.run(2_000_000);
    assert_eq!(pair.only_error(9).prov_errno, ProvErrno::NoEndpoint);
    assert_eq!(contents(&look), [0xEE; 8]);
}

/// Runs an operation of 8 bytes with context 9, which fetches only if it succeeds.
fn fetch_ends_with(pair: &mut Pair, call: Call<'_>, err: Option<Error>) {
    let look = pair.atomic(call, 8).unwrap();
    pair.run(2_000_000);
    match err {
        None => assert_eq!(pair.outcomes(0), [(9, None)]),
        Some(err) => {
            assert_eq!(pair.only_error(9).err, err);
            assert_eq!(contents(&look), [0xEE; 8]);
        }
    }
}

/// Exactly once: sums stay exact and every old value is seen once, under loss and duplication of
/// requests and answers, with more operations than answers may be outstanding. The fast path, which
/// keeps nothing, is offered and not taken.
#[test]
fn fetch_adds_are_executed_once_under_loss_and_duplication() {
    for drop in [0, 3, 5, 7] {
        let mut pair = Pair::new(1500, false);
        (pair.drop, pair.dup, pair.scatter, pair.short) = (drop, 2, true, Some(0));
        let region = pair.region(1, 16, ALL);
        let start = words(&region.bytes())[1];
        let (mut looks, mut contexts) = (Vec::new(), Vec::new());
        for round in 0..5 {
            for i in 0..100_u64 {
                let (one, rma) = (bytes_of(&[1]), RmaList::one(8, 1, region.key));
                let call = Call { context: round * 100 + i, ..Call::sum(Fetch, &one, rma) };
                looks.push(pair.atomic(call, 8).unwrap());
            }
            pair.run(400_000_000);
            let outcomes = pair.outcomes(0);
            assert!(outcomes.iter().all(|o| o.1.is_none()), "drop {drop}");
            contexts.extend(outcomes.iter().map(|o| o.0));
        }
        contexts.sort_unstable();
        assert_eq!(contexts, (0..500).collect::<Vec<_>>(), "drop {drop}");
        assert_eq!(words(&region.bytes())[1], start.wrapping_add(500));
        let mut old: Vec<u64> =
            looks.iter().map(|look| words(&contents(look))[0].wrapping_sub(start)).collect();
        old.sort_unstable();
        assert_eq!(old, (0..500).collect::<Vec<_>>(), "drop {drop}");
        assert_eq!(pair.short, Some(0), "drop {drop}");
        pair.run(600_000_000);
        pair.assert_quiet();
    }
}

/// The fast path and the slow one are one: whichever an operation takes, and whatever is under way
/// beside it in either direction, it is executed once, in order, and told once.
#[test]
fn the_short_way_does_what_the_long_one_does() {
    mix_of_ways(Pair::new(1500, true));
    // Nobody counts, and fetches are usual.
    mix_of_ways(pair_with(Caps::MSG | Caps::TAGGED | Caps::RMA | Caps::ATOMIC | Caps::FENCE));
}

fn mix_of_ways(mut pair: Pair) {
    let region = pair.region(1, 4096, ALL);
    let wrong = region.key ^ 1 << 40;
    let mut x = 1_u64;
    let mut draw = |n: u64| {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (x >> 33) % n
    };
    pair.short = Some(0);
    let (mut next, mut looks, mut failing) = (words(&region.bytes())[1], Vec::new(), 0);
    let (mut written, mut reads) = ([u64::from_le_bytes([0xEE; 8]); 8], Vec::new());
    for context in 0..6000 {
        let one = bytes_of(&[1]);
        let add = |key| Call { context, ..Call::sum(Fetch, &one, RmaList::one(8, 1, key)) };
        let slot = context % 8;
        let range = |key| RmaList::one(64 + 8 * slot, 8, key);
        match draw(14) {
            way @ (10 | 11) => {
                let flags = if draw(8) == 0 { OpFlags::FENCE } else { OpFlags::empty() };
                let key = if way == 10 { region.key } else { wrong };
                pair.write(&context.to_le_bytes(), range(key), flags, context).unwrap();
                failing += i64::from(way == 11);
                written[slot as usize] = if way == 10 { context } else { written[slot as usize] };
            }
            12 => {
                let (buf, look) = shared(8);
                pair.read_to(buf, range(region.key), context).unwrap();
                reads.push((look, written[slot as usize]));
                // What is posted behind a read may be executed before it.
                pair.run(50_000);
                failing -= pair.outcomes(0).iter().filter(|o| o.1.is_some()).count() as i64;
            }
            13 => {
                let flags = OpFlags::INJECT | OpFlags::DELIVERY_COMPLETE;
                let (key, long) = (region.key, 100 + draw(300));
                let list = RmaList::one(512, long, key);
                let flags = if long <= 256 { flags } else { OpFlags::empty() };
                pair.write(&bytes(long as usize), list, flags, context).unwrap();
            }
            0 => {
                let fence = Call { flags: OpFlags::FENCE, ..add(region.key) };
                looks.push((pair.atomic(fence, 8).unwrap(), next));
                next = next.wrapping_add(1);
            }
            1 => {
                pair.atomic(add(wrong), 8).unwrap();
                failing += 1;
            }
            2 => drop(pair.atomic(Call { kind: Base, ..add(region.key) }, 0).map(|_| next += 1)),
            way @ (3 | 4) => {
                let (from, len) = if way == 3 { (0, 300) } else { (1, 30) };
                pair.recv(1 - from, shared(len).0, 5, OpFlags::empty(), context).unwrap();
                pair.send(from, IoBuf::leaked(&bytes(len)), 5, OpFlags::empty(), context).unwrap();
            }
            5 => {
                let compare = bytes_of(&[next]);
                let swap = Call { op: CSWAP, compare: &compare, ..add(region.key) };
                let swap = Call { kind: Compare, ..swap };
                looks.push((pair.atomic(swap, 8).unwrap(), next));
                next = 1;
            }
            _ => {
                looks.push((pair.atomic(add(region.key), 8).unwrap(), next));
                next = next.wrapping_add(1);
            }
        }
        if draw(3) == 0 || context % 40 == 39 {
            pair.run(5_000 * (1 + draw(4)));
            for i in 0..2 {
                failing -= pair.outcomes(i).iter().filter(|o| o.1.is_some()).count() as i64;
            }
        }
    }
    pair.run(5_000_000);
    failing -= pair.outcomes(0).iter().filter(|o| o.1.is_some()).count() as i64;
    assert_eq!(failing, 0);
    for (n, (look, old)) in looks.iter().enumerate() {
        assert_eq!(words(&contents(look)), [*old], "old value {n}");
    }
    for (n, (look, value)) in reads.iter().enumerate() {
        assert_eq!(words(&contents(look)), [*value], "read {n}");
    }
    assert_eq!(words(&region.bytes())[1], next);
    assert_eq!(words(&region.bytes())[8..16], written);
    assert!(pair.short > Some(1500), "{:?} took the fast path", pair.short);
}

/// The initiator's endpoint closes with answers outstanding: the next endpoint gets as many answers
/// at a time as the first, and what was executed was executed once.
#[test]
fn withdrawn_fetches_give_their_answers_back() {
    for (lossless, short) in [(true, None), (true, Some(0)), (false, None)] {
        for steps in 1..12 {
            let mut pair = Pair::new(1500, lossless);
            if !lossless && steps % 2 == 0 {
                (pair.drop, pair.scatter) = (4, true);
            }
            let region = pair.region(1, 8192, ALL);
            let many = bytes_of(&[1; 512]);
            if short.is_some() {
                let none = Call::sum(Base, &[0; 8], RmaList::one(0, 1, region.key));
                pair.atomic(none, 0).unwrap();
                pair.run(1_000_000);
                assert_eq!(pair.read(0).len(), 1);
                pair.short = short;
            }
            let words_each = if short.is_some() { 1 } else { 512 };
            for _ in 0..60 {
                let rma = RmaList::one(0, words_each, region.key);
                let len = 8 * words_each as usize;
                pair.atomic(Call::sum(Fetch, &many[..len], rma), len).unwrap();
            }
            assert!(pair.short.is_none_or(|taken| taken == 60));
            pair.run((steps - 1) * 5_000);
            let end = &mut pair.ends[0];
            end.node.ep_close(pair.now, end.ep).unwrap();
            let outcomes = pair.outcomes(0);
            assert_eq!(outcomes.len(), 60);
            pair.run(400_000_000);
            let sum = words(&region.bytes())[0].wrapping_sub(u64::from_le_bytes([0xEE; 8]));
            let ok = outcomes.iter().filter(|o| o.1.is_none()).count() as u64;
            assert!((ok..=60).contains(&sum), "{sum} executed, {ok} reported");
            let end = &mut pair.ends[0];
            let caps = Caps::ATOMIC;
            end.ep = end.node.eps.open(EpAttr { caps, ..EpAttr::default() }).unwrap();
            end.node
                .objects()
                .ep_bind_cq(end.ep, end.cq, BindFlags::TRANSMIT | BindFlags::RECV)
                .unwrap();
            end.node.objects().ep_bind_av(end.ep, end.av).unwrap();
            end.node.ep_enable(end.ep).unwrap();
            for i in 0..100 {
                let rma = RmaList::one(4096, 1, region.key);
                let call = Call { context: i, ..Call::sum(Fetch, &many[..8], rma) };
                pair.atomic(call, 8).unwrap();
            }
            pair.run(900_000_000);
            let outcomes = pair.outcomes(0);
            assert_eq!(outcomes.len(), 100, "lossless {lossless} steps {steps}");
            assert!(outcomes.iter().all(|o| o.1.is_none()));
            pair.run(600_000_000);
            pair.assert_quiet();
        }
    }
}

/// Goal: an atomic operation that was given up with a packet missing is executed up to that packet
/// and no further, and not told as done.
#[test]
fn an_abandoned_atomic_is_executed_up_to_the_missing_packet() {
    for (kind, lost) in [Base, Fetch].into_iter().flat_map(|k| [(k, 0), (k, 1), (k, 2)]) {
        let mut pair = Pair::new(1500, false);
        let region = pair.region(1, 4096, ALL);
        let none = Call::sum(Base, &[0; 8], RmaList::one(0, 1, region.key));
        pair.atomic(none, 0).unwrap();
        pair.run(1_000_000);
        assert_eq!(pair.read(0).len(), 1, "the session is open");
        let before = words(&region.bytes());
        let (many, back) = (bytes_of(&[1; 512]), if kind == Base { 0 } else { 4096 });
        let call = Call::sum(kind, &many, RmaList::one(0, 512, region.key));
        pair.atomic(Call { flags: OpFlags::REMOTE_CQ_DATA, ..call }, back).unwrap();
        let now = pair.now;
        let End { node, out, ep, .. } = &mut pair.ends[0];
        node.transmit(now, &mut sink(out));
        assert_eq!(out.len(), 3, "packets");
        out.remove(lost);
        node.ep_close(now, *ep).unwrap();
        pair.run(900_000_000);
        assert_eq!(pair.read(1), [], "{kind:?} without packet {lost} was told");
        let now = words(&region.bytes());
        let added: Vec<u64> = now.iter().zip(&before).map(|(n, b)| n.wrapping_sub(*b)).collect();
        let done = added.iter().take_while(|by| **by == 1).count();
        assert!(added[done..].iter().all(|by| *by == 0), "{kind:?} without packet {lost}");
        assert_eq!(done > 0, lost > 0);
        assert_eq!(pair.ends[0].node.statistics().levels().sent, 0);
    }
}

/// A pair whose session is open and whose operations take the fast path, and a region of the
/// second.
pub(super) fn short_pair() -> (Pair, Region) {
    let mut pair = Pair::new(1500, true);
    let region = pair.region(1, 64, ALL);
    let zero = [0; 8];
    pair.atomic(Call::sum(Base, &zero, RmaList::one(0, 1, region.key)), 0).unwrap();
    pair.run(1_000_000);
    assert_eq!(pair.outcomes(0), [(1, None)]);
    pair.short = Some(0);
    (pair, region)
}

/// Posts fetch-and-adds with the contexts `0..n`, each of which leaves at once.
pub(super) fn fetch_adds(pair: &mut Pair, region: &Region, n: u64) {
    let one = bytes_of(&[1]);
    let (before, frames) = (pair.short, pair.ends[0].out.len());
    for context in 0..n {
        let call = Call { context, ..Call::sum(Fetch, &one, RmaList::one(0, 1, region.key)) };
        pair.atomic(call, 8).unwrap();
    }
    assert_eq!(pair.short, before.map(|taken| taken + n as usize));
    assert_eq!(pair.ends[0].out.len(), frames + n as usize);
}

/// Goal: ones in a header, where a target keeps that it knows no operation, are none that it knows.
#[test]
fn a_header_like_no_operation_is_refused() {
    let (mut pair, region) = short_pair();
    fetch_adds(&mut pair, &region, 1);
    let mut frame = pair.ends[0].out.pop_front().unwrap();
    // Length, endpoint, flags and context, key and address, count with operation and type.
    let cleared = [30..32, 40..56, 64..68];
    cleared.into_iter().for_each(|range| frame[range].fill(0));
    [40..42, 44..46].into_iter().for_each(|range| frame[range].fill(0xff));
    let target = &mut pair.ends[1].node;
    target.target.revoke_grants();
    let before = target.counters().rma_executed;
    target.on_frame(pair.now, &RxFrame::new(&frame[..72]));
    assert_eq!(target.counters().rma_executed, before);
}

/// What is behind a fence stays here until the answers to what is before it have come, though that
/// stands in no list.
#[test]
fn a_fence_waits_for_the_short_way() {
    let (mut pair, region) = short_pair();
    fetch_adds(&mut pair, &region, 2);
    pair.short = None;
    let one = bytes_of(&[1]);
    let call = Call::sum(Fetch, &one, RmaList::one(0, 1, region.key));
    pair.atomic(Call { context: 2, flags: OpFlags::FENCE, ..call }, 8).unwrap();
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    assert_eq!(out.len(), 2, "it overtook the answers");
    pair.run(2_000_000);
    assert_eq!(pair.outcomes(0), [(0, None), (1, None), (2, None)]);
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// The last answer that a fence waits for wakes it, though it acknowledges nothing that the first
/// had not.
#[test]
fn the_last_answer_wakes_a_fence() {
    let (mut pair, region) = short_pair();
    fetch_adds(&mut pair, &region, 2);
    pair.short = None;
    let one = bytes_of(&[1]);
    let call = Call::sum(Fetch, &one, RmaList::one(0, 1, region.key));
    pair.atomic(Call { context: 2, flags: OpFlags::FENCE, ..call }, 8).unwrap();
    let [first, second] = &mut pair.ends;
    for bytes in first.out.drain(..) {
        second.node.on_frame(pair.now, &RxFrame::new(&bytes));
    }
    second.node.transmit(pair.now, &mut sink(&mut second.out));
    assert_eq!(second.out.len(), 2);
    for (came, bytes) in second.out.drain(..).enumerate() {
        assert!(first.out.is_empty(), "it overtook an answer");
        first.node.on_frame(pair.now, &RxFrame::new(&bytes));
        first.node.transmit(pair.now, &mut sink(&mut first.out));
        assert_eq!(first.out.len(), came);
    }
    pair.run(2_000_000);
    assert_eq!(pair.outcomes(0), [(0, None), (1, None), (2, None)]);
}

/// Operations of the fast path end with their peer, in the order of their posting and within the
/// time that was promised, though nothing of them is kept to be repeated.
#[test]
fn a_dead_peer_ends_the_short_way() {
    let (mut pair, region) = short_pair();
    pair.drop = 1;
    fetch_adds(&mut pair, &region, 5);
    pair.run(560_000_000);
    let lost = Some(Error::HostUnreach);
    assert_eq!(pair.outcomes(0), [0, 1, 2, 3, 4].map(|context| (context, lost)));
    assert_eq!(pair.ends[0].node.statistics().levels().tx, 0);
}

/// Answers to what nobody asked, whatever they name, take nothing from those that are awaited, nor
/// the peer's duty to give them.
#[test]
fn answers_to_nothing_are_not_counted() {
    for dies in [false, true] {
        let (mut pair, region) = short_pair();
        fetch_adds(&mut pair, &region, 3);
        for name in [0, 5, 1 << 31, 1 << 31 | 70, u32::MAX] {
            for _ in 0..20 {
                lie(&mut pair, RespOp { dst_op: name, dst_gen: 7777, ..RespOp::default() }, 0);
            }
        }
        // The slot of one that is awaited, which is not its name.
        let first = FastOpIdx::of(0);
        let Handle { idx, generation: dst_gen } = pair.ends[0].node.fast_ops.handle(first);
        let dst_op = idx.get();
        lie(&mut pair, RespOp { dst_op, dst_gen, ..RespOp::default() }, 0);
        assert_eq!(pair.ends[0].node.counters().rx_stray, 101);
        let (_, peer) = pair.ends[0].node.peers.iter().next().unwrap();
        assert_eq!((peer.answers, peer.fast_ops()), (3, 3));
        pair.drop = dies.into();
        pair.run(560_000_000);
        let outcome = dies.then_some(Error::HostUnreach);
        assert_eq!(pair.outcomes(0), [0, 1, 2].map(|context| (context, outcome)));
    }
}

/// Goal: so many fetches are under way at once as a target keeps old values for, and no more, on
/// the fast path and the slow one; the others follow.
#[test]
fn fetches_under_way_are_bounded() {
    for short in [None, Some(0)] {
        let (mut pair, region) = short_pair();
        pair.short = short;
        let one = bytes_of(&[1]);
        for context in 0..80 {
            let call = Call { context, ..Call::sum(Fetch, &one, RmaList::one(0, 1, region.key)) };
            pair.atomic(call, 8).unwrap();
        }
        for _ in 0..5 {
            let End { node, out, .. } = &mut pair.ends[0];
            node.transmit(pair.now, &mut sink(out));
        }
        assert_eq!(pair.ends[0].out.len(), ANSWERS_MAX, "{short:?}");
        pair.run(2_000_000);
        assert_eq!(pair.outcomes(0).len(), 80, "{short:?}");
    }
}

/// A peer that acknowledged everything still owes the answers: its death ends what waits for them.
#[test]
fn the_death_of_a_peer_ends_acknowledged_operations_without_a_response() {
    let (mut pair, region) = short_pair();
    fetch_adds(&mut pair, &region, 3);
    pair.drop = 1;
    lie(&mut pair, RespOp::default(), 3);
    let (_, peer) = pair.ends[0].node.peers.iter().next().unwrap();
    assert_eq!((peer.snd.in_flight(), peer.fast_ops()), (0, 3));
    pair.run(560_000_000);
    let lost = Some(Error::HostUnreach);
    assert_eq!(pair.outcomes(0), [0, 1, 2].map(|context| (context, lost)));
}

/// An answer of another length than was asked for ends its operation with an error, and is not
/// taken for one.
#[test]
fn an_answer_of_another_length_is_a_lie() {
    let (mut pair, region) = short_pair();
    let call = Call::sum(Fetch, &[1; 4], RmaList::one(0, 1, region.key));
    let ty = Datatype::Uint32 as u32;
    let look = pair.atomic(Call { ty, context: 9, ..call }, 4).unwrap();
    assert_eq!(pair.short, Some(1));
    let first = FastOpIdx::of(0);
    let Handle { idx, generation: dst_gen } = pair.ends[0].node.fast_ops.handle(first);
    let dst_op = idx.get() | 1 << 31;
    lie(&mut pair, RespOp { dst_op, dst_gen, ..RespOp::default() }, 0);
    assert_eq!(pair.only_error(9).err, Error::ConnReset);
    assert_eq!(contents(&look), [0xEE; 4]);
}

/// What an endpoint remembers of its last operation lets no other through: of another count, with
/// memory of another length, or with a result that overlaps its operand (row S11).
#[test]
fn a_cached_operation_admits_no_other_one() {
    let (mut pair, region) = short_pair();
    fetch_adds(&mut pair, &region, 1);
    pair.run(2_000_000);
    assert_eq!(pair.outcomes(0), [(0, None)]);
    let frames = pair.ends[0].node.counters().tx_frames;
    let (one, two) = (bytes_of(&[1]), bytes_of(&[1, 1]));
    let differ = Error::Invalid("element counts differ");
    for (operand, count, len) in [(&one, 2, 8), (&one, 1, 16), (&two, 1, 8)] {
        let call = Call::sum(Fetch, operand, RmaList::one(0, count, region.key));
        assert_eq!(pair.atomic(call, len).unwrap_err(), differ);
    }
    let (operand, result) = IoBuf::leaked_pair(&one);
    let End { node, ep, peer: dest, out, .. } = &mut pair.ends[0];
    let mut req = AtomicReq {
        kind: Fetch,
        op: SUM,
        ty: U64,
        operand,
        compare: IoBuf::EMPTY,
        result,
        dest: *dest,
        rma: RmaList::one(0, 1, region.key),
        data: 0,
        context: 1,
        flags: OpFlags::empty(),
        no_completion: false,
    };
    assert!(!node.try_atomic(*ep, &mut req.fast().unwrap(), &mut sink(out), || pair.now));
    assert!(matches!(node.posting().post_atomic(pair.now, *ep, req), Err(Error::Invalid(_))));
    assert_eq!(node.counters().tx_frames, frames);
}

/// The second end answers, with 8 bytes, what the first has not asked, and acknowledges `more`
/// packets than it has taken.
pub(super) fn lie(pair: &mut Pair, resp: RespOp, more: u32) {
    let [to, from] = &mut pair.ends;
    let idx = from.node.peers.iter().next().map(|(idx, _)| idx).unwrap();
    let peer = &mut from.node.peers[idx];
    let base = WireBase {
        dst: to.node.port.station,
        src: from.node.port.station,
        ty: Ty::Resp,
        ar: false,
        rtx: false,
        ce: false,
        crc: to.node.port.far.has_crc(),
        dst_sid: peer.remote_sid,
        psn: peer.snd.number(),
        cack: Psn(peer.rcv_nxt.0.wrapping_add(more)),
        grant: peer.granted as u16,
        plen: 0,
    };
    let bytes = wire::frame(&base, &Op::Resp(resp), &[0; 8]);
    to.node.on_frame(pair.now, &RxFrame::new(&bytes));
}

/// AF5, AF6: remote CQ data tells the target; a tagged atomic changes the receive that its tag
/// matches, and leaves it posted.
#[test]
fn tagged_atomics_change_a_posted_receive() {
    for lossless in [true, false] {
        let mut pair = Pair::new(1500, lossless);
        let (buf, look) = shared(32);
        let word = bytes_of(&[5]);
        let flags = OpFlags::TAGGED | OpFlags::REMOTE_CQ_DATA;
        let call = |kind, addr| Call { flags, ..Call::sum(kind, &word, RmaList::one(addr, 1, 77)) };
        pair.atomic(call(Base, 8), 0).unwrap();
        pair.run(2_000_000);
        assert_eq!(pair.only_error(1).err, Error::NoMsg);
        pair.recv(1, buf, 77, OpFlags::empty(), 3).unwrap();
        let old = pair.atomic(call(Fetch, 8), 8).unwrap();
        pair.atomic(call(Base, 8), 0).unwrap();
        pair.atomic(call(Base, 32), 0).unwrap();
        pair.run(2_000_000);
        let mut outcomes = pair.outcomes(0);
        outcomes.sort_by_key(|o| o.1.is_some());
        assert_eq!(outcomes, [(1, None), (1, None), (1, Some(Error::Access))]);
        let told = pair.read(1);
        let flags = CqFlags::ATOMIC | CqFlags::REMOTE_CQ_DATA;
        assert_eq!(told.len(), 2);
        assert_eq!((told[0].flags, told[0].data), (flags | CqFlags::REMOTE_READ, 4711));
        assert_eq!((told[1].flags, told[1].data), (flags | CqFlags::REMOTE_WRITE, 4711));
        let base = u64::from_le_bytes([0xEE; 8]);
        assert_eq!(words(&contents(&old)), [base]);
        assert_eq!(words(&contents(&look)), [base, base + 10, base, base]);
        pair.send(0, IoBuf::leaked(&[7; 32]), 77, OpFlags::empty(), 2).unwrap();
        pair.run(2_000_000);
        assert_eq!(pair.read(1)[0].op_context, 3);
        assert_eq!(contents(&look), [7; 32]);
        pair.read(0);
        pair.run(600_000_000);
        pair.assert_quiet();
    }
}

/// The orders that are told hold (X64): of operations posted one behind the other, a fetch sees the
/// write and the atomics before it and none behind it, and a read the writes and atomics before it.
#[test]
fn operations_are_executed_in_the_order_of_posting() {
    for (lossless, drop) in [(true, 0), (false, 0), (false, 5)] {
        for mtu in [256, 1500] {
            let mut pair = Pair::new(mtu, lossless);
            (pair.drop, pair.scatter) = (drop, true);
            let region = pair.region(1, 4096, ALL);
            let word = RmaList::one(8, 1, region.key);
            let bytes = RmaList::one(8, 8, region.key);
            let mut looks = Vec::new();
            for i in 0..5_u64 {
                let (first, added) = (1000 * i, 1000 * i + 7);
                // WAW, RAW: a write and the fetch behind it.
                let long = [first.to_le_bytes().to_vec(), vec![0; 500]].concat();
                let list = RmaList::one(8, long.len() as u64, region.key);
                pair.write(&long, list, OpFlags::empty(), 1).unwrap();
                let (seven, one) = (7_u64.to_le_bytes(), 1_u64.to_le_bytes());
                let call = Call::sum(Fetch, &seven, word);
                looks.push((pair.atomic(call, 8).unwrap(), first));
                // ATOMIC_RAW, ATOMIC_WAW: an update, and a fetch that replaces what it left.
                pair.atomic(Call::sum(Base, &one, word), 0).unwrap();
                let call = Call::sum(Fetch, &one, word);
                looks.push((pair.atomic(call, 8).unwrap(), added + 1));
                // RAW of a read; nothing is posted behind it, since WAR is not told.
                let (buf, look) = shared(8);
                pair.read_to(buf, bytes, 1).unwrap();
                looks.push((look, added + 2));
                let posted = 5;
                let mut done = 0;
                while done < posted {
                    pair.run(1_000_000);
                    done += pair.read(0).len();
                }
            }
            for (i, (look, wanted)) in looks.iter().enumerate() {
                assert_eq!(words(&contents(look)), [*wanted], "{lossless} {drop} {mtu}: {i}");
            }
        }
    }
}
