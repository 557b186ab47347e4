//! Operations in flight: posted, and not yet complete.

use barewire_driver::frame::Body;
use barewire_driver::mem::{IoBuf, Span};
use bitflags::bitflags;

use super::Node;
use super::rma_list::RmaList;
use crate::flags::CqFlags;
use crate::idx::{
    EpIdx, MrIdx, OooIdx, PackIdx, PeerIdx, PullIdx, RecvIdx, ResponseIdx, RmaIdx, TxIdx,
};
use crate::proto::atomic;
use crate::proto::blocks::Chain;
use crate::proto::matching::Receive;
use crate::rel::psn::Psn;
use crate::rel::sent::ReadCounts;
use crate::slab::{Link, Linked, NONE};
use crate::table::Vacant;
use crate::types::Instant;
use crate::wire::{EndStatus, NackReason};

bitflags! {
    /// Properties of a transmit request.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub(crate) struct WrFlags: u32 {
        /// A tagged message.
        const TAGGED = 1;
        /// The packet carries `data` as remote CQ data.
        const IMM = 1 << 1;
        /// The payload was copied to the node's inject memory.
        const INJECTED = 1 << 2;
        /// The request waits until every earlier operation to the peer has completed.
        const FENCE = 1 << 3;
        /// A success writes a completion.
        const CQE = 1 << 4;
        /// The request completes only when the peer has processed it.
        const DELIVERY = 1 << 5;
        /// The request completes when the peer has matched it, so it is announced (RNDV) at any
        /// length.
        const MATCH = 1 << 6;
        /// The request completes as soon as its memory may be reused.
        const EARLY = 1 << 7;
        /// Another operation follows at once (`FI_MORE`).
        const MORE = 1 << 8;
        /// The request is in the queue of messages.
        const IN_SEND_Q = 1 << 9;
        /// The request is in the queue of data that the peer has pulled.
        const IN_RNDV_DATA_Q = 1 << 10;
        /// The success completion has been written; only a copy of the payload is still in flight.
        const REPORTED = 1 << 11;
        /// The message was announced by RNDV.
        const ANNOUNCED = 1 << 12;
        /// Every packet was handed to the port once, or the peer sent END.
        const ALL_SENT = 1 << 13;
        /// The message was packed with others when it left.
        const PACKED = 1 << 14;
        /// The request is a one-sided operation: `pull_op` is its [`Rma`] record; `len` and `sent`
        /// count bytes of a read or write, elements of an atomic operation.
        const RMA = 1 << 15;
        /// The request is a packet of several messages: `pull_gen` is its buffer, `tag` the number
        /// of messages, `len` and `sent` count bytes of the packet, and `data` is the credit that
        /// the messages use.
        const GROUP = 1 << 16;
        /// The destination address names an incarnation of the peer.
        const NAMED = 1 << 17;
    }
}

/// The copy of an injected message.
pub(super) type Inject = [u8; Node::INJECT_SIZE];

/// A transmit request: a message, or the part of a one-sided operation that is handled like a
/// message. Its memory is stored separately, in `TxWrs`.
#[derive(Debug)]
pub(crate) struct TxWr {
    pub(crate) context: u64,
    pub(crate) tag: u64,
    pub(crate) data: u64,
    pub(crate) len: u64,
    /// Bytes put into packets so far.
    pub(crate) sent: u64,
    /// Bytes that the peer has pulled so far; of a refused write, the bytes written before.
    pub(crate) pulled: u64,
    /// The peer's pull; in a packed message, the next message of the packet.
    pub(crate) pull_op: u32,
    pub(crate) pull_gen: u32,
    pub(crate) peer: PeerIdx,
    pub(crate) ep: EpIdx,
    /// Packets of this message that are kept until acknowledged.
    pub(crate) unacked: u32,
    pub(crate) dst_ep: u16,
    /// The receive context that the address names, 0 if none.
    pub(crate) rx_ctx: u8,
    pub(crate) src_ep: u16,
    pub(crate) flags: WrFlags,
    pub(crate) queue: Link<TxIdx>,
    pub(crate) of_peer: Link<TxIdx>,
}

impl TxWr {
    /// An empty request of endpoint `ep`, whose number is `src_ep`, to endpoint `dst_ep` of `peer`.
    #[inline(always)]
    pub(crate) fn new(
        context: u64,
        (peer, ep): (PeerIdx, EpIdx),
        (dst_ep, src_ep): (u16, u16),
        flags: WrFlags,
    ) -> Self {
        Self {
            context,
            tag: 0,
            data: 0,
            len: 0,
            sent: 0,
            pulled: 0,
            pull_op: NONE,
            pull_gen: 0,
            peer,
            ep,
            unacked: 0,
            dst_ep,
            rx_ctx: 0,
            src_ep,
            flags,
            queue: Link::default(),
            of_peer: Link::default(),
        }
    }
}

