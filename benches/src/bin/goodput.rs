//! Goodput in one direction between two processes: long messages against a memory copy of the same
//! length, and messages over a lossy link against a lossless one.
//!
//! *Lossless* is the plain `shm` port behind a `fault` port without faults: nothing is kept for
//! retransmission there, and most of a session's reliability is inactive. The case `loss-0%` is a
//! port that announces that it may lose frames but loses none: the cost of reliability itself. The
//! notes of the others compare with that case as well: the cost of loss recovery.
//!
//! *Marked* is a router with a link of 100 Mbit/s that marks one random datagram in a hundred
//! (ECN), against the same link without marks, interleaved.
//!
//! *Beside TCP* is that link, shared with the kernel's TCP (Reno, BBR) with unlimited data, against
//! the link's rate.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use barewire_benches::duo::Rounds;
use barewire_benches::end::{BenchResult, Memory};
use barewire_benches::stream::{Stream, WINDOW};
use barewire_benches::{Args, Report};
use barewire_driver::clock::now_ns;
use barewire_tests::nodes::{FABRIC, Nodes};

fn main() {
    let args = Args::read();
    let mut report = Report::new("goodput", &args);
    for (case, len) in [("shm-1MiB", 1 << 20), ("shm-64KiB", 64 << 10)] {
        if args.wants(case) {
            let measured = plain(case, len, &args, &mut report);
            measured.unwrap_or_else(|why| report.skip(case, &why));
        }
    }
    let ip = [0, 1].map(|n| format!("ip(10.78.{n}.7/24,gw=10.78.{n}.1):afpacket:{FABRIC}"));
    let udp = [0, 1].map(|n| format!("udp:10.78.{n}.7"));
    for (case, ports) in [("udp-64KiB-marked", udp), ("ip-64KiB-marked", ip)] {
        if args.wants(case) {
            let measured = marked(case, [&ports[0], &ports[1]], &args, &mut report);
            measured.unwrap_or_else(|why| report.skip(case, &why));
        }
    }
    for (control, connections) in [("reno", 1), ("reno", 4), ("bbr", 1), ("bbr", 4)] {
        let case = format!("udp-64KiB-beside-{connections}-{control}");
        if args.wants(&case) {
            let measured = beside_tcp(&case, (control, connections), &args, &mut report);
            measured.unwrap_or_else(|why| report.skip(&case, &why));
        }
    }
    for percent in ["0", "0.1", "1", "5"] {
        let case = format!("shm-64KiB-loss-{percent}%");
        if args.wants(&case) {
            let measured = lossy(&case, percent, &args, &mut report);
            measured.unwrap_or_else(|why| report.skip(&case, &why));
        }
    }
}

/// The slow link of [`routed`], Gbit/s.
const LINK_GBPS: f64 = 0.1;

/// A router between two hosts, whose link to the second one is slow.
fn routed() -> BenchResult<Nodes> {
    let nodes = Nodes::new(3)?;
    for node in [0, 1] {
        let port = format!("port{node}");
        nodes.veth([(node, FABRIC), (2, &port)], 1500)?;
        nodes.ip(node, &format!("addr add 10.78.{node}.7/24 dev {FABRIC}"))?;
        nodes.ip(2, &format!("addr add 10.78.{node}.1/24 dev {port}"))?;
        nodes.ip(node, &format!("route add default via 10.78.{node}.1"))?;
    }
    nodes.run(2, "sysctl -qw net.ipv4.ip_forward=1")?;
    let rate = LINK_GBPS * 1000.0;
    nodes.run(
        2,
        &format!("tc qdisc add dev port1 root tbf rate {rate}mbit burst 64kb latency 50ms"),
    )?;
    nodes.run(2, "nft add table ip marks")?;
    let hook = "{ type filter hook forward priority 0 ; }";
    nodes.run(2, &format!("nft add chain ip marks ce {hook}"))?;
    Ok(nodes)
}

