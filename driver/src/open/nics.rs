//! Names of VFIO ports.

use super::spec::{PortInfo, bad_spec, no_option, parse, split_option, yes_or_no};
use crate::backend::vfio::{self, VfioSettings, survey};
use crate::error::OpenError;
use crate::port::{MTU_MIN, Port};

/// Opens `vfio:ADDRESS,...`.
pub(super) fn vfio(spec: &str) -> Result<Box<dyn Port>, OpenError> {
    vfio::open(&vfio_settings(spec)?)
}

/// Checks from sysfs whether [`vfio()`] would open it.
pub(super) fn check(spec: &str) -> Result<(), OpenError> {
    let bdf = vfio_settings(spec)?.bdf;
    let nic = survey::nics().into_iter().find(|nic| nic.bdf == bdf);
    let nic = nic.ok_or_else(|| vfio::VfioError::NoDevice { bdf: bdf.clone() })?;
    match nic.obstacle() {
        None => Ok(()),
        Some((why, mend)) => Err(OpenError::device(format!("vfio:{bdf}"), libc::ENODEV, why, mend)),
    }
}

fn vfio_settings(spec: &str) -> Result<VfioSettings, OpenError> {
    let rest = spec.strip_prefix("vfio").unwrap_or(spec);
    let mut parts = rest.strip_prefix(':').unwrap_or(rest).split(',');
    let bdf = parts.next().unwrap_or("").to_ascii_lowercase();
    let Some(bdf) = full_address(&bdf) else {
        let why = "a NIC's PCI address is missing; write vfio:0000:05:00.0, as barewire info shows";
        return Err(bad_spec(spec, why));
    };
    let mut settings = VfioSettings::at(&bdf);
    for (key, value) in parts.map(split_option) {
        match key {
            "mac" => settings.mac = Some(parse(spec, value)?),
            "mtu" => settings.mtu = Some(parse(spec, value)?),
            "rx" => settings.rx_count = Some(parse(spec, value)?),
            "tx" => settings.tx_count = Some(parse(spec, value)?),
            "promisc" => settings.promiscuous = yes_or_no(spec, key, value)?,
            _ => {
                let known = "mac=, mtu=, rx=, tx=, promisc=, near= and switch=";
                return Err(no_option(spec, key, known));
            }
        }
    }
    if settings.mac.is_some_and(|mac| !mac.is_single()) {
        return Err(bad_spec(
            spec,
            "a station's address has an even first byte; write mac=02:00:...",
        ));
    }
    for count in [settings.rx_count, settings.tx_count].into_iter().flatten() {
        if !(8..=4096).contains(&count) {
            return Err(bad_spec(spec, format!("{count} buffers; write a number from 8 to 4096")));
        }
    }
    match settings.mtu {
        Some(mtu) if mtu < MTU_MIN => Err(OpenError::BadMtu { mtu, min: MTU_MIN, max: 9216 }),
        _ => Ok(settings),
    }
}

/// Normalises a PCI address: `0000:05:00.0` for itself and for `05:00.0`; `None` if it is invalid.
pub(super) fn full_address(bdf: &str) -> Option<String> {
    let full = if bdf.len() == 7 { format!("0000:{bdf}") } else { bdf.to_owned() };
    let (rest, function) = full.split_once('.')?;
    let parts: Vec<&str> = rest.split(':').collect();
    let is_hex = |s: &str, len: usize| s.len() == len && s.bytes().all(|b| b.is_ascii_hexdigit());
    let [domain, bus, device] = parts[..] else { return None };
    let is_sound = (4..=8).contains(&domain.len()) && is_hex(domain, domain.len());
    (is_sound && is_hex(bus, 2) && is_hex(device, 2) && is_hex(function, 1)).then_some(full)
}

/// The NICs of this machine, or an entry for the kind if there is none.
pub(super) fn list() -> Vec<PortInfo> {
    let nics = survey::nics();
    if nics.is_empty() {
        return vec![PortInfo {
            spec: "vfio".into(),
            what: "a NIC driven by barewire itself".into(),
            why_not: Some("this machine shows no PCI network card; see: ls /sys/bus/pci".into()),
        }];
    }
    let port = |nic: survey::NicInfo| PortInfo {
        spec: format!("vfio:{}", nic.bdf),
        what: format!("{}, {}", nic.kind_name(), nic.location()),
        why_not: nic.unusable_reason(),
    };
    nics.into_iter().map(port).collect()
}
