mod boards;
mod many;

use crate::frame::FRAME_MIN;
use crate::frame::addressed;
use std::collections::{HashMap, VecDeque};
use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::sync::atomic::{AtomicBool, AtomicU32};
use std::time::{Duration, Instant};

use super::*;
use crate::mem::InlineBytes;
use crate::mem::IoBuf;

/// What a frame's fixed part takes of the MTU.
const FIXED: usize = FRAME_MIN - crate::frame::ETH_HDR_LEN;

/// Settings of a segment that no other test uses.
fn fresh() -> ShmSettings {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let serial = SERIAL.fetch_add(1, Relaxed);
    ShmSettings::named(&format!("unit-{}-{serial}", std::process::id()))
}

fn small() -> ShmSettings {
    ShmSettings { ring_len: Some(8192), members: Some(8), ..fresh() }
}

/// What a ring grows for.
const LONG: [u8; 5000] = [3; 5000];

fn open(settings: &ShmSettings) -> ShmPort {
    ShmPort::open(settings).expect("a segment can be joined")
}

fn frame_to(dst: Station, src: Station, payload: &[u8]) -> Vec<u8> {
    addressed(dst, src, [&dst.mac.0[..], &src.mac.0, &[0x88, 0xb5], &[0; 26], payload].concat())
}

fn send(from: &mut ShmPort, to: Station, payload: &[u8]) -> Tx {
    let bytes = frame_to(to, from.caps().station, payload);
    from.tx(&TxFrame::whole(&bytes)).expect("shm is never gone")
}

/// The payloads that are there now.
fn drain(port: &mut ShmPort) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    // Enough polls for the sweep to come round to every ring.
    for _ in 0..SWEEP_EVERY * 65 {
        let mut sink = |f: &RxFrame<'_>| {
            let mut bytes = vec![0; f.len() - FRAME_MIN];
            assert!(f.copy_to(FRAME_MIN, &mut bytes));
            got.push(bytes);
        };
        port.rx_burst(7, &mut sink).expect("shm is never gone");
    }
    got
}

/// Nor does one that leaves take it from the others, nor is it another segment's.
#[test]
fn members_of_one_process_share_a_mapping() {
    let settings = small();
    let begin = |port: &ShmPort| std::ptr::from_ref(port.shared.seg.epoch()).addr();
    let (a, mut b) = (open(&settings), open(&settings));
    assert_eq!(begin(&a), begin(&b));
    let other = open(&small());
    assert_ne!(begin(&other), begin(&b));
    drop(a);
    let mut c = open(&settings);
    assert_eq!(begin(&c), begin(&b));
    assert_eq!(send(&mut c, b.caps().station, b"here"), Tx::Sent);
    assert_eq!(drain(&mut b), [b"here"]);
    drop((b, c));
    // The file went with its last member. The new one may be smaller than what was mapped.
    let again = ShmSettings { ring_len: Some(4096), ..settings };
    let (mut a, mut b) = (open(&again), open(&again));
    assert_eq!(send(&mut a, b.caps().station, b"new"), Tx::Sent);
    assert_eq!(drain(&mut b), [b"new"]);
}

#[test]
fn every_length_arrives_whole_and_in_order() {
    let settings = fresh();
    let (mut a, mut b) = (open(&settings), open(&settings));
    assert_eq!(a.caps().mtu, 65_520);
    let (to, max) = (b.caps().station, a.caps().mtu - FIXED);
    let lens = (0..400).chain([1000, 1499, 1500, 4096, 9000, max - 1, max, max, max]);
    for (i, len) in lens.enumerate() {
        let payload: Vec<u8> = (0..len).map(|j| (i * 7 + j) as u8).collect();
        assert_eq!(send(&mut a, to, &payload), Tx::Sent);
        assert!(drain(&mut b) == [payload], "{len} bytes");
    }
    assert_eq!(b.counters().rx_frames, a.counters().tx_frames);
    assert_eq!(b.counters().rx_bytes, a.counters().tx_bytes);
}

/// Goal: what goes to one station and comes from it is told, and who it is. Method: three members,
/// of which one hears nothing.
#[test]
fn traffic_is_told_by_station() {
    let settings = fresh();
    let (mut a, mut b, c) = (open(&settings), open(&settings), open(&settings));
    let (to, from, quiet) = (b.caps().station, a.caps().station, c.caps().station);
    for _ in 0..50 {
        assert_eq!(send(&mut a, to, &[1; 1000]), Tx::Sent);
        assert_eq!(drain(&mut b).len(), 1);
    }
    let (sent, nothing) = a.traffic(to).unwrap();
    assert!((50 * 1040..50 * 1150).contains(&sent) && nothing == 0, "{sent}, {nothing}");
    assert_eq!(send(&mut b, from, b"known"), Tx::Sent);
    let (answered, came) = b.traffic(from).unwrap();
    assert_eq!(came, sent);
    assert!((19..200).contains(&answered), "{answered}");
    assert_eq!(a.traffic(quiet), Some((0, 0)));
    assert_eq!(a.traffic(Station::at([2, 9, 9, 9, 9, 9])), None);
    assert_eq!(a.station(to), Some(format!("process {}", std::process::id())));
    assert_eq!(a.station(Station::at([2, 9, 9, 9, 9, 9])), None);
}

/// The head of a frame.
struct Eth([u8; FRAME_MIN]);

impl WriteHead<FRAME_MIN> for Eth {
    fn fill(&self, out: &mut HeadBuf<FRAME_MIN>) {
        out.set::<0, FRAME_MIN>(self.0);
    }
}

/// Sends few bytes to `to` by the fast path, and says whether it did and what they were.
fn send_frame_in_place(tx: &mut impl InPlaceTx, to: Station, few: InlineBytes) -> (bool, Vec<u8>) {
    let mut head = [0; FRAME_MIN];
    head[..6].copy_from_slice(&to.mac.0);
    let sent = tx.tx_inline(number(to), &Eth(head), few);
    (sent, few.to_bytes()[..few.len()].to_vec())
}

