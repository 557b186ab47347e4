//! An OPEN that its peer took for an old one.

use barewire_driver::port::Presence;

use super::*;
use crate::node::path::Path;

/// A wire over which both see that the other lives.
struct Seen<'a>(&'a mut VecDeque<Vec<u8>>);

impl FrameSink for Seen<'_> {
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        sink(self.0)(frame)
    }

    fn presence(&mut self, _: Station) -> Presence {
        Presence::Present
    }
}

fn seen(station: u8, incarnation: u64) -> End {
    let mut end = end(station, 1500, true);
    end.node.port.far |= Path::PRESENCE;
    end.node.settings.incarnation = incarnation;
    end
}

/// What one end has sent arrives at the other, which then has its turn.
fn hand_over(pair: &mut Pair, from: usize) {
    for bytes in std::mem::take(&mut pair.ends[from].out) {
        pair.ends[1 - from].node.on_frame(pair.now, &RxFrame::new(&bytes));
    }
    transmit(pair, 1 - from);
}

fn transmit(pair: &mut Pair, i: usize) {
    let End { node, out, .. } = &mut pair.ends[i];
    node.transmit(pair.now, &mut Seen(out));
}

/// Goal: on a port that tells who lives, a message to a peer that computes arrives although its
/// sender is the second life at its address, whose OPENs the peer takes while it still has the
/// session with the first. Method: the peer does not poll until the OPEN is not repeated any more.
#[test]
fn an_open_taken_for_an_old_one_is_repeated() {
    let mut pair = Pair::of([seen(1, 101), seen(2, 102)]);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 2).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 3).unwrap();
    for _ in 0..10 {
        transmit(&mut pair, 0);
        hand_over(&mut pair, 0);
        hand_over(&mut pair, 1);
        pair.now = pair.now + 5_000;
    }
    assert_eq!(pair.read(1).len(), 1);

    let (peer, addr) = (pair.ends[0].peer, pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap());
    pair.ends[0] = seen(1, 201);
    let end = &mut pair.ends[0];
    assert_eq!(end.node.sessions().av_insert(pair.now, end.av, addr), Ok(peer));
    pair.ends[0].peer = peer;
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 4).unwrap();
    for _ in 0..2_000 {
        transmit(&mut pair, 0);
        pair.now = pair.now + 1_000_000;
    }
    let opens = pair.ends[0].out.len();
    assert!((2..20).contains(&opens), "{opens} frames lie at a peer that does not poll");
    for _ in 0..2_000 {
        hand_over(&mut pair, 0);
        hand_over(&mut pair, 1);
        pair.now = pair.now + 5_000;
    }
    assert_eq!(pair.read(1).len(), 1);
    assert_eq!(pair.read(0).len(), 1);
}

/// A port whose peer dies: it still seems to live when it is looked at first.
struct Dying {
    looks: u32,
}

impl FrameSink for Dying {
    fn send(&mut self, _: &TxFrame<'_>) -> Tx {
        Tx::NoRoute
    }

    fn presence(&mut self, _: Station) -> Presence {
        self.looks += 1;
        if self.looks == 1 { Presence::Present } else { Presence::Absent }
    }
}

/// Goal: a peer that took our OPEN and died before it answered is dead at once, although a
/// repetition of the OPEN had no receiver; one that never was there is waited for until T_dead.
#[test]
fn a_peer_that_took_an_open_and_died_is_not_waited_for() {
    for took in [true, false] {
        let mut pair = Pair::of([seen(1, 101), seen(2, 102)]);
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 7).unwrap();
        if took {
            let End { node, out, .. } = &mut pair.ends[0];
            node.transmit(pair.now, &mut Seen(out));
            assert_eq!(out.len(), 1);
        }
        let (end, mut port) = (&mut pair.ends[0], Dying { looks: 0 });
        let told = (1..1000u64).find(|ms| {
            end.node.transmit(pair.now + ms * 1_000_000, &mut port);
            end.node.receiving().cq_readerr(end.cq).is_ok()
        });
        let told = told.expect("every operation ends");
        assert!(if took { told <= 60 } else { told >= 499 }, "took {took}: told after {told} ms");
    }
}

