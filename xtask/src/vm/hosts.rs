//! Two hosts: a guest each, with the kernel's own driver, in which the commands of README's "Two
//! hosts in two commands" are run as they stand there.

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
    let dir = target_dir().join("vm").join(format!("hosts-{}", std::process::id()));
    let wire = Wire::lay(&dir, 0, 1).map_err(|why| NotHere(format!("{dir:?}: {why}")))?;
    let device = Model::Virtio.device();
    let host = |end: &'static str, station: u16, command: String| {
        let mut guest = Guest::with_pair(&format!("host-{end}"), device).program(barewire);
        guest.nics = vec![Nic { cable: wire.end(end), ..Nic::on_hub(device, station) }];
        guest.bind = false;
        guest.modules = vec!["virtio_pci", "virtio_net", "af_packet"];
        guest.memory_mib = 512;
        guest.limit = Duration::from_secs(240);
        guest.command = command;
        guest
    };
    let listens = host("a", 1, LISTENS.to_owned());
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
        while commands.len() < 2 {
            match hints.recv_timeout(BOOT) {
                Ok(hint) => commands.extend(command_in(&hint)),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        let mut ends = Vec::new();
        if commands.len() == 2 {
            let second = host("b", 2, script(&commands));
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
