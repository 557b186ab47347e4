//! Stations of several users.

use std::path::PathBuf;

use super::*;

pub(super) const ALICE: u32 = 70_001;
pub(super) const BOB: u32 = 70_002;
/// A layout that no build has.
pub(super) const OTHER: u64 = 99;

/// A switch that serves several users, the far end of its cable, and the socket to attach at.
pub(super) struct TestSwitch {
    pub(super) switch: Switch,
    pub(super) far: Box<Cable>,
    pub(super) segment: ShmSettings,
    pub(super) socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl TestSwitch {
    pub(super) fn new(clients: ServedUsers, apart: bool) -> Self {
        Self::on(clients, apart, |_| {})
    }

    /// On a NIC changed by `make`.
    pub(super) fn on(clients: ServedUsers, apart: bool, make: impl FnOnce(&mut Cable)) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (socket, segment) = (dir.path().join("x.sock"), fresh());
        let (mut nic, far) = cable(4096);
        make(&mut nic);
        let own = OwnSocket::bind(&segment).unwrap();
        let mut switch = Switch::open(&segment, nic).unwrap();
        switch.serve_own(own).unwrap();
        switch.serve(&socket, clients, apart, CLIENTS_MAX).unwrap();
        Self { switch, far, segment, socket, _dir: dir }
    }

    /// Runs `ask` as a process of user `uid`, while the switch runs.
    pub(super) fn as_user<T: Send + 'static>(
        &mut self,
        uid: u32,
        ask: impl FnOnce() -> T + Send + 'static,
    ) -> T {
        self.switch.clients.as_mut().unwrap().listener.test_uid = Some(uid);
        let asking = std::thread::spawn(ask);
        while !asking.is_finished() {
            self.run_once();
        }
        asking.join().unwrap()
    }

    pub(super) fn run_once(&mut self) {
        self.switch.sleep(Duration::from_micros(100));
    }

    fn try_attach_as(
        &mut self,
        uid: u32,
        station: Option<Station>,
    ) -> Result<SwitchedPort, OpenError> {
        let segment = ShmSettings { station, ..ShmSettings::named(&self.segment.name) };
        let socket = self.socket.clone();
        let port = self.as_user(uid, move || {
            SwitchedPort::attach(socket, &segment, "client".into(), Duration::ZERO)
        });
        port.map(|port| port.expect("there is a switch"))
    }

    pub(super) fn attach(&mut self, uid: u32) -> SwitchedPort {
        self.try_attach_as(uid, None).unwrap()
    }

    /// A station of a build whose segments have another layout, at the socket for all users, or for
    /// the switch's own.
    pub(super) fn attach_other(&mut self, uid: Option<u32>) -> SwitchedPort {
        let segment = ShmSettings::named(&self.segment.name);
        let path = uid.map_or_else(|| segment.switch_socket(), |_| self.socket.clone());
        let port = self.as_user(uid.unwrap_or(0), move || {
            SwitchedPort::attach_as(OTHER, path, &segment, "other".into()).unwrap()
        });
        port.expect("there is a switch")
    }
}

/// Goal: stations of several users reach the NIC, each other and those of the switch's own user,
/// each in a segment of its user's; kept apart, users reach the NIC alone.
#[test]
fn users_reach_each_other_through_the_switch_alone() {
    for apart in [false, true] {
        let mut bed = TestSwitch::new(ServedUsers::All, apart);
        let mut ports = vec![bed.attach(ALICE), bed.attach(ALICE), bed.attach(BOB)];
        ports.push(station(&bed.segment));
        let users = [ALICE, ALICE, BOB, nix::unistd::geteuid().as_raw()];
        let macs: Vec<Station> = ports.iter().map(|port| port.caps().station).collect();
        assert_eq!((ports[0].caps().mtu, bed.switch.segments.len()), (MTU, 3));
        let nic = bed.switch.nic().station.mac;
        assert!(macs.iter().all(|station| station.mac == nic), "{macs:?}");
        let first = Station::OF_CLIENTS.start;
        assert!(macs.iter().map(|of| of.number).take(3).eq(first..first + 3));
        assert!(Station::OF_SWITCH.contains(&macs[3].number));
        for from in 0..4 {
            let mac = macs[from];
            assert_eq!(send(&mut *bed.far, &frame(mac, FAR, 900, 3)), Tx::Sent);
            assert_eq!(send(&mut ports[from], &frame(FAR, mac, 900, 4)), Tx::Sent);
            turn(&mut bed.switch);
            assert_eq!(drain(&mut ports[from]), [frame(mac, FAR, 900, 3)]);
            assert_eq!(drain(&mut *bed.far), [frame(FAR, mac, 900, 4)]);
            for to in (0..4).filter(|&to| to != from) {
                let bytes = frame(macs[to], mac, 1000 + to, from as u8);
                assert_eq!(send(&mut ports[from], &bytes), Tx::Sent);
                turn(&mut bed.switch);
                let want = if apart && users[from] != users[to] { vec![] } else { vec![bytes] };
                assert_eq!(drain(&mut ports[to]), want, "{from} to {to}, apart: {apart}");
            }
        }
        let counters = bed.switch.counters();
        let across = if apart { 10 } else { 0 };
        let want = SwitchCounters {
            to_nic: 4,
            from_nic: 4,
            between: 12 - across,
            unknown: across,
            ..Default::default()
        };
        assert_eq!(counters, want);
        let shown = bed.switch.stations();
        for (mac, uid) in macs.iter().zip(users) {
            let of = shown.iter().find(|s| s.station == *mac).unwrap();
            assert_eq!((of.uid, of.pid, of.frames.sent), (uid, std::process::id(), 4));
        }
    }
}

