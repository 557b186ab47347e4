//! Counters of a node, and levels of its tables.

use barewire_driver::port::Station;

use super::ep::{Ep, EpCounters};
use super::ops::WrFlags;
use super::peer::{Peer, Peers, State};
use super::tx::TxWrs;
use super::{Cqs, EpId, Eps, Node, NodeSettings, Observed, PortState, Statistics, Turn};
use crate::error::{Error, Result};
use crate::idx::{CqIdx, EpIdx, PeerIdx, TxIdx};
use crate::rel::congestion::CongestionControl;
use crate::rel::psn::Psn;
use crate::types::Instant;
use crate::wire::WireError;

/// Counters of a node since it was made. Every frame that was not used is counted under its cause.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeCounters {
    /// Frames given to the node.
    pub rx_frames: u64,
    /// Frames refused by the codec, by [`WireError::index`].
    pub rx_wire: [u64; WireError::COUNT],
    /// Frames for another station.
    pub rx_not_ours: u64,
    /// Frames without the checksum that this node demands.
    pub rx_no_crc: u64,
    /// Frames of a near session, or OPENs of one, that did not come through memory, and OPENs that
    /// came through memory and claim otherwise.
    pub rx_not_near: u64,
    /// Frames that are not sealed, received by a node with a key.
    pub rx_clear: u64,
    /// Sealed frames whose tag does not verify under any key.
    pub rx_forged: u64,
    /// Sealed frames that were received before, or that are too old to tell.
    pub rx_replayed: u64,
    /// Peer certificates that have expired or are not valid yet.
    pub rx_cert_time: u64,
    /// Peer certificates without a chain to a root, or not valid for this use.
    pub rx_cert_issuer: u64,
    /// Certificates of peers whose names this node does not accept.
    pub rx_cert_name: u64,
    /// Peer certificates with an invalid signature.
    pub rx_cert_signature: u64,
    /// Peer certificates that cannot be parsed.
    pub rx_cert_malformed: u64,
    /// OPENs whose certificates were not verified, because of the limit on verifications.
    pub rx_cert_limited: u64,
    /// Packets for a session that does not exist.
    pub rx_no_session: u64,
    /// Packets that acknowledge a packet that was never sent.
    pub rx_bad_ack: u64,
    /// Duplicates of packets and of messages to groups.
    pub rx_duplicate: u64,
    /// Packets beyond the receive window.
    pub rx_out_of_window: u64,
    /// Early packets that were dropped because no buffer was free.
    pub rx_no_buffer: u64,
    /// Packets that were refused with a NACK.
    pub rx_refused: u64,
    /// Messages dropped because their endpoint does not exist, where the sender expects no answer.
    pub rx_no_endpoint: u64,
    /// Data segments that belong to no operation.
    pub rx_stray: u64,
    /// One-sided packets refused because no region has their key.
    pub rx_bad_key: u64,
    /// One-sided packets refused because the region or the endpoint does not allow the access.
    pub rx_bad_access: u64,
    /// Atomic packets refused as invalid.
    pub rx_bad_atomic: u64,
    /// RST packets that name no session of this node.
    pub rx_bad_rst: u64,
    /// OPEN packets that were refused or ignored.
    pub rx_bad_open: u64,
    /// Of these, those above the rate limit of OPENs without proof.
    pub rx_open_limited: u64,
    /// Of these, those that named no incarnation, where this is required.
    pub rx_unnamed: u64,
    /// Packets refused because their sender is not in the address vector of the destination
    /// endpoint.
    pub rx_not_inserted: u64,
    /// Name queries (WHO) received.
    pub rx_who: u64,
    /// Answers (HERE) that match no query.
    pub rx_here_stray: u64,
    /// Messages to multicast groups that endpoints of this node have joined, counted for each
    /// endpoint: received, and dropped because no receive was posted.
    pub rx_mcast: u64,
    /// See [`rx_mcast`](Self::rx_mcast).
    pub rx_mcast_dropped: u64,
    /// Messages to groups that no endpoint of this node has joined.
    pub rx_mcast_other: u64,
    /// Frames that arrived with a congestion mark.
    pub rx_marked: u64,
    /// Acknowledgements that echoed a congestion mark to this node.
    pub rx_echoes: u64,
    /// Frames handed to the port.
    pub tx_frames: u64,
    /// Of these, retransmitted packets.
    pub tx_retransmits: u64,
    /// Of these, separate acknowledgements.
    pub tx_acks: u64,
    /// Of these, acknowledgements that echoed a congestion mark.
    pub tx_echoes: u64,
    /// Of these, probes of a silent peer.
    pub tx_probes: u64,
    /// Of these, PINGs after the last packets of a burst.
    pub tx_asks: u64,
    /// Replies to stations without a session that the rate limit suppressed.
    pub tx_replies_limited: u64,
    /// Challenges sent: stations that were asked to prove that they receive.
    pub tx_challenges: u64,
    /// Answers (HERE) sent to name queries.
    pub tx_here: u64,
    /// Messages to multicast groups sent.
    pub tx_mcast: u64,
    /// Messages sent, received, and kept for a later receive.
    pub msgs_sent: u64,
    /// Messages received into the application's memory.
    pub msgs_received: u64,
    /// Messages that arrived before their receive was posted.
    pub msgs_unexpected: u64,
    /// One-sided operations of this node that succeeded.
    pub rma_done: u64,
    /// One-sided operations of peers that were executed here.
    pub rma_executed: u64,
    /// Messages between collective sides of an unknown kind.
    pub rx_coll_unknown: u64,
    /// Collectives that succeeded, joins included.
    pub colls_done: u64,
    /// Of these, those through the memory of a segment.
    pub colls_shared: u64,
    /// Sessions opened.
    pub sessions_opened: u64,
    /// Sessions that ended because the peer was silent.
    pub sessions_dead: u64,
    /// Sessions ended by the peer.
    pub sessions_reset: u64,
    /// Sessions that ended because no packet of this node got through to a peer that answered.
    pub sessions_stuck: u64,
    /// Retransmission timeouts.
    pub timeouts: u64,
}

