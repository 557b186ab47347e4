//! Sealed frames: authenticated, and encrypted, under keys that the two ends of a session negotiate
//! in its OPENs (`docs/wire.md`, "Sealed frames"). The threat model is in `docs/security.md`.
//!
//! - [`PreSharedKey`] is the key that an application gives a domain: every holder may open
//!   sessions. A [`Keyring`] is the list of a node's current keys.
//! - [`Initiator`] and [`respond`] are the handshake, NNpsk0 of the Noise framework: two messages,
//!   one in an OPEN and one in its answer, which yield a [`SessionKeys`].
//! - [`Credentials`] are a certificate, its key, and the peers that a node accepts: in place of a
//!   pre-shared key, the messages of the handshake carry the certificates and a signature each.
//! - [`SessionKeys`] seals the frames of a session and opens those of its peer. Each direction has
//!   its own chain of keys (`chain.rs`) and counter; a replayed frame is not opened (`replay.rs`).
//! - [`SessionSecret`] is an entry of the key log for recorded frames ([`RecordReader`]); a node
//!   keeps such secrets for its owner only if configured to.
//!
//! Secrets are in memory that is neither swapped nor dumped
//! ([`Locked`](barewire_driver::mem::Locked)), are overwritten when they are dropped, and no
//! `Debug` shows one. The key schedules, which the cipher library allocates itself, are elsewhere;
//! the library overwrites them. Nothing here allocates memory once a session has its keys.

mod chain;
mod credentials;
mod ending;
mod handshake;
mod identity;
mod key;
mod keyring;
mod log;
mod noise;
mod path;
mod private_key;
mod proof;
mod replay;
mod session;

pub use credentials::{BadCredentials, Credentials, WallClock};
pub(crate) use ending::Ending;
pub use handshake::{
    Answer, Finished, Initiator, Message, Refused, SessionNames, read_answer, read_first, respond,
};
pub use identity::{Identity, PeerId};
pub use key::{KEY_MAX, KEY_MIN, Mode, PreSharedKey, TagKey};
pub use keyring::{HANDSHAKE_LEN, KEYS_MAX, KeyId, Keyring};
pub(crate) use log::UnboundSecret;
pub use log::{BadLine, Read, RecordReader, SessionSecret, lines};
pub use proof::{BadCert, CertFault, examine, sample};
pub use session::{OpenError, SessionKeys, has_aes};

#[cfg(test)]
pub(crate) mod test_certs;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod tests_certificates;
#[cfg(test)]
mod tests_vectors;
