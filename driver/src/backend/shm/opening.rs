//! Rings towards other members: how they are opened, grown and given up.
//!
//! A ring starts short. It grows to its full length for a frame that does not fit otherwise, or
//! after much traffic: a node of many members with little traffic between most pairs takes little
//! memory, and busy pairs have room. While all long rings together take more than [`LONG_BYTES`], a
//! sender that needs another gives up one of its own that was not used lately: the receiver reads
//! the rest, gives the memory back, and the next frame opens the ring again. A receiver that does
//! not poll gives memory back late: once all long rings take twice [`LONG_BYTES`], a sender that
//! has any waits for that. Other members' counts of long rings are a hint.
//!
//! A sender killed at any step leaves a ring that others can tell to be open or closed: `tx_open`
//! is set before the memory is taken, and memory is given back whole.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::layout::MEMBERS_MAX;
use super::ring::{NoRoom, Producer, Reservation, RingMem};
use super::role::is_switch;
use super::segment::{CLOSED, DOORBELL};
use super::wait::Shared;
use super::{NO_KEY, NOTHING, ShmPort};
use crate::clock::now_ns;
use crate::error::ENLARGE;
use crate::mem::{Lap, Stores};
use crate::port::Tx;

/// Failed sends to a full ring between two checks that the receiver lives, and the least time
/// between two.
const PROBE_FULLS: u32 = 1024;
const PROBE_NS: u64 = 5_000_000;

/// Least time between two warnings that memory is short.
const WARN_NS: u64 = 10_000_000_000;

/// Bytes through a ring before it is grown, and before a failed attempt is repeated.
const GROW_AFTER: u64 = 64 << 10;
const GROW_AGAIN: u64 = 16 << 20;
/// Bytes that the long rings of all members may take. Twice that, plus one long ring for each of
/// 128 members and all short rings between them, is less than a GiB.
const LONG_BYTES: usize = 256 << 20;

/// A ring that has its full length.
pub(super) struct Long {
    to: usize,
    /// Bytes through it at the last search for a ring to give up.
    passed: u64,
}

impl ShmPort {
    /// Opens the ring towards `r`. [`Tx::Full`] if that has to wait for the lock, for memory, or
    /// for the receiver to read frames of our place's former holder.
    pub(super) fn connect(&mut self, r: usize) -> Tx {
        if !self.may_use_syscalls() {
            return Tx::Full;
        }
        let shared = Arc::clone(&self.shared);
        let Shared { seg, me, .. } = &*shared;
        let Some(_guard) = seg.try_lock() else { return Tx::Full };
        let state = seg.state(r).load(Acquire);
        if state == 0 || state != self.peers[r].state {
            self.epoch = self.epoch.wrapping_sub(1);
            return Tx::NoRoute;
        }
        if r != *me && !seg.lives(r) {
            if !seg.distrusts_members() {
                seg.clear(r);
            }
            return Tx::NoRoute;
        }
        let reserved = seg.reserve_links(*me, r);
        let Some(link) = seg.link(*me, r).filter(|_| reserved.is_ok()) else {
            return self.out_of_memory(r, reserved.err());
        };
        if link.rx_open.load(Acquire) != CLOSED {
            return Tx::Full;
        }
        link.tx_inc.store(self.inc, Relaxed);
        link.rx_inc.store(state >> 32, Relaxed);
        // First, so that a cleanup after our death gives the memory back.
        link.tx_open.store(1, Release);
        let len = seg.layout.first_len();
        let ring = match seg.open_ring(*me, r, len) {
            Ok(ring) => ring,
            Err(error) => {
                link.tx_open.store(0, Release);
                return self.out_of_memory(r, Some(error));
            }
        };
        self.memory_granted(r);
        // The ring was closed on both sides, so the one given up has been given back.
        self.given_up.retain(|&to| to != r);
        ring.clear(0);
        ring.set_head(0);
        // Release: the receiver that sees the link open sees the ring empty.
        link.rx_open.store(DOORBELL, Release);
        let out = &mut self.tx_rings[r];
        out.ring = Producer::new(ring, len);
        out.rx_open = link.rx_open;
        out.stores = Stores::new(Lap::Bytes(len as u32));
        out.grow_at = if len < seg.layout.ring_len { GROW_AFTER } else { u64::MAX };
        (out.is_open, out.fulls, out.alert) = (true, 0, out.sleeping);
        // The receiver sweeps the ring from here on, also if we die.
        out.ring_doorbell(*me);
        Tx::Sent
    }

