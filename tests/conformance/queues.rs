//! Section C.4: completion queues, event queues, counters, waiting.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use barewire::flags::{BindFlags, CqFlags, MrMode, OpFlags};
use barewire::*;

use crate::harness::*;
use crate::rma;

/// X30: each format fills its fields; flags always.
#[test]
fn x30_formats() {
    let cases = [
        (CqFormat::Context, (0, 0, 0)),
        (CqFormat::Msg, (8, 0, 0)),
        (CqFormat::Data, (8, 99, 0)),
        (CqFormat::Tagged, (8, 99, 5)),
    ];
    for (format, want) in cases {
        let mut plan = Plan::default();
        plan.cq.format = format;
        let p = Pair::new(&plan);
        p.b.ep.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 5, 0, 1).unwrap();
        p.a.ep.tsenddata(buf(8, 1), 99, p.a.peer, 5, 2).unwrap();
        let got = p.at_b();
        assert_eq!((got.len, got.data, got.tag), want, "{format:?}");
        let flags = CqFlags::RECV | CqFlags::TAGGED | CqFlags::REMOTE_CQ_DATA;
        assert_eq!((got.op_context, got.flags), (1, flags));
        assert!(got.bufs.into_one().is_some());
    }
}

/// X31: entries come in batches, in order, and stop before an error.
#[test]
fn x31_batches_stop_before_an_error() {
    let p = Pair::default();
    for n in 0..6 {
        let room = if n == 3 { 1 } else { 8 };
        p.b.ep.recv(Buf::zeroed(room), FI_ADDR_UNSPEC, n).unwrap();
        p.a.ep.inject(&[1; 8], p.a.peer).unwrap();
    }
    p.settle();
    let mut out: [Completion; 10] = Default::default();
    let mut src = [0; 10];
    assert_eq!(p.b.cq.readfrom(&mut out, &mut src), Ok(3));
    assert_eq!((out[0].op_context, out[2].op_context, src[0]), (0, 2, p.b.peer));
    assert_eq!(p.b.cq.read(&mut out), Err(Error::Avail));
    let e = p.b.cq.readerr().unwrap();
    assert_eq!((e.entry.op_context, e.err, e.olen), (3, Error::Trunc, 7));
    assert_eq!(p.b.cq.strerror(e.prov_errno as i32), "nothing to add");
    assert_eq!(p.b.cq.read(&mut out[..1]), Ok(1));
    assert_eq!(p.b.cq.read(&mut out), Ok(1));
    assert_eq!(p.b.cq.read(&mut out), Err(Error::Again));
    assert!(p.b.cq.readfrom(&mut out, &mut src[..3]).is_err());
}

/// X32: with FI_SOURCE the sender's index, without it FI_ADDR_NOTAVAIL; the same for a sender that
/// was never inserted.
#[test]
fn x32_source() {
    let p = Pair::default();
    p.b.av.remove(&[p.b.peer]).unwrap();
    p.b.ep.recv(Buf::zeroed(1), FI_ADDR_UNSPEC, 1).unwrap();
    p.a.ep.inject(&[1], p.a.peer).unwrap();
    assert_eq!(p.at_b().src, FI_ADDR_NOTAVAIL);
    p.b.knows(p.a.ep.getname().unwrap());
    p.b.ep.recv(Buf::zeroed(1), FI_ADDR_UNSPEC, 1).unwrap();
    p.a.ep.inject(&[1], p.a.peer).unwrap();
    assert_eq!(p.at_b().src, p.b.peer);
    p.a.ep.recv(Buf::zeroed(1), FI_ADDR_UNSPEC, 1).unwrap();
    p.b.ep.inject(&[1], p.b.peer).unwrap();
    assert_eq!(p.at_a().src, p.a.peer);
}

fn waiting(wait_obj: WaitObj, progress: Progress) -> Plan {
    let mut plan = Plan::default();
    plan.cq.wait_obj = wait_obj;
    plan.info.domain_attr.data_progress = progress;
    plan.settings.idle = Idle::Sleep;
    plan
}

