//! Standard output, for a reader that may go away.

use std::fmt;
use std::io::{ErrorKind, Write};

use serde::Serialize;

use crate::fail::Fail;

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
