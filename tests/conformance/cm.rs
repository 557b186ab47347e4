//! Section C.2, X11: connections. What a program in C sees of them is in `tests/provider`.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use barewire::cm::{FI_CONNECTED, FI_CONNREQ, FI_SHUTDOWN};
use barewire::flags::{Caps, InfoFlags, OpFlags};
use barewire::raw::{RawCq, RawEndpoint};
use barewire::*;

use crate::harness::*;

/// A segment of shared memory for one test, and what its stations are opened with: a listener has a
/// station of its own.
struct Stations {
    name: String,
    port: Option<String>,
    info: Info,
}

impl Stations {
    fn new() -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("conformance-cm-{}-{n}", std::process::id());
        Self::on(format!("shm:{name}"), name)
    }

    /// Stations of a port.
    fn on(port: String, name: String) -> Self {
        let mut hints = Info { caps: Caps::MSG | Caps::SEND | Caps::RECV, ..Info::default() };
        hints.ep_attr.ep_type = EpType::Msg;
        let port = Some(port);
        let none = InfoFlags::empty();
        let settings = Settings { port: port.clone(), ..settings() };
        let info = getinfo_with(&settings, API_VERSION, None, None, none, Some(&hints));
        Self { name, port, info: info.unwrap().remove(0) }
    }

    fn settings(&self) -> Settings {
        // On a wire it tells that a process lives.
        let rcvthread = self.name.is_empty();
        Settings { port: self.port.clone(), rcvthread, ..settings() }
    }

    fn domain(&self) -> Domain {
        the_fabric().domain_with(&self.info, self.settings()).unwrap()
    }
}

/// Who listens, with its queue of events.
struct Listener {
    pep: PassiveEndpoint,
    eq: Eq,
}

impl Listener {
    fn new(stations: &Stations) -> Self {
        let pep = the_fabric().passive_ep(&stations.info, stations.settings()).unwrap();
        let eq = the_fabric().eq_open(EqAttr::default()).unwrap();
        pep.bind_eq(&eq).unwrap();
        pep.listen().unwrap();
        Self { pep, eq }
    }
}

/// An endpoint that connects or accepts.
struct End {
    ep: RawEndpoint,
    eq: Eq,
    _cq: RawCq,
}

impl End {
    fn new(domain: &Domain, info: &Info) -> Self {
        let eq = the_fabric().eq_open(EqAttr::default()).unwrap();
        let cq = domain.raw_cq_open(CqAttr::default()).unwrap();
        let ep = domain.raw_endpoint(info).unwrap();
        ep.bind_cq(&cq, BOTH).unwrap();
        ep.bind_eq(&eq).unwrap();
        Self { ep, eq, _cq: cq }
    }

    fn is_told(&self, turn: &dyn Fn()) -> (u32, Vec<u8>) {
        let (event, data, _) = until("an event", || {
            turn();
            event(&self.eq)
        });
        (event, data)
    }
}

/// Bytes of `struct fi_eq_cm_entry` before its data.
const ENTRY: usize = 16;

/// The next event of a queue, with what it brings.
fn event(eq: &Eq) -> Option<(u32, Vec<u8>, Option<ConnRequest>)> {
    let mut data = [0; 256];
    match eq.read_cm(&mut data) {
        Ok((event, len, request)) => Some((event, data[ENTRY..len].to_vec(), request)),
        Err(Error::Again) => None,
        Err(e) => panic!("reading events: {e}"),
    }
}

/// The bytes of a message between connection sides: kind 1 asks, 2 accepts, 3 refuses, 4 ends.
fn forged(kind: u8, [to, from]: [u32; 2], side: EpAddr, ep: EpAddr) -> Buf {
    let mut bytes = vec![kind, 1, 0, 0];
    bytes.extend([to, from, 0].map(u32::to_le_bytes).concat());
    bytes.extend(side.to_bytes());
    bytes.extend(ep.to_bytes());
    bytes.into()
}

