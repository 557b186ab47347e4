//! The two ends of a memif ring: [`Sender`] and [`Receiver`].
//!
//! Every index and descriptor that the peer writes is read once and checked against private state
//! before it becomes an address. An impossible value ends the connection ([`Broken`]).
//!
//! A client hands out empty buffers in the ring that leads to it and frames in the other; a server
//! fills the former and gives the latter back. So the index that means "mine up to here" and the
//! one that means "yours up to there" are head and tail for one, tail and head for the other, and a
//! whole ring apart where they mean empty buffers (`ahead`).
//!
//! # Ordering
//! - `Sender::publish` is a Release store and `pending` an Acquire load of the same index: the
//!   frames and their descriptors are visible with it.
//! - `Receiver::publish` is a Release store after the last read of a slot and the writes to its
//!   descriptor, `has_slot` an Acquire load before the first write.
//! - A sender publishes, then reads whether to wake; a sleeper clears the mask ([`arm`]), then
//!   checks for frames. With fences on both sides at least one of the two sees the other's store.
//!
//! The model checker loom runs this file over memory of its own (`model`), whence the atomics come
//! from where the memory does.

use std::sync::atomic::Ordering::{Acquire, Relaxed, Release, SeqCst};

use super::region::{AtomicU16, Conn, Desc, Lane, MASKED, NEXT, Own, RingMem, fence};
use crate::frame::{ETH_HDR_LEN, TxFrame};
use crate::mem::{Lap, Stores, prefetch, prefetch_to_write};

/// The peer wrote an impossible value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Broken;

/// What became of a frame that was to be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pushed {
    Sent,
    /// The receiver has to give something back first.
    Full,
    /// Longer than the ring's buffers are together, whatever is given back.
    Long,
}

/// Slots that this receiver releases together, in a ring of `count`.
const fn release_batch(count: u16) -> u16 {
    match count / 4 {
        0 => 1,
        few if few < 32 => few,
        _ => 32,
    }
}

/// Most slots of one frame: the receiver may withhold [`release_batch`] less one while no further
/// frame arrives. Another implementation may release sooner; the protocol does not tell.
pub(super) const fn chain_max(count: u16) -> u16 {
    count - (release_batch(count) - 1)
}

/// The ring index that this side writes, that of the peer, and how many slots this side is ahead
/// initially: a client owns all slots of its memory at first.
fn indices(lane: &Lane) -> (*const AtomicU16, *const AtomicU16, u16) {
    let ring = lane.ring;
    match lane.own {
        Some(_) => (ring.head(), ring.tail(), ring.count()),
        None => (ring.tail(), ring.head(), 0),
    }
}

/// The sending end.
pub(super) struct Sender {
    ring: RingMem,
    own_index: *const AtomicU16,
    peer_index: *const AtomicU16,
    own: Option<Own>,
    /// The next slot to fill, the end of the published slots, and the first slot that may not be
    /// filled yet.
    at: u16,
    published: u16,
    limit: u16,
    ahead: u16,
    /// The buffer of the next frame, its length, and its descriptor as it is now; a length of 0 if
    /// the buffer is not located yet.
    to: *mut u8,
    room: u32,
    desc: Desc,
    /// Whether the receiver sleeps at times.
    sleeps: bool,
    is_closed: bool,
    /// How long frames are stored.
    stores: Stores,
}

impl Sender {
    pub(super) fn new(lane: &Lane) -> Self {
        let ring = lane.ring;
        let (own_index, peer_index, ahead) = indices(lane);
        Self {
            ring,
            own_index,
            peer_index,
            own: lane.own,
            at: 0,
            published: 0,
            limit: 0,
            ahead,
            to: std::ptr::null_mut(),
            room: 0,
            desc: Desc::new(0, 0, 0, 0),
            sleeps: false,
            is_closed: false,
            stores: Stores::new(Lap::Pieces(ring.count().into())),
        }
    }

    /// The peer has left: the ring stays full.
    pub(super) fn close(&mut self) {
        (self.limit, self.room, self.is_closed) = (self.at, 0, true);
    }