/// Few bytes that are sent at once arrive as others do, whole and in their order; what cannot be
/// sent so is not sent at all.
#[test]
fn frames_sent_at_once_arrive_like_others() {
    let settings = fresh();
    let (mut a, mut b) = (open(&settings), open(&settings));
    let to = b.caps().station;
    assert!(!send_frame_in_place(&mut a, to, InlineBytes::NONE).0, "nobody knows the way");
    let (mut fast, mut want) = (0, Vec::new());
    for round in 0..100_u128 {
        for len in 0..=16 {
            let bytes = (u128::MAX / (round + 3)).checked_shr(128 - 8 * len as u32).unwrap_or(0);
            for few in [InlineBytes::one(bytes, len), InlineBytes::pair(bytes, bytes / 3, len)] {
                let (sent, payload) = send_frame_in_place(&mut a, to, few);
                fast += usize::from(sent);
                if !sent {
                    assert_eq!(send(&mut a, to, &payload), Tx::Sent);
                }
                want.push(payload);
            }
        }
        if round % 3 == 0 {
            assert!(drain(&mut b) == std::mem::take(&mut want), "round {round}");
        }
    }
    assert!(drain(&mut b) == want);
    assert!(fast > 1000, "{fast} were sent at once");
    assert_eq!(b.counters().rx_frames, a.counters().tx_frames);
    assert_eq!(b.counters().rx_bytes, a.counters().tx_bytes);
}

/// Memory of every length, with a word before it and without, goes by the fast path as by the slow
/// one, and what is too long for it, lies in pieces or goes elsewhere is left alone.
#[test]
fn memory_is_sent_short_as_it_is_long() {
    let settings = fresh();
    let (mut a, mut b, mut c) = (open(&settings), open(&settings), open(&settings));
    let (to, other) = (b.caps().station, c.caps().station);
    let short = |a: &mut ShmPort, to: Station, word: Option<u64>, body: &IoBuf| {
        let head = [&to.mac.0[..], &[0; FRAME_MIN - 6]].concat();
        let head = Eth(head.try_into().unwrap());
        a.tx_short(number(to), body, word, &head)
    };
    assert_eq!(send(&mut a, to, &[]), Tx::Sent);
    assert_eq!(drain(&mut b), [[]]);
    let mut fast = 0;
    for len in (0..=200).cycle().take(2000) {
        let bytes: Vec<u8> = (0..len).map(|i| (i * 11 + len) as u8).collect();
        for word in [None, Some(0x0123_4567_89ab_cdef_u64)] {
            let front = word.map_or(Vec::new(), |word| word.to_le_bytes().to_vec());
            let payload = [front, bytes.clone()].concat();
            let sent = short(&mut a, to, word, &IoBuf::leaked(&bytes));
            assert!(!sent || FRAME_MIN + payload.len() <= SHORT, "{} bytes", payload.len());
            fast += usize::from(sent);
            if !sent {
                assert_eq!(send(&mut a, to, &payload), Tx::Sent);
            }
            assert!(drain_one(&mut b) == payload, "{len} bytes, {word:?}, short {sent}");
        }
    }
    assert!(fast > 1500, "{fast} went by the fast path");
    let mut pieces = IoBuf::leaked(b"in two");
    assert!(pieces.append(IoBuf::leaked(b" pieces")));
    assert!(!short(&mut a, to, None, &pieces));
    assert!(!short(&mut a, other, None, &IoBuf::leaked(b"elsewhere")));
    assert_eq!((drain(&mut b).len(), drain(&mut c).len()), (0, 0));
    assert_eq!(b.counters().rx_frames, a.counters().tx_frames);
    assert_eq!(b.counters().rx_bytes, a.counters().tx_bytes);
}

/// The payload of the frame that is there.
fn drain_one(port: &mut ShmPort) -> Vec<u8> {
    for _ in 0..SWEEP_EVERY * 65 {
        let mut got = None;
        let mut sink = |f: &RxFrame<'_>| {
            let mut bytes = vec![0; f.len() - FRAME_MIN];
            assert!(f.copy_to(FRAME_MIN, &mut bytes));
            got = Some(bytes);
        };
        port.rx_burst(1, &mut sink).expect("shm is never gone");
        if let Some(got) = got {
            return got;
        }
    }
    panic!("no frame came");
}

