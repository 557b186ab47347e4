//! A node: the endpoints, queues, address vectors and peers of one domain, and the calls on them.
//!
//! Sans-IO. Whoever holds a node calls [`Node::on_frame`] for what arrived, [`Node::transmit`] for
//! what is to be sent, and both of them, with the time, again by [`Node::next_deadline`]. The poll
//! loop in [`crate::poll`] does it with a port and a clock, the simulator with virtual ones.

use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::mem::IoBuf;
use barewire_driver::port::{PortCaps, Tx};

use crate::error::Result;
use crate::flags::{BindFlags, Caps, OpFlags};
use crate::types::{CqErr, Cqe, EpAddr, FiAddr, Instant};

/// Sizes and times of a node. All tables are sized by them when it is made; nothing grows later.
#[derive(Clone, Debug)]
pub struct NodeSettings {
    /// Random name of this life of the domain. Not 0.
    pub incarnation: u64,
    /// Seed of everything the node draws (first sequence numbers, session names). A live domain
    /// takes it from the kernel, a simulation from its seed.
    pub seed: u64,
    /// Silence after which a peer that owes us something is dead, nanoseconds. Default 5 s; 100 ms
    /// at least. A dead peer's operations end within 1.1 times this.
    pub t_dead_ns: u64,
    /// Longest message sent without asking, bytes, in as many frames as it takes. Default 16 KiB.
    pub eager_max: usize,
    /// Peers known at once. Default 4,096; a peer costs at most 512 bytes while idle.
    pub peer_max: usize,
    /// Transmit operations in flight, all endpoints together. Default 4,096.
    pub tx_wr_max: usize,
    /// Posted receives, all endpoints together. Default 16,384.
    pub rx_wr_max: usize,
    /// Memory for messages nobody has posted a receive for, bytes. Touched only when used.
    /// Default 256 MiB.
    pub unexpected_bytes: usize,
    /// Bytes of pulled messages asked for and not yet here, all peers together. Default 4 MiB.
    pub pull_window: usize,
    /// Whether frames carry a CRC32C trailer. Default: if the port is not lossless.
    pub crc: Option<bool>,
}

impl Default for NodeSettings {
    fn default() -> Self {
        Self {
            incarnation: 0,
            seed: 0,
            t_dead_ns: 5_000_000_000,
            eager_max: 16 << 10,
            peer_max: 4096,
            tx_wr_max: 4096,
            rx_wr_max: 16384,
            unexpected_bytes: 256 << 20,
            pull_window: 4 << 20,
            crc: None,
        }
    }
}

/// A completion queue of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CqId(pub(crate) crate::slab::Handle);

/// A counter of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CntrId(pub(crate) crate::slab::Handle);

/// An address vector of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct AvId(pub(crate) crate::slab::Handle);

/// An endpoint of a [`Node`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct EpId(pub(crate) crate::slab::Handle);

/// What an endpoint is made with.
#[derive(Clone, Debug)]
pub struct EpAttr {
    /// The number peers reach it by; `None` takes the lowest free one.
    pub number: Option<u16>,
    /// Granted capabilities. Calls outside them are refused with `FI_EOPNOTSUPP`.
    pub caps: Caps,
    /// Sends in flight at most; one more is `FI_EAGAIN`. Default 1,024.
    pub tx_size: usize,
    /// Receives posted at most. Default 4,096.
    pub rx_size: usize,
    /// Flags of transmit calls that take none.
    pub tx_op_flags: OpFlags,
    /// Flags of receive calls that take none.
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

/// Untagged or tagged: two separate worlds of matching.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MsgKind {
    /// `fi_msg`.
    Msg,
    /// `fi_tagged`.
    Tagged,
}

/// A message to send. `buf` stays lent until the operation has completed, or, with
/// [`OpFlags::INJECT`], until the call returns.
#[derive(Debug)]
pub struct SendReq {
    /// Which matching.
    pub kind: MsgKind,
    /// The message.
    pub buf: IoBuf,
    /// To whom.
    pub dest: FiAddr,
    /// Tag; 0 for [`MsgKind::Msg`].
    pub tag: u64,
    /// Remote CQ data, sent if `flags` has `REMOTE_CQ_DATA`.
    pub data: u64,
    /// Comes back in the completion.
    pub context: u64,
    /// All flags of the operation: the caller has merged in the endpoint's default flags.
    pub flags: OpFlags,
    /// One of the `inject` calls: no success completion is ever written.
    pub no_completion: bool,
}

/// A receive to post. `buf` stays lent until the operation has completed.
#[derive(Debug)]
pub struct RecvReq {
    /// Which matching.
    pub kind: MsgKind,
    /// Where the message goes.
    pub buf: IoBuf,
    /// From whom; [`crate::types::FI_ADDR_UNSPEC`] for anybody. Ignored without
    /// `FI_DIRECTED_RECV`.
    pub src: FiAddr,
    /// Tag to match.
    pub tag: u64,
    /// Bits of the tag that do not matter.
    pub ignore: u64,
    /// Comes back in the completion. For `CLAIM` and `DISCARD` it names the announced message.
    pub context: u64,
    /// All flags of the operation, as for [`SendReq::flags`].
    pub flags: OpFlags,
}

/// Takes the frames a node wants to send.
pub trait FrameSink {
    /// As [`barewire_driver::port::Port::tx`].
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx;
}

impl<F: FnMut(&TxFrame<'_>) -> Tx> FrameSink for F {
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        self(frame)
    }
}
