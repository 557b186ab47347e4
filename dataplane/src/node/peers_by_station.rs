//! The way from a station to the record of its peer.

use std::hash::{BuildHasher, RandomState};

use barewire_driver::port::Station;

use super::peer::{Peer, Peers};
use crate::idx::PeerIdx;
use crate::index::Index;
use crate::plant::{Bug, planted};
use crate::types::Tenant;

/// The numbers of the peers in a table, by their stations and tenants.
///
/// Senders choose their addresses, so the hash is keyed with a secret.
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
        let hash = |p: PeerIdx| self.keys.hash_one(key_of(&peers[p]));
        let mut index = Index::with_capacity(n);
        peers.iter().for_each(|(p, _)| index.insert(hash(p), p, hash));
        self.index = index;
    }

    /// The peer that is this station, with the key of this tenant.
    pub(crate) fn get(&self, peers: &Peers, station: Station, tenant: Tenant) -> Option<PeerIdx> {
        let wanted = key(station, tenant);
        let is_wanted = |p: PeerIdx| key_of(&peers[p]) == wanted;
        self.index.get(self.keys.hash_one(wanted), is_wanted)
    }

    /// Notes peer `p`, the first that is its station.
    pub(crate) fn insert(&mut self, peers: &Peers, p: PeerIdx) {
        let hash = |p: PeerIdx| self.keys.hash_one(key_of(&peers[p]));
        self.index.insert(hash(p), p, hash);
    }

    /// Forgets peer `p`.
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
