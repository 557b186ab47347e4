//! The processes of tests on remote memory.
//!
//! A `target` lends memory by known keys, turns its loop, and answers `WORD n` with `VALUE v`. A
//! `dozer` lends some twice, and by turns polls and sleeps while a thread works on it. An `adder`
//! adds one to words of the target until it is killed, and keeps a journal of it in a file. A
//! `sharer` lends a file that another one lends as well.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use barewire::flags::{Access, Caps};
use barewire::raw::IoVec;
use barewire::*;

use crate::worker::{Node, open_as, orders, say, settings};

/// Keys of the memory that may be written and read, only be read, and only be written.
pub(crate) const ALL: u64 = 7;
pub(crate) const READ_ONLY: u64 = 8;
pub(crate) const WRITE_ONLY: u64 = 9;

/// Bytes of each.
pub(crate) const LEN: usize = 16 << 10;

/// What the memory holds at first.
pub(crate) const FILL: u8 = 0xc5;

/// Bytes of a file that two processes lend.
pub(crate) const SHARED_LEN: usize = 4096;

/// Operations of an adder in flight.
pub(crate) const WINDOW: u64 = 16;

/// Opens a domain on `port` with an endpoint for everything one-sided.
pub(crate) fn open(port: &str, progress: Progress) -> Node {
    open_with(port, progress, settings())
}

fn open_with(port: &str, progress: Progress, settings: Settings) -> Node {
    let mut hints = Info { caps: Caps::TAGGED | Caps::RMA | Caps::ATOMIC, ..Info::default() };
    hints.domain_attr.data_progress = progress;
    open_as(port, settings, hints)
}

/// Runs one of the roles of this file, if `role` is one.
pub(crate) fn run(role: &str) -> bool {
    let port = || std::env::var("BAREWIRE_E2E_PORT").unwrap();
    let open = |progress| open(&port(), progress);
    match role {
        "target" => lend(&open(Progress::Manual), &orders()),
        "dozer" => doze(&port(), &orders()),
        "adder" => add(&open(Progress::Manual), &orders()),
        "sharer" => share(&open(Progress::Manual), &orders()),
        _ => return false,
    }
    true
}

fn region(node: &Node, key: u64, access: Access) -> Mr {
    let attr = MrAttr { access, requested_key: Some(key), ..MrAttr::default() };
    node.domain.mr_reg(Buf::from(vec![FILL; LEN]), &attr).unwrap()
}

/// Lends memory at two addresses until told to stop. At the first it turns the loop itself, as long
/// as the last order was `POLL`; at the second a thread does, which sleeps while nothing comes.
fn doze(port: &str, orders: &Receiver<String>) {
    let active = open(port, Progress::Manual);
    let idle = Settings { idle: Idle::Sleep, ..settings() };
    let asleep = open_with(port, Progress::Auto, idle);
    let all = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let _regions = [&active, &asleep].map(|node| region(node, ALL, all));
    say(&format!("ADDR {}", active.ep.getname().unwrap()));
    say(&format!("OTHER {}", asleep.ep.getname().unwrap()));
    while let Ok(order) = orders.recv() {
        say(&order);
        if order != "POLL" {
            continue;
        }
        // Until the next order, which is `SLEEP`.
        loop {
            match orders.try_recv() {
                Ok(order) => break say(&order),
                Err(TryRecvError::Empty) => {
                    active.domain.progress().unwrap();
                }
                Err(TryRecvError::Disconnected) => return,
            }
        }
    }
}

