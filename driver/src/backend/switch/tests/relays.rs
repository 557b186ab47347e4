//! Stations of builds whose segments have another layout.

use std::os::fd::AsFd;

use super::users::{ALICE, BOB, TestSwitch};
use super::*;
use crate::backend::unix;

/// Goal: relayed stations, those of segments and the NIC reach each other as if all were of one
/// build, except users that are kept apart; a group is everybody in reach, once.
#[test]
fn relayed_stations_are_like_others() {
    for apart in [false, true] {
        let mut bed = TestSwitch::new(ServedUsers::All, apart);
        let mut ports = vec![bed.attach(ALICE), bed.attach_other(Some(ALICE))];
        ports.extend([bed.attach_other(Some(BOB)), bed.attach_other(Some(BOB))]);
        ports.extend([station(&bed.segment), bed.attach_other(None)]);
        let user = |i: usize| i / 2;
        assert!((0..6).all(|i| ports[i].is_relayed() == [1, 2, 3, 5].contains(&i)));
        let shown = bed.switch.stations();
        let stations: Vec<Station> = ports.iter().map(|port| port.caps().station).collect();
        for (i, station) in stations.iter().enumerate() {
            let mut of = shown.iter().filter(|of| of.station == *station);
            assert_eq!(of.next().unwrap().is_relayed, ports[i].is_relayed());
            assert!(of.next().is_none());
        }
        for from in 0..6 {
            let own = stations[from];
            for (dst, len) in
                stations.iter().copied().chain([FAR, Station::BROADCAST]).zip(HEAD_LEN..)
            {
                let sent = frame(dst, own, len, from as u8);
                assert_eq!(send(&mut ports[from], &sent), Tx::Sent);
                turn(&mut bed.switch);
                for to in (0..6).filter(|&to| stations[to] != dst || to != from) {
                    let is_for = dst == stations[to] || dst.is_group() && to != from;
                    let is_reached = is_for && !(apart && user(from) != user(to));
                    let want = vec![sent.clone(); usize::from(is_reached)];
                    assert_eq!(drain(&mut ports[to]), want, "{from} to {to}, {dst}");
                }
                drain(&mut ports[from]);
                let want = vec![sent.clone(); usize::from(dst == FAR || dst.is_group())];
                assert_eq!(drain(&mut *bed.far), want);
            }
            let bytes = frame(own, FAR, 1500, 9);
            assert_eq!(send(&mut *bed.far, &bytes), Tx::Sent);
            turn(&mut bed.switch);
            assert_eq!(drain(&mut ports[from]), [bytes]);
        }
    }
}

/// Goal: the address of a relayed station of the switch's own user is no member's of the segment,
/// until it has left.
#[test]
fn an_address_of_a_relayed_station_is_leased() {
    let mut bed = TestSwitch::new(ServedUsers::None, false);
    let a = bed.attach_other(None);
    let taken = ShmSettings { station: Some(a.caps().station), ..bed.segment.clone() };
    let open = || SwitchedPort::open(&taken, "station".into()).map(drop);
    assert_eq!(open().unwrap_err().errno(), libc::EADDRINUSE);
    drop(a);
    let until = Instant::now() + Duration::from_secs(20);
    while open().is_err() {
        assert!(Instant::now() < until, "it stays");
        turn(&mut bed.switch);
    }
    assert!(bed.switch.stations().is_empty());
}

/// Goal: what a relayed station may not send is counted and goes nowhere.
#[test]
fn invalid_frames_of_a_relayed_station_are_dropped() {
    let mut bed = TestSwitch::new(ServedUsers::All, false);
    let (mut a, b) = (bed.attach_other(Some(ALICE)), bed.attach(BOB));
    let (mac_a, mac_b) = (a.caps().station, b.caps().station);
    let mut other_type = frame(FAR, mac_a, 60, 0);
    other_type[13] ^= 1;
    let socket = socket_of(&a);
    for bytes in [
        &frame(FAR, mac_b, 60, 0),
        &other_type,
        &frame(FAR, mac_a, HEAD_LEN - 1, 0),
        &frame(FAR, mac_a, ETH_HDR_LEN + MTU + 1, 0),
        &frame(FAR, mac_a, 60_000, 0),
    ] {
        unix::send(socket, bytes, None).unwrap();
    }
    turn(&mut bed.switch);
    assert_eq!(drain(&mut *bed.far), Vec::<Vec<u8>>::new());
    let want = StationFrames { spoofed: 1, malformed: 4, ..Default::default() };
    assert_eq!(frames_of(&bed.switch, mac_a), want);
    assert_eq!(send(&mut a, &frame(FAR, mac_a, 60, 0)), Tx::Sent);
    turn(&mut bed.switch);
    assert_eq!(drain(&mut *bed.far).len(), 1);
}

