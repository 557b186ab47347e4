//! The progress engine: joins a node to a port and a clock.
//!
//! The only file of this crate that owns a [`Port`] and reads the clock. It has no lock and no
//! thread: the owner of the [`Engine`] decides who calls [`Engine::turn`]. The application that
//! reads a queue and the progress thread run the same turns: [`Engine::turn`], and its fast paths
//! [`Engine::fast_turn`] and [`Engine::fast_turn_other`].
//!
//! A turn receives one burst. The node prefetches for every frame of the burst before it handles
//! the first frame. Then the turn sends what is due: one acknowledgement covers all packets of the
//! burst.

mod sinks;

use std::sync::Arc;

use barewire_driver::backend::any_port::{AnyPort, PortVisitor};
use barewire_driver::backend::shm::ShmSettings;
use barewire_driver::clock;
use barewire_driver::error::OpenError;
use barewire_driver::hint::cold;
use barewire_driver::port::{
    FastPort, InPlaceTx, Port, PortCaps, PortCounters, PortGone, PortWaiter, Station,
};

use self::sinks::{ToFastPort, ToNode, ToPort, ToPortCached};
use crate::error::Result as OpResult;
use crate::flags::OpFlags;
use crate::idx::{EpIdx, PeerIdx};
use crate::node::{
    AtomicReq, AvId, EpCounters, EpId, FastAtomic, FastRead, FastWrite, INBOX_BURSTS, Joined,
    Levels, Node, NodeCounters, ReadReq, Reader, RecvReq, SendReq, SessionStats, Survey,
    SurveySink, WriteReq,
};
use crate::types::{EpAddr, FiAddr, Instant, Tenant};
use crate::wire::sealed;

/// Most frames that a turn receives from the port. A frame that waits in the port costs nothing; a
/// frame that is received before its receive is posted is copied twice. So the burst is shorter
/// than the receive queue of a program that keeps 64 receives posted and reads one completion for
/// each post. The limit also keeps a peer that floods this node from starving acknowledgements and
/// this node's own data.
const BURST: usize = 32;

/// Turns between two reads of the clock, while turns are less than [`TURN_GAP_NS`] nanoseconds
/// apart on average. (A read costs as much as an empty turn.) A timer may be late by
/// [`UNTIMED_TURNS`] such gaps. A caller whose turn found nothing asks [`Engine::is_late`] whether
/// turns have become rare, and then calls a turn once more.
const UNTIMED_TURNS: u32 = 64;
const TURN_GAP_NS: u64 = 100_000;

/// A node and its port.
pub struct Engine {
    node: Node,
    port: AnyPort,
    /// Set once the port is gone; no call uses the port from then on.
    gone: Option<PortGone>,
    /// Time of the last read of the clock.
    now: Instant,
    /// Turns left before the next read of the clock.
    untimed: u32,
    /// Turns that the next read of the clock adds to the port's counters. On a lossy port, where
    /// each turn reads the clock: turns since the last full one.
    uncounted: u32,
    /// Whether the last turn read the clock.
    timed: bool,
    /// Time at which a turn last read the clock.
    last_turn_at: Instant,
    /// Time at which [`is_late`](Self::is_late) last read the clock.
    pause_checked_at: Instant,
}

/// Port visitor of [`Engine::try_send_inline`].
struct VisitSendInline<'a> {
    node: &'a mut Node,
    ep: EpId,
    req: &'a SendReq,
}

impl PortVisitor for VisitSendInline<'_> {
    type Done = bool;

    #[inline(always)]
    fn visit<P: FastPort>(self, port: &mut Box<P>) -> bool {
        self.node.try_send_inline(self.ep, self.req, &mut ToFastPort(port), Engine::now)
    }
}

/// A survey sink that adds the port's byte counts per peer.
struct WithTraffic<'a, S> {
    port: &'a AnyPort,
    sink: &'a mut S,
}

impl<S: SurveySink> SurveySink for WithTraffic<'_, S> {
    fn endpoint(&mut self, slot: EpIdx, ep: Option<&EpCounters>) {
        self.sink.endpoint(slot, ep);
    }

    fn session(&mut self, slot: PeerIdx, session: Option<&SessionStats>) {
        let session = session.map(|session| SessionStats {
            bytes: session.bytes.or_else(|| self.port.traffic(session.info.station)),
            ..*session
        });
        self.sink.session(slot, session.as_ref());
    }
}

impl Engine {
    /// Joins `node` to `port`. The node must have been created with the capabilities of `port`.
    ///
    /// # Panics
    pub fn new(node: Node, mut port: Box<dyn Port>) -> Self {
        assert!(node.is_lossless() || !port.caps().lossless, "made for another port");
        if node.port.has_keys() {
            port.set_wire_filter(sealed::may_leave);
        }
        Self {
            node,
            port: port.into(),
            gone: None,
            now: Self::now(),
            untimed: 0,
            uncounted: 0,
            timed: false,
            last_turn_at: Instant(0),
            pause_checked_at: Instant(0),
        }
    }

    /// The clock, in the node's time base.
    #[inline]
    pub fn now() -> Instant {
        Instant(clock::now_ns())
    }

    /// Time of the last read of the clock: cheap and inexact.
    pub fn last_now(&self) -> Instant {
        self.now
    }

    /// Time at which a [`turn`](Self::turn) last read the clock: shows whether the owner still
    /// polls.
    pub fn last_turn_at(&self) -> Instant {
        self.last_turn_at
    }

