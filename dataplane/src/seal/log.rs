//! The key log: secrets of sessions as lines of text, for owners of recordings, and decryption of
//! recorded frames with such lines (`docs/security.md`, "Reading what was recorded").
//!
//! A line describes one direction of a session. Its fields, separated by spaces: `barewire-3`; the
//! sender's and the receiver's station; the receiver's name of the session, eight hexadecimal
//! digits; `aes256gcm` or `chacha20poly1305`; `encrypted` or `authenticated`; the number of frames
//! per key as a power of two; the secret that keys are derived from, 64 hexadecimal digits.

use std::collections::HashMap;
use std::fmt::{self, Write};
use std::str::FromStr;

use barewire_driver::frame::RxFrame;
use barewire_driver::port::Station;
use zeroize::Zeroizing;

use super::chain::{Chain, cipher, nonce, open_with};
use super::key::{Mode, SealFormat, Secret};
use crate::wire::{BASE_LEN, Base, OpenOp, RawBase, TAG_LEN, Ty, sealed};

/// First field of a line.
const MAGIC: &str = "barewire-3";

/// Most lines of a key log; each is of one direction of a session.
const LINES_MAX: usize = 1 << 20;

/// Most keys that are derived for one frame, since its counter may be forged.
const KEYS_AHEAD_MAX: u64 = 1 << 12;

/// The secret of one direction of a session. `Display` formats its line, secret included; `Debug`
/// omits the secret.
#[derive(Clone)]
pub struct SessionSecret {
    /// Sender of the frames.
    pub src: Station,
    /// Receiver of the frames.
    pub dst: Station,
    /// The receiver's name of the session.
    pub sid: u32,
    of: UnboundSecret,
}

/// The secret of one direction of a session, before its stations and session name are known.
#[derive(Clone)]
pub(crate) struct UnboundSecret {
    pub(super) aes: bool,
    pub(super) format: SealFormat,
    pub(super) secret: Secret,
}

impl fmt::Debug for UnboundSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UnboundSecret").finish_non_exhaustive()
    }
}

impl UnboundSecret {
    /// The secret of the frames from `src` to `dst`, whose name of the session is `sid`.
    pub(crate) fn bind(self, src: Station, dst: Station, sid: u32) -> SessionSecret {
        SessionSecret { src, dst, sid, of: self }
    }
}

impl fmt::Debug for SessionSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("SessionSecret");
        shown.field("src", &self.src).field("dst", &self.dst).finish_non_exhaustive()
    }
}

impl fmt::Display for SessionSecret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { src, dst, sid, of: UnboundSecret { aes, format, secret } } = self;
        let cipher = if *aes { "aes256gcm" } else { "chacha20poly1305" };
        let mode = match format.mode {
            Mode::Encrypted => "encrypted",
            Mode::Authenticated => "authenticated",
        };
        let bits = format.key_frames_bits;
        write!(f, "{MAGIC} {src} {dst} {sid:08x} {cipher} {mode} {bits} ")?;
        secret.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// Error: a line that is no session secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadLine;

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not the secret of a session")
    }
}

impl FromStr for SessionSecret {
    type Err = BadLine;

    fn from_str(line: &str) -> Result<Self, BadLine> {
        let mut words = line.split_ascii_whitespace();
        let mut word = || words.next().ok_or(BadLine);
        if word()? != MAGIC {
            return Err(BadLine);
        }
        let [src, dst] = [word()?, word()?].map(|text| text.parse::<Station>());
        let (src, dst) = (src.map_err(|_| BadLine)?, dst.map_err(|_| BadLine)?);
        let sid = u32::from_str_radix(word()?, 16).map_err(|_| BadLine)?;
        let aes = match word()? {
            "aes256gcm" => true,
            "chacha20poly1305" => false,
            _ => return Err(BadLine),
        };
        let mode = match word()? {
            "encrypted" => Mode::Encrypted,
            "authenticated" => Mode::Authenticated,
            _ => return Err(BadLine),
        };
        let key_frames_bits = word()?.parse().map_err(|_| BadLine)?;
        let digits = word()?.as_bytes();
        if !(2..=30).contains(&key_frames_bits) || digits.len() != 64 || words.next().is_some() {
            return Err(BadLine);
        }
        let mut secret = Secret::default();
        for (byte, pair) in secret.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |c: u8| char::from(c).to_digit(16).map(|d| d as u8).ok_or(BadLine);
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        let of = UnboundSecret { aes, format: SealFormat { mode, key_frames_bits }, secret };
        Ok(of.bind(src, dst, sid))
    }
}

/// The lines of these secrets.
pub fn lines(secrets: &[SessionSecret]) -> Zeroizing<String> {
    let mut text = Zeroizing::new(String::with_capacity(secrets.len() * 192));
    for secret in secrets {
        // Writing to a string does not fail.
        let _ = writeln!(*text, "{secret}");
    }
    text
}

/// Outcome of reading a recorded frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Read {
    /// The frame is not sealed, and unchanged.
    Clear,
    /// The frame was sealed, and now has its form before sealing.
    Opened,
    /// The frame is an OPEN or an RST: it has no secret content and now has its form before
    /// sealing, but its tag cannot be verified.
    Unchecked,
    /// The frame is sealed and unchanged: no line is of its session, or its tag is wrong.
    Sealed,
}

