//! A user whose processes write arbitrary data into their segment, while other users exchange
//! frames.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};

use super::users::{ALICE, BOB, TestSwitch};
use super::*;
use crate::backend::lock;

/// Offsets in a segment of 256 places and rings of 64 KiB: see the module `layout`.
const MEMBERS: usize = 256;
const RING_LEN: usize = 1 << 16;
const LINKS_AT: usize = 4096 + MEMBERS * 256;
const BOARDS_AT: usize = LINKS_AT + MEMBERS * 4 * 4096;
const DATA_AT: usize = BOARDS_AT + MEMBERS * 32 * (256 << 10);
/// Places that are attacked most: those in use.
const LOW: usize = 8;

struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }
}

/// Kinds of attacks.
const KINDS: usize = 9;

/// A process with a descriptor of the segment.
struct Attacker {
    file: File,
    rng: Rng,
    /// Addresses to claim.
    victims: Vec<Station>,
}

impl Attacker {
    fn write(&self, at: usize, word: u64) {
        self.file.write_all_at(&word.to_le_bytes(), at as u64).unwrap();
    }

    fn place(&mut self) -> usize {
        let all = self.rng.below(8) == 0;
        self.rng.below(if all { MEMBERS } else { LOW })
    }

    fn ring(&mut self) -> usize {
        DATA_AT + (self.place() * MEMBERS + self.place()) * RING_LEN
    }

    /// A number that may mean something.
    fn number(&mut self) -> u64 {
        let some = [0, 1, 2, 3, 5, 63, 64, 65, 4095, 16_384, 1 << 32 | 1, 2 << 32 | 5, u64::MAX];
        match self.rng.below(4) {
            0 => self.rng.next(),
            1 => self.rng.next() % 200_000,
            _ => some[self.rng.below(some.len())],
        }
    }

    /// Does one attack, of the given kind or of any.
    fn attack(&mut self, kind: usize) {
        match if kind < KINDS { kind } else { self.rng.below(KINDS) } {
            0 => self.scribble_on_words(),
            1 => self.frames_of_any_length(),
            2 => self.ring_every_bell(),
            3 => self.open_links(),
            4 => self.rewrite_the_directory(),
            5 => self.give_back_what_was_not_taken(),
            6 => self.change_the_size(),
            7 => self.scribble_on_rings(),
            _ => self.hold_every_lock(),
        }
    }

    fn scribble_on_words(&mut self) {
        for _ in 0..64 {
            let at = self.rng.below(BOARDS_AT / 8) * 8;
            let word = self.number();
            self.write(at, word);
        }
    }

    /// Publishes words as a sender does, with invalid lengths.
    fn frames_of_any_length(&mut self) {
        const LENS: [u32; 13] =
            [0, 1, 13, 14, 31, 32, 60, 1514, 1515, 16_376, 65_550, u32::MAX - 1, u32::MAX];
        let at = self.ring();
        for granule in 0..64 {
            let len = match self.rng.below(4) {
                0 => self.rng.next() as u32,
                _ => LENS[self.rng.below(LENS.len())],
            };
            self.write(at + granule * 64, (granule as u64) << 32 | u64::from(len));
        }
    }

    fn scribble_on_rings(&mut self) {
        let at = self.ring();
        let bytes: Vec<u8> = (0..2048).flat_map(|_| self.rng.next().to_le_bytes()).collect();
        self.file.write_all_at(&bytes, at as u64).unwrap();
    }

    fn ring_every_bell(&mut self) {
        for m in 0..LOW {
            let at = 4096 + m * 256;
            self.write(at + 64, u64::MAX);
            (0..16).for_each(|group| self.write(at + 128 + group * 8, u64::MAX));
        }
    }

    /// Marks closed rings as open and open ones as closed.
    fn open_links(&mut self) {
        for m in 0..MEMBERS {
            self.write(4096 + m * 256 + 40, u64::MAX);
        }
        for _ in 0..64 {
            let (s, r) = (self.place(), self.place());
            let at = LINKS_AT + r * 4 * 4096 + s * 64;
            // Incarnations are the first few numbers.
            let inc = self.rng.next() % 6;
            let words = [self.rng.next() % 2, inc, self.rng.next() % 6, self.rng.next() % 3];
            for (i, word) in words.into_iter().enumerate() {
                self.write(at + i * 8, word);
            }
        }
    }

    fn rewrite_the_directory(&mut self) {
        for m in 0..MEMBERS {
            let at = 4096 + m * 256;
            if self.rng.below(2) == 0 {
                let state = (self.rng.next() % 6) << 32 | (self.rng.next() % 8);
                self.write(at, state);
                let victim = self.victims[self.rng.below(self.victims.len())];
                self.write(at + 8, victim.word());
            }
        }
        let words = [self.number(), self.number(), self.number()];
        for (at, word) in [64, 72, 128].into_iter().zip(words) {
            self.write(at, word);
        }
    }

