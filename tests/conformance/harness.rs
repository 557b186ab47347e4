//! Two sides that talk, and how to wait for what they get.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use barewire::flags::{BindFlags, Caps, InfoFlags, OpFlags};
use barewire::*;
use barewire_driver::backend::loopback::{Loopback, LoopbackSettings};
use barewire_driver::port::Port;
pub(crate) use barewire_tests::rng::pattern;

/// Long enough for a machine that does other things, short enough for a person.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) const BOTH: BindFlags = BindFlags::TRANSMIT.union(BindFlags::RECV);

/// Everything but `FI_SOURCE_ERR`.
pub(crate) fn usual_caps() -> Caps {
    Caps::MSG
        | Caps::TAGGED
        | Caps::SEND
        | Caps::RECV
        | Caps::DIRECTED_RECV
        | Caps::MULTI_RECV
        | Caps::TAGGED_MULTI_RECV
        | Caps::SOURCE
        | Caps::FENCE
}

/// How a side is made.
#[derive(Clone)]
pub(crate) struct Plan {
    pub(crate) info: Info,
    pub(crate) settings: Settings,
    pub(crate) cq: CqAttr,
    pub(crate) bind: BindFlags,
}

impl Default for Plan {
    fn default() -> Self {
        let hints = Info { caps: usual_caps(), ..Info::default() };
        Self { info: info(&hints), settings: settings(), cq: CqAttr::default(), bind: BOTH }
    }
}

pub(crate) fn settings() -> Settings {
    Settings {
        t_dead: Duration::from_secs(2),
        unexpected_bytes: Some(16 << 20),
        stats: false,
        // What a test does not turn does not move.
        rcvthread: false,
        ..Settings::default()
    }
}

/// The answer to `hints`.
pub(crate) fn info(hints: &Info) -> Info {
    let none = InfoFlags::empty();
    getinfo_with(&settings(), API_VERSION, None, None, none, Some(hints)).unwrap().remove(0)
}

pub(crate) fn the_fabric() -> Fabric {
    barewire::fabric(&FabricAttr::default()).unwrap()
}

/// Names the ports to test on instead of a loopback segment: one that is opened so many times
/// (`afpacket:lo`, `udp:127.0.0.1`), or several with spaces between them, one for each side. Of
/// three the last is for whoever talks with both sides of a [`Pair`] meanwhile; more sides than
/// that begin again with the first.
pub(crate) const PORTS: &str = "BAREWIRE_TEST_PORT";

/// Ports named for a pair and one beside it.
const WITH_ONE_BESIDE: usize = 3;

/// Ports of one segment.
pub(crate) fn ports(count: usize) -> Vec<Box<dyn Port>> {
    let Ok(specs) = std::env::var(PORTS) else {
        return ports_with(count, LoopbackSettings::default());
    };
    let specs: Vec<&str> = specs.split(' ').collect();
    let repeats = [1, WITH_ONE_BESIDE].contains(&specs.len());
    assert!(repeats || specs.len() >= count, "{PORTS} names too few");
    specs.iter().cycle().take(count).map(|spec| open(spec)).collect()
}

fn open(spec: &str) -> Box<dyn Port> {
    barewire_driver::open::open(spec).unwrap_or_else(|e| panic!("{e}"))
}

/// The port of whoever talks with both sides of a pair, if the tests run with one.
fn port_beside() -> Option<Box<dyn Port>> {
    let specs = std::env::var(PORTS).ok()?;
    let specs: Vec<&str> = specs.split(' ').collect();
    (specs.len() == WITH_ONE_BESIDE).then(|| open(specs[WITH_ONE_BESIDE - 1]))
}

pub(crate) fn ports_with(count: usize, settings: LoopbackSettings) -> Vec<Box<dyn Port>> {
    Loopback::segment(count, settings).into_iter().map(|p| Box::new(p) as Box<dyn Port>).collect()
}

/// A domain with one endpoint, one queue for both directions and one vector.
pub(crate) struct Side {
    pub(crate) ep: Endpoint,
    pub(crate) cq: Cq,
    pub(crate) av: Av,
    pub(crate) domain: Domain,
    /// The other side, in `av`.
    pub(crate) peer: FiAddr,
    /// This side, in `av`.
    pub(crate) me: FiAddr,
}

