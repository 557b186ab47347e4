//! The keys of a domain: from its attributes, from the program, or from files, which are read again
//! when they change.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use barewire_dataplane::seal::{
    Credentials, KEY_MAX, KEY_MIN, KEYS_MAX, Keyring, Mode, PreSharedKey,
};
use barewire_driver::mem::Locked;

use crate::certificate::CertSource;
use crate::errno::{Error, OpenError};
use crate::file_watch::{Source, Tracked};
use crate::info::DomainAttr;
use crate::key_file::{FileKind, open};
use crate::random::random_secret;
use crate::settings::Settings;

/// The keys that a domain is opened with.
#[derive(Debug)]
pub(crate) struct DomainKeys {
    pub(crate) ring: Keyring,
    /// The files to watch, if the keys are from files.
    pub(crate) files: Option<KeySource>,
}

/// Files with the keys or the certificate of a domain, which are watched while it is open.
#[derive(Clone, Debug)]
pub(crate) enum KeySource {
    /// Key files.
    Files(Tracked<KeyFiles>),
    /// Certificate files.
    Certificate(CertSource),
}

/// New content of the files.
pub(crate) enum KeyUpdate {
    /// A list of keys.
    Keys(Vec<PreSharedKey>),
    /// A certificate.
    Certificate(Arc<Credentials>),
}

impl KeySource {
    /// As [`Tracked::poll`].
    pub(crate) fn poll(&mut self) -> Option<KeyUpdate> {
        match self {
            Self::Files(files) => files.poll().map(KeyUpdate::Keys),
            Self::Certificate(files) => files.poll().map(KeyUpdate::Certificate),
        }
    }
}

/// The keys of a domain with these attributes: its `auth_key`, or else the certificate or the key
/// files of the settings; `None` if it has none. With `FI_AV_AUTH_KEY` the list is empty at first.
/// `entropy` are fresh random bytes.
///
/// # Errors
/// A file cannot be read, users other than its owner may read it, or a key is too short or too
/// long.
pub(crate) fn domain_keys(
    settings: &Settings,
    attr: &DomainAttr,
    entropy: impl Into<Locked<[u8; 32]>>,
) -> Result<Option<DomainKeys>, OpenError> {
    let auth_key: &[u8] = &attr.auth_key;
    if let Some(files) = &settings.certificate {
        let beside = if attr.av_auth_key || !auth_key.is_empty() {
            Some("auth_key")
        } else {
            (!settings.key_files.is_empty()).then_some("BAREWIRE_KEY_FILE")
        };
        if let Some(beside) = beside {
            let line = format!(
                "BAREWIRE_CERT_FILE and {beside}: a domain has a certificate or keys, not both; \
                 unset one"
            );
            return Err(OpenError::new(Error::Invalid("a certificate and a key"), line));
        }
        let (credentials, source) = CertSource::open(files)?;
        let ring = Keyring::of_certificate(credentials, settings.seal, entropy);
        return Ok(Some(DomainKeys { ring, files: Some(KeySource::Certificate(source)) }));
    }
    if attr.av_auth_key {
        if !auth_key.is_empty() {
            let line = "auth_key has to be NULL where auth_key_size is FI_AV_AUTH_KEY";
            return Err(OpenError::new(Error::Invalid("auth_key with FI_AV_AUTH_KEY"), line));
        }
        return Ok(Some(DomainKeys { ring: Keyring::of_tenants(entropy), files: None }));
    }
    let (keys, files) = if !auth_key.is_empty() {
        (vec![make_key(auth_key, settings.seal, "auth_key of the domain")?], None)
    } else if settings.key_files.is_empty() {
        return Ok(None);
    } else {
        let (keys, files) = open_files(&settings.key_files, settings.seal)?;
        (keys, Some(KeySource::Files(files)))
    };
    let ring = Keyring::new(keys, entropy).ok_or_else(too_many)?;
    Ok(Some(DomainKeys { ring, files }))
}

/// The keys, or the certificate, of a domain with these settings, for programs that exchange frames
/// with its peers without a domain; `None` if it has neither.
///
/// # Errors
/// A domain would not open with them; the line has the reason and the remedy.
pub fn keyring(settings: &Settings) -> Result<Option<Keyring>, OpenError> {
    let keys = domain_keys(settings, &DomainAttr::default(), random_secret()?)?;
    Ok(keys.map(|keys| keys.ring))
}

fn too_many() -> OpenError {
    let line = format!("a domain has {KEYS_MAX} keys at most; name fewer in BAREWIRE_KEY_FILE");
    OpenError::new(Error::Invalid("a list of keys has 1 to 4"), line)
}

/// The key of these bytes. `whose` names their source in the error.
fn make_key(bytes: &[u8], seal: Mode, whose: &str) -> Result<PreSharedKey, OpenError> {
    PreSharedKey::new(bytes, seal).ok_or_else(|| {
        let len = bytes.len();
        let e = Error::Invalid("a key has 16 to 1024 bytes");
        let mend = "make one: head -c 32 /dev/urandom > FILE";
        OpenError::new(e, format!("{whose}: {len} bytes, a key has {KEY_MIN} to {KEY_MAX}; {mend}"))
    })
}

