//! Shared receive contexts.

use super::*;

/// Endpoints of end 1 that share a context, each with a queue of so many entries.
struct Shared {
    pair: Pair,
    srx: EpId,
    eps: Vec<(EpId, CqId, FiAddr)>,
}

const KINDS: Caps = Caps::MSG.union(Caps::TAGGED);

fn shared_by(lossless: bool, queues: &[usize]) -> Shared {
    let mut pair = Pair::new(1500, lossless);
    let [from, to] = &mut pair.ends;
    let caps = KINDS | Caps::DIRECTED_RECV | Caps::SOURCE;
    let srx = to.node.eps.srx_open(EpAttr { caps, ..EpAttr::default() }).unwrap();
    let eps = queues.iter().map(|&size| {
        let ep = to.node.eps.open(EpAttr { caps, ..EpAttr::default() }).unwrap();
        let cq = to.node.cqs.open(size).unwrap();
        to.node.objects().ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
        to.node.objects().ep_bind_av(ep, to.av).unwrap();
        to.node.eps.bind_srx(ep, srx, false).unwrap();
        to.node.ep_enable(ep).unwrap();
        let addr = to.node.addr_of(ep).unwrap();
        (ep, cq, from.node.sessions().av_insert(Instant(0), from.av, addr).unwrap())
    });
    let eps = eps.collect();
    Shared { pair, srx, eps }
}

impl Shared {
    /// Sends to the endpoint with this place in the list.
    fn send(&mut self, to: usize, tag: u64, data: &[u8]) {
        let peer = std::mem::replace(&mut self.pair.ends[0].peer, self.eps[to].2);
        let buf = IoBuf::leaked(data);
        self.pair.send(0, buf, tag, OpFlags::empty(), 0).unwrap();
        self.pair.ends[0].peer = peer;
        self.pair.run(2_000_000);
    }

    fn try_post(&mut self, tag: u64, src: FiAddr, context: u64, flags: OpFlags) -> Result<IoBuf> {
        let (buf, look) = shared(4096);
        let req = RecvReq { kind: MsgKind::Tagged, buf, src, tag, ignore: 0, context, flags };
        self.pair.ends[1].node.post_recv(self.pair.now, self.srx, req)?;
        Ok(look)
    }

    fn post(&mut self, tag: u64, context: u64) -> IoBuf {
        self.try_post(tag, FI_ADDR_UNSPEC, context, OpFlags::empty()).unwrap()
    }

    /// What the queue of an endpoint has, by context.
    fn read(&mut self, of: usize) -> Vec<u64> {
        let mut out = [Cqe::default(); 64];
        let node = &mut self.pair.ends[1].node;
        let n = node.cq_read(self.eps[of].1, &mut out).unwrap_or(0);
        out[..n].iter().map(|cqe| cqe.op_context).collect()
    }
}

#[test]
fn receives_go_to_whoever_gets_a_message_first_and_complete_in_its_queue() {
    for lossless in [true, false] {
        for len in [8, 6_000, 300_000] {
            let mut it = shared_by(lossless, &[8, 8, 8]);
            let looks: Vec<IoBuf> = (0..3).map(|n| it.post(5, n)).collect();
            for to in [2, 0, 1] {
                it.send(to, 5, &vec![to as u8; len]);
            }
            it.pair.run(20_000_000);
            let got = [0, 1, 2].map(|of| it.pair.ends[1].node.cqs.ready(it.eps[of].1).unwrap());
            assert_eq!(got, [1, 1, 1], "{len} bytes, lossless {lossless}");
            if len <= 4096 {
                assert_eq!([it.read(2), it.read(0), it.read(1)], [vec![0], vec![1], vec![2]]);
                let firsts = looks.iter().map(|look| contents(look)[0]);
                assert_eq!(firsts.collect::<Vec<_>>(), [2, 0, 1]);
            }
            let counters = it.pair.ends[1].node.eps.counters(it.eps[0].0).unwrap();
            assert_eq!((counters.received, counters.posted), (1, 0));
        }
    }
}

#[test]
fn unexpected_messages_are_matched_in_order_of_arrival() {
    let mut it = shared_by(false, &[8, 8]);
    for (to, tag) in [(0, 1), (1, 2), (0, 2), (1, 1)] {
        it.send(to, tag, &[to as u8; 8]);
    }
    for (context, tag) in [(10, 2), (11, 2), (12, 1), (13, 1)] {
        it.post(tag, context);
    }
    assert_eq!((it.read(0), it.read(1)), (vec![11, 12], vec![10, 13]));
}

