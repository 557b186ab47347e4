//! Tenants on one segment: hosts with the key of one, services with the keys of all, one who has
//! none of them, and keys that change while they talk.

use std::collections::{HashMap, HashSet};
use std::time::Instant;

use barewire_dataplane::error::Error;
use barewire_dataplane::flags::{Caps, OpFlags};
use barewire_dataplane::node::{MsgKind, NodeSettings, RecvReq};
use barewire_dataplane::seal::{Keyring, Mode, PreSharedKey};
use barewire_dataplane::types::{Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, Tenant};

use super::{Sum, for_seeds, nightly};
use crate::arena::{Buf, claimed_id, is_content};
use crate::ledger::{Checked, ensure};
use crate::net::Net;
use crate::plan::Plan;
use crate::rig::{EP, Rig};
use crate::rng::Rng;
use crate::world::guarded;

const MS: u64 = 1_000_000;

/// The first hosts are services, with a key per tenant.
const SERVICES: usize = 2;
/// Then two hosts of each tenant, with its key.
const TENANTS: usize = 2;
/// The last host has a key of nobody.
const STRANGER: usize = SERVICES + 2 * TENANTS;
const HOSTS: usize = STRANGER + 1;
/// The number of the key that the stranger has, and of that of who has a wrong one.
const STRANGE: u8 = 98;
const WRONG: u8 = 99;

/// Contexts of receives have this bit; those of sends are what names the message.
const RECEIVE: u64 = 1 << 40;

/// Receives that each host has posted for anybody, and a service for each tenant.
const RECEIVES: usize = 24;
const KEYED: usize = 4;
const LEN_MAX: usize = 4000;

/// Time after which the last frames of a session that is over have come, and what they say of it is
/// believed.
const QUIET_NS: u64 = 2_500 * MS;

/// A host by what it has: of a service `None`.
fn home(host: usize) -> Option<usize> {
    (SERVICES..STRANGER).contains(&host).then(|| (host - SERVICES) / 2)
}

fn is_service(host: usize) -> bool {
    host < SERVICES
}

/// Who lives at a host.
struct Member {
    incarnation: u64,
    /// AddrRole key it has, if it is no service.
    tenant: Option<usize>,
}

/// A message of a tenant.
struct Message {
    from: usize,
    to: usize,
    tenant: usize,
    /// Number of the tenant's key then.
    key: u8,
    /// Lives of the two.
    lives: [u64; 2],
    buf: Buf,
    /// Both have the key.
    is_legal: bool,
    /// It may fail.
    is_excused: bool,
    is_done: bool,
    is_failed: bool,
    is_delivered: bool,
}

/// A posted receive.
struct Receive {
    host: usize,
    buf: Buf,
    /// The tenant that it is for.
    of: Option<usize>,
    is_cancelled: bool,
}

struct Run {
    rig: Rig,
    r: Rng,
    seed: u64,
    modes: [Mode; TENANTS],
    bits: u32,
    /// Numbers of the tenants' keys.
    keys: [u8; TENANTS],
    next_key: u8,
    members: Vec<Member>,
    /// What the services call the tenants.
    handles: HashMap<(usize, usize), Tenant>,
    /// Of whom, to whom, for which tenant.
    addrs: HashMap<(usize, usize, usize), FiAddr>,
    /// What the addresses of a host name: who, and which tenant's.
    names: HashMap<(usize, FiAddr), (usize, usize)>,
    messages: Vec<Message>,
    receives: HashMap<u64, Receive>,
    next_receive: u64,
    /// What these two send each other for a tenant may fail: one has restarted, or has forgotten
    /// the other, or has another key, and the other may not know.
    trouble: HashSet<(usize, usize, usize)>,
    /// Who has the wrong key for a while.
    wrong: Option<usize>,
}

/// Goal: who has the key of a tenant exchanges messages exactly once and in order with who has it
/// too, and nothing with anybody else, whatever gets lost, while processes restart, have a wrong
/// key for a while, or the key of a tenant is replaced; what one tenant does makes no operation of
/// another fail. What is sent across ends with an error. Method: receives for anybody and for one
/// tenant; who does not take part in the change of a key is nobody's peer from then on.
#[test]
fn tenants() {
    let seeds = if nightly() { 4_000 } else { 150 };
    let start = Instant::now();
    let sum = for_seeds("tenants", seeds, |seed, sum| guarded(|| one(seed, sum)));
    sum.print("tenants", start);
}

