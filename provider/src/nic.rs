//! `fi_info.nic`: what there is to say of a port's device.

use std::ffi::{c_int, c_void};

use crate::abi::*;
use crate::mem::{copy_text, free, zeroed};

static OPS: FiOps = FiOps { close, control, ..FiOps::STUB };

/// A description of the port `name`, or NULL if there is no memory for one.
pub(crate) fn describe(name: &str) -> *mut FidNic {
    let text = |t: &str| copy_text(Some(t));
    let nic = zeroed::<FidNic>();
    let (device, bus, link) = (zeroed::<DeviceAttr>(), zeroed::<BusAttr>(), zeroed::<LinkAttr>());
    if nic.is_null() || device.is_null() || bus.is_null() || link.is_null() {
        free(device);
        free(bus);
        free(link);
        free(nic);
        return std::ptr::null_mut();
    }
    // SAFETY: all four are zeroed memory of their types and more, which nobody else has yet.
    // Zeros are a valid value of each: integers and pointers.
    unsafe {
        (*nic).fid =
            Fid { fclass: FI_CLASS_NIC, context: std::ptr::null_mut(), ops: &raw const OPS };
        ((*nic).device_attr, (*nic).bus_attr, (*nic).link_attr) = (device, bus, link);
        (*device).name = text(name);
        (*device).device_id = text("0");
        (*device).device_version = text(env!("CARGO_PKG_VERSION"));
        (*device).vendor_id = text("0");
        (*device).driver = text("barewire");
        (*device).firmware = text("none");
        (*link).address = text(name);
        // Of a segment that is made when nobody says otherwise.
        (*link).mtu = 65_536;
        (*link).state = FI_LINK_UP;
        (*link).network_type = text("Ethernet");
    }
    nic
}

/// Frees a description; NULL is nothing.
///
/// # Safety
/// `nic` came from [`describe`] or is NULL, and goes out of use.
pub(crate) unsafe fn destroy(nic: *mut FidNic) {
    if nic.is_null() {
        return;
    }
    // SAFETY: it and its three parts came from the allocator of C, and nobody uses them any more.
    unsafe {
        let (device, link) = ((*nic).device_attr, (*nic).link_attr);
        if !device.is_null() {
            let d = &*device;
            let texts = [d.name, d.device_id, d.device_version, d.vendor_id, d.driver, d.firmware];
            texts.into_iter().for_each(free);
        }
        if !link.is_null() {
            free((*link).address);
            free((*link).network_type);
        }
        free(device);
        free((*nic).bus_attr);
        free(link);
        free(nic);
    }
}

unsafe extern "C" fn close(fid: *mut Fid) -> c_int {
    // SAFETY: libfabric closes what `describe` made, once, when it frees the info around it.
    unsafe { destroy(fid.cast()) };
    0
}

/// `FI_DUP`, which `fi_dupinfo` calls.
unsafe extern "C" fn control(fid: *mut Fid, command: c_int, arg: *mut c_void) -> c_int {
    if command != FI_DUP || arg.is_null() {
        return -barewire::errno::FI_ENOSYS;
    }
    // SAFETY: the description is alive while it is copied, and its name is a string of ours.
    let name = unsafe {
        let device = (*fid.cast::<FidNic>()).device_attr;
        crate::guard::text((*device).name).ok().flatten().unwrap_or("")
    };
    let copy = describe(name);
    if copy.is_null() {
        return -barewire::errno::FI_ENOMEM;
    }
    // SAFETY: `FI_DUP` takes a place for a pointer.
    unsafe { *arg.cast::<*mut FidNic>() = copy };
    0
}
