//! Sessions: opening, timing, probing, ending. The table of states stands in `peer.rs`.
//!
//! Silence counts only while our own loop ran (rule S10): [`Node::tick`] keeps a clock that stands
//! still when nobody called us in time, and a peer is dead by that clock.

use barewire_driver::port::MacAddr;

use super::acks::ACK_DELAY_NS;
use super::ops::WrFlags;
use super::peer::{GENERATIONS, GRANT_FIRST, Peer, State, next_sid};
use super::{Node, Reply};
use crate::error::Error;
use crate::flags::CqFlags;
use crate::plant::{Bug, planted};
use crate::rel::cwnd::Cwnd;
use crate::rel::psn::Psn;
use crate::rel::rtt::Rtt;
use crate::rel::sack::RcvBitmap;
use crate::rel::sent::{BodyRef, SendWindow, WINDOW};
use crate::slab::NONE;
use crate::types::{CqErr, Cqe, FI_ADDR_UNSPEC, Instant, ProvErrno};
use crate::wire::{self, AtomicOp, Base, OpenOp, RstOp, RstReason, Ty};

/// Replies to strangers in a millisecond.
pub(crate) const REPLIES_PER_MS: u32 = 4;

/// Records looked at for one to forget when a stranger's OPEN finds the table full. It comes again
/// if none of these can be.
const EVICT_LOOKS: usize = 16;

/// A gap between two polls above which our own silence is not held against the peer.
const STARVED_NS: u64 = 1_000_000;

/// What a tail probe waits for besides round trips: an acknowledgement that its sender holds back.
const PROBE_SLACK_NS: u64 = ACK_DELAY_NS + 10_000;

/// Probes without an answer before a peer may be dead.
const PROBES_MIN: u8 = 8;

impl Node {
    /// Moves the clock of our own running on.
    #[inline]
    pub(crate) fn tick(&mut self, now: Instant) {
        let gap = now.since(self.polled_at);
        if gap <= STARVED_NS {
            self.active_ns += gap;
            self.polled_at = self.polled_at.max(now);
            return;
        }
        self.tick_after_gap(now, gap);
    }

    #[cold]
    fn tick_after_gap(&mut self, now: Instant, gap: u64) {
        let due = self.wheel.next_deadline().unwrap_or(now);
        let overrun = now.since(due.max(self.polled_at));
        let counted = overrun <= STARVED_NS || planted(Bug::SilenceWhileStarved);
        self.active_ns += if counted { gap } else { gap - overrun };
        self.polled_at = now;
    }

    /// An operation is about to wait for `p`: if none did, its silence counts from now.
    pub(crate) fn begin_to_wait(&mut self, now: Instant, p: u32) {
        let active = self.active_ns;
        let peer = &mut self.peers[p];
        if !peer.owes() {
            peer.heard = active;
            peer.probes = 0;
            peer.probe_at = now;
        }
    }

    /// There is something to send to `p`: opens a session or puts it into the queue.
    pub(crate) fn kick(&mut self, now: Instant, p: u32) {
        match self.peers[p].state {
            State::Idle => self.begin(now, p, State::Opening),
            State::Opening | State::Answered => {}
            State::Open => self.make_ready(p),
        }
    }

    /// Gives the peer a new session of ours in `state`, which has an OPEN to send.
    fn begin(&mut self, now: Instant, p: u32, state: State) {
        let mut first = Psn(self.random() as u32);
        self.epoch = self.epoch.wrapping_add(1);
        let generation = u32::from(self.sid_gen[p as usize]);
        if planted(Bug::NoSessionEpoch) {
            first = Psn(1);
        } else {
            self.sid_gen[p as usize] = ((generation + 1) % GENERATIONS) as u16;
        }
        let grant = GRANT_FIRST.min(self.blocks_unpromised as u32);
        let (epoch, active, lossless) = (self.epoch, self.active_ns, self.lossless);
        let peer = &mut self.peers[p];
        peer.state = state;
        peer.sid = next_sid(p, generation);
        peer.epoch = epoch;
        peer.snd = SendWindow::new(first);
        if lossless {
            peer.snd.cwnd = Cwnd::whole();
        }
        peer.rcv = RcvBitmap::new();
        peer.rtt = Rtt::default();
        (peer.snd.credit, peer.credit_used, peer.consumed) = (0, 0, 0);
        (peer.granted, peer.target) = (grant, GRANT_FIRST as u16);
        (peer.backoff, peer.probes, peer.probed, peer.refused) = (0, 0, false, 0);
        (peer.owed, peer.ack_now, peer.want_ping, peer.want_nop) = (0, false, false, false);
        (peer.nack.want, peer.has_nop_for, peer.has_asked) = (false, false, false);
        peer.want_open = true;
        peer.heard = active;
        peer.probe_at = now;
        peer.reorder_at = Instant(0);
        self.blocks_unpromised -= grant as usize;
        if grant == 0 && !self.peers[p].starved {
            // The peer cannot use anything up and so would never be granted more.
            self.peers[p].starved = true;
            self.starved.push_back(p);
        }
        self.make_ready(p);
        self.arm_timer(now, p);
    }

