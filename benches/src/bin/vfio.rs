//! Cost of a NIC driver: instructions per received and per sent frame, counted on any machine
//! against a model of the device, whose own work is not counted; and frames between two NICs,
//! beside DPDK's driver of the same NICs, in a virtual machine that has the NICs.

use std::path::Path;
use std::process::{Command, Stdio};
use std::ptr::NonNull;
use std::sync::atomic::AtomicU16;

use barewire_benches::count::{instructions, steady};
use barewire_benches::duo::Rounds;
use barewire_benches::end::BenchResult;
use barewire_benches::{Args, Report, Row, Sample};
use barewire_driver::backend::vfio::VfioPort;
use barewire_driver::backend::vfio::netq::{Doorbell, HDR_LEN, NetQueues, QueueMemory};
use barewire_driver::backend::vfio::nic::NicCaps;
use barewire_driver::backend::vfio::ring::model::{Iommu, VirtqDevice};
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::mem::{Arena, Block, Hugepages};
use barewire_driver::port::{MacAddr, Port, Tx};

/// Buffers per queue, and bytes of a buffer.
const COUNT: u16 = 256;
const STRIDE: usize = 1536;
/// Length of a frame, bytes.
const LEN: usize = 64;

const OWN: MacAddr = MacAddr([2, 0, 0, 0, 0, 1]);
const PEER: MacAddr = MacAddr([2, 0, 0, 0, 0, 2]);

fn main() {
    let args = Args::read_or_run(run_case);
    let mut report = Report::new("vfio", &args);
    let (few, many) = (args.size(3_200, 320), args.size(35_200, 640));
    let cases = [
        ("virtio-instructions", Some("bar 150, aim 100; rx and tx of one frame, bursts of 32")),
        ("virtio-instructions-rx", None),
        ("virtio-instructions-tx", None),
        ("virtio-instructions-alone", None),
    ];
    for (case, bar) in cases.into_iter().filter(|(case, _)| args.wants(case)) {
        match instructions(case, few, many) {
            Ok(n) => {
                let mut row = Row::new(case, n, "instr/frame").count(many - few);
                if let Some(note) = bar {
                    row = row.against("bar", 150.0, n / 150.0).note(note);
                }
                report.row(row);
            }
            Err(why) => report.skip(case, &why),
        }
    }
    beside_dpdk(&args, &mut report);
}

// ---------------------------------------------------------------------------------------------
// In a guest
// ---------------------------------------------------------------------------------------------

/// The NICs, by their names in `cargo xtask vm`, each in its own guest.
const KINDS: [&str; 6] = ["virtio", "e1000e", "igb", FUNCTIONS, "e1000", "vmxnet3"];

/// Virtual functions of an `igb` that the kernel drives.
const FUNCTIONS: &str = "igbvf";

/// Creates four of them, as the guest's `NIC0` to `NIC3`.
const MAKE_FUNCTIONS: &str = "set -e\n\
    ip link set $(ls /sys/bus/pci/devices/$NIC0/net) up\n\
    cd /sys/bus/pci/devices/$NIC0\n\
    echo 0 >sriov_drivers_autoprobe\n\
    echo 4 >sriov_numvfs\n\
    for n in 0 1 2 3; do export NIC$n=$(basename $(readlink virtfn$n)); done\n\
    cd /data\n\
    hugepage-setup.sh --2m 64 --bind $NIC0 $NIC1 $NIC2 $NIC3\n";

/// The cases in the guest, with their units.
const GUEST_CASES: [(&str, &str); 2] =
    [("rtt", "one frame to and fro"), ("rate", "32 frames to and fro")];

/// Frames between two NICs with barewire's drivers and with DPDK's.
fn beside_dpdk(args: &Args, report: &mut Report) {
    for kind in KINDS {
        // The smallest size only shows that the benchmark runs. The kernel of a card with functions
        // boots slowly, and the other guests have shown it.
        let is_shown = args.quick && kind == FUNCTIONS;
        let names = GUEST_CASES.map(|(case, _)| format!("{kind}-{case}/dpdk"));
        if is_shown || !names.iter().any(|name| args.wants(name)) {
            continue;
        }
        let said = in_guest(kind, args);
        for ((case, what), name) in GUEST_CASES.iter().zip(&names) {
            match said.as_ref().map(|said| row(&format!("@@ {case} "), what, name, said)) {
                Ok(Some(row)) => report.row(row),
                Ok(None) => report.skip(name, "the guest said nothing of it"),
                Err(why) => report.skip(name, why),
            }
        }
    }
}

