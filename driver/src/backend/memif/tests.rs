use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::socket::connect;

use super::adversary::{LAYOUT, init, joined, ring, rules};
use super::control::{Incoming, Socket, address};
use super::handshake::{ClientHandshake, ServerHandshake};
use super::proto::{Init, Message, VERSION};
use super::region::{ClientMemory, Desc, MASKED, NEXT};
use super::*;
use crate::backend::any_port::tests::fast_is_the_same;
use crate::backend::logged::Logged;
use crate::backend::unix::DeferredClose;
use crate::backend::unix::tests::{is_alone, send as send_fds, slow_closing_socket};

/// A socket that no other test has.
pub(super) fn fresh() -> MemifSettings {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let n = COUNT.fetch_add(1, Relaxed);
    MemifSettings::at(&format!("@barewire-unit-{}-{n}", std::process::id()))
}

fn server(settings: &MemifSettings) -> MemifSettings {
    MemifSettings { role: Role::Server, ..settings.clone() }
}

fn open(settings: &MemifSettings) -> Memif {
    Memif::open(settings).unwrap()
}

/// A server and its client.
fn pair(settings: &MemifSettings) -> [Memif; 2] {
    let mut pair = [open(&server(settings)), open(settings)];
    up(&mut pair);
    pair
}

/// Polls until both are connected.
fn up(pair: &mut [Memif; 2]) {
    let begun = Instant::now();
    while !pair.iter().all(|port| port.live.is_some()) {
        assert!(begun.elapsed() < Duration::from_secs(20), "no connection");
        for port in &mut *pair {
            poll(port);
        }
    }
}

fn poll(port: &mut Memif) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    let mut sink = |f: &RxFrame<'_>| {
        let mut bytes = vec![0; f.len() - ETH_HDR_LEN];
        assert!(f.copy_to(ETH_HDR_LEN, &mut bytes));
        got.push(bytes);
    };
    port.rx_burst(BURST, &mut sink).expect("a memif is never gone");
    got
}

/// What arrives until nothing has for as many polls as it takes to look at the connection.
fn drain(port: &mut Memif) -> Vec<Vec<u8>> {
    let (mut got, mut idle) = (Vec::new(), 0);
    while idle <= CHECK_EVERY {
        let more = poll(port);
        idle = if more.is_empty() { idle + 1 } else { 0 };
        got.extend(more);
    }
    got
}

fn send(port: &mut Memif, payload: &[u8]) -> Tx {
    let frame = [&[2, 0, 0, 0, 0, 9][..], &[0; 8], payload].concat();
    let sent = port.tx(&TxFrame::whole(&frame)).expect("a memif is never gone");
    port.flush().expect("a memif is never gone");
    sent
}

