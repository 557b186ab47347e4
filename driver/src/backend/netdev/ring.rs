//! The receive ring of a packet socket, shared with the kernel (PACKET_RX_RING).
//!
//! An empty poll is one load from memory and a frame costs no system call: on a pair of virtual
//! interfaces the round trip of a 64-byte frame is half of that with `recv` (1.5 us against 3.0
//! us). Slots are used in order; the status word of each says whether the kernel or this process
//! owns it.
//!
//! Source: Linux, Documentation/networking/packet_mmap.rst, TPACKET_V2.

use std::io;
use std::mem::{offset_of, size_of};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};

use memmap2::{Advice, MmapOptions, MmapRaw};

use super::super::vlan::{ETHERTYPE_VLAN, VLAN_ID};
use super::super::{get_option, set_option};
use crate::frame::{ETH_HDR_LEN, RxFrame};

/// Bytes before a frame in its slot at most: the kernel's header, the address, alignment.
const SLOT_HEAD: usize = 128;
/// Bytes of the ring, within the limits of [`SLOTS`].
const RING_LEN: usize = 8 << 20;
const SLOTS: std::ops::RangeInclusive<usize> = 128..=4096;

/// The receive ring of a packet socket.
pub(in super::super) struct RxRing {
    map: MmapRaw,
    slot_len: usize,
    block_len: usize,
    slots_per_block: usize,
    slot_count: usize,
    /// The next slot: the number of slots after it in its block, and offsets of it and its block.
    left_in_block: usize,
    offset: usize,
    block: usize,
    frame_max: usize,
    /// The VLAN of accepted frames, whose tag the kernel has stripped; `None`: untagged or
    /// priority-tagged frames.
    vlan: Option<u16>,
}

/// Content of a slot.
pub(in super::super) enum Slot {
    /// The kernel has not filled it yet.
    Empty,
    /// A frame.
    Frame {
        /// Offset in the ring, bytes.
        start: usize,
        /// Its length, bytes.
        len: usize,
        /// Frames were lost meanwhile.
        lost: bool,
    },
    /// A frame that is truncated, too long, too short, or of another VLAN.
    Rejected {
        /// Frames were lost meanwhile.
        lost: bool,
    },
}

/// Geometry of a ring for frames of `frame_max` bytes: slot length, block length, blocks.
fn geometry(frame_max: usize, slots: Option<usize>) -> (usize, usize, usize) {
    let page = page_len();
    let slot_len = (SLOT_HEAD + frame_max).next_multiple_of(128);
    // Blocks are contiguous in the kernel, so they should be small; a slot lies in one.
    let block_len = slot_len.max(16 << 10).next_power_of_two().max(page);
    let per_block = block_len / slot_len;
    let slots = slots.unwrap_or((RING_LEN / slot_len).clamp(*SLOTS.start(), *SLOTS.end()));
    (slot_len, block_len, slots.div_ceil(per_block).max(1))
}

