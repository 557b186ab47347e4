//! Completion queues, counters and address vectors: calls of the application.

use barewire_driver::hint::cold;

use super::notice::EndReason;
use super::peer::{Peer, Peers, SourceName, State};
use super::tally::Tally;
use super::{AvId, AvTable, CntrId, Control, CqId, Node, Objects, Receiving, Sessions};
use crate::av::{Av, AvEntry};
use crate::error::{Error, Result};
use crate::idx::{EpIdx, PeerIdx};
use crate::plant::{Bug, planted};
use crate::types::{CqErr, Cqe, EpAddr, FiAddr, Instant, Tenant};

impl Peers {
    /// The address inserted as `entry`.
    pub(super) fn addr_of(&self, entry: AvEntry) -> EpAddr {
        let (station, ep) = (self[entry.peer].station(), entry.inserted_ep());
        EpAddr { station, ep, incarnation: entry.incarnation }
    }
}

impl Node {
    /// Takes up to `out.len()` completions, oldest first.
    ///
    /// # Errors
    /// [`Error::Again`]: the queue is empty. [`Error::Avail`]: the next completion is an error.
    #[inline]
    pub fn cq_read(&mut self, cq: CqId, out: &mut [Cqe]) -> Result<usize> {
        self.cqs.by_handle(cq.0).ok_or(Error::BadFd)?;
        let mut to = out.iter_mut();
        let taken = self.cq_take(cq, to.len(), |cqe| {
            if let Some(to) = to.next() {
                *to = *cqe;
            }
        });
        taken.filter(|&n| n > 0).map_or_else(|| self.cqs.empty_reason(cq), Ok)
    }

    /// Reads up to `most` completions, oldest first, and lends each to `put` in place. Returns
    /// their number: 0 if an error is next, which [`Cqs::empty_reason`](super::Cqs::empty_reason)
    /// reports. `None` if the queue is empty: then a turn of the loop may add completions.
    ///
    /// The generation of `cq` is NOT checked: the caller keeps the queue open. A stale id reads the
    /// queue that reused the slot, or nothing if the slot is free.
    #[inline(always)]
    pub fn cq_take(&mut self, cq: CqId, most: usize, put: impl FnMut(&Cqe)) -> Option<usize> {
        let Some(table) = self.cqs.at_mut(cq.0.idx()) else { return Some(0) };
        let (n, retry) = table.take(most, put)?;
        if retry {
            // Completions wait for room in the queue.
            cold(());
            self.receiving().retry_cq_waiters(cq.0.idx());
        }
        Some(n)
    }
}

impl Receiving<'_> {
    /// Takes the error entry at the head of the queue.
    ///
    /// # Errors
    /// [`Error::Again`]: the head is not an error.
    pub fn cq_readerr(&mut self, cq: CqId) -> Result<CqErr> {
        let table = self.sessions.cqs.by_handle_mut(cq.0).ok_or(Error::BadFd)?;
        let err = table.cq.readerr();
        if table.cq_blocked {
            self.retry_cq_waiters(cq.0.idx());
        }
        err
    }
}

