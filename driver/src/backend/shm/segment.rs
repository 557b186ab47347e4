//! The segment's file: how it is made, joined, left, and cleaned up after dead members.
//!
//! The file is sparse: it has an offset for every possible ring, and memory for open ones. Only the
//! part before the boards is mapped as a whole. Each slot of a board and each ring is mapped when
//! it is first used, so that a process takes address space only for those that it uses.
//!
//! Everything here is rare and happens under the segment's lock, or on words that belong to the
//! caller alone. Steps are ordered so that the next lock holder can finish the work of a process
//! killed between two of them: an entry is valid once its last word is written, and a dead member's
//! entry is cleared last.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU32, AtomicU64, fence};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use memmap2::{Advice, MmapOptions, MmapRaw};
use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::statvfs::fstatvfs;

use super::ShmSettings;
use super::layout::{
    EPOCH, GROUP, HEADER_LEN, Layout, MAGIC, MEMBERS_MAX, NEXT_INC, PAGE, PLACES, SLOT_LEN, UPLINK,
};
use super::members::{place_of, ring};
use super::ring::RingMem;
use super::role::{Role, Uplink, is_switch};
use crate::backend::lock::{self, Guard};
use crate::error::OpenError;
use crate::file::{reserve, set_len};
use crate::port::{MacAddr, Station};

/// How long opening waits for the lock; work under it takes milliseconds.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);
/// How long leaving waits for the lock at most.
const LEAVING: Duration = Duration::from_secs(1);

/// Values of [`Link::rx_open`].
pub(super) const CLOSED: u64 = 0;
/// The receiver checks this ring when its doorbell is rung.
pub(super) const DOORBELL: u64 = 1;
/// The receiver checks this ring in every poll.
pub(super) const WATCH: u64 = 2;

/// A mapped segment that this process may be a member of.
pub(super) struct Segment {
    map: Arc<Mapped>,
    file: File,
    pub(super) path: PathBuf,
    pub(super) layout: Layout,
    /// Pages of links that are known to be allocated: for each receiver a word with a bit each.
    known: Box<[AtomicU64]>,
    /// Whether other members are not trusted: they may write anything and hold any lock for ever.
    /// Then no lock is waited for, and cleaning up is left to the other members.
    distrusts_members: bool,
    /// How long leaving waits for the lock.
    leaving: Duration,
}

/// This process's mapping of a segment's file, kept for as long as it has a member there. (A
/// sleeper reads rings while they are closed.)
struct Mapped {
    layout: Layout,
    /// The part before the boards.
    words: MmapRaw,
    /// Slots of boards, by member and number.
    slots: Mutex<HashMap<(usize, usize), MmapRaw>>,
    /// Rings, by sender and receiver.
    rings: Mutex<HashMap<(usize, usize), MmapRaw>>,
}

/// The words of one direction of one pair. A ring is used by its two ends from the moment that
/// `rx_open` is not [`CLOSED`]; each end closes its own word, and when both are closed the ring's
/// memory has been given back and the next sender may open it again.
#[derive(Clone, Copy)]
pub(super) struct Link<'a> {
    /// 1 while the sender may write; the sender's, or after its death the lock holder's.
    pub(super) tx_open: &'a AtomicU64,
    /// Incarnations that the link was opened between; written while both ends are closed.
    pub(super) tx_inc: &'a AtomicU64,
    pub(super) rx_inc: &'a AtomicU64,
    /// [`CLOSED`], [`DOORBELL`] or [`WATCH`]; the receiver's, or after its death the lock holder's.
    pub(super) rx_open: &'a AtomicU64,
}

/// The shared words and bytes of one ring; see [`RingMem`]. Valid while its segment is mapped.
#[derive(Clone, Copy)]
pub(super) struct RawRing {
    data: *mut u8,
    head: *const AtomicU64,
}

// SAFETY: two addresses in shared memory that is accessed by atomics and raw copies only; their
// owner keeps the mapping (`ShmPort::seg`).
unsafe impl Send for RawRing {}

impl RawRing {
    /// Of a closed end. Never accessed.
    pub(super) const NONE: Self = Self { data: std::ptr::null_mut(), head: std::ptr::null() };

    #[inline]
    pub(super) fn at(&self, pos: usize) -> *mut u8 {
        // `wrapping_add` needs nothing; the callers below and the port say why it is inside.
        self.data.wrapping_add(pos)
    }

    #[inline]
    pub(super) fn word_at(&self, pos: usize) -> *const AtomicU64 {
        self.at(pos).cast_const().cast()
    }
}

/// The words of a slot on boards. Valid while its segment is mapped.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotMem(*const AtomicU64);

// SAFETY: the address of a slot in shared memory that is accessed by atomics only; its owner keeps
// the mapping (`ShmBoard::shared`, `Slots` in `Shared`).
unsafe impl Send for SlotMem {}

