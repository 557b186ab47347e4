//! The difference of two snapshots of the statistics: rates, sorted and filtered.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::path::PathBuf;

use barewire::stats::switch::SwitchSnapshot;
use barewire::stats::{Published, SessionRow, Snapshot};

use crate::metrics::path;
use crate::trips::Trips;

/// Sort key of the list of peers, the largest first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub(super) enum Sort {
    /// Operations that wait.
    #[default]
    Waiting,
    /// Bytes sent per second.
    Tx,
    /// Bytes received per second.
    Rx,
    /// Packets retransmitted per second.
    Resent,
    /// Smoothed round trip.
    Rtt,
    /// Packets in flight.
    Flight,
    /// Time since the peer was heard.
    Heard,
}

impl Sort {
    const ALL: [Self; 7] =
        [Self::Waiting, Self::Tx, Self::Rx, Self::Resent, Self::Rtt, Self::Flight, Self::Heard];

    /// The next sort key, cyclically.
    pub(super) fn next(self) -> Self {
        let at = Self::ALL.iter().position(|&sort| sort == self).unwrap_or(0);
        Self::ALL[(at + 1) % Self::ALL.len()]
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Tx => "tx",
            Self::Rx => "rx",
            Self::Resent => "resent",
            Self::Rtt => "rtt",
            Self::Flight => "flight",
            Self::Heard => "heard",
        }
    }
}

/// The filter of peers.
#[derive(Clone, Debug, Default)]
pub(super) struct Filter {
    pub(super) sort: Sort,
    /// Text that a peer's line has: its process, port, address, path, state or cause to wait.
    pub(super) filter: String,
    /// Only peers that an operation waits for.
    pub(super) waiting: bool,
}

/// The data of the screen. Rates are per second, 0 without an update.
#[derive(Clone, Debug, Default)]
pub(super) struct Model {
    pub(super) switches: Vec<Switch>,
    pub(super) domains: Vec<Domain>,
    pub(super) peers: Vec<Peer>,
}

#[derive(Clone, Debug)]
pub(super) struct Switch {
    pub(super) pid: u32,
    pub(super) port: String,
    pub(super) stations: usize,
    /// Frames.
    pub(super) to_nic: f64,
    pub(super) from_nic: f64,
    pub(super) between: f64,
    pub(super) dropped: f64,
    /// Bytes of the NIC, both ways.
    pub(super) bytes: f64,
    /// Since it turned last.
    pub(super) idle_ns: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Domain {
    /// Its statistics file, which identifies it.
    pub(super) path: PathBuf,
    pub(super) pid: u32,
    pub(super) port: String,
    /// Messages and one-sided operations, both ways.
    pub(super) ops: f64,
    /// Bytes.
    pub(super) tx: f64,
    pub(super) rx: f64,
    pub(super) resent: f64,
    /// The 99th percentile of round trips to far peers, ns; 0 if there were none.
    pub(super) p99_ns: u64,
    pub(super) peers: usize,
    pub(super) waiting: u64,
    /// The most severe cause of waiting.
    pub(super) wait: &'static str,
    /// Since its program polled.
    pub(super) idle_ns: u64,
}

#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub(super) domain: PathBuf,
    pub(super) pid: u32,
    /// `near`, `far` or `-`.
    pub(super) path: &'static str,
    /// Bytes, where they are counted.
    pub(super) tx: Option<f64>,
    pub(super) rx: Option<f64>,
    pub(super) resent: f64,
    pub(super) row: SessionRow,
}

impl Model {
    /// The model of the changes from `before` to `now`, read at `now_ns` since 1970.
    pub(super) fn new(before: &Published, now: &Published, now_ns: u64, wanted: &Filter) -> Self {
        let earlier: HashMap<_, _> = before.domains.iter().map(|s| (&s.path, s)).collect();
        let mut model = Self::default();
        for s in &now.domains {
            let earlier = earlier.get(&s.path).copied();
            model.domains.push(domain(earlier, s, now_ns));
            let lines = peers(earlier, s);
            model.peers.extend(lines.filter(|peer| is_wanted(peer, &s.port_name, wanted)));
        }
        let earlier: HashMap<_, _> = before.switches.iter().map(|s| (&s.path, s)).collect();
        let switches = now.switches.iter();
        model.switches =
            switches.map(|s| switch(earlier.get(&s.path).copied(), s, now_ns)).collect();
        // A stable sort: equal peers keep their order.
        model.peers.sort_by_key(|peer| Reverse(key(peer, wanted.sort)));
        model
    }

    /// Keeps the peers of one domain.
    pub(super) fn only(&mut self, domain: &PathBuf) {
        self.peers.retain(|peer| peer.domain == *domain);
    }

