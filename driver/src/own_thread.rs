//! Threads of barewire itself, in the program's process.

use std::io;

use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};

/// Runs `start` with all signals blocked, so that threads made in it never handle one. A signal for
/// the process then goes to the program's own threads, whose handlers may use `longjmp`.
///
/// # Errors
/// Those of `start`.
pub fn without_signals<T>(start: impl FnOnce() -> io::Result<T>) -> io::Result<T> {
    let mut before = SigSet::empty();
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&SigSet::all()), Some(&mut before))?;
    let started = start();
    pthread_sigmask(SigmaskHow::SIG_SETMASK, Some(&before), None)?;
    started
}
