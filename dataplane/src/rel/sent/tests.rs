//! The send window compared with a model that checks every packet each time.

use proptest::prelude::*;

use super::*;
use crate::idx::TxIdx;
use crate::rel::rtt::Rtt;

/// A congestion control with a fixed window.
#[derive(Debug, Default)]
struct Fixed(u32);

impl CongestionControl for Fixed {
    fn whole() -> Self {
        Self(WINDOW)
    }

    fn window(&self) -> u32 {
        self.0
    }

    fn on_ack(&mut self, _: Instant, _: crate::rel::congestion::Acked, _: &mut Rtt, _: u64) {}

    fn on_mark(&mut self, _: Instant, _: &Rtt) {}

    fn on_loss(&mut self, _: Instant, _: u32, _: &Rtt) {}

    fn on_timeout(&mut self, _: Instant, _: u8) {}
}

/// The model's state of a packet in flight.
#[derive(Clone, Copy, Debug)]
struct Packet {
    psn: Psn,
    at: u64,
    first_at: u64,
    sacked: bool,
    lost: bool,
    rtx: bool,
    refused: bool,
}

impl Packet {
    fn under_way(&self) -> bool {
        !self.sacked && !self.lost
    }
}

/// The send window and its model, to which the same events are applied.
struct Both {
    pool: SentPool,
    snd: SendWindow<Fixed>,
    model: Vec<Packet>,
    una: Psn,
    now: u64,
    rtt: Rtt,
    guesses: u32,
}

/// A step: its kind, and a random number.
type Step = (u8, u32);

impl Both {
    fn new(first: u32, window: u16) -> Self {
        let mut snd = SendWindow::new(Psn(first));
        snd.set_limit(window, WINDOW);
        snd.cwnd = Fixed(u32::from(window) / 2 + 1);
        let mut rtt = Rtt::default();
        rtt.sample(100);
        let pool = SentPool::with_capacity(WINDOW as usize);
        Self { pool, snd, model: Vec::new(), una: Psn(first), now: 1000, rtt, guesses: 0 }
    }

    fn step(&mut self, (what, n): Step) {
        self.now += u64::from(n % 40);
        match what {
            0..=4 => (0..=n % 30).for_each(|_| self.send()),
            5 => self.acknowledge(n),
            6 | 7 => self.sack(n),
            8 => self.resend(n),
            9 => self.expire(n),
            10 => self.refuse(),
            11 => self.probe(),
            _ => {
                // Reordering is detected, or no longer.
                match n % 2 {
                    0 => self.rtt.on_duplicates(2),
                    _ => (0..64).for_each(|_| self.rtt.on_resent_arrived()),
                }
            }
        }
    }

    fn send(&mut self) {
        let (room, in_flight) = (self.snd.cwnd.window(), self.snd.nxt.since(self.una) as u32);
        let pipe = self.model.iter().filter(|packet| packet.under_way()).count() as u32;
        let open = in_flight < self.snd.limit() && pipe < room;
        assert_eq!(self.snd.open(), open);
        if !open {
            return;
        }
        assert_eq!((self.snd.room(), self.snd.may_resend()), (room - pipe, true));
        let closes = pipe + 1 >= room || in_flight + 1 == self.snd.limit();
        assert_eq!([true, false].map(|alone| self.snd.asks_ack(alone)), [true, closes]);
        let (psn, at) = (self.snd.number(), self.now);
        let body = BodyRef::Wr { wr: TxIdx::of(psn.0), offset: 0, len: 0 };
        let sent = Sent::new(
            psn,
            Ty::Msg,
            (&[0; RELIABLE_OP_MAX], 0),
            body,
            TxIdx::of(psn.0 % 1000),
            Instant(at),
        );
        let idx = self.snd.keep(&mut self.pool, sent);
        assert_eq!(self.snd.last(&self.pool), Some(idx));
        let first_at = at;
        let (sacked, lost, rtx, refused) = (false, false, false, false);
        self.model.push(Packet { psn, at, first_at, sacked, lost, rtx, refused });
    }

