//! Two nodes and a wire of vectors: the paths that everything else stands on. What loss, delay and
//! crashes do to them is the simulator's to show (`tests/sim`).

use std::collections::VecDeque;

use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::mem::IoBuf;
use barewire_driver::port::{PortCaps, Station, Tx};

mod acks;
mod ahead;
mod answers;
mod atomic;
mod between;
mod boards;
mod buffered;
mod certificates;
mod contexts;
mod credit;
mod deferred_ep;
mod fetch;
mod full;
mod groups;
mod halves;
mod handed;
mod hostile;
mod inline;
mod keys;
mod lengths;
mod lost;
mod marks;
mod multicast;
mod nagle;
mod near;
mod next;
mod notices;
mod oneself;
mod orders;
mod pack;
mod peek;
mod pulls;
mod queues;
mod refused;
mod reopen;
mod rma;
mod sealed;
mod settings;
mod srx;
mod starved;
mod storm;
mod strangers;
mod survey;
mod tenants;
mod versions;
mod waits;
mod who;

use super::*;
use crate::flags::{BindFlags, CqFlags};
use crate::types::{CqErr, Cqe, EpAddr, FI_ADDR_UNSPEC};

struct End {
    node: Node,
    ep: EpId,
    cq: CqId,
    av: AvId,
    peer: FiAddr,
    out: VecDeque<Vec<u8>>,
}

struct Pair {
    now: Instant,
    ends: [End; 2],
    /// Every `drop`th frame is lost, if not 0.
    drop: usize,
    /// Every `dup`th frame comes twice, if not 0.
    dup: usize,
    /// Losses come at random, not in a rhythm.
    scatter: bool,
    frames: usize,
    /// Sends take the fast path where it is open, and how many did.
    short: Option<usize>,
    /// Longer frames are lost.
    most: usize,
    /// Frames to either end come with a mark of congestion.
    marks: [bool; 2],
    /// Frames to neither of the two.
    stray: Vec<Vec<u8>>,
}

fn caps(station: u8, mtu: usize, lossless: bool) -> PortCaps {
    PortCaps { lossless, ..PortCaps::new(Station::at([2, 0, 0, 0, 0, station]), mtu, "test") }
}

fn end(station: u8, mtu: usize, lossless: bool) -> End {
    end_with(station, mtu, lossless, NodeSettings::default())
}

fn end_with(station: u8, mtu: usize, lossless: bool, settings: NodeSettings) -> End {
    end_on(caps(station, mtu, lossless), settings)
}

fn end_on(port: PortCaps, settings: NodeSettings) -> End {
    let station = port.station.mac.0[5];
    let settings = NodeSettings {
        incarnation: u64::from(station) + 100,
        seed: u64::from(station) * 77,
        t_dead_ns: 500_000_000,
        ..settings
    };
    let mut node = Node::new(settings, &port).unwrap();
    node.hold_watch().watch(true);
    let cq = node.cqs.open(128).unwrap();
    let av = node.sessions().av_open(8).unwrap();
    let ep_caps = Caps::MSG | Caps::TAGGED | Caps::SOURCE | Caps::MULTI_RECV | Caps::DIRECTED_RECV;
    let caps = ep_caps
        | Caps::TAGGED_MULTI_RECV
        | Caps::RMA
        | Caps::ATOMIC
        | Caps::RMA_EVENT
        | Caps::FENCE;
    let ep = open_ep(&mut node, (cq, av), EpAttr { caps, ..EpAttr::default() });
    End { node, ep, cq, av, peer: 0, out: VecDeque::new() }
}

fn open_ep(node: &mut Node, (cq, av): (CqId, AvId), attr: EpAttr) -> EpId {
    let ep = node.eps.open(attr).unwrap();
    node.objects().ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
    node.objects().ep_bind_av(ep, av).unwrap();
    node.ep_enable(ep).unwrap();
    ep
}

impl Pair {
    fn new(mtu: usize, lossless: bool) -> Self {
        Self::of([end(1, mtu, lossless), end(2, mtu, lossless)])
    }

    fn of(mut ends: [End; 2]) -> Self {
        for i in 0..2 {
            let addr = ends[1 - i].node.addr_of(ends[1 - i].ep).unwrap();
            let end = &mut ends[i];
            if !end.node.openings.has_tenants() {
                end.peer = end.node.sessions().av_insert(Instant(0), end.av, addr).unwrap();
            }
        }
        let (drop, dup, frames) = (0, 0, 0);
        let (scatter, short, stray) = (false, None, Vec::new());
        let most = usize::MAX;
        Self {
            now: Instant(1),
            ends,
            drop,
            dup,
            scatter,
            frames,
            short,
            most,
            marks: [false; 2],
            stray,
        }
    }

