//! MPI between two hosts whose NICs are driven by barewire: one guest each, in which a `barewire
//! switch` owns the NIC and several ranks share it. The launcher reaches the other guest over a
//! second NIC, which the kernel drives.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use super::guest::{self, Guest, GuestOutput, Model, Nic};
use super::wire::Wire;
use super::{NotHere, with_setup};
use crate::packages::{self, FI_INFO, MPICC, MPIRUN};
use crate::{root, target_dir};

/// Programs of the launcher, and words in the names of components that are left out: those for
/// other fabrics and other launchers, with their libraries.
const PROGRAMS: [(&str, &str); 2] = [("orterun", "usr/bin/mpirun"), ("orted", "usr/bin/orted")];
const LEFT_OUT: [&str; 8] =
    ["ucx", "openib", "psm", "monitoring", "slurm", "flux", "gridengine", "usnic"];

/// The launcher's agent in place of ssh: sends commands to the other guest.
const AGENT: &str = "#!/bin/sh\nhost=$1\nshift\necho \"$*\" | nc $host 5000\n";
const SERVER: &str = "#!/bin/sh\nread -r line\nexec sh -c \"$line\" 2>&1\n";

/// Common start of both guests: the NIC for the switch, and an address on the other NIC.
const BEGINS: &str = "unset BAREWIRE_NEAR\n\
    hostname host-$OWN\n\
    printf '127.0.0.1 localhost\\n10.9.0.1 host-1\\n10.9.0.2 host-2\\n' >/etc/hosts\n\
    hugepage-setup.sh --2m 16 --bind $NIC0 || exit 1\n\
    net=$(ls /sys/class/net | grep eth)\n\
    ip addr add 10.9.0.$OWN/24 dev $net && ip link set $net up || exit 1\n\
    ip addr add fd09::$OWN/64 dev $net || exit 1\n\
    begin_switch() {\n\
    barewire switch --port vfio:$NIC0 2>/tmp/switch &\n\
    switch=$!\n\
    until grep -q 'a switch on' /tmp/switch; do\n\
    kill -0 $switch || { cat /tmp/switch; exit 1; }\n\
    sleep 0.2\n\
    done\n\
    }\n\
    export FI_PROVIDER=barewire FI_PROVIDER_PATH=/usr/lib/fi\n";

/// The first guest finds servers of the other one by its addresses and its name: over each guest's
/// own NIC, and through their switches.
const FINDS: &str = "until vm-agent host-2 echo there | grep -q there; do sleep 0.5; done\n\
    failed=0\n\
    finds() {\n\
    vm-agent host-2 $1 >/tmp/server &\n\
    server=$!\n\
    for try in $(seq 20); do\n\
    $2 >/tmp/client 2>&1 && break\n\
    sleep 0.5\n\
    done\n\
    tail -n 1 /tmp/client\n\
    grep -q \"$3\" /tmp/client && wait $server && return\n\
    echo \"failed: $1; $2\"\n\
    cat /tmp/server /tmp/client\n\
    failed=1\n\
    }\n\
    theirs() {\n\
    fi=\"fi_pingpong -p barewire -e rdm -c -S 64 -I 10\"\n\
    finds \"env FI_BAREWIRE_PORT=$1 $fi $2\" \"env FI_BAREWIRE_PORT=$1 $fi $2 $3\" '^64 .*=10'\n\
    }\n\
    ours() {\n\
    finds \"barewire pingpong --port $1 --listen --once\" \
    \"barewire pingpong --port $1 --verify --size 64 --iterations 10 $2\" 'every byte'\n\
    }\n\
    if [ $FINDS = 1 ]; then\n\
    ours vfio:$NIC0 host-2\n\
    theirs vfio:$NIC0 '' 10.9.0.2\n\
    fi\n\
    vm-agent host-2 touch /tmp/begin\n\
    begin_switch\n\
    if [ $FINDS = 1 ]; then\n\
    theirs vfio:$NIC0,switch=yes '' host-2\n\
    theirs vfio:$NIC0,switch=yes -6 fd09::2\n\
    fi\n";