/// Lends memory until told to stop.
fn lend(node: &Node, orders: &Receiver<String>) {
    let (read, write) = (Access::REMOTE_READ, Access::REMOTE_WRITE);
    let all = region(node, ALL, read | write);
    let others = [region(node, READ_ONLY, read), region(node, WRITE_ONLY, write)];
    say(&format!("ADDR {}", node.ep.getname().unwrap()));
    loop {
        node.domain.progress().unwrap();
        let order = match orders.try_recv() {
            Ok(order) => order,
            Err(TryRecvError::Empty) => {
                std::thread::yield_now();
                continue;
            }
            Err(TryRecvError::Disconnected) => return,
        };
        if let Some(at) = order.strip_prefix("WORD ") {
            let mut word = [0; 8];
            all.load(8 * at.parse::<usize>().unwrap(), &mut word).unwrap();
            say(&format!("VALUE {}", u64::from_le_bytes(word)));
        } else if order == "ZERO" {
            all.store(0, &[0; LEN]).unwrap();
            say("ZEROED");
        } else if order == "CANARIES" {
            // What no peer may change: all of the other two.
            let mut bytes = vec![0; LEN];
            let whole = others.iter().all(|mr| {
                mr.load(0, &mut bytes).unwrap();
                bytes.iter().all(|b| *b == FILL)
            });
            say(&format!("WHOLE {whole}"));
        } else {
            return;
        }
    }
}

/// Lends a file that another process lends as well.
fn share(node: &Node, orders: &Receiver<String>) {
    say(&format!("ADDR {}", node.ep.getname().unwrap()));
    let order = orders.recv().unwrap();
    let path = order.strip_prefix("SHARE ").expect("an order");
    let file = File::options().read(true).write(true).open(path).unwrap();
    let map = memmap2::MmapOptions::new().len(SHARED_LEN).map_raw(&file).unwrap();
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let attr = MrAttr { access, requested_key: Some(ALL), ..MrAttr::default() };
    let iov = [IoVec { base: map.as_mut_ptr(), len: SHARED_LEN }];
    // SAFETY: mapped until the end of this function, where the region goes first; nobody has a
    // reference to it.
    let region = unsafe { node.domain.raw_mr_reg(&iov, &attr) }.unwrap();
    say("SHARED");
    while matches!(orders.try_recv(), Err(TryRecvError::Empty)) {
        node.domain.progress().unwrap();
    }
    drop(region);
}

/// Adds one to word 0 of the peer, which others add to as well, and to a word of its own, by turns.
/// The file has, as 64-bit words: how many were posted, how many have ended, and the old values of
/// those in order.
fn add(node: &Node, orders: &Receiver<String>) {
    say(&format!("ADDR {}", node.ep.getname().unwrap()));
    let order = orders.recv().unwrap();
    let words: Vec<&str> = order.split(' ').collect();
    let [_, addr, own, journal] = words[..] else { panic!("{order}") };
    let peer = node.knows(addr);
    let own: u64 = own.parse().unwrap();
    let journal = File::options().write(true).create_new(true).open(journal).unwrap();
    let note = |at: u64, value: u64| journal.write_all_at(&value.to_le_bytes(), 8 * at).unwrap();
    let sum = TypedOp::new(AtomicOp::Sum, Datatype::Uint64);
    let one = 1_u64.to_le_bytes();
    let (mut posted, mut ended, mut stop) = (0_u64, 0_u64, false);
    note(0, 0);
    let start = Instant::now();
    while !stop || ended < posted {
        stop |= matches!(orders.try_recv(), Ok(order) if order == "STOP");
        while !stop && posted - ended < WINDOW {
            let word = if posted.is_multiple_of(2) { 0 } else { own };
            let to = Remote { dest: peer, addr: 8 * word, key: ALL };
            // It may be killed right behind the call: better one too many.
            note(0, posted + 1);
            match node.ep.fetch_atomic(sum, &one, Buf::zeroed(8), to, posted) {
                Ok(()) => posted += 1,
                Err(refused) => {
                    assert_eq!(refused.error, Error::Again);
                    break;
                }
            }
        }
        let mut done = [Completion::default()];
        match node.cq.read(&mut done) {
            Ok(_) => {
                // Of one target and one endpoint: they end in the order of posting.
                assert_eq!(done[0].op_context, ended, "{ended} operations ended");
                let old = done[0].take_buf().expect("what the result was lent");
                note(2 + ended, u64::from_le_bytes(old[..].try_into().unwrap()));
                ended += 1;
                note(1, ended);
            }
            Err(Error::Again) => std::thread::yield_now(),
            Err(_) => panic!("{}", node.cq.readerr().unwrap()),
        }
        assert!(start.elapsed() < Duration::from_secs(120), "the supervisor forgot us");
    }
    note(0, posted);
    say(&format!("STOPPED {ended}"));
}
