//! One-way messages between two network namespaces joined by a veth, through libfabric: the same C
//! program over barewire's ports `udp`, `afpacket`, `ip(...)` and `xdp`, over libfabric's own
//! `tcp`, and through a TCP socket. Bytes or messages a second, and the processor time of both
//! sides.
//!
//! `mtu1500` and `mtu9000` are the MTU of the veth. A veth passes TCP's segments of 64 KiB unsplit
//! (GSO), whatever its MTU; the cases `whole-...` are of a veth without that, as a physical wire.
//!
//! Needs Debian's `libfabric-dev` and `ethtool`, and the provider beside this program (`cargo build
//! --release -p barewire-provider`, which `cargo xtask bench` runs). With `LD_LIBRARY_PATH` of
//! another libfabric all programs use that one.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use barewire_benches::end::BenchResult;
use barewire_benches::{Args, CpuPair, Report, Row, Sample};
use barewire_tests::nodes::{FABRIC, Nodes, address};

/// The veth of the ports that need one to themselves.
const OWN_WIRE: &str = "fab1";

/// The transports, in order.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Transport {
    FiTcp,
    Kernel,
    Udp,
    Afpacket,
    Ip,
    Xdp,
}

use Transport::{Afpacket, FiTcp, Ip, Kernel, Udp, Xdp};

/// The first one is the reference of the others.
const TRANSPORTS: [Transport; 6] = [FiTcp, Kernel, Udp, Afpacket, Ip, Xdp];

impl Transport {
    fn name(self) -> &'static str {
        match self {
            FiTcp => "fi-tcp",
            Kernel => "kernel-tcp",
            Udp => "udp",
            Afpacket => "afpacket",
            Ip => "ip",
            Xdp => "xdp",
        }
    }

    /// The provider that the program requests, and barewire's port at node `me`.
    fn provider_and_port(self, me: usize) -> (&'static str, Option<String>) {
        match self {
            FiTcp => ("tcp;ofi_rxm", None),
            Kernel => ("kernel", None),
            Udp => ("barewire", Some(format!("udp:{FABRIC}"))),
            Afpacket => ("barewire", Some(format!("afpacket:{FABRIC}"))),
            Ip => ("barewire", Some(format!("ip(10.79.0.{}/24):afpacket:{OWN_WIRE}", me + 1))),
            Xdp => ("barewire", Some(format!("xdp:{OWN_WIRE}"))),
        }
    }
}

/// Loads: suffix of the case's name, message length in bytes, messages in flight, number of
/// messages.
const LOADS: [(&str, u64, u64, u64); 3] =
    [("64KiB", 64 << 10, 16, 6_000), ("1MiB", 1 << 20, 16, 400), ("64B", 64, 64, 300_000)];

/// Veths: prefix of the case's name, MTU, and whether it passes segments of TCP and UDP unsplit
/// (GSO).
const WIRES: [(&str, usize, bool); 3] =
    [("mtu1500", 1500, true), ("mtu9000", 9000, true), ("whole-mtu1500", 1500, false)];

/// Time limit of one run, seconds.
const PATIENCE: &str = "60";

fn main() {
    let args = Args::read();
    let mut report = Report::new("streams", &args);
    let stream = match Stream::compiled() {
        Ok(stream) => stream,
        Err(why) => {
            // xtask recognises a skipped benchmark by the first word.
            println!("SKIPPED: {why}");
            return;
        }
    };
    let wires = &WIRES[..args.size(WIRES.len() as u64, 1) as usize];
    for &(wire, mtu, passes_segments) in wires {
        let wanted = |load: &str| {
            TRANSPORTS
                .iter()
                .any(|transport| args.wants(&format!("{wire}/{}-{load}", transport.name())))
        };
        let loads = LOADS.into_iter().filter(|(load, ..)| wanted(load));
        for (load, len, window, count) in loads {
            let count = args.size(count, count / 100 + 1);
            let measured = nodes(mtu, passes_segments)
                .and_then(|nodes| measure(&args, &stream, &nodes, (len, window, count)));
            match measured {
                Ok(measurements) => {
                    let reference = format!("{} of libfabric {}", FiTcp.name(), stream.version);
                    add_rows(
                        &args,
                        &mut report,
                        (wire, load, &reference),
                        (len, count),
                        &measurements,
                    );
                }
                Err(why) => report.skip(&format!("{wire}/{load}"), &why),
            }
        }
    }
}

/// Two nodes with two wires.
fn nodes(mtu: usize, passes_segments: bool) -> BenchResult<Nodes> {
    let nodes = Nodes::pair(mtu)?;
    nodes.veth([(0, OWN_WIRE), (1, OWN_WIRE)], mtu)?;
    if !passes_segments {
        for node in [0, 1] {
            let off = "tso off gso off gro off tx-udp-segmentation off";
            for wire in [FABRIC, OWN_WIRE] {
                nodes.run(node, &format!("ethtool -K {wire} {off}"))?;
            }
        }
    }
    Ok(nodes)
}

/// Of one player by rounds: messages a second, and nanoseconds of a processor a message at the
/// sender and at the receiver.
#[derive(Default)]
struct Measurement {
    rates: Sample,
    ratios: Sample,
    processor: [Sample; 2],
    missing: Option<String>,
}

