//! Commands to QEMU's monitor: disconnect cables, stop processors.

use std::io::{Error, ErrorKind, Read, Result, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Prompt of the monitor after each command.
const PROMPT: &[u8] = b"(qemu) ";

/// Timeout, far above the duration of a command.
const PATIENCE: Duration = Duration::from_secs(10);

/// Sends one command to the monitor at `path`, and waits until it is executed.
///
/// # Errors
/// No monitor listens, the monitor does not answer, or it prints anything but a prompt: the
/// commands used here print nothing on success.
pub(crate) fn run_command(path: &Path, command: &str) -> Result<()> {
    let mut socket = UnixStream::connect(path)?;
    socket.set_read_timeout(Some(PATIENCE))?;
    read_reply(&mut socket)?;
    writeln!(socket, "{command}")?;
    let reply = read_reply(&mut socket)?;
    // The monitor echoes the command, with terminal escapes, on a line of its own.
    let rest = reply.split_once('\n').map_or("", |(_, rest)| rest).trim();
    if rest.is_empty() { Ok(()) } else { Err(Error::other(rest.to_owned())) }
}

/// The output before the next prompt.
fn read_reply(socket: &mut impl Read) -> Result<String> {
    let mut reply = Vec::new();
    let mut some = [0; 512];
    while !reply.ends_with(PROMPT) {
        match socket.read(&mut some)? {
            0 => return Err(Error::from(ErrorKind::UnexpectedEof)),
            n => reply.extend_from_slice(&some[..n]),
        }
    }
    reply.truncate(reply.len() - PROMPT.len());
    Ok(String::from_utf8_lossy(&reply).into_owned())
}

#[cfg(test)]
mod tests {
    use std::io::BufRead;
    use std::os::unix::net::UnixListener;

    use super::*;

    /// A monitor that answers one command with `reply`.
    fn run_with_reply(reply: &'static str) -> (Result<()>, String) {
        let name = format!("xtask-monitor-{}-{}", std::process::id(), reply.len());
        let path = std::env::temp_dir().join(name);
        let listener = UnixListener::bind(&path).unwrap();
        let monitor = std::thread::spawn(move || {
            let (mut socket, _) = listener.accept().unwrap();
            write!(socket, "QEMU 1.2 monitor\r\n(qemu) ").unwrap();
            let mut command = String::new();
            std::io::BufReader::new(socket.try_clone().unwrap()).read_line(&mut command).unwrap();
            write!(socket, "{}\r\n{reply}(qemu) ", command.trim()).unwrap();
            command
        });
        let result = run_command(&path, "set_link n0 off");
        std::fs::remove_file(&path).unwrap();
        (result, monitor.join().unwrap())
    }

    #[test]
    fn a_command_is_carried_out_or_refused() {
        let (result, command) = run_with_reply("");
        assert_eq!((result.is_ok(), command.as_str()), (true, "set_link n0 off\n"));
        let (refused, _) = run_with_reply("Device 'n0' not found\r\n");
        assert!(refused.unwrap_err().to_string().contains("not found"));
        assert!(run_command(Path::new("/nonexistent"), "stop").is_err());
    }
}
