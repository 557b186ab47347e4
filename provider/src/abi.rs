//! The structures of `<rdma/*.h>`, laid out by hand, and tables that cannot hold a NULL.
//!
//! One binary serves libfabric 1.17 and 2.x: the layouts are those of 2.x, which only appended
//! members. A caller's structure is read up to the length of the oldest version, unless the version
//! that the caller passes promises more. What libfabric copies with its own `sizeof` is allocated
//! with room to spare. The test at the end compares every size and offset with the installed
//! headers.

use std::ffi::{c_char, c_int, c_void};

use crate::stub::{Closed, Errno, NoSys, StubReturn};

/// A type and where its members lie.
#[cfg(test)]
pub(crate) struct Layout {
    /// As C calls it.
    pub(crate) name: &'static str,
    pub(crate) size: usize,
    /// Members, their offsets, and the version that appended them (100 * major + minor).
    pub(crate) members: &'static [(&'static str, usize, u32)],
}

macro_rules! layouts {
    ($($(#[$doc:meta])* $cname:literal $name:ident {
        $($member:ident: $ty:ty,)*
        $(@since $since:literal { $($late:ident: $late_ty:ty,)* })?
    })*) => {
        $(
            $(#[$doc])*
            #[repr(C)]
            #[derive(Clone, Copy)]
            #[allow(missing_docs, reason = "libfabric documents them")]
            pub(crate) struct $name {
                $(pub(crate) $member: $ty,)*
                $($(pub(crate) $late: $late_ty,)*)?
            }

            #[cfg(test)]
            impl $name {
                const LAYOUT: Layout = Layout {
                    name: $cname,
                    size: size_of::<Self>(),
                    members: &[
                        $((stringify!($member), std::mem::offset_of!(Self, $member), 0),)*
                        $($((stringify!($late), std::mem::offset_of!(Self, $late), $since),)*)?
                    ],
                };
            }
        )*

        #[cfg(test)]
        const STRUCTS: &[Layout] = &[$($name::LAYOUT,)*];
    };
}

/// Tables of functions. Every entry has stubs that refuse, so none is ever NULL.
macro_rules! tables {
    ($($cname:literal $name:ident {
        $($entry:ident($($arg:ty),*) -> $ret:ty;)*
        $(@since $since:literal { $($late:ident($($late_arg:ty),*) -> $late_ret:ty;)* })?
    })*) => {
        $(
            #[doc = concat!("`", $cname, "`.")]
            #[repr(C)]
            #[derive(Clone, Copy)]
            pub(crate) struct $name {
                pub(crate) size: usize,
                $(pub(crate) $entry: unsafe extern "C" fn($($arg),*) -> $ret,)*
                $($(pub(crate) $late: unsafe extern "C" fn($($late_arg),*) -> $late_ret,)*)?
            }

            impl $name {
                /// Every call is refused with `FI_ENOSYS`.
                #[allow(dead_code, reason = "some tables are never left as they are")]
                pub(crate) const STUB: Self = Self::refusing::<NoSys>();

                /// Every call is refused with `FI_EBADF`: the table of an object that is closed.
                pub(crate) const CLOSED: &'static Self = &Self::refusing::<Closed>();

                const fn refusing<W: Errno>() -> Self {
                    Self {
                        size: size_of::<Self>(),
                        $($entry: {
                            unsafe extern "C" fn stub<W: Errno>($(_: $arg),*) -> $ret {
                                <$ret as StubReturn>::of(W::ERRNO)
                            }
                            stub::<W>
                        },)*
                        $($($late: {
                            unsafe extern "C" fn stub<W: Errno>($(_: $late_arg),*) -> $late_ret {
                                <$late_ret as StubReturn>::of(W::ERRNO)
                            }
                            stub::<W>
                        },)*)?
                    }
                }
            }

            #[cfg(test)]
            impl $name {
                const LAYOUT: Layout = Layout {
                    name: $cname,
                    size: size_of::<Self>(),
                    members: &[
                        ("size", 0, 0),
                        $((stringify!($entry), std::mem::offset_of!(Self, $entry), 0),)*
                        $($((stringify!($late), std::mem::offset_of!(Self, $late), $since),)*)?
                    ],
                };
            }
        )*

        #[cfg(test)]
        const TABLES: &[Layout] = &[$($name::LAYOUT,)*];
    };
}

/// Any pointer.
pub(crate) type P = *mut c_void;
type Text = *const c_char;
type Addr = u64;

layouts! {
    /// What every object begins with.
    "struct fid" Fid { fclass: usize, context: P, ops: *const FiOps, }
    "struct fid_fabric" FidFabric { fid: Fid, ops: *const OpsFabric, api_version: u32, }
    "struct fid_domain" FidDomain { fid: Fid, ops: *const OpsDomain, mr: *const OpsMr, }
    "struct fid_ep" FidEp {
        fid: Fid, ops: *const OpsEp, cm: *const OpsCm, msg: *const OpsMsg, rma: *const OpsRma,
        tagged: *const OpsTagged, atomic: *const OpsAtomic, collective: *const OpsCollective,
    }
    "struct fid_pep" FidPep { fid: Fid, ops: *const OpsEp, cm: *const OpsCm, }
    "struct fid_av_set" FidAvSet { fid: Fid, ops: *const OpsAvSet, }
    "struct fid_mc" FidMc { fid: Fid, fi_addr: Addr, }
    "struct fi_av_set_attr" AvSetAttr {
        count: usize, start_addr: Addr, end_addr: Addr, stride: u64, comm_key_size: usize,
        comm_key: *const u8, flags: u64,
    }
    "struct fi_collective_addr" CollectiveAddr { set: *const FidAvSet, coll_addr: Addr, }
    "struct fi_collective_attr" CollectiveAttr {
        op: u32, datatype: u32, datatype_attr: AtomicAttr, max_members: usize, mode: u64,
    }
    "struct fid_stx" FidStx { fid: Fid, ops: *const OpsEp, }
    "struct fid_av" FidAv { fid: Fid, ops: *const OpsAv, }
    "struct fid_mr" FidMr { fid: Fid, mem_desc: P, key: u64, }
    "struct fid_cq" FidCq { fid: Fid, ops: *const OpsCq, }
    "struct fid_cntr" FidCntr { fid: Fid, ops: *const OpsCntr, }
    "struct fid_eq" FidEq { fid: Fid, ops: *const OpsEq, }
    "struct fid_wait" FidWait { fid: Fid, ops: *const OpsWait, }
    "struct fid_poll" FidPoll { fid: Fid, ops: *const OpsPoll, }
    "struct fid_nic" FidNic {
        fid: Fid, device_attr: *mut DeviceAttr, bus_attr: *mut BusAttr, link_attr: *mut LinkAttr,
        prov_attr: P,
    }
    "struct fi_device_attr" DeviceAttr {
        name: *mut c_char, device_id: *mut c_char, device_version: *mut c_char,
        vendor_id: *mut c_char, driver: *mut c_char, firmware: *mut c_char,
    }
    "struct fi_bus_attr" BusAttr { bus_type: u32, attr: [u16; 3], }
    "struct fi_link_attr" LinkAttr {
        address: *mut c_char, mtu: usize, speed: usize, state: u32, network_type: *mut c_char,
    }
    "struct fi_info" FiInfo {
        next: *mut FiInfo, caps: u64, mode: u64, addr_format: u32, src_addrlen: usize,
        dest_addrlen: usize, src_addr: P, dest_addr: P, handle: *mut Fid, tx_attr: *mut TxAttr,
        rx_attr: *mut RxAttr, ep_attr: *mut EpAttr, domain_attr: *mut DomainAttr,
        fabric_attr: *mut FabricAttr, nic: *mut FidNic,
    }
    "struct fi_tx_attr" TxAttr {
        caps: u64, mode: u64, op_flags: u64, msg_order: u64, comp_order: u64, inject_size: usize,
        size: usize, iov_limit: usize, rma_iov_limit: usize, tclass: u32,
    }
    "struct fi_rx_attr" RxAttr {
        caps: u64, mode: u64, op_flags: u64, msg_order: u64, comp_order: u64,
        total_buffered_recv: usize, size: usize, iov_limit: usize,
    }
    "struct fi_ep_attr" EpAttr {
        r#type: u32, protocol: u32, protocol_version: u32, max_msg_size: usize,
        msg_prefix_size: usize, max_order_raw_size: usize, max_order_war_size: usize,
        max_order_waw_size: usize, mem_tag_format: u64, tx_ctx_cnt: usize, rx_ctx_cnt: usize,
        auth_key_size: usize, auth_key: *mut u8,
    }
    "struct fi_domain_attr" DomainAttr {
        domain: *mut FidDomain, name: *mut c_char, threading: u32, control_progress: u32,
        data_progress: u32, resource_mgmt: u32, av_type: u32, mr_mode: c_int, mr_key_size: usize,
        cq_data_size: usize, cq_cnt: usize, ep_cnt: usize, tx_ctx_cnt: usize, rx_ctx_cnt: usize,
        max_ep_tx_ctx: usize, max_ep_rx_ctx: usize, max_ep_stx_ctx: usize, max_ep_srx_ctx: usize,
        cntr_cnt: usize, mr_iov_limit: usize, caps: u64, mode: u64, auth_key: *mut u8,
        auth_key_size: usize, max_err_data: usize, mr_cnt: usize, tclass: u32,
    }
    "struct fi_fabric_attr" FabricAttr {
        fabric: *mut FidFabric, name: *mut c_char, prov_name: *mut c_char, prov_version: u32,
        api_version: u32,
    }
    "struct fi_av_attr" AvAttr {
        r#type: u32, rx_ctx_bits: c_int, count: usize, ep_per_node: usize, name: Text, map_addr: P,
        flags: u64,
    }
    "struct fi_cq_attr" CqAttr {
        size: usize, flags: u64, format: u32, wait_obj: u32, signaling_vector: c_int,
        wait_cond: u32, wait_set: *mut FidWait,
    }
    "struct fi_cntr_attr" CntrAttr {
        events: u32, wait_obj: u32, wait_set: *mut FidWait, flags: u64,
    }
    "struct fi_eq_attr" EqAttr {
        size: usize, flags: u64, wait_obj: u32, signaling_vector: c_int, wait_set: *mut FidWait,
    }
    "struct fi_wait_attr" WaitAttr { wait_obj: u32, flags: u64, }
    "struct fi_poll_attr" PollAttr { flags: u64, }
    "struct fi_mr_attr" MrAttr {
        mr_iov: *const Iovec, iov_count: usize, access: u64, offset: u64, requested_key: u64,
        context: P, auth_key_size: usize, auth_key: *mut u8, iface: u32, device: u64,
    }
    "struct fi_mr_raw_attr" MrRawAttr {
        flags: u64, base_addr: *mut u64, raw_key: *mut u8, key_size: *mut usize,
    }
    "struct fi_mr_map_raw" MrMapRaw {
        flags: u64, base_addr: u64, raw_key: *mut u8, key_size: usize, key: *mut u64,
    }
    "struct iovec" Iovec { iov_base: P, iov_len: usize, }
    "struct fi_ioc" Ioc { addr: P, count: usize, }
    "struct fi_rma_iov" RmaIov { addr: u64, len: usize, key: u64, }
    "struct fi_rma_ioc" RmaIoc { addr: u64, count: usize, key: u64, }
    "struct fi_msg" Msg {
        msg_iov: *const Iovec, desc: *mut P, iov_count: usize, addr: Addr, context: P, data: u64,
    }
    "struct fi_msg_tagged" MsgTagged {
        msg_iov: *const Iovec, desc: *mut P, iov_count: usize, addr: Addr, tag: u64, ignore: u64,
        context: P, data: u64,
    }
    "struct fi_msg_rma" MsgRma {
        msg_iov: *const Iovec, desc: *mut P, iov_count: usize, addr: Addr,
        rma_iov: *const RmaIov, rma_iov_count: usize, context: P, data: u64,
    }
    "struct fi_msg_atomic" MsgAtomic {
        msg_iov: *const Ioc, desc: *mut P, iov_count: usize, addr: Addr, rma_iov: *const RmaIoc,
        rma_iov_count: usize, datatype: u32, op: u32, context: P, data: u64,
    }
    "struct fi_msg_fetch" MsgFetch { msg_iov: *mut Ioc, desc: *mut P, iov_count: usize, }
    "struct fi_msg_compare" MsgCompare { msg_iov: *const Ioc, desc: *mut P, iov_count: usize, }
    "struct fi_op_msg" OpMsg { ep: *mut FidEp, msg: Msg, flags: u64, }
    "struct fi_op_tagged" OpTagged { ep: *mut FidEp, msg: MsgTagged, flags: u64, }
    "struct fi_op_rma" OpRma { ep: *mut FidEp, msg: MsgRma, flags: u64, }
    "struct fi_op_atomic" OpAtomicWork { ep: *mut FidEp, msg: MsgAtomic, flags: u64, }
    "struct fi_op_fetch_atomic" OpFetchAtomic {
        ep: *mut FidEp, msg: MsgAtomic, fetch: MsgFetch, flags: u64,
    }
    "struct fi_op_compare_atomic" OpCompareAtomic {
        ep: *mut FidEp, msg: MsgAtomic, fetch: MsgFetch, compare: MsgCompare, flags: u64,
    }
    "struct fi_op_cntr" OpCntr { cntr: *mut FidCntr, value: u64, }
    "struct fi_trigger_threshold" TriggerThreshold { cntr: *mut FidCntr, threshold: usize, }
    "struct fi_triggered_context" TriggeredContext { event_type: u32, trigger: [P; 3], }
    "struct fi_deferred_work" DeferredWork {
        context: [P; 8], threshold: u64, triggering_cntr: *mut FidCntr,
        completion_cntr: *mut FidCntr, op_type: u32, op: P,
    }
    "struct fi_alias" Alias { fid: *mut *mut Fid, flags: u64, }
    "struct fi_atomic_attr" AtomicAttr { count: usize, size: usize, }
    "struct fi_cq_entry" CqEntry { op_context: P, }
    "struct fi_cq_msg_entry" CqMsgEntry { op_context: P, flags: u64, len: usize, }
    "struct fi_cq_data_entry" CqDataEntry {
        op_context: P, flags: u64, len: usize, buf: P, data: u64,
    }
    "struct fi_cq_tagged_entry" CqTaggedEntry {
        op_context: P, flags: u64, len: usize, buf: P, data: u64, tag: u64,
    }
    "struct fi_cq_err_entry" CqErrEntry {
        op_context: P, flags: u64, len: usize, buf: P, data: u64, tag: u64, olen: usize,
        err: c_int, prov_errno: c_int, err_data: P, err_data_size: usize,
        @since 120 { src_addr: Addr, }
    }
    "struct fi_eq_err_entry" EqErrEntry {
        fid: *mut Fid, context: P, data: u64, err: c_int, prov_errno: c_int, err_data: P,
        err_data_size: usize,
    }
    "struct fi_context" Context { internal: [P; 4], }
    "struct fi_provider" Provider {
        version: u32, fi_version: u32, context: Context, name: Text,
        getinfo: unsafe extern "C" fn(
            u32, Text, Text, u64, *const FiInfo, *mut *mut FiInfo,
        ) -> c_int,
        fabric: unsafe extern "C" fn(*mut FabricAttr, *mut *mut FidFabric, P) -> c_int,
        cleanup: unsafe extern "C" fn(),
    }
}

tables! {
    "struct fi_ops" FiOps {
        close(*mut Fid) -> c_int;
        bind(*mut Fid, *mut Fid, u64) -> c_int;
        control(*mut Fid, c_int, P) -> c_int;
        ops_open(*mut Fid, Text, u64, *mut P, P) -> c_int;
        tostr(*const Fid, *mut c_char, usize) -> c_int;
        ops_set(*mut Fid, Text, u64, P, P) -> c_int;
    }
    "struct fi_ops_fabric" OpsFabric {
        domain(*mut FidFabric, *mut FiInfo, *mut *mut FidDomain, P) -> c_int;
        passive_ep(*mut FidFabric, *mut FiInfo, *mut *mut FidPep, P) -> c_int;
        eq_open(*mut FidFabric, *mut EqAttr, *mut *mut FidEq, P) -> c_int;
        wait_open(*mut FidFabric, *mut WaitAttr, *mut *mut FidWait) -> c_int;
        trywait(*mut FidFabric, *mut *mut Fid, c_int) -> c_int;
        domain2(*mut FidFabric, *mut FiInfo, *mut *mut FidDomain, u64, P) -> c_int;
    }
    "struct fi_ops_domain" OpsDomain {
        av_open(*mut FidDomain, *mut AvAttr, *mut *mut FidAv, P) -> c_int;
        cq_open(*mut FidDomain, *mut CqAttr, *mut *mut FidCq, P) -> c_int;
        endpoint(*mut FidDomain, *mut FiInfo, *mut *mut FidEp, P) -> c_int;
        scalable_ep(*mut FidDomain, *mut FiInfo, *mut *mut FidEp, P) -> c_int;
        cntr_open(*mut FidDomain, *mut CntrAttr, *mut *mut FidCntr, P) -> c_int;
        poll_open(*mut FidDomain, *mut PollAttr, *mut *mut FidPoll) -> c_int;
        stx_ctx(*mut FidDomain, *mut TxAttr, *mut *mut FidStx, P) -> c_int;
        srx_ctx(*mut FidDomain, *mut RxAttr, *mut *mut FidEp, P) -> c_int;
        query_atomic(*mut FidDomain, u32, u32, *mut AtomicAttr, u64) -> c_int;
        query_collective(*mut FidDomain, u32, *mut CollectiveAttr, u64) -> c_int;
        endpoint2(*mut FidDomain, *mut FiInfo, *mut *mut FidEp, u64, P) -> c_int;
        @since 206 { xpu_ctx(*mut FidDomain, P, *mut P, P) -> c_int; }
    }
    "struct fi_ops_mr" OpsMr {
        reg(*mut Fid, P, usize, u64, u64, u64, u64, *mut *mut FidMr, P) -> c_int;
        regv(*mut Fid, *const Iovec, usize, u64, u64, u64, u64, *mut *mut FidMr, P) -> c_int;
        regattr(*mut Fid, *const MrAttr, u64, *mut *mut FidMr) -> c_int;
    }
    "struct fi_ops_av" OpsAv {
        insert(*mut FidAv, *const c_void, usize, *mut Addr, u64, P) -> c_int;
        insertsvc(*mut FidAv, Text, Text, *mut Addr, u64, P) -> c_int;
        insertsym(*mut FidAv, Text, usize, Text, usize, *mut Addr, u64, P) -> c_int;
        remove(*mut FidAv, *mut Addr, usize, u64) -> c_int;
        lookup(*mut FidAv, Addr, P, *mut usize) -> c_int;
        straddr(*mut FidAv, *const c_void, *mut c_char, *mut usize) -> Text;
        av_set(*mut FidAv, *mut AvSetAttr, *mut *mut FidAvSet, P) -> c_int;
        @since 120 {
            insert_auth_key(*mut FidAv, *const c_void, usize, *mut Addr, u64) -> c_int;
            lookup_auth_key(*mut FidAv, Addr, P, *mut usize) -> c_int;
            set_user_id(*mut FidAv, Addr, Addr, u64) -> c_int;
        }
    }
    "struct fi_ops_av_set" OpsAvSet {
        set_union(*mut FidAvSet, *const FidAvSet) -> c_int;
        intersect(*mut FidAvSet, *const FidAvSet) -> c_int;
        diff(*mut FidAvSet, *const FidAvSet) -> c_int;
        insert(*mut FidAvSet, Addr) -> c_int;
        remove(*mut FidAvSet, Addr) -> c_int;
        addr(*mut FidAvSet, *mut Addr) -> c_int;
    }
    "struct fi_ops_ep" OpsEp {
        cancel(*mut Fid, P) -> isize;
        getopt(*mut Fid, c_int, c_int, P, *mut usize) -> c_int;
        setopt(*mut Fid, c_int, c_int, *const c_void, usize) -> c_int;
        tx_ctx(*mut FidEp, c_int, *mut TxAttr, *mut *mut FidEp, P) -> c_int;
        rx_ctx(*mut FidEp, c_int, *mut RxAttr, *mut *mut FidEp, P) -> c_int;
        rx_size_left(*mut FidEp) -> isize;
        tx_size_left(*mut FidEp) -> isize;
        @since 206 { export_xpu(*mut FidEp, P, P) -> c_int; }
    }
    "struct fi_ops_cm" OpsCm {
        setname(*mut Fid, P, usize) -> c_int;
        getname(*mut Fid, P, *mut usize) -> c_int;
        getpeer(*mut FidEp, P, *mut usize) -> c_int;
        connect(*mut FidEp, *const c_void, *const c_void, usize) -> c_int;
        listen(*mut FidPep) -> c_int;
        accept(*mut FidEp, *const c_void, usize) -> c_int;
        reject(*mut FidPep, *mut Fid, *const c_void, usize) -> c_int;
        shutdown(*mut FidEp, u64) -> c_int;
        join(*mut FidEp, *const c_void, u64, *mut *mut FidMc, P) -> c_int;
    }
    "struct fi_ops_msg" OpsMsg {
        recv(*mut FidEp, P, usize, P, Addr, P) -> isize;
        recvv(*mut FidEp, *const Iovec, *mut P, usize, Addr, P) -> isize;
        recvmsg(*mut FidEp, *const Msg, u64) -> isize;
        send(*mut FidEp, P, usize, P, Addr, P) -> isize;
        sendv(*mut FidEp, *const Iovec, *mut P, usize, Addr, P) -> isize;
        sendmsg(*mut FidEp, *const Msg, u64) -> isize;
        inject(*mut FidEp, P, usize, Addr) -> isize;
        senddata(*mut FidEp, P, usize, P, u64, Addr, P) -> isize;
        injectdata(*mut FidEp, P, usize, u64, Addr) -> isize;
    }
    "struct fi_ops_tagged" OpsTagged {
        recv(*mut FidEp, P, usize, P, Addr, u64, u64, P) -> isize;
        recvv(*mut FidEp, *const Iovec, *mut P, usize, Addr, u64, u64, P) -> isize;
        recvmsg(*mut FidEp, *const MsgTagged, u64) -> isize;
        send(*mut FidEp, P, usize, P, Addr, u64, P) -> isize;
        sendv(*mut FidEp, *const Iovec, *mut P, usize, Addr, u64, P) -> isize;
        sendmsg(*mut FidEp, *const MsgTagged, u64) -> isize;
        inject(*mut FidEp, P, usize, Addr, u64) -> isize;
        senddata(*mut FidEp, P, usize, P, u64, Addr, u64, P) -> isize;
        injectdata(*mut FidEp, P, usize, u64, Addr, u64) -> isize;
    }
    "struct fi_ops_rma" OpsRma {
        read(*mut FidEp, P, usize, P, Addr, u64, u64, P) -> isize;
        readv(*mut FidEp, *const Iovec, *mut P, usize, Addr, u64, u64, P) -> isize;
        readmsg(*mut FidEp, *const MsgRma, u64) -> isize;
        write(*mut FidEp, P, usize, P, Addr, u64, u64, P) -> isize;
        writev(*mut FidEp, *const Iovec, *mut P, usize, Addr, u64, u64, P) -> isize;
        writemsg(*mut FidEp, *const MsgRma, u64) -> isize;
        inject(*mut FidEp, P, usize, Addr, u64, u64) -> isize;
        writedata(*mut FidEp, P, usize, P, u64, Addr, u64, u64, P) -> isize;
        injectdata(*mut FidEp, P, usize, u64, Addr, u64, u64) -> isize;
    }
    "struct fi_ops_atomic" OpsAtomic {
        write(*mut FidEp, P, usize, P, Addr, u64, u64, u32, u32, P) -> isize;
        writev(*mut FidEp, *const Ioc, *mut P, usize, Addr, u64, u64, u32, u32, P) -> isize;
        writemsg(*mut FidEp, *const MsgAtomic, u64) -> isize;
        inject(*mut FidEp, P, usize, Addr, u64, u64, u32, u32) -> isize;
        readwrite(*mut FidEp, P, usize, P, P, P, Addr, u64, u64, u32, u32, P) -> isize;
        readwritev(
            *mut FidEp, *const Ioc, *mut P, usize, *const Ioc, *mut P, usize, Addr, u64, u64, u32,
            u32, P
        ) -> isize;
        readwritemsg(*mut FidEp, *const MsgAtomic, *const Ioc, *mut P, usize, u64) -> isize;
        compwrite(
            *mut FidEp, P, usize, P, P, P, P, P, Addr, u64, u64, u32, u32, P
        ) -> isize;
        compwritev(
            *mut FidEp, *const Ioc, *mut P, usize, *const Ioc, *mut P, usize, *const Ioc, *mut P,
            usize, Addr, u64, u64, u32, u32, P
        ) -> isize;
        compwritemsg(
            *mut FidEp, *const MsgAtomic, *const Ioc, *mut P, usize, *const Ioc, *mut P, usize, u64
        ) -> isize;
        writevalid(*mut FidEp, u32, u32, *mut usize) -> c_int;
        readwritevalid(*mut FidEp, u32, u32, *mut usize) -> c_int;
        compwritevalid(*mut FidEp, u32, u32, *mut usize) -> c_int;
    }
    "struct fi_ops_collective" OpsCollective {
        barrier(*mut FidEp, Addr, P) -> isize;
        broadcast(*mut FidEp, P, usize, P, Addr, Addr, u32, u64, P) -> isize;
        alltoall(*mut FidEp, P, usize, P, P, P, Addr, u32, u64, P) -> isize;
        allreduce(*mut FidEp, P, usize, P, P, P, Addr, u32, u32, u64, P) -> isize;
        allgather(*mut FidEp, P, usize, P, P, P, Addr, u32, u64, P) -> isize;
        reduce_scatter(*mut FidEp, P, usize, P, P, P, Addr, u32, u32, u64, P) -> isize;
        reduce(*mut FidEp, P, usize, P, P, P, Addr, Addr, u32, u32, u64, P) -> isize;
        scatter(*mut FidEp, P, usize, P, P, P, Addr, Addr, u32, u64, P) -> isize;
        gather(*mut FidEp, P, usize, P, P, P, Addr, Addr, u32, u64, P) -> isize;
        msg(*mut FidEp, P, *mut Ioc, *mut P, usize, u64) -> isize;
        barrier2(*mut FidEp, Addr, u64, P) -> isize;
    }
    "struct fi_ops_cq" OpsCq {
        read(*mut FidCq, P, usize) -> isize;
        readfrom(*mut FidCq, P, usize, *mut Addr) -> isize;
        readerr(*mut FidCq, *mut CqErrEntry, u64) -> isize;
        sread(*mut FidCq, P, usize, *const c_void, c_int) -> isize;
        sreadfrom(*mut FidCq, P, usize, *mut Addr, *const c_void, c_int) -> isize;
        signal(*mut FidCq) -> c_int;
        strerror(*mut FidCq, c_int, *const c_void, *mut c_char, usize) -> Text;
        @since 206 { export_xpu(*mut FidCq, P, P) -> c_int; }
    }
    "struct fi_ops_cntr" OpsCntr {
        read(*mut FidCntr) -> u64;
        readerr(*mut FidCntr) -> u64;
        add(*mut FidCntr, u64) -> c_int;
        set(*mut FidCntr, u64) -> c_int;
        wait(*mut FidCntr, u64, c_int) -> c_int;
        adderr(*mut FidCntr, u64) -> c_int;
        seterr(*mut FidCntr, u64) -> c_int;
        @since 206 { export_xpu(*mut FidCntr, P, P) -> c_int; }
    }
    "struct fi_ops_eq" OpsEq {
        read(*mut FidEq, *mut u32, P, usize, u64) -> isize;
        readerr(*mut FidEq, *mut EqErrEntry, u64) -> isize;
        write(*mut FidEq, u32, *const c_void, usize, u64) -> isize;
        sread(*mut FidEq, *mut u32, P, usize, c_int, u64) -> isize;
        strerror(*mut FidEq, c_int, *const c_void, *mut c_char, usize) -> Text;
    }
    "struct fi_ops_wait" OpsWait { wait(*mut FidWait, c_int) -> c_int; }
    "struct fi_ops_poll" OpsPoll {
        poll(*mut FidPoll, *mut P, c_int) -> c_int;
        poll_add(*mut FidPoll, *mut Fid, u64) -> c_int;
        poll_del(*mut FidPoll, *mut Fid, u64) -> c_int;
    }
}

/// `FI_VERSION`.
pub(crate) const fn version(major: u32, minor: u32) -> u32 {
    major << 16 | minor
}

macro_rules! numbers {
    ($($ty:ty: $($name:ident = $value:expr),* $(,)?;)*) => {
        $($(
            #[allow(missing_docs, reason = "libfabric's own constant")]
            pub(crate) const $name: $ty = $value;
        )*)*

        #[cfg(test)]
        const NUMBERS: &[(&str, u64)] = &[$($((stringify!($name), $name as u64),)*)*];
    };
}

numbers! {
    usize: FI_CLASS_UNSPEC = 0, FI_CLASS_FABRIC = 1, FI_CLASS_DOMAIN = 2, FI_CLASS_EP = 3,
        FI_CLASS_SEP = 4, FI_CLASS_RX_CTX = 5, FI_CLASS_SRX_CTX = 6, FI_CLASS_TX_CTX = 7,
        FI_CLASS_STX_CTX = 8, FI_CLASS_PEP = 9, FI_CLASS_CONNREQ = 18,
        FI_CLASS_AV = 11, FI_CLASS_MR = 12, FI_CLASS_EQ = 13, FI_CLASS_CQ = 14,
        FI_CLASS_CNTR = 15, FI_CLASS_WAIT = 16, FI_CLASS_POLL = 17, FI_CLASS_MC = 19,
        FI_CLASS_NIC = 20, FI_CLASS_AV_SET = 21;
    c_int: FI_GETOPSFLAG = 2, FI_SETOPSFLAG = 3, FI_ALIAS = 4, FI_GETWAIT = 5, FI_ENABLE = 6,
        FI_BACKLOG = 7, FI_GET_RAW_MR = 8, FI_MAP_RAW_MR = 9, FI_UNMAP_KEY = 10, FI_QUEUE_WORK = 11,
        FI_CANCEL_WORK = 12, FI_FLUSH_WORK = 13, FI_REFRESH = 14, FI_DUP = 15,
        FI_GETWAITOBJ = 16;
    u32: FI_TRIGGER_THRESHOLD = 0, FI_OP_RECV = 0, FI_OP_SEND = 1, FI_OP_TRECV = 2,
        FI_OP_TSEND = 3, FI_OP_READ = 4, FI_OP_WRITE = 5, FI_OP_ATOMIC = 6,
        FI_OP_FETCH_ATOMIC = 7, FI_OP_COMPARE_ATOMIC = 8, FI_OP_CNTR_SET = 9, FI_OP_CNTR_ADD = 10;
    u32: FI_FORMAT_UNSPEC = 0, FI_SOCKADDR = 1, FI_SOCKADDR_IN = 2, FI_SOCKADDR_IN6 = 3,
        FI_PROTO_SOCK_TCP = 6, FI_PROTO_RXM = 11,
        FI_BUS_PCI = 1, FI_LINK_DOWN = 1, FI_LINK_UP = 2, FI_CNTR_EVENTS_COMP = 0,
        FI_EP_MSG = 1, FI_EP_DGRAM = 2, FI_EP_RDM = 3;
    c_int: FI_OPT_ENDPOINT = 0, FI_MR_SCALABLE = 2;
    u64: FI_SYNC_ERR = 1 << 58, FI_EVENT = 1 << 24, FI_MORE = 1 << 18, FI_PEEK = 1 << 19,
        FI_READ = 1 << 8, FI_WRITE = 1 << 9, FI_SOURCE = 1 << 57, FI_NUMERICHOST = 1 << 55,
        FI_RMA_EVENT = 1 << 56,
        FI_MSG_PREFIX = 1 << 58, FI_COLLECTIVE = 1 << 6, FI_PROV_ATTR_ONLY = 1 << 54,
        FI_TRANSMIT = 1 << 11, FI_RECV = 1 << 10;
}

/// Of 2.0: a region for one operation.
pub(crate) const FI_MR_SINGLE_USE: u64 = 1 << 41;

/// Of 2.0: a counter of bytes.
pub(crate) const FI_CNTR_EVENTS_BYTES: u32 = 1;

/// Names of the user's for addresses: a capability, and a flag of vectors and insertions.
pub(crate) const FI_AV_USER_ID: u64 = 1 << 41;

/// Of 1.20: a flag, and a length that says that keys are those of address vectors.
pub(crate) const FI_AUTH_KEY: u64 = 1 << 57;
pub(crate) const FI_AV_AUTH_KEY: usize = usize::MAX;

/// `struct fi_domain_attr` with what 1.20 appended.
#[repr(C)]
pub(crate) struct LateDomainAttr {
    pub(crate) attr: DomainAttr,
    pub(crate) max_ep_auth_key: usize,
}

/// `struct fi_mr_auth_key`, of 1.20.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct MrAuthKey {
    pub(crate) av: *mut FidAv,
    pub(crate) src_addr: u64,
}

