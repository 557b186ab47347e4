//! Packet types and what each allows.

/// The type of a packet, bits 12 to 8 of the prologue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Ty {
    /// Acknowledgement with up to 256 bits of selective acknowledgement.
    Ack = 1,
    /// A whole message.
    Msg = 2,
    /// Several whole messages.
    Pack = 3,
    /// A piece of a message of several packets.
    MsgM = 4,
    /// Announces a message to be pulled.
    Rndv = 5,
    /// Asks for bytes of an announced message.
    Pull = 6,
    /// Bytes of an announced message.
    Data = 7,
    /// The puller has what it wants.
    End = 8,
    /// Takes the place of a refused packet.
    Nop = 9,
    /// Refuses a packet.
    Nack = 10,
    /// Asks for an acknowledgement.
    Ping = 13,
    /// Ends, or denies, a session.
    Rst = 14,
    /// Makes a session.
    Open = 15,
}

/// Consumes a PSN.
const R: u8 = 1;
/// May carry a payload.
const P: u8 = 2;
/// May carry remote CQ data behind its header (the flag is bit 1 of its fifth byte).
const I: u8 = 4;
/// May have a `dst_sid` of 0.
const Z: u8 = 8;

/// Length of the operation header (without remote CQ data or SACK words) and properties, by type.
const INFO: [(u8, u8); 16] = [
    (0, 0),
    (8, 0),          // ACK
    (16, R | P | I), // MSG
    (8, R | P),      // PACK
    (32, R | P | I), // MSGM
    (32, R | I),     // RNDV
    (32, R),         // PULL
    (16, R | P),     // DATA
    (16, R),         // END
    (0, R),          // NOP
    (8, 0),          // NACK
    (0, 0),
    (0, 0),
    (0, 0),  // PING
    (32, Z), // RST
    (56, Z), // OPEN
];

impl Ty {
    /// All types, in the order of their numbers.
    pub const ALL: [Self; 13] = [
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
        Self::Ping,
        Self::Rst,
        Self::Open,
    ];

    #[inline]
    fn info(self, bit: u8) -> bool {
        INFO[self as usize & 15].1 & bit != 0
    }

    /// Whether a packet of this type consumes a PSN and is acknowledged. The others are control:
    /// idempotent, never acknowledged, never repeated by a timer of the sequence.
    #[inline]
    pub fn is_reliable(self) -> bool {
        self.info(R)
    }

    /// Whether a payload may follow the operation header.
    #[inline]
    pub fn has_payload(self) -> bool {
        self.info(P)
    }

    /// Whether remote CQ data may follow the operation header.
    #[inline]
    pub fn has_imm(self) -> bool {
        self.info(I)
    }

    /// Whether `dst_sid` may be 0: the sender does not know a name of the receiver's yet.
    #[inline]
    pub fn allows_no_sid(self) -> bool {
        self.info(Z)
    }

    /// Least length of the operation header, bytes: without remote CQ data and SACK words.
    #[inline]
    pub fn op_len(self) -> usize {
        INFO[self as usize & 15].0.into()
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
            Self::Ping => "PING",
            Self::Rst => "RST",
            Self::Open => "OPEN",
        }
    }
}

impl TryFrom<u8> for Ty {
    /// The number, which no type of this version has.
    type Error = u8;

    #[inline]
    fn try_from(v: u8) -> Result<Self, u8> {
        Ok(match v {
            1 => Self::Ack,
            2 => Self::Msg,
            3 => Self::Pack,
            4 => Self::MsgM,
            5 => Self::Rndv,
            6 => Self::Pull,
            7 => Self::Data,
            8 => Self::End,
            9 => Self::Nop,
            10 => Self::Nack,
            13 => Self::Ping,
            14 => Self::Rst,
            15 => Self::Open,
            _ => return Err(v),
        })
    }
}
