//! A PCI device opened through VFIO: container, group, device, its registers, and its DMA memory.
//!
//! One container per device, with the DMA mappings of that device only. Teardown order: the NIC's
//! driver has stopped the device, its memory is unmapped, then device, group and container are
//! closed, upon which the kernel disables bus mastering and resets the device. After a killed
//! process the kernel does the same in the same order, whatever children it has: they inherit
//! neither files nor registers.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::ops::Deref;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Release;
use std::sync::atomic::fence;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use memmap2::MmapOptions;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::resource::{Resource, getrlimit};
use vfio_bindings::bindings::vfio;

use super::error::VfioError;
use super::iova::IovaSpace;
use super::survey;
use super::sys::{self, Access, Region};
use crate::backend::lock::{UnforkedMap, children_may_keep, forget_in_children};
use crate::mem::{Arena, Block, Hugepages};
use crate::port::MacAddr;

/// MTU if neither the user nor the device says one.
const MTU_DEFAULT: usize = 1500;

/// Bits of the command register in configuration space: memory decoding, bus mastering.
const COMMAND: u64 = 4;
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

/// A VFIO file, which keeps the device in use while it is open. Closed in forked children.
struct ForkSafeFile(File);

impl From<File> for ForkSafeFile {
    fn from(file: File) -> Self {
        forget_in_children(file.as_raw_fd());
        Self(file)
    }
}

impl Drop for ForkSafeFile {
    fn drop(&mut self) {
        children_may_keep(self.0.as_raw_fd());
    }
}

impl Deref for ForkSafeFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

/// The IOMMU's address space of the device, and its mappings.
pub(super) struct Container {
    file: ForkSafeFile,
    bdf: String,
    page_len: u64,
    space: Mutex<IovaSpace>,
    /// Limit on the number of mappings.
    maps_max: u32,
    maps: Mutex<u32>,
}

/// An open device.
pub(super) struct Device {
    pub(super) bdf: String,
    file: ForkSafeFile,
    config: Region,
    /// Readable when the device's removal is requested (unbinding, unplugging).
    request: Option<Arc<EventFd>>,
    container: Arc<Container>,
    /// Closed after the device and before the container.
    _group: ForkSafeFile,
    /// Process id of the opener. Forked children leave the device alone.
    owner: u32,
}

impl Device {
    /// Opens the device at this PCI address.
    ///
    /// # Errors
    /// [`VfioError`]; the device is as before.
    pub(super) fn open(bdf: &str) -> Result<Self, VfioError> {
        let dir = Path::new(survey::DEVICES).join(bdf);
        let bdf = bdf.to_owned();
        if !dir.is_dir() {
            return Err(VfioError::NoDevice { bdf });
        }
        let os = |what| {
            let bdf = bdf.clone();
            move |source| VfioError::Os { bdf, what, source }
        };
        let Some(group_id) = survey::group_of(&dir) else {
            return Err(VfioError::NoIommu { bdf });
        };
        let driver = survey::driver_of(&dir);
        if driver.as_deref() != Some("vfio-pci") {
            return Err(VfioError::Unbound { bdf, driver });
        }
        let file = ForkSafeFile::from(open_container(&bdf)?);
        let group = ForkSafeFile::from(open_group(&bdf, group_id)?);
        if !sys::is_viable(&group).map_err(os("VFIO_GROUP_GET_STATUS"))? {
            let others = survey::group_blockers(&dir);
            return Err(VfioError::NotViable { bdf, group: group_id, others });
        }
        sys::set_container(&group, &file).map_err(os("VFIO_GROUP_SET_CONTAINER"))?;
        sys::set_iommu(&file).map_err(|source| match source.raw_os_error() {
            Some(libc::EPERM) => VfioError::NoInterruptRemapping { bdf: bdf.clone() },
            _ => os("VFIO_SET_IOMMU")(source),
        })?;
        let name = CString::new(bdf.as_str()).expect("an address has no zero byte");
        let device = sys::device(&group, &name).map_err(os("VFIO_GROUP_GET_DEVICE_FD"))?;
        let device = ForkSafeFile::from(device);
        let config = sys::region(&device, vfio::VFIO_PCI_CONFIG_REGION_INDEX)
            .map_err(os("VFIO_DEVICE_GET_REGION_INFO"))?;
        let info = sys::iommu_info(&file).map_err(os("VFIO_IOMMU_GET_INFO"))?;
        let container = Arc::new(Container {
            file,
            bdf: bdf.clone(),
            // The smallest page that the IOMMU maps.
            page_len: 1 << info.page_lens.trailing_zeros().clamp(12, 30),
            space: Mutex::new(IovaSpace::new(&info.ranges)),
            maps_max: info.maps_left.unwrap_or(65_535),
            maps: Mutex::new(0),
        });
        let request = request_event_of(&device).map(Arc::new);
        let owner = std::process::id();
        Ok(Self { bdf, file: device, config, request, container, _group: group, owner })
    }

