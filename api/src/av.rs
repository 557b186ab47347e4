//! Address vectors (fi_av(3)): map addresses of endpoints to the `fi_addr_t` that data calls take.

use std::net::IpAddr;
use std::sync::Arc;

use barewire_dataplane::node::{AvId, Node};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::{EpAddr, FI_ADDR_UNSPEC, FiAddr, Tenant};

pub use crate::addr::resolve;
use crate::auth_key::tenant_of;
use crate::errno::{Error, Result};
use crate::info::AuthKey;
pub use crate::info::AvType;
use crate::inner::{Core, DomainRef};
use crate::key;
use crate::names::{AddrRole, Names};

/// `FI_ADDR_NOTAVAIL`: an address that was not inserted, or an unknown sender.
pub const FI_ADDR_NOTAVAIL: FiAddr = FI_ADDR_UNSPEC;

/// Attributes of an address vector (`struct fi_av_attr`).
#[derive(Clone, Copy, Debug, Default)]
pub struct AvAttr {
    /// The kind.
    pub av_type: AvType,
    /// Addresses expected; 0 if not known. The domain makes room for as many peers. The room grows
    /// with further insertions up to [`Settings::peer_max`](crate::settings::Settings::peer_max).
    pub count: usize,
    /// Bits of an `fi_addr_t`, 0 to 16, that name a receive context of a scalable endpoint (see
    /// [`rx_addr`]).
    pub rx_ctx_bits: u32,
    /// `FI_EVENT`, asynchronous insertion: deprecated, refused with `FI_ENOSYS`.
    pub event: bool,
    /// A name, to share the vector with other processes (`FI_SHARED_AV`): refused with
    /// `FI_ENOSYS`.
    pub name: Option<&'static str>,
    /// `FI_AV_USER_ID`: completions report senders by their user id ([`Av::set_user_id`]), and a
    /// sender without one as [`FI_ADDR_NOTAVAIL`].
    pub user_id: bool,
}

pub(crate) struct AvInner {
    pub(crate) dom: DomainRef,
    pub(crate) id: AvId,
}

/// An address vector (`struct fid_av`).
pub struct Av(pub(crate) Arc<AvInner>);

impl Av {
    pub(crate) fn open(dom: &DomainRef, attr: AvAttr) -> Result<Self> {
        if attr.event || attr.name.is_some() {
            return Err(Error::NoSys);
        }
        let id = dom.enter_control()?.node().sessions().av_open(attr.count)?;
        let av = Self(Arc::new(AvInner { dom: dom.clone(), id }));
        let mut core = dom.enter_control()?;
        core.node().avs.name_contexts(id, attr.rx_ctx_bits)?;
        if attr.user_id {
            core.node().avs.name_by_user_id(id)?;
        }
        drop(core);
        Ok(av)
    }

    /// Inserts `addrs` and stores their indexes in `fi_addrs`, which has the same length, or is
    /// empty if the indexes are not needed. Returns the number of inserted addresses. A failed slot
    /// holds [`FI_ADDR_NOTAVAIL`].
    ///
    /// The index of a removed address is reused. An address that is inserted twice may get the same
    /// index or two; both are valid.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `fi_addrs` has another length. Nothing was inserted.
    ///
    /// Source: fi_av(3), "fi_av_insert".
    #[doc(alias = "fi_av_insert")]
    pub fn insert(&self, addrs: &[EpAddr], fi_addrs: &mut [FiAddr]) -> Result<usize> {
        let each = addrs.iter().map(|a| Ok((*a, Tenant::NONE)));
        self.insert_each(each, addrs.len(), (fi_addrs, None), None)
    }

    /// As [`insert_bytes`](Self::insert_bytes), each address under the key whose handle is in its
    /// slot of `fi_addrs` ([`insert_auth_key`](Self::insert_auth_key)). Sessions with the address
    /// use that key. The same address under two keys has two indexes.
    ///
    /// # Errors
    /// As there. A slot without a valid handle fails like an invalid address.
    #[doc(alias = "FI_AUTH_KEY")]
    pub fn insert_under(
        &self,
        addrs: &[u8],
        fi_addrs: &mut [FiAddr],
        errors: Option<&mut [i32]>,
    ) -> Result<usize> {
        let (addrs, rest) = addrs.as_chunks::<{ EpAddr::LEN }>();
        if !rest.is_empty() || fi_addrs.len() != addrs.len() {
            return Err(Error::Invalid("addr: not as many addresses as key handles"));
        }
        let keys = fi_addrs.to_vec();
        let each = addrs.iter().zip(keys);
        let each = each.map(|(addr, key)| Ok((EpAddr::from_bytes(addr)?, tenant_of(key)?)));
        self.insert_each(each, addrs.len(), (fi_addrs, None), errors)
    }