/// A frame that comes alone can be answered while it is lent, and what it says stays until then.
#[test]
fn a_lent_frame_can_be_answered() {
    struct Echo {
        to: Station,
        answered: usize,
    }
    impl RxSink for Echo {
        fn frame(&mut self, _: &RxFrame<'_>) {}

        fn frame_with(&mut self, frame: &RxFrame<'_>, mut back: impl InPlaceTx) {
            let word = |frame: &RxFrame<'_>| frame.chunk_at::<8>(FRAME_MIN).unwrap();
            let asked = word(frame);
            let few = InlineBytes::one(u64::from_le_bytes(asked).into(), 8);
            self.answered += usize::from(send_frame_in_place(&mut back, self.to, few).0);
            assert_eq!(word(frame), asked);
        }
    }
    let settings = fresh();
    let (mut a, mut b) = (open(&settings), open(&settings));
    let (to, back) = (b.caps().station, a.caps().station);
    // Both ways are known and watched, and have room.
    for _ in 0..2 {
        assert_eq!(send(&mut a, to, &LONG), Tx::Sent);
        assert_eq!(send(&mut b, back, &LONG), Tx::Sent);
        drain(&mut a);
        drain(&mut b);
    }
    let mut echo = Echo { to: back, answered: 0 };
    for i in 0..1000_u64 {
        assert_eq!(send(&mut a, to, &i.to_le_bytes()), Tx::Sent);
        let before = echo.answered;
        while b.receive(7, &mut echo) == 0 {}
        if echo.answered > before {
            assert_eq!(drain(&mut a), [i.to_le_bytes()]);
        }
        // Two frames in a row would be taken as a burst.
        assert_eq!(b.receive(7, &mut echo), 0);
    }
    assert!(echo.answered > 900, "{}", echo.answered);
}

#[test]
#[should_panic(expected = "frame of")]
fn a_frame_beyond_the_mtu_is_the_callers_bug() {
    let settings = ShmSettings { mtu: Some(1500), ..fresh() };
    let mut a = open(&settings);
    let to = a.caps().station;
    send(&mut a, to, &[0; 1501 - FIXED]);
}

#[test]
fn a_frame_beyond_the_receivers_mtu_is_dropped_there() {
    let settings = small();
    let mut a = open(&settings);
    let mut b = open(&ShmSettings { mtu: Some(300 + FIXED), ..settings });
    let to = b.caps().station;
    for payload in [vec![1; 301], vec![2; 300], vec![3; 1000], vec![4; 4]] {
        assert_eq!(send(&mut a, to, &payload), Tx::Sent);
    }
    assert_eq!(drain(&mut b), [vec![2; 300], vec![4; 4]]);
    assert_eq!(b.counters().rx_dropped, 2);
}

#[test]
fn groups_reach_all_others_and_ones_own_address_oneself() {
    let settings = small();
    let mut ports: Vec<_> = (0..5).map(|_| open(&settings)).collect();
    assert_eq!(send(&mut ports[1], Station::BROADCAST, b"all"), Tx::Sent);
    assert_eq!(send(&mut ports[2], Station::at([0x33, 0x33, 0, 0, 0, 1]), b"some"), Tx::Sent);
    let own = ports[3].caps().station;
    assert_eq!(send(&mut ports[3], own, b"me"), Tx::Sent);
    for (i, port) in ports.iter_mut().enumerate() {
        let mut got = drain(port);
        got.sort();
        let mut want: Vec<&[u8]> = Vec::new();
        want.extend((i != 1).then_some(&b"all"[..]));
        want.extend((i == 3).then_some(&b"me"[..]));
        want.extend((i != 2).then_some(&b"some"[..]));
        assert_eq!(got, want, "port {i}");
    }
}

/// Goal: the sender of long frames gets room back while the receiver still copies, and short frames
/// are lent as many as there are.
#[test]
fn long_frames_are_lent_a_few_at_a_time() {
    let settings = fresh();
    let (mut a, mut b) = (open(&settings), open(&settings));
    let (to, long) = (b.caps().station, vec![7; a.caps().mtu - FIXED]);
    for (payload, most) in [(&long[..], 2..=3), (&[1; 8], 10..=12)] {
        for _ in 0..12 {
            assert_eq!(send(&mut a, to, payload), Tx::Sent);
        }
        let mut poll = |_| b.rx_burst(32, &mut |_: &RxFrame<'_>| {}).expect("shm is never gone");
        let bursts = (0..SWEEP_EVERY * 65).map(&mut poll).filter(|&count| count > 0);
        let bursts: Vec<usize> = bursts.collect();
        assert_eq!(bursts.iter().sum::<usize>(), 12);
        // One or two may be lent alone first.
        assert!(most.contains(bursts.iter().max().unwrap()), "{bursts:?}");
    }
}

#[test]
fn a_full_ring_pushes_back_one_sender_only() {
    let settings = small();
    let (mut a, mut b, mut c) = (open(&settings), open(&settings), open(&settings));
    let to = b.caps().station;
    let mut sent = 0_u32;
    while send(&mut a, to, &sent.to_le_bytes()) == Tx::Sent {
        sent += 1;
    }
    // 8192 bytes of granules, one for the cleared word.
    assert_eq!(sent, 127);
    assert_eq!(send(&mut c, to, b"other"), Tx::Sent);
    assert_eq!(send(&mut a, Station::BROADCAST, b"group"), Tx::Sent);
    assert_eq!((a.counters().tx_full, a.counters().tx_dropped), (1, 1));
    let got = drain(&mut b);
    let from_a: Vec<_> = got.iter().filter(|p| *p != b"other").cloned().collect();
    let want: Vec<_> = (0..sent).map(|i| i.to_le_bytes().to_vec()).collect();
    assert_eq!(from_a, want);
    assert_eq!(send(&mut a, to, b"again"), Tx::Sent);
    assert_eq!(drain(&mut b), [b"again"]);
}

/// Goal: a frame that waits for the receiver ends the word that there was no memory, since the
/// receiver may take its time; a short one that is sent does not, since a long one may still wait.
#[test]
fn a_full_ring_is_no_lack_of_memory() {
    let settings = small();
    let (mut a, b, c) = (open(&settings), open(&settings), open(&settings));
    let (to, other) = (b.caps().station, c.caps().station);
    assert_eq!(send(&mut a, to, b"first"), Tx::Sent);
    a.refresh();
    let at = |station: Station| move |p: &Peer| p.state != 0 && p.key == station.word();
    let places = [to, other].map(|station| a.peers.iter().position(at(station)).unwrap());
    // As a long frame found it. The ring stays short.
    a.tx_rings[places[0]].grow_at = u64::MAX;
    places.iter().for_each(|&r| assert_eq!(a.out_of_memory(r, None), Tx::Full));
    assert_eq!(send(&mut a, to, b"short"), Tx::Sent);
    assert!(a.presence(to) == Presence::Starved && a.lacks_memory());
    while send(&mut a, to, b"more") == Tx::Sent {}
    assert_eq!(a.presence(to), Presence::Present);
    assert!(a.presence(other) == Presence::Starved && a.lacks_memory(), "nothing was tried");
    assert_eq!(send(&mut a, other, b"first"), Tx::Sent);
    assert!(a.presence(other) == Presence::Present && !a.lacks_memory());
}

#[test]
fn frames_survive_their_sender_and_precede_its_successors() {
    // Two places: whoever comes next gets the place of the one who left.
    let settings = ShmSettings { members: Some(2), ..small() };
    let mut b = open(&settings);
    let to = b.caps().station;
    for round in 0..20_u8 {
        let mut a = open(&settings);
        assert_eq!(send(&mut a, to, &[round, 1]), Tx::Sent);
        assert_eq!(send(&mut a, to, &[round, 2]), Tx::Sent);
        drop(a);
        let mut next = open(&settings);
        assert_eq!(send(&mut next, to, b"early"), Tx::Full, "the old frames are not read yet");
        assert_eq!(drain(&mut b), [[round, 1], [round, 2]]);
        assert_eq!(send(&mut next, to, b"late"), Tx::Sent);
        assert_eq!(drain(&mut b), [b"late"]);
        drop(next);
        // The receiver notices in its own time; until then the place's ring is not free.
        assert!(drain(&mut b).is_empty());
    }
}

#[test]
fn a_receiver_that_left_has_no_route_and_is_found_again() {
    let settings = ShmSettings { members: Some(2), ..small() };
    let mut a = open(&settings);
    let mac = Station::at([2, 0, 0, 0, 0, 9]);
    for round in 0..20_u8 {
        let mut b = open(&ShmSettings { station: Some(mac), ..settings.clone() });
        assert_eq!(send(&mut a, mac, &[round]), Tx::Sent);
        assert_eq!(drain(&mut b), [[round]]);
        assert_eq!(send(&mut a, mac, b"lost with the receiver"), Tx::Sent);
        drop(b);
        if round & 1 == 0 {
            assert_eq!(send(&mut a, mac, b"x"), Tx::NoRoute);
        }
    }
    assert_eq!(send(&mut a, Station::at([2, 1, 1, 1, 1, 1]), b"x"), Tx::NoRoute);
}

/// Goal: memory of a pair is held only while both are there. Method: blocks of the file.
#[test]
fn leaving_gives_memory_back_and_the_last_removes_the_file() {
    let settings = fresh();
    let mut a = open(&settings);
    let blocks = || std::fs::metadata(settings.path()).unwrap().blocks();
    let idle = blocks();
    for _ in 0..3 {
        let (mut b, c) = (open(&settings), open(&settings));
        let (mac_a, mac_b) = (a.caps().station, b.caps().station);
        assert_eq!(send(&mut a, mac_b, b"ab"), Tx::Sent);
        assert_eq!(send(&mut b, mac_a, b"ba"), Tx::Sent);
        let first = 2 * (a.shared.seg.layout.first_len() as u64) / 512;
        assert!((first..first + 64).contains(&(blocks() - idle)), "{} blocks", blocks() - idle);
        assert_eq!(send(&mut b, mac_a, &LONG), Tx::Sent);
        assert!(blocks() >= idle + (RING_LEN as u64) / 512);
        drop((b, c));
        assert_eq!(drain(&mut a), [&b"ba"[..], &LONG]);
        assert_eq!(send(&mut a, mac_b, b"x"), Tx::NoRoute);
        assert!(blocks() < idle + 64, "{} blocks remain of {idle}", blocks());
    }
    drop(a);
    assert!(!settings.path().exists());
}

/// Goal: rings that are not watched are served, in order, without loss, and none starves.
#[test]
fn more_senders_than_watches_are_all_served() {
    let settings = small();
    let mut b = open(&settings);
    let mut senders: Vec<_> = (0..7).map(|_| open(&settings)).collect();
    let to = b.caps().station;
    let mut next = [0_u8; 7];
    for round in 0..200_u8 {
        for (i, a) in senders.iter_mut().enumerate() {
            for n in 0..2 {
                assert_eq!(send(a, to, &[i as u8, 2 * (round % 100) + n]), Tx::Sent);
            }
        }
        let mut count = 0;
        for _ in 0..10 {
            let mut sink = |f: &RxFrame<'_>| {
                let [i, n] = f.chunk_at(FRAME_MIN).unwrap();
                assert_eq!(n, next[i as usize]);
                next[i as usize] = (n + 1) % 200;
                count += 1;
            };
            b.rx_burst(3, &mut sink).unwrap();
        }
        assert_eq!(count, 14, "10 polls of 3 see all 14");
    }
}

/// Goal: per pair, frames are a queue, whoever joins and leaves meanwhile. Method: random
/// operations on up to 8 ports against queues; printed seed.
#[test]
fn segment_follows_its_model() {
    for seed in 1..=60_u64 {
        println!("SHM_SEED={seed}");
        model_run(seed);
    }
}

fn xorshift(x: &mut u64) -> u64 {
    *x ^= *x << 13;
    *x ^= *x >> 7;
    *x ^= *x << 17;
    *x
}

fn model_run(seed: u64) {
    let mut rng = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let settings = ShmSettings { members: Some(5), ..small() };
    let mut ports: Vec<ShmPort> = Vec::new();
    // By (sender, receiver) address: what is on the way.
    let mut queues: HashMap<(Station, Station), VecDeque<Vec<u8>>> = HashMap::new();
    let mut serial = 0_u32;
    for _ in 0..1500 {
        let pick = xorshift(&mut rng) as usize;
        let i = if ports.is_empty() { 0 } else { pick / 100 % ports.len() };
        match pick % 100 {
            0..3 if ports.len() < 5 => ports.push(open(&settings)),
            3..5 if ports.len() > 1 => {
                let gone = ports.swap_remove(i).caps().station;
                queues.retain(|&(_, to), _| to != gone);
            }
            5..60 if !ports.is_empty() => {
                let to = ports[xorshift(&mut rng) as usize % ports.len()].caps().station;
                serial += 1;
                let len = xorshift(&mut rng) as usize % if pick & 1 == 0 { 60 } else { 1900 } + 4;
                let mut payload = vec![serial as u8; len];
                payload[..4].copy_from_slice(&serial.to_le_bytes());
                let from = ports[i].caps().station;
                match send(&mut ports[i], to, &payload) {
                    Tx::Sent => queues.entry((from, to)).or_default().push_back(payload),
                    Tx::Full => {}
                    Tx::NoRoute => panic!("{to} is attached"),
                }
            }
            60.. if !ports.is_empty() => {
                let me = ports[i].caps().station;
                let mut sink = |f: &RxFrame<'_>| {
                    let mut bytes = vec![0; f.len()];
                    assert!(f.copy_to(0, &mut bytes));
                    let from =
                        Station::at([bytes[6], bytes[7], bytes[8], bytes[9], bytes[10], bytes[11]]);
                    let want = queues.get_mut(&(from, me)).and_then(VecDeque::pop_front);
                    assert_eq!(Some(&bytes[FRAME_MIN..]), want.as_deref());
                };
                ports[i].rx_burst(pick % 40, &mut sink).unwrap();
            }
            _ => {}
        }
    }
    for port in &mut ports {
        let me = port.caps().station;
        let count: usize =
            queues.iter().filter(|((_, to), _)| *to == me).map(|(_, q)| q.len()).sum();
        assert_eq!(drain(port).len(), count, "frames to {me}");
    }
}

