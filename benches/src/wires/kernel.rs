//! The kernel's UDP and TCP, with busy polling.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::{Duration, Instant};

use super::{LEN, Wire};

/// A connected UDP socket.
pub struct Udp(UdpSocket);

impl Udp {
    /// Opens the socket from `here` to `there`.
    ///
    /// # Errors
    /// The system call's error.
    pub fn open(here: SocketAddr, there: SocketAddr) -> Result<Self, String> {
        let said = |e: std::io::Error| format!("udp: {e}");
        let socket = UdpSocket::bind(here).map_err(said)?;
        socket.connect(there).map_err(said)?;
        socket.set_nonblocking(true).map_err(said)?;
        Ok(Self(socket))
    }
}

impl Wire for Udp {
    #[inline]
    fn send(&mut self) {
        while self.0.send(&[0; LEN]).is_err() {}
    }

    #[inline]
    fn arrived(&mut self) -> bool {
        matches!(self.0.recv(&mut [0; 2048]), Ok(LEN))
    }
}

/// A TCP connection with TCP_NODELAY.
pub struct Tcp {
    stream: TcpStream,
    got: usize,
}

impl Tcp {
    /// Accepts the connection at `here`.
    ///
    /// # Errors
    /// The system call's error.
    pub fn listen(here: SocketAddr) -> Result<Self, String> {
        let said = |e: std::io::Error| format!("tcp: {e}");
        let (stream, _) = TcpListener::bind(here).map_err(said)?.accept().map_err(said)?;
        Self::with(stream)
    }

    /// Connects to the other end, which may not listen yet.
    ///
    /// # Errors
    /// The connection was not established within ten seconds.
    pub fn connect(there: SocketAddr) -> Result<Self, String> {
        let start = Instant::now();
        loop {
            match TcpStream::connect(there) {
                Ok(stream) => return Self::with(stream),
                Err(e) if start.elapsed() > Duration::from_secs(10) => {
                    return Err(format!("tcp: {e}"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    fn with(stream: TcpStream) -> Result<Self, String> {
        let said = |e: std::io::Error| format!("tcp: {e}");
        stream.set_nodelay(true).map_err(said)?;
        stream.set_nonblocking(true).map_err(said)?;
        Ok(Self { stream, got: 0 })
    }
}

impl Wire for Tcp {
    #[inline]
    fn send(&mut self) {
        let mut left = &[0_u8; LEN][..];
        while !left.is_empty() {
            match self.stream.write(left) {
                Ok(n) => left = &left[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock => {}
                // The waiting side notices: no message arrives.
                Err(_) => return,
            }
        }
    }

    #[inline]
    fn arrived(&mut self) -> bool {
        let mut bytes = [0; LEN];
        if let Ok(n) = self.stream.read(&mut bytes[self.got..]) {
            self.got += n;
        }
        let whole = self.got == LEN;
        if whole {
            self.got = 0;
        }
        whole
    }
}
