//! Nodes that know each other by certificates, which are renewed under way.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use barewire_dataplane::error::Error;
use barewire_dataplane::node::NodeSettings;
use barewire_dataplane::seal::{Credentials, Keyring, Mode};
use barewire_dataplane::types::FiAddr;
use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, IsCa, KeyPair, SanType,
    SerialNumber,
};

use super::{Sum, for_seeds, nightly};
use crate::arena::{Buf, claimed_id, is_content};
use crate::ledger::{Checked, ensure};
use crate::net::Net;
use crate::plan::Plan;
use crate::rig::Rig;
use crate::rng::Rng;
use crate::world::guarded;

const MS: u64 = 1_000_000;

/// 2025-01-01. From then on a second of the calendar takes a millisecond, so that certificates of
/// an hour end while a run lasts.
const EPOCH: u64 = 1_735_689_600;

/// Hosts that trust each other. One more has a certificate that they refuse.
const GOOD: usize = 3;
const STRANGER: usize = GOOD;

/// Contexts of receives have this bit; those of sends are what names the message.
const RECEIVE: u64 = 1 << 40;

/// Receives that each host has posted, and the bytes of each.
const RECEIVES: usize = 24;
const LEN_MAX: usize = 4000;

/// Time after which the last frames of a session that is over have come, and what they say of it is
/// believed.
const QUIET_NS: u64 = 2_500 * MS;

