use crate::frame::addressed;
use std::collections::VecDeque;
use std::sync::atomic::AtomicU32;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::*;
use crate::port::RxSink;

mod hostile;
mod relays;
mod users;

const MTU: usize = 1500;

/// One end of a cable that holds so many frames each way.
struct Cable {
    caps: PortCaps,
    out: Queue,
    incoming: Queue,
    room: usize,
    /// Every so many frames one finds no room, and the next does; 0 for none.
    refuses: usize,
    offered: usize,
    gone: bool,
    damages: bool,
}

/// An address that the cable has no route to.
const NOWHERE: Station = Station::at([2, 0, 0, 0, 0, 0x77]);

type Queue = Arc<Mutex<VecDeque<Vec<u8>>>>;

fn cable(room: usize) -> (Box<Cable>, Box<Cable>) {
    cable_of(room, MTU)
}

fn cable_of(room: usize, mtu: usize) -> (Box<Cable>, Box<Cable>) {
    let (one, another) = (Queue::default(), Queue::default());
    let end = |out: &Queue, incoming: &Queue| {
        let caps = PortCaps {
            link_bps: 10_000_000_000,
            ..PortCaps::new(crate::port::MacAddr::random(), mtu, "cable")
        };
        let (out, incoming) = (Arc::clone(out), Arc::clone(incoming));
        let (refuses, offered, gone, damages) = (0, 0, false, true);
        Box::new(Cable { caps, out, incoming, room, refuses, offered, gone, damages })
    };
    (end(&one, &another), end(&another, &one))
}

impl Port for Cable {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        if self.gone {
            return Err(PortGone::new("cable", "cut"));
        }
        self.offered += 1;
        let refused = self.refuses > 0 && self.offered.is_multiple_of(self.refuses);
        if frame.dst() == NOWHERE {
            return Ok(Tx::NoRoute);
        }
        let mut out = self.out.lock().unwrap();
        if out.len() == self.room || refused {
            return Ok(Tx::Full);
        }
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        out.push_back(bytes);
        Ok(Tx::Sent)
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        Ok(())
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        let mut incoming = self.incoming.lock().unwrap();
        let count = max.min(incoming.len());
        for bytes in incoming.drain(..count) {
            sink.frame(&RxFrame::new(&bytes));
        }
        Ok(count)
    }

    fn counters(&self) -> PortCounters {
        PortCounters::default()
    }

    fn damages(&self) -> bool {
        self.damages
    }
}

/// A segment that no other test uses.
fn fresh() -> ShmSettings {
    static SERIAL: AtomicU32 = AtomicU32::new(0);
    let serial = SERIAL.fetch_add(1, Relaxed);
    ShmSettings {
        ring_len: Some(1 << 16),
        members: Some(8),
        ..ShmSettings::named(&format!("switch-test-{}-{serial}", std::process::id()))
    }
}

fn station(segment: &ShmSettings) -> SwitchedPort {
    SwitchedPort::open(segment, "station".into()).unwrap().expect("there is a switch")
}

/// A frame of `len` bytes, of which those behind the EtherType say `number`.
fn frame(dst: Station, src: Station, len: usize, number: u8) -> Vec<u8> {
    let mut bytes = [&dst.mac.0[..], &src.mac.0, &ETHERTYPE.to_be_bytes()].concat();
    bytes.resize(len, number);
    addressed(dst, src, bytes)
}

fn send(port: &mut dyn Port, bytes: &[u8]) -> Tx {
    let sent = port.tx(&TxFrame::whole(bytes)).unwrap();
    port.flush().unwrap();
    sent
}

/// What comes in polls enough for a sweep to come round.
fn drain(port: &mut dyn Port) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    for _ in 0..1000 {
        let mut sink = |f: &RxFrame<'_>| {
            let mut bytes = vec![0; f.len()];
            assert!(f.copy_to(0, &mut bytes));
            assert!(!f.is_near());
            got.push(bytes);
        };
        port.rx_burst(7, &mut sink).unwrap();
    }
    got
}

fn turn(switch: &mut Switch) -> usize {
    (0..1000).map(|_| switch.turn().unwrap()).sum()
}

fn frames_of(switch: &Switch, mac: Station) -> StationFrames {
    switch.stations().iter().find(|s| s.station == mac).unwrap().frames
}

