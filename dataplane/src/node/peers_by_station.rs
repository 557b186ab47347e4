//! The way from a station to the record of its peer.

use std::hash::{BuildHasher, RandomState};

use barewire_driver::port::Station;

use super::peer::Peers;
use crate::idx::PeerIdx;
use crate::index::Index;
use crate::plant::{Bug, planted};

/// The numbers of the peers in a table, by their stations.
///
/// Whoever can send a frame chooses addresses, so what their hashes are is nobody's to know.
#[derive(Debug)]
pub(crate) struct PeersByStation {
    index: Index<PeerIdx>,
    keys: RandomState,
    /// Where the search for a peer to forget goes on.
    pub(crate) evict_hand: u32,
}

impl PeersByStation {
    /// Room for `n` peers, more only by [`enlarge`](Self::enlarge): memory is touched when they
    /// come.
    pub(crate) fn with_capacity(n: usize) -> Self {
        Self { index: Index::with_capacity(n), keys: RandomState::new(), evict_hand: 0 }
    }

    /// Room for `n` peers, those of `peers` among them.
    pub(crate) fn enlarge(&mut self, peers: &Peers, n: usize) {
        let hash = |p: PeerIdx| self.keys.hash_one(key(peers[p].station()));
        let mut index = Index::with_capacity(n);
        peers.iter().for_each(|(p, _)| index.insert(hash(p), p, hash));
        self.index = index;
    }

    /// The peer that is this station.
    pub(crate) fn get(&self, peers: &Peers, station: Station) -> Option<PeerIdx> {
        let wanted = key(station);
        let is_wanted = |p: PeerIdx| key(peers[p].station()) == wanted;
        self.index.get(self.keys.hash_one(wanted), is_wanted)
    }

    /// Notes peer `p`, the first that is its station.
    pub(crate) fn insert(&mut self, peers: &Peers, p: PeerIdx) {
        let hash = |p: PeerIdx| self.keys.hash_one(key(peers[p].station()));
        self.index.insert(hash(p), p, hash);
    }

    /// Forgets peer `p`.
    pub(crate) fn remove(&mut self, peers: &Peers, p: PeerIdx) {
        let hash = |p: PeerIdx| self.keys.hash_one(key(peers[p].station()));
        self.index.remove(hash(p), p, hash);
    }
}

fn key(station: Station) -> Station {
    match planted(Bug::OneStationPerMac) {
        true => Station { number: 0, ..station },
        false => station,
    }
}