    /// Whether the last turn read the clock. The caller's own timers need a check only after such a
    /// turn.
    #[inline(always)]
    pub fn is_timed(&self) -> bool {
        self.timed
    }

    /// The node.
    #[inline]
    pub fn node(&self) -> &Node {
        &self.node
    }

    /// The node, mutable.
    #[inline]
    pub fn node_mut(&mut self) -> &mut Node {
        &mut self.node
    }

    /// Capabilities of the port.
    pub fn caps(&self) -> &PortCaps {
        self.port.caps()
    }

    /// Counters of the port.
    pub fn port_counters(&self) -> PortCounters {
        self.port.counters()
    }

    /// The part of [`port_counters`](Self::port_counters) for peers of this machine, if the port
    /// has a near side.
    pub fn near_counters(&self) -> Option<PortCounters> {
        self.port.near_counters()
    }

    /// Mirrors the frames of the port to a recorder: see [`AnyPort::record`].
    ///
    /// # Errors
    /// Those of [`AnyPort::record`].
    pub fn record(&mut self, segment: &ShmSettings) -> Result<bool, OpenError> {
        self.port.record(segment)
    }

    /// Description of `station` by the port: see [`Port::station`].
    pub fn station(&self, station: Station) -> Option<String> {
        self.port.station(station)
    }

    /// [`Node::survey`], with the bytes that a lossless port counts of each peer added.
    pub fn survey(
        &mut self,
        survey: &mut Survey,
        sink: &mut impl SurveySink,
    ) -> (NodeCounters, Levels) {
        self.node.survey(survey, &mut WithTraffic { port: &self.port, sink })
    }

