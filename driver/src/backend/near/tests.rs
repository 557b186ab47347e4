use crate::frame::FRAME_MIN;
use crate::frame::addressed;
use std::collections::VecDeque;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};

use super::*;
use crate::backend::loopback::{Loopback, LoopbackSettings};

const MTU: usize = 1500;

/// A segment that no other test uses.
fn fresh() -> ShmSettings {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let serial = SERIAL.fetch_add(1, Relaxed);
    ShmSettings {
        ring_len: Some(1 << 16),
        members: Some(8),
        ..ShmSettings::named(&format!("near-{}-{serial}", std::process::id()))
    }
}

impl FarPort for Box<dyn Port> {
    fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> Result<usize, PortGone> {
        self.rx_burst(max, sink)
    }

    fn rx_poll(&mut self, _: &mut impl RxSink) -> Option<usize> {
        None
    }

    fn count_polls(&mut self, _: u32) {}
}

fn join(segment: &ShmSettings, far: Loopback) -> Near<Box<dyn Port>> {
    joined(segment, Box::new(far))
}

fn joined(segment: &ShmSettings, far: Box<dyn Port>) -> Near<Box<dyn Port>> {
    Near::join(segment, far, "near".into()).unwrap_or_else(|(_, why)| panic!("{why}"))
}

/// Ports on one wire, of which the first `near` share a segment as well.
struct Wire {
    near: Vec<Near<Box<dyn Port>>>,
    far: Vec<Loopback>,
    segment: ShmSettings,
}

fn wire(near: usize, far: usize) -> Wire {
    let settings = LoopbackSettings { mtu: MTU, ring_count: 64 };
    let mut all: VecDeque<_> = Loopback::segment(near + far, settings).into();
    let segment = fresh();
    let near = all.drain(..near).map(|far| join(&segment, far)).collect();
    Wire { near, far: all.into(), segment }
}

fn frame_of(dst: Station, src: Station, payload: &[u8]) -> Vec<u8> {
    addressed(dst, src, [&dst.mac.0[..], &src.mac.0, &[0x88, 0xb5], &[0; 26], payload].concat())
}

fn send(from: &mut dyn Port, to: Station, payload: &[u8]) -> Tx {
    let bytes = frame_of(to, from.caps().station, payload);
    let sent = from.tx(&TxFrame::whole(&bytes)).expect("it is there");
    from.flush().expect("it is there");
    sent
}

/// What a port lends in one burst: whether it was near, and its payload.
fn burst(port: &mut dyn Port, max: usize) -> Vec<(bool, Vec<u8>)> {
    let mut got = Vec::new();
    let mut sink = |f: &RxFrame<'_>| {
        let mut bytes = vec![0; f.len() - FRAME_MIN];
        assert!(f.copy_to(FRAME_MIN, &mut bytes));
        got.push((f.is_near(), bytes));
    };
    let count = port.rx_burst(max, &mut sink).expect("it is there");
    assert!(count <= max && count == got.len());
    got
}

/// What there is, in polls enough for a near sweep to come round.
fn drain(port: &mut dyn Port) -> Vec<(bool, Vec<u8>)> {
    (0..1000).flat_map(|_| burst(port, 7)).collect()
}

/// Goal: the segment has what a member is sent, of any length and with no mark but near; the far
/// side has all else, and each side counts its own.
#[test]
fn near_goes_near_and_far_goes_far() {
    let Wire { mut near, mut far, .. } = wire(2, 1);
    let [a, b] = &mut near[..] else { unreachable!() };
    let c = &mut far[0];
    let (at_a, at_b, at_c) = (a.caps().station, b.caps().station, c.caps().station);
    assert!(a.is_near(at_b) && b.is_near(at_a) && !a.is_near(at_c));
    assert!(a.caps().near_mtu > MTU && a.caps().mtu == MTU);
    let long = vec![7; a.caps().near_mtu.min(9000)];
    for round in 0..3_u8 {
        assert_eq!(send(a, at_b, &[round; 20]), Tx::Sent);
        assert_eq!(send(a, at_c, &[round; 30]), Tx::Sent);
        assert_eq!(send(a, at_b, &long), Tx::Sent);
        assert_eq!(drain(b), [(true, vec![round; 20]), (true, long.clone())]);
        assert_eq!(drain(c), [(false, vec![round; 30])]);
        assert_eq!(send(c, at_a, &[round; 40]), Tx::Sent);
        assert_eq!(send(b, at_a, &[round; 50]), Tx::Sent);
        assert_eq!(drain(a), [(true, vec![round; 50]), (false, vec![round; 40])]);
    }
    assert_eq!((a.presence(at_b), a.presence(at_a)), (Presence::Present, Presence::Present));
    let (all, near) = (a.counters(), a.near_counters().unwrap());
    assert_eq!((all.tx_frames, near.tx_frames), (9, 6));
    assert_eq!((all.rx_frames, near.rx_frames), (6, 3));
    assert_eq!((all.tx_no_route, all.rx_dropped), (0, 0));
    let nobody = Station::at([2, 9, 9, 9, 9, 9]);
    assert_eq!(send(a, nobody, b"x"), Tx::NoRoute);
    assert_eq!(a.counters().tx_no_route, 1);
    assert_eq!(a.traffic(at_b), b.traffic(at_a).map(|(to, from)| (from, to)));
    assert!(a.traffic(at_b).unwrap().1 >= 3 * (50 + FRAME_MIN as u64));
    let here = a.station(at_b).unwrap();
    assert!(here.contains(&std::process::id().to_string()), "{here}");
}

