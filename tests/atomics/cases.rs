//! The calls by which every atomic pair is tried, what a C program makes of them, and what differs.
//!
//! The reference is `reference.c`, built here by the system's compiler with its own types: it
//! shares no line with what it checks. Compared are the bytes of target and result. Only where a
//! sum or product is a NaN, NaN is all that is compared: which of two NaNs an addition hands on is
//! the compiler's choice of operand order.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use barewire_dataplane::proto::atomic::{AtomicKind, AtomicOp, Datatype, count_max, valid};

use crate::values::{self, Random, edges};

/// Whether a C compiler is there. Where it must be (`CI=true`) its absence fails the test.
pub(crate) fn cc_is_there() -> bool {
    if Command::new("cc").arg("--version").output().is_ok_and(|out| out.status.success()) {
        return true;
    }
    assert!(std::env::var("CI").as_deref() != Ok("true"), "cc is missing");
    println!("SKIPPED: cc missing (apt-get install gcc)");
    false
}

/// Builds the reference in `dir`.
pub(crate) fn build(dir: &Path) -> PathBuf {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("atomics/reference.c");
    let program = dir.join("reference");
    let mut cc = Command::new("cc");
    // Signed overflow wraps (rule S7), and no product is fused into a sum.
    cc.args(["-std=c11", "-O2", "-Wall", "-Wextra", "-fwrapv", "-ffp-contract=off", "-o"]);
    let out = cc.arg(&program).arg(&source).arg("-lm").output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    program
}

/// One call: its elements as they lie in memory. `compare` is empty in the other forms.
pub(crate) struct Case {
    pub(crate) kind: AtomicKind,
    pub(crate) op: AtomicOp,
    pub(crate) ty: Datatype,
    pub(crate) target: Vec<u8>,
    pub(crate) operand: Vec<u8>,
    pub(crate) compare: Vec<u8>,
}

/// What a call leaves in the target and returns; the result is empty in the base form.
#[derive(PartialEq)]
pub(crate) struct Outcome {
    pub(crate) target: Vec<u8>,
    pub(crate) result: Vec<u8>,
}

impl Case {
    pub(crate) fn count(&self) -> usize {
        self.target.len() / self.ty.size()
    }

    pub(crate) fn result_len(&self) -> usize {
        if self.kind == AtomicKind::Base { 0 } else { self.target.len() }
    }

    pub(crate) fn record(&self, out: &mut Vec<u8>) {
        let words = [self.kind as u32, self.op as u32, self.ty as u32, self.count() as u32, 0];
        words.iter().for_each(|word| out.extend_from_slice(&word.to_ne_bytes()));
        out.extend_from_slice(&self.target);
        out.extend_from_slice(&self.operand);
        out.extend_from_slice(&self.compare);
    }
}

/// Every valid pair of a form, in a fixed order.
pub(crate) fn pairs() -> Vec<(AtomicKind, AtomicOp, Datatype)> {
    let mut pairs = Vec::new();
    for kind in AtomicKind::ALL {
        for op in AtomicOp::ALL {
            let types = Datatype::ALL.iter().filter(|ty| valid(kind, op, **ty));
            pairs.extend(types.map(|ty| (kind, op, *ty)));
        }
    }
    pairs
}

/// The calls for one pair: every edge value against every other, and random arrays of the counts
/// where segmentation and vector loops begin and end. Many of the short ones if `thorough`.
pub(crate) fn cases(kind: AtomicKind, op: AtomicOp, ty: Datatype, thorough: bool) -> Vec<Case> {
    let mut random = Random::new(ty, 1 + op as u64 * 64 + ty as u64);
    let mut cases = Vec::new();
    let mut push = |elements: &[[Vec<u8>; 3]]| {
        let column = |i: usize| elements.iter().flat_map(|e| e[i].iter().copied()).collect();
        let compare = if kind == AtomicKind::Compare { column(2) } else { Vec::new() };
        cases.push(Case { kind, op, ty, target: column(0), operand: column(1), compare });
    };
    let edges = edges(ty);
    // In the compare form it is compare and target that meet each other, in the others operand and
    // target.
    let mut crossed = Vec::new();
    for (i, target) in edges.iter().enumerate() {
        for (j, other) in edges.iter().enumerate() {
            let third = edges[(i * 7 + j * 3 + 1) % edges.len()].clone();
            crossed.push(match kind {
                AtomicKind::Compare => [target.clone(), third, other.clone()],
                _ => [target.clone(), other.clone(), Vec::new()],
            });
        }
    }
    let limit = count_max(ty);
    crossed.chunks(limit).for_each(&mut push);
    if thorough && ty.is_integer() && ty.size() >= 4 {
        crossed.chunks(1).for_each(&mut push); // a single word has code of its own
    }
    for count in [1, 2, 3, limit - 1, limit] {
        let rounds = if !thorough {
            1
        } else if count < 4 {
            20
        } else {
            2
        };
        for _ in 0..rounds {
            let mut elements = Vec::new();
            for _ in 0..count {
                let [target, operand, other] = [(); 3].map(|()| random.element());
                // Else no random comparison would ever find two values equal.
                let compare = if other[0] & 3 == 0 { target.clone() } else { other };
                elements.push([target, operand, compare]);
            }
            push(&elements);
        }
    }
    cases
}

/// What the reference makes of the calls.
pub(crate) fn reference(program: &Path, dir: &Path, cases: &[Case]) -> Vec<Outcome> {
    let mut records = Vec::new();
    cases.iter().for_each(|case| case.record(&mut records));
    let (input, output) = (dir.join("in"), dir.join("out"));
    fs::write(&input, records).unwrap();
    let status = Command::new(program)
        .stdin(File::open(&input).unwrap())
        .stdout(File::create(&output).unwrap())
        .status()
        .unwrap();
    assert!(status.success(), "{status}");
    let bytes = fs::read(&output).unwrap();
    let mut rest = &bytes[..];
    let mut take = |len: usize| {
        let (piece, after) = rest.split_at(len);
        rest = after;
        piece.to_vec()
    };
    let outcomes = cases
        .iter()
        .map(|case| Outcome { target: take(case.target.len()), result: take(case.result_len()) })
        .collect();
    assert!(rest.is_empty(), "{} bytes too many", rest.len());
    outcomes
}

/// What differs between our outcome and the reference's, if anything does.
pub(crate) fn difference(
    case: &Case,
    op: AtomicOp,
    ours: &Outcome,
    wanted: &Outcome,
) -> Option<String> {
    let size = case.ty.size();
    let nan_is_nan = matches!(op, AtomicOp::Sum | AtomicOp::Prod);
    for i in 0..case.count() {
        let at = i * size..(i + 1) * size;
        let (got, want) = (&ours.target[at.clone()], &wanted.target[at.clone()]);
        let same = got == want || nan_is_nan && values::same_but_for_nans(case.ty, got, want);
        let fetched =
            ours.result.is_empty() || ours.result[at.clone()] == wanted.result[at.clone()];
        if !same || !fetched {
            let shown = |all: &[u8]| all.get(at.clone()).map_or(Vec::new(), <[u8]>::to_vec);
            return Some(format!(
                "{:?} {:?} {:?} element {i} of {}: target {:x?} operand {:x?} compare {:x?}: \
                 became {got:x?} with result {:x?}, in C {want:x?} with result {:x?}",
                case.kind,
                case.op,
                case.ty,
                case.count(),
                shown(&case.target),
                shown(&case.operand),
                shown(&case.compare),
                shown(&ours.result),
                shown(&wanted.result),
            ));
        }
    }
    None
}
