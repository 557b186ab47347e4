//! `fi_getinfo`: converts hints from C and answers to C.

use std::ffi::{c_char, c_int, c_void};
use std::net::IpAddr;

use barewire::flags::{Caps, InfoFlags, Mode, MrMode, OpFlags, Order};
use barewire::info::{EP_COUNT, KEYS_MAX, SINCE_2_0};
use barewire::names::{AddrRole, Names, QueryPort, interface_at};
use barewire::settings::DEFAULT_PORT;
use barewire::{
    AuthKey, AvType, DomainAttr as OurDomain, EndpointAttr, EpAddr, EpType, Error,
    FabricAttr as OurFabric, Info, Progress, ResourceMgmt, Result, RxAttr as OurRx, Settings,
    Threading, TxAttr as OurTx,
};

use crate::abi::*;
use crate::addr::{self, Form, ParsedAddr};
use crate::mem::{copy, copy_text, free, zeroed};
use crate::object::class_of;
use crate::{guard, host, known_as, log, nic};

/// Flags of `fi_getinfo` for providers; others are the library's own.
const FLAGS: u64 = FI_PROV_ATTR_ONLY | FI_SOURCE | FI_NUMERICHOST;

/// libfabric's internal flag of a call by one of its utility layers, which would layer itself over
/// this provider and offer the same capabilities.
const LAYERED: u64 = 1 << 59;

/// Capabilities of a transmit context, and of a receive context.
pub(crate) const TX_CAPS: Caps = Caps::MSG
    .union(Caps::TAGGED)
    .union(Caps::RMA)
    .union(Caps::ATOMIC)
    .union(Caps::COLLECTIVE)
    .union(Caps::MULTICAST)
    .union(Caps::SEND)
    .union(Caps::READ)
    .union(Caps::WRITE)
    .union(Caps::FENCE)
    .union(Caps::TRIGGER)
    .union(Caps::NAMED_RX_CTX);
pub(crate) const RX_CAPS: Caps = Caps::MSG
    .union(Caps::TAGGED)
    .union(Caps::RMA)
    .union(Caps::ATOMIC)
    .union(Caps::COLLECTIVE)
    .union(Caps::MULTICAST)
    .union(Caps::RECV)
    .union(Caps::REMOTE_READ)
    .union(Caps::REMOTE_WRITE)
    .union(Caps::MULTI_RECV)
    .union(Caps::TAGGED_MULTI_RECV)
    .union(Caps::ANY_DIRECTED_RECV)
    .union(Caps::SOURCE)
    .union(Caps::SOURCE_ERR)
    .union(Caps::RMA_EVENT)
    .union(Caps::TRIGGER);

/// `fi_provider.getinfo`.
pub(crate) unsafe extern "C" fn getinfo(
    version: u32,
    node: *const c_char,
    service: *const c_char,
    flags: u64,
    hints: *const FiInfo,
    out: *mut *mut FiInfo,
) -> c_int {
    guard::int(|| {
        // SAFETY: libfabric passes strings or NULL, and hints that it has made whole or NULL.
        let (node, service, hints) =
            unsafe { (guard::text(node)?, guard::text(service)?, hints.as_ref()) };
        let settings = known_as::settings().map_err(|e| {
            host::warn_on_stderr(&host::line_of(&e));
            Error::NoData
        })?;
        // SAFETY: as above.
        if !unsafe { is_requested(hints, &settings) } {
            return Err(Error::NoData);
        }
        // SAFETY: as above.
        let (dgram, msg) = unsafe { (wants(hints, FI_EP_DGRAM), wants(hints, FI_EP_MSG)) };
        if flags & LAYERED != 0 && (dgram || msg) || msg && !known_as::offers(FI_EP_MSG) {
            return Err(Error::NoData);
        }
        log::start();
        let ask = GetinfoCall { version, node, service, flags: flags & FLAGS, hints };
        let list = build_answers(&ask, &settings)?;
        // SAFETY: libfabric passes a place for the list.
        unsafe { *out = list };
        Ok(())
    })
}

/// Longest message of an `FI_EP_DGRAM`: that of UDP, since programs allocate memory for the longest
/// one.
pub(crate) const DGRAM_MAX: usize = 64 << 10;

/// The arguments of a `fi_getinfo` call.
struct GetinfoCall<'a> {
    version: u32,
    node: Option<&'a str>,
    service: Option<&'a str>,
    flags: u64,
    hints: Option<&'a FiInfo>,
}