impl Default for NodeCounters {
    fn default() -> Self {
        Self {
            rx_frames: 0,
            rx_wire: [0; WireError::COUNT],
            rx_not_ours: 0,
            rx_no_crc: 0,
            rx_not_near: 0,
            rx_clear: 0,
            rx_forged: 0,
            rx_replayed: 0,
            rx_cert_time: 0,
            rx_cert_issuer: 0,
            rx_cert_name: 0,
            rx_cert_signature: 0,
            rx_cert_malformed: 0,
            rx_cert_limited: 0,
            rx_no_session: 0,
            rx_bad_ack: 0,
            rx_duplicate: 0,
            rx_out_of_window: 0,
            rx_no_buffer: 0,
            rx_refused: 0,
            rx_no_endpoint: 0,
            rx_stray: 0,
            rx_bad_key: 0,
            rx_bad_access: 0,
            rx_bad_atomic: 0,
            rx_bad_rst: 0,
            rx_bad_open: 0,
            rx_open_limited: 0,
            rx_unnamed: 0,
            rx_not_inserted: 0,
            rx_who: 0,
            rx_here_stray: 0,
            rx_mcast: 0,
            rx_mcast_dropped: 0,
            rx_mcast_other: 0,
            rx_marked: 0,
            rx_echoes: 0,
            tx_frames: 0,
            tx_retransmits: 0,
            tx_acks: 0,
            tx_echoes: 0,
            tx_probes: 0,
            tx_asks: 0,
            tx_replies_limited: 0,
            tx_challenges: 0,
            tx_here: 0,
            tx_mcast: 0,
            msgs_sent: 0,
            msgs_received: 0,
            msgs_unexpected: 0,
            rma_done: 0,
            rma_executed: 0,
            rx_coll_unknown: 0,
            colls_done: 0,
            colls_shared: 0,
            sessions_opened: 0,
            sessions_dead: 0,
            sessions_reset: 0,
            sessions_stuck: 0,
            timeouts: 0,
        }
    }
}

