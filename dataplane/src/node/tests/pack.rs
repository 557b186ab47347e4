//! Messages that share a packet with others behind them.

use super::*;
use crate::rel::congestion::Controller;

const MORE: OpFlags = OpFlags::MORE;

/// A pair with an open session in which the sender has credit for many messages.
fn warm() -> Pair {
    let mut pair = Pair::new(1500, false);
    for n in 0..40 {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), n).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), n).unwrap();
        pair.run(50_000);
    }
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (40, 40));
    pair
}

/// Contexts of what has completed, in order.
fn contexts(pair: &mut Pair, i: usize) -> Vec<u64> {
    pair.read(i).iter().map(|cqe| cqe.op_context).collect()
}

/// Messages of the request that stands for an open packet.
fn open_count(pair: &Pair) -> Option<u64> {
    let node = &pair.ends[0].node;
    node.tx.wrs.get(node.packs.open).map(|wr| wr.tag)
}

fn credits(pair: &Pair) -> u32 {
    pair.ends[0].node.peers.iter().next().unwrap().1.credits()
}

/// Goal: messages that say that more follow share a frame with the one that does not, and each
/// arrives and completes as if it had one of its own, whatever its length and data. Method: lengths
/// around the padding of a record, remote CQ data in every third, a buffer that was used before.
#[test]
fn messages_before_others_share_a_frame() {
    let mut pair = warm();
    let mut lens = [0, 1, 7, 8, 9, 64, 127, 128, 129, 200, 0, 3];
    for tag in [5, u64::MAX, 6] {
        // Over what stands in the buffer from before.
        lens.reverse();
        let flags =
            |i: usize| if i.is_multiple_of(3) { OpFlags::REMOTE_CQ_DATA } else { OpFlags::empty() };
        let mut looks = Vec::new();
        for (i, &len) in lens.iter().enumerate() {
            let (buf, look) = shared(len + 1);
            looks.push(look);
            pair.recv(1, buf, tag, OpFlags::empty(), i as u64).unwrap();
        }
        let frames = pair.ends[0].node.counters().tx_frames;
        for (i, &len) in lens.iter().enumerate() {
            let more = if i + 1 < lens.len() { MORE } else { OpFlags::empty() };
            pair.send(0, IoBuf::leaked(&bytes(len)), tag, flags(i) | more, i as u64).unwrap();
        }
        assert_eq!(open_count(&pair), Some(lens.len() as u64));
        pair.run(100_000);
        assert_eq!(pair.ends[0].node.counters().tx_frames, frames + 1);
        let got = pair.read(1);
        assert_eq!(got.len(), lens.len());
        for (i, (cqe, &len)) in got.iter().zip(&lens).enumerate() {
            assert_eq!((cqe.op_context, cqe.len), (i as u64, len as u64));
            assert_eq!(cqe.flags.contains(CqFlags::REMOTE_CQ_DATA), i.is_multiple_of(3), "{i}");
            assert_eq!(cqe.data, if i.is_multiple_of(3) { 4711 } else { 0 }, "{i}");
            assert_eq!(contents(&looks[i]), [&bytes(len)[..], &[0xEE]].concat(), "{i}");
        }
        assert_eq!(contexts(&mut pair, 0), (0..lens.len() as u64).collect::<Vec<_>>());
    }
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// Goal: nothing overtakes: what cannot go with an open packet, being long, of the other kind, or
/// one too many, waits behind it; and all of it arrives though frames get lost.
#[test]
fn an_open_packet_is_not_overtaken() {
    for drop in [0, 3] {
        let mut pair = warm();
        (pair.drop, pair.scatter) = (drop, true);
        let (mut looks, mut want) = (Vec::new(), [Vec::new(), Vec::new()]);
        for i in 0..60_u64 {
            let (len, tag) = match i % 20 {
                7 => (5000, 5),
                13 => (8, u64::MAX),
                _ => (200, 5),
            };
            let (buf, look) = shared(len);
            looks.push((look, len));
            pair.recv(1, buf, tag, OpFlags::empty(), i).unwrap();
            let flags = if i.is_multiple_of(11) { OpFlags::empty() } else { MORE };
            pair.send(0, IoBuf::leaked(&bytes(len)), tag, flags, i).unwrap();
            if flags != MORE {
                let End { node, out, .. } = &mut pair.ends[0];
                node.transmit(pair.now, &mut sink(out));
            }
            want[usize::from(tag == 5)].push(i);
        }
        pair.run(1_000_000_000);
        let got = pair.read(1);
        let of = |tagged: bool| -> Vec<u64> {
            let kind = |cqe: &&Cqe| cqe.flags.contains(CqFlags::TAGGED) == tagged;
            got.iter().filter(kind).map(|cqe| cqe.op_context).collect()
        };
        assert_eq!([of(false), of(true)], want);
        assert_eq!(pair.read(0).len(), 60);
        looks.iter().for_each(|(look, len)| assert_eq!(contents(look), bytes(*len)));
        pair.run(600_000_000);
        pair.assert_quiet();
    }
}

/// Goal: messages that waited for their session share packets. Method: they are posted before it is
/// opened.
#[test]
fn messages_that_waited_share_packets() {
    const COUNT: u64 = 12;
    let mut pair = Pair::new(1500, false);
    for n in 0..COUNT {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), n).unwrap();
        pair.send(0, IoBuf::leaked(&[7; 8]), 5, OpFlags::empty(), n).unwrap();
    }
    pair.run(1_000_000);
    let all: Vec<u64> = (0..COUNT).collect();
    assert_eq!((contexts(&mut pair, 0), contexts(&mut pair, 1)), (all.clone(), all));
    let frames = pair.ends[0].node.counters().tx_frames;
    assert!(frames < COUNT / 2, "{frames} frames");
}

