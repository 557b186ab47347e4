//! `barewire ping`: whether a station answers, which frames reach it, and what is wrong if not.

use std::ffi::OsString;
use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::process::ExitCode;
use std::time::{Duration, Instant as Clock};

use barewire::names::{AddrRole, Names, QueryPort};
use barewire::stats::read_all;
use barewire::{EpAddr, Settings, check_fit, keyring};
use barewire_dataplane::ping::{Ping, PingReport, PingSettings, Verdict};
use barewire_dataplane::seal::{Keyring, has_aes};
use barewire_dataplane::types::Instant;
use barewire_dataplane::wire::VERSION;
use barewire_driver::clock::now_ns;
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::open;
use barewire_driver::port::{Port, PortGone, RxSink, Station, Tx};
use serde_json::{Value, json};

use crate::cert_args::CertArgs;
use crate::fail::Fail;
use crate::out;
use crate::perf::host_and_service;
use crate::stats::station;
use crate::table::{Align, layout};

/// Tests whether a process answers, at which frame lengths, and after what time
///
/// Any process with an open barewire domain answers while it polls; none of its endpoints is
/// involved. Frames of 60 bytes, of 1,514 bytes and of the longest that both sides accept
/// alternate. If only short ones are answered, a binary search finds the longest length that
/// passes. The answers themselves are short. Lengths include the Ethernet header, not the FCS.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0   every ping of every length was answered
  1   the port cannot be opened or is gone; or no process serves the service of HOST-IP:SERVICE;
      or the certificate does not fit a frame of the port
  2   wrong arguments
  3   no answer at all
  4   only short frames are answered
  5   the station has another version of the protocol
  6   another incarnation: the process that the address names has ended or restarted
  7   no station on the segment has the address (immediate on shm)
  8   the port here drops what is sent: no carrier, or a filter
  9   several nodes answer to the address, or it has a session with another process of this port's
  10  answered, with loss
  11  the process exists and does not poll
  12  it has another key or certificate, or one of the two sides has none

Examples:
  barewire ping 02:3a:9c:17:55:01                                    by its MAC, over shm
  barewire ping --port afpacket:eth0 barewire://52:54:00:12:34:56/52000#c0ffee00c0ff
                                                                     as `pingpong --listen` prints
  barewire ping --port udp:10.0.0.1 10.0.0.7                         the first process of a host
  barewire ping --port udp:10.0.0.1 10.0.0.7:52001                   by the address of its udp port
  barewire ping --port afpacket:eth0 10.0.0.7:7                      by a service that it has bound
  barewire ping --port afpacket:eth0 node2                           by the name of its host
  barewire ping --port udp:10.0.0.1 --key-file job.key ADDR          where domains have a key
  barewire ping --count 100 --interval 0.01 --json ADDR              one JSON object

