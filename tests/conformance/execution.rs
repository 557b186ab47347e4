//! Section C.7: who makes progress, and what that costs.

use std::time::{Duration, Instant};

use barewire::flags::{Mode, OpFlags};
use barewire::*;
use barewire_driver::port::Port;

use crate::harness::*;

fn with(progress: Progress, idle: Idle) -> Plan {
    let mut plan = Plan::default();
    plan.info.domain_attr.data_progress = progress;
    plan.settings.idle = idle;
    plan
}

/// X70: with automatic progress a message arrives, a large one is pulled and its sender completes
/// while the receiving application makes no call at all; with manual progress it does not.
#[test]
fn x70_progress_without_calls() {
    for idle in [Idle::Spin, Idle::Yield, Idle::Sleep] {
        let p = Pair::with(&Plan::default(), &with(Progress::Auto, idle), ports(2));
        p.b.ep.recv(Buf::zeroed(1 << 20), FI_ADDR_UNSPEC, 1).unwrap();
        p.a.ep.send(buf(1 << 20, 1), p.a.peer, 2).unwrap();
        // Only A is driven.
        let sent = until("the send", || p.a.read());
        assert_eq!(sent.op_context, 2, "{idle:?}");
        let got = until("the receive", || p.b.read());
        assert!(got.bytes() == &pattern(1 << 20, 1)[..]);
    }
    let p = Pair::default();
    p.b.ep.recv(Buf::zeroed(1 << 20), FI_ADDR_UNSPEC, 1).unwrap();
    p.a.ep.send(buf(1 << 20, 1), p.a.peer, 2).unwrap();
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(100) {
        assert!(p.a.read().is_none(), "nobody turned B's loop");
    }
    p.at_a();
}

/// X70: threads that post are not starved by a progress thread that spins, and its sleep ends in
/// time for a retransmission.
#[test]
fn x70_the_progress_thread_shares() {
    let side = Side::new(ports(1).remove(0), &with(Progress::Auto, Idle::Spin));
    let start = Instant::now();
    for n in 0..2_000 {
        side.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, n).unwrap();
        side.ep.cancel(n).unwrap();
        assert_eq!(side.read_error().unwrap().err, Error::Canceled);
    }
    assert!(start.elapsed() < Duration::from_secs(10), "{:?} for 6,000 calls", start.elapsed());
    drop(side);
    let sleepy = with(Progress::Auto, Idle::Sleep);
    let p = Pair::with(&sleepy, &sleepy, crate::rules::bad_ports(2, 11));
    for n in 0..200 {
        p.b.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, n).unwrap();
        p.a.ep.send(buf(8, n), p.a.peer, n).unwrap();
        until("the message, over a bad link", || p.b.read_or_yield());
        until("the send, over a bad link", || p.a.read_or_yield());
    }
}

/// X70: what a post has due ends the sleep of the progress thread, which else lasts a second: a
/// frame that got lost is sent again in time while nobody calls the sender.
#[test]
fn x70_a_post_wakes_the_thread() {
    let spec = format!("fault(loss=0.1,seed=5):shm:wakes-{}", std::process::id());
    let port = || barewire_driver::open::open(&spec).unwrap_or_else(|e| panic!("{e}"));
    let sleepy = with(Progress::Auto, Idle::Sleep);
    let p = Pair::with(&sleepy, &sleepy, vec![port(), port()]);
    let start = Instant::now();
    for n in 0..100 {
        p.b.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, n).unwrap();
        p.a.ep.send(buf(8, n), p.a.peer, n).unwrap();
        until("the message", || p.b.read_or_yield());
        // Long enough for nothing to be due any more.
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
}

/// A plan with T_dead of 300 ms.
fn short_lived(rcvthread: bool, threading: Threading) -> Plan {
    let mut plan = Plan::default();
    plan.info.domain_attr.threading = threading;
    (plan.settings.t_dead, plan.settings.rcvthread) = (Duration::from_millis(300), rcvthread);
    plan
}

fn two(spec: &str) -> Vec<Box<dyn Port>> {
    let open = || barewire_driver::open::open(spec).unwrap_or_else(|e| panic!("{e}"));
    vec![open(), open()]
}

