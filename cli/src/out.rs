//! Standard output, for a reader that may go away, and standard error, which may be a full file.

use std::fmt;
use std::io::{ErrorKind, Write};

use serde::Serialize;

use crate::fail::Fail;

/// As `std`'s, but where standard error cannot be written nothing is: `std`'s ends the process, and
/// a switch or a recording is worth more than its words.
macro_rules! eprintln {
    ($($text:tt)*) => {
        $crate::out::tell(::std::format_args!($($text)*))
    };
}

/// Prints a line to standard error, if that can be written.
pub(crate) fn tell(line: fmt::Arguments<'_>) {
    // In one piece, as processes of one terminal write at once.
    let _ = std::io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Prints `text` as it is.
///
/// # Errors
/// It cannot be written. One whose reader has gone, as `head` does, is [quiet](Fail::unread): what
/// the command has opened is left in order.
pub(crate) fn print(text: impl fmt::Display) -> Result<(), Fail> {
    let mut out = std::io::stdout().lock();
    match write!(out, "{text}").and_then(|()| out.flush()) {
        Ok(()) => Ok(()),
        Err(why) if why.kind() == ErrorKind::BrokenPipe => Err(Fail::unread()),
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

/// Prints a line that nobody has to read.
pub(crate) fn mention(line: impl fmt::Display) {
    let mut out = std::io::stdout().lock();
    // The one who started us may have read what it wanted and closed its end.
    let _ = writeln!(out, "{line}").and_then(|()| out.flush());
}
