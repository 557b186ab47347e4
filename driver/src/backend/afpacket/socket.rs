//! Setup of the raw sockets: options of sending and reception.

use std::io;
use std::os::fd::{AsRawFd, RawFd};

use super::super::lock::NotInChildren;
use super::super::netdev::{Link, filter, raw_socket};
use super::super::{SEND_BUFFER, enlarge, set_option};

/// Requested send buffer, bytes: a burst of the longest frames.
const SEND_BUFFER_LEN: libc::c_int = 4 << 20;

/// Sets an option of the packet layer.
fn set<T>(fd: RawFd, option: libc::c_int, value: &T) -> io::Result<()> {
    set_option(fd, libc::SOL_PACKET, option, value)
}

/// Frames of any EtherType: `ETH_P_ALL`.
pub(super) const ANY: u16 = libc::ETH_P_ALL as u16;

/// Sets the options that precede the first frame: the filter, and the way frames leave.
pub(super) fn prepare(fd: RawFd, program: Vec<libc::sock_filter>, qdisc: bool) -> io::Result<()> {
    let on: libc::c_int = 1;
    // Frames that this host sends, which sockets of any EtherType receive. Since Linux 4.20; the
    // filter drops them as well.
    let _ = set(fd, libc::PACKET_IGNORE_OUTGOING, &on);
    if !qdisc {
        // Directly to the driver: the fabric has its own flow control.
        set(fd, libc::PACKET_QDISC_BYPASS, &on)?;
    }
    // Without CAP_NET_ADMIN limited by the system, which is enough to work.
    enlarge(fd, SEND_BUFFER, SEND_BUFFER_LEN)?;
    filter::attach(fd, program)
}

/// A send-only socket on interface `link`, with a `virtio_net_hdr` before each frame for GSO.
/// `None` if the kernel does not support that.
///
/// # Errors
/// There is no socket, or the interface has gone.
pub(super) fn sender(link: &Link, qdisc: bool) -> io::Result<Option<NotInChildren>> {
    let (socket, on): (_, libc::c_int) = (raw_socket()?, 1);
    let fd = socket.as_raw_fd();
    if set(fd, libc::PACKET_VNET_HDR, &on).is_err() {
        return Ok(None);
    }
    if !qdisc {
        set(fd, libc::PACKET_QDISC_BYPASS, &on)?;
    }
    enlarge(fd, SEND_BUFFER, SEND_BUFFER_LEN)?;
    // EtherType 0: no frame arrives.
    filter::bind(fd, link, 0)?;
    Ok(Some(socket))
}
