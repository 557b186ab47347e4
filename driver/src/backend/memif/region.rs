//! Memory that both sides of a memif have mapped: made by the client, taken by the server.
//!
//! A server trusts no client. It maps a region only if that is an anonymous file which cannot
//! shrink (`F_SEAL_SHRINK`, set by clients) and has the length that the client gave, so that no
//! access can fault (D9); a ring has to lie inside a region. The contents of rings are checked by
//! their readers (`ring`).

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
pub(super) use std::sync::atomic::{AtomicU16, fence};

use memmap2::{MmapOptions, MmapRaw};
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::statfs::{TMPFS_MAGIC, fstatfs};

use super::proto::{COOKIE, LOG2_RING_MAX};
use super::wake::Event;
use crate::backend::unix::DeferredClose;
use crate::file::reserve;

/// Bytes before the descriptors of a ring, and of each.
const RING_HEAD: usize = 128;
const DESC_LEN: usize = 16;
/// What descriptors have to be aligned to for us to read them as words.
const ALIGN: usize = 16;
/// In a ring's flags: its receiver polls and wants no wake-up.
pub(super) const MASKED: u16 = 1;
/// In a descriptor's flags: the frame goes on in the next.
pub(super) const NEXT: u16 = 1;

/// Mapped memory of a client.
pub(super) struct Region {
    map: MmapRaw,
}

impl Region {
    /// Maps `len` bytes of a client's memory.
    ///
    /// # Errors
    /// Why it is not safe to.
    pub(super) fn take(fd: DeferredClose<OwnedFd>, len: u64) -> Result<Self, &'static str> {
        // Before anything else is asked of it: only files in memory have seals, so nobody has to
        // answer for it.
        let seals = fcntl(&*fd, FcntlArg::F_GET_SEALS).unwrap_or(0);
        if !SealFlag::from_bits_truncate(seals).contains(SealFlag::F_SEAL_SHRINK) {
            return Err("Region can shrink");
        }
        let file = File::from(fd.into_inner());
        // Of a file of large pages one that has been given back may not be there again.
        if fstatfs(&file).ok().is_none_or(|at| at.filesystem_type() != TMPFS_MAGIC) {
            return Err("Region in large pages");
        }
        if len == 0 || file.metadata().map_or(0, |meta| meta.len()) < len {
            return Err("Region too short");
        }
        let len = usize::try_from(len).map_err(|_too_long| "Region too long")?;
        let map = MmapOptions::new().len(len).map_raw(&file).map_err(|_errno| "Region unusable")?;
        Ok(Self { map })
    }

    pub(super) fn len(&self) -> usize {
        self.map.len()
    }

    fn base(&self) -> *mut u8 {
        self.map.as_mut_ptr()
    }
}

/// A ring as it lies in memory. Valid while its region is mapped.
#[derive(Clone, Copy)]
pub(super) struct RingMem {
    base: *mut u8,
    pub(super) mask: u16,
}

// SAFETY: an address in shared memory that is reached by atomics only; whoever holds it keeps the
// mapping (`Conn`).
unsafe impl Send for RingMem {}
// SAFETY: the address does not change, and what is behind it are atomics.
unsafe impl Sync for RingMem {}

