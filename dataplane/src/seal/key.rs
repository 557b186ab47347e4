//! A key that an application gives a domain, and what is derived from it.

use std::fmt;
use std::hint::black_box;
use std::sync::Arc;

use aws_lc_rs::{constant_time, hkdf, hmac};
use barewire_driver::mem::Locked;
use zeroize::Zeroize;

use crate::wire::TAG_LEN;

/// Fewest bytes of a key. A tag of an OPEN lets anybody who sees one try keys, so that a key must
/// be random bytes, not a word.
pub const KEY_MIN: usize = 16;

/// Most bytes of a key.
pub const KEY_MAX: usize = 1024;

/// Frames of a direction that are sealed with one key, as a power of two: half of what QUIC allows
/// AES-GCM (RFC 9001, 6.6).
pub(super) const KEY_FRAMES_BITS: u32 = 22;

/// 32 bytes that nobody else may see: all that last longer than a call lie in memory for secrets.
pub(super) type Secret = Locked<[u8; 32]>;

/// The secret of these bytes, which are overwritten.
pub(super) fn secret_of(bytes: &mut [u8; 32]) -> Secret {
    let mut secret = Secret::default();
    secret.copy_from_slice(bytes);
    bytes.zeroize();
    secret
}

/// Bytes of the stack that calls of the cipher library reach to, with room to spare: in a build
/// that is not optimized it moves the state of an HMAC, 1.3 KiB, from call to call.
const CIPHER_REACHES: usize = 16 << 10;

/// Bytes that the making of a handshake reaches to, which moves its state from call to call.
const HANDSHAKE_REACHES: usize = 32 << 10;

/// Calls `act`, which calls the cipher library, and then overwrites what that has left on the
/// stack, where there are copies of secrets that were moved.
pub(super) fn then_wipe<T>(act: impl FnOnce() -> T) -> T {
    wiped::<T, CIPHER_REACHES>(act)
}

/// [`then_wipe`] for the making of a handshake.
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

/// What a seal does with the bytes behind the base.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// They are encrypted and authenticated.
    #[default]
    Encrypted,
    /// They are authenticated, and everybody on the way can read them.
    Authenticated,
}

/// How the frames of a session are sealed, besides with what. Part of a key: stations that seal in
/// different ways have different keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SealFormat {
    pub(super) mode: Mode,
    /// Frames to a key, as a power of two.
    pub(super) key_frames_bits: u32,
}

/// A pre-shared key: what all stations have that may open sessions with each other. The mode is
/// part of it: stations of two modes have different keys.
#[derive(Clone)]
pub struct PreSharedKey {
    pub(super) psk: Secret,
    tag: TagKey,
    pub(super) terms: SealFormat,
}

/// What authenticates frames without a session, OPEN and RST.
#[derive(Clone)]
pub struct TagKey(Arc<Locked<hmac::Key>>);

impl TagKey {
    pub(super) fn new(secret: &Secret) -> Self {
        then_wipe(|| Self(Arc::new(Locked::new(hmac::Key::new(hmac::HMAC_SHA256, &**secret)))))
    }

    /// Whether `tag` is the tag of `frame`; in constant time.
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
    /// The key of these bytes.
    ///
    /// `None` if there are fewer bytes than [`KEY_MIN`] or more than [`KEY_MAX`].
    pub fn new(bytes: &[u8], mode: Mode) -> Option<Self> {
        Self::with_key_frames(bytes, mode, KEY_FRAMES_BITS)
    }

    /// [`new`](Self::new) with another number of frames to a key, `1 << bits`, 2 to 30: all
    /// stations need the same. For tests of what happens when keys change.
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
                terms: SealFormat { mode, key_frames_bits: bits },
            }
        }))
    }

    /// What a node with a certificate has in place of one, and everybody knows: it authenticates
    /// nothing, and keeps nodes of two modes apart.
    pub(super) fn of_everybody(mode: Mode, bits: u32) -> Option<Self> {
        Self::with_key_frames(b"barewire 3 certificates", mode, bits)
    }

    /// What makes the tags of frames without a session.
    pub fn tag_key(&self) -> &TagKey {
        &self.tag
    }

    /// Whether `tag` is the tag of `frame`; in constant time.
    pub fn is_tag(&self, frame: &[u8], tag: &[u8]) -> bool {
        self.tag.is_tag(frame, tag)
    }

    /// Whether it is the key `other`; in constant time.
    pub fn is(&self, other: &Self) -> bool {
        constant_time::verify_slices_are_equal(&*self.psk, &*other.psk).is_ok()
    }
}

impl fmt::Debug for PreSharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreSharedKey").field("mode", &self.terms.mode).finish_non_exhaustive()
    }
}

/// Length of what is derived.
struct Len32;

impl hkdf::KeyType for Len32 {
    fn len(&self) -> usize {
        32
    }
}

/// The secret of this name that is derived from another.
pub(super) fn derive(secret: &Secret, name: &[u8]) -> Secret {
    then_wipe(|| expand(&hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &**secret), &[name]))
}

/// The secret of this name that belongs to `root`.
fn expand(root: &hkdf::Prk, name: &[&[u8]]) -> Secret {
    let mut secret = Secret::default();
    let derived = root.expand(name, Len32).and_then(|okm| okm.fill(&mut *secret));
    derived.expect("32 bytes are no more than HKDF gives");
    secret
}
