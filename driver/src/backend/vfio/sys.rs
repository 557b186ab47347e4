//! VFIO ioctls, one function each, errors with their errno.
//!
//! Not the crate `vfio-ioctls`, which does not report failed region reads, a missing reset or the
//! IOVA ranges, cannot map read-only, and panics when an unplugged device is dropped. The
//! structures are those of `vfio-bindings`.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, RawFd};

use vfio_bindings::bindings::vfio;

/// `_IO(';', 100 + n)`: these calls carry no size in their number.
const fn number(n: libc::c_ulong) -> libc::c_ulong {
    0x3b64 + n
}

/// Calls `ioctl` with a plain argument.
fn call(file: &File, n: libc::c_ulong, arg: libc::c_ulong) -> io::Result<libc::c_int> {
    // SAFETY: the callers below pass numbers whose argument the kernel takes by value.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), number(n), arg) })
}

/// Calls `ioctl` with a structure that the kernel reads and may write.
fn call_with<T>(file: &File, n: libc::c_ulong, arg: &mut T) -> io::Result<libc::c_int> {
    // SAFETY: the callers below pass numbers together with the structure that the kernel expects,
    // whose `argsz`, where there is one, is at most the size of what `arg` borrows.
    checked(unsafe { libc::ioctl(file.as_raw_fd(), number(n), std::ptr::from_mut(arg)) })
}

fn checked(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// `VFIO_GET_API_VERSION`.
pub(super) fn api_version(container: &File) -> io::Result<i32> {
    call(container, 0, 0)
}

/// `VFIO_CHECK_EXTENSION`: whether the type 1 v2 IOMMU, which unmaps exact ranges, is supported.
pub(super) fn has_type1v2(container: &File) -> io::Result<bool> {
    Ok(call(container, 1, vfio::VFIO_TYPE1v2_IOMMU.into())? > 0)
}

/// `VFIO_SET_IOMMU`.
pub(super) fn set_iommu(container: &File) -> io::Result<()> {
    call(container, 2, vfio::VFIO_TYPE1v2_IOMMU.into()).map(drop)
}

/// `VFIO_GROUP_GET_STATUS`: whether all devices of the group are bound to VFIO or to no driver.
pub(super) fn is_viable(group: &File) -> io::Result<bool> {
    let mut status = vfio::vfio_group_status { argsz: 8, flags: 0 };
    call_with(group, 3, &mut status)?;
    Ok(status.flags & vfio::VFIO_GROUP_FLAGS_VIABLE != 0)
}

/// `VFIO_GROUP_SET_CONTAINER`.
pub(super) fn set_container(group: &File, container: &File) -> io::Result<()> {
    let mut fd: RawFd = container.as_raw_fd();
    call_with(group, 4, &mut fd).map(drop)
}

/// `VFIO_GROUP_GET_DEVICE_FD`.
pub(super) fn device(group: &File, bdf: &CStr) -> io::Result<File> {
    // SAFETY: the kernel reads a string that ends in 0.
    let fd = checked(unsafe { libc::ioctl(group.as_raw_fd(), number(6), bdf.as_ptr()) })?;
    // SAFETY: a fresh descriptor that nobody else owns.
    Ok(unsafe { File::from_raw_fd(fd) })
}

/// `VFIO_DEVICE_GET_INFO`: whether the device supports `VFIO_DEVICE_RESET`.
pub(super) fn can_reset(device: &File) -> io::Result<bool> {
    let mut info = vfio::vfio_device_info { argsz: 16, ..Default::default() };
    call_with(device, 7, &mut info)?;
    Ok(info.flags & vfio::VFIO_DEVICE_FLAGS_RESET != 0)
}

/// A region of the device's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Region {
    /// Offset in the file.
    pub(super) offset: u64,
    /// Length in bytes; 0 if the device does not have the region.
    pub(super) len: u64,
    /// The whole region can be mapped.
    pub(super) can_map: bool,
}

/// `VFIO_DEVICE_GET_REGION_INFO`.
pub(super) fn region(device: &File, index: u32) -> io::Result<Region> {
    let mut info = vfio::vfio_region_info { argsz: 32, index, ..Default::default() };
    call_with(device, 8, &mut info)?;
    let can_map = info.flags & vfio::VFIO_REGION_INFO_FLAG_MMAP != 0;
    Ok(Region { offset: info.offset, len: info.size, can_map })
}

