//! Short messages that nobody has posted a receive for.

use super::*;
use crate::idx::PeerIdx;

/// Sends `len` bytes so often, reads completions, and says how many there were after `ns` of quiet.
fn burst(pair: &mut Pair, count: u64, len: usize, ns: u64) -> u64 {
    let mut done = 0;
    for n in 0..count {
        while pair.send(0, IoBuf::leaked(&vec![n as u8; len]), 5, OpFlags::empty(), n).is_err() {
            let started = pair.now;
            let mut more = 0;
            while more == 0 {
                assert!(pair.now.since(started) < 5_000_000, "message {n} is refused for ever");
                pair.run(5_000);
                more = pair.read(0).len() as u64;
            }
            done += more;
        }
        done += pair.read(0).len() as u64;
    }
    pair.run(ns);
    loop {
        match pair.read(0).len() as u64 {
            0 => return done,
            more => done += more,
        }
    }
}

/// Receives so many, compares them, and says how long that took.
fn drain(pair: &mut Pair, count: u64, len: usize) -> u64 {
    let started = pair.now;
    for n in 0..count {
        let (buf, look) = shared(len);
        pair.recv(1, buf, 5, OpFlags::empty(), n).unwrap();
        let limit = pair.now + 1_000_000_000;
        while pair.read(1).first().is_none_or(|cqe| cqe.op_context != n) {
            assert!(pair.now.since(limit) == 0, "message {n} does not come");
            pair.run(5_000);
        }
        assert_eq!(contents(&look), vec![n as u8; len], "message {n}");
    }
    pair.now.since(started)
}

/// Goal: a program may send first and receive later: short messages complete at their sender while
/// the receiver has blocks, whatever their length makes of the credit.
#[test]
fn short_messages_complete_before_anybody_receives_them() {
    for lossless in [true, false] {
        for len in [8, 300, 3000, 4096] {
            let mut pair = Pair::new(9000, lossless);
            let done = burst(&mut pair, 1000, len, 2_000_000);
            assert_eq!(done, 1000, "of {len} bytes, lossless {lossless}");
            drain(&mut pair, 1000, len);
            let probes = pair.ends.each_ref().map(|end| end.node.counters().tx_probes);
            assert_eq!(probes, [0, 0], "of {len} bytes, lossless {lossless}");
        }
    }
}

/// Goal: a receiver whose blocks are used up holds its sender back, loses nothing, and neither of
/// them waits for a timer when there are blocks again.
#[test]
fn a_full_receiver_holds_its_sender_back() {
    for lossless in [true, false] {
        for len in [300, 3000] {
            let small = NodeSettings { unexpected_bytes: 32 << 10, ..NodeSettings::default() };
            let ends = [end(1, 9000, lossless), end_with(2, 9000, lossless, small)];
            let mut pair = Pair::of(ends);
            let done = burst(&mut pair, 100, len, 2_000_000);
            assert!(done < 100, "{done} messages of {len} bytes in 32 KiB");
            let took = drain(&mut pair, 100, len);
            assert!(took < 20_000_000, "{took} ns for {len} bytes, lossless {lossless}");
            pair.run(2_000_000);
            let last = std::iter::repeat_with(|| pair.read(0).len()).take_while(|&n| n > 0);
            assert_eq!(done + last.sum::<usize>() as u64, 100);
        }
    }
}

/// Goal: who waits for credit on a port that may lose a grant asks for it, ever more seldom as long
/// as the answers bring none, and goes on at once when one does. (Seed 8068 of the simulator.)
#[test]
fn a_stalled_sender_asks_ever_more_seldom() {
    let small = NodeSettings { unexpected_bytes: 32 << 10, ..NodeSettings::default() };
    let mut pair = Pair::of([end(1, 9000, false), end_with(2, 9000, false, small)]);
    let done = burst(&mut pair, 100, 300, 3_000_000_000);
    assert!(done < 100, "{done} messages of 300 bytes in 32 KiB");
    let probes = pair.ends[0].node.counters().tx_probes;
    assert!((1..=80).contains(&probes), "{probes} PINGs in 3 s");
    let took = drain(&mut pair, 100, 300);
    assert!(took < 20_000_000, "{took} ns");
}

/// What an overtaken packet says of credit is believed of none, however much was granted since.
#[test]
fn an_overtaken_packet_grants_nothing() {
    let mut pair = Pair::new(1500, false);
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.run(1_000_000);
    let (node, p, now) = (&mut pair.ends[0].node, PeerIdx::of(0), pair.now);
    let snd = &node.peers[p].snd;
    let (old, now_credit) = (snd.una.add(u32::MAX), snd.credit.wrapping_add(40_000));
    let old_grant = snd.credit as u16;
    node.peers[p].snd.credit = now_credit;
    assert!(node.take_ack_and_credit(now, p, old, old_grant));
    assert_eq!(node.peers[p].snd.credit, now_credit);
    let una = node.peers[p].snd.una;
    assert!(node.take_ack_and_credit(now, p, una, now_credit as u16 + 1));
    assert_eq!(node.peers[p].snd.credit, now_credit + 1);
}

/// Goal: what is refused costs no credit for ever. Method: more messages to nobody than there is
/// credit for, one after the other, and one to somebody behind them.
#[test]
fn refused_messages_give_their_credit_back() {
    let mut pair = Pair::new(1500, false);
    let End { node, av, peer, .. } = &mut pair.ends[0];
    let somebody = *peer;
    let addr = node.objects().av_lookup(*av, somebody).unwrap();
    *peer = node.sessions().av_insert(Instant(0), *av, EpAddr { ep: 77, ..addr }).unwrap();
    for context in 0..100 {
        pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), context).unwrap();
        pair.run(1_000_000);
        let err = pair.read_err(0);
        assert_eq!((err.err, err.cqe.op_context), (Error::ConnRefused, context));
    }
    pair.ends[0].peer = somebody;
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    pair.run(1_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
}

/// Goal: what is refused costs no credit for ever, also where nothing is known of it any more.
/// Method: on a port that loses nothing, bursts of messages to nobody that use up the quota, and
/// with the last of it ask for an acknowledgement.
#[test]
fn messages_without_a_record_give_their_credit_back() {
    let mut pair = Pair::new(1500, true);
    pair.short = Some(0);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.run(1_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    let End { node, av, peer, .. } = &mut pair.ends[0];
    let addr = node.objects().av_lookup(*av, *peer).unwrap();
    *peer = node.sessions().av_insert(Instant(0), *av, EpAddr { ep: 77, ..addr }).unwrap();
    for _ in 0..20 {
        while pair.ends[0].node.peers[PeerIdx::of(0)].tx_room() > 0 {
            pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 1).unwrap();
            pair.read(0);
        }
        pair.run(1_000_000);
    }
    let refused = pair.ends[1].node.counters().rx_refused;
    assert!(refused > 0, "none asked for an acknowledgement");
    let theirs = pair.ends[1].node.peers[PeerIdx::of(0)].outstanding();
    let ours = pair.ends[0].node.peers[PeerIdx::of(0)].credits();
    assert_eq!(ours, theirs, "after {refused} refusals");
}
