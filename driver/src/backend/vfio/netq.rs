//! The data path of a virtio NIC: one receive and one transmit queue with their buffers.
//!
//! Every buffer starts with the 12 bytes of `struct virtio_net_hdr_v1`. No offload is negotiated,
//! so in a frame to send they are 0 for ever and in a received one they say nothing.
//!
//! It knows no registers but the two that it kicks the device through, so that the host tests and
//! the bench run it against a model of the device.

use std::ptr::NonNull;
use std::sync::atomic::Ordering::Release;
use std::sync::atomic::fence;

use super::nic::{Buffers, Lent, Nic};
use crate::frame::ETH_HDR_LEN;
use crate::ring::virtq::{Broken, Layout, Virtq};

/// Bytes before each frame.
pub const HDR_LEN: usize = 12;

/// A queue's doorbell: writing the queue's number there makes the device look at it.
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
        // What was published is before the kick for the device as well.
        fence(Release);
        // SAFETY: the register stays mapped for as long as the queue is used (`NetQueues::new`).
        unsafe { self.register.as_ptr().write_volatile(self.queue.to_le()) }
    }
}

/// One queue and its buffers: as many as the queue has descriptors.
pub struct QueueMemory {
    /// [`Layout::of`]`(count).len` zeroed bytes, aligned to 64.
    pub queue: NonNull<u8>,
    /// Descriptors, a power of two.
    pub count: u16,
    /// `count * stride` zeroed bytes.
    pub buffers: NonNull<u8>,
    /// The same for the device.
    pub buffers_iova: u64,
    /// Bytes of a buffer: a header and the largest frame.
    pub stride: usize,
    /// How the device is told.
    pub doorbell: Doorbell,
}

/// Both queues of a virtio NIC.
pub struct NetQueues {
    rx: Virtq,
    rx_buffers: Buffers,
    rx_bell: Doorbell,
    /// Buffers that were lent or dropped and have to go back: the first `lent_count`.
    lent: Box<[u16]>,
    lent_count: usize,
    dropped: u64,
    tx: Virtq,
    tx_buffers: Buffers,
    tx_bell: Doorbell,
    /// Buffers that the device does not have. The last one is the next place.
    free: Vec<u16>,
    is_queued: bool,
}

// SAFETY: the doorbells are addresses of registers, which any thread may write.
unsafe impl Send for NetQueues {}

impl NetQueues {
    /// Bytes of a queue of `count` descriptors.
    pub fn queue_len(count: u16) -> usize {
        Layout::of(count).len
    }

    /// Both queues, with all receive buffers posted. The device is kicked by
    /// [`start`](Self::start).
    ///
    /// # Safety
    /// What `rx` and `tx` say of their memory holds, nobody but this and the device reaches it, and
    /// it stays mapped, as do the doorbells, for as long as this lives.
    pub unsafe fn new(rx: &QueueMemory, tx: &QueueMemory) -> Self {
        // SAFETY: the caller's promise, for both.
        let (mut rx_queue, mut tx_queue) =
            unsafe { (Virtq::new(rx.queue, rx.count), Virtq::new(tx.queue, tx.count)) };
        for id in 0..rx.count {
            let addr = rx.buffers_iova + u64::from(id) * rx.stride as u64;
            rx_queue.describe(id, addr, rx.stride as u32, true);
            rx_queue.post(id);
        }
        rx_queue.publish();
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
            lent: vec![0; rx.count.into()].into(),
            lent_count: 0,
            dropped: 0,
            tx: tx_queue,
            tx_buffers: buffers(tx),
            tx_bell: tx.doorbell,
            free: (0..tx.count).rev().collect(),
            is_queued: false,
        }
    }

    /// Tells the device of its receive buffers.
    pub fn start(&self) {
        self.rx_bell.kick();
    }

    fn reclaim(&mut self) -> Result<(), Broken> {
        while let Some((id, _)) = self.tx.take()? {
            self.free.push(id);
        }
        Ok(())
    }

    /// Frames that the device may not have sent yet.
    ///
    /// # Errors
    /// [`Broken`].
    pub fn tx_in_flight(&mut self) -> Result<usize, Broken> {
        self.reclaim()?;
        Ok(self.tx.posted_count().into())
    }
}

/// The data path alone: the device is looked after by whoever made the queues.
impl Nic for NetQueues {
    #[inline]
    fn tx_place(&mut self) -> Result<Option<NonNull<u8>>, Broken> {
        if self.free.is_empty() {
            self.reclaim()?;
        }
        let Some(&id) = self.free.last() else { return Ok(None) };
        // SAFETY: a buffer is longer than its header.
        Ok(Some(unsafe { self.tx_buffers.at(id.into()).add(HDR_LEN) }))
    }

    #[inline]
    fn tx_commit(&mut self, len: usize) {
        assert!(len <= self.tx_buffers.stride() - HDR_LEN, "longer than a buffer");
        let id = self.free.pop().expect("a place was asked for");
        self.tx.post_len(id, (HDR_LEN + len) as u32);
        self.is_queued = true;
    }

    #[inline]
    fn tx_flush(&mut self) {
        if !std::mem::take(&mut self.is_queued) {
            return;
        }
        self.tx.publish();
        if self.tx.wants_kick() {
            self.tx_bell.kick();
        }
    }

    #[inline]
    fn rx_take(&mut self, frames: &mut [Lent]) -> Result<usize, Broken> {
        let mut count = 0;
        while count < frames.len() {
            let Some((id, len)) = self.rx.take()? else { break };
            // No more are taken than there are.
            self.lent[self.lent_count] = id;
            self.lent_count += 1;
            let len = len as usize;
            if len < HDR_LEN + ETH_HDR_LEN || len > self.rx_buffers.stride() {
                self.dropped += 1;
                continue;
            }
            let base = self.rx_buffers.at(id.into()).as_ptr().wrapping_add(HDR_LEN);
            frames[count] = Lent { base, len: len - HDR_LEN };
            count += 1;
        }
        Ok(count)
    }

    #[inline]
    fn rx_release(&mut self) {
        if self.lent_count == 0 {
            return;
        }
        for &id in &self.lent[..self.lent_count] {
            self.rx.post(id);
        }
        self.lent_count = 0;
        self.rx.publish();
        if self.rx.wants_kick() {
            self.rx_bell.kick();
        }
    }

    fn dropped(&self) -> u64 {
        self.dropped
    }

    fn health(&mut self) -> Result<(), String> {
        Ok(())
    }

    fn stop(&mut self) {}
}
