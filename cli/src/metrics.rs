//! Published statistics in the text exposition format of Prometheus.
//!
//! Names end in their unit, `_total` is a counter, and every sample of a family has the same
//! labels: `pid`, `port` and `address` identify the domain, `peer` the remote station.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;

use barewire::stats::switch::{StationRow, SwitchSnapshot};
use barewire::stats::{EpRow, Published, SessionRow, Snapshot};
use barewire_dataplane::node::{RoundTrips, Wait};
use prometheus::TextEncoder;
use prometheus::proto::{
    Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType,
};

use crate::fail::Fail;

/// The HTTP content type of a page.
pub(crate) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// The page of all statistics, with those of each session if requested.
///
/// # Errors
/// Only by a bug.
pub(crate) fn page(all: &Published, sessions: bool) -> Result<String, Fail> {
    let mut page = Page::default();
    let version = env!("CARGO_PKG_VERSION").to_owned();
    let help = "1, with the version of the command that reads the statistics.";
    page.gauge("build_info", help, &[("version", version)], 1.0);
    let help = "Processes whose statistics have another version and are not in here.";
    page.gauge("unread_processes", help, &[], all.unread.len() as f64);
    for s in once(&all.domains, |s| (s.pid, s.port_name.clone(), s.station)) {
        domain(&mut page, s, sessions);
    }
    for s in once(&all.switches, |s| (s.pid, s.port_name.clone(), s.station)) {
        switch(&mut page, s);
    }
    TextEncoder::new().encode_to_string(&page.families).map_err(Fail::new)
}

