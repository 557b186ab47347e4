//! Sessions: opening, reset and end. `peer.rs` has the table of states; `timers.rs` decides when a
//! peer is dead.

use barewire_driver::port::Station;

use super::notice::EndReason;
use super::ops::WrFlags;
use super::peer::{GRANT_FIRST, Peer, State};
use super::tally::Tally;
use super::{Control, NoReply, Node, NodeCounters, Objects, Replies, Reply, Sessions};
use crate::error::Error;
use crate::idx::{EpIdx, PeerIdx, PullIdx, TxIdx, UnexpectedIdx};
use crate::plant::{Bug, planted};
use crate::rel::psn::Psn;
use crate::rel::rtt::Rtt;
use crate::rel::sack::RcvBitmap;
use crate::rel::sent::{BodyRef, SendWindow, WINDOW};
use crate::seal::KEYS_MAX;
use crate::slab::NONE;
use crate::types::{Instant, ProvErrno, Tenant};
use crate::wire::{self, Base, OpenOp, RstOp, RstReason, Ty};

/// Replies to nodes without a session per millisecond.
pub(crate) const REPLIES_PER_MS: u32 = 4;

/// Replies that may wait for the port.
pub(crate) const REPLIES_MAX: usize = 64;

/// Records that one search for a record to evict examines when an OPEN finds the peer table full.
/// If none of them can be evicted the OPEN is dropped, and its sender repeats it.
const EVICT_SCAN: usize = 16;

impl Replies {
    /// Counts a reply to a station without a session, and returns whether it is within the rate
    /// limit.
    pub(super) fn may_reply(&mut self, counters: &mut NodeCounters, now: Instant) -> bool {
        if now.since(self.refilled) >= 1_000_000 {
            self.refilled = now;
            self.tokens = REPLIES_PER_MS;
        }
        let left = self.tokens.checked_sub(1);
        match left {
            Some(left) => self.tokens = left,
            None => counters.tx_replies_limited += 1,
        }
        left.is_some()
    }
}

impl Node {
    /// The port is gone: every pending operation and every later one ends with [`Error::NetDown`].
    pub fn port_gone(&mut self, now: Instant) {
        self.port.gone = true;
        self.due.note_send();
        let peers: Vec<PeerIdx> = self.peers.iter().map(|(p, _)| p).collect();
        for p in peers {
            self.sessions().end_session(now, p, EndReason::PortGone);
        }
        self.objects().srx_port_gone();
        let own = self.eps.iter().filter(|(_, ep)| ep.sharers.is_none());
        let eps: Vec<EpIdx> = own.map(|(e, _)| e).collect();
        for e in eps {
            for kind in 0..2 {
                while let Some(recv) = self.eps[e].matcher[kind].first_posted(&self.posted.pool) {
                    self.eps[e].matcher[kind].unlink_posted(&mut self.posted.pool, recv);
                    self.objects().fail_recv(recv, Error::NetDown);
                }
            }
        }
        self.collectives().end_groups(now, Error::NetDown);
        // Every call of a collective has ended, so nothing is sent.
        self.coll_progress(now, &mut NoReply);
    }
}

