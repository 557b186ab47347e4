//! What is known of each driver of DPDK (PMD), and what can be said before one is asked.
//!
//! The facts were found by trying, with DPDK 22.11; docs/dpdk.md has the table for readers.

use super::DpdkSettings;
use super::failure::Failure;
use crate::frame::ETH_HDR_LEN;
use crate::setup;

/// Where the largest frame comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mtu {
    /// The driver carries any, up to what a packet buffer holds.
    Any,
    /// This one and no other, whatever the driver answers.
    Only(usize),
    /// That of the interface below, and not more than this.
    Interface(usize),
    /// The driver is asked, and can be told.
    Driver,
}

/// What is special about a driver.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pmd {
    /// Its name, to which a number is added for a device.
    pub(super) name: &'static str,
    pub(super) mtu: Mtu,
    /// Frames shorter than Ethernet's 60 bytes are filled up: whoever is behind it may count on it.
    pub(super) pads: bool,
    /// The address is ours to choose: the device's own is none, or belongs to somebody else.
    pub(super) own_mac: bool,
    /// See `PortCaps::rto_floor_ns`.
    pub(super) rto_floor_ns: u64,
}

const KERNEL_RTO_NS: u64 = 1_000_000;
const NIC_RTO_NS: u64 = 100_000;

/// Most bytes of one ring of a memif.
const MEMIF_RING_LEN: usize = 2 << 20;

/// Largest frame that a packet buffer of DPDK is made for here: its length is 16 bits, with room
/// before and behind.
pub(super) const MTU_MOST: usize = 63_488;

/// A driver that is not in the table: of a NIC, or of something newer.
const OTHER: Pmd =
    Pmd { name: "", mtu: Mtu::Driver, pads: true, own_mac: false, rto_floor_ns: NIC_RTO_NS };

/// A driver above the kernel or another process.
const SOFT: Pmd = Pmd { rto_floor_ns: KERNEL_RTO_NS, ..OTHER };

const TABLE: &[Pmd] = &[
    Pmd { name: "net_null", mtu: Mtu::Any, pads: false, own_mac: true, ..OTHER },
    Pmd { name: "net_ring", mtu: Mtu::Any, pads: false, own_mac: true, ..SOFT },
    Pmd { name: "net_memif", mtu: Mtu::Any, pads: false, ..SOFT },
    // The interface has the device's address, so a bridge would keep frames to it for the host: the
    // port answers to another one. The interface can be given another MTU, the driver reads 1500.
    Pmd { name: "net_tap", mtu: Mtu::Only(1500), own_mac: true, ..SOFT },
    Pmd { name: "net_af_packet", mtu: Mtu::Interface(MTU_MOST), ..SOFT },
    // A frame lies in one page of memory with its packet buffer.
    Pmd { name: "net_af_xdp", mtu: Mtu::Interface(3498), ..SOFT },
    Pmd { name: "net_pcap", mtu: Mtu::Interface(1500), ..SOFT },
    Pmd { name: "net_vhost", mtu: Mtu::Only(1500), ..SOFT },
    Pmd { name: "net_virtio_user", mtu: Mtu::Only(1500), ..SOFT },
];

impl Pmd {
    /// The driver of a device of this name.
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

    /// Whether frames go through memory of this machine and nothing else.
    pub(super) fn is_memory(&self) -> bool {
        self.is("net_ring") || self.is("net_memif")
    }

    /// Whether what was received can be sent with next. `net_af_xdp` gets into trouble with it.
    pub(super) fn recycles(&self) -> bool {
        self.is_memory() || self.is("net_null")
    }

    /// What to give the driver beyond what the user wrote, so that frames of `mtu` fit.
    pub(super) fn more_args(&self, settings: &DpdkSettings, mtu: usize) -> String {
        let has = |key: &str| settings.arg(key).is_some();
        if self.is("net_memif") {
            let bsize = settings.arg("bsize").and_then(|bsize| bsize.parse().ok());
            let bsize = bsize.unwrap_or((mtu + ETH_HDR_LEN).next_multiple_of(1024).max(2048));
            // A ring that fits a cache, since every buffer of it is touched in turn.
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

    /// Packet buffers that its queues hold, however long they are asked to be.
    pub(super) fn held(&self) -> usize {
        // Rings of 2048 to receive, to send, and to give back.
        if self.is("net_af_xdp") { 3 * 2048 } else { 0 }
    }

    /// Whether it carries what the interface below does, now and later.
    pub(super) fn follows_interface(&self) -> bool {
        matches!(self.mtu, Mtu::Interface(_))
    }

    /// The largest MTU that the driver's own buffers leave, where the user has chosen them.
    ///
    /// memif cuts a longer frame into several buffers, and when its ring is nearly full it then
    /// writes past the free ones (seen with 22.11: the ring stands still for ever).
    pub(super) fn mtu_most(&self, settings: &DpdkSettings) -> Option<usize> {
        let bsize = settings.arg("bsize").filter(|_| self.is("net_memif"))?;
        Some(bsize.parse::<usize>().ok()?.saturating_sub(ETH_HDR_LEN))
    }

    /// Bytes that a packet buffer must have for a frame of `frame_max`.
    ///
    /// On a memif more than the driver's own buffers have. From 23.03 on it else gives each piece
    /// of a gathered frame a buffer of its own, and before 26.03 leaves the mark of that behind
    /// for the next frame in the same place (DPDK's commit f7a52200d4).
    pub(super) fn room(&self, settings: &DpdkSettings, mtu: usize, frame_max: usize) -> usize {
        let given = |args: &str, key: &str| {
            let value = args.split(',').find_map(|arg| arg.strip_prefix(key)?.strip_prefix('='));
            value.and_then(|value| value.parse::<usize>().ok())
        };
        let args = format!("{}{}", settings.args, self.more_args(settings, mtu));
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

/// Looks for what would make the driver fail with less to say.
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
            need(CAP_NET_ADMIN, "CAP_NET_ADMIN", "makes an interface")
        }
        "net_af_packet" | "net_af_xdp" => {
            let Some(iface) = iface else {
                let mend = format!("write dpdk:{},iface=eth0", settings.device);
                return Err(Failure::new(libc::EINVAL, "it needs an interface").mend(mend));
            };
            interface(iface)?;
            need(CAP_NET_RAW, "CAP_NET_RAW", "opens a raw socket")?;
            let xdp = pmd.is("net_af_xdp");
            if xdp { need(CAP_NET_ADMIN, "CAP_NET_ADMIN", "loads an XDP program") } else { Ok(()) }
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

fn need(capability: u32, name: &str, what: &str) -> Result<(), Failure> {
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
            let told = format!("{args}{},", pmd.more_args(&settings, mtu));
            let (_, bsize) = told.split_once("bsize=").unwrap();
            let bsize: usize = bsize.split(',').next().unwrap().parse().unwrap();
            assert!(bsize >= ETH_HDR_LEN + mtu, "{told}");
            assert!(pmd.room(&settings, mtu, ETH_HDR_LEN + mtu) > bsize, "{told}");
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
    fn what_is_missing_is_said_with_what_mends_it() {
        let why = |device: &str, args: &str| {
            let (device, args) = (device.to_owned(), args.to_owned());
            check(&DpdkSettings { device, args, ..DpdkSettings::default() }).unwrap_err().mend
        };
        assert!(why("net_af_packet0", "").contains("iface="));
        assert!(why("net_af_packet0", "iface=no-such-if").contains("ip link"));
        assert!(why("ffff:ff:1f.7", "").contains("lspci"));
    }
}
