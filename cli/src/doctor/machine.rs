//! The machine that is checked: a file tree, of this machine or of a test.

use std::path::{Path, PathBuf};

use barewire::CertFiles;
use barewire::stats::Published;
use barewire_driver::backend::memif::check_here;
use barewire_driver::backend::netdev::{Egress, Link, egress, link_and_driver, links};
use barewire_driver::backend::xdp::XdpSettings;
use barewire_driver::backend::xdp::survey::{XdpNic, nics};
use barewire_driver::error::OpenError;
use barewire_driver::open::{PortInfo, list, open_through_switch, switch_socket};
use barewire_driver::port::PortCaps;

use crate::info::wrong_settings;
use crate::stats::{published, since_1970_ns};

/// A device that a `barewire switch` owns.
pub(super) struct SwitchedDevice {
    pub(super) port: String,
    /// Name of the socket through which other users' processes join the switch, in the folder of
    /// such sockets.
    pub(super) socket: String,
    /// Whether processes of this user may use the switch; else the reason and the remedy.
    pub(super) serves: Result<(), (String, String)>,
}

/// The key and certificate files that the options or the environment name.
#[derive(Default)]
pub(super) struct CredentialFiles {
    /// The key files.
    pub(super) key_files: Vec<PathBuf>,
    /// The certificate files, instead of keys.
    pub(super) certificate: Option<CertFiles>,
    /// The port whose frames are to be sealed, if one is named.
    pub(super) port: Option<PortCaps>,
    /// The time, ns since 1970.
    pub(super) now_ns: u64,
}

/// The state of a machine that the checks read.
pub(super) struct Machine {
    root: PathBuf,
    /// Bytes that this user may use in `/dev/shm`, or the error.
    pub(super) shm_free: Result<u64, String>,
    /// Its network interfaces.
    pub(super) links: Vec<Link>,
    /// Whether this user may create a memif; else the reason and the remedy.
    pub(super) memif: Result<(), (String, String)>,
    /// Whether this user may open an AF_XDP socket; else the reason and the remedy.
    pub(super) xdp: Result<(), (String, String)>,
    /// The interfaces for AF_XDP sockets.
    pub(super) xdp_nics: Vec<XdpNic>,
    /// The `BAREWIRE_` variables with invalid values, each with the reason.
    pub(super) wrong_settings: Vec<(String, String)>,
    /// The files of keys and certificate.
    pub(super) credentials: CredentialFiles,
    /// Egress processing of the kernel by interface, for interfaces that have any.
    pub(super) egress: Vec<(String, Egress)>,
    /// Devices that switches own.
    pub(super) switched_devices: Vec<SwitchedDevice>,
    /// Statistics of running processes.
    pub(super) published: Published,
    /// The time, ns since 1970.
    pub(super) now_ns: u64,
}

impl Machine {
    /// The local machine.
    pub(super) fn local() -> Self {
        Self {
            root: PathBuf::from("/"),
            shm_free: shm_free(Path::new("/dev/shm")),
            links: links(),
            egress: egress_of(&links()),
            memif: memif(),
            xdp: xdp(),
            xdp_nics: nics(),
            wrong_settings: wrong_settings(),
            credentials: CredentialFiles::default(),
            switched_devices: switched_devices(),
            // Without readable statistics there is nothing to check.
            published: published(None).unwrap_or_default(),
            now_ns: since_1970_ns(),
        }
    }

