//! `mutant.rs` of the mutated crate: selects the enabled mutation, and records which threads reach
//! which mutations.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::env;
use std::fs::File;
use std::io::Write;
use std::sync::LazyLock;

/// The number of the enabled mutation, if any.
static MADE: LazyLock<Option<usize>> =
    LazyLock::new(|| env::var("BAREWIRE_MUTANT").ok()?.parse().ok());

/// The file for the reached mutations, if any.
static REACHED: LazyLock<Option<String>> = LazyLock::new(|| env::var("BAREWIRE_REACHED").ok());

thread_local!(static SEEN: RefCell<BTreeSet<usize>> = const { RefCell::new(BTreeSet::new()) });

/// Whether mutation `n` is enabled.
pub fn on(n: usize) -> bool {
    if let Some(path) = &*REACHED {
        reached(path, n);
    }
    *MADE == Some(n)
}

#[cold]
fn reached(path: &str, n: usize) {
    // Fails while the thread ends, which is fine.
    if SEEN.try_with(|seen| seen.borrow_mut().insert(n)) == Ok(true) {
        // A test's thread has the test's name.
        let thread = std::thread::current();
        let line = format!("{n} {}\n", thread.name().unwrap_or_default());
        let file = File::options().create(true).append(true).open(path);
        file.and_then(|mut file| file.write_all(line.as_bytes())).expect("the file is written");
    }
}
