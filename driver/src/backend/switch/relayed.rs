//! A station behind a switch whose segments have another layout: its frames are messages of the
//! connection to the switch, one each. Slower than a segment: a system call for each frame.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};

use super::handshake::Socket;
use crate::backend::unix::send;
use crate::frame::{ETH_HDR_LEN, RxFrame, TxFrame};
use crate::port::{PortCounters, RxSink, Tx};

/// A connection to a switch.
pub(super) struct Connection {
    pub(super) socket: Socket,
    /// Whether the switch has closed its end: nothing is to be waited for.
    has_ended: AtomicBool,
}

impl Connection {
    pub(super) fn new(socket: Socket) -> Arc<Self> {
        Arc::new(Self { socket, has_ended: AtomicBool::new(false) })
    }

    pub(super) fn set_ended(&self) {
        self.has_ended.store(true, Relaxed);
    }

    /// Descriptor to wait at for frames; -1, which is skipped, once the switch has ended.
    pub(super) fn waitable_fd(&self) -> RawFd {
        if self.has_ended.load(Relaxed) { -1 } else { self.socket.fd() }
    }
}

/// See the module.
pub(super) struct RelayedPort {
    connection: Arc<Connection>,
    /// Of the longest frame each.
    tx_buf: Box<[u8]>,
    rx_buf: Box<[u8]>,
    pub(super) counters: PortCounters,
}

impl RelayedPort {
    /// `mtu` is in range.
    pub(super) fn new(connection: Arc<Connection>, mtu: usize) -> Self {
        let buf = || vec![0; ETH_HDR_LEN + mtu].into_boxed_slice();
        Self { connection, tx_buf: buf(), rx_buf: buf(), counters: PortCounters::default() }
    }

    #[cfg(test)]
    pub(super) fn socket(&self) -> RawFd {
        self.connection.socket.fd()
    }

    pub(super) fn mtu(&self) -> usize {
        self.tx_buf.len() - ETH_HDR_LEN
    }

    /// As [`Port::tx`](crate::port::Port::tx). Without a switch frames are lost: `NoRoute`.
    #[cold]
    pub(super) fn tx(&mut self, frame: &TxFrame<'_>) -> Tx {
        let len = frame.len();
        let sent = if len > self.tx_buf.len() {
            Tx::NoRoute
        } else {
            frame.copy_to(&mut self.tx_buf);
            match send(self.connection.socket.fd(), &self.tx_buf[..len], None) {
                Ok(_) => Tx::Sent,
                Err(Errno::EAGAIN | Errno::EINTR | Errno::ENOBUFS | Errno::ENOMEM) => Tx::Full,
                Err(_gone) => Tx::NoRoute,
            }
        };
        self.counters.tried(sent, len)
    }

    /// As [`Port::rx_burst`](crate::port::Port::rx_burst), which cannot fail here.
    #[cold]
    pub(super) fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> usize {
        // The whole length is returned, also of a message that is longer than the buffer.
        let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_TRUNC;
        for received in 0..max {
            match recv(self.connection.socket.fd(), &mut self.rx_buf, flags) {
                Ok(0) | Err(_) => return received,
                Ok(len) if len > self.rx_buf.len() => self.counters.rx_dropped += 1,
                Ok(len) => {
                    self.counters.received(len);
                    sink.frame(&RxFrame::new(&self.rx_buf[..len]));
                }
            }
        }
        max
    }
}