impl RingMem {
    /// The ring at `offset` of `region`, if it is all there.
    fn at(region: &Region, offset: usize, log2_len: u8) -> Result<Self, &'static str> {
        if !(1..=LOG2_RING_MAX).contains(&log2_len) {
            return Err("Invalid ring size");
        }
        let end = offset.checked_add(Self::len(log2_len)).ok_or("Invalid ring offset")?;
        if end > region.len() || !offset.is_multiple_of(ALIGN) {
            return Err("Invalid ring offset");
        }
        Ok(Self { base: region.base().wrapping_add(offset), mask: (1 << log2_len) - 1 })
    }

    fn len(log2_len: u8) -> usize {
        RING_HEAD + (DESC_LEN << log2_len)
    }

    /// How many descriptors there are.
    #[inline(always)]
    pub(super) fn count(self) -> u16 {
        self.mask + 1
    }

    #[inline(always)]
    fn index<'a>(self, at: usize) -> &'a AtomicU16 {
        // SAFETY: `at` is even and inside the head of the ring, which is mapped and aligned (`at`).
        // Everybody reaches it by atomics, or is another process (D2, D3).
        unsafe { &*self.base.add(at).cast() }
    }

    fn cookie<'a>(self) -> &'a AtomicU32 {
        // SAFETY: the first word of the ring, which is mapped and aligned (`at`). Everybody reaches
        // it by atomics, or is another process (D2, D3).
        unsafe { &*self.base.cast() }
    }

    /// [`MASKED`]; the receiver writes it.
    #[inline(always)]
    pub(super) fn flags<'a>(self) -> &'a AtomicU16 {
        self.index(4)
    }

    /// The client writes it.
    #[inline(always)]
    pub(super) fn head<'a>(self) -> &'a AtomicU16 {
        self.index(6)
    }

    /// The server writes it.
    #[inline(always)]
    pub(super) fn tail<'a>(self) -> &'a AtomicU16 {
        self.index(64)
    }

    /// The two words of a descriptor.
    #[inline(always)]
    pub(super) fn words<'a>(self, slot: u16) -> &'a [AtomicU64; 2] {
        let at = RING_HEAD + usize::from(slot & self.mask) * DESC_LEN;
        // SAFETY: `mask` keeps it inside the ring, which is mapped and aligned (`at`).
        unsafe { &*self.base.add(at).cast() }
    }

    /// Reads a descriptor, once.
    #[inline(always)]
    pub(super) fn desc(self, slot: u16) -> Desc {
        let [first, second] = self.words(slot);
        Desc { first: first.load(Relaxed), second: second.load(Relaxed) }
    }

    /// Where a descriptor lies, to be fetched.
    #[inline(always)]
    pub(super) fn desc_at(self, slot: u16) -> *const u8 {
        std::ptr::from_ref(self.words(slot)).cast()
    }
}

/// A copy of a descriptor.
#[derive(Clone, Copy)]
pub(super) struct Desc {
    first: u64,
    second: u64,
}

impl Desc {
    pub(super) fn new(flags: u16, region: u16, len: u32, offset: u32) -> Self {
        let (f, r, n) = (flags.to_ne_bytes(), region.to_ne_bytes(), len.to_ne_bytes());
        let first = u64::from_ne_bytes([f[0], f[1], r[0], r[1], n[0], n[1], n[2], n[3]]);
        let o = offset.to_ne_bytes();
        Self { first, second: u64::from_ne_bytes([o[0], o[1], o[2], o[3], 0, 0, 0, 0]) }
    }

    #[inline(always)]
    pub(super) fn flags(self) -> u16 {
        let b = self.first.to_ne_bytes();
        u16::from_ne_bytes([b[0], b[1]])
    }

    #[inline(always)]
    pub(super) fn region(self) -> u16 {
        let b = self.first.to_ne_bytes();
        u16::from_ne_bytes([b[2], b[3]])
    }

    #[inline(always)]
    pub(super) fn len(self) -> u32 {
        let b = self.first.to_ne_bytes();
        u32::from_ne_bytes([b[4], b[5], b[6], b[7]])
    }

    #[inline(always)]
    fn offset(self) -> u32 {
        let b = self.second.to_ne_bytes();
        u32::from_ne_bytes([b[0], b[1], b[2], b[3]])
    }

    /// Writes it.
    #[inline(always)]
    pub(super) fn write_to(self, words: &[AtomicU64; 2]) {
        self.write_len_to(words);
        words[1].store(self.second, Relaxed);
    }