/// Levels of the tables. When the node is idle, all are 0 but `peers`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Levels {
    /// Peers known.
    pub peers: usize,
    /// Sends in flight.
    pub tx: usize,
    /// Packets kept until acknowledged.
    pub sent: usize,
    /// Buffers of shared frames in use.
    pub packs: usize,
    /// Receives posted.
    pub posted: usize,
    /// Messages waiting for a receive.
    pub unexpected: usize,
    /// Blocks that hold such messages.
    pub blocks: usize,
    /// Messages being pulled.
    pub pulls: usize,
    /// Bytes requested and not received.
    pub pull_bytes: u64,
    /// Packets that wait for an earlier one.
    pub reorder_buf: usize,
    /// Answers to one-sided operations of peers.
    pub responses: usize,
    /// Completions with remote CQ data that wait for room.
    pub late: usize,
    /// Completions reserved in all queues.
    pub cq_reserved: usize,
    /// Blocks that are neither free, nor promised to a peer, nor behind a stored message.
    pub blocks_lost: usize,
    /// Timers armed.
    pub timers: usize,
}

/// State of a session, for an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// The peer.
    pub station: Station,
    /// Its incarnation, 0 if not known.
    pub incarnation: u64,
    /// `idle`, `opening`, `answered` or `open`.
    pub state: &'static str,
    /// Packets in flight.
    pub in_flight: u32,
    /// Smoothed round trip, nanoseconds; 0 if not measured.
    pub srtt_ns: u64,
    /// Credits left to send with.
    pub credits: u32,
    /// Operations that wait for the peer.
    pub waiting: u32,
}

/// Cause for which an operation of a peer waits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wait {
    /// No operation waits.
    #[default]
    Nothing,
    /// An answer to an OPEN.
    Open,
    /// Any packet of the peer: none has arrived for a tenth of T_dead.
    Silent,
    /// The oldest packet, which was lost several times in a row although the peer answers.
    Repeats,
    /// Room in the port.
    Port,
    /// Acknowledgements: the window is full.
    Window,
    /// Credit: the peer's memory for messages that arrive before their receive.
    Credit,
    /// A matching receive at the peer, for an announced message.
    Match,
    /// Data of an announced message or of a read, which the peer sends.
    Pull,
    /// Room in the pull window, which all peers share.
    PullWindow,
    /// Memory of this node for unexpected messages, without which the peer is granted no credit.
    Memory,
    /// An acknowledgement or an answer that is under way.
    Answer,
}

impl Wait {
    /// All causes, each at the index of its number.
    pub const ALL: [Self; 12] = [
        Self::Nothing,
        Self::Open,
        Self::Silent,
        Self::Repeats,
        Self::Port,
        Self::Window,
        Self::Credit,
        Self::Match,
        Self::Pull,
        Self::PullWindow,
        Self::Memory,
        Self::Answer,
    ];

    /// Short name of the cause.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nothing => "nothing",
            Self::Open => "open",
            Self::Silent => "silent",
            Self::Repeats => "repeats",
            Self::Port => "port",
            Self::Window => "window",
            Self::Credit => "credit",
            Self::Match => "match",
            Self::Pull => "pull",
            Self::PullWindow => "pull window",
            Self::Memory => "memory",
            Self::Answer => "answer",
        }
    }
}

/// Statistics of one session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionStats {
    /// The peer, and the state of the session.
    pub info: SessionInfo,
    /// The cause for which operations wait.
    pub wait: Wait,
    /// Time since the session began, ns. Without a session, all figures are of the last one.
    pub age_ns: u64,
    /// Time since a packet of the peer arrived or since an operation began to wait for it,
    /// whichever is later, ns, as of the last turn.
    pub silent_ns: u64,
    /// Packets sent, without retransmissions and control packets.
    pub tx_packets: u64,
    /// Packets received in order.
    pub rx_packets: u64,
    /// Bytes of frames to the peer and from it, `None` if they are not counted. On a lossless port
    /// the port counts them, if at all, since the two stations first met.
    pub bytes: Option<(u64, u64)>,
    /// Packets retransmitted.
    pub retransmits: u32,
    /// Retransmission timeouts.
    pub timeouts: u32,
    /// Smallest round trip, ns; 0 if not measured.
    pub rtt_min_ns: u64,
    /// Maximum packets in flight.
    pub window: u32,
    /// Longest frame that both ends accept, bytes after the Ethernet header.
    pub frame_max: u32,
    /// Retransmission timeout, ns, which grows with each consecutive timeout; 0 on a lossless path.
    pub rto_ns: u64,
    /// Mean deviation of the round trip, ns.
    pub rtt_var_ns: u32,
    /// Whether the peer is a process of this node, reached through memory.
    pub is_near: bool,
    /// Whether the path is lossless.
    pub is_lossless: bool,
}