/// A key file: only its owner may read it.
const SECRET: FileKind = FileKind { what: "key file", not: 0o077, most: KEY_MAX + 3 };

/// Key files. All but the first may be missing.
#[derive(Clone, Debug)]
pub(crate) struct KeyFiles {
    paths: Vec<PathBuf>,
    seal: Mode,
}

impl Source for KeyFiles {
    type Content = Vec<PreSharedKey>;
    const UNCHANGED: &str = "the keys stay as they are";

    fn paths(&self) -> &[PathBuf] {
        &self.paths
    }

    fn read(&self) -> Result<Vec<PreSharedKey>, OpenError> {
        let mut keys = Vec::with_capacity(self.paths.len());
        for (i, path) in self.paths.iter().enumerate() {
            match open(path) {
                Err(e) if i > 0 && e.kind() == io::ErrorKind::NotFound => {}
                file => {
                    let bytes = read(path, file)?;
                    keys.push(make_key(&bytes, self.seal, &path.display().to_string())?);
                }
            }
        }
        Ok(keys)
    }
}

/// Reads the keys for the first time.
///
/// # Errors
/// See [`domain_keys`].
fn open_files(
    paths: &[PathBuf],
    seal: Mode,
) -> Result<(Vec<PreSharedKey>, Tracked<KeyFiles>), OpenError> {
    if paths.iter().any(|path| path.as_os_str().is_empty()) {
        let error = Error::Invalid("a key file has no name");
        let line = match paths.len() {
            1 => "BAREWIRE_KEY_FILE is set and empty; name a file, or unset it",
            _ => "BAREWIRE_KEY_FILE: one of the names between the colons is empty; leave it out",
        };
        return Err(OpenError::new(error, line));
    }
    if paths.len() > KEYS_MAX {
        return Err(too_many());
    }
    // Absolute paths, since the program may change its directory.
    let paths = paths.iter().map(|path| std::path::absolute(path).unwrap_or(path.clone()));
    Tracked::open(KeyFiles { paths: paths.collect(), seal })
}

/// The bytes of a key file, without the trailing newline if the key is long enough without it.
fn read(path: &Path, file: io::Result<std::fs::File>) -> Result<Locked<[u8]>, OpenError> {
    let bytes = SECRET.read_secret(path, file)?;
    let mut key = &bytes[..];
    for end in *b"\n\r" {
        key = key.strip_suffix(&[end]).filter(|key| key.len() >= KEY_MIN).unwrap_or(key);
    }
    Ok(Locked::copy_of(key))
}

/// Length of the key in a file, bytes, for programs that check key files.
///
/// # Errors
/// A domain would not open with the file: it cannot be read, users other than its owner may read
/// it, or the key is too short or too long. The line has the reason and the remedy.
pub fn key_file_len(path: &Path) -> Result<usize, OpenError> {
    let bytes = read(path, open(path))?;
    make_key(&bytes, Mode::Encrypted, &path.display().to_string())?;
    Ok(bytes.len())
}

