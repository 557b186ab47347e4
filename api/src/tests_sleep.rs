//! Who sleeps in a call, and what has to wake it.

use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use barewire_driver::backend::loopback::Loopback;
use barewire_driver::port::Port;

use crate::flags::{BindFlags, Caps, InfoFlags, OpFlags};
use crate::*;

/// A wake-up that got lost is made good after a second. Nobody else takes as long as this, also on
/// a machine that does other things.
const SOON: Duration = Duration::from_millis(600);

/// A domain that others know, with a queue to sleep on.
struct Side {
    ep: Endpoint,
    cq: Cq,
    av: Av,
    domain: Domain,
}

fn side(port: Loopback, change: impl FnOnce(&mut Info, &mut Settings)) -> Side {
    side_on(Box::new(port), change)
}

fn side_on(port: Box<dyn Port>, change: impl FnOnce(&mut Info, &mut Settings)) -> Side {
    let base = || Settings { stats: false, rcvthread: false, ..Settings::default() };
    let hints = Info { caps: Caps::MSG | Caps::SEND | Caps::RECV, ..Info::default() };
    let none = InfoFlags::empty();
    let found = getinfo_with(&base(), API_VERSION, None, None, none, Some(&hints));
    let (mut info, mut settings) = (found.unwrap().remove(0), base());
    change(&mut info, &mut settings);
    let fabric = fabric(&FabricAttr::default()).unwrap();
    let domain = fabric.domain_on(&info, settings, port).unwrap();
    let attr = CqAttr { wait_obj: WaitObj::Unspec, ..CqAttr::default() };
    let (cq, av) = (domain.cq_open(attr).unwrap(), domain.av_open(AvAttr::default()).unwrap());
    let ep = domain.endpoint(&info).unwrap();
    ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
    ep.bind_av(&av).unwrap();
    ep.enable().unwrap();
    Side { ep, cq, av, domain }
}

impl Side {
    fn knows(&self, other: &Self) -> FiAddr {
        let mut at = [FI_ADDR_NOTAVAIL];
        assert_eq!(self.av.insert(&[other.ep.getname().unwrap()], &mut at), Ok(1));
        at[0]
    }
}

/// Goal: what a thread posts goes on at once while another sleeps on the port, which alone turns
/// the loop then. Method: a receive of a long message that was announced, which is pulled, in a
/// segment, where no timer runs.
#[test]
fn a_thread_asleep_on_the_port_drives_operations_of_other_threads() {
    let name = format!("shm:sleeps-{}", std::process::id());
    let [a, b] = [(); 2].map(|()| side_on(barewire_driver::open::open(&name).unwrap(), |_, _| {}));
    b.ep.send(Buf::zeroed(1 << 20), b.knows(&a), 1).unwrap();
    let mut idle = 0;
    while idle < 100 {
        let moved = a.domain.progress().unwrap() + b.domain.progress().unwrap();
        idle = if moved == 0 { idle + 1 } else { 0 };
    }
    let sent = || a.domain.port_counters().unwrap().tx_frames;
    std::thread::scope(|scope| {
        let asleep = scope.spawn(|| {
            let mut out = [Completion::default()];
            (a.cq.sread(&mut out, 0, 10_000), out[0].len)
        });
        std::thread::sleep(Duration::from_millis(100));
        // From here on the peer does nothing that would wake anybody, until it is asked.
        let (before, posted) = (sent(), Instant::now());
        a.ep.recv(Buf::zeroed(1 << 20), FI_ADDR_UNSPEC, 2).unwrap();
        while sent() == before && posted.elapsed() < Duration::from_secs(5) {
            std::thread::sleep(Duration::from_millis(1));
        }
        let took = posted.elapsed();
        while !asleep.is_finished() && posted.elapsed() < Duration::from_secs(15) {
            b.domain.progress().unwrap();
            std::thread::yield_now();
        }
        assert_eq!(asleep.join().unwrap(), (Ok(1), 1 << 20));
        assert!(took < SOON, "the message was asked for after {took:?}");
    });
}

/// Goal: a wake-up reaches who sleeps in a call although the receive thread sleeps on the port as
/// well. Method: a program that has not polled for a while, and a signal.
#[test]
fn the_receive_thread_takes_no_wake_up_from_the_program() {
    let (a, _b) = Loopback::pair();
    let a = side(a, |_, settings| settings.rcvthread = true);
    for _ in 0..3 {
        // The receive thread stands in by then.
        std::thread::sleep(Duration::from_millis(300));
        std::thread::scope(|scope| {
            let asleep = scope.spawn(|| {
                let read = a.cq.sread(&mut [Completion::default()], 0, 10_000);
                (read, Instant::now())
            });
            std::thread::sleep(Duration::from_millis(50));
            let signalled = Instant::now();
            a.cq.signal().unwrap();
            let (read, at) = asleep.join().unwrap();
            assert_eq!(read.err(), Some(Error::Again));
            let took = at - signalled;
            assert!(took < SOON, "the signal came after {took:?}");
        });
    }
}

