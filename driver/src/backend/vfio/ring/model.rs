//! Models of the devices that use the descriptor rings, for the tests and for the benchmark that
//! counts a driver's instructions on any machine.
//!
//! A model acts as the specification requires, and only when called: the caller decides when it
//! polls, in which order it completes, and when it stalls. It accesses memory through an [`Iommu`],
//! which panics where a real one would log a fault.

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64};

use super::desc::DescRing;
use super::e1000::{Advanced, Format, Legacy, SENT};
use super::virtq::{DESC_NEXT, DESC_WRITE, Layout, NO_INTERRUPT, NO_NOTIFY};
use super::vmxnet3::{DONE_GEN, LEN_BITS, RX_GEN, RX_WHOLE, TX_GEN};

/// Memory that a model may access, and how.
#[derive(Clone, Debug, Default)]
pub struct Iommu {
    areas: Vec<(u64, usize, usize, bool)>,
}

impl Iommu {
    /// Maps `len` bytes at `base` to `iova`, writable by the device if `writable`.
    ///
    /// # Safety
    /// The bytes stay mapped for as long as the model is used, and are reached by the driver under
    /// test and the model alone.
    pub unsafe fn map(&mut self, iova: u64, base: NonNull<u8>, len: usize, writable: bool) {
        self.areas.push((iova, base.as_ptr() as usize, len, writable));
    }

    /// Translates `len` bytes at `iova`.
    ///
    /// # Panics
    /// On an access that is not mapped: the fault that a real IOMMU would log.
    fn at(&self, iova: u64, len: usize, write: bool) -> *mut u8 {
        let fits = |&&(start, _, area_len, writable): &&(u64, usize, usize, bool)| {
            let at = iova.wrapping_sub(start);
            (writable || !write) && at <= area_len as u64 && len as u64 <= area_len as u64 - at
        };
        let found = self.areas.iter().find(fits);
        let Some(&(start, base, ..)) = found else {
            panic!("IOMMU fault: {len} bytes at {iova:#x}, write {write}")
        };
        (base + (iova - start) as usize) as *mut u8
    }

    /// Copies memory out as the device would read it.
    ///
    /// # Panics
    /// On a fault.
    pub fn read(&self, iova: u64, bytes: &mut [u8]) {
        let from = self.at(iova, bytes.len(), false);
        // SAFETY: `at` found `bytes.len()` mapped bytes, which no Rust reference of ours covers.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// Writes memory as the device would.
    ///
    /// # Panics
    /// On a fault.
    pub fn write(&self, iova: u64, bytes: &[u8]) {
        let to = self.at(iova, bytes.len(), true);
        // SAFETY: as in `read`.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }
}

/// A descriptor as the device reads it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Desc {
    /// The buffer's address.
    pub addr: u64,
    /// Its length.
    pub len: u32,
    /// The device writes it.
    pub is_write: bool,
    /// The next descriptor of its chain.
    pub next: Option<u16>,
}

/// A virtio split queue, device side.
pub struct VirtqDevice {
    base: NonNull<u8>,
    layout: Layout,
    mask: u16,
    avail_idx: u16,
    used_idx: u16,
}

impl VirtqDevice {
    /// The device side of the queue at `base`.
    ///
    /// # Safety
    /// As [`Virtq::new`](super::virtq::Virtq::new), whose other end this is.
    pub unsafe fn new(base: NonNull<u8>, count: u16) -> Self {
        Self { base, layout: Layout::of(count), mask: count - 1, avail_idx: 0, used_idx: 0 }
    }

    fn at<T>(&self, at: usize) -> &T {
        assert!(at + size_of::<T>() <= self.layout.len && at.is_multiple_of(align_of::<T>()));
        // SAFETY: inside the queue's memory and aligned, both just checked; mapped (`new`).
        unsafe { self.base.add(at).cast::<T>().as_ref() }
    }

    /// Takes the next buffer that the driver made available.
    pub fn next_id(&mut self) -> Option<u16> {
        let idx = u16::from_le(self.at::<AtomicU16>(self.layout.avail + 2).load(Acquire));
        if idx == self.avail_idx {
            return None;
        }
        let at = self.layout.avail + 4 + 2 * (self.avail_idx & self.mask) as usize;
        self.avail_idx = self.avail_idx.wrapping_add(1);
        Some(u16::from_le(self.at::<AtomicU16>(at).load(Relaxed)))
    }

