//! Discovery (fi_getinfo(3)): hints, and the fabric interfaces that match them.
//!
//! A hint that is not set (empty, 0, `Unspec`) is a wildcard; one that is set must hold or the
//! answer is left out. Primary capabilities are granted only on request, and no answer goes beyond
//! the hints. No port is opened: whether a port works is known when its domain is opened.

use std::fmt;
use std::ops::Deref;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use barewire_dataplane::node::{Node, NodeSettings, RmaList};
pub use barewire_dataplane::seal::KEYS_MAX;
use barewire_dataplane::seal::{KEY_MAX, KEY_MIN};
use barewire_dataplane::types::EpAddr;
use barewire_driver::mem::{IOV_LIMIT, Locked};
pub use barewire_driver::open::{Device, PciAddress};
use barewire_driver::port::{PortCaps, Station};

use crate::addr::resolve;
use crate::errno::{Error, OpenError, Result, open_error};
use crate::flags::{Caps, InfoFlags, Mode, MrMode, OpFlags, Order};
use crate::names::{AddrRole, Names, QueryPort, is_placeholder};
use crate::settings::{DEFAULT_PORT, Progress, Settings, Threading};
use crate::tclass;

/// A version of the interface, as `FI_VERSION(major, minor)`.
pub const fn version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

/// The newest version of the libfabric interface that is supported.
pub const API_VERSION: u32 = version(2, 6);

/// Most transmit contexts, and most receive contexts, of a scalable endpoint.
pub const CTX_MAX: usize = Node::CTX_MAX;

/// Most remote ranges of one call (`rma_iov_limit`).
pub const RMA_IOV_LIMIT: usize = RmaList::MAX;

/// Most pieces that one registration may have (`mr_iov_limit`).
pub const MR_IOV_LIMIT: usize = 8;

/// Type of an address vector (`enum fi_av_type`). An `fi_addr_t` of either type is an index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AvType {
    /// `FI_AV_UNSPEC`: a table.
    #[default]
    Unspec,
    /// `FI_AV_MAP`: accepted for old applications.
    Map,
    /// `FI_AV_TABLE`: indexes 0, 1, 2 ... in the order of insertion.
    Table,
}

/// A connection request (`fi_info.handle` of an `FI_CONNREQ`), to be accepted by an endpoint opened
/// with it ([`Info::handle`]), or rejected by [`crate::PassiveEndpoint::reject`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConnRequest {
    /// Number of the connection at the peer.
    pub(crate) number: u32,
    pub(crate) answers: bool,
    pub(crate) side: EpAddr,
    pub(crate) ep: EpAddr,
    reply: SharedReply,
}

/// The listener of a request, which can reject it for a program that has only the request.
pub(crate) trait Rejecter: Send + Sync {
    /// Rejects `request` and sends the peer `data`.
    fn refuse(&self, request: &ConnRequest, data: &[u8]) -> Result<()>;
}

/// Whether a request was answered; shared by its copies.
#[derive(Clone, Debug)]
struct SharedReply(Arc<ReplyState>);

#[derive(Debug)]
struct ReplyState {
    replied: AtomicBool,
    /// Does not keep the listener open.
    listener: Weak<dyn Rejecter>,
}

impl PartialEq for SharedReply {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for SharedReply {}

impl ConnRequest {
    pub(crate) fn new(
        number: u32,
        answers: bool,
        [side, ep]: [EpAddr; 2],
        listener: Weak<dyn Rejecter>,
    ) -> Self {
        let answer = ReplyState { replied: AtomicBool::new(false), listener };
        Self { number, answers, side, ep, reply: SharedReply(Arc::new(answer)) }
    }

    /// Answers the request by `answer`, once. It stays unanswered if `answer` fails.
    ///
    /// # Errors
    /// [`Error::BadFd`]: the request was already answered. Else those of `answer`.
    pub(crate) fn reply_once(&self, answer: impl FnOnce() -> Result<()>) -> Result<()> {
        let replied = &self.reply.0.replied;
        if replied.swap(true, Ordering::Relaxed) {
            return Err(Error::BadFd);
        }
        answer().inspect_err(|_| replied.store(false, Ordering::Relaxed))
    }

    /// Rejects the request through its listener, since the peer would wait for ever otherwise. If
    /// the listener is closed nothing is sent.
    ///
    /// # Errors
    /// [`Error::BadFd`]: the request was already answered. [`Error::NoMem`]: the listener has no
    /// room for another peer; the request stays unanswered.
    pub fn refuse(&self) -> Result<()> {
        let listener = self.reply.0.listener.upgrade();
        self.reply_once(|| listener.map_or(Ok(()), |listener| listener.refuse(self, &[])))
    }

    /// The address of the endpoint that wants to connect.
    pub fn peer(&self) -> EpAddr {
        self.ep
    }

