//! Queries for the server of a service at a host, on ports where the address cannot be computed:
//! WHO and HERE of `docs/wire.md`, "Names".
//!
//! # When queries are sent, and by whom
//! When an address is resolved: in `fi_getinfo`, and when one is inserted. Both wait for at most
//! [`PATIENCE`], for each 512 hosts that are queried at once. Resolving a name while messages wait
//! for it would avoid that wait. But programs use `fi_getinfo` to find out whether a host exists,
//! and its answer has to be right; and a queue of unresolved sends would be on the path of every
//! message. An insertion queries through its domain. `fi_getinfo` queries through a domain of this
//! process on the same port, if there is one, else it opens the port for the query: on an exclusive
//! port (`vfio:`, `dpdk:`, a queue of `xdp:`) that fails while another process has it, and costs an
//! open.
//!
//! # The kernel's neighbours
//! The kernel's routes and neighbours are not used. A neighbour is the NIC of a host, and so the
//! first process of that host; only the query finds the process that serves the service. It is a
//! broadcast like ARP's, so it reaches the same stations, also on devices that the kernel does not
//! know.

use std::cell::RefCell;
use std::hash::{BuildHasher, RandomState};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

use barewire_dataplane::node::{HERES_MAX, Here, Node, NodeSettings, QUESTIONS_MAX};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::INCARNATION_MAX;
use barewire_dataplane::wire::Host;
use barewire_driver::clock::now_ns;

use crate::errno::{OpenError, Result, open_error};
use crate::hosts::host_of;

/// How long an answer is waited for.
pub const PATIENCE: Duration = Duration::from_millis(300);

/// The question is asked so often in that time.
const ASKS: u32 = 3;

/// Questions that are sent in one turn: each is a few frames, and the node queues 64.
const PER_TURN: usize = 8;

/// How much longer than the first answer took a second one is waited for, which says that two claim
/// the name.
const GRACE: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(5)];

/// Hosts that a question names.
const HOSTS_MAX: usize = 6;

/// Questions that are open at once: half of what a node keeps, for another thread may ask as well.
const AT_ONCE: usize = QUESTIONS_MAX / 2;

/// Who is wanted: a service of one host, which has these names and addresses. 0 is any service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Wanted {
    hosts: Vec<Host>,
    service: u16,
}

impl Wanted {
    pub(crate) fn new(name: Option<&str>, ips: &[IpAddr], service: u16) -> Self {
        let ips = ips.iter().map(|ip| host_of(*ip));
        let hosts = ips.chain(name.map(Host::name)).take(HOSTS_MAX).collect();
        Self { hosts, service }
    }
}

/// Who answered one question: nobody, or endpoints in the order in which they did.
pub(crate) type Answers = Vec<Here>;

/// Something to ask through.
pub(crate) trait Way: Send + Sync {
    /// Asks for all of `wanted` at once.
    ///
    /// # Errors
    /// [`OpenError`]: there is no way to ask.
    fn ask(&self, wanted: &[Wanted]) -> std::result::Result<Vec<Answers>, OpenError>;
}

/// A port by its name: a domain of this process that is open on it, or the port itself, opened for
/// the question.
pub(crate) struct PortWay<'a> {
    pub(crate) name: &'a str,
    /// Whether processes of this host are reached through memory.
    pub(crate) near: bool,
}

impl Way for PortWay<'_> {
    fn ask(&self, wanted: &[Wanted]) -> std::result::Result<Vec<Answers>, OpenError> {
        if let Some(Ok(answers)) = domain_on(self.name).map(|dom| dom.ask(wanted)) {
            return Ok(answers);
        }
        let open = match self.near {
            true => barewire_driver::open::open_in_node,
            false => barewire_driver::open::open,
        };
        let port = open(self.name).map_err(open_error)?;
        let random = || RandomState::new().hash_one(now_ns()).max(1);
        let settings = NodeSettings {
            crc: Some(port.damages()),
            incarnation: (random() & INCARNATION_MAX).max(1),
            seed: random(),
            ..NodeSettings::default()
        };
        let refused = |e| OpenError::new(e, format!("{}: cannot ask: {e}", self.name));
        let node = Node::new(settings, port.caps()).map_err(refused)?;
        let engine = RefCell::new(Engine::new(node, port));
        let turn = |f: &mut dyn FnMut(&mut Node)| {
            let engine = &mut engine.borrow_mut();
            f(engine.node_mut());
            // A port that is gone answers nothing.
            let _ = engine.turn();
            Ok(())
        };
        converse(wanted, turn).map_err(refused)
    }
}

/// One question on its way.
struct Asked {
    number: Option<u64>,
    asks: u32,
    answers: Answers,
    answered_at: Option<Duration>,
}

impl Asked {
    /// Whether there is no more to wait for.
    fn is_settled(&self, now: Duration) -> bool {
        let [least, most] = GRACE;
        let late = |at: Duration| now >= at + at.clamp(least, most);
        self.answers.len() >= HERES_MAX || self.answered_at.is_some_and(late)
    }

    /// Whether it is to be asked now.
    fn is_due(&self, now: Duration) -> bool {
        self.answers.is_empty() && now >= PATIENCE / ASKS * self.asks
    }
}