/// Goal: everybody hears a group, once.
#[test]
fn groups_are_on_both_sides() {
    let Wire { mut near, mut far, .. } = wire(3, 2);
    assert_eq!(send(&mut near[0], Station::BROADCAST, b"all"), Tx::Sent);
    for port in &mut far {
        assert_eq!(drain(port), [(false, b"all".to_vec())]);
    }
    // Here the wire leads to the near ones too; a NIC's does not.
    for port in &mut near[1..] {
        let heard = drain(port);
        assert_eq!(heard.iter().filter(|(near, _)| *near).count(), 1);
    }
    let own = drain(&mut near[0]);
    assert!(own.iter().all(|(near, _)| !near), "{own:?}");
}

/// Goal: what waits for room near never goes far.
#[test]
fn a_full_ring_is_waited_for() {
    let Wire { mut near, far: _far, .. } = wire(2, 1);
    let [a, b] = &mut near[..] else { unreachable!() };
    let to = b.caps().station;
    let sent = (0..10_000).take_while(|i: &u32| send(a, to, &[*i as u8; 1000]) == Tx::Sent);
    let sent = sent.count();
    assert!(sent > 10 && sent < 1000, "{sent}");
    for _ in 0..5000 {
        assert_eq!(send(a, to, &[0; 1000]), Tx::Full);
    }
    assert_eq!(a.presence(to), Presence::Present);
    let got = drain(b);
    assert_eq!(got.len(), sent);
    assert!(got.iter().all(|(near, _)| *near));
    assert_eq!(send(a, to, b"more"), Tx::Sent);
    assert_eq!(drain(b), [(true, b"more".to_vec())]);
    let counters = a.counters();
    assert_eq!(counters.tx_frames - a.near_counters().unwrap().tx_frames, 0);
    assert!(counters.tx_full >= 5000);
}

/// Goal: whoever has left is absent, but not before what it sent was read; frames to it go far, or
/// nowhere if they are too long for that; if it comes back, near again.
#[test]
fn a_member_that_leaves_is_far_and_one_that_comes_is_near() {
    let Wire { mut near, mut far, segment } = wire(2, 0);
    let settings = LoopbackSettings { mtu: MTU, ring_count: 64 };
    far.extend(Loopback::segment(1, settings));
    let b = near.pop().unwrap();
    let (mut b, a) = (b, &mut near[0]);
    let (at_a, at_b) = (a.caps().station, b.caps().station);
    assert_eq!((send(a, at_b, b"1"), send(&mut b, at_a, b"2")), (Tx::Sent, Tx::Sent));
    assert_eq!(drain(&mut b), [(true, b"1".to_vec())]);
    let Near { near: member, far: mut wire_b, .. } = b;
    drop(member);
    assert!(!a.is_near(at_b));
    assert_eq!(a.presence(at_b), Presence::Unknown, "its last frame is not read");
    assert_eq!(drain(a), [(true, b"2".to_vec())]);
    assert_eq!(a.presence(at_b), Presence::Absent);
    for _ in 0..3 {
        assert_eq!(send(a, at_b, b"3"), Tx::Sent);
        assert_eq!(drain(&mut *wire_b), [(false, b"3".to_vec())]);
    }
    assert_eq!(send(a, at_b, &[0; MTU - 26]), Tx::Sent);
    assert_eq!(send(a, at_b, &[0; MTU - 25]), Tx::NoRoute);
    drain(&mut *wire_b);
    let mut b = joined(&segment, wire_b);
    assert!(a.is_near(at_b));
    assert_eq!(send(a, at_b, &[0; MTU - 25]), Tx::Sent);
    assert_eq!(send(a, at_b, b"4"), Tx::Sent);
    assert_eq!(drain(&mut b), [(true, vec![0; MTU - 25]), (true, b"4".to_vec())]);
}

