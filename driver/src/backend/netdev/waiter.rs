//! Sleeping on the socket of a port, and on what happens to its interface.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::super::lock::NotInChildren;
use super::super::{Bell, clear_error, raw, readable, sleep};
use super::filter::ArpSocket;
use super::watched::Ear;
use crate::port::PortWaiter;

/// Sockets that a port can have: one for each of 64 queues, and a raw one.
pub(in super::super) const SOCKETS_MAX: usize = 65;

/// What a port's thread shares with those that sleep on it.
pub(in super::super) struct Shared {
    /// One at least, [`SOCKETS_MAX`] at most.
    pub(in super::super) sockets: Vec<NotInChildren>,
    pub(in super::super) ear: Option<Arc<Ear>>,
    pub(in super::super) bell: Bell,
    /// What hears ARP, for a port whose own socket does not.
    pub(in super::super) arp: Option<ArpSocket>,
}

/// See the module.
pub(in super::super) struct Waiter(pub(in super::super) Arc<Shared>);

impl PortWaiter for Waiter {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let Shared { sockets, ear, bell, arp } = &*self.0;
        let arp = arp.as_ref().map_or(-1, ArpSocket::fd);
        let mut fds = [readable(-1); 4 + SOCKETS_MAX];
        let own = [ear.as_ref().map_or(-1, |ear| ear.fd()), bell.fd(), arp, raw(also)];
        let all = own.into_iter().chain(sockets.iter().map(|socket| socket.as_raw_fd()));
        fds.iter_mut().zip(all).for_each(|(entry, fd)| entry.fd = fd);
        let came = sleep(&mut fds[..own.len() + sockets.len()], timeout);
        let point = || ear.iter().for_each(|ear| ear.point());
        let [changes, woken, asked, _, frames @ ..] = fds;
        if asked.revents != 0 {
            point();
        }
        if changes.revents != 0 || frames.iter().any(|of| of.revents & libc::POLLERR != 0) {
            // An interface that went down is an error of its sockets until somebody takes it.
            sockets.iter().for_each(|socket| clear_error(socket.as_raw_fd()));
            point();
        }
        if woken.revents != 0 {
            bell.clear();
        }
        came
    }

    fn wake(&self) {
        self.0.bell.ring();
    }
}
