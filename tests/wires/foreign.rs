//! What else is on a wire: frames of other protocols and broken ones. They change counters and
//! nothing else. And the other way round: what is on the wire is what `docs/wire.md` says.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use barewire_driver::frame::{ETHERTYPE, TxFrame, address};
use barewire_driver::open::open;
use barewire_driver::port::Station;
use barewire_tests::nodes::{FABRIC, Nodes, or_skip};

use crate::lengths::Counts;
use crate::messages::{AFPACKET, UDP, there_and_back};
use crate::raw::RawSocket;
use crate::worker::{pattern, say};
use crate::{start, supervisor};

/// How many times everything is sent at least.
const ROUNDS: u64 = 300;

fn ethernet(dst: Station, ty: u16, payload: &[u8]) -> Vec<u8> {
    let mut frame = [&[0; 12][..], &ty.to_be_bytes(), payload].concat();
    address(&mut frame, dst, Station::at([2, 0, 0, 0, 0, 9]));
    frame
}

/// One of each kind, for a station at `to`.
fn foreign(to: Station, round: u64) -> Vec<Vec<u8>> {
    let noise = pattern(1400, round + 1);
    let ours = |len: usize| ethernet(to, ETHERTYPE, &noise[..len]);
    let tagged = [&0x0064_u16.to_be_bytes()[..], &ETHERTYPE.to_be_bytes(), &noise[..80]].concat();
    let lldp = Station::at([0x01, 0x80, 0xc2, 0, 0, 0x0e]);
    vec![
        ethernet(Station::BROADCAST, 0x0806, &[0, 1, 8, 0, 6, 4, 0, 1, 2, 0, 0, 0, 0, 9]),
        // A router advertisement.
        ethernet(Station::at([0x33, 0x33, 0, 0, 0, 1]), 0x86dd, &noise[..120]),
        ethernet(lldp, 0x88cc, &noise[..60]),
        ethernet(to, 0x8100, &tagged),
        ethernet(to, 0x88a8, &tagged),
        ethernet(Station::at([2, 7, 7, 7, 7, 7]), ETHERTYPE, &noise[..100]), // to somebody else
        ethernet(Station::BROADCAST, ETHERTYPE, &noise[..100]),
        ours(0),
        ours(1),
        ours(17),
        ours(46),
        ours(1400),
        // Looks like one of ours: version 1, but nothing behind it is right.
        ethernet(to, ETHERTYPE, &[&[0x41, 0x03][..], &noise[..64]].concat()),
    ]
}

/// The process that makes the noise: hears `AT mac`, and says `DONE` when it has heard `END`.
pub(crate) fn make_noise() {
    say("ADDR none");
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    let to: Station = line.trim().strip_prefix("AT ").unwrap().parse().unwrap();
    let socket = RawSocket::open(FABRIC).unwrap();
    let stop = std::thread::spawn(|| std::io::stdin().read_line(&mut String::new()));
    for round in 0.. {
        if round >= ROUNDS && stop.is_finished() {
            break;
        }
        for frame in foreign(to, round) {
            socket.send(&frame).unwrap();
        }
        // A giant: the wire carries it, the port at the other end does not.
        socket.send(&ethernet(to, ETHERTYPE, &vec![1; 4000])).unwrap();
        std::thread::sleep(Duration::from_micros(200));
    }
    say("DONE");
}

/// Messages go to and fro while everything else there is passes on the same wire.
#[test]
fn foreign_traffic_changes_only_counters() {
    let Some(nodes) = or_skip(Nodes::pair(9000)) else { return };
    let counts = beside(&nodes, "afpacket:fab0,mtu=1500");
    println!("caller: {counts:?}");
}

/// What a caller counts beside the noise.
pub(crate) fn beside(nodes: &Nodes, port: &str) -> Counts {
    let mut noise = start(nodes, 1, "noise", port);
    let seen = nodes.ip(0, "-o link show dev fab0").unwrap();
    let station = seen.split_whitespace().skip_while(|word| *word != "link/ether").nth(1).unwrap();
    noise.say(&format!("AT {station}"));
    let mut rounds = 0;
    let counts = there_and_back(nodes, [port; 2], |mtu| {
        rounds += 1;
        [0, 1, 64, 256, mtu, mtu + 1, 20_000, 100_000].repeat(8)
    });
    noise.say("END");
    noise.answer("DONE");
    noise.finish();
    // Frames with our EtherType that are too long are the port's to count; the rest of what we
    // made is refused by the protocol or never gets here.
    assert!(counts.rx_dropped > 0, "no giant was seen: {counts:?}");
    assert!(counts.refused > ROUNDS / 4, "the noise was not heard: {counts:?}");
    counts
}

