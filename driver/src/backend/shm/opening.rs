//! Rings towards other members: opened, made longer, and given up.
//!
//! A ring is short at first. It gets its full length when a frame does not fit otherwise, or when
//! much has passed through it: so a node of many members, each of which exchanges a little with
//! every other, takes little memory, and the pairs that exchange much have room. While all long
//! rings together take more than [`LONG_BYTES`], who needs another for a long frame gives up one
//! that was not used lately: the receiver reads what is in there, gives the memory back, and the
//! next frame opens it anew. Those of receivers that do not poll are given back late: who has one
//! waits for that when all together take twice as much. What others say of how many they have is a
//! hint.
//!
//! A sender that is killed leaves a ring that somebody else can tell to be open or closed, at
//! every step: `tx_open` is set before the memory is taken, and memory is given back whole.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

use super::layout::MEMBERS_MAX;
use super::ring::{NoRoom, Place, Producer, RingMem};
use super::role::is_switch;
use super::segment::{BELL, CLOSED};
use super::wait::Shared;
use super::{NO_KEY, NOTHING, ShmPort};
use crate::clock::now_ns;
use crate::error::ENLARGE;
use crate::mem::{Lap, Stores};
use crate::port::Tx;

/// Refusals for want of room before the receiver's life is checked, and the least time between.
const PROBE_FULLS: u32 = 1024;
const PROBE_NS: u64 = 5_000_000;

/// Least time between two lines of the log that say that there is no memory.
const WARN_NS: u64 = 10_000_000_000;

/// Bytes through a ring after which it had better be longer, and after which that is tried again.
const GROW_AFTER: u64 = 64 << 10;
const GROW_AGAIN: u64 = 16 << 20;
/// Bytes that the long rings of all members may take. Twice that, one more for each of 128 members
/// and short rings between them are less than a GiB.
const LONG_BYTES: usize = 256 << 20;

/// A ring that has its full length.
pub(super) struct Long {
    to: usize,
    /// What had passed through it when one was looked for that could be given up.
    passed: u64,
}

impl ShmPort {
    /// Opens the ring towards `r`. [`Tx::Full`] if that has to wait: for the lock, for memory, or
    /// for the receiver to read what our place's former holder sent.
    pub(super) fn connect(&mut self, r: usize) -> Tx {
        if !self.may_step() {
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
            if !seg.is_wary() {
                seg.clear(r);
            }
            return Tx::NoRoute;
        }
        let reserved = seg.reserve_links(*me, r);
        let Some(link) = seg.link(*me, r).filter(|_| reserved.is_ok()) else {
            return self.lacks(r, reserved.err());
        };
        if link.rx_open.load(Acquire) != CLOSED {
            return Tx::Full;
        }
        link.tx_inc.store(self.inc, Relaxed);
        link.rx_inc.store(state >> 32, Relaxed);
        // First, so that whoever cleans up after us if we die here gives the memory back.
        link.tx_open.store(1, Release);
        let len = seg.layout.first_len();
        let ring = match seg.open_ring(*me, r, len) {
            Ok(ring) => ring,
            Err(error) => {
                link.tx_open.store(0, Release);
                return self.lacks(r, Some(error));
            }
        };
        self.fed(r);
        // That it is closed was seen: what was given up is given back.
        self.given_up.retain(|&to| to != r);
        ring.clear(0);
        ring.set_head(0);
        // Release: the receiver that sees the link open sees the ring empty.
        link.rx_open.store(BELL, Release);
        let out = &mut self.outs[r];
        out.ring = Producer::new(ring, len);
        out.rx_open = link.rx_open;
        out.stores = Stores::new(Lap::Bytes(len as u32));
        out.grow_at = if len < seg.layout.ring_len { GROW_AFTER } else { u64::MAX };
        (out.is_open, out.fulls, out.alert) = (true, 0, out.sleeping);
        // Who has heard of the ring sweeps it, whatever becomes of us.
        out.ring_bell(*me);
        Tx::Sent
    }

