//! `barewire switch`: owns a NIC and forwards between it and the processes of a node.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use barewire::stats::switch::SwitchPublisher;
use barewire_driver::backend::switch::{ServedUsers, StationCounters, Switch};
use barewire_driver::error::OpenError;
use barewire_driver::open::{self, SwitchAccess};
use barewire_driver::port::PortCaps;
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signalfd::SignalFd;
use nix::unistd::{Group, User};
use serde_json::{Value, json};

use crate::capture::signals;
use crate::fail::Fail;
use crate::perf::stay_on;
use crate::service::Service;
use crate::table::{Align, bytes, layout};
use crate::{exporter, out};

/// Owns a NIC and forwards between it and the processes of a node, until Ctrl-C
///
/// For NICs that belong to one process (vfio, dpdk, xdp, a memif), and for many processes on one
/// interface, each of which would otherwise filter all its frames. Processes open the same port as
/// without a switch and go through it while it runs; they need no privileges. Processes of one user
/// on a node reach each other through shared memory, not through the switch. It can be restarted or
/// killed while they run: lost frames are retransmitted.
///
/// Root's switch serves the processes of all users; that of another user serves that user alone.
/// With --user or --group it serves these users, its own and root. Users cannot read each other's
/// frames, and a process can only send from its own address. Processes of other users ask at a
/// socket in /run/barewire; a container needs that directory as a volume.
///
/// With --cpu it polls continuously on that processor; otherwise it sleeps while nothing arrives.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  ended by a signal; with --check: it could start
  1  the NIC cannot be opened, or is gone; with --check also: a switch runs already
  2  wrong arguments

Examples:
  barewire switch --port vfio:0000:05:00.0 --cpu 1     on a processor of its own
  barewire switch --port afpacket:eth0 --every 10      prints its counters every 10 s
  barewire switch --port vfio:0000:05:00.0 --group hpc for members of a group
  barewire switch --port dpdk:0000:05:00.0 --check     what it would do, or that one runs
  barewire switch --port vfio:0000:05:00.0 --metrics   also serves its counters to Prometheus
  barewire stats                                       the counters of running switches
  barewire pingpong --listen --port vfio:0000:05:00.0  a process behind it

Options of the port of a process, after a comma:
  switch=yes  an error if no switch runs       switch=no   opens the device itself
  near=no     reaches processes of this node through the switch as well

Environment:
  BAREWIRE_PORT   the port if --port is not given
  BAREWIRE_STATS  0: it publishes nothing for `barewire stats`")]
pub(crate) struct SwitchArgs {
    /// The device: vfio:, dpdk:, xdp:, afpacket: or memif:, with its options.
    #[arg(long, env = "BAREWIRE_PORT", hide_env = true)]
    port: String,
    /// Processor to pin it to; it then polls continuously.
    #[arg(long, value_name = "N")]
    cpu: Option<usize>,
    /// Serves processes of this user; can be repeated.
    #[arg(long, value_name = "NAME", conflicts_with = "group")]
    user: Vec<String>,
    /// Serves processes of members of this group.
    #[arg(long, value_name = "NAME")]
    group: Option<String>,
    /// Forwards no frames from one user to another, only to and from the NIC.
    #[arg(long)]
    apart: bool,
    /// Processes of each user that it serves at most, 1 to 255.
    #[arg(
        long, value_name = "N", default_value_t = 255,
        value_parser = clap::value_parser!(u8).range(1..)
    )]
    per_user: u8,
    /// Prints what it would do, or why it could not start; changes nothing.
    #[arg(long)]
    check: bool,
    /// Prints its counters at this interval, 1 to 3600 seconds.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    every: Option<u64>,
    /// Serves its counters to Prometheus over HTTP; default address: 127.0.0.1:9830.
    #[arg(
        long, value_name = "ADDRESS:PORT", num_args = 0..=1, require_equals = true,
        default_missing_value = "127.0.0.1:9830", value_parser = exporter::place
    )]
    metrics: Option<SocketAddr>,
    /// Prints one JSON object per line.
    #[arg(long)]
    json: bool,
}

/// Turns without a frame after which a switch that is not pinned sleeps.
const SPINS: u32 = 2000;
/// Longest sleep, after which signals are checked.
const NAP: Duration = Duration::from_millis(100);
/// Turns and frames between two checks of signals and the time: milliseconds, on a busy switch.
const LOOK_EVERY: usize = 4096;

