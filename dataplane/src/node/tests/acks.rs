//! When acknowledgements of their own are sent on a port that may lose frames.

use super::super::acks::ACK_DELAY_NS;
use super::super::peer::ACK_EVERY;
use super::*;

/// A turn of the loop.
const TURN_NS: u64 = 100;

/// Two nodes with a session in which nothing is under way.
fn quiet_pair() -> Pair {
    quiet_pair_of(9000)
}

fn quiet_pair_of(mtu: usize) -> Pair {
    let mut pair = Pair::new(mtu, false);
    exchange(&mut pair, 8, 100_000);
    pair
}

/// Sends a message of `len` bytes, lets `ns` pass, and says how many sends have completed.
fn exchange(pair: &mut Pair, len: usize, ns: u64) -> usize {
    pair.recv(1, IoBuf::leaked(&vec![0; len]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&bytes(len)), 5, OpFlags::empty(), 2).unwrap();
    pair.run_by(ns, TURN_NS);
    pair.read(1);
    pair.read(0).len()
}

/// Acknowledgements that the receiver sent, and questions that the sender asked.
fn counted(pair: &Pair) -> (u64, u64) {
    let [sender, receiver] = pair.ends.each_ref().map(|end| end.node.counters());
    (receiver.tx_acks, sender.tx_asks)
}

/// Goal: a message that is alone is acknowledged in the first turns that find nothing else, however
/// many packets it takes and whichever way it goes.
#[test]
fn a_message_alone_is_acknowledged_at_once() {
    for short in [None, Some(0)] {
        let mut pair = quiet_pair();
        pair.short = short;
        for len in [8, 3000, 30_000] {
            let (acks, asks) = counted(&pair);
            assert_eq!(exchange(&mut pair, len, 9 * TURN_NS), 1, "of {len} bytes");
            let (acks_then, asks_then) = counted(&pair);
            assert!(acks_then > acks, "of {len} bytes");
            assert_eq!(asks_then, asks, "of {len} bytes");
        }
        assert!(pair.short.is_none_or(|count| count > 0));
    }
}

/// Goal: a program that has its message and computes then, without another poll, keeps nobody
/// waiting. Method: the receiver takes one turn for each message; later ones answer long after.
#[test]
fn a_computing_program_has_acknowledged_its_message() {
    let mut pair = quiet_pair();
    for round in 0..4 {
        assert_eq!(exchange(&mut pair, 8, 2 * TURN_NS), 1, "in one turn of the receiver");
        if round > 1 {
            pair.now = pair.now + 2 * ACK_DELAY_NS;
            answer(&mut pair);
            pair.run_by(100_000, TURN_NS);
            pair.read(0);
        }
    }
}

/// Goal: what a program answers at once carries the acknowledgement, after one quick ACK at most;
/// and when it has stopped to answer, one message later its acknowledgements are quick again.
#[test]
fn an_answer_at_once_carries_the_acknowledgement() {
    let mut pair = quiet_pair();
    let (acks, _) = counted(&pair);
    let mut done = 0;
    // Fewer than take an acknowledgement for the credit that it grants.
    for _ in 0..6 {
        done += exchange(&mut pair, 8, TURN_NS);
        // The rest of the turn that received, before the program knows of the message.
        let End { node, out, .. } = &mut pair.ends[1];
        node.transmit(pair.now, &mut sink(out));
        answer(&mut pair);
        pair.run_by(3 * TURN_NS, TURN_NS);
        done += pair.read(0).len();
    }
    assert!(counted(&pair).0 <= acks + 1, "{}", counted(&pair).0 - acks);
    assert_eq!(done, 2 * 6, "messages and answers");
    pair.run_by(100_000, TURN_NS);
    assert_eq!(exchange(&mut pair, 8, 2 * TURN_NS), 0, "an answer may follow");
    pair.run_by(TURN_NS, TURN_NS);
    assert_eq!(pair.read(0).len(), 1);
    pair.run_by(100_000, TURN_NS);
    assert_eq!(exchange(&mut pair, 8, 2 * TURN_NS), 1, "no answer followed");
}

