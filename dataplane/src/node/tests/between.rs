//! An attacker in the middle, through whom all frames of both directions go, changes an OPEN at
//! will. Where nodes have certificates the attacker can make its tag too.

use super::sealed::carry;
use super::*;
use crate::node::peer::State;
use crate::seal::test_certs::{Root, credentials};
use crate::seal::{Keyring, Mode, PreSharedKey, TagKey};
use crate::wire::{BASE_LEN, OpenOp, TAG_LEN, Ty, VERSIONS, Versions, sealed};

const MS: u64 = 1_000_000;

/// An OPEN as it is on the wire.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    First,
    Answer,
    Challenge,
}

fn kind_of(op: &OpenOp) -> Kind {
    match (op.is_challenge(), op.is_answer()) {
        (true, _) => Kind::Challenge,
        (false, true) => Kind::Answer,
        (false, false) => Kind::First,
    }
}

/// What the attacker has, besides the frames.
struct Between {
    /// What makes tags, if everybody knows that.
    tags: Option<TagKey>,
}

impl Between {
    /// The frame, an OPEN, with another header, and `psn` of the base raised by so much.
    fn with(&self, frame: &[u8], op: &OpenOp, psn: u32) -> Vec<u8> {
        let end = BASE_LEN + usize::from(sealed::plen(frame));
        let mut bytes = frame.to_vec();
        op.emit(&mut bytes[BASE_LEN..]);
        bytes[16..20].copy_from_slice(&op.echo_sid.to_le_bytes());
        let at = u32::from_le_bytes(bytes[20..24].try_into().unwrap());
        bytes[20..24].copy_from_slice(&at.wrapping_add(psn).to_le_bytes());
        if let Some(tags) = &self.tags {
            let tag = tags.tag(&bytes[..end]);
            bytes[end..end + TAG_LEN].copy_from_slice(&tag);
        }
        sealed::append_crc(&mut bytes, end + TAG_LEN);
        bytes
    }

    /// A challenge that end 1 did not make, for the OPEN in `frame`.
    fn challenge(&self, node: &Node, op: &OpenOp, cookie: u64) -> Vec<u8> {
        let own = node.settings.incarnation ^ 1;
        let said = OpenOp { sid: 0, epoch: 0, inc: own, target_inc: op.inc, cookie, ..*op };
        let said = OpenOp { echo_sid: op.sid, echo_epoch: op.epoch, ..said };
        let base = node.port.control(node.port.station, Ty::Open, op.sid, crate::psn::Psn(0));
        let base = crate::wire::Base { src: station(2), ..base };
        let mut bytes = crate::wire::frame(&base, &crate::wire::Op::Open(said), &[]);
        bytes.truncate(sealed::OPEN_END);
        sealed::mark(&mut bytes, OpenOp::LEN);
        let tag = self.tags.as_ref().map_or([7; TAG_LEN], |tags| tags.tag(&bytes));
        bytes.extend(tag);
        let len = bytes.len();
        bytes.resize(len + 4, 0);
        sealed::append_crc(&mut bytes, len);
        bytes
    }
}

fn station(number: u8) -> barewire_driver::port::Station {
    end(number, 1500, false).node.port.station
}

/// Two nodes that know each other by a key, or by certificates, and the attacker between them.
fn pair(root: Option<&Root>) -> (Pair, Between) {
    let ring = |station: u8| match root {
        Some(root) => {
            let papers = root.leaf(&format!("spiffe://a.org/job/{station}"));
            let own = credentials(&papers, root, &[]).unwrap();
            Keyring::of_certificate_with(own, Mode::Encrypted, 5, [station; 32])
        }
        None => {
            let key = PreSharedKey::with_key_frames(&[7; 32], Mode::Encrypted, 5).unwrap();
            Keyring::new(vec![key], [station; 32])
        }
    };
    let tags = root.and_then(|_| ring(9)).map(|ring| ring.tag_key().clone());
    let mut pair = Pair::of([1, 2].map(|station| {
        let keys = ring(station);
        end_with(station, 1500, false, NodeSettings { keys, ..NodeSettings::default() })
    }));
    pair.ends.iter_mut().for_each(|end| end.node.settings.t_dead_ns = 5_000 * MS);
    (pair, Between { tags })
}

