//! The XDP programs of an interface, which run on each frame before the kernel's stack.
//!
//! The interface has one program, which tail-calls that of the frame's receive queue
//! (`dispatcher`); each port has a program for its queues. Frames of the fabric's EtherType to the
//! port's station or to a group (or datagrams to its address and UDP port) are redirected to the
//! socket of the queue. All other frames, and all frames while no socket is bound, are passed on as
//! without a program. A program reads only bytes whose presence it has checked. A port without all
//! queues leaves groups to the kernel too, since each port is to receive them (`stack_rx`).
//!
//! Source: RFC 9669 (BPF instruction set); Linux, `struct xdp_md`, bpf-helpers(7).

use std::net::SocketAddr;
use std::os::fd::RawFd;

use super::super::vlan::{ETHERTYPE_VLAN, TAG_LEN, VLAN_ID};
use crate::frame::{DST_NUMBER_AT, FRAME_MIN};
use crate::port::{MacAddr, Station};

/// One instruction: code, registers, offset, number.
pub(super) type Insn = [u8; 8];

/// Return value of a program: pass the frame to the kernel's stack.
pub(super) const XDP_PASS: u32 = 2;

// Codes: class, size or operation, mode or source.
const LOAD_B: u8 = 0x71;
const LOAD_H: u8 = 0x69;
const LOAD_W: u8 = 0x61;
const LOAD_IMM64: u8 = 0x18;
const MOV: u8 = 0xbf;
const MOV_IMM: u8 = 0xb7;
const ADD_IMM: u8 = 0x07;
const AND_IMM: u8 = 0x57;
const JUMP_GREATER: u8 = 0x2d;
const JUMP_NOT_IMM: u8 = 0x55;
const JUMP_SET_IMM: u8 = 0x45;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// Instead of a source register: the immediate is the descriptor of a map.
const MAP_FD: u8 = 1;
/// `bpf_redirect_map`, whose third argument is what is returned if the map has no such entry.
const REDIRECT_MAP: i32 = 51;
/// `bpf_tail_call`, which returns only if the map has no such entry.
const TAIL_CALL: i32 = 12;

/// Where the headers of UDP over IPv6 end.
const UDP6_END: usize = 62;

/// RingOffsets in `struct xdp_md`.
const DATA: i16 = 0;
const DATA_END: i16 = 4;
const RX_QUEUE: i16 = 16;

fn insn(code: u8, dst: u8, src: u8, offset: i16, number: i32) -> Insn {
    let registers = if cfg!(target_endian = "little") { src << 4 | dst } else { dst << 4 | src };
    let ([a, b], [c, d, e, f]) = (offset.to_ne_bytes(), number.to_ne_bytes());
    [code, registers, a, b, c, d, e, f]
}

/// A condition that a frame has to meet, by offset.
#[derive(Clone, Copy)]
enum Check {
    /// Two bytes equal these.
    Half(i16, [u8; 2]),
    /// Two bytes, under the mask, equal these.
    Masked(i16, [u8; 2], [u8; 2]),
    /// A byte equals this.
    Byte(i16, u8),
    /// None of these bits is set in two bytes.
    Clear(i16, u16),
    /// A multicast destination accepts the frame without further checks.
    Group,
}

/// The checks of frames of `ethertype` to `station` and, with `groups`, to groups; without
/// `station` to any. The number [`Station::EVERY`] is any number.
fn station_checks(ethertype: u16, station: Option<Station>, groups: bool) -> Vec<Check> {
    let mut checks = vec![Check::Half(12, ethertype.to_be_bytes())];
    if let Some(Station { mac: MacAddr([a, b, c, d, e, f]), number }) = station {
        let mac = [Check::Half(0, [a, b]), Check::Half(2, [c, d]), Check::Half(4, [e, f])];
        checks.extend(groups.then_some(Check::Group));
        checks.extend(mac);
        if number != Station::EVERY {
            checks.push(Check::Half(DST_NUMBER_AT as i16, number.to_le_bytes()));
        }
    }
    checks
}

/// The checks of UDP datagrams to `udp_addr`, without options, not fragmented.
fn datagram_checks(udp_addr: SocketAddr) -> Vec<Check> {
    let udp_addr = match udp_addr {
        SocketAddr::V4(udp_addr) => udp_addr,
        SocketAddr::V6(udp_addr) => {
            let ip = udp_addr.ip().octets();
            let half = |i: usize| Check::Half(38 + 2 * i as i16, [ip[2 * i], ip[2 * i + 1]]);
            let mut checks = vec![Check::Half(12, 0x86dd_u16.to_be_bytes()), Check::Byte(20, 17)];
            checks.extend((0..8).map(half));
            checks.push(Check::Half(56, udp_addr.port().to_be_bytes()));
            return checks;
        }
    };
    let [a, b, c, d] = udp_addr.ip().octets();
    vec![
        Check::Half(12, 0x0800_u16.to_be_bytes()),
        Check::Byte(14, 0x45),
        Check::Clear(20, 0x3fff),
        Check::Byte(23, 17),
        Check::Half(30, [a, b]),
        Check::Half(32, [c, d]),
        Check::Half(36, udp_addr.port().to_be_bytes()),
    ]
}