    /// There is no memory for a ring towards `r`.
    pub(super) fn lacks(&mut self, r: usize, error: Option<io::Error>) -> Tx {
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

    /// There was memory for the ring towards `r`.
    fn fed(&mut self, r: usize) {
        self.lacks_memory = false;
        self.starved.retain(|&starved| starved != r);
    }

    /// A frame to `r` waits for the receiver, not for memory.
    fn waits_for_room(&mut self, r: usize) {
        self.starved.retain(|&starved| starved != r);
        self.lacks_memory &= !self.starved.is_empty();
    }

    /// Takes note that `r` has closed its end (it left, died, or found the ring damaged), or gives
    /// the ring up.
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
        let out = &mut self.outs[r];
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

    /// The ring towards `r` takes no more. Finds out now and then whether `r` still lives.
    #[cold]
    pub(super) fn full(&mut self, r: usize) -> Tx {
        let out = &mut self.outs[r];
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

    /// A place for a frame of `len` bytes in a ring that has none as it is.
    #[cold]
    #[inline(never)]
    pub(super) fn make_room(&mut self, r: usize, len: usize) -> Option<Place> {
        match self.outs[r].ring.reserve(len) {
            Err(NoRoom::Long) => self.grow(r, true),
            _ => {
                self.grow_busy(r, true);
                self.waits_for_room(r);
            }
        }
        self.outs[r].ring.reserve(len).ok()
    }

    /// Makes the ring towards `r` longer, if it is time to (when much has passed, or when it is
    /// full for the first time), and there is memory.
    #[cold]
    pub(super) fn grow_busy(&mut self, r: usize, is_full: bool) {
        let out = &mut self.outs[r];
        let is_first = is_full && out.grow_at == GROW_AFTER;
        if is_first || out.ring.passed() >= out.grow_at {
            // If it does not grow now.
            out.grow_at = out.ring.passed() + GROW_AGAIN;
            if self.spare() > 0 {
                self.grow(r, false);
            }
        }
    }

    /// Makes the ring towards `r` longer. If it has to be, at the cost of another.
    fn grow(&mut self, r: usize, has_to: bool) {
        let ring_len = self.shared.seg.layout.ring_len;
        if self.outs[r].ring.ring_len() >= ring_len || !self.may_step() {
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
        // Until one comes, no other is asked for.
        if spare <= 0 && (!is_late || self.given_up.is_empty()) {
            self.give_up_one(r);
        }
        if is_late {
            return;
        }
        let Shared { seg, me, .. } = &*self.shared;
        match seg.open_ring(*me, r, ring_len) {
            Ok(_) => {
                let out = &mut self.outs[r];
                out.ring.grow(ring_len);
                out.stores = Stores::new(Lap::Bytes(ring_len as u32));
                out.grow_at = u64::MAX;
                self.fed(r);
                self.long.push(Long { to: r, passed: 0 });
                self.count_long();
            }
            // The next try finds what is given back meanwhile.
            Err(error) if has_to && !self.give_up_one(r) => {
                self.lacks(r, Some(error));
            }
            Err(_) => {}
        }
    }

    /// Tells others how many long rings we have.
    fn count_long(&self) {
        let Shared { seg, me, .. } = &*self.shared;
        // Relaxed: a hint.
        seg.long(*me).store((self.long.len() + self.given_up.len()) as u64, Relaxed);
    }

    /// How many more long rings there may be.
    fn spare(&self) -> isize {
        let Shared { seg, me, .. } = &*self.shared;
        // One each way for each of the others is all that there are in its segment.
        if is_switch(seg.state(*me).load(Relaxed)) {
            return 1;
        }
        let here = (0..seg.places()).filter(|&m| seg.state(m).load(Relaxed) != 0);
        let said = here.map(|m| usize::try_from(seg.long(m).load(Relaxed)).unwrap_or(0));
        let taken: usize = said.map(|count| count.min(2 * MEMBERS_MAX)).sum();
        long_rings(seg.layout.ring_len) - taken as isize
    }

    /// Gives up a long ring towards another than `r`: the first through which nothing has passed
    /// since this was asked last, or the oldest. False if there is none.
    fn give_up_one(&mut self, r: usize) -> bool {
        let Self { long, outs, .. } = self;
        let is_other = |long: &&mut Long| long.to != r;
        let mut others = long.iter_mut().filter(is_other).map(|long| {
            let passed = outs[long.to].ring.passed();
            let is_busy = std::mem::replace(&mut long.passed, passed) != passed;
            (is_busy, long.to)
        });
        let first = others.next();
        // All of them, so that the next time each is compared with now.
        let given_up = others.fold(first, |best, next| match best {
            Some((true, _)) if !next.0 => Some(next),
            best => best,
        });
        let Some((_, to)) = given_up else { return false };
        self.close_out(to);
        self.given_up.push(to);
        self.count_long();
        self.outs[to].ring_bell(self.shared.me);
        true
    }
}

/// How many rings of `ring_len` bytes [`LONG_BYTES`] hold.
fn long_rings(ring_len: usize) -> isize {
    (LONG_BYTES / ring_len) as isize
}
