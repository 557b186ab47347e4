//! Ports on the devices that DPDK has without hardware, in one process.

use std::os::unix::fs::PermissionsExt;

use super::*;
use crate::backend::any_port::tests::{fast_is_the_same, replies_while_lent};
use crate::frame::Body;
use crate::mem::{IoBuf, Span};

fn open(spec: &str) -> DpdkPort {
    DpdkPort::open(&parse(spec).unwrap()).unwrap_or_else(|why| panic!("{spec}: {why}"))
}

fn why(spec: &str) -> String {
    match DpdkPort::open(&parse(spec).unwrap()) {
        Ok(port) => panic!("{spec} opened {}", port.caps().name),
        Err(why) => {
            let why = why.to_string();
            assert!(!why.contains('\n'), "{why}");
            why
        }
    }
}

fn ring_pair(name: &str, options: &str) -> [DpdkPort; 2] {
    ["a", "b"].map(|end| open(&format!("dpdk{options}:net_ring_{name}_{end},pair={name}")))
}

/// A frame of `len` bytes that says its number.
fn numbered(number: u32, len: usize) -> Vec<u8> {
    let mut frame = vec![number as u8; len];
    frame[14..18].copy_from_slice(&number.to_be_bytes());
    frame
}

/// Everything that is there, as bytes. What is dropped is not counted as received.
fn received(port: &mut DpdkPort) -> Vec<Vec<u8>> {
    let (mut got, mut count) = (Vec::new(), 0);
    let mut sink = |frame: &RxFrame<'_>| {
        let mut bytes = vec![0; frame.len()];
        assert!(frame.copy_to(0, &mut bytes));
        got.push(bytes);
    };
    loop {
        let dropped = port.counters().rx_dropped;
        let burst = port.rx_burst(64, &mut sink).unwrap();
        count += burst;
        if burst == 0 && port.counters().rx_dropped == dropped {
            assert_eq!(got.len(), count);
            return got;
        }
    }
}

/// Goal: no signal to the process is handled by a thread of DPDK. Method: the blocked signals of
/// this process's threads by their names (proc(5)), in a process of its own, where no other thread
/// has such a name.
#[test]
fn signals_do_not_go_to_the_threads_of_eal() {
    let test = "backend::dpdk::tests::signals_do_not_go_to_the_threads_of_eal";
    if !crate::alone::is_alone(test, |_| ()) {
        return;
    }
    let _pair = ring_pair("signals", "");
    // All but those that cannot be blocked, the two of libc, and SIGBUS.
    let others = [libc::SIGKILL, libc::SIGSTOP, libc::SIGBUS, 32, 33];
    let blocked: u64 = (1..=64).filter(|n| !others.contains(n)).map(|n| 1 << (n - 1)).sum();
    let mut found = Vec::new();
    for thread in std::fs::read_dir("/proc/self/task").unwrap().flatten() {
        let Ok(text) = std::fs::read_to_string(thread.path().join("status")) else { continue };
        let of =
            |key: &str| text.lines().find_map(|l| l.strip_prefix(key)).unwrap().trim().to_owned();
        let (name, mask) = (of("Name:"), u64::from_str_radix(&of("SigBlk:"), 16).unwrap());
        let is_own = name == "barewire-eal";
        // Prefixes of DPDK's threads, by its versions.
        if is_own || ["dpdk-", "eal-", "rte_"].iter().any(|prefix| name.starts_with(prefix)) {
            assert_eq!(mask & blocked, blocked, "{name}");
            found.push(name);
        }
    }
    assert!(found.len() > 1 && found.iter().any(|name| name == "barewire-eal"), "{found:?}");
}

