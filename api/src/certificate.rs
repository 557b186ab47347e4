//! The certificate of a domain: PEM files, which are read again when they change, so that a
//! short-lived certificate can be renewed under a running job.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use barewire_dataplane::seal::{BadCredentials, Credentials, Keyring, PeerId, WallClock};
use barewire_driver::frame::ETH_HDR_LEN;
use barewire_driver::port::PortCaps;

use crate::errno::{Error, OpenError};
use crate::file_watch::{Source, Tracked};
use crate::key_file::{FileKind, open};

/// The private key file: only its owner may read it.
const KEY: FileKind = FileKind { what: "private key", not: 0o077, most: 64 << 10 };

/// The certificate file: only its owner may change it.
const CERT: FileKind = FileKind { what: "certificate", not: 0o022, most: 64 << 10 };

/// The file of the roots: only its owner may change it.
const ROOTS: FileKind = FileKind { what: "roots", not: 0o022, most: 1 << 20 };

/// The PEM files of a domain with a certificate, and the peers that it accepts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertFiles {
    /// The certificate, followed by intermediates; at most 4 in all.
    pub cert: PathBuf,
    /// Its private key: ECDSA P-256 or P-384, Ed25519 or RSA. Only its owner may read it.
    pub key: PathBuf,
    /// The roots of accepted certificate chains of peers.
    pub roots: PathBuf,
    /// Names of accepted peers: SPIFFE IDs (`spiffe://domain/path`, `spiffe://domain/path/*`) and
    /// DNS names (`host`, `*.domain`). Empty: all names of the own trust domain, or all
    /// certificates of the roots if the own name is not a SPIFFE ID.
    pub peer_ids: Vec<String>,
}

impl CertFiles {
    /// A certificate, its key and roots, for a domain that accepts all peers of its own trust
    /// domain.
    pub fn new(
        cert: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
        roots: impl Into<PathBuf>,
    ) -> Self {
        let (cert, key, roots) = (cert.into(), key.into(), roots.into());
        Self { cert, key, roots, peer_ids: Vec::new() }
    }

    /// The same files, for a domain that accepts only these peers.
    #[must_use]
    pub fn with_peers<T: Into<String>>(mut self, ids: impl IntoIterator<Item = T>) -> Self {
        self.peer_ids = ids.into_iter().map(Into::into).collect();
        self
    }
}

/// Properties of a domain's certificate files, for programs that check them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertFacts {
    /// The name in the certificate.
    pub name: String,
    /// First and last second at which its whole chain is valid, since 1970.
    pub valid: [u64; 2],
    /// Bytes of the first frame of a session, Ethernet header included. A domain does not open with
    /// the certificate on a port with shorter frames.
    pub frame_len: usize,
}

/// Reads the files as a domain does.
///
/// # Errors
/// A domain would not open with the files; the line has the reason and the remedy.
pub fn cert_facts(files: &CertFiles) -> Result<CertFacts, OpenError> {
    let (own, _) = CertSource::open(files)?;
    let (name, frame_len) = (own.identity().to_string(), Keyring::open_len_with(&own));
    Ok(CertFacts { name, valid: own.valid(), frame_len })
}

/// Checks that a frame of `len` bytes, Ethernet header included ([`CertFacts::frame_len`]), fits
/// the port.
///
/// # Errors
/// It does not fit; the line has the remedy.
pub fn check_fit(len: usize, port: &PortCaps) -> Result<(), OpenError> {
    let (name, most) = (&port.name, port.mtu + ETH_HDR_LEN);
    if port.lossless || len <= most {
        return Ok(());
    }
    let line = format!(
        "{name}: with the certificates a session begins with a frame of {len} bytes, and the \
         port's have {most}; take an ECDSA key instead of RSA, fewer intermediates, or a longer \
         mtu="
    );
    Err(OpenError::new(Error::Invalid("the certificates fit no frame"), line))
}

/// The files of a certificate, which are watched for changes.
#[derive(Clone, Debug)]
pub(crate) struct CertSource {
    files: Tracked<PemFiles>,
    /// Last second of validity of the current certificate.
    not_after: u64,
    /// The expiry was logged.
    expiry_logged: bool,
}

