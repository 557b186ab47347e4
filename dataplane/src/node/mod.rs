//! A node: the endpoints, queues, address vectors and peers of one domain, and the calls on them.
//!
//! Sans-IO. The owner calls [`Node::on_frame`] with received frames, [`Node::transmit`] to send,
//! and both again at [`Node::next_deadline`], each with the current time. The poll loop in
//! [`crate::poll`] does so with a port and a clock, the simulator with virtual ones.

mod acked;
mod acks;
mod arrival;
mod avs;
mod backoff;
mod certificates;
mod claims;
mod cntrs;
mod coll;
mod complete;
mod cookie;
mod cqs;
mod credit;
mod deferred_ep;
mod due;
mod ep;
mod eps;
mod failed;
mod fast_eager;
mod fast_op;
mod fast_rma;
mod fast_segment;
mod fast_target;
mod input;
mod keys;
mod lost;
mod mr;
mod mtu;
mod multicast;
mod nagle;
mod near;
mod notice;
mod objects;
mod opening;
mod ops;
mod other_key;
mod output;
mod pack;
mod packet;
mod path;
mod peer;
mod peers_by_station;
mod pending_reset;
mod port;
mod post;
mod pull;
mod recv;
mod reorder;
mod rma;
mod rma_in;
mod rma_list;
mod rma_out;
mod round_trips;
mod route;
mod secured;
mod segments;
mod self_loop;
mod sep;
mod session;
mod srx;
mod stats;
mod stuck;
mod tally;
#[cfg(test)]
mod tests;
mod timers;
mod turn;
mod tx;
mod versions;
mod who;

use std::collections::VecDeque;
use std::ops::RangeInclusive;

use barewire_driver::backend::any_board::AnyBoard;
use barewire_driver::frame::{Body, ETH_HDR_LEN, TxFrame};
use barewire_driver::mem::{InlineBytes, IoBuf};
use barewire_driver::port::{PortCaps, Presence, Station, Tx};

use crate::error::{Error, Result};
use crate::flags::{BindFlags, Caps, OpFlags};
use crate::idx::{AvIdx, CntrIdx, CqIdx, EpIdx, FastOpIdx, PeerIdx, ResponseIdx, SepIdx};
use crate::proto::blocks::UNIT;
use crate::proto::matching::UnexpectedPool;
use crate::rel::sack::BitmapPool;
use crate::rel::sent::{SentPool, WINDOW, WINDOW_LOSSLESS};
use crate::seal::Keyring;
use crate::slab::{Handle, Slab};
use crate::table::Table;
use crate::types::{Cqe, FiAddr, INCARNATION_MAX, Instant, Tenant};
use crate::wheel::Wheel;
use crate::wire::{self, Base, EagerMsg, FrameHead, HeadOut, OpenOp};

use avs::{AvTable, Avs};
use cntrs::Cntrs;
use cqs::{CqTable, Cqs};
use credit::Blocks;
pub(crate) use due::{Due, Todo};
use eps::Eps;
use opening::Openings;
use ops::{Response, UnexpectedMsg};
use pack::Packs;
pub(crate) use packet::Joined;
use peer::Peers;
use peers_by_station::PeersByStation;
use pull::Pulls;
use recv::{Reassemblies, Receives};
use reorder::Reorder;
use rma::SpareBuffers;
use self_loop::SelfLoop;
use tally::Observed;
use tx::TxWrs;

pub use crate::cntr::CntrEvents;
pub use crate::cq::{NoReader, Reader};
pub use claims::{CLAIMS_MAX, Claim};
use coll::Coll;
pub use coll::{
    BLOCK_MAX, CallWord as CollWord, CollAttr, CollCall, CollForce, CollReq, FI_NOOP, FI_VOID,
    GroupId, JoinEvent, JoinModel, JoinReq, Kind as CollKind, MEMBERS_MAX, Role,
    query as query_collective,
};
pub use ep::EpCounters;
pub use failed::FailedInject;
use fast_op::FastOp;
pub use fast_rma::{FastAtomic, FastCall, FastRead, FastWrite};
pub use mr::{MrId, MrReq, Mrs};
pub use multicast::{MEMBERS_MAX as GROUP_MEMBERS_MAX, McId, Multicast};
pub use nagle::HoldWatch;
pub use notice::{EndReason, Notice, SessionEnd, Waited};
pub use port::PortState;
pub use rma::{AtomicReq, ReadReq, WriteReq, atomic_valid};
pub use rma_list::{RmaIov, RmaList};
pub use round_trips::RoundTrips;
pub use sep::{receive_caps, transmit_caps};
pub use stats::{Levels, NodeCounters, SessionInfo, SessionStats, Survey, SurveySink, Wait};
pub(crate) use turn::INBOX_BURSTS;
pub use turn::Turn;
pub use who::{HERES_MAX, Here, Names, QUERIES_MAX};

