//! Layout of a segment's file. Offsets only; nothing here accesses memory.
//!
//! ```text
//! 0        magic, version, members, ring_len, frame_max, file_len     written once, by the maker
//! 64       next incarnation                                           under the segment's lock
//! 72       places: one more than the highest that was ever taken      under the segment's lock
//! 128      epoch, changed with every attach and detach                under the segment's lock
//! 192      uplink of the last switch: MTU | RTO floor, us << 32
//!          | may damage frames << 63                                  under the segment's lock
//! 200      its bit/s                                                 under the segment's lock
//! 208      its MAC | passes a kernel << 63                           under the segment's lock
//! 4096     member 0.., 256 bytes each
//!          +0   incarnation << 32 | 1 while attached, else 0          under the segment's lock
//!               bit 1: a monitor; bit 2: a switch; both: a leased address
//!          +8   station    +16  pid (for messages only)               under the segment's lock
//!          +24  frames that a monitor missed                          senders add
//!          +32  name of a socket to sleep on, or 0                    the member
//!          +40  allocated pages of links to it, a bit each            under the segment's lock
//!          +48  number of its long rings                              the member
//!          +56  1 if a wake-up at that socket failed                  senders set
//!          +64  doorbell: a bit for each group of senders             senders set, member clears
//!          +72  sleeping: 1 on this futex, 2 on the socket            member sets, senders clear
//!          +128 the groups: a word each with a bit for each sender    senders set, member clears
//! links    to receiver r at r * groups * 4096, a page for each group of senders, allocated when
//!          one of them opens its link; of sender s at + s * 64:
//!          +0   tx_open    +8   tx_inc   +16  rx_inc   +24  rx_open   +32  head
//! boards   of member m at m * 32 * 262144: its slots, 256 KiB each, allocated when first used and
//!          kept with the place. The member writes, others read:
//!          +0   a leaf of 2048 bytes for each of eight calls in a row: of number n at
//!               n modulo 8: group << 32 | n, +8 mark, +16 a short contribution
//!          +16384  group << 32 | number of the last call that the member has finished reading;
//!               2^32 - 1 when the member has left the group
//!          +20480  two areas of 120832 bytes: a long contribution to a call with an even number,
//!               and to one with an odd one
//! data     ring of (s, r) at (r * members + s) * ring_len, allocated while the link is open: a
//!          short beginning first, the rest when the ring grows
//! ```
//!
//! A page that is not allocated is never touched: for want of memory that would be SIGBUS.

#[cfg(debug_assertions)]
use std::sync::LazyLock;

use super::ring::slot_len;
use crate::board::{LEAVES, LONG_MAX, SHORT_MAX};

/// "barewire" read as a little-endian number.
pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"barewire");
/// Changes with every change of this file or of what its words mean.
pub(super) const VERSION: u64 = 9;
/// Test builds speak a layout of the version that this variable says. It differs in nothing else.
#[cfg(debug_assertions)]
static PRETENDED: LazyLock<Option<u64>> =
    LazyLock::new(|| std::env::var("BAREWIRE_TEST_LAYOUT").ok()?.parse().ok());
/// Senders in a word of a doorbell, and in a page of links.
pub(super) const GROUP: usize = 64;
/// Words of a doorbell.
pub(super) const GROUPS_MAX: usize = 16;
/// Most members that a segment can have.
pub(super) const MEMBERS_MAX: usize = GROUP * GROUPS_MAX;
/// Bytes of the part that [`Layout`] is read from.
pub(super) const HEADER_LEN: usize = 48;

pub(super) const NEXT_INC: usize = 64;
pub(super) const PLACES: usize = 72;
pub(super) const EPOCH: usize = 128;
pub(super) const UPLINK: usize = 192;

const MEMBER_AT: usize = 4096;
const MEMBER_LEN: usize = 256;
const LINK_LEN: usize = 64;
/// Bytes of the links of a group of senders.
pub(super) const PAGE: usize = 4096;
const _: () = assert!(GROUP * LINK_LEN == PAGE);

/// Board slots of a member: the most groups that it is in at a time.
pub(super) const SLOTS: usize = 32;
/// Bytes of a slot.
pub(super) const SLOT_LEN: usize = 256 << 10;
/// Bytes of a leaf.
pub(super) const LEAF_LEN: usize = 2048;
/// Offset in a slot of the last call that its member has finished reading.
pub(super) const DONE: usize = LEAVES as usize * LEAF_LEN;
/// Offset in a slot of its areas.
pub(super) const AREAS: usize = DONE + PAGE;
const _: () = assert!(LEAVES.is_power_of_two() && LEAF_LEN == 16 + SHORT_MAX);
const _: () = assert!(AREAS + 2 * LONG_MAX == SLOT_LEN && LONG_MAX.is_multiple_of(64));