impl SlotMem {
    /// Of an unknown slot. Never accessed.
    pub(super) const NONE: Self = Self(std::ptr::null());

    /// The word at byte `at`.
    #[inline(always)]
    pub(super) fn word(&self, at: usize) -> &AtomicU64 {
        let [word] = self.some(at);
        word
    }

    /// `N` words from byte `at` on.
    #[inline(always)]
    pub(super) fn some<const N: usize>(&self, at: usize) -> &[AtomicU64; N] {
        self.words(at, N).first_chunk().expect("as many as were asked for")
    }

    /// The `count` words from byte `at` on.
    #[inline(always)]
    pub(super) fn words(&self, at: usize, count: usize) -> &[AtomicU64] {
        let (i, all) = (at / 8, SLOT_LEN / 8);
        assert!(i <= all && count <= all - i && !self.0.is_null());
        // SAFETY: words of a slot of the mapping (`reserve_slot`), which is aligned to a page and
        // reserved; every access to them by anybody is atomic.
        unsafe { std::slice::from_raw_parts(self.0.wrapping_add(i), count) }
    }

    /// The address of byte `at`, from which `len` bytes are in the slot.
    #[inline(always)]
    pub(super) fn bytes(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at <= SLOT_LEN && len <= SLOT_LEN - at && !self.0.is_null());
        self.0.cast_mut().cast::<u8>().wrapping_add(at)
    }
}

/// A member's word `sleeping`. Valid while its segment is mapped.
#[derive(Clone, Copy, Debug)]
pub(super) struct SleepWord(*const AtomicU32);

// SAFETY: as `SlotMem`, for a word of a member.
unsafe impl Send for SleepWord {}

impl SleepWord {
    /// The value of [`Segment::sleeping`], Relaxed.
    #[inline(always)]
    pub(super) fn load(self) -> u32 {
        // SAFETY: a word of the mapping (`Segment::sleep_word`), reached by atomics only.
        unsafe { (*self.0).load(Relaxed) }
    }
}

impl RingMem for RawRing {
    #[inline]
    fn word(&self, pos: usize) -> u64 {
        // SAFETY: `pos` is a multiple of 64 below the ring's length (`RingMem`), the ring is that
        // long, mapped and page aligned, and all accesses to its words are atomic or, as frame
        // bytes, raw copies by the end that owns the place at the time (D2).
        unsafe { (*self.word_at(pos)).load(Acquire) }
    }

    #[inline]
    fn clear(&self, pos: usize) {
        // SAFETY: as in `word`.
        unsafe { (*self.word_at(pos)).store(0, Relaxed) }
    }

    #[inline]
    fn publish(&self, pos: usize, word: u64) {
        // SAFETY: as in `word`.
        unsafe { (*self.word_at(pos)).store(word, Release) }
    }

    #[inline]
    fn head(&self) -> u64 {
        // SAFETY: an aligned word of the mapping (`Segment::ring`).
        unsafe { (*self.head).load(Acquire) }
    }

    #[inline]
    fn set_head(&self, total: u64) {
        // SAFETY: as in `head`.
        unsafe { (*self.head).store(total, Release) }
    }
}

/// Membership of a segment.
pub(super) struct Joined {
    pub(super) seg: Segment,
    pub(super) me: usize,
    /// Unique in the segment's life, never 0.
    pub(super) inc: u64,
    pub(super) station: Station,
}

/// Joins the segment that `settings` name. Makes it if there is none, or if only dead processes
/// used it, of any version. Waits at most `patience` for the lock, here and when leaving.
pub(super) fn join(
    settings: &ShmSettings,
    role: Role,
    patience: Duration,
) -> Result<Joined, OpenError> {
    let path = settings.path();
    loop {
        let file = open_file(&path)?;
        let locked = OpenError::Locked { path: path.clone(), seconds: patience.as_secs() };
        let guard = Guard::take(&file, patience).ok_or(locked)?;
        let meta = file.metadata().map_err(|e| os("cannot look at", &path, e))?;
        if meta.nlink() == 0 {
            continue; // The last member left between our open and our lock, and removed it.
        }
        check_owner(&path, &meta)?;
        let made = is_made(&file);
        if !made && let Err(e) = make(&file, &path, settings) {
            let _ = std::fs::remove_file(&path);
            return Err(e);
        }
        if made && is_dead(&file) {
            log_stale(&path, &meta);
            std::fs::remove_file(&path).map_err(|e| os("cannot remove", &path, e))?;
            continue;
        }
        let layout = read_layout(&file, &path)?;
        let joined = enter(&file, &path, layout, settings, role);
        if joined.is_err() && !made {
            let _ = std::fs::remove_file(&path);
        }
        let (map, known, me, inc, station) = joined?;
        drop(guard);
        if !made {
            remove_stale_segments(&path);
        }
        let leaving = patience.min(LEAVING);
        let seg = Segment { map, file, path, layout, known, distrusts_members: false, leaving };
        return Ok(Joined { seg, me, inc, station });
    }
}