/// Goal: while the window is closed messages gather in packets though nobody says that more follow.
#[test]
fn messages_gather_while_the_window_is_closed() {
    let mut pair = warm();
    let frames = pair.ends[0].node.counters().tx_frames;
    let p = pair.ends[0].node.peers.iter().next().unwrap().0;
    pair.ends[0].node.peers[p].snd.cwnd = Controller::default();
    // Nothing comes back for a while.
    let mut posted = 0;
    while pair.ends[0].node.peers[p].snd.open() {
        pair.send(0, IoBuf::leaked(&[7; 8]), 5, OpFlags::empty(), posted).unwrap();
        let End { node, out, .. } = &mut pair.ends[0];
        node.transmit(pair.now, &mut sink(out));
        posted += 1;
    }
    let sent = pair.ends[0].node.counters().tx_frames - frames;
    for _ in 0..10 {
        pair.send(0, IoBuf::leaked(&[7; 8]), 5, OpFlags::empty(), posted).unwrap();
        posted += 1;
    }
    assert_eq!(open_count(&pair), Some(10), "after {sent} frames");
    for n in 0..posted {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), n).unwrap();
    }
    let mut got = Vec::new();
    while (got.len() as u64) < posted {
        pair.run(50_000);
        got.extend(contexts(&mut pair, 1));
        pair.read(0);
    }
    assert_eq!(got, (0..posted).collect::<Vec<_>>());
}

/// Goal: every message of a packet ends with an error entry of its own when its endpoint closes,
/// before and after the packet has left, and credit and records are as before.
#[test]
fn each_message_of_a_packet_is_canceled_with_its_endpoint() {
    for leaves in [false, true] {
        let mut pair = warm();
        let before = credits(&pair);
        for n in 0..5 {
            pair.send(0, IoBuf::leaked(&[3; 100]), 5, MORE, n).unwrap();
        }
        assert_eq!((open_count(&pair), credits(&pair)), (Some(5), before - 5));
        if leaves {
            let End { node, out, .. } = &mut pair.ends[0];
            assert_eq!(node.transmit(pair.now, &mut sink(out)), 1);
        }
        let end = &mut pair.ends[0];
        end.node.ep_close(pair.now, end.ep).unwrap();
        assert_eq!(open_count(&pair), None);
        for n in 0..5 {
            let err = pair.read_err(0);
            assert_eq!((err.err, err.cqe.op_context, err.cqe.tag), (Error::Canceled, n, 5));
        }
        assert!(pair.ends[0].node.receiving().cq_readerr(pair.ends[0].cq).is_err());
        assert_eq!(credits(&pair), if leaves { before - 5 } else { before });
        pair.run(600_000_000);
        let levels = pair.ends[0].node.statistics().levels();
        assert_eq!(levels, Levels { peers: 1, timers: levels.timers, ..Levels::default() });
    }
}

