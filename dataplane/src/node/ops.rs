//! Operations in flight: what was posted and is not yet complete.

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
    /// What a transmit request asked for.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub(crate) struct WrFlags: u32 {
        /// A tagged message.
        const TAGGED = 1;
        /// `data` goes along.
        const IMM = 1 << 1;
        /// The payload was copied to the node's inject memory.
        const INJECTED = 1 << 2;
        /// Waits until every earlier operation to the peer has completed.
        const FENCE = 1 << 3;
        /// Writes a completion on success.
        const CQE = 1 << 4;
        /// Completes only when the peer has processed it.
        const DELIVERY = 1 << 5;
        /// Completes when the peer has matched it, so it is announced (RNDV) whatever its length.
        const MATCH = 1 << 6;
        /// Completes as soon as its memory may be reused.
        const EARLY = 1 << 7;
        /// Another operation follows at once (`FI_MORE`).
        const MORE = 1 << 8;
        /// In the queue of messages.
        const IN_SEND_Q = 1 << 9;
        /// In the queue of data that the peer asked for.
        const IN_RNDV_DATA_Q = 1 << 10;
        /// The success completion has been written; only a copy of ours is still in flight.
        const REPORTED = 1 << 11;
        /// Announced by RNDV.
        const ANNOUNCED = 1 << 12;
        /// Every packet was handed to the port once, or the peer said END.
        const ALL_SENT = 1 << 13;
        /// Packed with others when it left.
        const PACKED = 1 << 14;
        /// A one-sided operation: `pull_op` is its [`Rma`] record, `len` and `sent` count bytes of
        /// a read or write, elements of an atomic operation.
        const RMA = 1 << 15;
        /// A packet of several messages: `pull_gen` is its buffer, `tag` how many they are, `len`
        /// and `sent` count bytes of it, and `data` the credit that they use.
        const GROUP = 1 << 16;
        /// The address names a life of the peer.
        const NAMED = 1 << 17;
    }
}

/// The copy of an injected message.
pub(super) type Inject = [u8; Node::INJECT_SIZE];

/// A transmit request: a message, or the part of a one-sided operation that is handled like one.
/// Its memory is apart, in `TxWrs`.
#[derive(Debug)]
pub(crate) struct TxWr {
    pub(crate) context: u64,
    pub(crate) tag: u64,
    pub(crate) data: u64,
    pub(crate) len: u64,
    /// Bytes put into packets so far.
    pub(crate) sent: u64,
    /// Bytes the peer asked for so far.
    pub(crate) asked: u64,
    /// The peer's pull; of a packed message, the next one of the packet.
    pub(crate) pull_op: u32,
    pub(crate) pull_gen: u32,
    pub(crate) peer: PeerIdx,
    pub(crate) ep: EpIdx,
    /// Packets of this message that are kept until acknowledged.
    pub(crate) unacked: u32,
    pub(crate) dst_ep: u16,
    /// The receive context that the address named, 0 if none.
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
            asked: 0,
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
    /// Whether nothing of it is outstanding.
    #[inline(always)]
    pub(super) fn is_done(&self) -> bool {
        self.flags.contains(WrFlags::ALL_SENT) && self.unacked == 0
    }

    /// `len` bytes at `offset` of its memory: the injected copy, or the lent buffer.
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
    /// Bytes taken, for a multi-receive.
    pub(crate) used: u64,
    /// Its memory, unless that is a list.
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
        /// The common case: takes one message, into one span, writes a completion on success, and
        /// is no deferred endpoint's.
        const SIMPLE = 1 << 0;
        const TAGGED = 1 << 1;
        /// Writes a completion on success.
        const SIGNALED = 1 << 2;
        /// Its memory is in several pieces and described in
        /// `Receives::lists`, so that what is moved in and out of a slot is short.
        const LIST = 1 << 3;
        /// Takes many messages.
        const MULTI = 1 << 4;
        /// No longer in matching: the free tail is too short, or it was cancelled.
        const CLOSED = 1 << 5;
    }
}

impl RecvWr {
    #[inline(always)]
    pub(crate) fn is(&self, what: RecvFlags) -> bool {
        self.is.contains(what)
    }

    /// What every entry about it says.
    #[inline(always)]
    pub(crate) fn cq_flags(&self) -> CqFlags {
        CqFlags::RECV | if self.is(RecvFlags::TAGGED) { CqFlags::TAGGED } else { CqFlags::MSG }
    }