/// Goal: what was counted of a station stays its own while others come and go.
#[test]
fn frames_of_a_station_are_its_own() {
    let segment = fresh();
    let (nic, mut far) = cable(64);
    let mut switch = Switch::open(&segment, nic).unwrap();
    let (mut a, mut b) = (station(&segment), station(&segment));
    let (mac_a, mac_b) = (a.caps().station, b.caps().station);
    let sends = |port: &mut SwitchedPort, dst, count: usize| {
        let bytes = frame(dst, port.caps().station, 60, 0);
        (0..count).for_each(|_| assert_eq!(send(port, &bytes), Tx::Sent));
    };
    sends(&mut a, FAR, 3);
    sends(&mut a, mac_b, 2);
    sends(&mut b, mac_a, 1);
    assert_eq!(send(&mut *far, &frame(mac_b, FAR, 60, 2)), Tx::Sent);
    turn(&mut switch);
    let shown = |switch: &Switch, mac| {
        let StationFrames { sent, received, .. } = frames_of(switch, mac);
        (sent, received)
    };
    assert_eq!((shown(&switch, mac_a), shown(&switch, mac_b)), ((5, 1), (1, 3)));
    drop(b);
    let mut c = station(&segment);
    sends(&mut c, mac_a, 4);
    turn(&mut switch);
    assert_eq!((shown(&switch, mac_a), shown(&switch, c.caps().station)), ((5, 5), (4, 0)));
}

/// Goal: what is recorded between stations is what one of them got, and what went to the NIC is not
/// recorded twice. Method: a frame to all that the NIC takes and one that it refuses; then more to
/// one station than its ring holds.
#[test]
fn recorded_frames_between_stations_have_arrived() {
    use crate::backend::shm::Monitor;
    use crate::backend::tapped::Direction;
    let (segment, frames) = (fresh(), ShmSettings { ring_len: None, ..fresh() });
    let (nic, _far) = cable(1);
    let mut switch = Switch::open(&segment, nic).unwrap();
    let (mut a, b) = (station(&segment), station(&segment));
    let (mac_a, mac_b) = (a.caps().station, b.caps().station);
    let mut monitor = Monitor::open(&frames).unwrap();
    assert!(switch.record(&frames).unwrap());
    let all = Station::from(crate::port::MacAddr([0xff; 6]));
    for number in [1, 2] {
        assert_eq!(send(&mut a, &frame(all, mac_a, 60, number)), Tx::Sent);
    }
    turn(&mut switch);
    for _ in 0..200 {
        assert_eq!(send(&mut a, &frame(mac_b, mac_a, 1000, 3)), Tx::Sent);
        switch.turn().unwrap();
    }
    turn(&mut switch);
    let mut seen = Vec::new();
    for _ in 0..100 {
        let mut each = |_, way, frame: &RxFrame<'_>, len: usize| {
            let mut bytes = vec![0; len];
            assert!(frame.copy_to(0, &mut bytes));
            seen.push((way, bytes[ETH_HDR_LEN]));
        };
        monitor.read(64, &mut each).unwrap();
    }
    assert_eq!(monitor.missed(), 0);
    assert_eq!(seen[..2], [(Direction::Out, 1), (Direction::In, 2)]);
    let got = frames_of(&switch, mac_b);
    assert!(got.full > 0 && got.received + got.full == 200, "{got:?}");
    assert_eq!(seen[2..], vec![(Direction::In, 3); got.received as usize]);
}

const FAR: Station = Station::at([2, 0, 0, 0, 0, 9]);

/// Goal: frames of every length come out as they went in, at the station or the end that they are
/// for and nowhere else, and each is counted once.
#[test]
fn frames_go_where_they_are_for() {
    let segment = fresh();
    let (nic, mut far) = cable(4096);
    let mut switch = Switch::open(&segment, nic).unwrap();
    let (mut a, mut b) = (station(&segment), station(&segment));
    let (mac_a, mac_b) = (a.caps().station, b.caps().station);
    assert_eq!((a.caps().mtu, a.caps().link_bps), (MTU, 10_000_000_000));
    assert!(!a.caps().lossless && !a.caps().tells_presence && a.damages());
    let lens = (HEAD_LEN..200).chain([1000, ETH_HDR_LEN + MTU]);
    for len in lens.clone() {
        let number = len as u8;
        for (bytes, from) in [(frame(FAR, mac_a, len, number), 0), (frame(mac_b, mac_a, len, 1), 0)]
        {
            assert_eq!((send(&mut a, &bytes), from), (Tx::Sent, 0));
        }
        assert_eq!(send(&mut *far, &frame(mac_a, FAR, len, number)), Tx::Sent);
        turn(&mut switch);
        assert_eq!(drain(&mut *far), [frame(FAR, mac_a, len, number)], "{len}");
        assert_eq!(drain(&mut b), [frame(mac_b, mac_a, len, 1)], "{len}");
        assert_eq!(drain(&mut a), [frame(mac_a, FAR, len, number)], "{len}");
    }
    let all = lens.count() as u64;
    let want = SwitchCounters { to_nic: all, from_nic: all, between: all, ..Default::default() };
    assert_eq!(switch.counters(), want);
    let of_a = switch.stations().into_iter().find(|of| of.station == mac_a).unwrap();
    assert!(of_a.pid == std::process::id() && of_a.sent > of_a.received && of_a.received > 0);
}