/// The keys that a program passes.
///
/// # Errors
/// [`Error::Invalid`]: a key has fewer than 16 or more than 1,024 bytes.
pub(crate) fn keys_from_bytes(keys: &[&[u8]], seal: Mode) -> Result<Vec<PreSharedKey>, Error> {
    let made = |bytes: &&[u8]| PreSharedKey::new(bytes, seal);
    let made: Option<Vec<_>> = keys.iter().map(made).collect();
    made.ok_or(Error::Invalid("a key has 16 to 1024 bytes"))
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use crate::info::AuthKey;

    type Made = Result<Option<DomainKeys>, OpenError>;

    fn attr(key: &[u8]) -> DomainAttr {
        DomainAttr { auth_key: AuthKey::new(key), ..DomainAttr::default() }
    }

    /// A directory for a test, which removes it.
    struct Dir(PathBuf);

    impl Dir {
        fn new() -> Self {
            let (pid, thread) = (std::process::id(), std::thread::current().id());
            let path = std::env::temp_dir().join(format!("barewire-key-{pid}-{thread:?}"));
            std::fs::create_dir(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Dir {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn with_files(key_files: &[&Path]) -> Settings {
        let key_files = key_files.iter().map(|path| path.to_path_buf()).collect();
        Settings { key_files, ..Settings::default() }
    }

    fn put(path: &Path, bytes: &[u8], mode: u32) {
        let beside = path.with_extension("tmp");
        let mut file = std::fs::File::create(&beside).unwrap();
        file.write_all(bytes).unwrap();
        file.set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
        std::fs::rename(beside, path).unwrap();
    }

    /// The result for a key file with these bytes and this mode, and for an `auth_key` beside it.
    fn key(bytes: &[u8], mode: u32, auth_key: &[u8]) -> Made {
        let dir = Dir::new();
        let path = dir.0.join("key");
        put(&path, bytes, mode);
        domain_keys(&with_files(&[&path]), &attr(auth_key), [1; 32])
    }

    /// What the first key makes of a frame.
    fn tag(keys: Made) -> [u8; 16] {
        keys.unwrap().unwrap().ring.tag_key().tag(b"frame")
    }

    #[test]
    fn a_key_is_of_its_bytes_wherever_they_are() {
        let want = tag(key(&[b'k'; 32], 0o600, &[]));
        assert_eq!(tag(key(&[&[b'k'; 32][..], b"\r\n"].concat(), 0o400, &[])), want);
        assert_eq!(tag(domain_keys(&Settings::default(), &attr(&[b'k'; 32]), [2; 32])), want);
        assert_eq!(tag(key(&[b'f'; 32], 0o600, &[b'k'; 32])), want, "auth_key goes before");
        assert_ne!(tag(key(&[b'f'; 32], 0o600, &[])), want);
        assert!(domain_keys(&Settings::default(), &attr(&[]), [0; 32]).unwrap().is_none());
    }

    #[test]
    fn a_bad_key_says_what_mends_it() {
        let line = |key: Made| key.unwrap_err().line;
        assert!(line(key(&[1; 32], 0o640, &[])).contains("chmod 600"));
        assert!(line(key(&[1; 15], 0o600, &[])).contains("15 bytes"));
        assert!(line(key(&[1; 1025], 0o600, &[])).contains("/dev/urandom"));
        assert!(
            line(domain_keys(&Settings::default(), &attr(&[1; 3]), [0; 32])).contains("auth_key")
        );
        let named = |names: &[&str]| {
            let paths: Vec<&Path> = names.iter().map(Path::new).collect();
            line(domain_keys(&with_files(&paths), &attr(&[]), [0; 32]))
        };
        assert!(named(&["/nowhere/key"]).contains("/nowhere/key"));
        assert!(named(&[""]).contains("is set and empty"));
        assert!(named(&["/dev/null"]).contains("of this user's or root's"));
        assert!(named(&["/nowhere/key", ""]).contains("between the colons"));
        assert!(named(&["a", "b", "c", "d", "e"]).contains("4 keys at most"));
        assert!(keys_from_bytes(&[&[1; 16], &[1; 15]], Mode::Encrypted).is_err());
    }

    /// A key of random bytes may end as a line does.
    #[test]
    fn a_short_key_keeps_its_end() {
        let bytes = [&[7; 15][..], b"\n"].concat();
        let want = tag(domain_keys(&Settings::default(), &attr(&bytes), [2; 32]));
        assert_eq!(tag(key(&bytes, 0o600, &[])), want);
    }

    /// Goal: files are read again when they are others, whole, and what is wrong with them changes
    /// nothing. Method: the steps by which an operator brings another key.
    #[test]
    fn files_are_looked_at_again() {
        let dir = Dir::new();
        let [now, next, old] = ["key", "next", "old"].map(|name| dir.0.join(name));
        let paths = [&now, &next, &old].map(|path| path.clone());
        put(&now, &[1; 32], 0o600);
        let (keys, mut files) = open_files(&paths, Mode::Encrypted).unwrap();
        let tags = |keys: &[PreSharedKey]| -> Vec<u8> {
            let of = |n: u8| PreSharedKey::new(&[n; 32], Mode::Encrypted).unwrap();
            let is = |key: &PreSharedKey, n| key.is_tag(b"x", &of(n).tag_key().tag(b"x"));
            keys.iter().map(|key| (1..9).find(|&n| is(key, n)).unwrap()).collect()
        };
        assert_eq!(tags(&keys), [1]);
        let here = std::env::current_dir().unwrap();
        let relative = here.ancestors().skip(1).map(|_| "..");
        let relative: PathBuf =
            relative.chain([now.strip_prefix("/").unwrap().to_str().unwrap()]).collect();
        let (_, elsewhere) = open_files(&[relative], Mode::Encrypted).unwrap();
        assert!(elsewhere.source.paths[0].is_absolute(), "the program may change its directory");
        assert!(files.poll().is_none(), "nothing has changed");
        put(&next, &[2; 32], 0o600);
        assert_eq!(files.poll().map(|keys| tags(&keys)), Some(vec![1, 2]));
        std::fs::hard_link(&now, &old).unwrap();
        std::fs::rename(&next, &now).unwrap();
        assert_eq!(files.poll().map(|keys| tags(&keys)), Some(vec![2, 1]));
        put(&old, &[3; 32], 0o644);
        assert!(files.poll().is_none(), "others can read it");
        assert!(files.is_bad(), "it is read again, also if it does not change");
        assert!(files.poll().is_none());
        std::fs::remove_file(&old).unwrap();
        assert_eq!(files.poll().map(|keys| tags(&keys)), Some(vec![2]));
        std::fs::remove_file(&now).unwrap();
        assert!(files.poll().is_none(), "who has removed it means to hide it");
        put(&now, &[4; 32], 0o400);
        assert_eq!(files.poll().map(|keys| tags(&keys)), Some(vec![4]));
    }
}
