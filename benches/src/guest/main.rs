//! The program of the benchmark `vfio` in its virtual machine: frames between two NICs with
//! barewire's driver, and between two of the same kind with DPDK's, interleaved.
//!
//! One thread runs both ends, since the emulated NICs need the host's other processor. Both drivers
//! do the same work: the sender copies each frame from memory of its own, the receiver reads a
//! number in each frame, and both poll without a pause.
//!
//! `vfio-guest ROUNDS TRIPS RING`: of the four NICs `NIC0` to `NIC3` in the environment barewire
//! drives the first two. Prints a line `@@ CASE OURS DPDK`, in frames a second, for every round.

#[path = "../dpdk/raw.rs"]
#[allow(dead_code, reason = "the bench dpdk uses more of it")]
mod raw;

use std::ffi::{CString, c_char};
use std::process::ExitCode;
use std::ptr::null_mut;
use std::time::{Duration, Instant};

use barewire_benches::Sample;
use barewire_benches::end::BenchResult;
use barewire_dpdk_sys as sys;
use barewire_driver::frame::{ETHERTYPE, RxFrame, TxFrame};
use barewire_driver::open::open;
use barewire_driver::port::{Port, Station, Tx};
use raw::{BURST, RawPort};

/// Length of a frame, bytes.
const LEN: usize = 64;

/// Trips per timed chunk.
const CHUNK: u64 = 10;

/// Timeout of a trip.
const PATIENCE: Duration = Duration::from_secs(20);

/// The cases, and the frames in flight in each.
const CASES: [(&str, usize); 2] = [("rtt", 1), ("rate", BURST)];

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("{why}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> BenchResult<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let numbers = args.iter().map(|n| n.parse::<u64>().map_err(|e| e.to_string()));
    let numbers = numbers.collect::<BenchResult<Vec<u64>>>()?;
    let [rounds, trips, ring] = numbers[..] else {
        return Err("vfio-guest ROUNDS TRIPS RING".to_owned());
    };
    let ring = u16::try_from(ring).map_err(|e| e.to_string())?;
    let nic = |n: usize| std::env::var(format!("NIC{n}")).map_err(|e| format!("NIC{n}: {e}"));
    let [a, b, c, d] = [nic(0)?, nic(1)?, nic(2)?, nic(3)?];
    start_dpdk([&c, &d])?;
    let mut own = Pair::of([BarewirePort::open(&a, ring)?, BarewirePort::open(&b, ring)?]);
    let mut dpdk = Pair::of([DpdkPort::open(&c, ring)?, DpdkPort::open(&d, ring)?]);
    for (case, burst) in CASES {
        // Round 0 warms up.
        for round in 0..=rounds {
            let [mut mine, mut other] = [0.0; 2];
            // The order alternates between rounds.
            for turn in 0..2 {
                if (round + turn) % 2 == 0 {
                    mine = own.rate(burst, trips).map_err(|why| format!("ours: {why}"))?;
                } else {
                    other = dpdk.rate(burst, trips).map_err(|why| format!("DPDK's: {why}"))?;
                }
            }
            if round > 0 {
                println!("@@ {case} {mine:.1} {other:.1}");
            }
        }
    }
    Ok(())
}

/// Initializes DPDK with these NICs, in this thread.
fn start_dpdk(nics: [&String; 2]) -> BenchResult<()> {
    let mut args = vec!["vfio-guest", "-l", "0", "-n", "1", "--in-memory", "--no-telemetry"];
    args.extend(["--iova-mode", "va", "--log-level", "warning"]);
    args.extend(nics.into_iter().flat_map(|nic| ["-a", nic]));
    let args: Vec<CString> = args.into_iter().filter_map(|arg| CString::new(arg).ok()).collect();
    let mut argv: Vec<*mut c_char> = args.iter().map(|arg| arg.as_ptr().cast_mut()).collect();
    // SAFETY: `rte_eal_init` reads and may permute `argc` pointers to strings, which live across
    // the call and are not written to. Called once.
    match unsafe { sys::rte_eal_init(argv.len() as i32, argv.as_mut_ptr()) } {
        0.. => Ok(()),
        _ => Err("DPDK does not start".to_owned()),
    }
}

/// A NIC with its driver.
trait End {
    fn station(&self) -> Station;

    /// Whether the link is up.
    fn is_up(&self) -> bool {
        true
    }

    /// Sends `frame` for each of `numbers`, which is written behind its header.
    fn send(&mut self, frame: &mut [u8; LEN], numbers: std::ops::Range<u64>);

    /// Receives waiting frames and adds up their numbers. Returns the number of frames.
    fn receive(&mut self, sum: &mut u64) -> usize;
}

fn set_number(frame: &mut [u8; LEN], number: u64) {
    frame[14..22].copy_from_slice(&number.to_ne_bytes());
}

/// barewire's driver.
struct BarewirePort(Box<dyn Port>);

impl BarewirePort {
    fn open(nic: &str, ring: u16) -> BenchResult<Self> {
        let port = open(&format!("vfio:{nic},rx={ring},tx={ring}")).map_err(|e| e.to_string())?;
        Ok(Self(port))
    }
}

