//! Section A.0: what holds of every data call.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use barewire::flags::{BindFlags, Caps, CqFlags, Mode, OpFlags};
use barewire::*;
use barewire_driver::backend::fault::{Fault, FaultSettings};
use barewire_driver::port::Port;

use crate::harness::*;

/// R1: a refused call has no side effect and no later completion, whatever it was refused for.
#[test]
fn r1_a_refused_call_leaves_nothing_behind() {
    let p = Pair::default();
    let (ep, to) = (&p.a.ep, p.a.peer);
    let unknown = OpFlags::from_bits_retain(1 << 62);
    let refusals = [
        refusal(ep.send(buf(10, 1), 77, 1), 10),
        refusal(ep.send(buf(10, 1), FI_ADDR_UNSPEC, 1), 10),
        refusal(ep.sendmsg(untagged(buf(10, 1), to, 1), unknown), 10),
        refusal(ep.sendmsg(untagged(buf(257, 1), to, 1), OpFlags::INJECT), 257),
        refusal(ep.sendv((0..9).map(|_| buf(1, 1)).collect(), to, 1), 9),
        refusal(ep.recvmsg(untagged(buf(10, 1), FI_ADDR_UNSPEC, 1), unknown), 10),
        refusal(ep.recv(buf(10, 1), 77, 1), 10),
        refusal(ep.recvmsg(untagged(buf(10, 1), FI_ADDR_UNSPEC, 1), OpFlags::MULTI_RECV), 10),
        refusal(ep.trecvmsg(tagged((), FI_ADDR_UNSPEC, 1, 1), OpFlags::CLAIM), 0),
        ep.inject(&[0; 257], to).unwrap_err(),
        ep.inject(&[0; 1], 77).unwrap_err(),
        ep.tinjectdata(&[0; 257], 1, to, 1).unwrap_err(),
    ];
    assert!(refusals.iter().all(|e| *e != Error::Again), "{refusals:?}");
    p.all_is_back();
}

/// Ports of one segment whose frames are lost, doubled, reordered and damaged.
pub(crate) fn bad_ports(count: usize, seed: u64) -> Vec<Box<dyn Port>> {
    let faults = FaultSettings {
        loss: 0.03,
        dup: 0.02,
        reorder: 0.05,
        corrupt: 0.02,
        seed,
        ..FaultSettings::default()
    };
    let wrap = |port: Box<dyn Port>| Box::new(Fault::new(port, faults, "fault")) as Box<dyn Port>;
    ports(count).into_iter().map(wrap).collect()
}

/// R2: every operation ends once, over a link that loses, doubles, reorders and damages frames;
/// counters count the same.
#[test]
fn r2_every_operation_ends_exactly_once() {
    let mut plan = Plan::default();
    plan.settings.t_dead = std::time::Duration::from_secs(30);
    let p = Pair::with(&plan, &plan, bad_ports(2, 5));
    let total = 20_000_u64;
    let (mut sent, mut posted) = (0, 0);
    let (mut tx_ends, mut rx_ends) = (HashMap::new(), HashMap::new());
    until("end of the operations", || {
        while posted < total && posted < rx_ends.len() as u64 + 256 {
            match p.b.ep.trecv(Buf::zeroed(600), FI_ADDR_UNSPEC, 5, 0, posted) {
                Ok(()) => posted += 1,
                Err(r) => {
                    assert_eq!(r.error, Error::Again);
                    break;
                }
            }
        }
        while sent < total && sent < tx_ends.len() as u64 + 256 {
            let len = (sent * 37 % 600) as usize;
            match p.a.ep.tsenddata(buf(len, sent), sent, p.a.peer, 5, sent) {
                Ok(()) => sent += 1,
                Err(r) => {
                    assert_eq!(r.error, Error::Again);
                    break;
                }
            }
        }
        p.turn();
        while let Some(c) = p.a.read() {
            *tx_ends.entry(c.op_context).or_insert(0) += 1;
        }
        while let Some(c) = p.b.read() {
            assert_eq!(c.op_context, c.data, "matched out of order");
            assert!(c.bytes() == &pattern((c.data * 37 % 600) as usize, c.data)[..]);
            *rx_ends.entry(c.op_context).or_insert(0) += 1;
        }
        (tx_ends.len() as u64 == total && rx_ends.len() as u64 == total).then_some(())
    });
    assert!(tx_ends.values().chain(rx_ends.values()).all(|&n| n == 1));
    p.all_is_back();
    let lost: u64 = p.a.domain.port_counters().unwrap().tx_dropped;
    assert!(lost > 0, "the link was too good for this test");
}

