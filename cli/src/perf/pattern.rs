//! Bytes that say which message of a run they belong to and where in it they stand, so that a lost,
//! repeated, shifted or torn piece is seen.

/// Multiplier of a 64-bit mixing step (splitmix64's increment, odd).
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The eight bytes at `8 * index` of message `number`.
fn word(number: u64, index: u64) -> u64 {
    let mixed = (number.wrapping_add(1)).wrapping_mul(STEP) ^ index.wrapping_mul(STEP << 1 | 1);
    mixed ^ (mixed >> 32)
}

/// Fills `buf` with message `number`.
pub(super) fn fill(number: u64, buf: &mut [u8]) {
    let mut chunks = buf.chunks_exact_mut(8);
    let mut index = 0;
    for chunk in &mut chunks {
        chunk.copy_from_slice(&word(number, index).to_le_bytes());
        index += 1;
    }
    let rest = chunks.into_remainder();
    let last = word(number, index).to_le_bytes();
    rest.copy_from_slice(&last[..rest.len()]);
}

/// Whether `buf` is message `number`, every byte of it.
pub(super) fn holds(number: u64, buf: &[u8]) -> bool {
    let chunks = buf.chunks_exact(8);
    let rest = chunks.remainder();
    let mut index = 0;
    for chunk in chunks {
        if chunk != word(number, index).to_le_bytes() {
            return false;
        }
        index += 1;
    }
    rest == &word(number, index).to_le_bytes()[..rest.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_wrong_byte_and_every_other_message_is_seen() {
        for len in [1, 7, 8, 9, 64, 1000] {
            let mut buf = vec![0; len];
            fill(5, &mut buf);
            assert!(holds(5, &buf));
            for at in 0..len {
                buf[at] ^= 1;
                assert!(!holds(5, &buf), "byte {at} of {len}");
                buf[at] ^= 1;
            }
            if len >= 8 {
                assert!(!holds(4, &buf) && !holds(6, &buf));
                buf.rotate_left(8 % len);
                assert!(len == 8 || !holds(5, &buf), "shifted by one word of {len}");
            }
        }
        assert!(holds(1, &[]));
    }
}
