//! fi_rma(3), fi_atomic(3) and fi_mr(3): every call once through the safe API, and its rules.

use barewire::atomic::{FI_COMPARE_ATOMIC, FI_FETCH_ATOMIC};
use barewire::flags::{Access, BindFlags, Caps, CqFlags, MrMode, OpFlags};
use barewire::*;

use crate::harness::*;

const SUM: TypedOp = TypedOp::new(AtomicOp::Sum, Datatype::Uint64);
const READ: TypedOp = TypedOp::new(AtomicOp::Read, Datatype::Uint64);
const CSWAP: TypedOp = TypedOp::new(AtomicOp::Cswap, Datatype::Uint64);

pub(crate) fn plan(mode: MrMode) -> Plan {
    let caps = usual_caps() | Caps::RMA | Caps::ATOMIC | Caps::RMA_EVENT;
    let mut hints = Info { caps, ..Info::default() };
    hints.domain_attr.mr_mode = mode;
    Plan { info: info(&hints), ..Plan::default() }
}

fn all(key: Option<u64>) -> MrAttr {
    let access = Access::all() - Access::COLLECTIVE;
    MrAttr { access, requested_key: key, ..MrAttr::default() }
}

/// A region of `len` zero bytes at B, and where A finds it.
pub(crate) fn region(pair: &Pair, len: usize) -> (Mr, Remote) {
    let mr = pair.b.domain.mr_reg(Buf::zeroed(len), &all(None)).unwrap();
    let to = Remote { dest: pair.a.peer, addr: 0, key: mr.key() };
    (mr, to)
}

pub(crate) fn bytes(mr: &Mr, offset: usize, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    mr.load(offset, &mut out).unwrap();
    out
}

/// The buffer that a completion gives back.
pub(crate) fn whole(done: Completion) -> Vec<u8> {
    done.bufs.into_one().unwrap().to_vec()
}

fn word(mr: &Mr, at: usize) -> u64 {
    u64::from_le_bytes(bytes(mr, at * 8, 8).try_into().unwrap())
}

/// X60: write, writev, writemsg, writedata, inject_write, inject_writedata, read, readv, readmsg;
/// X43: remote CQ data gives the target a completion with FI_RMA|FI_REMOTE_WRITE|
/// FI_REMOTE_CQ_DATA.
#[test]
fn every_call_of_fi_rma_moves_its_bytes() {
    let pair = Pair::new(&plan(MrMode::empty()));
    let (a, p) = (&pair.a.ep, pattern(300_000, 1));
    let (mr, to) = region(&pair, 400_000);
    let at = |addr| Remote { addr, ..to };
    a.write(Buf::from(&p[..]), at(7), 1).unwrap();
    let done = pair.at_a();
    assert_eq!((done.op_context, done.flags), (1, CqFlags::RMA | CqFlags::WRITE));
    assert!(whole(done) == p, "the buffer comes back");
    assert!(bytes(&mr, 7, p.len()) == p);
    a.writev(vec![Buf::from(&p[..10]), Buf::from(&p[10..50])], at(1), 2).unwrap();
    assert_eq!(pair.at_a().op_context, 2);
    assert_eq!(bytes(&mr, 1, 50), p[..50]);
    let range = |addr, len| RmaIov { addr, len, key: to.key };
    let rma_iov = vec![range(100, 20), range(200, 30)];
    let msg = RmaMsg { bufs: buf(50, 3).into(), addr: to.dest, rma_iov, context: 3, data: 33 };
    a.writemsg(msg, OpFlags::REMOTE_CQ_DATA | OpFlags::DELIVERY_COMPLETE).unwrap();
    assert_eq!(pair.at_a().op_context, 3);
    assert_eq!([bytes(&mr, 100, 20), bytes(&mr, 200, 30)].concat(), pattern(50, 3));
    a.writedata(buf(5, 4), 44, at(300), 4).unwrap();
    assert_eq!(pair.at_a().op_context, 4);
    a.inject_writedata(&pattern(6, 5), 55, at(400)).unwrap();
    a.inject_write(&pattern(7, 6), at(500)).unwrap();
    for (data, len) in [(33, 50), (44, 5), (55, 6)] {
        let told = pair.at_b();
        let flags = CqFlags::RMA | CqFlags::REMOTE_WRITE | CqFlags::REMOTE_CQ_DATA;
        assert_eq!((told.flags, told.data, told.len, told.op_context), (flags, data, len, 0));
    }
    pair.settle();
    assert_eq!(bytes(&mr, 400, 6), pattern(6, 5));
    assert_eq!(bytes(&mr, 500, 7), pattern(7, 6));
    a.read(Buf::zeroed(300), at(400), 7).unwrap();
    let done = pair.at_a();
    assert_eq!((done.op_context, done.flags), (7, CqFlags::RMA | CqFlags::READ));
    assert_eq!(whole(done), bytes(&mr, 400, 300));
    a.readv(vec![Buf::zeroed(3), Buf::zeroed(200_000)], at(1000), 8).unwrap();
    let got = pair.at_a().bufs.into_many().unwrap();
    assert!([&got[0][..], &got[1][..]].concat() == bytes(&mr, 1000, 200_003));
    let rma_iov = vec![range(200, 30), range(100, 20)];
    let bufs = Buf::zeroed(50).into();
    let msg = RmaMsg { bufs, addr: to.dest, rma_iov, context: 9, data: 0 };
    a.readmsg(msg, PLAIN).unwrap();
    assert_eq!(whole(pair.at_a()), [bytes(&mr, 200, 30), bytes(&mr, 100, 20)].concat());
    assert_eq!(mr.close().len(), 1);
    pair.all_is_back();
}

