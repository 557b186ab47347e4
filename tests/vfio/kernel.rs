//! Code that is not ours at the other end: the kernel's own driver of the same NIC, reached over
//! AF_PACKET.
//!
//! The guest's kernel has that driver, which takes the second NIC of each pair.

use std::time::{Duration, Instant};

use barewire_driver::frame::{ETHERTYPE, RxFrame, TxFrame, address};
use barewire_driver::port::{Port, Station, Tx};

use crate::machine::{id, nic, port, rebind, sh, sysfs};
use crate::worker::pattern;

/// The PCI driver of the kernel that a NIC is for.
fn kernels_driver(nic: &str) -> &'static str {
    match id(nic) {
        (0x8086, 0x10c9) => "igb",
        (0x8086, 0x10d3) => "e1000e",
        (0x8086, _) => "e1000",
        (0x15ad, _) => "vmxnet3",
        _ => "virtio-pci",
    }
}

/// Waits for something that the kernel does by itself.
pub(crate) fn until<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(start.elapsed() < Duration::from_secs(20), "no {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The kernel's interface on a NIC, once it is there.
pub(crate) fn interface(nic: &str) -> String {
    let dir = sysfs(nic).display().to_string();
    until("interface", || {
        let found = sh(&format!("ls -d {dir}/net/* {dir}/virtio*/net/* 2>/dev/null || true"));
        Some(found.trim().rsplit_once('/')?.1.to_owned())
    })
}

/// A frame of some length that `mtu` allows.
fn frame(dst: Station, src: Station, mtu: usize, serial: u64) -> Vec<u8> {
    let len = 46 + serial as usize * 61 % (mtu - 45);
    let mut frame = [&[0; 12][..], &ETHERTYPE.to_be_bytes(), &pattern(len, serial)].concat();
    address(&mut frame, dst, src);
    frame
}

/// Sends `count` numbered frames and sees each of them arrive as it was sent.
pub(crate) fn stream(from: &mut dyn Port, to: &mut dyn Port, count: u64) {
    let (dst, src) = (to.caps().station, from.caps().station);
    let mtu = from.caps().mtu.min(to.caps().mtu);
    let (mut sent, mut missing) = (0, count);
    let mut seen = vec![false; count as usize];
    let start = Instant::now();
    while missing > 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "{missing} of {count} are missing");
        // Few on the way at once: the kernel drops what its socket has no room for.
        while sent < count && sent < count - missing + 64 {
            match from.tx(&TxFrame::whole(&frame(dst, src, mtu, sent))).unwrap() {
                Tx::Sent => sent += 1,
                _ => break,
            }
        }
        from.flush().unwrap();
        let mut sink = |f: &RxFrame<'_>| {
            let mut bytes = vec![0; f.len()];
            assert!(f.copy_to(0, &mut bytes));
            if bytes[12..14] != ETHERTYPE.to_be_bytes() {
                return; // the kernel's neighbour discovery
            }
            let is_it = |&serial: &u64| frame(dst, src, mtu, serial) == bytes;
            let serial = (0..sent).rev().find(is_it).expect("a frame came changed");
            assert!(!std::mem::replace(&mut seen[serial as usize], true), "{serial} came twice");
            missing -= 1;
        };
        if to.rx_burst(32, &mut sink).unwrap() == 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
}

/// Goal: what our driver sends is what the kernel's receives, and the other way round, with equal
/// counts on both sides. Method: NIC0 and NIC1, and every other pair that VM_KERNEL names.
#[test]
fn frames_to_and_from_the_kernels_driver() {
    let pairs = std::env::var("VM_KERNEL").unwrap_or_else(|_| "0".to_owned());
    for first in pairs.split(' ').map(|first| first.parse().unwrap()) {
        let (Some(n), Some(m)) = (nic(first), nic(first + 1)) else { return };
        to_and_from_the_kernel(n, m);
    }
}

/// Gives a NIC to the kernel's driver. Returns its interface, which is up.
fn lend(nic: &str) -> String {
    rebind(nic, kernels_driver(nic));
    let name = interface(nic);
    sh(&format!("ip link set {name} up"));
    let carrier = format!("/sys/class/net/{name}/carrier");
    until("carrier", || std::fs::read_to_string(&carrier).ok().filter(|c| c.trim() == "1"));
    name
}

/// Goal: a VLAN of ours is the kernel's: its interface of that VLAN hears us and is heard, and
/// that of another one does not.
#[test]
fn frames_to_and_from_the_kernels_vlan() {
    let (Some(n), Some(m)) = (nic(0), nic(1)) else { return };
    let name = lend(&m);
    for id in [100, 101] {
        sh(&format!("ip link add link {name} name v{id} type vlan id {id}"));
        sh(&format!("ip link set v{id} mtu 1496 up"));
    }
    let mut ours = port(&format!("vlan(100,pcp=3):vfio:{n}"));
    let [mut same, mut other] = [100, 101].map(|id| port(&format!("afpacket:v{id}")));
    stream(&mut *ours, &mut *same, 200);
    stream(&mut *same, &mut *ours, 200);
    let foreign = frame(ours.caps().station, other.caps().station, 1496, 0);
    assert_eq!(other.tx(&TxFrame::whole(&foreign)), Ok(Tx::Sent));
    other.flush().unwrap();
    // What comes after it was sent after it.
    stream(&mut *same, &mut *ours, 10);
    assert_eq!(other.counters().rx_frames, 0);
    drop((ours, same, other));
    sh("ip link del v100; ip link del v101");
    rebind(&m, "vfio-pci");
}

fn to_and_from_the_kernel(n: String, m: String) {
    let driver = kernels_driver(&m);
    let name = lend(&m);
    let mut ours = port(&format!("vfio:{n}"));
    let mut theirs = port(&format!("afpacket:{name}"));
    let count = 400;
    stream(&mut *ours, &mut *theirs, count);
    stream(&mut *theirs, &mut *ours, count);
    let (a, b) = (ours.counters(), theirs.counters());
    assert_eq!((a.tx_frames, b.rx_frames, b.tx_frames), (count, count, count));
    assert!(a.rx_frames >= count && a.rx_dropped == 0, "{a:?}");
    let statistic = |what: &str| {
        let file = format!("/sys/class/net/{name}/statistics/{what}");
        std::fs::read_to_string(file).unwrap().trim().parse::<u64>().unwrap()
    };
    assert_eq!((statistic("rx_packets"), statistic("rx_errors")), (count, 0));
    assert!(statistic("tx_packets") >= count);
    println!("{count} frames each way between vfio:{n} and {name} ({driver})");
    drop((ours, theirs));
    rebind(&m, "vfio-pci");
}
