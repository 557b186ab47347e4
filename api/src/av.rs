//! Address vectors: from addresses that travel between processes to the numbers that data calls
//! take.

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

/// `FI_ADDR_NOTAVAIL`: an address that could not be inserted, or a sender that is not known.
pub const FI_ADDR_NOTAVAIL: FiAddr = FI_ADDR_UNSPEC;

/// What an address vector is made with (`struct fi_av_attr`).
#[derive(Clone, Copy, Debug, Default)]
pub struct AvAttr {
    /// The kind.
    pub av_type: AvType,
    /// Addresses expected; 0 if not known. The domain makes room for as many peers; it makes more
    /// when more are inserted, up to [`Settings::peer_max`](crate::settings::Settings::peer_max).
    pub count: usize,
    /// Bits of an `fi_addr_t`, 0 to 16, that name a receive context of a scalable endpoint (see
    /// [`rx_addr`]).
    pub rx_ctx_bits: u32,
    /// `FI_EVENT`, asynchronous insertion: deprecated, refused with `FI_ENOSYS`.
    pub event: bool,
    /// A name, to share the vector with other processes (`FI_SHARED_AV`): refused with
    /// `FI_ENOSYS`.
    pub name: Option<&'static str>,
    /// `FI_AV_USER_ID`: completions call senders by what [`Av::set_user_id`] says, and one of whom
    /// it says nothing [`FI_ADDR_NOTAVAIL`].
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

    /// Inserts `addrs` and stores their indexes in `fi_addrs`, which is as long, or empty if the
    /// indexes are not wanted. Returns how many were inserted; a failed slot holds
    /// [`FI_ADDR_NOTAVAIL`].
    ///
    /// An index whose address was removed is used again. The same address twice gives the same or
    /// another index, and both work.
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

    /// As [`insert_bytes`](Self::insert_bytes), each address under the key whose handle stands at
    /// its place of `fi_addrs` ([`insert_auth_key`](Self::insert_auth_key)): sessions with it are
    /// under that key, and the same address under two keys has two indexes.
    ///
    /// # Errors
    /// As there. What stands at a place that is no handle fails in its place.
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

    /// Whether an endpoint is bound to it.
    pub(crate) fn is_bound(&self) -> bool {
        Arc::strong_count(&self.0) > 1
    }

    /// As [`insert`](Self::insert), from 16-byte native addresses back to back, and with the
    /// reason of every failure in `errors` (`FI_SYNC_ERR`) if that is given: as long, 0 for
    /// success.
    ///
    /// # Errors
    /// As [`insert`](Self::insert); also if `addrs` is no multiple of 16 bytes.
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

    /// As [`insert_bytes`](Self::insert_bytes); completions call each of the senders by the number
    /// that stands at its place of `fi_addrs` when this is called (`FI_AV_USER_ID` with an
    /// insertion), until it is removed.
    ///
    /// # Errors
    /// As there; also [`Error::Invalid`]: no places, or the vector was opened with
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

