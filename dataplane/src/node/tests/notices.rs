//! What a node tells of the ends of its sessions.

use super::*;
use crate::proto::atomic::AtomicKind;

fn ended(end: &mut End) -> SessionEnd {
    let Some(Notice::SessionEnded(told)) = end.node.observed.notice() else {
        panic!("nothing is told")
    };
    assert!(end.node.observed.notice().is_none(), "one session ended");
    told
}

/// Goal: the end of a session is told once, with its cause and with what waited. Method: a peer
/// that no frame reaches any more, with sends under way.
#[test]
fn a_silent_peer_is_told_of_with_what_waited() {
    for lossless in [true, false] {
        let mut pair = Pair::new(1500, lossless);
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 0).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
        pair.run(1_000_000);
        assert!(!pair.ends[0].node.observed.has_notice());
        pair.drop = 1;
        let begun = pair.now;
        for context in 2..4 {
            pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::DELIVERY_COMPLETE, context).unwrap();
        }
        pair.run(600_000_000);
        assert!(pair.ends[0].node.observed.has_notice());
        let told = ended(&mut pair.ends[0]);
        assert_eq!(
            (told.station, told.reason),
            (pair.ends[1].node.port.station, EndReason::Silent)
        );
        assert_eq!(told.waited, Waited { sends: 2, ..Waited::default() });
        assert!((500_000_000..560_000_000).contains(&told.silent_ns), "{told:?}");
        assert!(told.was_open && told.age_ns > 500_000_000 + begun.0 - 1_000_000, "{told:?}");
        assert_eq!(told.retransmits > 3, !lossless, "{told:?}");
        assert!(!pair.ends[1].node.observed.has_notice(), "nobody waits for anything there");
    }
}

/// Goal: causes are told apart. Method: a peer that was never there, one that restarted, one whose
/// session is forgotten, one that closes.
#[test]
fn causes_are_told_apart() {
    let mut pair = Pair::new(1500, false);
    pair.drop = 1;
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.run(600_000_000);
    let told = ended(&mut pair.ends[0]);
    assert_eq!((told.reason, told.was_open, told.waited.sends), (EndReason::NoAnswer, false, 1));
    pair.drop = 0;
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.run(1_000_000);
    let (now, station) = (pair.now, pair.ends[0].node.port.station);
    pair.ends[1].node.sessions().drop_session(now, station);
    assert_eq!(ended(&mut pair.ends[1]).reason, EndReason::Dropped);
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
    pair.run(1_000_000);
    let told = ended(&mut pair.ends[0]);
    assert_eq!((told.reason, told.waited.sends), (EndReason::Reset, 1));
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 3).unwrap();
    pair.run(1_000_000);
    let end = &mut pair.ends[0];
    let other =
        EpAddr { incarnation: 4711, ..end.node.objects().av_lookup(end.av, end.peer).unwrap() };
    end.node.sessions().av_insert(pair.now, end.av, other).unwrap();
    assert_eq!(ended(end).reason, EndReason::Superseded);
    pair.run(1_000_000);
    assert_eq!(ended(&mut pair.ends[1]).reason, EndReason::Closed);
    pair.ends[0].node.port_gone(pair.now);
    assert!(!pair.ends[0].node.observed.has_notice(), "no session is left");
}

/// Goal: of an injected message that may be lost its sender hears nothing else, so the notice
/// counts it; a rendezvous counts at the receiver.
#[test]
fn injected_and_pulled_messages_are_counted() {
    let mut pair = Pair::new(1500, false);
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::INJECT, 1).unwrap();
    pair.run(1_000_000);
    pair.recv(1, IoBuf::leaked(&[0; 300_000]), 2, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 300_000]), 2, OpFlags::empty(), 1).unwrap();
    pair.run(30_000);
    pair.drop = 1;
    let flags = OpFlags::INJECT | OpFlags::INJECT_COMPLETE;
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, flags, 1).unwrap();
    pair.run(600_000_000);
    let told = ended(&mut pair.ends[0]);
    assert_eq!((told.waited.told, told.waited.sends), (1, 1), "{told:?}");
    let told = ended(&mut pair.ends[1]);
    assert_eq!(told.waited, Waited { receives: 1, ..Waited::default() });
}