/// Goal: whatever anybody writes to the segment, members do not panic, loop or leave their memory.
/// Method: a thread writes noise and near-truths everywhere while two members talk, and so does
/// theirs between their calls, however seldom the other one gets to run. Damage is a matter of
/// luck, and one blow may end all talk: a segment without damage is followed by another.
#[test]
fn a_scribbler_is_survived() {
    let (mut writes, mut frames) = (0, 0);
    for seed in 1..20 {
        let survived = survive_a_scribbler(seed);
        (writes, frames) = (writes + survived.0, frames + survived.1);
        if survived.2 > 0 && writes > 10 && frames > 100 {
            return;
        }
    }
    panic!("{writes} writes and {frames} frames did no damage");
}

/// Of two members that talk for a while on a segment: writes of the thread, frames that arrived,
/// and frames that were dropped.
fn survive_a_scribbler(seed: u64) -> (u64, u64, u64) {
    let settings = small();
    let (mut a, mut b) = (open(&settings), open(&settings));
    let to = [a.caps().station, b.caps().station];
    let stop = Arc::new(AtomicBool::new(false));
    let scribbler = {
        let (stop, mut scribbler) = (Arc::clone(&stop), Scribbler::of(&settings, 2 * seed));
        std::thread::spawn(move || {
            let mut writes = 0;
            while !stop.load(Relaxed) {
                scribbler.write();
                writes += 1;
                // Slow enough that rings get opened between two blows.
                if writes % 4 == 0 {
                    std::thread::yield_now();
                }
            }
            writes
        })
    };
    let mut between = Scribbler::of(&settings, 2 * seed + 1);
    let started = Instant::now();
    let (mut frames, mut n) = (0_u64, 0_usize);
    while started.elapsed() < Duration::from_millis(1500) {
        for _ in 0..100 {
            n += 1;
            send(&mut a, to[n & 1], &[7; 1200][..n % 1200]);
            send(&mut b, to[n >> 1 & 1], &[9; 1200][..n % 900]);
            a.tx(&TxFrame::whole(&frame_to(Station::BROADCAST, to[0], b"all"))).unwrap();
            between.write();
            for port in [&mut a, &mut b] {
                let mut sink = |f: &RxFrame<'_>| {
                    let mut bytes = [0; 8192];
                    assert!(f.len() >= FRAME_MIN && f.copy_to(0, &mut bytes[..f.len()]));
                    frames += 1;
                };
                assert!(port.rx_burst(32, &mut sink).unwrap() <= 32);
            }
            a.flush().unwrap();
            b.flush().unwrap();
        }
        b.waiter().unwrap().wait(Duration::from_micros(1));
    }
    stop.store(true, Relaxed);
    let writes = scribbler.join().unwrap();
    let dropped = a.counters().rx_dropped + b.counters().rx_dropped;
    drop((a, b));
    let _ = std::fs::remove_file(settings.path());
    (writes, frames, dropped)
}