    fn give_back_what_was_not_taken(&mut self) {
        for _ in 0..32 {
            let (s, r) = (self.place(), self.place());
            let head = self.number();
            self.write(LINKS_AT + r * 4 * 4096 + s * 64 + 32, head);
        }
    }

    /// Tries to change the file's size, and punches holes.
    fn change_the_size(&mut self) {
        let len = self.file.metadata().unwrap().len();
        for other in [0, 4096, len - 1, len + 1, 2 * len] {
            assert!(self.file.set_len(other).is_err(), "{len} to {other}");
        }
        for seal in [SealFlag::F_SEAL_WRITE, SealFlag::F_SEAL_FUTURE_WRITE] {
            assert!(fcntl(&self.file, FcntlArg::F_ADD_SEALS(seal)).is_err());
        }
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let at = self.rng.below(len as usize);
        let long = [4096, 1 << 20, len as usize][self.rng.below(3)].min(len as usize - at);
        let _ = fallocate(&self.file, hole, at as i64, long.max(1) as i64);
    }

    fn hold_every_lock(&mut self) {
        if let Some(guard) = lock::Guard::try_take(&self.file) {
            std::mem::forget(guard);
        }
        for m in 0..MEMBERS {
            let _ = lock::show_life(&self.file, m);
            lock::children_may_keep(std::os::fd::AsRawFd::as_raw_fd(&self.file));
        }
    }
}