/// Goal: notices that nobody takes cost no memory beyond a bound, and their number is known.
#[test]
fn notices_that_nobody_takes_are_counted() {
    let mut end = end(1, 1500, true);
    for n in 0..100 {
        let addr = EpAddr { station: Station::at([2, 7, 0, 0, 0, n]), ep: 3, incarnation: 0 };
        end.peer = end.node.sessions().av_insert(Instant(1), end.av, addr).unwrap();
        let (kind, buf, flags) = (MsgKind::Msg, IoBuf::leaked(&[1; 8]), OpFlags::empty());
        let (dest, tag, data, context, no_completion) = (end.peer, 0, 0, 1, false);
        let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
        end.node.post_send(Instant(1), end.ep, req).unwrap();
    }
    end.node.port_gone(Instant(2));
    let told: Vec<Notice> = std::iter::from_fn(|| end.node.observed.notice()).collect();
    assert_eq!(told.len(), 65);
    assert_eq!(told[64], Notice::Missed(36));
    assert!(!end.node.observed.has_notice());
}

/// Goal: a peer behind the same NIC that memory does not lead to is told of at the first send.
#[test]
fn a_peer_with_the_same_mac_is_told_of() {
    let near_by = |number| {
        let mut port = caps(1, 1500, false);
        port.station.number = number;
        end_on(port, NodeSettings::default())
    };
    let mut pair = Pair::of([near_by(0), near_by(1)]);
    let there = pair.ends[1].node.port.station;
    for context in 0..2 {
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), context).unwrap();
        pair.run(1_000_000);
    }
    let notice = pair.ends[0].node.observed.notice();
    assert_eq!(notice, Some(Notice::SameMac { station: there }));
    assert_eq!(pair.ends[0].node.observed.notice(), None);
}

/// Goal: what waited is told by kind, and what did not is left out.
#[test]
fn kinds_that_did_not_wait_are_left_out() {
    let waited = Waited { sends: 2, reads: 1, ..Waited::default() };
    assert_eq!(waited.kinds().collect::<Vec<_>>(), [(2, "sends"), (1, "reads")]);
    assert_eq!(Waited::default().kinds().count(), 0);
}

/// Goal: one-sided operations whose answers do not come are told by kind, on the fast path and the
/// slow one. Method: two writes, a read and an atomic operation, none of which arrives.
#[test]
fn one_sided_operations_that_waited_are_told_by_kind() {
    for short in [None, Some(0)] {
        let mut pair = Pair::new(1500, true);
        let region = pair.region(1, 64, rma::ALL);
        let range = || RmaList::one(0, 8, region.key);
        pair.write(&[0; 8], range(), OpFlags::empty(), 1).unwrap();
        pair.run(1_000_000);
        assert_eq!(pair.outcomes(0), [(1, None)]);
        (pair.short, pair.drop) = (short, 1);
        for context in 2..4 {
            pair.write(&[0; 8], range(), OpFlags::empty(), context).unwrap();
        }
        pair.read_to(IoBuf::leaked(&[0; 8]), range(), 4).unwrap();
        let one = RmaList::one(0, 1, region.key);
        pair.atomic(atomic::Call::sum(AtomicKind::Fetch, &[0; 8], one), 8).unwrap();
        assert_eq!(pair.short, short.map(|_| 4));
        pair.run(560_000_000);
        let waited = Waited { writes: 2, reads: 1, atomics: 1, ..Waited::default() };
        assert_eq!(ended(&mut pair.ends[0]).waited, waited, "{short:?}");
    }
}
