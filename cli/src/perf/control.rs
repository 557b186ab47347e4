//! Control messages between client and server of a measurement.
//!
//! One fixed record of [`LEN`] bytes, little-endian, always a tagged message with [`CONTROL_TAG`],
//! so that it is never matched by a measured receive.

use std::fmt;

use barewire::EpAddr;

use super::{MAX_SIZE, MAX_WINDOW};

/// Bytes of a record.
pub(super) const LEN: usize = 64;
/// The tag of control messages.
pub(super) const CONTROL_TAG: u64 = 0x6261_7265_0000_0001;
/// The tag of measured messages, where those are tagged.
pub(super) const DATA_TAG: u64 = 0x6261_7265_0000_0002;

const MAGIC: u32 = 0x7070_7762;
const VERSION: u16 = 2;

/// A control message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// Client: a run begins. The server answers [`Ready`](Self::Ready).
    Start(Run),
    /// Server: receives are posted, or memory is lent by this key, from address 0 on. Go on.
    Ready {
        /// Unused without registered memory.
        key: u64,
    },
    /// Client: `sent` messages were sent, no more will come. The server answers
    /// [`Done`](Self::Done) when it has them all.
    Stop {
        /// Messages of the run, warm-up included.
        sent: u64,
    },
    /// Server: how the run went on its side.
    Done {
        /// Messages received.
        received: u64,
        /// Messages of which a byte was wrong; 0 if nobody looked.
        wrong: u64,
    },
    /// Client: the last run is over.
    Bye,
}

/// The parameters of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    /// Address of the client's endpoint.
    pub(super) client: [u8; 16],
    pub(super) mode: Mode,
    /// Measured messages are tagged.
    pub(super) tagged: bool,
    /// Every byte is compared.
    pub(super) verify: bool,
    /// Bytes of a message.
    pub(super) size: u64,
    /// Messages in flight.
    pub(super) window: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mode {
    /// The server sends every message back.
    PingPong,
    /// The server receives the messages.
    Stream,
    /// The client writes to memory of the server.
    Write,
    /// The client reads memory of the server.
    Read,
    /// The client makes fetch-and-add operations on words of the server.
    Fadd,
    /// The client makes compare-and-swap operations on words of the server.
    Cswap,
}

impl Mode {
    const ALL: [Self; 6] =
        [Self::PingPong, Self::Stream, Self::Write, Self::Read, Self::Fadd, Self::Cswap];
}

/// Why a record was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BadControl {
    /// Not a record of this command.
    Foreign,
    /// A record of another version.
    Version(u16),
    /// A field has an invalid value.
    Field,
}

impl fmt::Display for BadControl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str("the peer is not a barewire pingpong or bench"),
            Self::Version(v) => write!(f, "the peer speaks version {v}, we speak {VERSION}"),
            Self::Field => f.write_str("the peer sent a control message that makes no sense"),
        }
    }
}

impl Control {
    pub(super) fn to_bytes(self) -> [u8; LEN] {
        let mut b = [0; LEN];
        b[..4].copy_from_slice(&MAGIC.to_le_bytes());
        b[4..6].copy_from_slice(&VERSION.to_le_bytes());
        let kind = match self {
            Self::Start(run) => {
                b[8..24].copy_from_slice(&run.client);
                b[24] = run.mode as u8;
                b[25] = u8::from(run.tagged);
                b[26] = u8::from(run.verify);
                b[28..32].copy_from_slice(&run.window.to_le_bytes());
                b[32..40].copy_from_slice(&run.size.to_le_bytes());
                1
            }
            Self::Ready { key } => {
                b[40..48].copy_from_slice(&key.to_le_bytes());
                2
            }
            Self::Stop { sent } => {
                b[40..48].copy_from_slice(&sent.to_le_bytes());
                3
            }
            Self::Done { received, wrong } => {
                b[40..48].copy_from_slice(&received.to_le_bytes());
                b[48..56].copy_from_slice(&wrong.to_le_bytes());
                4
            }
            Self::Bye => 5,
        };
        b[6] = kind;
        b
    }

    /// Whether it is what a client says to a server, and not the other way.
    pub(super) fn is_of_client(self) -> bool {
        matches!(self, Self::Start(_) | Self::Stop { .. } | Self::Bye)
    }

    /// Why it is dropped by a side that says such things itself.
    pub(super) fn odd(self) -> String {
        format!("{self:?} from a side that does not say it")
    }

