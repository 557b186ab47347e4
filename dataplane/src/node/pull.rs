//! The pull engine: the receiver requests the bytes of announced messages, and places them.
//!
//! DATA is placed as it arrives, in any order. Lengths are not trusted: the codec has checked them
//! against the frame, and they are checked against the buffer here.

use std::collections::VecDeque;
use std::ops::{Index, IndexMut};

use barewire_driver::frame::RxFrame;

use super::notice::EndReason;
use super::ops::Pull;
use super::peer::{Peer, Peers};
use super::recv::MsgHead;
use super::tx::TxWrs;
use super::{Due, NodeSettings, Objects, Operations, Receiving, Turn};
use crate::error::Error;
use crate::idx::{PeerIdx, PullIdx, RecvIdx};
use crate::proto::blocks::UNIT;
use crate::slab::{Handle, Slab};
use crate::types::Instant;
use crate::wire::{DataOp, EndStatus, PULL_MAX};

/// Maximum bytes that one PULL requests.
pub(super) const PULL_CHUNK: u64 = 256 << 10;

impl Pull {
    /// Maximum bytes that the next PULL or READ requests.
    fn next_len(&self) -> u64 {
        (self.want - self.requested).min(PULL_CHUNK).min(u64::from(PULL_MAX))
    }
}

/// The pulls of a node, and the window that they share.
#[derive(Debug)]
pub(crate) struct Pulls {
    pub(super) records: Slab<Pull, (), PullIdx>,
    /// Peers with pulls that wait for room in the window.
    queue: VecDeque<PeerIdx>,
    /// Bytes requested and not yet received.
    pub(super) out: u64,
    /// Maximum of `out`, for all peers together.
    window: u64,
}

impl Index<PullIdx> for Pulls {
    type Output = Pull;

    #[inline]
    fn index(&self, idx: PullIdx) -> &Pull {
        &self.records[idx]
    }
}

impl IndexMut<PullIdx> for Pulls {
    #[inline]
    fn index_mut(&mut self, idx: PullIdx) -> &mut Pull {
        &mut self.records[idx]
    }
}

impl Pulls {
    /// Maximum number of records: one for each receive, unexpected message and read.
    fn most(s: &NodeSettings) -> usize {
        s.rx_wr_max + s.unexpected_bytes / UNIT + s.tx_wr_max
    }

    /// Bytes of address space that the records occupy.
    pub(super) fn room(s: &NodeSettings) -> usize {
        Slab::<Pull, (), PullIdx>::SLOT_LEN * Self::most(s)
    }

    /// An empty table for a node with these settings.
    pub(super) fn new(s: &NodeSettings) -> Self {
        Self {
            records: Slab::with_capacity(Self::most(s)),
            queue: VecDeque::with_capacity(s.peer_max.min(4096)),
            out: 0,
            window: s.pull_window as u64,
        }
    }

    /// The peer that holds the most records, if none is free: credit allows one record per
    /// announcement, so some peer has announced more than that.
    pub(super) fn largest_holder(&self, peers: &Peers) -> Option<PeerIdx> {
        if self.records.free_count() > 0 {
            return None;
        }
        peers.iter().max_by_key(|(_, peer)| peer.pulls.len).map(|(p, _)| p)
    }

    /// Adds a pull from `peer`. The caller has checked that a record is free.
    pub(super) fn add(&mut self, peer: &mut Peer, pull: Pull) -> PullIdx {
        let mut idx = self.records.alloc(pull).expect("a free record was checked");
        // No pull has generation 0 in its READs: a slot whose generation has wrapped after 2^32
        // uses is skipped once.
        if self.records.generation(idx) == 0 {
            let pull = self.records.free(idx);
            idx = self.records.alloc(pull).expect("a slot was just freed");
        }
        peer.pulls.push_back(self, idx);
        idx
    }

    /// Removes a pull from every list, frees it, and returns it.
    pub(super) fn free(&mut self, peers: &mut Peers, idx: PullIdx) -> Pull {
        let peer = &mut peers[self[idx].peer];
        self.settle(peer, idx);
        self.dequeue(peer, idx);
        peer.pulls.remove(self, idx);
        if self[idx].read {
            peer.reads -= 1;
        }
        self.records.free(idx)
    }

    /// Whether the window has room for a request.
    fn has_room(&self) -> bool {
        self.out == 0 || self.out + PULL_CHUNK <= self.window
    }

    /// Whether the window has room for another request to `peer`. A peer may use at most half of
    /// the window: one that announces messages and sends none must not stop the others.
    fn has_room_for(&self, peer: &Peer) -> bool {
        let share = (self.window / 2).min(1 << 30);
        let out = u64::from(peer.pull_out);
        out == 0 || out + PULL_CHUNK <= share
    }

    /// Subtracts `len` bytes requested from `peer` that have arrived or are no longer expected.
    pub(super) fn settled(&mut self, peer: &mut Peer, len: u64) {
        self.out -= len;
        peer.pull_out -= len as u32;
    }