    fn send(&mut self, i: usize, buf: IoBuf, tag: u64, flags: OpFlags, context: u64) -> Result<()> {
        let end = &mut self.ends[i];
        let kind = if tag == u64::MAX { MsgKind::Msg } else { MsgKind::Tagged };
        let tag = if tag == u64::MAX { 0 } else { tag };
        let (dest, data) = (end.peer, 4711);
        let no_completion = false;
        let mut req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
        if let Some(short) = &mut self.short {
            let mut sink = sink(&mut end.out);
            if end.node.try_send(end.ep, &mut req, &mut sink, || self.now) {
                *short += 1;
                return Ok(());
            }
        }
        end.node.post_send(self.now, end.ep, req)
    }

    fn recv(&mut self, i: usize, buf: IoBuf, tag: u64, flags: OpFlags, context: u64) -> Result<()> {
        let end = &mut self.ends[i];
        let kind = if tag == u64::MAX { MsgKind::Msg } else { MsgKind::Tagged };
        let tag = if tag == u64::MAX { 0 } else { tag };
        let src = FI_ADDR_UNSPEC;
        let req = RecvReq { kind, buf, src, tag, ignore: 0, context, flags };
        end.node.post_recv(self.now, end.ep, req)
    }

    /// Lets `ns` pass and everything happen in it.
    fn run(&mut self, ns: u64) {
        self.run_by(ns, 5_000);
    }

    /// As [`run`](Self::run), with a turn every `step` ns.
    fn run_by(&mut self, ns: u64, step: u64) {
        let until = self.now + ns;
        while self.now < until {
            for i in 0..2 {
                let End { node, out, .. } = &mut self.ends[i];
                node.transmit(self.now, &mut sink(out));
            }
            for i in 0..2 {
                for bytes in std::mem::take(&mut self.ends[i].out) {
                    if bytes[..6] != self.ends[1 - i].node.port.station.mac.0 {
                        self.stray.push(bytes);
                        continue;
                    }
                    self.frames += 1;
                    let most = self.ends[i].node.port.frame_len();
                    assert!(bytes.len() <= most, "a frame of {} bytes", bytes.len());
                    if bytes.len() > self.most {
                        continue;
                    }
                    if self.drop == 0 || !self.mixed().is_multiple_of(self.drop) {
                        let End { node, out, .. } = &mut self.ends[1 - i];
                        let frame = RxFrame::new(&bytes).with_mark(self.marks[1 - i]);
                        // With or without a way to answer at once.
                        if self.short.is_some() && drawn(self.frames).is_multiple_of(2) {
                            node.on_frame_with(&self.now, &frame, sink(out));
                        } else {
                            node.on_frame(self.now, &frame);
                        }
                        if self.dup != 0 && self.frames.is_multiple_of(self.dup) {
                            self.ends[1 - i].node.on_frame(self.now, &RxFrame::new(&bytes));
                        }
                    }
                }
            }
            self.now = self.now + step;
        }
    }

    /// A number drawn from that of the frame, if `scatter`: a rhythm of losses can meet the rhythm
    /// of repetitions, and then the same packet is lost for ever.
    fn mixed(&self) -> usize {
        if self.scatter { drawn(self.frames) } else { self.frames }
    }

    fn read(&mut self, i: usize) -> Vec<Cqe> {
        let mut out = [Cqe::default(); 64];
        let end = &mut self.ends[i];
        let n = end.node.cq_read(end.cq, &mut out).unwrap_or(0);
        out[..n].to_vec()
    }

    fn read_err(&mut self, i: usize) -> CqErr {
        let end = &mut self.ends[i];
        end.node.receiving().cq_readerr(end.cq).unwrap()
    }

    /// Both nodes are as empty as when they were made.
    fn assert_quiet(&self) {
        for end in &self.ends {
            let levels = end.node.statistics().levels();
            assert_eq!(levels, Levels { peers: 1, timers: levels.timers, ..Levels::default() });
            assert!(end.node.reassemblies.is_empty());
            // Nor does either side believe that the other owes it an answer.
            for (_, peer) in end.node.peers.iter() {
                let awaited = (peer.answers, peer.reads, peer.responses, peer.long_answers);
                assert_eq!((awaited, peer.unexpected), ((0, 0, 0, 0), 0));
            }
        }
    }
}