impl End for BarewirePort {
    fn station(&self) -> Station {
        self.0.caps().station
    }

    fn send(&mut self, frame: &mut [u8; LEN], numbers: std::ops::Range<u64>) {
        for number in numbers {
            set_number(frame, number);
            while self.0.tx(&TxFrame::whole(frame)) == Ok(Tx::Full) {}
        }
        // A port that is gone receives no frame, which the caller notices.
        let _ = self.0.flush();
    }

    fn receive(&mut self, sum: &mut u64) -> usize {
        let mut sink = |frame: &RxFrame<'_>| {
            *sum += frame.chunk_at(14).map_or(0, u64::from_ne_bytes);
        };
        self.0.rx_burst(BURST, &mut sink).unwrap_or(0)
    }
}

/// DPDK's driver.
struct DpdkPort(RawPort);

impl DpdkPort {
    fn open(nic: &str, ring: u16) -> BenchResult<Self> {
        RawPort::probed(nic, ring, 2048).map(Self)
    }
}

impl End for DpdkPort {
    fn station(&self) -> Station {
        let mut mac = sys::rte_ether_addr { addr_bytes: [0; 6] };
        // SAFETY: a port that is there, and room for its address.
        unsafe { sys::rte_eth_macaddr_get(self.0.port, &mut mac) };
        Station::at(mac.addr_bytes)
    }

    fn is_up(&self) -> bool {
        self.0.is_up()
    }

    fn send(&mut self, frame: &mut [u8; LEN], numbers: std::ops::Range<u64>) {
        let mut mbufs = [null_mut(); BURST];
        let mbufs = &mut mbufs[..(numbers.end - numbers.start) as usize];
        self.0.alloc(mbufs);
        for (&mut mbuf, number) in mbufs.iter_mut().zip(numbers) {
            set_number(frame, number);
            // SAFETY: a fresh packet buffer of this process, with room for 2048 bytes.
            unsafe {
                (*mbuf).data_len = LEN as u16;
                (*mbuf).pkt_len = LEN as u32;
                std::ptr::copy_nonoverlapping(frame.as_ptr(), raw::data(mbuf), LEN);
            }
        }
        self.0.send(mbufs);
    }

    fn receive(&mut self, sum: &mut u64) -> usize {
        self.0.receive(|_, mbuf| {
            // SAFETY: a received packet of this process, freed here.
            unsafe {
                *sum += raw::data(mbuf).add(14).cast::<u64>().read_unaligned();
                sys::rte_pktmbuf_free(mbuf);
            }
        })
    }
}

/// Two NICs on one hub, and the traffic between them.
struct Pair<E> {
    ends: [E; 2],
    frames: [[u8; LEN]; 2],
    /// Frames sent so far.
    count: u64,
}

impl<E: End> Pair<E> {
    fn of(ends: [E; 2]) -> Self {
        let [a, b] = [ends[0].station(), ends[1].station()];
        let frames = [(b, a), (a, b)].map(|(dst, src)| {
            let mut frame = [0x5a; LEN];
            frame[..6].copy_from_slice(&dst.mac.0);
            frame[6..12].copy_from_slice(&src.mac.0);
            frame[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
            frame
        });
        Self { ends, frames, count: 0 }
    }

    /// Sends `burst` frames to and fro `trips` times. Returns the frames received a second in the
    /// median chunk: the host sometimes preempts a processor of the guest.
    fn rate(&mut self, burst: usize, trips: u64) -> BenchResult<f64> {
        let start = Instant::now();
        while !self.ends.iter().all(End::is_up) {
            late(start, "there is no link")?;
        }
        let mut chunks = Sample::with_capacity((trips / CHUNK) as usize);
        for _ in 0..trips / CHUNK {
            let start = Instant::now();
            for _ in 0..CHUNK {
                self.one_way(0, burst)?;
                self.one_way(1, burst)?;
            }
            chunks.push((2 * CHUNK * burst as u64) as f64 / start.elapsed().as_secs_f64());
        }
        Ok(chunks.median())
    }

    fn one_way(&mut self, from: usize, burst: usize) -> BenchResult<()> {
        let numbers = self.count..self.count + burst as u64;
        let expected: u64 = numbers.clone().sum();
        self.count = numbers.end;
        self.ends[from].send(&mut self.frames[from], numbers);
        let (mut got, mut sum) = (0, 0);
        let mut looks = 0_u64;
        let mut start = None;
        while got < burst {
            got += self.ends[1 - from].receive(&mut sum);
            looks += 1;
            // Reading the clock may cost as much as many polls.
            if looks.is_multiple_of(1 << 16) {
                late(*start.get_or_insert_with(Instant::now), "a frame was lost")?;
            }
        }
        if got == burst && sum == expected {
            Ok(())
        } else {
            Err("a frame came changed".to_owned())
        }
    }
}

fn late(start: Instant, what: &str) -> BenchResult<()> {
    if start.elapsed() < PATIENCE { Ok(()) } else { Err(what.to_owned()) }
}
