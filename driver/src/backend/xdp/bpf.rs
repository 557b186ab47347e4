//! bpf(2): maps of sockets and of programs, programs, and their links to an interface.
//!
//! Each object lives as long as its descriptors: it ends with the last process that has it open,
//! an attached program with its link.
//!
//! Source: Linux, include/uapi/linux/bpf.h.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use super::super::lock::NotInChildren;
use super::super::owned;
use super::program::Insn;

const MAP_CREATE: libc::c_int = 0;
const MAP_UPDATE_ELEM: libc::c_int = 2;
const PROG_LOAD: libc::c_int = 5;
#[cfg(test)]
const PROG_TEST_RUN: libc::c_int = 10;
const LINK_CREATE: libc::c_int = 28;

const MAP_TYPE_PROG_ARRAY: u32 = 3;
const MAP_TYPE_XSKMAP: u32 = 17;
const PROG_TYPE_XDP: u32 = 6;
const ATTACH_XDP: u32 = 37;
/// The program supports frames in several buffers: it reads the first bytes only.
const XDP_HAS_FRAGS: u32 = 1 << 5;

/// Calls bpf(2) with what the command reads, and for some writes.
///
/// # Safety
/// `T` begins as the command's part of `union bpf_attr` does, and what it points to is as long as
/// it says across the call.
unsafe fn bpf<T>(command: libc::c_int, attr: &mut T) -> io::Result<libc::c_int> {
    let at = std::ptr::from_mut(attr);
    // SAFETY: the kernel reads and writes at most as many bytes as `attr` has, and behind its
    // pointers what the caller promises.
    let done = unsafe { libc::syscall(libc::SYS_bpf, command, at, size_of::<T>()) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(done as libc::c_int) }
}

/// At most 15 bytes; the rest is zeros.
fn name(text: &str) -> [u8; 16] {
    std::array::from_fn(|i| text.as_bytes().get(i).copied().filter(|_| i < 15).unwrap_or(0))
}

/// A map from queue numbers below `count` to AF_XDP sockets, empty.
///
/// # Errors
/// `EPERM`: no CAP_NET_ADMIN or CAP_BPF.
pub(super) fn socket_map(count: u32) -> io::Result<OwnedFd> {
    map(MAP_TYPE_XSKMAP, count)
}

/// A map from queue numbers below `count` to programs, empty.
///
/// # Errors
/// As [`socket_map`].
pub(super) fn program_map(count: u32) -> io::Result<OwnedFd> {
    map(MAP_TYPE_PROG_ARRAY, count)
}

/// A map from numbers below `count` to descriptors.
fn map(kind: u32, count: u32) -> io::Result<OwnedFd> {
    #[repr(C)]
    #[derive(Default)]
    struct Attr {
        map_type: u32,
        key_size: u32,
        value_size: u32,
        max_entries: u32,
        map_flags: u32,
        inner_map_fd: u32,
        numa_node: u32,
        map_name: [u8; 16],
    }
    let mut attr = Attr {
        map_type: kind,
        key_size: 4,
        value_size: 4,
        max_entries: count,
        map_name: name("barewire"),
        ..Attr::default()
    };
    // SAFETY: the attributes of a map, without pointers.
    owned(unsafe { bpf(MAP_CREATE, &mut attr) }?)
}

/// Stores `of` as the socket or program of `queue`. A socket leaves the map when it is closed, a
/// program with the map.
///
/// # Errors
/// `E2BIG`: the map ends before that queue.
pub(super) fn put(map: &OwnedFd, queue: u32, of: RawFd) -> io::Result<()> {
    #[repr(C, align(8))]
    #[derive(Default)]
    struct Attr {
        map_fd: u32,
        zero: u32,
        key: u64,
        value: u64,
        flags: u64,
    }
    let value = of as u32;
    let mut attr = Attr {
        map_fd: map.as_raw_fd() as u32,
        key: std::ptr::from_ref(&queue) as u64,
        value: std::ptr::from_ref(&value) as u64,
        ..Attr::default()
    };
    // SAFETY: key and value are four bytes each, as the map was made, and live across the call.
    unsafe { bpf(MAP_UPDATE_ELEM, &mut attr) }.map(drop)
}

