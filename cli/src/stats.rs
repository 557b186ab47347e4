//! `barewire stats`: counters of running processes, from the memory that they publish.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use barewire::stats::switch::{StationRow, SwitchSnapshot};
use barewire::stats::{Published, SessionRow, Snapshot, read_published};
use barewire_dataplane::node::Claim;
use barewire_driver::backend::udp;
use barewire_driver::port::Station;
use serde_json::{Map, Value, json};

use crate::fail::Fail;
use crate::metrics::path;
use crate::table::{Align, ago, bytes, layout, round_trip};
use crate::trips::Trips;
use crate::{metrics, out};

/// Shows the counters of running processes, per port, session and endpoint, and of switches
///
/// Every domain publishes its counters in a file that only its user can read, about 100 times a
/// second while its progress loop runs; a `barewire switch` does so five times a second. Reading
/// them costs the process nothing. Root sees those of all users.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  success, also if no process runs
  1  the counters cannot be read

Examples:
  barewire stats                 once
  barewire stats --watch         every second, with rates; Ctrl-C ends it
  barewire stats --pid 4711      of one process
  barewire stats --sort repeated sessions with the most retransmitted packets first
  barewire stats --peer 02:00:00:00:00:09
                                 one session of each domain that has one with this station
  barewire stats --waiting       sessions in which something waits, and for what
  barewire stats --round-trips 10
                                 quantiles and a histogram of ten seconds; none over shm, where
                                 packets are not acknowledged one by one
  barewire stats --prometheus    in the text format of Prometheus: barewire exporter --help
  barewire stats --json          one JSON object per line: all counters of a domain or switch

What a session waits for:
  open         an answer to OPEN           silent       anything: nothing has come for T_dead / 10
  repeats      the oldest packet, lost repeatedly although the peer answers: barewire ping
  port         room in the port            window       acknowledgements, the window is full
  credit       memory of the peer          memory       memory here, for the peer's messages
  match        a receive of the peer       pull         data from the peer
  pull window  data from other peers       answer       an acknowledgement on its way

Bytes count whole frames; `-` where they are not counted. Over shm they include the padding of the
ring, and count from when the two processes connected until one of them ends.
`near` is a peer of this node, reached through memory, `far` any other.
`not polled for 73 s` after the name of a domain: its process has not called the library.

Environment:
  BAREWIRE_STATS  0 in the environment of a process: it publishes nothing")]
pub(crate) struct StatsArgs {
    /// Prints again every second, with rates.
    #[arg(long)]
    watch: bool,
    /// Seconds between updates of --watch, 0.1 to 3600.
    #[arg(long, default_value_t = 1.0, requires = "watch")]
    interval: f64,
    /// Only domains and switches of this process.
    #[arg(long)]
    pid: Option<u32>,
    /// Only sessions with this station: MAC[.NUMBER], or IP:PORT of a udp port.
    #[arg(long, value_name = "ADDR", value_parser = station)]
    peer: Option<Station>,
    /// Only sessions in which an operation waits.
    #[arg(long)]
    waiting: bool,
    /// Sorts the sessions by this column, the largest first.
    #[arg(long, value_name = "COLUMN")]
    sort: Option<SortBy>,
    /// Prints the distribution of round trip times to far peers over the next SECONDS.
    #[arg(long, value_name = "SECONDS", conflicts_with_all = ["watch", "prometheus"])]
    round_trips: Option<f64>,
    /// Prints one JSON object per line.
    #[arg(long)]
    json: bool,
    /// Prints the text exposition format of Prometheus.
    #[arg(long, conflicts_with_all = ["json", "watch"])]
    prometheus: bool,
    /// Omits the counters of each session.
    #[arg(long, requires = "prometheus")]
    no_sessions: bool,
    /// Also prints counters that are 0.
    #[arg(long)]
    all: bool,
}

/// A column of the table of sessions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum SortBy {
    /// Operations that wait for the peer.
    Waiting,
    /// Packets sent.
    TxPackets,
    /// Packets received.
    RxPackets,
    /// Bytes sent.
    TxBytes,
    /// Bytes received.
    RxBytes,
    /// Packets retransmitted.
    Repeated,
    /// Retransmission timeouts.
    Timeouts,
    /// Smallest round trip.
    RttMin,
    /// Smoothed round trip.
    Rtt,
    /// Retransmission timeout.
    Rto,
    /// Packets in flight.
    InFlight,
    /// Time since the last frame from the peer.
    Heard,
    /// Age of the session.
    Age,
}