    /// The IOMMU's address space of the device.
    pub(super) fn container(&self) -> &Arc<Container> {
        &self.container
    }

    /// Whether this process opened the device, rather than its parent before a fork.
    pub(super) fn is_owner(&self) -> bool {
        self.owner == std::process::id()
    }

    /// An error that the device caused.
    pub(super) fn device_error(&self, why: impl Into<String>) -> VfioError {
        VfioError::Device { bdf: self.bdf.clone(), why: why.into() }
    }

    /// An error of an option that this device does not support. `why` says what to write instead.
    pub(super) fn option_error(&self, why: impl Into<String>) -> VfioError {
        VfioError::Option { bdf: self.bdf.clone(), why: why.into() }
    }

    /// MAC address of the port: the requested one, or the device's own if it is a valid unicast
    /// address.
    ///
    /// # Errors
    /// The device has none, and none was requested.
    pub(super) fn mac(
        &self,
        requested: Option<MacAddr>,
        own: MacAddr,
    ) -> Result<MacAddr, VfioError> {
        let mac = requested.or(Some(own).filter(|own| own.is_single()));
        mac.ok_or_else(|| self.option_error("it has no address; give it one with mac="))
    }

    /// MTU of the port: the requested one, or the default, at most `max`.
    ///
    /// # Errors
    /// More than `max` was requested.
    pub(super) fn mtu(&self, requested: Option<usize>, max: usize) -> Result<usize, VfioError> {
        let mtu = requested.unwrap_or(MTU_DEFAULT.min(max));
        if mtu > max {
            return Err(
                self.option_error(format!("it carries no MTU of {mtu}; write mtu={max} or less"))
            );
        }
        Ok(mtu)
    }

    fn os(&self, what: &'static str, source: io::Error) -> VfioError {
        VfioError::Os { bdf: self.bdf.clone(), what, source }
    }

    /// Reads configuration space.
    ///
    /// # Errors
    /// The bytes are outside of configuration space, or the device is gone.
    pub(super) fn config(&self, at: u64, bytes: &mut [u8]) -> Result<(), VfioError> {
        let is_inside = at + bytes.len() as u64 <= self.config.len;
        let read = if is_inside {
            self.file.read_exact_at(bytes, self.config.offset + at)
        } else {
            Err(io::Error::from_raw_os_error(libc::EINVAL))
        };
        read.map_err(|source| self.os("cannot read configuration space", source))
    }

    /// Reads two bytes of configuration space.
    ///
    /// # Errors
    /// As [`config`](Self::config).
    pub(super) fn config_u16(&self, at: u64) -> Result<u16, VfioError> {
        let mut bytes = [0; 2];
        self.config(at, &mut bytes)?;
        Ok(u16::from_le_bytes(bytes))
    }

    /// Enables or disables bus mastering (DMA).
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn set_bus_master(&self, on: bool) -> Result<(), VfioError> {
        let command = self.config_u16(COMMAND)? | MEMORY_SPACE;
        let command = if on { command | BUS_MASTER } else { command & !BUS_MASTER };
        let at = self.config.offset + COMMAND;
        self.file
            .write_all_at(&command.to_le_bytes(), at)
            .map_err(|source| self.os("cannot write configuration space", source))
    }

    /// Maps the registers behind base address register `index`.
    ///
    /// # Errors
    /// The BAR does not exist, or cannot be mapped.
    pub(super) fn bar(&self, index: u8) -> Result<Bar, VfioError> {
        let region = sys::region(&self.file, index.into())
            .map_err(|source| self.os("VFIO_DEVICE_GET_REGION_INFO", source))?;
        let len = usize::try_from(region.len).unwrap_or(0);
        if index > 5 || len == 0 || !region.can_map {
            return Err(self.device_error(format!("its BAR {index} cannot be mapped")));
        }
        let map = MmapOptions::new().offset(region.offset).len(len).map_raw(&*self.file);
        let map = map.and_then(UnforkedMap::new);
        let map = map.map_err(|source| self.os("cannot map its registers", source))?;
        Ok(Bar { map: Arc::new(map), len })
    }

