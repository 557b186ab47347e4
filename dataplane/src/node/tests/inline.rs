//! The inlined paths of a short tagged message, at both ends: what they take, and what they leave
//! alone.

use super::super::peer::ACK_EVERY_LOSSLESS;
use super::*;
use crate::idx::PeerIdx;

/// The peer that was there first.
const FIRST: PeerIdx = PeerIdx::of(0);

/// Sends a tagged message of `len` bytes with `try_send_inline`, if that takes it.
fn plain(pair: &mut Pair, ep: EpId, len: usize, flags: OpFlags, no_completion: bool) -> bool {
    let now = pair.now;
    let req = tagged(pair, len, flags, no_completion);
    let End { node, out, .. } = &mut pair.ends[0];
    let before = out.len();
    let sent = node.try_send_inline(ep, &req, &mut sink(out), || now);
    assert_eq!(out.len() - before, usize::from(sent), "a frame leaves if it was sent");
    sent
}

fn tagged(pair: &Pair, len: usize, flags: OpFlags, no_completion: bool) -> SendReq {
    let (kind, buf, dest) = (MsgKind::Tagged, IoBuf::leaked(&bytes(len)), pair.ends[0].peer);
    SendReq { kind, buf, dest, tag: 5, data: 1, context: 3, flags, no_completion }
}

/// Sends 64 bytes with `try_send_inline` or, if the quota has to be refreshed, with `try_send`.
/// Says whether the first took it.
fn short(pair: &mut Pair) -> bool {
    let (now, ep) = (pair.now, pair.ends[0].ep);
    let usual = plain(pair, ep, 64, OpFlags::empty(), false);
    if !usual {
        let mut req = tagged(pair, 64, OpFlags::empty(), false);
        let End { node, out, .. } = &mut pair.ends[0];
        assert!(node.try_send(ep, &mut req, &mut sink(out), || now));
    }
    usual
}

/// Another endpoint of the first node, with completions on demand, or with a counter of sends.
fn another(pair: &mut Pair, selective: bool, counted: bool) -> EpId {
    let End { node, cq, av, .. } = &mut pair.ends[0];
    let caps = Caps::MSG | Caps::TAGGED;
    let ep = node.eps.open(EpAttr { caps, ..EpAttr::default() }).unwrap();
    let mut flags = BindFlags::TRANSMIT | BindFlags::RECV;
    flags.set(BindFlags::SELECTIVE_COMPLETION, selective);
    node.objects().ep_bind_cq(ep, *cq, flags).unwrap();
    node.objects().ep_bind_av(ep, *av).unwrap();
    if counted {
        let cntr = node.cntrs.open(CntrEvents::Comp).unwrap();
        node.operations().ep_bind_cntr(ep, cntr, BindFlags::TRANSMIT).unwrap();
    }
    node.ep_enable(ep).unwrap();
    ep
}

