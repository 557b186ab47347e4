//! A node's credentials: its certificate and private key, the roots of its peers' certificates, and
//! the peers that it accepts.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use aws_lc_rs::rand::SystemRandom;
use aws_lc_rs::signature::{
    self, ECDSA_P256_SHA256_ASN1_SIGNING, ECDSA_P384_SHA384_ASN1_SIGNING, EcdsaKeyPair,
    Ed25519KeyPair, RSA_PSS_SHA256, RsaKeyPair,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, SignatureVerificationAlgorithm, TrustAnchor, UnixTime};
use webpki::{EndEntityCert, aws_lc_rs as algs};

use super::identity::{Identity, PeerId};
use super::key::then_wipe;
use super::path::verify_own;
use super::private_key::PrivateKey;

/// Longest accepted payload of a handshake message, bytes.
pub(super) const PAYLOAD_MAX: usize = 4 << 10;

/// Bytes of the payload before the signature: signature scheme and signature length.
pub(super) const HEAD_LEN: usize = 4;

/// Most certificates of a chain, the leaf included.
pub(super) const CHAIN_MAX: usize = 4;

/// Returns the seconds since 1970, for the validity of certificates.
pub type WallClock = Arc<dyn Fn() -> u64 + Send + Sync>;

/// Signature scheme, by its number in TLS 1.3 (RFC 8446, 4.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scheme {
    EcdsaP256 = 0x0403,
    EcdsaP384 = 0x0503,
    RsaPss = 0x0804,
    Ed25519 = 0x0807,
}

impl Scheme {
    pub(super) fn of(number: u16) -> Option<Self> {
        let all = [Self::EcdsaP256, Self::EcdsaP384, Self::RsaPss, Self::Ed25519];
        all.into_iter().find(|scheme| *scheme as u16 == number)
    }

    pub(super) fn verifier(self) -> &'static dyn SignatureVerificationAlgorithm {
        match self {
            Self::EcdsaP256 => algs::ECDSA_P256_SHA256,
            Self::EcdsaP384 => algs::ECDSA_P384_SHA384,
            Self::RsaPss => algs::RSA_PSS_2048_8192_SHA256_LEGACY_KEY,
            Self::Ed25519 => algs::ED25519,
        }
    }
}

enum SigningKey {
    Ecdsa(Scheme, EcdsaKeyPair),
    Rsa(RsaKeyPair),
    Ed25519(Ed25519KeyPair),
}

/// Why a certificate, key and roots are unusable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadCredentials {
    /// The PEM contains no certificate, or a damaged one.
    #[error("no certificate in PEM, or a damaged one")]
    Chain,
    /// The chain has too many certificates, or more bytes than a peer accepts.
    #[error(
        "more than 4 certificates, or than 4,096 bytes in DER with the signature: leave out the \
         root, or take ECDSA or Ed25519 in place of RSA"
    )]
    ChainLong,
    /// The PEM contains no private key of a supported kind.
    #[error(
        "no private key in PEM that is ECDSA P-256 or P-384, Ed25519 or RSA of 2048 bits or more"
    )]
    Key,
    /// The key does not belong to the certificate.
    #[error("the private key is not that of the certificate")]
    KeyOfAnother,
    /// The PEM contains no root, or a damaged one.
    #[error("no root certificate in PEM, or a damaged one")]
    Roots,
    /// The certificate has no name.
    #[error("the certificate has neither one SPIFFE ID nor a DNS name (subjectAltName)")]
    Nameless,
    /// The certificate, or one on its path to a root, has expired.
    #[error("it, or one that it leads to a root by, has expired, so peers refuse it")]
    Expired,
    /// The certificate, or one on its path to a root, is not valid yet.
    #[error("it, or one that it leads to a root by, is not valid yet, so peers refuse it")]
    NotYet,
    /// The certificate is not for both clientAuth and serverAuth.
    #[error(
        "it, or one that it leads to a root by, says what it may be used for, and not both \
         clientAuth and serverAuth, so peers refuse it"
    )]
    Usage,
    /// The certificate is a certificate authority's.
    #[error("it is that of an authority (CA:TRUE), so peers refuse it as that of a node")]
    Authority,
    /// No path leads to a root.
    #[error("it leads to none of the roots, so peers with the same roots refuse it")]
    OtherRoots,
    /// An issuer's name constraints exclude the name.
    #[error(
        "an issuer's name constraints exclude its name (those for URIs exclude each SPIFFE ID), so \
         peers refuse it"
    )]
    NameForbidden,
    /// Peers would refuse the certificate for another cause, in the library's words.
    #[error("peers refuse it: {0}")]
    Unchecked(String),
}

