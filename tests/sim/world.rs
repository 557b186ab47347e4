//! The run of one plan: hosts, events, faults, and the end that every run must reach.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};

use barewire_dataplane::node::{CqReader, Levels, Node};
use barewire_dataplane::types::{Cqe, Instant};
use barewire_driver::frame::RxFrame;
use barewire_driver::port::PortCaps;

use crate::caller::{App, Resident, View};
use crate::entries::Back;
use crate::ledger::{Checked, Excuse, Ledger, Tally, Violation, ensure};
use crate::net::{Egress, Event, Net, NetStats, Script};
use crate::plan::{Fault, KEY_LISTS, Plan};
use crate::rng::{Rng, mix};
use crate::switches::Switches;

/// What a run counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Report {
    pub(crate) net: NetStats,
    pub(crate) tally: Tally,
    pub(crate) crashes: u64,
    /// Faults of each kind, as [`Fault::NAMES`] has them.
    pub(crate) faults: [u64; Fault::NAMES.len()],
    pub(crate) trace: u64,
    /// Events until all operations had ended.
    pub(crate) busy_events: u64,
    /// What switches forwarded to NICs, from NICs, between stations, and dropped.
    pub(crate) switched: [u64; 4],
}

/// A station and the process that lives there.
struct Host {
    life: Option<Box<Life>>,
    rx: VecDeque<u32>,
    poll_at: u64,
    poll_stamp: u32,
    /// How far its clock is ahead.
    offset: u64,
    /// Which of the lists of keys it has.
    keys: usize,
    starved_until: u64,
    /// Until when the application computes and a thread beside it polls.
    computes_until: u64,
    /// Polls in a row that the node asked for and did nothing with.
    idle_polls: u32,
    /// Polls in a row in which a frame was turned away for lack of room.
    full_polls: u32,
    restarting: bool,
    /// When its loop last read the clock, how many turns go on without, and how many did since.
    clock: Clock,
}

/// The loop's own idea of the time: on a link that loses nothing most turns do not ask for it.
#[derive(Clone, Copy, Default)]
struct Clock {
    read_at: Instant,
    untimed: u64,
    uncounted: u64,
}

impl Clock {
    /// One turn begins: its time, and whether it is right.
    fn turn(&mut self, now: Instant, lossless: bool, rng: &mut Rng) -> (Instant, bool) {
        if self.untimed > 0 {
            self.untimed -= 1;
            return (self.read_at, false);
        }
        let is_quick = now.since(self.read_at) < TURN_GAP_NS * (1 + self.uncounted);
        self.untimed = if lossless && is_quick { rng.below(UNTIMED_TURNS) } else { 0 };
        (self.read_at, self.uncounted) = (now, self.untimed);
        (now, true)
    }
}

impl Host {
    /// Whether messages are under way from here, or wait here for a receive.
    fn busy(&self) -> bool {
        let busy = |l: Levels| l.unexpected > 0 || l.tx > 0 || l.pulls > 0;
        self.life.as_ref().is_some_and(|l| busy(l.node.statistics().levels()))
    }
}

/// A process. The node goes before the memory it was lent.
struct Life {
    node: Node,
    app: App,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The applications call, faults strike.
    Active,
    /// The applications call no more, faults go on.
    Linger,
    /// Everything is whole again, the applications only take what comes.
    Drain,
    /// Nothing is posted any more.
    Still,
}

/// Frames taken in one poll turn at most.
const BURST: usize = 32;

/// Pause after a frame was turned away for lack of room. It grows while that goes on: who receives
/// may stand still for seconds.
const FULL_RETRY_NS: u64 = 1_000;

/// Turns between two readings of the clock, and how briskly they follow each other, as in the
/// engine, which has more of them.
const UNTIMED_TURNS: u64 = 12;
const TURN_GAP_NS: u64 = 100_000;