impl Sessions<'_> {
    /// Processes an OPEN (a first one, an answer or a challenge) of `len` bytes after the Ethernet
    /// header.
    pub(crate) fn on_open(&mut self, now: Instant, base: &Base, op: &OpenOp, len: u16) {
        let me = self.settings.incarnation;
        if base.src == self.port.station {
            self.counters.rx_bad_open += 1;
            return;
        }
        let other = op.target_inc != 0 && op.target_inc != me;
        if other && !planted(Bug::NoIncarnationCheck) || self.control().lacks_incarnation(op) {
            self.control().refuse_open(now, base, op, RstReason::WrongIncarnation);
            return;
        }
        if op.is_challenge() {
            return self.control().on_challenge(base, op);
        }
        if !self.control().is_admitted(now, base.src, op, len) {
            return;
        }
        let Some(p) = self.by_station.get(self.peers, base.src, self.openings.frame_tenant())
        else {
            return self.answer_unknown(now, base, op, len);
        };
        if self.control().is_path_changed(p, op) {
            self.counters.rx_not_near += 1;
            return;
        }
        let peer = &self.peers[p];
        let (ours, theirs, over) = compare(peer, op);
        let named = peer.inc == 0 || peer.inc == op.inc;
        let (state, sealed) = (peer.state, self.port.is_sealed(op));
        let identity = peer.identity();
        if self.control().open_prevails(p, op) {
            return;
        }
        match state {
            State::Idle if op.is_answer() => {
                self.control().refuse_open(now, base, op, RstReason::UnknownSession);
            }
            State::Idle if over => self.control().refuse_open(now, base, op, RstReason::Closed),
            State::Idle => self.control().answer(now, p, base, op, len),
            State::Opening if ours && (named || planted(Bug::NoIncarnationCheck)) => {
                if !self.control().finish_handshake(p, base, op) {
                    return;
                }
                self.control().pair(p, base, op);
                self.control().note_path(p, op, len);
                self.control().opened(now, p);
                self.peers[p].ack_now = true;
            }
            State::Opening if op.is_answer() || over => {
                self.control().refuse_open(now, base, op, RstReason::UnknownSession);
            }
            State::Opening if !named => {
                // The application inserted another incarnation of the peer, which has ended: the
                // answer to our OPEN will report that.
                self.counters.rx_bad_open += 1;
            }
            State::Opening if !self.control().respond(identity, base, op) => {}
            State::Opening => {
                let claimed = self.peers[p].inc == 0;
                self.control().pair(p, base, op);
                let peer = &mut self.peers[p];
                (peer.state, peer.want_open, peer.is_life_claimed) =
                    (State::Answered, true, claimed);
                self.control().note_path(p, op, len);
                self.due.make_ready(self.peers, p);
            }
            State::Answered if theirs && ours && sealed => {
                // Each end answered the other's OPEN, so the two have no keys in common.
                if self.port.addr > self.peers[p].addr {
                    return;
                }
                match self.openings.has_certificate() {
                    // This OPEN proves nothing: any station can send it.
                    true => {
                        self.control().note_unproven_reset(now, p, &RstOp::unknown_session(op.inc))
                    }
                    false => self.reopen(now, p, false),
                }
            }
            State::Answered if theirs && ours => {
                self.openings.note_length(&self.peers[p], op, len);
                self.control().opened(now, p);
                self.peers[p].ack_now = true;
            }
            State::Answered if theirs => {
                self.openings.note_length(&self.peers[p], op, len);
                self.peers[p].want_open = true;
                self.due.make_ready(self.peers, p);
            }
            State::Answered if over || op.is_answer() => {
                self.control().refuse_open(now, base, op, RstReason::UnknownSession);
            }
            State::Answered => self.replace_answered(now, p, base, op, len),
            State::Open if theirs => {
                self.peers[p].ack_now = true;
                self.due.make_ready(self.peers, p);
            }
            State::Open => {
                // Either this OPEN is stale or the peer has lost the session: the peer's next
                // packet tells which.
                self.counters.rx_bad_open += 1;
                self.counters.tx_probes += 1;
                self.peers[p].request_ping();
                self.due.make_ready(self.peers, p);
            }
        }
    }

    /// Answers an OPEN of a peer that gave up the session we had answered: our session pairs with
    /// that one only (S3). Queued operations go out with the new session, unless they name another
    /// incarnation.
    fn replace_answered(&mut self, now: Instant, p: PeerIdx, base: &Base, op: &OpenOp, len: u16) {
        // Before the present session ends: a refused OPEN changes nothing.
        let first = self.openings.first_psn();
        let identity = self.peers[p].identity();
        if !self.control().respond(identity, base, op) {
            return;
        }
        let answered = self.openings.take_keys(base.src, op);
        if planted(Bug::QueuedOpsFailedByOpen) {
            self.end_session(now, p, EndReason::Restarted);
        }
        if self.peers[p].state != State::Idle {
            self.control().forget(p);
        }
        if self.peers[p].inc != op.inc {
            self.operations().end_other_incarnation(now, p);
        }
        self.openings.put_keys(base.src, answered);
        self.control().begin_answer(now, p, (base, op), len, first);
    }

    /// Processes an OPEN of an unknown station. The station gets a peer record, for which another
    /// peer may be evicted, only if this is a first OPEN whose handshake message and certificate
    /// are valid.
    fn answer_unknown(&mut self, now: Instant, base: &Base, op: &OpenOp, len: u16) {
        if op.is_answer() {
            return self.control().refuse_open(now, base, op, RstReason::UnknownSession);
        }
        let (first, tenant) = (self.openings.first_psn(), self.openings.frame_tenant());
        if !self.control().respond((base.src, tenant), base, op) {
            return;
        }
        match self.peer_of(now, base.src, tenant, EVICT_SCAN) {
            Some(p) => self.control().begin_answer(now, p, (base, op), len, first),
            None => {
                self.counters.rx_bad_open += 1;
                drop(self.openings.take_keys(base.src, op));
            }
        }
    }

    /// Processes an RST. It is applied only if it proves knowledge of the session (S4): it echoes a
    /// packet that we could have sent, or our incarnation and epoch.
    pub(crate) fn on_rst(&mut self, now: Instant, src: Station, op: &RstOp) {
        if op.reason.is_of_key() {
            return self.on_key_refusal(now, src, op);
        }
        let known = self.by_station.get(self.peers, src, self.openings.frame_tenant());
        let Some(p) = known.filter(|_| src != self.port.station) else {
            self.counters.rx_bad_rst += 1;
            return;
        };
        let peer = &self.peers[p];
        let back = peer.snd.nxt.0.wrapping_sub(op.echo_psn.0);
        let echoes = op.echo_sid != 0
            && op.echo_sid == self.openings.remote_sid(peer)
            && back <= peer.snd.in_flight() + WINDOW;
        let names = op.victim_inc == self.settings.incarnation && op.victim_epoch == peer.epoch;
        let idle = peer.state == State::Idle;
        if idle || !(echoes && peer.state == State::Open || names || planted(Bug::ResetWithoutEcho))
        {
            self.counters.rx_bad_rst += 1;
            return;
        }
        if !names && peer.path.is_sealed() {
            return self.control().note_unproven_reset(now, p, op);
        }
        let unnamed = op.reason == RstReason::WrongIncarnation;
        if unnamed && peer.inc != 0 && op.life == wire::life_of(peer.inc) {
            return self.control().reopen_named(p);
        }
        if peer.path.is_sealed() && self.openings.has_certificate() {
            // Any station can make its tag.
            return self.control().note_unproven_reset(now, p, op);
        }
        self.apply_rst(now, p, op);
    }

    /// Applies an RST that was accepted as genuine.
    pub(super) fn apply_rst(&mut self, now: Instant, p: PeerIdx, op: &RstOp) {
        let (peer, unnamed) = (&self.peers[p], op.reason == RstReason::WrongIncarnation);
        self.counters.sessions_reset += 1;
        if unnamed && peer.state == State::Opening && peer.inc == 0 {
            return self.end_session(now, p, EndReason::Unnamed);
        }
        let stale_answer = peer.state == State::Answered && op.reason == RstReason::UnknownSession;
        let other_life = peer.state != State::Open && op.reason == RstReason::WrongIncarnation;
        if stale_answer || other_life {
            self.reopen(now, p, other_life);
            return;
        }
        self.reset(now, p, op);
    }

    /// Ends the session with `p` as an accepted RST says.
    fn reset(&mut self, now: Instant, p: PeerIdx, op: &RstOp) {
        let peer = &self.peers[p];
        let other_life = op.life != wire::life_of(peer.inc) && peer.inc != 0;
        let reason = match op.reason {
            RstReason::Version => EndReason::Version(op.versions),
            RstReason::Closed => EndReason::Closed,
            RstReason::Dead => EndReason::TakenForDead,
            RstReason::WrongIncarnation => EndReason::Restarted,
            RstReason::UnknownSession if other_life => EndReason::Restarted,
            RstReason::UnknownSession => EndReason::Reset,
            RstReason::OtherKey => EndReason::OtherKey,
            RstReason::NoKey => EndReason::NoKey,
        };
        self.end_session(now, p, reason);
        if op.life != wire::life_of(self.peers[p].inc) || op.reason == RstReason::WrongIncarnation {
            self.control().note_life(p, 0);
            self.peers[p].closed_epoch = 0;
        }
    }

    /// The other end does not know the session that we opened or answered, or has another
    /// incarnation (`other_life`). Nothing was sent yet: queued operations go out with the next
    /// session, unless they name that incarnation.
    pub(super) fn reopen(&mut self, now: Instant, p: PeerIdx, other_life: bool) {
        let (claimed, last_rx) = (self.peers[p].is_life_claimed, self.peers[p].last_rx);
        self.control().forget(p);
        if other_life {
            // Operations that name an incarnation name another than the claimed one.
            if !claimed {
                self.operations().end_other_incarnation(now, p);
            }
            self.control().note_life(p, 0);
            self.peers[p].closed_epoch = 0;
        }
        if !self.peers[p].wrs.is_empty() || self.peers[p].coll_waits > 0 {
            self.control().begin(now, p, State::Opening, false);
        }
        if self.openings.has_certificate() {
            // Any station can have sent the frame that caused this: it does not show that the peer
            // is alive.
            self.peers[p].last_rx = last_rx;
            self.control().arm_timer(now, p);
        }
    }

    /// Ends a session: every operation that depends on it ends with the error of `reason`, and its
    /// resources are freed (S8). If the reason calls for it, one RST is sent to the peer, best
    /// effort.
    pub(crate) fn end_session(&mut self, now: Instant, p: PeerIdx, reason: EndReason) {
        self.operations().note_end(now, p, reason);
        self.operations().note_losses(p, reason);
        let ends_receives = self.operations().ends_receives(p, reason);
        let err = reason.error();
        let state = self.peers[p].state;
        if state != State::Idle {
            if reason.sends_rst() && self.peers[p].station() != self.port.station {
                self.control().send_rst_on_close(now, p);
            }
            self.drop_packets(p);
        }
        while self.peers[p].wrs.head != TxIdx::NONE {
            let w = self.peers[p].wrs.head;
            let wr = &self.tx[w];
            let begun = !wr.flags.contains(WrFlags::IN_SEND_Q) || wr.sent > 0;
            if begun
                && wr.flags.contains(WrFlags::ANNOUNCED)
                && planted(Bug::PendingResponsesDropped)
            {
                self.tx.unlink(self.peers, w);
                continue;
            }
            let prov = if begun && state == State::Open {
                ProvErrno::UnknownOutcome
            } else {
                ProvErrno::NotExecuted
            };
            self.operations().fail_wr(w, err, prov);
        }
        if self.peers[p].fast_ops() > 0 {
            self.operations().fail_fast_ops(p, err);
        }
        while self.peers[p].pulls.head != PullIdx::NONE {
            let idx = self.peers[p].pulls.head;
            self.operations().fail_pull(idx, err);
        }
        self.objects().abort_reassembly(p);
        self.objects().drop_announced(p);
        // No message of the peer that would go into one of them is in flight any more.
        if ends_receives {
            self.objects().fail_receives_from(p, err);
        }
        self.coll.peer_lost(p, err);
        if state == State::Idle {
            return;
        }
        self.control().forget(p);
        let peer = &mut self.peers[p];
        peer.rcv = RcvBitmap::default();
        (peer.owed, peer.refused) = (0, 0);
        (peer.pings, peer.want_nop) = (0, false);
        (peer.bad_seq, peer.written) = (NONE, 0);
        peer.answered(u16::MAX);
        let credit = peer.snd.credit;
        peer.snd = SendWindow::new(peer.snd.nxt);
        peer.snd.credit = credit;
        // Not for a record that is about to be freed: its credit would be lost with the record.
        if peer.station() == self.port.station && reason != EndReason::Evicted {
            self.control().open_to_self(p);
        }
    }

    /// Ends the sessions of a node about to close, so that their peers do not wait T_dead for it.
    /// Sessions on lossless paths stay: their peers learn from the port that the process has ended.
    /// Returns whether more sessions may be left than RSTs can be queued at once: transmit, and
    /// call again.
    ///
    /// Each peer gets one RST, best effort.
    pub fn leave_sessions(&mut self) -> bool {
        let room = REPLIES_MAX - self.replies.queue.len().min(REPLIES_MAX);
        let needs_rst = |peer: &Peer| {
            let is_other = peer.station() != self.port.station;
            peer.state == State::Open && !peer.path.is_lossless() && is_other
        };
        let left = self.peers.iter().filter(|(_, peer)| needs_rst(peer)).map(|(p, _)| p);
        let left: Vec<PeerIdx> = left.take(room).collect();
        for &p in &left {
            // The rate limit is for replies to frames, which these are not.
            self.replies.tokens = REPLIES_PER_MS;
            self.end_session(self.turn.polled_at, p, EndReason::Left);
        }
        left.len() == room
    }

    /// Frees the packets in flight and those buffered out of order.
    fn drop_packets(&mut self, p: PeerIdx) {
        while let Some(idx) = self.peers[p].snd.pop_any(self.sent) {
            let entry = self.sent.free(idx);
            if let BodyRef::Pack { buf, .. } = entry.body {
                self.packs.free.push(buf);
            } else {
                self.responder().drop_body(entry.body);
            }
        }
        self.responder().free_queued(p);
        self.reorder.drop_all(&mut self.peers[p]);
    }

    /// Drops the session with `station`, or its sessions under each key, without an RST, as if its
    /// memory had been lost. For tests of how the other end reacts.
    pub fn drop_session(&mut self, now: Instant, station: Station) {
        let tenants: Vec<Tenant> = self.openings.tenants().collect();
        for tenant in tenants {
            if let Some(p) = self.by_station.get(self.peers, station, tenant) {
                self.end_session(now, p, EndReason::Dropped);
            }
        }
    }
}

