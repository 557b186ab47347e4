//! A user whose processes write whatever they like into their segment, while those of others talk.

use std::fs::File;
use std::os::unix::fs::FileExt;

use nix::fcntl::{FallocateFlags, FcntlArg, SealFlag, fallocate, fcntl};

use super::users::{ALICE, BOB, House};
use super::*;
use crate::backend::lock;

/// Where things are in a segment of 256 places and rings of 64 KiB: see the module `layout`.
const MEMBERS: usize = 256;
const RING_LEN: usize = 1 << 16;
const LINKS_AT: usize = 4096 + MEMBERS * 256;
const BOARDS_AT: usize = LINKS_AT + MEMBERS * 4 * 4096;
const DATA_AT: usize = BOARDS_AT + MEMBERS * 32 * 4096;
/// Places that are lied about most: those that are taken.
const LOW: usize = 8;

struct Dice(u64);

impl Dice {
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

/// Kinds of lies.
const KINDS: usize = 9;

/// Somebody with a descriptor of the segment.
struct Liar {
    file: File,
    dice: Dice,
    /// Addresses to claim.
    victims: Vec<Station>,
}

impl Liar {
    fn write(&self, at: usize, word: u64) {
        self.file.write_all_at(&word.to_le_bytes(), at as u64).unwrap();
    }

    fn place(&mut self) -> usize {
        let all = self.dice.below(8) == 0;
        self.dice.below(if all { MEMBERS } else { LOW })
    }

    fn ring(&mut self) -> usize {
        DATA_AT + (self.place() * MEMBERS + self.place()) * RING_LEN
    }

    /// A number that may mean something.
    fn number(&mut self) -> u64 {
        let some = [0, 1, 2, 3, 5, 63, 64, 65, 4095, 16_384, 1 << 32 | 1, 2 << 32 | 5, u64::MAX];
        match self.dice.below(4) {
            0 => self.dice.next(),
            1 => self.dice.next() % 200_000,
            _ => some[self.dice.below(some.len())],
        }
    }

    /// Does one thing that nobody should, of a certain kind or any.
    fn lie(&mut self, kind: usize) {
        match if kind < KINDS { kind } else { self.dice.below(KINDS) } {
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
            let at = self.dice.below(BOARDS_AT / 8) * 8;
            let word = self.number();
            self.write(at, word);
        }
    }

    /// Words as a sender writes them, of lengths that are none.
    fn frames_of_any_length(&mut self) {
        const LENS: [u32; 13] =
            [0, 1, 13, 14, 31, 32, 60, 1514, 1515, 16_376, 65_550, u32::MAX - 1, u32::MAX];
        let at = self.ring();
        for granule in 0..64 {
            let len = match self.dice.below(4) {
                0 => self.dice.next() as u32,
                _ => LENS[self.dice.below(LENS.len())],
            };
            self.write(at + granule * 64, (granule as u64) << 32 | u64::from(len));
        }
    }

    fn scribble_on_rings(&mut self) {
        let at = self.ring();
        let bytes: Vec<u8> = (0..2048).flat_map(|_| self.dice.next().to_le_bytes()).collect();
        self.file.write_all_at(&bytes, at as u64).unwrap();
    }

    fn ring_every_bell(&mut self) {
        for m in 0..LOW {
            let at = 4096 + m * 256;
            self.write(at + 64, u64::MAX);
            (0..16).for_each(|group| self.write(at + 128 + group * 8, u64::MAX));
        }
    }

    /// Says that rings are open which are not, or the other way round.
    fn open_links(&mut self) {
        for m in 0..MEMBERS {
            self.write(4096 + m * 256 + 40, u64::MAX);
        }
        for _ in 0..64 {
            let (s, r) = (self.place(), self.place());
            let at = LINKS_AT + r * 4 * 4096 + s * 64;
            // Incarnations are the first few numbers.
            let inc = self.dice.next() % 6;
            let words = [self.dice.next() % 2, inc, self.dice.next() % 6, self.dice.next() % 3];
            for (i, word) in words.into_iter().enumerate() {
                self.write(at + i * 8, word);
            }
        }
    }

