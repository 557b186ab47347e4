//! [`Board`] in a segment: a member's view of the slots of its group.
//!
//! A slot is written by its member alone: first the bytes and the mark, then the stamp with the
//! group and call. A member killed between the two has put nothing. The bytes are copied like those
//! of frames (D2 in docs/memory.md), all else is atomic: a malicious member can give others wrong
//! bytes and do no other harm.

use std::ops::Range;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::fence;
use std::sync::{Arc, PoisonError};

use super::layout::{AREAS, DONE, LEAF_LEN, SLOTS};
use super::segment::{SleepWord, SlotMem};
use super::slots::{GroupMember, LEFT_GROUP, RetiredSlot};
use super::wait::{Shared, wake_member};
use crate::board::{Board, LEAVES, LONG_MAX, SHORT_MAX};
use crate::mem::{IoBuf, Span};

/// Offsets of the mark and the bytes in a leaf, behind its stamp.
const MARK: usize = 8;
const BODY: usize = 16;

/// See the module's documentation.
pub(in crate::backend) struct ShmBoard {
    shared: Arc<Shared>,
    slot: usize,
    own: SlotMem,
    /// 0 until it is known.
    group: u32,
    /// The last call that data was put for.
    last: u32,
    /// By rank.
    members: Vec<GroupMember>,
    /// The segment's epoch at the last check that all members hold their places.
    epoch: u64,
    /// Places of the other members, once each, and their words `sleeping`.
    others: Vec<(usize, SleepWord)>,
    /// The process that made it; a forked child is another.
    pid: u32,
}

impl std::fmt::Debug for ShmBoard {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ShmBoard").field("slot", &self.slot).finish_non_exhaustive()
    }
}

impl ShmBoard {
    /// Allocates a slot for a group of `members`, as places and their states. `None` without a free
    /// slot or memory.
    pub(super) fn new(shared: &Arc<Shared>, members: Vec<(usize, u64)>) -> Option<Self> {
        let seg = &shared.seg;
        let mut slots = shared.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = slots.allocate(seg)?;
        let Ok(own) = seg.reserve_slot(shared.me, slot) else {
            slots.free(slot);
            return None;
        };
        drop(slots);
        // Data of an earlier group must match no call of this one.
        for at in (0..=DONE).step_by(LEAF_LEN) {
            own.word(at).store(0, Release);
        }
        // Readers of later data see the above, and the place's new holder.
        fence(Release);
        let mut others: Vec<usize> = members.iter().map(|m| m.0).collect();
        others.sort_unstable();
        others.dedup();
        others.retain(|&place| place != shared.me);
        let others = others.into_iter().map(|place| (place, seg.sleep_word(place))).collect();
        let member = |(place, state)| GroupMember { place, state, mem: SlotMem::NONE };
        let members = members.into_iter().map(member).collect();
        let (shared, pid) = (Arc::clone(shared), std::process::id());
        Some(Self { shared, slot, own, group: 0, last: 0, members, epoch: 0, others, pid })
    }

    /// Offset in a slot of the data for `call`.
    #[inline(always)]
    fn leaf(call: u32) -> usize {
        (call % LEAVES) as usize * LEAF_LEN
    }

    /// Offset in a slot of byte `at` of the long contribution to `call`.
    #[inline(always)]
    fn area(call: u32, at: usize) -> usize {
        AREAS + (call as usize & 1) * LONG_MAX + at
    }

    /// Copies `len` bytes from offset `from` of the slot of `rank` to an offset of `to`.
    #[inline(always)]
    fn copy(&self, rank: u32, from: usize, (to, to_at): (&IoBuf, usize), len: usize) {
        let from = self.members[rank as usize].mem.bytes(from, len);
        // SAFETY: as many bytes of a slot, which the group keeps mapped, and no application memory.
        // That its member may write them meanwhile is D2.
        unsafe { to.write_from_raw(to_at, from, len) }
    }

