//! An Ethernet segment between processes of one machine, in a file of /dev/shm.
//!
//! Every ordered pair of members has its own ring (`ring`), which holds the frames themselves. A
//! ring takes memory only while the pair exchanges frames, and little until traffic is high
//! (`opening`). Why one ring per pair and not one per receiver:
//! - the only shared cache line of a short frame is the one that the frame starts in: no
//!   read-modify-write, no index;
//! - a sender killed half way through a frame has not published it, and no other sender's frames
//!   are behind it. In a shared ring the others would have to detect and skip its slot;
//! - a sender's memory is bounded, and a full ring holds up only its own sender.
//!
//! The price is that a receiver has to know which rings to poll. It *watches* up to two rings
//! directly (their senders only publish, which is the ping-pong case). For the others it has a
//! *doorbell*: a bit per sender in words of 64, and a summary word with a bit per word. A sender
//! sets its bit by an atomic OR unless it is set, and then the bit of its word. So an idle poll
//! reads three cache lines for any number of members, and the doorbell tells which senders rang it.
//!
//! A sender publishes a frame and then reads whether the doorbell is set or the receiver watches.
//! Without a fence the load may return an old value, and the doorbell stays silent; so it does if
//! the sender is killed in between. Every `SWEEP_EVERY` polls the receiver therefore checks a part
//! of its open rings, so that all are checked after `SWEEP_ALL` sweeps. That bounds the delay to
//! microseconds and costs the sender nothing. Sweeps also find senders that have left. A sender
//! that opens a ring always rings the doorbell, so that the receiver learns of the ring.
//!
//! A frame is visible once [`Port::tx`] returns; [`Port::flush`] only wakes sleeping members.
//!
//! # Liveness
//! A member holds a lock on a byte of the file (`lock`), which the kernel releases when its process
//! ends. Joining, leaving, opening a ring and cleaning up take another such lock; the data path
//! never does. Frames of a member that left or died stay in the receivers' rings until they are
//! read; then the receiver gives the ring's memory back. Dead members are found when a member
//! joins, opens a ring, or finds a ring full for long.
//!
//! # Boards
//! The members of a group exchange data through [slots](crate::board), 256 KiB each. A slot
//! belongs to its member's place in the segment, so that the data of a member that died or left can
//! still be read. A slot is reused for another group once every member of the last one has finished
//! reading.
//!
//! # Monitors
//! A [`Monitor`] is a member without an address that gets a copy of every frame, stamped with the
//! time of sending. A sender that knows of a monitor caches no routes, so that every frame takes
//! the slow path, which makes the copies; without a monitor the fast path has no check for one.
//! Members learn of a monitor in their next sweep. A monitor that is too slow misses frames and
//! holds up no sender. A member may also feed a monitor with frames of another port of its process.
//!
//! # Trust
//! The file is the user's own (mode 0600, checked), but nothing read from it is trusted: lengths
//! and offsets are copied and then checked against private state, members are indices below a
//! private bound, and frames are lent as [`RxFrame`], which can only be copied from. A corrupted
//! ring is closed and counted ([`PortCounters::rx_dropped`]), and its sender opens it again.

mod board;
mod ends;
mod layout;
mod lease;
mod members;
mod monitor;
mod opening;
mod ring;
mod role;
pub(crate) mod sealed;
mod segment;
mod slots;
mod wait;

#[cfg(test)]
mod tests;

pub(in crate::backend) use board::ShmBoard;
pub(crate) use layout::version;
pub(crate) use lease::AddressLease;
pub use monitor::Monitor;
pub(in crate::backend) use monitor::MonitorFeed;
pub use role::Uplink;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};
use std::sync::atomic::{AtomicU32, AtomicU64};
use std::time::Duration;

use nix::unistd::{AccessFlags, access};

use crate::clock::{monotonic_ns, now_ns};
use crate::error::{OPEN_FILES, OpenError};
use crate::file::check_len;
use crate::frame::{ETH_HDR_LEN, HeadBuf, RxFrame, TxFrame, WriteBody, WriteHead};
use crate::hint::cold;
use crate::mem::{Lap, SHORT, Stores, prefetch, prefetch_long};
use crate::port::{
    FastPort, InPlaceTx, MTU_MIN, Port, PortCaps, PortCounters, PortGone, PortWaiter, Presence,
    ReplyTx, RxSink, Station, Tx,
};
use ends::RingEnds;
use layout::Layout;
use layout::MEMBERS_MAX;
use members::{MemberSet, place_of, ring};
use opening::Long;
use ring::{Consumer, GRANULE, NoRoom, Producer, RingItem, WORD_LEN, slot_len};
use role::{Role, is_addressed, is_monitor, is_switch};
use segment::{CLOSED, DOORBELL, RawRing, WATCH};
use wait::{Shared, Waiter};

pub(crate) use segment::FileId;
pub(crate) use wait::{RECHECK, WakeSocket};

/// Error text for a [`WakeSocket`] that cannot be made.
pub(crate) const NO_WAKE_SOCKET: &str = "cannot make a socket to sleep on for";

/// Largest MTU: with its Ethernet header a frame is 64 KiB.
pub const MTU_MAX: usize = 65_536 - ETH_HDR_LEN;

/// How the names of segments' files begin.
const FILE_PREFIX: &str = "barewire-";

/// Frames lent at once; a larger `max` of `rx_burst` is cut to this.
const BURST: usize = 64;
/// Bytes of one sender that are lent at once: the sender gets room back before it has none, so that
/// both copy at the same time.
const BURST_BYTES: usize = RING_LEN / 8;
/// Rings that a receiver checks in every poll.
const WATCHES: usize = 2;
/// Sweeps without a frame after which a watch may move to another ring.
const WATCH_IDLE: u32 = 8;
/// Polls between two sweeps of rings without a watch, and sweeps that check every ring once: a poll
/// takes 10 to 40 ns.
const SWEEP_EVERY: i32 = 64;
const SWEEP_ALL: usize = 16;
/// Rings that a switch of a sealed segment opens or grows per poll: some 100 us in the worst case.
const STEPS: u32 = 4;
/// A frame that takes the fast path is no longer than any port's may be.
const _: () = assert!(SHORT <= ETH_HDR_LEN + MTU_MIN);
/// The bit of a key that makes it a group's.
const GROUP: u64 = 1;
/// A key that is no address: no station has this number, and the group with it has another MAC.
const NO_KEY: u64 = (Station::EVERY as u64) << 48;

/// Settings to join a segment, and to make it if there is none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShmSettings {
    /// Name of the segment: letters, digits, `-`, `_` and `.`, 1 to 64 of them. Default `default`,
    /// so that two processes of one user meet without an argument.
    pub name: String,
    /// This member's address. Default: behind a switch a number of its NIC's MAC, else a random
    /// locally administered MAC.
    pub station: Option<Station>,
    /// Largest number of bytes after the Ethernet header that this member sends or takes, 256 to
    /// [`MTU_MAX`]. Default 65,520, or less if the segment's rings are too small for that.
    pub mtu: Option<usize>,
    /// Bytes of one ring, a power of two from 4096; a frame may take a quarter of it. The member
    /// that makes the segment decides. Default 1 MiB: 16 frames of 64 KiB less padding. Each pair
    /// that talks takes memory per direction: 16 KiB of it at first, all of it once a frame is
    /// longer than a quarter of that or much was sent.
    pub ring_len: Option<usize>,
    /// Most members, 2 to 1,024; the member that makes the segment decides. Default 1,024. Costs
    /// 256 bytes per place, 256 KiB in all at 1,024, and address space in the file for each pair.
    pub members: Option<usize>,
    /// Where the file is. Default /dev/shm; anything else is for tests.
    pub dir: PathBuf,
}

impl Default for ShmSettings {
    fn default() -> Self {
        Self::named("default")
    }
}

impl ShmSettings {
    /// The settings of the segment `name`.
    pub fn named(name: &str) -> Self {
        let (name, dir) = (name.into(), "/dev/shm".into());
        Self { name, station: None, mtu: None, ring_len: None, members: None, dir }
    }

    /// The segment's file.
    pub fn path(&self) -> PathBuf {
        self.dir.join(format!("{}{}", self.file_prefix(), self.name))
    }

