//! Session set-up: address validation (that the other end receives) and the frame lengths that pass
//! the path.
//!
//! OPENs carry both (`docs/wire.md`, "Sessions"). Processing an OPEN without proof is bounded:
//! [`Openings`] has a rate limit for them, and peers that have not shown that they receive share
//! [`HALF_OPEN_MAX`] sessions.

use std::collections::HashMap;

use barewire_driver::frame::{Body, ETH_HDR_LEN, TxFrame};
use barewire_driver::port::{PortCaps, Station, Tx};

use super::backoff::Backoff;
use super::cookie::Secret;
use super::mtu::{LENGTHS, Search};
use super::ops::WrFlags;
use super::other_key::KeyMismatches;
use super::peer::{GENERATIONS, Peer, State, next_sid};
use super::pending_reset::PendingReset;
use super::secured::{EndedSession, Seals};
use super::stuck::Progress;
use super::versions::LoggedStations;
use super::{Control, EndReason, FrameSink, NodeSettings, Operations, Reply, Sessions};
use crate::error::Error;
use crate::idx::{PeerIdx, TxIdx};
use crate::plant::{Bug, planted};
use crate::rel::psn::Psn;
use crate::types::{Instant, ProvErrno};
use crate::wire::{Base, OpenOp, RstReason, Ty};

/// Half-open sessions with nodes that have not shown that they receive.
const HALF_OPEN_MAX: usize = 16;

/// Age at which a half-open session may be evicted for the next: far above a round trip and above a
/// pause of the opener between two polls.
const HALF_OPEN_NS: u64 = 1_000_000_000;

/// OPENs without proof that are processed per millisecond. At some 2 us each they take 3 % of a
/// processor, and a thousand peers are answered within a tenth of a second.
const OPENS_PER_MS: u32 = 16;

/// OPENs of one length before the next length is tried.
const TRIES: u8 = 2;

/// OPENs after which all lengths have been tried once more, for 1 to 3 lengths.
const ROUND: u8 = 6 * TRIES;

/// Frame lengths on the path to a peer whose session is being opened, in bytes after the Ethernet
/// header. On a lossless port every length passes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Path {
    /// The cookie to echo in our OPENs; 0 if the peer asked for none.
    cookie: u64,
    /// The lesser of the two `max_frame`; 0 before the peer's is known.
    most: u16,
    /// Length of the longest frame known to pass in both directions.
    passed: u16,
    /// Length of the shortest OPEN with an echo that was sent, 0 if none was: if the peer has
    /// received any of them, this length passes.
    least: u16,
    /// Length of the OPEN to answer; 0 if none.
    answers: u16,
    /// Length of the longest OPEN that arrived.
    arrived: u16,
    /// OPENs sent. At the maximum of the type it goes back by one [`ROUND`].
    tries: u8,
    /// Time and reason of the first refusal of the key.
    refusal: Option<(Instant, RstReason)>,
    /// Credit granted in our OPENs that answer none: the value of the first OPEN, since all of them
    /// carry the handshake of one. Later grants are in each packet.
    offered: Option<u32>,
    /// When the due OPEN is tried again after the port found no route: the process may not have
    /// been started yet, and a waiting program must be able to sleep.
    no_route: Backoff,
}

impl Path {
    /// Length of our next OPEN that is not an answer, on a port of `max` bytes.
    fn next_len(&self, max: u16) -> u16 {
        let shorter = LENGTHS.iter().copied().filter(|&len| len < max);
        let steps = 1 + shorter.clone().count();
        match usize::from(self.tries / TRIES) % steps {
            0 => max,
            step => shorter.clone().nth(step - 1).unwrap_or(max),
        }
    }

    /// Records that an OPEN of `len` bytes arrived.
    fn note_arrival(&mut self, len: u16) {
        self.answers = self.answers.max(len);
        self.arrived = self.arrived.max(len);
    }
}

/// A session made for the OPEN of a station without proof.
#[derive(Clone, Copy, Debug)]
struct HalfOpen {
    p: PeerIdx,
    sid: u32,
    since: Instant,
}

