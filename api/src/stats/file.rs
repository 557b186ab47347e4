//! A file with a block of words that one process writes and others read: created, locked, updated,
//! read, and removed after its writer has died. The users of this module define the words.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{SystemTime, UNIX_EPOCH};

use barewire_driver::backend::lock;
use barewire_driver::file::reserve;
use memmap2::{MmapOptions, MmapRaw};

use super::{LAYOUT, MAGIC};

/// Words of the header, and of the name behind it.
pub(super) const HEADER_LEN: usize = 16;
pub(super) const NAME_LEN: usize = 16;

const HEAD_LEN: usize = 2;
pub(super) const SEQ: usize = 3;
/// The process in the low half, its network namespace by its inode in the high half.
pub(super) const PID: usize = 4;
const OPENED: usize = 5;
const UPDATED: usize = 6;
/// Number of rows of each table.
const ROWS: usize = 11;
const KIND: usize = 14;
/// A request for a capture: the only word that readers write.
const RECORD_REQUEST: usize = 15;

const PREFIX: &str = "barewire-stats.";

/// Member number of the writer in the lock.
pub(super) const WRITER: usize = 0;

/// A table: rows of one kind after the head.
#[derive(Clone, Copy, Debug)]
pub(super) struct Table {
    /// Where the first one begins, words.
    pub(super) at: usize,
    /// Words of a row, of which the first is 0 in one that is not in use.
    pub(super) row_len: usize,
    /// Most rows.
    pub(super) max: usize,
}

/// The layout of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    /// Number of the kind of writer.
    pub(super) kind: u64,
    /// Words before the rows.
    pub(super) head_len: usize,
    pub(super) tables: [Table; 2],
}

/// The writer of a file.
pub(super) struct Writer {
    pub(super) block: Block,
    /// Holds the lock. A forked child does not keep its descriptor.
    file: Arc<File>,
    pub(super) path: PathBuf,
    /// The process that made the file; a forked child is another.
    pid: u32,
}

impl Writer {
    /// Creates a file in `dir`, and removes the files of dead writers there.
    pub(super) fn create(dir: &Path, shape: Shape) -> io::Result<Self> {
        remove_dead(dir);
        let pid = std::process::id();
        let (file, path, opened_ns) = create_file(dir, pid)?;
        let file = Arc::new(file);
        match Block::new(Arc::clone(&file), shape) {
            Ok(block) => {
                block.put(PID, u64::from(pid) | u64::from(netns()) << 32);
                block.put(OPENED, opened_ns);
                block.put(KIND, shape.kind);
                block.put(HEAD_LEN, shape.head_len as u64);
                block.put(1, LAYOUT);
                Ok(Self { block, file, path, pid })
            }
            Err(e) => {
                lock::end_life(&file, WRITER);
                // Best effort.
                let _ = fs::remove_file(&path);
                Err(e)
            }
        }
    }

    /// Updates the block: `fill` writes it, and gets the time in ns since 1970.
    pub(super) fn update(&mut self, fill: impl FnOnce(&mut Block, u64)) {
        let seq = self.block.word(SEQ).load(Ordering::Relaxed) | 1;
        self.block.put(SEQ, seq);
        // No store below may be seen before the odd number.
        fence(Ordering::Release);
        let now = since_1970();
        self.block.put(UPDATED, now);
        fill(&mut self.block, now);
        for (i, rows) in self.block.rows.iter().enumerate() {
            self.block.put(ROWS + i, rows.used as u64);
        }
        self.block.put(0, MAGIC);
        self.block.word(SEQ).store(seq.wrapping_add(1), Ordering::Release);
    }

    /// Whether a reader has requested a capture. Costs a load.
    pub(super) fn is_recording_requested(&self) -> bool {
        self.block.word(RECORD_REQUEST).load(Ordering::Relaxed) != 0
    }

    /// Clears the request.
    pub(super) fn clear_request(&self) {
        self.block.put(RECORD_REQUEST, 0);
    }

