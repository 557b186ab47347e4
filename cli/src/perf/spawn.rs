//! The server that a client starts for itself.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};

use super::Common;
use crate::fail::Fail;

/// A server of our own, killed when this is dropped.
pub(super) struct Spawned {
    child: Child,
    /// Its address.
    pub(super) addr: String,
}

impl Spawned {
    /// Starts `barewire pingpong --listen --once` on the port of the options, and waits until it
    /// listens.
    ///
    /// Its standard error is ours, so that what it has to say is seen.
    ///
    /// # Errors
    /// It does not start, or ends before it listens.
    pub(super) fn start(args: &Common) -> Result<Self, Fail> {
        let exe = std::env::current_exe()
            .map_err(|why| Fail::new(format!("the path of this program is not known: {why}")))?;
        // It ends with us, however we end.
        let parent = std::process::id().to_string();
        let mut child = Command::new(exe)
            .args([
                "pingpong", "--listen", "--once", "--json", "--parent", &parent, "--port",
                &args.port,
            ])
            .args(args.key_args())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(|why| Fail::new(format!("the other side does not start: {why}")))?;
        let mut line = String::new();
        if let Some(stdout) = child.stdout.take() {
            // An error leaves the line empty, which is judged below.
            let _ = BufReader::new(stdout).read_line(&mut line);
        }
        // From here on a drop ends the child.
        let mut spawned = Self { child, addr: String::new() };
        match addr_in(&line) {
            Some(addr) => spawned.addr = addr,
            None => return Err(spawned.ended_early()),
        }
        Ok(spawned)
    }

    /// Waits for its end after its one client is done.
    ///
    /// # Errors
    /// It ended with an exit code other than 0.
    pub(super) fn finish(mut self) -> Result<(), Fail> {
        match self.child.wait() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(Fail::new(format!("the other side failed: {status}"))),
            Err(why) => Err(Fail::new(format!("the other side cannot be waited for: {why}"))),
        }
    }

    fn ended_early(&mut self) -> Fail {
        let status = self.child.wait().map(|status| status.to_string()).unwrap_or_default();
        Fail::new(format!("the other side ended before it listened: {status}"))
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        // Both fail if it has ended, which is what is wanted.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The address in the line `{"listening":"barewire://..."}` that a server prints.
fn addr_in(line: &str) -> Option<String> {
    let object: serde_json::Value = serde_json::from_str(line).ok()?;
    Some(object.get("listening")?.as_str()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_is_found_in_the_first_line() {
        let line = "{\"listening\":\"barewire://02:00:00:00:00:01/0\"}\n";
        assert_eq!(addr_in(line).as_deref(), Some("barewire://02:00:00:00:00:01/0"));
        assert_eq!(addr_in(""), None);
        assert_eq!(addr_in("{}"), None);
    }
}
