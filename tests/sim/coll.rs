//! Groups of bare nodes that call collectives, and what each member must have afterwards.
//!
//! Every buffer lies between canaries, and its expected content is computed member by member from
//! the definition, with one reduction after the other in plain order.

use barewire_dataplane::flags::{Caps, CqFlags, OpFlags};
use barewire_dataplane::node::{
    CollCall, CollKind, CollReq, CollWord, GroupId, JoinModel, JoinReq,
};
use barewire_dataplane::types::{CqErr, FiAddr};
use barewire_driver::mem::atomic::{AtomicOp, Datatype, Sharing};
use barewire_driver::mem::{IoBuf, Scratch, Span};

use crate::ledger::{Checked, Violation, ensure};
use crate::plan::Plan;
use crate::rig::Rig;
use crate::rng::Rng;

/// Bytes of canary on either side of every buffer.
const GUARD: usize = 64;
const CANARY: u8 = 0x5a;

/// Nodes and the addresses by which each knows the others.
pub(crate) struct Team {
    pub(crate) rig: Rig,
    /// `addrs[of][to]`.
    pub(crate) addrs: Vec<Vec<FiAddr>>,
    pub(crate) rng: Rng,
}

/// A group: the host of every rank, and its handle there.
#[derive(Clone)]
pub(crate) struct Gang {
    pub(crate) hosts: Vec<usize>,
    pub(crate) ids: Vec<GroupId>,
}

impl Gang {
    /// Whether the call is of this group.
    pub(crate) fn has(&self, p: &Pending) -> bool {
        self.hosts.get(p.rank) == Some(&p.host) && self.ids[p.rank] == p.group
    }
}

/// One collective, as all members call it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Call {
    pub(crate) kind: CollKind,
    pub(crate) root: usize,
    pub(crate) count: usize,
    pub(crate) ty: Option<Datatype>,
    pub(crate) op: Option<AtomicOp>,
    pub(crate) in_place: bool,
    pub(crate) seed: u64,
}

impl Call {
    pub(crate) fn of(kind: CollKind, root: usize, count: usize, seed: u64) -> Self {
        let ty = (kind != CollKind::Barrier).then_some(Datatype::Uint64);
        let op = kind.reduces().then_some(AtomicOp::Sum);
        Self { kind, root, count, ty, op, in_place: false, seed }
    }

    fn size(&self) -> usize {
        self.ty.map_or(0, Datatype::size)
    }
}

/// A call under way at one member.
pub(crate) struct Pending {
    pub(crate) host: usize,
    rank: usize,
    pub(crate) context: u64,
    group: GroupId,
    call: Call,
    input: Guarded,
    out: Guarded,
    pub(crate) outcome: Option<Result<(), CqErr>>,
}

struct Guarded {
    memory: Scratch,
    len: usize,
}

impl Guarded {
    fn new(bytes: &[u8]) -> Self {
        let memory = Scratch::new(bytes.len() + 2 * GUARD).expect("room for a test buffer");
        let io = memory.io();
        io.write_at(0, &vec![CANARY; memory.len()]);
        io.write_at(GUARD, bytes);
        Self { memory, len: bytes.len() }
    }

    fn io(&self) -> IoBuf {
        self.memory.io().share(GUARD, self.len)
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len];
        self.memory.io().read_at(GUARD, &mut bytes);
        bytes
    }

    fn is_whole(&self) -> bool {
        let mut ends = [0; 2 * GUARD];
        let (first, last) = ends.split_at_mut(GUARD);
        self.memory.io().read_at(0, first);
        self.memory.io().read_at(GUARD + self.len, last);
        ends.iter().all(|&b| b == CANARY)
    }
}

/// A quiet plan for `hosts` stations.
pub(crate) fn plan(seed: u64, hosts: usize, lossless: bool) -> Plan {
    let mut p = Plan::calm(seed, 0);
    p.hosts = hosts;
    p.link.mtu = vec![1500; hosts];
    p.link.lossless = lossless;
    p.node.crc = (!lossless).then_some(true);
    p.node.peer_max = 2 * hosts + 4;
    p.node.tx_wr_max = 256;
    p.node.rx_wr_max = 256;
    p
}

impl Team {
    /// Nodes at all stations of the plan, all of which know each other.
    pub(crate) fn new(plan: Plan) -> Self {
        let hosts = plan.hosts;
        let rng = Rng::new(plan.seed, 11);
        let mut rig = Rig::with(plan, hosts, Caps::COLLECTIVE);
        let addrs = (0..hosts)
            .map(|of| (0..hosts).map(|to| rig.peer(of, to, 1 + to as u64)).collect())
            .collect();
        Self { rig, addrs, rng }
    }

    /// Begins a join at one member.
    pub(crate) fn join_at(
        &mut self,
        host: usize,
        ranks: &[usize],
        model: JoinModel,
        parent: Option<GroupId>,
    ) -> Result<GroupId, Violation> {
        let members = ranks.iter().map(|&h| self.addrs[host][h]).collect();
        let req = JoinReq { members, parent, model, context: 77 };
        let now = self.rig.now();
        let s = self.rig.at(host);
        let id =
            s.node.collectives().coll_join(now, s.ep, &req).map_err(|e| format!("join: {e}"))?;
        self.rig.poll_by(host, now.0);
        Ok(id)
    }