/// One side of each pair computes for three times T_dead, in the middle of eager messages and of
/// one that it has to pull, while the other only polls.
fn one_computes(pairs: &[&Pair]) {
    for p in pairs {
        // The session is open, and both have polled.
        p.b.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, 0).unwrap();
        p.a.ep.send(buf(8, 0), p.a.peer, 0).unwrap();
        p.at_a();
        p.at_b();
        for n in 1..=20 {
            p.b.ep.recv(Buf::zeroed(1 << 20), FI_ADDR_UNSPEC, n).unwrap();
            let len = if n % 10 == 0 { 1 << 20 } else { 100 };
            p.a.ep.send(buf(len, n), p.a.peer, n).unwrap();
        }
    }
    let start = Instant::now();
    let mut sent = vec![0; pairs.len()];
    while start.elapsed() < Duration::from_millis(1000) {
        for (p, sent) in pairs.iter().zip(&mut sent) {
            // `read` panics at an error entry: B lives.
            *sent += usize::from(p.a.read().is_some());
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    for (p, mut sent) in pairs.iter().zip(sent) {
        while sent < 20 {
            sent += usize::from(p.at_a().op_context <= 20);
        }
        let mut got: Vec<_> = (1..=20).map(|_| p.at_b()).collect();
        // A message that is pulled ends after those behind it.
        got.sort_by_key(|got| got.op_context);
        for (n, got) in (1..=20).zip(got) {
            assert_eq!(got.op_context, n);
            assert!(got.bytes() == &pattern(if n % 10 == 0 { 1 << 20 } else { 100 }, n)[..]);
        }
    }
}

/// X70: a program with manual progress that computes for longer than T_dead is not taken for dead:
/// on a wire its receive thread answers, in a domain without a lock as well, and on a segment the
/// kernel knows that it lives. Without the thread a wire's peers find it dead.
#[test]
fn x70_a_program_that_computes_lives() {
    for threading in [Threading::Safe, Threading::Domain] {
        let plan = short_lived(true, threading);
        one_computes(&[&Pair::with(&plan, &plan, two("udp:127.0.0.1"))]);
        let plan = short_lived(false, threading);
        let segment = format!("shm:computes-{}", std::process::id());
        one_computes(&[&Pair::with(&plan, &plan, two(&segment))]);
    }
    let plan = short_lived(false, Threading::Safe);
    let p = Pair::with(&plan, &plan, two("udp:127.0.0.1"));
    p.a.ep.send(buf(8, 1), p.a.peer, 1).unwrap();
    let failed = until("the death of a program that does not poll", || p.a.read_error());
    assert_eq!(failed.err, Error::HostUnreach);
}

/// Goal: a program that computes lives in each of its domains, whatever becomes of the others.
/// Method: two domains, of which one takes a lock and one does not, have a peer each that talks;
/// then the first is closed, and the program computes on.
#[test]
fn a_program_with_two_domains_that_computes_lives_in_both() {
    for threading in [[Threading::Safe, Threading::Domain], [Threading::Domain, Threading::Safe]] {
        let [p, q] = threading.map(|threading| {
            let plan = short_lived(true, threading);
            Pair::with(&plan, &plan, two("udp:127.0.0.1"))
        });
        one_computes(&[&p, &q]);
        drop(p.b);
        one_computes(&[&q]);
        drop(p.a);
    }
}

/// X70: the receive thread takes nothing from a program that polls or closes, and comes back each
/// time that it computes.
#[test]
fn x70_computing_and_polling_by_turns() {
    let plan = short_lived(true, Threading::Domain);
    for round in 0..4 {
        let p = Pair::with(&plan, &plan, two("udp:127.0.0.1"));
        for n in 0..20 {
            p.b.ep.recv(Buf::zeroed(300), FI_ADDR_UNSPEC, n).unwrap();
            p.a.ep.send(buf(300, n), p.a.peer, n).unwrap();
            std::thread::sleep(Duration::from_millis((n * 7 + round) % 40));
            assert!(p.at_b().bytes() == &pattern(300, n)[..]);
            p.at_a();
        }
    }
}

/// Goal: an operator sees that a program does not poll, although its receive thread answers for it.
/// Method: one side computes for a second and what it publishes is read, then it polls again.
#[test]
fn a_program_that_computes_is_shown_as_not_polled() {
    let mut plan = short_lived(true, Threading::Safe);
    plan.settings.stats = true;
    let p = Pair::with(&plan, &plan, two("udp:127.0.0.1"));
    let station = p.b.ep.getname().unwrap().station;
    let shown = || {
        let all = barewire::stats::read_all().unwrap();
        all.into_iter().find(|s| s.station == station && s.pid == std::process::id()).unwrap()
    };
    let exchange = |n| {
        p.b.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, n).unwrap();
        p.a.ep.send(buf(8, n), p.a.peer, n).unwrap();
    };
    exchange(0);
    p.at_a();
    p.at_b();
    let start = Instant::now();
    for n in 1.. {
        exchange(n);
        // Only A polls.
        until("the send", || p.a.read());
        std::thread::sleep(Duration::from_millis(10));
        if start.elapsed() > Duration::from_secs(1) {
            break;
        }
    }
    let computing = shown();
    let absent = Duration::from_nanos(computing.updated_ns - computing.polled_ns);
    assert!(absent > Duration::from_millis(700), "not polled for {absent:?}");
    until("a poll that is shown", || {
        p.b.read();
        let shown = shown();
        (shown.updated_ns.abs_diff(shown.polled_ns) < 100_000_000).then_some(())
    });
}

