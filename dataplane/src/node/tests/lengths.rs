//! How long frames may be is found although the peer is slow.

use super::*;
use crate::node::peer::State;
use crate::psn::Psn;
use crate::wire::{self, Op, ProbeOp, Ty};

/// Goal: a peer that gets no processor is not taken for a path that carries less. Method: it polls
/// every 20 ms, and as long as its ring is full, that is for 200 ms, only short frames reach it.
#[test]
fn a_starved_peer_is_no_narrow_path() {
    assert_eq!(found(1500, 256, 200), (1500, vec![]));
}

/// Goal: a path that does carry less is found to, however slow the peer is, and told once.
#[test]
fn a_slow_peer_on_a_narrow_path_is_reached() {
    assert_eq!(found(1500, 256, u64::MAX), (256, vec![256]));
}

/// Goal: a session has longer frames once its path carries them, if that is after the search was
/// told to have ended.
#[test]
fn a_path_that_comes_to_carry_more_is_found_out() {
    assert_eq!(found(1500, 256, 1_000), (1500, vec![256]));
}

/// Goal: where the full length does not pass, what every Ethernet carries is used, also if the
/// first OPEN to be answered was a short one.
#[test]
fn a_slow_peer_behind_a_plain_ethernet_is_reached_at_its_length() {
    assert_eq!(found(9000, 1500, u64::MAX), (1500, vec![1500]));
}

/// Goal: what a path of any length carries is found but for a few bytes, in either search.
#[test]
fn a_path_of_any_length_is_found() {
    for (mtu, carried) in [(8958, 1458), (8958, 1358), (1458, 1238), (1500, 600), (1500, 1499)] {
        let (found, told) = found(mtu, carried, u64::MAX);
        let least = carried as u32 - 16;
        assert!((least..=carried as u32).contains(&found), "{found} of {carried}");
        assert_eq!(told.len(), 1, "of {carried}");
    }
}

/// The frame length of a session between ports of MTU `mtu`, whose frames beyond `carried` are
/// lost for so many milliseconds, after 2 s; and which lengths its opener was told to be all that
/// passes. Longer ones than 256 bytes are lost as well in the first 150 ms.
fn found(mtu: usize, carried: usize, narrow_ms: u64) -> (u32, Vec<u32>) {
    let mut pair = Pair::new(mtu, false);
    let passes = |ms: u64, len: usize| {
        let carried = if ms < 150 { 256 } else { carried };
        ms >= narrow_ms || len <= carried + ETH_HDR_LEN
    };
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
    for ms in 0..2_000 {
        turn(&mut pair, 0);
        if ms % 20 == 0 {
            for bytes in std::mem::take(&mut pair.ends[0].out) {
                if passes(ms, bytes.len()) {
                    pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&bytes));
                }
            }
            turn(&mut pair, 1);
            for bytes in std::mem::take(&mut pair.ends[1].out) {
                if passes(ms, bytes.len()) {
                    pair.ends[0].node.on_frame(pair.now, &RxFrame::new(&bytes));
                }
            }
        }
        pair.now = pair.now + 1_000_000;
    }
    assert_eq!(pair.read(1).len(), 1, "the message arrives");
    let told = std::iter::from_fn(|| pair.ends[0].node.observed.notice());
    let told = told.filter_map(|notice| match notice {
        Notice::ShortFrames { passed, .. } => Some(passed - ETH_HDR_LEN as u32),
        _ => None,
    });
    let told = told.collect();
    let (_, peer) = pair.ends[0].node.peers.iter().next().expect("one");
    assert_eq!(peer.state, State::Open);
    (peer.frame_max, told)
}

/// Goal: two that open a session with each other at about the same time find the whole length,
/// whenever the second one starts and however long frames are on the way. Method: nothing is lost
/// but what comes before the second one has started.
#[test]
fn two_openers_find_what_one_finds() {
    for start in 0..90 {
        for delay in [0, 1, 3, 7, 20] {
            let lens = opened_by_both(start, delay);
            assert_eq!(lens, [1500; 2], "started after {start} ms, {delay} ms on the way");
        }
    }
}

/// Frame lengths at both ends of a session that both open.
fn opened_by_both(start: u64, delay: u64) -> [u32; 2] {
    let mut pair = Pair::new(1500, false);
    let mut on_the_way: [VecDeque<(Instant, Vec<u8>)>; 2] = Default::default();
    for ms in 0..1_000 {
        let starts = [0, start];
        for i in 0..2 {
            if ms == starts[i] {
                pair.recv(i, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
                pair.send(i, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
            }
            while on_the_way[i].front().is_some_and(|(at, _)| *at <= pair.now) {
                let (_, bytes) = on_the_way[i].pop_front().expect("seen");
                if ms >= starts[i] {
                    pair.ends[i].node.on_frame(pair.now, &RxFrame::new(&bytes));
                }
            }
            turn(&mut pair, i);
            let at = pair.now + delay * 1_000_000;
            let sent = std::mem::take(&mut pair.ends[i].out).into_iter();
            on_the_way[1 - i].extend(sent.map(|bytes| (at, bytes)));
        }
        pair.now = pair.now + 1_000_000;
    }
    let length = |i: usize| {
        let (_, peer) = pair.ends[i].node.peers.iter().next().expect("one");
        assert_eq!(peer.state, State::Open);
        peer.frame_max
    };
    [length(0), length(1)]
}

fn turn(pair: &mut Pair, i: usize) {
    let End { node, out, .. } = &mut pair.ends[i];
    node.transmit(pair.now, &mut sink(out));
}

/// Goal: what an answer to a probe says is believed while longer frames are searched for, and never
/// makes them shorter.
#[test]
fn only_a_search_takes_what_a_probe_found() {
    for (searches, heard, then) in [(true, 900, 1000), (true, 1400, 1400), (false, 1400, 1000)] {
        let mut pair = Pair::new(1500, false);
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
        pair.run(1_000_000);
        let node = &mut pair.ends[0].node;
        let (p, _) = node.peers.iter().next().unwrap();
        let peer = &mut node.peers[p];
        (peer.frame_max, peer.searches) = (1000, searches);
        let base = node.port.control(node.port.station, Ty::Probe, 0, Psn(0));
        let answer = wire::frame(&base, &Op::Probe(ProbeOp { heard }), &[]);
        node.control().on_probe(p, &RxFrame::new(&answer), &base);
        assert_eq!(node.peers[p].frame_max, then, "{searches} {heard}");
    }
}

/// Goal: a peer that is there late is reached over a narrow path however many OPENs it has missed.
/// Method: none arrives for half a minute, then those of the least length.
#[test]
fn a_late_peer_on_a_narrow_path_is_reached() {
    let mut pair = Pair::new(9000, false);
    for end in &mut pair.ends {
        end.node.settings.t_dead_ns = 100_000_000_000;
    }
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
    pair.most = 0;
    pair.run_by(30_000_000_000, 4_000_000);
    pair.most = 600;
    pair.run_by(1_000_000_000, 1_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
}