    /// How the names of this user's files begin.
    pub(crate) fn file_prefix(&self) -> String {
        format!("{FILE_PREFIX}{}-", nix::unistd::geteuid())
    }

    /// The socket at which processes of this user attach to the segment's switch.
    pub(crate) fn switch_socket(&self) -> PathBuf {
        let mut path = self.path().into_os_string();
        path.push(".sock");
        path.into()
    }

    /// Checks whether the segment could be joined or made, as far as can be seen; changes nothing.
    pub(crate) fn check_here(&self) -> Result<(), OpenError> {
        self.check()?;
        if self.path().exists() {
            return Ok(());
        }
        let len = self.layout()?.file_len() as u64;
        check_len(len).map_err(|e| segment::os("cannot size", &self.path(), e))?;
        access(&self.dir, AccessFlags::W_OK | AccessFlags::X_OK).map_err(|errno| {
            let hint = "; it is a tmpfs that every user may write: mount -t tmpfs -o mode=1777 \
                        tmpfs /dev/shm";
            OpenError::os("cannot make a segment in", &self.dir, errno, hint)
        })
    }

    /// The process of the segment's switch, if one lives. Changes nothing.
    ///
    /// # Errors
    /// The file cannot be looked at, or is no segment.
    pub(crate) fn switch_pid(&self) -> Result<Option<u32>, OpenError> {
        segment::switch_of(self)
    }

    /// Removes the segment's file if it is of a build with another layout, and returns whether it
    /// was. Its members keep it mapped. To be called by whoever alone may be the segment's switch.
    ///
    /// # Errors
    /// The file cannot be removed.
    pub(crate) fn remove_other_version(&self) -> Result<bool, OpenError> {
        segment::remove_other_version(&self.path())
    }

    /// Device and inode number of the segment's file.
    pub(crate) fn file_id(&self) -> Option<FileId> {
        segment::file_id(&std::fs::metadata(self.path()).ok()?)
    }

    /// The MTU of a port opened now; `None` if it would not open. Changes nothing.
    pub(crate) fn mtu_here(&self) -> Option<usize> {
        self.check().ok()?;
        let layout = match segment::layout_of(self).ok()? {
            Some(layout) => layout,
            None => self.layout().ok()?,
        };
        self.check_against(&layout, &self.path()).ok()?;
        Some(self.mtu_in(&layout))
    }

    /// The MTU of a port on a segment of these sizes.
    fn mtu_in(&self, layout: &Layout) -> usize {
        self.mtu.unwrap_or(MTU.min(layout.frame_max - ETH_HDR_LEN))
    }

    fn check(&self) -> Result<(), OpenError> {
        let bad = |spec: &str, why: &str| OpenError::BadSpec { spec: spec.into(), why: why.into() };
        let legal = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        if !(1..=64).contains(&self.name.len()) || !self.name.chars().all(legal) {
            let why = "a segment's name is 1 to 64 letters, digits, -, _ or ., such as shm:job7";
            return Err(bad(&format!("shm:{}", self.name), why));
        }
        match self.station {
            Some(station) if !station.is_single() => {
                let why = "a station's address has an even first byte; write mac=02:00:00:00:00:01";
                Err(bad(&station.to_string(), why))
            }
            _ => self.check_mtu(MTU_MAX),
        }
    }

    fn check_mtu(&self, max: usize) -> Result<(), OpenError> {
        OpenError::check_mtu(self.mtu.unwrap_or(max), max).map(drop)
    }

    /// The sizes to make a segment with.
    fn layout(&self) -> Result<Layout, OpenError> {
        let ring_len = self.ring_len.unwrap_or(RING_LEN);
        let frame_max = (MTU_MAX + ETH_HDR_LEN).min((ring_len / 4).saturating_sub(64));
        let layout = Layout { members: self.members.unwrap_or(MEMBERS_MAX), ring_len, frame_max };
        if layout.is_sound() {
            return Ok(layout);
        }
        let why = match layout.members {
            2..=MEMBERS_MAX => format!("ring={ring_len}: write a power of two from 4096"),
            members => format!("members={members}: write 2 to {MEMBERS_MAX}"),
        };
        Err(OpenError::BadSpec { spec: format!("shm:{}", self.name), why })
    }

    /// Checks that a segment of these sizes matches the settings.
    fn check_against(&self, layout: &Layout, path: &Path) -> Result<(), OpenError> {
        let pairs =
            [("ring", self.ring_len, layout.ring_len), ("members", self.members, layout.members)];
        for (what, asked, is) in pairs {
            if let Some(asked) = asked.filter(|&asked| asked != is) {
                return Err(OpenError::Differs { path: path.to_owned(), what, is, asked });
            }
        }
        self.check_mtu(layout.frame_max - ETH_HDR_LEN)
    }
}

/// Default length of a ring.
const RING_LEN: usize = 1 << 20;
/// Default MTU: what is left of 64 KiB beside an Ethernet header, rounded down to 16.
pub(crate) const MTU: usize = 65_520;

/// A member of a segment.
pub struct ShmPort {
    caps: PortCaps,
    frame_max: usize,
    /// Bytes behind each frame that we receive: a monitor's stamp.
    extra: usize,
    /// Members that get a copy of each frame that we send.
    monitors: Vec<usize>,
    /// Frames go to the switch, whatever their address, and come from it alone.
    is_leaf: bool,
    /// Route of the last frame; its ring is the current one of `tx_rings`.
    last: Route,
    /// Addresses whose ring is open, by [`route_slot`].
    routes: Box<[Route; ROUTES]>,
    /// The process that opened the port; a forked child is another.
    pid: u32,
    /// Sleeping members with frames of ours, to be woken by `flush`.
    sleepers: MemberSet,
    counters: PortCounters,
    /// Polls until the next sweep, and the number of sweeps so far.
    polls_to_sweep: i32,
    sweeps: u32,
    /// Not 0 if frames come several at a time, or `ready` is not 0.
    more: u64,
    /// Frames received singly since a poll found none or several, less one if that found none.
    /// [`PortCounters::rx_frames`] is its value in `counters` plus one plus this.
    singles: i64,
    /// Senders that may have something beyond what the watched words show.
    ready: MemberSet,
    /// The ring of the first watch is the current one of `rx_rings`.
    watches: [Watch; WATCHES],
    /// The sender that the next burst starts from: round robin among busy senders.
    turn: usize,
    /// Senders whose ring is open.
    open_rx_rings: Vec<usize>,
    /// Where the next sweep continues, in `open_rx_rings` and among all places.
    sweep_at: usize,
    place_at: usize,
    bell: *const AtomicU64,
    /// Towards each member, and a last one that stays closed.
    tx_rings: RingEnds<TxRing>,
    rx_rings: RingEnds<RxRing>,
    /// Where a frame is, its length, and the member that sent it.
    burst: Box<[(*const u8, u32, u32); BURST]>,
    /// Epoch at which `peers` was read from the segment.
    epoch: u64,
    peers: Vec<Peer>,
    inc: u64,
    warned_ns: u64,
    /// When a damaged ring was last logged.
    logged_ns: u64,
    /// The last attempt to open a ring lacked memory.
    lacks_memory: bool,
    /// Members towards whom a ring, or a longer one, lacked memory. A shorter frame that is sent
    /// does not clear this: ACKs pass while long frames wait.
    starved: Vec<usize>,
    /// Our rings of full length, and the members towards whom we gave one up.
    long: Vec<Long>,
    given_up: Vec<usize>,
    /// Rings that may be opened or grown before the next poll, and per poll.
    steps: u32,
    syscall_budget: u32,
    /// Last: the pointers above go into its mapping.
    shared: Arc<Shared>,
}

// SAFETY: the raw pointers are addresses in the mapping that `shared` keeps, used through `&mut
// self` or for atomics; nothing is tied to the thread.
unsafe impl Send for ShmPort {}

