//! `barewire pingpong` and `barewire bench`: two processes measure what goes between them.
//!
//! A server ([`server`]) waits for clients on a port and serves one after the other, whichever of
//! the two commands they are. A client ([`client`]) says what it wants with [`control`] messages,
//! measures, and prints. With `--spawn` the client starts its own server.

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use barewire::{CollKind, Settings};
use clap::Args;

use crate::cert_args::CertArgs;
use crate::fail::Fail;
pub(crate) use client::host_and_service;
use control::Mode;

mod client;
mod coll;
mod control;
mod link;
mod pattern;
mod remote;
mod report;
mod server;
mod spawn;

/// Measures the latency of messages between two processes, by ping-pong
///
/// Start one side with --listen and the other with the address that it prints, or both at once with
/// --spawn. Reports half the round trip time. Small messages are sent with fi_inject.
#[derive(Args)]
#[command(after_long_help = "\
Exit codes:
  0  every run was measured, and with --verify every byte was right
  1  a side failed, a message did not arrive, or a byte was wrong
  2  wrong arguments

Examples:
  barewire pingpong --spawn                          both sides on this machine
  barewire pingpong --listen                         one side; prints what to run on the other
  barewire pingpong barewire://02:00:00:00:00:01/0   the other side
  barewire pingpong --port udp:eth0 node7            by its host, where both have a udp port
  barewire pingpong --spawn --port 'fault(loss=0.01,seed=7):shm' --size 64k --verify
  barewire pingpong --spawn --json                   one JSON object per line
  barewire pingpong --port udp:eth0 --key-file job.key node7   with sealed frames

Environment:
  BAREWIRE_PORT      the port if --port is not given (default: this user's segment, shm)
  BAREWIRE_KEY_FILE  the key files if --key-file is not given
  BAREWIRE_CERT_FILE, BAREWIRE_CERT_KEY_FILE, BAREWIRE_ROOTS_FILE, BAREWIRE_PEER_IDS
                     likewise for --cert, --cert-key, --roots, --peer-ids")]
pub(crate) struct PingPongArgs {
    #[command(flatten)]
    common: Common,
}

/// Measures messages and bytes per second from one process to another
///
/// Start one side with --listen and the other with the address that it prints, or both at once with
/// --spawn. The client keeps --window messages in flight. The time of a message is from posting
/// to completion; the rate is measured until the server has received them all. With --op the
/// client writes, reads or atomically updates memory of the server instead, or all processes call
/// a collective, whose block has the size given by --size.
#[derive(Args)]
#[command(after_long_help = "\
Exit codes:
  0  every run was measured, and with --verify every byte was right
  1  a side failed, a message did not arrive, or a byte was wrong
  2  wrong arguments

Examples:
  barewire bench --spawn                            both sides on this machine
  barewire bench --spawn --verify --size 64,1m      the server compares every byte
  barewire bench --listen                           one side; prints what to run on the other
  barewire bench barewire://02:00:00:00:00:01/0     the other side
  barewire bench --spawn --window 1 --size 8        no two messages in flight
  barewire bench --spawn --op write --size 64k      into the server's memory
  barewire bench --spawn --op fadd --window 1       one fetch-and-add at a time
  barewire bench --spawn 4 --op allreduce           a sum among four processes

Environment:
  BAREWIRE_PORT      the port if --port is not given (default: this user's segment, shm)
  BAREWIRE_KEY_FILE  the key files if --key-file is not given
  BAREWIRE_CERT_FILE, BAREWIRE_CERT_KEY_FILE, BAREWIRE_ROOTS_FILE, BAREWIRE_PEER_IDS
                     likewise for --cert, --cert-key, --roots, --peer-ids")]
pub(crate) struct BenchArgs {
    #[command(flatten)]
    common: Common,
    /// Messages in flight, 1 to 512.
    #[arg(long, default_value_t = 64)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_WINDOW)))]
    window: u32,
    /// The operation of the client, or the collective that all processes call.
    #[arg(long, value_enum, default_value_t = Op::Send)]
    op: Op,
    /// Internal: this process was started by another one for a collective.
    #[arg(long, hide = true)]
    rank: Option<u32>,
}

/// What a bench measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Op {
    /// Sends messages.
    Send,
    /// Writes to the server's memory; --verify reads the last writes back.
    Write,
    /// Reads the server's memory.
    Read,
    /// Fetch-and-add of 8-byte words in the server's memory.
    Fadd,
    /// Compare-and-swap of 8-byte words in the server's memory.
    Cswap,
    /// Barrier. This and the following operations need --spawn.
    Barrier,
    /// One process's block to all.
    Broadcast,
    /// The sum of all processes' blocks to all.
    Allreduce,
    /// All processes' blocks to all.
    Allgather,
    /// A block from each process to each.
    Alltoall,
    /// The sum of all processes' blocks, one block to each.
    ReduceScatter,
    /// The sum of all processes' blocks to one.
    Reduce,
    /// One process's blocks, one to each.
    Scatter,
    /// All processes' blocks to one.
    Gather,
}

impl Op {
    fn collective(self) -> Option<CollKind> {
        Some(match self {
            Self::Barrier => CollKind::Barrier,
            Self::Broadcast => CollKind::Broadcast,
            Self::Allreduce => CollKind::Allreduce,
            Self::Allgather => CollKind::Allgather,
            Self::Alltoall => CollKind::Alltoall,
            Self::ReduceScatter => CollKind::ReduceScatter,
            Self::Reduce => CollKind::Reduce,
            Self::Scatter => CollKind::Scatter,
            Self::Gather => CollKind::Gather,
            _ => return None,
        })
    }
}

#[derive(Args)]
struct Common {
    /// The listening side: the address that it printed, HOST, or HOST:SERVICE; an IPv6 HOST with a
    /// SERVICE is in brackets. Over shm only the printed address works.
    #[arg(value_name = "ADDR", conflicts_with_all = ["listen", "spawn"])]
    addr: Option<String>,
    /// Waits for clients of pingpong and bench, and prints the address to give them.
    #[arg(long, conflicts_with = "spawn")]
    listen: bool,
    /// Exits after one client.
    #[arg(long, requires = "listen", conflicts_with_all = ["spawn", "addr"])]
    once: bool,
    /// Starts the other side too; for collectives, N processes in total, 2 to 64.
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "2")]
    #[arg(value_parser = clap::value_parser!(u32).range(2..=64))]
    spawn: Option<u32>,
    /// The port, such as shm:job7 or fault(loss=0.01):shm.
    #[arg(long, default_value_t = crate::usual_port())]
    port: String,
    /// File with the pre-shared key of both sides, for a port that leaves the machine; several
    /// separated by colons: the first opens sessions, each of them is accepted.
    #[arg(long, value_name = "FILE", env = "BAREWIRE_KEY_FILE", hide_env = true)]
    key_file: Option<OsString>,
    #[command(flatten)]
    certificate: CertArgs,
    /// Message sizes in bytes, separated by commas; k, m and g stand for 2^10, 2^20, 2^30.
    #[arg(long, value_delimiter = ',', value_parser = parse_size)]
    size: Vec<u64>,
    /// Sends tagged messages.
    #[arg(long)]
    tagged: bool,
    /// Compares every byte that arrives.
    #[arg(long)]
    verify: bool,
    /// Messages to measure for each size, instead of --seconds.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..))]
    iterations: Option<u64>,
    /// Seconds to measure each size, 0.001 to 3600.
    #[arg(long, default_value = "1", value_parser = parse_seconds, conflicts_with = "iterations")]
    seconds: Duration,
    /// Internal: exits when this parent process has ended.
    #[arg(long, hide = true)]
    parent: Option<i32>,
    /// CPU to pin this process to.
    #[arg(long)]
    cpu: Option<usize>,
    /// Prints one JSON object per line.
    #[arg(long)]
    json: bool,
}

