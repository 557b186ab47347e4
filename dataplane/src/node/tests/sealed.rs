//! Sessions with keys: they do what others do, and nobody without the key changes anything.

use super::*;
use crate::error::Error;
use crate::node::peer::State;
use crate::node::{CLAIMS_MAX, INBOX_BURSTS};
use crate::seal::{Keyring, Mode, PreSharedKey};
use crate::wire::{BASE_LEN, Base, OpenOp, RstOp, RstReason, TAG_LEN, Ty, VERSIONS, sealed};

const MS: u64 = 1_000_000;

fn pre_shared(key: &[u8], mode: Mode) -> PreSharedKey {
    PreSharedKey::with_key_frames(key, mode, 5).unwrap()
}

fn keyed(station: u8, mtu: usize, key: &[u8], mode: Mode) -> End {
    let keys = Keyring::new(vec![pre_shared(key, mode)], [station; 32]);
    end_with(station, mtu, false, NodeSettings { keys, ..NodeSettings::default() })
}

fn pair(mtu: usize) -> Pair {
    Pair::of([1, 2].map(|station| keyed(station, mtu, &[7; 32], Mode::Encrypted)))
}

/// Sends a message of `len` bytes from end 0 to end 1, which has posted a receive, and says whether
/// it has arrived whole within `ms`.
pub(super) fn arrives(pair: &mut Pair, len: usize, ms: u64) -> bool {
    let (to, seen) = shared(len);
    pair.recv(1, to, 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&bytes(len)), 5, OpFlags::empty(), 2).unwrap();
    pair.run(ms * MS);
    pair.read(0).len() == 1 && pair.read(1).len() == 1 && contents(&seen) == bytes(len)
}

#[test]
fn messages_of_every_size_arrive_in_both_modes() {
    for mode in [Mode::Encrypted, Mode::Authenticated] {
        for (mtu, drop, dup) in [(1500, 0, 0), (9000, 0, 3), (1500, 11, 7), (256, 0, 0)] {
            let mut pair = Pair::of([1, 2].map(|station| keyed(station, mtu, &[7; 16], mode)));
            (pair.drop, pair.dup, pair.scatter, pair.short) = (drop, dup, true, Some(0));
            for len in [0, 1, 8, 200, 1400, 5_000, 70_000] {
                assert!(arrives(&mut pair, len, 400), "{len} bytes, {mode:?}, {mtu}, {drop}");
            }
            pair.run(100 * MS);
            pair.assert_quiet();
            // Most leave in the call that posts them, where a frame holds a credit's worth.
            assert_eq!(pair.short.unwrap() > 0, mtu > 256, "{:?}", pair.short);
            let of = |i: usize| {
                let node = &pair.ends[i].node;
                let (p, _) = node.peers.iter().next().expect("one");
                let tally = &node.observed.tallies[p.at()];
                [tally.tx_bytes, tally.rx_bytes]
            };
            let ([sent, _], [_, received]) = (of(0), of(1));
            assert!(sent == received || drop + dup > 0, "{sent} bytes sent, {received} received");
            let counters = pair.ends.each_ref().map(|end| end.node.counters().clone());
            assert!(
                counters.iter().all(|c| (c.sessions_opened, c.rx_forged, c.rx_clear) == (1, 0, 0))
            );
            assert_eq!(counters.iter().any(|c| c.rx_replayed > 0), dup != 0);
        }
    }
}

