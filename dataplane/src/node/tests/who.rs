//! Names: who is asked, who answers, and what forged answers can do.

use super::*;
use crate::rel::psn::Psn;
use crate::wire::{self, Base, Host, Op, Ty, VERSIONS, WhoOp};

const HOST: Host = Host::V4([10, 1, 1, 1]);

/// An end whose endpoint has number `number`, known at [`HOST`] and by a name.
fn server(station: u8, number: u16) -> End {
    let mut end =
        end_with(station, 1500, false, NodeSettings { by_name: false, ..NodeSettings::default() });
    let attr = EpAttr { number: Some(number), caps: Caps::MSG, ..EpAttr::default() };
    open_ep(&mut end.node, (end.cq, end.av), attr);
    end.node.control().set_hosts(Instant(1), vec![HOST, Host::name("Node7")]);
    end.node.control().serve_name(number);
    end
}

/// Hands `node` a WHO of station `src` to `dst`, and says what it sends then.
fn say(node: &mut Node, now: u64, (src, dst): (u8, Station), op: WhoOp) -> Vec<(Station, WhoOp)> {
    let (crc, src) = (node.port.far.has_crc(), Station::at([2, 0, 0, 0, 0, src]));
    let (ty, ar, rtx, psn, cack, grant) = (Ty::Who, false, false, Psn(0), Psn(0), 0);
    let base =
        Base { dst, src, ty, ar, rtx, ce: false, crc, dst_sid: 0, psn, cack, grant, plen: 0 };
    node.on_frame(Instant(now), &RxFrame::new(&wire::frame(&base, &Op::Who(op), &[])));
    said(node, now)
}

/// What a node sends now that belongs to no session.
fn said(node: &mut Node, now: u64) -> Vec<(Station, WhoOp)> {
    let mut out = VecDeque::new();
    node.transmit(Instant(now), &mut sink(&mut out));
    let read = |bytes: Vec<u8>| {
        let frame = RxFrame::new(&bytes);
        let base = Base::parse(&frame).unwrap();
        (base.dst, WhoOp::parse(&frame, &base).unwrap())
    };
    out.into_iter().map(read).collect()
}

fn who(nonce: u64, host: Host, service: u16) -> WhoOp {
    WhoOp { nonce, here: false, host, service, versions: VERSIONS }
}

/// Goal: a node answers for its hosts and services, and for no other; an endpoint that is gone is
/// answered for no longer; and the opening announces.
#[test]
fn a_node_answers_queries_for_its_own_names_only() {
    let End { mut node, .. } = server(1, 7471);
    let announced = said(&mut node, 1);
    let here = |host| (Station::BROADCAST, WhoOp { here: true, ..who(0, host, 7471) });
    assert_eq!(announced, [HOST, Host::name("Node7")].map(here));
    let asker = Station::at([2, 0, 0, 0, 0, 9]);
    for (host, service, answered) in [
        (HOST, 7471, true),
        (HOST, 0, true),
        (Host::name("node7"), 7471, true),
        (HOST, 7472, false),
        (Host::name("node8"), 7471, false),
        (Host::V4([10, 1, 1, 2]), 7471, false),
        (Host::V6([0; 16]), 0, false),
    ] {
        let answers = say(&mut node, 2_000_000, (9, Station::BROADCAST), who(5, host, service));
        let here = WhoOp { here: true, ..who(5, host, 7471) };
        assert_eq!(answers, if answered { vec![(asker, here)] } else { vec![] }, "{host:?}");
    }
    let counters = node.counters();
    assert_eq!((counters.rx_who, counters.tx_here), (7, 3));
    // A host that is not known is told of once a second.
    assert_eq!(asked(&mut node), 1);
    let mut quiet = end(2, 1500, false).node;
    quiet.control().set_hosts(Instant(1), vec![HOST]);
    assert_eq!(say(&mut quiet, 1, (9, Station::BROADCAST), who(5, HOST, 0)), []);
}

/// How often a node has said that it wants the names of its host.
fn asked(node: &mut Node) -> usize {
    let notices = std::iter::from_fn(|| node.observed.notice());
    notices.filter(|notice| *notice == Notice::HostAsked).count()
}

