//! Descriptor rings against models of the devices: random operations, stalls, completions out of
//! order, wraps, and devices that write what no device may.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::e1000::{DONE, RX_END, RxRing, TxRing};
use super::model::{Iommu, LegacyDevice, VirtqDevice};
use super::virtq::{Broken, Layout, Virtq};
use crate::mem::{Arena, Block, Hugepages};
use std::ptr::NonNull;

fn memory(len: usize) -> (Block, NonNull<u8>) {
    let block = Arena::new(len, Hugepages::No).unwrap().block(len).unwrap();
    let base = NonNull::new(block.as_mut_ptr()).unwrap();
    (block, base)
}

const COUNT: u16 = 8;

fn virtq() -> (Block, Virtq, VirtqDevice) {
    let (block, base) = memory(Layout::of(COUNT).len);
    // SAFETY: zeroed, page-aligned memory of the right length, which the caller keeps.
    let (driver, device) = unsafe { (Virtq::new(base, COUNT), VirtqDevice::new(base, COUNT)) };
    (block, driver, device)
}

#[test]
fn a_layout_keeps_its_parts_apart() {
    for count in (0..=15).map(|shift| 1_u16 << shift) {
        let n = count as usize;
        let at = Layout::of(count);
        assert!(at.avail >= at.desc + 16 * n && at.used >= at.avail + 6 + 2 * n);
        assert!(at.len >= at.used + 6 + 8 * n);
        assert!(
            at.desc.is_multiple_of(16) && at.avail.is_multiple_of(2) && at.used.is_multiple_of(64)
        );
    }
}

/// Goal: every posted buffer comes back once with its own length, in the device's order, across
/// the wrap of the 16-bit indices. Method: random posts, publications, completions out of order
/// and takes, far more than 65,536, against queues of numbers.
#[test]
fn buffers_come_back_once_across_the_wrap() {
    let (_block, mut driver, mut device) = virtq();
    for id in 0..COUNT {
        driver.describe(id, 0x1000 * u64::from(id), 100 + u32::from(id), id % 2 == 0);
    }
    let mut free: Vec<u16> = (0..COUNT).collect();
    let mut unpublished = 0;
    let mut available: VecDeque<u16> = VecDeque::new();
    let mut held: Vec<u16> = Vec::new();
    let mut used: VecDeque<(u16, u32)> = VecDeque::new();
    let (mut x, mut returned) = (0x9e37_79b9_7f4a_7c15_u64, 0);
    while returned < 200_000 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        match x % 5 {
            0 if !free.is_empty() => {
                let id = free.swap_remove((x >> 8) as usize % free.len());
                driver.post(id);
                available.push_back(id);
                unpublished += 1;
            }
            1 => {
                driver.publish();
                unpublished = 0;
            }
            2 => match device.next_id() {
                Some(id) => {
                    assert!(available.len() > unpublished, "an unpublished buffer was seen");
                    assert_eq!(Some(id), available.pop_front());
                    let desc = device.desc(id);
                    assert_eq!(
                        (desc.addr, desc.len),
                        (0x1000 * u64::from(id), 100 + u32::from(id))
                    );
                    assert_eq!((desc.is_write, desc.next), (id % 2 == 0, None));
                    held.push(id);
                }
                None => assert_eq!(available.len(), unpublished, "a published buffer was missed"),
            },
            3 if !held.is_empty() => {
                let id = held.swap_remove((x >> 8) as usize % held.len());
                let len = (x >> 32) as u32;
                device.used(id.into(), len);
                used.push_back((id, len));
            }
            4 => {
                assert_eq!(driver.pending(), !used.is_empty());
                let got = driver.take().unwrap();
                assert_eq!(got, used.pop_front());
                if let Some((id, _)) = got {
                    free.push(id);
                    returned += 1;
                }
            }
            _ => {}
        }
        let out = available.len() + held.len() + used.len();
        assert_eq!((usize::from(driver.posted_count()), out + free.len()), (out, COUNT.into()));
    }
}

#[test]
fn a_chain_is_posted_by_its_head() {
    let (_block, mut driver, mut device) = virtq();
    driver.describe(0, 1 << 40, 5, false);
    driver.describe(1, 2 << 40, 1, true);
    driver.chain(0, 1);
    driver.post(0);
    driver.publish();
    assert_eq!(device.next_id(), Some(0));
    assert_eq!((device.desc(0).next, device.desc(0).is_write), (Some(1), false));
    assert_eq!((device.desc(1).next, device.desc(1).is_write), (None, true));
    device.used(0, 1);
    assert_eq!(driver.take(), Ok(Some((0, 1))));
}

