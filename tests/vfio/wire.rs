//! Two guests on a cable: one test sends in one guest, the other receives in the other. `VM_PEER`
//! is the address of the other guest's endpoint, and what `sees_a_stop` asks of the host is done to
//! the other guest.

use std::time::{Duration, Instant};

use barewire::*;

use crate::machine::{Monitor, nic};
use crate::supervisor::Rng;
use crate::worker::{Node, nap, open, pattern, settings};

const MESSAGES: u64 = 60;
const END: u64 = 1 << 60;
/// One guest may be up long before the other.
const PATIENCE: Duration = Duration::from_secs(150);

/// The node of this guest, and the other one in its vector.
fn node(t_dead: Duration) -> Option<(Node, FiAddr)> {
    let Ok(peer) = std::env::var("VM_PEER") else {
        println!("SKIPPED: no second guest, see cargo xtask test vfio");
        return None;
    };
    let mut patient = settings();
    patient.t_dead = t_dead;
    // The other guest was told the MAC alone.
    patient.by_name = true;
    let node = open(&format!("vfio:{}", nic(0)?), patient);
    let peer = node.knows(&peer);
    Some((node, peer))
}

fn next(node: &Node) -> Completion {
    let start = Instant::now();
    let mut one = [Completion::default()];
    loop {
        match node.cq.read(&mut one) {
            Ok(_) => return std::mem::take(&mut one[0]),
            Err(Error::Again) => nap(),
            Err(_) => panic!("{}", node.cq.readerr().unwrap()),
        }
        assert!(start.elapsed() < PATIENCE, "no completion");
    }
}

fn len_of(serial: u64) -> usize {
    [0, 64, 1400, 4000, 16_000][serial as usize % 5]
}

#[test]
fn sends() {
    let Some((node, peer)) = node(PATIENCE) else { return };
    node.ep.trecv(Buf::zeroed(8), peer, END, 0, END).unwrap();
    let (mut posted, mut done) = (0, 0);
    let mut is_told = false;
    while done < MESSAGES || !is_told {
        while posted < MESSAGES && posted - done < 8 {
            let bytes = pattern(len_of(posted), posted);
            node.ep.tsend(Buf::from(bytes), peer, posted, posted).unwrap();
            posted += 1;
        }
        match next(&node).op_context {
            END => is_told = true,
            _ => done += 1,
        }
    }
    println!("{MESSAGES} messages sent, {:?}", node.domain.port_counters().unwrap());
}

/// Each message once, in order, unchanged.
#[test]
fn receives() {
    let Some((node, peer)) = node(PATIENCE) else { return };
    for serial in 0..MESSAGES {
        node.ep.trecv(Buf::zeroed(16_000), peer, 0, END - 1, serial).unwrap();
    }
    let mut seen = [false; MESSAGES as usize];
    for _ in 0..MESSAGES {
        let got = next(&node);
        let serial = got.tag;
        // Matched in order; a longer one may complete after a shorter one behind it.
        assert_eq!((got.op_context, got.len), (serial, len_of(serial)), "out of order");
        assert!(got.bytes() == pattern(got.len, serial), "message {serial} changed");
        assert!(!std::mem::replace(&mut seen[serial as usize], true), "{serial} came twice");
    }
    node.ep.tsend(Buf::zeroed(8), peer, END, END).unwrap();
    assert_eq!(next(&node).op_context, END);
    println!("{MESSAGES} messages received, {:?}", node.domain.port_counters().unwrap());
    // The other side may still wait for our last acknowledgement.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(2) {
        node.domain.progress().unwrap();
        nap();
    }
}

/// Silence after which a peer that was stopped is dead.
const T_DEAD: Duration = Duration::from_secs(2);

/// What an emulated processor may add: it is slow, and the host does other things.
const EMULATED: Duration = Duration::from_secs(1);

/// Far more than an answer takes of a guest that runs.
const ANSWER: Duration = Duration::from_secs(20);

/// Contexts of receives and of sends.
const RECEIVED: u64 = 1;
const SENT: u64 = 2;

/// Far less than T_dead, and enough for the host to carry out what it was asked for.
const SOON: Duration = Duration::from_millis(300);

/// The next entry of the queue, success or not, if there is one.
fn entry(node: &Node) -> Option<std::result::Result<Completion, CompletionError>> {
    let mut one = [Completion::default()];
    match node.cq.read(&mut one) {
        Ok(_) => Some(Ok(std::mem::take(&mut one[0]))),
        Err(Error::Again) => {
            nap();
            None
        }
        Err(_) => Some(Err(node.cq.readerr().unwrap())),
    }
}

/// Sends. Who is told that something was lost has posted nothing, and posts again.
fn send(node: &Node, peer: FiAddr, bytes: &[u8], tag: u64) {
    while let Err(refused) = node.ep.tsend(Buf::from(bytes.to_vec()), peer, tag, SENT) {
        assert!(matches!(refused.error, Error::ConnReset | Error::Again), "{}", refused.error);
        let _ = node.domain.progress();
        nap();
    }
}

