//! The primitives of the Noise framework, from the library that also seals the frames.

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, MAX_TAG_LEN, UnboundKey};
use aws_lc_rs::{agreement, digest, hmac};
use snow::params::{CipherChoice, DHChoice, HashChoice};
use snow::resolvers::CryptoResolver;
use snow::types::{Cipher, Dh, Hash, Random};

use super::chain::nonce;
use super::key::Secret;

/// Resolver for X25519, AES-256-GCM and SHA-256, with this end's ephemeral key.
pub(super) struct Resolver {
    pub(super) ephemeral: X25519,
}

impl CryptoResolver for Resolver {
    fn resolve_rng(&self) -> Option<Box<dyn Random>> {
        Some(Box::new(NoRng))
    }

    fn resolve_dh(&self, choice: &DHChoice) -> Option<Box<dyn Dh>> {
        let is = matches!(choice, DHChoice::Curve25519);
        is.then(|| Box::new(self.ephemeral.clone()) as Box<dyn Dh>)
    }

    fn resolve_hash(&self, choice: &HashChoice) -> Option<Box<dyn Hash>> {
        matches!(choice, HashChoice::SHA256).then(|| Box::<Sha256>::default() as Box<dyn Hash>)
    }

    fn resolve_cipher(&self, choice: &CipherChoice) -> Option<Box<dyn Cipher>> {
        let aes = matches!(choice, CipherChoice::AESGCM);
        aes.then(|| Box::<AesGcm>::default() as Box<dyn Cipher>)
    }
}

/// An unused random generator: the only random key is drawn before.
struct NoRng;

impl Random for NoRng {
    fn try_fill_bytes(&mut self, _: &mut [u8]) -> Result<(), snow::Error> {
        Err(snow::Error::Rng)
    }
}

/// An X25519 key pair. The default is none.
#[derive(Clone, Default)]
pub(super) struct X25519 {
    private: Secret,
    public: [u8; 32],
}

impl X25519 {
    /// The key pair derived from a secret seed.
    pub(super) fn of_seed(seed: &Secret) -> Self {
        let key = hmac::Key::new(hmac::HMAC_SHA256, &**seed);
        let drawn = hmac::sign(&key, &1_u64.to_le_bytes());
        let mut pair = Self::default();
        pair.set(drawn.as_ref());
        pair
    }

    pub(super) fn public(&self) -> [u8; 32] {
        self.public
    }

    fn key(&self) -> Option<agreement::PrivateKey> {
        agreement::PrivateKey::from_private_key(&agreement::X25519, &*self.private).ok()
    }
}

impl Dh for X25519 {
    fn name(&self) -> &'static str {
        "25519"
    }

    fn pub_len(&self) -> usize {
        32
    }

    fn priv_len(&self) -> usize {
        32
    }

    fn set(&mut self, privkey: &[u8]) {
        self.private.copy_from_slice(privkey);
        // Any 32 bytes are a private key.
        if let Some(public) = self.key().and_then(|key| key.compute_public_key().ok()) {
            self.public.copy_from_slice(public.as_ref());
        }
    }

    /// Nothing to generate: the key was drawn when the handshake began.
    fn generate(&mut self, _: &mut dyn Random) -> Result<(), snow::Error> {
        Ok(())
    }

    fn pubkey(&self) -> &[u8] {
        &self.public
    }

    fn privkey(&self) -> &[u8] {
        &*self.private
    }

    /// Fails for a public key that makes the shared secret zero.
    fn dh(&self, pubkey: &[u8], out: &mut [u8]) -> Result<(), snow::Error> {
        let key = self.key().ok_or(snow::Error::Dh)?;
        // The framework lends a buffer of its longest key length.
        let peer = agreement::UnparsedPublicKey::new(&agreement::X25519, &pubkey[..32]);
        agreement::agree(&key, peer, snow::Error::Dh, |secret| {
            out[..32].copy_from_slice(secret);
            Ok(())
        })
    }
}

struct Sha256(digest::Context);

impl Default for Sha256 {
    fn default() -> Self {
        Self(digest::Context::new(&digest::SHA256))
    }
}

impl Hash for Sha256 {
    fn name(&self) -> &'static str {
        "SHA256"
    }

    fn block_len(&self) -> usize {
        64
    }

    fn hash_len(&self) -> usize {
        32
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn input(&mut self, data: &[u8]) {
        self.0.update(data);
    }

    fn result(&mut self, out: &mut [u8]) {
        out[..32].copy_from_slice(self.0.clone().finish().as_ref());
    }
}

#[derive(Default)]
struct AesGcm {
    key: Secret,
}

impl AesGcm {
    fn key(&self) -> LessSafeKey {
        let key = UnboundKey::new(&AES_256_GCM, &*self.key).expect("a key of 32 bytes");
        LessSafeKey::new(key)
    }
}