/// Everything.
pub(crate) struct World {
    plan: Plan,
    pub(crate) net: Net,
    pub(crate) ledger: Ledger,
    hosts: Vec<Host>,
    residents: Vec<Resident>,
    calls: u64,
    next_fault: usize,
    phase: Phase,
    rng: Rng,
    crashes: u64,
    faults: [u64; Fault::NAMES.len()],
    /// How long each node has been without a switch.
    outages: Vec<u64>,
    /// A fault to happen after so many events.
    strike: Option<(u64, Fault)>,
}

/// Runs a plan to its end. A panic of a node counts as a violation.
pub(crate) fn run(plan: &Plan) -> Result<Report, Violation> {
    run_with(plan, None, None)
}

/// Runs a plan with one frame treated specially, or one fault at one moment.
pub(crate) fn run_with(
    plan: &Plan,
    script: Option<Script>,
    strike: Option<(u64, Fault)>,
) -> Result<Report, Violation> {
    let body = || {
        let mut w = World::new(plan.clone())?;
        w.net.script = script;
        w.strike = strike;
        w.run().map_err(|e| format!("{e} (at {} ns, {:?})", w.net.now, w.phase))
    };
    guarded(body)
}

/// Turns a panic into a violation.
pub(crate) fn guarded<T>(f: impl FnOnce() -> Result<T, Violation>) -> Result<T, Violation> {
    catch_unwind(AssertUnwindSafe(f)).unwrap_or_else(|p| {
        let text = p.downcast_ref::<String>().cloned();
        let text = text.or_else(|| p.downcast_ref::<&str>().map(|s| (*s).to_owned()));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}

/// What the port of `host` says of itself.
pub(crate) fn caps(plan: &Plan, host: usize) -> PortCaps {
    let kind = if plan.link.ports_differ { host } else { 0 };
    PortCaps {
        lossless: plan.link.lossless,
        tells_presence: plan.link.presence,
        near_mtu: plan.link.near_mtu,
        gather: mix(plan.seed) & 1 == 0,
        via_kernel: (mix(plan.seed ^ 1) as usize + kind).is_multiple_of(2),
        link_bps: if kind % 4 == 3 { 0 } else { plan.link.bps / (1 + 9 * kind as u64) },
        ..PortCaps::new(Net::station(host), plan.link.mtu[host], format!("sim:{host}"))
    }
}

/// A frame as a port lends it.
pub(crate) fn rx_frame(net: &Net, frame: u32) -> RxFrame<'_> {
    let rx = RxFrame::new(net.frame(frame)).with_mark(net.is_marked_frame(frame));
    if net.is_near_frame(frame) { rx.as_near() } else { rx }
}

impl World {
    pub(crate) fn new(plan: Plan) -> Result<Self, Violation> {
        let n = plan.hosts;
        let host = |_| Host {
            life: None,
            rx: VecDeque::new(),
            poll_at: u64::MAX,
            poll_stamp: 0,
            offset: 0,
            keys: 0,
            starved_until: 0,
            computes_until: 0,
            idle_polls: 0,
            full_polls: 0,
            restarting: false,
            clock: Clock::default(),
        };
        let mut w = Self {
            net: Net::new(plan.seed, n, plan.link.clone()),
            ledger: Ledger::new(plan.seed, n, &plan.node),
            hosts: (0..n).map(host).collect(),
            residents: Vec::new(),
            calls: 0,
            next_fault: 0,
            phase: Phase::Active,
            rng: Rng::new(plan.seed, 3),
            crashes: 0,
            faults: Default::default(),
            outages: vec![0; n],
            strike: None,
            plan,
        };
        // A switch looks for frames as well, and there are more hosts then.
        let kinds = if w.plan.link.switched { 4 } else { 1 };
        w.net.events_max = (500_000 + 1000 * w.plan.ops) * kinds;
        for host in 0..n {
            let life = w.ledger.life_new(host);
            let incarnation = w.plan.incarnation(life);
            w.residents.push(Resident { life, incarnation, alive: true });
        }
        for host in 0..n {
            w.start(host)?;
        }
        Ok(w)
    }

    /// A process starts at `host` as the resident that was noted.
    fn start(&mut self, host: usize) -> Checked {
        let me = self.residents[host];
        let seed = mix(self.plan.seed ^ (u64::from(me.life) << 32));
        let mut settings = self.plan.node.settings_at(host, me.incarnation, seed);
        let listed = self.plan.node.keys(KEY_LISTS[self.hosts[host].keys]);
        if let Some((ring, keys)) = settings.keys.as_mut().zip(listed) {
            ring.replace(keys);
        }
        let mut node =
            Node::new(settings, &caps(&self.plan, host)).map_err(|e| format!("Node::new: {e}"))?;
        node.hold_watch().watch(true);
        self.net.set_life(host, me.life);
        let now = self.time(host);
        let mut v = View {
            now,
            host,
            residents: &self.residents,
            plan: &self.plan,
            ledger: &mut self.ledger,
            trace: self.net.print,
            net: &mut self.net,
        };
        let app = App::new(&mut v, &mut node, me.life).map_err(|e| format!("opening: {e}"))?;
        let h = &mut self.hosts[host];
        h.life = Some(Box::new(Life { node, app }));
        h.restarting = false;
        h.clock = Clock::default();
        let first = self.rng.exp(self.plan.caller.think_ns);
        self.net.at(self.net.now + first, Event::App { host, life: me.life });
        Ok(())
    }

    fn time(&self, host: usize) -> Instant {
        Instant(self.net.now + self.hosts[host].offset)
    }

    /// From the first call to the last check.
    fn run(&mut self) -> Result<Report, Violation> {
        while self.calls < self.plan.ops {
            let dead = self.residents.iter().all(|r| !r.alive);
            let more = self.step()?;
            ensure!(more || dead, "nothing happens any more, and nobody calls");
            if !more || self.net.now > ACTIVE_MAX_NS {
                break;
            }
        }
        self.phase = Phase::Linger;
        let until = self.net.now + self.plan.faults.linger_ns;
        while self.net.next_at().is_some_and(|t| t <= until) {
            self.step()?;
        }
        self.heal();
        self.settle("after healing")?;
        let busy_events = self.net.stats.events;
        self.greet()?;
        self.quiet()?;
        self.take_late()?;
        self.check_end()?;
        Ok(Report {
            net: self.net.stats,
            tally: self.ledger.tally,
            crashes: self.crashes,
            faults: self.faults,
            trace: self.net.trace,
            busy_events,
            switched: self.net.switches.as_ref().map(Switches::sums).unwrap_or_default(),
        })
    }

    /// Handles one event, and says whether there was one.
    fn step(&mut self) -> Result<bool, Violation> {
        let Some(event) = self.net.pop() else { return Ok(false) };
        match event {
            Event::Cross { to, life, frame } => self.net.cross(to, life, frame),
            Event::Tcp { n, lost } => self.net.tcp_news(n, lost),
            Event::Arrive { to, life, frame } => self.arrive(to, life, frame),
            Event::Poll { host, stamp } if stamp == self.hosts[host].poll_stamp => {
                self.poll(host)?
            }
            Event::App { host, life } if self.lives(host, life) => self.look(host, life)?,
            Event::Restart { host } => self.restart(host)?,
            Event::Release { path } => self.net.release(path),
            Event::Turn { node } => self.turn(node),
            Event::Switch { node } => self.net.start_switch(node),
            Event::Poll { .. } | Event::App { .. } => {}
        }
        if let Some((_, fault)) = self.strike.take_if(|s| s.0 <= self.net.stats.events) {
            self.fault(fault);
        }
        Ok(true)
    }

    fn lives(&self, host: usize, life: u32) -> bool {
        self.hosts[host].life.as_ref().is_some_and(|l| l.app.life == life)
    }

    /// The switch of `node` looks for frames, and its hosts for what it may have forwarded.
    fn turn(&mut self, node: usize) {
        if !self.net.turn(node) {
            return;
        }
        for host in 0..self.hosts.len() {
            let is_here = self.net.switches.as_ref().is_some_and(|s| s.node_of(host) == node);
            if is_here && self.hosts[host].life.is_some() {
                let at = self.net.now + self.rng.exp(self.plan.caller.poll_ns);
                self.poll_by(host, at);
            }
        }
    }

    fn arrive(&mut self, to: usize, life: u32, frame: u32) {
        if !self.net.accept(to, life, frame, self.hosts[to].rx.len()) {
            return;
        }
        self.hosts[to].rx.push_back(frame);
        let at = self.net.now + self.rng.exp(self.plan.caller.poll_ns);
        self.poll_by(to, at);
    }

    /// Sees that `host` is polled at `at` or before.
    fn poll_by(&mut self, host: usize, at: u64) {
        let h = &mut self.hosts[host];
        let mut at = at.max(h.starved_until);
        if at < h.computes_until {
            at += self.rng.below((self.plan.node.t_dead_ns / 20).min(50_000_000));
        }
        if at < h.poll_at {
            h.poll_at = at;
            h.poll_stamp += 1;
            self.net.at(at, Event::Poll { host, stamp: h.poll_stamp });
        }
    }

    /// One poll turn: a burst of frames in, whatever is due out.
    fn poll(&mut self, host: usize) -> Checked {
        let now = self.time(host);
        let h = &mut self.hosts[host];
        h.poll_at = u64::MAX;
        if h.starved_until > self.net.now {
            let at = h.starved_until;
            self.poll_by(host, at);
            return Ok(());
        }
        if h.life.is_none() {
            return Ok(());
        }
        let more = self.net.take_switched(host, &mut h.rx, BURST);
        let (now, timed) = h.clock.turn(now, self.plan.link.lossless, &mut self.rng);
        let taken = self.receive(host, now, timed)?;
        let h = &mut self.hosts[host];
        let Some(life) = &mut h.life else { return Ok(()) };
        let backlog = more || !h.rx.is_empty();
        life.node.turn.note_backlog(backlog);
        let mut out = Egress { net: &mut self.net, from: host, full: false, no_route: false };
        if life.node.has_answers() {
            life.node.send_answers(now, &mut out);
        }
        let due = if timed { !life.node.passes(now) } else { life.node.has_due() };
        let sent = if due { life.node.transmit(now, &mut out) } else { 0 };
        let (full, no_route) = (out.full, out.no_route);
        let due = life.node.next_deadline().map(|d| d.0.saturating_sub(h.offset));
        // A node asks again soon for a station that is gone; the loop takes its time.
        h.full_polls = if full { h.full_polls + 1 } else { 0 };
        let full_pause = FULL_RETRY_NS << h.full_polls.min(8);
        let pause = if no_route { 200_000 } else { 50 }.max(if full { full_pause } else { 0 });
        let busy = taken > 0 || sent > 0 || full || no_route;
        let again = due.is_some_and(|d| d <= self.net.now);
        h.idle_polls = if again && !busy { h.idle_polls + 1 } else { 0 };
        ensure!(h.idle_polls < 1000, "node {host} asks to be polled at once and does nothing");
        if full {
            self.poll_by(host, self.net.now + full_pause);
        }
        if backlog {
            self.poll_by(host, self.net.now + 100);
        }
        if let Some(due) = due {
            self.poll_by(host, due.max(self.net.now + pause));
        }
        if taken > 0 && self.phase == Phase::Drain {
            let life = self.residents[host].life;
            self.net.at(self.net.now + 2_000, Event::App { host, life });
        }
        Ok(())
    }

    /// Lets the node of `host` take what has come, as a port lends it: one frame alone, which may
    /// be answered at once, and whose completion may go to who waits for it; or a burst.
    fn receive(&mut self, host: usize, now: Instant, timed: bool) -> Result<usize, Violation> {
        let computes = self.hosts[host].computes_until > self.net.now;
        let right = self.time(host);
        let h = &mut self.hosts[host];
        let Some(life) = &mut h.life else { return Ok(0) };
        if timed {
            life.node.turn.tick(now);
        }
        let first = h.rx.len() > 1 && !timed && self.rng.chance(0.5);
        let taken = if first { 1 } else { h.rx.len().min(BURST) };
        if taken != 1 {
            for &frame in h.rx.iter().take(taken) {
                life.node.prefetch(&rx_frame(&self.net, frame));
            }
            for frame in h.rx.drain(..taken) {
                life.node.on_frame(now, &rx_frame(&self.net, frame));
                self.net.consumed(host, frame);
            }
            return Ok(taken);
        }
        let Some(frame) = h.rx.pop_front() else { return Ok(0) };
        let bytes = self.net.frame(frame).to_vec();
        let rx = RxFrame::new(&bytes).with_mark(self.net.is_marked_frame(frame));
        let rx = if self.net.is_near_frame(frame) { rx.as_near() } else { rx };
        let mut read = None;
        let mut v = View {
            now: right,
            host,
            residents: &self.residents,
            plan: &self.plan,
            ledger: &mut self.ledger,
            trace: self.net.print,
            net: &mut self.net,
        };
        let cq = if computes { None } else { life.app.waits_at(&mut v, &mut life.node)? };
        let out = Egress { net: v.net, from: host, full: false, no_route: false };
        let out = Back { out, free: self.rng.chance(0.8) };
        match cq {
            Some(cq) => {
                let reader = CqReader { cq: &cq, put: |cqe: &Cqe| read = Some(*cqe) };
                life.node.on_frame_read(&now, &rx, out, reader);
            }
            None => life.node.on_frame_with(&now, &rx, out),
        }
        v.net.consumed(host, frame);
        if let Some(cqe) = read {
            v.ledger.tally.entries.read += 1;
            life.app.completed(&mut v, &mut life.node, &cqe)?;
        }
        Ok(1)
    }

    /// The application of `host` acts.
    fn look(&mut self, host: usize, life: u32) -> Checked {
        let h = &self.hosts[host];
        let until = h.starved_until.max(h.computes_until);
        if until > self.net.now {
            self.net.at(until, Event::App { host, life });
            return Ok(());
        }
        let phase = self.phase;
        let calls = self.with_app(host, |app, v, node| match phase {
            Phase::Active => app.look(v, node),
            Phase::Drain => app.drain(v, node).map(|()| 0),
            Phase::Linger | Phase::Still => app.read_all(v, node).map(|()| 0),
        })?;
        self.poll_by(host, self.net.now);
        if phase == Phase::Active {
            let next = self.net.now + self.rng.exp(self.plan.caller.think_ns) + 100;
            self.net.at(next, Event::App { host, life });
            self.calls += calls;
            while let Some(&(at, fault)) = self.plan.faults.at.get(self.next_fault) {
                if at >= self.calls {
                    break;
                }
                self.next_fault += 1;
                self.fault(fault);
            }
        }
        Ok(())
    }

    fn with_app<T>(
        &mut self,
        host: usize,
        f: impl FnOnce(&mut App, &mut View<'_>, &mut Node) -> Result<T, Violation>,
    ) -> Result<T, Violation> {
        let now = self.time(host);
        let life = self.hosts[host].life.as_mut().ok_or("nobody lives there")?;
        let mut v = View {
            now,
            host,
            residents: &self.residents,
            plan: &self.plan,
            ledger: &mut self.ledger,
            trace: self.net.print,
            net: &mut self.net,
        };
        f(&mut life.app, &mut v, &mut life.node)
    }

    fn fault(&mut self, fault: Fault) {
        if self.net.print {
            eprintln!("{:>12} {fault:?}", self.net.now);
        }
        self.faults[fault.kind()] += 1;
        let limit = self.plan.node.t_dead_ns / 2;
        let errors = Excuse { errors: true, loss: false };
        match fault {
            Fault::Crash { host, back_ns } => self.crash(host, back_ns),
            Fault::SessionLoss { host, peer } => {
                let loss = self.plan.link.is_lossless(host, peer);
                self.ledger.excuse(host, peer, Excuse { errors: true, loss });
                let now = self.time(host);
                if let Some(life) = &mut self.hosts[host].life {
                    life.node.sessions().drop_session(now, Net::station(peer));
                    self.poll_by(host, self.net.now);
                }
            }
            Fault::Keys { host } => {
                self.hosts[host].keys += 1;
                let keys = self.plan.node.keys(KEY_LISTS[self.hosts[host].keys]);
                let now = self.time(host);
                if let Some((life, keys)) = self.hosts[host].life.as_mut().zip(keys) {
                    life.node.sessions().set_keys(now, keys).expect("the node seals");
                    self.poll_by(host, self.net.now);
                }
            }
            Fault::CutOneWay { from, to } => {
                self.net.cut(from, to);
                self.ledger.excuse(from, to, errors);
            }
            Fault::Cut { a, b } => {
                self.net.cut(a, b);
                self.net.cut(b, a);
                self.ledger.excuse(a, b, errors);
            }
            Fault::Flap { a, b, ns } => {
                self.net.flap(a, b, ns);
                if ns > limit {
                    self.ledger.excuse(a, b, errors);
                }
            }
            Fault::Clog { from, to, ns } => {
                self.net.clog(from, to, ns);
                if ns > limit {
                    self.ledger.excuse(from, to, errors);
                }
            }
            Fault::Jump { host, ns } => {
                self.hosts[host].offset += ns;
                // Its peers are asked then, and answers that are held up come too late.
                let slow = |&(_, f): &(u64, Fault)| {
                    use Fault::{Clog, Flap, Starve, SwitchEnd};
                    matches!(f, Clog { .. } | Flap { .. } | Starve { .. } | SwitchEnd { .. })
                };
                if ns > limit && self.plan.faults.at.iter().any(slow) {
                    (0..self.hosts.len()).for_each(|h| self.ledger.excuse(host, h, errors));
                }
            }
            Fault::Starve { host, ns } => {
                self.hosts[host].starved_until = self.net.now + ns;
                if ns > limit && !self.plan.link.presence {
                    (0..self.hosts.len()).for_each(|h| self.ledger.excuse(host, h, errors));
                }
            }
            Fault::Compute { host, ns } => self.hosts[host].computes_until = self.net.now + ns,
            Fault::SwitchEnd { node, back_ns } => self.end_switch(node, back_ns, limit),
            Fault::Leave { host } => self.leave(host),
        }
    }

    /// The switch of `node` ends. What it held is lost and may be sent again; only when it is away
    /// for long an operation may fail.
    fn end_switch(&mut self, node: usize, back_ns: u64, limit: u64) {
        let Some(switches) = self.net.switches.as_ref().filter(|s| s.has_switch(node)) else {
            return;
        };
        let hosts = 0..self.hosts.len();
        let here: Vec<_> = hosts.clone().filter(|&host| switches.node_of(host) == node).collect();
        self.net.end_switch(node);
        self.outages[node] += back_ns;
        if self.outages[node] > limit {
            let errors = Excuse { errors: true, loss: false };
            for &host in &here {
                hosts.clone().for_each(|other| self.ledger.excuse(host, other, errors));
            }
        }
        self.net.at(self.net.now + back_ns, Event::Switch { node });
    }

    /// The process at `host` leaves its segment, and what lies in its rings there: sessions with
    /// those in it end, and the next ones are by the wire.
    fn leave(&mut self, host: usize) {
        if self.hosts[host].life.is_none() {
            return;
        }
        self.net.leave_segment(host);
        let rx = std::mem::take(&mut self.hosts[host].rx);
        let (lost, rest) = rx.into_iter().partition(|&frame| self.net.is_near_frame(frame));
        self.hosts[host].rx = rest;
        VecDeque::into_iter(lost).for_each(|frame| self.net.consumed(host, frame));
        for other in 0..self.hosts.len() {
            if self.plan.link.is_near(host, other) {
                self.ledger.excuse(host, other, Excuse { errors: true, loss: true });
                self.poll_by(other, self.net.now);
            }
        }
    }

    fn crash(&mut self, host: usize, back_ns: Option<u64>) {
        let h = &mut self.hosts[host];
        let Some(life) = h.life.take() else { return };
        self.crashes += 1;
        self.ledger.life_dead(life.app.life);
        self.residents[host].alive = false;
        self.net.set_life(host, 0);
        for frame in h.rx.drain(..) {
            self.net.consumed(host, frame);
        }
        h.poll_stamp += 1;
        (h.poll_at, h.starved_until, h.computes_until) = (u64::MAX, 0, 0);
        // Where nothing is lost a send ends when its frame has left. Behind a refused packet that
        // frame waits for the NOP of its sender, which a dead one owes for ever.
        for other in 0..self.hosts.len() {
            let loss = self.plan.link.is_lossless(host, other) && self.plan.caller.remote > 0.0;
            self.ledger.excuse(host, other, Excuse { errors: true, loss });
        }
        if let Some(ns) = back_ns {
            self.hosts[host].restarting = true;
            self.net.at(self.net.now + ns, Event::Restart { host });
        }
    }

    fn restart(&mut self, host: usize) -> Checked {
        let life = self.ledger.life_new(host);
        let incarnation = self.plan.incarnation(life);
        self.residents[host] = Resident { life, incarnation, alive: true };
        self.start(host)
    }

    /// Ends all faults but cuts and deaths; the applications stop calling.
    fn heal(&mut self) {
        self.phase = Phase::Drain;
        self.net.heal();
        let nodes = if self.plan.link.switched { self.plan.link.nodes.unwrap_or(1) } else { 0 };
        (0..nodes).for_each(|node| self.net.start_switch(node));
        for host in 0..self.hosts.len() {
            self.hosts[host].starved_until = 0;
            self.hosts[host].computes_until = 0;
            self.hosts[host].poll_at = u64::MAX;
            self.poll_by(host, self.net.now);
        }
    }

    /// Runs until everything has ended that must end.
    fn settle(&mut self, when: &str) -> Checked {
        let limit = self.net.now + 3 * self.plan.node.t_dead_ns + 8_000_000_000;
        let mut tick = self.net.now;
        loop {
            for host in 0..self.hosts.len() {
                let r = self.residents[host];
                if r.alive {
                    self.net.at(tick, Event::App { host, life: r.life });
                }
            }
            while self.net.next_at().is_some_and(|t| t <= tick) {
                self.step()?;
            }
            let whole = self.hosts.iter().all(|h| !h.restarting && !h.busy());
            // A lossless sender is done when the frame has left.
            let arrived = !self.plan.link.has_lossless() || self.net.is_empty();
            if whole && arrived && self.ledger.settled() {
                return Ok(());
            }
            let late = self.net.now > limit;
            let levels = self.hosts.iter().filter_map(|h| h.life.as_ref());
            let all = |n: &Node| {
                let (tables, sessions) = (n.statistics().levels(), n.statistics().session_infos());
                (n.next_deadline(), tables, sessions.collect::<Vec<_>>())
            };
            let levels: Vec<_> = levels.map(|l| all(&l.node)).collect();
            let left = self.ledger.unsettled();
            ensure!(!late, "{when}, some operations never end: {left} {levels:#?}");
            tick = self.net.now.max(tick) + 2_000_000;
        }
    }

    /// Everybody who lives and can be reached exchanges one more message with everybody: all tables
    /// have room again, and every pair finds a session.
    fn greet(&mut self) -> Checked {
        let n = self.hosts.len();
        let alive: Vec<_> = (0..n).filter(|&h| self.residents[h].alive).collect();
        let mut todo: Vec<Vec<usize>> = vec![Vec::new(); n];
        for &a in &alive {
            let whole = |&b: &usize| !self.net.is_cut(a, b) && !self.net.is_cut(b, a);
            todo[a] = alive.iter().copied().filter(whole).collect();
        }
        for _ in 0..1000 {
            for &host in &alive {
                let mut to = std::mem::take(&mut todo[host]);
                self.with_app(host, |app, v, node| app.greet(v, node, &mut to))?;
                todo[host] = to;
                self.poll_by(host, self.net.now);
            }
            self.settle("at the end")?;
            if todo.iter().all(Vec::is_empty) {
                return Ok(());
            }
        }
        Err(format!("EAGAIN for ever: {todo:?} still to be greeted"))
    }

    /// Takes back every receive and waits until no node has anything to do.
    fn quiet(&mut self) -> Checked {
        self.phase = Phase::Still;
        for host in 0..self.hosts.len() {
            if self.residents[host].alive {
                self.with_app(host, |app, v, node| app.cancel_all(v, node))?;
                self.poll_by(host, self.net.now);
            }
        }
        let limit = self.net.now + 3 * self.plan.node.t_dead_ns + 30_000_000_000;
        while let Some(t) = self.net.next_at() {
            if t > limit {
                break;
            }
            self.step()?;
        }
        for (i, h) in self.hosts.iter().enumerate() {
            let Some(life) = &h.life else { continue };
            let due = life.node.next_deadline();
            let levels = life.node.statistics().levels();
            let searches = levels.timers > 0 && levels.timers <= self.gone_for(i);
            ensure!(due.is_none() || searches, "node {i} is not quiet: {due:?}, {levels:?}");
        }
        Ok(())
    }

    /// Hosts that are dead or out of reach of `host`. To one that it expects nothing of, it may go
    /// on searching for longer frames, every ten minutes in the end.
    fn gone_for(&self, host: usize) -> usize {
        let others = (0..self.hosts.len()).filter(|&other| other != host);
        let is_cut = |other: usize| self.net.is_cut(host, other) || self.net.is_cut(other, host);
        others.filter(|&other| !self.residents[other].alive || is_cut(other)).count()
    }

    /// A frame that was held up on its way may have brought a message after the receives were taken
    /// back. It waits for another one as any that nobody expected, and must be there for it.
    fn take_late(&mut self) -> Checked {
        let stored =
            |h: &Host| h.life.as_ref().is_some_and(|l| l.node.statistics().levels().unexpected > 0);
        while self.hosts.iter().any(stored) {
            self.phase = Phase::Drain;
            self.settle("with what came late")?;
            self.quiet()?;
        }
        Ok(())
    }

    fn check_end(&mut self) -> Checked {
        self.ledger.verdict()?;
        for host in 0..self.hosts.len() {
            if !self.residents[host].alive {
                continue;
            }
            let gone = self.gone_for(host);
            self.with_app(host, |app, v, node| {
                app.read_all(v, node)?;
                app.check_counters(v, node)?;
                let levels = node.statistics().levels();
                let timers = levels.timers.min(gone);
                let idle = Levels { peers: levels.peers, timers, ..Levels::default() };
                ensure!(levels == idle, "node {host} has not given everything back: {levels:?}");
                Ok(())
            })?;
        }
        let s = self.net.stats;
        let whole = s.bytes / 256 + 50 * self.ledger.tally.accepted;
        let calm = whole * 4 + 20_000 + s.full;
        ensure!(s.frames < calm, "{} frames for {whole} pieces: a storm", s.frames);
        Ok(())
    }
}

/// Virtual time after which the applications stop calling even if they could not do much.
const ACTIVE_MAX_NS: u64 = 60_000_000_000;
