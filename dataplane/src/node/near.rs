//! Which sessions are near: the proof, and a change of path before a session is open. See [`Path`].

use barewire_driver::frame::RxFrame;
use barewire_driver::hint::cold;

use super::path::Path;
use super::peer::{Peers, State, slot_of};
use super::{Control, EpId, FrameSink, Node, Sessions};
use crate::idx::PeerIdx;
use crate::plant::{Bug, planted};
use crate::rel::congestion::{CongestionControl, Controller};
use crate::types::FiAddr;
use crate::wire::{Base, OpenOp};

impl Peers {
    /// Whether a near frame names a near session: only near frames belong to one.
    #[inline(always)]
    pub(super) fn has_near_session(&self, frame: &RxFrame<'_>) -> bool {
        let sid = Base::dst_sid_of(frame).unwrap_or(0);
        let peer = self.get(slot_of(sid)).filter(|peer| peer.sid == sid);
        peer.is_some_and(|peer| peer.path.is_near())
    }
}

impl Node {
    /// Whether `dest` is a near peer and its route is the one that the endpoint has cached.
    pub(super) fn is_near_dest(&self, ep: EpId, dest: FiAddr) -> bool {
        let Some(ep) = self.eps.by_handle(ep.0).filter(|ep| ep.route.dest == dest) else {
            return false;
        };
        self.peers.get(ep.route.peer).is_some_and(|peer| peer.path.is_near())
    }
}

impl Sessions<'_> {
    /// Chooses the path of a session whose OPEN is about to be sent. False if another session has
    /// to replace it: the peer has become near or far since its own OPEN arrived.
    pub(super) fn choose_path(&mut self, p: PeerIdx, out: &mut dyn FrameSink) -> bool {
        if self.port.near_max == 0 {
            return true;
        }
        let peer = &self.peers[p];
        let same = planted(Bug::NearByMacAlone) && peer.station().mac == self.port.station.mac;
        let near = out.is_near(peer.station()) || same;
        if near == peer.path.is_near() {
            return true;
        }
        cold(());
        let is_unseen = !self.openings.has_opened(p) || planted(Bug::OpenRepeatedOnOtherPath);
        if peer.state == State::Opening && is_unseen {
            self.control().set_path(p, near);
            return true;
        }
        self.reopen(self.turn.polled_at, p, false);
        false
    }
}

impl Control<'_> {
    /// Sets the path of the session with `p`, on which nothing was sent: near or far.
    pub(super) fn set_path(&mut self, p: PeerIdx, near: bool) {
        let path = self.port.path(near);
        let peer = &mut self.peers[p];
        if !(planted(Bug::StalePath) && peer.path != Path::empty()) {
            peer.path = path;
        }
        // A cached route holds the entry by which a message to the peer leaves.
        self.eps.forget_routes();
        let peer = &mut self.peers[p];
        let window = if path.is_lossless() { Controller::whole() } else { Controller::default() };
        peer.snd.cwnd = window;
    }

    /// Whether `op` belongs to the session being opened with `p`, or crosses its OPEN, and
    /// disagrees on the path. Then one end has not yet noticed that the two have become near or
    /// far, and the next OPEN of the other will be of another session; or a node falsely claims to
    /// be near.
    ///
    /// An OPEN that came through memory prevails: our own session gives way to it.
    pub(super) fn is_path_changed(&mut self, p: PeerIdx, op: &OpenOp) -> bool {
        let peer = &self.peers[p];
        if op.is_near() == peer.path.is_near() {
            return false;
        }
        match peer.state {
            State::Idle | State::Open => false,
            State::Answered => op.inc == peer.inc && op.epoch == peer.peer_epoch,
            // If the application inserted another incarnation, the answer to the next OPEN reports
            // the end of this one.
            State::Opening => {
                let named = peer.inc == 0 || peer.inc == op.inc;
                let gives_way = op.is_near() && !op.is_answer() && named && !peer.is_over(op);
                if gives_way {
                    self.forget(p);
                }
                !gives_way
            }
        }
    }
}
