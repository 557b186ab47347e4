//! Two processes: the measuring one, and a second one, forked from it, that executes commands. They
//! share a page of commands and two cache lines to bounce.

use std::cell::Cell;
use std::mem::size_of;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::time::{Duration, Instant};

use barewire_driver::port::Station;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::{ForkResult, Pid, fork};

use crate::cpu_pair::{CHUNK, CpuPair, Line, PROBE, bounce, echo};
use crate::end::BenchResult;
use crate::{Row, Sample, median};

/// Time limit of a command of the second process.
const PATIENCE: Duration = Duration::from_secs(60);

/// Turns without a command after which the second process sleeps between turns, and the duration of
/// that sleep.
const IDLE_TURNS: u32 = 10_000;
const NAP: Duration = Duration::from_micros(50);

/// Most pairs of ports that can [exchange](First::exchange_station).
const EXCHANGES_MAX: usize = 4;

const QUIT: u64 = 0;
const BOUNCE: u64 = 1;
const WORK: u64 = 2;

/// Shared memory of the two processes.
#[derive(Debug, Default)]
#[repr(C)]
struct SharedPage {
    ping: Line,
    pong: Line,
    /// Numbers of the last command that was given, begun and done.
    posted: Line,
    begun: Line,
    done: Line,
    kind: Line,
    args: [AtomicU64; 4],
    /// Stations of the two processes' ports, by pair; 0 until known.
    macs: [[AtomicU64; 2]; EXCHANGES_MAX],
}

/// A command to the second process: its kind and arguments.
#[derive(Clone, Copy, Debug)]
pub struct Task {
    /// Kind of the command, defined by the benchmark.
    pub what: u64,
    /// Length, bytes.
    pub len: usize,
    /// Number of repetitions.
    pub count: u64,
}

/// The second process's side.
pub struct Second {
    page: &'static SharedPage,
    exchanges: Cell<usize>,
}

/// The measuring process's side. Kills the second process when dropped.
pub struct First {
    page: &'static SharedPage,
    pid: Pid,
    commands: u64,
    exchanges: Cell<usize>,
}

/// Forks. `second` runs in the new process, pinned to the second processor, and receives the
/// commands.
///
/// # Errors
/// The system call's error.
pub fn start(second: impl FnOnce(&Second) -> Result<(), String>) -> Result<First, String> {
    let cpu_pair = CpuPair::find()?;
    let page = share()?;
    // SAFETY: `fork` needs a process with one thread, since of other threads only the locks would
    // be copied: benchmarks start no thread before this.
    match unsafe { fork() }.map_err(|e| format!("fork: {e}"))? {
        ForkResult::Child => {
            // SAFETY: `prctl(PR_SET_PDEATHSIG)` takes a signal and touches no memory.
            unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
            let ended =
                cpu_pair.pin(1).and_then(|()| second(&Second { page, exchanges: Cell::new(0) }));
            if let Err(why) = &ended {
                eprintln!("second process: {why}");
            }
            std::process::exit(i32::from(ended.is_err()));
        }
        ForkResult::Parent { child } => {
            cpu_pair.pin(0)?;
            Ok(First { page, pid: child, commands: 0, exchanges: Cell::new(0) })
        }
    }
}

/// A page that a forked child shares. Mapped until the process exits.
fn share() -> Result<&'static SharedPage, String> {
    let (prot, flags) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let at =
        unsafe { libc::mmap(std::ptr::null_mut(), size_of::<SharedPage>(), prot, flags, -1, 0) };
    if at == libc::MAP_FAILED {
        return Err(format!("mmap: {}", std::io::Error::last_os_error()));
    }
    let page = NonNull::new(at.cast::<SharedPage>()).ok_or("mmap: null")?;
    // SAFETY: mapped for ever, page-aligned, as long as a `SharedPage`; zeros are one, since it
    // consists of atomic words; only ever reached by shared references.
    Ok(unsafe { page.as_ref() })
}

impl Second {
    /// Exchanges the stations of this process's port and the other's. Both processes call it
    /// equally often, port by port.
    ///
    /// # Panics
    /// If it is called a fifth time.
    pub fn exchange_station(&self, station: Station) -> Station {
        exchange_station(
            &self.page.macs[self.exchanges.replace(self.exchanges.get() + 1)],
            1,
            station,
        )
    }

    /// Executes commands until there are no more. Calls `idle` while there is none.
    ///
    /// # Errors
    /// That of `work`.
    pub fn serve<S>(
        &self,
        state: &mut S,
        mut idle: impl FnMut(&mut S),
        mut work: impl FnMut(&mut S, Task) -> Result<(), String>,
    ) -> Result<(), String> {
        let (mut seen, mut turns) = (0, 0_u32);
        loop {
            let posted = self.page.posted.0.load(Acquire);
            if posted == seen {
                idle(state);
                turns += 1;
                if turns > IDLE_TURNS {
                    // Another pair of processes may be measured on the same core at this time.
                    std::thread::sleep(NAP);
                }
                continue;
            }
            (seen, turns) = (posted, 0);
            self.page.begun.0.store(seen, Release);
            let arg = |i: usize| self.page.args[i].load(Relaxed);
            match self.page.kind.0.load(Relaxed) {
                QUIT => return Ok(()),
                BOUNCE => echo(&self.page.ping, &self.page.pong, arg(0), arg(1)),
                _ => {
                    let task = Task { what: arg(0), len: arg(1) as usize, count: arg(2) };
                    work(state, task)?;
                }
            }
            self.page.done.0.store(seen, Release);
        }
    }
}