/// `struct fi_mr_attr` with what 1.19 to 2.0 appended.
#[repr(C)]
pub(crate) struct LateMrAttr {
    attr: MrAttr,
    hmem_data: P,
    page_size: usize,
    pub(crate) base_mr: *const FidMr,
}

#[cfg(test)]
mod tests {
    use std::fmt::Write;
    use std::process::Command;

    use super::*;

    /// The C program that prints what the installed headers say.
    fn program() -> String {
        let mut c = String::new();
        for header in [
            "stdio.h",
            "stddef.h",
            "sys/uio.h",
            "rdma/fabric.h",
            "rdma/fi_domain.h",
            "rdma/fi_endpoint.h",
            "rdma/fi_cm.h",
            "rdma/fi_eq.h",
            "rdma/fi_rma.h",
            "rdma/fi_tagged.h",
            "rdma/fi_atomic.h",
            "rdma/fi_collective.h",
            "rdma/fi_trigger.h",
            "rdma/providers/fi_prov.h",
        ] {
            writeln!(c, "#include <{header}>").unwrap();
        }
        c.push_str("#define V (FI_MAJOR_VERSION * 100 + FI_MINOR_VERSION)\n");
        c.push_str("int main(void) {\nprintf(\"version %d\\n\", V);\n");
        for layout in STRUCTS.iter().chain(TABLES) {
            let name = layout.name;
            writeln!(c, "printf(\"size {name} %zu\\n\", sizeof({name}));").unwrap();
            for (member, _, since) in layout.members {
                let member = member.trim_start_matches("r#");
                writeln!(c, "#if V >= {since}").unwrap();
                let at = format!("offsetof({name}, {member})");
                writeln!(c, "printf(\"at {name} {member} %zu\\n\", {at});\n#endif").unwrap();
            }
        }
        for (name, _) in NUMBERS {
            writeln!(c, "printf(\"number {name} %llu\\n\", (unsigned long long) {name});").unwrap();
        }
        c.push_str("return 0; }\n");
        c
    }

