//! The suite `vfio`: the test program `vfio` of `barewire-tests`, run inside guests.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use super::guest::{self, Ended, Guest, Model, Nic};
use super::wire::Wire;
use super::{NotHere, with_setup};
use crate::{cargo, packages, target_dir};

/// One guest of the suite: what it is for, the machine, and what the test program is told.
pub(crate) struct Run {
    pub(crate) name: &'static str,
    /// Its driver makes a mistake, and its IOMMU has to notice: the test of the suite itself.
    pub(crate) is_planted: bool,
    guest: Guest,
}

/// `cargo` arguments that build the test program and say where it is.
pub(crate) fn build() -> Command {
    let mut command = Command::new(cargo());
    command.args(["test", "--package", "barewire-tests", "--test", "vfio", "--no-run"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    command
}

/// The test program in what [`build`] printed.
pub(crate) fn program(output: &str) -> Option<PathBuf> {
    let mut objects = output.lines().filter_map(|line| {
        let object: serde_json::Value = serde_json::from_str(line).ok()?;
        let is_it = object.pointer("/target/name")?.as_str()? == "vfio";
        is_it.then(|| object.get("executable")?.as_str().map(PathBuf::from)).flatten()
    });
    objects.next_back()
}

/// The guests of the suite, in order. What takes long is measured `nightly`.
pub(crate) fn runs(program: &Path, nightly: bool) -> Vec<Run> {
    // Left out: what says nothing of a port, and takes long in emulation.
    let pair = |name: &'static str, model: Model| {
        let mut guest = Guest::with_pair(name, model.device());
        let skipped = [
            "refusals::",
            "setup::",
            "kernel::",
            "wire::",
            "planted::",
            "the_models",
            "mf5",
            "unexpected_messages_are_bounded",
        ];
        guest.command = skipped.map(|name| format!("--skip {name} ")).concat();
        guest.files.extend(testpmd());
        Run { name, is_planted: false, guest }
    };
    let virtio = Model::Virtio.device();
    let mut wrong = Guest::with_pair("wrong", virtio);
    wrong.iova_bits = 39;
    // A page of 1 GiB is likely to be had. What is not used takes nothing of the host.
    wrong.memory_mib = 6144;
    wrong.modules = vec!["virtio_pci", "virtio_net", "af_packet"];
    wrong.nics.push(Nic::on_hub("virtio-net-pci,disable-legacy=on", 3));
    wrong.nics.push(Nic::on_hub(virtio, 4));
    wrong.nics.push(Nic { shares_slot: true, ..Nic::on_hub(virtio, 5) });
    wrong.command = "refusals:: setup:: kernel:: frames::every_length".to_owned();
    let mut planted = Guest::with_pair("planted", virtio);
    planted.command = "planted::".to_owned();
    let mut remapping = Guest::with_pair("remapping", virtio);
    remapping.intremap = false;
    remapping.command = "refusals::a_machine_without_interrupt_remapping".to_owned();
    let mut runs = vec![
        pair("virtio", Model::Virtio),
        pair("e1000e", Model::E1000e),
        Run { name: "refusals", is_planted: false, guest: wrong },
        Run { name: "remapping", is_planted: false, guest: remapping },
        Run { name: "planted", is_planted: true, guest: planted },
    ];
    for run in &mut runs {
        let guest = std::mem::replace(&mut run.guest, Guest::with_pair("", ""));
        let mut guest = with_setup(guest);
        guest.files.push((program.to_owned(), "usr/bin/vfio-tests".to_owned()));
        let no_remapping = if guest.intremap { "" } else { "export VM_NO_REMAPPING=1\n" };
        let nightly = if nightly { "export BAREWIRE_NIGHTLY=1\n" } else { "" };
        let planted = if run.is_planted { "export VM_PLANTED=1\n" } else { "" };
        guest.command = format!(
            "export RUST_BACKTRACE=0 BAREWIRE_TEST_NAPS=1\n\
             export BAREWIRE_TEST_PORT=\"vfio:$NIC0 vfio:$NIC1\"\n{no_remapping}{planted}{nightly}\
             exec vfio-tests --show-output --test-threads=1 {}\n",
            guest.command
        );
        // Far above what it needs.
        guest.limit = Duration::from_secs(480);
        run.guest = guest;
    }
    runs
}

/// DPDK's testpmd and its drivers for our two cards, if they are here. The drivers go where DPDK
/// loads all it finds.
pub(super) fn testpmd() -> Vec<(PathBuf, String)> {
    let program = PathBuf::from("/usr/bin").join(packages::TESTPMD.program);
    let lists = |dir: &Path| {
        let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut paths: Vec<PathBuf> = entries.map(|entry| entry.path()).collect();
        paths.sort();
        paths
    };
    let dirs = lists(Path::new("/usr/lib")).into_iter().flat_map(|dir| lists(&dir.join("dpdk")));
    let plugins: Vec<PathBuf> = dirs.flat_map(|dir| lists(&dir)).collect();
    // Of each the name with the whole version: the others are links to it.
    let drivers = ["librte_net_virtio.so.", "librte_net_e1000.so.", "librte_mempool_ring.so."];
    let drivers: Vec<&PathBuf> = drivers
        .iter()
        .filter_map(|driver| {
            let is_it = |path: &&PathBuf| path.to_string_lossy().contains(driver);
            plugins.iter().filter(is_it).max_by_key(|path| path.as_os_str().len())
        })
        .collect();
    if !program.is_file() || drivers.len() < 3 {
        return Vec::new();
    }
    let own = |path: &Path| (path.to_owned(), path.to_string_lossy().into_owned());
    std::iter::once(own(&program)).chain(drivers.into_iter().map(|path| own(path))).collect()
}

impl Run {
    /// Boots the guest and runs its tests.
    ///
    /// # Errors
    /// [`NotHere`].
    pub(crate) fn run(&self) -> Result<Ended, NotHere> {
        guest::run(&self.guest, &mut |_| {})
    }
}

/// Frames in a hundred that the cable between two guests loses.
const LOSS_PERCENT: u64 = 5;

/// Two guests with one NIC each, joined by a cable that loses frames: one sends messages, the other
/// sees each arrive once, in order and unchanged. Says how the guests ended, and what went over the
/// cable.
///
/// # Errors
/// [`NotHere`].
pub(crate) fn two_guests(program: &Path) -> Result<(Vec<Ended>, String), NotHere> {
    let dir = target_dir().join("vm").join(format!("wire-{}", std::process::id()));
    let wire =
        Wire::lay(&dir, LOSS_PERCENT, 1).map_err(|why| NotHere(format!("{dir:?}: {why}")))?;
    let device = Model::E1000e.device();
    let guest = |end: &'static str, [own, peer]: [u16; 2], test: &str| {
        let mut guest = Guest::with_pair(end, device);
        guest.files.push((program.to_owned(), "usr/bin/vfio-tests".to_owned()));
        guest.nics = vec![Nic { cable: wire.end(end), ..Nic::on_hub(device, own) }];
        guest.cpu_count = 1;
        guest.memory_mib = 512;
        guest.limit = Duration::from_secs(240);
        guest.command = format!(
            "export RUST_BACKTRACE=0 BAREWIRE_TEST_NAPS=1\n\
             export VM_PEER=barewire://52:54:00:00:00:{peer:02x}/0\n\
             exec vfio-tests --exact wire::{test} --nocapture\n"
        );
        guest
    };
    let (listens, sends) = (guest("a", [1, 2], "receives"), guest("b", [2, 1], "sends"));
    let both = std::thread::scope(|scope| {
        let threads =
            [listens, sends].map(|guest| scope.spawn(move || guest::run(&guest, &mut |_| {})));
        threads.map(|thread| thread.join().unwrap_or_else(|_| Err(NotHere("it panicked".into()))))
    });
    let (carried, lost) = wire.counts();
    let both = both.into_iter().collect::<Result<Vec<Ended>, NotHere>>()?;
    Ok((both, format!("{carried} frames carried, {lost} lost")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_program_is_found_among_what_cargo_says() {
        let output = "{\"reason\":\"x\",\"target\":{\"name\":\"sim\"},\"executable\":\"/a\"}\n\
                      {\"target\":{\"name\":\"vfio\"},\"executable\":\"/b/vfio-1\"}\n\
                      {\"reason\":\"build-finished\",\"success\":true}\n";
        assert_eq!(program(output), Some(PathBuf::from("/b/vfio-1")));
        assert_eq!(program("words\n"), None);
    }
}