/// Goal: a message that was not expected when it came is acknowledged like others, by the answer
/// of a program that answers at once.
#[test]
fn an_answer_to_the_unexpected_carries_the_acknowledgement() {
    let mut pair = quiet_pair();
    let (acks, _) = counted(&pair);
    for _ in 0..6 {
        pair.send(0, IoBuf::leaked(&bytes(8)), 5, OpFlags::empty(), 2).unwrap();
        pair.run_by(TURN_NS, TURN_NS);
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
        let End { node, out, .. } = &mut pair.ends[1];
        node.transmit(pair.now, &mut sink(out));
        answer(&mut pair);
        pair.run_by(3 * TURN_NS, TURN_NS);
        assert_eq!((pair.read(0).len(), pair.read(1).len()), (2, 2));
    }
    assert!(counted(&pair).0 <= acks + 1, "{}", counted(&pair).0 - acks);
}

/// The receiver of the other tests sends a message, whose completion nobody reads.
fn answer(pair: &mut Pair) {
    pair.recv(0, IoBuf::leaked(&[0; 8]), 6, OpFlags::empty(), 3).unwrap();
    pair.send(1, IoBuf::leaked(&[1; 8]), 6, OpFlags::empty(), 4).unwrap();
}

/// Goal: messages that follow each other share acknowledgements, and who sends the last of them
/// finds out soon that it is the last.
#[test]
fn a_stream_is_acknowledged_now_and_then() {
    for (short, len) in [(None, 8), (Some(0), 8), (None, 30_000)] {
        let mut pair = quiet_pair();
        pair.short = short;
        let (acks, asks) = counted(&pair);
        let mut done = 0;
        for _ in 0..64 {
            done += exchange(&mut pair, len, TURN_NS);
        }
        let (acks_then, asks_then) = counted(&pair);
        let packets = 64 * len.div_ceil(8900) as u64;
        let allowed = packets / u64::from(ACK_EVERY) + 64 / 16 + 2;
        assert!(acks_then - acks <= allowed, "{} for {packets} packets", acks_then - acks);
        assert_eq!(asks_then, asks, "while others followed");
        pair.run_by(2_000, TURN_NS);
        done += pair.read(0).len();
        assert_eq!(done, 64, "the last 2 us ago");
        assert!(counted(&pair).1 - asks <= 1);
        pair.run(1_000_000);
        assert!(counted(&pair).1 - asks <= 1, "asked again although all was known");
    }
}

/// Two messages, of which the second leaves when the first is being acknowledged: nobody has asked
/// after it.
fn two_and_a_tail() -> Pair {
    let mut pair = quiet_pair();
    let done = exchange(&mut pair, 8, TURN_NS) + exchange(&mut pair, 8, TURN_NS);
    assert_eq!(done, 1);
    pair
}

/// Goal: the last of a burst waits for a question, which is asked once and soon.
#[test]
fn the_last_of_a_burst_is_asked_after() {
    let mut pair = two_and_a_tail();
    pair.run_by(1_500, TURN_NS);
    assert_eq!((pair.read(0).len(), counted(&pair).1), (1, 1));
    pair.run(1_000_000);
    assert_eq!(counted(&pair).1, 1);
}

/// Goal: a question that is lost costs the receiver's own delay and no timeout.
#[test]
fn a_lost_question_is_made_up_for_by_the_receiver() {
    let mut pair = two_and_a_tail();
    pair.drop = 1;
    pair.run_by(1_500, TURN_NS);
    assert_eq!(counted(&pair).1, 1, "asked");
    pair.drop = 0;
    pair.run_by(ACK_DELAY_NS, TURN_NS);
    assert_eq!(pair.read(0).len(), 1);
    let [sender, _] = pair.ends.each_ref().map(|end| end.node.counters());
    assert_eq!((sender.tx_retransmits, sender.timeouts), (0, 0));
}

/// Goal: what leaves after a pause asks for itself, though something before it is still waited for.
#[test]
fn a_packet_after_a_pause_requests_an_acknowledgement() {
    // Short enough not to wait for credits, which would be lost.
    for (short, len) in [(None, 8), (Some(0), 8), (None, 1200)] {
        let mut pair = quiet_pair_of(512);
        pair.short = short;
        pair.drop = 1;
        let asks = counted(&pair).1;
        let done = exchange(&mut pair, len, 1_500) + exchange(&mut pair, len, 2_000);
        assert_eq!(done, 0, "lost, as are their acknowledgements");
        assert_eq!(counted(&pair).1, asks, "asked although the message did");
        pair.drop = 0;
        pair.run(1_000_000_000);
        assert_eq!(pair.read(0).len(), 2);
    }
}

