//! Stations of several users.

use std::path::PathBuf;

use super::*;

pub(super) const ALICE: u32 = 70_001;
pub(super) const BOB: u32 = 70_002;

/// A switch that serves several users, one end of its cable, and where they ask.
pub(super) struct House {
    pub(super) switch: Switch,
    pub(super) far: Box<Cable>,
    pub(super) segment: ShmSettings,
    pub(super) socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl House {
    pub(super) fn new(guests: Guests, apart: bool) -> Self {
        Self::on(guests, apart, |_| {})
    }

    /// On a NIC made so.
    pub(super) fn on(guests: Guests, apart: bool, make: impl FnOnce(&mut Cable)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (socket, segment) = (dir.path().join("x.sock"), fresh());
        let (mut nic, far) = cable(4096);
        make(&mut nic);
        let mut switch = Switch::open(&segment, nic).unwrap();
        switch.serve(&socket, guests, apart, GUESTS_MAX).unwrap();
        Self { switch, far, segment, socket, _dir: dir }
    }

    /// Does what `ask` says, as a process of a user, while the switch turns.
    pub(super) fn as_user<T: Send + 'static>(
        &mut self,
        uid: u32,
        ask: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        self.switch.lobby.as_mut().unwrap().door.taken_for = Some(uid);
        let asking = std::thread::spawn(ask);
        while !asking.is_finished() {
            self.attend();
        }
        asking.join().unwrap()
    }

    pub(super) fn attend(&mut self) {
        self.switch.sleep(Duration::from_micros(100));
    }

    fn try_guest(&mut self, uid: u32, station: Option<Station>) -> Result<SwitchedPort, OpenError> {
        let segment = ShmSettings { station, ..ShmSettings::named(&self.segment.name) };
        let socket = self.socket.clone();
        let port = self.as_user(uid, move || {
            SwitchedPort::ask(socket, &segment, "guest".into(), Duration::ZERO)
        });
        port.map(|port| port.expect("there is a switch"))
    }

    pub(super) fn guest(&mut self, uid: u32) -> SwitchedPort {
        self.try_guest(uid, None).unwrap()
    }
}

/// Goal: stations of several users reach the NIC, each other and those of the switch's own user,
/// each in a segment of its user's; kept apart, users reach the NIC alone.
#[test]
fn users_reach_each_other_through_the_switch_alone() {
    for apart in [false, true] {
        let mut house = House::new(Guests::All, apart);
        let mut ports = vec![house.guest(ALICE), house.guest(ALICE), house.guest(BOB)];
        ports.push(station(&house.segment));
        let users = [ALICE, ALICE, BOB, nix::unistd::geteuid().as_raw()];
        let macs: Vec<Station> = ports.iter().map(|port| port.caps().station).collect();
        assert_eq!((ports[0].caps().mtu, house.switch.segments.len()), (MTU, 3));
        assert!(ports[0].is_guest() && !ports[3].is_guest());
        let nic = house.switch.nic().station.mac;
        assert!(macs.iter().all(|station| station.mac == nic), "{macs:?}");
        let first = Station::OF_GUESTS.start;
        assert!(macs.iter().map(|of| of.number).take(3).eq(first..first + 3));
        assert!(Station::OF_SWITCH.contains(&macs[3].number));
        for from in 0..4 {
            let mac = macs[from];
            assert_eq!(send(&mut *house.far, &frame(mac, FAR, 900, 3)), Tx::Sent);
            assert_eq!(send(&mut ports[from], &frame(FAR, mac, 900, 4)), Tx::Sent);
            turn(&mut house.switch);
            assert_eq!(drain(&mut ports[from]), [frame(mac, FAR, 900, 3)]);
            assert_eq!(drain(&mut *house.far), [frame(FAR, mac, 900, 4)]);
            for to in (0..4).filter(|&to| to != from) {
                let bytes = frame(macs[to], mac, 1000 + to, from as u8);
                assert_eq!(send(&mut ports[from], &bytes), Tx::Sent);
                turn(&mut house.switch);
                let want = if apart && users[from] != users[to] { vec![] } else { vec![bytes] };
                assert_eq!(drain(&mut ports[to]), want, "{from} to {to}, apart: {apart}");
            }
        }
        let counters = house.switch.counters();
        let across = if apart { 10 } else { 0 };
        let want = SwitchCounters {
            to_nic: 4,
            from_nic: 4,
            between: 12 - across,
            unknown: across,
            ..Default::default()
        };
        assert_eq!(counters, want);
        let shown = house.switch.stations();
        for (mac, uid) in macs.iter().zip(users) {
            let of = shown.iter().find(|s| s.station == *mac).unwrap();
            assert_eq!((of.uid, of.pid, of.frames.sent), (uid, std::process::id(), 4));
        }
    }
}

