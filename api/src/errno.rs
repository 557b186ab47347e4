//! Error codes by their libfabric names, and their texts.
//!
//! Calls return [`Error`]; each variant has one `fi_errno`. The constants are for code that
//! compares numbers, and for C programs. The values are those of rdma/fi_errno.h.

pub use barewire_dataplane::error::{Error, Result};

macro_rules! errnos {
    ($($name:ident = $value:expr, $text:literal;)*) => {
        $(#[doc = concat!($text, ".")] pub const $name: i32 = $value;)*

        /// The text of an error number, positive or negated; "unknown error" for one that
        /// libfabric does not have.
        ///
        /// Source: fi_errno(3), "fi_strerror".
        #[doc(alias = "fi_strerror")]
        pub const fn strerror(errnum: i32) -> &'static str {
            match errnum.unsigned_abs() as i32 {
                0 => "success",
                $($value => $text,)*
                _ => "unknown error",
            }
        }

        /// Every constant with its name.
        pub const ALL: &[(&str, i32)] = &[$((stringify!($name), $value),)*];
    };
}

errnos! {
    FI_EPERM = 1, "operation not permitted";
    FI_ENOENT = 2, "no such file or directory";
    FI_EINTR = 4, "interrupted system call";
    FI_EIO = 5, "input/output error";
    FI_E2BIG = 7, "argument list too long";
    FI_EBADF = 9, "bad handle";
    FI_EAGAIN = 11, "resource temporarily unavailable";
    FI_ENOMEM = 12, "out of memory";
    FI_EACCES = 13, "permission denied";
    FI_EFAULT = 14, "bad address";
    FI_EBUSY = 16, "object is busy";
    FI_ENODEV = 19, "no such device";
    FI_EINVAL = 22, "invalid argument";
    FI_EMFILE = 24, "too many open files";
    FI_ENOSPC = 28, "no space left on device";
    FI_ENOSYS = 38, "function not implemented";
    FI_ENOMSG = 42, "no message of the desired kind";
    FI_ENODATA = 61, "no data available";
    FI_EOVERFLOW = 75, "value too large";
    FI_EMSGSIZE = 90, "message too long";
    FI_ENOPROTOOPT = 92, "option not available";
    FI_EOPNOTSUPP = 95, "operation not supported";
    FI_EADDRINUSE = 98, "address already in use";
    FI_EADDRNOTAVAIL = 99, "address not available";
    FI_ENETDOWN = 100, "network is down";
    FI_ENETUNREACH = 101, "network is unreachable";
    FI_ECONNABORTED = 103, "connection aborted";
    FI_ECONNRESET = 104, "connection reset by peer";
    FI_ENOBUFS = 105, "no buffer space available";
    FI_EISCONN = 106, "endpoint is already connected";
    FI_ENOTCONN = 107, "endpoint is not connected";
    FI_ESHUTDOWN = 108, "endpoint has been shut down";
    FI_ETIMEDOUT = 110, "timed out";
    FI_ECONNREFUSED = 111, "connection refused";
    FI_EHOSTDOWN = 112, "host is down";
    FI_EHOSTUNREACH = 113, "no route to host";
    FI_EALREADY = 114, "operation already in progress";
    FI_EINPROGRESS = 115, "operation now in progress";
    FI_EREMOTEIO = 121, "remote input/output error";
    FI_ECANCELED = 125, "operation canceled";
    FI_EKEYREJECTED = 129, "key was rejected";
    FI_EOTHER = 256, "unspecified error";
    FI_ETOOSMALL = 257, "provided buffer is too small";
    FI_EOPBADSTATE = 258, "operation not permitted in current state";
    FI_EAVAIL = 259, "error available";
    FI_EBADFLAGS = 260, "flags not supported";
    FI_ENOEQ = 261, "missing or unavailable event queue";
    FI_EDOMAIN = 262, "invalid resource domain";
    FI_ENOCQ = 263, "missing or unavailable completion queue";
    FI_ECRC = 264, "checksum error";
    FI_ETRUNC = 265, "message truncated";
    FI_ENOKEY = 266, "required key not available";
    FI_ENOAV = 267, "missing or unavailable address vector";
    FI_EOVERRUN = 268, "queue has been overrun";
    FI_ENORX = 269, "receiver not ready, no receive buffers available";
}

/// The call succeeded.
pub const FI_SUCCESS: i32 = 0;
/// The same as [`FI_EAGAIN`].
pub const FI_EWOULDBLOCK: i32 = FI_EAGAIN;

/// The error of a call that could not get a file or a descriptor for `what`, by the system's
/// `errno`. The remedy is logged.
pub fn refused_by_system(what: &str, errno: i32) -> Error {
    let (error, mend) = mend_of(errno);
    let why = std::io::Error::from_raw_os_error(errno);
    tracing::error!("{what}: {why}{mend}");
    error
}

/// The [`Error`] for an `errno` of a file or a descriptor, and the remedy: empty, or with a leading
/// "; ".
pub(crate) fn mend_of(errno: i32) -> (Error, &'static str) {
    match errno {
        libc::EMFILE => (Error::ManyFiles, "; raise the process's limit: ulimit -n 65536"),
        libc::ENFILE => (Error::ManyFiles, "; raise the system's limit: sysctl fs.file-max"),
        libc::ENOSPC => (Error::NoSpace, "; enlarge it: mount -o remount,size=1G /dev/shm"),
        libc::EAGAIN => (Error::NoMem, "; raise the limit on threads: ulimit -u"),
        libc::ENOENT | libc::ENOTDIR | libc::EISDIR | libc::ELOOP => {
            (Error::Invalid("no such file"), "; name a file that is there")
        }
        libc::EACCES | libc::EPERM | libc::EROFS => {
            (Error::Access, "; see who may use it, and its directories: ls -l")
        }
        libc::ENOMEM => (Error::NoMem, "; free some memory"),
        _ => (Error::NoMem, ""),
    }
}

