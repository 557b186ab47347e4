//! Allocation of a member's board slots.
//!
//! After the member has left a group, the others may still read its slot. The slot is free again
//! once each of them has reported the last call as done, has left the group as well, or has been
//! replaced by another member.

use std::sync::atomic::Ordering::Acquire;

use super::layout::{DONE, SLOTS};
use super::segment::{Segment, SlotMem};

/// Value of the `DONE` word of a member that has left the group: a call of group 0.
pub(super) const LEFT_GROUP: u64 = u32::MAX as u64;

/// The slot of a member of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct GroupMember {
    /// Its place, and the place's state when the group was formed.
    pub(super) place: usize,
    pub(super) state: u64,
    /// None until its name is known.
    pub(super) mem: SlotMem,
}

/// A slot that members of a former group may still read.
#[derive(Debug)]
pub(super) struct RetiredSlot {
    pub(super) slot: usize,
    pub(super) group: u32,
    /// The last call that data was put for.
    pub(super) last: u32,
    pub(super) members: Vec<GroupMember>,
}

/// The slots of one member; all free by default.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// A bit for each slot in use.
    in_use: u32,
    retired: Vec<RetiredSlot>,
}

const _: () = assert!(SLOTS == u32::BITS as usize);

impl Slots {
    /// Allocates a slot that no member reads any more; `None` if all are in use.
    pub(super) fn allocate(&mut self, seg: &Segment) -> Option<usize> {
        let Self { in_use, retired } = self;
        retired.retain(|retired| {
            let is_read = retired.members.iter().any(|m| retired.is_read_by(seg, m));
            if !is_read {
                *in_use &= !(1 << retired.slot);
            }
            is_read
        });
        let slot = in_use.trailing_ones() as usize;
        (slot < SLOTS).then(|| {
            *in_use |= 1 << slot;
            slot
        })
    }

    /// Frees a slot that no data was put into.
    pub(super) fn free(&mut self, slot: usize) {
        self.in_use &= !(1 << slot);
    }

    /// Frees a slot once no member reads it any more.
    pub(super) fn retire(&mut self, retired: RetiredSlot) {
        self.retired.push(retired);
    }
}

impl GroupMember {
    /// Whether the member still holds its place.
    pub(super) fn holds_place(&self, seg: &Segment) -> bool {
        seg.state(self.place).load(Acquire) == self.state
    }
}

impl RetiredSlot {
    /// Whether `m` may still read it.
    fn is_read_by(&self, seg: &Segment, m: &GroupMember) -> bool {
        if !m.holds_place(seg) {
            return false;
        }
        // Acquire: the member's last reads come before the next data in this slot.
        let done_word = m.mem.word(DONE).load(Acquire);
        let (group, done) = ((done_word >> 32) as u32, done_word as u32);
        // 0: the member has not connected to the group yet, and will read the slot then.
        let is_reader = group == self.group || group == 0 && done_word != LEFT_GROUP;
        is_reader && (done.wrapping_sub(self.last) as i32) < 0
    }
}