/// `VFIO_DEVICE_GET_IRQ_INFO`: number of interrupts at `index`.
pub(super) fn irq_count(device: &File, index: u32) -> io::Result<u32> {
    let mut info = vfio::vfio_irq_info { argsz: 16, index, ..Default::default() };
    call_with(device, 9, &mut info)?;
    Ok(info.count)
}

/// `VFIO_DEVICE_SET_IRQS`: interrupt 0 of `index` signals `eventfd`; `None` disables all at
/// `index`.
pub(super) fn set_irq(device: &File, index: u32, eventfd: Option<RawFd>) -> io::Result<()> {
    let data = match eventfd {
        Some(_) => vfio::VFIO_IRQ_SET_DATA_EVENTFD,
        None => vfio::VFIO_IRQ_SET_DATA_NONE,
    };
    // DATA_NONE with count 0 disables all interrupts of this index.
    let count = u32::from(eventfd.is_some());
    irqs(device, data | vfio::VFIO_IRQ_SET_ACTION_TRIGGER, index, count, eventfd.unwrap_or(-1))
}

/// `VFIO_DEVICE_SET_IRQS`: unmasks INTx, which the kernel masked when it signalled.
pub(super) fn unmask_line(device: &File) -> io::Result<()> {
    let flags = vfio::VFIO_IRQ_SET_DATA_NONE | vfio::VFIO_IRQ_SET_ACTION_UNMASK;
    irqs(device, flags, vfio::VFIO_PCI_INTX_IRQ_INDEX, 1, -1)
}

fn irqs(device: &File, flags: u32, index: u32, count: u32, eventfd: RawFd) -> io::Result<()> {
    // `struct vfio_irq_set` with one file descriptor as its data.
    #[repr(C)]
    struct Irqs {
        argsz: u32,
        flags: u32,
        index: u32,
        start: u32,
        count: u32,
        eventfd: i32,
    }
    let argsz = size_of::<Irqs>() as u32;
    let mut irqs = Irqs { argsz, flags, index, start: 0, count, eventfd };
    call_with(device, 10, &mut irqs).map(drop)
}

/// `VFIO_DEVICE_RESET`.
pub(super) fn reset(device: &File) -> io::Result<()> {
    call(device, 11, 0).map(drop)
}

/// Limits of an IOMMU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct IommuInfo {
    /// One bit per page size.
    pub(super) page_lens: u64,
    /// First and last address of each usable range.
    pub(super) ranges: Vec<(u64, u64)>,
    /// Mappings that are still available, if the kernel says.
    pub(super) maps_left: Option<u32>,
}

/// `VFIO_IOMMU_GET_INFO`.
pub(super) fn iommu_info(container: &File) -> io::Result<IommuInfo> {
    // The structure, then a chain of capabilities; a page is more than any kernel returns.
    #[repr(C, align(8))]
    struct Info([u8; 4096]);
    let mut info = Info([0; 4096]);
    info.0[..4].copy_from_slice(&4096_u32.to_ne_bytes());
    call_with(container, 12, &mut info)?;
    Ok(parse_iommu_info(&info.0))
}

/// Reads `struct vfio_iommu_type1_info` and the capabilities behind it. What does not fit is left
/// out.
fn parse_iommu_info(bytes: &[u8]) -> IommuInfo {
    let half = |at: usize| bytes.get(at..at + 2).map(|b| u16::from_ne_bytes([b[0], b[1]]));
    let word = |at: usize| {
        let bytes = bytes.get(at..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*bytes))
    };
    let long = |at: usize| {
        let bytes = bytes.get(at..)?.first_chunk()?;
        Some(u64::from_ne_bytes(*bytes))
    };
    let mut info = IommuInfo { page_lens: long(8).unwrap_or(0), ..IommuInfo::default() };
    let has_caps = word(4).is_some_and(|flags| flags & vfio::VFIO_IOMMU_INFO_CAPS != 0);
    let mut at = if has_caps { word(16).unwrap_or(0) as usize } else { 0 };
    // Only growing offsets are followed, so that a cyclic chain ends.
    while at != 0 {
        match half(at).map(u32::from) {
            Some(vfio::VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE) => {
                let count = word(at + 8).unwrap_or(0) as usize;
                let range = |i: usize| Some((long(at + 16 + 16 * i)?, long(at + 24 + 16 * i)?));
                info.ranges.extend((0..count.min(256)).map_while(range));
            }
            // VFIO_IOMMU_TYPE1_INFO_DMA_AVAIL
            Some(3) => info.maps_left = word(at + 8),
            _ => {}
        }
        let next = word(at + 4).unwrap_or(0) as usize;
        at = if next > at { next } else { 0 };
    }
    info
}