    /// A handle to sleep on until a frame may have arrived.
    pub fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        self.port.waiter()
    }

    /// The reason why the port is gone, if it is.
    pub fn gone(&self) -> Option<&PortGone> {
        self.gone.as_ref()
    }

    /// One turn: receives, fires timers, sends. Returns the number of frames received and sent; 0
    /// means that there was nothing to do. Never blocks. Allocates only when the number of
    /// out-of-order packets, or of peers with unfinished messages, exceeds both its earlier maximum
    /// and the room reserved for it.
    ///
    /// # Errors
    /// [`PortGone`] at once and in every later call. Every operation has ended with `FI_ENETDOWN`.
    #[inline]
    pub fn turn(&mut self) -> Result<usize, PortGone> {
        if self.gone.is_some() {
            return Err(self.still_gone());
        }
        let timed = self.untimed == 0;
        self.timed = timed;
        if timed {
            self.read_clock();
        } else {
            self.untimed -= 1;
        }
        let moved = self.receive()?;
        let moved = moved + self.turn_boards();
        if moved > 0 && self.node.has_answers() {
            self.answer();
        }
        if self.node.owes_acks(self.now) {
            self.acknowledge();
        }
        let due = if timed { !self.node.passes(self.now) } else { self.node.has_due() };
        if due {
            return Ok(moved + self.transmit(self.now)?);
        }
        Ok(moved)
    }

    /// [`turn`](Self::turn) for the shared segment (which cannot be gone) while the clock need not
    /// be read; no timer is checked. `None`, without side effect, if a full turn is needed. The
    /// first completion may go to `reader`.
    #[inline(always)]
    pub fn fast_turn(&mut self, reader: impl Reader) -> Option<usize> {
        let AnyPort::Shm(port) = &mut self.port else { return self.near_turn(reader) };
        // Decrement and test in one instruction; the store is undone below on underflow.
        let (left, none) = self.untimed.overflowing_sub(1);
        self.untimed = left;
        if none {
            self.untimed = 0;
            return cold(None);
        }
        // A sink of its own, which can stay in registers beside `busy_turn`.
        let reader = Some(reader);
        let polled = port.rx_poll(&mut ToNode { node: &mut self.node, now: &self.now, reader });
        Some(self.after_rx(polled))
    }

    /// [`fast_turn`](Self::fast_turn) for any other port. On a lossy port it reads the clock and
    /// checks timers. `None`, without side effect, if a full turn is needed.
    #[inline(always)]
    pub fn fast_turn_other(&mut self) -> Option<usize> {
        if !self.node.is_lossless() {
            return self.timed_turn();
        }
        let Some(left) = self.untimed.checked_sub(1) else { return cold(None) };
        let polled = self.port.rx_poll_wire(&mut ToNode::of(&mut self.node, &self.now));
        self.untimed = left;
        Some(self.after_rx(polled))
    }

    /// A turn that polls the near side only and does not read the clock. `None`, without side
    /// effect, if the far side or other work is or may be due.
    #[inline(always)]
    fn near_turn(&mut self, reader: impl Reader) -> Option<usize> {
        let AnyPort::Near(port) = &mut self.port else { return cold(None) };
        let sink = &mut ToNode { node: &mut self.node, now: &self.now, reader: Some(reader) };
        match port.rx_near(sink)? {
            0 if !self.node.due.todo.is_idle() => cold(None),
            moved if self.node.due.todo.only_waits() => Some(moved),
            moved => Some(self.after_near(moved)),
        }
    }

    /// The rest of a [`near_turn`](Self::near_turn) with frames to send.
    #[inline(never)]
    fn after_near(&mut self, moved: usize) -> usize {
        self.now = Self::now();
        self.node.turn.tick(self.now);
        self.busy_turn(Some(moved))
    }

    /// A turn on a lossy port without the rare checks of [`turn`](Self::turn). `None`, without side
    /// effect, if those checks are due.
    #[inline(always)]
    fn timed_turn(&mut self) -> Option<usize> {
        let now = Self::now();
        if self.uncounted == UNTIMED_TURNS || now.since(self.now) >= TURN_GAP_NS {
            return cold(None);
        }
        (self.now, self.last_turn_at) = (now, now);
        self.node.turn.tick_on(now);
        if let AnyPort::Near(port) = &mut self.port
            && port.may_skip_far(now.0)
            && self.node.passes(now)
        {
            if self.node.due.todo.is_idle()
                && self.node.wheel.is_idle_until(Instant(now.0 + TURN_GAP_NS))
            {
                port.may_skip_clock();
            }
            return Some(0);
        }
        self.uncounted += 1;
        let mut sink = ToNode::of(&mut self.node, &self.now);
        let polled = match &mut self.port {
            AnyPort::Near(port) => port.rx_poll(&mut sink),
            port => port.rx_poll_wire(&mut sink),
        };
        match polled {
            Some(moved) if self.node.passes(now) => Some(moved),
            polled => {
                cold(());
                Some(self.busy_turn(polled))
            }
        }
    }

    /// The part of a [`fast_turn`](Self::fast_turn) after `moved` frames were received.
    #[inline(always)]
    fn after_rx(&mut self, polled: Option<usize>) -> usize {
        match polled {
            Some(moved) if self.node.is_at_rest() => moved,
            _ => {
                cold(());
                self.busy_turn(polled)
            }
        }
    }

    /// The rest of a [`fast_turn`](Self::fast_turn) that left frames in the port
    /// ([`FastPort::rx_poll`] declined them) or has frames to send.
    #[inline(never)]
    fn busy_turn(&mut self, moved: Option<usize>) -> usize {
        let moved = match moved.map_or_else(|| self.receive_rest(), Ok) {
            Ok(moved) => moved,
            // The next turn is a full one and reports the error.
            Err(_gone) => return 0,
        };
        let moved = moved + self.turn_boards();
        if self.node.has_answers() {
            self.answer();
        }
        if self.node.owes_acks(self.now) {
            self.acknowledge();
        }
        let due = self.node.has_due() && !self.node.passes(self.now);
        let sent = if due { self.transmit(self.now).unwrap_or(0) } else { 0 };
        moved + sent
    }

    /// Progresses collectives in shared memory. Returns how many have ended.
    #[inline(always)]
    fn turn_boards(&mut self) -> usize {
        if self.node.coll.has_calls_on_boards() { self.node.drive_boards(self.now) } else { 0 }
    }

    /// Receives what `rx_poll` left in the port.
    fn receive_rest(&mut self) -> Result<usize, PortGone> {
        let got = match &mut self.port {
            AnyPort::Shm(port) => port.poll(BURST, &mut ToNode::of(&mut self.node, &self.now)),
            _ => self.burst()?,
        };
        self.note_full(got);
        Ok(got)
    }

    /// Receives a burst.
    #[inline]
    fn receive(&mut self) -> Result<usize, PortGone> {
        let got = self.burst()?;
        self.note_full(got);
        Ok(got)
    }

    /// Notes whether more frames may wait in the port: a burst of `got` frames was full.
    #[inline(always)]
    fn note_full(&mut self, got: usize) {
        self.node.turn.note_burst(got == BURST);
    }

    /// Receives one burst.
    #[inline]
    fn burst(&mut self) -> Result<usize, PortGone> {
        match self.port {
            AnyPort::Other(_) => self.burst_of_other(),
            _ => self.burst_of_known(),
        }
    }

    /// Out of line: the inlined ports need every register.
    #[inline(never)]
    fn burst_of_other(&mut self) -> Result<usize, PortGone> {
        let AnyPort::Other(port) = &mut self.port else { return Ok(0) };
        let mut sink = ToNode::of(&mut self.node, &self.now);
        port.rx_burst(BURST, &mut sink).map_err(|gone| self.set_gone(gone))
    }

    #[inline(never)]
    fn burst_of_known(&mut self) -> Result<usize, PortGone> {
        let mut sink = ToNode::of(&mut self.node, &self.now);
        match self.port.rx_burst(BURST, &mut sink) {
            Ok(got) => Ok(got),
            Err(gone) => Err(self.set_gone(gone)),
        }
    }

    /// Reads the clock and decides how many turns may skip it. Turns skip the clock on lossless
    /// ports only, which need no round-trip samples, and only if recent turns were so close
    /// together that no timer becomes late.
    #[inline]
    fn read_clock(&mut self) {
        let now = Self::now();
        self.node.turn.tick(now);
        self.last_turn_at = now;
        let untimed = std::mem::take(&mut self.uncounted);
        if untimed != 0 {
            self.port.count(untimed);
        }
        let quick = now.since(self.now) < TURN_GAP_NS * u64::from(1 + untimed);
        if self.node.is_lossless() && quick {
            self.untimed = UNTIMED_TURNS;
            self.uncounted = UNTIMED_TURNS;
        }
        self.now = now;
    }

    /// For a caller whose turn found nothing and that may not poll again soon: whether timers are
    /// armed and the clock was not read for long. Then the caller should turn again at once; that
    /// turn reads the clock.
    #[inline(always)]
    pub fn is_late(&mut self) -> bool {
        self.node.has_timers() && self.has_skipped_clock() && self.detect_pause()
    }

    /// Whether a turn has skipped the clock since its last read.
    #[inline(always)]
    fn has_skipped_clock(&self) -> bool {
        if let AnyPort::Near(port) = &self.port {
            return port.has_skipped_clock();
        }
        self.node.is_lossless() && self.untimed != self.uncounted
    }

    #[inline(never)]
    fn detect_pause(&mut self) -> bool {
        let now = Self::now();
        let late = now.since(self.pause_checked_at.max(self.now)) > TURN_GAP_NS;
        if late {
            match &mut self.port {
                AnyPort::Near(port) => port.must_read_clock(),
                _ => {
                    self.uncounted -= self.untimed;
                    self.untimed = 0;
                }
            }
        }
        self.pause_checked_at = now;
        late
    }

    #[cold]
    fn still_gone(&self) -> PortGone {
        self.gone.clone().expect("it was seen")
    }

    /// Posts a send and transmits what is due, unless the caller announces another post (`FI_MORE`)
    /// and packing pays. A refused post transmits what earlier posts with `FI_MORE` held back.
    ///
    /// # Errors
    /// Those of [`Node::post_send`]. Nothing of this request was queued.
    #[inline(always)]
    pub fn post_send(&mut self, ep: EpId, mut req: SendReq) -> OpResult<()> {
        // On a lossy port packing is tried first.
        let joins = !self.node.is_lossless() && self.node.packs.joins(&req);
        if joins && self.pack(ep, &req) || self.try_send(ep, &mut req) {
            return Ok(());
        }
        self.post_send_long(ep, req)
    }

    /// The rest of [`post_send`](Self::post_send) once [`try_send`](Self::try_send) has declined.
    ///
    /// # Errors
    /// Those of [`post_send`](Self::post_send).
    #[inline(never)]
    pub fn post_send_long(&mut self, ep: EpId, req: SendReq) -> OpResult<()> {
        let more = self.holds_back(req.flags);
        self.post_with(more, |node, now| node.post_send(now, ep, req))
    }

    /// Packs a message, and sends the packet unless the caller announces another post. False,
    /// without side effect, if the message cannot be packed.
    #[inline(never)]
    fn pack(&mut self, ep: EpId, req: &SendReq) -> bool {
        // A post with `FI_MORE` transmits nothing: the clock is read by the post that transmits.
        let (more, turned) = (req.flags.contains(OpFlags::MORE), self.now);
        let clock = || if more { turned } else { Self::now() };
        let joined = self.node.join(clock, ep, req);
        if joined == Joined::Leaves {
            self.after_post(Self::now());
        }
        joined != Joined::No
    }

    /// [`Node::try_send_cached`] through the shared segment only. False, without side effect: call
    /// [`post_send`](Self::post_send).
    #[inline(always)]
    pub fn try_send_cached(&mut self, ep: EpId, req: &SendReq) -> bool {
        let Some(port) = self.port.segment() else { return cold(false) };
        let sent = self.node.try_send_cached(ep, req, &mut ToPortCached(port));
        if sent {
            port.finish();
        }
        sent
    }

    /// [`Node::try_send_inline`] to a port of known type or through the node's shared segment.
    /// False, without side effect: call [`post_send`](Self::post_send).
    #[inline(always)]
    pub fn try_send_inline(&mut self, ep: EpId, req: &SendReq) -> bool {
        if let Some(port) = self.port.segment() {
            return self.node.try_send_inline(ep, req, &mut ToFastPort(port), Self::now);
        }
        self.port.on_wire(VisitSendInline { node: &mut self.node, ep, req }).unwrap_or(false)
    }

    /// [`Node::try_send`] to any port. False, without side effect: call
    /// [`post_send`](Self::post_send).
    #[inline]
    pub fn try_send(&mut self, ep: EpId, req: &mut SendReq) -> bool {
        self.post_now(|node, out| node.try_send(ep, req, out, Self::now))
    }

    /// [`Node::try_atomic`] to the shared segment only; [`atomic_far`](Self::atomic_far) serves
    /// other ports, so that no request is built here. False, without side effect: call
    /// [`post_atomic`](Self::post_atomic).
    #[inline(always)]
    pub fn try_atomic(&mut self, ep: EpId, req: &mut FastAtomic<'_>) -> bool {
        let AnyPort::Shm(port) = &mut self.port else { return cold(false) };
        self.node.try_atomic(ep, req, &mut ToFastPort(port), Self::now)
    }

    /// [`Node::try_atomic`] to any port. False, without side effect: call
    /// [`post_atomic`](Self::post_atomic).
    #[inline(always)]
    pub fn atomic_far(&mut self, ep: EpId, req: &mut FastAtomic<'_>) -> bool {
        self.post_now(|node, out| node.try_atomic(ep, req, out, Self::now))
    }

    /// [`Node::try_write`] to any port. False, without side effect: call
    /// [`post_write`](Self::post_write).
    #[inline]
    pub fn try_write(&mut self, ep: EpId, req: &mut FastWrite<'_>) -> bool {
        if let AnyPort::Shm(port) = &mut self.port {
            return self.node.try_write(ep, req, &mut ToFastPort(port), Self::now);
        }
        self.post_now(|node, out| node.try_write(ep, req, out, Self::now))
    }

    /// [`Node::try_read`] to any port. False, without side effect: call
    /// [`post_read`](Self::post_read).
    #[inline]
    pub fn try_read(&mut self, ep: EpId, req: &mut FastRead<'_>) -> bool {
        if let AnyPort::Shm(port) = &mut self.port {
            return self.node.try_read(ep, req, &mut ToFastPort(port), Self::now);
        }
        self.post_now(|node, out| node.try_read(ep, req, out, Self::now))
    }

    #[inline(always)]
    fn post_now(&mut self, post: impl FnOnce(&mut Node, &mut ToPort<'_>) -> bool) -> bool {
        if self.gone.is_some() {
            return false;
        }
        let Self { node, port, .. } = self;
        let mut out = ToPort { port, gone: None };
        let sent = post(node, &mut out);
        if let Some(gone) = out.gone {
            self.set_gone(gone);
        }
        sent
    }

    /// Sends the responses to requests of the last burst.
    #[inline(never)]
    fn answer(&mut self) {
        let now = self.now;
        self.post_now(|node, out| {
            node.send_answers(now, out);
            true
        });
    }

    /// Sends the acknowledgements that are due.
    #[inline(never)]
    fn acknowledge(&mut self) {
        let now = self.now;
        self.post_now(|node, out| {
            node.send_acks(now, out);
            true
        });
    }

    /// Posts a write and sends what is due, as [`post_send`](Self::post_send) does.
    ///
    /// # Errors
    /// Those of [`Posting::post_write`]. Nothing of this request was queued.
    ///
    /// [`Posting::post_write`]: crate::node::Posting::post_write
    #[inline]
    pub fn post_write(&mut self, ep: EpId, req: WriteReq) -> OpResult<()> {
        if let Some(mut short) = req.fast()
            && self.try_write(ep, &mut short)
        {
            return Ok(());
        }
        let more = self.holds_back(req.flags);
        self.post_with(more, |node, now| node.posting().post_write(now, ep, req))
    }

    /// Posts a read and sends what is due, as [`post_send`](Self::post_send) does.
    ///
    /// # Errors
    /// Those of [`Posting::post_read`]. Nothing of this request was queued.
    ///
    /// [`Posting::post_read`]: crate::node::Posting::post_read
    #[inline]
    pub fn post_read(&mut self, ep: EpId, mut req: ReadReq) -> OpResult<()> {
        if let Some(mut short) = req.fast()
            && self.try_read(ep, &mut short)
        {
            return Ok(());
        }
        let more = self.holds_back(req.flags);
        self.post_with(more, |node, now| node.posting().post_read(now, ep, req))
    }

    /// Posts an atomic operation and sends what is due, as [`post_send`](Self::post_send) does.
    ///
    /// # Errors
    /// Those of [`Posting::post_atomic`]. Nothing of this request was queued.
    ///
    /// [`Posting::post_atomic`]: crate::node::Posting::post_atomic
    #[inline(never)]
    pub fn post_atomic(&mut self, ep: EpId, mut req: AtomicReq) -> OpResult<()> {
        if let Some(mut short) = req.fast()
            && self.atomic_far(ep, &mut short)
        {
            return Ok(());
        }
        let more = self.holds_back(req.flags);
        self.post_with(more, |node, now| node.posting().post_atomic(now, ep, req))
    }

    /// Whether a post with `flags` defers transmission to a later post. Never on a lossless port: a
    /// frame there costs little more than a memory copy, and deferred frames only delay the
    /// receiver.
    #[inline(always)]
    fn holds_back(&self, flags: OpFlags) -> bool {
        flags.contains(OpFlags::MORE) && !self.node.is_lossless()
    }

    #[inline]
    fn post_with(
        &mut self,
        more: bool,
        post: impl FnOnce(&mut Node, Instant) -> OpResult<()>,
    ) -> OpResult<()> {
        // A post with `FI_MORE` transmits nothing: the clock is read by the post that transmits.
        let now = if more { self.now } else { Self::now() };
        let posted = post(&mut self.node, now);
        if posted.is_err() {
            self.send_held();
        } else if !more {
            self.after_post(now);
        }
        posted
    }

    /// Posts a receive. Packets that it causes (a pull, a credit) leave with the next turn.
    ///
    /// # Errors
    /// Those of [`Node::post_recv`]. Nothing of this request was queued.
    #[inline(always)]
    pub fn post_recv(&mut self, ep: EpId, req: RecvReq) -> OpResult<()> {
        if self.try_post_recv(ep, &req) {
            return Ok(());
        }
        self.node.post_recv(self.now, ep, req)
    }

    /// [`Objects::try_post_recv`](crate::node::Objects::try_post_recv). False, without side effect:
    /// call [`post_recv`](Self::post_recv).
    #[inline(always)]
    pub fn try_post_recv(&mut self, ep: EpId, req: &RecvReq) -> bool {
        self.node.objects().try_post_recv(ep, req)
    }

    /// [`Objects::try_post_recv_reserved`](crate::node::Objects::try_post_recv_reserved). False,
    /// without side effect: call [`post_recv`](Self::post_recv).
    #[inline(always)]
    pub fn try_post_recv_reserved(&mut self, ep: EpId, req: &RecvReq) -> bool {
        self.node.objects().try_post_recv_reserved(ep, req)
    }

    /// Transmits what a post made due. If the port turns out to be gone, the next
    /// [`turn`](Self::turn) reports it.
    #[inline]
    pub fn after_post(&mut self, now: Instant) {
        if self.gone.is_none() {
            self.now = now;
            // `gone` keeps the error, and every operation has already ended.
            let _ = self.transmit(now);
        }
    }

    /// Sends the open packet of small messages, if any, as far as the peer's window and the port
    /// allow.
    pub fn send_held(&mut self) {
        let Node { packs, tx, peers, due, .. } = &mut self.node;
        packs.release_held(tx, peers, due);
        self.after_post(Self::now());
    }

    /// [`after_post`](Self::after_post) for a collective, which may have used shared memory alone.
    #[inline]
    pub fn after_call(&mut self) {
        if self.node.calls_are_due() {
            self.after_post(Self::now());
        }
    }

    /// Adds an address with [`Sessions::av_insert`]. If that ends the session with an earlier
    /// incarnation of the peer, frames whose sends that incarnation saw complete are received
    /// first.
    ///
    /// # Errors
    /// Those of [`Sessions::av_insert`].
    ///
    /// [`Sessions::av_insert`]: crate::node::Sessions::av_insert
    pub fn av_insert(&mut self, av: AvId, addr: EpAddr) -> OpResult<FiAddr> {
        self.av_insert_of(av, addr, Tenant::NONE)
    }

    /// [`av_insert`](Self::av_insert) with [`Sessions::av_insert_of`].
    ///
    /// # Errors
    /// Those of [`Sessions::av_insert_of`].
    ///
    /// [`Sessions::av_insert_of`]: crate::node::Sessions::av_insert_of
    pub fn av_insert_of(&mut self, av: AvId, addr: EpAddr, tenant: Tenant) -> OpResult<FiAddr> {
        if self.gone.is_none() && self.node.control().supersedes(&addr) {
            self.now = Self::now();
            for _ in 0..INBOX_BURSTS {
                if !self.receive_more() {
                    break;
                }
            }
        }
        self.node.sessions().av_insert_of(Self::now(), av, addr, tenant)
    }

    /// Receives a burst, and returns whether more frames may wait: a burst may be short, or empty
    /// if a frame was dropped.
    fn receive_more(&mut self) -> bool {
        let dropped = self.port.counters().rx_dropped;
        match self.burst() {
            Ok(0) => self.port.counters().rx_dropped != dropped,
            Ok(_) => true,
            // Every session has ended, and the next turn reports the error.
            Err(_) => false,
        }
    }

    /// Latest time of the next [`turn`](Self::turn), if nothing arrives and nothing is posted.
    pub fn next_deadline(&self) -> Option<Instant> {
        if self.gone.is_some() {
            return None;
        }
        let port = self.port.next_deadline_ns().map(Instant);
        match (self.node.next_deadline(), port) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        }
    }

    #[inline]
    fn transmit(&mut self, now: Instant) -> Result<usize, PortGone> {
        let Self { node, port, .. } = self;
        let mut out = ToPort { port, gone: None };
        let sent = node.transmit_due(now, &mut out);
        if sent > 0 {
            out.flush();
        }
        match out.gone {
            None => Ok(sent),
            Some(gone) => Err(self.set_gone(gone)),
        }
    }

    #[cold]
    fn set_gone(&mut self, gone: PortGone) -> PortGone {
        self.node.port_gone(self.now);
        self.gone = Some(gone.clone());
        // The next turn is a full one.
        self.untimed = 0;
        if !self.node.is_lossless() {
            self.uncounted = UNTIMED_TURNS;
        }
        gone
    }
}

