//! Nodes with certificates: they have sessions with whom they trust, and nobody else changes
//! anything.

use std::sync::Arc;

use rcgen::{PKCS_ED25519, PKCS_RSA_SHA256};

use super::sealed::{arrives, carry, forged_rst, refused};
use super::*;
use crate::error::Error;
use crate::node::peer::State;
use crate::seal::test_certs::{NOW, PemCredentials, Root, at, credentials, foreign, leaf};
use crate::seal::{Credentials, Keyring, Mode, PreSharedKey, TagKey};
use crate::wire::{BASE_LEN, OpenOp, RstReason, Ty, sealed};

const MS: u64 = 1_000_000;

fn settings(station: u8, own: Arc<Credentials>) -> NodeSettings {
    let keys = Keyring::of_certificate_with(own, Mode::Encrypted, 5, [station; 32]);
    NodeSettings { keys, ..NodeSettings::default() }
}

fn certified(station: u8, mtu: usize, own: Arc<Credentials>) -> End {
    end_with(station, mtu, false, settings(station, own))
}

fn name(station: u8) -> String {
    format!("spiffe://a.org/job/{station}")
}

fn pair(root: &Root, mtu: usize) -> Pair {
    Pair::of([1, 2].map(|station| {
        let own = credentials(&root.leaf(&name(station)), root, &[]).unwrap();
        certified(station, mtu, own)
    }))
}

/// The state of the session of an end, and how many it has opened.
fn state(pair: &Pair, i: usize) -> (State, u64) {
    let node = &pair.ends[i].node;
    let (_, peer) = node.peers.iter().next().expect("one");
    (peer.state, node.counters().sessions_opened)
}

#[test]
fn messages_arrive_whatever_gets_lost() {
    let root = Root::new();
    for (mtu, drop, dup) in [(1500, 0, 0), (9000, 0, 3), (1500, 3, 0), (1500, 11, 7), (900, 5, 0)] {
        let mut pair = pair(&root, mtu);
        (pair.drop, pair.dup, pair.scatter) = (drop, dup, true);
        // A server, which knows nobody.
        let (_, peer) = pair.ends[1].node.peers.iter_mut().next().expect("one");
        peer.inc = 0;
        for len in [0, 1400, 70_000] {
            assert!(arrives(&mut pair, len, 800), "{len} bytes, {mtu}, {drop}, {dup}");
        }
        pair.run(100 * MS);
        pair.assert_quiet();
        for end in &pair.ends {
            let c = end.node.counters();
            assert_eq!((c.sessions_opened, c.rx_forged, c.rx_clear), (1, 0, 0));
        }
        // No certificate is looked at before its sender has shown that he receives.
        assert!(pair.ends[1].node.counters().tx_challenges > 0);
    }
}

