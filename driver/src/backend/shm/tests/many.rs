//! Segments of many members.

use super::*;
use crate::frame::FRAME_MIN;

/// `count` members, or `None` where there are not as many file descriptors.
fn open_many(settings: &ShmSettings, count: usize) -> Option<Vec<ShmPort>> {
    let mut ports = Vec::new();
    while ports.len() < count {
        match ShmPort::open(settings) {
            Ok(port) => ports.push(port),
            Err(OpenError::Os { source, hint, .. })
                if source.raw_os_error() == Some(libc::EMFILE) =>
            {
                println!("SKIPPED: {count} members take a descriptor each{hint}");
                return None;
            }
            Err(e) => panic!("{e}"),
        }
    }
    Some(ports)
}

/// A payload that follows from who sent what to whom.
fn payload(from: usize, to: usize, round: usize, len: usize) -> Vec<u8> {
    let head = [from, to, round].map(|n| (n as u16).to_le_bytes()).concat();
    let rest = (head.len()..len).map(|i| (from * 7 + to * 5 + round * 3 + i) as u8);
    head.iter().copied().chain(rest).collect()
}

/// Checks that what has come is what was sent, in order, and counts it.
struct Checked {
    /// Rounds received, by receiver and sender.
    rounds: Vec<Vec<usize>>,
    frames: usize,
}

impl Checked {
    fn new(count: usize) -> Self {
        Self { rounds: vec![vec![0; count]; count], frames: 0 }
    }

    fn poll(&mut self, ports: &mut [ShmPort], to: usize, len: impl Fn(usize) -> usize) -> usize {
        let rounds = &mut self.rounds[to];
        let mut sink = |f: &RxFrame<'_>| {
            let from = usize::from(u16::from_le_bytes(f.chunk_at(FRAME_MIN).unwrap()));
            let mut bytes = vec![0; f.len() - FRAME_MIN];
            assert!(f.copy_to(FRAME_MIN, &mut bytes));
            let (round, is) = (rounds[from], &bytes[..6]);
            let want = payload(from, to, round, len(round));
            assert!(bytes == want, "{from} to {to}, {round}: {} bytes, {is:?}", bytes.len());
            rounds[from] += 1;
        };
        let count = ports[to].receive(32, &mut sink);
        self.frames += count;
        count
    }
}

/// Goal: as many members as there can be hear each other, and one whose bell was not rung is heard
/// within 50 us. Method: all send to one, one sends to all, each to the next, every byte checked;
/// then frames of senders that are as good as killed before they rang.
#[test]
fn a_thousand_members_hear_each_other() {
    let settings = fresh();
    let Some(mut ports) = open_many(&settings, MEMBERS_MAX) else { return };
    let macs: Vec<_> = ports.iter().map(|port| port.caps().station).collect();
    let (n, mut checked) = (ports.len(), Checked::new(MEMBERS_MAX));
    let len = |round| 40 + round * 900;
    for m in 1..n {
        for (from, to) in [(m, 0), (0, m), (m, if m + 1 < n { m + 1 } else { 1 })] {
            assert_eq!(send(&mut ports[from], macs[to], &payload(from, to, 0, 40)), Tx::Sent);
        }
    }
    for to in 0..n {
        for _ in 0..40 {
            checked.poll(&mut ports, to, len);
        }
    }
    assert_eq!(checked.frames, 3 * (n - 1));
    assert_eq!(ports[0].open_rx_rings.len(), n - 1);

    let (mut polls_max, mut times) = (0, Vec::new());
    for round in 1..4 {
        for from in (3..n).step_by(101) {
            let me = ports[from].shared.me;
            let (group, bit) = place_of(me);
            {
                let (first, all) = ports.split_at_mut(from);
                let Shared { seg, me: to, .. } = &*first[0].shared;
                // It sees its bell rung, and nobody hears it.
                seg.doorbell_group(*to, group).store(bit, Relaxed);
                seg.doorbell(*to).store(1 << group, Relaxed);
                let bytes = payload(from, 0, round, len(round));
                assert_eq!(send(&mut all[0], macs[0], &bytes), Tx::Sent);
                seg.doorbell(*to).store(0, Relaxed);
                seg.doorbell_group(*to, group).store(0, Relaxed);
            }
            let (mut polls, began) = (1, Instant::now());
            while checked.poll(&mut ports, 0, len) == 0 {
                polls += 1;
            }
            times.push(began.elapsed());
            polls_max = polls_max.max(polls);
        }
    }
    times.sort();
    let median = times[times.len() / 2];
    println!("found after {median:?} (median of {}), {polls_max} polls at most", times.len());
    assert!(polls_max <= SWEEP_EVERY as usize * (SWEEP_ALL + 1), "{polls_max} polls");
    assert!(median < Duration::from_micros(50), "{median:?}");
    drop(ports);
    assert!(!settings.path().exists());
}