    /// The device's first interrupt of the VFIO index `index`, if it has one. Polling needs none,
    /// sleeping does.
    pub(super) fn interrupt(&self, index: u32) -> Option<Interrupt> {
        let is_line = index == vfio::VFIO_PCI_INTX_IRQ_INDEX;
        Some(Interrupt { event: irq_eventfd(&self.file, index)?, is_line })
    }

    /// Unmasks an interrupt after its cause was acknowledged. The kernel masks INTx, which devices
    /// may share, each time that it signals; MSI needs nothing.
    pub(super) fn unmask(&self, interrupt: &Interrupt) {
        // A device that is gone is detected by the health check.
        if interrupt.is_line
            && let Err(error) = sys::unmask_line(&self.file)
        {
            tracing::debug!(bdf = self.bdf, %error, "its interrupt stays masked");
        }
    }

    /// Resets the device (by FLR if it has it), which ends all DMA.
    ///
    /// # Errors
    /// It has no reset, or the reset failed.
    pub(super) fn reset(&self) -> Result<(), VfioError> {
        match sys::can_reset(&self.file) {
            Ok(true) => sys::reset(&self.file).map_err(|source| self.os("cannot reset", source)),
            Ok(false) => Err(self.device_error("it has no reset")),
            Err(source) => Err(self.os("VFIO_DEVICE_GET_INFO", source)),
        }
    }

    /// Eventfd that becomes readable when the device's removal is requested.
    pub(super) fn request_event(&self) -> Option<Arc<EventFd>> {
        self.request.clone()
    }

    /// Fault of the device that configuration space or the removal request shows, if any.
    pub(super) fn bus_fault(&self) -> Option<String> {
        if let Some(request) = &self.request
            && request.read().is_ok()
        {
            return Some(
                "somebody wants the device back (it is being unbound or unplugged)".into(),
            );
        }
        match self.config_u16(COMMAND) {
            Err(_) | Ok(0xffff) => Some("the device no longer answers; was it unplugged?".into()),
            Ok(command) if command & BUS_MASTER == 0 => {
                Some("bus mastering was switched off under us; open the port again".into())
            }
            Ok(_) => None,
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if self.is_owner() {
            // Closing does the same; this ensures that no DMA is under way when the memory is
            // unmapped.
            let _ = self.set_bus_master(false);
        }
    }
}

fn open_container(bdf: &str) -> Result<File, VfioError> {
    let path = "/dev/vfio/vfio";
    let opened = File::options().read(true).write(true).open(path);
    let file = opened.map_err(|source| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => VfioError::NoVfio,
        Some(libc::EACCES | libc::EPERM) => {
            VfioError::NoPermission { bdf: bdf.to_owned(), path: path.into(), source }
        }
        _ => VfioError::Os { bdf: bdf.to_owned(), what: "cannot open /dev/vfio/vfio", source },
    })?;
    let version = sys::api_version(&file).unwrap_or(-1);
    if version != 0 || !sys::has_type1v2(&file).unwrap_or(false) {
        return Err(VfioError::NoVfio);
    }
    Ok(file)
}

fn open_group(bdf: &str, group: u32) -> Result<File, VfioError> {
    let path = PathBuf::from(format!("/dev/vfio/{group}"));
    let bdf = bdf.to_owned();
    let opened = File::options().read(true).write(true).open(&path);
    opened.map_err(|source| match source.raw_os_error() {
        Some(libc::EACCES) => VfioError::NoPermission { bdf, path, source },
        Some(libc::EBUSY) => VfioError::Busy { bdf, path },
        Some(libc::ENOENT) => VfioError::Unbound { bdf, driver: None },
        _ => VfioError::Os { bdf, what: "cannot open its group in /dev/vfio", source },
    })
}

/// Registers for the kernel's removal request. A kernel without it makes the unbinding process
/// wait.
fn request_event_of(device: &File) -> Option<EventFd> {
    irq_eventfd(device, vfio::VFIO_PCI_REQ_IRQ_INDEX)
}