    /// Reads a descriptor.
    pub fn desc(&self, id: u16) -> Desc {
        let at = self.layout.desc + 16 * id as usize;
        let rest = u32::from_le(self.at::<AtomicU32>(at + 12).load(Relaxed));
        let (flags, next) = (rest as u16, (rest >> 16) as u16);
        Desc {
            addr: u64::from_le(self.at::<AtomicU64>(at).load(Relaxed)),
            len: u32::from_le(self.at::<AtomicU32>(at + 8).load(Relaxed)),
            is_write: flags & DESC_WRITE != 0,
            next: (flags & DESC_NEXT != 0).then_some(next),
        }
    }

    /// Returns a buffer with `len` written bytes. Takes any id and length, for faulty devices.
    pub fn used(&mut self, id: u32, len: u32) {
        let at = self.layout.used + 4 + 8 * (self.used_idx & self.mask) as usize;
        self.at::<AtomicU32>(at).store(id.to_le(), Relaxed);
        self.at::<AtomicU32>(at + 4).store(len.to_le(), Relaxed);
        self.used_idx = self.used_idx.wrapping_add(1);
        self.set_used_idx(self.used_idx);
    }

    /// Writes the used index, valid or not.
    pub fn set_used_idx(&self, idx: u16) {
        self.at::<AtomicU16>(self.layout.used + 2).store(idx.to_le(), Release);
    }

    /// Whether the driver enabled the interrupt for used buffers.
    pub fn wants_interrupt(&self) -> bool {
        u16::from_le(self.at::<AtomicU16>(self.layout.avail).load(Relaxed)) & NO_INTERRUPT == 0
    }

    /// Sets whether the driver has to notify the device.
    pub fn set_kicks(&self, wanted: bool) {
        let flags = if wanted { 0 } else { NO_NOTIFY };
        self.at::<AtomicU16>(self.layout.used).store(flags.to_le(), Relaxed);
    }
}

/// The device side of a [`Format`].
pub trait Device: Format {
    /// The words of a completed receive descriptor with a frame of `len` bytes; `addr` is its first
    /// word before.
    fn received_words(addr: u64, len: usize) -> (u64, u64);

    /// Length of the frame of a transmit descriptor, whose other fields are checked.
    fn send_len(word: u64) -> usize;
}

impl Device for Legacy {
    fn received_words(addr: u64, len: usize) -> (u64, u64) {
        (addr, len as u64 | Self::DONE | Self::END)
    }

    fn send_len(word: u64) -> usize {
        assert_eq!(word >> 24, 0x0b, "its last descriptor, with a check sequence, reported");
        usize::from(word as u16)
    }
}

impl Device for Advanced {
    fn received_words(_addr: u64, len: usize) -> (u64, u64) {
        // The RSS hash and other fields replace the address.
        (0xdead_0000_beef, (len as u64) << 32 | Self::DONE | Self::END)
    }

    fn send_len(word: u64) -> usize {
        assert_eq!(word & 0xfff0_0000, Self::COMMAND, "one data descriptor");
        assert_eq!(word >> Self::LEN_AT, word & 0xffff, "the frame is one buffer");
        usize::from(word as u16)
    }
}

/// A ring of Intel's descriptors, device side.
pub struct IntelDevice<F> {
    ring: DescRing,
    head: u32,
    format: PhantomData<F>,
}

impl<F: Device> IntelDevice<F> {
    /// The device side of the ring at `base`.
    ///
    /// # Safety
    /// As [`RxRing::new`](super::e1000::RxRing::new), whose other end this is.
    pub unsafe fn new(base: NonNull<u8>, count: u32) -> Self {
        // SAFETY: the caller's promise.
        let ring = unsafe { DescRing::new(base, count) };
        Self { ring, head: 0, format: PhantomData }
    }

    /// Whether a descriptor is posted before `tail`.
    pub fn has_next(&self, tail: u32) -> bool {
        (self.head ^ tail) & self.ring.mask() != 0
    }

    /// Puts a frame into the next descriptor's buffer.
    ///
    /// # Panics
    /// On a fault of `iommu`.
    pub fn receive(&mut self, iommu: &Iommu, frame: &[u8]) {
        let addr = u64::from_le(self.ring.half(self.head, 0).load(Relaxed));
        iommu.write(addr, frame);
        let (first, second) = F::received_words(addr, frame.len());
        self.ring.half(self.head, 0).store(first.to_le(), Relaxed);
        self.ring.half(self.head, 1).store(second.to_le(), Release);
        self.head = self.head.wrapping_add(1);
    }

