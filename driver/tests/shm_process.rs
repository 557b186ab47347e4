//! The shm port between processes that are killed.
//!
//! The children are this test binary started again with [`ROLE`] in the environment, which makes
//! the test `child` act and the others not run.

use std::io::{BufRead, BufReader};
use std::os::unix::fs::MetadataExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use barewire_driver::backend::shm::{ShmPort, ShmSettings};
use barewire_driver::error::OpenError;
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::mem::atomic::ProcessLocks;
use barewire_driver::open::open;
use barewire_driver::port::{MacAddr, Port, Presence, Tx};

const ROLE: &str = "BAREWIRE_SHM_ROLE";
const SURVIVORS: [MacAddr; 2] = [MacAddr([2, 0, 0, 0, 1, 0]), MacAddr([2, 0, 0, 0, 1, 1])];
const VICTIMS: [MacAddr; 2] = [MacAddr([2, 0, 0, 0, 2, 0]), MacAddr([2, 0, 0, 0, 2, 1])];
const RING_LEN: usize = 65_536;

fn name(what: &str) -> String {
    format!("{what}-{}", std::process::id())
}

fn join(name: &str, mac: MacAddr) -> ShmPort {
    let ring_len = Some(RING_LEN);
    let settings = ShmSettings {
        station: Some(mac.into()),
        ring_len,
        members: Some(6),
        ..ShmSettings::named(name)
    };
    let until = Instant::now() + Duration::from_secs(10);
    loop {
        match ShmPort::open(&settings) {
            Ok(port) => return port,
            // A killed process is dead only once the kernel has taken it down.
            Err(OpenError::AddressInUse { .. }) if Instant::now() < until => {
                std::thread::yield_now()
            }
            Err(e) => panic!("{e}"),
        }
    }
}

fn start(role: &str, name: &str, mac: MacAddr) -> Child {
    let exe = std::env::current_exe().expect("we are a file");
    Command::new(exe)
        .args(["--exact", "child", "--nocapture"])
        .env(ROLE, format!("{role} {name} {mac}"))
        .stdout(Stdio::piped())
        .spawn()
        .expect("the test binary starts")
}

/// Waits until the child says that it is at work.
fn await_ready(child: &mut Child) {
    let mut lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    while let Some(Ok(line)) = lines.next() {
        if line.contains("ready") {
            return;
        }
    }
    panic!("the child ended before it was ready");
}

/// A frame whose every byte follows from its sender's run, its serial number and its length.
fn fill(buf: &mut Vec<u8>, to: MacAddr, from: MacAddr, run: u32, serial: u64) {
    let len = (serial * 2_654_435_761 % 5000) as usize;
    buf.clear();
    buf.extend(to.0);
    buf.extend(from.0);
    buf.extend([0x88, 0xb5]);
    buf.extend([0; 26]);
    buf.extend(run.to_le_bytes());
    buf.extend(serial.to_le_bytes());
    buf.extend((0..len).map(|i| (serial as usize + i) as u8));
}

/// Checks frames as [`fill`] made them: whole, each once and in order per sender and run.
#[derive(Default)]
struct Checker {
    seen: std::collections::HashMap<([u8; 6], u32), u64>,
    buf: Vec<u8>,
    frames: u64,
    /// The others had sent to a predecessor at this address before.
    joined_late: bool,
}

impl Checker {
    fn frame(&mut self, f: &RxFrame<'_>) {
        self.buf.resize(f.len(), 0);
        assert!(f.copy_to(0, &mut self.buf));
        let from: [u8; 6] = f.chunk_at(6).expect("a header");
        let run = u32::from_le_bytes(f.chunk_at(40).expect("a run"));
        let serial = u64::from_le_bytes(f.chunk_at(44).expect("a serial number"));
        let mut want = Vec::new();
        fill(&mut want, MacAddr(f.chunk_at(0).expect("a header")), MacAddr(from), run, serial);
        assert!(self.buf == want, "frame {serial} of run {run} is damaged");
        // Runs of one address are different senders: the new one's frames may pass what its dead
        // predecessor left in another ring. Within a run each is the successor of the last.
        let first = if self.joined_late { serial } else { 0 };
        let next = self.seen.entry((from, run)).or_insert(first);
        assert_eq!(serial, *next, "of run {run}");
        *next += 1;
        self.frames += 1;
    }
}