/// Goal: a broadcast, as used by name resolution, reaches the NIC once and the stations of every
/// user, or only those of its sender's user where users are kept apart.
#[test]
fn a_broadcast_reaches_every_user() {
    for apart in [false, true] {
        let mut bed = TestSwitch::new(ServedUsers::All, apart);
        let mut ports = vec![bed.attach(ALICE), bed.attach(ALICE), bed.attach(BOB)];
        ports.push(station(&bed.segment));
        let all = Station::BROADCAST;
        for from in 0..4 {
            let bytes = frame(all, ports[from].caps().station, 60, from as u8);
            assert_eq!(send(&mut ports[from], &bytes), Tx::Sent);
            turn(&mut bed.switch);
            assert_eq!(drain(&mut *bed.far), std::slice::from_ref(&bytes));
            for (to, port) in ports.iter_mut().enumerate() {
                let is_reached = from < 2 && to < 2 || !apart;
                let want = usize::from(to != from && is_reached);
                assert_eq!(drain(port), vec![bytes.clone(); want], "{from} to {to}, {apart}");
            }
        }
        let bytes = frame(all, FAR, 60, 9);
        assert_eq!(send(&mut *bed.far, &bytes), Tx::Sent);
        turn(&mut bed.switch);
        assert!(ports.iter_mut().all(|port| drain(port) == std::slice::from_ref(&bytes)));
        let counters = bed.switch.counters();
        let want = SwitchCounters { to_nic: 4, from_nic: 1, between: 4, ..Default::default() };
        assert_eq!(counters, want);
    }
}

/// Goal: a broadcast reaches the stations while the NIC is full, as a memif without a peer is, and
/// holds up no frame behind it.
#[test]
fn a_broadcast_does_not_wait_for_the_nic() {
    let mut bed = TestSwitch::new(ServedUsers::All, false);
    let (nic, _far) = cable(0);
    bed.switch.nic = AnyPort::from(nic as Box<dyn Port>);
    let (mut a, mut b) = (bed.attach(ALICE), bed.attach(BOB));
    let (mac_a, mac_b) = (a.caps().station, b.caps().station);
    let frames = [frame(Station::BROADCAST, mac_a, 60, 1), frame(mac_b, mac_a, 60, 2)];
    for bytes in &frames {
        assert_eq!(send(&mut a, bytes), Tx::Sent);
    }
    turn(&mut bed.switch);
    assert_eq!(drain(&mut b), frames);
    assert_eq!(bed.switch.counters().full, 1);
}