    #[cfg(test)]
    pub(crate) fn of(number: u32, ep: EpAddr) -> Self {
        struct Nobody;

        impl Rejecter for Nobody {
            fn refuse(&self, _: &ConnRequest, _: &[u8]) -> Result<()> {
                Ok(())
            }
        }

        Self::new(number, false, [ep, ep], Weak::<Nobody>::new())
    }
}

/// `fi_fabric_attr.prov_name`.
pub const PROV_NAME: &str = "barewire";

/// `fi_fabric_attr.name`. The only fabric is Ethernet.
pub const FABRIC_NAME: &str = "ethernet";

/// `fi_ep_attr.protocol`: the barewire protocol, with the bit of provider-specific protocols.
pub const PROTOCOL: u32 = 1 << 31 | 0x6277;

/// Version of the wire format.
pub const PROTOCOL_VERSION: u32 = barewire_dataplane::wire::VERSION as u32;

/// All capabilities that an endpoint can be granted.
pub const CAPS: Caps = PRIMARY.union(SECONDARY);

const PRIMARY: Caps = Caps::MSG
    .union(Caps::TAGGED)
    .union(Caps::RMA)
    .union(Caps::ATOMIC)
    .union(Caps::COLLECTIVE)
    .union(Caps::MULTICAST)
    .union(DIRECTIONS)
    .union(ONE_SIDED)
    .union(Caps::ANY_DIRECTED_RECV)
    .union(Caps::AV_USER_ID)
    .union(Caps::NAMED_RX_CTX);

/// Secondary capabilities that are granted without a request: they cost nothing and expose nothing.
/// If the hints name capabilities, `FI_SOURCE` and `FI_SOURCE_ERR` are granted only on request: the
/// first looks up the sender of each message, the second turns a message of an unknown sender into
/// an error entry.
const UNASKED: Caps = Caps::MULTI_RECV
    .union(Caps::TAGGED_MULTI_RECV)
    .union(Caps::FENCE)
    .union(Caps::LOCAL_COMM)
    .union(Caps::REMOTE_COMM);

const SECONDARY: Caps =
    UNASKED.union(Caps::SOURCE).union(Caps::SOURCE_ERR).union(Caps::RMA_EVENT).union(Caps::TRIGGER);

/// Capabilities whose bits have another meaning, or none, before libfabric 2.0. A program of an
/// older interface version neither sees them nor is granted them.
pub const SINCE_2_0: Caps =
    Caps::TAGGED_MULTI_RECV.union(Caps::TAGGED_DIRECTED_RECV).union(Caps::EXACT_DIRECTED_RECV);

const DIRECTIONS: Caps = Caps::SEND.union(Caps::RECV);

const ONE_SIDED: Caps =
    Caps::READ.union(Caps::WRITE).union(Caps::REMOTE_READ).union(Caps::REMOTE_WRITE);

/// The message orders that can be promised. Operations are executed in the order of their posting,
/// except that the bytes of a read are taken when there is room to send them.
const ORDERS: Order = Order::SAS
    .union(Order::SAW)
    .union(Order::WAW)
    .union(Order::WAS)
    .union(Order::RAW)
    .union(Order::RAS)
    .union(Order::RMA_RAW)
    .union(Order::RMA_WAW)
    // An atomic operation is executed when it arrives, and operations arrive in order.
    .union(Order::ATOMIC_RAR)
    .union(Order::ATOMIC_RAW)
    .union(Order::ATOMIC_WAR)
    .union(Order::ATOMIC_WAW);

/// Registration modes that are honoured on request. None is required: an application with `LOCAL`
/// may register local buffers, one with `ALLOCATED` registers allocated memory, and both may be
/// left out.
const MR_MODES: MrMode = MrMode::BASIC
    .union(MrMode::SCALABLE)
    .union(MrMode::LOCAL)
    .union(MrMode::RAW)
    .union(MrMode::VIRT_ADDR)
    .union(MrMode::ALLOCATED)
    .union(MrMode::PROV_KEY)
    .union(MrMode::ENDPOINT);

/// Flags that can be defaults of transmit calls.
pub const TX_OP_FLAGS: OpFlags = OpFlags::COMPLETION
    .union(OpFlags::INJECT)
    .union(OpFlags::INJECT_COMPLETE)
    .union(OpFlags::TRANSMIT_COMPLETE)
    .union(OpFlags::DELIVERY_COMPLETE)
    .union(OpFlags::MATCH_COMPLETE);

/// Flags that can be defaults of receive calls.
pub const RX_OP_FLAGS: OpFlags = OpFlags::COMPLETION.union(OpFlags::MULTI_RECV);

/// Domain capabilities.
const DOMAIN_CAPS: Caps = Caps::LOCAL_COMM.union(Caps::REMOTE_COMM).union(Caps::AV_USER_ID);

/// Longest message, bytes.
pub const MAX_MSG_SIZE: u64 = Node::MAX_MSG_SIZE;

/// Default number of operations that an endpoint can have in flight.
const TX_SIZE: usize = 1024;

/// Default number of receives that an endpoint can have posted.
pub const RX_SIZE: usize = 4096;

/// `FI_SHARED_CONTEXT`: the number of contexts of an endpoint that shares one.
pub const SHARED_CONTEXT: usize = usize::MAX;

/// Endpoints of a domain, and shared contexts.
pub const EP_COUNT: usize = 1 << 16;

/// Largest `err_data` in any form of addresses, bytes: a `sockaddr_in6`.
const ERR_DATA_MAX: usize = 28;

/// Queues and counters of a domain.
const QUEUE_COUNT: usize = 1 << 16;

/// Format of addresses (`fi_info.addr_format`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum AddrFormat {
    /// `FI_FORMAT_UNSPEC`: the native format, 16 bytes ([`EpAddr`]).
    #[default]
    Unspec,
    /// `FI_ADDR_STR`: text such as `barewire://02:00:00:00:00:01/7`.
    Str,
    /// Another format of libfabric, which is not supported.
    Other(u32),
}

/// `enum fi_ep_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum EpType {
    /// `FI_EP_UNSPEC`.
    #[default]
    Unspec,
    /// `FI_EP_MSG`: connected, see [`crate::cm`].
    Msg,
    /// `FI_EP_DGRAM`: not offered.
    Dgram,
    /// `FI_EP_RDM`: reliable, connectionless.
    Rdm,
}

/// `enum fi_resource_mgmt`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum ResourceMgmt {
    /// `FI_RM_UNSPEC`.
    #[default]
    Unspec,
    /// `FI_RM_DISABLED`: the application avoids overruns itself. Queues are protected all the same.
    Disabled,
    /// `FI_RM_ENABLED`: a full queue refuses posts, and nothing is lost.
    Enabled,
}

/// `struct fi_tx_attr`. Sizes of 0 and empty sets are wildcards in hints.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct TxAttr {
    /// Capabilities of the transmit side; a subset of the endpoint's.
    pub caps: Caps,
    /// Default flags of calls without a flags argument.
    pub op_flags: OpFlags,
    /// Message orders that are guaranteed.
    pub msg_order: Order,
    /// Completion orders. None is guaranteed.
    pub comp_order: Order,
    /// Longest inject, bytes.
    pub inject_size: usize,
    /// Most operations in flight.
    pub size: usize,
    /// Most pieces of a gather list.
    pub iov_limit: usize,
    /// Pieces of remote memory at most: 0, there is no remote access yet.
    pub rma_iov_limit: usize,
    /// Traffic class, as in [`crate::tclass`]; 0: that of the domain.
    pub tclass: u32,
}