/// Consecutive timeouts from which on loss is not accidental.
const BACKOFF_BAD: u8 = 4;

/// Slots of a table that one step of a [`Survey`] examines.
const STEP: u32 = 64;

/// A scan of a node's tables in steps of bounded cost, so that an operator can see all of them
/// while the node works. Sums over a table are those of its last complete scan.
#[derive(Debug, Default)]
pub struct Survey {
    eps: Scan<EpSums>,
    cqs: Scan<CqSums>,
    peers: Scan<usize>,
}

/// Progress of a scan: its position, its sums so far, and those of the last complete scan.
#[derive(Debug, Default)]
struct Scan<S> {
    at: u32,
    under_way: S,
    last: S,
}

impl<S: Default> Scan<S> {
    /// Slots of the next step, for a table with `slots` slots.
    fn step(&self, slots: u32) -> std::ops::Range<u32> {
        self.at.min(slots)..slots.min(self.at.saturating_add(STEP))
    }

    /// Records that the step up to `end` is done.
    fn advance_to(&mut self, end: u32, slots: u32) {
        self.at = end;
        if end >= slots {
            (self.at, self.last) = (0, std::mem::take(&mut self.under_way));
        }
    }
}

#[derive(Debug, Default)]
struct EpSums {
    sent: u64,
    received: u64,
    tx: usize,
    posted: usize,
    lent: usize,
}

#[derive(Debug, Default)]
struct CqSums {
    late: usize,
    reserved: usize,
}

/// Receives what a [`Survey`] finds in each slot; `None` for a slot that is not in use.
pub trait SurveySink {
    /// The endpoint in a slot.
    fn endpoint(&mut self, slot: EpIdx, ep: Option<&EpCounters>);

    /// The session of the peer in a slot.
    fn session(&mut self, slot: PeerIdx, session: Option<&SessionStats>);
}

impl Cqs {
    fn survey(&self, scan: &mut Scan<CqSums>) {
        let step = scan.step(self.slots());
        for table in step.clone().filter_map(|idx| self.get(CqIdx::of(idx))) {
            scan.under_way.late += table.rest.late.len();
            scan.under_way.reserved += table.cq.reserved();
        }
        scan.advance_to(step.end, self.slots());
    }
}

impl Eps {
    fn survey(&self, scan: &mut Scan<EpSums>, sink: &mut impl SurveySink) {
        let step = scan.step(self.slots());
        for idx in step.clone().map(EpIdx::of) {
            let Some(ep) = self.get(idx) else {
                sink.endpoint(idx, None);
                continue;
            };
            let sums = &mut scan.under_way;
            sums.sent += ep.counters.sent;
            sums.received += ep.received();
            sums.tx += ep.tx_used as usize - usize::from(ep.ops_reserved);
            sums.posted += (ep.rx_used - ep.rx_reserved_total()) as usize;
            sums.lent += ep.rx_reserved_total() as usize + usize::from(ep.ops_reserved);
            let shown = ep.sharers.is_none() && ep.deferred_for == EpIdx::NONE;
            sink.endpoint(idx, shown.then(|| ep_counters(ep)).as_ref());
        }
        scan.advance_to(step.end, self.slots());
    }

    /// The counters of one endpoint.
    pub fn counters(&self, ep: EpId) -> Result<EpCounters> {
        self.by_handle(ep.0).map(ep_counters).ok_or(Error::BadFd)
    }

    /// All open endpoints.
    pub fn ids(&self) -> impl Iterator<Item = EpId> {
        let eps =
            self.iter().filter(|(_, ep)| ep.sharers.is_none() && ep.deferred_for == EpIdx::NONE);
        eps.map(|(idx, _)| EpId(self.handle(idx)))
    }
}

impl Node {
    /// Current values of all counters. Visits every endpoint.
    pub fn counters(&self) -> NodeCounters {
        let mut all = self.counters.clone();
        for (_, ep) in self.eps.iter() {
            all.msgs_sent += ep.counters.sent;
            all.msgs_received += ep.received();
        }
        all
    }