impl TxWr {
    /// Whether no part of the request is outstanding.
    #[inline(always)]
    pub(super) fn is_done(&self) -> bool {
        self.flags.contains(WrFlags::ALL_SENT) && self.unacked == 0
    }

    /// `len` bytes at `offset` of the request's memory: the injected copy, or the lent buffer.
    #[inline]
    pub(super) fn body<'a>(
        &self,
        (inject, lent): (&'a Inject, &'a IoBuf),
        offset: usize,
        len: usize,
    ) -> Body<'a> {
        if self.flags.contains(WrFlags::INJECTED) {
            Body::Bytes(&inject[offset..offset + len])
        } else {
            Body::Io { buf: lent, offset, len }
        }
    }

    /// The next request of its packet of several messages, [`TxIdx::NONE`] if it is the last.
    #[inline]
    pub(super) fn next_packed(&self) -> TxIdx {
        debug_assert!(!self.flags.contains(WrFlags::RMA));
        TxIdx::of(self.pull_op)
    }

    /// Sets [`next_packed`](Self::next_packed).
    #[inline]
    pub(super) fn set_next_packed(&mut self, next: TxIdx) {
        debug_assert!(!self.flags.contains(WrFlags::RMA));
        self.pull_op = next.get();
    }

    /// The record of a one-sided operation.
    #[inline]
    pub(super) fn rma(&self) -> RmaIdx {
        debug_assert!(self.flags.contains(WrFlags::RMA));
        RmaIdx::of(self.pull_op)
    }

    /// The buffer of a PACK.
    #[inline]
    pub(super) fn pack_buf(&self) -> PackIdx {
        debug_assert!(self.flags.contains(WrFlags::GROUP));
        PackIdx::of(self.pull_gen)
    }
}

impl Linked<0, TxIdx> for TxWr {
    fn link(&mut self) -> &mut Link<TxIdx> {
        &mut self.queue
    }

    fn link_ref(&self) -> &Link<TxIdx> {
        &self.queue
    }
}

impl Linked<1, TxIdx> for TxWr {
    fn link(&mut self) -> &mut Link<TxIdx> {
        &mut self.of_peer
    }

    fn link_ref(&self) -> &Link<TxIdx> {
        &self.of_peer
    }
}

/// A posted receive. `repr(C)`, so that the common flags and the endpoint are written as one word.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct RecvWr {
    pub(crate) context: u64,
    /// Bytes that messages have used so far, for a multi-receive.
    pub(crate) used: u64,
    /// The receive's memory, unless that is a list.
    pub(crate) buf: Span,
    pub(crate) ep: EpIdx,
    pub(crate) is: RecvFlags,
    /// Messages that are being placed.
    pub(crate) active: u32,
}

bitflags! {
    /// Kind and flags of a posted receive.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub(crate) struct RecvFlags: u32 {
        /// The common case: the receive takes one message into one span, writes a completion on
        /// success, and belongs to no deferred endpoint.
        const SIMPLE = 1 << 0;
        const TAGGED = 1 << 1;
        /// A success writes a completion.
        const SIGNALED = 1 << 2;
        /// The memory is in several pieces, described in `Receives::lists`, to keep the record
        /// short.
        const LIST = 1 << 3;
        /// The receive takes many messages.
        const MULTI = 1 << 4;
        /// The receive is no longer in matching: the free tail is too short, or it was cancelled.
        const CLOSED = 1 << 5;
    }
}

impl RecvWr {
    #[inline(always)]
    pub(crate) fn is(&self, flag: RecvFlags) -> bool {
        self.is.contains(flag)
    }

    /// Flags of every completion entry of the receive.
    #[inline(always)]
    pub(crate) fn cq_flags(&self) -> CqFlags {
        CqFlags::RECV | if self.is(RecvFlags::TAGGED) { CqFlags::TAGGED } else { CqFlags::MSG }
    }

    /// Turns the record into a simple receive of endpoint `ep`. The slot is vacant, or its last
    /// receive has ended.
    #[inline(always)]
    pub(crate) fn set_simple(&mut self, ep: EpIdx, tagged: bool, context: u64, buf: Span) {
        debug_assert!((self.used, self.active) == (0, 0));
        (self.context, self.buf, self.ep) = (context, buf, ep);
        self.is = RecvFlags::SIMPLE | RecvFlags::SIGNALED;
        self.is.set(RecvFlags::TAGGED, tagged);
    }
}

impl Vacant for RecvWr {
    fn vacant() -> Self {
        let (buf, is) = (Span::EMPTY, RecvFlags::empty());
        Self { context: 0, used: 0, buf, ep: EpIdx::NONE, is, active: 0 }
    }
}