/// `struct fi_rx_attr`. Sizes of 0 and empty sets are wildcards in hints.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RxAttr {
    /// Capabilities of the receive side; a subset of the endpoint's.
    pub caps: Caps,
    /// Default flags of calls without a flags argument.
    pub op_flags: OpFlags,
    /// Message orders that are guaranteed.
    pub msg_order: Order,
    /// Completion orders. None is guaranteed.
    pub comp_order: Order,
    /// Bytes of unexpected messages that are kept.
    pub total_buffered_recv: usize,
    /// Most posted receives.
    pub size: usize,
    /// Most pieces of a scatter list.
    pub iov_limit: usize,
}

/// `struct fi_ep_attr`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct EndpointAttr {
    /// The type.
    pub ep_type: EpType,
    /// [`PROTOCOL`].
    pub protocol: u32,
    /// [`PROTOCOL_VERSION`].
    pub protocol_version: u32,
    /// Longest message, bytes.
    pub max_msg_size: u64,
    /// Bytes of a prefix before messages: 0, none is needed.
    pub msg_prefix_size: usize,
    /// Which bits of a tag the application uses; all 64 are matched.
    pub mem_tag_format: u64,
    /// Transmit contexts: 1, or 2 to [`CTX_MAX`] of a scalable endpoint, or [`SHARED_CONTEXT`] for
    /// a context that is shared with other endpoints, which has no effect.
    pub tx_ctx_cnt: usize,
    /// Receive contexts: 1, or 2 to [`CTX_MAX`] of a scalable endpoint, or [`SHARED_CONTEXT`] for a
    /// context that is shared with other endpoints of the raw API.
    pub rx_ctx_cnt: usize,
    /// A key of the domain, which the endpoint uses in any case; empty for the same. Other keys are
    /// refused.
    pub auth_key: AuthKey,
}

/// The bytes of a key; empty for no key. They are in locked memory that is left out of core dumps,
/// and are overwritten on drop. `Debug` does not show them.
#[derive(Clone, Default)]
pub struct AuthKey(Option<Locked<[u8]>>);

impl AuthKey {
    /// A copy of these bytes. Of more than 4,096 bytes, which no key has, the first 4,096.
    pub fn new(bytes: &[u8]) -> Self {
        let bytes = &bytes[..bytes.len().min(4096)];
        Self((!bytes.is_empty()).then(|| Locked::copy_of(bytes)))
    }
}

impl PartialEq for AuthKey {
    fn eq(&self, other: &Self) -> bool {
        **self == **other
    }
}

impl Eq for AuthKey {}

impl fmt::Debug for AuthKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.len())
    }
}

impl Deref for AuthKey {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.0.as_deref().unwrap_or_default()
    }
}

/// `struct fi_domain_attr`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct DomainAttr {
    /// The port, such as `shm:job7`.
    pub name: Option<String>,
    /// Threading level of the application.
    pub threading: Threading,
    /// Progress of connections and events.
    pub control_progress: Progress,
    /// Progress of data transfers.
    pub data_progress: Progress,
    /// Behaviour of full queues.
    pub resource_mgmt: ResourceMgmt,
    /// Type of address vectors.
    pub av_type: AvType,
    /// Registration modes: none is required of the application.
    pub mr_mode: MrMode,
    /// Bytes of a key.
    pub mr_key_size: usize,
    /// Bytes of remote CQ data.
    pub cq_data_size: usize,
    /// Most completion queues.
    pub cq_cnt: usize,
    /// Most endpoints.
    pub ep_cnt: usize,
    /// Transmit contexts of an endpoint.
    pub max_ep_tx_ctx: usize,
    /// Receive contexts of an endpoint.
    pub max_ep_rx_ctx: usize,
    /// Most counters.
    pub cntr_cnt: usize,
    /// Most pieces of a registration.
    pub mr_iov_limit: usize,
    /// Capabilities of the domain.
    pub caps: Caps,
    /// The key that seals frames on a wire, 16 to 1,024 bytes; empty for the key of the settings,
    /// if any.
    pub auth_key: AuthKey,
    /// `FI_AV_AUTH_KEY`: keys are those of address vectors
    /// ([`Av::insert_auth_key`](crate::Av::insert_auth_key)), up to 4, each of another tenant.
    /// `auth_key` is empty then, key files are not read, and the port leaves this machine.
    pub av_auth_key: bool,
    /// Largest `err_data`, bytes: an address.
    pub max_err_data: usize,
    /// Most registrations. A domain opened with a number has room for as many, up to 2^20, and for
    /// no fewer than 65,536.
    pub mr_cnt: usize,
    /// Traffic class, as in [`crate::tclass`], by which the port marks frames; 0: that of
    /// the endpoints.
    pub tclass: u32,
}

/// `struct fi_fabric_attr`.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct FabricAttr {
    /// [`FABRIC_NAME`].
    pub name: Option<String>,
    /// [`PROV_NAME`].
    pub prov_name: Option<String>,
    /// Version of barewire, as [`version`].
    pub prov_version: u32,
    /// Interface version that the application requested.
    pub api_version: u32,
}

/// `struct fi_info`: hints for [`getinfo`], and one answer of it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct Info {
    /// Capabilities.
    pub caps: Caps,
    /// Modes that the application supports. The provider requires none; `BUFFERED_RECV` requests
    /// buffered receive.
    pub mode: Mode,
    /// Format of addresses.
    pub addr_format: AddrFormat,
    /// The endpoint's own address, in `addr_format`. Only its number counts if its MAC is zero.
    pub src_addr: Option<Vec<u8>>,
    /// The peer's address, in `addr_format`.
    pub dest_addr: Option<Vec<u8>>,
    /// Transmit side.
    pub tx_attr: TxAttr,
    /// Receive side.
    pub rx_attr: RxAttr,
    /// Endpoint.
    pub ep_attr: EndpointAttr,
    /// Domain.
    pub domain_attr: DomainAttr,
    /// Fabric.
    pub fabric_attr: FabricAttr,
    /// The request that an endpoint of type `FI_EP_MSG` is opened to accept.
    pub handle: Option<ConnRequest>,
}

