//! An Ethernet segment between processes of one machine, in a file of /dev/shm.
//!
//! Every ordered pair of members has a ring of its own (`ring`) with the frames inside it; it takes
//! memory only while the pair talks, and little until it talks much (`opening`). Why one ring per
//! pair and not one per receiver:
//! - the only shared line on a short frame's way is the one that the frame starts in: no
//!   read-modify-write, no index;
//! - a sender that is killed half way through a frame has not published it, and nobody else's
//!   frames stand behind it. In a shared ring the others would have to detect and skip its slot;
//! - a sender's memory is bounded, and full for its own frames only.
//!
//! The price is that a receiver has to know which rings to look at. It *watches* up to
//! two rings directly (their senders do nothing but publish, which is the ping-pong case), and for
//! the others has a *doorbell*: a bit per sender in words of 64, and one word with a bit per word.
//! A sender sets its own by an atomic OR when it is not set yet, and then that of its word. So an
//! idle poll reads three lines however many processes are attached, and a bell leads to whom it
//! was rung by.
//!
//! Publishing and then reading whether the bell is set, or whether the receiver watches, is a
//! store followed by a load of another place, which without a fence may be answered by an old
//! value: the bell is then not rung. So it is not by a sender that is killed before it does. Every
//! `SWEEP_EVERY` polls the receiver therefore looks at some open rings regardless, so many that all
//! have had their turn after `SWEEP_ALL` times; that bounds the harm to microseconds and costs the
//! sender nothing. The same sweep notices senders that have left. Who opens a ring rings always, so
//! that the receiver knows of it.
//!
//! A frame is visible once [`Port::tx`] returns; [`Port::flush`] only wakes members that sleep.
//!
//! # Life and death
//! A member shows its life by a lock on a byte of the file (`lock`), which the kernel releases when
//! it dies. Joining, leaving, opening a ring and cleaning up happen under a lock of the same
//! kind; the data path never takes one. What a member sent before it left or died stays in the
//! receivers' rings until they have read it; then the receiver gives the ring's memory back. The
//! dead are found by whoever joins, opens a ring, or finds a ring full for long.
//!
//! # Boards
//! The members of a group read what others have for it from [slots](crate::board) of theirs: a page
//! each, which stays with the place of its member in the segment, so that what one that died or
//! left has said can still be read. A slot serves another group once every member of the last one
//! has done with it.
//!
//! # Monitors
//! A [`Monitor`] is a member that has no address and gets a copy of every frame, stamped with the
//! time of its sending. A sender who knows of one keeps no routes, so that every frame takes the
//! slow way, on which the copies are made; without one the fast way does not even ask. Members
//! learn of a monitor in their next sweep. One that is too slow misses frames and never holds up
//! anybody. A member may also show a monitor what passes another port of its process.
//!
//! # Trust
//! The file is the user's own (0600, checked), but nothing read from it is believed: lengths and
//! places are checked against private state after they were copied, members are indices below a
//! private bound, and frames are lent as [`RxFrame`], which can only be copied from. A scribbled-on
//! ring is closed and counted ([`PortCounters::rx_dropped`]), and its sender opens it anew.

mod board;
mod ends;
mod layout;
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
pub use monitor::Monitor;
pub(in crate::backend) use monitor::Show;
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
use ends::Ends;
use layout::Layout;
use layout::MEMBERS_MAX;
use members::{MemberSet, place_of, ring};
use opening::Long;
use ring::{Consumer, GRANULE, NoRoom, Producer, Taken, WORD_LEN, slot_len};
use role::{Role, is_monitor, is_switch};
use segment::{BELL, CLOSED, RawRing, WATCH};
use wait::{Shared, Waiter};

pub(crate) use wait::{Bell, LOOK};

/// What is said if there is no [`Bell`].
pub(crate) const NO_BELL: &str = "cannot make a socket to sleep on for";

/// Largest MTU: with its Ethernet header a frame is 64 KiB.
pub const MTU_MAX: usize = 65_536 - ETH_HDR_LEN;

/// How the names of segments' files begin.
const FILE_PREFIX: &str = "barewire-";

/// Frames lent at once; a larger `max` of `rx_burst` is cut to this.
const BURST: usize = 64;
/// Bytes of one sender that are lent at once: the sender gets room back before it has none, so that
/// both copy at the same time.
const BURST_BYTES: usize = RING_LEN / 8;
/// Rings that a receiver looks at in every poll.
const WATCHES: usize = 2;
/// A watched ring may be exchanged for a busier one after so many sweeps without a frame.
const WATCH_IDLE: u32 = 8;
/// Polls between two looks at rings that are neither watched nor rung for, and looks after which
/// each has had its turn: a poll takes 10 to 40 ns.
const SWEEP_EVERY: i32 = 64;
const SWEEP_ALL: usize = 16;
/// Rings that a switch which believes nobody opens or makes longer in a turn: some 100 us in the
/// worst case.
const STEPS: u32 = 4;
/// A frame that takes the fast path is no longer than any port's may be.
const _: () = assert!(SHORT <= ETH_HDR_LEN + MTU_MIN);
/// The bit of a key that makes it a group's.
const GROUP: u64 = 1;
/// The key of nobody: no station has this number, and the group that has has another MAC.
const NO_KEY: u64 = (Station::EVERY as u64) << 48;

