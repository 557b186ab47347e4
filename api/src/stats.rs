//! Counters that another process can read while we run: a block of fixed layout in /dev/shm, one
//! file per domain, written by whoever turns the loop and read by `barewire stats`. A lock on the
//! file says that its writer lives (`driver::backend::lock`); the next domain that opens removes
//! files without one.
//!
//! The block is an array of 64-bit words in this machine's byte order. A reader takes a copy and
//! keeps it if the sequence word was even and the same before and after; nothing in it is trusted
//! beyond that, as anybody with the same user could write it. Names of counters stand here and not
//! in the block: writer and reader of one [`LAYOUT`] agree on them.
//!
//! | words | hold |
//! |---|---|
//! | 0, 1, 2 | [`MAGIC`], [`LAYOUT`], number of words before the rows |
//! | 3 | sequence: odd while the writer is inside |
//! | 4, 5, 6 | process id, time of opening and of this update in ns since 1970 |
//! | 7 .. 11 | MAC, MTU, incarnation, T_dead in ns |
//! | 11, 12 | rows of endpoints, rows of sessions |
//! | 13 | time of the program's last poll, ns since 1970 |
//! | 14, 15 | reserved, 0 |
//! | 16 .. 32 | name of the port, zero-padded |
//! | then | [`PORT_NAMES`], [`NODE_NAMES`], refusals by cause, [`LEVEL_NAMES`] |
//! | then | room for 65,537 endpoints of 8 words, then for sessions of 16 |
//!
//! A row stands at the number of its slot in the node's table; one whose slot is not in use is 0.
//! The file has memory for the rows that were ever used and holes for the rest. An update writes at
//! most 64 rows of each kind, by turns, so its cost is bounded whatever the node knows and stores;
//! a row of 4,096 is at most 0.7 s older than its domain's update.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{SystemTime, UNIX_EPOCH};

use barewire_dataplane::node::{
    EpCounters, Levels, Node, NodeCounters, SessionStats, Survey, SurveySink, Wait,
};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::Instant;
use barewire_dataplane::wire::WireError;
use barewire_driver::backend::lock;
use barewire_driver::port::{MacAddr, PortCounters};
use memmap2::{MmapOptions, MmapRaw};

/// First word of a block: "BWSTATS" and a zero byte.
pub const MAGIC: u64 = u64::from_le_bytes(*b"BWSTATS\0");

/// Version of the layout and of the names.
pub const LAYOUT: u64 = 3;

/// Where the files are.
pub const DIR: &str = "/dev/shm";

/// Endpoints that have room in a block: as many as a node can have.
const EP_MAX: usize = 65_537;

/// Sessions that a reader believes: as many as a node can have. A block has room for those of its
/// node.
const SESSION_MAX: usize = Node::PEER_MAX;

/// Least time between two updates.
const PERIOD_NS: u64 = 10_000_000;

/// Counters of the port: all frames, and those to and from near stations once more.
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

/// Counters of the node, but for the refusals of the codec.
pub const NODE_NAMES: [&str; 40] = [
    "rx_frames",
    "rx_not_ours",
    "rx_no_crc",
    "rx_not_near",
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
    "tx_frames",
    "tx_retransmits",
    "tx_acks",
    "tx_probes",
    "tx_asks",
    "tx_replies_limited",
    "tx_challenges",
    "msgs_sent",
    "msgs_received",
    "msgs_unexpected",
    "rma_done",
    "rma_executed",
    "rx_coll_unknown",
    "colls_done",
    "sessions_opened",
    "sessions_dead",
    "sessions_reset",
    "sessions_stuck",
    "timeouts",
    "peers",
];

/// How much of each table is in use.
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

const HEADER_WORDS: usize = 16;
const NAME_WORDS: usize = 16;
const PORT_AT: usize = HEADER_WORDS + NAME_WORDS;
const NODE_AT: usize = PORT_AT + PORT_NAMES.len();
const WIRE_AT: usize = NODE_AT + NODE_NAMES.len();
const LEVEL_AT: usize = WIRE_AT + WireError::COUNT;
const EP_AT: usize = LEVEL_AT + LEVEL_NAMES.len();
const EP_WORDS: usize = 8;
const SESSION_WORDS: usize = 16;
const SESSION_AT: usize = EP_AT + EP_MAX * EP_WORDS;
const SEQ: usize = 3;

