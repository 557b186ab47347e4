//! Which slots a member has free for boards.
//!
//! What it has put for a group that it left may still be read by others, so the slot waits until
//! every one of them has said that it has done with the last call, has left the group as well, or
//! is another member by now.

use std::sync::atomic::Ordering::Acquire;

use super::layout::{DONE, SLOTS};
use super::segment::{Segment, SlotMem};

/// What a member says it has done with when it has left the group: a call of no group.
pub(super) const LEFT: u64 = u32::MAX as u64;

/// The slot of a member of a group.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fellow {
    /// Its place, and the state that had when the group came together.
    pub(super) place: usize,
    pub(super) state: u64,
    /// None until its name is known.
    pub(super) mem: SlotMem,
}

/// A slot that may still be read.
#[derive(Debug)]
pub(super) struct Left {
    pub(super) slot: usize,
    pub(super) group: u32,
    /// The last call that something was put for.
    pub(super) last: u32,
    pub(super) members: Vec<Fellow>,
}

/// Of one member; all free by default.
#[derive(Debug, Default)]
pub(super) struct Slots {
    /// A bit for each that is not free.
    taken: u32,
    left: Vec<Left>,
}

const _: () = assert!(SLOTS == u32::BITS as usize);

impl Slots {
    /// Takes one that nobody reads any more.
    pub(super) fn take(&mut self, seg: &Segment) -> Option<usize> {
        let Self { taken, left } = self;
        left.retain(|left| {
            let is_read = left.members.iter().any(|m| left.is_read_by(seg, m));
            if !is_read {
                *taken &= !(1 << left.slot);
            }
            is_read
        });
        let slot = taken.trailing_ones() as usize;
        (slot < SLOTS).then(|| {
            *taken |= 1 << slot;
            slot
        })
    }

    /// Takes one back of which nothing was put.
    pub(super) fn give_back(&mut self, slot: usize) {
        self.taken &= !(1 << slot);
    }

    /// Takes one back once nobody reads it any more.
    pub(super) fn leave(&mut self, left: Left) {
        self.left.push(left);
    }
}

impl Fellow {
    /// Whether it has its place.
    pub(super) fn is_there(&self, seg: &Segment) -> bool {
        seg.state(self.place).load(Acquire) == self.state
    }
}

impl Left {
    /// Whether `m` may still read it.
    fn is_read_by(&self, seg: &Segment, m: &Fellow) -> bool {
        if !m.is_there(seg) {
            return false;
        }
        // Acquire: its last reads come before whatever is put here next.
        let said = m.mem.word(DONE).load(Acquire);
        let (group, done) = ((said >> 32) as u32, said as u32);
        // 0: it has still to meet the others, and will then look for what was put.
        let is_reader = group == self.group || group == 0 && said != LEFT;
        is_reader && (done.wrapping_sub(self.last) as i32) < 0
    }
}
