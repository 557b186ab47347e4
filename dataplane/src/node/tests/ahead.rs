//! What an endpoint knows or takes in advance changes nothing that anybody can see.

use super::*;

/// Room in the queue and of each endpoint's receives: little, so that both are full often.
const QUEUE: usize = 64;
const RECEIVES: usize = 30;

/// The second node of a pair has three endpoints more, with one small queue between them; the last
/// tells of receives on demand.
struct World {
    pair: Pair,
    cq: CqId,
    eps: Vec<(EpId, FiAddr)>,
    /// Receives that were posted to each and have not ended.
    posted: Vec<usize>,
    /// How many receives were posted unasked.
    unasked: usize,
}

impl World {
    fn new() -> Self {
        let mut pair = Pair::new(9000, true);
        let cq = pair.ends[1].node.cqs.open(QUEUE).unwrap();
        let mut world = Self { pair, cq, eps: Vec::new(), posted: vec![0; 3], unasked: 0 };
        for i in 0..3 {
            let ep = world.open(i);
            world.eps.push(ep);
        }
        world
    }

    fn open(&mut self, i: usize) -> (EpId, FiAddr) {
        let [from, to] = &mut self.pair.ends;
        let caps = Caps::MSG | Caps::TAGGED | Caps::MULTI_RECV;
        let attr = EpAttr { caps, rx_size: RECEIVES, ..EpAttr::default() };
        let ep = to.node.eps.open(attr).unwrap();
        let mut flags = BindFlags::TRANSMIT | BindFlags::RECV;
        flags.set(BindFlags::SELECTIVE_COMPLETION, i == 2);
        to.node.objects().ep_bind_cq(ep, self.cq, flags).unwrap();
        to.node.objects().ep_bind_av(ep, to.av).unwrap();
        to.node.ep_enable(ep).unwrap();
        let addr = to.node.addr_of(ep).unwrap();
        (ep, from.node.sessions().av_insert(self.pair.now, from.av, addr).unwrap())
    }

    /// Closes and opens an endpoint. What was posted to it ends, and is told.
    fn reopen(&mut self, i: usize) {
        let (ep, addr) = self.eps[i];
        self.pair.ends[1].node.ep_close(self.pair.now, ep).unwrap();
        let from = &mut self.pair.ends[0];
        from.node.objects().av_remove(from.av, addr).unwrap();
        self.posted[i] = 0;
        self.eps[i] = self.open(i);
    }

    /// Posts a receive on the fast path if it goes there, else the long one. It is refused if, and
    /// only if, one of the queues is full.
    fn recv(&mut self, i: usize, kind: MsgKind, (short, flags): (bool, OpFlags)) {
        let (ep, buf) = (self.eps[i].0, IoBuf::leaked(&[0; 64]));
        let (src, ignore) = (FI_ADDR_UNSPEC, u64::from(!short));
        let req = RecvReq { kind, buf, src, tag: 0, ignore, context: i as u64, flags };
        let cq = &self.pair.ends[1].node.cqs[self.cq.0.idx()].cq;
        let reserved = cq.reserved() - self.rx_reserved_total() as usize;
        let full = self.posted[i] == RECEIVES || cq.ready() + reserved == cq.capacity();
        let end = &mut self.pair.ends[1];
        let unasked = end.node.eps[ep.0.idx()].rx_reserved[kind as usize] > 0;
        let went = short && end.node.objects().try_post_recv(ep, &req);
        self.unasked += usize::from(went && unasked);
        let posted = if went { Ok(()) } else { end.node.post_recv(self.pair.now, ep, req) };
        assert_eq!(posted, if full { Err(Error::Again) } else { Ok(()) });
        self.posted[i] += usize::from(!full);
    }

    fn rx_reserved_total(&self) -> u32 {
        let node = &self.pair.ends[1].node;
        self.eps.iter().map(|(ep, _)| node.eps[ep.0.idx()].rx_reserved_total()).sum()
    }

    fn send(&mut self, i: usize, kind: MsgKind, context: u64) {
        let end = &mut self.pair.ends[0];
        let (buf, dest) = (IoBuf::leaked(&bytes(64)), self.eps[i].1);
        let (flags, no_completion) = (OpFlags::empty(), false);
        let mut req = SendReq { kind, buf, dest, tag: 0, data: 0, context, flags, no_completion };
        let now = self.pair.now;
        let mut out = sink(&mut end.out);
        if !end.node.try_send_inline(end.ep, &req, &mut out, || now)
            && !end.node.try_send(end.ep, &mut req, &mut out, || now)
        {
            drop(out);
            // It may be refused: nobody reads the sender's queue but the end of each round.
            let _ = end.node.post_send(now, end.ep, req);
        }
    }