/// Asks and waits, for [`AT_ONCE`] of them at a time. `turn` lends the node and turns its loop
/// after that.
pub(crate) fn converse(
    wanted: &[Wanted],
    turn: impl Fn(&mut dyn FnMut(&mut Node)) -> Result<()>,
) -> Result<Vec<Answers>> {
    let mut answers = Vec::with_capacity(wanted.len());
    for some in wanted.chunks(AT_ONCE) {
        answers.extend(converse_at_once(some, &turn)?);
    }
    Ok(answers)
}

/// The same for so many that all of them are open together.
fn converse_at_once(
    wanted: &[Wanted],
    turn: impl Fn(&mut dyn FnMut(&mut Node)) -> Result<()>,
) -> Result<Vec<Answers>> {
    let start = Instant::now();
    let new = |_| Asked { number: None, asks: 0, answers: Vec::new(), answered_at: None };
    let mut asked: Vec<Asked> = wanted.iter().map(new).collect();
    loop {
        let now = start.elapsed();
        turn(&mut |node| step(node, wanted, &mut asked, now))?;
        if now >= PATIENCE || asked.iter().all(|one| one.is_settled(now)) {
            break;
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    turn(&mut |node| {
        asked.iter().filter_map(|one| one.number).for_each(|n| node.names.end_question(n))
    })?;
    Ok(asked.into_iter().map(|one| one.answers).collect())
}

/// Takes what has been answered, and asks what is due.
fn step(node: &mut Node, wanted: &[Wanted], asked: &mut [Asked], now: Duration) {
    let mut left = PER_TURN;
    for (wanted, one) in wanted.iter().zip(asked) {
        if let Some(number) = one.number {
            let heres = node.names.heres(number);
            if heres.len() > one.answers.len() {
                one.answers = heres.to_vec();
                one.answered_at.get_or_insert(now);
            }
        }
        if left > 0 && one.is_due(now) {
            one.number = node.control().ask_who(one.number, &wanted.hosts, wanted.service);
            one.asks += u32::from(one.number.is_some());
            left -= 1;
        }
    }
}

static DOMAINS: Mutex<Vec<(String, Weak<dyn Way>)>> = Mutex::new(Vec::new());

/// Notes that a domain is open on the port that was opened as `name`, and may be entered by any
/// thread.
pub(crate) fn note_domain(name: &str, dom: Weak<dyn Way>) {
    let mut all = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|(_, dom)| dom.strong_count() > 0);
    all.push((name.to_owned(), dom));
}

fn domain_on(name: &str) -> Option<Arc<dyn Way>> {
    let all = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    all.iter().filter(|(of, _)| of == name).find_map(|(_, dom)| dom.upgrade())
}

#[cfg(test)]
mod tests {
    use barewire_dataplane::psn::Psn;
    use barewire_dataplane::wire::{Base, Op, Ty, WhoOp, frame};
    use barewire_driver::backend::loopback::Loopback;
    use barewire_driver::frame::{RxFrame, TxFrame};
    use barewire_driver::port::{Port, RxSink, Station};

    use super::*;

    /// What answers each question that it takes.
    #[derive(Default)]
    struct Server(Vec<Vec<u8>>);

    impl RxSink for Server {
        fn frame(&mut self, who: &RxFrame<'_>) {
            let asked = Base::parse(who).unwrap();
            let op = WhoOp { here: true, ..WhoOp::parse(who, &asked).unwrap() };
            let src = Station::at([2, 0, 0, 0, 0, 2]);
            let base = Base { dst: asked.src, src, ty: Ty::Who, psn: Psn(0), ..asked };
            self.0.push(frame(&base, &Op::Who(op), &[]));
        }
    }

    /// Goal: of more hosts than a node asks for at once each is asked for and found. Method: a node
    /// whose questions are answered by the other end of its port.
    #[test]
    fn more_hosts_than_questions_are_all_found() {
        let (port, mut other) = Loopback::pair();
        let settings = NodeSettings { incarnation: 7, seed: 7, ..NodeSettings::default() };
        let node = Node::new(settings, port.caps()).unwrap();
        let ends = RefCell::new((Engine::new(node, Box::new(port)), Server::default()));
        let other = RefCell::new(&mut other);
        let turn = |f: &mut dyn FnMut(&mut Node)| {
            let (engine, server) = &mut *ends.borrow_mut();
            let mut other = other.borrow_mut();
            f(engine.node_mut());
            engine.turn().unwrap();
            other.rx_burst(64, server).unwrap();
            for here in server.0.drain(..) {
                other.tx(&TxFrame::whole(&here)).unwrap();
            }
            other.flush().unwrap();
            engine.turn().unwrap();
            Ok(())
        };
        let count = QUESTIONS_MAX as u32 + 100;
        let ip = |n: u32| IpAddr::from((0x0a01_0000 + n).to_be_bytes());
        let wanted: Vec<Wanted> = (0..count).map(|n| Wanted::new(None, &[ip(n)], 7)).collect();
        let answers = converse(&wanted, turn).unwrap();
        assert_eq!(answers.len(), count as usize);
        let lacking = answers.iter().filter(|heres| heres.is_empty()).count();
        assert_eq!(lacking, 0);
    }
}
