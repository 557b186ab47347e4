//! Endpoints (fi_endpoint(3)): open, bind, enable, options and close. The data calls of the safe
//! API are in `msg.rs`, `tagged.rs`, `rma.rs`, `atomic.rs` and `coll.rs`, those of the raw API in
//! `raw.rs`.

use std::net::IpAddr;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use barewire_dataplane::node::{EpAttr as NodeEpAttr, EpId, MsgKind, Node, RecvReq, SendReq};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::proto::atomic::OPERAND_LEN_MAX;
use barewire_dataplane::types::{EpAddr, FiAddr};
use barewire_driver::hint::cold;

use crate::auth_check::{check_endpoint, needs_one_key};
use crate::av::{Av, AvInner};
use crate::buf::{Bufs, OpKey, OpKind, PostError, PostResult, kind_of};
use crate::cm::connected::Connected;
use crate::cm::side::CM_DATA_SIZE;
use crate::cntr::{Cntr, CntrInner};
use crate::cq::{Cq, CqInner};
use crate::deferred::ConditionReader;
use crate::eq::{Eq, EqInner};
use crate::errno::{Error, Result};
use crate::flags::{BindFlags, Caps, OpFlags};
use crate::info::{AddrFormat, CTX_MAX, EpType, Info, RxAttr, number_at, usual_sizes};
use crate::inner::{Core, DomainRef, Shared};
use crate::lock::Guard;
use crate::names::{Names, ServiceClaim};
use crate::tclass;

/// Names of endpoint options (`FI_OPT_ENDPOINT`), as `setopt` and `getopt` take them. All values
/// are `size_t` or `bool`.
pub mod opt {
    /// Free bytes below which a multi-receive buffer is released.
    pub const FI_OPT_MIN_MULTI_RECV: i32 = 0;
    /// Most bytes of connection data; 0 for connectionless endpoints.
    pub const FI_OPT_CM_DATA_SIZE: i32 = 1;
    /// Bytes of a message that are buffered before it is announced.
    pub const FI_OPT_BUFFERED_MIN: i32 = 2;
    /// Length above which only `FI_OPT_BUFFERED_MIN` bytes are buffered.
    pub const FI_OPT_BUFFERED_LIMIT: i32 = 3;
    /// Most sends in flight.
    pub const FI_OPT_TX_SIZE: i32 = 6;
    /// Most posted receives.
    pub const FI_OPT_RX_SIZE: i32 = 7;
    /// Whether the provider may call CUDA. It never does: false may be set, true may not.
    pub const FI_OPT_CUDA_API_PERMITTED: i32 = 10;
    /// Whether processes of this node are reached through shared memory. The port decides: true for
    /// `shm`, `memif` and ports with `near=yes`, where false cannot be set.
    pub const FI_OPT_SHARED_MEMORY_PERMITTED: i32 = 11;
    /// Longest untagged message.
    pub const FI_OPT_MAX_MSG_SIZE: i32 = 12;
    /// Longest tagged message.
    pub const FI_OPT_MAX_TAGGED_SIZE: i32 = 13;
    /// Longest remote memory access; 0 without `FI_RMA`.
    pub const FI_OPT_MAX_RMA_SIZE: i32 = 14;
    /// Longest atomic, bytes of operands; 0 without `FI_ATOMIC`.
    pub const FI_OPT_MAX_ATOMIC_SIZE: i32 = 15;
    /// Longest untagged inject.
    pub const FI_OPT_INJECT_MSG_SIZE: i32 = 16;
    /// Longest tagged inject.
    pub const FI_OPT_INJECT_TAGGED_SIZE: i32 = 17;
    /// Longest injected write; 0 without `FI_RMA`.
    pub const FI_OPT_INJECT_RMA_SIZE: i32 = 18;
    /// Longest injected atomic; 0 without `FI_ATOMIC`.
    pub const FI_OPT_INJECT_ATOMIC_SIZE: i32 = 19;
}

use opt::*;

/// The objects that are bound to an endpoint, which keeps them open.
#[derive(Default)]
struct Bindings {
    cqs: Vec<Arc<CqInner>>,
    cntrs: Vec<Arc<CntrInner>>,
    avs: Vec<Arc<AvInner>>,
    eqs: Vec<Arc<EqInner>>,
    srx: Option<KeepAlive>,
    /// The service that it serves.
    service_claim: Option<ServiceClaim>,
    /// The scalable endpoint that it is a context of.
    context: Option<Box<dyn Parent>>,
}

/// Keeps an endpoint open as long as it lives.
pub(crate) type KeepAlive = Arc<dyn std::any::Any + std::marker::Send + Sync>;

/// The scalable endpoint of a context. Its contexts keep it open.
pub(crate) trait Parent: std::marker::Send + Sync {
    /// Its address.
    fn addr(&self) -> Result<EpAddr>;

    /// The vector that is bound to it.
    fn av(&self) -> Option<Av>;
}

