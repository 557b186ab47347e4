//! The keys of one direction: each seals so many frames, the next is derived from the secret of the
//! one before, and what is behind cannot be found again.

use std::fmt;

use aws_lc_rs::aead::{self, LessSafeKey, Nonce, UnboundKey};
use aws_lc_rs::hkdf;

use super::key::{Secret, expand};

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

    /// The link behind this one.
    pub(super) fn next(&self) -> Self {
        let next = expand(&root(&self.secret), &[b"next"]);
        Self::link(self.cipher, self.generation + 1, next)
    }

    fn link(cipher: Cipher, generation: u64, secret: Secret) -> Self {
        let bytes = expand(&root(&secret), &[b"key"]);
        let key = UnboundKey::new(cipher, &*bytes).expect("the ciphers have keys of 32 bytes");
        Self { cipher, generation, key: LessSafeKey::new(key), secret }
    }
}

impl fmt::Debug for Chain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Chain").field("generation", &self.generation).finish_non_exhaustive()
    }
}

fn root(secret: &Secret) -> hkdf::Prk {
    hkdf::Prk::new_less_safe(hkdf::HKDF_SHA256, &**secret)
}

/// The nonce of a frame: four zero bytes and its counter, big-endian, as Noise has it.
pub(super) fn nonce(counter: u64) -> Nonce {
    let mut nonce = [0; aead::NONCE_LEN];
    nonce[4..].copy_from_slice(&counter.to_be_bytes());
    Nonce::assume_unique_for_key(nonce)
}
