//! Writes the notices of a node to the log (`tracing`): events that no completion reports, such as
//! the end of a session.

use std::fmt::{self, Write};

use barewire_dataplane::node::{EndReason, NodeSettings, Notice, SessionEnd};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::seal::CertFault;
use barewire_dataplane::types::Instant;
use barewire_dataplane::wire;
use barewire_driver::port::Station;
use tracing::Level;

use crate::errno;
use crate::hosts::{interface_of, own_hosts};

/// Burst of the rate limit, lines. A job of many processes loses many sessions when a switch fails,
/// and all of them write to one terminal.
const BURST: u32 = 20;

/// After a burst: one line per period, nanoseconds.
const PERIOD_NS: u64 = 1_000_000_000;

/// The rate-limited log of one domain's notices: a token bucket, and the number of suppressed
/// lines.
#[derive(Debug)]
pub(crate) struct NoticeLog {
    tokens: u32,
    /// When the last token was added.
    refilled: Instant,
    /// Number of notices that were not written.
    withheld: u64,
}

impl Default for NoticeLog {
    fn default() -> Self {
        Self { tokens: BURST, refilled: Instant(0), withheld: 0 }
    }
}

impl NoticeLog {
    /// Whether [`drain`](Self::drain) has something to do.
    #[inline(always)]
    pub(crate) fn is_due(&self, engine: &Engine) -> bool {
        engine.node().observed.has_notice() || self.withheld > 0
    }

    /// Writes the node's notices, and the number of withheld ones as soon as a token is free.
    #[cold]
    #[inline(never)]
    pub(crate) fn drain(&mut self, engine: &mut Engine) {
        self.refill(engine.last_now());
        while let Some(notice) = engine.node_mut().observed.notice() {
            match notice {
                Notice::SessionEnded(end) => {
                    if self.take_token() {
                        let station = engine.station(end.station);
                        let line = line(&end, station.as_deref(), engine.node().settings());
                        match level(&end) {
                            Level::INFO => tracing::info!("{line}"),
                            _ => tracing::warn!("{line}"),
                        }
                    } else {
                        self.withheld += 1;
                    }
                }
                Notice::OtherVersion { station, theirs } => {
                    let ours = wire::VERSIONS;
                    self.warn(
                        engine,
                        station,
                        format_args!(
                            "speaks version {theirs} of the protocol, this side {ours}: no session \
                         with it is possible; install the same release on both"
                        ),
                    );
                }
                Notice::OtherKey { station, has_key } => self.warn_key(engine, station, has_key),
                Notice::BadCertificate { station, fault, name } => {
                    let name = name.map_or(String::new(), |name| format!(" of {name}"));
                    let (what, mend) = fault_text(fault);
                    self.warn(
                        engine,
                        station,
                        format_args!(
                            "has a certificate{name} that {what}: no session with it; {mend}"
                        ),
                    );
                }
                Notice::ShortFrames { station, passed, most } => {
                    self.warn(engine, station, format_args!(
                        "gets frames of at most {passed} bytes, although both ends take {most}: a \
                         switch on the way carries less; raise its MTU or set a smaller mtu="
                    ));
                }
                Notice::NameTwice { station, service } => {
                    self.warn(
                        engine,
                        station,
                        format_args!(
                            "says that it serves {service} at an address of this host, as this \
                         process does: clients find the one or the other; give each an address, \
                         or a service, of its own"
                        ),
                    );
                }
                Notice::SameMac { station } => self.warn_same_mac(engine, station),
                Notice::HostAsked => {
                    let hosts = own_hosts(interface_of(&engine.caps().name));
                    let now = engine.last_now();
                    engine.node_mut().control().set_hosts(now, hosts);
                }
                Notice::Missed(count) => self.withheld += u64::from(count),
            }
        }
        if self.withheld > 0 && self.take_token() {
            let count = std::mem::take(&mut self.withheld);
            tracing::warn!("{count} more lines of this kind; `barewire stats` counts sessions");
        }
    }

