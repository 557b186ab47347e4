//! A node as its own peer.

use super::*;

/// The address of the first endpoint, which is inserted at its own node.
fn inserted(pair: &mut Pair) -> EpAddr {
    let End { node, av, ep, peer, .. } = &mut pair.ends[0];
    let addr = node.addr_of(*ep).unwrap();
    *peer = node.sessions().av_insert(pair.now, *av, addr).unwrap();
    addr
}

/// Sends a message to the first end, from the first end, and returns how the send ended.
fn sent(pair: &mut Pair, dest: FiAddr) -> std::result::Result<u64, Error> {
    pair.ends[0].peer = dest;
    pair.send(0, IoBuf::leaked(&bytes(100)), 5, OpFlags::empty(), 7).unwrap();
    pair.run(2_000_000);
    match pair.read(0)[..] {
        [] => Err(pair.read_err(0).err),
        [cqe] => Ok(cqe.op_context),
        _ => panic!("several entries"),
    }
}

/// Goal: a node knows its own life. An address of an earlier life of its station reaches nobody,
/// and its own address reaches it, in whatever order they are inserted.
#[test]
fn an_earlier_life_of_this_station_is_nobody() {
    for lossless in [true, false] {
        let mut pair = Pair::new(1500, lossless);
        let addr = inserted(&mut pair);
        let own = pair.ends[0].peer;
        let earlier = EpAddr { incarnation: addr.incarnation + 1, ..addr };
        let End { node, av, .. } = &mut pair.ends[0];
        let old = node.sessions().av_insert(pair.now, *av, earlier).unwrap();
        let again = node.sessions().av_insert(pair.now, *av, addr).unwrap();
        let older = node.sessions().av_insert(pair.now, *av, earlier).unwrap();
        for (dest, reaches) in [(own, true), (old, false), (again, true), (older, false)] {
            let outcome = sent(&mut pair, dest);
            assert_eq!(outcome.is_ok(), reaches, "{dest}: {outcome:?}");
        }
        for context in 0..2 {
            pair.recv(0, IoBuf::leaked(&[0; 100]), 5, OpFlags::empty(), context).unwrap();
        }
        let got: Vec<_> = pair.read(0).iter().map(|cqe| (cqe.op_context, cqe.src)).collect();
        assert_eq!(got, [(0, again), (1, again)]);
    }
}

/// Goal: what a node has promised itself comes back when its own record goes to another peer.
/// Method: its address is removed from a full table, in which all others are inserted.
#[test]
fn the_record_of_a_node_itself_is_forgotten_without_a_trace() {
    let settings = NodeSettings { peer_max: 8, ..NodeSettings::default() };
    let mut pair = Pair::of([1, 2].map(|station| end_with(station, 1500, true, settings.clone())));
    inserted(&mut pair);
    pair.run(1_000_000);
    let End { node, av, peer, .. } = &mut pair.ends[0];
    let (own, now, tenant) = (node.port.station, pair.now, crate::types::Tenant::NONE);
    node.objects().av_remove(*av, *peer).unwrap();
    let mut others = (0..).map(|n| Station::at([2, 7, 0, 0, 0, n]));
    while !node.peers.is_full() {
        let (ep, incarnation, station) = (1, 0, others.next().unwrap());
        node.sessions().av_insert(now, *av, EpAddr { station, ep, incarnation }).unwrap();
    }
    node.sessions().peer_of(now, others.next().unwrap(), tenant, 8).unwrap();
    let known = node.by_station.get(&node.peers, own, tenant);
    assert_eq!((known, node.statistics().levels().blocks_lost), (None, 0));
}

/// Operations of the first end on itself, and how often each was told.
struct Told {
    pair: Pair,
    /// Another endpoint of the node, with a queue of its own that nobody reads.
    other: EpId,
    other_cq: CqId,
    outcomes: std::collections::BTreeMap<u64, u32>,
}

impl Told {
    /// Closes the other endpoint and opens it anew.
    fn open_again(&mut self) {
        let End { node, av, .. } = &mut self.pair.ends[0];
        node.ep_close(self.pair.now, self.other).unwrap();
        self.other = open_ep(node, (self.other_cq, *av), EpAttr::default());
    }

