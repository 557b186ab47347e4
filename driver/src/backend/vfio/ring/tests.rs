//! Descriptor rings against models of the devices: random operations, stalls, completions out of
//! order, wraps, and devices that write what no device may.

use std::collections::VecDeque;

use proptest::prelude::*;

use super::e1000::{Advanced, BufferAddrs, Legacy, RxRing, TxRing};
use super::model::{Device, IntelDevice, Iommu, VirtqDevice, Vmxnet3Device};
use super::virtq::{DeviceViolation, Layout, RecycledVirtq, Virtq};
use super::vmxnet3;
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
fn parts_of_a_layout_do_not_overlap() {
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
fn buffers_complete_once_across_the_wrap() {
    let (_block, mut driver, mut device) = virtq();
    for id in 0..COUNT {
        driver.describe(id, 0x1000 * u64::from(id), 100 + u32::from(id), id % 2 == 0);
    }
    let mut free: Vec<u16> = (0..COUNT).rev().collect();
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
            0 => {
                let next = free.pop();
                assert_eq!(driver.next(), next);
                // As it was described, or with the same length said again.
                let posted = match (next, x & 256) {
                    (Some(id), 0) => driver.post_as(|got| {
                        assert_eq!(got, id);
                        Some(100 + u32::from(id))
                    }),
                    _ => driver.post(),
                };
                assert_eq!(posted, next.is_some());
                available.extend(next);
                unpublished += usize::from(posted);
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
    assert!(driver.post());
    driver.publish();
    assert_eq!(device.next_id(), Some(0));
    assert_eq!((device.desc(0).next, device.desc(0).is_write), (Some(1), false));
    assert_eq!((device.desc(1).next, device.desc(1).is_write), (None, true));
    device.used(0, 1);
    assert_eq!(driver.take(), Ok(Some((0, 1))));
}

#[test]
fn a_kick_is_suppressed_on_request_of_the_device() {
    let (_block, driver, device) = virtq();
    assert!(driver.wants_kick());
    device.set_kicks(false);
    assert!(!driver.wants_kick());
}

/// Goal: every buffer of a queue that is always full comes back with its own length, is the
/// caller's until it is published, and is posted again once. Method: takes, publications and
/// completions out of order, across the wrap of the indices and of the periods.
#[test]
fn recycled_buffers_complete_across_the_wrap() {
    let (_block, mut driver, mut device) = recycled();
    let mut with_device: VecDeque<u16> = (0..COUNT).collect();
    let mut taken: Vec<u16> = Vec::new();
    let mut held: Vec<u16> = Vec::new();
    let mut used: VecDeque<(u16, u32)> = VecDeque::new();
    let (mut x, mut returned) = (0x9e37_79b9_7f4a_7c15_u64, 0);
    while returned < 300_000 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        match x % 4 {
            0 => match device.next_id() {
                Some(id) => {
                    assert_eq!(Some(id), with_device.pop_front());
                    let desc = device.desc(id);
                    assert_eq!(
                        (desc.addr, desc.len, desc.is_write),
                        (0x1000 * u64::from(id), 64, true)
                    );
                    held.push(id);
                }
                None => assert!(with_device.is_empty(), "a published buffer was missed"),
            },
            1 if !held.is_empty() => {
                let id = held.swap_remove((x >> 8) as usize % held.len());
                let len = (x >> 32) as u32;
                device.used(id.into(), len);
                used.push_back((id, len));
            }
            2 => {
                let max = (x >> 8) as usize % 4;
                let mut got = Vec::new();
                let count = driver.take_burst(max, |id, len| got.push((id, len))).unwrap();
                assert_eq!(count, max.min(used.len()));
                assert_eq!(got, used.drain(..count).collect::<Vec<_>>());
                taken.extend(got.iter().map(|(id, _)| id));
                returned += count;
            }
            _ => {
                assert_eq!(driver.publish(), !taken.is_empty());
                with_device.extend(taken.drain(..));
            }
        }
    }
}

fn recycled() -> (Block, RecycledVirtq, VirtqDevice) {
    let (block, base) = memory(Layout::of(COUNT).len);
    // SAFETY: as in `virtq`.
    let (driver, device) = unsafe {
        (
            RecycledVirtq::new(base, COUNT, 64, |id| 0x1000 * u64::from(id)),
            VirtqDevice::new(base, COUNT),
        )
    };
    (block, driver, device)
}

const MORE: Option<&str> = Some("it returned more buffers than it had");
const STRANGE: Option<&str> = Some("it returned a buffer that it did not have");

#[test]
fn interrupts_are_enabled_and_disabled() {
    let (_block, mut driver, device) = recycled();
    assert!(!device.wants_interrupt());
    driver.set_interrupt(true);
    assert!(device.wants_interrupt());
    driver.set_interrupt(false);
    assert!(!device.wants_interrupt());
}

/// What a device may do that none should.
#[test]
fn invalid_used_entries_are_refused() {
    let broken = |spoil: &dyn Fn(&mut VirtqDevice)| {
        let (_block, mut driver, mut device) = virtq();
        for _ in 0..3 {
            assert!(driver.post());
        }
        driver.publish();
        spoil(&mut device);
        loop {
            match driver.take() {
                Ok(Some((id, _))) => assert!(id < 3),
                Ok(None) => return None,
                Err(DeviceViolation(why)) => return Some(why),
            }
        }
    };
    assert_eq!(broken(&|d| d.used(2, 0)), None);
    assert_eq!(broken(&|d| d.used(3, 0)), STRANGE);
    assert_eq!(broken(&|d| d.used(COUNT.into(), 0)), STRANGE);
    assert_eq!(broken(&|d| d.used(u32::MAX, 0)), STRANGE);
    assert_eq!(broken(&|d| (d.used(1, 0), d.used(1, 0)).0), STRANGE);
    assert_eq!(broken(&|d| d.set_used_idx(4)), MORE);
    assert_eq!(broken(&|d| d.set_used_idx(u16::MAX)), MORE);
}

/// The same of a queue whose buffers are all with the device, but for those taken since the last
/// publication.
#[test]
fn invalid_used_entries_of_recycled_buffers_are_refused() {
    let broken = |spoil: &dyn Fn(&mut VirtqDevice), publish: bool| {
        let (_block, mut driver, mut device) = recycled();
        device.used(5, 0);
        assert_eq!(driver.take_burst(9, |id, _| assert_eq!(id, 5)), Ok(1));
        if publish {
            driver.publish();
        }
        spoil(&mut device);
        driver
            .take_burst(usize::MAX, |id, _| assert!(id < COUNT))
            .err()
            .map(|DeviceViolation(why)| why)
    };
    assert_eq!(broken(&|d| d.used(2, 0), false), None);
    assert_eq!(broken(&|d| d.used(5, 0), true), None);
    assert_eq!(broken(&|d| d.used(5, 0), false), STRANGE);
    assert_eq!(broken(&|d| (d.used(1, 0), d.used(1, 0)).0, true), STRANGE);
    assert_eq!(broken(&|d| d.used(COUNT.into(), 0), true), STRANGE);
    assert_eq!(broken(&|d| d.used(u32::MAX, 0), true), STRANGE);
    assert_eq!(broken(&|d| d.set_used_idx(COUNT + 1), false), MORE);
    assert_eq!(broken(&|d| d.set_used_idx(COUNT + 2), true), MORE);
    assert_eq!(broken(&|d| d.set_used_idx(0), true), MORE);
}

/// A buffer that comes back after exactly as many periods as there are marks for is no stranger.
#[test]
fn a_buffer_may_complete_late() {
    let (_block, mut driver, mut device) = recycled();
    let mut turn = |id: u16| {
        device.used(id.into(), 0);
        assert_eq!(driver.take_burst(1, |_, _| ()), Ok(1), "{id}");
        driver.publish();
    };
    for rounds in [65_534, 65_535, 65_536] {
        turn(0);
        for _ in 0..rounds {
            turn(1);
        }
    }
    turn(0);
}

/// Puts `value` somewhere into the queue's memory.
fn scribble(block: &Block, at: u16, value: u64) {
    let at = at as usize % (block.len() - 8);
    // SAFETY: inside the block; the driver touches it by atomics between our calls.
    unsafe { block.as_mut_ptr().add(at).cast::<u64>().write_unaligned(value) };
}

proptest! {
    /// Goal: whatever lies in the memory that the device can write, the driver neither panics nor
    /// names a buffer that is not posted. Method: random bytes over all of it between operations.
    #[test]
    fn hostile_ring_memory_does_not_break_the_queue(
        ops in prop::collection::vec((0..4_u8, any::<u16>(), any::<u64>()), 1..200)
    ) {
        let (block, mut driver, _device) = virtq();
        let mut posted = [false; COUNT as usize];
        for (op, at, value) in ops {
            match op {
                0 => {
                    let next = driver.next();
                    prop_assert_eq!(driver.post(), next.is_some());
                    if let Some(id) = next {
                        prop_assert!(!std::mem::replace(&mut posted[id as usize], true));
                    }
                }
                1 => driver.publish(),
                2 => match driver.take() {
                    Ok(Some((id, _))) => {
                        prop_assert!(std::mem::take(&mut posted[id as usize]));
                    }
                    Ok(None) => {}
                    Err(_) => return Ok(()),
                },
                _ => scribble(&block, at, value),
            }
        }
    }

    /// The same where buffers are recycled.
    #[test]
    fn hostile_ring_memory_does_not_break_the_recycled_queue(
        ops in prop::collection::vec((0..3_u8, any::<u16>(), any::<u64>()), 1..200)
    ) {
        let (block, mut driver, _device) = recycled();
        let mut taken = [false; COUNT as usize];
        for (op, at, value) in ops {
            match op {
                0 => {
                    driver.publish();
                    taken.fill(false);
                }
                1 => {
                    let all = driver.take_burst(at as usize, |id, _| {
                        assert!(!std::mem::replace(&mut taken[id as usize], true));
                    });
                    if all.is_err() {
                        return Ok(());
                    }
                }
                _ => scribble(&block, at, value),
            }
        }
    }
}

const RING: u32 = 16;
const STRIDE: usize = 256;

struct Intel {
    _ring: Block,
    buffers: Block,
    base: NonNull<u8>,
    iommu: Iommu,
}

/// A ring and its buffers at address 1 MiB of the device.
fn intel(device_writes: bool) -> Intel {
    let (ring, base) = memory(RING as usize * 16);
    let (buffers, buffers_base) = memory(RING as usize * STRIDE);
    let mut iommu = Iommu::default();
    // SAFETY: the block is kept beside the map.
    unsafe { iommu.map(1 << 20, buffers_base, buffers.len(), device_writes) };
    Intel { _ring: ring, buffers, base, iommu }
}

/// Where the buffers are.
const ADDRS: BufferAddrs = BufferAddrs { first: 1 << 20, stride: STRIDE as u64 };

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
    receive_in_order::<Legacy>();
    receive_in_order::<Advanced>();
}