impl CertSource {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// A file is not named or cannot be used, the files do not belong together, or peers would
    /// refuse the certificate.
    pub(crate) fn open(files: &CertFiles) -> Result<(Arc<Credentials>, Self), OpenError> {
        let named = [
            (&files.cert, "BAREWIRE_CERT_FILE"),
            (&files.key, "BAREWIRE_CERT_KEY_FILE"),
            (&files.roots, "BAREWIRE_ROOTS_FILE"),
        ];
        if let Some((_, name)) = named.iter().find(|(path, _)| path.as_os_str().is_empty()) {
            let line =
                format!("{name} is not set; set it: a certificate, its key and roots go together");
            return Err(OpenError::new(Error::Invalid("a certificate without all files"), line));
        }
        let peer = |id: &String| {
            PeerId::parse(id).ok_or_else(|| {
                let line = format!(
                    "BAREWIRE_PEER_IDS: {id:?} is no name of a peer; write spiffe://domain/path, \
                     spiffe://domain/path/*, a DNS name or *.domain"
                );
                OpenError::new(Error::Invalid("not the name of a peer"), line)
            })
        };
        let peers: Result<Vec<_>, _> = files.peer_ids.iter().map(peer).collect();
        // Absolute paths, since the program may change its directory.
        let paths = named.map(|(path, _)| std::path::absolute(path).unwrap_or(path.clone()));
        let (own, files) = Tracked::open(PemFiles { paths, peers: peers?, port: None })?;
        let not_after = own.valid()[1];
        Ok((own, Self { files, not_after, expiry_logged: false }))
    }

    /// Sets the port. Later certificates that do not fit its frames are refused.
    pub(crate) fn set_port(&mut self, port: &PortCaps) {
        self.files.source.port = Some(port.clone());
    }

    /// As [`Tracked::poll`]. Logs once that the certificate has expired.
    pub(crate) fn poll(&mut self) -> Option<Arc<Credentials>> {
        if !self.expiry_logged && now() > self.not_after {
            self.expiry_logged = true;
            let path = self.files.source.paths[0].display();
            tracing::warn!("certificate {path}: it has expired, and peers refuse it; renew it");
        }
        let read = self.files.poll()?;
        (self.not_after, self.expiry_logged) = (read.valid()[1], false);
        Some(read)
    }
}

/// The PEM files, and the accepted peers.
#[derive(Clone, Debug)]
struct PemFiles {
    /// Certificate, key and roots.
    paths: [PathBuf; 3],
    peers: Vec<PeerId>,
    /// The port whose frames the certificate has to fit, once it is known.
    port: Option<PortCaps>,
}

impl Source for PemFiles {
    type Content = Arc<Credentials>;
    const UNCHANGED: &str = "the certificate stays as it is";

    fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    fn read(&self) -> Result<Arc<Credentials>, OpenError> {
        let [cert, key, roots] = &self.paths;
        let chain = CERT.read(cert, open(cert))?;
        let secret = KEY.read_secret(key, open(key))?;
        let trusted = ROOTS.read(roots, open(roots))?;
        let clock: WallClock = Arc::new(now);
        let made = Credentials::from_pem(&chain, &secret, &trusted, self.peers.clone(), clock);
        let made = made.map_err(|why| self.open_error(&why))?;
        if let Some(port) = &self.port {
            check_fit(Keyring::open_len_with(&made), port)?;
        }
        Ok(Arc::new(made))
    }
}