/// All players by turns.
fn measure(
    args: &Args,
    stream: &Stream,
    nodes: &Nodes,
    load: (u64, u64, u64),
) -> BenchResult<Vec<Measurement>> {
    let mut all: Vec<Measurement> = TRANSPORTS.iter().map(|_| Measurement::default()).collect();
    for _ in 0..args.size(7, 1) {
        let mut reference = 0.0;
        for (transport, measurement) in TRANSPORTS.iter().zip(&mut all) {
            if measurement.missing.is_some() {
                continue;
            }
            match stream.run(nodes, *transport, load) {
                Ok([sender, receiver]) => {
                    let per = |seconds: f64| seconds * 1e9 / load.2 as f64;
                    let rate = load.2 as f64 / sender.0;
                    if *transport == FiTcp {
                        reference = rate;
                    }
                    measurement.rates.push(rate);
                    measurement.ratios.push(rate / reference);
                    measurement.processor[0].push(per(sender.1));
                    measurement.processor[1].push(per(receiver.1));
                }
                // Everybody is set against the first.
                Err(why) if *transport == FiTcp => return Err(why),
                Err(why) => measurement.missing = Some(why),
            }
        }
    }
    Ok(all)
}

fn add_rows(
    args: &Args,
    report: &mut Report,
    (wire, load, reference_name): (&str, &str, &str),
    (len, count): (u64, u64),
    all: &[Measurement],
) {
    let by_bytes = len > 1024;
    let (scale, unit) = if by_bytes { (len as f64 / 1e9, "GB/s") } else { (1e-6, "M/s") };
    for (transport, measurement) in TRANSPORTS.iter().zip(all) {
        let case = format!("{wire}/{}-{load}", transport.name());
        if !args.wants(&case) {
            continue;
        }
        if let Some(why) = &measurement.missing {
            report.skip(&case, why);
            continue;
        }
        let reference = all[0].rates.median() * scale;
        let note = format!(
            "ratios {:.2} to {:.2} in {} rounds; processor {:.0} + {:.0} ns a message",
            measurement.ratios.min(),
            measurement.ratios.quantile(1.0),
            measurement.ratios.len(),
            measurement.processor[0].median(),
            measurement.processor[1].median(),
        );
        let row = Row::new(case, measurement.rates.median() * scale, unit).against(
            reference_name,
            reference,
            measurement.ratios.median(),
        );
        report.row(row.count(count).note(note));
    }
}

/// The program `stream.c`, and the provider that it loads.
struct Stream {
    dir: PathBuf,
    library: PathBuf,
    /// Of the libfabric that it runs with.
    version: String,
}

impl Drop for Stream {
    fn drop(&mut self) {
        // Nothing is left to do if it stays.
        let _ = std::fs::remove_dir_all(&self.dir);
    }
}

impl Stream {
    fn compiled() -> BenchResult<Self> {
        let exe = std::env::current_exe().map_err(|why| format!("own path: {why}"))?;
        let library = exe.parent().unwrap_or(Path::new(".")).to_path_buf();
        if !library.join("libbarewire_fi.so").is_file() {
            return Err("no provider: cargo build --release -p barewire-provider".to_owned());
        }
        if !Path::new("/usr/include/rdma/fabric.h").is_file() {
            return Err("no rdma/fabric.h: sudo apt-get install libfabric-dev".to_owned());
        }
        let dir = std::env::temp_dir().join(format!("barewire-streams-{}", std::process::id()));
        std::fs::create_dir_all(&dir).map_err(|why| format!("{}: {why}", dir.display()))?;
        let mut stream = Self { dir, library, version: String::new() };
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("provider/stream.c");
        let built = Command::new("cc")
            .args(["-std=gnu11", "-O2", "-o"])
            .arg(stream.program())
            .arg(source)
            .arg("-lfabric")
            .output()
            .map_err(|why| format!("cc: {why}: sudo apt-get install gcc"))?;
        if !built.status.success() {
            return Err(String::from_utf8_lossy(&built.stderr).into_owned());
        }
        let told = Command::new(stream.program()).arg("version").output();
        let told = told.map_err(|why| format!("{}: {why}", stream.program().display()))?;
        String::from_utf8_lossy(&told.stdout).trim().clone_into(&mut stream.version);
        Ok(stream)
    }

    fn program(&self) -> PathBuf {
        self.dir.join("stream")
    }

    /// Seconds, and seconds of a processor, of the sender at node 0 and the receiver at node 1.
    fn run(
        &self,
        nodes: &Nodes,
        transport: Transport,
        (len, window, count): (u64, u64, u64),
    ) -> BenchResult<[(f64, f64); 2]> {
        let cpu_pair = CpuPair::find()?;
        let start = |me: usize, role: &str| -> BenchResult<Child> {
            let (provider, port) = transport.provider_and_port(me);
            // One that fails leaves the other waiting.
            let mut command = nodes.command(me, "timeout");
            command.args([PATIENCE, "taskset", "-c", &cpu_pair.cpu(me).to_string()]);
            command.arg(self.program());
            command.arg(provider).args([len, window, count].map(|n| n.to_string()));
            command.args([role, &address(1), "47900"]).env_remove("FI_PROVIDER");
            if let Some(port) = port {
                command.env("FI_BAREWIRE_PORT", port).env("FI_PROVIDER_PATH", &self.library);
            }
            command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().map_err(|why| format!("timeout: {why}"))
        };
        let (receiver, sender) = (start(1, "server")?, start(0, "client")?);
        let said = |child: Child| -> BenchResult<(f64, f64)> {
            let out = child.wait_with_output().map_err(|why| why.to_string())?;
            let line = String::from_utf8_lossy(&out.stdout);
            let mut words = line.split_whitespace().map(str::parse);
            match (words.next(), words.next()) {
                (Some(Ok(seconds)), Some(Ok(used))) => Ok((seconds, used)),
                _ => {
                    let why = String::from_utf8_lossy(&out.stderr);
                    Err(why.lines().next_back().unwrap_or("it said nothing").to_owned())
                }
            }
        };
        let sender = said(sender);
        let receiver = said(receiver);
        Ok([sender?, receiver?])
    }
}
