//! The receive queues of a port, and the order in which they are polled.

use std::os::fd::RawFd;

use super::socket::RxRings;

/// Frames that one queue may deliver in a row before the others are polled.
const QUANTUM: usize = 64;

/// A receive queue of the interface.
pub(super) struct Queue {
    pub(super) rings: RxRings,
    /// Its socket, which is open as long as the port.
    pub(super) fd: RawFd,
}

impl Queue {
    pub(super) fn new(rings: RxRings, fd: RawFd) -> Self {
        Self { rings, fd }
    }
}

/// Scheduling of queues: polled first is the queue that delivered last, up to [`QUANTUM`] frames. A
/// burst is of one queue, the first that has frames; polling an empty queue costs a load.
#[derive(Clone, Copy, Debug)]
pub(super) struct QueueScheduler {
    count: usize,
    /// The queue that delivered last, and the rest of its quantum, frames.
    last: usize,
    left: usize,
}

impl QueueScheduler {
    /// A scheduler of `count` queues, one at least.
    pub(super) fn new(count: usize) -> Self {
        Self { count, last: 0, left: QUANTUM }
    }

    /// The queue to poll first.
    #[inline]
    pub(super) fn first(&self) -> usize {
        if self.left > 0 { self.last } else { self.after(self.last) }
    }

    /// The queue to poll after `queue`.
    #[inline]
    pub(super) fn after(&self, queue: usize) -> usize {
        if queue + 1 < self.count { queue + 1 } else { 0 }
    }

    /// Notes that `queue` has delivered `frames` frames, and queues polled before it none.
    #[inline]
    pub(super) fn delivered(&mut self, queue: usize, frames: usize) {
        if queue != self.last || self.left == 0 {
            (self.last, self.left) = (queue, QUANTUM);
        }
        self.left = self.left.saturating_sub(frames);
    }
}