/// The row of a case, from its guest's output lines that begin with `start`.
fn row(start: &str, what: &str, name: &str, said: &str) -> Option<Row> {
    let (mut rounds, mut sample) = (Rounds::default(), Sample::default());
    for line in said.lines().filter_map(|line| line.strip_prefix(start)) {
        let mut rates = line.split(' ').map(|rate| rate.parse::<f64>().unwrap_or(f64::NAN));
        if let (Some(ours), Some(theirs)) = (rates.next(), rates.next()) {
            rounds.push(ours, theirs);
            sample.push(ours);
        }
    }
    if sample.is_empty() {
        return None;
    }
    let (low, high) = rounds.ratio_middle();
    let note = format!("{what}; half of the ratios {low:.2} to {high:.2}; bar 0.95, aim 1.1");
    Some(
        Row::new(name, rounds.value(), "frames/s")
            .against("DPDK's driver", rounds.reference(), rounds.ratio())
            .spread(&sample)
            .note(note),
    )
}

/// Boots a guest with four NICs of a kind and returns its output.
fn in_guest(kind: &str, args: &Args) -> BenchResult<String> {
    let program = std::env::current_exe().map_err(|why| format!("own path: {why}"))?;
    let program = program.with_file_name("vfio-guest");
    if !program.exists() {
        return Err("it was built without DPDK: install libdpdk-dev and libclang-dev, and run \
                    cargo xtask bench vfio"
            .to_owned());
    }
    // DPDK's driver of a vmxnet3 requires this ring length at least. 256 is barewire's default.
    let ring = if kind == "vmxnet3" { 512 } else { 256 };
    let (rounds, trips) = (args.size(41, 2), args.size(200, 20));
    let measure = format!("vfio-guest {rounds} {trips} {ring}");
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(["xtask", "vm", "--no-barewire", "--dpdk", "--limit", "240"]);
    command.arg("--with").arg(program);
    if kind == FUNCTIONS {
        command.args(["--nic", "igb", "--nics", "1", "--no-bind", "--full-kernel"]);
        command.args(["--module", "igb", "--", &format!("{MAKE_FUNCTIONS}{measure}")]);
    } else {
        if kind == "vmxnet3" {
            // QEMU reads address 0, the address of the empty group list in DPDK's driver. The test
            // `vfio` checks barewire's driver for faults.
            command.arg("--allow-faults");
        }
        command.args(["--nic", kind, "--pair", kind, "--", &measure]);
    }
    let ran = command
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(".."))
        .env_remove("CARGO_MANIFEST_DIR")
        .stdin(Stdio::null())
        .output()
        .map_err(|why| format!("cargo does not start: {why}"))?;
    let said = String::from_utf8_lossy(&ran.stdout).into_owned();
    if ran.status.success() {
        return Ok(said);
    }
    let wrong = String::from_utf8_lossy(&ran.stderr).into_owned();
    let of_guest = wrong.lines().find(|line| line.starts_with("the guest did not end"));
    let last = || wrong.lines().chain(said.lines()).rfind(|line| !line.starts_with("@@"));
    Err(of_guest.or_else(last).unwrap_or("the guest did not start").to_owned())
}

// ---------------------------------------------------------------------------------------------
// Over a model
// ---------------------------------------------------------------------------------------------

fn run_case(case: &str, count: u64) -> BenchResult<()> {
    let burst = if case.ends_with("alone") { 1 } else { 32 };
    let mut bench = Bench::new()?;
    // The counted part runs in `steady`; rings and caches have wrapped once by then.
    bench.rounds(u64::from(COUNT) * 3 / burst as u64, burst, false, false);
    let (rx, tx) = (!case.ends_with("-tx"), !case.ends_with("-rx"));
    bench.rounds(count / burst as u64, burst, rx, tx);
    Ok(())
}

/// A port whose device is a model.
struct Bench {
    port: VfioPort<NetQueues>,
    rx: VirtqDevice,
    tx: VirtqDevice,
    iommu: Iommu,
    frame: [u8; LEN],
    _memory: [Block; 2],
    _doorbell: Box<AtomicU16>,
}