/// Who has issued a certificate.
struct Root {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// The Ed25519 key that belongs to `number`: every run of a seed has the same bytes.
fn key(number: u64) -> KeyPair {
    // PKCS #8 (RFC 8410, 7) around 32 bytes.
    let mut der = vec![0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
    let mut r = Rng::new(number, 22);
    (0..4).for_each(|_| der.extend(r.next().to_le_bytes()));
    KeyPair::try_from(der).expect("any 32 bytes are a private key")
}

impl Root {
    fn new(seed: u64, name: &str) -> Self {
        let mut params = CertificateParams::default();
        params.distinguished_name.push(DnType::CommonName, name);
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.serial_number = Some(SerialNumber::from(1));
        let number = seed << 8 | name.len() as u64;
        let issuer = CertifiedIssuer::self_signed(params, key(number)).expect("well formed");
        Self { issuer }
    }

    /// A certificate and its private key, in PEM, that is valid from a minute before `from`.
    fn issue(&self, name: &str, number: u64, [from, until]: [u64; 2]) -> [String; 2] {
        let mut params = CertificateParams::default();
        let at = |second: u64| {
            let day = rcgen::date_time_ymd(2025, 1, 1);
            day + std::time::Duration::from_secs(second - EPOCH)
        };
        // Certificates begin with whole days here: the calendar does not go back beyond the first.
        (params.not_before, params.not_after) = (at(from), at(until));
        params.subject_alt_names = vec![SanType::URI(name.try_into().expect("ASCII"))];
        params.serial_number = Some(SerialNumber::from(100 + number % 100));
        let key = key(number);
        let cert = params.signed_by(&key, &self.issuer).expect("well formed");
        [cert.pem(), key.serialize_pem()]
    }
}

/// Who lives at a host.
struct Member {
    incarnation: u64,
    /// Certificates so far.
    issued: u64,
    /// Seconds between which it has the present one renewed.
    renews: [u64; 2],
}

/// A message.
struct Message {
    from: usize,
    to: usize,
    /// Lives of the two.
    lives: [u64; 2],
    buf: Buf,
    /// It may fail.
    is_excused: bool,
    is_done: bool,
    is_failed: bool,
    is_delivered: bool,
}

/// Why the stranger is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    OtherRoot,
    OtherName,
    Expired,
}

struct Run {
    rig: Rig,
    r: Rng,
    seed: u64,
    wall: Arc<AtomicU64>,
    roots: [Root; 2],
    mode: Mode,
    bits: u32,
    /// Seconds that a certificate lives.
    life: u64,
    fault: Fault,
    members: Vec<Member>,
    addrs: HashMap<(usize, usize), FiAddr>,
    messages: Vec<Message>,
    receives: HashMap<u64, (usize, Buf)>,
    next_receive: u64,
    /// What these two send each other may fail: one has restarted, or has forgotten the other, and
    /// the other may not know.
    trouble: HashSet<(usize, usize)>,
    renewals: u64,
}

/// Goal: hosts with certificates of one root exchange messages exactly once and in order, whatever
/// gets lost, while certificates end and are renewed, keys of sessions change every few frames and
/// processes restart; one whose certificate is of another root or name, or has expired, exchanges
/// nothing. Method: after every certificate of the beginning has ended, all sessions open anew, and
/// nobody is refused.
#[test]
fn certificates() {
    let seeds = if nightly() { 4_000 } else { 150 };
    let start = Instant::now();
    let sum = for_seeds("certificates", seeds, |seed, sum| guarded(|| one(seed, sum)));
    sum.print("certificates", start);
}

/// One seed.
pub(crate) fn one(seed: u64, sum: &mut Sum) -> Checked {
    let mut run = Run::new(seed);
    for round in 0..5 {
        run.disturb();
        if run.r.chance(0.5) {
            run.heal()?;
        }
        run.burst(if round == 2 { 2 } else { 1 })?;
    }
    run.renew_all_and_greet()?;
    run.check_stranger()?;
    sum.runs += 1;
    sum.ops += run.messages.len() as u64;
    sum.delivered += run.messages.iter().filter(|m| m.is_delivered).count() as u64;
    sum.failed += run.messages.iter().filter(|m| m.is_failed).count() as u64;
    sum.frames += run.rig.net.stats.frames;
    sum.events += run.rig.net.stats.events;
    sum.dropped += run.rig.net.stats.dropped;
    sum.duplicated += run.rig.net.stats.duplicated;
    sum.corrupted += run.rig.net.stats.corrupted;
    sum.crashes += run.members.iter().map(|m| m.incarnation >> 8).sum::<u64>();
    Ok(())
}

fn plan(seed: u64, r: &mut Rng) -> Plan {
    let mut plan = Plan::calm(seed, 0);
    plan.hosts = GOOD + 1;
    plan.link.mtu = vec![1500; plan.hosts];
    plan.link.loss = r.pick(&[0.0, 0.02, 0.2]) * r.unit();
    plan.link.dup = r.pick(&[0.0, 0.05]);
    plan.link.jitter_ns = r.pick(&[0.0, 1e3, 50e3]);
    plan.link.corrupt = r.pick(&[0.0, 0.01]);
    plan.link.forges = Some(r.pick(&[0.0, 0.1]));
    plan.node.t_dead_ns = 2_000 * MS;
    plan.node.rekey_ns = r.pick(&[MS, 3_600_000 * MS]);
    plan
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut r = Rng::new(seed, 21);
        let plan = plan(seed, &mut r);
        let mut run = Self {
            rig: Rig::new(plan, 0),
            mode: r.pick(&[Mode::Encrypted, Mode::Authenticated]),
            bits: r.pick(&[2, 4, 10]),
            life: r.range(2_000, 6_000),
            fault: r.pick(&[Fault::OtherRoot, Fault::OtherName, Fault::Expired]),
            seed,
            wall: Arc::new(AtomicU64::new(EPOCH)),
            roots: [Root::new(seed, "root"), Root::new(seed, "other")],
            members: Vec::new(),
            addrs: HashMap::new(),
            messages: Vec::new(),
            receives: HashMap::new(),
            next_receive: RECEIVE,
            trouble: HashSet::new(),
            renewals: 0,
            r,
        };
        for host in 0..=GOOD {
            let incarnation = 1 + host as u64;
            run.members.push(Member { incarnation, issued: 0, renews: [0; 2] });
            run.start(host);
        }
        run
    }

    fn now(&self) -> u64 {
        self.wall.load(Ordering::Relaxed)
    }