    /// Whether an endpoint is bound to the vector.
    pub(crate) fn is_bound(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// As [`insert`](Self::insert), from 16-byte native addresses back to back, and stores the
    /// error code of each address in `errors` (`FI_SYNC_ERR`), if given: same length, 0 for
    /// success.
    ///
    /// # Errors
    /// As [`insert`](Self::insert); also [`Error::Invalid`] if the length of `addrs` is no multiple
    /// of 16.
    pub fn insert_bytes(
        &self,
        addrs: &[u8],
        fi_addrs: &mut [FiAddr],
        errors: Option<&mut [i32]>,
    ) -> Result<usize> {
        let addrs = native(addrs)?;
        let each = addrs.iter().map(|addr| Ok((EpAddr::from_bytes(addr)?, Tenant::NONE)));
        self.insert_each(each, addrs.len(), (fi_addrs, None), errors)
    }

    /// As [`insert_bytes`](Self::insert_bytes) with user ids (`FI_AV_USER_ID` in the flags of an
    /// insertion): completions report each sender by the number that its slot of `fi_addrs` holds
    /// at the call, until the address is removed.
    ///
    /// # Errors
    /// As there; also [`Error::Invalid`]: `fi_addrs` is empty, or the vector was opened with
    /// [`AvAttr::user_id`].
    pub fn insert_named(
        &self,
        addrs: &[u8],
        fi_addrs: &mut [FiAddr],
        errors: Option<&mut [i32]>,
    ) -> Result<usize> {
        let addrs = native(addrs)?;
        let user_ids = self.user_ids_of(fi_addrs, addrs.len())?;
        let each = addrs.iter().map(|addr| Ok((EpAddr::from_bytes(addr)?, Tenant::NONE)));
        self.insert_each(each, addrs.len(), (fi_addrs, Some(&user_ids)), errors)
    }

    /// The user ids that were passed for `count` addresses.
    fn user_ids_of(&self, passed: &[FiAddr], count: usize) -> Result<Vec<FiAddr>> {
        if passed.len() != count {
            return Err(Error::Invalid("fi_addr: not as many names as addresses"));
        }
        match self.0.dom.enter_control()?.node().avs.is_by_user_id(self.0.id)? {
            true => Err(Error::Invalid("the vector gets its user ids by fi_av_set_user_id")),
            false => Ok(passed.to_vec()),
        }
    }

    fn insert_each(
        &self,
        addrs: impl Iterator<Item = Result<(EpAddr, Tenant)>>,
        count: usize,
        (fi_addrs, user_ids): (&mut [FiAddr], Option<&[FiAddr]>),
        mut errors: Option<&mut [i32]>,
    ) -> Result<usize> {
        let wrong = |len: usize| len != 0 && len != count;
        if wrong(fi_addrs.len()) || errors.as_ref().is_some_and(|e| e.len() != count) {
            return Err(Error::Invalid("fi_addr: not as many entries as addresses"));
        }
        let mut core = self.0.dom.enter_control()?;
        let (mut inserted, mut refused) = (0, None);
        for (i, addr) in addrs.enumerate() {
            let put = |(addr, of)| core.engine.av_insert_of(self.0.id, addr, of);
            let at = addr.and_then(put);
            if let (Ok(at), Some(ids)) = (at, user_ids) {
                core.node().objects().av_set_user_id(self.0.id, at, ids[i])?;
            }
            inserted += usize::from(at.is_ok());
            if let Some(slot) = fi_addrs.get_mut(i) {
                *slot = at.unwrap_or(FI_ADDR_NOTAVAIL);
            }
            if let Some(slot) = errors.as_mut().map(|e| &mut e[i]) {
                *slot = at.map_or_else(|e| e.fi_errno(), |_| 0);
            }
            refused = refused.or(at.err().map(|e| (i, e)));
        }
        // The new address of a restarted peer ends operations to its old incarnation.
        core.posted(&self.0.dom);
        if let Some((first, why)) = refused {
            warn_not_inserted(
                core.node().settings().peer_limit,
                [count - inserted, count, first],
                why,
            );
        }
        Ok(inserted)
    }

    /// Inserts the address that `node` and `service` name (see [`Names::find`]) and returns its
    /// index.
    ///
    /// # Errors
    /// [`Error::NoData`]: no such host or service was found; the log has the reason.
    /// [`Error::NoMem`]: the table is full.
    #[doc(alias = "fi_av_insertsvc")]
    pub fn insertsvc(&self, node: &str, service: &str) -> Result<FiAddr> {
        let [node, service] = [node, service].map(|text| Some(text).filter(|t| !t.is_empty()));
        let resolver = &**self.0.dom.arc();
        let addr = self.names().find_by(node, service, AddrRole::Peer, false, resolver)?;
        let addr = addr.ok_or(Error::Invalid("service: a peer has a number"))?;
        let mut core = self.0.dom.enter_control()?;
        let at = core.engine.av_insert(self.0.id, addr);
        core.posted(&self.0.dom);
        at.inspect_err(|&why| warn_not_inserted(core.node().settings().peer_limit, [1, 1, 0], why))
    }

    /// Inserts `node_count` times `service_count` addresses, host by host: `node` and its
    /// successors by number (of a MAC, an IP address, or the last digits of a name), each with
    /// `service` and its successors. Returns the number of inserted addresses.
    ///
    /// # Errors
    /// [`Error::NoData`]: a host or service was not found; the log names it. [`Error::Invalid`]:
    /// `fi_addrs` has another length. Nothing was inserted.
    #[doc(alias = "fi_av_insertsym")]
    pub fn insertsym(
        &self,
        node: &str,
        node_count: usize,
        service: &str,
        service_count: usize,
        fi_addrs: &mut [FiAddr],
    ) -> Result<usize> {
        let all = self.symmetric((node, node_count), (service, service_count))?;
        let each = all.iter().map(|addr| Ok((*addr, Tenant::NONE)));
        self.insert_each(each, all.len(), (fi_addrs, None), None)
    }

    /// As [`insertsym`](Self::insertsym), with `errors` and, if `named`, with user ids as
    /// [`insert_named`](Self::insert_named) takes them.
    ///
    /// # Errors
    /// As for both.
    pub fn insertsym_errors(
        &self,
        node: (&str, usize),
        service: (&str, usize),
        fi_addrs: &mut [FiAddr],
        named: bool,
        errors: Option<&mut [i32]>,
    ) -> Result<usize> {
        let user_ids = match named {
            true => Some(self.user_ids_of(fi_addrs, fi_addrs.len())?),
            false => None,
        };
        let all = self.symmetric(node, service)?;
        let each = all.iter().map(|addr| Ok((*addr, Tenant::NONE)));
        self.insert_each(each, all.len(), (fi_addrs, user_ids.as_deref()), errors)
    }

    fn symmetric(
        &self,
        (node, node_count): (&str, usize),
        (service, service_count): (&str, usize),
    ) -> Result<Vec<EpAddr>> {
        let service = Some(service).filter(|text| !text.is_empty());
        let resolver = &**self.0.dom.arc();
        Ok(self.names().symmetric(node, service, node_count, service_count, resolver)?)
    }

    /// The addresses of services at hosts, as [`insertsvc`](Self::insertsvc) finds them. Queries
    /// are sent at once, so all of them take no longer than one.
    pub fn find_hosts(&self, hosts: &[(IpAddr, u16)]) -> Vec<Result<EpAddr>> {
        self.0.dom.find_hosts(hosts)
    }

    /// How the domain's port resolves host and service.
    fn names(&self) -> Names {
        Names::of(&self.0.dom.caps.name)
    }

    /// Removes addresses. Operations in flight to them continue.
    ///
    /// # Errors
    /// [`Error::Invalid`]: an index has no address. The indexes before it are removed, those after
    /// it are not.
    #[doc(alias = "fi_av_remove")]
    pub fn remove(&self, fi_addrs: &[FiAddr]) -> Result<()> {
        let mut core = self.0.dom.enter_control()?;
        fi_addrs.iter().try_for_each(|&a| core.node().objects().av_remove(self.0.id, a))
    }

    /// The address behind an index.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the index has no address.
    #[doc(alias = "fi_av_lookup")]
    pub fn lookup(&self, fi_addr: FiAddr) -> Result<EpAddr> {
        self.0.dom.enter_control()?.node().objects().av_lookup(self.0.id, fi_addr)
    }

    /// Sets the user id by which completions report the sender `fi_addr`: any number, until the
    /// address is removed. Data calls still take `fi_addr`. If an endpoint was inserted several
    /// times, its newest index counts.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the index has no address, or the vector was opened without
    /// [`AvAttr::user_id`]. Nothing changed.
    ///
    /// Source: fi_av(3), "fi_av_set_user_id".
    #[doc(alias = "fi_av_set_user_id")]
    pub fn set_user_id(&self, fi_addr: FiAddr, user_id: FiAddr) -> Result<()> {
        let mut core = self.0.dom.enter_control()?;
        check_by_user_id(&mut core, self.0.id)?;
        core.node().objects().av_set_user_id(self.0.id, fi_addr, user_id)
    }

    /// As [`set_user_id`](Self::set_user_id), for the handle of a key: an `FI_EADDRNOTAVAIL` entry
    /// reports an unknown sender by it.
    ///
    /// # Errors
    /// As there; also [`Error::Invalid`]: `handle` is not the handle of a key of the domain.
    pub fn set_key_user_id(&self, handle: FiAddr, user_id: FiAddr) -> Result<()> {
        let tenant = tenant_of(handle)?;
        let mut core = self.0.dom.enter_control()?;
        check_by_user_id(&mut core, self.0.id)?;
        core.auth_keys.of_tenant(tenant)?;
        core.node().avs.set_tenant_user_id(self.0.id, tenant, user_id)
    }

    /// The text form of an address, as [`resolve`] and `FI_ADDR_STR` take it.
    #[doc(alias = "fi_av_straddr")]
    pub fn straddr(&self, addr: &EpAddr) -> String {
        addr.to_string()
    }

    /// Closes the vector.
    ///
    /// # Errors
    /// [`Error::Busy`]: an endpoint is bound to the vector, which is given back.
    #[doc(alias = "fi_close")]
    pub fn close(self) -> std::result::Result<(), (Error, Self)> {
        if self.is_bound() { Err((Error::Busy, self)) } else { Ok(()) }
    }
}

impl Av {
    /// Adds a key of 16 to 1,024 random bytes and returns its handle, an `fi_addr_t` that stands
    /// for all peers with the key: [`insert_under`](Self::insert_under) and receives with
    /// [`OpFlags::AUTH_KEY`](crate::flags::OpFlags::AUTH_KEY) take it. From now on a peer with the
    /// key can open sessions with any endpoint of the domain. The same bytes give the same handle,
    /// in every vector of the domain. The bytes are copied, and overwritten when the domain closes.
    ///
    /// # Errors
    /// Nothing was added:
    /// - [`Error::Invalid`]: the key is too short or too long.
    /// - [`Error::OpNotSupp`]: the domain was not opened with `av_auth_key`.
    /// - [`Error::NoMem`]: the domain has 4 keys, or has had 255 keys since it was opened.
    ///
    /// Source: fi_av(3), "fi_av_insert_auth_key".
    #[doc(alias = "fi_av_insert_auth_key")]
    pub fn insert_auth_key(&self, key: &[u8]) -> Result<FiAddr> {
        let made = key::keys_from_bytes(&[key], self.0.dom.settings.seal)?;
        let mut core = self.0.dom.enter_control()?;
        let mut tenant = Err(Error::NoMem);
        for key in made {
            tenant = core.node().openings.add_tenant(key);
        }
        let tenant = tenant?;
        core.auth_keys.add(tenant, key, self.0.id);
        Ok(tenant.handle())
    }