/// Sizes and times of a node. All tables get their sizes when the node is made; the table of peers
/// grows when the application inserts addresses.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// Incarnation: random number of this instance of the domain, 1 to [`INCARNATION_MAX`].
    pub incarnation: u64,
    /// Seed of all random values of the node (first sequence numbers, sids). A domain takes it from
    /// the kernel, a simulation from its own seed.
    pub seed: u64,
    /// Silence after which a peer that owes an answer is declared dead (T_dead), nanoseconds.
    /// Default 5 s; at least 100 ms. A dead peer's operations end within 1.1 times this.
    pub t_dead_ns: u64,
    /// Longest message sent eagerly, bytes, in as many frames as it takes; at most 1 MiB. Default:
    /// 64 KiB where a frame holds 8 KiB, else 16 KiB.
    pub eager_max: Option<usize>,
    /// Initial size of the table of peers. Default 4,096; an idle peer costs at most 512 bytes.
    /// Peers that were not inserted share it; idle ones of these are evicted for new ones.
    pub peer_max: usize,
    /// Limit to which `peer_max` grows when the application inserts more addresses, or [opens a
    /// vector](Sessions::av_open) for more; peers that were not inserted never enlarge it. Default
    /// 2^20, the largest possible.
    pub peer_limit: usize,
    /// Transmit operations in flight, all endpoints together, 1 to 2^24. Default 65,536. The tables
    /// reserve address space; they use as much memory as was ever in use at once.
    pub tx_wr_max: usize,
    /// Posted receives, all endpoints together, 1 to 2^24. Default 262,144. Memory as for
    /// `tx_wr_max`.
    pub rx_wr_max: usize,
    /// Memory for messages without a posted receive (unexpected messages), bytes, 16 KiB to
    /// 512 GiB. Touched only when used. Default 256 MiB.
    pub unexpected_bytes: usize,
    /// Bytes of pulled messages in flight, all peers together. Default 4 MiB.
    pub pull_window: usize,
    /// Packets in flight of a session on a lossy path, in each direction, if the peer accepts as
    /// many. A power of two, 64 to 4,096; default 4,096.
    pub window: u32,
    /// Memory regions registered at once. Default 65,536; 2^20 at most.
    pub mr_max: usize,
    /// Whether frames carry a CRC32C trailer. Default: if the port is lossy. The owner of the port
    /// may know better (`Port::damages`).
    pub crc: Option<bool>,
    /// Algorithms of collectives. All members of a group must have the same, or a join fails.
    /// Default: those that cost least on the ports of the members.
    pub coll: CollForce,
    /// How long a join waits for the other members, nanoseconds. Default 60 s.
    pub join_ns: u64,
    /// Accepts sessions also from peers that do not name this incarnation, so that they need to
    /// know the MAC only. Default yes; a domain of an application sets no unless it is [reached by
    /// name](Control::reach_by_name).
    pub by_name: bool,
    /// Only peers in an endpoint's address vector reach it, or a region through it. Default no.
    /// Disables the fast path, as the source of every packet is looked up.
    pub inserted: bool,
    /// The keys that seal frames on a lossy port: only nodes with one of these keys have sessions
    /// with this node. Default none: frames are neither authenticated nor encrypted. Sessions
    /// through this machine's memory are never sealed. The node takes the keys out of its settings.
    pub keys: Option<Keyring>,
    /// Whether the secrets of sessions are exported, so that recordings can be decrypted
    /// (`Openings::take_secrets`). Default no.
    pub export_secrets: bool,
    /// Age at which the key of a session's frames is replaced by the next, nanoseconds, at least
    /// 1,000,000: each end does so for its own frames. Default an hour.
    pub rekey_ns: u64,
    /// Whether frames are sealed with AES if the peer offers it too, else with ChaCha20. Default:
    /// whether this processor has AES instructions.
    pub aes: bool,
}

impl NodeSettings {
    fn check(&self) -> Result<&Self> {
        let check = |ok: bool, why| if ok { Ok(()) } else { Err(Error::Invalid(why)) };
        let is_incarnation = (1..=INCARNATION_MAX).contains(&self.incarnation);
        check(is_incarnation, "incarnation must be 1 to 2^48 - 1")?;
        check(self.t_dead_ns >= 100_000_000, "T_dead must be at least 100 ms")?;
        check((1..=Node::PEER_MAX).contains(&self.peer_max), "peer_max must be 1 to 2^20")?;
        let requests = 1..=Node::WR_MAX;
        check(requests.contains(&self.tx_wr_max), "tx_wr_max must be 1 to 2^24")?;
        check(requests.contains(&self.rx_wr_max), "rx_wr_max must be 1 to 2^24")?;
        let unexpected = Node::UNEXPECTED_BYTES.contains(&self.unexpected_bytes);
        check(unexpected, "unexpected_bytes must be 16 KiB to 512 GiB")?;
        check(self.eager_max.is_none_or(|max| max <= 1 << 20), "eager_max must be at most 1 MiB")?;
        check(self.mr_max <= Node::MR_MAX, "mr_max must be at most 2^20")?;
        let window = self.window.is_power_of_two() && (64..=WINDOW).contains(&self.window);
        check(window, "window must be a power of two, 64 to 4,096")?;
        check(self.rekey_ns >= 1_000_000, "rekey_ns must be at least 1 ms")?;
        check(self.pull_window > 0, "pull_window must not be 0").map(|()| self)
    }

    /// Checks that there is address space for the largest table: an allocation without it would
    /// abort the process.
    fn check_room(&self) -> Result<()> {
        let sent = SentPool::room(sent_max(self));
        let largest = self.unexpected_bytes.max(Pulls::room(self)).max(sent);
        Vec::<u8>::new().try_reserve_exact(largest).map_err(|_| Error::NoMem)
    }

    /// [`check`](Self::check), and whether there is room and a certificate fits into a frame of the
    /// port.
    fn check_on(&self, caps: &PortCaps) -> Result<&Self> {
        self.check()?;
        self.check_room()?;
        certificates::check_fit(self, caps, usable_mtu(caps)?)?;
        Ok(self)
    }

    /// Longest message sent eagerly in one frame, if the frame holds it, and in several, on a port
    /// with this MTU. A rendezvous costs three frames and a round trip; an eager message costs 16
    /// bytes more in each frame.
    fn eager_max(&self, mtu: usize) -> [usize; 2] {
        let max = self.eager_max.unwrap_or(if mtu >= 8 << 10 { 64 << 10 } else { 16 << 10 });
        [max.max(4096), max]
    }
}

impl Default for NodeSettings {
    fn default() -> Self {
        Self {
            incarnation: 0,
            seed: 0,
            t_dead_ns: 5_000_000_000,
            eager_max: None,
            peer_max: 4096,
            peer_limit: Node::PEER_MAX,
            tx_wr_max: 65_536,
            rx_wr_max: 262_144,
            unexpected_bytes: 256 << 20,
            pull_window: 4 << 20,
            window: WINDOW,
            mr_max: 65536,
            crc: None,
            coll: CollForce::No,
            join_ns: 60_000_000_000,
            by_name: true,
            inserted: false,
            keys: None,
            export_secrets: false,
            rekey_ns: 3_600_000_000_000,
            aes: crate::seal::has_aes(),
        }
    }
}

/// A completion queue of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CqId(pub(crate) Handle<CqIdx>);

impl CqId {
    /// Whether the queue, which is open, is in slot `cq`: see [`Reader::reads`].
    #[inline(always)]
    pub fn is_at(&self, cq: CqIdx) -> bool {
        self.0.idx() == cq
    }
}

/// A counter of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CntrId(pub(crate) Handle<CntrIdx>);

