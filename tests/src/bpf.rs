//! A program in the kernel that draws the queue by which a frame goes on.
//!
//! Source: RFC 9669 (BPF instruction set); Linux, include/uapi/linux/bpf.h.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

const PROG_LOAD: libc::c_int = 5;
const LINK_CREATE: libc::c_int = 28;
const PROG_TYPE_SCHED_CLS: u32 = 3;
const ATTACH_TCX_INGRESS: u32 = 46;

/// Frames that arrive at an interface of this thread's namespace, and are passed on by another with
/// `queues` queues (a power of two), leave there by one that is drawn; until the descriptor is
/// closed.
pub(super) fn draw_queues(interface: &str, queues: u32) -> io::Result<OwnedFd> {
    let name = std::ffi::CString::new(interface)?;
    // SAFETY: reads a string that lives.
    let index = unsafe { libc::if_nametoindex(name.as_ptr()) };
    let program = load(queues)?;
    let attr = [program.as_raw_fd() as u32, index, ATTACH_TCX_INGRESS, 0];
    // SAFETY: the attributes of a link, without pointers.
    unsafe { bpf(LINK_CREATE, &attr) }
}

fn load(queues: u32) -> io::Result<OwnedFd> {
    let insn = |code: u8, registers: u8, offset: u16, number: u32| {
        u64::from(code)
            | u64::from(registers) << 8
            | u64::from(offset) << 16
            | u64::from(number) << 32
    };
    let program = [
        insn(0xbf, 0x16, 0, 0),          // r6 = r1, the frame
        insn(0x85, 0, 0, 7),             // r0 = bpf_get_prandom_u32()
        insn(0x57, 0x00, 0, queues - 1), // r0 &= queues - 1
        insn(0x07, 0x00, 0, 1),          // r0 += 1: as if it had come by queue r0 - 1
        insn(0x63, 0x06, 12, 0),         // frame.queue_mapping = r0
        insn(0xb7, 0x00, 0, u32::MAX),   // r0 = TCX_NEXT
        insn(0x95, 0, 0, 0),             // return r0
    ];
    #[repr(C)]
    struct Attr {
        prog_type: u32,
        insn_cnt: u32,
        insns: u64,
        license: u64,
    }
    let attr = Attr {
        prog_type: PROG_TYPE_SCHED_CLS,
        insn_cnt: program.len() as u32,
        insns: program.as_ptr() as u64,
        license: c"Dual MIT/GPL".as_ptr() as u64,
    };
    // SAFETY: an array of as many instructions as it says and a string, which live across the call.
    unsafe { bpf(PROG_LOAD, &attr) }
}

/// # Safety
/// `T` begins as the command's part of `union bpf_attr` does, and what it points to is as long as
/// it says across the call.
unsafe fn bpf<T>(command: libc::c_int, attr: &T) -> io::Result<OwnedFd> {
    let at = std::ptr::from_ref(attr);
    // SAFETY: the kernel reads as many bytes as `attr` has, and behind its pointers what the caller
    // promises.
    let fd = unsafe { libc::syscall(libc::SYS_bpf, command, at, size_of::<T>()) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel has just made it for us.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}