/// What an end has agreed to: state, frame length, whether CE is echoed, packets in flight.
fn agreed(pair: &Pair, i: usize) -> (State, u16, bool, u32) {
    let (_, peer) = pair.ends[i].node.peers.iter().next().expect("one");
    (peer.state, peer.frame_most, peer.takes_echo, peer.snd.limit())
}

fn post(pair: &mut Pair) {
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
}

/// Each change of a header: its name, and the header after it.
fn changes(op: &OpenOp) -> Vec<(&'static str, OpenOp, u32)> {
    let op = *op;
    let all = Versions { min: 1, max: 7 };
    vec![
        ("sid", OpenOp { sid: op.sid ^ 1 << 20, ..op }, 0),
        ("epoch", OpenOp { epoch: op.epoch + 1, ..op }, 0),
        ("inc", OpenOp { inc: op.inc ^ 2, ..op }, 0),
        ("echo_sid", OpenOp { echo_sid: op.echo_sid ^ 1 << 20, ..op }, 0),
        ("echo_epoch", OpenOp { echo_epoch: op.echo_epoch + 1, ..op }, 0),
        ("aes", OpenOp { caps: op.caps ^ OpenOp::AES, ..op }, 0),
        ("echo", OpenOp { caps: op.caps ^ OpenOp::ECHO, ..op }, 0),
        ("a bit to come", OpenOp { caps: op.caps ^ 1 << 9, ..op }, 0),
        ("max_frame", OpenOp { max_frame: 256, ..op }, 0),
        ("a longer max_frame", OpenOp { max_frame: 9000, ..op }, 0),
        ("window", OpenOp { window: 1, ..op }, 0),
        ("half the window", OpenOp { window: op.window / 2, ..op }, 0),
        ("minor", OpenOp { minor: 1, ..op }, 0),
        // That of a challenge is 0.
        ("no grant, or one", OpenOp { grant: u32::from(op.grant == 0), ..op }, 0),
        ("grant", OpenOp { grant: op.grant + 1000, ..op }, 0),
        ("frame", OpenOp { frame: if op.frame == 256 { 257 } else { 256 }, ..op }, 0),
        ("versions", OpenOp { versions: if op.versions == all { VERSIONS } else { all }, ..op }, 0),
        ("psn", op, 1),
        ("cookie", OpenOp { cookie: op.cookie ^ 1 << 40, ..op }, 0),
        ("target_inc", OpenOp { target_inc: op.target_inc ^ 2, ..op }, 0),
        ("no target_inc", OpenOp { target_inc: 0, ..op }, 0),
    ]
}

/// What `name` of an OPEN of this kind has no say in, where everybody can make tags: it proves that
/// its sender receives, says whom it wants, or is of a challenge, which is no promise.
fn is_free(name: &str, kind: Kind) -> bool {
    kind == Kind::Challenge
        || kind == Kind::First
            && ["cookie", "target_inc", "no target_inc", "frame", "echo_sid", "echo_epoch"]
                .contains(&name)
}

/// Goal: whatever the attacker changes of an OPEN, one field after the other, no session opens by
/// it that differs from what its ends have said: the OPEN is counted and dropped. When the attacker
/// leaves, it opens as it would have.
#[test]
fn a_modified_open_opens_no_session() {
    let root = Root::new();
    for root in [None, Some(&root)] {
        let (mut honest, _) = pair(root);
        post(&mut honest);
        honest.run(400 * MS);
        let want = [0, 1].map(|i| agreed(&honest, i));
        assert_eq!(want.map(|end| end.0), [State::Open; 2]);
        let mut wrong = Vec::new();
        for kind in [Kind::First, Kind::Answer, Kind::Challenge] {
            for n in 0..changes(&OpenOp::default()).len() {
                let what = change_one(root, (kind, n), want);
                wrong.extend(what.err().map(|what| (kind, what)));
            }
        }
        assert!(wrong.is_empty(), "certificates: {}, {wrong:#?}", root.is_some());
    }
}

