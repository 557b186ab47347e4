//! Counts what each thread holds of the heap.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator with a count per thread.
struct Counting;

#[global_allocator]
static GLOBAL: Counting = Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
}

/// Bytes that this thread has allocated minus those it has freed; only differences mean something.
pub(crate) fn held() -> isize {
    HELD.get()
}

/// Bytes in use of the heap of the C library, by whichever thread and language; only differences
/// mean something.
pub(crate) fn in_use() -> i64 {
    // SAFETY: it reads counts of the heap, under its locks.
    let info = unsafe { libc::mallinfo2() };
    (info.uordblks + info.hblkhd) as i64
}

fn count(by: isize) {
    // A thread that ends may free after its thread-locals are gone.
    let _ = HELD.try_with(|h| h.set(h.get() + by));
}

// SAFETY: every call is the system allocator's with the same arguments, which keeps its promises;
// counting touches a thread-local without allocation.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise is the one asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: the caller's promise is the one asked for.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: `ptr` came from `System` with this layout, as all of ours do.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        count(new_size as isize - layout.size() as isize);
        // SAFETY: `ptr` came from `System` with this layout, as all of ours do.
        unsafe { System.realloc(ptr, layout, new_size) }
    }
}
