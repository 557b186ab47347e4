//! Statistics for other processes: a block of fixed layout in /dev/shm, one file per domain,
//! written by the thread that turns the loop and read by `barewire stats`. A lock on the file shows
//! that its writer lives (`driver::backend::lock`); the next domain that opens removes files
//! without a lock.
//!
//! The block is an array of 64-bit words in this machine's byte order. A reader takes a copy and
//! keeps it if the sequence word was even and the same before and after; nothing in it is trusted
//! beyond that, as every process of the same user could write it. Names of counters stand here and
//! not in the block: writer and reader of one [`LAYOUT`] agree on them.
//!
//! | words | hold |
//! |---|---|
//! | 0, 1, 2 | [`MAGIC`], [`LAYOUT`], number of words before the rows |
//! | 3 | sequence: odd while the writer is inside |
//! | 4, 5, 6 | process id, time of opening and of this update in ns since 1970 |
//! | 7 .. 11 | MAC, MTU, incarnation, T_dead in ns |
//! | 11, 12 | rows of endpoints, rows of sessions |
//! | 13 | time of the program's last poll, ns since 1970 |
//! | 14, 15 | kind: 0 a domain, 1 a switch; not 0: somebody [records](record) it |
//! | 16 .. 32 | name of the port, zero-padded |
//! | then | [`PORT_NAMES`], [`NODE_NAMES`], refusals by cause, [`LEVEL_NAMES`] |
//! | then | counts of round trips by length (`RoundTrips`), and the ns that all took |
//! | then | 8 stations that refused frames claim to be from, of 6 words ([`Claim`]); 0 if none |
//! | then | room for 65,537 endpoints of 8 words, then for sessions of 16 |
//!
//! A `barewire switch` publishes in the same way: see [`switch`].
//!
//! A row stands at the number of its slot in the node's table; one whose slot is not in use is 0.
//! The file has memory for the rows that were ever used and holes for the rest. An update writes at
//! most 64 rows of each kind, round robin, so its cost is bounded; with 4,096 rows a row is at most
//! 0.7 s older than the domain's last update.

use std::io;
use std::path::{Path, PathBuf};

use barewire_dataplane::idx::{EpIdx, PeerIdx};
use barewire_dataplane::node::{
    CLAIMS_MAX, Claim, EpCounters, Levels, Node, NodeCounters, RoundTrips, SessionStats, Survey,
    SurveySink, Wait,
};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::Instant;
use barewire_dataplane::wire::WireError;
use barewire_driver::port::{PortCaps, PortCounters, Station};

mod file;
pub mod record;
pub mod switch;

use file::{Block, HEADER_LEN, Loaded, NAME_LEN, Shape, Table, Writer};
use record::Backoff;
use switch::SwitchSnapshot;

/// First word of a block: "BWSTATS" and a zero byte.
pub const MAGIC: u64 = u64::from_le_bytes(*b"BWSTATS\0");

/// Version of the layout and of the names.
pub const LAYOUT: u64 = 11;

/// Where the files are.
pub const DIR: &str = "/dev/shm";

/// Rows for endpoints in a block: the most that a node can have.
const EP_MAX: usize = 65_537;

/// Most sessions that a reader accepts: the most that a node can have. A block has room for those
/// of its node.
const SESSION_MAX: usize = Node::PEER_MAX;

/// Period of updates, nanoseconds.
const PERIOD_NS: u64 = 10_000_000;

/// Counters of the port: of all frames, then of frames to and from near stations.
pub const PORT_NAMES: [&str; 16] = [
    "rx_frames",
    "rx_bytes",
    "tx_frames",
    "tx_bytes",
    "tx_full",
    "tx_no_route",
    "rx_dropped",
    "tx_dropped",
    "near_rx_frames",
    "near_rx_bytes",
    "near_tx_frames",
    "near_tx_bytes",
    "near_tx_full",
    "near_tx_no_route",
    "near_rx_dropped",
    "near_tx_dropped",
];