/// In the place of a count: not counted.
const UNKNOWN: u64 = u64::MAX;

/// States of a session, by their number in the block.
const STATES: [&str; 4] = ["idle", "opening", "answered", "open"];

/// The writing end.
pub(crate) struct Publisher {
    block: Block,
    survey: Survey,
    /// Holds the lock.
    file: File,
    path: PathBuf,
    /// The process that opened the domain; a forked child is another.
    pid: u32,
    due: u64,
}

impl Publisher {
    /// Makes the file of a domain, or says in the log why there is none: statistics are no reason
    /// to fail.
    pub(crate) fn create(engine: &mut Engine) -> Option<Self> {
        let peer_max = engine.node().settings().peer_max;
        match Self::try_create(Path::new(DIR), peer_max) {
            Ok(mut publisher) => {
                publisher.publish(engine, None);
                Some(publisher)
            }
            Err(e) => {
                tracing::warn!("no statistics for `barewire stats`: {DIR}: {e}");
                None
            }
        }
    }

    fn try_create(dir: &Path, peer_max: usize) -> io::Result<Self> {
        remove_dead(dir);
        let pid = std::process::id();
        let (file, path, opened_ns) = create_file(dir, pid)?;
        match file.try_clone().and_then(|file| Block::new(file, peer_max)) {
            Ok(block) => {
                block.put(4, u64::from(pid));
                block.put(5, opened_ns);
                block.put(2, EP_AT as u64);
                block.put(1, LAYOUT);
                Ok(Self { block, survey: Survey::default(), file, path, pid, due: 0 })
            }
            Err(e) => {
                lock::end_life(&file, WRITER);
                // Nothing more can be done about it.
                let _ = fs::remove_file(&path);
                Err(e)
            }
        }
    }

    /// Whether the next update is due.
    #[inline]
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        now.0 >= self.due
    }

    /// Writes counters, and the rows whose turn it is. `absent_since` is when the program polled
    /// last, if somebody else turns the loop.
    #[cold]
    pub(crate) fn publish(&mut self, engine: &mut Engine, absent_since: Option<Instant>) {
        self.due = engine.last_now().0.saturating_add(PERIOD_NS);
        let seq = self.block.word(SEQ).load(Ordering::Relaxed) | 1;
        self.block.put(SEQ, seq);
        // No store below may be seen before the odd number.
        fence(Ordering::Release);
        let now = since_1970();
        let absent_ns = absent_since.map_or(0, |since| engine.last_now().since(since));
        self.block.put(6, now);
        self.block.put(13, now.saturating_sub(absent_ns));
        facts(engine, &self.block);
        let survey = engine.survey(&mut self.survey, &mut self.block);
        let near = engine.near_counters().unwrap_or_default();
        self.block.put_all(PORT_AT, &port_words(engine.port_counters()));
        self.block.put_all(PORT_AT + PORT_NAMES.len() / 2, &port_words(near));
        counters(&survey, &self.block);
        self.block.put(11, self.block.eps as u64);
        self.block.put(12, self.block.sessions as u64);
        self.block.put(0, MAGIC);
        self.block.word(SEQ).store(seq.wrapping_add(1), Ordering::Release);
    }
}

/// The words of a file, of which those that have memory are written.
struct Block {
    map: MmapRaw,
    file: File,
    /// Rows that have been written, and that have memory.
    eps: usize,
    ep_room: usize,
    sessions: usize,
    session_room: usize,
    /// Rows that there may be.
    session_max: usize,
}

impl Block {
    fn new(file: File, session_max: usize) -> io::Result<Self> {
        // A file that is cut short later would kill us with SIGBUS, but only this user can do
        // that, who can kill us anyway. The map is only reached through `word`.
        let words = SESSION_AT + session_max * SESSION_WORDS;
        let map = MmapOptions::new().len(words * 8).map_raw(&file)?;
        let (eps, ep_room, sessions, session_room) = (0, 0, 0, 0);
        let block = Self { map, file, eps, ep_room, sessions, session_room, session_max };
        block.back(0, EP_AT)?;
        Ok(block)
    }

    /// Has memory put behind `len` words from `at`, so that to write them cannot fail: where
    /// /dev/shm is full that would be a SIGBUS.
    fn back(&self, at: usize, len: usize) -> io::Result<()> {
        let (at, len) = (at as libc::off_t * 8, len as libc::off_t * 8);
        nix::fcntl::fallocate(&self.file, nix::fcntl::FallocateFlags::empty(), at, len)?;
        Ok(())
    }