impl SortBy {
    fn key(self, s: &SessionRow) -> u64 {
        match self {
            Self::Waiting => s.waiting,
            Self::TxPackets => s.tx_packets,
            Self::RxPackets => s.rx_packets,
            Self::TxBytes => s.tx_bytes.unwrap_or(0),
            Self::RxBytes => s.rx_bytes.unwrap_or(0),
            Self::Repeated => s.retransmits,
            Self::Timeouts => s.timeouts,
            Self::RttMin => s.rtt_min_ns,
            Self::Rtt => s.srtt_ns,
            Self::Rto => s.rto_ns,
            Self::InFlight => s.in_flight,
            Self::Heard => s.silent_ns,
            Self::Age => s.age_ns,
        }
    }
}

/// Parses a station as the user names it.
///
/// # Errors
/// The expected forms.
pub(crate) fn station(text: &str) -> Result<Station, String> {
    if let Ok(addr) = text.parse::<std::net::SocketAddr>() {
        let range = udp::PORTS;
        return udp::Prefix::of(addr.ip())
            .mac_of(addr)
            .map(Station::from)
            .ok_or_else(|| format!("a udp port is one of {} to {}", range.start(), range.end()));
    }
    let station: Station = text
        .parse()
        .map_err(|_| "expected MAC[.NUMBER] as 02:00:00:00:00:09, or IP:PORT".to_owned())?;
    let named = !station.is_group() && station != Station::default();
    if named { Ok(station) } else { Err("a group address or zero is no station".to_owned()) }
}

/// Prints the counters once or, with `--watch`, until interrupted.
///
/// # Errors
/// The directory of the files cannot be read.
pub(crate) fn run(args: &StatsArgs) -> Result<ExitCode, Fail> {
    if !(0.1..=3600.0).contains(&args.interval) {
        return Err(Fail::usage("--interval: expected 0.1 to 3600 seconds"));
    }
    if let Some(seconds) = args.round_trips {
        return round_trips(args, seconds);
    }
    let mut before = BTreeMap::new();
    let mut all = published(args.pid)?;
    tell_unread(&all);
    loop {
        all.domains.iter_mut().for_each(|s| select(args, s));
        show(args, &all, &before)?;
        if !args.watch {
            return Ok(ExitCode::SUCCESS);
        }
        before = all.domains.into_iter().map(|s| (s.path.clone(), s)).collect();
        std::thread::sleep(Duration::from_secs_f64(args.interval));
        all = published(args.pid)?;
    }
}