/// Whether this provider was requested by name or by a setting: a program must not change its
/// behaviour because the library is installed.
///
/// # Safety
/// The hints are whole.
unsafe fn is_requested(hints: Option<&FiInfo>, settings: &Settings) -> bool {
    // SAFETY: the caller's promise: the attributes are there or NULL, and so is the name.
    let name = unsafe {
        let attr = hints.and_then(|h| h.fabric_attr.as_ref());
        attr.and_then(|a| guard::text(a.prov_name).ok().flatten())
    };
    let named = name.map(known_as::is_among);
    if known_as::uses_ip_addresses() {
        return named.unwrap_or(true);
    }
    let set = || std::env::var("FI_PROVIDER").is_ok_and(|list| known_as::is_among(&list));
    settings.port.is_some() || named == Some(true) || set()
}

fn build_answers(ask: &GetinfoCall<'_>, settings: &Settings) -> Result<*mut FiInfo> {
    let names = |port: Option<&str>| names_on(port, settings);
    let ParsedInfo { info: mut ours, form, dest, interface } = match ask.hints {
        // SAFETY: libfabric's hints are whole.
        Some(hints) => unsafe { hints_of(hints, ask, names)? },
        None => {
            let form = Form::usual(names(None), ask.node);
            ParsedInfo { info: Info::default(), form, dest: None, interface: None }
        }
    };
    let named = port_or_default(ours.domain_attr.name.as_deref(), settings).to_owned();
    let through = QueryPort::new(&named, settings);
    let names = Names::of(&named);
    if let Some((ip, service)) = dest {
        let (ip, service) = (ip.to_string(), service.to_string());
        let found = names.find(Some(&ip), Some(&service), AddrRole::Peer, true, &through)?;
        ours.dest_addr = found.map(|a| a.to_bytes().to_vec());
    }
    if ask.node.is_some() || ask.service.is_some() {
        let source = ask.flags & FI_SOURCE != 0;
        let role = if source { AddrRole::Source } else { AddrRole::Peer };
        let numeric = ask.flags & FI_NUMERICHOST != 0;
        let named = names.find(ask.node, ask.service, role, numeric, &through)?;
        let named = named.map(|a| a.to_bytes().to_vec());
        if source {
            ours.src_addr = named;
        } else {
            ours.dest_addr = named;
        }
    }
    let flags = InfoFlags::from_bits_truncate(ask.flags) - InfoFlags::SOURCE;
    let version = ask.version.min(barewire::API_VERSION);
    let hinted = ask.hints.map(|_| &ours);
    if let Some(port) = barewire::info::port_named(settings, &ours)
        && let Err(why) = barewire::check_port(&port)
    {
        host::warn_on_stderr(&why.to_string());
    }
    let found = barewire::getinfo_with(settings, version, None, None, flags, hinted)?;
    // SAFETY: libfabric's hints are whole, and their handle is NULL or one of its objects.
    let handle = ask.hints.map_or(std::ptr::null_mut(), |hints| unsafe { passive_handle(hints) });
    let mut list = std::ptr::null_mut();
    for mut info in found.into_iter().rev() {
        if ask.hints.is_none() {
            (info.src_addr, info.dest_addr) = (ours.src_addr.clone(), ours.dest_addr.clone());
        }
        trim(&mut info, ours.caps);
        let Some(one) = to_c(&info, form, interface.as_deref(), ask) else {
            // SAFETY: the list is ours alone.
            unsafe { free_list(list) };
            return Err(Error::NoMem);
        };
        // SAFETY: a fresh structure of ours.
        unsafe { ((*one).next, (*one).handle) = (list, handle) };
        list = one;
    }
    Ok(list)
}

/// The handle of the hints if it is a passive endpoint, which is then the handle of every answer;
/// otherwise NULL.
///
/// # Safety
/// The handle is NULL or an object of libfabric's.
unsafe fn passive_handle(hints: &FiInfo) -> *mut Fid {
    // SAFETY: the caller's promise.
    let class = unsafe { class_of(hints.handle) };
    if class == Ok(FI_CLASS_PEP) { hints.handle } else { std::ptr::null_mut() }
}

/// How a port resolves host and service; of the default port if none is named.
pub(crate) fn names_on(port: Option<&str>, settings: &Settings) -> Names {
    Names::of(port_or_default(port, settings))
}

fn port_or_default<'a>(port: Option<&'a str>, settings: &'a Settings) -> &'a str {
    port.or(settings.port.as_deref()).unwrap_or(DEFAULT_PORT)
}

