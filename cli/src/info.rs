//! `barewire info`: the ports that this machine offers, and why others are not.

use std::process::ExitCode;

use barewire::settings::{Settings, VARIABLES};
use barewire_driver::open::{PortInfo, is_known, list, open, open_through_switch};
use barewire_driver::port::PortCaps;
use serde::Serialize;

use crate::fail::Fail;
use crate::out;
use crate::table::{Align, layout};

/// Lists the ports of this machine, and why others cannot be opened
///
/// Each port is opened briefly as a test. The address is the one that it would have now: where no
/// interface has a MAC, a port without mac= gets a different one each time.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  at least one port works
  1  no port works; the list says why

Examples:
  barewire info              a list for people
  barewire info --json       one JSON object per line: port, what, works, and why_not, or mac, mtu,
                             lossless, gather, rto_floor_ns, link_bps, switch
  barewire info --settings   the environment variables that barewire reads, those with an invalid
                             value, and unknown ones with its prefix")]
pub(crate) struct InfoArgs {
    /// Prints one JSON object per line.
    #[arg(long)]
    json: bool,
    /// Lists the settings from the environment instead of the ports.
    #[arg(long)]
    settings: bool,
}

/// A port, as printed with `--json`.
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
    /// 0: unknown.
    link_bps: u64,
    /// Whether frames go through the switch that owns the device.
    switch: bool,
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

/// Opens the port, through a switch if one owns it and serves this user, and reads its properties.
fn look(port: PortInfo) -> Entry {
    let PortInfo { spec, what, why_not } = port;
    let itself = || match why_not {
        Some(why) => Err(why),
        None => open(&spec).map(|port| facts(port.caps(), false)).map_err(|why| why.to_string()),
    };
    let opened = match open_through_switch(&spec) {
        Ok(Some(port)) => Ok(facts(port.caps(), true)),
        Ok(None) => itself(),
        // A user who may open the device needs no switch.
        Err(why) => itself().map_err(|_| why.to_string()),
    };
    let works = opened.is_ok();
    let (facts, why_not) = match opened {
        Ok(facts) => (Some(facts), None),
        Err(why) => (None, Some(why)),
    };
    Entry { port: spec, what, works, why_not, facts }
}

fn facts(caps: &PortCaps, switch: bool) -> Facts {
    Facts {
        mac: caps.station.to_string(),
        mtu: caps.mtu,
        lossless: caps.lossless,
        gather: caps.gather,
        rto_floor_ns: caps.rto_floor_ns,
        link_bps: caps.link_bps,
        switch,
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
        let switch = if facts.switch { ", through a switch" } else { "" };
        text.push_str(&format!(
            "{:<18} mac {}, mtu {}, {loss}{gather}{link}{switch}\n",
            "", facts.mac, facts.mtu
        ));
    }
    if let Some(why) = &entry.why_not {
        text.push_str(&format!("{:<18} cannot be opened: {why}\n", ""));
    }
    text
}

/// An environment variable, as printed.
#[derive(Debug, Serialize)]
struct Setting {
    variable: String,
    value: Option<String>,
    default: &'static str,
    meaning: &'static str,
    /// Why the value is invalid.
    #[serde(skip_serializing_if = "Option::is_none")]
    wrong: Option<String>,
}

/// Further variables that the command reads.
const LOG: (&str, &str, &str) =
    ("BAREWIRE_LOG", "what barewire logs to standard error, debug or barewire=trace", "warn");

/// The message for an unknown `BAREWIRE_` variable.
pub(crate) const UNREAD: &str = "nobody reads this variable";

/// Prefixes of variables that other parts of barewire read: the MPI collectives, systemd units,
/// tests.
const OTHERS: &[&str] =
    &["BAREWIRE_MPI_", "BAREWIRE_SWITCH_ARGS", "BAREWIRE_EXPORTER_ARGS", "BAREWIRE_TEST_"];

