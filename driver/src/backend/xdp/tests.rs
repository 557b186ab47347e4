//! Tests of the programs on all kinds of frames, and of rings and umem against plain models.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::{Acquire, Release};

use memmap2::{MmapMut, MmapRaw};

use super::program::{Match, XDP_PASS, dispatcher, queue_program};
use super::queue::QueueScheduler;
use super::ring::{Consumer, Desc, Entry, Producer, RingOffsets};
use super::sharing::{self, Discovery, QueueClaims, SharedProgram};
use super::umem::Umem;
use super::{HEADROOM, XdpMode, XdpSettings, bpf, opening, socket};
use crate::backend::lock::{NotInChildren, UnforkedMap};
use crate::backend::netdev::Accept;
use crate::frame::addressed;
use crate::frame::{ETH_HDR_LEN, ETHERTYPE};
use crate::mem::{Arena, Hugepages};
use crate::port::Station;

/// Return value of a program that redirects a frame to a socket.
const XDP_REDIRECT: u32 = 4;

/// The same numbers from the same seed.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self, below: u64) -> u64 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (self.0 >> 33) % below
    }
}

/// A map, with a socket for queue 0 if `has_socket`; `None`, and a line, without the privilege.
fn map(has_socket: bool) -> Option<(OwnedFd, Option<NotInChildren>)> {
    let made = bpf::socket_map(1).and_then(|map| {
        let socket = socket::open()?;
        let umem = umem(4, 4);
        socket::register(socket.as_raw_fd(), &umem, CHUNK)?;
        let rings = (socket::rx_rings(&socket, 4)?, socket::tx_rings(&socket, 4)?);
        if has_socket {
            bpf::put(&map, 0, socket.as_raw_fd())?;
        }
        drop(rings);
        // The kernel keeps the pages.
        Ok((map, has_socket.then_some(socket)))
    });
    made.inspect_err(|why| println!("SKIPPED: no AF_XDP socket or map of such: {why}")).ok()
}

fn frame(dst: Station, ty: u16, len: usize) -> Vec<u8> {
    let src = Station::at([2, 0, 0, 0, 0, 9]);
    let head = [&dst.mac.0[..], &src.mac.0, &ty.to_be_bytes()].concat();
    let frame = head.into_iter().chain((0..).map(|i: u32| i as u8)).take(len).collect();
    addressed(dst, src, frame)
}

/// Goal: several queues are copied unless zero-copy is asked for, and zero-copy that a queue does
/// not have is an error, whichever one the driver returns.
#[test]
fn several_queues_are_copied_unless_asked() {
    let of = |zero_copy| XdpSettings { zero_copy, ..XdpSettings::named("eth0") };
    let said = |settings: XdpSettings| [0..=0, 3..=3, 0..=1].map(|q| settings.may_zero_copy(&q));
    assert_eq!(said(of(None)), [true, true, false]);
    assert_eq!(said(of(Some(true))), [true; 3]);
    assert_eq!(said(of(Some(false))), [false; 3]);
    let settings = of(Some(true));
    for errno in [libc::EOPNOTSUPP, libc::EINVAL, libc::ENOMEM] {
        let e = std::io::Error::from_raw_os_error(errno);
        let why = |zero_copy| opening::bind_error(&settings.request(), 2, zero_copy, &e);
        assert_eq!(why(true).errno(), errno);
        assert!(why(true).to_string().contains("leave out zerocopy=yes"), "{}", why(true));
        assert!(!why(false).to_string().contains("zerocopy"), "{}", why(false));
    }
}

/// Goal: a card that counts in whole KiB has room for the longest frame of Ethernet.
#[test]
fn a_chunk_of_zero_copy_has_room_in_whole_kib() {
    let in_kib = |len: usize| (len - HEADROOM) / 1024 * 1024;
    assert!(in_kib(opening::chunk_len(1500, true)) >= 1500 + ETH_HDR_LEN + 4);
    assert_eq!(
        [1500, 1778, 1779, 9000].map(|mtu| opening::chunk_len(mtu, false)),
        [2048, 2048, 4096, 4096]
    );
}