/// A ring that is checked in every poll.
#[derive(Clone, Copy)]
struct Watch {
    /// Address of the next frame's first byte, behind the word at the head of the sender's ring; or
    /// behind [`NOTHING`]. (The frame and not its word: only one of the two is kept while the frame
    /// is lent.)
    next: *const u8,
    /// Beyond all members if there is none.
    sender: usize,
    /// The last sweep that found new frames in the ring, and `next` at that sweep.
    last_sweep: u32,
    swept: *const u8,
}

/// Word of a free watch, and `rx_open` of a closed ring.
static NOTHING: AtomicU64 = AtomicU64::new(0);
const _: () = assert!(CLOSED == 0);
/// [`TxRing::alert`] while clearing is due.
static DUE: AtomicU32 = AtomicU32::new(1);

impl Watch {
    const NONE: Self = {
        let next = behind(&NOTHING);
        Self { next, sender: usize::MAX, last_sweep: 0, swept: next }
    };

    fn is_on(&self) -> bool {
        self.sender != usize::MAX
    }

    /// The word that publishes the next frame.
    #[inline(always)]
    fn word(&self) -> *const AtomicU64 {
        self.next.wrapping_sub(WORD_LEN).cast()
    }
}

/// Address of the frame after `word`.
#[inline(always)]
const fn behind(word: *const AtomicU64) -> *const u8 {
    word.cast::<u8>().wrapping_add(WORD_LEN)
}

/// The sending end towards one member. The alignment makes its index a shift.
#[repr(align(128))]
struct TxRing {
    ring: Producer<RawRing>,
    rx_open: *const AtomicU64,
    /// The receiver's doorbell for our group, and that for all.
    doorbell_group: *const AtomicU64,
    bell: *const AtomicU64,
    sleeping: *const AtomicU32,
    /// Not 0 if there is something to do after a frame went out: `sleeping`, or [`DUE`].
    alert: *const AtomicU32,
    /// Short frames sent.
    frames: u64,
    probed_ns: u64,
    /// Bytes of `frames`.
    bytes: u64,
    fulls: u32,
    is_open: bool,
    /// Bytes through the ring after which it is grown.
    grow_at: u64,
    /// How long frames are stored: through the cache or past it.
    stores: Stores,
}

impl TxRing {
    /// The end from `me` towards `r`, closed.
    fn closed(seg: &segment::Segment, me: usize, r: usize) -> Self {
        let ring = Producer::new(RawRing::NONE, seg.layout.first_len());
        let lap = ring.ring_len() as u32;
        let sleeping = std::ptr::from_ref(seg.sleeping(r));
        Self {
            ring,
            rx_open: &NOTHING,
            doorbell_group: seg.doorbell_group(r, place_of(me).0),
            bell: seg.doorbell(r),
            sleeping,
            alert: sleeping,
            frames: 0,
            probed_ns: 0,
            bytes: 0,
            fulls: 0,
            is_open: false,
            grow_at: u64::MAX,
            stores: Stores::new(Lap::Bytes(lap)),
        }
    }

    /// Rings the receiver's doorbell for `me`, unless it is still set.
    #[inline]
    fn ring_doorbell(&self, me: usize) {
        // SAFETY: words of the mapping (`closed`), which `ShmPort::shared` keeps.
        let (doorbell_group, bell) = unsafe { (&*self.doorbell_group, &*self.bell) };
        ring(doorbell_group, bell, place_of(me));
    }

    /// Clears granules ahead of the tail. True if the receiver sleeps.
    #[inline(never)]
    fn clear_ahead(&mut self) -> bool {
        self.alert = self.sleeping;
        self.ring.clear_ahead();
        // SAFETY: as in `push`.
        unsafe { &*self.sleeping }.load(Relaxed) != 0
    }
}

/// The receiving end from one member.
#[repr(align(128))]
struct RxRing {
    ring: Consumer<RawRing, ETH_HDR_LEN>,
    is_open: bool,
    /// Which of the watches is on it, or [`WATCHES`].
    watch: usize,
    /// The sender's address while the ring is open.
    key: u64,
    /// 0 once the sender has closed its end.
    tx_open: *const AtomicU64,
}

/// A member's entry as last read from the segment; state 0 for an empty place.
#[derive(Clone, Copy)]
struct Peer {
    state: u64,
    key: u64,
}

/// An address and the member that frames to it go to.
#[derive(Clone, Copy)]
struct Route {
    key: u64,
    to: usize,
}

/// Entries of the route cache: twice the members, so that few collide. Colliding addresses are
/// looked up again.
const ROUTES: usize = 2 * MEMBERS_MAX;

/// Index of an address in the route cache.
#[inline(always)]
fn route_slot(key: u64) -> usize {
    (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (64 - ROUTES.ilog2())) as usize
}

