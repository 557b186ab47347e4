//! The way from a MAC to the record of its peer.

use std::hash::{BuildHasher, RandomState};

use barewire_driver::port::MacAddr;

use super::peer::Peers;
use crate::index::Index;

/// The numbers of the peers in a table, by their MACs.
///
/// Whoever can send a frame chooses MACs, so what their hashes are is nobody's to know.
#[derive(Debug)]
pub(crate) struct Stations {
    index: Index,
    keys: RandomState,
    /// Where the search for a peer to forget goes on.
    pub(crate) evict_hand: u32,
}

impl Stations {
    /// Room for `n` peers, which is all that there will be: memory is touched when they come.
    pub(crate) fn with_capacity(n: usize) -> Self {
        Self { index: Index::with_capacity(n), keys: RandomState::new(), evict_hand: 0 }
    }

    /// The peer that has this MAC.
    pub(crate) fn get(&self, peers: &Peers, mac: MacAddr) -> Option<u32> {
        self.index.get(self.keys.hash_one(mac), |p| peers[p].mac() == mac)
    }

    /// Notes peer `p`, the first with its MAC.
    pub(crate) fn insert(&mut self, peers: &Peers, p: u32) {
        let hash = |p| self.keys.hash_one(peers[p].mac());
        self.index.insert(hash(p), p, hash);
    }

    /// Forgets peer `p`.
    pub(crate) fn remove(&mut self, peers: &Peers, p: u32) {
        let hash = |p| self.keys.hash_one(peers[p].mac());
        self.index.remove(hash(p), p, hash);
    }
}
