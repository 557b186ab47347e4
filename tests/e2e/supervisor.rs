//! Starts workers, talks to them by lines, and kills them.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

/// Variable that makes this program a worker.
pub(crate) const ROLE: &str = "BAREWIRE_E2E_ROLE";

/// Longest that anything may take. A hang is a failure, not a wait.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// Longest that is waited for a worker that never gets a processor.
const PATIENCE_STARVED: Duration = Duration::from_secs(300);

/// A worker process.
pub(crate) struct Worker {
    child: Child,
    input: ChildStdin,
    lines: Receiver<String>,
    pub(crate) name: String,
    /// Its endpoint's address in text.
    pub(crate) addr: String,
}

impl Worker {
    /// Starts a worker on `port`; returns when it is able to receive.
    pub(crate) fn start(name: &str, role: &str, port: &str) -> Self {
        Self::start_by(Command::new(std::env::current_exe().unwrap()), name, role, port)
    }

    /// The same by a command that runs this program, somewhere.
    pub(crate) fn start_by(mut command: Command, name: &str, role: &str, port: &str) -> Self {
        let mut child = command
            .args(["--exact", "worker_process", "--nocapture", "--test-threads=1"])
            .env(ROLE, role)
            .env("BAREWIRE_E2E_PORT", port)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (tell, lines) = channel();
        let output = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            for line in output.lines().map_while(Result::ok) {
                // The harness prints lines of its own.
                if let Some((_, line)) = line.split_once("@@")
                    && tell.send(line.to_owned()).is_err()
                {
                    return;
                }
            }
        });
        let input = child.stdin.take().unwrap();
        let mut worker = Self { child, input, lines, name: name.to_owned(), addr: String::new() };
        worker.addr = worker.answer("ADDR");
        worker
    }

    /// Sends a line. A worker that is gone does not hear it.
    pub(crate) fn say(&mut self, line: &str) {
        let _ = writeln!(self.input, "{line}").and_then(|()| self.input.flush());
    }

    /// What follows `word` in the next line, which must start with it.
    pub(crate) fn answer(&mut self, word: &str) -> String {
        let line = self.next_line(word);
        match line.strip_prefix(word) {
            Some(rest) => rest.trim().to_owned(),
            None => panic!("{}: expected {word}, got: {line}", self.name),
        }
    }

    /// The next line; `word` says what was expected. A worker that waits for a processor, as it
    /// may on a busy machine, does not hang.
    pub(crate) fn next_line(&mut self, word: &str) -> String {
        const LOOK: Duration = Duration::from_secs(1);
        let (start, before) = (Instant::now(), self.starved());
        let mut in_kernel = Duration::ZERO;
        loop {
            match self.lines.recv_timeout(LOOK) {
                Ok(line) => return line,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => {
                    panic!("{} ended before {word}: {:?}", self.name, self.child.wait())
                }
            }
            in_kernel += if self.waits_for_kernel() { LOOK } else { Duration::ZERO };
            let waited = start.elapsed();
            let starved = self.starved().saturating_sub(before) + in_kernel;
            let patience = (PATIENCE + starved).min(PATIENCE_STARVED);
            let name = &self.name;
            assert!(waited < patience, "{name} hangs: no {word}; it starved for {starved:?}");
        }
    }

    /// Whether a thread of it registers for membarrier(2), which waits until kernel threads have
    /// had a processor: those starve for seconds where processes yield in a loop (Linux 6.18).
    fn waits_for_kernel(&self) -> bool {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let mut calls =
            tasks.into_iter().flatten().flatten().map(|task| task.path().join("syscall"));
        let number = libc::SYS_membarrier.to_string();
        calls.any(|path| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            text.split_whitespace().next() == Some(&number)
        })
    }

    /// How long that of its threads which has waited longest for a processor has done so.
    fn starved(&self) -> Duration {
        let tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id()));
        let stats = tasks.into_iter().flatten().flatten().map(|task| task.path().join("schedstat"));
        // Nanoseconds on a processor, then those in which it could have been.
        let waited = |path| {
            let text = std::fs::read_to_string(path).ok()?;
            text.split_whitespace().nth(1)?.parse().ok()
        };
        Duration::from_nanos(stats.filter_map(waited).max().unwrap_or(0))
    }

    /// Whether the next line is there already; it must be `word`.
    pub(crate) fn try_answer(&mut self, word: &str) -> bool {
        match self.lines.try_recv() {
            Ok(line) => {
                assert_eq!(line, word, "{}", self.name);
                true
            }
            Err(TryRecvError::Empty) => false,
            Err(TryRecvError::Disconnected) => panic!("{} ended before {word}", self.name),
        }
    }

    /// Its process.
    #[allow(dead_code, reason = "the suite `wires` asks")]
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Sends it a signal.
    #[allow(dead_code, reason = "the suite `wires` does")]
    pub(crate) fn signal(&self, signal: nix::sys::signal::Signal) {
        let pid = nix::unistd::Pid::from_raw(self.child.id() as i32);
        nix::sys::signal::kill(pid, signal).unwrap();
    }

    /// kill -9.
    pub(crate) fn kill(self) {}

    /// Waits for the end, which must be a good one.
    pub(crate) fn finish(mut self) {
        let status = self.end_within(PATIENCE_STARVED);
        let status = status.unwrap_or_else(|| panic!("{} hangs and does not end", self.name));
        assert!(status.success(), "{} ended with {status}", self.name);
    }

    /// How it ended, if it did within `time`.
    fn end_within(&mut self, time: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        loop {
            let status = self.child.try_wait().ok().flatten();
            if status.is_some() || start.elapsed() > time {
                return status;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Worker {
    /// No worker outlives a test, passed or failed: it would keep its device, and the output of the
    /// tests open. One that the kernel does not let go is left.
    fn drop(&mut self) {
        let _ = self.child.kill();
        if self.end_within(PATIENCE).is_none() {
            println!("{} is killed and does not end", self.name);
        }
    }
}

/// A segment of its own for each test, removed when it goes.
pub(crate) struct Segment(pub(crate) String);

impl Segment {
    pub(crate) fn new(test: &str) -> Self {
        Self(format!("e2e-{test}-{}", std::process::id()))
    }

    pub(crate) fn port(&self) -> String {
        format!("shm:{}", self.0)
    }

    pub(crate) fn path(&self) -> std::path::PathBuf {
        let settings = barewire_driver::backend::shm::ShmSettings::named(&self.0);
        settings.path()
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(self.path());
    }
}

/// Pseudo-random numbers from a printed seed.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// A number below `n`.
    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % n
    }
}
