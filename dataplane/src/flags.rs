//! libfabric's flag words, one type per use, with libfabric's bit values.
//!
//! Some bits have several meanings (bit 59 is `FI_DIRECTED_RECV`, `FI_CLAIM` and
//! `FI_SELECTIVE_COMPLETION`); separate types keep them apart.

use bitflags::bitflags;

bitflags! {
    /// Flags of one data transfer operation, or an endpoint's default flags (`op_flags`).
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct OpFlags: u64 {
        /// `FI_TAGGED` of an atomic operation: the target is a posted receive.
        const TAGGED = 1 << 3;
        /// `FI_MULTICAST`.
        const MULTICAST = 1 << 5;
        /// `FI_MULTI_RECV`: one buffer takes many messages.
        const MULTI_RECV = 1 << 16;
        /// `FI_REMOTE_CQ_DATA`: eight bytes for the receiver's completion.
        const REMOTE_CQ_DATA = 1 << 17;
        /// `FI_MORE`: another operation follows immediately.
        const MORE = 1 << 18;
        /// `FI_PEEK`: look for an unexpected message.
        const PEEK = 1 << 19;
        /// `FI_TRIGGER`: post the operation when a counter reaches a threshold. Handled above the
        /// node.
        const TRIGGER = 1 << 20;
        /// `FI_FENCE`: execute after all operations posted before to the same peer.
        const FENCE = 1 << 21;
        /// `FI_COMPLETION`: write a completion although the queue is selective.
        const COMPLETION = 1 << 24;
        /// `FI_INJECT`: the source buffer may be reused on return.
        const INJECT = 1 << 25;
        /// `FI_INJECT_COMPLETE`: complete when the source buffer may be reused.
        const INJECT_COMPLETE = 1 << 26;
        /// `FI_TRANSMIT_COMPLETE`: complete when the operation needs no local resource any more.
        const TRANSMIT_COMPLETE = 1 << 27;
        /// `FI_DELIVERY_COMPLETE`: complete when the peer has placed the message.
        const DELIVERY_COMPLETE = 1 << 28;
        /// `FI_MATCH_COMPLETE`: complete when the peer has matched the message.
        const MATCH_COMPLETE = 1 << 31;
        /// `FI_AUTH_KEY` of a receive: the source is the handle of an authorization key, thus any
        /// peer that has the key.
        const AUTH_KEY = 1 << 57;
        /// `FI_DISCARD`: discard the message.
        const DISCARD = 1 << 58;
        /// `FI_CLAIM`: take the message that a peek or a buffered-receive event announced.
        const CLAIM = 1 << 59;
    }
}

bitflags! {
    /// Flags of a completion.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct CqFlags: u64 {
        /// `FI_MSG`.
        const MSG = 1 << 1;
        /// `FI_RMA`.
        const RMA = 1 << 2;
        /// `FI_TAGGED`.
        const TAGGED = 1 << 3;
        /// `FI_ATOMIC`.
        const ATOMIC = 1 << 4;
        /// `FI_COLLECTIVE`.
        const COLLECTIVE = 1 << 6;
        /// `FI_READ`.
        const READ = 1 << 8;
        /// `FI_WRITE`.
        const WRITE = 1 << 9;
        /// `FI_RECV`.
        const RECV = 1 << 10;
        /// `FI_SEND`.
        const SEND = 1 << 11;
        /// `FI_REMOTE_READ`.
        const REMOTE_READ = 1 << 12;
        /// `FI_REMOTE_WRITE`.
        const REMOTE_WRITE = 1 << 13;
        /// `FI_MULTI_RECV`: the buffer was released.
        const MULTI_RECV = 1 << 16;
        /// `FI_REMOTE_CQ_DATA`: `data` is valid.
        const REMOTE_CQ_DATA = 1 << 17;
        /// `FI_MORE`: only part of a buffered message is in `buf`.
        const MORE = 1 << 18;
        /// `FI_BUFFERED_RECV`: `op_context` names a message to claim or discard. (libfabric 1.x
        /// reuses its mode bit here.)
        const BUFFERED_RECV = 1 << 51;
        /// `FI_CLAIM`.
        const CLAIM = 1 << 59;
    }
}

