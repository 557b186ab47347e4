//! The keys of a node: a short list, of which the first opens sessions and each is accepted from
//! peers that open one. The list can be replaced while sessions stand, which have keys of their
//! own.

use std::sync::Arc;

use aws_lc_rs::hmac;
use barewire_driver::mem::Locked;

use super::credentials::{Credentials, PAYLOAD_MAX};
use super::key::{KEY_FRAMES_BITS, Mode, PreSharedKey, Secret, TagKey, then_wipe};
use crate::types::Tenant;
use crate::wire::{BASE_LEN, OpenOp, TAG_LEN, TRAILER_LEN};

/// Most keys of a node. Each costs the receiver of an OPEN the check of a tag.
pub const KEYS_MAX: usize = 4;

/// Length of a message of the handshake without certificates, bytes: an ephemeral public key and
/// the tag of an empty payload.
pub const HANDSHAKE_LEN: usize = 48;

/// The name of a key in the list of a node. One that is taken off the list and put back has another
/// name then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyId(u64);

/// See the module.
#[derive(Clone, Debug)]
pub struct Keyring {
    /// 1 to [`KEYS_MAX`]; also none where each is of a tenant.
    keys: Vec<(KeyId, PreSharedKey)>,
    /// Whether each key is of a tenant, which it names for as long as the node lives.
    tenants: bool,
    /// What this node proves who it is with, and peers are checked by. There is one key then, which
    /// everybody knows.
    credentials: Option<Arc<Credentials>>,
    /// The name of the next key.
    next: u64,
    /// What ephemeral keys are drawn from.
    entropy: Entropy,
}

/// Secrets that nobody can guess, one after the other. Who reads it finds those to come and none
/// that was drawn.
#[derive(Clone)]
struct Entropy {
    root: Secret,
}

fn open_len(message: usize) -> usize {
    BASE_LEN + OpenOp::LEN + message + TAG_LEN + TRAILER_LEN
}

impl std::fmt::Debug for Entropy {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Entropy").finish_non_exhaustive()
    }
}

impl Keyring {
    /// A list of keys. `entropy` are 32 bytes that nobody can guess and that were never used
    /// before: a live domain takes them from the kernel, to where no copy of them is elsewhere.
    ///
    /// `None` if there is no key or more than [`KEYS_MAX`].
    pub fn new(keys: Vec<PreSharedKey>, entropy: impl Into<Locked<[u8; 32]>>) -> Option<Self> {
        let entropy = Entropy { root: entropy.into() };
        let mut ring =
            Self { keys: Vec::new(), tenants: false, credentials: None, next: 0, entropy };
        ring.replace(keys).then_some(ring)
    }

    /// For a node that has no pre-shared key but a certificate, as its peers have. `entropy` as for
    /// [`new`](Self::new).
    pub fn of_certificate(
        credentials: Arc<Credentials>,
        mode: Mode,
        entropy: impl Into<Locked<[u8; 32]>>,
    ) -> Self {
        let ring = Self::of_certificate_with(credentials, mode, KEY_FRAMES_BITS, entropy);
        ring.expect("the number of frames is one that can be")
    }

    /// [`of_certificate`](Self::of_certificate) with another number of frames to a key, as for
    /// [`PreSharedKey::with_key_frames`].
    pub fn of_certificate_with(
        credentials: Arc<Credentials>,
        mode: Mode,
        bits: u32,
        entropy: impl Into<Locked<[u8; 32]>>,
    ) -> Option<Self> {
        let key = PreSharedKey::of_everybody(mode, bits)?;
        let ring = Self::new(vec![key], entropy)?;
        Some(Self { credentials: Some(credentials), ..ring })
    }

    /// Whether peers are known by certificates: tags show nothing then.
    pub fn has_certificate(&self) -> bool {
        self.credentials.is_some()
    }

    /// Makes this the certificate. Open sessions stay. False, and nothing has happened, if there
    /// was none.
    pub fn replace_certificate(&mut self, credentials: Arc<Credentials>) -> bool {
        let is = self.has_certificate();
        if is {
            self.credentials = Some(credentials);
        }
        is
    }

    pub(super) fn credentials(&self) -> Option<&Arc<Credentials>> {
        self.credentials.as_ref()
    }

    /// Longest message of the handshake that this node sends, with the Finished tag of an answer,
    /// bytes.
    pub fn message_and_finished_max(&self) -> usize {
        HANDSHAKE_LEN + TAG_LEN + self.credentials.as_ref().map_or(0, |own| own.payload_max())
    }

    /// [`open_len`](Self::open_len) of a node that has these.
    pub fn open_len_with(credentials: &Credentials) -> usize {
        open_len(HANDSHAKE_LEN + TAG_LEN + credentials.payload_max())
    }

    /// Longest OPEN that this node sends but for padding, bytes, Ethernet header included.
    pub fn open_len(&self) -> usize {
        open_len(self.message_and_finished_max())
    }

    /// Longest message of the handshake that is looked at, with the Finished tag of an answer,
    /// bytes.
    pub fn peer_message_and_finished_max(&self) -> usize {
        HANDSHAKE_LEN + TAG_LEN + if self.has_certificate() { PAYLOAD_MAX } else { 0 }
    }