/// An address vector of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AvId(pub(crate) Handle<AvIdx>);

/// An endpoint of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EpId(pub(crate) Handle<EpIdx>);

/// A scalable endpoint of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SepId(pub(crate) Handle<SepIdx>);

/// Attributes of an endpoint.
#[derive(Clone, Copy, Debug)]
pub struct EpAttr {
    /// The number by which peers address it; `None` takes the lowest free one.
    pub number: Option<u16>,
    /// Granted capabilities. Calls outside them are refused with `FI_EOPNOTSUPP`.
    pub caps: Caps,
    /// Maximum sends in flight; one more is `FI_EAGAIN`. Default 1,024.
    pub tx_size: usize,
    /// Maximum posted receives. Default 4,096.
    pub rx_size: usize,
    /// Default flags of transmit calls without a flags argument.
    pub tx_op_flags: OpFlags,
    /// Default flags of receive calls without a flags argument.
    pub rx_op_flags: OpFlags,
    /// Announce unexpected messages by a completion instead of waiting for a receive
    /// (`FI_BUFFERED_RECV`).
    pub buffered_recv: bool,
}

impl Default for EpAttr {
    fn default() -> Self {
        Self {
            number: None,
            caps: Caps::MSG | Caps::TAGGED | Caps::SEND | Caps::RECV,
            tx_size: 1024,
            rx_size: 4096,
            tx_op_flags: OpFlags::empty(),
            rx_op_flags: OpFlags::empty(),
            buffered_recv: false,
        }
    }
}

/// Untagged or tagged: these match separately.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MsgKind {
    /// `fi_msg`.
    Msg,
    /// `fi_tagged`.
    Tagged,
}

/// A message to send. `buf` is lent until the operation has completed or, with [`OpFlags::INJECT`],
/// until the call returns.
#[derive(Debug)]
pub struct SendReq {
    /// Untagged or tagged.
    pub kind: MsgKind,
    /// The message.
    pub buf: IoBuf,
    /// The destination.
    pub dest: FiAddr,
    /// Tag; 0 for [`MsgKind::Msg`].
    pub tag: u64,
    /// Remote CQ data, sent if `flags` has `REMOTE_CQ_DATA`.
    pub data: u64,
    /// Context, returned in the completion.
    pub context: u64,
    /// All flags of the operation: the caller has merged in the endpoint's default flags.
    pub flags: OpFlags,
    /// One of the `inject` calls: no success completion is ever written.
    pub no_completion: bool,
}

/// A receive to post. `buf` is lent until the operation has completed.
#[derive(Debug)]
pub struct RecvReq {
    /// Untagged or tagged.
    pub kind: MsgKind,
    /// The buffer of the message.
    pub buf: IoBuf,
    /// The source; [`crate::types::FI_ADDR_UNSPEC`] for any. Ignored without `FI_DIRECTED_RECV`, or
    /// for a tagged receive `FI_TAGGED_DIRECTED_RECV`.
    pub src: FiAddr,
    /// Tag to match.
    pub tag: u64,
    /// Bits of the tag that are ignored.
    pub ignore: u64,
    /// Context, returned in the completion. For `CLAIM` and `DISCARD` it names the announced
    /// message.
    pub context: u64,
    /// All flags of the operation, as for [`SendReq::flags`].
    pub flags: OpFlags,
}

/// Accepts the frames that a node sends.
pub trait FrameSink {
    /// Whether the type of the port behind the sink is lossless: then the node, made for that port,
    /// need not [be queried](Node::is_lossless).
    #[inline(always)]
    fn is_lossless(&self) -> bool {
        false
    }

    /// As [`barewire_driver::port::Port::tx`].
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx;

    /// As [`barewire_driver::port::Port::presence`].
    fn presence(&mut self, _station: Station) -> Presence {
        Presence::Unknown
    }

    /// As [`barewire_driver::port::Port::is_near`].
    fn is_near(&mut self, _station: Station) -> bool {
        false
    }

    /// As [`AnyPort::board`](barewire_driver::backend::any_port::AnyPort::board).
    fn board(&mut self, _members: &[Station]) -> Option<AnyBoard> {
        None
    }

    /// As [`barewire_driver::port::Port::lacks_memory`].
    fn lacks_memory(&self) -> bool {
        false
    }

    /// [`send`](Self::send) for a frame that no other follows: a port that batches frames flushes.
    #[inline]
    fn send_alone(&mut self, frame: &TxFrame<'_>) -> Tx {
        self.send(frame)
    }

    /// [`send_alone`](Self::send_alone) for a short frame, written in place if the port supports
    /// that.
    #[inline]
    fn send_in_place<const H: usize>(&mut self, frame: &impl InPlaceFrame<H>) -> Tx
    where
        Self: Sized,
    {
        send_whole(self, frame)
    }

    /// [`send_alone`](Self::send_alone) for an eager message without a checksum, written in place
    /// if the port supports that.
    #[inline]
    fn send_msg(&mut self, msg: &impl Message) -> Tx
    where
        Self: Sized,
    {
        let (bytes, len) = msg.msg().emit(&msg.head(), msg.ar());
        let body = Body::Io { buf: msg.body(), offset: 0, len: msg.body().len() };
        let crc = msg.crc().map(u32::to_le_bytes);
        let tail = crc.as_ref().map_or(&[][..], |crc| crc);
        self.send_alone(&TxFrame { head: &bytes[..len], body, tail })
    }
}

/// Sends a short frame that is built on the stack first. (Out of line, so that callers need not
/// keep the frame in memory.)
#[inline(always)]
pub(crate) fn send_whole<const H: usize>(
    out: &mut impl FrameSink,
    frame: &impl InPlaceFrame<H>,
) -> Tx {
    let mut head = [0; H];
    frame.put(&mut head);
    match frame.part() {
        Some((buf, offset, len)) => send_pieces(out, &head, Body::Io { buf, offset, len }),
        None => send_with_inline(out, &head, frame.inline_bytes()),
    }
}

#[inline(never)]
fn send_with_inline(out: &mut impl FrameSink, head: &[u8], bytes: InlineBytes) -> Tx {
    send_pieces(out, head, Body::Bytes(&bytes.to_bytes()[..bytes.len()]))
}

