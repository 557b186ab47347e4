//! Domains (fi_domain(3)): a port, its node, and the objects that are opened on them.

use std::net::IpAddr;
use std::sync::Arc;

use barewire_dataplane::node::{Node, NodeSettings};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::{EpAddr, INCARNATION_MAX};
use barewire_driver::port::{Port, PortCaps, PortCounters};

use crate::auth_check::is_auth_key;
use crate::auth_key::AuthKeys;
use crate::av::{Av, AvAttr};
use crate::buf::Buf;
use crate::certificate::check_fit;
use crate::cntr::{Cntr, CntrAttr};
use crate::cq::{Cq, CqAttr, CqInner};
use crate::ep::Endpoint;
use crate::eq::{Eq, EqInner};
use crate::errno::{Error, OpenError, Result};
use crate::hosts::{interface_of, own_hosts};
use crate::info::{DomainAttr, Info, check_domain_limits, mr_max, usual_sizes};
use crate::inner::{Core, DomainRef, Shared};
use crate::key::{self, KeySource};
use crate::key_log::KeyLog;
use crate::lock::Entry;
use crate::mr::{Mr, MrAttr};
use crate::names::{Names, ServiceClaim};
use crate::random::{random, random_secret};
use crate::settings::{Idle, Peers, Progress, Settings};
use crate::stats::Publisher;
use crate::tclass;
use crate::wait::WaitObj;
use crate::who::{Answers, Query, Resolver, register_domain, run_queries};

/// A domain (`struct fid_domain`): a port and its node.
///
/// Its objects keep it open: it closes when this handle and the last object are dropped. A forked
/// child cannot use it: every call there returns `FI_EOPBADSTATE`, and a drop there does not touch
/// the parent's port.
pub struct Domain {
    pub(crate) dom: DomainRef,
}

/// Fill levels of the tables of a domain, to find leaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Levels {
    /// Operations of the safe API whose completion was not read.
    pub ops: usize,
    /// Registered regions.
    pub regions: usize,
    /// Tables of the node.
    pub node: barewire_dataplane::node::Levels,
}

impl Domain {
    pub(crate) fn open(
        info: &Info,
        settings: Settings,
        port: Box<dyn Port>,
        entry: Entry,
    ) -> std::result::Result<Self, OpenError> {
        check_domain_limits(&info.domain_attr)
            .map_err(|e| OpenError::new(e, format!("domain: {e}")))?;
        let caps = port.caps();
        let name = caps.name.clone();
        let (node, files) = node_settings(&settings, &info.domain_attr)?;
        if info.domain_attr.av_auth_key && (caps.lossless || caps.near_mtu != 0) {
            let line = format!(
                "{name}: FI_AV_AUTH_KEY distinguishes tenants by sealed frames; it \
                needs a port that leaves the machine, with near=no"
            );
            return Err(OpenError::new(Error::OpNotSupp("FI_AV_AUTH_KEY: port not sealed"), line));
        }
        let sealed = node.keys.is_some() && !caps.lossless;
        let key_log = settings.key_log.as_ref().filter(|_| sealed);
        let key_log = key_log.map(|path| KeyLog::open(path)).transpose()?;
        let export_secrets = key_log.is_some();
        let mut node = NodeSettings { crc: Some(port.damages()), export_secrets, ..node };
        if node.keys.is_some() && caps.lossless {
            tracing::info!("{name}: the key is not used, frames stay in this machine's memory");
        }
        if sealed && caps.near_mtu != 0 {
            tracing::info!(
                "{name}: frames between processes of this node go through memory and are not \
                 sealed; near=no at the port seals them too"
            );
        }
        node.by_name |= info.src_addr.is_some();
        if let Some(keys) = &node.keys {
            check_fit(keys.open_len(), caps)?;
        }
        let node = Node::new(node, caps).map_err(|e| no_node(caps, e))?;
        let mut engine = Engine::new(node, port);
        let stats = if settings.stats { Publisher::create(&mut engine) } else { None };
        let dom = DomainRef::new(engine, settings, entry, stats);
        if let Ok(mut core) = dom.enter_control() {
            core.mrs.set_mode(info.domain_attr.mr_mode);
            core.tclass = tclass::of_domain(info.domain_attr.tclass, info.tx_attr.tclass);
            core.key_log = key_log;
            if !sealed {
                core.auth_keys = AuthKeys::of(&info.domain_attr.auth_key, dom.settings.seal);
            }
            if let Some(files) = files.filter(|_| core.node().port.has_keys()) {
                core.watch_keys(files);
            }
        }
        if let (Entry::Shared, Some(name)) = (entry, &info.domain_attr.name) {
            let resolver: Arc<dyn Resolver> = Arc::clone(dom.arc()) as _;
            register_domain(name, Arc::downgrade(&resolver));
        }
        let progress = info.domain_attr.data_progress;
        // The setting comes from the user and takes precedence over the program's hints.
        let auto = [progress, dom.settings.progress].contains(&Progress::Auto);
        if !auto && dom.settings.rcvthread && !dom.caps.tells_presence {
            dom.start_receive_thread();
        }
        if auto {
            dom.start_progress_thread(dom.settings.idle).map_err(|e| {
                OpenError::new(e, format!("port {name}: the progress thread did not start: {e}"))
            })?;
        }
        Ok(Self { dom })
    }

