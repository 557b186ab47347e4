//! The messages of a memif's control channel, version 2.0: 128 bytes each, numbers in the machine's
//! byte order, descriptors beside them. Everything here is a function of bytes.

/// Length of every message.
pub(super) const MESSAGE_LEN: usize = 128;
/// The version that we speak: 2.0.
pub(super) const VERSION: u16 = 2 << 8;
/// Bytes of a secret; the rest of a shorter one is zeros.
pub(super) const SECRET_LEN: usize = 24;
/// What a ring begins with.
pub(super) const COOKIE: u32 = 0x03e3_1f20;
/// Largest ring, as the logarithm of its descriptors.
pub(super) const LOG2_RING_MAX: u8 = 14;
/// Regions that a client may have.
pub(super) const REGIONS_MAX: usize = 16;

const NAME_LEN: usize = 32;
const TEXT_LEN: usize = 96;
/// Frames with Ethernet headers; the other modes are not ours.
pub(super) const MODE_ETHERNET: u8 = 0;

const ACK: u16 = 1;
const HELLO: u16 = 2;
const INIT: u16 = 3;
const ADD_REGION: u16 = 4;
const ADD_RING: u16 = 5;
const CONNECT: u16 = 6;
const CONNECTED: u16 = 7;
const DISCONNECT: u16 = 8;

/// What one side says to the other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// The server has taken the last message.
    Ack,
    /// The server's first word.
    Hello(Hello),
    /// The client says which interface it wants.
    Init(Init),
    /// The client's memory, by a descriptor.
    AddRegion { index: u16, size: u64 },
    /// A ring in it; the descriptor wakes its receiver.
    AddRing(AddRing),
    /// The client has said everything.
    Connect,
    /// Frames may be sent.
    Connected,
    /// The end, with a reason: printable ASCII.
    Disconnect(String),
}

/// What a server is able to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) version_min: u16,
    pub(super) version_max: u16,
    /// Largest indices.
    pub(super) region_max: u16,
    pub(super) to_client_max: u16,
    pub(super) to_server_max: u16,
    pub(super) log2_ring_max: u8,
}

/// Which interface a client wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Init {
    pub(super) version: u16,
    pub(super) id: u32,
    pub(super) mode: u8,
    pub(super) secret: [u8; SECRET_LEN],
}

/// Where a ring is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AddRing {
    pub(super) to_server: bool,
    pub(super) index: u16,
    pub(super) region: u16,
    pub(super) offset: u32,
    pub(super) log2_len: u8,
    pub(super) private_len: u16,
}

/// Numbers at places of a message, all of which are inside.
struct Reader<'a>(&'a [u8; MESSAGE_LEN]);

impl Reader<'_> {
    fn bytes<const N: usize>(&self, at: usize) -> [u8; N] {
        let mut bytes = [0; N];
        bytes.copy_from_slice(&self.0[at..at + N]);
        bytes
    }

    fn u16(&self, at: usize) -> u16 {
        u16::from_ne_bytes(self.bytes(at))
    }

    fn u32(&self, at: usize) -> u32 {
        u32::from_ne_bytes(self.bytes(at))
    }

    fn text(&self, at: usize, len: usize) -> String {
        let bytes = self.0[at..at + len].iter().take_while(|&&b| b != 0);
        bytes.map(|&b| if b.is_ascii_graphic() { char::from(b) } else { ' ' }).collect()
    }
}

impl Message {
    /// Reads a message, if it is one.
    pub(super) fn parse(bytes: &[u8; MESSAGE_LEN]) -> Option<Self> {
        let at = Reader(bytes);
        Some(match at.u16(0) {
            ACK => Self::Ack,
            HELLO => Self::Hello(Hello {
                version_min: at.u16(34),
                version_max: at.u16(36),
                region_max: at.u16(38),
                to_client_max: at.u16(40),
                to_server_max: at.u16(42),
                log2_ring_max: bytes[44],
            }),
            INIT => Self::Init(Init {
                version: at.u16(2),
                id: at.u32(4),
                mode: bytes[8],
                secret: at.bytes(9),
            }),
            ADD_REGION => {
                Self::AddRegion { index: at.u16(2), size: u64::from_ne_bytes(at.bytes(4)) }
            }
            ADD_RING => Self::AddRing(AddRing {
                to_server: at.u16(2) & 1 != 0,
                index: at.u16(4),
                region: at.u16(6),
                offset: at.u32(8),
                log2_len: bytes[12],
                private_len: at.u16(13),
            }),
            CONNECT => Self::Connect,
            CONNECTED => Self::Connected,
            DISCONNECT => Self::Disconnect(at.text(6, TEXT_LEN)),
            _ => return None,
        })
    }