    /// Subtracts the requested bytes of pull `idx` that are no longer expected from the window.
    fn settle(&mut self, peer: &mut Peer, idx: PullIdx) {
        let pull = &mut self[idx];
        let left = pull.requested - pull.got + u64::from(pull.requesting);
        (pull.got, pull.requesting) = (pull.requested, 0);
        self.cancel_wait(peer, idx);
        self.settled(peer, left);
    }

    /// Queues pull `idx` of peer `p` for room in the window, before the peer's pulls that have not
    /// begun. Finishing messages one after the other returns buffers to the application sooner than
    /// pulling all of them side by side.
    fn wait(&mut self, (p, peer): (PeerIdx, &mut Peer), idx: PullIdx) {
        self[idx].waiting = true;
        if self[idx].requested > 0 {
            peer.pull_wait.push_front(self, idx);
        } else {
            peer.pull_wait.push_back(self, idx);
        }
        if !std::mem::replace(&mut peer.in_pull_queue, true) {
            self.queue.push_back(p);
        }
    }

    /// Removes a pull from the queue for room.
    pub(super) fn cancel_wait(&mut self, peer: &mut Peer, idx: PullIdx) {
        if std::mem::take(&mut self[idx].waiting) {
            peer.pull_wait.remove(self, idx);
        }
    }

    /// Removes a pull from the queue of PULLs and ENDs to send.
    pub(super) fn dequeue(&mut self, peer: &mut Peer, idx: PullIdx) {
        if std::mem::take(&mut self[idx].in_rndv_ctl_q) {
            peer.rndv_ctl_q.remove(self, idx);
        }
    }

    /// Whether pulls from `peer` have outstanding bytes and no bytes have arrived for T_dead. While
    /// the peer still refuses earlier packets, the age of a PULL behind them counts from the last
    /// acknowledgement.
    pub(super) fn have_stalled(&mut self, peer: &Peer, turn: &Turn, t_dead_ns: u64) -> bool {
        if peer.pull_out == 0 {
            return false;
        }
        let (active, una) = (turn.polled_at, peer.snd.una);
        // Frames that arrived during a pause of this process are processed before a timeout counts.
        let since = active.0.saturating_sub(t_dead_ns);
        let (mut at, mut waits) = (peer.pulls.head, false);
        while let Some(pull) = self.records.get_mut(at) {
            if pull.requested > pull.got {
                waits = true;
                if una.since(pull.psn) <= 0 && una != pull.una {
                    (pull.last_rx, pull.una) = (active, una);
                }
                if pull.last_rx.max(turn.resumed_at).0 > since {
                    return false;
                }
            }
            at = pull.of_peer.next;
        }
        waits
    }
}

impl Receiving<'_> {
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
        pull.want = head.len.min(self.sessions.posted.room(recv, base));
        pull.src_ep = head.src_ep;
        pull.tagged = head.tagged;
        pull.tag = head.tag;
        pull.imm = head.imm;
        self.sessions.posted[recv].payload.active += 1;
        self.add_pull(now, pull);
    }

    pub(super) fn add_pull(&mut self, now: Instant, pull: Pull) {
        let (p, ended, recv) = (pull.peer, pull.end.is_some(), pull.recv);
        if let Some(largest_holder) = self.sessions.pulls.largest_holder(self.sessions.peers) {
            self.sessions.end_session(now, largest_holder, EndReason::Excess);
            if largest_holder == p {
                if recv != RecvIdx::NONE {
                    self.sessions.posted[recv].payload.active -= 1;
                    self.sessions.objects().fail_placing(recv, Error::ConnReset);
                }
                return;
            }
        }
        self.sessions.peers[p].begin_to_wait(now);
        let idx = self.sessions.pulls.add(&mut self.sessions.peers[p], pull);
        if ended {
            self.sessions.operations().pull_engine().queue_pull(p, idx);
        } else if self.sessions.pulls[idx].want == 0 {
            self.sessions.operations().finish_pull(idx);
        } else {
            self.sessions.operations().pull_engine().request(idx);
        }
    }
}