    /// Opens an endpoint of type `FI_EP_RDM`.
    ///
    /// # Errors
    /// - [`Error::OpNotSupp`]: another endpoint type, or `FI_MULTICAST` on a port without
    ///   broadcast.
    /// - [`Error::BadFlags`]: a flag is not allowed as a default flag of its direction.
    /// - [`Error::Invalid`]: `auth_key` is not a key of the domain.
    /// - [`Error::AddrInUse`]: another endpoint has the number of `info.src_addr`.
    /// - [`Error::AddrNotAvail`]: `info.src_addr` is an address of another port.
    /// - [`Error::NoMem`]: the domain has no room for another endpoint.
    ///
    /// Source: fi_endpoint(3).
    #[doc(alias = "fi_endpoint")]
    pub fn endpoint(&self, info: &Info) -> Result<Endpoint> {
        Endpoint::open(&self.dom, info)
    }

    /// Opens a completion queue.
    ///
    /// # Errors
    /// [`Error::NoSys`]: the wait object is not supported. [`Error::NoMem`]: the domain has no
    /// room, or the process has no descriptor left.
    #[doc(alias = "fi_cq_open")]
    pub fn cq_open(&self, attr: CqAttr) -> Result<Cq> {
        CqInner::open(&self.dom, attr, false).map(Cq)
    }

    /// Opens a counter.
    ///
    /// # Errors
    /// As [`cq_open`](Self::cq_open).
    #[doc(alias = "fi_cntr_open")]
    pub fn cntr_open(&self, attr: CntrAttr) -> Result<Cntr> {
        Cntr::open(&self.dom, attr)
    }

    /// Opens an address vector.
    ///
    /// # Errors
    /// [`Error::NoSys`]: asynchronous insertion or a shared vector. [`Error::NoMem`]: the domain
    /// has no room. [`Error::Invalid`]: `rx_ctx_bits` is too large.
    #[doc(alias = "fi_av_open")]
    pub fn av_open(&self, attr: AvAttr) -> Result<Av> {
        Av::open(&self.dom, attr)
    }

    /// Registers a buffer.
    ///
    /// # Errors
    /// - [`Error::NoKey`]: the requested key is in use.
    /// - [`Error::BadFlags`]: a flag is set.
    /// - [`Error::Invalid`]: no access right is set, or the buffer is empty.
    #[doc(alias = "fi_mr_reg")]
    pub fn mr_reg(&self, buf: Buf, attr: &MrAttr) -> Result<Mr> {
        Mr::register(&self.dom, vec![buf], attr)
    }

    /// Registers a list of at most 8 buffers as one region.
    ///
    /// # Errors
    /// As [`mr_reg`](Self::mr_reg).
    #[doc(alias = "fi_mr_regv")]
    #[doc(alias = "fi_mr_regattr")]
    pub fn mr_regv(&self, bufs: Vec<Buf>, attr: &MrAttr) -> Result<Mr> {
        Mr::register(&self.dom, bufs, attr)
    }