/// When the run of a size ends: after so many messages or this time, but not before the first.
#[derive(Clone, Copy, Debug)]
struct Until {
    count: u64,
    time: Duration,
}

impl Common {
    /// Sets the key files, or the certificate.
    ///
    /// # Errors
    /// A certificate lacks a file.
    fn set_keys(&self, settings: &mut Settings) -> Result<(), Fail> {
        settings.key_files = self.key_files();
        settings.certificate = self.certificate.files()?;
        Ok(())
    }

    /// The options that the other side needs for a key or a certificate, as a person completes
    /// them; each with a space behind it.
    fn key_words(&self) -> String {
        let has_cert = self.certificate.named().iter().any(|(_, value)| value.is_some());
        match (&self.key_file, has_cert) {
            (Some(_), _) => "--key-file FILE ".to_owned(),
            (None, true) => "--cert FILE --cert-key FILE --roots FILE ".to_owned(),
            (None, false) => String::new(),
        }
    }

    /// What tells another process of ours the key files.
    fn key_args(&self) -> Vec<OsString> {
        let all = [("--key-file", &self.key_file)].into_iter().chain(self.certificate.named());
        let given = all.filter_map(|(name, value)| Some([name.into(), value.clone()?]));
        given.flatten().collect()
    }

    /// The key files, in order.
    fn key_files(&self) -> Vec<PathBuf> {
        self.key_file.as_ref().map_or(Vec::new(), |files| std::env::split_paths(files).collect())
    }

    fn until(&self) -> Until {
        let by_time = Until { count: u64::MAX, time: self.seconds };
        self.iterations.map_or(by_time, |count| Until { count, time: Duration::MAX })
    }

    fn sizes(&self, default: &[u64]) -> Vec<u64> {
        if self.size.is_empty() { default.to_vec() } else { self.size.clone() }
    }
}

