//! A survey of this machine's interfaces and their AF_XDP capabilities.

use super::super::netdev::{Link, LinkQuery, XdpFeatures, links, xdp_features};
use super::{QUEUES_MAX, queue_advice};

/// An interface that can have a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct XdpNic {
    /// Its state.
    pub link: Link,
    /// The name of its driver, if that says.
    pub driver: Option<String>,
    /// Its receive queues.
    pub rx_queues: u32,
    /// XDP features of the driver; `None` if the kernel does not report them (before 6.3).
    pub features: Option<XdpFeatures>,
}

impl XdpNic {
    /// Driver and capabilities in words, such as `virtio_net: native, zero-copy`.
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

    /// Advice on an interface with more queues than a port can use.
    pub fn steering(&self) -> Option<String> {
        (self.rx_queues > QUEUES_MAX).then(|| queue_advice(&self.link.name, None))
    }
}

/// The interfaces of this network namespace that carry Ethernet, but `lo`.
pub fn nics() -> Vec<XdpNic> {
    let Ok(query) = LinkQuery::new() else { return Vec::new() };
    let wires = links().into_iter().filter(|link| link.is_ethernet && !link.is_loopback);
    let nic = |link: Link| XdpNic {
        driver: query.driver(&link.name),
        rx_queues: query.rx_queues(&link.name),
        features: xdp_features(link.index),
        link,
    };
    wires.map(nic).collect()
}