    /// Copies `len` bytes from an offset of `from` to offset `to` of our slot.
    #[inline(always)]
    fn fill(&mut self, to: usize, (from, from_at): (&IoBuf, usize), len: usize) {
        let to = self.own.bytes(to, len);
        // SAFETY: as many bytes of our slot, which is mapped, and no application memory. Members
        // read them only after the stamp; that one might before is D2.
        unsafe { from.read_to_raw(from_at, to, len) }
    }

    #[inline(always)]
    fn stamp(&self, call: u32) -> u64 {
        u64::from(self.group) << 32 | u64::from(call)
    }

    /// Finds the slot of `rank` by its name. False if the name is invalid or the member was
    /// replaced.
    fn find(&mut self, rank: usize, name: u64) -> bool {
        let seg = &self.shared.seg;
        let (inc, slot) = (name >> 32, (name as u32).wrapping_sub(1) as usize);
        let member = &mut self.members[rank];
        if slot >= SLOTS || inc != member.state >> 32 || !member.holds_place(seg) {
            return false;
        }
        // The member has reserved the memory, but its word alone does not make access safe.
        let Ok(mem) = seg.reserve_slot(member.place, slot) else { return false };
        member.mem = mem;
        true
    }

    /// [`replaced`](Board::replaced) after a change of the segment's members since the last check;
    /// `epoch` is the segment's.
    #[cold]
    #[inline(never)]
    fn find_replaced(&mut self, ranks: Range<u32>, call: u32, epoch: u64) -> Option<u32> {
        let (leaf, stamp) = (Self::leaf(call), self.stamp(call));
        let places = ranks.start as usize..ranks.end as usize;
        let mut readers = ranks.zip(&self.members[places]);
        let replaced = readers.find(|(_, m)| m.mem.word(leaf).load(Relaxed) != stamp);
        let replaced = replaced.map(|(rank, _)| rank);
        if self.members.iter().all(|m| m.holds_place(&self.shared.seg)) {
            self.epoch = epoch;
        }
        replaced
    }

    /// Wakes sleeping members.
    #[cold]
    #[inline(never)]
    fn wake_others(&self) {
        for &(place, _) in self.others.iter().filter(|(_, sleeping)| sleeping.load() != 0) {
            // Without the doorbell the member would check, find no frame, and sleep on.
            self.shared.seg.ring_doorbell(place, self.shared.me);
            wake_member(&self.shared, place);
        }
    }
}

impl Board for ShmBoard {
    fn name(&self) -> u64 {
        let state = self.shared.seg.state(self.shared.me).load(Relaxed);
        state >> 32 << 32 | (self.slot as u64 + 1)
    }

    fn attach(&mut self, group: u32, names: &[u64]) -> bool {
        assert!(names.len() == self.members.len());
        // Acquire: a member that leaves its place after the check below changes the epoch.
        self.epoch = self.shared.seg.epoch().load(Acquire);
        let attached =
            group != 0 && names.iter().enumerate().all(|(rank, &name)| self.find(rank, name));
        if attached {
            self.group = group;
            self.done(0);
        }
        attached
    }

    #[inline(always)]
    fn put(&mut self, call: u32, mark: u64, body: &Span, len: usize) {
        assert!(len <= SHORT_MAX && len <= body.len());
        let leaf = Self::leaf(call);
        if len == 8
            && let Some(word) = body.word_at(0)
        {
            self.own.word(leaf + BODY).store(word.to_le(), Relaxed);
        } else if len > 0 {
            self.fill(leaf + BODY, (&IoBuf::one(body.again()), 0), len);
        }
        // Release: a reader that sees it sees the stamps of all earlier calls.
        self.own.word(leaf + MARK).store(mark, Release);
        // Release: a reader that sees the stamp sees the data.
        self.own.word(leaf).store(self.stamp(call), Release);
        self.last = call;
        // The load may be satisfied before the stamp is visible: a sleeper then checks by itself,
        // as for a frame.
        if self.others.iter().any(|(_, sleeping)| sleeping.load() != 0) {
            self.wake_others();
        }
    }