/// How a segment is joined, and how it is made if there is none.
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
        let uid = nix::unistd::geteuid();
        self.dir.join(format!("{FILE_PREFIX}{uid}-{}", self.name))
    }

    /// Whether the segment could be joined or made with them, as far as can be seen; changes
    /// nothing.
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

    /// The process of the switch that the segment has, if one lives. Changes nothing.
    ///
    /// # Errors
    /// The file cannot be looked at, or is no segment.
    pub(crate) fn switch_pid(&self) -> Result<Option<u32>, OpenError> {
        segment::switch_of(self)
    }

    /// The MTU of a port that is opened with them now; `None` if none would open. Changes nothing.
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

    /// Whether a segment of these sizes is what was asked for.
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
const MTU: usize = 65_520;

/// A member of a segment.
pub struct ShmPort {
    caps: PortCaps,
    frame_max: usize,
    /// Bytes behind each frame that we receive: a monitor's stamp.
    extra: usize,
    /// Members who get a copy of each frame that we send.
    monitors: Vec<usize>,
    /// Frames go to the switch, whatever their address, and come from it.
    is_leaf: bool,
    /// Where the last frame went, which is also the usual one of `outs`.
    last: Route,
    /// Addresses whose ring is open, by [`route_slot`].
    routes: Box<[Route; ROUTES]>,
    /// The process that opened the port; a forked child is another.
    pid: u32,
    /// Members with frames of ours whom we have to wake.
    sleepers: MemberSet,
    counters: PortCounters,
    /// Polls until the next one that looks at every ring, and how many such there have been.
    polls_to_sweep: i32,
    sweeps: u32,
    /// Not 0 if frames come several at a time, or `ready` is not 0.
    more: u64,
    /// Frames that came one by one since a poll found none or many, less one if that found none.
    /// [`PortCounters::rx_frames`] is what `counters` says of it plus one plus this.
    singles: i64,
    /// Senders that may have something beyond what the watched words show.
    ready: MemberSet,
    /// The usual one of `ins` is who the first is on.
    watches: [Watch; WATCHES],
    /// Where the next burst starts to look, so that none of many busy senders is left out.
    turn: usize,
    /// Senders whose ring is open.
    open_ins: Vec<usize>,
    /// Where the next sweep goes on, in `open_ins` and among all places.
    sweep_at: usize,
    place_at: usize,
    bell: *const AtomicU64,
    /// Towards each member, and one more towards nobody.
    outs: Ends<Out>,
    ins: Ends<In>,
    /// Where a frame is, its length, and the member that sent it.
    burst: Box<[(*const u8, u32, u32); BURST]>,
    /// Epoch at which `peers` was read from the segment.
    epoch: u64,
    peers: Vec<Peer>,
    inc: u64,
    warned_ns: u64,
    /// When a damaged ring was last told of.
    told_ns: u64,
    /// The last ring that was to be opened had no memory.
    lacks_memory: bool,
    /// Those to whom a ring, or a longer one, was to be opened and had no memory. That a shorter
    /// frame is sent says nothing of it: ACKs pass while what waits does not.
    starved: Vec<usize>,
    /// Our rings that have their full length, and to whom there was one that we gave up.
    long: Vec<Long>,
    given_up: Vec<usize>,
    /// How many rings may be opened or made longer before the next poll, and after it.
    steps: u32,
    steps_max: u32,
    /// Last: the pointers above go into its mapping.
    shared: Arc<Shared>,
}

// SAFETY: the raw pointers are addresses in the mapping that `shared` keeps, used through `&mut
// self` or for atomics; nothing is tied to the thread.
unsafe impl Send for ShmPort {}

/// A ring that we look at in every poll.
#[derive(Clone, Copy)]
struct Watch {
    /// Where the next frame's first byte comes, behind the word at the head of the sender's ring.
    /// Or behind a word of ours that stays 0. (The frame and not its word, so that of the two one
    /// has to be kept while the frame is lent.)
    next: *const u8,
    /// Beyond all members if there is none.
    sender: usize,
    /// Sweeps there had been when one last found that it had had a frame, and where the next word
    /// was to come then.
    last_sweep: u32,
    swept: *const u8,
}

/// What a watch looks at that watches nothing, and where nobody watches.
static NOTHING: AtomicU64 = AtomicU64::new(0);
const _: () = assert!(CLOSED == 0);
/// What says that something is to be done.
static DUE: AtomicU32 = AtomicU32::new(1);

impl Watch {
    const NONE: Self = {
        let next = behind(&NOTHING);
        Self { next, sender: usize::MAX, last_sweep: 0, swept: next }
    };

    fn is_on(&self) -> bool {
        self.sender != usize::MAX
    }

    /// The word that says whether the next frame is there.
    #[inline(always)]
    fn word(&self) -> *const AtomicU64 {
        self.next.wrapping_sub(WORD_LEN).cast()
    }
}

