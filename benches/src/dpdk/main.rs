//! Messages over DPDK devices against plain DPDK, on the same two processors, in the same
//! interleaved rounds: memif between two processes, by barewire's own port and by DPDK's driver; a
//! pair of rings between two threads; and the cost of a packet on a null device.

mod raw;

use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};

use barewire_benches::count::{instructions, steady, warm_up};
use barewire_benches::duo::{First, Rounds, Second, Task, start};
use barewire_benches::end::{BenchResult, End, RawEnd, SafeEnd};
use barewire_benches::pair::{joined, segment};
use barewire_benches::remote::steady_case_on;
use barewire_benches::{Args, BouncedLine, CpuPair, Report, Row, Sample};
use barewire_driver::clock::now_ns;
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::port::{MacAddr, Station};
use raw::RawPort;

const LEN: usize = 64;
const LARGE: usize = 64 << 10;
const WINDOW: u64 = 64;
const LARGE_WINDOW: u64 = 16;
const MEMORY: usize = LARGE * LARGE_WINDOW as usize;

/// Length of a raw frame with the bytes of one message behind an Ethernet header.
const RAW_LEN: usize = 14 + LEN;
const RAW_LARGE: usize = 9000;

/// Round trips per timed chunk.
const CHUNK: u64 = 50;

/// Commands of the second process.
const ECHO: u64 = 0;
const SINK: u64 = 1;
const SINK_LARGE: u64 = 2;
const RAW_ECHO: u64 = 3;
const RAW_SINK: u64 = 4;
const RAW_SINK_LARGE: u64 = 5;
const RAW_SINK_COPY: u64 = 6;
const ECHO_LOSSLESS: u64 = 7;
const SINK_LONG: u64 = 8;
const SINK_APART: u64 = 9;
/// Added to the commands other than raw ones: over DPDK's driver.
const BY_DPDK: u64 = 16;

fn main() {
    let args = Args::read();
    if let Some(case) = &args.steady {
        if let Err(why) = run_steady(case, args.count) {
            eprintln!("{case}: {why}");
            std::process::exit(1);
        }
        return;
    }
    let mut report = Report::new("dpdk", &args);
    let mut memifs = LATENCY.iter().chain(&RATE).chain(&GOODPUT);
    if memifs.any(|case| args.wants(case))
        && let Err(why) = memif(&args, &mut report)
    {
        report.skip("memif", &why);
    }
    if args.wants("null-instructions") {
        null_instructions(&args, &mut report);
    }
    memory_instructions(&args, &mut report);
    // Last, since it starts threads and DPDK in this process.
    if RINGS.iter().any(|(case, _)| args.wants(case))
        && let Err(why) = ring(&args, &mut report)
    {
        report.skip("ring-64B/raw", &why);
    }
}

// ---------------------------------------------------------------------------------------------
// memif
// ---------------------------------------------------------------------------------------------

const SERVER: &str = "server";
const CLIENT: &str = "client";

/// Cases over barewire's own port, and over DPDK's driver.
const LATENCY: [&str; 2] = ["memif-64B/raw", "dpdk-memif-64B/raw"];
const LATENCY_LOSSLESS: [&str; 2] = ["memif-64B-lossless/raw", "dpdk-memif-64B-lossless/raw"];
const RATE: [&str; 2] = ["memif-rate/raw", "dpdk-memif-rate/raw"];
/// All messages from one buffer and into one, as common bandwidth tests have it and as the raw loop
/// sends the same packet buffers again and again; "long" in the longest worthwhile frames, "apart"
/// from and into one buffer per message of the window.
const GOODPUT: [&str; 5] = [
    "memif-64KiB/raw",
    "dpdk-memif-64KiB/raw",
    "memif-64KiB-long/raw",
    "dpdk-memif-64KiB-long/raw",
    "memif-64KiB-apart/raw",
];
const GOODPUT_COPIED: [&str; 5] = [
    "memif-64KiB/raw-copied",
    "dpdk-memif-64KiB/raw-copied",
    "memif-64KiB-long/raw-copied",
    "dpdk-memif-64KiB-long/raw-copied",
    "memif-64KiB-apart/raw-copied",
];

