//! DPDK's runtime (EAL): initialised once per process, in a thread of its own.
//!
//! `rte_eal_init` pins the calling thread, so a thread of this crate calls it, and the
//! application's threads keep their affinity. That thread then executes all device operations, one
//! after the other; only bursts run in other threads.
//!
//! EAL's log is redirected to a file in memory. Its lines go to the tracing log, and into the error
//! of a failed operation.

use std::ffi::{CStr, CString, c_char};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};

use barewire_dpdk_sys as sys;
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{SigSet, Signal};

use super::failure::{Failure, errno};
use super::{irq_guard, listener};
use crate::mem::Hugepages;
use crate::own_thread::without_signals;
use crate::setup;

/// The running EAL.
pub(super) struct Eal {
    jobs: Mutex<Sender<Job>>,
}

type Job = Box<dyn FnOnce() + Send>;

static EAL: OnceLock<Result<Eal, Failure>> = OnceLock::new();

/// Memory in MiB that EAL reserves at its start without hugepages, when it cannot grow later. Only
/// used pages are touched.
const PLAIN_MIB: usize = 512;

/// Minimum of free hugepages to use them, bytes: one port's mbufs.
const HUGE_MIN: u64 = 32 << 20;

/// Initialises EAL, or returns the running one.
///
/// # Errors
/// It did not start, now or at the first attempt: a process can try only once.
pub(super) fn start(hugepages: Hugepages) -> Result<&'static Eal, Failure> {
    let begun = EAL.get().is_some();
    let huge = if begun { true } else { use_hugepages(hugepages)? };
    EAL.get_or_init(|| Eal::launch(huge)).as_ref().map_err(Clone::clone)
}

/// Whether EAL uses hugepages.
fn use_hugepages(wanted: Hugepages) -> Result<bool, Failure> {
    if wanted == Hugepages::No {
        return Ok(false);
    }
    let free = free_huge_len();
    if free >= HUGE_MIN {
        return Ok(true);
    }
    let setup = setup::command();
    let mend = format!("sudo {setup} --2m 512, or sudo sysctl vm.nr_hugepages=512");
    if wanted == Hugepages::Required {
        let why = format!("{} MiB of hugepages are free, DPDK needs 32", free >> 20);
        return Err(Failure::new(libc::ENOMEM, why).mend(mend));
    }
    let free = free >> 20;
    tracing::warn!("DPDK runs in ordinary pages: {free} MiB of hugepages are free; {mend}");
    Ok(false)
}

/// Bytes of free hugepages of all sizes.
fn free_huge_len() -> u64 {
    let dirs = std::fs::read_dir("/sys/kernel/mm/hugepages").into_iter().flatten().flatten();
    let free_in = |dir: std::fs::DirEntry| {
        let name = dir.file_name().into_string().ok()?;
        let kib: u64 = name.strip_prefix("hugepages-")?.strip_suffix("kB")?.parse().ok()?;
        let free = std::fs::read_to_string(dir.path().join("free_hugepages")).ok()?;
        Some(kib * 1024 * free.trim().parse::<u64>().ok()?)
    };
    dirs.filter_map(free_in).sum()
}

impl Eal {
    fn launch(huge: bool) -> Result<Self, Failure> {
        let (jobs, job_queue) = channel::<Job>();
        let (sender, receiver) = channel();
        let main = move || main(huge, &sender, &job_queue);
        let named = std::thread::Builder::new().name("barewire-eal".to_owned());
        // The threads that EAL starts inherit the mask. It includes SIGPIPE: memif's driver writes
        // to sockets that the peer may have closed, and the signal would end a C program.
        let thread = without_signals(|| named.spawn(main));
        thread.map_err(|why| Failure::new(libc::EAGAIN, format!("no thread for DPDK: {why}")))?;
        let ended = |_gone| Failure::new(libc::EIO, "DPDK's thread ended before it had started");
        receiver.recv().map_err(ended)??;
        Ok(Self { jobs: Mutex::new(jobs) })
    }

    /// Runs `job` in EAL's thread, and returns its result with the lines that DPDK logged
    /// meanwhile.
    ///
    /// # Panics
    /// If the job panics.
    pub(super) fn run<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> (R, Vec<String>) {
        let (sender, receiver) = channel();
        self.post(move || {
            let result = job();
            // The receiver waits below.
            let _ = sender.send((result, drain_log()));
        });
        receiver.recv().expect("EAL's thread lives as long as the process")
    }

    /// Queues `job` for EAL's thread without waiting.
    pub(super) fn post(&self, job: impl FnOnce() + Send + 'static) {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.send(Box::new(job)).expect("EAL's thread lives as long as the process");
    }
}

/// Main function of EAL's thread.
fn main(huge: bool, sender: &Sender<Result<(), Failure>>, job_queue: &Receiver<Job>) {
    // EAL handles it while it touches hugepages: one of them may not be there.
    let _ = SigSet::from(Signal::SIGBUS).thread_unblock();
    let started =
        capture_log().map_err(|why| Failure::new(libc::EIO, format!("DPDK's log: {why}")));
    let started = started.and_then(|()| init(huge));
    let runs = started.is_ok();
    if sender.send(started).is_err() || !runs {
        return;
    }
    loop {
        let job = match irq_guard::next_window() {
            Some(time) => job_queue.recv_timeout(time),
            None => job_queue.recv().map_err(|_gone| RecvTimeoutError::Disconnected),
        };
        match job {
            // The panic hook has logged it; other devices must keep working.
            Ok(job) => irq_guard::run_exclusive(|| {
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            }),
            Err(RecvTimeoutError::Timeout) => {
                listener::pump();
                irq_guard::run_window();
                listener::pump();
            }
            Err(RecvTimeoutError::Disconnected) => return,
        }
    }
}

