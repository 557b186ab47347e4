//! One-sided operations between two nodes.

use super::*;
use crate::flags::MrAccess;
use crate::proto::atomic::Sharing;
use crate::types::ProvErrno;

pub(super) const ALL: MrAccess = MrAccess::all();

/// A region of `len` bytes in the middle of `len + 2 * GUARD`, and a look at all of it.
const GUARD: usize = 64;

pub(super) struct Region {
    pub(super) id: MrId,
    pub(super) key: u64,
    look: IoBuf,
    len: usize,
}

impl Region {
    pub(super) fn bytes(&self) -> Vec<u8> {
        contents(&self.look)[GUARD..GUARD + self.len].to_vec()
    }

    /// A part of the region's memory, for an operation of its owner.
    pub(super) fn part(&self, offset: usize, len: usize) -> IoBuf {
        assert!(offset + len <= self.len);
        self.look.share(GUARD + offset, len)
    }

    /// Nothing around the region was touched.
    pub(super) fn assert_guards(&self) {
        let all = contents(&self.look);
        let (before, rest) = all.split_at(GUARD);
        let around = before.iter().chain(&rest[self.len..]);
        assert!(around.into_iter().all(|&b| b == 0xEE), "written outside of the region");
    }

    /// Nothing at all was touched.
    pub(super) fn assert_untouched(&self) {
        assert!(contents(&self.look).iter().all(|&b| b == 0xEE));
    }
}

/// A region of which nothing special is asked.
fn plain(buf: IoBuf, access: MrAccess) -> MrReq {
    let (requested_key, virt_addr, ep, sharing) = (None, false, None, Sharing::Single);
    MrReq { buf, access, requested_key, virt_addr, ep, sharing }
}

impl Pair {
    pub(super) fn region(&mut self, i: usize, len: usize, access: MrAccess) -> Region {
        self.region_of(i, len, |buf| plain(buf, access))
    }

    pub(super) fn region_of(
        &mut self,
        i: usize,
        len: usize,
        req: impl FnOnce(IoBuf) -> MrReq,
    ) -> Region {
        let (whole, look) = shared(len + 2 * GUARD);
        let node = &mut self.ends[i].node;
        let id = node.responder().mr_reg(req(whole.piece(GUARD, len))).unwrap();
        Region { id, key: node.mrs.key(id).unwrap(), look, len }
    }

    pub(super) fn write(
        &mut self,
        data: &[u8],
        rma: RmaList,
        flags: OpFlags,
        context: u64,
    ) -> Result<()> {
        let end = &mut self.ends[0];
        let (buf, dest, no_completion) = (IoBuf::leaked(data), end.peer, false);
        let req = WriteReq { buf, dest, rma, data: 4711, context, flags, no_completion };
        if let Some(taken) = &mut self.short
            && let Some(mut short) = req.fast()
            && end.node.try_write(end.ep, &mut short, &mut sink(&mut end.out), || self.now)
        {
            *taken += 1;
            return Ok(());
        }
        end.node.posting().post_write(self.now, end.ep, req)
    }

    pub(super) fn read_to(&mut self, buf: IoBuf, rma: RmaList, context: u64) -> Result<()> {
        let end = &mut self.ends[0];
        let (dest, flags) = (end.peer, OpFlags::empty());
        let mut req = ReadReq { buf, dest, rma, context, flags };
        if let Some(taken) = &mut self.short
            && let Some(mut short) = req.fast()
            && end.node.try_read(end.ep, &mut short, &mut sink(&mut end.out), || self.now)
        {
            *taken += 1;
            return Ok(());
        }
        end.node.posting().post_read(self.now, end.ep, req)
    }

    /// Everything in the queue: contexts, and errors if there are.
    pub(super) fn outcomes(&mut self, i: usize) -> Vec<(u64, Option<Error>)> {
        let mut all = Vec::new();
        while self.ends[i].node.cqs.ready(self.ends[i].cq).unwrap() > 0 {
            let done = self.read(i);
            if done.is_empty() {
                let err = self.read_err(i);
                all.push((err.cqe.op_context, Some(err.err)));
            }
            all.extend(done.iter().map(|cqe| (cqe.op_context, None)));
        }
        all
    }

    /// The one outcome of what was posted last, an error.
    pub(super) fn only_error(&mut self, context: u64) -> CqErr {
        let err = self.read_err(0);
        assert_eq!(err.cqe.op_context, context);
        assert_eq!(self.ends[0].node.cqs.ready(self.ends[0].cq), Ok(0), "a second outcome");
        err
    }
}

/// Whether frames get lost, and what [`Pair::short`] is to begin with.
const WAYS: [(bool, Option<usize>); 3] = [(true, None), (true, Some(0)), (false, None)];

const SIZES: [usize; 13] =
    [0, 1, 8, 64, 255, 1400, 1500, 4096, 9000, 65_535, 65_536, 262_145, 300_000];

/// Goal: bytes arrive where they belong, once, and nowhere else. Method: all size classes at
/// several MTUs, on a lossless wire and on one that loses every fifth and repeats every third
/// frame.
#[test]
fn writes_and_reads_of_every_size_class_move_their_bytes() {
    let none = (true, None, 0, 0);
    for (lossless, short, drop, dup) in
        [none, (true, Some(0), 0, 0), (false, None, 0, 0), (false, None, 5, 3)]
    {
        for mtu in [256, 1500, 9000, 65_535] {
            let mut pair = Pair::new(mtu, lossless);
            (pair.drop, pair.dup) = (drop, dup);
            // The first message opens the session, on the slow path.
            pair.short = short;
            for len in SIZES {
                let what = format!("lossless {lossless} mtu {mtu} len {len}");
                let region = pair.region(1, len + 7, ALL);
                let data = bytes(len);
                pair.write(&data, RmaList::one(7, len as u64, region.key), OpFlags::empty(), 1)
                    .unwrap();
                pair.run(if drop > 0 { 500_000_000 } else { 3_000_000 });
                let done = pair.read(0);
                assert_eq!(done.len(), 1, "{what}");
                assert_eq!(done[0].flags, CqFlags::RMA | CqFlags::WRITE, "{what}");
                assert_eq!(region.bytes()[7..], data, "{what}");
                assert_eq!(region.bytes()[..7], [0xEE; 7], "{what}");
                region.assert_guards();

                let (buf, look) = shared(len);
                pair.read_to(buf, RmaList::one(7, len as u64, region.key), 2).unwrap();
                pair.run(if drop > 0 { 500_000_000 } else { 3_000_000 });
                let done = pair.read(0);
                assert_eq!(done.len(), 1, "{what}");
                assert_eq!(done[0].flags, CqFlags::RMA | CqFlags::READ, "{what}");
                assert_eq!(contents(&look), data, "{what}");
                assert_eq!(pair.ends[1].node.cqs.ready(pair.ends[1].cq), Ok(0), "{what}");
                pair.ends[1].node.responder().mr_close(region.id).unwrap();
            }
            // All writes of one packet, and reads of one of up to 4096 bytes, but the empty ones.
            let fit = |head, max| {
                SIZES.iter().filter(|&&len| len > 0 && len + head <= mtu + 14 && len <= max).count()
            };
            // A port that holds no message of a credit in a frame has no fast path.
            let taken = if mtu == 256 { 0 } else { fit(64, usize::MAX) + fit(48, 4096) };
            assert_eq!(pair.short, short.map(|_| taken), "mtu {mtu}");
            pair.run(600_000_000);
            pair.assert_quiet();
        }
    }
}