    #[cfg(test)]
    pub(super) fn end_life(&self) {
        lock::end_life(&self.file, WRITER);
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        // The file belongs to the process that created it, not to a forked child.
        if self.pid == std::process::id() {
            // The file may be removed already.
            let _ = fs::remove_file(&self.path);
            lock::end_life(&self.file, WRITER);
        }
    }
}

/// Of one table.
#[derive(Clone, Copy, Debug, Default)]
struct Rows {
    /// Rows that have been written, and that have memory.
    used: usize,
    room: usize,
}

/// The words of a file. Only words with allocated memory are written.
pub(super) struct Block {
    map: MmapRaw,
    file: Arc<File>,
    shape: Shape,
    rows: [Rows; 2],
}

impl Block {
    fn new(file: Arc<File>, shape: Shape) -> io::Result<Self> {
        // A file that is cut short later would kill us with SIGBUS, but only this user can do
        // that, who can kill us anyway. The map is only reached through `word`.
        let end = |table: &Table| table.at + table.max * table.row_len;
        let words = shape.tables.iter().map(end).fold(shape.head_len, usize::max);
        let map = MmapOptions::new().len(words * 8).map_raw(&*file)?;
        let block = Self { map, file, shape, rows: Default::default() };
        block.allocate(0, shape.head_len)?;
        Ok(block)
    }

    /// Has memory put behind `len` words from `at`, so that to write them cannot fail: where
    /// /dev/shm is full that would be a SIGBUS.
    fn allocate(&self, at: usize, len: usize) -> io::Result<()> {
        reserve(&*self.file, at * 8, len * 8)
    }

    /// A word that has memory.
    pub(super) fn word(&self, at: usize) -> &AtomicU64 {
        let tables = self.shape.tables.iter().zip(&self.rows);
        let mut backed = tables.map(|(t, rows)| t.at..t.at + rows.room * t.row_len);
        let is_backed = at < self.shape.head_len || backed.any(|words| words.contains(&at));
        assert!(is_backed, "word {at} has no memory");
        // SAFETY: a reference to an atomic needs
        // - memory for it, for as long as the borrow: it was just checked that the file has some
        //   there (`allocate`), which `grow_to` keeps inside of the map, and that lives in `self`;
        // - alignment: a map starts at a page;
        // - that others write it atomically at most: other processes map it read-only, write the
        //   word `RECORD_REQUEST` by a system call (`request_recording`), or do what any process of
        //   the user may do with our memory.
        unsafe { &*self.map.as_ptr().cast::<AtomicU64>().add(at) }
    }

    pub(super) fn put(&self, at: usize, value: u64) {
        self.word(at).store(value, Ordering::Relaxed);
    }

    pub(super) fn put_all(&self, at: usize, values: &[u64]) {
        values.iter().enumerate().for_each(|(i, &value)| self.put(at + i, value));
    }

    /// Writes a name from `at` on, of [`NAME_LEN`] words.
    pub(super) fn put_name(&self, at: usize, text: &str) {
        let mut name = [0; NAME_LEN * 8];
        let len = text.len().min(name.len());
        name[..len].copy_from_slice(&text.as_bytes()[..len]);
        for (i, word) in name.as_chunks::<8>().0.iter().enumerate() {
            self.put(at + i, u64::from_le_bytes(*word));
        }
    }

    /// Writes a row of a table. Without memory the row is left out; the next update tries again.
    pub(super) fn put_row(&mut self, table: usize, row: usize, words: &[u64]) {
        let Table { at, row_len, max } = self.shape.tables[table];
        let room = self.rows[table].room;
        if row >= room {
            let room = grow_to(row, room, max);
            if row >= room || self.allocate(at, room * row_len).is_err() {
                return;
            }
            self.rows[table].room = room;
        }
        assert_eq!(words.len(), row_len);
        self.put_all(at + row * row_len, words);
        self.rows[table].used = self.rows[table].used.max(row + 1);
    }

    /// Rows of a table that were ever written.
    pub(super) fn used(&self, table: usize) -> usize {
        self.rows[table].used
    }
}

/// Rows to make memory for where `row` is written: twice as many as there are.
fn grow_to(row: usize, room: usize, most: usize) -> usize {
    (row + 1).max(2 * room).max(64).min(most)
}