    /// Writes everything but the offset.
    #[inline(always)]
    pub(super) fn write_len_to(self, words: &[AtomicU64; 2]) {
        words[0].store(self.first, Relaxed);
    }
}

/// The buffers of one ring, which a client knows without asking.
#[derive(Clone, Copy)]
pub(super) struct Own {
    /// The first, in the mapping and in the region.
    base: *mut u8,
    offset: u32,
    /// From one to the next.
    stride: u32,
    /// What fits in one.
    pub(super) len: u32,
}

// SAFETY: an address in shared memory, whose mapping `Conn` keeps as long as there is a ring of it.
unsafe impl Send for Own {}
// SAFETY: the address does not change, and the bytes behind it are reached by raw copies alone.
unsafe impl Sync for Own {}

impl Own {
    #[inline(always)]
    pub(super) fn at(&self, place: u16) -> *mut u8 {
        self.base.wrapping_add(usize::from(place) * self.stride as usize)
    }

    /// The descriptor of an empty buffer, or of one with `len` bytes.
    #[inline(always)]
    pub(super) fn desc(&self, place: u16, len: u32) -> Desc {
        Desc::new(0, 0, len, self.offset + u32::from(place) * self.stride)
    }
}

/// One direction of a connection.
pub(super) struct Lane {
    pub(super) ring: RingMem,
    pub(super) own: Option<Own>,
    /// Wakes the receiver.
    pub(super) event: Event,
}

/// A connection that was made. The mappings live as long as it does.
pub(super) struct Conn {
    regions: Vec<Region>,
    pub(super) rx: Lane,
    pub(super) tx: Lane,
    /// The other side has left, or was left.
    pub(super) is_down: AtomicBool,
    /// The port found what cannot be in a ring.
    pub(super) is_broken: AtomicBool,
}

impl Conn {
    /// Nobody sleeps at its receiving end.
    fn new(regions: Vec<Region>, rx: Lane, tx: Lane) -> Self {
        rx.ring.flags().store(MASKED, Relaxed);
        let (is_down, is_broken) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { regions, rx, tx, is_down, is_broken }
    }

    /// Where a descriptor points, and whether its `len` bytes are all in a region.
    #[inline(always)]
    pub(super) fn locate(&self, desc: Desc) -> Option<*mut u8> {
        let region = self.regions.get(usize::from(desc.region()))?;
        let (offset, len) = (desc.offset() as usize, desc.len() as usize);
        // Neither sum nor comparison overflows: both are 32 bits.
        (offset + len <= region.len()).then(|| region.base().wrapping_add(offset))
    }
}

/// How a client lays out its memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout {
    pub(super) log2_ring: u8,
    pub(super) bsize: usize,
}

impl Layout {
    /// From one buffer to the next: an odd number of cache lines, so that the first lines of all of
    /// them are spread over the sets of a cache.
    fn stride(self) -> usize {
        (self.bsize.div_ceil(64) | 1) * 64
    }

    pub(super) fn ring_at(self, ring: usize) -> usize {
        ring * RingMem::len(self.log2_ring).next_multiple_of(64)
    }

    fn buffers_at(self, ring: usize) -> usize {
        self.ring_at(2).next_multiple_of(4096) + ring * (self.stride() << self.log2_ring)
    }

    /// Bytes of the region. Less than 4 GiB, since buffers have 64 KiB and rings 2^14 of them at
    /// most (`MemifSettings::check`).
    fn len(self) -> usize {
        self.buffers_at(2).next_multiple_of(4096)
    }
}

/// The memory that a client makes: rings and buffers in one region.
pub(super) struct ClientMemory {
    pub(super) fd: OwnedFd,
    pub(super) len: usize,
    region: Region,
    layout: Layout,
    /// Wake the server, and this client.
    pub(super) events: [OwnedFd; 2],
}

/// Which ring is which.
pub(super) const TO_SERVER: usize = 0;
pub(super) const TO_CLIENT: usize = 1;