/// The part that endpoints of the safe and of the raw API share.
pub struct EpCommon {
    pub(crate) dom: DomainRef,
    pub(crate) id: EpId,
    /// Number of this object, for the table of operations.
    pub(crate) object: u32,
    caps: Caps,
    /// State of an endpoint of type `FI_EP_MSG`.
    pub(crate) connected: Option<Connected>,
    /// Mask of destination addresses: all ones, or 0 for a connected endpoint, whose only peer has
    /// index 0.
    pub(crate) addr_bits: FiAddr,
    /// The inverse mask, for source addresses: see [`from`](Self::from).
    pub(crate) from_bits: FiAddr,
    limits: (usize, usize),
    /// Longest message, bytes. Checked for messages that do not fit a frame.
    pub(crate) max_msg_size: u64,
    buffered: (AtomicUsize, AtomicUsize),
    buffered_recv: bool,
    tx_op_flags: TxOpFlags,
    rx_op_flags: AtomicU64,
    pub(crate) tx_selective: AtomicBool,
    pub(crate) rx_selective: AtomicBool,
    /// Reads the condition of a triggered operation out of its context.
    pub(crate) condition_reader: OnceLock<ConditionReader>,
    bound: Arc<Mutex<Bindings>>,
    /// The endpoint that this one is an alias of, with its own default flags.
    alias_of: Option<KeepAlive>,
}

/// Default flags of transmit calls.
struct TxOpFlags {
    given: AtomicU64,
    /// The same flags for one-sided operations.
    rma: AtomicU64,
}

impl TxOpFlags {
    fn new(flags: OpFlags) -> Self {
        let new = Self { given: AtomicU64::new(0), rma: AtomicU64::new(0) };
        new.set(flags);
        new
    }

    fn set(&self, flags: OpFlags) {
        let mut rma = flags - OpFlags::MATCH_COMPLETE;
        if flags.contains(OpFlags::MATCH_COMPLETE) {
            rma |= OpFlags::DELIVERY_COMPLETE;
        }
        self.given.store(flags.bits(), Ordering::Relaxed);
        self.rma.store(rma.bits(), Ordering::Relaxed);
    }

    #[inline(always)]
    fn get(&self) -> OpFlags {
        OpFlags::from_bits_retain(self.given.load(Ordering::Relaxed))
    }

    #[inline(always)]
    fn rma(&self) -> OpFlags {
        OpFlags::from_bits_retain(self.rma.load(Ordering::Relaxed))
    }
}

impl EpCommon {
    pub(crate) fn open(dom: &DomainRef, info: &Info) -> Result<Self> {
        if info.ep_attr.ep_type == EpType::Dgram {
            return Err(Error::OpNotSupp("endpoint type: FI_EP_RDM or FI_EP_MSG"));
        }
        let several = |count| (2..=CTX_MAX).contains(&count);
        if several(info.ep_attr.tx_ctx_cnt) || several(info.ep_attr.rx_ctx_cnt) {
            return Err(Error::Invalid("tx_ctx_cnt, rx_ctx_cnt: this takes a scalable endpoint"));
        }
        Self::check(dom, info)?;
        let number = info.source_number(&dom.caps)?;
        let service_claim = dom.claim_service(info)?;
        let attr = NodeEpAttr {
            number,
            caps: info.caps,
            tx_size: info.tx_attr.size,
            rx_size: info.rx_attr.size,
            tx_op_flags: info.tx_attr.op_flags,
            rx_op_flags: info.rx_attr.op_flags,
            buffered_recv: info.mode.contains(crate::flags::Mode::BUFFERED_RECV),
        };
        let connected = Connected::of(dom, info)?;
        let mut core = dom.enter_control()?;
        let mut caps = attr.caps;
        if connected.is_some() {
            // A connected endpoint has one peer, so receives need not name it.
            caps -= Caps::EXACT_DIRECTED_RECV;
        }
        let id = core.node().eps.open(NodeEpAttr { caps, ..attr })?;
        if info.src_addr.is_some() {
            core.node().control().reach_by_name();
        }
        core.serve(service_claim.as_ref());
        drop(core);
        let mut ep = Self::of(dom, id, connected, &attr);
        ep.bound().service_claim = service_claim;
        if info.ep_attr.max_msg_size != 0 {
            ep.max_msg_size = info.ep_attr.max_msg_size;
        }
        if let Some(it) = &ep.connected {
            ep.bind_av(it.av())?;
        }
        Ok(ep)
    }

    /// The address of a service at a host, as [`Av::find_hosts`] finds it.
    ///
    /// # Errors
    /// [`Error::NoData`]: no station answered that it serves this service.
    pub fn find_host(&self, ip: IpAddr, service: u16) -> Result<EpAddr> {
        self.dom.find_hosts(&[(ip, service)]).pop().unwrap_or(Err(Error::NoData))
    }

