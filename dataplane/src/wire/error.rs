//! Reasons why a frame is dropped or refused.

macro_rules! wire_errors {
    ($($(#[$doc:meta])* $variant:ident = $name:literal, $text:literal;)*) => {
        /// Why a frame was dropped or refused. One variant per cause, and the node counts each.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
        #[repr(u8)]
        pub enum WireError {
            $($(#[$doc])* #[error($text)] $variant,)*
        }

        impl WireError {
            /// All causes, in the order of [`index`](Self::index).
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// Number of causes: the length of an array of counters.
            pub const COUNT: usize = Self::ALL.len();

            /// Name of the cause's counter, as in `docs/wire.md`.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

wire_errors! {
    /// Shorter than Ethernet header, prologue and base.
    Short = "short", "frame is shorter than 40 bytes";
    /// Another EtherType.
    EtherType = "ethertype", "EtherType is not 0x88b5";
    /// The source MAC is a group address or zero.
    Source = "source", "source address is no station's";
    /// Another major version. The rest of the frame cannot be interpreted.
    Version = "version", "unknown protocol version";
    /// SEC bit (prologue bit 7) on a node without a key, or in a WHO or MCAST.
    Secured = "secured", "SEC bit set";
    /// CE bit (prologue bit 4): only an ACK echoes congestion.
    CongestionEcho = "congestion_echo", "CE bit set in no ACK";
    /// Prologue bits 3 and 2.
    PrologueReserved = "prologue_reserved", "reserved prologue bits set";
    /// Trailer code 1 or 2.
    TrailerCode = "trailer_code", "unknown trailer code";
    /// Type 20, 21 or 23 to 31: a reliable packet of a later minor version. Answered by a NACK,
    /// since the packet has a PSN and the sequence would wait for it.
    UnknownType = "unknown_type", "unknown packet type";
    /// Type 0, which no packet has. Dropped, never answered.
    ReservedType = "reserved_type", "reserved packet type";
    /// `dst_sid` is 0 in a packet other than OPEN, RST, WHO and MCAST.
    NoSid = "no_sid", "packet names no session";
    /// `plen` is not 0 in a type without payload.
    StrayPayload = "stray_payload", "payload where none belongs";
    /// The frame ends within the operation header, its remote CQ data or its SACK words.
    OpTruncated = "op_truncated", "frame ends within the operation header";
    /// The frame ends within the payload.
    PayloadTruncated = "payload_truncated", "frame ends within the payload";
    /// The frame ends within the checksum.
    TrailerTruncated = "trailer_truncated", "frame ends within the checksum";
    /// The checksum is wrong: the frame was damaged in transit.
    Crc = "crc", "checksum is wrong";
    /// Reserved bytes of the operation header are not zero.
    OpReserved = "op_reserved", "reserved bytes of the operation header set";
    /// Unknown flags of a message.
    MsgFlags = "msg_flags", "unknown message flags set";
    /// A tag in an untagged message.
    StrayTag = "stray_tag", "tag in an untagged message";
    /// A record length in a message outside of a PACK.
    StrayLen = "stray_len", "record length outside of a pack";
    /// A segment or DATA packet without payload.
    EmptyPiece = "empty_piece", "piece without payload";
    /// A segment that ends beyond its message, or beyond 2^64.
    PieceRange = "piece_range", "piece ends beyond its message";
    /// Remote CQ data in a segment of a message other than the first, or of a one-sided operation
    /// other than the last.
    LateImm = "late_imm", "remote CQ data in the wrong piece";
    /// A PACK of 0 or more than 255 messages.
    PackCount = "pack_count", "pack of no or too many messages";
    /// A record that ends beyond its PACK.
    PackRecord = "pack_record", "record ends beyond its pack";
    /// Padding of a record that is not zero.
    PackPadding = "pack_padding", "record padding is not zero";
    /// Payload behind the last record of a PACK.
    PackTrailing = "pack_trailing", "bytes behind the last record of a pack";
    /// A PULL of 0 or more than 1 MiB, or one that ends beyond 2^64.
    PullRange = "pull_range", "pull of no or too many bytes";
    /// An unknown END status.
    EndStatus = "end_status", "unknown status of an END";
    /// Unknown flags of a one-sided operation.
    RmaFlags = "rma_flags", "unknown flags of a one-sided operation set";
    /// A range that ends beyond 2^64, a WRITE with more payload than is left of its range, or a
    /// READ of more than 256 KiB.
    RmaRange = "rma_range", "range of a one-sided operation makes no sense";
    /// An unknown RESP status.
    RespStatus = "resp_status", "unknown status of a RESP";
    /// An unknown NACK reason.
    NackReason = "nack_reason", "unknown reason of a NACK";
    /// An ACK with more than 64 SACK words.
    SackCount = "sack_count", "more than 64 SACK words";
    /// An unknown RST reason.
    RstReason = "rst_reason", "unknown reason of an RST";
    /// An RST, OPEN or MCAST of incarnation 0, an OPEN in which only one of epoch and sid is 0, a
    /// query without nonce, or an answer without service.
    Nameless = "nameless", "what names sender, session, question or service is zero";
    /// An OPEN with half an echo, or with an echo of another session than it was sent to.
    OpenEcho = "open_echo", "echo of an OPEN does not fit its destination";
    /// An OPEN with window 0.
    OpenWindow = "open_window", "window of an OPEN is zero";
    /// An OPEN whose sender accepts less than 256 bytes a frame.
    OpenMaxFrame = "open_max_frame", "frame length of an OPEN is below 256";
    /// An OPEN without sid that has no cookie, or that answers no OPEN.
    OpenChallenge = "open_challenge", "challenge without cookie or echo";
    /// A WHO of unknown kind or unknown kind of host.
    WhoKind = "who_kind", "unknown kind of a WHO";
    /// A MCAST whose group MAC is no group address, or the broadcast address.
    McastGroup = "mcast_group", "no group address in a MCAST";
    /// An RST, OPEN or WHO with an invalid version range: lowest version 0 or above the highest, or
    /// highest above 7.
    Versions = "versions", "range of versions makes no sense";
}

impl WireError {
    /// Index of the cause's counter, 0 to `COUNT - 1`.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Whether the packet was whole and undamaged but its operation header was invalid: the PSN of
    /// such a reliable packet must be refused with [`NackReason::Malformed`](super::NackReason).
    /// For causes that may be damage, or that leave type and PSN in doubt, the packet is dropped
    /// silently, and the sender retransmits it.
    pub const fn is_malformed_op(self) -> bool {
        self as u8 >= Self::OpReserved as u8
    }
}
