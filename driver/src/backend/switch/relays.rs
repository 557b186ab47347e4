//! Stations of one user whose frames pass their connections: processes of builds whose segments
//! have another layout.
//!
//! A message is a frame. It is received into private memory, and then treated as one of a ring. A
//! connection without room loses frames, as a full ring does. One that sends descriptors is closed:
//! each would be work for another thread.

use std::collections::HashMap;
use std::os::fd::AsFd;

use nix::errno::Errno;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::handshake::SharedSocket;
use super::listener::NOT_A_CLIENT;
use crate::backend::unix::{Received, receive, send};
use crate::frame::{RxFrame, TxFrame};
use crate::port::{Station, Tx};

/// Connections read per call of [`Relays::receive_from`], and frames of each at least.
const READY_MAX: usize = 8;

/// A station.
struct Relay {
    socket: SharedSocket,
    /// The connection's number.
    client: u64,
    /// Bytes of frames from the station, and to it.
    sent: u64,
    received: u64,
}

/// See the module.
pub(super) struct Relays {
    /// Of the sockets; each event has its station's address.
    epoll: Epoll,
    /// By address.
    stations: HashMap<u64, Relay>,
    /// Frames that are received or sent; a byte longer than a frame may be.
    buf: Box<[u8]>,
    /// Connections that ended and are still to be removed.
    ended: Vec<u64>,
}

impl Relays {
    /// For frames of `frame_max` bytes. A frame that can be received wakes `epoll`.
    ///
    /// # Errors
    /// Those of making an epoll.
    pub(super) fn new(frame_max: usize, epoll: &Epoll) -> nix::Result<Self> {
        let own = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        epoll.add(own.0.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, NOT_A_CLIENT))?;
        let buf = vec![0; frame_max + 1].into_boxed_slice();
        Ok(Self { epoll: own, stations: HashMap::new(), buf, ended: Vec::new() })
    }

    /// Adds the station of a connection. False without memory.
    pub(super) fn add(&mut self, client: u64, station: Station, socket: SharedSocket) -> bool {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, station.word());
        let is_watched = self.epoll.add(socket.0.as_fd(), event).is_ok();
        if is_watched {
            let relay = Relay { socket, client, sent: 0, received: 0 };
            self.stations.insert(station.word(), relay);
        }
        is_watched
    }

    /// The connections that ended since the last call.
    pub(super) fn take_ended(&mut self) -> Vec<u64> {
        std::mem::take(&mut self.ended)
    }

    /// Bytes of frames to the station and from it, if it is here.
    pub(super) fn traffic(&self, station: Station) -> Option<(u64, u64)> {
        self.stations.get(&station.word()).map(|relay| (relay.received, relay.sent))
    }

    /// Receives up to `max` frames, each with its station's address. Connections take turns: the
    /// kernel puts one that is reported behind the others.
    pub(super) fn receive_from(
        &mut self,
        max: usize,
        mut each: impl FnMut(u64, &RxFrame<'_>),
    ) -> usize {
        let mut ready = [EpollEvent::empty(); READY_MAX];
        let count = self.epoll.wait(&mut ready, EpollTimeout::ZERO).unwrap_or(0);
        let of_each = max / count.max(1);
        let mut received = 0;
        for event in &ready[..count] {
            let key = event.data();
            for _ in 0..of_each {
                let Some(relay) = self.stations.get_mut(&key) else { break };
                match receive(relay.socket.fd(), &mut self.buf, true) {
                    Ok(Received { len: len @ 1.., fd: None, .. }) => {
                        relay.sent += len as u64;
                        received += 1;
                        each(key, &RxFrame::new(&self.buf[..len]));
                    }
                    Err(Errno::EAGAIN | Errno::EINTR | Errno::ENOMEM) => break,
                    Ok(_) | Err(_) => self.end(key),
                }
            }
        }
        received
    }

    fn end(&mut self, key: u64) {
        let Some(relay) = self.stations.remove(&key) else { return };
        // The listener still has the socket.
        let _ = self.epoll.delete(relay.socket.0.as_fd());
        self.ended.push(relay.client);
    }

    /// As [`Port::tx`](crate::port::Port::tx), to the station with the frame's destination address.
    pub(super) fn tx(&mut self, frame: &TxFrame<'_>) -> Tx {
        let Some(relay) = self.stations.get_mut(&frame.dst_word()) else { return Tx::NoRoute };
        let len = frame.copy_to(&mut self.buf);
        relay.tx(&self.buf[..len])
    }

    /// Sends a group's frame to every station but its source. Those without room lose it.
    pub(super) fn tx_group(&mut self, frame: &TxFrame<'_>) {
        let len = frame.copy_to(&mut self.buf);
        let source = frame.src_word();
        for (_, relay) in self.stations.iter_mut().filter(|(key, _)| **key != source) {
            relay.tx(&self.buf[..len]);
        }
    }
}

impl Relay {
    fn tx(&mut self, frame: &[u8]) -> Tx {
        match send(self.socket.fd(), frame, None) {
            Ok(_) => {
                self.received += frame.len() as u64;
                Tx::Sent
            }
            Err(Errno::EPIPE | Errno::ECONNRESET) => Tx::NoRoute,
            Err(_full) => Tx::Full,
        }
    }
}