/// Number of rounds; `BAREWIRE_ROUNDS` sets it where each takes long.
fn rounds(usual: usize) -> usize {
    std::env::var("BAREWIRE_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

/// Frames that are not of `attackers`.
fn others(port: &mut dyn Port, attackers: &[Station]) -> Vec<Vec<u8>> {
    let mut got = drain(port);
    got.retain(|bytes| {
        !attackers.iter().any(|attacker| {
            bytes[6..12] == attacker.mac.0 && bytes[34..36] == attacker.number.to_le_bytes()
        })
    });
    got.sort_unstable();
    got
}

/// Stations of two users that exchange frames while another user attacks.
struct Traffic {
    bed: TestSwitch,
    own: SwitchedPort,
    alice: SwitchedPort,
    also: SwitchedPort,
}

impl Traffic {
    fn new() -> Self {
        let mut bed = TestSwitch::new(ServedUsers::All, false);
        let own = station(&bed.segment);
        let (alice, also) = (bed.attach(ALICE), bed.attach(ALICE));
        Self { bed, own, alice, also }
    }

    fn macs(&self) -> [Station; 4] {
        [self.own.caps().station, self.alice.caps().station, self.also.caps().station, FAR]
    }

    /// Sends a frame between each pair and checks that each arrives once and unchanged, and that
    /// none arrives with a forged source address.
    fn round(&mut self, number: u8, attackers: &[Station], mut meanwhile: impl FnMut()) {
        let Self { bed, own, alice, also } = self;
        let [mac_own, mac_alice, mac_also] = [&*own, alice, also].map(|port| port.caps().station);
        let sent = [
            frame(mac_also, mac_alice, 700, number),
            frame(mac_own, mac_alice, 60, number),
            frame(FAR, mac_alice, 1500, number),
        ];
        sent.iter().for_each(|bytes| assert_eq!(send(alice, bytes), Tx::Sent));
        assert_eq!(send(&mut *bed.far, &frame(mac_alice, FAR, 1400, number)), Tx::Sent);
        for &attacker in attackers {
            send(&mut *bed.far, &frame(attacker, FAR, 1400, number));
        }
        for _ in 0..300 {
            bed.switch.turn().unwrap();
            meanwhile();
        }
        let got = [also, own].map(|port| others(port, attackers));
        assert_eq!(got, [[sent[0].clone()], [sent[1].clone()]], "{number}");
        assert_eq!(others(&mut *bed.far, attackers), [sent[2].clone()], "{number}");
        assert_eq!(others(alice, attackers), [frame(mac_alice, FAR, 1400, number)], "{number}");
    }
}

/// Goal: whatever a user's processes write into their segment and send, other users lose nothing:
/// each of their frames arrives once and unchanged, none arrives with a forged source, and the
/// switch goes on and counts. Method: a seeded attacker with a descriptor of the segment, beside
/// two stations of its user that forge addresses, send invalid frames and flood; first without
/// attacks, then with one kind, then with all; and again for each segment.
#[test]
fn a_hostile_process_harms_no_other_user() {
    for seed in [0x29_0001_u64, 0x29_0002] {
        println!("seed {seed:#x}");
        let (mut traffic, mut rng) = (Traffic::new(), Rng(seed));
        let victims = traffic.macs();
        for kind in 0..=KINDS {
            let mut attackers = [traffic.bed.attach(BOB), traffic.bed.attach(BOB)];
            let macs = [0, 1].map(|i: usize| attackers[i].caps().station);
            let file = &traffic.bed.switch.clients.as_ref().unwrap().users[1].file;
            let len = DATA_AT + MEMBERS * MEMBERS * RING_LEN;
            assert_eq!(file.metadata().unwrap().len(), len as u64);
            let file = shm::sealed::reopen(file).unwrap();
            let mut attacker = Attacker { file, rng: Rng(rng.next()), victims: victims.to_vec() };
            let rounds = rounds(24);
            for round in 0..rounds {
                for port in &mut attackers {
                    for _ in 0..rng.below(100) {
                        let (src, dst) = (rng.below(4), rng.below(4));
                        let bytes = frame(victims[dst], victims[src], 14 + rng.below(MTU), 0xee);
                        // The attacker's own port may be broken by now.
                        let _ = port.tx(&TxFrame::whole(&bytes));
                    }
                }
                let kind = if round < rounds / 2 { kind } else { KINDS };
                traffic.round(round as u8, &macs, || {
                    if round > 2 && rng.below(10) == 0 {
                        attacker.attack(kind);
                    }
                });
                for port in &mut attackers {
                    port.receive(64, &mut |_: &RxFrame<'_>| {});
                }
            }
            drop((attacker, attackers));
            while traffic.bed.switch.segments.len() > 2 {
                traffic.bed.run_once();
            }
        }
        let counters = traffic.bed.switch.counters();
        println!("{counters:?}");
        assert!(counters.spoofed > 1000 && counters.malformed > 10, "{counters:?}");
        let shown = traffic.bed.switch.stations();
        assert_eq!(shown.len(), 3);
        for frames in shown.iter().map(|station| station.frames) {
            assert_eq!((frames.spoofed, frames.malformed, frames.full), (0, 0, 0));
        }
    }
}

/// Goal: a process that joins its user's segment with another user's address, or without a request
/// to the switch, neither sends nor receives with that address.
#[test]
fn an_address_belongs_to_the_process_that_asked() {
    let mut traffic = Traffic::new();
    let bob = traffic.bed.attach(BOB);
    let file = &traffic.bed.switch.clients.as_ref().unwrap().users[1].file;
    let victims = traffic.macs();
    let mut join = |mac| {
        let file = shm::sealed::reopen(file).unwrap();
        let segment = ShmSettings { station: Some(mac), ..ShmSettings::named("x") };
        ShmPort::open_leaf_of(file, &segment).unwrap().0
    };
    let nobody = Station::at([2, 0, 0, 0, 0, 0x55]);
    let mut ports: Vec<ShmPort> = victims.into_iter().chain([nobody]).map(&mut join).collect();
    for round in 0..20 {
        for port in &mut ports {
            let src = port.caps().station;
            for dst in victims {
                port.tx(&TxFrame::whole(&frame(dst, src, 60, 0xee))).unwrap();
            }
        }
        traffic.round(round, &[bob.caps().station], || {});
        for port in &mut ports {
            assert_eq!(drain(port).len(), 0);
        }
    }
    let SwitchCounters { spoofed, unknown, .. } = traffic.bed.switch.counters();
    // The address of the station at the far end is unknown to the switch, not spoofed.
    assert_eq!((spoofed, unknown), (20 * 3 * 4, 20 * 2 * 4));
}

/// Goal: a station that floods and does not read costs others no frame.
#[test]
fn a_flood_of_one_user_is_his_own() {
    let mut bed = TestSwitch::new(ServedUsers::All, false);
    let (mut alice, mut bob) = (bed.attach(ALICE), bed.attach(BOB));
    let (mac_alice, mac_bob) = (alice.caps().station, bob.caps().station);
    let flood = frame(FAR, mac_bob, MTU, 9);
    for round in 0..200 {
        while bob.tx(&TxFrame::whole(&flood)).unwrap() == Tx::Sent {}
        for _ in 0..8 {
            send(&mut *bed.far, &frame(mac_bob, FAR, MTU, 9));
        }
        let bytes = frame(FAR, mac_alice, 60, round);
        assert_eq!(send(&mut alice, &bytes), Tx::Sent);
        assert_eq!(send(&mut *bed.far, &frame(mac_alice, FAR, 60, round)), Tx::Sent);
        // Once the rings are open, in as many turns as there are segments.
        for _ in 0..if round == 0 { 1000 } else { 3 } {
            bed.switch.turn().unwrap();
        }
        assert_eq!(others(&mut *bed.far, &[mac_bob]), [bytes], "{round}");
        assert_eq!(drain(&mut alice).len(), 1, "{round}");
    }
    let shown = bed.switch.stations();
    let of = |mac| shown.iter().find(|s| s.station == mac).unwrap().frames;
    assert!(of(mac_bob).full > 100 && of(mac_alice).full == 0);
}
