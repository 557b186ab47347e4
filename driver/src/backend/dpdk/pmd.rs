//! Properties of DPDK's drivers (PMDs), and checks before a device is probed.
//!
//! The properties were determined by tests with DPDK 22.11; docs/dpdk.md has the table for users.

use super::DpdkSettings;
use super::failure::Failure;
use crate::frame::ETH_HDR_LEN;
use crate::setup;

/// How the MTU of a driver is determined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mtu {
    /// Any, up to what an mbuf holds.
    Any,
    /// Exactly this one, whatever the driver reports.
    Only(usize),
    /// That of the interface below, at most this.
    Interface(usize),
    /// Reported and configured by the driver.
    Driver,
}

/// Properties of a driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pmd {
    /// Its name, the prefix of its devices' names.
    pub(super) name: &'static str,
    pub(super) mtu: Mtu,
    /// Frames are padded to Ethernet's 60 bytes: a receiver may rely on it.
    pub(super) pads: bool,
    /// The port chooses its MAC address: the device's own is invalid, or belongs to the interface.
    pub(super) needs_own_mac: bool,
    /// See `PortCaps::rto_floor_ns`.
    pub(super) rto_floor_ns: u64,
}

const KERNEL_RTO_NS: u64 = 1_000_000;
const NIC_RTO_NS: u64 = 100_000;

/// Largest memory of one ring of a memif, bytes.
const MEMIF_RING_LEN: usize = 2 << 20;

/// Largest MTU that an mbuf is made for: its length is 16 bits, with room before and behind.
pub(super) const MTU_MAX: usize = 63_488;

/// Defaults of drivers that are not in the table: a NIC, or a newer virtual device.
const OTHER: Pmd =
    Pmd { name: "", mtu: Mtu::Driver, pads: true, needs_own_mac: false, rto_floor_ns: NIC_RTO_NS };

/// Defaults of drivers on top of the kernel or another process.
const SOFTWARE: Pmd = Pmd { rto_floor_ns: KERNEL_RTO_NS, ..OTHER };

const TABLE: &[Pmd] = &[
    Pmd { name: "net_null", mtu: Mtu::Any, pads: false, needs_own_mac: true, ..OTHER },
    Pmd { name: "net_ring", mtu: Mtu::Any, pads: false, needs_own_mac: true, ..SOFTWARE },
    Pmd { name: "net_memif", mtu: Mtu::Any, pads: false, ..SOFTWARE },
    // The interface has the device's address, so a bridge would deliver frames to it to the host:
    // the port has another one. The interface can be given another MTU, the driver reads 1500.
    Pmd { name: "net_tap", mtu: Mtu::Only(1500), needs_own_mac: true, ..SOFTWARE },
    Pmd { name: "net_af_packet", mtu: Mtu::Interface(MTU_MAX), ..SOFTWARE },
    // A frame and its mbuf share one page.
    Pmd { name: "net_af_xdp", mtu: Mtu::Interface(3498), ..SOFTWARE },
    Pmd { name: "net_pcap", mtu: Mtu::Interface(1500), ..SOFTWARE },
    Pmd { name: "net_vhost", mtu: Mtu::Only(1500), ..SOFTWARE },
    Pmd { name: "net_virtio_user", mtu: Mtu::Only(1500), ..SOFTWARE },
];

impl Pmd {
    /// The driver of the device with this name.
    pub(super) fn of(device: &str) -> Self {
        let named = TABLE.iter().find(|pmd| {
            let number = device.strip_prefix(pmd.name);
            // `net_tap0`, and `net_tap_blue`, which EAL takes as well; not `net_tapestry`.
            number.is_some_and(|rest| !rest.starts_with(|c: char| c.is_ascii_alphabetic()))
        });
        named.copied().unwrap_or(OTHER)
    }

    pub(super) fn is(&self, name: &str) -> bool {
        self.name == name
    }

    /// Whether frames pass through this machine's memory only.
    pub(super) fn is_memory(&self) -> bool {
        self.is("net_ring") || self.is("net_memif")
    }

    /// Whether received mbufs can be reused for sending. `net_af_xdp` fails with it.
    pub(super) fn can_recycle_rx(&self) -> bool {
        self.is_memory() || self.is("net_null")
    }