impl Receive for RecvWr {
    #[inline(always)]
    fn is_simple(&self) -> bool {
        self.is(RecvFlags::SIMPLE)
    }
}

/// An unexpected message: it arrived before its receive was posted.
#[derive(Debug)]
pub(crate) struct UnexpectedMsg {
    pub(crate) peer: PeerIdx,
    /// Incarnation of the peer that sent it.
    pub(crate) inc: u64,
    pub(crate) src_ep: u16,
    /// Destination endpoint.
    pub(crate) ep: EpIdx,
    pub(crate) tagged: bool,
    pub(crate) imm: Option<u64>,
    pub(crate) msg_len: u64,
    /// The sender's request if the message has to be pulled, else `NONE`.
    pub(crate) src_op: u32,
    pub(crate) src_gen: u32,
    /// Credits that the message holds.
    pub(crate) units: u32,
    pub(crate) chain: Chain,
    /// Every segment has arrived.
    pub(crate) complete: bool,
    /// A peek or an announcement took the message out of matching.
    pub(crate) claimed: bool,
    /// The receive that waits for the last segment, or `NONE`.
    pub(crate) recv: RecvIdx,
    /// Offset in that receive's buffer at which the message is placed.
    pub(crate) base: u64,
    /// The session ended before the message was pulled: claiming it returns an error.
    pub(crate) dead: bool,
    /// The message was discarded: it is freed when the last segment arrives.
    pub(crate) discard: bool,
}

impl UnexpectedMsg {
    pub(crate) fn is_announced(&self) -> bool {
        self.src_op != NONE
    }
}

/// A message being pulled: requested in parts and placed as DATA arrives.
#[derive(Debug)]
pub(crate) struct Pull {
    pub(crate) peer: PeerIdx,
    pub(crate) src_op: u32,
    pub(crate) src_gen: u32,
    /// Destination receive; `NONE` if it has ended.
    pub(crate) recv: RecvIdx,
    /// The pull is a read of the peer's memory: its bytes go to the memory of transmit request
    /// `wr`. If that is `NONE` the read was abandoned: its bytes are discarded and only counted.
    pub(crate) read: bool,
    pub(crate) wr: TxIdx,
    /// Offset in the receive's buffer at which the message starts.
    pub(crate) base: u64,
    pub(crate) msg_len: u64,
    /// Bytes to pull: the message, or as much of it as fits the buffer.
    pub(crate) want: u64,
    pub(crate) requested: u64,
    pub(crate) got: u64,
    /// Bytes that the queued PULL will request; they already count as outstanding.
    pub(crate) requesting: u32,
    pub(crate) src_ep: u16,
    pub(crate) tagged: bool,
    pub(crate) tag: u64,
    pub(crate) imm: Option<u64>,
    /// END status, once no more bytes will be requested.
    pub(crate) end: Option<crate::wire::EndStatus>,
    /// Time of the turn at which bytes last arrived, or of the first request.
    pub(crate) last_rx: Instant,
    /// PSN of the last PULL.
    pub(crate) psn: Psn,
    /// `una` of the session when this pull was last checked.
    pub(crate) una: Psn,
    pub(crate) in_rndv_ctl_q: bool,
    /// The pull waits for room in the pull window.
    pub(crate) waiting: bool,
    pub(crate) queue: Link<PullIdx>,
    pub(crate) of_peer: Link<PullIdx>,
    pub(crate) wait: Link<PullIdx>,
}

impl Pull {
    /// A pull that has requested nothing, of the sender's operation `src_op` with generation
    /// `src_gen`.
    pub(super) fn new(peer: PeerIdx, src_op: u32, src_gen: u32, end: Option<EndStatus>) -> Self {
        Self {
            peer,
            src_op,
            src_gen,
            recv: RecvIdx::NONE,
            read: false,
            wr: TxIdx::NONE,
            base: 0,
            msg_len: 0,
            want: 0,
            requested: 0,
            got: 0,
            requesting: 0,
            src_ep: 0,
            tagged: false,
            tag: 0,
            imm: None,
            end,
            last_rx: Instant(0),
            psn: Psn(0),
            una: Psn(0),
            in_rndv_ctl_q: false,
            waiting: false,
            queue: Link::default(),
            of_peer: Link::default(),
            wait: Link::default(),
        }
    }
}

macro_rules! linked {
    ($list:literal, $field:ident) => {
        impl Linked<$list, PullIdx> for Pull {
            fn link(&mut self) -> &mut Link<PullIdx> {
                &mut self.$field
            }

            fn link_ref(&self) -> &Link<PullIdx> {
                &self.$field
            }
        }
    };
}

linked!(0, queue);
linked!(1, of_peer);
linked!(2, wait);

