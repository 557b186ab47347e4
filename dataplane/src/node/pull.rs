//! The pull engine: the receiver asks for the bytes of announced messages, and takes them.
//!
//! DATA is taken as it arrives, in any order. Lengths are not trusted: the codec checked them
//! against the frame, and they are checked against the buffer here.

use barewire_driver::frame::RxFrame;

use super::Node;
use super::fast_op::FastOp;
use super::notice::EndReason;
use super::ops::Pull;
use super::recv::MsgHead;
use crate::error::Error;
use crate::idx::{PeerIdx, PullIdx, RecvIdx};
use crate::slab::Handle;
use crate::types::Instant;
use crate::wire::{DataOp, EndStatus, PULL_MAX, Ty};

/// Bytes that one PULL asks for at most.
pub(super) const PULL_CHUNK: u64 = 256 << 10;

impl Node {
    /// Takes a segment of a pulled message, in any order.
    pub(crate) fn on_data(
        &mut self,
        now: Instant,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        op: &DataOp,
        (off, len): (usize, usize),
    ) {
        if FastOp::is_name(op.dst_op) {
            let asked = (op.dst_op, op.dst_gen, op.offset);
            return self.on_fast_answer((p, Ty::Data), frame, asked, (off, len));
        }
        let idx = PullIdx::of(op.dst_op);
        let handle = Handle::from_parts(idx, op.dst_gen);
        let active = self.polled_at;
        let Some(pull) = self.pulls.by_handle_mut(handle).filter(|pull| pull.peer == p) else {
            self.counters.rx_stray += 1;
            return;
        };
        pull.last_rx = active;
        if pull.read {
            return self.on_read_data(now, (p, idx), frame, op, (off, len));
        }
        if len == 0 {
            // The sender has closed the endpoint.
            self.fail_pull(idx, Error::Canceled);
            return;
        }
        let len64 = len as u64;
        let end = op.offset.checked_add(len64);
        if end.is_none_or(|end| end > pull.asked) || pull.got + len64 > pull.asked {
            self.counters.rx_stray += 1;
            return;
        }
        pull.got += len64;
        let (recv, base) = (pull.recv, pull.base);
        let done = pull.got == pull.want && pull.end.is_none();
        let more = pull.asked < pull.want && pull.asked - pull.got <= PULL_CHUNK;
        self.pull_settled(p, len64);
        if recv != RecvIdx::NONE {
            let at = (base + op.offset) as usize;
            frame.copy_to_io(off, &self.recv_buf(recv), at, len);
        }
        if done {
            self.finish_pull(now, idx);
        } else if more {
            self.ask(now, idx);
        }
        self.serve_waiting_pulls(now);
    }

    /// Starts to pull an announced message into a receive.
    pub(super) fn pull(
        &mut self,
        now: Instant,
        recv: RecvIdx,
        base: u64,
        head: &MsgHead,
        src_op: u32,
        src_gen: u32,
    ) {
        let mut pull = Pull::new(head.peer, src_op, src_gen, None);
        pull.recv = recv;
        pull.base = base;
        pull.msg_len = head.len;
        pull.want = head.len.min(self.room(recv, base));
        pull.src_ep = head.src_ep;
        pull.tagged = head.tagged;
        pull.tag = head.tag;
        pull.imm = head.imm;
        self.posted[recv].payload.active += 1;
        self.add_pull(now, pull);
    }

    pub(super) fn add_pull(&mut self, now: Instant, pull: Pull) {
        let (p, ended, recv) = (pull.peer, pull.end.is_some(), pull.recv);
        if self.pulls.free_count() == 0 {
            // There is a record for each announcement that credit allows, so some peer has
            // announced more.
            let hog =
                self.peers.iter().max_by_key(|(_, peer)| peer.pulls.len).map_or(p, |(h, _)| h);
            self.end_session(now, hog, EndReason::Excess);
            if hog == p {
                if recv != RecvIdx::NONE {
                    self.posted[recv].payload.active -= 1;
                    self.fail_placing(recv, Error::ConnReset);
                }
                return;
            }
        }
        self.peers[p].begin_to_wait(now);
        let idx = self.pulls.alloc(pull).expect("the hog had some");
        self.peers[p].pulls.push_back(&mut self.pulls, idx);
        if ended {
            self.queue_pull(p, idx);
        } else if self.pulls[idx].want == 0 {
            self.finish_pull(now, idx);
        } else {
            self.ask(now, idx);
        }
    }