/// Time this thread has used a processor.
fn cpu_time() -> Duration {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    Duration::from_nanos(text.split_whitespace().next().unwrap().parse().unwrap())
}

/// X33: a blocking read sleeps instead of spinning, wakes when something comes, and keeps its time.
#[test]
fn x33_blocking_reads_sleep() {
    for progress in [Progress::Manual, Progress::Auto] {
        for wait_obj in [WaitObj::Unspec, WaitObj::Fd, WaitObj::Yield] {
            let p = Pair::new(&waiting(wait_obj, progress));
            let mut out = [Completion::default()];
            let (start, cpu) = (Instant::now(), cpu_time());
            assert_eq!(p.b.cq.sread(&mut out, 0, 300), Err(Error::Again));
            let (took, used) = (start.elapsed(), cpu_time() - cpu);
            assert!(took >= Duration::from_millis(300), "{took:?}");
            assert!(used < Duration::from_millis(60), "{used:?} of processor time for {took:?}");
            assert_eq!(p.b.cq.sread(&mut out, 0, 0), Err(Error::Again));
            std::thread::scope(|scope| {
                let b = &p.b;
                b.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, 4).unwrap();
                let reader = scope.spawn(move || {
                    let mut out = [Completion::default()];
                    let n = b.cq.sread(&mut out, 0, 20_000);
                    (n, out[0].op_context, Instant::now())
                });
                std::thread::sleep(Duration::from_millis(50));
                p.a.ep.inject(&[1; 8], p.a.peer).unwrap();
                // The session has to be opened: A must be driven until B has it.
                let sent = Instant::now();
                while !reader.is_finished() && sent.elapsed() < PATIENCE {
                    p.a.domain.progress().unwrap();
                    std::thread::yield_now();
                }
                let (n, context, _) = reader.join().unwrap();
                assert_eq!((n, context), (Ok(1), 4), "{progress:?} {wait_obj:?}");
            });
        }
    }
    let p = Pair::default();
    let none = p.b.cq.sread(&mut [Completion::default()], 0, 0);
    assert_eq!((none, p.b.cq.signal()), (Err(Error::NoSys), Err(Error::NoSys)));
}

/// X33: with a threshold a blocking read waits for so many entries, or an error.
#[test]
fn x33_threshold() {
    let mut plan = waiting(WaitObj::Unspec, Progress::Manual);
    plan.cq.wait_cond = WaitCond::Threshold;
    let side = Side::new(ports(1).remove(0), &plan);
    for n in 0..3 {
        side.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, n).unwrap();
    }
    side.ep.inject(&[1; 8], side.me).unwrap();
    side.ep.inject(&[1; 8], side.me).unwrap();
    let mut out: [Completion; 8] = Default::default();
    let start = Instant::now();
    assert_eq!(side.cq.sread(&mut out, 3, 100), Err(Error::Again));
    assert!(start.elapsed() >= Duration::from_millis(100));
    side.ep.inject(&[1; 8], side.me).unwrap();
    assert_eq!(side.cq.sread(&mut out, 3, 10_000), Ok(3));
    side.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, 9).unwrap();
    side.ep.cancel(9).unwrap();
    assert_eq!(side.cq.sread(&mut out, 3, 10_000), Err(Error::Avail));
}

/// X33: a signal ends a blocking read that runs now, or the next one.
#[test]
fn x33_signal() {
    for progress in [Progress::Manual, Progress::Auto] {
        let side = Side::new(ports(1).remove(0), &waiting(WaitObj::Unspec, progress));
        side.cq.signal().unwrap();
        let start = Instant::now();
        let read = |ms| side.cq.sread(&mut [Completion::default()], 0, ms);
        assert_eq!(read(20_000), Err(Error::Again));
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| read(20_000));
            std::thread::sleep(Duration::from_millis(50));
            side.cq.signal().unwrap();
            assert_eq!(reader.join().unwrap(), Err(Error::Again));
        });
        assert!(start.elapsed() < Duration::from_secs(10), "the signal was not heard");
        let start = Instant::now();
        assert_eq!(read(50), Err(Error::Again));
        assert!(start.elapsed() >= Duration::from_millis(50), "a signal ended two reads");
    }
}