/// Joins the segment in the unnamed `file`. A switch does not trust the other members.
pub(super) fn join_file(
    file: File,
    path: PathBuf,
    settings: &ShmSettings,
    role: Role,
) -> Result<Joined, OpenError> {
    let locked = OpenError::Locked { path: path.clone(), seconds: PATIENCE.as_secs() };
    let guard = Guard::take(&file, PATIENCE).ok_or(locked)?;
    let layout = read_layout(&file, &path)?;
    let (map, known, me, inc, station) = enter(&file, &path, layout, settings, role)?;
    drop(guard);
    let distrusts_members = matches!(role, Role::Switch(_));
    let seg = Segment { map, file, path, layout, known, distrusts_members, leaving: LEAVING };
    Ok(Joined { seg, me, inc, station })
}

/// The process of the segment's switch, in its own pid namespace, if one lives. Joins and makes
/// nothing.
pub(super) fn switch_of(settings: &ShmSettings) -> Result<Option<u32>, OpenError> {
    let Some((file, layout)) = inspect(settings)? else { return Ok(None) };
    let path = settings.path();
    let map = map(&file, layout).map_err(|e| os("cannot map", &path, e))?;
    let known = none_known(layout);
    let seg =
        Segment { map, file, path, layout, known, distrusts_members: false, leaving: LEAVING };
    let switch = seg.switch().filter(|&m| seg.lives(m));
    Ok(switch.map(|m| seg.pid(m).load(Relaxed) as u32))
}

/// The sizes of the segment, if it has a living member. Joins and makes nothing.
pub(super) fn layout_of(settings: &ShmSettings) -> Result<Option<Layout>, OpenError> {
    Ok(inspect(settings)?.map(|(_, layout)| layout))
}

/// The file and sizes of a segment with a living member.
fn inspect(settings: &ShmSettings) -> Result<Option<(File, Layout)>, OpenError> {
    let path = settings.path();
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    let file = match options.open(&path) {
        Ok(file) => file,
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(os("cannot open", &path, e)),
    };
    let meta = file.metadata().map_err(|e| os("cannot look at", &path, e))?;
    if meta.nlink() == 0 {
        return Ok(None); // Its last member removed it meanwhile.
    }
    check_owner(&path, &meta)?;
    if !is_made(&file) || is_dead(&file) {
        return Ok(None);
    }
    let layout = read_layout(&file, &path)?;
    Ok(Some((file, layout)))
}

/// Removes the segment at `path` if it has another version. Returns whether it did.
pub(super) fn remove_other_version(path: &Path) -> Result<bool, OpenError> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC | libc::O_NONBLOCK);
    let mut header = [0; 16];
    let is_read = options.open(path).is_ok_and(|file| {
        let is_ours = file.metadata().is_ok_and(|meta| check_owner(path, &meta).is_ok());
        is_ours && file.read_exact_at(&mut header, 0).is_ok()
    });
    let here = [MAGIC, super::layout::version()].map(u64::to_le_bytes);
    if !is_read || header[..8] != here[0] || header[8..] == here[1] {
        return Ok(false);
    }
    tracing::warn!(
        "{}: replaced, since its processes are of a build with another segment layout",
        path.display()
    );
    match std::fs::remove_file(path) {
        // Its last member left meanwhile, and did it.
        Err(e) if e.kind() != io::ErrorKind::NotFound => Err(os("cannot remove", path, e)),
        _ => Ok(true),
    }
}

/// Removes segments beside `path` that only dead processes of this user used: their memory would
/// stay allocated until their names were used again, which jobs never do. Files that cannot be
/// opened stay.
fn remove_stale_segments(path: &Path) {
    let prefix = format!("{}{}-", super::FILE_PREFIX, nix::unistd::geteuid());
    let Some(entries) = path.parent().and_then(|dir| std::fs::read_dir(dir).ok()) else { return };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let named = |path: &Path| path.file_name()?.to_str()?.starts_with(&prefix).then_some(());
    for other in paths.filter(|other| other != path && named(other).is_some()) {
        remove_if_dead(&other);
    }
}

fn remove_if_dead(path: &Path) -> Option<()> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    let file = options.open(path).ok()?;
    let is_left = || {
        let meta = file.metadata().ok()?;
        check_owner(path, &meta).ok()?;
        is_dead(&file).then_some(meta)
    };
    // Checked without the lock first: while we held the lock of a live segment, its members could
    // open no ring. If another process holds it, that one is about to join or to leave.
    is_left()?;
    let _guard = Guard::try_take(&file)?;
    log_stale(path, &is_left()?);
    std::fs::remove_file(path).ok()
}