/// Prints the distribution of the round trips of the next `seconds`.
fn round_trips(args: &StatsArgs, seconds: f64) -> Result<ExitCode, Fail> {
    if !(0.1..=3600.0).contains(&seconds) {
        return Err(Fail::usage("--round-trips: expected 0.1 to 3600 seconds"));
    }
    let before = published(args.pid)?;
    tell_unread(&before);
    std::thread::sleep(Duration::from_secs_f64(seconds));
    let now = published(args.pid)?.domains;
    let was_open = |now: &Snapshot| before.domains.iter().any(|s| s.path == now.path);
    if !args.json && !now.iter().any(was_open) {
        return no_domain(args).map(|()| ExitCode::SUCCESS);
    }
    for now in &now {
        let Some(before) = before.domains.iter().find(|s| s.path == now.path) else { continue };
        let trips = Trips::between(before, now);
        match args.json {
            true => out::json(&trips.object(now, seconds))?,
            false => out::print(trips.text(now, seconds))?,
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Prints that there is nothing to show.
fn no_domain(args: &StatsArgs) -> Result<(), Fail> {
    let whose = args.pid.map_or_else(String::new, |pid| format!(" of process {pid}"));
    out::print(format_args!("no domain{whose} is open\n"))
}

/// Selects and sorts the sessions as the options say.
fn select(args: &StatsArgs, s: &mut Snapshot) {
    if let Some(peer) = args.peer {
        s.sessions.retain(|row| row.station == peer);
    }
    if args.waiting {
        s.sessions.retain(|row| row.waiting > 0);
    }
    if let Some(by) = args.sort {
        s.sessions.sort_by_key(|row| std::cmp::Reverse(by.key(row)));
    }
}

type Before = BTreeMap<std::path::PathBuf, Snapshot>;

/// The statistics of all live processes, or of one process.
///
/// # Errors
/// The directory of the files cannot be read.
pub(crate) fn published(pid: Option<u32>) -> Result<Published, Fail> {
    let mut all = read_published().map_err(|why| {
        Fail::new(format!("{}: {why}", barewire::stats::DIR)).mend("barewire doctor says more")
    })?;
    // Files of dead processes are ignored; the next domain that opens removes them.
    let wanted = |alive: bool, of: u32| alive && pid.is_none_or(|pid| of == pid);
    all.domains.retain(|s| wanted(s.alive, s.pid));
    all.switches.retain(|s| wanted(s.alive, s.pid));
    all.unread.retain(|u| wanted(true, u.pid));
    Ok(all)
}

/// Prints to standard error which running processes cannot be read.
pub(crate) fn tell_unread(all: &Published) {
    for unread in &all.unread {
        let (pid, why) = (unread.pid, &unread.why);
        eprintln!("barewire: process {pid} publishes {why}; use the command of its version");
    }
}

fn show(args: &StatsArgs, all: &Published, before: &Before) -> Result<(), Fail> {
    if args.prometheus {
        return out::print(metrics::page(all, !args.no_sessions)?);
    }
    if args.json {
        all.domains.iter().try_for_each(|s| out::json(&object(s)))?;
        return all.switches.iter().try_for_each(|s| out::json(&switch_object(s)));
    }
    if all.domains.is_empty() && all.switches.is_empty() {
        return no_domain(args);
    }
    for switch in &all.switches {
        out::print(switch_text(switch, args.all))?;
    }
    for snapshot in &all.domains {
        out::print(text(snapshot, before.get(&snapshot.path), args.all))?;
    }
    Ok(())
}

fn map(pairs: &[(&'static str, u64)]) -> Value {
    let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), json!(value)));
    Value::Object(pairs.collect::<Map<_, _>>())
}

/// All statistics of a switch as JSON.
fn switch_object(s: &SwitchSnapshot) -> Value {
    let stations: Vec<Value> = s
        .stations
        .iter()
        .map(|t| {
            json!({
                "mac": t.station.to_string(), "pid": t.pid, "uid": t.uid,
                "sent": t.sent, "sent_bytes": t.sent_bytes,
                "received": t.received, "received_bytes": t.received_bytes,
                "full": t.full, "spoofed": t.spoofed, "malformed": t.malformed,
                "relayed": t.is_relayed,
            })
        })
        .collect();
    json!({
        "kind": "switch", "pid": s.pid, "port": s.port_name, "mac": s.station.to_string(),
        "mtu": s.mtu, "segment": s.segment,
        "opened_ns": s.opened_ns, "updated_ns": s.updated_ns,
        "frames": map(&s.counters), "nic_counters": map(&s.nic), "stations": stations,
    })
}

/// All statistics of a domain as JSON.
fn object(s: &Snapshot) -> Value {
    let endpoints: Vec<Value> = s
        .endpoints
        .iter()
        .map(|e| {
            json!({
                "number": e.number, "sent": e.sent, "sent_bytes": e.sent_bytes,
                "received": e.received, "received_bytes": e.received_bytes,
                "errors": e.errors, "unexpected": e.unexpected, "posted": e.posted,
            })
        })
        .collect();
    let sessions: Vec<Value> = s
        .sessions
        .iter()
        .map(|p| {
            json!({
                "peer": p.station.to_string(), "incarnation": format!("{:012x}", p.incarnation),
                "state": p.state, "in_flight": p.in_flight, "srtt_ns": p.srtt_ns,
                "credits": p.credits, "waiting": p.waiting, "waits_for": p.wait,
                "rtt_min_ns": p.rtt_min_ns, "age_ns": p.age_ns, "silent_ns": p.silent_ns,
                "tx_packets": p.tx_packets, "rx_packets": p.rx_packets,
                "tx_bytes": p.tx_bytes, "rx_bytes": p.rx_bytes,
                "retransmits": p.retransmits, "timeouts": p.timeouts,
                "window": p.window, "frame_max": p.frame_max,
                "rto_ns": p.rto_ns, "rtt_var_ns": p.rtt_var_ns,
                "path": path(p), "lossless": p.is_lossless,
            })
        })
        .collect();
    json!({
        "kind": "domain",
        "pid": s.pid, "port": s.port_name, "mac": s.station.to_string(), "mtu": s.mtu,
        "incarnation": format!("{:012x}", s.incarnation),
        "opened_ns": s.opened_ns, "updated_ns": s.updated_ns, "polled_ns": s.polled_ns,
        "t_dead_ns": s.t_dead_ns,
        "port_counters": map(&s.port), "node_counters": map(&s.node),
        "round_trips_n": s.round_trips.iter().sum::<u64>(), "round_trips_ns": s.round_trips_ns,
        "refused": map(&s.refused), "levels": map(&s.levels),
        "refused_seals": s.claims.iter().map(claim_object).collect::<Vec<_>>(),
        "endpoints": endpoints, "sessions": sessions,
    })
}

/// The text of a switch: counters of 0 are left out, unless `all`.
fn switch_text(s: &SwitchSnapshot, all: bool) -> String {
    let mut text = format!("switch, process {}, {} at {}", s.pid, s.port_name, s.station);
    let age = since_1970_ns().saturating_sub(s.updated_ns);
    if age > 1_000_000_000 {
        text.push_str(&format!(", not turned for {:.0} s", age as f64 / 1e9));
    }
    text.push('\n');
    let parts = [("frames", &s.counters), ("nic", &s.nic)];
    let counters = parts.iter().flat_map(|(part, of)| of.iter().map(move |c| (part, c)));
    let rows: Vec<Vec<String>> = counters
        .filter(|(_, (_, value))| all || *value > 0)
        .map(|(part, (name, value))| {
            vec![format!("  {part}"), (*name).to_owned(), value.to_string()]
        })
        .collect();
    let head = [("  of", Align::Left), ("counter", Align::Left), ("value", Align::Right)];
    if !rows.is_empty() {
        text.push_str(&layout(&head, &rows));
    }
    text.push_str(&stations(s));
    text
}

fn stations(s: &SwitchSnapshot) -> String {
    let right = |name| (name, Align::Right);
    let head = [
        ("  station", Align::Left),
        right("process"),
        right("user"),
        ("by", Align::Left),
        right("sent"),
        right("bytes"),
        right("received"),
        right("bytes"),
        right("full"),
        right("spoofed"),
        right("malformed"),
    ];
    let row = |t: &StationRow| {
        vec![
            format!("  {}", t.station),
            t.pid.to_string(),
            t.uid.to_string(),
            if t.is_relayed { "socket" } else { "memory" }.to_owned(),
            t.sent.to_string(),
            bytes(t.sent_bytes),
            t.received.to_string(),
            bytes(t.received_bytes),
            t.full.to_string(),
            t.spoofed.to_string(),
            t.malformed.to_string(),
        ]
    };
    let rows: Vec<Vec<String>> = s.stations.iter().map(row).collect();
    if rows.is_empty() { String::new() } else { layout(&head, &rows) }
}

/// The text of a domain: counters of 0 are left out, unless `all`.
fn text(s: &Snapshot, before: Option<&Snapshot>, all: bool) -> String {
    let age = since_1970_ns().saturating_sub(s.polled_ns);
    let mut text = format!("process {}, {} at {}", s.pid, s.port_name, s.station);
    if age > 1_000_000_000 {
        // With manual progress only reads turn the loop: a computing program is no error, but its
        // peers wait for it.
        text.push_str(&format!(", not polled for {:.0} s", age as f64 / 1e9));
    }
    text.push('\n');
    let seconds = before.map(|b| s.updated_ns.saturating_sub(b.updated_ns) as f64 / 1e9);
    let parts: [(&str, &Counters, Option<&Counters>); 4] = [
        ("port", &s.port, before.map(|b| &b.port)),
        ("node", &s.node, before.map(|b| &b.node)),
        ("refused", &s.refused, before.map(|b| &b.refused)),
        // Levels are gauges: they have no rate.
        ("in use", &s.levels, None),
    ];
    let mut rows = Vec::new();
    for (part, counters, earlier) in parts {
        for (i, &(name, value)) in counters.iter().enumerate() {
            if value == 0 && !all {
                continue;
            }
            let mut row = vec![format!("  {part}"), name.to_owned(), value.to_string()];
            let earlier = earlier.and_then(|e| e.get(i)).map(|(_, value)| *value);
            if let (Some(earlier), Some(seconds)) = (earlier, seconds.filter(|s| *s > 0.0)) {
                row.push(format!("{:.0}/s", value.saturating_sub(earlier) as f64 / seconds));
            }
            rows.push(row);
        }
    }
    let head = [("  of", Align::Left), ("counter", Align::Left), ("value", Align::Right)];
    let rate = [("rate", Align::Right)];
    let head: Vec<_> = head.into_iter().chain(before.map(|_| rate[0])).collect();
    text.push_str(&layout(&head, &rows));
    text.push_str(&claims(s));
    text.push_str(&endpoints(s));
    text.push_str(&sessions(s));
    text
}

type Counters = Vec<(&'static str, u64)>;

/// Claimed sources of refused frames.
fn claims(s: &Snapshot) -> String {
    let right = |name| (name, Align::Right);
    let head = [
        ("  refused, claims to be", Align::Left),
        right("forged"),
        right("clear"),
        right("replayed"),
        right("certificate"),
        right("or others"),
    ];
    let row = |claim: &Claim| {
        let counts = claim.counts.iter().chain([&claim.others]).map(u64::to_string);
        std::iter::once(format!("  {}", claim.station)).chain(counts).collect()
    };
    let rows: Vec<Vec<String>> = s.claims.iter().map(row).collect();
    if rows.is_empty() { String::new() } else { layout(&head, &rows) }
}

/// Claimed sources of refused frames, as JSON.
fn claim_object(claim: &Claim) -> Value {
    let [forged, clear, replayed, certificate] = claim.counts;
    json!({
        "claims_to_be": claim.station.to_string(), "forged": forged, "clear": clear,
        "replayed": replayed, "certificate": certificate, "others": claim.others,
    })
}

fn endpoints(s: &Snapshot) -> String {
    let right = |name| (name, Align::Right);
    let head = [
        ("  endpoint", Align::Left),
        right("sent"),
        right("bytes"),
        right("received"),
        right("bytes"),
        right("errors"),
        right("unexpected"),
        right("posted"),
    ];
    let rows: Vec<Vec<String>> = s
        .endpoints
        .iter()
        .map(|e| {
            vec![
                format!("  {}", e.number),
                e.sent.to_string(),
                bytes(e.sent_bytes),
                e.received.to_string(),
                bytes(e.received_bytes),
                e.errors.to_string(),
                e.unexpected.to_string(),
                e.posted.to_string(),
            ]
        })
        .collect();
    if rows.is_empty() { String::new() } else { layout(&head, &rows) }
}

fn sessions(s: &Snapshot) -> String {
    let right = |name| (name, Align::Right);
    let head = [
        ("  session with", Align::Left),
        ("state", Align::Left),
        ("path", Align::Left),
        right("waiting"),
        ("for", Align::Left),
        right("tx packets"),
        right("bytes"),
        right("rx packets"),
        right("bytes"),
        right("repeated"),
        right("timeouts"),
        right("rtt min"),
        right("rtt"),
        right("rto"),
        right("in flight"),
        right("window"),
        right("credits"),
        right("frame"),
        right("heard"),
    ];
    let rows: Vec<Vec<String>> = s
        .sessions
        .iter()
        .map(|p| {
            vec![
                format!("  {}", p.station),
                p.state.to_owned(),
                path(p).to_owned(),
                p.waiting.to_string(),
                p.wait.to_owned(),
                p.tx_packets.to_string(),
                p.tx_bytes.map_or("-".to_owned(), bytes),
                p.rx_packets.to_string(),
                p.rx_bytes.map_or("-".to_owned(), bytes),
                p.retransmits.to_string(),
                p.timeouts.to_string(),
                round_trip(p.rtt_min_ns),
                round_trip(p.srtt_ns),
                round_trip(p.rto_ns),
                p.in_flight.to_string(),
                p.window.to_string(),
                p.credits.to_string(),
                p.frame_max.to_string(),
                ago(p.silent_ns),
            ]
        })
        .collect();
    if rows.is_empty() { String::new() } else { layout(&head, &rows) }
}

pub(crate) fn since_1970_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample;

    fn snapshot(tx_frames: u64, updated_ns: u64) -> Snapshot {
        Snapshot {
            port_name: "shm:default".to_owned(),
            port: vec![("tx_frames", tx_frames), ("tx_full", 0)],
            node: vec![("msgs_sent", 7)],
            refused: vec![("crc", 0)],
            levels: vec![("posted", 2)],
            ..sample::domain(12, updated_ns)
        }
    }

    #[test]
    fn a_domain_is_a_header_counters_endpoints_and_sessions() {
        let now = snapshot(100, since_1970_ns());
        let shown = text(&now, None, false);
        assert!(shown.starts_with("process 12, shm:default at 02:00:00:00:00:01\n"), "{shown}");
        assert!(shown.contains("tx_frames") && !shown.contains("tx_full"), "{shown}");
        assert!(shown.contains("02:00:00:00:00:09  open   far "), "{shown}");
        let claim = shown.lines().find(|line| line.contains("02:00:00:00:00:06")).unwrap();
        let claim = claim.split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(claim, "02:00:00:00:00:06 41 42 43 44 45");
        assert!(shown.contains("1.5 us") && shown.contains("4 KiB"), "{shown}");
        let row = shown.lines().last().unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(row.contains("2 credit 900 2 KiB 800 - 5 1 1.2 us 1.5 us 2000.0 us 1"), "{row}");
        assert!(row.ends_with("32 64 1500 1.5 s"), "{row}");
        assert!(text(&now, None, true).contains("tx_full"));
    }

    #[test]
    fn a_rate_is_what_the_time_between_two_updates_added() {
        let (before, now) = (snapshot(100, 1_000_000_000), snapshot(600, 3_000_000_000));
        let shown = text(&now, Some(&before), false);
        assert!(shown.contains("250/s"), "{shown}");
        assert!(shown.contains("not polled for"), "{shown}");
        // A domain that has not been turned in between has no rate, and nothing is divided by 0.
        assert!(!text(&now, Some(&now), false).contains("/s\n"));
    }

    #[test]
    fn programs_get_everything() {
        let object = object(&snapshot(100, 2));
        assert_eq!(object["port_counters"]["tx_full"], 0);
        assert_eq!(object["refused"]["crc"], 0);
        assert_eq!(object["refused_seals"][0]["claims_to_be"], "02:00:00:00:00:06");
        assert_eq!(object["refused_seals"][0]["replayed"], 43);
        assert_eq!(object["endpoints"][0]["sent_bytes"], 4096);
        assert_eq!(object["sessions"][0]["peer"], "02:00:00:00:00:09");
        assert_eq!(object["sessions"][0]["waits_for"], "credit");
        assert_eq!(object["sessions"][0]["tx_bytes"], 2048);
        assert!(object["sessions"][0]["rx_bytes"].is_null());
    }

    #[test]
    fn sessions_are_chosen_and_sorted() {
        let mut shown = snapshot(1, 2);
        let first = shown.sessions[0];
        let station = |n| Station::at([2, 0, 0, 0, 0, n]);
        shown.sessions.push(SessionRow { station: station(8), retransmits: 9, ..first });
        shown.sessions.push(SessionRow { station: station(7), retransmits: 7, ..first });
        let args = |words: &[&str]| {
            use clap::Parser;
            #[derive(clap::Parser)]
            struct Line {
                #[command(flatten)]
                args: StatsArgs,
            }
            Line::try_parse_from(std::iter::once(&"stats").chain(words)).unwrap().args
        };
        select(&args(&["--sort", "repeated"]), &mut shown);
        let order: Vec<u64> = shown.sessions.iter().map(|s| s.retransmits).collect();
        assert_eq!(order, [9, 7, 5]);
        shown.sessions[1].waiting = 0;
        select(&args(&["--waiting"]), &mut shown);
        assert_eq!(shown.sessions.iter().map(|s| s.retransmits).collect::<Vec<_>>(), [9, 5]);
        shown.sessions[0].station = station(7);
        select(&args(&["--peer", "02:00:00:00:00:07"]), &mut shown);
        assert_eq!(shown.sessions.iter().map(|s| s.station).collect::<Vec<_>>(), [station(7)]);
    }

    #[test]
    fn a_station_is_a_mac_or_an_address_of_a_udp_port() {
        assert_eq!(station("02:00:00:00:00:07"), Ok(Station::at([2, 0, 0, 0, 0, 7])));
        let of_udp = station("10.0.0.7:52000").unwrap();
        assert_eq!(station("[2001:db8::a00:7]:52000"), Ok(of_udp));
        assert_eq!(udp::addr_of(of_udp.mac).unwrap().to_string(), "10.0.0.7:52000");
        for wrong in ["10.0.0.7:80", "ff:ff:ff:ff:ff:ff", "00:00:00:00:00:00", "somewhere"] {
            assert!(station(wrong).is_err(), "{wrong}");
        }
    }
}