/// Counters of the node, except those of frames refused by the codec.
pub const NODE_NAMES: [&str; 60] = [
    "rx_frames",
    "rx_not_ours",
    "rx_no_crc",
    "rx_not_near",
    "rx_clear",
    "rx_forged",
    "rx_replayed",
    "rx_cert_time",
    "rx_cert_issuer",
    "rx_cert_name",
    "rx_cert_signature",
    "rx_cert_malformed",
    "rx_cert_limited",
    "rx_no_session",
    "rx_bad_ack",
    "rx_duplicate",
    "rx_out_of_window",
    "rx_no_buffer",
    "rx_refused",
    "rx_no_endpoint",
    "rx_stray",
    "rx_bad_key",
    "rx_bad_access",
    "rx_bad_atomic",
    "rx_bad_rst",
    "rx_bad_open",
    "rx_open_limited",
    "rx_unnamed",
    "rx_not_inserted",
    "rx_who",
    "rx_here_stray",
    "rx_mcast",
    "rx_mcast_dropped",
    "rx_mcast_other",
    "rx_marked",
    "rx_echoes",
    "tx_frames",
    "tx_retransmits",
    "tx_acks",
    "tx_echoes",
    "tx_probes",
    "tx_asks",
    "tx_replies_limited",
    "tx_challenges",
    "tx_here",
    "tx_mcast",
    "msgs_sent",
    "msgs_received",
    "msgs_unexpected",
    "rma_done",
    "rma_executed",
    "rx_coll_unknown",
    "colls_done",
    "colls_shared",
    "sessions_opened",
    "sessions_dead",
    "sessions_reset",
    "sessions_stuck",
    "timeouts",
    "peers",
];

/// Fill levels of the node's tables.
pub const LEVEL_NAMES: [&str; 13] = [
    "tx",
    "sent",
    "packs",
    "posted",
    "stored",
    "blocks",
    "pulls",
    "pull_bytes",
    "held",
    "jobs",
    "late",
    "cq_reserved",
    "timers",
];

const PORT_AT: usize = HEADER_LEN + NAME_LEN;
const NODE_AT: usize = PORT_AT + PORT_NAMES.len();
const WIRE_AT: usize = NODE_AT + NODE_NAMES.len();
const LEVEL_AT: usize = WIRE_AT + WireError::COUNT;
const TRIPS_AT: usize = LEVEL_AT + LEVEL_NAMES.len();
const CLAIM_AT: usize = TRIPS_AT + RoundTrips::COUNT + 1;
const CLAIM_LEN: usize = 6;
const EP_AT: usize = CLAIM_AT + CLAIMS_MAX * CLAIM_LEN;
const EP_LEN: usize = 8;
const SESSION_LEN: usize = 16;
const SESSION_AT: usize = EP_AT + EP_MAX * EP_LEN;

/// Numbers of the tables.
const EPS: usize = 0;
const SESSIONS: usize = 1;

/// Layout of the block of a domain with room for `session_max` sessions.
const fn shape(session_max: usize) -> Shape {
    let eps = Table { at: EP_AT, row_len: EP_LEN, max: EP_MAX };
    let sessions = Table { at: SESSION_AT, row_len: SESSION_LEN, max: session_max };
    Shape { kind: 0, head_len: EP_AT, tables: [eps, sessions] }
}

/// Value of a count that is not available.
const UNKNOWN: u64 = u64::MAX;

/// States of a session, by their number in the block.
const STATES: [&str; 4] = ["idle", "opening", "answered", "open"];

/// The writer of a domain's block.
pub(crate) struct Publisher {
    writer: Writer,
    backoff: Backoff,
    survey: Survey,
    due: u64,
}

impl Publisher {
    /// Creates the file of a domain. A failure is logged and is not an error of the domain.
    pub(crate) fn create(engine: &mut Engine) -> Option<Self> {
        let peer_max = engine.node().settings().peer_max;
        let mut publisher =
            Self::try_create(Path::new(DIR), peer_max).map_err(no_statistics).ok()?;
        publisher.publish(engine, None);
        Some(publisher)
    }

    fn try_create(dir: &Path, peer_max: usize) -> io::Result<Self> {
        let writer = Writer::create(dir, shape(peer_max))?;
        Ok(Self { writer, backoff: Backoff::default(), survey: Survey::default(), due: 0 })
    }