/// State of sessions that are being opened, and limits on what OPENs without proof cost.
#[derive(Debug)]
pub struct Openings {
    /// By peer slot, of sessions that are being opened.
    paths: HashMap<PeerIdx, Path>,
    /// By peer slot, of sessions that retransmit.
    pub(super) progress: HashMap<PeerIdx, Progress>,
    /// By peer slot, of open sessions whose frames are shorter than both ends accept.
    pub(super) searches: HashMap<PeerIdx, Search>,
    /// Generation of the sid that the next session in each peer slot gets.
    sid_gen: Vec<u16>,
    /// Epoch of the last session.
    pub(super) epoch: u32,
    pub(super) secret: Secret,
    pub(super) other_versions: LoggedStations,
    /// Peers with this node's MAC that share no memory with it.
    same_mac: LoggedStations,
    pub(super) other_keys: KeyMismatches,
    /// By peer slot: resets without proof, of open sealed sessions.
    pub(super) pending_resets: HashMap<PeerIdx, PendingReset>,
    /// Keys, if frames are sealed. Absent while frames are sent.
    pub(super) seals: Option<Box<Seals>>,
    /// Peers are known by certificates. Valid also while frames are sent.
    pub(super) certified: bool,
    /// By peer slot: the sid that the peer chose, where the session is kept under another number
    /// here ([`remote_sid`](Peer::remote_sid)), since a session of another tenant has that sid.
    pub(super) other_names: HashMap<PeerIdx, u32>,
    /// Sessions whose keys are erased when the seals are back.
    pub(super) ended_sealed: Vec<EndedSession>,
    /// Padding of an OPEN or a PROBE, on a lossy port.
    padding: Vec<u8>,
    /// Sessions without proof, oldest first. Confirmed and ended sessions may still be listed.
    half_open: Vec<HalfOpen>,
    /// OPENs without proof that may be processed until a millisecond after `refilled`.
    tokens: u32,
    refilled: Instant,
}

impl Openings {
    /// For a node with settings `s`, on a port for frames of `frame_len` bytes.
    pub(super) fn new(s: &NodeSettings, caps: &PortCaps, frame_len: usize) -> Self {
        let seals = Seals::of(s, caps, frame_len);
        let certified = seals.as_ref().is_some_and(|seals| seals.ring.has_certificate());
        Self {
            sid_gen: Vec::with_capacity(s.peer_max),
            epoch: 0,
            paths: HashMap::new(),
            progress: HashMap::new(),
            searches: HashMap::new(),
            secret: Secret::of_seed(s.seed),
            other_versions: LoggedStations::default(),
            same_mac: LoggedStations::default(),
            other_keys: KeyMismatches::default(),
            pending_resets: HashMap::new(),
            padding: vec![0; if caps.lossless { 0 } else { frame_len }],
            seals,
            certified,
            other_names: HashMap::new(),
            ended_sealed: Vec::new(),
            half_open: Vec::with_capacity(HALF_OPEN_MAX),
            tokens: 0,
            refilled: Instant(0),
        }
    }

    /// Records that peer slot `p` is in use. Returns whether it is for the first time.
    pub(super) fn note_slot(&mut self, p: PeerIdx) -> bool {
        let is_first = self.sid_gen.len() <= p.at();
        if is_first {
            let first = self.random() as u32;
            self.sid_gen.push((first % GENERATIONS) as u16);
            debug_assert_eq!(self.sid_gen.len(), p.at() + 1);
        }
        is_first
    }

    /// The sid and the epoch of a new session in peer slot `p`.
    pub(super) fn next_session(&mut self, p: PeerIdx) -> (u32, u32) {
        self.epoch = self.epoch.wrapping_add(1);
        let generation = u32::from(self.sid_gen[p.at()]);
        if !planted(Bug::NoSessionEpoch) {
            self.sid_gen[p.at()] = ((generation + 1) % GENERATIONS) as u16;
        }
        (next_sid(p, generation), self.epoch)
    }

    /// `len` zero bytes, at most the longest frame of a lossy port.
    pub(super) fn padding(&self, len: usize) -> &[u8] {
        &self.padding[..len]
    }

