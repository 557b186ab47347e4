//! The handshake: NNpsk0 of the Noise framework, revision 34. Only holders of the pre-shared key
//! can take part. The resulting keys are of one session only, and cannot be recovered later even
//! with the pre-shared key.

use std::fmt;
use std::sync::Arc;

use barewire_driver::mem::Locked;
use snow::HandshakeState;

use super::credentials::{Credentials, PAYLOAD_MAX};
use super::key::{PreSharedKey, Secret, TagKey, derive, secret_of, then_wipe, then_wipe_deep};
use super::keyring::{HANDSHAKE_LEN, KeyId, Keyring};
use super::noise::{Resolver, X25519};
use super::path::Role;
use super::proof::{BadCert, Signed, check, prove};
use super::session::SessionKeys;
use crate::wire::sealed::OPEN_END;
use crate::wire::{OpenParams, TAG_LEN};

pub(super) const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// A message of the handshake.
pub type Message = Vec<u8>;

/// Why a handshake message is refused. The state is unchanged then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// The sender does not have the key, or the message is of another session.
    Forged,
    /// The sender's certificate is refused.
    Certificate(BadCert),
}

/// The context that binds the handshake to its session: the session's names, so that its messages
/// are valid in no other, and the opener's parameters in each OPEN, so that they cannot be changed
/// in transit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SessionNames {
    /// The opening station, as [`Station::word`](barewire_driver::port::Station::word).
    pub opener: u64,
    /// The answering station.
    pub answerer: u64,
    /// `inc`, `sid` and `epoch` of the OPEN.
    pub inc: u64,
    /// See [`inc`](Self::inc).
    pub sid: u32,
    /// See [`inc`](Self::inc).
    pub epoch: u32,
    /// `psn` of the OPEN: the PSN of the opener's first packet.
    pub psn: u32,
    /// Parameters of the opener in its OPEN.
    pub params: OpenParams,
}

impl SessionNames {
    fn prologue(&self) -> [u8; 64] {
        let mut bytes = [0; 64];
        let parts: [&[u8]; 8] = [
            b"barewire 3",
            &self.opener.to_le_bytes(),
            &self.answerer.to_le_bytes(),
            &self.inc.to_le_bytes(),
            &self.sid.to_le_bytes(),
            &self.epoch.to_le_bytes(),
            &self.psn.to_le_bytes(),
            &self.params,
        ];
        let mut at = 0;
        for part in parts {
            bytes[at..at + part.len()].copy_from_slice(part);
            at += part.len();
        }
        bytes
    }
}

/// The initiator: the end that sends the first message.
pub struct Initiator {
    /// In secret memory: the library keeps the key in the state, and does not overwrite it.
    state: Locked<HandshakeState>,
    names: SessionNames,
    message: Message,
    /// Payload of the first message.
    payload: Vec<u8>,
    /// Key for a restart of the handshake: an answer that can be decrypted may still be refused.
    key: PreSharedKey,
    seed: Secret,
    /// This node's credentials, if it has a certificate.
    own: Option<Arc<Credentials>>,
}

/// The responder's result: the keys of the session, the second message, and the tag keys for the
/// end of the OPEN that carries it.
#[derive(Debug)]
pub struct Answer {
    /// Keys of the session.
    pub keys: SessionKeys,
    /// The second message.
    pub message: Message,
    /// The key for the tag behind the message, over all bytes before it. The tag proves that the
    /// message's sender sent the whole OPEN.
    pub finished: Finished,
    /// The tag key of the pre-shared key that the first message came under.
    pub tag_key: TagKey,
}

/// The secret for the Finished tag at the end of an OPEN in answer. (The tag key itself is larger,
/// and is derived when that OPEN is sent.)
#[derive(Clone)]
pub struct Finished(Secret);

impl Finished {
    /// The secret of the end whose frames are sealed with `secret`.
    fn of(secret: &Secret) -> Self {
        Self(derive(secret, b"finished"))
    }

    /// The tag key.
    pub(crate) fn tag_key(&self) -> TagKey {
        TagKey::new(&self.0)
    }
}

impl fmt::Debug for Finished {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Finished").finish_non_exhaustive()
    }
}

impl Answer {
    /// The OPEN with this header, up to its frame tag. For tests without a node.
    pub fn open(&self, header: &[u8; OPEN_END]) -> Vec<u8> {
        let mut open = [header, &self.message[..]].concat();
        open.extend(self.finished.tag_key().tag(&open));
        open
    }
}

impl Initiator {
    /// Begins the handshake of session `names` under the first key.
    pub fn new(ring: &mut Keyring, names: SessionNames) -> Self {
        let first = ring.first();
        Self::under(ring, first, names).expect("the first key is listed")
    }

    /// [`new`](Self::new) under the key `id`; `None` if the key is not listed.
    pub fn under(ring: &mut Keyring, id: KeyId, names: SessionNames) -> Option<Self> {
        let seed = ring.draw();
        let key = ring.get(id)?;
        let (mut state, ephemeral) = begin(key, &seed, &names, true);
        let own = ring.credentials();
        let hash = hash_of(&state);
        let signed = Signed { role: Role::Opener, hash, ephemeral };
        let payload = own.map_or(Vec::new(), |own| prove(own, &signed));
        let message = write(&mut state, &payload).expect("NNpsk0 begins with a message");
        let (key, own) = (key.clone(), own.map(Arc::clone));
        Some(Self { state, names, message, payload, key, seed, own })
    }

    /// The names of the session.
    pub fn names(&self) -> &SessionNames {
        &self.names
    }