/// Both sides, who fill their rings in different ways.
#[test]
fn a_frame_may_leave_and_be_taken_without_a_question() {
    for lossless in [false, true] {
        let [mut a, mut b] = pair(&MemifSettings { lossless, ..fresh() });
        fast_is_the_same(&mut a, &mut b);
        fast_is_the_same(&mut b, &mut a);
    }
    let mut alone = open(&fresh());
    assert_eq!(alone.rx_poll(&mut |_: &RxFrame<'_>| {}), None, "there is no connection");
}

#[test]
fn frames_arrive_in_order_both_ways() {
    for bsize in [None, Some(270), Some(2048), Some(9216)] {
        let settings = MemifSettings { bsize, log2_ring: Some(4), ..fresh() };
        let mut ports = pair(&settings);
        let mtu = ports[0].caps().mtu;
        for round in 0..200_usize {
            for from in [0, 1] {
                let lens = [round % mtu, mtu, 1, mtu - round % 3];
                let sent: Vec<Vec<u8>> = lens.map(|len| vec![round as u8; len]).into();
                for payload in &sent {
                    assert_eq!(send(&mut ports[from], payload), Tx::Sent);
                }
                assert!(drain(&mut ports[1 - from]) == sent, "round {round} from {from}");
            }
        }
        assert_eq!(ports[0].counters().rx_dropped + ports[1].counters().rx_dropped, 0);
    }
}

/// A full ring holds the sender back, and nothing of what it took is lost.
#[test]
fn a_full_ring_pushes_back() {
    for lossless in [false, true] {
        let mut ports = pair(&MemifSettings { lossless, log2_ring: Some(5), ..fresh() });
        for from in [0, 1] {
            let mut next = 0_u32;
            let mut seen = 0_u32;
            for _ in 0..50 {
                while send(&mut ports[from], &next.to_ne_bytes()) == Tx::Sent {
                    next += 1;
                }
                assert!(next - seen <= 32 && next - seen >= 16, "{next} {seen}");
                for payload in drain(&mut ports[1 - from]) {
                    assert_eq!(payload, seen.to_ne_bytes());
                    seen += 1;
                }
                assert_eq!(seen, next);
            }
            assert!(ports[from].counters().tx_full >= 50);
        }
    }
}

/// Frames that are too long for the receiver, in one buffer or in several, take no room for ever,
/// and nobody who sleeps is woken by them for ever, although no good frame comes between.
#[test]
fn room_comes_back_from_frames_that_are_dropped() {
    let settings = MemifSettings { log2_ring: Some(4), mtu: Some(1500), ..fresh() };
    for bsize in [None, Some(1514)] {
        let long =
            MemifSettings { mtu: Some(2000), bsize: bsize.map(|_| 2014), ..settings.clone() };
        let short = MemifSettings { bsize, ..settings.clone() };
        // Only the client's buffers count: its MTU is what fits them.
        let mut ports = [open(&server(&long)), open(&short)];
        up(&mut ports);
        for _ in 0..100 {
            assert_eq!(send(&mut ports[0], &[1; 1900]), Tx::Sent);
            assert!(drain(&mut ports[1]).is_empty());
        }
        assert_eq!(ports[1].counters().rx_dropped, 100);
        let begun = Instant::now();
        ports[1].waiter().unwrap().wait(Duration::from_millis(30));
        assert!(begun.elapsed() >= Duration::from_millis(30), "nothing was left");
    }
}

/// Goal: a frame never waits for ever. Method: frames of every length that the server's MTU allows,
/// into rings that hold less, each after as many short ones as a receiver may keep; those that fit
/// arrive, and the others are told and dropped.
#[test]
fn a_frame_longer_than_the_ring_waits_for_nothing() {
    for log2_ring in [4, 5, 7] {
        let short = MemifSettings { log2_ring: Some(log2_ring), bsize: Some(270), ..fresh() };
        let long = MemifSettings { mtu: Some(40_000), bsize: None, ..short.clone() };
        // The client takes long frames as well, in as many pieces.
        let mut ports = [open(&server(&long)), open(&short)];
        up(&mut ports);
        (ports[1].frame_max, ports[1].whole) = (40_014, vec![0; 40_014].into());
        // In buffers of 270 bytes, of which as many as are given back together may be missing.
        let slots = 1_usize << log2_ring;
        let fits = (slots - ((slots / 4).min(32) - 1)) * 270 - ETH_HDR_LEN;
        let mut dropped = 0;
        for len in (300..40_000).step_by(977).chain([fits, fits + 1]) {
            for _ in 0..len % 9 {
                assert_eq!(send(&mut ports[0], b"short"), Tx::Sent);
                assert_eq!(drain(&mut ports[1]), [b"short"]);
            }
            let payload = vec![len as u8; len];
            assert_eq!(send(&mut ports[0], &payload), Tx::Sent, "{len} of {fits}");
            let (wanted, lost) = if len <= fits { (1, 0) } else { (0, 1) };
            assert_eq!(drain(&mut ports[1]), vec![payload; wanted], "{len} of {fits}");
            dropped += lost;
            assert_eq!(ports[0].counters().tx_dropped, dropped, "{len} of {fits}");
        }
        assert!(dropped > 0 && ports[1].counters().rx_dropped == 0);
    }
}

/// Goal: that a frame does not fit is told with the number that decides, and once, not for each
/// connection: a client that comes back has the same ring.
#[test]
fn a_short_ring_is_logged_once() {
    let short = MemifSettings { log2_ring: Some(4), bsize: Some(270), ..fresh() };
    let long = MemifSettings { mtu: Some(40_000), bsize: None, ..short.clone() };
    let mut server = open(&server(&long));
    let lines = Logged::by(|| {
        for _ in 0..2 {
            let mut ports = [server, open(&short)];
            up(&mut ports);
            for len in [5000, 6000] {
                assert_eq!(send(&mut ports[0], &vec![1; len]), Tx::Sent);
            }
            server = ports.into_iter().next().unwrap();
        }
        assert_eq!(server.counters().tx_dropped, 4);
    });
    let told: Vec<_> = lines.iter().filter(|line| line.1.contains("does not fit")).collect();
    assert_eq!(told.len(), 1, "{told:?}");
    assert!(told[0].1.contains("5014 bytes does not fit 13 of the client's 16"), "{told:?}");
}

/// Long enough for the indices to pass 2^16 twice.
#[test]
fn indices_wrap() {
    let mut ports = pair(&MemifSettings { log2_ring: Some(6), ..fresh() });
    let (mut next, mut seen) = ([0_u32; 2], [0_u32; 2]);
    while seen.iter().any(|&n| n < 140_000) {
        for from in [0, 1] {
            for _ in 0..next[from] % 50 + 1 {
                next[from] +=
                    u32::from(send(&mut ports[from], &next[from].to_ne_bytes()) == Tx::Sent);
            }
            for payload in poll(&mut ports[1 - from]) {
                assert_eq!(payload, seen[from].to_ne_bytes());
                seen[from] += 1;
            }
        }
    }
}

/// What was sent before the other side left is received; then the link is down, frames are held
/// back, and a new one on the other side finds the port again.
#[test]
fn the_other_side_leaves_and_comes_back() {
    let settings = fresh();
    let mut ports = pair(&settings);
    for round in 0..6_u8 {
        let place = usize::from(round % 2 == 0);
        let again = if place == 1 { settings.clone() } else { server(&settings) };
        for i in 0..40 {
            assert_eq!(send(&mut ports[place], &[round, i]), Tx::Sent);
        }
        // The old one goes before there is a new one, or that would be refused.
        drop(std::mem::replace(&mut ports[place], open(&server(&fresh()))));
        ports[place] = open(&again);
        let (begun, mut got) = (Instant::now(), Vec::new());
        let stays = &mut ports[1 - place];
        while !stays.live.as_ref().unwrap().conn.is_down.load(Acquire) {
            assert!(begun.elapsed() < Duration::from_secs(10), "nobody noticed");
        }
        // It hears of that before it has polled for what was sent.
        stays.polls_to_check = 1;
        while got.len() < 40 {
            assert!(begun.elapsed() < Duration::from_secs(10), "{} of 40", got.len());
            got.extend(drain(&mut ports[1 - place]));
        }
        assert_eq!(got, (0..40).map(|i| vec![round, i]).collect::<Vec<_>>());
        for from in [0, 1] {
            let begun = Instant::now();
            // The old connection may still seem to be there.
            let mut came = false;
            while !came {
                assert!(begun.elapsed() < Duration::from_secs(10), "no way back");
                let _ = send(&mut ports[from], b"again");
                came = !drain(&mut ports[1 - from]).is_empty();
                drain(&mut ports[from]);
            }
        }
    }
}

#[test]
fn without_a_server_frames_are_held_back() {
    let mut client = open(&fresh());
    assert_eq!(send(&mut client, b"x"), Tx::Full);
    assert!(drain(&mut client).is_empty());
    assert_eq!(client.counters().tx_full, 1);
}

#[test]
fn a_sleeper_is_woken_by_a_frame_and_by_wake() {
    let settings = fresh();
    for sleeper in [0, 1] {
        let mut ports = pair(&settings);
        ports.iter_mut().for_each(|port| drop(drain(port)));
        let waiter = ports[sleeper].waiter().unwrap();
        let begun = Instant::now();
        waiter.wait(Duration::from_millis(30));
        assert!(begun.elapsed() >= Duration::from_millis(30), "nothing had come");
        waiter.wake();
        waiter.wait(Duration::from_secs(20));
        let thread = std::thread::spawn(move || waiter.wait(Duration::from_secs(20)));
        let flags = || ports[sleeper].live.as_ref().unwrap().conn.rx.ring.flags().load(Relaxed);
        while flags() & MASKED != 0 {
            assert!(begun.elapsed() < Duration::from_secs(10), "it does not ask to be woken");
            std::thread::yield_now();
        }
        assert_eq!(send(&mut ports[1 - sleeper], b"x"), Tx::Sent);
        thread.join().unwrap();
        let flags = ports[sleeper].live.as_ref().unwrap().conn.rx.ring.flags().load(Relaxed);
        assert!(begun.elapsed() < Duration::from_secs(10) && flags & MASKED != 0);
        assert_eq!(drain(&mut ports[sleeper]), [b"x"]);
        // A connection that ends wakes as well.
        let waiter = ports[sleeper].waiter().unwrap();
        let [a, b] = ports;
        let (gone, _stays) = if sleeper == 0 { (b, a) } else { (a, b) };
        let thread = std::thread::spawn(move || waiter.wait(Duration::from_secs(20)));
        drop(gone);
        thread.join().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(10));
    }
}

/// Goal: of two threads that sleep on a port one is woken by a frame after the other has gone, as
/// the receive thread of a program that slept on a queue for a moment.
#[test]
fn a_sleeper_is_woken_after_another_has_gone() {
    let mut ports = pair(&fresh());
    for sleeper in [0, 1] {
        let waiters = [(); 2].map(|()| ports[sleeper].waiter().unwrap());
        ports.iter_mut().for_each(|port| drop(drain(port)));
        let conn = Arc::clone(&ports[sleeper].live.as_ref().unwrap().conn);
        let is_masked = || conn.rx.ring.flags().load(Relaxed) == MASKED;
        let [first, second] = waiters;
        let sleeps = std::thread::spawn(move || first.wait(Duration::from_secs(20)));
        while is_masked() {
            std::thread::yield_now();
        }
        // It looks seldom by then.
        std::thread::sleep(Duration::from_millis(100));
        second.wait(Duration::from_millis(1));
        assert!(!is_masked(), "the sender wakes nobody");
        assert_eq!(send(&mut ports[1 - sleeper], b"x"), Tx::Sent);
        sleeps.join().unwrap();
        assert!(is_masked());
        assert_eq!(drain(&mut ports[sleeper]), [b"x"]);
    }
}

/// How often the calling thread has gone to sleep.
fn sleeps() -> i64 {
    let who = nix::sys::resource::UsageWho::RUSAGE_THREAD;
    nix::sys::resource::getrusage(who).unwrap().voluntary_context_switches()
}

/// How often somebody who sleeps on `port` for half a second has gone to sleep.
fn looks(port: &Memif) -> i64 {
    let (waiter, before) = (port.waiter().unwrap(), sleeps());
    waiter.wait(Duration::from_millis(500));
    sleeps() - before
}

/// Goal: who sleeps while nothing comes takes little, and less without a server; but looks before
/// a sender's longest timeout.
#[test]
fn a_sleeper_polls_seldom() {
    let count = looks(&open(&fresh()));
    assert!((1..10).contains(&count), "{count} times in half a second");
    let mut pair = pair(&fresh());
    pair.iter_mut().for_each(|port| drop(drain(port)));
    for port in &pair {
        let count = looks(port);
        assert!((14..40).contains(&count), "{count} times in half a second");
    }
}

/// Goal: a frame that woke nobody is found, and others soon from then on, also if the next ones
/// wake; many wake-ups, and the sender is trusted again.
#[test]
fn a_peer_that_skips_wake_ups_is_detected() {
    let mut ports = pair(&fresh());
    ports.iter_mut().for_each(|port| drop(drain(port)));
    let misses = |ports: &[Memif; 2]| ports[0].shared.misses.load(Relaxed);
    let send_to_sleeper = |ports: &mut [Memif; 2], is_woken: bool| {
        let waiter = ports[0].waiter().unwrap();
        let sleeper = std::thread::spawn(move || waiter.wait(Duration::from_secs(20)));
        std::thread::sleep(Duration::from_millis(20));
        if !is_woken {
            let lane = &ports[0].live.as_ref().unwrap().conn.rx;
            lane.ring.flags().store(MASKED, Relaxed);
        }
        assert_eq!(send(&mut ports[1], b"x"), Tx::Sent);
        sleeper.join().unwrap();
        assert_eq!(drain(&mut ports[0]), [b"x"]);
    };
    let begun = Instant::now();
    while misses(&ports) == 0 {
        assert!(begun.elapsed() < Duration::from_secs(20), "no frame was missed");
        send_to_sleeper(&mut ports, false);
    }
    for round in 0..2 {
        let count = looks(&ports[0]);
        assert!(count > 40, "{count} times in half a second, after {round} that woke");
        send_to_sleeper(&mut ports, true);
    }
    while misses(&ports) != 0 {
        assert!(begun.elapsed() < Duration::from_secs(60), "{:#x}", misses(&ports));
        send_to_sleeper(&mut ports, true);
    }
    let count = looks(&ports[0]);
    assert!(count < 40, "{count} times in half a second");
}

// ---------------------------------------------------------------------------------------------
// The other side is wild
// ---------------------------------------------------------------------------------------------

/// Frames that are longer than the client's buffers go in pieces.
#[test]
fn a_frame_in_pieces_is_one_frame() {
    let [at_server, at_client] = joined().unwrap();
    let (mut tx, mut rx) = (Sender::new(&at_server.tx), Receiver::new(&at_client.rx));
    let mut whole = vec![0; 5000];
    for len in (500..5000).step_by(61) {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 % 251) as u8).collect();
        let frame = TxFrame::whole(&bytes);
        assert_eq!(tx.push(&at_server, &frame, len, 0, &mut whole), Ok(Pushed::Sent));
        tx.publish();
        let count = rx.pending().unwrap();
        assert_eq!(usize::from(count), len.div_ceil(512));
        whole.fill(0);
        match rx.take(&at_client, 5000) {
            RxItem::Chain => assert_eq!(rx.copy_chain(&at_client, count, &mut whole), Some(len)),
            RxItem::Frame(..) => assert!(len <= 512),
            RxItem::Bad => panic!("{len}"),
        }
        assert!(len <= 512 || whole[..len] == bytes, "{len}");
        assert_eq!(rx.pending(), Ok(0));
        rx.release();
    }
    // More than all buffers hold.
    let frame = TxFrame::whole(&[1; 9000]);
    assert_eq!(tx.push(&at_server, &frame, 9000, 0, &mut vec![0; 9000]), Ok(Pushed::Long));
    // Pieces without an end, or longer than a frame may be.
    let [at_server, at_client] = joined().unwrap();
    let (mut tx, mut rx) = (Sender::new(&at_server.tx), Receiver::new(&at_client.rx));
    let two = TxFrame::whole(&[1; 1024]);
    assert_eq!(tx.push(&at_server, &two, 1024, 0, &mut whole), Ok(Pushed::Sent));
    let last = at_server.tx.ring.words(1);
    Desc::new(NEXT, 0, 512, 0).write_len_to(last);
    tx.publish();
    assert!(matches!(rx.take(&at_client, 5000), RxItem::Chain));
    assert_eq!(rx.copy_chain(&at_client, 2, &mut whole), None);
}