    /// The first packets arrive in order.
    fn acknowledge(&mut self, n: u32) {
        let flight = self.snd.nxt.since(self.una) as u32;
        let cack = self.una.add(n % (flight + 1));
        assert!(self.snd.check(cack).is_ok());
        assert_eq!(self.snd.advance(cack), cack != self.una);
        self.una = cack;
        while self.model.first().is_some_and(|packet| packet.psn.since(cack) < 0) {
            let packet = self.model.remove(0);
            let acked = self.snd.pop_acked(&mut self.pool).expect("it is acknowledged");
            assert_eq!((acked.wr, acked.of_request), (TxIdx::of(packet.psn.0 % 1000), true));
            assert_eq!((acked.at, acked.rtx), (Instant(packet.at), packet.rtx));
            assert_eq!(acked.sacked, packet.sacked);
            self.pool.discard(acked.idx);
        }
        assert!(self.snd.pop_acked(&mut self.pool).is_none());
    }

    /// Some packets behind the first have arrived, and the overtaken ones are lost.
    fn sack(&mut self, n: u32) {
        let mut words = [0_u64; 64];
        let span = (self.snd.nxt.since(self.una) - 1).max(0) as u32;
        for (i, word) in words.iter_mut().enumerate() {
            // A run, or many single bits; bits of packets that were never sent as well.
            let pattern = if n.is_multiple_of(3) { u64::MAX } else { 0x1111_0101_8080_0001 };
            *word = pattern.rotate_left(n.wrapping_add(i as u32) % 64);
            if !n.is_multiple_of(5) && 64 * i as u32 > span {
                *word = 0;
            }
        }
        let used = (n as usize % 66).min(64);
        let now = Instant(self.now);
        let news = self.snd.on_sack(&mut self.pool, now, &words[..used], self.una, &mut self.rtt);
        let (mut count, mut newest) = (0, None);
        for packet in &mut self.model {
            let dist = packet.psn.since(self.una);
            let (word, bit) = ((dist - 1) as usize / 64, (dist - 1) as u32 % 64);
            let told = dist > 0 && word < used && words[word] >> bit & 1 == 1;
            if !told || packet.sacked {
                continue;
            }
            (packet.sacked, packet.lost) = (true, false);
            count += 1;
            let first_copy = packet.rtx && self.now - packet.at < self.rtt.min_ns();
            if !first_copy && newest.is_none_or(|than| (packet.at, dist) >= than) {
                newest = Some((packet.at, dist));
            }
        }
        assert_eq!(news.count, count);
        let told = newest.map(|(at, dist)| (Instant(at), self.una.add(dist as u32)));
        assert_eq!(news.newest, told);
        if let (Some(news), Some(newest)) = (told, newest) {
            self.detect(news, newest);
        }
    }

    fn detect(&mut self, news: (Instant, Psn), newest: (u64, i32)) {
        let allowance = self.rtt.reorder_ns();
        let again = self.snd.detect(&mut self.pool, Instant(self.now), news, &self.rtt);
        let mut due = None;
        for packet in self.model.iter_mut().filter(|packet| packet.under_way()) {
            if (packet.at, packet.psn.since(self.una)) >= newest {
                continue;
            }
            if allowance == 0 || packet.at + allowance < newest.0 {
                packet.lost = true;
            } else {
                let at = packet.at + allowance + self.rtt.srtt_ns();
                due = Some(due.map_or(at, |due: u64| due.min(at)));
            }
        }
        assert_eq!(again, due.map(Instant));
    }

    fn resend(&mut self, n: u32) {
        for _ in 0..=n % 8 {
            let first = self.model.iter_mut().find(|packet| packet.lost);
            let idx = self.snd.first_lost(&self.pool);
            assert_eq!(idx.map(|idx| self.pool[idx].psn), first.as_ref().map(|first| first.psn));
            let (Some(idx), Some(first)) = (idx, first) else { return };
            self.snd.on_resent(&mut self.pool, idx, Instant(self.now));
            (first.lost, first.rtx, first.at) = (false, true, self.now);
        }
    }

    fn expire(&mut self, n: u32) {
        let before = self.now - u64::from(n % 200).min(self.now);
        self.snd.expire(&mut self.pool, Instant(self.now), Instant(before), &self.rtt);
        let late = |packet: &&mut Packet| packet.under_way() && packet.at <= before;
        self.model.iter_mut().filter(late).for_each(|packet| packet.lost = true);
    }

