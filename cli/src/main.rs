//! The command `barewire`: what this machine is able to do, why not, and what goes over the wire.
//!
//! Every command prints for people or, with `--json`, one object a line for programs. An error is
//! one line that says what is wrong and, where one does, the command that mends it. Exit codes: 0
//! done, 1 failed, 2 wrong arguments.

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tracing_subscriber::EnvFilter;

// Before the others, which use its macro.
#[macro_use]
mod out;

mod capture;
mod cert_args;
mod decrypt;
mod doctor;
mod exporter;
mod fail;
mod http;
mod info;
mod metrics;
mod perf;
mod ping;
mod recording;
#[cfg(test)]
mod sample;
mod service;
mod sources;
mod stats;
mod switch;
mod table;
mod top;
mod trips;

use fail::Fail;

/// Shows, checks and measures barewire's fabric over plain Ethernet.
#[derive(Parser)]
#[command(name = "barewire", version, max_term_width = 100, after_long_help = AFTER)]
struct Args {
    #[command(subcommand)]
    command: Command,
}

const AFTER: &str = "\
Exit codes:
  0  success
  1  failure; one line on standard error says why
  2  wrong arguments
  3 and above: see `barewire ping --help`

Environment:
  BAREWIRE_PORT  the port if --port is not given, such as shm:job7 (default: this user's segment)
  BAREWIRE_LOG   what to log to standard error, `debug` or `barewire=trace` (default: warn)";

#[derive(Subcommand)]
enum Command {
    Info(info::InfoArgs),
    Doctor(doctor::DoctorArgs),
    #[command(name = "pingpong")]
    PingPong(perf::PingPongArgs),
    Bench(perf::BenchArgs),
    Ping(ping::PingArgs),
    Stats(stats::StatsArgs),
    Top(top::TopArgs),
    Capture(capture::CaptureArgs),
    Switch(switch::SwitchArgs),
    Exporter(exporter::ExporterArgs),
}

fn main() -> ExitCode {
    let args = Args::parse();
    if let Err(fail) = start_log() {
        eprintln!("barewire: {fail}");
        return fail.exit_code();
    }
    let done = match args.command {
        Command::Info(args) => info::run(&args),
        Command::Ping(args) => ping::run(&args),
        Command::Stats(args) => stats::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Capture(args) => capture::run(&args),
        Command::Switch(args) => switch::run(&args),
        Command::Exporter(args) => exporter::run(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::PingPong(args) => perf::pingpong(&args),
        Command::Bench(args) => perf::bench(&args),
    };
    done.unwrap_or_else(|fail: Fail| {
        if !fail.is_quiet() {
            eprintln!("barewire: {fail}");
        }
        fail.exit_code()
    })
}

/// The port where `--port` names none. An empty variable counts as not set.
fn usual_port() -> String {
    let set = std::env::var_os("BAREWIRE_PORT").map(|port| port.to_string_lossy().into_owned());
    set.filter(|port| !port.trim().is_empty()).unwrap_or_else(|| "shm".to_owned())
}

/// Sends log lines to standard error, so that what is printed stays readable for programs.
///
/// # Errors
/// `BAREWIRE_LOG` is no filter.
fn start_log() -> Result<(), Fail> {
    let wanted = std::env::var_os("BAREWIRE_LOG").unwrap_or_else(|| "warn".into());
    let filter = wanted.to_str().and_then(|text| EnvFilter::try_new(text).ok());
    let filter = filter.ok_or_else(|| {
        let what = format!("BAREWIRE_LOG: {} is not a log filter", wanted.display());
        Fail::usage(what).mend("use debug or barewire=trace")
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        // It would say by `std`'s `eprintln` that standard error cannot be written.
        .log_internal_errors(false)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}
