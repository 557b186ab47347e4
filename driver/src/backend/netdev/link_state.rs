//! The state of a port's interface, its changes, and their log lines.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::link::{Link, LinkEvents, LinkQuery};
use crate::clock::now_ns;
use crate::port::{PortCaps, PortGone};

/// Least time between two queries of the interface when frames are refused.
const REFRESH_NS: u64 = 1_000_000;
/// How long a lowered MTU may refuse frames before the port has failed.
const TOO_LONG_NS: u64 = 2_000_000_000;

/// Detects changes of the interface; shared by the port's thread and its waiters.
pub(in super::super) struct LinkMonitor {
    events: LinkEvents,
    /// A waiter woke for another reason than a frame.
    pending: AtomicBool,
}

impl LinkMonitor {
    pub(in super::super) fn new() -> io::Result<Self> {
        Ok(Self { events: LinkEvents::new()?, pending: AtomicBool::new(true) })
    }

    /// Readable when something has changed.
    pub(in super::super) fn fd(&self) -> RawFd {
        self.events.fd()
    }

    /// Requests a check for changes.
    pub(in super::super) fn notify(&self) {
        self.pending.store(true, Relaxed);
    }

    /// Whether a check was requested. Costs a load.
    #[inline]
    pub(in super::super) fn is_notified(&self) -> bool {
        self.pending.load(Relaxed)
    }

    /// Whether an interface has changed, if a check was requested or `anyway`.
    pub(in super::super) fn take_changes(&self, anyway: bool) -> bool {
        let notified = self.pending.swap(false, Relaxed);
        (notified || anyway) && self.events.take_changes()
    }
}

/// The interface as of the last query.
pub(in super::super) struct LinkState {
    query: LinkQuery,
    link: Link,
    refreshed_ns: u64,
    /// Since when frames are refused as too long.
    too_long_ns: Option<u64>,
}

impl LinkState {
    pub(in super::super) fn new(query: LinkQuery, link: Link) -> Self {
        Self { query, link, refreshed_ns: 0, too_long_ns: None }
    }

    pub(in super::super) fn link(&self) -> &Link {
        &self.link
    }

    /// Queries the interface, unless it was queried a moment ago and has not `changed` since, and
    /// logs changes.
    ///
    /// # Errors
    /// [`PortGone`]: it was removed.
    pub(in super::super) fn refresh(
        &mut self,
        caps: &PortCaps,
        changed: bool,
    ) -> Result<(), PortGone> {
        let now = now_ns();
        if !changed && now.saturating_sub(self.refreshed_ns) < REFRESH_NS && self.refreshed_ns != 0
        {
            return Ok(());
        }
        self.refreshed_ns = now;
        let link = match self.query.link_at(self.link.index) {
            Ok(link) => link,
            Err(e) if e.raw_os_error() == Some(libc::ENODEV) => {
                let name = &self.link.name;
                let why = format!("interface {name} was removed; see: ip link, and open it again");
                return Err(gone(caps, &why));
            }
            Err(error) => {
                tracing::warn!(port = %caps.name, %error, "cannot query the interface");
                return Ok(());
            }
        };
        let was = std::mem::replace(&mut self.link, link);
        self.log_changes(&was, caps);
        Ok(())
    }

    /// Notes a lost frame that was longer than the interface carries now.
    ///
    /// # Errors
    /// [`PortGone`]: frames have been too long for two seconds.
    pub(in super::super) fn too_long(&mut self, caps: &PortCaps) -> Result<(), PortGone> {
        let now = now_ns();
        let since = *self.too_long_ns.get_or_insert(now);
        if now - since < TOO_LONG_NS {
            return Ok(());
        }
        let Link { name, mtu, .. } = &self.link;
        let was = caps.mtu;
        let why = format!(
            "the mtu of {name} was lowered to {mtu} while in use; ip link set {name} mtu {was}, \
             and open it again"
        );
        Err(gone(caps, &why))
    }

    fn log_changes(&mut self, was: &Link, caps: &PortCaps) {
        let now = &self.link;
        let (port, name) = (&caps.name, &now.name);
        if was.name != now.name {
            tracing::warn!(%port, "{} was renamed to {name}; the port continues", was.name);
        }
        if was.is_up && !now.is_up {
            tracing::warn!(%port, "{name} is down, frames are lost until: ip link set {name} up");
        } else if now.is_up && was.has_carrier && !now.has_carrier {
            tracing::warn!(%port, "{name} has no carrier, frames are lost: is the cable in?");
        } else if now.is_up && now.has_carrier && !(was.is_up && was.has_carrier) {
            tracing::info!(%port, "{name} carries frames again");
        }
        if was.mtu != now.mtu && now.mtu < caps.mtu {
            let mtu = caps.mtu;
            tracing::warn!(
                %port,
                "the mtu of {name} is {} now, longer frames are lost until: ip link set {name} \
                 mtu {mtu}", now.mtu
            );
        }
        if now.mtu >= caps.mtu {
            self.too_long_ns = None;
        }
        if was.mac != now.mac && was.mac == caps.station.mac {
            let mac = caps.station.mac;
            tracing::warn!(
                %port,
                "{name} has another address now, frames to this port are lost until: \
                 ip link set {name} address {mac}"
            );
        }
    }
}

/// Logs that the port has failed for good, and makes the error.
fn gone(caps: &PortCaps, why: &str) -> PortGone {
    tracing::error!(port = %caps.name, "{why}");
    PortGone::new(&caps.name, why)
}