/// Where the frame after `word` is.
#[inline(always)]
const fn behind(word: *const AtomicU64) -> *const u8 {
    word.cast::<u8>().wrapping_add(WORD_LEN)
}

/// The sending end towards one member. Aligned for the sake of its address's arithmetic.
#[repr(align(128))]
struct Out {
    ring: Producer<RawRing>,
    rx_open: *const AtomicU64,
    /// The receiver's doorbell for our group, and that for all.
    bell_group: *const AtomicU64,
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
    /// Bytes through the ring after which it had better be longer.
    grow_at: u64,
    /// Which way frames that are long are stored.
    stores: Stores,
}

impl Out {
    /// The end from `me` towards `r`, closed.
    fn closed(seg: &segment::Segment, me: usize, r: usize) -> Self {
        let ring = Producer::new(RawRing::NONE, seg.layout.first_len());
        let lap = ring.ring_len() as u32;
        let sleeping = std::ptr::from_ref(seg.sleeping(r));
        Self {
            ring,
            rx_open: &NOTHING,
            bell_group: seg.bell_group(r, place_of(me).0),
            bell: seg.bell(r),
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

    /// Rings for `me`, unless that was done and not heard yet.
    #[inline]
    fn ring_bell(&self, me: usize) {
        // SAFETY: words of the mapping (`closed`), which `ShmPort::shared` keeps.
        let (bell_group, bell) = unsafe { (&*self.bell_group, &*self.bell) };
        ring(bell_group, bell, place_of(me));
    }

    /// Clears ahead of the frame that was sent. Says whether somebody sleeps.
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
struct In {
    ring: Consumer<RawRing, ETH_HDR_LEN>,
    is_open: bool,
    /// Which of the watches is on it, or [`WATCHES`].
    watch: usize,
    /// The sender's address while the ring is open.
    key: u64,
    /// 0 once the sender has closed its end.
    tx_open: *const AtomicU64,
}

/// What the segment last said of a member; 0 for an empty place.
#[derive(Clone, Copy)]
struct Peer {
    state: u64,
    key: u64,
}

/// An address and the member who has it.
#[derive(Clone, Copy)]
struct Route {
    key: u64,
    to: usize,
}

/// Places for routes: twice the members, so that few collide; two that do are looked up anew.
const ROUTES: usize = 2 * MEMBERS_MAX;

/// Where in the routes an address is looked for.
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

    /// Joins the segment as a station that reaches others through the switch alone, and says what
    /// is behind that. [`Uplink::mtu`] is 0 if there never was one.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub(crate) fn open_leaf(settings: &ShmSettings) -> Result<(Self, Uplink), OpenError> {
        let port = Self::open_as(settings, Role::Leaf)?;
        let uplink = port.shared.seg.uplink();
        Ok((port, uplink))
    }

    /// As [`open_switch`](Self::open_switch), of the segment in a [sealed](sealed::make) `file`, of
    /// whose other members nothing is believed: neither what they write nor that they let go of a
    /// lock. What takes system calls is done [`STEPS`] times a poll at most.
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
        (port.steps, port.steps_max) = (STEPS, STEPS);
        Ok(port)
    }

    /// As [`open_leaf`](Self::open_leaf), of the segment in a [sealed](sealed::make) `file`.
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

    /// Waits at most `patience` for members that are about to join or to leave, as leaving does.
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
        // Towards nobody it stays closed.
        let mut outs = Ends::new((0..layout.members).chain([me]).map(|r| Out::closed(&seg, me, r)));
        outs.set_usual(layout.members);
        let extra = if role == Role::Monitor { monitor::STAMP_LEN } else { 0 };
        let ins = Ends::new((0..layout.members).map(|_| In::closed(layout, extra)));
        let bell = std::ptr::from_ref(seg.bell(me));
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
            open_ins: Vec::with_capacity(layout.members),
            sweep_at: 0,
            place_at: 0,
            bell,
            outs,
            ins,
            burst: Box::new([(std::ptr::null(), 0, 0); BURST]),
            epoch: 0,
            peers: vec![Peer { state: 0, key: NO_KEY }; layout.members],
            inc,
            warned_ns: 0,
            told_ns: 0,
            lacks_memory: false,
            starved: Vec::new(),
            long: Vec::new(),
            given_up: Vec::new(),
            steps: u32::MAX,
            steps_max: u32::MAX,
            shared: Arc::new(Shared::new(seg, me)),
        }
    }

    /// Whether one more thing that takes system calls may be done in this turn.
    #[cold]
    fn may_step(&mut self) -> bool {
        let left = self.steps.checked_sub(1);
        self.steps = left.unwrap_or(0);
        left.is_some()
    }

    /// The segment's file.
    pub fn path(&self) -> &Path {
        &self.shared.seg.path
    }

    /// How to sleep on this port and another. Who has it does not use [`Port::waiter`].
    ///
    /// # Errors
    /// Those of making a socket.
    pub(crate) fn bell(&self) -> Result<Bell, OpenError> {
        let no_bell = |e| OpenError::os(NO_BELL, self.path(), e, OPEN_FILES);
        Bell::hang(&self.shared).map_err(no_bell)
    }

    /// Changes when a member came or went.
    #[inline]
    pub(crate) fn epoch(&self) -> u64 {
        // Relaxed: `has` looks properly.
        self.shared.seg.epoch().load(Relaxed)
    }

    /// Who has the address `key`, as far as was looked.
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
            if state == 0 || is_monitor(state) {
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

impl In {
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
        // A child forked from the member is none: the parent still is.
        if self.pid == std::process::id() {
            self.shared.seg.leave(self.shared.me);
        }
    }
}

