//! Small messages share packets without being asked: Nagle's algorithm (RFC 896).
//!
//! Where frames pass a kernel, one costs as much as many small messages. While packets to a peer
//! are in flight there, small messages to it gather in a packet ([`pack`](super::pack)) that is
//! held. It leaves when it is full, when an acknowledgement comes, before anything else to the
//! peer, and after [`HOLD_NS`]. A message to a peer with fewer than [`BUSY`] packets in flight
//! leaves inside its post, unless it follows a packet that was shared.
//!
//! What is held leaves in a turn of the loop, and a program may stop to turn it at any moment. So
//! packets are held only while a thread [watches](HoldWatch) that turns it then.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::tx::TxWrs;
use super::{Due, Node, Packs, Peers, Todo};
use crate::idx::{PeerIdx, TxIdx};
use crate::types::Instant;

/// How long a packet is held at most while the loop is turned, nanoseconds: about ten frames' time
/// in a kernel.
const HOLD_NS: u64 = 10_000;

/// Packets in flight from which on a message is held.
const BUSY: u32 = 4;

/// What the thread that watches and the node tell each other. Values, not memory: one that is seen
/// late costs time alone.
#[derive(Debug, Default)]
pub struct HoldWatch {
    /// When the packet that is held was begun, nanoseconds of the loop's clock; 0 if there is none.
    since: AtomicU64,
    /// Packets held so far.
    held: AtomicU64,
    /// A thread looks.
    watched: AtomicBool,
    /// A packet would have been held if a thread looked.
    wanted: AtomicBool,
}

impl HoldWatch {
    /// Whether a packet would have been held since the last call if [watched](Self::watch).
    pub fn is_wanted(&self) -> bool {
        self.wanted.swap(false, Ordering::Relaxed)
    }

    /// The caller looks from now on, in time, at what is held; or it does not any more. Whoever has
    /// just read that it looks may hold one more packet.
    pub fn watch(&self, looks: bool) {
        self.watched.store(looks, Ordering::Relaxed);
    }

    /// When the packet that is held was begun, and how many have been held so far.
    pub fn look(&self) -> (Option<Instant>, u64) {
        let since = self.since.load(Ordering::Relaxed);
        ((since != 0).then_some(Instant(since)), self.held.load(Ordering::Relaxed))
    }
}

/// The packet that is held, and what is remembered of those before.
#[derive(Debug)]
pub(super) struct Nagle {
    /// Frames are dear: the port's frames pass a kernel.
    applies: bool,
    /// When the packet that is held was begun; `None` if there is none.
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

    /// Whether the next message to `p`, which has that many packets in flight, is to be held: not
    /// if the one before went to another peer.
    #[inline(always)]
    pub(super) fn wants(&self, p: PeerIdx, in_flight: u32) -> bool {
        self.applies && self.coalesces(p, in_flight)
    }

    /// A message to `p` has left or waits.
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
    /// Whether the packet that is held is to leave at `now`.
    #[inline]
    pub(super) fn hold_is_over(&self, now: Instant) -> bool {
        self.hold_due().is_some_and(|due| now >= due)
    }

    /// When the packet that is held leaves at the latest.
    pub(super) fn hold_due(&self) -> Option<Instant> {
        self.nagle.since.map(|since| since + HOLD_NS)
    }

    /// Notes that a packet of `count` messages has left for `p`.
    pub(super) fn note_shared(&mut self, p: PeerIdx, count: u16) {
        self.nagle.streams_to = if count > 1 { p } else { PeerIdx::NONE };
    }

    /// The open packet is held from now on.
    pub(super) fn hold(&mut self, due: &mut Due, now: Instant) {
        self.nagle.begin(now);
        due.todo |= Todo::HELD;
    }

    /// The packet that was held has left, or ended.
    pub(super) fn release_hold(&mut self, due: &mut Due) {
        self.nagle.end();
        due.todo.remove(Todo::HELD);
    }

    /// No further message joins the packet that is open.
    pub(super) fn close_open(&mut self, due: &mut Due) {
        self.open = TxIdx::NONE;
        self.release_hold(due);
    }

    /// Lets the packet that is held, if any, leave with the next transmit.
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
    /// What a thread that watches shares with this node.
    pub fn hold_watch(&self) -> Arc<HoldWatch> {
        Arc::clone(&self.packs.nagle.watch)
    }
}