    /// The text of a file without the white space around it, or `None` if it cannot be read.
    pub(super) fn read(&self, path: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.at(path)).ok()?;
        Some(text.trim().to_owned())
    }

    /// A file that holds one number.
    pub(super) fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    pub(super) fn exists(&self, path: &str) -> bool {
        self.at(path).exists()
    }

    /// The names in a folder, sorted; none if it cannot be read.
    pub(super) fn names(&self, path: &str) -> Vec<String> {
        let entries = std::fs::read_dir(self.at(path)).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
        names.sort();
        names
    }

    /// The value of a word of the kernel's command line: `Some("")` for one without a value.
    pub(super) fn boot_option(&self, name: &str) -> Option<String> {
        let line = self.read("/proc/cmdline")?;
        let word = line.split_whitespace().find(|word| word.split('=').next() == Some(name))?;
        Some(word.split_once('=').map_or("", |(_, value)| value).to_owned())
    }

    /// Whether the machine is virtual.
    pub(super) fn is_virtual(&self) -> bool {
        self.cpu_line("flags").is_some_and(|flags| flags.split(' ').any(|f| f == "hypervisor"))
    }

    /// The first line of `/proc/cpuinfo` of that name.
    pub(super) fn cpu_line(&self, name: &str) -> Option<String> {
        let info = self.read("/proc/cpuinfo")?;
        info.lines().find_map(|line| {
            let (key, value) = line.split_once(':')?;
            (key.trim() == name).then(|| value.trim().to_owned())
        })
    }

    /// The real path of a path of the machine.
    pub(super) fn at(&self, path: &str) -> PathBuf {
        self.root.join(path.trim_start_matches('/'))
    }
}

/// Bytes that this user may still use in `dir`, if it is writable.
fn shm_free(dir: &Path) -> Result<u64, String> {
    use nix::unistd::{AccessFlags, access};
    let show = |why: nix::Error| format!("{}: {}", dir.display(), why.desc());
    access(dir, AccessFlags::W_OK | AccessFlags::X_OK).map_err(show)?;
    let stat = nix::sys::statvfs::statvfs(dir).map_err(show)?;
    Ok(stat.blocks_available() * stat.fragment_size())
}

/// The devices that switches own: each device is opened briefly.
fn switched_devices() -> Vec<SwitchedDevice> {
    let seen = |PortInfo { spec: port, .. }| {
        let serves = open_through_switch(&port).map(|port| port.map(drop)).map_err(why_and_mend);
        let socket = switch_socket(&port)?;
        serves.transpose().map(|serves| SwitchedDevice { port, socket, serves })
    };
    list().into_iter().filter_map(seen).collect()
}

fn memif() -> Result<(), (String, String)> {
    check_here().map_err(why_and_mend)
}

/// Egress processing of the interfaces that leave the host, where there is any.
fn egress_of(links: &[Link]) -> Vec<(String, Egress)> {
    let driver = |link: &Link| link_and_driver(&link.name)?.1.driver;
    let wires: Vec<_> = links
        .iter()
        .filter(|link| is_ready(link) && !is_virtual_link(driver(link).as_deref()))
        .collect();
    let indices: Vec<_> = wires.iter().map(|link| link.index).collect();
    let all = wires.iter().map(|link| link.name.clone()).zip(egress(&indices));
    all.filter(|(_, egress)| !egress.is_plain()).collect()
}

/// Whether the interface is ready to send frames.
fn is_ready(link: &Link) -> bool {
    link.is_ethernet && !link.is_loopback && link.is_up && link.has_carrier
}

/// Whether interfaces of that driver end within the host (veth, bridge).
fn is_virtual_link(driver: Option<&str>) -> bool {
    matches!(driver, Some("veth" | "bridge"))
}

fn xdp() -> Result<(), (String, String)> {
    XdpSettings::named("eth0").check_here().map_err(why_and_mend)
}

fn why_and_mend(error: OpenError) -> (String, String) {
    match error {
        OpenError::Device { why, mend, .. } => (why, mend),
        other => (other.to_string(), "barewire info".to_owned()),
    }
}

#[cfg(test)]
pub(super) mod fixture {
    use barewire_driver::backend::netdev::XdpFeatures;

    use super::*;

    /// A made-up machine in a folder of its own.
    pub(in super::super) struct Fixture {
        dir: tempfile::TempDir,
        shm_free: Result<u64, String>,
        links: Vec<Link>,
        memif: Result<(), (String, String)>,
        xdp: Result<(), (String, String)>,
        xdp_nics: Vec<XdpNic>,
    }