#[cfg(test)]
mod tests {
    use barewire_driver::frame::{RxFrame, TxFrame};
    use barewire_driver::mem::IoBuf;
    use barewire_driver::port::Tx;

    use super::*;
    use crate::error::Error;
    use crate::flags::BindFlags;
    use crate::node::{CqId, EpAttr, MsgKind, NoReader, NodeSettings, Todo};
    use crate::seal::{Keyring, Mode, PreSharedKey};
    use crate::types::{Cqe, FI_ADDR_UNSPEC};
    use barewire_driver::backend::fault::{Fault, FaultSettings};
    use barewire_driver::backend::loopback::Loopback;
    use barewire_driver::backend::near::Near;
    use barewire_driver::backend::shm::{ShmPort, ShmSettings};

    /// An engine with one endpoint.
    fn open(port: impl Port + 'static, incarnation: u64) -> (Engine, AvId, CqId, EpId) {
        open_with(port, incarnation, None)
    }

    fn open_with(
        port: impl Port + 'static,
        incarnation: u64,
        keys: Option<Keyring>,
    ) -> (Engine, AvId, CqId, EpId) {
        let seed = incarnation;
        let settings = NodeSettings { incarnation, seed, keys, ..NodeSettings::default() };
        let node = Node::new(settings, port.caps()).unwrap();
        let mut engine = Engine::new(node, Box::new(port));
        let node = engine.node_mut();
        let (av, cq) = (node.sessions().av_open(4).unwrap(), node.cqs.open(16).unwrap());
        let ep = node.eps.open(EpAttr::default()).unwrap();
        node.objects().ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
        node.objects().ep_bind_av(ep, av).unwrap();
        node.ep_enable(ep).unwrap();
        (engine, av, cq, ep)
    }