/// Returns the fabric interfaces that match the hints, best first, with the settings of the
/// environment.
///
/// `node` and `service` name an address as [`resolve`] takes it: the local one with
/// [`InfoFlags::SOURCE`] (a service alone then requests that endpoint number), else the peer's. On
/// ports that leave the machine they may also be a host and a service number, which may need a
/// query of other stations. A query takes [`QUERY_TIMEOUT`](crate::names::QUERY_TIMEOUT) if no
/// station answers ([`Names::find`]).
///
/// # Errors
/// - [`Error::NoData`]: no interface matches.
/// - [`Error::NoSys`]: `version` is newer than [`API_VERSION`].
/// - [`Error::Invalid`]: `node` and `service` name no address, or an environment variable has an
///   invalid value (logged).
///
/// Source: fi_getinfo(3).
#[doc(alias = "fi_getinfo")]
pub fn getinfo(
    version: u32,
    node: Option<&str>,
    service: Option<&str>,
    flags: InfoFlags,
    hints: Option<&Info>,
) -> Result<Vec<Info>> {
    let settings = Settings::from_env().map_err(|e| {
        tracing::error!("{e}");
        Error::Invalid("environment")
    })?;
    getinfo_with(&settings, version, node, service, flags, hints)
}

/// As [`getinfo`], with given settings.
///
/// # Errors
/// As [`getinfo`].
pub fn getinfo_with(
    settings: &Settings,
    version: u32,
    node: Option<&str>,
    service: Option<&str>,
    flags: InfoFlags,
    hints: Option<&Info>,
) -> Result<Vec<Info>> {
    if version > API_VERSION {
        return Err(Error::NoSys);
    }
    if !InfoFlags::all().contains(flags) {
        return Err(Error::BadFlags);
    }
    let wild = Info::default();
    let hints = hints.unwrap_or(&wild);
    check_fabric(&hints.fabric_attr)?;
    let mut answers = Vec::new();
    if let Some(port) = port_named(settings, hints) {
        // A port that does not open is not offered.
        let port = choose_port(&port).map_err(|e| {
            tracing::warn!("{e}");
            Error::NoData
        })?;
        let by_vectors = hints.domain_attr.av_auth_key;
        if by_vectors && stays_in_memory(&port) {
            tracing::warn!("{port}: FI_AV_AUTH_KEY needs a port that leaves the machine");
            return Err(Error::NoData);
        }
        let mut known = if version < self::version(2, 0) { CAPS - SINCE_2_0 } else { CAPS };
        // Members of a collective group are in one address vector, which a connected endpoint does
        // not have, and share one key.
        if hints.ep_attr.ep_type == EpType::Msg || by_vectors {
            known -= Caps::COLLECTIVE;
        }
        known.set(Caps::MULTICAST, has_multicast(settings, hints, &port));
        let mut answer = offer(settings, hints, port, known);
        answer.fabric_attr.api_version = version;
        if !flags.contains(InfoFlags::PROV_ATTR_ONLY) {
            check(settings, hints, &answer, known)?;
            addresses(&mut answer, hints, (node, service), flags, settings)?;
        }
        answers.push(answer);
    }
    if answers.is_empty() { Err(Error::NoData) } else { Ok(answers) }
}

/// As [`getinfo`], with the flags as libfabric's word.
///
/// # Errors
/// As [`getinfo`]; [`Error::BadFlags`] for an unknown bit.
pub fn getinfo_raw(
    version: u32,
    node: Option<&str>,
    service: Option<&str>,
    flags: u64,
    hints: Option<&Info>,
) -> Result<Vec<Info>> {
    let flags = InfoFlags::from_bits(flags).ok_or(Error::BadFlags)?;
    getinfo(version, node, service, flags, hints)
}

/// Whether a domain on the port `name` would open, as far as can be seen without opening it. Costs
/// a few system calls and leaves nothing behind.
///
/// # Errors
/// The error that [`Fabric::domain`](crate::Fabric::domain) would return.
pub fn check_port(name: &str) -> std::result::Result<(), OpenError> {
    barewire_driver::open::check(name).map_err(open_error)
}

/// The device of the port `name`, or of the port that its patterns and preferences select on this
/// host. Unknown properties are `None`, 0 or empty. Opens nothing; costs about ten system calls.
pub fn port_device(name: &str) -> Device {
    use barewire_driver::open::{choose, device};
    device(choose(name).as_deref().unwrap_or(name))
}

/// Whether frames of the port `name` are never sealed, as they stay in this machine's memory.
/// (Frames of a `fault(...)` port are sealed.)
fn stays_in_memory(name: &str) -> bool {
    let kind = barewire_driver::open::kind_and_device(name).map(|(kind, _)| kind);
    kind.is_some_and(|kind| ["shm", "memif"].contains(&kind)) && !name.contains("fault(")
}

/// The port that the patterns and preferences of `name` select on this host, if a domain on it
/// would open.
fn choose_port(name: &str) -> std::result::Result<String, OpenError> {
    let port = barewire_driver::open::choose(name).map_err(open_error)?;
    check_port(&port).map(|()| port)
}

/// The name of the port: that of the hints, of the settings, or the default segment. `None`: the
/// hints name no known port.
pub fn port_named(settings: &Settings, hints: &Info) -> Option<String> {
    match &hints.domain_attr.name {
        Some(name) => Some(name.clone()).filter(|name| barewire_driver::open::is_known(name)),
        None => Some(settings.port.clone().unwrap_or_else(|| DEFAULT_PORT.to_owned())),
    }
}

fn check_fabric(hint: &FabricAttr) -> Result<()> {
    let is = |hint: &Option<String>, ours: &str| hint.as_deref().is_none_or(|h| h == ours);
    if is(&hint.name, FABRIC_NAME) && is(&hint.prov_name, PROV_NAME) {
        Ok(())
    } else {
        Err(Error::NoData)
    }
}