/// Every frame on the wire but the refusal of a key says that it is sealed, and shows nothing of
/// the message.
#[test]
fn nothing_of_a_message_is_on_the_wire() {
    let mut pair = pair(1500);
    let text = b"sixteen letters!".repeat(100);
    let mut counters = [Vec::new(), Vec::new()];
    // The second leaves in the call that posts it.
    for (len, longest) in [(1600, 1514), (800, 872)] {
        pair.recv(1, IoBuf::leaked(&[0; 1600]), 1, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&text[..len]), 1, OpFlags::empty(), 2).unwrap();
        let mut sizes = 0;
        carry(&mut pair, 50, |from, frame| {
            assert_ne!(frame[15] & 0x80, 0, "it is sealed");
            assert!(!frame.windows(16).any(|part| part == &text[..16]), "it can be read");
            assert!(frame.len() <= 1514, "{} bytes", frame.len());
            sizes = sizes.max(frame.len());
            if !matches!(sealed::ty_of(frame), Some(Ty::Open | Ty::Rst)) {
                counters[from].push(sealed::counter(frame));
            }
            vec![(1 - from, frame.to_vec())]
        });
        assert_eq!((pair.read(0).len(), pair.read(1).len(), sizes), (1, 1, longest), "{len}");
        pair.short.get_or_insert(0);
    }
    assert_eq!(pair.short, Some(1));
    for counters in counters {
        assert!(!counters.is_empty() && counters.is_sorted_by(|a, b| a < b), "{counters:?}");
    }
}

/// Lets `ms` pass. What becomes of a frame of an end says `fate`: whom it reaches, and as what.
pub(super) fn carry(
    pair: &mut Pair,
    ms: u64,
    mut fate: impl FnMut(usize, &[u8]) -> Vec<(usize, Vec<u8>)>,
) {
    for _ in 0..ms * 20 {
        for i in 0..2 {
            let End { node, out, .. } = &mut pair.ends[i];
            node.transmit(pair.now, &mut sink(out));
            for frame in std::mem::take(&mut pair.ends[i].out) {
                for (to, bytes) in fate(i, &frame) {
                    pair.ends[to].node.on_frame(pair.now, &RxFrame::new(&bytes));
                }
            }
        }
        pair.now = pair.now + 50_000;
    }
}

/// What somebody without the key makes of a frame that was seen. Number `n` is any number.
fn forged(frame: &[u8], n: usize) -> Vec<u8> {
    let mut bytes = frame.to_vec();
    let (at, with) = (drawn(n) % bytes.len(), drawn(n + 1) as u8 | 1);
    match n % 8 {
        0 => bytes[at] ^= with,
        1 => bytes.truncate(at),
        2 => bytes[15] &= 0x7f,
        3 => {
            // A packet that is not sealed, with a checksum.
            bytes[15] = bytes[15] & 0x7f | 3;
            let ty = [Ty::Msg, Ty::Ack, Ty::Ping, Ty::Nop, Ty::Data][drawn(n) % 5] as u8;
            bytes[14] = bytes[14] & 0xe0 | ty;
            bytes.truncate(BASE_LEN + 24);
            sealed::set_counter(&mut bytes, 0);
            let plen = 0;
            sealed::set_plen(&mut bytes, plen);
            let len = bytes.len();
            bytes.resize(len + 4, 0);
            sealed::put_crc(&mut bytes, len);
        }
        4 => sealed::set_counter(&mut bytes, drawn(n) as u32),
        5 => {
            // The psn, the acknowledgement or the grant.
            let at = 20 + drawn(n) % 10;
            bytes[at] = bytes[at].wrapping_add(with);
        }
        6 => {
            let ty = 1 + drawn(n) as u8 % 19;
            bytes[14] = bytes[14] & 0xe0 | ty;
        }
        _ => {
            let len = bytes.len();
            bytes[len - TAG_LEN..].iter_mut().for_each(|b| *b = b.wrapping_add(with));
        }
    }
    bytes
}

/// An RST to end `to` that names its session, as anybody can who has seen its OPEN.
pub(super) fn forged_rst(pair: &Pair, to: usize, reason: RstReason) -> Vec<u8> {
    let (_, peer) = pair.ends[to].node.peers.iter().next().expect("one");
    let rst = RstOp {
        echo_sid: peer.remote_sid,
        echo_psn: peer.snd.nxt,
        life: 77,
        victim_inc: pair.ends[to].node.settings.incarnation,
        victim_epoch: peer.epoch,
        reason,
        versions: VERSIONS,
    };
    let (dst, src) = (pair.ends[to].node.port.station, pair.ends[1 - to].node.port.station);
    let base = Base {
        dst_sid: peer.sid,
        ..pair.ends[to].node.port.control(dst, Ty::Rst, 0, crate::psn::Psn(0))
    };
    crate::wire::frame(&Base { src, crc: true, ..base }, &crate::wire::Op::Rst(rst), &[])
}