    /// The session with ourselves has one record for both of its ends.
    pub(crate) fn open_to_self(&mut self, p: u32) {
        let now = self.polled_at;
        self.begin(now, p, State::Open);
        self.note_life(p, self.settings.incarnation);
        let peer = &mut self.peers[p];
        peer.want_open = false;
        peer.remote_sid = peer.sid;
        peer.rcv_nxt = peer.snd.nxt;
        peer.snd.credit = peer.granted;
        peer.peer_epoch = peer.epoch;
        peer.frame_max = self.frame_max;
    }

    /// Takes an OPEN, first or answering.
    pub(crate) fn on_open(&mut self, now: Instant, base: &Base, op: &OpenOp) {
        let me = self.settings.incarnation;
        if base.src == self.mac {
            self.counters.rx_bad_open += 1;
            return;
        }
        let other = op.target_inc != 0 && op.target_inc != me;
        if other && !planted(Bug::NoIncarnationCheck) || self.is_unnamed(op) {
            self.refuse_open(now, base, op, RstReason::WrongIncarnation);
            return;
        }
        let Some(p) = self.peer_of(now, base.src, EVICT_LOOKS) else {
            self.counters.rx_bad_open += 1;
            return;
        };
        let peer = &self.peers[p];
        let (ours, theirs, over) = compare(peer, op);
        let named = peer.inc == 0 || peer.inc == op.inc;
        match peer.state {
            State::Idle if op.is_answer() => {
                self.refuse_open(now, base, op, RstReason::UnknownSession);
            }
            State::Idle if over => self.refuse_open(now, base, op, RstReason::Closed),
            State::Idle => self.answer(now, p, base, op),
            State::Opening if ours && (named || planted(Bug::NoIncarnationCheck)) => {
                self.pair(p, base, op);
                self.opened(now, p);
                self.peers[p].ack_now = true;
            }
            State::Opening if op.is_answer() || over => {
                self.refuse_open(now, base, op, RstReason::UnknownSession);
            }
            State::Opening if peer.inc != 0 && peer.inc != op.inc => {
                // The application named another life. That one does not exist any more, which the
                // answer to our OPEN will say.
                self.counters.rx_bad_open += 1;
            }
            State::Opening => {
                self.pair(p, base, op);
                self.peers[p].state = State::Answered;
                self.peers[p].want_open = true;
                self.make_ready(p);
            }
            State::Answered if theirs && ours => {
                self.opened(now, p);
                self.peers[p].ack_now = true;
            }
            State::Answered if theirs => {
                self.peers[p].want_open = true;
                self.make_ready(p);
            }
            State::Answered if over || op.is_answer() => {
                self.refuse_open(now, base, op, RstReason::UnknownSession);
            }
            State::Answered => self.answer_anew(now, p, base, op),
            State::Open if theirs => {
                self.peers[p].ack_now = true;
                self.make_ready(p);
            }
            State::Open => {
                // Either this OPEN is old or the peer has lost the session: it will say which.
                self.counters.rx_bad_open += 1;
                self.counters.tx_probes += 1;
                self.peers[p].want_ping = true;
                self.make_ready(p);
            }
        }
    }

    /// Whether an OPEN names no incarnation and this node takes only such as name its own: then its
    /// sender was told the address by nobody.
    fn is_unnamed(&mut self, op: &OpenOp) -> bool {
        let unnamed = op.target_inc == 0 && !self.settings.by_name;
        self.counters.rx_unnamed += u64::from(unnamed);
        unnamed
    }

