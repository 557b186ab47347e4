//! Changes of a running node's keys: the list of keys that open sessions (`docs/security.md`,
//! "Another key without a pause"), and the age of session keys.
//!
//! An open session has its own keys and is not affected by the list. A session that is being opened
//! uses the key that was first in the list when it began: if another key is first by now, opening
//! is restarted.
//!
//! Session keys change with the number of frames anyway (`seal/session.rs`). A key that reaches the
//! age [`rekey_ns`](super::NodeSettings::rekey_ns) before it is used up is replaced as well: the
//! frame counter skips to the next key. The peer tries at most the next key, so the sender waits
//! until the peer has acknowledged a packet under the current one. Ages are checked when a frame is
//! sent: a node that sends nothing keeps its keys until its next frame.

use super::notice::EndReason;
use super::peer::State;
use super::{Control, Openings, Sessions};
use crate::error::{Error, Result};
use crate::idx::PeerIdx;
use crate::plant::{Bug, planted};
use crate::proto::matching::Src;
use crate::rel::psn::Psn;
use crate::seal::{Keyring, PreSharedKey};
use crate::types::{Instant, Tenant};

/// Checks of the age of keys per [`rekey_ns`](super::NodeSettings::rekey_ns).
const CHECKS: u64 = 8;

/// Age of the key that seals outgoing frames of a session.
#[derive(Clone, Copy, Debug)]
pub(super) struct Age {
    since: Instant,
    /// Generation of the key. The number of frames also advances it.
    key: u64,
    /// Lower bound of the PSNs of packets sent under the key. `None` if the peer is known to have
    /// it.
    first: Option<Psn>,
}

impl Age {
    /// Of a key that both ends have at `now`.
    pub(super) fn new(now: Instant) -> Self {
        Self { since: now, key: 0, first: None }
    }
}

impl Openings {
    /// Whether the age of keys is to be checked.
    pub(super) fn key_check_is_due(&self, now: Instant) -> bool {
        self.seals.as_ref().is_some_and(|seals| now >= seals.key_check_at)
    }

    /// Whether `key` is listed, so that frames are sealed with it.
    pub fn lists_key(&self, key: &PreSharedKey) -> bool {
        self.seals.as_ref().is_some_and(|seals| seals.ring.lists_key(key))
    }

    /// Whether each key belongs to a tenant.
    pub fn has_tenants(&self) -> bool {
        self.seals.as_ref().is_some_and(|seals| seals.ring.is_of_tenants())
    }

    /// The tenants whose keys are listed; only [`Tenant::NONE`] if keys belong to no tenant.
    pub(super) fn tenants(&self) -> impl Iterator<Item = Tenant> {
        let one = self.seals.is_none().then_some(Tenant::NONE);
        let ring = self.seals.as_ref().map(|seals| &seals.ring);
        one.into_iter().chain(ring.into_iter().flat_map(Keyring::tenants))
    }

    /// Whether peers may be inserted under this tenant's key.
    pub(super) fn lists_tenant(&self, tenant: Tenant) -> bool {
        self.tenants().any(|listed| listed == tenant)
    }

    /// Adds the key of a tenant, and returns the tenant. A key that was added before keeps its
    /// tenant. From now on a holder of the key can open sessions.
    ///
    /// # Errors
    /// And nothing has happened:
    /// - [`Error::OpNotSupp`]: the keys of the node are not of tenants.
    /// - [`Error::NoMem`]: there are [`KEYS_MAX`](crate::seal::KEYS_MAX), or 255 were added in all.
    pub fn add_tenant(&mut self, key: PreSharedKey) -> Result<Tenant> {
        let seals = self.seals.as_mut().filter(|seals| seals.ring.is_of_tenants());
        let seals = seals.ok_or(Error::OpNotSupp("the keys of this domain are not of tenants"))?;
        let added = seals.ring.add(key).ok_or(Error::NoMem)?;
        self.other_keys.forget();
        Ok(added)
    }
}