/// The ends of a pair in a later life of both.
fn another_life(life: u8) -> Pair {
    Pair::of([1, 2].map(|station| {
        let keys = Keyring::new(vec![pre_shared(&[7; 32], Mode::Encrypted)], [station + life; 32]);
        let mut end =
            end_with(station, 1500, false, NodeSettings { keys, ..NodeSettings::default() });
        end.node.settings.incarnation += 1000 * u64::from(life);
        end
    }))
}

/// Goal: whoever is on the segment and has no key changes nothing. Method: to every frame of a
/// session that is busy in both directions come forged, mutated, truncated, replayed and reflected
/// ones, and resets that name it; then both ends begin another life, in which what was recorded of
/// those before is replayed too, from the first OPEN on; all messages arrive once, in the one
/// session of each life.
#[test]
fn an_attacker_on_the_segment_is_only_counted() {
    let (most, lives) = (1_000_000, 20);
    let mut seen = Vec::<(usize, Vec<u8>)>::new();
    let (mut n, mut attacks) = (0, 0);
    for life in 1..=lives {
        let mut pair = another_life(10 * life as u8);
        let until = most / lives * life;
        for round in 0.. {
            if attacks >= until {
                break;
            }
            let looks = [0, 1].map(|i| {
                let (to, look) = shared(3_000);
                pair.recv(1 - i, to, 5, OpFlags::empty(), round).unwrap();
                pair.send(i, IoBuf::leaked(&bytes(3_000)), 5, OpFlags::empty(), round).unwrap();
                look
            });
            carry(&mut pair, 5, |from, frame| {
                let mut all = vec![(1 - from, frame.to_vec())];
                for _ in 0..40 {
                    n += 1;
                    let (to, old) = match seen.get(drawn(n) % (seen.len() + 1)) {
                        Some((to, old)) if n % 3 == 0 => (*to, &old[..]),
                        _ => (1 - from, frame),
                    };
                    all.insert(drawn(n + 7) % (all.len() + 1), (to, forged(old, n)));
                    all.push((to, old.to_vec()));
                    all.push((1 - to, old.to_vec()));
                }
                attacks += all.len() - 1;
                // The oldest half stays, of lives before.
                if seen.len() >= 6_000 {
                    seen.drain(3_000..4_500);
                }
                seen.push((1 - from, frame.to_vec()));
                all
            });
            for to in 0..2 {
                for reason in [RstReason::Closed, RstReason::UnknownSession, RstReason::OtherKey] {
                    let rst = forged_rst(&pair, to, reason);
                    pair.ends[to].node.on_frame(pair.now, &RxFrame::new(&rst));
                }
            }
            for (i, look) in looks.iter().enumerate() {
                let right = contents(look) == bytes(3_000);
                assert_eq!((pair.read(i).len(), right), (2, true), "life {life}, round {round}");
            }
        }
        for end in &pair.ends {
            let c = end.node.counters();
            assert_eq!((c.sessions_opened, c.sessions_reset, c.sessions_dead), (1, 0, 0));
            assert!(c.rx_forged > 500 && c.rx_replayed > 100 && c.rx_clear > 20, "{c:?}");
            let claims = end.node.observed.claims();
            let sum = |at: usize| claims.iter().map(|claim| claim.counts[at]).sum::<u64>();
            assert!(claims.len() <= CLAIMS_MAX && sum(2) > 100 && sum(0) > 500, "{claims:?}");
            let (_, peer) = end.node.peers.iter().next().expect("one");
            assert_eq!(peer.state, State::Open);
        }
        pair.run(100 * MS);
        pair.assert_quiet();
    }
    assert!(attacks >= most);
}

