//! Nodes whose keys change while messages pass.

use super::*;
use crate::error::Error;
use crate::node::peer::State;
use crate::seal::{Keyring, Mode, PreSharedKey};

const MS: u64 = 1_000_000;

fn key(n: u8) -> PreSharedKey {
    PreSharedKey::with_key_frames(&[n; 32], Mode::Encrypted, 5).unwrap()
}

fn list(numbers: &[u8]) -> Vec<PreSharedKey> {
    numbers.iter().copied().map(key).collect()
}

fn settings(station: u8, numbers: &[u8]) -> NodeSettings {
    let keys = Keyring::new(list(numbers), [station; 32]);
    NodeSettings { keys, ..NodeSettings::default() }
}

fn pair(lists: [&[u8]; 2]) -> Pair {
    Pair::of([0, 1].map(|i| {
        let station = i as u8 + 1;
        end_with(station, 1500, false, settings(station, lists[i]))
    }))
}

fn set(pair: &mut Pair, i: usize, numbers: &[u8]) {
    pair.ends[i].node.set_keys(pair.now, list(numbers)).unwrap();
}

/// Sends a message from end `from` to the other, and lets `ms` pass. Whether it has arrived.
fn arrives(pair: &mut Pair, from: usize, ms: u64) -> bool {
    pair.recv(1 - from, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(from, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    pair.run(ms * MS);
    (pair.read(from).len(), pair.read(1 - from).len()) == (1, 1)
}

/// Ends the session of both without a word.
fn close(pair: &mut Pair) {
    for i in 0..2 {
        let other = pair.ends[1 - i].node.station;
        pair.ends[i].node.drop_session(pair.now, other);
    }
}

fn opened(pair: &Pair) -> [u64; 2] {
    pair.ends.each_ref().map(|end| end.node.counters().sessions_opened)
}

/// Goal: each listed key is accepted and the first opens; a session stands when its key is taken
/// off; without a common key there is none.
#[test]
fn lists_meet_if_each_has_the_first_of_the_other() {
    let cases: [(&[u8], &[u8], bool); 7] = [
        (&[1], &[1], true),
        (&[1], &[1, 2], true),
        (&[1, 2], &[2, 1], true),
        (&[2, 1], &[3, 4, 1, 2], true),
        (&[2], &[1, 2], true),
        (&[1], &[2], false),
        (&[1], &[2, 3, 4, 5], false),
    ];
    for (a, b, meet) in cases {
        let mut pair = pair([a, b]);
        assert_eq!(arrives(&mut pair, 0, 50), meet, "{a:?} {b:?}");
        if meet {
            set(&mut pair, 0, &[7]);
            set(&mut pair, 1, &[8]);
            assert!(arrives(&mut pair, 1, 50), "the session stands: {a:?} {b:?}");
            assert_eq!(opened(&pair), [1, 1]);
        }
    }
}

#[test]
fn a_list_is_refused_whole() {
    let mut pair = pair([&[1], &[1]]);
    let now = pair.now;
    let node = &mut pair.ends[0].node;
    for bad in [&[][..], &[1, 2, 3, 4, 5]] {
        assert!(matches!(node.set_keys(now, list(bad)), Err(Error::Invalid(_))), "{bad:?}");
    }
    assert!(arrives(&mut pair, 0, 50), "the list is what it was");
    for mut end in [end(1, 1500, false), end_with(1, 1500, true, settings(1, &[1]))] {
        assert!(matches!(end.node.set_keys(now, list(&[1])), Err(Error::OpNotSupp(_))));
        assert!(end.node.settings().keys.is_none(), "no second copy is kept");
    }
}

/// Goal: another key reaches all nodes without a pause: no operation fails, and none waits longer
/// than a session takes to open. Method: the three steps of `docs/security.md`, end by end, at any
/// moment of an opening and with frames that are lost; messages both ways all the time, and a
/// session that begins anew now and then.
#[test]
fn another_key_comes_without_a_pause() {
    let steps: [&[u8]; 3] = [&[1, 2], &[2, 1], &[2]];
    for seed in 0..60_usize {
        let mut pair = pair([&[1], &[1]]);
        (pair.drop, pair.scatter) = ([0, 7, 3][seed % 3], true);
        for step in steps {
            for end in [seed % 2, 1 - seed % 2] {
                for closes in [true, false] {
                    if closes {
                        close(&mut pair);
                        for from in 0..2 {
                            let (to, buf) = (1 - from, IoBuf::leaked(&[1; 8]));
                            pair.recv(to, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
                            pair.send(from, buf, 5, OpFlags::empty(), 2).unwrap();
                        }
                        // A step of the wire is 5 us.
                        pair.run((seed as u64 * 5_000) % (60 * 5_000));
                        set(&mut pair, end, step);
                        pair.run(200 * MS);
                        let done = [0, 1].map(|i| pair.read(i).len());
                        assert_eq!(done, [2, 2], "seed {seed}, {step:?} at {end}");
                    }
                    assert!(arrives(&mut pair, end, 100), "seed {seed}, {step:?} at {end}");
                }
            }
        }
        for end in &pair.ends {
            let c = end.node.counters();
            assert_eq!((c.sessions_dead, c.sessions_reset), (0, 0), "seed {seed}");
        }
    }
}

/// Goal: an OPEN that nobody has answered goes out anew under the key that is the first now.
#[test]
fn what_is_being_opened_is_opened_again() {
    let mut pair = pair([&[1], &[2]]);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    pair.run(100 * MS);
    let refused = |pair: &Pair| {
        let node = &pair.ends[0].node;
        let (p, _) = node.peers.iter().next().expect("one");
        node.openings.refusal(p).is_some()
    };
    assert!(refused(&pair));
    // The same first key: the OPEN stands, and what was said of it is forgotten.
    set(&mut pair, 0, &[1, 2]);
    assert!(!refused(&pair));
    set(&mut pair, 0, &[2, 1]);
    pair.run(20 * MS);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    assert_eq!(opened(&pair), [1, 1]);
}

/// Goal: a change of keys does not keep an operation to nobody from ending. Method: the first key
/// changes all the time.
#[test]
fn silence_counts_through_a_change() {
    let mut pair = pair([&[1], &[1]]);
    pair.drop = 1;
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    let begun = pair.now;
    for n in 0..100 {
        set(&mut pair, 0, &[n % 2 + 1, 2 - n % 2]);
        pair.run(40 * MS);
        let end = &mut pair.ends[0];
        if end.node.cq_readerr(end.cq).is_ok() {
            let ms = pair.now.since(begun) / MS;
            assert!((500..700).contains(&ms), "after {ms} ms");
            return;
        }
    }
    panic!("it never ended");
}

/// Goal: a handshake that begins while the keys of the session before are still to be forgotten is
/// not forgotten with them. Method: both in one turn, in which frames leave.
#[test]
fn a_newer_handshake_is_kept() {
    let mut pair = pair([&[1], &[1]]);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    let now = pair.now;
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(now, &mut sink(out));
    out.clear();
    let (p, _) = node.peers.iter().next().expect("one");
    assert_eq!(node.peers[p].state, State::Opening);
    node.through_seals(&mut sink(out), |node, out| {
        node.open_again(now, p, false);
        node.serve_open(p, out);
    });
    assert_eq!(out.len(), 1, "an OPEN");
    pair.run(20 * MS);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    assert!(pair.ends.iter().all(|end| end.node.counters().rx_forged == 0));
}

/// Nothing of a key stays behind: neither the handshake of an open session, nor its answer.
#[test]
fn an_open_session_keeps_nothing_of_its_key() {
    let mut pair = pair([&[1], &[1]]);
    assert!(arrives(&mut pair, 0, 50));
    for end in &pair.ends {
        let shown = format!("{:?}", end.node.openings.seals);
        assert!(shown.contains("offers: {}") && shown.contains("answer: None"), "{shown}");
    }
}
