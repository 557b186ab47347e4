//! Page-aligned private memory, from hugepages if any are free.
//!
//! An [`Arena`] is one memfd mapped once; [`Block`]s are allocated from it and freed when dropped.
//! All pages are allocated at creation, so a block never raises SIGBUS later. A mapping of
//! hugepages alone only reserves them, and the limit of a control group (a container's
//! `hugetlb.2MB.max`) is not checked before a page is touched.

use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use memmap2::{MmapOptions, MmapRaw};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::file::reserve;

/// Use of hugepages for an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Hugepages {
    /// Hugepages if enough are free, otherwise ordinary pages, which is logged. The default.
    #[default]
    IfFree,
    /// Hugepages, or an error.
    Required,
    /// Ordinary pages.
    No,
}

/// Errors of creating an arena. Nothing is left behind.
#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    /// Hugepages were required and too few are free.
    #[error(
        "{need} hugepages of {page_len} bytes are needed and {free} free ({source}); reserve them: \
         sudo sysctl vm.nr_hugepages={need}"
    )]
    NoHugepages {
        /// Pages needed.
        need: usize,
        /// Free pages.
        free: usize,
        /// Bytes of a page.
        page_len: usize,
        /// What the kernel said.
        source: io::Error,
    },
    /// No memory, or memfd_create(2) failed.
    #[error("cannot map {len} bytes of memory: {source}; ask for less, or see ulimit -v")]
    Os {
        /// Bytes asked for.
        len: usize,
        /// What the kernel said.
        source: io::Error,
    },
}

/// Zero-initialised memory from which blocks are allocated. Clones share it.
#[derive(Clone)]
pub struct Arena(Arc<Inner>);

struct Inner {
    map: MmapRaw,
    len: usize,
    page_len: usize,
    is_huge: bool,
    free: Mutex<FreeList>,
}

/// Free ranges.
struct FreeList {
    /// (offset, length), sorted by offset, no two adjacent.
    ranges: Vec<(usize, usize)>,
    /// Bytes from here on were never allocated and are still zero.
    fresh_at: usize,
}

/// Granularity of blocks: a page, also inside hugepages.
const PAGE: usize = 4096;

impl Arena {
    /// Maps at least `len` bytes.
    ///
    /// # Errors
    /// [`ArenaError`]; with [`Hugepages::IfFree`] only for want of ordinary memory.
    pub fn new(len: usize, hugepages: Hugepages) -> Result<Self, ArenaError> {
        let len = len.max(1);
        if hugepages != Hugepages::No {
            let (page_len, free) = hugepages_free();
            let huge_len = len.next_multiple_of(page_len);
            match map(huge_len, MFdFlags::MFD_HUGETLB) {
                Ok(map) => {
                    tracing::info!(len = huge_len, page_len, "arena in hugepages");
                    return Ok(Self::over(map, huge_len, page_len, true));
                }
                Err(source) if hugepages == Hugepages::Required => {
                    let need = huge_len / page_len;
                    return Err(ArenaError::NoHugepages { need, free, page_len, source });
                }
                Err(error) => {
                    tracing::info!(len, free, %error, "arena in ordinary pages: no hugepages");
                }
            }
        }
        let len = len.next_multiple_of(PAGE);
        let map = map(len, MFdFlags::empty()).map_err(|source| ArenaError::Os { len, source })?;
        Ok(Self::over(map, len, PAGE, false))
    }

    fn over(map: MmapRaw, len: usize, page_len: usize, is_huge: bool) -> Self {
        let free = Mutex::new(FreeList { ranges: vec![(0, len)], fresh_at: 0 });
        Self(Arc::new(Inner { map, len, page_len, is_huge, free }))
    }

    /// Whether it is in hugepages.
    pub fn is_huge(&self) -> bool {
        self.0.is_huge
    }

    /// Bytes of one page of it.
    pub fn page_len(&self) -> usize {
        self.0.page_len
    }

    /// Bytes in total.
    pub fn len(&self) -> usize {
        self.0.len
    }

    /// Always false: an arena has at least a page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Free bytes; the largest block may be smaller.
    pub fn free_len(&self) -> usize {
        self.0.free().ranges.iter().map(|&(_, len)| len).sum()
    }

