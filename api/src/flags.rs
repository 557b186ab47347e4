//! Flag words: the typed sets of the dataplane, the words that only the interface knows, and every
//! bit by its libfabric name.
//!
//! The same bit means different things in different words (bit 59 is `FI_DIRECTED_RECV`,
//! `FI_CLAIM`, `FI_SELECTIVE_COMPLETION` and the mode `FI_CONTEXT`), so every use has its type; the
//! raw constants are for C programs and for people who read other people's logs.

use bitflags::bitflags;

pub use barewire_dataplane::flags::{BindFlags, Caps, CqFlags, OpFlags};

bitflags! {
    /// Modes that the application supports (`fi_info.mode`). The provider requires none.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Mode: u64 {
        /// `FI_PEER_TRANSFER`.
        const PEER_TRANSFER = FI_PEER_TRANSFER;
        /// `FI_BUFFERED_RECV`: requests buffered receive (libfabric 1.x).
        const BUFFERED_RECV = FI_BUFFERED_RECV;
        /// `FI_CONTEXT2`.
        const CONTEXT2 = FI_CONTEXT2;
        /// `FI_RESTRICTED_COMP`.
        const RESTRICTED_COMP = FI_RESTRICTED_COMP;
        /// `FI_NOTIFY_FLAGS_ONLY`.
        const NOTIFY_FLAGS_ONLY = FI_NOTIFY_FLAGS_ONLY;
        /// `FI_LOCAL_MR`.
        const LOCAL_MR = FI_LOCAL_MR;
        /// `FI_RX_CQ_DATA`.
        const RX_CQ_DATA = FI_RX_CQ_DATA;
        /// `FI_ASYNC_IOV`.
        const ASYNC_IOV = FI_ASYNC_IOV;
        /// `FI_MSG_PREFIX`.
        const MSG_PREFIX = FI_MSG_PREFIX;
        /// `FI_CONTEXT`.
        const CONTEXT = FI_CONTEXT;
    }
}

bitflags! {
    /// What `fi_mr_reg` takes as `access`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Access: u64 {
        /// `FI_READ`.
        const READ = FI_READ;
        /// `FI_WRITE`.
        const WRITE = FI_WRITE;
        /// `FI_RECV`.
        const RECV = FI_RECV;
        /// `FI_SEND`.
        const SEND = FI_SEND;
        /// `FI_REMOTE_READ`.
        const REMOTE_READ = FI_REMOTE_READ;
        /// `FI_REMOTE_WRITE`.
        const REMOTE_WRITE = FI_REMOTE_WRITE;
        /// `FI_COLLECTIVE`.
        const COLLECTIVE = FI_COLLECTIVE;
    }
}

bitflags! {
    /// `fi_domain_attr.mr_mode`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct MrMode: u32 {
        /// `FI_MR_BASIC`, before libfabric 1.5.
        const BASIC = 1 << 0;
        /// `FI_MR_SCALABLE`, before libfabric 1.5.
        const SCALABLE = 1 << 1;
        /// `FI_MR_LOCAL`: local buffers must be registered.
        const LOCAL = 1 << 2;
        /// `FI_MR_RAW`.
        const RAW = 1 << 3;
        /// `FI_MR_VIRT_ADDR`: remote memory is named by its address.
        const VIRT_ADDR = 1 << 4;
        /// `FI_MR_ALLOCATED`: registered memory is backed when it is registered.
        const ALLOCATED = 1 << 5;
        /// `FI_MR_PROV_KEY`: the provider chooses keys.
        const PROV_KEY = 1 << 6;
        /// `FI_MR_MMU_NOTIFY`.
        const MMU_NOTIFY = 1 << 7;
        /// `FI_MR_RMA_EVENT`.
        const RMA_EVENT = 1 << 8;
        /// `FI_MR_ENDPOINT`: regions are bound to endpoints.
        const ENDPOINT = 1 << 9;
        /// `FI_MR_HMEM`.
        const HMEM = 1 << 10;
        /// `FI_MR_COLLECTIVE`.
        const COLLECTIVE = 1 << 11;
    }
}