/// The device's access to mapped memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    ReadWrite,
}

/// `VFIO_IOMMU_MAP_DMA`.
///
/// # Safety
/// `len` bytes at `base` stay mapped in this process until they are unmapped here, and the device
/// is given no addresses of memory that other code relies on.
pub(super) unsafe fn map_dma(
    container: &File,
    base: *mut u8,
    len: u64,
    iova: u64,
    access: Access,
) -> io::Result<()> {
    let flags = match access {
        Access::Read => vfio::VFIO_DMA_MAP_FLAG_READ,
        Access::ReadWrite => vfio::VFIO_DMA_MAP_FLAG_READ | vfio::VFIO_DMA_MAP_FLAG_WRITE,
    };
    let mut map =
        vfio::vfio_iommu_type1_dma_map { argsz: 32, flags, vaddr: base as u64, iova, size: len };
    call_with(container, 13, &mut map).map(drop)
}

/// `VFIO_IOMMU_UNMAP_DMA`; returns the number of unmapped bytes.
pub(super) fn unmap_dma(container: &File, iova: u64, len: u64) -> io::Result<u64> {
    unmap(container, 0, iova, len)
}

/// Unmaps all mappings of a container without the knowledge of their owners, for tests of the
/// IOMMU.
///
/// # Errors
/// The kernel refused.
pub fn unmap_all(container: &File) -> io::Result<u64> {
    unmap(container, vfio::VFIO_DMA_UNMAP_FLAG_ALL, 0, 0)
}

fn unmap(container: &File, flags: u32, iova: u64, len: u64) -> io::Result<u64> {
    // Without its last member, an array that ends it.
    #[repr(C)]
    struct Unmap {
        argsz: u32,
        flags: u32,
        iova: u64,
        size: u64,
    }
    let mut unmap = Unmap { argsz: size_of::<Unmap>() as u32, flags, iova, size: len };
    call_with(container, 14, &mut unmap)?;
    Ok(unmap.size)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `struct vfio_iommu_type1_info` with the two capabilities that are read, chained by `next`.
    fn info(next: u32) -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut word = |w: u32| bytes.extend_from_slice(&w.to_ne_bytes());
        for w in [4096, 3, 0x4020_1000, 0, 24, 0] {
            word(w);
        }
        // At 24: two ranges. At 72: mappings left.
        for w in [1 | 1 << 16, 72, 2, 0, 0, 0, 0xfedf_ffff, 0, 0xfef0_0000, 0, u32::MAX, 0x7f] {
            word(w);
        }
        for w in [3 | 1 << 16, next, 65_535, 0] {
            word(w);
        }
        bytes
    }

    #[test]
    fn ranges_and_counts_are_found_in_the_chain() {
        let expected = IommuInfo {
            page_lens: 0x4020_1000,
            ranges: vec![(0, 0xfedf_ffff), (0xfef0_0000, (1 << 39) - 1)],
            maps_left: Some(65_535),
        };
        assert_eq!(parse_iommu_info(&info(0)), expected);
        // A chain that leads back is read once.
        assert_eq!(parse_iommu_info(&info(24)), expected);
    }

    #[test]
    fn no_prefix_and_no_flipped_byte_breaks_the_reader() {
        let good = info(0);
        for len in 0..good.len() {
            parse_iommu_info(&good[..len]);
        }
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0xff;
            parse_iommu_info(&bad);
        }
    }
}