/// Goal: a frame for a member that has just left goes far only if it may, and is told of otherwise.
#[test]
fn a_frame_leaves_only_if_it_may() {
    let Wire { mut near, .. } = wire(2, 0);
    let (b, a) = (near.pop().unwrap(), &mut near[0]);
    let at_b = b.caps().station;
    a.set_wire_filter(|head| head.ends_with(b"sealed"));
    assert_eq!((send(a, at_b, b"clear"), send(a, at_b, b"sealed")), (Tx::Sent, Tx::Sent));
    let Near { near: member, far: mut wire_b, .. } = b;
    drop(member);
    for _ in 0..3 {
        assert_eq!((send(a, at_b, b"clear"), send(a, at_b, b"sealed")), (Tx::NoRoute, Tx::Sent));
        assert_eq!(drain(&mut *wire_b), [(false, b"sealed".to_vec())]);
    }
    assert_eq!(a.counters().tx_no_route, 3);
}

/// Goal: only the ring says that a frame is near, not the address that it bears.
#[test]
fn a_copied_identity_is_not_near() {
    let Wire { mut near, mut far, .. } = wire(2, 1);
    let (at_a, at_b) = (near[0].caps().station, near[1].caps().station);
    let forged = frame_of(at_a, at_b, b"I am b");
    assert_eq!(far[0].tx(&TxFrame::whole(&forged)), Ok(Tx::Sent));
    assert_eq!(send(&mut near[1], at_a, b"b"), Tx::Sent);
    let mut got = drain(&mut near[0]);
    got.sort();
    assert_eq!(got, [(false, b"I am b".to_vec()), (true, b"b".to_vec())]);
}

/// Goal: behind what spoils frames no station is near, and none of its frames is.
#[test]
fn a_spoilt_way_is_not_near() {
    use crate::backend::fault::{Fault, FaultSettings};
    let Wire { mut near, far: _far, .. } = wire(2, 0);
    let (b, a) = (near.pop().unwrap(), near.pop().unwrap());
    let spoilt = |port| Fault::new(Box::new(port), FaultSettings::default(), "fault()");
    let (mut a, mut b) = (spoilt(a), spoilt(b));
    let to = b.caps().station;
    assert_eq!((a.caps().near_mtu, a.is_near(to)), (0, false));
    assert_eq!(send(&mut a, to, b"x"), Tx::Sent);
    assert_eq!(drain(&mut b), [(false, b"x".to_vec())]);
}

/// Goal: neither side keeps the other from being heard, however much it sends, and bursts are full
/// while there is enough.
#[test]
fn both_sides_are_heard_when_one_floods() {
    let Wire { mut near, mut far, .. } = wire(2, 1);
    let at_a = near[0].caps().station;
    for flood_near in [true, false] {
        for max in [1, 4, 32] {
            drain(&mut near[0]);
            let mut few_sent = 0;
            let (mut many_got, mut few_got, mut waited) = (0, 0, 0);
            for round in 0..2000 {
                let (a, others) = near.split_at_mut(1);
                let (many, few): (&mut dyn Port, &mut dyn Port) = if flood_near {
                    (&mut others[0], &mut far[0])
                } else {
                    (&mut far[0], &mut others[0])
                };
                while send(many, at_a, &[1; 10]) == Tx::Sent {}
                // One at a time, so that the far side is often found empty.
                if few_sent == few_got && round % 7 == 0 {
                    assert_eq!(send(few, at_a, &[2; 10]), Tx::Sent);
                    few_sent += 1;
                    waited = 0;
                }
                let got = burst(&mut a[0], max);
                assert!(!got.is_empty());
                let of_few = got.iter().filter(|(_, payload)| payload[0] == 2).count();
                few_got += of_few;
                many_got += got.len() - of_few;
                waited += 1;
                // A near frame may be found by the sweep only.
                let most = if flood_near { FAR_SKIPS_MAX + 1 } else { 600 };
                assert!(few_sent == few_got || waited <= most, "{flood_near} {max} {waited}");
            }
            let seen = format!("near floods: {flood_near}, max {max}: {many_got} and {few_got}");
            assert!(few_got > 3 && many_got > 1000, "{seen}");
            drain(&mut near[0]);
        }
    }
}

