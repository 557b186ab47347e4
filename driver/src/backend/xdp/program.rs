//! The program that the interface runs on each frame before the kernel's stack sees it.
//!
//! A frame of our EtherType to this station or to a group goes to the socket of the queue that it
//! arrived on; everything else, and everything while no socket is there, goes on as if there were
//! no program. It looks at bytes that it has checked to be there.
//!
//! Source: RFC 9669 (BPF instruction set); Linux, `struct xdp_md`, bpf-helpers(7).

use std::os::fd::RawFd;

use crate::frame::{DST_NUMBER_AT, FRAME_MIN};
use crate::port::{MacAddr, Station};

/// One instruction: code, registers, offset, number.
pub(super) type Insn = [u8; 8];

/// What a program returns: on to the kernel's stack.
pub(super) const XDP_PASS: u32 = 2;

// Codes: class, size or operation, mode or source.
const LOAD_B: u8 = 0x71;
const LOAD_H: u8 = 0x69;
const LOAD_W: u8 = 0x61;
const LOAD_IMM64: u8 = 0x18;
const MOV: u8 = 0xbf;
const MOV_IMM: u8 = 0xb7;
const ADD_IMM: u8 = 0x07;
const JUMP_GREATER: u8 = 0x2d;
const JUMP_NOT_IMM: u8 = 0x55;
const JUMP_SET_IMM: u8 = 0x45;
const CALL: u8 = 0x85;
const EXIT: u8 = 0x95;
/// In the place of a register: the number is the descriptor of a map.
const MAP_FD: u8 = 1;
/// `bpf_redirect_map`, whose third argument is what is returned if the map has no such entry.
const REDIRECT_MAP: i32 = 51;

/// Places in `struct xdp_md`.
const DATA: i16 = 0;
const DATA_END: i16 = 4;
const RX_QUEUE: i16 = 16;

fn insn(code: u8, dst: u8, src: u8, offset: i16, number: i32) -> Insn {
    let registers = if cfg!(target_endian = "little") { src << 4 | dst } else { dst << 4 | src };
    let ([a, b], [c, d, e, f]) = (offset.to_ne_bytes(), number.to_ne_bytes());
    [code, registers, a, b, c, d, e, f]
}

/// Where the instructions for a frame of ours begin, and those for others.
fn places(station: Option<Station>) -> (usize, usize) {
    let ours = match station {
        None => 7,
        Some(Station { number: Station::EVERY, .. }) => 15,
        Some(_) => 17,
    };
    (ours, ours + 6)
}

/// The program that gives frames of `ethertype` to the sockets in `map`: those to `station` and to
/// groups, without `station` those to any. The number [`Station::EVERY`] is any number.
pub(super) fn program(map: RawFd, ethertype: u16, station: Option<Station>) -> Vec<Insn> {
    let (ours, others) = places(station);
    let half = |bytes: [u8; 2]| i32::from(u16::from_ne_bytes(bytes));
    let mut program = vec![
        insn(LOAD_W, 2, 1, DATA, 0),
        insn(LOAD_W, 3, 1, DATA_END, 0),
        insn(MOV, 4, 2, 0, 0),
        insn(ADD_IMM, 4, 0, 0, FRAME_MIN as i32),
    ];
    let to = |place: usize, at: usize| (place - at - 1) as i16;
    program.push(insn(JUMP_GREATER, 4, 3, to(others, program.len()), 0));
    program.push(insn(LOAD_H, 4, 2, 12, 0));
    let ty = half(ethertype.to_be_bytes());
    program.push(insn(JUMP_NOT_IMM, 4, 0, to(others, program.len()), ty));
    if let Some(Station { mac: MacAddr([a, b, c, d, e, f]), number }) = station {
        program.push(insn(LOAD_B, 4, 2, 0, 0));
        program.push(insn(JUMP_SET_IMM, 4, 0, to(ours, program.len()), 1));
        let number =
            (number != Station::EVERY).then_some((DST_NUMBER_AT as i16, number.to_le_bytes()));
        for (at, bytes) in [(0, [a, b]), (2, [c, d]), (4, [e, f])].into_iter().chain(number) {
            program.push(insn(LOAD_H, 4, 2, at, 0));
            program.push(insn(JUMP_NOT_IMM, 4, 0, to(others, program.len()), half(bytes)));
        }
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