    /// Device arguments that are added to the user's, so that frames of `mtu` fit.
    pub(super) fn extra_args(&self, settings: &DpdkSettings, mtu: usize) -> String {
        let has = |key: &str| settings.arg(key).is_some();
        if self.is("net_memif") {
            let bsize = settings.arg("bsize").and_then(|bsize| bsize.parse().ok());
            let bsize = bsize.unwrap_or((mtu + ETH_HDR_LEN).next_multiple_of(1024).max(2048));
            // A ring that fits the cache, since all its buffers are used in turn.
            let slots = settings.ring_len.min(MEMIF_RING_LEN / bsize).max(32);
            let mut args = String::new();
            if !has("bsize") {
                args.push_str(&format!(",bsize={bsize}"));
            }
            if !has("rsize") {
                args.push_str(&format!(",rsize={}", slots.ilog2()));
            }
            return args;
        }
        if self.is("net_af_packet") && !has("framesz") && mtu > 1500 {
            // Room for the kernel's header before the frame.
            let framesz = (mtu + ETH_HDR_LEN + 128).next_power_of_two();
            // The kernel locks both rings, and an ordinary user may lock 8 MiB.
            let count = ((2 << 20) / framesz).max(32);
            return format!(",blocksz={},framesz={framesz},framecnt={count}", framesz.max(65_536));
        }
        String::new()
    }

    /// Mbufs that its queues hold, whatever length is requested.
    pub(super) fn queued_mbufs(&self) -> usize {
        // Receive, transmit and completion rings of 2048 each.
        if self.is("net_af_xdp") { 3 * 2048 } else { 0 }
    }

    /// Whether its MTU follows that of the interface below, also at run time.
    pub(super) fn follows_interface(&self) -> bool {
        matches!(self.mtu, Mtu::Interface(_))
    }

    /// The largest MTU for the driver's own buffers, if the user chose their size.
    ///
    /// memif splits a longer frame into several buffers, and when its ring is nearly full it then
    /// writes past the free ones (seen with 22.11: the ring stalls for ever).
    pub(super) fn mtu_max(&self, settings: &DpdkSettings) -> Option<usize> {
        let bsize = settings.arg("bsize").filter(|_| self.is("net_memif"))?;
        Some(bsize.parse::<usize>().ok()?.saturating_sub(ETH_HDR_LEN))
    }

    /// Bytes of mbuf data for a frame of `frame_max`.
    ///
    /// On a memif more than the driver's own buffers have. From 23.03 on the driver else gives each
    /// segment of a gathered frame a buffer of its own, and before 26.03 leaves the chaining flag
    /// in the descriptor for the next frame (DPDK's commit f7a52200d4).
    pub(super) fn mbuf_room(&self, settings: &DpdkSettings, mtu: usize, frame_max: usize) -> usize {
        let given = |args: &str, key: &str| {
            let value = args.split(',').find_map(|arg| arg.strip_prefix(key)?.strip_prefix('='));
            value.and_then(|value| value.parse::<usize>().ok())
        };
        let args = format!("{}{}", settings.args, self.extra_args(settings, mtu));
        let least = frame_max.max(2048);
        if self.is("net_memif") {
            return least.max(given(&args, "bsize").unwrap_or(0) + 1);
        }
        least.max(given(&args, "framesz").unwrap_or(0))
    }
}

/// Whether the name is that of a PCI device.
pub(super) fn is_pci(device: &str) -> bool {
    let Some((bus, function)) = device.rsplit_once('.') else { return false };
    let hex = |part: &str| !part.is_empty() && part.chars().all(|c| c.is_ascii_hexdigit());
    let parts: Vec<&str> = bus.split(':').collect();
    (2..=3).contains(&parts.len()) && parts.iter().all(|part| hex(part)) && hex(function)
}

/// Checks for conditions that the driver would report poorly.
///
/// # Errors
/// What is missing, and the command that mends it.
pub(super) fn check(settings: &DpdkSettings) -> Result<(), Failure> {
    let pmd = Pmd::of(&settings.device);
    if settings.lossless && !pmd.is_memory() {
        let wire = Failure::new(libc::EINVAL, "frames can get lost behind it");
        return Err(wire.mend("leave lossless=yes out"));
    }
    if is_pci(&settings.device) {
        return check_pci(&settings.device);
    }
    let iface = settings.arg("iface");
    match pmd.name {
        "net_tap" => {
            if !std::path::Path::new("/dev/net/tun").exists() {
                let none = Failure::new(libc::ENODEV, "there is no /dev/net/tun");
                return Err(none.mend("sudo modprobe tun"));
            }
            require_capability(CAP_NET_ADMIN, "CAP_NET_ADMIN", "makes an interface")
        }
        "net_af_packet" | "net_af_xdp" => {
            let Some(iface) = iface else {
                let mend = format!("write dpdk:{},iface=eth0", settings.device);
                return Err(Failure::new(libc::EINVAL, "it needs an interface").mend(mend));
            };
            interface(iface)?;
            require_capability(CAP_NET_RAW, "CAP_NET_RAW", "opens a raw socket")?;
            let xdp = pmd.is("net_af_xdp");
            if xdp {
                require_capability(CAP_NET_ADMIN, "CAP_NET_ADMIN", "loads an XDP program")
            } else {
                Ok(())
            }
        }
        _ => Ok(()),
    }
}