    /// The names that were passed for `count` addresses.
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
        // A restarted peer's new address ends what was under way to it before.
        core.posted(&self.0.dom);
        if let Some((first, why)) = refused {
            tell_refused(core.node().settings().peer_limit, [count - inserted, count, first], why);
        }
        Ok(inserted)
    }

    /// Inserts the address that `node` and `service` name (see [`Names::find`]) and returns its
    /// index.
    ///
    /// # Errors
    /// [`Error::NoData`]: they name nobody, and the log says who was asked. [`Error::NoMem`]: the
    /// table is full.
    #[doc(alias = "fi_av_insertsvc")]
    pub fn insertsvc(&self, node: &str, service: &str) -> Result<FiAddr> {
        let [node, service] = [node, service].map(|text| Some(text).filter(|t| !t.is_empty()));
        let resolver = &**self.0.dom.arc();
        let addr = self.names().find_by(node, service, AddrRole::Peer, false, resolver)?;
        let addr = addr.ok_or(Error::Invalid("service: a peer has a number"))?;
        let mut core = self.0.dom.enter_control()?;
        let at = core.engine.av_insert(self.0.id, addr);
        core.posted(&self.0.dom);
        at.inspect_err(|&why| tell_refused(core.node().settings().peer_limit, [1, 1, 0], why))
    }

    /// Inserts `node_count` times `service_count` addresses, host by host: `node` and those that
    /// follow it by number (a MAC, an IPv4 address, or the last digits of a name), each with
    /// `service` and those that follow it. Returns how many were inserted.
    ///
    /// # Errors
    /// [`Error::NoData`]: one of them is nobody's, and the log says which. [`Error::Invalid`]:
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

    /// As [`insertsym`](Self::insertsym), and if `named` with the names of
    /// [`insert_named`](Self::insert_named). `errors` is as there.
    ///
    /// # Errors
    /// As of both.
    pub fn insertsym_told(
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

    /// The addresses of services at hosts, as [`insertsvc`](Self::insertsvc) finds them; those that
    /// have to be asked for are asked for at once, so that all of it takes no longer than one.
    pub fn find_hosts(&self, hosts: &[(IpAddr, u16)]) -> Vec<Result<EpAddr>> {
        self.0.dom.find_hosts(hosts)
    }

    /// What host and service mean on the domain's port.
    fn names(&self) -> Names {
        Names::of(&self.0.dom.caps.name)
    }

    /// Removes addresses. Operations in flight to them go on.
    ///
    /// # Errors
    /// [`Error::Invalid`]: one is not set. Those before it are removed, those after it are not.
    #[doc(alias = "fi_av_remove")]
    pub fn remove(&self, fi_addrs: &[FiAddr]) -> Result<()> {
        let mut core = self.0.dom.enter_control()?;
        fi_addrs.iter().try_for_each(|&a| core.node().objects().av_remove(self.0.id, a))
    }

    /// The address behind an index.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the index is not set.
    #[doc(alias = "fi_av_lookup")]
    pub fn lookup(&self, fi_addr: FiAddr) -> Result<EpAddr> {
        self.0.dom.enter_control()?.node().av_lookup(self.0.id, fi_addr)
    }

    /// Lets completions call the sender behind `fi_addr` by `user_id`, any number, until the
    /// address is removed. Data calls take `fi_addr` as before. Of an endpoint that was inserted
    /// several times the newest address counts.
    ///
    /// # Errors
    /// And nothing changed: [`Error::Invalid`]: the index is not set, or the vector was opened
    /// without [`AvAttr::user_id`].
    ///
    /// Source: fi_av(3), "fi_av_set_user_id".
    #[doc(alias = "fi_av_set_user_id")]
    pub fn set_user_id(&self, fi_addr: FiAddr, user_id: FiAddr) -> Result<()> {
        let mut core = self.0.dom.enter_control()?;
        check_by_user_id(&mut core, self.0.id)?;
        core.node().objects().av_set_user_id(self.0.id, fi_addr, user_id)
    }

    /// As [`set_user_id`](Self::set_user_id), of the handle of a key, as which `FI_EADDRNOTAVAIL`
    /// tells a stranger's message.
    ///
    /// # Errors
    /// As there; also [`Error::Invalid`]: not the handle of a key of the domain.
    pub fn set_key_user_id(&self, handle: FiAddr, user_id: FiAddr) -> Result<()> {
        let tenant = tenant_of(handle)?;
        let mut core = self.0.dom.enter_control()?;
        check_by_user_id(&mut core, self.0.id)?;
        core.auth_keys.of_tenant(tenant)?;
        core.node().avs.set_tenant_user_id(self.0.id, tenant, user_id)
    }

    /// An address in text, as [`resolve`] and `FI_ADDR_STR` take it.
    #[doc(alias = "fi_av_straddr")]
    pub fn straddr(&self, addr: &EpAddr) -> String {
        addr.to_string()
    }

    /// Closes the vector.
    ///
    /// # Errors
    /// [`Error::Busy`], and the vector again: an endpoint is bound to it.
    #[doc(alias = "fi_close")]
    pub fn close(self) -> std::result::Result<(), (Error, Self)> {
        if self.is_bound() { Err((Error::Busy, self)) } else { Ok(()) }
    }
}

