//! Name resolution: a WHO query asks all stations of a segment which of them serves a service of a
//! host; the station that does answers with HERE.
//!
//! Both are control packets without a session, and change none. The node answers for the hosts
//! given by [`Control::set_hosts`] and the services bound by [`Control::serve_name`], within the
//! rate limit of replies to stations without a session. It keeps the answers to its own query
//! ([`Control::ask_who`]) until the query is ended, at most [`HERES_MAX`] each. Answers that match
//! no query are counted and dropped.
//!
//! The addresses of a host change while it runs. So that no query is answered for an address that
//! the host has lost or not yet got, the owner of the node is notified to set the names again
//! ([`Notice::HostAsked`]) before the first answer in a second; the query waits for that.
//!
//! The caller decides when to repeat a query, how long to wait and which answer to use.

use barewire_driver::frame::RxFrame;
use barewire_driver::port::Station;

use super::ep::Ep;
use super::{Control, Eps, Notice, Reply};
use crate::psn::Psn;
use crate::types::Instant;
use crate::wire::{Base, Host, Ty, VERSIONS, Versions, WhoOp};

/// Maximum number of open queries.
pub const QUERIES_MAX: usize = 1024;

/// Answers of different endpoints kept for one query: enough to detect that there are two.
pub const HERES_MAX: usize = 4;

/// Number of stations that are reported for claiming a name of this node. Further ones are not: a
/// sender of frames can invent addresses.
const CLAIMS_MAX: usize = 16;

/// Number of host names under which a service is announced: the first ones.
const ANNOUNCED_MAX: usize = 8;

/// Age at which the host's names are read again before a query is answered, and the minimum
/// interval between two such readings, nanoseconds.
const FRESH_NS: u64 = 1_000_000_000;

/// Maximum number of queries that wait for the names, and how long they wait, nanoseconds. Later
/// ones are answered with the known names; a client that gets no answer repeats its query.
const HELD_MAX: usize = 16;
const HELD_NS: u64 = 10_000_000;

/// An answer to a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Here {
    /// The station.
    pub station: Station,
    /// The number of the endpoint.
    pub ep: u16,
    /// Its protocol versions.
    pub versions: Versions,
}

/// An open query of this node.
#[derive(Debug)]
struct Query {
    nonce: u64,
    service: u16,
    answers: Vec<Here>,
}

/// The names of this node, and its open queries.
#[derive(Debug, Default)]
pub struct Names {
    hosts: Vec<Host>,
    services: Vec<u16>,
    queries: Vec<Query>,
    /// Stations already reported to claim a name of this node.
    claims: Vec<Station>,
    /// When the names of the host were set.
    known_at: Instant,
    /// When the owner was last asked for them.
    asked_at: Option<Instant>,
    /// Queries that wait for them, with their senders.
    pub(super) held: Vec<(Station, WhoOp)>,
}

impl Names {
    /// The answers received to a query.
    pub fn answers_to(&self, query_nonce: u64) -> &[Here] {
        let query = self.queries.iter().find(|query| query.nonce == query_nonce);
        query.map_or(&[], |query| &query.answers)
    }

    /// Ends a query: later answers are dropped.
    pub fn end_query(&mut self, query_nonce: u64) {
        self.queries.retain(|query| query.nonce != query_nonce);
    }

    /// The service number that `service` selects, if this node serves it.
    fn served(&self, eps: &Eps, service: u16) -> Option<u16> {
        let is_there = |n: u16| eps.slot(n) != Ep::UNUSED_SLOT;
        let matches = |n: &u16| (service == 0 || *n == service) && is_there(*n);
        self.services.iter().copied().find(matches)
    }

    /// As `served`, at `host`.
    fn serves(&self, eps: &Eps, host: Host, service: u16) -> Option<u16> {
        self.served(eps, service).filter(|_| self.hosts.contains(&host))
    }

    /// Whether a query for a service of this node at `host` has to wait until the names of the
    /// host, which may have changed, are set again. `Some(true)`: the owner has to be notified.
    fn must_wait(&mut self, now: Instant, host: Host) -> Option<bool> {
        let since = |at: Option<Instant>| at.map_or(u64::MAX, |at| now.since(at));
        let is_old = now.since(self.known_at) >= FRESH_NS || !self.hosts.contains(&host);
        if is_old && since(self.asked_at) >= FRESH_NS {
            self.asked_at = Some(now);
            self.held.clear();
            return Some(true);
        }
        let are_requested = !self.held.is_empty() && since(self.asked_at) < HELD_NS;
        (are_requested && self.held.len() < HELD_MAX).then_some(false)
    }

    /// Stores an answer. False if it matches no query, or the query has enough answers.
    fn store_answer(&mut self, src: Station, op: &WhoOp) -> bool {
        let here = Here { station: src, ep: op.service, versions: op.versions };
        let query = self.queries.iter_mut().find(|query| {
            query.nonce == op.nonce && (query.service == 0 || query.service == op.service)
        });
        match query {
            Some(query) if query.answers.contains(&here) => true,
            Some(query) if query.answers.len() < HERES_MAX => {
                query.answers.push(here);
                true
            }
            _ => false,
        }
    }
}