/// R3: `FI_EAGAIN` only for want of something, and driving the queue mends it; what `FI_MORE` held
/// back leaves when a later call is refused.
#[test]
fn r3_again_clears_by_driving_the_queue() {
    let mut plan = Plan::default();
    plan.info.tx_attr.size = 8;
    let p = Pair::new(&plan);
    for _ in 0..64 {
        p.b.ep.recv(Buf::zeroed(4), FI_ADDR_UNSPEC, 0).unwrap();
    }
    p.meet();
    let deliver = OpFlags::DELIVERY_COMPLETE;
    let more = deliver | OpFlags::MORE;
    for n in 0..8 {
        p.a.ep.sendmsg(untagged(buf(4, n), p.a.peer, n), more).unwrap();
    }
    assert_eq!(refusal(p.a.ep.sendmsg(untagged(buf(4, 8), p.a.peer, 8), more), 4), Error::Again);
    // Only B is driven: what A held back must have left with the refusal.
    until("the messages that were held back", || {
        p.b.domain.progress().unwrap();
        p.b.read()
    });
    let mut polls = 0;
    let mut next = 8;
    while next < 64 {
        match p.a.ep.sendmsg(untagged(buf(4, next), p.a.peer, next), deliver) {
            Ok(()) => next += 1,
            Err(r) => {
                assert_eq!(r.error, Error::Again);
                p.turn();
                while p.a.read().is_some() || p.b.read().is_some() {}
                polls += 1;
                assert!(polls < 10_000, "EAGAIN does not clear");
            }
        }
    }
    assert!(polls > 0, "nothing was ever full");
}

/// R4: the context comes back as it was given, 0 too; no mode bit asks for memory.
#[test]
fn r4_contexts_come_back_verbatim() {
    let p = Pair::default();
    assert_eq!(Plan::default().info.mode, Mode::empty());
    for context in [0, 1, u64::MAX, 1 << 63, 0xdead_beef_0000_0001] {
        p.b.ep.recv(Buf::zeroed(1), FI_ADDR_UNSPEC, context).unwrap();
        p.a.ep.send(buf(1, 1), p.a.peer, !context).unwrap();
        assert_eq!(p.at_b().op_context, context);
        assert_eq!(p.at_a().op_context, !context);
    }
}

/// R6: a transfer of nothing needs no memory, and is a message all the same.
#[test]
fn r6_empty_transfers_complete() {
    let p = Pair::default();
    p.b.ep.recv((), FI_ADDR_UNSPEC, 1).unwrap();
    p.b.ep.recvv(Vec::new(), FI_ADDR_UNSPEC, 2).unwrap();
    p.b.ep.trecv(Buf::default(), FI_ADDR_UNSPEC, 9, 0, 3).unwrap();
    p.a.ep.send((), p.a.peer, 1).unwrap();
    p.a.ep.sendv(vec![Buf::default(), Buf::default()], p.a.peer, 2).unwrap();
    p.a.ep.tsend((), p.a.peer, 9, 3).unwrap();
    for context in 1..=3 {
        let got = p.at_b();
        assert_eq!((got.op_context, got.len), (context, 0));
        p.at_a();
    }
    p.b.ep.recv((), FI_ADDR_UNSPEC, 4).unwrap();
    p.a.ep.inject(&[], p.a.peer).unwrap();
    assert_eq!(p.at_b().op_context, 4);
    p.all_is_back();
}

