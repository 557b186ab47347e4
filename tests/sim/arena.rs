//! The applications' memory: buffers between canaries, lent to a node and looked at afterwards.
//!
//! A buffer that nobody has lent is filled with [`IDLE`]; whoever takes it finds out whether a node
//! wrote to memory that had been given back.

use barewire_driver::mem::{IoBuf, Span};

use crate::rng::{Rng, mix};

/// Bytes on both sides of a buffer that nobody may write.
const GUARD: usize = 32;
/// What guards and unlent memory hold.
const IDLE: u8 = 0xa5;

/// A buffer of an [`Arena`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Buf {
    idx: usize,
    /// Bytes lent.
    pub(crate) len: usize,
}

/// The memory of one life of an application. Lives longer than the node that it is lent to.
#[derive(Default)]
pub(crate) struct Arena {
    blocks: Vec<Block>,
    /// Free blocks by the logarithm of their size.
    free: [Vec<usize>; 24],
}

struct Block {
    base: *mut u8,
    size: usize,
}

// SAFETY: the blocks are allocations that the arena owns, reached through it alone or by spans
// whose node moves to another thread together with the arena.
unsafe impl Send for Block {}

impl Drop for Block {
    fn drop(&mut self) {
        let slice = std::ptr::slice_from_raw_parts_mut(self.base, self.size + 2 * GUARD);
        // SAFETY: `base` came from `Box::into_raw` of a slice of this length, and nobody else
        // frees it.
        drop(unsafe { Box::from_raw(slice) });
    }
}

impl Arena {
    /// Takes a buffer of `len` bytes, all [`IDLE`].
    ///
    /// # Errors
    /// Somebody wrote to memory that was not lent.
    pub(crate) fn take(&mut self, len: usize) -> Result<Buf, String> {
        let class = len.max(16).next_power_of_two().trailing_zeros() as usize;
        let idx = if let Some(idx) = self.free[class].pop() {
            let b = Buf { idx, len: 1 << class };
            if self.bytes(b).iter().any(|&x| x != IDLE) {
                return Err("memory was written after its operation had ended".into());
            }
            idx
        } else {
            let size = 1 << class;
            let block = vec![IDLE; size + 2 * GUARD].into_boxed_slice();
            self.blocks.push(Block { base: Box::into_raw(block).cast(), size });
            self.blocks.len() - 1
        };
        Ok(Buf { idx, len })
    }

    /// Looks at the guards and what lies behind the lent bytes, and takes the buffer back.
    ///
    /// # Errors
    /// Something was written outside.
    pub(crate) fn give(&mut self, buf: Buf) -> Result<(), String> {
        self.guards(buf)?;
        let size = self.blocks[buf.idx].size;
        self.fill(Buf { idx: buf.idx, len: size }, 0, IDLE);
        self.free[size.trailing_zeros() as usize].push(buf.idx);
        Ok(())
    }

    /// Fails if anything around `buf` was written.
    pub(crate) fn guards(&self, buf: Buf) -> Result<(), String> {
        let block = &self.blocks[buf.idx];
        // SAFETY: the whole allocation, initialised when it was made; no Rust reference into it is
        // held and no node runs meanwhile, since one thread drives both.
        let all = unsafe { std::slice::from_raw_parts(block.base, block.size + 2 * GUARD) };
        let (before, after) = (&all[..GUARD], &all[GUARD + buf.len..]);
        let after = &after[..after.len().min(2 * GUARD)];
        if before.iter().chain(after).any(|&x| x != IDLE) {
            return Err(format!("bytes outside a buffer of {} were written", buf.len));
        }
        Ok(())
    }

    /// Fails if the edges of any buffer were written.
    pub(crate) fn check_all(&self) -> Result<(), String> {
        let whole = |(idx, b): (usize, &Block)| self.guards(Buf { idx, len: b.size });
        self.blocks.iter().enumerate().try_for_each(whole)
    }