/// Goal: of a burst that leaves at once the first asks, and after the last is asked.
#[test]
fn a_burst_that_leaves_at_once_is_asked_after() {
    for short in [None, Some(0)] {
        let mut pair = quiet_pair();
        (pair.short, pair.drop) = (short, 1);
        for context in 0..4 {
            // Too long to share a frame.
            pair.send(0, IoBuf::leaked(&[1; 1000]), 5, OpFlags::empty(), context).unwrap();
        }
        pair.run_by(1_500, TURN_NS);
        assert_eq!(counted(&pair).1, 1);
    }
}

/// Goal: what asks by itself is not asked after for the sake of something before it.
#[test]
fn a_question_is_not_put_twice() {
    let mut pair = two_and_a_tail();
    pair.recv(0, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 3).unwrap();
    pair.send(1, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 4).unwrap();
    pair.run_by(2 * TURN_NS, TURN_NS);
    assert_eq!(pair.read(0).len(), 2, "the tail is acknowledged by a message");
    pair.drop = 1;
    assert_eq!(exchange(&mut pair, 8, 1_500), 0);
    assert_eq!(counted(&pair).1, 0);
}

/// Goal: nobody asks after what is answered, however long the answer takes.
#[test]
fn an_answered_request_is_not_probed() {
    let mut pair = quiet_pair();
    let region = pair.region(1, 64, rma::ALL);
    pair.drop = 1;
    for context in 0..2 {
        let range = RmaList::one(0, 64, region.key);
        pair.read_to(IoBuf::leaked(&[0; 64]), range, context).unwrap();
    }
    pair.run_by(5_000, TURN_NS);
    assert_eq!(counted(&pair).1, 0);
    pair.drop = 0;
    pair.run(1_000_000_000);
    assert_eq!(pair.outcomes(0), [(0, None), (1, None)]);
}

/// Goal: nobody asks after what was acknowledged before the pause is over.
#[test]
fn an_acknowledged_packet_is_not_probed() {
    let mut pair = two_and_a_tail();
    answer(&mut pair);
    pair.run_by(2 * TURN_NS, TURN_NS);
    assert_eq!(pair.read(0).len(), 2, "the tail is acknowledged by a message");
    pair.run_by(3_000, TURN_NS);
    assert_eq!(counted(&pair).1, 0);
}

/// Goal: an acknowledgement counts for the session that it names, and for no later one of the same
/// two nodes. Method: the name in an acknowledgement is changed but for the slot in it.
#[test]
fn an_acknowledgement_of_another_session_is_not_taken() {
    let plain = || NodeSettings { crc: Some(false), ..NodeSettings::default() };
    let mut pair = Pair::of([1, 2].map(|station| end_with(station, 9000, false, plain())));
    exchange(&mut pair, 8, 100_000);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2).unwrap();
    let now = pair.now;
    let [sender, receiver] = &mut pair.ends;
    sender.node.transmit(now, &mut sink(&mut sender.out));
    for bytes in sender.out.drain(..) {
        receiver.node.on_frame(now, &RxFrame::new(&bytes));
    }
    for turn in 1..9 {
        receiver.node.transmit(now + turn * TURN_NS, &mut sink(&mut receiver.out));
    }
    assert!(!receiver.out.is_empty());
    for bytes in &receiver.out {
        // The highest byte of the session's name, which is at 16.
        let mut other = bytes.clone();
        other[19] ^= 0x40;
        sender.node.on_frame(now, &RxFrame::new(&other));
    }
    let done = |end: &mut End| end.node.cqs.ready(end.cq).unwrap();
    assert_eq!(done(sender), 0);
    for bytes in &receiver.out {
        sender.node.on_frame(now, &RxFrame::new(bytes));
    }
    assert_eq!(done(sender), 1);
}