bitflags! {
    /// Capabilities of an endpoint.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Caps: u64 {
        /// `FI_MSG`.
        const MSG = 1 << 1;
        /// `FI_RMA`.
        const RMA = 1 << 2;
        /// `FI_TAGGED`.
        const TAGGED = 1 << 3;
        /// `FI_ATOMIC`.
        const ATOMIC = 1 << 4;
        /// `FI_MULTICAST`.
        const MULTICAST = 1 << 5;
        /// `FI_COLLECTIVE`.
        const COLLECTIVE = 1 << 6;
        /// `FI_READ`.
        const READ = 1 << 8;
        /// `FI_WRITE`.
        const WRITE = 1 << 9;
        /// `FI_RECV`.
        const RECV = 1 << 10;
        /// `FI_SEND`.
        const SEND = 1 << 11;
        /// `FI_REMOTE_READ`.
        const REMOTE_READ = 1 << 12;
        /// `FI_REMOTE_WRITE`.
        const REMOTE_WRITE = 1 << 13;
        /// `FI_MULTI_RECV`.
        const MULTI_RECV = 1 << 16;
        /// `FI_TRIGGER`.
        const TRIGGER = 1 << 20;
        /// `FI_FENCE`.
        const FENCE = 1 << 21;
        /// `FI_AV_USER_ID`: completions report user IDs of addresses.
        const AV_USER_ID = 1 << 41;
        /// `FI_TAGGED_DIRECTED_RECV`: `FI_DIRECTED_RECV` of tagged receives.
        const TAGGED_DIRECTED_RECV = 1 << 45;
        /// `FI_TAGGED_MULTI_RECV`: `FI_MULTI_RECV` of tagged receives.
        const TAGGED_MULTI_RECV = 1 << 46;
        /// `FI_EXACT_DIRECTED_RECV`: receives that can name a source must name one. Alone it
        /// implies `FI_DIRECTED_RECV`.
        const EXACT_DIRECTED_RECV = 1 << 48;
        /// `FI_SOURCE_ERR`.
        const SOURCE_ERR = 1 << 50;
        /// `FI_LOCAL_COMM`.
        const LOCAL_COMM = 1 << 51;
        /// `FI_REMOTE_COMM`.
        const REMOTE_COMM = 1 << 52;
        /// `FI_SHARED_AV`.
        const SHARED_AV = 1 << 53;
        /// `FI_RMA_EVENT`.
        const RMA_EVENT = 1 << 56;
        /// `FI_SOURCE`.
        const SOURCE = 1 << 57;
        /// `FI_NAMED_RX_CTX`.
        const NAMED_RX_CTX = 1 << 58;
        /// `FI_DIRECTED_RECV`.
        const DIRECTED_RECV = 1 << 59;
    }
}

impl Caps {
    /// The capabilities with which receives name a source.
    pub const ANY_DIRECTED_RECV: Caps =
        Caps::DIRECTED_RECV.union(Caps::TAGGED_DIRECTED_RECV).union(Caps::EXACT_DIRECTED_RECV);
}

bitflags! {
    /// Permitted accesses of a memory region.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct MrAccess: u64 {
        /// `FI_READ`: may be the destination of a read issued here.
        const READ = 1 << 8;
        /// `FI_WRITE`: may be the source of a write issued here.
        const WRITE = 1 << 9;
        /// `FI_RECV`.
        const RECV = 1 << 10;
        /// `FI_SEND`.
        const SEND = 1 << 11;
        /// `FI_REMOTE_READ`: peers may read it.
        const REMOTE_READ = 1 << 12;
        /// `FI_REMOTE_WRITE`: peers may write it.
        const REMOTE_WRITE = 1 << 13;
    }
}

bitflags! {
    /// Directions and options with which a queue or counter is bound to an endpoint.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct BindFlags: u64 {
        /// `FI_READ`: counts reads and fetches issued here.
        const READ = 1 << 8;
        /// `FI_WRITE`: counts writes and atomics issued here.
        const WRITE = 1 << 9;
        /// `FI_RECV`.
        const RECV = 1 << 10;
        /// `FI_SEND` (`FI_TRANSMIT`).
        const TRANSMIT = 1 << 11;
        /// `FI_REMOTE_READ`.
        const REMOTE_READ = 1 << 12;
        /// `FI_REMOTE_WRITE`.
        const REMOTE_WRITE = 1 << 13;
        /// `FI_SELECTIVE_COMPLETION`: only operations with `FI_COMPLETION` complete.
        const SELECTIVE_COMPLETION = 1 << 59;
    }
}