    fn send(dest: FiAddr) -> SendReq {
        let (kind, buf, flags) = (MsgKind::Msg, IoBuf::EMPTY, OpFlags::empty());
        SendReq { kind, buf, dest, tag: 0, data: 0, context: 7, flags, no_completion: false }
    }

    fn recv() -> RecvReq {
        let (kind, buf, flags) = (MsgKind::Msg, IoBuf::EMPTY, OpFlags::empty());
        RecvReq { kind, buf, src: FI_ADDR_UNSPEC, tag: 0, ignore: 0, context: 9, flags }
    }

    /// Turns in quick succession on average skip the clock, whatever number of turns skipped it
    /// before.
    #[test]
    fn turns_are_brisk_on_average() {
        let (a, _b) = Loopback::pair();
        let (mut a, ..) = open(a, 11);
        let mut quick = |turns: u32, took_ns| {
            (a.uncounted, a.untimed) = (turns, 0);
            a.now = Instant(Engine::now().0 - took_ns);
            a.read_clock();
            a.untimed != 0
        };
        let all = u64::from(UNTIMED_TURNS) * TURN_GAP_NS;
        assert!(quick(UNTIMED_TURNS, all / 2));
        assert!(!quick(UNTIMED_TURNS, all + 2 * TURN_GAP_NS));
        assert!(!quick(0, all / 2));
        assert!(!quick(0, 2 * TURN_GAP_NS));
    }