/// An endpoint of another type, in a node of its own: whoever listens or asks cannot tell.
fn liar(stations: &Stations) -> Side {
    let mut plan = Plan { settings: stations.settings(), ..Plan::default() };
    plan.info.ep_attr.ep_type = EpType::Rdm;
    let port = barewire_driver::open::open(&format!("shm:{}", stations.name)).unwrap();
    Side::new(port, &plan)
}

impl Side {
    /// Sends a forged message; it has arrived when this returns.
    fn forges(&self, message: Buf, to: FiAddr, turn: &dyn Fn()) {
        self.ep.sendmsg(untagged(message, to, 0), OpFlags::DELIVERY_COMPLETE).unwrap();
        until("the message left", || {
            turn();
            self.domain.progress().unwrap();
            self.read()
        });
    }
}

/// X11: a request is believed only if it comes from the connection side that it names, and speaks
/// of an endpoint of that node.
#[test]
fn x11_a_request_in_anothers_name_is_not_told() {
    let stations = Stations::new();
    let listener = Listener::new(&stations);
    let (honest, liar) = (liar(&stations), liar(&stations));
    let (own, his) = (honest.ep.getname().unwrap(), liar.ep.getname().unwrap());
    let other = EpAddr { ep: his.ep + 1, ..his };
    let older = EpAddr { incarnation: his.incarnation ^ 1, ..his };
    let to = liar.knows(listener.pep.getname().unwrap());
    let no_event = || assert!(event(&listener.eq).is_none(), "a lie was told");
    for (side, ep) in [(own, own), (his, own), (own, his), (other, his), (older, his), (his, older)]
    {
        liar.forges(forged(1, [0, 5], side, ep), to, &no_event);
        no_event();
    }
    liar.ep.send(forged(1, [0, 6], his, other), to, 0).unwrap();
    let request = until("a request", || {
        liar.domain.progress().unwrap();
        event(&listener.eq)
    });
    assert_eq!((request.0, request.2.unwrap().peer()), (FI_CONNREQ, other));
    no_event();
}

/// X11: a connection is accepted, refused and ended by who was asked, whatever others know.
#[test]
fn x11_a_stranger_neither_accepts_nor_refuses_nor_ends() {
    let stations = Stations::new();
    let here = stations.domain();
    let turn = || {
        here.progress().unwrap();
    };
    let (asked, stranger) = (liar(&stations), liar(&stations));
    let (his, strange) = (asked.ep.getname().unwrap(), stranger.ep.getname().unwrap());
    let asks = End::new(&here, &stations.info);
    asked.ep.recv(Buf::zeroed(256), FI_ADDR_UNSPEC, 1).unwrap();
    asks.ep.connect(his, b"let me in").unwrap();
    let got = until("a request", || {
        turn();
        asked.read()
    });
    let request = got.bufs.into_one().unwrap();
    let number = u32::from_le_bytes(*request[8..].first_chunk().unwrap());
    let side = EpAddr::from_bytes(request[16..].first_chunk().unwrap()).unwrap();
    assert_eq!((request[0], number != 0), (1, true));
    let no_event = || {
        turn();
        assert!(event(&asks.eq).is_none(), "a stranger was believed");
    };
    let (to, back) = (stranger.knows(side), asked.knows(side));
    for (kind, ep) in [(2, his), (2, strange), (3, his)] {
        stranger.forges(forged(kind, [number, 7], his, ep), to, &no_event);
    }
    asked.forges(forged(2, [number, 7], his, strange), back, &no_event);
    asked.ep.send(forged(2, [number, 7], his, his), back, 0).unwrap();
    let all = || {
        turn();
        asked.domain.progress().unwrap();
    };
    assert_eq!(asks.is_told(&all), (FI_CONNECTED, Vec::new()));
    assert_eq!(asks.ep.getpeer(), Ok(his));
    let _ = until("the acceptance left", || asked.read());
    stranger.forges(forged(4, [number, 7], his, his), to, &no_event);
    asked.ep.send(forged(4, [number, 7], his, his), back, 0).unwrap();
    assert_eq!(asks.is_told(&all), (FI_SHUTDOWN, Vec::new()));
}