/// Logs the removal of a segment whose members all died, and the memory that it held.
fn log_stale(path: &Path, meta: &std::fs::Metadata) {
    // The file is sparse: blocks of 512 bytes are what it takes.
    let left = meta.blocks() * 512;
    let path = path.display();
    tracing::info!("{path}: {left} bytes were left by processes that died; they are freed");
}

pub(super) fn os(what: &'static str, path: &Path, source: io::Error) -> OpenError {
    let hint = match source.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => "; use another name, or have its owner remove it",
        Some(libc::ENOENT) => "; is /dev/shm mounted? mount -t tmpfs tmpfs /dev/shm",
        Some(libc::EMFILE) => "; raise the limit on open files (ulimit -n 65536)",
        Some(libc::ENFILE) => "; raise the system's limit on open files (sysctl fs.file-max)",
        Some(libc::ENOSPC) => "; enlarge it (mount -o remount,size=1G /dev/shm)",
        Some(libc::ENOMEM) => "; raise the limit on address space (ulimit -v unlimited)",
        Some(libc::EFBIG) => "; raise the limit on file size (ulimit -f unlimited)",
        _ => "",
    };
    OpenError::Os { what, path: path.to_owned(), source, hint }
}

fn open_file(path: &Path) -> Result<File, OpenError> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600).custom_flags(libc::O_NOFOLLOW | libc::O_CLOEXEC);
    for _ in 0..1000 {
        match options.clone().create_new(true).open(path) {
            Ok(file) => {
                // The umask may have taken bits that the check below insists on.
                let mode = std::fs::Permissions::from_mode(0o600);
                file.set_permissions(mode).map_err(|e| os("cannot set the mode of", path, e))?;
                return Ok(file);
            }
            Err(e) if e.kind() != io::ErrorKind::AlreadyExists => {
                return Err(os("cannot make", path, e));
            }
            Err(_) => {}
        }
        match options.open(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {} // Removed just now: make it.
            Err(e) if e.raw_os_error() == Some(libc::ELOOP) => {
                let why = "it is a symbolic link".into();
                return Err(OpenError::NotOurs { path: path.to_owned(), why });
            }
            opened => return opened.map_err(|e| os("cannot open", path, e)),
        }
    }
    Err(OpenError::Locked { path: path.to_owned(), seconds: 0 })
}

fn check_owner(path: &Path, meta: &std::fs::Metadata) -> Result<(), OpenError> {
    let (uid, mode) = (nix::unistd::geteuid().as_raw(), meta.mode() & 0o7777);
    let why = if !meta.is_file() {
        "it is no regular file".into()
    } else if meta.uid() != uid {
        format!("it belongs to user {}, not {uid}", meta.uid())
    } else if mode != 0o600 {
        format!("its mode is {mode:o}, not 600")
    } else if meta.nlink() != 1 {
        format!("it has {} names", meta.nlink())
    } else {
        return Ok(());
    };
    Err(OpenError::NotOurs { path: path.to_owned(), why })
}

/// Whether `file` has a magic number: not while a segment is being made in it, nor if its maker
/// died meanwhile.
fn is_made(file: &File) -> bool {
    magic(file).is_some_and(|magic| magic != 0)
}

fn magic(file: &File) -> Option<u64> {
    let mut magic = [0; 8];
    file.read_exact_at(&mut magic, 0).ok()?;
    Some(u64::from_le_bytes(magic))
}

/// Whether `file` is a segment without a living member, of any version and sizes: after an update,
/// files of the old version must not stay in the way.
fn is_dead(file: &File) -> bool {
    magic(file) == Some(MAGIC) && !lock::any_lives(file)
}

/// Writes an empty segment into `file`, its magic number last.
pub(super) fn make(file: &File, path: &Path, settings: &ShmSettings) -> Result<(), OpenError> {
    let layout = settings.layout()?;
    // Via 0, so that data of a maker that died here reads as zero.
    set_len(file, 0).map_err(|e| os("cannot empty", path, e))?;
    set_len(file, layout.file_len() as u64).map_err(|e| os("cannot size", path, e))?;
    // A ring length that the user chose has to be available in full.
    let ring_len = settings.ring_len.unwrap_or(layout.first_len());
    let need = (layout.links_at() + 2 * (PAGE + ring_len)) as u64;
    check_space(file, path, need)?;
    reserve(file, 0, layout.links_at()).map_err(|e| match e.raw_os_error() {
        Some(libc::ENOSPC) => OpenError::NoSpace { path: path.to_owned(), need, free: 0 },
        _ => os("cannot reserve memory in", path, e),
    })?;
    let header = layout.header();
    let written =
        file.write_all_at(&header[8..], 8).and_then(|()| file.write_all_at(&header[..8], 0));
    written.map_err(|e| os("cannot write", path, e))
}