/// Opens recorded frames with the secrets of their sessions.
///
/// Frames may be repeated, missing or out of order. Counters have 64 bits, of which a frame
/// contains 32: the first frame of a direction is taken for one of its first 2^32, later ones for
/// those nearest to the last.
/// nearest to the last.
#[derive(Debug, Default)]
pub struct RecordReader {
    directions: HashMap<(Station, Station, u32), Vec<Recorded>>,
    count: usize,
}

/// Reader state of one direction of a session.
#[derive(Debug)]
struct Recorded {
    secret: SessionSecret,
    /// The last used key, if any.
    chain: Option<Chain>,
    /// Counter of the last opened frame.
    last: u64,
}

impl RecordReader {
    /// Adds the secrets of `text`, one per line; empty lines and lines that begin with `#` are
    /// comments. Known lines are ignored, so a text that has grown may be read again.
    ///
    /// # Errors
    /// The number of the first invalid line, from 1. All other lines are added.
    pub fn read(&mut self, text: &str) -> Result<(), usize> {
        let mut bad = None;
        for (i, line) in text.lines().enumerate() {
            let line = line.trim();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            match line.parse() {
                Ok(secret) => self.add(secret),
                Err(BadLine) => bad = bad.or(Some(i + 1)),
            }
        }
        bad.map_or(Ok(()), Err)
    }

    fn add(&mut self, secret: SessionSecret) {
        let known = self.directions.entry((secret.src, secret.dst, secret.sid)).or_default();
        let is_known = known.iter().any(|one| *one.secret.of.secret == *secret.of.secret);
        if !is_known && self.count < LINES_MAX {
            known.push(Recorded { secret, chain: None, last: 0 });
            self.count += 1;
        }
    }

    /// Number of known secrets.
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether no secret is known.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Opens a frame in place. A sealed frame loses its tag, the handshake message of an OPEN, and
    /// its padding.
    pub fn open(&mut self, frame: &mut Vec<u8>) -> Read {
        let rx = RxFrame::new(frame);
        let raw = sealed::is_sealed(&rx).filter(|&sealed| sealed).and(Base::parse_raw(&rx));
        let Some(raw) = raw else { return Read::Clear };
        let end = BASE_LEN + usize::from(sealed::plen(frame));
        if frame.len() < end + TAG_LEN {
            return Read::Sealed;
        }
        let is = |ty: Ty| raw.ty == ty as u8;
        if is(Ty::Open) || is(Ty::Rst) {
            let len = if is(Ty::Open) { end.min(BASE_LEN + OpenOp::LEN) } else { end };
            let mut head = frame[..len].to_vec();
            sealed::set_plen(&mut head, (len - BASE_LEN) as u16);
            return Self::put(frame, head, Read::Unchecked);
        }
        let mut bytes = frame[..end + TAG_LEN].to_vec();
        if !self.authenticate(&raw, &mut bytes) {
            return Read::Sealed;
        }
        bytes.truncate(end);
        Self::put(frame, bytes, Read::Opened)
    }

    fn put(frame: &mut Vec<u8>, mut opened: Vec<u8>, read: Read) -> Read {
        match sealed::unmark(&mut opened) {
            Ok(()) => {
                *frame = opened;
                read
            }
            // A type of a later minor version.
            Err(_) => Read::Sealed,
        }
    }

    fn authenticate(&mut self, raw: &RawBase, bytes: &mut [u8]) -> bool {
        let known = self.directions.get_mut(&(raw.src, raw.dst, raw.dst_sid));
        // Session names are reused after a process has ended: the last session is the most likely.
        known.into_iter().flatten().rev().any(|direction| direction.open(bytes))
    }
}

impl Recorded {
    fn open(&mut self, bytes: &mut [u8]) -> bool {
        let counter = nearest(self.last, sealed::counter(bytes));
        let SealFormat { mode, key_frames_bits } = self.secret.of.format;
        let generation = counter >> key_frames_bits;
        let first = || Chain::new(cipher(self.secret.of.aes), self.secret.of.secret.clone());
        let known = self.chain.get_or_insert_with(first);
        // A frame that was overtaken: its key is derived from the first link.
        let is_old = known.generation > generation;
        let mut derived = is_old.then(first);
        let from = if is_old { 0 } else { known.generation };
        if generation - from > KEYS_AHEAD_MAX {
            return false;
        }
        for _ in from..generation {
            derived = Some(derived.as_ref().unwrap_or(known).next());
        }
        let before = bytes.to_vec();
        let key = &derived.as_ref().unwrap_or(known).key;
        let is_open = open_with(key, mode, nonce(counter), bytes);
        if !is_open {
            bytes.copy_from_slice(&before);
            return false;
        }
        self.last = counter;
        // A later key is kept only after the tag has proved that the counter is authentic.
        if !is_old && derived.is_some() {
            self.chain = derived;
        }
        true
    }
}

/// The number nearest to `last` with the low 32 bits `low`.
fn nearest(last: u64, low: u32) -> u64 {
    let ahead = low.wrapping_sub(last as u32) as i32;
    last.checked_add_signed(ahead.into()).unwrap_or(low.into())
}