    fn path(&self, p: PeerIdx) -> Path {
        self.paths.get(&p).copied().unwrap_or_default()
    }

    fn path_mut(&mut self, p: PeerIdx) -> &mut Path {
        self.paths.entry(p).or_default()
    }

    /// Drops the state of a session with peer `p` that is no longer, or not yet, being opened.
    pub(super) fn forget(&mut self, p: PeerIdx) {
        self.paths.remove(&p);
        self.progress.remove(&p);
        self.searches.remove(&p);
        self.pending_resets.remove(&p);
    }

    /// As [`forget`](Self::forget), for a session that has ended.
    pub(super) fn forget_session(&mut self, p: PeerIdx) {
        self.other_names.remove(&p);
        self.forget(p);
    }

    /// Whether an OPEN of ours has left for the session that is being opened with `p`.
    pub(super) fn has_opened(&self, p: PeerIdx) -> bool {
        self.path(p).tries > 0
    }

    /// Records that the key of the session being opened with `p` was refused. False if a refusal
    /// was recorded before.
    pub(super) fn note_refusal(&mut self, p: PeerIdx, now: Instant, reason: RstReason) -> bool {
        let refusal = &mut self.path_mut(p).refusal;
        let first = refusal.is_none();
        refusal.get_or_insert((now, reason));
        first
    }

    /// Drops the recorded refusal: the keys have changed.
    pub(super) fn forget_refusal(&mut self, p: PeerIdx) {
        if let Some(path) = self.paths.get_mut(&p) {
            path.refusal = None;
        }
    }

    /// Time and reason of the first refusal.
    pub(super) fn refusal(&self, p: PeerIdx) -> Option<(Instant, RstReason)> {
        self.path(p).refusal
    }

    /// Whether another OPEN without proof is within the budget.
    fn admit(&mut self, now: Instant) -> bool {
        if now.since(self.refilled) >= 1_000_000 || self.refilled == Instant(0) {
            (self.refilled, self.tokens) = (now, OPENS_PER_MS);
        }
        let admitted = self.tokens > 0;
        self.tokens -= u32::from(admitted);
        admitted
    }

    /// The PSN of the first packet of a new session.
    pub(super) fn first_psn(&mut self) -> Psn {
        let first = Psn(self.random() as u32);
        if planted(Bug::NoSessionEpoch) { Psn(1) } else { first }
    }

    /// A random number that cannot be guessed without the seed from earlier ones.
    pub(crate) fn random(&mut self) -> u64 {
        self.secret.draw()
    }

    /// Records that a session with `peer` was made for an OPEN, in place of any previous one.
    /// `proven`: by a cookie, or by the incarnation that the application inserted.
    pub(super) fn note_half_open(&mut self, now: Instant, peer: &Peer, proven: bool) {
        self.half_open.retain(|half| half.p != peer.slot());
        if !proven {
            self.half_open.push(HalfOpen { p: peer.slot(), sid: peer.sid, since: now });
        }
    }

    /// Records what an OPEN shows of the path: its own length `len`, and how long our frames were
    /// that arrived. Nothing else is taken from a repeated OPEN: where nodes have certificates any
    /// station can write one, and its handshake message is not verified again.
    pub(super) fn note_length(&mut self, peer: &Peer, op: &OpenOp, len: u16) {
        let path = self.path_mut(peer.slot());
        path.no_route = Backoff::default();
        if peer.path.is_lossless() {
            path.passed = path.most;
            return;
        }
        let len = len.min(path.most);
        if peer.is_echoed_in(op) {
            path.passed = path.passed.max(op.frame.min(len));
        }
        if peer.state == State::Answered {
            path.note_arrival(len);
        }
    }

    /// Until when the OPEN due to `peer` is deferred, if the port found no route.
    pub(super) fn open_waits(&self, peer: &Peer, now: Instant) -> Option<Instant> {
        let at = self.path(peer.slot()).no_route.not_before;
        (peer.want_open && at > now).then_some(at)
    }

    /// Half-open sessions on record.
    #[cfg(test)]
    pub(super) fn half_open_count(&self) -> usize {
        self.half_open.len()
    }

