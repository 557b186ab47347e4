//! The payload of a handshake message with certificates: the chain, and a signature that proves
//! possession of the leaf's key (`docs/wire.md`, "Certificates").

use aws_lc_rs::digest;
use rustls_pki_types::CertificateDer;
use webpki::{EndEntityCert, Error};

use super::credentials::{CHAIN_MAX, Credentials, HEAD_LEN, Scheme};
use super::identity::{Identity, admits};
use super::path::{Role, verify};

/// The data that a signature covers besides the certificates: the hash of the handshake before the
/// message, and the message's ephemeral key. (The hash covers the fields of the first OPEN; the
/// answer's tag is made with a key of the handshake.)
#[derive(Clone, Copy, Debug)]
pub(super) struct Signed {
    pub(super) role: Role,
    pub(super) hash: [u8; 32],
    pub(super) ephemeral: [u8; 32],
}

/// Why a peer's certificate is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CertFault {
    /// The certificate, or one on its path to a root, has expired or is not valid yet.
    Time,
    /// There is no path to a root, or the certificate may not be used for this.
    Issuer,
    /// The certificate names no peer that this node accepts.
    Name,
    /// The signature is not of the leaf's key, or is of another handshake.
    Signature,
    /// The message cannot be parsed.
    Malformed,
}

/// Why a peer is refused, and its name, if the certificate leads to a root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadCert {
    /// The reason.
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
    /// The signed bytes, in the format of TLS 1.3's CertificateVerify (RFC 8446, 4.4.3).
    fn bytes(&self, certificates: &[u8]) -> Vec<u8> {
        let context: &[u8] = match self.role {
            Role::Opener => b"barewire 3 certificate, opener",
            Role::Answerer => b"barewire 3 certificate, answerer",
        };
        let sum = digest::digest(&digest::SHA256, certificates);
        [&[b' '; 64], context, &[0], &self.hash, &self.ephemeral, sum.as_ref()].concat()
    }
}

/// The payload of this node's message.
pub(super) fn prove(credentials: &Credentials, signed: &Signed) -> Vec<u8> {
    let mut certificates = Vec::new();
    for cert in credentials.chain() {
        certificates.extend((cert.len() as u16).to_le_bytes());
        certificates.extend_from_slice(cert);
    }
    let signed_with = credentials.sign(&signed.bytes(&certificates));
    // The key has signed when it was loaded, so this does not fail. A peer refuses an empty
    // signature.
    let (scheme, signature) = signed_with.unwrap_or((Scheme::Ed25519, Vec::new()));
    let mut payload = Vec::with_capacity(HEAD_LEN + signature.len() + certificates.len());
    payload.extend((scheme as u16).to_le_bytes());
    payload.extend((signature.len() as u16).to_le_bytes());
    payload.extend(signature);
    payload.extend(certificates);
    payload
}

/// Verifies the payload of a message, and returns the sender's proven identity.
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
    let path = verify(&leaf, &chain[1..], roots, now, signed.role);
    path.map_err(|why| fault_of(&why))?;
    let name = Identity::of(&leaf);
    let refused = |fault| BadCert { fault, name: name.clone() };
    let message = signed.bytes(certificates);
    let verified = leaf.verify_signature(scheme.verifier(), &message, signature);
    verified.map_err(|_| refused(CertFault::Signature))?;
    let admitted =
        name.as_ref().filter(|name| admits(credentials.identity(), credentials.peers(), name));
    admitted.cloned().ok_or_else(|| refused(CertFault::Name))
}

/// Verifies the payload of a first message as if the handshake's hash and ephemeral key were both
/// zero. For tests with arbitrary payloads; [`sample`] makes a valid one.
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

/// Splits a two-byte length and as many bytes off the front.
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