#[test]
fn clients_with_invalid_messages_are_refused() {
    let made = ClientMemory::new(LAYOUT).unwrap();
    let len = made.len as u64;
    let rules = rules();
    let fd = |fd: &OwnedFd| Some(fd.try_clone().unwrap());
    let refuses = |said: Vec<(Message, Option<OwnedFd>)>, why: &str| {
        let mut handshake = ServerHandshake::default();
        let mut heard = Ok(());
        for (message, fd) in said {
            let fd = fd.map(DeferredClose::new);
            heard =
                heard.and_then(|()| handshake.handle(Some(message), fd, &rules, true).map(|_| ()));
        }
        assert_eq!(heard.unwrap_err(), why);
    };
    let region = |size| Message::AddRegion { index: 0, size };
    let unsealed = memfd_create(c"unsealed", MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&unsealed, 1 << 20).unwrap();
    let file = OwnedFd::from(tempfile::tempfile().unwrap());
    refuses(vec![(region(len), fd(&made.fd))], "Unexpected message");
    refuses(vec![(init(), None), (init(), None)], "Unexpected message");
    refuses(vec![(init(), None), (region(len), None)], "Missing region fd");
    refuses(vec![(init(), None), (region(4096), fd(&unsealed))], "Region can shrink");
    refuses(vec![(init(), None), (region(4096), Some(file))], "Region can shrink");
    for size in [0, len + 1] {
        refuses(vec![(init(), None), (region(size), fd(&made.fd))], "Region too short");
    }
    let too_long = "Regions of more than 4 GiB";
    refuses(vec![(init(), None), (region(u64::MAX), fd(&made.fd))], too_long);
    // Together: a file that is all holes may be as long as one likes.
    let holes = memfd_create(c"holes", MFdFlags::MFD_ALLOW_SEALING).unwrap();
    nix::unistd::ftruncate(&holes, 3 << 30).unwrap();
    fcntl(&holes, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK)).unwrap();
    let next = Message::AddRegion { index: 1, size: 2 << 30 };
    let both = vec![(init(), None), (region(3 << 30), fd(&holes)), (next, fd(&holes))];
    refuses(both, too_long);
    let is_none = (ring(true, 0, 0, 4), fd(&made.fd));
    refuses(vec![(init(), None), is_none], "Interrupt fd is no eventfd");
    let event = || fd(&made.events[0]);
    refuses(vec![(init(), None), (ring(true, 0, 0, 4), None)], "Missing interrupt fd");
    let again =
        vec![(init(), None), (ring(true, 0, 0, 4), event()), (ring(true, 0, 0, 4), event())];
    refuses(again, "Invalid ring index");
    let at = |region_of, offset, log2_len| {
        let rings = [true, false].map(|to| (ring(to, region_of, offset, log2_len), event()));
        let mut said = vec![(init(), None), (region(len), fd(&made.fd))];
        said.extend(rings);
        said.push((Message::Connect, None));
        said
    };
    refuses(at(1, 0, 4), "Invalid region index");
    refuses(at(0, len as u32, 4), "Invalid ring offset");
    refuses(at(0, u32::MAX, 4), "Invalid ring offset");
    refuses(at(0, 8, 4), "Invalid ring offset");
    refuses(at(0, 0, 0), "Invalid ring size");
    refuses(at(0, 0, 15), "Invalid ring size");
    refuses(at(0, 0, 14), "Invalid ring offset");
    refuses(at(0, 4096, 4), "Wrong cookie");
    refuses(vec![(init(), None), (Message::Connect, None)], "Missing ring");
    let other = |version, id, mode| {
        vec![(Message::Init(Init { version, id, mode, secret: [0; 24] }), None)]
    };
    refuses(other(0x0100, 0, 0), "Incompatible memif version");
    refuses(other(VERSION, 9, 0), "ID not found");
    refuses(other(VERSION, 0, 1), "Only ethernet mode supported");
}