/// The first guest launches the job as in docs/mpi.md; ranks use the provider only.
const LAUNCHES: &str = "export FI_BAREWIRE_PORT=vfio:$NIC0,switch=yes\n\
    printf 'host-1 slots=3\\nhost-2 slots=3\\n' >hosts\n\
    job() {\n\
    began=$(cut -d. -f1 /proc/uptime)\n\
    timeout 240 mpirun --allow-run-as-root -n 6 --hostfile hosts --bind-to none \
    --mca plm_rsh_agent /usr/bin/vm-agent --mca oob_tcp_if_include $net \
    --mca mpi_yield_when_idle 1 --mca pml cm --mca mtl ofi --mca mtl_ofi_provider_include barewire \
    --mca btl self --mca osc pt2pt -x FI_PROVIDER -x FI_PROVIDER_PATH -x FI_BAREWIRE_PORT \
    vm-ranks $* >/tmp/job 2>&1\n\
    code=$?\n\
    cat /tmp/job\n\
    grep -q 'all 6 ranks agree' /tmp/job || code=1\n\
    echo \"vm-ranks $*: code $code, $(($(cut -d. -f1 /proc/uptime) - began)) s\"\n\
    return $code\n\
    }\n\
    job $SIZE || failed=1\n\
    barewire stats\n\
    echo 'touch /tmp/over' | nc host-2 5000\n";

/// The second guest executes the launcher's commands until the job is over.
const SERVES: &str = "nc -ll -p 5000 -e /usr/bin/vm-server &\n\
    server=$!\n\
    until [ -e /tmp/begin ]; do sleep 0.2; done\n\
    begin_switch\n\
    failed=1\n\
    for second in $(seq 400); do\n\
    if [ -e /tmp/over ]; then failed=0; break; fi\n\
    sleep 1\n\
    done\n\
    kill $server\n\
    barewire stats\n";

const ENDS: &str = "kill $switch\nwait $switch || failed=1\nexit $failed\n";

/// Runs two guests with one NIC of this kind each, owned by a switch: three ranks of each send,
/// receive from any source, use RMA windows and run all collectives, `nightly` with large messages
/// as well. Returns the results.
///
/// # Errors
/// [`NotHere`]: no guest, or no Open MPI.
pub(crate) fn between_guests(
    barewire: &Path,
    provider: &Path,
    nic: Model,
    nightly: bool,
) -> Result<Vec<GuestOutput>, NotHere> {
    let name = format!("mpi-{nic:?}");
    let dir = target_dir().join("vm").join(format!("{name}-{}", std::process::id()));
    let wire = |name: &str| {
        let dir = dir.join(name);
        Wire::open(&dir, 0, 1).map_err(|why| NotHere(format!("{dir:?}: {why}")))
    };
    let (data, control) = (wire("data")?, wire("control")?);
    let mut files = open_mpi()?;
    files.push((provider.to_owned(), "usr/lib/fi/libbarewire_fi.so".to_owned()));
    files.push((ranks(&dir)?, "usr/bin/vm-ranks".to_owned()));
    files.push((fi_pingpong()?, "usr/bin/fi_pingpong".to_owned()));
    for (name, text) in [("vm-agent", AGENT), ("vm-server", SERVER)] {
        files.push((script(&dir.join(name), text)?, format!("usr/bin/{name}")));
    }
    let size = if nightly { "" } else { "small" };
    // Server lookup does not depend on the NIC's kind.
    let finds = u8::from(nightly || nic == Model::E1000e);
    let host = |end: &'static str, own: u16, does: &str| {
        let mut guest = with_setup(Guest::with_pair(&format!("{name}-{end}"), nic.device()));
        guest = guest.program(barewire);
        guest.files.extend(files.clone());
        guest.bind = false;
        guest.modules = vec!["virtio_pci", "virtio_net", "af_packet"];
        guest.nics = vec![
            Nic { cable: data.end(end), ..Nic::on_hub(nic.device(), own) },
            Nic { cable: control.end(end), ..Nic::on_hub("virtio-net-pci", 16 + own) },
        ];
        guest.limit = Duration::from_secs(420);
        guest.command = format!("OWN={own}\nSIZE={size}\nFINDS={finds}\n{BEGINS}{does}{ENDS}");
        guest
    };
    let both = [host("a", 1, &format!("{FINDS}{LAUNCHES}")), host("b", 2, SERVES)];
    let ended = std::thread::scope(|scope| {
        let threads = both.map(|host| scope.spawn(move || guest::run(&host, &mut |_| {})));
        threads.map(|thread| thread.join().unwrap_or_else(|_| Err(NotHere("it panicked".into()))))
    });
    drop((data, control));
    let _ = std::fs::remove_dir_all(&dir);
    ended.into_iter().collect()
}