fn init(huge: bool) -> Result<(), Failure> {
    let args = arguments(huge);
    tracing::debug!(?args, "starting DPDK {}", version());
    let args: Vec<CString> = args.into_iter().filter_map(|arg| CString::new(arg).ok()).collect();
    let mut argv: Vec<*mut c_char> = args.iter().map(|arg| arg.as_ptr().cast_mut()).collect();
    // SAFETY: `rte_eal_init` reads and may permute `argc` pointers to strings, which live across
    // the call and are not written; it keeps no pointer to them, and copies the first. A second
    // call in the process (`EAL`) is refused.
    let parsed = unsafe { sys::rte_eal_init(argv.len() as i32, argv.as_mut_ptr()) };
    let log_lines = drain_log();
    if parsed >= 0 {
        return Ok(());
    }
    let errno = errno();
    Err(if errno == libc::EALREADY {
        let why = "DPDK was started by another part of this program, and starts once in a process";
        let mend = "use afpacket:IFNAME, or run barewire in a process of its own";
        Failure::new(libc::EBUSY, why).mend(mend)
    } else {
        Failure::new(errno, format!("DPDK does not start: {}", log_cause(&log_lines, errno)))
    })
}

pub(super) fn arguments(huge: bool) -> Vec<String> {
    let mut args = vec!["barewire".to_owned()];
    // One lcore, this thread; without the option EAL starts and pins one thread per processor.
    args.extend(["--lcores".to_owned(), format!("0@{}", last_cpu())]);
    args.extend(["--no-telemetry", "--log-level", "notice"].map(str::to_owned));
    // EAL's default depends on the user's privileges.
    args.extend(["--iova-mode", "va"].map(str::to_owned));
    // Probes no PCI device at the start, only those that are opened by name: with an allow list EAL
    // ignores all others, and no device has this address.
    args.extend(["--allow", "ffff:ff:1f.7"].map(str::to_owned));
    if huge {
        args.push("--in-memory".to_owned());
    } else {
        args.extend(["--no-huge", "--no-shconf", "-m"].map(str::to_owned));
        args.push(PLAIN_MIB.to_string());
    }
    args
}

/// Highest CPU of the process's affinity mask.
fn last_cpu() -> usize {
    let allowed = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0));
    let is_set = |cpu: &usize| allowed.is_ok_and(|set| set.is_set(*cpu) == Ok(true));
    (0..nix::sched::CpuSet::count()).rev().find(is_set).unwrap_or(0)
}

/// Version of the linked DPDK, such as `DPDK 22.11.11`.
pub(super) fn version() -> String {
    // SAFETY: returns a static string.
    let version = unsafe { CStr::from_ptr(sys::rte_version()) };
    version.to_string_lossy().into_owned()
}

// ---------------------------------------------------------------------------------------------
// DPDK's log
// ---------------------------------------------------------------------------------------------

static LOG: OnceLock<File> = OnceLock::new();

/// Redirects DPDK's log to a file in memory.
fn capture_log() -> io::Result<()> {
    let memory = File::from(memfd_create(c"barewire-dpdk-log", MFdFlags::MFD_CLOEXEC)?);
    // So that writes after a truncation start at 0.
    fcntl(&memory, FcntlArg::F_SETFL(OFlag::O_APPEND))?;
    let again = fcntl(&memory, FcntlArg::F_DUPFD_CLOEXEC(0))?;
    // SAFETY: an open descriptor, which `fdopen` takes over; the mode is a C string.
    let stream = unsafe { libc::fdopen(again, c"a".as_ptr()) };
    if stream.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: an open stream, which is never closed.
    unsafe { sys::rte_openlog_stream(stream.cast()) };
    let _ = LOG.set(memory);
    Ok(())
}

/// Takes the lines that DPDK logged since the last call, and copies them to the tracing log.
fn drain_log() -> Vec<String> {
    let Some(log) = LOG.get() else { return Vec::new() };
    let mut bytes = vec![0; log.metadata().map_or(0, |meta| meta.len() as usize)];
    let read = log.read_at(&mut bytes, 0).unwrap_or(0);
    // A line that is written in between is lost, which is harmless.
    let _ = log.set_len(0);
    let text = String::from_utf8_lossy(&bytes[..read]).into_owned();
    let lines = text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty());
    let lines: Vec<String> = lines.collect();
    for line in &lines {
        tracing::debug!(target: "dpdk", "{line}");
    }
    lines
}

/// The cause of a failure in one line: DPDK's first specific log line, or the errno.
pub(super) fn log_cause(log_lines: &[String], errno: i32) -> String {
    // Phrases of every failure and every start.
    let generic_phrases = [
        "Driver cannot attach",
        "Failed to attach device",
        "failed to initialize",
        "Bus (vdev) probe failed",
        "Detected ",
        "Selected IOVA",
        "VFIO support",
        "TELEMETRY",
        "Multi-process socket",
        "No available",
        "No free",
        // Logged for every memif: there is no secondary process.
        "Failed to register mp action callback",
    ];
    let is_specific = |line: &&String| !generic_phrases.iter().any(|words| line.contains(words));
    match log_lines.iter().find(is_specific) {
        Some(line) => line.clone(),
        None => io::Error::from_raw_os_error(errno.abs()).to_string(),
    }
}
