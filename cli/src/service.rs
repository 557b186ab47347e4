//! What systemd is told of a service: datagrams to the socket that it names, as sd_notify(3) says.

use std::env::var;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

/// How long the words that are said once may wait for room. Those that are repeated never wait.
const PATIENCE: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(10);
/// Between two signs of life for the status alone, where nobody watches for them.
const STATUS_EVERY: Duration = Duration::from_secs(5);

/// Who started this process, if he wants to be told of it.
pub(crate) struct Service {
    to: Option<(UnixDatagram, SocketAddr)>,
    /// Time between two signs of life.
    every: Duration,
    told: Instant,
}

impl Service {
    /// Reads `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`. What makes no sense is as if it
    /// were not set, with a line in the log.
    pub(crate) fn from_env() -> Self {
        let to = var("NOTIFY_SOCKET").ok().and_then(|name| {
            let open = || {
                let socket = UnixDatagram::unbound()?;
                socket.set_nonblocking(true)?;
                Ok::<_, std::io::Error>((socket, address(&name)?))
            };
            let opened = open();
            opened.inspect_err(|why| tracing::warn!("NOTIFY_SOCKET={name}: {why}")).ok()
        });
        let usec = |name| var(name).ok()?.parse::<u64>().ok();
        let is_ours = usec("WATCHDOG_PID").is_none_or(|pid| pid == u64::from(std::process::id()));
        let limit = usec("WATCHDOG_USEC").filter(|&us| is_ours && us > 0);
        // Half of it, as sd_watchdog_enabled(3) recommends.
        let every = limit.map_or(STATUS_EVERY, |us| Duration::from_micros(us / 2));
        Self { to, every, told: Instant::now() }
    }

    /// It has begun to do what it is for.
    pub(crate) fn ready(&mut self, status: &str) {
        self.told = Instant::now();
        self.tell_once(&format!("READY=1\nSTATUS={status}"));
    }

    /// It lives, if it is time to say so.
    pub(crate) fn alive(&mut self, now: Instant, status: impl FnOnce() -> String) {
        if self.to.is_some() && now.duration_since(self.told) >= self.every {
            self.told = now;
            // The next one comes soon.
            let _ = self.tell(&format!("WATCHDOG=1\nSTATUS={}", status()));
        }
    }

    /// It is about to end.
    pub(crate) fn stopping(&self) {
        self.tell_once("STOPPING=1");
    }

    fn tell_once(&self, words: &str) {
        let until = Instant::now() + PATIENCE;
        while let Err(why) = self.tell(words) {
            if why.kind() != std::io::ErrorKind::WouldBlock || Instant::now() >= until {
                return tracing::warn!("systemd is not told {words:?}: {why}");
            }
            std::thread::sleep(RETRY);
        }
    }

    fn tell(&self, words: &str) -> std::io::Result<()> {
        let Some((socket, address)) = &self.to else { return Ok(()) };
        socket.send_to_addr(words.as_bytes(), address).map(drop)
    }
}

/// A path, or an abstract name behind an `@`.
fn address(name: &str) -> std::io::Result<SocketAddr> {
    match name.strip_prefix('@') {
        Some(name) => SocketAddr::from_abstract_name(name),
        None if name.starts_with('/') => SocketAddr::from_pathname(name),
        None => Err(std::io::Error::other("neither a path nor an abstract name")),
    }
}