/// Sends to all others as fast as they take it and checks what comes, for ever. `run` orders this
/// process among those that had its address before.
fn talk(port: &mut ShmPort, run: u32, mut go_on: impl FnMut(u64) -> bool) -> (u64, u64) {
    let me = port.caps().station.mac;
    let others: Vec<_> = SURVIVORS.into_iter().chain(VICTIMS).filter(|&mac| mac != me).collect();
    let mut serials = vec![0_u64; others.len()];
    let mut no_route = vec![false; others.len()];
    let mut checker = Checker { joined_late: !SURVIVORS.contains(&me), ..Checker::default() };
    let mut buf = Vec::new();
    let mut turn = 0_u64;
    while go_on(turn) {
        turn += 1;
        for (i, &to) in others.iter().enumerate() {
            fill(&mut buf, to, me, run, serials[i]);
            match port.tx(&TxFrame::whole(&buf)).expect("shm is never gone") {
                Tx::Sent => serials[i] += 1,
                Tx::Full => {}
                Tx::NoRoute => no_route[i] = true,
            }
        }
        port.flush().expect("shm is never gone");
        let mut sink = |f: &RxFrame<'_>| checker.frame(f);
        port.rx_burst(32, &mut sink).expect("shm is never gone");
        if turn.is_multiple_of(16) {
            // Two cores for four talkers: let the others come to their turn.
            std::thread::yield_now();
        }
    }
    (serials.iter().sum(), checker.frames)
}

/// Acts as a child if started as one; otherwise there is nothing to test here.
#[test]
fn child() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let words: Vec<&str> = role.split(' ').collect();
    let mac = words[2].parse().expect("an address");
    match words[0] {
        "come-and-go" => come_and_go(words[1], mac),
        "all" => return exchange_with_all(words[1], mac),
        "small" => return in_a_small_file_system(words[1].as_ref()),
        "locks" => return locks_without_room(words[1].as_ref()),
        _ => {}
    }
    let run = next_run(0);
    let mut port = join(words[1], mac);
    match words[0] {
        "talk" => {
            println!("ready");
            talk(&mut port, run, |_| true);
        }
        "send3" => {
            let mut buf = Vec::new();
            for serial in 0..3 {
                fill(&mut buf, SURVIVORS[0], mac, run, serial);
                assert_eq!(port.tx(&TxFrame::whole(&buf)), Ok(Tx::Sent));
            }
            println!("ready");
            std::thread::sleep(Duration::from_secs(60));
        }
        "fork" => fork_and_stay(port),
        other => panic!("no role {other}"),
    }
}

/// Milliseconds of the day's clock, which order the runs of one address; after `last`.
fn next_run(last: u32) -> u32 {
    loop {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let run = (now.expect("after 1970").as_millis() & 0x7fff_ffff) as u32;
        if run > last {
            return run;
        }
        std::thread::yield_now();
    }
}

/// Joins, opens rings to all, makes them longer, and leaves, for ever.
fn come_and_go(name: &str, mac: MacAddr) -> ! {
    let mut run = 0;
    println!("ready");
    loop {
        run = next_run(run);
        let mut port = join(name, mac);
        talk(&mut port, run, |turn| turn < 4);
    }
}

/// Members of [`exchange_with_all`], and frames from each to each.
const MANY: usize = 70;
const FRAMES: u64 = 12;