    /// They gave up the session that we answered. Ours pairs with that one only (S3).
    fn answer_anew(&mut self, now: Instant, p: u32, base: &Base, op: &OpenOp) {
        if self.peers[p].inc == op.inc {
            self.forget(p);
        } else {
            // What waits for it was meant for the life that it was with.
            self.end_session(now, p, Error::ConnReset, false);
        }
        self.answer(now, p, base, op);
    }

    /// Answers a first OPEN with a new session of ours.
    fn answer(&mut self, now: Instant, p: u32, base: &Base, op: &OpenOp) {
        if self.peers[p].inc != op.inc {
            self.peers[p].closed_epoch = 0;
        }
        self.begin(now, p, State::Answered);
        self.pair(p, base, op);
    }

    /// Notes who the other end of the session is.
    fn pair(&mut self, p: u32, base: &Base, op: &OpenOp) {
        let frame_max = self.frame_max.min(op.max_frame);
        self.note_life(p, op.inc);
        let peer = &mut self.peers[p];
        peer.peer_epoch = op.epoch;
        peer.remote_sid = op.sid;
        peer.rcv_nxt = base.psn;
        peer.rx_newest = base.psn;
        peer.snd.credit = op.grant;
        peer.frame_max = frame_max;
    }

    /// Both ends know: what waits may leave.
    pub(crate) fn opened(&mut self, now: Instant, p: u32) {
        let active = self.active_ns;
        // Ways that ask fewer questions are for nodes that let every peer in.
        let plain = !(self.settings.inserted || self.lossless && self.crc);
        let peer = &mut self.peers[p];
        peer.state = State::Open;
        peer.plain = plain;
        peer.note_order();
        peer.heard = active;
        (peer.backoff, peer.probes) = (0, 0);
        peer.probe_at = now;
        peer.progress_at = now;
        peer.want_open = false;
        self.counters.sessions_opened += 1;
        self.make_ready(p);
        self.arm_timer(now, p);
    }

    fn refuse_open(&mut self, now: Instant, base: &Base, op: &OpenOp, reason: RstReason) {
        self.counters.rx_bad_open += 1;
        let rst = RstOp {
            echo_sid: base.dst_sid,
            echo_psn: base.psn,
            life: wire::life_of(self.settings.incarnation),
            victim_inc: op.inc,
            victim_epoch: op.epoch,
            reason,
            version: wire::VERSION,
        };
        self.reply_rst(now, base.src, op.sid, rst);
    }

    /// A packet named a session that does not exist here.
    pub(crate) fn on_no_session(&mut self, now: Instant, src: MacAddr, sid: u32, psn: Psn) {
        self.counters.rx_no_session += 1;
        let rst = RstOp {
            echo_sid: sid,
            echo_psn: psn,
            life: wire::life_of(self.settings.incarnation),
            victim_inc: 0,
            victim_epoch: 0,
            reason: RstReason::UnknownSession,
            version: wire::VERSION,
        };
        self.reply_rst(now, src, 0, rst);
    }

    /// Puts an RST into the queue of replies, as far as their rate allows.
    fn reply_rst(&mut self, now: Instant, dst: MacAddr, dst_sid: u32, rst: RstOp) {
        if now.since(self.reply_refill) >= 1_000_000 {
            self.reply_refill = now;
            self.reply_tokens = REPLIES_PER_MS;
        }
        if self.reply_tokens == 0 || self.replies.len() >= 64 {
            self.counters.tx_replies_limited += 1;
            return;
        }
        self.reply_tokens -= 1;
        let psn = Psn(0);
        let base = self.control(dst, Ty::Rst, dst_sid, psn);
        let mut reply = Reply { bytes: [0; Reply::LEN], len: 0 };
        let (head, rest) = reply.bytes.split_first_chunk_mut().expect("a reply holds a head");
        base.emit(head);
        reply.len = wire::BASE_LEN + rst.emit(rest);
        if self.crc {
            let crc = wire::crc_of_head(&reply.bytes[..reply.len]).to_le_bytes();
            reply.bytes[reply.len..reply.len + wire::TRAILER_LEN].copy_from_slice(&crc);
            reply.len += wire::TRAILER_LEN;
        }
        self.replies.push_back(reply);
        self.note_due();
    }