    /// Refuses attributes that an endpoint of this domain cannot have.
    ///
    /// # Errors
    /// [`Error::Invalid`]: more than `fi_getinfo` offers, or a key that is not the domain's.
    /// [`Error::OpNotSupp`]: `FI_MULTICAST` on a port without multicast, or `FI_EP_MSG` with keys
    /// of address vectors.
    pub(crate) fn check(dom: &DomainRef, info: &Info) -> Result<()> {
        crate::info::check_limits(info, &dom.settings)?;
        check_endpoint(dom, &info.ep_attr.auth_key)?;
        if info.ep_attr.ep_type == EpType::Msg {
            needs_one_key(&mut *dom.enter_control()?)?;
        }
        let groups = Names::of(&dom.caps.name).has_groups() && info.ep_attr.ep_type != EpType::Msg;
        if info.caps.contains(Caps::MULTICAST) && !groups {
            return Err(Error::OpNotSupp("FI_MULTICAST: not on this port, or with connections"));
        }
        let class = tclass::of_domain(info.tx_attr.tclass, info.domain_attr.tclass);
        if !tclass::is_of(dom.enter_control()?.tclass, class) {
            return Err(Error::Invalid("tclass: unknown, or another than the domain's"));
        }
        Ok(())
    }

    /// A context of a scalable endpoint.
    pub(crate) fn context(
        dom: &DomainRef,
        id: EpId,
        attr: &NodeEpAttr,
        context: Box<dyn Parent>,
    ) -> Self {
        let ep = Self::of(dom, id, None, attr);
        ep.bound().context = Some(context);
        ep
    }

    /// A shared receive context.
    pub(crate) fn open_srx(dom: &DomainRef, rx: &RxAttr) -> Result<Self> {
        let attr = NodeEpAttr {
            caps: if rx.caps.is_empty() { Caps::MSG | Caps::TAGGED } else { rx.caps },
            tx_size: 0,
            rx_size: if rx.size == 0 { usual_sizes(&dom.settings).1 } else { rx.size },
            rx_op_flags: rx.op_flags,
            ..NodeEpAttr::default()
        };
        crate::info::check_rx(rx, &dom.settings)?;
        if rx.op_flags.contains(OpFlags::MULTI_RECV) {
            return Err(Error::BadFlags);
        }
        let id = dom.enter_control()?.node().eps.srx_open(attr)?;
        Ok(Self::of(dom, id, None, &attr))
    }

    fn of(dom: &DomainRef, id: EpId, connected: Option<Connected>, attr: &NodeEpAttr) -> Self {
        Self {
            dom: dom.clone(),
            id,
            addr_bits: if connected.is_some() { 0 } else { FiAddr::MAX },
            from_bits: if connected.is_some() { FiAddr::MAX } else { 0 },
            connected,
            object: dom.ep_count.fetch_add(1, Ordering::Relaxed),
            caps: attr.caps,
            limits: (attr.tx_size, attr.rx_size),
            max_msg_size: Node::MAX_MSG_SIZE,
            buffered: (AtomicUsize::new(0), AtomicUsize::new(0)),
            buffered_recv: attr.buffered_recv,
            tx_op_flags: TxOpFlags::new(attr.tx_op_flags),
            rx_op_flags: AtomicU64::new(attr.rx_op_flags.bits()),
            tx_selective: AtomicBool::new(false),
            rx_selective: AtomicBool::new(false),
            condition_reader: OnceLock::new(),
            bound: Arc::default(),
            alias_of: None,
        }
    }

    /// An alias of an endpoint. `keep_alive` keeps the endpoint open.
    pub(crate) fn alias(of: &Self, keep_alive: KeepAlive) -> Self {
        let same = |word: &AtomicBool| AtomicBool::new(word.load(Ordering::Relaxed));
        let number = |word: &AtomicUsize| AtomicUsize::new(word.load(Ordering::Relaxed));
        Self {
            dom: of.dom.clone(),
            id: of.id,
            object: of.object,
            caps: of.caps,
            // An alias does not connect or disconnect.
            connected: None,
            addr_bits: of.addr_bits,
            from_bits: of.from_bits,
            limits: of.limits,
            max_msg_size: of.max_msg_size,
            buffered: (number(&of.buffered.0), number(&of.buffered.1)),
            buffered_recv: of.buffered_recv,
            tx_op_flags: TxOpFlags::new(of.tx_op_flags()),
            rx_op_flags: AtomicU64::new(of.rx_op_flags().bits()),
            tx_selective: same(&of.tx_selective),
            rx_selective: same(&of.rx_selective),
            condition_reader: of.condition_reader.clone(),
            bound: Arc::clone(&of.bound),
            alias_of: Some(keep_alive),
        }
    }

    /// Takes receives from a shared receive context. `keep_alive` keeps the context open.
    pub(crate) fn bind_srx_inner(&self, srx: &Self, keep_alive: KeepAlive) -> Result<()> {
        self.same_domain(&srx.dom)?;
        let connected = self.connected.is_some();
        self.dom.enter_control()?.node().eps.bind_srx(self.id, srx.id, connected)?;
        self.bound().srx = Some(keep_alive);
        Ok(())
    }