    #[inline]
    fn write(&mut self, call: u32, at: usize, from: (&IoBuf, usize), len: usize) {
        assert!(at <= LONG_MAX && len <= LONG_MAX - at);
        self.fill(Self::area(call, at), from, len);
    }

    #[inline]
    fn mark(&self, rank: u32, call: u32) -> Option<u64> {
        let (mem, leaf) = (&self.members[rank as usize].mem, Self::leaf(call));
        let is_put = mem.word(leaf).load(Acquire) == self.stamp(call);
        is_put.then(|| mem.word(leaf + MARK).load(Acquire))
    }

    fn is_past(&self, rank: u32, call: u32) -> bool {
        let stamp = self.members[rank as usize].mem.word(Self::leaf(call)).load(Acquire);
        (stamp >> 32) as u32 == self.group && (stamp as u32).wrapping_sub(call) as i32 > 0
    }

    #[inline]
    fn read(&self, rank: u32, call: u32, at: usize, to: (&IoBuf, usize), len: usize) {
        assert!(at <= SHORT_MAX && len <= SHORT_MAX - at);
        self.copy(rank, Self::leaf(call) + BODY + at, to, len);
    }

    #[inline]
    fn read_long(&self, rank: u32, call: u32, at: usize, to: (&IoBuf, usize), len: usize) {
        assert!(at <= LONG_MAX && len <= LONG_MAX - at);
        self.copy(rank, Self::area(call, at), to, len);
    }

    #[inline]
    fn first_word(&self, rank: u32, call: u32) -> u64 {
        let mem = &self.members[rank as usize].mem;
        u64::from_le(mem.word(Self::leaf(call) + BODY).load(Relaxed))
    }

    #[inline(always)]
    fn collect(&self, ranks: Range<u32>, call: u32, mark: u64, words: &mut [u64]) -> (u32, bool) {
        let (stamp, leaf) = (self.stamp(call), Self::leaf(call));
        let places = ranks.start as usize..ranks.end as usize;
        let members = self.members[places.clone()].iter().zip(&mut words[places]);
        for (rank, (member, word)) in (ranks.start..).zip(members) {
            let [its_stamp, its_mark, first] = member.mem.some(leaf);
            if its_stamp.load(Acquire) != stamp {
                return (rank, false);
            }
            if its_mark.load(Relaxed) != mark {
                return (rank, true);
            }
            *word = u64::from_le(first.load(Relaxed));
        }
        (ranks.end, false)
    }

    #[inline(always)]
    fn replaced(&mut self, ranks: Range<u32>, call: u32) -> Option<u32> {
        // Data read from a member's replacement happened after the change of the epoch.
        fence(Acquire);
        let epoch = self.shared.seg.epoch().load(Acquire);
        if epoch == self.epoch { None } else { self.find_replaced(ranks, call, epoch) }
    }

    #[inline(always)]
    fn done(&mut self, call: u32) {
        // Release: our reads come before it.
        self.own.word(DONE).store(self.stamp(call), Release);
    }
}

impl Drop for ShmBoard {
    fn drop(&mut self) {
        // A child forked from the member has no part in its groups.
        if self.pid != std::process::id() {
            return;
        }
        let mut slots = self.shared.slots.lock().unwrap_or_else(PoisonError::into_inner);
        // A member that has left waits for this before it reuses its slot.
        self.own.word(DONE).store(LEFT_GROUP, Release);
        if self.group == 0 {
            return slots.free(self.slot);
        }
        let (slot, group, last) = (self.slot, self.group, self.last);
        slots.retire(RetiredSlot { slot, group, last, members: std::mem::take(&mut self.members) });
    }
}
