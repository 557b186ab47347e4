//! What is awaited of a peer: then its silence counts, and its record is kept.

use super::super::peer::{Peer, State};
use super::*;
use crate::idx::{OooIdx, PullIdx, ReassemblyIdx, TxIdx};
use crate::slab::List;

/// Whether the silence of a peer counts for it while the session opens, and when it is open.
type Counts = [bool; 2];

/// What holds the record, and how it comes about.
type Held = (&'static str, Counts, fn(&mut Peer));

/// Everything that holds a peer's record, one at a time.
const HELD: [Held; 9] = [
    ("a request", [true; 2], |peer| peer.wrs = one(TxIdx::of(0))),
    ("a collective", [true; 2], |peer| peer.coll_waits = 1),
    ("an acknowledgement", [false, true], |peer| _ = peer.snd.number()),
    ("an answer to the fast path", [false, true], |peer| peer.answers = 1),
    ("a pull", [false, true], |peer| peer.pulls = one(PullIdx::of(0))),
    ("a message's rest", [false, true], |peer| peer.reassembly = ReassemblyIdx::of(0)),
    ("an early packet", [false, true], |peer| peer.reorder_buf = one(OooIdx::of(0))),
    ("a response to it", [false, true], |peer| peer.responses = 1),
    ("a message of it", [false; 2], |peer| peer.unexpected = 1),
];

fn one<const LIST: usize, K: crate::idx::Idx>(idx: K) -> List<LIST, u32, K> {
    List { head: idx, tail: idx, len: 1 }
}

fn peer(state: State) -> Peer {
    let [own, other] = [1, 2].map(|n| Station::at([2, 0, 0, 0, 0, n]));
    Peer { state, ..Peer::new(other, Tenant::NONE, own, Instant(1)) }
}

/// Goal: the silence of a peer counts while anything is awaited of it, and only then; its record is
/// kept while anything refers to it.
#[test]
fn each_thing_that_is_awaited_makes_silence_count() {
    for (state, at) in [(State::Opening, 0), (State::Answered, 0), (State::Open, 1)] {
        assert!(!peer(state).owes() && peer(state).is_idle(), "{state:?} without anything");
        for (what, counts, hold) in HELD {
            let mut peer = peer(state);
            hold(&mut peer);
            assert_eq!(peer.owes(), counts[at], "{what} while {state:?}");
            assert!(!peer.is_idle(), "{what}");
        }
    }
}

/// Goal: silence counts from the moment in which the first thing is awaited, and what is awaited
/// besides does not begin it anew.
#[test]
fn silence_counts_from_the_first_thing_that_is_awaited() {
    let mut peer = peer(State::Open);
    peer.probes = 3;
    peer.begin_to_wait(Instant(70));
    assert_eq!((peer.last_rx, peer.probe_at, peer.probes), (Instant(70), Instant(70), 0));
    peer.probes = 3;
    peer.answers = 1;
    peer.begin_to_wait(Instant(90));
    assert_eq!((peer.last_rx, peer.probe_at, peer.probes), (Instant(70), Instant(70), 3));
    // An answer to the slow path has a request besides.
    (peer.long_answers, peer.answers) = (2, 2);
    peer.begin_to_wait(Instant(90));
    assert_eq!(peer.last_rx, Instant(90));
}

/// Goal: two hosts that slept find each other alive, whatever was on its way then. Method: a clock
/// that goes on meanwhile, by more than any time that is waited for, and frames that were lost.
#[test]
fn hosts_that_slept_find_no_peer_dead() {
    let mut pair = Pair::new(1500, false);
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.run(1_000_000);
    assert_eq!(pair.outcomes(0), [(1, None)]);
    for context in 2..5 {
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), context).unwrap();
        let End { node, out, .. } = &mut pair.ends[0];
        node.transmit(pair.now, &mut sink(out));
        out.clear();
        pair.now = pair.now + 3_600_000_000_000;
        pair.run(2_000_000_000);
        assert_eq!(pair.outcomes(0), [(context, None)]);
    }
}
