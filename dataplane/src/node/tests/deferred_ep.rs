//! Twins: operations of an endpoint that are counted elsewhere.

use super::atomic::{Call, bytes_of};
use super::*;
use crate::proto::atomic::AtomicKind::Fetch;
use crate::proto::matching::Matcher;

/// A deferred endpoint of both ends' endpoints, and the counters.
fn with_twins(lossless: bool) -> (Pair, [CntrId; 2]) {
    let mut pair = Pair::new(1500, lossless);
    let cntrs = [0, 1].map(|i| {
        let End { node, ep, .. } = &mut pair.ends[i];
        let cntr = node.cntrs.open(CntrEvents::Comp).unwrap();
        let deferred = node.objects().deferred_ep(*ep, Some(cntr)).unwrap();
        assert_eq!(
            node.objects().deferred_ep(*ep, Some(cntr)),
            Ok(deferred),
            "there is one already"
        );
        assert_ne!(node.objects().deferred_ep(*ep, None), Ok(deferred));
        cntr
    });
    pair.short = Some(0);
    (pair, cntrs)
}

/// Runs a call with the deferred endpoint in place of the endpoint.
fn by_deferred<R>(pair: &mut Pair, i: usize, cntr: CntrId, f: impl FnOnce(&mut Pair) -> R) -> R {
    let ep = pair.ends[i].ep;
    pair.ends[i].ep = pair.ends[i].node.objects().deferred_ep(ep, Some(cntr)).unwrap();
    let result = f(pair);
    pair.ends[i].ep = ep;
    result
}

fn counted(pair: &Pair, i: usize, cntr: CntrId) -> (u64, u64) {
    let node = &pair.ends[i].node;
    (node.cntrs.read(cntr).unwrap(), node.cntrs.readerr(cntr).unwrap())
}

#[test]
fn a_twins_operations_are_counted_and_complete_on_demand() {
    for lossless in [true, false] {
        for len in [0, 64, 40_000] {
            let (mut pair, [tx, rx]) = with_twins(lossless);
            let (buf, look) = shared(len);
            by_deferred(&mut pair, 1, rx, |p| p.recv(1, buf, 5, OpFlags::empty(), 1)).unwrap();
            let data = bytes(len);
            let send = |p: &mut Pair, flags| p.send(0, IoBuf::leaked(&data), 5, flags, 2);
            by_deferred(&mut pair, 0, tx, |p| send(p, OpFlags::empty())).unwrap();
            pair.run(3_000_000);
            assert_eq!(contents(&look), data);
            assert_eq!((pair.read(0).len(), pair.read(1).len()), (0, 0));
            assert_eq!((counted(&pair, 0, tx), counted(&pair, 1, rx)), ((1, 0), (1, 0)));
            // With FI_COMPLETION, and the message first.
            by_deferred(&mut pair, 0, tx, |p| send(p, OpFlags::COMPLETION)).unwrap();
            pair.run(3_000_000);
            let (buf, look) = shared(len);
            by_deferred(&mut pair, 1, rx, |p| p.recv(1, buf, 5, OpFlags::COMPLETION, 7)).unwrap();
            pair.run(3_000_000);
            assert_eq!(contents(&look), data);
            let contexts: [Vec<u64>; 2] =
                [0, 1].map(|i| pair.read(i).iter().map(|e| e.op_context).collect());
            assert_eq!(contexts, [vec![2], vec![7]]);
            assert_eq!((counted(&pair, 0, tx), counted(&pair, 1, rx)), ((2, 0), (2, 0)));
            pair.run(600_000_000);
            pair.assert_quiet();
        }
    }
}

#[test]
fn receives_of_endpoint_and_twin_stand_in_one_order() {
    in_one_order(OpFlags::empty(), &[1, 3, 5]);
    in_one_order(OpFlags::COMPLETION, &[0, 1, 2, 3, 4, 5]);
}