    fn read(&mut self, most: usize) {
        let mut ended = Vec::new();
        let end = &mut self.pair.ends[1];
        end.node.cq_take(self.cq, most, |cqe| ended.push(cqe.op_context));
        while end.node.receiving().cq_readerr(self.cq).is_ok() {}
        let [from, _] = &mut self.pair.ends;
        from.node.cq_take(from.cq, usize::MAX, |_| ());
        self.note();
    }

    /// How many receives are posted is asked of matching, which knows nothing of room.
    fn note(&mut self) {
        let node = &self.pair.ends[1].node;
        for (posted, (ep, _)) in self.posted.iter_mut().zip(&self.eps) {
            let ep = &node.eps[ep.0.idx()];
            *posted = ep.matcher.iter().map(|matcher| matcher.posted_len()).sum();
        }
    }

    /// Whatever may go unasked is what the slow path would have said yes to.
    fn check(&self) {
        let node = &self.pair.ends[1].node;
        for (&posted, (ep, _)) in self.posted.iter().zip(&self.eps) {
            let ep = &node.eps[ep.0.idx()];
            assert_eq!((ep.rx_used - ep.rx_reserved_total()) as usize, posted);
            assert!(ep.rx_used <= ep.rx_size);
            for (kind, &left) in ep.rx_reserved.iter().enumerate() {
                let waits = ep.matcher[kind].unexpected_len() > 0;
                assert!(left == 0 || ep.may_recv[kind] && !ep.cq_blocked && !waits, "kind {kind}");
            }
        }
        let table = &node.cqs[self.cq.0.idx()];
        assert!(table.cq.reserved() >= self.rx_reserved_total() as usize);
        assert!(!table.cq_blocked || self.rx_reserved_total() == 0, "it is somebody else's");
        routes_are_sure(node);
        routes_are_sure(&self.pair.ends[0].node);
    }
}

fn routes_are_sure(node: &Node) {
    for (_, ep) in node.eps.iter() {
        let route = ep.route;
        if route.dest != FI_ADDR_UNSPEC {
            let entry = node.avs[ep.av].av.lookup(route.dest).unwrap();
            assert_eq!((entry.peer, entry.ep, entry.rx_ctx), (route.peer, route.ends[0], 0));
            assert!(route.inc == 0 || route.inc == node.peers[route.peer].inc);
        }
        for (dest, fast) in route.fast_dest.into_iter().zip(ep.fast_send) {
            assert!(dest == FI_ADDR_UNSPEC || dest == route.dest && fast);
        }
    }
}

/// Goal: receives that are posted unasked are refused when the others would be, never leave less
/// room to anybody, and give it back. Method: three endpoints with one small queue, everything
/// drawn; how many are posted is counted apart.
#[test]
fn room_that_is_taken_in_advance_is_nobodys_loss() {
    let mut unasked = 0;
    for seed in 0..60 {
        let mut world = World::new();
        for turn in 0..400 {
            let draw = drawn(seed * 1_000 + turn);
            let (i, what) = (draw % 3, draw / 3 % 32);
            let kind = if (draw / 97).is_multiple_of(4) { MsgKind::Msg } else { MsgKind::Tagged };
            let none = OpFlags::empty();
            match what {
                0..16 => {
                    let flags = if i == 2 { OpFlags::COMPLETION } else { none };
                    world.recv(i, kind, (true, flags));
                }
                16..18 => world.recv(i, kind, (false, OpFlags::COMPLETION)),
                18..23 => world.send(i, kind, turn as u64),
                23..28 => world.pair.run(5_000),
                28..31 => world.read(draw / 7 % 24),
                _ if (draw / 11).is_multiple_of(4) => world.reopen(i),
                _ => {}
            }
            world.note();
            world.check();
        }
        unasked += world.unasked;
        for i in 0..3 {
            world.pair.ends[1].node.ep_close(world.pair.now, world.eps[i].0).unwrap();
        }
        let node = &world.pair.ends[1].node;
        assert_eq!(node.cqs[world.cq.0.idx()].cq.reserved(), 0, "seed {seed}");
    }
    assert!(unasked > 1_000, "{unasked} receives were posted unasked");
}