/// Two nodes whose session is open.
fn opened(lossless: bool) -> Pair {
    let mut pair = Pair::new(9000, lossless);
    pair.recv(1, IoBuf::EMPTY, 1, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::EMPTY, 1, OpFlags::empty(), 2).unwrap();
    pair.run(1_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    // Records of receives that have been used are there for the next ones.
    for _ in 0..4 {
        pair.recv(0, IoBuf::EMPTY, 1, OpFlags::empty(), 1).unwrap();
    }
    for _ in 0..4 {
        pair.send(1, IoBuf::EMPTY, 1, OpFlags::empty(), 2).unwrap();
    }
    pair.run(1_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (4, 4));
    pair
}

#[test]
fn a_usual_send_is_told_of_and_not_counted() {
    let mut pair = opened(true);
    let (none, ep) = (OpFlags::empty(), pair.ends[0].ep);
    let (on_demand, counted) = (another(&mut pair, true, false), another(&mut pair, false, true));
    assert!(!short(&mut pair), "nobody has asked yet how many may leave");
    assert_eq!(pair.read(0).len(), 1);
    // (endpoint, bytes, flags, without a completion, whether it is taken)
    let cases = [
        (ep, 64, none, false, true),
        (ep, 256, none, false, true),
        (ep, 257, none, false, false),
        (ep, 64, OpFlags::REMOTE_CQ_DATA, false, false),
        (ep, 64, OpFlags::DELIVERY_COMPLETE, false, false),
        (ep, 64, OpFlags::INJECT, true, true),
        (on_demand, 64, none, false, false),
        (on_demand, 64, OpFlags::COMPLETION, false, true),
        (on_demand, 64, none, true, true),
        (counted, 64, none, false, false),
    ];
    for (at, (ep, len, flags, silent, usual)) in cases.into_iter().enumerate() {
        assert_eq!(plain(&mut pair, ep, len, flags, silent), usual, "case {at}");
    }
    let told = cases.iter().filter(|case| case.4 && !case.3).count();
    assert_eq!(pair.read(0).len(), told);
    let mut lossy = opened(false);
    let ep = lossy.ends[0].ep;
    assert!(!plain(&mut lossy, ep, 64, none, false), "where frames get lost it needs a record");
}

/// Goal: nobody is `FI_ADDR_UNSPEC`, whoever an endpoint has sent to last and whatever it asks of
/// its messages.
#[test]
fn no_message_goes_to_nobody() {
    let mut pair = opened(true);
    let (own, now) = (pair.ends[0].ep, pair.now);
    let eps = [own, another(&mut pair, true, false), another(&mut pair, false, true)];
    for (at, ep) in eps.into_iter().enumerate() {
        let mut req = tagged(&pair, 64, OpFlags::COMPLETION, false);
        let End { node, out, .. } = &mut pair.ends[0];
        assert!(node.try_send(ep, &mut req, &mut sink(out), || now), "endpoint {at}");
        let frames = out.len();
        req.dest = FI_ADDR_UNSPEC;
        assert!(!node.try_send_inline(ep, &req, &mut sink(out), || now), "endpoint {at}");
        assert!(!node.try_send(ep, &mut req, &mut sink(out), || now), "endpoint {at}");
        assert_eq!(out.len(), frames, "endpoint {at}");
        assert!(node.post_send(now, ep, req).is_err(), "endpoint {at}");
    }
}

#[test]
fn a_usual_receive_is_told_of_and_in_one_piece() {
    let mut pair = opened(true);
    let (none, ep) = (OpFlags::empty(), pair.ends[0].ep);
    let on_demand = another(&mut pair, true, false);
    let mut pieces = IoBuf::leaked(&[0; 4]);
    assert!(pieces.append(IoBuf::leaked(&[0; 4])));
    let one = || IoBuf::leaked(&[0; 8]);
    let cases = [
        (ep, one(), none, true),
        (ep, pieces, none, false),
        (ep, one(), OpFlags::CLAIM, false),
        (on_demand, one(), none, false),
        (on_demand, one(), OpFlags::COMPLETION, true),
    ];
    for (at, (ep, buf, flags, usual)) in cases.into_iter().enumerate() {
        let (kind, src, context) = (MsgKind::Tagged, FI_ADDR_UNSPEC, 7);
        let req = RecvReq { kind, buf, src, tag: 9, ignore: 0, context, flags };
        assert_eq!(pair.ends[0].node.objects().try_post_recv(ep, &req), usual, "case {at}");
    }
}

/// Goal: however many inlined messages go one way only, their sender is granted new credits and
/// gets its acknowledgements, and every receive ends once.
#[test]
fn usual_messages_go_one_way_for_long() {
    let mut pair = opened(true);
    let (mut received, mut usual) = (0, 0);
    let acked_before = pair.ends[1].node.counters().tx_acks;
    for _ in 0..2000 {
        pair.recv(1, IoBuf::leaked(&[0; 64]), 5, OpFlags::empty(), 1).unwrap();
        usual += usize::from(short(&mut pair));
        pair.run(5_000);
        received += pair.read(1).len();
        pair.read(0);
        let peer = &pair.ends[1].node.peers[FIRST];
        assert!(peer.owed <= ACK_EVERY_LOSSLESS, "message {received}: {} are owed", peer.owed);
    }
    pair.run(1_000_000);
    received += pair.read(1).len();
    assert_eq!(received, 2000);
    // The first after each acknowledgement may have to refresh the quota itself.
    assert!(usual > 1980, "{usual} have taken the fast path");
    let acks = pair.ends[1].node.counters().tx_acks - acked_before;
    // And one for each time that the credits double.
    let least = 2000 / u64::from(ACK_EVERY_LOSSLESS);
    assert!((least..=least + 8).contains(&acks), "{acks}: nobody has to ask for one");
}

/// Goal: who is answered knows by that what has arrived, and asks for no acknowledgement, however
/// many messages went each way.
#[test]
fn an_answer_is_acknowledgement_enough() {
    let mut pair = opened(true);
    let mut asked = 0;
    for n in 0..1000 {
        for (from, to) in [(0, 1), (1, 0)] {
            pair.recv(to, IoBuf::leaked(&[0; 64]), 5, OpFlags::empty(), 1).unwrap();
            pair.short = Some(0);
            pair.send(from, IoBuf::leaked(&bytes(64)), 5, OpFlags::empty(), 3).unwrap();
            asked += pair.ends[from].out.iter().filter(|frame| frame[15] & 0x40 != 0).count();
            pair.run(5_000);
            assert_eq!((pair.read(to).len(), pair.read(from).len()), (1, 1), "round {n}");
        }
    }
    assert_eq!(asked, 0);
}

/// Goal: what stands between inlined messages (long ones, ones with remote CQ data, ones nobody has
/// asked for, refused ones) takes of the countdown what it took of acknowledgements and credits, so
/// that it never lets more pass than may.
#[test]
fn the_countdown_promises_no_more_than_there_is() {
    let mut pair = opened(true);
    let there = pair.ends[0].peer;
    let mut addr = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
    addr.ep = 77;
    let End { node, av, .. } = &mut pair.ends[0];
    let nowhere = node.sessions().av_insert(Instant(0), *av, addr).unwrap();
    let message = || IoBuf::leaked(&bytes(64));
    let receive = |pair: &mut Pair| {
        pair.recv(1, IoBuf::leaked(&[0; 300]), 5, OpFlags::empty(), 1).unwrap();
    };
    for round in 0..400 {
        let early = round % 7 == 2;
        if !early {
            receive(&mut pair);
        }
        match round % 7 {
            3 => pair.send(0, message(), 5, OpFlags::REMOTE_CQ_DATA, 3).unwrap(),
            4 => pair.send(0, IoBuf::leaked(&bytes(300)), 5, OpFlags::empty(), 3).unwrap(),
            5 => {
                pair.ends[0].peer = nowhere;
                pair.send(0, message(), 5, OpFlags::empty(), 3).unwrap();
                pair.ends[0].peer = there;
                pair.run(5_000);
                assert_eq!(pair.read(0).len(), 1, "it left");
                pair.send(0, message(), 5, OpFlags::empty(), 3).unwrap();
            }
            _ => {
                short(&mut pair);
            }
        }
        pair.run(5_000);
        let peer = &pair.ends[1].node.peers[FIRST];
        let room = peer.rx_room(ACK_EVERY_LOSSLESS);
        assert!(peer.rx_quota <= room, "round {round}: {} of {room}", peer.rx_quota);
        if early {
            receive(&mut pair);
            pair.run(5_000);
        }
        pair.read(0);
        assert_eq!(pair.read(1).len(), 1, "round {round}");
    }
}

/// The shortest way does not count probes off, so it is shut while there are any.
#[test]
fn a_probe_without_an_answer_ends_the_shortest_way() {
    let mut pair = opened(true);
    for _ in 0..2 {
        pair.recv(1, IoBuf::leaked(&[0; 64]), 5, OpFlags::empty(), 1).unwrap();
    }
    short(&mut pair);
    pair.run(5_000);
    let node = &mut pair.ends[1].node;
    assert!(node.peers[FIRST].rx_quota > 0, "the next one might take it");
    // It waits for something, and then long enough.
    node.peers[FIRST].coll_waits = 1;
    node.on_timer(pair.now + node.settings.t_dead_ns / 5, FIRST, &mut NoReply);
    assert_eq!((node.peers[FIRST].probes, node.peers[FIRST].rx_quota), (1, 0));
    node.peers[FIRST].coll_waits = 0;
    short(&mut pair);
    pair.run(5_000);
    assert_eq!((pair.ends[1].node.peers[FIRST].probes, pair.read(1).len()), (0, 2));
}