/// Endpoints on four memifs, all by the same port type.
struct Ends {
    small: RawEnd,
    /// As `small`, on a lossless memif.
    lossless: RawEnd,
    large: RawEnd,
    long: RawEnd,
}

impl Ends {
    /// Opens the endpoints on the ports that `open` specifies by number and options, at addresses
    /// from `first` on.
    fn open(role: &str, first: u64, open: impl Fn(u64, &str) -> String) -> BenchResult<Self> {
        let other = if role == SERVER { CLIENT } else { SERVER };
        let end = |i: u64, options: &str| -> BenchResult<RawEnd> {
            let options = format!("mac={},{options}", address(role, first + i));
            let mut end = RawEnd::open(&open(i, &options), MEMORY)?;
            let station = address(other, first + i);
            end.connect(barewire::EpAddr { station, incarnation: 0, ..end.addr() });
            Ok(end)
        };
        let (small, lossless) = (end(0, "mtu=1500")?, end(1, "mtu=1500,lossless=yes")?);
        Ok(Self { small, lossless, large: end(2, "mtu=9000")?, long: end(3, "mtu=33000")? })
    }
}

/// One side of four memifs by either port type, and of two raw ones.
struct Side {
    /// barewire's own port, and DPDK's driver.
    by: [Ends; 2],
    raw: RawPort,
    raw_large: RawPort,
    bytes: Vec<u8>,
}

impl Side {
    fn open(role: &str, parent: u32) -> BenchResult<Self> {
        let args = |id: u64| format!("role={role},id={id},socket=barewire-bench-{parent}-{id}");
        let ours = Ends::open(role, 0, |i, options| {
            format!("memif:@barewire-bench-{parent}-own{i},role={role},{options}")
        })?;
        let theirs =
            Ends::open(role, 4, |i, options| format!("dpdk({options}):net_memif{i},{}", args(i)))?;
        let raw = RawPort::open("net_memif8", &args(8), 2048)?;
        let raw_large = RawPort::open("net_memif9", &format!("{},bsize=9216", args(9)), 9216)?;
        Ok(Self { by: [ours, theirs], raw, raw_large, bytes: vec![0x5a; 1 << 20] })
    }

    /// Waits until the two processes are connected.
    fn connected(&mut self) -> BenchResult<()> {
        let begun = std::time::Instant::now();
        while !self.raw.is_up() || !self.raw_large.is_up() {
            self.idle();
            if begun.elapsed().as_secs() > 20 {
                return Err("the two sides do not meet".to_owned());
            }
        }
        Ok(())
    }

    /// Turns both progress engines, for frames still in flight.
    fn idle(&mut self) {
        for Ends { small, lossless, large, long } in &mut self.by {
            for end in [small, lossless, large, long] {
                end.poll();
            }
        }
    }
}

fn memif(args: &Args, report: &mut Report) -> BenchResult<()> {
    let parent = std::process::id();
    let mut first = start(|second| serve(second, parent))?;
    let mut side = Side::open(SERVER, parent)?;
    // The raw clients do not wait for a server: the other process opens them when it receives this
    // address.
    first.exchange_station(address(SERVER, 0));
    side.connected()?;
    let rounds = args.size(21, 2);
    if LATENCY.iter().any(|case| args.wants(case)) {
        memif_latency(rounds, args.size(20_000, 500), &mut first, &mut side, report)?;
    }
    let rounds = args.size(15, 2);
    if RATE.iter().any(|case| args.wants(case)) {
        memif_rate(rounds, args.size(400_000, 2000), &mut first, &mut side, report)?;
    }
    if GOODPUT.iter().any(|case| args.wants(case)) {
        memif_goodput(rounds, args.size(6000, 50), &mut first, &mut side, report)?;
    }
    Ok(())
}

/// The station of port `i` of a side.
fn address(role: &str, i: u64) -> Station {
    MacAddr::from_u64(0x0200_0000_0000 + 2 * i + u64::from(role == CLIENT)).into()
}

