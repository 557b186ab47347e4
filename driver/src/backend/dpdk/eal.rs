//! DPDK's runtime, EAL: started once in a process, in a thread of its own.
//!
//! `rte_eal_init` pins the thread that calls it. That is ours here, so that the application's
//! threads stay on the processors they are on. The thread lives on and does everything that
//! changes devices, one thing after the other; only bursts happen in other threads.
//!
//! EAL writes its messages to a stream. It gets one in memory: what was said goes to the log, and
//! into the error when something failed.

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
use crate::setup;

/// EAL, once it runs.
pub(super) struct Eal {
    jobs: Mutex<Sender<Job>>,
}

type Job = Box<dyn FnOnce() + Send>;

static EAL: OnceLock<Result<Eal, Failure>> = OnceLock::new();

/// Memory in megabytes that EAL takes at its start where it has no hugepages: it cannot grow then.
/// Only what is used is ever touched.
const PLAIN_MIB: usize = 512;

/// Bytes of free hugepages below which they are not used: one port's frames.
const HUGE_LEAST: u64 = 32 << 20;

/// Starts EAL, or returns the one that runs.
///
/// # Errors
/// It did not start, now or the first time: it can be tried once only in a process.
pub(super) fn start(hugepages: Hugepages) -> Result<&'static Eal, Failure> {
    let begun = EAL.get().is_some();
    let huge = if begun { true } else { use_hugepages(hugepages)? };
    EAL.get_or_init(|| Eal::launch(huge)).as_ref().map_err(Clone::clone)
}

/// Whether EAL shall take its memory from hugepages.
fn use_hugepages(wanted: Hugepages) -> Result<bool, Failure> {
    if wanted == Hugepages::No {
        return Ok(false);
    }
    let free = free_huge_len();
    if free >= HUGE_LEAST {
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

/// Bytes of hugepages of any size that nobody has.
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
        let (jobs, todo) = channel::<Job>();
        let (tell, told) = channel();
        let main = move || main(huge, &tell, &todo);
        let thread = std::thread::Builder::new().name("barewire-eal".to_owned()).spawn(main);
        thread.map_err(|why| Failure::new(libc::EAGAIN, format!("no thread for DPDK: {why}")))?;
        let ended = |_gone| Failure::new(libc::EIO, "DPDK's thread ended before it had started");
        told.recv().map_err(ended)??;
        Ok(Self { jobs: Mutex::new(jobs) })
    }

    /// Runs `job` in EAL's thread, and returns its result with what DPDK said meanwhile.
    ///
    /// # Panics
    /// If the job panics.
    pub(super) fn run<R: Send + 'static>(
        &self,
        job: impl FnOnce() -> R + Send + 'static,
    ) -> (R, Vec<String>) {
        let (tell, told) = channel();
        self.post(move || {
            let result = job();
            // Whoever waits is blocked below.
            let _ = tell.send((result, heard()));
        });
        told.recv().expect("EAL's thread lives as long as the process")
    }

    /// Has `job` run in EAL's thread, some time.
    pub(super) fn post(&self, job: impl FnOnce() + Send + 'static) {
        let jobs = self.jobs.lock().unwrap_or_else(PoisonError::into_inner);
        jobs.send(Box::new(job)).expect("EAL's thread lives as long as the process");
    }
}

