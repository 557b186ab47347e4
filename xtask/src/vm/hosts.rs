//! Two hosts: one guest each, with the kernel's driver, in which the commands of README's "Two
//! hosts in two commands" run verbatim; or with a NIC that a switch owns.

use std::path::Path;
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use super::NotHere;
use super::guest::{self, Guest, GuestOutput, Model, Nic};
use super::wire::Wire;
use crate::target_dir;

/// Output of a listening side before the command for the other side.
const HINT: &str = "on the other side";
/// Timeout until both listening sides have printed their commands: a boot in emulation.
const BOOT: Duration = Duration::from_secs(100);

/// Two listeners, for one connection each: on the interface as root, and on its address as an
/// ordinary user.
const LISTENS: &str = "ip link set eth0 up && ip addr add 10.0.0.1/24 dev eth0 || exit 1\n\
                       barewire pingpong --port afpacket:eth0 --listen --once &\n\
                       by_root=$!\n\
                       su user -s /bin/sh -c 'exec barewire pingpong --port udp:10.0.0.1 \
                       --listen --once' || exit 1\n\
                       wait $by_root\n";

/// Options of the measurement, with every byte compared.
const MEASURED: &str = "--verify --size 8,1400,64k --iterations 50";

/// Runs two guests joined by a loss-free cable. Returns the result of the listening one, and of the
/// other if it had a command to run.
///
/// # Errors
/// [`NotHere`].
pub(crate) fn two_hosts(barewire: &Path) -> Result<Vec<GuestOutput>, NotHere> {
    let mut host = Guest::with_pair("host", Model::Virtio.device()).program(barewire);
    host.bind = false;
    host.modules = vec!["virtio_pci", "virtio_net", "af_packet"];
    on_two_guests(&host, LISTENS.to_owned(), (HINT, 2), |hints| {
        let commands: Vec<String> = hints.iter().filter_map(|hint| command_in(hint)).collect();
        script(&commands)
    })
}

/// Processes per host that share its NIC.
const PER_HOST: usize = 3;

/// Output of a listening side before its host and service.
const NAME_HINT: &str = "or by its host and service: ";

/// Host names and addresses. The address is on no interface: the only NIC belongs to the switch.
/// There is no resolver, so names are resolved over the NIC as well.
const NAMED: &str = "hostname host-$OWN\n\
                     ip addr add 10.0.0.$OWN/32 dev lo || exit 1\n\
                     ip addr add fd00::$OWN/128 dev lo || exit 1\n";

/// Names of the first host for the other host's processes, one each.
const HOSTS: [&str; PER_HOST] = ["10.0.0.1", "[fd00::1]", "host-1"];

/// Runs two guests with one NIC each, owned by a `barewire switch`: [`PER_HOST`] processes of one
/// guest listen, and as many of the other find them by [`HOSTS`] and talk to them at the same time.
/// Returns the results, as [`two_hosts`].
///
/// # Errors
/// [`NotHere`].
pub(crate) fn behind_switches(barewire: &Path, nic: Model) -> Result<Vec<GuestOutput>, NotHere> {
    let host = Guest::with_pair(&format!("behind-{nic:?}"), nic.device()).program(barewire);
    let listens = "barewire pingpong --port vfio:$NIC0,switch=yes --listen --once".to_owned();
    let first = behind_switch(1, &vec![listens; PER_HOST]);
    on_two_guests(&host, first, (NAME_HINT, PER_HOST), |names| behind_switch(2, &by_name(names)))
}

/// Commands of the other host: one for each of the first host's processes, with its service. Name
/// resolution has a timeout of 300 ms, which a loaded host may exceed, so the command is repeated.
/// The listener ends with the first client that reaches it, whatever the result.
fn by_name(names: &[String]) -> Vec<String> {
    let services = names.iter().filter_map(|name| Some(name.rsplit_once(':')?.1));
    let talks = HOSTS.iter().zip(services).map(|(host, service)| {
        // The guest's only card.
        let port = "'vfio:*,switch=yes'";
        let talk = format!("barewire pingpong --port {port} '{host}:{service}' {SHORTER}");
        format!("(for try in 1 2 3 4 5 6 7 8; do {talk} && exit; done; exit 1)")
    });
    talks.collect()
}

/// [`MEASURED`] with fewer messages, for more polling processes than processors: each message takes
/// some milliseconds then, and the command warms up with a thousand.
const SHORTER: &str = "--verify --size 2000 --iterations 10";

/// Commands that run in parallel behind a switch of host `own`; all must succeed.
fn behind_switch(own: u16, commands: &[String]) -> String {
    let mut script = format!("OWN={own}\n{NAMED}");
    script += "unset BAREWIRE_NEAR\n\
                      barewire switch --port vfio:$NIC0 2>/tmp/switch &\n\
                      switch=$!\n\
                      until grep -q 'a switch on' /tmp/switch; do\n\
                      kill -0 $switch || { cat /tmp/switch; exit 1; }\nsleep 1\ndone\n\
                      pids=\n";
    for command in commands {
        script.push_str(&format!("{command} &\npids=\"$pids $!\"\n"));
    }
    script
        + "failed=0\nfor pid in $pids; do wait $pid || failed=1; done\n\
              kill $switch\nwait $switch || failed=1\nexit $failed\n"
}

/// Runs `listens` in one guest like `host`, and in another the script that `talks` makes of the
/// `count` lines that the first prints after `hint`. A loss-free cable joins the guests.
fn on_two_guests(
    host: &Guest,
    listens: String,
    (hint, count): (&str, usize),
    talks: impl FnOnce(&[String]) -> String,
) -> Result<Vec<GuestOutput>, NotHere> {
    let dir = format!("hosts-{}-{}", std::process::id(), host.name);
    let dir = target_dir().join("vm").join(dir);
    let wire = Wire::open(&dir, 0, 1).map_err(|why| NotHere(format!("{dir:?}: {why}")))?;
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
                if let Some(rest) = line.strip_prefix(hint) {
                    // The waiting guest may have timed out.
                    let _ = told.send(rest.to_owned());
                }
            })
        });
        let mut lines = Vec::new();
        while lines.len() < count {
            match hints.recv_timeout(BOOT) {
                Ok(line) => lines.push(line),
                Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => break,
            }
        }
        let mut ends = Vec::new();
        if lines.len() == count {
            let second = host("b", 2, talks(&lines));
            ends.push(guest::run(&second, &mut |_| {})?);
        }
        ends.insert(0, first.join().map_err(|_| NotHere("it panicked".into()))??);
        Ok(ends)
    })
}

/// The command in the text behind [`HINT`].
fn command_in(hint: &str) -> Option<String> {
    Some(hint.split_once(": ")?.1.to_owned())
}

/// The script of the other host: the printed commands; the one for UDP uses the host's own address
/// and runs as an ordinary user.
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

    #[test]
    fn each_process_is_found_in_another_way() {
        let names = ["10.0.0.1:52001", "10.0.0.1:52000", "10.0.0.1:52002"].map(str::to_owned);
        let commands = by_name(&names);
        let targets = ["'10.0.0.1:52001'", "'[fd00::1]:52000'", "'host-1:52002'"];
        assert_eq!(commands.len(), targets.len());
        assert!(commands.iter().zip(targets).all(|(command, target)| command.contains(target)));
    }
}
