//! Bare nodes on the segment, driven by the stage itself: for stages that measure, or that speak
//! the protocol with their own hands.

use std::collections::VecDeque;

use barewire_dataplane::flags::{BindFlags, Caps, OpFlags};
use barewire_dataplane::node::{
    AvId, CqId, EpAttr, EpId, MsgKind, Node, NodeSettings, RecvReq, SendReq,
};
use barewire_dataplane::types::{CqErr, Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, Instant};

use crate::arena::{Arena, Buf};
use crate::ledger::ensure;
use crate::net::{Egress, Event, Net};
use crate::onesided::ONE_SIDED;
use crate::plan::Plan;
use crate::rng::Rng;
use crate::world::{caps, rx_frame};

/// Frames that a switch has forwarded and that are taken in one poll.
const BURST: usize = 32;

/// Number of every rig node's one endpoint.
pub(crate) const EP: u16 = 3;

/// One node with one endpoint, queue and address vector.
pub(crate) struct Station {
    pub(crate) node: Node,
    pub(crate) ep: EpId,
    pub(crate) cq: CqId,
    pub(crate) av: AvId,
    pub(crate) arena: Arena,
    rx: VecDeque<u32>,
    poll_at: u64,
    stamp: u32,
}

/// Nodes and their segment.
pub(crate) struct Rig {
    pub(crate) net: Net,
    pub(crate) plan: Plan,
    /// `None` where nobody lives, or the stage itself does.
    pub(crate) stations: Vec<Option<Station>>,
    /// Frames that reached a station without a node, if wanted.
    pub(crate) stray: Option<Vec<(usize, Vec<u8>)>>,
    rng: Rng,
    /// Capabilities of every endpoint beyond those of messages.
    more: Caps,
}

impl Rig {
    /// Nodes at the first `nodes` stations of `plan`.
    pub(crate) fn new(plan: Plan, nodes: usize) -> Self {
        Self::with(plan, nodes, Caps::empty())
    }

    /// As [`new`](Self::new), with endpoints that can do more.
    pub(crate) fn with(plan: Plan, nodes: usize, more: Caps) -> Self {
        let net = Net::new(plan.seed, plan.hosts, plan.link.clone());
        let stations = (0..plan.hosts).map(|_| None).collect();
        let rng = Rng::new(plan.seed, 5);
        let mut rig = Self { net, plan, stations, stray: None, rng, more };
        for host in 0..nodes {
            rig.start(host, 1 + host as u64);
        }
        for host in nodes..rig.plan.hosts {
            rig.net.set_life(host, 1000 + host as u32);
        }
        rig
    }

    /// A process of this incarnation starts at `host`.
    pub(crate) fn start(&mut self, host: usize, incarnation: u64) {
        let settings = self.plan.node.settings(incarnation, self.plan.seed ^ (incarnation << 20));
        self.start_with(host, settings);
    }