/// The interface on `port`, reduced to the hints and to the capabilities in `known`.
fn offer(settings: &Settings, hints: &Info, port: String, known: Caps) -> Info {
    let caps = grant(hints.caps) & known;
    let side = |asked: Caps, others: Caps| {
        let caps = if asked.is_empty() { caps } else { with_directions(asked) & caps };
        caps - others
    };
    let (tx, rx) = (&hints.tx_attr, &hints.rx_attr);
    let (tx_max, rx_max) = table_sizes(settings);
    let (tx_usual, rx_usual) = usual_sizes(settings);
    let size = |asked: usize, usual: usize, max: usize| match asked {
        0 => usual,
        n => n.min(max),
    };
    let order = |asked: Order| if asked.is_empty() { Order::SAS } else { asked };
    Info {
        caps,
        mode: hints.mode & Mode::BUFFERED_RECV,
        addr_format: hints.addr_format,
        src_addr: None,
        dest_addr: None,
        tx_attr: TxAttr {
            caps: side(tx.caps, Caps::RECV | Caps::REMOTE_READ | Caps::REMOTE_WRITE),
            op_flags: tx.op_flags,
            msg_order: order(tx.msg_order),
            comp_order: Order::empty(),
            inject_size: Node::INJECT_SIZE,
            size: size(tx.size, tx_usual, tx_max),
            iov_limit: IOV_LIMIT,
            rma_iov_limit: RMA_IOV_LIMIT,
            tclass: tx.tclass,
        },
        rx_attr: RxAttr {
            caps: side(rx.caps, Caps::SEND | Caps::READ | Caps::WRITE),
            op_flags: rx.op_flags,
            msg_order: order(rx.msg_order),
            comp_order: Order::empty(),
            total_buffered_recv: buffered(settings),
            size: size(rx.size, rx_usual, rx_max),
            iov_limit: IOV_LIMIT,
        },
        ep_attr: EndpointAttr {
            ep_type: match hints.ep_attr.ep_type {
                EpType::Msg => EpType::Msg,
                _ => EpType::Rdm,
            },
            protocol: PROTOCOL,
            protocol_version: PROTOCOL_VERSION,
            max_msg_size: MAX_MSG_SIZE,
            msg_prefix_size: 0,
            mem_tag_format: match hints.ep_attr.mem_tag_format {
                0 => u64::MAX,
                asked => asked,
            },
            tx_ctx_cnt: hints.ep_attr.tx_ctx_cnt.max(1),
            rx_ctx_cnt: hints.ep_attr.rx_ctx_cnt.max(1),
            auth_key: hints.ep_attr.auth_key.clone(),
        },
        domain_attr: offer_domain(settings, hints, port),
        fabric_attr: FabricAttr {
            name: Some(FABRIC_NAME.to_owned()),
            prov_name: Some(PROV_NAME.to_owned()),
            prov_version: version(0, 1),
            api_version: 0,
        },
        handle: None,
    }
}

/// Whether endpoints with these hints may join multicast groups: the domain has no key, the port
/// has broadcast, and the endpoint is connectionless, with `FI_MSG` and one context.
fn has_multicast(settings: &Settings, hints: &Info, port: &str) -> bool {
    let (domain, ep) = (&hints.domain_attr, &hints.ep_attr);
    let own = !domain.auth_key.is_empty() || !ep.auth_key.is_empty() || domain.av_auth_key;
    let has_key = own || !settings.key_files.is_empty() || settings.certificate.is_some();
    let plain = ep.ep_type != EpType::Msg && ep.tx_ctx_cnt <= 1 && ep.rx_ctx_cnt <= 1;
    plain && !has_key && hints.caps.contains(Caps::MSG) && Names::of(port).has_groups()
}

/// Sizes of a domain's tables: operations in flight, and posted receives.
fn table_sizes(settings: &Settings) -> (usize, usize) {
    let defaults = NodeSettings::default();
    let tx = settings.tx_max.unwrap_or(defaults.tx_wr_max);
    (tx, settings.rx_max.unwrap_or(defaults.rx_wr_max))
}

/// Default sizes of an endpoint: operations in flight, and posted receives.
pub(crate) fn usual_sizes(settings: &Settings) -> (usize, usize) {
    let (tx_max, rx_max) = table_sizes(settings);
    (TX_SIZE.min(tx_max), RX_SIZE.min(rx_max))
}

/// Bytes of unexpected messages that a domain keeps.
fn buffered(settings: &Settings) -> usize {
    settings.unexpected_bytes.unwrap_or(NodeSettings::default().unexpected_bytes)
}

/// Regions that a domain with these attributes has room for.
pub(crate) fn mr_max(domain: &DomainAttr) -> usize {
    domain.mr_cnt.max(NodeSettings::default().mr_max)
}

fn offer_domain(settings: &Settings, hints: &Info, port: String) -> DomainAttr {
    let hint = &hints.domain_attr;
    // A key of the endpoint attributes alone becomes the key of the domain.
    let auth_key = match hint.auth_key.is_empty() && !hint.av_auth_key {
        true => hints.ep_attr.auth_key.clone(),
        false => hint.auth_key.clone(),
    };
    let progress = |asked: Progress| match (asked, settings.progress) {
        (Progress::Unspec, Progress::Unspec) => Progress::Manual,
        (Progress::Unspec, set) => set,
        (asked, _) => asked,
    };
    let threading = match (hint.threading, settings.threading) {
        (Threading::Unspec, Threading::Unspec) => Threading::Safe,
        (Threading::Unspec, set) => set,
        (asked, _) => asked,
    };
    DomainAttr {
        name: Some(port),
        threading,
        control_progress: progress(hint.control_progress),
        data_progress: progress(hint.data_progress),
        resource_mgmt: ResourceMgmt::Enabled,
        av_type: if hint.av_type == AvType::Map { AvType::Map } else { AvType::Table },
        // No mode is required. Modes that change the meaning of keys and addresses are honoured on
        // request; `BASIC` and `SCALABLE` are the old names of a set of modes.
        mr_mode: hint.mr_mode & MR_MODES,
        mr_key_size: 8,
        cq_data_size: 8,
        cq_cnt: QUEUE_COUNT,
        ep_cnt: EP_COUNT,
        max_ep_tx_ctx: CTX_MAX,
        max_ep_rx_ctx: CTX_MAX,
        cntr_cnt: QUEUE_COUNT,
        mr_iov_limit: MR_IOV_LIMIT,
        caps: DOMAIN_CAPS,
        auth_key,
        av_auth_key: hint.av_auth_key,
        max_err_data: EpAddr::LEN,
        mr_cnt: mr_max(hint),
        tclass: hint.tclass,
    }
}

/// The capabilities granted for these hints.
fn grant(asked: Caps) -> Caps {
    if asked.is_empty() {
        // Named contexts and exact sources change how a program addresses contexts and matches
        // receives, so they are granted on request alone; groups depend on the port.
        let asked_alone = Caps::SOURCE_ERR | Caps::NAMED_RX_CTX | Caps::EXACT_DIRECTED_RECV;
        return CAPS - asked_alone - Caps::MULTICAST;
    }
    with_directions(asked) | UNASKED
}

