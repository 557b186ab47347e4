//! The receive window: which packets from `rcv_nxt` on have arrived.
//!
//! Counts in distances, `psn - rcv_nxt`, and knows neither number: the caller moves `rcv_nxt` and
//! the window together.

/// What has arrived of the 256 packets from `rcv_nxt` on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RcvBitmap {
    words: [u64; Self::WORDS],
}

impl RcvBitmap {
    /// Packets in the window.
    pub const LEN: u32 = 64 * Self::WORDS as u32;

    const WORDS: usize = 4;

    /// A window in which nothing has arrived.
    pub const fn new() -> Self {
        Self { words: [0; Self::WORDS] }
    }

    /// Notes the packet `dist` after `rcv_nxt`, 0 to 255. False if it had arrived already.
    ///
    /// # Panics
    /// If `dist` is outside the window: the caller has to refuse such a packet before.
    #[inline]
    pub fn set(&mut self, dist: u32) -> bool {
        let word = &mut self.words[dist as usize / 64];
        let bit = 1 << (dist % 64);
        let fresh = *word & bit == 0;
        *word |= bit;
        fresh
    }

    /// Whether the packet `dist` after `rcv_nxt` has arrived; false outside the window.
    #[inline]
    pub fn is_set(&self, dist: u32) -> bool {
        self.words.get(dist as usize / 64).is_some_and(|w| w >> (dist % 64) & 1 == 1)
    }

    /// Moves the window on by `n` packets, however many. What falls out is forgotten.
    #[inline]
    pub fn advance(&mut self, n: u32) {
        let skip = n as usize / 64;
        let shift = n % 64;
        for i in 0..Self::WORDS {
            let low = self.words.get(i + skip).copied().unwrap_or(0) >> shift;
            let high = self.words.get(i + skip + 1).copied().unwrap_or(0);
            // Two shifts: one by 64 would be none at all.
            self.words[i] = low | (high << (63 - shift) << 1);
        }
    }

    /// How many packets from `rcv_nxt` on have arrived without a gap, 0 to 256.
    #[inline]
    pub fn leading_ones(&self) -> u32 {
        let mut run = 0;
        for word in self.words {
            let ones = word.trailing_ones();
            run += ones;
            if ones < 64 {
                break;
            }
        }
        run
    }

    /// Moves the window past the packets that have arrived without a gap and says how many:
    /// `rcv_nxt` moves on by as much.
    #[inline]
    pub fn take_run(&mut self) -> u32 {
        let run = self.leading_ones();
        if run > 0 {
            self.advance(run);
        }
        run
    }

    /// Whether nothing in the window has arrived, so an ACK needs no SACK.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.words == [0; Self::WORDS]
    }

    /// The window as an ACK carries it, and how many of the words it takes, 0 to 4.
    ///
    /// Word `i` bit `j` stands for PSN `cack + 1 + 64 i + j`, with `cack` = `rcv_nxt`: that packet
    /// itself is missing by definition and has no bit.
    #[inline]
    pub fn sack_words(&self) -> (u8, [u64; 4]) {
        let mut sack = *self;
        sack.advance(1);
        let n = Self::WORDS - sack.words.iter().rev().take_while(|&&w| w == 0).count();
        (n as u8, sack.words)
    }
}
