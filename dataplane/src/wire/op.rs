//! Any operation header as one value, for tests, fuzzing and tools that decode all packets. The
//! node parses the specific header.

use barewire_driver::frame::{Body, RxFrame};

use super::*;

/// The operation header of a packet of any type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "no packet of a node goes through here")]
pub enum Op {
    /// Of an ACK, and its SACK words.
    Ack(AckOp, [u64; AckOp::WORDS_MAX]),
    /// Of a MSG.
    Msg(MsgOp),
    /// Of a PACK.
    Pack(PackOp),
    /// Of a MSGM.
    MsgM(MsgMOp),
    /// Of an RNDV.
    Rndv(RndvOp),
    /// Of a PULL.
    Pull(PullOp),
    /// Of a DATA.
    Data(DataOp),
    /// Of an END.
    End(EndOp),
    /// Of a NOP.
    Nop(NopOp),
    /// Of a NACK.
    Nack(NackOp),
    /// Of a WHO.
    Who(WhoOp),
    /// Of a PROBE.
    Probe(ProbeOp),
    /// A PING has no operation header.
    Ping,
    /// Of an RST.
    Rst(RstOp),
    /// Of an OPEN.
    Open(OpenOp),
    /// Of a WRITE.
    Write(WriteOp),
    /// Of a READ.
    Read(ReadOp),
    /// Of an ATOMIC.
    Atomic(AtomicOp),
    /// Of a RESP.
    Resp(RespOp),
    /// Of a MCAST.
    Mcast(McastOp),
}

impl Op {
    /// Copies and validates the header of `base`'s type, and the records of a PACK.
    ///
    /// # Errors
    /// Those of the header's own parse.
    pub fn parse(frame: &RxFrame<'_>, base: &Base) -> Result<Self, WireError> {
        Ok(match base.ty {
            Ty::Ack => {
                let (op, mut words) = (AckOp::parse(frame, base)?, [0; AckOp::WORDS_MAX]);
                op.sack(frame, &mut words);
                Self::Ack(op, words)
            }
            Ty::Msg => Self::Msg(MsgOp::parse(frame, base)?),
            Ty::Pack => {
                let op = PackOp::parse(frame, base)?;
                PackRecords::new(frame, op.payload_off(), base.plen, op.count).check()?;
                Self::Pack(op)
            }
            Ty::MsgM => Self::MsgM(MsgMOp::parse(frame, base)?),
            Ty::Rndv => Self::Rndv(RndvOp::parse(frame, base)?),
            Ty::Pull => Self::Pull(PullOp::parse(frame, base)?),
            Ty::Data => Self::Data(DataOp::parse(frame, base)?),
            Ty::End => Self::End(EndOp::parse(frame, base)?),
            Ty::Nop => Self::Nop(NopOp::parse(frame, base)?),
            Ty::Nack => Self::Nack(NackOp::parse(frame, base)?),
            Ty::Who => Self::Who(WhoOp::parse(frame, base)?),
            Ty::Probe => Self::Probe(ProbeOp::parse(frame, base)?),
            Ty::Ping => Self::Ping,
            Ty::Rst => Self::Rst(RstOp::parse(frame)?),
            Ty::Open => Self::Open(OpenOp::parse(frame, base)?),
            Ty::Write => Self::Write(WriteOp::parse(frame, base)?),
            Ty::Read => Self::Read(ReadOp::parse(frame, base)?),
            Ty::Atomic => Self::Atomic(AtomicOp::parse(frame, base)?),
            Ty::Resp => Self::Resp(RespOp::parse(frame, base)?),
            Ty::Mcast => Self::Mcast(McastOp::parse(frame, base)?),
        })
    }

    /// Writes the header, with its remote CQ data, to the start of `out` and returns its length: at
    /// most [`OP_MAX`], or [`AckOp::LEN_MAX`] for an ACK.
    ///
    /// # Panics
    /// If `out` is too short.
    pub fn emit(&self, out: &mut [u8]) -> usize {
        match self {
            Self::Ack(op, words) => op.emit(words, out),
            Self::Msg(op) => op.emit(out),
            Self::Pack(op) => op.emit(out),
            Self::MsgM(op) => op.emit(out),
            Self::Rndv(op) => op.emit(out),
            Self::Pull(op) => op.emit(out),
            Self::Data(op) => op.emit(out),
            Self::End(op) => op.emit(out),
            Self::Nop(op) => op.emit(out),
            Self::Who(op) => op.emit(out),
            Self::Probe(op) => op.emit(out),
            Self::Ping => 0,
            Self::Nack(op) => op.emit(out),
            Self::Rst(op) => op.emit(out),
            Self::Open(op) => op.emit(out),
            Self::Write(op) => op.emit(out),
            Self::Read(op) => op.emit(out),
            Self::Atomic(op) => op.emit(out),
            Self::Resp(op) => op.emit(out),
            Self::Mcast(op) => op.emit(out),
        }
    }

    /// The type of packets with this header.
    pub fn ty(&self) -> Ty {
        match self {
            Self::Ack(..) => Ty::Ack,
            Self::Msg(_) => Ty::Msg,
            Self::Pack(_) => Ty::Pack,
            Self::MsgM(_) => Ty::MsgM,
            Self::Rndv(_) => Ty::Rndv,
            Self::Pull(_) => Ty::Pull,
            Self::Data(_) => Ty::Data,
            Self::End(_) => Ty::End,
            Self::Nop(_) => Ty::Nop,
            Self::Nack(_) => Ty::Nack,
            Self::Who(_) => Ty::Who,
            Self::Probe(_) => Ty::Probe,
            Self::Ping => Ty::Ping,
            Self::Rst(_) => Ty::Rst,
            Self::Open(_) => Ty::Open,
            Self::Write(_) => Ty::Write,
            Self::Read(_) => Ty::Read,
            Self::Atomic(_) => Ty::Atomic,
            Self::Resp(_) => Ty::Resp,
            Self::Mcast(_) => Ty::Mcast,
        }
    }
}

/// A whole frame: `base` with the type of `op` and the length of `payload`, and a checksum if
/// `base` has one. Allocates: for tests and tools.
///
/// # Panics
/// If `payload` is longer than 65,535 bytes.
pub fn frame(base: &Base, op: &Op, payload: &[u8]) -> Vec<u8> {
    let plen = payload.len().try_into().expect("payload of a packet is below 64 KiB");
    let base = Base { ty: op.ty(), plen, ..*base };
    let mut head = [0; BASE_LEN + AckOp::LEN_MAX];
    let (first, rest) = head.split_first_chunk_mut().expect("it is more than BASE_LEN");
    base.emit(first);
    let head_len = BASE_LEN + op.emit(rest);
    let mut frame = head[..head_len].to_vec();
    frame.extend_from_slice(payload);
    if base.crc {
        frame.extend_from_slice(&trailer(&head[..head_len], &Body::Bytes(payload)));
    }
    frame
}