/// X67: `FI_MR_SINGLE_USE`: the key is of one operation, which may be long and of several ranges of
/// the region, and is then unknown, as that of a closed region.
#[test]
fn x67_a_region_for_one_operation() {
    let pair = Pair::new(&plan(MrMode::empty()));
    let a = &pair.a.ep;
    let attr = MrAttr { single_use: true, ..all(None) };
    let once = || {
        let mr = pair.b.domain.mr_reg(Buf::zeroed(200_000), &attr).unwrap();
        let to = Remote { dest: pair.a.peer, addr: 0, key: mr.key() };
        (mr, to)
    };
    let refused = |to| {
        a.write(buf(8, 5), to, 1).unwrap();
        assert_eq!(pair.error_at_a().err, Error::KeyRejected);
        a.read(Buf::zeroed(8), to, 1).unwrap();
        assert_eq!(pair.error_at_a().err, Error::KeyRejected);
        a.fetch_atomic(SUM, &[1; 8], Buf::zeroed(8), to, 1).unwrap();
        assert_eq!(pair.error_at_a().err, Error::KeyRejected);
    };
    for len in [8, 200_000] {
        let (mr, to) = once();
        a.write(buf(len, 3), Remote { addr: 200_000 - len as u64 + 1, ..to }, 1).unwrap();
        assert_eq!(pair.error_at_a().err, Error::Access, "refused, and so not its use");
        a.write(buf(len, 3), to, 1).unwrap();
        pair.at_a();
        refused(to);
        assert!(bytes(&mr, 0, len) == pattern(len, 3));
        let (_mr, to) = once();
        a.read(Buf::zeroed(len), to, 1).unwrap();
        pair.at_a();
        refused(to);
    }
    for len in [8, 4_000] {
        let (mr, to) = once();
        a.fetch_atomic(SUM, &vec![1; len], Buf::zeroed(len), to, 1).unwrap();
        pair.at_a();
        refused(to);
        assert_eq!(bytes(&mr, 0, len), vec![1; len]);
    }
    let (mr, to) = once();
    let range = |addr, len| RmaIov { addr, len, key: to.key };
    let rma_iov = vec![range(0, 30_000), range(50_000, 100)];
    let bufs = buf(30_100, 3).into();
    a.writemsg(RmaMsg { bufs, addr: to.dest, rma_iov, context: 1, data: 0 }, PLAIN).unwrap();
    pair.at_a();
    refused(to);
    assert_eq!(bytes(&mr, 50_000, 100), pattern(30_100, 3)[30_000..]);
    // Of several that are under way at once the first one has it.
    let (mr, to) = once();
    for seed in 0..3 {
        a.write(buf(60_000, seed), to, seed).unwrap();
    }
    assert_eq!(pair.at_a().op_context, 0);
    for seed in 1..3 {
        let e = pair.error_at_a();
        assert_eq!((e.err, e.entry.op_context), (Error::KeyRejected, seed));
    }
    assert!(bytes(&mr, 0, 60_000) == pattern(60_000, 0));
}