    /// A word that has memory.
    fn word(&self, at: usize) -> &AtomicU64 {
        let ep = || (EP_AT..EP_AT + self.ep_room * EP_WORDS).contains(&at);
        let session = || (SESSION_AT..SESSION_AT + self.session_room * SESSION_WORDS).contains(&at);
        assert!(at < EP_AT || ep() || session(), "word {at} has no memory");
        // SAFETY: a reference to an atomic needs
        // - memory for it, for as long as the borrow: it was just checked that the file has some
        //   there (`back`), which `grown` keeps inside of the map, and that lives in `self`;
        // - alignment: a map starts at a page;
        // - that others write it atomically at most: other processes map it read-only, or do what
        //   any process of the user may do with our memory.
        unsafe { &*self.map.as_ptr().cast::<AtomicU64>().add(at) }
    }

    fn put(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }

    fn put_all(&self, at: usize, values: &[u64]) {
        values.iter().enumerate().for_each(|(i, &value)| self.put(at + i, value));
    }

    /// Rows to make memory for where `row` is written: twice as many as there are.
    fn grown(row: usize, room: usize, most: usize) -> usize {
        (row + 1).max(2 * room).max(64).min(most)
    }
}

impl SurveySink for Block {
    fn endpoint(&mut self, slot: u32, ep: Option<&EpCounters>) {
        let row = slot as usize;
        if row >= self.ep_room {
            let room = Self::grown(row, self.ep_room, EP_MAX);
            // If there is no memory the row is not shown; the next walk tries again.
            if row >= room || self.back(EP_AT, room * EP_WORDS).is_err() {
                return;
            }
            self.ep_room = room;
        }
        let words = ep.map_or([0; EP_WORDS], |c| {
            [
                // 0 is no endpoint.
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
        self.put_all(EP_AT + row * EP_WORDS, &words);
        self.eps = self.eps.max(row + 1);
    }

    fn session(&mut self, slot: u32, session: Option<&SessionStats>) {
        let row = slot as usize;
        if row >= self.session_room {
            let room = Self::grown(row, self.session_room, self.session_max);
            if row >= room || self.back(SESSION_AT, room * SESSION_WORDS).is_err() {
                return;
            }
            self.session_room = room;
        }
        let words = session.map_or([0; SESSION_WORDS], session_words);
        self.put_all(SESSION_AT + row * SESSION_WORDS, &words);
        self.sessions = self.sessions.max(row + 1);
    }
}

fn session_words(s: &SessionStats) -> [u64; SESSION_WORDS] {
    let state = STATES.iter().position(|&name| name == s.info.state).unwrap_or(0);
    let wait = Wait::ALL.iter().position(|&wait| wait == s.wait).unwrap_or(0);
    let (tx_bytes, rx_bytes) = s.bytes.unwrap_or((UNKNOWN, UNKNOWN));
    [
        s.info.mac.to_u64(),
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
        0,
        0,
    ]
}

impl Drop for Publisher {
    fn drop(&mut self) {
        // In a child forked from the process that opened the domain the file is not ours.
        if self.pid == std::process::id() {
            // If it is gone already, so much the better.
            let _ = fs::remove_file(&self.path);
            lock::end_life(&self.file, WRITER);
        }
    }
}

const PREFIX: &str = "barewire-stats.";

/// The member that the lock stands for.
const WRITER: usize = 0;

/// Makes a file with a lock, and says where and when.
fn create_file(dir: &Path, pid: u32) -> io::Result<(File, PathBuf, u64)> {
    loop {
        // No name comes twice, or a file could be removed in the place of one of the dead.
        let opened_ns = since_1970();
        let path = dir.join(format!("{PREFIX}{}.{pid}.{opened_ns}", nix::unistd::getuid()));
        let mut options = OpenOptions::new();
        match options.read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => match lock::show_life(&file, WRITER) {
                // One who looked before it was locked may have taken it for dead.
                Ok(()) if file.metadata()?.nlink() > 0 => return Ok((file, path, opened_ns)),
                Ok(()) => lock::end_life(&file, WRITER),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => {
                    // Nothing more can be done about it.
                    let _ = fs::remove_file(&path);
                    return Err(e);
                }
            },
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => {}
            Err(e) => return Err(e),
        }
    }
}

fn since_1970() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

/// What does not change.
fn facts(engine: &Engine, block: &Block) {
    let (caps, node) = (engine.caps(), engine.node());
    block.put(7, caps.mac.to_u64());
    block.put(8, caps.mtu as u64);
    block.put(9, node.settings().incarnation);
    block.put(10, node.settings().t_dead_ns);
    let mut name = [0; NAME_WORDS * 8];
    let len = caps.name.len().min(name.len());
    name[..len].copy_from_slice(&caps.name.as_bytes()[..len]);
    for (i, word) in name.as_chunks::<8>().0.iter().enumerate() {
        block.put(HEADER_WORDS + i, u64::from_le_bytes(*word));
    }
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
        c.tx_frames,
        c.tx_retransmits,
        c.tx_acks,
        c.tx_probes,
        c.tx_asks,
        c.tx_replies_limited,
        c.tx_challenges,
        c.msgs_sent,
        c.msgs_received,
        c.msgs_unexpected,
        c.rma_done,
        c.rma_executed,
        c.rx_coll_unknown,
        c.colls_done,
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

/// What a domain published.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Its file.
    pub path: PathBuf,
    /// Its process.
    pub pid: u32,
    /// Whether the domain is open still.
    pub alive: bool,
    /// When the domain was opened, ns since 1970.
    pub opened_ns: u64,
    /// When this was written, ns since 1970. A domain that nobody turns writes nothing.
    pub updated_ns: u64,
    /// When the program polled last, ns since 1970: others may answer for it since.
    pub polled_ns: u64,
    /// The port.
    pub port_name: String,
    /// Its address.
    pub mac: MacAddr,
    /// Bytes of a frame after its Ethernet header.
    pub mtu: usize,
    /// Name of this life of the domain.
    pub incarnation: u64,
    /// Silence after which a peer is dead, ns.
    pub t_dead_ns: u64,
    /// Counters of the port.
    pub port: Vec<(&'static str, u64)>,
    /// Counters of the node.
    pub node: Vec<(&'static str, u64)>,
    /// Frames refused by the codec, by cause.
    pub refused: Vec<(&'static str, u64)>,
    /// How much of each table is in use.
    pub levels: Vec<(&'static str, u64)>,
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
    /// Sends completed, and their bytes.
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
    pub mac: MacAddr,
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
    /// What for: a name of [`Wait`].
    pub wait: &'static str,
    /// Smallest round trip, ns; 0 if not measured.
    pub rtt_min_ns: u64,
    /// Time since the session began, ns.
    pub age_ns: u64,
    /// Time since the peer was heard or since an operation began to wait for it, whichever is
    /// later, ns, when the row was written.
    pub silent_ns: u64,
    /// Packets sent, without repetitions and control packets.
    pub tx_packets: u64,
    /// Packets taken in order.
    pub rx_packets: u64,
    /// Bytes of frames to the peer, `None` if they are not counted. On a shared segment with the
    /// padding of the ring, and since the two processes met.
    pub tx_bytes: Option<u64>,
    /// Bytes of frames from the peer.
    pub rx_bytes: Option<u64>,
    /// Packets sent again.
    pub retransmits: u64,
    /// Retransmission timeouts.
    pub timeouts: u64,
    /// Packets that may be in flight.
    pub window: u64,
    /// Bytes after the Ethernet header that both ends take.
    pub frame_max: u64,
}

/// Everything that domains of this user (for root: of everybody) publish on this machine, by
/// process. Files that cannot be read are left out.
///
/// # Errors
/// The directory cannot be read.
pub fn read_all() -> io::Result<Vec<Snapshot>> {
    let mut all: Vec<_> = files(Path::new(DIR))?.iter().filter_map(|p| read(p).ok()).collect();
    all.sort_by_key(|s| (s.pid, s.opened_ns));
    Ok(all)
}

/// What one file holds.
///
/// # Errors
/// `InvalidData`: it is not ours, of another layout, or its writer died half way.
/// Also those of reading.
pub fn read(path: &Path) -> io::Result<Snapshot> {
    let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    let mut file = open(path, false)?;
    let meta = file.metadata()?;
    let me = nix::unistd::getuid();
    if !meta.is_file() || !(me.is_root() || meta.uid() == me.as_raw()) {
        return Err(invalid("not a statistics file of this user"));
    }
    // A writer is inside for some microseconds.
    for _ in 0..1000 {
        let words = load(&mut file, 0, EP_AT)?;
        if words[0] != MAGIC || words[1] != LAYOUT || words[2] != EP_AT as u64 {
            return Err(invalid("another layout of statistics"));
        }
        if words[SEQ] % 2 == 0 {
            let rows = |word: u64, most| usize::try_from(word).unwrap_or(most).min(most);
            let (eps, sessions) = (rows(words[11], EP_MAX), rows(words[12], SESSION_MAX));
            let eps = load(&mut file, EP_AT, eps * EP_WORDS)?;
            let sessions = load(&mut file, SESSION_AT, sessions * SESSION_WORDS)?;
            if load_one(&mut file, SEQ)? == words[SEQ] {
                let alive = lock::lives(&file, WRITER, 1);
                return Ok(parse(path, &words, (&eps, &sessions), alive));
            }
        }
        std::thread::yield_now();
    }
    Err(invalid("its writer ended in the middle of an update"))
}

fn load(file: &mut File, at: usize, len: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; len * 8];
    file.seek(SeekFrom::Start(at as u64 * 8))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_ne_bytes(*b)).collect())
}

fn load_one(file: &mut File, at: usize) -> io::Result<u64> {
    let mut word = [0; 8];
    file.seek(SeekFrom::Start(at as u64 * 8))?;
    file.read_exact(&mut word)?;
    Ok(u64::from_ne_bytes(word))
}

fn parse(path: &Path, w: &[u64], (eps, sessions): (&[u64], &[u64]), alive: bool) -> Snapshot {
    let named = |names: &[&'static str], at: usize| -> Vec<(&'static str, u64)> {
        names.iter().copied().zip(w[at..].iter().copied()).collect()
    };
    let name: Vec<u8> = w[HEADER_WORDS..PORT_AT]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .take_while(|&b| b != 0)
        .collect();
    let (eps, sessions) = (eps.as_chunks().0.iter(), sessions.as_chunks().0.iter());
    Snapshot {
        path: path.to_owned(),
        pid: w[4] as u32,
        alive,
        opened_ns: w[5],
        updated_ns: w[6],
        polled_ns: w[13],
        port_name: String::from_utf8_lossy(&name).into_owned(),
        mac: MacAddr::from_u64(w[7]),
        mtu: w[8] as usize,
        incarnation: w[9],
        t_dead_ns: w[10],
        port: named(&PORT_NAMES, PORT_AT),
        node: named(&NODE_NAMES, NODE_AT),
        refused: WireError::ALL.iter().map(|e| (e.name(), w[WIRE_AT + e.index()])).collect(),
        levels: named(&LEVEL_NAMES, LEVEL_AT),
        endpoints: eps.filter(|r| r[0] != 0).map(ep_row).collect(),
        sessions: sessions.filter(|r| r[0] != 0).map(session_row).collect(),
    }
}

fn ep_row(r: &[u64; EP_WORDS]) -> EpRow {
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

fn session_row(r: &[u64; SESSION_WORDS]) -> SessionRow {
    let (low, high) = (|word: u64| word & 0xffff_ffff, |word: u64| word >> 32);
    let counted = |word: u64| (word != UNKNOWN).then_some(word);
    SessionRow {
        mac: MacAddr::from_u64(r[0]),
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
    }
}

fn files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let ours = |e: &fs::DirEntry| e.file_name().to_string_lossy().starts_with(PREFIX);
    Ok(fs::read_dir(dir)?.flatten().filter(ours).map(|e| e.path()).collect())
}

/// Opens what lies under one of our names; whatever it is, it makes nobody wait.
fn open(path: &Path, to_write: bool) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    OpenOptions::new().read(true).write(to_write).custom_flags(flags).open(path)
}

/// Removes files whose writers have died.
fn remove_dead(dir: &Path) {
    for path in files(dir).unwrap_or_default() {
        // Another user's file cannot be opened and stays, which is right.
        let Ok(file) = open(&path, true) else { continue };
        // Removed with the lock in hand: its writer may be about to take it.
        if lock::show_life(&file, WRITER).is_ok() {
            let _ = fs::remove_file(&path);
            lock::end_life(&file, WRITER);
        }
    }
}

#[cfg(test)]
mod tests {
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

    fn own_dir(test: &str) -> PathBuf {
        let name = format!("barewire-stats-{test}-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    #[test]
    fn what_is_written_is_what_is_read() {
        let mut engine = engine();
        engine.node_mut().ep_open(Default::default()).unwrap();
        let mut publisher = Publisher::try_create(&std::env::temp_dir(), 4096).unwrap();
        let since = Instant(engine.last_now().0.saturating_sub(73_000_000_000));
        publisher.publish(&mut engine, Some(since));
        let s = read(&publisher.path).unwrap();
        let absent = s.updated_ns - s.polled_ns;
        let most = engine.last_now().0.min(73_000_000_000);
        assert!((most - 1_000_000_000..=most).contains(&absent), "{absent}");
        publisher.publish(&mut engine, None);
        let s = read(&publisher.path).unwrap();
        assert!(s.polled_ns.abs_diff(s.updated_ns) < 1_000_000_000);
        assert_eq!((s.pid, s.alive, s.incarnation), (std::process::id(), true, 77));
        assert_eq!((s.mac, s.port_name.as_str()), (engine.caps().mac, &*engine.caps().name));
        assert_eq!((s.endpoints.len(), s.endpoints[0].number), (1, 0));
        assert_eq!(s.refused.len(), WireError::COUNT);
        let path = publisher.path.clone();
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
        let av = node.av_open(1).unwrap();
        for n in 0..PEERS {
            let [a, b] = n.to_be_bytes();
            let addr = EpAddr { mac: MacAddr([2, 7, 0, 0, a, b]), ep: 1, incarnation: 0 };
            node.av_insert(Instant(1), av, addr).unwrap();
        }
        let eps: Vec<EpId> = (0..150).map(|_| node.ep_open(Default::default()).unwrap()).collect();
        eps.iter().step_by(3).for_each(|&ep| node.ep_close(Instant(1), ep).unwrap());
        let mut publisher = Publisher::try_create(&std::env::temp_dir(), 4096).unwrap();
        for _ in 0..5 {
            publisher.publish(&mut engine, None);
        }
        let s = read(&publisher.path).unwrap();
        let macs: std::collections::BTreeSet<_> = s.sessions.iter().map(|s| s.mac).collect();
        assert_eq!((s.sessions.len(), macs.len()), (PEERS.into(), PEERS.into()));
        assert_eq!(s.endpoints.len(), 100);
        let peers = s.node.iter().find(|(name, _)| *name == "peers");
        assert_eq!(peers, Some(&("peers", u64::from(PEERS))));
        assert_eq!(s.sessions[7].state, "idle");
    }

    /// Goal: a file without memory for a row is no harm. Method: a row that would need more than
    /// the node said it has, and one behind what the disk gives.
    #[test]
    fn a_row_without_memory_is_left_out() {
        let dir = own_dir("rows");
        let mut publisher = Publisher::try_create(&dir, 100).unwrap();
        publisher.block.session(99, None);
        publisher.block.session(100, None);
        assert_eq!(publisher.block.sessions, 100);
        publisher.publish(&mut engine(), None);
        assert!(read(&publisher.path).is_ok());
        drop(publisher);
        fs::remove_dir(&dir).unwrap();
    }

    /// Two engines, of which the second has `count` messages that nobody has asked for.
    fn with_unexpected(count: u64) -> [Engine; 2] {
        let (a, b) = Loopback::pair();
        let open = |port: Loopback, incarnation| {
            let room = 64 << 20;
            let settings =
                NodeSettings { incarnation, unexpected_bytes: room, ..NodeSettings::default() };
            let mut node = Node::new(settings, port.caps()).unwrap();
            let (av, cq) = (node.av_open(4).unwrap(), node.cq_open(16).unwrap());
            let ep = node.ep_open(EpAttr::default()).unwrap();
            node.ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
            node.ep_bind_av(ep, av).unwrap();
            node.ep_enable(ep).unwrap();
            (Engine::new(node, Box::new(port)), av, ep)
        };
        let ((mut a, av, ep), (mut b, _, b_ep)) = (open(a, 11), open(b, 22));
        let addr = b.node().addr_of(b_ep).unwrap();
        let dest = a.av_insert(av, addr).unwrap();
        let mut sent = 0;
        while b.node().ep_counters(b_ep).unwrap().unexpected < count as u32 {
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

    /// Goal: what is stored costs an update nothing. Method: the fastest of many updates with 10
    /// messages that nobody has asked for, and with 100,000; a walk over these takes a thousand
    /// times as long.
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
            let shown = read(&publisher.path).unwrap();
            let stored = shown.levels.iter().find(|(name, _)| *name == "stored").unwrap().1;
            assert_eq!(stored, count);
            took
        };
        let (few, many) = (fastest(10), fastest(100_000));
        assert!(many < 4 * few, "{few:?} with 10 messages, {many:?} with 100,000");
    }

    #[test]
    fn a_half_written_block_is_not_believed() {
        let mut engine = engine();
        let mut publisher = Publisher::try_create(&std::env::temp_dir(), 4096).unwrap();
        publisher.publish(&mut engine, None);
        publisher.block.word(SEQ).fetch_add(1, Ordering::Relaxed);
        assert_eq!(read(&publisher.path).unwrap_err().kind(), io::ErrorKind::InvalidData);
        publisher.publish(&mut engine, None);
        assert!(read(&publisher.path).is_ok());
        publisher.block.put(1, LAYOUT + 1);
        assert_eq!(read(&publisher.path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_reader_beside_a_writer_sees_whole_blocks() {
        let mut engine = engine();
        let mut publisher = Publisher::try_create(&std::env::temp_dir(), 4096).unwrap();
        publisher.publish(&mut engine, None);
        let path = publisher.path.clone();
        let reader = std::thread::spawn(move || {
            (0..200).filter(|_| read(&path).is_ok_and(|s| s.incarnation == 77)).count()
        });
        while !reader.is_finished() {
            publisher.publish(&mut engine, None);
        }
        // A reader that always meets the writer gives up; it must never see half of one.
        assert!(reader.join().unwrap() > 0);
    }

    /// Goal: what died is removed, and not what lives, whatever process ids say. Method: files
    /// that name this process and another one, with a lock and without.
    #[test]
    fn files_of_the_dead_are_removed() {
        let dir = own_dir("dead");
        let name = |pid: u32, number| dir.join(format!("{PREFIX}0.{pid}.{number}"));
        let dead = [name(u32::MAX - 1, 0), name(std::process::id(), 0), name(1, 0)];
        dead.iter().for_each(|path| fs::write(path, b"").unwrap());
        let elsewhere = name(u32::MAX - 1, 1);
        let held = File::create_new(&elsewhere).unwrap();
        lock::show_life(&held, WRITER).unwrap();
        let first = Publisher::try_create(&dir, 4096).unwrap();
        let second = Publisher::try_create(&dir, 4096).unwrap();
        assert!(dead.iter().all(|path| !path.exists()), "{:?}", files(&dir));
        assert!(elsewhere.exists() && first.path.exists() && second.path.exists());
        lock::end_life(&held, WRITER);
        drop((held, first, second));
        let _last = Publisher::try_create(&dir, 4096).unwrap();
        assert!(!elsewhere.exists());
        assert_eq!(files(&dir).unwrap().len(), 1);
        fs::remove_dir_all(&dir).unwrap();
    }

    /// Goal: a domain is alive as long as it is open, whatever its process id says.
    #[test]
    fn alive_is_who_holds_the_lock() {
        let dir = own_dir("alive");
        let mut publisher = Publisher::try_create(&dir, 4096).unwrap();
        publisher.publish(&mut engine(), None);
        assert!(read(&publisher.path).unwrap().alive);
        publisher.block.put(4, u64::from(u32::MAX - 1));
        assert!(read(&publisher.path).unwrap().alive);
        lock::end_life(&publisher.file, WRITER);
        publisher.block.put(4, u64::from(std::process::id()));
        assert!(!read(&publisher.path).unwrap().alive);
        drop(publisher);
        fs::remove_dir(&dir).unwrap();
    }

    /// Goal: a domain that opens is never without its file, however many others open and sweep.
    #[test]
    fn many_that_open_leave_each_other_alone() {
        let dir = own_dir("many");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let publisher = Publisher::try_create(&dir, 4096).unwrap();
                        assert!(publisher.path.exists());
                    }
                });
            }
        });
        fs::remove_dir(&dir).unwrap();
    }
}