/// R7: plain calls use the endpoint's flags, `msg` calls theirs in place of them.
#[test]
fn r7_flags_of_a_msg_call_replace_those_of_the_endpoint() {
    let mut plan = Plan::default();
    plan.info.tx_attr.op_flags = OpFlags::DELIVERY_COMPLETE;
    let p = Pair::new(&plan);
    if !p.a.domain.port().lossless {
        // There everything waits for the peer, and the two cannot be told apart.
        return;
    }
    p.meet();
    let only_a = || (0..1000).find_map(|_| p.a.read());
    p.a.ep.send(buf(8, 1), p.a.peer, 1).unwrap();
    assert!(only_a().is_none(), "delivery was reported before the peer had it");
    p.a.ep.sendmsg(untagged(buf(8, 2), p.a.peer, 2), PLAIN).unwrap();
    assert_eq!(only_a().map(|c| c.op_context), Some(2), "flags of 0 must not wait");
    p.b.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, 1).unwrap();
    p.b.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, 2).unwrap();
    assert_eq!(p.at_a().op_context, 1);
    p.at_b();
    p.at_b();
    p.all_is_back();
}

/// R8, MF12, MF13, X42: a flag that is not known or was not granted is refused, not ignored.
#[test]
fn r8_flags_not_granted_are_refused() {
    let mut plan = Plan::default();
    plan.info.caps -= Caps::FENCE | Caps::MULTI_RECV;
    let p = Pair::new(&plan);
    let to = p.a.peer;
    let mut sends = vec![1 << 62, 1 << 40, flags::FI_TRIGGER, flags::FI_COMMIT_COMPLETE];
    sends.extend(
        [OpFlags::FENCE, OpFlags::MULTICAST, OpFlags::PEEK, OpFlags::CLAIM].map(|f| f.bits()),
    );
    for bits in sends {
        let f = OpFlags::from_bits_retain(bits);
        let e = refusal(p.a.ep.sendmsg(untagged(buf(4, 1), to, 1), f), 4);
        assert_eq!(e, Error::BadFlags, "sendmsg with {bits:#x}");
        let e = refusal(p.a.ep.tsendmsg(tagged(buf(4, 1), to, 1, 1), f), 4);
        assert_eq!(e, Error::BadFlags, "tsendmsg with {bits:#x}");
    }
    let receives = [
        1 << 62,
        flags::FI_AUTH_KEY,
        OpFlags::PEEK.bits(),
        OpFlags::CLAIM.bits(),
        OpFlags::FENCE.bits(),
    ];
    for bits in receives {
        let f = OpFlags::from_bits_retain(bits);
        let e = refusal(p.a.ep.recvmsg(untagged(buf(4, 1), FI_ADDR_UNSPEC, 1), f), 4);
        assert_eq!(e, Error::BadFlags, "recvmsg with {bits:#x}");
    }
    let shared = SharedBuf::from(buf(64, 1));
    let e = refusal(p.a.ep.recvmsg(untagged(shared, FI_ADDR_UNSPEC, 1), OpFlags::MULTI_RECV), 64);
    assert_eq!(e, Error::BadFlags);
    p.all_is_back();
}

/// R9: `FI_ADDR_UNSPEC` is any source for a receive and nobody for a send.
#[test]
fn r9_unspecified_addresses() {
    let p = Pair::default();
    p.b.ep.recv(Buf::zeroed(4), FI_ADDR_UNSPEC, 1).unwrap();
    p.a.ep.inject(&[1, 2, 3, 4], p.a.peer).unwrap();
    assert_eq!(p.at_b().bytes(), [1, 2, 3, 4]);
    let e = refusal(p.a.ep.send(buf(4, 1), FI_ADDR_UNSPEC, 1), 4);
    assert_eq!(e.fi_errno(), errno::FI_EINVAL);
    assert_eq!(p.a.ep.inject(&[], FI_ADDR_UNSPEC).unwrap_err().fi_errno(), errno::FI_EINVAL);
}