impl Side {
    pub(crate) fn new(port: Box<dyn Port>, plan: &Plan) -> Self {
        let domain = the_fabric().domain_on(&plan.info, plan.settings.clone(), port).unwrap();
        let cq = domain.cq_open(plan.cq).unwrap();
        let av = domain.av_open(AvAttr::default()).unwrap();
        let ep = domain.endpoint(&plan.info).unwrap();
        ep.bind_cq(&cq, plan.bind).unwrap();
        ep.bind_av(&av).unwrap();
        ep.enable().unwrap();
        let mut side = Self { ep, cq, av, domain, peer: 0, me: 0 };
        side.me = side.knows(side.ep.getname().unwrap());
        side.peer = side.me;
        side
    }

    pub(crate) fn knows(&self, addr: EpAddr) -> FiAddr {
        let mut at = [FI_ADDR_NOTAVAIL];
        assert_eq!(self.av.insert(&[addr], &mut at), Ok(1));
        at[0]
    }

    /// A completion, if one is there.
    pub(crate) fn read(&self) -> Option<Completion> {
        let mut one = [Completion::default()];
        match self.cq.read(&mut one) {
            Ok(1) => Some(std::mem::take(&mut one[0])),
            Ok(n) => panic!("{n} completions for a buffer of one"),
            Err(Error::Again) => None,
            Err(Error::Avail) => panic!("{}", self.cq.readerr().unwrap()),
            Err(e) => panic!("reading the queue: {e}"),
        }
    }

    /// As [`read`](Self::read), leaving the processor to the progress threads if there is nothing.
    pub(crate) fn read_or_yield(&self) -> Option<Completion> {
        let got = self.read();
        if got.is_none() {
            std::thread::yield_now();
        }
        got
    }

    /// An error entry, if one is next.
    pub(crate) fn read_error(&self) -> Option<CompletionError> {
        match self.cq.read(&mut [Completion::default()]) {
            Ok(_) => panic!("a success where an error was expected"),
            Err(Error::Avail) => Some(self.cq.readerr().unwrap()),
            Err(Error::Again) => None,
            Err(e) => panic!("reading the queue: {e}"),
        }
    }
}

/// Two sides that know each other.
pub(crate) struct Pair {
    pub(crate) a: Side,
    pub(crate) b: Side,
    beside: Option<Beside>,
}

impl Default for Pair {
    fn default() -> Self {
        Self::new(&Plan::default())
    }
}

impl Pair {
    pub(crate) fn new(plan: &Plan) -> Self {
        let pair = Self::with(plan, plan, ports(2));
        let beside = port_beside().map(|port| Beside::new(port, [&pair.a, &pair.b], plan));
        Self { beside, ..pair }
    }

    pub(crate) fn with(a: &Plan, b: &Plan, ports: Vec<Box<dyn Port>>) -> Self {
        let mut ports = ports.into_iter();
        let mut next = || ports.next().expect("two ports");
        let (mut a, mut b) = (Side::new(next(), a), Side::new(next(), b));
        a.peer = a.knows(b.ep.getname().unwrap());
        b.peer = b.knows(a.ep.getname().unwrap());
        Self::of(a, b)
    }

    /// Two sides that know each other already.
    pub(crate) fn of(a: Side, b: Side) -> Self {
        Self { a, b, beside: None }
    }

    /// Turns both loops a few times and says whether anything moved. One beside goes on talking.
    pub(crate) fn turn(&self) -> bool {
        if let Some(beside) = &self.beside {
            beside.turn(true);
        }
        self.turn_both()
    }

    /// As [`turn`](Self::turn), but one beside only ends what it has begun.
    fn turn_to_rest(&self) -> bool {
        let rests = self.beside.as_ref().is_none_or(|beside| beside.turn(false));
        self.turn_both() || !rests
    }

    fn turn_both(&self) -> bool {
        let moved: usize = (0..4)
            .map(|_| self.a.domain.progress().unwrap() + self.b.domain.progress().unwrap())
            .sum();
        if moved == 0 && std::env::var_os(PORTS).is_some() {
            // On a real port nothing moves while a frame is on its way.
            std::thread::sleep(Duration::from_micros(100));
        }
        moved > 0
    }

    /// What one beside has sent and got back so far, if there is one.
    pub(crate) fn exchanges(&self) -> Option<u64> {
        self.beside.as_ref().map(|beside| beside.exchange.lock().unwrap().number)
    }

    /// Turns both loops until nothing moves any more.
    pub(crate) fn settle(&self) {
        let start = Instant::now();
        // On a real port a frame may be on its way for as long as another process runs. One that is
        // asked who lives sees a probe every 50 ms while something waits.
        let port = self.a.domain.port();
        let rest = match std::env::var_os(PORTS) {
            Some(_) if port.near_mtu != 0 || port.tells_presence => 40,
            Some(_) => 100,
            None => 0,
        };
        let rest = Duration::from_millis(rest);
        let (mut quiet, mut moved) = (0, start);
        while quiet < 50 || moved.elapsed() < rest {
            if self.turn_to_rest() {
                (quiet, moved) = (0, Instant::now());
            } else {
                quiet += 1;
            }
            assert!(start.elapsed() < PATIENCE, "the two sides never come to rest");
        }
    }