/// One seed.
pub(crate) fn one(seed: u64, sum: &mut Sum) -> Checked {
    let mut run = Run::new(seed);
    for round in 0..5 {
        run.disturb()?;
        if run.r.chance(0.5) {
            run.heal()?;
        }
        run.burst(if round == 2 { 4 } else { 1 })?;
    }
    run.heal()?;
    run.send_all()?;
    run.burst(4)?;
    run.check_end()?;
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
    sum.denied += run.messages.iter().filter(|m| m.is_failed && !m.is_legal).count() as u64;
    Ok(())
}

fn plan(seed: u64, r: &mut Rng) -> Plan {
    let mut plan = Plan::calm(seed, 0);
    plan.hosts = HOSTS;
    plan.link.mtu = vec![1500; plan.hosts];
    plan.link.loss = r.pick(&[0.0, 0.02, 0.2]) * r.unit();
    plan.link.dup = r.pick(&[0.0, 0.05]);
    plan.link.jitter_ns = r.pick(&[0.0, 1e3, 50e3]);
    plan.link.corrupt = r.pick(&[0.0, 0.01]);
    plan.link.forges = Some(r.pick(&[0.0, 0.1]));
    plan.node.t_dead_ns = 2_000 * MS;
    plan.node.rekey_ns = r.pick(&[MS, 3_600_000 * MS]);
    plan.node.peer_max = 128;
    plan
}

impl Run {
    fn new(seed: u64) -> Self {
        let mut r = Rng::new(seed, 31);
        let plan = plan(seed, &mut r);
        let mode = |r: &mut Rng| r.pick(&[Mode::Encrypted, Mode::Authenticated]);
        let mut run = Self {
            rig: Rig::with(plan, 0, Caps::SOURCE),
            modes: [mode(&mut r), mode(&mut r)],
            bits: r.pick(&[2, 4, 10]),
            keys: std::array::from_fn(|tenant| 1 + tenant as u8),
            next_key: 1 + TENANTS as u8,
            seed,
            members: Vec::new(),
            handles: HashMap::new(),
            addrs: HashMap::new(),
            names: HashMap::new(),
            messages: Vec::new(),
            receives: HashMap::new(),
            next_receive: RECEIVE,
            trouble: HashSet::new(),
            wrong: None,
            r,
        };
        for host in 0..HOSTS {
            run.members.push(Member { incarnation: 1 + host as u64, tenant: None });
            run.start(host);
        }
        run
    }

    /// The key of this number, for who seals as `tenant` does.
    fn key(&self, number: u8, tenant: usize) -> PreSharedKey {
        let key = PreSharedKey::with_key_frames(&[number; 32], self.modes[tenant], self.bits);
        key.expect("long enough")
    }

    /// A process starts at `host`.
    fn start(&mut self, host: usize) {
        let incarnation = self.members[host].incarnation;
        let entropy = std::array::from_fn(|i| (incarnation ^ self.seed >> i) as u8);
        let keys = match home(host) {
            _ if is_service(host) => Some(Keyring::of_tenants(entropy)),
            Some(tenant) => Keyring::new(vec![self.key(self.keys[tenant], tenant)], entropy),
            None => Keyring::new(vec![self.key(STRANGE, 0)], entropy),
        };
        self.members[host].tenant = home(host);
        self.wrong = self.wrong.filter(|&wrong| wrong != host);
        let settings = self.rig.plan.node.settings(incarnation, self.seed ^ (incarnation << 20));
        self.rig.start_with(host, NodeSettings { keys, ..settings });
        self.names.retain(|(at, _), _| *at != host);
        for tenant in (0..TENANTS).filter(|_| is_service(host)) {
            self.add_key(host, tenant);
        }
        for other in (0..self.members.len()).filter(|&other| other != host) {
            self.insert(host, other);
            self.insert(other, host);
        }
        self.receive_all(host);
    }

    /// The service `host` gets the present key of `tenant`.
    fn add_key(&mut self, host: usize, tenant: usize) {
        let key = self.key(self.keys[tenant], tenant);
        let handle = self.rig.at(host).node.openings.add_tenant(key).expect("room for a key");
        self.handles.insert((host, tenant), handle);
    }

