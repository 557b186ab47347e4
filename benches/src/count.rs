//! Counting instead of timing: instructions, allocations, system calls.
//!
//! Instructions and system calls are counted by running this program with `--steady CASE --count N`
//! for two values of N and subtracting, so that start and end do not count.

use std::alloc::{GlobalAlloc, Layout, System};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::Relaxed;

use nix::unistd::Pid;

/// A counting allocator; a benchmark makes it its global one.
pub struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);
static LIVE_BYTES: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call forwards its arguments to `System`, which meets the contract.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        LIVE_BYTES.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: the caller's contract is `System`'s.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Relaxed);
        LIVE_BYTES.fetch_add(layout.size() as u64, Relaxed);
        // SAFETY: as above. Not the default, which would touch every page.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        LIVE_BYTES.fetch_sub(layout.size() as u64, Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Number of allocations so far.
pub fn allocations() -> u64 {
    ALLOCATIONS.load(Relaxed)
}

/// Bytes allocated and not freed.
pub fn live_bytes() -> u64 {
    LIVE_BYTES.load(Relaxed)
}

/// Resident memory of the process, bytes, from `/proc/self/statm`.
pub fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = statm.split(' ').nth(1).and_then(|n| n.parse().ok()).unwrap_or(0);
    pages * 4096
}

/// The name of the function that [`instructions`] counts in.
const STEADY: &str = "*barewire_benches*count*steady*";

/// Operations before `count` counted ones: the session opens, credits grow, tables are touched. Few
/// in the smallest size, which would otherwise spend most of its time on them.
pub fn warm_up(count: u64) -> u64 {
    if is_small(count) { 500 } else { 20_000 }
}

/// Whether `count` is of the smallest size, whose results are not compared: then the two runs may
/// run in parallel and take processors from each other.
fn is_small(count: u64) -> bool {
    count < 1000
}

/// Runs `work`, inside of which [`instructions`] counts.
#[inline(never)]
pub fn steady<R>(work: impl FnOnce() -> R) -> R {
    std::hint::black_box(work())
}

/// Instructions per repetition of `case`, by callgrind.
///
/// # Errors
/// valgrind is missing, or the program failed under it.
pub fn instructions(case: &str, few: u64, many: u64) -> Result<f64, String> {
    let counted = |count| callgrind(case, count);
    let [a, b] = if is_small(few) {
        std::thread::scope(|scope| {
            let second = scope.spawn(|| counted(many));
            [counted(few), second.join().unwrap_or_else(|_| Err("it panicked".to_owned()))]
        })
    } else {
        [few, many].map(counted)
    };
    Ok((b? as f64 - a? as f64) / (many - few) as f64)
}

fn callgrind(case: &str, count: u64) -> Result<u64, String> {
    let name = case.replace('/', "-");
    let out = std::env::temp_dir()
        .join(format!("barewire-callgrind.{}.{name}.{count}", std::process::id()));
    let ran = Command::new("valgrind")
        .args(["--tool=callgrind", "--quiet", "--collect-atstart=no"])
        // One thread runs at a time, and a polling thread would starve the others.
        .arg("--fair-sched=yes")
        .arg(format!("--toggle-collect={STEADY}"))
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(own_path()?)
        .args(["--steady", case, "--count", &count.to_string()])
        .stdin(Stdio::null())
        .output()
        .map_err(|why| format!("valgrind does not start ({why}); apt-get install valgrind"))?;
    let written = std::fs::read_to_string(&out);
    // The file is no longer needed.
    let _ = std::fs::remove_file(&out);
    if !ran.status.success() {
        return Err(format!("under valgrind: {}", String::from_utf8_lossy(&ran.stderr).trim()));
    }
    let written = written.map_err(|why| format!("{}: {why}", out.display()))?;
    let total = written.lines().find_map(|line| line.strip_prefix("totals: "));
    total.and_then(|n| n.trim().parse().ok()).ok_or_else(|| "callgrind counted nothing".to_owned())
}

/// System calls per repetition of `case`.
///
/// # Errors
/// The process must not be traced, or it failed.
pub fn syscalls(case: &str, few: u64, many: u64) -> Result<f64, String> {
    let [a, b] = [few, many].map(|count| trace(case, count));
    Ok((b? as f64 - a? as f64) / (many - few) as f64)
}

/// Runs this program under ptrace and counts its system-call stops.
fn trace(case: &str, count: u64) -> Result<u64, String> {
    let mut command = Command::new(own_path()?);
    command.args(["--steady", case, "--count", &count.to_string()]).stdin(Stdio::null());
    command.stdout(Stdio::null());
    // SAFETY: `pre_exec` runs between fork and exec, where only async-signal-safe calls are
    // allowed: `ptrace` is a plain system call.
    unsafe {
        command.pre_exec(|| match libc::ptrace(libc::PTRACE_TRACEME, 0, 0, 0) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let child = command.spawn().map_err(|why| format!("cannot trace: {why}"))?;
    let pid = child.id() as libc::pid_t;
    let mut stops = 0_u64;
    loop {
        let mut status = 0;
        // SAFETY: `waitpid` writes one int to a valid place.
        if unsafe { libc::waitpid(pid, &mut status, 0) } < 0 {
            return Err(format!("waitpid {}: {}", Pid::from_raw(pid), last_error()));
        }
        if libc::WIFEXITED(status) {
            let code = libc::WEXITSTATUS(status);
            return if code == 0 { Ok(stops / 2) } else { Err(format!("traced: exit {code}")) };
        }
        if !libc::WIFSTOPPED(status) {
            return Err("traced: killed".to_owned());
        }
        // The first stop is the exec's trap; signals that are not ours to keep go on.
        let signal = match libc::WSTOPSIG(status) {
            libc::SIGTRAP => {
                stops += 1;
                0
            }
            other => other,
        };
        // SAFETY: `ptrace` with PTRACE_SYSCALL takes a stopped tracee of ours and a signal.
        if unsafe { libc::ptrace(libc::PTRACE_SYSCALL, pid, 0, signal) } < 0 {
            return Err(format!("ptrace: {}", last_error()));
        }
    }
}

fn last_error() -> std::io::Error {
    std::io::Error::last_os_error()
}

fn own_path() -> Result<std::path::PathBuf, String> {
    std::env::current_exe().map_err(|why| format!("own path: {why}"))
}
