//! The other process.
//!
//! `echo`: sends every tagged message back. `traffic`: sends messages of all lengths to its peer,
//! receives the peer's, and accounts for every operation.
//!
//! It hears `PEER address`, `KILLED`, `QUIET`, `STOP`, and answers `ADDR`, `DRAINED`, `LEVELS`.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use barewire::flags::{BindFlags, Caps, InfoFlags, OpFlags};
use barewire::*;
pub(crate) use barewire_tests::rng::pattern;

use crate::supervisor::Rng;

/// Silence after which a peer is dead.
pub(crate) const T_DEAD: Duration = Duration::from_millis(500);

const WINDOW: usize = 24;

/// Answers the supervisor.
pub(crate) fn say(line: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "@@{line}").and_then(|()| out.flush()).unwrap();
}

/// Lets others run while there is nothing to do, where that was asked for: on an emulated
/// processor a loop that spins takes the device's time.
pub(crate) fn nap() {
    static ASKED: std::sync::OnceLock<bool> = std::sync::OnceLock::new();
    if *ASKED.get_or_init(|| std::env::var_os("BAREWIRE_TEST_NAPS").is_some()) {
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// A domain on a port, with one endpoint and one queue.
pub(crate) struct Node {
    pub(crate) ep: Endpoint,
    pub(crate) cq: Cq,
    pub(crate) av: Av,
    pub(crate) domain: Domain,
}

pub(crate) fn open(port: &str, settings: Settings) -> Node {
    open_with(port, settings, Caps::TAGGED | Caps::SOURCE)
}

pub(crate) fn open_with(port: &str, settings: Settings, caps: Caps) -> Node {
    open_as(port, settings, Info { caps, ..Info::default() })
}

pub(crate) fn open_as(port: &str, settings: Settings, mut hints: Info) -> Node {
    hints.domain_attr.name = Some(port.to_owned());
    let none = InfoFlags::empty();
    let info = getinfo_with(&settings, API_VERSION, None, None, none, Some(&hints));
    let info = info.unwrap().remove(0);
    let domain = fabric(&info.fabric_attr).unwrap().domain_with(&info, settings);
    let domain = domain.unwrap_or_else(|e| panic!("{e}"));
    let cq = domain.cq_open(CqAttr::default()).unwrap();
    let av = domain.av_open(AvAttr::default()).unwrap();
    let ep = domain.endpoint(&info).unwrap();
    ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
    ep.bind_av(&av).unwrap();
    ep.enable().unwrap();
    Node { ep, cq, av, domain }
}

impl Node {
    pub(crate) fn knows(&self, addr: &str) -> FiAddr {
        let mut at = [0];
        assert_eq!(self.av.insert(&[addr.parse().unwrap()], &mut at), Ok(1));
        at[0]
    }
}

pub(crate) fn settings() -> Settings {
    // Wires are looked at here; who wants a near side says so.
    let near = false;
    Settings { t_dead: T_DEAD, unexpected_bytes: Some(64 << 20), near, ..Settings::default() }
}

/// The lines that the supervisor says.
pub(crate) fn orders() -> Receiver<String> {
    let (tell, orders) = channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(|line| line.ok()) {
            if tell.send(line).is_err() {
                return;
            }
        }
    });
    orders
}

pub(crate) fn run(role: &str) {
    let port = std::env::var("BAREWIRE_E2E_PORT").unwrap();
    let orders = orders();
    let mut settings = settings();
    if role == "echo" {
        settings.t_dead = Duration::from_secs(10);
    }
    let node = open(&port, settings);
    say(&format!("ADDR {}", node.ep.getname().unwrap()));
    match role {
        "echo" => echo(&node, &orders),
        _ => Traffic::new(node).obey(&orders),
    }
}