    /// `from` gets the address of `to`; a service under each key.
    fn insert(&mut self, from: usize, to: usize) {
        if is_service(from) {
            (0..TENANTS).for_each(|tenant| self.insert_for(from, to, tenant));
        } else {
            self.insert_for(from, to, home(from).unwrap_or(0));
        }
    }

    fn insert_for(&mut self, from: usize, to: usize, tenant: usize) {
        let incarnation = self.members[to].incarnation;
        let addr = match self.handles.get(&(from, tenant)).copied() {
            Some(handle) => {
                let now = self.rig.now();
                let at = EpAddr { station: Net::station(to), ep: EP, incarnation };
                let s = self.rig.at(from);
                s.node.sessions().av_insert_of(now, s.av, at, handle).expect("room in the AV")
            }
            None => self.rig.peer(from, to, incarnation),
        };
        self.addrs.insert((from, to, tenant), addr);
        self.names.insert((from, addr), (to, tenant));
    }

    fn receive_all(&mut self, host: usize) {
        (0..RECEIVES).for_each(|_| self.receive(host, None));
        for tenant in (0..TENANTS).filter(|_| is_service(host)) {
            (0..KEYED).for_each(|_| self.receive(host, Some(tenant)));
        }
    }

    fn receive(&mut self, host: usize, of: Option<usize>) {
        let context = self.next_receive;
        self.next_receive += 1;
        let buf = self.rig.at(host).arena.take(LEN_MAX).expect("nobody wrote");
        let keyed = of.map(|tenant| (self.handles[&(host, tenant)].handle(), OpFlags::AUTH_KEY));
        let (src, flags) = keyed.unwrap_or((FI_ADDR_UNSPEC, OpFlags::empty()));
        let now = self.rig.now();
        let s = self.rig.at(host);
        let io = s.arena.lend(buf, false, &mut Rng::new(context, 32));
        let kind = MsgKind::Msg;
        let req = RecvReq { kind, buf: io, src, tag: 0, ignore: 0, context, flags };
        s.node.post_recv(now, s.ep, req).expect("a place for a receive");
        self.rig.poll_by(host, now.0);
        self.receives.insert(context, Receive { host, buf, of, is_cancelled: false });
    }

    fn has(&self, host: usize, tenant: usize) -> bool {
        is_service(host) || self.members[host].tenant == Some(tenant)
    }

    /// Whoever of two has both the key of a tenant, of all pairs.
    fn legal(&self) -> Vec<(usize, usize, usize)> {
        let pairs = (0..STRANGER).flat_map(|a| (0..STRANGER).map(move |b| (a, b)));
        let all = pairs.flat_map(|(a, b)| (0..TENANTS).map(move |tenant| (a, b, tenant)));
        let legal = |&(a, b, tenant): &(usize, usize, usize)| {
            a != b && self.has(a, tenant) && self.has(b, tenant)
        };
        all.filter(legal).collect()
    }

    /// The others of which one has no key of the tenant's.
    fn illegal(&self) -> Vec<(usize, usize, usize)> {
        let legal: HashSet<_> = self.legal().into_iter().collect();
        let mut all: Vec<_> = self.addrs.keys().copied().collect();
        all.sort_unstable();
        all.retain(|way| !legal.contains(way));
        all
    }

    fn trouble(&mut self, a: usize, b: usize, tenant: usize) {
        self.trouble.insert((a.min(b), a.max(b), tenant));
    }

    fn trouble_all(&mut self, host: usize) {
        for other in (0..HOSTS).filter(|&other| other != host) {
            (0..TENANTS).for_each(|tenant| self.trouble(host, other, tenant));
        }
    }

    /// Something happens, or nothing.
    fn disturb(&mut self) -> Checked {
        match self.r.index(6) {
            0 => self.restart(),
            1 => {
                let ways = self.legal();
                let (host, other, _) = ways[self.r.index(ways.len())];
                self.forget(host, other);
            }
            2 | 3 => self.have_wrong_key(),
            4 => self.replace_key()?,
            _ => {}
        }
        Ok(())
    }

    fn restart(&mut self) {
        let host = self.r.index(STRANGER);
        self.trouble_all(host);
        self.receives.retain(|_, receive| receive.host != host);
        self.rig.kill(host);
        let pause = self.r.exp(20e6).min(100 * MS);
        self.pass(pause);
        self.members[host].incarnation += 1 << 8;
        self.start(host);
    }

