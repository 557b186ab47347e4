use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use proptest::prelude::*;

use super::*;

/// A ring in private memory: words and bytes apart, so that the model below can compare both.
#[derive(Clone)]
struct TestMem(Arc<TestRing>);

struct TestRing {
    bytes: Vec<AtomicU64>,
    head: AtomicU64,
}

impl TestMem {
    fn new(len: usize) -> Self {
        // What is not cleared by the protocol looks like a word of another place.
        let bytes: Vec<_> = (0..len / 8).map(|_| AtomicU64::new(0x5555_5555_0000_0040)).collect();
        bytes[0].store(0, Ordering::Relaxed);
        Self(Arc::new(TestRing { bytes, head: AtomicU64::new(0) }))
    }

    fn write(&self, pos: usize, bytes: &[u8]) {
        for (i, piece) in bytes.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..piece.len()].copy_from_slice(piece);
            self.0.bytes[pos / 8 + i].store(u64::from_le_bytes(word), Ordering::Relaxed);
        }
    }

    fn read(&self, pos: usize, len: usize) -> Vec<u8> {
        let words = self.0.bytes[pos / 8..].iter().take(len.div_ceil(8));
        let bytes = words.flat_map(|w| w.load(Ordering::Relaxed).to_le_bytes());
        bytes.take(len).collect()
    }
}

impl RingMem for TestMem {
    fn word(&self, pos: usize) -> u64 {
        self.0.bytes[pos / 8].load(Ordering::Acquire)
    }
    fn clear(&self, pos: usize) {
        assert!(pos.is_multiple_of(GRANULE), "{pos}");
        self.0.bytes[pos / 8].store(0, Ordering::Relaxed);
    }
    fn publish(&self, pos: usize, word: u64) {
        assert!(pos.is_multiple_of(GRANULE), "{pos}");
        self.0.bytes[pos / 8].store(word, Ordering::Release);
    }
    fn head(&self) -> u64 {
        self.0.head.load(Ordering::Acquire)
    }
    fn set_head(&self, total: u64) {
        self.0.head.store(total, Ordering::Release);
    }
}

const LEN: usize = 4096;
const FRAME_MAX: usize = LEN / 4 - WORD_LEN;
/// What a ring grows to, and its longest frame then.
const GROWN: usize = 4 * LEN;
const GROWN_MAX: usize = GROWN / 4 - WORD_LEN;

fn ends() -> (Producer<TestMem>, Consumer<TestMem, 1>) {
    let mem = TestMem::new(GROWN);
    (Producer::new(mem.clone(), LEN), Consumer::new(mem, LEN, FRAME_MAX))
}

fn send(tx: &mut Producer<TestMem>, bytes: &[u8]) -> Result<(), NoRoom> {
    // The fast path whenever there is one, as a port does.
    if bytes.len() < 300
        && let Some(place) = tx.claim_fast(bytes.len())
    {
        tx.mem().write(place.frame_pos(), bytes);
        let is_clearing_due = place.is_clearing_due;
        place.commit();
        if is_clearing_due {
            tx.clear_ahead();
        }
        return Ok(());
    }
    let place = tx.reserve(bytes.len())?;
    tx.mem().write(place.frame_pos, bytes);
    tx.commit(place, bytes.len());
    Ok(())
}

/// Takes what is there, by the fast path whenever there is one, as a port does.
fn take(rx: &mut Consumer<TestMem, 1>) -> RingItem {
    let (head, pos) = (rx.head, rx.pos());
    match rx.take_plain(rx.mem().word(pos)) {
        RingItem::Empty => {
            assert_eq!(rx.head, head);
            let mut taken = rx.take();
            if taken == RingItem::Grow && rx.ring_len() < GROWN {
                rx.grow(GROWN, GROWN_MAX);
                taken = rx.take();
            }
            rx.release();
            taken
        }
        taken => {
            // Nothing more has to be done after it.
            let told = rx.mem().head();
            rx.release();
            assert!(rx.mem().head() == told && rx.pos() > pos);
            taken
        }
    }
}

