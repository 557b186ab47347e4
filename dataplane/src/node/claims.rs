//! Source addresses of frames that were refused for their seal: the most frequent ones, in bounded
//! memory. Any sender can forge any address, and many of them, so counts are kept by the
//! Space-Saving algorithm (Metwally, Agrawal, El Abbadi 2005): a station that is not listed takes
//! the place, and the count, of the listed station with the lowest count. So every station is
//! listed whose frames are more than one in [`CLAIMS_MAX`] of all refused frames.

use barewire_driver::port::Station;

use super::{NodeCounters, Observed};

/// Number of stations that are listed.
pub const CLAIMS_MAX: usize = 8;

/// Reason for which a frame was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SealFault {
    /// The tag, or the handshake message, is wrong.
    Forged,
    /// The frame is not sealed.
    Clear,
    /// The frame is a duplicate, or too old to check.
    Replayed,
    /// The certificate is refused, or was not verified because too many were.
    Certificate,
}

/// Refused frames with one source address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The source address of the frames.
    pub station: Station,
    /// Frames by cause: forged, not sealed, replayed, with a certificate that is refused or, beyond
    /// the limit, not verified. Since the station was listed.
    pub counts: [u64; 4],
    /// Frames of other stations that were counted in this place before.
    pub others: u64,
}

impl Claim {
    /// Upper bound of the refused frames with this source address.
    pub fn most(&self) -> u64 {
        self.counts.iter().sum::<u64>() + self.others
    }
}

/// The list of refused source addresses.
#[derive(Debug, Default)]
pub(crate) struct Claims {
    listed: Vec<Claim>,
}

impl Claims {
    fn note(&mut self, station: Station, fault: SealFault) {
        let known = self.listed.iter().position(|claim| claim.station == station);
        let at = known.unwrap_or_else(|| self.place(station));
        self.listed[at].counts[fault as usize] += 1;
    }

    /// Lists a station, and returns its index.
    fn place(&mut self, station: Station) -> usize {
        let new = |others| Claim { station, counts: [0; 4], others };
        if self.listed.len() < CLAIMS_MAX {
            self.listed.push(new(0));
            return self.listed.len() - 1;
        }
        let least = (0..CLAIMS_MAX).min_by_key(|&at| self.listed[at].most()).unwrap_or(0);
        self.listed[least] = new(self.listed[least].most());
        least
    }
}

impl Observed {
    /// Counts a frame with source address `station` that was refused for its seal.
    #[cold]
    pub(super) fn note_claim(
        &mut self,
        counters: &mut NodeCounters,
        station: Station,
        fault: SealFault,
    ) {
        self.claims.note(station, fault);
        match fault {
            SealFault::Forged => counters.rx_forged += 1,
            SealFault::Clear => counters.rx_clear += 1,
            SealFault::Replayed => counters.rx_replayed += 1,
            // Counted by its own cause.
            SealFault::Certificate => {}
        }
    }

    /// Source addresses of refused frames, at most [`CLAIMS_MAX`], in no order. A source address
    /// proves nothing: any station can have sent the frame.
    pub fn claims(&self) -> &[Claim] {
        &self.claims.listed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Goal: the station that sends a seventh of all stays listed with all of its frames, whatever
    /// addresses the others make up, and the list does not grow.
    #[test]
    fn the_heaviest_is_listed_among_many() {
        let mut claims = Claims::default();
        let heavy = Station::at([2, 9, 9, 9, 9, 9]);
        for n in 0..100_000_u32 {
            let [a, b, c, d] = n.to_le_bytes();
            claims.note(Station::at([2, a, b, c, d, 0]), SealFault::Clear);
            if n % 6 == 0 {
                claims.note(heavy, SealFault::Forged);
            }
        }
        assert_eq!(claims.listed.len(), CLAIMS_MAX);
        let found = claims.listed.iter().find(|claim| claim.station == heavy).unwrap();
        let sent = 100_000 / 6 + 1;
        assert!(found.counts[0] > sent / 2 && found.most() >= sent, "{found:?}");
        let all: u64 = claims.listed.iter().map(Claim::most).sum();
        assert_eq!(all, 100_000 + sent, "each frame is counted once");
    }
}