/// X38, X63, fi_mr(3): a region's counter of writes hears of every atomic that may change it, one
/// of reads of what fetches, and one of both of each access once; before and after the first of a
/// kind.
#[test]
fn x38_what_the_counters_of_a_region_count() {
    let pair = Pair::new(&plan(MrMode::empty()));
    let open = || pair.b.domain.cntr_open(CntrAttr::default()).unwrap();
    let ((apart, to_apart), (both, to_both)) = (region(&pair, 64), region(&pair, 64));
    let (writes, reads, all) = (open(), open(), open());
    apart.bind_cntr(&writes, BindFlags::REMOTE_WRITE).unwrap();
    apart.bind_cntr(&reads, BindFlags::REMOTE_READ).unwrap();
    both.bind_cntr(&all, BindFlags::REMOTE_WRITE | BindFlags::REMOTE_READ).unwrap();
    let a = &pair.a.ep;
    let eight = || Buf::zeroed(8);
    for round in 1..=3 {
        for to in [to_apart, to_both] {
            a.write(eight(), to, 1).unwrap();
            a.read(eight(), to, 2).unwrap();
            a.atomic(SUM, &[1; 8], to, 3).unwrap();
            a.fetch_atomic(SUM, &[1; 8], eight(), to, 4).unwrap();
            a.fetch_atomic(READ, &[], eight(), to, 5).unwrap();
            a.compare_atomic(CSWAP, &[1; 8], &[2; 8], eight(), to, 6).unwrap();
            (0..6).for_each(|_| drop(pair.at_a()));
        }
        let counted = [&writes, &reads, &all].map(|cntr| cntr.read().unwrap());
        assert_eq!(counted, [4 * round, 4 * round, 6 * round]);
    }
}

