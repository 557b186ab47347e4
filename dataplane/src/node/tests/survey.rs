//! What an operator is shown of a node and its sessions.

use super::*;

#[derive(Default)]
struct Shown {
    sessions: Vec<(PeerIdx, SessionStats)>,
    eps: usize,
    slots: usize,
}

impl SurveySink for Shown {
    fn endpoint(&mut self, _: EpIdx, ep: Option<&EpCounters>) {
        self.slots += 1;
        self.eps += usize::from(ep.is_some());
    }

    fn session(&mut self, slot: PeerIdx, session: Option<&SessionStats>) {
        self.slots += 1;
        self.sessions.extend(session.map(|s| (slot, *s)));
    }
}

fn session(end: &mut End) -> SessionStats {
    let mut shown = Shown::default();
    end.node.survey(&mut Survey::default(), &mut shown);
    assert_eq!(shown.sessions.len(), 1);
    shown.sessions[0].1
}

/// Goal: what is shown of a session is what happened, on the fast path and the slow one. Method:
/// messages of many lengths, lost ones among them, and what one side sent against what the other
/// took.
#[test]
fn packets_and_bytes_of_a_session_are_what_left_and_came() {
    for (lossless, drop) in [(true, 0), (false, 0), (false, 9)] {
        let mut pair = Pair::new(1500, lossless);
        (pair.short, pair.drop, pair.scatter) = (Some(0), drop, true);
        for round in 0..100 {
            let len = [8, 300, 5_000, 70_000][round % 4];
            pair.recv(1, IoBuf::leaked(&vec![0; len]), 9, OpFlags::empty(), 1).unwrap();
            pair.send(0, IoBuf::leaked(&bytes(len)), 9, OpFlags::empty(), 1).unwrap();
            pair.run(if drop > 0 { 5_000_000 } else { 200_000 });
            pair.read(0);
            pair.read(1);
        }
        pair.run(50_000_000);
        let [a, b] = &mut pair.ends;
        let trips = a.node.observed.round_trips.clone();
        let counted = |below| {
            let lengths =
                (0..RoundTrips::COUNT).take_while(|&at| RoundTrips::lengths(at).end <= below);
            lengths.map(|at| trips.counts()[at]).sum::<u64>()
        };
        let (a, b, sent) = (session(a), session(b), a.node.counters());
        assert!(a.tx_packets >= 100 && b.tx_packets >= 25, "messages; pulls");
        assert_eq!((a.tx_packets, b.tx_packets), (b.rx_packets, a.rx_packets));
        assert_eq!(u64::from(a.retransmits), sent.tx_retransmits);
        assert_eq!(a.retransmits > 0, drop > 0);
        assert_eq!((a.wait, a.info.waiting, a.frame_max), (Wait::Nothing, 0, 1500));
        assert!(a.age_ns > 20_000_000);
        assert_eq!(a.rtt_min_ns > 0, !lossless);
        // Each took the least or longer.
        assert_eq!(counted(u64::MAX) > 20, !lossless);
        assert_eq!(counted(a.rtt_min_ns), 0);
        assert!(trips.sum_ns() >= counted(u64::MAX) * a.rtt_min_ns);
        assert_eq!(
            (a.rto_ns > 0, a.rtt_var_ns > 0, a.is_lossless),
            (!lossless, !lossless, lossless)
        );
        let (Some((a_tx, a_rx)), Some((b_tx, b_rx))) = (a.bytes, b.bytes) else {
            assert!(lossless);
            continue;
        };
        // What opens a session, padded frames, may not count at both ends.
        let all = 25 * (8 + 300 + 5_000 + 70_000);
        assert!(a_tx > all && b_rx > if drop == 0 { all } else { all * 8 / 10 }, "{a:?} {b:?}");
        if drop == 0 {
            assert!(a_tx.abs_diff(b_rx) < 1700 && b_tx.abs_diff(a_rx) < 1700, "{a:?} {b:?}");
        } else {
            assert!(a_tx > b_rx, "{a:?} {b:?}");
        }
    }
}

/// Goal: what was counted of a session is shown when it is over, and of the next from 0.
#[test]
fn a_session_that_is_over_is_shown_as_it_was() {
    let mut pair = Pair::new(1500, false);
    for _ in 0..2 {
        for _ in 0..5 {
            pair.send(0, IoBuf::leaked(&[1; 8]), 9, OpFlags::empty(), 1).unwrap();
            pair.run(1_000_000);
        }
        assert_eq!(session(&mut pair.ends[0]).tx_packets, 5);
        let (now, station) = (pair.now, pair.ends[1].node.port.station);
        pair.ends[0].node.sessions().drop_session(now, station);
        let over = session(&mut pair.ends[0]);
        assert_eq!((over.info.state, over.tx_packets), ("idle", 5));
        let station = pair.ends[0].node.port.station;
        pair.ends[1].node.sessions().drop_session(now, station);
        let other = session(&mut pair.ends[1]);
        assert_eq!((other.info.state, other.rx_packets), ("idle", 5));
    }
}

