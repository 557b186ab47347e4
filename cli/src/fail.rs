//! The error of a command.

use std::fmt;
use std::process::ExitCode;

/// The problem, and the command that fixes it, if any. Prints as one line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fail {
    what: String,
    mend: Option<String>,
    usage: bool,
    /// Print nothing: the reader of standard output is gone.
    quiet: bool,
}

impl Fail {
    /// A failure: exit code 1.
    pub(crate) fn new(what: impl fmt::Display) -> Self {
        Self { what: one_line(what), mend: None, usage: false, quiet: false }
    }

    /// A wrong usage: exit code 2.
    pub(crate) fn usage(what: impl fmt::Display) -> Self {
        Self { usage: true, ..Self::new(what) }
    }

    /// The reader of standard output has closed it, as `head` does: exit code 1 without a message.
    pub(crate) fn broken_pipe() -> Self {
        Self { quiet: true, ..Self::new("nobody reads standard output") }
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Adds the remedy.
    pub(crate) fn mend(self, mend: impl fmt::Display) -> Self {
        Self { mend: Some(one_line(mend)), ..self }
    }

    /// The error of `port`, if it does not open, in place of this one: no station can be resolved
    /// through it.
    pub(crate) fn or_of_port(self, port: &str) -> Self {
        barewire_driver::open::check(port).err().map_or(self, Self::new)
    }

    pub(crate) fn exit_code(&self) -> ExitCode {
        ExitCode::from(if self.usage { 2 } else { 1 })
    }
}

impl fmt::Display for Fail {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.what)?;
        self.mend.as_ref().map_or(Ok(()), |mend| write!(f, "; {mend}"))
    }
}

fn one_line(text: impl fmt::Display) -> String {
    text.to_string().split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failure_is_one_line_with_what_mends_it() {
        let fail = Fail::new("no\nspace").mend("try: df /dev/shm");
        assert_eq!(fail.to_string(), "no space; try: df /dev/shm");
        assert_eq!(fail.exit_code(), ExitCode::from(1));
        assert_eq!(Fail::usage("x").exit_code(), ExitCode::from(2));
    }
}
