//! Cost of the codec: nanoseconds and instructions for writing and parsing a message header.

use barewire_benches::count::{instructions, steady};
use barewire_benches::end::BenchResult;
use barewire_benches::{Args, Report, Row, Sample};
use barewire_dataplane::psn::Psn;
use barewire_dataplane::wire::{BASE_LEN, Base, EagerMsg, MsgOp, Ty};
use barewire_driver::clock::now_ns;
use barewire_driver::frame::RxFrame;
use barewire_driver::port::Station;

/// Headers per timed batch.
const BATCH: u64 = 1000;

const CASES: [&str; 4] = ["emit", "emit-parse", "plain-emit", "plain-emit-parse"];

const DST: Station = Station::at([2, 0, 0, 0, 0, 1]);
const SRC: Station = Station::at([2, 0, 0, 0, 0, 2]);

fn main() {
    let args = Args::read();
    if let Some(case) = &args.steady {
        let hash = steady(|| run(case, args.count));
        std::hint::black_box(hash);
        return;
    }
    let mut report = Report::new("headers", &args);
    let samples = args.size(2000, 20);
    report.row(timed("floor", samples, || 0));
    for case in CASES.into_iter().filter(|case| args.wants(case)) {
        report.row(timed(case, samples, || run(case, BATCH)));
        let name = format!("{case}-instructions");
        match counted(case, &args) {
            Ok(n) => report.row(Row::new(name, n, "instr/header")),
            Err(why) => report.skip(&name, &why),
        }
    }
}

fn counted(case: &str, args: &Args) -> BenchResult<f64> {
    instructions(case, args.size(10_000, 100), args.size(110_000, 1100))
}

/// Nanoseconds per header, by batch; the results are hashed, so that the work is not optimized out.
fn timed(case: &str, samples: u64, mut batch: impl FnMut() -> u64) -> Row {
    let mut sample = Sample::with_capacity(samples as usize);
    let mut hash = 0_u64;
    for _ in 0..samples {
        let start = now_ns();
        hash = hash.wrapping_add(batch());
        sample.push((now_ns() - start) as f64 / BATCH as f64);
    }
    Row::new(case, sample.median(), "ns/header").spread(&sample).note(format!("hash {hash:x}"))
}

/// Writes or parses `count` headers, and returns a hash of the results.
fn run(case: &str, count: u64) -> u64 {
    let (plain, parse) = (case.starts_with("plain"), case.ends_with("parse"));
    let mut frame = [0_u8; 128];
    let mut hash = 0_u64;
    for i in 0..count {
        let op = MsgOp { dst_ep: 1, src_ep: 2, tagged: true, tag: i, ..MsgOp::default() };
        let (psn, cack) = (Psn(i as u32), Psn(7));
        if plain {
            let msg = EagerMsg { dst_sid: 1 << 20, psn, cack, grant: 9, plen: 64, op };
            let (bytes, _) = msg.emit(&EagerMsg::head(DST, SRC, false), false);
            frame[..bytes.len()].copy_from_slice(&bytes);
        } else {
            let base = Base {
                dst: DST,
                src: SRC,
                ty: Ty::Msg,
                ar: false,
                rtx: false,
                ce: false,
                crc: false,
                dst_sid: 1 << 20,
                psn,
                cack,
                grant: 9,
                plen: 64,
            };
            let (head, rest) = frame.split_first_chunk_mut().expect("longer than a base");
            base.emit(head);
            op.emit(rest);
        }
        std::hint::black_box(&mut frame);
        hash = hash.wrapping_mul(31).wrapping_add(if parse { read(&frame, plain) } else { i });
    }
    hash
}

fn read(frame: &[u8], plain: bool) -> u64 {
    let frame = RxFrame::new(frame);
    if plain {
        return EagerMsg::parse(&frame, false)
            .map_or(0, |(_, msg)| u64::from(msg.psn.0) ^ msg.op.tag);
    }
    let Ok(base) = Base::parse(&frame) else { return 0 };
    let tag = MsgOp::parse(&frame, &base).map_or(0, |op| op.tag);
    tag ^ u64::from(base.psn.0) ^ BASE_LEN as u64
}