/// Goal: both open at once, at any distance: one session, whatever gets lost.
#[test]
fn opens_that_cross_make_one_session() {
    let root = Root::new();
    for seed in 0..40_usize {
        let mut pair = pair(&root, 1500);
        (pair.drop, pair.scatter) = ([0, 5, 3][seed % 3], true);
        for from in [seed % 2, 1 - seed % 2] {
            let buf = IoBuf::leaked(&[1; 8]);
            pair.recv(1 - from, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
            pair.send(from, buf, 5, OpFlags::empty(), 2).unwrap();
            pair.run(seed as u64 * 2_500);
        }
        pair.run(600 * MS);
        assert_eq!([0, 1].map(|i| pair.read(i).len()), [2, 2], "seed {seed}");
        assert_eq!([0, 1].map(|i| state(&pair, i)), [(State::Open, 1); 2], "seed {seed}");
    }
}

/// Goal: who is not trusted is refused after a second, its fault is counted and told at once at
/// both ends, whichever end is at fault.
#[test]
fn an_untrusted_certificate_is_refused() {
    let (root, other) = (Root::new(), Root::new());
    let good = |n| credentials(&root.leaf(&name(n)), &root, &[]).unwrap();
    let foreign = |n| foreign(&other.leaf(&name(n)), &other, &root);
    let stranger = |_| {
        let papers = root.leaf("spiffe://b.org/x");
        credentials(&papers, &root, &["spiffe://a.org/*"]).unwrap()
    };
    let late = |n| {
        let papers = root.sign(&leaf(&name(n), [2020, 2024]), &PKCS_ED25519);
        at(&papers, &root, &[], NOW - 400 * 86_400).unwrap()
    };
    let bad: [&dyn Fn(u8) -> Arc<Credentials>; 3] = [&foreign, &stranger, &late];
    for (fault, bad) in bad.into_iter().enumerate() {
        let opens = || [certified(1, 1500, bad(1)), certified(2, 1500, good(2))];
        let answers = || [certified(1, 1500, good(1)), certified(2, 1500, bad(2))];
        for (ends, both) in [(opens(), true), (answers(), false)] {
            let (err, ms, told) = refused(ends);
            assert_eq!((err, told[0]), (Some(Error::Access), true), "{fault}");
            assert!((1_000..1_200).contains(&ms), "{ms} ms");
            assert!(told[1] || !both);
        }
        let mut pair = Pair::of(answers());
        assert!(!arrives(&mut pair, 8, 300));
        let c = pair.ends[0].node.counters();
        let counted = [c.rx_cert_issuer, c.rx_cert_name, c.rx_cert_time];
        assert!((0..3).all(|i| (counted[i] > 0) == (i == fault)), "{counted:?}");
    }
}

#[test]
fn a_key_and_a_certificate_do_not_meet() {
    let root = Root::new();
    let own = || credentials(&root.leaf(&name(1)), &root, &[]).unwrap();
    let keyed = |station: u8| {
        let key = PreSharedKey::new(&[7; 32], Mode::Encrypted).unwrap();
        let keys = Keyring::new(vec![key], [station; 32]);
        end_with(station, 1500, false, NodeSettings { keys, ..NodeSettings::default() })
    };
    assert_eq!(refused([certified(1, 1500, own()), keyed(2)]).0, Some(Error::Access));
    assert_eq!(refused([keyed(1), certified(2, 1500, own())]).0, Some(Error::Access));
    assert_eq!(refused([certified(1, 1500, own()), end(2, 1500, false)]).0, Some(Error::NoKey));
    let mut end = certified(1, 1500, own());
    let key = PreSharedKey::new(&[7; 32], Mode::Encrypted).unwrap();
    let refused = end.node.sessions().set_keys(Instant(1), vec![key]).unwrap_err();
    assert!(matches!(refused, Error::OpNotSupp(why) if why.contains("certificate in place of")));
    assert!(keyed(2).node.sessions().set_certificate(Instant(1), own()).is_err());
}

#[test]
fn certificates_that_fit_no_frame_are_refused_at_once() {
    let root = Root::new();
    let papers = root.sign(&leaf(&name(1), [2020, 2040]), &PKCS_RSA_SHA256);
    let long = PemCredentials { chain: papers.chain.repeat(4), ..papers };
    let long = credentials(&long, &root, &[]).unwrap();
    let made = |mtu, lossless| {
        let settings = NodeSettings { incarnation: 1, ..settings(1, long.clone()) };
        Node::new(settings, &caps(1, mtu, lossless)).map(|_| ())
    };
    assert!(matches!(made(1500, false), Err(Error::Invalid(_))));
    assert!(made(9000, false).is_ok());
    assert!(made(1500, true).is_ok(), "nothing is sealed");
    let mut node = certified(1, 1500, credentials(&root.leaf(&name(1)), &root, &[]).unwrap()).node;
    assert!(matches!(
        node.sessions().set_certificate(Instant(1), long.clone()),
        Err(Error::Invalid(_))
    ));
}

/// Goal: everybody can make the tag of an RST, and still none ends or changes a session while the
/// peer answers, nor while it is being opened.
#[test]
fn a_forged_reset_ends_nothing() {
    let root = Root::new();
    let mut pair = pair(&root, 1500);
    let tag = public_tag(&root);
    let reasons = [
        RstReason::Closed,
        RstReason::UnknownSession,
        RstReason::WrongIncarnation,
        RstReason::Dead,
        RstReason::OtherKey,
    ];
    for round in 0..20 {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), round).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), round).unwrap();
        for _ in 0..40 {
            carry(&mut pair, 1, |from, frame| vec![(1 - from, frame.to_vec())]);
            for (to, reason) in (0..2).flat_map(|to| reasons.map(|reason| (to, reason))) {
                if pair.ends[to].node.peers.iter().next().is_none() {
                    continue;
                }
                let rst = tagged_rst(&pair, to, reason, &tag);
                pair.ends[to].node.on_frame(pair.now, &RxFrame::new(&rst));
            }
        }
        assert_eq!([0, 1].map(|i| pair.read(i).len()), [1, 1], "round {round}");
    }
    assert_eq!([0, 1].map(|i| state(&pair, i)), [(State::Open, 1); 2]);
    for end in &pair.ends {
        assert_eq!(end.node.counters().sessions_reset, 0);
    }
}

