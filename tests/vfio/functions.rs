//! Virtual functions of a card whose physical function the kernel drives.
//!
//! The guest's NIC0 and NIC1 are two virtual functions of the card VM_CARD; VM_WIRE is another card
//! of the same kind at the other end of its cable. The kernel drives both cards.

use std::time::{Duration, Instant};

use barewire_driver::backend::vfio::{self, Kind, VfioSettings, survey};
use barewire_driver::frame::{ETHERTYPE, RxFrame, TxFrame, address};
use barewire_driver::port::Station;

use crate::cable::{negotiates, told};
use crate::kernel::{interface, stream, until};
use crate::machine::{Monitor, nic, pair, port, refusal, sh};
use crate::said::Said;
use crate::trouble::end_of;

/// A card's PCI address and the kernel's interface on it; prints why there is none.
fn card(variable: &str) -> Option<(String, String)> {
    let Ok(bdf) = std::env::var(variable) else {
        println!("SKIPPED: no {variable} in the environment, see cargo xtask test vfio");
        return None;
    };
    let name = interface(&bdf);
    Some((bdf, name))
}

/// Sets an interface up, and waits for its carrier.
fn up(name: &str) {
    sh(&format!("ip link set {name} up"));
    let carrier = format!("/sys/class/net/{name}/carrier");
    until("carrier", || std::fs::read_to_string(&carrier).ok().filter(|c| c.trim() == "1"));
}

/// Goal: a function of the card talks to another, to the kernel's interface on the same card, and
/// to who is at the other end of the cable, each way. Method: numbered frames of many lengths.
#[test]
fn frames_go_to_every_end() {
    let (Some((_, own)), Some((_, other))) = (card("VM_CARD"), card("VM_WIRE")) else { return };
    let Some([mut a, mut b]) = pair("") else { return };
    for name in [&own, &other] {
        up(name);
    }
    let count = 300;
    stream(&mut *a, &mut *b, count);
    stream(&mut *b, &mut *a, count);
    println!("{count} frames each way between two functions");
    for name in [own, other] {
        let mut kernels = port(&format!("afpacket:{name}"));
        stream(&mut *a, &mut *kernels, count);
        stream(&mut *kernels, &mut *a, count);
        println!("{count} frames each way between a function and {name}");
    }
}

/// Goal: broadcasts of a function reach the others, the kernel's interface on the card, and the
/// other end of the cable.
#[test]
fn a_broadcast_reaches_everybody() {
    let (Some((_, own)), Some((_, other))) = (card("VM_CARD"), card("VM_WIRE")) else { return };
    let Some([mut a, b]) = pair("") else { return };
    for name in [&own, &other] {
        up(name);
    }
    let kernels = [own, other].map(|name| port(&format!("afpacket:{name}")));
    let [c, d] = kernels;
    let mut bytes = [&[0; 12][..], &ETHERTYPE.to_be_bytes(), &[0x5a; 50]].concat();
    address(&mut bytes, Station::BROADCAST, a.caps().station);
    a.tx(&TxFrame::whole(&bytes)).unwrap();
    a.flush().unwrap();
    for mut to in [b, c, d] {
        until("broadcast", || {
            let mut came = None;
            let mut sink = |f: &RxFrame<'_>| {
                let mut got = vec![0; f.len()];
                assert!(f.copy_to(0, &mut got));
                came = came.or((got == bytes).then_some(()));
            };
            to.rx_burst(32, &mut sink).unwrap();
            came
        });
    }
}

/// Goal: a physical function that is down is named with the command that mends it, soon; a port
/// that was open when it went down is gone, and says why; the next one works. Method: the kernel's
/// interface is set down and up.
#[test]
fn the_physical_function_is_set_down() {
    let (Some((bdf, name)), Some(n)) = (card("VM_CARD"), nic(0)) else { return };
    let mut a = port(&format!("vfio:{n}"));
    sh(&format!("ip link set {name} down"));
    let line = end_of(&mut *a);
    assert!(line.contains("its physical function was reset"), "{line}");
    let start = Instant::now();
    let line = refusal(&format!("vfio:{n}"));
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
    let mend = format!("of {bdf}, whose driver does not answer; sudo ip link set {name} up");
    assert!(line.contains(&mend), "{line}");
    up(&name);
    port(&format!("vfio:{n}"));
}