    /// Makes the next step of `survey`: at most 64 slots of each table, whatever they hold. Returns
    /// counters and levels, without [`Levels::blocks_lost`].
    pub fn survey(
        &mut self,
        survey: &mut Survey,
        sink: &mut impl SurveySink,
    ) -> (NodeCounters, Levels) {
        self.eps.survey(&mut survey.eps, sink);
        self.cqs.survey(&mut survey.cqs);
        let Self { peers, observed, port, settings, turn, tx, .. } = self;
        let mut sessions = SessionReader { peers, observed, port, settings, turn, tx };
        sessions.survey(&mut survey.peers, sink);
        let (eps, cqs) = (&survey.eps.last, &survey.cqs.last);
        let mut counters = self.counters.clone();
        counters.msgs_sent += eps.sent;
        counters.msgs_received += eps.received;
        let listening = self.coll.listening();
        let levels = Levels {
            peers: survey.peers.last,
            tx: eps.tx,
            posted: eps.posted.saturating_sub(listening),
            late: cqs.late,
            cq_reserved: cqs.reserved.saturating_sub(eps.lent + listening),
            ..self.statistics().known_levels()
        };
        (counters, levels)
    }
}

impl Statistics<'_> {
    /// Levels of the tables whose length is known without a scan.
    fn known_levels(&self) -> Levels {
        Levels {
            sent: self.sent.len(),
            packs: self.packs.bytes.len() - self.packs.free.len(),
            unexpected: self.unexpected.len(),
            blocks: self.blocks.used(),
            pulls: self.pulls.records.len(),
            pull_bytes: self.pulls.out,
            reorder_buf: self.reorder.len(),
            responses: self.responses.len(),
            timers: self.wheel.len(),
            ..Levels::default()
        }
    }

    /// Levels of all tables. Visits every slot ever used, so it is for tests: see
    /// [`Node::survey`].
    pub fn levels(&self) -> Levels {
        Levels {
            peers: self.peers.count(),
            tx: self.tx.wrs.len() + self.fast_ops.iter().count(),
            posted: self.posted.pool.count() - self.coll.listening(),
            late: self.cqs.iter().map(|(_, t)| t.rest.late.len()).sum(),
            cq_reserved: self.cqs.iter().map(|(_, t)| t.cq.reserved()).sum::<usize>()
                - self.coll.listening()
                - self
                    .eps
                    .iter()
                    .map(|(_, ep)| ep.rx_reserved_total() as usize + usize::from(ep.ops_reserved))
                    .sum::<usize>(),
            blocks_lost: self.blocks_lost(),
            ..self.known_levels()
        }
    }

    /// Whether any peer is in the table.
    pub fn knows_peers(&self) -> bool {
        self.peers.count() > 0
    }

    fn blocks_lost(&self) -> usize {
        let promised: usize = self.peers.iter().map(|(_, p)| p.outstanding() as usize).sum();
        let used: usize = self.unexpected.iter().map(|(_, m)| m.payload.units as usize).sum();
        let late: usize = self.cqs.iter().map(|(_, t)| t.rest.late.len()).sum();
        self.blocks.lost(promised + used + late)
    }

    /// State of the sessions of all peers.
    pub fn session_infos(self) -> impl Iterator<Item = SessionInfo> {
        self.peers.iter().map(|(_, peer)| session_info(peer))
    }
}

/// Sources of the figures of sessions.
struct SessionReader<'a> {
    peers: &'a Peers,
    observed: &'a mut Observed,
    port: &'a PortState,
    settings: &'a NodeSettings,
    turn: &'a Turn,
    tx: &'a TxWrs,
}