    /// The base of a packet that carries no acknowledgement.
    fn control(&self, dst: MacAddr, ty: Ty, dst_sid: u32, psn: Psn) -> Base {
        Base {
            dst,
            src: self.mac,
            ty,
            ar: false,
            rtx: false,
            crc: self.crc,
            dst_sid,
            psn,
            cack: Psn(0),
            grant: 0,
            plen: 0,
        }
    }

    /// Takes an RST. Only one that proves to know the session is believed (S4): it echoes a packet
    /// that we could have sent, or our own incarnation and epoch.
    pub(crate) fn on_rst(&mut self, now: Instant, base: &Base, op: &RstOp) {
        let known = self.by_mac.get(&self.peers, base.src).filter(|_| base.src != self.mac);
        let Some(p) = known else {
            self.counters.rx_bad_rst += 1;
            return;
        };
        let peer = &self.peers[p];
        let back = peer.snd.nxt.0.wrapping_sub(op.echo_psn.0);
        let echoes = op.echo_sid != 0
            && op.echo_sid == peer.remote_sid
            && back <= peer.snd.in_flight() + WINDOW;
        let names = op.victim_inc == self.settings.incarnation && op.victim_epoch == peer.epoch;
        let idle = peer.state == State::Idle;
        if idle || !(echoes && peer.state == State::Open || names || planted(Bug::ResetWithoutEcho))
        {
            self.counters.rx_bad_rst += 1;
            return;
        }
        self.counters.sessions_reset += 1;
        let stale_answer = peer.state == State::Answered && op.reason == RstReason::UnknownSession;
        if stale_answer {
            // We answered an OPEN that its sender no longer means. Nothing was sent yet.
            self.forget(p);
            if !self.peers[p].wrs.is_empty() || self.peers[p].coll_waits > 0 {
                self.begin(now, p, State::Opening);
            }
            return;
        }
        let err = match op.reason {
            RstReason::Version => Error::NoProtoOpt,
            _ => Error::ConnReset,
        };
        self.end_session(now, p, err, false);
        if op.life != wire::life_of(self.peers[p].inc) || op.reason == RstReason::WrongIncarnation {
            self.note_life(p, 0);
            self.peers[p].closed_epoch = 0;
        }
    }

    /// Forgets a session over which nothing was sent yet. Operations stay queued.
    fn forget(&mut self, p: u32) {
        let peer = &mut self.peers[p];
        self.blocks_unpromised += peer.outstanding() as usize;
        (peer.granted, peer.consumed) = (0, 0);
        peer.closed_epoch = peer.peer_epoch;
        peer.state = State::Idle;
        (peer.plain, peer.in_order, peer.quiet) = (false, false, false);
        (peer.short_left, peer.take_left) = (0, 0);
        (peer.sid, peer.remote_sid) = (0, 0);
        (peer.want_open, peer.ack_now) = (false, false);
        peer.timer_at = Instant(u64::MAX);
        self.wheel.disarm(p);
    }

    /// Ends a session: every operation that needs it ends with `err`, and what it held is free
    /// (S8). The peer is told once, best effort, if `tell`.
    pub(crate) fn end_session(&mut self, now: Instant, p: u32, err: Error, tell: bool) {
        let state = self.peers[p].state;
        if state != State::Idle {
            if tell && self.peers[p].mac() != self.mac {
                self.tell_closed(now, p);
            }
            self.drop_packets(p);
        }
        while self.peers[p].wrs.head != NONE {
            let w = self.peers[p].wrs.head;
            let wr = &self.tx[w];
            let begun = !wr.flags.contains(WrFlags::IN_TXQ) || wr.sent > 0;
            if begun && wr.flags.contains(WrFlags::ANNOUNCED) && planted(Bug::WaitingForgotten) {
                self.unlink_wr(w);
                continue;
            }
            let prov = if begun && state == State::Open {
                ProvErrno::UnknownOutcome
            } else {
                ProvErrno::NotExecuted
            };
            self.fail_wr(w, err, prov);
        }
        if self.peers[p].short_ops() > 0 {
            self.fail_short_ops(p, err);
        }
        while self.peers[p].pulls.head != NONE {
            let idx = self.peers[p].pulls.head;
            self.fail_pull(idx, err);
        }
        self.abort_inbound(now, p);
        self.drop_announced(now, p);
        self.coll_peer_lost(p, err);
        if state == State::Idle {
            return;
        }
        self.forget(p);
        let peer = &mut self.peers[p];
        peer.rcv = RcvBitmap::new();
        (peer.owed, peer.refused) = (0, 0);
        (peer.want_ping, peer.want_nop) = (false, false);
        (peer.bad_seq, peer.written) = (NONE, 0);
        peer.answered(u16::MAX);
        let credit = peer.snd.credit;
        peer.snd = SendWindow::new(peer.snd.nxt);
        peer.snd.credit = credit;
        if peer.mac() == self.mac {
            self.open_to_self(p);
        }
    }

