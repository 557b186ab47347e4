//! Forged frames on a segment that others talk on.

use std::time::Instant;

use barewire_dataplane::flags::{BindFlags, OpFlags};
use barewire_dataplane::node::{
    AvId, CqId, EpAttr, EpId, Levels, MsgKind, Node, NodeSettings, RecvReq, SendReq, SessionInfo,
};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::{Cqe, FI_ADDR_UNSPEC, FiAddr};
use barewire_driver::backend::shm::{Monitor, ShmPort, ShmSettings};
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::mem::IoBuf;
use barewire_driver::port::{Port, Tx};
use barewire_tests::forge::Forger;
use barewire_tests::rng::Rng;

use crate::supervisor::{PATIENCE, Segment};
use crate::worker::pattern;

/// Frames in all.
const FRAMES: usize = 1_000_000;

/// Frames between two messages of the honest stations.
const BETWEEN: usize = 5_000;

/// A node on the segment.
pub(crate) struct Station {
    pub(crate) engine: Engine,
    av: AvId,
    cq: CqId,
    pub(crate) ep: EpId,
    pub(crate) peer: FiAddr,
}

impl Station {
    fn join(settings: &ShmSettings, incarnation: u64) -> Self {
        Self::join_as(settings, incarnation, EpAttr::default())
    }

    pub(crate) fn join_as(settings: &ShmSettings, incarnation: u64, attr: EpAttr) -> Self {
        let port = ShmPort::open(settings).unwrap();
        let settings = NodeSettings { incarnation, seed: incarnation, ..NodeSettings::default() };
        let mut node = Node::new(settings, port.caps()).unwrap();
        let (av, cq) = (node.sessions().av_open(4).unwrap(), node.cqs.open(16).unwrap());
        let ep = node.eps.open(attr).unwrap();
        node.objects().ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
        node.objects().ep_bind_av(ep, av).unwrap();
        node.ep_enable(ep).unwrap();
        Self { engine: Engine::new(node, Box::new(port)), av, cq, ep, peer: FI_ADDR_UNSPEC }
    }

    pub(crate) fn knows(&mut self, other: &Self) {
        let addr = other.engine.node().addr_of(other.ep).unwrap();
        self.peer = self.engine.av_insert(self.av, addr).unwrap();
    }

    /// Takes a completion, if there is one; an error is a failure.
    pub(crate) fn completed(&mut self) -> bool {
        self.engine.turn().unwrap();
        let ready = self.engine.node().cqs.ready(self.cq).unwrap() > 0;
        ready && self.engine.node_mut().cq_read(self.cq, &mut [Cqe::default()]).unwrap() == 1
    }

    /// Everything but the counters: sessions with honest peers, and how full the tables are.
    fn state(&self, third: barewire_driver::port::Station) -> (Vec<SessionInfo>, Levels) {
        let node = self.engine.node();
        let sessions =
            node.statistics().session_infos().filter(|session| session.station != third).collect();
        // A session with the forger would be his right, and a probe may be due by now.
        (sessions, Levels { peers: 0, timers: 0, ..node.statistics().levels() })
    }
}

/// Sends `len` bytes from one to the other and compares them.
fn message(from: &mut Station, to: &mut Station, len: usize) {
    let sent = pattern(len, len as u64);
    let (buf, look) = IoBuf::leaked_pair(&vec![0; len]);
    let (kind, tag, ignore, context, flags) = (MsgKind::Tagged, 7, 0, 1, OpFlags::empty());
    let recv = RecvReq { kind, buf, src: FI_ADDR_UNSPEC, tag, ignore, context, flags };
    to.engine.post_recv(to.ep, recv).unwrap();
    let (buf, dest, data, no_completion) = (IoBuf::leaked(&sent), from.peer, 0, false);
    let send = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
    from.engine.post_send(from.ep, send).unwrap();
    let (mut ended, start) = ([false; 2], Instant::now());
    while ended != [true; 2] {
        ended[0] |= from.completed();
        ended[1] |= to.completed();
        assert!(start.elapsed() < PATIENCE, "{len} bytes do not arrive: {ended:?}");
    }
    let mut got = vec![0; len];
    look.read_at(0, &mut got);
    assert!(got == sent, "{len} bytes arrived changed");
}