/// What a ring of `ring_len` bytes may hold, told independently: it refuses only if the worst case
/// does not fit.
fn must_fit(queued: &VecDeque<Vec<u8>>, len: usize, ring_len: usize) -> bool {
    let held: usize = queued.iter().map(|f| slot_len(f.len())).sum();
    // Padding twice (one per lap in flight), an unpublished eighth, and the cleared word.
    held + slot_len(len) + 2 * (ring_len / 4 + 64) + ring_len / 8 + GRANULE <= ring_len
}

proptest! {
    /// Goal: a ring is a queue, also while it grows. Method: random lengths and schedules against a
    /// `VecDeque`, over many laps; frames are full of bytes that look like words. The ring grows at
    /// a random moment, or never.
    #[test]
    fn ring_is_a_bounded_queue(
        grows in 0..800_usize,
        ops in prop::collection::vec((any::<bool>(), 1..=GROWN_MAX, 1..8_usize), 1..400)
    ) {
        let (mut tx, mut rx) = ends();
        let mut model: VecDeque<Vec<u8>> = VecDeque::new();
        let mut serial = 0_u8;
        // Since it grew: what was in the ring then holds up what comes after a lap.
        let mut old = 0_usize;
        for (i, (is_send, len, count)) in ops.into_iter().enumerate() {
            if i == grows {
                tx.grow(GROWN);
                old = model.len() + 1;
            }
            for _ in 0..count {
                if is_send {
                    // Half of them short, which is what runs the ring through odd places.
                    let len = if serial & 1 == 0 { len } else { len % 100 + 1 };
                    serial = serial.wrapping_add(1);
                    let bytes: Vec<u8> = (0..len).map(|i| serial ^ i as u8).collect();
                    let ring_len = tx.ring_len();
                    match send(&mut tx, &bytes) {
                        Ok(()) => model.push_back(bytes),
                        Err(NoRoom::Long) => prop_assert!(len > ring_len / 4 - WORD_LEN),
                        Err(NoRoom::Full) => {
                            prop_assert!(old > 0 || !must_fit(&model, len, ring_len));
                        }
                        Err(NoRoom::Broken) => prop_assert!(false, "broken"),
                    }
                } else {
                    let taken = take(&mut rx);
                    old = if taken == RingItem::Empty { 0 } else { old.saturating_sub(1) };
                    match taken {
                        RingItem::Empty => prop_assert!(model.is_empty()),
                        RingItem::Frame { pos, len } => {
                            let bytes = rx.mem().read(pos, len);
                            prop_assert_eq!(Some(bytes), model.pop_front());
                        }
                        RingItem::Grow => prop_assert!(false, "grew twice"),
                        RingItem::Broken => prop_assert!(false, "broken"),
                    }
                }
            }
        }
    }

    /// Goal: nothing in shared memory moves the consumer outside the ring. Method: arbitrary words,
    /// many of them nearly right.
    #[test]
    fn consumer_stays_inside_whatever_the_words_say(
        words in prop::collection::vec((any::<u64>(), 0..5_u8), 1..200)
    ) {
        let (_, mut rx) = ends();
        for (noise, kind) in words {
            let near = word_of(rx.head, match kind {
                0 if noise & 14 == 0 => GROW,
                0 => noise as u32,
                1 => noise as u32 % (2 * FRAME_MAX as u32),
                2 => PAD,
                3 => noise as u32 % 200,
                _ => FRAME_MAX as u32,
            });
            let word = if kind == 0 && noise & 1 == 0 { noise } else { near };
            rx.mem().publish(rx.pos(), word);
            match take(&mut rx) {
                RingItem::Frame { pos, len } => {
                    let ring_len = rx.ring_len();
                    prop_assert!(len > 0 && len < ring_len / 4 && pos + len <= ring_len);
                }
                RingItem::Empty | RingItem::Grow | RingItem::Broken => {}
            }
        }
    }

    /// Goal: whatever heads a consumer writes, the producer writes at granules of the ring alone.
    #[test]
    fn no_head_leads_the_producer_astray(
        steps in prop::collection::vec((1..FRAME_MAX, 0..2 * LEN as u64), 1..200)
    ) {
        let (mut tx, _rx) = ends();
        for (len, back) in steps {
            tx.mem().set_head(tx.tail.saturating_sub(back));
            match tx.reserve(len) {
                Ok(place) => {
                    prop_assert!(place.frame_pos + len <= LEN);
                    tx.commit(place, len);
                }
                Err(NoRoom::Full | NoRoom::Broken) => {}
                Err(NoRoom::Long) => prop_assert!(false, "{len}"),
            }
            if let Some(place) = tx.claim_fast(len.min(200)) {
                prop_assert!(place.frame_pos() + len.min(200) <= LEN);
                place.commit();
                tx.clear_ahead();
            }
        }
    }

    /// Goal: a producer that reads a nonsense head says so and overwrites nothing.
    #[test]
    fn producer_refuses_a_head_that_cannot_be(head in (LEN as u64 * 2)..u64::MAX) {
        let (mut tx, _) = ends();
        while send(&mut tx, &[1; 40]).is_ok() {}
        tx.mem().set_head(head);
        prop_assert_eq!(send(&mut tx, &[1; 40]), Err(NoRoom::Broken));
    }
}