    /// Whether the next update is due.
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        now.0 >= self.due
    }

    /// Writes the counters and the next rows. `absent_since` is when the program polled last, if
    /// the receive thread turns the loop.
    #[cold]
    pub(crate) fn publish(&mut self, engine: &mut Engine, absent_since: Option<Instant>) {
        self.due = engine.last_now().0.saturating_add(PERIOD_NS);
        let survey = &mut self.survey;
        self.writer.update(|block, now| {
            let absent_ns = absent_since.map_or(0, |since| engine.last_now().since(since));
            block.put(13, now.saturating_sub(absent_ns));
            put_identity(engine, block);
            let survey = engine.survey(survey, block);
            let near = engine.near_counters().unwrap_or_default();
            block.put_all(PORT_AT, &port_words(engine.port_counters()));
            block.put_all(PORT_AT + PORT_NAMES.len() / 2, &port_words(near));
            counters(&survey, block);
            let trips = &engine.node().observed.round_trips;
            block.put_all(TRIPS_AT, trips.counts());
            block.put(TRIPS_AT + RoundTrips::COUNT, trips.sum_ns());
            for (i, claim) in engine.node().observed.claims().iter().enumerate() {
                block.put_all(CLAIM_AT + i * CLAIM_LEN, &claim_words(claim));
            }
        });
        record::serve_request(&self.writer, &mut self.backoff, |segment| engine.record(segment));
    }
}

fn no_statistics(why: io::Error) {
    tracing::warn!("no statistics for `barewire stats`: {DIR}: {why}");
}

impl SurveySink for Block {
    fn endpoint(&mut self, slot: EpIdx, ep: Option<&EpCounters>) {
        let words = ep.map_or([0; EP_LEN], |c| {
            [
                // 0 means no endpoint.
                u64::from(c.number) + 1,
                c.sent,
                c.sent_bytes,
                c.received,
                c.received_bytes,
                c.errors,
                c.unexpected.into(),
                c.posted.into(),
            ]
        });
        self.put_row(EPS, slot.at(), &words);
    }

    fn session(&mut self, slot: PeerIdx, session: Option<&SessionStats>) {
        let words = session.map_or([0; SESSION_LEN], session_words);
        self.put_row(SESSIONS, slot.at(), &words);
    }
}

fn claim_words(claim: &Claim) -> [u64; CLAIM_LEN] {
    let Claim { station, counts: [forged, clear, replayed, certificate], others } = *claim;
    [station.word(), forged, clear, replayed, certificate, others]
}

fn session_words(s: &SessionStats) -> [u64; SESSION_LEN] {
    let state = STATES.iter().position(|&name| name == s.info.state).unwrap_or(0);
    let wait = Wait::ALL.iter().position(|&wait| wait == s.wait).unwrap_or(0);
    let (tx_bytes, rx_bytes) = s.bytes.unwrap_or((UNKNOWN, UNKNOWN));
    [
        s.info.station.word(),
        s.info.incarnation,
        state as u64 | (wait as u64) << 8 | u64::from(s.info.in_flight) << 32,
        s.info.srtt_ns,
        u64::from(s.info.credits) | u64::from(s.info.waiting) << 32,
        s.rtt_min_ns,
        s.age_ns,
        s.silent_ns,
        s.tx_packets,
        s.rx_packets,
        tx_bytes,
        rx_bytes,
        u64::from(s.retransmits) | u64::from(s.timeouts) << 32,
        u64::from(s.window) | u64::from(s.frame_max) << 32,
        s.rto_ns,
        u64::from(s.is_near) | u64::from(s.is_lossless) << 1 | u64::from(s.rtt_var_ns) << 32,
    ]
}

/// Writes the constant identity of the domain: port, incarnation, T_dead.
fn put_identity(engine: &Engine, block: &Block) {
    put_port(engine.caps(), block);
    block.put(9, engine.node().settings().incarnation);
    block.put(10, engine.node().settings().t_dead_ns);
}

fn put_port(caps: &PortCaps, block: &Block) {
    block.put(7, caps.station.word());
    block.put(8, caps.mtu as u64);
    block.put_name(HEADER_LEN, &caps.name);
}

/// In the order of either half of [`PORT_NAMES`].
fn port_words(p: PortCounters) -> [u64; PORT_NAMES.len() / 2] {
    [
        p.rx_frames,
        p.rx_bytes,
        p.tx_frames,
        p.tx_bytes,
        p.tx_full,
        p.tx_no_route,
        p.rx_dropped,
        p.tx_dropped,
    ]
}

