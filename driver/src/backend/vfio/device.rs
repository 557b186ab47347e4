//! A PCI device taken through VFIO: container, group, device, its registers, and the memory that
//! it may reach.
//!
//! One container per device, which holds the addresses of that device and nothing else. Everything
//! goes back when it is dropped, in this order: the device is silent (the NIC's driver has seen to
//! that), its memory is unmapped, then device, group and container are closed, on which the kernel
//! switches bus mastering off and resets the device. A process that is killed is cleaned up after
//! by the kernel in the same order, whatever children it has: they keep neither files nor
//! registers.

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

/// Bytes after the Ethernet header, where neither the user nor the device says how many.
const MTU_USUAL: usize = 1500;

/// Bits of the command register in configuration space: memory decoding, bus mastering.
const COMMAND: u64 = 4;
const MEMORY_SPACE: u16 = 1 << 1;
const BUS_MASTER: u16 = 1 << 2;

/// A file of VFIO's, with which the device stays taken. Forked children do not keep it open.
struct Kept(File);

impl From<File> for Kept {
    fn from(file: File) -> Self {
        forget_in_children(file.as_raw_fd());
        Self(file)
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        children_may_keep(self.0.as_raw_fd());
    }
}

impl Deref for Kept {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

/// The IOMMU's side: the addresses that the device can use, and the memory behind them.
pub(super) struct Container {
    file: Kept,
    bdf: String,
    page_len: u64,
    space: Mutex<IovaSpace>,
    /// Mappings that may be made in all.
    maps_max: u32,
    maps: Mutex<u32>,
}

/// A device that is ours.
pub(super) struct Device {
    pub(super) bdf: String,
    file: Kept,
    config: Region,
    /// Readable when somebody wants the device back (unbinding, unplugging).
    request: Option<Arc<EventFd>>,
    container: Arc<Container>,
    /// Closed after the device and before the container.
    _group: Kept,
    /// Forked children leave the device alone.
    owner: u32,
}

impl Device {
    /// Takes the device of this PCI address.
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
        let file = Kept::from(open_container(&bdf)?);
        let group = Kept::from(open_group(&bdf, group_id)?);
        if !sys::is_viable(&group).map_err(os("VFIO_GROUP_GET_STATUS"))? {
            let others = survey::in_the_way(&dir);
            return Err(VfioError::NotViable { bdf, group: group_id, others });
        }
        sys::set_container(&group, &file).map_err(os("VFIO_GROUP_SET_CONTAINER"))?;
        sys::set_iommu(&file).map_err(|source| match source.raw_os_error() {
            Some(libc::EPERM) => VfioError::NoRemapping { bdf: bdf.clone() },
            _ => os("VFIO_SET_IOMMU")(source),
        })?;
        let name = CString::new(bdf.as_str()).expect("an address has no zero byte");
        let device = sys::device(&group, &name).map_err(os("VFIO_GROUP_GET_DEVICE_FD"))?;
        let device = Kept::from(device);
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
        let request = request_of(&device).map(Arc::new);
        let owner = std::process::id();
        Ok(Self { bdf, file: device, config, request, container, _group: group, owner })
    }

    /// The IOMMU's side.
    pub(super) fn container(&self) -> &Arc<Container> {
        &self.container
    }

    /// Whether we are the process that opened the device.
    pub(super) fn is_ours(&self) -> bool {
        self.owner == std::process::id()
    }

    /// An error of this device.
    pub(super) fn fault(&self, why: impl Into<String>) -> VfioError {
        VfioError::Device { bdf: self.bdf.clone(), why: why.into() }
    }

    /// This device cannot do what an option asks for. `why` says what to write instead.
    pub(super) fn cannot(&self, why: impl Into<String>) -> VfioError {
        VfioError::Option { bdf: self.bdf.clone(), why: why.into() }
    }

    /// The address of the port: what was asked for, or the device's own, if that is a station's.
    ///
    /// # Errors
    /// It is not.
    pub(super) fn mac(&self, asked: Option<MacAddr>, own: MacAddr) -> Result<MacAddr, VfioError> {
        let mac = asked.or(Some(own).filter(|own| own.is_single()));
        mac.ok_or_else(|| self.cannot("it has no address; give it one with mac="))
    }

