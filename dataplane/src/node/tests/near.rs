//! Near and far peers in one node: what a session's path promises, and what proves that it is near.

use super::*;
use crate::seal::{Keyring, Mode, PreSharedKey};

/// A port whose station is reached through memory, or not.
struct Port<'a> {
    out: &'a mut VecDeque<Vec<u8>>,
    near: bool,
}

impl FrameSink for Port<'_> {
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        sink(self.out)(frame)
    }

    fn is_near(&mut self, _: Station) -> bool {
        self.near
    }
}

const NEAR_MTU: usize = 9000;

fn mixed_end(station: u8) -> End {
    let caps = PortCaps { near_mtu: NEAR_MTU, ..caps(station, 1500, false) };
    // As the API has it of a port that damages frames.
    end_on(caps, NodeSettings { crc: Some(true), ..NodeSettings::default() })
}

/// Both ends of a session with ports that lead through memory, or not.
struct Mixed {
    pair: Pair,
    near: [bool; 2],
}

impl Mixed {
    fn new(near: bool) -> Self {
        Self { pair: Pair::of([mixed_end(1), mixed_end(2)]), near: [near; 2] }
    }

    /// One turn of both.
    fn turn(&mut self) {
        for i in 0..2 {
            let End { node, out, .. } = &mut self.pair.ends[i];
            node.transmit(self.pair.now, &mut Port { out, near: self.near[i] });
        }
        for i in 0..2 {
            for bytes in std::mem::take(&mut self.pair.ends[i].out) {
                self.give(1 - i, &bytes, self.near[i]);
            }
        }
        self.pair.now = self.pair.now + 5_000;
    }

    fn run(&mut self, turns: usize) {
        for _ in 0..turns {
            self.turn();
        }
    }

    /// A frame reaches end `i`, through memory or not.
    fn give(&mut self, i: usize, bytes: &[u8], near: bool) {
        let frame = RxFrame::new(bytes);
        let frame = if near { frame.as_near() } else { frame };
        self.pair.ends[i].node.on_frame(self.pair.now, &frame);
    }

    fn send(&mut self) {
        self.pair.send(0, IoBuf::leaked(&[7; 8]), 1, OpFlags::empty(), 1).unwrap();
    }

    /// What end `i` has to send.
    fn due(&mut self, i: usize) -> Vec<Vec<u8>> {
        let End { node, out, .. } = &mut self.pair.ends[i];
        node.transmit(self.pair.now, &mut Port { out, near: self.near[i] });
        std::mem::take(out).into()
    }

    fn peer(&self, i: usize) -> &peer::Peer {
        self.pair.ends[i].node.peers.iter().next().unwrap().1
    }

    fn refused(&self, i: usize) -> u64 {
        self.pair.ends[i].node.counters().rx_not_near
    }
}

#[test]
fn a_session_promises_what_its_path_does() {
    for near in [true, false] {
        let mut mixed = Mixed::new(near);
        let (buf, look) = shared(8);
        mixed.pair.recv(1, buf, 1, OpFlags::empty(), 2).unwrap();
        mixed.send();
        mixed.run(50);
        assert_eq!((mixed.pair.read(0).len(), mixed.pair.read(1).len()), (1, 1));
        assert_eq!(contents(&look), [7; 8]);
        for i in 0..2 {
            let path = mixed.peer(i).path;
            let all = (path.is_near(), path.is_lossless(), path.tells_presence(), path.has_crc());
            assert_eq!(all, (near, near, near, !near));
            assert!(mixed.peer(i).fast_path, "near: {near}");
            assert_eq!(mixed.peer(i).frame_max, if near { NEAR_MTU as u32 } else { 1500 });
            assert_eq!(mixed.refused(i), 0);
        }
    }
}

#[test]
fn a_copied_identity_is_not_enough_for_a_near_session() {
    let mut mixed = Mixed::new(true);
    mixed.pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 2).unwrap();
    mixed.send();
    mixed.run(50);
    assert_eq!(mixed.pair.read(1).len(), 1);
    mixed.pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 3).unwrap();
    mixed.send();
    let frames = mixed.due(0);
    assert_eq!(frames.len(), 1);
    for crc in [false, true] {
        // The frame of the session, bit by bit; and one with a checksum, as far ones have.
        let mut bytes = frames[0].clone();
        if crc {
            bytes[15] |= 0x40;
            let crc = crate::wire::crc_of_head(&bytes).to_le_bytes();
            bytes.extend_from_slice(&crc);
        }
        let before = mixed.refused(1);
        mixed.give(1, &bytes, false);
        assert_eq!(mixed.refused(1), before + 1, "crc {crc}");
        assert_eq!(mixed.pair.read(1).len(), 0, "crc {crc}");
    }
    mixed.give(1, &frames[0], true);
    assert_eq!(mixed.pair.read(1).len(), 1);
}

#[test]
fn an_open_says_what_it_came_by() {
    for near in [true, false] {
        let mut mixed = Mixed::new(near);
        mixed.send();
        let frames = mixed.due(0);
        assert_eq!(frames.len(), 1);
        mixed.give(1, &frames[0], !near);
        assert_eq!((mixed.refused(1), mixed.due(1).len()), (1, 0));
        mixed.give(1, &frames[0], near);
        assert_eq!((mixed.refused(1), mixed.due(1).len()), (1, 1));
    }
}