/// Removes capabilities that are granted on request only, and sorts the others by direction. Hints
/// without capabilities get all: MPICH decides by that answer whether the sender's rank goes into
/// the tag.
fn trim(info: &mut Info, asked: Caps) {
    if !asked.is_empty() {
        info.caps -= (Caps::SOURCE | Caps::ANY_DIRECTED_RECV) - asked;
    }
    info.tx_attr.caps = info.tx_attr.caps & info.caps & TX_CAPS;
    info.rx_attr.caps = info.rx_attr.caps & info.caps & RX_CAPS;
}

/// Converts hints from C, with their address format.
///
/// # Safety
/// The structures of `c` are there or NULL, and whole as of the version.
unsafe fn hints_of(
    c: &FiInfo,
    ask: &GetinfoCall<'_>,
    names: impl FnOnce(Option<&str>) -> Names,
) -> Result<ParsedInfo> {
    // SAFETY: the caller's promise.
    let mut read = unsafe { read_named(c, ask, names)? };
    let info = &mut read.info;
    // The names of modes tell what a program can do for us. We need nothing, and answer so: what
    // is not in the hints of a mode is as good as what is.
    info.mode = Mode::empty();
    // But provider keys cannot be guessed, so a program that supports them gets them.
    info.domain_attr.mr_mode &= MrMode::BASIC | MrMode::SCALABLE | MrMode::PROV_KEY;
    // The library has seen to it that we are meant.
    info.fabric_attr.prov_name = None;
    Ok(read)
}

/// A converted `fi_info`.
pub(crate) struct ParsedInfo {
    pub(crate) info: Info,
    /// Its address format.
    pub(crate) form: Form,
    /// Its destination, if it needs a query. That is made when the destination is inserted or
    /// connected to.
    dest: Option<(IpAddr, u16)>,
    /// The interface that it names, or whose address its source is, where domains are such.
    interface: Option<String>,
}

/// A structure of C as ours: hints, or the answer that a program opens something with. `names` says
/// what host and port mean on the port that it names, or on the one that is used if it names none.
///
/// # Errors
/// [`Error::Invalid`]: it has something that nothing here has.
///
/// # Safety
/// The structures of `c` are there or NULL, and whole as of the version.
pub(crate) unsafe fn read(
    c: &FiInfo,
    api: u32,
    names: impl FnOnce(Option<&str>) -> Names,
) -> Result<ParsedInfo> {
    let ask = GetinfoCall { version: api, node: None, service: None, flags: 0, hints: Some(c) };
    const BEYOND: Error = Error::Invalid("info: beyond what is offered");
    // SAFETY: the caller's promise.
    let read = unsafe { read_named(c, &ask, names) };
    let read = read.map_err(|e| if e == Error::NoData { BEYOND } else { e })?;
    let (tx, rx) = (&read.info.tx_attr, &read.info.rx_attr);
    let late = (read.info.caps | tx.caps | rx.caps).intersects(SINCE_2_0);
    if late && api < version(2, 0) { Err(BEYOND) } else { Ok(read) }
}

