//! Nodes whose keys change while messages pass.

use super::*;
use crate::error::Error;
use crate::node::peer::State;
use crate::psn::Psn;
use crate::seal::{Keyring, Mode, PreSharedKey};
use crate::types::NO_ENTRY;
use crate::wire::{self, BASE_LEN, Base, Op, OpenOp, RstOp, RstReason, TAG_LEN, Ty};

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
    pair.ends[i].node.sessions().set_keys(pair.now, list(numbers)).unwrap();
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
        let other = pair.ends[1 - i].node.port.station;
        pair.ends[i].node.sessions().drop_session(pair.now, other);
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
        assert!(
            matches!(node.sessions().set_keys(now, list(bad)), Err(Error::Invalid(_))),
            "{bad:?}"
        );
    }
    assert!(arrives(&mut pair, 0, 50), "the list is what it was");
    for mut end in [end(1, 1500, false), end_with(1, 1500, true, settings(1, &[1]))] {
        assert!(matches!(end.node.sessions().set_keys(now, list(&[1])), Err(Error::OpNotSupp(_))));
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
fn a_pending_open_is_sent_again_under_the_new_first_key() {
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

/// Goal: nor does an answer to the OPEN under the key before keep the two from agreeing. Method:
/// the answer is lost, and the first key changes at who opens, or comes after that.
#[test]
fn an_answer_under_the_key_before_is_left() {
    for late in [false, true] {
        let mut pair = pair([&[1, 2], &[2, 1]]);
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
        let mut on_the_way = VecDeque::<Vec<u8>>::new();
        for i in 0..2 {
            let End { node, out, .. } = &mut pair.ends[i];
            for bytes in on_the_way.drain(..) {
                node.on_frame(pair.now, &RxFrame::new(&bytes));
            }
            node.transmit(pair.now, &mut sink(out));
            on_the_way = std::mem::take(out);
        }
        assert_eq!(on_the_way.len(), 1, "an answer");
        set(&mut pair, 0, &[2, 1]);
        if late {
            pair.ends[0].node.on_frame(pair.now, &RxFrame::new(&on_the_way[0]));
        }
        pair.run(20 * MS);
        assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1), "{late}");
        assert_eq!(opened(&pair), [1, 1]);
    }
}

/// Goal: who answers under a key that nobody lists any more, and has something to say, does not
/// wait until that is refused for good. Method: the answer is lost, and then either the peer has
/// gone and comes back with the new key alone, or it has got a second copy of the answer and its
/// frames are lost.
#[test]
fn an_answer_under_a_key_that_is_gone_is_no_refusal() {
    for comes_back in [true, false] {
        let mut pair = pair([&[1, 2], &[1, 2]]);
        let now = pair.now;
        let left = |pair: &mut Pair, i: usize| {
            let End { node, out, .. } = &mut pair.ends[i];
            node.transmit(now, &mut sink(out));
            std::mem::take(out)
        };
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
        for frame in left(&mut pair, 0) {
            pair.ends[1].node.on_frame(now, &RxFrame::new(&frame));
        }
        pair.send(1, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 3).unwrap();
        let answer = left(&mut pair, 1);
        if comes_back {
            let mut second = end_with(1, 1500, false, settings(1, &[2]));
            second.node.settings.incarnation = 777;
            let addr = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
            second.peer = second.node.sessions().av_insert(now, second.av, addr).unwrap();
            pair.ends[0] = second;
        } else {
            answer.iter().for_each(|f| pair.ends[0].node.on_frame(now, &RxFrame::new(f)));
            left(&mut pair, 0);
            set(&mut pair, 0, &[2]);
        }
        set(&mut pair, 1, &[2]);
        pair.recv(0, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 4).unwrap();
        pair.run(300 * MS);
        if comes_back {
            // The message was for the first life.
            assert_eq!(pair.read_err(1).err, Error::ConnReset);
        } else {
            assert_eq!((pair.read(0).len(), pair.read(1).len()), (2, 2));
            assert_eq!(opened(&pair), [1, 1], "in the session that there was");
        }
    }
}