/// Writes to a segment what stands there in nobody's plan.
struct Scribbler {
    file: std::fs::File,
    layout: Layout,
    rng: u64,
}

impl Scribbler {
    fn of(settings: &ShmSettings, seed: u64) -> Self {
        let file = OpenOptions::new().write(true).open(settings.path()).unwrap();
        let layout = settings.layout().unwrap();
        Self { file, layout, rng: seed.wrapping_mul(88_172_645_463_325_252) }
    }

    /// Writes one word.
    fn write(&mut self) {
        let Self { file, layout, rng } = self;
        let r = xorshift(rng);
        let (s, d) = (r as usize >> 8 & 7, r as usize >> 11 & 7);
        let at = match r & 7 {
            // The header is not read again; members, links and rings are.
            0 => 4096 + (r >> 20) as usize % 1024,
            1 => layout.member(d) + [0, 8, 64, 72][(r >> 30 & 3) as usize],
            2 => layout.link(s, d) + [0, 8, 16, 64, 72][(r >> 30) as usize % 5],
            // Frame words: near-truths come from writing small numbers.
            _ => layout.ring(s, d) + (r >> 40) as usize % (layout.ring_len / 64) * 64,
        };
        let value = match r >> 16 & 3 {
            0 => xorshift(rng),
            1 => 0,
            2 => xorshift(rng) % 300,
            _ => ((xorshift(rng) % 200) << 32) | (xorshift(rng) % 2100),
        };
        file.write_all_at(&value.to_le_bytes(), at as u64).unwrap();
    }
}

#[test]
fn a_sleeper_is_woken_by_a_frame_and_by_wake() {
    let settings = small();
    let (mut a, b) = (open(&settings), open(&settings));
    let to = b.caps().station;
    let waiter = b.waiter().unwrap();
    let t = std::thread::spawn(move || {
        let began = Instant::now();
        waiter.wait(Duration::from_secs(20));
        let first = began.elapsed();
        drop(b);
        first
    });
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(send(&mut a, to, b"x"), Tx::Sent);
    a.flush().unwrap();
    let slept = t.join().unwrap();
    assert!(slept >= Duration::from_millis(10) && slept < Duration::from_secs(5), "{slept:?}");

    let waiter = a.waiter().unwrap();
    waiter.wake();
    let began = Instant::now();
    waiter.wait(Duration::from_secs(20));
    assert!(began.elapsed() < Duration::from_secs(5));
    let began = Instant::now();
    waiter.wait(Duration::from_millis(30));
    assert!(began.elapsed() >= Duration::from_millis(30), "nothing had come");
}

