//! `barewire exporter`: statistics for Prometheus, over HTTP.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use hyper::StatusCode;
use serde_json::json;

use crate::capture::signals;
use crate::fail::Fail;
use crate::http::{Answer, Http};
use crate::service::Service;
use crate::{metrics, out, stats};

/// Exports the counters of this node's processes to Prometheus, until Ctrl-C
///
/// Each scrape reads the counters that every domain and switch publishes, at no cost to these
/// processes: those of all users as root, else those of its own user. It listens on the loopback
/// address, which other hosts cannot reach, unless --listen names another one. Whoever can connect
/// reads process ids, peer addresses and traffic counters.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  ended by a signal
  1  the address cannot be bound

Examples:
  barewire exporter                           http://127.0.0.1:9829/metrics
  barewire exporter --listen 10.0.0.1:9829    for a Prometheus on another host
  barewire exporter --no-sessions             fewer series: none per peer
  curl -s http://127.0.0.1:9829/metrics

Without an HTTP server, for the textfile collector of node_exporter, from a timer:
  barewire stats --prometheus > DIR/barewire.prom.new && mv DIR/barewire.prom.new DIR/barewire.prom

The names are those of `barewire stats`, with units; docs/observe.md lists them.")]
pub(crate) struct ExporterArgs {
    /// Address to listen on.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9829")]
    #[arg(value_parser = place)]
    listen: SocketAddr,
    /// Omits the counters of each session: about 20 series per peer.
    #[arg(long)]
    no_sessions: bool,
    /// Prints the address that it listens on as JSON.
    #[arg(long)]
    json: bool,
}

/// Period of checks for signals.
const LOOK: Duration = Duration::from_millis(200);

/// Serves requests until a signal.
///
/// # Errors
/// The address cannot be bound.
pub(crate) fn run(args: &ExporterArgs) -> Result<ExitCode, Fail> {
    // Before threads are started, so that none of them takes the signal.
    let signals = signals()?;
    let (mut http, url) = listen(args.listen, None, !args.no_sessions, "--listen")?;
    match args.json {
        true => out::json(&json!({"listening": url}))?,
        false => out::print(format_args!("{url}; Ctrl-C ends it\n"))?,
    }
    let mut service = Service::from_env();
    service.ready(&format!("at {url}"));
    while signals.read_signal().map_err(Fail::new)?.is_none() {
        http.serve(LOOK);
        service.alive(Instant::now(), || format!("at {url}"));
    }
    service.stopping();
    Ok(ExitCode::SUCCESS)
}

/// Parses the listen address of an option.
///
/// # Errors
/// The expected forms.
pub(crate) fn place(text: &str) -> Result<SocketAddr, &'static str> {
    text.parse().map_err(|_| "expected ADDRESS:PORT, such as 127.0.0.1:9829 or [::1]:9829")
}

/// Serves the statistics of this process, with those of each session, in a thread as long as the
/// process lives. Prints the address. `option` is named in errors.
///
/// # Errors
/// The address cannot be bound, or the thread not be started.
pub(crate) fn offer(at: SocketAddr, option: &str) -> Result<String, Fail> {
    let (mut http, url) = listen(at, Some(std::process::id()), true, option)?;
    let named = std::thread::Builder::new().name("barewire-metrics".to_owned());
    named
        .spawn(move || {
            loop {
                http.serve(Duration::from_secs(3600));
            }
        })
        .map_err(|why| Fail::new(why).mend("raise the limit on threads: ulimit -u"))?;
    Ok(url)
}

/// Listens for requests about one process, or about all, and returns the address.
fn listen(
    at: SocketAddr,
    pid: Option<u32>,
    sessions: bool,
    option: &str,
) -> Result<(Http<impl Fn(&str) -> Answer + use<>>, String), Fail> {
    let cannot = |why| {
        Fail::new(format!("{at}: {why}")).mend(format!("name another address or port by {option}"))
    };
    let http = Http::listen(at, move |path| answer(path, pid, sessions)).map_err(cannot)?;
    let at = http.address().map_err(cannot)?;
    if !at.ip().is_loopback() {
        eprintln!("barewire: whoever can connect to {at} can read the counters of this node");
    }
    Ok((http, format!("http://{at}/metrics")))
}

fn answer(path: &str, pid: Option<u32>, sessions: bool) -> Answer {
    match path {
        "/metrics" => match stats::published(pid).and_then(|all| metrics::page(&all, sessions)) {
            Ok(text) => Answer { status: StatusCode::OK, kind: metrics::CONTENT_TYPE, text },
            Err(fail) => Answer::plain(StatusCode::INTERNAL_SERVER_ERROR, format!("{fail}\n")),
        },
        "/" => {
            let text = "<a href=\"/metrics\">barewire metrics</a>\n".to_owned();
            Answer { status: StatusCode::OK, kind: "text/html", text }
        }
        _ => Answer::plain(StatusCode::NOT_FOUND, "GET /metrics\n"),
    }
}
