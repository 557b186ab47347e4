//! The keys of a session: seals frames of this end, and opens frames of the peer, in place.

use aws_lc_rs::aead::Aad;

use super::chain::{Chain, cipher, nonce, open_with};
use super::key::{Mode, SealFormat, Secret, secret_of};
use super::log::UnboundSecret;
use super::replay::ReplayWindow;
use crate::plant::{Bug, planted};
use crate::wire::{BASE_LEN, TAG_LEN, sealed};

/// Consecutive frames that may be lost during a session: several windows.
const LOST_MAX: u64 = 1 << 14;

/// Most keys that are derived for one frame, however few frames a key seals.
const KEYS_AHEAD_MAX: u64 = 16;

/// Why a frame was not opened. The keys are unchanged then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OpenError {
    /// The tag is wrong for the frame's bytes under this session's key.
    Forged,
    /// A frame with the same counter was opened before, or the counter is too old to decide.
    Replayed,
}

/// The keys of a session in both directions.
#[derive(Debug)]
pub struct SessionKeys {
    tx: Chain,
    /// Counter of the next frame.
    tx_next: u64,
    rx: Chain,
    /// The previous receive key, for overtaken frames.
    rx_before: Option<Chain>,
    replay: ReplayWindow,
    /// The generation of the receive key at the last [`forget_overtaken`](Self::forget_overtaken).
    seen: u64,
    mode: Mode,
    key_frames_bits: u32,
}

impl SessionKeys {
    /// The keys derived from two secrets: that of this end's frames and that of the peer's. `aes`:
    /// both ends have AES instructions.
    pub(super) fn new(format: SealFormat, aes: bool, [tx, rx]: [Secret; 2]) -> Self {
        let cipher = cipher(aes);
        Self {
            tx: Chain::new(cipher, tx),
            tx_next: 0,
            rx: Chain::new(cipher, rx),
            rx_before: None,
            replay: ReplayWindow::new(),
            seen: 0,
            mode: format.mode,
            key_frames_bits: format.key_frames_bits,
        }
    }

    /// The keys derived from these secrets, this end's and the peer's, with `1 << key_frames_bits`
    /// frames per key, 2 to 30. `aes` selects the cipher. For tests: a session's keys come from its
    /// handshake.
    pub fn of_secrets(mode: Mode, key_frames_bits: u32, aes: bool, secrets: [[u8; 32]; 2]) -> Self {
        let secrets = secrets.map(|mut bytes| secret_of(&mut bytes));
        Self::new(SealFormat { mode, key_frames_bits }, aes, secrets)
    }

    /// The secrets that the keys are derived from, before any frame was sealed or opened: of this
    /// end's frames, then of the peer's.
    pub(crate) fn secrets(&self, aes: bool) -> [UnboundSecret; 2] {
        let format = SealFormat { mode: self.mode, key_frames_bits: self.key_frames_bits };
        [&self.tx, &self.rx].map(|chain| UnboundSecret {
            aes,
            format,
            secret: chain.secret().clone(),
        })
    }

    /// Seals a frame: `bytes` are its base, the bytes to protect, and room for the tag. Writes the
    /// counter and the tag, and encrypts the bytes in between if the mode says so. Each call uses a
    /// new counter, whether or not the frame is sent.
    ///
    /// # Panics
    /// If `bytes` is shorter than base and tag.
    pub fn seal(&mut self, bytes: &mut [u8]) {
        let counter = self.tx_next;
        self.tx_next += u64::from(!planted(Bug::NonceReused));
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

    /// Generation of this end's current key, from 0: that of the last sealed frame, or of the last
    /// [`renew`].
    ///
    /// [`renew`]: Self::renew
    pub fn generation(&self) -> u64 {
        self.tx.generation
    }

    /// Number of counters that this end has used.
    #[cfg(test)]
    pub(crate) fn used(&self) -> u64 {
        self.tx_next
    }

    /// Advances to the next key for this end's frames, and forgets the current one. The peer
    /// follows with the first frame that it receives, but by one key only: it must have opened a
    /// frame under the current key.
    pub fn renew(&mut self) {
        self.tx = self.tx.next();
        self.tx_next = self.tx.generation << self.key_frames_bits;
    }

    /// Forgets the peer's previous key, which overtaken frames need, if the current key is the same
    /// as at the last call.
    pub fn forget_overtaken(&mut self) {
        if std::mem::replace(&mut self.seen, self.rx.generation) == self.rx.generation {
            self.rx_before = None;
        }
    }

    /// Opens a frame of the peer: `bytes` are its base, the protected bytes, and the tag. Decrypts
    /// the protected bytes in place.
    ///
    /// # Errors
    /// See [`OpenError`]. The protected bytes may be overwritten then.
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
        // A forged counter would make this end derive keys in vain.
        if ahead > (1 + (LOST_MAX >> self.key_frames_bits)).min(KEYS_AHEAD_MAX) {
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

/// Whether this processor has AES instructions. Without them, ChaCha20-Poly1305 is faster, and its
/// run time does not depend on the key.
pub fn has_aes() -> bool {
    #[cfg(target_arch = "x86_64")]
    return std::arch::is_x86_feature_detected!("aes");
    #[cfg(target_arch = "aarch64")]
    return std::arch::is_aarch64_feature_detected!("aes");
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    return false;
}
