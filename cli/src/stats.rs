//! `barewire stats`: counters of running processes, from the memory that they publish.

use std::collections::BTreeMap;
use std::process::ExitCode;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use barewire::stats::{Snapshot, read_all};
use serde_json::{Map, Value, json};

use crate::fail::Fail;
use crate::out;
use crate::table::{Align, bytes, layout};

/// Shows the counters of running processes, per port, session and endpoint
///
/// Every domain publishes its counters in a file that its user alone can read, about 100 times a
/// second while somebody turns its poll loop. Reading them costs the process nothing. Root sees the
/// domains of all users.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  done, also when nothing runs
  1  the counters cannot be read

Examples:
  barewire stats                 once
  barewire stats --watch         every second, with what a second added; Ctrl-C ends it
  barewire stats --pid 4711      of one process
  barewire stats --json          one object a line: a domain with everything that it counts

Environment:
  BAREWIRE_STATS  0 in the environment of a process: it publishes nothing")]
pub(crate) struct StatsArgs {
    /// Prints again every second, with rates.
    #[arg(long)]
    watch: bool,
    /// Seconds between two prints of --watch, 0.1 to 3600.
    #[arg(long, default_value_t = 1.0, requires = "watch")]
    interval: f64,
    /// Only domains of this process.
    #[arg(long)]
    pid: Option<u32>,
    /// Prints one JSON object a line.
    #[arg(long)]
    json: bool,
    /// Prints counters that are 0 too.
    #[arg(long)]
    all: bool,
}

/// Prints the counters once or, with `--watch`, until interrupted.
///
/// # Errors
/// The directory of the files cannot be read.
pub(crate) fn run(args: &StatsArgs) -> Result<ExitCode, Fail> {
    if !(0.1..=3600.0).contains(&args.interval) {
        return Err(Fail::usage("--interval: expected 0.1 to 3600 seconds"));
    }
    let mut before = BTreeMap::new();
    loop {
        let now = snapshots(args.pid)?;
        show(args, &now, &before)?;
        if !args.watch {
            return Ok(ExitCode::SUCCESS);
        }
        before = now.into_iter().map(|s| (s.path.clone(), s)).collect();
        std::thread::sleep(Duration::from_secs_f64(args.interval));
    }
}

type Before = BTreeMap<std::path::PathBuf, Snapshot>;

fn snapshots(pid: Option<u32>) -> Result<Vec<Snapshot>, Fail> {
    let all = read_all().map_err(|why| {
        Fail::new(format!("{}: {why}", barewire::stats::DIR)).mend("barewire doctor says more")
    })?;
    // What a dead process left is nobody's; the next domain that opens removes it.
    Ok(all.into_iter().filter(|s| s.alive && pid.is_none_or(|pid| s.pid == pid)).collect())
}

fn show(args: &StatsArgs, now: &[Snapshot], before: &Before) -> Result<(), Fail> {
    if args.json {
        return now.iter().try_for_each(|s| out::json(&object(s)));
    }
    if now.is_empty() {
        let whose = args.pid.map_or_else(String::new, |pid| format!(" of process {pid}"));
        return out::print(format_args!("no domain{whose} is open\n"));
    }
    for snapshot in now {
        out::print(text(snapshot, before.get(&snapshot.path), args.all))?;
    }
    Ok(())
}

/// Everything of a domain, for programs.
fn object(s: &Snapshot) -> Value {
    let map = |pairs: &[(&'static str, u64)]| -> Value {
        let pairs = pairs.iter().map(|(name, value)| ((*name).to_owned(), json!(value)));
        Value::Object(pairs.collect::<Map<_, _>>())
    };
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
                "peer": p.mac.to_string(), "incarnation": format!("{:016x}", p.incarnation),
                "state": p.state, "in_flight": p.in_flight, "srtt_ns": p.srtt_ns,
                "credits": p.credits, "waiting": p.waiting,
            })
        })
        .collect();
    json!({
        "pid": s.pid, "port": s.port_name, "mac": s.mac.to_string(), "mtu": s.mtu,
        "incarnation": format!("{:016x}", s.incarnation),
        "opened_ns": s.opened_ns, "updated_ns": s.updated_ns, "t_dead_ns": s.t_dead_ns,
        "port_counters": map(&s.port), "node_counters": map(&s.node),
        "refused": map(&s.refused), "levels": map(&s.levels),
        "endpoints": endpoints, "endpoint_count": s.ep_count,
        "sessions": sessions, "session_count": s.session_count,
    })
}