    /// What the program prints, or why it cannot be built here.
    fn headers_say() -> Result<String, String> {
        if !std::path::Path::new("/usr/include/rdma/fabric.h").exists() {
            return Err("no rdma/fabric.h is installed: sudo apt-get install libfabric-dev".into());
        }
        let dir = tempfile::tempdir().unwrap();
        let (source, binary) = (dir.path().join("layout.c"), dir.path().join("layout"));
        std::fs::write(&source, program()).unwrap();
        let built = Command::new("cc").args(["-w", "-o"]).arg(&binary).arg(&source).output();
        let built = built.map_err(|why| format!("cc does not start ({why})"))?;
        assert!(built.status.success(), "{}", String::from_utf8_lossy(&built.stderr));
        let said = Command::new(&binary).output().unwrap();
        Ok(String::from_utf8(said.stdout).unwrap())
    }

    #[test]
    fn sizes_offsets_and_numbers_are_those_of_the_installed_headers() {
        let said = match headers_say() {
            Ok(said) => said,
            Err(why) => {
                println!("SKIPPED: {why}");
                return;
            }
        };
        let version: u32 = said.lines().next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let mut compared = 0;
        let mut expect = |line: String| {
            assert!(said.lines().any(|l| l == line), "the headers do not say \"{line}\":\n{said}");
            compared += 1;
        };
        for layout in STRUCTS.iter().chain(TABLES) {
            let known = |since: u32| since <= version;
            let name = layout.name;
            // A header may be newer than we are and have appended members that we never touch.
            let appended = layout.members.iter().any(|m| !known(m.2));
            if !appended && version <= 117 {
                expect(format!("size {name} {}", layout.size));
            }
            for (member, at, _) in layout.members.iter().filter(|m| known(m.2)) {
                expect(format!("at {name} {} {at}", member.trim_start_matches("r#")));
            }
        }
        for (name, value) in NUMBERS {
            expect(format!("number {name} {value}"));
        }
        assert!(compared > 300, "only {compared} comparisons");
    }
}
