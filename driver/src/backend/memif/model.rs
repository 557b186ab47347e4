//! The ends of a ring under loom: every interleaving and every outcome that the orderings allow,
//! of both roles, through several laps of a short ring, and of a receiver that sleeps.
//!
//! What runs is `ring.rs` itself, over indices, flags and descriptors that are loom's. The buffers
//! are plain memory, and for each slot stands a cell that is touched while its frame is written and
//! read; loom reports a race on it.

use std::rc::Rc;

use loom::cell::UnsafeCell;
use loom::sync::Notify;

use self::region::{Conn, Lane, MASKED, Memory};
use self::ring::{Pushed, Receiver, RxItem, Sender, arm, disarm, has_frames};
use crate::frame::{ETH_HDR_LEN, RxFrame, TxFrame};

// The very file, with what stands here for the memory below it. What only a port needs is left.
#[expect(dead_code, reason = "the model closes no connection, and nothing is slow in it")]
#[expect(clippy::duplicate_mod, reason = "to run it over other memory")]
#[path = "ring.rs"]
mod ring;

/// Memory as `super::super::region` has it, of one lane.
mod region {
    use std::sync::atomic::Ordering::Relaxed;

    pub(super) use loom::sync::atomic::{AtomicU16, fence};

    use loom::sync::atomic::AtomicU64;

    pub(super) const MASKED: u16 = crate::backend::memif::region::MASKED;
    pub(super) const NEXT: u16 = crate::backend::memif::region::NEXT;

    /// Bytes of a buffer.
    pub(super) const BUFFER_LEN: usize = 32;

    pub(super) struct Memory {
        flags: AtomicU16,
        head: AtomicU16,
        tail: AtomicU16,
        slots: Vec<[AtomicU64; 2]>,
        /// Reached by pointers alone.
        buffers: Vec<std::cell::UnsafeCell<[u8; BUFFER_LEN]>>,
    }

    impl Memory {
        /// As the client makes it, and the server finds it, with all buffers in their places.
        pub(super) fn new(count: u16) -> Self {
            let empty = |place| {
                let Desc { first, second } = Desc::of_buffer(place, BUFFER_LEN as u32);
                [AtomicU64::new(first), AtomicU64::new(second)]
            };
            Self {
                flags: AtomicU16::new(0),
                head: AtomicU16::new(0),
                tail: AtomicU16::new(0),
                slots: (0..count).map(empty).collect(),
                buffers: (0..count).map(|_| [0; BUFFER_LEN].into()).collect(),
            }
        }

        /// The client's side of it, or the server's.
        pub(super) fn lane(&self, is_client: bool) -> Lane {
            let (memory, len) = (std::ptr::from_ref(self), BUFFER_LEN as u32);
            let ring = RingMem { memory, mask: self.slots.len() as u16 - 1 };
            Lane { ring, own: is_client.then_some(Own { memory, len }) }
        }

        pub(super) fn conn(&self) -> Conn {
            Conn { memory: self }
        }
    }

    /// Valid while the memory is there, which the model keeps to its end.
    #[derive(Clone, Copy)]
    pub(super) struct RingMem {
        memory: *const Memory,
        pub(super) mask: u16,
    }

    impl RingMem {
        fn memory<'a>(self) -> &'a Memory {
            // SAFETY: it is there as long as this (see above), and what may change in it are
            // atomics, or lies behind cells.
            unsafe { &*self.memory }
        }

        pub(super) fn count(self) -> u16 {
            self.mask + 1
        }

        pub(super) fn flags<'a>(self) -> &'a AtomicU16 {
            &self.memory().flags
        }

        pub(super) fn head<'a>(self) -> &'a AtomicU16 {
            &self.memory().head
        }

        pub(super) fn tail<'a>(self) -> &'a AtomicU16 {
            &self.memory().tail
        }

        pub(super) fn words<'a>(self, slot: u16) -> &'a [AtomicU64; 2] {
            &self.memory().slots[usize::from(slot & self.mask)]
        }

        pub(super) fn desc(self, slot: u16) -> Desc {
            let [first, second] = self.words(slot);
            Desc { first: first.load(Relaxed), second: second.load(Relaxed) }
        }

        pub(super) fn desc_at(self, slot: u16) -> *const u8 {
            std::ptr::from_ref(self.words(slot)).cast()
        }
    }

    /// Flags and length in the first word, the place of the buffer in the second.
    #[derive(Clone, Copy)]
    pub(super) struct Desc {
        first: u64,
        second: u64,
    }

    impl Desc {
        fn of_buffer(place: u16, len: u32) -> Self {
            Self::new(0, 0, len, place.into())
        }

