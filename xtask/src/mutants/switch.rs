//! Which change is made, and who comes to the places of all: `mutant.rs` of the changed crate.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::env;
use std::fs::File;
use std::io::Write;
use std::sync::LazyLock;

/// The number of the change that is made, if any.
static MADE: LazyLock<Option<usize>> =
    LazyLock::new(|| env::var("BAREWIRE_MUTANT").ok()?.parse().ok());

/// The file that is told which thread comes to which change, if any.
static REACHED: LazyLock<Option<String>> = LazyLock::new(|| env::var("BAREWIRE_REACHED").ok());

thread_local!(static SEEN: RefCell<BTreeSet<usize>> = const { RefCell::new(BTreeSet::new()) });

/// Whether change `n` is made.
pub fn on(n: usize) -> bool {
    if let Some(path) = &*REACHED {
        reached(path, n);
    }
    *MADE == Some(n)
}

#[cold]
fn reached(path: &str, n: usize) {
    // Also when the thread ends.
    if SEEN.try_with(|seen| seen.borrow_mut().insert(n)) == Ok(true) {
        // A thread of a test is called as the test.
        let thread = std::thread::current();
        let line = format!("{n} {}\n", thread.name().unwrap_or_default());
        let file = File::options().create(true).append(true).open(path);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the file is written");
    }
}
