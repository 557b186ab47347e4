//! The boundary between C and Rust: no panic crosses it, and every result becomes a return value of
//! C.

use std::any::Any;
use std::ffi::{CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Mutex, PoisonError};

use barewire::errno::FI_EOTHER;
use barewire::{Error, Result};

/// Return value of a data call that panicked.
pub(crate) const PANICKED: isize = -(FI_EOTHER as isize);

/// Runs a call that returns 0 or a negative error number as an `int`.
#[inline]
pub(crate) fn int(f: impl FnOnce() -> Result<()>) -> c_int {
    value(|| f().map(|()| 0))
}

/// Runs a call that returns a value or a negative error number as an `int`.
#[inline]
pub(crate) fn value(f: impl FnOnce() -> Result<c_int>) -> c_int {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(value)) => value,
        Ok(Err(e)) => -e.fi_errno(),
        Err(_payload) => -FI_EOTHER,
    }
}

/// Runs a data call, which returns 0 or a negative error number as an `ssize_t`.
#[inline]
pub(crate) fn call(f: impl FnOnce() -> Result<()>) -> isize {
    count(|| f().map(|()| 0))
}

/// Runs the fast path of a data call and returns whether it has done the call; `None` if it
/// panicked.
#[inline]
pub(crate) fn at_once(f: impl FnOnce() -> bool) -> Option<bool> {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(done) => Some(done),
        Err(payload) => panicked(payload),
    }
}

/// Not inlined, so that callers reserve no stack for the payload.
#[cold]
#[inline(never)]
fn panicked(payload: Box<dyn Any + Send>) -> Option<bool> {
    drop(payload);
    None
}

/// Runs a call that returns a count or a negative error number as an `ssize_t`.
#[inline]
pub(crate) fn count(f: impl FnOnce() -> Result<usize>) -> isize {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(n)) => n as isize,
        Ok(Err(e)) => -(e.fi_errno() as isize),
        Err(_payload) => PANICKED,
    }
}

/// Runs a call that has no way to report an error.
pub(crate) fn or<T>(otherwise: T, f: impl FnOnce() -> Result<T>) -> T {
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(value)) => value,
        _ => otherwise,
    }
}

/// A static C string of `text`, never freed. There are only a few.
pub(crate) fn intern(text: &str) -> *const c_char {
    static TEXTS: Mutex<Vec<CString>> = Mutex::new(Vec::new());
    let mut texts = TEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(known) = texts.iter().find(|t| t.as_bytes() == text.as_bytes()) {
        return known.as_ptr();
    }
    let Ok(new) = CString::new(text) else { return c"".as_ptr() };
    let at = new.as_ptr();
    texts.push(new);
    at
}

/// Copies `text` to the `len` bytes at `buf`, truncated if necessary and always with its NUL, and
/// returns `buf`, or a static string if there is no room.
///
/// # Safety
/// `buf` is NULL or has `len` writable bytes.
pub(crate) unsafe fn put_text(text: &str, buf: *mut c_char, len: usize) -> *const c_char {
    if buf.is_null() || len == 0 {
        return intern(text);
    }
    let n = text.len().min(len - 1);
    // SAFETY: `n` bytes and the NUL are at most `len`, which the caller has promised; the text is
    // Rust's own and does not overlap memory that C may write.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), buf, n);
        *buf.add(n) = 0;
    }
    buf
}

/// Copies the error data of an entry to the program's buffer, as much as fits, or, if it has none,
/// to `ours`, which stays valid until the next read of an error.
///
/// # Safety
/// `*size` bytes are at `*to` unless one of the two is 0, and `data.len()` at `ours`.
pub(crate) unsafe fn put_err_data(
    data: &[u8],
    to: &mut *mut c_void,
    size: &mut usize,
    ours: *mut u8,
) {
    let theirs = *size > 0 && !to.is_null();
    let (at, n) = if theirs { (to.cast(), data.len().min(*size)) } else { (ours, data.len()) };
    // SAFETY: the caller's promise; the data is Rust's own and does not overlap.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), at, n) };
    if !theirs {
        *to = if n == 0 { std::ptr::null_mut() } else { ours.cast() };
    }
    *size = n;
}

/// The string at `text`, or `None` if it is NULL.
///
/// # Errors
/// [`Error::Invalid`]: it is not UTF-8.
///
/// # Safety
/// `text` is NULL or a string with its NUL that stays as it is for `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char) -> Result<Option<&'a str>> {
    if text.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller's promise.
    let text = unsafe { std::ffi::CStr::from_ptr(text) };
    text.to_str().map(Some).map_err(|_| Error::Invalid("text: not UTF-8"))
}
