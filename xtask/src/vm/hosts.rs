//! Two hosts: a guest each, with the kernel's own driver, in which the commands of README's "Two
//! hosts in two commands" are run as they stand there; or with a NIC that a switch owns.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use super::NotHere;
use super::guest::{self, Ended, Guest, Model, Nic};
use super::wire::Wire;
use crate::target_dir;

/// What the side that listens prints before the command for the other one.
const HINT: &str = "on the other side";
/// Until both sides that listen have said what to run: a boot in emulation.
const BOOT: Duration = Duration::from_secs(100);

/// Both ends listen, each once: one on the interface, as root; one on an address of it, as anybody.
const LISTENS: &str = "ip link set eth0 up && ip addr add 10.0.0.1/24 dev eth0 || exit 1\n\
                       barewire pingpong --port afpacket:eth0 --listen --once &\n\
                       by_root=$!\n\
                       su user -s /bin/sh -c 'exec barewire pingpong --port udp:10.0.0.1 \
                       --listen --once' || exit 1\n\
                       wait $by_root\n";

/// What is measured, with every byte compared.
const MEASURED: &str = "--verify --size 8,1400,64k --iterations 50";

/// Two guests joined by a good cable. Says how they ended: the one that listens, and the other if
/// there was anything for it to do.
///
/// # Errors
/// [`NotHere`].
pub(crate) fn two_hosts(barewire: &Path) -> Result<Vec<Ended>, NotHere> {
    let mut host = Guest::with_pair("host", Model::Virtio.device()).program(barewire);
    host.bind = false;
    host.modules = vec!["virtio_pci", "virtio_net", "af_packet"];
    joined(&host, LISTENS.to_owned(), 2, script)
}

/// Processes of each of two hosts that share its NIC.
const PER_HOST: usize = 3;

/// Two guests with one NIC each, which a `barewire switch` owns: [`PER_HOST`] processes of one
/// listen, as many of the other talk to them at the same time. Says how they ended, as
/// [`two_hosts`].
///
/// # Errors
/// [`NotHere`].
pub(crate) fn behind_switches(barewire: &Path, nic: Model) -> Result<Vec<Ended>, NotHere> {
    let host = Guest::with_pair(&format!("behind-{nic:?}"), nic.device()).program(barewire);
    let listens = "barewire pingpong --port vfio:$NIC0,switch=yes --listen --once".to_owned();
    let first = together(&vec![listens; PER_HOST]);
    joined(&host, first, PER_HOST, |commands| {
        let measured = |command: &String| format!("{command} {SHORTER}");
        together(&commands.iter().map(measured).collect::<Vec<_>>())
    })
}

/// As [`MEASURED`], with less of it where more processes than processors poll: each message takes
/// some milliseconds then, and the command warms up with a thousand.
const SHORTER: &str = "--verify --size 2000 --iterations 10";

/// Commands that run beside each other behind a switch; all have to succeed.
fn together(commands: &[String]) -> String {
    let mut script = "unset BAREWIRE_NEAR\n\
                      barewire switch --port vfio:$NIC0 2>/tmp/switch &\n\
                      switch=$!\n\
                      until grep -q 'a switch on' /tmp/switch; do\n\
                      kill -0 $switch || { cat /tmp/switch; exit 1; }\nsleep 1\ndone\n\
                      pids=\n"
        .to_owned();
    for command in commands {
        script.push_str(&format!("{command} &\npids=\"$pids $!\"\n"));
    }
    script
        + "failed=0\nfor pid in $pids; do wait $pid || failed=1; done\n\
              kill $switch\nwait $switch || failed=1\nexit $failed\n"
}

/// Runs `listens` in one guest like `host`, and in another what `talks` makes of the `count`
/// commands that the first has printed. A good cable joins them.
fn joined(
    host: &Guest,
    listens: String,
    count: usize,
    talks: impl FnOnce(&[String]) -> String,
) -> Result<Vec<Ended>, NotHere> {
    let dir = format!("hosts-{}-{}", std::process::id(), host.name);
    let dir = target_dir().join("vm").join(dir);
    let wire = Wire::lay(&dir, 0, 1).map_err(|why| NotHere(format!("{dir:?}: {why}")))?;
    let host = |end: &'static str, station: u16, command: String| {
        let mut guest = host.clone();
        guest.name = format!("{}-{end}", guest.name);
        guest.nics = vec![Nic { cable: wire.end(end), station, ..guest.nics[0].clone() }];
        guest.memory_mib = 512;
        guest.limit = Duration::from_secs(240);
        guest.command = command;
        guest
    };
    let listens = host("a", 1, listens);
    std::thread::scope(|scope| {
        let (told, hints) = channel();
        let first = scope.spawn(move || {
            guest::run(&listens, &mut |line| {
                if let Some(hint) = line.strip_prefix(HINT) {
                    // Whoever waited for it may have given up.
                    let _ = told.send(hint.to_owned());
                }
            })
        });
        let mut commands = Vec::new();
        while commands.len() < count {
            match hints.recv_timeout(BOOT) {
                Ok(hint) => commands.extend(command_in(&hint)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        let mut ends = Vec::new();
        if commands.len() == count {
            let second = host("b", 2, talks(&commands));
            ends.push(guest::run(&second, &mut |_| {})?);
        }
        ends.insert(0, first.join().map_err(|_| NotHere("it panicked".into()))??);
        Ok(ends)
    })
}

/// The command in what follows [`HINT`].
fn command_in(hint: &str) -> Option<String> {
    Some(hint.split_once(": ")?.1.to_owned())
}

/// What the other host runs: the commands that it was told, that on UDP from its own address and as
/// an ordinary user.
fn script(commands: &[String]) -> String {
    let mut script =
        "ip link set eth0 up && ip addr add 10.0.0.2/24 dev eth0 || exit 1\n".to_owned();
    for command in commands {
        let own = command.replace("udp:10.0.0.1", "udp:10.0.0.2");
        let line = match own == *command {
            true => format!("{command} {MEASURED} || exit 1\n"),
            false => format!("su user -s /bin/sh -c \"{own} {MEASURED}\" || exit 1\n"),
        };
        script.push_str(&line);
    }
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_other_host_is_told_what_to_run() {
        let hints = [
            ": barewire pingpong --port 'afpacket:eth0' barewire://a/0",
            ", x: y 'udp:10.0.0.1' z",
        ];
        let commands: Vec<String> = hints.into_iter().filter_map(command_in).collect();
        let script = script(&commands);
        assert!(
            script.contains("\nbarewire pingpong --port 'afpacket:eth0' barewire://a/0 --verify")
        );
        assert!(script.contains("-c \"y 'udp:10.0.0.2' z --verify"));
    }
}