/// The endpoint without room waits, in order, and does not keep the other waiting.
#[test]
fn a_full_queue_holds_up_its_own_endpoint_only() {
    let mut it = shared_by(true, &[2, 16]);
    for n in 0..8 {
        it.post(5, n);
    }
    for n in 0..4 {
        it.send(0, 5, &[n; 8]);
    }
    it.send(1, 5, &[9; 8]);
    assert_eq!(it.read(1), [2]);
    assert_eq!(it.read(0), [0, 1]);
    assert_eq!(it.read(0), [3, 4]);
    it.send(0, 5, &[7; 8]);
    it.send(1, 5, &[7; 8]);
    assert_eq!((it.read(0), it.read(1)), (vec![5], vec![6]));
}

#[test]
fn a_source_is_looked_up_in_the_address_vector_of_the_endpoints() {
    let mut it = shared_by(true, &[8]);
    let peer = it.pair.ends[1].peer;
    assert!(matches!(it.try_post(5, 77, 1, OpFlags::empty()), Err(Error::Invalid(_))));
    it.try_post(5, peer, 1, OpFlags::empty()).unwrap();
    it.send(0, 5, &[1; 8]);
    assert_eq!(it.read(0), [1]);
    let node = &mut it.pair.ends[1].node;
    let ep = node.eps.open(EpAttr { caps: KINDS, ..EpAttr::default() }).unwrap();
    let av = node.sessions().av_open(8).unwrap();
    node.objects().ep_bind_cq(ep, it.eps[0].1, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
    node.objects().ep_bind_av(ep, av).unwrap();
    node.eps.bind_srx(ep, it.srx, false).unwrap();
    assert!(matches!(node.ep_enable(ep), Err(Error::Invalid(_))));
}

#[test]
fn a_cancelled_receive_is_told_by_one_that_shares_the_context() {
    let mut it = shared_by(true, &[2, 2]);
    it.post(5, 1);
    it.post(5, 2);
    let (srx, now) = (it.srx, it.pair.now);
    let node = &mut it.pair.ends[1].node;
    node.operations().cancel(srx, 1).unwrap();
    assert_eq!(node.operations().cancel(srx, 1), Err(Error::NoData));
    let err = node.receiving().cq_readerr(it.eps[0].1).unwrap();
    assert_eq!((err.err, err.cqe.op_context), (Error::Canceled, 1));
    it.send(1, 5, &[3; 8]);
    assert_eq!(it.read(1), [2]);
    // Nobody has room: it stays posted.
    for n in 10..15 {
        it.post(6, n);
    }
    let node = &mut it.pair.ends[1].node;
    for n in 10..14 {
        node.operations().cancel(srx, n).unwrap();
    }
    assert_eq!(node.operations().cancel(srx, 14), Err(Error::Again));
    assert_eq!(node.ep_close(now, srx), Err(Error::Busy));
    for (ep, cq, _) in &it.eps {
        node.ep_close(now, *ep).unwrap();
        node.objects().cq_close(*cq).unwrap();
    }
    node.operations().cancel(srx, 14).unwrap();
    node.ep_close(now, srx).unwrap();
    assert_eq!(node.ep_close(now, srx), Err(Error::BadFd));
    it.pair.run(600_000_000);
    it.pair.read(0);
    it.pair.assert_quiet();
}

/// Its messages go with an endpoint, the receives stay with the context.
#[test]
fn an_endpoint_closes_and_the_others_go_on() {
    let mut it = shared_by(false, &[8, 8]);
    it.send(0, 5, &[1; 8]);
    it.send(1, 5, &[2; 8]);
    it.send(0, 5, &[3; 300]);
    let (ep, now) = (it.eps[0].0, it.pair.now);
    it.pair.ends[1].node.ep_close(now, ep).unwrap();
    let look = it.post(5, 1);
    it.post(5, 2);
    assert_eq!((it.read(1), contents(&look)[0]), (vec![1], 2));
    it.send(1, 5, &[4; 8]);
    assert_eq!(it.read(1), [2]);
    assert_eq!(it.pair.ends[1].node.eps.ids().count(), 2);
}

#[test]
fn calls_of_an_endpoint_are_refused_on_a_shared_context() {
    let mut it = shared_by(true, &[8]);
    let (ep, srx) = (it.eps[0].0, it.srx);
    for flags in [OpFlags::MULTI_RECV, OpFlags::PEEK, OpFlags::CLAIM] {
        let refused = it.try_post(5, FI_ADDR_UNSPEC, 1, flags);
        assert_eq!(refused.err(), Some(Error::BadFlags), "{flags:?}");
    }
    let context = std::mem::replace(&mut it.srx, ep);
    let refused = it.try_post(5, FI_ADDR_UNSPEC, 1, OpFlags::empty());
    assert!(matches!(refused.err(), Some(Error::OpNotSupp(_))));
    it.srx = context;
    let node = &mut it.pair.ends[1].node;
    assert_eq!(node.eps.bind_srx(ep, srx, false), Err(Error::OpBadState));
    let fresh = node.eps.open(EpAttr { caps: KINDS, ..EpAttr::default() }).unwrap();
    assert!(matches!(node.eps.bind_srx(fresh, ep, false), Err(Error::Invalid(_))));
    node.eps.bind_srx(fresh, srx, false).unwrap();
    assert!(matches!(node.eps.bind_srx(fresh, srx, false), Err(Error::Invalid(_))));
}

#[test]
fn the_port_goes_and_every_receive_is_told() {
    let mut it = shared_by(true, &[2]);
    for n in 0..5 {
        it.post(5, n);
    }
    let cq = it.eps[0].1;
    let node = &mut it.pair.ends[1].node;
    node.port_gone(it.pair.now);
    let mut told = Vec::new();
    while let Ok(err) = node.receiving().cq_readerr(cq) {
        assert_eq!(err.err, Error::NetDown);
        told.push(err.cqe.op_context);
    }
    assert_eq!(told, [0, 1, 2, 3, 4]);
}

/// A receive that was deferred stands in order with those of the context, is told on demand by
/// whoever gets a message first, and is counted by its own counter alone.
#[test]
fn a_twins_receive_is_counted_by_its_counter_whoever_gets_the_message() {
    let mut it = shared_by(true, &[8, 8]);
    let srx = it.srx;
    let node = &mut it.pair.ends[1].node;
    let cntr = node.cntrs.open(CntrEvents::Comp).unwrap();
    let deferred = node.objects().deferred_ep(srx, Some(cntr)).unwrap();
    let peer = it.pair.ends[1].peer;
    let by_deferred = |it: &mut Shared, src, context, flags| {
        it.srx = deferred;
        let posted = it.try_post(5, src, context, flags);
        it.srx = srx;
        posted
    };
    let look = by_deferred(&mut it, FI_ADDR_UNSPEC, 1, OpFlags::empty()).unwrap();
    it.post(5, 2);
    by_deferred(&mut it, peer, 3, OpFlags::COMPLETION).unwrap();
    assert!(matches!(by_deferred(&mut it, 77, 4, OpFlags::empty()), Err(Error::Invalid(_))));
    for (to, byte) in [(0, 10), (0, 11), (1, 12)] {
        it.send(to, 5, &[byte; 8]);
    }
    assert_eq!((contents(&look)[0], it.read(0), it.read(1)), (10, vec![2], vec![3]));
    // The message first, a cancelled one, one that could not be posted.
    it.send(1, 5, &[13; 8]);
    let look = by_deferred(&mut it, FI_ADDR_UNSPEC, 5, OpFlags::COMPLETION).unwrap();
    assert_eq!((contents(&look)[0], it.read(1)), (13, vec![5]));
    by_deferred(&mut it, FI_ADDR_UNSPEC, 6, OpFlags::empty()).unwrap();
    let node = &mut it.pair.ends[1].node;
    node.operations().cancel(srx, 6).unwrap();
    node.objects().fail_unposted(deferred, 7, true, Error::BadFlags).unwrap();
    let told = [6, 7].map(|_| node.receiving().cq_readerr(it.eps[0].1).unwrap());
    assert_eq!(
        told.map(|e| (e.err, e.cqe.op_context)),
        [(Error::Canceled, 6), (Error::BadFlags, 7)]
    );
    assert_eq!((node.cntrs.read(cntr), node.cntrs.readerr(cntr)), (Ok(3), Ok(2)));
    let own = [0, 1].map(|of| node.eps.counters(it.eps[of].0).unwrap().posted);
    assert_eq!(own, [0, 0]);
    // It ends with the context, and then the counter can be closed.
    by_deferred(&mut it, FI_ADDR_UNSPEC, 8, OpFlags::empty()).unwrap();
    let (node, now) = (&mut it.pair.ends[1].node, it.pair.now);
    assert_eq!(node.objects().cntr_close(cntr), Err(Error::Busy));
    for (ep, ..) in &it.eps {
        node.ep_close(now, *ep).unwrap();
    }
    node.objects().fail_unposted(deferred, 9, true, Error::BadFlags).unwrap();
    node.ep_close(now, srx).unwrap();
    node.objects().cntr_close(cntr).unwrap();
    it.pair.run(600_000_000);
    it.pair.read(0);
    it.pair.assert_quiet();
}

/// A receive of a context that names a peer ends with the session, if not at once, then when an
/// endpoint that shares the context has room for the error; and it takes no message meanwhile.
#[test]
fn a_receive_that_names_a_lost_peer_is_told_when_there_is_room() {
    let mut it = shared_by(false, &[2]);
    let peer = it.pair.ends[1].peer;
    for context in 0..2 {
        it.post(5, context);
        it.send(0, 5, &[1; 8]);
    }
    it.try_post(5, peer, 9, OpFlags::empty()).unwrap();
    it.try_post(5, peer, 10, OpFlags::empty()).unwrap();
    let now = it.pair.now;
    for end in &mut it.pair.ends {
        end.node.sessions().end_session(now, crate::idx::PeerIdx::of(0), EndReason::Died);
    }
    it.send(0, 5, &[1; 8]);
    assert_eq!(it.read(0), [0, 1]);
    it.pair.run(1_000_000);
    let (node, cq) = (&mut it.pair.ends[1].node, it.eps[0].1);
    let told = [(); 2].map(|()| node.receiving().cq_readerr(cq).map(|e| (e.cqe.op_context, e.err)));
    assert_eq!(told, [9, 10].map(|context| Ok((context, Error::HostUnreach))));
    // A context that is closed forgets those that nobody was told of.
    for context in 0..3 {
        it.try_post(6, peer, context, OpFlags::empty()).unwrap();
    }
    let node = &mut it.pair.ends[1].node;
    node.sessions().end_session(it.pair.now, crate::idx::PeerIdx::of(0), EndReason::Died);
    assert_eq!(node.observed.losses.unended.len(), 1);
    node.ep_close(now, it.eps[0].0).unwrap();
    node.ep_close(now, it.srx).unwrap();
    assert_eq!((node.observed.losses.unended.len(), node.posted.pool.iter().count()), (0, 0));
}

/// A receive of a context that names a peer keeps the peer's record, also when the vector is closed
/// in which the peer was looked up.
#[test]
fn a_closed_vector_leaves_a_peer_that_a_receive_names() {
    let mut it = shared_by(false, &[8]);
    let End { node, ep, av, peer, .. } = &mut it.pair.ends[1];
    let p = node.avs[av.0.idx()].av.lookup(*peer).unwrap().peer;
    let refs = |node: &Node| node.peers[p].av_refs;
    node.ep_close(Instant(2), *ep).unwrap();
    let (now, peer) = (it.pair.now, *peer);
    it.try_post(5, peer, 1, OpFlags::empty()).unwrap();
    let (own, srx, node) = (it.eps[0].0, it.srx, &mut it.pair.ends[1].node);
    node.ep_close(now, own).unwrap();
    node.objects().av_close(it.pair.ends[1].av).unwrap();
    assert_eq!(refs(node), 1);
    node.ep_close(now, srx).unwrap();
    let other = node.sessions().av_open(8).unwrap();
    node.objects().av_close(other).unwrap();
    assert_eq!(refs(node), 0);
}

/// Goal: the record of a peer whose address comes and goes while a receive names it is held once,
/// and free at last. Method: a receive in a shared context, which no closed endpoint takes along.
#[test]
fn an_address_that_comes_and_goes_is_held_once() {
    let mut it = shared_by(false, &[8]);
    let End { node, av, peer, .. } = &mut it.pair.ends[1];
    let (av, peer, now) = (*av, *peer, it.pair.now);
    let entry = node.avs[av.0.idx()].av.lookup(peer).unwrap();
    let p = entry.peer;
    let other = node.sessions().av_open(8).unwrap();
    let station = node.peers[p].station();
    it.try_post(5, peer, 1, OpFlags::empty()).unwrap();
    let node = &mut it.pair.ends[1].node;
    let before = node.peers[p].av_refs;
    for ep in 0..100 {
        let addr = EpAddr { station, ep, incarnation: 0 };
        let at = node.sessions().av_insert(now, other, addr).unwrap();
        node.objects().av_remove(other, at).unwrap();
    }
    assert_eq!((node.peers[p].av_refs, node.awaited.len()), (before + 1, 1));
    let srx = it.srx;
    let node = &mut it.pair.ends[1].node;
    node.objects().av_close(other).unwrap();
    node.ep_close(now, it.eps[0].0).unwrap();
    node.ep_close(now, srx).unwrap();
    let third = node.sessions().av_open(8).unwrap();
    node.objects().av_close(third).unwrap();
    assert_eq!((node.peers[p].av_refs, node.awaited.len()), (before, 0));
}