/// Goal: a frame to all, by which servers are found, reaches the stations of every user, those of
/// its sender's alone where users are kept apart, and the NIC once.
#[test]
fn a_frame_to_all_reaches_every_user() {
    for apart in [false, true] {
        let mut house = House::new(Guests::All, apart);
        let mut ports = vec![house.guest(ALICE), house.guest(ALICE), house.guest(BOB)];
        ports.push(station(&house.segment));
        let all = Station::BROADCAST;
        for from in 0..4 {
            let bytes = frame(all, ports[from].caps().station, 60, from as u8);
            assert_eq!(send(&mut ports[from], &bytes), Tx::Sent);
            turn(&mut house.switch);
            assert_eq!(drain(&mut *house.far), std::slice::from_ref(&bytes));
            for (to, port) in ports.iter_mut().enumerate() {
                let is_reached = from < 2 && to < 2 || !apart;
                let want = usize::from(to != from && is_reached);
                assert_eq!(drain(port), vec![bytes.clone(); want], "{from} to {to}, {apart}");
            }
        }
        let bytes = frame(all, FAR, 60, 9);
        assert_eq!(send(&mut *house.far, &bytes), Tx::Sent);
        turn(&mut house.switch);
        assert!(ports.iter_mut().all(|port| drain(port) == std::slice::from_ref(&bytes)));
        let counters = house.switch.counters();
        let want = SwitchCounters { to_nic: 4, from_nic: 1, between: 4, ..Default::default() };
        assert_eq!(counters, want);
    }
}

/// Goal: a frame to all stops nobody while the NIC takes nothing, as a memif does whose other end
/// is not there: it reaches who is here.
#[test]
fn a_frame_to_all_does_not_wait_for_the_nic() {
    let mut house = House::new(Guests::All, false);
    let (nic, _far) = cable(0);
    house.switch.nic = AnyPort::from(nic as Box<dyn Port>);
    let (mut a, mut b) = (house.guest(ALICE), house.guest(BOB));
    let (mac_a, mac_b) = (a.caps().station, b.caps().station);
    let frames = [frame(Station::BROADCAST, mac_a, 60, 1), frame(mac_b, mac_a, 60, 2)];
    for bytes in &frames {
        assert_eq!(send(&mut a, bytes), Tx::Sent);
    }
    turn(&mut house.switch);
    assert_eq!(drain(&mut b), frames);
    assert_eq!(house.switch.counters().full, 1);
}

/// Goal: frames to all, sent by one user without end, cost the other users no more than as many
/// frames to one station each. Method: the turns between two bursts of that user, while frames of
/// another are taken in each.
#[test]
fn who_sends_to_all_lets_the_others_go_first() {
    let mut house = House::new(Guests::All, false);
    let (mut a, mut b) = (house.guest(ALICE), house.guest(BOB));
    let others: Vec<_> = (0..4).map(|_| house.guest(BOB)).collect();
    let (mac_a, mac_b) = (a.caps().station, b.caps().station);
    let to_all = frame(Station::BROADCAST, mac_a, 60, 1);
    (0..2 * BURST).for_each(|_| assert_eq!(send(&mut a, &to_all), Tx::Sent));
    let mut turns = Vec::new();
    for turn in 0..20 {
        assert_eq!(send(&mut b, &frame(FAR, mac_b, 60, 2)), Tx::Sent);
        house.switch.turn().unwrap();
        let got = drain(&mut *house.far);
        assert!(got.iter().any(|bytes| bytes[20] == 2), "turn {turn}");
        turns.extend((got.len() > 1).then_some((turn, got.len() - 1)));
    }
    let stations = 2 + others.len();
    assert_eq!(turns, [(0, BURST), (1 + stations, BURST)]);
}