    /// Makes sure that slot `at` may be filled; false if the ring is full.
    #[inline(always)]
    fn has_slot(&mut self, at: u16) -> Result<bool, Broken> {
        if at != self.limit {
            return Ok(true);
        }
        if self.is_closed {
            return Ok(false);
        }
        // SAFETY: an index of the ring, which the connection keeps mapped. Acquire: the other side
        // has done with the slots that it gives back.
        let peer_index = unsafe { &*self.peer_index }.load(Acquire);
        let limit = peer_index.wrapping_add(self.ahead);
        if limit.wrapping_sub(self.published) > self.ring.count() {
            return Err(Broken);
        }
        // Never backwards: what was filled stays so.
        if limit.wrapping_sub(self.published) < at.wrapping_sub(self.published) {
            return Err(Broken);
        }
        self.limit = limit;
        Ok(at != limit)
    }

    /// The buffer of slot `at`, with its length.
    #[inline(always)]
    fn next_buffer(&self, conn: &Conn, at: u16) -> Result<(*mut u8, Desc), Broken> {
        match &self.own {
            Some(own) => {
                let place = at & self.ring.mask;
                Ok((own.at(place), own.desc(place, own.len)))
            }
            None => {
                let desc = self.ring.desc(at);
                let to = conn.locate(desc).ok_or(Broken)?;
                Ok((to, desc))
            }
        }
    }

    /// Locates the buffer of the next frame, if it is not known; false if the ring is full.
    #[inline(always)]
    fn locate_next(&mut self, conn: &Conn) -> Result<bool, Broken> {
        if self.room != 0 {
            return Ok(true);
        }
        if !self.has_slot(self.at)? {
            return Ok(false);
        }
        (self.to, self.desc) = self.next_buffer(conn, self.at)?;
        self.room = self.desc.len();
        if self.room == 0 { Err(Broken) } else { Ok(true) }
    }

    /// Copies a frame of `len` bytes into the next buffer. `short_max` as in
    /// [`TxFrame::copy_short_to_raw`]; `whole` has room for a frame.
    #[inline(always)]
    pub(super) fn push(
        &mut self,
        conn: &Conn,
        frame: &TxFrame<'_>,
        len: usize,
        short_max: usize,
        whole: &mut [u8],
    ) -> Result<Pushed, Broken> {
        if !self.locate_next(conn)? {
            return Ok(Pushed::Full);
        }
        if len > self.room as usize {
            return self.push_chained(conn, frame, len, whole);
        }
        // SAFETY: `room` bytes at `to` are mapped (`place`), and no frame lies there; the rest is
        // what `copy_short_to_raw` asks for.
        unsafe {
            match frame.body_in_one_piece() {
                Some(body) if len <= short_max && frame.fits_short_copy() => {
                    frame.copy_short_to_raw(body, self.to);
                }
                _ => frame.copy_to_peer(self.to, &mut self.stores),
            }
        }
        self.commit(len as u32);
        Ok(Pushed::Sent)
    }

    /// The buffer of the next frame, if it is known and has room for `len` bytes; `None`: call
    /// [`push`](Self::push) instead. [`commit`](Self::commit) follows.
    #[inline(always)]
    pub(super) fn reserve_short(&mut self, conn: &Conn, len: usize) -> Option<*mut u8> {
        if !self.locate_next(conn).ok()? || len > self.room as usize {
            return None;
        }
        Some(self.to)
    }

    /// Commits a frame of `len` bytes that was written to the reserved buffer.
    #[inline(always)]
    pub(super) fn commit(&mut self, len: u32) {
        let desc = Desc::new(0, self.desc.region(), len, 0);
        desc.write_len_to(self.ring.words(self.at));
        self.at = self.at.wrapping_add(1);
        self.room = 0;
    }

    /// Writes a frame that is longer than the client's buffers into a chain of them.
    #[cold]
    #[inline(never)]
    fn push_chained(
        &mut self,
        conn: &Conn,
        frame: &TxFrame<'_>,
        len: usize,
        whole: &mut [u8],
    ) -> Result<Pushed, Broken> {
        frame.copy_to(whole);
        let (mut at, mut done) = (self.at, 0);
        while done < len {
            if at.wrapping_sub(self.at) == chain_max(self.ring.count()) {
                return Ok(Pushed::Long);
            }
            if !self.has_slot(at)? {
                return Ok(Pushed::Full);
            }
            let (to, desc) = self.next_buffer(conn, at)?;
            let piece = (len - done).min(desc.len() as usize);
            if piece == 0 {
                return Err(Broken);
            }
            // SAFETY: `piece` bytes at `to` are mapped (`place`), and `whole` is ours.
            unsafe { std::ptr::copy_nonoverlapping(whole.as_ptr().add(done), to, piece) };
            done += piece;
            let flags = if done < len { NEXT } else { 0 };
            Desc::new(flags, desc.region(), piece as u32, 0).write_len_to(self.ring.words(at));
            at = at.wrapping_add(1);
        }
        (self.at, self.room) = (at, 0);
        Ok(Pushed::Sent)
    }

