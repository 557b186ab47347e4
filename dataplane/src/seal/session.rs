//! The keys of a session: frames of ours are sealed, frames of the peer opened, both where they
//! lie.

use aws_lc_rs::aead::Aad;

use super::chain::{Chain, cipher, nonce, open_with};
use super::key::{Mode, SealFormat, Secret, secret_of};
use super::log::Unnamed;
use super::replay::ReplayWindow;
use crate::plant::{Bug, planted};
use crate::wire::{BASE_LEN, TAG_LEN, sealed};

/// Frames in a row that may be lost while a session lives: some windows.
const LOST_MAX: u64 = 1 << 14;

/// Keys that are derived for one frame at most, however short the time of a key is.
const AHEAD_MAX: u64 = 16;

/// Why a frame was not opened. Nothing has changed then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// Its tag is not that of its bytes under this session's key.
    Forged,
    /// A frame with its counter was opened before, or it is too old to tell.
    Replayed,
}

/// The keys of a session, both directions.
#[derive(Debug)]
pub struct SessionKeys {
    tx: Chain,
    /// Counter of the next frame.
    tx_next: u64,
    rx: Chain,
    /// The key before, for frames that were overtaken.
    rx_before: Option<Chain>,
    replay: ReplayWindow,
    /// The key of the peer's when somebody looked last.
    seen: u64,
    mode: Mode,
    key_frames_bits: u32,
}

impl SessionKeys {
    /// The keys of two secrets: what this end seals with and what its peer does. `aes` if both ends
    /// have AES in their processors.
    pub(super) fn new(terms: SealFormat, aes: bool, [tx, rx]: [Secret; 2]) -> Self {
        let cipher = cipher(aes);
        Self {
            tx: Chain::new(cipher, tx),
            tx_next: 0,
            rx: Chain::new(cipher, rx),
            rx_before: None,
            replay: ReplayWindow::new(),
            seen: 0,
            mode: terms.mode,
            key_frames_bits: terms.key_frames_bits,
        }
    }

    /// The keys of these secrets, this end's and the peer's, for `1 << key_frames_bits` frames to a
    /// key, 2 to 30. `aes` chooses the cipher. For tests: those of a session are of its handshake.
    pub fn of_secrets(mode: Mode, key_frames_bits: u32, aes: bool, secrets: [[u8; 32]; 2]) -> Self {
        let secrets = secrets.map(|mut bytes| secret_of(&mut bytes));
        Self::new(SealFormat { mode, key_frames_bits }, aes, secrets)
    }

    /// What the keys are derived from, as long as no frame was sealed or opened: the secrets of the
    /// frames of this end, whose addresses and name are `tx`, and of those of the peer.
    pub(crate) fn secrets(&self, aes: bool) -> [Unnamed; 2] {
        let terms = SealFormat { mode: self.mode, key_frames_bits: self.key_frames_bits };
        [&self.tx, &self.rx].map(|chain| Unnamed { aes, terms, secret: chain.secret().clone() })
    }

    /// Seals a frame: `bytes` are its base, what is to be protected, and room for the tag. Writes
    /// the counter and the tag, and encrypts what lies between if the mode says so. Each call uses
    /// another counter, whatever becomes of the frame.
    ///
    /// # Panics
    /// If there is no room for base and tag.
    pub fn seal(&mut self, bytes: &mut [u8]) {
        let counter = self.tx_next;
        self.tx_next += u64::from(!planted(Bug::CounterKept));
        let generation = counter >> self.key_frames_bits;
        if self.tx.generation != generation {
            self.tx = self.tx.next();
        }
        sealed::set_counter(bytes, counter as u32);
        let (head, rest) = bytes.split_at_mut(BASE_LEN);
        let (body, tag) = rest.split_at_mut(rest.len() - TAG_LEN);
        let (key, nonce) = (&self.tx.key, nonce(counter));
        let sealed = match self.mode {
            Mode::Encrypted => key.seal_in_place_separate_tag(nonce, Aad::from(head), body),
            Mode::Authenticated => {
                let all = &bytes[..bytes.len() - TAG_LEN];
                let sealed = key.seal_in_place_separate_tag(nonce, Aad::from(all), &mut []);
                let len = bytes.len();
                let tag = sealed.expect("a frame is no longer than a cipher takes");
                bytes[len - TAG_LEN..].copy_from_slice(tag.as_ref());
                return;
            }
        };
        tag.copy_from_slice(sealed.expect("a frame is no longer than a cipher takes").as_ref());
    }

    /// Which key of the session's the last frame of this end has left under, or [`renew`] has gone
    /// on to; from 0.
    ///
    /// [`renew`]: Self::renew
    pub fn generation(&self) -> u64 {
        self.tx.generation
    }

    /// Counters that frames of this end have used.
    #[cfg(test)]
    pub(crate) fn used(&self) -> u64 {
        self.tx_next
    }

    /// Goes on to the next key for the frames of this end, and forgets the one before. The peer
    /// follows with the first frame that it gets, but by no more than one key: it must have opened
    /// a frame under the key that there is now.
    pub fn renew(&mut self) {
        self.tx = self.tx.next();
        self.tx_next = self.tx.generation << self.key_frames_bits;
    }

    /// Forgets the peer's key before the one that there is now, which overtaken frames need, if it
    /// was that already at the last call.
    pub fn forget_overtaken(&mut self) {
        if std::mem::replace(&mut self.seen, self.rx.generation) == self.rx.generation {
            self.rx_before = None;
        }
    }

    /// Opens a frame of the peer: `bytes` are its base, what was protected, and the tag. Decrypts
    /// what lies between.
    ///
    /// # Errors
    /// See [`OpenError`]. What was encrypted may be overwritten then.
    pub fn open(&mut self, bytes: &mut [u8]) -> Result<(), OpenError> {
        if bytes.len() < BASE_LEN + TAG_LEN {
            return Err(OpenError::Forged);
        }
        let counter = self.replay.whole(sealed::counter(bytes));
        if !self.replay.admits(counter) {
            return Err(OpenError::Replayed);
        }
        let generation = counter >> self.key_frames_bits;
        let ahead = generation.saturating_sub(self.rx.generation);
        // Whoever forges a counter makes this end derive them for nothing.
        if ahead > (1 + (LOST_MAX >> self.key_frames_bits)).min(AHEAD_MAX) {
            return Err(OpenError::Forged);
        }
        let next = (0..ahead)
            .fold(None, |chain: Option<Chain>, _| Some(chain.as_ref().unwrap_or(&self.rx).next()));
        let chain = match &next {
            Some(next) => next,
            None if generation == self.rx.generation => &self.rx,
            None => {
                let before = self.rx_before.as_ref();
                before.filter(|c| c.generation == generation).ok_or(OpenError::Forged)?
            }
        };
        if !open_with(&chain.key, self.mode, nonce(counter), bytes) {
            return Err(OpenError::Forged);
        }
        if let Some(next) = next {
            self.rx_before = Some(std::mem::replace(&mut self.rx, next));
        }
        self.replay.note(counter);
        Ok(())
    }
}

/// Whether this processor encrypts with AES itself. Without, ChaCha20-Poly1305 is faster, and takes
/// a time that does not tell the key.
pub fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}
