//! Sleeping on the socket of a port, and on what happens to its interface.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;

use super::super::lock::NotInChildren;
use super::super::{Bell, clear_error, raw, readable, sleep};
use super::filter::ArpSocket;
use super::watched::Ear;
use crate::port::PortWaiter;

/// What a port's thread shares with those that sleep on it.
pub(in super::super) struct Shared {
    pub(in super::super) socket: NotInChildren,
    pub(in super::super) ear: Ear,
    pub(in super::super) bell: Bell,
    /// What hears ARP, for a port whose own socket does not.
    pub(in super::super) arp: Option<ArpSocket>,
}

/// See the module.
pub(in super::super) struct Waiter(pub(in super::super) Arc<Shared>);

impl Waiter {
    fn sleep(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let Shared { socket, ear, bell, arp } = &*self.0;
        let arp = arp.as_ref().map_or(-1, ArpSocket::fd);
        let mut fds = [socket.as_raw_fd(), ear.fd(), bell.fd(), arp, raw(also)].map(readable);
        let came = sleep(&mut fds, timeout);
        let [frames, changes, woken, asked, _] = fds;
        if asked.revents != 0 {
            ear.point();
        }
        if changes.revents != 0 || frames.revents & libc::POLLERR != 0 {
            // An interface that went down is an error of the socket until somebody takes it.
            clear_error(socket.as_raw_fd());
            ear.point();
        }
        if woken.revents != 0 {
            bell.clear();
        }
        came
    }
}

impl PortWaiter for Waiter {
    fn wait(&self, timeout: Duration) {
        self.sleep(None, timeout);
    }

    fn wait_or(&self, also: BorrowedFd<'_>, timeout: Duration) -> bool {
        self.sleep(Some(also), timeout)
    }

    fn wake(&self) {
        self.0.bell.ring();
    }
}