#[cold]
#[inline(never)]
fn send_pieces(out: &mut impl FrameSink, head: &[u8], body: Body<'_>) -> Tx {
    out.send_alone(&TxFrame { head, body, tail: &[] })
}

/// A frame whose first `H` bytes are written field by field, followed by a few bytes or by part of
/// the application's memory.
pub trait InPlaceFrame<const H: usize> {
    /// The destination, as [`Station::word`].
    fn dst(&self) -> u64;

    /// Writes the first `H` bytes.
    fn put(&self, out: &mut impl HeadOut);

    /// Bytes after the head: none by default.
    #[inline(always)]
    fn inline_bytes(&self) -> InlineBytes {
        InlineBytes::NONE
    }

    /// The payload as (buffer, offset, length), if it is not [`inline_bytes`](Self::inline_bytes).
    #[inline(always)]
    fn part(&self) -> Option<(&IoBuf, usize, usize)> {
        None
    }
}

/// A sink that sends nothing: for callers of `on_frame` that cannot answer at once.
pub struct NoReply;

impl FrameSink for NoReply {
    fn send(&mut self, _: &TxFrame<'_>) -> Tx {
        Tx::Full
    }

    #[inline(always)]
    fn send_in_place<const H: usize>(&mut self, _: &impl InPlaceFrame<H>) -> Tx {
        Tx::Full
    }
}

/// A reader of queue `cq` that lends each entry to `put`.
pub struct CqReader<'a, F> {
    /// The queue, found empty just before. (A reference, so that it occupies no register.)
    pub cq: &'a CqId,
    /// Takes an entry.
    pub put: F,
}

impl<F: FnOnce(&Cqe)> Reader for CqReader<'_, F> {
    #[inline(always)]
    fn reads(&self, cq: CqIdx) -> bool {
        self.cq.is_at(cq)
    }

    #[inline(always)]
    fn take(self, cqe: &Cqe) {
        (self.put)(cqe);
    }
}

/// Adapts `dyn FrameSink` where a sized sink is wanted.
pub(crate) struct DynSink<'a>(pub(crate) &'a mut dyn FrameSink);

impl FrameSink for DynSink<'_> {
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        self.0.send(frame)
    }

    fn send_alone(&mut self, frame: &TxFrame<'_>) -> Tx {
        self.0.send_alone(frame)
    }

    fn presence(&mut self, station: Station) -> Presence {
        self.0.presence(station)
    }

    fn is_near(&mut self, station: Station) -> bool {
        self.0.is_near(station)
    }
}

/// An eager message that can be written in place.
pub trait Message {
    /// The head of the frame.
    fn head(&self) -> FrameHead;

    /// The checksum after the payload, if there is one.
    #[inline(always)]
    fn crc(&self) -> Option<u32> {
        None
    }

    /// Whether it requests an acknowledgement (AR).
    fn ar(&self) -> bool;

    /// Its remote CQ data.
    fn imm(&self) -> Option<u64>;

    /// The part after the head.
    fn msg(&self) -> EagerMsg;

    /// Writes the bytes before the remote CQ data and the payload.
    #[inline(always)]
    fn put(&self, out: &mut impl HeadOut) {
        EagerMsg::put(|| self.head(), || self.msg(), self.ar(), out);
    }

    /// The payload.
    fn body(&self) -> &IoBuf;
}

impl<F: FnMut(&TxFrame<'_>) -> Tx> FrameSink for F {
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        self(frame)
    }
}

/// A control packet to a node without a session: a complete frame.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reply {
    pub(crate) bytes: [u8; Self::LEN],
    pub(crate) len: usize,
}

impl Reply {
    /// Length of the longest, an OPEN with a checksum.
    pub(crate) const LEN: usize = wire::BASE_LEN + OpenOp::LEN + wire::TRAILER_LEN;

    /// A packet of `base` and an operation header, without payload.
    fn new(base: &Base, op: &[u8]) -> Self {
        let mut reply = Self { bytes: [0; Self::LEN], len: wire::BASE_LEN + op.len() };
        let (head, rest) = reply.bytes.split_first_chunk_mut().expect("a reply holds a head");
        base.emit(head);
        rest[..op.len()].copy_from_slice(op);
        if base.crc {
            let crc = wire::crc_of_head(&reply.bytes[..reply.len]).to_le_bytes();
            reply.bytes[reply.len..reply.len + wire::TRAILER_LEN].copy_from_slice(&crc);
            reply.len += wire::TRAILER_LEN;
        }
        reply
    }

    /// The same reply, to be sealed under the key of `tenant`.
    pub(crate) fn under(mut self, tenant: Tenant) -> Self {
        if tenant != Tenant::NONE {
            wire::sealed::set_tenant(&mut self.bytes, tenant);
        }
        self
    }

    pub(super) fn open(base: &Base, op: &OpenOp) -> Self {
        let mut bytes = [0; OpenOp::LEN];
        op.emit(&mut bytes);
        Self::new(base, &bytes)
    }
}

/// Control packets for stations without a session.
#[derive(Debug)]
pub(crate) struct Replies {
    pub(crate) queue: VecDeque<Reply>,
    /// Replies that may be queued until a millisecond after `refilled`.
    tokens: u32,
    refilled: Instant,
}

impl Default for Replies {
    fn default() -> Self {
        let (queue, tokens) =
            (VecDeque::with_capacity(session::REPLIES_MAX), session::REPLIES_PER_MS);
        Self { queue, tokens, refilled: Instant(0) }
    }
}

/// See the module. The fields are parts with methods of their own.
#[derive(Debug)]
pub struct Node {
    pub(crate) settings: NodeSettings,
    /// Properties of its port.
    pub port: PortState,
    /// Longest eager message in one frame, if the frame holds it, and in several.
    eager_max: [usize; 2],

    pub(crate) peers: Peers,
    pub(crate) by_station: PeersByStation,
    /// Peers whose address was removed while a posted receive names them: each entry holds a
    /// reference.
    pub(crate) awaited: Vec<PeerIdx>,
    /// Partly arrived messages of several segments, by
    /// [`Peer::reassembly`](peer::Peer::reassembly). Grows if more peers send such messages at once
    /// than it has room for.
    pub(crate) reassemblies: Reassemblies,
    /// Its endpoints.
    pub eps: Eps,
    /// Its completion queues.
    pub cqs: Cqs,
    /// Its counters.
    pub cntrs: Cntrs,
    /// Its address vectors.
    pub avs: Avs,