/// R10, X17: an endpoint that is not enabled takes nothing.
#[test]
fn r10_posting_before_enable_is_refused() {
    let plan = Plan::default();
    let port = ports(1).remove(0);
    let domain = the_fabric().domain_on(&plan.info, plan.settings.clone(), port).unwrap();
    let (cq, av) = (domain.cq_open(plan.cq).unwrap(), domain.av_open(AvAttr::default()).unwrap());
    let ep = domain.endpoint(&plan.info).unwrap();
    ep.bind_cq(&cq, BOTH).unwrap();
    ep.bind_av(&av).unwrap();
    let mut me = [0];
    av.insert(&[ep.getname().unwrap()], &mut me).unwrap();
    assert_eq!(refusal(ep.send(buf(3, 1), me[0], 1), 3), Error::OpBadState);
    assert_eq!(refusal(ep.recv(buf(3, 1), FI_ADDR_UNSPEC, 1), 3), Error::OpBadState);
    assert_eq!(refusal(ep.tsend(buf(3, 1), me[0], 1, 1), 3), Error::OpBadState);
    assert_eq!(refusal(ep.trecv(buf(3, 1), FI_ADDR_UNSPEC, 1, 0, 1), 3), Error::OpBadState);
    assert_eq!(ep.inject(&[1], me[0]), Err(Error::OpBadState));
    ep.enable().unwrap();
    ep.recv(buf(3, 1), FI_ADDR_UNSPEC, 1).unwrap();
    ep.inject(&[1], me[0]).unwrap();
    let mut done = [Completion::default()];
    until("the message to ourselves", || cq.read(&mut done).ok());
    assert_eq!(done[0].op_context, 1);
}