/// Goal: while near frames come, who polls looks at a quiet far side once in the pause, at one that
/// has sent lately each time, and without near frames each time. Method: time is made up.
#[test]
fn a_quiet_far_side_is_looked_at_once_in_a_pause() {
    let Wire { mut near, mut far, .. } = wire(2, 1);
    let at_a = near[0].caps().station;
    let mut from = near.pop().unwrap();
    let a = &mut near[0];
    (a.gap_ns, a.timed_polls_left) = (5_000, 0);
    let mut now = 1_000_000_000;
    // A poll as the loop makes it: looks at the far side or not.
    let poll = |a: &mut Near<_>, now| {
        let mut got = 0;
        if a.rx_near(&mut |_: &RxFrame<'_>| got += 1).is_some() {
            return (got, false);
        }
        if a.may_skip_far(now) {
            return (0, false);
        }
        (burst(a, 32).len(), true)
    };
    let is_looked_at = |a: &mut Near<_>, now: &mut u64, polls: usize| {
        let looks = (0..polls).filter(|_| {
            *now += 50;
            poll(a, *now).1
        });
        looks.count()
    };
    assert_eq!(is_looked_at(a, &mut now, 100), 100, "nothing is near");
    assert_eq!(send(&mut from, at_a, b"x"), Tx::Sent);
    drain(a);
    for _ in 0..3 {
        assert_eq!(send(&mut from, at_a, b"x"), Tx::Sent);
        assert_eq!(poll(a, now), (1, false));
        let looks = is_looked_at(a, &mut now, 1000);
        assert!((8..=11).contains(&looks), "{looks} looks in 50 us");
    }
    // Several at once are taken at once, whenever the far side is looked at.
    now += 50;
    poll(a, now);
    for _ in 0..3 {
        assert_eq!(send(&mut from, at_a, b"x"), Tx::Sent);
    }
    let got: usize = (0..4).map(|i| poll(a, now + i).0).sum();
    assert_eq!(got, 3);
    assert_eq!(send(&mut far[0], at_a, b"y"), Tx::Sent);
    let waits = (1..).find(|_| {
        now += 50;
        poll(a, now).0 > 0
    });
    assert!(waits <= Some(101), "found by poll {waits:?}");
    assert_eq!(send(&mut from, at_a, b"x"), Tx::Sent);
    assert!(is_looked_at(a, &mut now, 1000) >= 999, "the far side has sent lately");
    now += 2 * BUSY_NS;
    assert_eq!(is_looked_at(a, &mut now, 100), 100, "nothing has come for long");
}

