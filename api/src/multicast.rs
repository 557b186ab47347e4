//! Multicast groups, fi_cm(3), "fi_join": messages to all endpoints that have joined, best effort.
//!
//! An endpoint with `FI_MULTICAST` [joins](EpCommon::join) a group and sends to [`Group::addr`]
//! with the untagged calls of [`crate::msg`]; the flag [`OpFlags::MULTICAST`] is optional there,
//! and is refused for any other address.
//!
//! - A message is one frame, at most [`Group::max_msg_size`] bytes: longer is
//!   [`Error::MsgTooLong`]. It may be lost and may overtake others. The send completes when the
//!   message is copied; [`OpFlags::DELIVERY_COMPLETE`] and [`OpFlags::FENCE`] are
//!   [`Error::BadFlags`].
//! - A message needs a posted receive at the member. Without one it is dropped and counted
//!   (`rx_mcast_dropped`): it is not stored for a later receive.
//! - The sender does not receive its own message. All other members do, also those of the same
//!   domain.
//! - Every station on the link can send to a group, with any source address, and every node on the
//!   link gets the frames. A domain that seals frames cannot join a group, and ports without
//!   broadcast (`udp:`, `ip(...)`) have no groups.

use barewire_dataplane::node::McId;
use barewire_dataplane::types::FiAddr;

pub use barewire_dataplane::types::GroupAddr;

use crate::coll::{FI_RECV, FI_SEND};
use crate::ep::EpCommon;
use crate::errno::{Error, Result};
use crate::flags::Caps;
use crate::inner::DomainRef;

#[cfg(doc)]
use crate::flags::OpFlags;

/// Membership of an endpoint in a multicast group (`struct fid_mc`). Dropping it leaves the group.
pub struct Group {
    dom: DomainRef,
    id: McId,
    max_msg_size: usize,
}

impl Group {
    /// The destination address of messages to the group.
    #[doc(alias = "fi_mc_addr")]
    pub fn addr(&self) -> FiAddr {
        self.id.addr()
    }

    /// Longest message, bytes; 8 less with remote CQ data. A member whose port takes shorter frames
    /// does not get messages that are longer than these.
    pub fn max_msg_size(&self) -> usize {
        self.max_msg_size
    }

    /// Leaves the group.
    #[doc(alias = "fi_close")]
    pub fn close(self) {}
}

impl Drop for Group {
    fn drop(&mut self) {
        let Ok(mut core) = self.dom.lock.enter_to_close() else { return };
        // An endpoint that was closed before has left the group.
        let _ = core.node().groups.leave(self.id);
    }
}

impl EpCommon {
    /// Joins a multicast group in the directions that the endpoint has, or with [`FI_SEND`] or
    /// [`FI_RECV`] in `flags` in that direction alone.
    ///
    /// No frame is sent. The endpoint is in the group when the call returns, and the bound event
    /// queue gets [`FI_JOIN_COMPLETE`](crate::FI_JOIN_COMPLETE) with `context` (8 bytes,
    /// little-endian).
    ///
    /// # Errors
    /// - [`Error::NoEq`]: no event queue is bound.
    /// - [`Error::OpNotSupp`]: the endpoint lacks `FI_MULTICAST` with `FI_MSG`, or the direction.
    /// - [`Error::OpBadState`]: the endpoint is not enabled.
    /// - [`Error::Invalid`]: the endpoint is in the group already.
    /// - [`Error::BadFlags`]: other flags.
    /// - [`Error::NoMem`]: the endpoints of the domain are in 256 groups.
    ///
    /// Source: fi_cm(3), "fi_join".
    #[doc(alias = "fi_join")]
    pub fn join(&self, group: GroupAddr, flags: u64, context: u64) -> Result<Group> {
        self.join_named(group, flags, context, |_| None)
    }

    /// As [`join`](Self::join), for the C provider. `named` gets the address of the group before
    /// the event is written, and returns the fid of the event: a `struct fi_eq_entry` of 24 bytes
    /// with this fid, the context and 0.
    ///
    /// # Errors
    /// As there.
    pub fn join_named(
        &self,
        group: GroupAddr,
        flags: u64,
        context: u64,
        named: impl FnOnce(FiAddr) -> Option<u64>,
    ) -> Result<Group> {
        if flags & !(FI_SEND | FI_RECV) != 0 {
            return Err(Error::BadFlags);
        }
        let eq = self.eq().ok_or(Error::NoEq)?;
        let mut directions = Caps::empty();
        directions.set(Caps::SEND, flags & FI_SEND != 0);
        directions.set(Caps::RECV, flags & FI_RECV != 0);
        let mut core = self.dom.enter_control()?;
        let id = core.node().multicast().join(self.id, group, directions)?;
        let max_msg_size = core.node().port.mc_max();
        drop(core);
        eq.push_join(named(id.addr()), context, Ok(()));
        Ok(Group { dom: self.dom.clone(), id, max_msg_size })
    }
}
