//! The libfabric that loaded this provider: its parameters, its log and its version.
//!
//! The provider is not linked with libfabric, so that one binary loads under every version.
//! Functions are looked up in the library that the process has mapped. Without it, parameters come
//! from the environment and warnings are dropped.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::io::Write;
use std::sync::{Once, OnceLock};

use barewire::settings::{BadSetting, KnownAs, Settings, VARIABLES};

use crate::abi::Provider;

type Define =
    unsafe extern "C" fn(*const Provider, *const c_char, c_int, *const c_char, ...) -> c_int;
type Version = unsafe extern "C" fn() -> u32;
type Enabled = unsafe extern "C" fn(*const Provider, c_int, c_int) -> c_int;
type Log =
    unsafe extern "C" fn(*const Provider, c_int, c_int, *const c_char, c_int, *const c_char, ...);

/// Functions of the libfabric in this process.
struct Host {
    define: Option<Define>,
    version: Option<Version>,
    enabled: Option<Enabled>,
    log: Option<Log>,
}

fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| {
        let lib = library();
        // SAFETY: the four have these types since libfabric 1.0, and a function pointer is as
        // large as what `dlsym` returns; `None` is its NULL.
        unsafe {
            use std::mem::transmute;
            Host {
                define: transmute::<*mut c_void, Option<Define>>(find(lib, c"fi_param_define")),
                version: transmute::<*mut c_void, Option<Version>>(find(lib, c"fi_version")),
                enabled: transmute::<*mut c_void, Option<Enabled>>(find(lib, c"fi_log_enabled")),
                log: transmute::<*mut c_void, Option<Log>>(find(lib, c"fi_log")),
            }
        }
    })
}

fn find(lib: *mut c_void, name: &CStr) -> *mut c_void {
    if lib.is_null() {
        return std::ptr::null_mut();
    }
    // SAFETY: `lib` is a handle that `dlopen` gave and that is never closed.
    unsafe { libc::dlsym(lib, name.as_ptr()) }
}

/// A handle of the mapped libfabric, whatever its file is called (wheels rename it), or NULL.
fn library() -> *mut c_void {
    let mut lib: *mut c_void = std::ptr::null_mut();
    // SAFETY: the callback fits, and `lib` outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(look), (&raw mut lib).cast()) };
    lib
}

