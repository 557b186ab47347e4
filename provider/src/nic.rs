//! `fi_info.nic`: the properties of a port's device.

use std::ffi::{c_int, c_void};

use crate::abi::*;
use crate::mem::{copy_text, free, zeroed};

static OPS: FiOps = FiOps { close, control, ..FiOps::STUB };

/// The `fid_nic` of the device of port `name`, or NULL without memory. Unknown properties are NULL
/// or 0 (fi_nic(3)).
pub(crate) fn describe(name: &str) -> *mut FidNic {
    let is = barewire::port_device(name);
    let nic = fresh();
    if nic.is_null() {
        return nic;
    }
    let text = |t: Option<&str>| copy_text(t);
    let number = |at: usize| is.ids.map(|ids| format!("0x{:04x}", ids[at]));
    let mac = is.mac.map(|mac| mac.to_string());
    let ip = is.ip.map(|ip| ip.to_string());
    // SAFETY: the four structures are there, and nobody else has them yet.
    let (device, bus, link) =
        unsafe { (&mut *(*nic).device_attr, &mut *(*nic).bus_attr, &mut *(*nic).link_attr) };
    // An invalid port name is reported by the domain.
    device.name = text(Some(if is.name.is_empty() { name } else { &is.name }));
    device.vendor_id = text(number(0).as_deref());
    device.device_id = text(number(1).as_deref());
    device.device_version = text(is.ids.map(|ids| ids[2].to_string()).as_deref());
    device.driver = text(is.driver.as_deref());
    device.firmware = text(is.firmware.as_deref());
    if let Some(at) = is.pci
        && let Ok(domain) = u16::try_from(at.domain)
    {
        let [second, third] = [[at.bus, at.device], [at.function, 0]].map(u16::from_ne_bytes);
        (bus.bus_type, bus.attr) = (FI_BUS_PCI, [domain, second, third]);
    }
    link.address = text(mac.or(ip).as_deref());
    link.mtu = is.mtu;
    link.speed = usize::try_from(is.bps).unwrap_or(0);
    link.state = match is.has_carrier {
        None => 0,
        Some(false) => FI_LINK_DOWN,
        Some(true) => FI_LINK_UP,
    };
    link.network_type = text(Some("Ethernet"));
    nic
}

/// An empty `fid_nic`, or NULL without memory.
fn fresh() -> *mut FidNic {
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
    }
    nic
}

/// A copy of a `fid_nic`, or NULL without memory.
///
/// # Safety
/// `from` came from [`describe`] or from here.
unsafe fn duplicate(from: *const FidNic) -> *mut FidNic {
    let nic = fresh();
    if nic.is_null() {
        return nic;
    }
    // SAFETY: the caller's promise, and what `fresh` made is whole.
    unsafe {
        let (old, new) = (&*from, &*nic);
        *new.bus_attr = *old.bus_attr;
        *new.device_attr = *old.device_attr;
        *new.link_attr = *old.link_attr;
        let (device, link) = (&mut *new.device_attr, &mut *new.link_attr);
        for text in [
            &mut device.name,
            &mut device.device_id,
            &mut device.device_version,
            &mut device.vendor_id,
            &mut device.driver,
            &mut device.firmware,
            &mut link.address,
            &mut link.network_type,
        ] {
            *text = copy_text(crate::guard::text(*text).ok().flatten());
        }
    }
    nic
}

/// Frees a `fid_nic`; ignores NULL.
///
/// # Safety
/// `nic` came from [`describe`] or is NULL, and is not used afterwards.
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
    // SAFETY: the description is one of ours and alive while it is copied.
    let copy = unsafe { duplicate(fid.cast()) };
    if copy.is_null() {
        return -barewire::errno::FI_ENOMEM;
    }
    // SAFETY: `FI_DUP` takes a place for a pointer.
    unsafe { *arg.cast::<*mut FidNic>() = copy };
    0
}