    /// Goal: an application that waits for a dead peer, first polling without a pause and then
    /// rarely, sees the error at the second poll after the port's check, not only at the poll that
    /// happens to read the clock.
    #[test]
    fn a_rare_poller_sees_a_dead_peer_in_time() {
        let segment = ShmSettings::named(&format!("seldom-{}", std::process::id()));
        let member = || ShmPort::open(&segment).unwrap();
        let (mut a, a_av, a_cq, a_ep) = open(member(), 11);
        let (mut b, _, b_cq, b_ep) = open(member(), 22);
        let dest = a.av_insert(a_av, b.node().addr_of(b_ep).unwrap()).unwrap();
        let mut cqe = [Cqe::default(); 2];
        b.post_recv(b_ep, recv()).unwrap();
        a.post_send(a_ep, send(dest)).unwrap();
        while b.node_mut().cq_read(b_cq, &mut cqe).is_err() {
            a.turn().unwrap();
            b.turn().unwrap();
        }
        assert_eq!(a.node_mut().cq_read(a_cq, &mut cqe), Ok(1));
        let flags = OpFlags::DELIVERY_COMPLETE;
        a.post_send(a_ep, SendReq { flags, ..send(dest) }).unwrap();
        let mut poll = || {
            a.turn().unwrap();
            if a.is_late() {
                a.turn().unwrap();
            }
            (a.untimed, a.node_mut().cq_read(a_cq, &mut cqe))
        };
        while poll().0 < UNTIMED_TURNS - 2 {}
        drop(b);
        let polls = (1..).find(|_| {
            std::thread::sleep(std::time::Duration::from_millis(60));
            poll().1 == Err(Error::Avail)
        });
        assert!(polls <= Some(2), "told by poll {polls:?}, one in 60 ms");
    }

