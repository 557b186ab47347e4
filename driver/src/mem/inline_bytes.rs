//! A few bytes passed in registers.

use super::copy_inline;

/// Most bytes that [`Span::to_u128`](super::Span::to_u128) and `RxFrame::u128_at` copy.
pub const U128_LEN: usize = 16;

/// Up to [`MAX`](Self::MAX) bytes: the body of a short frame. Held as integers rather than an
/// array, so that they stay in registers until they are written to the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InlineBytes {
    first: u128,
    second: u128,
    len: usize,
}

impl InlineBytes {
    /// Most bytes.
    pub const MAX: usize = 2 * U128_LEN;

    /// No bytes.
    pub const NONE: Self = Self { first: 0, second: 0, len: 0 };

    /// The lower `len` bytes of `bytes`, little-endian, at most [`U128_LEN`]; those above are 0.
    #[inline(always)]
    pub const fn one(bytes: u128, len: usize) -> Self {
        Self { first: bytes, second: 0, len: if len < U128_LEN { len } else { U128_LEN } }
    }

    /// As [`one`](Self::one) twice, one behind the other.
    #[inline(always)]
    pub const fn pair(a: u128, b: u128, len: usize) -> Self {
        match len {
            8 => Self { first: a | b << 64, second: 0, len: 16 },
            0 => Self::NONE,
            1..U128_LEN => {
                let bits = 8 * len as u32;
                Self { first: a | b << bits, second: b >> (128 - bits), len: 2 * len }
            }
            _ => Self { first: a, second: b, len: Self::MAX },
        }
    }

    /// How many there are.
    #[inline(always)]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there is none.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// All of them, and zeros behind.
    pub fn to_bytes(&self) -> [u8; Self::MAX] {
        let mut bytes = [0; Self::MAX];
        let (first, second) = bytes.split_at_mut(U128_LEN);
        first.copy_from_slice(&self.first.to_le_bytes());
        second.copy_from_slice(&self.second.to_le_bytes());
        bytes
    }

    /// Writes all of them to `to`.
    ///
    /// # Safety
    /// As many bytes are writable at `to`. Others may read them meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn write_to(self, to: *mut u8) {
        // SAFETY: 4, 8 or 16 bytes if there are as many, else passed on.
        unsafe {
            match self.len {
                0 => {}
                4 => to.cast::<[u8; 4]>().write_unaligned((self.first as u32).to_le_bytes()),
                8 => to.cast::<[u8; 8]>().write_unaligned((self.first as u64).to_le_bytes()),
                16 => to.cast::<[u8; 16]>().write_unaligned(self.first.to_le_bytes()),
                _ => self.write_odd(to),
            }
        }
    }

    /// # Safety
    /// As [`write_to`](Self::write_to).
    #[inline(never)]
    unsafe fn write_odd(self, to: *mut u8) {
        // SAFETY: `len` is at most the length of the array (`one`, `pair`), which is ours alone.
        unsafe { copy_inline(self.to_bytes().as_ptr(), to, self.len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every length of one and of two pieces against arrays, with guards on both sides.
    #[test]
    fn few_bytes_are_written_as_they_are() {
        let source: Vec<u8> = (1..=2 * U128_LEN as u8).collect();
        let number = |bytes: &[u8]| {
            let mut all = [0; U128_LEN];
            all[..bytes.len()].copy_from_slice(bytes);
            u128::from_le_bytes(all)
        };
        for len in 0..=U128_LEN {
            let (a, b) = (&source[..len], &source[U128_LEN..U128_LEN + len]);
            let pair = [a, b].concat();
            let cases = [
                (InlineBytes::one(number(a), len), a),
                (InlineBytes::pair(number(a), number(b), len), &pair),
            ];
            for (few, want) in cases {
                assert_eq!((few.len(), few.is_empty()), (want.len(), want.is_empty()));
                assert_eq!(few.to_bytes()[..few.len()], *want);
                let mut memory = [0xee_u8; InlineBytes::MAX + 2];
                // SAFETY: `MAX` bytes behind the first one are in the array.
                unsafe { few.write_to(memory.as_mut_ptr().add(1)) };
                assert_eq!(memory[1..=want.len()], *want);
                assert!(memory[0] == 0xee && memory[1 + want.len()..].iter().all(|&b| b == 0xee));
            }
        }
        assert_eq!(InlineBytes::one(0, U128_LEN + 1).len(), U128_LEN);
    }
}