impl Sessions<'_> {
    /// Makes an address vector for about `count` addresses. The node makes room for as many peers,
    /// up to its limit and as far as there is memory; a later insertion reports a lack of room.
    ///
    /// # Errors
    /// [`Error::NoMem`]: there are 1,024 already.
    pub fn av_open(&mut self, count: usize) -> Result<AvId> {
        if count > self.peers.capacity() {
            self.control().enlarge(count);
        }
        let table = AvTable { av: Av::with_capacity(count.min(1 << 20)), bound: 0 };
        let idx = self.avs.alloc(table).ok_or(Error::NoMem)?;
        Ok(AvId(self.avs.handle(idx)))
    }

    /// Adds an address and returns its index: the lowest that is free, so 0, 1, 2 and so on.
    ///
    /// If the address names another incarnation of a peer than that of the open session, the
    /// session ends at once (rule S9), with all of its messages that have not been received: on a
    /// lossless port, receive them before ([`supersedes`](Control::supersedes)). An address of an
    /// earlier incarnation of this node reaches nothing.
    ///
    /// # Errors
    /// [`Error::NoMem`]: the node has as many peers as its [limit](super::NodeSettings::peer_limit)
    /// allows, and all are in use.
    /// [`Error::Invalid`]: keys belong to tenants, and no tenant is named.
    pub fn av_insert(&mut self, now: Instant, av: AvId, addr: EpAddr) -> Result<FiAddr> {
        self.av_insert_of(now, av, addr, Tenant::NONE)
    }

    /// As [`av_insert`](Self::av_insert), for the endpoint at `addr` under the key of `tenant`:
    /// sessions with it use that key. The same address under two keys is two peers.
    ///
    /// # Errors
    /// As there; [`Error::Invalid`]: no such tenant's key is listed.
    pub fn av_insert_of(
        &mut self,
        now: Instant,
        av: AvId,
        addr: EpAddr,
        tenant: Tenant,
    ) -> Result<FiAddr> {
        self.avs.by_handle(av.0).ok_or(Error::BadFd)?;
        if !self.openings.lists_tenant(tenant) {
            return Err(Error::Invalid("the address needs the handle of a listed key"));
        }
        if self.peers.is_full() {
            self.objects().release_awaited();
        }
        let p = match self.peer_of(now, addr.station, tenant, usize::MAX) {
            Some(p) => p,
            None => {
                let count = 2 * self.peers.capacity();
                if !self.control().enlarge(count) {
                    return Err(Error::NoMem);
                }
                self.peer_of(now, addr.station, tenant, 0).ok_or(Error::NoMem)?
            }
        };
        let known = self.peers[p].inc;
        // This node's own incarnation is known, whatever an address of its station names.
        let is_own = addr.station == self.port.station;
        if addr.incarnation != 0 && known != addr.incarnation && !is_own {
            if known != 0 {
                self.end_session(now, p, EndReason::Superseded);
            }
            self.control().note_life(p, addr.incarnation);
            self.peers[p].closed_epoch = 0;
        }
        let peer = &mut self.peers[p];
        // Operations to the incarnation that an OPEN claimed end with it from now on.
        peer.is_life_claimed &= addr.incarnation == 0;
        // If an endpoint has several indices, the newest is reported as the source.
        (peer.av_refs, peer.source) = (peer.av_refs + 1, SourceName::UNKNOWN);
        let EpAddr { ep, incarnation, .. } = addr;
        let entry = AvEntry { peer: p, ep, rx_ctx: 0, incarnation };
        Ok(self.avs[av.0.idx()].av.insert(entry))
    }

    /// The record of the peer with this station and tenant, created if there is none. `None` if the
    /// table is full and none of the next `scan_max` records can be evicted.
    pub(crate) fn peer_of(
        &mut self,
        now: Instant,
        station: barewire_driver::port::Station,
        tenant: Tenant,
        scan_max: usize,
    ) -> Option<PeerIdx> {
        if let Some(p) = self.by_station.get(self.peers, station, tenant) {
            return Some(p);
        }
        let mut peer = Peer::new(station, tenant, self.port.station, now);
        peer.last_rx = self.turn.polled_at;
        if self.peers.is_full() {
            // Its slot is reused next, with the slot's place in the queue for blocks.
            peer.wants_blocks = self.evict(now, scan_max)?;
        }
        let p = self.peers.alloc(peer)?;
        self.by_station.insert(self.peers, p);
        if self.openings.note_slot(p) {
            self.observed.tallies.push(Tally::default());
        }
        if station == self.port.station {
            self.control().open_to_self(p);
        }
        Some(p)
    }

    /// Evicts one of the next `scan_max` peers that no address names and no operation involves:
    /// preferably one without an open session, then the one least recently received from. Returns
    /// whether its slot was, and still is, in the queue for blocks.
    ///
    /// The table is full. An OPEN may cost the examination of a few records but no scan of the
    /// table, or a flood of OPENs would stall the node.
    fn evict(&mut self, now: Instant, scan_max: usize) -> Option<bool> {
        let count = self.peers.capacity();
        let mut found = None;
        for _ in 0..scan_max.min(count) {
            let p = PeerIdx::of(self.by_station.evict_hand);
            self.by_station.evict_hand = (p.get() + 1) % count as u32;
            let Some(peer) = self.peers.get(p) else { continue };
            if peer.av_refs > 0 || peer.queued || !peer.is_idle() {
                continue;
            }
            let rank = (peer.state == State::Open, peer.last_rx, p);
            found = Some(found.map_or(rank, |best| rank.min(best)));
        }
        let (_, _, p) = found?;
        self.end_session(now, p, EndReason::Evicted);
        self.wheel.disarm(p);
        self.by_station.remove(self.peers, p);
        self.observed.losses.forget_peer(p);
        Some(self.peers.free(p).wants_blocks)
    }
}

