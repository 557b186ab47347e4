//! Runs a command to its end or to a time limit, and keeps its output.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::AtomicUsize;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Outcome of a command.
pub(crate) struct ProcessOutput {
    /// Whether it exited with 0 within the time limit.
    pub(crate) ok: bool,
    /// Whether it was killed at the time limit.
    pub(crate) timed_out: bool,
    /// Standard output and standard error in order, undecodable bytes replaced.
    pub(crate) output: String,
}

/// Runs `command` with no standard input, both outputs appended to the file `log`.
///
/// After `limit` the command and everything it started is killed.
///
/// # Errors
/// The log cannot be written or the command cannot be started.
pub(crate) fn run(command: &mut Command, log: &Path, limit: Duration) -> io::Result<ProcessOutput> {
    run_until(command, log, limit, |_| false)
}

/// [`run`] that also ends the command once `is_done` returns true for the output so far; the
/// command is not `ok` then.
pub(crate) fn run_until(
    command: &mut Command,
    log: &Path,
    limit: Duration,
    is_done: impl Fn(&str) -> bool,
) -> io::Result<ProcessOutput> {
    if let Some(dir) = log.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let mut file = File::options().create(true).append(true).read(true).open(log)?;
    let start = file.metadata()?.len();
    let started = Instant::now();
    let mut child =
        command.stdin(Stdio::null()).stdout(file.try_clone()?).stderr(file.try_clone()?).spawn()?;
    let (mut timed_out, mut output) = (false, Vec::new());
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        timed_out = started.elapsed() > limit;
        let more = read_new(&mut file, start, &mut output)?;
        if timed_out || (more && is_done(&String::from_utf8_lossy(&output))) {
            kill_tree(child.id());
            break child.wait()?;
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    read_new(&mut file, start, &mut output)?;
    let output = String::from_utf8_lossy(&output).into_owned();
    Ok(ProcessOutput { ok: status.success() && !timed_out, timed_out, output })
}

/// Appends the new bytes of `file` to `output`, which contains those from `start` on. Returns
/// whether there are any.
fn read_new(file: &mut File, start: u64, output: &mut Vec<u8>) -> io::Result<bool> {
    // The command's writes move the shared file offset.
    file.seek(SeekFrom::Start(start + output.len() as u64))?;
    Ok(file.read_to_end(output)? > 0)
}

/// Commands at the same time, for commands that wait more than they compute.
const AT_ONCE: usize = 2;

/// Calls `work` with every number below `count`, two at a time, and returns the results in the
/// order of the numbers.
pub(crate) fn side_by_side<T: Send>(count: usize, work: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let next = AtomicUsize::new(0);
    let take_turns = || {
        let numbers = std::iter::repeat_with(|| next.fetch_add(1, Relaxed));
        numbers.take_while(|&n| n < count).map(|n| (n, work(n))).collect::<Vec<_>>()
    };
    let mut all: Vec<(usize, T)> = std::thread::scope(|scope| {
        let threads = [(); AT_ONCE].map(|()| scope.spawn(take_turns));
        threads.into_iter().flat_map(|thread| thread.join().expect("it does not panic")).collect()
    });
    all.sort_by_key(|(n, _)| *n);
    all.into_iter().map(|(_, done)| done).collect()
}

/// A command of `program` that the kernel kills when the thread that started it ends, for whatever
/// reason: for programs that would otherwise outlive this process.
///
/// Every Debian has `setpriv`; without it the program may outlive this process.
pub(crate) fn tethered(program: &str) -> Command {
    if !crate::packages::in_path("setpriv") {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", program]);
    command
}

/// Kills `pid` and all its descendants.
///
/// The process tree is walked instead of killing a process group, because a group of its own would
/// not receive the terminal's Ctrl-C.
fn kill_tree(pid: u32) {
    let mut doomed = vec![pid];
    let mut next = 0;
    while let Some(&parent) = doomed.get(next) {
        doomed.extend(children_of(parent));
        next += 1;
    }
    for pid in doomed {
        if let Ok(pid) = i32::try_from(pid) {
            // It may have ended already.
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

fn children_of(parent: u32) -> Vec<u32> {
    let Ok(proc) = std::fs::read_dir("/proc") else { return Vec::new() };
    proc.flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok())
        .filter(|pid| {
            std::fs::read_to_string(format!("/proc/{pid}/stat"))
                .ok()
                .and_then(|stat| ppid(&stat))
                .is_some_and(|ppid| ppid == parent)
        })
        .collect()
}

/// The parent PID in a line of `/proc/PID/stat`. The name before it is in parentheses and may
/// contain any characters, parentheses and spaces included.
fn ppid(stat: &str) -> Option<u32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ppid_survives_a_hostile_process_name() {
        assert_eq!(ppid("12 (a) S 9 b) R 7 12 12 0"), Some(7));
        assert_eq!(ppid("12 (a"), None);
    }

    /// Goal: a suite that hangs ends, with the children it started. Method: a shell that starts
    /// another one and waits for it.
    #[test]
    fn a_command_over_its_time_dies_with_its_children() {
        let dir = std::env::temp_dir().join(format!("xtask-kill-{}", std::process::id()));
        let log = dir.join("log");
        let mut command = Command::new("sh");
        command.args(["-c", "sleep 600 & echo child $!; wait"]);
        let ended = run(&mut command, &log, Duration::from_millis(300)).unwrap();
        assert!(ended.timed_out && !ended.ok);
        let child: u32 = ended.output.trim().strip_prefix("child ").unwrap().parse().unwrap();
        assert!(ends(child), "the child {child} outlived its limit");
        std::fs::remove_dir_all(dir).unwrap();
    }

    #[test]
    fn a_command_that_has_said_enough_ends() {
        let dir = std::env::temp_dir().join(format!("xtask-enough-{}", std::process::id()));
        let mut command = Command::new("sh");
        command.args(["-c", "echo no; sleep 0.1; echo yes; sleep 600"]);
        let limit = Duration::from_secs(60);
        let ended =
            run_until(&mut command, &dir.join("log"), limit, |output| output.contains("yes"));
        let ended = ended.unwrap();
        assert!(!ended.ok && !ended.timed_out);
        assert_eq!(ended.output, "no\nyes\n");
        std::fs::remove_dir_all(dir).unwrap();
    }

    /// Whether the process ends within two seconds, or has.
    fn ends(pid: u32) -> bool {
        (0..200).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            let stat = std::fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.is_err() || stat.is_ok_and(|s| s.contains(") Z "))
        })
    }

    /// Goal: what is tethered does not outlive a parent that had no time to end it. Method: a
    /// shell that starts it, and is killed.
    #[test]
    fn a_tethered_program_dies_with_its_parent() {
        let tethered = tethered("sleep");
        let words = std::iter::once(tethered.get_program()).chain(tethered.get_args());
        let words: Vec<&str> = words.filter_map(|word| word.to_str()).collect();
        let mut parent = Command::new("sh")
            .args(["-c", &format!("{} 600 & echo $!; wait", words.join(" "))])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut output = io::BufReader::new(parent.stdout.take().unwrap());
        io::BufRead::read_line(&mut output, &mut line).unwrap();
        let child: u32 = line.trim().parse().unwrap();
        let name = || std::fs::read_to_string(format!("/proc/{child}/comm")).unwrap_or_default();
        while name().trim() != "sleep" {
            std::thread::sleep(Duration::from_millis(1));
        }
        parent.kill().unwrap();
        parent.wait().unwrap();
        assert!(ends(child), "{child} outlived its parent");
    }

    #[test]
    fn results_of_parallel_commands_are_in_order() {
        let done = side_by_side(5, |n| {
            std::thread::sleep(Duration::from_millis(5 * (5 - n as u64)));
            n
        });
        assert_eq!(done, [0, 1, 2, 3, 4]);
        assert!(side_by_side(0, |n| n).is_empty());
    }

    #[test]
    fn output_and_exit_code_of_a_command_are_kept() {
        let dir = std::env::temp_dir().join(format!("xtask-say-{}", std::process::id()));
        let mut command = Command::new("sh");
        command.args(["-c", "echo out; echo err >&2; exit 3"]);
        let ended = run(&mut command, &dir.join("log"), Duration::from_secs(10)).unwrap();
        assert!(!ended.ok && !ended.timed_out);
        assert_eq!(ended.output, "out\nerr\n");
        std::fs::remove_dir_all(dir).unwrap();
    }
}