/// Clients that hang up, hold still or talk nonsense at every step, while a right one comes.
#[test]
fn a_server_outlives_its_clients() {
    let settings = fresh();
    let mut at_server = open(&server(&settings));
    let at = address(&settings.socket).unwrap();
    let mut still = Vec::new();
    let mut rng = 7_u64;
    for round in 0..60 {
        let socket = Socket::new().unwrap();
        if connect(socket.0.as_raw_fd(), &at).is_err() {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        }
        let made = ClientMemory::new(LAYOUT).unwrap();
        for step in 0..round % 5 {
            rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            let region = Message::AddRegion { index: 0, size: made.len as u64 };
            match (rng >> 33) % 4 {
                0 => drop(nix::unistd::write(&socket.0, &[rng as u8; 300][..round + step])),
                1 => drop(socket.send(&init(), None)),
                2 => drop(socket.send(&region, Some(made.fd.as_raw_fd()))),
                _ => drop(socket.send(&Message::Connect, Some(made.fd.as_raw_fd()))),
            }
        }
        if round % 3 == 0 {
            still.push(socket);
        }
        poll(&mut at_server);
    }
    let at_client = open(&settings);
    let mut ports = [at_server, at_client];
    up(&mut ports);
    assert_eq!(send(&mut ports[0], b"x"), Tx::Sent);
    assert_eq!(drain(&mut ports[1]), [b"x"]);
    drop(still);
}