fn in_one_order(flags: OpFlags, told: &[u64]) {
    let (mut pair, [_, rx]) = with_twins(true);
    // The session is open, so what follows takes the fast path if it may.
    pair.recv(1, IoBuf::EMPTY, 5, OpFlags::empty(), 0).unwrap();
    pair.send(0, IoBuf::EMPTY, 5, OpFlags::empty(), 0).unwrap();
    pair.run(3_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    let End { node, ep, .. } = &pair.ends[1];
    let matchers = &node.eps[ep.0.idx()].matcher;
    assert!(!matchers.iter().any(Matcher::is_shut), "its own receives are taken at once");
    let mut looks = Vec::new();
    for i in 0..6 {
        let (buf, look) = shared(8);
        looks.push(look);
        let post = |p: &mut Pair| p.recv(1, buf, 5, flags, i);
        if i % 2 == 0 {
            by_deferred(&mut pair, 1, rx, post).unwrap()
        } else {
            post(&mut pair).unwrap()
        }
    }
    for i in 0..6 {
        pair.send(0, IoBuf::leaked(&[i; 8]), 5, OpFlags::empty(), 9).unwrap();
    }
    pair.run(3_000_000);
    for (i, look) in looks.iter().enumerate() {
        assert_eq!(contents(look), [i as u8; 8]);
    }
    let got: Vec<u64> = pair.read(1).iter().map(|e| e.op_context).collect();
    assert_eq!(got, told);
    assert_eq!(counted(&pair, 1, rx), (3, 0));
}

#[test]
fn a_counter_is_busy_while_a_twin_has_work_and_the_endpoint_ends_it() {
    let (mut pair, [tx, rx]) = with_twins(true);
    assert_eq!(pair.ends[0].node.objects().cntr_close(tx), Ok(()), "its deferred endpoint is idle");
    let (buf, _look) = shared(8);
    by_deferred(&mut pair, 1, rx, |p| p.recv(1, buf, 5, OpFlags::empty(), 3)).unwrap();
    let now = pair.now;
    let End { node, ep, cq, av, .. } = &mut pair.ends[1];
    assert_eq!(node.objects().cntr_close(rx), Err(Error::Busy));
    assert_eq!(node.eps.ids().count(), 1, "nobody is told of deferred endpoints");
    let deferred = node.objects().deferred_ep(*ep, Some(rx)).unwrap();
    assert_eq!(
        node.objects().deferred_ep(deferred, None),
        Err(Error::OpBadState),
        "a deferred endpoint has none"
    );
    node.objects().fail_unposted(deferred, 8, false, Error::Invalid("planted")).unwrap();
    node.ep_close(now, *ep).unwrap();
    let outcomes = [0, 1]
        .map(|_| node.receiving().cq_readerr(*cq).unwrap())
        .map(|e| (e.cqe.op_context, e.err));
    assert_eq!(outcomes, [(8, Error::Invalid("planted")), (3, Error::Canceled)]);
    assert_eq!(node.cntrs.readerr(rx), Ok(2));
    assert_eq!(node.objects().cntr_close(rx), Ok(()));
    assert_eq!((node.objects().cq_close(*cq), node.objects().av_close(*av)), (Ok(()), Ok(())));
}

/// Goal: room that a deferred endpoint has taken in advance holds up neither its counter nor the
/// queue: closed with the counter, or with the endpoint, it gives it back.
#[test]
fn a_twin_that_has_room_in_advance_is_idle() {
    for by_endpoint in [false, true] {
        let (mut pair, [tx, _]) = with_twins(true);
        let region = pair.region(1, 64, rma::ALL);
        let one = bytes_of(&[1]);
        let room = |pair: &Pair| pair.ends[0].node.cqs[pair.ends[0].cq.0.idx()].cq.room();
        let before = room(&pair);
        for _ in 0..3 {
            let call = || Call::sum(Fetch, &one, RmaList::one(0, 1, region.key));
            by_deferred(&mut pair, 0, tx, |p| p.atomic(call(), 8)).unwrap();
            pair.run(1_000_000);
        }
        assert_eq!(counted(&pair, 0, tx), (3, 0));
        assert!(room(&pair) < before, "none was taken in advance");
        let End { node, ep, .. } = &mut pair.ends[0];
        if by_endpoint {
            node.ep_close(pair.now, *ep).unwrap();
        }
        assert_eq!(node.objects().cntr_close(tx), Ok(()));
        assert_eq!(room(&pair), before);
    }
}

/// Goal: a counter cannot be closed while a twin has a send under way that it is to count.
#[test]
fn a_counter_is_busy_while_a_twin_sends() {
    let (mut pair, [tx, _]) = with_twins(false);
    let send = |p: &mut Pair| p.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 2);
    by_deferred(&mut pair, 0, tx, send).unwrap();
    assert_eq!(pair.ends[0].node.objects().cntr_close(tx), Err(Error::Busy));
    pair.run(3_000_000);
    assert_eq!(counted(&pair, 0, tx), (1, 0));
    assert_eq!(pair.ends[0].node.objects().cntr_close(tx), Ok(()));
}