    /// The key of a region from its owner's raw key (`FI_MR_RAW`). No resource is taken:
    /// [`mr_unmap_key`](Self::mr_unmap_key) does nothing.
    ///
    /// # Errors
    /// [`Error::Invalid`]: the raw key does not have [`RAW_KEY_LEN`](crate::mr::RAW_KEY_LEN) bytes.
    #[doc(alias = "fi_mr_map_raw")]
    pub fn mr_map_raw(&self, _base_addr: u64, raw_key: &[u8]) -> Result<u64> {
        let bytes = raw_key.try_into().map_err(|_| Error::Invalid("key_size: not 8 bytes"))?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Unmaps a key of [`mr_map_raw`](Self::mr_map_raw). Does nothing.
    #[doc(alias = "fi_mr_unmap_key")]
    pub fn mr_unmap_key(&self, _key: u64) {}

    /// Binds an event queue, which gets an error event if the port is lost.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    #[doc(alias = "fi_domain_bind")]
    pub fn bind_eq(&self, eq: &Eq) -> Result<()> {
        self.dom.bind_domain_eq(&eq.0)
    }

    /// Replaces the keys of the domain by 1 to 4 keys of 16 to 1,024 random bytes each. Sessions
    /// are opened with the first key; peers may open sessions with any of them. Open sessions go
    /// on, also those of a key that is not in the list. No operation fails, or waits for longer
    /// than a session takes to open, if each node's list has the first key of every other node
    /// (`docs/security.md` has the steps). The bytes are copied; keys that are no longer in the
    /// list are overwritten. The key files of the settings are no longer read.
    ///
    /// # Errors
    /// The keys are unchanged:
    /// - [`Error::Invalid`]: the list is empty or has more than 4 keys, or a key is too short or
    ///   too long.
    /// - [`Error::OpNotSupp`]: the domain was opened without a key; its port never leaves the
    ///   machine's memory, so that frames are not sealed; the keys are those of address vectors; or
    ///   the domain has a certificate instead of keys, which is renewed by its files alone.
    /// - [`Error::OpBadState`] as for every call.
    pub fn set_keys(&self, keys: &[&[u8]]) -> Result<()> {
        let keys = key::keys_from_bytes(keys, self.dom.settings.seal)?;
        let mut core = self.dom.enter_control()?;
        core.node().sessions().set_keys(Engine::now(), keys)?;
        core.key_watch = None;
        // Sessions that are being opened restart, and their next deadline is now.
        core.posted(&self.dom);
        Ok(())
    }

    /// Whether these bytes are a key of the domain: that of its attributes, or one of its list.
    /// Endpoints and regions may be opened with such a key; it changes nothing for them.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    pub fn is_auth_key(&self, key: &[u8]) -> Result<bool> {
        is_auth_key(&self.dom, key)
    }

    /// Whether the keys of the domain are those of its address vectors (`FI_AV_AUTH_KEY`).
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    pub fn has_av_auth_keys(&self) -> Result<bool> {
        Ok(self.dom.enter_control()?.node().openings.has_tenants())
    }

    /// Default sizes of an endpoint's transmit and receive contexts: operations in flight, and
    /// posted receives.
    pub fn usual_sizes(&self) -> (usize, usize) {
        usual_sizes(&self.dom.settings)
    }

    /// Capabilities and properties of the port.
    pub fn port(&self) -> &PortCaps {
        &self.dom.caps
    }

    /// Counters of the port.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    pub fn port_counters(&self) -> Result<PortCounters> {
        Ok(self.dom.enter_control()?.engine.port_counters())
    }

    /// The part of [`port_counters`](Self::port_counters) to and from processes of this node,
    /// through shared memory; `None` on a port without a node segment.
    ///
    /// # Errors
    /// As there.
    pub fn near_counters(&self) -> Result<Option<PortCounters>> {
        Ok(self.dom.enter_control()?.engine.near_counters())
    }

    /// Fill levels of the domain's tables.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    pub fn levels(&self) -> Result<Levels> {
        let mut core = self.dom.enter_control()?;
        let (ops, regions) = (core.ops.in_use(), core.mrs.level());
        Ok(Levels { ops, regions, node: core.node().statistics().levels() })
    }

    /// Turns the progress loop once and returns how many frames moved, for applications that have
    /// no queue to read. Reading a queue does the same.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    pub fn progress(&self) -> Result<usize> {
        Ok(self.dom.enter()?.turn(&self.dom))
    }

    /// Gives up this thread's ownership of a domain opened with `FI_THREAD_DOMAIN`. The next thread
    /// that makes a call on it becomes the owner.
    ///
    /// # Errors
    /// [`Error::OpBadState`]: this thread does not own the domain.
    pub fn disown(&self) -> Result<()> {
        self.dom.lock.disown()
    }

    /// Closes the domain.
    ///
    /// # Errors
    /// [`Error::Busy`]: objects of the domain are open. The domain is given back.
    #[doc(alias = "fi_close")]
    pub fn close(self) -> std::result::Result<(), (Error, Self)> {
        if self.dom.objects() > 1 { Err((Error::Busy, self)) } else { Ok(()) }
    }
}