fn drawn(number: usize) -> usize {
    let x = (number as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    ((x ^ x >> 29).wrapping_mul(0xBF58_476D_1CE4_E5B9) >> 32) as usize
}

/// Takes frames to `out`.
fn sink(out: &mut VecDeque<Vec<u8>>) -> impl FnMut(&TxFrame<'_>) -> Tx + '_ {
    |frame| {
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        out.push_back(bytes);
        Tx::Sent
    }
}

fn bytes(len: usize) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

fn contents(buf: &IoBuf) -> Vec<u8> {
    let mut out = vec![0; buf.len()];
    buf.read_at(0, &mut out);
    out
}

/// A second handle on the same leaked memory, to look at it while the node has the first.
fn shared(len: usize) -> (IoBuf, IoBuf) {
    IoBuf::leaked_pair(&vec![0xEE; len])
}

#[test]
fn message_of_every_size_class_arrives_expected_and_unexpected() {
    for lossless in [true, false] {
        for mtu in [256, 1500, 9000, 65_535] {
            let mut pair = Pair::new(mtu, lossless);
            for len in [0, 1, 64, 255, 256, 257, 1400, 1500, 4096, 9000, 16384, 16385, 300_000] {
                for early in [false, true] {
                    let data = bytes(len);
                    let (buf, look) = shared(len + 3);
                    if !early {
                        pair.recv(1, buf, 5, OpFlags::empty(), 1).unwrap();
                        pair.send(0, IoBuf::leaked(&data), 5, OpFlags::REMOTE_CQ_DATA, 2).unwrap();
                    } else {
                        pair.send(0, IoBuf::leaked(&data), 5, OpFlags::REMOTE_CQ_DATA, 2).unwrap();
                        pair.run(100_000);
                        pair.recv(1, buf, 5, OpFlags::empty(), 1).unwrap();
                    }
                    pair.run(3_000_000);
                    let got = pair.read(1);
                    let what = format!("lossless {lossless} mtu {mtu} len {len} early {early}");
                    assert_eq!(got.len(), 1, "{what}");
                    assert_eq!(
                        (got[0].len, got[0].data, got[0].src),
                        (len as u64, 4711, 0),
                        "{what}"
                    );
                    assert_eq!(&contents(&look)[..len], data, "{what}");
                    assert_eq!(&contents(&look)[len..], [0xEE; 3], "{what}");
                    let sent = pair.read(0);
                    assert_eq!(sent.len(), 1, "{what}");
                    assert_eq!(sent[0].flags, CqFlags::SEND | CqFlags::TAGGED, "{what}");
                }
            }
            pair.run(600_000_000);
            pair.assert_quiet();
        }
    }
}

#[test]
fn stream_survives_the_loss_of_every_fifth_frame() {
    let mut pair = Pair::new(1500, false);
    pair.drop = 5;
    let mut looks = Vec::new();
    for i in 0..60 {
        let len = [10, 1000, 5000, 40_000, 70_000][i % 5];
        let (buf, look) = shared(len);
        looks.push((look, len));
        pair.recv(1, buf, 9, OpFlags::empty(), i as u64).unwrap();
        pair.send(0, IoBuf::leaked(&bytes(len)), 9, OpFlags::empty(), i as u64).unwrap();
    }
    pair.run(1_000_000_000);
    let got: Vec<u64> = pair.read(1).iter().map(|c| c.op_context).collect();
    assert_eq!(got.len(), 60);
    let sent = pair.read(0);
    assert_eq!(sent.len(), 60);
    for (look, len) in looks {
        assert_eq!(contents(&look), bytes(len));
    }
    pair.run(600_000_000);
    pair.assert_quiet();
}

#[test]
fn silent_peer_is_dead_within_a_tenth_over_t_dead() {
    for lossless in [true, false] {
        let mut pair = Pair::new(1500, lossless);
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 0).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
        pair.run(1_000_000);
        assert_eq!(pair.read(0).len(), 1);
        pair.drop = 1;
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::DELIVERY_COMPLETE, 2).unwrap();
        pair.run(499_000_000);
        assert!(pair.ends[0].node.cqs.ready(pair.ends[0].cq).unwrap() == 0);
        pair.run(52_000_000);
        let err = pair.read_err(0);
        assert_eq!((err.err, err.cqe.op_context), (Error::HostUnreach, 2));
    }
}