/// A packet that arrived out of order and waits for an earlier one. Its bytes are in
/// `Reorder::bytes`, in the frame-sized slot with its index.
#[derive(Debug)]
pub(crate) struct OooPacket {
    pub(crate) psn: crate::rel::psn::Psn,
    pub(crate) len: usize,
    pub(crate) link: Link<OooIdx>,
}

impl Linked<0, OooIdx> for OooPacket {
    fn link(&mut self) -> &mut Link<OooIdx> {
        &mut self.link
    }

    fn link_ref(&self) -> &Link<OooIdx> {
        &self.link
    }
}

/// The part of a one-sided operation that its [`TxWr`] has no room for.
#[derive(Debug)]
pub(crate) struct Rma {
    pub(crate) kind: RmaKind,
    /// The remote ranges, the current one, and the progress in it of the packets made so far:
    /// bytes, or elements of an atomic operation.
    pub(crate) iov: RmaList,
    pub(crate) at: usize,
    pub(crate) done: u64,
    /// Sequence number of the operation on the wire, set at its first packet.
    pub(crate) seq: u16,
    /// The pull of a read, while it has one.
    pub(crate) pull: PullIdx,
}

/// Kind of a one-sided operation.
#[derive(Debug)]
pub(crate) enum RmaKind {
    Write,
    Read,
    Atomic(AtomicWr),
}

/// The part of an atomic operation that [`Rma`] has no room for.
#[derive(Debug)]
pub(crate) struct AtomicWr {
    /// `enum fi_op`, `enum fi_datatype` and bytes of an element.
    pub(crate) op: u8,
    pub(crate) ty: u8,
    pub(crate) elem_len: u8,
    /// Bytes of operands and compare values per element.
    pub(crate) sent_len: u8,
    /// The operation fetches the old values.
    pub(crate) fetch: bool,
    pub(crate) tagged: bool,
    /// Destination of the old values.
    pub(crate) result: IoBuf,
    /// Operands, then compare values, if they are too long for the inject memory.
    pub(crate) operands: Vec<u8>,
    /// Elements per packet: `operands` is laid out accordingly. 0 before the first packet.
    pub(crate) segment: u16,
    /// Packets without an answer yet, and bytes answered.
    pub(crate) answers: u32,
    pub(crate) got: u64,
    /// The last packet has been sent.
    pub(crate) all_out: bool,
}

/// A response to a peer's one-sided operation that has packets to send.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) peer: PeerIdx,
    /// The peer's id of its operation.
    pub(crate) dst_op: u32,
    pub(crate) dst_gen: u32,
    pub(crate) kind: ResponseKind,
    pub(crate) queued: bool,
    pub(crate) link: Link<ResponseIdx>,
}

/// The content of a [`Response`].
#[derive(Debug)]
pub(crate) enum ResponseKind {
    /// Bytes of a region.
    Read {
        mr: MrIdx,
        /// Offset of the next byte in the region, and in the peer's operation.
        from: u64,
        to: u64,
        left: u32,
        /// As in [`BodyRef::Mr`](crate::rel::sent::BodyRef), for the last bytes.
        ep: EpIdx,
        counts: ReadCounts,
    },
    /// The payload of a RESP: old values, the bytes of a short read, or none. `offset` as in the
    /// RESP.
    Values { offset: u32, len: u16, short: [u8; Response::SHORT], long: Vec<u8> },
    /// `len` bytes of a read will not come.
    Failed { len: u32, reason: NackReason },
}

const _: () = assert!(atomic::OPERAND_LEN_MAX <= u16::MAX as usize, "the length of old values");

impl Response {
    /// Old values up to this length, bytes, need no memory of their own.
    pub(crate) const SHORT: usize = 16;

    /// Whether the response reads region `m`.
    pub(crate) fn reads(&self, m: MrIdx) -> bool {
        matches!(self.kind, ResponseKind::Read { mr, .. } if mr == m)
    }

    /// The old values.
    pub(crate) fn values(&self) -> &[u8] {
        match &self.kind {
            ResponseKind::Values { len, short, long, .. } => {
                if long.is_empty() {
                    &short[..usize::from(*len)]
                } else {
                    long
                }
            }
            _ => &[],
        }
    }
}

impl Linked<0, ResponseIdx> for Response {
    fn link(&mut self) -> &mut Link<ResponseIdx> {
        &mut self.link
    }

    fn link_ref(&self) -> &Link<ResponseIdx> {
        &self.link
    }
}

/// A completion with remote CQ data that waits for room in its queue. It holds an eager unit of its
/// sender, so their number is bounded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LateCompletion {
    pub(crate) ep: EpIdx,
    pub(crate) peer: PeerIdx,
    /// Incarnation of the sending peer, and its endpoint. The source address is looked up when the
    /// entry is written.
    pub(crate) inc: u64,
    pub(crate) src_ep: u16,
    pub(crate) cqe: crate::types::Cqe,
}