    /// All of `ranks` join, and the join ends well.
    pub(crate) fn join(&mut self, ranks: &[usize], model: JoinModel) -> Result<Gang, Violation> {
        let mut ids = Vec::new();
        for &host in ranks {
            ids.push(self.join_at(host, ranks, model, None)?);
        }
        for (&host, &id) in ranks.iter().zip(&ids) {
            self.await_join(host, id)??;
        }
        Ok(Gang { hosts: ranks.to_vec(), ids })
    }

    /// Runs until the join at `host` has ended.
    pub(crate) fn await_join(&mut self, host: usize, id: GroupId) -> Result<Checked, Violation> {
        loop {
            if let Some(event) = self.rig.at(host).node.coll.event() {
                ensure!(event.group == id && event.context == 77, "another join ended: {event:?}");
                return Ok(event.result.map_err(|e| format!("join ended: {e}")));
            }
            ensure!(self.rig.step(u64::MAX).0, "a join waits for ever at {host}");
        }
    }

    /// Runs until a join at `host` has ended well.
    pub(crate) fn await_any_join(&mut self, host: usize) -> Result<(), Violation> {
        loop {
            if let Some(event) = self.rig.at(host).node.coll.event() {
                return event.result.map_err(|e| format!("join ended: {e}"));
            }
            ensure!(self.rig.step(u64::MAX).0, "a join waits for ever at {host}");
        }
    }

    /// The member of rank `rank` calls.
    pub(crate) fn post(&mut self, gang: &Gang, rank: usize, call: &Call) -> Result<Pending, i32> {
        let (host, n) = (gang.hosts[rank], gang.hosts.len());
        let (input, out) = (source(call, rank, n), vec![0x11; result_len(call, rank, n)]);
        let sends_its_result = call.kind == CollKind::Broadcast && rank == call.root;
        let (input, out) = if call.in_place || sends_its_result {
            (Guarded::new(&[]), Guarded::new(&input))
        } else {
            (Guarded::new(&input), Guarded::new(&out))
        };
        let context = self.rng.next() >> 1;
        let span = |guarded: &Guarded| guarded.io().take_one().expect("one piece");
        let Call { kind, ty, op, .. } = *call;
        let (group, count) = (gang.ids[rank], call.count as u64);
        let root = self.addrs[host][gang.hosts[call.root]];
        let req = CollReq {
            call: CollCall { what: CollWord::new(kind, op, ty), group, count, root },
            role: None,
            context,
            flags: OpFlags::empty(),
        };
        let source = match call.kind {
            CollKind::Broadcast => Span::EMPTY,
            _ => span(if call.in_place { &out } else { &input }),
        };
        let lend = |_, _| (source, span(&out));
        let now = self.rig.now();
        let s = self.rig.at(host);
        s.node.coll_post(s.ep, &req, lend).map_err(|e| e.fi_errno())?;
        self.rig.poll_by(host, now.0);
        let group = gang.ids[rank];
        Ok(Pending { host, rank, context, group, call: *call, input, out, outcome: None })
    }

    /// Takes what `host` has in its queue.
    pub(crate) fn reap(&mut self, host: usize, all: &mut [Pending]) -> Checked {
        loop {
            let (context, outcome) = if let Some(c) = self.rig.read(host) {
                ensure!(c.flags == CqFlags::COLLECTIVE, "flags of a collective: {:?}", c.flags);
                (c.op_context, Ok(()))
            } else if let Some(e) = self.rig.error(host) {
                (e.cqe.op_context, Err(e))
            } else {
                return Ok(());
            };
            let found = all.iter_mut().find(|p| p.host == host && p.context == context);
            let Some(p) = found else { return Err(format!("nobody called {context:#x}")) };
            ensure!(p.outcome.is_none(), "two outcomes of one call");
            p.outcome = Some(outcome);
        }
    }

    /// Runs until every call of `all` has an outcome, or until `until`.
    pub(crate) fn run(&mut self, all: &mut [Pending], until: u64) -> Checked {
        for host in 0..self.rig.stations.len() {
            if self.rig.stations[host].is_some() {
                self.reap(host, all)?;
            }
        }
        while all.iter().any(|p| p.outcome.is_none() && self.rig.stations[p.host].is_some()) {
            let (went, polled) = self.rig.step(until);
            ensure!(went, "nothing happens any more, or not in time: {}", open(all));
            if let Some(host) = polled
                && self.rig.stations[host].is_some()
            {
                self.reap(host, all)?;
            }
        }
        Ok(())
    }

