//! Two guests on a cable that loses frames: one test sends in one guest, the other receives in the
//! other. `VM_PEER` is the address of the other guest's endpoint.

use std::time::{Duration, Instant};

use barewire::*;

use crate::machine::nic;
use crate::worker::{Node, nap, open, pattern, settings};

const MESSAGES: u64 = 60;
const END: u64 = 1 << 60;
/// One guest may be up long before the other.
const PATIENCE: Duration = Duration::from_secs(150);

/// The node of this guest, and the other one in its vector.
fn node() -> Option<(Node, FiAddr)> {
    let Ok(peer) = std::env::var("VM_PEER") else {
        println!("SKIPPED: no second guest, see cargo xtask test vfio");
        return None;
    };
    let mut patient = settings();
    patient.t_dead = PATIENCE;
    // The other guest was told the MAC alone.
    patient.by_name = true;
    let node = open(&format!("vfio:{}", nic(0)?), patient);
    let peer = node.knows(&peer);
    Some((node, peer))
}

fn next(node: &Node) -> Completion {
    let start = Instant::now();
    let mut one = [Completion::default()];
    loop {
        match node.cq.read(&mut one) {
            Ok(_) => return std::mem::take(&mut one[0]),
            Err(Error::Again) => nap(),
            Err(_) => panic!("{}", node.cq.readerr().unwrap()),
        }
        assert!(start.elapsed() < PATIENCE, "no completion");
    }
}

fn len_of(serial: u64) -> usize {
    [0, 64, 1400, 4000, 16_000][serial as usize % 5]
}

#[test]
fn sends() {
    let Some((node, peer)) = node() else { return };
    node.ep.trecv(Buf::zeroed(8), peer, END, 0, END).unwrap();
    let (mut posted, mut done) = (0, 0);
    let mut is_told = false;
    while done < MESSAGES || !is_told {
        while posted < MESSAGES && posted - done < 8 {
            let bytes = pattern(len_of(posted), posted);
            node.ep.tsend(Buf::from(bytes), peer, posted, posted).unwrap();
            posted += 1;
        }
        match next(&node).op_context {
            END => is_told = true,
            _ => done += 1,
        }
    }
    println!("{MESSAGES} messages sent, {:?}", node.domain.port_counters().unwrap());
}

/// Each message once, in order, unchanged.
#[test]
fn receives() {
    let Some((node, peer)) = node() else { return };
    for serial in 0..MESSAGES {
        node.ep.trecv(Buf::zeroed(16_000), peer, 0, END - 1, serial).unwrap();
    }
    let mut seen = [false; MESSAGES as usize];
    for _ in 0..MESSAGES {
        let got = next(&node);
        let serial = got.tag;
        // Matched in order; a longer one may complete after a shorter one behind it.
        assert_eq!((got.op_context, got.len), (serial, len_of(serial)), "out of order");
        assert!(got.bytes() == pattern(got.len, serial), "message {serial} changed");
        assert!(!std::mem::replace(&mut seen[serial as usize], true), "{serial} came twice");
    }
    node.ep.tsend(Buf::zeroed(8), peer, END, END).unwrap();
    assert_eq!(next(&node).op_context, END);
    println!("{MESSAGES} messages received, {:?}", node.domain.port_counters().unwrap());
    // The other side may still wait for our last acknowledgement.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        node.domain.progress().unwrap();
        nap();
    }
}