/// 64 KiB messages from `own` to `other` through a marking router, against the same without marks.
/// The note has the payload's share of the link's rate, the number of dropped datagrams without
/// marks and with, and the number of marked ones.
fn marked(
    case: &str,
    [own, other]: [&str; 2],
    args: &Args,
    report: &mut Report,
) -> BenchResult<()> {
    const LEN: usize = 64 << 10;
    const MARKS: &str = "ip saddr 10.78.0.7 ip ecn ect0 numgen random mod 100 < 1 counter ip ecn \
                         set ce";
    let nodes = routed()?;
    let mut link = Stream::open_between(&nodes, [own, other], LEN)?;
    let (rounds, count) = (args.size(9, 1), args.size(150, 16));
    let mut pairs = Rounds::default();
    let (mut dropped, mut marks) = ([0; 2], 0);
    let seen = |what: &str, word: &str| -> BenchResult<u64> {
        let seen = nodes.run(2, what)?;
        let count = seen.split(word).nth(1).and_then(|rest| rest.split([',', ' ']).next());
        count.and_then(|n| n.parse().ok()).ok_or_else(|| format!("{what} said: {seen}"))
    };
    let lost = || seen("tc -s qdisc show dev port1", "dropped ");
    for round in 0..=rounds {
        let mut rates = [0.0; 2];
        for (marks_it, rate) in rates.iter_mut().enumerate() {
            nodes.run(2, "nft flush chain ip marks ce")?;
            if marks_it > 0 {
                nodes.run(2, &format!("nft add rule ip marks ce {MARKS}"))?;
            }
            let before = lost()?;
            *rate = link.run(count)?;
            // The first round opens the session.
            if round > 0 {
                dropped[marks_it] += lost()? - before;
            }
        }
        if round > 0 {
            marks += seen("nft list chain ip marks ce", "packets ")?;
            pairs.push(rates[1], rates[0]);
        }
    }
    let of_link = |rate: f64| rate * 8.0 / LINK_GBPS;
    let note = format!(
        "{}; {:.3} of the link without marks and {:.3} with; dropped {} and {}, marked {marks}",
        pairs.span(),
        of_link(pairs.reference()),
        of_link(pairs.value()),
        dropped[0],
        dropped[1]
    );
    report.row(pairs.row(case, "GB/s", "unmarked").count(rounds * count).note(note));
    Ok(())
}

/// 64 KiB messages through the router beside TCP connections with a congestion control, against the
/// link's rate. The note has the fair share, and the connections' rate.
fn beside_tcp(
    case: &str,
    (control, connections): (&str, usize),
    args: &Args,
    report: &mut Report,
) -> BenchResult<()> {
    const LEN: usize = 64 << 10;
    let nodes = routed()?;
    nodes.run(0, &format!("sysctl -qw net.ipv4.tcp_congestion_control={control}"))?;
    let mut link = Stream::open_between(&nodes, ["udp:10.78.0.7", "udp:10.78.1.7"], LEN)?;
    let (rounds, count) = (args.size(9, 1), args.size(100, 16));
    let (ends, arrived) = (AtomicBool::new(false), AtomicU64::new(0));
    let said = |why: std::io::Error| format!("TCP: {why}");
    let mut pairs = Rounds::default();
    let mut theirs = 0.0;
    std::thread::scope(|scope| {
        let measured = (|| {
            let (told, listens) = std::sync::mpsc::channel();
            scope.spawn(|| sink(&nodes, connections, &arrived, told));
            listens.recv().map_err(|_| "no TCP listener".to_owned())??;
            for _ in 0..connections {
                let mut stream = TcpStream::connect(SINK).map_err(said)?;
                let ends = &ends;
                scope.spawn(move || {
                    while !ends.load(Ordering::Relaxed) && stream.write_all(&[0; LEN]).is_ok() {}
                });
            }
            // Congestion windows converge.
            link.run(2 * count)?;
            for _ in 0..rounds {
                let (before, from) = (arrived.load(Ordering::Relaxed), now_ns());
                let rate = link.run(count)?;
                let bytes = arrived.load(Ordering::Relaxed) - before;
                theirs += bytes as f64 / (now_ns() - from) as f64 / rounds as f64;
                pairs.push(rate, LINK_GBPS / 8.0);
            }
            Ok(())
        })();
        ends.store(true, Ordering::Relaxed);
        measured
    })
    .map_err(|why: String| why)?;
    let note = format!(
        "{}; a fair part would be {:.2}; TCP got {:.3}",
        pairs.span(),
        1.0 / (connections + 1) as f64,
        theirs * 8.0 / LINK_GBPS
    );
    report.row(pairs.row(case, "GB/s", "the link").count(rounds * count).note(note));
    Ok(())
}

/// Address of [`sink`].
const SINK: &str = "10.78.1.7:5001";