/// The thread.
fn main(huge: bool, tell: &Sender<Result<(), Failure>>, todo: &Receiver<Job>) {
    // Of this thread and those that EAL starts: memif's driver writes to sockets whose other end
    // may have gone, and a program in C is ended by that signal.
    let _ = SigSet::from(Signal::SIGPIPE).thread_block();
    let started = listen().map_err(|why| Failure::new(libc::EIO, format!("DPDK's log: {why}")));
    let started = started.and_then(|()| init(huge));
    let runs = started.is_ok();
    if tell.send(started).is_err() || !runs {
        return;
    }
    loop {
        let job = match irq_guard::due() {
            Some(time) => todo.recv_timeout(time),
            None => todo.recv().map_err(|_gone| RecvTimeoutError::Disconnected),
        };
        match job {
            // A panic was told by the hook; the devices of others must go on to work.
            Ok(job) => irq_guard::alone(|| {
                let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
            }),
            Err(RecvTimeoutError::Timeout) => {
                listener::pump();
                irq_guard::window();
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
    // the call and are not written to; it keeps no pointer to them but to the first, which it
    // copies. Called once in the process (`EAL`), or it refuses.
    let parsed = unsafe { sys::rte_eal_init(argv.len() as i32, argv.as_mut_ptr()) };
    let said = heard();
    if parsed >= 0 {
        return Ok(());
    }
    let errno = errno();
    Err(if errno == libc::EALREADY {
        let why = "DPDK was started by another part of this program, and starts once in a process";
        let mend = "use afpacket:IFNAME, or run barewire in a process of its own";
        Failure::new(libc::EBUSY, why).mend(mend)
    } else {
        Failure::new(errno, format!("DPDK does not start: {}", because(&said, errno)))
    })
}

pub(super) fn arguments(huge: bool) -> Vec<String> {
    let mut args = vec!["barewire".to_owned()];
    // One worker, whose thread is this one; without it EAL starts and pins one for each processor.
    args.extend(["--lcores".to_owned(), format!("0@{}", last_cpu())]);
    args.extend(["--no-telemetry", "--log-level", "notice"].map(str::to_owned));
    // What EAL chooses would depend on who runs it.
    args.extend(["--iova-mode", "va"].map(str::to_owned));
    // PCI devices are probed when they are named and never because they are there: nothing has
    // this address, and with a list of those allowed EAL takes no other.
    args.extend(["--allow", "ffff:ff:1f.7"].map(str::to_owned));
    if huge {
        args.push("--in-memory".to_owned());
    } else {
        args.extend(["--no-huge", "--no-shconf", "-m"].map(str::to_owned));
        args.push(PLAIN_MIB.to_string());
    }
    args
}

/// The last processor that this process may run on.
fn last_cpu() -> usize {
    let allowed = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0));
    let is_set = |cpu: &usize| allowed.is_ok_and(|set| set.is_set(*cpu) == Ok(true));
    (0..nix::sched::CpuSet::count()).rev().find(is_set).unwrap_or(0)
}

/// The version of the DPDK that is linked, such as `DPDK 22.11.11`.
pub(super) fn version() -> String {
    // SAFETY: returns a static string.
    let version = unsafe { CStr::from_ptr(sys::rte_version()) };
    version.to_string_lossy().into_owned()
}

// ---------------------------------------------------------------------------------------------
// What DPDK says
// ---------------------------------------------------------------------------------------------

static LOG: OnceLock<File> = OnceLock::new();

/// Makes DPDK write to a file in memory.
fn listen() -> io::Result<()> {
    let memory = File::from(memfd_create(c"barewire-dpdk-log", MFdFlags::MFD_CLOEXEC)?);
    // So that what follows a truncation starts at 0.
    fcntl(&memory, FcntlArg::F_SETFL(OFlag::O_APPEND))?;
    let again = fcntl(&memory, FcntlArg::F_DUPFD_CLOEXEC(0))?;
    // SAFETY: an open descriptor of ours, which `fdopen` takes over; the mode is a C string.
    let stream = unsafe { libc::fdopen(again, c"a".as_ptr()) };
    if stream.is_null() {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: an open stream, which is never closed.
    unsafe { sys::rte_openlog_stream(stream.cast()) };
    let _ = LOG.set(memory);
    Ok(())
}

/// What DPDK has said since the last call, line by line, and forgets it. It goes to our log.
fn heard() -> Vec<String> {
    let Some(log) = LOG.get() else { return Vec::new() };
    let mut bytes = vec![0; log.metadata().map_or(0, |meta| meta.len() as usize)];
    let read = log.read_at(&mut bytes, 0).unwrap_or(0);
    // A line that is written in between is lost to us, which harms nobody.
    let _ = log.set_len(0);
    let text = String::from_utf8_lossy(&bytes[..read]).into_owned();
    let lines = text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty());
    let lines: Vec<String> = lines.collect();
    for line in &lines {
        tracing::debug!(target: "dpdk", "{line}");
    }
    lines
}

/// The cause of a failure in one line: the first thing that DPDK said of it, or the errno.
pub(super) fn because(said: &[String], errno: i32) -> String {
    // What every failure ends with, and what is said of every start.
    let empty_words = [
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
        // Said of every memif: there is no second process of DPDK to talk to.
        "Failed to register mp action callback",
    ];
    let says = |line: &&String| !empty_words.iter().any(|words| line.contains(words));
    match said.iter().find(says) {
        Some(line) => line.clone(),
        None => io::Error::from_raw_os_error(errno.abs()).to_string(),
    }
}
