//! Which stations the frames claim to be from that were refused for their seal: the heaviest few,
//! in memory that does not grow. Any sender can claim any address, and many of them, so counts are
//! kept as Space-Saving does (Metwally, Agrawal, El Abbadi 2005): a station that is not listed
//! takes the place, and the count, of the one that was refused least. So every station is listed
//! whose frames are more than one in [`CLAIMS_MAX`] of all that were refused.

use barewire_driver::port::Station;

use super::{NodeCounters, Observed};

/// Stations that are listed.
pub const CLAIMS_MAX: usize = 8;

/// Why a frame was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SealFault {
    /// Its tag, or the handshake's message, is not right.
    Forged,
    /// It is not sealed.
    Clear,
    /// It came before, or too late to tell.
    Replayed,
    /// Its certificate is refused, or not verified because too many were.
    Certificate,
}

/// Frames refused that claim to be from one station.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    /// The station that they name as their source.
    pub station: Station,
    /// Frames by cause: forged, not sealed, replayed, with a certificate that is refused or, beyond
    /// the limit, not verified. Since the station was listed.
    pub counts: [u64; 4],
    /// So many frames of others were counted in its place before.
    pub others: u64,
}

impl Claim {
    /// Most frames that can have been of it.
    pub fn most(&self) -> u64 {
        self.counts.iter().sum::<u64>() + self.others
    }
}

/// See the module.
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

    /// Lists a station.
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
    /// Counts a frame that claims to be from `station` and was refused for its seal.
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
            // By its own cause.
            SealFault::Certificate => {}
        }
    }

    /// Stations that refused frames claim to be from, at most [`CLAIMS_MAX`], in no order. An
    /// address is what a frame says: anybody can have sent it.
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