/// Sends to each of [`MANY`] and itself, and receives as much, with every byte checked.
fn exchange_with_all(name: &str, me: MacAddr) {
    let settings = ShmSettings { station: Some(me.into()), ..ShmSettings::named(name) };
    let mut port = ShmPort::open(&settings).expect("a segment can be joined");
    let mut checker = Checker::default();
    let (mut sent, mut buf) = ([0; MANY], Vec::new());
    let want = MANY as u64 * FRAMES;
    while checker.frames < want || sent.iter().sum::<u64>() < want {
        for (i, sent) in sent.iter_mut().enumerate().filter(|(_, sent)| **sent < FRAMES) {
            fill(&mut buf, MacAddr([2, 0, 0, 0, 9, i as u8]), me, 0, *sent);
            // Who has not come yet is no route.
            *sent += u64::from(port.tx(&TxFrame::whole(&buf)) == Ok(Tx::Sent));
        }
        port.flush().expect("shm is never gone");
        port.rx_burst(64, &mut |f: &RxFrame<'_>| checker.frame(f)).expect("shm is never gone");
        std::thread::yield_now();
    }
    assert_eq!(port.counters().rx_dropped, 0);
    println!("all done");
}

/// Goal: a /dev/shm of 64 MB, which containers have, is enough for 8 members who all send the
/// longest frames to each other. In 2 MB they exchange short ones, a long one is told to lack
/// memory, and goes once there is some. Method: a tmpfs in a name space of our own.
fn in_a_small_file_system(dir: &std::path::Path) {
    let settings = ShmSettings { dir: dir.into(), ..ShmSettings::named("small") };
    let mount = |options: &str| {
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(dir);
        assert!(command.status().expect("mount starts").success(), "{options}");
    };
    // Frames received, if none was refused for want of memory.
    let all_to_all = |ports: &mut [ShmPort], len: usize| {
        let macs: Vec<_> = ports.iter().map(|port| port.caps().station.mac).collect();
        let mut got = 0;
        for from in 0..ports.len() {
            for &to in &macs {
                let bytes =
                    [&to.0[..], &macs[from].0, &[0x88, 0xb5], &[0; 26], &vec![from as u8; len]];
                let bytes = bytes.concat();
                let mut sink = |f: &RxFrame<'_>| {
                    let mut is = vec![0; f.len()];
                    assert!(f.copy_to(0, &mut is) && is == bytes);
                    got += 1;
                };
                let mut poll = |ports: &mut [ShmPort]| {
                    for port in ports.iter_mut() {
                        port.rx_burst(8, &mut sink).expect("shm is never gone");
                    }
                };
                // Rings that are given up are free once they were read.
                while ports[from].tx(&TxFrame::whole(&bytes)) != Ok(Tx::Sent) {
                    if ports[from].lacks_memory() {
                        return Err(got);
                    }
                    poll(ports);
                }
                (0..3).for_each(|_| poll(ports));
            }
        }
        Ok(got)
    };
    for options in ["size=64m", "size=2m"] {
        mount(options);
        let open = |_| ShmPort::open(&settings).expect("there is room");
        let mut ports: Vec<_> = (0..8).map(open).collect();
        let longest = ports[0].caps().mtu - 26;
        assert_eq!(all_to_all(&mut ports, 1000), Ok(64), "{options}");
        if options == "size=64m" {
            assert_eq!(all_to_all(&mut ports, longest), Ok(64));
            continue;
        }
        assert!(all_to_all(&mut ports, longest).is_err());
        let stations: Vec<_> = ports.iter().map(|port| port.caps().station).collect();
        let starved = |ports: &mut [ShmPort]| {
            let all = ports.iter_mut().flat_map(|port| {
                let seen = |of| port.presence(of) == Presence::Starved;
                stations.clone().into_iter().map(seen).collect::<Vec<_>>()
            });
            all.filter(|is| *is).count()
        };
        assert_eq!(starved(&mut ports), 1, "the one to whom the frame was to go");
        assert_eq!(all_to_all(&mut ports, 1000), Ok(64), "the short ones go on");
        mount("remount,size=64m");
        assert_eq!(all_to_all(&mut ports, longest), Ok(64));
        assert!(!ports.iter().any(Port::lacks_memory));
        assert_eq!(starved(&mut ports), 0);
    }
    println!("all done");
}

/// Leaves behind a child that drops its copy of the port and lives for five seconds.
fn fork_and_stay(port: ShmPort) {
    // SAFETY: the child only drops the port (which does nothing there but unmap and close), sleeps
    // and ends without running anything of its parent's.
    match unsafe { nix::unistd::fork() }.expect("fork works") {
        nix::unistd::ForkResult::Child => {
            drop(port);
            std::thread::sleep(Duration::from_secs(5));
            // SAFETY: ends the process; takes a number.
            unsafe { libc::_exit(0) }
        }
        nix::unistd::ForkResult::Parent { .. } => {
            std::thread::sleep(Duration::from_millis(100));
            println!("ready");
            std::thread::sleep(Duration::from_secs(60));
            drop(port);
        }
    }
}

fn kill(child: &mut Child) {
    let ended = child.try_wait().expect("our child can be waited for");
    assert_eq!(ended, None, "the child failed by itself");
    child.kill().expect("our child can be killed");
    child.wait().expect("our child can be waited for");
}

/// Goal: kill -9 at any instant stalls and corrupts nobody, and all is reclaimed. Method: two
/// survivors and two victims, all talking to all; 50 kills and restarts at random instants;
/// every frame is checked for its bytes and its place; then memory and places are counted.
#[test]
fn fifty_kills_leave_the_others_at_work() {
    kills("talk");
}

/// The same with victims that do little but join, open rings, make them longer and leave.
#[test]
fn fifty_kills_while_rings_are_made_leave_the_others_at_work() {
    kills("come-and-go");
}

