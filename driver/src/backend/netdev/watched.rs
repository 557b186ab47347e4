//! An interface that a port is open on, and what becomes of it.

use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use super::link::{Asker, Link, Watch};
use crate::clock::now_ns;
use crate::port::{PortCaps, PortGone};

/// Least time between two looks at the interface when frames are refused.
const RELOOK_NS: u64 = 1_000_000;
/// How long a lowered MTU may refuse our frames before the port is given up.
const TOO_LONG_NS: u64 = 2_000_000_000;

/// What hears of changes; shared with those that sleep on the port.
pub(in super::super) struct Ear {
    watch: Watch,
    /// A sleeper saw something other than a frame.
    look: AtomicBool,
}

impl Ear {
    pub(in super::super) fn new() -> io::Result<Self> {
        Ok(Self { watch: Watch::new()?, look: AtomicBool::new(true) })
    }

    /// Readable when something has changed.
    pub(in super::super) fn fd(&self) -> RawFd {
        self.watch.fd()
    }

    /// Somebody saw something that is to be looked at.
    pub(in super::super) fn point(&self) {
        self.look.store(true, Relaxed);
    }

    /// Whether somebody did. Costs a load.
    #[inline]
    pub(in super::super) fn is_pointed(&self) -> bool {
        self.look.load(Relaxed)
    }

    /// Whether something has changed; `anyway`: also if nobody saw anything.
    pub(in super::super) fn heard(&self, anyway: bool) -> bool {
        let pointed = self.look.swap(false, Relaxed);
        (pointed || anyway) && self.watch.heard()
    }
}

/// The interface when it was looked at last.
pub(in super::super) struct Watched {
    asker: Asker,
    link: Link,
    looked_ns: u64,
    /// Since when frames are refused as too long.
    too_long_ns: Option<u64>,
}

impl Watched {
    pub(in super::super) fn new(asker: Asker, link: Link) -> Self {
        Self { asker, link, looked_ns: 0, too_long_ns: None }
    }

    pub(in super::super) fn link(&self) -> &Link {
        &self.link
    }

    /// Asks what has become of the interface, unless that was asked a moment ago and nothing has
    /// been heard (`heard`) since, and tells the log what has changed.
    ///
    /// # Errors
    /// [`PortGone`]: it was removed.
    pub(in super::super) fn relook(
        &mut self,
        caps: &PortCaps,
        heard: bool,
    ) -> Result<(), PortGone> {
        let now = now_ns();
        if !heard && now.saturating_sub(self.looked_ns) < RELOOK_NS && self.looked_ns != 0 {
            return Ok(());
        }
        self.looked_ns = now;
        let link = match self.asker.link_at(self.link.index) {
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
        self.tell(&was, caps);
        Ok(())
    }

    /// A frame was longer than the interface carries now, and is lost.
    ///
    /// # Errors
    /// [`PortGone`]: that has been so for long.
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

    fn tell(&mut self, was: &Link, caps: &PortCaps) {
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

/// The port is gone for good: the log says so, and the error says it to the fabric.
fn gone(caps: &PortCaps, why: &str) -> PortGone {
    tracing::error!(port = %caps.name, "{why}");
    PortGone::new(&caps.name, why)
}
