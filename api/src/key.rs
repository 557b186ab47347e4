//! Where a domain's key comes from: its attributes, or a file.

use std::fs::OpenOptions;
use std::io::Read;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;

use barewire_dataplane::seal::{KEY_MAX, KEY_MIN, PreSharedKey};
use zeroize::Zeroizing;

use crate::errno::{Error, OpenError, refused_by_system};
use crate::settings::Settings;

/// The key of a domain that was opened with `auth_key`, or else of the file that the settings name;
/// `None` if there is neither. `entropy` are fresh random bytes.
///
/// # Errors
/// The file cannot be read, others than its owner may read it, or the key is too short or too long.
pub(crate) fn of(
    settings: &Settings,
    auth_key: &[u8],
    entropy: [u8; 32],
) -> Result<Option<PreSharedKey>, OpenError> {
    let made = |bytes: &[u8], whose: &str| {
        PreSharedKey::new(bytes, entropy, settings.seal).map(Some).ok_or_else(|| {
            let len = bytes.len();
            let e = Error::Invalid("a key has 16 to 1024 bytes");
            let mend = "make one: head -c 32 /dev/urandom";
            OpenError::new(
                e,
                format!("{whose}: {len} bytes, a key has {KEY_MIN} to {KEY_MAX}; {mend}"),
            )
        })
    };
    match &settings.key_file {
        _ if !auth_key.is_empty() => made(auth_key, "auth_key of the domain"),
        Some(path) if path.as_os_str().is_empty() => {
            let error = Error::Invalid("the key file has no name");
            let line = "BAREWIRE_KEY_FILE is set and empty: name a file, or unset it".to_owned();
            Err(OpenError::new(error, line))
        }
        Some(path) => made(&read(path)?, &path.display().to_string()),
        None => Ok(None),
    }
}

/// The bytes of a key file, without a line end behind a key that is long enough.
fn read(path: &Path) -> Result<Zeroizing<Vec<u8>>, OpenError> {
    let shown = path.display();
    let failed = |e: std::io::Error| {
        let error = refused_by_system(&shown.to_string(), e.raw_os_error().unwrap_or(libc::EIO));
        OpenError::new(error, format!("key file {shown}: {e}"))
    };
    // A FIFO would keep a blocking open for ever.
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(failed)?;
    let is = file.metadata().map_err(failed)?;
    let mode = is.mode();
    let ours = is.uid() == nix::unistd::geteuid().as_raw() || is.uid() == 0;
    if !is.is_file() || !ours {
        let line = format!("key file {shown}: it has to be a file of this user's or root's");
        return Err(OpenError::new(Error::Access, line));
    }
    if mode & 0o077 != 0 {
        let mode = mode & 0o777;
        let line = format!(
            "key file {shown}: mode {mode:o}, so others than its owner can use it; \
             chmod 600 {shown}"
        );
        return Err(OpenError::new(Error::Access, line));
    }
    let mut bytes = Zeroizing::new(Vec::with_capacity(KEY_MAX + 3));
    file.take(KEY_MAX as u64 + 3).read_to_end(&mut bytes).map_err(failed)?;
    for end in *b"\n\r" {
        if bytes.last() == Some(&end) && bytes.len() > KEY_MIN {
            bytes.pop();
        }
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    /// What comes of a key file with these bytes and this mode, and of an `auth_key` beside it.
    fn key(bytes: &[u8], mode: u32, auth_key: &[u8]) -> Result<Option<PreSharedKey>, OpenError> {
        let name = format!("barewire-key-{}-{:?}", std::process::id(), std::thread::current().id());
        let path = std::env::temp_dir().join(name);
        let mut file = std::fs::File::create(&path).unwrap();
        file.write_all(bytes).unwrap();
        file.set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
        let key_file = Some(path.clone());
        let key = of(&Settings { key_file, ..Settings::default() }, auth_key, [1; 32]);
        std::fs::remove_file(path).unwrap();
        key
    }

    #[test]
    fn a_key_is_of_its_bytes_wherever_they_are() {
        let tag =
            |key: Result<Option<PreSharedKey>, OpenError>| key.unwrap().unwrap().tag(b"frame");
        let want = tag(key(&[b'k'; 32], 0o600, &[]));
        assert_eq!(tag(key(&[&[b'k'; 32][..], b"\r\n"].concat(), 0o400, &[])), want);
        assert_eq!(tag(of(&Settings::default(), &[b'k'; 32], [2; 32])), want);
        assert_eq!(tag(key(&[b'f'; 32], 0o600, &[b'k'; 32])), want, "auth_key goes before");
        assert_ne!(tag(key(&[b'f'; 32], 0o600, &[])), want);
        assert!(of(&Settings::default(), &[], [0; 32]).unwrap().is_none());
    }

    #[test]
    fn a_bad_key_says_what_mends_it() {
        let line = |key: Result<Option<PreSharedKey>, OpenError>| key.unwrap_err().line;
        assert!(line(key(&[1; 32], 0o640, &[])).contains("chmod 600"));
        assert!(line(key(&[1; 15], 0o600, &[])).contains("15 bytes"));
        assert!(line(key(&[1; 1025], 0o600, &[])).contains("/dev/urandom"));
        assert!(line(of(&Settings::default(), &[1; 3], [0; 32])).contains("auth_key"));
        let key_file = Some("/nowhere/key".into());
        let none = of(&Settings { key_file, ..Settings::default() }, &[], [0; 32]);
        assert!(line(none).contains("/nowhere/key"));
        for (path, words) in [("", "is set and empty"), ("/dev/null", "of this user's or root's")] {
            let key_file = Some(path.into());
            let none = of(&Settings { key_file, ..Settings::default() }, &[], [0; 32]);
            assert!(line(none).contains(words), "{path}");
        }
    }

    /// A key of random bytes may end as a line does.
    #[test]
    fn a_short_key_keeps_its_end() {
        let bytes = [&[7; 15][..], b"\n"].concat();
        let tag = key(&bytes, 0o600, &[]).unwrap().unwrap().tag(b"frame");
        assert_eq!(tag, of(&Settings::default(), &bytes, [2; 32]).unwrap().unwrap().tag(b"frame"));
    }
}