/// Goal: nobody stays with the path on which a session was begun. Method: the OPEN arrives, and its
/// answer does not; or it comes late.
#[test]
fn a_path_that_changes_before_the_session_opens_makes_another_session() {
    for (near, taken) in [(true, false), (false, false), (true, true), (false, true)] {
        let mut mixed = Mixed::new(near);
        mixed.pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 2).unwrap();
        mixed.send();
        let before = mixed.due(0);
        if taken {
            mixed.give(1, &before[0], near);
            assert_eq!(mixed.due(1).len(), 1, "an answer");
        }
        let epoch = mixed.peer(0).epoch;
        // The peer comes, or leaves, and only then the OPEN is repeated.
        mixed.near = [!near; 2];
        mixed.run(1000);
        assert_eq!((mixed.pair.read(0).len(), mixed.pair.read(1).len()), (1, 1));
        assert_ne!(mixed.peer(0).epoch, epoch);
        assert!((0..2).all(|i| mixed.peer(i).path.is_near() != near));
        // The first OPEN arrives after all.
        mixed.give(1, &before[0], near);
        mixed.run(50);
        assert!((0..2).all(|i| mixed.peer(i).path.is_near() != near));
    }
}

#[test]
fn opens_that_cross_on_two_paths_end_on_the_near_one() {
    for late in [0, 1] {
        let mut mixed = Mixed::new(false);
        for i in 0..2 {
            mixed.pair.recv(i, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 2).unwrap();
            mixed.pair.send(i, IoBuf::leaked(&[7; 8]), 1, OpFlags::empty(), 1).unwrap();
        }
        // One end has not noticed yet that the other is near.
        mixed.near[1 - late] = true;
        let opens = [mixed.due(0), mixed.due(1)];
        for (i, frames) in opens.iter().enumerate() {
            mixed.give(1 - i, &frames[0], mixed.near[i]);
        }
        // The node that was late yields at once; the other one refuses frames from the wire.
        let refused = [mixed.refused(late), mixed.refused(1 - late)];
        assert_eq!(refused, [0, 1], "late {late}");
        mixed.near = [true; 2];
        mixed.run(1000);
        assert!((0..2).all(|i| mixed.peer(i).path.is_near()), "late {late}");
        assert!((0..2).all(|i| mixed.pair.read(i).len() == 2), "late {late}");
    }
}

/// Goal: between nodes with a key what goes through memory is not sealed, and is taken.
#[test]
fn nodes_with_a_key_speak_through_memory_in_the_clear() {
    for near in [true, false] {
        let ends = [1, 2].map(|station| {
            let key = PreSharedKey::with_key_frames(&[7; 32], Mode::Encrypted, 20).unwrap();
            let keys = Keyring::new(vec![key], [station; 32]);
            let port = PortCaps { near_mtu: NEAR_MTU, ..caps(station, 1500, false) };
            end_on(port, NodeSettings { keys, ..NodeSettings::default() })
        });
        let mut mixed = Mixed { pair: Pair::of(ends), near: [near; 2] };
        for round in 0..3 {
            mixed.pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 2).unwrap();
            mixed.send();
            mixed.run(50);
            let done = (mixed.pair.read(0).len(), mixed.pair.read(1).len());
            assert_eq!(done, (1, 1), "near {near}, round {round}");
        }
        mixed.send();
        let frames = mixed.due(0);
        let clear = frames[0].windows(8).any(|part| part == [7; 8]);
        assert_eq!((frames.len(), clear), (1, near));
    }
}

/// Goal: a packet of a type that is not known is refused only if it came as its session's do.
#[test]
fn a_copied_identity_is_not_refused_in_a_near_session() {
    let mut mixed = Mixed::new(true);
    mixed.pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 2).unwrap();
    mixed.send();
    mixed.run(50);
    mixed.send();
    let mut unknown = mixed.due(0).pop().unwrap();
    unknown[14] = unknown[14] & 0xe0 | 20;
    for near in [false, true] {
        mixed.give(1, &unknown, near);
        assert_eq!(mixed.peer(1).refused != 0, near, "near: {near}");
    }
}

/// Goal: an old OPEN that lies in memory ends no attempt to open a session on another path. Method:
/// the OPEN of a session that has ended comes again, while one by the wire is under way.
#[test]
fn an_old_open_through_memory_ends_no_attempt() {
    let mut mixed = Mixed::new(true);
    mixed.pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 2).unwrap();
    mixed.send();
    let old = mixed.due(0).pop().unwrap();
    mixed.give(1, &old, true);
    mixed.run(50);
    assert_eq!(mixed.pair.read(1).len(), 1);
    let (now, station) = (mixed.pair.now, mixed.pair.ends[0].node.port.station);
    mixed.pair.ends[1].node.sessions().drop_session(now, station);
    mixed.near[1] = false;
    mixed.pair.recv(0, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 3).unwrap();
    mixed.pair.send(1, IoBuf::leaked(&[7; 8]), 1, OpFlags::empty(), 4).unwrap();
    assert_eq!(mixed.due(1).len(), 1, "lost");
    mixed.give(1, &old, true);
    mixed.near[1] = true;
    mixed.run(20_000);
    let got: Vec<_> = mixed.pair.read(0).iter().map(|cqe| cqe.op_context).collect();
    assert!(got.contains(&3), "{got:?}");
}