/// Goal: an address that went to another host is answered for by that one from the first query on,
/// and no longer by the one that had it. Method: names that are older than a second; a query waits
/// for new ones, and is not answered by the old; without new ones its repetition is.
#[test]
fn an_address_that_moved_is_answered_for_where_it_is() {
    const SECOND: u64 = 1_000_000_000;
    let End { mut node, .. } = server(1, 7471);
    said(&mut node, 1);
    let (moved, from) = (Host::V4([10, 1, 1, 9]), (9, Station::BROADCAST));
    let asker = Station::at([2, 0, 0, 0, 0, 9]);
    let here = |host| vec![(asker, WhoOp { here: true, ..who(5, host, 7471) })];
    // It has gone, and another one has come.
    assert_eq!(say(&mut node, 2 * SECOND, from, who(5, HOST, 7471)), []);
    assert_eq!(say(&mut node, 2 * SECOND + 1, from, who(5, moved, 7471)), []);
    assert_eq!(asked(&mut node), 1);
    node.control().set_hosts(Instant(2 * SECOND + 2), vec![moved]);
    assert_eq!(said(&mut node, 2 * SECOND + 2), here(moved));
    // What is known is fresh.
    assert_eq!(say(&mut node, 2 * SECOND + 3, from, who(5, moved, 7471)), here(moved));
    assert_eq!(say(&mut node, 2 * SECOND + 3, from, who(5, HOST, 7471)), []);
    assert_eq!(asked(&mut node), 0);
    // Nobody sets them: the query is answered when it comes again.
    assert_eq!(say(&mut node, 4 * SECOND, from, who(5, moved, 7471)), []);
    assert_eq!(say(&mut node, 4 * SECOND + SECOND / 10, from, who(5, moved, 7471)), here(moved));
    // However many wait.
    for n in 0..1000 {
        say(&mut node, 6 * SECOND + n, from, who(5, moved, 7471));
    }
    assert!(node.names.held.len() <= 16);
}

/// Goal: answers come to the question that they name, each endpoint once, a few at most; those of
/// nobody's question, and those after its end, change nothing.
#[test]
fn a_question_keeps_its_answers_and_no_others() {
    let mut node = end(1, 1500, false).node;
    let me = node.port.station;
    let q = node.control().ask_who(None, &[HOST, Host::name("x")], 7).unwrap();
    assert_eq!(said(&mut node, 1).iter().filter(|(dst, _)| *dst == Station::BROADCAST).count(), 2);
    assert_eq!(node.control().ask_who(Some(q), &[HOST], 7), Some(q));
    assert_eq!(said(&mut node, 2), [(Station::BROADCAST, who(q, HOST, 7))]);
    let here = |nonce, service| WhoOp { here: true, ..who(nonce, HOST, service) };
    for src in [2, 2, 3, 4, 5, 6, 7] {
        assert_eq!(say(&mut node, 3, (src, me), here(q, 7)), []);
    }
    let macs: Vec<u8> = node.names.answers_to(q).iter().map(|here| here.station.mac.0[5]).collect();
    assert_eq!(macs, [2, 3, 4, 5]);
    for (dst, op) in [(me, here(q ^ 1, 7)), (me, here(q, 8)), (Station::BROADCAST, here(q, 7))] {
        say(&mut node, 3, (8, dst), op);
    }
    node.names.end_query(q);
    say(&mut node, 3, (2, me), here(q, 7));
    assert_eq!(node.names.answers_to(q), []);
    assert_eq!(node.counters().rx_here_stray, 6);
}

/// Goal: 100,000 forged answers, announcements and questions take no memory, change no session, and
/// are answered at the rate of other replies; the line about another claim is written once.
#[test]
fn a_flood_of_forged_names_changes_nothing() {
    let mut pair = Pair::of([server(1, 7471), server(2, 7472)]);
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.run(3_000_000);
    assert_eq!(pair.read(0).len(), 1);
    let node = &mut pair.ends[0].node;
    let q = node.control().ask_who(None, &[HOST], 7).unwrap();
    said(node, 4_000_000);
    let (sessions, levels, me) =
        (node.statistics().session_infos().count(), node.statistics().levels(), node.port.station);
    let mut answers = 0;
    for n in 0..100_000_u64 {
        let (src, dst) = (10 + (n % 200) as u8, [me, Station::BROADCAST][n as usize % 2]);
        let here = n % 3 != 0;
        // A question, an answer, an announcement.
        let nonce = [1, 1 << 40 | n, 0][n as usize % 3];
        let op = WhoOp { here, ..who(nonce, HOST, 7471) };
        // A hundred in a millisecond.
        answers += say(node, 5_000_000 + n * 10_000, (src, dst), op).len();
    }
    assert_eq!(
        (node.statistics().session_infos().count(), node.statistics().levels()),
        (sessions, levels)
    );
    assert_eq!(node.names.answers_to(q), []);
    let twice = std::iter::from_fn(|| node.observed.notice());
    let twice = twice.filter(|n| matches!(n, Notice::NameTwice { service: 7471, .. })).count();
    assert_eq!(twice, 16);
    assert!((1000..=8 * 1001).contains(&answers), "{answers} in a second");
    assert_eq!(node.counters().tx_here as usize, answers);
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 2).unwrap();
    pair.run(1_100_000_000);
    assert_eq!(pair.read(0).len(), 1);
}