    /// Whether its receives are posted to a shared receive context.
    pub(crate) fn shares_receives(&self) -> bool {
        self.bound().srx.is_some()
    }

    /// The destination of a send: `dest`, or the only peer of a connected endpoint.
    #[inline(always)]
    pub(crate) fn to(&self, dest: FiAddr) -> FiAddr {
        dest & self.addr_bits
    }

    /// The source of a receive: `src`, or [`FI_ADDR_UNSPEC`](crate::FI_ADDR_UNSPEC) on a connected
    /// endpoint, which has one sender.
    #[inline(always)]
    pub(crate) fn from(&self, src: FiAddr) -> FiAddr {
        src | self.from_bits
    }

    fn bound(&self) -> std::sync::MutexGuard<'_, Bindings> {
        self.bound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn bind_cq_inner(&self, cq: &Arc<CqInner>, flags: BindFlags) -> Result<()> {
        self.same_domain(&cq.dom)?;
        self.dom.enter_control()?.node().objects().ep_bind_cq(self.id, cq.id, flags)?;
        let selective = flags.contains(BindFlags::SELECTIVE_COMPLETION);
        if flags.contains(BindFlags::TRANSMIT) {
            self.tx_selective.store(selective, Ordering::Relaxed);
        }
        if flags.contains(BindFlags::RECV) {
            self.rx_selective.store(selective, Ordering::Relaxed);
        }
        self.bound().cqs.push(Arc::clone(cq));
        Ok(())
    }

    fn same_domain(&self, other: &DomainRef) -> Result<()> {
        if self.dom.name() == other.name() {
            Ok(())
        } else {
            Err(Error::Invalid("bind: the object is of another domain"))
        }
    }

    /// Binds a counter for the directions in `flags`. The endpoint may already be enabled, which
    /// fi_endpoint(3) does not require and Sandia OpenSHMEM relies on: operations that end after
    /// the call are counted.
    ///
    /// # Errors
    /// - [`Error::BadFlags`]: a flag is not a direction of a counter.
    /// - [`Error::Invalid`]: the counter is of another domain, or the direction already has a
    ///   counter.
    /// - [`Error::OpBadState`] as for every call.
    #[doc(alias = "fi_ep_bind")]
    pub fn bind_cntr(&self, cntr: &Cntr, flags: BindFlags) -> Result<()> {
        self.same_domain(&cntr.0.dom)?;
        self.dom.enter_control()?.node().operations().ep_bind_cntr(self.id, cntr.0.id, flags)?;
        self.bound().cntrs.push(Arc::clone(&cntr.0));
        Ok(())
    }

    /// Binds the address vector that destinations and sources are looked up in.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: the vector is of another domain.
    /// - [`Error::OpBadState`]: the endpoint is enabled.
    #[doc(alias = "fi_ep_bind")]
    pub fn bind_av(&self, av: &Av) -> Result<()> {
        self.same_domain(&av.0.dom)?;
        self.dom.enter_control()?.node().objects().ep_bind_av(self.id, av.0.id)?;
        self.bound().avs.push(Arc::clone(&av.0));
        Ok(())
    }

    /// Binds an event queue, which gets the loss of the port and the outcomes of joins. Only an
    /// endpoint that joins groups needs one.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    #[doc(alias = "fi_ep_bind")]
    pub fn bind_eq(&self, eq: &Eq) -> Result<()> {
        self.dom.bind_domain_eq(&eq.0)?;
        self.dom.set_join_eq(self.id, &eq.0);
        self.bound().eqs.push(Arc::clone(&eq.0));
        Ok(())
    }

    /// The event queue that is bound, if any.
    pub(crate) fn eq(&self) -> Option<Arc<EqInner>> {
        self.bound().eqs.last().map(Arc::clone)
    }

    /// Whether this address vector is bound.
    pub(crate) fn uses_av(&self, av: &Arc<AvInner>) -> bool {
        self.bound().avs.iter().any(|bound| Arc::ptr_eq(bound, av))
    }

    /// Enables the endpoint: it can send and receive from now on.
    ///
    /// # Errors
    /// - [`Error::NoCq`]: a direction that its capabilities allow has no completion queue.
    /// - [`Error::NoAv`]: no address vector is bound.
    /// - [`Error::OpBadState`]: the endpoint is already enabled.
    ///
    /// Source: fi_endpoint(3), "fi_enable".
    #[doc(alias = "fi_enable")]
    pub fn enable(&self) -> Result<()> {
        let bound = self.bound();
        let lent = if bound.avs.is_empty() { bound.context.as_ref() } else { None };
        let lent = lent.and_then(|parent| parent.av());
        drop(bound);
        if let Some(av) = lent {
            self.bind_av(&av)?;
        }
        self.dom.enter_control()?.node().ep_enable(self.id)
    }