/// Goal: nobody uses up a server's descriptors by what it sends along.
#[test]
fn unexpected_descriptors_are_closed() {
    let settings = fresh();
    let _at_server = open(&server(&settings));
    let file = OwnedFd::from(tempfile::tempfile().unwrap());
    for times in [2, 13, 253] {
        let socket = Socket::new().unwrap();
        connect(socket.0.as_raw_fd(), &address(&settings.socket).unwrap()).unwrap();
        send_fds(&socket.0, &init().bytes(), &file, times);
        let begun = Instant::now();
        while !matches!(socket.recv(false), Incoming::HungUp) {
            assert!(begun.elapsed() < Duration::from_secs(20), "{times}: not hung up on");
            std::thread::sleep(Duration::from_millis(1));
        }
        assert!(is_alone(&file), "{times} descriptors");
    }
}

/// Goal: clients whose descriptors are slow to close, one that is no event, one that nobody asked
/// for, and one that was never looked at, hold up neither who comes after them nor who closes.
#[test]
fn a_server_does_not_wait_for_a_slow_close() {
    let settings = fresh();
    let at_server = open(&server(&settings));
    let (tell, told) = std::sync::mpsc::channel();
    let at = address(&settings.socket).unwrap();
    let knocks = [vec![init(), ring(true, 0, 0, 4)], vec![Message::Ack], vec![init()]].into_iter();
    // In threads: the last who closes it waits, which is the client if it is the slower one.
    let knock = |(knock, said): (usize, Vec<Message>)| {
        let socket = Socket::new().unwrap();
        connect(socket.0.as_raw_fd(), &at).unwrap();
        let ((slow, other), tell) = (slow_closing_socket(), tell.clone());
        let said: Vec<_> = said.iter().map(Message::bytes).collect();
        std::thread::spawn(move || {
            for (i, bytes) in said.iter().enumerate() {
                let times = if i + 1 == said.len() { knock.max(1) } else { 0 };
                send_fds(&socket.0, bytes, &slow, times);
            }
            // Those who are hung up on wait for it.
            tell.send((knock < 2).then_some(socket)).unwrap();
            drop(slow);
        });
        other
    };
    let others: Vec<_> = knocks.enumerate().map(knock).collect();
    let begun = Instant::now();
    let sockets: Vec<_> = others.iter().map(|_| told.recv().unwrap()).collect();
    let mut ports = [at_server, open(&settings)];
    up(&mut ports);
    drop(ports);
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    drop((others, sockets));
}

