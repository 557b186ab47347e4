//! `barewire switch`: owns a NIC and forwards between it and the processes of a node.

use std::process::ExitCode;
use std::time::{Duration, Instant};

use barewire::stats::switch::SwitchPublisher;
use barewire_driver::backend::switch::{StationCounters, Switch};
use barewire_driver::open;
use nix::sys::signalfd::SignalFd;
use serde_json::{Value, json};

use crate::capture::signals;
use crate::fail::Fail;
use crate::out;
use crate::perf::stay_on;
use crate::table::{Align, bytes, layout};

/// Owns a NIC and forwards between it and the processes of this user, until Ctrl-C
///
/// For NICs that belong to one process: vfio, dpdk, a memif, and interfaces whose frames each
/// process would have to filter. Processes open the same port as without a switch and go through it
/// when it runs; they need no privilege. Those of one node reach each other by shared memory, past
/// the switch. It may be ended and started again, or killed, while they run: frames are lost and
/// sent again.
///
/// On a processor of its own (--cpu) it polls without end. Without, it sleeps while nothing comes.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  ended by a signal; with --check: it could start
  1  the NIC cannot be taken, or has gone; with --check also: a switch runs already
  2  called wrongly

Examples:
  barewire switch --port vfio:0000:05:00.0 --cpu 1     on its own processor
  barewire switch --port afpacket:eth0 --every 10      prints what it forwarded every 10 s
  barewire switch --port dpdk:0000:05:00.0 --check     what it would do, or that one runs
  barewire stats                                       what a switch that runs has forwarded
  barewire pingpong --listen --port vfio:0000:05:00.0  a process behind it

Options of a port that matter to processes behind a switch:
  switch=no   take the device itself           switch=yes  do not start without a switch
  near=no     reach processes of this node through the switch as well

Environment:
  BAREWIRE_STATS  0: it publishes nothing for `barewire stats`")]
pub(crate) struct SwitchArgs {
    /// The device: vfio:, dpdk:, afpacket: or memif:, with its options.
    #[arg(long, env = "BAREWIRE_PORT", hide_env = true)]
    port: String,
    /// Stays on this processor and polls without end.
    #[arg(long, value_name = "N")]
    cpu: Option<usize>,
    /// Says what it would do and why it could not, and changes nothing.
    #[arg(long)]
    check: bool,
    /// Prints what was forwarded every so many seconds, 1 to 3600.
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    every: Option<u64>,
    /// Prints one JSON object a line.
    #[arg(long)]
    json: bool,
}

/// Turns without a frame after which a switch without a processor of its own sleeps.
const SPINS: u32 = 2000;
/// Longest sleep: so often a signal is looked for.
const NAP: Duration = Duration::from_millis(100);
/// Turns between two looks at signals and the time, on a busy switch.
const LOOK_EVERY: u32 = 4096;

/// Forwards until a signal.
///
/// # Errors
/// The NIC cannot be taken, or has gone.
pub(crate) fn run(args: &SwitchArgs) -> Result<ExitCode, Fail> {
    if args.check {
        let segment = open::check_switch(&args.port).map_err(Fail::new)?;
        let text = format!(
            "would own {port}; processes of this user that open {port} would go through {segment}",
            port = args.port
        );
        match args.json {
            true => out::json(&json!({"port": args.port, "segment": segment}))?,
            false => out::print(format_args!("{text}\n"))?,
        }
        return Ok(ExitCode::SUCCESS);
    }
    let signals = signals()?;
    if let Some(cpu) = args.cpu {
        stay_on(cpu)?;
    }
    let mut switch = open::open_switch(&args.port).map_err(Fail::new)?;
    eprintln!(
        "a switch on {}, mtu {}; processes of this user open --port {}; Ctrl-C ends it",
        switch.nic().name,
        switch.nic().mtu,
        args.port
    );
    let ended = forward(&mut switch, args, &signals);
    report(&switch, args.json)?;
    ended.map(|()| ExitCode::SUCCESS)
}

/// Turns the switch until a signal comes.
fn forward(switch: &mut Switch, args: &SwitchArgs, signals: &SignalFd) -> Result<(), Fail> {
    let every = args.every.map(Duration::from_secs);
    let mut told = Instant::now();
    let mut stats = publishes()?.then(|| SwitchPublisher::create(switch)).flatten();
    let (mut idle, mut turns) = (0_u32, 0_u32);
    loop {
        let moved = switch.turn().map_err(Fail::new)?;
        idle = if moved > 0 { 0 } else { idle.saturating_add(1) };
        turns = turns.wrapping_add(1);
        let sleeps = idle >= SPINS && args.cpu.is_none();
        if sleeps {
            // Until a frame comes there is one turn between two sleeps.
            idle = SPINS;
            switch.sleep(NAP);
        } else if idle > 0 {
            std::hint::spin_loop();
        }
        if turns % LOOK_EVERY != 0 && !sleeps {
            continue;
        }
        if let Some(stats) = &mut stats {
            stats.publish_if_due(switch, Instant::now());
        }
        if signals.read_signal().map_err(Fail::new)?.is_some() {
            return Ok(());
        }
        if every.is_some_and(|every| told.elapsed() >= every) {
            told = Instant::now();
            report(switch, args.json)?;
        }
    }
}

/// Whether statistics are wanted, as for every other program.
fn publishes() -> Result<bool, Fail> {
    Ok(barewire::Settings::from_env().map_err(Fail::usage)?.stats)
}

/// Prints what was forwarded since the start.
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
            let mac = s.mac.to_string();
            let full = s.frames.full;
            json!({"mac": mac, "pid": s.pid, "sent": s.sent, "received": s.received, "full": full})
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
        ("sent", Align::Right),
        ("received", Align::Right),
        ("full", Align::Right),
    ];
    let row = |s: StationCounters| {
        let (sent, received) = (bytes(s.sent), bytes(s.received));
        vec![s.mac.to_string(), s.pid.to_string(), sent, received, s.frames.full.to_string()]
    };
    let rows: Vec<Vec<String>> = switch.stations().into_iter().map(row).collect();
    out::print(format_args!("{}: {line}\n", switch.nic().name))?;
    match rows.is_empty() {
        true => Ok(()),
        false => out::print(layout(&head, &rows)),
    }
}
