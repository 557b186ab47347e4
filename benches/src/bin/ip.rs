//! Cost of the userspace IP and UDP: instructions that `ip(...)` adds to a frame of 116 bytes (64
//! of a message) and of 1,352, on transmit and on receive, over a memif.
//!
//! The same frames pass through the memif with and without `ip(...)` around it; only the port's
//! calls are counted, `tx` and `flush` or `rx_burst`, for sixteen frames together. The reference
//! frames without the wrapper are as long as those with it, thus 42 or 62 bytes longer, since the
//! memif's copy depends on the length. One thread runs both ends.

use barewire_benches::count::{instructions, steady};
use barewire_benches::end::BenchResult;
use barewire_benches::{Args, Report, Row};
use barewire_driver::frame::{Body, ETHERTYPE, RxFrame, TxFrame, address};
use barewire_driver::open::open;
use barewire_driver::port::{Port, Tx};

/// Bytes before the message, and of the message.
const HEAD: usize = 52;
const LEN: usize = 64;

/// Frames per burst.
const TOGETHER: u64 = 16;

/// Cases: the ports around the memif, with a letter for the number of the end, and the length of
/// the message. Each case with a wrapper is followed by its reference.
const CASES: [(&str, &str, usize); 9] = [
    ("ip-64B", V4, LEN),
    ("plain-106B", "", LEN + 42),
    ("ip6-64B", V6, LEN),
    ("plain-126B", "", LEN + 62),
    ("ip-1300B", V4, 1300),
    ("plain-1342B", "", 1300 + 42),
    ("ip6-1300B", V6, 1300),
    ("plain-1362B", "", 1300 + 62),
    ("plain-64B", "", LEN),
];

const V4: &str = "ip(10.79.0.N/24):";
const V6: &str = "ip([2001:db8::a4f:N]/96):";

/// Limit for IPv4, instructions per frame in each direction.
const BAR: f64 = 60.0;

fn main() {
    let args = Args::read_or_run(run_case);
    let mut report = Report::new("ip", &args);
    for way in ["tx", "rx"] {
        let mut counted = CASES.map(|(case, ..)| {
            let name = format!("{way}-{case}");
            let n = instructions(&name, args.size(1_000, 10), args.size(5_000, 20));
            let n = n.map(|n| n / TOGETHER as f64);
            match &n {
                Ok(n) if case.starts_with("plain") => {
                    report.row(Row::new(name, *n, "instr/frame"));
                }
                Ok(_) => {}
                Err(why) => report.skip(&name, why),
            }
            n.ok()
        });
        for (i, pair) in counted.chunks_exact_mut(2).enumerate() {
            let [Some(wrapped), Some(plain)] = *pair else { continue };
            let mut row =
                Row::new(format!("{way}-{}", CASES[2 * i].0), wrapped - plain, "instr/frame more");
            if i == 0 {
                row = row.against("bar", BAR, (wrapped - plain) / BAR);
            }
            report.row(row);
        }
    }
}

/// Sends `count` bursts; only transmit or only receive is counted.
fn run_case(case: &str, count: u64) -> BenchResult<()> {
    let (way, case) = case.split_once('-').ok_or("no such case")?;
    let found = CASES.into_iter().find(|(name, ..)| *name == case);
    let (_, around, len) = found.ok_or("no such case")?;
    let port = |n: usize| {
        let role = ["server", "client"][n];
        let around = around.replace('N', &(n + 1).to_string());
        let spec = format!("{around}memif:@bench-ip-{},role={role},near=no", std::process::id());
        open(&spec).map_err(|e| e.to_string())
    };
    let (mut a, mut b) = (port(0)?, port(1)?);
    let mut head = [0; HEAD];
    address(&mut head, b.caps().station, a.caps().station);
    head[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
    let body = vec![7; len];
    let frame = TxFrame { head: &head, body: Body::Bytes(&body), tail: &[] };
    wait_for_link(&mut *a, &mut *b, &frame)?;
    for _ in 0..count {
        let counts_tx = way == "tx";
        let sent = if counts_tx { steady(|| send(&mut *a, &frame)) } else { send(&mut *a, &frame) };
        let got = if counts_tx { receive(&mut *b) } else { steady(|| receive(&mut *b)) };
        if (sent, got) != (TOGETHER, TOGETHER) {
            return Err(format!("{sent} frames left and {got} came"));
        }
    }
    Ok(())
}

/// Polls until frames arrive: the memif is connected, the neighbour is resolved.
fn wait_for_link(a: &mut dyn Port, b: &mut dyn Port, frame: &TxFrame<'_>) -> BenchResult<()> {
    for _ in 0..10_000 {
        let sent = send(a, frame);
        let _answers = (receive(b), receive(a));
        if sent == TOGETHER && send(a, frame) == TOGETHER && receive(b) == TOGETHER {
            return Ok(());
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    Err("the two ends do not reach each other".to_owned())
}

/// Sends a burst; returns the number of frames sent.
#[inline(never)]
fn send(port: &mut dyn Port, frame: &TxFrame<'_>) -> u64 {
    let sent = (0..TOGETHER).filter(|_| port.tx(frame) == Ok(Tx::Sent)).count() as u64;
    // The receiving side notices a port that is gone: no frame arrives.
    let _ = port.flush();
    sent
}

/// Receives a burst; returns the number of frames.
#[inline(never)]
fn receive(port: &mut dyn Port) -> u64 {
    let mut got = 0;
    let mut sink = |frame: &RxFrame<'_>| got += u64::from(frame.len() >= HEAD + LEN);
    let _ = port.rx_burst(TOGETHER as usize, &mut sink);
    got
}