        pub(super) fn new(flags: u16, _region: u16, len: u32, offset: u32) -> Self {
            Self { first: u64::from(flags) << 32 | u64::from(len), second: offset.into() }
        }

        pub(super) fn flags(self) -> u16 {
            (self.first >> 32) as u16
        }

        pub(super) fn region(self) -> u16 {
            0
        }

        pub(super) fn len(self) -> u32 {
            self.first as u32
        }

        pub(super) fn write_to(self, words: &[AtomicU64; 2]) {
            self.write_len_to(words);
            words[1].store(self.second, Relaxed);
        }

        pub(super) fn write_len_to(self, words: &[AtomicU64; 2]) {
            words[0].store(self.first, Relaxed);
        }
    }

    #[derive(Clone, Copy)]
    pub(super) struct Own {
        memory: *const Memory,
        pub(super) len: u32,
    }

    impl Own {
        pub(super) fn at(&self, place: u16) -> *mut u8 {
            // SAFETY: as in `RingMem::memory`.
            let buffers = unsafe { &(*self.memory).buffers };
            buffers[usize::from(place)].get().cast()
        }

        pub(super) fn desc(&self, place: u16, len: u32) -> Desc {
            Desc::of_buffer(place, len)
        }
    }

    pub(super) struct Lane {
        pub(super) ring: RingMem,
        pub(super) own: Option<Own>,
    }

    pub(super) struct Conn {
        memory: *const Memory,
    }

    impl Conn {
        pub(super) fn locate(&self, desc: Desc) -> Option<*mut u8> {
            // SAFETY: as in `RingMem::memory`.
            let buffers = unsafe { &(*self.memory).buffers };
            let buffer = buffers.get(usize::try_from(desc.second).ok()?)?;
            (desc.len() as usize <= BUFFER_LEN).then(|| buffer.get().cast())
        }
    }
}

/// Longest frame: two buffers.
const FRAME_MAX: usize = 2 * region::BUFFER_LEN;

/// One lane, and what both ends of it know. (Loom's threads are one.)
struct Shared {
    memory: Memory,
    /// Stand for the buffers of the slots.
    cells: Vec<UnsafeCell<()>>,
    event: Notify,
    client_sends: bool,
}

impl Shared {
    fn new(count: u16, client_sends: bool) -> Rc<Self> {
        Rc::new(Self {
            memory: Memory::new(count),
            cells: (0..count).map(|_| UnsafeCell::new(())).collect(),
            event: Notify::new(),
            client_sends,
        })
    }

    fn tx_lane(&self) -> Lane {
        self.memory.lane(self.client_sends)
    }

    fn rx_lane(&self) -> Lane {
        self.memory.lane(!self.client_sends)
    }

    fn cell(&self, slot: u16) -> &UnsafeCell<()> {
        &self.cells[usize::from(slot) % self.cells.len()]
    }
}

/// The frame that comes as number `n`: every length is another, and every third takes two buffers
/// if `in_pieces`.
fn frame(n: u16, in_pieces: bool) -> Vec<u8> {
    let more = if in_pieces && n % 3 == 1 { region::BUFFER_LEN } else { 0 };
    vec![n as u8 + 1; ETH_HDR_LEN + 1 + usize::from(n) + more]
}

fn slots_of(frame: &[u8]) -> u16 {
    frame.len().div_ceil(region::BUFFER_LEN) as u16
}

/// Sends frames, and says after each to the receiver, if it has to, that there is one.
struct Sending {
    shared: Rc<Shared>,
    tx: Sender,
    conn: Conn,
    at: u16,
}

impl Sending {
    fn new(shared: &Rc<Shared>) -> Self {
        let (tx, conn) = (Sender::new(&shared.tx_lane()), shared.memory.conn());
        Self { shared: Rc::clone(shared), tx, conn, at: 0 }
    }

    /// False if there is no room.
    fn send(&mut self, frame: &[u8]) -> bool {
        let mut whole = [0; FRAME_MAX];
        let sent = self.tx.push(&self.conn, &TxFrame::whole(frame), frame.len(), 0, &mut whole);
        match sent.expect("the receiver writes what can be") {
            Pushed::Sent => {}
            Pushed::Full => return false,
            Pushed::Long => panic!("the ring is long enough"),
        }
        for _ in 0..slots_of(frame) {
            self.shared.cell(self.at).with_mut(|_| ());
            self.at = self.at.wrapping_add(1);
        }
        self.tx.publish();
        true
    }
}