/// D4: a setting of automatic progress holds for a program whose hints ask for manual progress.
#[test]
fn x70_automatic_by_setting() {
    let mut plan = with(Progress::Manual, Idle::Sleep);
    plan.settings.progress = Progress::Auto;
    let p = Pair::with(&Plan::default(), &plan, ports(2));
    p.b.ep.recv(Buf::zeroed(1 << 20), FI_ADDR_UNSPEC, 1).unwrap();
    p.a.ep.send(buf(1 << 20, 1), p.a.peer, 2).unwrap();
    // Only A is driven.
    assert_eq!(until("the send", || p.a.read()).op_context, 2);
}

/// The time from a peer's last sign of life to the error of what waits for it, where its process
/// does not answer and this side polls every `gap`; and by how much longer the machine let it wait
/// between two polls.
fn told_after(gap: Duration) -> (Duration, Duration) {
    let plan = short_lived(false, Threading::Safe);
    let p = Pair::with(&plan, &plan, two("udp:127.0.0.1"));
    p.b.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, 0).unwrap();
    p.a.ep.send(buf(8, 0), p.a.peer, 0).unwrap();
    p.at_a();
    p.a.ep.send(buf(8, 1), p.a.peer, 1).unwrap();
    let (silent, mut late) = (Instant::now(), Late::new());
    until("the death of a silent peer", || {
        late.nap(gap);
        p.a.read_error()
    });
    (silent.elapsed(), late.sum)
}

/// Sums up by how much naps took longer than they were meant to, with what was done between two.
struct Late {
    last: Instant,
    sum: Duration,
}

impl Late {
    /// What the scheduler takes on a machine that does nothing else.
    const USUAL: Duration = Duration::from_millis(10);

    fn new() -> Self {
        Self { last: Instant::now(), sum: Duration::ZERO }
    }

    fn nap(&mut self, gap: Duration) {
        std::thread::sleep(gap);
        let over = self.last.elapsed().saturating_sub(gap);
        if over > Self::USUAL {
            self.sum += over;
        }
        self.last = Instant::now();
    }
}

/// D4: a dead peer is told of within T_dead, two gaps between polls and 100 ms, whatever the gaps.
#[test]
fn a_death_is_told_in_time_whatever_the_polling() {
    for gap_ms in [0, 10, 50, 200, 1000] {
        let gap = Duration::from_millis(gap_ms);
        let (took, late) = told_after(gap);
        // Twice what is promised of the gaps and the answer: other processes run here as well.
        let bound = Duration::from_millis(300 + 2 * 100) + 3 * gap + late;
        assert!((Duration::from_millis(290)..bound).contains(&took), "{took:?} at {gap:?}");
    }
}