impl SessionReader<'_> {
    fn survey(&mut self, scan: &mut Scan<usize>, sink: &mut impl SurveySink) {
        let step = scan.step(self.peers.slots());
        for p in step.clone().map(PeerIdx::of) {
            let stats = self.stats(p);
            scan.under_way += usize::from(stats.is_some());
            sink.session(p, stats.as_ref());
        }
        scan.advance_to(step.end, self.peers.slots());
    }

    fn stats(&mut self, p: PeerIdx) -> Option<SessionStats> {
        let peer = self.peers.get(p)?;
        let tally = &mut self.observed.tallies[p.at()];
        let (tx_packets, rx_packets) = match peer.state {
            State::Idle => tally.counted(),
            // The first PSN of the other end is not known.
            State::Opening => (tally.packets(peer.snd.nxt, Psn(0)).0, 0),
            State::Answered | State::Open => tally.packets(peer.snd.nxt, peer.rcv_nxt),
        };
        let min_ns = peer.rtt.min_ns();
        let tally = &self.observed.tallies[p.at()];
        // The session with this node itself, and a slot that never had one, have no times.
        let is_timed = tally.begun != Instant(0);
        let silent_ns = self.turn.polled_at.since(peer.last_rx);
        Some(SessionStats {
            info: session_info(peer),
            wait: self.wait(peer),
            age_ns: if is_timed { self.turn.polled_at.since(tally.begun) } else { 0 },
            silent_ns: if is_timed { silent_ns } else { 0 },
            tx_packets,
            rx_packets,
            bytes: (!peer.path.is_lossless()).then_some((tally.tx_bytes, tally.rx_bytes)),
            retransmits: tally.retransmits,
            timeouts: tally.timeouts,
            rtt_min_ns: if min_ns == u32::MAX.into() { 0 } else { min_ns },
            window: peer.snd.cwnd.window().min(peer.snd.limit()),
            frame_max: peer.frame_max,
            rto_ns: match peer.path.is_lossless() {
                true => 0,
                false => peer.rtt.rto_ns(self.port.rto_floor_ns, peer.backoff),
            },
            rtt_var_ns: peer.rtt.var_ns() as u32,
            is_near: peer.path.tells_presence(),
            is_lossless: peer.path.is_lossless(),
        })
    }

    /// The cause for which operations of `peer` wait: the most serious one, if there are several.
    fn wait(&self, peer: &Peer) -> Wait {
        let silent = self.turn.polled_at.since(peer.last_rx);
        match peer.state {
            State::Idle => return Wait::Nothing,
            _ if !peer.owes() => return Wait::Nothing,
            State::Opening | State::Answered => return Wait::Open,
            State::Open if silent > self.settings.t_dead_ns / 10 => return Wait::Silent,
            State::Open if peer.backoff >= BACKOFF_BAD && peer.snd.in_flight() > 0 => {
                return Wait::Repeats;
            }
            State::Open => {}
        }
        let queued =
            !peer.send_q.is_empty() || !peer.rndv_data_q.is_empty() || !peer.resp_q.is_empty();
        let announced = |w: TxIdx| self.tx[w].flags.contains(WrFlags::ANNOUNCED);
        if queued && self.port.blocked {
            Wait::Port
        } else if queued && !peer.snd.open() {
            Wait::Window
        } else if !peer.send_q.is_empty() && peer.credits() == 0 {
            Wait::Credit
        } else if peer.wants_blocks {
            Wait::Memory
        } else if !peer.pull_wait.is_empty() {
            Wait::PullWindow
        } else if !peer.pulls.is_empty() {
            Wait::Pull
        } else if peer.wrs.head != TxIdx::NONE && announced(peer.wrs.head) {
            Wait::Match
        } else {
            Wait::Answer
        }
    }
}

fn ep_counters(ep: &Ep) -> EpCounters {
    EpCounters {
        number: ep.number,
        unexpected: (ep.matcher[0].unexpected_len() + ep.matcher[1].unexpected_len()) as u32,
        posted: ep.rx_used - ep.rx_reserved_total(),
        received: ep.received(),
        ..ep.counters
    }
}

fn session_info(peer: &Peer) -> SessionInfo {
    SessionInfo {
        station: peer.station(),
        incarnation: peer.inc,
        state: match peer.state {
            State::Idle => "idle",
            State::Opening => "opening",
            State::Answered => "answered",
            State::Open => "open",
        },
        in_flight: peer.snd.in_flight(),
        srtt_ns: peer.rtt.srtt_ns(),
        credits: peer.credits(),
        waiting: peer.wrs.len + peer.pulls.len + u32::from(peer.fast_ops()),
    }
}