    /// The MTU of the port: what was asked for, or the usual one, of those that it carries.
    ///
    /// # Errors
    /// It carries `most`, and not what was asked for.
    pub(super) fn mtu(&self, asked: Option<usize>, most: usize) -> Result<usize, VfioError> {
        let mtu = asked.unwrap_or(MTU_USUAL.min(most));
        if mtu > most {
            return Err(
                self.cannot(format!("it carries no MTU of {mtu}; write mtu={most} or less"))
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
    /// It does not have these bytes, or the device is gone.
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

    /// Lets the device reach memory, or no more.
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
    /// There are none, or they cannot be mapped.
    pub(super) fn bar(&self, index: u8) -> Result<Bar, VfioError> {
        let region = sys::region(&self.file, index.into())
            .map_err(|source| self.os("VFIO_DEVICE_GET_REGION_INFO", source))?;
        let len = usize::try_from(region.len).unwrap_or(0);
        if index > 5 || len == 0 || !region.can_map {
            return Err(self.fault(format!("its BAR {index} cannot be mapped")));
        }
        let map = MmapOptions::new().offset(region.offset).len(len).map_raw(&*self.file);
        let map = map.and_then(UnforkedMap::new);
        let map = map.map_err(|source| self.os("cannot map its registers", source))?;
        Ok(Bar { map: Arc::new(map), len })
    }

    /// The device's first interrupt of the kind `index`, if it has such a one. Polling needs none,
    /// sleeping does.
    pub(super) fn interrupt(&self, index: u32) -> Option<Interrupt> {
        let is_line = index == vfio::VFIO_PCI_INTX_IRQ_INDEX;
        Some(Interrupt { event: signalled(&self.file, index)?, is_line })
    }

    /// Lets an interrupt signal again, after its cause has been taken back. The kernel masks a
    /// line, which devices may share, each time that it signals; messages need nothing.
    pub(super) fn unmask(&self, interrupt: &Interrupt) {
        // A device that is gone is noticed when its state is looked at.
        if interrupt.is_line
            && let Err(error) = sys::unmask_line(&self.file)
        {
            tracing::debug!(bdf = self.bdf, %error, "its interrupt stays masked");
        }
    }

    /// Resets the device (FLR where it has it), which ends every transfer.
    ///
    /// # Errors
    /// It has no reset, or the kernel failed to.
    pub(super) fn reset(&self) -> Result<(), VfioError> {
        match sys::can_reset(&self.file) {
            Ok(true) => sys::reset(&self.file).map_err(|source| self.os("cannot reset", source)),
            Ok(false) => Err(self.fault("it has no reset")),
            Err(source) => Err(self.os("VFIO_DEVICE_GET_INFO", source)),
        }
    }

    /// What becomes readable when somebody wants the device back.
    pub(super) fn request(&self) -> Option<Arc<EventFd>> {
        self.request.clone()
    }

    /// What is wrong with the device as the bus sees it, if anything is.
    pub(super) fn trouble(&self) -> Option<String> {
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
        if self.is_ours() {
            // Closing does as much; this way nothing is on its way when the memory goes.
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

/// Asks to be told when somebody wants the device back. A kernel that cannot tell makes whoever
/// unbinds the device wait.
fn request_of(device: &File) -> Option<EventFd> {
    signalled(device, vfio::VFIO_PCI_REQ_IRQ_INDEX)
}

/// An event that interrupt 0 of the kind `index` signals.
fn signalled(device: &File, index: u32) -> Option<EventFd> {
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
    /// What it signals.
    pub(super) event: EventFd,
    /// It is a line (INTx) and not a message.
    is_line: bool,
}

/// Whether `is` becomes true within `patience`.
pub(super) fn becomes(patience: Duration, mut is: impl FnMut() -> bool) -> bool {
    let until = Instant::now() + patience;
    while !is() {
        if Instant::now() > until {
            return false;
        }
        std::thread::yield_now();
    }
    true
}

/// Registers of a device. Every access is checked against the length and reaches the device.
#[derive(Clone)]
pub(super) struct Bar {
    map: Arc<UnforkedMap>,
    len: usize,
}

/// Words of 32 bits by their offset: registers, or a model of them.
pub(super) trait Words {
    /// The word at `at`.
    fn read(&self, at: usize) -> u32;
    /// Writes the word at `at`.
    fn write(&self, at: usize, value: u32);
}

impl Words for Bar {
    fn read(&self, at: usize) -> u32 {
        self.read32(at)
    }

    fn write(&self, at: usize, value: u32) {
        self.write32(at, value);
    }
}

impl Bar {
    /// Bytes there are.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    fn at<T>(&self, at: usize) -> *mut T {
        let len = size_of::<T>();
        assert!(at.is_multiple_of(len) && at <= self.len && len <= self.len - at, "no register");
        self.map.as_mut_ptr().wrapping_add(at).cast()
    }

    /// The register at `at` as one that is written after what it lets the device read.
    pub(super) fn tail(&self, at: usize) -> Tail {
        Tail { register: self.register(at), _map: Arc::clone(&self.map) }
    }

    /// Where a register of 16 or 32 bits lies, for one that is written often. The mapping lasts as
    /// long as a clone of this.
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
        // SAFETY: inside the mapping and aligned (`at`); what the device does to memory because of
        // it is bounded by the IOMMU to what is mapped.
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

    /// Two halves, the lower one first, as virtio wants it.
    pub(super) fn write64(&self, at: usize, value: u64) {
        self.write32(at, value as u32);
        self.write32(at + 4, (value >> 32) as u32);
    }
}

/// A register of 32 bits that tells the device how far a ring is filled.
pub(super) struct Tail {
    register: NonNull<u32>,
    /// Keeps the register mapped.
    _map: Arc<UnforkedMap>,
}

// SAFETY: a register, which any thread may write; it stays mapped.
unsafe impl Send for Tail {}

impl Tail {
    /// Writes it, after everything that it lets the device read.
    #[inline]
    pub(super) fn set(&self, tail: u32) {
        fence(Release);
        // SAFETY: a register of the mapping that is kept beside it.
        unsafe { self.register.as_ptr().write_volatile(tail.to_le()) }
    }
}

/// Zeroed memory of ours that the device reaches, from hugepages if there are any. Unmapped, as
/// exactly as it was mapped, when dropped; by then the device must be silent.
pub(super) struct DmaArea {
    block: Block,
    iova: u64,
    container: Arc<Container>,
    owner: u32,
}

impl Container {
    /// Makes `len` bytes that the device may reach as `access` says.
    ///
    /// # Errors
    /// There is no memory, no address, no mapping left, or it may not be locked.
    pub(super) fn area(
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
        // Whole pages of the arena, so that nothing of ours shares one with the device.
        let len = arena.len();
        let block = arena.block(len).expect("a new arena is one free piece");
        let align = (arena.page_len() as u64).max(self.page_len);
        let no_room = || failed("no address left", io::Error::from_raw_os_error(libc::ENOSPC));
        let mut maps = self.maps.lock().unwrap_or_else(PoisonError::into_inner);
        if *maps >= self.maps_max {
            return Err(no_room());
        }
        let mut space = self.space.lock().unwrap_or_else(PoisonError::into_inner);
        let iova = space.take(len as u64, align).ok_or_else(no_room)?;
        // SAFETY: the block is ours alone and stays mapped until the area is dropped, which unmaps
        // it first; the arena has nothing else in its pages.
        let mapped =
            unsafe { sys::map_dma(&self.file, block.as_mut_ptr(), len as u64, iova, access) };
        if let Err(source) = mapped {
            space.put(iova, len as u64);
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

/// Bytes that this process may lock.
fn memlock() -> Option<u64> {
    Some(getrlimit(Resource::RLIMIT_MEMLOCK).ok()?.0)
}

impl DmaArea {
    /// Bytes there are, at least as many as were asked for.
    pub(super) fn len(&self) -> usize {
        self.block.len()
    }

    /// The first byte, for us.
    pub(super) fn base(&self) -> NonNull<u8> {
        NonNull::new(self.block.as_mut_ptr()).expect("a mapping is not at 0")
    }

    /// The first byte, for the device.
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
                space.lock().unwrap_or_else(PoisonError::into_inner).put(self.iova, len);
                *self.container.maps.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
            }
            // The address is never given out again.
            Ok(unmapped) => {
                tracing::error!(bdf = self.container.bdf, unmapped, len, "not fully unmapped");
            }
            Err(error) => tracing::error!(bdf = self.container.bdf, %error, "cannot unmap"),
        }
    }
}