/// Goal: a sender who writes padding and nothing behind it moves the consumer's head, and nobody
/// gives anything back; then no word makes a plain frame, since it may be read where the head was.
#[test]
fn behind_padding_alone_nothing_is_plain_until_it_is_given_back() {
    let (_, mut rx) = ends();
    let (mem, last) = (rx.mem().clone(), LEN - GRANULE);
    for pos in (0..last).step_by(GRANULE) {
        mem.publish(pos, word_of(pos as u64, 40));
        assert!(matches!(rx.take(), RingItem::Frame { .. }));
        rx.release();
    }
    mem.publish(last, word_of(last as u64, PAD));
    mem.clear(0);
    assert!(matches!(rx.take(), RingItem::Empty));
    assert_eq!(rx.pos(), 0);
    for len in 0..=FRAME_MAX as u32 {
        let taken = rx.take_plain(word_of(LEN as u64, len));
        assert!(matches!(taken, RingItem::Empty), "{len} bytes");
    }
    rx.release();
    assert!(matches!(
        rx.take_plain(word_of(LEN as u64, 40)),
        RingItem::Frame { pos: WORD_LEN, .. }
    ));
}

#[test]
fn full_length_frames_always_get_through() {
    let (mut tx, mut rx) = ends();
    for round in 0..200_usize {
        // A short frame first, so that the long ones come to lie everywhere.
        for len in [round % 70 + 1, FRAME_MAX, FRAME_MAX] {
            let bytes = vec![round as u8; len];
            assert_eq!(send(&mut tx, &bytes), Ok(()), "round {round}: empty ring was full");
            let RingItem::Frame { pos, len: got } = rx.take() else { panic!("round {round}") };
            assert_eq!(rx.mem().read(pos, got), bytes);
            rx.release();
        }
    }
}

/// Goal: frames cross threads whole and in order. Method: real threads, a small ring, contents
/// that follow from the serial number.
#[test]
fn two_threads_pass_a_million_frames() {
    const COUNT: u64 = 1_000_000;
    let (mut tx, mut rx) = ends();
    let sender = std::thread::spawn(move || {
        for serial in 0..COUNT {
            if serial == COUNT / 3 {
                tx.grow(GROWN);
            }
            let words = serial % 29 + 1;
            let bytes: Vec<u8> = (0..words).flat_map(|w| (serial * 31 + w).to_le_bytes()).collect();
            while send(&mut tx, &bytes) == Err(NoRoom::Full) {
                std::thread::yield_now();
            }
        }
    });
    for serial in 0..COUNT {
        let (pos, len) = loop {
            match rx.take() {
                RingItem::Frame { pos, len } => break (pos, len),
                RingItem::Empty => std::thread::yield_now(),
                RingItem::Grow => {
                    rx.grow(GROWN, GROWN_MAX);
                    rx.release();
                }
                RingItem::Broken => panic!("broken at {serial}"),
            }
        };
        assert_eq!(len as u64, (serial % 29 + 1) * 8);
        let bytes = rx.mem().read(pos, len);
        for (w, b) in bytes.chunks_exact(8).enumerate() {
            assert_eq!(b, (serial * 31 + w as u64).to_le_bytes());
        }
        rx.release();
    }
    sender.join().unwrap();
}

