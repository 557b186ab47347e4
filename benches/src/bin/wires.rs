//! Half round trip of 64 bytes between two network namespaces joined by a veth: the fabric's ports
//! `afpacket` and `udp` against raw sockets on the same wire, the kernel's UDP and TCP, and
//! libfabric's `fi_pingpong` over its tcp and udp providers. The port `xdp`, which changes how a
//! veth works, uses two more veths, with and without the fabric; `ip(...)` around `afpacket`, and
//! plain `afpacket`, use one each, where no other socket receives their frames.
//!
//! All transports are measured in interleaved rounds, on the same two processors, with busy
//! polling; every round measures the round trip of a cache line before and after. Only rounds that
//! begin and end in the most common state are compared (*alike* in the output; *unlike* if there is
//! none). On a machine with other load run it with real-time priority: `chrt -r 50
//! target/release/wires`.

use std::net::SocketAddr;
use std::process::Command;

use barewire::EpAddr;
use barewire_benches::duo::{First, Second, Task, start};
use barewire_benches::end::{BenchResult, End};
use barewire_benches::wires::{
    Absent, Fabric, LEN, Pingpong, Raw, Ring, Socket, Tcp, Udp, Wire, ping, pong,
};
use barewire_benches::{Args, CpuPair, Report, Row, Sample, median};
use barewire_driver::backend::udp::mac_of;
use barewire_driver::port::Station;
use barewire_tests::nodes::{FABRIC, Nodes, address};

/// The transports, in order; the second process identifies them by number.
const AFPACKET: usize = 0;
const SOCKET: usize = 1;
const RING: usize = 2;
const KERNEL_UDP: usize = 3;
const KERNEL_TCP: usize = 4;
const UDP: usize = 5;
const XDP: usize = 6;
const XDP_PORT: usize = 7;
const IP: usize = 8;
const ALONE: usize = 9;
const OURS: usize = 10;
/// Programs of libfabric, after this benchmark's own transports.
const FI_TCP: usize = 10;
const FI_RXD: usize = 11;
const PLAYERS: usize = 12;

const NAMES: [&str; PLAYERS] = [
    "afpacket-64B",
    "raw-socket-64B",
    "raw-ring-64B",
    "kernel-udp-64B",
    "kernel-tcp-64B",
    "udp-64B",
    "xdp-64B",
    "xdp-port-64B",
    "ip-64B",
    "alone-64B",
    "fi-tcp-64B",
    "fi-rxd-64B",
];

/// Case, transport, and reference.
const CASES: [(&str, usize, usize); 11] = [
    ("afpacket-64B/raw", AFPACKET, SOCKET),
    ("afpacket-64B/raw-ring", AFPACKET, RING),
    ("afpacket-64B/tcp", AFPACKET, FI_TCP),
    ("afpacket-64B/rxd", AFPACKET, FI_RXD),
    ("afpacket-64B/kernel-udp", AFPACKET, KERNEL_UDP),
    ("afpacket-64B/kernel-tcp", AFPACKET, KERNEL_TCP),
    ("udp-64B/kernel-udp", UDP, KERNEL_UDP),
    ("xdp-64B/port", XDP, XDP_PORT),
    ("xdp-64B/afpacket", XDP, AFPACKET),
    ("xdp-64B/tcp", XDP, FI_TCP),
    ("ip-64B/afpacket", IP, ALONE),
];

const PROGRAMS: [Pingpong; 2] = [
    Pingpong { provider: "tcp", control: 47_700 },
    Pingpong { provider: "udp;ofi_rxd", control: 47_800 },
];

/// Round trips per timed chunk.
const CHUNK: u64 = 50;

/// UDP port of the port `udp` at both ends.
const UDP_PORT: u16 = 50_000;

/// Interfaces of the fabric on `xdp`, and of the port alone.
const XDP_WIRES: [&str; 2] = ["fab1", "fab2"];

/// Interface of `ip(...)` around `afpacket`, whose addresses the kernel does not have, and of plain
/// `afpacket`.
const OWN_WIRES: [&str; 2] = ["fab3", "fab4"];

/// Largest factor between the cache line's round trip in a round and the usual one: less than the
/// difference between processors that share a cache and those that do not.
const ALIKE: f64 = 1.5;

fn main() {
    let args = Args::read();
    let mut report = Report::new("wires", &args);
    if let Err(why) = measure(&args, &mut report) {
        // xtask recognises a skipped benchmark by the first word.
        println!("SKIPPED: {why}");
    }
}

