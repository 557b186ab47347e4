//! The test programs `vfio` and `dpdk` of `barewire-tests`, run in guests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use super::guest::{self, Cable, Guest, GuestOutput, Model, Nic};
use super::kernel::Flavour;
use super::wire::Wire;
use super::{NotHere, with_setup};
use crate::{cargo, packages, process, target_dir};

/// One guest of the suite: its purpose, the machine, and the test program's arguments.
pub(crate) struct Run {
    /// Whether its driver has a planted bug that the IOMMU must detect: the test of the suite
    /// itself.
    pub(crate) is_planted: bool,
    guest: Guest,
}

/// `cargo` arguments that build a test program in the packages `selected` and print its path.
pub(crate) fn build(test: &str, selected: &[&str]) -> Command {
    let mut command = Command::new(cargo());
    command.arg("test").args(selected).args(["--test", test, "--no-run"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    command
}

/// The test program in the output of [`build`].
pub(crate) fn program(output: &str) -> Option<PathBuf> {
    let mut objects = output.lines().filter_map(|line| {
        let object: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_it = object.pointer("/target/kind/0")?.as_str()? == "test";
        is_it.then(|| object.get("executable")?.as_str().map(PathBuf::from)).flatten()
    });
    objects.next_back()
}

/// Start of the guest's command line: the test program, and the location of the ports.
const TESTS: &str = "export RUST_BACKTRACE=0 BAREWIRE_TEST_NAPS=1 VM_MONITOR=/dev/ttyS0\n\
                     export BAREWIRE_TEST_PORT=\"vfio:$NIC0 vfio:$NIC1\"\n\
                     tests='vfio-tests --show-output --test-threads=1'\n";

/// Runs the tests `$1` as an ordinary user, for whom the script has prepared the machine, and the
/// tests of that as root. A login would apply the limit that the script configured.
const AS_USER: &str = "hugepage-setup.sh --2m 64 --bind $NIC0 $NIC1 --group user --memlock user\n\
                       limit=$(cut -d' ' -f4 /etc/security/limits.d/*barewire*)\n\
                       (ulimit -l $limit && exec su user -s /bin/sh -c \"$tests $as_user\")\n\
                       as_user=$?\n\
                       $tests $as_root && exit $as_user\n";

/// The tests of a port, and those of its card: cable, failures, DPDK's testpmd at the other end.
const PORT: &str = "frames:: processes:: switch:: msg:: matching:: rma::";
const CARD: &str = "cable:: trouble:: testpmd::";
/// Those of a port on a virtual function, where a switch is refused.
const FUNCTION: &str = "frames:: processes:: msg:: matching:: rma::";

/// The tests of an 82540, an 82576, its functions and a vmxnet3. Nightly they have all: the other
/// tests have run over the other two cards.
const E1000: &str = "frames:: processes:: cable:: trouble:: testpmd::";
const IGB: &str = "frames:: cable:: trouble::";
const VIRTUAL: &str = "functions:: frames:: processes:: trouble::";
const VMXNET3: &str = "frames:: processes:: cable:: trouble:: msg:: matching:: rma::";

/// Two virtual functions of the first card as the tests' NICs. The kernel drives both cards, whose
/// interfaces are up; the program VM_IP, if present, sets the addresses of the functions.
const FUNCTIONS: &str = "export VM_CARD=$NIC0 VM_WIRE=$NIC1\n\
                         cd /sys/bus/pci/devices\n\
                         for nic in $NICS; do ip link set $(ls $nic/net) up; done\n\
                         cd $VM_CARD\n\
                         echo 0 >sriov_drivers_autoprobe\n\
                         echo 2 >sriov_numvfs\n\
                         export NIC0=$(basename $(readlink virtfn0))\n\
                         export NIC1=$(basename $(readlink virtfn1))\n\
                         export BAREWIRE_TEST_PORT=\"vfio:$NIC0 vfio:$NIC1\"\n\
                         cd /data\n\
                         if [ -x /usr/bin/iproute2 ]; then export VM_IP=/usr/bin/iproute2; fi\n\
                         hugepage-setup.sh --2m 16 --bind $NIC0 $NIC1\n";

/// Runs tests over the ports `xdp` of each pair of the kernel's `$count` interfaces: `$first` over
/// the first pair, `$others` over the others.
const XDP: &str = "set --\n\
                   for nic in $NICS; do\n\
                   dev=/sys/bus/pci/devices/$nic\n\
                   name=$(basename $(ls -d $dev/net/* $dev/virtio*/net/* 2>/dev/null))\n\
                   ip link set $name up\n\
                   set -- \"$@\" xdp:$name\n\
                   done\n\
                   [ $# -eq $count ] || { echo \"$# interfaces, not $count: $*\"; exit 1; }\n\
                   code=0\n\
                   of=$first\n\
                   while [ $# -gt 0 ]; do\n\
                   export BAREWIRE_TEST_PORT=\"$1 $2\"\n\
                   $tests $of || code=$?\n\
                   shift 2\n\
                   of=$others\n\
                   done\n\
                   exit $code\n";

/// The guests of the suite. Long tests run `nightly`.
pub(crate) fn runs(program: &Path, nightly: bool) -> Vec<Run> {
    // Tests that do not depend on the port and take long in emulation.
    let long = "--skip the_models --skip mf5 --skip unexpected_messages_are_bounded";
    let tests = |usual: &str, all: &str| {
        let tests = if nightly { all } else { usual };
        format!("$tests {tests} {long}\n")
    };
    let all = format!("{PORT} {CARD}");
    let mut by_root = Guest::with_pair("virtio", Model::Virtio.device());
    by_root.command = tests(&all, &all);
    by_root.files.extend(testpmd());
    let mut by_user = Guest::with_pair("e1000e", Model::E1000e.device());
    by_user.command = format!("as_user='{PORT} {long}'\nas_root='{CARD}'\n{AS_USER}");
    by_user.files.extend(testpmd());
    // The 82574's driver with another chip: the layers above the port were tested with the 82574.
    let mut e1000 = Guest::with_pair("e1000", Model::E1000.device());
    e1000.nics.extend(
        [("e1000-82544gc", 3), ("e1000-82545em", 4)]
            .map(|(device, station)| Nic { cable: Cable::Hub(1), ..Nic::on_hub(device, station) }),
    );
    e1000.command = tests(E1000, &all);
    e1000.files.extend(testpmd());
    // The same driver with the other descriptor format and several queues.
    let mut igb = Guest::with_pair("igb", Model::Igb.device());
    igb.command = tests(IGB, &all);
    igb.files.extend(testpmd());
    let mut vmxnet3 = Guest::with_pair("vmxnet3", Model::Vmxnet3.device());
    // DPDK's driver has a vmxnet3 read address 0, which the IOMMU refuses.
    vmxnet3.command = tests(VMXNET3, &format!("{VMXNET3} switch::"));
    let virtio = Model::Virtio.device();
    let mut wrong = Guest::with_pair("refusals", virtio);
    wrong.iova_bits = 39;
    // Enough memory for a page of 1 GiB. Unused memory takes none of the host's.
    wrong.memory_mib = 6144;
    wrong.modules = vec!["virtio_pci", "virtio_net", "af_packet", "8021q"];
    wrong.nics.push(Nic::on_hub("virtio-net-pci,disable-legacy=on", 3));
    wrong.nics.push(Nic::on_hub(virtio, 4));
    wrong.nics.push(Nic { shares_slot: true, ..Nic::on_hub(virtio, 5) });
    wrong.command = "$tests refusals:: setup:: kernel:: frames::every_length\n".to_owned();
    let mut planted = Guest::with_pair("planted", virtio);
    planted.command = "export VM_PLANTED=1\n$tests planted::\n".to_owned();
    // The longest come first, so that none runs alone at the end.
    let mut guests = vec![
        xdp(nightly),
        zero_copy(),
        by_root,
        by_user,
        e1000,
        igb,
        wrong,
        functions(&tests(VIRTUAL, &format!("{VIRTUAL} {FUNCTION}"))),
        kernels(),
        vmxnet3,
        without_remapping(),
        planted,
    ];
    if nightly {
        guests.splice(0..0, by_users(long));
    }
    let runs = guests.into_iter().map(|guest| {
        let mut guest = with_setup(guest);
        guest.files.push((program.to_owned(), "usr/bin/vfio-tests".to_owned()));
        let nightly = if nightly { "export BAREWIRE_NIGHTLY=1\n" } else { "" };
        guest.command = format!("{TESTS}{nightly}{}", guest.command);
        // Far above the usual duration.
        guest.limit = Duration::from_secs(if nightly.is_empty() { 360 } else { 900 });
        Run { is_planted: guest.name == "planted", guest }
    });
    runs.collect()
}

/// The guest whose interrupts are not remapped.
fn without_remapping() -> Guest {
    let mut guest = Guest::with_pair("remapping", Model::Virtio.device());
    guest.intremap = false;
    guest.command = "export VM_NO_REMAPPING=1\n\
                     $tests refusals::a_machine_without_interrupt_remapping\n"
        .to_owned();
    guest
}

/// The guests in which an ordinary user runs what others run over a virtio-net and an 82574, over
/// the other cards and over virtual functions.
fn by_users(long: &str) -> [Guest; 4] {
    let as_user = |mut guest: Guest, prepared: &str, tests: &str| {
        guest.name.push_str("-user");
        guest.command =
            format!("{prepared}as_user='{tests} {long}'\nas_root=frames::every_length\n{AS_USER}");
        guest
    };
    let of_a_pair = |name, model: Model| as_user(Guest::with_pair(name, model.device()), "", PORT);
    [
        of_a_pair("igb", Model::Igb),
        as_user(functions(""), FUNCTIONS, FUNCTION),
        of_a_pair("e1000", Model::E1000),
        of_a_pair("vmxnet3", Model::Vmxnet3),
    ]
}

/// The guest in which the kernel drives a pair of cards of three kinds each, for the port `xdp`.
///
/// The 82576's driver resets its link, which takes seconds, whenever a port opens or closes: there
/// the conformance clauses, which open many ports, run nightly.
fn xdp(nightly: bool) -> Guest {
    let mut guest = Guest::with_pair("xdp", Model::Igb.device());
    guest.kernel = Flavour::Full;
    guest.bind = false;
    // Its drivers create a queue per processor. Several queues are tested on a veth.
    guest.cpu_count = 1;
    guest.modules = vec!["igb", "e1000", "virtio_pci", "virtio_net", "af_packet"];
    for (hub, model) in [(1, Model::E1000), (2, Model::Virtio)] {
        guest.nics.extend(on_own_hub(hub, model));
    }
    let all = "xdp:: msg:: --skip the_models --skip mf5";
    let first = if nightly { all } else { "xdp::" };
    guest.command = format!("count=6\nfirst='{first}'\nothers='{all}'\n{XDP}");
    guest
}

/// The guest with kernel drivers that have zero-copy, for the port `xdp`.
fn zero_copy() -> Guest {
    let mut guest = Guest::with_pair("zero-copy", Model::Igb.device());
    guest.kernel = Flavour::Newest;
    guest.bind = false;
    guest.cpu_count = 1;
    guest.modules = vec!["igb", "virtio_net"];
    guest.nics.extend(on_own_hub(1, Model::Virtio));
    let all = "xdp:: msg:: --skip the_models --skip mf5";
    // igb of Linux 7.3 returns a foreign buffer after it has run out of buffers, and the port ends.
    let igb = "xdp:: --skip a_port_of_xdp_that_slept";
    let command = format!("count=4\nfirst='{igb}'\nothers='{all}'\n{XDP}");
    guest.command = format!("export VM_ZERO_COPY=1\n{command}");
    guest
}

/// The guest with the kernel's driver at the other end; for virtio-net that is `refusals`.
fn kernels() -> Guest {
    let mut guest = Guest::with_pair("kernel", Model::Igb.device());
    guest.kernel = Flavour::Full;
    guest.modules = vec!["igb", "e1000e", "e1000", "vmxnet3", "af_packet", "8021q"];
    for (hub, model) in [(1, Model::E1000e), (2, Model::E1000), (3, Model::Vmxnet3)] {
        guest.nics.extend(on_own_hub(hub, model));
    }
    guest.command = "export VM_KERNEL='0 2 4 6'\n$tests kernel::\n".to_owned();
    guest
}

/// A pair of NICs of a kind on their own hub.
fn on_own_hub(hub: u16, model: Model) -> [Nic; 2] {
    [1, 2].map(|n| Nic { cable: Cable::Hub(hub), ..Nic::on_hub(model.device(), 2 * hub + n) })
}

/// The guest with the kernel's driver on a card and barewire's on its virtual functions, on which
/// `command` runs.
fn functions(command: &str) -> Guest {
    let mut guest = Guest::with_pair("functions", Model::Igb.device());
    guest.kernel = Flavour::Full;
    guest.bind = false;
    guest.modules = vec!["igb", "af_packet"];
    guest.files.extend(iproute2());
    guest.command = format!("{FUNCTIONS}{command}");
    guest
}

/// The guests for the PCI tests in the test program `dpdk`: one per card that both DPDK and
/// barewire have a driver for.
pub(crate) fn dpdk(program: &Path) -> Vec<Run> {
    let runs = [("dpdk-virtio", Model::Virtio), ("dpdk-e1000e", Model::E1000e)];
    let runs = runs.map(|(name, model)| {
        let mut guest = Guest::with_pair(name, model.device());
        guest.files = drivers();
        guest.files.push((program.to_owned(), "usr/bin/dpdk-tests".to_owned()));
        guest.command = "export RUST_BACKTRACE=0\n\
                         exec dpdk-tests --show-output --test-threads=1 nic::\n"
            .to_owned();
        // Far above the usual duration.
        guest.limit = Duration::from_secs(240);
        Run { is_planted: false, guest }
    });
    runs.into()
}

/// DPDK's testpmd and its drivers, if installed.
pub(super) fn testpmd() -> Vec<(PathBuf, String)> {
    let program = PathBuf::from("/usr/bin").join(packages::TESTPMD.program);
    let drivers = drivers();
    if !program.is_file() || drivers.is_empty() {
        return Vec::new();
    }
    std::iter::once(same_path(&program)).chain(drivers).collect()
}

/// The host's program `ip`; the guest's own does not support virtual functions.
fn iproute2() -> Option<(PathBuf, String)> {
    let here = ["/usr/sbin/ip", "/usr/bin/ip", "/sbin/ip"].map(PathBuf::from);
    let program = here.into_iter().find(|path| path.is_file())?;
    Some((program, "usr/bin/iproute2".to_owned()))
}

/// A file, with the same path in a guest.
fn same_path(path: &Path) -> (PathBuf, String) {
    (path.to_owned(), path.to_string_lossy().into_owned())
}

/// DPDK's drivers of the supported cards, if installed, in the folder from which DPDK loads all
/// plugins.
fn drivers() -> Vec<(PathBuf, String)> {
    let lists = |dir: &Path| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let dirs = lists(Path::new("/usr/lib")).into_iter().flat_map(|dir| lists(&dir.join("dpdk")));
    let plugins: Vec<PathBuf> = dirs.flat_map(|dir| lists(&dir)).collect();
    // Of each only the name with the whole version; the others are links to it.
    let drivers = [
        "librte_net_virtio.so.",
        "librte_net_e1000.so.",
        "librte_net_vmxnet3.so.",
        "librte_mempool_ring.so.",
    ];
    let drivers: Vec<&PathBuf> = drivers
        .iter()
        .filter_map(|driver| {
            let is_it = |path: &&PathBuf| path.to_string_lossy().contains(driver);
            plugins.iter().filter(is_it).max_by_key(|path| path.as_os_str().len())
        })
        .collect();
    if drivers.len() < 4 {
        return Vec::new();
    }
    drivers.into_iter().map(|path| same_path(path)).collect()
}

/// Runs the guests, two at a time, calls `each` with every result, and returns the results in the
/// guests' order.
///
/// Guests mostly wait: for a device reset, or for a timeout.
pub(crate) fn run_all(
    runs: &[Run],
    each: impl Fn(&Run, &GuestOutput, Duration) + Sync,
) -> Vec<Result<GuestOutput, NotHere>> {
    process::side_by_side(runs.len(), |n| {
        let began = Instant::now();
        let ended = runs[n].run();
        if let Ok(ended) = &ended {
            each(&runs[n], ended, began.elapsed());
        }
        ended
    })
}

impl Run {
    /// Name of the guest.
    pub(crate) fn name(&self) -> &str {
        &self.guest.name
    }

    /// Boots the guest and runs its tests.
    ///
    /// # Errors
    /// [`NotHere`].
    pub(crate) fn run(&self) -> Result<GuestOutput, NotHere> {
        guest::run(&self.guest, &mut |_| {})
    }
}

/// Loss of the cable between two guests, percent.
const LOSS_PERCENT: u64 = 5;

/// Runs two guests with one NIC each, joined by a lossy cable: one sends messages, and the other
/// checks that each arrives once, in order and unchanged. Returns the results, and the counts of
/// the cable.
///
/// # Errors
/// [`NotHere`].
pub(crate) fn two_guests(program: &Path) -> Result<(Vec<GuestOutput>, String), NotHere> {
    on_two_guests(program, LOSS_PERCENT, ["receives", "sends"], false)
}

/// Runs two guests as [`two_guests`] with a loss-free cable: one stops the other's processors for a
/// while, and for longer than T_dead; `nightly` many times. Returns the results.
///
/// # Errors
/// [`NotHere`].
pub(crate) fn stopped_guest(
    program: &Path,
    nightly: bool,
) -> Result<(Vec<GuestOutput>, String), NotHere> {
    on_two_guests(program, 0, ["is_stopped", "sees_a_stop"], nightly)
}

/// Runs two tests, one in a guest each; the second guest controls the monitor of the first.
fn on_two_guests(
    program: &Path,
    loss_percent: u64,
    tests: [&str; 2],
    nightly: bool,
) -> Result<(Vec<GuestOutput>, String), NotHere> {
    let dir = format!("wire-{}-{}", std::process::id(), tests[0]);
    let dir = target_dir().join("vm").join(dir);
    let wire =
        Wire::open(&dir, loss_percent, 1).map_err(|why| NotHere(format!("{dir:?}: {why}")))?;
    let device = Model::E1000e.device();
    let nightly = if nightly { "export BAREWIRE_NIGHTLY=1\n" } else { "" };
    let guest = |end: &'static str, [own, peer]: [u16; 2], test: &str| {
        let mut guest = Guest::with_pair(&format!("{test}-{end}"), device);
        guest.files.push((program.to_owned(), "usr/bin/vfio-tests".to_owned()));
        guest.nics = vec![Nic { cable: wire.end(end), ..Nic::on_hub(device, own) }];
        guest.cpu_count = 1;
        guest.memory_mib = 512;
        guest.limit = Duration::from_secs(240);
        guest.command = format!(
            "export RUST_BACKTRACE=0 BAREWIRE_TEST_NAPS=1 VM_MONITOR=/dev/ttyS0\n\
             export VM_PEER=barewire://52:54:00:00:00:{peer:02x}/0\n\
             {nightly}exec vfio-tests --exact wire::{test} --nocapture\n"
        );
        guest
    };
    let (mut first, mut second) = (guest("a", [1, 2], tests[0]), guest("b", [2, 1], tests[1]));
    let monitor = dir.join("monitor");
    (first.monitor, second.asks) = (Some(monitor.clone()), Some(monitor));
    let both = std::thread::scope(|scope| {
        let threads =
            [first, second].map(|guest| scope.spawn(move || guest::run(&guest, &mut |_| {})));
        threads.map(|thread| thread.join().unwrap_or_else(|_| Err(NotHere("it panicked".into()))))
    });
    let (carried, lost) = wire.counts();
    let both = both.into_iter().collect::<Result<Vec<GuestOutput>, NotHere>>()?;
    Ok((both, format!("{carried} frames carried, {lost} lost")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_found_among_what_cargo_says() {
        let output = "{\"reason\":\"x\",\"target\":{\"kind\":[\"bin\"]},\"executable\":\"/a\"}\n\
                      {\"target\":{\"kind\":[\"test\"]},\"executable\":\"/b/vfio-1\"}\n\
                      {\"reason\":\"build-finished\",\"success\":true}\n";
        assert_eq!(program(output), Some(PathBuf::from("/b/vfio-1")));
        assert_eq!(program("words\n"), None);
    }

    /// Goal: a guest without its interfaces has failed: one that runs no test has passed none.
    #[test]
    fn a_guest_without_interfaces_fails() {
        let mut sh = std::process::Command::new("sh");
        let run = sh.args(["-c", XDP]).envs([("NICS", ""), ("tests", "true"), ("count", "2")]);
        let run = run.output().unwrap();
        assert_eq!(run.status.code(), Some(1));
        assert_eq!(run.stdout, b"0 interfaces, not 2: \n");
    }
}