fn counters((c, l): &(NodeCounters, Levels), block: &Block) {
    let node: [u64; NODE_NAMES.len()] = [
        c.rx_frames,
        c.rx_not_ours,
        c.rx_no_crc,
        c.rx_not_near,
        c.rx_clear,
        c.rx_forged,
        c.rx_replayed,
        c.rx_cert_time,
        c.rx_cert_issuer,
        c.rx_cert_name,
        c.rx_cert_signature,
        c.rx_cert_malformed,
        c.rx_cert_limited,
        c.rx_no_session,
        c.rx_bad_ack,
        c.rx_duplicate,
        c.rx_out_of_window,
        c.rx_no_buffer,
        c.rx_refused,
        c.rx_no_endpoint,
        c.rx_stray,
        c.rx_bad_key,
        c.rx_bad_access,
        c.rx_bad_atomic,
        c.rx_bad_rst,
        c.rx_bad_open,
        c.rx_open_limited,
        c.rx_unnamed,
        c.rx_not_inserted,
        c.rx_who,
        c.rx_here_stray,
        c.rx_mcast,
        c.rx_mcast_dropped,
        c.rx_mcast_other,
        c.rx_marked,
        c.rx_echoes,
        c.tx_frames,
        c.tx_retransmits,
        c.tx_acks,
        c.tx_echoes,
        c.tx_probes,
        c.tx_asks,
        c.tx_replies_limited,
        c.tx_challenges,
        c.tx_here,
        c.tx_mcast,
        c.msgs_sent,
        c.msgs_received,
        c.msgs_unexpected,
        c.rma_done,
        c.rma_executed,
        c.rx_coll_unknown,
        c.colls_done,
        c.colls_shared,
        c.sessions_opened,
        c.sessions_dead,
        c.sessions_reset,
        c.sessions_stuck,
        c.timeouts,
        l.peers as u64,
    ];
    let level = levels(l);
    let parts: [(usize, &[u64]); 3] = [(NODE_AT, &node), (WIRE_AT, &c.rx_wire), (LEVEL_AT, &level)];
    for (at, values) in parts {
        block.put_all(at, values);
    }
}

fn levels(l: &barewire_dataplane::node::Levels) -> [u64; LEVEL_NAMES.len()] {
    [
        l.tx as u64,
        l.sent as u64,
        l.packs as u64,
        l.posted as u64,
        l.unexpected as u64,
        l.blocks as u64,
        l.pulls as u64,
        l.pull_bytes,
        l.reorder_buf as u64,
        l.responses as u64,
        l.late as u64,
        l.cq_reserved as u64,
        l.timers as u64,
    ]
}

/// Published statistics of a domain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its file.
    pub path: PathBuf,
    /// Its process.
    pub pid: u32,
    /// Whether the domain is still open.
    pub alive: bool,
    /// When the domain was opened, ns since 1970.
    pub opened_ns: u64,
    /// When the block was written, ns since 1970. A domain whose loop is not turned writes nothing.
    pub updated_ns: u64,
    /// When the program polled last, ns since 1970. A receive thread may have turned the loop since
    /// then.
    pub polled_ns: u64,
    /// The port.
    pub port_name: String,
    /// Its address.
    pub station: Station,
    /// Bytes of a frame after its Ethernet header.
    pub mtu: usize,
    /// Incarnation of the domain.
    pub incarnation: u64,
    /// Silence after which a peer is dead, ns.
    pub t_dead_ns: u64,
    /// Counters of the port.
    pub port: Vec<(&'static str, u64)>,
    /// Counters of the node.
    pub node: Vec<(&'static str, u64)>,
    /// Frames refused by the codec, by cause.
    pub refused: Vec<(&'static str, u64)>,
    /// Fill levels of the node's tables.
    pub levels: Vec<(&'static str, u64)>,
    /// Histogram of round trips to far peers: counts for each of [`RoundTrips::lengths`].
    pub round_trips: Vec<u64>,
    /// Sum of these round trips, ns.
    pub round_trips_ns: u64,
    /// Claimed source stations of frames that were refused for their seal, the most frames first.
    pub claims: Vec<Claim>,
    /// Endpoints.
    pub endpoints: Vec<EpRow>,
    /// Peers, with their sessions.
    pub sessions: Vec<SessionRow>,
}

/// One endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpRow {
    /// Its number.
    pub number: u16,
    /// Sends completed.
    pub sent: u64,
    /// Bytes of these.
    pub sent_bytes: u64,
    /// Messages received.
    pub received: u64,
    /// Bytes of these.
    pub received_bytes: u64,
    /// Operations that failed.
    pub errors: u64,
    /// Messages that wait for a receive.
    pub unexpected: u64,
    /// Receives posted.
    pub posted: u64,
}

/// One session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionRow {
    /// The peer.
    pub station: Station,
    /// Its incarnation, 0 if not known.
    pub incarnation: u64,
    /// `idle`, `opening`, `answered` or `open`.
    pub state: &'static str,
    /// Packets in flight.
    pub in_flight: u64,
    /// Smoothed round trip, ns; 0 if not measured.
    pub srtt_ns: u64,
    /// Credits left to send with.
    pub credits: u64,
    /// Operations that wait for the peer.
    pub waiting: u64,
    /// What they wait for: a name of [`Wait`].
    pub wait: &'static str,
    /// Smallest round trip, ns; 0 if not measured.
    pub rtt_min_ns: u64,
    /// Time since the session began, ns.
    pub age_ns: u64,
    /// Time, at the update of the row, since the last frame of the peer or since an operation began
    /// to wait for it, whichever is later, ns.
    pub silent_ns: u64,
    /// Packets sent, without repetitions and control packets.
    pub tx_packets: u64,
    /// Packets taken in order.
    pub rx_packets: u64,
    /// Bytes of frames to the peer, `None` if they are not counted. On a shared segment the count
    /// includes the padding of the ring, and starts when the two processes met.
    pub tx_bytes: Option<u64>,
    /// Bytes of frames from the peer.
    pub rx_bytes: Option<u64>,
    /// Packets sent again.
    pub retransmits: u64,
    /// Retransmission timeouts.
    pub timeouts: u64,
    /// Packets that may be in flight.
    pub window: u64,
    /// Longest frame of both ends, bytes after the Ethernet header.
    pub frame_max: u64,
    /// Retransmission timeout, ns, longer with each timeout in a row; 0 where nothing is
    /// retransmitted.
    pub rto_ns: u64,
    /// Mean deviation of the round trip, ns.
    pub rtt_var_ns: u64,
    /// Whether the peer is reached through memory of this node.
    pub is_near: bool,
    /// Whether the path to the peer is lossless.
    pub is_lossless: bool,
}

/// All statistics on this machine that this user may read (root: of all users).
#[derive(Clone, Debug, Default)]
pub struct Published {
    /// Domains, by process and by when they were opened; of one process number those first that the
    /// user of that process published.
    pub domains: Vec<Snapshot>,
    /// Switches, in the same order.
    pub switches: Vec<SwitchSnapshot>,
    /// Live processes whose statistics this program cannot read.
    pub unread: Vec<UnreadableProcess>,
}

/// A process whose statistics have an unknown version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnreadableProcess {
    /// The process, as its file is named.
    pub pid: u32,
    /// The version of its layout, and the version that this program reads.
    pub why: String,
}

