//! What a node counts, and how full its tables are.

use barewire_driver::port::MacAddr;

use super::peer::State;
use super::{EpId, Node};
use crate::error::{Error, Result};
use crate::slab::NONE;
use crate::wire::WireError;

/// Everything that happened in a node since it was made. Every frame that was not used has its
/// cause here.
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
    /// Packets for a session that does not exist.
    pub rx_no_session: u64,
    /// Packets whose acknowledgement covers what was never sent.
    pub rx_bad_ack: u64,
    /// Packets that had arrived before.
    pub rx_duplicate: u64,
    /// Packets beyond the receive window.
    pub rx_out_of_window: u64,
    /// Packets that came early and had to be dropped because no buffer was free to keep them.
    pub rx_no_buffer: u64,
    /// Packets that were refused with a NACK.
    pub rx_refused: u64,
    /// Messages dropped because their endpoint does not exist (the sender did not wait).
    pub rx_no_endpoint: u64,
    /// Pieces that belong to no operation.
    pub rx_stray: u64,
    /// One-sided packets refused because no region has their key.
    pub rx_bad_key: u64,
    /// One-sided packets refused because region or endpoint do not allow what they want.
    pub rx_bad_access: u64,
    /// Atomic packets refused because they make no sense.
    pub rx_bad_atomic: u64,
    /// RST packets that name nothing of ours.
    pub rx_bad_rst: u64,
    /// OPEN packets that were refused or ignored.
    pub rx_bad_open: u64,
    /// Of these, those that named no incarnation, where one has to be named.
    pub rx_unnamed: u64,
    /// Packets refused because their sender is not in the address vector of the endpoint that they
    /// are for.
    pub rx_not_inserted: u64,
    /// Frames handed to the port.
    pub tx_frames: u64,
    /// Of these, packets sent again.
    pub tx_retransmits: u64,
    /// Of these, acknowledgements of their own.
    pub tx_acks: u64,
    /// Of these, probes of a peer that is silent.
    pub tx_probes: u64,
    /// Of these, questions after the last packets of a burst.
    pub tx_asks: u64,
    /// Replies to strangers that the limit held back.
    pub tx_replies_limited: u64,
    /// Messages sent, received, and kept for a later receive.
    pub msgs_sent: u64,
    /// Messages received into the application's memory.
    pub msgs_received: u64,
    /// Messages that came before their receive.
    pub msgs_unexpected: u64,
    /// One-sided operations of this node that succeeded.
    pub rma_done: u64,
    /// One-sided operations of peers that were executed here.
    pub rma_executed: u64,
    /// Messages between collective sides of a kind that is not known here.
    pub rx_coll_unknown: u64,
    /// Collectives that ended well, joins included.
    pub colls_done: u64,
    /// Sessions opened.
    pub sessions_opened: u64,
    /// Sessions that ended because the peer was silent.
    pub sessions_dead: u64,
    /// Sessions that the peer ended.
    pub sessions_reset: u64,
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
            rx_unnamed: 0,
            rx_not_inserted: 0,
            tx_frames: 0,
            tx_retransmits: 0,
            tx_acks: 0,
            tx_probes: 0,
            tx_asks: 0,
            tx_replies_limited: 0,
            msgs_sent: 0,
            msgs_received: 0,
            msgs_unexpected: 0,
            rma_done: 0,
            rma_executed: 0,
            rx_coll_unknown: 0,
            colls_done: 0,
            sessions_opened: 0,
            sessions_dead: 0,
            sessions_reset: 0,
            timeouts: 0,
        }
    }
}

/// How much of each table is in use. All zero but `peers` when nothing is going on.
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
    pub stored: usize,
    /// Blocks that hold such messages.
    pub blocks: usize,
    /// Messages being pulled.
    pub pulls: usize,
    /// Bytes asked for and not here.
    pub pull_bytes: u64,
    /// Packets that wait for an earlier one.
    pub held: usize,
    /// Answers to one-sided operations of peers.
    pub jobs: usize,
    /// Completions with remote CQ data that wait for room.
    pub late: usize,
    /// Completions reserved in all queues.
    pub cq_reserved: usize,
    /// Blocks neither free to be promised, nor promised to a peer, nor behind a stored message.
    pub blocks_lost: usize,
    /// Timers armed.
    pub timers: usize,
}