    /// Sends the next descriptor's frame.
    ///
    /// # Panics
    /// On a fault of `iommu`.
    pub fn send(&mut self, iommu: &Iommu) -> Vec<u8> {
        let addr = u64::from_le(self.ring.half(self.head, 0).load(Relaxed));
        let word = u64::from_le(self.ring.half(self.head, 1).load(Acquire));
        let mut frame = vec![0; F::send_len(word)];
        iommu.read(addr, &mut frame);
        self.ring.half(self.head, 1).store((word | SENT).to_le(), Release);
        self.head = self.head.wrapping_add(1);
        frame
    }

    /// The address in descriptor `i`.
    pub fn addr(&self, i: u32) -> u64 {
        u64::from_le(self.ring.half(i, 0).load(Relaxed))
    }

    /// Writes half `half` of a descriptor, valid or not.
    pub fn scribble(&self, i: u32, half: usize, word: u64) {
        self.ring.half(i, half).store(word.to_le(), Release);
    }
}

/// One queue of a vmxnet3, device side: reads commands, writes completions.
pub struct Vmxnet3Device {
    commands: DescRing,
    completions: DescRing,
    /// Commands and completions so far.
    taken: u32,
    completed: u32,
}

impl Vmxnet3Device {
    /// The device side of the rings at `memory`.
    ///
    /// # Safety
    /// As [`RxRing::new`](super::vmxnet3::RxRing::new), whose other end this is.
    pub unsafe fn new(memory: [NonNull<u8>; 2], count: u32) -> Self {
        // SAFETY: the caller's promise.
        let [commands, completions] = memory.map(|base| unsafe { DescRing::new(base, count) });
        Self { commands, completions, taken: 0, completed: 0 }
    }

    /// The second half of the next command, if its generation says that the driver gave it.
    fn next(&self, generation: u64) -> Option<u64> {
        let word = u64::from_le(self.commands.half(self.taken, 1).load(Acquire));
        let is_odd_pass = self.taken & (self.commands.mask() + 1) == 0;
        ((word & generation != 0) == is_odd_pass).then_some(word)
    }

    /// IOVA of the next command's buffer.
    fn addr(&self) -> u64 {
        u64::from_le(self.commands.half(self.taken, 0).load(Relaxed))
    }

    /// Completes the next command with these words; its number and the generation are added.
    fn complete(&mut self, first: u64, second: u64) {
        self.scribble(first | u64::from(self.taken & self.commands.mask()), second);
        self.taken = self.taken.wrapping_add(1);
    }

    /// Writes the next completion with the valid generation and any other contents.
    pub fn scribble(&mut self, first: u64, second: u64) {
        let is_odd_pass = self.completed & (self.completions.mask() + 1) == 0;
        let generation = if is_odd_pass { DONE_GEN } else { 0 };
        self.completions.half(self.completed, 0).store(first.to_le(), Relaxed);
        let second = second & !DONE_GEN | generation;
        self.completions.half(self.completed, 1).store(second.to_le(), Release);
        self.completed = self.completed.wrapping_add(1);
    }

    /// Puts a frame into the next buffer; `false` if there is none.
    ///
    /// # Panics
    /// On a fault of `iommu`, and if the frame is longer than the buffer.
    pub fn receive(&mut self, iommu: &Iommu, frame: &[u8]) -> bool {
        let Some(word) = self.next(RX_GEN) else { return false };
        assert!(frame.len() as u64 <= word & LEN_BITS);
        iommu.write(self.addr(), frame);
        self.complete(RX_WHOLE, frame.len() as u64);
        true
    }

    /// Skips the next buffer, as a device may; `false` if there is none.
    pub fn skip(&mut self) -> bool {
        let has_one = self.next(RX_GEN).is_some();
        self.taken = self.taken.wrapping_add(u32::from(has_one));
        has_one
    }

    /// Sends the next frame, if there is one. Without `completes`, the completion of a later frame
    /// covers it.
    ///
    /// # Panics
    /// On a fault of `iommu`.
    pub fn send(&mut self, iommu: &Iommu, completes: bool) -> Option<Vec<u8>> {
        let word = self.next(TX_GEN)?;
        let mut frame = vec![0; (word & LEN_BITS) as usize];
        iommu.read(self.addr(), &mut frame);
        if completes {
            self.complete(0, 0);
        } else {
            self.taken = self.taken.wrapping_add(1);
        }
        Some(frame)
    }
}
