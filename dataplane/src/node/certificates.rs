//! Certificates of peers, where the node has one (`docs/wire.md`, "Certificates"): refusals, and a
//! limit on verifications.
//!
//! Verifying a certificate costs some hundred microseconds, and any station can send one. So only
//! certificates in OPENs with proof that the sender receives are verified. At most [`REFUSED_MAX`]
//! verifications in [`WINDOW_NS`] may end in refusal, and one for each MAC address, since the owner
//! of a MAC can use any number of station addresses. A malformed handshake message costs half as
//! much and counts the same. A station could replay a valid certificate by opening sessions with
//! several incarnations or epochs: at most [`ACCEPTED_MAX`] of a station are verified per window.

use std::sync::Arc;

use barewire_driver::frame::ETH_HDR_LEN;
use barewire_driver::port::{MacAddr, PortCaps, Station};

use super::claims::SealFault;
use super::{Control, NodeSettings, Notice, Openings, Sessions};
use crate::error::{Error, Result};
use crate::idx::PeerIdx;
use crate::plant::{Bug, planted};
use crate::seal::{BadCert, CertFault, Credentials, Keyring, Refused};
use crate::types::Instant;
use crate::wire::{Base, OpenOp, RstReason};

/// Refused certificates per window after which no other is verified: at 0.3 ms each, 8 % of a
/// processor.
const REFUSED_MAX: usize = 16;

/// Valid certificates of a station per window after which no other of that station is verified. A
/// process opens one session, and another one when the first has ended.
const ACCEPTED_MAX: usize = 4;

/// Window of these limits, nanoseconds.
const WINDOW_NS: u64 = 64_000_000;

/// Recent certificate verifications.
#[derive(Debug, Default)]
pub(super) struct CertBudget {
    since: Instant,
    /// MAC addresses that sent refused certificates.
    refused: Vec<MacAddr>,
    /// Stations that sent valid certificates.
    accepted: Vec<Station>,
}

impl CertBudget {
    /// Whether a certificate of `station` may be verified.
    fn admits(&mut self, now: Instant, station: Station) -> bool {
        if now.since(self.since) >= WINDOW_NS {
            self.refused.clear();
            self.accepted.clear();
        }
        let accepted = self.accepted.iter().filter(|&&accepted| accepted == station).count();
        let is_refused = self.refused.contains(&station.mac);
        self.refused.len() < REFUSED_MAX && !is_refused && accepted < ACCEPTED_MAX
    }

    fn note(&mut self, now: Instant, station: Station, is_accepted: bool) {
        if self.refused.is_empty() && self.accepted.is_empty() {
            self.since = now;
        }
        match is_accepted {
            true => self.accepted.push(station),
            false => self.refused.push(station.mac),
        }
    }
}

/// Whether an OPEN with the certificate of a node with these settings fits a frame of `mtu` bytes.
///
/// # Errors
/// [`Error::Invalid`]: it does not.
pub(super) fn check_fit(s: &NodeSettings, caps: &PortCaps, mtu: usize) -> Result<()> {
    let open_len = s.keys.as_ref().map_or(0, Keyring::open_len);
    match caps.lossless || open_len <= mtu + ETH_HDR_LEN {
        true => Ok(()),
        false => Err(Error::Invalid("the certificates do not fit a frame of the port")),
    }
}

impl Openings {
    /// Whether peers are known by certificates.
    pub fn has_certificate(&self) -> bool {
        self.certified
    }

    /// Records that the certificate of the OPEN with this base was verified, and whether it was
    /// accepted.
    pub(super) fn note_verified(&mut self, now: Instant, base: &Base, is_accepted: bool) {
        let seals = self.seals.as_mut().filter(|seals| seals.ring.has_certificate());
        if let Some(seals) = seals {
            seals.cert_budget.note(now, base.src, is_accepted);
        }
    }
}

impl Sessions<'_> {
    /// Replaces the certificate, the roots and the accepted names of peers, for sessions that open
    /// from now on. Open sessions are not affected; those that are being opened are restarted. No
    /// operation ends.
    ///
    /// # Errors
    /// And nothing has happened: [`Error::OpNotSupp`]: the node was made without a certificate, or
    /// its port loses nothing. [`Error::Invalid`]: the certificates do not fit a frame.
    pub fn set_certificate(&mut self, now: Instant, credentials: Arc<Credentials>) -> Result<()> {
        let seals = self.openings.seals.as_mut().filter(|seals| seals.ring.has_certificate());
        let seals = seals.ok_or(Error::OpNotSupp("this domain has no certificate"))?;
        let mut ring = seals.ring.clone();
        ring.replace_certificate(credentials);
        if !seals.takes(&ring) {
            return Err(Error::Invalid("the certificates do not fit a frame of the port"));
        }
        if !planted(Bug::StaleCertificate) {
            seals.ring = ring;
        }
        seals.cert_budget = CertBudget::default();
        let offers: Vec<_> = std::mem::take(&mut seals.offers).into_keys().collect();
        self.restart_offers(now, &offers);
        Ok(())
    }
}

impl Control<'_> {
    /// Whether the certificate of the OPEN with this base may be verified.
    pub(super) fn may_verify_certificate(&mut self, base: &Base) -> bool {
        let now = self.turn.polled_at;
        let Some(seals) = &mut self.openings.seals else { return true };
        let admitted = !seals.ring.has_certificate() || seals.cert_budget.admits(now, base.src);
        if !admitted {
            self.counters.rx_cert_limited += 1;
            self.observed.note_claim(self.counters, base.src, SealFault::Certificate);
        }
        admitted
    }

    /// Counts an OPEN whose handshake message is refused. Returns whether the cause is its
    /// certificate: then both ends report it.
    pub(super) fn refuse_message(&mut self, base: &Base, op: &OpenOp, why: Refused) -> bool {
        self.openings.note_verified(self.turn.polled_at, base, false);
        let BadCert { fault, name } = match why {
            Refused::Forged => {
                self.observed.note_claim(self.counters, base.src, SealFault::Forged);
                return false;
            }
            Refused::Certificate(bad) => bad,
        };
        self.observed.note_claim(self.counters, base.src, SealFault::Certificate);
        let c = &mut *self.counters;
        *match fault {
            CertFault::Time => &mut c.rx_cert_time,
            CertFault::Issuer => &mut c.rx_cert_issuer,
            CertFault::Name => &mut c.rx_cert_name,
            CertFault::Signature => &mut c.rx_cert_signature,
            CertFault::Malformed => &mut c.rx_cert_malformed,
        } += 1;
        let (now, station) = (self.turn.polled_at, base.src);
        self.report_mismatch(station, Notice::BadCertificate { station, fault, name });
        self.reset_open(now, base, op, RstReason::OtherKey);
        true
    }

    /// Handles a refused certificate in an answer to our OPEN to `p`. Any station can send such an
    /// answer: the session ends a second later if no other answer has arrived.
    pub(super) fn refuse_answer(&mut self, p: PeerIdx) {
        let now = self.turn.polled_at;
        self.openings.note_refusal(p, now, RstReason::OtherKey);
        self.arm_timer(now, p);
    }
}