impl Sessions<'_> {
    /// Replaces the list of keys, in order of preference: the first one opens sessions, each is
    /// accepted from a peer that opens one. Open sessions are not affected, including those opened
    /// under a key that is no longer listed; such a key itself is erased. No operation ends.
    ///
    /// # Errors
    /// And nothing has happened:
    /// - [`Error::OpNotSupp`]: the node was made without a key, its port loses nothing, its keys
    ///   are those of tenants, or it has a certificate in place of keys.
    /// - [`Error::Invalid`]: no key, or more than [`KEYS_MAX`](crate::seal::KEYS_MAX).
    pub fn set_keys(&mut self, now: Instant, keys: Vec<PreSharedKey>) -> Result<()> {
        let Some(seals) = &mut self.openings.seals else {
            return Err(Error::OpNotSupp("the frames of this domain are not sealed"));
        };
        if seals.ring.is_of_tenants() {
            return Err(Error::OpNotSupp("the keys of this domain are those of address vectors"));
        }
        if seals.ring.has_certificate() {
            let why = "this domain has a certificate in place of keys, which its files renew";
            return Err(Error::OpNotSupp(why));
        }
        let first = seals.ring.first();
        if !seals.ring.replace(keys) {
            return Err(Error::Invalid("a list of keys has 1 to 4"));
        }
        let offers: Vec<(u64, Tenant)> = match seals.ring.first() == first {
            true => Vec::new(),
            false => std::mem::take(&mut seals.offers).into_keys().collect(),
        };
        self.restart_offers(now, &offers);
        Ok(())
    }

    /// The keys or the certificate have changed: sessions that are being opened with the previous
    /// one (`offered`) are restarted, and their keys do not count as refused.
    pub(super) fn restart_offers(&mut self, now: Instant, offered: &[(u64, Tenant)]) {
        self.openings.other_keys.forget();
        let opening = |p: &PeerIdx| {
            let peer = &self.peers[*p];
            let opens = matches!(peer.state, State::Opening | State::Answered);
            opens && !peer.path.is_near()
        };
        let peers: Vec<PeerIdx> = self.peers.iter().map(|(p, _)| p).filter(opening).collect();
        for p in peers {
            let peer = &self.peers[p];
            let is_offered =
                peer.state == State::Opening && offered.contains(&(peer.addr, peer.tenant));
            if is_offered && !planted(Bug::StaleHandshakeKey) {
                self.restart_open(now, p);
            } else {
                self.openings.forget_refusal(p);
            }
        }
    }

    /// Removes the key of a tenant from the list, overwrites it, and ends the tenant's sessions.
    ///
    /// # Errors
    /// And nothing has happened: [`Error::Invalid`]: no such tenant's key is listed.
    /// [`Error::Busy`]: an address in an address vector, or a posted receive, names it.
    pub fn remove_tenant(&mut self, now: Instant, tenant: Tenant) -> Result<()> {
        if !self.openings.has_tenants() || !self.openings.lists_tenant(tenant) {
            return Err(Error::Invalid("not the handle of a key"));
        }
        let theirs = self.peers.iter().filter(|(_, peer)| peer.tenant == tenant);
        let theirs: Vec<PeerIdx> = theirs.map(|(p, _)| p).collect();
        let waits = self.posted.pool.iter().any(|(_, receive)| receive.src == Src::any_of(tenant));
        if waits || theirs.iter().any(|&p| self.peers[p].av_refs > 0) {
            return Err(Error::Busy);
        }
        for p in theirs.into_iter().filter(|_| !planted(Bug::RemovedTenantSessionsKept)) {
            self.end_session(now, p, EndReason::Dropped);
        }
        if let Some(seals) = &mut self.openings.seals {
            seals.ring.remove(tenant);
        }
        Ok(())
    }

    /// Restarts the opening of the session with `p`, under another key. The silence of the peer
    /// counts on.
    fn restart_open(&mut self, now: Instant, p: PeerIdx) {
        let last_rx = self.peers[p].last_rx;
        self.reopen(now, p, false);
        self.peers[p].last_rx = last_rx;
        self.control().arm_timer(now, p);
    }
}

impl Control<'_> {
    /// Replaces old keys, and erases those that only reordered frames needed. A peer to which
    /// nothing would be sent gets a PING, so that it replaces its old key too.
    #[cold]
    pub(super) fn rotate_old_keys(&mut self, now: Instant) {
        let every = self.settings.rekey_ns;
        let Some(seals) = &mut self.openings.seals else { return };
        seals.key_check_at = now + (every / CHECKS).max(1);
        let mut renewed = Vec::new();
        for (p, peer) in self.peers.iter() {
            let sealed = peer.state == State::Open && peer.path.is_sealed();
            let session = sealed.then(|| seals.sessions.get_mut(&peer.session())).flatten();
            let Some(session) = session else { continue };
            session.keys.forget_overtaken();
            let (age, key) = (&mut session.age, session.keys.generation());
            if age.key != key {
                *age = Age { since: now, key, first: Some(peer.snd.nxt) };
            }
            age.first = age.first.filter(|first| (peer.snd.una.0.wrapping_sub(first.0) as i32) < 1);
            let known = age.first.is_none() || planted(Bug::OldKeyDroppedEarly);
            if known && now.since(age.since) >= every {
                session.keys.renew();
                let key = session.keys.generation();
                *age = Age { since: now, key, first: Some(peer.snd.nxt) };
                renewed.push(p);
            }
        }
        for p in renewed {
            self.peers[p].request_ping();
            self.due.make_ready(self.peers, p);
        }
    }
}