    /// Warns that a station and this one have different keys or modes of sealing.
    fn warn_key(&mut self, engine: &Engine, station: Station, has_key: bool) {
        if has_key && engine.node().openings.has_certificate() {
            let what = "refuses this side's certificate, has a key instead, or seals in another \
                        mode: no session with it is possible; its log says which";
            return self.warn(engine, station, format_args!("{what}"));
        }
        let what = match (has_key, engine.node().port.has_keys()) {
            (true, _) => "has another key, or seals in another mode",
            (false, true) => "has no key, and this side has one",
            (false, false) => "has a key, and this side has none",
        };
        self.warn(
            engine,
            station,
            format_args!(
                "{what}: no session with it is possible; set BAREWIRE_KEY_FILE (or auth_key) and \
                 BAREWIRE_SEAL alike on both"
            ),
        );
    }

    /// Warns about a peer on the same NIC that is reached neither through shared memory nor by the
    /// port.
    fn warn_same_mac(&mut self, engine: &Engine, station: Station) {
        let caps = engine.caps();
        if loops_back(&caps.name, [caps.station, station]) {
            return;
        }
        self.warn(
            engine,
            station,
            format_args!(
                "is another process on this interface, outside of this one's node: neither hears \
                 the other, as no NIC takes what it sends; give both the same /dev/shm and network \
                 namespace, or let a switch have the interface: sudo barewire switch --port {}",
                caps.name
            ),
        );
    }

    /// Writes a warning about a station, if a token is free.
    fn warn(&mut self, engine: &Engine, station: Station, what: fmt::Arguments<'_>) {
        if !self.take_token() {
            self.withheld += 1;
            return;
        }
        match engine.station(station) {
            Some(name) => tracing::warn!("{station} ({name}) {what}"),
            None => tracing::warn!("{station} {what}"),
        }
    }

    fn refill(&mut self, now: Instant) {
        let earned = now.since(self.refilled) / PERIOD_NS;
        if earned > 0 {
            self.tokens = (u64::from(self.tokens) + earned).min(BURST.into()) as u32;
            self.refilled = now;
        }
    }

    fn take_token(&mut self) -> bool {
        let left = self.tokens.checked_sub(1);
        self.tokens = left.unwrap_or(0);
        left.is_some()
    }
}

/// Whether the port carries frames between two processes on the same NIC: the host's loopback does
/// for `udp:`, and a switch for its users.
fn loops_back(port: &str, of: [Station; 2]) -> bool {
    let is_raw = ["afpacket:", "xdp:"].iter().any(|kind| port.contains(kind));
    !is_raw || of.iter().any(|station| !Station::OF_PORT.contains(&station.number))
}

/// The fault of a certificate, and the remedy.
fn fault_text(fault: CertFault) -> (&'static str, &'static str) {
    match fault {
        CertFault::Time => ("is not valid now", "renew it, or set the clocks of both right"),
        CertFault::Issuer => {
            ("leads to none of this side's roots", "add its issuer to BAREWIRE_ROOTS_FILE here")
        }
        CertFault::Name => {
            ("has no name that this side accepts", "add its name to BAREWIRE_PEER_IDS here")
        }
        CertFault::Signature => {
            ("does not match its signature", "look for the station that sends with its address")
        }
        CertFault::Malformed => {
            ("cannot be read", "install the same release on both, or look for its sender")
        }
    }
}

/// `WARN`, unless no operation waited and the session ended in order or was never used.
fn level(end: &SessionEnd) -> Level {
    let harmless = end.waited.is_empty() && (end.reason.is_orderly() || !end.was_open);
    if harmless { Level::INFO } else { Level::WARN }
}

fn line(end: &SessionEnd, station: Option<&str>, settings: &NodeSettings) -> String {
    let mut line = format!("session with {}", end.station);
    // Writing to a string cannot fail.
    if let Some(station) = station {
        let _ = write!(line, " ({station})");
    }
    let _ = write!(line, " ended: {}", end.reason);
    match end.reason {
        EndReason::NoAnswer | EndReason::Silent | EndReason::NoProgress => {
            let _ =
                write!(line, " for {} (T_dead {})", Secs(end.silent_ns), Secs(settings.t_dead_ns));
        }
        _ => {
            let _ = write!(line, "; last heard {} ago", Secs(end.silent_ns));
        }
    }
    let _ = write!(line, "; begun {} ago", Secs(end.age_ns));
    if end.retransmits > 0 {
        let _ = write!(line, ", {} packets repeated", end.retransmits);
    }
    if end.in_flight > 0 {
        let _ = write!(line, ", {} packets not acknowledged", end.in_flight);
    }
    if end.waited.is_empty() {
        line.push_str("; nothing waited");
    } else {
        let waited: Vec<String> =
            end.waited.kinds().map(|(count, kind)| format!("{kind} {count}")).collect();
        let code = end.reason.error().fi_errno();
        let name =
            errno::ALL.iter().find(|(_, value)| *value == code).map_or("?", |(name, _)| name);
        let _ = write!(line, "; {name}: {}", waited.join(", "));
    }
    line
}