    /// The endpoint's address, for peers to insert; for a context, that of its scalable endpoint.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    #[doc(alias = "fi_getname")]
    pub fn getname(&self) -> Result<EpAddr> {
        if let Some(context) = &self.bound().context {
            return context.addr();
        }
        self.dom.enter_control()?.node().addr_of(self.id)
    }

    /// Gives the endpoint, before it is enabled, the number of the native address in `addr`. The
    /// MAC cannot be changed: it has to be the port's, or zero.
    ///
    /// # Errors
    /// - [`Error::OpBadState`]: the endpoint is enabled.
    /// - [`Error::AddrInUse`]: another endpoint has the number.
    /// - [`Error::AddrNotAvail`]: the MAC is not the port's.
    /// - [`Error::Invalid`]: `addr` is no address, or the endpoint has no number of its own: it is
    ///   connected or a context.
    ///
    /// Source: fi_cm(3), "fi_setname".
    #[doc(alias = "fi_setname")]
    pub fn setname_bytes(&self, addr: &[u8]) -> Result<()> {
        let number = number_at(&self.dom.caps, AddrFormat::Unspec, addr)?;
        if self.connected.is_some() {
            return Err(Error::Invalid("setname: a connected endpoint has no number of its own"));
        }
        self.dom.enter_control()?.node().eps.set_number(self.id, number)
    }

    /// Copies the endpoint's native address to `to` and returns its length, 16.
    ///
    /// # Errors
    /// [`Error::TooSmall`]: `to` is shorter than 16 bytes. Nothing was copied.
    pub fn getname_bytes(&self, to: &mut [u8]) -> Result<usize> {
        let to = to.get_mut(..EpAddr::LEN).ok_or(Error::TooSmall)?;
        to.copy_from_slice(&self.getname()?.to_bytes());
        Ok(EpAddr::LEN)
    }

    /// The capabilities that the endpoint was granted.
    pub fn caps(&self) -> Caps {
        self.caps
    }

    /// Default flags of the transmit calls without a flags argument (`FI_GETOPSFLAG` with
    /// `FI_TRANSMIT`).
    pub fn tx_op_flags(&self) -> OpFlags {
        self.tx_op_flags.get()
    }

    /// Default flags of one-sided calls: there `FI_MATCH_COMPLETE` means `FI_DELIVERY_COMPLETE`,
    /// since they match no receive.
    #[inline(always)]
    pub(crate) fn rma_op_flags(&self) -> OpFlags {
        self.tx_op_flags.rma()
    }

    /// Default flags of the receive calls without a flags argument (`FI_GETOPSFLAG` with
    /// `FI_RECV`).
    pub fn rx_op_flags(&self) -> OpFlags {
        OpFlags::from_bits_retain(self.rx_op_flags.load(Ordering::Relaxed))
    }

    /// Default flags of tagged receives: `FI_MULTI_RECV` applies to untagged receives only, unless
    /// the endpoint has `FI_TAGGED_MULTI_RECV`.
    #[inline(always)]
    pub(crate) fn tagged_op_flags(&self) -> OpFlags {
        let flags = self.rx_op_flags();
        match self.caps.contains(Caps::TAGGED_MULTI_RECV) {
            true => flags,
            false => flags - OpFlags::MULTI_RECV,
        }
    }

    /// Sets the default flags of transmit calls (`FI_SETOPSFLAG`).
    ///
    /// # Errors
    /// [`Error::BadFlags`]: a flag is not a transmit flag. Nothing changed.
    pub fn set_tx_op_flags(&self, flags: OpFlags) -> Result<()> {
        if !crate::info::TX_OP_FLAGS.contains(flags) {
            return Err(Error::BadFlags);
        }
        self.tx_op_flags.set(flags);
        Ok(())
    }

    /// Sets the default flags of an alias, which may have `FI_TRIGGER`.
    pub(crate) fn set_alias_flags(&self, flags: OpFlags, recv: bool) -> Result<()> {
        let plain = flags - OpFlags::TRIGGER;
        match recv {
            true => self.set_rx_op_flags(plain)?,
            false => self.set_tx_op_flags(plain)?,
        }
        if flags.contains(OpFlags::TRIGGER) && !self.caps.contains(Caps::TRIGGER) {
            return Err(Error::BadFlags);
        }
        match recv {
            true => self.rx_op_flags.store(flags.bits(), Ordering::Relaxed),
            false => self.tx_op_flags.set(flags),
        }
        Ok(())
    }

    /// Sets the default flags of receive calls (`FI_SETOPSFLAG`).
    ///
    /// # Errors
    /// [`Error::BadFlags`]: a flag is not a receive flag. Nothing changed.
    pub fn set_rx_op_flags(&self, flags: OpFlags) -> Result<()> {
        if !crate::info::RX_OP_FLAGS.contains(flags) {
            return Err(Error::BadFlags);
        }
        self.rx_op_flags.store(flags.bits(), Ordering::Relaxed);
        Ok(())
    }