    /// Allocates `len` zero bytes, page aligned, or `None` if no free range is long enough.
    pub fn block(&self, len: usize) -> Option<Block> {
        let room = len.max(1).checked_next_multiple_of(PAGE)?;
        let (offset, fresh_at) = {
            let mut free = self.0.free();
            let i = free.ranges.iter().position(|&(_, len)| len >= room)?;
            let (offset, whole) = free.ranges[i];
            if whole == room {
                free.ranges.remove(i);
            } else {
                free.ranges[i] = (offset + room, whole - room);
            }
            let fresh_at = free.fresh_at;
            free.fresh_at = fresh_at.max(offset + room);
            (offset, fresh_at)
        };
        let mut block = Block { arena: Arc::clone(&self.0), offset, len, room };
        let used = fresh_at.saturating_sub(offset).min(len);
        block.as_mut_slice()[..used].fill(0);
        Some(block)
    }
}

impl Inner {
    fn free(&self) -> MutexGuard<'_, FreeList> {
        // No code that can panic runs while the lock is held.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl FreeList {
    /// Frees a range and merges it with its neighbours.
    fn put(&mut self, offset: usize, len: usize) {
        let i = self.ranges.partition_point(|&(at, _)| at < offset);
        self.ranges.insert(i, (offset, len));
        if i + 1 < self.ranges.len() && offset + len == self.ranges[i + 1].0 {
            self.ranges[i].1 += self.ranges.remove(i + 1).1;
        }
        if i > 0 && self.ranges[i - 1].0 + self.ranges[i - 1].1 == offset {
            self.ranges[i - 1].1 += self.ranges.remove(i).1;
        }
    }
}

/// Memory from an arena, freed when dropped. Keeps the arena alive.
pub struct Block {
    arena: Arc<Inner>,
    offset: usize,
    len: usize,
    room: usize,
}