impl Control<'_> {
    /// Sets the names of this node's host as of `now`, and answers the queries that wait for them.
    pub fn set_hosts(&mut self, now: Instant, hosts: Vec<Host>) {
        (self.names.hosts, self.names.known_at) = (hosts, now);
        for (src, op) in std::mem::take(&mut self.names.held) {
            self.send_here(now, src, &op);
        }
    }

    /// Accepts from now on also sessions of peers that do not name this incarnation: the
    /// application publishes a name by which they find the node.
    pub fn reach_by_name(&mut self) {
        self.settings.by_name = true;
    }

    /// Answers for the endpoint with number `service`, not 0, from now on while the endpoint
    /// exists, and announces it. A client does not learn the incarnation, so from now on the node
    /// is reached [by name](Self::reach_by_name).
    pub fn serve_name(&mut self, service: u16) {
        debug_assert!(service != 0, "0 is any service");
        self.reach_by_name();
        if !self.names.services.contains(&service) {
            self.names.services.push(service);
        }
        for i in 0..self.names.hosts.len().min(ANNOUNCED_MAX) {
            let host = self.names.hosts[i];
            let here = WhoOp { nonce: 0, here: true, host, service, versions: VERSIONS };
            self.push_who(Station::BROADCAST, &here);
        }
    }

    /// Queries all stations for `service`, or for any service if 0, at one of `hosts`, which are
    /// addresses of one host. `query_nonce` is the number of the query if it is repeated. Returns
    /// that number, or `None` if too many queries are open. The query is sent with the next turn.
    pub fn ask_who(
        &mut self,
        query_nonce: Option<u64>,
        hosts: &[Host],
        service: u16,
    ) -> Option<u64> {
        let nonce = query_nonce.unwrap_or_else(|| self.openings.random().max(1));
        if query_nonce.is_none() {
            if self.names.queries.len() >= QUERIES_MAX {
                return None;
            }
            self.names.queries.push(Query { nonce, service, answers: Vec::new() });
        }
        for &host in hosts {
            let query = WhoOp { nonce, here: false, host, service, versions: VERSIONS };
            self.push_who(Station::BROADCAST, &query);
        }
        Some(nonce)
    }

    fn push_who(&mut self, dst: Station, op: &WhoOp) {
        let mut bytes = [0; WhoOp::LEN];
        op.emit(&mut bytes);
        self.push_reply(
            Reply::new(&self.port.control(dst, Ty::Who, 0, Psn(0)), &bytes),
            usize::MAX,
        );
    }

    /// Processes a WHO or HERE.
    #[cold]
    pub(super) fn on_who(&mut self, now: Instant, frame: &RxFrame<'_>, base: &Base) {
        if base.src == self.port.station
            || base.dst != self.port.station && base.dst != Station::BROADCAST
        {
            self.counters.rx_not_ours += 1;
            return;
        }
        if self.port.far.has_crc() && !base.crc {
            self.counters.rx_no_crc += 1;
            return;
        }
        match WhoOp::parse(frame, base) {
            Ok(op) if !op.here => self.on_query(now, base.src, &op),
            Ok(op) if op.nonce == 0 => self.on_announcement(base.src, &op),
            Ok(op) if base.dst == self.port.station && self.names.store_answer(base.src, &op) => {}
            Ok(_) => self.counters.rx_here_stray += 1,
            Err(err) => self.counters.rx_wire[err.index()] += 1,
        }
    }

    fn on_query(&mut self, now: Instant, src: Station, op: &WhoOp) {
        self.counters.rx_who += 1;
        if self.names.served(self.eps, op.service).is_none() {
            return;
        }
        match self.names.must_wait(now, op.host) {
            Some(is_first) => {
                self.names.held.push((src, *op));
                if is_first {
                    self.observed.note(Notice::HostAsked);
                }
            }
            None => self.send_here(now, src, op),
        }
    }

    /// Answers a query, if it is for a service of this node at this host.
    fn send_here(&mut self, now: Instant, src: Station, op: &WhoOp) {
        let Some(service) = self.names.serves(self.eps, op.host, op.service) else { return };
        if self.replies.may_reply(self.counters, now) {
            self.counters.tx_here += 1;
            self.push_who(src, &WhoOp { here: true, service, versions: VERSIONS, ..*op });
        }
    }

    /// Processes a HERE without a query: kept only if it claims a service of this node.
    fn on_announcement(&mut self, src: Station, op: &WhoOp) {
        let claims = &mut self.names.claims;
        if claims.contains(&src) || claims.len() >= CLAIMS_MAX {
            return;
        }
        if self.names.serves(self.eps, op.host, op.service).is_some() {
            self.names.claims.push(src);
            self.observed.note(Notice::NameTwice { station: src, service: op.service });
        }
    }
}
