//! Pages over HTTP/1.1: GET and HEAD, one answer for each connection.
//!
//! No client can block others: a connection ends after [`DEADLINE`], and the oldest of more than
//! [`CLIENTS`] connections is closed.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Runtime};
use tokio::task::AbortHandle;
use tokio::time::{sleep, timeout};

/// Most connections at a time.
const CLIENTS: usize = 32;
/// Longest time of a connection, from its first byte to the last byte of the response.
const DEADLINE: Duration = Duration::from_secs(10);
/// Pause after a connection that could not be accepted.
const PAUSE: Duration = Duration::from_millis(10);

/// A response.
pub(crate) struct Answer {
    pub(crate) status: StatusCode,
    /// Its `Content-Type`.
    pub(crate) kind: &'static str,
    pub(crate) text: String,
}

impl Answer {
    pub(crate) fn plain(status: StatusCode, text: impl Into<String>) -> Self {
        Self { status, kind: "text/plain", text: text.into() }
    }
}

/// An HTTP server that makes responses by a function of the path. Runs in one thread, that of
/// [`serve`](Self::serve).
pub(crate) struct Http<F> {
    runtime: Runtime,
    listener: TcpListener,
    answers: Arc<F>,
    /// Connections, the oldest first; some have ended.
    clients: VecDeque<AbortHandle>,
}

impl<F: Fn(&str) -> Answer + Send + Sync + 'static> Http<F> {
    /// Listens at `at`. `answers` makes the response to a path, without its query string.
    ///
    /// # Errors
    /// The address cannot be bound, or the process has no descriptor left.
    pub(crate) fn listen(at: SocketAddr, answers: F) -> io::Result<Self> {
        let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
        let listener = runtime.block_on(TcpListener::bind(at))?;
        Ok(Self { runtime, listener, answers: Arc::new(answers), clients: VecDeque::new() })
    }

    /// The listen address.
    pub(crate) fn address(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }

    /// Serves for `time`.
    pub(crate) fn serve(&mut self, time: Duration) {
        let Self { runtime, listener, answers, clients } = self;
        // Only the end of the time stops it.
        let _elapsed = runtime.block_on(async {
            timeout(time, async {
                loop {
                    match listener.accept().await {
                        Ok((stream, _)) => take(clients, stream, Arc::clone(answers)),
                        // Without a free descriptor, new connections wait until an old one is
                        // closed.
                        Err(_) => {
                            give_way(clients, clients.len().saturating_sub(1));
                            sleep(PAUSE).await;
                        }
                    }
                }
            })
            .await
        });
    }
}

/// Closes the oldest connections until `leave` are left.
fn give_way(clients: &mut VecDeque<AbortHandle>, leave: usize) {
    clients.retain(|client| !client.is_finished());
    let too_many = clients.len().saturating_sub(leave);
    clients.drain(..too_many).for_each(|oldest| oldest.abort());
}

fn take<F: Fn(&str) -> Answer + Send + Sync + 'static>(
    clients: &mut VecDeque<AbortHandle>,
    stream: TcpStream,
    answers: Arc<F>,
) {
    give_way(clients, CLIENTS - 1);
    let service = service_fn(move |request| {
        let response = respond(&request, &*answers);
        async { Ok::<_, Infallible>(response) }
    });
    let connection =
        http1::Builder::new().keep_alive(false).serve_connection(TokioIo::new(stream), service);
    // A client that has left or timed out needs no response.
    clients.push_back(tokio::spawn(timeout(DEADLINE, connection)).abort_handle());
}

fn respond(
    request: &Request<Incoming>,
    answers: &impl Fn(&str) -> Answer,
) -> Response<Full<Bytes>> {
    let Answer { status, kind, text } = match *request.method() {
        Method::GET | Method::HEAD => answers(request.uri().path()),
        _ => Answer::plain(StatusCode::METHOD_NOT_ALLOWED, "GET /metrics\n"),
    };
    let mut response = Response::new(Full::from(text));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::mpsc::{Sender, TryRecvError, channel};
    use std::time::Instant;

    use super::*;

    /// A server whose answers no socket holds, for as long as what this returns is there.
    fn server() -> (SocketAddr, Sender<()>) {
        let answers =
            |path: &str| Answer::plain(StatusCode::OK, format!("{path} ").repeat(8 << 20));
        let mut http = Http::listen("127.0.0.1:0".parse().unwrap(), answers).unwrap();
        let (at, (tell, told)) = (http.address().unwrap(), channel::<()>());
        std::thread::spawn(move || {
            while told.try_recv() == Err(TryRecvError::Empty) {
                http.serve(Duration::from_millis(20));
            }
        });
        (at, tell)
    }

    fn ask(at: SocketAddr, what: &str) -> TcpStream {
        let mut stream = TcpStream::connect(at).unwrap();
        stream.write_all(what.as_bytes()).unwrap();
        stream
    }

    /// Goal: clients that never read, or never ask, keep nobody out: of too many the oldest give
    /// way.
    #[test]
    fn the_oldest_gives_way() {
        let (at, _there) = server();
        let silent: Vec<TcpStream> =
            (0..CLIENTS).map(|i| ask(at, ["GET /x HTTP/1.1\r\n\r\n", "GET /"][i % 2])).collect();
        let begun = Instant::now();
        let mut answer = Vec::new();
        let mut one = ask(at, "GET /y HTTP/1.1\r\nHost: x\r\n\r\n");
        one.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        one.read_to_end(&mut answer).unwrap();
        assert!(answer.starts_with(b"HTTP/1.1 200 OK\r\n") && answer.len() > 3 * (8 << 20));
        assert!(begun.elapsed() < DEADLINE, "it waited for others: {:?}", begun.elapsed());
        drop(silent);
    }

    /// Goal: a client that does not finish in time is hung up on.
    #[test]
    fn a_client_has_its_time() {
        let (at, _there) = server();
        let mut slow = ask(at, "GET /");
        slow.set_read_timeout(Some(2 * DEADLINE)).unwrap();
        let begun = Instant::now();
        assert_eq!(slow.read(&mut [0]).unwrap_or(0), 0);
        assert!(begun.elapsed() < DEADLINE + Duration::from_secs(5));
    }

    #[test]
    fn requests_are_answered_as_they_are() {
        let (at, _there) = server();
        let head = |what: &str| {
            let mut head = [0; 15];
            ask(at, what).read_exact(&mut head).unwrap();
            String::from_utf8(head.to_vec()).unwrap()
        };
        assert_eq!(head("HEAD /x?y HTTP/1.0\r\n\r\n"), "HTTP/1.0 200 OK");
        assert_eq!(head("PUT /x HTTP/1.1\r\nHost: x\r\n\r\n"), "HTTP/1.1 405 Me");
        assert_eq!(head("GET /x of y\r\n\r\n"), "HTTP/1.1 400 Ba");
    }
}
