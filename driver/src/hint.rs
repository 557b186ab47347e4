//! Hints to the compiler about branches.

/// Returns `value`, and marks the branch that does as a cold path. Compiles to nothing.
///
/// Without a hint each branch counts as 50/50; after 20 nested ones the hot path looks like 1 in
/// 10^6, and its registers are spilled.
#[cold]
pub fn cold<T>(value: T) -> T {
    value
}

/// Calls `f` on a cold path, out of line, so that the caller's hot path needs neither its code nor
/// its stack.
#[cold]
#[inline(never)]
pub fn outlined<T>(f: impl FnOnce() -> T) -> T {
    f()
}