/// Checks that memory for a ring each way is free now. Later ones are reserved when they are
/// opened: an access to a page that is not reserved is SIGBUS when memory is short.
fn check_space(file: &File, path: &Path, need: u64) -> Result<(), OpenError> {
    let stat = fstatvfs(file).map_err(|e| os("cannot look at", path, e.into()))?;
    let free = stat.blocks_available().saturating_mul(stat.fragment_size());
    // A tmpfs without a limit says 0 of 0.
    if stat.blocks() > 0 && free < need {
        return Err(OpenError::NoSpace { path: path.to_owned(), need, free });
    }
    Ok(())
}

fn read_layout(file: &File, path: &Path) -> Result<Layout, OpenError> {
    let other = |found: String| OpenError::OtherVersion {
        path: path.to_owned(),
        found,
        version: super::layout::version(),
    };
    let mut header = [0; HEADER_LEN];
    file.read_exact_at(&mut header, 0).map_err(|_| other("too short for a segment".into()))?;
    let (layout, file_len) = Layout::parse(&header).map_err(other)?;
    let is = file.metadata().map_err(|e| os("cannot look at", path, e))?.len();
    if is != file_len {
        return Err(other(format!("a segment of {is} bytes that should have {file_len}")));
    }
    Ok(layout)
}

type Entered = (Arc<Mapped>, Box<[AtomicU64]>, usize, u64, Station);

/// Becomes a member; the caller holds the lock.
fn enter(
    file: &File,
    path: &Path,
    layout: Layout,
    settings: &ShmSettings,
    role: Role,
) -> Result<Entered, OpenError> {
    settings.check_against(&layout, path)?;
    check_space(file, path, 2 * (PAGE + layout.first_len()) as u64)?;
    let map = map(file, layout).map_err(|e| os("cannot map", path, e))?;
    let dup = file.try_clone().map_err(|e| os("cannot use", path, e))?;
    let known = none_known(layout);
    let path_of = path.to_owned();
    let (distrusts_members, leaving) = (false, LEAVING);
    let seg = Segment { map, file: dup, path: path_of, layout, known, distrusts_members, leaving };
    seg.reap_dead(None);
    if let Role::Switch(uplink) = role {
        if let Some(m) = seg.switch() {
            let pid = seg.pid(m).load(Relaxed) as u32;
            return Err(OpenError::HasSwitch { path: path.to_owned(), pid });
        }
        seg.set_uplink(uplink);
    }
    let inc = seg.word(NEXT_INC).load(Relaxed).wrapping_add(1) & u64::from(u32::MAX);
    let inc = inc.max(1);
    let station = seg.choose_station(settings.station, role, inc)?;
    seg.word(NEXT_INC).store(inc, Relaxed);
    let me = seg.choose_place(inc as usize).ok_or(OpenError::Crowded {
        path: path.to_owned(),
        members: layout.members,
        members_max: MEMBERS_MAX,
    })?;
    lock::show_life(file, me).map_err(|e| os("cannot lock", path, e))?;
    (0..layout.groups()).for_each(|group| seg.doorbell_group(me, group).store(0, Relaxed));
    seg.doorbell(me).store(0, Relaxed);
    seg.sleeping(me).store(0, Relaxed);
    seg.station(me).store(station.word(), Relaxed);
    seg.pid(me).store(u64::from(std::process::id()), Relaxed);
    seg.missed(me).store(0, Relaxed);
    seg.wake_name(me).store(0, Relaxed);
    seg.long(me).store(0, Relaxed);
    seg.wake_failed(me).store(0, Relaxed);
    // Before the state: places beyond are never checked, so a member killed here would keep its
    // own.
    seg.word(PLACES).store(seg.places().max(me + 1) as u64, Relaxed);
    // Release: the address is visible with the state.
    seg.state(me).store(inc << 32 | role.bits(), Release);
    seg.word(EPOCH).fetch_add(1, Release);
    Ok((seg.map, seg.known, me, inc, station))
}

/// [`Segment::known`] of a segment that was just mapped.
fn none_known(layout: Layout) -> Box<[AtomicU64]> {
    (0..layout.members).map(|_| AtomicU64::new(0)).collect()
}

/// Maps a segment's `file`, or returns the mapping of another member in this process. Members of
/// one process then access each cache line at one address, which store forwarding and way
/// prediction of processors depend on.
fn map(file: &File, layout: Layout) -> io::Result<Arc<Mapped>> {
    static MAPS: Mutex<Vec<(FileId, Weak<Mapped>)>> = Mutex::new(Vec::new());
    let id = file.metadata().map(|meta| (meta.dev(), meta.ino()))?;
    let mut maps = MAPS.lock().unwrap_or_else(PoisonError::into_inner);
    // A mapped file keeps its inode number: it is not reused before these mappings are dropped.
    maps.retain(|(_, map)| map.strong_count() > 0);
    let known = maps.iter().find(|(known, _)| *known == id).and_then(|(_, map)| map.upgrade());
    if let Some(map) = known.filter(|map| map.layout == layout) {
        return Ok(map);
    }
    let words = map_part(file, 0, layout.boards_at())?;
    let (slots, rings) = (Mutex::default(), Mutex::default());
    let map = Arc::new(Mapped { layout, words, slots, rings });
    maps.push((id, Arc::downgrade(&map)));
    Ok(map)
}