    /// The most severe cause of waiting, and the number of operations.
    pub(super) fn worst(&self) -> Option<(u64, &'static str)> {
        worst(self.peers.iter().map(|peer| &peer.row))
    }
}

fn key(peer: &Peer, sort: Sort) -> u64 {
    match sort {
        Sort::Waiting => peer.row.waiting,
        Sort::Tx => peer.tx.unwrap_or(0.0) as u64,
        Sort::Rx => peer.rx.unwrap_or(0.0) as u64,
        // Rates below one per second are kept.
        Sort::Resent => (peer.resent * 1000.0) as u64,
        Sort::Rtt => peer.row.srtt_ns,
        Sort::Flight => peer.row.in_flight,
        Sort::Heard => peer.row.silent_ns,
    }
}

fn is_wanted(peer: &Peer, port: &str, wanted: &Filter) -> bool {
    if wanted.waiting && peer.row.waiting == 0 {
        return false;
    }
    let Peer { pid, path, row, .. } = peer;
    let line = format!("{pid} {port} {} {path} {} {}", row.station, row.state, row.wait);
    line.contains(&wanted.filter)
}

fn worst<'a>(rows: impl Iterator<Item = &'a SessionRow>) -> Option<(u64, &'static str)> {
    let mut causes: Vec<(u64, &'static str)> = Vec::new();
    for row in rows.filter(|row| row.waiting > 0) {
        match causes.iter_mut().find(|(_, cause)| *cause == row.wait) {
            Some((count, _)) => *count += row.waiting,
            None => causes.push((row.waiting, row.wait)),
        }
    }
    causes.into_iter().max_by_key(|&(count, cause)| (severity(cause), count))
}

/// Severity of a cause of waiting.
fn severity(cause: &str) -> u8 {
    match cause {
        "repeats" | "silent" | "open" => 2,
        "credit" | "memory" | "match" => 1,
        _ => 0,
    }
}

/// The rate per second of a difference over `seconds`.
fn rate(before: u64, now: u64, seconds: f64) -> f64 {
    if seconds > 0.0 { now.saturating_sub(before) as f64 / seconds } else { 0.0 }
}

fn seconds(before_ns: u64, now_ns: u64) -> f64 {
    now_ns.saturating_sub(before_ns) as f64 / 1e9
}

fn value(counters: &[(&'static str, u64)], name: &str) -> u64 {
    counters.iter().find(|(known, _)| *known == name).map_or(0, |(_, value)| *value)
}

fn domain(before: Option<&Snapshot>, s: &Snapshot, now_ns: u64) -> Domain {
    let before = before.unwrap_or(s);
    let seconds = seconds(before.updated_ns, s.updated_ns);
    let port = |name| rate(value(&before.port, name), value(&s.port, name), seconds);
    let node = |name| rate(value(&before.node, name), value(&s.node, name), seconds);
    let ops = ["msgs_sent", "msgs_received", "rma_done", "rma_executed"];
    Domain {
        path: s.path.clone(),
        pid: s.pid,
        port: s.port_name.clone(),
        ops: ops.into_iter().map(node).sum(),
        tx: port("tx_bytes"),
        rx: port("rx_bytes"),
        resent: node("tx_retransmits"),
        p99_ns: Trips::between(before, s).quantile_ns(0.99),
        peers: s.sessions.len(),
        waiting: s.sessions.iter().map(|row| row.waiting).sum(),
        wait: worst(s.sessions.iter()).map_or("", |(_, cause)| cause),
        idle_ns: now_ns.saturating_sub(s.polled_ns),
    }
}

fn peers<'a>(before: Option<&'a Snapshot>, s: &'a Snapshot) -> impl Iterator<Item = Peer> + 'a {
    let before = before.unwrap_or(s);
    let seconds = seconds(before.updated_ns, s.updated_ns);
    // A new session with the same peer starts at 0.
    let of = |row: &SessionRow| (row.station, row.incarnation);
    let earlier: HashMap<_, _> = before.sessions.iter().map(|row| (of(row), row)).collect();
    s.sessions.iter().map(move |row| {
        let was = earlier.get(&of(row)).copied().unwrap_or(row);
        let bytes = |was: Option<u64>, now: Option<u64>| Some(rate(was?, now?, seconds));
        Peer {
            domain: s.path.clone(),
            pid: s.pid,
            path: path(row),
            tx: bytes(was.tx_bytes, row.tx_bytes),
            rx: bytes(was.rx_bytes, row.rx_bytes),
            resent: rate(was.retransmits, row.retransmits, seconds),
            row: *row,
        }
    })
}

fn switch(before: Option<&SwitchSnapshot>, s: &SwitchSnapshot, now_ns: u64) -> Switch {
    let before = before.unwrap_or(s);
    let seconds = seconds(before.updated_ns, s.updated_ns);
    let count = |name| rate(value(&before.counters, name), value(&s.counters, name), seconds);
    let nic = |name| rate(value(&before.nic, name), value(&s.nic, name), seconds);
    let dropped = ["spoofed", "malformed", "unknown", "full"];
    Switch {
        pid: s.pid,
        port: s.port_name.clone(),
        stations: s.stations.len(),
        to_nic: count("to_nic"),
        from_nic: count("from_nic"),
        between: count("between"),
        dropped: dropped.into_iter().map(count).sum::<f64>()
            + nic("rx_dropped")
            + nic("tx_dropped"),
        bytes: nic("tx_bytes") + nic("rx_bytes"),
        idle_ns: now_ns.saturating_sub(s.updated_ns),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    const SECOND: u64 = 1_000_000_000;

    fn published(domains: Vec<Snapshot>) -> Published {
        Published { domains, switches: vec![sample::switch(14, SECOND)], unread: Vec::new() }
    }

    fn looks() -> [Published; 2] {
        let before = published(vec![sample::domain(12, SECOND), sample::domain(13, SECOND)]);
        let mut now = before.clone();
        let d = &mut now.domains[0];
        (d.updated_ns, d.polled_ns) = (3 * SECOND, 3 * SECOND);
        d.port.iter_mut().find(|c| c.0 == "tx_bytes").unwrap().1 += 5000;
        d.node.iter_mut().find(|c| c.0 == "msgs_sent").unwrap().1 += 80;
        d.node.iter_mut().find(|c| c.0 == "rma_done").unwrap().1 += 20;
        d.sessions[0].retransmits += 7;
        d.sessions[0].tx_bytes = Some(4048);
        d.sessions.push(SessionRow { waiting: 9, wait: "window", ..sample::session(7) });
        d.sessions.push(SessionRow { waiting: 0, srtt_ns: 9_000, ..sample::session(8) });
        now.switches[0].updated_ns = 2 * SECOND;
        now.switches[0].counters[0].1 += 300;
        now.switches[0].counters[6].1 += 4;
        [before, now]
    }

    fn model(wanted: &Filter) -> Model {
        let [before, now] = looks();
        Model::new(&before, &now, 5 * SECOND, wanted)
    }

    #[test]
    fn rates_are_what_was_added_by_the_time_of_the_writer() {
        let model = model(&Filter::default());
        let d = &model.domains[0];
        assert_eq!((d.tx, d.ops, d.rx), (2500.0, 50.0, 0.0));
        assert_eq!((d.waiting, d.wait, d.idle_ns), (11, "credit", 2 * SECOND));
        // Nothing was written since: no rate, and nothing is divided by 0.
        assert_eq!((model.domains[1].tx, model.domains[1].idle_ns), (0.0, 4 * SECOND));
        let peer = model
            .peers
            .iter()
            .find(|p| p.pid == 12 && p.row.station == sample::station(9))
            .unwrap();
        assert_eq!((peer.tx, peer.rx, peer.resent), (Some(1000.0), None, 3.5));
        let new = model.peers.iter().find(|p| p.row.station == sample::station(7)).unwrap();
        assert_eq!((new.tx, new.resent), (Some(0.0), 0.0));
        let s = &model.switches[0];
        assert_eq!((s.to_nic, s.dropped, s.idle_ns), (300.0, 4.0, 3 * SECOND));
    }

    #[test]
    fn peers_are_sorted_filtered_and_chosen() {
        let macs = |wanted: &Filter| -> Vec<u8> {
            model(wanted).peers.iter().map(|peer| peer.row.station.mac.0[5]).collect()
        };
        let by = |sort| Filter { sort, ..Filter::default() };
        assert_eq!(macs(&by(Sort::Waiting)), [7, 9, 9, 8]);
        assert_eq!(macs(&by(Sort::Rtt))[0], 8);
        assert_eq!(macs(&by(Sort::Tx))[0], 9);
        assert_eq!(macs(&Filter { filter: "window".to_owned(), ..Filter::default() }), [7]);
        assert_eq!(macs(&Filter { waiting: true, ..Filter::default() }), [7, 9, 9]);
        let mut model = model(&Filter::default());
        // Nine wait for the window, which is no fault.
        assert_eq!(model.worst(), Some((4, "credit")));
        model.only(&PathBuf::from("domain-13"));
        assert_eq!((model.peers.len(), model.worst()), (1, Some((2, "credit"))));
        let mut all = Sort::default();
        Sort::ALL.iter().for_each(|_| all = all.next());
        assert_eq!(all, Sort::default());
    }
}