/// A peer that has restarted says so by an RST: it is believed after a second without anything.
#[test]
fn a_restart_is_known_after_a_second() {
    let root = Root::new();
    let mut pair = pair(&root, 1500);
    pair.ends[0].node.settings.t_dead_ns = 5_000 * MS;
    assert!(arrives(&mut pair, 8, 100));
    let own = credentials(&root.leaf(&name(2)), &root, &[]).unwrap();
    let mut again = certified(2, 1500, own);
    again.node.settings.incarnation ^= 1;
    pair.ends[1] = again;
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    pair.run(900 * MS);
    assert_eq!(state(&pair, 0).0, State::Open);
    pair.run(300 * MS);
    assert_eq!(pair.read_err(0).err, Error::ConnReset);
}

/// Goal: a flood of certificates that are refused is looked at in part, and one of a station in
/// each time.
#[test]
fn few_bad_certificates_are_looked_at() {
    let (root, other) = (Root::new(), Root::new());
    let good = credentials(&root.leaf(&name(1)), &root, &[]).unwrap();
    let bad = foreign(&other.leaf(&name(2)), &other, &root);
    let mut pair = Pair::of([certified(1, 1500, good), certified(2, 1500, bad)]);
    pair.ends[1].node.settings.t_dead_ns = 60_000 * MS;
    let mut opens = 0;
    pair.send(1, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    carry(&mut pair, 2_000, |from, frame| {
        let is_open = sealed::ty_of(frame) == Some(Ty::Open);
        // What end 0 says of keys does not come.
        if from == 0 && !is_open {
            return Vec::new();
        }
        let times = if from == 1 { 20 } else { 1 };
        opens += times;
        vec![(1 - from, frame.to_vec()); times]
    });
    let c = pair.ends[0].node.counters();
    assert!(c.rx_cert_issuer > 1 && c.rx_cert_limited > 5 * c.rx_cert_issuer, "{c:?}");
    assert!(opens as u64 > c.rx_cert_issuer * 10);
    assert_eq!(c.sessions_opened, 0);
    // Whom the flood claims to be from is told with all of it.
    let [claim] = pair.ends[0].node.observed.claims() else { panic!("one sender") };
    let all = c.rx_cert_issuer + c.rx_cert_limited;
    assert_eq!((claim.station, claim.counts[3]), (pair.ends[1].node.port.station, all));
}

/// Goal: another certificate comes without a pause, at any moment of an opening, also one of
/// another root after both are trusted.
#[test]
fn another_certificate_comes_without_a_pause() {
    let root = Root::new();
    for seed in 0..30_usize {
        let mut pair = pair(&root, 1500);
        (pair.drop, pair.scatter) = ([0, 7, 3][seed % 3], true);
        for end in [0, 1] {
            for i in 0..2 {
                let other = pair.ends[1 - i].node.port.station;
                pair.ends[i].node.sessions().drop_session(pair.now, other);
                let buf = IoBuf::leaked(&[1; 8]);
                pair.recv(1 - i, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
                pair.send(i, buf, 5, OpFlags::empty(), 2).unwrap();
            }
            pair.run((seed as u64 * 5_000) % (60 * 5_000));
            let own = credentials(&root.leaf(&name(end as u8 + 1)), &root, &[]).unwrap();
            let now = pair.now;
            pair.ends[end].node.sessions().set_certificate(now, own).unwrap();
            pair.run(400 * MS);
            assert_eq!([0, 1].map(|i| pair.read(i).len()), [2, 2], "seed {seed}, {end}");
        }
    }
}

/// Goal: somebody whose certificate is refused does not end the half-open session of the station
/// whose address he takes, nor leave what is queued for it waiting for ever.
#[test]
fn a_refused_certificate_ends_no_half_open_session() {
    let (root, other) = (Root::new(), Root::new());
    let mut pair = pair(&root, 1500);
    let bad = foreign(&other.leaf(&name(1)), &other, &root);
    let mut forger = Pair::of([certified(1, 1500, bad), end(2, 1500, false)]);
    let mut opens = Vec::new();
    forger.ends[0].node.openings.epoch = 100;
    forger.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    carry(&mut forger, 1, |_, frame| {
        opens.push(frame.to_vec());
        Vec::new()
    });
    // What end 1 answers is lost: its session stays half open, and has a message queued.
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    carry(&mut pair, 10, |from, frame| match from {
        0 => vec![(1, frame.to_vec())],
        _ => Vec::new(),
    });
    pair.send(1, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 3).unwrap();
    pair.recv(0, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 4).unwrap();
    assert_eq!(state(&pair, 1).0, State::Answered);
    for open in &opens {
        pair.ends[1].node.on_frame(pair.now, &RxFrame::new(open));
        assert_eq!(state(&pair, 1).0, State::Answered);
    }
    assert!(pair.ends[1].node.counters().rx_cert_issuer > 0);
    pair.run(200 * MS);
    assert_eq!([0, 1].map(|i| pair.read(i).len()), [2, 2]);
}

/// Goal: somebody whose certificate is refused gets no record, for which a peer with an open
/// session may have to go, although he receives at his address.
#[test]
fn a_refused_certificate_gets_no_record() {
    let (root, other) = (Root::new(), Root::new());
    let good = || certified(1, 1500, credentials(&root.leaf(&name(1)), &root, &[]).unwrap());
    let bad = foreign(&other.leaf(&name(2)), &other, &root);
    let mut pair = Pair::of([good(), certified(2, 1500, bad)]);
    // One that knows nobody.
    pair.ends[0] = good();
    pair.send(1, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    pair.run(200 * MS);
    let node = &pair.ends[0].node;
    assert!(node.counters().rx_cert_issuer > 0 && node.counters().tx_challenges > 0);
    assert_eq!(node.statistics().levels().peers, 0);
}

/// Goal: the copy of an OPEN that was taken, with other words in its header, changes nothing of the
/// session, though everybody can make its tag.
#[test]
fn a_changed_copy_of_an_open_changes_nothing() {
    let root = Root::new();
    let mut pair = pair(&root, 1500);
    let (_, peer) = pair.ends[1].node.peers.iter_mut().next().expect("one");
    peer.inc = 0;
    let tag = public_tag(&root);
    let open = proven_opens(&mut pair, 0).pop().unwrap();
    assert_eq!(state(&pair, 1).0, State::Answered);
    let (_, op) = sealed::open_in(&RxFrame::new(&open)).unwrap();
    let mut copy = open[..BASE_LEN + usize::from(sealed::plen(&open))].to_vec();
    let other = OpenOp { caps: 0, max_frame: 256, window: 1, ..op };
    other.emit(&mut copy[BASE_LEN..BASE_LEN + OpenOp::LEN]);
    copy.extend(tag.tag(&copy));
    let len = copy.len();
    copy.resize(len + 4, 0);
    sealed::append_crc(&mut copy, len);
    copy.resize(open.len(), 0);
    pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&copy));
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.run(400 * MS);
    assert_eq!([0, 1].map(|i| pair.read(i).len()), [1, 1]);
    let (_, peer) = pair.ends[1].node.peers.iter().next().expect("one");
    assert_eq!((peer.state, peer.frame_most, peer.takes_echo), (State::Open, 1500, true));
    assert!(peer.snd.limit() > 1, "a window of {}", peer.snd.limit());
}

/// The OPENs with proof of what `end` sends while its peer's frames reach it but answers do not.
fn proven_opens(pair: &mut Pair, end: usize) -> Vec<Vec<u8>> {
    let mut opens = Vec::new();
    pair.send(end, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    carry(pair, 30, |from, frame| {
        let open = sealed::open_in(&RxFrame::new(frame)).map(|(_, op)| op);
        let is_proven = open.as_ref().is_some_and(|op| op.cookie != 0 && !op.is_challenge());
        let is_answer = open.is_some_and(|op| op.is_answer() && !op.is_challenge());
        if from == end && is_proven && !is_answer {
            opens.push(frame.to_vec());
        }
        if is_answer { Vec::new() } else { vec![(1 - from, frame.to_vec())] }
    });
    assert!(!opens.is_empty());
    opens
}

/// Goal: who has recorded good OPENs of a station does not make a node look at certificates without
/// bound. Method: those of two lives in turn, which each displace the half-open session of the
/// other. The station itself is looked at again when the time is over.
#[test]
fn replayed_opens_are_looked_at_in_part() {
    let root = Root::new();
    let mut pair = pair(&root, 1500);
    // A server, which knows nobody.
    let (_, peer) = pair.ends[1].node.peers.iter_mut().next().expect("one");
    peer.inc = 0;
    let mut opens = vec![proven_opens(&mut pair, 0).pop().unwrap()];
    let own = credentials(&root.leaf(&name(1)), &root, &[]).unwrap();
    let mut again = certified(1, 1500, own);
    again.node.settings.incarnation ^= 1 << 20;
    let addr = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
    again.peer = again.node.sessions().av_insert(pair.now, again.av, addr).unwrap();
    pair.ends[0] = again;
    opens.push(proven_opens(&mut pair, 0).pop().unwrap());
    pair.now = pair.now + 100 * MS;
    let replayed = 1_000;
    let before = pair.ends[1].node.counters().rx_cert_limited;
    for n in 0..replayed {
        pair.now = pair.now + 64_000;
        pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&opens[n % 2]));
    }
    let limited = pair.ends[1].node.counters().rx_cert_limited - before;
    // The OPEN that has been answered needs no look, and the other one has 4.
    assert!((495..500).contains(&limited), "{limited}");
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.run(300 * MS);
    assert_eq!([0, 1].map(|i| pair.read(i).len()), [1, 1]);
}

