//! Where a domain's certificate comes from: PEM files, which are looked at again while the domain
//! is open, so that a certificate that lives for an hour is renewed under a running job.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use barewire_dataplane::seal::{BadCredentials, Credentials, PeerId, WallClock};

use crate::errno::{Error, OpenError};
use crate::key_file::{Kind, Stamp, TRIES, open, stamps};

/// The private key: nobody but its owner may read it.
const KEY: Kind = Kind { what: "private key", not: 0o077, most: 64 << 10 };

/// The certificate: nobody but its owner may change it.
const CERT: Kind = Kind { what: "certificate", not: 0o022, most: 64 << 10 };

/// The roots, likewise.
const ROOTS: Kind = Kind { what: "roots", not: 0o022, most: 1 << 20 };

/// The PEM files of a domain that is known by a certificate, and whom it talks to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CertFiles {
    /// The certificate, then intermediates; at most 4 in all.
    pub cert: PathBuf,
    /// Its private key: ECDSA P-256 or P-384, Ed25519 or RSA. Only its owner may read it.
    pub key: PathBuf,
    /// The roots that certificates of peers lead to.
    pub roots: PathBuf,
    /// Whom the domain talks to: SPIFFE IDs (`spiffe://domain/path`, `spiffe://domain/path/*`) and
    /// DNS names (`host`, `*.domain`). Empty: all of its own trust domain, or of the roots if its
    /// name is not a SPIFFE ID.
    pub peer_ids: Vec<String>,
}

impl CertFiles {
    /// A certificate, its key and roots, for a domain that talks to all of its own trust domain.
    pub fn new(
        cert: impl Into<PathBuf>,
        key: impl Into<PathBuf>,
        roots: impl Into<PathBuf>,
    ) -> Self {
        let (cert, key, roots) = (cert.into(), key.into(), roots.into());
        Self { cert, key, roots, peer_ids: Vec::new() }
    }

    /// The same for a domain that talks to these alone.
    #[must_use]
    pub fn with_peers<T: Into<String>>(mut self, ids: impl IntoIterator<Item = T>) -> Self {
        self.peer_ids = ids.into_iter().map(Into::into).collect();
        self
    }
}

/// What a domain would have of its files, for who says whether it would take them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CertFacts {
    /// Whom the certificate names.
    pub name: String,
    /// First and last second at which it is valid, since 1970.
    pub valid: [u64; 2],
}

/// Reads the files as a domain does.
///
/// # Errors
/// A domain would not take them; the line says which, and what would mend it.
pub fn cert_facts(files: &CertFiles) -> Result<CertFacts, OpenError> {
    let (own, _) = CertSource::open(files)?;
    Ok(CertFacts { name: own.identity().to_string(), valid: own.valid() })
}

/// Files that hold a certificate, and how they were when they were read.
#[derive(Clone, Debug)]
pub(crate) struct CertSource {
    /// Certificate, key and roots.
    paths: [PathBuf; 3],
    peers: Vec<PeerId>,
    /// How they were; empty if they are to be read again whatever they are.
    stamps: Vec<Stamp>,
    /// Why they cannot be used, and at how many looks in a row.
    bad: Option<(String, u32)>,
    not_after: u64,
    /// The log was told that it has expired.
    told: bool,
}

impl CertSource {
    /// Reads the files for the first time.
    ///
    /// # Errors
    /// One is not named or cannot be used, or they do not belong together.
    pub(crate) fn open(files: &CertFiles) -> Result<(Arc<Credentials>, Self), OpenError> {
        let named = [
            (&files.cert, "BAREWIRE_CERT_FILE"),
            (&files.key, "BAREWIRE_CERT_KEY_FILE"),
            (&files.roots, "BAREWIRE_ROOTS_FILE"),
        ];
        if let Some((_, name)) = named.iter().find(|(path, _)| path.as_os_str().is_empty()) {
            let line = format!("{name} is not set: a certificate, its key and roots go together");
            return Err(OpenError::new(Error::Invalid("a certificate without all files"), line));
        }
        let peer = |id: &String| {
            PeerId::parse(id).ok_or_else(|| {
                let line = format!(
                    "BAREWIRE_PEER_IDS: {id:?} is none of spiffe://domain/path, \
                     spiffe://domain/path/*, a DNS name and *.domain"
                );
                OpenError::new(Error::Invalid("not the name of a peer"), line)
            })
        };
        let peers: Result<Vec<_>, _> = files.peer_ids.iter().map(peer).collect();
        // The program may go to another directory meanwhile.
        let paths = named.map(|(path, _)| std::path::absolute(path).unwrap_or(path.clone()));
        let (stamps, bad) = (Vec::new(), None);
        let mut source = Self { paths, peers: peers?, stamps, bad, not_after: 0, told: false };
        Ok((source.read()?, source))
    }

    /// Reads the files, as they are at one time, and notes how they are.
    fn read(&mut self) -> Result<Arc<Credentials>, OpenError> {
        let mut tries = 0;
        loop {
            self.stamps = stamps(&self.paths);
            let read = self.read_once();
            tries += 1;
            if tries == TRIES || self.stamps == stamps(&self.paths) {
                if let Ok(read) = &read {
                    (self.not_after, self.told) = (read.valid()[1], false);
                }
                return read;
            }
        }
    }

    fn read_once(&self) -> Result<Arc<Credentials>, OpenError> {
        let [cert, key, roots] = &self.paths;
        let chain = CERT.read(cert, open(cert))?;
        let secret = KEY.read(key, open(key))?;
        let trusted = ROOTS.read(roots, open(roots))?;
        let clock: WallClock = Arc::new(now);
        let made = Credentials::from_pem(&chain, &secret, &trusted, self.peers.clone(), clock);
        made.map(Arc::new).map_err(|why| self.told_of(why))
    }

    fn told_of(&self, why: BadCredentials) -> OpenError {
        let [cert, key, roots] = self.paths.each_ref().map(|path| path.display());
        let mend = match why {
            BadCredentials::Expired => "renew it; date shows the clock of this machine",
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

    /// What the files hold, if they are others than when they were read last. Files that cannot be
    /// used leave the certificate as it is and are looked at again: three files do not change at
    /// one time, so the log is told at the second look, once.
    pub(crate) fn look(&mut self) -> Option<Arc<Credentials>> {
        if !self.told && now() > self.not_after {
            self.told = true;
            let path = self.paths[0].display();
            tracing::warn!("certificate {path}: it has expired, and peers refuse it; renew it");
        }
        if stamps(&self.paths) == self.stamps {
            return None;
        }
        match self.read() {
            Ok(read) => {
                self.bad = None;
                tracing::info!("the certificate has changed: {}", read.identity());
                Some(read)
            }
            Err(why) => {
                self.stamps.clear();
                let before = self.bad.take().filter(|(line, _)| *line == why.line);
                let times = before.map_or(1, |(_, times)| times.saturating_add(1));
                if times == 2 {
                    tracing::warn!("{}; the certificate stays as it is", why.line);
                }
                self.bad = Some((why.line, times));
                None
            }
        }
    }
}

/// Seconds since 1970.
fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
