//! `fid_nic`: what programs that choose among NICs are told of a port's device.

use std::collections::BTreeMap;
use std::fs::{read_dir, read_link, read_to_string};
use std::path::Path;

use super::{compile, succeed, with};

/// What the program says of the device under a port.
fn facts_of(bench: &super::Bench, program: &Path, port: &str) -> BTreeMap<String, String> {
    let said = succeed(bench.program(program.to_str().unwrap()).env("FI_BAREWIRE_PORT", port), 60);
    assert!(said.contains("ok end\n") && !said.contains("BAD"), "{port}: {said}");
    let facts = said.lines().filter(|line| !line.starts_with("ok "));
    let facts = facts.filter_map(|line| line.split_once(' '));
    facts.map(|(what, value)| (what.to_owned(), value.to_owned())).collect()
}

/// Row X3: address, MTU, speed, state and place on the bus are those of the device, by the kernel's
/// own account, and what it does not say is NULL or 0.
#[test]
fn a_port_tells_of_its_device() {
    with(&[("cc", "gcc"), ("fi_info", "libfabric-bin")], |bench| {
        let dir = tempfile::tempdir().unwrap();
        let program = compile(dir.path(), &["cc", "-lfabric"], "nics.c");
        for interface in read_dir("/sys/class/net").unwrap() {
            let name = interface.unwrap().file_name().into_string().unwrap();
            let of = |file: &str| {
                let text = read_to_string(format!("/sys/class/net/{name}/{file}"));
                text.unwrap_or_default().trim().to_owned()
            };
            let flags = u32::from_str_radix(of("flags").trim_start_matches("0x"), 16).unwrap();
            // 1 and 772: Ethernet and loopback. One that is switched off is no port.
            if flags & 1 == 0 || !["1", "772"].contains(&of("type").as_str()) {
                continue;
            }
            let facts = facts_of(bench, &program, &format!("afpacket:{name}"));
            let is = |what: &str| facts[what].as_str();
            assert_eq!((is("name"), is("mtu"), is("network")), (&*name, &*of("mtu"), "Ethernet"));
            let mac = of("address");
            let mac = if mac == "00:00:00:00:00:00" { "" } else { &mac };
            assert_eq!(is("address"), mac, "{name}");
            let mbit = of("speed").parse::<i64>().unwrap_or(0).max(0);
            assert_eq!(is("speed"), (mbit * 1_000_000).to_string(), "{name}");
            let is_up = of("carrier") == "1";
            assert_eq!(is("state"), if is_up { "2" } else { "1" }, "{name}");
            assert_eq!(is("pci"), bdf_of(&name).unwrap_or_default(), "{name}");
            if !is("pci").is_empty() {
                let card = format!("/sys/bus/pci/devices/{}", is("pci"));
                let id = |file| read_to_string(format!("{card}/{file}")).unwrap();
                assert_eq!(
                    (is("vendor"), is("device")),
                    (id("vendor").trim(), id("device").trim())
                );
            }
        }
        let facts = facts_of(bench, &program, "udp:127.0.0.1");
        assert_eq!((&*facts["name"], &*facts["address"]), ("lo", "127.0.0.1"));
        // A segment has no address of its own, no speed, and cannot be unplugged.
        let facts = facts_of(bench, &program, &format!("{},mtu=9000", bench.port()));
        assert!(facts["name"].starts_with("/dev/shm/barewire-"), "{facts:?}");
        for (what, value) in [
            ("address", ""),
            ("mtu", "9000"),
            ("speed", "0"),
            ("state", "0"),
            ("pci", ""),
            ("bytes", "0"),
            ("vendor", ""),
            ("device", ""),
            ("firmware", ""),
        ] {
            assert_eq!(facts[what], value, "{what}");
        }
    });
}

/// Where the card of an interface is on the PCI bus. One of virtio is a level below its card.
fn bdf_of(interface: &str) -> Option<String> {
    let device = Path::new("/sys/class/net").join(interface).join("device");
    let device = device.canonicalize().ok()?;
    let levels = device.ancestors().take(2);
    let cards = levels.filter(|at| {
        read_link(at.join("subsystem")).is_ok_and(|bus| bus.file_name() == Some("pci".as_ref()))
    });
    cards.filter_map(|at| Some(at.file_name()?.to_str()?.to_owned())).next()
}