/// Goal: an operation ends in time whose packets do not get through although the peer answers.
/// Method: a wire that comes to lose all frames but the shortest.
#[test]
fn operations_whose_packets_are_lost_end_in_time() {
    let mut pair = Pair::new(1500, false);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 0).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.run(1_000_000);
    assert_eq!(pair.read(0).len(), 1);
    pair.most = 150;
    pair.send(0, IoBuf::leaked(&[1; 200]), 1, OpFlags::empty(), 2).unwrap();
    pair.run_by(400_000_000, 100_000);
    assert_eq!(pair.ends[0].node.cqs.ready(pair.ends[0].cq), Ok(0));
    pair.run_by(300_000_000, 100_000);
    assert_eq!(pair.ends[0].node.cqs.ready(pair.ends[0].cq), Ok(1));
    assert_eq!(pair.read_err(0).cqe.op_context, 2);
    assert_eq!(pair.ends[0].node.counters().sessions_stuck, 1);
}

/// Goal: an injected message is complete when it has left, unless more was asked for.
#[test]
fn delivery_is_waited_for_if_it_was_asked_for() {
    let early = OpFlags::INJECT | OpFlags::INJECT_COMPLETE;
    let asked = [OpFlags::empty(), OpFlags::DELIVERY_COMPLETE, OpFlags::MATCH_COMPLETE];
    for (also, done) in asked.into_iter().zip([1, 0, 0]) {
        let mut pair = Pair::new(1500, false);
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 0).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
        pair.run(1_000_000);
        pair.read(0);
        pair.drop = 1;
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, early | also, 2).unwrap();
        pair.run(1_000_000);
        assert_eq!(pair.read(0).len(), done, "{also:?}");
    }
}

/// Goal: who goes on to send to a peer that is silent probes it all the same.
#[test]
fn a_stream_to_a_silent_peer_does_not_put_off_its_probes() {
    let mut pair = Pair::new(1500, true);
    pair.short = Some(0);
    for context in 0..2 {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), context).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), context).unwrap();
        pair.run(1_000_000);
    }
    pair.drop = 1;
    let taken = pair.short;
    for context in 2..8 {
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), context).unwrap();
        pair.run(20_000_000);
    }
    assert_eq!(pair.short, taken.map(|n| n + 6), "by the fast path");
    let (_, peer) = pair.ends[0].node.peers.iter().next().unwrap();
    assert!(peer.probes > 0, "not asked in 120 ms");
}

/// Goal: a send that has not left can be canceled, once, and nothing of it arrives; one that has
/// left cannot.
#[test]
fn a_send_that_waits_can_be_canceled() {
    let mut pair = Pair::new(1500, false);
    for context in 1..4 {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), context).unwrap();
        pair.send(0, IoBuf::leaked(&[context as u8; 8]), 1, OpFlags::empty(), context).unwrap();
    }
    let End { node, ep, .. } = &mut pair.ends[0];
    assert_eq!(
        (node.operations().cancel(*ep, 2), node.operations().cancel(*ep, 2)),
        (Ok(()), Err(Error::NoData))
    );
    let err = pair.read_err(0);
    assert_eq!((err.err, err.cqe.op_context), (Error::Canceled, 2));
    pair.run(1_000_000);
    let sent: Vec<u64> = pair.read(0).iter().map(|cqe| cqe.op_context).collect();
    assert_eq!((sent, pair.read(1).len()), (vec![1, 3], 2));
    pair.drop = 1;
    pair.send(0, IoBuf::leaked(&[4; 8]), 1, OpFlags::empty(), 4).unwrap();
    let End { node, ep, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    assert_eq!(node.operations().cancel(*ep, 4), Err(Error::NoData));
}

/// Goal: a session is not called by the name of the one before it, so that what is late for that
/// one is not taken for this one.
#[test]
fn a_session_has_a_name_of_its_own() {
    let mut pair = Pair::new(1500, false);
    let mut names = std::collections::BTreeSet::new();
    for round in 1..5 {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
        pair.run(1_000_000);
        names.insert(pair.ends[0].node.peers.iter().next().unwrap().1.sid);
        assert_eq!((pair.read(0).len(), names.len()), (1, round));
        for i in 0..2 {
            let other = pair.ends[1 - i].node.port.station;
            pair.ends[i].node.sessions().drop_session(pair.now, other);
        }
    }
}

