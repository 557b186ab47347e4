//! Threads of barewire itself, in the program's process.

use std::io;

use nix::sys::signal::{SigSet, SigmaskHow, pthread_sigmask};

/// Runs `start`, in which threads are made that no signal goes to: one sent to the process goes to
/// the program's threads, whose handlers may jump out of what they interrupt.
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