/// Goal: who is not to be served hears why, with what to do; an address has one owner; a user has
/// no more stations than one may have, and others have theirs.
#[test]
fn the_door_says_why_it_stays_closed() {
    let mut house = House::new(Guests::Users(vec![ALICE]), false);
    let why = house.try_guest(BOB, None).map(drop).unwrap_err();
    assert!(why.to_string().contains("--user or --group"), "{why}");
    assert_eq!(why.errno(), libc::EACCES);
    let mut own = station(&house.segment);
    let first = house.guest(ALICE);
    let nic = house.switch.nic().station;
    for taken in [first.caps().station, own.caps().station, nic, Station::BROADCAST] {
        let why = house.try_guest(ALICE, Some(taken)).map(drop).unwrap_err();
        let errnos = [libc::EADDRINUSE, libc::EINVAL, libc::EACCES];
        assert!(errnos.contains(&why.errno()), "{why}");
    }
    // Another node's MAC, or a number of others, would be theirs by that.
    let numbers = [0, Station::OF_SWITCH.start, Station::OF_GUESTS.start + 700];
    let foreign = Station { number: numbers[2], ..Station::at([2, 0, 0, 0, 7, 7]) };
    let [first_port, of_switch, mac] = numbers.map(|number| Station { number, ..nic });
    for others in [foreign, first_port, of_switch] {
        let why = house.try_guest(ALICE, Some(others)).map(drop).unwrap_err();
        assert!(why.to_string().contains("leave out mac="), "{why}");
    }
    assert_eq!(house.try_guest(ALICE, Some(mac)).unwrap().caps().station, mac);
    house.attend();
    assert_eq!(house.try_guest(ALICE, Some(mac)).unwrap().caps().station, mac);
    // A frame to the switch's own user's first station still comes: nobody took it away.
    assert_eq!(send(&mut *house.far, &frame(own.caps().station, FAR, 60, 1)), Tx::Sent);
    turn(&mut house.switch);
    assert_eq!(drain(&mut own).len(), 1);
    let socket = house.socket.clone();
    let many = house.as_user(ALICE, move || {
        (0..door::GUESTS_MAX).map(|_| guest::ask(&socket, None, Duration::ZERO)).collect::<Vec<_>>()
    });
    let why = many.last().unwrap().as_ref().map(drop).unwrap_err();
    assert_eq!(why.errno(), libc::EUSERS);
    assert!(many[..many.len() - 1].iter().all(Result::is_ok));
    drop(house.try_guest(nix::unistd::geteuid().as_raw(), None).unwrap());
    drop(first);
    assert!(house.socket.exists());
    let socket = house.socket.clone();
    drop(house);
    assert!(!socket.exists());
}

/// Goal: a user who takes all his places leaves the others theirs, and hears which bound it is.
#[test]
fn a_user_has_so_many_places_and_others_have_theirs() {
    let mut house = House::new(Guests::None, false);
    house.switch.serve(&house.socket, Guests::All, false, 2).unwrap();
    let mut held = vec![house.guest(ALICE), house.guest(ALICE)];
    let why = house.try_guest(ALICE, None).map(drop).unwrap_err();
    assert!(why.errno() == libc::EUSERS && why.to_string().contains("--per-user"), "{why}");
    held.push(house.guest(BOB));
    held.remove(0);
    house.attend();
    held.push(house.guest(ALICE));
    assert_eq!(house.switch.stations().len(), 3);
}

/// Goal: nobody hands the switch a descriptor, whose end it would have to wait for, not before he
/// is let in either.
#[test]
fn a_door_takes_no_descriptors() {
    use crate::backend::unix::tests::slow_to_close;
    use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
    let house = House::new(Guests::All, false);
    let socket = greeting::Socket::new().unwrap();
    nix::sys::socket::connect(socket.fd(), &UnixAddr::new(&house.socket).unwrap()).unwrap();
    let (slow, _other) = slow_to_close();
    let (fds, bytes) = ([slow.as_raw_fd()], [std::io::IoSlice::new(b"hello")]);
    let rights = [ControlMessage::ScmRights(&fds)];
    let flags = MsgFlags::MSG_DONTWAIT;
    let sent = sendmsg::<UnixAddr>(socket.fd(), &bytes, &rights, flags, None);
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let number = |part: Option<&str>| part.and_then(|n| n.parse::<u32>().ok()).unwrap_or(0);
    let mut parts = release.split('.');
    if (number(parts.next()), number(parts.next())) >= (6, 16) {
        assert_eq!(sent, Err(nix::errno::Errno::EPERM));
    } else {
        println!("SKIPPED: Linux {} has no SO_PASSRIGHTS", release.trim());
    }
}