/// Goal: an address that the card's owner gives a function is its own, and no other is had; without
/// one the function has one of its own, which nobody else has.
#[test]
fn the_cards_owner_gives_an_address() {
    let (Some((bdf, name)), Some(n), Some(m)) = (card("VM_CARD"), nic(0), nic(1)) else { return };
    let stations = [&n, &m].map(|nic| port(&format!("vfio:{nic}")).caps().station);
    assert_ne!(stations[0], stations[1]);
    let Ok(ip) = std::env::var("VM_IP") else {
        println!("SKIPPED: no VM_IP in the environment, a program that sets addresses");
        return;
    };
    sh(&format!("{ip} link set {name} vf 1 mac 02:00:00:00:00:51"));
    let given: Station = "02:00:00:00:00:51".parse().unwrap();
    assert_eq!(port(&format!("vfio:{m}")).caps().station, given);
    let line = refusal(&format!("vfio:{m},mac=02:00:00:00:00:52"));
    let said = format!("the driver of {bdf} does not let {m} have the address 02:00:00:00:00:52");
    assert!(line.starts_with(&said), "{line}");
    assert!(line.ends_with(&format!("ip link set {name} vf 1 mac 02:00:00:00:00:52")), "{line}");
    // What the owner has given does not go with the process.
    assert_eq!(port(&format!("vfio:{m}")).caps().station, given);
}

/// Goal: who wants everybody's frames is told that a function has only its own.
#[test]
fn a_switch_takes_the_whole_card() {
    let (Some((bdf, _)), Some(n)) = (card("VM_CARD"), nic(0)) else { return };
    let settings = VfioSettings { promiscuous: true, ..VfioSettings::at(&n) };
    let line = vfio::open(&settings).map(|_| ()).unwrap_err().to_string();
    println!("{line}");
    assert!(
        line.contains(&format!("the driver of {bdf} lets {n} have no frames to other")),
        "{line}"
    );
    assert!(line.ends_with(&format!("--bind {bdf}")), "{line}");
}

/// Goal: the driver of an I350's function, whose registers are the same, starts, hears and is
/// heard. Method: those of an 82576 taken for it.
#[test]
fn functions_taken_for_an_i350s() {
    let (Some(_), Some(n), Some(m)) = (card("VM_CARD"), nic(0), nic(1)) else { return };
    let open = |nic: &String| vfio::open_as(&VfioSettings::at(nic), Kind::IntelI350Vf).unwrap();
    let [mut a, mut b] = [&n, &m].map(open);
    stream(&mut *a, &mut *b, 50);
    stream(&mut *b, &mut *a, 50);
}

/// Goal: a function's link is the card's, and told in time. Method: the card's cable is pulled and
/// put back, while the one function is polled and the other opened again and again.
#[test]
fn the_link_is_the_cards() {
    let (Some(_), Some(n), Some(m)) = (card("VM_CARD"), nic(0), nic(1)) else { return };
    let Some(mut monitor) = Monitor::open() else { return };
    let said = Said::with("carrie");
    tracing::subscriber::with_default(said.clone(), || {
        let mut polled = port(&format!("vfio:{m}"));
        let mut poll = || {
            polled.rx_burst(32, &mut |_: &RxFrame<'_>| {}).unwrap();
        };
        let pulled = monitor.pull();
        let out = told(&said, 0, Duration::ZERO, &mut poll);
        drop(pulled);
        let back = told(&said, 1, negotiates(&m), &mut poll);
        println!("told after {out:?}, and after {back:?} that it is back");
    });
    let awaits = |bps| {
        let is = || (port(&format!("vfio:{n}")).caps().link_bps == bps).then_some(());
        until("change of the link", is);
    };
    let pulled = monitor.pull();
    awaits(0);
    drop(pulled);
    awaits(1_000_000_000);
}

/// Goal: the list of NICs says which card a function is a part of.
#[test]
fn the_list_names_the_card() {
    let (Some((bdf, name)), Some(n), Some(m)) = (card("VM_CARD"), nic(0), nic(1)) else { return };
    let nics = survey::nics();
    for (i, function) in [n, m].into_iter().enumerate() {
        let found = nics.iter().find(|nic| nic.bdf == function).unwrap();
        println!("{}: {}, {}", found.bdf, found.kind_name(), found.location());
        let place = format!("VF {i} of {bdf}, driver vfio-pci");
        assert!(found.location().contains(&place) && found.unusable_reason().is_none());
        assert_eq!(found.kind_name(), "Intel 82576 virtual function");
    }
    let card = nics.iter().find(|nic| nic.bdf == bdf).unwrap();
    assert!(card.location().ends_with(&format!("driver igb ({name})")), "{}", card.location());
}
