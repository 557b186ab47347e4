//! Frames of 64 bytes a second that one thread sends into a veth whose other end has no reader: the
//! port `xdp` by `tx` and `flush`, against a raw AF_XDP loop, sixty-four frames per call.
//! Interleaved, each on a veth of its own.

use barewire_benches::end::BenchResult;
use barewire_benches::wires::Xsk;
use barewire_benches::{Args, Report, Row, Sample};
use barewire_driver::clock::now_ns;
use barewire_driver::frame::{ETHERTYPE, TxFrame};
use barewire_driver::open::open;
use barewire_driver::port::{Port, Tx};
use barewire_tests::nodes::Nodes;

const LEN: usize = 64;
/// Frames per call.
const BURST: u32 = 64;
/// The port's interface, and that of the raw socket.
const WIRES: [&str; 2] = ["fab1", "fab2"];
/// Limit of the ratio of port to raw loop.
const BAR: f64 = 0.9;

fn main() {
    let args = Args::read();
    let mut report = Report::new("frames", &args);
    if let Err(why) = measure(&args, &mut report) {
        // xtask recognises a skipped benchmark by the first word.
        println!("SKIPPED: {why}");
    }
}

fn measure(args: &Args, report: &mut Report) -> BenchResult<()> {
    let nodes = Nodes::pair(1500)?;
    for name in WIRES {
        nodes.veth([(0, name), (1, name)], 1500)?;
    }
    nodes.enter(0)?;
    // To a station that does not exist: the kernel at the other end drops the frame.
    let mut frame = [0; LEN];
    frame[0] = 2;
    frame[6] = 2;
    frame[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
    let mut port = open(&format!("xdp:{}", WIRES[0])).map_err(|e| e.to_string())?;
    let mut raw = Xsk::open(WIRES[1], &frame)?;
    let (rounds, bursts) = (args.size(31, 2), args.size(2_000, 10));
    let [mut ours, mut theirs, mut ratio] = [(); 3].map(|()| Sample::default());
    for round in 0..=rounds {
        let a = rate(bursts, || send(&mut *port, &frame))?;
        let b = rate(bursts, || {
            raw.send(BURST);
            Ok(())
        })?;
        if round > 0 {
            ours.push(a);
            theirs.push(b);
            ratio.push(a / b);
        }
    }
    let row = Row::new("xdp-frames/raw", ours.median(), "M frames/s");
    let row = row.against("a raw AF_XDP loop", theirs.median(), ratio.median()).spread(&ratio);
    report.row(row.note(format!("bar {BAR}")));
    Ok(())
}

/// Million frames a second.
fn rate(bursts: u64, mut burst: impl FnMut() -> BenchResult<()>) -> BenchResult<f64> {
    let begun = now_ns();
    for _ in 0..bursts {
        burst()?;
    }
    Ok((bursts * u64::from(BURST)) as f64 * 1e3 / (now_ns() - begun) as f64)
}

fn send(port: &mut dyn Port, frame: &[u8]) -> BenchResult<()> {
    let gone = |gone| format!("{gone}");
    for _ in 0..BURST {
        while port.tx(&TxFrame::whole(frame)).map_err(gone)? != Tx::Sent {
            port.flush().map_err(gone)?;
        }
    }
    port.flush().map_err(gone)
}