/// X11: who was refused may ask again at once, also where the acknowledgement of the refusal and
/// the next request come together, as on a wire.
#[test]
fn x11_who_was_refused_may_ask_again_at_once() {
    let stations = Stations::on("udp:127.0.0.1,near=no".to_owned(), String::new());
    let listener = Listener::new(&stations);
    let here = stations.domain();
    let to = listener.pep.getname().unwrap();
    let turn = || {
        here.progress().unwrap();
    };
    for round in 0..3_u8 {
        let asks = End::new(&here, &stations.info);
        asks.ep.connect(to, &[round]).unwrap();
        for _ in 0..100 {
            turn();
        }
        // Until now nobody has turned the listener, so whatever was sent to it comes at once.
        let (kind, data, request) = until("a request", || {
            turn();
            event(&listener.eq)
        });
        assert_eq!((kind, data), (FI_CONNREQ, vec![round]));
        listener.pep.reject(&request.unwrap(), b"no").unwrap();
        until("a refusal", || {
            turn();
            asks.eq.readerr().ok()
        });
        // The acknowledgement leaves, before the next request.
        let end = Instant::now() + Duration::from_millis(20);
        while Instant::now() < end {
            turn();
        }
    }
}

/// X11: whoever asked hears of the end of a listener that has the request and does not answer; also
/// of one whose death was followed by another process at its address. So does whoever is connected
/// and idle.
#[test]
fn x11_an_end_without_an_answer_is_told() {
    for port in ["shm:", "udp:127.0.0.1,near=no"] {
        let stations = match port {
            "shm:" => Stations::new(),
            wire => Stations::on(wire.to_owned(), String::new()),
        };
        let listener = Listener::new(&stations);
        let here = stations.domain();
        let turn = || {
            here.progress().unwrap();
        };
        let asks = End::new(&here, &stations.info);
        asks.ep.connect(listener.pep.getname().unwrap(), b"").unwrap();
        let (_, _, request) = until("a request", || {
            turn();
            event(&listener.eq)
        });
        // HEARD arrives.
        for _ in 0..100 {
            turn();
            assert!(event(&listener.eq).is_none());
        }
        drop(listener);
        let err = until("an end", || {
            turn();
            asks.eq.readerr().ok()
        });
        assert_eq!(err.err, Error::ConnRefused, "{port}");
        drop(request);
    }
}

/// X11: request, acceptance and end, with data both ways.
#[test]
fn x11_connections_are_asked_for_accepted_and_ended() {
    let stations = Stations::new();
    let listener = Listener::new(&stations);
    let (here, there) = (stations.domain(), stations.domain());
    let asks = End::new(&here, &stations.info);
    asks.ep.connect(listener.pep.getname().unwrap(), b"let me in").unwrap();
    let turn = || {
        here.progress().unwrap();
        there.progress().unwrap();
    };
    let (kind, data, request) = until("a request", || {
        turn();
        event(&listener.eq)
    });
    assert_eq!((kind, &data[..]), (FI_CONNREQ, &b"let me in"[..]));
    let info = Info { handle: request, ..stations.info.clone() };
    let accepts = End::new(&there, &info);
    accepts.ep.accept(b"welcome").unwrap();
    assert_eq!(asks.is_told(&turn), (FI_CONNECTED, b"welcome".to_vec()));
    assert_eq!(accepts.is_told(&turn), (FI_CONNECTED, Vec::new()));
    asks.ep.shutdown().unwrap();
    for end in [&asks, &accepts] {
        assert_eq!(end.is_told(&turn), (FI_SHUTDOWN, Vec::new()));
    }
}
