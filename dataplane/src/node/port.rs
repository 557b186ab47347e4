//! What a node knows of its port, and what follows from it for the frames that it sends.

use barewire_driver::frame::ETH_HDR_LEN;
use barewire_driver::port::{PortCaps, Station};

use super::path::Path;
use super::peer::Peer;
use super::{NodeSettings, usable};
use crate::rel::psn::Psn;
use crate::rel::sent::SentPool;
use crate::wire::{Base, McastOp, OpenOp, Ty};

/// See the module.
#[derive(Debug)]
pub struct PortState {
    pub(crate) station: Station,
    /// [`Station::word`] of it.
    pub(super) addr: u64,
    /// Most bytes after the Ethernet header, to peers that are not near.
    pub(crate) frame_max: u32,
    /// The same for near peers, which the port reaches through memory; 0 if it has none.
    pub(super) near_max: u32,
    pub(super) rto_floor_ns: u64,
    /// Every path is lossless.
    pub(super) lossless: bool,
    /// The path to every peer that is not near.
    pub(super) far: Path,
    /// It had no room in the last turn.
    pub(super) blocked: bool,
    pub(super) gone: bool,
}

impl PortState {
    /// Of a node with these settings, on a port with `caps` that takes `mtu` bytes after the
    /// Ethernet header.
    pub(super) fn new(s: &NodeSettings, caps: &PortCaps, mtu: usize) -> Self {
        Self {
            station: caps.station,
            addr: caps.station.word(),
            frame_max: mtu as u32,
            near_max: usable(caps.near_mtu) as u32,
            rto_floor_ns: caps.rto_floor_ns.max(1_000),
            lossless: caps.lossless,
            far: Path::far(caps, s.crc, s.keys.is_some()),
            blocked: false,
            gone: false,
        }
    }

    /// Whether the node has keys and the port needs them: its frames are sealed.
    pub fn has_keys(&self) -> bool {
        self.far.is_sealed()
    }

    /// Longest message to a multicast group, bytes; 8 less with remote CQ data.
    pub fn mc_max(&self) -> usize {
        let mtu = match self.near_max {
            0 => self.frame_max,
            near => self.frame_max.min(near),
        };
        self.far.room(mtu, McastOp::LEN)
    }

    /// Longest frame that may arrive, bytes.
    pub(super) fn frame_len(&self) -> usize {
        self.frame_max.max(self.near_max) as usize + ETH_HDR_LEN
    }

    /// The path to a near peer, or to any other. Frames to a near one stay in this machine's
    /// memory, so they carry no checksum.
    pub(super) fn path(&self, near: bool) -> Path {
        if near { Path::LOSSLESS | Path::PRESENCE | Path::NEAR } else { self.far }
    }

    /// Longest frame to a near peer or to any other, bytes after the Ethernet header.
    pub(super) fn path_mtu(&self, near: bool) -> u32 {
        if near { self.near_max } else { self.frame_max }
    }

    /// The lesser of the two ends' limits, in an open session.
    pub(super) fn frame_most(&self, peer: &Peer) -> u32 {
        match peer.frame_most {
            // The session with ourselves had no OPEN.
            0 => self.frame_max,
            most => most.into(),
        }
    }

    /// [`payload_max`](Peer::payload_max) of an answer no longer than its request: the request
    /// passed the path, so the answer does, even if this end never measured the path.
    pub(super) fn answer_max(&self, peer: &Peer, op_len: usize) -> usize {
        peer.path.room(self.frame_most(peer), op_len)
    }

    /// Whether another packet can be recorded in `sent` for retransmission. If not, its peer is
    /// served again later.
    #[inline]
    pub(super) fn can_keep(&mut self, sent: &SentPool) -> bool {
        let free = !sent.is_full();
        self.blocked |= !free;
        free
    }

    /// Whether the session of an OPEN is one with keys.
    pub(super) fn is_sealed(&self, op: &OpenOp) -> bool {
        self.far.is_sealed() && !op.is_near()
    }

    /// The base of a packet that carries no acknowledgement.
    pub(super) fn control(&self, dst: Station, ty: Ty, dst_sid: u32, psn: Psn) -> Base {
        Base {
            dst,
            src: self.station,
            ty,
            ar: false,
            rtx: false,
            ce: false,
            crc: self.far.has_crc(),
            dst_sid,
            psn,
            cack: Psn(0),
            grant: 0,
            plen: 0,
        }
    }
}