/// Goal: a group's frame reaches everybody but its source, whichever side it comes from.
#[test]
fn a_group_is_everybody_else() {
    let segment = fresh();
    let (nic, mut far) = cable(64);
    let mut switch = Switch::open(&segment, nic).unwrap();
    let (mut a, mut b) = (station(&segment), station(&segment));
    let all = Station::BROADCAST;
    let from_a = frame(all, a.caps().station, 60, 1);
    let from_far = frame(all, FAR, 60, 2);
    assert_eq!((send(&mut a, &from_a), send(&mut *far, &from_far)), (Tx::Sent, Tx::Sent));
    turn(&mut switch);
    assert_eq!(drain(&mut a), std::slice::from_ref(&from_far));
    let mut at_b = drain(&mut b);
    at_b.sort_by_key(|bytes| bytes[20]);
    assert_eq!(at_b, [from_a.clone(), from_far]);
    assert_eq!(drain(&mut *far), [from_a]);
}

/// Goal: a station sends as itself, frames of the fabric, no longer than the NIC's; what is not
/// that is counted and goes nowhere.
#[test]
fn invalid_frames_of_a_station_are_dropped() {
    let segment = fresh();
    let (nic, mut far) = cable(64);
    let mut switch = Switch::open(&segment, nic).unwrap();
    let mut a = station(&segment);
    let b = station(&segment);
    let mac = a.caps().station;
    let mut other_type = frame(FAR, mac, 60, 0);
    other_type[13] ^= 1;
    let wrong = [
        frame(FAR, b.caps().station, 60, 0),
        frame(FAR, FAR, 60, 0),
        other_type.clone(),
        frame(FAR, mac, HEAD_LEN - 1, 0),
        frame(FAR, mac, ETH_HDR_LEN + MTU + 1, 0),
    ];
    for bytes in &wrong {
        assert_eq!(send(&mut a, bytes), Tx::Sent);
    }
    for bytes in [&other_type, &frame(FAR, FAR, 60, 0)] {
        assert_eq!(send(&mut *far, bytes), Tx::Sent);
    }
    turn(&mut switch);
    assert_eq!((drain(&mut *far), drain(&mut a)), (vec![], vec![]));
    let want = SwitchCounters { spoofed: 2, malformed: 4, unknown: 1, ..Default::default() };
    assert_eq!(switch.counters(), want);
    // The fourth of what is malformed came from the NIC.
    let want = StationFrames { spoofed: 2, malformed: 3, ..Default::default() };
    assert_eq!(frames_of(&switch, mac), want);
    assert_eq!(frames_of(&switch, b.caps().station), StationFrames::default());
}

/// Goal: a frame that the NIC carries and a ring does not is dropped.
#[test]
fn a_frame_longer_than_a_ring_takes_is_dropped() {
    let mtu = 65_536 - ETH_HDR_LEN;
    let segment = ShmSettings { ring_len: None, ..fresh() };
    let (nic, mut far) = cable_of(8, mtu);
    let mut switch = Switch::open(&segment, nic).unwrap();
    let mut a = station(&segment);
    let mac = a.caps().station;
    assert!(a.caps().mtu < mtu);
    for len in [mtu, a.caps().mtu] {
        assert_eq!(send(&mut *far, &frame(mac, FAR, ETH_HDR_LEN + len, 1)), Tx::Sent);
    }
    turn(&mut switch);
    assert_eq!(drain(&mut a).len(), 1);
    assert_eq!(
        switch.counters(),
        SwitchCounters { from_nic: 1, malformed: 1, ..Default::default() }
    );
}

