//! Checks of memory: the segment's file, what a memif shares, locked memory, hugepages.

use super::machine::Machine;
use super::{Check, MEMIF, SHM, SPEED, VFIO};
use crate::table::bytes;

/// Below this a segment of eight processes, each of which sends long messages to every other, would
/// not fit.
const SHM_WANTED: u64 = 60 << 20;
/// Below this not even one segment with two processes fits.
const SHM_NEEDED: u64 = 1 << 20;

pub(super) fn shm_space(machine: &Machine) -> Check {
    let name = "shm-space";
    let mend = "sudo mount -o remount,size=1G /dev/shm";
    match &machine.shm_free {
        Err(why) if why.contains("Permission denied") => {
            Check::missing(name, SHM, why, "sudo chmod 1777 /dev/shm")
        }
        Err(why) => {
            let mend = "sudo mkdir -p /dev/shm && sudo mount -t tmpfs -o mode=1777 tmpfs /dev/shm";
            Check::missing(name, SHM, why, mend)
        }
        Ok(free) => {
            let found = format!("{} free in /dev/shm", bytes(*free));
            if *free < SHM_NEEDED {
                Check::missing(name, SHM, found, mend)
            } else if *free < SHM_WANTED {
                Check::warn(name, SHM, found, mend)
            } else {
                Check::ok(name, SHM, found)
            }
        }
    }
}

pub(super) fn memif(machine: &Machine) -> Check {
    let name = "memif";
    match &machine.memif {
        Ok(()) => Check::ok(name, MEMIF, "sockets and memory for it can be made"),
        Err((why, mend)) => Check::missing(name, MEMIF, why, mend),
    }
}

/// What a NIC's rings and frames take by default, without hugepages; docs/vfio.md has the figure.
const MEMLOCK_WANTED: u64 = 2 << 20;

pub(super) fn memlock(machine: &Machine) -> Check {
    let name = "memlock";
    // Others write there too: barewire-hugepage-setup, and what mends the check of key memory.
    let mend = "echo '* - memlock unlimited' | sudo tee -a /etc/security/limits.d/barewire.conf, \
                then log in again";
    let limits = machine.read("/proc/self/limits").unwrap_or_default();
    let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"));
    let Some(soft) = line.and_then(|line| line.split_whitespace().next()) else {
        return Check::warn(name, VFIO, "/proc/self/limits cannot be read", "ulimit -l");
    };
    match soft.parse::<u64>() {
        Err(_) => Check::ok(name, VFIO, soft),
        Ok(limit) if limit >= MEMLOCK_WANTED => Check::ok(name, VFIO, bytes(limit)),
        Ok(limit) => {
            let found = format!("{}: a NIC's memory will not fit", bytes(limit));
            Check::warn(name, VFIO, found, mend)
        }
    }
}

/// Hugepages of one size of one NUMA node.
struct Pool {
    node: String,
    total: u64,
    free: u64,
}

fn pools(machine: &Machine, size: &str) -> Vec<Pool> {
    let nodes = "/sys/devices/system/node";
    let names = machine.names(nodes).into_iter();
    names
        .filter(|name| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok()))
        .filter_map(|node| {
            let dir = format!("{nodes}/{node}/hugepages/hugepages-{size}");
            let total = machine.number(&format!("{dir}/nr_hugepages"))?;
            let free = machine.number(&format!("{dir}/free_hugepages"))?;
            Some(Pool { node, total, free })
        })
        .collect()
}

fn list(pools: &[Pool]) -> String {
    let each = |pool: &Pool| format!("{}: {} of {} free", pool.node, pool.free, pool.total);
    pools.iter().map(each).collect::<Vec<_>>().join(", ")
}

