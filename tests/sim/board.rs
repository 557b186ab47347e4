//! Boards of the simulated nodes: what processes of one node share of collectives.
//!
//! Slots are never used again, so that a process that was killed and one that closed a group differ
//! in nothing that others could see.

use std::ops::Range;
use std::sync::{Arc, Mutex};

use barewire_driver::board::{Board, LEAVES, LONG_MAX, SHORT_MAX};
use barewire_driver::mem::{IoBuf, Span};

/// What a member has put for a call: the number, the mark, the bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Leaf {
    stamp: u64,
    mark: u64,
    body: Vec<u8>,
}

/// What a member has written: the call and the bytes.
#[derive(Clone, Debug, Default)]
pub(crate) struct Area {
    stamp: u64,
    body: Vec<u8>,
}

/// What a member has put and written for the last calls.
#[derive(Debug, Default)]
pub(crate) struct Slot {
    leaves: [Leaf; LEAVES as usize],
    areas: [Area; 2],
}

/// All slots of a node.
pub(crate) type Slots = Arc<Mutex<Vec<Slot>>>;

#[derive(Debug)]
pub(crate) struct SimBoard {
    slots: Slots,
    own: usize,
    group: u32,
    members: Vec<usize>,
}

impl SimBoard {
    pub(crate) fn new(slots: &Slots) -> Self {
        let mut all = slots.lock().expect("one thread");
        all.push(Default::default());
        let own = all.len() - 1;
        Self { slots: Arc::clone(slots), own, group: 0, members: Vec::new() }
    }

    fn stamp(&self, call: u32) -> u64 {
        u64::from(self.group) << 32 | u64::from(call)
    }

    fn leaf(&self, rank: u32, call: u32) -> Leaf {
        let all = self.slots.lock().expect("one thread");
        all[self.members[rank as usize]].leaves[(call % LEAVES) as usize].clone()
    }
}

impl Board for SimBoard {
    fn name(&self) -> u64 {
        self.own as u64 + 1
    }

    fn attach(&mut self, group: u32, names: &[u64]) -> bool {
        let len = self.slots.lock().expect("one thread").len();
        self.members = names.iter().map(|&name| name as usize - 1).collect();
        self.group = group;
        self.members.iter().all(|&slot| slot < len)
    }

    fn put(&mut self, call: u32, mark: u64, body: &Span, len: usize) {
        assert!(len <= SHORT_MAX && self.group != 0);
        let mut bytes = vec![0; len];
        IoBuf::one(body.again()).read_at(0, &mut bytes);
        let stamp = self.stamp(call);
        let mut all = self.slots.lock().expect("one thread");
        let leaf = &mut all[self.own].leaves[(call % LEAVES) as usize];
        // Never out of order, or what others read would be another call's.
        let before = leaf.stamp.wrapping_add(LEAVES.into());
        assert!(leaf.stamp == 0 || before == stamp, "put twice or skipped");
        *leaf = Leaf { stamp, mark, body: bytes };
    }

    fn write(&mut self, call: u32, at: usize, (from, from_at): (&IoBuf, usize), len: usize) {
        assert!(at + len <= LONG_MAX);
        let stamp = self.stamp(call);
        let mut all = self.slots.lock().expect("one thread");
        let area = &mut all[self.own].areas[call as usize % 2];
        // What was there for an earlier call cannot be read any more.
        if area.stamp != stamp {
            *area = Area { stamp, body: Vec::new() };
        }
        area.body.resize(area.body.len().max(at + len), 0);
        from.read_at(from_at, &mut area.body[at..at + len]);
    }

    fn mark(&self, rank: u32, call: u32) -> Option<u64> {
        let leaf = self.leaf(rank, call);
        (leaf.stamp == self.stamp(call)).then_some(leaf.mark)
    }

    fn read(&self, rank: u32, call: u32, at: usize, (to, to_at): (&IoBuf, usize), len: usize) {
        let leaf = self.leaf(rank, call);
        assert!(leaf.stamp == self.stamp(call), "what is taken was put over");
        to.write_at(to_at, &leaf.body[at..at + len]);
    }

    fn is_past(&self, rank: u32, call: u32) -> bool {
        let (stamp, own) = (self.leaf(rank, call).stamp, self.stamp(call));
        stamp >> 32 == own >> 32 && (stamp as u32).wrapping_sub(call) as i32 > 0
    }

    fn read_long(&self, rank: u32, call: u32, at: usize, (to, to_at): (&IoBuf, usize), len: usize) {
        let all = self.slots.lock().expect("one thread");
        let area = &all[self.members[rank as usize]].areas[call as usize % 2];
        assert!(area.stamp == self.stamp(call), "what is taken was written over");
        to.write_at(to_at, &area.body[at..at + len]);
    }

    fn first_word(&self, rank: u32, call: u32) -> u64 {
        let leaf = self.leaf(rank, call);
        assert!(leaf.stamp == self.stamp(call), "what is taken was put over");
        let mut word = leaf.body;
        word.resize(8, 0);
        u64::from_le_bytes(word.try_into().expect("eight bytes"))
    }

    fn collect(&self, ranks: Range<u32>, call: u32, mark: u64, words: &mut [u64]) -> (u32, bool) {
        let end = ranks.end;
        for rank in ranks {
            let put = self.mark(rank, call);
            if put != Some(mark) {
                return (rank, put.is_some());
            }
            words[rank as usize] = self.first_word(rank, call);
        }
        (end, false)
    }

    fn replaced(&mut self, _: Range<u32>, _: u32) -> Option<u32> {
        None
    }

    fn done(&mut self, _: u32) {}
}