/// Stops at the first mapped library whose file name begins with `libfabric`.
unsafe extern "C" fn look(info: *mut libc::dl_phdr_info, _size: usize, data: *mut c_void) -> c_int {
    // SAFETY: the loader passes a valid record, whose name is NULL or a string.
    let name = unsafe { (*info).dlpi_name };
    if name.is_null() {
        return 0;
    }
    // SAFETY: as above.
    let path = unsafe { CStr::from_ptr(name) }.to_bytes();
    let file = path.rsplit(|&b| b == b'/').next().unwrap_or(path);
    if !file.starts_with(b"libfabric") {
        return 0;
    }
    // SAFETY: `name` is a string; a library that is mapped already is only counted once more.
    let lib = unsafe { libc::dlopen(name, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    // SAFETY: `data` is the place that `library` passed.
    unsafe { *data.cast::<*mut c_void>() = lib };
    c_int::from(!lib.is_null())
}

/// The version of the interface that the library offers by default.
pub(crate) fn version() -> Option<u32> {
    // SAFETY: `fi_version` takes nothing and may be called at any time.
    host().version.map(|version| unsafe { version() })
}

/// Defines the provider's parameters in libfabric, for `fi_info -e`.
pub(crate) fn define_params(provider: *const Provider) {
    const FI_PARAM_STRING: c_int = 0;
    let Some(define) = host().define else { return };
    for (name, what, default) in VARIABLES {
        let short = name.trim_start_matches("BAREWIRE_").to_ascii_lowercase();
        let help = format!("{what} (default {default})");
        let (Ok(short), Ok(help)) = (CString::new(short), CString::new(help)) else { continue };
        // SAFETY: `provider` is our static record. The library copies both strings; the help is
        // an argument of a format, so nothing in it is taken for one.
        unsafe {
            define(provider, short.as_ptr(), FI_PARAM_STRING, c"%s".as_ptr(), help.as_ptr());
        }
    }
}

/// Settings from `FI_BAREWIRE_PORT` and its like, or `BAREWIRE_PORT` as everywhere else.
///
/// # Errors
/// [`BadSetting`]: of the first invalid parameter.
pub(crate) fn settings() -> Result<Settings, BadSetting> {
    Settings::parse(variable)
}

/// The provider name of the settings, even if others are invalid.
///
/// # Errors
/// [`BadSetting`]: the name is not supported.
pub(crate) fn name_set() -> Result<KnownAs, BadSetting> {
    let name = |name: &str| variable(name).filter(|_| name == "BAREWIRE_AS");
    Settings::parse(name).map(|s| s.known_as)
}

fn variable(name: &str) -> Option<String> {
    resolve(name, env).map(|(_, value)| value)
}

fn env(variable: &str) -> Option<String> {
    std::env::var_os(variable).map(|v| v.to_string_lossy().into_owned())
}

/// The variable that sets `name`, with its value: `FI_name`, or `name` if that one is unset.
fn resolve(name: &str, env: impl Fn(&str) -> Option<String>) -> Option<(String, String)> {
    [format!("FI_{name}"), name.to_owned()].into_iter().find_map(|variable| {
        let value = env(&variable).filter(|value| !Settings::is_unset(name, value))?;
        Some((variable, value))
    })
}

/// The line of a bad setting, which begins with the variable that was read.
pub(crate) fn line_of(e: &BadSetting) -> String {
    let is_fi = resolve(e.name, env).is_some_and(|(variable, _)| variable != e.name);
    format!("{}{e}", if is_fi { "FI_" } else { "" })
}

/// Writes a line to libfabric's log at level `warn`. If libfabric shows no warnings, which is its
/// default, the first such line of the process goes to stderr: the user has set a variable of this
/// provider, and would otherwise only see that the provider is missing.
pub(crate) fn warn_on_stderr(line: &str) {
    static ONCE: Once = Once::new();
    if logs(FI_LOG_WARN) {
        return log(FI_LOG_WARN, line);
    }
    // In one write: ranks of a job share stderr. Errors are ignored.
    let line = format!("barewire: {line}\n");
    ONCE.call_once(|| drop(std::io::stderr().write_all(line.as_bytes())));
}

const FI_LOG_WARN: c_int = 0;

/// The subsystem of the provider's lines in libfabric's log.
const FI_LOG_CORE: c_int = 0;

/// Whether libfabric shows lines of a level (`enum fi_log_level`).
pub(crate) fn logs(level: c_int) -> bool {
    // SAFETY: the provider's record is static, and level and part are numbers.
    host().enabled.is_some_and(|on| unsafe { on(crate::provider(), level, FI_LOG_CORE) != 0 })
}

/// Writes a line to libfabric's log.
pub(crate) fn log(level: c_int, line: &str) {
    let Some(log) = host().log else { return };
    let Ok(line) = CString::new(line) else { return };
    let (file, format) = (c"barewire".as_ptr(), c"%s\n".as_ptr());
    // SAFETY: the provider's record is static, and the line is an argument of the format.
    unsafe { log(crate::provider(), level, FI_LOG_CORE, file, 0, format, line.as_ptr()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: an empty variable of the provider does not hide the common one, except where an empty
    /// value is refused.
    #[test]
    fn an_empty_variable_does_not_hide_the_common_one() {
        let read = |name: &str, fi: Option<&str>, common: Option<&str>| {
            let env = |variable: &str| if variable == name { common } else { fi };
            resolve(name, |variable| env(variable).map(str::to_owned))
        };
        let is = |name: &str, value: &str| Some((name.to_owned(), value.to_owned()));
        let (port, fi_port) = ("BAREWIRE_PORT", "FI_BAREWIRE_PORT");
        assert_eq!(read(port, Some("shm:a"), Some("shm:b")), is(fi_port, "shm:a"));
        for empty in ["", " "] {
            assert_eq!(read(port, Some(empty), Some("shm:b")), is(port, "shm:b"));
            assert_eq!(read(port, Some(empty), Some(empty)), None);
            assert_eq!(read(port, Some("shm:a"), Some(empty)), is(fi_port, "shm:a"));
        }
        for name in [
            "BAREWIRE_KEY_FILE",
            "BAREWIRE_CERT_FILE",
            "BAREWIRE_CERT_KEY_FILE",
            "BAREWIRE_ROOTS_FILE",
            "BAREWIRE_PEER_IDS",
        ] {
            assert_eq!(read(name, Some(""), Some("/run/x")), is(&format!("FI_{name}"), ""));
            assert_eq!(read(name, None, Some("")), is(name, ""));
            assert_eq!(read(name, None, None), None);
        }
    }
}