/// What became of a frame offered to one member.
enum Pushed {
    Sent,
    Full,
    Closed,
}

/// Sending.
impl ShmPort {
    /// A slot on a board that these stations share, in the order of ranks, of which this port's own
    /// is one: see [`AnyPort::board`](super::any_port::AnyPort::board).
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
        let out = &mut self.outs[r];
        // SAFETY: `rx_open` and `sleeping` are words of the mapping (`connect`, `Out::closed`),
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
        let out = &mut self.outs[r];
        let to = out.ring.mem().at(place.frame_pos);
        // SAFETY: `reserve` found room for `len` bytes at `frame_pos` in a ring of the mapping,
        // which the receiver is not reading and no `TxFrame` overlaps.
        unsafe { frame.copy_to_peer(to, &mut out.stores) };
        out.ring.commit(place, len);
        out.fulls = 0;
        // The three loads below may be answered before the frame is visible: see the file's head.
        if rx_open.load(Relaxed) != WATCH {
            out.ring_bell(self.shared.me);
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

    /// Does what is to be done after a frame to the usual one: clears ahead, and wakes who sleeps.
    #[cold]
    #[inline(never)]
    fn attend(&mut self) {
        if self.outs.usual().clear_ahead() {
            self.sleepers.insert(self.last.to);
            self.wake_sleepers();
        }
    }

    /// Sends a usual, short frame of `len` bytes, whose body lies in one piece at `body`, to a
    /// receiver that watches our ring, if there is nothing more to it than to write it: no padding,
    /// no room to ask for, no bell. Otherwise changes nothing.
    #[inline(always)]
    fn push_ahead(&mut self, frame: &TxFrame<'_>, len: usize, body: (*const u8, usize)) -> bool {
        if frame.dst_word() != self.last.key {
            return false;
        }
        let out = self.outs.usual();
        // SAFETY: as in `push`.
        if unsafe { &*out.rx_open }.load(Relaxed) != WATCH {
            return false;
        }
        let Some(place) = out.ring.claim_ahead(len) else { return false };
        if place.is_clearing_due {
            out.alert = &DUE;
        }
        out.frames += 1;
        out.bytes += len as u64;
        let to = place.mem().at(place.frame_pos());
        // SAFETY: as in `push`, by `claim_ahead`; the frame is usual and short, and its body lies
        // where the caller was told.
        unsafe { frame.copy_short_to_raw(body, to) };
        place.commit();
        // May be answered before the frame is visible, as in `push`.
        // SAFETY: as in `push`, or a static.
        if unsafe { &*out.alert }.load(Relaxed) != 0 && out.clear_ahead() {
            self.sleepers.insert(self.last.to);
        }
        true
    }

    /// As [`tx_in_place`](InPlaceTx::tx_in_place), for a frame of any length.
    #[inline(always)]
    fn push_made<const H: usize>(
        &mut self,
        dst: u64,
        head: &impl WriteHead<H>,
        rest: &impl WriteBody,
    ) -> bool {
        let frame_len = H + rest.size();
        let out = self.outs.usual();
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
        // May be answered before the frame is visible, as in `push`.
        if sleeping.load(Relaxed) != 0 {
            self.sleepers.insert(self.last.to);
            self.wake_sleepers();
        }
        true
    }

    /// [`Port::tx`] for all that [`push_ahead`](Self::push_ahead) leaves.
    #[inline(never)]
    fn tx_any(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        assert!(frame.head.len() >= ETH_HDR_LEN && len <= self.frame_max, "frame of {len} bytes");
        let key = frame.dst_word();
        let route = self.routes[route_slot(key)];
        let sent = if key == NO_KEY {
            Tx::NoRoute
        } else if key == route.key {
            self.last = route;
            self.outs.set_usual(route.to);
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
        if !self.outs[r].is_open {
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
        if !self.ins[s].is_open && !self.accept(s) {
            return false;
        }
        let unread = self.ins[s].ring.pending();
        if unread {
            self.ready.insert(s);
            self.more |= self.ready.any();
        }
        unread
    }

    /// Reads the members anew if one came or went since the last time.
    fn refresh(&mut self) {
        let seg = &self.shared.seg;
        // Acquire: who sees the number sees the entries that it was raised for.
        let epoch = seg.epoch().load(Acquire);
        if epoch == self.epoch {
            return;
        }
        self.epoch = epoch;
        for (m, peer) in self.peers.iter_mut().enumerate().take(seg.places()) {
            let state = seg.state(m).load(Acquire);
            // A monitor has no address.
            let key = if is_monitor(state) { NO_KEY } else { seg.station(m).load(Relaxed) };
            *peer = Peer { state, key };
        }
        let all = self.peers.iter().enumerate();
        let all = all.filter(|(m, peer)| *m != self.shared.me && is_monitor(peer.state));
        // Each costs a copy of every frame.
        let max = if seg.is_wary() { 1 } else { MEMBERS_MAX };
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
        self.outs.set_usual(nobody);
    }

    /// Sends to every other member. Those whose ring is full do not get it.
    #[cold]
    fn tx_group(&mut self, frame: &TxFrame<'_>, len: usize) {
        self.refresh();
        for r in 0..self.peers.len() {
            let Peer { state, key } = self.peers[r];
            // Nor to its source, if it is forwarded.
            let is_other = r != self.shared.me && key != frame.src_word();
            if !is_other || state == 0 || is_monitor(state) {
                continue;
            }
            let is_open = self.outs[r].is_open || matches!(self.connect(r), Tx::Sent);
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
            return self.tx_looked_up(frame, len, key);
        }
        // Before it is sent, or an answer to it could bear an earlier time.
        let at = monotonic_ns();
        let sent = self.tx_looked_up(frame, len, key);
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
            let is_open = self.outs[r].is_open || self.connect(r) == Tx::Sent;
            let len = stamped.len();
            match if is_open { self.push_slow(r, &stamped, len) } else { Pushed::Full } {
                Pushed::Sent => {}
                Pushed::Full => {
                    // Relaxed: a number to show.
                    self.shared.seg.missed(r).fetch_add(1, Relaxed);
                    // Finds out now and then whether the monitor still lives.
                    self.full(r);
                }
                Pushed::Closed => self.close_out(r),
            }
        }
    }

    /// Sends a frame whose route is not at hand.
    fn tx_looked_up(&mut self, frame: &TxFrame<'_>, len: usize, key: u64) -> Tx {
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
            return self.push_made(dst, head, rest);
        }
        let len = H + rest.size();
        if len > SHORT {
            return cold(false);
        }
        let out = self.outs.usual();
        // Without a last one there is nobody who watches.
        if dst != self.last.key {
            return cold(false);
        }
        // SAFETY: as in `push`.
        if unsafe { &*out.rx_open }.load(Relaxed) != WATCH {
            return cold(false);
        }
        let Some(place) = out.ring.claim_ahead(len) else { return cold(false) };
        if place.is_clearing_due {
            cold(());
            out.alert = &DUE;
        }
        // By way of its word, where that is needed as well.
        let to = place.mem().at(place.word_pos()).wrapping_byte_add(WORD_LEN);
        // SAFETY: as in `push`, by `claim_ahead`: `len` bytes, no more than `SHORT`,
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
        let out = self.outs.usual();
        // May be answered before the frame is visible, as in `push`.
        // SAFETY: as in `push`, or a static.
        if unsafe { &*out.alert }.load(Relaxed) != 0 {
            cold(());
            self.attend();
        }
    }
}

/// Takes the frames of a burst, with the member that sent each.
trait BurstSink {
    /// Whether the sender's address is asked for.
    const ASKS: bool = false;

