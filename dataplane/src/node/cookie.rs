//! Address validation: proof that the sender of an OPEN receives frames at its address, without
//! state for senders that do not. The cookie is a keyed hash of the names of the wanted session;
//! the opener returns it in a second OPEN.

use barewire_driver::port::Station;

use crate::types::Instant;
use crate::wire::OpenOp;

/// Shift from nanoseconds to the time unit of a cookie, 8.6 s. A cookie is valid in its own unit
/// and in the next, so for at least 8.6 s: longer than any round trip, and than most programs go
/// without a poll. A later OPEN is answered by another challenge.
const UNIT_BITS: u32 = 33;

/// The secret key of a node's cookies and of its random numbers.
#[derive(Debug)]
pub(crate) struct Secret {
    key: [u64; 2],
    /// Number of random numbers drawn.
    drawn: u64,
}

impl Secret {
    /// Derives the secret from a seed.
    pub(crate) fn of_seed(seed: u64) -> Self {
        let key = [seed, 0x6261_7265_7769_7265];
        Self { key: [siphash(key, &[0]), siphash(key, &[1])], drawn: 0 }
    }

    /// The next random number; earlier ones do not reveal it.
    pub(crate) fn draw(&mut self) -> u64 {
        self.drawn += 1;
        siphash(self.key, &[self.drawn])
    }

    /// The cookie for the OPEN `op` of `station`; never 0.
    pub(crate) fn cookie(&self, now: Instant, station: Station, op: &OpenOp) -> u64 {
        self.cookie_of_unit(now.0 >> UNIT_BITS, station, op)
    }

    /// Whether `op` of `station` contains a valid cookie.
    pub(crate) fn is_proof(&self, now: Instant, station: Station, op: &OpenOp) -> bool {
        let unit = now.0 >> UNIT_BITS;
        let mut good = [unit, unit.wrapping_sub(1)].into_iter();
        op.cookie != 0 && good.any(|unit| self.cookie_of_unit(unit, station, op) == op.cookie)
    }

    fn cookie_of_unit(&self, unit: u64, station: Station, op: &OpenOp) -> u64 {
        let session = u64::from(op.sid) | u64::from(op.epoch) << 32;
        siphash(self.key, &[unit, station.word(), op.inc, session]).max(1)
    }
}

/// SipHash-2-4 of the words, as little-endian bytes.
fn siphash(key: [u64; 2], words: &[u64]) -> u64 {
    let mut v = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    let last = (words.len() as u64 * 8) << 56;
    for word in words.iter().copied().chain([last]) {
        v[3] ^= word;
        (0..2).for_each(|_| round(&mut v));
        v[0] ^= word;
    }
    v[2] ^= 0xff;
    (0..4).for_each(|_| round(&mut v));
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn round(v: &mut [u64; 4]) {
    v[0] = v[0].wrapping_add(v[1]);
    v[2] = v[2].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(13) ^ v[0];
    v[3] = v[3].rotate_left(16) ^ v[2];
    v[0] = v[0].rotate_left(32);
    v[2] = v[2].wrapping_add(v[1]);
    v[0] = v[0].wrapping_add(v[3]);
    v[1] = v[1].rotate_left(17) ^ v[2];
    v[3] = v[3].rotate_left(21) ^ v[0];
    v[2] = v[2].rotate_left(32);
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Source: the vectors beside the reference implementation, key 00..0f, message 00..
    #[test]
    fn siphash_is_the_one_of_its_authors() {
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(siphash(key, &[]), 0x726f_db47_dd0e_0e31);
        assert_eq!(siphash(key, &[key[0]]), 0x93f5_f579_9a93_2462);
    }

    #[test]
    fn a_cookie_is_good_for_its_open_and_for_some_seconds() {
        let secret = Secret::of_seed(7);
        let station = Station::at([2, 0, 0, 0, 0, 1]);
        let now = Instant(1 << 40);
        let first = OpenOp { sid: 5, epoch: 6, inc: 7, ..OpenOp::default() };
        let open = OpenOp { cookie: secret.cookie(now, station, &first), ..first };
        let second = 1_000_000_000;
        assert!(
            secret.is_proof(now, station, &open)
                && secret.is_proof(now + 8 * second, station, &open)
        );
        assert!(!secret.is_proof(now + 18 * second, station, &open), "for ever");
        let others = [
            OpenOp { sid: 4, ..open },
            OpenOp { epoch: 5, ..open },
            OpenOp { inc: 8, ..open },
            OpenOp { cookie: open.cookie ^ 1, ..open },
            first,
        ];
        assert!(others.iter().all(|op| !secret.is_proof(now, station, op)));
        assert!(
            !secret.is_proof(now, Station::at([2, 0, 0, 0, 0, 2]), &open),
            "of another station"
        );
        assert!(!Secret::of_seed(8).is_proof(now, station, &open), "of another life");
    }
}