/// A server that is no memif's, or says nothing, or what makes no sense.
#[test]
fn a_client_outlives_its_servers() {
    let rules = rules();
    let hello = || Some(rules.hello());
    let mut handshake = ClientHandshake::new();
    assert!(handshake.handle(Some(Message::Ack), &rules).is_err());
    let mut handshake = ClientHandshake::new();
    assert!(matches!(handshake.handle(hello(), &rules), Ok(Some(Message::Init(_)))));
    assert!(handshake.handle(hello(), &rules).is_err());
    let mut handshake = ClientHandshake::new();
    handshake.handle(hello(), &rules).unwrap();
    assert!(handshake.handle(Some(Message::Connected), &rules).is_err());
    assert!(handshake.handle(None, &rules).is_err());
    assert_eq!(handshake.handle(Some(Message::Disconnect("no".into())), &rules), Err("no".into()));

    let settings = fresh();
    let listener = Socket::new().unwrap();
    let at = address(&settings.socket).unwrap();
    nix::sys::socket::bind(listener.0.as_raw_fd(), &at).unwrap();
    nix::sys::socket::listen(&listener.0, nix::sys::socket::Backlog::new(4).unwrap()).unwrap();
    let begun = Instant::now();
    let mut client = open(&settings);
    assert_eq!(send(&mut client, b"x"), Tx::Full);
    drop(client);
    assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
    assert!(matches!(listener.recv(false), Incoming::HungUp));
}