/// The credentials of a node.
pub struct Credentials {
    /// The certificates, leaf first, as in a message.
    chain: Vec<CertificateDer<'static>>,
    key: SigningKey,
    roots: Vec<TrustAnchor<'static>>,
    peers: Vec<PeerId>,
    identity: Identity,
    /// First and last second at which all certificates of the path are valid.
    valid: [u64; 2],
    clock: WallClock,
}

impl Credentials {
    /// Loads credentials from PEM: `chain` is the certificate followed by intermediates, `key` its
    /// private key (PKCS #8, SEC 1 or PKCS #1), `roots` the roots of the peers' certificates and of
    /// this one. `peers` names the peers that the node accepts; empty for all of its own trust
    /// domain.
    ///
    /// # Errors
    /// See [`BadCredentials`]: the certificate is verified as a peer with the same roots would.
    pub fn from_pem(
        chain: &[u8],
        key: &[u8],
        roots: &[u8],
        peers: Vec<PeerId>,
        clock: WallClock,
    ) -> Result<Self, BadCredentials> {
        let chain = certificates(chain).ok_or(BadCredentials::Chain)?;
        if chain.len() > CHAIN_MAX {
            return Err(BadCredentials::ChainLong);
        }
        let anchor = |cert: &CertificateDer<'_>| {
            Some(webpki::anchor_from_trusted_cert(cert).ok()?.to_owned())
        };
        let roots = certificates(roots).ok_or(BadCredentials::Roots)?;
        let roots: Option<Vec<_>> = roots.iter().map(anchor).collect();
        let roots = roots.ok_or(BadCredentials::Roots)?;
        let key = then_wipe(|| PrivateKey::from_pem(key).and_then(|key| SigningKey::of(&key)));
        let key = key.ok_or(BadCredentials::Key)?;
        let leaf = EndEntityCert::try_from(&chain[0]).map_err(|why| refusal(&why))?;
        let (scheme, signed) = key.sign(b"a test").ok_or(BadCredentials::Key)?;
        let own = leaf.verify_signature(scheme.verifier(), b"a test", &signed);
        own.map_err(|_| BadCredentials::KeyOfAnother)?;
        let identity = Identity::of(&leaf).ok_or(BadCredentials::Nameless)?;
        let time = UnixTime::since_unix_epoch(Duration::from_secs(clock()));
        let valid = verify_own(&leaf, &chain[1..], &roots, time);
        let valid = valid.map_err(|why| refusal(&why))?;
        let own = Self { chain, key, roots, peers, identity, valid, clock };
        match own.payload_max() <= PAYLOAD_MAX {
            true => Ok(own),
            false => Err(BadCredentials::ChainLong),
        }
    }

    /// Longest payload of a message with these credentials, bytes.
    pub(super) fn payload_max(&self) -> usize {
        let certificates = self.chain.iter().map(|cert| 2 + cert.len());
        HEAD_LEN + self.signature_max() + certificates.sum::<usize>()
    }

    /// The identity in the certificate.
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    /// First and last second at which the certificate and its path to the root are valid, since
    /// 1970.
    pub fn valid(&self) -> [u64; 2] {
        self.valid
    }

    pub(super) fn chain(&self) -> &[CertificateDer<'static>] {
        &self.chain
    }

    pub(super) fn roots(&self) -> &[TrustAnchor<'static>] {
        &self.roots
    }

    pub(super) fn peers(&self) -> &[PeerId] {
        &self.peers
    }

    pub(super) fn now(&self) -> UnixTime {
        UnixTime::since_unix_epoch(Duration::from_secs((self.clock)()))
    }

    /// Longest signature, bytes.
    pub(super) fn signature_max(&self) -> usize {
        match &self.key {
            // A SEQUENCE of two INTEGERs, each with a leading zero.
            SigningKey::Ecdsa(Scheme::EcdsaP384, _) => 104,
            SigningKey::Ecdsa(..) => 72,
            SigningKey::Rsa(pair) => pair.public_modulus_len(),
            SigningKey::Ed25519(_) => 64,
        }
    }

    /// Signs with the key of the certificate.
    pub(super) fn sign(&self, message: &[u8]) -> Option<(Scheme, Vec<u8>)> {
        self.key.sign(message)
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl SigningKey {
    fn of(key: &PrivateKey) -> Option<Self> {
        let (bytes, any) = (&key.der[..], key.is_pkcs8);
        let curves = [
            (Scheme::EcdsaP256, &ECDSA_P256_SHA256_ASN1_SIGNING),
            (Scheme::EcdsaP384, &ECDSA_P384_SHA384_ASN1_SIGNING),
        ];
        let ec = |curve| match any {
            true => EcdsaKeyPair::from_pkcs8(curve, bytes).ok(),
            false => EcdsaKeyPair::from_private_key_der(curve, bytes).ok(),
        };
        let ecdsa = |(scheme, curve)| Some(Self::Ecdsa(scheme, ec(curve)?));
        let rsa = match any {
            true => RsaKeyPair::from_pkcs8(bytes),
            false => RsaKeyPair::from_der(bytes),
        };
        let ed = || Ed25519KeyPair::from_pkcs8_maybe_unchecked(bytes).ok().map(Self::Ed25519);
        curves.into_iter().find_map(ecdsa).or(rsa.ok().map(Self::Rsa)).or_else(ed)
    }

    fn sign(&self, message: &[u8]) -> Option<(Scheme, Vec<u8>)> {
        // The library draws the randomness of ECDSA and PSS from its own generator.
        let random = SystemRandom::new();
        let of = |signature: signature::Signature| signature.as_ref().to_vec();
        Some(match self {
            Self::Ecdsa(scheme, pair) => (*scheme, of(pair.sign(&random, message).ok()?)),
            Self::Ed25519(pair) => (Scheme::Ed25519, of(pair.sign(message))),
            Self::Rsa(pair) => {
                let mut signed = vec![0; pair.public_modulus_len()];
                pair.sign(&RSA_PSS_SHA256, &random, message, &mut signed).ok()?;
                (Scheme::RsaPss, signed)
            }
        })
    }
}

fn certificates(pem: &[u8]) -> Option<Vec<CertificateDer<'static>>> {
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    all.ok().filter(|all| !all.is_empty())
}

/// The reason why peers would refuse the certificate, from the library's error.
fn refusal(why: &webpki::Error) -> BadCredentials {
    use webpki::Error;
    match why {
        Error::BadDer | Error::BadDerTime | Error::TrailingData(_) => BadCredentials::Chain,
        Error::CertExpired { .. } => BadCredentials::Expired,
        Error::CertNotValidYet { .. } => BadCredentials::NotYet,
        Error::RequiredEkuNotFoundContext(_) | Error::EmptyEkuExtension => BadCredentials::Usage,
        Error::CaUsedAsEndEntity => BadCredentials::Authority,
        Error::UnknownIssuer | Error::InvalidSignatureForPublicKey => BadCredentials::OtherRoots,
        Error::NameConstraintViolation => BadCredentials::NameForbidden,
        other => BadCredentials::Unchecked(other.to_string()),
    }
}