/// Goal: a sleeper looks where the next frame will come although frames that are taken one by one
/// do not tell him each time: the first poll that finds nothing does, and one that looks elsewhere.
#[test]
fn a_sleeper_learns_where_the_next_frame_comes() {
    // Of rings that never have to be given back meanwhile, which is not done by the fast path.
    let settings = ShmSettings { members: Some(8), ..fresh() };
    let (mut a, mut b, mut c) = (open(&settings), open(&settings), open(&settings));
    let to = b.caps().station;
    let mut sink = |_: &RxFrame<'_>| {};
    for _ in 0..10 {
        send(&mut a, to, &LONG);
        drain(&mut b);
    }
    let sleeps = |b: &ShmPort| {
        let began = Instant::now();
        b.waiter().unwrap().wait(Duration::from_millis(5));
        began.elapsed() >= Duration::from_millis(5)
    };
    for n in 0..300 {
        send(&mut a, to, b"alone");
        assert_eq!(b.rx_poll(&mut sink), Some(1));
        if n % 3 == 0 {
            send(&mut c, to, b"from elsewhere");
            assert_eq!(b.rx_poll(&mut sink), None);
            assert_eq!(b.poll(32, &mut sink), 1);
        } else {
            assert_eq!(b.rx_poll(&mut sink), Some(0));
        }
        if n % 50 == 0 {
            while b.poll(32, &mut sink) > 0 {}
            assert!(sleeps(&b), "frame {n}: nothing is there");
            send(&mut a, to, b"wakes");
            assert!(!sleeps(&b));
            assert_eq!(b.poll(32, &mut sink), 1);
            b.poll(32, &mut sink);
        }
    }
}