/// Goal: the program redirects frames of the fabric's EtherType to the station and to groups, to
/// any station if asked for, and no others; and none while no socket is bound. Method: the kernel
/// verifies and runs it.
#[test]
fn the_program_takes_what_is_ours() {
    let own = Station { number: 0x1234, ..Station::at([0x02, 0xfe, 0x80, 0x7f, 0xff, 0x01]) };
    let Some((none, _)) = map(false) else { return };
    let Some((one, _socket)) = map(true) else { return };
    let load = |map: &OwnedFd, accept: Accept| {
        let take = Match::Frames(ETHERTYPE, accept.filter(own), true);
        let program = queue_program(map.as_raw_fd(), take, None);
        bpf::load(&program).expect("the kernel takes it")
    };
    let all = [Accept::Own, Accept::Node, Accept::All].map(|accept| load(&one, accept));
    let empty = load(&none, Accept::Own);
    let said = |frame: &[u8]| {
        assert_eq!(bpf::run(&empty, frame).unwrap(), XDP_PASS);
        all.each_ref().map(|program| bpf::run(program, frame).unwrap() == XDP_REDIRECT)
    };
    let with_bit = |at: usize| Station::from_word(own.word() ^ 1 << at);
    for len in [14, 15, 39] {
        assert_eq!(said(&frame(own, ETHERTYPE, len)), [false; 3], "{len}");
    }
    for len in [40, 41, 60, 64, 1514, 3000] {
        let multicast = Station::at([0x33, 0x33, 0, 0, 0, 1]);
        for group in [Station::BROADCAST, multicast, own] {
            assert_eq!(said(&frame(group, ETHERTYPE, len)), [true; 3], "{group} {len}");
        }
        for at in 0..64 {
            // A flipped bit that makes a group of it; those of the MAC; those of the number.
            let want = [at == 0, at == 0 || at >= 48, true];
            assert_eq!(said(&frame(with_bit(at), ETHERTYPE, len)), want, "bit {at}");
        }
        let foreign = [0x0800, 0x0806, 0x86dd, 0x8100, 0x88a8, 0x88cc, ETHERTYPE.swap_bytes()];
        let near = (0..16).map(|bit| ETHERTYPE ^ 1 << bit);
        for ty in foreign.into_iter().chain(near) {
            for dst in [own, Station::BROADCAST] {
                assert_eq!(said(&frame(dst, ty, len)), [false; 3], "{ty:#x} to {dst}");
            }
        }
    }
}

/// Goal: the dispatcher tail-calls the program of the frame's queue, and without one passes frames
/// to the kernel; the program of a port without all queues passes frames to groups.
#[test]
fn a_frame_goes_to_the_program_of_its_queue() {
    let own = Station { number: 0x1234, ..Station::at([0x02, 0xfe, 0x80, 0x7f, 0xff, 0x01]) };
    let Some((one, _socket)) = map(true) else { return };
    let programs = bpf::program_map(2).unwrap();
    let first = bpf::load(&dispatcher(programs.as_raw_fd())).expect("the kernel takes it");
    let other = Station { number: 0x1235, ..own };
    let said = || {
        let frames = [own, Station::BROADCAST, other].map(|to| frame(to, ETHERTYPE, 64));
        frames.map(|frame| bpf::run(&first, &frame).unwrap() == XDP_REDIRECT)
    };
    for groups in [true, false] {
        let take = Match::Frames(ETHERTYPE, Some(own), groups);
        let of_queue = bpf::load(&queue_program(one.as_raw_fd(), take, None)).unwrap();
        let before = said();
        bpf::put(&programs, 1, of_queue.as_raw_fd()).unwrap();
        assert_eq!(said(), before, "that of another queue");
        bpf::put(&programs, 0, of_queue.as_raw_fd()).unwrap();
        drop(of_queue);
        assert_eq!(said(), [true, groups, false]);
    }
    let error = bpf::put(&programs, 2, first.as_raw_fd()).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::E2BIG));
}

/// Interface index of the tests below; no interface has such a number.
fn no_interface(number: u32) -> u32 {
    0x4000_0000 + 16 * std::process::id() + number
}

fn file() -> NotInChildren {
    OwnedFd::from(tempfile::tempfile().unwrap()).into()
}

