//! Untagged messages: the nine calls of fi_msg(3), safe API.
//!
//! All calls return at once. A refused call ([`PostError`]) has queued nothing and gives the
//! buffers back. Its error is one of:
//! - [`Error::Again`]: no work request, credit or queue entry is free. Read the completion queue,
//!   then try again;
//! - [`Error::Invalid`]: the address is not in the vector (a send to [`FI_ADDR_UNSPEC`] too), or a
//!   list has more than 8 pieces;
//! - [`Error::MsgTooLong`]: longer than `max_msg_size`, or than `inject_size` for an inject;
//! - [`Error::BadFlags`]: a flag that is not known or was not granted (`FI_MULTICAST` and
//!   `FI_FENCE` without their capabilities), or that does not go with a [multicast
//!   group](crate::multicast);
//! - [`Error::OpNotSupp`]: the endpoint has no `FI_MSG`, or not this direction;
//! - [`Error::OpBadState`]: the endpoint is not enabled;
//! - [`Error::Busy`]: pieces of a multi-receive buffer are still alive.

use barewire_dataplane::node::MsgKind;
use barewire_dataplane::types::{FI_ADDR_UNSPEC, FiAddr};

pub use crate::buf::PostResult;
use crate::buf::{Buf, Bufs};
use crate::ep::{Endpoint, Recv, Send};
use crate::errno::Result;
use crate::flags::OpFlags;

#[cfg(doc)]
use crate::{buf::PostError, errno::Error};

/// The argument of `sendmsg` and `recvmsg` (`struct fi_msg`).
#[derive(Debug)]
pub struct Msg {
    /// Scatter or gather list.
    pub bufs: Bufs,
    /// Destination, or source for a receive.
    pub addr: FiAddr,
    /// Comes back in the completion; names the message for `CLAIM` and `DISCARD`.
    pub context: u64,
    /// Remote CQ data, used with [`OpFlags::REMOTE_CQ_DATA`].
    pub data: u64,
}

impl Default for Msg {
    fn default() -> Self {
        Self { bufs: Bufs::None, addr: FI_ADDR_UNSPEC, context: 0, data: 0 }
    }
}

impl Endpoint {
    /// Posts a buffer for one message. `src` filters by sender on an endpoint with
    /// `FI_DIRECTED_RECV`; [`FI_ADDR_UNSPEC`] takes messages of every sender, and is refused with
    /// `FI_EXACT_DIRECTED_RECV`. Buffers match in the order of their posting.
    ///
    /// A longer message completes with `FI_ETRUNC`.
    ///
    /// # Errors
    /// See the [module](self).
    ///
    /// Source: fi_msg(3), "fi_recv".
    #[doc(alias = "fi_recv")]
    pub fn recv(&self, buf: impl Into<Bufs>, src: FiAddr, context: u64) -> PostResult {
        self.post_recv(untagged(buf.into(), src, context, self.rx_op_flags()))
    }

    /// As [`recv`](Self::recv), into at most 8 buffers, one after the other.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_recvv")]
    pub fn recvv(&self, bufs: Vec<Buf>, src: FiAddr, context: u64) -> PostResult {
        self.post_recv(untagged(bufs.into(), src, context, self.rx_op_flags()))
    }

    /// As [`recvv`](Self::recvv), with flags in place of the endpoint's: `COMPLETION`, `MORE`,
    /// `MULTI_RECV`, `TRANSMIT_COMPLETE`, and for buffered receive `CLAIM` and `DISCARD`.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_recvmsg")]
    pub fn recvmsg(&self, msg: Msg, flags: OpFlags) -> PostResult {
        self.post_recv(untagged(msg.bufs, msg.addr, msg.context, flags))
    }

    /// Sends one message.
    ///
    /// # Errors
    /// See the [module](self).
    ///
    /// Source: fi_msg(3), "fi_send".
    #[doc(alias = "fi_send")]
    #[inline]
    pub fn send(&self, buf: impl Into<Bufs>, dest: FiAddr, context: u64) -> PostResult {
        self.post_send(Send {
            kind: MsgKind::Msg,
            bufs: buf.into(),
            dest,
            tag: 0,
            data: 0,
            context,
            flags: self.tx_op_flags(),
        })
    }

    /// As [`send`](Self::send), from at most 8 buffers, one after the other.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_sendv")]
    pub fn sendv(&self, bufs: Vec<Buf>, dest: FiAddr, context: u64) -> PostResult {
        self.send(bufs, dest, context)
    }

    /// As [`sendv`](Self::sendv), with flags in place of the endpoint's.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_sendmsg")]
    pub fn sendmsg(&self, msg: Msg, flags: OpFlags) -> PostResult {
        self.post_send(Send {
            kind: MsgKind::Msg,
            bufs: msg.bufs,
            dest: msg.addr,
            tag: 0,
            data: msg.data,
            context: msg.context,
            flags,
        })
    }

    /// Sends `buf`, at most `inject_size` bytes, and lets the caller reuse it at once.
    ///
    /// Copies the bytes before it returns. Success writes no completion, but a bound counter counts
    /// it. If the peer is lost later, an error entry is written.
    ///
    /// # Errors
    /// See the [module](self).
    ///
    /// Source: fi_msg(3), "fi_inject".
    #[doc(alias = "fi_inject")]
    #[inline]
    pub fn inject(&self, buf: &[u8], dest: FiAddr) -> Result<()> {
        self.post_inject(MsgKind::Msg, buf, dest, 0, None)
    }

    /// As [`send`](Self::send), with `data` as remote CQ data in the receiver's completion.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_senddata")]
    pub fn senddata(
        &self,
        buf: impl Into<Bufs>,
        data: u64,
        dest: FiAddr,
        context: u64,
    ) -> PostResult {
        self.post_send(Send {
            kind: MsgKind::Msg,
            bufs: buf.into(),
            dest,
            tag: 0,
            data,
            context,
            flags: self.tx_op_flags() | OpFlags::REMOTE_CQ_DATA,
        })
    }

    /// As [`inject`](Self::inject), with `data` as remote CQ data in the receiver's completion.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_inject_data")]
    #[doc(alias = "fi_injectdata")]
    pub fn injectdata(&self, buf: &[u8], data: u64, dest: FiAddr) -> Result<()> {
        self.post_inject(MsgKind::Msg, buf, dest, 0, Some(data))
    }
}

fn untagged(bufs: Bufs, src: FiAddr, context: u64, flags: OpFlags) -> Recv {
    Recv { kind: MsgKind::Msg, bufs, src, tag: 0, ignore: 0, context, flags }
}