#[test]
fn a_kick_is_left_out_when_the_device_says_so() {
    let (_block, driver, device) = virtq();
    assert!(driver.wants_kick());
    device.set_kicks(false);
    assert!(!driver.wants_kick());
}

/// What a device may do that none should.
#[test]
fn entries_that_cannot_be_are_refused() {
    let broken = |spoil: &dyn Fn(&mut VirtqDevice)| {
        let (_block, mut driver, mut device) = virtq();
        for id in 0..3 {
            driver.describe(id, 0, 0, true);
            driver.post(id);
        }
        driver.publish();
        spoil(&mut device);
        loop {
            match driver.take() {
                Ok(Some((id, _))) => assert!(id < 3),
                Ok(None) => return None,
                Err(Broken(why)) => return Some(why),
            }
        }
    };
    let more = Some("it returned more buffers than it had");
    let strange = Some("it returned a buffer that it did not have");
    assert_eq!(broken(&|d| d.used(2, 0)), None);
    assert_eq!(broken(&|d| d.used(3, 0)), strange);
    assert_eq!(broken(&|d| d.used(COUNT.into(), 0)), strange);
    assert_eq!(broken(&|d| d.used(u32::MAX, 0)), strange);
    assert_eq!(broken(&|d| (d.used(1, 0), d.used(1, 0)).0), strange);
    assert_eq!(broken(&|d| d.set_used_idx(4)), more);
    assert_eq!(broken(&|d| d.set_used_idx(u16::MAX)), more);
}

proptest! {
    /// Goal: whatever lies in the memory that the device can write, the driver neither panics nor
    /// names a buffer that is not posted. Method: random bytes over all of it between operations.
    #[test]
    fn no_scribbling_device_breaks_the_queue(
        ops in prop::collection::vec((0..4_u8, any::<u16>(), any::<u64>()), 1..200)
    ) {
        let (block, mut driver, _device) = virtq();
        let mut posted = [false; COUNT as usize];
        for (op, at, value) in ops {
            let id = at % COUNT;
            match op {
                0 if !posted[id as usize] => {
                    driver.post(id);
                    posted[id as usize] = true;
                }
                1 => driver.publish(),
                2 => match driver.take() {
                    Ok(Some((id, _))) => {
                        prop_assert!(std::mem::take(&mut posted[id as usize]));
                    }
                    Ok(None) => {}
                    Err(_) => return Ok(()),
                },
                _ => {
                    let at = at as usize % (block.len() - 8);
                    // SAFETY: inside the block; the driver touches it by atomics between our calls.
                    unsafe { block.as_mut_ptr().add(at).cast::<u64>().write_unaligned(value) };
                }
            }
        }
    }
}

const RING: u32 = 16;
const STRIDE: usize = 256;

struct Legacy {
    _ring: Block,
    buffers: Block,
    base: NonNull<u8>,
    iommu: Iommu,
}

/// A ring and its buffers at address 1 MiB of the device.
fn legacy(device_writes: bool) -> Legacy {
    let (ring, base) = memory(RING as usize * 16);
    let (buffers, buffers_base) = memory(RING as usize * STRIDE);
    let mut iommu = Iommu::default();
    // SAFETY: the block is kept beside the map.
    unsafe { iommu.map(1 << 20, buffers_base, buffers.len(), device_writes) };
    Legacy { _ring: ring, buffers, base, iommu }
}

fn addr(i: u32) -> u64 {
    (1 << 20) + u64::from(i) * STRIDE as u64
}

fn frame(serial: u32) -> Vec<u8> {
    (0..20 + serial % 200).map(|i| (serial.wrapping_mul(31).wrapping_add(i)) as u8).collect()
}

