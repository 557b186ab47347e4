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
        let dir = tempfile::tempdir().unwrap();
        let (socket, segment) = (dir.path().join("x.sock"), fresh());
        let (nic, far) = cable(4096);
        let mut switch = Switch::open(&segment, nic).unwrap();
        switch.serve(&socket, guests, apart).unwrap();
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
        switch.serve(socket, Guests::All, false).unwrap();
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
    house.switch.serve(&socket, Guests::All, false).unwrap();
    house.socket = socket;
    assert_eq!(house.try_guest(BOB, Some(mac)).map(drop).unwrap_err().errno(), libc::EACCES);
    assert_eq!(house.try_guest(ALICE, Some(mac)).unwrap().caps().station, mac);
}