/// As [`read`], for a program that may have named a host as well.
///
/// # Errors
/// [`Error::NoData`]: it has something that nothing here has.
///
/// # Safety
/// As of [`read`].
unsafe fn read_named(
    c: &FiInfo,
    ask: &GetinfoCall<'_>,
    names: impl FnOnce(Option<&str>) -> Names,
) -> Result<ParsedInfo> {
    let mut info = Info {
        caps: Caps::from_bits_retain(c.caps),
        mode: Mode::from_bits_truncate(c.mode),
        ..Info::default()
    };
    // SAFETY: the caller's promise, for each of the structures and the addresses.
    unsafe {
        if let Some(tx) = c.tx_attr.as_ref() {
            info.tx_attr = read_tx(tx);
        }
        if let Some(rx) = c.rx_attr.as_ref() {
            info.rx_attr = read_rx(rx);
        }
        if let Some(ep) = c.ep_attr.as_ref() {
            info.ep_attr = read_ep(ep)?;
        }
        if let Some(domain) = c.domain_attr.as_ref() {
            info.domain_attr = read_domain(domain, ask.version)?;
            check_keys(c.domain_attr, ask.version)?;
            check_contexts(domain)?;
        }
        if let Some(fabric) = c.fabric_attr.as_ref() {
            info.fabric_attr.name = guard::text(fabric.name)?.map(str::to_owned);
            info.fabric_attr.prov_name = guard::text(fabric.prov_name)?.map(str::to_owned);
        }
    }
    let src = (c.src_addr, c.src_addrlen);
    let dest = (c.dest_addr, c.dest_addrlen);
    // A name goes before an address: that is not looked at, whatever it is (fi_getinfo(3)).
    let is_source = ask.flags & FI_SOURCE != 0;
    let is_named = ask.node.is_some() || ask.service.is_some();
    let src = if is_named && is_source { (std::ptr::null_mut(), 0) } else { src };
    let dest = if is_named && !is_source { (std::ptr::null_mut(), 0) } else { dest };
    // SAFETY: as above.
    let (src, dest) = unsafe { (bytes_of(src)?, bytes_of(dest)?) };
    let own = match ask.node.filter(|_| ask.flags & FI_SOURCE != 0) {
        Some(node) => node.parse().ok().and_then(interface_at),
        None => src.and_then(addr::interface_of),
    };
    let interface = info.domain_attr.name.take().or(own.filter(|_| known_as::uses_ip_addresses()));
    info.domain_attr.name = interface.as_deref().map(known_as::port_of);
    let names = names(info.domain_attr.name.as_deref());
    let form = match c.addr_format {
        FI_FORMAT_UNSPEC => None,
        format => Some(Form::of(format, names).ok_or(Error::NoData)?),
    };
    // What has another length is of another family.
    let form_of = |bytes: &[u8]| form.or_else(|| Form::guess(bytes, names)).ok_or(Error::NoData);
    let meant = |bytes| form_of(bytes)?.read(bytes).map_err(|_| Error::NoData);
    let dest = match dest.map(meant).transpose()? {
        Some(ParsedAddr::Addr(addr)) => {
            info.dest_addr = Some(addr.to_bytes().to_vec());
            None
        }
        Some(ParsedAddr::Host(ip, service)) => Some((ip, service)),
        None => None,
    };
    let src = src.map(|bytes| form_of(bytes)?.read_own(bytes)).transpose()?;
    info.src_addr = src.flatten().map(Vec::from);
    let form = form.unwrap_or_else(|| Form::usual(names, ask.node));
    Ok(ParsedInfo { info, form, dest, interface })
}

/// # Safety
/// As many bytes are there, or the pointer is NULL.
unsafe fn bytes_of<'a>((at, len): (*mut c_void, usize)) -> Result<Option<&'a [u8]>> {
    if at.is_null() || len == 0 {
        return Ok(None);
    }
    if len > addr::MAX {
        return Err(Error::NoData);
    }
    // SAFETY: the caller's promise; bytes need no alignment.
    Ok(Some(unsafe { std::slice::from_raw_parts(at.cast::<u8>(), len) }))
}

pub(crate) fn read_tx(c: &TxAttr) -> OurTx {
    OurTx {
        caps: Caps::from_bits_retain(c.caps),
        op_flags: OpFlags::from_bits_retain(c.op_flags),
        msg_order: Order::from_bits_retain(c.msg_order),
        comp_order: Order::from_bits_retain(c.comp_order),
        inject_size: c.inject_size,
        size: c.size,
        iov_limit: c.iov_limit,
        rma_iov_limit: c.rma_iov_limit,
        tclass: c.tclass,
    }
}

pub(crate) fn read_rx(c: &RxAttr) -> OurRx {
    OurRx {
        caps: Caps::from_bits_retain(c.caps),
        op_flags: OpFlags::from_bits_retain(c.op_flags),
        msg_order: Order::from_bits_retain(c.msg_order),
        comp_order: Order::from_bits_retain(c.comp_order),
        total_buffered_recv: c.total_buffered_recv,
        size: c.size,
        iov_limit: c.iov_limit,
    }
}

/// # Safety
/// The key is there.
unsafe fn read_ep(c: &EpAttr) -> Result<EndpointAttr> {
    let ep_type = match c.r#type {
        0 => EpType::Unspec,
        FI_EP_MSG => EpType::Msg,
        // Datagrams may be lost and reordered; messages of this provider are not.
        FI_EP_DGRAM | FI_EP_RDM => EpType::Rdm,
        _ => return Err(Error::NoData),
    };
    let order = c.max_order_raw_size.max(c.max_order_war_size).max(c.max_order_waw_size);
    let too_long = c.r#type == FI_EP_DGRAM && c.max_msg_size > DGRAM_MAX;
    if too_long || order as u64 > barewire::info::MAX_MSG_SIZE {
        return Err(Error::NoData);
    }
    Ok(EndpointAttr {
        ep_type,
        protocol: known_as::protocol_of(c),
        protocol_version: c.protocol_version,
        max_msg_size: c.max_msg_size as u64,
        msg_prefix_size: c.msg_prefix_size,
        mem_tag_format: c.mem_tag_format,
        tx_ctx_cnt: c.tx_ctx_cnt,
        rx_ctx_cnt: c.rx_ctx_cnt,
        // SAFETY: the caller's promise.
        auth_key: unsafe { key_of(c.auth_key, c.auth_key_size) },
    })
}