/// A watch on a ring that has just had a frame is not taken for idle.
#[test]
fn a_watch_that_moved_is_not_idle() {
    let settings = small();
    let mut b = open(&settings);
    let mut senders: Vec<_> = (0..WATCHES + 1).map(|_| open(&settings)).collect();
    let to = b.caps().station;
    for a in &mut senders[..WATCHES] {
        send(a, to, b"watched");
        while b.rx_burst(32, &mut |_: &RxFrame<'_>| {}) == Ok(0) {}
    }
    let first = b.watches[0].sender;
    // Idle for long, and then one frame, which no sweep has seen yet.
    drain(&mut b);
    send(&mut senders[0], to, b"again");
    assert_eq!(b.rx_poll(&mut |_: &RxFrame<'_>| {}), Some(1));
    send(&mut senders[WATCHES], to, b"comes by the bell");
    while b.poll(32, &mut |_: &RxFrame<'_>| {}) == 0 {}
    assert_eq!(b.watches[0].sender, first);
    assert_ne!(b.watches[1].sender, senders[1].shared.me, "the other one was idle");
}

fn refused(settings: &ShmSettings) -> OpenError {
    match ShmPort::open(settings) {
        Ok(_) => panic!("{settings:?} was accepted"),
        Err(e) => {
            let text = e.to_string();
            assert!(!text.contains('\n') && text.len() < 400, "{text}");
            e
        }
    }
}

#[test]
fn bad_settings_are_refused_and_leave_nothing() {
    let s = fresh();
    let station = Some(Station::at([1, 0, 0, 0, 0, 1]));
    for bad in [
        ShmSettings { name: "a/b".into(), ..s.clone() },
        ShmSettings { name: String::new(), ..s.clone() },
        ShmSettings { station, ..s.clone() },
        ShmSettings { mtu: Some(255), ..s.clone() },
        ShmSettings { mtu: Some(MTU_MAX + 1), ..s.clone() },
        ShmSettings { ring_len: Some(3 << 20), ..s.clone() },
        ShmSettings { ring_len: Some(8192), mtu: Some(4000), ..s.clone() },
        ShmSettings { members: Some(1025), ..s.clone() },
    ] {
        assert_eq!(refused(&bad).errno(), libc::EINVAL);
        assert!(!s.path().exists(), "{bad:?} left its file");
    }
    let huge = ShmSettings { ring_len: Some(1 << 40), members: Some(2), ..s.clone() };
    let e = refused(&huge);
    assert!(matches!(e, OpenError::NoSpace { .. }) && e.to_string().contains("remount"), "{e}");
    assert!(!s.path().exists());
    let e = refused(&ShmSettings { dir: "/nonexistent".into(), ..s });
    assert!(e.errno() == libc::ENOENT && e.to_string().contains("/nonexistent/barewire-"), "{e}");
}

#[test]
fn members_must_agree_on_sizes_and_differ_in_address() {
    let s =
        ShmSettings { members: Some(2), station: Some(Station::at([2, 0, 0, 0, 0, 1])), ..small() };
    let _a = open(&s);
    let e = refused(&s);
    assert!(e.errno() == libc::EADDRINUSE && e.to_string().contains("02:00:00:00:00:01"), "{e}");
    let s = ShmSettings { station: None, ..s };
    assert!(matches!(
        refused(&ShmSettings { ring_len: Some(16384), ..s.clone() }),
        OpenError::Differs { .. }
    ));
    let _b = open(&ShmSettings { ring_len: None, members: None, ..s.clone() });
    let e = refused(&s);
    assert!(matches!(e, OpenError::Crowded { members: 2, .. }), "{e}");
    assert!(e.to_string().contains("make it larger with members="), "{e}");
}

/// Goal: whoever finds a segment with as many members as there can be is told what helps.
#[test]
fn one_member_too_many_is_told_what_helps() {
    let s = ShmSettings { members: None, ring_len: Some(4096), mtu: Some(900), ..small() };
    let all: Vec<_> = (0..MEMBERS_MAX).map(|_| open(&s)).collect();
    let e = refused(&s).to_string();
    let why = "has all its 1024 members; no segment has more";
    assert!(e.contains(why) && e.contains("udp:"), "{e}");
    drop(all);
    assert!(!s.path().exists());
}

#[test]
fn a_file_that_is_not_a_safe_segment_is_refused_and_kept() {
    let s = small();
    let write = |at: u64, bytes: &[u8]| {
        OpenOptions::new().write(true).open(s.path()).unwrap().write_all_at(bytes, at).unwrap();
    };
    let with_segment = |spoil: &dyn Fn()| {
        let a = open(&s);
        spoil();
        let e = refused(&s);
        assert!(e.to_string().contains("rm /dev/shm/barewire-"), "{e}");
        assert!(s.path().exists());
        drop(a);
        let _ = std::fs::remove_file(s.path());
        e
    };
    let e = with_segment(&|| {
        std::fs::set_permissions(s.path(), std::fs::Permissions::from_mode(0o640)).unwrap();
    });
    assert!(matches!(e, OpenError::NotOurs { .. }) && e.to_string().contains("640"), "{e}");
    let e = with_segment(&|| write(8, &(layout::VERSION + 1).to_le_bytes()));
    let version = format!("version {}", layout::VERSION + 1);
    assert!(matches!(e, OpenError::OtherVersion { .. }) && e.to_string().contains(&version), "{e}");
    with_segment(&|| write(0, b"somebody"));
    with_segment(&|| write(16, &u64::MAX.to_le_bytes()));
    with_segment(&|| write(24, &0_u64.to_le_bytes()));
    with_segment(&|| {
        let file = OpenOptions::new().write(true).open(s.path()).unwrap();
        file.set_len(file.metadata().unwrap().len() + 4096).unwrap();
    });

    std::os::unix::fs::symlink("/etc/passwd", s.path()).unwrap();
    assert!(matches!(refused(&s), OpenError::NotOurs { .. }));
    std::fs::remove_file(s.path()).unwrap();
}

#[test]
fn a_segment_of_dead_processes_is_recreated() {
    let s = small();
    // A maker who died half way, and a segment whose members are gone without leaving.
    std::fs::write(s.path(), [0; 5000]).unwrap();
    std::fs::set_permissions(s.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
    drop(open(&s));
    let a = open(&s);
    let copy = std::fs::read(s.path()).unwrap();
    drop(a);
    std::fs::write(s.path(), copy).unwrap();
    std::fs::set_permissions(s.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
    let (mut a, mut b) = (open(&s), open(&s));
    let to = b.caps().station;
    assert_eq!(send(&mut a, to, b"x"), Tx::Sent);
    assert_eq!(drain(&mut b), [b"x"]);
}

/// Goal: an update finds what processes of another version left by dying, and makes it anew; while
/// one of them lives it says what to end. Method: another version in the header, with a member's
/// lock and without; the sizes mean something else there.
#[test]
fn a_segment_of_another_version_is_made_anew_when_nobody_lives_in_it() {
    let s = small();
    let file = || OpenOptions::new().read(true).write(true).open(s.path()).unwrap();
    let member = open(&s);
    file().write_all_at(&(layout::VERSION - 1).to_le_bytes(), 8).unwrap();
    file().write_all_at(&u64::MAX.to_le_bytes(), 16).unwrap();
    let copy = std::fs::read(s.path()).unwrap();
    let why = refused(&s).to_string();
    let version = format!("version {}", layout::VERSION - 1);
    assert!(why.contains(&version) && why.contains("end the programs that use it"), "{why}");
    assert!(s.switch_pid().is_err() && s.path().exists());
    drop(member);
    std::fs::write(s.path(), copy).unwrap();
    std::fs::set_permissions(s.path(), std::fs::Permissions::from_mode(0o600)).unwrap();
    // Of a segment with more members than one can have here.
    let far = file();
    crate::backend::lock::show_life(&far, 5000).unwrap();
    assert!(matches!(refused(&s), OpenError::OtherVersion { .. }));
    crate::backend::lock::end_life(&far, 5000);
    assert_eq!(s.switch_pid().unwrap(), None);
    let (mut a, mut b) = (open(&s), open(&s));
    assert_eq!(send(&mut a, b.caps().station, b"x"), Tx::Sent);
    assert_eq!(drain(&mut b), [b"x"]);
    // The old file is nobody's.
    assert_eq!(far.metadata().unwrap().nlink(), 0);
}

/// Goal: a segment of another version loses its name to a switch, and its members notice nothing;
/// one of this version stays.
#[test]
fn a_segment_of_another_version_gives_way_to_a_switch() {
    let s = small();
    assert!(!s.remove_other_version().unwrap(), "there is none");
    let (mut a, mut b) = (open(&s), open(&s));
    assert!(!s.remove_other_version().unwrap() && s.path().exists());
    let file = OpenOptions::new().write(true).open(s.path()).unwrap();
    file.write_all_at(&(layout::VERSION + 1).to_le_bytes(), 8).unwrap();
    assert!(s.remove_other_version().unwrap() && !s.path().exists());
    assert_eq!(send(&mut a, b.caps().station, b"x"), Tx::Sent);
    assert_eq!(drain(&mut b), [b"x"]);
    let next = open(&s);
    drop((a, b));
    assert!(s.path().exists(), "the next one's");
    drop(next);
}

/// Goal: a ring that was opened to who had our place before is closed, so that its sender opens one
/// to us. Method: the words as they are when a sender is in the middle of opening one while the
/// receiver leaves without the lock.
#[test]
fn a_ring_to_a_former_member_is_closed() {
    let s = small();
    let (mut a, mut b) = (open(&s), open(&s));
    let (to, at, from) = (b.caps().station, b.shared.me, a.shared.me);
    assert_eq!(send(&mut a, to, b"lost"), Tx::Sent);
    let seg = &b.shared.seg;
    let link = seg.link(from, at).expect("it was opened");
    link.rx_inc.store(b.inc - 1, Relaxed);
    assert!(drain(&mut b).is_empty());
    assert_eq!(send(&mut a, to, b"next"), Tx::Sent);
    assert_eq!(drain(&mut b), [b"next"]);
}

/// Goal: who gets up is not kept by others that ring without end; any process finds the name.
/// Method: as many datagrams as the socket takes; each time some of them go, until none is left.
#[test]
fn getting_up_takes_a_few_rings() {
    use std::os::fd::AsRawFd;
    use std::os::linux::net::SocketAddrExt;
    use std::os::unix::net::{SocketAddr, UnixDatagram};
    let port = open(&small());
    let bell = port.wake_socket().unwrap();
    let name = port.shared.seg.wake_name(port.shared.me).load(Relaxed);
    let to = SocketAddr::from_abstract_name(format!("barewire-bell-{name:016x}")).unwrap();
    let ringer = UnixDatagram::unbound().unwrap();
    ringer.set_nonblocking(true).unwrap();
    let rings = (0..10_000).take_while(|_| ringer.send_to_addr(&[], &to).is_ok()).count();
    let rung = || {
        let mut fds = [crate::backend::readable(bell.fd().as_raw_fd())];
        crate::backend::sleep(&mut fds, Duration::ZERO)
    };
    assert!(rings > wait::DATAGRAMS_MAX && rung());
    for taken in (wait::DATAGRAMS_MAX..).step_by(wait::DATAGRAMS_MAX) {
        bell.disarm();
        assert_eq!(rung(), taken < rings, "{taken} of {rings}");
        if taken >= rings {
            break;
        }
    }
}

/// Whoever makes a segment removes those of the dead, and touches no other file.
#[test]
fn segments_of_dead_processes_are_removed() {
    let dir = tempfile::tempdir().expect("a directory");
    let named = |name: &str| ShmSettings { dir: dir.path().into(), name: name.into(), ..small() };
    let (dead, living, foreign) = (named("dead"), named("living"), named("foreign"));
    let member = open(&living);
    let copy = std::fs::read(living.path()).unwrap();
    for (path, bytes) in [(dead.path(), &copy[..]), (foreign.path(), &[7; 64])] {
        std::fs::write(&path, bytes).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).unwrap();
    }
    let maker = open(&named("new"));
    let left = [&dead, &living, &foreign].map(|s| s.path().exists());
    assert_eq!(left, [false, true, true]);
    drop((member, maker));
}

/// What a monitor sees now: payloads in the order of their stamps.
fn overhear(monitor: &mut Monitor) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    for _ in 0..SWEEP_EVERY * 65 {
        let each = |at: u64, _, f: &RxFrame<'_>, len: usize| {
            let mut bytes = vec![0; len - FRAME_MIN];
            assert!(f.copy_to(FRAME_MIN, &mut bytes));
            got.push((at, bytes));
        };
        monitor.read(7, each).expect("shm is never gone");
    }
    got.sort();
    got.into_iter().map(|(_, bytes)| bytes).collect()
}

#[test]
fn a_monitor_sees_each_frame_once_and_in_the_order_of_sending() {
    let settings = fresh();
    let (mut a, mut b) = (open(&settings), open(&settings));
    let (to_a, to_b) = (a.caps().station, b.caps().station);
    // The routes are there before the monitor is.
    assert_eq!(send(&mut a, to_b, b"before"), Tx::Sent);
    assert_eq!(send(&mut b, to_a, b"before"), Tx::Sent);
    let mut monitor = Monitor::open(&settings).expect("a segment can be joined");
    drain(&mut a);
    drain(&mut b);
    let long = vec![7; a.caps().mtu - FIXED];
    assert_eq!(send(&mut a, to_b, b"1 request"), Tx::Sent);
    assert_eq!(send(&mut b, to_a, b"2 reply"), Tx::Sent);
    assert_eq!(send(&mut a, Station::BROADCAST, b"3 all"), Tx::Sent);
    assert_eq!(send(&mut a, to_b, &long), Tx::Sent);
    let nobody = Station::at([2, 0, 0, 0, 0, 99]);
    assert_eq!(send(&mut a, nobody, b"lost"), Tx::NoRoute);
    assert!(overhear(&mut monitor) == [&b"1 request"[..], b"2 reply", b"3 all", &long]);
    assert_eq!(drain(&mut b).len(), 3);
    // It is nobody to the others, and they forget it when it leaves.
    assert_eq!(send(&mut a, monitor.port.caps().station, b"x"), Tx::NoRoute);
    drop(monitor);
    drain(&mut a);
    assert!(a.monitors.is_empty());
    assert_eq!(send(&mut a, to_b, b"after"), Tx::Sent);
    assert_eq!(a.routes.iter().filter(|route| route.key != NO_KEY).count(), 1);
    assert_eq!(drain(&mut b), [b"after"]);
}

#[test]
fn a_slow_monitor_misses_frames_and_holds_up_nobody() {
    let settings = small();
    let mut monitor = Monitor::open(&settings).expect("a segment can be joined");
    let (mut a, mut b) = (open(&settings), open(&settings));
    let to = b.caps().station;
    for i in 0..1000_u32 {
        assert_eq!(send(&mut a, to, &i.to_le_bytes()), Tx::Sent);
        if i % 10 == 9 {
            assert_eq!(drain(&mut b).len(), 10);
        }
    }
    let seen = overhear(&mut monitor);
    assert!(!seen.is_empty() && seen.len() < 1000, "{}", seen.len());
    assert_eq!(seen.len() as u64 + monitor.missed(), 1000);
    assert_eq!(seen[0], 0_u32.to_le_bytes());
}

/// An address as the lower bits of a number.
fn number(mac: Station) -> u64 {
    mac.word()
}

/// Goal: whoever opens many rings at once takes a few turns of a switch that believes nobody, and
/// every frame comes; and a segment whose size others can change is not joined.
#[test]
fn a_wary_switch_opens_a_few_rings_a_turn() {
    let settings = ShmSettings { members: Some(64), ..fresh() };
    let file = sealed::create(&settings).unwrap();
    let another = || sealed::reopen(&file).unwrap();
    let uplink = Uplink { mtu: 1500, ..Uplink::default() };
    let mut switch = ShmPort::open_switch_of(another(), &settings, uplink).unwrap();
    let leaf = |_| ShmPort::open_leaf_of(another(), &settings).unwrap().0;
    let mut leaves: Vec<ShmPort> = (0..21).map(leaf).collect();
    for leaf in &mut leaves {
        assert_eq!(send(leaf, Station::at([2, 0, 0, 0, 0, 9]), b"x"), Tx::Sent);
    }
    let mut got = 0;
    for turn in 1..=6 {
        switch.receive_from(64, |_, _| got += 1);
        assert!(switch.open_rx_rings.len() <= turn * STEPS as usize, "turn {turn}");
    }
    assert_eq!((got, switch.open_rx_rings.len()), (21, 21));
    // What it sends opens rings as well.
    let macs: Vec<Station> = leaves.iter().map(|leaf| leaf.caps().station).collect();
    switch.receive_from(64, |_, _| ());
    let sent = macs.iter().filter(|mac| send(&mut switch, **mac, b"y") == Tx::Sent).count();
    assert_eq!(sent, STEPS as usize);
    let open = tempfile::tempfile().unwrap();
    let why = ShmPort::open_leaf_of(open, &settings).map(drop).unwrap_err();
    assert!(matches!(why, OpenError::Device { errno: libc::EACCES, .. }), "{why}");
    assert!(!why.to_string().contains("rm /memfd"), "{why}");
}
