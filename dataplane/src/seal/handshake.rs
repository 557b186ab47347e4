//! The handshake: NNpsk0 of the Noise framework, revision 34. Who knows the pre-shared key takes
//! part in it; the keys that come of it are of this session alone, and not even who learns the
//! pre-shared key later finds them.

use std::fmt;
use std::sync::Arc;

use snow::HandshakeState;
use zeroize::Zeroizing;

use super::credentials::{Credentials, PAYLOAD_MAX};
use super::key::{PreSharedKey, Secret, TagKey, Terms};
use super::keyring::{HANDSHAKE_LEN, KeyId, Keyring};
use super::noise::{Resolver, X25519};
use super::path::Role;
use super::proof::{BadCert, Signed, check, prove};
use super::session::SessionKeys;

pub(super) const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// A message of the handshake.
pub type Message = Vec<u8>;

/// Why a message of the handshake is refused. Nothing has happened then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// It is none by who has the key, or of another session.
    Forged,
    /// Its sender's certificate is refused.
    Certificate(BadCert),
}

/// What names the session of a handshake, so that its messages are of no other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionNames {
    /// The station that opens it, as [`Station::word`](barewire_driver::port::Station::word) has
    /// it.
    pub opener: u64,
    /// The station that answers.
    pub answerer: u64,
    /// `inc`, `sid` and `epoch` of the OPEN.
    pub inc: u64,
    /// See [`inc`](Self::inc).
    pub sid: u32,
    /// See [`inc`](Self::inc).
    pub epoch: u32,
    /// `psn` of the OPEN: the opener's first packet.
    pub psn: u32,
}

impl SessionNames {
    fn prologue(&self) -> [u8; 46] {
        let mut bytes = [0; 46];
        let parts: [&[u8]; 7] = [
            b"barewire 3",
            &self.opener.to_le_bytes(),
            &self.answerer.to_le_bytes(),
            &self.inc.to_le_bytes(),
            &self.sid.to_le_bytes(),
            &self.epoch.to_le_bytes(),
            &self.psn.to_le_bytes(),
        ];
        let mut at = 0;
        for part in parts {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        bytes
    }
}

/// The end that sends the first message.
pub struct Initiator {
    state: Box<HandshakeState>,
    names: SessionNames,
    message: Message,
    terms: Terms,
    /// Where identities are of certificates: an answer that can be read may still be refused, and
    /// the handshake begins anew then.
    certified: Option<Certified>,
}

struct Certified {
    own: Arc<Credentials>,
    /// What the first message carries.
    payload: Vec<u8>,
    key: PreSharedKey,
    seed: Secret,
}

/// What the end has that answers: the keys of the session, the message that tells its peer, and
/// what the OPEN that carries this is tagged with.
#[derive(Debug)]
pub struct Answer {
    /// The session's.
    pub keys: SessionKeys,
    /// The second message.
    pub message: Message,
    /// That of the key of the first message.
    pub tag_key: TagKey,
}

impl Initiator {
    /// Begins the handshake of the session of these names, under the first key.
    pub fn new(ring: &mut Keyring, names: SessionNames) -> Self {
        let first = ring.first();
        Self::under(ring, first, names).expect("the first key is listed")
    }

    /// [`new`](Self::new) under the key `id`; `None` if that is not listed.
    pub fn under(ring: &mut Keyring, id: KeyId, names: SessionNames) -> Option<Self> {
        let seed = ring.draw();
        let key = ring.get(id)?;
        let (mut state, ephemeral) = begin(key, &seed, &names, true);
        let own = ring.credentials();
        let hash = hash_of(&state);
        let signed = Signed { role: Role::Opener, hash, ephemeral, psn: names.psn };
        let payload = own.map_or(Vec::new(), |own| prove(own, &signed));
        let message = write(&mut state, &payload).expect("NNpsk0 begins with a message");
        let certified = own.map(|own| {
            let (own, key) = (Arc::clone(own), key.clone());
            Certified { own, payload, key, seed }
        });
        Some(Self { state, names, message, terms: key.terms, certified })
    }

    /// The names of the session.
    pub fn names(&self) -> &SessionNames {
        &self.names
    }

    /// The first message, which goes with every OPEN of the session that answers none.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// Ends the handshake with the answer, in an OPEN with this `psn`. `aes` as in [`respond`].
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn finish(&mut self, answer: &[u8], aes: bool, psn: u32) -> Result<SessionKeys, Refused> {
        let hash = hash_of(&self.state);
        let payload = read(&mut self.state, answer)?;
        if let Some(certified) = &self.certified {
            let ephemeral = ephemeral_of(answer);
            let signed = Signed { role: Role::Answerer, hash, ephemeral, psn };
            if let Err(bad) = check(&certified.own, &signed, &payload) {
                self.begin_anew();
                return Err(Refused::Certificate(bad));
            }
        }
        let (tx, rx) = self.state.dangerously_get_raw_split();
        Ok(SessionKeys::new(self.terms, aes, [Zeroizing::new(tx), Zeroizing::new(rx)]))
    }