/// Goal: a few polls that find nothing need no clock, if polls follow each other quickly and until
/// the caller wants it. Method: time is made up.
#[test]
fn a_few_quick_polls_skip_the_clock() {
    let Wire { mut near, .. } = wire(2, 0);
    let at_a = near[0].caps().station;
    let mut from = near.pop().unwrap();
    let a = &mut near[0];
    (a.gap_ns, a.timed_polls_left) = (u64::MAX, 0);
    let rx_near = |a: &mut Near<_>| a.rx_near(&mut |_: &RxFrame<'_>| ());
    let skipping = |a: &mut Near<_>| (0..100).take_while(|_| rx_near(a) == Some(0)).count();
    let mut now = 1_000_000_000;
    for _ in 0..2 {
        // The first makes the ring known.
        drain(a);
        assert_eq!(send(&mut from, at_a, b"x"), Tx::Sent);
    }
    assert_eq!(rx_near(a), Some(1));
    assert_eq!(skipping(a), 0, "not allowed");
    for (pause, polls) in [(QUICK_NS, 0), (QUICK_NS - 1, UNTIMED_POLLS), (QUICK_NS, 0)] {
        now += pause;
        assert!(a.may_skip_far(now));
        assert!(!a.has_skipped_clock());
        a.may_skip_clock();
        assert_eq!(skipping(a), polls as usize, "after {pause} ns");
        assert_eq!(a.has_skipped_clock(), polls > 0);
    }
    now += 100;
    assert!(a.may_skip_far(now));
    a.may_skip_clock();
    assert_eq!(rx_near(a), Some(0));
    a.must_read_clock();
    assert_eq!(skipping(a), 0, "the clock is wanted");
}

/// Goal: a sleeper is woken by a frame on either side and by hand, soon, and by nothing else.
#[test]
fn a_sleeper_is_woken_by_both_sides() {
    let Wire { mut near, mut far, .. } = wire(2, 1);
    let waiter = near[0].waiter().unwrap();
    let at = near[0].caps().station;
    assert!(waiter.has_interrupt());
    let start = Instant::now();
    waiter.wait(Duration::from_millis(30));
    assert!(start.elapsed() >= Duration::from_millis(1));
    for side in ["near", "far", "by hand"] {
        for round in 0..20 {
            let other = near.pop().unwrap();
            let start = Instant::now();
            let (mut other, mut wire) = (other, far.pop().unwrap());
            let by_hand = Arc::clone(&waiter);
            let ringer = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(round % 5));
                match side {
                    "near" => assert_eq!(send(&mut other, at, b"x"), Tx::Sent),
                    "far" => assert_eq!(send(&mut wire, at, b"x"), Tx::Sent),
                    _ => by_hand.wake(),
                }
                (other, wire)
            });
            let mut got = 0;
            while got == 0 && start.elapsed() < Duration::from_secs(20) {
                waiter.wait(Duration::from_secs(10));
                got = burst(&mut near[0], 32).len();
                if side == "by hand" && ringer.is_finished() {
                    break;
                }
            }
            assert!(start.elapsed() < Duration::from_secs(5), "{side}: {:?}", start.elapsed());
            let (other, wire) = ringer.join().unwrap();
            drain(&mut near[0]);
            near.push(other);
            far.push(wire);
        }
    }
}

/// Goal: a far sleeper's descriptor is one that a near sender makes readable, not a nap.
#[test]
fn a_near_sender_rings_a_socket() {
    let Wire { mut near, .. } = wire(2, 1);
    let at = near[0].caps().station;
    assert_eq!(send(&mut near[1], at, b"1"), Tx::Sent);
    assert_eq!(drain(&mut near[0]).len(), 1);
    drain(&mut near[0]);
    let waiter = Arc::clone(near[0].waiter.as_ref().unwrap());
    let mut fds =
        [crate::backend::readable(std::os::fd::AsRawFd::as_raw_fd(&waiter.wake_socket.fd()))];
    assert!(!waiter.wake_socket.arm());
    assert!(!crate::backend::sleep(&mut fds, Duration::ZERO));
    assert_eq!(send(&mut near[1], at, b"2"), Tx::Sent);
    assert!(crate::backend::sleep(&mut fds, Duration::from_secs(10)), "nobody rang");
    waiter.wake_socket.disarm();
    assert!(!crate::backend::sleep(&mut fds, Duration::ZERO), "the ring was not taken");
    assert_eq!(send(&mut near[1], at, b"3"), Tx::Sent);
    assert!(!crate::backend::sleep(&mut fds, Duration::ZERO), "it rings for one that is awake");
}

/// Goal: the port goes with its far side.
#[test]
fn it_goes_when_its_far_side_goes() {
    let Wire { near: _, far: _, segment } = wire(0, 0);
    let mut gone = joined(&segment, Box::new(Gone::new()));
    let to = Station::at([2, 0, 0, 0, 0, 9]);
    let frame = frame_of(to, gone.caps().station, b"x");
    assert!(gone.tx(&TxFrame::whole(&frame)).is_err());
    assert!(gone.rx_burst(1, &mut |_: &RxFrame<'_>| {}).is_err());
    assert!(gone.waiter().is_none());
}

/// A port that has gone.
struct Gone(PortCaps);

impl Gone {
    fn new() -> Self {
        let mut caps = Loopback::pair().0.caps().clone();
        caps.station = Station::at([2, 0, 0, 0, 0, 8]);
        Self(caps)
    }
}

impl Port for Gone {
    fn caps(&self) -> &PortCaps {
        &self.0
    }

    fn tx(&mut self, _: &TxFrame<'_>) -> Result<Tx, PortGone> {
        Err(PortGone::new("x", "it was removed"))
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        Err(PortGone::new("x", "it was removed"))
    }

    fn rx_burst(&mut self, _: usize, _: &mut dyn RxSink) -> Result<usize, PortGone> {
        Err(PortGone::new("x", "it was removed"))
    }

    fn counters(&self) -> PortCounters {
        PortCounters::default()
    }
}
