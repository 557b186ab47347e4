//! Announced messages on a port that loses nothing: nothing waits for a timer, and what came first
//! is asked for first.

use super::*;
use crate::wire::{Base, Ty};

/// A number below `below`, from a state that moves on.
fn draw(state: &mut u64, below: u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    (*state >> 11) % below
}

/// Goal: a stream of announced messages never stops until a probe sets it going again. Method:
/// rings of few frames, and turns of the two sides in an order and of lengths drawn from a seed; at
/// every moment one side has a frame to take or to send.
#[test]
fn a_stream_of_long_messages_never_waits_for_a_probe() {
    const LEN: usize = 300_000;
    const QUIET_TURNS: u32 = 1_000;
    for seed in 1..11_u64 {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15);
        let mut pair = Pair::new(65_520, true);
        let ring = 1 + draw(&mut state, 8) as usize;
        let window = 1 + draw(&mut state, 12);
        let total = 2 * window;
        let (mut sent, mut posted, mut done, mut quiet) = (0, 0, [0; 2], 0);
        let mut wires = [VecDeque::<Vec<u8>>::new(), VecDeque::new()];
        while done != [total; 2] {
            assert!(quiet < QUIET_TURNS, "seed {seed}: nothing moves at {done:?} of {total}");
            (pair.now, quiet) = (pair.now + 500, quiet + 1);
            let i = draw(&mut state, 2) as usize;
            if i == 0 && sent < total.min(done[0] + window) {
                pair.send(0, IoBuf::leaked(&[7; LEN]), 5, OpFlags::empty(), sent).unwrap();
                sent += 1;
            }
            if i == 1 && posted < total.min(done[1] + window) && draw(&mut state, 3) == 0 {
                pair.recv(1, IoBuf::leaked(&[0; LEN]), 5, OpFlags::empty(), posted).unwrap();
                posted += 1;
            }
            for _ in 0..draw(&mut state, 12) {
                let Some(bytes) = wires[1 - i].pop_front() else { break };
                pair.ends[i].node.on_frame(pair.now, &RxFrame::new(&bytes));
                quiet = 0;
            }
            let out = &mut wires[i];
            let mut sink = |frame: &TxFrame<'_>| {
                if out.len() >= ring {
                    return Tx::Full;
                }
                let mut bytes = vec![0; frame.len()];
                frame.copy_to(&mut bytes);
                out.push_back(bytes);
                Tx::Sent
            };
            pair.ends[i].node.transmit(pair.now, &mut sink);
            done[i] += pair.read(i).len() as u64;
        }
    }
}

/// Goal: of many announced messages of a peer the oldest is here first, and not all of them a
/// little at a time, so that a sender can go on while the rest is on its way.
#[test]
fn the_oldest_of_many_announced_messages_is_pulled_first() {
    const LEN: usize = 512 << 10;
    const COUNT: u64 = 64;
    let mut pair = Pair::new(65_520, true);
    for n in 0..COUNT {
        pair.recv(1, IoBuf::leaked(&[0; LEN]), 5, OpFlags::empty(), n).unwrap();
        pair.send(0, IoBuf::leaked(&[7; LEN]), 5, OpFlags::empty(), n).unwrap();
    }
    let mut order = Vec::new();
    for turn in 0.. {
        assert!(turn < 2_000, "{order:?}");
        pair.run(1);
        let none_yet = order.is_empty();
        order.extend(pair.read(1).iter().map(|c| c.op_context));
        if none_yet && !order.is_empty() {
            let going_on =
                pair.ends[1].node.pulls.records.iter().filter(|(_, pull)| pull.got > 0).count();
            let begun = order.len() + going_on;
            assert!(begun < 32, "{begun} messages have begun when the first is here");
        }
        if order.len() as u64 == COUNT {
            break;
        }
    }
    assert!(order.is_sorted(), "{order:?}");
}