/// A.0.2: what a peer may not do ends in one error entry of its own kind, and nothing is touched.
#[test]
fn protection_holds_for_writes_and_reads() {
    for (lossless, short) in WAYS {
        for len in [8_u64, 5000] {
            let mut pair = Pair::new(1500, lossless);
            pair.short = short;
            let region = pair.region(1, 4096, ALL);
            let readable = pair.region(1, 8192, MrAccess::REMOTE_READ);
            let writable = pair.region(1, 8192, MrAccess::REMOTE_WRITE);
            let other = pair.ends[1].node.eps.open(EpAttr::default()).unwrap();
            let req = |buf| MrReq { ep: Some(other), ..plain(buf, ALL) };
            let scoped = pair.region_of(1, 8192, req);
            let closed = pair.region(1, 8192, ALL);
            pair.ends[1].node.responder().mr_close(closed.id).unwrap();
            let virt = pair.region_of(1, 8192, |buf| MrReq { virt_addr: true, ..plain(buf, ALL) });
            let base = virt.look.addr_at(GUARD) as u64;
            let probes = [
                ("wrong key", region.key ^ 1 << 30, 0, Error::KeyRejected, true, true),
                ("closed", closed.key, 0, Error::KeyRejected, true, true),
                ("past the end", region.key, 4097 - len.min(4097), Error::Access, true, true),
                ("far past the end", region.key, 1 << 40, Error::Access, true, true),
                ("wraps", region.key, u64::MAX - len / 2, Error::Access, true, true),
                ("below", virt.key, base - 1, Error::Access, true, true),
                ("read-only", readable.key, 0, Error::Access, true, false),
                ("write-only", writable.key, 0, Error::Access, false, true),
                ("of another endpoint", scoped.key, 0, Error::Access, true, true),
            ];
            for (what, key, addr, err, write, read) in probes {
                let list = RmaList::one(addr, len, key);
                for flags in [OpFlags::empty(), OpFlags::INJECT_COMPLETE] {
                    if write {
                        pair.write(&bytes(len as usize), list, flags, 1).unwrap();
                        pair.run(2_000_000);
                        let got = pair.only_error(1);
                        assert_eq!((got.err, got.olen), (err, 0), "{what}");
                        assert_eq!(got.prov_errno, ProvErrno::NotExecuted, "{what}");
                    }
                }
                if read {
                    let (buf, look) = shared(len as usize);
                    pair.read_to(buf, list, 2).unwrap();
                    pair.run(2_000_000);
                    assert_eq!(pair.only_error(2).err, err, "{what}");
                    assert_eq!(contents(&look), vec![0xEE; len as usize], "{what}");
                }
            }
            for region in [&region, &readable, &writable, &scoped, &closed, &virt] {
                region.assert_untouched();
            }
            // The session and everything else go on.
            pair.write(b"12345678", RmaList::one(0, 8, region.key), OpFlags::empty(), 3).unwrap();
            pair.run(2_000_000);
            // All but the first and what is too long.
            let taken = if len == 8 { 24 } else { 1 };
            assert_eq!(pair.short, short.map(|_| taken));
            assert_eq!(pair.read(0)[0].op_context, 3);
            assert_eq!(region.bytes()[..8], *b"12345678");
            pair.run(600_000_000);
            pair.assert_quiet();
        }
    }
}

#[test]
fn lists_on_both_sides_are_split_differently() {
    for (lossless, short) in WAYS {
        let mut pair = Pair::new(1500, lossless);
        pair.short = short;
        let (a, b) = (pair.region(1, 5000, ALL), pair.region(1, 9000, ALL));
        let data = bytes(7000);
        let mut list = RmaList::default();
        for (key, addr, len) in
            [(a.key, 10, 3000), (b.key, 0, 0), (b.key, 100, 3500), (a.key, 4000, 500)]
        {
            assert!(list.push(RmaIov { addr, len, key }));
        }
        pair.write(&data, list, OpFlags::empty(), 1).unwrap();
        pair.run(3_000_000);
        assert_eq!(pair.read(0).len(), 1);
        assert_eq!(a.bytes()[10..3010], data[..3000]);
        assert_eq!(b.bytes()[100..3600], data[3000..6500]);
        assert_eq!(a.bytes()[4000..4500], data[6500..]);
        let (buf, look) = shared(7000);
        pair.read_to(buf, list, 2).unwrap();
        pair.run(3_000_000);
        assert_eq!(pair.read(0).len(), 1);
        assert_eq!(contents(&look), data);
        // A list whose second range is refused: one error, and what follows is not executed.
        let mut list = RmaList::default();
        for (key, addr, len) in [(b.key, 4000, 2000), (a.key, 4999, 2), (b.key, 6000, 2000)] {
            list.push(RmaIov { addr, len, key });
        }
        let flags = OpFlags::REMOTE_CQ_DATA;
        pair.write(&bytes(4002), list, flags, 3).unwrap();
        pair.run(3_000_000);
        let err = pair.only_error(3);
        assert_eq!((err.err, err.olen), (Error::Access, 2000));
        assert_eq!(err.prov_errno, ProvErrno::UnknownOutcome);
        assert_eq!(b.bytes()[6000..8000], [0xEE; 2000]);
        assert_eq!(pair.read(1), [], "remote CQ data of a failed write");
        pair.run(600_000_000);
        pair.assert_quiet();
    }
}