/// Sends `len` bytes back for every tag `len`, until told to stop.
fn echo(node: &Node, orders: &Receiver<String>) {
    let peer = orders.recv().unwrap();
    let peer = node.knows(peer.strip_prefix("PEER ").unwrap());
    let mut one = [Completion::default()];
    while let Some(order) = next_order(node, orders) {
        let Some(len) = order.strip_prefix("SIZE ") else { break };
        let len: usize = len.parse().unwrap();
        node.ep.trecv(Buf::zeroed(len), peer, len as u64, 0, 1).unwrap();
        let mut ends = 0;
        while ends < 2 {
            match node.cq.read(&mut one) {
                Ok(_) => {
                    ends += 1;
                    if let (1, Some(buf)) = (one[0].op_context, one[0].take_buf()) {
                        assert_eq!(one[0].len, len);
                        node.ep.tsend(buf, peer, len as u64, 2).unwrap();
                    }
                }
                Err(Error::Again) => nap(),
                Err(_) => panic!("{}", node.cq.readerr().unwrap()),
            }
        }
        say("ECHOED");
    }
}

/// Waits for an order. Polls: what came last is acknowledged, and the process is seen.
fn next_order(node: &Node, orders: &Receiver<String>) -> Option<String> {
    loop {
        match orders.recv_timeout(Duration::from_micros(100)) {
            Ok(order) => return Some(order),
            Err(RecvTimeoutError::Timeout) => node.domain.progress().unwrap(),
            Err(RecvTimeoutError::Disconnected) => return None,
        };
    }
}

/// Mixed traffic and its account.
struct Traffic {
    node: Node,
    peer: Option<FiAddr>,
    rng: Rng,
    /// Sends that have not ended, by context.
    sends: HashMap<u64, usize>,
    receives: usize,
    next: u64,
    completed: u64,
    failed: u64,
    received: u64,
    last_poll: Instant,
    /// Time in which nobody let this process poll: silence does not count then (rule S10).
    starved: Duration,
}

/// Contexts of receives; sends count from 0.
const RECEIVE: u64 = 1 << 40;

const LONGEST: usize = 300_000;

impl Traffic {
    fn new(node: Node) -> Self {
        let mut traffic = Self {
            node,
            peer: None,
            rng: Rng::new(u64::from(std::process::id())),
            sends: HashMap::new(),
            receives: 0,
            next: 0,
            completed: 0,
            failed: 0,
            received: 0,
            last_poll: Instant::now(),
            starved: Duration::ZERO,
        };
        for _ in 0..WINDOW {
            traffic.post_receive(Buf::zeroed(LONGEST));
        }
        traffic
    }

    fn obey(mut self, orders: &Receiver<String>) {
        let mut draining: Option<(Instant, Duration)> = None;
        loop {
            let order = match orders.try_recv() {
                // The supervisor is gone.
                Err(TryRecvError::Disconnected) => return,
                other => other.ok(),
            };
            match order.as_deref() {
                None => {}
                Some("KILLED" | "QUIET") => {
                    self.peer = None;
                    draining = Some((Instant::now(), self.starved));
                }
                Some("STOP") => return self.stop(),
                Some(order) => {
                    let addr = order.strip_prefix("PEER ").expect("an order");
                    self.peer = Some(self.node.knows(addr));
                }
            }
            self.send_some();
            self.poll();
            if let Some((since, starved)) = draining
                && self.sends.is_empty()
            {
                draining = None;
                let starved = self.starved - starved;
                let own = since.elapsed().saturating_sub(starved);
                let (own, starved) = (own.as_millis(), starved.as_millis());
                let Self { completed, failed, received, .. } = self;
                say(&format!("DRAINED {own} {starved} {completed} {failed} {received}"));
            }
        }
    }

    fn send_some(&mut self) {
        let Some(peer) = self.peer else { return };
        while self.sends.len() < WINDOW {
            let len = match self.rng.below(10) {
                0..6 => self.rng.below(300) as usize,
                6..8 => self.rng.below(20_000) as usize,
                8 => self.rng.below(100_000) as usize,
                _ => self.rng.below(LONGEST as u64) as usize,
            };
            let mut flags = OpFlags::empty();
            flags.set(OpFlags::DELIVERY_COMPLETE, self.rng.below(2) == 0);
            let (tag, context) = (self.next << 20 | len as u64, self.next);
            let bufs = Bufs::One(pattern(len, tag).into());
            let msg = TaggedMsg { bufs, addr: peer, tag, ignore: 0, context, data: 0 };
            match self.node.ep.tsendmsg(msg, flags) {
                Ok(()) => {
                    self.sends.insert(context, len);
                    self.next += 1;
                }
                Err(refused) => {
                    // Once after the other was killed, if it had not taken all that was sent.
                    let told = [Error::Again, Error::ConnReset];
                    assert!(told.contains(&refused.error), "{}", refused.error);
                    return;
                }
            }
        }
    }