    /// Transmit requests.
    pub(crate) tx: TxWrs,
    /// Operations of the fast path in flight.
    fast_ops: Table<FastOp, (), FastOpIdx>,
    /// Packets kept for retransmission.
    pub(crate) sent: SentPool,
    bitmaps: BitmapPool,
    pub(crate) packs: Packs,
    pub(crate) posted: Receives,
    /// Messages without a receive.
    pub(crate) unexpected: UnexpectedPool<UnexpectedMsg>,
    /// Memory of these messages.
    pub(crate) blocks: Blocks,
    /// Messages being pulled.
    pub(crate) pulls: Pulls,
    /// Its memory regions.
    pub mrs: Mrs,
    /// Responses to reads and atomic operations.
    pub(crate) responses: Slab<Response, (), ResponseIdx>,
    /// Operands of the atomic operation being executed.
    pub(crate) scratch: Vec<u8>,
    target: fast_target::TargetCache,
    /// Spare buffers for long operands and old values.
    pub(crate) spare: SpareBuffers,
    /// Packets that arrived early.
    pub(crate) reorder: Reorder,
    /// Collective groups, and calls of collectives.
    pub coll: Coll,

    pub(crate) wheel: Wheel<PeerIdx>,
    /// Pending work besides receiving.
    pub(crate) due: Due,
    acks: acks::Acks,
    pub(crate) replies: Replies,
    /// Its names, and its open name queries.
    pub names: Names,
    /// The multicast groups that its endpoints have joined.
    pub groups: Multicast,
    /// Frames of this node to itself.
    pub(crate) self_loop: SelfLoop,

    /// Sessions that are being opened, and the keys.
    pub openings: Openings,
    pub(crate) counters: NodeCounters,
    /// Statistics and notices for an operator and the application.
    pub observed: Observed,
    /// The turn of its loop.
    pub turn: Turn,
    /// Credit used by the packet executed last, if that is a message that was refused.
    pub(crate) refused_units: u32,
}

/// Most bytes after the Ethernet header that a node sends on a port with `caps`.
fn usable_mtu(caps: &PortCaps) -> Result<usize> {
    let mtu = Some(caps.mtu).filter(|&mtu| mtu >= 256).ok_or(Error::MsgTooLong)?;
    Ok(usable(mtu))
}

/// Packets kept for retransmission, all sessions together.
fn sent_max(s: &NodeSettings) -> usize {
    s.tx_wr_max * 4 + 4096
}

/// The part of `mtu` that a packet's length field can express.
fn usable(mtu: usize) -> usize {
    mtu.min(usize::from(u16::MAX))
}

impl Node {
    /// Longest message of the inject calls, bytes.
    pub const INJECT_SIZE: usize = 256;

    /// Longest message, bytes.
    pub const MAX_MSG_SIZE: u64 = 1 << 40;

    /// Largest number of peers a node can be set to.
    pub const PEER_MAX: usize = 1 << peer::SLOT_BITS;

    /// Most requests that a node can be set to: transmit operations, and receives.
    pub const WR_MAX: usize = 1 << 24;

    /// Memory for unexpected messages that a node can be set to, bytes.
    pub const UNEXPECTED_BYTES: RangeInclusive<usize> = 64 * UNIT..=1 << 39;

    /// Makes a node for a port with `caps`.
    ///
    /// # Errors
    /// - [`Error::NoMem`]: there is no address space for tables of this size.
    /// - [`Error::Invalid`]: a setting is out of range; the text says which.
    /// - [`Error::MsgTooLong`]: the port's MTU is below 256.
    pub fn new(settings: NodeSettings, caps: &PortCaps) -> Result<Self> {
        let (s, mtu, near) = (settings.check_on(caps)?, usable_mtu(caps)?, usable(caps.near_mtu));
        let (frame_len, blocks) = (mtu.max(near) + ETH_HDR_LEN, s.unexpected_bytes / UNIT);
        Ok(Self {
            port: PortState::new(s, caps, mtu),
            eager_max: s.eager_max(mtu),
            peers: Peers::with_large_pages(s.peer_max),
            by_station: PeersByStation::with_capacity(s.peer_max),
            awaited: Vec::new(),
            reassemblies: Slab::with_capacity(s.peer_max.min(recv::REASSEMBLIES_FIRST)),
            eps: Eps::new(),
            cqs: Table::with_capacity(65536),
            cntrs: Slab::with_capacity(65536),
            avs: Slab::with_capacity(1024),
            tx: TxWrs::new(s),
            fast_ops: Table::with_capacity(s.tx_wr_max),
            sent: SentPool::with_capacity(sent_max(s)),
            bitmaps: BitmapPool::new(s.window.max(WINDOW_LOSSLESS)),
            packs: Packs::new(if caps.lossless { 1 } else { 64 }, frame_len, caps.via_kernel),
            posted: Receives::with_capacity(s.rx_wr_max),
            unexpected: UnexpectedPool::with_capacity(blocks),
            blocks: Blocks::with_capacity(blocks),
            pulls: Pulls::new(s),
            mrs: Mrs::new(s),
            responses: Slab::with_capacity(rma_out::response_slots(s.peer_max)),
            scratch: Vec::new(),
            target: fast_target::TargetCache::new(rma_out::response_slots(s.peer_max)),
            spare: SpareBuffers::default(),
            reorder: Reorder::new(frame_len),
            coll: Coll::new(caps, s.coll),
            wheel: Wheel::new(s.peer_max, Instant(0)),
            due: Due::new(s, caps),
            acks: acks::Acks::new(),
            replies: Replies::default(),
            names: Names::default(),
            groups: Multicast::default(),
            self_loop: SelfLoop::new(),
            openings: Openings::new(s, caps, frame_len),
            counters: NodeCounters::default(),
            observed: Observed::new(s.peer_max),
            turn: Turn::new(s),
            refused_units: 0,
            settings: NodeSettings { keys: None, ..settings },
        })
    }

    /// The settings of the node, without its keys.
    pub fn settings(&self) -> &NodeSettings {
        &self.settings
    }
}