fn memif_latency(
    rounds: u64,
    count: u64,
    first: &mut First,
    side: &mut Side,
    report: &mut Report,
) -> BenchResult<()> {
    let cases = [LATENCY, LATENCY_LOSSLESS].concat();
    let mut pairs = std::array::from_fn::<_, 4, _>(|_| Rounds::default());
    let mut single = std::array::from_fn::<_, 4, _>(|_| Sample::default());
    let before = first.line_ns()?;
    for round in 0..=rounds {
        let mut ours = std::array::from_fn::<_, 4, _>(|_| Sample::default());
        for (i, ours) in ours.iter_mut().enumerate() {
            let what = if i < 2 { ECHO } else { ECHO_LOSSLESS } + BY_DPDK * (i as u64 % 2);
            first.begin(Task { what, len: LEN, count });
            let ends = &mut side.by[i % 2];
            let end = if i < 2 { &mut ends.small } else { &mut ends.lossless };
            ours.extend(&ping_pong(end, count, CHUNK).into_iter().collect());
            first.finish(|| side.idle())?;
        }
        first.begin(Task { what: RAW_ECHO, len: RAW_LEN, count });
        let raw: Sample = side.raw.ping_pong::<false>(RAW_LEN, count, CHUNK).into_iter().collect();
        first.finish(|| side.idle())?;
        for (i, ours) in ours.iter().enumerate().filter(|_| round > 0) {
            pairs[i].push(ours.median(), raw.median());
            single[i].extend(ours);
        }
    }
    let after = first.line_ns()?;
    for (i, case) in cases.into_iter().enumerate() {
        let row = Row::new(case, pairs[i].value(), "ns half trip").spread(&single[i]);
        report.row(
            with_reference(row, &pairs[i], "raw memif half trip", rounds).placed(before, after),
        );
    }
    Ok(())
}

/// The row with its reference.
fn with_reference(row: Row, pairs: &Rounds, reference: &str, rounds: u64) -> Row {
    let (low, high) = pairs.ratio_range();
    row.against(reference, pairs.reference(), pairs.ratio())
        .note(format!("ratios {low:.2} to {high:.2} in {rounds} rounds"))
}

fn memif_rate(
    rounds: u64,
    count: u64,
    first: &mut First,
    side: &mut Side,
    report: &mut Report,
) -> BenchResult<()> {
    let mut pairs = [Rounds::default(), Rounds::default()];
    let mut sample = [Sample::default(), Sample::default()];
    let before = first.line_ns()?;
    for round in 0..=rounds {
        let mut ours = [0.0; 2];
        for (i, ours) in ours.iter_mut().enumerate() {
            *ours = timed(count, || {
                first.begin(Task { what: SINK + BY_DPDK * i as u64, len: LEN, count });
                stream(&mut side.by[i].small, LEN, (WINDOW, WINDOW), count, true);
                first.finish(|| side.idle())
            })?;
        }
        let raw = timed(count, || {
            first.begin(Task { what: RAW_SINK, len: RAW_LEN, count });
            side.raw.stream(RAW_LEN, count, None);
            first.finish(|| {})
        })?;
        for (i, ours) in ours.into_iter().enumerate().filter(|_| round > 0) {
            pairs[i].push(1e3 / ours, 1e3 / raw);
            sample[i].push(1e3 / ours);
        }
    }
    let after = first.line_ns()?;
    for (i, case) in RATE.into_iter().enumerate() {
        let row = Row::new(case, pairs[i].value(), "M messages/s").spread(&sample[i]);
        let row = with_reference(row, &pairs[i], "raw memif, bursts of 32", rounds);
        report.row(row.placed(before, after));
    }
    Ok(())
}

