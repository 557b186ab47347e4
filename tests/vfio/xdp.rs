//! The port `xdp` on cards that the kernel's driver keeps: where the program runs and who copies
//! depends on that driver.
//!
//! BAREWIRE_TEST_PORT names two such ports, on interfaces that are up and joined by a hub.

use std::time::Duration;

use crate::kernel::{stream, until};
use crate::machine::port;
use crate::processes::{kills, there_and_back};
use crate::said::Said;

/// The two ports; prints why there are none.
fn ports() -> Option<[String; 2]> {
    let names = std::env::var("BAREWIRE_TEST_PORT").unwrap_or_default();
    let found = names.split_once(' ').filter(|(first, _)| first.starts_with("xdp:"));
    let Some((a, b)) = found else {
        println!("SKIPPED: no ports xdp in BAREWIRE_TEST_PORT, see cargo xtask test vfio");
        return None;
    };
    for name in [a, b].map(interface) {
        let carrier = format!("/sys/class/net/{name}/carrier");
        until("carrier", || std::fs::read_to_string(&carrier).ok().filter(|c| c.trim() == "1"));
    }
    Some([a.to_owned(), b.to_owned()])
}

/// The interface of a port.
fn interface(port: &str) -> &str {
    let name = port.trim_start_matches("xdp:");
    name.split(',').next().unwrap_or(name)
}

/// The kernel's driver of an interface.
fn driver(name: &str) -> String {
    let link = std::fs::read_link(format!("/sys/class/net/{name}/device/driver")).unwrap();
    link.file_name().unwrap().to_string_lossy().into_owned()
}

/// Goal: a port says where its program runs, as its driver can, and whether the kernel copies;
/// frames of many lengths arrive each way, and the next port opens. Method: numbered frames; of the
/// drivers here e1000 takes no program.
#[test]
fn frames_over_xdp() {
    let Some(names) = ports() else { return };
    let said = Said::with("the program runs in");
    let [mut a, mut b] =
        tracing::subscriber::with_default(said.clone(), || names.each_ref().map(|name| port(name)));
    let lines = said.lines();
    assert_eq!(lines.len(), 2, "{lines:?}");
    for ((_, line), name) in lines.iter().zip(&names) {
        let driver = driver(interface(name));
        println!("{driver}: {line}");
        let place = if driver == "e1000" { "the kernel's stack" } else { "the driver" };
        assert!(line.contains(&format!("runs in {place}")), "{line}");
        assert!(line.contains("copied by the kernel") != line.contains("not copied"), "{line}");
    }
    stream(&mut *a, &mut *b, 300);
    stream(&mut *b, &mut *a, 300);
    drop((a, b));
    // No program is left, or these would not open.
    let [mut a, mut b] = names.each_ref().map(|name| port(name));
    stream(&mut *a, &mut *b, 10);
}

/// Lengths around every limit of a frame and the protocol.
const LENS: [usize; 8] = [0, 1, 256, 1400, 1500, 1501, 16_385, 300_000];

#[test]
fn messages_over_xdp() {
    let Some([a, b]) = ports() else { return };
    there_and_back(&a, &b, &LENS);
}

/// One frame in twenty is lost on the way out of either, some change their order or arrive twice.
#[test]
fn messages_over_xdp_that_loses_frames() {
    let Some(ports) = ports() else { return };
    let [a, b] = ports
        .map(|port| format!("fault(loss=0.05,dup=0.01,reorder=0.02,corrupt=0.01,seed=3):{port}"));
    there_and_back(&a, &b, &LENS);
}

/// Goal: kill -9 of either process leaves the interface fit for the next one, with no program of
/// the dead one's, and every operation of the survivor ends in time.
#[test]
fn kill_9_over_xdp() {
    let Some(names) = ports() else { return };
    let restarts = driver(interface(&names[0])) == "igb";
    let deaf = if restarts { RESTART } else { Duration::ZERO };
    kills(&names, deaf, if is_nightly() { 8 } else { 2 });
}

/// igb takes its link down when a program comes or goes, and sees it again after at most 2 s.
const RESTART: Duration = Duration::from_secs(3);

fn is_nightly() -> bool {
    std::env::var_os("BAREWIRE_NIGHTLY").is_some()
}
