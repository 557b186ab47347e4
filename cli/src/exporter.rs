//! `barewire exporter`: statistics for Prometheus, over HTTP.

use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tiny_http::{Header, Method, Request, Response, Server};

use crate::capture::signals;
use crate::fail::Fail;
use crate::{metrics, out, stats};

/// Offers the counters of this node's processes to Prometheus, until Ctrl-C
///
/// Reads what every domain and switch publishes whenever it is asked, and is no burden to them. As
/// root it sees those of all users, otherwise those of its own. It listens on the loopback address
/// alone, where no other host reaches it, unless --listen names another one: who reaches it reads
/// process ids, addresses of peers and what passes between them, as numbers.
#[derive(clap::Args)]
#[command(after_long_help = "\
Exit codes:
  0  ended by a signal
  1  the address cannot be had

Examples:
  barewire exporter                           http://127.0.0.1:9829/metrics
  barewire exporter --listen 10.0.0.1:9829    for a Prometheus on another host
  barewire exporter --no-sessions             few series: none for each peer of each process
  curl -s http://127.0.0.1:9829/metrics

Without a server of its own, for the textfile collector of node_exporter, from a timer:
  barewire stats --prometheus > DIR/barewire.prom.new && mv DIR/barewire.prom.new DIR/barewire.prom

The names are those of `barewire stats`, with units; docs/observe.md lists them.")]
pub(crate) struct ExporterArgs {
    /// Where it listens.
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:9829")]
    listen: SocketAddr,
    /// Leaves out what is counted of each session: about 20 series a peer.
    #[arg(long)]
    no_sessions: bool,
    /// Says where it listens as JSON.
    #[arg(long)]
    json: bool,
}

/// How often a signal is looked for.
const LOOK: Duration = Duration::from_millis(200);

/// Answers that are written at a time; more are waited with.
const ANSWERS: usize = 32;

/// Answers until a signal.
///
/// # Errors
/// The address cannot be had.
pub(crate) fn run(args: &ExporterArgs) -> Result<ExitCode, Fail> {
    // Before there are threads, so that none of them takes the signal.
    let signals = signals()?;
    let server = Server::http(args.listen)
        .map_err(|why| Fail::new(format!("{}: {why}", args.listen)).mend("another --listen"))?;
    let at = server.server_addr().to_ip().unwrap_or(args.listen);
    let url = format!("http://{at}/metrics");
    if !at.ip().is_loopback() {
        eprintln!("barewire: whoever reaches {at} reads what runs here");
    }
    match args.json {
        true => out::json(&json!({"listening": url}))?,
        false => out::print(format_args!("{url}; Ctrl-C ends it\n"))?,
    }
    let answering = Arc::new(());
    while signals.read_signal().map_err(Fail::new)?.is_none() {
        if Arc::strong_count(&answering) > ANSWERS {
            std::thread::sleep(LOOK);
            continue;
        }
        if let Some(request) = server.recv_timeout(LOOK).map_err(Fail::new)? {
            let (sessions, mark) = (!args.no_sessions, Arc::clone(&answering));
            // A client that reads slowly, or not at all, holds up this thread alone, and one of
            // `ANSWERS`.
            let named = std::thread::Builder::new().name("barewire-answer".to_owned());
            let spawned = named.spawn(move || {
                answer(request, sessions);
                drop(mark);
            });
            // The request has ended with the closure.
            if let Err(why) = spawned {
                eprintln!(
                    "barewire: a request was not answered: {why}; raise the limit on threads \
                     (ulimit -u, TasksMax of the unit)"
                );
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn answer(request: Request, sessions: bool) {
    let is_read = matches!(request.method(), Method::Get | Method::Head);
    let path = request.url().split('?').next().unwrap_or("");
    let (status, kind, text) = match path {
        _ if !is_read => (405, "text/plain", "GET /metrics\n".to_owned()),
        "/metrics" => match stats::published(None).and_then(|all| metrics::page(&all, sessions)) {
            Ok(page) => (200, metrics::CONTENT_TYPE, page),
            Err(fail) => (500, "text/plain", format!("{fail}\n")),
        },
        "/" => (200, "text/html", "<a href=\"/metrics\">barewire metrics</a>\n".to_owned()),
        _ => (404, "text/plain", "GET /metrics\n".to_owned()),
    };
    let header = Header::from_bytes("Content-Type", kind).expect("a header of plain letters");
    let response = Response::from_string(text).with_status_code(status).with_header(header);
    // A client that has gone does not want it any more.
    let _ = request.respond(response);
}
