//! Queries for the server of a service at a host, on ports where the address cannot be computed:
//! WHO and HERE of `docs/wire.md`, "Names".
//!
//! # When queries are sent
//! When an address is resolved: in `fi_getinfo`, and when one is inserted. Both wait for at most
//! [`QUERY_TIMEOUT`], for each 512 hosts that are queried at once. Resolving a name while messages
//! wait for it would avoid that wait. But programs use `fi_getinfo` to find out whether a host
//! exists, and its answer has to be right; and a queue of unresolved sends would be on the path of
//! every message. An insertion queries through its domain. `fi_getinfo` queries through a domain of
//! this process on the same port, if there is one, else it opens the port for the query: on an
//! exclusive port (`vfio:`, `dpdk:`, a queue of `xdp:`) that fails while another process has it,
//! and costs an open.
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

use barewire_dataplane::node::{HERES_MAX, Here, Node, NodeSettings, QUERIES_MAX};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::INCARNATION_MAX;
use barewire_dataplane::wire::Host;
use barewire_driver::clock::now_ns;
use barewire_driver::open::open_in_node;

use crate::errno::{OpenError, Result, open_error};
use crate::hosts::host_of;

/// How long a query waits for an answer.
pub const QUERY_TIMEOUT: Duration = Duration::from_millis(300);

/// How often a query is sent in [`QUERY_TIMEOUT`].
const SENDS_MAX: u32 = 3;

/// Queries that are sent in one turn: each is a few frames, and the node queues 64.
const SENDS_PER_TURN: usize = 8;

/// After the first answer a query waits as long again, within these bounds, for a second station
/// that serves the same name.
const DUPLICATE_WAIT: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(5)];

/// Names and addresses of a host in one query.
const HOSTS_MAX: usize = 6;

/// Queries that are pending at once: half of the node's table, since another thread may query as
/// well.
const BATCH_MAX: usize = QUERIES_MAX / 2;

/// A query for a service of one host, by the host's names and IP addresses. Service 0 is any
/// service.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Query {
    hosts: Vec<Host>,
    service: u16,
}

impl Query {
    pub(crate) fn new(name: Option<&str>, ips: &[IpAddr], service: u16) -> Self {
        let ips = ips.iter().map(|ip| host_of(*ip));
        let hosts = ips.chain(name.map(Host::name)).take(HOSTS_MAX).collect();
        Self { hosts, service }
    }
}

/// The answers to one query, in the order of their arrival.
pub(crate) type Answers = Vec<Here>;

/// Sends queries and collects their answers.
pub(crate) trait Resolver: Send + Sync {
    /// Runs all `queries` at once.
    ///
    /// # Errors
    /// [`OpenError`]: no query can be sent.
    fn query(&self, queries: &[Query]) -> std::result::Result<Vec<Answers>, OpenError>;
}

/// Queries on a port by its name: through a domain of this process that is open on it, or through
/// the port, opened for the query.
pub(crate) struct PortResolver<'a> {
    pub(crate) name: &'a str,
    /// Whether processes of this host are reached through shared memory.
    pub(crate) near: bool,
}

impl Resolver for PortResolver<'_> {
    fn query(&self, queries: &[Query]) -> std::result::Result<Vec<Answers>, OpenError> {
        if let Some(Ok(answers)) = open_domain(self.name).map(|dom| dom.query(queries)) {
            return Ok(answers);
        }
        let port = open_in_node(self.name, self.near).map_err(open_error)?;
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
            // A port that is gone delivers no answers.
            let _ = engine.turn();
            Ok(())
        };
        run_queries(queries, turn).map_err(refused)
    }
}

/// The state of one query.
struct PendingQuery {
    number: Option<u64>,
    sends: u32,
    answers: Answers,
    answered_at: Option<Duration>,
}

impl PendingQuery {
    /// Whether no further answer is waited for.
    fn is_settled(&self, now: Duration) -> bool {
        let [least, most] = DUPLICATE_WAIT;
        let late = |at: Duration| now >= at + at.clamp(least, most);
        self.answers.len() >= HERES_MAX || self.answered_at.is_some_and(late)
    }