Environment:
  BAREWIRE_PORT  the port if --port is not given (default: this user's segment, shm)
  BAREWIRE_KEY_FILE, BAREWIRE_CERT_FILE, BAREWIRE_CERT_KEY_FILE, BAREWIRE_ROOTS_FILE,
  BAREWIRE_PEER_IDS, BAREWIRE_SEAL  as domains have them")]
pub(crate) struct PingArgs {
    /// The destination: MAC[.NUMBER], an address as `pingpong --listen` prints it, HOST, or
    /// HOST:PORT, HOST being a name or an IP address. On a udp or ip port, PORT is its UDP port
    /// (default: 52000); on others that leave the host, a service, which is resolved by a broadcast
    /// (default: any that is served there).
    #[arg(value_name = "ADDR", value_parser = parse_target)]
    target: Target,
    /// The port to send from.
    #[arg(long, default_value_t = crate::usual_port())]
    port: String,
    /// Pings of each length.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    count: u32,
    /// Seconds between pings, 0 to 3600.
    #[arg(long, default_value_t = 0.05)]
    interval: f64,
    /// Seconds to wait for an answer, 0.001 to 3600; default: 1, or 3 with a certificate.
    #[arg(long)]
    timeout: Option<f64>,
    /// File with the key that the station has, where it has one; several separated by colons, of
    /// which the first is used.
    #[arg(long, value_name = "FILE", env = "BAREWIRE_KEY_FILE", hide_env = true)]
    key_file: Option<OsString>,
    #[command(flatten)]
    certificate: CertArgs,
    /// Prints one JSON object.
    #[arg(long)]
    json: bool,
}

impl PingArgs {
    /// As `barewire ping ADDR --port PORT` has them, with the options of `certificate`.
    pub(crate) fn of(target: Target, port: &str, keys: (Option<OsString>, CertArgs)) -> Self {
        let (port, (key_file, certificate)) = (port.to_owned(), keys);
        let (count, interval, timeout, json) = (10, 0.05, None, false);
        Self { target, port, count, interval, timeout, key_file, certificate, json }
    }

    /// The same with JSON for its output.
    pub(crate) fn json(self, json: bool) -> Self {
        Self { json, ..self }
    }

    /// Seconds to wait for an answer. A station with a certificate finds out within two whether an
    /// earlier process of this port's address has ended.
    fn timeout(&self, has_certificate: bool) -> f64 {
        self.timeout.unwrap_or(if has_certificate { 3.0 } else { 1.0 })
    }

    /// The settings of the environment, with the key or the certificate that is named here.
    ///
    /// # Errors
    /// They do not parse, or a certificate lacks a file.
    fn settings(&self) -> Result<Settings, Fail> {
        let mut settings = Settings::from_env().map_err(Fail::usage)?;
        if let Some(files) = &self.key_file {
            settings.key_files = std::env::split_paths(files).collect();
        }
        if let Some(files) = self.certificate.files()? {
            settings.certificate = Some(files);
        }
        Ok(settings)
    }
}

/// The target of a ping, as the user names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// By its complete address, or its MAC alone.
    Addr(EpAddr),
    /// By IP address and a number: a UDP port or a service, depending on the port.
    IpPort(SocketAddr),
    /// By IP address alone: the first process of the host, or any that serves a service.
    Ip(IpAddr),
    /// By hostname, and a number if one is given.
    HostName(String, Option<u16>),
}

/// Parses a target as the user writes it.
///
/// # Errors
/// The expected forms.
pub(crate) fn parse_target(text: &str) -> Result<Target, String> {
    if let Ok(addr) = text.parse() {
        return Ok(Target::Addr(addr));
    }
    if let Ok(place) = text.parse() {
        return Ok(Target::IpPort(place));
    }
    if let Ok(host) = text.parse() {
        return Ok(Target::Ip(host));
    }
    if let Ok(station) = station(text) {
        return Ok(Target::Addr(EpAddr { station, ep: 0, incarnation: 0 }));
    }
    let (host, number) = host_and_service(text);
    let number = number.map(str::parse).transpose();
    number
        .ok()
        .filter(|_| is_name(host))
        .map(|number| Target::HostName(host.to_owned(), number))
        .ok_or(
        "expected MAC[.NUMBER] such as 02:00:00:00:00:09, barewire://MAC/NUMBER, or HOST[:PORT]"
            .to_owned(),
    )
}

/// Whether `text` can be a hostname: text of digits alone is meant to be an address.
fn is_name(text: &str) -> bool {
    let may = |c: char| c.is_ascii_alphanumeric() || "-._".contains(c);
    text.chars().all(may) && text.contains(|c: char| c.is_ascii_alphabetic())
}