    /// Tells the peer that the session is over.
    fn tell_closed(&mut self, now: Instant, p: u32) {
        let peer = &self.peers[p];
        let rst = RstOp {
            echo_sid: peer.sid,
            echo_psn: peer.rcv_nxt,
            life: wire::life_of(self.settings.incarnation),
            victim_inc: peer.inc,
            victim_epoch: peer.peer_epoch,
            reason: RstReason::Closed,
            version: wire::VERSION,
        };
        let (mac, sid, known) = (peer.mac(), peer.remote_sid, peer.state != State::Opening);
        if known {
            self.reply_rst(now, mac, sid, rst);
        }
    }

    /// Gives back what is in flight and what waits for an earlier packet.
    fn drop_packets(&mut self, p: u32) {
        while let Some(idx) = self.peers[p].snd.pop_any(&mut self.sent) {
            let entry = self.sent.free(idx);
            if let BodyRef::Pack { buf, .. } = entry.body {
                self.packs.free.push(buf);
            } else {
                self.drop_body(entry.body);
            }
        }
        while self.peers[p].jobq.head != NONE {
            self.free_job(self.peers[p].jobq.head);
        }
        while let Some(idx) = self.peers[p].held.pop_front(&mut self.held) {
            if !planted(Bug::HeldPacketLeaked) {
                self.held.free(idx);
            }
        }
    }

    /// Throws away announced messages of a peer that can no longer be pulled.
    fn drop_announced(&mut self, now: Instant, p: u32) {
        if self.peers[p].stored == 0 {
            return;
        }
        let announced: Vec<u32> = (self.stored.iter())
            .filter(|(_, m)| m.payload.peer == p && m.payload.is_announced() && !m.payload.dead)
            .map(|(idx, _)| idx)
            .collect();
        for msg in announced {
            if self.stored[msg].payload.claimed {
                let m = &mut self.stored[msg].payload;
                (m.dead, m.src_op) = (true, NONE);
            } else {
                self.unmatch_stored(msg);
                self.free_stored(now, msg);
            }
        }
    }

    /// Forgets the session with `mac` without telling anybody, as if its memory had been lost.
    /// For tests of what the other side makes of it.
    pub fn drop_session(&mut self, now: Instant, mac: MacAddr) {
        if let Some(p) = self.by_mac.get(&self.peers, mac) {
            self.end_session(now, p, Error::ConnReset, false);
        }
    }

    /// The device is gone: every operation ends in [`Error::NetDown`], and so does every later one.
    pub fn port_gone(&mut self, now: Instant) {
        self.gone = true;
        self.note_due();
        let peers: Vec<u32> = self.peers.iter().map(|(p, _)| p).collect();
        for p in peers {
            self.end_session(now, p, Error::NetDown, false);
        }
        self.srx_port_gone();
        let own = self.eps.iter().filter(|(_, ep)| ep.sharers.is_none());
        let eps: Vec<u32> = own.map(|(e, _)| e).collect();
        for e in eps {
            for kind in 0..2 {
                while let Some(recv) = self.eps[e].matcher[kind].first_posted(&self.posted) {
                    self.eps[e].matcher[kind].unlink_posted(&mut self.posted, recv);
                    self.fail_recv(recv, Error::NetDown);
                }
            }
        }
        self.coll_port_gone(now);
    }

    /// Makes the wheel call at the time when something is due for `p`, unless it will earlier.
    pub(crate) fn arm_timer(&mut self, _now: Instant, p: u32) {
        let Some(due) = self.due(&self.peers[p]) else { return };
        let peer = &mut self.peers[p];
        if due < peer.timer_at {
            peer.timer_at = due;
            self.wheel.arm(p, due);
        }
    }