impl First {
    /// Exchanges the stations of this process's port and the other's.
    pub fn exchange_station(&self, station: Station) -> Station {
        exchange_station(
            &self.page.macs[self.exchanges.replace(self.exchanges.get() + 1)],
            0,
            station,
        )
    }

    /// Gives the other process a command. The caller then does its own part and calls
    /// [`finish`](Self::finish).
    pub fn begin(&mut self, task: Task) {
        self.post_command(WORK, [task.what, task.len as u64, task.count]);
    }

    /// Waits until the other process has executed its command, and calls `idle` in between.
    ///
    /// # Errors
    /// The command took more than a minute, or the process has exited.
    pub fn finish(&self, mut idle: impl FnMut()) -> Result<(), String> {
        let start = Instant::now();
        let mut turns = 0_u64;
        while self.page.done.0.load(Acquire) != self.commands {
            idle();
            turns += 1;
            if turns.is_multiple_of(1 << 16) && start.elapsed() > PATIENCE {
                return Err("the second process does not answer".to_owned());
            }
        }
        Ok(())
    }

    /// Round trips of a cache line between the two processes, nanoseconds: the mean of every
    /// hundred.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn line(&mut self) -> Result<Sample, String> {
        let start = self.commands << 32;
        self.post_command(BOUNCE, [start, PROBE, 0]);
        let chunks = bounce(&self.page.ping, &self.page.pong, start, PROBE, CHUNK);
        self.finish(|| {})?;
        Ok(chunks.into_iter().collect())
    }

    /// The median of [`line`](Self::line).
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn line_ns(&mut self) -> Result<f64, String> {
        Ok(self.line()?.median())
    }

    /// Stops the other process, so that it takes no time from another measured process on its
    /// processor.
    pub fn pause(&self) {
        // It may have exited, which the next command reports.
        let _ = kill(self.pid, Signal::SIGSTOP);
    }

    /// Resumes the other process.
    pub fn resume(&self) {
        let _ = kill(self.pid, Signal::SIGCONT);
    }

    fn post_command(&mut self, kind: u64, args: [u64; 3]) {
        self.commands += 1;
        self.page.kind.0.store(kind, Relaxed);
        for (to, arg) in self.page.args.iter().zip(args) {
            to.store(arg, Relaxed);
        }
        self.page.posted.0.store(self.commands, Release);
        // So that the measurement does not include the other process's wake-up. Bounded, since it
        // may have exited.
        let start = Instant::now();
        while self.page.begun.0.load(Acquire) != self.commands && start.elapsed() < PATIENCE {
            std::hint::spin_loop();
        }
    }
}

impl Drop for First {
    fn drop(&mut self) {
        self.post_command(QUIT, [0; 3]);
        // It may have exited already.
        let _ = waitpid(self.pid, None);
    }
}

fn exchange_station(stations: &[AtomicU64; 2], me: usize, station: Station) -> Station {
    stations[me].store(station.word(), Release);
    loop {
        let other = stations[1 - me].load(Acquire);
        if other != 0 {
            return Station::from_word(other);
        }
        std::hint::spin_loop();
    }
}

/// Interleaved rounds of a measurement and its reference.
#[derive(Debug, Default)]
pub struct Rounds {
    /// (value, reference) of every round.
    pairs: Vec<(f64, f64)>,
}

impl Rounds {
    /// Runs `round`, which measures a value and its reference, `count` times, after a warm-up round
    /// that opens the sessions and touches the memory.
    ///
    /// # Errors
    /// The first error of `round`.
    pub fn measure(
        count: u64,
        mut round: impl FnMut() -> BenchResult<(f64, f64)>,
    ) -> BenchResult<Self> {
        round()?;
        let pairs = (0..count).map(|_| round()).collect::<BenchResult<_>>()?;
        Ok(Self { pairs })
    }

    /// Adds a round.
    pub fn push(&mut self, value: f64, reference: f64) {
        self.pairs.push((value, reference));
    }

    /// The median value.
    pub fn value(&self) -> f64 {
        median(self.pairs.iter().map(|p| p.0))
    }

    /// The median reference.
    pub fn reference(&self) -> f64 {
        median(self.pairs.iter().map(|p| p.1))
    }

    /// The median ratio of the rounds.
    pub fn ratio(&self) -> f64 {
        median(self.pairs.iter().map(|p| p.0 / p.1))
    }

    /// The minimum and maximum ratio of the rounds.
    pub fn ratio_range(&self) -> (f64, f64) {
        self.ratio_between(0.0, 1.0)
    }

    /// The quartiles of the rounds' ratios.
    pub fn ratio_middle(&self) -> (f64, f64) {
        self.ratio_between(0.25, 0.75)
    }

    /// The row of `case`, against `reference`.
    pub fn row(&self, case: &str, unit: &'static str, reference: &str) -> Row {
        Row::new(case, self.value(), unit).against(reference, self.reference(), self.ratio())
    }

    /// The range of the ratios, for a note.
    pub fn span(&self) -> String {
        let (low, high) = self.ratio_range();
        format!("ratios {low:.2} to {high:.2}")
    }

    fn ratio_between(&self, low: f64, high: f64) -> (f64, f64) {
        let ratios: Sample = self.pairs.iter().map(|p| p.0 / p.1).collect();
        (ratios.quantile(low), ratios.quantile(high))
    }
}
