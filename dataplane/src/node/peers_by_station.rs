//! Index of peers by station.

use std::hash::{BuildHasher, RandomState};

use barewire_driver::port::Station;

use super::peer::{Peer, Peers};
use crate::idx::PeerIdx;
use crate::index::Index;
use crate::plant::{Bug, planted};
use crate::types::Tenant;

/// Peer numbers in the peer table by station and tenant.
///
/// Senders choose their addresses, so the hash is keyed with a secret.
#[derive(Debug)]
pub(crate) struct PeersByStation {
    index: Index<PeerIdx>,
    keys: RandomState,
    /// Slot at which the search for a peer to evict continues.
    pub(crate) evict_hand: u32,
}

impl PeersByStation {
    /// Room for `n` peers, more only by [`enlarge`](Self::enlarge). Memory is touched when peers
    /// are added.
    pub(crate) fn with_capacity(n: usize) -> Self {
        Self { index: Index::with_capacity(n), keys: RandomState::new(), evict_hand: 0 }
    }

    /// Makes room for `n` peers, those of `peers` among them.
    pub(crate) fn enlarge(&mut self, peers: &Peers, n: usize) {
        let hash = |p: PeerIdx| self.keys.hash_one(key_of(&peers[p]));
        let mut index = Index::with_capacity(n);
        peers.iter().for_each(|(p, _)| index.insert(hash(p), p, hash));
        self.index = index;
    }

    /// The peer with this station and this tenant's key.
    pub(crate) fn get(&self, peers: &Peers, station: Station, tenant: Tenant) -> Option<PeerIdx> {
        let wanted = key(station, tenant);
        let is_wanted = |p: PeerIdx| key_of(&peers[p]) == wanted;
        self.index.get(self.keys.hash_one(wanted), is_wanted)
    }

    /// Adds peer `p`, the first with its station.
    pub(crate) fn insert(&mut self, peers: &Peers, p: PeerIdx) {
        let hash = |p: PeerIdx| self.keys.hash_one(key_of(&peers[p]));
        self.index.insert(hash(p), p, hash);
    }

    /// Removes peer `p`.
    pub(crate) fn remove(&mut self, peers: &Peers, p: PeerIdx) {
        let hash = |p: PeerIdx| self.keys.hash_one(key_of(&peers[p]));
        self.index.remove(hash(p), p, hash);
    }
}

fn key_of(peer: &Peer) -> (Station, Tenant) {
    key(peer.station(), peer.tenant)
}

fn key(station: Station, tenant: Tenant) -> (Station, Tenant) {
    match planted(Bug::OneStationPerMac) {
        true => (Station { number: 0, ..station }, tenant),
        false => (station, tenant),
    }
}