type Label = (&'static str, String);

/// Families in the order in which they were first added to.
#[derive(Default)]
struct Page {
    families: Vec<MetricFamily>,
    /// Index of each family by name.
    places: HashMap<String, usize>,
}

impl Page {
    fn gauge(&mut self, name: &str, help: &str, labels: &[Label], value: f64) {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        let mut metric = Metric::from_label(pairs(labels));
        metric.set_gauge(gauge);
        self.add(format!("barewire_{name}"), help, MetricType::GAUGE, metric);
    }

    fn counter(&mut self, name: &str, help: &str, labels: &[Label], value: u64) {
        let mut counter = Counter::default();
        counter.set_value(value as f64);
        let mut metric = Metric::from_label(pairs(labels));
        metric.set_counter(counter);
        self.add(format!("barewire_{name}_total"), help, MetricType::COUNTER, metric);
    }

    /// Adds a histogram of round trips, with a bucket for each power of two.
    fn round_trips(&mut self, labels: &[Label], s: &Snapshot) {
        let (mut buckets, mut count) = (Vec::new(), 0);
        for (at, trips) in s.round_trips.iter().enumerate().take(RoundTrips::COUNT) {
            count += trips;
            let end = RoundTrips::lengths(at).end;
            if end.is_power_of_two() {
                let mut bucket = Bucket::default();
                bucket.set_upper_bound(seconds(end));
                bucket.set_cumulative_count(count);
                buckets.push(bucket);
            }
        }
        let mut histogram = Histogram::default();
        histogram.set_bucket(buckets);
        histogram.set_sample_count(count);
        histogram.set_sample_sum(seconds(s.round_trips_ns));
        let mut metric = Metric::from_label(pairs(labels));
        metric.set_histogram(histogram);
        let help = "Round trips to far peers, as acknowledgements tell them.";
        self.add(
            "barewire_node_round_trip_seconds".to_owned(),
            help,
            MetricType::HISTOGRAM,
            metric,
        );
    }

    fn add(&mut self, name: String, help: &str, kind: MetricType, metric: Metric) {
        if let Some(&place) = self.places.get(&name) {
            return self.families[place].mut_metric().push(metric);
        }
        self.places.insert(name.clone(), self.families.len());
        let mut family = MetricFamily::default();
        family.set_name(name);
        family.set_help(help.to_owned());
        family.set_field_type(kind);
        family.mut_metric().push(metric);
        self.families.push(family);
    }
}

fn pairs(labels: &[Label]) -> Vec<LabelPair> {
    let pair = |(name, value): &Label| {
        let mut pair = LabelPair::default();
        pair.set_name((*name).to_owned());
        pair.set_value(value.clone());
        pair
    };
    labels.iter().map(pair).collect()
}

/// `labels` with one more label.
fn with(labels: &[Label], name: &'static str, value: impl ToString) -> Vec<Label> {
    let more = [(name, value.to_string())];
    labels.iter().cloned().chain(more).collect()
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

fn domain(page: &mut Page, s: &Snapshot, with_sessions: bool) {
    let of = [
        ("pid", s.pid.to_string()),
        ("port", s.port_name.clone()),
        ("address", s.station.to_string()),
    ];
    let incarnation = format!("{:012x}", s.incarnation);
    let help = "1, with the name of this life of an open domain.";
    page.gauge("domain_info", help, &with(&of, "incarnation", incarnation), 1.0);
    for (name, help, value) in [
        ("start_time_seconds", "When the domain was opened, since 1970.", seconds(s.opened_ns)),
        (
            "last_poll_timestamp_seconds",
            "When its program polled last, since 1970: not while it computes.",
            seconds(s.polled_ns),
        ),
        ("mtu_bytes", "Bytes of a frame after its Ethernet header.", s.mtu as f64),
        ("dead_after_seconds", "Silence after which a peer is dead (T_dead).", {
            seconds(s.t_dead_ns)
        }),
    ] {
        page.gauge(&format!("domain_{name}"), help, &of, value);
    }
    for &(name, value) in &s.port {
        let help = port_help(name);
        page.counter(&format!("port_{name}"), &help, &of, value);
    }
    for &(name, value) in s.node.iter().filter(|(name, _)| *name != "peers") {
        page.counter(&format!("node_{name}"), node_help(name), &of, value);
    }
    for &(cause, value) in &s.refused {
        let help = "Frames refused because they are not as the protocol has them, by cause.";
        page.counter("node_rx_invalid_frames", help, &with(&of, "cause", cause), value);
    }
    for &(table, value) in s.levels.iter().filter(|(name, _)| *name != "pull_bytes") {
        let help = "Entries of a table in use.";
        page.gauge("node_in_use", help, &with(&of, "table", table), value as f64);
    }
    if let Some((_, value)) = s.levels.iter().find(|(name, _)| *name == "pull_bytes") {
        let help = "Bytes asked for of peers that have not come.";
        page.gauge("node_pull_bytes", help, &of, *value as f64);
    }
    page.round_trips(&of, s);
    for e in once(s.endpoints.iter(), |e| e.number) {
        endpoint(page, &with(&of, "endpoint", e.number), e);
    }
    sums(page, &of, &s.sessions);
    if with_sessions {
        let mut newest: Vec<&SessionRow> = s.sessions.iter().collect();
        newest.sort_by_key(|p| (p.state == "idle", p.age_ns));
        for p in once(newest, |p| p.station) {
            session(page, &with(&of, "peer", p.station), p);
        }
    }
}

/// The first row of each name, since a series may be on a page once. There may be more rows: a row
/// that has moved is also in its old place until that is rewritten, and a peer has a session for
/// each key.
fn once<'a, T: 'a, N: Eq + Hash>(
    rows: impl IntoIterator<Item = &'a T>,
    name: impl Fn(&T) -> N,
) -> impl Iterator<Item = &'a T> {
    let mut seen = HashSet::new();
    rows.into_iter().filter(move |row| seen.insert(name(row)))
}

fn endpoint(page: &mut Page, of: &[Label], e: &EpRow) {
    for (name, help, value) in [
        ("sent_messages", "Sends completed.", e.sent),
        ("sent_bytes", "Bytes of sends completed.", e.sent_bytes),
        ("received_messages", "Messages received.", e.received),
        ("received_bytes", "Bytes of messages received.", e.received_bytes),
        ("errors", "Operations that failed.", e.errors),
    ] {
        page.counter(&format!("endpoint_{name}"), help, of, value);
    }
    let help = "Messages that wait for a receive.";
    page.gauge("endpoint_unexpected_messages", help, of, e.unexpected as f64);
    page.gauge("endpoint_posted_receives", "Receives posted.", of, e.posted as f64);
}

/// Sums over all peers, instead of a series for each peer.
fn sums(page: &mut Page, of: &[Label], sessions: &[SessionRow]) {
    for state in ["idle", "opening", "answered", "open"] {
        let count = sessions.iter().filter(|p| p.state == state).count();
        let help = "Peers, by the state of their session.";
        page.gauge("sessions", help, &with(of, "state", state), count as f64);
    }
    for cause in Wait::ALL.iter().skip(1).map(|wait| wait.name()) {
        let waiting = sessions.iter().filter(|p| p.wait == cause).map(|p| p.waiting).sum::<u64>();
        let help = "Operations that wait for peers, by what they wait for.";
        page.gauge("waiting_operations", help, &with(of, "cause", cause), waiting as f64);
    }
}

fn session(page: &mut Page, of: &[Label], p: &SessionRow) {
    let info = with(&with(of, "state", p.state), "path", path(p));
    let help = "1, with the state of a session and whether its peer is near or far.";
    page.gauge("session_info", help, &info, 1.0);
    let help = "Operations of a session that wait, and what for.";
    let waiting = with(of, "cause", p.wait);
    page.gauge("session_waiting_operations", help, &waiting, p.waiting as f64);
    for (name, help, value) in [
        ("tx_packets", "Packets sent, without repetitions and control packets.", p.tx_packets),
        ("rx_packets", "Packets taken in order.", p.rx_packets),
        ("retransmits", "Packets sent again.", p.retransmits),
        ("timeouts", "Retransmission timeouts.", p.timeouts),
    ] {
        page.counter(&format!("session_{name}"), help, of, value);
    }
    let bytes = [
        ("tx_bytes", "Bytes of frames to the peer, where they are counted.", p.tx_bytes),
        ("rx_bytes", "Bytes of frames from the peer, where they are counted.", p.rx_bytes),
    ];
    for (name, help, value) in bytes.iter().filter_map(|(n, h, value)| Some((n, h, (*value)?))) {
        page.counter(&format!("session_{name}"), help, of, value);
    }
    // 0 means not measured, or no retransmission.
    for (name, help, ns) in [
        ("rtt_seconds", "Smoothed round trip.", p.srtt_ns),
        ("rtt_min_seconds", "Smallest round trip.", p.rtt_min_ns),
        ("rtt_deviation_seconds", "Mean deviation of the round trip.", p.rtt_var_ns),
        ("rto_seconds", "Retransmission timeout.", p.rto_ns),
    ] {
        if ns > 0 {
            page.gauge(&format!("session_{name}"), help, of, seconds(ns));
        }
    }
    let silent = "Time since the peer was heard, or an operation began to wait for it.";
    for (name, help, value) in [
        ("in_flight_packets", "Packets in flight.", p.in_flight as f64),
        ("window_packets", "Packets that may be in flight.", p.window as f64),
        ("credits", "Units of 256 bytes that the peer has promised memory for.", p.credits as f64),
        ("frame_max_bytes", "Longest frame, after the Ethernet header.", p.frame_max as f64),
        ("age_seconds", "Time since the session began.", seconds(p.age_ns)),
        ("silent_seconds", silent, seconds(p.silent_ns)),
    ] {
        page.gauge(&format!("session_{name}"), help, of, value);
    }
}

fn switch(page: &mut Page, s: &SwitchSnapshot) {
    let of = [
        ("pid", s.pid.to_string()),
        ("port", s.port_name.clone()),
        ("address", s.station.to_string()),
    ];
    let help = "1, with the segment of a switch's stations.";
    page.gauge("switch_info", help, &with(&of, "segment", &s.segment), 1.0);
    let help = "When the switch started, since 1970.";
    page.gauge("switch_start_time_seconds", help, &of, seconds(s.opened_ns));
    let help = "When the switch turned last, since 1970, to a fifth of a second.";
    page.gauge("switch_last_turn_timestamp_seconds", help, &of, seconds(s.updated_ns));
    page.gauge("switch_stations", "Stations that are here.", &of, s.stations.len() as f64);
    let help = "Stations of builds with another segment layout: their frames pass a socket.";
    let relayed = s.stations.iter().filter(|t| t.is_relayed).count();
    page.gauge("switch_relayed_stations", help, &of, relayed as f64);
    for &(name, value) in &s.counters {
        match name {
            "to_nic" | "from_nic" | "between" => {
                let help = "Frames forwarded, by where they went.";
                let of = with(&of, "direction", name);
                page.counter("switch_forwarded_frames", help, &of, value);
            }
            _ => {
                let help = "Frames dropped, by cause.";
                page.counter("switch_dropped_frames", help, &with(&of, "cause", name), value);
            }
        }
    }
    for &(name, value) in &s.nic {
        page.counter(&format!("switch_nic_{name}"), &port_help(name), &of, value);
    }
    for t in once(&s.stations, |t| (t.station, t.pid)) {
        let of = with(&with(&of, "station", t.station), "station_pid", t.pid);
        station(page, &of, t);
    }
}

fn station(page: &mut Page, of: &[Label], t: &StationRow) {
    for (name, help, value) in [
        ("sent_frames", "Frames of a station that were taken.", t.sent),
        ("sent_bytes", "Bytes of a station, with what its ring puts around them.", t.sent_bytes),
        ("received_frames", "Frames to a station that it got.", t.received),
        (
            "received_bytes",
            "Bytes to a station, with what its ring puts around them.",
            t.received_bytes,
        ),
    ] {
        page.counter(&format!("switch_station_{name}"), help, of, value);
    }
    for (cause, value) in [("full", t.full), ("spoofed", t.spoofed), ("malformed", t.malformed)] {
        let help = "Frames of a station, or to one whose ring was full, that were dropped.";
        page.counter("switch_station_dropped_frames", help, &with(of, "cause", cause), value);
    }
}

/// Help text of a port counter.
fn port_help(name: &str) -> String {
    let (near, name) = match name.strip_prefix("near_") {
        Some(name) => (" Of these, to and from near peers.", name),
        None => ("", name),
    };
    let help = match name {
        "rx_frames" => "Frames received.",
        "rx_bytes" => "Bytes of frames received.",
        "tx_frames" => "Frames sent.",
        "tx_bytes" => "Bytes of frames sent.",
        "tx_full" => "Frames that had to wait because the port was full.",
        "tx_no_route" => "Frames to an unknown address.",
        "rx_dropped" => "Received frames that the port dropped.",
        "tx_dropped" => "Frames that were accepted and lost before they left.",
        _ => "",
    };
    format!("{help}{near}")
}

/// Help text of a node counter.
fn node_help(name: &str) -> &'static str {
    match name {
        "rx_frames" => "Frames given to the node.",
        "rx_not_ours" => "Frames for another station.",
        "rx_no_crc" => "Frames without the checksum that this node demands.",
        "rx_not_near" => "Frames of a near session that came by the wire.",
        "rx_clear" => "Frames that are not sealed, where there is a key.",
        "rx_forged" => "Sealed frames of a sender without the key, or damaged on the way.",
        "rx_replayed" => "Sealed frames that came twice, or too late to tell.",
        "rx_cert_time" => "Certificates of peers that have expired or are not valid yet.",
        "rx_cert_issuer" => {
            "Certificates of peers that lead to none of the roots, or may not be used for this."
        }
        "rx_cert_name" => "Certificates of peers with a name that is not accepted.",
        "rx_cert_signature" => "Certificates of peers whose signature is not by their key.",
        "rx_cert_malformed" => "Certificates of peers that cannot be read.",
        "rx_cert_limited" => "OPENs whose certificates were not checked, because of the limit.",
        "rx_no_session" => "Packets for a session that does not exist.",
        "rx_bad_ack" => "Packets that acknowledge what was never sent.",
        "rx_duplicate" => "Packets and messages to groups that had arrived before.",
        "rx_out_of_window" => "Packets beyond the receive window.",
        "rx_no_buffer" => "Packets that came early and were dropped for lack of a buffer.",
        "rx_refused" => "Packets refused with a NACK.",
        "rx_no_endpoint" => "Messages to an endpoint that does not exist.",
        "rx_stray" => "Segments that belong to no operation.",
        "rx_bad_key" => {
            "One-sided packets whose key no region has, or one that was for a single operation, of \
             another."
        }
        "rx_bad_access" => "One-sided packets that the region or the endpoint does not allow.",
        "rx_bad_atomic" => "Atomic packets with an invalid operation, type or alignment.",
        "rx_bad_rst" => "RST packets that match no session here.",
        "rx_bad_open" => "OPEN packets refused or ignored.",
        "rx_open_limited" => "OPEN packets above the limit for senders that prove nothing.",
        "rx_unnamed" => "OPEN packets that named no incarnation.",
        "rx_who" => "Queries for a service at a host.",
        "rx_here_stray" => "Answers to queries that were not made.",
        "rx_mcast" => "Messages to multicast groups received by an endpoint here.",
        "rx_mcast_dropped" => "Messages to multicast groups dropped: no receive was posted.",
        "rx_mcast_other" => "Messages to multicast groups that no endpoint here is in.",
        "rx_not_inserted" => "Packets of a sender that is not in the address vector.",
        "rx_marked" => "Frames that arrived with a congestion mark (ECN).",
        "rx_echoes" => "Acknowledgements that echoed such a mark to this node.",
        "tx_frames" => "Frames handed to the port.",
        "tx_retransmits" => "Packets sent again.",
        "tx_acks" => "Acknowledgements in packets of their own.",
        "tx_echoes" => "Acknowledgements that echoed a congestion mark.",
        "tx_probes" => "Probes of a peer that is silent.",
        "tx_asks" => "Requests for an acknowledgement after the last packets of a burst.",
        "tx_replies_limited" => "Replies to unknown senders that the limit held back.",
        "tx_here" => "Answers to queries for a service.",
        "tx_mcast" => "Messages sent to multicast groups.",
        "tx_challenges" => "Unknown senders asked to prove that they receive.",
        "msgs_sent" => "Messages sent.",
        "msgs_received" => "Messages received into the application's memory.",
        "msgs_unexpected" => "Messages that came before their receive.",
        "rma_done" => "One-sided operations of this node that succeeded.",
        "rma_executed" => "One-sided operations of peers that were executed here.",
        "rx_coll_unknown" => "Messages of collectives of an unknown kind.",
        "colls_done" => "Collectives that succeeded.",
        "colls_shared" => "Collectives that went through the memory of a segment.",
        "sessions_opened" => "Sessions opened.",
        "sessions_dead" => "Sessions that ended because the peer was silent.",
        "sessions_reset" => "Sessions that the peer ended.",
        "sessions_stuck" => "Sessions that ended because nothing got through to the peer.",
        "timeouts" => "Retransmission timeouts.",
        _ => "",
    }
}