/// Changes field `n` of all OPENs of this kind for a while.
fn change_one(
    root: Option<&Root>,
    (kind, n): (Kind, usize),
    want: [(State, u16, bool, u32); 2],
) -> std::result::Result<(), String> {
    let (mut pair, between) = pair(root);
    let (mut changed, mut name) = (0, "");
    if kind == Kind::Challenge {
        // Only an opener that is not named is asked for a cookie: end 1 knows another life.
        let (_, peer) = pair.ends[1].node.peers.iter_mut().next().expect("one");
        peer.inc ^= 4;
    }
    post(&mut pair);
    carry(&mut pair, 40, |from, frame| {
        let open = sealed::open_in(&RxFrame::new(frame)).map(|(_, op)| op);
        let Some(op) = open.filter(|op| kind_of(op) == kind) else {
            return vec![(1 - from, frame.to_vec())];
        };
        let (this, other, psn) = changes(&op)[n];
        let frame_of_other = between.with(frame, &other, psn);
        (changed, name) = (changed + usize::from(frame_of_other != frame), this);
        vec![(1 - from, frame_of_other)]
    });
    let counted = pair.ends.each_ref().map(|end| {
        let c = end.node.counters();
        c.rx_forged + c.rx_bad_open + c.rx_wire.iter().sum::<u64>()
    });
    let counted = counted.iter().sum::<u64>();
    assert!(changed > 0, "{kind:?} {n}: none was changed");
    if !(root.is_some() && is_free(name, kind)) {
        let is_open = [0, 1].map(|i| agreed(&pair, i).0 == State::Open);
        if is_open != [false; 2] || counted == 0 || !pair.read(1).is_empty() {
            return Err(format!("{name}: open {is_open:?}, {counted} counted of {changed}"));
        }
    }
    pair.run(900 * MS);
    let got = [0, 1].map(|i| agreed(&pair, i));
    let read = [0, 1].map(|i| pair.read(i).len());
    match got == want && read == [1, 1] {
        true => Ok(()),
        false => Err(format!("{name}: {got:?}, messages {read:?}")),
    }
}

/// Goal: a session that is granted more while it is being opened opens: its OPENs stay of one
/// handshake.
#[test]
fn more_credit_changes_no_open() {
    let root = Root::new();
    for root in [None, Some(&root)] {
        let (mut pair, _) = pair(root);
        post(&mut pair);
        let mut opens = 0;
        // No answer arrives.
        carry(&mut pair, 20, |from, frame| {
            let open = sealed::open_in(&RxFrame::new(frame)).map(|(_, op)| kind_of(&op));
            opens += usize::from(open == Some(Kind::First));
            if open == Some(Kind::Answer) { Vec::new() } else { vec![(1 - from, frame.to_vec())] }
        });
        assert!(opens > 1 && agreed(&pair, 0).0 == State::Opening);
        let End { node, .. } = &mut pair.ends[0];
        let (p, before) = node.peers.iter().map(|(p, peer)| (p, peer.granted)).next().expect("one");
        node.blocks.regrant_now(&mut node.peers, &mut node.due, p);
        assert!(node.peers[p].granted > before);
        pair.run(400 * MS);
        assert_eq!([0, 1].map(|i| pair.read(i).len()), [1, 1]);
        let granted = pair.ends[0].node.peers[p].granted;
        let (_, peer) = pair.ends[1].node.peers.iter().next().expect("one");
        assert_eq!(peer.snd.credit, granted, "what was granted since is told later");
        assert!(pair.ends.iter().all(|end| end.node.counters().rx_forged == 0));
    }
}

/// Goal: challenges that somebody else makes end nothing, before the right one and behind it.
#[test]
fn forged_challenges_end_nothing() {
    let root = Root::new();
    for root in [None, Some(&root)] {
        for before in [true, false] {
            let (mut pair, between) = pair(root);
            let mut forged = 0;
            post(&mut pair);
            let shown = end(1, 1500, false).node;
            carry(&mut pair, 400, |from, frame| {
                let honest = (1 - from, frame.to_vec());
                let open = sealed::open_in(&RxFrame::new(frame)).map(|(_, op)| op);
                let Some(op) = open.filter(|op| from == 0 && kind_of(op) == Kind::First) else {
                    return vec![honest];
                };
                forged += 1;
                let forgery = (0, between.challenge(&shown, &op, forged));
                // Behind it: some of them, or the last word is always the attacker's.
                match before || forged > 3 {
                    true => vec![forgery, honest],
                    false => vec![honest, forgery],
                }
            });
            assert!(forged > 0);
            assert_eq!([0, 1].map(|i| pair.read(i).len()), [1, 1], "{}", root.is_some());
            let c = pair.ends[0].node.counters();
            assert_eq!((c.sessions_opened, c.sessions_reset), (1, 0));
            assert!(c.rx_forged > 0 || root.is_some());
        }
    }
}