    /// Asks for the next bytes of pull `idx`, or queues it until the pull window has room.
    pub(crate) fn ask(&mut self, _now: Instant, idx: PullIdx) {
        let pull = &self.pulls[idx];
        if pull.in_rndv_ctl_q || pull.waiting {
            return;
        }
        let p = pull.peer;
        if !self.pull_room() || !self.pull_share(p) {
            return self.wait_for_room(p, idx);
        }
        let (_, len) = self.next_piece(idx);
        let pull = &mut self.pulls[idx];
        if pull.asked == pull.got {
            pull.last_rx = self.polled_at;
        }
        pull.asking = len;
        self.pull_out += u64::from(len);
        self.peers[p].pull_out += len;
        self.queue_pull(p, idx);
    }

    /// Whether the pull window of the node has room for a request.
    fn pull_room(&self) -> bool {
        self.pull_out == 0 || self.pull_out + PULL_CHUNK <= self.settings.pull_window as u64
    }

    /// Whether the pull window has room for another request to `p`. A peer may use half of the
    /// window: one that announces messages and sends none must not stop the others.
    fn pull_share(&self, p: PeerIdx) -> bool {
        let share = (self.settings.pull_window as u64 / 2).min(1 << 30);
        let out = u64::from(self.peers[p].pull_out);
        out == 0 || out + PULL_CHUNK <= share
    }

    /// Queues pull `idx` for room in the window, before pulls of its peer that have not begun.
    /// Finishing one message after the other gives the application buffers back sooner than all
    /// messages side by side.
    fn wait_for_room(&mut self, p: PeerIdx, idx: PullIdx) {
        let (peer, pulls) = (&mut self.peers[p], &mut self.pulls);
        pulls[idx].waiting = true;
        if pulls[idx].asked > 0 {
            peer.pull_wait.push_front(pulls, idx);
        } else {
            peer.pull_wait.push_back(pulls, idx);
        }
        if !std::mem::replace(&mut peer.in_pull_queue, true) {
            self.pull_queue.push_back(p);
        }
    }

    /// Takes a pull out of the queue for room.
    pub(crate) fn unwait_pull(&mut self, idx: PullIdx) {
        let pull = &mut self.pulls[idx];
        let p = pull.peer;
        if std::mem::take(&mut pull.waiting) {
            self.peers[p].pull_wait.remove(&mut self.pulls, idx);
        }
    }

    /// `len` bytes that were asked for from `p` have arrived or are no longer expected.
    pub(crate) fn pull_settled(&mut self, p: PeerIdx, len: u64) {
        self.pull_out -= len;
        self.peers[p].pull_out -= len as u32;
    }

    /// Whether pulls from `p` have outstanding bytes and none has arrived for T_dead. While the
    /// peer is still refusing earlier packets, a PULL behind them ages from its last
    /// acknowledgement.
    pub(crate) fn pulls_stalled(&mut self, p: PeerIdx) -> bool {
        let peer = &self.peers[p];
        if peer.pull_out == 0 {
            return false;
        }
        let (active, una) = (self.polled_at, peer.snd.una);
        // Frames that arrived during a pause of ours are taken before anything times out.
        let since = active.0.saturating_sub(self.settings.t_dead_ns);
        let (mut at, mut waits) = (peer.pulls.head, false);
        while let Some(pull) = self.pulls.get_mut(at) {
            if pull.asked > pull.got {
                waits = true;
                if una.since(pull.psn) <= 0 && una != pull.una {
                    (pull.last_rx, pull.una) = (active, una);
                }
                if pull.last_rx.max(self.resumed_at).0 > since {
                    return false;
                }
            }
            at = pull.of_peer.next;
        }
        waits
    }