/// Messages of every kind there and back. What the second station was sent is added to `live`.
fn talk(a: &mut Station, b: &mut Station, monitor: &mut Monitor, live: &mut Vec<Vec<u8>>) {
    let victim = b.engine.caps().station.mac.0;
    for len in [0, 8, 256, 3000, 16_000, 70_000] {
        message(a, b, len);
        message(b, a, len);
        let each = |_, _, frame: &RxFrame<'_>, len: usize| {
            let mut bytes = vec![0; len];
            if frame.copy_to(0, &mut bytes) && bytes[..6] == victim {
                live.push(bytes);
            }
        };
        monitor.read(64, each).unwrap();
    }
}

/// Goal: 10^6 random and mutated frames injected into a live segment change nothing but counters.
/// Method: a third member writes them into the ring towards a station that has a session with
/// another; sessions and tables are compared after each burst, and between bursts messages pass in
/// both directions, whole. Frames on shared memory have no checksum, so what is under the honest
/// station's address is from somebody who guesses; see `docs/memory.md` on whom to trust.
#[test]
fn forged_frames_change_nothing_but_counters() {
    let segment = Segment::new("forged");
    let settings = ShmSettings::named(&segment.0);
    let mut monitor = Monitor::open(&settings).unwrap();
    let [mut a, mut b] = [11, 22].map(|incarnation| Station::join(&settings, incarnation));
    a.knows(&b);
    b.knows(&a);
    let mut live = Vec::new();
    // Both see the monitor after a while.
    while live.len() < 100 {
        talk(&mut a, &mut b, &mut monitor, &mut live);
    }
    drop(monitor);
    let mut port = ShmPort::open(&settings).unwrap();
    let [honest, victim, third] =
        [a.engine.caps(), b.engine.caps(), port.caps()].map(|c| c.station);
    let (rng, ep) = (Rng::new(1, 1), b.engine.node().addr_of(b.ep).unwrap().ep);
    let mut forger = Forger { rng, victim, honest, third, crc: false, ep };
    let start = Instant::now();
    let before = b.engine.node().counters().rx_frames;
    let mut sent = 0;
    while sent < FRAMES {
        for _ in 0..200 {
            a.engine.turn().unwrap();
            b.engine.turn().unwrap();
        }
        let quiet = b.state(third);
        for _ in 0..BETWEEN {
            sent += inject(&mut port, &forger.frame(&live), &mut b);
        }
        let after = b.state(third);
        assert!(quiet == after, "after {sent} frames: {quiet:?} became {after:?}");
        message(&mut a, &mut b, [8, 5000, 70_000][sent % 3]);
        message(&mut b, &mut a, [8, 5000, 70_000][sent % 3]);
    }
    let seen = b.engine.node().counters().rx_frames - before;
    assert!(seen > FRAMES as u64, "{seen} of {sent} frames came");
    println!("forged_frames: {sent} frames in {:.1} s", start.elapsed().as_secs_f64());
}

/// Sends a frame and lets the victim look; what it answers is thrown away.
fn inject(port: &mut ShmPort, bytes: &[u8], victim: &mut Station) -> usize {
    let station = victim.engine.caps().station;
    if bytes.len() < 14 || TxFrame::whole(bytes).dst() != station {
        return 0;
    }
    while port.tx(&TxFrame::whole(bytes)).unwrap() == Tx::Full {
        victim.engine.turn().unwrap();
        port.rx_burst(64, &mut |_: &RxFrame<'_>| {}).unwrap();
    }
    victim.engine.turn().unwrap();
    1
}
