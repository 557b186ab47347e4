//! All 546 atomic pairs between two processes, against a C compiler's answer.

use barewire::*;
use barewire_dataplane::proto::atomic::{AtomicKind, AtomicOp, Datatype, valid};

use crate::cases::{Case, Outcome, build, cases, cc_is_there, difference, pairs, reference};
use crate::remote::{Initiator, finish};
use crate::supervisor::{Segment, Worker};
use crate::target::{ALL, FILL};

/// Where the elements lie in the target's memory: aligned, with canaries around.
const AT: usize = 64;

impl Initiator {
    /// Runs one call on the target's memory: writes what is there before, executes, and reads
    /// everything back with what lies around it.
    fn run(&mut self, case: &Case) -> Outcome {
        let len = case.target.len();
        self.write(ALL, AT as u64, case.target.clone()).unwrap();
        let what = TypedOp::new(case.op, case.ty);
        let to = self.at(ALL, AT as u64);
        let (operand, result) = (&case.operand[..], Buf::zeroed(len));
        let operand = if case.op == AtomicOp::Read { &[] } else { operand };
        let posted = match case.kind {
            AtomicKind::Base => self.node.ep.atomic(what, operand, to, 1),
            AtomicKind::Fetch => self.node.ep.fetch_atomic(what, operand, result, to, 1),
            AtomicKind::Compare => {
                self.node.ep.compare_atomic(what, operand, &case.compare, result, to, 1)
            }
        };
        posted.unwrap_or_else(|r| panic!("{what:?} of {} elements: {}", case.count(), r.error));
        let result = self.outcome().unwrap();
        let all = self.read(ALL, 0, AT + len + 64).unwrap();
        let around = all[..AT].iter().chain(&all[AT + len..]);
        assert!(around.copied().all(|b| b == FILL), "{:?} {:?} wrote outside", case.op, case.ty);
        self.write(ALL, AT as u64, vec![FILL; len]).unwrap();
        Outcome { target: all[AT..AT + len].to_vec(), result }
    }

    /// The calls that have no meaning are refused at once: all 66 pairs, and values beyond the
    /// enumerations.
    fn refusals(&mut self) -> usize {
        let mut refused = 0;
        let operand = [1; 32];
        for kind in AtomicKind::ALL {
            for op in (0..22).chain([u32::MAX]) {
                for datatype in (0..23).chain([99, u32::MAX]) {
                    let known = AtomicOp::try_from(op).ok().zip(Datatype::try_from(datatype).ok());
                    if known.is_some_and(|(op, ty)| valid(kind, op, ty)) {
                        continue;
                    }
                    let len = known.map_or(8, |(_, ty)| ty.size());
                    let (what, to) = (TypedOp { op, datatype }, self.at(ALL, 0));
                    let (ep, x, result) = (&self.node.ep, &operand[..len], Buf::zeroed(len));
                    let posted = match kind {
                        AtomicKind::Base => ep.atomic(what, x, to, 1),
                        AtomicKind::Fetch => ep.fetch_atomic(what, x, result, to, 1),
                        AtomicKind::Compare => ep.compare_atomic(what, x, x, result, to, 1),
                    };
                    let error = posted.expect_err("it has no meaning").error;
                    assert!(matches!(error, Error::OpNotSupp(_)), "{kind:?} {what:?}: {error}");
                    // Of an operation of this family on a type that it is not for.
                    let family = |op| Datatype::ALL.iter().any(|ty| valid(kind, op, *ty));
                    refused += usize::from(known.is_some_and(|(op, _)| family(op)));
                }
            }
        }
        self.nothing_more();
        refused
    }
}

/// Goal: what one process asks another to do is what C does: every pair in every form, edge values,
/// arrays of 1, 2, limit - 1 and limit elements; the rest is refused.
#[test]
#[cfg(target_arch = "x86_64")]
fn every_pair_between_two_processes() {
    if !cc_is_there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = build(dir.path());
    let segment = Segment::new("matrix");
    let mut target = Worker::start("target", "target", &segment.port());
    let mut a = Initiator::new(&segment.port(), &target.addr);
    let (mut executed, mut calls, mut compared) = (0, 0, 0);
    for (kind, op, ty) in pairs() {
        let cases = cases(kind, op, ty, false);
        let wanted = reference(&program, dir.path(), &cases);
        for (case, wanted) in cases.iter().zip(&wanted) {
            let ours = a.run(case);
            if let Some(difference) = difference(case, op, &ours, wanted) {
                panic!("{difference}");
            }
            compared += (ours.target.len() + ours.result.len()) / ty.size();
            calls += 1;
        }
        executed += 1;
    }
    let refused = a.refusals();
    println!(
        "two processes: {executed} pairs executed in {calls} calls, {compared} values compared, \
         {refused} pairs refused"
    );
    assert_eq!((executed, refused), (546, 94));
    finish(&mut target);
}
