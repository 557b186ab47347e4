//! The transmit requests of a node, and their memory.

use std::ops::{Index, IndexMut};

use barewire_driver::frame::Body;
use barewire_driver::hint::cold;
use barewire_driver::mem::IoBuf;

use super::ops::{Inject, Rma, TxWr, WrFlags};
use super::peer::{Peer, Peers};
use super::{Node, NodeSettings};
use crate::idx::{EpIdx, RmaIdx, TxIdx};
use crate::rel::sent::{SendWindow, SentPool};
use crate::slab::Slab;

/// The transmit requests of a node, and their memory.
#[derive(Debug)]
pub(crate) struct TxWrs {
    pub(super) wrs: Slab<TxWr, (), TxIdx>,
    /// Memory lent to the requests, by their index.
    pub(super) bufs: Vec<IoBuf>,
    /// Copies of injected messages, by the index of their request.
    pub(super) inject: Vec<Inject>,
    /// The parts of one-sided operations that a request record has no room for.
    pub(super) rma: Slab<Rma, (), RmaIdx>,
}

impl Index<TxIdx> for TxWrs {
    type Output = TxWr;

    #[inline(always)]
    fn index(&self, w: TxIdx) -> &TxWr {
        &self.wrs[w]
    }
}

impl IndexMut<TxIdx> for TxWrs {
    #[inline(always)]
    fn index_mut(&mut self, w: TxIdx) -> &mut TxWr {
        &mut self.wrs[w]
    }
}

impl TxWrs {
    /// An empty table for a node with these settings.
    pub(super) fn new(s: &NodeSettings) -> Self {
        let (bufs, inject) = (Vec::with_capacity(s.tx_wr_max), Vec::with_capacity(s.tx_wr_max));
        let (wrs, rma) = (Slab::with_capacity(s.tx_wr_max), Slab::with_capacity(s.tx_wr_max));
        Self { wrs, bufs, inject, rma }
    }

    /// Whether no record is free.
    #[inline]
    pub(super) fn is_full(&self) -> bool {
        self.wrs.is_full()
    }

    /// Takes a record. The caller has checked that one is free.
    #[inline]
    pub(super) fn alloc(&mut self, wr: TxWr) -> TxIdx {
        let w = self.wrs.alloc_with(|_| wr).expect("a free slot was checked");
        if self.inject.len() <= w.at() {
            self.touch(w);
        }
        w
    }

    /// Prepares the memory of a slot that is used for the first time. Allocates only within what
    /// was reserved.
    #[cold]
    fn touch(&mut self, w: TxIdx) {
        let count = w.at() + 1;
        self.inject.resize(count, [0; Node::INJECT_SIZE]);
        self.bufs.resize_with(count, IoBuf::default);
    }

    /// Stores the memory that a request sends or reads into: a copy if the request is injected,
    /// else the memory itself, which is moved out of `buf`.
    #[inline]
    pub(super) fn keep_memory(&mut self, w: TxIdx, buf: &mut IoBuf) {
        self.keep_memory_of(w, self[w].flags.contains(WrFlags::INJECTED), buf);
    }

    /// [`keep_memory`](Self::keep_memory) for a request that is `injected` or not.
    #[inline(always)]
    pub(super) fn keep_memory_of(&mut self, w: TxIdx, injected: bool, buf: &mut IoBuf) {
        if injected {
            buf.read_at(0, &mut self.inject[w.at()][..buf.len()]);
        } else {
            buf.move_to(&mut self.bufs[w.at()]);
        }
    }

    /// `len` bytes at `offset` of a request's memory.
    #[inline]
    pub(super) fn body(&self, w: TxIdx, offset: usize, len: usize) -> Body<'_> {
        self[w].body((&self.inject[w.at()], &self.bufs[w.at()]), offset, len)
    }

    /// The one-sided part of a request.
    #[inline]
    pub(super) fn rma_of(&self, w: TxIdx) -> &Rma {
        &self.rma[self[w].rma()]
    }

    /// [`rma_of`](Self::rma_of), mutable.
    #[inline]
    pub(super) fn rma_mut(&mut self, w: TxIdx) -> &mut Rma {
        &mut self.rma[self.wrs[w].rma()]
    }

    /// Whether the packets of a request are recorded until acknowledged: on a lossy path always, on
    /// a lossless one only if the completion waits for the peer.
    #[inline]
    pub(super) fn keeps(&self, peers: &Peers, w: TxIdx) -> bool {
        let wr = &self[w];
        !peers[wr.peer].path.is_lossless() || wr.flags.contains(WrFlags::DELIVERY)
    }

    /// Number of messages of this endpoint with this context that have yet to leave for `peer`, at
    /// most `most`.
    pub(super) fn waiting(&self, peer: &Peer, of: (EpIdx, u64), most: usize) -> usize {
        let is_of = |w: &TxIdx| (self[*w].ep, self[*w].context) == of;
        peer.send_q.iter(self).filter(is_of).take(most).count()
    }

    /// Unlinks a request from every list of its peer.
    #[inline(always)]
    pub(super) fn unlink(&mut self, peers: &mut Peers, w: TxIdx) {
        let wr = &mut self[w];
        let (flags, link) = (wr.flags, std::mem::take(&mut wr.of_peer));
        wr.flags.remove(WrFlags::IN_SEND_Q | WrFlags::IN_RNDV_DATA_Q);
        let peer = &mut peers[wr.peer];
        if flags.intersects(WrFlags::IN_SEND_Q | WrFlags::IN_RNDV_DATA_Q) {
            cold(());
            if flags.contains(WrFlags::IN_SEND_Q) {
                peer.send_q.remove(self, w);
            }
            if flags.contains(WrFlags::IN_RNDV_DATA_Q) {
                peer.rndv_data_q.remove(self, w);
            }
        }
        peer.wrs.cut(self, w, link);
    }

    /// Settles a message of which the receiver has everything it wants: packets that are
    /// unacknowledged because an earlier packet is missing no longer delay its completion.
    pub(super) fn settle_ended(&mut self, snd: &mut SendWindow, sent: &mut SentPool, w: TxIdx) {
        snd.for_each_while(sent, |entry| {
            if entry.wr == w {
                entry.become_nop();
                self[w].unacked -= 1;
            }
            self[w].unacked > 0
        });
    }
}