    /// Reads a record of a peer, which may be anything.
    pub(super) fn from_bytes(b: &[u8]) -> Result<Self, BadControl> {
        let b: &[u8; LEN] = b.try_into().map_err(|_| BadControl::Foreign)?;
        let u64_at = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&b[at..at + 8]);
            u64::from_le_bytes(word)
        };
        if b[..4] != MAGIC.to_le_bytes() {
            return Err(BadControl::Foreign);
        }
        let version = u16::from_le_bytes([b[4], b[5]]);
        if version != VERSION {
            return Err(BadControl::Version(version));
        }
        match b[6] {
            1 => {
                let window = u32::from_le_bytes([b[28], b[29], b[30], b[31]]);
                // The memory that a run takes is here as well.
                if u64_at(32) > MAX_SIZE || !(1..=MAX_WINDOW).contains(&window) {
                    return Err(BadControl::Field);
                }
                let mut client = [0; 16];
                client.copy_from_slice(&b[8..24]);
                EpAddr::from_bytes(&client).map_err(|_| BadControl::Field)?;
                Ok(Self::Start(Run {
                    client,
                    mode: *Mode::ALL.get(usize::from(b[24])).ok_or(BadControl::Field)?,
                    tagged: flag(b[25])?,
                    verify: flag(b[26])?,
                    size: u64_at(32),
                    window,
                }))
            }
            2 => Ok(Self::Ready { key: u64_at(40) }),
            3 => Ok(Self::Stop { sent: u64_at(40) }),
            4 => Ok(Self::Done { received: u64_at(40), wrong: u64_at(48) }),
            5 => Ok(Self::Bye),
            _ => Err(BadControl::Field),
        }
    }
}

fn flag(byte: u8) -> Result<bool, BadControl> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(BadControl::Field),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_kind() -> Vec<Control> {
        let run = Run {
            client: *b"2123456789abcdef",
            mode: Mode::PingPong,
            tagged: true,
            verify: false,
            size: MAX_SIZE,
            window: 64,
        };
        let modes = Mode::ALL.map(|mode| Control::Start(Run { mode, ..run }));
        let others = [
            Control::Start(Run { tagged: false, verify: true, ..run }),
            Control::Ready { key: 0x1234_5678_9abc_def0 },
            Control::Stop { sent: u64::MAX },
            Control::Done { received: 7, wrong: 1 },
            Control::Bye,
        ];
        [&modes[..], &others].concat()
    }

    #[test]
    fn control_messages_survive_a_round_trip() {
        for said in every_kind() {
            assert_eq!(Control::from_bytes(&said.to_bytes()), Ok(said));
            let is_of_server = matches!(said, Control::Ready { .. } | Control::Done { .. });
            assert_ne!(said.is_of_client(), is_of_server, "{said:?}");
        }
    }

    #[test]
    fn strangers_are_refused_by_cause() {
        for said in every_kind() {
            let bytes = said.to_bytes();
            assert_eq!(Control::from_bytes(&bytes[..LEN - 1]), Err(BadControl::Foreign));
            let with = |at: usize, value: u8| {
                let mut bytes = bytes;
                bytes[at] = value;
                Control::from_bytes(&bytes)
            };
            assert_eq!(with(0, 0), Err(BadControl::Foreign));
            assert_eq!(with(4, 9), Err(BadControl::Version(9)));
            assert_eq!(with(6, 0), Err(BadControl::Field));
            assert_eq!(with(6, 6), Err(BadControl::Field));
        }
        let mut bytes = every_kind()[0].to_bytes();
        bytes[25] = 2;
        assert_eq!(Control::from_bytes(&bytes), Err(BadControl::Field));
        (bytes[25], bytes[24]) = (0, 6);
        assert_eq!(Control::from_bytes(&bytes), Err(BadControl::Field));
        let mut bytes = every_kind()[0].to_bytes();
        bytes[8..24].fill(0);
        assert_eq!(Control::from_bytes(&bytes), Err(BadControl::Field), "no address");
        // A run that would take more memory than a client of ours may ask for.
        let Control::Start(run) = every_kind()[0] else { unreachable!() };
        for (size, window) in [(MAX_SIZE + 1, 1), (u64::MAX, 1), (8, 0), (8, MAX_WINDOW + 1)] {
            let start = Control::Start(Run { size, window, ..run }).to_bytes();
            assert_eq!(Control::from_bytes(&start), Err(BadControl::Field), "{size} {window}");
        }
    }
}