/// R11, X71: with `FI_THREAD_SAFE` several threads use one endpoint and one queue at once; with
/// `FI_THREAD_DOMAIN` a second thread is turned away until the first lets go.
#[test]
fn r11_x71_threads() {
    for progress in [Progress::Manual, Progress::Auto] {
        let mut plan = Plan::default();
        plan.info.domain_attr.threading = Threading::Safe;
        plan.info.domain_attr.data_progress = progress;
        let side = Side::new(ports(1).remove(0), &plan);
        let (each, threads) = (2_000, 4);
        let received = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for t in 0..threads {
                let (side, received) = (&side, &received);
                scope.spawn(move || {
                    let mut posted = 0;
                    let mut sent = 0;
                    let total = each * threads;
                    while received.load(Ordering::Relaxed) < total {
                        let outstanding = posted + 1;
                        if posted < each
                            && side
                                .ep
                                .trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 1, 0, outstanding as u64)
                                .is_ok()
                        {
                            posted += 1;
                        }
                        if sent < each && side.ep.tinject(&[t as u8; 8], side.me, 1).is_ok() {
                            sent += 1;
                        }
                        if let Some(c) = side.read() {
                            assert_eq!(c.flags, CqFlags::RECV | CqFlags::TAGGED);
                            let b = c.bytes();
                            assert!(b.len() == 8 && b.iter().all(|&x| x == b[0]));
                            received.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(received.load(Ordering::Relaxed), each * threads, "{progress:?}");
    }
    let mut plan = Plan::default();
    plan.info.domain_attr.threading = Threading::Domain;
    let side = Side::new(ports(1).remove(0), &plan);
    std::thread::scope(|scope| {
        let (side, ask) = (&side, || ());
        ask();
        let there = scope.spawn(move || side.domain.progress()).join().unwrap();
        assert_eq!(there, Err(Error::OpBadState));
        side.domain.disown().unwrap();
        assert!(scope.spawn(move || side.domain.progress()).join().unwrap().is_ok());
        assert_eq!(side.domain.progress(), Err(Error::OpBadState));
    });
}

/// X71: at each level between these two, threads that share no endpoint and no queue use one domain
/// at once, and every message comes whole and once.
#[test]
fn x71_threads_with_endpoints_of_their_own() {
    let levels = [Threading::Fid, Threading::Endpoint, Threading::Completion];
    for threading in levels {
        for progress in [Progress::Manual, Progress::Auto] {
            let mut hints = Info { caps: usual_caps(), ..Info::default() };
            hints.domain_attr.threading = threading;
            hints.domain_attr.data_progress = progress;
            let plan = Plan { info: info(&hints), ..Plan::default() };
            assert_eq!(plan.info.domain_attr.threading, threading, "it comes back");
            let port = ports(1).remove(0);
            let domain = the_fabric().domain_on(&plan.info, plan.settings.clone(), port).unwrap();
            let one = |_| {
                let (cq, av) =
                    (domain.cq_open(plan.cq).unwrap(), domain.av_open(AvAttr::default()).unwrap());
                let ep = domain.endpoint(&plan.info).unwrap();
                ep.bind_cq(&cq, BOTH).unwrap();
                ep.bind_av(&av).unwrap();
                ep.enable().unwrap();
                (ep, cq, av)
            };
            let all: Vec<_> = (0..4).map(one).collect();
            let next = |i: usize| (i + 1) % all.len();
            let to = |i: usize| {
                let mut at = [0];
                all[i].2.insert(&[all[next(i)].0.getname().unwrap()], &mut at).unwrap();
                at[0]
            };
            let dests: Vec<_> = (0..all.len()).map(to).collect();
            std::thread::scope(|scope| {
                for ((ep, cq, _), dest) in all.iter().zip(dests) {
                    scope.spawn(move || ring(ep, cq, dest));
                }
            });
        }
    }
}

/// Sends 1,000 messages to the next thread and takes as many of the one before, each whole and by
/// the receive that was posted for it.
fn ring(ep: &Endpoint, cq: &Cq, dest: FiAddr) {
    const COUNT: u64 = 1_000;
    let len = |n: u64| if n.is_multiple_of(50) { 20_000 } else { 16 };
    let (mut posted, mut sent, mut ended, mut taken) = (0, 0, 0, 0);
    let mut seen = [false; COUNT as usize];
    let end = std::time::Instant::now() + PATIENCE;
    while (ended, taken) != (COUNT, COUNT) {
        assert!(std::time::Instant::now() < end, "{posted} {sent} {ended} {taken}");
        let room = posted < COUNT && posted < taken + 32;
        if room && ep.trecv(Buf::zeroed(20_000), FI_ADDR_UNSPEC, 1, 0, posted).is_ok() {
            posted += 1;
        }
        if sent < COUNT && ep.tsend(buf(len(sent), sent), dest, 1, sent).is_ok() {
            sent += 1;
        }
        let mut done = [Completion::default()];
        match cq.read(&mut done) {
            Ok(_) if done[0].flags.contains(CqFlags::RECV) => {
                // A long one may end after those behind it, which it was matched before.
                let n = done[0].op_context;
                assert!(!std::mem::replace(&mut seen[n as usize], true), "{n} twice");
                assert!(done[0].bytes() == &pattern(len(n), n)[..], "{n}");
                taken += 1;
            }
            Ok(_) => ended += 1,
            Err(e) => assert_eq!(e, Error::Again),
        }
    }
}

/// R12: the source may be reused when the level that was asked for is reached, and only the bytes
/// of before arrive.
#[test]
fn r12_sources_may_be_reused_at_their_level() {
    let p = Pair::default();
    let levels = [
        PLAIN,
        OpFlags::INJECT,
        OpFlags::INJECT_COMPLETE,
        OpFlags::TRANSMIT_COMPLETE,
        OpFlags::DELIVERY_COMPLETE,
        OpFlags::MATCH_COMPLETE,
    ];
    for flags in levels {
        for len in [1, 200, 5_000, 100_000] {
            if flags.contains(OpFlags::INJECT) && len > 256 {
                continue;
            }
            p.a.ep.sendmsg(untagged(buf(len, 4), p.a.peer, 0), flags).unwrap();
            // B posts late, so that short messages wait at the receiver.
            let mut posted = false;
            let mut source = until("the send", || {
                p.a.domain.progress().unwrap();
                let done = p.a.read();
                if done.is_none() {
                    if !posted {
                        p.b.ep.recv(Buf::zeroed(len), FI_ADDR_UNSPEC, 0).unwrap();
                        posted = true;
                    }
                    p.b.domain.progress().unwrap();
                }
                done
            })
            .take_buf()
            .unwrap();
            source.fill(0xee);
            drop(source);
            if !posted {
                p.b.ep.recv(Buf::zeroed(len), FI_ADDR_UNSPEC, 0).unwrap();
            }
            assert!(p.at_b().bytes() == &pattern(len, 4)[..], "{flags:?}, {len} bytes");
        }
    }
    let mut lent = [7; 100];
    p.a.ep.inject(&lent, p.a.peer).unwrap();
    lent.fill(0);
    p.b.ep.recv(Buf::zeroed(100), FI_ADDR_UNSPEC, 0).unwrap();
    assert_eq!(p.at_b().bytes(), [7; 100]);
    assert_eq!(lent, [0; 100]);
    p.all_is_back();
    let _ = BindFlags::TRANSMIT;
}