/// Goal: with the next switch a station goes on by itself, under its address, and nobody else has
/// got that; it is counted on.
#[test]
fn a_station_moves_to_the_next_switch() {
    let mut house = House::new(Guests::All, false);
    // Of our own user: who comes first to the next switch is not known.
    let uid = nix::unistd::geteuid().as_raw();
    let (mut a, mut b) = (house.guest(uid), house.guest(uid));
    let (mac_a, mac_b) = (a.caps().station, b.caps().station);
    for round in 1..4 {
        assert_eq!(send(&mut a, &frame(mac_b, mac_a, 60, round)), Tx::Sent);
        turn(&mut house.switch);
        assert_eq!(drain(&mut b), [frame(mac_b, mac_a, 60, round)]);
        assert_eq!((a.counters().tx_frames, b.counters().rx_frames), (round.into(), round.into()));
        let waiter = b.waiter().unwrap();
        // As if by kill -9: its socket stays, and nobody listens.
        let House { switch, segment, socket, .. } = &mut house;
        let (nic, far) = cable(64);
        let left = socket.with_extension("left");
        std::fs::hard_link(&*socket, &left).unwrap();
        let (fresh_nic, _) = cable(64);
        *switch = Switch::open(&fresh(), fresh_nic).unwrap();
        std::fs::rename(&left, &*socket).unwrap();
        *switch = Switch::open(segment, nic).unwrap();
        switch.serve(socket, Guests::All, false, GUESTS_MAX).unwrap();
        house.far = far;
        house.switch.lobby.as_mut().unwrap().door.taken_for = None;
        let until = Instant::now() + Duration::from_secs(20);
        while house.switch.stations().len() < 2 || !a.has_next() || !b.has_next() {
            assert!(Instant::now() < until, "they do not come");
            house.attend();
        }
        // Whoever sleeps is told.
        waiter.wait(Duration::from_secs(60));
        assert_eq!((drain(&mut a).len(), drain(&mut b).len()), (0, 0));
        assert_eq!((a.caps().station, b.caps().station), (mac_a, mac_b));
    }
}

/// Goal: a segment goes a while after the last of its stations, with its memory; another user's
/// stays.
#[test]
fn a_segment_goes_with_its_user() {
    let mut house = House::new(Guests::All, false);
    let (mut a, b) = (house.guest(ALICE), house.guest(BOB));
    assert_eq!(house.switch.segments.len(), 3);
    drop(b);
    let until = Instant::now() + Duration::from_secs(20);
    while house.switch.segments.len() == 3 {
        assert!(Instant::now() < until, "it stays");
        house.attend();
    }
    let mac = a.caps().station;
    assert_eq!(send(&mut *house.far, &frame(mac, FAR, 60, 1)), Tx::Sent);
    turn(&mut house.switch);
    assert_eq!(drain(&mut a).len(), 1);
    assert_eq!(house.switch.stations().len(), 1);
    // And is made again.
    house.guest(BOB);
    assert_eq!(house.switch.segments.len(), 3);
}

/// Goal: nobody takes another user's address between two switches.
#[test]
fn an_address_waits_for_its_user() {
    let mut house = House::new(Guests::All, false);
    let a = house.guest(ALICE);
    let mac = a.caps().station;
    // Its thread asks at the old one's.
    let socket = house.socket.with_extension("next");
    house.switch = Switch::open(&fresh(), cable(64).0).unwrap();
    drop(a);
    house.switch.serve(&socket, Guests::All, false, GUESTS_MAX).unwrap();
    house.socket = socket;
    assert_eq!(house.try_guest(BOB, Some(mac)).map(drop).unwrap_err().errno(), libc::EACCES);
    assert_eq!(house.try_guest(ALICE, Some(mac)).unwrap().caps().station, mac);
}
