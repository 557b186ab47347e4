//! What a message of the handshake carries where identities are of certificates: the chain, and a
//! signature that shows that its sender has the key of the leaf (`docs/wire.md`, "Certificates").

use aws_lc_rs::digest;
use rustls_pki_types::CertificateDer;
use webpki::{EndEntityCert, Error};

use super::credentials::{CHAIN_MAX, Credentials, HEAD_LEN, Scheme};
use super::identity::{Identity, admits};
use super::path::{Role, verify};

/// What a signature is of, besides the certificates: the hash of the handshake before the message,
/// and the ephemeral key with which that begins. (What the first OPEN says is in that hash, and the
/// answer's is tagged with what the handshake gives.)
#[derive(Clone, Copy, Debug)]
pub(super) struct Signed {
    pub(super) role: Role,
    pub(super) hash: [u8; 32],
    pub(super) ephemeral: [u8; 32],
}

/// Why the certificate of a peer is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CertFault {
    /// It, or one that it leads to a root by, has expired or is not valid yet.
    Time,
    /// It leads to none of the roots, or may not be used for this.
    Issuer,
    /// It names nobody whom this node talks to.
    Name,
    /// The signature is not of its key, or is of another handshake.
    Signature,
    /// It cannot be read.
    Malformed,
}

/// Why a peer is refused, and who he says he is, if a root says so too.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadCert {
    /// Why.
    pub fault: CertFault,
    /// The name, if the certificate leads to a root.
    pub name: Option<Identity>,
}

impl From<CertFault> for BadCert {
    fn from(fault: CertFault) -> Self {
        Self { fault, name: None }
    }
}

impl Signed {
    /// What is signed: as the CertificateVerify of TLS 1.3 (RFC 8446, 4.4.3).
    fn bytes(&self, certificates: &[u8]) -> Vec<u8> {
        let context: &[u8] = match self.role {
            Role::Opener => b"barewire 3 certificate, opener",
            Role::Answerer => b"barewire 3 certificate, answerer",
        };
        let sum = digest::digest(&digest::SHA256, certificates);
        [&[b' '; 64], context, &[0], &self.hash, &self.ephemeral, sum.as_ref()].concat()
    }
}

/// The payload of a message.
pub(super) fn prove(credentials: &Credentials, signed: &Signed) -> Vec<u8> {
    let mut certificates = Vec::new();
    for cert in credentials.chain() {
        certificates.extend((cert.len() as u16).to_le_bytes());
        certificates.extend_from_slice(cert);
    }
    let made = credentials.sign(&signed.bytes(&certificates));
    // It has signed before, when it was read. A peer refuses none.
    let (scheme, signature) = made.unwrap_or((Scheme::Ed25519, Vec::new()));
    let mut payload = Vec::with_capacity(HEAD_LEN + signature.len() + certificates.len());
    payload.extend((scheme as u16).to_le_bytes());
    payload.extend((signature.len() as u16).to_le_bytes());
    payload.extend(signature);
    payload.extend(certificates);
    payload
}

/// Checks the payload of a message: whom its sender is proven to be.
///
/// # Errors
/// See [`CertFault`].
pub(super) fn check(
    credentials: &Credentials,
    signed: &Signed,
    payload: &[u8],
) -> Result<Identity, BadCert> {
    let (scheme, signature, certificates) = split(payload).ok_or(CertFault::Malformed)?;
    let chain = chain_of(certificates).ok_or(CertFault::Malformed)?;
    let leaf = EndEntityCert::try_from(&chain[0]).map_err(|_| CertFault::Malformed)?;
    let (roots, now) = (credentials.roots(), credentials.now());
    let led = verify(&leaf, &chain[1..], roots, now, signed.role);
    led.map_err(|why| fault_of(&why))?;
    let name = Identity::of(&leaf);
    let refused = |fault| BadCert { fault, name: name.clone() };
    let message = signed.bytes(certificates);
    let right = leaf.verify_signature(scheme.verifier(), &message, signature);
    right.map_err(|_| refused(CertFault::Signature))?;
    let named =
        name.as_ref().filter(|name| admits(credentials.identity(), credentials.peers(), name));
    named.cloned().ok_or_else(|| refused(CertFault::Name))
}

/// Whom the payload of a first message would prove its sender to be, if the handshake's hash,
/// and ephemeral key were both zero; and such a payload. For tests with payloads of any kind.
///
/// # Errors
/// See [`CertFault`].
pub fn examine(credentials: &Credentials, payload: &[u8]) -> Result<Identity, BadCert> {
    check(credentials, &NOTHING, payload)
}

/// See [`examine`].
pub fn sample(credentials: &Credentials) -> Vec<u8> {
    prove(credentials, &NOTHING)
}

const NOTHING: Signed = Signed { role: Role::Opener, hash: [0; 32], ephemeral: [0; 32] };

fn fault_of(why: &Error) -> CertFault {
    match why {
        Error::CertExpired { .. } | Error::CertNotValidYet { .. } => CertFault::Time,
        Error::NameConstraintViolation => CertFault::Name,
        Error::BadDer | Error::BadDerTime | Error::TrailingData(_) => CertFault::Malformed,
        _ => CertFault::Issuer,
    }
}

/// Takes a length of two bytes and so many bytes off the front.
fn counted(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = bytes.split_first_chunk()?;
    rest.split_at_checked(u16::from_le_bytes(*len).into())
}

fn split(payload: &[u8]) -> Option<(Scheme, &[u8], &[u8])> {
    let (scheme, rest) = payload.split_first_chunk()?;
    let (signature, certificates) = counted(rest)?;
    Some((Scheme::of(u16::from_le_bytes(*scheme))?, signature, certificates))
}

fn chain_of(mut bytes: &[u8]) -> Option<Vec<CertificateDer<'_>>> {
    let mut chain = Vec::with_capacity(CHAIN_MAX);
    while !bytes.is_empty() {
        let (cert, rest) = counted(bytes).filter(|_| chain.len() < CHAIN_MAX)?;
        chain.push(CertificateDer::from(cert));
        bytes = rest;
    }
    (!chain.is_empty()).then_some(chain)
}