    /// A port that may lose frames: only such a port leads out of this machine.
    fn lossy(port: Loopback) -> Fault {
        let loses = FaultSettings { loss: f64::MIN_POSITIVE, ..FaultSettings::default() };
        Fault::new(Box::new(port), loses, "fault()")
    }

    /// Joins a segment with the station address of a port that may lose frames.
    fn join(segment: &ShmSettings, far: Loopback) -> Near<AnyPort> {
        let far: Box<dyn Port> = Box::new(lossy(far));
        Near::join(segment, far.into(), "near".into()).unwrap_or_else(|(_, why)| panic!("{why}"))
    }

    /// Goal: polls that skip the clock see near frames, stop skipping when a timer is armed, and
    /// are detected once they become rare. Method: skipping is allowed anew before each step.
    #[test]
    fn polls_without_the_clock_put_nothing_off() {
        let segment = ShmSettings::named(&format!("skips-{}", std::process::id()));
        let (one, two) = Loopback::pair();
        let (mut a, a_av, a_cq, a_ep) = open(join(&segment, one), 11);
        let (mut b, b_av, _, b_ep) = open(join(&segment, two), 22);
        let to_a = b.av_insert(b_av, a.node().addr_of(a_ep).unwrap()).unwrap();
        let mut cqe = [Cqe::default(); 8];
        let skip_clock = |a: &mut Engine| {
            let AnyPort::Near(port) = &mut a.port else { panic!("it has a near side") };
            let now = Engine::now().0;
            port.may_skip_far(now);
            port.may_skip_far(now);
            port.may_skip_clock();
        };
        a.post_recv(a_ep, recv()).unwrap();
        b.post_send(b_ep, send(to_a)).unwrap();
        while a.node_mut().cq_read(a_cq, &mut cqe).is_err() {
            a.turn().unwrap();
            b.turn().unwrap();
        }
        // The acknowledgement of the first message has been sent.
        while a.fast_turn(NoReader) != Some(0) {
            let _ = a.turn();
            skip_clock(&mut a);
        }
        a.post_recv(a_ep, recv()).unwrap();
        b.post_send(b_ep, send(to_a)).unwrap();
        skip_clock(&mut a);
        let read_at = a.now;
        let polls = (1..).find(|_| a.fast_turn(NoReader) == Some(1));
        assert_eq!((polls, a.now), (Some(1), read_at), "a near frame is found without the clock");
        assert_eq!(a.node_mut().cq_read(a_cq, &mut cqe), Ok(1));
        // A timer runs from here on, for the peer's silence.
        let to_b = a.av_insert(a_av, b.node().addr_of(b_ep).unwrap()).unwrap();
        let flags = OpFlags::DELIVERY_COMPLETE;
        a.post_send(a_ep, SendReq { flags, ..send(to_b) }).unwrap();
        skip_clock(&mut a);
        assert_eq!(a.fast_turn(NoReader), Some(0));
        a.now = Engine::now();
        assert!(!a.is_late());
        (a.now, a.pause_checked_at) = (Instant(a.now.0 - 2 * TURN_GAP_NS), Instant(0));
        assert!(a.is_late());
        assert_eq!(a.fast_turn(NoReader), None, "seldom: the clock is needed");
        skip_clock(&mut a);
        a.node.due.todo.insert(Todo::ACKS);
        assert_eq!(a.fast_turn(NoReader), None, "by time: the clock is needed");
    }