/// Goal: no frame makes a node authenticate more than an OPEN is long, not even under its key.
#[test]
fn a_long_open_is_refused_before_its_tag_is_looked_at() {
    let mut pair = pair(1500);
    let mut opens = Vec::new();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    carry(&mut pair, 1, |_, frame| {
        opens.push(frame.to_vec());
        Vec::new()
    });
    let tag = pre_shared(&[7; 32], Mode::Encrypted);
    let plen = usize::from(sealed::plen(&opens[0]));
    for (more, forged) in [(0, 0), (TAG_LEN + 1, 1), (1000, 1)] {
        let mut bytes = opens[0][..BASE_LEN + plen].to_vec();
        bytes.resize(bytes.len() + more, 0);
        sealed::set_plen(&mut bytes, (plen + more) as u16);
        bytes.extend(tag.tag_key().tag(&bytes));
        let before = pair.ends[1].node.counters().clone();
        pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&bytes));
        assert_eq!(pair.ends[1].node.counters().rx_forged - before.rx_forged, forged, "{more}");
    }
}

/// How a message from one of these ends to the other ends, after how long, and what the two are
/// told.
pub(super) fn refused(ends: [End; 2]) -> (Option<Error>, u64, [bool; 2]) {
    let mut pair = Pair::of(ends);
    for end in &mut pair.ends {
        end.node.settings.t_dead_ns = 5_000 * MS;
    }
    let begun = pair.now;
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
    let mut told = [None; 2];
    for _ in 0..600 {
        pair.run(10 * MS);
        for (i, told) in told.iter_mut().enumerate() {
            while let Some(notice) = pair.ends[i].node.observed.notice() {
                if matches!(notice, Notice::OtherKey { .. } | Notice::BadCertificate { .. }) {
                    *told = told.or(Some(pair.now.since(begun) / MS));
                }
            }
        }
        let end = &mut pair.ends[0];
        if let Ok(failed) = end.node.receiving().cq_readerr(end.cq) {
            let soon = told.map(|at| at.is_some_and(|ms| ms < 50));
            assert!(pair.read(1).is_empty(), "it has arrived");
            return (Some(failed.err), pair.now.since(begun) / MS, soon);
        }
    }
    (None, pair.now.since(begun) / MS, told.map(|at| at.is_some()))
}

/// Goal: who has another key, or none, is refused with its own code after a second, and both ends
/// are told at once.
#[test]
fn another_key_and_none_are_refused_with_their_codes() {
    let key = |station| keyed(station, 1500, &[7; 32], Mode::Encrypted);
    let other = |station| keyed(station, 1500, &[8; 32], Mode::Encrypted);
    let mode = |station| keyed(station, 1500, &[7; 32], Mode::Authenticated);
    let none = |station| end(station, 1500, false);
    for (ends, want) in [
        ([key(1), other(2)], Error::Access),
        ([key(1), mode(2)], Error::Access),
        ([key(1), none(2)], Error::NoKey),
        ([none(1), key(2)], Error::NoKey),
    ] {
        let (err, ms, told) = refused(ends);
        assert_eq!((err, told), (Some(want), [true; 2]));
        assert!((1_000..1_100).contains(&ms), "{ms} ms");
    }
}

/// Two ends with different keys, and a send whose refusal is due since the last turn.
fn with_a_verdict_due() -> Pair {
    let key = |station, byte| keyed(station, 1500, &[byte; 32], Mode::Encrypted);
    let mut pair = Pair::of([key(1, 7), key(2, 8)]);
    pair.ends.iter_mut().for_each(|end| end.node.settings.t_dead_ns = 5_000 * MS);
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
    pair.run(900 * MS);
    pair.now = pair.now + 500 * MS;
    pair
}

/// Goal: a turn ends although a verdict is due that waits for frames still in the port, and the
/// verdict comes with the turn that finds none.
#[test]
fn a_verdict_waits_for_what_the_port_holds() {
    let mut pair = with_a_verdict_due();
    let told = [true, true, false].map(|backlog| {
        let End { node, out, cq, .. } = &mut pair.ends[0];
        node.turn.note_backlog(backlog);
        pair.now = pair.now + MS;
        // Where it fails this does not return.
        node.transmit(pair.now, &mut sink(out));
        node.receiving().cq_readerr(*cq).ok().map(|failed| failed.err)
    });
    assert_eq!(told, [None, None, Some(Error::Access)]);
}

