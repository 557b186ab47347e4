//! What the members of a group put for each other.

use super::*;
use crate::board::{Board, LEAVES, LONG_MAX, SHORT_MAX};
use crate::mem::Span;

const GROUP: u32 = 7;

fn board_of(port: &mut ShmPort, macs: &[Station]) -> ShmBoard {
    port.board(macs).expect("all are here")
}

/// Boards of a group of all `ports`, which have met.
fn met(ports: &mut [ShmPort]) -> Vec<ShmBoard> {
    let macs: Vec<Station> = ports.iter().map(|port| port.caps().station).collect();
    let mut boards: Vec<_> = ports.iter_mut().map(|port| board_of(port, &macs)).collect();
    let names: Vec<u64> = boards.iter().map(|board| board.name()).collect();
    assert!(boards.iter_mut().all(|board| board.attach(GROUP, &names)));
    boards
}

fn span(bytes: &[u8]) -> Span {
    IoBuf::leaked(bytes).take_one().expect("one piece")
}

/// Bytes `at..at + len` of what `rank` has put, between canaries.
fn taken(board: &ShmBoard, rank: u32, call: u32, at: usize, len: usize) -> Vec<u8> {
    let (memory, look) = IoBuf::leaked_pair(&vec![0x5a; len + 16]);
    board.read(rank, call, at, (&memory, 8), len);
    let mut bytes = vec![0; len + 16];
    look.read_at(0, &mut bytes);
    assert!(bytes[..8].iter().chain(&bytes[len + 8..]).all(|&b| b == 0x5a), "an overrun");
    bytes[8..len + 8].to_vec()
}

/// Goal: what a member puts is read by all as it is, of every length and from every place, for the
/// last call and the one before; nothing else is there.
#[test]
fn data_that_a_member_puts_is_read_by_all() {
    let settings = small();
    let mut ports = [open(&settings), open(&settings), open(&settings)];
    let mut boards = met(&mut ports);
    let bytes: Vec<u8> = (0..SHORT_MAX).map(|i| (i * 7 + i / 256) as u8).collect();
    let lens = (0..=80).chain([1000, SHORT_MAX - 1, SHORT_MAX]);
    for (i, len) in (0..).zip(lens) {
        // Numbers wrap.
        let call = 0_u32.wrapping_sub(30).wrapping_add(i);
        let by = call as usize % 3;
        assert_eq!(boards[0].mark(by as u32, call), None);
        boards[by].put(call, u64::from(call) + 5, &span(&bytes), len);
        for board in &boards {
            assert_eq!(board.mark(by as u32, call), Some(u64::from(call) + 5), "{len}");
            assert_eq!(board.mark(by as u32, call.wrapping_add(LEAVES)), None);
            assert_eq!(taken(board, by as u32, call, 0, len), bytes[..len]);
            let at = len / 3;
            assert_eq!(taken(board, by as u32, call, at, len - at), bytes[at..len]);
            if len >= 8 {
                let first = u64::from_le_bytes(bytes[..8].try_into().unwrap());
                assert_eq!(board.first_word(by as u32, call), first);
            }
        }
    }
    boards[0].put(110, 1, &span(&bytes), 9);
    boards[0].put(111, 2, &span(&bytes[9..]), 70);
    assert_eq!((boards[1].mark(0, 110), boards[1].mark(0, 111)), (Some(1), Some(2)));
    assert_eq!(taken(&boards[1], 0, 110, 0, 9), bytes[..9]);
    assert!(!boards[1].is_past(0, 110) && !boards[1].is_past(0, 112));
    boards[0].put(110 + LEAVES, 3, &span(&bytes), 0);
    assert_eq!((boards[1].mark(0, 110), boards[1].mark(0, 110 + LEAVES)), (None, Some(3)));
    assert!(boards[1].is_past(0, 110) && !boards[1].is_past(0, 110 + LEAVES));
}

/// Goal: a long contribution is read by all as it was written, in pieces from and to any place,
/// beside that to the call before, and no byte outside of it is written or read.
#[test]
fn long_contributions_are_read_by_all() {
    let settings = small();
    let mut ports = [open(&settings), open(&settings)];
    let mut boards = met(&mut ports);
    let bytes: Vec<u8> = (0..LONG_MAX + 9).map(|i| (i * 7 + i / 256) as u8).collect();
    let memory = IoBuf::leaked(&bytes);
    for (call, cut) in [(u32::MAX, 0), (0, 1), (1, 4097), (2, LONG_MAX)] {
        let shift = call.wrapping_add(2) as usize;
        boards[0].write(call, cut, (&memory, shift + cut), LONG_MAX - cut);
        boards[0].write(call, 0, (&memory, shift), cut);
        assert_eq!(boards[1].mark(0, call), None);
        boards[0].put(call, 5, &Span::EMPTY, 0);
        assert_eq!(boards[1].mark(0, call), Some(5));
        for (board, at) in [(&boards[1], 0), (&boards[0], 0), (&boards[1], 777)] {
            let (to, look) = IoBuf::leaked_pair(&vec![0x5a; LONG_MAX + 16]);
            board.read_long(0, call, at, (&to, 8), LONG_MAX - at);
            let mut read = vec![0; LONG_MAX + 16];
            look.read_at(0, &mut read);
            assert!(read[8..][..LONG_MAX - at] == bytes[shift + at..][..LONG_MAX - at], "{call}");
            let mut around = read[..8].iter().chain(&read[LONG_MAX - at + 8..]);
            assert!(around.all(|&b| b == 0x5a), "an overrun");
        }
        if call != u32::MAX {
            let (to, look) = IoBuf::leaked_pair(&[0; 8]);
            boards[1].read_long(0, call.wrapping_sub(1), LONG_MAX - 8, (&to, 0), 8);
            let mut read = [0; 8];
            look.read_at(0, &mut read);
            assert_eq!(read, bytes[shift - 1 + LONG_MAX - 8..][..8], "the call before {call}");
        }
    }
}