/// Goal: whatever is written into the rings, neither side reads or writes outside of its regions,
/// panics or stands still. Method: a thread writes random and nearly true values over all indices
/// and descriptors while two ports talk.
#[test]
fn scribbled_rings_cost_frames_and_nothing_else() {
    let stop = AtomicBool::new(false);
    let current: std::sync::Mutex<Vec<Arc<Conn>>> = std::sync::Mutex::default();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut rng = 88_172_645_463_325_252_u64;
            while !stop.load(Relaxed) {
                let conns = current.lock().unwrap().clone();
                for conn in &conns {
                    scribble(conn, &mut rng);
                }
                std::thread::sleep(Duration::from_micros(20));
            }
        });
        let settings = MemifSettings { log2_ring: Some(5), mtu: Some(2000), ..fresh() };
        let mut ports = [open(&server(&settings)), open(&settings)];
        let (begun, mut frames, mut links) = (Instant::now(), 0_u64, 0);
        let mut last = std::ptr::null();
        let dropped =
            |ports: &[Memif; 2]| ports.iter().map(|p| p.counters().rx_dropped).sum::<u64>();
        while begun.elapsed() < Duration::from_secs(20)
            && (links < 20 || frames < 2000 || dropped(&ports) < 100)
        {
            for (i, port) in ports.iter_mut().enumerate() {
                for n in 0..20 {
                    send(port, &[i as u8; 1900][..n * 90]);
                }
                frames += poll(port).len() as u64;
                port.waiter().unwrap().wait(Duration::from_micros(1));
            }
            let live: Vec<_> = ports.iter().flat_map(|port| &port.live).collect();
            let first = live.first().map_or(std::ptr::null(), |live| Arc::as_ptr(&live.conn));
            links += u32::from(first != last && !first.is_null());
            last = first;
            *current.lock().unwrap() = live.iter().map(|live| Arc::clone(&live.conn)).collect();
        }
        stop.store(true, Relaxed);
        let dropped = dropped(&ports);
        assert!(links >= 20 && frames >= 2000 && dropped >= 100, "{links} {frames} {dropped}");
    });
}

fn scribble(conn: &Conn, rng: &mut u64) {
    let mut next = || {
        *rng ^= *rng << 13;
        *rng ^= *rng >> 7;
        *rng ^= *rng << 17;
        *rng
    };
    for ring in [conn.rx.ring, conn.tx.ring] {
        let (r, value) = (next(), next());
        let near = (value % 40) as u16;
        match r & 31 {
            0 => ring.head().store(value as u16, Relaxed),
            1 => ring.tail().store(value as u16, Relaxed),
            2 => drop(ring.head().fetch_add(near, Relaxed)),
            3 => drop(ring.tail().fetch_add(near, Relaxed)),
            4 => ring.flags().store(near & 1, Relaxed),
            5..12 => {
                let words: &[AtomicU64; 2] = ring.words((r >> 8) as u16);
                words[(r >> 40 & 1) as usize].store(value, Relaxed);
            }
            12..20 => {
                let len = (value % 3000) as u32;
                let desc = Desc::new((r >> 50 & 1) as u16, (r >> 52 & 3) as u16 / 3, len, r as u32);
                desc.write_to(ring.words((r >> 8) as u16));
            }
            _ => {}
        }
    }
}