impl Objects<'_> {
    /// Discards messages that a peer announced and that can no longer be pulled.
    fn drop_announced(&mut self, p: PeerIdx) {
        if self.peers[p].unexpected == 0 {
            return;
        }
        let announced: Vec<UnexpectedIdx> = (self.unexpected.iter())
            .filter(|(_, m)| m.payload.peer == p && m.payload.is_announced() && !m.payload.dead)
            .map(|(idx, _)| idx)
            .collect();
        for msg in announced {
            if self.unexpected[msg].payload.claimed {
                let m = &mut self.unexpected[msg].payload;
                (m.dead, m.src_op) = (true, NONE);
            } else {
                self.eps.unmatch(self.unexpected, msg);
                self.free_unexpected(msg);
            }
        }
    }
}

impl Control<'_> {
    /// Work is queued for `p`: opens a session, or queues the peer to be served.
    pub(super) fn schedule(&mut self, now: Instant, p: PeerIdx) {
        match self.peers[p].state {
            // The path is chosen when the OPEN leaves.
            State::Idle => self.begin(now, p, State::Opening, false),
            State::Opening => {}
            // The sender of the OPEN may have exited, or its address is forged: an OPEN of our own
            // will tell.
            State::Answered if !self.peers[p].opens => {
                (self.peers[p].opens, self.peers[p].probe_at) = (true, now);
                self.arm_timer(now, p);
            }
            State::Answered => {}
            State::Open => self.due.make_ready(self.peers, p),
        }
    }

    /// Starts a new session with the peer in `state`, on a near or a far path. Its OPEN is not sent
    /// here.
    fn begin(&mut self, now: Instant, p: PeerIdx, state: State, near: bool) {
        let first = self.openings.first_psn();
        self.begin_from(now, p, (state, first), near);
    }

    /// As [`begin`](Self::begin), with `first` as the PSN of the first packet.
    fn begin_from(&mut self, now: Instant, p: PeerIdx, (state, first): (State, Psn), near: bool) {
        let (sid, epoch) = self.openings.next_session(p);
        let grant = self.blocks.grant_initial(state != State::Answered);
        let peer = &mut self.peers[p];
        peer.state = state;
        peer.sid = sid;
        peer.epoch = epoch;
        peer.snd = SendWindow::new(first);
        peer.rcv = RcvBitmap::default();
        peer.rtt = Rtt::default();
        (peer.snd.credit, peer.credit_used, peer.consumed) = (0, 0, 0);
        (peer.granted, peer.target) = (grant, GRANT_FIRST as u16);
        (peer.backoff, peer.probes, peer.probed) = (0, 0, false);
        (peer.refused, peer.refused_units) = (0, 0);
        (peer.owed, peer.ack_now, peer.pings, peer.want_nop) = (0, false, 0, false);
        peer.quick_ack = true;
        (peer.marked, peer.takes_echo, peer.dups) = (false, false, 0);
        (peer.nack.want, peer.has_nop_for, peer.has_requested_credit) = (false, false, false);
        peer.searches = false;
        peer.want_open = true;
        peer.opens = state == State::Opening;
        peer.last_rx = now;
        peer.probe_at = now;
        peer.reorder_at = Instant(0);
        self.set_path(p, near);
        self.openings.forget(p);
        self.observed.tallies[p.at()] = Tally::new(now, first);
        if grant == 0 && state != State::Answered {
            // A peer without credit consumes none, so no later event would grant it any: it waits
            // for free blocks.
            self.blocks.queue_for_blocks(p, &mut self.peers[p]);
        }
        self.due.make_ready(self.peers, p);
        self.arm_timer(now, p);
    }

    /// Opens the session with this node itself: one record stands for both of its ends.
    pub(super) fn open_to_self(&mut self, p: PeerIdx) {
        let now = self.turn.polled_at;
        self.begin(now, p, State::Open, false);
        self.note_life(p, self.settings.incarnation);
        let peer = &mut self.peers[p];
        peer.want_open = false;
        peer.remote_sid = peer.sid;
        peer.rcv_nxt = peer.snd.nxt;
        self.observed.tallies[p.at()].expect(peer.snd.nxt);
        peer.snd.credit = peer.granted;
        peer.peer_epoch = peer.epoch;
        peer.frame_max = self.port.frame_max;
    }

    /// Whether an OPEN names no incarnation although this node requires its own: the sender did not
    /// get the address from an application.
    fn lacks_incarnation(&mut self, op: &OpenOp) -> bool {
        let by_name = self.settings.by_name || planted(Bug::OpenWithoutIncarnation);
        let unnamed = op.target_inc == 0 && !by_name;
        self.counters.rx_unnamed += u64::from(unnamed);
        unnamed
    }

    /// Answers a first OPEN with a new session.
    fn answer(&mut self, now: Instant, p: PeerIdx, base: &Base, op: &OpenOp, len: u16) {
        let first = self.openings.first_psn();
        if self.respond(self.peers[p].identity(), base, op) {
            self.begin_answer(now, p, (base, op), len, first);
        }
    }

    /// Begins the session that answers a first OPEN whose handshake message was answered. `first`
    /// is the PSN of our first packet.
    fn begin_answer(
        &mut self,
        now: Instant,
        p: PeerIdx,
        (base, op): (&Base, &OpenOp),
        len: u16,
        first: Psn,
    ) {
        let known = self.peers[p].inc;
        if known != op.inc {
            self.peers[p].closed_epoch = 0;
        }
        let proven = self.openings.secret.is_proof(now, base.src, op);
        let named = self.peers[p].is_named(op.inc);
        let claimed = known == 0 || known == op.inc && self.peers[p].is_life_claimed;
        self.begin_from(now, p, (State::Answered, first), op.is_near());
        self.pair(p, base, op);
        let peer = &mut self.peers[p];
        peer.opens = !peer.wrs.is_empty() || peer.coll_waits > 0;
        peer.is_life_claimed = claimed && !proven;
        self.note_path(p, op, len);
        self.openings.note_half_open(now, &self.peers[p], proven || named);
    }

    /// Records the identity of the other end: sid, incarnation, epoch, frame length.
    fn pair(&mut self, p: PeerIdx, base: &Base, op: &OpenOp) {
        self.note_life(p, op.inc);
        self.observed.tallies[p.at()].expect(base.psn);
        let peer = &mut self.peers[p];
        peer.peer_epoch = op.epoch;
        peer.remote_sid = self.openings.name_session(peer, op.sid);
        peer.rcv_nxt = base.psn;
        peer.rx_newest = base.psn;
        peer.snd.credit = op.grant;
    }

    /// The session is open: queued operations may leave.
    pub(super) fn opened(&mut self, now: Instant, p: PeerIdx) {
        let peer = &mut self.peers[p];
        self.openings.settle_path(now, peer);
        self.openings.forget_answer(peer);
        self.openings.queue_secrets(peer);
        let active = self.turn.polled_at;
        let fast_path = self.takes_fast_path(p);
        let peer = &mut self.peers[p];
        peer.state = State::Open;
        peer.is_life_claimed = false;
        peer.fast_path = fast_path;
        peer.note_order();
        peer.last_rx = active;
        (peer.backoff, peer.probes, peer.pings) = (0, 0, 0);
        peer.probe_at = now;
        peer.progress_at = now;
        peer.want_open = false;
        self.counters.sessions_opened += 1;
        if self.peers[p].outstanding() == 0 {
            self.blocks.regrant_now(self.peers, self.due, p);
        }
        self.due.make_ready(self.peers, p);
        self.arm_timer(now, p);
    }

    /// Whether an open session may use the fast path: not if senders are resolved in the address
    /// vector, if a lossless path carries checksums, or while an endpoint still has to report that
    /// an earlier session with the peer was lost.
    pub(super) fn takes_fast_path(&self, p: PeerIdx) -> bool {
        let path = self.peers[p].path;
        let looks_up = self.settings.inserted && !planted(Bug::FastPathWithoutLookup);
        let asks = looks_up || path.is_lossless() && path.has_crc();
        !asks && !self.observed.losses.has_report(p)
    }

    fn refuse_open(&mut self, now: Instant, base: &Base, op: &OpenOp, reason: RstReason) {
        self.counters.rx_bad_open += 1;
        self.repeat_open(now, base.src);
        self.reset_open(now, base, op, reason);
    }

    /// Answers an OPEN with an RST that names it.
    pub(super) fn reset_open(&mut self, now: Instant, base: &Base, op: &OpenOp, reason: RstReason) {
        let rst = RstOp {
            echo_sid: base.dst_sid,
            echo_psn: base.psn,
            life: wire::life_of(self.settings.incarnation),
            victim_inc: op.inc,
            victim_epoch: op.epoch,
            reason,
            versions: wire::VERSIONS,
        };
        self.reply_rst(now, (base.src, self.openings.frame_tenant()), op.sid, rst, usize::MAX);
    }

    /// Processes a packet of a session that does not exist here.
    pub(super) fn on_no_session(&mut self, now: Instant, src: Station, sid: u32, psn: Psn) {
        self.counters.rx_no_session += 1;
        self.repeat_open(now, src);
        let rst = RstOp {
            echo_sid: sid,
            echo_psn: psn,
            life: wire::life_of(self.settings.incarnation),
            victim_inc: 0,
            victim_epoch: 0,
            reason: RstReason::UnknownSession,
            versions: wire::VERSIONS,
        };
        // The peer's key is not known.
        let mut to = [None; KEYS_MAX];
        to.iter_mut().zip(self.openings.tenants()).for_each(|(to, tenant)| *to = Some(tenant));
        for tenant in to.into_iter().flatten() {
            self.reply_rst(now, (src, tenant), 0, rst, usize::MAX);
        }
    }

    /// The peer polls and has our OPEN, but has or wants a session with an earlier incarnation of
    /// this node. An RST tells it that the incarnation has ended; it may have dropped our OPEN
    /// before. So the OPEN is repeated, even where the port keeps it in the peer's memory.
    fn repeat_open(&mut self, now: Instant, src: Station) {
        let known = self.by_station.get(self.peers, src, Tenant::NONE);
        let Some(p) = known else { return };
        let peer = &self.peers[p];
        if peer.path.tells_presence() && peer.state == State::Opening {
            self.peers[p].backoff = 0;
            self.arm_timer(now, p);
        }
    }

    /// Queues an RST if the rate limit allows it and its frame has at most `most` bytes.
    pub(super) fn reply_rst(
        &mut self,
        now: Instant,
        (dst, tenant): (Station, Tenant),
        dst_sid: u32,
        rst: RstOp,
        most: usize,
    ) {
        if !self.replies.may_reply(self.counters, now) {
            return;
        }
        let mut op = [0; RstOp::LEN];
        rst.emit(&mut op);
        let reply = Reply::new(&self.port.control(dst, Ty::Rst, dst_sid, Psn(0)), &op);
        self.push_reply(reply.under(tenant), most);
    }

    /// Queues a finished frame as a reply, if it has at most `most` bytes.
    pub(super) fn push_reply(&mut self, reply: Reply, most: usize) {
        if reply.len > most || self.replies.queue.len() >= REPLIES_MAX {
            self.counters.tx_replies_limited += 1;
            return;
        }
        self.replies.queue.push_back(reply);
        self.due.note_send();
    }

    /// The peer refused an OPEN that left before we knew its incarnation. Now it is known, and the
    /// next OPEN names it. If the peer has opened a session meanwhile, that session stays.
    fn reopen_named(&mut self, p: PeerIdx) {
        if self.peers[p].state == State::Opening {
            self.peers[p].want_open = true;
            self.due.make_ready(self.peers, p);
        } else {
            self.counters.rx_bad_rst += 1;
        }
    }

    /// Drops a session on which nothing was sent. Operations stay queued.
    pub(super) fn forget(&mut self, p: PeerIdx) {
        self.forget_keys(p);
        let peer = &mut self.peers[p];
        let paired = matches!(peer.state, State::Answered | State::Open);
        self.observed.tallies[p.at()].end(peer.snd.nxt, paired.then_some(peer.rcv_nxt));
        self.blocks.revoke(peer);
        if paired {
            // Without an answer the epoch is that of an earlier session, perhaps of another
            // incarnation.
            peer.closed_epoch = peer.peer_epoch;
        }
        peer.state = State::Idle;
        (peer.in_order, peer.steady) = (false, false);
        peer.fast_path &= planted(Bug::StaleFastPath);
        (peer.tx_quota, peer.rx_quota) = (0, 0);
        (peer.sid, peer.remote_sid) = (0, 0);
        (peer.want_open, peer.ack_now, peer.opens) = (false, false, false);
        peer.timer_at = Instant(u64::MAX);
        self.wheel.disarm(p);
        self.openings.forget_session(p);
        // Its credit becomes available to other peers.
        self.blocks.serve_waiters(self.peers, self.due);
    }

    /// Sends an RST: the session is over.
    fn send_rst_on_close(&mut self, now: Instant, p: PeerIdx) {
        let peer = &self.peers[p];
        let rst = RstOp {
            echo_sid: peer.sid,
            echo_psn: peer.rcv_nxt,
            life: wire::life_of(self.settings.incarnation),
            victim_inc: peer.inc,
            victim_epoch: peer.peer_epoch,
            reason: RstReason::Closed,
            versions: wire::VERSIONS,
        };
        let (to, sid) = ((peer.station(), peer.tenant), self.openings.remote_sid(peer));
        if peer.state != State::Opening {
            self.reply_rst(now, to, sid, rst, usize::MAX);
        }
    }
}

/// Returns whether an OPEN answers ours, whether it is of the current session, and whether it is of
/// an ended one: ended here, or by the peer, from which the OPEN of a later session has come.
fn compare(peer: &Peer, op: &OpenOp) -> (bool, bool, bool) {
    let ours = op.echo_sid == peer.sid && op.echo_epoch == peer.epoch && peer.sid != 0;
    let theirs = op.inc == peer.inc && op.epoch == peer.peer_epoch;
    (ours, theirs, peer.is_over(op))
}

impl Peer {
    /// Whether `op` is of a session that has ended.
    pub(super) fn is_over(&self, op: &OpenOp) -> bool {
        let since = |epoch: u32| op.epoch.wrapping_sub(epoch) as i32;
        let closed = self.closed_epoch != 0 && since(self.closed_epoch) <= 0;
        let left = self.state == State::Answered && since(self.peer_epoch) < 0;
        op.inc == self.inc && (closed || left) && !planted(Bug::NoSessionEpoch)
    }
}
