//! Small messages that share packets unasked, where frames are dear.

use super::*;
use crate::node::output::PACK_MSG_MAX;

const MS: u64 = 1_000_000;

/// A pair behind kernels, with an open session, in which end 0 posts as the api does.
fn warm(via_kernel: bool) -> Pair {
    let port = |station| PortCaps { via_kernel, ..caps(station, 1500, false) };
    let mut pair = Pair::of([1, 2].map(|n| end_on(port(n), NodeSettings::default())));
    pair.short = Some(0);
    for n in 0..4 {
        post(&mut pair, n, 64);
        pair.run(MS);
    }
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (4, 4));
    pair
}

/// Posts a message of `len` bytes and the receive for it.
fn post(pair: &mut Pair, context: u64, len: usize) {
    pair.recv(1, IoBuf::leaked(&vec![0; len]), 1, OpFlags::empty(), context).unwrap();
    pair.send(0, IoBuf::leaked(&vec![1; len]), 1, OpFlags::empty(), context).unwrap();
}

fn frames(pair: &Pair) -> u64 {
    pair.ends[0].node.counters().tx_frames
}

/// A turn of end 0 in which nothing arrives, `ns` later.
fn turn(pair: &mut Pair, ns: u64) {
    pair.now = pair.now + ns;
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
}

fn contexts(pair: &mut Pair, i: usize) -> Vec<u64> {
    pair.read(i).iter().map(|cqe| cqe.op_context).collect()
}

/// Goal: with nothing in flight a message leaves inside its post, behind four packets in flight the
/// next ones share a frame, which leaves after 10 us or with the message that fills it; in order,
/// and completed as if each had its own.
#[test]
fn messages_to_a_busy_peer_share_frames() {
    let mut pair = warm(true);
    let before = frames(&pair);
    (0..4).for_each(|n| post(&mut pair, n, 64));
    assert_eq!(frames(&pair), before + 4);
    (4..10).for_each(|n| post(&mut pair, n, 64));
    // The first turn after the posts, and the PING for what did not ask.
    turn(&mut pair, 1_000);
    turn(&mut pair, 8_000);
    let held = frames(&pair);
    assert!(pair.ends[0].node.hold_watch().look().0.is_some(), "it is held");
    assert!(pair.ends[0].node.next_deadline().is_some_and(|at| at <= pair.now + 1_000));
    turn(&mut pair, 1_000);
    assert_eq!(frames(&pair), held + 1);
    // What was shared once is so from the second packet on.
    (10..40).for_each(|n| post(&mut pair, n, 64));
    turn(&mut pair, 0);
    let full = frames(&pair) - held - 1;
    assert!((1..=2).contains(&full), "{full} frames");
    pair.run(MS);
    assert_eq!(contexts(&mut pair, 0), (0..40).collect::<Vec<_>>());
    assert_eq!(contexts(&mut pair, 1), (0..40).collect::<Vec<_>>());
    pair.run(600 * MS);
    pair.assert_quiet();
}

/// Goal: a packet that has no room for one more like the last is held no longer.
#[test]
fn a_full_packet_is_not_held() {
    let mut pair = warm(true);
    // For credit.
    for n in 0..60 {
        post(&mut pair, n, 64);
        pair.run(MS / 10);
        assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    }
    (0..4).for_each(|n| post(&mut pair, n, 64));
    let before = frames(&pair);
    let is_held = |pair: &Pair| pair.ends[0].node.hold_watch().look().0.is_some();
    post(&mut pair, 4, 64);
    assert!(is_held(&pair));
    let mut count = 5;
    while is_held(&pair) {
        assert!(count < 40, "it is never full");
        post(&mut pair, count, 64);
        count += 1;
    }
    turn(&mut pair, 0);
    assert_eq!(frames(&pair), before + 1, "{count} messages");
    pair.run(MS);
    assert_eq!(contexts(&mut pair, 1), (0..count).collect::<Vec<_>>());
}