/// An eventfd that interrupt 0 of the VFIO index `index` signals.
fn irq_eventfd(device: &File, index: u32) -> Option<EventFd> {
    if sys::irq_count(device, index).ok()? == 0 {
        return None;
    }
    let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
    let eventfd = EventFd::from_value_and_flags(0, flags).ok()?;
    sys::set_irq(device, index, Some(eventfd.as_raw_fd())).ok()?;
    Some(eventfd)
}

/// An interrupt of a device.
pub(super) struct Interrupt {
    /// Signalled by the device.
    pub(super) event: EventFd,
    /// INTx, not MSI or MSI-X.
    is_line: bool,
}

/// Polls until `is` returns true; false after `patience`.
pub(super) fn poll_until(patience: Duration, mut is: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + patience;
    while !is() {
        if Instant::now() > until {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// A mapped BAR. Every access is bounds-checked and volatile.
#[derive(Clone)]
pub(super) struct Bar {
    map: Arc<UnforkedMap>,
    len: usize,
}

/// 32-bit registers by their offset: a BAR, or a model of one in tests.
pub(super) trait RegisterAccess {
    /// Reads the register at `at`.
    fn read(&self, at: usize) -> u32;
    /// Writes the register at `at`.
    fn write(&self, at: usize, value: u32);
}

impl RegisterAccess for Bar {
    fn read(&self, at: usize) -> u32 {
        self.read32(at)
    }

    fn write(&self, at: usize, value: u32) {
        self.write32(at, value);
    }
}

impl Bar {
    /// Zeroed memory in place of registers.
    #[cfg(test)]
    pub(super) fn in_memory(len: usize) -> Self {
        let map = memmap2::MmapMut::map_anon(len).unwrap();
        Self { map: Arc::new(UnforkedMap::new(map.into()).unwrap()), len }
    }

    /// Length in bytes.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn at<T>(&self, at: usize) -> *mut T {
        let len = size_of::<T>();
        assert!(at.is_multiple_of(len) && at <= self.len && len <= self.len - at, "no register");
        self.map.as_mut_ptr().wrapping_add(at).cast()
    }

    /// The register at `at` as a ring's tail register.
    pub(super) fn tail_register(&self, at: usize) -> TailRegister {
        TailRegister { register: self.register(at), _map: Arc::clone(&self.map) }
    }

    /// Address of a 16- or 32-bit register that is written often. The mapping lives as long as a
    /// clone of this.
    pub(super) fn register<T>(&self, at: usize) -> NonNull<T> {
        NonNull::new(self.at(at)).expect("a mapping is not at 0")
    }

    pub(super) fn read8(&self, at: usize) -> u8 {
        // SAFETY: inside the mapping and aligned (`at`); reading a register changes no memory.
        unsafe { self.at::<u8>(at).read_volatile() }
    }

    pub(super) fn read16(&self, at: usize) -> u16 {
        // SAFETY: inside the mapping and aligned (`at`); reading a register changes no memory.
        u16::from_le(unsafe { self.at::<u16>(at).read_volatile() })
    }

    pub(super) fn read32(&self, at: usize) -> u32 {
        // SAFETY: inside the mapping and aligned (`at`); reading a register changes no memory.
        u32::from_le(unsafe { self.at::<u32>(at).read_volatile() })
    }

    pub(super) fn write8(&self, at: usize, value: u8) {
        // SAFETY: inside the mapping and aligned (`at`); the IOMMU confines the device's reaction
        // to mapped memory.
        unsafe { self.at::<u8>(at).write_volatile(value) }
    }

    pub(super) fn write16(&self, at: usize, value: u16) {
        // SAFETY: as in `write8`.
        unsafe { self.at::<u16>(at).write_volatile(value.to_le()) }
    }

    pub(super) fn write32(&self, at: usize, value: u32) {
        // SAFETY: as in `write8`.
        unsafe { self.at::<u32>(at).write_volatile(value.to_le()) }
    }

    /// Writes two 32-bit halves, the lower one first, as virtio requires.
    pub(super) fn write64(&self, at: usize, value: u64) {
        self.write32(at, value as u32);
        self.write32(at + 4, (value >> 32) as u32);
    }
}

/// A tail register: 32 bits that tell the device how far a ring is filled.
pub(super) struct TailRegister {
    register: NonNull<u32>,
    /// Keeps the register mapped.
    _map: Arc<UnforkedMap>,
}

// SAFETY: a register, which any thread may write; it stays mapped.
unsafe impl Send for TailRegister {}

impl TailRegister {
    /// Writes the register, ordered after the descriptors and buffers that it publishes.
    #[inline]
    pub(super) fn set(&self, tail: u32) {
        fence(Release);
        // SAFETY: a register of the mapping that is kept beside it.
        unsafe { self.register.as_ptr().write_volatile(tail.to_le()) }
    }
}

/// Zeroed DMA memory, from hugepages if any are free. Unmapped from the IOMMU when dropped; the
/// device must have stopped by then.
pub(super) struct DmaArea {
    block: Block,
    iova: u64,
    container: Arc<Container>,
    owner: u32,
}

impl Container {
    /// Allocates and maps at least `len` bytes that the device may access as `access` says.
    ///
    /// # Errors
    /// No memory, no IOVA or no mapping is left, or the memory may not be locked.
    pub(super) fn alloc_dma(
        self: &Arc<Self>,
        len: usize,
        access: Access,
        hugepages: Hugepages,
    ) -> Result<DmaArea, VfioError> {
        let failed = |what, source| VfioError::Os { bdf: self.bdf.clone(), what, source };
        let arena = Arena::new(len, hugepages).map_err(|why| VfioError::Device {
            bdf: self.bdf.clone(),
            why: format!("no memory for its rings: {why}"),
        })?;
        // Whole pages of the arena, so that no other data shares a page with the device.
        let len = arena.len();
        let block = arena.block(len).expect("a new arena is one free piece");
        let align = (arena.page_len() as u64).max(self.page_len);
        let no_room = || failed("no address left", io::Error::from_raw_os_error(libc::ENOSPC));
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        if *maps >= self.maps_max {
            return Err(no_room());
        }
        let mut space = self.space.lock().unwrap_or_else(PoisonError::into_inner);
        let iova = space.alloc(len as u64, align).ok_or_else(no_room)?;
        // SAFETY: the block is exclusively owned and stays mapped until the area is dropped, which
        // unmaps it from the IOMMU first; nothing else is in the arena's pages.
        let mapped =
            unsafe { sys::map_dma(&self.file, block.as_mut_ptr(), len as u64, iova, access) };
        if let Err(source) = mapped {
            space.free(iova, len as u64);
            return Err(match (source.raw_os_error(), memlock()) {
                (Some(libc::ENOMEM), Some(limit)) if limit < u64::MAX => {
                    VfioError::Memlock { bdf: self.bdf.clone(), need: len as u64, limit }
                }
                _ => failed("VFIO_IOMMU_MAP_DMA", source),
            });
        }
        *maps += 1;
        let owner = std::process::id();
        Ok(DmaArea { block, iova, container: Arc::clone(self), owner })
    }
}

/// `RLIMIT_MEMLOCK` of this process, bytes.
fn memlock() -> Option<u64> {
    Some(getrlimit(Resource::RLIMIT_MEMLOCK).ok()?.0)
}

impl DmaArea {
    /// Length in bytes, at least as requested.
    pub(super) fn len(&self) -> usize {
        self.block.len()
    }

    /// Address of the first byte in this process.
    pub(super) fn base(&self) -> NonNull<u8> {
        NonNull::new(self.block.as_mut_ptr()).expect("a mapping is not at 0")
    }

    /// IOVA of the first byte.
    pub(super) fn iova(&self) -> u64 {
        self.iova
    }
}

impl Drop for DmaArea {
    fn drop(&mut self) {
        if self.owner != std::process::id() {
            return;
        }
        let len = self.block.len() as u64;
        match sys::unmap_dma(&self.container.file, self.iova, len) {
            Ok(unmapped) if unmapped == len => {
                let space = &self.container.space;
                space.lock().unwrap_or_else(PoisonError::into_inner).free(self.iova, len);
                *self.container.maps.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
            }
            // The IOVA range is not reused.
            Ok(unmapped) => {
                tracing::error!(bdf = self.container.bdf, unmapped, len, "not fully unmapped");
            }
            Err(error) => tracing::error!(bdf = self.container.bdf, %error, "cannot unmap"),
        }
    }
}
