//! Keys of a node that change while it runs: the list of those that open sessions
//! (`docs/security.md`, "Another key without a pause").
//!
//! A session that stands has keys of its own and goes on. One that is being opened is of the key
//! that was the first when it began: if another is the first now, it is opened again.

use super::Node;
use super::peer::State;
use crate::error::{Error, Result};
use crate::idx::PeerIdx;
use crate::plant::{Bug, planted};
use crate::seal::PreSharedKey;
use crate::types::Instant;

impl Node {
    /// Whether the node has keys and needs them: its frames are sealed.
    pub fn has_keys(&self) -> bool {
        self.far.is_sealed()
    }

    /// Makes these the keys of the node, in this order: the first opens sessions, each is accepted
    /// from who opens one. Open sessions stay as they are, also those that were opened under a key
    /// that is not listed any more; no such key is kept. No operation ends by it.
    ///
    /// # Errors
    /// And nothing has happened:
    /// - [`Error::OpNotSupp`]: the node was made without a key, or its port loses nothing.
    /// - [`Error::Invalid`]: no key, or more than [`KEYS_MAX`](crate::seal::KEYS_MAX).
    pub fn set_keys(&mut self, now: Instant, keys: Vec<PreSharedKey>) -> Result<()> {
        let Some(seals) = &mut self.openings.seals else {
            return Err(Error::OpNotSupp("the frames of this domain are not sealed"));
        };
        let first = seals.ring.first();
        if !seals.ring.replace(keys) {
            return Err(Error::Invalid("a list of keys has 1 to 4"));
        }
        let offers = match seals.ring.first() == first {
            true => Vec::new(),
            false => std::mem::take(&mut seals.offers).into_keys().collect(),
        };
        self.openings.other_keys.forget();
        let opening = |p: &PeerIdx| {
            let peer = &self.peers[*p];
            let opens = matches!(peer.state, State::Opening | State::Answered);
            opens && !peer.path.is_near()
        };
        let peers: Vec<PeerIdx> = self.peers.iter().map(|(p, _)| p).filter(opening).collect();
        for p in peers {
            let peer = &self.peers[p];
            let offered = peer.state == State::Opening && offers.contains(&peer.addr);
            if offered && !planted(Bug::OfferKept) {
                self.offer_again(now, p);
            } else {
                self.openings.forget_refusal(p);
            }
        }
        Ok(())
    }

    /// Opens the session with `p` under another key. Its peer's silence goes on to count.
    fn offer_again(&mut self, now: Instant, p: PeerIdx) {
        let last_rx = self.peers[p].last_rx;
        self.open_again(now, p, false);
        self.peers[p].last_rx = last_rx;
        self.arm_timer(now, p);
    }
}