impl Av {
    /// Adds a key, 16 to 1,024 random bytes, and returns its handle, an `fi_addr_t` that stands for
    /// whoever has it: [`insert_under`](Self::insert_under) and receives with
    /// [`OpFlags::AUTH_KEY`](crate::flags::OpFlags::AUTH_KEY) take it. From now on who has the key
    /// can open sessions with any endpoint of the domain. The same bytes give the same handle, in
    /// every vector of the domain. The bytes are copied, and overwritten when the domain closes.
    ///
    /// # Errors
    /// And nothing was added:
    /// - [`Error::Invalid`]: too few bytes, or too many.
    /// - [`Error::OpNotSupp`]: the domain was not opened with `av_auth_key`.
    /// - [`Error::NoMem`]: the domain has 4 keys, or had 255.
    ///
    /// Source: fi_av(3), "fi_av_insert_auth_key".
    #[doc(alias = "fi_av_insert_auth_key")]
    pub fn insert_auth_key(&self, key: &[u8]) -> Result<FiAddr> {
        let made = key::given(&[key], self.0.dom.settings.seal)?;
        let mut core = self.0.dom.enter_control()?;
        let mut tenant = Err(Error::NoMem);
        for key in made {
            tenant = core.node().openings.add_tenant(key);
        }
        let tenant = tenant?;
        core.auth_keys.add(tenant, key, self.0.id);
        Ok(tenant.handle())
    }

    /// The key behind its handle, or the one that an address was inserted under.
    ///
    /// # Errors
    /// [`Error::Invalid`]: neither.
    #[doc(alias = "fi_av_lookup_auth_key")]
    pub fn lookup_auth_key(&self, fi_addr: FiAddr) -> Result<AuthKey> {
        let mut core = self.0.dom.enter_control()?;
        let tenant = match Tenant::of_handle(fi_addr) {
            Some(tenant) => tenant,
            None => core.node().av_tenant(self.0.id, fi_addr)?,
        };
        core.auth_keys.of_tenant(tenant).cloned()
    }

    /// Removes the keys of these handles from the vector, as closing it does. A key that is in no
    /// other vector of the domain is overwritten, and its sessions end. Handles are given out to no
    /// other keys.
    ///
    /// # Errors
    /// From the first that stays: [`Error::Invalid`]: not the handle of a key of the vector.
    /// [`Error::Busy`]: an endpoint is bound to the vector; or it is the last that has the key, and
    /// a receive, or an address that was not removed, names it.
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

/// Native addresses that stand back to back.
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

/// Removes the key of a tenant from a vector, and from the domain if no other has it.
fn drop_key(core: &mut Core, tenant: Tenant, av: AvId) -> Result<()> {
    let key = core.auth_keys.of_tenant(tenant)?.clone();
    if core.auth_keys.leave(tenant, av)? {
        if let Err(e) = core.node().sessions().remove_tenant(Engine::now(), tenant) {
            core.auth_keys.add(tenant, &key, av);
            return Err(e);
        }
        core.auth_keys.remove(tenant);
    }
    Ok(())
}

/// Says why `missing` of `count` addresses were not inserted, the `first` of them among others, and
/// what helps.
fn tell_refused(peer_limit: usize, [missing, count, first]: [usize; 3], why: Error) {
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

/// Names receive context `rx_index` of the scalable endpoint behind `fi_addr`, in a vector that was
/// made with as many [`AvAttr::rx_ctx_bits`]. Data calls take it as a destination; as the source of
/// a receive it is the scalable endpoint.
#[doc(alias = "fi_rx_addr")]
pub const fn rx_addr(fi_addr: FiAddr, rx_index: usize, rx_ctx_bits: u32) -> FiAddr {
    match rx_ctx_bits {
        0 => fi_addr,
        bits => fi_addr | (rx_index as FiAddr) << (FiAddr::BITS - bits),
    }
}