/// Goal: messages up to the longest that is packed share frames; a longer one leaves at once.
#[test]
fn the_longest_message_that_shares_is_held() {
    let longest = PACK_MSG_MAX as usize;
    for (len, at_once) in [(longest, 0), (longest + 1, 1)] {
        let mut pair = warm(true);
        (0..4).for_each(|n| post(&mut pair, n, 64));
        let before = frames(&pair);
        post(&mut pair, 4, len);
        assert_eq!(frames(&pair) - before, at_once, "{len} bytes");
        pair.run(MS);
        assert_eq!(contexts(&mut pair, 1), (0..5).collect::<Vec<_>>(), "{len} bytes");
    }
}

/// Goal: a packet is held only where frames are dear, while somebody watches, and to one peer at a
/// time; who is not watched says so.
#[test]
fn nothing_is_held_that_nobody_would_send() {
    for (via_kernel, watched) in [(false, true), (true, false)] {
        let mut pair = warm(via_kernel);
        let watch = pair.ends[0].node.hold_watch();
        watch.watch(watched);
        let before = frames(&pair);
        (0..8).for_each(|n| post(&mut pair, n, 64));
        assert_eq!((frames(&pair) - before, watch.look().1), (8, 0));
        assert_eq!(watch.is_wanted(), via_kernel);
        pair.run(MS);
        assert_eq!(pair.read(0).len(), 8);
    }
}

/// Goal: nothing overtakes what is held: a long message, one of the other kind, an RMA operation;
/// and what is held ends with its endpoint.
#[test]
fn a_held_packet_is_not_overtaken() {
    for case in 0..3 {
        let mut pair = warm(true);
        (0..8).for_each(|n| post(&mut pair, n, 64));
        let held = frames(&pair);
        match case {
            0 => post(&mut pair, 8, 5000),
            1 => post(&mut pair, 8, 600),
            _ => {
                pair.recv(1, IoBuf::leaked(&[0; 8]), u64::MAX, OpFlags::empty(), 8).unwrap();
                pair.send(0, IoBuf::leaked(&[1; 8]), u64::MAX, OpFlags::empty(), 8).unwrap();
            }
        }
        turn(&mut pair, 0);
        assert!(frames(&pair) > held + 1, "both have left");
        pair.run(MS);
        assert_eq!(contexts(&mut pair, 1), (0..9).collect::<Vec<_>>(), "case {case}");
        pair.run(600 * MS);
        pair.assert_quiet();
    }
    let mut pair = warm(true);
    (0..8).for_each(|n| post(&mut pair, n, 64));
    let End { node, ep, .. } = &mut pair.ends[0];
    assert_eq!(node.operations().ep_owes(*ep).unwrap(), 0);
    node.ep_close(pair.now, *ep).unwrap();
    assert_eq!(node.hold_watch().look().0, None);
    pair.run(600 * MS);
}

/// Goal: it leaves as soon as nothing is in flight any more.
#[test]
fn a_held_packet_leaves_with_the_last_acknowledgement() {
    let mut pair = warm(true);
    (0..6).for_each(|n| post(&mut pair, n, 64));
    let before = frames(&pair);
    let begun = pair.now;
    while frames(&pair) == before && pair.now.since(begun) < 9_000 {
        pair.run_by(500, 500);
    }
    assert_eq!(pair.ends[0].node.hold_watch().look().0, None);
    assert!(pair.now.since(begun) < 9_000, "{} ns", pair.now.since(begun));
}

/// Goal: who waits for what was injected, as a close does, waits for what is held too.
#[test]
fn an_injected_message_that_is_held_is_owed() {
    let mut pair = warm(true);
    (0..6).for_each(|n| post(&mut pair, n, 64));
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 6).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::INJECT, 6).unwrap();
    let owed = |pair: &mut Pair| pair.ends[0].node.operations().ep_owes(pair.ends[0].ep).unwrap();
    assert!(pair.ends[0].node.hold_watch().look().0.is_some(), "it is held");
    assert_eq!(owed(&mut pair), 1, "the packet");
    pair.run(MS);
    assert_eq!((owed(&mut pair), pair.read(1).len()), (0, 7));
}