/// Goal: a frame that the NIC has no route for is dropped, also where it had to wait, and holds up
/// none behind it.
#[test]
fn a_frame_without_a_route_holds_up_no_other() {
    let segment = fresh();
    let (nic, mut far) = cable(1);
    let mut switch = Switch::open(&segment, nic).unwrap();
    let mut a = station(&segment);
    let mac = a.caps().station;
    for (number, dst) in (0..).zip([NOWHERE, FAR, NOWHERE, FAR, NOWHERE, FAR]) {
        assert_eq!(send(&mut a, &frame(dst, mac, 100, number)), Tx::Sent);
    }
    let mut got = Vec::new();
    for _ in 0..100 {
        switch.turn().unwrap();
        got.extend(drain(&mut *far));
    }
    assert_eq!(got.iter().map(|bytes| bytes[20]).collect::<Vec<_>>(), [1, 3, 5]);
    assert_eq!(switch.counters(), SwitchCounters { to_nic: 3, unknown: 3, ..Default::default() });
}

/// Goal: a NIC that takes no more holds the senders up; no frame is lost or overtakes another.
#[test]
fn a_slow_nic_holds_up_the_senders() {
    let segment = fresh();
    let (mut nic, mut far) = cable(5);
    nic.refuses = 3;
    let mut switch = Switch::open(&segment, nic).unwrap();
    let mut a = station(&segment);
    let mac = a.caps().station;
    let (mut sent, mut got) = (0_u32, Vec::new());
    let mut fulls = 0;
    while sent < 2000 {
        let mut bytes = frame(FAR, mac, 1000, 0);
        bytes[40..44].copy_from_slice(&sent.to_le_bytes());
        match send(&mut a, &bytes) {
            Tx::Sent => sent += 1,
            _ => {
                fulls += 1;
                switch.turn().unwrap();
                if fulls % 3 == 0 {
                    got.extend(drain(&mut *far));
                }
            }
        }
    }
    for _ in 0..2000 {
        switch.turn().unwrap();
        got.extend(far.incoming.lock().unwrap().drain(..));
    }
    assert!(fulls > 10, "{fulls}");
    let numbers = got.iter().map(|bytes| u32::from_le_bytes(bytes[40..44].try_into().unwrap()));
    assert!(numbers.eq(0..2000));
    assert_eq!(switch.counters(), SwitchCounters { to_nic: 2000, ..Default::default() });
}

/// Goal: a station that does not read, and one that floods, cost another nothing.
#[test]
fn a_station_that_does_not_read_holds_up_no_other() {
    let segment = fresh();
    let (nic, mut far) = cable(1024);
    let mut switch = Switch::open(&segment, nic).unwrap();
    let (a, mut b) = (station(&segment), station(&segment));
    let (mac_a, mac_b) = (a.caps().station, b.caps().station);
    for round in 0..300 {
        assert_eq!(send(&mut *far, &frame(mac_a, FAR, 1500, 1)), Tx::Sent);
        assert_eq!(send(&mut *far, &frame(mac_b, FAR, 60, 2)), Tx::Sent);
        turn(&mut switch);
        assert_eq!(drain(&mut b).len(), 1, "round {round}");
    }
    let SwitchCounters { from_nic, full, .. } = switch.counters();
    assert!(full > 200 && from_nic + full == 600, "{full} {from_nic}");
    let (of_a, of_b) = (frames_of(&switch, mac_a), frames_of(&switch, mac_b));
    assert_eq!((of_a.full, of_a.received, of_b.received), (full, 300 - full, 300));
}

/// Goal: a process that asks for a switch while the first switch makes its segment, or after that
/// switch was killed at it, is told that there is none. Method: the file as it is then, all zeros.
#[test]
fn a_segment_that_is_being_made_has_no_switch() {
    use std::os::unix::fs::OpenOptionsExt;
    let segment = fresh();
    let mut options = std::fs::OpenOptions::new();
    let file = options.write(true).create_new(true).mode(0o600).open(segment.path()).unwrap();
    for len in [0, 1 << 20] {
        file.set_len(len).unwrap();
        assert_eq!(segment.switch_pid().unwrap(), None);
    }
    let switch = Switch::open(&segment, cable(64).0).unwrap();
    assert_eq!(segment.switch_pid().unwrap(), Some(std::process::id()));
    drop(switch);
    assert!(!segment.path().exists());
}