/// Path to a peer: shared memory of this node, or the wire.
pub(crate) fn path(s: &SessionRow) -> &'static str {
    match s.state {
        "idle" => "-",
        _ if s.is_near => "near",
        _ => "far",
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use prometheus_parse::{Sample, Scrape, Value};

    use super::*;
    use crate::sample;

    const TRIPS: &str = "barewire_node_round_trip_seconds";

    fn all() -> Published {
        Published {
            domains: vec![sample::domain(12, 2_000_000_000), sample::domain(13, 2_000_000_000)],
            switches: vec![sample::switch(14, 3_500_000_000)],
            unread: Vec::new(),
        }
    }

    fn scrape(page: &str) -> Scrape {
        Scrape::parse(page.lines().map(|line| Ok(line.to_owned()))).unwrap()
    }

    fn labels(sample: &Sample) -> Vec<(String, String)> {
        let mut all: Vec<_> = sample.labels.iter().map(|(n, v)| (n.clone(), v.clone())).collect();
        all.sort();
        all
    }

    /// Goal: names are what the conventions say, each has its help, no series stands there twice,
    /// and all of a family have the same labels.
    #[test]
    fn a_page_keeps_the_conventions() {
        let page = page(&all(), true).unwrap();
        let (mut seen, mut names) = (BTreeSet::new(), std::collections::BTreeMap::new());
        for sample in &scrape(&page).samples {
            // Of a histogram these have no help of their own.
            let name = &sample.metric;
            if name == &format!("{TRIPS}_sum") || name == &format!("{TRIPS}_count") {
                continue;
            }
            let labels = labels(sample);
            assert!(seen.insert((name.clone(), labels.clone())), "twice: {name} {labels:?}");
            let keys: Vec<_> = labels.into_iter().map(|(key, _)| key).collect();
            assert_eq!(names.entry(name.clone()).or_insert(keys.clone()), &keys, "{name}");
            let is_counter = matches!(sample.value, Value::Counter(_));
            assert_eq!(name.ends_with("_total"), is_counter, "{name}");
            let is_other = matches!(sample.value, Value::Gauge(_) | Value::Histogram(_));
            assert!(is_counter || is_other, "{name}");
            assert!(name.starts_with("barewire_") && !name.contains("_ns"), "{name}");
            let help = format!("# HELP {name} ");
            let line = page.lines().find(|line| line.starts_with(&help)).expect(name);
            assert!(line.len() > help.len() + 5 && line.ends_with('.'), "{line}");
        }
        assert!(names.len() > 90, "{}", names.len());
    }

    /// Goal: no series stands on a page twice, whatever is read. Method: two sessions with a peer,
    /// and rows of everything that are there twice; the newer session is the one that is told.
    #[test]
    fn a_series_is_on_a_page_once() {
        let mut all = all();
        let s = &mut all.domains[0];
        let row = SessionRow { age_ns: 5, tx_packets: 77, ..s.sessions[0] };
        s.sessions.insert(0, SessionRow { age_ns: 9, tx_packets: 66, ..row });
        s.sessions.push(row);
        s.endpoints.push(s.endpoints[0]);
        let again = all.domains[0].clone();
        all.domains.push(again);
        let stations = &mut all.switches[0].stations;
        stations.extend(stations.clone());
        let again = all.switches[0].clone();
        all.switches.push(again);
        let page = page(&all, true).unwrap();
        let mut seen = BTreeSet::new();
        let series = page.lines().filter(|line| !line.starts_with('#'));
        for series in series.filter_map(|line| line.rsplit_once(' ')) {
            assert!(seen.insert(series.0), "twice: {}", series.0);
        }
        let sent = page.lines().find(|line| {
            line.starts_with("barewire_session_tx_packets_total{") && line.contains("pid=\"12\"")
        });
        assert!(sent.unwrap().ends_with(" 77"), "{sent:?}");
    }

    /// Goal: what is exported is what was read, in the units of its name.
    #[test]
    fn a_page_has_what_was_published() {
        let page = scrape(&page(&all(), true).unwrap());
        let value = |name: &str, labels: &[(&str, &str)]| {
            let fits = |s: &&Sample| labels.iter().all(|(k, v)| s.labels.get(k) == Some(*v));
            let found = page.samples.iter().find(|s| s.metric == name && fits(s));
            match found.unwrap_or_else(|| panic!("{name}")).value {
                Value::Counter(value) | Value::Gauge(value) => value,
                ref other => panic!("{other:?}"),
            }
        };
        let of = [("pid", "13"), ("port", "afpacket:eth0"), ("address", "02:00:00:00:00:01")];
        assert_eq!(value("barewire_port_tx_frames_total", &of), 1002.0);
        assert_eq!(value("barewire_node_tx_retransmits_total", &of), 2037.0);
        assert_eq!(value("barewire_domain_last_poll_timestamp_seconds", &of), 2.0);
        assert_eq!(value("barewire_session_rtt_seconds", &[("peer", "02:00:00:00:00:09")]), 1.5e-6);
        assert_eq!(value("barewire_session_waiting_operations", &[("cause", "credit")]), 2.0);
        assert_eq!(value("barewire_waiting_operations", &[("cause", "credit")]), 2.0);
        assert_eq!(value("barewire_waiting_operations", &[("cause", "window")]), 0.0);
        assert_eq!(value("barewire_sessions", &[("state", "open")]), 1.0);
        assert_eq!(value("barewire_switch_last_turn_timestamp_seconds", &[("pid", "14")]), 3.5);
        assert_eq!(value("barewire_switch_relayed_stations", &[("pid", "14")]), 1.0);
        let full = [("cause", "full"), ("station_pid", "12")];
        assert_eq!(value("barewire_switch_station_dropped_frames_total", &full), 3.0);
        assert_eq!(value("barewire_unread_processes", &[]), 0.0);
        let trips = page.samples.iter().find(|s| s.metric == TRIPS);
        let Value::Histogram(buckets) = &trips.unwrap().value else { panic!("{trips:?}") };
        let (first, last) = (&buckets[0], &buckets[buckets.len() - 1]);
        assert_eq!((first.less_than, first.count), (512e-9, (0..8).sum::<u64>() as f64));
        assert_eq!(last.count, (0..RoundTrips::COUNT as u64).sum::<u64>() as f64);
        assert!(last.less_than.is_infinite());
    }

    /// Goal: the page of counters has each that is published, with the words of its help.
    #[test]
    fn every_counter_is_in_its_page() {
        let text = include_str!("../../docs/observe.md");
        let domain = sample::domain(12, 0);
        let port = domain.port.iter().map(|(name, _)| (*name, port_help(name)));
        let port = port.filter(|(name, _)| !name.starts_with("near_"));
        let node = domain.node.iter().map(|(name, _)| (*name, node_help(name).to_owned()));
        for (name, help) in port.chain(node).filter(|(name, _)| *name != "peers") {
            let row = format!("| `{name}` | {help} |");
            assert!(text.contains(&row), "docs/observe.md has no row {row}");
        }
    }

    #[test]
    fn sessions_may_be_left_out() {
        let page = page(&all(), false).unwrap();
        assert!(!page.contains("peer=") && page.contains("barewire_sessions{"));
    }

    /// Goal: a name that means something to the format does not break a page.
    #[test]
    fn a_strange_name_is_escaped() {
        let mut all = all();
        all.domains[0].port_name = "pcap(file=a\"b\\c\nd):shm".to_owned();
        let page = page(&all, true).unwrap();
        assert!(page.contains(r#"port="pcap(file=a\"b\\c\nd):shm""#), "{page}");
        assert!(page.lines().all(|line| line.starts_with(['#', 'b'])));
    }

    /// The words of `text` that `part` makes up.
    fn words(text: &str, part: fn(char) -> bool) -> impl Iterator<Item = &str> {
        text.split(move |c| !part(c)).filter(|word| !word.is_empty())
    }

    /// What stands between `open` and `close`, wherever they do.
    fn between<'a>(text: &'a str, open: &str, close: &str) -> Vec<&'a str> {
        let parts = text.split(open).skip(1);
        parts.filter_map(|part| part.split_once(close)).map(|(inside, _)| inside).collect()
    }

    /// Goal: the dashboard asks for what is exported, by labels that it has. Method: every name in
    /// its expressions, every label that they sum by or that a legend shows.
    #[test]
    fn the_dashboard_names_what_is_exported() {
        let page = scrape(&page(&all(), true).unwrap());
        let text = include_str!("../grafana/barewire.json");
        let dashboard: serde_json::Value = serde_json::from_str(text).unwrap();
        let panels = dashboard["panels"].as_array().unwrap();
        let targets = panels.iter().filter_map(|panel| panel["targets"].as_array()).flatten();
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let mut asked = 0;
        for target in targets {
            let expr = target["expr"].as_str().unwrap();
            let mut labels: BTreeSet<&str> = ["instance", "le"].into();
            for name in words(expr, is_name).filter(|name| name.starts_with("barewire_")) {
                let family = name.strip_suffix("_bucket").unwrap_or(name);
                let sample = page.samples.iter().find(|s| s.metric == family);
                labels
                    .extend(sample.unwrap_or_else(|| panic!("{name}")).labels.keys().map(|k| &**k));
                asked += 1;
            }
            let by = between(expr, "by (", ")").into_iter().flat_map(|by| words(by, is_name));
            let shown = between(target["legendFormat"].as_str().unwrap(), "{{", "}}");
            let wanted: Vec<&str> = by.chain(shown).collect();
            assert!(wanted.iter().all(|label| labels.contains(label)), "{expr}: {wanted:?}");
        }
        assert!(asked > 30, "{asked}");
    }
}