fn receive_in_order<F: Device>() {
    let l = intel(true);
    // SAFETY: `RING * 16` bytes, page aligned, kept by `l`.
    let (mut rx, mut device) =
        unsafe { (RxRing::<F>::new(l.base, RING, ADDRS), IntelDevice::<F>::new(l.base, RING)) };
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
                rx.refill(count as u32);
            }
            _ => tail = rx.tail(),
        }
        assert!(sent - got < RING && lent.len() < RING as usize);
    }
}

/// Goal: frames leave once, in order and unchanged; a full ring says so and nothing is overwritten.
#[test]
fn frames_are_sent_in_order_across_the_wrap() {
    send_in_order::<Legacy>();
    send_in_order::<Advanced>();
}

fn send_in_order<F: Device>() {
    let mut l = intel(false);
    // SAFETY: as above.
    let (mut tx, mut device) =
        unsafe { (TxRing::<F>::new(l.base, RING, ADDRS), IntelDevice::<F>::new(l.base, RING)) };
    let (mut tail, mut queued, mut sent, mut x) = (0, 0_u32, 0, 11_u64);
    while sent < 50_000 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        match x % 3 {
            0 => match tx.next_slot() {
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
fn a_frame_with_an_error_or_without_an_end_is_bad() {
    let (done, end) = (Legacy::DONE, Legacy::END);
    let good = done | end | 60;
    // The last part of a longer frame looks like one, and is none.
    take_bad::<Legacy>([good, done | end | 1 << 40 | 60, done | 60, done | 60, good, good]);
    let (done, end, len) = (Advanced::DONE, Advanced::END, 60 << 32);
    let (good, part) = (done | end | len, done | len);
    take_bad::<Advanced>([good, good | Advanced::ERROR, part, part, good, good]);
}

/// Of the frames that `words` describe only the first and the last are good.
fn take_bad<F: Device>(words: [u64; 6]) {
    let l = intel(true);
    // SAFETY: as above.
    let (mut rx, device) =
        unsafe { (RxRing::<F>::new(l.base, RING, ADDRS), IntelDevice::<F>::new(l.base, RING)) };
    for (i, word) in (0..).zip(words) {
        device.scribble(i, 1, word);
    }
    for is_good in [true, false, false, false, false, true] {
        assert_eq!(rx.take().map(|got| (got.len, got.is_good)), Some((60, is_good)));
    }
    assert_eq!(rx.take(), None);
}

/// What a program and a device do to rings: what, where, and a word.
type Steps = Vec<(u8, u32, u64)>;

proptest! {
    /// Goal: a device that writes anything anywhere in the ring makes the driver neither panic nor
    /// name a buffer that does not exist, nor give the device an address that is not a buffer's.
    #[test]
    fn hostile_ring_memory_does_not_break_the_rings(
        steps in prop::collection::vec((0..5_u8, any::<u32>(), any::<u64>()), 1..300)
    ) {
        scribble_over::<Legacy>(&steps, Legacy::DONE)?;
        scribble_over::<Advanced>(&steps, Advanced::DONE)?;
    }
}

fn scribble_over<F: Device>(steps: &Steps, done: u64) -> Result<(), TestCaseError> {
    let (l, other) = (intel(true), intel(true));
    // SAFETY: as above.
    let (mut rx, mut tx, rx_device, tx_device) = unsafe {
        (
            RxRing::<F>::new(l.base, RING, ADDRS),
            TxRing::<F>::new(other.base, RING, ADDRS),
            IntelDevice::<F>::new(l.base, RING),
            IntelDevice::<F>::new(other.base, RING),
        )
    };
    let mut lent = 0;
    for &(what, at, word) in steps {
        match what {
            0 => {
                if F::OVERWRITES_ADDRESS {
                    rx_device.scribble(at, 0, word);
                }
                rx_device.scribble(at, 1, word | done);
            }
            1 => tx_device.scribble(at, 1, word),
            2 => {
                if let Some(r) = rx.take() {
                    prop_assert!(r.id < RING);
                    lent += 1;
                    prop_assert!(lent < RING, "more than the device had");
                }
            }
            3 => {
                let from = rx.tail();
                rx.refill(lent);
                for i in (0..lent).map(|i| (from + i) % RING) {
                    prop_assert_eq!(rx_device.addr(i), addr(i));
                }
                lent = 0;
            }
            _ => {
                if let Some(i) = tx.next_slot() {
                    prop_assert!(i < RING);
                    tx.push(at as u16);
                }
                prop_assert!(tx.in_flight() < RING);
            }
        }
    }
    Ok(())
}

const VMX: u32 = 32;

/// Rings of a vmxnet3's queue, and buffers at address 1 MiB of the device.
struct Vmx {
    rings: Block,
    buffers: Block,
    memory: [NonNull<u8>; 2],
    iommu: Iommu,
}

fn vmx(device_writes: bool) -> Vmx {
    let (rings, base) = memory(2 * VMX as usize * 16);
    let (buffers, buffers_base) = memory(VMX as usize * STRIDE);
    let mut iommu = Iommu::default();
    // SAFETY: the block is kept beside the map; the second ring begins inside the first block.
    let second = unsafe {
        iommu.map(1 << 20, buffers_base, buffers.len(), device_writes);
        base.add(VMX as usize * 16)
    };
    Vmx { rings, buffers, memory: [base, second], iommu }
}

impl Vmx {
    fn rx(&self) -> (vmxnet3::RxRing, Vmxnet3Device) {
        // SAFETY: `VMX * 16` bytes each, aligned to 512, kept by `self`.
        unsafe {
            (
                vmxnet3::RxRing::new(self.memory, VMX, STRIDE, addr),
                Vmxnet3Device::new(self.memory, VMX),
            )
        }
    }

    fn tx(&self) -> (vmxnet3::TxRing, Vmxnet3Device) {
        // SAFETY: as in `rx`.
        unsafe {
            (vmxnet3::TxRing::new(self.memory, VMX, addr), Vmxnet3Device::new(self.memory, VMX))
        }
    }
}

/// Goal: received frames arrive once, in order and unchanged, the device never gets a buffer that
/// is lent, and those that it skips come back to it. Method: random deliveries, skips, takes and
/// returns against a queue of frames, over many passes of the generation bits.
#[test]
fn a_vmxnet3s_frames_arrive_in_order_across_the_wrap() {
    let v = vmx(true);
    let (mut rx, mut device) = v.rx();
    let mut lent: VecDeque<(u32, u32)> = VecDeque::new();
    // Buffers that the device has; those that each frame stands for; those that may be given back.
    let (mut has, mut stands_for, mut free) = (VMX - 1, VecDeque::new(), 0);
    let (mut sent, mut got, mut skipped, mut x) = (0_u32, 0, 0, 7_u64);
    while got < 50_000 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        match x % 8 {
            0..=2 => {
                let was_there = device.receive(&v.iommu, &frame(sent));
                assert_eq!(was_there, has > 0, "the device sees another ring");
                if was_there {
                    (has, sent) = (has - 1, sent + 1);
                    stands_for.push_back(std::mem::take(&mut skipped) + 1);
                }
            }
            3 => {
                // Never the last one: nobody would be told of it.
                if has > 1 && device.skip() {
                    (has, skipped) = (has - 1, skipped + 1);
                }
            }
            4..=5 => match rx.take().unwrap() {
                Some(r) => {
                    assert!(r.is_good && usize::from(r.len) == frame(got).len());
                    lent.push_back((r.id, got));
                    (got, free) = (got + 1, free + stands_for.pop_front().unwrap());
                }
                None => assert_eq!(sent, got),
            },
            _ => {
                // Still unchanged when they are given back.
                for (id, serial) in lent.drain(..) {
                    let at = id as usize * STRIDE;
                    let bytes = frame(serial);
                    assert_eq!(v.buffers.as_slice()[at..at + bytes.len()], bytes);
                }
                rx.refill();
                has += std::mem::take(&mut free);
            }
        }
    }
}

/// Goal: frames leave once, in order and unchanged; a full ring says so and nothing is overwritten;
/// one completion may stand for several frames.
#[test]
fn a_vmxnet3_sends_in_order_across_the_wrap() {
    let mut v = vmx(false);
    let (mut tx, mut device) = v.tx();
    let (mut queued, mut sent, mut completed, mut x) = (0_u32, 0, 0, 11_u64);
    while sent < 50_000 {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        match x % 3 {
            0 => match tx.next_slot().unwrap() {
                Some(i) => {
                    let bytes = frame(queued);
                    let at = i as usize * STRIDE;
                    v.buffers.as_mut_slice()[at..at + bytes.len()].copy_from_slice(&bytes);
                    tx.push(bytes.len());
                    queued += 1;
                }
                None => assert_eq!(queued - completed, VMX - 1, "full too early"),
            },
            _ => {
                // The last one is always told of.
                let completes = x & 256 != 0 || queued - sent == 1;
                let got = device.send(&v.iommu, completes);
                assert_eq!(got.is_some(), queued != sent, "the device sees another ring");
                if let Some(got) = got {
                    assert_eq!(got, frame(sent));
                    sent += 1;
                    completed = if completes { sent } else { completed };
                }
            }
        }
        assert_eq!(tx.in_flight(), Ok(queued - completed));
    }
}

/// What a vmxnet3 may do that none should: complete what it does not have, by every number that
/// there is.
#[test]
fn a_vmxnet3s_completions_that_cannot_be_are_refused() {
    let (strange, whole) = (DeviceViolation(STRANGE.unwrap()), vmxnet3::RX_WHOLE);
    for index in 0..4096_u64 {
        let v = vmx(true);
        let (mut rx, mut device) = v.rx();
        device.scribble(index | whole, 60);
        let has_it = index < u64::from(VMX) - 1;
        match rx.take() {
            Ok(Some(r)) => assert!(has_it && u64::from(r.id) == index && r.is_good),
            other => assert_eq!((other, has_it), (Err(strange), false)),
        }
        let v = vmx(false);
        let (mut tx, mut device) = v.tx();
        for _ in 0..5 {
            assert!(tx.next_slot().unwrap().is_some());
            tx.push(60);
        }
        device.scribble(index, 0);
        let why = DeviceViolation("it completed a frame that it did not have");
        assert_eq!(tx.reclaim(), if index < 5 { Ok(()) } else { Err(why) });
    }
    // The same buffer twice.
    let v = vmx(true);
    let (mut rx, mut device) = v.rx();
    device.scribble(3 | whole, 60);
    device.scribble(3 | whole, 60);
    assert_eq!(rx.take().map(|r| r.unwrap().id), Ok(3));
    assert_eq!(rx.take(), Err(strange));
}

#[test]
fn a_vmxnet3s_frame_that_is_not_whole_is_no_good() {
    let v = vmx(true);
    let (mut rx, mut device) = v.rx();
    let whole = vmxnet3::RX_WHOLE;
    let words = [
        (whole, 60, true),
        (1 << 14, 60, false),
        (1 << 15, 60, false),
        (whole | 1 << 16, 60, false),
        (whole, 60 | vmxnet3::RX_ERROR, false),
    ];
    for (i, (first, second, is_good)) in words.into_iter().enumerate() {
        device.scribble(first | i as u64, second);
        let r = rx.take().unwrap().unwrap();
        assert_eq!((r.id, r.len, r.is_good), (i as u32, 60, is_good));
    }
}

proptest! {
    /// Goal: a vmxnet3 that writes anything anywhere in its rings makes the driver neither panic,
    /// nor name a buffer that does not exist, nor hang.
    #[test]
    fn hostile_ring_memory_does_not_break_vmxnet3_rings(
        ops in prop::collection::vec((0..6_u8, any::<u64>(), any::<u64>()), 1..300)
    ) {
        let (v, other) = (vmx(true), vmx(true));
        let ((mut rx, mut rx_device), (mut tx, mut tx_device)) = (v.rx(), other.tx());
        for (op, first, second) in ops {
            // A number that the ring has.
            let near = first & !0xfe0;
            match op {
                0 => rx_device.scribble(near, second),
                1 => tx_device.scribble(near, second),
                2 => scribble(&v.rings, first as u16, second),
                3 => scribble(&other.rings, first as u16, second),
                4 => {
                    for _ in 0..first % 40 {
                        match rx.take() {
                            Ok(Some(r)) => prop_assert!(r.id < VMX),
                            Ok(None) => break,
                            Err(_) => return Ok(()),
                        }
                    }
                    rx.refill();
                }
                _ => match tx.next_slot() {
                    Ok(Some(i)) => {
                        prop_assert!(i < VMX);
                        tx.push(1 + first as usize % 1000);
                    }
                    Ok(None) => {}
                    Err(_) => return Ok(()),
                },
            }
        }
    }
}