impl ShmPort {
    /// Joins the segment, making it if there is none.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(settings: &ShmSettings) -> Result<Self, OpenError> {
        Self::open_as(settings, Role::Station)
    }

    /// Joins the segment as its switch, which forwards to `uplink`.
    ///
    /// # Errors
    /// [`OpenError`], [`OpenError::HasSwitch`] among them; nothing is left behind.
    pub(crate) fn open_switch(settings: &ShmSettings, uplink: Uplink) -> Result<Self, OpenError> {
        Self::open_as(settings, Role::Switch(uplink))
    }

    /// Joins the segment as a station that reaches others through the switch alone, and returns the
    /// switch's uplink. [`Uplink::mtu`] is 0 if there never was a switch.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub(crate) fn open_leaf(settings: &ShmSettings) -> Result<(Self, Uplink), OpenError> {
        let port = Self::open_as(settings, Role::Leaf)?;
        let uplink = port.shared.seg.uplink();
        Ok((port, uplink))
    }

    /// As [`open_switch`](Self::open_switch), of the segment in a [sealed](sealed::create) `file`.
    /// Its other members are not trusted: neither their data nor to release a lock. At most
    /// [`STEPS`] rings are opened or grown per poll.
    ///
    /// # Errors
    /// [`OpenError`].
    pub(crate) fn open_switch_of(
        file: File,
        settings: &ShmSettings,
        uplink: Uplink,
    ) -> Result<Self, OpenError> {
        settings.check()?;
        let role = Role::Switch(uplink);
        let mut port = Self::joined(sealed::join(file, settings, role)?, settings, role);
        (port.steps, port.syscall_budget) = (STEPS, STEPS);
        Ok(port)
    }

    /// As [`open_leaf`](Self::open_leaf), of the segment in a [sealed](sealed::create) `file`.
    ///
    /// # Errors
    /// [`OpenError`].
    pub(crate) fn open_leaf_of(
        file: File,
        settings: &ShmSettings,
    ) -> Result<(Self, Uplink), OpenError> {
        settings.check()?;
        let port = Self::joined(sealed::join(file, settings, Role::Leaf)?, settings, Role::Leaf);
        let uplink = port.shared.seg.uplink();
        Ok((port, uplink))
    }

    fn open_as(settings: &ShmSettings, role: Role) -> Result<Self, OpenError> {
        Self::open_within(settings, role, segment::PATIENCE)
    }

    /// Waits at most `patience` for the segment's lock, here and when leaving.
    fn open_within(
        settings: &ShmSettings,
        role: Role,
        patience: Duration,
    ) -> Result<Self, OpenError> {
        settings.check()?;
        Ok(Self::joined(segment::join(settings, role, patience)?, settings, role))
    }

    fn joined(joined: segment::Joined, settings: &ShmSettings, role: Role) -> Self {
        let segment::Joined { seg, me, inc, station } = joined;
        let layout = seg.layout;
        let mtu = settings.mtu_in(&layout);
        let caps = PortCaps {
            lossless: <Self as InPlaceTx>::LOSSLESS,
            rto_floor_ns: 1_000_000,
            tells_presence: true,
            ..PortCaps::new(station, mtu, format!("shm:{}", settings.name))
        };
        // The last one stays closed.
        let mut tx_rings =
            RingEnds::new((0..layout.members).chain([me]).map(|r| TxRing::closed(&seg, me, r)));
        tx_rings.set_current(layout.members);
        let extra = if role == Role::Monitor { monitor::STAMP_LEN } else { 0 };
        let rx_rings = RingEnds::new((0..layout.members).map(|_| RxRing::closed(layout, extra)));
        let bell = std::ptr::from_ref(seg.doorbell(me));
        tracing::debug!(path = %seg.path.display(), %station, mtu, "joined");
        Self {
            caps,
            frame_max: ETH_HDR_LEN + mtu + extra,
            extra,
            monitors: Vec::new(),
            is_leaf: role == Role::Leaf,
            last: Route { key: NO_KEY, to: layout.members },
            routes: Box::new([Route { key: NO_KEY, to: 0 }; ROUTES]),
            pid: std::process::id(),
            sleepers: MemberSet::EMPTY,
            counters: PortCounters::default(),
            polls_to_sweep: SWEEP_EVERY,
            sweeps: 0,
            more: 0,
            singles: -1,
            ready: MemberSet::EMPTY,
            watches: [Watch::NONE; WATCHES],
            turn: 0,
            open_rx_rings: Vec::with_capacity(layout.members),
            sweep_at: 0,
            place_at: 0,
            bell,
            tx_rings,
            rx_rings,
            burst: Box::new([(std::ptr::null(), 0, 0); BURST]),
            epoch: 0,
            peers: vec![Peer { state: 0, key: NO_KEY }; layout.members],
            inc,
            warned_ns: 0,
            logged_ns: 0,
            lacks_memory: false,
            starved: Vec::new(),
            long: Vec::new(),
            given_up: Vec::new(),
            steps: u32::MAX,
            syscall_budget: u32::MAX,
            shared: Arc::new(Shared::new(seg, me)),
        }
    }

    /// Takes one of the steps that this poll may spend on system calls; false if none is left.
    #[cold]
    fn may_use_syscalls(&mut self) -> bool {
        let left = self.steps.checked_sub(1);
        self.steps = left.unwrap_or(0);
        left.is_some()
    }

    /// The segment's file.
    pub fn path(&self) -> &Path {
        &self.shared.seg.path
    }

    /// Lets the addresses that new members get begin elsewhere. Those of a removed segment, whose
    /// processes keep them, are not known here.
    pub(crate) fn skip_addresses(&self) {
        let start = now_ns() & u64::from(u32::MAX);
        self.shared.seg.word(layout::NEXT_INC).store(start, Relaxed);
    }

    /// Device and inode number of the segment's file.
    pub(crate) fn file_id(&self) -> Option<FileId> {
        self.shared.seg.file_id()
    }

    /// A socket to sleep on this port and on other descriptors. Excludes the use of
    /// [`Port::waiter`].
    ///
    /// # Errors
    /// Those of making a socket.
    pub(crate) fn wake_socket(&self) -> Result<WakeSocket, OpenError> {
        let no_socket = |e| OpenError::os(NO_WAKE_SOCKET, self.path(), e, OPEN_FILES);
        WakeSocket::bind(&self.shared).map_err(no_socket)
    }

    /// Changes when a member joins or leaves.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        // Relaxed: `refresh` reads it with Acquire.
        self.shared.seg.epoch().load(Relaxed)
    }

    /// The member with the address `key`, as of the last refresh.
    fn member(&self, key: u64) -> Option<usize> {
        self.peers.iter().position(|p| p.key == key && p.state != 0)
    }

    /// Whether a member has the address.
    pub(crate) fn has(&mut self, station: Station) -> bool {
        self.refresh();
        self.member(station.word()).is_some()
    }

    /// Whether the segment has a switch that lives.
    pub(crate) fn has_switch(&self) -> bool {
        let seg = &self.shared.seg;
        seg.switch().is_some_and(|m| seg.lives(m))
    }

    /// The stations of the segment but this one: address, and process as numbered where it lives.
    pub(crate) fn stations(&self) -> impl Iterator<Item = (Station, u32)> + '_ {
        let Shared { seg, me, .. } = &*self.shared;
        (0..seg.places()).filter(|&m| m != *me).filter_map(|m| {
            let state = seg.state(m).load(Acquire);
            if !is_addressed(state) {
                return None;
            }
            let station = Station::from_word(seg.station(m).load(Relaxed));
            Some((station, seg.pid(m).load(Relaxed) as u32))
        })
    }

    /// Whether the last frame went to the station, as [`Station::word`] has it.
    #[inline(always)]
    pub(crate) fn is_last(&self, key: u64) -> bool {
        key == self.last.key
    }
}

impl RxRing {
    fn closed(layout: Layout, extra: usize) -> Self {
        Self::new(RawRing::NONE, &NOTHING, layout, extra)
    }

    /// Of a ring that was opened.
    fn new(ring: RawRing, tx_open: *const AtomicU64, layout: Layout, extra: usize) -> Self {
        let len = layout.first_len();
        let ring = Consumer::new(ring, len, layout.frame_max_in(len, extra));
        Self { ring, is_open: false, watch: WATCHES, key: NO_KEY, tx_open }
    }

    /// Whether the sender has closed its end.
    #[inline(always)]
    fn has_left(&self) -> bool {
        // SAFETY: a word of the mapping (`accept`), which `ShmPort::shared` keeps, or a static.
        // Acquire: if it has, all that it ever published shows after this.
        unsafe { &*self.tx_open }.load(Acquire) == 0
    }
}

impl Drop for ShmPort {
    fn drop(&mut self) {
        // A forked child is no member; its parent still is.
        if self.pid == std::process::id() {
            self.shared.seg.leave(self.shared.me);
        }
    }
}

/// Outcome of a frame offered to one member.
enum Pushed {
    Sent,
    Full,
    Closed,
}

/// Sending.
impl ShmPort {
    /// Allocates a slot on a board shared by these stations, in the order of ranks, among them this
    /// port's own: see [`AnyPort::board`](super::any_port::AnyPort::board).
    pub(in crate::backend) fn board(&mut self, members: &[Station]) -> Option<ShmBoard> {
        self.refresh();
        // A leaf sees the switch alone, whoever else there is.
        if self.is_leaf {
            return None;
        }
        let place =
            |station: &Station| self.member(station.word()).map(|m| (m, self.peers[m].state));
        let members: Option<Vec<_>> = members.iter().map(place).collect();
        ShmBoard::new(&self.shared, members?)
    }

    /// Copies `frame` into the ring towards `r`, which is open on our side.
    #[inline(always)]
    fn push(&mut self, r: usize, frame: &TxFrame<'_>, len: usize) -> Pushed {
        let out = &mut self.tx_rings[r];
        // SAFETY: `rx_open` and `sleeping` are words of the mapping (`connect`, `TxRing::closed`),
        // which `shared` keeps, or a static.
        let (rx_open, sleeping) = unsafe { (&*out.rx_open, &*out.sleeping) };
        if rx_open.load(Relaxed) == CLOSED {
            return Pushed::Closed;
        }
        let place = match out.ring.reserve(len) {
            Ok(place) => place,
            Err(NoRoom::Broken) => return Pushed::Closed,
            Err(_) => match self.make_room(r, len) {
                Some(place) => place,
                None => return Pushed::Full,
            },
        };
        let out = &mut self.tx_rings[r];
        let to = out.ring.mem().at(place.frame_pos);
        // SAFETY: `reserve` found room for `len` bytes at `frame_pos` in a ring of the mapping,
        // which the receiver is not reading and no `TxFrame` overlaps.
        unsafe { frame.copy_to_peer(to, &mut out.stores) };
        out.ring.commit(place, len);
        out.fulls = 0;
        // The three loads below may be satisfied before the frame is visible: see the module.
        if rx_open.load(Relaxed) != WATCH {
            out.ring_doorbell(self.shared.me);
        }
        if sleeping.load(Relaxed) != 0 {
            self.sleepers.insert(r);
        }
        if out.ring.passed() >= out.grow_at {
            self.grow_busy(r, false);
        }
        Pushed::Sent
    }

    #[cold]
    fn wake_sleepers(&mut self) {
        while let Some(r) = self.sleepers.pop() {
            wait::wake_member(&self.shared, r);
        }
    }

    /// Work due after a frame to the current ring: clears ahead, and wakes a sleeping receiver.
    #[cold]
    #[inline(never)]
    fn after_send(&mut self) {
        if self.tx_rings.current().clear_ahead() {
            self.sleepers.insert(self.last.to);
            self.wake_sleepers();
        }
    }

