//! What happens to a NIC while it is used: the port says so in one line and is given back, and the
//! next one works.

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::port::Port;

use crate::machine::{driver, id, nic, port, rebind, sysfs};

/// Polls until the port is gone, and says why.
pub(crate) fn end_of(port: &mut dyn Port) -> String {
    let start = Instant::now();
    let gone = loop {
        match port.rx_burst(32, &mut |_: &RxFrame<'_>| {}) {
            Err(gone) => break gone,
            Ok(_) => assert!(start.elapsed() < Duration::from_secs(30), "the port hangs"),
        }
    };
    // From now on everything says the same.
    let frame = [0xff; 60];
    assert_eq!(port.tx(&TxFrame::whole(&frame)), Err(gone.clone()));
    assert_eq!(port.flush(), Err(gone.clone()));
    assert_eq!(port.rx_burst(1, &mut |_: &RxFrame<'_>| {}), Err(gone.clone()));
    let line = gone.to_string();
    assert!(!line.contains('\n'));
    println!("{line}");
    line
}

fn config(nic: &str) -> std::fs::File {
    std::fs::File::options().read(true).write(true).open(sysfs(nic).join("config")).unwrap()
}

#[test]
fn the_device_is_reset() {
    let Some(n) = nic(0) else { return };
    if id(&n) == (0x8086, 0x10d3) {
        println!("QEMU's 82574 has no reset but by its bus, which leaves it as it was");
        return;
    }
    let mut a = port(&format!("vfio:{n}"));
    std::fs::write(sysfs(&n).join("reset"), "1").unwrap();
    assert!(end_of(&mut *a).contains("reset or stopped under us"));
    // It was given back at once: nobody has to drop the port first.
    port(&format!("vfio:{n}"));
}

#[test]
fn bus_mastering_is_switched_off() {
    let Some(n) = nic(0) else { return };
    let mut a = port(&format!("vfio:{n}"));
    let mut command = [0; 2];
    config(&n).read_exact_at(&mut command, 4).unwrap();
    command[0] &= !4;
    config(&n).write_all_at(&command, 4).unwrap();
    let line = end_of(&mut *a);
    assert!(line.contains("bus mastering") || line.contains("stopped under us"), "{line}");
    port(&format!("vfio:{n}"));
}

/// The same while its user sleeps, who wakes up for it.
#[test]
fn the_device_is_wanted_back_from_a_sleeper() {
    let Some(n) = nic(0) else { return };
    let mut a = port(&format!("vfio:{n}"));
    let waiter = a.waiter().unwrap();
    let unbinding = std::thread::spawn({
        let n = n.clone();
        move || rebind(&n, "")
    });
    let start = Instant::now();
    let gone = loop {
        waiter.wait(Duration::from_secs(20));
        match a.rx_burst(32, &mut |_: &RxFrame<'_>| {}) {
            Err(gone) => break gone.to_string(),
            Ok(_) => assert!(start.elapsed() < Duration::from_secs(30), "the port hangs"),
        }
    };
    assert!(gone.contains("wants the device back"), "{gone}");
    unbinding.join().unwrap();
    rebind(&n, "vfio-pci");
}

/// Somebody unbinds the device while it is used: it is let go, and the unbinding ends.
#[test]
fn the_device_is_wanted_back() {
    let Some(n) = nic(0) else { return };
    let mut a = port(&format!("vfio:{n}"));
    let unbinding = std::thread::spawn({
        let n = n.clone();
        move || rebind(&n, "")
    });
    assert!(end_of(&mut *a).contains("wants the device back"));
    unbinding.join().unwrap();
    assert_eq!(driver(&n), None);
    rebind(&n, "vfio-pci");
    port(&format!("vfio:{n}"));
}

/// Goal: a NIC goes back with its port although a child of the process lives.
/// Method: a child that only sleeps; it has no register mapped.
#[test]
fn a_child_does_not_keep_the_device() {
    let Some(n) = nic(0) else { return };
    let a = port(&format!("vfio:{n}"));
    // SAFETY: the child sleeps until it is killed, and calls nothing else.
    let child = unsafe { libc::fork() };
    assert!(child >= 0);
    if child == 0 {
        loop {
            // SAFETY: a plain call.
            unsafe { libc::pause() };
        }
    }
    let has_registers = |process: &str| {
        let maps = Path::new("/proc").join(process).join("maps");
        std::fs::read_to_string(maps).unwrap().contains("[vfio-device]")
    };
    let registers = [has_registers("self"), has_registers(&child.to_string())];
    drop(a);
    let again = barewire_driver::open::open(&format!("vfio:{n}")).map(drop);
    // SAFETY: a child of this process's, and a place for its status.
    unsafe {
        libc::kill(child, libc::SIGKILL);
        libc::waitpid(child, std::ptr::null_mut(), 0);
    }
    again.unwrap();
    assert_eq!(registers, [true, false]);
}