bitflags! {
    /// `fi_tx_attr.msg_order`, `fi_rx_attr.msg_order`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct Order: u64 {
        /// `FI_ORDER_RAR`.
        const RAR = 1 << 0;
        /// `FI_ORDER_RAW`.
        const RAW = 1 << 1;
        /// `FI_ORDER_RAS`.
        const RAS = 1 << 2;
        /// `FI_ORDER_WAR`.
        const WAR = 1 << 3;
        /// `FI_ORDER_WAW`.
        const WAW = 1 << 4;
        /// `FI_ORDER_WAS`.
        const WAS = 1 << 5;
        /// `FI_ORDER_SAR`.
        const SAR = 1 << 6;
        /// `FI_ORDER_SAW`.
        const SAW = 1 << 7;
        /// `FI_ORDER_SAS`: messages between two endpoints match in the order of their posting.
        const SAS = 1 << 8;
        /// `FI_ORDER_RMA_RAR`; the plain bits are for RMA and atomic operations together.
        const RMA_RAR = 1 << 32;
        /// `FI_ORDER_RMA_RAW`.
        const RMA_RAW = 1 << 33;
        /// `FI_ORDER_RMA_WAR`.
        const RMA_WAR = 1 << 34;
        /// `FI_ORDER_RMA_WAW`.
        const RMA_WAW = 1 << 35;
        /// `FI_ORDER_ATOMIC_RAR`.
        const ATOMIC_RAR = 1 << 36;
        /// `FI_ORDER_ATOMIC_RAW`.
        const ATOMIC_RAW = 1 << 37;
        /// `FI_ORDER_ATOMIC_WAR`.
        const ATOMIC_WAR = 1 << 38;
        /// `FI_ORDER_ATOMIC_WAW`.
        const ATOMIC_WAW = 1 << 39;
    }
}

bitflags! {
    /// Flags of `fi_getinfo`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
    pub struct InfoFlags: u64 {
        /// `FI_PROV_ATTR_ONLY`: only what does not depend on a port.
        const PROV_ATTR_ONLY = FI_PROV_ATTR_ONLY;
        /// `FI_NUMERICHOST`: node is an address, not a name. Always true here.
        const NUMERICHOST = FI_NUMERICHOST;
        /// `FI_SOURCE`: node and service are ours, not the peer's.
        const SOURCE = FI_SOURCE;
    }
}

