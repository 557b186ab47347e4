//! Collectives among real processes: every kind, 1 to 8 of them, nightly up to 64, and kill -9 in
//! the middle.

use std::time::{Duration, Instant};

use barewire::flags::{Caps, CqFlags};
use barewire::*;

use crate::supervisor::{PATIENCE, Rng, Segment, Worker};
use crate::worker::{Node, open_with, say, settings};

/// T_dead of a group: many processes share few processors here, and one that is not scheduled is as
/// silent as a dead one.
const PATIENT: Duration = Duration::from_secs(2);

/// Becomes a worker with the role `coll`, or says that it is not meant.
pub(crate) fn run(role: &str) -> bool {
    if role != "coll" {
        return false;
    }
    let port = std::env::var("BAREWIRE_E2E_PORT").unwrap();
    let settings = Settings { t_dead: PATIENT, ..settings() };
    let node = open_with(&port, settings, Caps::COLLECTIVE);
    let eq = fabric(&FabricAttr::default()).unwrap().eq_open(EqAttr::default()).unwrap();
    node.ep.bind_eq(&eq).unwrap();
    say(&format!("ADDR {}", node.ep.getname().unwrap()));
    member(&node, &eq);
    true
}

/// The next line of the supervisor.
fn order() -> String {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
    line.trim().to_owned()
}

/// Joins the group it is told of, and calls.
fn member(node: &Node, eq: &Eq) {
    let line = order();
    let mut words = line.strip_prefix("GROUP ").unwrap().split_whitespace();
    let rank: usize = words.next().unwrap().parse().unwrap();
    let addrs: Vec<FiAddr> = words.map(|addr| node.knows(addr)).collect();
    let n = addrs.len();
    let mut set = node.av.av_set(&AvSetAttr::default()).unwrap();
    addrs.iter().for_each(|&a| set.insert(a).unwrap());
    let mc = node.ep.join_collective(set.addr(), &set, 0, 5).unwrap();
    let start = Instant::now();
    while eq.read(&mut [0; 8]).is_err() {
        assert!(start.elapsed() < PATIENCE, "rank {rank}: the join does not end");
        std::thread::yield_now();
    }
    say("JOINED");
    match order().as_str() {
        "MATRIX" => {
            // Each of many has the blocks of all in its memory.
            let long = if n > 8 { 4000 } else { 40_000 };
            for count in [0, 1, n - 1, n, n + 1, 1000, long] {
                for root in [0, n / 2, n - 1] {
                    all_kinds(node, mc.addr(), (rank, n), (root, addrs[root]), count);
                }
            }
            let sent = node.domain.port_counters().unwrap().tx_frames;
            let times = if n > 8 { 50 } else { 500 };
            for _ in 0..times {
                all_kinds(node, mc.addr(), (rank, n), (n / 2, addrs[n / 2]), 1);
            }
            let sent = node.domain.port_counters().unwrap().tx_frames - sent;
            // By messages a round has these at least: an alltoall to each other member, and one for
            // each other call in which all send. Who is late, as on a busy machine many are, is
            // asked whether it lives.
            let by_messages = times * (n as u64 + 3);
            assert!(sent < by_messages, "rank {rank}: {sent} frames for calls through memory");
            say("DONE");
        }
        "LATE" => {
            if rank == 0 {
                std::thread::sleep(PATIENT + PATIENT / 2);
            }
            node.ep.barrier(mc.addr(), 1).unwrap();
            assert!(end(node).is_ok(), "rank {rank}: one that is late was given up");
            say("DONE");
        }
        words => {
            let counts: &[usize] = if words == "SHORT" { &[1] } else { &[1, 400, 20_000] };
            say(&format!("ENDED {}", until_error(node, mc.addr(), rank, counts)));
            assert!(mc.check().is_err());
            drop(mc);
        }
    }
    // The others may still need our acknowledgements.
    assert_eq!(order(), "END");
}

fn source(rank: usize, i: usize) -> u64 {
    (rank as u64 + 3) * 1_000_003 + i as u64
}

fn words(count: usize, f: impl Fn(usize) -> u64) -> Buf {
    Buf::from((0..count).flat_map(|i| f(i).to_le_bytes()).collect::<Vec<u8>>())
}

fn end(node: &Node) -> Result<Completion> {
    let mut one = [Completion::default()];
    let start = Instant::now();
    loop {
        match node.cq.read(&mut one) {
            Ok(_) => {
                assert_eq!(one[0].flags, CqFlags::COLLECTIVE);
                return Ok(std::mem::take(&mut one[0]));
            }
            Err(Error::Again) => std::thread::yield_now(),
            Err(_) => return Err(node.cq.readerr().unwrap().err),
        }
        assert!(start.elapsed() < PATIENCE, "a collective does not end");
    }
}

