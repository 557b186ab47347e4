//! The interfaces of this machine, as far as AF_XDP is concerned.

use super::super::netdev::{Asker, Link, XdpFeatures, links, xdp_features};
use super::{QUEUES_MAX, steer};

/// An interface that a port may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpNic {
    /// Its state.
    pub link: Link,
    /// The name of its driver, if that says.
    pub driver: Option<String>,
    /// Queues that it receives by.
    pub rx_queues: u32,
    /// What the driver can do; `None` if the kernel does not say (before 6.3).
    pub features: Option<XdpFeatures>,
}

impl XdpNic {
    /// What it can do, such as `virtio_net: native, zero-copy`.
    pub fn what(&self) -> String {
        let driver = self.driver.as_deref().unwrap_or("its driver");
        let can = match self.features {
            None => "the kernel does not say what it can",
            Some(XdpFeatures { zero_copy: true, .. }) => "native, zero-copy",
            Some(XdpFeatures { native: true, .. }) => "native, copy",
            Some(_) => "generic, copy",
        };
        let queues = match self.rx_queues {
            1 => String::new(),
            count => format!(", {count} receive queues"),
        };
        format!("{driver}: {can}{queues}")
    }

    /// What makes it fit for a port if it has more queues than one hears.
    pub fn steering(&self) -> Option<String> {
        (self.rx_queues > QUEUES_MAX).then(|| steer(&self.link.name, None))
    }
}

/// The interfaces of this network namespace that carry Ethernet, but `lo`.
pub fn nics() -> Vec<XdpNic> {
    let Ok(asker) = Asker::new() else { return Vec::new() };
    let wires = links().into_iter().filter(|link| link.is_ethernet && !link.is_loopback);
    let nic = |link: Link| XdpNic {
        driver: asker.driver(&link.name),
        rx_queues: asker.rx_queues(&link.name),
        features: xdp_features(link.index),
        link,
    };
    wires.map(nic).collect()
}