fn memif_goodput(
    rounds: u64,
    count: u64,
    first: &mut First,
    side: &mut Side,
    report: &mut Report,
) -> BenchResult<()> {
    let payload = RAW_LARGE - 22;
    let frames = count * LARGE as u64 / payload as u64;
    // Each of barewire's against raw frames without a copy and against copied ones.
    let mut pairs = std::array::from_fn::<_, 10, _>(|_| Rounds::default());
    let before = first.line_ns()?;
    for round in 0..=rounds {
        let mut ours = [0.0; 5];
        for (i, ours) in ours.iter_mut().enumerate() {
            *ours = timed(count * LARGE as u64, || {
                let kind = [SINK_LARGE, SINK_LONG, SINK_APART][i / 2];
                let what = kind + BY_DPDK * (i as u64 % 2);
                first.begin(Task { what, len: LARGE, count });
                let ends = &mut side.by[i % 2];
                let end = if kind == SINK_LONG { &mut ends.long } else { &mut ends.large };
                let bufs = if kind == SINK_APART { LARGE_WINDOW } else { 1 };
                stream(end, LARGE, (LARGE_WINDOW, bufs), count, false);
                first.finish(|| side.idle())
            })?;
        }
        for (what, pairs) in [RAW_SINK_LARGE, RAW_SINK_COPY].into_iter().zip(pairs.chunks_mut(5)) {
            let raw = timed(frames * payload as u64, || {
                first.begin(Task { what, len: RAW_LARGE, count: frames });
                let from = (what == RAW_SINK_COPY).then_some(&side.bytes[..]);
                side.raw_large.stream(RAW_LARGE, frames, from);
                first.finish(|| {})
            })?;
            for (ours, pairs) in ours.iter().zip(pairs).filter(|_| round > 0) {
                pairs.push(8.0 / ours, 8.0 / raw);
            }
        }
    }
    let after = first.line_ns()?;
    let references = ["raw memif, frames of 9000 B", "the same, copied in and out"];
    let cases = [GOODPUT, GOODPUT_COPIED];
    for (i, pairs) in pairs.iter().enumerate() {
        let row = Row::new(cases[i / 5][i % 5], pairs.value(), "Gbit/s");
        report.row(with_reference(row, pairs, references[i / 5], rounds).placed(before, after));
    }
    Ok(())
}

/// Nanoseconds for each of `count` operations.
fn timed(count: u64, work: impl FnOnce() -> BenchResult<()>) -> BenchResult<f64> {
    let begun = now_ns();
    work()?;
    Ok((now_ns() - begun) as f64 / count as f64)
}

/// The second process.
fn serve(second: &Second, parent: u32) -> BenchResult<()> {
    second.exchange_station(address(CLIENT, 0));
    let mut side = Side::open(CLIENT, parent)?;
    side.connected()?;
    let work = |side: &mut Side, task: Task| {
        let ends = &mut side.by[(task.what / BY_DPDK) as usize % 2];
        match task.what % BY_DPDK {
            ECHO => echo(&mut ends.small, task.count),
            ECHO_LOSSLESS => echo(&mut ends.lossless, task.count),
            SINK => sink(&mut ends.small, task.len, (WINDOW, WINDOW), task.count),
            SINK_LARGE => sink(&mut ends.large, task.len, (LARGE_WINDOW, 1), task.count),
            SINK_LONG => sink(&mut ends.long, task.len, (LARGE_WINDOW, 1), task.count),
            SINK_APART => sink(&mut ends.large, task.len, (LARGE_WINDOW, LARGE_WINDOW), task.count),
            RAW_ECHO => side.raw.echo(task.count),
            RAW_SINK => side.raw.sink(task.count, None),
            RAW_SINK_LARGE => side.raw_large.sink(task.count, None),
            _ => side.raw_large.sink(task.count, Some(&mut side.bytes)),
        }
        Ok(())
    };
    second.serve(&mut side, Side::idle, work)
}

// ---------------------------------------------------------------------------------------------
// Messages
// ---------------------------------------------------------------------------------------------

/// Half round trips in nanoseconds, the mean of every `chunk` of them.
fn ping_pong(end: &mut RawEnd, count: u64, chunk: u64) -> Vec<f64> {
    let mut chunks = Vec::with_capacity((count / chunk) as usize);
    let mut sends = 0;
    end.recv(0, LEN);
    let mut at = now_ns();
    for i in 1..=count {
        one_way(end, &mut sends, i < count, true);
        if i.is_multiple_of(chunk) {
            let now = now_ns();
            chunks.push((now - at) as f64 / (2 * chunk) as f64);
            at = now;
        }
    }
    while sends > 0 {
        sends -= end.poll().sent;
    }
    chunks
}