    /// Posts a receive of the other endpoint that takes any message.
    fn recv_any(&mut self, context: u64) {
        let (kind, src, tag, ignore) = (MsgKind::Tagged, FI_ADDR_UNSPEC, 0, 3);
        let (buf, flags) = (IoBuf::leaked(&[0; 4000]), OpFlags::empty());
        let req = RecvReq { kind, buf, src, tag, ignore, context, flags };
        self.pair.ends[0].node.post_recv(self.pair.now, self.other, req).unwrap();
    }

    fn count(&mut self) {
        for (context, _) in self.pair.outcomes(0) {
            *self.outcomes.get_mut(&context).unwrap() += 1;
        }
    }
}

/// Goal: whatever goes wrong with operations on oneself is told once and leaves nothing behind.
/// Method: every kind of message and one-sided operation, good and bad, drawn from a seed, with an
/// endpoint that closes in between.
#[test]
fn errors_of_self_sends_are_reported_once() {
    for round in 0..24_usize {
        let mut pair = Pair::new([256, 1500, 9000][round % 3], round % 2 == 0);
        pair.short = (round % 4 > 1).then_some(0);
        let addr = inserted(&mut pair);
        let End { node, av, peer: own, .. } = &mut pair.ends[0];
        let own = *own;
        let other_cq = node.cqs.open(256).unwrap();
        let other = open_ep(node, (other_cq, *av), EpAttr::default());
        let second = node.addr_of(other).unwrap();
        let [nobody, second] = [EpAddr { ep: 77, ..addr }, second]
            .map(|addr| node.sessions().av_insert(pair.now, *av, addr).unwrap());
        let region = pair.region(0, 8192, super::rma::ALL);
        let mut it = Told { pair, other, other_cq, outcomes: Default::default() };
        for n in 0..120_u64 {
            let draw = |k: usize, below: usize| drawn(round * 1000 + n as usize * 7 + k) % below;
            let pair = &mut it.pair;
            pair.ends[0].peer = [own, nobody, second, own][draw(0, 4)];
            let (len, none) = ([0, 8, 300, 2000, 7000, 40_000][draw(1, 6)], OpFlags::empty());
            let key = if draw(2, 4) == 0 { region.key ^ 1 } else { region.key };
            let list = RmaList::one(0, len as u64, key);
            let posted = match draw(3, 8) {
                0..3 => pair.send(0, IoBuf::leaked(&bytes(len)), n % 3, none, n).is_ok(),
                3 => {
                    let buf = IoBuf::leaked(&vec![0; len / 2 + 4]);
                    pair.recv(0, buf, n % 3, none, n).is_ok()
                }
                4 => pair.write(&bytes(len), list, none, n).is_ok(),
                5 => pair.read_to(IoBuf::leaked(&vec![0; len]), list, n).is_ok(),
                what => {
                    match (what, draw(4, 4)) {
                        (6, 0) => it.open_again(),
                        (6, _) => it.recv_any(1000 + n),
                        _ => pair.run(20_000),
                    }
                    false
                }
            };
            it.outcomes.extend(posted.then_some((n, 0)));
            it.count();
        }
        it.pair.run(400_000_000);
        let End { node, ep, .. } = &mut it.pair.ends[0];
        node.ep_close(it.pair.now, *ep).unwrap();
        node.ep_close(it.pair.now, it.other).unwrap();
        it.count();
        assert!(it.outcomes.values().all(|&n| n == 1), "round {round}: {:?}", it.outcomes);
        it.pair.run(400_000_000);
        assert_nothing_left(&it.pair.ends[0].node, round);
    }
}

/// Nothing is under way, and no credit is missing.
fn assert_nothing_left(node: &Node, round: usize) {
    let levels = Levels { timers: 0, ..node.statistics().levels() };
    assert_eq!(levels, Levels { peers: 2, ..Levels::default() }, "round {round}");
    for (_, peer) in node.peers.iter() {
        let awaited = (peer.answers, peer.reads, peer.responses, peer.long_answers);
        assert_eq!((awaited, peer.unexpected), ((0, 0, 0, 0), 0), "round {round}");
        assert_eq!(peer.credits(), peer.outstanding(), "round {round}");
    }
}
