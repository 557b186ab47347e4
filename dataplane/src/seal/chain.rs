//! The key chain of one direction: each key seals a fixed number of frames, the next is derived
//! from the secret of the previous one, and earlier keys cannot be recovered.

use std::fmt;

use aws_lc_rs::aead::{self, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

use super::key::{Mode, Secret, derive, then_wipe};
use crate::wire::{BASE_LEN, TAG_LEN};

/// An AEAD algorithm.
pub(super) type Cipher = &'static aead::Algorithm;

/// One link of a chain: a key, and the secret that the next link is derived from.
pub(super) struct Chain {
    cipher: Cipher,
    /// Number of the key in the chain.
    pub(super) generation: u64,
    pub(super) key: LessSafeKey,
    secret: Secret,
}

impl Chain {
    /// The first link, derived from `secret`.
    pub(super) fn new(cipher: Cipher, secret: Secret) -> Self {
        Self::link(cipher, 0, secret)
    }

    /// The secret that the next link is derived from.
    pub(super) fn secret(&self) -> &Secret {
        &self.secret
    }

    /// The next link.
    pub(super) fn next(&self) -> Self {
        let next = derive(&self.secret, b"next");
        Self::link(self.cipher, self.generation + 1, next)
    }

    fn link(cipher: Cipher, generation: u64, secret: Secret) -> Self {
        let bytes = derive(&secret, b"key");
        let key = then_wipe(|| {
            let key = UnboundKey::new(cipher, &*bytes).expect("the ciphers have keys of 32 bytes");
            LessSafeKey::new(key)
        });
        Self { cipher, generation, key, secret }
    }
}

impl fmt::Debug for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chain").field("generation", &self.generation).finish_non_exhaustive()
    }
}

/// The nonce of a frame: four zero bytes and the counter, big-endian, as in Noise.
pub(super) fn nonce(counter: u64) -> Nonce {
    let mut nonce = [0; aead::NONCE_LEN];
    nonce[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Opens a frame under a key: `bytes` are its base, the protected bytes, and the tag. Decrypts the
/// protected bytes in place. False if the tag is wrong; the protected bytes may be overwritten
/// then.
pub(super) fn open_with(key: &LessSafeKey, mode: Mode, nonce: Nonce, bytes: &mut [u8]) -> bool {
    match mode {
        Mode::Encrypted => {
            let (head, rest) = bytes.split_at_mut(BASE_LEN);
            let (body, tag) = rest.split_at_mut(rest.len() - TAG_LEN);
            key.open_in_place_separate_tag(nonce, Aad::from(head), tag, body).is_ok()
        }
        Mode::Authenticated => {
            let (all, tag) = bytes.split_at(bytes.len() - TAG_LEN);
            key.open_separate_gather(nonce, Aad::from(all), &[], tag, &mut []).is_ok()
        }
    }
}

/// The AEAD of a session. `aes`: both ends have AES instructions.
pub(super) fn cipher(aes: bool) -> Cipher {
    if aes { &AES_256_GCM } else { &CHACHA20_POLY1305 }
}