fn map_part(file: &File, at: usize, len: usize) -> io::Result<MmapRaw> {
    let map = MmapOptions::new().offset(at as u64).len(len).map_raw(file)?;
    // A core dump without gigabytes of other processes' frames; only a wish.
    let _ = map.advise(Advice::DontDump);
    Ok(map)
}

/// Device and number of a file.
pub(crate) type FileId = (u64, u64);

pub(super) fn file_id(meta: &std::fs::Metadata) -> Option<FileId> {
    Some((meta.dev(), meta.ino()))
}

impl Segment {
    pub(super) fn file_id(&self) -> Option<FileId> {
        file_id(&self.file.metadata().ok()?)
    }

    pub(super) fn word(&self, at: usize) -> &AtomicU64 {
        let words = &self.map.words;
        assert!(at.is_multiple_of(8) && at + 8 <= words.len());
        // SAFETY: an aligned word inside the mapping (checked), which lives as long as `self`; the
        // file is longer than the mapping (checked at join, and D5 of docs/memory.md: nobody
        // shortens it). Every access to it by anybody is atomic.
        unsafe { AtomicU64::from_ptr(words.as_mut_ptr().add(at).cast()) }
    }

    pub(super) fn state(&self, m: usize) -> &AtomicU64 {
        self.word(self.layout.member(m))
    }

    /// Its address, as [`Station::word`] has it.
    pub(super) fn station(&self, m: usize) -> &AtomicU64 {
        self.word(self.layout.member(m) + 8)
    }

    /// Its process, in that process's own pid namespace.
    pub(super) fn pid(&self, m: usize) -> &AtomicU64 {
        self.word(self.layout.member(m) + 16)
    }

    /// Frames that the monitor `m` missed.
    pub(super) fn missed(&self, m: usize) -> &AtomicU64 {
        self.word(self.layout.member(m) + 24)
    }

    /// Name of the wake-up socket of `m`, or 0.
    pub(super) fn wake_name(&self, m: usize) -> &AtomicU64 {
        self.word(self.layout.member(m) + 32)
    }

    /// Number of its rings of full length.
    pub(super) fn long(&self, m: usize) -> &AtomicU64 {
        self.word(self.layout.member(m) + 48)
    }

    /// Not 0 if a wake-up could not be sent to the socket of `m`.
    pub(super) fn wake_failed(&self, m: usize) -> &AtomicU64 {
        self.word(self.layout.member(m) + 56)
    }

    /// Allocated pages of links to `m`, a bit each.
    fn pages(&self, m: usize) -> &AtomicU64 {
        self.word(self.layout.member(m) + 40)
    }

    /// Summary word of the doorbell of `m`: a bit for each group of senders.
    pub(super) fn doorbell(&self, m: usize) -> &AtomicU64 {
        self.word(self.layout.member(m) + 64)
    }

    /// Word of the doorbell of `m` for one group of senders.
    pub(super) fn doorbell_group(&self, m: usize, group: usize) -> &AtomicU64 {
        assert!(group < self.layout.groups());
        self.word(self.layout.member(m) + 128 + group * 8)
    }

    /// 1 while a thread of `m` sleeps on this futex, 2 while one does on a socket, else 0.
    pub(super) fn sleeping(&self, m: usize) -> &AtomicU32 {
        let (at, words) = (self.layout.member(m) + 72, &self.map.words);
        assert!(at + 4 <= words.len());
        // SAFETY: as in `word`, for four bytes that nobody reaches as part of a larger word.
        unsafe { AtomicU32::from_ptr(words.as_mut_ptr().add(at).cast()) }
    }

    /// [`sleeping`](Self::sleeping), for frequent loads by an owner that keeps the mapping.
    pub(super) fn sleep_word(&self, m: usize) -> SleepWord {
        SleepWord(self.sleeping(m))
    }

    pub(super) fn epoch(&self) -> &AtomicU64 {
        self.word(EPOCH)
    }

    /// One more than the highest place ever taken.
    pub(super) fn places(&self) -> usize {
        // Relaxed: ordered by the Acquire load of the epoch.
        let said = usize::try_from(self.word(PLACES).load(Relaxed)).unwrap_or(usize::MAX);
        said.min(self.layout.members)
    }

    /// A free place: a low one, so that scans of all places are short, and by turns, since the
    /// rings of a place that was left just now may still have frames.
    fn choose_place(&self, turn: usize) -> Option<usize> {
        let is_free = |&m: &usize| self.state(m).load(Relaxed) == 0;
        let taken = self.places() - (0..self.places()).filter(is_free).count();
        let low = (2 * taken).next_power_of_two().max(GROUP).min(self.layout.members);
        let mut places = (0..low).map(|i| (turn + i) % low).chain(low..self.layout.members);
        places.find(is_free)
    }