    /// The first packet is refused.
    fn refuse(&mut self) {
        let Some(first) = self.model.first_mut() else { return };
        let idx = self.snd.by_psn(&self.pool, first.psn).expect("it has a record");
        assert_eq!(self.snd.on_refused(&mut self.pool, idx), !first.refused);
        if !first.refused {
            (first.refused, first.sacked, first.lost) = (true, false, true);
        }
    }

    /// A timer retransmits the oldest and the newest packet, and makes room in the window.
    fn probe(&mut self) {
        let missing = |packet: &&mut Packet| !packet.sacked;
        let (oldest, newest) = (self.snd.oldest(&self.pool), self.snd.newest(&self.pool));
        let first = self.model.iter_mut().find(missing).map(|packet| packet.psn);
        let last = self.model.iter_mut().rev().find(missing).map(|packet| packet.psn);
        assert_eq!((oldest, newest), (first, last));
        for psn in oldest.into_iter().chain(newest) {
            self.snd.retransmit_speculatively(&mut self.pool, psn);
            self.guesses += 1;
            let at = psn.since(self.model[0].psn) as usize;
            self.model[at].lost = true;
        }
        self.snd.cwnd.0 = (self.snd.cwnd.0 / 2).max(2);
        self.snd.make_room(&mut self.pool);
        while self.model.iter().filter(|packet| packet.under_way()).count() as u32
            >= self.snd.cwnd.window()
        {
            let first = self.model.iter_mut().find(|packet| packet.under_way());
            first.expect("there are some").lost = true;
            self.guesses += 1;
        }
        self.snd.cwnd.0 = self.snd.limit() / 2 + 1;
        let dups = (self.guesses % 4) as u8;
        assert_eq!(
            u32::from(self.snd.non_speculative(dups)),
            u32::from(dups).saturating_sub(self.guesses)
        );
        self.guesses = self.guesses.saturating_sub(dups.into());
    }

    /// Compares all queries with the model.
    fn check(&mut self) {
        let count = |of: fn(&Packet) -> bool| self.model.iter().filter(|p| of(p)).count();
        assert_eq!(self.snd.pipe() as usize, count(Packet::under_way));
        assert_eq!(usize::from(self.snd.lost), count(|packet| packet.lost));
        assert_eq!(self.snd.is_empty(), self.model.is_empty());
        assert_eq!(self.pool.len(), self.model.len());
        assert_eq!(self.pool.is_empty(), self.model.is_empty());
        assert_eq!(self.pool.is_full(), self.model.len() == WINDOW as usize);
        let pool = &self.pool;
        for packet in &self.model {
            let idx = self.snd.by_psn(pool, packet.psn).expect("it has a record");
            let entry = &pool[idx];
            let times = (Instant(packet.first_at), Instant(packet.at), packet.rtx);
            assert_eq!((entry.first_at, entry.at, entry.rtx), times);
            assert_eq!(self.snd.is_sacked(pool, packet.psn), packet.sacked);
        }
        assert_eq!(self.snd.by_psn(pool, self.una.add(u32::MAX)), None);
        assert_eq!(self.snd.by_psn(pool, self.snd.nxt), None);
        let mut seen = Vec::new();
        self.snd.for_each(&mut self.pool, |entry| seen.push(entry.psn));
        assert!(self.model.iter().map(|packet| packet.psn).eq(seen));
    }
}

proptest! {
    /// Goal: the state of every packet in flight is correct for acknowledgements, SACKs, losses,
    /// retransmissions and refusals in any order, at any window.
    #[test]
    fn a_flight_is_what_was_told_of_it(
        first in prop_oneof![Just(0), Just(u32::MAX - 300), any::<u32>()],
        window in prop_oneof![Just(1_u16), Just(64), Just(256), Just(4096)],
        steps in prop::collection::vec((0_u8..13, any::<u32>()), 1..80),
    ) {
        let mut both = Both::new(first, window);
        for step in steps {
            both.step(step);
            both.check();
        }
        while let Some(idx) = both.snd.pop_any(&mut both.pool) {
            both.pool.discard(idx);
        }
        both.model.clear();
        both.check();
    }
}