/// # Safety
/// As many bytes are there, or the pointer is NULL.
pub(crate) unsafe fn key_of(at: *const u8, len: usize) -> AuthKey {
    if at.is_null() || len == 0 {
        return AuthKey::default();
    }
    // SAFETY: the caller's promise. Keys are short; one that is not is refused for its length.
    AuthKey::new(unsafe { std::slice::from_raw_parts(at, len.min(4096)) })
}

/// Refuses more contexts than are supported.
fn check_contexts(c: &DomainAttr) -> Result<()> {
    let counts = [c.tx_ctx_cnt, c.rx_ctx_cnt, c.max_ep_stx_ctx, c.max_ep_srx_ctx];
    if counts.into_iter().all(|count| count <= EP_COUNT) { Ok(()) } else { Err(Error::NoData) }
}

/// Refuses more keys per endpoint than are supported.
///
/// # Safety
/// The structure is there, and is that of 1.20 if `api` is.
unsafe fn check_keys(c: *const DomainAttr, api: u32) -> Result<()> {
    if api < version(1, 20) {
        return Ok(());
    }
    // SAFETY: the caller's promise.
    let wanted = unsafe { (*c.cast::<LateDomainAttr>()).max_ep_auth_key };
    if wanted > KEYS_MAX { Err(Error::NoData) } else { Ok(()) }
}

/// # Safety
/// Name and key are there.
unsafe fn read_domain(c: &DomainAttr, api: u32) -> Result<OurDomain> {
    let threading = match c.threading {
        0 => Threading::Unspec,
        1 => Threading::Safe,
        2 => Threading::Fid,
        3 => Threading::Domain,
        4 => Threading::Completion,
        5 => Threading::Endpoint,
        _ => return Err(Error::NoData),
    };
    let resource_mgmt = match c.resource_mgmt {
        0 => ResourceMgmt::Unspec,
        1 => ResourceMgmt::Disabled,
        2 => ResourceMgmt::Enabled,
        _ => return Err(Error::NoData),
    };
    let av_type = match c.av_type {
        0 => AvType::Unspec,
        1 => AvType::Map,
        2 => AvType::Table,
        _ => return Err(Error::NoData),
    };
    let progress = |p: u32| match p {
        1 => Ok(Progress::Auto),
        2 => Ok(Progress::Manual),
        // 3 is FI_PROGRESS_CONTROL_UNIFIED: as the data's.
        0 | 3 => Ok(Progress::Unspec),
        _ => Err(Error::NoData),
    };
    // Members behind `mr_iov_limit` mean something from 1.5 on.
    let modern = api >= version(1, 5);
    let av_auth_key = modern && c.auth_key_size == FI_AV_AUTH_KEY;
    if av_auth_key && !c.auth_key.is_null() {
        return Err(Error::NoData);
    }
    // SAFETY: the caller's promise.
    let (name, auth_key) = unsafe {
        let key = match modern && c.auth_key_size != FI_AV_AUTH_KEY {
            true => key_of(c.auth_key, c.auth_key_size),
            false => AuthKey::default(),
        };
        (guard::text(c.name)?.map(str::to_owned), key)
    };
    Ok(OurDomain {
        name,
        threading,
        control_progress: progress(c.control_progress)?,
        data_progress: progress(c.data_progress)?,
        resource_mgmt,
        av_type,
        mr_mode: MrMode::from_bits_truncate(c.mr_mode as u32),
        mr_key_size: c.mr_key_size,
        cq_data_size: c.cq_data_size,
        cq_cnt: c.cq_cnt,
        ep_cnt: c.ep_cnt,
        max_ep_tx_ctx: c.max_ep_tx_ctx,
        max_ep_rx_ctx: c.max_ep_rx_ctx,
        cntr_cnt: c.cntr_cnt,
        mr_iov_limit: c.mr_iov_limit,
        caps: if modern { Caps::from_bits_retain(c.caps) } else { Caps::empty() },
        auth_key,
        av_auth_key,
        max_err_data: if modern { c.max_err_data } else { 0 },
        mr_cnt: if modern { c.mr_cnt } else { 0 },
        tclass: if modern { c.tclass } else { 0 },
    })
}