/// Creates a locked file; returns it with its path and time of creation.
fn create_file(dir: &Path, pid: u32) -> io::Result<(File, PathBuf, u64)> {
    loop {
        // Names are unique: else a new file could be removed in place of a dead writer's.
        let opened_ns = since_1970();
        let path = dir.join(format!("{PREFIX}{}.{pid}.{opened_ns}", nix::unistd::getuid()));
        let mut options = OpenOptions::new();
        match options.read(true).write(true).create_new(true).mode(0o600).open(&path) {
            Ok(file) => match lock::show_life(&file, WRITER) {
                // A process that checked the file before it was locked may have removed it as dead.
                Ok(()) if file.metadata()?.nlink() > 0 => return Ok((file, path, opened_ns)),
                Ok(()) => lock::end_life(&file, WRITER),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {}
                Err(e) => {
                    // Best effort.
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

/// A copy of a block.
pub(super) struct Loaded {
    pub(super) path: PathBuf,
    /// The user whose file it is.
    pub(super) owner: u32,
    /// Whether its writer lives.
    pub(super) alive: bool,
    pub(super) pid: u32,
    pub(super) opened_ns: u64,
    pub(super) updated_ns: u64,
    /// 0 if unknown.
    pub(super) netns: u32,
    pub(super) kind: u64,
    /// The words before the rows.
    pub(super) head: Vec<u64>,
    /// The rows of each table.
    pub(super) tables: [Vec<u64>; 2],
}

impl Loaded {
    /// Counters that lie from `at` on, with their names.
    pub(super) fn named(&self, names: &[&'static str], at: usize) -> Vec<(&'static str, u64)> {
        names.iter().copied().zip(self.head[at..].iter().copied()).collect()
    }

    /// The name at word `at`, with `?` for control characters.
    pub(super) fn name(&self, at: usize) -> String {
        let words = self.head[at..at + NAME_LEN].iter();
        let bytes = words.flat_map(|word| word.to_le_bytes()).take_while(|&b| b != 0);
        let bytes: Vec<u8> = bytes.collect();
        let shown = |c: char| if c.is_control() { '?' } else { c };
        String::from_utf8_lossy(&bytes).chars().map(shown).collect()
    }

    /// The rows of a table that are in use.
    pub(super) fn rows<const N: usize>(&self, table: usize) -> impl Iterator<Item = &[u64; N]> {
        self.tables[table].as_chunks().0.iter().filter(|row| row[0] != 0)
    }
}

/// Copies what one file holds, if it is laid out as one of `shapes`.
///
/// # Errors
/// `InvalidData`: it is not this user's, of another layout, or its writer died during an update.
/// `Unsupported`: its writer lives and publishes another layout. Also those of reading.
pub(super) fn load(path: &Path, shapes: &[Shape]) -> io::Result<Loaded> {
    let invalid = |why: &str| io::Error::new(io::ErrorKind::InvalidData, why.to_owned());
    let mut file = open(path, false)?;
    let meta = file.metadata()?;
    let me = nix::unistd::getuid();
    // A file with a second hard link may be another user's.
    let is_ours = me.is_root() || meta.uid() == me.as_raw();
    if !meta.is_file() || !is_ours || meta.nlink() > 1 {
        return Err(invalid("not a statistics file of this user"));
    }
    // An update takes some microseconds.
    for _ in 0..1000 {
        let header = words(&mut file, 0, HEADER_LEN)?;
        if header[0] != MAGIC {
            return Err(invalid("no statistics"));
        }
        if header[1] != LAYOUT {
            return Err(other_layout(&file, header[1]));
        }
        let shape =
            shapes.iter().find(|s| [s.kind, s.head_len as u64] == [header[KIND], header[2]]);
        let shape = shape.ok_or_else(|| invalid("statistics of no kind that there is"))?;
        if header[SEQ] % 2 == 0 {
            let head = words(&mut file, 0, shape.head_len)?;
            let mut tables = [Vec::new(), Vec::new()];
            // A correct writer allocates rows before it counts them, so a larger count is false.
            let backed = usize::try_from(file.metadata()?.blocks() * 512).unwrap_or(usize::MAX);
            for (i, table) in shape.tables.iter().enumerate() {
                let most = table.max.min(backed / (table.row_len * 8));
                let rows = usize::try_from(head[ROWS + i]).unwrap_or(most).min(most);
                tables[i] = words(&mut file, table.at, rows * table.row_len)?;
            }
            if words(&mut file, SEQ, 1)?[0] == header[SEQ] && head[SEQ] == header[SEQ] {
                return Ok(Loaded {
                    path: path.to_owned(),
                    owner: meta.uid(),
                    alive: lock::lives(&file, WRITER, 1),
                    pid: head[PID] as u32,
                    opened_ns: head[OPENED],
                    updated_ns: head[UPDATED],
                    netns: (head[PID] >> 32) as u32,
                    kind: shape.kind,
                    head,
                    tables,
                });
            }
        }
        std::thread::yield_now();
    }
    Err(invalid("its writer ended in the middle of an update"))
}

/// The network namespace of the thread (which may differ from the process'), by its inode, 32 bits;
/// 0 if unknown.
pub(super) fn netns() -> u32 {
    fs::metadata("/proc/thread-self/ns/net").map_or(0, |of| of.ino() as u32)
}

fn other_layout(file: &File, layout: u64) -> io::Error {
    let kind = match lock::lives(file, WRITER, 1) {
        true => io::ErrorKind::Unsupported,
        false => io::ErrorKind::InvalidData,
    };
    let why = format!("version {layout} of statistics, of which this program reads {LAYOUT}");
    io::Error::new(kind, why)
}

fn words(file: &mut File, at: usize, len: usize) -> io::Result<Vec<u64>> {
    let mut bytes = vec![0; len * 8];
    file.seek(SeekFrom::Start(at as u64 * 8))?;
    file.read_exact(&mut bytes)?;
    Ok(bytes.as_chunks::<8>().0.iter().map(|b| u64::from_ne_bytes(*b)).collect())
}

/// Sets the request word of a file of `owner`, unless it is set.
pub(super) fn request_recording(path: &Path, owner: u32) -> io::Result<()> {
    let (file, at) = (open(path, true)?, RECORD_REQUEST as u64 * 8);
    // The name may lead to another file by now, which root could write as well.
    let meta = file.metadata()?;
    if !meta.is_file() || meta.uid() != owner || meta.nlink() != 1 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    let mut word = [0; 8];
    file.read_exact_at(&mut word, at)?;
    if word == [0; 8] { file.write_all_at(&1_u64.to_ne_bytes(), at) } else { Ok(()) }
}

/// Whether the writer of a file lives.
pub(super) fn lives(path: &Path) -> bool {
    open(path, false).is_ok_and(|file| lock::lives(&file, WRITER, 1))
}

/// The files of all writers.
pub(super) fn files(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let ours = |e: &fs::DirEntry| e.file_name().to_string_lossy().starts_with(PREFIX);
    Ok(fs::read_dir(dir)?.flatten().filter(ours).map(|e| e.path()).collect())
}

/// The process of a file, by the name of the file.
pub(super) fn pid_of(path: &Path) -> Option<u32> {
    path.file_name()?.to_str()?.strip_prefix(PREFIX)?.split('.').nth(1)?.parse().ok()
}

/// The part of a file name after the user: process and time of creation.
pub(super) fn name_of(path: &Path) -> Option<&str> {
    Some(path.file_name()?.to_str()?.strip_prefix(PREFIX)?.split_once('.')?.1)
}

/// Opens a statistics file. Never blocks, whatever is under that name.
fn open(path: &Path, to_write: bool) -> io::Result<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    OpenOptions::new().read(true).write(to_write).custom_flags(flags).open(path)
}

/// Removes files whose writers have died.
fn remove_dead(dir: &Path) {
    for path in files(dir).unwrap_or_default() {
        // Another user's file cannot be opened and is left alone.
        let Ok(file) = open(&path, true) else { continue };
        // Removed with the lock held: its writer may be about to take it.
        if lock::show_life(&file, WRITER).is_ok() {
            let _ = fs::remove_file(&path);
            lock::end_life(&file, WRITER);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = {
        let first = Table { at: HEADER_LEN, row_len: 8, max: 10 };
        let second = Table { at: HEADER_LEN + 80, row_len: 16, max: 100 };
        Shape { kind: 0, head_len: HEADER_LEN, tables: [first, second] }
    };

    fn own_dir(test: &str) -> PathBuf {
        let name = format!("barewire-stats-{test}-{}", std::process::id());
        let dir = std::env::temp_dir().join(name);
        fs::create_dir_all(&dir).unwrap();
        dir
    }

    fn create(dir: &Path) -> Writer {
        Writer::create(dir, SHAPE).unwrap()
    }

    /// Goal: a file without memory for a row is no harm. Method: a row that would need more than
    /// there may be, and the last that may.
    #[test]
    fn a_row_without_memory_is_left_out() {
        let dir = own_dir("rows");
        let mut writer = create(&dir);
        writer.block.put_row(1, 99, &[7; 16]);
        writer.block.put_row(1, 100, &[7; 16]);
        assert_eq!(writer.block.used(1), 100);
        writer.update(|_, _| {});
        let copy = load(&writer.path, &[SHAPE]).unwrap();
        assert_eq!((copy.rows::<16>(1).count(), copy.rows::<8>(0).count()), (1, 0));
        drop(writer);
        fs::remove_dir(&dir).unwrap();
    }

    /// Goal: a request for a recording is written to the file of the process that is meant, also
    /// where another file bears its name.
    #[test]
    fn only_the_file_that_is_meant_is_asked() {
        let dir = own_dir("asked");
        let mut writer = create(&dir);
        writer.update(|_, _| {});
        let me = nix::unistd::getuid().as_raw();
        let [hard, soft] = ["hard", "soft"].map(|name| dir.join(name));
        std::os::unix::fs::symlink(&writer.path, &soft).unwrap();
        assert!(
            request_recording(&soft, me).is_err()
                && request_recording(&writer.path, me + 1).is_err()
        );
        fs::hard_link(&writer.path, &hard).unwrap();
        assert!(request_recording(&hard, me).is_err() && load(&hard, &[SHAPE]).is_err());
        assert!(!writer.is_recording_requested());
        fs::remove_file(&hard).unwrap();
        request_recording(&writer.path, me).unwrap();
        assert!(writer.is_recording_requested() && lives(&writer.path));
        drop(writer);
        fs::remove_dir_all(&dir).unwrap();
    }

    /// Goal: a file of another user costs the reader no more memory than it costs that user, and no
    /// control character of it reaches a terminal. Method: a long sparse file with the largest row
    /// counts.
    #[test]
    fn a_file_that_lies_is_read_within_bounds() {
        const MANY: Shape = {
            let rows = Table { at: HEADER_LEN + NAME_LEN, row_len: 32, max: 1 << 20 };
            let none = Table { at: HEADER_LEN + NAME_LEN, row_len: 1, max: 0 };
            Shape { kind: 0, head_len: HEADER_LEN + NAME_LEN, tables: [rows, none] }
        };
        let dir = own_dir("lies");
        let mut writer = Writer::create(&dir, MANY).unwrap();
        writer.update(|block, _| block.put_name(HEADER_LEN, "eth0\u{1b}[2J\n\u{9b}2Jé"));
        writer.file.set_len(300 << 20).unwrap();
        writer.block.put(ROWS, u64::MAX);
        let copy = load(&writer.path, &[MANY]).unwrap();
        assert_eq!(copy.name(HEADER_LEN), "eth0?[2J??2Jé");
        assert!(copy.tables[0].len() <= 1 << 16, "{} words", copy.tables[0].len());
        assert_eq!(copy.owner, nix::unistd::getuid().as_raw());
        drop(writer);
        fs::remove_dir(&dir).unwrap();
    }

    /// Goal: a forked child does not keep a dead writer alive: the descriptor that it is to forget
    /// is the only one.
    #[test]
    fn a_file_is_open_once() {
        let dir = own_dir("once");
        let mut writer = create(&dir);
        writer.update(|block, _| block.put_row(1, 0, &[7; 16]));
        let open = fs::read_dir("/proc/self/fd").unwrap().flatten();
        let of_it = open.filter(|e| fs::read_link(e.path()).is_ok_and(|to| to == writer.path));
        assert_eq!(of_it.count(), 1);
        drop(writer);
        fs::remove_dir(&dir).unwrap();
    }

    #[test]
    fn a_half_written_block_is_not_believed() {
        let dir = own_dir("half");
        let mut writer = create(&dir);
        writer.update(|_, _| {});
        writer.block.word(SEQ).fetch_add(1, Ordering::Relaxed);
        let kind = |writer: &Writer| load(&writer.path, &[SHAPE]).map(drop).map_err(|e| e.kind());
        assert_eq!(kind(&writer), Err(io::ErrorKind::InvalidData));
        writer.update(|_, _| {});
        assert_eq!(kind(&writer), Ok(()));
        writer.block.put(KIND, 9);
        assert_eq!(kind(&writer), Err(io::ErrorKind::InvalidData));
        drop(writer);
        fs::remove_dir(&dir).unwrap();
    }

    /// Goal: a live process that publishes another layout is reported as such.
    #[test]
    fn another_layout_is_distinguished_from_damage() {
        let dir = own_dir("layout");
        let mut writer = create(&dir);
        writer.update(|_, _| {});
        writer.block.put(1, LAYOUT + 1);
        let told = load(&writer.path, &[SHAPE]).map(drop).unwrap_err();
        assert_eq!(told.kind(), io::ErrorKind::Unsupported);
        assert!(told.to_string().contains(&format!("version {}", LAYOUT + 1)), "{told}");
        assert_eq!(pid_of(&writer.path), Some(std::process::id()));
        writer.end_life();
        let told = load(&writer.path, &[SHAPE]).map(drop).unwrap_err();
        assert_eq!(told.kind(), io::ErrorKind::InvalidData);
        drop(writer);
        fs::remove_dir(&dir).unwrap();
    }

    /// Goal: files of dead writers are removed, and those of live ones are not, whatever the
    /// process ids in them. Method: files that name this process and another one, with a lock and
    /// without.
    #[test]
    fn files_of_the_dead_are_removed() {
        let dir = own_dir("dead");
        let name = |pid: u32, number| dir.join(format!("{PREFIX}0.{pid}.{number}"));
        let dead = [name(u32::MAX - 1, 0), name(std::process::id(), 0), name(1, 0)];
        dead.iter().for_each(|path| fs::write(path, b"").unwrap());
        let elsewhere = name(u32::MAX - 1, 1);
        let held = File::create_new(&elsewhere).unwrap();
        lock::show_life(&held, WRITER).unwrap();
        let first = create(&dir);
        let second = create(&dir);
        assert!(dead.iter().all(|path| !path.exists()), "{:?}", files(&dir));
        assert!(elsewhere.exists() && first.path.exists() && second.path.exists());
        lock::end_life(&held, WRITER);
        drop((held, first, second));
        let _last = create(&dir);
        assert!(!elsewhere.exists());
        assert_eq!(files(&dir).unwrap().len(), 1);
        fs::remove_dir_all(&dir).unwrap();
    }

    /// Goal: a writer is alive as long as it holds the lock, whatever its process id says.
    #[test]
    fn alive_is_who_holds_the_lock() {
        let dir = own_dir("alive");
        let mut writer = create(&dir);
        writer.update(|_, _| {});
        let alive = |writer: &Writer| load(&writer.path, &[SHAPE]).unwrap().alive;
        assert!(alive(&writer));
        writer.block.put(PID, u64::from(u32::MAX - 1));
        assert!(alive(&writer));
        writer.end_life();
        writer.block.put(PID, u64::from(std::process::id()));
        assert!(!alive(&writer));
        drop(writer);
        fs::remove_dir(&dir).unwrap();
    }

    /// Goal: a writer is never without its file, however many others open and sweep.
    #[test]
    fn many_that_open_leave_each_other_alone() {
        let dir = own_dir("many");
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        let writer = create(&dir);
                        assert!(writer.path.exists());
                    }
                });
            }
        });
        fs::remove_dir(&dir).unwrap();
    }
}
