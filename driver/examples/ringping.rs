//! Measures the shm port between two processes against what the machine can do at all.
//!
//! `cargo run --release -p barewire-driver --example ringping` prints, for rounds taken in turns:
//! half round trips of a bare cache line and of a frame with 8 bytes of payload, and the rate of
//! 64 KiB frames one way beside `memcpy`. `ringping count tx|rx|idle N` runs N operations in one
//! process, for an instruction counter (run it twice and subtract).

use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use barewire_driver::backend::shm::{ShmPort, ShmSettings};
use barewire_driver::frame::{Body, RxFrame, TxFrame};
use barewire_driver::port::{MacAddr, Port, Tx};

const SERVER: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const CLIENT: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);
/// At most; ten seconds is the other limit.
const ROUNDS: usize = 300;
const PINGS: u32 = 500;
/// Bytes of a large frame with its header; fits the smallest ring that is tried here.
const FRAME: usize = 65_400;

fn main() {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("server") => server(&args[2]),
        Some("count") => count(&args[2], args[3].parse().expect("a number")),
        _ => client(),
    }
}

fn open(name: &str, mac: MacAddr) -> ShmPort {
    let ring_len = std::env::var("RING").ok().and_then(|v| v.parse().ok());
    let settings = ShmSettings { station: Some(mac.into()), ring_len, ..ShmSettings::named(name) };
    ShmPort::open(&settings).expect("the segment opens")
}

/// Where the bare cache line is: a file of its own in /dev/shm.
fn line(name: &str) -> memmap2::MmapRaw {
    let path = format!("/dev/shm/{name}-line");
    let mut options = std::fs::OpenOptions::new();
    let file = options.read(true).write(true).create(true).truncate(false).open(path);
    let file = file.expect("/dev/shm is writable");
    file.set_len(4096).expect("/dev/shm has a page");
    memmap2::MmapOptions::new().map_raw(&file).expect("a page can be mapped")
}

fn word(map: &memmap2::MmapRaw) -> &AtomicU64 {
    // SAFETY: an aligned word of a mapping that lives as long as the borrow.
    unsafe { AtomicU64::from_ptr(map.as_mut_ptr().cast()) }
}

fn pin(core: usize) {
    let mut set = nix::sched::CpuSet::new();
    let _ = set.set(core);
    let _ = nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set);
}

/// Answers 8 B pings, swallows and counts large frames, and follows the bare line.
fn server(name: &str) {
    pin(1);
    // Not to spin for ever if the client fails.
    let _ = nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGKILL);
    let map = line(name);
    let mut port = open(name, SERVER);
    let mut bytes = 0_usize;
    let mut into = vec![0_u8; FRAME];
    loop {
        let value = word(&map).load(Ordering::Acquire);
        match value {
            // Odd numbers are the client's turn in a bare ping-pong.
            2.. if value & 1 == 0 => word(&map).store(value + 1, Ordering::Release),
            1 => return,
            _ => {}
        }
        if value >= 2 {
            continue;
        }
        let mut pings = 0;
        let mut sink = |f: &RxFrame<'_>| {
            if f.len() < 100 {
                pings += 1;
            } else {
                f.copy_to(14, &mut into[..f.len() - 14]);
                bytes += f.len() - 14;
            }
        };
        port.rx_burst(32, &mut sink).expect("open");
        for _ in 0..pings {
            reply(&mut port, CLIENT, 0);
        }
        if bytes >= 16 * FRAME {
            bytes -= 16 * FRAME;
            reply(&mut port, CLIENT, 1);
        }
    }
}

/// A frame as the fabric sends it: 62 bytes of headers, 8 of payload.
fn reply(port: &mut ShmPort, to: MacAddr, serial: u64) {
    let mut head = [0_u8; 62];
    head[..6].copy_from_slice(&to.0);
    let payload = serial.to_le_bytes();
    let frame = TxFrame { head: &head, body: Body::Bytes(&payload), tail: &[] };
    while port.tx(&frame) != Ok(Tx::Sent) {}
    port.flush().expect("open");
}

fn wait_one(port: &mut ShmPort) {
    let mut sink = |f: &RxFrame<'_>| assert!(f.chunk_at::<8>(62).is_some());
    while port.rx_burst(32, &mut sink) == Ok(0) {}
}