impl PemFiles {
    fn open_error(&self, why: &BadCredentials) -> OpenError {
        let [cert, key, roots] = self.paths.each_ref().map(|path| path.display());
        let mend = match why {
            BadCredentials::Expired => "renew it, unless the clock is wrong: date shows it",
            BadCredentials::NotYet => "wait, or set the clock: date shows it",
            BadCredentials::Usage => "make one with extendedKeyUsage=clientAuth,serverAuth",
            BadCredentials::Authority => {
                "name one that it has issued, with basicConstraints=CA:FALSE"
            }
            BadCredentials::OtherRoots => {
                "add its root to BAREWIRE_ROOTS_FILE, its intermediates to its own file, after it"
            }
            BadCredentials::NameForbidden => "make one with a name that its issuers may give",
            BadCredentials::KeyOfAnother => "name the key that it was made with",
            BadCredentials::Nameless => "make one with subjectAltName=URI:spiffe://domain/path",
            _ => "docs/security.md shows how to make them",
        };
        let of = match why {
            BadCredentials::Key | BadCredentials::KeyOfAnother => format!("private key {key}"),
            BadCredentials::Roots => format!("roots {roots}"),
            _ => format!("certificate {cert}"),
        };
        OpenError::new(Error::Invalid("a certificate"), format!("{of}: {why}; {mend}"))
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use barewire_driver::port::Station;
    use rcgen::ExtendedKeyUsagePurpose::{ClientAuth, ServerAuth};
    use rcgen::{CertificateParams, CertifiedIssuer, KeyPair, SanType, date_time_ymd};

    use super::*;

    type Issuer = CertifiedIssuer<'static, KeyPair>;

    fn root(name: &str) -> Issuer {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    }

    fn leaf() -> CertificateParams {
        let mut params = CertificateParams::default();
        let id = "spiffe://a.org/job".try_into().unwrap();
        params.subject_alt_names = vec![SanType::URI(id)];
        params
    }

    /// Certificate, key and roots in a directory.
    struct Files {
        dir: tempfile::TempDir,
        root: Issuer,
    }

    impl Files {
        fn new() -> Self {
            let files = Self { dir: tempfile::tempdir().unwrap(), root: root("root") };
            files.put("roots", &files.root.pem(), 0o644);
            files
        }

        fn put(&self, name: &str, text: &str, mode: u32) {
            let (path, beside) = (self.dir.path().join(name), self.dir.path().join("tmp"));
            std::fs::write(&beside, text).unwrap();
            std::fs::set_permissions(&beside, std::fs::Permissions::from_mode(mode)).unwrap();
            std::fs::rename(beside, path).unwrap();
        }

        /// Writes a certificate and its key.
        fn issue(&self, params: &CertificateParams, by: &Issuer) {
            let key = KeyPair::generate().unwrap();
            self.put("cert", &params.signed_by(&key, by).unwrap().pem(), 0o644);
            self.put("key", &key.serialize_pem(), 0o600);
        }

        fn named(&self) -> CertFiles {
            let at = |name: &str| self.dir.path().join(name);
            CertFiles::new(at("cert"), at("key"), at("roots"))
        }
    }

    /// Certificates that a peer would refuse, each with words of the error and of its remedy.
    fn refused(files: &Files, way: &str) -> [&'static str; 2] {
        let (mut params, other) = (leaf(), root("other"));
        let mut by = &files.root;
        let expiry_logged = match way {
            "no clientAuth" => {
                params.extended_key_usages = vec![ServerAuth];
                ["says what it may be used for", "extendedKeyUsage=clientAuth,serverAuth"]
            }
            "no serverAuth" => {
                params.extended_key_usages = vec![ClientAuth];
                ["says what it may be used for", "extendedKeyUsage=clientAuth,serverAuth"]
            }
            "an authority" => {
                params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
                ["CA:TRUE", "basicConstraints=CA:FALSE"]
            }
            "early" => {
                params.not_before = date_time_ymd(2200, 1, 1);
                params.not_after = date_time_ymd(2201, 1, 1);
                ["is not valid yet", "set the clock"]
            }
            "late" => {
                params.not_after = date_time_ymd(2001, 1, 1);
                ["has expired", "renew it"]
            }
            "another root" => {
                by = &other;
                ["leads to none of the roots", "BAREWIRE_ROOTS_FILE"]
            }
            "another key" => ["not that of the certificate", "the key that it was made with"],
            _ => unreachable!("{way}"),
        };
        files.issue(&params, by);
        if way == "another key" {
            files.put("key", &KeyPair::generate().unwrap().serialize_pem(), 0o600);
        }
        expiry_logged
    }

    const WAYS: [&str; 7] = [
        "no clientAuth",
        "no serverAuth",
        "an authority",
        "early",
        "late",
        "another root",
        "another key",
    ];

    #[test]
    fn certificates_that_peers_would_refuse_are_refused_at_load() {
        let files = Files::new();
        for way in WAYS {
            let [says, mends] = refused(&files, way);
            let line = CertSource::open(&files.named()).map(|_| ()).unwrap_err().line;
            assert_eq!(cert_facts(&files.named()).unwrap_err().line, line, "{way}");
            let (said, mend) = line.rsplit_once("; ").unwrap();
            assert!(said.contains(says) && mend.contains(mends), "{way}: {line}");
        }
        files.issue(&leaf(), &files.root);
        assert_eq!(cert_facts(&files.named()).unwrap().name, "spiffe://a.org/job");
    }

    fn port(mtu: usize) -> PortCaps {
        PortCaps {
            station: Station::default(),
            mtu,
            lossless: false,
            gather: false,
            rto_floor_ns: 0,
            via_kernel: false,
            tells_presence: false,
            near_mtu: 0,
            link_bps: 0,
            name: "udp:x".to_owned(),
        }
    }

    /// Goal: a renewed certificate that peers would refuse, or that is too long for the port, is
    /// not used and logged once; the next valid one is used.
    #[test]
    fn an_invalid_renewed_certificate_is_not_used() {
        let files = Files::new();
        files.issue(&leaf(), &files.root);
        let (own, mut source) = CertSource::open(&files.named()).unwrap();
        source.set_port(&port(1500));
        assert!(source.poll().is_none());
        for way in WAYS {
            refused(&files, way);
            for _ in 0..3 {
                assert!(source.poll().is_none() && source.files.is_bad(), "{way}");
            }
            files.issue(&leaf(), &files.root);
            let renewed = source.poll().unwrap_or_else(|| panic!("after {way}"));
            assert_eq!(renewed.identity(), own.identity());
        }
        let mut long = leaf();
        let text = "x".repeat(1300).as_str().try_into().unwrap();
        long.subject_alt_names.push(SanType::DnsName(text));
        files.issue(&long, &files.root);
        assert!(source.poll().is_none() && source.files.is_bad());
        source.set_port(&port(9000));
        assert!(source.poll().is_some(), "a port that it fits");
        assert_eq!(source.not_after, own.valid()[1]);
    }
}