/// The error of a domain that could not be opened: a code for the program, a line for its user.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{line}")]
pub struct OpenError {
    /// The error code.
    pub error: Error,
    /// What is missing, and the remedy, in one line.
    pub line: String,
}

impl OpenError {
    pub(crate) fn new(error: Error, line: impl Into<String>) -> Self {
        Self { error, line: line.into() }
    }
}

impl From<Error> for OpenError {
    fn from(error: Error) -> Self {
        Self { error, line: error.to_string() }
    }
}

impl From<OpenError> for Error {
    fn from(e: OpenError) -> Self {
        e.error
    }
}

/// Converts the error of a port that does not open.
pub(crate) fn open_error(e: barewire_driver::error::OpenError) -> OpenError {
    OpenError::new(error_of(e.errno()), e.to_string())
}

/// The [`Error`] that is closest to an `errno` of the system.
fn error_of(errno: i32) -> Error {
    match errno {
        libc::EINVAL => Error::Invalid("port"),
        libc::EADDRINUSE => Error::AddrInUse,
        libc::EACCES | libc::EPERM => Error::Access,
        libc::EBUSY => Error::Busy,
        libc::ENOMEM | libc::EUSERS => Error::NoMem,
        libc::ENOSPC => Error::NoSpace,
        libc::EMFILE | libc::ENFILE => Error::ManyFiles,
        libc::EPROTO => Error::NoProtoOpt,
        libc::ENETDOWN => Error::NetDown,
        _ => Error::NoDev,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_error_has_a_named_number_with_a_text() {
        let all = [
            Error::Again,
            Error::Avail,
            Error::Invalid(""),
            Error::MsgTooLong,
            Error::BadFlags,
            Error::OpNotSupp(""),
            Error::OpBadState,
            Error::NoCq,
            Error::NoAv,
            Error::NoEq,
            Error::Busy,
            Error::NoSys,
            Error::NoData,
            Error::Trunc,
            Error::NoMsg,
            Error::Canceled,
            Error::HostUnreach,
            Error::ConnReset,
            Error::NoProtoOpt,
            Error::TooSmall,
            Error::TimedOut,
            Error::AddrNotAvail,
            Error::AddrInUse,
            Error::NoKey,
            Error::KeyRejected,
            Error::Access,
            Error::NoMem,
            Error::ManyFiles,
            Error::NoSpace,
            Error::NetDown,
            Error::ConnRefused,
            Error::BadFd,
            Error::NoDev,
            Error::Overrun,
            Error::Overflow,
        ];
        for e in all {
            let n = e.fi_errno();
            assert!(ALL.iter().any(|&(_, v)| v == n), "{e:?} = {n} has no constant");
            assert_ne!(strerror(n), "unknown error");
            assert_eq!(strerror(n), strerror(-n));
        }
        assert_eq!(strerror(9999), "unknown error");
    }

    #[test]
    fn a_file_that_is_refused_comes_with_what_mends_it() {
        for (errno, error, says) in [
            (libc::ENOENT, FI_EINVAL, "name a file that is there"),
            (libc::EACCES, FI_EACCES, "ls -l"),
            (libc::EMFILE, FI_EMFILE, "ulimit -n"),
            (libc::ENOMEM, FI_ENOMEM, "free some memory"),
        ] {
            let (is, mend) = mend_of(errno);
            assert!(is.fi_errno() == error && mend.contains(says), "{errno}: {is:?}{mend}");
        }
        assert_eq!(mend_of(libc::EIO).1, "", "memory has nothing to do with it");
    }

    #[test]
    fn numbers_below_256_are_the_systems() {
        let pairs = [
            (FI_EAGAIN, libc::EAGAIN),
            (FI_ENOSYS, libc::ENOSYS),
            (FI_EMSGSIZE, libc::EMSGSIZE),
            (FI_EOPNOTSUPP, libc::EOPNOTSUPP),
            (FI_ECANCELED, libc::ECANCELED),
            (FI_EKEYREJECTED, libc::EKEYREJECTED),
            (FI_EHOSTUNREACH, libc::EHOSTUNREACH),
            (FI_ECONNRESET, libc::ECONNRESET),
            (FI_ENOPROTOOPT, libc::ENOPROTOOPT),
            (FI_EADDRNOTAVAIL, libc::EADDRNOTAVAIL),
            (FI_ENODATA, libc::ENODATA),
            (FI_ENOMSG, libc::ENOMSG),
            (FI_EREMOTEIO, libc::EREMOTEIO),
        ];
        for (ours, system) in pairs {
            assert_eq!(ours, system);
        }
    }

    /// The numbers of the installed header, where there is one.
    #[test]
    fn numbers_from_256_are_the_headers() {
        let Ok(text) = std::fs::read_to_string("/usr/include/rdma/fi_errno.h") else {
            println!("SKIPPED: no rdma/fi_errno.h is installed");
            return;
        };
        for &(name, value) in ALL.iter().filter(|&&(_, v)| v > 256) {
            let line = text.lines().find(|l| l.split_whitespace().next() == Some(name));
            let line = line.unwrap_or_else(|| panic!("{name} is not in the header"));
            assert!(line.contains(&format!("= {value},")), "{line}");
        }
    }
}
