//! Small messages share packets without `FI_MORE`: Nagle's algorithm (RFC 896).
//!
//! Where frames pass through a kernel, one frame costs as much as many small messages. While
//! packets to a peer are in flight there, small messages to it are gathered in a held packet
//! ([`pack`](super::pack)). The packet leaves when it is full, when an acknowledgement arrives,
//! before anything else to the peer, and after [`HOLD_NS`]. A message to a peer with fewer than
//! [`BUSY`] packets in flight leaves inside its post, unless it follows a packet that was shared.
//!
//! A held packet leaves in a turn of the loop, and a program may stop turning the loop at any
//! moment. So packets are held only while a thread [watches](HoldWatch) and turns the loop then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::tx::TxWrs;
use super::{Due, Node, Packs, Peers, Todo};
use crate::idx::{PeerIdx, TxIdx};
use crate::types::Instant;

/// Maximum time that a packet is held while the loop is turned, nanoseconds: about the time of ten
/// frames in a kernel.
const HOLD_NS: u64 = 10_000;

/// Minimum number of packets in flight at which a message is held.
const BUSY: u32 = 4;

/// State shared by the watching thread and the node. The fields guard no other memory: a value that
/// is seen late costs only time.
#[derive(Debug, Default)]
pub struct HoldWatch {
    /// Time at which the held packet was begun, nanoseconds of the loop's clock; 0 if no packet is
    /// held.
    since: AtomicU64,
    /// Number of packets held so far.
    held: AtomicU64,
    /// A thread watches.
    watched: AtomicBool,
    /// A packet would have been held if a thread had watched.
    wanted: AtomicBool,
}

impl HoldWatch {
    /// Whether a packet would have been held since the last call if a thread had
    /// [watched](Self::watch).
    pub fn is_wanted(&self) -> bool {
        self.wanted.swap(false, Ordering::Relaxed)
    }

    /// Starts or stops watching. A watching caller looks at the held packet in time. A node that
    /// has just read that the caller watches may still hold one more packet after it has stopped.
    pub fn watch(&self, active: bool) {
        self.watched.store(active, Ordering::Relaxed);
    }

    /// Time at which the held packet was begun, and the number of packets held so far.
    pub fn look(&self) -> (Option<Instant>, u64) {
        let since = self.since.load(Ordering::Relaxed);
        ((since != 0).then_some(Instant(since)), self.held.load(Ordering::Relaxed))
    }
}

/// The held packet, and the last messages before it.
#[derive(Debug)]
pub(super) struct Nagle {
    /// Frames are expensive: the port's frames pass through a kernel.
    applies: bool,
    /// Time at which the held packet was begun; `None` if no packet is held.
    since: Option<Instant>,
    watch: Arc<HoldWatch>,
    /// The peer whose last packet was shared.
    streams_to: PeerIdx,
    /// The peer of the last message.
    last: PeerIdx,
}

impl Nagle {
    pub(super) fn new(applies: bool) -> Self {
        Self {
            applies,
            since: None,
            watch: Arc::default(),
            streams_to: PeerIdx::NONE,
            last: PeerIdx::NONE,
        }
    }

    /// Whether messages may be held at all.
    #[inline(always)]
    pub(super) fn applies(&self) -> bool {
        self.applies
    }

    /// Whether a packet is held.
    #[inline(always)]
    pub(super) fn holds(&self) -> bool {
        self.since.is_some()
    }

    /// Whether the next message to `p`, which has `in_flight` packets in flight, is to be held: not
    /// if the message before it went to another peer.
    #[inline(always)]
    pub(super) fn wants(&self, p: PeerIdx, in_flight: u32) -> bool {
        self.applies && self.coalesces(p, in_flight)
    }

    /// Notes that a message to `p` has left or is queued.
    #[inline(always)]
    pub(super) fn note_message(&mut self, p: PeerIdx) {
        self.last = p;
    }

    fn coalesces(&self, p: PeerIdx, in_flight: u32) -> bool {
        let busy = if self.streams_to == p { 1 } else { BUSY };
        if self.last != p || in_flight < busy {
            return false;
        }
        let watched = self.watch.watched.load(Ordering::Relaxed);
        if !watched && !self.watch.wanted.load(Ordering::Relaxed) {
            self.watch.wanted.store(true, Ordering::Relaxed);
        }
        watched
    }

    fn begin(&mut self, now: Instant) {
        self.since = Some(now);
        self.watch.since.store(now.0, Ordering::Relaxed);
        let held = self.watch.held.load(Ordering::Relaxed);
        self.watch.held.store(held.wrapping_add(1), Ordering::Relaxed);
    }

    fn end(&mut self) {
        self.since = None;
        self.watch.since.store(0, Ordering::Relaxed);
    }
}

impl Packs {
    /// Whether the held packet is to leave at `now`.
    #[inline]
    pub(super) fn hold_is_over(&self, now: Instant) -> bool {
        self.hold_due().is_some_and(|due| now >= due)
    }

    /// Latest time at which the held packet leaves.
    pub(super) fn hold_due(&self) -> Option<Instant> {
        self.nagle.since.map(|since| since + HOLD_NS)
    }

    /// Notes that a packet of `count` messages has left for `p`.
    pub(super) fn note_shared(&mut self, p: PeerIdx, count: u16) {
        self.nagle.streams_to = if count > 1 { p } else { PeerIdx::NONE };
    }

    /// Starts holding the open packet.
    pub(super) fn hold(&mut self, due: &mut Due, now: Instant) {
        self.nagle.begin(now);
        due.todo |= Todo::HELD;
    }

    /// Notes that the held packet has left or ended.
    pub(super) fn release_hold(&mut self, due: &mut Due) {
        self.nagle.end();
        due.todo.remove(Todo::HELD);
    }

    /// Closes the open packet to further messages.
    pub(super) fn close_open(&mut self, due: &mut Due) {
        self.open = TxIdx::NONE;
        self.release_hold(due);
    }

    /// Lets the held packet, if any, leave with the next transmit.
    pub(crate) fn release_held(&mut self, tx: &TxWrs, peers: &mut Peers, due: &mut Due) {
        if self.nagle.holds() {
            self.release_hold(due);
            if let Some(wr) = tx.wrs.get(self.open) {
                due.make_ready(peers, wr.peer);
            }
        }
    }
}

impl Node {
    /// The state that this node shares with a watching thread.
    pub fn hold_watch(&self) -> Arc<HoldWatch> {
        Arc::clone(&self.packs.nagle.watch)
    }
}