/// Objects of the application, borrowed from a node: endpoints with their receives and the messages
/// without one or still arriving, completion queues, counters, address vectors and groups, and all
/// that is needed to report an outcome. No method sends.
#[derive(Debug)]
pub struct Objects<'a> {
    settings: &'a NodeSettings,
    port: &'a PortState,
    eps: &'a mut Eps,
    posted: &'a mut Receives,
    unexpected: &'a mut UnexpectedPool<UnexpectedMsg>,
    blocks: &'a mut Blocks,
    cqs: &'a mut Cqs,
    cntrs: &'a mut Cntrs,
    avs: &'a mut Avs,
    reassemblies: &'a mut Reassemblies,
    refused_units: &'a mut u32,
    coll: &'a mut Coll,
    /// Peers that addresses, messages and outcomes refer to.
    peers: &'a mut Peers,
    awaited: &'a mut Vec<PeerIdx>,
    /// Records completions that wait for room in a queue, and peers to be granted credit.
    due: &'a mut Due,
    observed: &'a mut Observed,
    counters: &'a mut NodeCounters,
}

/// The objects of a node, for callers that borrow other parts of it as well.
macro_rules! objects_of {
    ($node:ident) => {
        Objects {
            settings: &$node.settings,
            port: &$node.port,
            eps: &mut $node.eps,
            posted: &mut $node.posted,
            unexpected: &mut $node.unexpected,
            blocks: &mut $node.blocks,
            cqs: &mut $node.cqs,
            cntrs: &mut $node.cntrs,
            avs: &mut $node.avs,
            reassemblies: &mut $node.reassemblies,
            refused_units: &mut $node.refused_units,
            coll: &mut $node.coll,
            peers: &mut $node.peers,
            awaited: &mut $node.awaited,
            due: &mut $node.due,
            observed: &mut $node.observed,
            counters: &mut $node.counters,
        }
    };
}

/// The target side of a node, for callers that borrow other parts of it as well.
macro_rules! responder_of {
    ($node:ident) => {
        Responder {
            objects: objects_of!($node),
            mrs: &mut $node.mrs,
            responses: &mut $node.responses,
            target: &mut $node.target,
            scratch: &mut $node.scratch,
            spare: &mut $node.spare,
            sent: &mut $node.sent,
            turn: &$node.turn,
        }
    };
}

/// The operations of a node, for callers that borrow other parts of it as well.
macro_rules! operations_of {
    ($node:ident) => {
        Operations {
            objects: objects_of!($node),
            tx: &mut $node.tx,
            fast_ops: &mut $node.fast_ops,
            packs: &mut $node.packs,
            pulls: &mut $node.pulls,
            spare: &mut $node.spare,
            sent: &mut $node.sent,
            turn: &mut $node.turn,
        }
    };
}

/// The sender of packets of a node, for callers that borrow other parts of it as well.
macro_rules! sending_of {
    ($node:ident) => {
        Sending {
            port: &mut $node.port,
            peers: &mut $node.peers,
            sent: &mut $node.sent,
            acks: &mut $node.acks,
            turn: &$node.turn,
            tx: &mut $node.tx,
            responses: &$node.responses,
            packs: &$node.packs,
            mrs: &$node.mrs,
            self_loop: &mut $node.self_loop,
            due: &mut $node.due,
            observed: &mut $node.observed,
            counters: &mut $node.counters,
        }
    };
}

/// The control plane of a node, for callers that borrow other parts of it as well.
macro_rules! control_of {
    ($node:ident) => {
        Control {
            settings: &mut $node.settings,
            port: &mut $node.port,
            peers: &mut $node.peers,
            by_station: &mut $node.by_station,
            openings: &mut $node.openings,
            blocks: &mut $node.blocks,
            sent: &mut $node.sent,
            eps: &mut $node.eps,
            turn: &mut $node.turn,
            wheel: &mut $node.wheel,
            due: &mut $node.due,
            replies: &mut $node.replies,
            names: &mut $node.names,
            observed: &mut $node.observed,
            counters: &mut $node.counters,
        }
    };
}

impl Node {
    /// The objects of the application.
    #[inline(always)]
    pub fn objects(&mut self) -> Objects<'_> {
        objects_of!(self)
    }
}

/// Target side of one-sided operations, borrowed from a node: its regions, the operations of peers
/// on them, and the pending responses. No method sends.
#[derive(Debug)]
pub struct Responder<'a> {
    /// Endpoints through which a region is reached, and to which operations are reported.
    objects: Objects<'a>,
    mrs: &'a mut Mrs,
    responses: &'a mut Slab<Response, (), ResponseIdx>,
    target: &'a mut fast_target::TargetCache,
    scratch: &'a mut Vec<u8>,
    spare: &'a mut SpareBuffers,
    /// Responses in flight read regions.
    sent: &'a mut SentPool,
    turn: &'a Turn,
}

impl Node {
    /// The target side of one-sided operations.
    #[inline(always)]
    pub fn responder(&mut self) -> Responder<'_> {
        responder_of!(self)
    }
}

/// Operations of a node, borrowed from it: its transmit requests, pulls and reads, and the objects
/// that their ends are reported to. No method sends.
#[derive(Debug)]
pub struct Operations<'a> {
    /// Endpoints of the operations.
    objects: Objects<'a>,
    tx: &'a mut TxWrs,
    fast_ops: &'a mut Table<FastOp, (), FastOpIdx>,
    packs: &'a mut Packs,
    pulls: &'a mut Pulls,
    spare: &'a mut SpareBuffers,
    /// Packets in flight of operations that end.
    sent: &'a mut SentPool,
    turn: &'a mut Turn,
}

impl Node {
    /// The operations.
    #[inline(always)]
    pub fn operations(&mut self) -> Operations<'_> {
        operations_of!(self)
    }
}

/// Sender of packets, borrowed from a node: packets get their PSNs, are sent, and are recorded
/// until they are acknowledged. No method ends an operation.
#[derive(Debug)]
pub(crate) struct Sending<'a> {
    port: &'a mut PortState,
    peers: &'a mut Peers,
    sent: &'a mut SentPool,
    acks: &'a mut acks::Acks,
    turn: &'a Turn,
    /// Requests and responses that packets belong to.
    tx: &'a mut TxWrs,
    responses: &'a Slab<Response, (), ResponseIdx>,
    /// Memory of payloads.
    packs: &'a Packs,
    mrs: &'a Mrs,
    /// Frames of this node to itself.
    self_loop: &'a mut SelfLoop,
    due: &'a mut Due,
    observed: &'a mut Observed,
    counters: &'a mut NodeCounters,
}