    /// Whether everything from `at` on is untouched.
    pub(crate) fn untouched(&self, buf: Buf, at: usize) -> bool {
        self.bytes(buf)[at.min(buf.len)..].iter().all(|&x| x == IDLE)
    }

    pub(crate) fn addr(&self, buf: Buf) -> u64 {
        self.blocks[buf.idx].base as u64 + GUARD as u64
    }

    pub(crate) fn bytes(&self, buf: Buf) -> &[u8] {
        let block = &self.blocks[buf.idx];
        assert!(buf.len <= block.size);
        // SAFETY: inside the allocation (just checked) and initialised; one thread drives the node
        // that may write here and this function, so nobody writes while the borrow lives.
        unsafe { std::slice::from_raw_parts(block.base.add(GUARD), buf.len) }
    }

    /// Writes `byte` from `at` to the end.
    pub(crate) fn fill(&mut self, buf: Buf, at: usize, byte: u8) {
        self.bytes_mut(buf)[at..].fill(byte);
    }

    /// Fills the buffer with the content of message `id`.
    pub(crate) fn write_message(&mut self, buf: Buf, id: u64) {
        write_content(self.bytes_mut(buf), id);
    }

    /// Fills the buffer with `bytes`, as many as it has.
    pub(crate) fn write(&mut self, buf: Buf, bytes: &[u8]) {
        self.bytes_mut(buf).copy_from_slice(bytes);
    }

    fn bytes_mut(&mut self, buf: Buf) -> &mut [u8] {
        let block = &self.blocks[buf.idx];
        assert!(buf.len <= block.size);
        // SAFETY: as in `bytes`; `&mut self` keeps out a second borrow.
        unsafe { std::slice::from_raw_parts_mut(block.base.add(GUARD), buf.len) }
    }

    /// Lends the buffer in one piece, or, by `rng`, in up to eight of which some may be empty.
    pub(crate) fn lend(&self, buf: Buf, pieces: bool, rng: &mut Rng) -> IoBuf {
        let base = self.blocks[buf.idx].base;
        // SAFETY: `add` stays inside the allocation of `buf.len + 2 * GUARD` bytes at least. The
        // span's promise: the block is freed with the arena, which is dropped after the node, and
        // no Rust reference into it is alive while the node runs.
        let span = |at: usize, len| unsafe { Span::from_raw(base.add(GUARD + at), len) };
        if !pieces {
            return IoBuf::one(span(0, buf.len));
        }
        let mut io = IoBuf::EMPTY;
        let mut at = 0;
        for left in (0..rng.range(1, 8)).rev() {
            let rest = buf.len - at;
            let n = if left == 0 { rest } else { rng.range(0, rest as u64) as usize };
            assert!(io.push(span(at, n)));
            at += n;
        }
        io
    }
}

/// Fills `out` with the content of message `id`: the first bytes name it.
pub(crate) fn write_content(out: &mut [u8], id: u64) {
    for (i, chunk) in out.chunks_mut(8).enumerate() {
        chunk.copy_from_slice(&word(id, i).to_le_bytes()[..chunk.len()]);
    }
}

/// Whether `bytes` is how message `id` starts.
pub(crate) fn is_content(bytes: &[u8], id: u64) -> bool {
    bytes.chunks(8).enumerate().all(|(i, c)| *c == word(id, i).to_le_bytes()[..c.len()])
}

/// Bytes that are enough to name a message.
pub(crate) const NAME_LEN: usize = 4;

/// The message that `bytes`, [`NAME_LEN`] at least, claim to be.
pub(crate) fn claimed_id(bytes: &[u8]) -> Option<u64> {
    bytes
        .first_chunk::<NAME_LEN>()
        .map(|b| u64::from(u32::from_le_bytes(*b)) ^ (ID_MASK & 0xffff_ffff))
}

const ID_MASK: u64 = 0x6d65_7373_6167_6500;

fn word(id: u64, i: usize) -> u64 {
    if i == 0 { id ^ ID_MASK } else { mix(id.wrapping_mul(0x1_0000_0001) ^ (i as u64) << 40) }
}