    /// An interface that works.
    pub(in super::super) fn link(name: &str) -> Link {
        Link {
            index: 2,
            name: name.to_owned(),
            mac: "02:00:00:00:00:01".parse().unwrap(),
            mtu: 1500,
            is_up: true,
            has_carrier: true,
            is_ethernet: true,
            is_loopback: false,
            bps: 0,
        }
    }

    /// An interface with a driver that can do everything.
    pub(in super::super) fn xdp_nic(name: &str, rx_queues: u32) -> XdpNic {
        XdpNic {
            link: link(name),
            driver: Some("virtio_net".to_owned()),
            rx_queues,
            features: Some(XdpFeatures { native: true, zero_copy: true }),
        }
    }

    impl Fixture {
        /// Nothing can be read.
        pub(in super::super) fn empty() -> Self {
            let shm_free = Err("/dev/shm: No such file or directory".to_owned());
            let memif = Err(("Too many open files".to_owned(), "see: ulimit -n".to_owned()));
            let xdp = Err(("no AF_XDP".to_owned(), "use afpacket:eth0".to_owned()));
            let (dir, links, xdp_nics) = (tempfile::tempdir().unwrap(), Vec::new(), Vec::new());
            Self { dir, shm_free, links, memif, xdp, xdp_nics }
        }

        /// Everything is as it should be.
        pub(in super::super) fn full() -> Self {
            Self::empty()
                .with("/proc/sys/kernel/osrelease", "6.1.0-32-amd64\n")
                .with("/proc/cmdline", "quiet isolcpus=2-3 nohz_full=2-3 intel_iommu=on\n")
                .with("/proc/cpuinfo", "vendor_id\t: GenuineIntel\nflags\t\t: fpu tsc aes\n")
                .with(
                    "/proc/self/limits",
                    "Limit                     Soft Limit           Hard Limit           Units\n\
                     Max locked memory         unlimited            unlimited            bytes\n",
                )
                .with(&format!("{NODE0}/hugepages-2048kB/nr_hugepages"), "512\n")
                .with(&format!("{NODE0}/hugepages-2048kB/free_hugepages"), "500\n")
                .with(&format!("{NODE0}/hugepages-1048576kB/nr_hugepages"), "4\n")
                .with(&format!("{NODE0}/hugepages-1048576kB/free_hugepages"), "4\n")
                .with("/sys/kernel/mm/transparent_hugepage/enabled", "always [madvise] never\n")
                .with("/sys/devices/system/cpu/online", "0-3\n")
                .with("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor", "performance\n")
                .with("/sys/devices/system/cpu/cpu1/cpufreq/scaling_governor", "performance\n")
                .with("/sys/devices/system/cpu/smt/active", "0\n")
                .with(&format!("{CLOCK}/current_clocksource"), "tsc\n")
                .with(&format!("{CLOCK}/available_clocksource"), "tsc hpet acpi_pm\n")
                .with("/sys/kernel/iommu_groups/0/type", "DMA\n")
                .with("/sys/kernel/iommu_groups/1/type", "DMA\n")
                .with("/dev/vfio/vfio", "")
                .with("/sys/bus/pci/drivers/vfio-pci/new_id", "")
                .with("/usr/lib/x86_64-linux-gnu/pkgconfig/libdpdk.pc", "Version: 22.11.8\n")
                .with("/proc/self/status", "CapInh:\t0\nCapEff:\t000001ffffffffff\n")
                .links(vec![link("eth0")])
                .shm(Ok(1 << 30))
                .memif(Ok(()))
                .xdp(Ok(()), vec![xdp_nic("eth0", 1)])
        }

        pub(in super::super) fn with(self, path: &str, text: &str) -> Self {
            let file = self.dir.path().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(file.parent().unwrap()).unwrap();
            std::fs::write(file, text).unwrap();
            self
        }

        pub(in super::super) fn without(self, path: &str) -> Self {
            let file = self.dir.path().join(path.trim_start_matches('/'));
            if file.is_dir() {
                std::fs::remove_dir_all(file).unwrap();
            } else {
                std::fs::remove_file(file).unwrap();
            }
            self
        }

