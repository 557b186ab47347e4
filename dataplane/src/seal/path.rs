//! Certificate path validation: of a peer's certificate, and of the node's own before peers see it.

use std::time::Duration;

use rustls_pki_types::{CertificateDer, TrustAnchor, UnixTime};
use webpki::{ALL_VERIFICATION_ALGS, EndEntityCert, Error, KeyUsage};

/// The handshake message that a certificate is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Opener,
    Answerer,
}

impl Role {
    /// The extended key usage that the sender's certificate needs, if it lists any.
    fn usage(self) -> KeyUsage {
        match self {
            Self::Opener => KeyUsage::client_auth(),
            Self::Answerer => KeyUsage::server_auth(),
        }
    }
}

/// Verifies that a path leads from `leaf` to one of the roots, directly or through certificates of
/// `others`, at this time and for this message.
///
/// # Errors
/// The reason why there is no valid path.
pub(super) fn verify(
    leaf: &EndEntityCert<'_>,
    others: &[CertificateDer<'_>],
    roots: &[TrustAnchor<'_>],
    now: UnixTime,
    role: Role,
) -> Result<(), Error> {
    let (algs, usage) = (ALL_VERIFICATION_ALGS, role.usage());
    leaf.verify_for_usage(algs, roots, others, now, usage, None, None).map(|_| ())
}

/// [`verify`] for both messages, as a node needs for its own certificate. Returns the first and the
/// last second at which all certificates of the path are valid, since 1970.
///
/// # Errors
/// As [`verify`].
pub(super) fn verify_own(
    leaf: &EndEntityCert<'_>,
    others: &[CertificateDer<'_>],
    roots: &[TrustAnchor<'_>],
    now: UnixTime,
) -> Result<[u64; 2], Error> {
    verify(leaf, others, roots, now, Role::Answerer)?;
    let (algs, usage) = (ALL_VERIFICATION_ALGS, Role::Opener.usage());
    let way = leaf.verify_for_usage(algs, roots, others, now, usage, None, None)?;
    let [mut first, mut last] = validity(leaf)?;
    for cert in way.intermediate_certificates() {
        let [not_before, not_after] = validity(&EndEntityCert::try_from(&cert.der())?)?;
        (first, last) = (first.max(not_before), last.min(not_after));
    }
    Ok([first, last])
}

/// First and last second of a certificate's validity. The library reports them when it refuses the
/// certificate for another time, before any other check.
fn validity(cert: &EndEntityCert<'_>) -> Result<[u64; 2], Error> {
    let at = |seconds| {
        let time = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        verify(cert, &[], &[], time, Role::Opener).err()
    };
    // Validity of certificates ends with the year 9999 at the latest.
    let not_after = match at(1 << 40) {
        Some(Error::CertExpired { not_after, .. }) => not_after.as_secs(),
        _ => return Err(Error::BadDerTime),
    };
    let not_before = match at(0) {
        Some(Error::CertNotValidYet { not_before, .. }) => not_before.as_secs(),
        _ => 0,
    };
    Ok([not_before, not_after])
}
