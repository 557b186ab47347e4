//! The handshake: NNpsk0 of the Noise framework, revision 34. Who knows the pre-shared key takes
//! part in it; the keys that come of it are of this session alone, and not even who learns the
//! pre-shared key later finds them.

use std::fmt;

use snow::HandshakeState;
use zeroize::Zeroizing;

use super::key::{PreSharedKey, Secret, TagKey, Terms};
use super::keyring::{KeyId, Keyring};
use super::noise::Resolver;
use super::session::SessionKeys;

pub(super) const PATTERN: &str = "Noise_NNpsk0_25519_AESGCM_SHA256";

/// Length of either message, bytes: an ephemeral public key and the tag of an empty payload.
pub const HANDSHAKE_LEN: usize = 48;

/// A message of the handshake.
type Message = [u8; HANDSHAKE_LEN];

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
}

impl SessionNames {
    fn prologue(&self) -> [u8; 42] {
        let mut bytes = [0; 42];
        let parts: [&[u8]; 6] = [
            b"barewire 3",
            &self.opener.to_le_bytes(),
            &self.answerer.to_le_bytes(),
            &self.inc.to_le_bytes(),
            &self.sid.to_le_bytes(),
            &self.epoch.to_le_bytes(),
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
        let (terms, mut state) = (key.terms, begin(key, seed, &names, true));
        let mut message = [0; HANDSHAKE_LEN];
        let written = state.write_message(&[], &mut message);
        assert!(written.is_ok_and(|len| len == HANDSHAKE_LEN), "NNpsk0 begins with a message");
        Some(Self { state, names, message, terms })
    }

    /// The names of the session.
    pub fn names(&self) -> &SessionNames {
        &self.names
    }

    /// The first message, which goes with every OPEN of the session that answers none.
    pub fn message(&self) -> &Message {
        &self.message
    }

    /// Ends the handshake with the answer: `None`, and nothing has happened, if it is not one to
    /// this message by who has the key. `aes` as in [`respond`].
    pub fn finish(&mut self, answer: &Message, aes: bool) -> Option<SessionKeys> {
        self.state.read_message(answer, &mut []).ok()?;
        let (tx, rx) = self.state.dangerously_get_raw_split();
        Some(SessionKeys::new(self.terms, aes, [Zeroizing::new(tx), Zeroizing::new(rx)]))
    }
}

impl fmt::Debug for Initiator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Initiator").field("names", &self.names).finish_non_exhaustive()
    }
}

/// Answers the first message, which came under the key `id`, of the session of these names. `None`
/// if the key is not listed, or the message is none by who has it. `aes` if both ends have AES in
/// their processors.
pub fn respond(
    ring: &mut Keyring,
    id: KeyId,
    names: SessionNames,
    message: &Message,
    aes: bool,
) -> Option<Answer> {
    let seed = ring.draw();
    let key = ring.get(id)?;
    let mut state = begin(key, seed, &names, false);
    state.read_message(message, &mut []).ok()?;
    let mut answer = [0; HANDSHAKE_LEN];
    // Fails if the first message holds a public key that makes the secret zero.
    state.write_message(&[], &mut answer).ok().filter(|&len| len == HANDSHAKE_LEN)?;
    let (rx, tx) = state.dangerously_get_raw_split();
    let keys = SessionKeys::new(key.terms, aes, [Zeroizing::new(tx), Zeroizing::new(rx)]);
    Some(Answer { keys, message: answer, tag_key: key.tag_key().clone() })
}

fn begin(
    key: &PreSharedKey,
    seed: Secret,
    names: &SessionNames,
    opens: bool,
) -> Box<HandshakeState> {
    let resolver = Box::new(Resolver { seed });
    let prologue = names.prologue();
    let pattern = PATTERN.parse().expect("the pattern is one of Noise");
    let builder = snow::Builder::with_resolver(pattern, resolver);
    let builder = builder.prologue(&prologue).and_then(|builder| builder.psk(0, &key.psk));
    let built = builder.and_then(|builder| match opens {
        true => builder.build_initiator(),
        false => builder.build_responder(),
    });
    Box::new(built.expect("the pattern needs a prologue and a key, and no more"))
}