    /// Sets option `name` (see [`opt`]).
    ///
    /// # Errors
    /// - [`Error::NoProtoOpt`]: the option is unknown or read-only.
    /// - [`Error::Invalid`]: the value is not allowed.
    #[doc(alias = "fi_setopt")]
    pub fn setopt(&self, name: i32, value: usize) -> Result<()> {
        let mut core = self.dom.enter_control()?;
        let (min, limit) = (&self.buffered.0, &self.buffered.1);
        match name {
            FI_OPT_MIN_MULTI_RECV => core.node().eps.set_min_multi_recv(self.id, value),
            FI_OPT_BUFFERED_MIN | FI_OPT_BUFFERED_LIMIT if self.buffered_recv => {
                let old = (min.load(Ordering::Relaxed), limit.load(Ordering::Relaxed));
                let new = if name == FI_OPT_BUFFERED_MIN { (value, old.1) } else { (old.0, value) };
                core.node().eps.set_buffered(self.id, new.0, new.1)?;
                min.store(new.0, Ordering::Relaxed);
                limit.store(new.1, Ordering::Relaxed);
                Ok(())
            }
            FI_OPT_CUDA_API_PERMITTED if value == 0 => Ok(()),
            FI_OPT_CUDA_API_PERMITTED => Err(Error::Invalid("FI_OPT_CUDA_API_PERMITTED: no CUDA")),
            FI_OPT_SHARED_MEMORY_PERMITTED if value == 0 && self.shared_memory() => {
                Err(Error::Invalid("FI_OPT_SHARED_MEMORY_PERMITTED: the port uses it"))
            }
            FI_OPT_SHARED_MEMORY_PERMITTED => Ok(()),
            _ => Err(Error::NoProtoOpt),
        }
    }

    /// The value of option `name` (see [`opt`]).
    ///
    /// # Errors
    /// [`Error::NoProtoOpt`]: the option is unknown.
    #[doc(alias = "fi_getopt")]
    pub fn getopt(&self, name: i32) -> Result<usize> {
        let mut core = self.dom.enter_control()?;
        let long = usize::try_from(Node::MAX_MSG_SIZE).unwrap_or(usize::MAX);
        let message = usize::try_from(self.max_msg_size).unwrap_or(usize::MAX);
        let only = |cap, value| if self.caps.contains(cap) { value } else { 0 };
        Ok(match name {
            FI_OPT_MIN_MULTI_RECV => core.node().eps.min_multi_recv(self.id)?,
            FI_OPT_BUFFERED_MIN if self.buffered_recv => self.buffered.0.load(Ordering::Relaxed),
            FI_OPT_BUFFERED_LIMIT if self.buffered_recv => self.buffered.1.load(Ordering::Relaxed),
            FI_OPT_TX_SIZE => self.limits.0,
            FI_OPT_RX_SIZE => self.limits.1,
            FI_OPT_SHARED_MEMORY_PERMITTED => usize::from(self.shared_memory()),
            FI_OPT_MAX_MSG_SIZE => only(Caps::MSG, message),
            FI_OPT_MAX_TAGGED_SIZE => only(Caps::TAGGED, message),
            FI_OPT_INJECT_MSG_SIZE => only(Caps::MSG, Node::INJECT_SIZE),
            FI_OPT_INJECT_TAGGED_SIZE => only(Caps::TAGGED, Node::INJECT_SIZE),
            FI_OPT_MAX_RMA_SIZE => only(Caps::RMA, long),
            FI_OPT_MAX_ATOMIC_SIZE => only(Caps::ATOMIC, OPERAND_LEN_MAX),
            FI_OPT_INJECT_RMA_SIZE => only(Caps::RMA, Node::INJECT_SIZE),
            FI_OPT_INJECT_ATOMIC_SIZE => only(Caps::ATOMIC, Node::INJECT_SIZE),
            FI_OPT_CM_DATA_SIZE if self.connected.is_some() => CM_DATA_SIZE,
            FI_OPT_CM_DATA_SIZE | FI_OPT_CUDA_API_PERMITTED => 0,
            _ => return Err(Error::NoProtoOpt),
        })
    }

    fn shared_memory(&self) -> bool {
        let caps = &self.dom.caps;
        caps.lossless || caps.near_mtu > 0 || caps.name.contains("shm")
    }
}

impl Drop for EpCommon {
    fn drop(&mut self) {
        if self.alias_of.is_some() {
            return;
        }
        // In an owned domain another thread cannot close the endpoint: it is then closed with the
        // domain.
        let Ok(mut core) = self.dom.lock.enter_to_close() else { return };
        if let Some(it) = &self.connected {
            it.close(&mut core);
        }
        core.deferred.end(self.id);
        let now = Engine::now();
        core.engine.send_held();
        if let Err(e) = core.node().ep_close(now, self.id) {
            tracing::error!("closing an endpoint: {e}");
        }
        core.ops.forget_reserved(self.object);
        core.engine.after_post(now);
        core.posted(&self.dom);
    }
}