/// Goal: an acknowledgement of packets that were never sent is distinguished from an old one.
#[test]
fn an_acknowledgement_of_unsent_packets_is_recognized() {
    let mut snd = SendWindow::<Fixed>::new(Psn(u32::MAX - 1));
    for _ in 0..5 {
        snd.number();
    }
    assert!((0..=5).all(|n| snd.check(snd.una.add(n)).is_ok()));
    assert_eq!(snd.check(snd.una.add(6)), Err(AckOfUnsent));
    assert!(snd.check(Psn(snd.una.0.wrapping_sub(9))).is_ok(), "an old one");
}

/// Goal: each record is visited once, also if more packets without a record follow it than the ring
/// has slots for, as on a lossless path.
#[test]
fn a_record_is_looked_at_once() {
    let mut pool = SentPool::with_capacity(2);
    let mut snd = SendWindow::<Fixed>::new(Psn(u32::MAX - 50));
    let (psn, at) = (snd.number(), Instant(1));
    let sent = Sent::new(psn, Ty::Msg, (&[0; RELIABLE_OP_MAX], 0), BodyRef::None, TxIdx::NONE, at);
    snd.keep(&mut pool, sent);
    for _ in 0..200 {
        snd.number();
    }
    let mut seen = Vec::new();
    snd.for_each(&mut pool, |entry| seen.push(entry.psn));
    assert_eq!(seen, [psn]);
}

/// Goal: a round trip is measured on the copy that arrived, without the receiver's delay, which has
/// units of 64 ns.
#[test]
fn a_round_trip_is_without_the_receivers_delay() {
    let mut pool = SentPool::with_capacity(2);
    let mut snd = SendWindow::<Fixed>::new(Psn(7));
    let (psn, at) = (snd.number(), Instant(1_000));
    let sent = Sent::new(psn, Ty::Msg, (&[0; RELIABLE_OP_MAX], 0), BodyRef::None, TxIdx::NONE, at);
    let idx = snd.keep(&mut pool, sent);
    let ack = AckOp { newest: psn, delay: 5, ..AckOp::default() };
    let measured = |pool: &SentPool, ack| snd.round_trip(pool, Instant(11_000), &ack);
    assert_eq!(measured(&pool, ack), Some(10_000 - 5 * 64));
    assert_eq!(measured(&pool, AckOp { delay: 200, ..ack }), Some(1), "it waited for longer");
    assert_eq!(measured(&pool, AckOp { delay: u16::MAX, ..ack }), None);
    assert_eq!(measured(&pool, AckOp { newest: psn.next(), ..ack }), None);
    pool[idx].at = Instant(4_000);
    assert_eq!(measured(&pool, AckOp { resent: true, ..ack }), Some(7_000 - 5 * 64));
    assert_eq!(measured(&pool, ack), Some(10_000 - 5 * 64), "the first copy");
}

/// A window of `packets` that were sent a nanosecond after each other, the first at 1,000.
fn flight_of(packets: u32) -> (SentPool, SendWindow<Fixed>) {
    let (mut pool, mut snd) = (SentPool::with_capacity(64), SendWindow::<Fixed>::new(Psn(7)));
    for n in 0..packets {
        let (psn, at) = (snd.number(), Instant(1_000 + u64::from(n)));
        let sent =
            Sent::new(psn, Ty::Msg, (&[0; RELIABLE_OP_MAX], 0), BodyRef::None, TxIdx::NONE, at);
        snd.keep(&mut pool, sent);
    }
    (pool, snd)
}

/// Goal: a packet that arrives sooner after its retransmission than any round trip is the first
/// copy, which implies nothing about other packets sent at that time.
#[test]
fn an_arrival_before_a_round_trip_is_the_first_copy() {
    for (after, newest) in [(99, None), (100, Some((Instant(5_000), Psn(8))))] {
        let (mut pool, mut snd) = flight_of(3);
        let mut rtt = Rtt::default();
        rtt.sample(100);
        let idx = snd.by_psn(&pool, Psn(8)).unwrap();
        snd.retransmit_speculatively(&mut pool, Psn(8));
        snd.on_resent(&mut pool, idx, Instant(5_000));
        let news = snd.on_sack(&mut pool, Instant(5_000 + after), &[1], Psn(7), &mut rtt);
        assert_eq!((news.count, news.newest), (1, newest));
    }
}