fn page_len() -> usize {
    // SAFETY: `sysconf` reads a constant of the system.
    usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

impl RxRing {
    /// Sets up and maps a ring for frames of `frame_max` bytes.
    pub(in super::super) fn new(
        fd: RawFd,
        frame_max: usize,
        slots: Option<usize>,
        vlan: Option<u16>,
    ) -> io::Result<Self> {
        let (slot_len, block_len, block_count) = geometry(frame_max, slots);
        let slots_per_block = block_len / slot_len;
        let slot_count = block_count * slots_per_block;
        let version = libc::tpacket_versions::TPACKET_V2 as libc::c_int;
        set_option(fd, libc::SOL_PACKET, libc::PACKET_VERSION, &version)?;
        let request = libc::tpacket_req {
            tp_block_size: block_len as u32,
            tp_block_nr: block_count as u32,
            tp_frame_size: slot_len as u32,
            tp_frame_nr: slot_count as u32,
        };
        set_option(fd, libc::SOL_PACKET, libc::PACKET_RX_RING, &request)?;
        let map = MmapOptions::new().len(block_len * block_count).populate().map_raw(&Fd(fd))?;
        // A child's mapping would keep the socket, and with it the interface's address filter.
        map.advise(Advice::DontFork)?;
        Ok(Self {
            map,
            slot_len,
            block_len,
            slots_per_block,
            slot_count,
            left_in_block: slots_per_block - 1,
            offset: 0,
            block: 0,
            frame_max,
            vlan,
        })
    }

    /// Number of slots.
    pub(in super::super) fn slot_count(&self) -> usize {
        self.slot_count
    }

    /// The content of the next slot, which is valid until [`advance`](Self::advance) and
    /// [`release`](Self::release).
    #[inline]
    pub(in super::super) fn peek(&self) -> Slot {
        // Acquire: what the kernel wrote before the status is seen after it.
        let status = self.status(self.offset).load(Acquire);
        if status & libc::TP_STATUS_USER == 0 {
            return Slot::Empty;
        }
        let head: libc::tpacket2_hdr = self.head(self.offset);
        let lost = status & libc::TP_STATUS_LOSING != 0;
        let (start, len) = (usize::from(head.tp_mac), head.tp_snaplen as usize);
        // The kernel is trusted, but these become a pointer: checked all the same.
        let fits = start >= size_of::<libc::tpacket2_hdr>() && start + len <= self.slot_len;
        let is_tagged = status & libc::TP_STATUS_VLAN_VALID != 0;
        // A provider's tag (802.1ad) is not a VLAN tag, whatever its number.
        let has_type = status & libc::TP_STATUS_VLAN_TPID_VALID != 0;
        let is_of_us = !has_type || head.tp_vlan_tpid == ETHERTYPE_VLAN;
        let vlan = is_tagged.then_some(head.tp_vlan_tci & VLAN_ID);
        // Without a VLAN, priority-tagged frames are accepted like untagged ones.
        let is_ours = is_of_us && (vlan == self.vlan || vlan == Some(0) && self.vlan.is_none());
        let is_whole = head.tp_len == head.tp_snaplen;
        if !fits || !is_whole || !is_ours || len < ETH_HDR_LEN || len > self.frame_max {
            return Slot::Rejected { lost };
        }
        Slot::Frame { start: self.offset + start, len, lost }
    }

    /// Advances to the next slot and returns the offset of the one before.
    #[inline]
    pub(in super::super) fn advance(&mut self) -> usize {
        let was = self.offset;
        if self.left_in_block > 0 {
            self.left_in_block -= 1;
            self.offset += self.slot_len;
            return was;
        }
        let next = self.block + self.block_len;
        self.block = if next < self.map.len() { next } else { 0 };
        self.offset = self.block;
        self.left_in_block = self.slots_per_block - 1;
        was
    }

    /// Returns the slot at `offset` to the kernel.
    #[inline]
    pub(in super::super) fn release(&self, offset: usize) {
        // Release: the frame was read before.
        self.status(offset).store(libc::TP_STATUS_KERNEL, Release);
    }

    /// The frame that [`peek`](Self::peek) found, until its slot is given back.
    #[inline]
    pub(in super::super) fn frame(&self, start: usize, len: usize) -> RxFrame<'_> {
        assert!(start + len <= self.map.len());
        // SAFETY: the range lies in the mapping, which lives as long as `self`. The kernel writes
        // it only after `release`; anything else would be a mixture of bytes (D2).
        unsafe { RxFrame::from_raw(self.map.as_ptr().add(start), len) }
    }

    #[inline]
    fn status(&self, offset: usize) -> &AtomicU32 {
        let at = offset + offset_of!(libc::tpacket2_hdr, tp_status);
        // SAFETY: `offset` is the start of a slot: inside the mapping and a multiple of 128, so
        // aligned. The kernel and we access the word as a whole.
        unsafe { &*self.map.as_ptr().add(at).cast::<AtomicU32>() }
    }

    #[inline]
    fn head(&self, offset: usize) -> libc::tpacket2_hdr {
        // SAFETY: `offset` is the start of a slot that is ours, which begins with this header;
        // plain numbers, copied.
        unsafe { self.map.as_ptr().add(offset).cast::<libc::tpacket2_hdr>().read() }
    }
}

const _: () = assert!(size_of::<[u32; 2]>() == size_of::<libc::tpacket_stats>());

/// Frames that the kernel had no slot for since the last call.
pub(in super::super) fn lost(fd: RawFd) -> u64 {
    let stats = get_option::<[u32; 2]>(fd, libc::SOL_PACKET, libc::PACKET_STATISTICS);
    stats.map_or(0, |([_all, lost], _)| lost.into())
}

/// For the mapping only, which takes a descriptor in this shape.
struct Fd(RawFd);

impl AsRawFd for Fd {
    fn as_raw_fd(&self) -> RawFd {
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_hold_the_longest_frame_and_fill_whole_blocks() {
        for frame_max in [270, 1514, 3522, 9014, 16_398, 65_550] {
            let (slot, block, blocks) = geometry(frame_max, None);
            assert!(slot >= SLOT_HEAD + frame_max && slot.is_multiple_of(16));
            assert!(block >= slot && block.is_multiple_of(page_len()));
            let count = block / slot * blocks;
            assert!(count >= *SLOTS.start() && count <= SLOTS.end() + block / slot, "{count}");
        }
        assert_eq!(geometry(1514, Some(8)).2, 1);
    }
}