/// Goal: a flood that always leaves frames in the port does not put off a verdict for ever: it
/// comes when all that the port held has been taken.
#[test]
fn a_verdict_does_not_wait_for_the_end_of_a_flood() {
    let mut pair = with_a_verdict_due();
    let End { node, out, cq, .. } = &mut pair.ends[0];
    let mut bursts = 0;
    let told = loop {
        node.turn.note_backlog(true);
        node.transmit(pair.now, &mut sink(out));
        bursts += 1;
        if let Ok(failed) = node.receiving().cq_readerr(*cq) {
            break failed.err;
        }
        assert!(bursts < 3 * INBOX_BURSTS, "it is never told");
        pair.now = pair.now + 1_000;
    };
    assert_eq!(told, Error::Access);
    // What came before the verdict was due may lie behind as much as a port holds.
    assert!(bursts > INBOX_BURSTS, "{bursts}");
}

/// Goal: a refusal that anybody can have sent ends nothing while the peer answers, if late.
#[test]
fn a_forged_refusal_ends_nothing() {
    let mut pair = pair(1500);
    pair.ends.iter_mut().for_each(|end| end.node.settings.t_dead_ns = 5_000 * MS);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
    for ms in 0..1_100 {
        for reason in [RstReason::OtherKey, RstReason::NoKey, RstReason::Version] {
            let rst = forged_rst(&pair, 0, reason);
            pair.ends[0].node.on_frame(pair.now, &RxFrame::new(&rst));
        }
        // Nothing reaches anybody in the first 900 ms.
        carry(&mut pair, 1, |from, frame| match ms > 900 {
            true => vec![(1 - from, frame.to_vec())],
            false => Vec::new(),
        });
    }
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    assert_eq!(pair.ends[0].node.counters().sessions_dead, 0);
}