/// An endpoint of the second node, not yet enabled, with a queue of one entry. The first node sends
/// to it from now on.
fn end_told_in_a_small_queue(pair: &mut Pair) -> (EpId, CqId) {
    let end = &mut pair.ends[1];
    let cq = end.node.cqs.open(1).unwrap();
    let caps = Caps::RMA | Caps::RMA_EVENT | Caps::SOURCE;
    let ep = end.node.eps.open(EpAttr { caps, ..EpAttr::default() }).unwrap();
    end.node.objects().ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
    end.node.objects().ep_bind_av(ep, end.av).unwrap();
    let addr = end.node.addr_of(ep).unwrap();
    let from = &mut pair.ends[0];
    from.peer = from.node.sessions().av_insert(pair.now, from.av, addr).unwrap();
    (ep, cq)
}

fn write_with_data(pair: &mut Pair, region: &Region, data: u64) {
    let end = &mut pair.ends[0];
    let (buf, dest) = (IoBuf::leaked(&data.to_le_bytes()), end.peer);
    let (rma, flags) = (RmaList::one(8, 8, region.key), OpFlags::REMOTE_CQ_DATA);
    let req = WriteReq { buf, dest, rma, data, context: data, flags, no_completion: false };
    end.node.posting().post_write(pair.now, end.ep, req).unwrap();
}

/// Goal: remote CQ data comes with the length of the whole write, however many packets it took.
#[test]
fn remote_cq_data_tells_the_length_of_the_write() {
    for (lossless, short) in WAYS {
        let mut pair = Pair::new(1500, lossless);
        pair.short = short;
        let region = pair.region(1, 9000, ALL);
        for len in [8, 1400, 5000, 3, 9000, 5000] {
            let rma = RmaList::one(0, len as u64, region.key);
            pair.write(&bytes(len), rma, OpFlags::REMOTE_CQ_DATA, 1).unwrap();
            pair.run(3_000_000);
            let [cqe] = pair.read(1)[..] else { panic!("one entry for {len} bytes") };
            assert_eq!((cqe.len, cqe.data), (len as u64, 4711));
        }
    }
}

