//! Pre-shared keys, and the secrets derived from them.

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;

use aws_lc_rs::{constant_time, hkdf, hmac};
use barewire_driver::mem::Locked;
use zeroize::Zeroize;

use crate::wire::TAG_LEN;

/// Least length of a key, bytes. The tag of an OPEN permits an offline search for the key, so a key
/// must be random bytes, not a password.
pub const KEY_MIN: usize = 16;

/// Largest length of a key, bytes.
pub const KEY_MAX: usize = 1024;

/// Frames of a direction that are sealed under one key, as a power of two: half of what QUIC
/// permits for AES-GCM (RFC 9001, 6.6).
pub(super) const KEY_FRAMES_BITS: u32 = 22;

/// A 32-byte secret. All that outlast a call are in secret memory.
pub(super) type Secret = Locked<[u8; 32]>;

/// The secret of these bytes, which are then overwritten.
pub(super) fn secret_of(bytes: &mut [u8; 32]) -> Secret {
    let mut secret = Secret::default();
    secret.copy_from_slice(bytes);
    bytes.zeroize();
    secret
}

/// Stack depth of the cipher library's calls, bytes, with a margin: an unoptimized build moves the
/// state of an HMAC, 1.3 KiB, from call to call.
const CIPHER_REACHES: usize = 16 << 10;

/// Stack depth of the construction of a handshake, bytes, which moves its state from call to call.
const HANDSHAKE_REACHES: usize = 32 << 10;

/// Calls `act`, which calls the cipher library, and then overwrites the stack below, where moves
/// have left copies of secrets.
pub(super) fn then_wipe<T>(act: impl FnOnce() -> T) -> T {
    wiped::<T, CIPHER_REACHES>(act)
}

/// [`then_wipe`] for the construction of a handshake.
pub(super) fn then_wipe_deep<T>(act: impl FnOnce() -> T) -> T {
    wiped::<T, HANDSHAKE_REACHES>(act)
}

fn wiped<T, const LEN: usize>(act: impl FnOnce() -> T) -> T {
    #[inline(never)]
    fn apart<T>(act: impl FnOnce() -> T) -> T {
        act()
    }
    #[inline(never)]
    fn wipe<const LEN: usize>() {
        black_box(&mut [0_u8; LEN]);
    }
    let done = apart(act);
    wipe::<LEN>();
    done
}

/// The protection of the bytes behind the base.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Encrypted and authenticated.
    #[default]
    Encrypted,
    /// Authenticated only: readable on the network.
    Authenticated,
}

/// How a session's frames are sealed, apart from its keys. Part of the pre-shared key: stations
/// with different formats have different keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SealFormat {
    pub(super) mode: Mode,
    /// Frames per key, as a power of two.
    pub(super) key_frames_bits: u32,
}

/// A pre-shared key, common to all stations that may open sessions with each other. The mode is
/// part of it: the same bytes in another mode are another key.
#[derive(Clone)]
pub struct PreSharedKey {
    pub(super) psk: Secret,
    tag: TagKey,
    pub(super) format: SealFormat,
}

/// The key for the tags of frames without a session: OPEN and RST.
#[derive(Clone)]
pub struct TagKey(Arc<Locked<hmac::Key>>);

impl TagKey {
    pub(super) fn new(secret: &Secret) -> Self {
        then_wipe(|| Self(Arc::new(Locked::new(hmac::Key::new(hmac::HMAC_SHA256, &**secret)))))
    }

    /// Whether `tag` is the tag of `frame`. Constant time.
    pub(super) fn is_tag(&self, frame: &[u8], tag: &[u8]) -> bool {
        constant_time::verify_slices_are_equal(&self.tag(frame), tag).is_ok()
    }

    /// The tag of a frame without a session.
    pub fn tag(&self, frame: &[u8]) -> [u8; TAG_LEN] {
        let mut tag = [0; TAG_LEN];
        // The library copies the key to the stack.
        let whole = then_wipe(|| hmac::sign(&self.0, frame));
        tag.copy_from_slice(&whole.as_ref()[..TAG_LEN]);
        tag
    }
}

impl fmt::Debug for TagKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TagKey").finish_non_exhaustive()
    }
}

impl PreSharedKey {
    /// The key of `bytes`.
    ///
    /// `None` if there are fewer bytes than [`KEY_MIN`] or more than [`KEY_MAX`].
    pub fn new(bytes: &[u8], mode: Mode) -> Option<Self> {
        Self::with_key_frames(bytes, mode, KEY_FRAMES_BITS)
    }

    /// [`new`](Self::new) with another number of frames per key, `1 << bits`, `bits` from 2 to 30;
    /// all stations need the same. For tests of key changes.
    pub fn with_key_frames(bytes: &[u8], mode: Mode, bits: u32) -> Option<Self> {
        if !(KEY_MIN..=KEY_MAX).contains(&bytes.len()) || !(2..=30).contains(&bits) {
            return None;
        }
        let variant = [mode as u8, bits as u8];
        Some(then_wipe(|| {
            let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, b"barewire 3 pre-shared key");
            let root = salt.extract(bytes);
            let tag = expand(&root, &[b"tag", &variant]);
            Self {
                psk: expand(&root, &[b"psk", &variant]),
                tag: TagKey::new(&tag),
                format: SealFormat { mode, key_frames_bits: bits },
            }
        }))
    }

    /// The public key that a node with a certificate uses in place of a pre-shared key: it
    /// authenticates nothing, but separates nodes of different modes.
    pub(super) fn public(mode: Mode, bits: u32) -> Option<Self> {
        Self::with_key_frames(b"barewire 3 certificates", mode, bits)
    }

    /// The key for the tags of frames without a session.
    pub fn tag_key(&self) -> &TagKey {
        &self.tag
    }

    /// Whether `tag` is the tag of `frame`. Constant time.
    pub fn is_tag(&self, frame: &[u8], tag: &[u8]) -> bool {
        self.tag.is_tag(frame, tag)
    }

    /// Whether it equals the key `other`. Constant time.
    pub fn is(&self, other: &Self) -> bool {
        constant_time::verify_slices_are_equal(&*self.psk, &*other.psk).is_ok()
    }
}

impl fmt::Debug for PreSharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreSharedKey").field("mode", &self.format.mode).finish_non_exhaustive()
    }
}

/// Length of derived secrets, 32 bytes.
struct Len32;

impl hkdf::KeyType for Len32 {
    fn len(&self) -> usize {
        32
    }
}

/// Derives the secret `name` from another secret.
pub(super) fn derive(secret: &Secret, name: &[u8]) -> Secret {
    then_wipe(|| expand(&hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &**secret), &[name]))
}

/// Derives the secret `name` from `root`.
fn expand(root: &hkdf::Prk, name: &[&[u8]]) -> Secret {
    let mut secret = Secret::default();
    let derived = root.expand(name, Len32).and_then(|okm| okm.fill(&mut *secret));
    derived.expect("32 bytes are no more than HKDF gives");
    secret
}
