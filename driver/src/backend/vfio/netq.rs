//! Data path of a virtio NIC: one receive and one transmit queue with their buffers.
//!
//! Every buffer starts with the 12 bytes of `struct virtio_net_hdr_v1`. No offload is negotiated,
//! so the header is zero in transmitted frames and ignored in received ones.
//!
//! The only registers used are the two doorbells, so that unit tests and benchmarks can run it
//! against a model of the device.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::Release;
use std::sync::atomic::fence;

use super::nic::{Buffers, LentFrame, Nic, Rings};
use super::ring::virtq::{DeviceViolation, Layout, RecycledVirtq, Virtq};
use crate::frame::ETH_HDR_LEN;

/// Bytes before each frame.
pub const HDR_LEN: usize = 12;

/// Minimum length that the device writes: both headers.
const FRAME_AT_LEAST: usize = HDR_LEN + ETH_HDR_LEN;

/// A queue's doorbell register. Writing the queue's number notifies the device.
#[derive(Clone, Copy)]
pub struct Doorbell {
    /// A 16-bit register.
    pub register: NonNull<u16>,
    /// What to write.
    pub queue: u16,
}

impl Doorbell {
    #[inline]
    pub(super) fn kick(self) {
        // Orders the published entries before the notification.
        fence(Release);
        // SAFETY: the register stays mapped for as long as the queue is used (`NetQueues::new`).
        unsafe { self.register.as_ptr().write_volatile(self.queue.to_le()) }
    }
}

/// Memory of one queue and its buffers, one per descriptor.
pub struct QueueMemory {
    /// [`Layout::of`]`(count).len` zeroed bytes, aligned to 64.
    pub queue: NonNull<u8>,
    /// Descriptors, a power of two.
    pub count: u16,
    /// `count * stride` zeroed bytes.
    pub buffers: NonNull<u8>,
    /// IOVA of `buffers`.
    pub buffers_iova: u64,
    /// Bytes of a buffer: a header and the largest frame.
    pub stride: usize,
    /// The queue's doorbell.
    pub doorbell: Doorbell,
}

/// Both queues of a virtio NIC.
pub struct NetQueues {
    rx: RecycledVirtq,
    rx_buffers: Buffers,
    rx_bell: Doorbell,
    dropped: u64,
    tx: Virtq,
    tx_buffers: Buffers,
    tx_frame_max: usize,
    tx_bell: Doorbell,
    is_queued: bool,
}

// SAFETY: the doorbells are addresses of registers, which any thread may write.
unsafe impl Send for NetQueues {}

impl NetQueues {
    /// Bytes of a queue of `count` descriptors.
    pub fn queue_len(count: u16) -> usize {
        Layout::of(count).len
    }

    /// Sets up both queues, with all receive buffers posted. [`start`](Self::start) notifies the
    /// device of them.
    ///
    /// # Safety
    /// The memory is as `rx` and `tx` describe it, is accessed by nobody but this and the device,
    /// and stays mapped, as do the doorbells, for as long as this lives.
    pub unsafe fn new(rx: &QueueMemory, tx: &QueueMemory) -> Self {
        let rx_addr = |id: u16| rx.buffers_iova + u64::from(id) * rx.stride as u64;
        // SAFETY: the caller's promise, for both.
        let (rx_queue, mut tx_queue) = unsafe {
            (
                RecycledVirtq::new(rx.queue, rx.count, rx.stride as u32, rx_addr),
                Virtq::new(tx.queue, tx.count),
            )
        };
        for id in 0..tx.count {
            let addr = tx.buffers_iova + u64::from(id) * tx.stride as u64;
            tx_queue.describe(id, addr, 0, false);
        }
        // SAFETY: as above.
        let buffers = |memory: &QueueMemory| unsafe {
            Buffers::new(memory.buffers, memory.stride, memory.count.into())
        };
        Self {
            rx: rx_queue,
            rx_buffers: buffers(rx),
            rx_bell: rx.doorbell,
            dropped: 0,
            tx: tx_queue,
            tx_buffers: buffers(tx),
            tx_frame_max: tx.stride - HDR_LEN,
            tx_bell: tx.doorbell,
            is_queued: false,
        }
    }

    /// Notifies the device of its receive buffers.
    pub fn start(&self) {
        self.rx_bell.kick();
    }

    #[inline(never)]
    fn reclaim(&mut self) -> Result<(), DeviceViolation> {
        self.tx.take_burst(usize::MAX)?;
        Ok(())
    }
}

impl Rings for NetQueues {
    #[inline(always)]
    fn tx(&mut self, len: usize, fill: impl FnOnce(NonNull<u8>)) -> Result<bool, DeviceViolation> {
        assert!(len <= self.tx_frame_max, "longer than a buffer");
        if self.tx.next().is_none() {
            self.reclaim()?;
        }
        let Self { tx, tx_buffers, is_queued, .. } = self;
        let posted = tx.post_as(|id| {
            // SAFETY: a buffer is longer than its header.
            fill(unsafe { tx_buffers.at(id.into()).add(HDR_LEN) });
            Some((HDR_LEN + len) as u32)
        });
        *is_queued |= posted;
        Ok(posted)
    }

    #[inline(always)]
    fn tx_flush(&mut self) {
        if !std::mem::take(&mut self.is_queued) {
            return;
        }
        self.tx.publish();
        if self.tx.wants_kick() {
            self.tx_bell.kick();
        }
    }

    #[inline(always)]
    fn rx_take(
        &mut self,
        max: usize,
        mut each: impl FnMut(LentFrame),
    ) -> Result<usize, DeviceViolation> {
        let Self { rx, rx_buffers, .. } = self;
        let len_max = rx_buffers.stride() - FRAME_AT_LEAST;
        let mut bad_count = 0;
        let taken = rx.take_burst(max, |id, len| {
            // A length below the minimum wraps to a value above the maximum.
            if (len as usize).wrapping_sub(FRAME_AT_LEAST) > len_max {
                bad_count += 1;
                return;
            }
            let base = rx_buffers.at(id.into()).as_ptr().wrapping_add(HDR_LEN);
            each(LentFrame { base, len: len as usize - HDR_LEN });
        })?;
        self.dropped += bad_count;
        Ok(taken - bad_count as usize)
    }

    #[inline(always)]
    fn rx_release(&mut self) {
        if self.rx.publish() && self.rx.wants_kick() {
            self.rx_bell.kick();
        }
    }
}

/// The data path alone: the creator of the queues manages the device.
impl Nic for NetQueues {
    type Rings = Self;

    #[inline(always)]
    fn rings(&mut self) -> &mut Self {
        self
    }

    fn set_interrupt(&mut self, wanted: bool) {
        self.rx.set_interrupt(wanted);
    }

    fn dropped(&self) -> u64 {
        self.dropped
    }

    fn health(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn stop(&mut self) {}
}