impl Objects<'_> {
    /// The address under an index.
    ///
    /// # Errors
    /// [`Error::Invalid`]: nothing is inserted under this index.
    pub fn av_lookup(&self, av: AvId, addr: FiAddr) -> Result<EpAddr> {
        Ok(self.peers.addr_of(self.avs.entry(av, addr)?))
    }

    /// The tenant under whose key the address at an index was inserted.
    ///
    /// # Errors
    /// [`Error::Invalid`]: nothing is inserted under this index.
    pub fn av_tenant(&self, av: AvId, addr: FiAddr) -> Result<Tenant> {
        Ok(self.peers[self.avs.entry(av, addr)?.peer].tenant)
    }

    /// Whether peer `p` may reach endpoint `e`, which is open. Counts a refusal.
    #[inline]
    pub(super) fn may_reach(&mut self, p: PeerIdx, e: EpIdx) -> bool {
        !self.settings.inserted || self.is_inserted(p, e)
    }

    #[cold]
    fn is_inserted(&mut self, p: PeerIdx, e: EpIdx) -> bool {
        // A peer that may reach an endpoint may reach its collective side, also before the endpoint
        // has joined a group of that peer.
        let owner = if self.coll.is_side(self.eps, e) {
            self.eps.slot(self.eps[e].number ^ super::ep::SIDE)
        } else {
            e
        };
        let known = [e, owner].into_iter().filter_map(|e| self.eps.get(e)).any(|ep| {
            ep.admits_all || self.avs.get(ep.av).is_some_and(|table| table.av.has_peer(p))
        });
        // A peer that is this node itself needs no entry in the vector.
        let may = known || self.peers[p].station() == self.port.station;
        self.counters.rx_not_inserted += u64::from(!may);
        may
    }

    /// Closes an address vector.
    ///
    /// # Errors
    /// [`Error::Busy`]: an endpoint is bound to it. [`Error::BadFd`]: it was closed.
    pub fn av_close(&mut self, av: AvId) -> Result<()> {
        if self.avs.by_handle(av.0).ok_or(Error::BadFd)?.bound > 0 {
            return Err(Error::Busy);
        }
        let table = self.avs.free(av.0.idx());
        for (_, entry) in table.av.iter() {
            self.peers[entry.peer].source = SourceName::UNKNOWN;
            self.awaited.push(entry.peer);
        }
        self.release_awaited();
        Ok(())
    }

    /// Removes an address. Operations to it that are under way go on.
    ///
    /// # Errors
    /// [`Error::Invalid`]: nothing is inserted under this index.
    pub fn av_remove(&mut self, av: AvId, addr: FiAddr) -> Result<()> {
        let table = self.avs.by_handle_mut(av.0).ok_or(Error::BadFd)?;
        let entry = table.av.remove(addr).ok_or(Error::Invalid("address not in the AV"))?;
        if !planted(Bug::StaleSource) {
            self.peers[entry.peer].source = SourceName::UNKNOWN;
        }
        if !planted(Bug::StaleRoute) {
            self.eps.forget_routes();
        }
        // A receive that names the peer holds its record, which must not be reused meanwhile.
        self.awaited.push(entry.peer);
        self.release_awaited();
        Ok(())
    }

    /// Releases the references to peers that no posted receive names any more, and all but one to
    /// each of the others: an address may be inserted and removed often while a receive names it.
    fn release_awaited(&mut self) {
        let Self { awaited, posted, peers, .. } = self;
        let mut named: Vec<PeerIdx> = posted.pool.iter().filter_map(|(_, r)| r.named()).collect();
        named.sort_unstable();
        awaited.sort_unstable();
        let mut last = None;
        awaited.retain(|&p| {
            let stays = last != Some(p) && named.binary_search(&p).is_ok();
            if !stays {
                peers[p].av_refs -= 1;
            }
            last = Some(p);
            stays
        });
    }

    /// Closes a completion queue and drops its entries.
    ///
    /// # Errors
    /// [`Error::Busy`]: an endpoint is bound to it. [`Error::BadFd`]: it was closed.
    pub fn cq_close(&mut self, cq: CqId) -> Result<()> {
        let table = self.cqs.by_handle(cq.0).ok_or(Error::BadFd)?;
        if table.is_bound() {
            return Err(Error::Busy);
        }
        self.cqs.free(cq.0.idx());
        self.note_starved();
        Ok(())
    }

    /// Closes a counter.
    ///
    /// # Errors
    /// [`Error::Busy`]: an endpoint is bound to it, or it will count an operation under way.
    /// [`Error::BadFd`]: it was closed.
    pub fn cntr_close(&mut self, cntr: CntrId) -> Result<()> {
        if self.cntr_in_use(cntr)? {
            return Err(Error::Busy);
        }
        self.cntrs.free(cntr.0.idx());
        Ok(())
    }

    /// Whether the counter cannot be closed.
    ///
    /// # Errors
    /// [`Error::BadFd`].
    pub fn cntr_in_use(&mut self, cntr: CntrId) -> Result<bool> {
        if self.cntrs.cntr(cntr)?.bound > 0 {
            self.leave_cntr(cntr.0.idx());
        }
        Ok(self.cntrs.cntr(cntr)?.bound > 0)
    }

    /// Makes completions report an address as `user_id`, until it is removed.
    ///
    /// # Errors
    /// [`Error::Invalid`]: nothing is inserted under this index. [`Error::BadFd`]: it was closed.
    pub fn av_set_user_id(&mut self, av: AvId, addr: FiAddr, user_id: FiAddr) -> Result<()> {
        let table = self.avs.by_handle_mut(av.0).ok_or(Error::BadFd)?;
        let named = table.av.set_user_id(addr, user_id);
        let entry = named.ok_or(Error::Invalid("address not in the AV"))?;
        self.peers[entry.peer].source = SourceName::UNKNOWN;
        Ok(())
    }
}