/// Smallest and largest ring: a quarter has to hold a frame of the least MTU, and the file's size
/// has to stay a number that the kernel takes (2^20 rings below 2^63).
const RING_LEN_MIN: usize = 4096;
const RING_LEN_MAX: usize = 1 << 40;

/// Initial bytes of a ring: enough for a pair that exchanges short frames now and then. All rings
/// of 128 members then take 254 MiB.
const FIRST_LEN: usize = 16 << 10;

/// Version of the layout that this process speaks: [`VERSION`], except in tests.
pub(crate) fn version() -> u64 {
    #[cfg(debug_assertions)]
    if let Some(version) = *PRETENDED {
        return version;
    }
    VERSION
}

/// The sizes of a segment, fixed when it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Layout {
    pub(super) members: usize,
    /// Bytes of a ring at full length.
    pub(super) ring_len: usize,
    pub(super) frame_max: usize,
}

impl Layout {
    /// Whether the numbers are in range; nothing below overflows then.
    pub(super) fn is_sound(&self) -> bool {
        (2..=MEMBERS_MAX).contains(&self.members)
            && self.ring_len.is_power_of_two()
            && (RING_LEN_MIN..=RING_LEN_MAX).contains(&self.ring_len)
            && (64..=1 << 20).contains(&self.frame_max)
            && slot_len(self.frame_max) <= self.ring_len / 4
    }

    /// Parses the header of a segment of this version, and returns its sizes and the file's length.
    ///
    /// # Errors
    /// What the header is instead.
    pub(super) fn parse(header: &[u8; HEADER_LEN]) -> Result<(Self, u64), String> {
        let word = |i: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&header[i * 8..][..8]);
            u64::from_le_bytes(bytes)
        };
        if word(0) != MAGIC {
            return Err("no segment of barewire".into());
        }
        if word(1) != version() {
            return Err(format!("a segment of version {}", word(1)));
        }
        let size = |i| usize::try_from(word(i)).unwrap_or(0);
        let layout = Self { members: size(2), ring_len: size(3), frame_max: size(4) };
        if !layout.is_sound() || word(5) != layout.file_len() as u64 {
            return Err("a segment with damaged sizes".into());
        }
        Ok((layout, word(5)))
    }

    /// The inverse of [`parse`](Self::parse).
    pub(super) fn header(&self) -> [u8; HEADER_LEN] {
        let sizes = [self.members, self.ring_len, self.frame_max, self.file_len()];
        let words = [MAGIC, version()].into_iter().chain(sizes.map(|n| n as u64));
        let mut header = [0; HEADER_LEN];
        for (to, word) in header.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        header
    }

    /// Words of a doorbell in use.
    pub(super) fn groups(&self) -> usize {
        self.members.div_ceil(GROUP)
    }

    /// Initial bytes of a ring.
    pub(super) fn first_len(&self) -> usize {
        self.ring_len.min(FIRST_LEN)
    }

    /// Longest frame in a ring of `ring_len` bytes, with the `extra` bytes of a monitor's stamp.
    pub(super) fn frame_max_in(&self, ring_len: usize, extra: usize) -> usize {
        (self.frame_max + extra).min(ring_len / 4 - super::ring::WORD_LEN)
    }

    pub(super) fn member(&self, m: usize) -> usize {
        assert!(m < self.members);
        MEMBER_AT + m * MEMBER_LEN
    }

    fn pair(&self, s: usize, r: usize) -> usize {
        assert!(s < self.members && r < self.members);
        r * self.members + s
    }

    /// Bytes before the first link, which are always allocated.
    pub(super) fn links_at(&self) -> usize {
        (MEMBER_AT + self.members * MEMBER_LEN).next_multiple_of(PAGE)
    }

    pub(super) fn link(&self, s: usize, r: usize) -> usize {
        assert!(s < self.members && r < self.members);
        self.links_at() + r * self.groups() * PAGE + s * LINK_LEN
    }

    /// Slot `i` of member `m` on boards.
    pub(super) fn slot(&self, m: usize, i: usize) -> usize {
        assert!(m < self.members && i < SLOTS);
        self.boards_at() + (m * SLOTS + i) * SLOT_LEN
    }

    /// Bytes before the first board.
    pub(super) fn boards_at(&self) -> usize {
        self.links_at() + self.members * self.groups() * PAGE
    }

    /// Bytes before the first ring.
    fn data_at(&self) -> usize {
        self.boards_at() + self.members * SLOTS * SLOT_LEN
    }

    pub(super) fn ring(&self, s: usize, r: usize) -> usize {
        self.data_at() + self.pair(s, r) * self.ring_len
    }

    pub(super) fn file_len(&self) -> usize {
        self.data_at() + self.members * self.members * self.ring_len
    }
}
