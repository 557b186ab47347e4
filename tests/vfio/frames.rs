//! What a port promises, frame by frame: both NICs in one thread, on one hub.

use std::time::{Duration, Instant};

use barewire_driver::backend::vfio::{self, Kind, VfioSettings};
use barewire_driver::frame::{Body, RxFrame, TxFrame, address};
use barewire_driver::mem::{IoBuf, Span};
use barewire_driver::port::{Port, PortCounters, Station, Tx};

use crate::machine::{Overrun, id, is_function, nic, overrun, pair, port};
use crate::worker::pattern;

/// Longest that a frame may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// A frame of `len` bytes after its header, different for every `serial`.
fn frame(dst: Station, src: Station, len: usize, serial: u64) -> Vec<u8> {
    let body = pattern(len, serial);
    let mut frame = [&[0; 12][..], &[0x88, 0xb5], &body].concat();
    address(&mut frame, dst, src);
    frame
}

fn send(port: &mut dyn Port, bytes: &[u8]) -> Tx {
    port.tx(&TxFrame::whole(bytes)).unwrap()
}

/// What has arrived, at most `max` frames.
fn take(port: &mut dyn Port, max: usize) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    let mut sink = |f: &RxFrame<'_>| {
        let mut bytes = vec![0; f.len()];
        assert!(f.copy_to(0, &mut bytes));
        got.push(bytes);
    };
    port.rx_burst(max, &mut sink).unwrap();
    got
}

/// The next `count` frames.
fn next(port: &mut dyn Port, count: usize) -> Vec<Vec<u8>> {
    let start = Instant::now();
    let mut got = Vec::new();
    while got.len() < count {
        let more = take(port, 64.min(count - got.len()));
        if more.is_empty() {
            std::thread::sleep(Duration::from_micros(50));
        }
        got.extend(more);
        assert!(start.elapsed() < PATIENCE, "{} of {count} frames came", got.len());
    }
    got
}