/// Reads all published statistics. Files that cannot be opened or are damaged are left out.
///
/// # Errors
/// The directory cannot be read.
pub fn read_published() -> io::Result<Published> {
    published_in(Path::new(DIR))
}

/// Identity of a process that publishes statistics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PublisherInfo {
    /// The process.
    pub pid: u32,
    /// The user whose file it is.
    pub owner: u32,
    /// Whether the domain or switch is still open.
    pub alive: bool,
    /// The port; of a switch, that of its NIC.
    pub port_name: String,
    /// Whether it is a switch.
    pub is_switch: bool,
    /// The network namespace in which it opened the port, by its inode; 0 if it could not see that.
    pub netns: u32,
}

impl PublisherInfo {
    /// Whether it opened the port in the network namespace of this thread. True if either is
    /// unknown.
    pub fn is_here(&self) -> bool {
        let here = file::netns();
        self.netns == 0 || here == 0 || self.netns == here
    }
}

/// Identifies the process that publishes in the file `path`.
///
/// # Errors
/// The file is another user's, of another version, or not yet written.
pub fn publisher_of(path: &Path) -> io::Result<PublisherInfo> {
    let loaded = file::load(path, &[shape(SESSION_MAX), switch::SHAPE])?;
    Ok(PublisherInfo {
        pid: loaded.pid,
        owner: loaded.owner,
        alive: loaded.alive,
        port_name: loaded.name(HEADER_LEN),
        is_switch: loaded.kind == switch::SHAPE.kind,
        netns: loaded.netns,
    })
}

fn published_in(dir: &Path) -> io::Result<Published> {
    let (mut all, mut domains, mut switches) = (Published::default(), Vec::new(), Vec::new());
    for path in file::files(dir)? {
        match file::load(&path, &[shape(SESSION_MAX), switch::SHAPE]) {
            Ok(loaded) => {
                let place = (loaded.pid, !is_of(loaded.pid, loaded.owner), loaded.opened_ns);
                match loaded.kind == switch::SHAPE.kind {
                    true => switches.push((place, switch::parse(&loaded))),
                    false => domains.push((place, parse(&loaded))),
                }
            }
            Err(e) if e.kind() == io::ErrorKind::Unsupported => {
                let pid = file::pid_of(&path).unwrap_or(0);
                all.unread.push(UnreadableProcess { pid, why: e.to_string() });
            }
            Err(_) => {}
        }
    }
    domains.sort_by_key(|&(place, _)| place);
    switches.sort_by_key(|&(place, _)| place);
    all.domains = domains.into_iter().map(|(_, domain)| domain).collect();
    all.switches = switches.into_iter().map(|(_, switch)| switch).collect();
    all.unread.sort_by_key(|u| u.pid);
    Ok(all)
}

