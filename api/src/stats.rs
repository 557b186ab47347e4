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
//! | 0, 1, 2 | [`MAGIC`], [`LAYOUT`], number of words |
//! | 3 | sequence: odd while the writer is inside |
//! | 4, 5, 6 | process id, time of opening and of this update in ns since 1970 |
//! | 7 .. 13 | MAC, MTU, incarnation, T_dead in ns, endpoints and sessions in all |
//! | 13 .. 16 | reserved, 0 |
//! | 16 .. 32 | name of the port, zero-padded |
//! | then | [`PORT_NAMES`], [`NODE_NAMES`], refusals by cause, [`LEVEL_NAMES`] |
//! | then | up to [`EP_MAX`] endpoints, up to [`SESSION_MAX`] sessions, 8 words each |

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{SystemTime, UNIX_EPOCH};

use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::Instant;
use barewire_dataplane::wire::WireError;
use barewire_driver::backend::lock;
use barewire_driver::port::MacAddr;
use memmap2::{MmapOptions, MmapRaw};

/// First word of a block: "BWSTATS" and a zero byte.
pub const MAGIC: u64 = u64::from_le_bytes(*b"BWSTATS\0");

/// Version of the layout and of the names.
pub const LAYOUT: u64 = 1;

/// Where the files are.
pub const DIR: &str = "/dev/shm";

/// Endpoints that have room in a block.
pub const EP_MAX: usize = 32;

/// Sessions that have room in a block: those that were opened first.
pub const SESSION_MAX: usize = 64;

/// Least time between two updates.
const PERIOD_NS: u64 = 10_000_000;

/// Counters of the port.
pub const PORT_NAMES: [&str; 8] = [
    "rx_frames",
    "rx_bytes",
    "tx_frames",
    "tx_bytes",
    "tx_full",
    "tx_no_route",
    "rx_dropped",
    "tx_dropped",
];