fn claims(
    index: u32,
    queues: std::ops::RangeInclusive<u32>,
) -> Result<QueueClaims, nix::errno::Errno> {
    QueueClaims::acquire(index, &queues)
}

/// Repeats a query for two seconds: a process that another test starts may hold a descriptor that
/// this one has closed, for a moment.
fn soon<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(2);
    loop {
        if let Some(done) = attempt() {
            return done;
        }
        assert!(std::time::Instant::now() < until, "not in two seconds");
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

/// Goal: a queue has one process, whose share of the program any other gets as long as it lives;
/// then the name is free.
#[test]
fn queues_are_claimed_and_the_program_is_handed_over() {
    let index = no_interface(0);
    let inode = |fd: &OwnedFd| nix::sys::stat::fstat(fd).unwrap().st_ino;
    let busy = Some(nix::errno::Errno::EADDRINUSE);
    for mode in [XdpMode::Native, XdpMode::Generic] {
        let first = soon(|| claims(index, 1..=3).ok());
        assert!(
            matches!(sharing::discover(index, 8), Ok(Discovery::Nobody)),
            "nothing to share yet"
        );
        let (programs, link) = (file(), file());
        let inodes = [&programs, &link].map(|fd| inode(fd));
        let share = first.serve(SharedProgram { programs, link, mode }).unwrap();
        for queues in [1..=1, 3..=3, 0..=1, 3..=9] {
            assert_eq!(claims(index, queues).err(), busy);
        }
        let second = soon(|| claims(index, 4..=5).ok());
        assert_eq!(sharing::claimed_queues(index), [1, 2, 3, 4, 5]);
        let Ok(Discovery::Shared(shared)) = sharing::discover(index, 8) else {
            panic!("not found")
        };
        assert_eq!(shared.mode, mode);
        let second = second.serve(shared).unwrap();
        drop(share);
        drop(soon(|| claims(index, 1..=3).ok()));
        // From the second process, which has it from the first.
        let Ok(Discovery::Shared(shared)) = sharing::discover(index, 8) else {
            panic!("not found")
        };
        assert_eq!([&shared.programs, &shared.link].map(|fd| inode(fd)), inodes);
        drop(second);
        soon(|| sharing::claimed_queues(index).is_empty().then_some(()));
        assert!(matches!(sharing::discover(index, 8), Ok(Discovery::Nobody)));
    }
}

/// Goal: a process that listens at the name of a queue and does not reply, or replies otherwise, is
/// distinguished from no process, and costs a second at most.
#[test]
fn processes_that_do_not_share() {
    use crate::backend::bound::BoundSocket;
    use crate::backend::unix::send;
    let said: [Option<&[u8]>; 5] = [None, Some(&[2, 0]), Some(&[1, 7]), Some(&[1]), Some(&[1; 9])];
    for (says, number) in said.into_iter().zip(1..) {
        let index = no_interface(number);
        let name = format!("barewire-xdp-{index}-0");
        let address = nix::sys::socket::UnixAddr::new_abstract(name.as_bytes()).unwrap();
        let listener = BoundSocket::bind(&address).unwrap();
        listener.listen(nix::sys::socket::Backlog::new(4).unwrap()).unwrap();
        let (found, other) = std::thread::scope(|scope| {
            let asks = scope.spawn(|| sharing::discover(index, 1).unwrap());
            let mut caller = None;
            while let (Some(bytes), None) = (says, &caller) {
                caller = listener.accept();
                if let Some(caller) = &caller {
                    send(caller.as_raw_fd(), bytes, Some(file().as_raw_fd())).unwrap();
                }
            }
            (asks.join().unwrap(), caller)
        });
        drop(other);
        match says {
            None => assert!(matches!(found, Discovery::Unresponsive(0))),
            Some(bytes) => assert!(matches!(found, Discovery::OtherBuild(0)), "{bytes:?}"),
        }
    }
}

/// Ring of the tests below.
const CHUNK: usize = 2048;

fn umem(rx_count: usize, tx_count: usize) -> Umem {
    let len = (rx_count + tx_count) * CHUNK;
    let block = Arena::new(len, Hugepages::No).unwrap().block(len).unwrap();
    Umem::new(block, CHUNK, rx_count)
}

/// The kernel's side of a ring.
struct Kernel {
    map: MmapRaw,
    count: u32,
}

const OFFSETS: RingOffsets = RingOffsets { producer: 0, consumer: 64, flags: 128, entries: 192 };

impl Kernel {
    /// Memory of a ring whose cursors are both at `start`, and another view of it.
    fn new(count: u32, start: u32) -> (UnforkedMap, Self) {
        let file = nix::sys::memfd::memfd_create(c"ring", nix::sys::memfd::MFdFlags::empty());
        let file = std::fs::File::from(file.unwrap());
        file.set_len(192 + u64::from(count) * 16).unwrap();
        let view = || MmapRaw::from(unsafe_map(&file));
        let kernel = Self { map: view(), count };
        kernel.word(OFFSETS.producer).store(start, Release);
        kernel.word(OFFSETS.consumer).store(start, Release);
        (UnforkedMap::new(view()).unwrap(), kernel)
    }

    fn word(&self, at: usize) -> &AtomicU32 {
        // SAFETY: an aligned word of the mapping (`OFFSETS`).
        unsafe { &*self.map.as_ptr().add(at).cast::<AtomicU32>() }
    }

    fn entry<T: Entry>(&self, cursor: u32) -> *mut T {
        let i = (cursor & (self.count - 1)) as usize;
        // SAFETY: below `count`, for which there is room.
        unsafe { self.map.as_mut_ptr().add(OFFSETS.entries).cast::<T>().add(i) }
    }
}

fn unsafe_map(file: &std::fs::File) -> MmapMut {
    // SAFETY: a file in memory that nobody else has, and whose length stays.
    unsafe { MmapMut::map_mut(file) }.unwrap()
}

/// Goal: entries of a ring arrive in order, once, for any interleaving of the two sides, also when
/// the cursors wrap. Method: both kinds of ring against a queue.
#[test]
fn rings_are_queues() {
    for seed in 0..200 {
        let mut numbers = Numbers(seed);
        let count = 1 << numbers.next(5);
        let start = u32::MAX - numbers.next(40) as u32;
        let (map, kernel) = Kernel::new(count, start);
        let mut producer = Producer::<Desc>::new(map, OFFSETS, count).unwrap();
        let (mut written, mut shown, mut serial) = (VecDeque::new(), 0_usize, 0_u64);
        let (map, other) = Kernel::new(count, start);
        let mut consumer = Consumer::<u64>::new(map, OFFSETS, count).unwrap();
        let (mut queue, mut produced, mut taken) = (VecDeque::new(), start, 0_u32);
        for _ in 0..2000 {
            match numbers.next(6) {
                0 | 1 if producer.room().unwrap() > 0 => {
                    serial += 1;
                    let desc = Desc { addr: serial, len: serial as u32 ^ 7, options: 0 };
                    producer.put(desc);
                    written.push_back(desc);
                }
                2 => {
                    producer.publish();
                    shown = written.len();
                }
                3 => {
                    let at = kernel.word(OFFSETS.consumer).load(Acquire);
                    let end = kernel.word(OFFSETS.producer).load(Acquire);
                    assert_eq!(end.wrapping_sub(at) as usize, shown, "seed {seed}");
                    for i in 0..numbers.next(shown as u64 + 1) as u32 {
                        // SAFETY: an entry that was published.
                        let desc = unsafe { kernel.entry::<Desc>(at.wrapping_add(i)).read() };
                        assert_eq!(Some(desc), written.pop_front(), "seed {seed}");
                        shown -= 1;
                        kernel.word(OFFSETS.consumer).store(at.wrapping_add(i + 1), Release);
                    }
                    assert_eq!(producer.unread().unwrap() as usize, shown, "seed {seed}");
                }
                4 if (queue.len() as u32 + taken) < count => {
                    serial += 1;
                    // SAFETY: an entry that the consumer has released.
                    unsafe { other.entry::<u64>(produced).write(serial) };
                    produced = produced.wrapping_add(1);
                    other.word(OFFSETS.producer).store(produced, Release);
                    queue.push_back(serial);
                }
                5 => {
                    let got = consumer.take().unwrap();
                    assert_eq!(got, queue.pop_front(), "seed {seed}");
                    taken += u32::from(got.is_some());
                    if numbers.next(2) == 0 {
                        consumer.release();
                        taken = 0;
                    }
                    let free = other.word(OFFSETS.consumer).load(Acquire);
                    assert_eq!(produced.wrapping_sub(free), queue.len() as u32 + taken);
                }
                _ => {}
            }
            let room = count as usize - written.len();
            assert!(producer.room().unwrap() as usize <= room, "seed {seed}");
        }
        assert!(serial > 100, "seed {seed}: {serial}");
    }
}

/// Goal: the queue that delivered last is polled first, and no queue with frames waits for more
/// than one quantum of each other. Method: random queues have frames, for some time each.
#[test]
fn no_queue_starves() {
    for seed in 0..200 {
        let mut numbers = Numbers(seed);
        let count = 1 + numbers.next(8) as usize;
        let mut scheduler = QueueScheduler::new(count);
        let mut waiting = vec![0_usize; count];
        // Quanta of other queues since a queue with frames had its own.
        let mut passed_over = vec![0; count];
        let (mut last, mut served) = (0, 0);
        for round in 0..3000 {
            if round % 300 == 0 {
                waiting.iter_mut().for_each(|frames| *frames = 1000 * numbers.next(2) as usize);
                passed_over.fill(0);
            }
            let first = scheduler.first();
            let mut at = first;
            for _ in 0..count {
                if waiting[at] > 0 {
                    break;
                }
                at = scheduler.after(at);
            }
            if waiting[at] == 0 {
                assert!(waiting.iter().all(|frames| *frames == 0), "seed {seed}");
                continue;
            }
            let frames = waiting[at].min(1 + numbers.next(32) as usize);
            // Part of its quantum of 64 is left.
            if waiting[last] > 0 && served < 64 {
                assert_eq!((first, at), (last, last), "seed {seed}");
            }
            served = if at == last && first == last { served + frames } else { frames };
            let is_only = (0..count).all(|other| other == at || waiting[other] == 0);
            assert!(served < 64 + 32 || is_only, "seed {seed}: {served}");
            if at != last {
                (0..count).for_each(|i| passed_over[i] += usize::from(waiting[i] > 0));
            }
            passed_over[at] = 0;
            assert!(
                passed_over.iter().all(|scheduler| *scheduler < count),
                "seed {seed}: {passed_over:?}"
            );
            last = at;
            waiting[at] -= frames;
            scheduler.delivered(at, frames);
        }
    }
}

/// Goal: an invalid cursor is rejected, and no entry is read by it.
#[test]
fn cursors_that_cannot_be_are_refused() {
    for start in [0_u32, 5, u32::MAX - 1] {
        for far in [9, 10, 1000, 1 << 31, u32::MAX, u32::MAX - 7] {
            let (map, kernel) = Kernel::new(8, start);
            let mut consumer = Consumer::<u64>::new(map, OFFSETS, 8).unwrap();
            kernel.word(OFFSETS.producer).store(start.wrapping_add(3), Release);
            assert!(consumer.take().unwrap().is_some());
            consumer.take().unwrap();
            consumer.take().unwrap();
            // Three are taken and none is released: five more may come.
            kernel.word(OFFSETS.producer).store(start.wrapping_add(far), Release);
            consumer.take().unwrap_err();
            let (map, kernel) = Kernel::new(8, start);
            let mut producer = Producer::<u64>::new(map, OFFSETS, 8).unwrap();
            (0..4).for_each(|i| producer.put(i));
            producer.publish();
            kernel.word(OFFSETS.consumer).store(start.wrapping_add(2), Release);
            assert_eq!(producer.unread(), Ok(2));
            for bad in [far, 5, 1] {
                // Ahead of what was published, or behind where it was.
                kernel.word(OFFSETS.consumer).store(start.wrapping_add(bad), Release);
                producer.unread().unwrap_err();
            }
        }
    }
}

/// Goal: offsets outside of a ring's mapping are rejected, and no sum of them overflows.
#[test]
fn a_ring_lies_in_its_mapping() {
    let ring = |offsets: RingOffsets, count| {
        let (map, _kernel) = Kernel::new(8, 0);
        Consumer::<Desc>::new(map, offsets, count).is_ok()
    };
    assert!(ring(OFFSETS, 8));
    for far in [193, 320, 4096, usize::MAX, usize::MAX - 7, usize::MAX - 15] {
        assert!(!ring(RingOffsets { producer: far, ..OFFSETS }, 8), "{far}");
        assert!(!ring(RingOffsets { consumer: far, ..OFFSETS }, 8), "{far}");
        assert!(!ring(RingOffsets { flags: far, ..OFFSETS }, 8), "{far}");
        assert!(!ring(RingOffsets { entries: far, ..OFFSETS }, 8), "{far}");
    }
    for count in [0, 3, 7, 16, 1 << 31, u32::MAX] {
        assert!(!ring(OFFSETS, count), "{count}");
    }
}

/// Goal: a descriptor is accepted if and only if it names bytes of a chunk that the kernel has.
/// Method: all numbers near a limit, in any order, against a set of chunks.
#[test]
fn descriptors_that_cannot_be_are_refused() {
    for seed in 0..300 {
        let mut numbers = Numbers(seed);
        let mut umem = umem(4, 4);
        let base = umem.base() as usize;
        let mut lent = [false; 8];
        let mut to_send = Vec::new();
        for _ in 0..300 {
            let chunk = numbers.next(10);
            let near = [0, 1, 255, 256, CHUNK as u64 - 1, CHUNK as u64 / 2];
            let high = [0, 0, 0, 1 << 32, 1 << 63, !0xffff];
            let addr = (chunk * CHUNK as u64 + near[numbers.next(6) as usize])
                .wrapping_add(high[numbers.next(6) as usize]);
            let lens = [0, 1, 14, 60, 1792, CHUNK as u32, CHUNK as u32 + 1, u32::MAX];
            let len = lens[numbers.next(8) as usize];
            let at = (addr / CHUNK as u64) as usize;
            match numbers.next(4) {
                0 if chunk < 4 && !lent[chunk as usize] => {
                    assert_eq!(umem.lend_rx(chunk as u32), chunk * CHUNK as u64);
                    lent[chunk as usize] = true;
                }
                1 => match umem.alloc_tx() {
                    Some(addr) => {
                        let at = (addr / CHUNK as u64) as usize;
                        assert!(at >= 4 && !std::mem::replace(&mut lent[at], true));
                        assert_eq!(umem.at(addr as usize, CHUNK) as usize, base + addr as usize);
                        to_send.push(addr);
                    }
                    None => assert_eq!(lent[4..], [true; 4]),
                },
                2 => {
                    let options = u32::from(numbers.next(8) == 0);
                    let fits = (addr as usize) % CHUNK + len as usize <= CHUNK;
                    let is_known = at < 4 && fits && lent[at];
                    let got = umem.reclaim_rx(Desc { addr, len, options });
                    assert_eq!(got.is_ok(), is_known && options == 0, "seed {seed}: {addr} {len}");
                    if is_known {
                        lent[at] = false;
                    }
                    if let Ok(got) = got {
                        let to = umem.at(got.offset, got.len) as usize;
                        assert!(to >= base && to + got.len <= base + 4 * CHUNK, "seed {seed}");
                    }
                }
                _ => {
                    let sent = if numbers.next(2) == 0 { to_send.pop() } else { None };
                    let addr = sent.unwrap_or(addr);
                    let at = (addr / CHUNK as u64) as usize;
                    let is_known =
                        addr.is_multiple_of(CHUNK as u64) && (4..8).contains(&at) && lent[at];
                    assert_eq!(umem.reclaim_tx(addr).is_ok(), is_known, "seed {seed}: {addr}");
                    if is_known {
                        lent[at] = false;
                        to_send.retain(|other| *other != addr);
                    }
                }
            }
        }
    }
}

/// Goal: the program of a UDP address redirects unfragmented datagrams to it, and passes ARP and
/// all others to the kernel; also in a VLAN. Method: a datagram with each of its bits flipped.
#[test]
fn the_program_takes_datagrams_to_a_place() {
    let place = std::net::SocketAddrV4::new([10, 1, 255, 7].into(), 0xc0de);
    let Some((one, _socket)) = map(true) else { return };
    let load = |vlan| {
        let program = queue_program(one.as_raw_fd(), Match::Datagrams(place.into()), vlan);
        bpf::load(&program).expect("the kernel takes it")
    };
    let [plain, of_vlan] = [None, Some(0x123)].map(load);
    let takes = |frame: &[u8]| bpf::run(&plain, frame).unwrap() == XDP_REDIRECT;
    let takes_tagged = |frame: &[u8]| bpf::run(&of_vlan, frame).unwrap() == XDP_REDIRECT;
    let mut good = vec![0; 64];
    good[12..15].copy_from_slice(&[8, 0, 0x45]);
    (good[20], good[23]) = (0x40, 17);
    good[30..34].copy_from_slice(&place.ip().octets());
    good[36..38].copy_from_slice(&place.port().to_be_bytes());
    assert!(takes(&good) && takes(&good[..42]) && !takes(&good[..39]));
    // Checked fields: EtherType, version and length, fragments, protocol, address, port.
    let fixed = [12..15, 20..22, 23..24, 30..34, 36..38];
    for bit in 0..64 * 8 {
        let mut frame = good.clone();
        frame[bit / 8] ^= 1 << (bit % 8);
        let is_fixed = fixed.iter().any(|range| range.contains(&(bit / 8)));
        // The flags that say "do not fragment", and nothing.
        let is_free = bit / 8 == 20 && bit % 8 >= 6;
        assert_eq!(takes(&frame), !is_fixed || is_free, "bit {bit}");
        let tagged = [&frame[..12], &[0x81, 0, 0x61, 0x23], &frame[12..]].concat();
        assert_eq!(takes_tagged(&tagged), takes(&frame), "bit {bit}");
        assert!(!takes(&tagged) && !takes_tagged(&frame));
    }
    let good = [&good[..12], &[0x81, 0, 0x61, 0x23], &good[12..]].concat();
    for bit in 12 * 8..16 * 8 {
        let mut frame = good.clone();
        frame[bit / 8] ^= 1 << (bit % 8);
        let is_priority = bit / 8 == 14 && bit % 8 >= 4;
        assert_eq!(takes_tagged(&frame), is_priority, "bit {bit}");
    }
    assert!(takes_tagged(&good[..46]) && !takes_tagged(&good[..43]));
}

/// The same over IPv6: EtherType and next header imply the version and no extension headers.
#[test]
fn the_program_takes_datagrams_of_ipv6_to_a_place() {
    let place: std::net::SocketAddrV6 = "[2001:db8::a01:ff07]:49374".parse().unwrap();
    let Some((one, _socket)) = map(true) else { return };
    let load = |vlan| {
        let program = queue_program(one.as_raw_fd(), Match::Datagrams(place.into()), vlan);
        bpf::load(&program).expect("the kernel takes it")
    };
    let [plain, of_vlan] = [None, Some(0x123)].map(load);
    let takes = |frame: &[u8]| bpf::run(&plain, frame).unwrap() == XDP_REDIRECT;
    let takes_tagged = |frame: &[u8]| bpf::run(&of_vlan, frame).unwrap() == XDP_REDIRECT;
    let mut good = vec![0; 80];
    good[12..15].copy_from_slice(&[0x86, 0xdd, 0x60]);
    good[20] = 17;
    good[38..54].copy_from_slice(&place.ip().octets());
    good[56..58].copy_from_slice(&place.port().to_be_bytes());
    assert!(takes(&good) && takes(&good[..62]) && !takes(&good[..61]));
    let fixed = [12..14, 20..21, 38..54, 56..58];
    for bit in 0..80 * 8 {
        let mut frame = good.clone();
        frame[bit / 8] ^= 1 << (bit % 8);
        let is_fixed = fixed.iter().any(|range| range.contains(&(bit / 8)));
        assert_eq!(takes(&frame), !is_fixed, "bit {bit}");
        let tagged = [&frame[..12], &[0x81, 0, 0x61, 0x23], &frame[12..]].concat();
        assert_eq!(takes_tagged(&tagged), !is_fixed, "bit {bit}");
        assert!(!takes(&tagged) && !takes_tagged(&frame));
    }
}
