//! `barewire info`: the ports that this machine offers, and why others are not.

use std::process::ExitCode;

use barewire::settings::VARIABLES;
use barewire_driver::open::{PortInfo, list, open};
use barewire_driver::port::PortCaps;
use serde::Serialize;

use crate::fail::Fail;
use crate::out;
use crate::table::{Align, layout};

/// Shows the ports that this machine offers, and why others are not
///
/// Each port is opened for a moment to see that it works. Its address is one that it would have
/// now: where no interface has a MAC, a port without mac= gets another one every time.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  at least one port works
  1  none does; the list says why

Examples:
  barewire info              a list for people
  barewire info --json       one object a line: port, what, works, why_not, station, mtu, ...
  barewire info --settings   the variables of the environment that barewire reads")]
pub(crate) struct InfoArgs {
    /// Prints one JSON object a line.
    #[arg(long)]
    json: bool,
    /// Shows the settings that the environment can change instead of the ports.
    #[arg(long)]
    settings: bool,
}

/// One port, as it is printed for programs.
#[derive(Serialize)]
struct Entry {
    port: String,
    what: String,
    works: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    why_not: Option<String>,
    #[serde(flatten, skip_serializing_if = "Option::is_none")]
    facts: Option<Facts>,
}

#[derive(Serialize)]
struct Facts {
    mac: String,
    /// Bytes after the Ethernet header.
    mtu: usize,
    lossless: bool,
    gather: bool,
    rto_floor_ns: u64,
    /// 0: the device does not say.
    link_bps: u64,
}

/// Prints the ports, or the settings.
///
/// # Errors
/// Standard output cannot be written.
pub(crate) fn run(args: &InfoArgs) -> Result<ExitCode, Fail> {
    if args.settings {
        settings(args.json)?;
        return Ok(ExitCode::SUCCESS);
    }
    let entries: Vec<Entry> = list().into_iter().map(look).collect();
    for entry in &entries {
        if args.json {
            out::json(entry)?;
        } else {
            out::print(text(entry))?;
        }
    }
    let works = entries.iter().any(|entry| entry.works);
    Ok(if works { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Opens the port, if there is anything to open, and asks it what it is.
fn look(port: PortInfo) -> Entry {
    let PortInfo { spec, what, why_not } = port;
    let opened = match why_not {
        Some(why) => Err(why),
        None => open(&spec).map(|port| facts(port.caps())).map_err(|why| why.to_string()),
    };
    let works = opened.is_ok();
    let (facts, why_not) = match opened {
        Ok(facts) => (Some(facts), None),
        Err(why) => (None, Some(why)),
    };
    Entry { port: spec, what, works, why_not, facts }
}

fn facts(caps: &PortCaps) -> Facts {
    Facts {
        mac: caps.station.to_string(),
        mtu: caps.mtu,
        lossless: caps.lossless,
        gather: caps.gather,
        rto_floor_ns: caps.rto_floor_ns,
        link_bps: caps.link_bps,
    }
}

fn text(entry: &Entry) -> String {
    let mut text = format!("{:<18} {}\n", entry.port, entry.what);
    if let Some(facts) = &entry.facts {
        let loss = if facts.lossless { "lossless" } else { "may lose frames" };
        let gather = if facts.gather { ", sends from registered memory" } else { "" };
        let link = match facts.link_bps {
            0 => String::new(),
            bps => format!(", {} Mbit/s", bps / 1_000_000),
        };
        text.push_str(&format!(
            "{:<18} mac {}, mtu {}, {loss}{gather}{link}\n",
            "", facts.mac, facts.mtu
        ));
    }
    if let Some(why) = &entry.why_not {
        text.push_str(&format!("{:<18} not here: {why}\n", ""));
    }
    text
}

#[derive(Serialize)]
struct Setting {
    variable: &'static str,
    value: Option<String>,
    default: &'static str,
    meaning: &'static str,
}

fn settings(as_json: bool) -> Result<(), Fail> {
    let all = VARIABLES.iter().map(|&(variable, meaning, default)| {
        let value = std::env::var_os(variable).map(|v| v.to_string_lossy().into_owned());
        Setting { variable, value, default, meaning }
    });
    if as_json {
        return all.into_iter().try_for_each(|setting| out::json(&setting));
    }
    let left = |name| (name, Align::Left);
    let rows: Vec<Vec<String>> = all
        .map(|s| {
            let value = s.value.unwrap_or_else(|| format!("({})", s.default));
            vec![s.variable.to_owned(), value, s.meaning.to_owned()]
        })
        .collect();
    out::print(layout(&[left("variable"), left("value (default)"), left("meaning")], &rows))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_port_that_is_not_there_says_why() {
        let why_not = Some("not part of this build; use shm".to_owned());
        let entry = look(PortInfo { spec: "dpdk".to_owned(), what: "a NIC".to_owned(), why_not });
        assert!(!entry.works);
        assert!(text(&entry).ends_with("not here: not part of this build; use shm\n"));
        let json = serde_json::to_value(&entry).unwrap();
        assert_eq!(json["why_not"], "not part of this build; use shm");
        assert!(json.get("mac").is_none());
    }

    #[test]
    fn a_port_that_does_not_open_says_why_too() {
        let spec = "shm:a/b".to_owned();
        let entry = look(PortInfo { spec, what: String::new(), why_not: None });
        assert!(!entry.works && entry.why_not.is_some());
    }

    #[test]
    fn a_port_that_works_says_what_it_is() {
        let spec = format!("shm:info-test-{}", std::process::id());
        let entry = look(PortInfo { spec, what: "a segment".to_owned(), why_not: None });
        let json = serde_json::to_value(&entry).unwrap();
        assert_eq!(json["works"], true, "{json}");
        assert_eq!(json["lossless"], true);
        assert!(text(&entry).contains("lossless"));
    }
}