    /// The key of a handle, or the key that an address was inserted under.
    ///
    /// # Errors
    /// [`Error::Invalid`]: `fi_addr` is neither.
    #[doc(alias = "fi_av_lookup_auth_key")]
    pub fn lookup_auth_key(&self, fi_addr: FiAddr) -> Result<AuthKey> {
        let mut core = self.0.dom.enter_control()?;
        let tenant = match Tenant::of_handle(fi_addr) {
            Some(tenant) => tenant,
            None => core.node().objects().av_tenant(self.0.id, fi_addr)?,
        };
        core.auth_keys.of_tenant(tenant).cloned()
    }

    /// Removes the keys of these handles from the vector, as closing it does. A key that is in no
    /// other vector of the domain is overwritten, and its sessions end. Handles are not reused.
    ///
    /// # Errors
    /// The error of the first handle that was not removed. [`Error::Invalid`]: it is not the handle
    /// of a key of the vector. [`Error::Busy`]: an endpoint is bound to the vector; or the vector
    /// is the last with the key, and a receive, or an address that was not removed, uses the key.
    pub fn remove_auth_keys(&self, handles: &[FiAddr]) -> Result<()> {
        let mut core = self.0.dom.enter_control()?;
        for &handle in handles {
            let tenant = tenant_of(handle)?;
            if self.is_bound() {
                return Err(Error::Busy);
            }
            drop_key(&mut core, tenant, self.0.id)?;
        }
        Ok(())
    }
}

/// Native addresses, back to back.
fn native(addrs: &[u8]) -> Result<&[[u8; EpAddr::LEN]]> {
    match addrs.as_chunks() {
        (addrs, []) => Ok(addrs),
        _ => Err(Error::Invalid("addr: not a multiple of 16 bytes")),
    }
}

fn check_by_user_id(core: &mut Core, av: AvId) -> Result<()> {
    match core.node().avs.is_by_user_id(av)? {
        true => Ok(()),
        false => Err(Error::Invalid("the vector was opened without FI_AV_USER_ID")),
    }
}

/// Removes the key of a tenant from a vector, and from the domain if no other vector has it.
fn drop_key(core: &mut Core, tenant: Tenant, av: AvId) -> Result<()> {
    let key = core.auth_keys.of_tenant(tenant)?.clone();
    if core.auth_keys.remove_from_av(tenant, av)? {
        if let Err(e) = core.node().sessions().remove_tenant(Engine::now(), tenant) {
            core.auth_keys.add(tenant, &key, av);
            return Err(e);
        }
        core.auth_keys.remove(tenant);
    }
    Ok(())
}

/// Warns that `missing` of `count` addresses were not inserted, with the index of the first, the
/// reason and the remedy.
fn warn_not_inserted(peer_limit: usize, [missing, count, first]: [usize; 3], why: Error) {
    let mend = match why {
        Error::NoMem => match peer_limit {
            Node::PEER_MAX => "the fabric has no more, or memory has not".to_owned(),
            n => format!("raise or unset BAREWIRE_PEER_MAX={n}"),
        },
        Error::Invalid(why) if why.contains("key") => {
            "insert it with FI_AUTH_KEY and what fi_av_insert_auth_key gave".to_owned()
        }
        _ => "insert what fi_getname gave at the peer, unchanged".to_owned(),
    };
    tracing::warn!("{missing} of {count} addresses not inserted, {first} first: {why}; {mend}");
}

impl Drop for AvInner {
    fn drop(&mut self) {
        let Ok(mut core) = self.dom.lock.enter_to_close() else { return };
        if let Err(e) = core.node().objects().av_close(self.id) {
            tracing::error!("closing an address vector: {e}");
        }
        for tenant in core.auth_keys.of_av(self.id) {
            if let Err(e) = drop_key(&mut core, tenant, self.id) {
                tracing::warn!("a key of an address vector that was closed stays: {e}");
            }
        }
    }
}

/// The address of receive context `rx_index` of the scalable endpoint `fi_addr`, in a vector opened
/// with the same [`AvAttr::rx_ctx_bits`]. Data calls take it as a destination; as the source of a
/// receive it stands for the scalable endpoint.
#[doc(alias = "fi_rx_addr")]
pub const fn rx_addr(fi_addr: FiAddr, rx_index: usize, rx_ctx_bits: u32) -> FiAddr {
    match rx_ctx_bits {
        0 => fi_addr,
        bits => fi_addr | (rx_index as FiAddr) << (FiAddr::BITS - bits),
    }
}