/// A1 to A14: the fourteen calls of fi_atomic; AR11: injecting, and what it refuses; AR14: their
/// completion flags; AR5: an atomic read has no operand; AR13: counters of both sides.
#[test]
fn every_call_of_fi_atomic_does_its_work() {
    let pair = Pair::new(&plan(MrMode::empty()));
    let (mr, to) = region(&pair, 4096);
    let cntr = pair.b.domain.cntr_open(CntrAttr::default()).unwrap();
    mr.bind_cntr(&cntr, BindFlags::REMOTE_WRITE).unwrap();
    let a = &pair.a.ep;
    let at = |word: u64| Remote { addr: word * 8, ..to };
    let (one, two) = (1_u64.to_le_bytes(), 2_u64.to_le_bytes());
    a.atomic(SUM, &one, at(0), 1).unwrap();
    let done = pair.at_a();
    assert_eq!((done.op_context, done.flags), (1, CqFlags::ATOMIC | CqFlags::WRITE));
    a.atomicv(SUM, &[&one, &two], at(1), 2).unwrap();
    assert_eq!(pair.at_a().op_context, 2);
    let ranges =
        || vec![RmaIov { addr: 0, len: 1, key: to.key }, RmaIov { addr: 24, len: 1, key: to.key }];
    let operands: [&[u8]; 1] = [&[one, two].concat()];
    let msg = |context| AtomicMsg {
        operands: &operands,
        addr: to.dest,
        rma_iov: ranges(),
        op: SUM,
        context,
        data: 77,
    };
    a.atomicmsg(msg(3), OpFlags::REMOTE_CQ_DATA).unwrap();
    assert_eq!(pair.at_a().op_context, 3);
    let told = pair.at_b();
    let flags = CqFlags::ATOMIC | CqFlags::REMOTE_WRITE | CqFlags::REMOTE_CQ_DATA;
    assert_eq!((told.flags, told.data), (flags, 77));
    a.inject_atomic(SUM, &one, at(0)).unwrap();
    pair.settle();
    assert_eq!([0, 1, 2, 3].map(|at| word(&mr, at)), [3, 1, 2, 2]);
    assert_eq!(cntr.read().unwrap(), 5);
    a.fetch_atomic(SUM, &one, Buf::zeroed(8), at(0), 4).unwrap();
    let done = pair.at_a();
    assert_eq!(done.flags, CqFlags::ATOMIC | CqFlags::READ);
    assert_eq!(whole(done), 3_u64.to_le_bytes());
    a.fetch_atomicv(SUM, &[&one, &two], vec![Buf::zeroed(4), Buf::zeroed(12)], at(0), 5).unwrap();
    let old = pair.at_a().bufs.into_many().unwrap();
    assert_eq!([&old[0][..], &old[1][..]].concat(), [4_u64, 1].map(u64::to_le_bytes).concat());
    a.fetch_atomicmsg(msg(6), Buf::zeroed(16), PLAIN).unwrap();
    assert_eq!(whole(pair.at_a()), [5_u64, 2].map(u64::to_le_bytes).concat());
    a.fetch_atomic(READ, &[], Buf::zeroed(32), at(0), 7).unwrap();
    assert_eq!(whole(pair.at_a()), [6_u64, 3, 2, 4].map(u64::to_le_bytes).concat());
    let six = 6_u64.to_le_bytes();
    a.compare_atomic(CSWAP, &two, &six, Buf::zeroed(8), at(0), 8).unwrap();
    assert_eq!(whole(pair.at_a()), six);
    let (operands, compares): ([&[u8]; 2], [&[u8]; 2]) =
        ([&one, &one], [&six, &[3, 0, 0, 0, 0, 0, 0, 0]]);
    a.compare_atomicv(CSWAP, &operands, &compares, vec![Buf::zeroed(16)], at(0), 9).unwrap();
    assert_eq!(pair.at_a().op_context, 9);
    assert_eq!([0, 1].map(|at| word(&mr, at)), [2, 1], "one differs, one is swapped");
    let msg = AtomicMsg { op: CSWAP, ..msg(10) };
    a.compare_atomicmsg(msg, &[&two, &one], Buf::zeroed(16), PLAIN).unwrap();
    assert_eq!(whole(pair.at_a()), [2_u64, 4].map(u64::to_le_bytes).concat());
    assert_eq!([0, 3].map(|at| word(&mr, at)), [1, 4]);
    drop(mr);
    pair.all_is_back();
}

/// A11 to A14: valid and query give one answer; the options tell the lengths.
#[test]
fn limits_of_one_sided_calls_are_told() {
    let pair = Pair::new(&plan(MrMode::empty()));
    let a = &pair.a.ep;
    for (valid, flags) in [
        (a.atomicvalid(SUM), 0),
        (a.fetch_atomicvalid(READ), FI_FETCH_ATOMIC),
        (a.compare_atomicvalid(CSWAP), FI_COMPARE_ATOMIC),
    ] {
        let what = [SUM, READ, CSWAP][(flags / FI_FETCH_ATOMIC) as usize];
        let attr = pair.a.domain.query_atomic(what, flags).unwrap();
        assert_eq!((valid, attr.size), (Ok(attr.count), 8));
        assert!(attr.count * attr.size >= 4096);
    }
    let both = pair.a.domain.query_atomic(SUM, FI_FETCH_ATOMIC | FI_COMPARE_ATOMIC);
    assert!(matches!(both, Err(Error::BadFlags)));
    let unknown = pair.a.domain.query_atomic(SUM, 1 << 62);
    assert!(matches!(unknown, Err(Error::BadFlags)));
    assert!(matches!(a.atomicvalid(CSWAP), Err(Error::OpNotSupp(_))));
    let sizes = [14, 15, 18, 19].map(|option| a.getopt(option).unwrap());
    assert_eq!(sizes, [1 << 40, 4096, 256, 256], "lengths that the options tell");
}