    /// When something is due for a peer, if anything is.
    fn due(&self, peer: &Peer) -> Option<Instant> {
        let silent = self.active_ns.saturating_sub(peer.heard);
        // When the silence will have lasted T_dead; that has passed if only probes are missing.
        let left = self.settings.t_dead_ns.checked_sub(silent).filter(|&left| left > 0);
        let death = left.map_or(Instant(u64::MAX), |left| self.polled_at + left);
        match peer.state {
            State::Idle => None,
            State::Opening | State::Answered => {
                Some((peer.probe_at + self.open_rto(peer)).min(death))
            }
            State::Open => {
                let probe = || (peer.probe_at + self.probe_interval(peer)).min(death);
                let mut due = peer.owes().then(probe);
                let mut sooner = |at: Instant| due = Some(due.map_or(at, |d| d.min(at)));
                // Once its time has come it goes out with the next turn.
                if let Some(at) = peer.nack.waits(self.polled_at) {
                    sooner(at);
                }
                if !self.lossless && !peer.snd.is_empty() {
                    sooner(peer.progress_at + self.patience(peer));
                    if peer.reorder_at != Instant(0) {
                        sooner(peer.reorder_at);
                    }
                }
                due
            }
        }
    }

    /// How long the oldest packet in flight may go without progress: two round trips, their
    /// variation and the peer's delay until the tail probe, then the retransmission timeout.
    pub(super) fn patience(&self, peer: &Peer) -> u64 {
        let rto = peer.rtt.rto_ns(self.rto_floor_ns, peer.backoff);
        if peer.probed || peer.rtt.srtt_ns() == 0 {
            return rto;
        }
        (2 * peer.rtt.srtt_ns() + 4 * peer.rtt.var_ns() + PROBE_SLACK_NS).min(rto)
    }

    /// How long an OPEN may go without an answer.
    fn open_rto(&self, peer: &Peer) -> u64 {
        Rtt::default().rto_ns(self.rto_floor_ns, peer.backoff)
    }

    /// A tenth of T_dead; less while a lost grant may be all that keeps us from sending, and twice
    /// as long again for each answer that brought none.
    fn probe_interval(&self, peer: &Peer) -> u64 {
        let tenth = self.settings.t_dead_ns / 10;
        if self.lossless || !peer.is_stalled() {
            return tenth;
        }
        peer.rtt.rto_ns(self.rto_floor_ns, peer.backoff).min(tenth)
    }

    /// The wheel called for `p`.
    pub(crate) fn on_timer(&mut self, now: Instant, p: u32) {
        self.peers[p].timer_at = Instant(u64::MAX);
        let silent = self.active_ns.saturating_sub(self.peers[p].heard);
        let overdue = silent >= self.settings.t_dead_ns;
        match self.peers[p].state {
            State::Idle => return,
            State::Opening | State::Answered => {
                if overdue {
                    self.counters.sessions_dead += 1;
                    self.end_session(now, p, Error::HostUnreach, false);
                    return;
                }
                let rto = self.open_rto(&self.peers[p]);
                let peer = &mut self.peers[p];
                if now >= peer.probe_at + rto {
                    peer.want_open = true;
                    peer.backoff = peer.backoff.saturating_add(1);
                    peer.probe_at = now;
                    self.make_ready(p);
                }
            }
            State::Open => {
                let silent = overdue && self.peers[p].owes() && self.peers[p].probes >= PROBES_MIN;
                // Alive, but what it announced does not come, and others want to pull.
                if silent || self.pulls_stalled(p) {
                    self.counters.sessions_dead += 1;
                    self.end_session(now, p, Error::HostUnreach, true);
                    return;
                }
                self.on_open_timer(now, p);
            }
        }
        self.arm_timer(now, p);
    }

    fn on_open_timer(&mut self, now: Instant, p: u32) {
        if !self.lossless && !self.peers[p].snd.is_empty() {
            self.on_loss_timer(now, p);
        }
        if self.peers[p].nack.is_due(now) {
            self.make_ready(p);
        }
        let interval = self.probe_interval(&self.peers[p]);
        let peer = &mut self.peers[p];
        if peer.owes() && now >= peer.probe_at + interval {
            peer.want_ping = true;
            self.counters.tx_probes += 1;
            (peer.probes, peer.take_left) = (peer.probes.saturating_add(1), 0);
            if peer.is_stalled() {
                peer.backoff = peer.backoff.saturating_add(1);
            }
            peer.probe_at = now;
            self.make_ready(p);
        }
    }