/// Goal: two that open a session with each other at about the same time agree on one handshake,
/// whoever names whom. Method: both open at any distance and any delay.
#[test]
fn opens_that_cross_make_one_session() {
    for (start, delay, named) in [(0, 0), (0, 1), (0, 3), (1, 1), (2, 5), (5, 3), (7, 20), (25, 20)]
        .into_iter()
        .flat_map(|(start, delay)| (0..4).map(move |named| (start, delay, named)))
    {
        let mut pair = pair(1500);
        for i in 0..2 {
            if named >> i & 1 == 0 {
                let (_, peer) = pair.ends[i].node.peers.iter_mut().next().expect("one");
                peer.inc = 0;
            }
        }
        let mut on_the_way: [VecDeque<(Instant, Vec<u8>)>; 2] = Default::default();
        for ms in 0..400 {
            for (i, starts) in [0, start].into_iter().enumerate() {
                if ms == starts {
                    pair.recv(i, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
                    pair.send(i, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
                }
                while on_the_way[i].front().is_some_and(|(at, _)| *at <= pair.now) {
                    let (_, bytes) = on_the_way[i].pop_front().expect("seen");
                    pair.ends[i].node.on_frame(pair.now, &RxFrame::new(&bytes));
                }
                let End { node, out, .. } = &mut pair.ends[i];
                node.transmit(pair.now, &mut sink(out));
                let at = pair.now + delay * MS;
                let sent = std::mem::take(&mut pair.ends[i].out).into_iter();
                on_the_way[1 - i].extend(sent.map(|bytes| (at, bytes)));
            }
            pair.now = pair.now + MS;
        }
        let case = format!("started after {start} ms, {delay} ms on the way, named {named:b}");
        for i in 0..2 {
            assert_eq!(pair.read(i).len(), 2, "{case}");
            assert_eq!(pair.ends[i].node.counters().rx_forged, 0, "{case}");
        }
    }
}

/// Goal: a peer that has restarted says so with its key, and the next session is another one.
#[test]
fn a_restarted_peer_is_believed() {
    let mut pair = pair(1500);
    assert!(arrives(&mut pair, 100, 50));
    let mut second = keyed(2, 1500, &[7; 32], Mode::Encrypted);
    second.node.settings.incarnation = 777;
    let addr = pair.ends[0].node.addr_of(pair.ends[0].ep).unwrap();
    second.peer = second.node.sessions().av_insert(pair.now, second.av, addr).unwrap();
    pair.ends[1] = second;
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 3).unwrap();
    pair.run(1_100 * MS);
    assert_eq!(pair.read_err(0).err, Error::ConnReset, "it went to the first life");
    let addr = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
    let end = &mut pair.ends[0];
    pair.ends[0].peer = end.node.sessions().av_insert(pair.now, end.av, addr).unwrap();
    assert!(arrives(&mut pair, 100, 50));
}

/// Goal: an RST that somebody with the key wrote for whatever packet ends no session whose peer
/// answers. Method: another life of the peer, which has no session, answers a frame of the session
/// that is not sealed rightly; its answer is repeated to the session.
#[test]
fn an_echoed_reset_is_doubted() {
    let mut pair = pair(1500);
    assert!(arrives(&mut pair, 100, 50));
    let mut other = keyed(2, 1500, &[7; 32], Mode::Encrypted);
    other.node.settings.incarnation = 777;
    let mut resets: Vec<Vec<u8>> = Vec::new();
    for round in 0..20 {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), round).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), round).unwrap();
        carry(&mut pair, 5, |from, frame| {
            if from == 0 {
                let mut bad = frame.to_vec();
                bad.iter_mut().rev().take(4).for_each(|byte| *byte ^= 0x55);
                other.node.on_frame(Instant(1 + round * MS), &RxFrame::new(&bad));
                other.node.transmit(Instant(1 + round * MS), &mut sink(&mut other.out));
                resets.extend(other.out.drain(..));
            }
            vec![(1 - from, frame.to_vec())]
        });
        for rst in &resets {
            assert_eq!(sealed::ty_of(rst), Some(Ty::Rst));
            pair.ends[0].node.on_frame(pair.now, &RxFrame::new(rst));
        }
        pair.run(100 * MS);
        assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1), "round {round}");
    }
    assert!(resets.len() > 10, "{} resets", resets.len());
    pair.run(2_000 * MS);
    let c = pair.ends[0].node.counters();
    assert_eq!((c.sessions_opened, c.sessions_reset, c.rx_forged), (1, 0, 0));
    pair.assert_quiet();
}

#[test]
fn messages_to_oneself_need_no_key() {
    let mut pair = pair(1500);
    let end = &mut pair.ends[0];
    let own = end.node.addr_of(end.ep).unwrap();
    end.peer = end.node.sessions().av_insert(Instant(1), end.av, own).unwrap();
    pair.recv(0, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
    pair.run(10 * MS);
    assert_eq!((pair.read(0).len(), pair.frames), (2, 0));
}

/// Memory of a session with keys, beside its record.
#[test]
fn a_session_with_keys_is_small() {
    let len = size_of::<crate::seal::SessionKeys>();
    assert!(len <= 2048, "{len} bytes");
}

/// A challenge is sealed too, and the OPEN that brings its cookie is the one of the handshake.
#[test]
fn a_challenge_is_answered_with_a_key() {
    let mut pair = pair(1500);
    for n in 0..40 {
        // Half-open sessions with stations that are not there; their OPENs are of who has the key.
        let mut ghost = keyed(100 + n, 1500, &[7; 32], Mode::Encrypted);
        let addr = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
        let addr = EpAddr { incarnation: 0, ..addr };
        ghost.peer = ghost.node.sessions().av_insert(pair.now, ghost.av, addr).unwrap();
        let (kind, buf) = (MsgKind::Tagged, IoBuf::leaked(&[1; 8]));
        let (dest, no_completion, flags) = (ghost.peer, false, OpFlags::empty());
        let req = SendReq { kind, buf, dest, tag: 1, data: 0, context: 0, flags, no_completion };
        ghost.node.post_send(pair.now, ghost.ep, req).unwrap();
        ghost.node.transmit(pair.now, &mut sink(&mut ghost.out));
        for frame in ghost.out {
            pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&frame));
        }
        pair.run(MS);
    }
    assert!(arrives(&mut pair, 100, 200));
    assert!(pair.ends[1].node.counters().tx_challenges > 0);
    let _ = OpenOp::LEN;
}