    /// Records and logs that memory for a ring towards `r` is lacking.
    pub(super) fn out_of_memory(&mut self, r: usize, error: Option<io::Error>) -> Tx {
        self.lacks_memory = true;
        if !self.starved.contains(&r) {
            self.starved.push(r);
        }
        let now = now_ns();
        if let Some(error) = error
            && now.wrapping_sub(self.warned_ns) > WARN_NS
        {
            self.warned_ns = now;
            let path = self.shared.seg.path.display();
            tracing::warn!(%path, %error, "no memory for a ring: {ENLARGE}");
        }
        Tx::Full
    }

    /// Records that the ring towards `r` got its memory.
    fn memory_granted(&mut self, r: usize) {
        self.lacks_memory = false;
        self.starved.retain(|&starved| starved != r);
    }

    /// Records that a frame to `r` waits for the receiver, not for memory.
    fn not_starved(&mut self, r: usize) {
        self.starved.retain(|&starved| starved != r);
        self.lacks_memory &= !self.starved.is_empty();
    }

    /// Closes our end of the ring towards `r`: the receiver has closed its own (it left, died, or
    /// found the ring damaged), or the ring is given up.
    #[cold]
    pub(super) fn close_out(&mut self, r: usize) {
        for route in self.routes.iter_mut().filter(|route| route.to == r) {
            route.key = NO_KEY;
        }
        if self.last.to == r {
            self.forget_last();
        }
        self.starved.retain(|&starved| starved != r);
        let Shared { seg, me, .. } = &*self.shared;
        let out = &mut self.tx_rings[r];
        out.rx_open = &NOTHING;
        if !std::mem::take(&mut out.is_open) {
            return;
        }
        if self.long.iter().any(|long| long.to == r) {
            self.long.retain(|long| long.to != r);
            self.count_long();
        }
        let Some(link) = seg.link(*me, r) else { return };
        if link.rx_open.load(Acquire) == CLOSED {
            seg.give_back(*me, r);
        }
        link.tx_open.store(0, Release);
    }

    /// Handles a full ring towards `r`: checks now and then whether `r` still lives.
    #[cold]
    pub(super) fn full(&mut self, r: usize) -> Tx {
        let out = &mut self.tx_rings[r];
        out.fulls = out.fulls.wrapping_add(1);
        if !out.fulls.is_multiple_of(PROBE_FULLS) || r == self.shared.me {
            return Tx::Full;
        }
        let now = now_ns();
        if now.wrapping_sub(out.probed_ns) < PROBE_NS {
            return Tx::Full;
        }
        out.probed_ns = now;
        if self.shared.seg.lives(r) || !self.shared.seg.reap(r) {
            return Tx::Full;
        }
        self.close_out(r);
        Tx::NoRoute
    }

    /// Grows the ring towards `r` if possible, and reserves `len` bytes in it.
    #[cold]
    #[inline(never)]
    pub(super) fn make_room(&mut self, r: usize, len: usize) -> Option<Reservation> {
        match self.tx_rings[r].ring.reserve(len) {
            Err(NoRoom::Long) => self.grow(r, true),
            _ => {
                self.grow_busy(r, true);
                self.not_starved(r);
            }
        }
        self.tx_rings[r].ring.reserve(len).ok()
    }