    fn post_receive(&mut self, buf: Buf) {
        self.node.ep.trecv(buf, FI_ADDR_UNSPEC, 0, u64::MAX, RECEIVE).unwrap();
        self.receives += 1;
    }

    fn poll(&mut self) {
        // Every time, so that the gaps are those of the node's loop, checking messages included.
        self.node.domain.progress().unwrap();
        let gap = self.last_poll.elapsed();
        self.last_poll = Instant::now();
        if gap > Duration::from_millis(1) {
            self.starved += gap;
        }
        let mut out: [Completion; 8] = Default::default();
        match self.node.cq.read(&mut out) {
            Ok(n) => out.into_iter().take(n).for_each(|c| self.ended(c)),
            Err(Error::Again) => nap(),
            Err(Error::Avail) => {
                let e = self.node.cq.readerr().unwrap();
                self.broke(e);
            }
            Err(e) => panic!("reading the queue: {e}"),
        }
    }

    fn ended(&mut self, mut c: Completion) {
        if c.op_context != RECEIVE {
            assert!(self.sends.remove(&c.op_context).is_some(), "{} ended twice", c.op_context);
            self.completed += 1;
            return;
        }
        assert_eq!(c.len as u64, c.tag & 0xf_ffff);
        assert!(c.bytes() == &pattern(c.len, c.tag)[..], "a message of {} bytes changed", c.len);
        self.received += 1;
        self.receives -= 1;
        self.post_receive(c.take_buf().unwrap());
    }

    fn broke(&mut self, e: CompletionError) {
        let gone = matches!(e.err, Error::HostUnreach | Error::ConnReset | Error::Canceled);
        assert!(gone || e.err == Error::ConnRefused, "{e}");
        if e.entry.op_context == RECEIVE {
            // A message that its sender could not finish.
            self.receives -= 1;
            self.post_receive(e.entry.bufs.into_one().unwrap());
        } else {
            assert!(self.sends.remove(&e.entry.op_context).is_some(), "ended twice: {e}");
            self.failed += 1;
        }
    }

    /// Cancels the receives and tells what is still in use.
    fn stop(mut self) {
        // What was sent before the order may not have been looked at yet. It is not to find the
        // receives gone.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(100) {
            self.poll();
        }
        while self.node.ep.cancel(RECEIVE).is_ok() {}
        let start = Instant::now();
        let mut left = self.receives;
        while left > 0 && start.elapsed() < Duration::from_secs(10) {
            match self.node.cq.read(&mut [Completion::default()]) {
                Ok(n) => left -= n,
                Err(Error::Avail) => {
                    self.node.cq.readerr().unwrap();
                    left -= 1;
                }
                Err(_) => {}
            }
        }
        // Acknowledgements may still be on their way.
        while start.elapsed() < Duration::from_secs(2) {
            self.node.domain.progress().unwrap();
            let l = self.node.domain.levels().unwrap();
            if l.node.sent == 0 && l.node.tx == 0 {
                break;
            }
        }
        let levels = self.node.domain.levels().unwrap();
        let n = levels.node;
        let in_use = [
            levels.ops as u64,
            n.tx as u64,
            n.sent as u64,
            n.posted as u64,
            n.unexpected as u64,
            n.blocks as u64,
            n.pulls as u64,
            n.pull_bytes,
            n.reorder_buf as u64,
            n.cq_reserved as u64,
        ];
        say(&format!("LEVELS {} {levels:?}", in_use.iter().sum::<u64>()));
    }
}