/// Goal: a port that takes nothing for long costs a session no more counters than the peer follows.
/// Method: keys of 32 frames, and a port that is full, or has no route, for 200 ms of polls every
/// 10 us each.
#[test]
fn a_port_that_is_full_for_long_uses_up_no_keys() {
    let mut pair = pair(1500);
    assert!(arrives(&mut pair, 8, 10));
    let used = |pair: &Pair| {
        let seals = pair.ends[0].node.openings.seals.as_ref().unwrap();
        seals.sessions.values().map(|session| session.keys.used()).sum::<u64>()
    };
    let before = used(&pair);
    pair.send(0, IoBuf::leaked(&[1; 900]), 5, OpFlags::empty(), 2).unwrap();
    let mut before = before;
    for answer in [Tx::Full, Tx::NoRoute] {
        for _ in 0..20_000 {
            pair.now = pair.now + 10_000;
            pair.ends[0].node.transmit(pair.now, &mut |_: &TxFrame<'_>| answer);
        }
        // One each millisecond, and those of the first one.
        let tried = used(&pair) - std::mem::replace(&mut before, used(&pair));
        assert!((100..240).contains(&tried), "{answer:?}: {tried} counters");
    }
    // A port that is full now and then is tried again after 2 us.
    let (to, _) = shared(900);
    pair.recv(1, to, 5, OpFlags::empty(), 1).unwrap();
    pair.run(10 * MS);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    let before = used(&pair);
    pair.send(0, IoBuf::leaked(&[1; 900]), 5, OpFlags::empty(), 2).unwrap();
    for ns in [0, 1_000, 1_000] {
        pair.now = pair.now + ns;
        pair.ends[0].node.transmit(pair.now, &mut |_: &TxFrame<'_>| Tx::Full);
    }
    assert_eq!(used(&pair) - before, 2);
}

/// Goal: the secrets of both directions are exported once for each session, the same at both ends,
/// and by no node that is not set to export them.
#[test]
fn secrets_of_a_session_are_exported_once() {
    let mut pair = Pair::of([(1, true), (2, true)].map(|(station, export_secrets)| {
        let keys = Keyring::new(vec![pre_shared(&[7; 32], Mode::Encrypted)], [station; 32]);
        let settings = NodeSettings { keys, export_secrets, ..NodeSettings::default() };
        end_with(station, 1500, false, settings)
    }));
    let lines = |pair: &mut Pair, i: usize| {
        let openings = &mut pair.ends[i].node.openings;
        let has_secrets = openings.has_secrets();
        let secrets = openings.take_secrets();
        assert_eq!(has_secrets, !secrets.is_empty());
        let mut lines: Vec<String> = secrets.iter().map(ToString::to_string).collect();
        lines.sort_unstable();
        lines
    };
    for session in 0..2 {
        assert_eq!([0, 1].map(|i| lines(&mut pair, i).len()), [0, 0]);
        assert!(arrives(&mut pair, 100, 50), "session {session}");
        let [own, theirs] = [0, 1].map(|i| lines(&mut pair, i));
        assert_eq!((own.len(), own), (2, theirs), "session {session}");
        for i in 0..2 {
            let (now, other) = (pair.now, pair.ends[1 - i].node.port.station);
            pair.ends[i].node.sessions().drop_session(now, other);
        }
    }
    let mut silent = self::pair(1500);
    assert!(arrives(&mut silent, 100, 50));
    assert_eq!(lines(&mut silent, 0), [""; 0]);
}
