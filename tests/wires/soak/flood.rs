//! The stranger on the segment: sends OPENs of stations that do not exist.

use std::time::{Duration, Instant};

use barewire_dataplane::psn::Psn;
use barewire_dataplane::wire::{self, Base, Op, OpenOp, Ty};
use barewire_driver::port::MacAddr;
use barewire_tests::nodes::FABRIC;
use barewire_tests::rng::Rng;

use crate::raw::RawSocket;
use crate::worker::say;

/// OPENs in a millisecond.
const PER_MS: u64 = 10;

/// Stations that it pretends to be: few enough that the bridge can learn them all.
const STATIONS: u64 = 200;

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
                sent += u64::from(socket.send(&forged(&mut rng, victim, target_inc)).is_ok());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        say(&format!("FLOODED {sent}"));
    }
}

/// An OPEN for the victim, as long as what it announces or as short as can be.
pub(crate) fn forged(rng: &mut Rng, victim: MacAddr, target_inc: u64) -> Vec<u8> {
    let src = MacAddr([2, 0xf0, 0, 0, 0, rng.below(STATIONS) as u8]);
    let (dst, psn) = (victim, Psn(rng.next() as u32));
    let base = Base {
        dst,
        src,
        ty: Ty::Open,
        ar: false,
        rtx: false,
        crc: true,
        dst_sid: 0,
        psn,
        cack: Psn(0),
        grant: 0,
        plen: 0,
    };
    let op = OpenOp {
        sid: rng.next() as u32 | 1,
        epoch: rng.next() as u32 | 1,
        inc: rng.next() | 1,
        target_inc,
        max_frame: 1500,
        window: 256,
        grant: 16,
        cookie: if rng.chance(0.3) { rng.next() } else { 0 },
        ..OpenOp::default()
    };
    let mut bytes = wire::frame(&base, &Op::Open(op), &[]);
    bytes.resize(rng.pick(&[bytes.len(), bytes.len(), 300, 1514]).max(bytes.len()), 0);
    bytes
}
