//! The keys of a node: a short list. The first key opens sessions, and each key is accepted from
//! peers that open one. The list can be replaced while sessions are open, since sessions have keys
//! of their own.

use std::sync::Arc;

use aws_lc_rs::hmac;
use barewire_driver::mem::Locked;

use super::credentials::{Credentials, PAYLOAD_MAX};
use super::key::{KEY_FRAMES_BITS, Mode, PreSharedKey, Secret, TagKey, then_wipe};
use crate::types::Tenant;
use crate::wire::{BASE_LEN, OpenOp, TAG_LEN, TRAILER_LEN};

/// Most keys of a node. For each key the receiver of an OPEN verifies a tag.
pub const KEYS_MAX: usize = 4;

/// Length of a handshake message without certificates, bytes: an ephemeral public key and the tag
/// of an empty payload.
pub const HANDSHAKE_LEN: usize = 48;

/// Name of a key in a node's list. A key that is removed and added again gets another name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KeyId(u64);

/// The list of a node's keys, or the certificate in place of a list.
#[derive(Clone, Debug)]
pub struct Keyring {
    /// 1 to [`KEYS_MAX`] keys; none is allowed where each is of a tenant.
    keys: Vec<(KeyId, PreSharedKey)>,
    /// Whether each key is of a tenant; the key's name is then the tenant's, for the lifetime of
    /// the node.
    tenants: bool,
    /// The node's certificate, and what its peers' are verified with. The list then has one key,
    /// which is public.
    credentials: Option<Arc<Credentials>>,
    /// Name of the next key.
    next: u64,
    /// Source of ephemeral keys.
    entropy: Entropy,
}

/// A generator of secrets. Its state reveals later secrets but no earlier ones.
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
    /// A list of keys. `entropy` are 32 random bytes that were never used before: a domain takes
    /// them from the kernel, into memory without other copies.
    ///
    /// `None` if there is no key or more than [`KEYS_MAX`].
    pub fn new(keys: Vec<PreSharedKey>, entropy: impl Into<Locked<[u8; 32]>>) -> Option<Self> {
        let entropy = Entropy { root: entropy.into() };
        let mut ring =
            Self { keys: Vec::new(), tenants: false, credentials: None, next: 0, entropy };
        ring.replace(keys).then_some(ring)
    }

    /// A keyring with a certificate in place of pre-shared keys; all peers have certificates as
    /// well. `entropy` as for [`new`](Self::new).
    pub fn of_certificate(
        credentials: Arc<Credentials>,
        mode: Mode,
        entropy: impl Into<Locked<[u8; 32]>>,
    ) -> Self {
        let ring = Self::of_certificate_with(credentials, mode, KEY_FRAMES_BITS, entropy);
        ring.expect("the number of frames is one that can be")
    }

    /// [`of_certificate`](Self::of_certificate) with another number of frames per key, as in
    /// [`PreSharedKey::with_key_frames`].
    pub fn of_certificate_with(
        credentials: Arc<Credentials>,
        mode: Mode,
        bits: u32,
        entropy: impl Into<Locked<[u8; 32]>>,
    ) -> Option<Self> {
        let key = PreSharedKey::public(mode, bits)?;
        let ring = Self::new(vec![key], entropy)?;
        Some(Self { credentials: Some(credentials), ..ring })
    }

    /// Whether peers are authenticated by certificates; tags prove nothing then.
    pub fn has_certificate(&self) -> bool {
        self.credentials.is_some()
    }

    /// Replaces the certificate. Open sessions continue. False, without side effect, if there was
    /// none.
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

    /// Longest handshake message of this node, with the Finished tag of an answer, bytes.
    pub fn message_and_finished_max(&self) -> usize {
        HANDSHAKE_LEN + TAG_LEN + self.credentials.as_ref().map_or(0, |own| own.payload_max())
    }

    /// [`open_len`](Self::open_len) of a node with these credentials.
    pub fn open_len_with(credentials: &Credentials) -> usize {
        open_len(HANDSHAKE_LEN + TAG_LEN + credentials.payload_max())
    }

    /// Longest OPEN of this node without padding, bytes, Ethernet header included.
    pub fn open_len(&self) -> usize {
        open_len(self.message_and_finished_max())
    }

    /// Longest accepted handshake message of a peer, with the Finished tag of an answer, bytes.
    pub fn peer_message_and_finished_max(&self) -> usize {
        HANDSHAKE_LEN + TAG_LEN + if self.has_certificate() { PAYLOAD_MAX } else { 0 }
    }

    /// An empty list of tenants' keys. Each key that is [added](Self::add) identifies its holders
    /// as a tenant, and peers choose the key that opens a session. `entropy` as for
    /// [`new`](Self::new).
    pub fn of_tenants(entropy: impl Into<Locked<[u8; 32]>>) -> Self {
        let entropy = Entropy { root: entropy.into() };
        Self { keys: Vec::new(), tenants: true, credentials: None, next: 1, entropy }
    }

    /// Whether each key is of a tenant.
    pub fn is_of_tenants(&self) -> bool {
        self.tenants
    }

    /// Adds the key of a tenant and returns the tenant: the existing one if the key is listed.
    /// `None`, without side effect, if there are [`KEYS_MAX`] keys, or 255 were added in all.
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

    /// Removes and overwrites the key of a tenant. The tenant's number is not reused.
    pub fn remove(&mut self, tenant: Tenant) {
        self.keys.retain(|(id, _)| id.0 != u64::from(tenant.get()));
    }

    /// The tenants whose keys are listed; [`Tenant::NONE`] alone where there are none.
    pub fn tenants(&self) -> impl Iterator<Item = Tenant> {
        let one = (!self.tenants).then_some(Tenant::NONE);
        let listed = self.keys.iter().filter(|_| self.tenants);
        one.into_iter().chain(listed.map(|(id, _)| self.tenant_of(*id)))
    }

    /// The tenant of the key of this name.
    pub fn tenant_of(&self, id: KeyId) -> Tenant {
        if self.tenants { Tenant::of(id.0 as u8) } else { Tenant::NONE }
    }

    /// Name of the key that opens sessions with peers of this tenant, if it is listed.
    pub fn key_for(&self, tenant: Tenant) -> Option<KeyId> {
        let id = match self.tenants {
            true => KeyId(tenant.get().into()),
            false => self.first(),
        };
        self.lists(id).then_some(id)
    }

    /// Replaces the list by `keys`, in this order. A key that was listed before keeps its name; one
    /// that is no longer listed is overwritten. False, without side effect, if there is no key or
    /// more than [`KEYS_MAX`], if keys are of tenants, or if there is a certificate.
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

    /// Number of keys.
    #[expect(clippy::len_without_is_empty, reason = "nobody asks")]
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Name of the key that opens sessions, where keys are not of tenants.
    pub fn first(&self) -> KeyId {
        self.keys[0].0
    }

    /// Name of the key under which `tag` is the tag of `frame`, if there is one.
    pub fn key_of(&self, frame: &[u8], tag: &[u8]) -> Option<KeyId> {
        self.keys.iter().find(|(_, key)| key.is_tag(frame, tag)).map(|(id, _)| *id)
    }

    /// The tag key of the first key.
    pub fn tag_key(&self) -> &TagKey {
        self.keys[0].1.tag_key()
    }

    /// The tag key for peers of this tenant, if its key is listed.
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

    /// A new secret, from which no other can be derived. The state that it was derived from is
    /// overwritten.
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