    /// Sets the length of the first frames of the session being opened.
    pub(super) fn settle_path(&mut self, now: Instant, peer: &mut Peer) {
        let path = self.path(peer.slot());
        // The least length that may be announced is assumed to pass, whatever an OPEN says.
        let passed = path.passed.max(path.least).min(path.most).max(LENGTHS[1]);
        let forgets = planted(Bug::PathMtuIgnored);
        peer.frame_max = if forgets { path.most.into() } else { passed.into() };
        let most = path.most;
        peer.frame_most = most;
        self.forget(peer.slot());
        if passed < most && !forgets {
            self.begin_search(now, peer);
        }
    }
}

impl NodeSettings {
    /// The capabilities that an OPEN to `peer` announces.
    fn caps_to(&self, peer: &Peer) -> u32 {
        let aes = peer.path.is_sealed() && self.aes;
        let near = if peer.path.is_near() { OpenOp::NEAR } else { 0 };
        near | OpenOp::ECHO | if aes { OpenOp::AES } else { 0 }
    }
}

impl Sessions<'_> {
    /// Sends the OPEN that is due to a peer without an open session.
    pub(super) fn serve_open(&mut self, p: PeerIdx, out: &mut dyn FrameSink) {
        let waits = self.openings.open_waits(&self.peers[p], self.turn.polled_at).is_some();
        if self.peers[p].want_open && !waits && self.choose_path(p, out) {
            self.control().note_same_mac(p);
            self.control().send_open(p, out);
        }
    }
}

impl Operations<'_> {
    /// Ends the operations that name an incarnation other than the peer's. None of them was sent.
    /// Operations to any incarnation stay queued.
    pub(super) fn end_other_incarnation(&mut self, now: Instant, p: PeerIdx) {
        let bound = WrFlags::NAMED | WrFlags::GROUP;
        let any =
            self.objects.peers[p].wrs.iter(self.tx).any(|w| self.tx[w].flags.intersects(bound));
        if any {
            self.note_end(now, p, EndReason::Restarted);
        }
        let mut next = Some(self.objects.peers[p].wrs.head).filter(|&w| w != TxIdx::NONE);
        while let Some(w) = next {
            next = self.objects.peers[p].wrs.next(self.tx, w);
            if self.tx[w].flags.intersects(bound) {
                self.fail_wr(w, Error::ConnReset, ProvErrno::NotExecuted);
            }
        }
        self.objects.coll.peer_lost(p, Error::ConnReset);
    }
}

