//! All 546 atomic pairs between two nodes over a bad segment, against a C compiler's answer.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use barewire_dataplane::flags::{MrAccess, OpFlags};
use barewire_dataplane::node::{AtomicReq, MrReq, RmaList};
use barewire_dataplane::proto::atomic::{AtomicKind, AtomicOp, Sharing};
use barewire_dataplane::types::FiAddr;
use barewire_driver::mem::IoBuf;

use crate::arena::Buf;
use crate::cases::{self, Case, Outcome, build, cc_is_there, difference, pairs, reference};
use crate::ledger::{Violation, ensure};
use crate::plan::Plan;
use crate::rig::Rig;
use crate::rng::Rng;

/// Where the elements lie in the target's memory, and how much there is.
const AT: usize = 64;
const LEN: usize = 4096 + 2 * AT;

/// Goal: whatever is lost, repeated and reordered, every pair in every form leaves in the target
/// and brings back what it does in C, and touches nothing else. Method: edge values and arrays up
/// to the limit, in several packets, over a segment that loses one frame in twenty.
#[test]
fn atomic_matrix() {
    if !cc_is_there() {
        return;
    }
    let start = Instant::now();
    let dir = tempfile::tempdir().expect("a directory for the reference");
    let program = build(dir.path());
    let (pairs, next) = (pairs(), AtomicUsize::new(0));
    let sums = Mutex::new([0; 4]);
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                let mut two = Two::new();
                let own = tempfile::tempdir().expect("a directory of this thread");
                while let Some(&(kind, op, ty)) = pairs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let cases = cases::cases(kind, op, ty, false);
                    let wanted = reference(&program, own.path(), &cases);
                    let values = cases.iter().zip(&wanted).map(|(case, wanted)| {
                        let ours = two.run(case).unwrap_or_else(|e| panic!("{op:?} {ty:?}: {e}"));
                        if let Some(difference) = difference(case, op, &ours, wanted) {
                            panic!("{difference}");
                        }
                        (ours.target.len() + ours.result.len()) / ty.size()
                    });
                    let compared = values.sum::<usize>();
                    let mut sums = sums.lock().expect("no panic inside");
                    let [executed, calls, all, _] = &mut *sums;
                    (*executed, *calls, *all) =
                        (*executed + 1, *calls + cases.len(), *all + compared);
                }
                sums.lock().expect("no panic inside")[3] += two.rig.net.stats.dropped as usize;
            });
        }
    });
    let [executed, calls, compared, dropped] = sums.into_inner().expect("no panic inside");
    println!(
        "atomic_matrix: pairs {executed} calls {calls} values compared {compared} frames dropped \
         {dropped} time {:.1} s",
        start.elapsed().as_secs_f64()
    );
    assert!(executed == 546 && dropped > 100);
}

/// An initiator at station 0, a target at station 1.
struct Two {
    rig: Rig,
    peer: FiAddr,
    region: Buf,
    key: u64,
    context: u64,
    rng: Rng,
}

impl Two {
    fn new() -> Self {
        let mut plan = Plan::calm(11, 0);
        (plan.link.loss, plan.link.dup, plan.link.jitter_ns) = (0.05, 0.05, 3000.0);
        let mut rig = Rig::new(plan, 2);
        let peer = rig.peer(0, 1, 2);
        let rng = Rng::new(11, 8);
        let s = rig.at(1);
        let region = s.arena.take(LEN).expect("nobody has written yet");
        let buf = s.arena.lend(region, false, &mut rng.clone());
        let access = MrAccess::REMOTE_READ | MrAccess::REMOTE_WRITE;
        let (requested_key, virt_addr, ep) = (None, false, None);
        let sharing = Sharing::Single;
        let req = MrReq { buf, access, requested_key, virt_addr, ep, sharing };
        let id = s.node.responder().mr_reg(req).expect("room for a region");
        let key = s.node.mrs.key(id).expect("it is open");
        Self { rig, peer, region, key, context: 0, rng }
    }

    fn run(&mut self, case: &Case) -> Result<Outcome, Violation> {
        let (len, region) = (case.target.len(), self.region);
        let s = self.rig.at(1);
        let mut all = vec![0xa5; LEN];
        all[AT..AT + len].copy_from_slice(&case.target);
        s.arena.write(region, &all);
        let back = if case.kind == AtomicKind::Base { 0 } else { len };
        let result = self.rig.at(0).arena.take(back)?;
        self.context += 1;
        let now = self.rig.now();
        let s = self.rig.at(0);
        let req = AtomicReq {
            kind: case.kind,
            op: case.op as u32,
            ty: case.ty as u32,
            operand: match case.op {
                AtomicOp::Read => IoBuf::EMPTY,
                _ => IoBuf::leaked(&case.operand),
            },
            compare: IoBuf::leaked(&case.compare),
            result: s.arena.lend(result, false, &mut self.rng),
            dest: self.peer,
            rma: RmaList::one(AT as u64, case.count() as u64, self.key),
            data: 0,
            context: self.context,
            flags: OpFlags::empty(),
            no_completion: false,
        };
        s.node.posting().post_atomic(now, s.ep, req).map_err(|e| e.to_string())?;
        self.rig.poll_by(0, self.rig.net.now);
        let limit = self.rig.net.now + 5_000_000_000;
        let done = loop {
            if let Some(done) = self.rig.read(0) {
                break done;
            }
            if let Some(failed) = self.rig.error(0) {
                return Err(format!("{failed:?}"));
            }
            ensure!(self.rig.step(limit).0, "it never completes");
        };
        ensure!(done.op_context == self.context, "completed twice: {done:?}");
        let s = self.rig.at(0);
        let brought = s.arena.bytes(result).to_vec();
        s.arena.give(result)?;
        let s = self.rig.at(1);
        s.arena.guards(region)?;
        let mut all = s.arena.bytes(region).to_vec();
        let target: Vec<u8> = all.drain(AT..AT + len).collect();
        ensure!(all.iter().all(|b| *b == 0xa5), "it wrote outside");
        Ok(Outcome { target, result: brought })
    }
}