/// Sends a message and waits for one, in either order.
#[inline(always)]
fn one_way(end: &mut RawEnd, sends: &mut u64, again: bool, begins: bool) {
    let send = |end: &mut RawEnd, sends: &mut u64| {
        while !end.send(1024, LEN, false) {
            *sends -= end.poll().sent;
        }
        *sends += 1;
    };
    if begins {
        send(end, sends);
    }
    let mut received = 0;
    while received == 0 {
        let new = end.poll();
        received += new.received;
        *sends -= new.sent;
    }
    if !begins {
        send(end, sends);
    }
    if again {
        end.recv(0, LEN);
    }
}

fn echo(end: &mut RawEnd, count: u64) {
    let mut sends = 0;
    end.recv(0, LEN);
    for i in 1..=count {
        one_way(end, &mut sends, i < count, false);
    }
    while sends > 0 {
        sends -= end.poll().sent;
    }
}

/// Sends `count` messages, `window` in flight, from `bufs` buffers; with `more`, all but every
/// sixteenth have `FI_MORE`.
fn stream(end: &mut RawEnd, len: usize, (window, bufs): (u64, u64), count: u64, more: bool) {
    let (mut posted, mut done) = (0, 0);
    while done < count {
        if posted < count && posted - done < window {
            let at = (posted % bufs) as usize * len;
            let more = more && posted % 16 != 15 && posted + 1 < count;
            if end.send(at, len, more) {
                posted += 1;
                continue;
            }
        }
        done += end.poll().sent;
    }
}

fn sink(end: &mut RawEnd, len: usize, (window, bufs): (u64, u64), count: u64) {
    let (mut posted, mut done) = (0, 0);
    while done < count {
        if posted < count && posted - done < window {
            let at = (posted % bufs) as usize * len;
            posted += u64::from(end.recv(at, len));
            continue;
        }
        done += end.poll().received;
    }
}

// ---------------------------------------------------------------------------------------------
// A pair of rings
// ---------------------------------------------------------------------------------------------

/// Commands of the other thread.
const WAIT: u64 = 0;
const OURS: u64 = 1;
const RAW: u64 = 2;
const RAW_COPIED: u64 = 3;
const LINE: u64 = 4;
const END: u64 = 5;

/// The references: a raw loop that returns each packet buffer unchanged, which no application that
/// reads and answers messages can do; and one that copies the bytes out of the packet and the
/// answer's bytes in.
const RINGS: [(&str, &str); 2] = [
    ("ring-64B/raw", "raw net_ring half trip"),
    ("ring-64B/raw-copied", "the same, copied in and out"),
];

/// The other thread: executes the commands in `turn` until the last one.
fn answer(
    turn: &AtomicU64,
    count: u64,
    (far, raw, line): (&mut RawEnd, &mut RawPort, &BouncedLine),
) {
    loop {
        match turn.load(Acquire) {
            WAIT => {
                far.poll();
                continue;
            }
            OURS => echo(far, count),
            RAW => raw.echo(count),
            RAW_COPIED => raw.echo_copied(count),
            LINE => line.answer(),
            _ => return,
        }
        turn.store(WAIT, Release);
    }
}