/// The same code under loom: every interleaving and every outcome that the orderings allow.
mod model {
    use loom::cell::UnsafeCell;
    use loom::sync::Arc;
    use loom::sync::atomic::{AtomicU64, Ordering};

    use super::super::*;

    const LEN: usize = 4 * GRANULE;

    struct Mem {
        words: Vec<AtomicU64>,
        /// Stands for the bytes of a granule after its word; loom reports a race on it.
        cells: Vec<UnsafeCell<u64>>,
        head: AtomicU64,
    }

    impl RingMem for Arc<Mem> {
        fn word(&self, pos: usize) -> u64 {
            self.words[pos / GRANULE].load(Ordering::Acquire)
        }
        fn clear(&self, pos: usize) {
            self.words[pos / GRANULE].store(0, Ordering::Relaxed);
        }
        fn publish(&self, pos: usize, word: u64) {
            self.words[pos / GRANULE].store(word, Ordering::Release);
        }
        fn head(&self) -> u64 {
            self.head.load(Ordering::Acquire)
        }
        fn set_head(&self, total: u64) {
            self.head.store(total, Ordering::Release);
        }
    }

    /// Goal: no frame is read before it is written or written while it is read, in any
    /// interleaving, across a lap, or while the ring grows. Changing `publish`, `word`, `head` or
    /// `set_head` to Relaxed makes this fail (tried, each).
    #[test]
    fn ring_has_no_race() {
        no_race(None);
    }

    #[test]
    fn a_ring_that_grows_has_no_race() {
        no_race(Some(2));
    }

    /// The ring grows after so many frames.
    fn no_race(grows: Option<u64>) {
        const FRAMES: u64 = 5;
        let mut builder = loom::model::Builder::new();
        // Three forced switches find every planted bug in a second; without a bound: 150 seconds.
        builder.preemption_bound = Some(3);
        builder.check(move || {
            let mem = Arc::new(Mem {
                words: (0..8).map(|i| AtomicU64::new(if i == 0 { 0 } else { 77 })).collect(),
                cells: (0..8).map(|_| UnsafeCell::new(0)).collect(),
                head: AtomicU64::new(0),
            });
            let mut tx = Producer::new(mem.clone(), LEN);
            let mut rx = Consumer::<_, 1>::new(mem, LEN, 56);
            let sender = loom::thread::spawn(move || {
                let mut sent = 0;
                while sent < FRAMES {
                    if grows == Some(sent) && tx.ring_len() == LEN {
                        tx.grow(2 * LEN);
                    }
                    if let Some(place) = tx.claim_fast(40) {
                        let cell = &tx.mem().cells[place.frame_pos() / GRANULE];
                        // SAFETY: loom's pointer is valid; loom checks the exclusion.
                        cell.with_mut(|p| unsafe { *p = sent + 100 });
                        let is_clearing_due = place.is_clearing_due;
                        place.commit();
                        if is_clearing_due {
                            tx.clear_ahead();
                        }
                        sent += 1;
                        continue;
                    }
                    match tx.reserve(40) {
                        Ok(place) => {
                            let cell = &tx.mem().cells[place.frame_pos / GRANULE];
                            // SAFETY: loom's pointer is valid; loom checks the exclusion.
                            cell.with_mut(|p| unsafe { *p = sent + 100 });
                            tx.commit(place, 40);
                            sent += 1;
                        }
                        Err(NoRoom::Full) => loom::thread::yield_now(),
                        Err(NoRoom::Long | NoRoom::Broken) => panic!("broken"),
                    }
                }
            });
            let mut taken = 0;
            while taken < FRAMES {
                match rx.take() {
                    RingItem::Frame { pos, len } => {
                        assert_eq!(len, 40);
                        let cell = &rx.mem().cells[pos / GRANULE];
                        // SAFETY: loom's pointer is valid; loom checks the exclusion.
                        assert_eq!(cell.with(|p| unsafe { *p }), taken + 100);
                        rx.release();
                        taken += 1;
                    }
                    RingItem::Empty => loom::thread::yield_now(),
                    RingItem::Grow => rx.grow(2 * LEN, 56),
                    RingItem::Broken => panic!("broken"),
                }
            }
            sender.join().unwrap();
        });
    }
}