/// Counters of the node, but for the refusals of the codec.
pub const NODE_NAMES: [&str; 36] = [
    "rx_frames",
    "rx_not_ours",
    "rx_no_crc",
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
    "rx_unnamed",
    "rx_not_inserted",
    "tx_frames",
    "tx_retransmits",
    "tx_acks",
    "tx_probes",
    "tx_asks",
    "tx_replies_limited",
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
const ROW_WORDS: usize = 8;
const SESSION_AT: usize = EP_AT + EP_MAX * ROW_WORDS;
const WORDS: usize = SESSION_AT + SESSION_MAX * ROW_WORDS;
const SEQ: usize = 3;

/// States of a session, by their number in the block.
const STATES: [&str; 4] = ["idle", "opening", "answered", "open"];

/// The writing end.
pub(crate) struct Publisher {
    map: MmapRaw,
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
    pub(crate) fn create(engine: &Engine) -> Option<Self> {
        match Self::try_create(Path::new(DIR)) {
            Ok(mut publisher) => {
                publisher.publish(engine);
                Some(publisher)
            }
            Err(e) => {
                tracing::warn!("no statistics for `barewire stats`: {DIR}: {e}");
                None
            }
        }
    }

    fn try_create(dir: &Path) -> io::Result<Self> {
        remove_dead(dir);
        let pid = std::process::id();
        let (file, path, opened_ns) = create_file(dir, pid)?;
        let made = file.set_len((WORDS * 8) as u64).and_then(|()| {
            // A file that is cut short later would kill us with SIGBUS, but only this user can do
            // that, who can kill us anyway. The map is only reached through `words`.
            MmapOptions::new().len(WORDS * 8).map_raw(&file)
        });
        match made {
            Ok(map) => {
                let publisher = Self { map, file, path, pid, due: 0 };
                let w = publisher.words();
                w[4].store(u64::from(pid), Ordering::Relaxed);
                w[5].store(opened_ns, Ordering::Relaxed);
                w[2].store(WORDS as u64, Ordering::Relaxed);
                w[1].store(LAYOUT, Ordering::Relaxed);
                Ok(publisher)
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

    fn words(&self) -> &[AtomicU64; WORDS] {
        // SAFETY: a reference to an array of atomics needs
        // - memory for it, for as long as the borrow: the map is `WORDS * 8` bytes and lives in
        //   `self`;
        // - alignment: a map starts at a page;
        // - that others write it atomically at most: other processes map it read-only, or do what
        //   any process of the user may do with our memory.
        unsafe { &*self.map.as_ptr().cast::<[AtomicU64; WORDS]>() }
    }

    /// Writes everything.
    #[cold]
    pub(crate) fn publish(&mut self, engine: &Engine) {
        self.due = engine.last_now().0.saturating_add(PERIOD_NS);
        let w = self.words();
        let seq = w[SEQ].load(Ordering::Relaxed) | 1;
        w[SEQ].store(seq, Ordering::Relaxed);
        // No store below may be seen before the odd number.
        fence(Ordering::Release);
        fill(engine, &mut |at, value| w[at].store(value, Ordering::Relaxed));
        w[0].store(MAGIC, Ordering::Relaxed);
        w[SEQ].store(seq.wrapping_add(1), Ordering::Release);
    }
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

fn fill(engine: &Engine, put: &mut impl FnMut(usize, u64)) {
    let (caps, node) = (engine.caps(), engine.node());
    put(6, since_1970());
    put(7, caps.mac.to_u64());
    put(8, caps.mtu as u64);
    put(9, node.settings().incarnation);
    put(10, node.settings().t_dead_ns);
    let mut name = [0; NAME_WORDS * 8];
    let len = caps.name.len().min(name.len());
    name[..len].copy_from_slice(&caps.name.as_bytes()[..len]);
    for (i, word) in name.as_chunks::<8>().0.iter().enumerate() {
        put(HEADER_WORDS + i, u64::from_le_bytes(*word));
    }
    counters(engine, put);
    let mut eps = 0;
    for (i, ep) in node.ep_ids().enumerate() {
        eps += 1;
        let Some(at) = (i < EP_MAX).then_some(EP_AT + i * ROW_WORDS) else { continue };
        let Ok(c) = node.ep_counters(ep) else { continue };
        let row = [
            u64::from(c.number),
            c.sent,
            c.sent_bytes,
            c.received,
            c.received_bytes,
            c.errors,
            u64::from(c.unexpected),
            u64::from(c.posted),
        ];
        row.iter().enumerate().for_each(|(j, &v)| put(at + j, v));
    }
    put(11, eps);
    for (i, s) in node.sessions().take(SESSION_MAX).enumerate() {
        let state = STATES.iter().position(|&name| name == s.state).unwrap_or(0);
        let row = [
            s.mac.to_u64(),
            s.incarnation,
            state as u64,
            u64::from(s.in_flight),
            s.srtt_ns,
            u64::from(s.credits),
            u64::from(s.waiting),
            0,
        ];
        row.iter().enumerate().for_each(|(j, &v)| put(SESSION_AT + i * ROW_WORDS + j, v));
    }
    put(12, node.levels().peers as u64);
}

fn counters(engine: &Engine, put: &mut impl FnMut(usize, u64)) {
    let p = engine.port_counters();
    let port = [
        p.rx_frames,
        p.rx_bytes,
        p.tx_frames,
        p.tx_bytes,
        p.tx_full,
        p.tx_no_route,
        p.rx_dropped,
        p.tx_dropped,
    ];
    let (c, l) = (engine.node().counters(), engine.node().levels());
    let node: [u64; NODE_NAMES.len()] = [
        c.rx_frames,
        c.rx_not_ours,
        c.rx_no_crc,
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
        c.rx_unnamed,
        c.rx_not_inserted,
        c.tx_frames,
        c.tx_retransmits,
        c.tx_acks,
        c.tx_probes,
        c.tx_asks,
        c.tx_replies_limited,
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
        c.timeouts,
        l.peers as u64,
    ];
    let level = levels(&l);
    let parts: [(usize, &[u64]); 4] =
        [(PORT_AT, &port), (NODE_AT, &node), (WIRE_AT, &c.rx_wire), (LEVEL_AT, &level)];
    for (at, values) in parts {
        values.iter().enumerate().for_each(|(i, &v)| put(at + i, v));
    }
}

fn levels(l: &barewire_dataplane::node::Levels) -> [u64; LEVEL_NAMES.len()] {
    [
        l.tx as u64,
        l.sent as u64,
        l.packs as u64,
        l.posted as u64,
        l.stored as u64,
        l.blocks as u64,
        l.pulls as u64,
        l.pull_bytes,
        l.held as u64,
        l.jobs as u64,
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
    /// Endpoints, at most [`EP_MAX`] of `ep_count`.
    pub endpoints: Vec<EpRow>,
    /// Endpoints in all.
    pub ep_count: usize,
    /// Sessions, at most [`SESSION_MAX`] of `session_count`.
    pub sessions: Vec<SessionRow>,
    /// Peers known in all.
    pub session_count: usize,
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
    // A writer is inside for about a microsecond.
    for _ in 0..1000 {
        let words = load(&mut file)?;
        if words[0] != MAGIC || words[1] != LAYOUT || words[2] != WORDS as u64 {
            return Err(invalid("another layout of statistics"));
        }
        let again = load_one(&mut file, SEQ)?;
        if words[SEQ] % 2 == 0 && again == words[SEQ] {
            return Ok(parse(path, &words, lock::lives(&file, WRITER, 1)));
        }
        std::thread::yield_now();
    }
    Err(invalid("its writer ended in the middle of an update"))
}

fn load(file: &mut File) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; WORDS * 8];
    file.seek(SeekFrom::Start(0))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_ne_bytes(*b)).collect())
}

fn load_one(file: &mut File, at: usize) -> io::Result<u64> {
    let mut word = [0; 8];
    file.seek(SeekFrom::Start(at as u64 * 8))?;
    file.read_exact(&mut word)?;
    Ok(u64::from_ne_bytes(word))
}

fn parse(path: &Path, w: &[u64], alive: bool) -> Snapshot {
    let named = |names: &[&'static str], at: usize| -> Vec<(&'static str, u64)> {
        names.iter().copied().zip(w[at..].iter().copied()).collect()
    };
    let row = |at: usize, i: usize| &w[at + i * ROW_WORDS..][..ROW_WORDS];
    let name: Vec<u8> = w[HEADER_WORDS..PORT_AT]
        .iter()
        .flat_map(|word| word.to_le_bytes())
        .take_while(|&b| b != 0)
        .collect();
    let (ep_count, session_count) = (w[11] as usize, w[12] as usize);
    Snapshot {
        path: path.to_owned(),
        pid: w[4] as u32,
        alive,
        opened_ns: w[5],
        updated_ns: w[6],
        port_name: String::from_utf8_lossy(&name).into_owned(),
        mac: MacAddr::from_u64(w[7]),
        mtu: w[8] as usize,
        incarnation: w[9],
        t_dead_ns: w[10],
        port: named(&PORT_NAMES, PORT_AT),
        node: named(&NODE_NAMES, NODE_AT),
        refused: WireError::ALL.iter().map(|e| (e.name(), w[WIRE_AT + e.index()])).collect(),
        levels: named(&LEVEL_NAMES, LEVEL_AT),
        endpoints: (0..ep_count.min(EP_MAX)).map(|i| ep_row(row(EP_AT, i))).collect(),
        ep_count,
        sessions: (0..session_count.min(SESSION_MAX))
            .map(|i| session_row(row(SESSION_AT, i)))
            .collect(),
        session_count,
    }
}

fn ep_row(r: &[u64]) -> EpRow {
    EpRow {
        number: r[0] as u16,
        sent: r[1],
        sent_bytes: r[2],
        received: r[3],
        received_bytes: r[4],
        errors: r[5],
        unexpected: r[6],
        posted: r[7],
    }
}

fn session_row(r: &[u64]) -> SessionRow {
    SessionRow {
        mac: MacAddr::from_u64(r[0]),
        incarnation: r[1],
        state: STATES.get(r[2] as usize).copied().unwrap_or("?"),
        in_flight: r[3],
        srtt_ns: r[4],
        credits: r[5],
        waiting: r[6],
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
    use barewire_dataplane::node::{Node, NodeSettings};
    use barewire_driver::backend::loopback::Loopback;
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
        let mut publisher = Publisher::try_create(&std::env::temp_dir()).unwrap();
        publisher.publish(&engine);
        let s = read(&publisher.path).unwrap();
        assert_eq!((s.pid, s.alive, s.incarnation), (std::process::id(), true, 77));
        assert_eq!((s.mac, s.port_name.as_str()), (engine.caps().mac, &*engine.caps().name));
        assert_eq!((s.ep_count, s.endpoints.len(), s.endpoints[0].number), (1, 1, 0));
        assert_eq!(s.refused.len(), WireError::COUNT);
        let path = publisher.path.clone();
        assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
        drop(publisher);
        assert!(!path.exists());
    }

    #[test]
    fn a_half_written_block_is_not_believed() {
        let engine = engine();
        let mut publisher = Publisher::try_create(&std::env::temp_dir()).unwrap();
        publisher.publish(&engine);
        publisher.words()[SEQ].fetch_add(1, Ordering::Relaxed);
        assert_eq!(read(&publisher.path).unwrap_err().kind(), io::ErrorKind::InvalidData);
        publisher.publish(&engine);
        assert!(read(&publisher.path).is_ok());
        publisher.words()[1].store(LAYOUT + 1, Ordering::Relaxed);
        assert_eq!(read(&publisher.path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_reader_beside_a_writer_sees_whole_blocks() {
        let engine = engine();
        let mut publisher = Publisher::try_create(&std::env::temp_dir()).unwrap();
        publisher.publish(&engine);
        let path = publisher.path.clone();
        let reader = std::thread::spawn(move || {
            (0..200).filter(|_| read(&path).is_ok_and(|s| s.incarnation == 77)).count()
        });
        while !reader.is_finished() {
            publisher.publish(&engine);
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
        let first = Publisher::try_create(&dir).unwrap();
        let second = Publisher::try_create(&dir).unwrap();
        assert!(dead.iter().all(|path| !path.exists()), "{:?}", files(&dir));
        assert!(elsewhere.exists() && first.path.exists() && second.path.exists());
        lock::end_life(&held, WRITER);
        drop((held, first, second));
        let _last = Publisher::try_create(&dir).unwrap();
        assert!(!elsewhere.exists());
        assert_eq!(files(&dir).unwrap().len(), 1);
        fs::remove_dir_all(&dir).unwrap();
    }

    /// Goal: a domain is alive as long as it is open, whatever its process id says.
    #[test]
    fn alive_is_who_holds_the_lock() {
        let dir = own_dir("alive");
        let mut publisher = Publisher::try_create(&dir).unwrap();
        publisher.publish(&engine());
        assert!(read(&publisher.path).unwrap().alive);
        publisher.words()[4].store(u64::from(u32::MAX - 1), Ordering::Relaxed);
        assert!(read(&publisher.path).unwrap().alive);
        lock::end_life(&publisher.file, WRITER);
        publisher.words()[4].store(u64::from(std::process::id()), Ordering::Relaxed);
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
                        let publisher = Publisher::try_create(&dir).unwrap();
                        assert!(publisher.path.exists());
                    }
                });
            }
        });
        fs::remove_dir(&dir).unwrap();
    }
}
