//! Memory lent to a node, each piece between guards that nobody may write.

use barewire_driver::mem::{IoBuf, Span};

/// Bytes before and behind each piece.
const GUARD: usize = 16;

/// What guards and fresh receive buffers hold.
pub(crate) const FILL: u8 = 0xa5;

/// All memory of one run. Must outlive the nodes it is lent to.
#[derive(Default)]
pub(crate) struct Memory {
    blocks: Vec<Block>,
}

struct Block {
    base: *mut u8,
    len: usize,
}

impl Memory {
    /// Lends a new piece of `len` bytes of `fill`, and says by what number to look at it.
    pub(crate) fn lend(&mut self, len: usize, fill: u8) -> (usize, IoBuf) {
        let mut bytes = vec![FILL; len + 2 * GUARD];
        bytes[GUARD..GUARD + len].fill(fill);
        let base: *mut u8 = Box::into_raw(bytes.into_boxed_slice()).cast();
        self.blocks.push(Block { base, len });
        // SAFETY: the piece lies in an allocation of `len + 2 * GUARD` bytes that is freed by our
        // drop, after the nodes'; it is only ever looked at through `all`, whose borrow ends before
        // a node runs again, since one thread drives both.
        let span = unsafe { Span::from_raw(base.add(GUARD), len) };
        (self.blocks.len() - 1, IoBuf::one(span))
    }

    /// The bytes of a piece.
    pub(crate) fn bytes(&self, id: usize) -> &[u8] {
        let all = self.all(id);
        &all[GUARD..all.len() - GUARD]
    }

    /// Fails if something was written around any piece.
    pub(crate) fn check(&self) {
        for id in 0..self.blocks.len() {
            let all = self.all(id);
            let around = all[..GUARD].iter().chain(&all[all.len() - GUARD..]);
            assert!(around.copied().all(|b| b == FILL), "bytes around a buffer were written");
        }
    }

    fn all(&self, id: usize) -> &[u8] {
        let block = &self.blocks[id];
        // SAFETY: the whole allocation, initialised when it was made; no node runs while the borrow
        // lives, since one thread drives both.
        unsafe { std::slice::from_raw_parts(block.base, block.len + 2 * GUARD) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        for block in &self.blocks {
            let all = std::ptr::slice_from_raw_parts_mut(block.base, block.len + 2 * GUARD);
            // SAFETY: `base` came from `Box::into_raw` of a slice of this length, and is freed here
            // alone.
            drop(unsafe { Box::from_raw(all) });
        }
    }
}