/// Goal: a session says what it waits for. Method: each cause alone.
#[test]
fn causes_to_wait_are_told_apart() {
    let mut pair = Pair::new(1500, false);
    let send = |pair: &mut Pair, len: usize| {
        pair.send(0, IoBuf::leaked(&bytes(len)), 9, OpFlags::empty(), 1)
    };
    send(&mut pair, 8).unwrap();
    assert_eq!(session(&mut pair.ends[0]).wait, Wait::Open);
    pair.run(1_000_000);
    assert_eq!(session(&mut pair.ends[0]).wait, Wait::Nothing);
    send(&mut pair, 8).unwrap();
    pair.run_by(1_000, 1_000);
    assert_eq!(session(&mut pair.ends[0]).wait, Wait::Answer);
    pair.run(1_000_000);
    send(&mut pair, 100_000).unwrap();
    pair.run(1_000_000);
    assert_eq!(session(&mut pair.ends[0]).wait, Wait::Match);
    // The peer wants it, and its data does not come.
    pair.recv(1, IoBuf::leaked(&[0; 8]), 9, OpFlags::empty(), 1).unwrap();
    pair.recv(1, IoBuf::leaked(&[0; 8]), 9, OpFlags::empty(), 1).unwrap();
    pair.recv(1, IoBuf::leaked(&vec![0; 100_000]), 9, OpFlags::empty(), 1).unwrap();
    pair.drop = 1;
    pair.run(1_000_000);
    assert_eq!(session(&mut pair.ends[1]).wait, Wait::Pull);
    pair.run(60_000_000);
    assert_eq!(session(&mut pair.ends[1]).wait, Wait::Silent);
    // Only short frames arrive.
    let mut pair = Pair::new(9000, false);
    send(&mut pair, 8).unwrap();
    pair.run(1_000_000);
    send(&mut pair, 8000).unwrap();
    pair.most = 1500;
    pair.run(200_000_000);
    assert_eq!(session(&mut pair.ends[0]).wait, Wait::Repeats);
    let mut pair = Pair::new(1500, false);
    send(&mut pair, 8).unwrap();
    pair.run(1_000_000);
    send(&mut pair, 8).unwrap();
    pair.ends[0].node.transmit(pair.now, &mut |_: &TxFrame<'_>| Tx::Full);
    assert_eq!(session(&mut pair.ends[0]).wait, Wait::Port);
}

/// Goal: a step of a survey has a bound whatever the tables hold, and all steps show all. Method:
/// 1,000 peers; the sum of peers is whole when a walk has come to its end.
#[test]
fn a_survey_goes_by_steps() {
    let mut end = end(1, 1500, true);
    for n in 0..1000_u16 {
        let [a, b] = n.to_be_bytes();
        let addr = EpAddr { station: Station::at([2, 7, 0, 0, a, b]), ep: 3, incarnation: 0 };
        end.node.sessions().av_insert(Instant(1), end.av, addr).unwrap();
    }
    let (mut survey, mut seen) = (Survey::default(), std::collections::BTreeSet::new());
    for step in 1.. {
        let mut shown = Shown::default();
        let (_, levels) = end.node.survey(&mut survey, &mut shown);
        assert!(shown.slots <= 128, "{} slots in a step", shown.slots);
        seen.extend(shown.sessions.iter().map(|(slot, _)| *slot));
        if levels.peers > 0 {
            assert_eq!((levels.peers, seen.len(), step), (1000, 1000, 16));
            break;
        }
    }
}

/// Goal: a survey that has come to its end shows the levels that there are. Method: a level of each
/// kind that an endpoint has, with room taken in advance.
#[test]
fn a_survey_shows_the_levels() {
    let (mut pair, region) = super::atomic::short_pair();
    super::atomic::fetch_adds(&mut pair, &region, 3);
    for tag in [5, 6, 7] {
        pair.recv(0, IoBuf::leaked(&[0; 8]), tag, OpFlags::empty(), tag).unwrap();
    }
    let node = &mut pair.ends[0].node;
    let mut survey = Survey::default();
    let shown = loop {
        let (_, shown) = node.survey(&mut survey, &mut Shown::default());
        if shown.peers > 0 {
            break shown;
        }
    };
    assert_eq!((shown.tx, shown.posted), (3, 3));
    assert_eq!(shown, node.statistics().levels());
}

/// Goal: an endpoint's messages that nobody has taken are counted, of both kinds.
#[test]
fn messages_without_a_receive_are_counted() {
    let mut pair = Pair::new(1500, true);
    for tag in [u64::MAX, 5, 6, 7] {
        pair.send(0, IoBuf::leaked(&[1; 8]), tag, OpFlags::empty(), 1).unwrap();
    }
    pair.run(1_000_000);
    let End { node, ep, .. } = &pair.ends[1];
    assert_eq!(node.eps.counters(*ep).unwrap().unexpected, 4);
}