/// Sends every message back until one says that it is the last. It knows nothing of its stops, but
/// that what it sent before a long one may end in an error.
#[test]
fn is_stopped() {
    let Some((node, peer)) = node(T_DEAD) else { return };
    let receive = |buf| node.ep.trecv(buf, peer, 0, u64::MAX, RECEIVED).unwrap();
    (0..4).for_each(|_| receive(Buf::zeroed(64)));
    let (start, mut last) = (Instant::now(), None);
    // The last answer is on its way for a moment.
    while last.is_none_or(|at: Instant| at.elapsed() < Duration::from_secs(2)) {
        assert!(start.elapsed() < PATIENCE, "no last message");
        match entry(&node) {
            None => {}
            Some(Ok(got)) if got.op_context == RECEIVED => {
                send(&node, peer, got.bytes(), got.tag);
                last = last.or((got.tag == END).then(Instant::now));
                receive(Buf::zeroed(64));
            }
            Some(Ok(_)) => {}
            Some(Err(e)) => {
                assert!(matches!(e.err, Error::HostUnreach | Error::ConnReset), "{e}");
                println!("told: {e}");
                if e.entry.op_context == RECEIVED {
                    receive(Buf::zeroed(64));
                }
            }
        }
    }
}

/// Messages that the other guest sends back, one after the other.
struct Talk {
    node: Node,
    peer: FiAddr,
    tag: u64,
    /// Of the message and its answer.
    ended: u32,
}

impl Talk {
    fn send(&mut self, tag: u64) {
        (self.tag, self.ended) = (tag, 0);
        self.node.ep.trecv(Buf::zeroed(64), self.peer, tag, 0, RECEIVED).unwrap();
        send(&self.node, self.peer, &pattern(64, tag), tag);
    }

    /// Whether the message is answered within some time; the error that it ended in.
    fn is_answered(&mut self, time: Duration) -> std::result::Result<bool, Box<CompletionError>> {
        let start = Instant::now();
        while self.ended < 2 && start.elapsed() < time {
            match entry(&self.node) {
                None => {}
                Some(Ok(got)) => {
                    self.ended += 1;
                    let whole = got.op_context == SENT || got.bytes() == pattern(64, self.tag);
                    assert!(whole, "message {} changed", self.tag);
                }
                Some(Err(e)) if e.entry.op_context == SENT => return Err(Box::new(e)),
                Some(Err(e)) => println!("told: {e}"),
            }
        }
        Ok(self.ended == 2)
    }

    /// Sends until it is answered: the other guest may still boot, or have to learn that a session
    /// is over.
    fn send_until_answered(&mut self, tag: u64) {
        let start = Instant::now();
        loop {
            self.send(tag);
            match self.is_answered(ANSWER) {
                Ok(true) => return,
                outcome => assert!(start.elapsed() < PATIENCE, "no answer: {outcome:?}"),
            }
            self.drop_receive();
        }
    }

    /// Has the other guest stopped for some time, with a message on its way. It is answered, or the
    /// other guest is told dead, after the time that is returned; then they talk again.
    fn stop_for(&mut self, time: Duration, tag: u64, host: &mut Monitor) -> Option<Duration> {
        let stopped = host.stop();
        std::thread::sleep(SOON);
        let start = Instant::now();
        self.send(tag);
        let mut outcome = self.is_answered(time);
        assert!(!matches!(outcome, Ok(true)), "it answers while it is stopped");
        let took = start.elapsed();
        std::thread::sleep(time.saturating_sub(took));
        drop(stopped);
        if outcome.is_ok() {
            outcome = self.is_answered(ANSWER);
        }
        let Err(e) = outcome else {
            assert!(matches!(outcome, Ok(true)), "no answer after a stop");
            return None;
        };
        assert_eq!(e.err, Error::HostUnreach, "{e}");
        // That it runs again is seen a little later.
        let took = if took < time { took } else { start.elapsed() };
        self.drop_receive();
        self.send_until_answered(tag);
        Some(took)
    }

    fn drop_receive(&self) {
        // It may have ended with the session.
        let _ = self.node.ep.cancel(RECEIVED);
        while entry(&self.node).is_some() {}
    }
}

/// Goal: a guest that is stopped for less than T_dead keeps its session, one that is stopped for
/// longer is told dead within T_dead and a little, and talks again when it runs again. Method: the
/// host stops the other guest in the middle of a game, for half of T_dead and for twice as long;
/// nightly for twenty times drawn between.
#[test]
fn sees_a_stop() {
    let (Some((node, peer)), Some(mut host)) = (node(T_DEAD), Monitor::open()) else { return };
    let mut talk = Talk { node, peer, tag: 0, ended: 0 };
    talk.send_until_answered(0);
    let mut rng = Rng::new(7);
    let drawn = if std::env::var_os("BAREWIRE_NIGHTLY").is_some() { 20 } else { 0 };
    let most = 2 * T_DEAD.as_millis() as u64;
    let times = [most / 4, most].into_iter().chain((0..drawn).map(|_| rng.below(most)));
    for (n, time) in times.map(Duration::from_millis).enumerate() {
        for tag in 1..=20 {
            talk.send(tag);
            assert!(talk.is_answered(ANSWER).unwrap());
        }
        let told = talk.stop_for(time, 100 + n as u64, &mut host);
        println!("a stop of {time:?} was told after {told:?}");
        let bound = T_DEAD + Duration::from_millis(100) + EMULATED;
        match told {
            None => assert!(time < bound, "not told after {bound:?}"),
            Some(took) => assert!((T_DEAD..bound).contains(&took), "not after {T_DEAD:?}"),
        }
        assert!(told.is_none() || time > T_DEAD - EMULATED, "it was stopped for less");
    }
    talk.send_until_answered(END);
}