/// Forwards until a signal.
///
/// # Errors
/// The NIC cannot be opened, or is lost.
pub(crate) fn run(args: &SwitchArgs) -> Result<ExitCode, Fail> {
    let serving = serving(args)?;
    // An interface that a pattern fits may come.
    let port = open::choose(&args.port).map_err(Fail::new)?;
    if args.check {
        let segment = open::check_switch(&port).map_err(refused)?;
        let text = format!(
            "would own {port} and serve {whom}: processes that open {port} would go through \
             {segment}",
            whom = whom(&serving)
        );
        match args.json {
            true => out::json(&json!({"port": port, "segment": segment}))?,
            false => out::print(format_args!("{text}\n"))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let signals = signals()?;
    // Before the thread is pinned: the processor is for the switch alone.
    if let Some(at) = args.metrics {
        if !publishes()? {
            let fail = Fail::usage("--metrics tells what the switch publishes, which is nothing");
            return Err(fail.mend("unset BAREWIRE_STATS"));
        }
        eprintln!("its counters are at {}", exporter::offer(at, "--metrics=ADDRESS:PORT")?);
    }
    if let Some(cpu) = args.cpu {
        stay_on(cpu)?;
    }
    let limit = raise_open_files();
    let mut service = Service::from_env();
    let mut switch = open::open_switch(&port, &serving).map_err(refused)?;
    eprintln!(
        "a switch on {}, mtu {}, for {}; processes open --port {}; Ctrl-C ends it",
        switch.nic().name,
        switch.nic().mtu,
        whom(&serving),
        args.port
    );
    if let Some(limit) = limit.filter(|_| serving.served_users() != ServedUsers::None) {
        tell_room(limit);
    }
    service.ready(&status(&switch));
    let ended = forward(&mut switch, args, &signals, &mut service);
    service.stopping();
    let reported = report(&switch, args.json);
    // The reason of the end is reported even if standard output is closed.
    ended.and(reported).map(|()| ExitCode::SUCCESS)
}

/// Why the port does not open. A malformed name is a usage error: no service restarts for it.
fn refused(why: OpenError) -> Fail {
    match why {
        OpenError::BadSpec { .. } => Fail::usage(why),
        _ => Fail::new(why),
    }
}

/// A line with the port and the number of processes.
fn status(switch: &Switch) -> String {
    let (PortCaps { name, mtu, .. }, stations) = (switch.nic(), switch.stations().len());
    format!("{name}, mtu {mtu}, {stations} processes")
}

/// Raises the soft limit on open files to the hard limit, and returns it.
fn raise_open_files() -> Option<u64> {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    let raised = setrlimit(Resource::RLIMIT_NOFILE, hard, hard).is_ok();
    Some(if raised { hard } else { soft })
}

/// Room for processes of other users below which a line is printed.
const MANY: u64 = 1024;
/// Descriptors per user besides those of the user's processes, including short-lived ones.
const BESIDES: u64 = 16;

/// Prints for how many processes of other users the limit on open files leaves room, if they are
/// few: each takes one descriptor.
fn tell_room(limit: u64) {
    let open = std::fs::read_dir("/proc/self/fd").map_or(0, |all| all.count() as u64);
    let room = limit.saturating_sub(open + BESIDES);
    if room < MANY {
        let pid = std::process::id();
        eprintln!(
            "barewire: room for some {room} processes of other users, by the limit of {limit} \
             open files; more: sudo prlimit --pid {pid} --nofile=65536, or LimitNOFILE=65536 of \
             the service"
        );
    }
}

/// The users that the switch serves.
fn serving(args: &SwitchArgs) -> Result<SwitchAccess, Fail> {
    let users: Result<Vec<u32>, Fail> = args.user.iter().map(|name| user(name)).collect();
    let served_users = match (&args.group, users?) {
        (Some(name), _) => Some(ServedUsers::Group(group(name)?)),
        (None, users) if users.is_empty() => None,
        (None, users) => Some(ServedUsers::Users(users)),
    };
    Ok(SwitchAccess { served_users, apart: args.apart, per_user: Some(args.per_user.into()) })
}

/// The number of a user, given by name or number.
fn user(name: &str) -> Result<u32, Fail> {
    let found = User::from_name(name).map_err(Fail::new)?.map(|user| user.uid.as_raw());
    let found = found.or_else(|| name.parse().ok());
    found.ok_or_else(|| Fail::usage(format!("no user \"{name}\" here; see: getent passwd")))
}

/// The number of a group, given by name or number.
fn group(name: &str) -> Result<u32, Fail> {
    let found = Group::from_name(name).map_err(Fail::new)?.map(|group| group.gid.as_raw());
    let found = found.or_else(|| name.parse().ok());
    found.ok_or_else(|| Fail::usage(format!("no group \"{name}\" here; see: getent group")))
}

/// The same in words.
fn whom(serving: &SwitchAccess) -> String {
    match serving.served_users() {
        ServedUsers::None => "this user".to_owned(),
        ServedUsers::All => "every user".to_owned(),
        ServedUsers::Users(users) => {
            let users: Vec<String> = users.iter().map(u32::to_string).collect();
            format!("this user, root and {}", users.join(", "))
        }
        ServedUsers::Group(gid) => format!("this user, root and group {gid}"),
    }
}

/// Turns the switch until a signal arrives.
fn forward(
    switch: &mut Switch,
    args: &SwitchArgs,
    signals: &SignalFd,
    service: &mut Service,
) -> Result<(), Fail> {
    let every = args.every.map(Duration::from_secs);
    let mut told = Instant::now();
    let mut stats = publishes()?.then(|| SwitchPublisher::create(switch)).flatten();
    let (mut idle, mut since_look) = (0_u32, 0);
    loop {
        let moved = switch.turn().map_err(Fail::new)?;
        idle = if moved > 0 { 0 } else { idle.saturating_add(1) };
        since_look += 1 + moved;
        let sleeps = idle >= SPINS && args.cpu.is_none();
        if sleeps {
            // While idle there is one turn between two sleeps.
            idle = SPINS;
            switch.sleep(NAP);
        } else if idle > 0 {
            std::hint::spin_loop();
        }
        if since_look < LOOK_EVERY && !sleeps {
            continue;
        }
        since_look = 0;
        let now = Instant::now();
        if let Some(stats) = &mut stats {
            stats.publish_if_due(switch, now);
        }
        service.alive(now, || status(switch));
        if signals.read_signal().map_err(Fail::new)?.is_some() {
            return Ok(());
        }
        if every.is_some_and(|every| told.elapsed() >= every) {
            told = Instant::now();
            match report(switch, args.json) {
                // Forwarding goes on if a report cannot be written.
                Err(fail) if !fail.is_quiet() => eprintln!("barewire: {fail}; the switch goes on"),
                reported => reported?,
            }
        }
    }
}

/// Whether to publish statistics (`BAREWIRE_STATS`).
fn publishes() -> Result<bool, Fail> {
    Ok(barewire::Settings::from_env().map_err(Fail::usage)?.stats)
}

/// Prints the counters since the start.
fn report(switch: &Switch, as_json: bool) -> Result<(), Fail> {
    let (counters, nic) = (switch.counters(), switch.nic_counters());
    let rows = [
        ("to_nic", counters.to_nic),
        ("from_nic", counters.from_nic),
        ("between", counters.between),
        ("spoofed", counters.spoofed),
        ("malformed", counters.malformed),
        ("unknown", counters.unknown),
        ("full", counters.full),
        ("nic_full", nic.tx_full),
        ("nic_dropped", nic.rx_dropped + nic.tx_dropped),
    ];
    if as_json {
        let frames: serde_json::Map<String, Value> =
            rows.into_iter().map(|(name, count)| (name.to_owned(), count.into())).collect();
        let station = |s: &StationCounters| {
            let station = s.station.to_string();
            let (full, relayed) = (s.frames.full, s.is_relayed);
            json!({
                "mac": station, "pid": s.pid, "uid": s.uid, "relayed": relayed,
                "sent": s.sent, "received": s.received, "full": full,
            })
        };
        let stations: Vec<Value> = switch.stations().iter().map(station).collect();
        return out::json(&json!({
            "port": switch.nic().name, "frames": frames, "stations": stations,
        }));
    }
    let shown = rows.into_iter().filter(|&(_, count)| count > 0);
    let line: Vec<String> = shown.map(|(name, count)| format!("{name} {count}")).collect();
    let line = if line.is_empty() { "nothing yet".to_owned() } else { line.join(", ") };
    let head = [
        ("station", Align::Left),
        ("process", Align::Right),
        ("user", Align::Right),
        ("by", Align::Left),
        ("sent", Align::Right),
        ("received", Align::Right),
        ("full", Align::Right),
    ];
    let row = |s: StationCounters| {
        let (sent, received) = (bytes(s.sent), bytes(s.received));
        let (pid, uid, full) = (s.pid.to_string(), s.uid.to_string(), s.frames.full.to_string());
        let by = if s.is_relayed { "socket" } else { "memory" }.to_owned();
        vec![s.station.to_string(), pid, uid, by, sent, received, full]
    };
    let rows: Vec<Vec<String>> = switch.stations().into_iter().map(row).collect();
    out::print(format_args!("{}: {line}\n", switch.nic().name))?;
    match rows.is_empty() {
        true => Ok(()),
        false => out::print(layout(&head, &rows)),
    }
}