    /// Whether the query is to be sent (again) now.
    fn is_due(&self, now: Duration) -> bool {
        self.answers.is_empty() && now >= QUERY_TIMEOUT / SENDS_MAX * self.sends
    }
}

/// Runs queries, [`BATCH_MAX`] at a time, and waits for their answers. `turn` lends the node to its
/// argument and then turns the progress loop.
pub(crate) fn run_queries(
    queries: &[Query],
    turn: impl Fn(&mut dyn FnMut(&mut Node)) -> Result<()>,
) -> Result<Vec<Answers>> {
    let mut answers = Vec::with_capacity(queries.len());
    for batch in queries.chunks(BATCH_MAX) {
        answers.extend(run_batch(batch, &turn)?);
    }
    Ok(answers)
}

/// Runs at most [`BATCH_MAX`] queries at once.
fn run_batch(
    queries: &[Query],
    turn: impl Fn(&mut dyn FnMut(&mut Node)) -> Result<()>,
) -> Result<Vec<Answers>> {
    let start = Instant::now();
    let new = |_| PendingQuery { number: None, sends: 0, answers: Vec::new(), answered_at: None };
    let mut pending: Vec<PendingQuery> = queries.iter().map(new).collect();
    loop {
        let now = start.elapsed();
        turn(&mut |node| poll_queries(node, queries, &mut pending, now))?;
        if now >= QUERY_TIMEOUT || pending.iter().all(|one| one.is_settled(now)) {
            break;
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    turn(&mut |node| {
        pending.iter().filter_map(|one| one.number).for_each(|n| node.names.end_query(n))
    })?;
    Ok(pending.into_iter().map(|one| one.answers).collect())
}

/// Collects answers, and sends the queries that are due.
fn poll_queries(node: &mut Node, queries: &[Query], pending: &mut [PendingQuery], now: Duration) {
    let mut left = SENDS_PER_TURN;
    for (query, one) in queries.iter().zip(pending) {
        if let Some(number) = one.number {
            let answers_to = node.names.answers_to(number);
            if answers_to.len() > one.answers.len() {
                one.answers = answers_to.to_vec();
                one.answered_at.get_or_insert(now);
            }
        }
        if left > 0 && one.is_due(now) {
            one.number = node.control().ask_who(one.number, &query.hosts, query.service);
            one.sends += u32::from(one.number.is_some());
            left -= 1;
        }
    }
}

static DOMAINS: Mutex<Vec<(String, Weak<dyn Resolver>)>> = Mutex::new(Vec::new());

/// Registers a domain for queries on the port that was opened as `name`. Any thread may enter it.
pub(crate) fn register_domain(name: &str, dom: Weak<dyn Resolver>) {
    let mut all = DOMAINS.lock().unwrap_or_else(PoisonError::into_inner);
    all.retain(|(_, dom)| dom.strong_count() > 0);
    all.push((name.to_owned(), dom));
}

fn open_domain(name: &str) -> Option<Arc<dyn Resolver>> {
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

    /// Answers each query that it receives.
    #[derive(Default)]
    struct Server(Vec<Vec<u8>>);

    impl RxSink for Server {
        fn frame(&mut self, who: &RxFrame<'_>) {
            let pending = Base::parse(who).unwrap();
            let op = WhoOp { here: true, ..WhoOp::parse(who, &pending).unwrap() };
            let src = Station::at([2, 0, 0, 0, 0, 2]);
            let base = Base { dst: pending.src, src, ty: Ty::Who, psn: Psn(0), ..pending };
            self.0.push(frame(&base, &Op::Who(op), &[]));
        }
    }

    /// Goal: more hosts than a node queries at once are all found. Method: a node whose queries are
    /// answered by the other end of its port.
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
        let count = QUERIES_MAX as u32 + 100;
        let ip = |n: u32| IpAddr::from((0x0a01_0000 + n).to_be_bytes());
        let queries: Vec<Query> = (0..count).map(|n| Query::new(None, &[ip(n)], 7)).collect();
        let answers = run_queries(&queries, turn).unwrap();
        assert_eq!(answers.len(), count as usize);
        let lacking = answers.iter().filter(|answers_to| answers_to.is_empty()).count();
        assert_eq!(lacking, 0);
    }
}