/// One session, for an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionInfo {
    /// The peer.
    pub mac: MacAddr,
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

/// Counters of one endpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EpCounters {
    /// Its number.
    pub number: u16,
    /// Sends completed.
    // Not beside their bytes: the compiler would add to both at once, which takes three times as
    // many instructions.
    pub sent: u64,
    /// Messages received.
    pub received: u64,
    /// Bytes of the sends.
    pub sent_bytes: u64,
    /// Bytes of the messages received.
    pub received_bytes: u64,
    /// Operations that ended in an error.
    pub errors: u64,
    /// Messages waiting for a receive now.
    pub unexpected: u32,
    /// Receives posted now.
    pub posted: u32,
}

impl Node {
    /// What was counted so far. Looks at every endpoint.
    pub fn counters(&self) -> NodeCounters {
        let mut all = self.counters.clone();
        for (_, ep) in self.eps.iter() {
            all.msgs_sent += ep.counters.sent;
            all.msgs_received += ep.received();
        }
        all
    }

    /// How full the tables are.
    pub fn levels(&self) -> Levels {
        Levels {
            peers: self.peers.count(),
            tx: self.tx.len() + self.short_ops.iter().count(),
            sent: self.sent.len(),
            packs: self.packs.bytes.len() - self.packs.free.len(),
            posted: self.posted.count() - self.coll_listening(),
            stored: self.stored.len(),
            blocks: self.settings.unexpected_bytes / crate::proto::blocks::UNIT
                - self.blocks.free_count(),
            pulls: self.pulls.len(),
            pull_bytes: self.pull_out,
            held: self.held.len(),
            jobs: self.jobs.len(),
            late: self.cqs.iter().map(|(_, t)| t.late.len()).sum(),
            cq_reserved: self.cqs.iter().map(|(_, t)| t.cq.reserved()).sum::<usize>()
                - self.coll_listening()
                - self
                    .eps
                    .iter()
                    .map(|(_, ep)| ep.borrowed() as usize + usize::from(ep.ops_left))
                    .sum::<usize>(),
            blocks_lost: self.blocks_lost(),
            timers: self.wheel.len(),
        }
    }

    fn blocks_lost(&self) -> usize {
        let promised: usize = self.peers.iter().map(|(_, p)| p.outstanding() as usize).sum();
        let used: usize = self.stored.iter().map(|(_, m)| m.payload.units as usize).sum();
        let late: usize = self.cqs.iter().map(|(_, t)| t.late.len()).sum();
        let all = self.settings.unexpected_bytes / crate::proto::blocks::UNIT;
        all.abs_diff(self.blocks_unpromised + promised + used + late)
    }

    /// All peers with what is going on between us.
    pub fn sessions(&self) -> impl Iterator<Item = SessionInfo> {
        self.peers.iter().map(|(_, p)| SessionInfo {
            mac: p.mac(),
            incarnation: p.inc,
            state: match p.state {
                State::Idle => "idle",
                State::Opening => "opening",
                State::Answered => "answered",
                State::Open => "open",
            },
            in_flight: p.snd.in_flight(),
            srtt_ns: p.rtt.srtt_ns(),
            credits: p.credits(),
            waiting: p.wrs.len + p.pulls.len + u32::from(p.short_ops()),
        })
    }

    /// The counters of one endpoint.
    ///
    /// # Errors
    /// [`Error::BadFd`]: it was closed.
    pub fn ep_counters(&self, ep: EpId) -> Result<EpCounters> {
        let ep = self.eps.by_handle(ep.0).ok_or(Error::BadFd)?;
        Ok(EpCounters {
            number: ep.number,
            unexpected: (ep.matcher[0].unexpected_len() + ep.matcher[1].unexpected_len()) as u32,
            posted: ep.rx_used - ep.borrowed(),
            received: ep.received(),
            ..ep.counters
        })
    }

    /// All open endpoints.
    pub fn ep_ids(&self) -> impl Iterator<Item = EpId> {
        let eps = self.eps.iter().filter(|(_, ep)| ep.sharers.is_none() && ep.twin_of == NONE);
        eps.map(|(idx, _)| EpId(self.eps.handle(idx)))
    }
}
