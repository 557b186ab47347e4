//! The waiter of a port: sleeps on its sockets and on changes of its interface.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::super::lock::NotInChildren;
use super::super::{WakeEvent, clear_error, raw, readable, sleep};
use super::filter::ArpSocket;
use super::link_state::LinkMonitor;
use crate::port::PortWaiter;

/// Sockets of a port at most: one for each of 64 queues, and a raw one.
pub(in super::super) const SOCKETS_MAX: usize = 65;

/// State shared by a port's thread and its waiters.
pub(in super::super) struct Shared {
    /// One at least, [`SOCKETS_MAX`] at most.
    pub(in super::super) sockets: Vec<NotInChildren>,
    pub(in super::super) monitor: Option<Arc<LinkMonitor>>,
    pub(in super::super) bell: WakeEvent,
    /// Receives ARP, for a port whose other sockets do not.
    pub(in super::super) arp: Option<ArpSocket>,
}

/// See the module's documentation.
pub(in super::super) struct Waiter(pub(in super::super) Arc<Shared>);

impl PortWaiter for Waiter {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let Shared { sockets, monitor, bell, arp } = &*self.0;
        let arp = arp.as_ref().map_or(-1, ArpSocket::fd);
        let mut fds = [readable(-1); 4 + SOCKETS_MAX];
        let own = [monitor.as_ref().map_or(-1, |monitor| monitor.fd()), bell.fd(), arp, raw(also)];
        let all = own.into_iter().chain(sockets.iter().map(|socket| socket.as_raw_fd()));
        fds.iter_mut().zip(all).for_each(|(entry, fd)| entry.fd = fd);
        let came = sleep(&mut fds[..own.len() + sockets.len()], timeout);
        let notify = || monitor.iter().for_each(|monitor| monitor.notify());
        let [changes, woken, asked, _, frames @ ..] = fds;
        if asked.revents != 0 {
            notify();
        }
        if changes.revents != 0 || frames.iter().any(|of| of.revents & libc::POLLERR != 0) {
            // An interface that went down is a pending error of its sockets until it is read.
            sockets.iter().for_each(|socket| clear_error(socket.as_raw_fd()));
            notify();
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