/// A time in nanoseconds, printed in ms or s.
struct Secs(u64);

impl fmt::Display for Secs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ns @ ..1_000_000_000 => write!(f, "{} ms", ns / 1_000_000),
            ns => write!(f, "{}.{} s", ns / 1_000_000_000, ns / 100_000_000 % 10),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use barewire_dataplane::flags::{BindFlags, OpFlags};
    use barewire_dataplane::node::{EpAttr, MsgKind, Node, SendReq, Waited};
    use barewire_dataplane::types::EpAddr;
    use barewire_driver::backend::loopback::Loopback;
    use barewire_driver::mem::IoBuf;
    use barewire_driver::port::{Port, Station};
    use tracing::field::{Field, Visit};
    use tracing::span::{Attributes, Id, Record};
    use tracing::{Event, Metadata, Subscriber};

    use super::*;

    type Lines = Arc<Mutex<Vec<(Level, String)>>>;

    /// Keeps what is logged.
    struct LogCapture(Lines);

    impl Subscriber for LogCapture {
        fn enabled(&self, _: &Metadata<'_>) -> bool {
            true
        }

        fn new_span(&self, _: &Attributes<'_>) -> Id {
            Id::from_u64(1)
        }

        fn record(&self, _: &Id, _: &Record<'_>) {}

        fn record_follows_from(&self, _: &Id, _: &Id) {}

        fn event(&self, event: &Event<'_>) {
            struct Text(String);
            impl Visit for Text {
                fn record_debug(&mut self, _: &Field, value: &dyn fmt::Debug) {
                    self.0 = format!("{value:?}");
                }
            }
            let mut text = Text(String::new());
            event.record(&mut text);
            self.0.lock().unwrap().push((*event.metadata().level(), text.0));
        }

        fn enter(&self, _: &Id) {}

        fn exit(&self, _: &Id) {}
    }

    fn end(reason: EndReason, waited: Waited) -> SessionEnd {
        SessionEnd {
            station: Station::at([2, 0, 0, 0, 0, 9]),
            incarnation: 5,
            reason,
            was_open: true,
            age_ns: 12_340_000_000,
            silent_ns: 5_020_000_000,
            retransmits: 307,
            in_flight: 2,
            waited,
        }
    }

    #[test]
    fn a_line_says_who_why_since_when_and_what_waited() {
        let settings = NodeSettings { incarnation: 1, ..NodeSettings::default() };
        let waited = Waited { sends: 2, reads: 1, ..Waited::default() };
        assert_eq!(
            line(&end(EndReason::Silent, waited), Some("10.0.0.7:52000"), &settings),
            "session with 02:00:00:00:00:09 (10.0.0.7:52000) ended: it has been silent for 5.0 s \
             (T_dead 5.0 s); begun 12.3 s ago, 307 packets repeated, 2 packets not acknowledged; \
             FI_EHOSTUNREACH: sends 2, reads 1"
        );
        let quiet = SessionEnd {
            retransmits: 0,
            in_flight: 0,
            ..end(EndReason::Closed, Waited::default())
        };
        assert_eq!(
            line(&quiet, None, &settings),
            "session with 02:00:00:00:00:09 ended: it closed the session; last heard 5.0 s ago; \
             begun 12.3 s ago; nothing waited"
        );
    }

    /// `docs/trouble.md` has a row for each reason that ends a session, with the words of its line,
    /// its code, and whether the peer is told.
    #[test]
    fn the_table_of_ends_is_true() {
        let versions = wire::VERSIONS;
        let reasons = [
            EndReason::NoAnswer,
            EndReason::Silent,
            EndReason::Died,
            EndReason::NoProgress,
            EndReason::Stuck(9014),
            EndReason::Starved,
            EndReason::Reset,
            EndReason::Closed,
            EndReason::TakenForDead,
            EndReason::Restarted,
            EndReason::Unnamed,
            EndReason::Superseded,
            EndReason::Evicted,
            EndReason::Excess,
            EndReason::OtherKey,
            EndReason::NoKey,
            EndReason::Version(versions),
            EndReason::Left,
            EndReason::PortGone,
        ];
        let doc = include_str!("../../docs/trouble.md");
        let table = doc.split("## How operations end with a session").nth(1).expect("the section");
        let rows: Vec<Vec<&str>> = (table.lines())
            .filter(|line| line.starts_with("| ") && !line.starts_with("| log"))
            .map(|line| line.split('|').map(str::trim).collect())
            .collect();
        assert_eq!(rows.len(), reasons.len());
        for (reason, row) in reasons.into_iter().zip(rows) {
            assert!(reason.to_string().starts_with(row[1]), "{reason:?}: {row:?}");
            let code = reason.error().fi_errno();
            let name = errno::ALL.iter().find(|(_, value)| *value == code).expect("a code").0;
            assert_eq!(row[2], format!("`{name}`"), "{reason:?}");
            assert_eq!(row[4], if reason.sends_rst() { "yes" } else { "no" }, "{reason:?}");
        }
    }

    #[test]
    fn only_an_orderly_end_for_which_nothing_waited_is_no_warning() {
        let waited = Waited { collectives: 1, ..Waited::default() };
        assert_eq!(level(&end(EndReason::Closed, Waited::default())), Level::INFO);
        assert_eq!(level(&end(EndReason::Closed, waited)), Level::WARN);
        assert_eq!(level(&end(EndReason::Silent, Waited::default())), Level::WARN);
        let unused = SessionEnd { was_open: false, ..end(EndReason::NoAnswer, Waited::default()) };
        assert_eq!(level(&unused), Level::INFO);
    }

    /// An engine with a pending message to each of `count` peers that never answer.
    fn unanswered_engine(count: u8) -> Engine {
        let (port, _) = Loopback::pair();
        let settings = NodeSettings { incarnation: 1, ..NodeSettings::default() };
        let mut node = Node::new(settings, port.caps()).unwrap();
        let (av, cq) = (node.sessions().av_open(256).unwrap(), node.cqs.open(256).unwrap());
        let ep = node.eps.open(EpAttr::default()).unwrap();
        node.objects().ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
        node.objects().ep_bind_av(ep, av).unwrap();
        node.ep_enable(ep).unwrap();
        for n in 1..=count {
            let (station, incarnation) = (Station::at([2, 9, 0, 0, 0, n]), 7);
            let addr = EpAddr { station, ep: 0, incarnation };
            let dest = node.sessions().av_insert(Instant(1), av, addr).unwrap();
            let (kind, buf, flags) = (MsgKind::Msg, IoBuf::EMPTY, OpFlags::empty());
            let (tag, data, context, no_completion) = (0, 0, 7, false);
            let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
            node.post_send(Instant(1), ep, req).unwrap();
        }
        Engine::new(node, Box::new(port))
    }

    /// Goal: many sessions that end at once do not flood a terminal, and suppressed lines are
    /// counted and logged later. Method: the loss of a port with 200 peers, and a clock moved by
    /// hand.
    #[test]
    fn lines_are_limited_and_what_is_withheld_is_counted() {
        let lines = Lines::default();
        tracing::subscriber::with_default(LogCapture(Arc::clone(&lines)), || {
            let mut engine = unanswered_engine(200);
            let mut notice_log = NoticeLog::default();
            assert!(!notice_log.is_due(&engine));
            engine.node_mut().port_gone(Instant(2));
            assert!(notice_log.is_due(&engine));
            notice_log.drain(&mut engine);
            assert_eq!(lines.lock().unwrap().len(), BURST as usize);
            assert!(notice_log.is_due(&engine), "180 are not told of");
            notice_log.drain(&mut engine);
            assert_eq!(lines.lock().unwrap().len(), BURST as usize, "no second has passed");
            notice_log.refilled = Instant(engine.last_now().0 - PERIOD_NS);
            notice_log.drain(&mut engine);
            assert!(!notice_log.is_due(&engine));
        });
        let lines = lines.lock().unwrap();
        assert_eq!(lines.len(), BURST as usize + 1);
        assert!(lines[0].1.contains("the port is gone"), "{lines:?}");
        assert!(lines[0].1.ends_with("FI_ENETDOWN: sends 1"), "{lines:?}");
        let more = (
            Level::WARN,
            "180 more lines of this kind; `barewire stats` counts sessions".to_owned(),
        );
        assert_eq!(lines[BURST as usize], more);
    }
}