impl Control<'_> {
    /// Whether `op`, an OPEN of `src` with `len` bytes, is processed: not if it has no proof and
    /// the budget is used up, and not if a challenge answered it.
    pub(super) fn is_admitted(
        &mut self,
        now: Instant,
        src: Station,
        op: &OpenOp,
        len: u16,
    ) -> bool {
        let known = self.by_station.get(self.peers, src, self.openings.frame_tenant());
        let peer = known.map(|p| &self.peers[p]);
        // The application inserted this incarnation of the peer, which cannot be guessed: that is
        // proof.
        if peer.is_some_and(|peer| peer.is_echoed_in(op) || peer.is_named(op.inc)) {
            return true;
        }
        let proven = self.openings.secret.is_proof(now, src, op) || planted(Bug::CookieUnchecked);
        if !proven && !self.openings.admit(now) {
            self.counters.rx_open_limited += 1;
            return false;
        }
        let other_life = |peer: &Peer| peer.inc != 0 && peer.inc != op.inc;
        // Verifying a certificate costs more than a challenge.
        let certified = self.openings.has_certificate() && !op.is_near();
        let makes = match peer.map(|peer| peer.state) {
            None | Some(State::Idle) => !op.is_answer(),
            Some(State::Answered) => !op.is_answer() && (certified || peer.is_some_and(other_life)),
            Some(State::Opening) => !op.is_answer() && certified,
            Some(State::Open) => false,
        };
        let displaces = peer.is_some_and(other_life) && !planted(Bug::IncarnationReplacedUnproven);
        if proven || !makes || !(displaces || certified || self.half_open_is_full(now)) {
            return true;
        }
        self.challenge(now, src, op, len);
        false
    }

    /// Whether there is no room for another session without proof.
    fn half_open_is_full(&mut self, now: Instant) -> bool {
        let peers = &*self.peers;
        self.openings.half_open.retain(|half| {
            let peer = peers.get(half.p).filter(|peer| peer.sid == half.sid);
            peer.is_some_and(|peer| peer.state == State::Answered && !peer.opens)
        });
        if self.openings.half_open.len() < HALF_OPEN_MAX || planted(Bug::HalfOpenUnbounded) {
            return false;
        }
        let oldest = self.openings.half_open[0];
        if now.since(oldest.since) < HALF_OPEN_NS || self.peers[oldest.p].coll_waits > 0 {
            return true;
        }
        self.openings.half_open.remove(0);
        self.forget_half_open(oldest.p);
        false
    }

    /// Evicts a session that was never confirmed. Nothing was sent on it, so its OPEN may be
    /// answered again.
    fn forget_half_open(&mut self, p: PeerIdx) {
        let closed = self.peers[p].closed_epoch;
        self.forget(p);
        self.peers[p].closed_epoch = closed;
    }

    /// Answers with a challenge, and keeps no state.
    fn challenge(&mut self, now: Instant, src: Station, op: &OpenOp, len: u16) {
        self.counters.tx_challenges += 1;
        let challenge = OpenOp {
            inc: self.settings.incarnation,
            target_inc: op.inc,
            echo_sid: op.sid,
            echo_epoch: op.epoch,
            max_frame: self.port.path_mtu(op.is_near()),
            caps: op.caps & OpenOp::NEAR,
            window: self.port.path(op.is_near()).window(self.settings.window) as u16,
            cookie: self.openings.secret.cookie(now, src, op),
            ..OpenOp::default()
        };
        self.reply_open(&self.port.control(src, Ty::Open, op.sid, Psn(0)), &challenge, len);
    }

    /// Processes a challenge: the OPEN that it echoes is sent again, with the cookie.
    pub(super) fn on_challenge(&mut self, base: &Base, op: &OpenOp) {
        let known = self.by_station.get(self.peers, base.src, self.openings.frame_tenant());
        let echoed = known.filter(|&p| self.peers[p].is_echoed_in(op) && self.peers[p].opens);
        // A challenge with the known cookie is dropped, or the nodes would answer each other for
        // ever.
        let Some(p) = echoed.filter(|&p| self.openings.path(p).cookie != op.cookie) else {
            self.counters.rx_bad_open += 1;
            return;
        };
        self.openings.path_mut(p).cookie = op.cookie;
        // Between nodes with certificates any station can write one: it does not show a live peer.
        if !self.openings.has_certificate() {
            self.peers[p].last_rx = self.turn.polled_at;
        }
        self.peers[p].want_open = true;
        self.due.make_ready(self.peers, p);
    }

    /// Records what the OPEN of the other end announces that it accepts, and what this OPEN of
    /// `len` bytes shows of the path.
    pub(super) fn note_path(&mut self, p: PeerIdx, op: &OpenOp, len: u16) {
        let most = self.port.path_mtu(self.peers[p].path.is_near()).min(op.max_frame) as u16;
        let own = self.peers[p].path.window(self.settings.window);
        self.peers[p].snd.set_limit(op.window, own);
        self.peers[p].takes_echo = op.caps & OpenOp::ECHO != 0;
        self.openings.path_mut(p).most = most;
        self.openings.note_length(&self.peers[p], op, len);
    }

    /// Reports a peer behind the same NIC that shares no memory with this node: some ports do not
    /// receive their own frames.
    fn note_same_mac(&mut self, p: PeerIdx) {
        let (peer, own) = (&self.peers[p], self.port.station);
        let station = peer.station();
        let is_same = station.mac == own.mac && station.number != own.number;
        if is_same && !peer.path.is_lossless() && self.openings.same_mac.insert(station) {
            self.observed.note(super::Notice::SameMac { station });
        }
    }

    fn open_op(&self, p: PeerIdx, echoes: bool) -> OpenOp {
        let peer = &self.peers[p];
        OpenOp {
            sid: peer.sid,
            epoch: peer.epoch,
            inc: self.settings.incarnation,
            target_inc: peer.inc,
            echo_sid: if echoes { peer.remote_sid } else { 0 },
            echo_epoch: if echoes { peer.peer_epoch } else { 0 },
            caps: self.settings.caps_to(peer),
            max_frame: self.port.path_mtu(peer.path.is_near()),
            window: peer.path.window(self.settings.window) as u16,
            grant: peer.granted,
            cookie: self.openings.path(p).cookie,
            ..OpenOp::default()
        }
    }

    fn send_open(&mut self, p: PeerIdx, out: &mut dyn FrameSink) {
        let peer = &self.peers[p];
        let (path, echoes) = (self.openings.path(p), peer.state == State::Answered);
        let (near, lossless) = (peer.path.is_near(), peer.path.is_lossless());
        let max = self.port.path_mtu(near) as u16;
        let len = if path.answers > 0 { path.answers } else { path.next_len(max) };
        let frame = if path.answers > 0 { path.answers } else { path.arrived };
        let frame = if echoes && !lossless { frame } else { 0 };
        let mut op = OpenOp { frame, ..self.open_op(p, echoes) };
        if !echoes {
            op.grant = *self.openings.path_mut(p).offered.get_or_insert(op.grant);
        }
        let peer = &self.peers[p];
        let dst_sid = if echoes { peer.remote_sid } else { 0 };
        let (psn, crc) = (peer.snd.una, self.port.far.has_crc());
        let base = Base { dst_sid, psn, crc, ..peer.base(self.port.station, Ty::Open) };
        let open = Reply::open(&base, &op).under(peer.tenant);
        let Reply { bytes, len: head_len } = open;
        let padded = usize::from(len) + ETH_HDR_LEN;
        let padding = if lossless { 0 } else { padded.saturating_sub(head_len) };
        let body = Body::Bytes(self.openings.padding(padding));
        let frame = TxFrame { head: &bytes[..head_len], body, tail: &[] };
        // Alone, like a PROBE.
        match out.send_alone(&frame) {
            Tx::Sent => {}
            Tx::Full => {
                self.port.blocked = true;
                self.due.make_ready(self.peers, p);
                return;
            }
            Tx::NoRoute => {
                let now = self.turn.polled_at;
                let no_route = &mut self.openings.path_mut(p).no_route;
                no_route.refused(now, no_route.wait_ns);
                return self.arm_timer(now, p);
            }
        }
        self.counters.tx_frames += 1;
        self.peers[p].want_open = false;
        let path = self.openings.path_mut(p);
        path.tries = path.tries.checked_add(1).unwrap_or(u8::MAX - ROUND + 1);
        (path.answers, path.no_route) = (0, Backoff::default());
        if echoes {
            path.least = if path.least == 0 { len } else { path.least.min(len) };
        }
    }

    /// Queues an OPEN without padding as a reply, if it has at most `len` bytes after the Ethernet
    /// header.
    fn reply_open(&mut self, base: &Base, op: &OpenOp, len: u16) {
        let reply = Reply::open(base, op).under(self.openings.frame_tenant());
        self.push_reply(reply, usize::from(len) + ETH_HDR_LEN);
    }
}

impl Peer {
    /// Whether `op` echoes our OPEN.
    pub(super) fn is_echoed_in(&self, op: &OpenOp) -> bool {
        self.sid != 0 && op.echo_sid == self.sid && op.echo_epoch == self.epoch
    }

    /// Whether the application, not an OPEN alone, named this incarnation of the peer.
    pub(super) fn is_named(&self, inc: u64) -> bool {
        self.av_refs > 0 && self.inc != 0 && self.inc == inc && !self.is_life_claimed
    }

    /// Whether our OPEN is repeated until answered. A node that answered leaves repetition to the
    /// opener.
    pub(super) fn repeats_open(&self) -> bool {
        self.opens || planted(Bug::ResponseRetransmitted)
    }
}