    /// Goes back to where the first message has left.
    fn begin_anew(&mut self) {
        let Some(Certified { payload, key, seed, .. }) = &self.certified else { return };
        let (mut state, _) = begin(key, seed, &self.names, true);
        if write(&mut state, payload).is_some() {
            self.state = state;
        }
    }
}

impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Initiator").field("names", &self.names).finish_non_exhaustive()
    }
}

/// Answers the first message, which came under the key `id`, of the session of these names, in an
/// OPEN with this `psn`. `aes` if both ends have AES in their processors.
///
/// # Errors
/// See [`Refused`]; also if the key is not listed.
pub fn respond(
    ring: &mut Keyring,
    id: KeyId,
    names: SessionNames,
    message: &[u8],
    (aes, psn): (bool, u32),
) -> Result<Answer, Refused> {
    let seed = ring.draw();
    let key = ring.get(id).ok_or(Refused::Forged)?;
    let (mut state, ephemeral) = begin(key, &seed, &names, false);
    let hash = hash_of(&state);
    let payload = read(&mut state, message)?;
    let mut proof = Vec::new();
    if let Some(own) = ring.credentials() {
        let opener = ephemeral_of(message);
        let signed = Signed { role: Role::Opener, hash, ephemeral: opener, psn: names.psn };
        check(own, &signed, &payload).map_err(Refused::Certificate)?;
        let hash = hash_of(&state);
        proof = prove(own, &Signed { role: Role::Answerer, hash, ephemeral, psn });
    }
    // Fails if the first message holds a public key that makes the secret zero.
    let answer = write(&mut state, &proof).ok_or(Refused::Forged)?;
    let (rx, tx) = state.dangerously_get_raw_split();
    let keys = SessionKeys::new(key.terms, aes, [Zeroizing::new(tx), Zeroizing::new(rx)]);
    Ok(Answer { keys, message: answer, tag_key: key.tag_key().clone() })
}

/// The payload of the first message of the session of these names, which came under the first key
/// of `ring`, unchecked: who has the key, which everybody has where there are certificates, can
/// read it. For tests.
pub fn read_first(ring: &Keyring, names: &SessionNames, message: &[u8]) -> Option<Vec<u8>> {
    let (mut state, _) = begin(ring.get(ring.first())?, &Secret::default(), names, false);
    read(&mut state, message).ok()
}

/// The payload of the answer to the first message of `initiator`, unchecked. For tests: the
/// handshake is over then.
pub fn read_answer(mut initiator: Initiator, answer: &[u8]) -> Option<Vec<u8>> {
    read(&mut initiator.state, answer).ok()
}

pub(super) fn hash_of(state: &HandshakeState) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(state.get_handshake_hash());
    hash
}

/// The ephemeral key with which a message begins that was read.
fn ephemeral_of(message: &[u8]) -> [u8; 32] {
    message.first_chunk().copied().unwrap_or_default()
}

pub(super) fn write(state: &mut HandshakeState, payload: &[u8]) -> Option<Message> {
    let mut message = vec![0; HANDSHAKE_LEN + payload.len()];
    let written = state.write_message(payload, &mut message);
    written.is_ok_and(|len| len == message.len()).then_some(message)
}

/// The payload of a message. Nothing has happened if it is refused.
pub(super) fn read(state: &mut HandshakeState, message: &[u8]) -> Result<Vec<u8>, Refused> {
    let len = message.len().checked_sub(HANDSHAKE_LEN).filter(|&len| len <= PAYLOAD_MAX);
    let mut payload = vec![0; len.ok_or(Refused::Forged)?];
    let read = state.read_message(message, &mut payload);
    read.ok().filter(|&len| len == payload.len()).map(|_| payload).ok_or(Refused::Forged)
}

/// The handshake before its first message, and the ephemeral public key of this end.
pub(super) fn begin(
    key: &PreSharedKey,
    seed: &Secret,
    names: &SessionNames,
    opens: bool,
) -> (Box<HandshakeState>, [u8; 32]) {
    let ephemeral = X25519::of_seed(seed);
    let public = ephemeral.public();
    let resolver = Box::new(Resolver { ephemeral });
    let prologue = names.prologue();
    let pattern = PATTERN.parse().expect("the pattern is one of Noise");
    let builder = snow::Builder::with_resolver(pattern, resolver);
    let builder = builder.prologue(&prologue).and_then(|builder| builder.psk(0, &key.psk));
    let built = builder.and_then(|builder| match opens {
        true => builder.build_initiator(),
        false => builder.build_responder(),
    });
    (Box::new(built.expect("the pattern needs a prologue and a key, and no more")), public)
}