/// Goal: while no switch runs frames are lost and counted, as on a wire; with the next one they go
/// on, and there is never more than one.
#[test]
fn a_switch_may_be_replaced() {
    let segment = fresh();
    let (nic, _far) = cable(64);
    let switch = Switch::open(&segment, nic).unwrap();
    let second = Switch::open(&segment, cable(64).0).map(drop).unwrap_err();
    let text = second.to_string();
    assert!(text.contains("has a switch") && text.contains(&std::process::id().to_string()));
    let mut a = station(&segment);
    let mac = a.caps().station;
    assert_eq!(send(&mut a, &frame(FAR, mac, 60, 1)), Tx::Sent);
    assert_eq!(segment.switch_pid().unwrap(), Some(std::process::id()));
    drop(switch);
    assert_eq!(segment.switch_pid().unwrap(), None);
    assert_eq!(fresh().switch_pid().unwrap(), None);
    for number in 0..10 {
        assert_eq!(send(&mut a, &frame(FAR, mac, 60, number)), Tx::Sent);
    }
    assert_eq!((a.counters().tx_dropped, a.counters().tx_no_route), (10, 0));
    // A station that joins meanwhile reads what the last switch wrote of its uplink.
    let mut b = station(&segment);
    let (nic, mut far) = cable(64);
    let mut switch = Switch::open(&segment, nic).unwrap();
    let mac_b = b.caps().station;
    assert_eq!(send(&mut a, &frame(FAR, mac, 60, 77)), Tx::Sent);
    assert_eq!(send(&mut b, &frame(FAR, mac_b, 60, 78)), Tx::Sent);
    assert_eq!(send(&mut *far, &frame(mac, FAR, 60, 79)), Tx::Sent);
    turn(&mut switch);
    let mut numbers: Vec<u8> = drain(&mut *far).iter().map(|bytes| bytes[30]).collect();
    numbers.sort_unstable();
    assert_eq!(numbers, [77, 78]);
    assert_eq!(drain(&mut a), [frame(mac, FAR, 60, 79)]);
    assert_eq!(a.counters().tx_dropped, 10);
}

/// Goal: stations know what the NIC of their switch is like, of its own user and of another.
#[test]
fn stations_know_the_nic() {
    for (via_kernel, damages) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut bed = users::TestSwitch::on(ServedUsers::All, false, |cable| {
            cable.caps.via_kernel = via_kernel;
            cable.damages = damages;
        });
        for port in [station(&bed.segment), bed.attach(users::ALICE)] {
            let PortCaps { via_kernel: is_via, link_bps, mtu, lossless, .. } = *port.caps();
            assert_eq!((is_via, port.damages()), (via_kernel, damages));
            assert_eq!((link_bps, mtu, lossless), (10_000_000_000, MTU, false));
            assert_eq!(port.caps().station.mac, bed.switch.nic().station.mac);
        }
    }
}

/// Goal: a station receives from the switch alone, and does not open in a segment without one.
#[test]
fn a_station_receives_from_the_switch_alone() {
    let segment = fresh();
    assert!(SwitchedPort::open(&segment, "x".into()).unwrap().is_none());
    assert!(!segment.path().exists(), "left behind");
    let (nic, _far) = cable(64);
    let mut switch = Switch::open(&segment, nic).unwrap();
    let mut a = station(&segment);
    let mut neighbour = ShmPort::open(&segment).unwrap();
    let (mac, from) = (a.caps().station, neighbour.caps().station);
    for _ in 0..300 {
        neighbour.tx(&TxFrame::whole(&frame(mac, from, 60, 1))).unwrap();
    }
    assert_eq!(drain(&mut a), Vec::<Vec<u8>>::new());
    neighbour.tx(&TxFrame::whole(&frame(mac, from, 60, 1))).unwrap();
    turn(&mut switch);
    assert_eq!(drain(&mut a), Vec::<Vec<u8>>::new());
}