    /// Turns both loops until everything that was sent has been taken by whom it is for. On a port
    /// that may lose frames that is when it is acknowledged, and nothing is waited out.
    pub(crate) fn arrived(&self) {
        if self.a.domain.port().lossless {
            return self.settle();
        }
        until("acknowledgement of all that was sent", || {
            let moved = self.turn_to_rest();
            let on_the_way = [&self.a, &self.b].map(|side| {
                let node = side.domain.levels().unwrap().node;
                node.tx + node.sent
            });
            (!moved && on_the_way == [0, 0]).then_some(())
        });
    }

    /// Makes the two know each other, so that messages leave without an answer of the other side.
    pub(crate) fn meet(&self) {
        self.b.ep.recv((), FI_ADDR_UNSPEC, 0).unwrap();
        self.a.ep.send((), self.a.peer, 0).unwrap();
        self.at_b();
        self.at_a();
    }

    /// The next completion of A.
    pub(crate) fn at_a(&self) -> Completion {
        until("a completion at A", || {
            self.turn();
            self.a.read()
        })
    }

    /// The next completion of B.
    pub(crate) fn at_b(&self) -> Completion {
        until("a completion at B", || {
            self.turn();
            self.b.read()
        })
    }

    /// The next entry of A, which is an error.
    pub(crate) fn error_at_a(&self) -> CompletionError {
        until("an error at A", || {
            self.turn();
            self.a.read_error()
        })
    }

    /// The next entry of B, which is an error.
    pub(crate) fn error_at_b(&self) -> CompletionError {
        until("an error at B", || {
            self.turn();
            self.b.read_error()
        })
    }

    /// Asserts that neither queue holds anything, now and after everything has settled.
    pub(crate) fn nothing_more(&self) {
        self.settle();
        for (name, side) in [("A", &self.a), ("B", &self.b)] {
            if let Some(c) = side.read() {
                panic!("left over at {name}: {c:?}");
            }
        }
    }

    /// Asserts that nothing is in flight, lent or stored on either side.
    pub(crate) fn all_is_back(&self) {
        self.nothing_more();
        for (name, side) in [("A", &self.a), ("B", &self.b)] {
            let levels = side.domain.levels().unwrap();
            let node = levels.node;
            let busy =
                node.tx + node.sent + node.posted + node.unexpected + node.blocks + node.pulls;
            assert_eq!((levels.ops, busy + node.cq_reserved), (0, 0), "{name}: {levels:?}");
        }
    }
}

/// A third side, far where the others are near or the other way round. It sends to an endpoint of
/// its own at each of the two by turns, which sends the same back.
struct Beside {
    side: Side,
    ends: [End; 2],
    /// The exchange that is underway, or the next.
    exchange: Mutex<Exchange>,
}

/// An endpoint in a domain of the pair.
struct End {
    ep: Endpoint,
    cq: Cq,
    _av: Av,
    /// The third side in `_av`, and this end at that.
    to: FiAddr,
    at: FiAddr,
}

#[derive(Default)]
struct Exchange {
    number: u64,
    is_underway: bool,
    /// Completions at the third side, and at the end.
    ended: [u64; 2],
}

impl Exchange {
    /// Within a frame, of several, and announced.
    const LENS: [usize; 5] = [8, 600, 0, 5000, 70_000];

    fn bytes(&self) -> Vec<u8> {
        pattern(Self::LENS[(self.number / 2) as usize % Self::LENS.len()], self.number)
    }
}

impl Beside {
    fn new(port: Box<dyn Port>, pair: [&Side; 2], plan: &Plan) -> Self {
        let mut hints = Info { caps: usual_caps(), ..Info::default() };
        // It answers while a test turns one side alone.
        hints.domain_attr.data_progress = Progress::Auto;
        let own = Plan { info: info(&hints), ..Plan::default() };
        let side = Side::new(port, &own);
        let end = |of: &Side| {
            let info = Info { caps: plan.info.caps | Caps::TAGGED, ..plan.info.clone() };
            let (cq, av) = (
                of.domain.cq_open(CqAttr::default()).unwrap(),
                of.domain.av_open(AvAttr::default()).unwrap(),
            );
            let ep = of.domain.endpoint(&info).unwrap();
            ep.bind_cq(&cq, BOTH).unwrap();
            ep.bind_av(&av).unwrap();
            ep.enable().unwrap();
            let mut to = [0];
            av.insert(&[side.ep.getname().unwrap()], &mut to).unwrap();
            let at = side.knows(ep.getname().unwrap());
            End { ep, cq, _av: av, to: to[0], at }
        };
        let ends = pair.map(end);
        Self { side, ends, exchange: Mutex::default() }
    }