    fn on_loss_timer(&mut self, now: Instant, p: u32) {
        let patience = self.patience(&self.peers[p]);
        let peer = &mut self.peers[p];
        if peer.reorder_at != Instant(0) && now >= peer.reorder_at {
            peer.reorder_at = Instant(0);
            let before = now.0.saturating_sub(peer.rtt.srtt_ns() + peer.rtt.reorder_ns());
            peer.snd.expire(&mut self.sent, Instant(before));
            self.make_ready(p);
        }
        let peer = &mut self.peers[p];
        if now < peer.progress_at + patience {
            return;
        }
        peer.progress_at = now;
        if !peer.probed && peer.rtt.srtt_ns() > 0 {
            peer.probed = true;
            if let Some(idx) = peer.snd.newest(&self.sent) {
                peer.snd.guess(&mut self.sent, idx);
            }
        } else if !(planted(Bug::RetransmitOnce) && peer.backoff > 0) {
            self.counters.timeouts += 1;
            peer.backoff = peer.backoff.saturating_add(1);
            // Perhaps only the answer is late. What the two ends of the flight bring back tells
            // which of the others are lost.
            let (oldest, newest) = (peer.snd.oldest(&self.sent), peer.snd.newest(&self.sent));
            for idx in oldest.into_iter().chain(newest) {
                peer.snd.guess(&mut self.sent, idx);
            }
        }
        self.peers[p].snd.make_room(&mut self.sent);
        self.make_ready(p);
    }

    /// Takes the memory of a request out of reach of the packets in flight: they keep their
    /// numbers and carry nothing.
    pub(crate) fn abandon_wr(&mut self, w: u32) {
        let wr = &self.tx[w];
        let p = wr.peer;
        let half = wr.sent > 0
            && wr.sent < wr.len
            && !wr.flags.intersects(WrFlags::ANNOUNCED | WrFlags::ALL_SENT | WrFlags::RMA);
        let next = wr.pull_op;
        self.peers[p].snd.for_each(&mut self.sent, |entry| {
            if let BodyRef::Pack { .. } = entry.body {
                if entry.wr == w {
                    entry.wr = next;
                }
            } else if entry.wr == w {
                match entry.ty {
                    // The target has it or will have it, and answers. That is waited for.
                    Ty::Read => (entry.body, entry.wr) = (BodyRef::None, NONE),
                    Ty::Atomic if AtomicOp::fetches(&entry.op) => {
                        AtomicOp::make_void(&mut entry.op);
                        (entry.body, entry.wr) = (BodyRef::None, NONE);
                    }
                    _ => entry.become_nop(),
                }
            }
        });
        for (_, other) in self.tx.iter_mut() {
            if other.peer == p && other.pull_op == w && other.flags.contains(WrFlags::PACKED) {
                other.pull_op = next;
            }
        }
        if half {
            self.peers[p].want_nop = true;
            self.make_ready(p);
        }
    }

    /// Takes a request out of every list.
    fn unlink_wr(&mut self, w: u32) {
        let wr = &mut self.tx[w];
        let p = wr.peer;
        let flags = wr.flags;
        wr.flags.remove(WrFlags::IN_TXQ | WrFlags::IN_DATAQ);
        let peer = &mut self.peers[p];
        if flags.contains(WrFlags::IN_TXQ) {
            peer.txq.remove(&mut self.tx, w);
        }
        if flags.contains(WrFlags::IN_DATAQ) {
            peer.dataq.remove(&mut self.tx, w);
        }
        peer.wrs.remove(&mut self.tx, w);
    }

    /// Gives back a request whose outcome has been written.
    pub(crate) fn free_wr(&mut self, w: u32) {
        if self.tx[w].flags.contains(WrFlags::GROUP) {
            self.free_group(w);
        }
        self.unlink_wr(w);
        let wr = &self.tx[w];
        let (ep, rma) = (wr.ep, wr.flags.contains(WrFlags::RMA).then_some(wr.pull_op));
        self.tx.discard(w);
        if ep != NONE {
            self.eps[ep].tx_used -= 1;
        }
        if let Some(rma) = rma {
            self.free_rma(rma);
        }
    }

