//! The handshake: NNpsk0 of the Noise framework, revision 34. Who knows the pre-shared key takes
//! part in it; the keys that come of it are of this session alone, and not even who learns the
//! pre-shared key later finds them.

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

/// Why a message of the handshake is refused. Nothing has happened then.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refused {
    /// Its sender does not have the key, or it is of another session.
    Forged,
    /// Its sender's certificate is refused.
    Certificate(BadCert),
}

/// What names the session of a handshake, so that its messages are of no other, and what its opener
/// says in every OPEN of it, so that nobody else says it otherwise.
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
    /// What the OPEN says of the opener.
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

/// The end that sends the first message.
pub struct Initiator {
    /// In memory for secrets: the library keeps the key in it, and does not overwrite it.
    state: Locked<HandshakeState>,
    names: SessionNames,
    message: Message,
    /// What the first message carries.
    payload: Vec<u8>,
    /// What the handshake begins anew with: an answer that can be read may still be refused.
    key: PreSharedKey,
    seed: Secret,
    /// Where identities are of certificates.
    own: Option<Arc<Credentials>>,
}

/// What the end has that answers: the keys of the session, the message that tells its peer, and
/// what the OPEN that carries this ends with.
#[derive(Debug)]
pub struct Answer {
    /// The session's.
    pub keys: SessionKeys,
    /// The second message.
    pub message: Message,
    /// What makes the tag behind the message, of all bytes before it. The tag proves that the whole
    /// OPEN is of the sender of the message.
    pub finished: Finished,
    /// That of the key of the first message.
    pub tag_key: TagKey,
}

/// What the tag is made with that ends an OPEN in answer. (What makes tags is longer, and is made
/// when that OPEN leaves.)
#[derive(Clone)]
pub struct Finished(Secret);

impl Finished {
    /// Of the end whose frames are sealed with this secret.
    fn of(secret: &Secret) -> Self {
        Self(derive(secret, b"finished"))
    }

    /// What makes the tag.
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
    /// The OPEN with this header, up to its tag. For tests, which have no node.
    pub fn open(&self, header: &[u8; OPEN_END]) -> Vec<u8> {
        let mut open = [header, &self.message[..]].concat();
        open.extend(self.finished.tag_key().tag(&open));
        open
    }
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

    /// The first message, which goes with every OPEN of the session that answers none.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// Ends the handshake with an OPEN in answer: the frame from its first byte to its end before
    /// the tag. `aes` as in [`respond`].
    ///
    /// # Errors
    /// See [`Refused`].
    pub fn finish(&mut self, open: &[u8], aes: bool) -> Result<SessionKeys, Refused> {
        let (said, finished) = open.split_last_chunk::<TAG_LEN>().ok_or(Refused::Forged)?;
        let answer = said.get(OPEN_END..).ok_or(Refused::Forged)?;
        let hash = hash_of(&self.state);
        let payload = read(&mut self.state, answer)?;
        let signed = Signed { role: Role::Answerer, hash, ephemeral: ephemeral_of(answer) };
        let proven = self.own.as_ref().map_or(Ok(()), |own| {
            check(own, &signed, &payload).map(|_| ()).map_err(Refused::Certificate)
        });
        let agreed = proven.and_then(|()| self.keys((said, finished), aes));
        if agreed.is_err() {
            self.begin_anew();
        }
        agreed
    }

    /// The keys, if what the peer has said is finished with them.
    fn keys(
        &mut self,
        (said, finished): (&[u8], &[u8; TAG_LEN]),
        aes: bool,
    ) -> Result<SessionKeys, Refused> {
        let (tx, rx) = split(&mut self.state);
        let is_whole = Finished::of(&rx).tag_key().is_tag(said, finished);
        is_whole.then(|| SessionKeys::new(self.key.terms, aes, [tx, rx])).ok_or(Refused::Forged)
    }

    /// Goes back to where the first message has left.
    fn begin_anew(&mut self) {
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

/// Answers the first message, which came under the key `id`, of the session of these names. `aes`
/// if both ends have AES in their processors.
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
    // Fails if the first message holds a public key that makes the secret zero.
    let answer = write(&mut state, &proof).ok_or(Refused::Forged)?;
    let (rx, tx) = split(&mut state);
    let (finished, tag_key) = (Finished::of(&tx), key.tag_key().clone());
    let keys = SessionKeys::new(key.terms, aes, [tx, rx]);
    Ok(Answer { keys, message: answer, finished, tag_key })
}

/// The payload of the first message of the session of these names, which came under the first key
/// of `ring`, unchecked: everybody who has the key can read it, thus anybody where there are
/// certificates. For tests.
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
    let written = then_wipe(|| state.write_message(payload, &mut message));
    written.is_ok_and(|len| len == message.len()).then_some(message)
}

/// The payload of a message. Nothing has happened if it is refused.
pub(super) fn read(state: &mut HandshakeState, message: &[u8]) -> Result<Vec<u8>, Refused> {
    let len = message.len().checked_sub(HANDSHAKE_LEN).filter(|&len| len <= PAYLOAD_MAX);
    let mut payload = vec![0; len.ok_or(Refused::Forged)?];
    let read = then_wipe(|| state.read_message(message, &mut payload));
    read.ok().filter(|&len| len == payload.len()).map(|_| payload).ok_or(Refused::Forged)
}

/// The secrets of both directions that a handshake has come to, that of the opener's frames first.
fn split(state: &mut HandshakeState) -> (Secret, Secret) {
    then_wipe(|| {
        let (mut to, mut back) = state.dangerously_get_raw_split();
        (secret_of(&mut to), secret_of(&mut back))
    })
}

/// The handshake before its first message, and the ephemeral public key of this end.
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