    /// Another certificate for `host`, from now on.
    fn credentials(&mut self, host: usize) -> Arc<Credentials> {
        let (now, life) = (self.now(), self.life);
        let stranger = (host == STRANGER).then_some(self.fault);
        let of = if stranger == Some(Fault::OtherRoot) { 1 } else { 0 };
        let domain = if stranger == Some(Fault::OtherName) { "b.org" } else { "a.org" };
        // The stranger's ends before anybody has seen it, or never.
        let until = match stranger {
            Some(Fault::Expired) => now + 1,
            Some(_) => now + 1_000_000_000,
            None => now + life,
        };
        let m = &mut self.members[host];
        m.issued += 1;
        m.renews = match stranger {
            Some(_) => [u64::MAX; 2],
            None => [now + life / 4, now + life * 3 / 4],
        };
        let number = self.seed << 16 | (host as u64) << 12 | m.issued;
        let name = format!("spiffe://{domain}/job/{host}");
        let [chain, key] = self.roots[of].issue(&name, number, [now, until]);
        // The stranger takes the others for what they are.
        let mut roots = self.roots[0].issuer.pem();
        if host == STRANGER {
            roots += &self.roots[1].issuer.pem();
        }
        let wall = Arc::clone(&self.wall);
        let clock = Arc::new(move || wall.load(Ordering::Relaxed));
        let peers = barewire_dataplane::seal::PeerId::parse("spiffe://a.org/*");
        let peers = peers.into_iter().filter(|_| host == STRANGER).collect();
        let (chain, key) = (chain.as_bytes(), key.as_bytes());
        let made = Credentials::from_pem(chain, key, roots.as_bytes(), peers, clock);
        Arc::new(made.expect("what a peer would take"))
    }

    /// A process starts at `host`.
    fn start(&mut self, host: usize) {
        let own = self.credentials(host);
        let incarnation = self.members[host].incarnation;
        let entropy = std::array::from_fn(|i| (incarnation ^ self.seed >> i) as u8);
        let keys = Keyring::of_certificate_with(own, self.mode, self.bits, entropy);
        let settings = self.rig.plan.node.settings(incarnation, self.seed ^ (incarnation << 20));
        self.rig.start_with(host, NodeSettings { keys, ..settings });
        for other in (0..self.members.len()).filter(|&other| other != host) {
            for (from, to) in [(host, other), (other, host)] {
                let addr = self.rig.peer(from, to, self.members[to].incarnation);
                self.addrs.insert((from, to), addr);
            }
        }
        for _ in 0..RECEIVES {
            self.receive(host);
        }
    }

    fn receive(&mut self, host: usize) {
        let context = self.next_receive;
        self.next_receive += 1;
        let buf = self.rig.at(host).arena.take(LEN_MAX).expect("nobody wrote");
        assert!(self.rig.recv(host, None, buf, context), "a place for a receive");
        self.receives.insert(context, (host, buf));
    }

    fn trouble(&mut self, a: usize, b: usize) {
        self.trouble.insert((a.min(b), a.max(b)));
    }

    /// A process restarts, two forget each other, or nothing.
    fn disturb(&mut self) {
        let host = self.r.index(GOOD);
        match self.r.index(5) {
            0 => {
                (0..=GOOD).filter(|&other| other != host).for_each(|b| self.trouble(host, b));
                self.receives.retain(|_, (at, _)| *at != host);
                self.rig.kill(host);
                let pause = self.r.exp(20e6).min(100 * MS);
                self.pass(pause);
                self.members[host].incarnation += 1 << 8;
                self.start(host);
            }
            1 | 2 => {
                let other = (host + 1 + self.r.index(GOOD - 1)) % GOOD;
                self.forget(host, other);
            }
            _ => {}
        }
    }

    /// Everybody finds out what is wrong, and what comes later must not fail.
    fn heal(&mut self) -> Checked {
        self.send_all()?;
        self.settle()?;
        self.pass(QUIET_NS);
        self.trouble.clear();
        Ok(())
    }

    /// A message from each to each.
    fn send_all(&mut self) -> Checked {
        for from in 0..GOOD {
            for to in (0..GOOD).filter(|&to| to != from) {
                self.send(from, to)?;
            }
        }
        Ok(())
    }

