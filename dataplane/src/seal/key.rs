//! The key that an application gives a domain, and what is derived from it.

use std::fmt;

use aws_lc_rs::{constant_time, hkdf, hmac};
use zeroize::Zeroizing;

use crate::wire::TAG_LEN;

/// Fewest bytes of a key. A tag of an OPEN lets anybody who sees one try keys, so that a key must
/// be random bytes, not a word.
pub const KEY_MIN: usize = 16;

/// Most bytes of a key.
pub const KEY_MAX: usize = 1024;

/// Frames of a direction that are sealed with one key, as a power of two: half of what QUIC allows
/// AES-GCM (RFC 9001, 6.6).
const KEY_FRAMES_BITS: u32 = 22;

/// 32 bytes that nobody else may see.
pub(super) type Secret = Zeroizing<[u8; 32]>;

/// What a seal does with the bytes behind the base.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// They are encrypted and authenticated.
    #[default]
    Encrypted,
    /// They are authenticated, and everybody on the way can read them.
    Authenticated,
}

/// A pre-shared key: what all stations have that may open sessions with each other. The mode is
/// part of it: stations of two modes have different keys.
#[derive(Clone)]
pub struct PreSharedKey {
    pub(super) psk: Secret,
    /// Authenticates what has no session: OPEN and RST.
    tag: hmac::Key,
    /// What ephemeral keys are drawn from.
    entropy: Secret,
    drawn: u64,
    pub(super) mode: Mode,
    pub(super) key_frames_bits: u32,
}

impl PreSharedKey {
    /// The key of these bytes. `entropy` are 32 bytes that nobody can guess and that were never
    /// used before: a live domain takes them from the kernel.
    ///
    /// `None` if there are fewer bytes than [`KEY_MIN`] or more than [`KEY_MAX`].
    pub fn new(bytes: &[u8], entropy: [u8; 32], mode: Mode) -> Option<Self> {
        Self::with_key_frames(bytes, entropy, mode, KEY_FRAMES_BITS)
    }

    /// [`new`](Self::new) with another number of frames to a key, `1 << bits`, 2 to 30: all
    /// stations need the same. For tests of what happens when keys change.
    pub fn with_key_frames(bytes: &[u8], entropy: [u8; 32], mode: Mode, bits: u32) -> Option<Self> {
        if !(KEY_MIN..=KEY_MAX).contains(&bytes.len()) || !(2..=30).contains(&bits) {
            return None;
        }
        let salt = hkdf::Salt::new(hkdf::HKDF_SHA256, b"barewire 3 pre-shared key");
        let root = salt.extract(bytes);
        let variant = [mode as u8, bits as u8];
        let tag = expand(&root, &[b"tag", &variant]);
        Some(Self {
            psk: expand(&root, &[b"psk", &variant]),
            tag: hmac::Key::new(hmac::HMAC_SHA256, &*tag),
            entropy: Zeroizing::new(entropy),
            drawn: 0,
            mode,
            key_frames_bits: bits,
        })
    }

    /// The tag of a frame without a session.
    pub fn tag(&self, frame: &[u8]) -> [u8; TAG_LEN] {
        let mut tag = [0; TAG_LEN];
        tag.copy_from_slice(&hmac::sign(&self.tag, frame).as_ref()[..TAG_LEN]);
        tag
    }

    /// Whether `tag` is the tag of `frame`; in constant time.
    pub fn is_tag(&self, frame: &[u8], tag: &[u8]) -> bool {
        constant_time::verify_slices_are_equal(&self.tag(frame), tag).is_ok()
    }

    /// What the mode is.
    pub fn mode(&self) -> Mode {
        self.mode
    }

    /// A secret that was never drawn before, and from which nobody finds another.
    pub(super) fn draw(&mut self) -> Secret {
        self.drawn += 1;
        let key = hmac::Key::new(hmac::HMAC_SHA256, &*self.entropy);
        let mut drawn = Zeroizing::new([0; 32]);
        drawn.copy_from_slice(hmac::sign(&key, &self.drawn.to_le_bytes()).as_ref());
        drawn
    }
}

impl fmt::Debug for PreSharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PreSharedKey").field("mode", &self.mode).finish_non_exhaustive()
    }
}

/// Length of what is derived.
struct Len32;

impl hkdf::KeyType for Len32 {
    fn len(&self) -> usize {
        32
    }
}

/// The secret of this name that belongs to `root`.
pub(super) fn expand(root: &hkdf::Prk, name: &[&[u8]]) -> Secret {
    let mut secret = Zeroizing::new([0; 32]);
    let derived = root.expand(name, Len32).and_then(|okm| okm.fill(&mut *secret));
    derived.expect("32 bytes are no more than HKDF gives");
    secret
}