impl Target {
    /// The address of the target on `port`. A hostname is looked up first. A query takes
    /// [`QUERY_TIMEOUT`](barewire::names::QUERY_TIMEOUT) if no station answers.
    ///
    /// # Errors
    /// The port has no such names, or no station has this name.
    fn resolve(&self, port: &str, settings: &Settings) -> Result<EpAddr, Fail> {
        let (told, host, number, by) = match self {
            Self::Addr(addr) => return Ok(*addr),
            Self::IpPort(at) => {
                (at.to_string(), at.ip().to_string(), Some(at.port()), "an IP address")
            }
            Self::Ip(host) => (host.to_string(), host.to_string(), None, "an IP address"),
            Self::HostName(host, Some(number)) => {
                (format!("{host}:{number}"), host.clone(), Some(*number), "the name of its host")
            }
            Self::HostName(host, None) => {
                (host.clone(), host.clone(), None, "the name of its host")
            }
        };
        let names = Names::of(port);
        match names {
            Names::Labels => {
                let what = format!("{told}: on port {port} nobody is known by {by}");
                let mend = "give its MAC, or its complete address: barewire stats lists them";
                Err(Fail::usage(what).mend(mend))
            }
            Names::Udp { .. } if matches!(self, Self::IpPort(_)) => {
                let station = station(&told).map_err(Fail::usage)?;
                Ok(EpAddr { station, ep: 0, incarnation: 0 })
            }
            Names::Udp { .. } | Names::Queried { .. } => {
                let (service, through) =
                    (number.map(|n| n.to_string()), QueryPort::new(port, settings));
                let is_number = !matches!(self, Self::HostName(..));
                let (host, service) = (Some(host.as_str()), service.as_deref());
                let found = names.find(host, service, AddrRole::Peer, is_number, &through);
                let lacks = || Fail::new(format!("{told}: no address"));
                found.map_err(Fail::new)?.ok_or_else(lacks)
            }
        }
    }
}

/// Sends the pings and prints the diagnosis.
///
/// # Errors
/// The port does not open or is gone, or the certificate does not fit its frames.
pub(crate) fn run(args: &PingArgs) -> Result<ExitCode, Fail> {
    let timeout = args.timeout(false);
    if !(0.0..=3600.0).contains(&args.interval) || !(0.001..=3600.0).contains(&timeout) {
        return Err(Fail::usage("--interval: 0 to 3600 seconds; --timeout: 0.001 to 3600"));
    }
    let settings = args.settings()?;
    let ring = keyring(&settings).map_err(Fail::new)?;
    let target = args.target.resolve(&args.port, &settings);
    let target = target.map_err(|fail| fail.or_of_port(&args.port))?;
    let mut port = open(&args.port)?;
    if port.caps().station == target.station {
        return Err(Fail::usage("that is the address of this port itself"));
    }
    let found = send_pings(args, target, ring, &mut *port)?;
    let finding = Diagnosis::of(&found, target.station);
    if args.json {
        out::json(&object(target.station, &*port, &found, &finding))?;
    } else {
        out::print(text(target.station, &*port, &found, &finding))?;
    }
    Ok(ExitCode::from(finding.code))
}

/// Opens a port as programs of this node do: through the switch that owns its device.
///
/// # Errors
/// It does not open.
pub(crate) fn open(port: &str) -> Result<Box<dyn Port>, Fail> {
    let wrong = |why| Fail::usage(why).mend("see: barewire info --settings");
    let settings = barewire::Settings::from_env().map_err(wrong)?;
    open::open_in_node(port, settings.near).map_err(Fail::new)
}

/// The result of the pings, with local observations.
struct PingOutcome {
    report: PingReport,
    /// Longest time in the call that sends, ns.
    tx_ns: u64,
    /// Frames that the port or the kernel dropped.
    dropped: u64,
    /// What else the port knows of the station.
    station: Option<String>,
}

/// How long an answer is polled for before the command sleeps between polls, ns.
const SPIN_NS: u64 = 5_000_000;

struct RxFrames(Vec<Vec<u8>>);

impl RxSink for RxFrames {
    fn frame(&mut self, frame: &RxFrame<'_>) {
        let mut bytes = vec![0; frame.len()];
        if frame.copy_to(0, &mut bytes) {
            self.0.push(bytes);
        }
    }
}