/// Goal: a process that has not been started yet is looked for ever more seldom, so that who waits
/// for it leaves the processor to others, and at most a millisecond after it is there it is asked.
#[test]
fn an_absent_peer_is_looked_for_ever_more_seldom() {
    let mut pair = Pair::of([seen(1, 101), seen(2, 102)]);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 7).unwrap();
    let mut tries = Vec::new();
    let began = pair.now;
    while pair.now < began + 20_000_000 {
        let (node, now) = (&mut pair.ends[0].node, pair.now);
        node.transmit(now, &mut |_: &TxFrame<'_>| {
            tries.push(now);
            Tx::NoRoute
        });
        // As who sleeps until then would.
        let due = node.next_deadline().expect("the OPEN is still to be sent");
        pair.now = due.max(now + 1);
    }
    let early = tries.iter().filter(|&&at| at < began + 1_000_000).count();
    assert!(early >= 8, "{early}: two processes that are started together meet soon");
    assert!((15..40).contains(&tries.len()), "{} looks in 20 ms", tries.len());
    let last = tries.last().unwrap();
    assert!(pair.now.since(*last) <= 2_000_000);
    let there = pair.now;
    while pair.ends[0].out.is_empty() {
        transmit(&mut pair, 0);
        pair.now = pair.now + 5_000;
        assert!(pair.now.since(there) <= 1_010_000, "the OPEN leaves");
    }
    for _ in 0..10 {
        hand_over(&mut pair, 0);
        hand_over(&mut pair, 1);
        pair.now = pair.now + 5_000;
    }
    assert_eq!(pair.read(1).len(), 1);
}

/// Goal: a waiting operation ends although another process has taken the address of the dead peer,
/// and the port, which tells who lives, does not tell that. Method: the peer computes for as long
/// as probes to it are frequent, dies, and its successor polls.
#[test]
fn operations_to_a_dead_peer_end_when_its_successor_appears() {
    let mut pair = Pair::of([seen(1, 101), seen(2, 102)]);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    for context in [2, 3] {
        let flags = OpFlags::DELIVERY_COMPLETE;
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, flags, context).unwrap();
        if context == 2 {
            for _ in 0..10 {
                transmit(&mut pair, 0);
                hand_over(&mut pair, 0);
                hand_over(&mut pair, 1);
                pair.now = pair.now + 5_000;
            }
            assert_eq!(pair.read(0).len(), 1);
        }
    }
    for _ in 0..2_000 {
        transmit(&mut pair, 0);
        pair.now = pair.now + 1_000_000;
    }
    let unread = std::mem::take(&mut pair.ends[0].out).len();
    assert!((9..20).contains(&unread), "{unread} frames lie at a peer that does not poll");
    pair.ends[1] = seen(2, 202);
    for _ in 0..10_000 {
        transmit(&mut pair, 0);
        hand_over(&mut pair, 0);
        hand_over(&mut pair, 1);
        pair.now = pair.now + 1_000_000;
    }
    let failure = pair.read_err(0);
    assert_eq!((failure.cqe.op_context, failure.err), (3, Error::ConnReset));
}

/// Goal: what is known of the epochs of one life of a peer is not held against the next, whose
/// epochs begin anew. Method: the next life answers no OPEN for long, and then opens a session.
#[test]
fn epochs_of_an_earlier_life_say_nothing_of_the_next() {
    for lossless in [true, false] {
        let mut pair = Pair::new(1500, lossless);
        pair.ends[1].node.openings.epoch = 40;
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
        pair.run(3_000_000);
        assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));

        let ends = pair.ends[0].node.addr_of(pair.ends[0].ep).unwrap();
        let mut next = end(2, 1500, lossless);
        next.node.settings.incarnation = 999;
        next.peer = next.node.sessions().av_insert(pair.now, next.av, ends).unwrap();
        let addr = next.node.addr_of(next.ep).unwrap();
        pair.ends[1] = next;
        let End { node, av, peer, .. } = &mut pair.ends[0];
        *peer = node.sessions().av_insert(pair.now, *av, addr).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 3).unwrap();
        for _ in 0..1_000 {
            let End { node, out, .. } = &mut pair.ends[0];
            node.transmit(pair.now, &mut sink(out));
            out.clear();
            pair.now = pair.now + 1_000_000;
        }
        assert_eq!(pair.read_err(0).err, Error::HostUnreach);

        pair.recv(0, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 4).unwrap();
        pair.send(1, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 5).unwrap();
        pair.run(3_000_000);
        assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1), "lossless: {lossless}");
    }
}