impl Operations<'_> {
    /// The pulls, with access to the queues that their requests and ENDs go to.
    #[inline(always)]
    pub(super) fn pull_engine(&mut self) -> PullEngine<'_> {
        let Self { objects, pulls, tx, turn, .. } = self;
        let Objects { peers, due, .. } = objects;
        PullEngine { pulls, peers, tx, due, now: turn.polled_at }
    }

    /// Places a segment of a pulled message, in any order.
    pub(crate) fn on_data(
        &mut self,
        p: PeerIdx,
        frame: &RxFrame<'_>,
        op: &DataOp,
        (off, len): (usize, usize),
    ) {
        let idx = PullIdx::of(op.dst_op);
        let handle = Handle::from_parts(idx, op.dst_gen);
        let active = self.turn.polled_at;
        let Some(pull) = self.pulls.records.by_handle_mut(handle).filter(|pull| pull.peer == p)
        else {
            self.objects.counters.rx_stray += 1;
            return;
        };
        pull.last_rx = active;
        if pull.read {
            return self.on_read_data((p, idx), frame, op, (off, len));
        }
        if len == 0 {
            // The sender has closed the endpoint.
            self.fail_pull(idx, Error::Canceled);
            return;
        }
        let len64 = len as u64;
        let end = op.offset.checked_add(len64);
        if end.is_none_or(|end| end > pull.requested) || pull.got + len64 > pull.requested {
            self.objects.counters.rx_stray += 1;
            return;
        }
        pull.got += len64;
        let (recv, base) = (pull.recv, pull.base);
        let done = pull.got == pull.want && pull.end.is_none();
        let more = pull.requested < pull.want && pull.requested - pull.got <= PULL_CHUNK;
        self.pulls.settled(&mut self.objects.peers[p], len64);
        if recv != RecvIdx::NONE {
            let at = (base + op.offset) as usize;
            frame.copy_to_io(off, &self.objects.posted.buf(recv), at, len);
        }
        if done {
            self.finish_pull(idx);
        } else if more {
            self.pull_engine().request(idx);
        }
        self.pull_engine().serve_waiting_pulls();
    }

    /// Completes a pull of which every wanted byte has arrived, and sends END.
    fn finish_pull(&mut self, idx: PullIdx) {
        let pull = &mut self.pulls[idx];
        let status = if pull.want < pull.msg_len { EndStatus::Truncated } else { EndStatus::Ok };
        let recv = std::mem::replace(&mut pull.recv, RecvIdx::NONE);
        let head = MsgHead {
            peer: pull.peer,
            inc: self.objects.peers[pull.peer].inc,
            src_ep: pull.src_ep,
            tagged: pull.tagged,
            tag: pull.tag,
            imm: pull.imm,
            len: pull.msg_len,
        };
        let (base, want) = (pull.base, pull.want);
        self.pull_engine().end_pull(idx, status);
        if recv != RecvIdx::NONE {
            self.objects.posted[recv].payload.active -= 1;
            self.objects.complete_recv(recv, &head, base, want);
        }
    }

    /// Fails a pull: its session is over or the announcement was withdrawn.
    pub(crate) fn fail_pull(&mut self, idx: PullIdx, err: Error) {
        let pull = self.pulls.free(self.objects.peers, idx);
        if pull.recv != RecvIdx::NONE {
            self.objects.posted[pull.recv].payload.active -= 1;
            self.objects.fail_placing(pull.recv, err);
        }
        // Its outstanding bytes free room in the window for others.
        self.pull_engine().serve_waiting_pulls();
    }
}

/// The pulls of a node, with access to the queues of the peers that their requests go to.
pub(super) struct PullEngine<'a> {
    pulls: &'a mut Pulls,
    peers: &'a mut Peers,
    tx: &'a TxWrs,
    due: &'a mut Due,
    /// Time of the turn.
    now: Instant,
}

impl PullEngine<'_> {
    /// Requests the next bytes of pull `idx`, or queues it until the pull window has room.
    pub(super) fn request(&mut self, idx: PullIdx) {
        let pull = &self.pulls[idx];
        if pull.in_rndv_ctl_q || pull.waiting {
            return;
        }
        let p = pull.peer;
        if !self.pulls.has_room() || !self.pulls.has_room_for(&self.peers[p]) {
            return self.pulls.wait((p, &mut self.peers[p]), idx);
        }
        let mut len = pull.next_len();
        if pull.read {
            len = len.min(self.tx.rma_of(pull.wr).read_room());
        }
        let pull = &mut self.pulls[idx];
        if pull.requested == pull.got {
            pull.last_rx = self.now;
        }
        pull.requesting = len as u32;
        self.pulls.out += len;
        self.peers[p].pull_out += len as u32;
        self.queue_pull(p, idx);
    }

    /// Lets waiting pulls send requests, one per peer in turns, while the window has room.
    pub(super) fn serve_waiting_pulls(&mut self) {
        for _ in 0..self.pulls.queue.len().min(64) {
            if !self.pulls.has_room() {
                return;
            }
            let Some(p) = self.pulls.queue.pop_front() else { return };
            let Some(peer) = self.peers.get_mut(p) else { continue };
            // The slot may have been reused for another peer.
            if !peer.in_pull_queue || peer.pull_wait.is_empty() {
                peer.in_pull_queue = false;
                continue;
            }
            self.pulls.queue.push_back(p);
            let peer = &mut self.peers[p];
            if self.pulls.has_room_for(peer) {
                let idx = peer.pull_wait.head;
                self.pulls.cancel_wait(peer, idx);
                self.request(idx);
            }
        }
    }

    fn queue_pull(&mut self, p: PeerIdx, idx: PullIdx) {
        let pull = &mut self.pulls[idx];
        if !pull.in_rndv_ctl_q {
            pull.in_rndv_ctl_q = true;
            self.peers[p].rndv_ctl_q.push_back(self.pulls, idx);
        }
        self.due.make_ready(self.peers, p);
    }

    /// Queues END with `status` for pull `idx`, which requests no more bytes.
    pub(super) fn end_pull(&mut self, idx: PullIdx, status: EndStatus) {
        let pull = &mut self.pulls[idx];
        pull.end = Some(status);
        let p = pull.peer;
        self.pulls.settle(&mut self.peers[p], idx);
        self.queue_pull(p, idx);
        self.serve_waiting_pulls();
    }
}