/// Goal: the copies of a user's broadcasts are charged to that user's turns. Method: the turns
/// between two bursts of that user, while frames of another are taken in each.
#[test]
fn broadcast_copies_are_charged_to_their_user() {
    let mut bed = TestSwitch::new(ServedUsers::All, false);
    let (mut a, mut b) = (bed.attach(ALICE), bed.attach(BOB));
    let others: Vec<_> = (0..4).map(|_| bed.attach(BOB)).collect();
    let (mac_a, mac_b) = (a.caps().station, b.caps().station);
    let to_all = frame(Station::BROADCAST, mac_a, 60, 1);
    (0..2 * BURST).for_each(|_| assert_eq!(send(&mut a, &to_all), Tx::Sent));
    let mut turns = Vec::new();
    for turn in 0..20 {
        assert_eq!(send(&mut b, &frame(FAR, mac_b, 60, 2)), Tx::Sent);
        bed.switch.turn().unwrap();
        let got = drain(&mut *bed.far);
        assert!(got.iter().any(|bytes| bytes[20] == 2), "turn {turn}");
        turns.extend((got.len() > 1).then_some((turn, got.len() - 1)));
    }
    let stations = 2 + others.len();
    assert_eq!(turns, [(0, BURST), (1 + stations, BURST)]);
}

/// Goal: a refusal gives its reason and remedy; an address has one owner; one user's stations are
/// limited, and others still attach.
#[test]
fn a_refusal_gives_its_reason() {
    let mut bed = TestSwitch::new(ServedUsers::Users(vec![ALICE]), false);
    let why = bed.try_attach_as(BOB, None).map(drop).unwrap_err();
    assert!(why.to_string().contains("--user or --group"), "{why}");
    assert_eq!(why.errno(), libc::EACCES);
    let mut own = station(&bed.segment);
    let first = bed.attach(ALICE);
    let nic = bed.switch.nic().station;
    for taken in [first.caps().station, own.caps().station, nic, Station::BROADCAST] {
        let why = bed.try_attach_as(ALICE, Some(taken)).map(drop).unwrap_err();
        let errnos = [libc::EADDRINUSE, libc::EINVAL, libc::EACCES];
        assert!(errnos.contains(&why.errno()), "{why}");
    }
    // Another node's MAC, or a number outside the clients' range.
    let numbers = [0, Station::OF_SWITCH.start, Station::OF_CLIENTS.start + 700];
    let foreign = Station { number: numbers[2], ..Station::at([2, 0, 0, 0, 7, 7]) };
    let [first_port, of_switch, mac] = numbers.map(|number| Station { number, ..nic });
    for others in [foreign, first_port, of_switch] {
        let why = bed.try_attach_as(ALICE, Some(others)).map(drop).unwrap_err();
        assert!(why.to_string().contains("leave out mac="), "{why}");
    }
    assert_eq!(bed.try_attach_as(ALICE, Some(mac)).unwrap().caps().station, mac);
    bed.run_once();
    assert_eq!(bed.try_attach_as(ALICE, Some(mac)).unwrap().caps().station, mac);
    // The first station of the switch's own user still receives its frames.
    assert_eq!(send(&mut *bed.far, &frame(own.caps().station, FAR, 60, 1)), Tx::Sent);
    turn(&mut bed.switch);
    assert_eq!(drain(&mut own).len(), 1);
    let socket = bed.socket.clone();
    let many = bed.as_user(ALICE, move || {
        let request =
            attach::Request { path: socket, station: None, version: shm::version(), is_own: false };
        (0..listener::CLIENTS_MAX)
            .map(|_| attach::attach(&request, Duration::ZERO))
            .collect::<Vec<_>>()
    });
    let why = many.last().unwrap().as_ref().map(drop).unwrap_err();
    assert_eq!(why.errno(), libc::EUSERS);
    assert!(many[..many.len() - 1].iter().all(Result::is_ok));
    drop(bed.try_attach_as(nix::unistd::geteuid().as_raw(), None).unwrap());
    drop(first);
    assert!(bed.socket.exists());
    let socket = bed.socket.clone();
    drop(bed);
    assert!(!socket.exists());
}

/// Goal: a user at the limit `per_user` is refused with its name, and other users still attach.
#[test]
fn stations_of_a_user_are_limited() {
    let mut bed = TestSwitch::new(ServedUsers::None, false);
    bed.switch.serve(&bed.socket, ServedUsers::All, false, 2).unwrap();
    let mut held = vec![bed.attach(ALICE), bed.attach(ALICE)];
    let why = bed.try_attach_as(ALICE, None).map(drop).unwrap_err();
    assert!(why.errno() == libc::EUSERS && why.to_string().contains("--per-user"), "{why}");
    held.push(bed.attach(BOB));
    held.remove(0);
    bed.run_once();
    held.push(bed.attach(ALICE));
    assert_eq!(bed.switch.stations().len(), 3);
}