/// A message that ends half way in a multi-receive names no sender: address 0 may be anybody's.
#[test]
fn a_message_cut_short_in_a_multi_receive_has_no_source() {
    for lossless in [true, false] {
        let mut pair = Pair::new(1500, lossless);
        pair.recv(1, IoBuf::leaked(&[0; 400_000]), u64::MAX, OpFlags::MULTI_RECV, 1).unwrap();
        pair.send(0, IoBuf::leaked(&bytes(300_000)), u64::MAX, OpFlags::empty(), 2).unwrap();
        while pair.ends[1].node.statistics().levels().pull_bytes == 0 {
            pair.run(5_000);
        }
        let (now, station) = (pair.now, pair.ends[0].node.port.station);
        pair.ends[1].node.sessions().drop_session(now, station);
        let err = pair.read_err(1);
        assert_eq!((err.err, err.cqe.op_context), (Error::ConnReset, 1));
        assert_eq!(err.cqe.src, FI_ADDR_UNSPEC);
    }
}

/// Goal: a program that computes between its sends, and does not poll, is not taken for one that
/// nothing reaches: what it is asked for waits until it comes to it. Method: where the port tells
/// who lives, one side announces long messages for three times T_dead and takes no frame meanwhile;
/// then it does.
#[test]
fn a_program_that_sends_and_does_not_poll_is_waited_for() {
    const LEN: usize = 100_000;
    let port = |station| PortCaps { tells_presence: true, ..caps(station, 65_520, true) };
    let mut pair = Pair::of([1, 2].map(|station| end_on(port(station), NodeSettings::default())));
    pair.send(0, IoBuf::leaked(&[1; 8]), 4, OpFlags::empty(), 0).unwrap();
    pair.recv(1, IoBuf::leaked(&[0; 8]), 4, OpFlags::empty(), 0).unwrap();
    pair.run(1_000_000);
    (0..2).for_each(|i| assert_eq!(pair.read(i).len(), 1));
    let t_dead_ns = pair.ends[0].node.settings.t_dead_ns;
    let mut unread = VecDeque::new();
    for n in 0..300 {
        pair.now = pair.now + t_dead_ns / 100;
        if n < 15 {
            pair.recv(1, IoBuf::leaked(&[0; LEN]), 5, OpFlags::empty(), n).unwrap();
        }
        if n % 20 == 0 {
            pair.send(0, IoBuf::leaked(&[7; LEN]), 5, OpFlags::empty(), n).unwrap();
        }
        let mut sent = VecDeque::new();
        pair.ends[0].node.transmit(pair.now, &mut sink(&mut sent));
        for bytes in &sent {
            pair.ends[1].node.on_frame(pair.now, &RxFrame::new(bytes));
        }
        pair.ends[1].node.transmit(pair.now, &mut sink(&mut unread));
    }
    assert_eq!(pair.ends[1].node.counters.sessions_stuck, 0);
    assert!(unread.len() > 15, "it asked for what was announced");
    for bytes in unread {
        pair.ends[0].node.on_frame(pair.now, &RxFrame::new(&bytes));
    }
    pair.run(100_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (15, 15));
}

/// Goal: on a port that loses nothing what asks for long data is acknowledged at once, unless it is
/// answered by the data itself.
#[test]
fn a_pull_asks_for_an_acknowledgement_and_a_read_does_not() {
    let mut pair = Pair::new(1500, true);
    let region = pair.region(1, 64, rma::ALL);
    let asks = |pair: &mut Pair, i: usize, kind: Ty| {
        let End { node, out, .. } = &mut pair.ends[i];
        node.transmit(pair.now, &mut sink(out));
        let bases = out.iter().map(|bytes| Base::parse(&RxFrame::new(bytes)).unwrap());
        let found: Vec<bool> = bases.filter(|base| base.ty == kind).map(|base| base.ar).collect();
        pair.run(1_000_000);
        found
    };
    pair.read_to(IoBuf::leaked(&[0; 64]), RmaList::one(0, 64, region.key), 1).unwrap();
    pair.run(1_000_000);
    pair.read_to(IoBuf::leaked(&[0; 64]), RmaList::one(0, 64, region.key), 1).unwrap();
    assert_eq!(asks(&mut pair, 0, Ty::Read), [false]);
    pair.send(0, IoBuf::leaked(&[1; 100_000]), 5, OpFlags::empty(), 2).unwrap();
    pair.run(1_000_000);
    pair.recv(1, IoBuf::leaked(&[0; 100_000]), 5, OpFlags::empty(), 3).unwrap();
    let pulls = asks(&mut pair, 1, Ty::Pull);
    assert!(!pulls.is_empty() && pulls.iter().all(|&ar| ar), "{pulls:?}");
}
