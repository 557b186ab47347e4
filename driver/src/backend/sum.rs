//! The Internet checksum (RFC 1071): the one's complement sum of 16-bit words.

/// Folds the carries of a sum of 16-bit words.
#[inline]
pub(super) fn fold(sum: u32) -> u16 {
    let sum = (sum & 0xffff) + (sum >> 16);
    (sum + (sum >> 16)) as u16
}

/// The sum of the 32-bit words of `bytes`, the last padded with zeros, in memory order. Without
/// carries to fold, so that the compiler vectorizes it.
#[inline(always)]
pub(super) fn sum_of_words(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks::<4>();
    let mut last = [0; 4];
    last[..rest.len()].copy_from_slice(rest);
    // A datagram has too few words to overflow.
    let whole =
        words.iter().fold(0_u64, |sum, word| sum.wrapping_add(u32::from_ne_bytes(*word).into()));
    whole + u64::from(u32::from_ne_bytes(last))
}

/// Folds all carries of a [`sum_of_words`] of less than 2^48, in memory order.
#[inline]
pub(super) fn folded(sum: u64) -> u16 {
    let sum = (sum & 0xffff_ffff) + (sum >> 32);
    let sum = (sum & 0xffff) + (sum >> 16);
    fold(((sum & 0xffff) + (sum >> 16)) as u32)
}