/// All variables with their values in `given`, then those that only the libfabric provider reads,
/// then unknown ones.
fn all_settings(given: &[(String, String)]) -> Vec<Setting> {
    let value_of = |name: &str| given.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone());
    let setting = |variable: String, &(name, meaning, default): &(_, _, _)| {
        let value = value_of(&variable);
        let only = |asked: &str| value.clone().filter(|_| asked == name);
        let wrong = Settings::parse(only).err().map(|e| format!("expected {}", e.expected));
        let no_port = || {
            let port =
                value.as_ref().filter(|v| name == "BAREWIRE_PORT" && !v.trim().is_empty())?;
            (!is_known(port.trim())).then(|| "no such kind of port; see barewire info".to_owned())
        };
        let wrong = wrong.or_else(no_port);
        Setting { variable, value, default, meaning, wrong }
    };
    let ours = VARIABLES.iter().chain([&LOG]);
    let mut all: Vec<Setting> = ours.map(|known| setting(known.0.to_owned(), known)).collect();
    let fi = VARIABLES.iter().map(|known| setting(format!("FI_{}", known.0), known));
    all.extend(fi.filter(|setting| setting.value.is_some()));
    let unread = given.iter().filter(|(name, _)| {
        let ours = name.strip_prefix("FI_").unwrap_or(name).starts_with("BAREWIRE_");
        let others = OTHERS.iter().any(|other| name.starts_with(other));
        ours && !others && !all.iter().any(|known| known.variable == *name)
    });
    let unread: Vec<Setting> = unread
        .map(|(name, value)| Setting {
            variable: name.clone(),
            value: Some(value.clone()),
            default: "",
            meaning: "",
            wrong: Some(UNREAD.to_owned()),
        })
        .collect();
    all.extend(unread);
    all
}

/// The environment.
fn given() -> Vec<(String, String)> {
    let text = |text: std::ffi::OsString| text.to_string_lossy().into_owned();
    let mut given: Vec<_> = std::env::vars_os().map(|(n, v)| (text(n), text(v))).collect();
    given.sort();
    given
}

/// The `BAREWIRE_` variables with invalid values, each with its value and the reason; first those
/// that keep programs from running.
pub(crate) fn wrong_settings() -> Vec<(String, String)> {
    let all = all_settings(&given()).into_iter();
    let told = |s: Setting| Some((format!("{}={}", s.variable, s.value?), s.wrong?));
    let mut wrong: Vec<_> = all.filter_map(told).collect();
    wrong.sort_by_key(|(_, why)| why == UNREAD);
    wrong
}

fn settings(as_json: bool) -> Result<(), Fail> {
    let all = all_settings(&given());
    if as_json {
        return all.iter().try_for_each(out::json);
    }
    let left = |name| (name, Align::Left);
    let row = |s: Setting| {
        let value = s.value.unwrap_or_else(|| format!("({})", s.default));
        let value = s.wrong.map_or(value.clone(), |wrong| format!("{value}: {wrong}"));
        vec![s.variable, value, s.meaning.to_owned()]
    };
    let rows: Vec<Vec<String>> = all.into_iter().map(row).collect();
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
        assert!(text(&entry).ends_with("cannot be opened: not part of this build; use shm\n"));
        let json = serde_json::to_value(&entry).unwrap();
        assert_eq!(json["why_not"], "not part of this build; use shm");
        assert!(json.get("mac").is_none());
    }

    #[test]
    fn a_variable_that_means_nothing_or_that_nobody_reads_is_marked() {
        let given = [
            ("BAREWIRE_NEAR", "maybe"),
            ("BAREWIRE_PORT", "eth0"),
            ("BAREWIRE_T_DEAD_MS", "1000"),
            ("FI_BAREWIRE_IDLE", "never"),
            ("FI_BAREWIRE_PROT", "shm"),
            ("BAREWIRE_MPI_VERBOSE", "1"),
            ("BAREWIRE_LOG", "debug"),
            ("HOME", "/"),
        ];
        let all = all_settings(&given.map(|(name, value)| (name.into(), value.into())));
        let wrong: Vec<_> = all.iter().filter(|s| s.wrong.is_some()).collect();
        let told = wrong.iter().map(|s| (&*s.variable, s.wrong.as_deref().unwrap()));
        let expected = [
            ("BAREWIRE_PORT", "no such kind of port; see barewire info"),
            ("BAREWIRE_NEAR", "expected 0 or 1"),
            ("FI_BAREWIRE_IDLE", "expected spin, yield or sleep"),
            ("FI_BAREWIRE_PROT", "nobody reads this variable"),
        ];
        assert_eq!(told.collect::<Vec<_>>(), expected);
        assert_eq!(all.len(), VARIABLES.len() + 3, "{all:?}");
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