/// Adds directions: send and receive for messages without a direction, and all four for one-sided
/// operations without one.
pub(crate) fn with_directions(mut caps: Caps) -> Caps {
    let groups = [(Caps::MSG | Caps::TAGGED, DIRECTIONS), (Caps::RMA | Caps::ATOMIC, ONE_SIDED)];
    for (kinds, directions) in groups {
        if caps.intersects(kinds) && !caps.intersects(directions) {
            caps |= directions;
        }
    }
    caps
}

/// Checks that the answer satisfies every hint.
fn check(settings: &Settings, hints: &Info, answer: &Info, known: Caps) -> Result<()> {
    let (tx, rx) = (&hints.tx_attr, &hints.rx_attr);
    let holds = known.contains(hints.caps)
        && matches!(hints.addr_format, AddrFormat::Unspec | AddrFormat::Str)
        && answer.caps.contains(tx.caps | rx.caps)
        && TX_OP_FLAGS.contains(tx.op_flags)
        && RX_OP_FLAGS.contains(rx.op_flags)
        && tclass::is_fit(hints.domain_attr.tclass, tx.tclass)
        && fits_tx(tx, settings)
        && fits_rx(rx, settings)
        && rx.total_buffered_recv <= buffered(settings)
        && check_ep(&hints.ep_attr)
        && is_one_key(hints)
        // A connection is of no address vector.
        && !(hints.domain_attr.av_auth_key && hints.ep_attr.ep_type == EpType::Msg)
        && check_domain(&hints.domain_attr);
    if holds { Ok(()) } else { Err(Error::NoData) }
}

/// Whether a transmit context can have that, but for its default flags.
fn fits_tx(tx: &TxAttr, settings: &Settings) -> bool {
    CAPS.contains(tx.caps)
        && ORDERS.contains(tx.msg_order)
        && tx.comp_order.is_empty()
        && tx.inject_size <= Node::INJECT_SIZE
        && tx.iov_limit <= IOV_LIMIT
        && tx.rma_iov_limit <= RMA_IOV_LIMIT
        && tx.size <= table_sizes(settings).0
}

/// Whether a receive context can have that, but for its default flags.
fn fits_rx(rx: &RxAttr, settings: &Settings) -> bool {
    CAPS.contains(rx.caps)
        && ORDERS.contains(rx.msg_order)
        && rx.comp_order.is_empty()
        && rx.iov_limit <= IOV_LIMIT
        && rx.size <= table_sizes(settings).1
}

/// Refuses attributes of a transmit context beyond those that [`getinfo`] offers.
///
/// # Errors
/// [`Error::BadFlags`]: a default flag that is none of transmit calls. [`Error::Invalid`]: else.
pub(crate) fn check_tx(tx: &TxAttr, settings: &Settings) -> Result<()> {
    if !TX_OP_FLAGS.contains(tx.op_flags) {
        return Err(Error::BadFlags);
    }
    fits_tx(tx, settings).then_some(()).ok_or(Error::Invalid("tx_attr: beyond what is offered"))
}

/// As [`check_tx`], of a receive context.
///
/// # Errors
/// As there.
pub(crate) fn check_rx(rx: &RxAttr, settings: &Settings) -> Result<()> {
    if !RX_OP_FLAGS.contains(rx.op_flags) {
        return Err(Error::BadFlags);
    }
    fits_rx(rx, settings).then_some(()).ok_or(Error::Invalid("rx_attr: beyond what is offered"))
}

/// Refuses attributes of an endpoint beyond those that [`getinfo`] offers.
///
/// # Errors
/// As of [`check_tx`].
pub(crate) fn check_limits(info: &Info, settings: &Settings) -> Result<()> {
    check_tx(&info.tx_attr, settings)?;
    check_rx(&info.rx_attr, settings)?;
    if !CAPS.contains(info.caps) || !fits_ep(&info.ep_attr) {
        return Err(Error::Invalid("caps, ep_attr: beyond what is offered"));
    }
    Ok(())
}

/// Refuses attributes of a domain beyond those that [`getinfo`] offers.
///
/// # Errors
/// [`Error::Invalid`].
pub(crate) fn check_domain_limits(domain: &DomainAttr) -> Result<()> {
    fits_domain(domain).then_some(()).ok_or(Error::Invalid("domain_attr: beyond what is offered"))
}

fn fits_ep(ep: &EndpointAttr) -> bool {
    (ep.protocol == 0 || ep.protocol == PROTOCOL)
        && (ep.protocol_version == 0 || ep.protocol_version == PROTOCOL_VERSION)
        && ep.max_msg_size <= MAX_MSG_SIZE
        && ep.msg_prefix_size == 0
}

fn check_ep(hint: &EndpointAttr) -> bool {
    // A connected endpoint is not scalable.
    let most = if hint.ep_type == EpType::Msg { 1 } else { CTX_MAX };
    let contexts = |count| count <= most || count == SHARED_CONTEXT;
    hint.ep_type != EpType::Dgram
        && fits_ep(hint)
        && [hint.tx_ctx_cnt, hint.rx_ctx_cnt].into_iter().all(contexts)
        && is_length_of_key(&hint.auth_key)
}

/// Whether a hint may hold these bytes as a key.
fn is_length_of_key(key: &AuthKey) -> bool {
    key.is_empty() || (KEY_MIN..=KEY_MAX).contains(&key.len())
}

/// Whether the key that a hint has for endpoints can be the one of their domain.
fn is_one_key(hints: &Info) -> bool {
    let (of_ep, domain) = (&hints.ep_attr.auth_key, &hints.domain_attr);
    let own = domain.auth_key.is_empty() && !domain.av_auth_key;
    of_ep.is_empty() || own || *of_ep == domain.auth_key
}

fn check_domain(hint: &DomainAttr) -> bool {
    fits_domain(hint)
        && is_length_of_key(&hint.auth_key)
        && (!hint.av_auth_key || hint.auth_key.is_empty())
}