    /// As [`RxSink::prefetch`].
    fn prefetch(&mut self, frame: &RxFrame<'_>);

    /// As [`RxSink::frame`]. `key` is the sender's address, if the sink [asks](Self::ASKS).
    fn frame_from(&mut self, key: u64, frame: &RxFrame<'_>);
}

/// A sink that does not ask from whom a frame is.
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

/// A closure that does.
struct FromMember<F>(F);

impl<F: FnMut(u64, &RxFrame<'_>)> BurstSink for FromMember<F> {
    const ASKS: bool = true;

    #[inline(always)]
    fn prefetch(&mut self, _: &RxFrame<'_>) {}

    #[inline(always)]
    fn frame_from(&mut self, key: u64, frame: &RxFrame<'_>) {
        (self.0)(key, frame);
    }
}

/// What was found in a ring.
enum Gathered {
    Nothing,
    Some,
    Damaged,
}

/// Receiving.
impl ShmPort {
    /// Counts a poll, and sweeps if it is time.
    #[inline(always)]
    fn look_around(&mut self) {
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
        self.look_around();
        let few = if max > 0 { self.rx_poll(sink) } else { None };
        few.unwrap_or_else(|| self.poll(max, sink))
    }

    /// As [`receive`](Self::receive), and tells the address of the member whose ring a frame lay
    /// in: in the lower 48 bits, as in a frame.
    pub(crate) fn receive_from(
        &mut self,
        max: usize,
        each: impl FnMut(u64, &RxFrame<'_>),
    ) -> usize {
        self.look_around();
        self.steps = self.steps_max;
        self.poll_from(max, &mut FromMember(each))
    }

    /// Looks at every open ring and at every place, and says whether any has a frame or a ring that
    /// was opened.
    pub(crate) fn look_everywhere(&mut self) -> bool {
        (0..SWEEP_ALL).for_each(|_| self.sweep());
        (0..self.shared.seg.places()).for_each(|_| self.sweep_places());
        self.ready.any() != 0
    }

    /// Takes the one frame at `at`, before which the first watch shows `word`, and says whether
    /// there was one. (The first watch is the first that ever had a frame: the only peer, if there
    /// is one.)
    ///
    /// After a poll without a frame it does not look whether a second one stands behind it: the
    /// sender has just written there, so to look is a cache miss that the answer to this frame
    /// would wait for. After a poll with one it does, and the next poll takes a burst.
    #[inline(always)]
    fn one(&mut self, at: *const u8, word: u64, sink: &mut impl RxSink) -> bool {
        let ring = &mut self.ins.usual().ring;
        let Taken::Frame { pos, len } = ring.take_plain(word) else { return cold(false) };
        // Behind its word, and before the next one's, which is inside the ring as well. Who takes
        // frames another way moves the watch with the head (`released`). Where a sender writes
        // padding and nothing behind it, the head alone goes on, to where `take_plain` takes
        // nothing, whatever the word, before `released` is next.
        debug_assert_eq!(at, ring.mem().at(pos).cast_const());
        self.watches[0].next = at.wrapping_add(slot_len(len));
        // Before it is lent, so that none of this has to be kept meanwhile.
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

    /// No frame has come since the last one, which nobody has told the sleepers of yet: most often
    /// another follows.
    #[inline(never)]
    fn pause(&mut self) {
        self.count_singles_from(-1);
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

    fn count_singles_from(&mut self, singles: i64) {
        self.counters.rx_frames = self.rx_frames().wrapping_add_signed(-singles - 1);
        self.singles = singles;
    }

    /// What [`rx_poll`](FastPort::rx_poll) saw is not nothing: finds out from whom it is, and
    /// takes up to `max` frames of it.
    #[inline(never)]
    pub fn poll(&mut self, max: usize, sink: &mut dyn RxSink) -> usize {
        self.poll_from(max, &mut FromAny(sink))
    }

    /// [`poll`](Self::poll), for a sink that wants to know who sent a frame.
    #[inline(always)]
    fn poll_from(&mut self, max: usize, sink: &mut impl BurstSink) -> usize {
        if self.singles >= 0 {
            self.pause();
        }
        for watch in &self.watches {
            // SAFETY: as in `rx_burst`.
            if unsafe { (*watch.word()).load(Relaxed) } != 0 {
                self.ready.insert(watch.sender);
            }
        }
        // SAFETY: a word of the mapping (`open`).
        if unsafe { &*self.bell }.load(Relaxed) != 0 {
            self.hear();
        }
        let count = self.burst(max.min(BURST), sink);
        self.more = self.ready.any() | u64::from(count > 1);
        if count > 0 {
            self.count_singles_from(0);
        }
        count
    }

    /// Takes note of who has rung.
    #[inline]
    fn hear(&mut self) {
        let Shared { seg, me, .. } = &*self.shared;
        // The words after the one that leads to them: see `ring_bell`. SeqCst, and by it Acquire:
        // the frames that it was rung for are visible.
        let mut groups = seg.bell(*me).swap(0, SeqCst);
        while groups != 0 {
            let group = groups.trailing_zeros() as usize;
            groups &= groups - 1;
            // A bit of a group that the segment does not have is a scribble.
            if group < seg.layout.groups() {
                self.ready.insert_all(group, seg.bell_group(*me, group).swap(0, SeqCst));
            }
        }
    }

    /// Collects frames from those who are ready, lends them, and gives their room back.
    #[inline(always)]
    fn burst<S: BurstSink>(&mut self, max: usize, sink: &mut S) -> usize {
        let (mut count, mut damaged) = (0, usize::MAX);
        // From the one whose turn it is to the last, and then from the first to that one.
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
            match self.gather(s, &mut count, max, sink) {
                Gathered::Nothing => {}
                // Nothing of it is lent.
                Gathered::Some if count == before => self.released(s),
                Gathered::Some => {}
                Gathered::Damaged => damaged = s,
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
            // SAFETY: `from_raw` needs `len` mapped bytes at `base`: `gather` took them from a
            // ring of the mapping, whose consumer checked the range. The sender does not write
            // them before `release` below; that anybody else might is D2.
            let frame = unsafe { RxFrame::from_raw(base, len as usize) };
            let key = if S::ASKS { self.ins[from as usize].key } else { NO_KEY };
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
                self.released(s);
                if self.ins[s].has_left() {
                    self.look_for_end(s);
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
    fn gather(
        &mut self,
        s: usize,
        count: &mut usize,
        max: usize,
        sink: &mut impl BurstSink,
    ) -> Gathered {
        // A bell bit of a place that the segment does not have is a scribble.
        if s >= self.ins.len() {
            self.ready.remove(s);
            return Gathered::Nothing;
        }
        if !self.ins[s].is_open {
            // It stays ready.
            if !self.may_step() {
                return Gathered::Nothing;
            }
            if !self.accept(s) {
                self.ready.remove(s);
                return Gathered::Nothing;
            }
        }
        let (mut gathered, mut bytes) = (Gathered::Nothing, 0);
        while *count < max && bytes < BURST_BYTES {
            let from = &mut self.ins[s];
            let ring = &mut from.ring;
            match ring.take() {
                Taken::Frame { len, .. } if len > self.frame_max => {
                    self.counters.rx_dropped += 1;
                    // One a burst: a sender who does nothing else must not keep us here.
                    return Gathered::Some;
                }
                Taken::Frame { pos, len } => {
                    let base = ring.mem().at(pos).cast_const();
                    // SAFETY: as in `burst`.
                    sink.prefetch(&unsafe { RxFrame::from_raw(base, len) });
                    self.burst[*count] = (base, len as u32, s as u32);
                    *count += 1;
                    bytes += len;
                    gathered = Gathered::Some;
                }
                Taken::Empty => {
                    self.ready.remove(s);
                    // Nothing of it is lent.
                    if matches!(gathered, Gathered::Nothing) && from.has_left() {
                        self.look_for_end(s);
                    }
                    break;
                }
                Taken::Grow if !self.may_step() => return Gathered::Some,
                Taken::Grow if self.lengthen(s) => gathered = Gathered::Some,
                Taken::Grow | Taken::Broken => return Gathered::Damaged,
            }
        }
        gathered
    }

    /// Follows a sender whose ring is longer from here on, or says that it cannot be.
    #[cold]
    fn lengthen(&mut self, s: usize) -> bool {
        let Shared { seg, me, .. } = &*self.shared;
        let (layout, ring) = (seg.layout, &mut self.ins[s].ring);
        // As in `accept`: the sender has reserved it, and saying so is not enough.
        let is_short = ring.ring_len() < layout.ring_len;
        if !is_short || seg.open_ring(s, *me, layout.ring_len).is_err() {
            return false;
        }
        ring.grow(layout.ring_len, layout.frame_max_in(layout.ring_len, self.extra));
        ring.plain_to(self.frame_max);
        true
    }

    /// Gives back what was taken from `s` and keeps the watches where the frames are.
    #[inline(always)]
    fn released(&mut self, s: usize) {
        let from = &mut self.ins[s];
        from.ring.release();
        let next = from.ring.mem().word_at(from.ring.pos());
        // Relaxed: a hint for sleepers.
        self.shared.next_at[s % MEMBERS_MAX].store(next.cast_mut(), Relaxed);
        match self.watches.get_mut(from.watch) {
            Some(watch) => watch.next = behind(next),
            None => self.watch(s, behind(next)),
        }
    }

    /// Watches `s` if a watch is free or has seen nothing for a while.
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
        self.ins[s].watch = i;
        if i == 0 {
            self.ins.set_usual(s);
        }
        self.say_rx_open(s, WATCH);
        if old.is_on() {
            self.ins[old.sender].watch = WATCHES;
            self.say_rx_open(old.sender, BELL);
            // What it published before it could see that comes without a bell.
            self.ready.insert(old.sender);
        }
    }

    /// Tells `s`, whose ring is open, how we look at it.
    fn say_rx_open(&self, s: usize, how: u64) {
        let Shared { seg, me, .. } = &*self.shared;
        if let Some(link) = seg.link(s, *me) {
            link.rx_open.store(how, Relaxed);
        }
    }

    /// Starts to receive from `s`, if it has opened its ring towards us.
    #[cold]
    fn accept(&mut self, s: usize) -> bool {
        let Shared { seg, me, next_at, .. } = &*self.shared;
        let Some(link) = seg.link(s, *me) else { return false };
        if link.rx_open.load(Acquire) == CLOSED {
            return false;
        }
        // One to a former member of our place, which its sender opened while that one left, goes to
        // nobody: closed, its sender sees that it has to open another.
        let is_ours = link.rx_inc.load(Relaxed) == self.inc;
        if !is_ours || self.is_leaf && !is_switch(seg.state(s).load(Acquire)) {
            self.close_in(s);
            return false;
        }
        // The sender has reserved it; asking again costs little and makes sure, since to touch a
        // page that is not there could be SIGBUS.
        let layout = seg.layout;
        let Ok(ring) = seg.open_ring(s, *me, layout.first_len()) else { return false };
        let mut opened = In::new(ring, link.tx_open, layout, self.extra);
        opened.ring.plain_to(self.frame_max);
        // Its sender's, which joined before it opened the ring.
        let key = seg.station(s).load(Relaxed);
        self.ins[s] = In { is_open: true, key, ..opened };
        next_at[s].store(self.ins[s].ring.mem().word_at(0).cast_mut(), Relaxed);
        self.open_ins.push(s);
        true
    }

    /// Stops receiving from `s`: it is gone and all is read, or its ring was scribbled on.
    fn close_in(&mut self, s: usize) {
        let Shared { seg, me, next_at, .. } = &*self.shared;
        if let Some(watch) = self.watches.get_mut(self.ins[s].watch) {
            *watch = Watch::NONE;
        }
        self.ready.remove(s);
        self.open_ins.retain(|&open| open != s);
        let from = &mut self.ins[s];
        (from.is_open, from.watch, from.tx_open) = (false, WATCHES, &NOTHING);
        next_at[s].store(std::ptr::null_mut(), Relaxed);
        let Some(link) = seg.link(s, *me) else { return };
        if link.tx_open.load(Acquire) == 0 {
            seg.give_back(s, *me);
        }
        // Release: our last read of the ring comes before whoever opens it again.
        link.rx_open.store(CLOSED, Release);
    }

    #[cold]
    fn damaged(&mut self, s: usize) {
        self.counters.rx_dropped += 1;
        let now = now_ns();
        if now.wrapping_sub(self.told_ns) > 1_000_000_000 || self.told_ns == 0 {
            self.told_ns = now;
            let path = self.shared.seg.path.display();
            tracing::error!(%path, sender = s, "a ring was damaged; closing it");
        }
        self.close_in(s);
    }

    /// Looks at rings that nobody pointed to.
    #[cold]
    fn sweep(&mut self) {
        // Who has all the routes it needs would not see a monitor come. Relaxed: `refresh` looks
        // properly.
        if self.shared.seg.epoch().load(Relaxed) != self.epoch {
            self.refresh();
        }
        for watch in self.watches.iter_mut().filter(|watch| watch.swept != watch.next) {
            (watch.swept, watch.last_sweep) = (watch.next, self.sweeps);
        }
        let open = self.open_ins.len();
        for _ in 0..open.div_ceil(SWEEP_ALL) {
            let at = self.sweep_at + 1;
            self.sweep_at = if at < open { at } else { 0 };
            let s = self.open_ins[self.sweep_at];
            // A watched one needs nobody who points to it.
            if self.ins[s].watch == WATCHES && self.ins[s].ring.pending() {
                self.ready.insert(s);
            }
        }
        // These can wait longer.
        if self.sweeps.is_multiple_of(4) {
            self.sweep_places();
        }
    }

    /// Looks at one place in turn.
    #[cold]
    fn sweep_places(&mut self) {
        let Shared { seg, me, .. } = &*self.shared;
        let s = if self.place_at + 1 < seg.places() { self.place_at + 1 } else { 0 };
        self.place_at = s;
        if self.ins[s].is_open {
            self.look_for_end(s);
        } else if seg.link(s, *me).is_some_and(|link| link.rx_open.load(Relaxed) != CLOSED) {
            // One that opened a ring and was killed before it rang.
            self.ready.insert(s);
        }
    }

    /// Closes the ring from `s` if its sender has, and all is read.
    #[cold]
    fn look_for_end(&mut self, s: usize) {
        if self.ins[s].has_left() && !self.ins[s].ring.pending() {
            self.close_in(s);
        }
    }
}

impl FastPort for ShmPort {
    /// Of one frame, if no more are there.
    #[inline(always)]
    fn rx_poll(&mut self, sink: &mut impl RxSink) -> Option<usize> {
        // SAFETY: words of rings in the mapping, or a static; `bell` is one of the mapping.
        let (at, first, second, bell) = unsafe {
            let [first, second] = &self.watches;
            let at = first.next;
            // Acquire: who sees the word sees the frame.
            let (word, second) = ((*first.word()).load(Acquire), (*second.word()).load(Relaxed));
            (at, word, second, (*self.bell).load(Relaxed))
        };
        if second | bell | self.more != 0 {
            return cold(None);
        }
        if first == 0 {
            if self.singles >= 0 {
                self.pause();
            }
            return Some(0);
        }
        // A frame that goes on in the next line will be read there as well.
        if first as u32 as usize > GRANULE - WORD_LEN {
            prefetch(at.wrapping_add(GRANULE - WORD_LEN));
        }
        // Likely it is the only one.
        if self.one(at, first, sink) { Some(1) } else { cold(None) }
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
            && self.push_ahead(frame, len, body)
        {
            return Ok(Tx::Sent);
        }
        self.tx_any(frame)
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
        for out in self.outs.iter() {
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
        Some((self.outs[m].ring.passed(), self.ins[m].ring.passed()))
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        Some(Arc::new(Waiter(Arc::clone(&self.shared))))
    }

    /// The kernel knows: a member's lock is released when its process ends.
    fn presence(&mut self, station: Station) -> Presence {
        self.refresh();
        match self.member(station.word()) {
            Some(m) if m == self.shared.me || self.shared.seg.lives(m) => {
                if self.starved.contains(&m) { Presence::Starved } else { Presence::Present }
            }
            Some(m) if self.has_unread(m) => Presence::Unknown,
            Some(_) => Presence::Absent,
            // Its entry is cleared, perhaps by another member. Its ring outlives the entry.
            None if (0..self.ins.len()).any(|s| self.has_left(s) && self.has_unread(s)) => {
                Presence::Unknown
            }
            None => Presence::Absent,
        }
    }
}