/// What is counted of a node is the sum over its endpoints, those included that are closed.
#[test]
fn messages_of_closed_endpoints_stay_counted() {
    let mut pair = Pair::new(9000, true);
    for _ in 0..3 {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
        pair.run(1_000_000);
    }
    for closed in [false, true] {
        let counted = pair.ends.each_ref().map(|end| {
            let counters = end.node.counters();
            (counters.msgs_sent, counters.msgs_received)
        });
        assert_eq!(counted, [(3, 0), (0, 3)], "closed: {closed}");
        if !closed {
            pair.ends.iter_mut().for_each(|end| end.node.ep_close(pair.now, end.ep).unwrap());
        }
    }
}

/// Goal: a message never goes to another life of its peer than the one that its address names.
#[test]
fn an_earlier_life_is_not_reached_the_usual_way() {
    let mut pair = Pair::new(9000, true);
    for _ in 0..3 {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
        pair.short = Some(0);
        pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
        pair.run(1_000_000);
    }
    let [from, to] = &mut pair.ends;
    let sender = |from: &End| from.node.eps[from.ep.0.idx()].route;
    assert_eq!(sender(from).fast_dest, [from.peer; 2], "it takes the fast path");
    // The same station, started anew.
    let settings = NodeSettings { t_dead_ns: 500_000_000, ..NodeSettings::default() };
    let mut anew = end_with(2, 9000, true, settings);
    anew.node.settings.incarnation = 4711;
    let addr = anew.node.addr_of(anew.ep).unwrap();
    let old = from.peer;
    from.peer = from.node.sessions().av_insert(pair.now, from.av, addr).unwrap();
    assert_eq!(sender(from).dest, FI_ADDR_UNSPEC);
    let own = from.node.addr_of(from.ep).unwrap();
    anew.peer = anew.node.sessions().av_insert(pair.now, anew.av, own).unwrap();
    *to = anew;
    for _ in 0..3 {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
        pair.run(1_000_000);
        routes_are_sure(&pair.ends[0].node);
    }
    assert_eq!(pair.read(1).len(), 3);
    pair.read(0);
    pair.ends[0].peer = old;
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 9).unwrap();
    let err = pair.read_err(0);
    assert_eq!((err.err, err.cqe.op_context), (Error::ConnReset, 9));
    assert_ne!(sender(&pair.ends[0]).dest, old);
}

/// Whatever changes what an endpoint may do, its receives have to ask again; the room for them is
/// still known.
#[test]
fn an_endpoint_that_changes_asks_anew() {
    let mut world = World::new();
    let (ep, _) = world.eps[0];
    let changes: [fn(&mut Node, EpId); 3] = [
        |node, ep| node.eps[ep.0.idx()].set_cq_blocked(true),
        |node, ep| node.eps[ep.0.idx()].set_cq_blocked(false),
        |node, ep| {
            let cntr = node.cntrs.open(CntrEvents::Comp).unwrap();
            node.operations().ep_bind_cntr(ep, cntr, BindFlags::RECV).unwrap();
        },
    ];
    for (at, change) in changes.into_iter().enumerate() {
        for kind in [MsgKind::Msg, MsgKind::Tagged, MsgKind::Tagged] {
            world.recv(0, kind, (at != 1, OpFlags::empty()));
        }
        let node = &mut world.pair.ends[1].node;
        let before = node.eps[ep.0.idx()].rx_reserved_total();
        assert!(at == 1 || before > 0);
        change(node, ep);
        let it = &node.eps[ep.0.idx()];
        assert_eq!((it.rx_reserved, it.rx_reserved_total()), ([0; 2], before), "change {at}");
        world.check();
    }
    for _ in 0..3 {
        world.send(0, MsgKind::Tagged, 1);
        world.pair.run(1_000_000);
        world.read(QUEUE);
    }
    let End { node, ep, .. } = &mut world.pair.ends[0];
    let to = world.eps[0].1;
    assert_eq!(node.eps[ep.0.idx()].route.fast_dest, [to; 2]);
    let cntr = node.cntrs.open(CntrEvents::Comp).unwrap();
    node.operations().ep_bind_cntr(*ep, cntr, BindFlags::TRANSMIT).unwrap();
    assert_eq!(
        node.eps[ep.0.idx()].route.fast_dest,
        [FI_ADDR_UNSPEC; 2],
        "it is counted from now on"
    );
}