    /// Becomes a simple receive of endpoint `ep`, in a vacant slot or one whose receive has ended.
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
    /// The life of the peer that sent it.
    pub(crate) inc: u64,
    pub(crate) src_ep: u16,
    /// Endpoint it is for.
    pub(crate) ep: EpIdx,
    pub(crate) tagged: bool,
    pub(crate) imm: Option<u64>,
    pub(crate) msg_len: u64,
    /// The announcer's request if it has to be pulled, else `NONE`.
    pub(crate) src_op: u32,
    pub(crate) src_gen: u32,
    /// Credits it holds.
    pub(crate) units: u32,
    pub(crate) chain: Chain,
    /// Every segment has arrived.
    pub(crate) complete: bool,
    /// Claimed: a peek or an announcement took it out of matching.
    pub(crate) claimed: bool,
    /// The receive that waits for the last segment, or `NONE`.
    pub(crate) recv: RecvIdx,
    /// Where in that receive's buffer it goes.
    pub(crate) base: u64,
    /// Its session ended before it was pulled: claiming it gives an error.
    pub(crate) dead: bool,
    /// Discarded: freed when the last segment arrives.
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
    /// The receive it goes to; `NONE` if that is gone.
    pub(crate) recv: RecvIdx,
    /// A read of the peer's memory: its bytes go to the memory of transmit request `wr`. If that is
    /// `NONE` the read was given up: its bytes are discarded and only counted.
    pub(crate) read: bool,
    pub(crate) wr: TxIdx,
    /// Where in the receive's buffer it starts.
    pub(crate) base: u64,
    pub(crate) msg_len: u64,
    /// Bytes wanted: the message, or as much of it as fits the buffer.
    pub(crate) want: u64,
    pub(crate) asked: u64,
    pub(crate) got: u64,
    /// Bytes that the queued PULL will ask for; they count as outstanding already.
    pub(crate) asking: u32,
    pub(crate) src_ep: u16,
    pub(crate) tagged: bool,
    pub(crate) tag: u64,
    pub(crate) imm: Option<u64>,
    /// END status, once nothing more will be asked for.
    pub(crate) end: Option<crate::wire::EndStatus>,
    /// When its bytes last arrived, or when it first asked: the time of the turn.
    pub(crate) last_rx: Instant,
    /// The PSN of its last PULL.
    pub(crate) psn: Psn,
    /// `una` of the session when it was last checked for this pull.
    pub(crate) una: Psn,
    pub(crate) in_rndv_ctl_q: bool,
    /// Waits for room in the pull window.
    pub(crate) waiting: bool,
    pub(crate) queue: Link<PullIdx>,
    pub(crate) of_peer: Link<PullIdx>,
    pub(crate) wait: Link<PullIdx>,
}

impl Pull {
    /// One that has asked for nothing, of the sender's operation `src_op` with that generation.
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
            asked: 0,
            got: 0,
            asking: 0,
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

/// A packet that arrived out of order and waits for an earlier one. Its bytes lie in
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
    /// The remote ranges, the current one, and how far into it the packets made so far reach:
    /// bytes, or elements of an atomic operation.
    pub(crate) iov: RmaList,
    pub(crate) at: usize,
    pub(crate) done: u64,
    /// Number of the operation on the wire, from its first packet on.
    pub(crate) seq: u16,
    /// The pull of a read, while there is one.
    pub(crate) pull: PullIdx,
}

/// Which one-sided operation.
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
    /// It fetches the old values.
    pub(crate) fetch: bool,
    pub(crate) tagged: bool,
    /// Where they go.
    pub(crate) result: IoBuf,
    /// Operands, then compare values, if they are too long for the inject memory.
    pub(crate) operands: Vec<u8>,
    /// Elements of a packet, from the first on: `operands` is laid out so; 0 before.
    pub(crate) segment: u16,
    /// Packets without an answer yet, and bytes answered.
    pub(crate) answers: u32,
    pub(crate) got: u64,
    /// The last packet has left.
    pub(crate) all_out: bool,
}

/// A response to a peer's one-sided operation that has packets to send.
#[derive(Debug)]
pub(crate) struct Response {
    pub(crate) peer: PeerIdx,
    /// The peer's name of its operation.
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
        /// Offset in the region of the next byte, and in the peer's operation.
        from: u64,
        to: u64,
        left: u32,
        /// As in [`BodyRef::Mr`](crate::rel::sent::BodyRef), of the last bytes.
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

    /// Whether it reads region `m`.
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
pub(crate) struct Late {
    pub(crate) ep: EpIdx,
    pub(crate) peer: PeerIdx,
    /// The life of the peer that sent it, and its endpoint. The source address is looked up when
    /// the entry is written.
    pub(crate) inc: u64,
    pub(crate) src_ep: u16,
    pub(crate) cqe: crate::types::Cqe,
}