    /// Grows the ring towards `r` after much traffic or when it is full for the first time, if
    /// long rings are to spare.
    #[cold]
    pub(super) fn grow_busy(&mut self, r: usize, is_full: bool) {
        let out = &mut self.tx_rings[r];
        let is_first = is_full && out.grow_at == GROW_AFTER;
        if is_first || out.ring.passed() >= out.grow_at {
            // When to try again.
            out.grow_at = out.ring.passed() + GROW_AGAIN;
            if self.spare() > 0 {
                self.grow(r, false);
            }
        }
    }

    /// Grows the ring towards `r`; if it `has_to`, at the cost of another long ring.
    fn grow(&mut self, r: usize, has_to: bool) {
        let ring_len = self.shared.seg.layout.ring_len;
        if self.tx_rings[r].ring.ring_len() >= ring_len || !self.may_use_syscalls() {
            return;
        }
        let Shared { seg, me, .. } = &*self.shared;
        self.given_up.retain(|&to| {
            let link = seg.link(*me, to);
            link.is_some_and(|link| link.rx_open.load(Acquire) != CLOSED)
        });
        self.count_long();
        let spare = self.spare();
        let has_any = !self.long.is_empty() || !self.given_up.is_empty();
        let is_late = has_any && spare <= -long_rings(ring_len);
        // While one is still to be given back, no other is given up.
        if spare <= 0 && (!is_late || self.given_up.is_empty()) {
            self.give_up_one(r);
        }
        if is_late {
            return;
        }
        let Shared { seg, me, .. } = &*self.shared;
        match seg.open_ring(*me, r, ring_len) {
            Ok(_) => {
                let out = &mut self.tx_rings[r];
                out.ring.grow(ring_len);
                out.stores = Stores::new(Lap::Bytes(ring_len as u32));
                out.grow_at = u64::MAX;
                self.memory_granted(r);
                self.long.push(Long { to: r, passed: 0 });
                self.count_long();
            }
            // The next attempt uses the memory given back meanwhile.
            Err(error) if has_to && !self.give_up_one(r) => {
                self.out_of_memory(r, Some(error));
            }
            Err(_) => {}
        }
    }

    /// Publishes the number of our long rings.
    fn count_long(&self) {
        let Shared { seg, me, .. } = &*self.shared;
        // Relaxed: a hint.
        seg.long(*me).store((self.long.len() + self.given_up.len()) as u64, Relaxed);
    }

    /// How many more long rings the segment may have; negative beyond the limit.
    fn spare(&self) -> isize {
        let Shared { seg, me, .. } = &*self.shared;
        // A switch's segment has at most one long ring each way per station.
        if is_switch(seg.state(*me).load(Relaxed)) {
            return 1;
        }
        let here = (0..seg.places()).filter(|&m| seg.state(m).load(Relaxed) != 0);
        let said = here.map(|m| usize::try_from(seg.long(m).load(Relaxed)).unwrap_or(0));
        let taken: usize = said.map(|count| count.min(2 * MEMBERS_MAX)).sum();
        long_rings(seg.layout.ring_len) - taken as isize
    }

    /// Gives up a long ring towards another member than `r`: the first without traffic since the
    /// last call, or the oldest. False if there is none.
    fn give_up_one(&mut self, r: usize) -> bool {
        let Self { long, tx_rings, .. } = self;
        let is_other = |long: &&mut Long| long.to != r;
        let mut others = long.iter_mut().filter(is_other).map(|long| {
            let passed = tx_rings[long.to].ring.passed();
            let is_busy = std::mem::replace(&mut long.passed, passed) != passed;
            (is_busy, long.to)
        });
        let first = others.next();
        // Visits all, so that the next call compares each with its count of now.
        let given_up = others.fold(first, |best, next| match best {
            Some((true, _)) if !next.0 => Some(next),
            best => best,
        });
        let Some((_, to)) = given_up else { return false };
        self.close_out(to);
        self.given_up.push(to);
        self.count_long();
        self.tx_rings[to].ring_doorbell(self.shared.me);
        true
    }
}

/// How many rings of `ring_len` bytes [`LONG_BYTES`] hold.
fn long_rings(ring_len: usize) -> isize {
    (LONG_BYTES / ring_len) as isize
}