    /// Sends a short frame of `len` bytes with a contiguous body at `body` to a receiver that
    /// watches the current ring, if that needs no padding, no reading of the receiver's head and no
    /// doorbell. Otherwise changes nothing and returns false.
    #[inline(always)]
    fn push_fast(&mut self, frame: &TxFrame<'_>, len: usize, body: (*const u8, usize)) -> bool {
        if frame.dst_word() != self.last.key {
            return false;
        }
        let out = self.tx_rings.current();
        // SAFETY: as in `push`.
        if unsafe { &*out.rx_open }.load(Relaxed) != WATCH {
            return false;
        }
        let Some(place) = out.ring.claim_fast(len) else { return false };
        if place.is_clearing_due {
            out.alert = &DUE;
        }
        out.frames += 1;
        out.bytes += len as u64;
        let to = place.mem().at(place.frame_pos());
        // SAFETY: as in `push`, by `claim_fast`; the frame is short, and its body lies at `body` by
        // the caller's contract.
        unsafe { frame.copy_short_to_raw(body, to) };
        place.commit();
        // May be satisfied before the frame is visible, as in `push`.
        // SAFETY: as in `push`, or a static.
        if unsafe { &*out.alert }.load(Relaxed) != 0 && out.clear_ahead() {
            self.sleepers.insert(self.last.to);
        }
        true
    }

    /// As [`tx_in_place`](InPlaceTx::tx_in_place), for a frame of any length.
    #[inline(always)]
    fn push_in_place<const H: usize>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: &impl WriteBody,
    ) -> bool {
        let frame_len = H + rest.size();
        let out = self.tx_rings.current();
        // SAFETY: as in `push`.
        let (rx_open, sleeping) = unsafe { (&*out.rx_open, &*out.sleeping) };
        let near = dst == self.last.key && rx_open.load(Relaxed) == WATCH;
        if !near || frame_len > self.frame_max {
            return false;
        }
        let Ok(place) = out.ring.reserve(frame_len) else { return false };
        let to = out.ring.mem().at(place.frame_pos);
        // SAFETY: as in `push`: `frame_len` bytes, of which `H` are the head's.
        unsafe {
            rest.fill(to.add(H));
            head.fill(&mut HeadBuf::at(to));
        }
        out.ring.commit(place, frame_len);
        out.fulls = 0;
        self.counters.sent(frame_len);
        // May be satisfied before the frame is visible, as in `push`.
        if sleeping.load(Relaxed) != 0 {
            self.sleepers.insert(self.last.to);
            self.wake_sleepers();
        }
        true
    }

    /// [`Port::tx`] for all that [`push_fast`](Self::push_fast) leaves.
    #[inline(never)]
    fn tx_general(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        assert!(frame.head.len() >= ETH_HDR_LEN && len <= self.frame_max, "frame of {len} bytes");
        let key = frame.dst_word();
        let route = self.routes[route_slot(key)];
        let sent = if key == NO_KEY {
            Tx::NoRoute
        } else if key == route.key {
            self.last = route;
            self.tx_rings.set_current(route.to);
            match self.push(route.to, frame, len) {
                Pushed::Sent => Tx::Sent,
                Pushed::Full => self.full(route.to),
                Pushed::Closed => {
                    self.close_out(route.to);
                    self.tx_slow(frame, len, key)
                }
            }
        } else {
            self.tx_slow(frame, len, key)
        };
        Ok(self.counters.tried(sent, len))
    }

    /// [`push`](Self::push), not inlined.
    #[cold]
    fn push_slow(&mut self, r: usize, frame: &TxFrame<'_>, len: usize) -> Pushed {
        self.push(r, frame, len)
    }

    /// Finds the member with address `key` and opens the ring towards it.
    #[cold]
    fn route(&mut self, key: u64) -> Result<usize, Tx> {
        self.refresh();
        let found = match self.is_leaf {
            true => self.peers.iter().position(|p| is_switch(p.state)),
            false => self.member(key),
        };
        let Some(r) = found else { return Err(Tx::NoRoute) };
        if !self.tx_rings[r].is_open {
            match self.connect(r) {
                Tx::Sent => {}
                other => return Err(other),
            }
        }
        if self.monitors.is_empty() {
            self.routes[route_slot(key)] = Route { key, to: r };
        }
        Ok(r)
    }

    /// Whether the sender `s` of a ring to us has closed its end.
    fn has_left(&self, s: usize) -> bool {
        let Shared { seg, me, .. } = &*self.shared;
        seg.link(s, *me).is_some_and(|link| link.tx_open.load(Acquire) == 0)
    }

    /// Whether the ring from `s` holds frames that were not received. The next poll looks there.
    fn has_unread(&mut self, s: usize) -> bool {
        if !self.rx_rings[s].is_open && !self.accept(s) {
            return false;
        }
        let unread = self.rx_rings[s].ring.pending();
        if unread {
            self.ready.insert(s);
            self.more |= self.ready.any();
        }
        unread
    }

    /// Reads the member entries again if one joined or left since the last time.
    fn refresh(&mut self) {
        let seg = &self.shared.seg;
        // Acquire: the entries that the epoch was raised for are visible.
        let epoch = seg.epoch().load(Acquire);
        if epoch == self.epoch {
            return;
        }
        self.epoch = epoch;
        for (m, peer) in self.peers.iter_mut().enumerate().take(seg.places()) {
            let state = seg.state(m).load(Acquire);
            // A monitor has no address, and a lease is no member to send to.
            let key = if is_addressed(state) { seg.station(m).load(Relaxed) } else { NO_KEY };
            *peer = Peer { state, key };
        }
        let all = self.peers.iter().enumerate();
        let all = all.filter(|(m, peer)| *m != self.shared.me && is_monitor(peer.state));
        // Each costs a copy of every frame.
        let max = if seg.distrusts_members() { 1 } else { MEMBERS_MAX };
        self.monitors = all.map(|(m, _)| m).take(max).collect();
        if !self.monitors.is_empty() {
            self.routes.fill(Route { key: NO_KEY, to: 0 });
            self.forget_last();
        }
    }

    /// The next frame takes the slow path.
    fn forget_last(&mut self) {
        let nobody = self.peers.len();
        self.last = Route { key: NO_KEY, to: nobody };
        self.tx_rings.set_current(nobody);
    }

    /// Sends to every other member. Members whose ring is full do not get the frame.
    #[cold]
    fn tx_group(&mut self, frame: &TxFrame<'_>, len: usize) {
        self.refresh();
        for r in 0..self.peers.len() {
            let Peer { state, key } = self.peers[r];
            // Not to its source either, if it is forwarded.
            let is_other = r != self.shared.me && key != frame.src_word();
            if !is_other || !is_addressed(state) {
                continue;
            }
            let is_open = self.tx_rings[r].is_open || matches!(self.connect(r), Tx::Sent);
            match if is_open { self.push_slow(r, frame, len) } else { Pushed::Full } {
                Pushed::Sent => {}
                Pushed::Full => self.counters.tx_dropped += 1,
                Pushed::Closed => self.close_out(r),
            }
        }
    }

    #[cold]
    fn tx_slow(&mut self, frame: &TxFrame<'_>, len: usize, key: u64) -> Tx {
        self.refresh();
        if self.monitors.is_empty() {
            return self.tx_resolved(frame, len, key);
        }
        // Taken before sending: an answer must not have an earlier time.
        let at = monotonic_ns();
        let sent = self.tx_resolved(frame, len, key);
        if sent == Tx::Sent {
            self.mirror(frame, at);
        }
        sent
    }

    /// Gives every monitor a copy of a frame that was sent at `at`.
    fn mirror(&mut self, frame: &TxFrame<'_>, at: u64) {
        let mut tail = [0; monitor::TAIL_MAX];
        let Some(stamped) = monitor::stamped(frame, at, &mut tail) else { return };
        for i in 0..self.monitors.len() {
            let r = self.monitors[i];
            let is_open = self.tx_rings[r].is_open || self.connect(r) == Tx::Sent;
            let len = stamped.len();
            match if is_open { self.push_slow(r, &stamped, len) } else { Pushed::Full } {
                Pushed::Sent => {}
                Pushed::Full => {
                    // Relaxed: a number to show.
                    self.shared.seg.missed(r).fetch_add(1, Relaxed);
                    // Checks now and then whether the monitor still lives.
                    self.full(r);
                }
                Pushed::Closed => self.close_out(r),
            }
        }
    }

    /// Sends a frame without a cached route.
    fn tx_resolved(&mut self, frame: &TxFrame<'_>, len: usize, key: u64) -> Tx {
        // The lowest bit of the first byte says that it is a group address.
        if key & GROUP != 0 && !self.is_leaf {
            self.tx_group(frame, len);
            return Tx::Sent;
        }
        // Twice: a ring that proves closed is closed on our side too, and the address looked up
        // again, since its owner may have come back.
        for _ in 0..2 {
            let r = match self.route(key) {
                Ok(r) => r,
                Err(other) => return other,
            };
            match self.push_slow(r, frame, len) {
                Pushed::Sent => return Tx::Sent,
                Pushed::Full => return self.full(r),
                Pushed::Closed => self.close_out(r),
            }
        }
        Tx::NoRoute
    }
}