    /// Lets queued pulls ask, one of each peer by turns, while the window has room.
    pub(crate) fn serve_waiting_pulls(&mut self, now: Instant) {
        for _ in 0..self.pull_queue.len().min(64) {
            if !self.pull_room() {
                return;
            }
            let Some(p) = self.pull_queue.pop_front() else { return };
            let Some(peer) = self.peers.get_mut(p) else { continue };
            // The slot may have been reused for another peer.
            if !peer.in_pull_queue || peer.pull_wait.is_empty() {
                peer.in_pull_queue = false;
                continue;
            }
            self.pull_queue.push_back(p);
            if self.pull_share(p) {
                let idx = self.peers[p].pull_wait.head;
                self.unwait_pull(idx);
                self.ask(now, idx);
            }
        }
    }

    /// Offset and length that the next PULL of `idx` asks for.
    pub(crate) fn next_piece(&self, idx: PullIdx) -> (u64, u32) {
        let pull = &self.pulls[idx];
        let mut len = (pull.want - pull.asked).min(PULL_CHUNK).min(u64::from(PULL_MAX));
        if pull.read {
            len = len.min(self.rma[self.tx[pull.wr].rma()].read_room());
        }
        (pull.asked, len as u32)
    }

    fn queue_pull(&mut self, p: PeerIdx, idx: PullIdx) {
        let pull = &mut self.pulls[idx];
        if !pull.in_rndv_ctl_q {
            pull.in_rndv_ctl_q = true;
            self.peers[p].rndv_ctl_q.push_back(&mut self.pulls, idx);
        }
        self.make_ready(p);
    }

    /// Everything wanted has arrived: completes the receive and sends END.
    fn finish_pull(&mut self, now: Instant, idx: PullIdx) {
        let pull = &mut self.pulls[idx];
        let status = if pull.want < pull.msg_len { EndStatus::Truncated } else { EndStatus::Ok };
        let recv = std::mem::replace(&mut pull.recv, RecvIdx::NONE);
        let head = MsgHead {
            peer: pull.peer,
            inc: self.peers[pull.peer].inc,
            src_ep: pull.src_ep,
            tagged: pull.tagged,
            tag: pull.tag,
            imm: pull.imm,
            len: pull.msg_len,
        };
        let (base, want) = (pull.base, pull.want);
        self.end_pull(now, idx, status);
        if recv != RecvIdx::NONE {
            self.posted[recv].payload.active -= 1;
            self.complete_recv(recv, &head, base, want);
        }
    }

    /// Sends END with `status` as soon as a packet can leave. Nothing more is asked for.
    pub(crate) fn end_pull(&mut self, now: Instant, idx: PullIdx, status: EndStatus) {
        let pull = &mut self.pulls[idx];
        pull.end = Some(status);
        let p = pull.peer;
        self.settle_pull(idx);
        self.queue_pull(p, idx);
        self.serve_waiting_pulls(now);
    }

    /// Bytes that were asked for and are no longer expected leave the pull window.
    fn settle_pull(&mut self, idx: PullIdx) {
        let pull = &mut self.pulls[idx];
        let (p, left) = (pull.peer, pull.asked - pull.got + u64::from(pull.asking));
        (pull.got, pull.asking) = (pull.asked, 0);
        self.unwait_pull(idx);
        self.pull_settled(p, left);
    }

    /// Unlinks and frees a pull, and returns it.
    pub(crate) fn free_pull(&mut self, idx: PullIdx) -> Pull {
        self.settle_pull(idx);
        let p = self.pulls[idx].peer;
        if std::mem::take(&mut self.pulls[idx].in_rndv_ctl_q) {
            self.peers[p].rndv_ctl_q.remove(&mut self.pulls, idx);
        }
        self.peers[p].pulls.remove(&mut self.pulls, idx);
        if self.pulls[idx].read {
            self.peers[p].reads -= 1;
        }
        self.pulls.free(idx)
    }

    /// Fails a pull: its session is over or the announcement was withdrawn.
    pub(crate) fn fail_pull(&mut self, idx: PullIdx, err: Error) {
        let pull = self.free_pull(idx);
        if pull.recv != RecvIdx::NONE {
            self.posted[pull.recv].payload.active -= 1;
            self.fail_placing(pull.recv, err);
        }
        // Its outstanding bytes make room in the window for others.
        self.serve_waiting_pulls(self.polled_at);
    }
}