/// The index of a network interface.
///
/// # Errors
/// There is none of that name.
pub(super) fn interface(name: &str) -> Result<u32, Failure> {
    nix::net::if_::if_nametoindex(name).map_err(|_errno| {
        let none = Failure::new(libc::ENODEV, format!("no such interface as {name}"));
        none.mend("ip link shows those there are")
    })
}

/// Whether the interface of this index is still there, whatever it is called by now.
pub(super) fn has_interface(index: u32) -> bool {
    let mut name = [0; libc::IFNAMSIZ];
    // SAFETY: writes a name of at most `IFNAMSIZ` bytes.
    !unsafe { libc::if_indextoname(index, name.as_mut_ptr()) }.is_null()
}

const CAP_NET_ADMIN: u32 = 12;
const CAP_NET_RAW: u32 = 13;

fn require_capability(capability: u32, name: &str, what: &str) -> Result<(), Failure> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|hex| u64::from_str_radix(hex.trim(), 16).ok());
    if effective.is_none_or(|set| set & 1 << capability != 0) {
        return Ok(());
    }
    let why = format!("it {what}, which needs {name}");
    Err(Failure::new(libc::EPERM, why).mend("run with sudo, or inside unshare -Urn"))
}

fn check_pci(device: &str) -> Result<(), Failure> {
    let full =
        if device.matches(':').count() == 1 { format!("0000:{device}") } else { device.into() };
    let at = std::path::Path::new("/sys/bus/pci/devices").join(&full);
    if !at.exists() {
        let none = Failure::new(libc::ENODEV, format!("no such PCI device as {full}"));
        return Err(none.mend("lspci -D shows those there are"));
    }
    let driver = std::fs::read_link(at.join("driver")).ok();
    let driver = driver.as_deref().and_then(|path| path.file_name()?.to_str().map(str::to_owned));
    // Those whose DPDK drivers work beside the kernel's.
    let shared = ["vfio-pci", "uio_pci_generic", "igb_uio", "mlx4_core", "mlx5_core", "mana"];
    match driver {
        Some(driver) if shared.contains(&driver.as_str()) => Ok(()),
        found => {
            let found =
                found.map_or("no driver".to_owned(), |driver| format!("the driver {driver}"));
            let why = format!("{full} has {found} and needs vfio-pci");
            let setup = setup::command();
            let mend = format!("sudo {setup} --bind {full}");
            Err(Failure::new(libc::EBUSY, why).mend(mend))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drivers_are_known_by_the_names_of_their_devices() {
        for (device, name) in [
            ("net_tap0", "net_tap"),
            ("net_tap", "net_tap"),
            ("net_ring12", "net_ring"),
            ("net_af_packet_x", "net_af_packet"),
            ("net_tapestry0", ""),
            ("net_bonding0", ""),
            ("0000:05:00.0", ""),
        ] {
            assert_eq!(Pmd::of(device).name, name, "{device}");
        }
    }

    #[test]
    fn packet_buffers_are_longer_than_those_of_a_memif() {
        for (args, mtu) in [("", 1500), ("", 2034), ("", 9000), ("bsize=4096", 1500)] {
            let pmd = Pmd::of("net_memif0");
            let device = "net_memif0".to_owned();
            let settings =
                DpdkSettings { device, args: args.to_owned(), ..DpdkSettings::default() };
            let told = format!("{args}{},", pmd.extra_args(&settings, mtu));
            let (_, bsize) = told.split_once("bsize=").unwrap();
            let bsize: usize = bsize.split(',').next().unwrap().parse().unwrap();
            assert!(bsize >= ETH_HDR_LEN + mtu, "{told}");
            assert!(pmd.mbuf_room(&settings, mtu, ETH_HDR_LEN + mtu) > bsize, "{told}");
        }
    }

    #[test]
    fn pci_addresses_are_told_from_names() {
        for device in ["0000:05:00.0", "05:00.0", "10000:e1:1f.7"] {
            assert!(is_pci(device), "{device}");
        }
        for device in ["net_tap0", "eth0.5", "0000:05:00", "a:b:c:d.0", ":05.0", ""] {
            assert!(!is_pci(device), "{device}");
        }
    }

    #[test]
    fn a_missing_driver_is_reported_with_its_remedy() {
        let why = |device: &str, args: &str| {
            let (device, args) = (device.to_owned(), args.to_owned());
            check(&DpdkSettings { device, args, ..DpdkSettings::default() }).unwrap_err().mend
        };
        assert!(why("net_af_packet0", "").contains("iface="));
        assert!(why("net_af_packet0", "iface=no-such-if").contains("ip link"));
        assert!(why("ffff:ff:1f.7", "").contains("lspci"));
    }
}