impl Bench {
    fn new() -> BenchResult<Self> {
        let queue_len = NetQueues::queue_len(COUNT).next_multiple_of(4096);
        let buffers_len = usize::from(COUNT) * STRIDE;
        let block = |len: usize| -> BenchResult<Block> {
            let arena = Arena::new(len, Hugepages::IfFree).map_err(|e| e.to_string())?;
            arena.block(len).ok_or_else(|| "a new arena has no room".into())
        };
        let (queues, buffers) = (block(2 * queue_len)?, block(2 * buffers_len)?);
        let doorbell = Box::new(AtomicU16::new(0));
        let at = |block: &Block, offset: usize| {
            NonNull::new(block.as_mut_ptr().wrapping_add(offset)).ok_or("no memory")
        };
        let register = NonNull::new(doorbell.as_ptr()).ok_or("no memory")?;
        let memory = |n: usize| -> BenchResult<QueueMemory> {
            Ok(QueueMemory {
                queue: at(&queues, n * queue_len)?,
                count: COUNT,
                buffers: at(&buffers, n * buffers_len)?,
                buffers_iova: (1 + n as u64) << 32,
                stride: STRIDE,
                doorbell: Doorbell { register, queue: n as u16 },
            })
        };
        let (rx, tx) = (memory(0)?, memory(1)?);
        let mut iommu = Iommu::default();
        // SAFETY: both blocks live as long as their users, are zeroed, page aligned, of the
        // requested length, and accessed by the driver and its model only. So is the doorbell.
        let (queues_of_driver, devices) = unsafe {
            iommu.map(rx.buffers_iova, rx.buffers, buffers_len, true);
            iommu.map(tx.buffers_iova, tx.buffers, buffers_len, false);
            let devices = [&rx, &tx].map(|q| VirtqDevice::new(q.queue, COUNT));
            (NetQueues::new(&rx, &tx), devices)
        };
        let facts = NicCaps { mac: OWN, mtu: 1500, link_bps: 0 };
        let [rx, tx] = devices;
        rx.set_kicks(false);
        tx.set_kicks(false);
        let mut frame = [0x5a; LEN];
        frame[..6].copy_from_slice(&PEER.0);
        frame[6..12].copy_from_slice(&OWN.0);
        let port = VfioPort::over(queues_of_driver, facts, "model");
        let memory = [queues, buffers];
        Ok(Self { port, rx, tx, iommu, frame, _memory: memory, _doorbell: doorbell })
    }

    /// Receives and sends `burst` frames, `count` times.
    fn rounds(&mut self, count: u64, burst: usize, count_rx: bool, count_tx: bool) {
        for _ in 0..count {
            self.deliver(burst);
            let got = if count_rx { steady(|| self.receive(burst)) } else { self.receive(burst) };
            assert_eq!(got, burst);
            if count_tx {
                steady(|| self.send(burst));
            } else {
                self.send(burst);
            }
            self.complete(burst);
        }
    }

    #[inline(never)]
    fn receive(&mut self, burst: usize) -> usize {
        let mut sum = 0_u64;
        let mut sink = |f: &RxFrame<'_>| {
            sum = sum.wrapping_add(f.chunk_at(14).map_or(0, u64::from_le_bytes));
        };
        let got = self.port.rx_burst(burst, &mut sink);
        std::hint::black_box(sum);
        got.unwrap_or(0)
    }

    #[inline(never)]
    fn send(&mut self, burst: usize) {
        for _ in 0..burst {
            let sent = self.port.tx(&TxFrame::whole(&self.frame));
            assert_eq!(sent, Ok(Tx::Sent));
        }
        assert_eq!(self.port.flush(), Ok(()));
    }

    /// The device's part of a receive.
    fn deliver(&mut self, burst: usize) {
        let mut frame = self.frame;
        frame[..6].copy_from_slice(&OWN.0);
        for _ in 0..burst {
            let Some(id) = self.rx.next_id() else { return };
            let desc = self.rx.desc(id);
            self.iommu.write(desc.addr + HDR_LEN as u64, &frame);
            self.rx.used(id.into(), (HDR_LEN + LEN) as u32);
        }
    }

    /// The device's part of a transmit.
    fn complete(&mut self, burst: usize) {
        let mut frame = [0; LEN];
        for _ in 0..burst {
            let Some(id) = self.tx.next_id() else { return };
            let desc = self.tx.desc(id);
            self.iommu.read(desc.addr + HDR_LEN as u64, &mut frame);
            assert_eq!(frame, self.frame, "a frame was sent changed");
            self.tx.used(id.into(), 0);
        }
    }
}