/// Goal: members are collected up to the first that has put nothing for a call, or something else.
#[test]
fn members_are_collected_up_to_one_that_lacks_or_differs() {
    let settings = small();
    let mut ports = [open(&settings), open(&settings), open(&settings), open(&settings)];
    let mut boards = met(&mut ports);
    let mark = |by: usize| if by == 3 { 8 } else { 9 };
    for call in [u32::MAX, 0] {
        let mut words = [77; 4];
        for by in [0, 2, 3] {
            boards[by].put(call, mark(by), &span(&[by as u8 + 1; 8]), 8);
        }
        assert_eq!(boards[2].collect(0..4, call, 9, &mut words), (1, false));
        assert_eq!(words, [u64::from_ne_bytes([1; 8]), 77, 77, 77]);
        boards[1].put(call, mark(1), &span(&[2; 8]), 8);
        assert_eq!(boards[2].collect(1..4, call, 9, &mut words), (3, true));
        let all = [1, 2, 3].map(|byte| u64::from_ne_bytes([byte; 8]));
        assert_eq!((&words[..3], words[3]), (&all[..], 77));
        assert_eq!(boards[2].collect(1..3, call, 9, &mut words), (3, false));
        assert_eq!(boards[0].collect(2..2, call, 9, &mut words), (2, false));
        assert_eq!(boards[1].collect(0..4, call.wrapping_add(LEAVES), 9, &mut words), (0, false));
    }
}

/// Goal: what was put by one who left, or was killed, is read until somebody takes its place; a
/// slot serves the next group when all have done with it, and others have left or gone.
#[test]
fn a_slot_is_kept_until_all_have_done_with_it() {
    let settings = small();
    let mut ports = vec![open(&settings), open(&settings), open(&settings)];
    let macs: Vec<Station> = ports.iter().map(|port| port.caps().station).collect();
    let next = |port: &mut ShmPort| board_of(port, &macs).name() as u32;
    let mut boards = met(&mut ports);
    let first = boards[0].name() as u32;
    for board in &mut boards {
        board.put(1, 9, &span(b"last"), 4);
    }
    boards[1].done(1);
    drop(boards.remove(0));
    assert_ne!(next(&mut ports[0]), first, "the third may still read it");
    assert_eq!(taken(&boards[1], 0, 1, 0, 4), b"last");
    boards[1].done(1);
    assert_eq!(next(&mut ports[0]), first);
    drop(boards);
    // The others leave the group without a word of their last call, or die.
    for is_dead in [false, true] {
        let mut boards = met(&mut ports);
        let slot = boards[0].name() as u32;
        boards[0].put(1, 9, &span(b""), 0);
        drop(boards.remove(0));
        assert_ne!(next(&mut ports[0]), slot);
        match is_dead {
            true => ports.truncate(1),
            false => boards.clear(),
        }
        let again = board_of(&mut ports[0], &macs[..1]).name() as u32;
        assert_eq!(again, slot, "dead: {is_dead}");
    }
}

/// Goal: the same where the numbers of calls begin again.
#[test]
fn a_slot_is_kept_where_numbers_begin_again() {
    let settings = small();
    let mut ports = vec![open(&settings), open(&settings)];
    let macs: Vec<Station> = ports.iter().map(|port| port.caps().station).collect();
    let next = |port: &mut ShmPort| board_of(port, &macs).name() as u32;
    let mut boards = met(&mut ports);
    let first = boards[0].name() as u32;
    for call in [u32::MAX, 0] {
        boards[0].put(call, 9, &span(b"last"), 4);
    }
    boards[1].done(u32::MAX);
    drop(boards.remove(0));
    assert_ne!(next(&mut ports[0]), first, "the other may still read it");
    assert_eq!(taken(&boards[0], 0, 0, 0, 4), b"last");
    boards[0].done(0);
    assert_eq!(next(&mut ports[0]), first);
}