    /// The first message, part of every OPEN of the session that is no answer.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// Completes the handshake with an OPEN in answer: `open` is the frame without its frame tag.
    /// `aes` as in [`respond`].
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn finish(&mut self, open: &[u8], aes: bool) -> Result<SessionKeys, Refused> {
        let (covered, finished) = open.split_last_chunk::<TAG_LEN>().ok_or(Refused::Forged)?;
        let answer = covered.get(OPEN_END..).ok_or(Refused::Forged)?;
        let hash = hash_of(&self.state);
        let payload = read(&mut self.state, answer)?;
        let signed = Signed { role: Role::Answerer, hash, ephemeral: ephemeral_of(answer) };
        let proven = self.own.as_ref().map_or(Ok(()), |own| {
            check(own, &signed, &payload).map(|_| ()).map_err(Refused::Certificate)
        });
        let agreed = proven.and_then(|()| self.keys((covered, finished), aes));
        if agreed.is_err() {
            self.restart();
        }
        agreed
    }

    /// The session's keys, if the Finished tag of the peer's OPEN is correct.
    fn keys(
        &mut self,
        (covered, finished): (&[u8], &[u8; TAG_LEN]),
        aes: bool,
    ) -> Result<SessionKeys, Refused> {
        let (tx, rx) = split(&mut self.state);
        let is_whole = Finished::of(&rx).tag_key().is_tag(covered, finished);
        is_whole.then(|| SessionKeys::new(self.key.format, aes, [tx, rx])).ok_or(Refused::Forged)
    }

    /// Restores the state after the first message.
    fn restart(&mut self) {
        let (mut state, _) = begin(&self.key, &self.seed, &self.names, true);
        if write(&mut state, &self.payload).is_some() {
            self.state = state;
        }
    }
}

impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Initiator").field("names", &self.names).finish_non_exhaustive()
    }
}

/// Answers the first message of session `names`, which came under the key `id`. `aes`: both ends
/// have AES instructions.
///
/// # Errors
/// See [`Refused`]; also if the key is not listed.
pub fn respond(
    ring: &mut Keyring,
    id: KeyId,
    names: SessionNames,
    message: &[u8],
    aes: bool,
) -> Result<Answer, Refused> {
    let seed = ring.draw();
    let key = ring.get(id).ok_or(Refused::Forged)?;
    let (mut state, ephemeral) = begin(key, &seed, &names, false);
    let hash = hash_of(&state);
    let payload = read(&mut state, message)?;
    let mut proof = Vec::new();
    if let Some(own) = ring.credentials() {
        let opener = ephemeral_of(message);
        let signed = Signed { role: Role::Opener, hash, ephemeral: opener };
        check(own, &signed, &payload).map_err(Refused::Certificate)?;
        let hash = hash_of(&state);
        proof = prove(own, &Signed { role: Role::Answerer, hash, ephemeral });
    }
    // Fails if the first message contains a public key that makes the shared secret zero.
    let answer = write(&mut state, &proof).ok_or(Refused::Forged)?;
    let (rx, tx) = split(&mut state);
    let (finished, tag_key) = (Finished::of(&tx), key.tag_key().clone());
    let keys = SessionKeys::new(key.format, aes, [tx, rx]);
    Ok(Answer { keys, message: answer, finished, tag_key })
}

/// The payload of the first message of session `names` under the first key of `ring`, unverified:
/// any holder of the key can read it, thus anybody where there are certificates. For tests.
pub fn read_first(ring: &Keyring, names: &SessionNames, message: &[u8]) -> Option<Vec<u8>> {
    let (mut state, _) = begin(ring.get(ring.first())?, &Secret::default(), names, false);
    read(&mut state, message).ok()
}

/// The payload of the answer to the first message of `initiator`, unverified. For tests: it
/// consumes the handshake.
pub fn read_answer(mut initiator: Initiator, answer: &[u8]) -> Option<Vec<u8>> {
    read(&mut initiator.state, answer).ok()
}

pub(super) fn hash_of(state: &HandshakeState) -> [u8; 32] {
    let mut hash = [0; 32];
    hash.copy_from_slice(state.get_handshake_hash());
    hash
}

/// The ephemeral key at the start of a message that was read.
fn ephemeral_of(message: &[u8]) -> [u8; 32] {
    message.first_chunk().copied().unwrap_or_default()
}

pub(super) fn write(state: &mut HandshakeState, payload: &[u8]) -> Option<Message> {
    let mut message = vec![0; HANDSHAKE_LEN + payload.len()];
    let written = then_wipe(|| state.write_message(payload, &mut message));
    written.is_ok_and(|len| len == message.len()).then_some(message)
}

/// The payload of a message. The state is unchanged if the message is refused.
pub(super) fn read(state: &mut HandshakeState, message: &[u8]) -> Result<Vec<u8>, Refused> {
    let len = message.len().checked_sub(HANDSHAKE_LEN).filter(|&len| len <= PAYLOAD_MAX);
    let mut payload = vec![0; len.ok_or(Refused::Forged)?];
    let read = then_wipe(|| state.read_message(message, &mut payload));
    read.ok().filter(|&len| len == payload.len()).map(|_| payload).ok_or(Refused::Forged)
}

/// The secrets of both directions at the end of a handshake, that of the opener's frames first.
fn split(state: &mut HandshakeState) -> (Secret, Secret) {
    then_wipe(|| {
        let (mut to, mut back) = state.dangerously_get_raw_split();
        (secret_of(&mut to), secret_of(&mut back))
    })
}

/// The state before the first message, and the ephemeral public key of this end.
pub(super) fn begin(
    key: &PreSharedKey,
    seed: &Secret,
    names: &SessionNames,
    opens: bool,
) -> (Locked<HandshakeState>, [u8; 32]) {
    then_wipe_deep(|| {
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
        let built = built.expect("the pattern needs a prologue and a key, and no more");
        (Locked::new(built), public)
    })
}