/// Goal: an OPEN that a later one has overtaken makes no session in its place. Method: the first
/// OPEN comes when the second was answered, and before anything else.
#[test]
fn an_open_that_was_overtaken_is_refused() {
    let mut pair = pair([&[1, 2], &[2, 1]]);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    let left = |pair: &mut Pair, i: usize| {
        let End { node, out, .. } = &mut pair.ends[i];
        node.transmit(pair.now, &mut sink(out));
        std::mem::take(out)
    };
    let take = |pair: &mut Pair, i: usize, frames: &VecDeque<Vec<u8>>| {
        frames.iter().for_each(|f| pair.ends[i].node.on_frame(pair.now, &RxFrame::new(f)));
    };
    let first = left(&mut pair, 0);
    set(&mut pair, 0, &[2, 1]);
    let second = left(&mut pair, 0);
    take(&mut pair, 1, &second);
    let answer = left(&mut pair, 1);
    take(&mut pair, 0, &answer);
    take(&mut pair, 1, &first);
    pair.run(20 * MS);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    assert_eq!(opened(&pair), [1, 1]);
    assert!(pair.ends.iter().all(|end| end.node.counters().sessions_reset == 0));
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
        if end.node.receiving().cq_readerr(end.cq).is_ok() {
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
        node.sessions().reopen(now, p, false);
        node.sessions().serve_open(p, out);
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

const REKEY_NS: u64 = 20 * MS;

/// Two ends that leave a key after 20 ms and after 2^`bits` frames.
fn renewing(bits: u32) -> Pair {
    Pair::of([1, 2].map(|station| {
        let key = PreSharedKey::with_key_frames(&[1; 32], Mode::Encrypted, bits).unwrap();
        let keys = Keyring::new(vec![key], [station; 32]);
        let settings = NodeSettings { keys, rekey_ns: REKEY_NS, ..NodeSettings::default() };
        end_with(station, 1500, false, settings)
    }))
}

/// The numbers of the keys of end `i`: what it seals with, what it opens with, and the one before.
fn generations(pair: &Pair, i: usize) -> Vec<u64> {
    let shown = format!("{:?}", pair.ends[i].node.openings.seals);
    let numbers = shown.split("generation: ").skip(1);
    numbers.map(|rest| rest.split([',', ' ']).next().unwrap().parse().unwrap()).collect()
}

/// Goal: a session's keys change by time, in both directions, without an operation that fails or
/// waits; and the old ones are forgotten. Method: messages for 30 times that time, with frames that
/// are lost and frames that come twice.
#[test]
fn keys_of_a_session_change_by_time() {
    for (bits, drop, dup) in [(22, 0, 0), (22, 9, 5), (6, 11, 0)] {
        let mut pair = renewing(bits);
        (pair.drop, pair.dup, pair.scatter) = (drop, dup, true);
        for round in 0..300 {
            assert!(arrives(&mut pair, round % 2, 2), "round {round}, {bits} bits");
        }
        for end in &pair.ends {
            let c = end.node.counters();
            assert_eq!((c.sessions_opened, c.sessions_reset, c.rx_forged), (1, 0, 0));
        }
        for i in 0..2 {
            let [tx, rx, ..] = generations(&pair, i)[..] else { panic!("no keys") };
            assert!(tx >= 25 && rx >= 25, "{tx} and {rx}, {bits} bits");
            assert!(bits < 22 || tx <= 31, "{tx} keys");
        }
        pair.run(100 * MS);
        pair.assert_quiet();
    }
}

/// Goal: a session that was idle goes on with another key, and no more keys are left than the peer
/// follows, however long nothing reaches it.
#[test]
fn no_key_is_left_that_the_peer_does_not_have() {
    let mut pair = renewing(22);
    assert!(arrives(&mut pair, 0, 2));
    pair.run(200 * MS);
    assert_eq!(generations(&pair, 0), [0, 0], "nothing has left");
    assert!(arrives(&mut pair, 0, 2) && arrives(&mut pair, 1, 2));
    for i in 0..2 {
        assert_eq!(generations(&pair, i)[..2], [1, 1], "at {i}");
    }
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    pair.drop = 1;
    pair.run(10 * REKEY_NS);
    pair.drop = 0;
    pair.run(100 * MS);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    for round in 0..100 {
        assert!(arrives(&mut pair, round % 2, 2), "round {round}");
    }
    assert!(generations(&pair, 0)[0] > 5, "it goes on");
    assert!(pair.ends.iter().all(|end| end.node.counters().rx_forged == 0));
}

/// Goal: a key that frames have used up, while none of them arrives, is not left by time as well.
/// Method: keys so long that the peer looks ahead for one alone.
#[test]
fn a_key_that_has_just_begun_is_not_old() {
    let mut pair = renewing(15);
    assert!(arrives(&mut pair, 0, 2) && arrives(&mut pair, 1, 2));
    pair.run(2 * REKEY_NS);
    let seals = pair.ends[0].node.openings.seals.as_mut().unwrap();
    let keys = &mut seals.sessions.values_mut().next().unwrap().keys;
    let key = keys.generation();
    while keys.generation() == key {
        keys.seal(&mut [0; BASE_LEN + TAG_LEN]);
    }
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    pair.drop = 1;
    pair.run(3 * REKEY_NS);
    pair.drop = 0;
    pair.run(100 * MS);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    assert_eq!(pair.ends[1].node.counters().rx_forged, 0);
}

#[test]
fn a_time_too_short_is_refused() {
    let settings = NodeSettings { rekey_ns: 999_999, incarnation: 1, ..NodeSettings::default() };
    assert!(matches!(Node::new(settings, &caps(1, 1500, false)), Err(Error::Invalid(_))));
}

/// Goal: a reset that anybody can have written, as it is not sealed, ends nothing and refuses no
/// key, whatever it says. Method: one for each other reason, of the OPEN that is under way.
#[test]
fn a_reset_in_the_clear_is_no_refusal_of_the_key() {
    let mut pair = pair([&[1], &[1]]);
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    let (now, from) = (pair.now, pair.ends[1].node.port.station);
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(now, &mut sink(out));
    let (p, peer) = node.peers.iter().next().unwrap();
    let (victim_inc, victim_epoch) = (node.settings.incarnation, peer.epoch);
    let reasons = [
        RstReason::UnknownSession,
        RstReason::Closed,
        RstReason::Version,
        RstReason::WrongIncarnation,
        RstReason::Dead,
        RstReason::OtherKey,
    ];
    for (refused, reason) in (1..).zip(reasons) {
        let op = RstOp {
            echo_sid: 0,
            echo_psn: Psn(0),
            life: 1,
            victim_inc,
            victim_epoch,
            reason,
            versions: wire::VERSIONS,
        };
        let base = node.port.control(from, Ty::Rst, 0, Psn(0));
        let base = Base { src: base.dst, dst: base.src, ..base };
        node.sessions().on_clear_rst(
            now,
            from,
            &RxFrame::new(&wire::frame(&base, &Op::Rst(op), &[])),
        );
        let of_key = reason == RstReason::OtherKey;
        assert_eq!(node.openings.refusal(p).is_some(), of_key, "{reason:?}");
        assert_eq!(node.counters().rx_bad_rst, refused - u64::from(of_key), "{reason:?}");
    }
}

/// Goal: who has another key is told of once, and again when there are other keys here.
#[test]
fn another_key_is_told_of_once_for_each_list() {
    let mut pair = pair([&[1], &[2]]);
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    for list in [&[2], &[3]] {
        set(&mut pair, 1, list);
        pair.run(100 * MS);
        let node = &mut pair.ends[1].node;
        let told: Vec<Notice> = std::iter::from_fn(|| node.observed.notice()).collect();
        let station = Station::at([2, 0, 0, 0, 0, 1]);
        assert_eq!(told, [Notice::OtherKey { station, has_key: true }], "{list:?}");
    }
}

/// Goal: strangers without a key, of whom anybody can invent any number, are told of up to a bound,
/// each once. Method: OPENs in the clear.
#[test]
fn strangers_without_a_key_are_told_of_up_to_a_bound() {
    let mut pair = pair([&[1], &[1]]);
    let now = pair.now;
    let node = &mut pair.ends[0].node;
    let mut told = Vec::new();
    for n in (0..70).chain(0..70) {
        let stranger = Station::at([2, 7, 0, 0, 0, n]);
        let base = node.port.control(stranger, Ty::Open, 0, Psn(1));
        let base = Base { src: base.dst, dst: base.src, ..base };
        let (sid, epoch, inc, max_frame, window) = (5, 1, 77, 1500, 256);
        let open = OpenOp { sid, epoch, inc, max_frame, window, ..OpenOp::default() };
        let open = Op::Open(open);
        node.on_frame(now, &RxFrame::new(&wire::frame(&base, &open, &[])));
        told.extend(std::iter::from_fn(|| node.observed.notice()));
    }
    let station = |n| Station::at([2, 7, 0, 0, 0, n]);
    let notice = |n| Notice::OtherKey { station: station(n), has_key: false };
    assert_eq!(told, (0..64).map(notice).collect::<Vec<_>>());
}

/// Goal: who has sent what no completion tells of, and waits for the answer of a peer that has
/// another key, is told by the receive; one whose send tells, or who waits for anybody, waits on.
#[test]
fn a_receive_that_names_a_peer_with_another_key_ends() {
    for no_completion in [true, false] {
        let mut pair = pair([&[1], &[2]]);
        let End { node, ep, peer, .. } = &mut pair.ends[0];
        let (kind, tag) = (MsgKind::Msg, 0);
        for (src, context) in [(*peer, 10), (FI_ADDR_UNSPEC, 11)] {
            let (buf, flags) = (IoBuf::leaked(&[0; 8]), OpFlags::empty());
            let req = RecvReq { kind, buf, src, tag, ignore: 0, context, flags };
            node.post_recv(Instant(0), *ep, req).unwrap();
        }
        let (buf, dest, data) = (IoBuf::leaked(&[1; 8]), *peer, 0);
        let (context, flags) =
            if no_completion { (NO_ENTRY, OpFlags::INJECT) } else { (2, OpFlags::empty()) };
        let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
        node.post_send(Instant(0), *ep, req).unwrap();
        pair.run(1_500 * MS);
        let err = pair.read_err(0);
        let want = if no_completion { 10 } else { 2 };
        assert_eq!((err.cqe.op_context, err.err), (want, Error::Access));
        assert_eq!(
            pair.ends[0].node.statistics().levels().posted,
            if no_completion { 1 } else { 2 }
        );
    }
}