    /// `host` loses the memory of its sessions with `other`.
    fn forget(&mut self, host: usize, other: usize) {
        (0..TENANTS).for_each(|tenant| self.trouble(host, other, tenant));
        let now = self.rig.now();
        self.rig.at(host).node.sessions().drop_session(now, Net::station(other));
        self.rig.poll_by(host, now.0);
    }

    fn forget_all(&mut self, host: usize, others: std::ops::Range<usize>) {
        for other in others.filter(|&other| other != host) {
            self.forget(host, other);
            self.forget(other, host);
        }
    }

    fn set_keys(&mut self, host: usize, numbers: &[u8]) {
        let tenant = home(host).expect("a host of one tenant");
        let keys = numbers.iter().map(|&number| self.key(number, tenant)).collect();
        let now = self.rig.now();
        self.rig.at(host).node.sessions().set_keys(now, keys).expect("not too many");
        self.rig.poll_by(host, now.0);
    }

    /// Somebody gets a wrong key, and all its sessions end. Until the next healing it is nobody's
    /// peer.
    fn have_wrong_key(&mut self) {
        let host = self.r.index(STRANGER - SERVICES) + SERVICES;
        if self.wrong.is_some() || self.members[host].tenant.is_none() {
            return;
        }
        self.wrong = Some(host);
        self.trouble_all(host);
        self.set_keys(host, &[WRONG]);
        self.forget_all(host, 0..HOSTS);
        self.pass(QUIET_NS);
        self.members[host].tenant = None;
    }

    /// The key of a tenant is replaced, step by step. One of its hosts may not take part.
    fn replace_key(&mut self) -> Checked {
        let tenant = self.r.index(TENANTS);
        let hosts = SERVICES + 2 * tenant..SERVICES + 2 * tenant + 2;
        if hosts.clone().any(|host| self.members[host].tenant.is_none()) {
            return Ok(());
        }
        let lags = self.r.chance(0.3).then(|| hosts.start + self.r.index(2));
        let old = self.keys[tenant];
        self.keys[tenant] = self.next_key;
        self.next_key += 1;
        let before: Vec<_> = (0..SERVICES).map(|s| self.handles[&(s, tenant)]).collect();
        for host in 0..SERVICES {
            self.add_key(host, tenant);
        }
        // The services still use the addresses under the old key.
        self.burst(0)?;
        for host in hosts.clone().filter(|&host| Some(host) != lags) {
            self.set_keys(host, &[old, self.keys[tenant]]);
            self.burst(0)?;
        }
        if let Some(lag) = lags {
            self.trouble_all(lag);
        }
        for host in hosts.clone().filter(|&host| Some(host) != lags) {
            // It opens sessions under the new one now, in which the services take it for another.
            (0..SERVICES).for_each(|service| self.trouble(service, host, tenant));
            self.set_keys(host, &[self.keys[tenant], old]);
            self.burst(0)?;
        }
        let old_addrs = self.change_addresses(tenant);
        self.burst(1)?;
        for (host, handle) in before.into_iter().enumerate() {
            self.remove_key(host, tenant, handle, &old_addrs[host])?;
        }
        for host in hosts.clone().filter(|&host| Some(host) != lags) {
            self.set_keys(host, &[self.keys[tenant]]);
        }
        if let Some(lag) = lags {
            self.forget_all(lag, hosts);
            self.pass(QUIET_NS);
            self.members[lag].tenant = None;
        }
        Ok(())
    }

    /// The services name all others under the new key of `tenant`. The addresses that they had
    /// before, by service.
    fn change_addresses(&mut self, tenant: usize) -> Vec<Vec<FiAddr>> {
        let mut all = Vec::new();
        for service in 0..SERVICES {
            let is = |((at, _), (_, of)): &(&(usize, FiAddr), &(usize, usize))| {
                *at == service && *of == tenant
            };
            let mut old: Vec<_> =
                self.names.iter().filter(is).map(|((_, addr), _)| *addr).collect();
            old.sort_unstable();
            all.push(old);
            for other in (0..HOSTS).filter(|&other| other != service) {
                self.insert_for(service, other, tenant);
            }
            (0..SERVICES).for_each(|other| self.trouble(service, other, tenant));
        }
        all
    }