/// Whether process `pid` belongs to `user`. A file can name any process, and would hide that
/// process's own file where each process is shown once.
fn is_of(pid: u32, user: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let users = status.lines().find_map(|line| line.strip_prefix("Uid:")).unwrap_or_default();
    users.split_whitespace().any(|uid| uid.parse() == Ok(user))
}

/// The statistics of all domains: see [`read_published`].
///
/// # Errors
/// As there.
pub fn read_all() -> io::Result<Vec<Snapshot>> {
    Ok(read_published()?.domains)
}

#[cfg(test)]
fn read(path: &Path) -> io::Result<Snapshot> {
    file::load(path, &[shape(SESSION_MAX)]).map(|loaded| parse(&loaded))
}

fn parse(loaded: &Loaded) -> Snapshot {
    let w = &loaded.head;
    Snapshot {
        path: loaded.path.clone(),
        pid: loaded.pid,
        alive: loaded.alive,
        opened_ns: loaded.opened_ns,
        updated_ns: loaded.updated_ns,
        polled_ns: w[13],
        port_name: loaded.name(HEADER_LEN),
        station: Station::from_word(w[7]),
        mtu: w[8] as usize,
        incarnation: w[9],
        t_dead_ns: w[10],
        port: loaded.named(&PORT_NAMES, PORT_AT),
        node: loaded.named(&NODE_NAMES, NODE_AT),
        refused: WireError::ALL.iter().map(|e| (e.name(), w[WIRE_AT + e.index()])).collect(),
        levels: loaded.named(&LEVEL_NAMES, LEVEL_AT),
        round_trips: w[TRIPS_AT..TRIPS_AT + RoundTrips::COUNT].to_vec(),
        round_trips_ns: w[TRIPS_AT + RoundTrips::COUNT],
        claims: claims(&w[CLAIM_AT..EP_AT]),
        endpoints: loaded.rows(EPS).map(ep_row).collect(),
        sessions: loaded.rows(SESSIONS).map(session_row).collect(),
    }
}

fn claims(words: &[u64]) -> Vec<Claim> {
    let claim = |r: &[u64; CLAIM_LEN]| Claim {
        station: Station::from_word(r[0]),
        counts: [r[1], r[2], r[3], r[4]],
        others: r[5],
    };
    let (rows, _) = words.as_chunks();
    let mut claims: Vec<_> = rows.iter().map(claim).filter(|claim| claim.most() > 0).collect();
    claims.sort_by_key(|claim| std::cmp::Reverse(claim.most()));
    claims
}

fn ep_row(r: &[u64; EP_LEN]) -> EpRow {
    EpRow {
        number: (r[0] - 1) as u16,
        sent: r[1],
        sent_bytes: r[2],
        received: r[3],
        received_bytes: r[4],
        errors: r[5],
        unexpected: r[6],
        posted: r[7],
    }
}

