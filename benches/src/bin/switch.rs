//! Cost of a switch: frames over a memif of the process's own port, and through a switch that owns
//! the memif. One thread runs all parties, so nothing idles and processor time is measured.

use barewire_benches::count::{instructions, steady};
use barewire_benches::duo::{Rounds, start};
use barewire_benches::end::BenchResult;
use barewire_benches::switched::Node;
use barewire_benches::{Args, Report, Row, Sample};
use barewire_driver::backend::switch::Switch;
use barewire_driver::clock::now_ns;
use barewire_driver::frame::{ETHERTYPE, RxFrame, TxFrame, address};
use barewire_driver::open::{SwitchAccess, open, open_switch};
use barewire_driver::port::{Port, Tx};

/// Cases: name, through a switch or not, towards the wire or from it, and frames in flight.
const CASES: [(&str, bool, bool, usize); 6] = [
    ("own", false, true, 1),
    ("up", true, true, 1),
    ("down", true, false, 1),
    ("own-32", false, true, 32),
    ("up-32", true, true, 32),
    ("down-32", true, false, 32),
];

/// Shortest and longest frame, bytes: 64, and the largest of the memif.
const SHORT: usize = 64;
const LONG: usize = 9014;

/// Frames before the measurement: rings open, pages are touched.
const WARM_UP: u64 = 5000;
/// Frames per timed batch.
const BATCH: u64 = 3200;

fn main() {
    let args = Args::read_or_run(run_case);
    let mut report = Report::new("switch", &args);
    let (few, many) = (args.size(10_000, 320), args.size(60_000, 640));
    for (case, ..) in CASES.into_iter().filter(|(case, ..)| args.wants(case)) {
        match instructions(case, few, many) {
            Ok(n) => report.row(Row::new(case, n, "instr/frame").count(many - few)),
            Err(why) => report.skip(case, &why),
        }
    }
    for (name, len) in [("64B", SHORT), ("9014B", LONG)] {
        match timed(len, args.size(300, 3)) {
            Ok(samples) => {
                let own = samples[0].median();
                for ((case, ..), sample) in CASES[3..].iter().zip(&samples) {
                    let ns = sample.median();
                    let row = Row::new(format!("{case}-{name}"), ns, "ns/frame").spread(sample);
                    report.row(row.against("own", own, ns / own));
                }
            }
            Err(why) => report.skip(name, &why),
        }
    }
    if let Err(why) = messages(&args, &mut report) {
        report.skip("messages", &why);
    }
}

/// Messages in flight from each process, of 64 B and of 64 KiB.
const WINDOW: u64 = 64;
const WINDOW_LONG: u64 = 8;
/// Limit of what a switch adds to half a round trip, in round trips of a cache line.
const LINES: f64 = 2.5;
const LONG_MESSAGE: usize = 64 << 10;