impl Block {
    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Address of the first byte; page aligned, valid for [`len`](Self::len) bytes until the block
    /// is dropped. While a device or a peer uses it, the slices must not be used.
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.arena.map.as_mut_ptr().wrapping_add(self.offset)
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` bytes from `offset` lie in the mapping (the free list only ever had such
        // ranges) which the `Arc` keeps; they are initialised (the kernel zero-fills); no other
        // block has them, and `&self` keeps out this one's writers. Whoever took the raw pointer
        // promised the rest.
        unsafe { std::slice::from_raw_parts(self.as_mut_ptr(), self.len) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as in `as_slice`, with `&mut self` keeping out everybody else.
        unsafe { std::slice::from_raw_parts_mut(self.as_mut_ptr(), self.len) }
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.arena.free().put(self.offset, self.room);
    }
}

fn map(len: usize, flags: MFdFlags) -> io::Result<MmapRaw> {
    MmapOptions::new().len(len).map_raw(&memory(len, flags)?)
}

/// A memfd of `len` allocated bytes.
fn memory(len: usize, flags: MFdFlags) -> io::Result<File> {
    let file = File::from(memfd_create(c"barewire", MFdFlags::MFD_CLOEXEC | flags)?);
    reserve(&file, 0, len)?;
    Ok(file)
}

/// Size of a default hugepage and number of free ones according to the kernel; 2 MiB and 0 if
/// unknown.
fn hugepages_free() -> (usize, usize) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    parse_meminfo(&text)
}

fn parse_meminfo(text: &str) -> (usize, usize) {
    let value = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key))?;
        line.split_whitespace().next()?.parse::<usize>().ok()
    };
    let page_len = value("Hugepagesize:").filter(|kib| kib.is_power_of_two());
    (page_len.unwrap_or(2048) * 1024, value("HugePages_Free:").unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::os::unix::thread::JoinHandleExt;
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;
    use crate::alone::is_alone;

    #[test]
    fn an_arena_opens_on_any_machine_and_says_what_it_is() {
        let arena = Arena::new(10_000, Hugepages::IfFree).unwrap();
        assert!(arena.len() >= 10_000 && arena.len().is_multiple_of(arena.page_len()));
        assert_eq!(arena.is_huge(), arena.page_len() > PAGE);
        assert!(!Arena::new(1, Hugepages::No).unwrap().is_huge());
    }

    #[test]
    fn required_hugepages_are_given_or_the_error_says_the_command() {
        // More than any machine has: 16 TiB.
        let e = match Arena::new(1 << 44, Hugepages::Required) {
            Ok(_) => panic!("16 TiB of hugepages"),
            Err(e) => e.to_string(),
        };
        assert!(e.contains("sudo sysctl vm.nr_hugepages=") && !e.contains('\n'), "{e}");
        assert_eq!(parse_meminfo("HugePages_Free:   7\nHugepagesize:    2048 kB\n"), (2 << 20, 7));
        assert_eq!(parse_meminfo(""), (2 << 20, 0));
    }

    /// Goal: memory that there is not is an error, and no signal at its first use: an arena has all
    /// its pages when it is made. Method: what its file takes.
    #[test]
    fn an_arena_has_all_its_pages() {
        let mut kinds = vec![(300 * PAGE, MFdFlags::empty())];
        let (page_len, free) = hugepages_free();
        kinds.extend((free >= 2).then_some((2 * page_len, MFdFlags::MFD_HUGETLB)));
        for (len, flags) in kinds {
            // Others may have taken hugepages meanwhile.
            let Ok(file) = memory(len, flags) else { continue };
            let meta = file.metadata().unwrap();
            assert_eq!((meta.len(), meta.blocks() * 512), (len as u64, len as u64), "{flags:?}");
        }
    }

    /// Goal: memory is there in the end whatever signals come, as those of a profiler. Method: a
    /// thread that sends one far more often than so many pages are cleared. (With Linux 6.18 there
    /// is nothing to see.)
    #[test]
    fn signals_do_not_keep_memory_away() {
        if !is_alone("mem::arena::tests::signals_do_not_keep_memory_away", |_| ()) {
            return;
        }
        extern "C" fn nothing(_signal: libc::c_int) {}
        // SAFETY: a handler that does nothing.
        unsafe { libc::signal(libc::SIGUSR1, nothing as extern "C" fn(libc::c_int) as usize) };
        let (told, ended) = std::sync::mpsc::channel();
        let takes = std::thread::spawn(move || {
            told.send(Arena::new(48 << 20, Hugepages::No).unwrap().len()).unwrap();
        });
        let until = Instant::now() + Duration::from_secs(30);
        let len = loop {
            match ended.recv_timeout(Duration::from_micros(100)) {
                Ok(len) => break len,
                Err(_) => assert!(Instant::now() < until, "no end of it"),
            }
            // SAFETY: a thread that was not joined, and a signal with a handler.
            unsafe { libc::pthread_kill(takes.as_pthread_t(), libc::SIGUSR1) };
        };
        assert_eq!(len, 48 << 20);
    }

    proptest! {
        /// Goal: blocks are zero, aligned, disjoint, and all come back. Method: random takes and
        /// drops, each block filled with its own number.
        #[test]
        fn blocks_are_zero_apart_and_come_back(
            ops in prop::collection::vec((any::<bool>(), 0..40_000_usize), 1..120)
        ) {
            let arena = Arena::new(64 * PAGE, Hugepages::No).unwrap();
            let mut held: Vec<(Block, u8)> = Vec::new();
            for (serial, (take, n)) in ops.into_iter().enumerate() {
                let mark = serial as u8 | 1;
                if take {
                    let Some(mut block) = arena.block(n) else {
                        prop_assert!(arena.free_len() < 64 * PAGE);
                        continue;
                    };
                    prop_assert_eq!(block.len(), n);
                    prop_assert_eq!(block.as_mut_ptr() as usize % PAGE, 0);
                    prop_assert!(block.as_slice().iter().all(|&b| b == 0));
                    block.as_mut_slice().fill(mark);
                    held.push((block, mark));
                } else if !held.is_empty() {
                    let (block, mark) = held.swap_remove(n % held.len());
                    prop_assert!(block.as_slice().iter().all(|&b| b == mark));
                }
            }
            for (block, mark) in &held {
                prop_assert!(block.as_slice().iter().all(|b| b == mark));
            }
            held.clear();
            prop_assert_eq!(arena.free_len(), 64 * PAGE);
            prop_assert!(arena.block(64 * PAGE).is_some(), "the pieces joined again");
            prop_assert!(arena.block(64 * PAGE + 1).is_none());
        }
    }
}
