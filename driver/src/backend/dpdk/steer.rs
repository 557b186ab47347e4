//! Flow steering: the NIC directs frames of one EtherType to the port's queue.

use std::ffi::CStr;
use std::mem::MaybeUninit;
use std::ptr::null;

use barewire_dpdk_sys as sys;

use super::failure::Failure;

/// Adds a flow rule (rte_flow) that directs frames with `ethertype` to queue 0 of the started port.
///
/// A NIC that is shared with the kernel (mlx5) then leaves all other frames to the kernel. Without
/// a rule the queue gets every frame, so a driver without rules is logged and is no error.
///
/// # Errors
/// The driver supports rules and refused this one.
pub(super) fn steer(port: u16, ethertype: u16) -> Result<(), Failure> {
    // SAFETY: zeros are legal in all of these; what they point to lives across the calls, which
    // copy what they keep.
    unsafe {
        let mut attr: sys::rte_flow_attr = MaybeUninit::zeroed().assume_init();
        attr.set_ingress(1);
        let mut spec: sys::rte_flow_item_eth = MaybeUninit::zeroed().assume_init();
        let mut mask: sys::rte_flow_item_eth = MaybeUninit::zeroed().assume_init();
        spec.__bindgen_anon_1.hdr.ether_type = ethertype.to_be();
        mask.__bindgen_anon_1.hdr.ether_type = u16::MAX;
        let items = [
            sys::rte_flow_item {
                type_: sys::RTE_FLOW_ITEM_TYPE_ETH,
                spec: (&raw const spec).cast(),
                last: null(),
                mask: (&raw const mask).cast(),
            },
            sys::rte_flow_item {
                type_: sys::RTE_FLOW_ITEM_TYPE_END,
                spec: null(),
                last: null(),
                mask: null(),
            },
        ];
        let queue = sys::rte_flow_action_queue { index: 0 };
        let actions = [
            sys::rte_flow_action {
                type_: sys::RTE_FLOW_ACTION_TYPE_QUEUE,
                conf: (&raw const queue).cast(),
            },
            sys::rte_flow_action { type_: sys::RTE_FLOW_ACTION_TYPE_END, conf: null() },
        ];
        let mut error: sys::rte_flow_error = MaybeUninit::zeroed().assume_init();
        let (items, actions) = (items.as_ptr(), actions.as_ptr());
        let flow = sys::rte_flow_create(port, &attr, items, actions, &mut error);
        if !flow.is_null() {
            tracing::info!(port, "frames of EtherType {ethertype:#06x} are steered to the port");
            return Ok(());
        }
        let errno = super::failure::errno();
        let said = error.message.as_ref().map(|text| CStr::from_ptr(text).to_string_lossy());
        let said = said.unwrap_or_default();
        if errno == libc::ENOSYS || errno == libc::ENOTSUP {
            tracing::info!(port, "the driver has no rules ({said}): the port gets every frame");
            return Ok(());
        }
        let why = format!("the driver does not steer EtherType {ethertype:#06x}: {said}");
        Err(Failure::new(errno, why).mend("leave ethertype= out"))
    }
}