/// Whether poll(2) finds the descriptor readable within `ms` milliseconds.
fn readable(fd: i32, ms: i32) -> bool {
    let path = format!("/proc/self/fdinfo/{fd}");
    let start = Instant::now();
    loop {
        // The count of an eventfd, as the kernel shows it: not 0 is readable.
        let info = std::fs::read_to_string(&path).unwrap();
        let line = info.lines().find_map(|l| l.strip_prefix("eventfd-count:")).unwrap();
        if u64::from_str_radix(line.trim(), 16).unwrap() > 0 {
            return true;
        }
        if start.elapsed() >= Duration::from_millis(ms as u64) {
            return false;
        }
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// X34: the descriptor is readable while an entry may be there, and FI_TRYWAIT never says yes when
/// the wake-up was before: sends at random moments, and no sleep too long.
#[test]
fn x34_trywait_loses_no_wake_up() {
    let p = Pair::with(&Plan::default(), &waiting(WaitObj::Fd, Progress::Manual), ports(2));
    p.meet();
    let fd = p.b.cq.wait_fd().unwrap();
    let f = the_fabric();
    let total = 1_000;
    let (done, slept) = (AtomicBool::new(false), AtomicUsize::new(0));
    std::thread::scope(|scope| {
        let (a, to, done) = (&p.a, p.a.peer, &done);
        scope.spawn(move || {
            let mut x = 12345_u64;
            for n in 0..total {
                x ^= x << 13;
                x ^= x >> 7;
                x ^= x << 17;
                if x.is_multiple_of(4) {
                    std::thread::sleep(Duration::from_micros(x % 700));
                }
                for _ in 0..x % 2000 {
                    std::hint::spin_loop();
                }
                // Takes the credit that B has given meanwhile.
                a.domain.progress().unwrap();
                while a.ep.inject(&[n as u8; 8], to).is_err() && !done.load(Ordering::Relaxed) {
                    let _ = a.cq.read(&mut []);
                    std::thread::yield_now();
                }
            }
            while !done.load(Ordering::Relaxed) {
                a.domain.progress().unwrap();
                std::thread::yield_now();
            }
        });
        let _end = Finally(done);
        for n in 0..64 {
            p.b.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, n).unwrap();
        }
        let mut got = 0;
        let start = Instant::now();
        while got < total {
            assert!(start.elapsed() < PATIENCE, "{got} of {total}");
            while let Some(c) = p.b.read() {
                assert_eq!(c.bytes(), [got as u8; 8]);
                p.b.ep.recv(c.bufs, FI_ADDR_UNSPEC, 0).unwrap();
                got += 1;
            }
            if got < total && f.trywait(&[Waitable::Cq(&p.b.cq)]).is_ok() {
                slept.fetch_add(1, Ordering::Relaxed);
                let start = Instant::now();
                assert!(readable(fd, 5_000), "slept for {:?}, {got} of {total}", start.elapsed());
            }
        }
    });
    let slept = slept.load(Ordering::Relaxed);
    assert!(slept > 10, "only {slept} sleeps for {total} messages");
    assert_eq!(f.trywait(&[Waitable::Cq(&p.a.cq)]), Err(Error::NoSys));
}

/// X34: the descriptors of counters and event queues.
#[test]
fn x34_descriptors_of_counters_and_event_queues() {
    let side = Side::new(ports(1).remove(0), &waiting(WaitObj::Fd, Progress::Manual));
    let f = the_fabric();
    let cntr =
        side.domain.cntr_open(CntrAttr { wait_obj: WaitObj::Fd, ..CntrAttr::default() }).unwrap();
    assert_eq!(f.trywait(&[Waitable::Cntr(&cntr)]), Ok(()));
    assert!(!readable(cntr.wait_fd().unwrap(), 0));
    cntr.add(1).unwrap();
    assert!(readable(cntr.wait_fd().unwrap(), 1_000));
    assert_eq!(f.trywait(&[Waitable::Cntr(&cntr)]), Err(Error::Again));
    assert_eq!(f.trywait(&[Waitable::Cntr(&cntr)]), Ok(()));
    assert!(!readable(cntr.wait_fd().unwrap(), 0));
    let eq = f.eq_open(EqAttr { write: true, wait_obj: WaitObj::Fd, size: 4 }).unwrap();
    assert_eq!(f.trywait(&[Waitable::Eq(&eq)]), Ok(()));
    eq.write(1, b"x").unwrap();
    assert!(readable(eq.wait_fd().unwrap(), 1_000));
    assert_eq!(f.trywait(&[Waitable::Eq(&eq)]), Err(Error::Again));
    eq.read(&mut [0; 8]).unwrap();
    assert!(!readable(eq.wait_fd().unwrap(), 0));
    // A completion that is already there.
    side.ep.recv(Buf::zeroed(1), FI_ADDR_UNSPEC, 1).unwrap();
    side.ep.inject(&[1], side.me).unwrap();
    assert!(readable(side.cq.wait_fd().unwrap(), 5_000), "nobody drives the loop while we sleep");
    assert_eq!(f.trywait(&[Waitable::Cq(&side.cq)]), Err(Error::Again));
    assert!(side.read().is_some());
    assert!(side.read().is_none() && !readable(side.cq.wait_fd().unwrap(), 0));
}

/// X36: events of the application come back in order and as they were; the queue hears when the
/// port has gone.
#[test]
fn x36_event_queues() {
    let eq = the_fabric().eq_open(EqAttr { write: true, size: 8, ..EqAttr::default() }).unwrap();
    let side = Side::new(ports(1).remove(0), &Plan::default());
    side.domain.bind_eq(&eq).unwrap();
    for n in 0..8_u32 {
        eq.write(100 + n, &[n as u8; 3]).unwrap();
    }
    assert_eq!(eq.write(1, &[]), Err(Error::Again));
    let mut out = [0; 3];
    for n in 0..8_u32 {
        assert_eq!(eq.read(&mut out), Ok((100 + n, 3)));
        assert_eq!(out, [n as u8; 3]);
    }
    assert_eq!(eq.read(&mut out), Err(Error::Again));
}

/// X37: counters count what their binding says, can be set, and wake at their threshold or with an
/// error.
#[test]
fn x37_counters() {
    let plan = Plan::default();
    let port = ports(1).remove(0);
    let domain = the_fabric().domain_on(&plan.info, plan.settings.clone(), port).unwrap();
    let (cq, av) = (domain.cq_open(plan.cq).unwrap(), domain.av_open(AvAttr::default()).unwrap());
    let open = || domain.cntr_open(CntrAttr::default()).unwrap();
    let (tx, rx) = (open(), open());
    let ep = domain.endpoint(&plan.info).unwrap();
    ep.bind_cq(&cq, BOTH | BindFlags::SELECTIVE_COMPLETION).unwrap();
    ep.bind_av(&av).unwrap();
    ep.bind_cntr(&tx, BindFlags::TRANSMIT).unwrap();
    ep.bind_cntr(&rx, BindFlags::RECV).unwrap();
    assert_eq!(ep.bind_cntr(&rx, BindFlags::empty()), Err(Error::BadFlags));
    assert_eq!(ep.bind_cntr(&rx, BindFlags::SELECTIVE_COMPLETION), Err(Error::BadFlags));
    ep.enable().unwrap();
    let mut me = [0];
    av.insert(&[ep.getname().unwrap()], &mut me).unwrap();
    for _ in 0..10 {
        ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, 0).unwrap();
        ep.send(buf(8, 1), me[0], 0).unwrap();
    }
    assert_eq!(rx.wait(10, 10_000), Ok(()));
    assert_eq!(tx.wait(10, 10_000), Ok(()));
    assert_eq!((tx.read(), rx.read(), rx.readerr()), (Ok(10), Ok(10), Ok(0)));
    let start = Instant::now();
    assert_eq!(rx.wait(11, 50), Err(Error::TimedOut));
    assert!(start.elapsed() >= Duration::from_millis(50));
    ep.recv(Buf::zeroed(2), FI_ADDR_UNSPEC, 0).unwrap();
    ep.send(buf(8, 1), me[0], 0).unwrap();
    assert_eq!(rx.wait(11, 10_000), Err(Error::Avail), "the receive failed");
    assert_eq!((rx.read(), rx.readerr()), (Ok(10), Ok(1)));
    rx.set(100).unwrap();
    rx.add(5).unwrap();
    rx.seterr(7).unwrap();
    rx.adderr(1).unwrap();
    assert_eq!((rx.read(), rx.readerr()), (Ok(105), Ok(8)));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| rx.wait(200, 20_000));
        std::thread::sleep(Duration::from_millis(50));
        rx.add(95).unwrap();
        assert_eq!(waiter.join().unwrap(), Ok(()));
    });
    let (e, rx) = rx.close().unwrap_err();
    assert_eq!(e, Error::Busy);
    drop(ep);
    assert!(rx.close().is_ok());
    let none =
        domain.cntr_open(CntrAttr { wait_obj: WaitObj::None, ..CntrAttr::default() }).unwrap();
    assert_eq!(none.wait(1, 0), Err(Error::NoSys));
}