/// Goal: both sides sleep until a frame comes.
#[test]
fn a_frame_ends_a_sleep() {
    let segment = fresh();
    let (nic, mut far) = cable(64);
    let mut switch = Switch::open(&segment, nic).unwrap();
    let mut a = station(&segment);
    let mac = a.caps().station;
    // So that rings are open.
    assert_eq!(send(&mut a, &frame(FAR, mac, 60, 1)), Tx::Sent);
    assert_eq!(send(&mut *far, &frame(mac, FAR, 60, 1)), Tx::Sent);
    turn(&mut switch);
    assert_eq!(drain(&mut a).len(), 1);
    let waiter = a.waiter().unwrap();
    let start = Instant::now();
    waiter.wait(Duration::from_millis(30));
    assert!(start.elapsed() >= Duration::from_millis(30), "nothing has come");
    let begun = Arc::new(std::sync::Barrier::new(2));
    let begins = Arc::clone(&begun);
    let sleeper = std::thread::spawn(move || {
        begins.wait();
        let start = Instant::now();
        waiter.wait(Duration::from_secs(60));
        start.elapsed()
    });
    // A thread may take longer to begin than this on a busy machine.
    begun.wait();
    std::thread::sleep(Duration::from_millis(50));
    assert_eq!(send(&mut *far, &frame(mac, FAR, 60, 2)), Tx::Sent);
    turn(&mut switch);
    let slept = sleeper.join().unwrap();
    assert!((40..30_000).contains(&slept.as_millis()), "{slept:?}");
    let waiter = a.waiter().unwrap();
    waiter.wake();
    waiter.wait(Duration::from_secs(60));
    assert_eq!(drain(&mut a).len(), 1);
    switch.sleep(Duration::from_secs(60));
}

/// Goal: an idle switch sleeps long, and a frame from either side wakes it.
#[test]
fn an_idle_switch_sleeps_long() {
    let segment = fresh();
    let (nic, mut far) = cable(64);
    let mut switch = Switch::open(&segment, nic).unwrap();
    switch.waiter = Some(Arc::new(WaiterStub));
    let mut a = station(&segment);
    let mac = a.caps().station;
    let long = Duration::from_secs(60);
    let slept = |switch: &mut Switch| {
        let start = Instant::now();
        switch.sleep(long);
        start.elapsed()
    };
    assert_eq!(send(&mut a, &frame(FAR, mac, 60, 1)), Tx::Sent);
    turn(&mut switch);
    // By a bell that rings while it sleeps.
    for round in 0..4 {
        switch.idle_sleeps = IDLE_SLEEPS;
        let sender = std::thread::scope(|scope| {
            let sender = scope.spawn(|| {
                std::thread::sleep(Duration::from_millis(50));
                send(&mut a, &frame(FAR, mac, 60, round))
            });
            let slept = slept(&mut switch);
            assert!((20..30_000).contains(&slept.as_millis()), "{slept:?}");
            sender.join().unwrap()
        });
        assert_eq!((sender, switch.turn().unwrap(), switch.idle_sleeps), (Tx::Sent, 1, 0));
    }
    assert_eq!(drain(&mut *far).len(), 5);
    // Just after a frame, with a NIC that does not wake it, or once somebody could not.
    assert!(slept(&mut switch) < Duration::from_secs(30));
    switch.waiter = None;
    switch.idle_sleeps = IDLE_SLEEPS;
    assert!(slept(&mut switch) < Duration::from_secs(30));
    switch.waiter = Some(Arc::new(WaiterStub));
    let bell = &switch.segments[0].bell;
    bell.hide();
    assert!(!bell.arm() && !bell.has_missed_wakeup());
    assert_eq!(send(&mut a, &frame(FAR, mac, 60, 9)), Tx::Sent);
    assert!(bell.has_missed_wakeup());
    assert_eq!(turn(&mut switch), 1);
    switch.idle_sleeps = IDLE_SLEEPS;
    assert!(slept(&mut switch) < Duration::from_secs(30));
}

/// A NIC's waiter that only sleeps on `also`.
struct WaiterStub;

impl PortWaiter for WaiterStub {
    fn wake(&self) {}

    fn wait_or(&self, also: Option<std::os::fd::BorrowedFd<'_>>, timeout: Duration) -> bool {
        sleep(&mut [readable(crate::backend::raw(also))], timeout)
    }
}

#[test]
fn a_switch_ends_with_its_nic() {
    let segment = fresh();
    let (mut nic, _far) = cable(64);
    nic.gone = true;
    let mut switch = Switch::open(&segment, nic).unwrap();
    let mut a = station(&segment);
    let mac = a.caps().station;
    assert_eq!(send(&mut a, &frame(FAR, mac, 60, 1)), Tx::Sent);
    let gone = (0..1000).find_map(|_| switch.turn().err()).expect("it has gone");
    assert!(gone.why().contains("cut"));
}