/// Messages of processes to a far node, over a NIC of their own and through a switch, interleaved.
fn messages(args: &Args, report: &mut Report) -> BenchResult<()> {
    let (rounds, count) = (args.size(25, 2), args.size(20_000, 200));
    let memory = WINDOW_LONG as usize * LONG_MESSAGE;
    let mut nodes = [(1, false), (1, true), (4, true)]
        .into_iter()
        .map(|(processes, switched)| Node::open(processes, switched, memory))
        .collect::<BenchResult<Vec<_>>>()?;
    let half = |node: &mut Node| node.half_round_trip(64, count);
    let short = |node: &mut Node| node.rate(64, WINDOW, count);
    let long = |node: &mut Node| node.rate(LONG_MESSAGE, WINDOW_LONG, count / 100);
    type Measure<'a> = &'a dyn Fn(&mut Node) -> BenchResult<f64>;
    // The second or the third of `nodes` against the first plus the given number of round trips of
    // a cache line, which a switch on its own processor adds.
    let lines = LINES * line_ns()?;
    let cases: [(&str, usize, Measure<'_>, f64, &str, &str); 4] = [
        ("message-64B", 1, &half, lines, "ns of work", "bar 1.1"),
        ("messages-64B", 1, &short, 0.0, "M/s", "bar 0.7"),
        ("messages-64B-of-4", 2, &short, 0.0, "M/s", "bar 0.9"),
        ("messages-64KiB", 1, &long, 0.0, "M/s", "bar 0.7"),
    ];
    for (case, through, measure, lines, unit, note) in cases {
        if !args.wants(case) {
            continue;
        }
        let mut round = || Ok((measure(&mut nodes[through])?, lines + measure(&mut nodes[0])?));
        let pairs = Rounds::measure(rounds, &mut round)?;
        let than = if lines > 0.0 { "own, 2.5 line round trips" } else { "own" };
        let note = format!("{note}, {}", pairs.span());
        report.row(pairs.row(case, unit, than).note(note));
    }
    Ok(())
}

/// Round trip of a cache line between two processors, nanoseconds.
fn line_ns() -> BenchResult<f64> {
    let mut first = start(|second| second.serve(&mut (), |()| (), |(), _| Ok(())))?;
    first.line_ns()
}

fn run_case(case: &str, count: u64) -> BenchResult<()> {
    let found = CASES.into_iter().find(|(name, ..)| *name == case);
    let (_, switched, up, together) = found.ok_or("no such case")?;
    let mut line = Line::open(switched)?;
    line.pass(up, SHORT, together, WARM_UP)?;
    steady(|| line.pass(up, SHORT, together, count))
}

/// Nanoseconds per frame of the cases with many frames in flight, interleaved.
fn timed(len: usize, samples: u64) -> BenchResult<Vec<Sample>> {
    let mut lines = Vec::new();
    for &(_, switched, up, together) in &CASES[3..] {
        let mut line = Line::open(switched)?;
        line.pass(up, len, together, WARM_UP)?;
        lines.push((line, up, together, Sample::with_capacity(samples as usize)));
    }
    for _ in 0..samples {
        for (line, up, together, sample) in &mut lines {
            let start = now_ns();
            line.pass(*up, len, *together, BATCH)?;
            sample.push((now_ns() - start) as f64 / BATCH as f64);
        }
    }
    Ok(lines.into_iter().map(|(.., sample)| sample).collect())
}

/// A station, a memif, and the path between them.
struct Line {
    station: Box<dyn Port>,
    switch: Option<Switch>,
    far: Box<dyn Port>,
    bytes: Vec<u8>,
}

impl Line {
    fn open(switched: bool) -> BenchResult<Self> {
        use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
        static SERIAL: AtomicU32 = AtomicU32::new(0);
        let serial = SERIAL.fetch_add(1, Relaxed);
        let name = format!("memif:@bench-switch-{}-{serial}", std::process::id());
        let options = "mtu=9000,bsize=16384";
        let text = |why: barewire_driver::error::OpenError| why.to_string();
        let far = open(&format!("{name},role=server,{options}")).map_err(text)?;
        let client = format!("{name},role=client,{options}");
        let (switch, station) = match switched {
            true => {
                let switch = open_switch(&client, &SwitchAccess::default()).map_err(text)?;
                (Some(switch), open(&format!("{client},switch=yes")).map_err(text)?)
            }
            false => (None, open(&client).map_err(text)?),
        };
        let mut line = Self { station, switch, far, bytes: Vec::new() };
        // Until the two sides of the memif are connected and the rings are open.
        for _ in 0..10_000 {
            let both = line.pass(true, SHORT, 1, 1).and_then(|()| line.pass(false, SHORT, 1, 1));
            if both.is_ok() {
                return Ok(line);
            }
            std::thread::sleep(std::time::Duration::from_micros(100));
        }
        Err("the two sides of the memif do not meet".to_owned())
    }

    /// Passes `count` frames of `len` bytes, `together` of them in flight.
    #[inline(never)]
    fn pass(&mut self, up: bool, len: usize, together: usize, count: u64) -> BenchResult<()> {
        let Self { station, switch, far, bytes } = self;
        let (from, to) = if up { (station, far) } else { (far, station) };
        let (dst, src) = (to.caps().station, from.caps().station);
        bytes.clear();
        bytes.extend_from_slice(&[0; 12]);
        bytes.extend_from_slice(&ETHERTYPE.to_be_bytes());
        bytes.resize(len, 0);
        address(bytes, dst, src);
        let mut left = count;
        while left > 0 {
            let now = (together as u64).min(left) as usize;
            for _ in 0..now {
                let sent = from.tx(&TxFrame::whole(bytes)).map_err(|gone| gone.to_string())?;
                if sent != Tx::Sent {
                    return Err("a frame found no room".to_owned());
                }
            }
            from.flush().map_err(|gone| gone.to_string())?;
            let mut got = 0;
            for _ in 0..1000 {
                if let Some(switch) = switch {
                    switch.turn().map_err(|gone| gone.to_string())?;
                }
                let mut sink = |_: &RxFrame<'_>| {};
                got += to.rx_burst(64, &mut sink).map_err(|gone| gone.to_string())?;
                if got >= now {
                    break;
                }
            }
            if got < now {
                return Err("a frame did not arrive".to_owned());
            }
            left -= now as u64;
        }
        Ok(())
    }
}