impl Check {
    /// The same check with a VLAN tag after the MACs.
    fn shifted_by_tag(self) -> Self {
        let moved = |at: i16| if at < 12 { at } else { at + TAG_LEN as i16 };
        match self {
            Self::Half(at, bytes) => Self::Half(moved(at), bytes),
            Self::Masked(at, mask, bytes) => Self::Masked(moved(at), mask, bytes),
            Self::Byte(at, byte) => Self::Byte(moved(at), byte),
            Self::Clear(at, bits) => Self::Clear(moved(at), bits),
            Self::Group => Self::Group,
        }
    }

    /// Number of instructions.
    fn len(self) -> usize {
        if matches!(self, Self::Masked(..)) { 3 } else { 2 }
    }
}

/// The same checks for frames with the tag of VLAN `id`.
fn tagged_checks(id: u16, checks: Vec<Check>) -> Vec<Check> {
    let tag = [
        Check::Half(12, ETHERTYPE_VLAN.to_be_bytes()),
        Check::Masked(14, VLAN_ID.to_be_bytes(), id.to_be_bytes()),
    ];
    tag.into_iter().chain(checks.into_iter().map(Check::shifted_by_tag)).collect()
}

/// Frames that a program redirects.
#[derive(Clone, Copy, Debug)]
pub(super) enum Match {
    /// Frames of the EtherType to the station, or to any; the flag: also to groups.
    Frames(u16, Option<Station>, bool),
    /// Datagrams to the address and UDP port.
    Datagrams(SocketAddr),
}

/// The program of an interface: tail-calls that of the frame's queue in the map `programs`, and
/// passes the frame to the kernel if there is none.
pub(super) fn dispatcher(programs: RawFd) -> Vec<Insn> {
    vec![
        insn(LOAD_W, 3, 1, RX_QUEUE, 0),
        insn(LOAD_IMM64, 2, MAP_FD, 0, programs),
        insn(0, 0, 0, 0, 0), // the upper half of the number
        insn(CALL, 0, 0, 0, TAIL_CALL),
        insn(MOV_IMM, 0, 0, 0, XDP_PASS as i32),
        insn(EXIT, 0, 0, 0, 0),
    ]
}

/// The program of a queue, which redirects matching frames to the sockets in `map`: with the tag of
/// `vlan`, or untagged ones.
pub(super) fn queue_program(map: RawFd, matched: Match, vlan: Option<u16>) -> Vec<Insn> {
    let checks = match matched {
        Match::Frames(ethertype, station, groups) => station_checks(ethertype, station, groups),
        Match::Datagrams(udp_addr) => datagram_checks(udp_addr),
    };
    let checked_len = match matched {
        Match::Datagrams(SocketAddr::V6(_)) => UDP6_END,
        _ => FRAME_MIN,
    };
    let (checks, checked_len) = match vlan {
        Some(id) => (tagged_checks(id, checks), checked_len + TAG_LEN),
        None => (checks, checked_len),
    };
    let mut program = vec![
        insn(LOAD_W, 2, 1, DATA, 0),
        insn(LOAD_W, 3, 1, DATA_END, 0),
        insn(MOV, 4, 2, 0, 0),
        insn(ADD_IMM, 4, 0, 0, checked_len as i32),
    ];
    // Offsets of the instructions that redirect a frame, and of those that pass it on.
    let ours = program.len() + 1 + checks.iter().map(|check| check.len()).sum::<usize>();
    let others = ours + 6;
    let to = |target: usize, at: usize| (target - at - 1) as i16;
    let half = |bytes: [u8; 2]| i32::from(u16::from_ne_bytes(bytes));
    program.push(insn(JUMP_GREATER, 4, 3, to(others, program.len()), 0));
    for check in checks {
        let (load, at) = match check {
            Check::Half(at, _) | Check::Clear(at, _) | Check::Masked(at, ..) => (LOAD_H, at),
            Check::Byte(at, _) => (LOAD_B, at),
            Check::Group => (LOAD_B, 0),
        };
        program.push(insn(load, 4, 2, at, 0));
        if let Check::Masked(_, mask, _) = check {
            program.push(insn(AND_IMM, 4, 0, 0, half(mask)));
        }
        let (jump, target, number) = match check {
            Check::Half(_, bytes) | Check::Masked(_, _, bytes) => {
                (JUMP_NOT_IMM, others, half(bytes))
            }
            Check::Byte(_, byte) => (JUMP_NOT_IMM, others, byte.into()),
            Check::Clear(_, bits) => (JUMP_SET_IMM, others, half(bits.to_be_bytes())),
            Check::Group => (JUMP_SET_IMM, ours, 1),
        };
        program.push(insn(jump, 4, 0, to(target, program.len()), number));
    }
    assert_eq!(program.len(), ours);
    program.extend([
        insn(LOAD_W, 2, 1, RX_QUEUE, 0),
        insn(LOAD_IMM64, 1, MAP_FD, 0, map),
        insn(0, 0, 0, 0, 0), // the upper half of the number
        insn(MOV_IMM, 3, 0, 0, XDP_PASS as i32),
        insn(CALL, 0, 0, 0, REDIRECT_MAP),
        insn(EXIT, 0, 0, 0, 0),
    ]);
    assert_eq!(program.len(), others);
    program.extend([insn(MOV_IMM, 0, 0, 0, XDP_PASS as i32), insn(EXIT, 0, 0, 0, 0)]);
    program
}