    /// A list of keys of tenants: there is none yet, each that is [added](Self::add) tells apart
    /// who has it, and which one opens a session is the peer's to say. `entropy` as for
    /// [`new`](Self::new).
    pub fn of_tenants(entropy: impl Into<Locked<[u8; 32]>>) -> Self {
        let entropy = Entropy { root: entropy.into() };
        Self { keys: Vec::new(), tenants: true, credentials: None, next: 1, entropy }
    }

    /// Whether each key is of a tenant.
    pub fn is_of_tenants(&self) -> bool {
        self.tenants
    }

    /// Adds a key of a tenant, and says which tenant that is: the one that it is already, if the
    /// key is listed. `None`, and nothing has happened, if there are [`KEYS_MAX`] keys, or 255 were
    /// added in all.
    pub fn add(&mut self, key: PreSharedKey) -> Option<Tenant> {
        if let Some((known, _)) = self.keys.iter().find(|(_, listed)| listed.is(&key)) {
            return Some(self.tenant_of(*known));
        }
        if self.keys.len() == KEYS_MAX || self.next > u64::from(u8::MAX) {
            return None;
        }
        let id = KeyId(self.next);
        self.next += 1;
        self.keys.push((id, key));
        Some(self.tenant_of(id))
    }

    /// Takes the key of a tenant off the list and overwrites it. The tenant's number is used for no
    /// other.
    pub fn remove(&mut self, tenant: Tenant) {
        self.keys.retain(|(id, _)| id.0 != u64::from(tenant.get()));
    }

    /// The tenants whose keys are listed; [`Tenant::NONE`] alone where there are none.
    pub fn tenants(&self) -> impl Iterator<Item = Tenant> {
        let one = (!self.tenants).then_some(Tenant::NONE);
        let listed = self.keys.iter().filter(|_| self.tenants);
        one.into_iter().chain(listed.map(|(id, _)| self.tenant_of(*id)))
    }

    /// Whose key that of this name is.
    pub fn tenant_of(&self, id: KeyId) -> Tenant {
        if self.tenants { Tenant::of(id.0 as u8) } else { Tenant::NONE }
    }

    /// The name of the key that opens sessions with peers of this tenant, if it is listed.
    pub fn key_for(&self, tenant: Tenant) -> Option<KeyId> {
        let id = match self.tenants {
            true => KeyId(tenant.get().into()),
            false => self.first(),
        };
        self.lists(id).then_some(id)
    }

    /// Makes these the keys, in this order. A key that was listed before keeps its name; one that
    /// no longer is, is overwritten. False, and nothing has happened, if there is no key or more
    /// than [`KEYS_MAX`], keys are of tenants, or there is a certificate.
    pub fn replace(&mut self, keys: Vec<PreSharedKey>) -> bool {
        if self.tenants || self.has_certificate() || !(1..=KEYS_MAX).contains(&keys.len()) {
            return false;
        }
        let mut listed = Vec::with_capacity(keys.len());
        for key in keys {
            let known = self.keys.iter().find(|(_, old)| old.is(&key)).map(|(id, _)| *id);
            let id = known.unwrap_or(KeyId(self.next));
            self.next += u64::from(known.is_none());
            listed.push((id, key));
        }
        self.keys = listed;
        true
    }

    /// How many keys are listed.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// The name of the key that opens sessions, where keys are not of tenants.
    pub fn first(&self) -> KeyId {
        self.keys[0].0
    }

    /// The name of the key under which `tag` is the tag of `frame`, if one is.
    pub fn key_of(&self, frame: &[u8], tag: &[u8]) -> Option<KeyId> {
        self.keys.iter().find(|(_, key)| key.is_tag(frame, tag)).map(|(id, _)| *id)
    }

    /// What makes tags with the first key.
    pub fn tag_key(&self) -> &TagKey {
        self.keys[0].1.tag_key()
    }

    /// What makes tags for peers of this tenant, if its key is listed.
    pub fn tag_key_for(&self, tenant: Tenant) -> Option<&TagKey> {
        Some(self.get(self.key_for(tenant)?)?.tag_key())
    }

    /// Whether this key is listed.
    pub fn lists_key(&self, key: &PreSharedKey) -> bool {
        self.keys.iter().any(|(_, listed)| listed.is(key))
    }

    /// Whether the key of this name is listed.
    pub fn lists(&self, id: KeyId) -> bool {
        self.get(id).is_some()
    }

    /// The key of this name, if it is listed.
    pub(super) fn get(&self, id: KeyId) -> Option<&PreSharedKey> {
        self.keys.iter().find(|(listed, _)| *listed == id).map(|(_, key)| key)
    }

    /// A secret that was never drawn before, and from which nobody finds another. What it was drawn
    /// from is forgotten.
    pub(super) fn draw(&mut self) -> Secret {
        let root = &mut self.entropy.root;
        then_wipe(|| {
            let key = hmac::Key::new(hmac::HMAC_SHA256, &**root);
            let of = |name: &[u8]| {
                let mut secret = Secret::default();
                secret.copy_from_slice(hmac::sign(&key, name).as_ref());
                secret
            };
            let drawn = of(b"drawn");
            *root = of(b"next");
            drawn
        })
    }
}