/// X61 and X62: addresses from 0 and virtual ones, the application's keys and ours; a region of
/// another endpoint, and one that is closed.
#[test]
fn regions_follow_the_mode_that_was_asked_for() {
    let every = MrMode::LOCAL | MrMode::ALLOCATED | MrMode::RAW | MrMode::ENDPOINT;
    let every = every | MrMode::VIRT_ADDR | MrMode::PROV_KEY;
    let modes = [MrMode::empty(), MrMode::VIRT_ADDR, MrMode::PROV_KEY, MrMode::BASIC];
    for mode in modes.into_iter().chain([MrMode::LOCAL, MrMode::ALLOCATED, MrMode::RAW, every]) {
        let plan = plan(mode);
        assert_eq!(plan.info.domain_attr.mr_mode, mode);
        let pair = Pair::new(&plan);
        let memory = Buf::zeroed(64);
        let start = memory.as_ptr() as u64;
        let mr = pair.b.domain.mr_reg(memory, &all(Some(5))).unwrap();
        assert_eq!(mr.key() == 5, !mode.intersects(MrMode::PROV_KEY | MrMode::BASIC));
        let virt = mode.intersects(MrMode::VIRT_ADDR | MrMode::BASIC);
        let base = if virt { start } else { 0 };
        // What a peer makes of the raw name is the key.
        let (raw_base, raw_key) = mr.raw_attr();
        assert_eq!(raw_base, base);
        let key = pair.a.domain.mr_map_raw(raw_base, &raw_key).unwrap();
        assert_eq!(key, mr.key());
        assert!(pair.a.domain.mr_map_raw(raw_base, &raw_key[..7]).is_err());
        let to = Remote { dest: pair.a.peer, addr: base + 8, key };
        pair.a.ep.write(buf(8, 1), to, 1).unwrap();
        pair.at_a();
        assert_eq!(bytes(&mr, 8, 8), pattern(8, 1));
        let other = pair.b.domain.endpoint(&plan.info).unwrap();
        mr.bind_ep(&other).unwrap();
        pair.a.ep.write(buf(8, 2), to, 2).unwrap();
        assert_eq!(pair.error_at_a().err, Error::Access);
        mr.bind_ep(&pair.b.ep).unwrap();
        let back = mr.close();
        assert_eq!(back[0][8..16], pattern(8, 1)[..]);
        pair.a.ep.write(buf(8, 3), to, 3).unwrap();
        let err = pair.error_at_a();
        assert_eq!((err.err, err.entry.op_context), (Error::KeyRejected, 3));
        pair.a.ep.inject_atomic(SUM, &[0; 8], to).unwrap();
        assert_eq!(pair.error_at_a().err, Error::KeyRejected);
        drop(other);
        pair.all_is_back();
    }
}

/// One-sided really: with auto progress at the target its application sleeps, and everything is
/// executed all the same.
#[test]
fn a_sleeping_target_executes() {
    let mut passive = plan(MrMode::empty());
    passive.info.domain_attr.data_progress = Progress::Auto;
    let pair = Pair::with(&plan(MrMode::empty()), &passive, ports(2));
    let (mr, to) = region(&pair, 65536);
    let a = &pair.a;
    let done = |context| {
        let got = until("a completion at A", || a.read_or_yield());
        assert_eq!(got.op_context, context);
        got
    };
    for i in 0..100 {
        a.ep.write(buf(5000, i), to, i).unwrap();
        done(i);
        a.ep.fetch_atomic(
            SUM,
            &1_u64.to_le_bytes(),
            Buf::zeroed(8),
            Remote { addr: 8000, ..to },
            i,
        )
        .unwrap();
        assert_eq!(whole(done(i)), i.to_le_bytes());
        a.ep.read(Buf::zeroed(5000), to, i).unwrap();
        assert!(whole(done(i)) == pattern(5000, i));
    }
    drop(mr);
}