/// Goal: the same on a segment, whose loop does not read the clock in each turn, for a program
/// whose polls all find frames and no completion. Method: polls without a pause, then an operation
/// towards nobody, then a poll for each message of a neighbour. Three times, since it is by chance
/// how many turns would go without the clock.
#[test]
fn a_death_is_told_in_time_where_frames_come() {
    let (gap, t_dead) = (Duration::from_millis(150), Duration::from_millis(300));
    for round in 0..3 {
        let plan = short_lived(false, Threading::Safe);
        let spec = format!("shm:frames-{}-{round}", std::process::id());
        let p = Pair::with(&plan, &plan, two(&spec));
        p.meet();
        let station = "02:00:00:00:00:09".parse().unwrap();
        let nobody = p.a.knows(EpAddr { station, ..p.b.ep.getname().unwrap() });
        p.a.ep.send(buf(8, 0), nobody, 0).unwrap();
        let posted = Instant::now();
        while posted.elapsed() < Duration::from_millis(20) {
            assert!(p.a.read_error().is_none());
        }
        let mut late = Late::new();
        until("the death of nobody", || {
            late.nap(gap);
            p.b.ep.inject(&[1; 8], p.b.peer).unwrap();
            p.a.read_error()
        });
        let took = posted.elapsed();
        let bound = t_dead + 2 * gap + Duration::from_millis(300) + late.sum;
        assert!((t_dead..bound).contains(&took), "round {round}: {took:?}, not {bound:?}");
    }
}

/// X72: the table of resource management for messages: a full queue is EAGAIN (R3, X44), a message
/// without a receive waits (X55), a short buffer is ETRUNC, and the endpoint works on.
#[test]
fn x72_an_endpoint_survives_its_errors() {
    let p = Pair::default();
    for _ in 0..3 {
        p.b.ep.recv(Buf::zeroed(2), FI_ADDR_UNSPEC, 1).unwrap();
        p.a.ep.inject(&[1; 5], p.a.peer).unwrap();
        assert_eq!(p.error_at_b().err, Error::Trunc);
        p.b.ep.recv(Buf::zeroed(5), FI_ADDR_UNSPEC, 2).unwrap();
        p.a.ep.inject(&[2; 5], p.a.peer).unwrap();
        assert_eq!(p.at_b().bytes(), [2; 5]);
    }
    // An endpoint number that nobody has.
    let mut nobody = p.b.ep.getname().unwrap();
    nobody.ep = 999;
    let to = p.a.knows(nobody);
    p.a.ep.sendmsg(untagged(buf(5, 1), to, 7), OpFlags::DELIVERY_COMPLETE).unwrap();
    let e = p.error_at_a();
    assert_eq!((e.entry.op_context, e.err), (7, Error::ConnRefused));
    assert_eq!(e.prov_errno, ProvErrno::NoEndpoint);
    p.b.ep.recv(Buf::zeroed(5), FI_ADDR_UNSPEC, 2).unwrap();
    p.a.ep.inject(&[3; 5], p.a.peer).unwrap();
    assert_eq!(p.at_b().bytes(), [3; 5]);
    p.all_is_back();
}

/// X76: an endpoint sends to itself and to its neighbours without the wire.
#[test]
fn x76_local_communication() {
    let side = Side::new(ports(1).remove(0), &Plan::default());
    for len in [0, 8, 256, 9_001, 300_000] {
        side.ep.recv(Buf::zeroed(len), FI_ADDR_UNSPEC, 1).unwrap();
        side.ep.send(buf(len, 2), side.me, 2).unwrap();
        let mut ends =
            [until("the first end", || side.read()), until("the second", || side.read())];
        ends.sort_by_key(|c| c.op_context);
        assert!(ends[0].bytes() == &pattern(len, 2)[..], "{len} bytes");
        assert_eq!(ends[0].src, side.me);
    }
    let frames = side.domain.port_counters().unwrap();
    assert_eq!((frames.tx_frames, frames.tx_no_route), (0, 0), "frames to ourselves went out");
    assert_eq!(side.domain.levels().unwrap().ops, 0);
}

/// X82: no mode is asked for, whatever the application offers.
#[test]
fn x82_no_modes() {
    let offered = Mode::all() - Mode::BUFFERED_RECV;
    let hints = Info { mode: offered, ..Info::default() };
    assert_eq!(info(&hints).mode, Mode::empty());
    assert_eq!(info(&Info::default()).mode, Mode::empty());
}