macro_rules! bits {
    ($($name:ident = $bit:literal;)*) => {
        $(#[doc = concat!("Bit ", $bit, ".")] pub const $name: u64 = 1 << $bit;)*
    };
}

bits! {
    FI_MSG = 1;
    FI_RMA = 2;
    FI_TAGGED = 3;
    FI_ATOMIC = 4;
    FI_MULTICAST = 5;
    FI_COLLECTIVE = 6;
    FI_READ = 8;
    FI_WRITE = 9;
    FI_RECV = 10;
    FI_SEND = 11;
    FI_REMOTE_READ = 12;
    FI_REMOTE_WRITE = 13;
    FI_MULTI_RECV = 16;
    FI_REMOTE_CQ_DATA = 17;
    FI_MORE = 18;
    FI_PEEK = 19;
    FI_TRIGGER = 20;
    FI_FENCE = 21;
    FI_PRIORITY = 22;
    FI_COMPLETION = 24;
    FI_INJECT = 25;
    FI_INJECT_COMPLETE = 26;
    FI_TRANSMIT_COMPLETE = 27;
    FI_DELIVERY_COMPLETE = 28;
    FI_AFFINITY = 29;
    FI_COMMIT_COMPLETE = 30;
    FI_MATCH_COMPLETE = 31;
    FI_PEER_TRANSFER = 36;
    FI_TAGGED_DIRECTED_RECV = 45;
    FI_TAGGED_MULTI_RECV = 46;
    FI_HMEM = 47;
    FI_VARIABLE_MSG = 48;
    FI_EXACT_DIRECTED_RECV = 48;
    FI_RMA_PMEM = 49;
    FI_SOURCE_ERR = 50;
    FI_LOCAL_COMM = 51;
    FI_BUFFERED_RECV = 51;
    FI_REMOTE_COMM = 52;
    FI_CONTEXT2 = 52;
    FI_SHARED_AV = 53;
    FI_RESTRICTED_COMP = 53;
    FI_PROV_ATTR_ONLY = 54;
    FI_NOTIFY_FLAGS_ONLY = 54;
    FI_NUMERICHOST = 55;
    FI_LOCAL_MR = 55;
    FI_RMA_EVENT = 56;
    FI_RX_CQ_DATA = 56;
    FI_SOURCE = 57;
    FI_AUTH_KEY = 57;
    FI_ASYNC_IOV = 57;
    FI_NAMED_RX_CTX = 58;
    FI_DISCARD = 58;
    FI_MSG_PREFIX = 58;
    FI_DIRECTED_RECV = 59;
    FI_CLAIM = 59;
    FI_SELECTIVE_COMPLETION = 59;
    FI_CONTEXT = 59;
}

/// The same bit as [`FI_SEND`].
pub const FI_TRANSMIT: u64 = FI_SEND;
/// The same bit as [`FI_COMPLETION`], on calls that can be asynchronous.
pub const FI_EVENT: u64 = FI_COMPLETION;

/// The flags of a `*msg` call, or [`crate::Error::BadFlags`] if one is not known.
pub fn op_flags(raw: u64) -> crate::Result<OpFlags> {
    OpFlags::from_bits(raw).ok_or(crate::Error::BadFlags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn typed_flags_have_libfabrics_bits() {
        assert_eq!(OpFlags::CLAIM.bits(), FI_CLAIM);
        assert_eq!(OpFlags::DISCARD.bits(), FI_DISCARD);
        assert_eq!(OpFlags::AUTH_KEY.bits(), FI_AUTH_KEY);
        assert_eq!(OpFlags::MATCH_COMPLETE.bits(), FI_MATCH_COMPLETE);
        assert_eq!(OpFlags::DELIVERY_COMPLETE.bits(), FI_DELIVERY_COMPLETE);
        assert_eq!(OpFlags::FENCE.bits(), FI_FENCE);
        assert_eq!(OpFlags::TRIGGER.bits(), FI_TRIGGER);
        assert_eq!(CqFlags::REMOTE_CQ_DATA.bits(), FI_REMOTE_CQ_DATA);
        assert_eq!(CqFlags::BUFFERED_RECV.bits(), FI_BUFFERED_RECV);
        assert_eq!(Caps::DIRECTED_RECV.bits(), FI_DIRECTED_RECV);
        assert_eq!(Caps::TAGGED_DIRECTED_RECV.bits(), FI_TAGGED_DIRECTED_RECV);
        assert_eq!(Caps::EXACT_DIRECTED_RECV.bits(), FI_EXACT_DIRECTED_RECV);
        assert_eq!(Caps::TAGGED_MULTI_RECV.bits(), FI_TAGGED_MULTI_RECV);
        assert_eq!(Caps::SOURCE_ERR.bits(), FI_SOURCE_ERR);
        assert_eq!(BindFlags::SELECTIVE_COMPLETION.bits(), FI_SELECTIVE_COMPLETION);
        assert_eq!(BindFlags::TRANSMIT.bits(), FI_TRANSMIT);
    }

    #[test]
    fn a_flag_that_is_not_known_is_refused() {
        assert_eq!(op_flags(FI_MORE | FI_FENCE), Ok(OpFlags::MORE | OpFlags::FENCE));
        for raw in [1 << 62, 1 << 40, FI_COMMIT_COMPLETE] {
            assert_eq!(op_flags(raw), Err(crate::Error::BadFlags));
        }
    }
}