fn session_row(r: &[u64; SESSION_LEN]) -> SessionRow {
    let (low, high) = (|word: u64| word & 0xffff_ffff, |word: u64| word >> 32);
    let counted = |word: u64| (word != UNKNOWN).then_some(word);
    SessionRow {
        station: Station::from_word(r[0]),
        incarnation: r[1],
        state: STATES.get((r[2] & 0xff) as usize).copied().unwrap_or("?"),
        wait: Wait::ALL.get((r[2] >> 8 & 0xff) as usize).map_or("?", |wait| wait.name()),
        in_flight: high(r[2]),
        srtt_ns: r[3],
        credits: low(r[4]),
        waiting: high(r[4]),
        rtt_min_ns: r[5],
        age_ns: r[6],
        silent_ns: r[7],
        tx_packets: r[8],
        rx_packets: r[9],
        tx_bytes: counted(r[10]),
        rx_bytes: counted(r[11]),
        retransmits: low(r[12]),
        timeouts: high(r[12]),
        window: low(r[13]),
        frame_max: high(r[13]),
        rto_ns: r[14],
        is_near: r[15] & 1 != 0,
        is_lossless: r[15] & 2 != 0,
        rtt_var_ns: high(r[15]),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{FileExt, MetadataExt};

    use barewire_dataplane::flags::{BindFlags, OpFlags};
    use barewire_dataplane::node::{EpAttr, EpId, MsgKind, Node, NodeSettings, SendReq};
    use barewire_dataplane::types::EpAddr;
    use barewire_driver::backend::loopback::Loopback;
    use barewire_driver::mem::IoBuf;
    use barewire_driver::port::Port;

    use super::*;

    fn engine() -> Engine {
        let (port, _) = Loopback::pair();
        let settings =
            NodeSettings { incarnation: 77, unexpected_bytes: 1 << 20, ..Default::default() };
        let node = Node::new(settings, port.caps()).unwrap();
        Engine::new(node, Box::new(port))
    }

    #[test]
    fn claims_are_read_as_written_the_heaviest_first() {
        let claim = |n: u8, forged| Claim {
            station: Station::at([2, 0, 0, 0, 0, n]),
            counts: [forged, 2, 3, 4],
            others: 5,
        };
        let written = [claim_words(&claim(1, 7)), claim_words(&claim(2, 9)), [0; CLAIM_LEN]];
        assert_eq!(claims(&written.concat()), [claim(2, 9), claim(1, 7)]);
    }

    #[test]
    fn published_statistics_are_read_back() {
        let mut engine = engine();
        engine.node_mut().eps.open(Default::default()).unwrap();
        let mut publisher = Publisher::try_create(&std::env::temp_dir(), 4096).unwrap();
        let since = Instant(engine.last_now().0.saturating_sub(73_000_000_000));
        publisher.publish(&mut engine, Some(since));
        let s = read(&publisher.writer.path).unwrap();
        let absent = s.updated_ns - s.polled_ns;
        let most = engine.last_now().0.min(73_000_000_000);
        assert!((most - 1_000_000_000..=most).contains(&absent), "{absent}");
        publisher.publish(&mut engine, None);
        let s = read(&publisher.writer.path).unwrap();
        assert!(s.polled_ns.abs_diff(s.updated_ns) < 1_000_000_000);
        assert_eq!((s.pid, s.alive, s.incarnation), (std::process::id(), true, 77));
        assert_eq!(
            (s.station, s.port_name.as_str()),
            (engine.caps().station, &*engine.caps().name)
        );
        assert_eq!((s.endpoints.len(), s.endpoints[0].number), (1, 0));
        assert_eq!(s.refused.len(), WireError::COUNT);
        let path = publisher.writer.path.clone();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        drop(publisher);
        assert!(!path.exists());
    }

    /// Goal: every session is shown, not the first so many. Method: more peers and endpoints than
    /// an update looks at, with numbers in between that are free again.
    #[test]
    fn all_sessions_and_endpoints_are_shown() {
        const PEERS: u16 = 300;
        let mut engine = engine();
        let node = engine.node_mut();
        let av = node.sessions().av_open(1).unwrap();
        for n in 0..PEERS {
            let [a, b] = n.to_be_bytes();
            let addr = EpAddr { station: Station::at([2, 7, 0, 0, a, b]), ep: 1, incarnation: 0 };
            node.sessions().av_insert(Instant(1), av, addr).unwrap();
        }
        let eps: Vec<EpId> = (0..150).map(|_| node.eps.open(Default::default()).unwrap()).collect();
        eps.iter().step_by(3).for_each(|&ep| node.ep_close(Instant(1), ep).unwrap());
        let mut publisher = Publisher::try_create(&std::env::temp_dir(), 4096).unwrap();
        for _ in 0..5 {
            publisher.publish(&mut engine, None);
        }
        let s = read(&publisher.writer.path).unwrap();
        let macs: std::collections::BTreeSet<_> = s.sessions.iter().map(|s| s.station).collect();
        assert_eq!((s.sessions.len(), macs.len()), (PEERS.into(), PEERS.into()));
        assert_eq!(s.endpoints.len(), 100);
        let peers = s.node.iter().find(|(name, _)| *name == "peers");
        assert_eq!(peers, Some(&("peers", u64::from(PEERS))));
        assert_eq!(s.sessions[7].state, "idle");
    }

    /// Goal: a file of another user for the same process, port and address does not hide a domain's
    /// own file, whatever age it claims.
    #[test]
    fn a_process_is_shown_by_its_own_user_first() {
        if !nix::unistd::geteuid().is_root() {
            println!("SKIPPED: only root has files of several users");
            return;
        }
        let dir = std::env::temp_dir().join(format!("barewire-of-liars-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut publisher = Publisher::try_create(&dir, 16).unwrap();
        publisher.publish(&mut engine(), None);
        let own = publisher.writer.path.clone();
        let [older, newer] = ["barewire-stats.7.1.1", "barewire-stats.7.1.2"].map(|n| dir.join(n));
        for (path, opened_ns) in [(&older, 1_u64), (&newer, u64::MAX)] {
            fs::copy(&own, path).unwrap();
            let file = fs::OpenOptions::new().write(true).open(path).unwrap();
            // Where the time of opening stands.
            file.write_all_at(&opened_ns.to_ne_bytes(), 5 * 8).unwrap();
            std::os::unix::fs::chown(path, Some(7), None).unwrap();
        }
        let shown: Vec<_> =
            published_in(&dir).unwrap().domains.into_iter().map(|s| s.path).collect();
        assert_eq!(shown, [own, older, newer]);
        drop(publisher);
        fs::remove_dir_all(&dir).unwrap();
    }

    /// Two engines, of which the second has `count` unexpected messages.
    fn with_unexpected(count: u64) -> [Engine; 2] {
        let (a, b) = Loopback::pair();
        let open = |port: Loopback, incarnation| {
            let room = 64 << 20;
            let settings =
                NodeSettings { incarnation, unexpected_bytes: room, ..NodeSettings::default() };
            let mut node = Node::new(settings, port.caps()).unwrap();
            let (av, cq) = (node.sessions().av_open(4).unwrap(), node.cqs.open(16).unwrap());
            let ep = node.eps.open(EpAttr::default()).unwrap();
            node.objects().ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
            node.objects().ep_bind_av(ep, av).unwrap();
            node.ep_enable(ep).unwrap();
            (Engine::new(node, Box::new(port)), av, ep)
        };
        let ((mut a, av, ep), (mut b, _, b_ep)) = (open(a, 11), open(b, 22));
        let addr = b.node().addr_of(b_ep).unwrap();
        let dest = a.av_insert(av, addr).unwrap();
        let mut sent = 0;
        while b.node().eps.counters(b_ep).unwrap().unexpected < count as u32 {
            let (kind, buf, flags) = (MsgKind::Msg, IoBuf::EMPTY, OpFlags::empty());
            let (tag, data, context, no_completion) = (0, 0, 0, true);
            let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
            if sent < count && a.post_send(ep, req).is_ok() {
                sent += 1;
                if sent % 16 != 0 {
                    continue;
                }
            }
            a.turn().unwrap();
            b.turn().unwrap();
        }
        [a, b]
    }

    /// Goal: the cost of an update does not depend on the number of stored messages. Method: the
    /// fastest of many updates with 10 unexpected messages and with 100,000; a walk over these
    /// takes a thousand times as long.
    #[test]
    fn an_update_costs_the_same_whatever_is_stored() {
        let fastest = |count| {
            let [_a, mut b] = with_unexpected(count);
            let mut publisher = Publisher::try_create(&std::env::temp_dir(), 4096).unwrap();
            let took = (0..200).map(|_| {
                let begun = std::time::Instant::now();
                publisher.publish(&mut b, None);
                begun.elapsed()
            });
            let took = took.min().unwrap();
            let shown = read(&publisher.writer.path).unwrap();
            let stored = shown.levels.iter().find(|(name, _)| *name == "stored").unwrap().1;
            assert_eq!(stored, count);
            took
        };
        let (few, many) = (fastest(10), fastest(100_000));
        assert!(many < 4 * few, "{few:?} with 10 messages, {many:?} with 100,000");
    }

    #[test]
    fn a_reader_beside_a_writer_sees_whole_blocks() {
        let mut engine = engine();
        let mut publisher = Publisher::try_create(&std::env::temp_dir(), 4096).unwrap();
        publisher.publish(&mut engine, None);
        let path = publisher.writer.path.clone();
        let reader = std::thread::spawn(move || {
            (0..200).filter(|_| read(&path).is_ok_and(|s| s.incarnation == 77)).count()
        });
        while !reader.is_finished() {
            publisher.publish(&mut engine, None);
        }
        // A reader that always meets the writer gives up; it must never see half of one.
        assert!(reader.join().unwrap() > 0);
    }
}
