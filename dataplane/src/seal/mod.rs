//! Sealed frames: authenticated, and encrypted, under keys that the two ends of a session agree on
//! in its OPENs (`docs/wire.md`, "Sealed frames"). What it protects from whom, and what it does
//! not, is in `docs/security.md`.
//!
//! - [`PreSharedKey`] is what an application gives a domain: who has it may open sessions. A
//!   [`Keyring`] is the list of those that a node has at a time.
//! - [`Initiator`] and [`respond`] are the handshake, NNpsk0 of the Noise framework: two messages,
//!   one in an OPEN and one in its answer, and what comes of them is a [`SessionKeys`].
//! - [`Credentials`] are a certificate, its key, and whom a node talks to: in place of a pre-shared
//!   key, the messages of the handshake carry the certificates and a signature each.
//! - A [`SessionKeys`] seals the frames of a session and opens those of its peer. Each direction
//!   has its own chain of keys (`chain.rs`) and counter; a frame that was opened once is not opened
//!   again (`replay.rs`).
//! - [`SessionSecret`] is what somebody needs who may read what was recorded ([`RecordReader`]); a
//!   node keeps them for its owner only if told so.
//!
//! Secrets lie in memory that is neither swapped nor dumped
//! ([`Locked`](barewire_driver::mem::Locked)), are overwritten when they are dropped, and no
//! `Debug` shows one. What the cipher library allocates itself, the key schedules, lies elsewhere;
//! it overwrites that. Nothing here asks the system for memory once a session has its keys.

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
pub(crate) use log::Unnamed;
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