    /// A process with these settings starts at `host`.
    pub(crate) fn start_with(&mut self, host: usize, settings: NodeSettings) {
        let incarnation = settings.incarnation;
        let mut node = Node::new(settings, &caps(&self.plan, host)).expect("a valid plan");
        let cq = node.cqs.open(self.plan.node.cq_size).expect("room for a queue");
        let av = node.sessions().av_open(16).expect("room for an AV");
        let all = Caps::MSG | Caps::TAGGED | Caps::SEND | Caps::RECV | Caps::DIRECTED_RECV;
        let all = all | ONE_SIDED | self.more;
        let attr = EpAttr { number: Some(EP), caps: all, ..EpAttr::default() };
        let ep = node.eps.open(attr).expect("room for an endpoint");
        node.objects().ep_bind_av(ep, av).expect("bound once");
        node.objects()
            .ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV)
            .expect("bound once");
        node.ep_enable(ep).expect("complete");
        self.net.set_life(host, incarnation as u32);
        let (arena, rx) = (Arena::default(), VecDeque::new());
        let (poll_at, stamp) = (u64::MAX, 0);
        self.stations[host] = Some(Station { node, ep, cq, av, arena, rx, poll_at, stamp });
    }

    /// The process at `host` is gone.
    pub(crate) fn kill(&mut self, host: usize) {
        if let Some(s) = self.stations[host].take() {
            s.rx.iter().for_each(|&f| self.net.consumed(host, f));
        }
        self.net.set_life(host, 0);
    }

    pub(crate) fn at(&mut self, host: usize) -> &mut Station {
        self.stations[host].as_mut().expect("somebody lives there")
    }

    pub(crate) fn now(&self) -> Instant {
        Instant(self.net.now)
    }

    /// The address of `to` in the AV of `from`.
    pub(crate) fn peer(&mut self, from: usize, to: usize, incarnation: u64) -> FiAddr {
        let now = self.now();
        let s = self.at(from);
        let addr = EpAddr { station: Net::station(to), ep: EP, incarnation };
        s.node.sessions().av_insert(now, s.av, addr).expect("room in the AV")
    }

    /// Sends `buf`, whose content is up to the caller, and says whether it was accepted.
    pub(crate) fn send(&mut self, from: usize, dest: FiAddr, buf: Buf, context: u64) -> bool {
        let now = self.now();
        let mut rng = self.rng.clone();
        let s = self.at(from);
        let req = SendReq {
            kind: MsgKind::Msg,
            buf: s.arena.lend(buf, false, &mut rng),
            dest,
            tag: 0,
            data: 0,
            context,
            flags: OpFlags::empty(),
            no_completion: false,
        };
        let ok = s.node.post_send(now, s.ep, req).is_ok();
        self.poll_by(from, self.net.now);
        ok
    }

    /// Posts a receive, from `src` or anybody, and says whether it was accepted.
    pub(crate) fn recv(&mut self, at: usize, src: Option<FiAddr>, buf: Buf, context: u64) -> bool {
        let now = self.now();
        let mut rng = self.rng.clone();
        let s = self.at(at);
        let req = RecvReq {
            kind: MsgKind::Msg,
            buf: s.arena.lend(buf, false, &mut rng),
            src: src.unwrap_or(FI_ADDR_UNSPEC),
            tag: 0,
            ignore: 0,
            context,
            flags: OpFlags::empty(),
        };
        let ok = s.node.post_recv(now, s.ep, req).is_ok();
        self.poll_by(at, self.net.now);
        ok
    }

    /// One completion of `host` that is a success, if its queue starts with one.
    pub(crate) fn read(&mut self, host: usize) -> Option<Cqe> {
        let s = self.at(host);
        let mut out = [Cqe::default()];
        (s.node.cq_read(s.cq, &mut out) == Ok(1)).then_some(out[0])
    }

    /// The error entry at the head of `host`'s queue.
    pub(crate) fn error(&mut self, host: usize) -> Option<CqErr> {
        let s = self.at(host);
        s.node.receiving().cq_readerr(s.cq).ok()
    }

    /// Cancels the receives of `host` with a context from `from` on, and reads all entries of such
    /// operations.
    pub(crate) fn forget(&mut self, host: usize, from: u64) -> Result<(), String> {
        for context in from..from + 100_000 {
            let s = self.at(host);
            // Most of them have ended.
            let _ = s.node.operations().cancel(s.ep, context);
        }
        loop {
            if let Some(c) = self.read(host) {
                ensure!(c.op_context >= from, "an honest operation of old completed: {c:?}");
            } else if let Some(e) = self.error(host) {
                ensure!(e.cqe.op_context >= from, "an honest operation failed: {e:?}");
            } else {
                return Ok(());
            }
        }
    }

    pub(crate) fn poll_by(&mut self, host: usize, at: u64) {
        let at = at.max(self.net.now);
        let Some(s) = &mut self.stations[host] else { return };
        if at < s.poll_at {
            s.poll_at = at;
            s.stamp += 1;
            self.net.at(at, Event::Poll { host, stamp: s.stamp });
        }
    }

    /// Handles one event; false if there is none before `until`. The host it happened at is in
    /// `.1` if it was a poll turn.
    pub(crate) fn step(&mut self, until: u64) -> (bool, Option<usize>) {
        if self.net.next_at().is_none_or(|t| t > until) {
            return (false, None);
        }
        match self.net.pop() {
            Some(Event::Arrive { to, life, frame }) => {
                self.arrive(to, life, frame);
                (true, None)
            }
            Some(Event::Poll { host, stamp }) => {
                let newest = self.stations[host].as_ref().is_some_and(|s| s.stamp == stamp);
                if newest {
                    self.poll(host);
                }
                (true, newest.then_some(host))
            }
            Some(Event::Cross { to, life, frame }) => {
                self.net.cross(to, life, frame);
                (true, None)
            }
            Some(Event::Tcp { n, lost }) => {
                self.net.tcp_news(n, lost);
                (true, None)
            }
            Some(Event::Release { path }) => {
                self.net.release(path);
                (true, None)
            }
            Some(Event::Turn { node }) => {
                self.turn(node);
                (true, None)
            }
            Some(Event::Switch { node }) => {
                self.net.start_switch(node);
                (true, None)
            }
            Some(_) => (true, None),
            None => (false, None),
        }
    }

    /// Runs everything up to `until`.
    pub(crate) fn run_to(&mut self, until: u64) {
        while self.step(until).0 {}
        self.net.now = self.net.now.max(until);
    }

    /// The switch of `node` looks for frames, and its hosts for what it may have forwarded.
    fn turn(&mut self, node: usize) {
        if !self.net.turn(node) {
            return;
        }
        let here =
            |&host: &usize| self.net.switches.as_ref().is_some_and(|s| s.node_of(host) == node);
        for host in (0..self.stations.len()).filter(here).collect::<Vec<_>>() {
            let at = self.net.now + self.rng.exp(self.plan.caller.poll_ns);
            self.poll_by(host, at);
        }
    }

    fn arrive(&mut self, to: usize, life: u32, frame: u32) {
        let Some(s) = &mut self.stations[to] else {
            if let Some(stray) = &mut self.stray {
                stray.push((to, self.net.frame(frame).to_vec()));
            }
            self.net.consumed(to, frame);
            return;
        };
        if self.net.accept(to, life, frame, s.rx.len()) {
            s.rx.push_back(frame);
            let at = self.net.now + self.rng.exp(self.plan.caller.poll_ns);
            self.poll_by(to, at);
        }
    }

    fn poll(&mut self, host: usize) {
        let now = self.now();
        let Some(s) = &mut self.stations[host] else { return };
        s.poll_at = u64::MAX;
        let more = self.net.take_switched(host, &mut s.rx, BURST);
        for frame in s.rx.drain(..) {
            s.node.on_frame(now, &rx_frame(&self.net, frame));
            self.net.consumed(host, frame);
        }
        let mut out = Egress { net: &mut self.net, from: host, full: false, no_route: false };
        s.node.transmit(now, &mut out);
        let full = out.full;
        let due = s.node.next_deadline();
        if full {
            self.poll_by(host, self.net.now + 2_000);
        }
        if more {
            self.poll_by(host, self.net.now + 100);
        }
        if let Some(due) = due {
            self.poll_by(host, due.0.max(self.net.now + 50));
        }
    }
}