        pub(in super::super) fn shm(self, shm_free: Result<u64, String>) -> Self {
            Self { shm_free, ..self }
        }

        pub(in super::super) fn links(self, links: Vec<Link>) -> Self {
            Self { links, ..self }
        }

        pub(in super::super) fn memif(self, memif: Result<(), (String, String)>) -> Self {
            Self { memif, ..self }
        }

        pub(in super::super) fn xdp(
            self,
            xdp: Result<(), (String, String)>,
            xdp_nics: Vec<XdpNic>,
        ) -> Self {
            Self { xdp, xdp_nics, ..self }
        }

        /// The machine; it is gone with the fixture.
        pub(in super::super) fn machine(&self) -> Machine {
            Machine {
                root: self.dir.path().to_owned(),
                shm_free: self.shm_free.clone(),
                links: self.links.clone(),
                memif: self.memif.clone(),
                xdp: self.xdp.clone(),
                xdp_nics: self.xdp_nics.clone(),
                wrong_settings: Vec::new(),
                credentials: CredentialFiles {
                    now_ns: 9_000_000_000,
                    ..CredentialFiles::default()
                },
                egress: Vec::new(),
                switched_devices: Vec::new(),
                published: Published::default(),
                now_ns: 9_000_000_000,
            }
        }
    }

    pub(in super::super) const NODE0: &str = "/sys/devices/system/node/node0/hugepages";
    pub(in super::super) const CLOCK: &str = "/sys/devices/system/clocksource/clocksource0";
}

#[cfg(test)]
mod tests {
    use super::fixture::Fixture;
    use super::*;

    #[test]
    fn boot_options_are_whole_words() {
        let fixture = Fixture::empty().with("/proc/cmdline", "xisolcpus=9 isolcpus=1,2 quiet");
        let machine = fixture.machine();
        assert_eq!(machine.boot_option("isolcpus").as_deref(), Some("1,2"));
        assert_eq!(machine.boot_option("quiet").as_deref(), Some(""));
        assert_eq!(machine.boot_option("nohz_full"), None);
    }

    /// Goal: a memif can be made here, and to see that leaves nothing behind: no socket, no memory,
    /// no thread.
    #[test]
    fn a_memif_can_be_made_here() {
        assert_eq!(memif(), Ok(()));
        let sockets = std::fs::read_to_string("/proc/net/unix").unwrap();
        assert!(!sockets.contains(&format!("@barewire-check-{}-", std::process::id())));
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(!maps.contains("barewire-memif"), "{maps}");
        let entries = |dir| std::fs::read_dir(dir).unwrap().flatten().map(|entry| entry.path());
        // Others may close a descriptor, or a thread end, while we look.
        let links: Vec<_> = entries("/proc/self/fd").flat_map(std::fs::read_link).collect();
        let left = |link: &PathBuf| link.to_string_lossy().contains("barewire-memif");
        assert!(!links.iter().any(left), "{links:?}");
        let names = entries("/proc/self/task").map(|task| task.join("comm"));
        let names: Vec<_> = names.flat_map(std::fs::read_to_string).collect();
        assert!(!names.iter().any(|name| name.trim() == "memif"), "{names:?}");
    }

    #[test]
    fn frames_leave_by_interfaces_that_are_ready_and_lead_out() {
        let eth0 = || super::fixture::link("eth0");
        assert!(is_ready(&eth0()));
        assert!(!is_ready(&Link { is_up: false, ..eth0() }));
        assert!(!is_ready(&Link { has_carrier: false, ..eth0() }));
        assert!(!is_ready(&Link { is_loopback: true, ..eth0() }));
        let inner = |name| is_virtual_link(Some(name));
        assert!(inner("veth") && inner("bridge") && !inner("bonding") && !is_virtual_link(None));
    }

    #[test]
    fn space_is_asked_of_the_system_with_its_reason() {
        assert!(shm_free(Path::new("/tmp")).is_ok_and(|free| free > 0));
        let why = shm_free(Path::new("/no/such/folder")).unwrap_err();
        assert_eq!(why, "/no/such/folder: No such file or directory");
    }
}