/// Converts an answer to C's memory; `None` if there is no memory left.
fn to_c(
    info: &Info,
    form: Form,
    interface: Option<&str>,
    ask: &GetinfoCall<'_>,
) -> Option<*mut FiInfo> {
    let c = zeroed::<FiInfo>();
    if c.is_null() {
        return None;
    }
    let (tx, rx, ep) = (zeroed::<TxAttr>(), zeroed::<RxAttr>(), zeroed::<EpAttr>());
    let (domain, fabric) = (zeroed::<DomainAttr>(), zeroed::<FabricAttr>());
    // SAFETY: `c` is zeroed memory of its type that nobody else has, and zeros are a value of it.
    let out = unsafe { &mut *c };
    (out.tx_attr, out.rx_attr, out.ep_attr) = (tx, rx, ep);
    (out.domain_attr, out.fabric_attr) = (domain, fabric);
    if tx.is_null() || rx.is_null() || ep.is_null() || domain.is_null() || fabric.is_null() {
        // SAFETY: the structure is ours alone, and what is not there is NULL.
        unsafe { free_list(c) };
        return None;
    }
    out.caps = info.caps.bits();
    // A program that offers FI_MSG_PREFIX learns that no byte of the prefix is used. One that
    // offers every mode, as fi_info does, wants to know what is needed.
    let offered = ask.hints.map_or(0, |h| h.mode);
    out.mode = if offered == u64::MAX { 0 } else { offered & FI_MSG_PREFIX };
    out.addr_format = match form {
        Form::Native => addr::FORMAT_NATIVE,
        // The format of the hints: FI_SOCKADDR stays FI_SOCKADDR.
        Form::SockaddrIn(_) => match ask.hints {
            Some(hints) if hints.addr_format != FI_FORMAT_UNSPEC => hints.addr_format,
            _ => FI_SOCKADDR_IN,
        },
        Form::SockaddrIn6(_) => FI_SOCKADDR_IN6,
    };
    let address = |bytes: &Option<Vec<u8>>| {
        let bytes: &[u8; addr::LEN] = bytes.as_deref()?.try_into().ok()?;
        Some(form.write(EpAddr::from_bytes(bytes).ok()?))
    };
    // Some programs take it for granted that there is one.
    let src = address(&info.src_addr).unwrap_or_else(|| form.any());
    (out.src_addr, out.src_addrlen) = (copy(&src), src.len());
    if let Some(bytes) = address(&info.dest_addr) {
        (out.dest_addr, out.dest_addrlen) = (copy(&bytes), bytes.len());
    }
    // SAFETY: zeroed memory, with room behind it for more than that.
    unsafe { (*domain.cast::<LateDomainAttr>()).max_ep_auth_key = KEYS_MAX };
    // SAFETY: five structures of zeroed memory that nobody else has.
    let (tx, rx, ep, domain, fabric) =
        unsafe { (&mut *tx, &mut *rx, &mut *ep, &mut *domain, &mut *fabric) };
    (tx.mode, rx.mode) = (out.mode, out.mode);
    write_tx(tx, &info.tx_attr);
    write_rx(rx, &info.rx_attr);
    write_ep(ep, info, ask);
    write_domain(domain, &info.domain_attr, ask);
    let port = info.domain_attr.name.as_deref();
    domain.name = copy_text(domain_name(port, interface, form).as_deref());
    domain.max_err_data = domain.max_err_data.max(form.len());
    write_fabric(fabric, &info.fabric_attr, ask.version);
    out.nic = nic::describe(info.domain_attr.name.as_deref().unwrap_or_default());
    Some(c)
}

/// The `fi_info` of an open object, in C's memory, as the library would complete it.
///
/// # Errors
/// [`Error::NoMem`].
pub(crate) fn whole(info: &Info, form: Form, version: u32) -> Result<*mut FiInfo> {
    let ask = GetinfoCall { version, node: None, service: None, flags: 0, hints: None };
    let c = to_c(info, form, None, &ask).ok_or(Error::NoMem)?;
    // SAFETY: a fresh structure of ours, with a fabric's attributes.
    unsafe {
        let fabric = &mut *(*c).fabric_attr;
        free(fabric.prov_name);
        fabric.prov_name = copy_text(Some(known_as::full_name()));
    }
    Ok(c)
}