/// Goal: no process can pass the switch a descriptor, which could be slow to close, also before it
/// is accepted.
#[test]
fn the_listener_takes_no_descriptors() {
    use crate::backend::unix::tests::slow_closing_socket;
    use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
    let bed = TestSwitch::new(ServedUsers::All, false);
    let socket = handshake::Socket::new().unwrap();
    nix::sys::socket::connect(socket.fd(), &UnixAddr::new(&bed.socket).unwrap()).unwrap();
    let (slow, _other) = slow_closing_socket();
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

/// Goal: a station reattaches to the next switch by itself, with its address, and its counters go
/// on.
#[test]
fn a_station_moves_to_the_next_switch() {
    let mut bed = TestSwitch::new(ServedUsers::All, false);
    // All of our own user: the order of attaching to the next switch is not known.
    let uid = nix::unistd::geteuid().as_raw();
    let (mut a, mut b) = (bed.attach(uid), bed.attach(uid));
    let (mac_a, mac_b) = (a.caps().station, b.caps().station);
    for round in 1..4 {
        assert_eq!(send(&mut a, &frame(mac_b, mac_a, 60, round)), Tx::Sent);
        turn(&mut bed.switch);
        assert_eq!(drain(&mut b), [frame(mac_b, mac_a, 60, round)]);
        assert_eq!((a.counters().tx_frames, b.counters().rx_frames), (round.into(), round.into()));
        let waiter = b.waiter().unwrap();
        // As if by kill -9: its socket stays, and nobody listens.
        let TestSwitch { switch, segment, socket, .. } = &mut bed;
        let (nic, far) = cable(64);
        let left = socket.with_extension("left");
        std::fs::hard_link(&*socket, &left).unwrap();
        let (fresh_nic, _) = cable(64);
        *switch = Switch::open(&fresh(), fresh_nic).unwrap();
        std::fs::rename(&left, &*socket).unwrap();
        *switch = Switch::open(segment, nic).unwrap();
        switch.serve(socket, ServedUsers::All, false, CLIENTS_MAX).unwrap();
        bed.far = far;
        bed.switch.clients.as_mut().unwrap().listener.test_uid = None;
        let until = Instant::now() + Duration::from_secs(20);
        while bed.switch.stations().len() < 2 || !a.has_next() || !b.has_next() {
            assert!(Instant::now() < until, "they do not come");
            bed.run_once();
        }
        // A sleeper is woken.
        waiter.wait(Duration::from_secs(60));
        assert_eq!((drain(&mut a).len(), drain(&mut b).len()), (0, 0));
        assert_eq!((a.caps().station, b.caps().station), (mac_a, mac_b));
    }
}

/// Goal: a user's segment is dropped a while after its last station left; another user's stays.
#[test]
fn a_segment_is_dropped_after_its_last_station() {
    let mut bed = TestSwitch::new(ServedUsers::All, false);
    let (mut a, b) = (bed.attach(ALICE), bed.attach(BOB));
    assert_eq!(bed.switch.segments.len(), 3);
    drop(b);
    let until = Instant::now() + Duration::from_secs(20);
    while bed.switch.segments.len() == 3 {
        assert!(Instant::now() < until, "it stays");
        bed.run_once();
    }
    let mac = a.caps().station;
    assert_eq!(send(&mut *bed.far, &frame(mac, FAR, 60, 1)), Tx::Sent);
    turn(&mut bed.switch);
    assert_eq!(drain(&mut a).len(), 1);
    assert_eq!(bed.switch.stations().len(), 1);
    // A new station gets a new segment.
    bed.attach(BOB);
    assert_eq!(bed.switch.segments.len(), 3);
}

/// Goal: no process takes another user's address between two switches.
#[test]
fn an_address_stays_reserved_for_its_user() {
    let mut bed = TestSwitch::new(ServedUsers::All, false);
    let a = bed.attach(ALICE);
    let mac = a.caps().station;
    // The thread of `a` asks at the old socket.
    let socket = bed.socket.with_extension("next");
    bed.switch = Switch::open(&fresh(), cable(64).0).unwrap();
    drop(a);
    bed.switch.serve(&socket, ServedUsers::All, false, CLIENTS_MAX).unwrap();
    bed.socket = socket;
    assert_eq!(bed.try_attach_as(BOB, Some(mac)).map(drop).unwrap_err().errno(), libc::EACCES);
    assert_eq!(bed.try_attach_as(ALICE, Some(mac)).unwrap().caps().station, mac);
}
