//! The command line of every benchmark.

use clap::Parser;

/// Options of every benchmark.
#[derive(Parser, Clone, Debug)]
#[command(about = "A bench of barewire; `cargo xtask bench` runs them all")]
pub struct Args {
    /// One JSON object a line and nothing else.
    #[arg(long)]
    pub json: bool,
    /// The smallest size that still runs everything. Measures nothing worth keeping.
    #[arg(long)]
    pub quick: bool,
    /// Runs only the cases whose name contains this.
    #[arg(long)]
    pub only: Option<String>,
    /// Runs one case for `--count` times in place of measuring it: what the counting tools watch.
    #[arg(long, hide = true)]
    pub steady: Option<String>,
    /// How often `--steady` repeats.
    #[arg(long, hide = true, default_value_t = 0)]
    pub count: u64,
}

impl Args {
    /// Parses the command line; exits if it is invalid.
    pub fn read() -> Self {
        Self::parse()
    }

    /// [`read`](Self::read) for a benchmark whose cases the counting tools run: if one case is
    /// requested alone, `run` runs it that many times, and the process exits.
    pub fn read_or_run(run: impl FnOnce(&str, u64) -> Result<(), String>) -> Self {
        let args = Self::read();
        if let Some(case) = &args.steady {
            if let Err(why) = run(case, args.count) {
                eprintln!("{case}: {why}");
                std::process::exit(1);
            }
            std::process::exit(0);
        }
        args
    }

    /// `full`, or `quick` with `--quick`.
    pub fn size(&self, full: u64, quick: u64) -> u64 {
        if self.quick { quick } else { full }
    }

    /// Whether a case was requested.
    pub fn wants(&self, case: &str) -> bool {
        self.only.as_deref().is_none_or(|part| case.contains(part))
    }
}