fn kills(role: &str) {
    let name = name(role);
    let mut a = join(&name, SURVIVORS[0]);
    let mut b = join(&name, SURVIVORS[1]);
    let path = a.path().to_owned();
    let mut victims: Vec<Child> = VICTIMS.iter().map(|&mac| start(role, &name, mac)).collect();
    victims.iter_mut().for_each(await_ready);
    let done = std::sync::atomic::AtomicBool::new(false);
    let stop = || done.load(std::sync::atomic::Ordering::Relaxed);
    let (sent, got) = std::thread::scope(|scope| {
        let survivors = [&mut a, &mut b].map(|port| scope.spawn(|| talk(port, 1, |_| !stop())));
        let mut rng = 0x2545_f491_4f6c_dd1d_u64;
        for kill_no in 0..50_usize {
            rng ^= rng << 13;
            rng ^= rng >> 7;
            rng ^= rng << 17;
            std::thread::sleep(Duration::from_micros(rng % 40_000));
            let i = kill_no % 2;
            kill(&mut victims[i]);
            victims[i] = start(role, &name, VICTIMS[i]);
            // Some are killed while they join.
            if kill_no % 3 != 0 {
                await_ready(&mut victims[i]);
            }
        }
        victims.iter_mut().for_each(kill);
        done.store(true, std::sync::atomic::Ordering::Relaxed);
        let results = survivors.map(|t| t.join().expect("a survivor survives"));
        (results[0].0 + results[1].0, results[0].1 + results[1].1)
    });
    println!("survivors sent {sent} and received {got} frames");
    assert!(sent > 10_000 && got > 10_000, "{sent} {got}");
    assert_eq!(a.counters().rx_dropped + b.counters().rx_dropped, 0, "no ring was damaged");

    // The survivors still reach each other, the dead give their places and memory back.
    let joiners: Vec<_> = (0..4).map(|i| join(&name, MacAddr([2, 0, 0, 0, 3, i]))).collect();
    assert_eq!(joiners.len(), 4);
    drop(joiners);
    let mut checker = Checker::default();
    let mut buf = Vec::new();
    for round in 0..1000 {
        fill(&mut buf, VICTIMS[round % 2], SURVIVORS[0], 2, 0);
        assert_ne!(a.tx(&TxFrame::whole(&buf)), Ok(Tx::Sent), "nobody is there");
        a.rx_burst(64, &mut |_: &RxFrame<'_>| {}).expect("shm is never gone");
        b.rx_burst(64, &mut |_: &RxFrame<'_>| {}).expect("shm is never gone");
    }
    fill(&mut buf, SURVIVORS[1], SURVIVORS[0], 2, 0);
    assert_eq!(a.tx(&TxFrame::whole(&buf)), Ok(Tx::Sent));
    for _ in 0..1000 {
        b.rx_burst(64, &mut |f: &RxFrame<'_>| checker.frame(f)).expect("shm is never gone");
    }
    assert_eq!(checker.frames, 1);
    for port in [&mut a, &mut b] {
        for to in VICTIMS {
            fill(&mut buf, to, SURVIVORS[0], 2, 0);
            assert_eq!(port.tx(&TxFrame::whole(&buf)), Ok(Tx::NoRoute));
        }
    }
    // Two rings between the survivors, and the words before the rings.
    let held = std::fs::metadata(&path).expect("the segment is there").blocks() * 512;
    assert!(held < 5 * RING_LEN as u64, "{held} bytes are still held");
    drop((a, b));
    assert!(!path.exists());
}

/// Waits for a child that says at its end that all is done.
fn finish(child: Child) {
    let output = child.wait_with_output().expect("our child can be waited for");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("all done"), "{said}");
}

/// Goal: more processes than a doorbell's word has bits exchange frames, every byte checked.
#[test]
fn seventy_processes_exchange_frames() {
    let name = name("many");
    let of = |i| start("all", &name, MacAddr([2, 0, 0, 0, 9, i]));
    let children: Vec<Child> = (0..MANY as u8).map(of).collect();
    children.into_iter().for_each(finish);
    assert!(!ShmSettings::named(&name).path().exists());
}

#[test]
fn a_containers_dev_shm_is_enough_for_eight() {
    in_a_name_space("small");
}

/// Goal: a table of locks that finds no room is an error, and not a signal; nothing is left.
#[test]
fn locks_without_room_are_an_error() {
    in_a_name_space("locks");
}

/// In a tmpfs of one page.
fn locks_without_room(dir: &std::path::Path) {
    let mut command = Command::new("mount");
    command.args(["-t", "tmpfs", "-o", "size=4k", "tmpfs"]).arg(dir);
    assert!(command.status().expect("mount starts").success());
    let refused = ProcessLocks::open(&dir.join("x-locks-1")).expect_err("two pages do not fit");
    assert_eq!(refused.kind(), std::io::ErrorKind::StorageFull, "{refused}");
    assert_eq!(std::fs::read_dir(dir).expect("it is there").count(), 0);
    println!("all done");
}

/// Acts as a child where it may mount.
fn in_a_name_space(role: &str) {
    let dir = tempfile::tempdir().expect("a directory");
    let mut probe = Command::new("unshare");
    let can = probe.args(["-rm", "mount", "-t", "tmpfs", "tmpfs"]).arg(dir.path()).output();
    if !can.is_ok_and(|output| output.status.success()) {
        println!("SKIPPED: no user name spaces: sysctl kernel.unprivileged_userns_clone=1");
        return;
    }
    let child = Command::new("unshare")
        .arg("-rm")
        .arg(std::env::current_exe().expect("we are a file"))
        .args(["--exact", "child", "--nocapture"])
        .env(ROLE, format!("{role} {} {}", dir.path().display(), MacAddr::BROADCAST))
        .stdout(Stdio::piped())
        .spawn();
    finish(child.expect("unshare starts"));
}

/// Goal: what a process sent before it was killed arrives; one that is killed without anybody to
/// notice is cleaned up by the next. Also: its address is free again.
#[test]
fn frames_survive_a_killed_sender() {
    let name = name("last-words");
    let mut a = join(&name, SURVIVORS[0]);
    for _ in 0..5 {
        let mut victim = start("send3", &name, VICTIMS[0]);
        await_ready(&mut victim);
        kill(&mut victim);
        // The next joins before we have read what the last one sent.
        let next = join(&name, VICTIMS[0]);
        let mut checker = Checker::default();
        for _ in 0..1000 {
            a.rx_burst(2, &mut |f: &RxFrame<'_>| checker.frame(f)).expect("shm is never gone");
        }
        assert_eq!(checker.frames, 3);
        drop(next);
    }
}

/// Goal: a receiver that is killed becomes `NoRoute`, not `Full` for ever.
#[test]
fn a_killed_receiver_has_no_route_in_the_end() {
    let name = name("gone");
    let mut a = join(&name, SURVIVORS[0]);
    let mut victim = start("send3", &name, VICTIMS[0]);
    await_ready(&mut victim);
    let mut buf = Vec::new();
    let mut send = |port: &mut ShmPort| {
        fill(&mut buf, VICTIMS[0], SURVIVORS[0], 1, 3);
        port.tx(&TxFrame::whole(&buf)).expect("shm is never gone")
    };
    while send(&mut a) == Tx::Sent {}
    assert_eq!(send(&mut a), Tx::Full, "alive and not reading");
    kill(&mut victim);
    let until = Instant::now() + Duration::from_secs(5);
    while send(&mut a) == Tx::Full {
        assert!(Instant::now() < until, "Full for ever");
    }
    assert_eq!(send(&mut a), Tx::NoRoute);
}

/// Goal: a forked child that lives on neither keeps its dead parent's place nor gives up that of
/// a living one. Method: one child through fork and exec, and one through fork alone.
#[test]
fn forked_children_have_no_part_in_the_segment() {
    let name = name("fork");
    let a = join(&name, SURVIVORS[0]);
    let mut sleeper = Command::new("sleep").arg("30").spawn().expect("sleep starts");
    let mac_taken = open(&format!("shm:{name},mac={}", SURVIVORS[0]));
    assert!(matches!(mac_taken, Err(OpenError::AddressInUse { .. })), "the parent lives");
    drop(a);
    drop(join(&name, SURVIVORS[0]));
    sleeper.kill().expect("our child can be killed");
    sleeper.wait().expect("our child can be waited for");

    let _other = join(&name, SURVIVORS[1]);
    let mut parent = start("fork", &name, VICTIMS[0]);
    await_ready(&mut parent);
    let mac_taken = open(&format!("shm:{name},mac={}", VICTIMS[0]));
    assert!(matches!(mac_taken, Err(OpenError::AddressInUse { .. })), "the child dropped its copy");
    kill(&mut parent);
    // The grandchild lives for seconds more; `join` gives up after ten.
    let began = Instant::now();
    drop(join(&name, VICTIMS[0]));
    assert!(began.elapsed() < Duration::from_secs(2), "the grandchild kept the place");
}
