//! Certificates for tests: a root, and leaves of any name and time.

use std::sync::Arc;

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, CustomExtension, DnType, IsCa, Issuer,
    KeyPair, PKCS_ED25519, SanType, SignatureAlgorithm, date_time_ymd,
};

use super::{BadCredentials, Credentials, PeerId};

/// 2025-01-01, at which certificates of the tests are valid by default.
pub(crate) const NOW: u64 = 1_735_689_600;

/// A root certificate, and its name.
pub(crate) struct Root {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// Credentials of a node in PEM.
#[derive(Clone)]
pub(crate) struct PemCredentials {
    pub(crate) chain: String,
    pub(crate) key: String,
}

fn params(name: &str, years: [i32; 2]) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name.push(DnType::CommonName, name);
    [params.not_before, params.not_after] = years.map(|year| date_time_ymd(year, 1, 1));
    params
}

pub(crate) fn ca(name: &str) -> CertificateParams {
    let mut params = params(name, [2020, 2040]);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params
}

/// A leaf with this name, a SPIFFE ID or a DNS name.
pub(crate) fn leaf(name: &str, years: [i32; 2]) -> CertificateParams {
    let mut params = params("leaf", years);
    let ia5 = name.try_into().unwrap();
    params.subject_alt_names = match name.contains("://") {
        true => vec![SanType::URI(ia5)],
        false => vec![SanType::DnsName(ia5)],
    };
    params
}

impl Root {
    pub(crate) fn new() -> Self {
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        Self { issuer: CertifiedIssuer::self_signed(ca("root"), key).unwrap() }
    }

    /// A root that may issue names below this one only, of a kind of general name (RFC 5280,
    /// 4.2.1.10): 2 for DNS names, 6 for URIs.
    pub(crate) fn constrained(kind: u8, name: &str) -> Self {
        let name = [&[0x80 | kind, name.len() as u8], name.as_bytes()].concat();
        let within = |tag: u8, der: Vec<u8>| [&[tag, der.len() as u8], &der[..]].concat();
        let permitted = within(0x30, within(0xa0, within(0x30, name)));
        let mut params = ca("root");
        let constraints = CustomExtension::from_oid_content(&[2, 5, 29, 30], permitted);
        params.custom_extensions = vec![constraints];
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        Self { issuer: CertifiedIssuer::self_signed(params, key).unwrap() }
    }

    pub(crate) fn pem(&self) -> String {
        self.issuer.pem()
    }

    pub(crate) fn sign(
        &self,
        params: &CertificateParams,
        key: &'static SignatureAlgorithm,
    ) -> PemCredentials {
        let key = KeyPair::generate_for(key).unwrap();
        let cert = params.signed_by(&key, &self.issuer).unwrap();
        PemCredentials { chain: cert.pem(), key: key.serialize_pem() }
    }

    /// A valid leaf with an Ed25519 key, whose signatures are deterministic.
    pub(crate) fn leaf(&self, name: &str) -> PemCredentials {
        self.sign(&leaf(name, [2020, 2040]), &PKCS_ED25519)
    }

    /// A valid leaf below an intermediate.
    pub(crate) fn leaf_below(&self, name: &str) -> PemCredentials {
        self.leaf_below_until(name, 2040)
    }

    /// A valid leaf below an intermediate that expires at the beginning of that year.
    pub(crate) fn leaf_below_until(&self, name: &str, year: i32) -> PemCredentials {
        let key = KeyPair::generate_for(&PKCS_ED25519).unwrap();
        let (mut params, leaf_key) = (ca("below"), KeyPair::generate_for(&PKCS_ED25519).unwrap());
        params.not_after = date_time_ymd(year, 1, 1);
        let below = params.signed_by(&key, &self.issuer).unwrap();
        let issuer = Issuer::new(params, key);
        let cert = leaf(name, [2020, 2040]).signed_by(&leaf_key, &issuer).unwrap();
        PemCredentials { chain: cert.pem() + &below.pem(), key: leaf_key.serialize_pem() }
    }
}

/// The credentials of a node that trusts `root` and accepts `peers`.
pub(crate) fn credentials(
    papers: &PemCredentials,
    root: &Root,
    peers: &[&str],
) -> Result<Arc<Credentials>, BadCredentials> {
    at(papers, root, peers, NOW)
}

/// [`credentials`] at another time.
pub(crate) fn at(
    papers: &PemCredentials,
    root: &Root,
    peers: &[&str],
    now: u64,
) -> Result<Arc<Credentials>, BadCredentials> {
    of_roots(papers, &[root], peers, now)
}

/// The credentials of a node of root `own` that also trusts `root`.
pub(crate) fn foreign(papers: &PemCredentials, own: &Root, root: &Root) -> Arc<Credentials> {
    of_roots(papers, &[root, own], &[], NOW).unwrap()
}

fn of_roots(
    papers: &PemCredentials,
    roots: &[&Root],
    peers: &[&str],
    now: u64,
) -> Result<Arc<Credentials>, BadCredentials> {
    let peers = peers.iter().map(|id| PeerId::parse(id).unwrap()).collect();
    let roots: String = roots.iter().map(|root| root.pem()).collect();
    let (chain, key) = (papers.chain.as_bytes(), papers.key.as_bytes());
    let clock = Arc::new(move || now);
    Credentials::from_pem(chain, key, roots.as_bytes(), peers, clock).map(Arc::new)
}