impl Cipher for AesGcm {
    fn name(&self) -> &'static str {
        "AESGCM"
    }

    fn set(&mut self, key: &[u8; 32]) {
        self.key.copy_from_slice(key);
    }

    fn encrypt(&self, counter: u64, authtext: &[u8], plaintext: &[u8], out: &mut [u8]) -> usize {
        let (body, rest) = out.split_at_mut(plaintext.len());
        body.copy_from_slice(plaintext);
        let sealed =
            self.key().seal_in_place_separate_tag(nonce(counter), Aad::from(authtext), body);
        let tag = sealed.expect("a message of a handshake is short");
        rest[..MAX_TAG_LEN].copy_from_slice(tag.as_ref());
        plaintext.len() + MAX_TAG_LEN
    }

    fn decrypt(
        &self,
        counter: u64,
        authtext: &[u8],
        ciphertext: &[u8],
        out: &mut [u8],
    ) -> Result<usize, snow::Error> {
        let len = ciphertext.len().checked_sub(MAX_TAG_LEN).ok_or(snow::Error::Decrypt)?;
        let (body, tag) = ciphertext.split_at(len);
        let aad = Aad::from(authtext);
        let opened =
            self.key().open_separate_gather(nonce(counter), aad, body, tag, &mut out[..len]);
        opened.map(|()| len).map_err(|_| snow::Error::Decrypt)
    }
}

#[cfg(test)]
mod tests {
    use super::super::key::secret_of;
    use super::*;

    fn bytes(hex: &str) -> Vec<u8> {
        let digits = hex.as_bytes().chunks(2);
        digits.map(|d| u8::from_str_radix(str::from_utf8(d).unwrap(), 16).unwrap()).collect()
    }

    /// Source: vectors of the cacophony implementation of Noise, NNpsk0_25519_AESGCM_SHA256.
    #[test]
    fn the_handshake_is_that_of_others() {
        let prologue = bytes("4a6f686e2047616c74");
        let psk: [u8; 32] =
            bytes("54686973206973206d7920417573747269616e20706572737065637469766521")
                .try_into()
                .unwrap();
        let ephemerals = [
            bytes("893e28b9dc6ca8d611ab664754b8ceb7bac5117349a4439a6b0569da977c464a"),
            bytes("bbdb4cdbd309f1a1f2e1456967fe288cadd6f712d65dc7b7793d5e63da6b375b"),
        ];
        let builder = |e: usize| {
            let resolver = Box::new(Resolver { ephemeral: X25519::default() });
            let pattern = super::super::handshake::PATTERN.parse().unwrap();
            let builder = snow::Builder::with_resolver(pattern, resolver);
            let builder = builder.prologue(&prologue).unwrap().psk(0, &psk).unwrap();
            builder.fixed_ephemeral_key_for_testing_only(&ephemerals[e])
        };
        let mut ends =
            [builder(0).build_initiator().unwrap(), builder(1).build_responder().unwrap()];
        let messages = [
            (
                "4c756477696720766f6e204d69736573",
                "ca35def5ae56cec33dc2036731ab14896bc4c75dbb07a61f879f8e3afa4c79447c37a89fc178137\
                 88d30df2d59501d6066f5f8aecc3406bbd9829f2d24a531b1",
            ),
            (
                "4d757272617920526f746862617264",
                "95ebc60d2b1fa672c1f46a8aa265ef51bfe38e7ccb39ec5be34069f1448088432f29d79368ef9de\
                 4e1ae7a362fb05bf0ad668e026bf5714554497b3a720461",
            ),
        ];
        for (i, (payload, sealed)) in messages.into_iter().enumerate() {
            let (payload, mut out) = (bytes(payload), [0; 200]);
            let len = ends[i].write_message(&payload, &mut out).unwrap();
            assert_eq!(out[..len], bytes(sealed)[..], "message {i}");
            let mut read = [0; 200];
            let len = ends[1 - i].read_message(&out[..len], &mut read).unwrap();
            assert_eq!(read[..len], payload[..]);
        }
        let hash = bytes("9f3b1f9afd7767767b5b9d1069844a6154fdbdcc36dfb3e31c0fffc5c973d530");
        assert!(ends.iter().all(|end| end.get_handshake_hash() == &hash[..]));
        let (mut to, back) = ends[0].dangerously_get_raw_split();
        assert_eq!(ends[1].dangerously_get_raw_split(), (to, back));
        // The first message after the handshake verifies the keys.
        let cipher = AesGcm { key: secret_of(&mut to) };
        let (payload, mut out) = (bytes("462e20412e20486179656b"), [0; 64]);
        let len = cipher.encrypt(0, &[], &payload, &mut out);
        let sealed = "7c01e898a6201f36aecee532e29cd0b7f8ffa29d3366ad0dce39a6";
        assert_eq!(out[..len], bytes(sealed)[..]);
    }
}