/// X37: `FI_CNTR_EVENTS_BYTES`: what was sent, received, written and read, on both sides, whatever
/// the number of packets; a failure is one, and of no bytes.
#[test]
fn x37_counters_of_bytes() {
    let p = Pair::new(&rma::plan(MrMode::empty()));
    let open = |side: &Side| {
        let attr = CntrAttr { events: CntrEvents::Bytes, ..CntrAttr::default() };
        side.domain.cntr_open(attr).unwrap()
    };
    let bound = |side: &Side, flags| {
        let cntr = open(side);
        side.ep.bind_cntr(&cntr, flags).unwrap();
        cntr
    };
    let at_a = [BindFlags::TRANSMIT, BindFlags::WRITE, BindFlags::READ].map(|f| bound(&p.a, f));
    let at_b = [BindFlags::RECV, BindFlags::REMOTE_WRITE, BindFlags::REMOTE_READ];
    let at_b = at_b.map(|f| bound(&p.b, f));
    let (mr, to) = rma::region(&p, 400_000);
    let of_region = [open(&p.b), open(&p.b)];
    mr.bind_cntr(&of_region[0], BindFlags::REMOTE_WRITE).unwrap();
    mr.bind_cntr(&of_region[1], BindFlags::REMOTE_READ).unwrap();
    // Sent, written, read: the same at both ends, but for a message that is cut.
    let check = |[sent, written, read]: [u64; 3], cut: u64| {
        p.settle();
        let values = |cntrs: &[Cntr]| cntrs.iter().map(|c| c.read().unwrap()).collect::<Vec<_>>();
        assert_eq!(values(&at_a), [sent, written, read]);
        assert_eq!(values(&at_b), [sent - cut, written, read]);
        assert_eq!(values(&of_region), [written, read]);
    };
    let lens = [0, 1, 200, 3_000, 40_000, 300_000];
    for len in lens {
        p.b.ep.recv(Buf::zeroed(len + 7), FI_ADDR_UNSPEC, 1).unwrap();
        p.a.ep.send(buf(len, 1), p.a.peer, 2).unwrap();
        assert_eq!((p.at_b().len, p.at_a().op_context), (len, 2));
    }
    let all = lens.iter().sum::<usize>() as u64;
    check([all, 0, 0], 0);
    for n in 0..8 {
        p.b.ep.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, n, 0, n).unwrap();
        let (bufs, more) = (buf(n as usize, 3).into(), n < 7);
        let msg = TaggedMsg { bufs, addr: p.a.peer, tag: n, ignore: 0, context: n, data: 0 };
        p.a.ep.tsendmsg(msg, if more { OpFlags::MORE } else { OpFlags::empty() }).unwrap();
    }
    (0..8).for_each(|_| drop((p.at_a(), p.at_b())));
    p.b.ep.recv(Buf::zeroed(2), FI_ADDR_UNSPEC, 1).unwrap();
    p.a.ep.inject(&[1; 100], p.a.peer).unwrap();
    assert_eq!(p.error_at_b().err, Error::Trunc);
    let sent = all + 28 + 100;
    check([sent, 0, 0], 100);
    for len in lens {
        p.a.ep.write(buf(len, 1), to, 1).unwrap();
        p.a.ep.read(Buf::zeroed(len), to, 2).unwrap();
        (0..2).for_each(|_| drop(p.at_a()));
    }
    let range = |addr, len| RmaIov { addr, len, key: to.key };
    let rma_iov = vec![range(100, 5_000), range(9_000, 1_000)];
    let two =
        |bufs: Bufs| RmaMsg { bufs, addr: to.dest, rma_iov: rma_iov.clone(), context: 3, data: 7 };
    p.a.ep.writemsg(two(buf(6_000, 3).into()), OpFlags::REMOTE_CQ_DATA).unwrap();
    p.a.ep.readmsg(two(Buf::zeroed(6_000).into()), OpFlags::empty()).unwrap();
    (0..2).for_each(|_| drop(p.at_a()));
    assert_eq!(p.at_b().len, 6_000);
    check([sent, all + 6_000, all + 6_000], 100);
    // Of atomics the elements count; those that fetch are reads, and of the region both.
    let sum = TypedOp::new(AtomicOp::Sum, Datatype::Uint64);
    for len in [8, 4_000] {
        p.a.ep.atomic(sum, &vec![1; len], to, 1).unwrap();
        p.at_a();
    }
    check([sent, all + 6_000 + 4_008, all + 6_000], 100);
    for len in [8, 4_000] {
        p.a.ep.fetch_atomic(sum, &vec![1; len], Buf::zeroed(len), to, 1).unwrap();
        p.at_a();
    }
    p.settle();
    let read = |cntr: &Cntr| cntr.read().unwrap();
    assert_eq!([&at_a[2], &at_b[2], &of_region[1]].map(read), [all + 10_008; 3]);
    assert_eq!([&at_a[1], &at_b[1]].map(read), [all + 10_008; 2]);
    assert_eq!(read(&of_region[0]), all + 10_008 + 4_008);
    p.a.ep.write(buf(8, 1), Remote { key: !to.key, ..to }, 3).unwrap();
    assert_eq!(p.error_at_a().err, Error::KeyRejected);
    let errors = [&at_a[0], &at_a[1], &at_a[2], &at_b[0], &at_b[1]].map(|c| c.readerr().unwrap());
    assert_eq!(errors, [0, 1, 0, 1, 0]);
    assert_eq!(read(&at_a[1]), all + 10_008);
}