/// Goal: any message of a packet that has not left can be canceled; the others arrive as they were
/// posted, and credit and records are as before. Method: every subset of five of different lengths,
/// some with remote CQ data; the message that closes the packet comes after, or never.
#[test]
fn a_message_of_an_open_packet_can_be_canceled() {
    let flags = |n: u64| if n % 2 == 1 { OpFlags::REMOTE_CQ_DATA } else { OpFlags::empty() };
    for (mask, closes) in (1..32_u32).flat_map(|mask| [(mask, true), (mask, false)]) {
        let mut pair = warm();
        let before = credits(&pair);
        let lens = [100_usize, 0, 129, 7, 200];
        for (n, &len) in (0..).zip(&lens) {
            pair.send(0, IoBuf::leaked(&bytes(len)), 5, MORE | flags(n), n).unwrap();
        }
        let (gone, left): (Vec<u64>, Vec<u64>) = (0..5).partition(|n| mask >> n & 1 == 1);
        for &n in gone.iter().rev() {
            let end = &mut pair.ends[0];
            end.node.operations().cancel(end.ep, n).unwrap();
            assert_eq!(end.node.operations().cancel(end.ep, n), Err(Error::NoData));
            let err = pair.read_err(0);
            assert_eq!((err.err, err.cqe.op_context, err.cqe.tag), (Error::Canceled, n, 5));
        }
        let open = (!left.is_empty()).then_some(left.len() as u64);
        assert_eq!((open_count(&pair), credits(&pair)), (open, before - left.len() as u32));
        let mut want = left.clone();
        if closes {
            want.push(5);
            pair.send(0, IoBuf::leaked(&bytes(1)), 5, OpFlags::empty(), 5).unwrap();
        }
        let mut looks = Vec::new();
        for &n in &want {
            let (buf, look) = shared(300);
            looks.push((look, *lens.get(n as usize).unwrap_or(&1)));
            pair.recv(1, buf, 5, OpFlags::empty(), n).unwrap();
        }
        pair.run(100_000);
        assert_eq!((contexts(&mut pair, 0), contexts(&mut pair, 1)), (want.clone(), want));
        looks.iter().for_each(|(look, len)| assert_eq!(contents(look)[..*len], bytes(*len)[..]));
        pair.run(600_000_000);
        pair.assert_quiet();
    }
}

/// Goal: a packet to a peer that does not answer ends each of its messages with an error, and the
/// records are as before.
#[test]
fn each_message_of_a_packet_learns_that_the_peer_is_dead() {
    let mut pair = warm();
    pair.drop = 1;
    for n in 0..5 {
        pair.send(0, IoBuf::leaked(&[3; 100]), 5, MORE, n).unwrap();
    }
    pair.run(560_000_000);
    for n in 0..5 {
        let err = pair.read_err(0);
        assert_eq!((err.err, err.cqe.op_context), (Error::HostUnreach, n));
    }
    let levels = pair.ends[0].node.statistics().levels();
    assert_eq!(levels, Levels { peers: 1, timers: levels.timers, ..Levels::default() });
}

/// Goal: a packet for an endpoint that is not there is refused, and each of its messages fails; the
/// session goes on.
#[test]
fn each_message_of_a_refused_packet_fails() {
    let mut pair = warm();
    let other = &mut pair.ends[1];
    other.node.ep_close(pair.now, other.ep).unwrap();
    for n in 0..5 {
        pair.send(0, IoBuf::leaked(&[3; 100]), 5, MORE, n).unwrap();
    }
    pair.run(1_000_000);
    for n in 0..5 {
        let err = pair.read_err(0);
        assert_eq!((err.err, err.cqe.op_context), (Error::ConnRefused, n));
    }
    assert_eq!(pair.ends[0].node.statistics().levels().packs, 0);
}