/// Goal: 128 members who all exchange short frames and long ones with each other take a GiB at
/// most, and nothing is lost by giving rings up. Method: every byte checked, blocks of the file.
#[test]
fn all_to_all_of_128_members_takes_a_gib_at_most() {
    const COUNT: usize = 128;
    let settings = fresh();
    let stat = nix::sys::statvfs::statvfs(&settings.dir).unwrap();
    if stat.blocks_available() * stat.fragment_size() < 5 << 28 {
        println!("SKIPPED: no 1.25 GiB in /dev/shm: mount -o remount,size=4G /dev/shm");
        return;
    }
    let Some(mut ports) = open_many(&settings, COUNT) else { return };
    let macs: Vec<_> = ports.iter().map(|port| port.caps().station).collect();
    let (mut checked, mut sent, mut blocks_max) = (Checked::new(COUNT), 0, 0);
    let len = |round: usize| [100, 4000, 60_000, 300][round];
    let mut blocks_after = Vec::new();
    for round in 0..4 {
        for from in 0..COUNT {
            // Without a bound 1,280 of the long ones were there.
            for step in 0..if len(round) > 5000 { 10 } else { COUNT } {
                let to = (from + step) % COUNT;
                let bytes = payload(from, to, round, len(round));
                while send(&mut ports[from], macs[to], &bytes) != Tx::Sent {
                    (0..COUNT).for_each(|to| {
                        checked.poll(&mut ports, to, len);
                    });
                    assert!(!ports[from].lacks_memory());
                }
                sent += 1;
            }
            blocks_max = blocks_max.max(std::fs::metadata(settings.path()).unwrap().blocks());
        }
        for _ in 0..40 {
            (0..COUNT).for_each(|to| {
                checked.poll(&mut ports, to, len);
            });
        }
        assert_eq!(checked.frames, sent, "round {round}");
        // Who got no long frame is a round behind.
        checked.rounds.iter_mut().flatten().for_each(|next| *next = round + 1);
        blocks_after.push(std::fs::metadata(settings.path()).unwrap().blocks() >> 11);
    }
    println!("MiB at most {}, after each round {blocks_after:?}", blocks_max >> 11);
    assert!(blocks_max * 512 <= 1 << 30, "{} bytes", blocks_max * 512);
    assert!(ports.iter().all(|port| port.counters().rx_dropped == 0));
}

/// Goal: a ring that was given up is opened again, and nothing is lost or overtaken. Method: one
/// that may have few long ones sends long frames to many by turns, and short ones between.
#[test]
fn a_ring_that_was_given_up_is_opened_again() {
    // As long as all that there may be.
    let settings = ShmSettings { ring_len: Some(256 << 20), members: Some(6), ..fresh() };
    let mut ports: Vec<_> = (0..6).map(|_| open(&settings)).collect();
    let macs: Vec<_> = ports.iter().map(|port| port.caps().station).collect();
    let len = |round: usize| if round.is_multiple_of(3) { 5000 } else { 50 };
    let (mut checked, mut given_up) = (Checked::new(6), 0);
    for round in 0..30 {
        for (to, &mac) in macs.iter().enumerate().skip(1) {
            let bytes = payload(0, to, round, len(round));
            while send(&mut ports[0], mac, &bytes) != Tx::Sent {
                given_up += 1;
                assert!(given_up < 10_000);
                (1..6).for_each(|to| {
                    checked.poll(&mut ports, to, len);
                });
            }
            assert!(ports[0].long.len() <= 2, "{} long rings", ports[0].long.len());
            if round % 4 == 3 {
                while checked.poll(&mut ports, to, len) > 0 {}
            }
        }
    }
    for to in 1..6 {
        while checked.rounds[to][0] < 30 {
            checked.poll(&mut ports, to, len);
        }
    }
    assert!(given_up > 10, "{given_up}");
}