/// Goal: what waits for room in a queue ends with its endpoint, and the sender has its credit back.
#[test]
fn a_message_that_waits_for_queue_room_ends_with_its_endpoint() {
    let mut pair = Pair::new(1500, false);
    let (ep, cq) = end_told_in_a_small_queue(&mut pair);
    pair.ends[1].node.ep_enable(ep).unwrap();
    let region = pair.region(1, 64, ALL);
    for data in 1..4 {
        write_with_data(&mut pair, &region, data);
    }
    pair.run(1_000_000);
    let end = &mut pair.ends[1];
    assert_eq!(end.node.peers.iter().next().unwrap().1.unexpected, 2, "two wait");
    end.node.ep_close(pair.now, ep).unwrap();
    let mut out = [Cqe::default(); 4];
    assert_eq!((end.node.cq_read(cq, &mut out), out[0].data), (Ok(1), 1));
    assert_eq!(end.node.cq_read(cq, &mut out), Err(Error::Again));
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// Remote CQ data is never lost: with a queue of one entry it waits, and comes in order.
#[test]
fn remote_cq_data_waits_for_room() {
    for (lossless, short) in WAYS {
        let mut pair = Pair::new(1500, lossless);
        pair.short = short;
        let (ep, cq) = end_told_in_a_small_queue(&mut pair);
        let end = &mut pair.ends[1];
        let cntr = end.node.cntrs.open(CntrEvents::Comp).unwrap();
        end.node.operations().ep_bind_cntr(ep, cntr, BindFlags::REMOTE_WRITE).unwrap();
        end.node.ep_enable(ep).unwrap();
        let region = pair.region(1, 64, ALL);
        for data in 0..50_u64 {
            write_with_data(&mut pair, &region, data);
        }
        let mut got = Vec::new();
        for _ in 0..80 {
            pair.run(200_000);
            let mut out = [Cqe::default(); 4];
            if let Ok(n) = pair.ends[1].node.cq_read(cq, &mut out) {
                assert_eq!(n, 1);
                let flags = CqFlags::RMA | CqFlags::REMOTE_WRITE | CqFlags::REMOTE_CQ_DATA;
                assert_eq!((out[0].flags, out[0].op_context, out[0].src), (flags, 0, 0));
                got.push(out[0].data);
            }
        }
        assert_eq!(got, (0..50).collect::<Vec<_>>());
        assert_eq!(pair.read(0).len(), 50);
        assert_eq!(pair.ends[1].node.cntrs.read(cntr), Ok(50));
        pair.run(600_000_000);
        pair.assert_quiet();
    }
}

/// Goal: what waits for room is told as from the life of the peer that sent it, whoever has its
/// address when there is room. Method: the address of the next life is inserted meanwhile.
#[test]
fn remote_cq_data_that_waits_names_the_life_that_sent_it() {
    let mut pair = Pair::new(1500, false);
    let (ep, cq) = end_told_in_a_small_queue(&mut pair);
    pair.ends[1].node.ep_enable(ep).unwrap();
    let region = pair.region(1, 64, ALL);
    for data in 1..3 {
        write_with_data(&mut pair, &region, data);
    }
    pair.run(1_000_000);
    let addr = pair.ends[0].node.addr_of(pair.ends[0].ep).unwrap();
    let next = EpAddr { incarnation: addr.incarnation + 1, ..addr };
    let End { node, av, peer, .. } = &mut pair.ends[1];
    assert_ne!(node.sessions().av_insert(pair.now, *av, next).unwrap(), *peer);
    for data in 1..3 {
        let mut out = [Cqe::default(); 4];
        assert_eq!(node.cq_read(cq, &mut out), Ok(1));
        assert_eq!((out[0].data, out[0].src), (data, *peer));
    }
}

/// Counters of both sides count each operation once, whatever its number of packets, and those of
/// regions each access.
#[test]
fn counters_count_operations() {
    // Initiator's READ, WRITE, and nothing remote; target's remote two; the region's reads and
    // writes of ranges that are not empty.
    counted(CntrEvents::Comp, [5, 5, 0, 0, 0, 0, 5, 5, 6, 6]);
}

/// The same of counters of bytes.
#[test]
fn counters_count_bytes() {
    let all = 8 + 50_000 + 8 + 24;
    counted(CntrEvents::Bytes, [all, all, 0, 0, 0, 0, all, all, all, all]);
}

fn counted(events: CntrEvents, want: [u64; 10]) {
    for (lossless, short) in WAYS {
        let mut pair = Pair::new(1500, lossless);
        pair.short = short;
        let mut cntrs = Vec::new();
        let region = pair.region(1, 100_000, ALL);
        for i in 0..2 {
            let end = &mut pair.ends[i];
            let caps = Caps::RMA | Caps::RMA_EVENT;
            let ep = end.node.eps.open(EpAttr { caps, ..EpAttr::default() }).unwrap();
            end.node
                .objects()
                .ep_bind_cq(ep, end.cq, BindFlags::TRANSMIT | BindFlags::RECV)
                .unwrap();
            end.node.objects().ep_bind_av(ep, end.av).unwrap();
            let all = [
                BindFlags::READ,
                BindFlags::WRITE,
                BindFlags::REMOTE_READ,
                BindFlags::REMOTE_WRITE,
            ];
            for flags in all {
                let cntr = end.node.cntrs.open(events).unwrap();
                end.node.operations().ep_bind_cntr(ep, cntr, flags).unwrap();
                cntrs.push((i, cntr));
            }
            end.node.ep_enable(ep).unwrap();
            end.ep = ep;
        }
        for reads in [true, false] {
            let node = &mut pair.ends[1].node;
            let cntr = node.cntrs.open(events).unwrap();
            node.responder().mr_bind_cntr(region.id, cntr, reads, !reads).unwrap();
            assert_eq!(node.objects().cntr_close(cntr), Err(Error::Busy));
            cntrs.push((1, cntr));
        }
        let addr = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
        let end = &mut pair.ends[0];
        end.peer = end.node.sessions().av_insert(pair.now, end.av, addr).unwrap();
        for (len, ranges) in [(0, 2), (8, 2), (50_000, 2), (8, 1), (24, 1)] {
            let first = if ranges == 2 { len / 2 } else { len };
            let mut list = RmaList::one(0, first, region.key);
            if ranges == 2 {
                list.push(RmaIov { addr: 60_000, len: len - first, key: region.key });
            }
            pair.write(&bytes(len as usize), list, OpFlags::empty(), 1).unwrap();
            pair.read_to(IoBuf::leaked(&vec![0; len as usize]), list, 2).unwrap();
            pair.run(5_000_000);
            assert_eq!(pair.read(0).len(), 2);
        }
        pair.write(&[1], RmaList::one(0, 1, 5), OpFlags::empty(), 3).unwrap();
        pair.run(5_000_000);
        assert_eq!(pair.read_err(0).err, Error::KeyRejected);
        let values: Vec<_> =
            cntrs.iter().map(|&(i, c)| pair.ends[i].node.cntrs.read(c).unwrap()).collect();
        assert_eq!(pair.short, short.map(|_| 5));
        assert_eq!(values, want);
        assert_eq!(pair.ends[0].node.cntrs.readerr(cntrs[1].1), Ok(1));
    }
}

/// A region for one operation is of use to the first that begins, however long it is and whatever
/// else is under way, and to no other.
#[test]
fn a_region_for_one_operation() {
    for (lossless, short) in WAYS {
        for (len, reads) in [(8, false), (8, true), (90_000, false), (600_000, true)] {
            let mut pair = Pair::new(1500, lossless);
            pair.short = short;
            let (any, one) = (pair.region(1, len, ALL), pair.region(1, len, ALL));
            let go = |pair: &mut Pair, key, at, context| {
                let list = RmaList::one(at, len as u64, key);
                if reads {
                    pair.read_to(IoBuf::leaked(&vec![0; len]), list, context).unwrap();
                } else {
                    pair.write(&bytes(len), list, OpFlags::empty(), context).unwrap();
                }
            };
            for context in 0..3 {
                go(&mut pair, any.key, 0, context);
                pair.run(5_000_000);
            }
            assert_eq!(pair.outcomes(0).len(), 3);
            pair.ends[1].node.responder().mr_single_use(one.id).unwrap();
            go(&mut pair, one.key, len as u64, 9);
            pair.run(5_000_000);
            assert_eq!(pair.outcomes(0), [(9, Some(Error::Access))], "refused, and so not its use");
            (0..3).for_each(|context| go(&mut pair, one.key, 0, context));
            pair.run(50_000_000);
            let mut outcomes = pair.outcomes(0);
            outcomes.sort_by_key(|(context, _)| *context);
            let refused = Some(Error::KeyRejected);
            assert_eq!(outcomes, [(0, None), (1, refused), (2, refused)], "{lossless} {len}");
            go(&mut pair, one.key, 0, 4);
            pair.run(50_000_000);
            assert_eq!(pair.outcomes(0), [(4, refused)]);
            go(&mut pair, any.key, 0, 5);
            pair.run(50_000_000);
            assert_eq!(pair.outcomes(0), [(5, None)], "no other region is meant");
            pair.ends[1].node.responder().mr_close(one.id).unwrap();
            pair.run(600_000_000);
            pair.assert_quiet();
        }
    }
}

/// What a target remembers of writes that it has checked lets no read through, nor the other way
/// round, though their headers can be made alike.
#[test]
fn a_cached_write_grant_admits_no_read() {
    // Where the flags of an operation stand, and the one that a WRITE never has.
    const FLAGS: usize = crate::wire::BASE_LEN + 4;
    const END: u8 = 1 << 2;
    for (access, writes) in [(MrAccess::REMOTE_WRITE, true), (MrAccess::REMOTE_READ, false)] {
        let mut pair = Pair::new(1500, true);
        let region = pair.region(1, 64, access);
        let list = RmaList::one(0, 8, region.key);
        for context in 0..3 {
            // The first opens the session; the last is of the other kind, and made alike.
            let alike = context == 2;
            if writes != alike {
                pair.write(&[1; 8], list, OpFlags::empty(), context).unwrap();
            } else {
                pair.read_to(IoBuf::leaked(&[0; 8]), list, context).unwrap();
            }
            if alike {
                pair.ends[0].out[0][FLAGS] ^= END;
            }
            pair.run(1_000_000);
            pair.short = Some(0);
        }
        let executed = pair.ends[1].node.counters().rma_executed;
        assert_eq!((executed, pair.outcomes(0).len() > 1), (2, true));
        assert_eq!(region.bytes()[..8], [if writes { 1 } else { 0xEE }; 8]);
    }
}

/// After `mr_close` nothing is written and nothing more is read, wherever the packets are; both
/// sides get their pools back, and each operation has one outcome.
#[test]
fn closing_a_region_in_the_middle_ends_its_operations() {
    for lossless in [true, false] {
        for steps in 1..30 {
            let mut pair = Pair::new(1500, lossless);
            if steps % 3 == 0 && !lossless {
                (pair.drop, pair.scatter) = (4, true);
            }
            let region = pair.region(1, 300_000, ALL);
            let list = RmaList::one(0, 300_000, region.key);
            pair.write(&bytes(300_000), list, OpFlags::empty(), 1).unwrap();
            pair.read_to(IoBuf::leaked(&[0; 300_000]), list, 2).unwrap();
            pair.run(steps * 5_000);
            pair.ends[1].node.responder().mr_close(region.id).unwrap();
            let then = region.bytes();
            pair.run(900_000_000);
            assert_eq!(region.bytes(), then, "written after close");
            let mut outcomes = pair.outcomes(0);
            assert_eq!(outcomes.len(), 2, "{steps}");
            outcomes.sort_by_key(|o| o.0);
            assert_eq!((outcomes[0].0, outcomes[1].0), (1, 2), "{steps}");
            for (_, err) in outcomes {
                assert!(err.is_none_or(|err| err == Error::KeyRejected), "{steps}: {err:?}");
            }
            pair.assert_quiet();
        }
    }
}

/// Closing the initiator's endpoint, or losing the session, in the middle: one outcome each, the
/// memory is not touched afterwards, and the session goes on or opens again.
#[test]
fn closing_the_initiator_in_the_middle_ends_its_operations() {
    for lossless in [true, false] {
        for steps in 1..25 {
            for close in [true, false] {
                let mut pair = Pair::new(1500, lossless);
                let region = pair.region(1, 300_000, ALL);
                let list = RmaList::one(0, 200_000, region.key);
                let (buf, look) = shared(200_000);
                pair.read_to(buf, list, 1).unwrap();
                pair.write(&bytes(200_000), list, OpFlags::empty(), 2).unwrap();
                pair.run(steps * 5_000);
                let end = &mut pair.ends[0];
                if close {
                    end.node.ep_close(pair.now, end.ep).unwrap();
                } else {
                    let station = Station::at([2, 0, 0, 0, 0, 2]);
                    end.node.sessions().drop_session(pair.now, station);
                }
                let then = contents(&look);
                let outcomes = pair.outcomes(0).len();
                assert_eq!(outcomes, 2, "{steps}");
                pair.run(900_000_000);
                assert_eq!(contents(&look), then, "written after the end");
                pair.run(600_000_000);
                pair.assert_quiet();
            }
        }
    }
}

#[test]
fn refused_calls_have_no_side_effect() {
    let mut pair = Pair::new(1500, true);
    let one = RmaList::one(0, 8, 1);
    let bad = OpFlags::from_bits_retain(1 << 62);
    for flags in [bad, OpFlags::MULTICAST, OpFlags::MATCH_COMPLETE, OpFlags::TAGGED] {
        assert_eq!(pair.write(&[0; 8], one, flags, 1), Err(Error::BadFlags));
    }
    assert_eq!(
        pair.write(&[0; 257], RmaList::one(0, 257, 1), OpFlags::INJECT, 1),
        Err(Error::MsgTooLong)
    );
    let lengths = Error::Invalid("local and remote lengths differ");
    assert_eq!(pair.write(&[0; 9], one, OpFlags::empty(), 1), Err(lengths));
    pair.ends[0].peer = 77;
    let dest = Error::Invalid("destination is not in the AV");
    assert_eq!(pair.write(&[0; 8], one, OpFlags::empty(), 1), Err(dest));
    assert_eq!(pair.read_to(IoBuf::leaked(&[0; 8]), one, 1), Err(dest));
    let end = &mut pair.ends[0];
    end.peer = 0;
    end.ep = end.node.eps.open(EpAttr::default()).unwrap();
    assert_eq!(pair.write(&[0; 8], one, OpFlags::empty(), 1), Err(Error::OpBadState));
    let end = &mut pair.ends[0];
    end.node.objects().ep_bind_cq(end.ep, end.cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
    end.node.objects().ep_bind_av(end.ep, end.av).unwrap();
    end.node.ep_enable(end.ep).unwrap();
    assert!(matches!(pair.write(&[0; 8], one, OpFlags::empty(), 1), Err(Error::OpNotSupp(_))));
    pair.run(5_000_000);
    assert_eq!(pair.ends[0].node.cqs.ready(pair.ends[0].cq), Ok(0));
    assert_eq!(pair.ends[0].node.counters().tx_frames, 0);
}

#[test]
fn keys_are_fresh_and_the_applications_own_do_not_clash() {
    let mut pair = Pair::new(1500, true);
    let mut keys = Vec::new();
    for _ in 0..1000 {
        let region = pair.region(0, 8, ALL);
        keys.push(region.key);
        pair.ends[0].node.responder().mr_close(region.id).unwrap();
        assert_eq!(pair.ends[0].node.responder().mr_close(region.id), Err(Error::BadFd));
    }
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 1000);
    let own = |buf| MrReq {
        buf,
        access: ALL,
        requested_key: Some(7),
        virt_addr: false,
        ep: None,
        sharing: Sharing::Single,
    };
    let region = pair.region_of(0, 8, own);
    assert_eq!(region.key, 7);
    let node = &mut pair.ends[0].node;
    assert_eq!(node.responder().mr_reg(own(IoBuf::leaked(&[0; 8]))), Err(Error::NoKey));
    node.responder().mr_close(region.id).unwrap();
    node.responder().mr_reg(own(IoBuf::leaked(&[0; 8]))).unwrap();
}

/// An operation on one's own memory goes through the same checks.
#[test]
fn operations_on_oneself_work() {
    let mut pair = Pair::new(1500, true);
    let addr = pair.ends[0].node.addr_of(pair.ends[0].ep).unwrap();
    let end = &mut pair.ends[0];
    end.peer = end.node.sessions().av_insert(Instant(0), end.av, addr).unwrap();
    let region = pair.region(0, 70_000, ALL);
    let list = RmaList::one(3, 66_000, region.key);
    pair.write(&bytes(66_000), list, OpFlags::empty(), 1).unwrap();
    let (buf, look) = shared(66_000);
    pair.run(5_000_000);
    pair.read_to(buf, list, 2).unwrap();
    pair.run(5_000_000);
    assert_eq!(pair.read(0).len(), 2);
    assert_eq!(contents(&look), bytes(66_000));
    region.assert_guards();
}

/// Who tries keys is told of no more than a thousand a second after the first 64; with a right one
/// all is as before.
#[test]
fn guessing_keys_is_slow() {
    for (lossless, drop) in [(true, 0), (false, 0), (false, 5)] {
        let mut pair = Pair::new(1500, lossless);
        let region = pair.region(1, 64, ALL);
        pair.write(b"hello", RmaList::one(0, 5, region.key), OpFlags::empty(), 1).unwrap();
        pair.run(2_000_000);
        assert_eq!(pair.read(0).len(), 1);
        pair.drop = drop;
        let mut took = Vec::new();
        for i in 0..84 {
            let start = pair.now;
            let key = region.key ^ (1 + i) << 30;
            pair.write(b"guess", RmaList::one(0, 5, key), OpFlags::empty(), 2).unwrap();
            let cq = pair.ends[0].cq;
            while pair.ends[0].node.cqs.ready(cq).unwrap() == 0 {
                pair.run(20_000);
                assert!(pair.now.since(start) < 2_000_000_000, "guess {i} is never refused");
            }
            assert_eq!(pair.only_error(2).err, Error::KeyRejected);
            took.push(pair.now.since(start));
        }
        let (before, after): (u64, u64) = (took[..64].iter().sum(), took[64..].iter().sum());
        assert!(drop > 0 || before < 64 * 200_000, "lossless {lossless}: {before} ns for 64");
        assert!(after >= 20 * 950_000, "lossless {lossless}: only {after} ns for 20");
        pair.write(b"right", RmaList::one(0, 5, region.key), OpFlags::empty(), 3).unwrap();
        pair.write(b"wrong", RmaList::one(0, 5, 5), OpFlags::empty(), 4).unwrap();
        pair.run(if drop > 0 { 50_000_000 } else { 500_000 });
        assert_eq!(pair.read(0).len(), 1);
        assert_eq!(pair.only_error(4).err, Error::KeyRejected);
    }
}

/// Goal: a write that was given up with a packet missing is not told as complete, whichever packet
/// it was and whatever of it arrived early.
#[test]
fn a_write_that_was_given_up_half_way_is_not_told() {
    for (lost, close) in [(0, false), (0, true), (1, true), (3, true), (5, true)] {
        let mut pair = Pair::new(1500, false);
        let region = pair.region(1, 10_000, ALL);
        pair.write(&[1; 8], RmaList::one(0, 8, region.key), OpFlags::empty(), 1).unwrap();
        pair.run(1_000_000);
        assert_eq!(pair.read(0).len(), 1, "the session is open");
        let list = RmaList::one(0, 10_000, region.key);
        pair.write(&bytes(10_000), list, OpFlags::REMOTE_CQ_DATA, 2).unwrap();
        let now = pair.now;
        let End { node, out, ep, .. } = &mut pair.ends[0];
        node.transmit(now, &mut sink(out));
        assert_eq!(out.len(), 8, "packets of the write");
        out.remove(lost);
        if close {
            node.ep_close(now, *ep).unwrap();
        }
        pair.run(900_000_000);
        let told = pair.read(1).len();
        assert_eq!(told, usize::from(!close), "lost packet {lost}, closed: {close}");
    }
}

/// Two ends and a session, and a region at the second: what the first posts takes the fast path.
fn short_pair() -> (Pair, Region) {
    let mut pair = Pair::new(1500, true);
    let region = pair.region(1, 4096, ALL);
    pair.write(&[0; 8], RmaList::one(0, 8, region.key), OpFlags::empty(), 1).unwrap();
    pair.run(1_000_000);
    assert_eq!(pair.outcomes(0), [(1, None)]);
    pair.short = Some(0);
    (pair, region)
}

/// Posts writes and reads of 8 bytes by turns, with the contexts `0..n`, of which those in `wrong`
/// name no region.
fn mixed(pair: &mut Pair, region: &Region, n: u64, wrong: &[u64]) {
    for context in 0..n {
        let key = if wrong.contains(&context) { region.key ^ 1 << 40 } else { region.key };
        let list = RmaList::one(8 * context, 8, key);
        if context % 2 == 0 {
            pair.write(&context.to_le_bytes(), list, OpFlags::empty(), context).unwrap();
        } else {
            pair.read_to(IoBuf::leaked(&[0; 8]), list, context).unwrap();
        }
    }
    assert_eq!(pair.short, Some(n as usize));
}

/// Goal: of operations of the fast path that wait one behind the other for their answers, any may
/// be refused: first, last, or between, and all. Method: each has one outcome.
#[test]
fn any_of_the_short_way_may_be_refused() {
    for wrong in [&[][..], &[0], &[8], &[4], &[0, 2, 4], &[3, 5, 6], &[0, 1, 2, 3, 4, 5, 6, 7, 8]] {
        let (mut pair, region) = short_pair();
        mixed(&mut pair, &region, 9, wrong);
        pair.run(2_000_000);
        let mut outcomes = pair.outcomes(0);
        outcomes.sort_by_key(|o| o.0);
        let refused = |context| wrong.contains(&context).then_some(Error::KeyRejected);
        assert_eq!(outcomes, (0..9).map(|c| (c, refused(c))).collect::<Vec<_>>(), "{wrong:?}");
        for context in (0..9).step_by(2).filter(|c| !wrong.contains(c)) {
            let at = 8 * context as usize;
            assert_eq!(region.bytes()[at..at + 8], context.to_le_bytes());
        }
        pair.run(600_000_000);
        pair.assert_quiet();
    }
}

/// X66, AF4: a fenced operation waits for a read and a write, and goes when both are answered,
/// although all packets before it were acknowledged earlier: the target took them in a burst, and a
/// message of its own left before the answers.
#[test]
fn a_fence_waits_for_the_bytes_of_a_read() {
    let (mut pair, region) = short_pair();
    let message = |pair: &mut Pair| {
        pair.recv(0, IoBuf::leaked(&[0; 8]), 7, OpFlags::empty(), 3).unwrap();
        pair.send(1, IoBuf::leaked(&[3; 8]), 7, OpFlags::empty(), 4).unwrap();
    };
    message(&mut pair);
    pair.run(2_000_000);
    assert_eq!((pair.outcomes(0), pair.outcomes(1)), (vec![(3, None)], vec![(4, None)]));
    pair.short = Some(0);
    let list = RmaList::one(0, 8, region.key);
    pair.read_to(IoBuf::leaked(&[0; 8]), list, 0).unwrap();
    pair.write(&[1; 8], RmaList::one(200, 8, region.key), OpFlags::empty(), 1).unwrap();
    assert_eq!(pair.short, Some(2));
    let fenced = RmaList::one(300, 8, region.key);
    pair.write(&[2; 8], fenced, OpFlags::FENCE, 2).unwrap();
    let [first, second] = &mut pair.ends;
    for frame in first.out.drain(..2) {
        second.node.on_frame(pair.now, &RxFrame::new(&frame));
    }
    message(&mut pair);
    let frame = pair.ends[1].out.pop_front().unwrap();
    let End { node, out, .. } = &mut pair.ends[0];
    node.on_frame(pair.now, &RxFrame::new(&frame));
    node.transmit(pair.now, &mut sink(out));
    assert!(out.is_empty(), "all was acknowledged, and nothing answered");
    pair.now = pair.now + 100;
    pair.run(2_000_000);
    assert_eq!(pair.outcomes(0), [(3, None), (0, None), (1, None), (2, None)]);
    assert_eq!(pair.outcomes(1), [(4, None)]);
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// An answer completes what it is for and nothing else.
#[test]
fn an_answer_completes_what_it_is_for() {
    let (mut pair, region) = short_pair();
    for context in 0..5 {
        let list = RmaList::one(8, 8, region.key);
        pair.write(&[1; 8], list, OpFlags::empty(), context).unwrap();
    }
    let mut held: Vec<_> = pair.ends[0].out.drain(..).collect();
    assert_eq!(held.len(), 5);
    for (from, to) in [(0, 1), (1, 4), (4, 5)] {
        pair.ends[0].out.extend(held.drain(..to - from));
        pair.run(1_000_000);
        let done: Vec<_> = (from as u64..to as u64).map(|context| (context, None)).collect();
        assert_eq!(pair.outcomes(0), done);
    }
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// Goal: a short read is answered with what the region holds when the read is executed, by the slow
/// path of the target too. Method: a region in two pieces, which is closed before the answer
/// leaves.
#[test]
fn a_short_read_outlives_its_region() {
    for len in [1, 8, 16, 100, 1300] {
        let (mut pair, _) = short_pair();
        let bytes: Vec<u8> = (0..1400).map(|i| (i % 251) as u8).collect();
        let mut buf = IoBuf::leaked(&bytes[..50]);
        assert!(buf.append(IoBuf::leaked(&bytes[50..])));
        let node = &mut pair.ends[1].node;
        let id = node.responder().mr_reg(plain(buf, ALL)).unwrap();
        let key = node.mrs.key(id).unwrap();
        let (to, look) = shared(len);
        pair.read_to(to, RmaList::one(45, len as u64, key), 5).unwrap();
        assert_eq!(pair.short, Some(1));
        let frame = pair.ends[0].out.pop_front().unwrap();
        let node = &mut pair.ends[1].node;
        node.on_frame(pair.now, &RxFrame::new(&frame));
        node.responder().mr_close(id).unwrap();
        pair.run(1_000_000);
        assert_eq!(pair.outcomes(0), [(5, None)]);
        assert_eq!(contents(&look), bytes[45..45 + len]);
        pair.run(600_000_000);
        pair.assert_quiet();
    }
}

/// Closing the endpoint, or the end of the session, while they are under way: one outcome each, and
/// the session has forgotten them.
#[test]
fn operations_of_the_short_way_end_with_their_endpoint_or_peer() {
    for dies in [false, true] {
        let (mut pair, region) = short_pair();
        mixed(&mut pair, &region, 9, &[4]);
        let end = &mut pair.ends[0];
        let err = if dies {
            pair.drop = 1;
            pair.run(560_000_000);
            Error::HostUnreach
        } else {
            end.node.ep_close(pair.now, end.ep).unwrap();
            Error::Canceled
        };
        let outcomes = pair.outcomes(0);
        assert_eq!(outcomes, (0..9).map(|c| (c, Some(err))).collect::<Vec<_>>());
        pair.run(600_000_000);
        let node = &pair.ends[0].node;
        assert_eq!((node.statistics().levels().tx, node.fast_ops.iter().count()), (0, 0));
        if !dies {
            pair.assert_quiet();
        }
    }
}

/// An endpoint serves what its capabilities allow, from its enabling on.
#[test]
fn an_endpoint_without_the_capability_serves_nobody() {
    let all = [(Caps::REMOTE_READ, 1), (Caps::REMOTE_WRITE, 0), (Caps::empty(), 2)];
    let ways = all.into_iter().flat_map(|caps| WAYS.map(|way| (caps, way)));
    for ((caps, may), (lossless, short)) in ways {
        let mut pair = Pair::new(1500, lossless);
        pair.short = short;
        let region = pair.region(1, 64, ALL);
        let End { node, cq, av, .. } = &mut pair.ends[1];
        let attr = EpAttr { caps: Caps::RMA | Caps::WRITE | caps, ..EpAttr::default() };
        let ep = open_ep(node, (*cq, *av), attr);
        let shut = node.eps.open(EpAttr { caps: Caps::RMA, ..attr }).unwrap();
        let addrs = [ep, shut].map(|ep| node.addr_of(ep).unwrap());
        for (addr, is_shut) in addrs.into_iter().zip([false, true]) {
            let from = &mut pair.ends[0];
            from.peer = from.node.sessions().av_insert(pair.now, from.av, addr).unwrap();
            for context in [0, 1, 0, 1] {
                let list = RmaList::one(0, 8, region.key);
                if context == 0 {
                    pair.write(&[0xEE; 8], list, OpFlags::empty(), context).unwrap();
                } else {
                    pair.read_to(IoBuf::leaked(&[0; 8]), list, context).unwrap();
                }
                pair.run(2_000_000);
                let outcome = pair.outcomes(0);
                let ends_well = outcome == [(context, None)];
                assert_eq!(ends_well, !is_shut && context == may, "{caps:?}: {outcome:?}");
            }
        }
        region.assert_untouched();
    }
}

/// A region that was closed, or narrowed to another endpoint, is not written or read by what was
/// known of it; and what one type of packet may, another may not.
#[test]
fn a_cached_grant_ends_with_its_region() {
    for close in [false, true] {
        let (mut pair, region) = short_pair();
        mixed(&mut pair, &region, 4, &[]);
        pair.run(1_000_000);
        assert_eq!(pair.outcomes(0).len(), 4);
        let node = &mut pair.ends[1].node;
        let err = if close {
            node.responder().mr_close(region.id).unwrap();
            Error::KeyRejected
        } else {
            let other = node.eps.open(EpAttr::default()).unwrap();
            node.responder().mr_bind_ep(region.id, other).unwrap();
            Error::Access
        };
        let then = region.bytes();
        pair.short = Some(0);
        mixed(&mut pair, &region, 4, &[]);
        pair.run(1_000_000);
        let mut outcomes = pair.outcomes(0);
        outcomes.sort_by_key(|o| o.0);
        assert_eq!(outcomes, (0..4).map(|c| (c, Some(err))).collect::<Vec<_>>());
        assert_eq!(region.bytes(), then);
    }
    for (access, may) in [(MrAccess::REMOTE_READ, 1), (MrAccess::REMOTE_WRITE, 0)] {
        let (mut pair, _) = short_pair();
        let region = pair.region(1, 64, access);
        for context in [0, 1, 0, 1] {
            let list = RmaList::one(0, 8, region.key);
            if context == 0 {
                pair.write(&[1; 8], list, OpFlags::empty(), context).unwrap();
            } else {
                pair.read_to(IoBuf::leaked(&[0; 8]), list, context).unwrap();
            }
            pair.run(1_000_000);
            let err = (context != may).then_some(Error::Access);
            assert_eq!(pair.outcomes(0), [(context, err)]);
        }
        assert_eq!(pair.short, Some(4));
    }
}

/// A read that is still answered when its endpoint closes counts for no endpoint that takes the
/// slot.
#[test]
fn a_read_does_not_count_for_the_next_endpoint_in_the_slot() {
    let mut pair = Pair::new(1500, false);
    let region = pair.region(1, 6000, ALL);
    pair.read_to(IoBuf::leaked(&[0; 8]), RmaList::one(0, 8, region.key), 1).unwrap();
    pair.run(2_000_000);
    assert_eq!(pair.outcomes(0), [(1, None)]);
    pair.read_to(IoBuf::leaked(&[0; 6000]), RmaList::one(0, 6000, region.key), 2).unwrap();
    let step = |pair: &mut Pair, from: usize| {
        let now = pair.now;
        let End { node, out, .. } = &mut pair.ends[from];
        node.transmit(now, &mut sink(out));
        for bytes in std::mem::take(&mut pair.ends[from].out) {
            pair.ends[1 - from].node.on_frame(now, &RxFrame::new(&bytes));
        }
    };
    step(&mut pair, 0);
    // All of the data leaves, and no acknowledgement has come.
    step(&mut pair, 1);
    let (now, End { node, ep, cq, av, .. }) = (pair.now, &mut pair.ends[1]);
    node.ep_close(now, *ep).unwrap();
    let slot = ep.0.idx();
    let caps = Caps::RMA | Caps::RMA_EVENT;
    *ep = node.eps.open(EpAttr { caps, ..EpAttr::default() }).unwrap();
    assert_eq!(ep.0.idx(), slot);
    let cntr = node.cntrs.open(CntrEvents::Comp).unwrap();
    node.objects().ep_bind_cq(*ep, *cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
    node.objects().ep_bind_av(*ep, *av).unwrap();
    node.operations().ep_bind_cntr(*ep, cntr, BindFlags::REMOTE_READ).unwrap();
    node.ep_enable(*ep).unwrap();
    pair.run(5_000_000);
    assert_eq!(pair.outcomes(0), [(2, None)]);
    assert_eq!(pair.ends[1].node.cntrs.read(cntr), Ok(0));
}

/// Goal: the owner of a region reaches all of its bytes, and none around them.
#[test]
fn the_owner_reaches_its_region_and_no_more() {
    let mut pair = Pair::new(1500, true);
    let region = pair.region(0, 16, ALL);
    let node = &mut pair.ends[0].node;
    for (offset, len) in [(0, 16), (15, 1), (16, 0), (0, 0)] {
        assert_eq!(node.mrs.store(region.id, offset, &vec![7; len]), Ok(()), "{offset} {len}");
        let mut out = vec![0; len];
        assert_eq!(node.mrs.load(region.id, offset, &mut out), Ok(()), "{offset} {len}");
        assert_eq!(out, vec![7; len]);
    }
    for (offset, len) in [(0, 17), (16, 1), (17, 0), (17, 1), (usize::MAX, 1), (1, 1024)] {
        let outside = |got: Result<()>| matches!(got, Err(Error::Invalid(_)));
        assert!(outside(node.mrs.store(region.id, offset, &vec![9; len])), "{offset} {len}");
        assert!(outside(node.mrs.load(region.id, offset, &mut vec![0; len])), "{offset} {len}");
    }
    assert_eq!(region.bytes(), [7; 16]);
    region.assert_guards();
}

/// Goal: where the generation of a read's record would be 0, after 2^32 uses of the slot, a read is
/// answered, and a refused one ends and frees its record.
#[test]
fn reads_end_where_the_generation_of_their_record_wraps() {
    for (wrong, want) in [(0, None), (1 << 30, Some(Error::KeyRejected))] {
        let mut pair = Pair::new(1500, false);
        let region = pair.region(1, 9000, ALL);
        for context in 0..4 {
            let (buf, _look) = shared(9000);
            let rma = RmaList::one(0, 9000, region.key ^ wrong);
            pair.read_to(buf, rma, context).unwrap();
            pair.run(5_000_000);
            assert_eq!(pair.outcomes(0), [(context, want)]);
            let records = &mut pair.ends[0].node.pulls.records;
            assert!(records.is_empty(), "a record outlived its read");
            records.exhaust_generations();
        }
    }
}

/// Goal: an endpoint that is closed ends its own operations and none of another endpoint.
#[test]
fn an_endpoint_that_is_closed_ends_no_operation_of_another() {
    let (mut pair, region) = short_pair();
    let End { node, ep, cq, av, .. } = &mut pair.ends[0];
    let (first, attr) = (*ep, EpAttr { caps: Caps::RMA, ..EpAttr::default() });
    let other = open_ep(node, (*cq, *av), attr);
    pair.run(1_000_000);
    let list = |n: u64| RmaList::one(8 * n, 8, region.key);
    pair.write(&[1; 8], list(1), OpFlags::empty(), 1).unwrap();
    pair.ends[0].ep = other;
    pair.write(&[2; 8], list(2), OpFlags::empty(), 2).unwrap();
    pair.ends[0].node.ep_close(pair.now, first).unwrap();
    assert_eq!(pair.outcomes(0), [(1, Some(Error::Canceled))]);
    pair.run(2_000_000);
    assert_eq!(pair.outcomes(0), [(2, None)]);
    assert_eq!(region.bytes()[16..24], [2; 8]);
    pair.run(600_000_000);
    pair.assert_quiet();
}