fn ring(args: &Args, report: &mut Report) -> BenchResult<()> {
    let cpu_pair = CpuPair::find()?;
    let port = |end| format!("dpdk:net_ring_bench{end},pair=bench");
    let (rounds, count) = (args.size(21, 2), args.size(20_000, 500));
    let mut near = RawEnd::open(&port(0), MEMORY)?;
    let [mut raw, mut raw_far] = RawPort::ring_pair(2048)?;
    let (turn, station) = (AtomicU64::new(0), AtomicU64::new(0));
    let line = BouncedLine::default();
    let near_addr = near.addr();
    let mut pairs = [Rounds::default(), Rounds::default()];
    let mut single = Sample::default();
    let mut lines = [0.0; 2];
    std::thread::scope(|scope| -> BenchResult<()> {
        let other = scope.spawn(|| -> BenchResult<()> {
            cpu_pair.pin(1)?;
            let mut far = RawEnd::open(&port(1), MEMORY)?;
            far.connect(near_addr);
            station.store(far.addr().station.word(), Release);
            answer(&turn, count, (&mut far, &mut raw_far, &line));
            Ok(())
        });
        cpu_pair.pin(0)?;
        let far = loop {
            match station.load(Acquire) {
                0 if other.is_finished() => return other.join().map_err(|_| "panic".to_owned())?,
                0 => std::thread::yield_now(),
                station => break Station::from_word(station),
            }
        };
        near.connect(barewire::EpAddr { station: far, incarnation: 0, ..near_addr });
        let wait = |near: &mut RawEnd| {
            while turn.load(Acquire) != WAIT {
                near.poll();
            }
        };
        let probe = |near: &mut RawEnd| {
            turn.store(LINE, Release);
            let ns = line.line_ns();
            wait(near);
            ns
        };
        lines[0] = probe(&mut near);
        for round in 0..=rounds {
            turn.store(OURS, Release);
            let ours: Sample = ping_pong(&mut near, count, CHUNK).into_iter().collect();
            wait(&mut near);
            turn.store(RAW, Release);
            let bare: Sample = raw.ping_pong::<false>(RAW_LEN, count, CHUNK).into_iter().collect();
            wait(&mut near);
            turn.store(RAW_COPIED, Release);
            let copied: Sample = raw.ping_pong::<true>(RAW_LEN, count, CHUNK).into_iter().collect();
            wait(&mut near);
            if round > 0 {
                pairs[0].push(ours.median(), bare.median());
                pairs[1].push(ours.median(), copied.median());
                single.extend(&ours);
            }
        }
        lines[1] = probe(&mut near);
        turn.store(END, Release);
        Ok(())
    })?;
    for ((case, reference), pairs) in
        RINGS.into_iter().zip(&pairs).filter(|((case, _), _)| args.wants(case))
    {
        let row = Row::new(case, pairs.value(), "ns half trip").spread(&single);
        report.row(with_reference(row, pairs, reference, rounds).placed(lines[0], lines[1]));
    }
    Ok(())
}

// ---------------------------------------------------------------------------------------------
// A device that does nothing
// ---------------------------------------------------------------------------------------------

/// Instructions per frame of barewire's port above those of a plain DPDK loop, sent and received
/// one by one and in bursts.
fn null_instructions(args: &Args, report: &mut Report) {
    let (few, many) = (args.size(2000, 100), args.size(22_000, 200));
    for burst in [1, 32] {
        let count = |what| instructions(&format!("{what}-{burst}"), few, many);
        match count("port").and_then(|port| Ok((port, count("raw")?))) {
            Ok((port, raw)) => {
                let [port, raw] = [port, raw].map(|n| n / f64::from(burst));
                let case = match burst {
                    1 => "null-instructions".to_owned(),
                    burst => format!("null-instructions-{burst}"),
                };
                let row = Row::new(case, port - raw, "instr/frame").count(many - few);
                let row = row.against("driver's own", raw, (port - raw) / raw);
                report.row(row.note(format!("{burst} at a time, sent and received: {port:.1}")));
            }
            Err(why) => report.skip("null-instructions", &why),
        }
    }
}

/// Lossless media, on which an endpoint may answer at once, and the segment as their reference.
const MEDIA: [&str; 4] = ["shm", "own-lossless", "ring", "memif-lossless"];

/// The measurements over each medium.
const OVER_MEDIA: [&str; 9] = [
    "round",
    "round-safe",
    "message-1KiB",
    "fadd-u64",
    "add-u64",
    "write-64B",
    "write-1KiB",
    "read-64B",
    "read-1KiB",
];

/// Instructions of both sides together for each measurement over each medium.
fn memory_instructions(args: &Args, report: &mut Report) {
    let (few, many) = (args.size(2000, 100), args.size(12_000, 200));
    for what in OVER_MEDIA {
        let mut segment = None;
        for medium in MEDIA {
            let case = format!("{medium}/{what}");
            let name = format!("{what}-instructions/{medium}");
            if !args.wants(&name) {
                continue;
            }
            match instructions(&case, few, many) {
                Ok(cost) => {
                    let of = *segment.get_or_insert(cost);
                    let row = Row::new(name, cost, "instr").count(many - few);
                    let row = if medium == "shm" { row } else { row.against("shm", of, cost / of) };
                    report.row(row.note(if what.starts_with("round") { "to and fro" } else { "" }));
                }
                Err(why) => report.skip(&name, &why),
            }
        }
    }
}