    /// Goes on with an exchange, after it with the next if one `starts`. Whether none is underway.
    fn turn(&self, starts: bool) -> bool {
        let mut of = self.exchange.lock().unwrap();
        let End { ep, cq, to, at, .. } = &self.ends[(of.number % 2) as usize];
        if !of.is_underway && starts {
            ep.trecv(Buf::zeroed(of.bytes().len()), *to, of.number, 0, 1).unwrap();
            self.side.ep.trecv(Buf::zeroed(of.bytes().len()), *at, of.number, 0, 1).unwrap();
            self.side.ep.tsend(Buf::from(of.bytes()), *at, of.number, 0).unwrap();
            of.is_underway = true;
        }
        for (i, queue) in [&self.side.cq, cq].into_iter().enumerate() {
            let mut one = [Completion::default()];
            match queue.read(&mut one) {
                Ok(_) if one[0].op_context == 1 => {
                    assert!(one[0].bytes() == of.bytes(), "message {} changed", of.number);
                    if i == 1 {
                        ep.tsend(Buf::from(of.bytes()), *to, of.number, 0).unwrap();
                    }
                    of.ended[i] += 1;
                }
                Ok(_) => of.ended[i] += 1,
                Err(Error::Again) => {}
                Err(e) => panic!("exchange {} at {i}: {e}: {:?}", of.number, queue.readerr()),
            }
        }
        if of.ended == [2, 2] {
            *of = Exchange { number: of.number + 1, ..Exchange::default() };
        }
        !of.is_underway
    }
}

/// Tries until there is an answer.
pub(crate) fn until<R>(what: &str, mut attempt: impl FnMut() -> Option<R>) -> R {
    let start = Instant::now();
    loop {
        if let Some(answer) = attempt() {
            return answer;
        }
        assert!(start.elapsed() < PATIENCE, "no {what} in {PATIENCE:?}");
    }
}

pub(crate) fn buf(len: usize, seed: u64) -> Buf {
    pattern(len, seed).into()
}

/// A refused post: its error, after checking that the buffers came back.
pub(crate) fn refusal(posted: PostResult, bytes: usize) -> Error {
    let refused = posted.expect_err("the call was accepted");
    let back = match &refused.bufs {
        Bufs::None => 0,
        Bufs::One(b) => b.len(),
        Bufs::Many(v) => v.iter().map(|b| b.len()).sum(),
        Bufs::Shared(s) => s.len(),
    };
    assert_eq!(back, bytes, "the refused call kept memory");
    refused.error
}

pub(crate) fn untagged(bufs: impl Into<Bufs>, addr: FiAddr, context: u64) -> Msg {
    Msg { bufs: bufs.into(), addr, context, data: 0 }
}

pub(crate) fn tagged(bufs: impl Into<Bufs>, addr: FiAddr, tag: u64, context: u64) -> TaggedMsg {
    TaggedMsg { bufs: bufs.into(), addr, tag, ignore: 0, context, data: 0 }
}

/// No flag, for the `msg` calls.
pub(crate) const PLAIN: OpFlags = OpFlags::empty();

/// Adds up the time in which nobody let us poll: silence counts only while our own loop runs (rule
/// S10), so a busy machine may take that much longer.
pub(crate) struct Polls {
    last: Instant,
    pub(crate) starved: Duration,
}

impl Polls {
    pub(crate) fn new() -> Self {
        Self { last: Instant::now(), starved: Duration::ZERO }
    }

    /// Called before every poll.
    pub(crate) fn mark(&mut self) {
        let gap = self.last.elapsed();
        self.last = Instant::now();
        if gap > Duration::from_millis(1) {
            self.starved += gap;
        }
    }
}

/// Sets a flag when it goes, however that happens, so that a thread which waits for it ends with
/// the test that failed.
pub(crate) struct Finally<'a>(pub(crate) &'a std::sync::atomic::AtomicBool);

impl Drop for Finally<'_> {
    fn drop(&mut self) {
        self.0.store(true, std::sync::atomic::Ordering::Relaxed);
    }
}