    fn rewrite_the_directory(&mut self) {
        for m in 0..MEMBERS {
            let at = 4096 + m * 256;
            if self.dice.below(2) == 0 {
                let state = (self.dice.next() % 6) << 32 | (self.dice.next() % 8);
                self.write(at, state);
                let victim = self.victims[self.dice.below(self.victims.len())];
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

    /// Nobody can take the pages away but for a moment.
    fn change_the_size(&mut self) {
        let len = self.file.metadata().unwrap().len();
        for other in [0, 4096, len - 1, len + 1, 2 * len] {
            assert!(self.file.set_len(other).is_err(), "{len} to {other}");
        }
        for seal in [SealFlag::F_SEAL_WRITE, SealFlag::F_SEAL_FUTURE_WRITE] {
            assert!(fcntl(&self.file, FcntlArg::F_ADD_SEALS(seal)).is_err());
        }
        let hole = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let at = self.dice.below(len as usize);
        let long = [4096, 1 << 20, len as usize][self.dice.below(3)].min(len as usize - at);
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

/// How many rounds: fewer where each takes long.
fn rounds(usual: usize) -> usize {
    std::env::var("BAREWIRE_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(usual)
}

/// Frames that are not of `liars`.
fn others(port: &mut dyn Port, liars: &[Station]) -> Vec<Vec<u8>> {
    let mut got = drain(port);
    got.retain(|bytes| {
        !liars
            .iter()
            .any(|liar| bytes[6..12] == liar.mac.0 && bytes[34..36] == liar.number.to_le_bytes())
    });
    got.sort_unstable();
    got
}

/// Users who talk while another lies.
struct Talk {
    house: House,
    own: SwitchedPort,
    alice: SwitchedPort,
    also: SwitchedPort,
}

impl Talk {
    fn new() -> Self {
        let mut house = House::new(Guests::All, false);
        let own = station(&house.segment);
        let (alice, also) = (house.guest(ALICE), house.guest(ALICE));
        Self { house, own, alice, also }
    }

    fn macs(&self) -> [Station; 4] {
        [self.own.caps().station, self.alice.caps().station, self.also.caps().station, FAR]
    }

    /// Sends a frame each way that there is, and sees that each comes, once, as it was, and nothing
    /// in the name of any of these.
    fn round(&mut self, number: u8, liars: &[Station], mut meanwhile: impl FnMut()) {
        let Self { house, own, alice, also } = self;
        let [mac_own, mac_alice, mac_also] = [&*own, alice, also].map(|port| port.caps().station);
        let sent = [
            frame(mac_also, mac_alice, 700, number),
            frame(mac_own, mac_alice, 60, number),
            frame(FAR, mac_alice, 1500, number),
        ];
        sent.iter().for_each(|bytes| assert_eq!(send(alice, bytes), Tx::Sent));
        assert_eq!(send(&mut *house.far, &frame(mac_alice, FAR, 1400, number)), Tx::Sent);
        for &liar in liars {
            send(&mut *house.far, &frame(liar, FAR, 1400, number));
        }
        for _ in 0..300 {
            house.switch.turn().unwrap();
            meanwhile();
        }
        let got = [also, own].map(|port| others(port, liars));
        assert_eq!(got, [[sent[0].clone()], [sent[1].clone()]], "{number}");
        assert_eq!(others(&mut *house.far, liars), [sent[2].clone()], "{number}");
        assert_eq!(others(alice, liars), [frame(mac_alice, FAR, 1400, number)], "{number}");
    }
}

/// Goal: whatever processes of a user write into their segment, and whatever they send, costs
/// others nothing: each frame between those comes, once, with every byte right, and none in their
/// name; the switch lives and its counters tell. Method: a seeded liar with a descriptor of the
/// segment, beside two stations of his that send as others, send what is no frame, and flood; at
/// first honest rings, then lies of one kind, then of all; and all again in the next segment.
#[test]
fn a_liar_harms_nobody_else() {
    for seed in [0x29_0001_u64, 0x29_0002] {
        println!("seed {seed:#x}");
        let (mut talk, mut dice) = (Talk::new(), Dice(seed));
        let victims = talk.macs();
        for kind in 0..=KINDS {
            let mut liars = [talk.house.guest(BOB), talk.house.guest(BOB)];
            let macs = [0, 1].map(|i: usize| liars[i].caps().station);
            let file = &talk.house.switch.lobby.as_ref().unwrap().users[1].file;
            let len = DATA_AT + MEMBERS * MEMBERS * RING_LEN;
            assert_eq!(file.metadata().unwrap().len(), len as u64);
            let file = shm::sealed::another(file).unwrap();
            let mut liar = Liar { file, dice: Dice(dice.next()), victims: victims.to_vec() };
            let rounds = rounds(24);
            for round in 0..rounds {
                for port in &mut liars {
                    for _ in 0..dice.below(100) {
                        let (src, dst) = (dice.below(4), dice.below(4));
                        let bytes = frame(victims[dst], victims[src], 14 + dice.below(MTU), 0xee);
                        // His own port may well be broken by now.
                        let _ = port.tx(&TxFrame::whole(&bytes));
                    }
                }
                let kind = if round < rounds / 2 { kind } else { KINDS };
                talk.round(round as u8, &macs, || {
                    if round > 2 && dice.below(10) == 0 {
                        liar.lie(kind);
                    }
                });
                for port in &mut liars {
                    port.receive(64, &mut |_: &RxFrame<'_>| {});
                }
            }
            drop((liar, liars));
            while talk.house.switch.segments.len() > 2 {
                talk.house.attend();
            }
        }
        let counters = talk.house.switch.counters();
        println!("{counters:?}");
        assert!(counters.spoofed > 1000 && counters.malformed > 10, "{counters:?}");
        let shown = talk.house.switch.stations();
        assert_eq!(shown.len(), 3);
        for frames in shown.iter().map(|station| station.frames) {
            assert_eq!((frames.spoofed, frames.malformed, frames.full), (0, 0, 0));
        }
    }
}

/// Goal: a process that joins its user's segment under another user's address, or without having
/// asked, neither sends nor receives as that.
#[test]
fn an_address_is_who_asked_for_it() {
    let mut talk = Talk::new();
    let bob = talk.house.guest(BOB);
    let file = &talk.house.switch.lobby.as_ref().unwrap().users[1].file;
    let victims = talk.macs();
    let mut join = |mac| {
        let file = shm::sealed::another(file).unwrap();
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
        talk.round(round, &[bob.caps().station], || {});
        for port in &mut ports {
            assert_eq!(drain(port).len(), 0);
        }
    }
    let SwitchCounters { spoofed, unknown, .. } = talk.house.switch.counters();
    // As the station at the far end, which the switch does not know, it is nobody's either.
    assert_eq!((spoofed, unknown), (20 * 3 * 4, 20 * 2 * 4));
}

/// Goal: who floods and does not read costs others no frame, and gets his turn only.
#[test]
fn a_flood_of_one_user_is_his_own() {
    let mut house = House::new(Guests::All, false);
    let (mut alice, mut bob) = (house.guest(ALICE), house.guest(BOB));
    let (mac_alice, mac_bob) = (alice.caps().station, bob.caps().station);
    let flood = frame(FAR, mac_bob, MTU, 9);
    for round in 0..200 {
        while bob.tx(&TxFrame::whole(&flood)).unwrap() == Tx::Sent {}
        for _ in 0..8 {
            send(&mut *house.far, &frame(mac_bob, FAR, MTU, 9));
        }
        let bytes = frame(FAR, mac_alice, 60, round);
        assert_eq!(send(&mut alice, &bytes), Tx::Sent);
        assert_eq!(send(&mut *house.far, &frame(mac_alice, FAR, 60, round)), Tx::Sent);
        // Once the rings are open, in as many turns as there are segments.
        for _ in 0..if round == 0 { 1000 } else { 3 } {
            house.switch.turn().unwrap();
        }
        assert_eq!(others(&mut *house.far, &[mac_bob]), [bytes], "{round}");
        assert_eq!(drain(&mut alice).len(), 1, "{round}");
    }
    let shown = house.switch.stations();
    let of = |mac| shown.iter().find(|s| s.station == mac).unwrap().frames;
    assert!(of(mac_bob).full > 100 && of(mac_alice).full == 0);
}