    fn forget(&mut self, host: usize, other: usize) {
        self.trouble(host, other);
        let now = self.rig.now();
        self.rig.at(host).node.sessions().drop_session(now, Net::station(other));
        self.rig.poll_by(host, now.0);
    }

    /// So much time passes; certificates are renewed when it is time.
    fn pass(&mut self, ns: u64) {
        let until = self.rig.net.now + ns;
        while self.rig.net.now < until {
            let next = until.min(self.rig.net.now + MS);
            self.rig.run_to(next);
            self.wall.store(EPOCH + self.rig.net.now / MS, Ordering::Relaxed);
            for host in 0..GOOD {
                let [first, last] = self.members[host].renews;
                let now = self.now();
                let due = now >= last || (now >= first && self.r.chance(0.002));
                if due && self.rig.stations[host].is_some() {
                    self.renew(host);
                }
            }
        }
    }

    fn renew(&mut self, host: usize) {
        let own = self.credentials(host);
        let now = self.rig.now();
        self.rig.at(host).node.sessions().set_certificate(now, own).expect("it fits");
        self.rig.poll_by(host, now.0);
        self.renewals += 1;
    }

    fn send(&mut self, from: usize, to: usize) -> Checked {
        let id = self.messages.len() as u64;
        let len = self.r.pick(&[8, 64, 1000, LEN_MAX]);
        let buf = self.rig.at(from).arena.take(len)?;
        self.rig.at(from).arena.write_message(buf, id);
        if !self.rig.send(from, self.addrs[&(from, to)], buf, id) {
            return self.rig.at(from).arena.give(buf);
        }
        let lives = [from, to].map(|host| self.members[host].incarnation);
        let is_excused = self.trouble.contains(&(from.min(to), from.max(to)));
        let [is_done, is_failed, is_delivered] = [false; 3];
        let message =
            Message { from, to, lives, buf, is_excused, is_done, is_failed, is_delivered };
        self.messages.push(message);
        Ok(())
    }

    /// Messages between all, with what comes of them; the stranger is tried as well.
    fn burst(&mut self, strangers: usize) -> Checked {
        for _ in 0..self.r.range(10, 30) {
            let from = self.r.index(GOOD);
            let to = (from + 1 + self.r.index(GOOD - 1)) % GOOD;
            self.send(from, to)?;
            let pause = self.r.exp(300e3).min(5 * MS);
            self.pass(pause);
            self.collect()?;
        }
        for _ in 0..strangers {
            let other = self.r.index(GOOD);
            self.send(other, STRANGER)?;
            self.send(STRANGER, other)?;
        }
        self.settle()
    }

    /// Waits until everything has ended.
    fn settle(&mut self) -> Checked {
        let limit = self.rig.net.now + 12_000 * MS;
        loop {
            self.collect()?;
            let is_open = |m: &&Message| {
                let lost = self.members[m.from].incarnation != m.lives[0];
                !m.is_done && !m.is_failed && !lost
            };
            let Some(open) = self.messages.iter().find(is_open) else { return Ok(()) };
            let (from, to) = (open.from, open.to);
            ensure!(self.rig.net.now < limit, "a message from {from} to {to} does not end");
            self.pass(MS);
        }
    }

    /// Reads what has completed, and judges it.
    fn collect(&mut self) -> Checked {
        for host in 0..=GOOD {
            if self.rig.stations[host].is_none() {
                continue;
            }
            loop {
                if let Some(c) = self.rig.read(host) {
                    match c.op_context < RECEIVE {
                        true => self.sent(c.op_context)?,
                        false => self.received(host, c.op_context, c.len as usize)?,
                    }
                } else if let Some(e) = self.rig.error(host) {
                    ensure!(e.cqe.op_context < RECEIVE, "a receive failed: {e:?}");
                    self.failed(e.cqe.op_context, e.err)?;
                } else {
                    break;
                }
            }
        }
        Ok(())
    }

    fn sent(&mut self, id: u64) -> Checked {
        let m = &mut self.messages[id as usize];
        ensure!(![m.from, m.to].contains(&STRANGER), "the stranger was talked to: {id}");
        ensure!(!m.is_done && !m.is_failed, "message {id} ends twice");
        m.is_done = true;
        let (from, buf) = (m.from, m.buf);
        self.rig.at(from).arena.give(buf)
    }