impl ClientMemory {
    pub(super) fn new(layout: Layout) -> io::Result<Self> {
        let len = layout.len();
        let flags = MFdFlags::MFD_ALLOW_SEALING | MFdFlags::MFD_CLOEXEC;
        let fd = memfd_create(c"barewire-memif", flags)?;
        // Now, and not in the middle of a frame.
        reserve(&fd, 0, len)?;
        fcntl(&fd, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW))?;
        let map = MmapOptions::new().len(len).map_raw(&fd)?;
        let made = Self { fd, len, region: Region { map }, layout, events: [event()?, event()?] };
        for which in [TO_SERVER, TO_CLIENT] {
            let ring = made.ring(which);
            ring.cookie().store(COOKIE, Relaxed);
            for place in 0..ring.count() {
                let own = made.own(which);
                own.desc(place, own.len).write_to(ring.words(place));
            }
        }
        fence(Release);
        Ok(made)
    }

    pub(super) fn layout(&self) -> Layout {
        self.layout
    }

    fn ring(&self, which: usize) -> RingMem {
        let at = self.layout.ring_at(which);
        RingMem::at(&self.region, at, self.layout.log2_ring).expect("the region was made for it")
    }

    fn own(&self, which: usize) -> Own {
        let at = self.layout.buffers_at(which);
        Own {
            base: self.region.base().wrapping_add(at),
            offset: at as u32,
            stride: self.layout.stride() as u32,
            len: self.layout.bsize as u32,
        }
    }

    /// The client's side of the connection.
    ///
    /// # Errors
    /// What is missing for the events.
    pub(super) fn connected(self) -> io::Result<Conn> {
        let [to_server, to_client] = [TO_SERVER, TO_CLIENT].map(|w| (self.ring(w), self.own(w)));
        let [wake_server, wake_us] = self.events;
        let lane = |(ring, own), event| Lane { ring, own: Some(own), event };
        let tx = lane(to_server, Event::for_raising(wake_server)?);
        let rx = lane(to_client, Event::for_waiting(wake_us)?);
        Ok(Conn::new(vec![self.region], rx, tx))
    }
}

fn event() -> io::Result<OwnedFd> {
    let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
    Ok(EventFd::from_value_and_flags(0, flags)?.into())
}

/// A ring as announced by a client, with the event that wakes its receiver.
pub(super) struct RingSpec {
    pub(super) region: u16,
    pub(super) offset: u32,
    pub(super) log2_len: u8,
    pub(super) event: OwnedFd,
}

/// The server's side of a connection, by all that the client has said.
///
/// # Errors
/// What is wrong with it.
pub(super) fn accepted(regions: Vec<Region>, rings: [RingSpec; 2]) -> Result<Conn, &'static str> {
    let ring = |said: &RingSpec| {
        let region = regions.get(usize::from(said.region)).ok_or("Invalid region index")?;
        let ring = RingMem::at(region, said.offset as usize, said.log2_len)?;
        // Acquire: what the client wrote before it sent the region.
        match ring.cookie().load(Acquire) {
            COOKIE => Ok(ring),
            _ => Err("Wrong cookie"),
        }
    };
    let [from, to] = [ring(&rings[TO_SERVER])?, ring(&rings[TO_CLIENT])?];
    let [came, wakes] = rings.map(|said| said.event);
    let lane = |ring, event| Lane { ring, own: None, event };
    let unfit = |_errno| "Unfit interrupt fd";
    let rx = lane(from, Event::for_waiting(came).map_err(unfit)?);
    let tx = lane(to, Event::for_raising(wakes).map_err(unfit)?);
    // The indices that are ours.
    rx.ring.tail().store(0, Relaxed);
    tx.ring.tail().store(0, Relaxed);
    Ok(Conn::new(regions, rx, tx))
}

/// Of a descriptor, for messages.
pub(super) fn number(fd: &OwnedFd) -> i32 {
    fd.as_raw_fd()
}
