//! The receive queues of a port: which is looked at next.

use std::os::fd::RawFd;

use super::socket::Receiving;

/// Frames that the queue which delivered last may deliver before the others are looked at.
const TURN: usize = 64;

/// A receive queue of the interface.
pub(super) struct Queue {
    pub(super) rings: Receiving,
    /// Of its socket, which is open as long as the port.
    pub(super) fd: RawFd,
}

impl Queue {
    pub(super) fn new(rings: Receiving, fd: RawFd) -> Self {
        Self { rings, fd }
    }
}

/// Who is looked at first: the queue that delivered last, which most frames are in, but not for
/// ever. A burst is of one queue, the first that has frames; looking at one that has none costs a
/// load from memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Turns {
    count: usize,
    /// The queue that delivered last, and frames that are left of its turn.
    last: usize,
    left: usize,
}

impl Turns {
    /// Turns of `count` queues, one at least.
    pub(super) fn new(count: usize) -> Self {
        Self { count, last: 0, left: TURN }
    }

    /// The queue to look at first.
    #[inline]
    pub(super) fn first(&self) -> usize {
        if self.left > 0 { self.last } else { self.after(self.last) }
    }

    /// The queue to look at after `queue`.
    #[inline]
    pub(super) fn after(&self, queue: usize) -> usize {
        if queue + 1 < self.count { queue + 1 } else { 0 }
    }

    /// `queue` has delivered so many frames, and those that were looked at before it none.
    #[inline]
    pub(super) fn delivered(&mut self, queue: usize, frames: usize) {
        if queue != self.last || self.left == 0 {
            (self.last, self.left) = (queue, TURN);
        }
        self.left = self.left.saturating_sub(frames);
    }
}