/// X37: a counter that is bound to an enabled endpoint counts from then on, as Sandia OpenSHMEM
/// expects, also what was done on the fast path before; a direction has one.
#[test]
fn x37_counters_that_come_late() {
    let p = Pair::default();
    let exchange = || {
        p.b.ep.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 5, 0, 0).unwrap();
        p.a.ep.tsend(buf(8, 1), p.a.peer, 5, 0).unwrap();
        p.at_a();
        p.at_b();
    };
    (0..3).for_each(|_| exchange());
    let late = |side: &Side, flags| {
        let cntr = side.domain.cntr_open(CntrAttr::default()).unwrap();
        side.ep.bind_cntr(&cntr, flags).unwrap();
        assert_eq!(side.ep.bind_cntr(&cntr, flags).unwrap_err().fi_errno(), errno::FI_EINVAL);
        cntr
    };
    let (tx, rx) = (late(&p.a, BindFlags::TRANSMIT), late(&p.b, BindFlags::RECV));
    (0..3).for_each(|_| exchange());
    assert_eq!((tx.read(), rx.read()), (Ok(3), Ok(3)));
}

/// X40, X41: each level waits for what it names, and a stronger one implies the weaker.
#[test]
fn x40_x41_completion_levels() {
    let p = Pair::default();
    p.meet();
    // Without B: what does not wait for the peer completes, what does does not.
    let alone = |flags| {
        p.a.ep.sendmsg(untagged(buf(64, 1), p.a.peer, 1), flags).unwrap();
        (0..2_000).any(|_| p.a.read().is_some())
    };
    assert!(alone(OpFlags::INJECT | OpFlags::INJECT_COMPLETE));
    if !p.a.domain.port().lossless {
        // Nothing else completes without the peer.
        return;
    }
    // On a port that loses nothing, what was handed over survives its sender.
    assert!(alone(OpFlags::TRANSMIT_COMPLETE));
    assert!(!alone(OpFlags::DELIVERY_COMPLETE));
    p.at_a();
    assert!(!alone(OpFlags::MATCH_COMPLETE));
    p.settle();
    assert!(p.a.read().is_none(), "matched before a receive was posted");
    for n in 0..4 {
        p.b.ep.recv(Buf::zeroed(64), FI_ADDR_UNSPEC, n).unwrap();
        assert_eq!(p.at_b().bytes(), pattern(64, 1));
    }
    p.at_a();
    p.all_is_back();
}