/// Goal: received frames arrive once, in order and unchanged, and the device never gets a buffer
/// that is lent. Method: random deliveries, takes and returns against a queue of frames.
#[test]
fn received_frames_arrive_in_order_across_the_wrap() {
    let l = legacy(true);
    // SAFETY: `RING * 16` bytes, page aligned, kept by `l`.
    let (mut rx, mut device) =
        unsafe { (RxRing::new(l.base, RING, addr), LegacyDevice::new(l.base, RING)) };
    let mut tail = rx.tail();
    let mut sent = 0;
    let mut lent: VecDeque<(u32, u32)> = VecDeque::new();
    let (mut got, mut x) = (0, 7_u64);
    while got < 50_000 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        match x % 4 {
            0 => {
                if device.has_next(tail) {
                    device.receive(&l.iommu, &frame(sent));
                    sent += 1;
                }
            }
            1 => {
                assert_eq!(rx.pending(), sent != got);
                let Some(r) = rx.take() else { continue };
                let bytes = frame(got);
                assert!(r.is_good && usize::from(r.len) == bytes.len());
                lent.push_back((r.id, got));
                got += 1;
            }
            2 => {
                // Still unchanged when it is given back.
                let count = (x >> 8) as usize % (lent.len() + 1);
                for (id, serial) in lent.drain(..count) {
                    let bytes = frame(serial);
                    let at = id as usize * STRIDE;
                    assert_eq!(l.buffers.as_slice()[at..at + bytes.len()], bytes);
                }
                rx.give_back(count as u32);
            }
            _ => tail = rx.tail(),
        }
        assert!(sent - got < RING && lent.len() < RING as usize);
    }
}

/// Goal: frames leave once, in order and unchanged; a full ring says so and nothing is overwritten.
#[test]
fn frames_are_sent_in_order_across_the_wrap() {
    let mut l = legacy(false);
    // SAFETY: as above.
    let (mut tx, mut device) =
        unsafe { (TxRing::new(l.base, RING, addr), LegacyDevice::new(l.base, RING)) };
    let (mut tail, mut queued, mut sent, mut x) = (0, 0_u32, 0, 11_u64);
    while sent < 50_000 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        match x % 3 {
            0 => match tx.place() {
                Some(i) => {
                    let bytes = frame(queued);
                    let at = i as usize * STRIDE;
                    l.buffers.as_mut_slice()[at..at + bytes.len()].copy_from_slice(&bytes);
                    tx.push(bytes.len() as u16);
                    queued += 1;
                }
                None => assert_eq!(queued - sent, RING - 1, "full too early"),
            },
            1 => {
                if device.has_next(tail) {
                    assert_eq!(device.send(&l.iommu), frame(sent));
                    sent += 1;
                }
            }
            _ => tail = tx.tail(),
        }
        assert_eq!(tx.in_flight(), queued - sent);
    }
}

#[test]
fn a_frame_with_an_error_or_without_an_end_is_no_good() {
    let l = legacy(true);
    // SAFETY: as above.
    let (mut rx, device) =
        unsafe { (RxRing::new(l.base, RING, addr), LegacyDevice::new(l.base, RING)) };
    for (i, word) in
        [DONE | RX_END | 60, DONE | 60, DONE | RX_END | 1 << 40 | 60].iter().enumerate()
    {
        device.scribble(i as u32, *word);
    }
    assert!(rx.take().unwrap().is_good);
    assert!(!rx.take().unwrap().is_good);
    assert!(!rx.take().unwrap().is_good);
    assert_eq!(rx.take(), None);
}

proptest! {
    /// Goal: a device that writes anything anywhere in the ring makes the driver neither panic nor
    /// name a buffer that does not exist.
    #[test]
    fn no_scribbling_device_breaks_the_rings(
        ops in prop::collection::vec((0..5_u8, any::<u32>(), any::<u64>()), 1..300)
    ) {
        let l = legacy(true);
        let other = legacy(true);
        // SAFETY: as above.
        let (mut rx, mut tx, rx_device, tx_device) = unsafe {
            (
                RxRing::new(l.base, RING, addr),
                TxRing::new(other.base, RING, addr),
                LegacyDevice::new(l.base, RING),
                LegacyDevice::new(other.base, RING),
            )
        };
        let mut lent = 0;
        for (op, at, value) in ops {
            match op {
                0 => rx_device.scribble(at, value | DONE),
                1 => tx_device.scribble(at, value),
                2 => {
                    if let Some(r) = rx.take() {
                        prop_assert!(r.id < RING);
                        lent += 1;
                        prop_assert!(lent < RING, "more than the device had");
                    }
                }
                3 => {
                    rx.give_back(lent);
                    lent = 0;
                }
                _ => {
                    if let Some(i) = tx.place() {
                        prop_assert!(i < RING);
                        tx.push(at as u16);
                    }
                    prop_assert!(tx.in_flight() < RING);
                }
            }
        }
    }
}