pub(crate) fn write_tx(c: &mut TxAttr, tx: &OurTx) {
    c.caps = tx.caps.bits();
    c.op_flags = tx.op_flags.bits();
    c.msg_order = tx.msg_order.bits();
    c.comp_order = tx.comp_order.bits();
    (c.inject_size, c.size) = (tx.inject_size, tx.size);
    (c.iov_limit, c.rma_iov_limit) = (tx.iov_limit, tx.rma_iov_limit);
    c.tclass = tx.tclass;
}

pub(crate) fn write_rx(c: &mut RxAttr, rx: &OurRx) {
    c.caps = rx.caps.bits();
    c.op_flags = rx.op_flags.bits();
    c.msg_order = rx.msg_order.bits();
    c.comp_order = rx.comp_order.bits();
    // Deprecated, and a hint of it is checked by some programs.
    c.total_buffered_recv = 0;
    (c.size, c.iov_limit) = (rx.size, rx.iov_limit);
}

/// # Safety
/// The hints are whole.
pub(crate) unsafe fn wants(hints: Option<&FiInfo>, ep_type: u32) -> bool {
    // SAFETY: the caller's promise.
    let attr = hints.and_then(|h| unsafe { h.ep_attr.as_ref() });
    attr.is_some_and(|ep| ep.r#type == ep_type)
}

fn write_ep(c: &mut EpAttr, info: &Info, ask: &GetinfoCall<'_>) {
    let ep = &info.ep_attr;
    c.r#type = match ep.ep_type {
        EpType::Msg => FI_EP_MSG,
        // SAFETY: libfabric's hints are whole.
        _ if unsafe { wants(ask.hints, FI_EP_DGRAM) } => FI_EP_DGRAM,
        _ => FI_EP_RDM,
    };
    (c.protocol, c.protocol_version) = (known_as::protocol(c.r#type), ep.protocol_version);
    c.max_msg_size = match c.r#type {
        FI_EP_DGRAM => DGRAM_MAX,
        _ => usize::try_from(ep.max_msg_size).unwrap_or(usize::MAX),
    };
    c.msg_prefix_size = ep.msg_prefix_size;
    // An order that is granted holds for every length. No answer is below its hint, also where the
    // order itself is not asked for.
    let orders = info.tx_attr.msg_order & info.rx_attr.msg_order;
    let all = c.max_msg_size;
    // SAFETY: libfabric's hints are whole.
    let hint = ask.hints.and_then(|h| unsafe { h.ep_attr.as_ref() });
    let hinted =
        hint.map_or([0; 3], |h| [h.max_order_raw_size, h.max_order_war_size, h.max_order_waw_size]);
    let size = |bits: Order, hint| if orders.intersects(bits) || hint > 0 { all } else { 0 };
    c.max_order_raw_size = size(Order::RAW | Order::RMA_RAW | Order::ATOMIC_RAW, hinted[0]);
    c.max_order_war_size = size(Order::WAR | Order::RMA_WAR | Order::ATOMIC_WAR, hinted[1]);
    c.max_order_waw_size = size(Order::WAW | Order::RMA_WAW | Order::ATOMIC_WAW, hinted[2]);
    c.mem_tag_format = ep.mem_tag_format;
    (c.tx_ctx_cnt, c.rx_ctx_cnt) = (ep.tx_ctx_cnt, ep.rx_ctx_cnt);
}

fn write_domain(c: &mut DomainAttr, domain: &OurDomain, ask: &GetinfoCall<'_>) {
    // SAFETY: libfabric's hints are whole.
    let hint = ask.hints.and_then(|h| unsafe { h.domain_attr.as_ref() });
    let progress = |p: Progress| match p {
        Progress::Unspec => 0,
        Progress::Auto => 1,
        Progress::Manual => 2,
    };
    (c.auth_key, c.auth_key_size) = (copy(&domain.auth_key).cast(), domain.auth_key.len());
    if domain.av_auth_key {
        c.auth_key_size = FI_AV_AUTH_KEY;
    }
    c.threading = match domain.threading {
        Threading::Unspec => 0,
        Threading::Safe => 1,
        Threading::Fid => 2,
        Threading::Domain => 3,
        Threading::Completion => 4,
        Threading::Endpoint => 5,
    };
    c.control_progress = match hint {
        Some(h) if h.control_progress == 3 => 3,
        _ => progress(domain.control_progress),
    };
    c.data_progress = progress(domain.data_progress);
    // Queues are always protected; the answer repeats the hint.
    c.resource_mgmt = if hint.is_some_and(|h| h.resource_mgmt == 1) { 1 } else { 2 };
    // Without a hint both are possible.
    let asked = hint.is_none_or(|h| h.av_type != 0);
    c.av_type = if !asked {
        0
    } else if domain.av_type == AvType::Map {
        1
    } else {
        2
    };
    c.mr_mode = match domain.mr_mode {
        // Before 1.5 a mode was one of two names, and 0 was no answer.
        mode if mode.is_empty() && ask.version < version(1, 5) => FI_MR_SCALABLE,
        mode => mode.bits() as c_int,
    };
    (c.mr_key_size, c.cq_data_size) = (domain.mr_key_size, domain.cq_data_size);
    (c.cq_cnt, c.ep_cnt) = (domain.cq_cnt, domain.ep_cnt);
    (c.tx_ctx_cnt, c.rx_ctx_cnt) = (domain.ep_cnt, domain.ep_cnt);
    (c.max_ep_tx_ctx, c.max_ep_rx_ctx) = (domain.max_ep_tx_ctx, domain.max_ep_rx_ctx);
    (c.max_ep_stx_ctx, c.max_ep_srx_ctx) = (domain.ep_cnt, domain.ep_cnt);
    (c.cntr_cnt, c.mr_iov_limit) = (domain.cntr_cnt, domain.mr_iov_limit);
    c.caps = domain.caps.bits();
    (c.max_err_data, c.mr_cnt, c.tclass) = (domain.max_err_data, domain.mr_cnt, domain.tclass);
    if ask.version >= version(2, 5) {
        // max_cntr_value and max_err_cntr_value, which 2.5 appended at 208 and 216.
        // SAFETY: `zeroed` gave far more room than these 224 bytes, and they are aligned.
        unsafe {
            let tail = (&raw mut *c).cast::<u64>();
            tail.add(208 / 8).write(u64::MAX);
            tail.add(216 / 8).write(u64::MAX);
        }
    }
}

fn write_fabric(c: &mut FabricAttr, fabric: &OurFabric, version: u32) {
    c.name = copy_text(fabric.name.as_deref());
    // The name of the provider is libfabric's to fill in; it goes behind that of a lower one.
    c.prov_name = copy_text(known_as::lower_name());
    (c.prov_version, c.api_version) = (fabric.prov_version, version);
}

/// Frees a list that was not returned to libfabric.
///
/// # Safety
/// The list was made by [`to_c`].
pub(crate) unsafe fn free_list(mut list: *mut FiInfo) {
    while !list.is_null() {
        // SAFETY: the structure and what it names are ours, and each is freed once.
        unsafe {
            let c = *list;
            if let Some(domain) = c.domain_attr.as_ref() {
                free(domain.name);
                free(domain.auth_key);
            }
            if let Some(fabric) = c.fabric_attr.as_ref() {
                free(fabric.name);
                free(fabric.prov_name);
            }
            nic::destroy(c.nic);
            [c.src_addr, c.dest_addr].into_iter().for_each(free);
            free(c.tx_attr);
            free(c.rx_attr);
            free(c.ep_attr);
            free(c.domain_attr);
            free(c.fabric_attr);
            free(list);
            list = c.next;
        }
    }
}

/// The name of a domain in an answer: the interface that the program named by name or address, else
/// the interface with the port's IP address.
fn domain_name(port: Option<&str>, named: Option<&str>, form: Form) -> Option<String> {
    let own = || match form {
        Form::SockaddrIn(names) | Form::SockaddrIn6(names) if known_as::uses_ip_addresses() => {
            interface_at(names.own_ip())
        }
        _ => None,
    };
    named
        .map(str::to_owned)
        .filter(|_| known_as::uses_ip_addresses())
        .or_else(own)
        .or_else(|| port.map(str::to_owned))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The member is one of 1.20, and what lies in its place before is not read.
    #[test]
    fn more_keys_than_there_are_is_no_answer() {
        // SAFETY: zeros are a value of it.
        let mut attr: LateDomainAttr = unsafe { std::mem::zeroed() };
        for (wanted, api, fits) in [
            (0, version(1, 20), true),
            (KEYS_MAX, version(1, 20), true),
            (KEYS_MAX + 1, version(1, 20), false),
            (KEYS_MAX + 1, version(2, 1), false),
            (usize::MAX, version(1, 19), true),
        ] {
            attr.max_ep_auth_key = wanted;
            // SAFETY: it is whole.
            let taken = unsafe { check_keys((&raw const attr).cast(), api) };
            assert_eq!(taken.is_ok(), fits, "{wanted} {api:#x}");
        }
    }
}