/// X44: a full completion queue refuses posts and loses nothing.
#[test]
fn x44_a_tiny_queue_refuses_and_loses_nothing() {
    let mut plan = Plan::default();
    plan.cq.size = 4;
    let p = Pair::new(&plan);
    let (mut sent, mut posted, mut got, mut done) = (0_u64, 0_u64, 0_u64, 0_u64);
    let (mut full_tx, mut full_rx) = (0, 0);
    until("a thousand messages through queues of four", || {
        while posted < 1000 {
            match p.b.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, posted) {
                Ok(()) => posted += 1,
                Err(r) => {
                    assert_eq!(r.error, Error::Again);
                    full_rx += 1;
                    break;
                }
            }
        }
        while sent < 1000 {
            match p.a.ep.send(buf(8, sent), p.a.peer, sent) {
                Ok(()) => sent += 1,
                Err(r) => {
                    assert_eq!(r.error, Error::Again);
                    full_tx += 1;
                    break;
                }
            }
        }
        p.turn();
        if let Some(c) = p.b.read() {
            assert_eq!((c.op_context, c.bytes()), (got, &pattern(8, got)[..]));
            got += 1;
        }
        done += u64::from(p.a.read().is_some());
        (got == 1000 && done == 1000).then_some(())
    });
    assert!(full_tx > 0 && full_rx > 0, "the queues were never full");
    p.all_is_back();
}