/// The files of Debian's Open MPI and their paths: the launcher, its components, and their
/// configuration.
fn open_mpi() -> Result<Vec<(PathBuf, String)>, NotHere> {
    let missing = |what: &str| {
        NotHere(format!("no {what} of Open MPI 4.1: sudo apt-get install -y {}", MPIRUN.package))
    };
    let said = |what: &str| {
        let mut ask = Command::new("ompi_info");
        let said = ask.args(["--path", what, "--parsable"]).stdin(Stdio::null()).output().ok()?;
        let text = String::from_utf8_lossy(&said.stdout).into_owned();
        let path = text.lines().find_map(|line| line.strip_prefix(&format!("path:{what}:")))?;
        Some(PathBuf::from(path))
    };
    let dir = |what: &str| said(what).ok_or_else(|| missing(what));
    let bin = dir("bindir")?;
    let programs = PROGRAMS.map(|(name, to)| (bin.join(name), to.to_owned()));
    let mut files: Vec<_> = programs.into();
    for what in ["pkglibdir", "pkgdatadir", "sysconfdir"] {
        let entries = std::fs::read_dir(dir(what)?).map_err(|_| missing(what))?;
        let wanted = entries.flatten().map(|entry| entry.path()).filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            path.is_file() && !LEFT_OUT.iter().any(|word| name.contains(word))
        });
        files.extend(wanted.map(|path| (path.clone(), path.to_string_lossy().into_owned())));
    }
    Ok(files)
}

/// libfabric's program that finds a server by its host.
fn fi_pingpong() -> Result<PathBuf, NotHere> {
    let program = PathBuf::from("/usr/bin/fi_pingpong");
    let hint = || NotHere(format!("no fi_pingpong: sudo apt-get install -y {}", FI_INFO.package));
    if program.is_file() { Ok(program) } else { Err(hint()) }
}

/// The program of the ranks, compiled.
fn ranks(dir: &Path) -> Result<PathBuf, NotHere> {
    let hint = format!("sudo apt-get install -y {}", MPICC.package);
    if !packages::in_path(MPICC.program) {
        return Err(NotHere(format!("no {}: {hint}", MPICC.program)));
    }
    let program = dir.join("vm-ranks");
    let mut compile = Command::new(MPICC.program);
    compile.arg("-O2").arg("-o").arg(&program).arg(root().join("tests/provider/mpi.c"));
    let done = compile.stdin(Stdio::null()).status();
    match done.is_ok_and(|status| status.success()) {
        true => Ok(program),
        false => Err(NotHere(format!("{} does not compile: {hint}", MPICC.program))),
    }
}

/// A script for a guest.
fn script(path: &Path, text: &str) -> Result<PathBuf, NotHere> {
    use std::os::unix::fs::PermissionsExt;
    let failed = |why: std::io::Error| NotHere(format!("{}: {why}", path.display()));
    std::fs::write(path, text).map_err(failed)?;
    std::fs::set_permissions(path, PermissionsExt::from_mode(0o755)).map_err(failed)?;
    Ok(path.to_owned())
}