    /// Goal: no frame of a program with a key leaves this machine's memory unsealed, not even one
    /// for a process of this node that has just exited; and the operations towards it end.
    #[test]
    fn frames_to_an_exited_near_process_do_not_leave_unsealed() {
        let segment = ShmSettings::named(&format!("poll-gone-{}", std::process::id()));
        let key = || PreSharedKey::new(&[7; 32], Mode::Encrypted).unwrap();
        let keys = |n| Keyring::new(vec![key()], [n; 32]);
        // The far end of the wire has the neighbour's address.
        let ((a_far, mut wire), (_other, b_far)) = (Loopback::pair(), Loopback::pair());
        let (mut a, a_av, a_cq, a_ep) = open_with(join(&segment, a_far), 11, keys(1));
        let (mut b, b_av, b_cq, b_ep) = open_with(join(&segment, b_far), 22, keys(2));
        let dest = a.av_insert(a_av, b.node().addr_of(b_ep).unwrap()).unwrap();
        b.av_insert(b_av, a.node().addr_of(a_ep).unwrap()).unwrap();
        let mut cqe = [Cqe::default(); 8];
        b.post_recv(b_ep, recv()).unwrap();
        a.post_send(a_ep, send(dest)).unwrap();
        while b.node_mut().cq_read(b_cq, &mut cqe).is_err() {
            a.turn().unwrap();
            b.turn().unwrap();
        }
        drop(b);
        let flags = OpFlags::DELIVERY_COMPLETE;
        let mut posted = 0;
        for _ in 0..4 {
            let mut req = send(dest);
            let _ = a.try_send(a_ep, &mut req) || a.post_send(a_ep, req).is_ok();
            // One post returns the error of the lost messages, once their session has ended.
            posted += usize::from(a.post_send(a_ep, SendReq { flags, ..send(dest) }).is_ok());
        }
        assert!(posted >= 3, "{posted} of 4 were posted");
        let mut ended = 0;
        while ended < posted {
            a.turn().unwrap();
            let _ = a.node_mut().cq_read(a_cq, &mut cqe);
            ended += usize::from(a.node_mut().receiving().cq_readerr(a_cq).is_ok());
            let mut clear = |frame: &RxFrame<'_>| {
                let head = frame.first_chunk::<20>().unwrap();
                assert!(sealed::may_leave(&head), "it left: {head:02x?}");
            };
            wire.rx_burst(64, &mut clear).unwrap();
        }
    }

    /// Goal: messages whose sends succeeded arrive, although their sender died and its successor
    /// was inserted before the receiver polled its ring. Method: over a port whose first burst
    /// contains all frames, over one whose first burst is a single frame, and over one whose first
    /// bursts are empty because of overlong frames.
    #[test]
    fn messages_of_an_earlier_incarnation_are_received_first() {
        let (a, b) = Loopback::pair();
        supersede(a, b, 0);
        let segment = ShmSettings::named(&format!("poll-{}", std::process::id()));
        let member = |mtu| ShmPort::open(&ShmSettings { mtu, ..segment.clone() }).unwrap();
        supersede(member(None), member(None), 0);
        supersede(member(None), member(Some(1500)), 3);
    }

    fn supersede(a: impl Port + 'static, b: impl Port + 'static, too_long: usize) {
        const COUNT: usize = 8;
        let (mut a, a_av, a_cq, a_ep) = open(a, 11);
        let (mut b, b_av, b_cq, b_ep) = open(b, 22);
        let b_addr = b.node().addr_of(b_ep).unwrap();
        let a_addr = a.node().addr_of(a_ep).unwrap();
        let dest = a.av_insert(a_av, b_addr).unwrap();
        b.av_insert(b_av, a_addr).unwrap();
        let mut cqe = [Cqe::default(); COUNT + 1];
        // The first message opens the session.
        for _ in 0..=COUNT {
            b.post_recv(b_ep, recv()).unwrap();
        }
        a.post_send(a_ep, send(dest)).unwrap();
        while b.node_mut().cq_read(b_cq, &mut cqe).is_err() {
            a.turn().unwrap();
            b.turn().unwrap();
        }
        assert_eq!(a.node_mut().cq_read(a_cq, &mut cqe), Ok(1));
        // A poll that finds nothing makes the next one poll for a single frame.
        b.turn().unwrap();
        let long = [&b_addr.station.mac.0[..], &[0; 2000]].concat();
        for _ in 0..too_long {
            assert_eq!(a.port.tx(&TxFrame::whole(&long)), Ok(Tx::Sent));
        }
        for _ in 0..COUNT {
            a.post_send(a_ep, send(dest)).unwrap();
        }
        assert_eq!(a.node_mut().cq_read(a_cq, &mut cqe), Ok(COUNT), "done: they lie in b's ring");
        drop(a);
        b.av_insert(b_av, EpAddr { incarnation: 33, ..a_addr }).unwrap();
        assert_eq!(b.node_mut().cq_read(b_cq, &mut cqe), Ok(COUNT));
    }
}
