//! All 546 atomic pairs against a C compiler's answer, over edge values and random arrays: the
//! arithmetic alone, without a wire. See `cases.rs` for what is compared.

mod cases;
mod values;

use barewire_dataplane::proto::atomic::{AtomicOp, Sharing, valid};
use barewire_driver::mem::IoBuf;

use cases::{Case, Outcome, build, cases, cc_is_there, difference, pairs, reference};

/// Memory to run calls in: one page with a canary on both sides.
struct Engine {
    memory: IoBuf,
    look: IoBuf,
    /// Where the page starts, so that it is aligned.
    page: usize,
}

const CANARY: u8 = 0xc5;

impl Engine {
    fn new() -> Self {
        let (memory, look) = IoBuf::leaked_pair(&[CANARY; 4096 + 192]);
        let base = memory.addr_at(0);
        Self { page: (base + 64).next_multiple_of(64) - base, memory, look }
    }

    /// Runs `op` on the operands of `case`, which may be another operation than the case's own.
    fn run(&self, case: &Case, op: AtomicOp, sharing: Sharing) -> Outcome {
        let len = case.target.len();
        self.memory.write_at(self.page, &case.target);
        // At odd addresses, as they may lie in a packet.
        let operand = [&[0][..], &case.operand].concat();
        let compare = [&[0][..], &case.compare].concat();
        let mut result = vec![CANARY; 1 + case.result_len()];
        let ty = case.ty;
        self.memory
            .atomic(
                self.page,
                op,
                ty,
                case.count(),
                &operand[1..],
                &compare[1..],
                &mut result[1..],
                sharing,
            )
            .unwrap_or_else(|fault| panic!("{:?} {op:?} {ty:?}: {fault}", case.kind));
        let mut all = vec![0; self.look.len()];
        self.look.read_at(0, &mut all);
        let around = all[..self.page].iter().chain(&all[self.page + len..]);
        assert!(around.copied().all(|b| b == CANARY), "{op:?} {ty:?} wrote outside");
        self.look.write_at(self.page, &vec![CANARY; len]);
        Outcome { target: all[self.page..self.page + len].to_vec(), result: result.split_off(1) }
    }
}

/// Goal: rules S1 to S8, and every formula, on every pair. Method: all edge values against each
/// other (for the 8-bit types all values) and random arrays, alone and shared.
#[test]
#[cfg(target_arch = "x86_64")]
fn every_pair_computes_what_c_computes() {
    if !cc_is_there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = build(dir.path());
    let engine = Engine::new();
    let (mut executed, mut compared, mut calls) = (0, 0, 0);
    for (kind, op, ty) in pairs() {
        let cases = cases(kind, op, ty, true);
        let wanted = reference(&program, dir.path(), &cases);
        for (case, wanted) in cases.iter().zip(&wanted) {
            for sharing in [Sharing::Single, Sharing::Shared] {
                let ours = engine.run(case, op, sharing);
                if let Some(difference) = difference(case, op, &ours, wanted) {
                    panic!("{sharing:?}: {difference}");
                }
                compared += (ours.target.len() + ours.result.len()) / ty.size();
                calls += 1;
            }
        }
        executed += 1;
    }
    println!("{executed} pairs executed in {calls} calls, {compared} values compared");
    assert_eq!(executed, 546);
}

/// Goal: the suite tells every operation from every other on every type. Method: in place of each
/// pair's operation another of the same form is executed, and a difference must be found.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_wrong_operation_is_noticed() {
    if !cc_is_there() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let program = build(dir.path());
    let engine = Engine::new();
    let mut planted = 0;
    for (kind, op, ty) in pairs() {
        let cases = cases(kind, op, ty, true);
        let wanted = reference(&program, dir.path(), &cases);
        for wrong in AtomicOp::ALL.into_iter().filter(|wrong| *wrong != op) {
            if !valid(kind, wrong, ty) {
                continue;
            }
            let noticed = cases.iter().zip(&wanted).any(|(case, wanted)| {
                let ours = engine.run(case, wrong, Sharing::Single);
                difference(case, op, &ours, wanted).is_some()
            });
            assert!(noticed, "{kind:?} {ty:?}: {wrong:?} passed for {op:?}");
            planted += 1;
        }
    }
    println!("{planted} wrong operations planted, all noticed");
}
