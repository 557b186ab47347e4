//! Stub functions of libfabric's tables, which refuse every call with one error number.

use std::ffi::{c_char, c_int};

use barewire::errno::{FI_EBADF, FI_ENOSYS};

/// The error number of a stub function in a table.
pub(crate) trait Errno {
    /// The error number, positive.
    const ERRNO: c_int;
}

/// The function is not implemented.
pub(crate) enum NoSys {}

/// The object is closed.
pub(crate) enum Closed {}

impl Errno for NoSys {
    const ERRNO: c_int = FI_ENOSYS;
}

impl Errno for Closed {
    const ERRNO: c_int = FI_EBADF;
}

/// The return type of a stub function.
pub(crate) trait StubReturn {
    /// The negative error number, or 0 or NULL.
    fn of(errno: c_int) -> Self;
}

impl StubReturn for c_int {
    fn of(errno: c_int) -> Self {
        -errno
    }
}

impl StubReturn for isize {
    fn of(errno: c_int) -> Self {
        -(errno as isize)
    }
}

impl StubReturn for u64 {
    fn of(_: c_int) -> Self {
        0
    }
}

impl StubReturn for *const c_char {
    fn of(_: c_int) -> Self {
        std::ptr::null()
    }
}