    /// Writes the success of a request, once.
    #[inline]
    pub(crate) fn report_wr(&mut self, w: u32) {
        let wr = &mut self.tx[w];
        if wr.flags.contains(WrFlags::REPORTED) {
            return;
        }
        wr.flags |= WrFlags::REPORTED;
        if wr.flags.intersects(WrFlags::RMA | WrFlags::GROUP) {
            let one_sided = wr.flags.contains(WrFlags::RMA);
            return if one_sided { self.report_rma(w) } else { self.report_group(w) };
        }
        let flags = send_flags(wr.flags);
        let cqe = Cqe { op_context: wr.context, flags, src: FI_ADDR_UNSPEC, ..Cqe::default() };
        let wanted = wr.flags.contains(WrFlags::CQE);
        let ep = &mut self.eps[wr.ep];
        ep.counters.sent += 1;
        ep.counters.sent_bytes += wr.len;
        let (cntr, cq) = (ep.tx_cntr, &mut self.cqs[ep.tx_cq].cq);
        if wanted {
            cq.push(cqe);
        } else {
            cq.unreserve();
        }
        self.count(cntr, true);
    }

    /// Ends a request with an error entry, unless its success has been told.
    pub(crate) fn fail_wr(&mut self, w: u32, err: Error, prov_errno: ProvErrno) {
        self.report_failure(w, err, prov_errno);
        self.free_wr(w);
    }

    /// Ends a request whose endpoint is being closed. The record stays if the peer has asked for
    /// the message and must be told that it will not come.
    pub(crate) fn cancel_wr(&mut self, w: u32) {
        self.report_failure(w, Error::Canceled, ProvErrno::UnknownOutcome);
        let wr = &mut self.tx[w];
        if wr.asked == 0 || wr.flags.contains(WrFlags::ALL_SENT) {
            self.free_wr(w);
            return;
        }
        self.send_bufs[w as usize] = barewire_driver::mem::IoBuf::EMPTY;
        let (e, p) = (std::mem::replace(&mut wr.ep, NONE), wr.peer);
        self.eps[e].tx_used -= 1;
        if !wr.flags.contains(WrFlags::IN_DATAQ) {
            wr.flags |= WrFlags::IN_DATAQ;
            self.peers[p].dataq.push_back(&mut self.tx, w);
        }
        self.make_ready(p);
    }

    fn report_failure(&mut self, w: u32, err: Error, prov_errno: ProvErrno) {
        let wr = &mut self.tx[w];
        if wr.ep != NONE && !wr.flags.contains(WrFlags::REPORTED) {
            wr.flags |= WrFlags::REPORTED;
            if wr.flags.contains(WrFlags::GROUP) {
                return self.fail_group(w, err, prov_errno);
            }
            let one_sided = wr.flags.contains(WrFlags::RMA);
            let (op_context, tag, e, p) = (wr.context, wr.tag, wr.ep, wr.peer);
            // Bytes of a refused write that are written nevertheless.
            let olen = if one_sided { wr.asked } else { 0 };
            let (flags, cntr) = if one_sided {
                self.rma_outcome(w)
            } else {
                (send_flags(wr.flags), self.eps[e].tx_cntr)
            };
            let cqe = Cqe { op_context, flags, tag, src: FI_ADDR_UNSPEC, ..Cqe::default() };
            let failure = CqErr { cqe, olen, err, prov_errno, err_data: None };
            self.tell_failure((e, p), failure, cntr);
        }
    }
}

pub(super) fn send_flags(flags: WrFlags) -> CqFlags {
    CqFlags::SEND | if flags.contains(WrFlags::TAGGED) { CqFlags::TAGGED } else { CqFlags::MSG }
}

/// Whether an OPEN answers ours, whether it is of the session that we know, and whether it is of
/// one that is over.
fn compare(peer: &Peer, op: &OpenOp) -> (bool, bool, bool) {
    let ours = op.echo_sid == peer.sid && op.echo_epoch == peer.epoch && peer.sid != 0;
    let theirs = op.inc == peer.inc && op.epoch == peer.peer_epoch;
    let over = op.inc == peer.inc
        && op.epoch.wrapping_sub(peer.closed_epoch) as i32 <= 0
        && peer.closed_epoch != 0
        && !planted(Bug::NoSessionEpoch);
    (ours, theirs, over)
}
