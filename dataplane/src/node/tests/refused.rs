//! Packets that are refused, on a path with a long delay.

use super::*;
use crate::flags::MrAccess;

/// Goal: refusals cost a round trip each and no more, and what stands behind them is waited for,
/// however long that takes. Method: several messages that are refused one after the other, and
/// behind them a read; together they last longer than T_dead.
#[test]
fn packets_behind_many_refused_ones_are_waited_for() {
    const DELAY_NS: u64 = 40_000_000;
    const REFUSED: u64 = 8;
    let mut pair = Pair::new(1500, false);
    pair.run(1_000_000);
    let region = pair.region(1, 9000, MrAccess::all());
    let real = pair.ends[0].peer;
    let mut addr = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
    addr.ep = 77;
    let end = &mut pair.ends[0];
    let nobody = end.node.sessions().av_insert(Instant(0), end.av, addr).unwrap();
    // A session, before the path becomes long.
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.run(5_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    pair.ends[0].peer = nobody;
    for n in 0..REFUSED {
        pair.send(0, IoBuf::leaked(&[1; 1000]), 5, OpFlags::empty(), 10 + n).unwrap();
    }
    pair.ends[0].peer = real;
    let list = RmaList::one(0, 9000, region.key);
    pair.read_to(IoBuf::leaked(&[0; 9000]), list, 2).unwrap();
    let mut wire = VecDeque::new();
    let mut done = Vec::new();
    let started = pair.now;
    while done.len() <= REFUSED as usize {
        assert!(pair.now.since(started) < 3_000_000_000, "{done:?}");
        for i in 0..2 {
            let now = pair.now;
            let mut sink = |frame: &TxFrame<'_>| {
                let mut bytes = vec![0; frame.len()];
                frame.copy_to(&mut bytes);
                wire.push_back((now + DELAY_NS, i, bytes));
                Tx::Sent
            };
            pair.ends[i].node.transmit(now, &mut sink);
        }
        while let Some((_, from, bytes)) = wire.pop_front_if(|(at, ..)| at.since(pair.now) == 0) {
            pair.frames += 1;
            pair.ends[1 - from].node.on_frame(pair.now, &RxFrame::new(&bytes));
        }
        pair.now = pair.now + 50_000;
        done.extend(pair.outcomes(0));
    }
    assert!(pair.now.since(started) > 500_000_000, "not longer than T_dead");
    assert_eq!(done.pop(), Some((2, None)), "{done:?}");
    assert!(done.iter().all(|&(_, err)| err == Some(Error::ConnRefused)), "{done:?}");
    assert!(pair.frames < 1_000, "{} frames", pair.frames);
}

/// What is fenced behind a message that the receiver does not want leaves at once, not when a timer
/// fires.
#[test]
fn a_fence_opens_when_the_message_before_it_is_refused() {
    let mut pair = Pair::new(1500, false);
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.run(2_000_000);
    pair.send(0, IoBuf::leaked(&[1; 300_000]), 1, OpFlags::empty(), 2).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::FENCE, 3).unwrap();
    pair.run(1_000_000);
    assert_eq!(pair.read(0).len(), 1);
    let (now, ep) = (pair.now, pair.ends[1].ep);
    pair.ends[1].node.ep_close(now, ep).unwrap();
    pair.run(60_000);
    let told = [pair.read_err(0), pair.read_err(0)].map(|e| (e.cqe.op_context, e.err));
    assert_eq!(told, [2, 3].map(|context| (context, Error::ConnRefused)));
}
