//! What happens to processes and to the network, drawn from a seed. One thing at a time to each
//! process, and to its interface and its port of the bridge.

use std::time::{Duration, Instant};

use barewire::EpAddr;
use barewire_tests::nodes::{FABRIC, Nodes};
use barewire_tests::rng::Rng;
use nix::sys::signal::Signal;

use super::process::now_ns;
use super::{Crew, MTU, PLACES, STRANGER, SWITCH, T_DEAD};
use crate::start;
use crate::supervisor::Worker;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    /// kill -9, and another life after a while.
    Kill,
    /// SIGSTOP and SIGCONT.
    Stop,
    /// The interface is down for less than T_dead.
    Flap,
    /// The port of the bridge is down for longer.
    Cut,
    /// The port of the bridge carries less.
    Dip,
    /// A filter drops what is longer than a limit.
    Filter,
    /// A filter drops some of all.
    Loss,
    /// Forged OPENs, 10,000 a second.
    Flood,
}

impl Kind {
    pub(crate) const ALL: [Self; 8] = [
        Self::Kill,
        Self::Stop,
        Self::Flap,
        Self::Cut,
        Self::Dip,
        Self::Filter,
        Self::Loss,
        Self::Flood,
    ];

    /// Whether some frames still pass.
    pub(crate) fn is_partial(self) -> bool {
        matches!(self, Self::Dip | Self::Filter | Self::Loss)
    }
}

/// Something that happened to a place. The orders that began and ended it took some time each.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) place: usize,
    pub(crate) begin_ns: [u64; 2],
    pub(crate) end_ns: [u64; 2],
}

/// A fault that has not ended.
struct Active {
    fault: Fault,
    until: Instant,
}

pub(crate) struct Faults<'a> {
    nodes: &'a Nodes,
    rng: Rng,
    next: Instant,
    active: Vec<Active>,
    done: Vec<Fault>,
    stranger: Worker,
}

const MS: u64 = 1_000_000;

impl<'a> Faults<'a> {
    pub(crate) fn new(nodes: &'a Nodes, seed: u64) -> Self {
        Self {
            nodes,
            rng: Rng::new(seed, 2),
            next: Instant::now() + Duration::from_secs(2),
            active: Vec::new(),
            done: Vec::new(),
            stranger: start(nodes, STRANGER, "soak-flood", "none"),
        }
    }

    /// Ends what is over, and begins what is due.
    pub(crate) fn turn(&mut self, crew: &mut Crew<'_>) {
        let now = Instant::now();
        while let Some(n) = self.active.iter().position(|active| active.until <= now) {
            let active = self.active.swap_remove(n);
            self.end(crew, active.fault);
        }
        if self.next > now {
            return;
        }
        self.next = now + Duration::from_millis(self.rng.exp(900.0).min(5000));
        let (kind, place) = (self.rng.pick(&Kind::ALL), self.rng.index(PLACES));
        // One stranger.
        let taken = |fault: &Fault| {
            fault.place == place || kind == Kind::Flood && fault.kind == Kind::Flood
        };
        if !self.active.iter().any(|active| taken(&active.fault)) {
            self.begin(crew, kind, place);
        }
    }

    fn begin(&mut self, crew: &mut Crew<'_>, kind: Kind, place: usize) {
        let t_dead = T_DEAD.as_millis() as u64;
        let ms = match kind {
            Kind::Kill => self.rng.range(0, 3 * t_dead),
            Kind::Stop => self.rng.range(1, 2 * t_dead),
            Kind::Flap => self.rng.range(1, t_dead * 9 / 10),
            Kind::Cut => self.rng.range(t_dead, 3 * t_dead),
            Kind::Dip | Kind::Filter | Kind::Loss | Kind::Flood => self.rng.range(100, 3 * t_dead),
        };
        let begun = now_ns();
        match kind {
            Kind::Kill => crew.kill(place),
            Kind::Stop => self.signal(crew, place, Signal::SIGSTOP),
            Kind::Flap => self.ip(place, &format!("link set {FABRIC} down")),
            Kind::Cut => self.ip(SWITCH, &format!("link set port{place} down")),
            Kind::Dip => {
                let mtu = self.rng.pick(&[4000, 1500, 600, 300]);
                self.ip(SWITCH, &format!("link set port{place} mtu {mtu}"));
            }
            Kind::Filter => {
                let len = self.rng.pick(&[8000, 3000, 1500, 600, 200]);
                self.nodes.drop_longer(place, FABRIC, len).unwrap();
            }
            Kind::Loss => {
                let percent = self.rng.range(1, 30) as u32;
                self.nodes.lose(place, FABRIC, percent).unwrap();
            }
            Kind::Flood => self.flood(crew, place, ms),
        }
        let fault = Fault { kind, place, begin_ns: [begun, now_ns()], end_ns: [u64::MAX; 2] };
        let until = Instant::now() + Duration::from_millis(ms);
        self.active.push(Active { fault, until });
    }

    fn end(&mut self, crew: &mut Crew<'_>, mut fault: Fault) {
        let begun = now_ns();
        let place = fault.place;
        match fault.kind {
            Kind::Kill => crew.start(place),
            Kind::Stop => self.signal(crew, place, Signal::SIGCONT),
            Kind::Flap => self.ip(place, &format!("link set {FABRIC} up")),
            Kind::Cut => self.ip(SWITCH, &format!("link set port{place} up")),
            Kind::Dip => self.ip(SWITCH, &format!("link set port{place} mtu {MTU}")),
            Kind::Filter | Kind::Loss => {
                self.nodes.run(place, "nft delete table netdev wires").unwrap();
            }
            Kind::Flood => {
                self.stranger.answer("FLOODED");
            }
        }
        fault.end_ns = [begun, now_ns()];
        self.done.push(fault);
    }

    fn ip(&self, node: usize, args: &str) {
        self.nodes.ip(node, args).unwrap();
    }

    fn signal(&self, crew: &Crew<'_>, place: usize, signal: Signal) {
        crew.workers[place].as_ref().expect("it lives").signal(signal);
    }

    fn flood(&mut self, crew: &Crew<'_>, place: usize, ms: u64) {
        let addrs = &crew.workers[place].as_ref().expect("it lives").addr;
        let addr: EpAddr = addrs.split(' ').next().unwrap().parse().unwrap();
        // Half the time somebody who knows the address, who gets further.
        let inc = if self.rng.chance(0.5) { addr.incarnation } else { self.rng.next() | 1 };
        self.stranger.say(&format!("FLOOD {} {inc} {ms}", addr.station));
    }

    /// Ends everything that goes on and returns what there was.
    pub(crate) fn finish(mut self, crew: &mut Crew<'_>) -> Vec<Fault> {
        for active in std::mem::take(&mut self.active) {
            self.end(crew, active.fault);
        }
        self.stranger.say("END");
        self.stranger.finish();
        self.done
    }
}

impl Fault {
    /// Whether it goes on at some time between these.
    pub(crate) fn overlaps(&self, from_ns: u64, to_ns: u64) -> bool {
        self.begin_ns[0] < to_ns && from_ns < self.end_ns[1]
    }

    /// When the state of the place changes by it. What the bridge has to learn again, and a link
    /// that waits to be found up, take their time after its end.
    pub(crate) fn changes(&self) -> [u64; 4] {
        [self.begin_ns[0], self.begin_ns[1], self.end_ns[0], self.end_ns[1].saturating_add(MS)]
    }
}