/// Nothing comes for a while.
fn silence(port: &mut dyn Port) {
    for _ in 0..20 {
        assert_eq!(take(port, 64), Vec::<Vec<u8>>::new());
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends a frame and waits for it: QEMU's 82540 takes none within a second of its start.
fn warm_up(from: &mut dyn Port, to: &mut dyn Port) {
    let bytes = frame(to.caps().station, from.caps().station, 100, 0);
    assert_eq!(send(from, &bytes), Tx::Sent);
    from.flush().unwrap();
    assert_eq!(next(to, 1), [bytes]);
}

/// Whether `got` is `sent`, with whatever a short frame was padded with.
fn same(sent: &[u8], got: &[u8]) -> bool {
    let (start, padding) = got.split_at(sent.len().min(got.len()));
    start == sent && padding.iter().all(|&b| b == 0) && (padding.is_empty() || got.len() <= 60)
}

fn every_length(options: &str) {
    let Some([mut a, mut b]) = pair(options) else { return };
    let mtu = a.caps().mtu;
    let (from, to) = (a.caps().station, b.caps().station);
    let steps = [0, 1, 45, 46, 47, 63, 64, 255, 256, mtu / 2, mtu - 1, mtu];
    let lens = steps.into_iter().chain((0..mtu).step_by(131));
    for (serial, len) in lens.enumerate() {
        let bytes = frame(to, from, len, serial as u64);
        assert_eq!(send(&mut *a, &bytes), Tx::Sent);
        a.flush().unwrap();
        let got = next(&mut *b, 1);
        assert!(same(&bytes, &got[0]), "{len} bytes came changed, {} long", got[0].len());
    }
    let (sent, got) = (a.counters(), b.counters());
    assert_eq!((sent.tx_frames, sent.tx_dropped), (got.rx_frames, 0));
    println!("{}: mtu {mtu}, {} frames", a.caps().name, got.rx_frames);
}

#[test]
fn every_length_arrives_unchanged() {
    every_length("");
}

/// Other chips of the same driver: the guest may have one pair of them beside the first.
#[test]
fn a_second_pair_talks() {
    let nics = ["NIC2", "NIC3"].map(|nic| std::env::var(nic).ok());
    let [Some(n), Some(m)] = nics else { return };
    let [mut a, mut b] = [n, m].map(|nic| port(&format!("vfio:{nic}")));
    warm_up(&mut *a, &mut *b);
    warm_up(&mut *b, &mut *a);
}

/// Goal: the driver of each kind of the 82576's family starts, hears and is heard, takes back what
/// it took of the device, and opens again. Method: an 82576, taken for each of the others: rings,
/// filters, interrupts and the registers of link and PHY are the same; those that it does not have
/// read as zero.
#[test]
fn an_82576_taken_for_its_successors() {
    let (Some(n), Some(m)) = (nic(0), nic(1)) else { return };
    if id(&n) != (0x8086, 0x10c9) {
        return;
    }
    let kinds =
        [Kind::Intel82580, Kind::IntelI350, Kind::IntelI354, Kind::IntelI210, Kind::IntelI211];
    for kind in kinds {
        let start = Instant::now();
        let open_as = |nic: &String| vfio::open_as(&VfioSettings::at(nic), kind).unwrap();
        let [mut a, mut b] = [&n, &m].map(open_as);
        warm_up(&mut *a, &mut *b);
        warm_up(&mut *b, &mut *a);
        assert_eq!(a.caps().link_bps, 1_000_000_000, "{kind:?}");
        println!("{}: a frame each way, in {:?}", kind.name(), start.elapsed());
    }
}

#[test]
fn jumbo_frames_arrive_unchanged() {
    every_length(",mtu=9000");
}

#[test]
fn small_rings_and_an_odd_size_work_too() {
    every_length(",mtu=2030,rx=16,tx=8");
}

/// A frame in three pieces, the middle one in the application's memory in two.
#[test]
fn pieces_are_joined_in_order() {
    let Some([mut a, mut b]) = pair("") else { return };
    let whole = frame(b.caps().station, a.caps().station, 1000, 1);
    let mut body = whole[40..900].to_vec();
    let (first, rest) = body.split_at_mut(300);
    // SAFETY: `body` lives to the end of the test and nobody writes it.
    let spans = unsafe { [first, rest].map(|part| Span::from_raw(part.as_mut_ptr(), part.len())) };
    let mut buf = IoBuf::EMPTY;
    for span in spans {
        assert!(buf.push(span));
    }
    let body = Body::Io { buf: &buf, offset: 0, len: 860 };
    let frame = TxFrame { head: &whole[..40], body, tail: &whole[900..] };
    assert_eq!(a.tx(&frame), Ok(Tx::Sent));
    a.flush().unwrap();
    assert_eq!(next(&mut *b, 1), [whole]);
}

/// Goal: nothing is lost untold, doubled or changed when both rings are full again and again.
/// Method: many times more frames than there are buffers, in both directions, the receiver slower
/// than the sender. A hub under QEMU may exchange two frames, so order is not asked for. Some of
/// its cards have frames wait for a buffer; the others drop them, and what they count we count.
#[test]
fn full_rings_push_back_and_lose_nothing() {
    let Some(mut ports) = pair("") else { return };
    let macs = [ports[0].caps().station, ports[1].caps().station];
    let [a, b] = &mut ports;
    warm_up(&mut **a, &mut **b);
    warm_up(&mut **b, &mut **a);
    let total = 3000_u64;
    let mut sent = [0_u64; 2];
    let mut seen = [vec![0_u8; total as usize], vec![0; total as usize]];
    let mut pushed_back = 0;
    let start = Instant::now();
    let mut moved_at = start;
    let overrun = nic(0).map_or(Overrun::Waits, |nic| overrun(&nic));
    let is_over = |ports: &[Box<dyn Port>; 2], moved_at: Instant| {
        let is_quiet = moved_at.elapsed() > Duration::from_millis(500);
        overrun == Overrun::Untold && is_quiet
            || ports.iter().all(|port| {
                let PortCounters { rx_frames, rx_dropped, .. } = port.counters();
                rx_frames + rx_dropped > total
            })
    };
    while !is_over(&ports, moved_at) {
        let counted = || ports.each_ref().map(|port| port.counters());
        assert!(start.elapsed() < 3 * PATIENCE, "sent {sent:?}, {:?}", counted());
        let mut idle = true;
        for i in 0..2 {
            while sent[i] < total {
                let len = 46 + (sent[i] * 37 % 1400) as usize;
                let mut bytes = frame(macs[1 - i], macs[i], len, sent[i]);
                bytes[14..22].copy_from_slice(&sent[i].to_le_bytes());
                if send(&mut *ports[i], &bytes) == Tx::Full {
                    pushed_back += 1;
                    break;
                }
                sent[i] += 1;
                idle = false;
            }
            ports[i].flush().unwrap();
            for got in take(&mut *ports[i], 32) {
                idle = false;
                let serial = u64::from_le_bytes(got[14..22].try_into().unwrap());
                let len = 46 + (serial * 37 % 1400) as usize;
                assert!(got[22..] == frame(macs[i], macs[1 - i], len, serial)[22..], "changed");
                seen[i][serial as usize] += 1;
            }
        }
        if !idle {
            moved_at = Instant::now();
        } else {
            // What a card has dropped is looked at with its state, soon where somebody sleeps.
            for port in &ports {
                port.waiter().unwrap().wait(Duration::from_micros(100));
            }
        }
    }
    assert!(seen.iter().flatten().all(|&times| times <= 1), "a frame came twice");
    assert!(pushed_back > 0, "the rings were never full");
    assert_eq!(sent, [total; 2]);
    for (port, seen) in ports.iter().zip(&seen) {
        let counters = port.counters();
        let came = seen.iter().filter(|&&times| times == 1).count() as u64;
        assert_eq!((counters.tx_frames, counters.rx_frames), (total + 1, came + 1));
        let told = if overrun == Overrun::Untold { 0 } else { total - came };
        assert_eq!(counters.rx_dropped, told);
        assert!(overrun != Overrun::Waits || came == total, "{counters:?}");
        println!("{came} of {total} frames came, {} dropped", counters.rx_dropped);
    }
}

#[test]
fn frames_for_others_are_not_passed_on() {
    let Some([mut a, mut b]) = pair("") else { return };
    let from = a.caps().station;
    for stranger in [Station::at([2, 9, 9, 9, 9, 9]), from] {
        send(&mut *a, &frame(stranger, from, 100, 1));
    }
    a.flush().unwrap();
    silence(&mut *b);
    let group = Station::at([0x33, 0x33, 0, 0, 0, 1]);
    let is_function = nic(0).is_some_and(|nic| is_function(&nic));
    let groups = [Station::BROADCAST, group];
    let groups = if is_function { &groups[..0] } else { &groups };
    for dst in groups.iter().copied().chain([b.caps().station]) {
        let bytes = frame(dst, from, 100, 2);
        send(&mut *a, &bytes);
        a.flush().unwrap();
        assert_eq!(next(&mut *b, 1), [bytes]);
    }
    // What a station sends to itself comes back without having been out.
    assert_eq!(next(&mut *a, 1), [frame(from, from, 100, 1)]);
    silence(&mut *a);
}

#[test]
fn an_address_of_ones_own() {
    let Some(n) = nic(0) else { return };
    let Some(m) = nic(1) else { return };
    let station: Station = "02:00:00:00:00:77".parse().unwrap();
    let mut a = port(&format!("vfio:{n},mac={station}"));
    let mut b = port(&format!("vfio:{m}"));
    assert_eq!(a.caps().station, station);
    let bytes = frame(station, b.caps().station, 100, 1);
    send(&mut *b, &bytes);
    b.flush().unwrap();
    assert_eq!(next(&mut *a, 1), [bytes]);
    // The old one is back with the next who opens it.
    drop(a);
    let a = port(&format!("vfio:{n}"));
    assert_ne!(a.caps().station, station);
}

/// Goal: everything is given back. Method: open and close often; the memory that a process may
/// lock would run out, and a group stay busy.
#[test]
fn a_port_can_be_opened_again_and_again() {
    let Some(n) = nic(0) else { return };
    let locked = || {
        let status = std::fs::read_to_string("/proc/self/status").unwrap();
        status.lines().find(|line| line.starts_with("VmPin:")).map(str::to_owned)
    };
    let before = locked();
    for _ in 0..5 {
        drop(port(&format!("vfio:{n}")));
    }
    assert_eq!(locked(), before);
}

/// Goal: a sleeper sleeps while nothing comes, and a frame ends its sleep, not a look now and then.
/// Method: the first sleep after a time of polling is short, and the poll after it asks for
/// interrupts; then sleeps of a limited length, and one that a frame ends.
#[test]
fn a_frame_ends_a_sleep() {
    let Some([mut a, mut b]) = pair("") else { return };
    let waiter = a.waiter().unwrap();
    let bytes = frame(a.caps().station, b.caps().station, 100, 1);
    warm_up(&mut *b, &mut *a);
    for round in 0..5 {
        waiter.wait(Duration::from_secs(20));
        assert_eq!(take(&mut *a, 64), Vec::<Vec<u8>>::new());
        // A vmxnet3 announces once what came before.
        waiter.wait(Duration::from_millis(10));
        assert_eq!(take(&mut *a, 64), Vec::<Vec<u8>>::new());
        let start = Instant::now();
        waiter.wait(Duration::from_millis(60));
        assert!(start.elapsed() >= Duration::from_millis(50), "{round}: nobody sleeps");
        assert_eq!(take(&mut *a, 64), Vec::<Vec<u8>>::new());
        let start = Instant::now();
        let sender = std::thread::spawn({
            let bytes = bytes.clone();
            move || {
                std::thread::sleep(Duration::from_millis(20));
                assert_eq!(send(&mut *b, &bytes), Tx::Sent);
                b.flush().unwrap();
                b
            }
        });
        // Whether an event ended the sleep: without one it lasts 90 ms, and the sender may be late.
        while !waiter.wait_or(None, Duration::from_secs(20)) {
            assert!(start.elapsed() < Duration::from_secs(5), "{round}: no interrupt");
        }
        let slept = start.elapsed();
        b = sender.join().unwrap();
        assert_eq!(next(&mut *a, 1), std::slice::from_ref(&bytes));
        println!("woken after {slept:?}");
        // Whoever polls is not interrupted any more, and who sleeps then is again.
        for _ in 0..1000 {
            take(&mut *a, 1);
        }
    }
}

/// A sleeper returns when somebody wakes it, and within a millisecond or two by itself.
#[test]
fn a_sleeper_looks_and_can_be_woken() {
    let Some(n) = nic(0) else { return };
    let port = port(&format!("vfio:{n}"));
    let waiter = port.waiter().unwrap();
    let start = Instant::now();
    waiter.wait(Duration::from_secs(20));
    waiter.wake();
    waiter.wait(Duration::from_secs(20));
    assert!(start.elapsed() < Duration::from_secs(5));
}