    /// Whether frames were written that are not published.
    #[inline(always)]
    pub(super) fn has_unpublished(&self) -> bool {
        self.at != self.published
    }

    /// Publishes the written slots to the receiver.
    #[inline(always)]
    pub(super) fn publish(&mut self) {
        self.published = self.at;
        // SAFETY: an index of the ring, which the connection keeps mapped. Release: who sees the
        // index sees the frames.
        unsafe { &*self.own_index }.store(self.at, Release);
    }

    /// Whether the receiver has to be woken.
    #[inline(always)]
    pub(super) fn has_to_wake(&mut self) -> bool {
        if self.sleeps {
            // What was told before what is asked: else the receiver could go to sleep between.
            fence(SeqCst);
        }
        if self.ring.flags().load(Relaxed) & MASKED != 0 {
            return false;
        }
        // The first time the question may have come too early; a receiver of ours looks every
        // millisecond.
        self.sleeps = true;
        true
    }

    /// Prefetches the buffer of the next frame.
    #[inline(always)]
    pub(super) fn prefetch_buffer(&mut self, conn: &Conn) -> Result<(), Broken> {
        if self.locate_next(conn)? {
            prefetch_to_write(self.to);
            prefetch_to_write(self.to.wrapping_add(64));
            prefetch_to_write(self.ring.desc_at(self.at));
        }
        Ok(())
    }
}

/// The receiving end.
pub(super) struct Receiver {
    ring: RingMem,
    own_index: *const AtomicU16,
    peer_index: *const AtomicU16,
    own: Option<Own>,
    /// The next slot to take, and the first that was not given back.
    at: u16,
    given: u16,
    ahead: u16,
    /// Slots that are given back together.
    release_batch: u16,
    /// The last that will come, if the other side has left.
    end: Option<u16>,
    /// Where the last frame was, and the one before: where the next may be.
    seen: [usize; 2],
}

/// What the next slot holds.
pub(super) enum RxItem {
    /// A frame of so many bytes.
    Frame(*const u8, u32),
    /// The first piece of one.
    Chain,
    /// What is none.
    Bad,
}

impl Receiver {
    pub(super) fn new(lane: &Lane) -> Self {
        let ring = lane.ring;
        let (own_index, peer_index, ahead) = indices(lane);
        let new = Self {
            ring,
            own_index,
            peer_index,
            own: lane.own,
            at: 0,
            given: 0,
            ahead,
            release_batch: release_batch(ring.count()),
            end: None,
            seen: [0; 2],
        };
        // All buffers, or nothing taken.
        new.publish();
        new
    }

    fn publish(&self) {
        // SAFETY: an index of the ring, which the connection keeps mapped. Release: what was read
        // there was read before.
        unsafe { &*self.own_index }.store(self.given.wrapping_add(self.ahead), Release);
    }

    /// The receive index, to compare with the ring for further frames.
    #[inline(always)]
    pub(super) fn at(&self) -> u16 {
        self.at
    }

    /// Number of slots with received data.
    #[inline(always)]
    pub(super) fn pending(&self) -> Result<u16, Broken> {
        let peer_index = match self.end {
            Some(end) => end,
            // SAFETY: an index of the ring, which the connection keeps mapped. Acquire: the frames
            // up to there are visible.
            None => unsafe { &*self.peer_index }.load(Acquire),
        };
        let count = peer_index.wrapping_sub(self.at);
        // No more can have come than were given to be filled.
        if count != 0 && count > self.ring.count() - self.at.wrapping_sub(self.given) {
            return Err(Broken);
        }
        Ok(count)
    }

    /// The peer has left: no further slots will arrive.
    pub(super) fn close(&mut self) {
        if self.end.is_none() {
            // SAFETY: an index of the ring, which the connection keeps mapped. Acquire: the frames
            // up to there are visible.
            self.end = Some(unsafe { &*self.peer_index }.load(Acquire));
        }
    }