fn send_pings(
    args: &PingArgs,
    target: EpAddr,
    ring: Option<Keyring>,
    port: &mut dyn Port,
) -> Result<PingOutcome, Fail> {
    let seed = RandomState::new().hash_one(now_ns()) | 1;
    let near = port.is_near(target.station);
    let caps = port.caps();
    // Frames through shared memory are not sealed.
    let ring = ring.filter(|_| !near && !caps.lossless);
    let has_certificate = ring.as_ref().is_some_and(Keyring::has_certificate);
    let settings = PingSettings {
        me: caps.station,
        target: target.station,
        incarnation: target.incarnation,
        seed,
        crc: port.damages() && !near,
        near,
        mtu: if near { caps.near_mtu } else { caps.mtu },
        count: args.count,
        interval_ns: (args.interval * 1e9) as u64,
        timeout_ns: (args.timeout(has_certificate) * 1e9) as u64,
    };
    let mut ping = match ring {
        Some(ring) => {
            check_fit(ring.open_len(), caps).map_err(Fail::new)?;
            Ping::sealed(settings, ring, has_aes())
        }
        None => Ping::new(settings),
    };
    let gone = |why: PortGone| Fail::new(format!("{}: {why}", args.port));
    let before = port.counters().tx_dropped;
    let (mut answers, mut tx_ns, mut left_at) = (RxFrames(Vec::new()), 0, Instant(0));
    while !ping.is_done() {
        let now = Instant(now_ns());
        while let Some(frame) = ping.poll(now) {
            let begun = Clock::now();
            let tx = port.tx(&TxFrame::whole(&frame)).map_err(gone)?;
            if tx == Tx::Sent {
                port.flush().map_err(gone)?;
                tx_ns = tx_ns.max(begun.elapsed().as_nanos() as u64);
            }
            ping.sent(tx);
            left_at = now;
        }
        let got = port.rx_burst(32, &mut answers).map_err(gone)?;
        let now = Instant(now_ns());
        answers.0.drain(..).for_each(|frame| ping.on_frame(now, &RxFrame::new(&frame)));
        let idle = ping.next_deadline().since(now);
        // An early answer must not wait for a wake-up.
        if got == 0 && now.since(left_at) > SPIN_NS && idle > 1_000_000 {
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    let dropped = port.counters().tx_dropped - before;
    let station = port.station(target.station);
    Ok(PingOutcome { report: ping.report(), tx_ns, dropped, station })
}

/// The diagnosis, for people and scripts.
struct Diagnosis {
    code: u8,
    /// A word for programs.
    name: &'static str,
    what: String,
    mend: Option<String>,
}

/// The text of a ping with all answers: from the program itself or from its thread, as far as this
/// host knows.
fn answered_text(target: Station) -> String {
    match idle_process(target) {
        None => "all pings were answered".to_owned(),
        Some((pid, secs)) => format!(
            "all pings were answered, by a thread of the library: the program, process {pid} of \
             this host, has not polled for {secs:.0} s"
        ),
    }
}

impl Diagnosis {
    fn of(found: &PingOutcome, target: Station) -> Self {
        let finding = |code, name, what: &str, mend: &str| Self {
            code,
            name,
            what: what.to_owned(),
            mend: (!mend.is_empty()).then(|| mend.to_owned()),
        };
        let report = &found.report;
        match report.verdict {
            Verdict::Answered => finding(0, "ok", &answered_text(target), ""),
            Verdict::Loss => finding(
                10,
                "loss",
                "some pings were not answered",
                "look for drops along the way: ethtool -S, tc -s qdisc, nft list ruleset",
            ),
            Verdict::OnlyShort(longest) => finding(
                4,
                "only_short",
                &format!("frames of up to {longest} bytes are answered, longer ones are not"),
                &format!(
                    "a switch or interface on the path has a smaller MTU than both ends: \
                     raise it, or open both ports with mtu={}",
                    mtu_of(longest)
                ),
            ),
            Verdict::OtherVersion(theirs) => finding(
                5,
                "other_version",
                &format!("it speaks version {theirs} of the protocol, this command {VERSION}"),
                "install the same release on both sides",
            ),
            Verdict::OtherIncarnation => finding(
                6,
                "other_life",
                "another incarnation has the address: it restarted",
                "exchange addresses again",
            ),
            Verdict::Unnamed => finding(
                6,
                "unnamed",
                "it answers, but accepts sessions only from peers that name its incarnation",
                "give its complete address, with the part after #",
            ),
            Verdict::Duplicate => finding(
                9,
                "duplicate",
                "several nodes answer to this address",
                "give each its own MAC: mac= of the port, or ip link set dev ... address",
            ),
            Verdict::AddressInUse => finding(
                9,
                "address_in_use",
                "it still has a session with another process of this port's address, which may \
                 have ended",
                "the next program that talks from this port ends it; `barewire stats` there shows \
                 it",
            ),
            Verdict::NoRoute => finding(
                7,
                "no_route",
                "no station on the segment has this address",
                "is the process there, with the same port? barewire stats lists those of this host",
            ),
            Verdict::OtherKey | Verdict::NoKey => Self::key_mismatch(report.verdict, finding),
            Verdict::OnlyOpenAnswered | Verdict::NoAnswer => {
                Self::no_answer(found, target, finding)
            }
        }
    }

    /// The diagnosis of a key or certificate mismatch.
    fn key_mismatch(
        verdict: Verdict,
        finding: impl Fn(u8, &'static str, &str, &str) -> Self,
    ) -> Self {
        match verdict {
            Verdict::OtherKey => finding(
                12,
                "other_key",
                "it has another key, or one side refuses the other's certificate",
                "give both sides the same --key-file and BAREWIRE_SEAL, or certificates with \
                 accepted names under the same roots; the log there says more",
            ),
            _ => finding(
                12,
                "no_key",
                "one side has a key or a certificate, and the other none",
                "give both sides the same --key-file, or certificates",
            ),
        }
    }

    /// The diagnosis of missing answers, as far as this host knows.
    fn no_answer(
        found: &PingOutcome,
        target: Station,
        finding: impl Fn(u8, &'static str, &str, &str) -> Self,
    ) -> Self {
        if found.dropped > 0 {
            return finding(
                8,
                "port_drops",
                &format!("the port here dropped {} frames", found.dropped),
                "is it up, with a carrier, and no filter in the way? ip link; nft list ruleset",
            );
        }
        if let Some((pid, secs)) = idle_process(target) {
            return finding(
                11,
                "not_polled",
                &format!("process {pid} of this host has the address: not polled for {secs:.0} s"),
                "it computes, sleeps or is stopped: ps, gdb -p",
            );
        }
        if found.report.verdict == Verdict::OnlyOpenAnswered {
            return finding(
                3,
                "mute",
                "it answered one ping and none after that",
                "its process has ended or does not poll: barewire stats there",
            );
        }
        finding(
            3,
            "no_answer",
            "no answer at all",
            "does the process run there and poll (barewire stats on its host), on the same \
             segment, with EtherType 0x88B5 or the UDP port let through?",
        )
    }
}

/// The MTU to set where frames of `longest` bytes pass. Bridges and switches let the 4 bytes of a
/// VLAN tag, or 8 of two, pass above their MTU.
fn mtu_of(longest: usize) -> usize {
    let mtu = longest.saturating_sub(14);
    let usual = [9000, 1500].into_iter().find(|usual| (0..=8).contains(&mtu.wrapping_sub(*usual)));
    usual.unwrap_or(mtu)
}

/// The process of this host that has the address and has not polled for a second, if there is one.
fn idle_process(target: Station) -> Option<(u32, f64)> {
    let all = read_all().ok()?;
    let there = all.iter().find(|s| s.alive && s.station == target)?;
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).ok()?;
    let idle = now.as_secs_f64() - there.polled_ns as f64 / 1e9;
    (idle > 1.0).then_some((there.pid, idle))
}

const PARTS: [(&str, usize); 4] = [("min", 0), ("p50", 500), ("p99", 990), ("max", 1000)];

fn text(target: Station, port: &dyn Port, found: &PingOutcome, finding: &Diagnosis) -> String {
    let (caps, report) = (port.caps(), &found.report);
    let station = found.station.as_ref().map_or(String::new(), |s| format!(" ({s})"));
    let mut text = format!(
        "{}{station} from {} over {}, frames of up to {} bytes\n",
        target,
        caps.station,
        caps.name,
        caps.mtu + 14
    );
    if report.open_ns > 0 {
        let lives: Vec<String> = report.incarnations.iter().map(|i| format!("{i:012x}")).collect();
        text.push_str(&format!(
            "answered after {}: incarnation {}, version {VERSION}.{}, frames of up to {} bytes\n",
            micros(report.open_ns),
            lives.join(" and "),
            report.minor,
            report.max_frame + 14
        ));
        let right = |name| (name, Align::Right);
        let head = [
            right("  frame"),
            right("sent"),
            right("answered"),
            right("loss"),
            right("min"),
            right("p50"),
            right("p99"),
            right("max"),
        ];
        let rows: Vec<Vec<String>> = report
            .lengths
            .iter()
            .map(|l| {
                let lost = f64::from(l.sent) - l.rtts_ns.len() as f64;
                let mut row = vec![
                    l.frame_len.to_string(),
                    l.sent.to_string(),
                    l.rtts_ns.len().to_string(),
                    format!("{:.0}%", 100.0 * lost / f64::from(l.sent.max(1))),
                ];
                let part = |at| l.percentile(at).map_or("-".to_owned(), micros);
                row.extend(PARTS.iter().map(|(_, at)| part(*at)));
                row
            })
            .collect();
        text.push_str(&layout(&head, &rows));
        text.push_str(&format!(
            "of a round trip at most {} is this port's sending; the rest is the way and the \
             polling of both sides\n",
            micros(found.tx_ns)
        ));
    }
    text.push_str(&finding.what);
    if let Some(mend) = &finding.mend {
        text.push_str(&format!("; {mend}"));
    }
    text.push('\n');
    text
}

fn micros(ns: u64) -> String {
    format!("{:.1} us", ns as f64 / 1e3)
}

fn object(target: Station, port: &dyn Port, found: &PingOutcome, finding: &Diagnosis) -> Value {
    let report = &found.report;
    let lengths: Vec<Value> = report
        .lengths
        .iter()
        .map(|l| {
            let mut object = json!({
                "frame": l.frame_len, "sent": l.sent, "answered": l.rtts_ns.len(),
            });
            for (name, at) in PARTS {
                object[format!("rtt_{name}_ns")] = json!(l.percentile(at));
            }
            object
        })
        .collect();
    let lives: Vec<String> = report.incarnations.iter().map(|i| format!("{i:012x}")).collect();
    json!({
        "peer": target.to_string(), "station": found.station,
        "port": port.caps().name, "mac": port.caps().station.to_string(), "mtu": port.caps().mtu,
        "verdict": finding.name, "exit_code": finding.code, "what": finding.what,
        "mend": finding.mend, "incarnations": lives, "peer_max_frame": report.max_frame,
        "open_ns": report.open_ns, "lengths": lengths, "tx_max_ns": found.tx_ns,
        "not_sent": report.not_sent, "dropped": found.dropped,
    })
}

#[cfg(test)]
mod tests {
    use barewire_dataplane::ping::LengthReport;

    use super::*;
    use crate::stats::station as station_of;

    #[test]
    fn a_certificate_takes_longer_to_be_answered() {
        let target = parse_target("02:00:00:00:00:09").unwrap();
        let mut args = PingArgs::of(target, "shm", (None, CertArgs::default()));
        assert_eq!([false, true].map(|has| args.timeout(has)), [1.0, 3.0]);
        args.timeout = Some(0.5);
        assert_eq!([false, true].map(|has| args.timeout(has)), [0.5, 0.5]);
    }

    fn found(verdict: Verdict, dropped: u64) -> PingOutcome {
        let rtts_ns = vec![1_000, 2_000, 90_000];
        let report = PingReport {
            verdict,
            incarnations: vec![7],
            max_frame: 1500,
            minor: 0,
            open_ns: 5_000,
            lengths: vec![LengthReport { frame_len: 60, sent: 4, rtts_ns }],
            not_sent: 0,
        };
        PingOutcome { report, tx_ns: 300, dropped, station: None }
    }

    /// Every exit code of the help has its finding, and every finding a code of the help.
    #[test]
    fn exit_codes_are_those_of_the_help() {
        let target = Station::at([2, 0, 0, 0, 0, 9]);
        let verdicts = [
            (Verdict::Answered, 0, 0),
            (Verdict::NoAnswer, 0, 3),
            (Verdict::OnlyOpenAnswered, 0, 3),
            (Verdict::OnlyShort(1514), 0, 4),
            (Verdict::OtherVersion(2), 0, 5),
            (Verdict::OtherIncarnation, 0, 6),
            (Verdict::Unnamed, 0, 6),
            (Verdict::NoRoute, 0, 7),
            (Verdict::NoAnswer, 4, 8),
            (Verdict::Duplicate, 0, 9),
            (Verdict::AddressInUse, 0, 9),
            (Verdict::Loss, 0, 10),
            (Verdict::OtherKey, 0, 12),
            (Verdict::NoKey, 0, 12),
        ];
        for (verdict, dropped, code) in verdicts {
            let finding = Diagnosis::of(&found(verdict, dropped), target);
            assert_eq!(finding.code, code, "{verdict:?}");
            assert_eq!(finding.mend.is_none(), code == 0, "{verdict:?}");
        }
        let short = Diagnosis::of(&found(Verdict::OnlyShort(1514), 0), target);
        assert!(short.mend.unwrap().contains("mtu=1500"));
        assert_eq!(
            [1514, 1518, 1522, 1523, 9014, 700].map(mtu_of),
            [1500, 1500, 1500, 1509, 9000, 686]
        );
    }

    #[test]
    fn a_target_is_any_form_of_an_address() {
        let station = Station::at([2, 0, 0, 0, 0, 9]);
        let bare = EpAddr { station, ep: 0, incarnation: 0 };
        assert_eq!(parse_target("02:00:00:00:00:09"), Ok(Target::Addr(bare)));
        let full = EpAddr { station, ep: 3, incarnation: 255 };
        assert_eq!(parse_target("barewire://02:00:00:00:00:09/3#ff"), Ok(Target::Addr(full)));
        let called = |host: &str, number| Ok(Target::HostName(host.to_owned(), number));
        assert_eq!(parse_target("node2"), called("node2", None));
        assert_eq!(parse_target("node2.lan:52001"), called("node2.lan", Some(52001)));
        for wrong in ["", "node2:", "node2:x", "node2:70000", "02:00:00:00:00", "10.0.0.300", "a b"]
        {
            assert!(parse_target(wrong).unwrap_err().contains("HOST[:PORT]"), "{wrong}");
        }
        let why = parse_target("node2")
            .unwrap()
            .resolve("shm", &Settings::default())
            .unwrap_err()
            .to_string();
        assert!(why.starts_with("node2: on port shm nobody is known by the name of its"), "{why}");
        let place = parse_target("10.0.0.7:52000").unwrap();
        let on = |port: &str| place.resolve(port, &Settings::default());
        let udp = on("udp:127.0.0.1").unwrap();
        assert_eq!(Ok(udp.station), station_of("10.0.0.7:52000"));
        let host = parse_target("10.0.0.7").unwrap();
        let first = host.resolve("ip(10.0.0.1/24):afpacket:x", &Settings::default()).unwrap();
        assert_eq!(first.station, udp.station);
        let why = host.resolve("shm", &Settings::default()).unwrap_err().to_string();
        assert!(why.starts_with("10.0.0.7: on port shm nobody is known"), "{why}");
        let why = on("shm").unwrap_err().to_string();
        assert!(why.contains("nobody is known by an IP address; give its MAC"), "{why}");
    }
}