fn socket_of(port: &SwitchedPort) -> std::os::fd::RawFd {
    port.relayed_socket().expect("it is relayed")
}

/// Goal: a relayed station that floods, reads nothing or hands over descriptors costs another one
/// nothing, and loses its own frames or its connection.
#[test]
fn a_hostile_relayed_station_harms_no_other() {
    let mut bed = TestSwitch::new(ServedUsers::All, false);
    let mut flooder = bed.attach_other(Some(ALICE));
    let deaf = bed.attach_other(Some(ALICE));
    let thrower = bed.attach_other(Some(ALICE));
    let (mut b, mut c) = (bed.attach_other(Some(ALICE)), bed.attach_other(Some(BOB)));
    let flood = frame(deaf.caps().station, flooder.caps().station, 1000, 1);
    let (file, mut has_thrown) = (tempfile::tempfile().unwrap(), false);
    for round in 0..300_u16 {
        while send(&mut flooder, &flood) == Tx::Sent {}
        let thrown = unix::send(socket_of(&thrower), b"x", Some(file.as_fd().as_raw_fd()));
        // Linux 6.16 and later refuse it to the sender.
        has_thrown |= thrown.is_ok();
        for port in [&mut b, &mut c] {
            let sent = frame(FAR, port.caps().station, 100, round as u8);
            assert_eq!(send(port, &sent), Tx::Sent);
            assert_eq!(send(&mut *bed.far, &frame(port.caps().station, FAR, 90, 1)), Tx::Sent);
        }
        // The flooder's user pays for its frames with turns.
        for _ in 0..8 {
            bed.switch.turn().unwrap();
        }
        assert_eq!(drain(&mut *bed.far).len(), 2, "{round}");
        assert_eq!((drain(&mut b).len(), drain(&mut c).len()), (1, 1), "{round}");
    }
    let of_deaf = frames_of(&bed.switch, deaf.caps().station);
    assert!(of_deaf.received > 10 && of_deaf.full > 100, "{of_deaf:?}");
    let gone = thrower.caps().station;
    bed.run_once();
    let is_there = bed.switch.stations().iter().any(|of| of.station == gone);
    assert!(is_there != has_thrown && bed.switch.stations().len() >= 4);
}

/// Goal: a sleeper is woken by a frame, on either side, and does not spin once the switch is gone.
#[test]
fn relayed_stations_sleep() {
    let mut bed = TestSwitch::new(ServedUsers::All, false);
    let mut a = bed.attach_other(Some(ALICE));
    let (mac, waiter) = (a.caps().station, a.waiter().unwrap());
    assert!(!waiter.wait_or(None, Duration::from_millis(20)));
    assert_eq!(send(&mut *bed.far, &frame(mac, FAR, 60, 1)), Tx::Sent);
    turn(&mut bed.switch);
    assert!(waiter.wait_or(None, Duration::from_secs(60)));
    assert_eq!(drain(&mut a).len(), 1);
    assert_eq!(send(&mut a, &frame(FAR, mac, 60, 1)), Tx::Sent);
    let begun = Instant::now();
    bed.switch.sleep(Duration::from_secs(60));
    assert!(begun.elapsed() < Duration::from_secs(30));
    bed.switch = Switch::open(&fresh(), cable(64).0).unwrap();
    let until = Instant::now() + Duration::from_secs(20);
    while waiter.wait_or(None, Duration::from_millis(20)) {
        assert!(Instant::now() < until, "it spins");
    }
    assert_eq!(send(&mut a, &frame(FAR, mac, 60, 1)), Tx::Sent);
    assert_eq!(a.counters().tx_dropped, 1);
}