pub(super) fn huge_2m(machine: &Machine) -> Check {
    let name = "hugepages-2M";
    let pools = pools(machine, "2048kB");
    if pools.is_empty() {
        let mend = "boot a kernel with CONFIG_HUGETLBFS";
        return Check::warn(name, SPEED, "this kernel has none", mend);
    }
    // The node with none is the one whose cores would have to reach across.
    if let Some(dry) = pools.iter().find(|pool| pool.free == 0) {
        let file = format!(
            "/sys/devices/system/node/{}/hugepages/hugepages-2048kB/nr_hugepages",
            dry.node
        );
        let mend = format!("echo {} | sudo tee {file}", dry.total + 64);
        return Check::warn(name, SPEED, format!("{}; ordinary pages serve", list(&pools)), mend);
    }
    Check::ok(name, SPEED, list(&pools))
}

pub(super) fn huge_1g(machine: &Machine) -> Check {
    let pools = pools(machine, "1048576kB");
    let found = if pools.iter().any(|pool| pool.total > 0) {
        list(&pools)
    } else {
        "none, and none needed: 2 MiB pages serve".to_owned()
    };
    Check::ok("hugepages-1G", SPEED, found)
}

pub(super) fn transparent(machine: &Machine) -> Check {
    let name = "thp";
    let file = "/sys/kernel/mm/transparent_hugepage/enabled";
    let mend = format!("echo madvise | sudo tee {file}");
    match machine.read(file) {
        None => {
            let mend = "boot a kernel with CONFIG_TRANSPARENT_HUGEPAGE";
            Check::warn(name, SPEED, "this kernel has none", mend)
        }
        Some(text) if text.contains("[never]") => Check::warn(name, SPEED, text, mend),
        Some(text) => Check::ok(name, SPEED, text),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Status;
    use super::super::machine::fixture::{Fixture, NODE0};
    use super::*;

    #[test]
    fn shm_space_has_three_verdicts() {
        let check = |free| shm_space(&Fixture::full().shm(free).machine());
        assert_eq!(check(Ok(1 << 30)).status, Status::Ok);
        assert_eq!(check(Ok(10 << 20)).status, Status::Warn);
        assert_eq!(check(Ok(100 << 10)).status, Status::Missing);
        let denied = check(Err("/dev/shm: Permission denied".to_owned()));
        assert_eq!(denied.mend.as_deref(), Some("sudo chmod 1777 /dev/shm"));
    }

    #[test]
    fn a_memif_that_cannot_be_made_says_why() {
        assert_eq!(memif(&Fixture::full().machine()).status, Status::Ok);
        let check = memif(&Fixture::empty().machine());
        assert_eq!((check.status, &*check.found), (Status::Missing, "Too many open files"));
        assert_eq!(check.mend.as_deref(), Some("see: ulimit -n"));
    }

    #[test]
    fn memlock_reads_the_soft_limit() {
        let check = |soft: &str| {
            let text = format!("Max locked memory         {soft}       unlimited     bytes\n");
            memlock(&Fixture::full().with("/proc/self/limits", &text).machine())
        };
        assert_eq!(check("unlimited").status, Status::Ok);
        assert_eq!(check("8388608").status, Status::Ok, "a login's usual limit");
        let low = check("1048576");
        assert_eq!((low.status, low.found.starts_with("1 MiB")), (Status::Warn, true));
    }

    #[test]
    fn the_dry_node_is_the_one_to_fill() {
        let node1 = "/sys/devices/system/node/node1/hugepages/hugepages-2048kB";
        let fixture = Fixture::full()
            .with(&format!("{node1}/nr_hugepages"), "8")
            .with(&format!("{node1}/free_hugepages"), "0");
        let check = huge_2m(&fixture.machine());
        assert_eq!(check.status, Status::Warn);
        let mend = check.mend.unwrap();
        assert_eq!(mend, format!("echo 72 | sudo tee {node1}/nr_hugepages"));
        let none = Fixture::full().without(NODE0);
        assert_eq!(huge_2m(&none.machine()).status, Status::Warn);
        assert_eq!(huge_1g(&none.machine()).status, Status::Ok);
    }

    #[test]
    fn transparent_hugepages_must_not_be_off() {
        let file = "/sys/kernel/mm/transparent_hugepage/enabled";
        let off = Fixture::full().with(file, "always madvise [never]");
        assert_eq!(transparent(&off.machine()).status, Status::Warn);
    }
}