/// A domain for people: what is 0 is left out, unless `all`.
fn text(s: &Snapshot, before: Option<&Snapshot>, all: bool) -> String {
    let age = since_1970_ns().saturating_sub(s.updated_ns);
    let mut text = format!("process {}, {} at {}", s.pid, s.port_name, s.mac);
    if age > 1_000_000_000 {
        // Only whoever reads a queue turns the loop, so an old figure is no fault.
        text.push_str(&format!(", idle for {:.0} s", age as f64 / 1e9));
    }
    text.push('\n');
    let seconds = before.map(|b| s.updated_ns.saturating_sub(b.updated_ns) as f64 / 1e9);
    let parts: [(&str, &Counters, Option<&Counters>); 4] = [
        ("port", &s.port, before.map(|b| &b.port)),
        ("node", &s.node, before.map(|b| &b.node)),
        ("refused", &s.refused, before.map(|b| &b.refused)),
        // Levels go up and down; what a second added to one says nothing.
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
    text.push_str(&endpoints(s));
    text.push_str(&sessions(s));
    text
}

type Counters = Vec<(&'static str, u64)>;

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
    let more = s.ep_count.saturating_sub(rows.len());
    if rows.is_empty() { String::new() } else { layout(&head, &rows) + &and_more(more) }
}

fn sessions(s: &Snapshot) -> String {
    let right = |name| (name, Align::Right);
    let head = [
        ("  session with", Align::Left),
        ("state", Align::Left),
        right("in flight"),
        right("round trip"),
        right("credits"),
        right("waiting"),
    ];
    let rows: Vec<Vec<String>> = s
        .sessions
        .iter()
        .map(|p| {
            let srtt = match p.srtt_ns {
                0 => "-".to_owned(),
                ns => format!("{:.1} us", ns as f64 / 1e3),
            };
            vec![
                format!("  {}", p.mac),
                p.state.to_owned(),
                p.in_flight.to_string(),
                srtt,
                p.credits.to_string(),
                p.waiting.to_string(),
            ]
        })
        .collect();
    let more = s.session_count.saturating_sub(rows.len());
    if rows.is_empty() { String::new() } else { layout(&head, &rows) + &and_more(more) }
}

fn and_more(count: usize) -> String {
    if count == 0 { String::new() } else { format!("  and {count} more\n") }
}

fn since_1970_ns() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use barewire::stats::{EpRow, SessionRow};
    use barewire_driver::port::MacAddr;

    fn snapshot(tx_frames: u64, updated_ns: u64) -> Snapshot {
        let number = 3;
        let ep = EpRow {
            number,
            sent: 7,
            sent_bytes: 4096,
            received: 8,
            received_bytes: 1,
            errors: 0,
            unexpected: 0,
            posted: 2,
        };
        let session = SessionRow {
            mac: MacAddr([2, 0, 0, 0, 0, 9]),
            incarnation: 5,
            state: "open",
            in_flight: 1,
            srtt_ns: 1500,
            credits: 64,
            waiting: 0,
        };
        Snapshot {
            path: "a".into(),
            pid: 12,
            alive: true,
            opened_ns: 1,
            updated_ns,
            port_name: "shm:default".to_owned(),
            mac: MacAddr([2, 0, 0, 0, 0, 1]),
            mtu: 65_520,
            incarnation: 4,
            t_dead_ns: 5_000_000_000,
            port: vec![("tx_frames", tx_frames), ("tx_full", 0)],
            node: vec![("msgs_sent", 7)],
            refused: vec![("crc", 0)],
            levels: vec![("posted", 2)],
            endpoints: vec![ep],
            ep_count: 1,
            sessions: vec![session],
            session_count: 3,
        }
    }

    #[test]
    fn a_domain_is_a_header_counters_endpoints_and_sessions() {
        let now = snapshot(100, since_1970_ns());
        let shown = text(&now, None, false);
        assert!(shown.starts_with("process 12, shm:default at 02:00:00:00:00:01\n"), "{shown}");
        assert!(shown.contains("tx_frames") && !shown.contains("tx_full"), "{shown}");
        assert!(shown.contains("02:00:00:00:00:09  open"), "{shown}");
        assert!(shown.contains("1.5 us") && shown.contains("4 KiB"), "{shown}");
        assert!(shown.ends_with("  and 2 more\n"), "{shown}");
        assert!(text(&now, None, true).contains("tx_full"));
    }

    #[test]
    fn a_rate_is_what_the_time_between_two_updates_added() {
        let (before, now) = (snapshot(100, 1_000_000_000), snapshot(600, 3_000_000_000));
        let shown = text(&now, Some(&before), false);
        assert!(shown.contains("250/s"), "{shown}");
        assert!(shown.contains("idle for"), "{shown}");
        // A domain that has not been turned in between has no rate, and nothing is divided by 0.
        assert!(!text(&now, Some(&now), false).contains("/s\n"));
    }

    #[test]
    fn programs_get_everything() {
        let object = object(&snapshot(100, 2));
        assert_eq!(object["port_counters"]["tx_full"], 0);
        assert_eq!(object["refused"]["crc"], 0);
        assert_eq!(object["endpoints"][0]["sent_bytes"], 4096);
        assert_eq!(object["sessions"][0]["peer"], "02:00:00:00:00:09");
        assert_eq!(object["session_count"], 3);
    }
}