/// Whether a domain can have that, but for its key.
fn fits_domain(hint: &DomainAttr) -> bool {
    hint.mr_key_size <= 8
        && hint.cq_data_size <= 8
        && hint.cq_cnt <= QUEUE_COUNT
        && hint.ep_cnt <= EP_COUNT
        && hint.max_ep_tx_ctx.max(hint.max_ep_rx_ctx) <= CTX_MAX
        && hint.cntr_cnt <= QUEUE_COUNT
        && hint.mr_iov_limit <= MR_IOV_LIMIT
        && hint.mr_cnt <= Node::MR_MAX
        && DOMAIN_CAPS.contains(hint.caps)
        && hint.max_err_data <= ERR_DATA_MAX
        // A request for both old models is contradictory.
        && !hint.mr_mode.contains(MrMode::BASIC | MrMode::SCALABLE)
}

/// Fills in the addresses that node, service and hints name.
fn addresses(
    answer: &mut Info,
    hints: &Info,
    (node, service): (Option<&str>, Option<&str>),
    flags: InfoFlags,
    settings: &Settings,
) -> Result<()> {
    let source = flags.contains(InfoFlags::SOURCE);
    let format = answer.addr_format;
    let port = answer.domain_attr.name.clone().unwrap_or_default();
    let names = Names::of(&port);
    let named = match (node, service) {
        (None, None) => None,
        (node, service) if names != Names::Labels => {
            let role = if source { AddrRole::Source } else { AddrRole::Peer };
            let numeric = flags.contains(InfoFlags::NUMERICHOST);
            names.find(node, service, role, numeric, &QueryPort::new(&port, settings))?
        }
        (Some(node), service) => Some(resolve(node, service)?),
        (None, Some(service)) if source => {
            let ep = service.parse().map_err(|_| Error::Invalid("service: not a number"))?;
            Some(EpAddr { station: Station::default(), ep, incarnation: 0 })
        }
        (None, Some(_)) => return Err(Error::Invalid("service: a peer's needs its node")),
    };
    let text = |a: EpAddr| match format {
        AddrFormat::Str => a.to_string().into_bytes(),
        _ => a.to_bytes().to_vec(),
    };
    let wrong = |given: &Option<Vec<u8>>| {
        given.as_ref().is_some_and(|bytes| decode(format, bytes).is_err())
    };
    if wrong(&hints.src_addr) || wrong(&hints.dest_addr) {
        return Err(Error::NoData);
    }
    answer.src_addr = hints.src_addr.clone();
    answer.dest_addr = hints.dest_addr.clone();
    if source {
        answer.src_addr = named.map(text);
    } else if let Some(addr) = named {
        answer.dest_addr = Some(text(addr));
    }
    Ok(())
}

/// An address of an `Info`, of which the MAC may be zero.
fn decode(format: AddrFormat, bytes: &[u8]) -> Result<EpAddr> {
    if format == AddrFormat::Str {
        let end = bytes.iter().position(|&b| b == 0).unwrap_or(bytes.len());
        let text = std::str::from_utf8(&bytes[..end]);
        return resolve(text.map_err(|_| Error::Invalid("address: not text"))?, None);
    }
    let bytes: &[u8; EpAddr::LEN] =
        bytes.try_into().map_err(|_| Error::Invalid("address: not 16 bytes"))?;
    if bytes[..6] == [0; 6] {
        let ep = u16::from_le_bytes([bytes[6], bytes[7]]);
        return Ok(EpAddr { station: Station::default(), ep, incarnation: 0 });
    }
    EpAddr::from_bytes(bytes)
}

/// The number in an address of an endpoint at this port.
///
/// # Errors
/// [`Error::AddrNotAvail`]: it is another port's. [`Error::Invalid`]: it is none.
pub(crate) fn number_at(port: &PortCaps, format: AddrFormat, bytes: &[u8]) -> Result<u16> {
    let addr = decode(format, bytes)?;
    let is_any =
        |addr| is_placeholder(addr) && matches!(Names::of(&port.name), Names::Queried { .. });
    if addr.station != Station::default() && addr.station != port.station && !is_any(addr) {
        return Err(Error::AddrNotAvail);
    }
    Ok(addr.ep)
}

impl Info {
    /// The peer's address, if there is one.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it is not one in `addr_format`.
    pub fn dest(&self) -> Result<Option<EpAddr>> {
        self.dest_addr.as_ref().map(|bytes| decode(self.addr_format, bytes)).transpose()
    }

    /// The endpoint's own address, if there is one; its MAC may be zero.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it is not one in `addr_format`.
    pub(crate) fn source(&self) -> Result<Option<EpAddr>> {
        self.src_addr.as_ref().map(|bytes| decode(self.addr_format, bytes)).transpose()
    }