/// Goal: each retransmitted packet that arrives reduces the reordering allowance; a packet that was
/// sent once does not.
#[test]
fn an_arrived_retransmission_reduces_the_reordering_allowance() {
    let (mut pool, mut snd) = flight_of(5);
    let mut rtt = Rtt::default();
    rtt.sample(6_400);
    rtt.on_duplicates(1);
    let allowed = rtt.reorder_ns();
    for psn in [8, 9] {
        let idx = snd.by_psn(&pool, Psn(psn)).unwrap();
        snd.retransmit_speculatively(&mut pool, Psn(psn));
        snd.on_resent(&mut pool, idx, Instant(5_000));
    }
    let mut report = |sack| {
        snd.on_sack(&mut pool, Instant(20_000), &[sack], Psn(7), &mut rtt);
        rtt.reorder_ns()
    };
    assert_eq!(report(0b1100), allowed, "10 and 11 were sent once");
    assert_eq!(report(0b1111), allowed - 2 * 6_400 / 64, "8 and 9 again");
    assert_eq!(report(0b1111), allowed - 2 * 6_400 / 64, "no news");
}

/// Goal: the window is bounded by the peer's limit, by the own setting, and by the field on the
/// wire.
#[test]
fn the_least_of_three_bounds_the_window() {
    let mut snd = SendWindow::<Fixed>::new(Psn(7));
    assert_eq!(snd.limit(), WINDOW_LOSSLESS);
    for (window, own, limit) in
        [(64, 256, 64), (256, 64, 64), (u16::MAX, u32::MAX, WINDOW), (u16::MAX, 9, 9)]
    {
        snd.set_limit(window, own);
        assert_eq!(snd.limit(), limit);
    }
}

/// Goal: a timer expires packets that were sent up to a time, inclusive, and none later; a
/// retransmitted packet does not hide later ones.
#[test]
fn packets_sent_up_to_a_time_expire() {
    let (mut pool, mut snd) = flight_of(6);
    let rtt = Rtt::default();
    snd.retransmit_speculatively(&mut pool, Psn(8));
    let idx = snd.by_psn(&pool, Psn(8)).unwrap();
    snd.on_resent(&mut pool, idx, Instant(9_000));
    snd.expire(&mut pool, Instant(9_001), Instant(1_003), &rtt);
    let mut lost = Vec::new();
    while let Some(idx) = snd.first_lost(&pool) {
        lost.push(pool[idx].psn.0);
        snd.on_resent(&mut pool, idx, Instant(9_002));
    }
    assert_eq!(lost, [7, 9, 10], "8 was sent again, 11 and 12 after 1,003");
}

/// Goal: sessions that send in turn share rings, whatever their size.
#[test]
fn rings_are_used_again() {
    let mut pool = SentPool::with_capacity(1024);
    let mut flight = |packets: u32| {
        let mut snd = SendWindow::<Fixed>::new(Psn(7));
        for _ in 0..packets {
            let (psn, at) = (snd.number(), Instant(1));
            let sent =
                Sent::new(psn, Ty::Msg, (&[0; RELIABLE_OP_MAX], 0), BodyRef::None, TxIdx::NONE, at);
            snd.keep(&mut pool, sent);
        }
        snd.advance(snd.nxt);
        while let Some(acked) = snd.pop_acked(&mut pool) {
            pool.discard(acked.idx);
        }
        pool.rings.count()
    };
    assert_eq!([1, 64, 65, 128, 1, 100].map(&mut flight), [1, 1, 2, 2, 2, 2]);
}

/// Goal: duplicates of speculative retransmissions are no sign of reordering, and each counts once.
#[test]
fn duplicates_of_guesses_were_not_overtaken() {
    let (mut pool, mut snd) = flight_of(3);
    assert_eq!(snd.non_speculative(2), 2);
    [7, 8, 9].into_iter().for_each(|psn| snd.retransmit_speculatively(&mut pool, Psn(psn)));
    assert_eq!([1, 0, 5, 5].map(|dups| snd.non_speculative(dups)), [0, 0, 3, 5]);
}

/// Goal: acknowledgement and grant are packed side by side.
#[test]
fn a_word_says_what_is_acknowledged_and_granted() {
    let mut snd = SendWindow::<Fixed>::new(Psn(0x8000_0007));
    snd.credit = 0x9000_0003;
    assert_eq!(snd.ack_credit(), 0x9000_0003_8000_0007);
}