/// Counts the bytes that arrive at the second host over `connections` until all are closed.
fn sink(
    nodes: &Nodes,
    connections: usize,
    arrived: &AtomicU64,
    told: std::sync::mpsc::Sender<BenchResult<()>>,
) {
    let bound = nodes.enter(1).and_then(|()| TcpListener::bind(SINK).map_err(|e| e.to_string()));
    let listener = match bound {
        Ok(listener) => listener,
        Err(why) => {
            let _ = told.send(Err(why));
            return;
        }
    };
    let _ = told.send(Ok(()));
    std::thread::scope(|scope| {
        for stream in listener.incoming().take(connections).flatten() {
            scope.spawn(move || {
                let (mut stream, mut bytes) = (stream, vec![0; 64 << 10]);
                while let Ok(n @ 1..) = stream.read(&mut bytes) {
                    arrived.fetch_add(n as u64, Ordering::Relaxed);
                }
            });
        }
    });
}

/// Messages of `len` bytes against copies of `len` bytes.
fn plain(case: &str, len: usize, args: &Args, report: &mut Report) -> BenchResult<()> {
    let rounds = args.size(15, 2);
    let count = args.size((256 << 20) / len as u64, 64);
    let mut link = open("shm:", case, len)?;
    let (from, to) = (Memory::from_page(len * WINDOW), Memory::from_page(len * WINDOW));
    let before = link.first.line_ns()?;
    let pairs = Rounds::measure(rounds, || {
        let copy = copy_rate(&from, &to, len, count);
        Ok((link.run(count)?, copy))
    })?;
    let row = pairs.row(case, "GB/s", "memcpy").placed(before, link.first.line_ns()?);
    report.row(row.count(rounds * count).note(format!("window {WINDOW}, {}", pairs.span())));
    Ok(())
}

/// 64 KiB messages over a port that drops frames at random, against a lossless one, and, in the
/// note, against one that may lose frames but does not.
///
/// All three are reopened every few rounds: the physical pages of a link's memory make it up to a
/// tenth faster or slower for its lifetime.
fn lossy(case: &str, percent: &str, args: &Args, report: &mut Report) -> BenchResult<()> {
    const LEN: usize = 64 << 10;
    let loss: f64 = percent.parse().map_err(|_| "loss")?;
    let (openings, rounds, count) = (args.size(9, 1), args.size(5, 2), args.size(2000, 32));
    // Less than one frame in the lifetime of a machine.
    let least = 1e-18;
    let loss = if loss > 0.0 { loss / 100.0 } else { least };
    let mut lines = Vec::new();
    let (mut pairs, mut repairs) = (Rounds::default(), Rounds::default());
    for opening in 0..openings {
        let link = |name: &str, loss: f64| {
            let port = format!("fault(loss={loss},seed={}):shm:", 7 + opening);
            open(&port, &format!("{case}-{name}{opening}"), LEN)
        };
        let (mut lossy, mut clean) = (link("a", loss)?, link("b", 0.0)?);
        let mut careful = link("c", least)?;
        lines.push(clean.first.line_ns()?);
        for round in 0..=rounds {
            let reference = clean.run(count)?;
            let value = lossy.run(count)?;
            let whole = careful.run(count)?;
            if round > 0 {
                pairs.push(value, reference);
                repairs.push(value, whole);
            }
        }
        lines.push(clean.first.line_ns()?);
    }
    let row = pairs.row(case, "GB/s", "lossless").placed(lines[0], lines[lines.len() - 1]);
    let whole = format!("{:.3} of what might be lost and is not", repairs.ratio());
    let (low, high) = lines.iter().fold((f64::MAX, 0.0), |(l, h), &n| (n.min(l), n.max(h)));
    let line = format!("line {low:.0} to {high:.0} ns");
    let note = format!("window {WINDOW}, {} in {openings} openings, {line}; {whole}", pairs.span());
    report.row(row.count(openings * rounds * count).note(note));
    Ok(())
}

/// Copies on one core, in GB/s, over as many buffers as the messages use.
fn copy_rate(from: &Memory, to: &Memory, len: usize, count: u64) -> f64 {
    let start = now_ns();
    for i in 0..count as usize {
        let at = i % WINDOW * len;
        let (src, dst) = (from.at(at, len), to.at(at, len));
        // SAFETY: `at` checked that `len` bytes are within each; two allocations do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(src, dst, len) };
        std::hint::black_box(dst);
    }
    (len as u64 * count) as f64 / (now_ns() - start) as f64
}

/// Two processes on the ports `prefix` plus a segment of their own.
fn open(prefix: &str, case: &str, len: usize) -> BenchResult<Stream> {
    let case: String = case.chars().filter(char::is_ascii_alphanumeric).collect();
    let spec = format!("{prefix}bench-{case}-{}", std::process::id());
    Stream::open([&spec; 2], len, None)
}