    /// The service `host` removes a key: not before it has removed what is named under it.
    fn remove_key(
        &mut self,
        host: usize,
        tenant: usize,
        handle: Tenant,
        addrs: &[FiAddr],
    ) -> Checked {
        self.collect()?;
        let now = self.rig.now();
        let busy = self.rig.at(host).node.sessions().remove_tenant(now, handle);
        ensure!(busy == Err(Error::Busy), "a key in use is removed: {busy:?}");
        let is = |receive: &Receive| receive.host == host && receive.of == Some(tenant);
        let mut keyed: Vec<u64> =
            self.receives.iter().filter(|(_, it)| is(it)).map(|(&context, _)| context).collect();
        keyed.sort_unstable();
        for context in keyed {
            let s = self.rig.at(host);
            if s.node.operations().cancel(s.ep, context).is_ok() {
                self.receives.get_mut(&context).expect("it is posted").is_cancelled = true;
            }
        }
        self.collect()?;
        let s = self.rig.at(host);
        for &addr in addrs {
            s.node.objects().av_remove(s.av, addr).expect("it was inserted");
        }
        let removed = s.node.sessions().remove_tenant(now, handle);
        ensure!(removed.is_ok(), "a key that nothing names stays: {removed:?}");
        self.rig.poll_by(host, now.0);
        self.names.retain(|(at, addr), _| *at != host || !addrs.contains(addr));
        (0..KEYED).for_each(|_| self.receive(host, Some(tenant)));
        Ok(())
    }

    /// Everybody finds out what is wrong, and what comes later must not fail.
    fn heal(&mut self) -> Checked {
        if let Some(host) = self.wrong.take() {
            let tenant = home(host).expect("a host of one tenant");
            self.set_keys(host, &[self.keys[tenant]]);
            self.members[host].tenant = Some(tenant);
        }
        self.send_all()?;
        self.settle()?;
        self.pass(QUIET_NS);
        self.trouble.clear();
        Ok(())
    }

    /// A message from each to each who have the key of a tenant.
    fn send_all(&mut self) -> Checked {
        self.legal().into_iter().try_for_each(|way| self.send(way))
    }

    fn pass(&mut self, ns: u64) {
        let until = self.rig.net.now + ns;
        self.rig.run_to(until);
    }

    fn send(&mut self, (from, to, tenant): (usize, usize, usize)) -> Checked {
        let id = self.messages.len() as u64;
        let len = self.r.pick(&[8, 64, 1000, LEN_MAX]);
        let buf = self.rig.at(from).arena.take(len)?;
        self.rig.at(from).arena.write_message(buf, id);
        if !self.rig.send(from, self.addrs[&(from, to, tenant)], buf, id) {
            return self.rig.at(from).arena.give(buf);
        }
        self.messages.push(Message {
            from,
            to,
            tenant,
            key: self.keys[tenant],
            lives: [from, to].map(|host| self.members[host].incarnation),
            buf,
            is_legal: self.has(from, tenant) && self.has(to, tenant),
            is_excused: self.trouble.contains(&(from.min(to), from.max(to), tenant)),
            is_done: false,
            is_failed: false,
            is_delivered: false,
        });
        Ok(())
    }