#[test]
fn truncated_message_says_what_was_lost() {
    for len in [64_usize, 300_000] {
        let mut pair = Pair::new(1500, false);
        let (buf, look) = shared(16);
        pair.recv(1, buf, u64::MAX, OpFlags::empty(), 3).unwrap();
        pair.send(0, IoBuf::leaked(&bytes(len)), u64::MAX, OpFlags::empty(), 4).unwrap();
        pair.run(10_000_000);
        let err = pair.read_err(1);
        assert_eq!((err.err, err.cqe.len, err.olen), (Error::Trunc, 16, len as u64 - 16));
        assert_eq!(contents(&look), bytes(16));
        assert_eq!(pair.read(0).len(), 1);
    }
}

#[test]
fn message_to_an_endpoint_that_is_not_there_fails_at_the_sender() {
    let mut pair = Pair::new(1500, false);
    let mut addr = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
    addr.ep = 77;
    let end = &mut pair.ends[0];
    end.peer = end.node.sessions().av_insert(Instant(0), end.av, addr).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.run(5_000_000);
    assert_eq!(pair.read_err(0).err, Error::ConnRefused);
    pair.ends[0].peer = 0;
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 2).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 3).unwrap();
    pair.run(5_000_000);
    assert_eq!(pair.read(0)[0].op_context, 3);
    assert_eq!(pair.read(1)[0].op_context, 2);
}

#[test]
fn message_to_oneself_arrives() {
    let mut pair = Pair::new(1500, true);
    let addr = pair.ends[0].node.addr_of(pair.ends[0].ep).unwrap();
    let end = &mut pair.ends[0];
    end.peer = end.node.sessions().av_insert(Instant(0), end.av, addr).unwrap();
    for len in [5, 5000, 200_000] {
        let (buf, look) = shared(len);
        pair.recv(0, buf, 1, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&bytes(len)), 1, OpFlags::empty(), 2).unwrap();
        pair.run(5_000_000);
        assert_eq!(pair.read(0).len(), 2, "{len}");
        assert_eq!(contents(&look), bytes(len));
    }
}