impl Node {
    /// The sender of packets.
    #[inline(always)]
    pub(crate) fn sending(&mut self) -> Sending<'_> {
        sending_of!(self)
    }
}

/// Transmitter of requests, borrowed from a node: queued messages, pulls, one-sided operations and
/// responses leave as packets, and an operation may end with its last packet. No session begins or
/// ends.
#[derive(Debug)]
pub(crate) struct Transmitter<'a> {
    settings: &'a NodeSettings,
    port: &'a mut PortState,
    eager_max: &'a [usize; 2],
    peers: &'a mut Peers,
    awaited: &'a mut Vec<PeerIdx>,
    reassemblies: &'a mut Reassemblies,
    eps: &'a mut Eps,
    cqs: &'a mut Cqs,
    cntrs: &'a mut Cntrs,
    avs: &'a mut Avs,
    tx: &'a mut TxWrs,
    fast_ops: &'a mut Table<FastOp, (), FastOpIdx>,
    sent: &'a mut SentPool,
    packs: &'a mut Packs,
    posted: &'a mut Receives,
    unexpected: &'a mut UnexpectedPool<UnexpectedMsg>,
    blocks: &'a mut Blocks,
    pulls: &'a mut Pulls,
    mrs: &'a mut Mrs,
    responses: &'a mut Slab<Response, (), ResponseIdx>,
    scratch: &'a mut Vec<u8>,
    target: &'a mut fast_target::TargetCache,
    spare: &'a mut SpareBuffers,
    coll: &'a mut Coll,
    due: &'a mut Due,
    acks: &'a mut acks::Acks,
    self_loop: &'a mut SelfLoop,
    counters: &'a mut NodeCounters,
    observed: &'a mut Observed,
    turn: &'a mut Turn,
    refused_units: &'a mut u32,
}

impl Node {
    /// The transmitter of requests.
    #[inline(always)]
    fn transmitter(&mut self) -> Transmitter<'_> {
        Transmitter {
            settings: &self.settings,
            port: &mut self.port,
            eager_max: &self.eager_max,
            peers: &mut self.peers,
            awaited: &mut self.awaited,
            reassemblies: &mut self.reassemblies,
            eps: &mut self.eps,
            cqs: &mut self.cqs,
            cntrs: &mut self.cntrs,
            avs: &mut self.avs,
            tx: &mut self.tx,
            fast_ops: &mut self.fast_ops,
            sent: &mut self.sent,
            packs: &mut self.packs,
            posted: &mut self.posted,
            unexpected: &mut self.unexpected,
            blocks: &mut self.blocks,
            pulls: &mut self.pulls,
            mrs: &mut self.mrs,
            responses: &mut self.responses,
            scratch: &mut self.scratch,
            target: &mut self.target,
            spare: &mut self.spare,
            coll: &mut self.coll,
            due: &mut self.due,
            acks: &mut self.acks,
            self_loop: &mut self.self_loop,
            counters: &mut self.counters,
            observed: &mut self.observed,
            turn: &mut self.turn,
            refused_units: &mut self.refused_units,
        }
    }
}

impl Transmitter<'_> {
    /// The sender of packets.
    #[inline(always)]
    fn sending(&mut self) -> Sending<'_> {
        sending_of!(self)
    }

    /// The operations.
    #[inline(always)]
    fn operations(&mut self) -> Operations<'_> {
        operations_of!(self)
    }

    /// The target side of one-sided operations.
    #[inline(always)]
    fn responder(&mut self) -> Responder<'_> {
        responder_of!(self)
    }
}

/// Levels of the tables of a node, and the state of its sessions: a view that changes nothing.
#[derive(Clone, Copy, Debug)]
pub struct Statistics<'a> {
    peers: &'a Peers,
    eps: &'a Eps,
    cqs: &'a Cqs,
    tx: &'a TxWrs,
    fast_ops: &'a Table<FastOp, (), FastOpIdx>,
    sent: &'a SentPool,
    packs: &'a Packs,
    posted: &'a Receives,
    unexpected: &'a UnexpectedPool<UnexpectedMsg>,
    blocks: &'a Blocks,
    pulls: &'a Pulls,
    responses: &'a Slab<Response, (), ResponseIdx>,
    reorder: &'a Reorder,
    coll: &'a Coll,
    wheel: &'a Wheel<PeerIdx>,
}

impl Node {
    /// The levels of the tables, and the state of the sessions.
    pub fn statistics(&self) -> Statistics<'_> {
        let Self { peers, eps, cqs, tx, fast_ops, sent, packs, posted, .. } = self;
        let Self { unexpected, blocks, pulls, responses, reorder, coll, wheel, .. } = self;
        Statistics {
            peers,
            eps,
            cqs,
            tx,
            fast_ops,
            sent,
            packs,
            posted,
            unexpected,
            blocks,
            pulls,
            responses,
            reorder,
            coll,
            wheel,
        }
    }
}

/// Control plane, borrowed from a node: sessions and their opening, replies to stations without a
/// session, and timers. No operation begins or ends.
#[derive(Debug)]
pub struct Control<'a> {
    settings: &'a mut NodeSettings,
    port: &'a mut PortState,
    peers: &'a mut Peers,
    by_station: &'a mut PeersByStation,
    openings: &'a mut Openings,
    /// The first credit of a session.
    blocks: &'a mut Blocks,
    /// Packets in flight, which timers declare lost.
    sent: &'a mut SentPool,
    /// Endpoints cache sessions as routes.
    eps: &'a mut Eps,
    turn: &'a mut Turn,
    wheel: &'a mut Wheel<PeerIdx>,
    due: &'a mut Due,
    replies: &'a mut Replies,
    names: &'a mut Names,
    observed: &'a mut Observed,
    counters: &'a mut NodeCounters,
}

impl Node {
    /// The control plane.
    #[inline(always)]
    pub fn control(&mut self) -> Control<'_> {
        control_of!(self)
    }
}