/// An endpoint of the safe API (`struct fid_ep`, type `FI_EP_RDM`): reliable, connectionless,
/// with message boundaries.
///
/// Data calls take their buffers by value; the completion gives them back. Dropping the endpoint
/// cancels pending operations: each gets an error entry `FI_ECANCELED`, which holds its buffers.
pub struct Endpoint(EpCommon);

impl Deref for Endpoint {
    type Target = EpCommon;

    fn deref(&self) -> &EpCommon {
        &self.0
    }
}

/// The arguments of a send of the safe API.
pub(crate) struct Send {
    pub(crate) kind: MsgKind,
    pub(crate) bufs: Bufs,
    pub(crate) dest: FiAddr,
    pub(crate) tag: u64,
    pub(crate) data: u64,
    pub(crate) context: u64,
    pub(crate) flags: OpFlags,
}

/// The arguments of a receive of the safe API.
pub(crate) struct Recv {
    pub(crate) kind: MsgKind,
    pub(crate) bufs: Bufs,
    pub(crate) src: FiAddr,
    pub(crate) tag: u64,
    pub(crate) ignore: u64,
    pub(crate) context: u64,
    pub(crate) flags: OpFlags,
}

/// Kind of an operation that ends with its first completion: silent if selective completion hides
/// it.
#[inline(always)]
fn kind_once(selective: &AtomicBool, flags: OpFlags) -> OpKind {
    if selective.load(Ordering::Relaxed) && cold(!flags.contains(OpFlags::COMPLETION)) {
        return cold(OpKind::Silent);
    }
    OpKind::Once
}

impl Endpoint {
    pub(crate) fn open(dom: &DomainRef, info: &Info) -> Result<Self> {
        if info.ep_attr.ep_type == EpType::Msg {
            return Err(Error::OpNotSupp("endpoint type: FI_EP_MSG only through barewire::raw"));
        }
        if info.ep_attr.rx_ctx_cnt > 1 {
            return Err(Error::OpNotSupp("shared receive contexts: only through barewire::raw"));
        }
        EpCommon::open(dom, info).map(Self)
    }

    pub(crate) fn of_common(ep: EpCommon) -> Self {
        Self(ep)
    }

    /// Binds a completion queue for the directions in `flags`; with `SELECTIVE_COMPLETION` only
    /// operations with `FI_COMPLETION` are reported. The buffers of an unreported operation are
    /// freed when it ends: an application that wants them back requests the completion.
    ///
    /// # Errors
    /// - [`Error::BadFlags`]: a flag is not a direction of a queue.
    /// - [`Error::Invalid`]: the queue is of another domain.
    #[doc(alias = "fi_ep_bind")]
    pub fn bind_cq(&self, cq: &Cq, flags: BindFlags) -> Result<()> {
        self.0.bind_cq_inner(&cq.0, flags)
    }

    /// Cancels one operation posted with `context`: a receive, or a send of which no frame has left
    /// yet. Its error entry `FI_ECANCELED` holds its buffers. If the operation completes first,
    /// only that completion is written.
    ///
    /// # Errors
    /// [`Error::NoData`]: no such operation is pending.
    ///
    /// Source: fi_endpoint(3), "fi_cancel".
    #[doc(alias = "fi_cancel")]
    pub fn cancel(&self, context: u64) -> Result<()> {
        let mut core = self.dom.enter_control()?;
        let Core { engine, ops, .. } = &mut *core;
        let mut cancel = |key: OpKey| engine.node_mut().operations().cancel(self.id, key.0).is_ok();
        ops.posted(self.object, context).find(|&key| cancel(key)).ok_or(Error::NoData)?;
        core.posted(&self.dom);
        Ok(())
    }

    /// Closes the endpoint.
    #[doc(alias = "fi_close")]
    pub fn close(self) {}

    /// Posts a send. A single buffer takes the fast path of the raw API if no earlier send to the
    /// peer is queued.
    #[inline(always)]
    pub(crate) fn post_send(&self, send: Send) -> PostResult {
        let Send { kind, bufs, dest, tag, data, context, flags } = send;
        let shared: &Shared = &self.dom;
        let how = self.tx_kind(flags);
        // The table must hear of the end of every operation that holds memory.
        let flags = flags | OpFlags::COMPLETION;
        let mut core = match shared.enter() {
            Ok(core) => core,
            Err(error) => return cold(Err(PostError { error, bufs })),
        };
        let bufs = match bufs {
            Bufs::One(buf) => {
                let Core { engine, ops, .. } = &mut *core;
                let lent = ops.lend_if((self.object, how, context), buf, |key, buf| {
                    let (context, no_completion) = (key.0, false);
                    let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
                    engine.try_send_cached(self.id, &req)
                });
                match lent {
                    Ok(()) => {
                        core.posted(shared);
                        core.leave();
                        return Ok(());
                    }
                    Err(buf) => Bufs::One(buf),
                }
            }
            other => other,
        };
        cold(self.post_send_long(core, how, Send { kind, bufs, dest, tag, data, context, flags }))
    }