    /// The member in the role of the switch.
    pub(super) fn switch(&self) -> Option<usize> {
        (0..self.places()).find(|&m| is_switch(self.state(m).load(Acquire)))
    }

    /// The uplink of the last switch.
    pub(super) fn uplink(&self) -> Uplink {
        Uplink::from_words([0, 8, 16].map(|i| self.word(UPLINK + i).load(Relaxed)))
    }

    fn set_uplink(&self, uplink: Uplink) {
        for (i, word) in uplink.to_words().into_iter().enumerate() {
            self.word(UPLINK + i * 8).store(word, Relaxed);
        }
    }

    /// The words of a link; `None` if it was never opened, nor one of its neighbours.
    pub(super) fn link(&self, s: usize, r: usize) -> Option<Link<'_>> {
        let bit = 1 << (s / GROUP);
        if self.known[r].load(Relaxed) & bit == 0 {
            // Another member's word alone does not make access safe.
            let is_said = self.pages(r).load(Acquire) & bit != 0;
            if !is_said || self.reserve_links(s, r).is_err() {
                return None;
            }
        }
        let at = self.layout.link(s, r);
        Some(Link {
            tx_open: self.word(at),
            tx_inc: self.word(at + 8),
            rx_inc: self.word(at + 16),
            rx_open: self.word(at + 24),
        })
    }

    /// Reserves the memory of a link. To open the link the caller holds the lock.
    pub(super) fn reserve_links(&self, s: usize, r: usize) -> io::Result<()> {
        let at = self.layout.link(s / GROUP * GROUP, r);
        reserve(&self.file, at, PAGE)?;
        let bit = 1 << (s / GROUP);
        self.known[r].fetch_or(bit, Relaxed);
        if self.pages(r).load(Relaxed) & bit == 0 {
            self.pages(r).fetch_or(bit, Release);
        }
        Ok(())
    }

    /// Reserves and maps the memory of slot `i` of member `m`.
    pub(super) fn reserve_slot(&self, m: usize, i: usize) -> io::Result<SlotMem> {
        let at = self.layout.slot(m, i);
        reserve(&self.file, at, SLOT_LEN)?;
        let mut slots = self.map.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let map = match slots.entry((m, i)) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(free) => free.insert(map_part(&self.file, at, SLOT_LEN)?),
        };
        Ok(SlotMem(map.as_mut_ptr().cast_const().cast()))
    }

    /// Rings the doorbell of `r` for member `me`, unless it is still set.
    pub(super) fn ring_doorbell(&self, r: usize, me: usize) {
        let (group, bit) = place_of(me);
        ring(self.doorbell_group(r, group), self.doorbell(r), (group, bit));
    }

    /// Reserves the first `len` bytes of a ring whose link is allocated, and maps and populates
    /// them, so that the first lap is as fast as the others.
    pub(super) fn open_ring(&self, s: usize, r: usize, len: usize) -> io::Result<RawRing> {
        let (at, ring_len) = (self.layout.ring(s, r), self.layout.ring_len);
        assert!(len <= ring_len);
        reserve(&self.file, at, len)?;
        let mut rings = self.map.rings.lock().unwrap_or_else(PoisonError::into_inner);
        let map = match rings.entry((s, r)) {
            Entry::Occupied(there) => there.into_mut(),
            Entry::Vacant(free) => free.insert(map_part(&self.file, at, ring_len)?),
        };
        // Before Linux 5.14 the pages come one fault at a time instead.
        let _ = map.advise_range(Advice::PopulateWrite, 0, len);
        let head = std::ptr::from_ref(self.word(self.layout.link(s, r) + 32));
        Ok(RawRing { data: map.as_mut_ptr(), head })
    }

    /// Gives the memory of a ring back to the system; it reads as zero afterwards.
    pub(super) fn give_back(&self, s: usize, r: usize) {
        let (at, len) = (self.layout.ring(s, r), self.layout.ring_len);
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        if let Err(error) = fallocate(&self.file, punch, at as i64, len as i64) {
            tracing::warn!(%error, path = %self.path.display(), "a ring's memory is not freed");
        }
    }

    /// Whether other members are not trusted: cleaning up is left to them.
    pub(super) fn distrusts_members(&self) -> bool {
        self.distrusts_members
    }

    pub(super) fn try_lock(&self) -> Option<Guard<'_>> {
        Guard::try_take(&self.file)
    }

    pub(super) fn lives(&self, m: usize) -> bool {
        lock::lives(&self.file, m, 1)
    }

    /// Cleans up after every member that died without leaving; the caller holds the lock.
    pub(super) fn reap_dead(&self, me: Option<usize>) {
        for m in 0..self.places() {
            if Some(m) != me && self.state(m).load(Acquire) != 0 && !self.lives(m) {
                let path = self.path.display();
                tracing::info!(member = m, %path, "cleaning up after a dead member");
                self.clear(m);
            }
        }
    }

    /// Cleans up after `m`, which was found dead, and says whether it did: not if the lock is taken
    /// or a new member has the place.
    pub(super) fn reap(&self, m: usize) -> bool {
        if self.distrusts_members {
            // The next member to join cleans up.
            return true;
        }
        let Some(_guard) = self.try_lock() else { return false };
        if self.lives(m) {
            return false;
        }
        if self.state(m).load(Acquire) != 0 {
            self.clear(m);
        }
        true
    }

    /// Closes all of `m`'s ends and clears its entry. `m` is dead and the caller holds the lock, or
    /// `m` is the caller.
    pub(super) fn clear(&self, m: usize) {
        // The dead one's last stores are visible: its lock was released by its exit, which is in
        // the kernel and ordered after them, and was asked for before this.
        fence(Acquire);
        for x in 0..self.places() {
            // What it sent stays for `x` to read; the last to close gives the memory back.
            if let Some(out) = self.link(m, x)
                && out.tx_open.load(Acquire) != 0
            {
                if out.rx_open.load(Acquire) == CLOSED {
                    self.give_back(m, x);
                }
                // Release: the receiver that sees it sees every frame published before.
                out.tx_open.store(0, Release);
            }
            if let Some(inward) = self.link(x, m)
                && inward.rx_open.load(Acquire) != CLOSED
            {
                if inward.tx_open.load(Acquire) == 0 {
                    self.give_back(x, m);
                }
                inward.rx_open.store(CLOSED, Release);
            }
        }
        self.state(m).store(0, Release);
        self.epoch().fetch_add(1, Release);
    }

    /// The pid that the member with address `station` wrote, if there is such a member. A number of
    /// the member's own pid namespace.
    pub(super) fn pid_of(&self, station: Station) -> Option<u32> {
        let there = |&m: &usize| {
            self.state(m).load(Acquire) != 0 && self.station(m).load(Relaxed) == station.word()
        };
        let m = (0..self.places()).find(there)?;
        u32::try_from(self.pid(m).load(Relaxed)).ok().filter(|&pid| pid != 0)
    }

    /// The address of a new member: the `wanted` one, else a free number behind the MAC of the
    /// switch's NIC, else a random MAC. Numbers go round robin, so that one is not reused at once.
    fn choose_station(
        &self,
        wanted: Option<Station>,
        role: Role,
        inc: u64,
    ) -> Result<Station, OpenError> {
        let members = || (0..self.places()).filter(|&m| self.state(m).load(Acquire) != 0);
        let owner = |of: Station| members().find(|&m| self.station(m).load(Relaxed) == of.word());
        let Some(station) = wanted else {
            let uplink = self.uplink();
            let numbers = match role {
                Role::Leaf if uplink.mtu != 0 => Station::OF_SWITCH,
                _ => 0..0,
            };
            let skipped = inc as usize % numbers.len().max(1);
            let by_turns = numbers.clone().skip(skipped).chain(numbers.take(skipped));
            let mut behind = by_turns.map(|number| Station { mac: uplink.mac, number });
            let random = std::iter::repeat_with(|| Station::from(MacAddr::random()));
            let free = |station: &Station| owner(*station).is_none();
            // There are more random ones than members.
            return Ok(behind.find(free).or_else(|| { random }.find(free)).unwrap_or_default());
        };
        let Some(m) = owner(station) else { return Ok(station) };
        let pid = self.pid(m).load(Relaxed) as u32;
        Err(OpenError::AddressInUse { station, pid, path: self.path.clone() })
    }

    /// Leaves the segment; the last one to leave removes its file.
    pub(super) fn leave(&self, me: usize) {
        if self.distrusts_members {
            // Clients learn of it by their connection, and the memory is freed with the last of
            // them.
            lock::end_life(&self.file, me);
            return;
        }
        // Without the lock (a stopped process holds it) leaving is still correct, since the words
        // are our own; only the file stays, and the next process finds it without a living member.
        let guard = Guard::take(&self.file, self.leaving);
        self.clear(me);
        lock::end_life(&self.file, me);
        if guard.is_some() && !lock::lives(&self.file, 0, self.layout.members) {
            let same = |meta: &std::fs::Metadata| {
                self.file
                    .metadata()
                    .is_ok_and(|own| own.ino() == meta.ino() && own.dev() == meta.dev())
            };
            // A process waiting for the lock sees that the file has no name left, and starts again.
            if std::fs::symlink_metadata(&self.path).is_ok_and(|meta| same(&meta)) {
                let _ = std::fs::remove_file(&self.path);
            }
        }
    }
}
