//! Litmus tests of the orders that are told (`fi_tx_attr.msg_order`, rows AR9 and X64) which those
//! of atomics leave over, and of what is visible at a message's entry (row AR7): what one operation
//! left is what the next one finds, whichever frames get lost.

use super::atomic::{Call, words};
use super::rma::{ALL, Region};
use super::*;
use crate::proto::atomic::{AtomicKind, AtomicOp, Datatype};

/// Bytes of a message or a write: in one frame or in several of either MTU, and less than the
/// credit that a session begins with, so that no message has to be announced. The bytes of one that
/// is are pulled, and messages are ordered by their heads alone.
const LENS: [usize; 4] = [1, 8, 500, 3000];

/// Runs `litmus` with every way of the frames, and a region of the second end.
fn each_way(litmus: impl Fn(&mut Pair, &Region, usize)) {
    for (lossless, drop) in [(true, 0), (false, 0), (false, 5), (false, 3)] {
        for mtu in [256, 1500] {
            for short in [None, Some(0)] {
                for len in LENS {
                    let mut pair = Pair::new(mtu, lossless);
                    (pair.drop, pair.scatter, pair.short) = (drop, true, short);
                    let region = pair.region(1, 4096, ALL);
                    litmus(&mut pair, &region, len);
                }
            }
        }
    }
}

/// Bytes of the `round`th operation.
fn filled(round: usize, len: usize) -> Vec<u8> {
    vec![round as u8 + 1; len]
}

/// A list of `len` bytes at the begin of the region.
fn list(region: &Region, len: usize) -> RmaList {
    RmaList::one(0, len as u64, region.key)
}

/// Lets `ended` operations of the first end and `taken` receives of the second end complete.
fn finish(pair: &mut Pair, ended: usize, taken: usize) {
    let mut done = [0; 2];
    for _ in 0..3_000 {
        pair.run(1_000_000);
        for (i, count) in done.iter_mut().enumerate() {
            for (_, err) in pair.outcomes(i) {
                assert_eq!(err, None);
                *count += 1;
            }
        }
        if done == [ended, taken] {
            return;
        }
    }
    panic!("{done:?} of {ended} and {taken}");
}

/// RAS (AR9, X64): a read that is posted behind a message finds what the message has left.
#[test]
fn a_read_finds_the_message_before_it() {
    each_way(|pair, region, len| {
        for round in 0..4 {
            pair.recv(1, region.part(0, len), 5, OpFlags::empty(), 2).unwrap();
            let sent = filled(round, len);
            pair.send(0, IoBuf::leaked(&sent), 5, OpFlags::empty(), 1).unwrap();
            let (buf, look) = shared(len);
            pair.read_to(buf, list(region, len), 1).unwrap();
            finish(pair, 2, 1);
            assert!(contents(&look) == sent, "round {round}, {len} bytes");
        }
    });
}

/// RAS and WAS of atomics: a fetch behind a message finds it, and what it leaves stays.
#[test]
fn an_atomic_finds_the_message_before_it() {
    each_way(|pair, region, _| {
        let one = 1_u64.to_le_bytes();
        for round in 0..4_u64 {
            let sent = 1000 * round;
            pair.recv(1, region.part(0, 8), 5, OpFlags::empty(), 2).unwrap();
            pair.send(0, IoBuf::leaked(&sent.to_le_bytes()), 5, OpFlags::empty(), 1).unwrap();
            let word = RmaList::one(0, 1, region.key);
            let look = pair.atomic(Call::sum(AtomicKind::Fetch, &one, word), 8).unwrap();
            finish(pair, 2, 1);
            assert_eq!(words(&contents(&look)), [sent]);
            assert_eq!(words(&region.bytes()[..8]), [sent + 1]);
        }
    });
}

/// WAS: a write that is posted behind a message to the same bytes is what stays there.
#[test]
fn a_write_stays_behind_the_message_before_it() {
    each_way(|pair, region, len| {
        for round in 0..4 {
            pair.recv(1, region.part(0, len), 5, OpFlags::empty(), 2).unwrap();
            pair.send(0, IoBuf::leaked(&filled(100, len)), 5, OpFlags::empty(), 1).unwrap();
            let written = filled(round, len);
            pair.write(&written, list(region, len), OpFlags::empty(), 1).unwrap();
            finish(pair, 2, 1);
            assert!(region.bytes()[..len] == written, "round {round}, {len} bytes");
        }
    });
}