impl InPlaceTx for ShmPort {
    const LOSSLESS: bool = true;

    #[inline(always)]
    fn tx_in_place<const H: usize, R: WriteBody>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: &R,
    ) -> bool {
        let sent = self.begin_in_place(dst, head, rest);
        if sent {
            self.finish();
        }
        sent
    }

    #[inline(always)]
    fn begin_in_place<const H: usize, R: WriteBody>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: &R,
    ) -> bool {
        if R::LONG {
            return self.push_in_place(dst, head, rest);
        }
        let len = H + rest.size();
        if len > SHORT {
            return cold(false);
        }
        let out = self.tx_rings.current();
        // Without a last route the current ring is the closed one.
        if dst != self.last.key {
            return cold(false);
        }
        // SAFETY: as in `push`.
        if unsafe { &*out.rx_open }.load(Relaxed) != WATCH {
            return cold(false);
        }
        let Some(place) = out.ring.claim_fast(len) else { return cold(false) };
        if place.is_clearing_due {
            cold(());
            out.alert = &DUE;
        }
        // By way of its word, where that is needed as well.
        let to = place.mem().at(place.word_pos()).wrapping_byte_add(WORD_LEN);
        // SAFETY: as in `push`, by `claim_fast`: `len` bytes, no more than `SHORT`,
        // of which `H` are the head's. From the end to the start, as in `copy_short_to_raw`.
        unsafe {
            rest.fill(to.add(H));
            head.fill(&mut HeadBuf::at(to));
        }
        place.commit();
        out.frames += 1;
        out.bytes += len as u64;
        true
    }

    #[inline(always)]
    fn finish(&mut self) {
        let out = self.tx_rings.current();
        // May be satisfied before the frame is visible, as in `push`.
        // SAFETY: as in `push`, or a static.
        if unsafe { &*out.alert }.load(Relaxed) != 0 {
            cold(());
            self.after_send();
        }
    }
}

/// Sink for the frames of a burst, with the address of each sender.
trait BurstSink {
    /// Whether the sink needs the sender's address.
    const WANTS_KEY: bool = false;

    /// As [`RxSink::prefetch`].
    fn prefetch(&mut self, frame: &RxFrame<'_>);

    /// As [`RxSink::frame`]. `key` is the sender's address if [`WANTS_KEY`](Self::WANTS_KEY).
    fn frame_from(&mut self, key: u64, frame: &RxFrame<'_>);
}

/// A sink without the sender's address.
struct FromAny<'a>(&'a mut dyn RxSink);

impl BurstSink for FromAny<'_> {
    #[inline(always)]
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        self.0.prefetch(frame);
    }

    #[inline(always)]
    fn frame_from(&mut self, _: u64, frame: &RxFrame<'_>) {
        self.0.frame(frame);
    }
}

/// A closure that takes the sender's address.
struct FromMember<F>(F);