    fn failed(&mut self, id: u64, err: Error) -> Checked {
        let m = &mut self.messages[id as usize];
        ensure!(!m.is_done && !m.is_failed, "message {id} ends twice");
        m.is_failed = true;
        let (from, to, buf, is_excused) = (m.from, m.to, m.buf, m.is_excused);
        if [from, to].contains(&STRANGER) {
            let fits = [Error::Access, Error::HostUnreach, Error::ConnReset];
            ensure!(fits.contains(&err), "with the stranger: {err}");
        } else {
            let at = self.rig.net.now / MS;
            ensure!(is_excused, "message {id} from {from} to {to} failed at {at} ms: {err}");
        }
        self.rig.at(from).arena.give(buf)
    }

    fn received(&mut self, host: usize, context: u64, len: usize) -> Checked {
        let (at, buf) = self.receives.remove(&context).ok_or("a receive that is not posted")?;
        ensure!(at == host, "a receive of another host");
        let bytes = &self.rig.at(host).arena.bytes(buf)[..len];
        let id = claimed_id(bytes).ok_or("a message without a name")?;
        ensure!(is_content(bytes, id), "message {id} is damaged");
        let m = self.messages.get_mut(id as usize).ok_or("a message of nobody")?;
        ensure!(![m.from, m.to].contains(&STRANGER), "the stranger's message {id} has arrived");
        let to = [host as u64, self.members[host].incarnation];
        ensure!([m.to as u64, m.lives[1]] == to, "message {id} is for another");
        ensure!(
            m.buf.len == len && !m.is_delivered,
            "message {id} comes twice, or with {len} bytes"
        );
        m.is_delivered = true;
        let (from, lives) = (m.from, m.lives);
        let is_later =
            |m: &Message| m.is_delivered && (m.from, m.to, m.lives) == (from, host, lives);
        let later = self.messages[id as usize + 1..].iter().any(is_later);
        ensure!(!later, "message {id} is overtaken");
        self.rig.at(host).arena.give(buf)?;
        self.receive(host);
        Ok(())
    }

    /// When all certificates of the beginning have ended, and sessions have been forgotten,
    /// everybody talks to everybody.
    fn renew_all_and_greet(&mut self) -> Checked {
        while self.now() <= EPOCH + self.life {
            self.pass(50 * MS);
            self.collect()?;
        }
        for host in 0..GOOD {
            for other in host + 1..GOOD {
                self.forget(host, other);
                self.forget(other, host);
            }
        }
        self.pass(QUIET_NS);
        self.heal()?;
        let begun = self.messages.len();
        self.send_all()?;
        self.settle()?;
        self.pass(100 * MS);
        self.collect()?;
        for m in &self.messages[begun..] {
            ensure!(m.is_done && m.is_delivered, "{} does not reach {}", m.from, m.to);
        }
        // What has been sent and was not lost with its receiver has arrived.
        for (id, m) in self.messages.iter().enumerate() {
            let lives = [m.from, m.to].map(|host| self.members[host].incarnation) == m.lives;
            ensure!(!m.is_done || m.is_delivered || !lives, "message {id} was lost");
        }
        ensure!(self.renewals >= GOOD as u64, "only {} were renewed", self.renewals);
        Ok(())
    }

    /// Nobody has a session with the stranger, and the fault of its certificate is counted.
    fn check_stranger(&mut self) -> Checked {
        let fault = self.fault;
        let opened = self.rig.at(STRANGER).node.counters().sessions_opened;
        ensure!(opened == 0, "the stranger has opened {opened} sessions");
        for host in 0..=GOOD {
            let c = self.rig.at(host).node.counters();
            let all = [c.rx_cert_issuer, c.rx_cert_name, c.rx_cert_time];
            for (i, other) in
                [Fault::OtherRoot, Fault::OtherName, Fault::Expired].iter().enumerate()
            {
                ensure!(all[i] == 0 || *other == fault, "{host} counts {all:?} for {fault:?}");
            }
        }
        Ok(())
    }
}