#[test]
fn multi_recv_takes_messages_back_to_back_and_is_released_once() {
    let mut pair = Pair::new(1500, false);
    let (buf, look) = shared(256);
    let node = &mut pair.ends[1];
    node.node.eps.set_min_multi_recv(node.ep, 32).unwrap();
    pair.recv(1, buf, u64::MAX, OpFlags::MULTI_RECV, 1).unwrap();
    for _ in 0..3 {
        pair.send(0, IoBuf::leaked(&bytes(100)), u64::MAX, OpFlags::empty(), 4).unwrap();
        pair.run(1_000_000);
    }
    let got = pair.read(1);
    assert_eq!(got.len(), 2);
    assert_eq!(got[1].buf - got[0].buf, 100);
    let err = pair.read_err(1);
    assert_eq!((err.err, err.cqe.len, err.olen), (Error::Trunc, 56, 44));
    let last = pair.read(1);
    assert_eq!(last.len(), 1);
    assert!(last[0].flags.contains(CqFlags::MULTI_RECV));
    assert_eq!(&contents(&look)[..100], bytes(100));
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// Goal: a tagged multi-receive takes the messages whose tags match, whether they came before it or
/// after, each under its own tag, and leaves others to other receives.
#[test]
fn tagged_multi_recv_takes_what_matches_and_tells_each_tag() {
    let mut pair = Pair::new(1500, false);
    let (buf, look) = shared(300);
    let ep = pair.ends[1].ep;
    pair.ends[1].node.eps.set_min_multi_recv(ep, 1).unwrap();
    let send = |pair: &mut Pair, tags: &[u64]| {
        for &tag in tags {
            let memory = IoBuf::leaked(&[tag as u8; 100]);
            pair.send(0, memory, tag, OpFlags::empty(), 4).unwrap();
        }
        pair.run(1_000_000);
    };
    send(&mut pair, &[0x21, 0x13]);
    let req = RecvReq {
        kind: MsgKind::Tagged,
        buf,
        src: FI_ADDR_UNSPEC,
        tag: 0x10,
        ignore: 0xf,
        context: 1,
        flags: OpFlags::MULTI_RECV,
    };
    let now = pair.now;
    pair.ends[1].node.post_recv(now, ep, req).unwrap();
    send(&mut pair, &[0x22, 0x11, 0x1f, 0x12]);
    let got = pair.read(1);
    let tags: Vec<u64> = got.iter().map(|cqe| cqe.tag).collect();
    assert_eq!(tags, [0x13, 0x11, 0x1f]);
    assert!(got.iter().all(|cqe| cqe.flags.contains(CqFlags::RECV | CqFlags::TAGGED)), "{got:?}");
    let last: Vec<bool> = got.iter().map(|cqe| cqe.flags.contains(CqFlags::MULTI_RECV)).collect();
    assert_eq!(last, [false, false, true]);
    assert_eq!((got[1].buf - got[0].buf, got[2].buf - got[0].buf), (100, 200));
    assert_eq!(contents(&look), [[0x13; 100], [0x11; 100], [0x1f; 100]].concat());
    // The others wait, the last one as it found no room.
    for tag in [0x21, 0x22, 0x12] {
        pair.recv(1, IoBuf::leaked(&[0; 100]), tag, OpFlags::empty(), tag).unwrap();
        pair.run(1_000_000);
        let got = pair.read(1);
        assert_eq!((got.len(), got[0].tag), (1, tag));
    }
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// Goal: which receives name their source, and which have to, is what the endpoint was granted.
/// Method: one receive of each kind, with and without a source, for every set of the three bits.
#[test]
fn receives_name_sources_as_the_endpoint_was_granted() {
    const DIRECTED: Caps = Caps::DIRECTED_RECV;
    const TAGGED: Caps = Caps::TAGGED_DIRECTED_RECV;
    const EXACT: Caps = Caps::EXACT_DIRECTED_RECV;
    // Of untagged and tagged: whether the source counts, and whether it has to be named.
    for (asked, counts, exact) in [
        (Caps::empty(), [false, false], false),
        (DIRECTED, [true, true], false),
        (TAGGED, [false, true], false),
        (DIRECTED | TAGGED, [true, true], false),
        (EXACT, [true, true], true),
        (EXACT | DIRECTED, [true, true], true),
        (EXACT | TAGGED, [false, true], true),
        (EXACT | TAGGED | DIRECTED, [true, true], true),
    ] {
        let mut pair = Pair::new(1500, false);
        let End { node, cq, av, peer, .. } = &mut pair.ends[1];
        let caps = Caps::MSG | Caps::TAGGED | asked;
        let ep = open_ep(node, (*cq, *av), EpAttr { caps, ..EpAttr::default() });
        let nobody = *peer + 1;
        for (kind, counts) in [MsgKind::Msg, MsgKind::Tagged].into_iter().zip(counts) {
            let req = |src, flags| {
                let buf = IoBuf::leaked(&[0; 8]);
                RecvReq { kind, buf, src, tag: 0, ignore: 0, context: 1, flags }
            };
            let none = OpFlags::empty();
            let mut post = |src, flags| {
                let is_short = node.objects().try_post_recv(ep, &req(src, flags));
                if is_short { Ok(()) } else { node.post_recv(Instant(0), ep, req(src, flags)) }
            };
            let invalid = |got: Result<()>| matches!(got, Err(Error::Invalid(_)));
            let what = format!("{asked:?} {kind:?}");
            assert_eq!(invalid(post(FI_ADDR_UNSPEC, none)), counts && exact, "{what}");
            assert_eq!(invalid(post(nobody, none)), counts, "{what}");
            assert_eq!(post(*peer, none), Ok(()), "{what}");
            if kind == MsgKind::Tagged {
                let peek = OpFlags::PEEK;
                assert_eq!(invalid(post(FI_ADDR_UNSPEC, peek)), counts && exact, "{what}");
                assert_eq!(post(*peer, peek), Ok(()), "{what}");
            }
        }
    }
}

/// A release that no message's entry tells is the tagged receive's as well.
#[test]
fn tagged_multi_recv_is_released_by_an_entry_of_its_kind() {
    let mut pair = Pair::new(1500, false);
    pair.recv(1, IoBuf::leaked(&[0; 64]), 7, OpFlags::MULTI_RECV, 1).unwrap();
    pair.send(0, IoBuf::leaked(&bytes(100)), 7, OpFlags::empty(), 4).unwrap();
    pair.run(1_000_000);
    let err = pair.read_err(1);
    assert_eq!((err.err, err.cqe.tag, err.olen), (Error::Trunc, 7, 36));
    let last = pair.read(1);
    assert_eq!(last.len(), 1);
    let flags = CqFlags::RECV | CqFlags::TAGGED | CqFlags::MULTI_RECV;
    assert_eq!((last[0].flags, last[0].tag, last[0].op_context), (flags, 7, 1));
    pair.run(600_000_000);
    pair.assert_quiet();
}

/// Goal: the fast path and the slow one differ in nothing that anybody sees. Method: the same calls
/// once with each, over every kind of message, expected and not, short of credit and of window; on
/// a wire that loses nothing, and on one that may, and does, with frames that come twice.
#[test]
fn the_short_way_is_the_long_way() {
    for (lossless, drop, dup) in [(true, 0, 0), (false, 0, 0), (false, 9, 0), (false, 11, 7)] {
        both_ways(lossless, drop, dup);
    }
}

fn both_ways(lossless: bool, drop: usize, dup: usize) {
    let run = |short: Option<usize>| {
        let mut pair = Pair::new(9000, lossless);
        (pair.short, pair.drop, pair.dup, pair.scatter) = (short, drop, dup, true);
        let (mut seen, mut looks) = (Vec::new(), Vec::new());
        for round in 0..600_usize {
            let len = [0, 1, 64, 256, 257, 4096, 8900, 9000, 20_000, 70_000][round % 10];
            let flags = [
                OpFlags::empty(),
                OpFlags::REMOTE_CQ_DATA,
                OpFlags::DELIVERY_COMPLETE,
                OpFlags::INJECT_COMPLETE,
                OpFlags::MORE,
            ][round % 5];
            let tag = if round % 7 == 0 { u64::MAX } else { round as u64 % 3 };
            let (buf, look) = shared([len, len / 2][usize::from(round % 11 == 0)]);
            let early = round % 4 == 0;
            if !early {
                pair.recv(1, buf, tag, OpFlags::empty(), round as u64).unwrap();
                pair.send(0, IoBuf::leaked(&bytes(len)), tag, flags, round as u64).unwrap();
            } else {
                pair.send(0, IoBuf::leaked(&bytes(len)), tag, flags, round as u64).unwrap();
                pair.run(10_000);
                pair.recv(1, buf, tag, OpFlags::empty(), round as u64).unwrap();
            }
            if round % 3 == 0 {
                pair.run(50_000);
            }
            looks.push(look);
            if round % 40 == 39 {
                pair.run(if drop > 0 { 30_000_000 } else { 1_000_000 });
                for i in 0..2 {
                    seen.extend(pair.read(i).iter().map(|e| format!("{i} {e:?}")));
                    while let Ok(e) = pair.ends[i].node.receiving().cq_readerr(pair.ends[i].cq) {
                        seen.push(format!("{i} {:?} {}", e.err, e.olen));
                        seen.extend(pair.read(i).iter().map(|e| format!("{i} {e:?}")));
                    }
                }
            }
        }
        seen.extend(looks.iter().map(|look| format!("{:?}", contents(look))));
        pair.run(600_000_000);
        pair.assert_quiet();
        let ends = pair.ends.each_ref();
        seen.extend(ends.map(|e| format!("{:?}", e.node.eps.counters(e.ep))));
        // A completion comes earlier by a turn, so only what was seen counts, not when.
        seen.sort();
        (seen, pair.short)
    };
    let (long, _) = run(None);
    let (short, taken) = run(Some(0));
    assert_eq!(short, long);
    let least = if lossless { 100 } else { 50 };
    assert!(taken > Some(least), "{taken:?} of 600 took the fast path");
}

/// The record of a peer whose address was removed stays its own while a directed receive names it,
/// so that nobody else's messages match; after that it is given to others.
#[test]
fn a_directed_receive_keeps_the_record_of_its_peer() {
    let full = NodeSettings { peer_limit: 4096, ..NodeSettings::default() };
    let End { mut node, ep, av, .. } = end_with(1, 1500, true, full);
    let addr = |n: u16| {
        let [a, b] = n.to_be_bytes();
        EpAddr { station: Station::at([2, 7, 0, 0, a, b]), ep: 3, incarnation: 0 }
    };
    let fi = node.sessions().av_insert(Instant(1), av, addr(0)).unwrap();
    let (kind, buf) = (MsgKind::Tagged, IoBuf::leaked(&[0; 8]));
    let (tag, ignore, context, flags) = (7, 0, 1, OpFlags::empty());
    node.post_recv(Instant(1), ep, RecvReq { kind, buf, src: fi, tag, ignore, context, flags })
        .unwrap();
    node.objects().av_remove(av, fi).unwrap();
    let more =
        (1..).take_while(|&n| node.sessions().av_insert(Instant(1), av, addr(n)).is_ok()).count();
    assert!(more > 1000, "{more} others fit");
    node.operations().cancel(ep, 1).unwrap();
    node.sessions().av_insert(Instant(1), av, addr(9999)).unwrap();
    assert_eq!(node.sessions().av_insert(Instant(1), av, addr(9998)), Err(Error::NoMem));
}

/// Goal: as many peers as the application inserts, and sessions that are open go on while the
/// tables grow; strangers do not make them grow. Method: a table of 4, and 3,000 addresses inserted
/// while messages pass.
#[test]
fn the_table_of_peers_grows_with_what_is_inserted() {
    for lossless in [true, false] {
        let small = || NodeSettings { peer_max: 4, ..NodeSettings::default() };
        let mut pair = Pair::of([1, 2].map(|station| end_with(station, 1500, lossless, small())));
        pair.short = Some(0);
        let mut inserted = Vec::new();
        for n in 0..3000_u16 {
            let [a, b] = n.to_be_bytes();
            let addr = EpAddr { station: Station::at([2, 7, 0, 0, a, b]), ep: 3, incarnation: 0 };
            let (now, end) = (pair.now, &mut pair.ends[n as usize % 2]);
            inserted.push((end.node.sessions().av_insert(now, end.av, addr).unwrap(), addr));
            if n % 100 < 3 {
                pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
                pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
                pair.run(200_000);
                assert_eq!((pair.read(1).len(), pair.read(0).len()), (1, 1), "at {n}");
            }
        }
        for (i, (at, addr)) in inserted.into_iter().enumerate() {
            let end = &mut pair.ends[i % 2];
            assert_eq!(end.node.objects().av_lookup(end.av, at), Ok(addr));
        }
        assert_eq!(pair.ends[0].node.statistics().levels().peers, 1501);
        // A vector opened for many makes room for them at once, for as many as may be.
        let End { mut node, .. } = end_with(1, 1500, lossless, small());
        for (count, room) in [(3, 8), (5000, 5000), (100, 5000), (usize::MAX, 1 << 20)] {
            node.sessions().av_open(count).unwrap();
            assert_eq!(node.settings().peer_max, room);
        }
        let limit = NodeSettings { peer_limit: 6, ..small() };
        let End { mut node, av, .. } = end_with(1, 1500, lossless, limit);
        node.sessions().av_open(9).unwrap();
        assert_eq!(node.settings().peer_max, 6);
        let addr = |n| EpAddr { station: Station::at([2, 7, 0, 0, 0, n]), ep: 3, incarnation: 0 };
        let fit = (0..9)
            .take_while(|&n| node.sessions().av_insert(Instant(1), av, addr(n)).is_ok())
            .count();
        assert_eq!(fit, 6);
    }
}

/// Goal: a source is told as the vector has it now, whatever a message before was told with.
/// Method: the peer is inserted twice and removed twice, and each time two messages come, of which
/// the second finds the first one's name.
#[test]
fn a_source_is_named_as_the_vector_has_it() {
    let mut pair = Pair::new(1500, true);
    pair.short = Some(0);
    let told = |pair: &mut Pair| {
        for context in 1..3 {
            pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), context).unwrap();
            pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), context).unwrap();
            pair.run(50_000);
        }
        let [a, b] = pair.read(1)[..] else { panic!("two messages") };
        assert_eq!(a.src, b.src);
        pair.read(0);
        a.src
    };
    let addr = pair.ends[0].node.addr_of(pair.ends[0].ep).unwrap();
    let old = pair.ends[1].peer;
    assert_eq!(told(&mut pair), old);
    let new = pair.ends[1].node.sessions().av_insert(pair.now, pair.ends[1].av, addr).unwrap();
    assert_eq!(told(&mut pair), new, "the newest of two");
    pair.ends[1].node.objects().av_remove(pair.ends[1].av, new).unwrap();
    assert_eq!(told(&mut pair), old, "the one that is left");
    pair.ends[1].node.objects().av_remove(pair.ends[1].av, old).unwrap();
    assert_eq!(told(&mut pair), FI_ADDR_UNSPEC, "none is left");
    let again = pair.ends[1].node.sessions().av_insert(pair.now, pair.ends[1].av, addr).unwrap();
    assert_eq!(told(&mut pair), again);
    assert!(pair.short > Some(2), "{:?} took the fast path", pair.short);
}
