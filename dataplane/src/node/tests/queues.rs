//! Completion queues that grow with what is bound to them.

use super::*;
use crate::cntr::CntrEvents;
use crate::idx::CqIdx;

/// Goal: a queue that fits has room for all that its endpoints, deferred ones too, may have
/// outstanding, and any other keeps its size.
#[test]
fn a_queue_that_fits_grows_with_its_endpoints() {
    let mut end = end(1, 1500, false);
    let node = &mut end.node;
    let [fits, fixed] = [node.cqs.open_to_fit(16).unwrap(), node.cqs.open(16).unwrap()];
    let capacity = |node: &Node, cq: CqId| node.cqs[cq.0.idx()].cq.capacity();
    let attr = EpAttr { tx_size: 3000, rx_size: 2000, ..EpAttr::default() };
    let eps = [fits, fixed].map(|cq| open_ep(node, (cq, end.av), attr));
    // 1,024 are for what nobody has posted.
    assert_eq!(capacity(node, fits), (3000_usize + 2000 + 1024).next_power_of_two());
    for ep in eps {
        let cntr = node.cntrs.open(CntrEvents::Comp).unwrap();
        node.objects().deferred_ep(ep, Some(cntr)).unwrap();
    }
    assert_eq!(capacity(node, fits), (6000_usize + 4000 + 1024).next_power_of_two());
    assert_eq!(capacity(node, fixed), 16);
}

/// Takes contexts.
struct Contexts<'a>(&'a mut Vec<u64>);

impl Reader for Contexts<'_> {
    fn reads(&self, _: CqIdx) -> bool {
        false
    }

    fn take(self, cqe: &Cqe) {
        self.0.push(cqe.op_context);
    }
}

/// Goal: completions are taken one by one in their order until none is left; an error is not taken.
#[test]
fn completions_are_taken_one_by_one() {
    let mut pair = Pair::new(1500, false);
    for context in 1..4 {
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), context).unwrap();
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), context).unwrap();
    }
    pair.run(1_000_000);
    let mut got = Vec::new();
    let End { node, cq, .. } = &mut pair.ends[1];
    let taken: Vec<_> = (0..4).map(|_| node.cqs.take_one(*cq, Contexts(&mut got))).collect();
    assert_eq!(taken, [Some(true), Some(true), Some(true), None]);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 4).unwrap();
    let End { node, cq, ep, .. } = &mut pair.ends[1];
    node.operations().cancel(*ep, 4).unwrap();
    assert_eq!(node.cqs.take_one(*cq, Contexts(&mut got)), Some(false));
    assert_eq!((node.receiving().cq_readerr(*cq).unwrap().cqe.op_context, got), (4, vec![1, 2, 3]));
}

/// Goal: a counter is bound for a direction at least, each direction has one, and what is refused
/// binds nothing.
#[test]
fn a_counter_counts_some_direction() {
    let End { mut node, ep, .. } = end(1, 1500, false);
    let [cntr, other] = [0; 2].map(|_| node.cntrs.open(CntrEvents::Comp).unwrap());
    let selective = BindFlags::TRANSMIT | BindFlags::SELECTIVE_COMPLETION;
    for flags in [BindFlags::empty(), BindFlags::SELECTIVE_COMPLETION, selective] {
        let bound = node.operations().ep_bind_cntr(ep, cntr, flags);
        assert_eq!(bound, Err(Error::BadFlags), "{flags:?}");
    }
    assert_eq!(node.objects().cntr_close(cntr), Ok(()), "it is bound to nothing");
    let all = [BindFlags::TRANSMIT, BindFlags::RECV, BindFlags::READ, BindFlags::REMOTE_WRITE];
    for flags in all {
        assert_eq!(node.operations().ep_bind_cntr(ep, other, flags), Ok(()), "{flags:?}");
        let again = node.operations().ep_bind_cntr(ep, other, flags | BindFlags::WRITE);
        assert!(matches!(again, Err(Error::Invalid(_))), "{flags:?}: {again:?}");
    }
    assert_eq!(node.objects().cntr_close(other), Err(Error::Busy));
    node.ep_close(Instant(1), ep).unwrap();
    assert_eq!(node.objects().cntr_close(other), Ok(()));
}
