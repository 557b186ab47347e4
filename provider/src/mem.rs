//! Memory that libfabric or the application frees: it comes from C's allocator.

use std::ffi::{c_char, c_void};

/// Bytes behind every structure, since a newer libfabric copies with a larger `sizeof` than ours.
const ROOM: usize = 256;

/// Zeroed memory for a `T` and then some, or NULL.
pub(crate) fn zeroed<T>() -> *mut T {
    // SAFETY: `calloc` may be called with any sizes; it aligns for every type of C.
    unsafe { libc::calloc(1, size_of::<T>() + ROOM) }.cast()
}

/// A copy of `bytes`, or NULL if there are none or no memory.
pub(crate) fn copy(bytes: &[u8]) -> *mut c_void {
    if bytes.is_empty() {
        return std::ptr::null_mut();
    }
    // SAFETY: as above.
    let to = unsafe { libc::calloc(1, bytes.len()) };
    if !to.is_null() {
        // SAFETY: `to` is fresh memory of that length.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.cast(), bytes.len()) };
    }
    to
}

/// A copy of `text` with its NUL, or NULL.
pub(crate) fn copy_text(text: Option<&str>) -> *mut c_char {
    let Some(text) = text else { return std::ptr::null_mut() };
    let mut bytes = text.as_bytes().to_vec();
    bytes.push(0);
    copy(&bytes).cast()
}

/// Frees what the functions above returned, NULL included.
pub(crate) fn free<T>(at: *mut T) {
    // SAFETY: every caller passes what came from C's allocator and goes out of use.
    unsafe { libc::free(at.cast()) };
}