/// Runs `barewire pingpong`.
///
/// # Errors
/// A side failed, or a byte was wrong.
pub(crate) fn pingpong(args: &PingPongArgs) -> Result<ExitCode, Fail> {
    if args.common.spawn.is_some_and(|n| n != 2) {
        return Err(Fail::usage("--spawn N is for collectives: barewire bench --op"));
    }
    run(&args.common, Mode::PingPong, 1, &[8, 64, 1 << 10, 4 << 10, 64 << 10, 1 << 20])
}

/// Runs `barewire bench`.
///
/// # Errors
/// A side failed, or a byte was wrong.
pub(crate) fn bench(args: &BenchArgs) -> Result<ExitCode, Fail> {
    if let Some(call) = args.op.collective() {
        if args.common.spawn.is_none() {
            let name = clap::ValueEnum::to_possible_value(&args.op);
            let name = name.map_or(String::new(), |value| value.get_name().to_owned());
            return Err(Fail::usage(format!("--op {name} needs --spawn N, 2 to 64 processes")));
        }
        let sizes = args.common.sizes(&[8, 1 << 10, 64 << 10]);
        return coll::run(&args.common, call, &sizes, args.rank);
    }
    if args.common.spawn.is_some_and(|n| n != 2) {
        return Err(Fail::usage("--spawn N is for collectives, see --op"));
    }
    let mode = match args.op {
        Op::Send => Mode::Stream,
        Op::Write => Mode::Write,
        Op::Read => Mode::Read,
        Op::Fadd => Mode::Fadd,
        _ => Mode::Cswap,
    };
    if mode.is_one_sided() && args.common.tagged {
        return Err(Fail::usage("--tagged is for messages, not for --op"));
    }
    if matches!(mode, Mode::Fadd | Mode::Cswap) {
        if args.common.size.iter().any(|size| *size != 8) {
            return Err(Fail::usage("--size: the words of --op fadd and cswap have 8 bytes"));
        }
        return run(&args.common, mode, args.window, &[8]);
    }
    run(&args.common, mode, args.window, &[64, 1 << 10, 4 << 10, 64 << 10, 1 << 20])
}

fn run(args: &Common, mode: Mode, window: u32, sizes: &[u64]) -> Result<ExitCode, Fail> {
    if let Some(cpu) = args.cpu {
        stay_on(cpu)?;
    }
    if args.listen {
        return server::run(args);
    }
    if args.addr.is_none() && args.spawn.is_none() {
        return Err(Fail::usage(
            "give --spawn, --listen, or the address that the other side printed",
        ));
    }
    client::run(args, mode, window, &args.sizes(sizes))
}

/// Keeps this thread, and those it starts, on one CPU.
pub(crate) fn stay_on(cpu: usize) -> Result<(), Fail> {
    let fail = |why: nix::Error| {
        let why = match why {
            nix::Error::EINVAL => "no such processor, or none that this process may use",
            _ => why.desc(),
        };
        Fail::usage(format!("--cpu {cpu}: {why}")).mend("nproc says how many there are")
    };
    let mut set = nix::sched::CpuSet::new();
    set.set(cpu).map_err(fail)?;
    nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set).map_err(fail)
}

/// Reads `64`, `4k`, `1m`, `2g`.
pub(crate) fn parse_size(text: &str) -> Result<u64, String> {
    let lower = text.trim().to_ascii_lowercase();
    let shifts = [("k", 10), ("m", 20), ("g", 30)];
    let (digits, shift) = shifts
        .iter()
        .find_map(|(unit, shift)| Some((lower.strip_suffix(unit)?, *shift)))
        .unwrap_or((&lower, 0));
    let number: u64 = digits.parse().map_err(|_| "expected a number such as 64, 4k or 1m")?;
    let bytes = number.checked_mul(1 << shift).filter(|bytes| *bytes <= MAX_SIZE);
    bytes.ok_or_else(|| "at most 8g".to_owned())
}

/// Most messages in flight.
const MAX_WINDOW: u32 = 512;

/// Each side holds at least two buffers of the size.
const MAX_SIZE: u64 = 8 << 30;

fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| "expected a number of seconds")?;
    if !(0.001..=3600.0).contains(&seconds) {
        return Err("expected 0.001 to 3600".to_owned());
    }
    Ok(Duration::from_secs_f64(seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units_and_a_limit() {
        for (text, bytes) in [("0", 0), ("64", 64), ("4k", 4096), ("1M", 1 << 20), ("8g", 8 << 30)]
        {
            assert_eq!(parse_size(text), Ok(bytes));
        }
        for text in ["", "k", "-1", "1.5k", "9g", "1t", "99999999999999999999", "17179869184g"] {
            assert!(parse_size(text).is_err(), "{text}");
        }
    }

    #[test]
    fn seconds_have_limits() {
        assert_eq!(parse_seconds("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "nan", "inf", "4000", "x"] {
            assert!(parse_seconds(text).is_err(), "{text}");
        }
    }
}
