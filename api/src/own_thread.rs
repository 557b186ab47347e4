//! Threads of barewire itself.

use std::io;
use std::thread::{Builder, JoinHandle};

use barewire_driver::own_thread::without_signals;

/// Starts a thread with a stack of `stack_len` bytes, or of the default length if the program's
/// thread-local variables leave too little of it. A signal sent to the process never goes to it.
///
/// # Errors
/// The system has no thread left. Nothing runs then.
pub(crate) fn spawn(
    name: &str,
    stack_len: usize,
    run: impl Fn() + Clone + Send + 'static,
) -> io::Result<JoinHandle<()>> {
    let named = || Builder::new().name(name.to_owned());
    let again = run.clone();
    without_signals(|| named().stack_size(stack_len).spawn(run).or_else(|_| named().spawn(again)))
}