impl<F: FnMut(u64, &RxFrame<'_>)> BurstSink for FromMember<F> {
    const WANTS_KEY: bool = true;

    #[inline(always)]
    fn prefetch(&mut self, _: &RxFrame<'_>) {}

    #[inline(always)]
    fn frame_from(&mut self, key: u64, frame: &RxFrame<'_>) {
        (self.0)(key, frame);
    }
}

/// Outcome of collecting frames from a ring.
enum Collected {
    Nothing,
    Some,
    Damaged,
}

/// Receiving.
impl ShmPort {
    /// Counts a poll, and sweeps if it is due.
    #[inline(always)]
    fn tick(&mut self) {
        self.polls_to_sweep -= 1;
        if self.polls_to_sweep <= 0 {
            self.polls_to_sweep = SWEEP_EVERY;
            self.sweeps = self.sweeps.wrapping_add(1);
            self.sweep();
            self.more |= self.ready.any();
        }
    }

    /// [`Port::rx_burst`], which cannot fail here, for a sink of known type.
    #[inline(always)]
    pub fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> usize {
        self.tick();
        let few = if max > 0 { self.rx_poll(sink) } else { None };
        few.unwrap_or_else(|| self.poll(max, sink))
    }

    /// As [`receive`](Self::receive), with the address of the member whose ring each frame was in,
    /// as [`Station::word`].
    pub(crate) fn receive_from(
        &mut self,
        max: usize,
        each: impl FnMut(u64, &RxFrame<'_>),
    ) -> usize {
        self.tick();
        self.steps = self.syscall_budget;
        self.poll_from(max, &mut FromMember(each))
    }

    /// Checks every open ring and every place. True if one has a frame or a newly opened ring.
    pub(crate) fn sweep_all(&mut self) -> bool {
        (0..SWEEP_ALL).for_each(|_| self.sweep());
        (0..self.shared.seg.places()).for_each(|_| self.sweep_places());
        self.ready.any() != 0
    }

    /// Receives the single frame at `at`, published by `word` in the ring of the first watch. False
    /// if there was none. (The first watch is on the first sender that ever had a frame: the only
    /// peer, if there is one.)
    ///
    /// After an empty poll the next word is not checked: the sender has just written that line, so
    /// the load is a cache miss that would delay the answer to this frame. After a poll with a
    /// frame it is checked, and the next poll takes a burst.
    #[inline(always)]
    fn receive_one(&mut self, at: *const u8, word: u64, sink: &mut impl RxSink) -> bool {
        let ring = &mut self.rx_rings.current().ring;
        let RingItem::Frame { pos, len } = ring.take_plain(word) else { return cold(false) };
        // Behind its word, and before the next one, which is inside the ring as well. Other receive
        // paths move the watch with the head (`release`). After padding without a frame behind it,
        // only the head moves, to where `take_plain` takes nothing, whatever the word, until
        // `release` is called.
        debug_assert_eq!(at, ring.mem().at(pos).cast_const());
        self.watches[0].next = at.wrapping_add(slot_len(len));
        // Before the frame is lent, so that none of this stays in registers meanwhile.
        self.counters.rx_bytes += len as u64;
        self.singles += 1;
        if self.singles != 0 {
            // SAFETY: a word of a ring in the mapping.
            self.more = unsafe { (*self.watches[0].word()).load(Relaxed) };
        }
        // SAFETY: as in `burst`; `at` is where the ring's head was, as said above.
        sink.frame_with(&unsafe { RxFrame::from_raw(at, len) }, ReplyTx(self));
        true
    }

    /// Ends a run of single frames: flushes their count, and updates the next address for sleepers,
    /// which single frames leave out.
    #[inline(never)]
    fn end_single_run(&mut self) {
        self.flush_singles(-1);
        let watch = &self.watches[0];
        if watch.is_on() {
            // Relaxed: a hint for sleepers.
            self.shared.next_at[watch.sender % MEMBERS_MAX].store(watch.word().cast_mut(), Relaxed);
        }
    }

    /// Frames received.
    fn rx_frames(&self) -> u64 {
        self.counters.rx_frames.wrapping_add_signed(self.singles + 1)
    }

    fn flush_singles(&mut self, singles: i64) {
        self.counters.rx_frames = self.rx_frames().wrapping_add_signed(-singles - 1);
        self.singles = singles;
    }

    /// Receives after [`rx_poll`](FastPort::rx_poll) saw something: finds the senders, and takes up
    /// to `max` frames.
    #[inline(never)]
    pub fn poll(&mut self, max: usize, sink: &mut dyn RxSink) -> usize {
        self.poll_from(max, &mut FromAny(sink))
    }

    /// [`poll`](Self::poll), for a sink that takes the sender's address.
    #[inline(always)]
    fn poll_from(&mut self, max: usize, sink: &mut impl BurstSink) -> usize {
        if self.singles >= 0 {
            self.end_single_run();
        }
        for watch in &self.watches {
            // SAFETY: as in `rx_burst`.
            if unsafe { (*watch.word()).load(Relaxed) } != 0 {
                self.ready.insert(watch.sender);
            }
        }
        // SAFETY: a word of the mapping (`open`).
        if unsafe { &*self.bell }.load(Relaxed) != 0 {
            self.collect_doorbell();
        }
        let count = self.burst(max.min(BURST), sink);
        self.more = self.ready.any() | u64::from(count > 1);
        if count > 0 {
            self.flush_singles(0);
        }
        count
    }

    /// Moves the senders of the doorbell to `ready`.
    #[inline]
    fn collect_doorbell(&mut self) {
        let Shared { seg, me, .. } = &*self.shared;
        // The group words after the summary word: see `members::ring`. SeqCst, and by it Acquire:
        // the frames that the doorbell was rung for are visible.
        let mut groups = seg.doorbell(*me).swap(0, SeqCst);
        while groups != 0 {
            let group = groups.trailing_zeros() as usize;
            groups &= groups - 1;
            // The bit of a group that the segment does not have is corrupt.
            if group < seg.layout.groups() {
                self.ready.insert_all(group, seg.doorbell_group(*me, group).swap(0, SeqCst));
            }
        }
    }

    /// Collects frames from ready senders, lends them, and gives their room back.
    #[inline(always)]
    fn burst<S: BurstSink>(&mut self, max: usize, sink: &mut S) -> usize {
        let (mut count, mut damaged) = (0, usize::MAX);
        // From `turn` to the last sender, and then from the first to `turn`.
        let (turn, mut at, mut is_again) = (self.turn, self.turn, false);
        while count < max {
            let s = match self.ready.first_from(at) {
                Some(s) if !is_again || s < turn => s,
                None if !is_again => {
                    (at, is_again) = (0, true);
                    continue;
                }
                _ => break,
            };
            let before = count;
            match self.collect_from(s, &mut count, max, sink) {
                Collected::Nothing => {}
                // Nothing of it is lent.
                Collected::Some if count == before => self.release(s),
                Collected::Some => {}
                Collected::Damaged => damaged = s,
            }
            at = s + 1;
            self.turn = at;
            if damaged == s {
                break;
            }
        }
        let mut bytes = 0;
        for &(base, len, from) in self.burst.iter().take(count) {
            prefetch_long(base, len as usize);
            // SAFETY: `from_raw` needs `len` mapped bytes at `base`: `collect_from` took them from
            // a ring of the mapping, whose consumer checked the range. The sender does not write
            // them before `release` below; that anybody else might is D2.
            let frame = unsafe { RxFrame::from_raw(base, len as usize) };
            let key = if S::WANTS_KEY { self.rx_rings[from as usize].key } else { NO_KEY };
            sink.frame_from(key, &frame);
            bytes += u64::from(len);
        }
        self.counters.rx_bytes += bytes;
        self.counters.rx_frames += count as u64;
        let mut last = damaged;
        for i in 0..count {
            // Those of one sender lie together.
            let s = self.burst[i].2 as usize;
            if s != last && s != damaged {
                self.release(s);
                if self.rx_rings[s].has_left() {
                    self.close_if_ended(s);
                }
            }
            last = s;
        }
        if damaged != usize::MAX {
            self.damaged(damaged);
        }
        count
    }

    /// Appends frames of sender `s` to the burst.
    #[inline(always)]
    fn collect_from(
        &mut self,
        s: usize,
        count: &mut usize,
        max: usize,
        sink: &mut impl BurstSink,
    ) -> Collected {
        // The doorbell bit of a place that the segment does not have is corrupt.
        if s >= self.rx_rings.len() {
            self.ready.remove(s);
            return Collected::Nothing;
        }
        if !self.rx_rings[s].is_open {
            // It stays ready.
            if !self.may_use_syscalls() {
                return Collected::Nothing;
            }
            if !self.accept(s) {
                self.ready.remove(s);
                return Collected::Nothing;
            }
        }
        let (mut collected, mut bytes) = (Collected::Nothing, 0);
        while *count < max && bytes < BURST_BYTES {
            let from = &mut self.rx_rings[s];
            let ring = &mut from.ring;
            match ring.take() {
                RingItem::Frame { len, .. } if len > self.frame_max => {
                    self.counters.rx_dropped += 1;
                    // One per burst: a sender of too long frames must not keep us here.
                    return Collected::Some;
                }
                RingItem::Frame { pos, len } => {
                    let base = ring.mem().at(pos).cast_const();
                    // SAFETY: as in `burst`.
                    sink.prefetch(&unsafe { RxFrame::from_raw(base, len) });
                    self.burst[*count] = (base, len as u32, s as u32);
                    *count += 1;
                    bytes += len;
                    collected = Collected::Some;
                }
                RingItem::Empty => {
                    self.ready.remove(s);
                    // Nothing of it is lent.
                    if matches!(collected, Collected::Nothing) && from.has_left() {
                        self.close_if_ended(s);
                    }
                    break;
                }
                RingItem::Grow if !self.may_use_syscalls() => return Collected::Some,
                RingItem::Grow if self.follow_growth(s) => collected = Collected::Some,
                RingItem::Grow | RingItem::Broken => return Collected::Damaged,
            }
        }
        collected
    }

    /// Follows a sender into its longer ring. False if that is not possible.
    #[cold]
    fn follow_growth(&mut self, s: usize) -> bool {
        let Shared { seg, me, .. } = &*self.shared;
        let (layout, ring) = (seg.layout, &mut self.rx_rings[s].ring);
        // As in `accept`: the sender has reserved the memory, but its word alone is not enough.
        let is_short = ring.ring_len() < layout.ring_len;
        if !is_short || seg.open_ring(s, *me, layout.ring_len).is_err() {
            return false;
        }
        ring.grow(layout.ring_len, layout.frame_max_in(layout.ring_len, self.extra));
        ring.set_plain_max(self.frame_max);
        true
    }

    /// Gives the room of taken frames back to `s`, and moves its watch, or starts one.
    #[inline(always)]
    fn release(&mut self, s: usize) {
        let from = &mut self.rx_rings[s];
        from.ring.release();
        let next = from.ring.mem().word_at(from.ring.pos());
        // Relaxed: a hint for sleepers.
        self.shared.next_at[s % MEMBERS_MAX].store(next.cast_mut(), Relaxed);
        match self.watches.get_mut(from.watch) {
            Some(watch) => watch.next = behind(next),
            None => self.watch(s, behind(next)),
        }
    }

    /// Watches `s` if a watch is free or idle.
    #[cold]
    fn watch(&mut self, s: usize, next: *const u8) {
        let sweeps = self.sweeps;
        let idle = |w: &Watch| {
            let still = w.swept == w.next && sweeps.wrapping_sub(w.last_sweep) > WATCH_IDLE;
            !w.is_on() || still
        };
        let Some(i) = self.watches.iter().position(idle) else { return };
        let new = Watch { next, sender: s, last_sweep: sweeps, swept: next };
        let old = std::mem::replace(&mut self.watches[i], new);
        self.rx_rings[s].watch = i;
        if i == 0 {
            self.rx_rings.set_current(s);
        }
        self.set_rx_mode(s, WATCH);
        if old.is_on() {
            self.rx_rings[old.sender].watch = WATCHES;
            self.set_rx_mode(old.sender, DOORBELL);
            // Frames published before the sender sees the change come without the doorbell.
            self.ready.insert(old.sender);
        }
    }

    /// Tells `s`, whose ring is open, whether to ring the doorbell.
    fn set_rx_mode(&self, s: usize, how: u64) {
        let Shared { seg, me, .. } = &*self.shared;
        if let Some(link) = seg.link(s, *me) {
            link.rx_open.store(how, Relaxed);
        }
    }

    /// Opens our end of the ring from `s`, if the sender has opened its own.
    #[cold]
    fn accept(&mut self, s: usize) -> bool {
        let Shared { seg, me, next_at, .. } = &*self.shared;
        let Some(link) = seg.link(s, *me) else { return false };
        if link.rx_open.load(Acquire) == CLOSED {
            return false;
        }
        // A ring to a former member of our place, opened while that one left, is closed: its sender
        // then opens another.
        let is_ours = link.rx_inc.load(Relaxed) == self.inc;
        if !is_ours || self.is_leaf && !is_switch(seg.state(s).load(Acquire)) {
            self.close_in(s);
            return false;
        }
        // The sender has reserved the memory. Reserving again costs little, and an access to a page
        // that is not allocated could be SIGBUS.
        let layout = seg.layout;
        let Ok(ring) = seg.open_ring(s, *me, layout.first_len()) else { return false };
        let mut opened = RxRing::new(ring, link.tx_open, layout, self.extra);
        opened.ring.set_plain_max(self.frame_max);
        // The sender's address: it joined before it opened the ring.
        let key = seg.station(s).load(Relaxed);
        self.rx_rings[s] = RxRing { is_open: true, key, ..opened };
        next_at[s].store(self.rx_rings[s].ring.mem().word_at(0).cast_mut(), Relaxed);
        self.open_rx_rings.push(s);
        true
    }

    /// Stops receiving from `s`: it has left and all is read, or its ring is corrupt.
    fn close_in(&mut self, s: usize) {
        let Shared { seg, me, next_at, .. } = &*self.shared;
        if let Some(watch) = self.watches.get_mut(self.rx_rings[s].watch) {
            *watch = Watch::NONE;
        }
        self.ready.remove(s);
        self.open_rx_rings.retain(|&open| open != s);
        let from = &mut self.rx_rings[s];
        (from.is_open, from.watch, from.tx_open) = (false, WATCHES, &NOTHING);
        next_at[s].store(std::ptr::null_mut(), Relaxed);
        let Some(link) = seg.link(s, *me) else { return };
        if link.tx_open.load(Acquire) == 0 {
            seg.give_back(s, *me);
        }
        // Release: our last read of the ring comes before its next opening.
        link.rx_open.store(CLOSED, Release);
    }

    #[cold]
    fn damaged(&mut self, s: usize) {
        self.counters.rx_dropped += 1;
        let now = now_ns();
        if now.wrapping_sub(self.logged_ns) > 1_000_000_000 || self.logged_ns == 0 {
            self.logged_ns = now;
            let path = self.shared.seg.path.display();
            tracing::error!(%path, sender = s, "a ring was damaged; closing it");
        }
        self.close_in(s);
    }

    /// Checks a part of the open rings without a watch, for frames without a doorbell.
    #[cold]
    fn sweep(&mut self) {
        // A sender with all its routes cached would not notice a new monitor. Relaxed: `refresh`
        // reads it with Acquire.
        if self.shared.seg.epoch().load(Relaxed) != self.epoch {
            self.refresh();
        }
        for watch in self.watches.iter_mut().filter(|watch| watch.swept != watch.next) {
            (watch.swept, watch.last_sweep) = (watch.next, self.sweeps);
        }
        let open = self.open_rx_rings.len();
        for _ in 0..open.div_ceil(SWEEP_ALL) {
            let at = self.sweep_at + 1;
            self.sweep_at = if at < open { at } else { 0 };
            let s = self.open_rx_rings[self.sweep_at];
            // A watched ring is checked in every poll.
            if self.rx_rings[s].watch == WATCHES && self.rx_rings[s].ring.pending() {
                self.ready.insert(s);
            }
        }
        // Places are less urgent.
        if self.sweeps.is_multiple_of(4) {
            self.sweep_places();
        }
    }

    /// Checks the next place, for a sender that left or a ring opened without a doorbell.
    #[cold]
    fn sweep_places(&mut self) {
        let Shared { seg, me, .. } = &*self.shared;
        let s = if self.place_at + 1 < seg.places() { self.place_at + 1 } else { 0 };
        self.place_at = s;
        if self.rx_rings[s].is_open {
            self.close_if_ended(s);
        } else if seg.link(s, *me).is_some_and(|link| link.rx_open.load(Relaxed) != CLOSED) {
            // Its sender opened the ring and was killed before it rang the doorbell.
            self.ready.insert(s);
        }
    }

    /// Closes the ring from `s` if its sender has, and all is read.
    #[cold]
    fn close_if_ended(&mut self, s: usize) {
        if self.rx_rings[s].has_left() && !self.rx_rings[s].ring.pending() {
            self.close_in(s);
        }
    }
}

impl FastPort for ShmPort {
    /// Receives one frame, if there is no other.
    #[inline(always)]
    fn rx_poll(&mut self, sink: &mut impl RxSink) -> Option<usize> {
        // SAFETY: words of rings in the mapping, or a static; `bell` is one of the mapping.
        let (at, first, second, bell) = unsafe {
            let [first, second] = &self.watches;
            let at = first.next;
            // Acquire: the frame is visible with its word.
            let (word, second) = ((*first.word()).load(Acquire), (*second.word()).load(Relaxed));
            (at, word, second, (*self.bell).load(Relaxed))
        };
        if second | bell | self.more != 0 {
            return cold(None);
        }
        if first == 0 {
            if self.singles >= 0 {
                self.end_single_run();
            }
            return Some(0);
        }
        // A frame that goes on in the next line will be read there as well.
        if first as u32 as usize > GRANULE - WORD_LEN {
            prefetch(at.wrapping_add(GRANULE - WORD_LEN));
        }
        // Most likely the only frame.
        if self.receive_one(at, first, sink) { Some(1) } else { cold(None) }
    }

    #[inline]
    fn count(&mut self, polls: u32) {
        self.polls_to_sweep = self.polls_to_sweep.saturating_sub_unsigned(polls);
    }
}

impl Port for ShmPort {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        if frame.fits_short_copy()
            && len <= SHORT
            && let Some(body) = frame.body_in_one_piece()
            && self.push_fast(frame, len, body)
        {
            return Ok(Tx::Sent);
        }
        self.tx_general(frame)
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        if self.sleepers.any() != 0 {
            self.wake_sleepers();
        }
        Ok(())
    }

    fn rx_burst(&mut self, max: usize, mut sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        Ok(self.receive(max, &mut sink))
    }

    fn lacks_memory(&self) -> bool {
        self.lacks_memory
    }

    fn counters(&self) -> PortCounters {
        let mut counters = self.counters;
        counters.rx_frames = self.rx_frames();
        for out in self.tx_rings.iter() {
            counters.tx_frames += out.frames;
            counters.tx_bytes += out.bytes;
        }
        counters
    }

    fn station(&self, station: Station) -> Option<String> {
        let pid = self.shared.seg.pid_of(station)?;
        Some(format!("process {pid}"))
    }

    fn traffic(&self, station: Station) -> Option<(u64, u64)> {
        let m = self.member(station.word())?;
        Some((self.tx_rings[m].ring.passed(), self.rx_rings[m].ring.passed()))
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        Some(Arc::new(Waiter(Arc::clone(&self.shared))))
    }

    /// Reads the member's lock, which the kernel releases when its process ends.
    fn presence(&mut self, station: Station) -> Presence {
        self.refresh();
        match self.member(station.word()) {
            Some(m) if m == self.shared.me || self.shared.seg.lives(m) => {
                if self.starved.contains(&m) { Presence::Starved } else { Presence::Present }
            }
            Some(m) if self.has_unread(m) => Presence::Unknown,
            Some(_) => Presence::Absent,
            // Its entry is cleared, perhaps by another member. Its ring outlives the entry.
            None if (0..self.rx_rings.len()).any(|s| self.has_left(s) && self.has_unread(s)) => {
                Presence::Unknown
            }
            None => Presence::Absent,
        }
    }
}
