//! Packet types and their properties.

/// The type of a packet, bits 12 to 8 of the prologue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Ty {
    /// Acknowledgement with up to 4,096 bits of selective acknowledgement.
    Ack = 1,
    /// A whole message.
    Msg = 2,
    /// Several whole messages.
    Pack = 3,
    /// A segment of a message of several packets.
    MsgM = 4,
    /// Announces a message for rendezvous.
    Rndv = 5,
    /// Requests bytes of an announced message.
    Pull = 6,
    /// Bytes of an announced message.
    Data = 7,
    /// The receiver of a rendezvous message needs no more bytes.
    End = 8,
    /// Replaces a refused packet.
    Nop = 9,
    /// Refuses a packet.
    Nack = 10,
    /// Query for the server of a service at a host, or the answer.
    Who = 11,
    /// Probe of a frame length, or the answer.
    Probe = 12,
    /// Requests an acknowledgement.
    Ping = 13,
    /// Resets or refuses a session.
    Rst = 14,
    /// Opens a session.
    Open = 15,
    /// Bytes for a remote memory region.
    Write = 16,
    /// Requests bytes of a remote memory region.
    Read = 17,
    /// Changes elements of a remote memory region.
    Atomic = 18,
    /// Result of an ATOMIC, or the reason why a READ failed.
    Resp = 19,
    /// A message to a multicast group, outside of sessions.
    Mcast = 22,
}

/// Properties of a type, laid out so that each check of a base is a load and a comparison.
#[derive(Clone, Copy)]
struct Info {
    /// Least length of the operation header, bytes.
    op_len: u16,
    /// Most payload, bytes.
    plen_max: u16,
    /// Least `dst_sid`.
    sid_min: u16,
    /// Whether a packet consumes a PSN.
    reliable: bool,
    /// Optional part behind the header.
    tail: Tail,
}

/// The optional part between operation header and payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tail {
    /// Nothing.
    None,
    /// Words of selective acknowledgement; the header's third byte contains their number.
    Sack,
    /// Eight bytes of remote CQ data, if the flag in bit 1 of the header's fifth byte is set.
    Imm,
}

const fn control(op_len: u16, sid_min: u16) -> Info {
    Info { op_len, plen_max: 0, sid_min, reliable: false, tail: Tail::None }
}

const fn reliable(op_len: u16, plen_max: u16, tail: Tail) -> Info {
    Info { op_len, plen_max, sid_min: 1, reliable: true, tail }
}

impl Info {
    /// The properties of each type are defined here only.
    const fn of(ty: Ty) -> Self {
        match ty {
            Ty::Ack => Self { tail: Tail::Sack, ..control(8, 1) },
            Ty::Msg => reliable(16, u16::MAX, Tail::Imm),
            Ty::Pack => reliable(8, u16::MAX, Tail::None),
            Ty::MsgM => reliable(32, u16::MAX, Tail::Imm),
            Ty::Rndv => reliable(32, 0, Tail::Imm),
            Ty::Pull => reliable(32, 0, Tail::None),
            Ty::Data => reliable(16, u16::MAX, Tail::None),
            Ty::End => reliable(16, 0, Tail::None),
            Ty::Nop => reliable(8, 0, Tail::None),
            Ty::Nack => control(8, 1),
            Ty::Who => control(32, 0),
            Ty::Probe => control(8, 1),
            Ty::Ping => control(0, 1),
            Ty::Rst => control(32, 0),
            Ty::Open => control(64, 0),
            Ty::Write => reliable(40, u16::MAX, Tail::Imm),
            Ty::Read => reliable(48, 0, Tail::None),
            Ty::Atomic => reliable(40, u16::MAX, Tail::Imm),
            Ty::Resp => reliable(16, u16::MAX, Tail::None),
            Ty::Mcast => Self { plen_max: u16::MAX, tail: Tail::Imm, ..control(24, 0) },
        }
    }
}

/// Properties by type number. The entry of an unused number has no meaning.
const INFO: [Info; 23] = {
    let mut info = [control(0, 1); 23];
    let mut i = 0;
    while i < Ty::ALL.len() {
        info[Ty::ALL[i] as usize] = Info::of(Ty::ALL[i]);
        i += 1;
    }
    info
};

impl Ty {
    /// All types, in the order of their numbers.
    pub const ALL: [Self; 20] = [
        Self::Ack,
        Self::Msg,
        Self::Pack,
        Self::MsgM,
        Self::Rndv,
        Self::Pull,
        Self::Data,
        Self::End,
        Self::Nop,
        Self::Nack,
        Self::Who,
        Self::Probe,
        Self::Ping,
        Self::Rst,
        Self::Open,
        Self::Write,
        Self::Read,
        Self::Atomic,
        Self::Resp,
        Self::Mcast,
    ];

    /// The type whose number is in the low five bits of `bits`.
    #[inline]
    pub(super) fn from_bits(bits: u8) -> Option<Self> {
        BY_BITS[usize::from(bits & 31)]
    }

    #[inline]
    fn info(self) -> &'static Info {
        const { assert!((Self::Mcast as usize) < INFO.len()) };
        &INFO[self as usize]
    }

    /// Whether packets of this type consume a PSN and are acknowledged. The others are control
    /// packets: idempotent, never acknowledged, never retransmitted.
    #[inline]
    pub fn is_reliable(self) -> bool {
        self.info().reliable
    }

    /// Whether a payload may follow the operation header.
    #[inline]
    pub fn has_payload(self) -> bool {
        self.info().plen_max != 0
    }

    /// The optional part behind the operation header.
    #[inline]
    pub(super) fn tail(self) -> Tail {
        self.info().tail
    }

    /// Least `dst_sid`: 0 if the sender may not know the receiver's session name yet, else 1.
    #[inline]
    pub fn sid_min(self) -> u32 {
        self.info().sid_min.into()
    }

    /// Most payload, bytes: 0 or the largest `plen`.
    #[inline]
    pub fn plen_max(self) -> u16 {
        self.info().plen_max
    }

    /// Least length of the operation header, bytes: without remote CQ data and SACK words.
    #[inline]
    pub fn op_len(self) -> usize {
        self.info().op_len.into()
    }

    /// Name as in `docs/wire.md`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ack => "ACK",
            Self::Msg => "MSG",
            Self::Pack => "PACK",
            Self::MsgM => "MSGM",
            Self::Rndv => "RNDV",
            Self::Pull => "PULL",
            Self::Data => "DATA",
            Self::End => "END",
            Self::Nop => "NOP",
            Self::Nack => "NACK",
            Self::Who => "WHO",
            Self::Probe => "PROBE",
            Self::Ping => "PING",
            Self::Rst => "RST",
            Self::Open => "OPEN",
            Self::Write => "WRITE",
            Self::Read => "READ",
            Self::Atomic => "ATOMIC",
            Self::Resp => "RESP",
            Self::Mcast => "MCAST",
        }
    }
}

/// Types by number, for the prologue's five bits.
const BY_BITS: [Option<Ty>; 32] = {
    let mut by_bits = [None; 32];
    let mut i = 0;
    while i < Ty::ALL.len() {
        by_bits[Ty::ALL[i] as usize] = Some(Ty::ALL[i]);
        i += 1;
    }
    by_bits
};

impl TryFrom<u8> for Ty {
    /// The number, if no type has it.
    type Error = u8;

    #[inline]
    fn try_from(v: u8) -> Result<Self, u8> {
        if v < 32 { Self::from_bits(v).ok_or(v) } else { Err(v) }
    }
}