/// Receives frames.
struct Receiving {
    shared: Rc<Shared>,
    rx: Receiver,
    conn: Conn,
}

impl Receiving {
    fn new(shared: &Rc<Shared>) -> Self {
        let (rx, conn) = (Receiver::new(&shared.rx_lane()), shared.memory.conn());
        Self { shared: Rc::clone(shared), rx, conn }
    }

    /// Takes all that has come, which has to be the frames from number `n`, and gives it back.
    fn burst(&mut self, n: &mut u16, in_pieces: bool) {
        let (begin, mut lent, mut whole) = (self.rx.at(), Vec::new(), [0; FRAME_MAX]);
        let mut left = self.rx.pending().expect("the sender writes what can be");
        while left > 0 {
            let frame = frame(*n + lent.len() as u16, in_pieces);
            match self.rx.take(&self.conn, FRAME_MAX) {
                RxItem::Frame(at, len) => lent.push((at, len as usize, frame)),
                RxItem::Chain if !lent.is_empty() => break,
                RxItem::Chain => {
                    let len =
                        self.rx.copy_chain(&self.conn, left, &mut whole).expect("it is whole");
                    lent.push((whole.as_ptr(), len, frame));
                    break;
                }
                RxItem::Bad => panic!("no frame of ours"),
            }
            left -= 1;
        }
        for slot in 0..self.rx.at().wrapping_sub(begin) {
            self.shared.cell(begin.wrapping_add(slot)).with(|_| ());
        }
        for (at, len, frame) in lent {
            let mut got = vec![0; len];
            // SAFETY: `len` bytes of a buffer (`place`), or of `whole`.
            assert!(unsafe { RxFrame::from_raw(at, len) }.copy_to(0, &mut got));
            assert_eq!(got, frame);
            *n += 1;
        }
        self.rx.release();
    }
}

/// Runs `check` for both roles and rings of 2 and of 4 slots.
fn explore(check: impl Fn(u16, bool) + Copy + Send + Sync + 'static) {
    for (count, client_sends) in [(2, true), (2, false), (4, true), (4, false)] {
        let mut builder = loom::model::Builder::new();
        // Two forced switches find every planted bug, in two seconds; three no more, in ten.
        builder.preemption_bound = Some(2);
        builder.check(move || check(count, client_sends));
    }
}

/// Goal: no frame or descriptor is read before it is written or written while it is read, through
/// more than a lap of the ring. Each of these mutations was detected: a Relaxed
/// access in `publish` of either end, `pending` or `has_slot`; slots published before they were
/// read, or before their descriptors are written.
#[test]
fn rings_have_no_race() {
    const FRAMES: u16 = 5;
    explore(|count, client_sends| {
        let shared = Shared::new(count, client_sends);
        let there = Rc::clone(&shared);
        let sender = loom::thread::spawn(move || {
            let mut sending = Sending::new(&there);
            for n in 0..FRAMES {
                while !sending.send(&frame(n, true)) {
                    loom::thread::yield_now();
                }
            }
        });
        let (mut receiving, mut taken) = (Receiving::new(&shared), 0);
        while taken < FRAMES {
            receiving.burst(&mut taken, true);
            loom::thread::yield_now();
        }
        sender.join().unwrap();
    });
}

/// Goal: a receiver that goes to sleep whenever nothing has come is woken by whatever comes then;
/// else both would wait for ever. Only the first time may the sender have asked too early. Found
/// when tried, each: no fence in `has_to_wake`, none in `arm`.
#[test]
fn no_wake_up_is_lost() {
    const FRAMES: u16 = 2;
    explore(|count, client_sends| {
        let shared = Shared::new(count, client_sends);
        let mut sending = Sending::new(&shared);
        assert!(sending.tx.has_to_wake(), "nobody has said that he polls");
        disarm(&shared.rx_lane());
        let sender = loom::thread::spawn(move || {
            for n in 0..FRAMES {
                while !sending.send(&frame(n, false)) {
                    loom::thread::yield_now();
                }
                if sending.tx.has_to_wake() {
                    sending.shared.event.notify();
                }
            }
        });
        let (mut receiving, mut taken) = (Receiving::new(&shared), 0);
        while taken < FRAMES {
            receiving.burst(&mut taken, false);
            let lane = shared.rx_lane();
            arm(&lane);
            if taken < FRAMES && !has_frames(&lane, receiving.rx.at()) {
                shared.event.wait();
            }
            disarm(&lane);
        }
        assert_eq!(
            shared.rx_lane().ring.flags().load(std::sync::atomic::Ordering::Relaxed),
            MASKED
        );
        sender.join().unwrap();
    });
}