impl Resolver for Shared {
    fn query(&self, queries: &[Query]) -> std::result::Result<Vec<Answers>, OpenError> {
        let turn = |f: &mut dyn FnMut(&mut Node)| {
            let mut core = self.enter_control()?;
            f(core.node());
            core.turn(self);
            Ok(())
        };
        let refused = |e| OpenError::new(e, format!("{}: cannot ask: {e}", self.caps.name));
        run_queries(queries, turn).map_err(refused)
    }
}

impl Shared {
    /// The addresses of services at hosts.
    pub(crate) fn find_hosts(&self, hosts: &[(IpAddr, u16)]) -> Vec<Result<EpAddr>> {
        let found = Names::of(&self.caps.name).find_all(hosts, self);
        found.into_iter().map(|found| found.map_err(Error::from)).collect()
    }

    /// Claims the service of an endpoint with the source address of `info`.
    ///
    /// # Errors
    /// [`Error::AddrInUse`]: another process of this host has claimed the service.
    pub(crate) fn claim_service(&self, info: &Info) -> Result<Option<ServiceClaim>> {
        Names::claim(&self.caps, info.source()?)
    }
}

impl Core {
    /// Starts to answer queries for a service.
    pub(crate) fn serve(&mut self, service_claim: Option<&ServiceClaim>) {
        let Some(service_claim) = service_claim else { return };
        let hosts = own_hosts(interface_of(&self.engine.caps().name));
        self.node().control().set_hosts(Engine::now(), hosts);
        self.node().control().serve_name(service_claim.service);
    }
}

impl DomainRef {
    /// Binds an event queue. A queue with a descriptor starts the progress thread, since the loop
    /// has to be turned while the application sleeps on the descriptor.
    pub(crate) fn bind_domain_eq(&self, eq: &Arc<EqInner>) -> Result<()> {
        if eq.has_fd() {
            self.prepare_wait(WaitObj::Fd)?;
        }
        self.bind_eq(eq);
        eq.bind(Arc::downgrade(self.arc()) as _);
        Ok(())
    }

    /// Prepares the domain for blocking waits: several threads may enter then, so the lock becomes
    /// shared; and a descriptor needs the progress thread, which receives while the application
    /// sleeps on it.
    pub(crate) fn prepare_wait(&self, how: WaitObj) -> Result<()> {
        self.enter_control()?.share();
        if how == WaitObj::Fd { self.start_progress_thread(Idle::Sleep) } else { Ok(()) }
    }
}

/// The error of a port for which no node can be made.
fn no_node(caps: &PortCaps, e: Error) -> OpenError {
    let mend = match e {
        Error::NoMem => {
            "; set a smaller BAREWIRE_UNEXPECTED_BYTES, BAREWIRE_TX_MAX or BAREWIRE_RX_MAX"
        }
        _ => "",
    };
    OpenError::new(e, format!("port {} (MTU {}): {e}{mend}", caps.name, caps.mtu))
}

fn node_settings(
    settings: &Settings,
    attr: &DomainAttr,
) -> std::result::Result<(NodeSettings, Option<KeySource>), OpenError> {
    let (names, entropy) = (random::<16>()?, random_secret()?);
    let [a, b] = [&names[..8], &names[8..]]
        .map(|half| half.iter().fold(0_u64, |n, &byte| n << 8 | u64::from(byte)));
    let keys = key::domain_keys(settings, attr, entropy)?;
    let (keys, files) = keys.map_or((None, None), |keys| (Some(keys.ring), keys.files));
    let mut node = NodeSettings {
        incarnation: (a & INCARNATION_MAX).max(1),
        seed: b,
        keys,
        ..NodeSettings::default()
    };
    node.t_dead_ns = u64::try_from(settings.t_dead.as_nanos()).unwrap_or(u64::MAX);
    node.rekey_ns = u64::try_from(settings.rekey.as_nanos()).unwrap_or(u64::MAX);
    let set = |to: &mut usize, from: Option<usize>| *to = from.unwrap_or(*to);
    node.coll = settings.coll;
    node.eager_max = settings.eager_max;
    node.by_name = settings.by_name || settings.peers == Peers::Any;
    node.inserted = settings.peers == Peers::Inserted;
    set(&mut node.peer_max, settings.peer_max);
    set(&mut node.peer_limit, settings.peer_max);
    set(&mut node.unexpected_bytes, settings.unexpected_bytes);
    set(&mut node.tx_wr_max, settings.tx_max);
    set(&mut node.rx_wr_max, settings.rx_max);
    node.mr_max = mr_max(attr);
    Ok((node, files))
}
