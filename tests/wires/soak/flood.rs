//! The stranger on the segment: sends OPENs of stations that do not exist.

use std::time::{Duration, Instant};

use barewire_tests::forge::open_of_nobody;
use barewire_tests::nodes::FABRIC;
use barewire_tests::rng::Rng;

use crate::raw::RawSocket;
use crate::worker::say;

/// OPENs in a millisecond.
const PER_MS: u64 = 10;

/// Hears `FLOOD mac incarnation milliseconds` and says `FLOODED count`.
pub(crate) fn run() {
    say("ADDR none");
    let socket = RawSocket::open(FABRIC).unwrap();
    let mut rng = Rng::new(u64::from(std::process::id()), 3);
    for line in std::io::stdin().lines().map_while(|line| line.ok()) {
        let words: Vec<&str> = line.split(' ').collect();
        let ["FLOOD", mac, inc, ms] = words[..] else { return };
        let (victim, target_inc) = (mac.parse().unwrap(), inc.parse().unwrap());
        let until = Instant::now() + Duration::from_millis(ms.parse().unwrap());
        let mut sent = 0;
        while Instant::now() < until {
            for _ in 0..PER_MS {
                // A full queue on the way is no matter of ours.
                let frame = open_of_nobody(&mut rng, victim, target_inc, true);
                sent += u64::from(socket.send(&frame).is_ok());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        say(&format!("FLOODED {sent}"));
    }
}
