//! Notifications to systemd: datagrams to the socket in `NOTIFY_SOCKET` (sd_notify(3)).

use std::env::var;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::{Duration, Instant};

/// How long a one-time notification may wait for room. Repeated ones never wait.
const NOTIFY_TIMEOUT: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(10);
/// Period of status updates without a watchdog.
const STATUS_EVERY: Duration = Duration::from_secs(5);

/// The service manager, if it has requested notifications.
pub(crate) struct Service {
    to: Option<(UnixDatagram, SocketAddr)>,
    /// Period of keep-alive notifications.
    every: Duration,
    told: Instant,
}

impl Service {
    /// Reads `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID`. Invalid values are logged and
    /// ignored.
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

    /// Notifies that the service is ready.
    pub(crate) fn ready(&mut self, status: &str) {
        self.told = Instant::now();
        self.tell_once(&format!("READY=1\nSTATUS={status}"));
    }

    /// Sends a keep-alive notification, if one is due.
    pub(crate) fn alive(&mut self, now: Instant, status: impl FnOnce() -> String) {
        if self.to.is_some() && now.duration_since(self.told) >= self.every {
            self.told = now;
            // The next notification comes soon.
            let _ = self.tell(&format!("WATCHDOG=1\nSTATUS={}", status()));
        }
    }

    /// Notifies that the service is stopping.
    pub(crate) fn stopping(&self) {
        self.tell_once("STOPPING=1");
    }

    fn tell_once(&self, words: &str) {
        let until = Instant::now() + NOTIFY_TIMEOUT;
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
