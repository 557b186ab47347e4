//! The keys of one direction: each seals so many frames, the next is derived from the secret of the
//! one before, and what is behind cannot be found again.

use std::fmt;

use aws_lc_rs::aead::{self, AES_256_GCM, Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};

use super::key::{Mode, Secret, derive, then_wipe};
use crate::wire::{BASE_LEN, TAG_LEN};

/// What seals and opens.
pub(super) type Cipher = &'static aead::Algorithm;

/// One link: a key and what the next one is made from.
pub(super) struct Chain {
    cipher: Cipher,
    /// Number of the key.
    pub(super) generation: u64,
    pub(super) key: LessSafeKey,
    secret: Secret,
}

impl Chain {
    /// The first link of a secret.
    pub(super) fn new(cipher: Cipher, secret: Secret) -> Self {
        Self::link(cipher, 0, secret)
    }

    /// What the next link is made from.
    pub(super) fn secret(&self) -> &Secret {
        &self.secret
    }

    /// The link behind this one.
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

/// The nonce of a frame: four zero bytes and its counter, big-endian, as Noise has it.
pub(super) fn nonce(counter: u64) -> Nonce {
    let mut nonce = [0; aead::NONCE_LEN];
    nonce[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}

/// Opens a frame under a key: `bytes` are its base, what was protected, and the tag. Decrypts what
/// lies between. False if the tag is not right; what was encrypted may be overwritten then.
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

/// What seals and opens. `aes` if both ends have AES in their processors.
pub(super) fn cipher(aes: bool) -> Cipher {
    if aes { &AES_256_GCM } else { &CHACHA20_POLY1305 }
}