    /// The rest of [`post_send`](Self::post_send), which begins anew.
    #[inline(never)]
    fn post_send_long(&self, mut core: Guard<'_, Core>, how: OpKind, send: Send) -> PostResult {
        let Send { kind, bufs, dest, tag, data, context, flags } = send;
        let (key, buf) = core.ops.lend(self.object, how, context, bufs)?;
        let context = key.0;
        let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion: false };
        match core.engine.post_send(self.id, req) {
            Ok(()) => {
                core.posted(&self.dom);
                Ok(())
            }
            Err(error) => Err(core.ops.refuse(key, error)),
        }
    }

    /// How an operation ends that sends with these flags.
    #[inline(always)]
    pub(crate) fn tx_kind(&self, flags: OpFlags) -> OpKind {
        kind_once(&self.tx_selective, flags)
    }

    #[inline]
    pub(crate) fn post_inject(
        &self,
        kind: MsgKind,
        bytes: &[u8],
        dest: FiAddr,
        tag: u64,
        data: Option<u64>,
    ) -> Result<()> {
        let mut flags = OpFlags::INJECT;
        flags.set(OpFlags::REMOTE_CQ_DATA, data.is_some());
        let data = data.unwrap_or(0);
        let mut core = self.dom.enter()?;
        let posted = crate::buf::with_borrowed(bytes, |buf| {
            let (context, no_completion) = (0, true);
            let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
            core.engine.post_send(self.id, req)
        });
        core.posted(&self.dom);
        posted
    }

    /// Posts a receive. A single buffer for a message of any sender takes the fast path of the raw
    /// API.
    #[inline(always)]
    pub(crate) fn post_recv(&self, recv: Recv) -> PostResult {
        let Recv { kind, bufs, src, tag, ignore, context, flags } = recv;
        let shared: &Shared = &self.dom;
        let mut core = match shared.enter() {
            Ok(core) => core,
            Err(error) => return cold(Err(PostError { error, bufs })),
        };
        let bufs = match bufs {
            Bufs::One(buf) => {
                let Core { engine, ops, .. } = &mut *core;
                // Flags of which another kind follows are not for there.
                let how = kind_once(&self.rx_selective, flags);
                let lent = ops.lend_if((self.object, how, context), buf, |key, buf| {
                    let (context, flags) = (key.0, flags | OpFlags::COMPLETION);
                    let req = RecvReq { kind, buf, src, tag, ignore, context, flags };
                    engine.try_post_recv_reserved(self.id, &req)
                });
                match lent {
                    // A posted receive completes nothing and sets no deadline, so no watcher is
                    // notified.
                    Ok(()) => {
                        core.leave();
                        return Ok(());
                    }
                    Err(buf) => Bufs::One(buf),
                }
            }
            other => other,
        };
        let recv = Recv { kind, bufs, src, tag, ignore, context, flags };
        cold(self.post_recv_long(core, recv))
    }

    /// The rest of [`post_recv`](Self::post_recv), which begins anew.
    #[inline(never)]
    fn post_recv_long(&self, mut core: Guard<'_, Core>, recv: Recv) -> PostResult {
        let Recv { kind, bufs, src, tag, ignore, context, flags } = recv;
        // A peek or a discard is always answered.
        let shown = OpFlags::COMPLETION | OpFlags::PEEK | OpFlags::DISCARD;
        let selective = self.rx_selective.load(Ordering::Relaxed);
        let how = kind_of(flags, selective && !flags.intersects(shown));
        if flags.contains(OpFlags::MULTI_RECV) && !matches!(bufs, Bufs::Shared(_)) {
            return Err(PostError {
                error: Error::Invalid("FI_MULTI_RECV: not a SharedBuf"),
                bufs,
            });
        }
        if flags.contains(OpFlags::PEEK) {
            // Whoever asks again and again whether a message is here has it received.
            core.turn_if_manual(&self.dom);
        }
        let claim =
            !flags.contains(OpFlags::PEEK) && flags.intersects(OpFlags::CLAIM | OpFlags::DISCARD);
        let reserved = if claim { core.ops.reserved(self.object, context) } else { None };
        let (key, buf) = match reserved {
            Some(key) => (key, core.ops.lend_reserved(key, bufs, how)?),
            None => core.ops.lend(self.object, how, context, bufs)?,
        };
        // A message that was announced goes by the name the node gave it.
        let name = if claim && reserved.is_none() { context } else { key.0 };
        let flags = flags | OpFlags::COMPLETION;
        let req = RecvReq { kind, buf, src, tag, ignore, context: name, flags };
        match core.engine.post_recv(self.id, req) {
            Ok(()) => {
                if name != key.0 {
                    core.ops.claims(key, name);
                }
                core.posted(&self.dom);
                Ok(())
            }
            Err(error) if reserved.is_some() => Err(core.ops.refuse_reserved(key, error)),
            Err(error) => Err(core.ops.refuse(key, error)),
        }
    }
}
