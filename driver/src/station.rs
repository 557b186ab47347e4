//! Stations: the processes of a node behind the one address of its NIC.

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::mac::{BadMac, MacAddr};

/// Where a process is reached: the address of its node's NIC, and its number among the processes
/// behind that.
///
/// As text `02:00:00:00:00:01`, and `02:00:00:00:00:01.3` where the number is not 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Station {
    /// The NIC's.
    pub mac: MacAddr,
    /// 0 for the first process, or the only one; at most [`NUMBER_MAX`](Self::NUMBER_MAX), or
    /// [`EVERY`](Self::EVERY).
    pub number: u16,
}

impl Station {
    /// Highest number of a process.
    pub const NUMBER_MAX: u16 = 0xfffe;
    /// Numbers of processes that open the NIC's port themselves: a range for each who gives numbers
    /// behind one MAC.
    pub const OF_PORT: Range<u16> = 0..0x4000;
    /// Numbers of processes in the segment of a switch, of its own user.
    pub const OF_SWITCH: Range<u16> = 0x4000..0x8000;
    /// Numbers of those that ask a switch for a place.
    pub const OF_CLIENTS: Range<u16> = 0x8000..Self::EVERY;
    /// The number of all processes of a node, in frames to a group.
    pub const EVERY: u16 = 0xffff;
    /// All stations of the segment.
    pub const BROADCAST: Self = Self { mac: MacAddr::BROADCAST, number: Self::EVERY };

    /// Station 0 at this address.
    pub const fn at(mac: [u8; 6]) -> Self {
        Self { mac: MacAddr(mac), number: 0 }
    }

    /// Whether it is a group of stations.
    pub const fn is_group(self) -> bool {
        self.mac.is_group()
    }

    /// Whether a process can have this address.
    pub fn is_single(self) -> bool {
        self.mac.is_single() && self.number <= Self::NUMBER_MAX
    }

    /// The address as one word: the MAC in the lower 48 bits, in the order in which it lies in a
    /// frame, the number above it.
    pub const fn word(self) -> u64 {
        self.mac.frame_word() | (self.number as u64) << 48
    }

    /// The inverse of [`word`](Self::word).
    pub const fn from_word(word: u64) -> Self {
        let [a, b, c, d, e, f, low, high] = word.to_le_bytes();
        Self { mac: MacAddr([a, b, c, d, e, f]), number: u16::from_le_bytes([low, high]) }
    }
}

impl From<MacAddr> for Station {
    fn from(mac: MacAddr) -> Self {
        Self { mac, number: 0 }
    }
}

impl fmt::Display for Station {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            0 => fmt::Display::fmt(&self.mac, f),
            number => f.pad(&format!("{}.{number}", self.mac)),
        }
    }
}

impl fmt::Debug for Station {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Station {
    type Err = BadMac;

    fn from_str(s: &str) -> Result<Self, BadMac> {
        let Some((mac, number)) = s.split_once('.') else {
            return Ok(Self::from(s.parse::<MacAddr>()?));
        };
        let is_number = number.bytes().all(|digit| digit.is_ascii_digit());
        let number = number.parse().ok().filter(|&n| is_number && n <= Self::NUMBER_MAX);
        Ok(Self { mac: mac.parse()?, number: number.ok_or_else(|| BadMac(s.to_owned()))? })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_the_same_as_text_and_as_a_word() {
        let mac = [2, 3, 4, 5, 6, 7];
        for (number, text) in [(0, "02:03:04:05:06:07"), (0xfffe, "02:03:04:05:06:07.65534")] {
            let station = Station { number, ..Station::at(mac) };
            assert_eq!((station.to_string().as_str(), text.parse()), (text, Ok(station)));
            assert_eq!(Station::from_word(station.word()), station);
            assert!(station.is_single());
        }
        for bad in [
            "02:03:04:05:06:07.",
            "02:03:04:05:06:07.65535",
            "02:03:04:05:06:07.+3",
            "02:03.1",
            "02:03:04:05:06:+7",
            ".1",
            "x",
        ] {
            assert!(bad.parse::<Station>().is_err(), "{bad}");
        }
        for nobody in [Station::BROADCAST, Station::default(), Station::at([1, 0, 0, 0, 0, 1])] {
            assert!(!nobody.is_single());
        }
    }
}