/// One call of each kind; every word of every result is compared.
fn all_kinds(
    node: &Node,
    mc: FiAddr,
    (me, n): (usize, usize),
    (root, root_addr): (usize, FiAddr),
    count: usize,
) {
    let (ep, ty, sum) = (&node.ep, Datatype::Uint64, (AtomicOp::Sum, Datatype::Uint64));
    let own = |blocks: usize| words(blocks * count, |i| source(me, i));
    let room = |blocks: usize| words(blocks * count, |_| 7);
    let total = |i: usize| (0..n).map(|rank| source(rank, i)).sum::<u64>();
    let check = |what: &str, posted: PostResult, blocks: usize, want: &dyn Fn(usize) -> u64| {
        posted.unwrap_or_else(|e| panic!("{what}: {e}"));
        let bufs = end(node).unwrap_or_else(|e| panic!("{what}: {e}")).bufs;
        let result = &bufs.into_many().unwrap()[1];
        assert!(**result == *words(blocks * count, want), "{what} of {count} at {me} of {n}");
    };
    check("barrier", ep.barrier(mc, 1), 0, &|_| 0);
    let buf = if me == root { own(1) } else { room(1) };
    check("broadcast", ep.broadcast(buf, mc, root_addr, ty, None, 1), 1, &|i| source(root, i));
    if count == 0 {
        return;
    }
    let block = |i: usize| (i / count, i % count);
    check("alltoall", ep.alltoall((own(n), room(n)), count, mc, ty, 1), n, &|i| {
        source(block(i).0, me * count + block(i).1)
    });
    check("allreduce", ep.allreduce((own(1), room(1)), mc, sum, 1), 1, &total);
    check("allgather", ep.allgather((own(1), room(n)), mc, ty, 1), n, &|i| {
        source(block(i).0, block(i).1)
    });
    check("reduce_scatter", ep.reduce_scatter((own(n), room(1)), mc, sum, 1), 1, &|i| {
        total(me * count + i)
    });
    let at_root = |blocks| if me == root { blocks } else { 0 };
    let posted = ep.reduce((own(1), room(at_root(1))), mc, root_addr, sum, 1);
    check("reduce", posted, at_root(1), &total);
    let posted = ep.scatter((own(at_root(n)), room(1)), mc, root_addr, ty, 1);
    check("scatter", posted, 1, &|i| source(root, me * count + i));
    let posted = ep.gather((own(1), room(at_root(n))), mc, root_addr, ty, 1);
    check("gather", posted, at_root(n), &|i| source(block(i).0, block(i).1));
}

/// Calls until the group is given up, and returns how.
fn until_error(node: &Node, mc: FiAddr, rank: usize, counts: &[usize]) -> i32 {
    let sum = (AtomicOp::Sum, Datatype::Uint64);
    for i in 0.. {
        let count = counts[i % counts.len()];
        let bufs = (words(count, |i| source(rank, i)), words(count, |_| 0));
        let posted = node.ep.allreduce(bufs, mc, sum, 1);
        let failed = match posted {
            Ok(()) => end(node).err(),
            Err(refused) => Some(refused.error),
        };
        if let Some(err) = failed {
            return err.fi_errno();
        }
        if i == 20 {
            say("BUSY");
        }
    }
    unreachable!("the loop has no end")
}

fn group(n: usize, segment: &Segment) -> Vec<Worker> {
    let port = segment.port();
    let mut all: Vec<Worker> =
        (0..n).map(|i| Worker::start(&format!("member {i}"), "coll", &port)).collect();
    let addrs: Vec<String> = all.iter().map(|w| w.addr.clone()).collect();
    for (rank, worker) in all.iter_mut().enumerate() {
        worker.say(&format!("GROUP {rank} {}", addrs.join(" ")));
    }
    all.iter_mut().for_each(|w| drop(w.answer("JOINED")));
    all
}

fn finish(mut all: Vec<Worker>) {
    all.iter_mut().for_each(|w| w.say("END"));
    all.into_iter().for_each(Worker::finish);
}

/// Goal: all nine between processes, any count and root; nightly among as many as share memory.
#[test]
fn collectives_among_processes() {
    let many: &[usize] =
        if std::env::var_os("BAREWIRE_NIGHTLY").is_some() { &[16, 32, 64] } else { &[] };
    for n in (1..=8).chain(many.iter().copied()) {
        let segment = Segment::new(&format!("coll{n}"));
        let mut all = group(n, &segment);
        all.iter_mut().for_each(|w| w.say("MATRIX"));
        all.iter_mut().for_each(|w| drop(w.answer("DONE")));
        finish(all);
    }
}

/// Goal: who comes later than T_dead is waited for, as long as its process lives.
#[test]
fn a_late_member_is_waited_for() {
    let segment = Segment::new("colllate");
    let mut all = group(3, &segment);
    all.iter_mut().for_each(|w| w.say("LATE"));
    all.iter_mut().for_each(|w| drop(w.answer("DONE")));
    finish(all);
}

/// Goal: a process that is killed ends the calls of the others, once and in time (CR8).
#[test]
fn a_killed_member_ends_the_calls_of_the_others() {
    let mut rng = Rng::new(3);
    for round in 0..8 {
        let n = 2 + round % 4;
        // Short calls alone go through memory alone.
        let calls = if round < 4 { "UNTIL" } else { "SHORT" };
        let segment = Segment::new(&format!("collkill{round}"));
        let mut all = group(n, &segment);
        all.iter_mut().for_each(|w| w.say(calls));
        all.iter_mut().for_each(|w| drop(w.answer("BUSY")));
        std::thread::sleep(Duration::from_micros(rng.below(20_000)));
        let victim = rng.below(n as u64) as usize;
        all.remove(victim).kill();
        // Within T_dead of the time that each survivor really ran (rule S10), which on a machine
        // with other things to do is any time: `answer` says when it is too long. The simulator
        // holds the bound.
        for worker in &mut all {
            let code: i32 = worker.answer("ENDED").parse().unwrap();
            assert!([104, 111, 113].contains(&code), "{}: {code}", worker.name);
        }
        finish(all);
    }
}