/// X45: several endpoints on one queue, and one endpoint on two.
#[test]
fn x45_queues_are_shared_and_split() {
    let plan = Plan::default();
    let port = ports(1).remove(0);
    let domain = the_fabric().domain_on(&plan.info, plan.settings.clone(), port).unwrap();
    let open = || domain.cq_open(CqAttr::default()).unwrap();
    let (tx, rx) = (open(), open());
    let av = domain.av_open(AvAttr::default()).unwrap();
    let eps: Vec<Endpoint> = (0..3)
        .map(|_| {
            let ep = domain.endpoint(&plan.info).unwrap();
            ep.bind_cq(&tx, BindFlags::TRANSMIT).unwrap();
            ep.bind_cq(&rx, BindFlags::RECV).unwrap();
            ep.bind_av(&av).unwrap();
            ep.enable().unwrap();
            ep
        })
        .collect();
    let names: Vec<EpAddr> = eps.iter().map(|ep| ep.getname().unwrap()).collect();
    let mut at = [0; 3];
    av.insert(&names, &mut at).unwrap();
    for (n, ep) in eps.iter().enumerate() {
        ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, n as u64).unwrap();
        ep.send(buf(8, n as u64), at[(n + 1) % 3], 10 + n as u64).unwrap();
    }
    let mut out = [Completion::default()];
    let mut contexts = |cq: &Cq| {
        let mut all: Vec<u64> = (0..3)
            .map(|_| {
                until("a completion", || cq.read(&mut out).ok());
                if out[0].flags.contains(CqFlags::RECV) {
                    let sender = (out[0].op_context + 2) % 3;
                    assert_eq!(
                        (out[0].bytes(), out[0].src),
                        (&pattern(8, sender)[..], at[sender as usize])
                    );
                }
                out[0].op_context
            })
            .collect();
        all.sort_unstable();
        all
    };
    assert_eq!(contexts(&rx), [0, 1, 2]);
    assert_eq!(contexts(&tx), [10, 11, 12]);
}