/// Sessions of a node and all that ends with them, borrowed from it: operations, responses,
/// receives from one peer, calls of collectives. Everything that can end a session is here. No
/// method sends.
#[derive(Debug)]
pub struct Sessions<'a> {
    settings: &'a mut NodeSettings,
    port: &'a mut PortState,
    peers: &'a mut Peers,
    by_station: &'a mut PeersByStation,
    awaited: &'a mut Vec<PeerIdx>,
    reassemblies: &'a mut Reassemblies,
    eps: &'a mut Eps,
    cqs: &'a mut Cqs,
    cntrs: &'a mut Cntrs,
    avs: &'a mut Avs,
    tx: &'a mut TxWrs,
    fast_ops: &'a mut Table<FastOp, (), FastOpIdx>,
    sent: &'a mut SentPool,
    packs: &'a mut Packs,
    posted: &'a mut Receives,
    unexpected: &'a mut UnexpectedPool<UnexpectedMsg>,
    blocks: &'a mut Blocks,
    pulls: &'a mut Pulls,
    mrs: &'a mut Mrs,
    responses: &'a mut Slab<Response, (), ResponseIdx>,
    scratch: &'a mut Vec<u8>,
    target: &'a mut fast_target::TargetCache,
    spare: &'a mut SpareBuffers,
    reorder: &'a mut Reorder,
    coll: &'a mut Coll,
    wheel: &'a mut Wheel<PeerIdx>,
    due: &'a mut Due,
    replies: &'a mut Replies,
    names: &'a mut Names,
    openings: &'a mut Openings,
    counters: &'a mut NodeCounters,
    observed: &'a mut Observed,
    turn: &'a mut Turn,
    refused_units: &'a mut u32,
}

/// The sessions of a node, for callers that borrow other parts of it as well.
macro_rules! sessions_of {
    ($node:expr) => {
        Sessions {
            settings: &mut $node.settings,
            port: &mut $node.port,
            peers: &mut $node.peers,
            by_station: &mut $node.by_station,
            awaited: &mut $node.awaited,
            reassemblies: &mut $node.reassemblies,
            eps: &mut $node.eps,
            cqs: &mut $node.cqs,
            cntrs: &mut $node.cntrs,
            avs: &mut $node.avs,
            tx: &mut $node.tx,
            fast_ops: &mut $node.fast_ops,
            sent: &mut $node.sent,
            packs: &mut $node.packs,
            posted: &mut $node.posted,
            unexpected: &mut $node.unexpected,
            blocks: &mut $node.blocks,
            pulls: &mut $node.pulls,
            mrs: &mut $node.mrs,
            responses: &mut $node.responses,
            scratch: &mut $node.scratch,
            target: &mut $node.target,
            spare: &mut $node.spare,
            reorder: &mut $node.reorder,
            coll: &mut $node.coll,
            wheel: &mut $node.wheel,
            due: &mut $node.due,
            replies: &mut $node.replies,
            names: &mut $node.names,
            openings: &mut $node.openings,
            counters: &mut $node.counters,
            observed: &mut $node.observed,
            turn: &mut $node.turn,
            refused_units: &mut $node.refused_units,
        }
    };
}

impl Node {
    /// The sessions.
    #[inline(always)]
    pub fn sessions(&mut self) -> Sessions<'_> {
        sessions_of!(self)
    }
}

impl Sessions<'_> {
    /// The objects of the application.
    #[inline(always)]
    pub(super) fn objects(&mut self) -> Objects<'_> {
        objects_of!(self)
    }

    /// The target side of one-sided operations.
    #[inline(always)]
    fn responder(&mut self) -> Responder<'_> {
        responder_of!(self)
    }

    /// The operations.
    #[inline(always)]
    fn operations(&mut self) -> Operations<'_> {
        operations_of!(self)
    }

    /// The control plane.
    #[inline(always)]
    fn control(&mut self) -> Control<'_> {
        control_of!(self)
    }

    /// The receiver of messages.
    fn receiving(&mut self) -> Receiving<'_> {
        Receiving { sessions: sessions_of!(self) }
    }
}

/// Receiver of messages, borrowed from a node: posted receives, messages without one, messages
/// still arriving, and pulls. It holds the sessions, since it ends that of a peer which has
/// announced more than there is memory for.
#[derive(Debug)]
pub struct Receiving<'a> {
    sessions: Sessions<'a>,
}

impl Node {
    /// The receiver of messages.
    #[inline(always)]
    pub fn receiving(&mut self) -> Receiving<'_> {
        Receiving { sessions: sessions_of!(self) }
    }
}

/// Posting of operations, borrowed from a node: an operation is queued for its peer, with which a
/// session is opened if there is none, or for a multicast group. No method sends.
#[derive(Debug)]
pub struct Posting<'a> {
    sessions: Sessions<'a>,
    groups: &'a mut Multicast,
}

impl Node {
    /// The posting of operations.
    #[inline(always)]
    pub fn posting(&mut self) -> Posting<'_> {
        Posting { sessions: sessions_of!(self), groups: &mut self.groups }
    }
}

/// Collective groups of a node and their ends, borrowed from it: joins, members that leave or die,
/// and calls that end with them. Messages to members are posted; no method sends.
#[derive(Debug)]
pub struct Collectives<'a> {
    sessions: Sessions<'a>,
    /// Named by [`Posting`].
    groups: &'a mut Multicast,
}

impl Node {
    /// The collective groups.
    #[inline(always)]
    pub fn collectives(&mut self) -> Collectives<'_> {
        Collectives { sessions: sessions_of!(self), groups: &mut self.groups }
    }
}

impl Collectives<'_> {
    /// The posting of operations.
    fn posting(&mut self) -> Posting<'_> {
        Posting { sessions: sessions_of!(self.sessions), groups: self.groups }
    }
}

/// Multicast groups of a node, borrowed from it: endpoints join them, queued messages are sent to
/// them, and those that arrive are delivered to the members on this node.
#[derive(Debug)]
pub struct MulticastGroups<'a> {
    sessions: Sessions<'a>,
    groups: &'a mut Multicast,
}

impl Node {
    /// The multicast groups.
    #[inline(always)]
    pub fn multicast(&mut self) -> MulticastGroups<'_> {
        MulticastGroups { sessions: sessions_of!(self), groups: &mut self.groups }
    }
}