/// Goal: of several threads that wait for one counter, those who wait for more sleep on when less
/// is reached. Method: the wake-ups of the domain, of which one that finds nothing must not be the
/// cause of another.
#[test]
fn a_waiter_with_a_higher_threshold_sleeps_on() {
    let (a, _b) = Loopback::pair();
    let a = side(a, |_, _| {});
    let cntr = a.domain.cntr_open(CntrAttr::default()).unwrap();
    let wake_ups = || a.domain.dom.sleep.epoch();
    std::thread::scope(|scope| {
        let cntr = &cntr;
        let [least, more, most] =
            [5, 10, 15].map(|value| scope.spawn(move || cntr.wait(value, 20_000)));
        std::thread::sleep(Duration::from_millis(200));
        cntr.set(6).unwrap();
        assert_eq!(least.join().unwrap(), Ok(()));
        std::thread::sleep(Duration::from_millis(100));
        let before = wake_ups();
        std::thread::sleep(Duration::from_millis(300));
        let woken = wake_ups() - before;
        assert!(woken < 10, "{woken} wake-ups while nothing happened");
        assert!(!more.is_finished() && !most.is_finished());
        cntr.set(15).unwrap();
        assert_eq!([more, most].map(|thread| thread.join().unwrap()), [Ok(()); 2]);
    });
}

/// Goal: a read of no entry, and a look whether there is one, turn the loop, as fi_cq(3) and
/// fi_poll(3) say, also while one waits that nobody reads. Method: a peer to whom the receiver has
/// to answer.
#[test]
fn a_read_of_no_entry_makes_progress_beside_one_that_waits() {
    let (a, b) = Loopback::pair();
    let [a, b] = [a, b].map(|port| side(port, |_, _| {}));
    let to_a = b.knows(&a);
    let calls: [&dyn Fn() -> Result<usize>; 4] =
        [&|| a.domain.progress(), &|| a.cq.read(&mut []), &|| a.cq.0.read_cqes(0, |_| {}), &|| {
            raw::RawCq(Arc::clone(&a.cq.0)).ready()
        }];
    assert_eq!(
        calls[1..].iter().map(|call| call()).collect::<Vec<_>>()[..2],
        [Err(Error::Again); 2]
    );
    for (n, call) in calls.iter().enumerate() {
        a.ep.recv(Buf::zeroed(1), FI_ADDR_UNSPEC, n as u64).unwrap();
        let send = Msg { bufs: Buf::zeroed(1).into(), addr: to_a, ..Msg::default() };
        b.ep.sendmsg(send, OpFlags::COMPLETION | OpFlags::DELIVERY_COMPLETE).unwrap();
        let start = Instant::now();
        while b.cq.read(&mut [Completion::default()]) != Ok(1) {
            call().unwrap();
            assert!(start.elapsed() < Duration::from_secs(10), "call {n} turned no loop");
        }
    }
    let mut all = [(); 8].map(|()| Completion::default());
    assert_eq!(a.cq.read(&mut all), Ok(calls.len()));
}

/// Signals to the process go to the program's threads, also where a thread turns the loop.
#[test]
fn no_signal_goes_to_the_progress_thread() {
    let (a, _b) = Loopback::pair();
    let _a = side(a, |info, _| info.domain_attr.data_progress = Progress::Auto);
    let masks = || -> Vec<u64> {
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let mask = |thread: std::path::PathBuf| {
            let name = std::fs::read_to_string(thread.join("comm")).ok()?;
            let status = std::fs::read_to_string(thread.join("status")).ok()?;
            let mask = status.lines().find_map(|line| line.strip_prefix("SigBlk:"))?;
            let mask = u64::from_str_radix(mask.trim(), 16).ok()?;
            (name.trim() == "barewire").then_some(mask)
        };
        threads.filter_map(|thread| mask(thread.ok()?.path())).collect()
    };
    let start = Instant::now();
    while masks().is_empty() && start.elapsed() < Duration::from_secs(10) {
        std::thread::sleep(Duration::from_millis(5));
    }
    let masks = masks();
    assert!(!masks.is_empty(), "it has given itself its name by now");
    for signal in [libc::SIGINT, libc::SIGTERM, libc::SIGUSR1, libc::SIGALRM, libc::SIGCHLD] {
        let blocked = masks.iter().all(|mask| mask >> (signal - 1) & 1 != 0);
        assert!(blocked, "signal {signal}: {masks:x?}");
    }
}

/// Goal: with other keys a session that is being opened starts anew at once, also if a thread
/// sleeps on the port, which has to send the frame. Method: the wake-ups of the domain; a peer that
/// does not answer. A call that finds the thread awake wakes nobody.
#[test]
fn new_keys_wake_the_thread_that_sleeps_on_the_port() {
    let dir = tempfile::tempdir().unwrap();
    let sealed = || {
        let path = dir.path().join("key");
        std::fs::write(&path, [1; 32]).unwrap();
        std::fs::set_permissions(&path, PermissionsExt::from_mode(0o600)).unwrap();
        let port = barewire_driver::open::open("udp:127.0.0.1").unwrap();
        side_on(port, |_, settings| {
            (settings.key_files, settings.near) = (vec![path], false);
            settings.t_dead = Duration::from_secs(60);
        })
    };
    let [a, b] = [(); 2].map(|()| sealed());
    a.ep.send(Buf::zeroed(8), a.knows(&b), 1).unwrap();
    let wake_ups = || a.domain.dom.sleep.epoch();
    let read = std::thread::scope(|scope| {
        let asleep = scope.spawn(|| a.cq.sread(&mut [Completion::default()], 0, 20_000));
        let woken = (0..200).any(|n| {
            std::thread::sleep(Duration::from_millis(5));
            let before = wake_ups();
            a.domain.set_keys(&[&[2 + n % 2; 32]]).unwrap();
            wake_ups() != before
        });
        a.cq.signal().unwrap();
        (asleep.join().unwrap().err(), woken)
    });
    assert_eq!(read, (Some(Error::Again), true), "{read:?}");
}
