//! Answers that do not fit what was asked, where each packet has a record.

use super::atomic::{Call, bytes_of, lie, words};
use super::rma::{ALL, Region};
use super::*;
use crate::proto::atomic::AtomicKind::Fetch;
use crate::types::ProvErrno;
use crate::wire::RespOp;

/// A pair with a session and a region, in which a fetch of four elements has left.
fn asked() -> (Pair, Region, IoBuf) {
    let mut pair = Pair::new(1500, false);
    let region = pair.region(1, 64, ALL);
    pair.write(&[0; 32], RmaList::one(0, 32, region.key), OpFlags::empty(), 1).unwrap();
    pair.run(1_000_000);
    assert_eq!(pair.outcomes(0), [(1, None)]);
    let fours = bytes_of(&[1, 2, 3, 4]);
    let call = Call { context: 2, ..Call::sum(Fetch, &fours, RmaList::one(0, 4, region.key)) };
    let look = pair.atomic(call, 32).unwrap();
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    (pair, region, look)
}

/// An answer of eight bytes to the request with this context.
fn to(pair: &Pair, context: u64, offset: u32) -> RespOp {
    let node = &pair.ends[0].node;
    let (w, _) = node.tx.wrs.iter().find(|(_, wr)| wr.context == context).unwrap();
    let handle = node.tx.wrs.handle(w);
    RespOp { dst_op: handle.idx.get(), dst_gen: handle.generation, offset, ..RespOp::default() }
}

/// Goal: an answer that does not lie in what was asked for, or is to a request that asks for none,
/// is a stray and changes nothing; the true one is taken behind it.
#[test]
fn an_answer_to_something_else_is_stray() {
    let (mut pair, region, look) = asked();
    pair.write(&[9; 8], RmaList::one(40, 8, region.key), OpFlags::empty(), 3).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 4).unwrap();
    let lies = [to(&pair, 2, 25), to(&pair, 2, 32), to(&pair, 2, 33), to(&pair, 2, u32::MAX)];
    let others = [to(&pair, 3, 0), to(&pair, 4, 0)];
    let old = RespOp { dst_gen: lies[0].dst_gen + 1, ..to(&pair, 2, 0) };
    for (count, resp) in (1..).zip(lies.into_iter().chain(others).chain([old])) {
        lie(&mut pair, resp, 0);
        assert_eq!(pair.ends[0].node.counters().rx_stray, count, "{resp:?}");
    }
    assert_eq!(contents(&look), [0xEE; 32]);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.run(50_000_000);
    let mut outcomes = pair.outcomes(0);
    outcomes.sort_by_key(|outcome| outcome.0);
    assert_eq!(outcomes, [(2, None), (3, None), (4, None)]);
    assert_eq!(words(&contents(&look)), [0; 4]);
    assert_eq!(words(&region.bytes())[..4], [1, 2, 3, 4]);
}

/// Goal: an operation whose last answer is here and is too short has failed, and nobody knows what
/// became of it.
#[test]
fn a_short_answer_is_no_success() {
    let (mut pair, _, _) = asked();
    let resp = to(&pair, 2, 24);
    lie(&mut pair, resp, 0);
    let err = pair.only_error(2);
    assert_eq!((err.err, err.prov_errno), (Error::ConnReset, ProvErrno::UnknownOutcome));
    let stray = pair.ends[0].node.counters().rx_stray;
    pair.run(50_000_000);
    assert_eq!(pair.outcomes(0), [], "the true answer comes too late");
    assert_eq!(pair.ends[0].node.counters().rx_stray, stray + 1);
}

/// Goal: a session that ends owes no answers, so the next one to the peer is not taken for one that
/// waits.
#[test]
fn pending_answers_end_with_their_session() {
    let (mut pair, ..) = asked();
    let other = pair.ends[1].node.port.station;
    let node = &mut pair.ends[0].node;
    let awaited = |node: &Node| {
        let (_, peer) = node.peers.iter().next().unwrap();
        (peer.answers, peer.long_answers)
    };
    assert_eq!(awaited(node), (1, 1));
    node.sessions().drop_session(pair.now, other);
    assert_eq!(awaited(node), (0, 0));
}