fn client() {
    let name = format!("ringping-{}", std::process::id());
    pin(0);
    let map = line(&name);
    let exe = std::env::current_exe().expect("we are a file");
    let mut server: Child =
        Command::new(exe).args(["server", &name]).stdin(Stdio::null()).spawn().expect("spawns");
    let mut port = open(&name, CLIENT);
    reply(&mut port, SERVER, 0);
    wait_one(&mut port);
    let mut rows = Vec::new();
    let until = Instant::now() + std::time::Duration::from_secs(10);
    let mut round_count = 0;
    while round_count < ROUNDS && Instant::now() < until {
        round_count += 1;
        let bare = bare_ping(word(&map));
        let shm = shm_ping(&mut port);
        let copy = memcpy_rate();
        let rate = stream(&mut port);
        let after = bare_ping(word(&map));
        // Only rounds in which nothing else ran or moved: the line before and after agree.
        if bare.max(after) < 1.2 * bare.min(after) {
            rows.push([bare, shm, shm / bare, copy, rate, rate / copy]);
        }
    }
    println!("{} of {round_count} rounds were calm; each column p10, median, p90", rows.len());
    let names = ["line ns", "shm ns", "shm / line", "memcpy GB/s", "shm GB/s", "shm / memcpy"];
    for (i, name) in names.iter().enumerate() {
        let mut v: Vec<f64> = rows.iter().map(|r| r[i]).collect();
        v.sort_by(f64::total_cmp);
        if let Some(last) = v.len().checked_sub(1) {
            println!(
                "{name:>13}: {:8.2} {:8.2} {:8.2}",
                v[last / 10],
                v[last / 2],
                v[last * 9 / 10]
            );
        }
    }
    word(&map).store(1, Ordering::Release);
    let _ = server.wait();
    let _ = std::fs::remove_file(format!("/dev/shm/{name}-line"));
}

/// Half a round trip of one line, ns.
fn bare_ping(word: &AtomicU64) -> f64 {
    let began = Instant::now();
    for i in 0..u64::from(PINGS) {
        let value = 2 + 2 * i;
        word.store(value, Ordering::Release);
        while word.load(Ordering::Acquire) != value + 1 {}
    }
    let ns = began.elapsed().as_nanos() as f64 / f64::from(PINGS) / 2.0;
    word.store(0, Ordering::Release);
    ns
}

fn shm_ping(port: &mut ShmPort) -> f64 {
    for _ in 0..50 {
        reply(port, SERVER, 0);
        wait_one(port);
    }
    let began = Instant::now();
    for _ in 0..PINGS {
        reply(port, SERVER, 0);
        wait_one(port);
    }
    began.elapsed().as_nanos() as f64 / f64::from(PINGS) / 2.0
}

/// GB/s of copying 1 MiB from one buffer to another.
fn memcpy_rate() -> f64 {
    let src = vec![1_u8; 1 << 20];
    let mut dst = vec![2_u8; 1 << 20];
    let n = 100;
    let began = Instant::now();
    for _ in 0..n {
        dst.copy_from_slice(std::hint::black_box(&src));
        std::hint::black_box(&dst);
    }
    (n << 20) as f64 / began.elapsed().as_nanos() as f64
}

/// GB/s of 16 frames at a time out of a 1 MiB buffer, answered once all have been copied out.
fn stream(port: &mut ShmPort) -> f64 {
    let mut head = [0_u8; 14];
    head[..6].copy_from_slice(&SERVER.0);
    let src = vec![3_u8; 16 * FRAME];
    let n = 20;
    let began = Instant::now();
    // Two messages on the way, so that neither side waits for the other's answer.
    for i in 0..n {
        for piece in src.chunks_exact(FRAME - 14).take(16) {
            let frame = TxFrame { head: &head, body: Body::Bytes(piece), tail: &[0; 14] };
            while port.tx(&frame) != Ok(Tx::Sent) {}
        }
        if i > 0 {
            wait_answer(port);
        }
    }
    wait_answer(port);
    (n * 16 * FRAME) as f64 / began.elapsed().as_nanos() as f64
}

fn wait_answer(port: &mut ShmPort) {
    while port.rx_burst(1, &mut |_: &RxFrame<'_>| {}) == Ok(0) {}
}

/// Runs `n` operations for an instruction counter.
fn count(what: &str, n: u32) {
    let name = format!("ringcount-{}", std::process::id());
    let (mut a, mut b) = (open(&name, CLIENT), open(&name, SERVER));
    reply(&mut a, SERVER, 0);
    wait_one(&mut b);
    let mut seen = 0_u32;
    let (tx, rx) = (what != "idle", what != "tx");
    // Through the trait, as the fabric does it; one sink and one frame for all.
    let (a, b): (&mut dyn Port, &mut dyn Port) = (&mut a, &mut b);
    let mut sink = |f: &RxFrame<'_>| seen += f.len() as u32;
    let mut head = [0_u8; 62];
    head[..6].copy_from_slice(&SERVER.0);
    let payload = [7; 8];
    let frame = TxFrame { head: &head, body: Body::Bytes(&payload), tail: &[] };
    for i in 0..n {
        if tx {
            a.tx(std::hint::black_box(&frame)).expect("open");
        }
        // With tx alone the room comes back in bursts, whose cost per frame is small.
        if rx || i % 64 == 0 {
            b.rx_burst(64, &mut sink).expect("open");
        }
    }
    std::hint::black_box(seen);
}