#[test]
fn frames_of_every_length_cross_a_pair_of_rings_both_ways() {
    let [mut a, mut b] = ring_pair("lengths", "(mtu=9000)");
    assert_ne!(a.caps().station.mac, b.caps().station.mac);
    assert_eq!((a.caps().mtu, a.caps().lossless), (9000, true));
    for (i, len) in [18, 59, 60, 61, 64, 127, 128, 129, 1514, 2048, 9014].into_iter().enumerate() {
        let frame = numbered(i as u32, len);
        assert_eq!(a.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
        a.flush().unwrap();
        assert_eq!(received(&mut b), [frame.as_slice()]);
        let (head, tail) = frame.split_at(16);
        assert_eq!(b.tx(&TxFrame { head, body: Body::Bytes(&[]), tail }), Ok(Tx::Sent));
        b.flush().unwrap();
        assert_eq!(received(&mut a), [frame.as_slice()]);
    }
    assert_eq!((a.counters().tx_frames, b.counters().rx_frames), (11, 11));
    assert_eq!(a.counters().tx_bytes, b.counters().rx_bytes);
}

#[test]
fn a_frame_may_leave_and_be_taken_without_a_question() {
    let [mut a, mut b] = ring_pair("answers", "");
    assert_eq!(received(&mut b).len(), 0, "but its thread is known now");
    // Which has no buffer yet but the one that it answers.
    replies_while_lent(&mut a, &mut b, &[2; ETH_HDR_LEN]);
    let [mut a, mut b] = ring_pair("fast", "");
    // Their buffers come from the pool the first time, and the thread has to be known.
    assert_eq!(a.tx(&TxFrame::whole(&numbered(0, 64))), Ok(Tx::Sent));
    assert_eq!(received(&mut b), [numbered(0, 64)]);
    fast_is_the_same(&mut a, &mut b);
}

#[test]
fn a_frame_is_gathered_from_its_parts() {
    let [mut a, mut b] = ring_pair("parts", "");
    let mut memory: Vec<u8> = (0..=255).collect();
    // SAFETY: the memory lives until the end and is not touched meanwhile.
    let buf = IoBuf::one(unsafe { Span::from_raw(memory.as_mut_ptr(), memory.len()) });
    let head: Vec<u8> = (100..148).collect();
    for (offset, len) in [(0, 0), (3, 40), (10, 200)] {
        let body = Body::Io { buf: &buf, offset, len };
        assert_eq!(a.tx(&TxFrame { head: &head, body, tail: &[9; 4] }), Ok(Tx::Sent));
        a.flush().unwrap();
        let whole: Vec<u8> =
            [&head[..], &(offset as u8..=255).take(len).collect::<Vec<u8>>(), &[9; 4]].concat();
        assert_eq!(received(&mut b), [whole]);
    }
}

/// Goal: a full queue loses and reorders nothing.
#[test]
fn a_full_queue_is_back_pressure() {
    let [mut a, mut b] = ring_pair("full", "(ring=64)");
    let mut sent = 0;
    let mut got: Vec<u32> = Vec::new();
    let mut fulls = 0;
    while sent < 20_000 {
        match a.tx(&TxFrame::whole(&numbered(sent, 70))).unwrap() {
            Tx::Sent => sent += 1,
            Tx::Full => {
                fulls += 1;
                if fulls % 3 == 0 {
                    let frames = received(&mut b);
                    let number = |f: &Vec<u8>| u32::from_be_bytes([f[14], f[15], f[16], f[17]]);
                    got.extend(frames.iter().map(number));
                }
            }
            Tx::NoRoute => unreachable!("a ring has one other end"),
        }
    }
    while got.len() < sent as usize {
        a.flush().unwrap();
        got.extend(
            received(&mut b).iter().map(|f| u32::from_be_bytes([f[14], f[15], f[16], f[17]])),
        );
    }
    assert_eq!(got, (0..20_000).collect::<Vec<_>>());
    assert_eq!((a.next_deadline_ns(), a.counters().tx_full), (None, fulls));
    assert!(fulls > 100);
}

/// Goal: no packet buffer gets lost, whoever ends first and whatever is underway.
#[test]
fn a_device_comes_and_goes() {
    for round in 0..5 {
        let [mut a, mut b] = ring_pair("again", "(mbufs=2048)");
        for i in 0..100 {
            assert_eq!(a.tx(&TxFrame::whole(&numbered(i, 100))), Ok(Tx::Sent));
        }
        if round % 2 == 0 {
            drop(a);
            assert_eq!(received(&mut b).len(), 100, "sent before the end");
        } else {
            drop(b);
            drop(a);
        }
    }
}

/// Goal: a memif carries frames of every length both ways, also through a ring that is full, and
/// either end may leave first, polled or not. Both are in this process, which DPDK allows if the
/// server comes first.
#[test]
fn a_memif_carries_frames_and_may_be_left() {
    let _alone = without_children();
    let socket = format!("barewire-unit-{}", std::process::id());
    let sizes = ["", ",bsize=9216", ",bsize=9216,rsize=6"];
    for (i, options) in sizes.into_iter().cycle().take(12).enumerate() {
        let [mut server, mut client] = ["server", "client"].map(|role| {
            let args = format!("role={role},id={i},socket={socket}{options}");
            open(&format!("dpdk(mtu=9000):net_memif_{role}{i},{args}"))
        });
        let begun = std::time::Instant::now();
        while !link::link(client.port).0 || !link::link(server.port).0 {
            assert!(begun.elapsed().as_secs() < 20, "no connection");
        }
        stream(&mut client, &mut server, 1000);
        stream(&mut server, &mut client, 1000);
        let (first, mut second) = if i % 2 == 0 { (client, server) } else { (server, client) };
        drop(first);
        for _ in 0..i * 1000 {
            second.rx_burst(32, &mut |_: &RxFrame<'_>| {}).unwrap();
            let _ = second.tx(&TxFrame::whole(&numbered(1, 100))).unwrap();
            second.flush().unwrap();
        }
    }
}

/// Goal: no other user can connect to the driver's own socket, which trusts every client: it is a
/// file in a directory of mode 700.
#[test]
fn no_other_user_can_reach_the_drivers_own_socket() {
    let _alone = without_children();
    let name = format!("bw-reach-{}", std::process::id());
    let server = open(&format!("dpdk:net_memif_reach,role=server,socket={name}"));
    let private = listener::names().into_iter().find(|name| name.contains("barewire-memif-"));
    let private = std::path::PathBuf::from(private.expect("the driver listens"));
    assert!(private.is_absolute(), "{}", private.display());
    let dir = private.parent().unwrap();
    let mode = std::fs::metadata(dir).unwrap().permissions().mode();
    assert_eq!(mode & 0o7777, 0o700, "{}", dir.display());
    drop(server);
    assert!(!dir.exists());
}

/// Goal: clients that hang up at any time before the driver has greeted them do no harm, and those
/// after them are served. In a process of its own, since what DPDK does otherwise is to end it.
#[test]
fn clients_that_hang_up_on_a_memif_do_no_harm() {
    let name = "clients_that_hang_up_on_a_memif_do_no_harm";
    if !is_child(name) {
        assert_eq!(child(&[], name), ["served"]);
        return;
    }
    let socket = format!("barewire-hang-up-{}", std::process::id());
    let port = |role| open(&format!("dpdk(mtu=9000):net_memif_{role},role={role},socket={socket}"));
    let mut server = port("server");
    let mut hang_up = |after: std::time::Duration| {
        use nix::sys::socket::{
            AddressFamily, SockFlag, SockType, UnixAddr, connect, socket as new,
        };
        let client =
            new(AddressFamily::Unix, SockType::SeqPacket, SockFlag::SOCK_CLOEXEC, None).unwrap();
        let to = UnixAddr::new_abstract(socket.as_bytes()).unwrap();
        connect(std::os::fd::AsRawFd::as_raw_fd(&client), &to).unwrap();
        let begun = std::time::Instant::now();
        while begun.elapsed() < after {
            server.rx_burst(32, &mut |_: &RxFrame<'_>| {}).unwrap();
        }
    };
    for round in 0..200 {
        hang_up(std::time::Duration::from_micros(round * 37));
    }
    let mut client = port("client");
    let begun = std::time::Instant::now();
    while !link::link(client.port).0 || !link::link(server.port).0 {
        assert!(begun.elapsed().as_secs() < 20, "no connection");
        for port in [&mut client, &mut server] {
            port.rx_burst(32, &mut |_: &RxFrame<'_>| {}).unwrap();
        }
    }
    stream(&mut client, &mut server, 100);
    stream(&mut server, &mut client, 100);
    println!("@@served");
}

/// Sends frames of all lengths from `a` to `b` as fast as they fit, some of them in parts. The
/// memory of a frame is written over as soon as it was sent.
fn stream(a: &mut DpdkPort, b: &mut DpdkPort, count: u32) {
    let len = |number: u32| 18 + number as usize * 7919 % 8997;
    let begun = std::time::Instant::now();
    let (mut sent, mut got) = (0, 0);
    while got < count {
        if sent < count && send_in_parts(a, sent, numbered(sent, len(sent))) {
            sent += 1;
            continue;
        }
        a.flush().unwrap();
        for frame in received(b) {
            assert!(frame == numbered(got, len(got)), "frame {got} has {} bytes", frame.len());
            got += 1;
        }
        assert!(begun.elapsed().as_secs() < 20, "{sent} sent, {got} received");
    }
}

/// Sends a frame with its body in none, one or two pieces of memory, with a tail or without.
fn send_in_parts(port: &mut DpdkPort, number: u32, mut frame: Vec<u8>) -> bool {
    let whole = frame.len();
    let (head, rest) = frame.split_at_mut(18);
    let tail_len = if number.is_multiple_of(2) { 4.min(rest.len()) } else { 0 };
    let (memory, tail) = rest.split_at_mut(whole - 18 - tail_len);
    let span = |at: &mut [u8]| {
        // SAFETY: the memory lives until the end and is written to after the frame was sent only.
        unsafe { Span::from_raw(at.as_mut_ptr(), at.len()) }
    };
    let (one, two) = memory.split_at_mut(memory.len() / 3);
    let body_len = one.len() + two.len();
    let sent = match number % 3 {
        0 => {
            let rest = [&*one, &*two, &*tail].concat();
            port.tx(&TxFrame { head, body: Body::Bytes(&rest), tail: &[] })
        }
        1 => {
            let mut buf = IoBuf::one(span(one));
            assert!(buf.push(span(two)));
            port.tx(&TxFrame { head, body: Body::Io { buf: &buf, offset: 0, len: body_len }, tail })
        }
        _ => {
            let buf = IoBuf::one(span(memory));
            port.tx(&TxFrame { head, body: Body::Io { buf: &buf, offset: 0, len: body_len }, tail })
        }
    };
    frame.fill(0xee);
    sent == Ok(Tx::Sent)
}

/// Goal: a port does not send with what it received if that is too short for it. Method: were it
/// used, the long frames would be written over those that lie behind in the other port's pool.
#[test]
fn a_buffer_that_is_too_short_is_given_back() {
    let [mut long, mut short] = ["(mtu=9000)", ""].map(|options| {
        let end = if options.is_empty() { "short" } else { "long" };
        open(&format!("dpdk{options}:net_ring_{end},pair=unequal"))
    });
    for round in 0..20 {
        let send = |port: &mut DpdkPort, len| {
            for i in 0..100 {
                assert_eq!(port.tx(&TxFrame::whole(&numbered(i, len))), Ok(Tx::Sent));
            }
        };
        send(&mut short, 1514);
        let got = received(&mut long);
        assert_eq!(got, (0..100).map(|i| numbered(i, 1514)).collect::<Vec<_>>(), "{round}");
        send(&mut long, 9014);
        assert_eq!(received(&mut short).len(), 0, "too long for it");
    }
    assert_eq!(short.counters().rx_dropped, 2000);
    assert_eq!((long.counters().rx_frames, long.counters().rx_dropped), (2000, 0));
}

#[test]
fn a_checksum_goes_where_somebody_else_may_be_in_between() {
    for (spec, damages) in [
        ("dpdk:net_ring_crc,pair=crc", false),
        ("dpdk(crc=yes):net_ring_crc,pair=crc", true),
        ("dpdk:net_memif_crc,role=server,socket=barewire-crc", false),
        ("dpdk:net_null_crc", true),
        ("dpdk(crc=no):net_null_crc", false),
    ] {
        let _alone = without_children();
        assert_eq!(open(spec).damages(), damages, "{spec}");
    }
}

#[test]
fn the_sink_of_null_takes_everything_and_its_source_never_ends() {
    let mut port = open("dpdk:net_null0,size=100");
    for i in 0..10_000 {
        assert_eq!(port.tx(&TxFrame::whole(&numbered(i, 64))), Ok(Tx::Sent));
    }
    port.flush().unwrap();
    let mut bytes = 0;
    let mut sink = |frame: &RxFrame<'_>| bytes += frame.len();
    assert_eq!(port.rx_burst(8, &mut sink), Ok(8));
    assert_eq!(bytes, 800);
}

/// Goal: a port moves between threads, which come and go; more of them than DPDK has numbers for.
#[test]
fn any_thread_may_use_a_port() {
    let [mut a, mut b] = ring_pair("threads", "");
    for i in 0..200 {
        a = std::thread::spawn(move || {
            assert_eq!(a.tx(&TxFrame::whole(&numbered(i, 64))), Ok(Tx::Sent));
            a.flush().unwrap();
            a
        })
        .join()
        .unwrap();
        assert_eq!(received(&mut b), [numbered(i, 64)]);
    }
}

#[test]
fn dpdk_leaves_the_callers_processors_alone() {
    let allowed = || nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).unwrap();
    let before = allowed();
    let port = open("dpdk:net_null_affinity");
    assert_eq!(allowed(), before);
    assert_eq!(port.caps().name, "dpdk:net_null_affinity");
    drop(port);
}

#[test]
fn an_open_error_is_one_line_with_its_remedy() {
    let [_a, _b] = ring_pair("taken", "");
    for (spec, says) in [
        ("dpdk:net_foo0", "no driver called net_foo"),
        ("dpdk:net_ring_c,pair=taken", "both ends"),
        ("dpdk:net_af_packet0", "iface="),
        ("dpdk:net_af_packet0,iface=no-such-if", "ip link"),
        ("dpdk:net_af_packet0,iface=lo,qpairs=none", "no driver took it"),
        ("dpdk(mtu=9000):net_tap7,iface=bwt7", "mtu=1500 or less"),
        ("dpdk(mtu=64000):net_null7", "mtu="),
        ("dpdk(mtu=9000):net_memif7,bsize=2048", "mtu=2034 or less"),
        ("dpdk(mtu=100):net_null7", "256 to"),
        ("dpdk(lossless=yes):net_null7", "leave lossless=yes out"),
        ("dpdk(lossless=yes):net_af_packet0,iface=lo", "leave lossless=yes out"),
        ("dpdk(mbufs=40000000):net_null7", "hugepage-setup"),
        ("dpdk:ffff:ff:1f.7", "lspci"),
    ] {
        let line = why(spec);
        assert!(line.contains(says), "{spec}: {line}");
    }
    let first = open("dpdk:net_null_twice");
    assert!(why("dpdk:net_null_twice").contains("open in this process already"));
    drop(first);
    drop(open("dpdk:net_null_twice"));
}

/// Goal: a failed open leaves nothing behind that the next one finds. Method: of a pair of rings
/// the device's name, and then the name of the second ring, are taken.
#[test]
fn a_failed_open_leaves_no_rings() {
    let first = open("dpdk:net_ring_left_a,pair=left1");
    assert!(
        why("dpdk(ring=64):net_ring_left_a,pair=left").contains("open in this process already")
    );
    drop(first);
    let eal = eal::start(crate::mem::Hugepages::IfFree).unwrap();
    let make = || {
        // SAFETY: reads a C string.
        let ring = unsafe { sys::rte_ring_create(c"bw1-clash".as_ptr(), 64, -1, 0) };
        assert!(!ring.is_null());
        ring as usize
    };
    let (taken, _) = eal.run(make);
    assert!(why("dpdk:net_ring_clash_a,pair=clash").contains("making a ring"));
    // SAFETY: it was made above and is nobody else's.
    eal.run(move || unsafe { sys::rte_ring_free(taken as *mut sys::rte_ring) });
    for name in ["left", "clash"] {
        let [mut a, mut b] = ring_pair(name, "");
        for i in 0..200 {
            assert_eq!(a.tx(&TxFrame::whole(&numbered(i, 100))), Ok(Tx::Sent), "{name} {i}");
        }
        a.flush().unwrap();
        assert_eq!(received(&mut b).len(), 200);
    }
}

#[test]
fn a_sleeper_is_woken_and_never_sleeps_long() {
    let port = open("dpdk:net_null_nap");
    let waiter = port.waiter().unwrap();
    let begun = std::time::Instant::now();
    waiter.wait(std::time::Duration::from_secs(60));
    assert!(begun.elapsed() < std::time::Duration::from_secs(5));
    waiter.wake();
    waiter.wait(std::time::Duration::from_secs(60));
}

/// Held while a child runs, and where none may: it inherits DPDK's sockets, which are not closed
/// when a program begins, and their names are taken for as long as it lives.
fn without_children() -> std::sync::MutexGuard<'static, ()> {
    static CHILDREN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    CHILDREN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// What test `name` of this program says after `@@` when `command` runs it by itself, as somebody
/// that [`is_child`].
fn child(command: &[&str], name: &str) -> Vec<String> {
    let _alone = without_children();
    let exe = std::env::current_exe().unwrap();
    let mut words = command.iter().map(std::ffi::OsStr::new).chain([exe.as_os_str()]);
    let output = std::process::Command::new(words.next().unwrap())
        .args(words)
        .args(["--exact", &format!("backend::dpdk::tests::{name}"), "--nocapture"])
        .env("BAREWIRE_TEST_CHILD", name)
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&[&output.stdout[..], &output.stderr].concat()).into_owned();
    assert!(output.status.success(), "{said}");
    said.lines().filter_map(|line| Some(line.split_once("@@")?.1.to_owned())).collect()
}

fn is_child(name: &str) -> bool {
    std::env::var_os("BAREWIRE_TEST_CHILD").is_some_and(|child| child == name)
}

#[test]
fn dpdk_of_another_part_of_the_program_is_left_alone() {
    let name = "dpdk_of_another_part_of_the_program_is_left_alone";
    if is_child(name) {
        let args =
            eal::arguments(false).into_iter().map(|arg| std::ffi::CString::new(arg).unwrap());
        let args: Vec<_> = args.collect();
        let mut argv: Vec<_> = args.iter().map(|arg| arg.as_ptr().cast_mut()).collect();
        // SAFETY: as in `eal::init`, of which there is none before in this process.
        assert!(unsafe { sys::rte_eal_init(argv.len() as i32, argv.as_mut_ptr()) } >= 0);
        println!("@@{}", why("dpdk:net_null0"));
        // Nor does trying again change anything.
        println!("@@{}", why("dpdk:net_null0"));
        return;
    }
    let lines = child(&[], name);
    assert_eq!(lines.len(), 2, "{lines:?}");
    for line in lines {
        assert!(line.contains("DPDK was started by another part of this program"), "{line}");
        assert!(line.contains("use afpacket:"), "{line}");
    }
}

#[test]
fn devices_that_need_a_privilege_say_which() {
    let name = "devices_that_need_a_privilege_say_which";
    if is_child(name) {
        println!("@@{}", why("dpdk:net_tap0,iface=bwt0"));
        println!("@@{}", why("dpdk:net_af_packet0,iface=lo"));
        // What needs none works.
        drop(open("dpdk:net_null0"));
        return;
    }
    let is_root = nix::unistd::geteuid().is_root();
    let without = ["setpriv", "--bounding-set", "-all", "--inh-caps", "-all"];
    let lines = child(if is_root { &without } else { &[] }, name);
    let says = ["CAP_NET_ADMIN", "CAP_NET_RAW"];
    assert_eq!(lines.len(), 2, "{lines:?}");
    for (line, says) in lines.iter().zip(says) {
        assert!(line.contains(says) && line.contains("run with sudo"), "{line}");
    }
}