/// Goal: messages that are none of the handshake, in OPENs with proof, are not read without bound
/// either, as everybody can make the tag of an OPEN.
#[test]
fn messages_that_are_forged_are_read_in_part() {
    let root = Root::new();
    let mut pair = pair(&root, 1500);
    let (_, peer) = pair.ends[1].node.peers.iter_mut().next().expect("one");
    peer.inc = 0;
    let tag = public_tag(&root);
    let open = proven_opens(&mut pair, 0).pop().unwrap();
    let (_, mut op) = sealed::open_in(&RxFrame::new(&open)).unwrap();
    let (other, victim) = (pair.ends[0].node.port.station, &mut pair.ends[1].node);
    victim.sessions().drop_session(pair.now, other);
    let (end, before) = (BASE_LEN + usize::from(sealed::plen(&open)), victim.counters().clone());
    for n in 0..1_000_u32 {
        // Of another session, since this one is over.
        op.epoch += 1;
        let mut forged = open[..end].to_vec();
        let message = BASE_LEN + OpenOp::LEN;
        op.emit(&mut forged[BASE_LEN..message]);
        forged[message + 40..message + 44].copy_from_slice(&n.to_le_bytes());
        forged.extend(tag.tag(&forged));
        let len = forged.len();
        forged.resize(len + 4, 0);
        sealed::append_crc(&mut forged, len);
        victim.on_frame(pair.now, &RxFrame::new(&forged));
        pair.now = pair.now + 64_000;
    }
    let c = victim.counters();
    let (forged, limited) =
        (c.rx_forged - before.rx_forged, c.rx_cert_limited - before.rx_cert_limited);
    assert!((1..4).contains(&forged) && limited > 900, "{forged} {limited}");
}

