//! Code that is not ours at the other end: DPDK's testpmd, whose own drivers of the same two cards
//! have NIC1 and send back what arrives.

use std::io::{Read, Write};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use barewire_driver::frame::{ETHERTYPE, RxFrame, TxFrame, address};
use barewire_driver::port::{Port, Station, Tx};

use crate::machine::{nic, port};
use crate::worker::pattern;

const PROGRAM: &str = "/usr/bin/dpdk-testpmd";

const PATIENCE: Duration = Duration::from_secs(60);

/// A testpmd that forwards what arrives at one NIC out of the same one, on processor `cpu`.
struct Testpmd(Child);

/// What it counted.
#[derive(Debug)]
struct Counts {
    rx: u64,
    tx: u64,
}

impl Testpmd {
    /// `None`, and a line that says so, where there is none.
    fn start(nic: &str, cpu: u32, arguments: &[&str]) -> Option<Self> {
        if !std::path::Path::new(PROGRAM).exists() {
            println!("SKIPPED: the guest has no {PROGRAM}");
            return None;
        }
        let main = (1 - cpu).to_string();
        let child = Command::new(PROGRAM)
            .args(["-l", "0,1", "--main-lcore", &main, "-n", "1", "-m", "32", "--in-memory"])
            .args(["--no-telemetry", "--iova-mode", "va", "-a", nic, "--"])
            .args(["--port-topology=loop", "--total-num-mbufs=2048", "--nb-cores=1"])
            .args(arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        Some(Self(child))
    }

    /// Stops it, as a person does with the enter key, and reads its statistics.
    fn stop(mut self) -> Counts {
        let mut input = self.0.stdin.take().unwrap();
        // It may have ended by itself; then its output says why.
        let _ = input.write_all(b"\n");
        drop(input);
        let mut said = String::new();
        self.0.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        let status = self.0.wait().unwrap();
        assert!(status.success(), "{status}\n{said}");
        let count = |what: &str| {
            let (_, rest) = said.split_once(what).unwrap_or_else(|| panic!("no {what}\n{said}"));
            rest.split_whitespace().next().unwrap().parse().unwrap()
        };
        Counts { rx: count("RX-packets:"), tx: count("TX-packets:") }
    }
}

/// The address of a NIC, which our driver finds out and gives back.
fn station_of(nic: &str) -> Station {
    port(&format!("vfio:{nic}")).caps().station
}

fn frame(dst: Station, src: Station, serial: u64) -> Vec<u8> {
    let len = 46 + (serial * 61 % 1455) as usize;
    let mut bytes = [&[0; 12][..], &ETHERTYPE.to_be_bytes(), &pattern(len, serial)].concat();
    address(&mut bytes, dst, src);
    bytes[14..22].copy_from_slice(&serial.to_le_bytes());
    bytes
}

/// Sends numbered frames, at most 32 on the way, and sees each come back as `expected` says.
/// Says how many were sent in all, the first of which may have been too early.
fn echo(port: &mut dyn Port, count: u64, sent: [Station; 2], expected: [Station; 2]) -> u64 {
    let mut seen = vec![false; count as usize];
    let (mut next, mut missing, mut knocks) = (0, count, 0);
    let start = Instant::now();
    let mut knocked = start - PATIENCE;
    while missing > 0 {
        assert!(start.elapsed() < PATIENCE, "{missing} of {count} are missing");
        // Until the first comes back nobody may be there yet.
        if !seen[0] && knocked.elapsed() > Duration::from_millis(200) {
            assert_eq!(port.tx(&TxFrame::whole(&frame(sent[0], sent[1], 0))), Ok(Tx::Sent));
            (knocked, next) = (Instant::now(), 1);
            knocks += 1;
        }
        while seen[0] && next < count && next < count - missing + 32 {
            match port.tx(&TxFrame::whole(&frame(sent[0], sent[1], next))).unwrap() {
                Tx::Sent => next += 1,
                _ => break,
            }
        }
        port.flush().unwrap();
        let mut sink = |f: &RxFrame<'_>| {
            let mut bytes = vec![0; f.len()];
            assert!(f.copy_to(0, &mut bytes));
            let serial = u64::from_le_bytes(bytes[14..22].try_into().unwrap());
            assert!(serial < next, "what is this? {bytes:02x?}");
            assert!(bytes == frame(expected[0], expected[1], serial), "{serial} came changed");
            let again = std::mem::replace(&mut seen[serial as usize], true);
            assert!(!again || serial == 0, "{serial} came twice");
            missing -= u64::from(!again);
        };
        if port.rx_burst(32, &mut sink).unwrap() == 0 {
            std::thread::sleep(Duration::from_micros(100));
        }
    }
    count - 1 + knocks
}

fn sent_back(mode: &str, dst: impl Fn(Station) -> Station, swaps: bool) {
    let (Some(n), Some(m)) = (nic(0), nic(1)) else { return };
    let theirs = station_of(&m);
    let mut ours = port(&format!("vfio:{n}"));
    let station = ours.caps().station;
    let peer = format!("--eth-peer=0,{station}");
    let Some(testpmd) = Testpmd::start(&m, 1, &["--forward-mode", mode, &peer]) else { return };
    let sent = [dst(theirs), station];
    let expected = if swaps { [station, theirs] } else { sent };
    let count = 1000;
    let in_all = echo(&mut *ours, count, sent, expected);
    let counts = testpmd.stop();
    assert_eq!(counts.rx, counts.tx, "{counts:?}");
    assert!((count..=in_all).contains(&counts.rx), "{counts:?}, {in_all} sent");
    println!("{mode}: {count} of ours, {counts:?}");
}

/// Goal: what we send reaches a driver that is not ours unchanged, and what it sends us. Method: it
/// sends every frame back as it came, to the group address that it had.
#[test]
fn frames_come_back_from_testpmd_unchanged() {
    sent_back("io", |_| Station::BROADCAST, false);
}

/// The same to its own address, from which it answers to ours.
#[test]
fn frames_come_back_from_testpmd_readdressed() {
    sent_back("mac", |theirs| theirs, true);
}