    /// All members call at times of their own, and all must end well with the right result.
    pub(crate) fn call(&mut self, gang: &Gang, call: &Call) -> Checked {
        let mut all = Vec::new();
        let mut order: Vec<usize> = (0..gang.hosts.len()).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, self.rng.index(i + 1));
        }
        for rank in order {
            let later = self.rig.net.now + self.rng.exp(3_000.0);
            while self.rig.step(later).0 {}
            let posted = self.post(gang, rank, call);
            all.push(posted.map_err(|e| format!("{call:?} refused with {e}"))?);
        }
        let until = self.rig.net.now + 60_000_000_000;
        self.run(&mut all, until).map_err(|e| format!("{call:?}: {e}"))?;
        all.iter().try_for_each(|p| check(p, gang.hosts.len()))
    }
}

fn open(all: &[Pending]) -> String {
    let open = all.iter().filter(|p| p.outcome.is_none());
    open.map(|p| format!("{:?} at rank {}; ", p.call, p.rank)).collect()
}

/// A call must have ended well, with the right bytes and nothing else touched.
pub(crate) fn check(p: &Pending, n: usize) -> Checked {
    let at = format!("{:?} at rank {} of {n}", p.call, p.rank);
    match &p.outcome {
        Some(Ok(())) => {}
        other => return Err(format!("{at}: {other:?}")),
    }
    ensure!(p.out.bytes() == expected(&p.call, p.rank, n), "{at}: wrong result");
    intact(p)
}

/// Nothing beside the buffers, and nothing in the source, was written.
pub(crate) fn intact(p: &Pending) -> Checked {
    ensure!(p.input.is_whole() && p.out.is_whole(), "{:?} at {}: overrun", p.call, p.rank);
    Ok(())
}

/// The bytes that `rank` contributes.
fn source(call: &Call, rank: usize, n: usize) -> Vec<u8> {
    let blocks = match call.kind {
        CollKind::Broadcast => 1,
        kind => kind.blocks_in(n as u32, rank as u32, call.root as u32) as usize,
    };
    let mut rng = Rng::new(call.seed, rank as u64);
    let elements = blocks * call.count;
    match call.ty {
        None => vec![],
        Some(ty) if call.op.is_some() => (0..elements).flat_map(|_| value(ty, &mut rng)).collect(),
        Some(ty) => (0..elements * ty.size()).map(|_| rng.next() as u8).collect(),
    }
}

/// A small whole number, so that floats add up exactly in any order.
fn value(ty: Datatype, rng: &mut Rng) -> Vec<u8> {
    let v = rng.below(4) as u8;
    let f80 = |v: u8| {
        let mut b = vec![0; 16];
        if v > 0 {
            let top = v.ilog2();
            b[..8].copy_from_slice(&(u64::from(v) << (63 - top)).to_le_bytes());
            b[8..10].copy_from_slice(&(16383 + top as u16).to_le_bytes());
        }
        b
    };
    let real = |size: usize| match size {
        4 => f32::from(v).to_le_bytes().to_vec(),
        8 => f64::from(v).to_le_bytes().to_vec(),
        _ => f80(v),
    };
    let mut bytes = match ty {
        Datatype::Float | Datatype::Double | Datatype::LongDouble => real(ty.size()),
        _ if ty.is_complex() => real(ty.size() / 2),
        _ => v.to_le_bytes().to_vec(),
    };
    bytes.resize(ty.size(), 0);
    bytes
}

fn result_len(call: &Call, rank: usize, n: usize) -> usize {
    let blocks = call.kind.blocks_out(n as u32, rank as u32, call.root as u32) as usize;
    blocks * call.count * call.size()
}

/// What the definition gives `rank`. A result that is nobody's business stays as it was.
fn expected(call: &Call, rank: usize, n: usize) -> Vec<u8> {
    let block = call.count * call.size();
    let part = |of: usize, i: usize| source(call, of, n)[i * block..(i + 1) * block].to_vec();
    let sum = |i: usize| {
        let total = Scratch::new(block).expect("room");
        total.io().write_at(0, &part(0, i));
        for of in 1..n {
            let (op, ty) = (call.op.expect("a reduction"), call.ty.expect("of a type"));
            let operand = part(of, i);
            let done =
                total.io().atomic(0, op, ty, call.count, &operand, &[], &mut [], Sharing::Single);
            done.expect("a pair with a meaning");
        }
        let mut bytes = vec![0; block];
        total.io().read_at(0, &mut bytes);
        bytes
    };
    match call.kind {
        CollKind::Barrier => vec![],
        CollKind::Broadcast => source(call, call.root, n),
        CollKind::Alltoall => (0..n).flat_map(|of| part(of, rank)).collect(),
        CollKind::Allreduce => sum(0),
        CollKind::Allgather => (0..n).flat_map(|of| part(of, 0)).collect(),
        CollKind::ReduceScatter => sum(rank),
        CollKind::Reduce if rank == call.root => sum(0),
        CollKind::Scatter => part(call.root, rank),
        CollKind::Gather if rank == call.root => (0..n).flat_map(|of| part(of, 0)).collect(),
        // In place, a member that gets no result has its source where the result would be.
        CollKind::Reduce if call.in_place => source(call, rank, n),
        CollKind::Reduce | CollKind::Gather => vec![],
    }
}
