//! A board whose type is known where it is used: as [`any_port`](super::any_port) has it of ports.

use std::fmt;
use std::ops::Range;

use super::any_port::AnyPort;
use super::shm::ShmBoard;
use crate::board::Board;
use crate::mem::{IoBuf, Span};
use crate::port::Station;

/// Any board, or that of the shared segment.
pub struct AnyBoard(Known);

enum Known {
    Shm(ShmBoard),
    Other(Box<dyn Board>),
}

impl fmt::Debug for AnyBoard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Known::Shm(board) => board.fmt(f),
            Known::Other(board) => board.fmt(f),
        }
    }
}

impl From<Box<dyn Board>> for AnyBoard {
    fn from(board: Box<dyn Board>) -> Self {
        Self(Known::Other(board))
    }
}

impl AnyPort {
    /// A slot on a board that these stations share, in the order of ranks; this
    /// port's own is one of them, perhaps more than once. `None` if they share no memory, or there
    /// is no slot left. Takes system calls.
    pub fn board(&mut self, members: &[Station]) -> Option<AnyBoard> {
        let board = match self {
            Self::Shm(port) => port.board(members),
            Self::Near(port) => port.board(members),
            #[cfg(feature = "dpdk")]
            Self::Dpdk(_) => None,
            Self::Memif(_) | Self::Switched(_) | Self::Other(_) => None,
        };
        Some(AnyBoard(Known::Shm(board?)))
    }
}

/// Does the same with a board, whichever it is.
macro_rules! with {
    ($any:expr, $board:ident => $done:expr) => {
        match $any {
            Known::Shm($board) => $done,
            Known::Other($board) => $done,
        }
    };
}

impl Board for AnyBoard {
    fn name(&self) -> u64 {
        with!(&self.0, board => board.name())
    }

    fn attach(&mut self, group: u32, names: &[u64]) -> bool {
        with!(&mut self.0, board => board.attach(group, names))
    }

    #[inline(always)]
    fn put(&mut self, call: u32, mark: u64, body: &Span, len: usize) {
        with!(&mut self.0, board => board.put(call, mark, body, len));
    }

    fn write(&mut self, call: u32, at: usize, from: (&IoBuf, usize), len: usize) {
        with!(&mut self.0, board => board.write(call, at, from, len));
    }

    #[inline(always)]
    fn mark(&self, rank: u32, call: u32) -> Option<u64> {
        with!(&self.0, board => board.mark(rank, call))
    }

    fn is_past(&self, rank: u32, call: u32) -> bool {
        with!(&self.0, board => board.is_past(rank, call))
    }

    #[inline(always)]
    fn read(&self, rank: u32, call: u32, at: usize, to: (&IoBuf, usize), len: usize) {
        with!(&self.0, board => board.read(rank, call, at, to, len));
    }

    fn read_long(&self, rank: u32, call: u32, at: usize, to: (&IoBuf, usize), len: usize) {
        with!(&self.0, board => board.read_long(rank, call, at, to, len));
    }

    #[inline(always)]
    fn first_word(&self, rank: u32, call: u32) -> u64 {
        with!(&self.0, board => board.first_word(rank, call))
    }

    #[inline(always)]
    fn collect(&self, ranks: Range<u32>, call: u32, mark: u64, words: &mut [u64]) -> (u32, bool) {
        with!(&self.0, board => board.collect(ranks, call, mark, words))
    }

    #[inline(always)]
    fn replaced(&mut self, ranks: Range<u32>, call: u32) -> Option<u32> {
        with!(&mut self.0, board => board.replaced(ranks, call))
    }

    #[inline(always)]
    fn done(&mut self, call: u32) {
        with!(&mut self.0, board => board.done(call));
    }
}