/// The ports of a medium between two endpoints of this process, without hugepages: a segment, a
/// pair of rings, or a memif, lossy or lossless, by barewire's own port or by DPDK's driver.
fn ports_of(medium: &str) -> [String; 2] {
    let id = std::process::id();
    match medium {
        "shm" => ["a", "b"].map(|_| segment("count")),
        "ring" => ["a", "b"].map(|end| format!("dpdk(huge=no):net_ring_{end},pair=count")),
        "own" | "own-lossless" => ["server", "client"].map(|role| {
            let lossless = if medium == "own" { "no" } else { "yes" };
            format!("memif:@barewire-count-{id},role={role},lossless={lossless}")
        }),
        _ => ["server", "client"].map(|role| {
            let lossless = if medium == "memif" { "no" } else { "yes" };
            let socket = format!("barewire-count-{id}");
            format!(
                "dpdk(huge=no,lossless={lossless}):net_memif_{role},role={role},socket={socket}"
            )
        }),
    }
}

/// Sends messages to and fro, each answered after it has arrived.
#[inline(never)]
fn round_trips<E: End>(pair: &mut [E; 2], count: u64) {
    for _ in 0..count {
        pair.iter_mut().for_each(|end| assert!(end.recv(0, LEN)));
        for from in [0, 1] {
            while !pair[from].send(LEN, LEN, false) {
                pair[from].poll();
            }
            // The sender needs a turn only before the session is open.
            while pair[1 - from].poll().received == 0 {
                pair[from].poll();
            }
        }
    }
}

/// Sends messages one way, sixteen at a time, of which all but the last have `FI_MORE`.
#[inline(never)]
fn sixteens(pair: &mut [RawEnd; 2], count: u64) {
    let [a, b] = pair;
    for _ in 0..count / 16 {
        for i in 0..16 {
            b.recv(i * LEN, LEN);
            while !a.send(i * LEN, LEN, i < 15) {}
        }
        let (mut received, mut sent) = (0, 0);
        while received + sent < 32 {
            received += b.poll().received;
            sent += a.poll().sent;
        }
    }
}

/// Runs measurement `what` over two ports, `count` times.
fn run_over([a, b]: [String; 2], what: &str, count: u64) -> BenchResult<()> {
    let raw = |spec: &str| RawEnd::open(spec, 64 * LEN);
    let safe = |spec: &str| SafeEnd::open(spec, 8, LEN);
    match what {
        "round" | "pack" => {
            let mut pair = joined([raw(&a)?, raw(&b)?]);
            let run = if what == "pack" { sixteens } else { round_trips };
            run(&mut pair, warm_up(count));
            steady(|| run(&mut pair, count));
        }
        "round-safe" => {
            let mut pair = joined([safe(&a)?, safe(&b)?]);
            round_trips(&mut pair, warm_up(count));
            steady(|| round_trips(&mut pair, count));
        }
        _ => return steady_case_on([&a, &b], what, count),
    }
    Ok(())
}

/// Runs the counted `case`, `count` times.
fn run_steady(case: &str, count: u64) -> BenchResult<()> {
    if let Some((medium, what)) = case.split_once('/') {
        return run_over(ports_of(medium), what, count);
    }
    let (what, burst) = case.split_once('-').ok_or("no burst")?;
    let burst: usize = burst.parse().map_err(|e| format!("{burst}: {e}"))?;
    // Without hugepages, which valgrind does not support.
    let mut port = barewire_driver::open::open("dpdk(huge=no):net_null0,size=78")
        .map_err(|e| e.to_string())?;
    if what == "raw" {
        let mut raw = RawPort::open("net_null1", "size=78", 2048)?;
        raw.turn(RAW_LEN, burst);
        steady(|| (0..count).for_each(|_| raw.turn(RAW_LEN, burst)));
        return Ok(());
    }
    let frame = [0x5a; RAW_LEN];
    let mut turn = || {
        for _ in 0..burst {
            let _ = port.tx(&TxFrame::whole(&frame));
        }
        let _ = port.flush();
        let mut sink = |frame: &RxFrame<'_>| {
            std::hint::black_box(frame.len());
        };
        let _ = port.rx_burst(burst, &mut sink);
    };
    turn();
    steady(|| (0..count).for_each(|_| turn()));
    Ok(())
}
