//! Output to standard output, whose reader may close it, and to standard error, which may be a full
//! file.

use std::fmt;
use std::io::{ErrorKind, Write};

use serde::Serialize;

use crate::fail::Fail;

/// As `std`'s, but ignores errors of standard error: `std`'s ends the process, and a switch or a
/// recording has to go on.
macro_rules! eprintln {
    ($($text:tt)*) => {
        $crate::out::print_stderr(::std::format_args!($($text)*))
    };
}

/// Prints a line to standard error, if that can be written.
pub(crate) fn print_stderr(line: fmt::Arguments<'_>) {
    // In one write, since processes may share the terminal.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Prints `text` as it is.
///
/// # Errors
/// It cannot be written. If its reader has closed it, as `head` does, the error is
/// [quiet](Fail::broken_pipe), and the command ends in order.
pub(crate) fn print(text: impl fmt::Display) -> Result<(), Fail> {
    let mut out = std::io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(why) if why.kind() == ErrorKind::BrokenPipe => Err(Fail::broken_pipe()),
        Err(why) => Err(Fail::new(format!("standard output: {why}"))),
    }
}

/// Prints `value` as JSON on a line of its own.
///
/// # Errors
/// As [`print()`].
pub(crate) fn json(value: &impl Serialize) -> Result<(), Fail> {
    let line = serde_json::to_string(value).map_err(Fail::new)?;
    print(format_args!("{line}\n"))
}

/// Prints an optional line: a closed standard output is no error.
pub(crate) fn print_optional(line: impl fmt::Display) {
    let mut out = std::io::stdout().lock();
    // The reader may have closed its end.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