fn measure(args: &Args, report: &mut Report) -> BenchResult<()> {
    let nodes = Nodes::pair(1500)?;
    for name in XDP_WIRES.into_iter().chain(OWN_WIRES) {
        nodes.veth([(0, name), (1, name)], 1500)?;
    }
    let mut first = start(|second| serve(second, &nodes))?;
    nodes.enter(0)?;
    let mut players = open(0, |station| first.exchange_station(station))?;
    let rounds = Rounds::play(args, &mut first, &mut players, &nodes)?;
    rounds.add_rows(args, report);
    Ok(())
}

/// Whether a transport, or a case with it, was requested.
fn wanted(args: &Args, who: usize) -> bool {
    let plays =
        |case: &&(&str, usize, usize)| args.wants(case.0) && [case.1, case.2].contains(&who);
    args.wants(NAMES[who]) || CASES.iter().any(|case| plays(&case))
}

fn at(node: usize, port: u16) -> BenchResult<SocketAddr> {
    format!("{}:{port}", address(node)).parse().map_err(|e| format!("{e}"))
}

/// The ends of node `me`, whose namespace was entered. `exchange_station` exchanges stations.
fn open(
    me: usize,
    mut exchange_station: impl FnMut(Station) -> Station,
) -> BenchResult<Vec<Box<dyn Wire>>> {
    let mut afpacket = Fabric::open(&format!("afpacket:{FABRIC}"))?;
    let station = exchange_station(afpacket.0.addr().station);
    afpacket.0.connect(EpAddr { station, incarnation: 0, ..afpacket.0.addr() });
    let mut udp = Fabric::open(&format!("udp:{FABRIC}:{UDP_PORT}"))?;
    // The address follows from the node's number.
    let remote = format!("{}:{UDP_PORT}", address(1 - me)).parse().map_err(|e| format!("{e}"))?;
    let station = mac_of(remote).ok_or("a place without an address")?;
    udp.0.connect(EpAddr { station: station.into(), incarnation: 0, ..udp.0.addr() });
    let (here, there) = (at(me, 40_000)?, at(1 - me, 40_000)?);
    let tcp = if me == 1 { Tcp::listen(here)? } else { Tcp::connect(there)? };
    let own = [
        format!("ip(10.79.0.{}/24):afpacket:{}", me + 1, OWN_WIRES[0]),
        format!("afpacket:{}", OWN_WIRES[1]),
    ];
    let [mut ip, mut alone] = [Fabric::open(&own[0])?, Fabric::open(&own[1])?];
    for fabric in [&mut ip, &mut alone] {
        let station = exchange_station(fabric.0.addr().station);
        fabric.0.connect(EpAddr { station, incarnation: 0, ..fabric.0.addr() });
    }
    let [xdp, xdp_port] = xdp(exchange_station)?;
    Ok(vec![
        Box::new(afpacket),
        Box::new(Socket::open(FABRIC)?),
        Box::new(Ring::open(FABRIC)?),
        Box::new(Udp::open(here, there)?),
        Box::new(tcp),
        Box::new(udp),
        xdp,
        xdp_port,
        Box::new(ip),
        Box::new(alone),
    ])
}

/// The port `xdp` under the fabric, and alone, if both nodes may open it: both need the same
/// rights.
fn xdp(mut exchange_station: impl FnMut(Station) -> Station) -> BenchResult<[Box<dyn Wire>; 2]> {
    let [spec, alone] = XDP_WIRES.map(|name| format!("xdp:{name}"));
    if let Err(why) = barewire_driver::open::check(&spec) {
        println!("SKIPPED: {why}");
        return Ok([Box::new(Absent), Box::new(Absent)]);
    }
    let mut fabric = Fabric::open(&spec)?;
    let station = exchange_station(fabric.0.addr().station);
    fabric.0.connect(EpAddr { station, incarnation: 0, ..fabric.0.addr() });
    Ok([Box::new(fabric), Box::new(Raw::open(&alone)?)])
}

/// The second process.
fn serve(second: &Second, nodes: &Nodes) -> BenchResult<()> {
    nodes.enter(1)?;
    let mut players = open(1, |station| second.exchange_station(station))?;
    second.serve(
        &mut players,
        |players| players.iter_mut().for_each(|player| player.idle()),
        |players, task| pong(&mut *players[task.what as usize], task.count),
    )
}

/// One round: half round trip of each transport (0 if not measured), and the cache line's round
/// trip before and after.
struct Round {
    ns: [f64; PLAYERS],
    line: [f64; 2],
}

struct Rounds {
    rounds: Vec<Round>,
    singles: Vec<Sample>,
    /// Why a libfabric program was not measured.
    missing: [Option<String>; 2],
}