/// Goal: a message looks for a packet to share if it says that more follow, or if one is open.
#[test]
fn a_message_looks_for_an_open_packet_only_if_it_may_share_one() {
    let mut pair = warm();
    let joins = |pair: &Pair, flags| {
        let (kind, buf, dest) = (MsgKind::Tagged, IoBuf::EMPTY, pair.ends[0].peer);
        let (tag, data, context, no_completion) = (1, 0, 1, false);
        let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
        pair.ends[0].node.packs.joins(&req)
    };
    assert!(joins(&pair, MORE) && !joins(&pair, OpFlags::empty()));
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, MORE, 1).unwrap();
    assert!(joins(&pair, MORE) && joins(&pair, OpFlags::empty()));
}

/// Goal: messages that share a packet reach the receive context that they name, and are refused by
/// an endpoint that has the context's number and is none. Method: they wait for the session.
#[test]
fn messages_of_a_packet_reach_the_context_that_they_name() {
    const COUNT: u64 = 12;
    for is_context in [true, false] {
        let mut pair = Pair::new(1500, false);
        let attr = || EpAttr { caps: Caps::TAGGED, ..EpAttr::default() };
        let End { node, ep, cq, av, .. } = &mut pair.ends[1];
        *ep = if is_context {
            let sep = node.eps.sep_open(Some(20), 2).unwrap();
            node.eps.sep_rx_open(sep, 1, attr()).unwrap()
        } else {
            let other = node.eps.open(attr()).unwrap();
            node.eps.set_number(other, 21).unwrap();
            other
        };
        node.objects().ep_bind_cq(*ep, *cq, BindFlags::RECV | BindFlags::TRANSMIT).unwrap();
        node.objects().ep_bind_av(*ep, *av).unwrap();
        node.ep_enable(*ep).unwrap();
        let to = EpAddr { ep: 20, ..node.addr_of(*ep).unwrap() };
        let End { node, ep, cq, av, peer, .. } = &mut pair.ends[0];
        *av = node.sessions().av_open(8).unwrap();
        node.avs.name_contexts(*av, 4).unwrap();
        *peer = node.sessions().av_insert(Instant(1), *av, to).unwrap() | 1 << 60;
        *ep = open_ep(node, (*cq, *av), attr());
        for n in 0..COUNT {
            pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), n).unwrap();
            pair.send(0, IoBuf::leaked(&[7; 8]), 5, OpFlags::empty(), n).unwrap();
        }
        pair.run(2_000_000);
        assert!(pair.ends[0].node.counters().tx_frames < COUNT / 2, "they share packets");
        let refused = (!is_context).then_some(Error::ConnRefused);
        assert_eq!(pair.outcomes(0), (0..COUNT).map(|n| (n, refused)).collect::<Vec<_>>());
        let taken = if is_context { COUNT } else { 0 };
        assert_eq!(contexts(&mut pair, 1), (0..taken).collect::<Vec<_>>());
    }
}

/// Goal: messages that may share packets go to whom each names, though one endpoint sends by turns
/// to two. Method: two endpoints of one peer.
#[test]
fn messages_that_share_go_to_whom_they_name() {
    let mut pair = warm();
    pair.short = Some(0);
    let End { node, cq, av, ep, .. } = &mut pair.ends[1];
    let caps = Caps::MSG | Caps::TAGGED | Caps::RECV;
    let other = open_ep(node, (*cq, *av), EpAttr { caps, ..EpAttr::default() });
    let eps = [*ep, other];
    let addr = node.addr_of(other).unwrap();
    let End { node, av, peer, .. } = &mut pair.ends[0];
    let dests = [*peer, node.sessions().av_insert(pair.now, *av, addr).unwrap()];
    for n in 0..12_u64 {
        // The first alone: its route is known then.
        let more = if (1..11).contains(&n) { MORE } else { OpFlags::empty() };
        let i = n as usize / 3 % 2;
        (pair.ends[1].ep, pair.ends[0].peer) = (eps[i], dests[i]);
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), n).unwrap();
        pair.send(0, IoBuf::leaked(&[7; 8]), 5, more, n).unwrap();
    }
    pair.run(2_000_000);
    let mut got = contexts(&mut pair, 1);
    got.sort_unstable();
    assert_eq!(got, (0..12).collect::<Vec<_>>());
    assert_eq!(contexts(&mut pair, 0).len(), 12);
}