    /// Prefetches the descriptor and the data of the next slot together. The address of data in
    /// buffers of the peer is predicted, since reading it would wait for the descriptor.
    #[inline(always)]
    pub(super) fn prefetch_next(&self) {
        prefetch(self.ring.desc_at(self.at));
        let next = match &self.own {
            Some(own) => own.at(self.at & self.ring.mask).cast_const(),
            None => {
                let [last, before] = self.seen;
                std::ptr::without_provenance(last.wrapping_add(last.wrapping_sub(before)))
            }
        };
        prefetch(next);
        prefetch(next.wrapping_add(64));
    }

    /// Takes the next slot, which has arrived.
    #[inline(always)]
    pub(super) fn take(&mut self, conn: &Conn, frame_max: usize) -> RxItem {
        let desc = self.ring.desc(self.at);
        let Some((from, len)) = self.locate(conn, desc) else {
            self.skip_slot();
            return RxItem::Bad;
        };
        if desc.flags() & NEXT != 0 {
            return RxItem::Chain;
        }
        self.skip_slot();
        if len as usize > frame_max || (len as usize) < ETH_HDR_LEN {
            return RxItem::Bad;
        }
        self.seen = [from.addr(), self.seen[0]];
        RxItem::Frame(from, len)
    }

    /// Address and length of the data of a descriptor.
    #[inline(always)]
    fn locate(&self, conn: &Conn, desc: Desc) -> Option<(*const u8, u32)> {
        let from = match &self.own {
            Some(own) if desc.len() <= own.len => own.at(self.at & self.ring.mask),
            Some(_) => return None,
            None => conn.locate(desc)?,
        };
        Some((from.cast_const(), desc.len()))
    }

    #[inline(always)]
    fn skip_slot(&mut self) {
        self.at = self.at.wrapping_add(1);
    }

    /// Takes a frame in pieces of which the first is in the next slot and of `count` slots that
    /// have come, and copies it to `whole`. None if it is none.
    #[cold]
    #[inline(never)]
    pub(super) fn copy_chain(
        &mut self,
        conn: &Conn,
        count: u16,
        whole: &mut [u8],
    ) -> Option<usize> {
        let (mut done, mut fits) = (0, true);
        for _ in 0..count {
            let desc = self.ring.desc(self.at);
            let found = self.locate(conn, desc);
            self.skip_slot();
            let room = found.and_then(|(_, len)| whole.get_mut(done..done + len as usize));
            match (found, room) {
                // SAFETY: `len` bytes at `from` are mapped (`locate`), and `room` is as long.
                (Some((from, _)), Some(room)) => unsafe {
                    std::ptr::copy_nonoverlapping(from, room.as_mut_ptr(), room.len());
                    done += room.len();
                },
                _ => fits = false,
            }
            if desc.flags() & NEXT == 0 {
                return (fits && done >= ETH_HDR_LEN).then_some(done);
            }
        }
        // The rest has not come, and will not.
        None
    }

    /// Releases the taken slots, if they are a batch.
    #[inline(always)]
    pub(super) fn release(&mut self) {
        if self.at.wrapping_sub(self.given) >= self.release_batch {
            self.release_all();
        }
    }

    #[inline(never)]
    fn release_all(&mut self) {
        if let Some(own) = &self.own {
            while self.given != self.at {
                let place = self.given & self.ring.mask;
                own.desc(place, own.len).write_to(self.ring.words(place));
                self.given = self.given.wrapping_add(1);
            }
        }
        self.given = self.at;
        self.publish();
    }
}

/// Asks the sender of `lane` for wake-ups. The receiver then checks [`has_frames`] before it
/// sleeps.
pub(super) fn arm(lane: &Lane) {
    lane.ring.flags().store(0, Relaxed);
    // Our store before our check; see `Sender::has_to_wake` for the sender's side.
    fence(SeqCst);
}

/// Whether frames beyond slot `at` have arrived.
pub(super) fn has_frames(lane: &Lane, at: u16) -> bool {
    let peer_index = if lane.own.is_some() { lane.ring.tail() } else { lane.ring.head() };
    peer_index.load(Acquire) != at
}

/// Tells the sender of `lane` that its receiver polls: no wake-ups.
pub(super) fn disarm(lane: &Lane) {
    lane.ring.flags().store(MASKED, Relaxed);
}
