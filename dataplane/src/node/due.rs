//! What is left to do besides receiving: what kinds of work there are, and which peers it is for.

use std::collections::VecDeque;

use barewire_driver::port::PortCaps;
use bitflags::bitflags;

use super::NodeSettings;
use super::peer::{Peer, Peers};
use crate::idx::PeerIdx;

bitflags! {
    /// Pending work: one word that every turn tests, usually zero.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct Todo: u8 {
        /// Peers, replies or frames to ourselves wait to be sent, or the port is gone.
        const SEND = 1 << 0;
        /// Collectives exist and may have something to do.
        const COLL = 1 << 1;
        /// Answers wait for the end of the burst.
        const ANSWER = 1 << 2;
        /// The port may lose frames: packets are recorded until acknowledged, and acknowledgements
        /// may be due by time. Set for the node's life.
        const KEEP = 1 << 3;
        /// An acknowledgement is owed, or packets were sent for which a PING may be due. Each turn
        /// looks; its [`passes`](super::Node::passes) clears the bit.
        const ACKS = 1 << 4;
        /// Something waits for room in a completion queue. Room comes by reading, and when an
        /// operation ends whose entry is not written.
        const ROOM = 1 << 5;
        /// A packet is held, and leaves with a turn to come.
        const HELD = 1 << 6;
    }
}

impl Todo {
    /// Whether nothing is to be sent at once, what is due by time aside: timers, and
    /// acknowledgements on a lossy path.
    #[inline(always)]
    pub(crate) fn only_waits(self) -> bool {
        (self - (Self::KEEP | Self::ACKS | Self::HELD)).is_empty()
    }

    /// Whether nothing is to be sent at once or by time, timers aside.
    #[inline(always)]
    pub(crate) fn is_idle(self) -> bool {
        (self - Self::KEEP).is_empty()
    }
}

/// See the module.
#[derive(Debug)]
pub(crate) struct Due {
    /// What kinds of work there may be.
    pub(crate) todo: Todo,
    /// Peers with something to send.
    pub(super) ready: VecDeque<PeerIdx>,
}

impl Due {
    /// Nothing yet, of a node on such a port.
    pub(super) fn new(s: &NodeSettings, caps: &PortCaps) -> Self {
        Self {
            todo: if caps.lossless { Todo::empty() } else { Todo::KEEP },
            ready: VecDeque::with_capacity(s.peer_max.min(4096)),
        }
    }

    /// Notes that something waits to be sent.
    #[inline]
    pub(super) fn note_send(&mut self) {
        self.todo |= Todo::SEND;
    }

    /// Puts a peer into the queue of those to be served in the next transmit.
    pub(super) fn make_ready(&mut self, peers: &mut Peers, p: PeerIdx) {
        let peer = &mut peers[p];
        peer.steady = false;
        if !peer.queued {
            peer.queued = true;
            self.ready.push_back(p);
            self.note_send();
            // Serving the peer will touch it.
            peers.prefetch(p, Peer::WARM);
        }
    }
}