/// Loads a program, with support for frames in several buffers if the kernel has it: the interface
/// can then have a longer MTU than fits one buffer.
///
/// # Errors
/// `EPERM`: no CAP_BPF or CAP_NET_ADMIN.
pub(super) fn load(program: &[Insn]) -> io::Result<OwnedFd> {
    match load_with(program, XDP_HAS_FRAGS) {
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => load_with(program, 0),
        loaded => loaded,
    }
}

fn load_with(program: &[Insn], flags: u32) -> io::Result<OwnedFd> {
    #[repr(C, align(8))]
    #[derive(Default)]
    struct Attr {
        prog_type: u32,
        insn_cnt: u32,
        insns: u64,
        license: u64,
        log_level: u32,
        log_size: u32,
        log_buf: u64,
        kern_version: u32,
        prog_flags: u32,
        prog_name: [u8; 16],
        prog_ifindex: u32,
        expected_attach_type: u32,
    }
    let mut attr = Attr {
        prog_type: PROG_TYPE_XDP,
        insn_cnt: program.len() as u32,
        insns: program.as_ptr() as u64,
        license: c"Dual MIT/GPL".as_ptr() as u64,
        prog_flags: flags,
        prog_name: name("barewire"),
        expected_attach_type: ATTACH_XDP,
        ..Attr::default()
    };
    // SAFETY: the program is a slice of as many instructions as it says, the licence a string, and
    // both live across the call.
    owned(unsafe { bpf(PROG_LOAD, &mut attr) }?)
}

/// Where an interface runs a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum XdpMode {
    /// In its driver.
    Native,
    /// In the kernel's stack, on a copy: for drivers that cannot.
    Generic,
}

impl XdpMode {
    /// In words.
    pub(super) fn place(self) -> &'static str {
        match self {
            Self::Native => "the driver",
            Self::Generic => "the kernel's stack",
        }
    }
}

/// Attaches a program to an interface, for as long as the descriptor is open.
///
/// # Errors
/// `EBUSY`, `EEXIST`: one is attached. `EOPNOTSUPP` and others: the driver takes none.
pub(super) fn attach(program: &OwnedFd, index: u32, mode: XdpMode) -> io::Result<NotInChildren> {
    #[repr(C)]
    struct Attr {
        prog_fd: u32,
        target_ifindex: u32,
        attach_type: u32,
        flags: u32,
    }
    let mut attr = Attr {
        prog_fd: program.as_raw_fd() as u32,
        target_ifindex: index,
        attach_type: ATTACH_XDP,
        // XDP_FLAGS_DRV_MODE, XDP_FLAGS_SKB_MODE
        flags: match mode {
            XdpMode::Native => 1 << 2,
            XdpMode::Generic => 1 << 1,
        },
    };
    // SAFETY: the attributes of a link, without pointers.
    Ok(owned(unsafe { bpf(LINK_CREATE, &mut attr) }?)?.into())
}

/// Runs a program on `frame` as if it had arrived on queue 0 of `lo`, and returns its result.
#[cfg(test)]
pub(super) fn run(program: &OwnedFd, frame: &[u8]) -> io::Result<u32> {
    #[repr(C, align(8))]
    #[derive(Default)]
    struct Attr {
        prog_fd: u32,
        retval: u32,
        data_size_in: u32,
        data_size_out: u32,
        data_in: u64,
        data_out: u64,
        repeat: u32,
        duration: u32,
    }
    let mut attr = Attr {
        prog_fd: program.as_raw_fd() as u32,
        data_size_in: frame.len() as u32,
        data_in: frame.as_ptr() as u64,
        repeat: 1,
        ..Attr::default()
    };
    // SAFETY: the frame is a slice that lives across the call; nothing is written out.
    unsafe { bpf(PROG_TEST_RUN, &mut attr) }?;
    Ok(attr.retval)
}