impl Control<'_> {
    /// Whether inserting `addr` ends a session on a lossless path: frames of it may be unread in
    /// the port, and their senders may have completed their delivery.
    pub fn supersedes(&self, addr: &EpAddr) -> bool {
        let peer =
            self.by_station.get(self.peers, addr.station, Tenant::NONE).map(|p| &self.peers[p]);
        let other = |peer: &Peer| peer.inc != 0 && peer.inc != addr.incarnation;
        let ends = |peer: &Peer| peer.path.is_lossless() && other(peer);
        addr.incarnation != 0 && peer.is_some_and(ends)
    }

    /// Makes room for `n` peers, as far as the limit and memory allow, and returns whether room was
    /// added. Peers keep their numbers.
    #[cold]
    fn enlarge(&mut self, n: usize) -> bool {
        let before = self.peers.capacity();
        let n = n.min(self.settings.peer_limit).min(Node::PEER_MAX);
        if n <= before || !self.peers.enlarge(n) {
            return false;
        }
        self.by_station.enlarge(self.peers, n);
        self.wheel.enlarge(n);
        self.settings.peer_max = n;
        true
    }

    /// Records the current incarnation of a peer; 0: any.
    pub(super) fn note_life(&mut self, p: PeerIdx, inc: u64) {
        let peer = &mut self.peers[p];
        let known = std::mem::replace(&mut peer.inc, inc);
        // An incarnation named from now on is not the one that the last OPEN claimed.
        peer.is_life_claimed &= inc != 0;
        if known != inc && !planted(Bug::StaleSource) {
            peer.source = SourceName::UNKNOWN;
        }
        // While no incarnation is known no cached route names one.
        if known != 0 && known != inc {
            self.observed.losses.forget_peer(p);
            self.eps.forget_routes();
        }
    }
}