    /// The endpoint number that `src_addr` requests.
    ///
    /// # Errors
    /// [`Error::AddrNotAvail`]: the source address is another port's.
    pub(crate) fn source_number(&self, port: &PortCaps) -> Result<Option<u16>> {
        let Some(bytes) = &self.src_addr else { return Ok(None) };
        number_at(port, self.addr_format, bytes).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ask(change: impl FnOnce(&mut Info)) -> Result<Vec<Info>> {
        let mut hints = Info::default();
        change(&mut hints);
        let s = Settings::default();
        getinfo_with(&s, API_VERSION, None, None, InfoFlags::empty(), Some(&hints))
    }

    #[test]
    fn one_of_everything_that_is_not_offered_is_no_data() {
        let refused: &[fn(&mut Info)] = &[
            |i| i.caps = Caps::RMA | Caps::SHARED_AV,
            |i| i.caps = Caps::TAGGED | Caps::MULTICAST,
            |i| {
                i.caps = Caps::MSG | Caps::MULTICAST;
                i.ep_attr.ep_type = EpType::Msg;
            },
            |i| i.addr_format = AddrFormat::Other(2),
            |i| (i.caps, i.tx_attr.caps) = (Caps::MSG, Caps::RMA),
            |i| i.tx_attr.inject_size = 257,
            |i| i.tx_attr.iov_limit = 9,
            |i| i.tx_attr.rma_iov_limit = 9,
            |i| i.tx_attr.msg_order = Order::WAR,
            |i| i.tx_attr.msg_order = Order::RAR,
            |i| i.rx_attr.msg_order = Order::SAR,
            |i| i.tx_attr.msg_order = Order::RMA_WAR,
            |i| i.tx_attr.msg_order = Order::RMA_RAR,
            |i| i.tx_attr.comp_order = Order::SAS,
            |i| i.tx_attr.size = 1 << 20,
            |i| i.tx_attr.op_flags = OpFlags::PEEK,
            |i| i.rx_attr.iov_limit = 9,
            |i| i.rx_attr.size = 1 << 30,
            |i| i.rx_attr.total_buffered_recv = usize::MAX,
            |i| i.rx_attr.op_flags = OpFlags::INJECT,
            |i| i.ep_attr.ep_type = EpType::Dgram,
            |i| i.ep_attr.protocol = 1,
            |i| i.ep_attr.max_msg_size = MAX_MSG_SIZE + 1,
            |i| i.ep_attr.tx_ctx_cnt = CTX_MAX + 1,
            |i| i.ep_attr.rx_ctx_cnt = CTX_MAX + 1,
            |i| (i.ep_attr.ep_type, i.ep_attr.tx_ctx_cnt) = (EpType::Msg, 2),
            |i| (i.ep_attr.ep_type, i.caps) = (EpType::Msg, Caps::MSG | Caps::COLLECTIVE),
            |i| i.domain_attr.max_ep_rx_ctx = CTX_MAX + 1,
            |i| i.ep_attr.auth_key = AuthKey::new(&[1]),
            |i| i.domain_attr.auth_key = AuthKey::new(&[1]),
            |i| i.domain_attr.name = Some("no:such:port".into()),
            |i| i.domain_attr.cq_data_size = 9,
            |i| i.domain_attr.caps = Caps::SHARED_AV,
            |i| i.fabric_attr.name = Some("infiniband".into()),
            |i| i.fabric_attr.prov_name = Some("tcp".into()),
            |i| i.src_addr = Some(vec![1, 2, 3]),
        ];
        for (i, change) in refused.iter().enumerate() {
            assert_eq!(ask(change).err(), Some(Error::NoData), "case {i}");
        }
    }

    /// With keys of address vectors, features that a domain then refuses are not offered.
    #[test]
    fn keys_of_vectors_offer_no_more_than_they_open() {
        let ask = |port: &str, change: fn(&mut Info)| {
            let mut hints = Info::default();
            hints.domain_attr.name = Some(port.to_owned());
            hints.domain_attr.av_auth_key = true;
            change(&mut hints);
            let (settings, flags) = (Settings::default(), InfoFlags::empty());
            getinfo_with(&settings, API_VERSION, None, None, flags, Some(&hints))
        };
        let udp = "udp:127.0.0.1";
        let offered = ask(udp, |_| ()).unwrap().remove(0);
        assert!(offered.domain_attr.av_auth_key && !offered.caps.contains(Caps::COLLECTIVE));
        assert_eq!(ask(udp, |i| i.caps = Caps::COLLECTIVE).err(), Some(Error::NoData));
        assert_eq!(ask(udp, |i| i.ep_attr.ep_type = EpType::Msg).err(), Some(Error::NoData));
        assert_eq!(ask("shm", |_| ()).err(), Some(Error::NoData));
        assert_eq!(ask("pcap(file=/dev/null):shm", |_| ()).err(), Some(Error::NoData));
        assert!(ask("fault(loss=0.01):shm", |_| ()).is_ok(), "what may be lost is sealed");
    }

    /// Bits with another meaning before 2.0 are neither returned nor accepted.
    #[test]
    fn capabilities_of_2_0_are_not_those_of_an_older_program() {
        let ask = |version, caps| {
            let (settings, flags) = (Settings::default(), InfoFlags::empty());
            let hints = Info { caps, ..Info::default() };
            let answers = getinfo_with(&settings, version, None, None, flags, Some(&hints));
            answers.map(|mut list| list.remove(0).caps & SINCE_2_0)
        };
        for one in SINCE_2_0.iter() {
            assert_eq!(ask(version(1, 22), Caps::TAGGED | one), Err(Error::NoData), "{one:?}");
            assert!(ask(version(2, 0), Caps::TAGGED | one).unwrap().contains(one), "{one:?}");
        }
        let multi = Caps::TAGGED_MULTI_RECV;
        let of_all = multi | Caps::TAGGED_DIRECTED_RECV;
        for (caps, granted) in [(Caps::empty(), of_all), (Caps::TAGGED, multi)] {
            assert_eq!(ask(version(1, 22), caps), Ok(Caps::empty()));
            assert_eq!(ask(version(2, 0), caps), Ok(granted));
        }
    }

    #[test]
    fn orders_and_modes_asked_for_are_given() {
        let every_mode = MR_MODES - MrMode::BASIC;
        let asked = |i: &mut Info| {
            (i.tx_attr.msg_order, i.rx_attr.msg_order) = (ORDERS, ORDERS);
            i.domain_attr.mr_mode = every_mode | MrMode::HMEM;
        };
        let got = ask(asked).unwrap().remove(0);
        assert_eq!((got.tx_attr.msg_order, got.rx_attr.msg_order), (ORDERS, ORDERS));
        assert_eq!(got.domain_attr.mr_mode, every_mode);
        assert_eq!(ask(|_| {}).unwrap()[0].domain_attr.mr_mode, MrMode::empty());
    }

    #[test]
    fn sizes_asked_for_are_the_sizes_given() {
        let info = ask(|i| (i.tx_attr.size, i.rx_attr.size) = (2048, 8192)).unwrap();
        assert_eq!((info[0].tx_attr.size, info[0].rx_attr.size), (2048, 8192));
    }

    #[test]
    fn a_source_names_the_endpoints_number() {
        let s = Settings::default();
        let get = |node, service| {
            getinfo_with(&s, API_VERSION, node, service, InfoFlags::SOURCE, None).unwrap().remove(0)
        };
        let station: Station = "02:00:00:00:00:05".parse().unwrap();
        let caps = PortCaps {
            station,
            mtu: 1500,
            lossless: true,
            gather: false,
            rto_floor_ns: 1,
            via_kernel: false,
            tells_presence: false,
            near_mtu: 0,
            link_bps: 0,
            name: "x".into(),
        };
        assert_eq!(get(None, Some("9")).source_number(&caps), Ok(Some(9)));
        assert_eq!(get(Some("02:00:00:00:00:05"), Some("3")).source_number(&caps), Ok(Some(3)));
        let other = get(Some("02:00:00:00:00:06"), Some("3"));
        assert_eq!(other.source_number(&caps), Err(Error::AddrNotAvail));
        assert_eq!(Info::default().source_number(&caps), Ok(None));
    }
}