    /// Messages between those who may talk to each other, with what comes of them; so many others
    /// are tried as well.
    fn burst(&mut self, illegal: usize) -> Checked {
        for _ in 0..self.r.range(10, 30) {
            let ways = self.legal();
            let way = ways[self.r.index(ways.len())];
            self.send(way)?;
            let pause = self.r.exp(300e3).min(5 * MS);
            self.pass(pause);
            self.collect()?;
        }
        for _ in 0..illegal {
            let ways = self.illegal();
            let way = ways[self.r.index(ways.len())];
            self.send(way)?;
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
        for host in 0..HOSTS {
            if self.rig.stations[host].is_none() {
                continue;
            }
            loop {
                if let Some(c) = self.rig.read(host) {
                    match c.op_context < RECEIVE {
                        true => self.sent(c.op_context)?,
                        false => self.received(host, &c)?,
                    }
                } else if let Some(e) = self.rig.error(host) {
                    match e.cqe.op_context < RECEIVE {
                        true => self.failed(e.cqe.op_context, e.err)?,
                        false => self.cancelled(host, e.cqe.op_context, e.err)?,
                    }
                } else {
                    break;
                }
            }
        }
        Ok(())
    }

    fn cancelled(&mut self, host: usize, context: u64, err: Error) -> Checked {
        let receive = self.receives.remove(&context).ok_or("a receive that is not posted")?;
        let is = receive.host == host && receive.is_cancelled && err == Error::Canceled;
        ensure!(is, "a receive failed: {err}");
        self.rig.at(host).arena.give(receive.buf)
    }

    fn sent(&mut self, id: u64) -> Checked {
        let m = &mut self.messages[id as usize];
        ensure!(m.is_legal, "{} has talked to {} without a key: {id}", m.from, m.to);
        ensure!(!m.is_done && !m.is_failed, "message {id} ends twice");
        m.is_done = true;
        let (from, buf) = (m.from, m.buf);
        self.rig.at(from).arena.give(buf)
    }

    fn failed(&mut self, id: u64, err: Error) -> Checked {
        let link = &self.rig.plan.link;
        let is_clean = link.loss == 0.0 && link.corrupt == 0.0;
        let m = &mut self.messages[id as usize];
        ensure!(!m.is_done && !m.is_failed, "message {id} ends twice");
        m.is_failed = true;
        let Message { from, to, tenant, buf, is_excused, is_legal, .. } = *m;
        if is_legal {
            let at = self.rig.net.now / MS;
            ensure!(
                is_excused,
                "message {id} from {from} to {to} of tenant {tenant} failed at {at} ms: {err}"
            );
        } else {
            // A refusal may be lost, and again; and whose key is removed is not told that its
            // session has ended.
            let lags = home(from).is_some() && self.members[from].tenant.is_none();
            let fits = match is_clean && !is_excused && (!lags || self.wrong == Some(from)) {
                true => err == Error::Access,
                false => [Error::Access, Error::HostUnreach, Error::ConnReset].contains(&err),
            };
            ensure!(fits, "from {from} to {to}, which is no peer of tenant {tenant}: {err}");
        }
        self.rig.at(from).arena.give(buf)
    }

    fn received(&mut self, host: usize, c: &Cqe) -> Checked {
        let receive = self.receives.remove(&c.op_context).ok_or("a receive that is not posted")?;
        let Receive { host: at, buf, of, .. } = receive;
        ensure!(at == host, "a receive of another host");
        let bytes = &self.rig.at(host).arena.bytes(buf)[..c.len as usize];
        let id = claimed_id(bytes).ok_or("a message without a name")?;
        ensure!(is_content(bytes, id), "message {id} is damaged");
        let m = self.messages.get_mut(id as usize).ok_or("a message of nobody")?;
        ensure!(m.is_legal, "message {id} of {} has arrived at {host} without a key", m.from);
        let to = [host as u64, self.members[host].incarnation];
        ensure!([m.to as u64, m.lives[1]] == to, "message {id} is for another");
        ensure!(
            m.buf.len as u64 == c.len && !m.is_delivered,
            "message {id} comes twice, or with {} bytes",
            c.len
        );
        m.is_delivered = true;
        ensure!(
            of.is_none_or(|tenant| tenant == m.tenant),
            "message {id} of tenant {} is in a receive for {of:?}",
            m.tenant
        );
        let named = self.names.get(&(host, c.src));
        ensure!(
            c.src == FI_ADDR_UNSPEC || named.is_none_or(|named| *named == (m.from, m.tenant)),
            "message {id} of {}, tenant {}, is said to be of {named:?}",
            m.from,
            m.tenant
        );
        let way = |m: &Message| (m.from, m.to, m.tenant, m.key, m.lives);
        let this = way(m);
        let is_later = |m: &Message| m.is_delivered && way(m) == this;
        let later = self.messages[id as usize + 1..].iter().any(is_later);
        ensure!(!later, "message {id} is overtaken");
        self.rig.at(host).arena.give(buf)?;
        self.receive(host, of);
        Ok(())
    }

    /// What was sent has arrived, and nobody has met the stranger.
    fn check_end(&mut self) -> Checked {
        self.pass(100 * MS);
        self.collect()?;
        let is_lost = |m: &Message| {
            let lives = self.members[m.to].incarnation == m.lives[1];
            m.is_done && lives && !m.is_excused && !m.is_delivered
        };
        let lost = self.messages.iter().position(is_lost);
        ensure!(lost.is_none(), "message {lost:?} was sent and is lost");
        let opened = self.rig.at(STRANGER).node.counters().sessions_opened;
        ensure!(opened == 0, "the stranger has opened {opened} sessions");
        Ok(())
    }
}
