//! Tagged messages: the nine calls of fi_tagged(3), safe API.
//!
//! A receive takes the oldest message whose tag equals its own in all bits that are not set in
//! `ignore`. Errors are those of [`crate::msg`], with `FI_TAGGED` for `FI_MSG`.

use barewire_dataplane::node::MsgKind;
use barewire_dataplane::types::{FI_ADDR_UNSPEC, FiAddr};

use crate::buf::{Buf, Bufs, PostResult};
use crate::ep::{Endpoint, Recv, Send};
use crate::errno::Result;
use crate::flags::OpFlags;

/// The argument of `tsendmsg` and `trecvmsg` (`struct fi_msg_tagged`).
#[derive(Debug)]
pub struct TaggedMsg {
    /// Scatter or gather list.
    pub bufs: Bufs,
    /// Destination, or source for a receive.
    pub addr: FiAddr,
    /// The tag.
    pub tag: u64,
    /// Bits of the tag that a receive ignores.
    pub ignore: u64,
    /// Comes back in the completion; names the message for `PEEK`, `CLAIM` and `DISCARD`.
    pub context: u64,
    /// Remote CQ data, used with [`OpFlags::REMOTE_CQ_DATA`].
    pub data: u64,
}

impl Default for TaggedMsg {
    fn default() -> Self {
        let addr = FI_ADDR_UNSPEC;
        Self { bufs: Bufs::None, addr, tag: 0, ignore: 0, context: 0, data: 0 }
    }
}

impl Endpoint {
    /// Posts a buffer for one message whose tag equals `tag`, except for the bits in `ignore`.
    ///
    /// # Errors
    /// See the [module](self).
    ///
    /// Source: fi_tagged(3), "fi_trecv".
    #[doc(alias = "fi_trecv")]
    #[inline]
    pub fn trecv(
        &self,
        buf: impl Into<Bufs>,
        src: FiAddr,
        tag: u64,
        ignore: u64,
        context: u64,
    ) -> PostResult {
        let flags = self.tagged_op_flags();
        let bufs = buf.into();
        self.post_recv(Recv { kind: MsgKind::Tagged, bufs, src, tag, ignore, context, flags })
    }

    /// As [`trecv`](Self::trecv), into at most 8 buffers, one after the other.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_trecvv")]
    pub fn trecvv(
        &self,
        bufs: Vec<Buf>,
        src: FiAddr,
        tag: u64,
        ignore: u64,
        context: u64,
    ) -> PostResult {
        self.trecv(bufs, src, tag, ignore, context)
    }

    /// As [`trecvv`](Self::trecvv), with flags in place of the endpoint's. With
    ///
    /// - `PEEK`, looks for an unexpected message and completes with its length, tag and sender, or
    ///   with the error `FI_ENOMSG`; no memory is taken;
    /// - `PEEK | CLAIM`, also reserves it for `context`;
    /// - `PEEK | DISCARD`, also drops it;
    /// - `CLAIM`, receives the message reserved for `context`; with `DISCARD`, drops it;
    /// - `MULTI_RECV`, which takes `FI_TAGGED_MULTI_RECV`, receives messages that match into a
    ///   [`SharedBuf`](crate::SharedBuf) until less than `FI_OPT_MIN_MULTI_RECV` of it is free.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_trecvmsg")]
    pub fn trecvmsg(&self, msg: TaggedMsg, flags: OpFlags) -> PostResult {
        let TaggedMsg { bufs, addr: src, tag, ignore, context, .. } = msg;
        self.post_recv(Recv { kind: MsgKind::Tagged, bufs, src, tag, ignore, context, flags })
    }

    /// Sends one message with `tag`.
    ///
    /// # Errors
    /// See the [module](self).
    ///
    /// Source: fi_tagged(3), "fi_tsend".
    #[doc(alias = "fi_tsend")]
    #[inline]
    pub fn tsend(&self, buf: impl Into<Bufs>, dest: FiAddr, tag: u64, context: u64) -> PostResult {
        let flags = self.tx_op_flags();
        let bufs = buf.into();
        self.post_send(Send { kind: MsgKind::Tagged, bufs, dest, tag, data: 0, context, flags })
    }

    /// As [`tsend`](Self::tsend), from at most 8 buffers, one after the other.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_tsendv")]
    pub fn tsendv(&self, bufs: Vec<Buf>, dest: FiAddr, tag: u64, context: u64) -> PostResult {
        self.tsend(bufs, dest, tag, context)
    }

    /// As [`tsendv`](Self::tsendv), with flags in place of the endpoint's.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_tsendmsg")]
    pub fn tsendmsg(&self, msg: TaggedMsg, flags: OpFlags) -> PostResult {
        let TaggedMsg { bufs, addr: dest, tag, context, data, .. } = msg;
        self.post_send(Send { kind: MsgKind::Tagged, bufs, dest, tag, data, context, flags })
    }

    /// Sends `buf`, at most `inject_size` bytes, with `tag`, and lets the caller reuse it at once.
    /// Success writes no completion.
    ///
    /// # Errors
    /// See the [module](self).
    ///
    /// Source: fi_tagged(3), "fi_tinject".
    #[doc(alias = "fi_tinject")]
    #[inline]
    pub fn tinject(&self, buf: &[u8], dest: FiAddr, tag: u64) -> Result<()> {
        self.post_inject(MsgKind::Tagged, buf, dest, tag, None)
    }

    /// As [`tsend`](Self::tsend), with `data` as remote CQ data in the receiver's completion.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_tsenddata")]
    pub fn tsenddata(
        &self,
        buf: impl Into<Bufs>,
        data: u64,
        dest: FiAddr,
        tag: u64,
        context: u64,
    ) -> PostResult {
        let flags = self.tx_op_flags() | OpFlags::REMOTE_CQ_DATA;
        let bufs = buf.into();
        self.post_send(Send { kind: MsgKind::Tagged, bufs, dest, tag, data, context, flags })
    }

    /// As [`tinject`](Self::tinject), with `data` as remote CQ data in the receiver's completion.
    ///
    /// # Errors
    /// See the [module](self).
    #[doc(alias = "fi_tinjectdata")]
    pub fn tinjectdata(&self, buf: &[u8], data: u64, dest: FiAddr, tag: u64) -> Result<()> {
        self.post_inject(MsgKind::Tagged, buf, dest, tag, Some(data))
    }
}