/// What makes the tags of OPENs and RSTs, which everybody knows.
fn public_tag(root: &Root) -> TagKey {
    let own = credentials(&root.leaf(&name(9)), root, &[]).unwrap();
    let ring = Keyring::of_certificate_with(own, Mode::Encrypted, 5, [9; 32]);
    ring.unwrap().tag_key().clone()
}

/// Goal: an OPEN that somebody else makes, as if both ends had answered the other's, ends no
/// session, though everybody can make its tag: not the half-open one of the end that it is for, and
/// so not the one that its peer has opened already.
#[test]
fn a_forged_answer_to_an_answer_ends_nothing() {
    let root = Root::new();
    let (mut pair, tag) = (pair(&root, 1500), public_tag(&root));
    pair.ends.iter_mut().for_each(|end| end.node.settings.t_dead_ns = 5_000 * MS);
    pair.recv(0, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(1, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    // What confirms the session comes late.
    carry(&mut pair, 20, |from, frame| match sealed::ty_of(frame) {
        Some(Ty::Open) => vec![(1 - from, frame.to_vec())],
        _ => Vec::new(),
    });
    assert_eq!([0, 1].map(|i| state(&pair, i).0), [State::Answered, State::Open]);
    assert!(pair.ends[0].node.port.addr < pair.ends[1].node.port.addr);
    for _ in 0..3 {
        let node = &mut pair.ends[0].node;
        let (_, peer) = node.peers.iter().next().expect("one");
        let op = OpenOp {
            sid: peer.remote_sid,
            epoch: peer.peer_epoch,
            inc: peer.inc,
            target_inc: node.settings.incarnation,
            echo_sid: peer.sid,
            echo_epoch: peer.epoch,
            max_frame: 1500,
            window: 64,
            versions: crate::wire::VERSIONS,
            ..OpenOp::default()
        };
        let base = node.port.control(node.port.station, Ty::Open, peer.sid, peer.rcv_nxt);
        let base = crate::wire::Base { src: peer.station(), ..base };
        let mut open = crate::wire::frame(&base, &crate::wire::Op::Open(op), &[]);
        open.truncate(sealed::OPEN_END);
        open.extend([7; 64]);
        sealed::mark(&mut open, OpenOp::LEN + 64);
        open.extend(tag.tag(&open));
        let len = open.len();
        open.resize(len + 4, 0);
        sealed::append_crc(&mut open, len);
        node.on_frame(pair.now, &RxFrame::new(&open));
        assert!(node.counters().rx_wire.iter().all(|&n| n == 0), "{:?}", node.counters().rx_wire);
        assert_eq!(state(&pair, 0).0, State::Answered);
    }
    pair.run(3_000 * MS);
    assert_eq!([0, 1].map(|i| pair.read(i).len()), [1, 1]);
    assert_eq!([0, 1].map(|i| state(&pair, i)), [(State::Open, 1); 2]);
}

/// Goal: an operation to a peer that is not there ends after T_dead, although somebody makes OPENs
/// and resets in the peer's name: they are no signs of it. Method: of the OPENs, which need proof,
/// what they change.
#[test]
fn forged_resets_are_no_signs_of_life() {
    let root = Root::new();
    let (mut pair, tag) = (pair(&root, 1500), public_tag(&root));
    let addr = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
    let mut end = certified(1, 1500, credentials(&root.leaf(&name(1)), &root, &[]).unwrap());
    end.peer =
        end.node.sessions().av_insert(pair.now, end.av, EpAddr { incarnation: 0, ..addr }).unwrap();
    end.node.settings.t_dead_ns = 1_000 * MS;
    pair.ends[0] = end;
    let begun = pair.now;
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    for _ in 0..500 {
        carry(&mut pair, 10, |_, _| Vec::new());
        let node = &mut pair.ends[0].node;
        let (_, peer) = node.peers.iter_mut().next().expect("one");
        if peer.state == State::Idle {
            break;
        }
        (peer.inc, peer.is_life_claimed) = (9, true);
        let rst = tagged_rst(&pair, 0, RstReason::WrongIncarnation, &tag);
        pair.ends[0].node.on_frame(pair.now, &RxFrame::new(&rst));
    }
    assert!(pair.ends[0].node.counters().sessions_reset > 0, "they were believed");
    let ms = pair.now.since(begun) / MS;
    assert!((1_000..1_200).contains(&ms), "{ms} ms");
    assert_eq!(pair.read_err(0).err, Error::HostUnreach);
}

/// [`forged_rst`] with the tag that everybody can make.
fn tagged_rst(pair: &Pair, to: usize, reason: RstReason, tag: &TagKey) -> Vec<u8> {
    let mut rst = forged_rst(pair, to, reason);
    let end = BASE_LEN + usize::from(sealed::plen(&rst)).max(crate::wire::RstOp::LEN);
    rst.truncate(end);
    sealed::mark(&mut rst, end - BASE_LEN);
    let sum = tag.tag(&rst);
    rst.extend(sum);
    rst
}