impl Rounds {
    fn play(
        args: &Args,
        first: &mut First,
        players: &mut [Box<dyn Wire>],
        nodes: &Nodes,
    ) -> BenchResult<Self> {
        let count = args.size(4_000, 200);
        let mut all = Self {
            rounds: Vec::new(),
            singles: vec![Sample::default(); PLAYERS],
            missing: [None, None],
        };
        // The first round opens sessions and touches memory.
        for round in 0..=args.size(25, 1) {
            let before = first.line_ns()?;
            let mut ns = [0.0; PLAYERS];
            let plays = |what: &usize| wanted(args, *what) && players[*what].is_there();
            for what in (0..OURS).filter(plays).collect::<Vec<_>>() {
                let task = |count| Task { what: what as u64, len: LEN, count };
                first.begin(task(count));
                let chunks = ping(&mut *players[what], count, CHUNK)?;
                first.finish(|| players[what].idle())?;
                first.begin(task(count / 4));
                let single = ping(&mut *players[what], count / 4, 1)?;
                first.finish(|| players[what].idle())?;
                ns[what] = chunks.median();
                if round > 0 {
                    all.singles[what].extend(&single);
                }
            }
            all.programs(args, first, nodes, &mut ns)?;
            let line = [before, first.line_ns()?];
            if round > 0 {
                all.rounds.push(Round { ns, line });
            }
        }
        Ok(all)
    }

    /// Runs the libfabric programs that are available.
    fn programs(
        &mut self,
        args: &Args,
        first: &First,
        nodes: &Nodes,
        ns: &mut [f64; PLAYERS],
    ) -> BenchResult<()> {
        let cpu_pair = CpuPair::find()?;
        let count = args.size(4_000, 100);
        first.pause();
        for (i, program) in PROGRAMS.iter().enumerate() {
            if self.missing[i].is_some() || !wanted(args, OURS + i) {
                continue;
            }
            let on = |node: usize| -> Command {
                let mut command = nodes.command(node, "taskset");
                command.args(["-c", &cpu_pair.cpu(node).to_string(), "fi_pingpong"]);
                command
            };
            match program.run(on(1), on(0), &address(1), count) {
                Ok(half) => ns[OURS + i] = half,
                Err(why) => self.missing[i] = Some(why),
            }
        }
        first.resume();
        Ok(())
    }

    /// The rounds that begin and end in the most common state of the two processors, and their
    /// label; all rounds, if the state changed in each of them.
    fn comparable(&self) -> (Vec<&Round>, &'static str) {
        let usual = median(self.rounds.iter().flat_map(|r| r.line));
        let is_alike = |ns: &f64| *ns < usual * ALIKE && usual < *ns * ALIKE;
        let alike: Vec<&Round> =
            self.rounds.iter().filter(|r| r.line.iter().all(is_alike)).collect();
        if alike.is_empty() { (self.rounds.iter().collect(), "unlike") } else { (alike, "alike") }
    }

    fn add_rows(&self, args: &Args, report: &mut Report) {
        let (rounds, state) = self.comparable();
        let played = |who: usize| rounds.iter().filter(move |r| r.ns[who] > 0.0);
        let line = |i: usize| median(rounds.iter().map(|r| r.line[i]));
        for (who, name) in NAMES.iter().enumerate().filter(|(_, name)| args.wants(name)) {
            let value = median(played(who).map(|r| r.ns[who]));
            if value == 0.0 {
                continue;
            }
            let spread = match self.singles[who].is_empty() {
                true => played(who).map(|r| r.ns[who]).collect(),
                false => self.singles[who].clone(),
            };
            let row = Row::new(*name, value, "ns half trip").spread(&spread);
            report.row(row.placed(line(0), line(1)));
        }
        for (case, who, against) in CASES.iter().filter(|case| args.wants(case.0)) {
            let both = || played(*who).filter(|r| r.ns[*against] > 0.0);
            if both().next().is_none() {
                let why = against.checked_sub(OURS).and_then(|i| self.missing[i].clone());
                report.skip(case, &why.unwrap_or_else(|| "not played".to_owned()));
                continue;
            }
            let ratios: Sample = both().map(|r| r.ns[*who] / r.ns[*against]).collect();
            let (value, reference) =
                (median(both().map(|r| r.ns[*who])), median(both().map(|r| r.ns[*against])));
            let note = format!(
                "ratios {:.2} to {:.2} in {} of {} rounds, {state}",
                ratios.min(),
                ratios.quantile(1.0),
                ratios.len(),
                self.rounds.len()
            );
            let row = Row::new(*case, value, "ns half trip")
                .against(NAMES[*against], reference, ratios.median())
                .placed(line(0), line(1));
            report.row(row.note(note));
        }
    }
}