    /// The inverse of [`parse`](Self::parse).
    pub(super) fn bytes(&self) -> [u8; MESSAGE_LEN] {
        let mut out = [0; MESSAGE_LEN];
        let mut put = |at: usize, bytes: &[u8]| out[at..at + bytes.len()].copy_from_slice(bytes);
        let kind = match self {
            Self::Ack => ACK,
            Self::Hello(hello) => {
                put(2, &name());
                put(34, &hello.version_min.to_ne_bytes());
                put(36, &hello.version_max.to_ne_bytes());
                put(38, &hello.region_max.to_ne_bytes());
                put(40, &hello.to_client_max.to_ne_bytes());
                put(42, &hello.to_server_max.to_ne_bytes());
                put(44, &[hello.log2_ring_max]);
                HELLO
            }
            Self::Init(init) => {
                put(2, &init.version.to_ne_bytes());
                put(4, &init.id.to_ne_bytes());
                put(8, &[init.mode]);
                put(9, &init.secret);
                put(33, &name());
                INIT
            }
            Self::AddRegion { index, size } => {
                put(2, &index.to_ne_bytes());
                put(4, &size.to_ne_bytes());
                ADD_REGION
            }
            Self::AddRing(ring) => {
                put(2, &u16::from(ring.to_server).to_ne_bytes());
                put(4, &ring.index.to_ne_bytes());
                put(6, &ring.region.to_ne_bytes());
                put(8, &ring.offset.to_ne_bytes());
                put(12, &[ring.log2_len]);
                put(13, &ring.private_len.to_ne_bytes());
                ADD_RING
            }
            Self::Connect => {
                put(2, &name());
                CONNECT
            }
            Self::Connected => {
                put(2, &name());
                CONNECTED
            }
            Self::Disconnect(why) => {
                // The last byte stays 0.
                put(6, &why.as_bytes()[..why.len().min(TEXT_LEN - 1)]);
                DISCONNECT
            }
        };
        out[..2].copy_from_slice(&kind.to_ne_bytes());
        out
    }
}

/// What we are called, as those who list the other side's interfaces see it.
fn name() -> [u8; NAME_LEN] {
    let mut name = [0; NAME_LEN];
    let text = concat!("barewire ", env!("CARGO_PKG_VERSION")).as_bytes();
    let len = text.len().min(NAME_LEN - 1);
    name[..len].copy_from_slice(&text[..len]);
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Message> {
        vec![
            Message::Ack,
            Message::Hello(Hello {
                version_min: VERSION,
                version_max: 0x0201,
                region_max: 15,
                to_client_max: 3,
                to_server_max: 4,
                log2_ring_max: 14,
            }),
            Message::Init(Init { version: VERSION, id: 7, mode: 1, secret: [9; SECRET_LEN] }),
            Message::AddRegion { index: 3, size: 1 << 40 },
            Message::AddRing(AddRing {
                to_server: true,
                index: 1,
                region: 2,
                offset: 0x1234_5678,
                log2_len: 10,
                private_len: 5,
            }),
            Message::Connect,
            Message::Connected,
            Message::Disconnect("ID not found".into()),
        ]
    }

    #[test]
    fn messages_survive_a_round_trip() {
        for message in all() {
            assert_eq!(Message::parse(&message.bytes()), Some(message));
        }
        let long = Message::Disconnect("x".repeat(200)).bytes();
        assert_eq!(Message::parse(&long), Some(Message::Disconnect("x".repeat(95))));
    }

    /// The places of the protocol's own header, written down once more.
    #[test]
    fn field_offsets_are_those_of_libmemif() {
        let at = |message: usize, from: usize| {
            let bytes = all()[message].bytes();
            u64::from_ne_bytes([0, 1, 2, 3, 4, 5, 6, 7].map(|i| bytes[from + i]))
        };
        assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(|i| at(i, 0) as u16), [1, 2, 3, 4, 5, 6, 7, 8]);
        assert_eq!(at(1, 34), 0x0003_000f_0201_0200);
        assert_eq!((at(2, 2) as u16, at(2, 4) as u32, at(2, 8) as u16), (0x200, 7, 0x0901));
        assert_eq!((at(3, 2) as u16, at(3, 4)), (3, 1 << 40));
        assert_eq!((at(4, 2), at(4, 8) as u32), (0x5678_0002_0001_0001, 0x1234_5678));
        assert_eq!((at(4, 12) as u8, at(4, 13) as u16), (10, 5));
        assert_eq!(&all()[7].bytes()[6..18], b"ID not found");
    }

    #[test]
    fn arbitrary_bytes_do_not_panic() {
        let mut rng = 88_172_645_463_325_252_u64;
        for _ in 0..20_000 {
            let mut bytes = [0; MESSAGE_LEN];
            for byte in &mut bytes {
                rng = rng.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                *byte = (rng >> 33) as u8;
            }
            (bytes[0], bytes[1]) = (bytes[0] % 12, 0);
            if let Some(Message::Disconnect(text)) = Message::parse(&bytes) {
                assert!(text.chars().all(|c| c == ' ' || c.is_ascii_graphic()));
            }
        }
    }
}