/// Lets time pass until the receive of the second end completes, in turns that are short.
fn until_taken(pair: &mut Pair) {
    for _ in 0..3_000_000 {
        if !pair.read(1).is_empty() {
            return;
        }
        pair.run_by(1_000, 1_000);
    }
    panic!("no message");
}

/// SAW, and AR7: at the entry of a message everything is there that was written before it. The
/// message that may pass has one byte, the write has many.
#[test]
fn a_message_says_that_the_write_before_it_is_there() {
    each_way(|pair, region, len| {
        for round in 0..4 {
            pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 2).unwrap();
            let written = filled(round, len);
            pair.write(&written, list(region, len), OpFlags::empty(), 1).unwrap();
            pair.send(0, IoBuf::leaked(&[1]), 5, OpFlags::empty(), 1).unwrap();
            until_taken(pair);
            assert!(region.bytes()[..len] == written, "round {round}, {len} bytes");
            finish(pair, 2, 0);
        }
    });
}

/// AR7: the same of atomics, base and fetching.
#[test]
fn a_message_says_that_the_atomics_before_it_are_done() {
    each_way(|pair, region, len| {
        let count = (len / 8).clamp(1, 64);
        let add: Vec<u8> =
            [3_u64.to_le_bytes()].into_iter().cycle().take(count).flatten().collect();
        let before = words(&region.bytes()[..8 * count]);
        for round in 1..4_u64 {
            pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 2).unwrap();
            let kind = [AtomicKind::Base, AtomicKind::Fetch][round as usize % 2];
            let list = RmaList::one(0, count as u64, region.key);
            let room = if kind == AtomicKind::Fetch { 8 * count } else { 0 };
            pair.atomic(Call::sum(kind, &add, list), room).unwrap();
            pair.send(0, IoBuf::leaked(&[1]), 5, OpFlags::empty(), 1).unwrap();
            until_taken(pair);
            let now = words(&region.bytes()[..8 * count]);
            assert!(now.iter().zip(&before).all(|(n, b)| *n == b.wrapping_add(3 * round)));
            finish(pair, 2, 0);
        }
    });
}

/// An atomic read or write of the first word.
fn call(op: AtomicOp, operand: &[u8], region: &Region) -> Call<'static> {
    let kind = if op == AtomicOp::Read { AtomicKind::Fetch } else { AtomicKind::Base };
    let operand = Box::leak(Box::<[u8]>::from(operand));
    let word = RmaList::one(0, 1, region.key);
    Call { op: op as u32, ty: Datatype::Uint64 as u32, ..Call::sum(kind, operand, word) }
}

/// ATOMIC_RAR: of reads that are posted one behind the other none finds an older value than the one
/// before it, while the target counts.
#[test]
fn atomic_reads_do_not_pass_each_other() {
    each_way(|pair, region, _| {
        let mut count = 0_u64;
        for _ in 0..3 {
            let read = |_| pair.atomic(call(AtomicOp::Read, &[], region), 8).unwrap();
            let looks: Vec<IoBuf> = (0..8).map(read).collect();
            let mut done = 0;
            while done < looks.len() {
                count += 1;
                pair.ends[1].node.mrs.store(region.id, 0, &count.to_le_bytes()).unwrap();
                pair.run_by(5_000, 5_000);
                done += pair.outcomes(0).len();
            }
            let found: Vec<u64> = looks.iter().map(|look| words(&contents(look))[0]).collect();
            assert!(found.is_sorted(), "{found:?}");
        }
    });
}

/// ATOMIC_WAR and ATOMIC_RAW: a read finds the write before it, and not the one behind it.
#[test]
fn an_atomic_write_does_not_pass_the_read_before_it() {
    each_way(|pair, region, _| {
        pair.ends[1].node.mrs.store(region.id, 0, &0_u64.to_le_bytes()).unwrap();
        for round in 0..3_u64 {
            let mut looks = Vec::new();
            for i in 1..=8 {
                looks.push(pair.atomic(call(AtomicOp::Read, &[], region), 8).unwrap());
                let next = (8 * round + i).to_le_bytes();
                pair.atomic(call(AtomicOp::Write, &next, region), 0).unwrap();
            }
            finish(pair, 16, 0);
            let found: Vec<u64> = looks.iter().map(|look| words(&contents(look))[0]).collect();
            assert_eq!(found, (8 * round..8 * round + 8).collect::<Vec<_>>());
        }
    });
}