/// Goal: what a member that died or left had put is there until somebody takes its place; what is
/// read from then on may be another's, and is found out.
#[test]
fn a_read_from_a_replaced_member_is_detected() {
    let settings = ShmSettings { members: Some(3), ..small() };
    let mut ports = vec![open(&settings), open(&settings), open(&settings)];
    let mut boards = met(&mut ports);
    for board in &mut boards {
        board.put(1, 9, &span(b"mine"), 4);
    }
    let [mut reader, _, gone] = <[ShmBoard; 3]>::try_from(boards).expect("three");
    let slot = gone.name() as u32;
    // As who is killed leaves it.
    std::mem::forget(gone);
    assert_eq!(reader.replaced(0..3, 1), None);
    ports.truncate(2);
    assert_eq!((reader.replaced(0..3, 1), taken(&reader, 2, 1, 0, 4)), (None, b"mine".to_vec()));
    ports.push(open(&settings));
    assert_eq!((reader.replaced(0..3, 1), taken(&reader, 2, 1, 0, 4)), (None, b"mine".to_vec()));
    let mac = ports[2].caps().station;
    let mut other = board_of(&mut ports[2], &[mac]);
    assert_eq!(other.name() as u32, slot);
    assert!(other.attach(GROUP + 1, &[other.name()]));
    other.put(1, 9, &span(b"ours"), 4);
    assert_eq!(taken(&reader, 2, 1, 0, 4), b"ours");
    assert_eq!((reader.replaced(0..3, 1), reader.replaced(0..2, 1)), (Some(2), None));
}

/// Goal: a name is believed only if it is one, of a slot of the member that is meant.
#[test]
fn names_of_no_slots_are_refused() {
    let settings = small();
    let mut ports = [open(&settings), open(&settings)];
    let macs: Vec<Station> = ports.iter().map(|port| port.caps().station).collect();
    let name = board_of(&mut ports[1], &macs).name();
    let slots = layout::SLOTS as u64;
    for odd in [0, name & !0xffff_ffff, name + slots, name | 0x8000_0000, name ^ 1 << 32] {
        let mut board = board_of(&mut ports[0], &macs);
        let own = board.name();
        assert!(!board.attach(GROUP, &[own, odd]), "{odd:#x}");
    }
    // Its member left, and was not seen to.
    let (mut board, [_, b]) = (board_of(&mut ports[0], &macs), ports);
    let own = board.name();
    drop(b);
    assert!(!board.attach(GROUP, &[own, name]));
}

/// Goal: a process has as many groups at a time as it has slots; who is not on the segment, or is
/// reached through a switch alone, shares nothing.
#[test]
fn slots_are_as_many_as_there_are() {
    let settings = small();
    let mut port = open(&settings);
    let mac = port.caps().station;
    let boards: Vec<_> = (0..layout::SLOTS).map(|_| board_of(&mut port, &[mac])).collect();
    let mut names: Vec<u64> = boards.iter().map(|board| board.name()).collect();
    names.dedup();
    assert_eq!(names.len(), layout::SLOTS);
    assert!(port.board(&[mac]).is_none());
    drop(boards);
    assert!(port.board(&[mac]).is_some());
    assert!(port.board(&[mac, Station::at([2, 0, 0, 0, 0, 9])]).is_none());
    let (mut leaf, _) = ShmPort::open_leaf(&settings).unwrap();
    let leaf_mac = leaf.caps().station;
    assert!(leaf.board(&[mac, leaf_mac]).is_none());
}

/// Goal: who sleeps wakes up when somebody has put something, as it does for a frame.
#[test]
fn a_sleeping_member_is_woken_by_a_put() {
    let settings = small();
    let mut ports = [open(&settings), open(&settings)];
    let mut boards = met(&mut ports);
    let waiter = ports[1].waiter().expect("a segment has one");
    let start = Instant::now();
    let sleeper = std::thread::spawn(move || waiter.wait(Duration::from_secs(20)));
    let sleeps = || ports[0].shared.seg.sleeping(ports[1].shared.me).load(Relaxed) != 0;
    while !sleeps() {
        std::thread::sleep(Duration::from_millis(1));
    }
    boards[0].put(1, 1, &span(b"up"), 2);
    sleeper.join().unwrap();
    assert!(start.elapsed() < Duration::from_secs(10), "nobody woke it");
    // The bell that was rung for it leads to no frame.
    assert_eq!(drain(&mut ports[1]), Vec::<Vec<u8>>::new());
}

/// Goal: a segment for the most members takes address space for the slots that are used, not for
/// the 8 GiB of all that there may be.
#[test]
fn address_space_is_taken_for_used_slots() {
    // In pages.
    let taken = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').next().unwrap().parse::<u64>().unwrap()
    };
    let before = taken();
    let settings = ShmSettings { members: Some(1024), ..small() };
    let mut ports = [open(&settings), open(&settings)];
    let mut boards = met(&mut ports);
    boards[0].put(1, 5, &span(&[7; 9]), 9);
    assert_eq!(boards[1].mark(0, 1), Some(5));
    // Other tests take some meanwhile.
    assert!(taken().saturating_sub(before) < (4 << 30) / 4096);
}