/// A capture of everything on the wire while messages of all lengths pass: no frame that the
/// dissector refuses, none shorter than Ethernet's 60 bytes, and every padding accounted for.
#[test]
fn the_dissector_knows_every_frame_on_the_wire() {
    if Command::new("tshark").arg("--version").output().is_err() {
        let none: Result<(), _> = Err("tshark missing (apt-get install tshark)".to_owned());
        or_skip(none);
        return;
    }
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("wire.pcapng");
    let mut tshark = nodes.command(1, "tshark");
    tshark.args(["-q", "-i", FABRIC, "-f", "ether proto 0x88b5", "-w"]).arg(&file);
    let mut tshark = tshark.env("HOME", dir.path()).stderr(Stdio::piped()).spawn().unwrap();
    let said = BufReader::new(tshark.stderr.take().unwrap());
    let (tell, ready) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        for line in said.lines().map_while(|line| line.ok()) {
            let _ = tell.send(line);
        }
    });
    // Its first line is there when the capture runs; a hint that it runs as root may come first.
    loop {
        let line = ready.recv_timeout(supervisor::PATIENCE).unwrap();
        if line.contains("apturing on") || line.contains("Capture started") {
            break;
        }
    }
    std::thread::sleep(Duration::from_millis(500));
    there_and_back(&nodes, [AFPACKET; 2], |mtu| {
        vec![0, 1, 2, 12, 13, 64, 256, 257, mtu - 38, mtu, mtu + 1, 16_385, 70_000]
    });
    std::thread::sleep(Duration::from_millis(500));
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(tshark.id() as i32),
        nix::sys::signal::Signal::SIGINT,
    )
    .unwrap();
    tshark.wait().unwrap();
    let rows = dissect(&file, dir.path());
    assert!(rows.len() > 60, "{} frames", rows.len());
    let mut padded = 0;
    for row in &rows {
        let [len, ty, refused, expert, crc] = &row[..] else { panic!("{row:?}") };
        assert_eq!((refused.as_str(), expert.as_str()), ("", ""), "{row:?}");
        assert!(!ty.is_empty() && crc == "1", "{row:?}");
        let len: usize = len.parse().unwrap();
        assert!((60..=1514).contains(&len), "{row:?}");
        padded += usize::from(len == 60);
    }
    println!("{} frames, {padded} of the least length", rows.len());
    assert!(padded > 0, "none was padded");
}

fn dissect(file: &Path, home: &Path) -> Vec<Vec<String>> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/barewire.lua");
    let fields =
        ["frame.len", "barewire.type", "barewire.refused", "_ws.expert", "barewire.crc_ok"];
    let mut command = Command::new("tshark");
    command.arg("-X").arg(format!("lua_script:{}", script.display())).arg("-r").arg(file);
    command.args(["-n", "-T", "fields", "-E", "separator=|"]).env("HOME", home);
    for field in fields {
        command.args(["-e", field]);
    }
    let out = command.output().unwrap();
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && !errors.contains("Lua"), "{errors}");
    let text = String::from_utf8(out.stdout).unwrap();
    text.lines().map(|row| row.split('|').map(str::to_owned).collect()).collect()
}

/// Datagrams to our UDP port that are not frames of the fabric.
#[test]
fn stray_datagrams_change_only_counters() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let port = "udp:fab0:50000";
    let mut noise = start(&nodes, 1, "datagrams", UDP);
    let counts = there_and_back(&nodes, [port; 2], |mtu| {
        [0, 1, 256, mtu, mtu + 1, 20_000, 70_000].repeat(8)
    });
    noise.say("END");
    noise.answer("SENT");
    noise.finish();
    println!("caller: {counts:?}");
    assert!(counts.rx_dropped > 0, "{counts:?}");
}

/// The process that sends them, from another place than it says, to node 0.
pub(crate) fn send_datagrams() {
    say("ADDR none");
    let mut port = open("udp:fab0").unwrap();
    let to = barewire_driver::backend::udp::mac_of("10.78.0.1:50000".parse().unwrap()).unwrap();
    let liar = barewire_driver::backend::udp::mac_of("10.78.0.2:50000".parse().unwrap()).unwrap();
    let stop = std::thread::spawn(|| std::io::stdin().read_line(&mut String::new()));
    let mut sent = 0_u64;
    while !stop.is_finished() {
        let forged =
            [&to.0[..], &liar.0, &ETHERTYPE.to_be_bytes(), &pattern(60, sent + 1)].concat();
        port.tx(&TxFrame::whole(&forged)).unwrap();
        port.flush().unwrap();
        sent += 1;
        std::thread::sleep(Duration::from_micros(500));
    }
    say(&format!("SENT {sent}"));
}
