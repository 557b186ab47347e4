//! The applications: what they call, when, and how they look at the answers.

use barewire_dataplane::error::{Error, Result};
use barewire_dataplane::flags::{BindFlags, Caps, CqFlags, OpFlags};
use barewire_dataplane::node::{
    AvId, CntrEvents, CntrId, CqId, CqReader, EpAttr, EpId, MsgKind, Node, RecvReq, SendReq,
};
use barewire_dataplane::types::{Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, Instant};
use barewire_driver::mem::IoBuf;

use crate::arena::{Arena, NAME_LEN};
use crate::entries;
use crate::ledger::{Addr, Checked, EpKey, Ledger, Msg, Recv, RecvMode, Sent, Violation, ensure};
use crate::net::{Egress, Net};
use crate::onesided::{ONE_SIDED, Regions};
use crate::plan::{CallerPlan, Plan};
use crate::rng::Rng;

/// Who lives where, as a name service would know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Resident {
    pub(crate) life: u32,
    pub(crate) incarnation: u64,
    pub(crate) alive: bool,
}

/// What an application sees of the world during one look.
pub(crate) struct View<'a> {
    pub(crate) now: Instant,
    pub(crate) host: usize,
    pub(crate) residents: &'a [Resident],
    pub(crate) plan: &'a Plan,
    pub(crate) ledger: &'a mut Ledger,
    /// Where a message goes that leaves in the call that posts it.
    pub(crate) net: &'a mut Net,
    /// Print what happens.
    pub(crate) trace: bool,
}

/// An address the application inserted.
#[derive(Clone, Copy)]
pub(crate) struct Peer {
    pub(crate) fi: FiAddr,
    pub(crate) addr: Addr,
}

/// An endpoint.
pub(crate) struct Ep {
    pub(crate) id: EpId,
    pub(crate) key: EpKey,
    number: u16,
    cq: CqId,
    cntr: Option<CntrId>,
    remote_cntr: Option<CntrId>,
    pub(crate) selective: bool,
    directed: bool,
    open: bool,
    /// Contexts of peeks that asked to reserve, and receives that may be cancelled.
    peeked: Vec<u64>,
    posted: Vec<u64>,
    /// Receives of the drain, and whether tagged.
    drain: Vec<(u64, bool)>,
}

/// One life of an application.
pub(crate) struct App {
    pub(crate) arena: Arena,
    pub(crate) life: u32,
    pub(crate) rng: Rng,
    av: AvId,
    pub(crate) eps: Vec<Ep>,
    pub(crate) regions: Regions,
    cqs: Vec<CqId>,
    pub(crate) peers: Vec<Peer>,
    /// Addresses that were taken out of the vector.
    removed: Vec<(EpAddr, Addr)>,
    /// Lives that addresses were inserted for, per host.
    known: Vec<u32>,
    /// Place in `peers` of the one that short messages go to.
    usual: usize,
    /// The receives of the active phase have been taken back.
    draining: bool,
    cqes: Vec<Cqe>,
}

/// Number of the first endpoint of a host.
const FIRST_EP: u16 = 3;

impl App {
    /// Opens the objects of a fresh process.
    pub(crate) fn new(v: &mut View<'_>, node: &mut Node, life: u32) -> Result<Self> {
        let mut rng = Rng::new(v.plan.seed, 1000 + u64::from(life));
        let av = node.sessions().av_open(64)?;
        let shared = rng.chance(0.5);
        let mut cqs = vec![node.cqs.open(v.plan.node.cq_size)?];
        let mut app = Self {
            arena: Arena::default(),
            life,
            av,
            eps: Vec::new(),
            regions: Regions::default(),
            cqs: Vec::new(),
            peers: Vec::new(),
            removed: Vec::new(),
            known: vec![0; v.residents.len()],
            usual: 0,
            draining: false,
            cqes: vec![Cqe::default(); 16],
            rng,
        };
        for i in 0..v.plan.eps {
            if !shared && i > 0 {
                cqs.push(node.cqs.open(v.plan.node.cq_size)?);
            }
            let cq = cqs[cqs.len() - 1];
            app.open_ep(v, node, FIRST_EP + i as u16, cq)?;
        }
        app.cqs = cqs;
        if v.plan.caller.remote > 0.0 {
            app.open_regions(v, node)?;
        }
        for host in 0..v.residents.len() {
            app.resolve(v, node, host)?;
        }
        Ok(app)
    }

    fn open_ep(&mut self, v: &mut View<'_>, node: &mut Node, number: u16, cq: CqId) -> Result<()> {
        let rng = &mut self.rng;
        let directed = rng.chance(0.5);
        let selective = rng.chance(v.plan.caller.selective);
        let source = rng.chance(0.7);
        let mut caps = Caps::MSG | Caps::TAGGED | Caps::SEND | Caps::RECV;
        caps |= Caps::MULTI_RECV | Caps::FENCE;
        if v.plan.caller.remote > 0.0 {
            caps |= ONE_SIDED;
        }
        caps.set(Caps::DIRECTED_RECV, directed);
        caps.set(Caps::SOURCE, source);
        let attr = EpAttr { number: Some(number), caps, ..EpAttr::default() };
        let id = node.eps.open(attr)?;
        node.objects().ep_bind_av(id, self.av)?;
        let mut tx = BindFlags::TRANSMIT;
        tx.set(BindFlags::SELECTIVE_COMPLETION, selective);
        if selective {
            node.objects().ep_bind_cq(id, cq, tx)?;
            node.objects().ep_bind_cq(id, cq, BindFlags::RECV)?;
        } else {
            node.objects().ep_bind_cq(id, cq, BindFlags::TRANSMIT | BindFlags::RECV)?;
        }
        // What is counted is not the shortest path.
        let counted = if v.plan.caller.short > 0.0 { 0.1 } else { 0.5 };
        let cntr =
            if rng.chance(counted) { Some(node.cntrs.open(CntrEvents::Comp)?) } else { None };
        if let Some(c) = cntr {
            node.operations().ep_bind_cntr(id, c, BindFlags::TRANSMIT)?;
        }
        let remote_cntr = match cntr.filter(|_| v.plan.caller.remote > 0.0) {
            Some(_) => Some(node.cntrs.open(CntrEvents::Comp)?),
            None => None,
        };
        if let Some(c) = remote_cntr {
            node.operations().ep_bind_cntr(id, c, BindFlags::READ | BindFlags::WRITE)?;
        }
        node.ep_enable(id)?;
        if v.plan.caller.rare > 0.0 {
            node.eps.set_min_multi_recv(id, 64)?;
        }
        let key = v.ledger.ep_new(self.life, number, source);
        let (peeked, posted, drain) = (Vec::new(), Vec::new(), Vec::new());
        let ep = Ep {
            id,
            key,
            number,
            cq,
            cntr,
            remote_cntr,
            selective,
            directed,
            open: true,
            peeked,
            posted,
            drain,
        };
        self.eps.push(ep);
        Ok(())
    }

    /// Inserts the addresses of the endpoints that `host` has now.
    fn resolve(&mut self, v: &mut View<'_>, node: &mut Node, host: usize) -> Result<()> {
        let there = v.residents[host];
        self.known[host] = there.life;
        if self.rng.chance(0.8) {
            self.peers.retain(|p| p.addr.host != host || p.addr.life.is_none());
        }
        let stranger = v.plan.node.is_stranger(v.host, host);
        for i in 0..v.plan.eps {
            let number = FIRST_EP + i as u16;
            let any = self.rng.chance(v.plan.caller.any_life);
            if stranger {
                v.ledger.unnamed(self.life, Addr { host, number, life: None });
                continue;
            }
            let any = any || v.plan.node.is_nameless(v.host, host);
            let life = (!any && there.alive).then_some(there.life);
            let incarnation = if life.is_some() { there.incarnation } else { 0 };
            let addr = EpAddr { station: Net::station(host), ep: number, incarnation };
            self.insert(v, node, addr, Addr { host, number, life })?;
        }
        Ok(())
    }

    fn insert(&mut self, v: &mut View<'_>, node: &mut Node, to: EpAddr, addr: Addr) -> Result<()> {
        if v.plan.link.is_lossless(v.host, addr.host)
            && let Some(life) = addr.life
        {
            v.ledger.supersede(v.host, addr.host, life);
        }
        let fi = node.sessions().av_insert(v.now, self.av, to)?;
        v.ledger.inserted(self.life, addr);
        if v.trace {
            eprintln!("{} inserts {addr:?} as {fi}", v.host);
        }
        self.peers.push(Peer { fi, addr });
        Ok(())
    }

    /// Takes an address or two out of the vector, and puts back what was taken out before, in any
    /// order: an index that named one peer may then name another, or nobody for a while.
    fn rename(&mut self, v: &mut View<'_>, node: &mut Node) -> Checked {
        // An entry that was not read could name who has no name any more.
        self.read_all(v, node)?;
        for _ in 0..self.rng.range(1, 2).min(self.peers.len() as u64 - 1) {
            let peer = self.peers.swap_remove(self.rng.index(self.peers.len()));
            let to = node
                .objects()
                .av_lookup(self.av, peer.fi)
                .map_err(|e| format!("av_lookup: {e}"))?;
            node.objects().av_remove(self.av, peer.fi).map_err(|e| format!("av_remove: {e}"))?;
            if v.trace {
                eprintln!("{} removes {:?}, {}", v.host, peer.addr, peer.fi);
            }
            v.ledger.removed(self.life, peer.addr);
            self.removed.push((to, peer.addr));
        }
        let keep = usize::from(self.rng.chance(0.5));
        while self.removed.len() > keep {
            self.put_back(v, node)?;
        }
        Ok(())
    }

    /// Inserts an address that was removed, unless it is that of an earlier life.
    fn put_back(&mut self, v: &mut View<'_>, node: &mut Node) -> Checked {
        let (to, addr) = self.removed.swap_remove(self.rng.index(self.removed.len()));
        let there = v.residents[addr.host];
        if addr.life.is_some_and(|life| life != there.life) {
            return Ok(());
        }
        self.insert(v, node, to, addr).map_err(|e| format!("av_insert: {e}"))
    }

    /// One look at the world: reads queues and makes calls. Returns how many calls it tried.
    pub(crate) fn look(
        &mut self,
        v: &mut View<'_>,
        node: &mut Node,
    ) -> std::result::Result<u64, Violation> {
        if self.rng.chance(v.plan.caller.reads) {
            self.read_all(v, node)?;
        }
        for host in 0..v.residents.len() {
            let r = v.residents[host];
            if r.alive && r.life != self.known[host] && self.rng.chance(0.3) {
                self.resolve(v, node, host).map_err(|e| format!("av_insert: {e}"))?;
            }
        }
        if self.rng.chance(v.plan.caller.renames) {
            self.rename(v, node)?;
        }
        if v.host < v.plan.caller.closers && self.rng.chance(v.plan.caller.closes) {
            let e = self.any_open();
            self.reopen(v, node, e)?;
        }
        let calls = self.rng.range(1, v.plan.caller.batch);
        for left in (0..calls).rev() {
            self.call(v, node, left > 0)?;
        }
        Ok(calls)
    }

    fn any_open(&mut self) -> usize {
        let open: Vec<usize> = (0..self.eps.len()).filter(|&i| self.eps[i].open).collect();
        open[self.rng.index(open.len())]
    }

    fn call(&mut self, v: &mut View<'_>, node: &mut Node, more: bool) -> Checked {
        let e = self.any_open();
        let remote = v.plan.caller.remote;
        if remote > 0.0 && self.rng.chance(remote) {
            return self.call_remote(v, node, e, more);
        }
        if self.rng.chance(v.plan.caller.rare) {
            return match self.rng.below(20) {
                0 => self.reopen(v, node, e),
                1..=6 => self.cancel_one(v, node, e),
                7..=12 => self.peek(v, node, e),
                _ => self.post_multi(v, node, e),
            };
        }
        if self.rng.chance(v.plan.caller.sends) {
            let more = more && self.rng.chance(0.7);
            self.post_send(v, node, e, more)
        } else {
            self.post_recv(v, node, e)
        }
    }

    fn len(&mut self, plan: &Plan, host: usize) -> usize {
        let r = &mut self.rng;
        let mtu = plan.link.mtu[host];
        let near = |r: &mut Rng, n: usize, by: u64| {
            (n + r.below(2 * by + 1) as usize).saturating_sub(by as usize)
        };
        let len = match r.below(100) {
            0..=7 => 0,
            8..=39 => r.range(1, 64) as usize,
            40..=49 => near(r, Node::INJECT_SIZE, 1),
            50..=64 => near(r, mtu.saturating_sub(40), 40),
            65..=72 => near(r, plan.node.eager_max, 1),
            73..=82 => r.range(1, 4 * mtu as u64) as usize,
            83..=88 => near(r, 2 * plan.node.eager_max, 100),
            _ => r.below(plan.caller.len_max as u64 + 1) as usize,
        };
        len.min(plan.caller.len_max)
    }

    fn post_send(&mut self, v: &mut View<'_>, node: &mut Node, e: usize, more: bool) -> Checked {
        if self.rng.chance(v.plan.caller.short) {
            return self.send_in_place(v, node, e);
        }
        let peer = self.peers[self.rng.index(self.peers.len())];
        if peer.addr.host == v.host && self.rng.chance(0.7) {
            return Ok(());
        }
        let len = self.len(v.plan, v.host);
        let c = &v.plan.caller;
        let tagged = self.rng.chance(c.tagged);
        let tag = if tagged { self.rng.below(c.tags) } else { 0 };
        let mut flags = self.send_flags(len);
        flags.set(OpFlags::MORE, more);
        flags.set(OpFlags::MATCH_COMPLETE, self.rng.chance(c.matched));
        flags.set(OpFlags::INJECT_COMPLETE, c.early > 0.0 && self.rng.chance(c.early));
        // Short messages are told apart by their data.
        flags.set(
            OpFlags::REMOTE_CQ_DATA,
            flags.contains(OpFlags::REMOTE_CQ_DATA) || len < NAME_LEN,
        );
        self.send_to(v, node, e, peer, len, tagged.then_some(tag), flags).map(|_| ())
    }

    /// Sends what most programs send most often: few bytes, without flags, to the peer that it sent
    /// to before.
    fn send_in_place(&mut self, v: &mut View<'_>, node: &mut Node, e: usize) -> Checked {
        let n = self.peers.len();
        if self.usual >= n || self.rng.chance(0.1) {
            self.usual = self.rng.index(n);
        }
        let peer = self.peers[self.usual];
        let tag = self.rng.chance(0.9).then(|| self.rng.below(v.plan.caller.tags));
        let len = self.rng.range(NAME_LEN as u64, 80) as usize;
        let flags = self.rng.pick(&[OpFlags::empty(), OpFlags::COMPLETION, OpFlags::INJECT]);
        let flags = if len <= Node::INJECT_SIZE { flags } else { OpFlags::empty() };
        self.send_to(v, node, e, peer, len, tag, flags).map(|_| ())
    }

    fn send_flags(&mut self, len: usize) -> OpFlags {
        let r = &mut self.rng;
        let mut f = OpFlags::empty();
        f.set(OpFlags::INJECT, len <= Node::INJECT_SIZE && r.chance(0.4));
        f.set(OpFlags::REMOTE_CQ_DATA, r.chance(0.2));
        f.set(OpFlags::COMPLETION, r.chance(0.5));
        f.set(OpFlags::DELIVERY_COMPLETE, r.chance(0.15));
        f.set(OpFlags::FENCE, r.chance(0.03));
        f
    }

    /// Posts one message, and says whether it was accepted.
    #[expect(clippy::too_many_arguments, reason = "the arguments of a send")]
    fn send_to(
        &mut self,
        v: &mut View<'_>,
        node: &mut Node,
        e: usize,
        peer: Peer,
        len: usize,
        tag: Option<u64>,
        flags: OpFlags,
    ) -> std::result::Result<bool, Violation> {
        let ep = &self.eps[e];
        let id = v.ledger.next_msg();
        let buf = self.arena.take(len)?;
        self.arena.write_message(buf, id);
        let kind = if tag.is_some() { MsgKind::Tagged } else { MsgKind::Msg };
        let inject = flags.contains(OpFlags::INJECT);
        let no_completion = inject && !flags.contains(OpFlags::COMPLETION) && self.rng.chance(0.5);
        let told = !no_completion && (!ep.selective || flags.contains(OpFlags::COMPLETION));
        let msg = Msg {
            src: ep.key,
            src_host: v.host,
            src_number: ep.number,
            dst: peer.addr,
            kind,
            tag: tag.unwrap_or(0),
            len,
            imm: flags.contains(OpFlags::REMOTE_CQ_DATA),
            fence: flags.contains(OpFlags::FENCE),
            matched: flags.contains(OpFlags::MATCH_COMPLETE),
            early: flags.contains(OpFlags::INJECT | OpFlags::INJECT_COMPLETE)
                && !flags.intersects(OpFlags::DELIVERY_COMPLETE | OpFlags::MATCH_COMPLETE),
            seq: 0,
            sent: if told { Sent::Pending } else { Sent::Silent },
            taken: None,
        };
        let context = v.ledger.send(ep.key, msg, Some(buf));
        let pieces = self.rng.chance(0.2);
        let io = self.arena.lend(buf, pieces, &mut self.rng);
        let req = SendReq {
            kind,
            buf: io,
            dest: peer.fi,
            tag: tag.unwrap_or(0),
            data: id,
            context,
            flags,
            no_completion,
        };
        let out = Egress { net: v.net, from: v.host, full: false, no_route: false };
        let by = (&mut self.rng, &mut v.ledger.tally.entries);
        let answer = entries::send(node, ep.id, req, (v.now, out), by);
        if inject {
            // The buffer is the application's again: what is sent must be a copy.
            self.arena.fill(buf, 0, 0xee);
        }
        match answer {
            Ok(()) => Ok(true),
            Err(err)
                if err == Error::Again || err == Error::ConnReset && v.ledger.troubled(v.host) =>
            {
                let buf = v.ledger.refused(context).ok_or("no buffer")?;
                self.arena.give(buf)?;
                Ok(false)
            }
            Err(err) => Err(format!("send of {len} bytes with {flags:?} refused: {err}")),
        }
    }

    fn post_recv(&mut self, v: &mut View<'_>, node: &mut Node, e: usize) -> Checked {
        let c: &CallerPlan = &v.plan.caller;
        let tagged = self.rng.chance(c.tagged);
        let len = match self.rng.below(10) {
            0 => self.rng.range(NAME_LEN as u64, 64) as usize,
            1..=2 => self.len(v.plan, v.host).max(NAME_LEN),
            _ => c.len_max,
        };
        let short = self.rng.chance(c.short);
        let tagged = tagged || short && self.rng.chance(0.9);
        let (tag, ignore) = self.tag(c, tagged);
        let ignore = if short { 0 } else { ignore };
        let directed = !short && self.rng.chance(c.directed);
        let src = directed.then(|| self.peers[self.rng.index(self.peers.len())]);
        let recv = (tag, ignore, RecvMode::Plain);
        let context = self.recv_with(v, node, e, tagged, recv, src, len)?;
        if let Some(c) = context {
            let posted = &mut self.eps[e].posted;
            posted.push(c);
            if posted.len() > 64 {
                posted.remove(0);
            }
        }
        Ok(())
    }

    fn tag(&mut self, c: &CallerPlan, tagged: bool) -> (u64, u64) {
        if !tagged {
            return (0, 0);
        }
        let tag = self.rng.below(c.tags);
        let ignore = match self.rng.below(10) {
            0..=5 => 0,
            6..=7 => u64::MAX,
            _ => 1,
        };
        (tag, ignore)
    }

    /// Posts one receive and gives its context if it was accepted.
    #[expect(clippy::too_many_arguments, reason = "the arguments of a receive")]
    fn recv_with(
        &mut self,
        v: &mut View<'_>,
        node: &mut Node,
        e: usize,
        tagged: bool,
        (tag, ignore, mode): (u64, u64, RecvMode),
        src: Option<Peer>,
        len: usize,
    ) -> std::result::Result<Option<u64>, Violation> {
        let ep = &self.eps[e];
        let kind = if tagged { MsgKind::Tagged } else { MsgKind::Msg };
        let src = src.filter(|_| ep.directed);
        let peek = !matches!(mode, RecvMode::Plain | RecvMode::Multi);
        let buf = if peek { None } else { Some(self.arena.take(len)?) };
        let recv = Recv { kind, tag, ignore, src: src.map(|p| p.addr), mode };
        let context = v.ledger.recv(ep.key, recv, buf);
        let pieces = mode == RecvMode::Plain && self.rng.chance(0.2);
        let io = buf.map_or(IoBuf::EMPTY, |b| self.arena.lend(b, pieces, &mut self.rng));
        let flags = mode_flags(mode);
        let src = src.map_or(FI_ADDR_UNSPEC, |p| p.fi);
        let req = RecvReq { kind, buf: io, src, tag, ignore, context, flags };
        let by = (&mut self.rng, &mut v.ledger.tally.entries);
        match entries::recv(node, ep.id, req, v.now, by) {
            Ok(()) => Ok(Some(context)),
            Err(Error::Again) => {
                if let Some(buf) = v.ledger.refused(context) {
                    self.arena.give(buf)?;
                }
                Ok(None)
            }
            Err(err) => Err(format!("receive of {len} bytes with {flags:?} refused: {err}")),
        }
    }

    fn post_multi(&mut self, v: &mut View<'_>, node: &mut Node, e: usize) -> Checked {
        let len = 1 << self.rng.range(8, 15);
        self.recv_with(v, node, e, false, (0, 0, RecvMode::Multi), None, len).map(|_| ())
    }

    fn peek(&mut self, v: &mut View<'_>, node: &mut Node, e: usize) -> Checked {
        if let Some(context) = self.eps[e].peeked.pop() {
            return self.claim(v, node, e, context);
        }
        let mode = self.rng.pick(&[RecvMode::Peek, RecvMode::PeekClaim, RecvMode::PeekDiscard]);
        let (tag, ignore) = self.tag(&v.plan.caller, true);
        let context = self.recv_with(v, node, e, true, (tag, ignore, mode), None, 0)?;
        if mode == RecvMode::PeekClaim
            && let Some(c) = context
        {
            // Whether there was a message is known when its entry is read.
            self.read_all(v, node)?;
            if v.ledger.peek_found(c) {
                self.eps[e].peeked.push(c);
            }
        }
        Ok(())
    }

    /// Takes or throws away what a peek reserved.
    fn claim(&mut self, v: &mut View<'_>, node: &mut Node, e: usize, context: u64) -> Checked {
        let mode = self.rng.pick(&[RecvMode::Claim, RecvMode::ClaimDiscard]);
        let buf = if mode == RecvMode::Claim {
            Some(self.arena.take(v.plan.caller.len_max)?)
        } else {
            None
        };
        v.ledger.claim(context, mode, buf);
        let io = buf.map_or(IoBuf::EMPTY, |b| self.arena.lend(b, false, &mut self.rng));
        let (src, tag, ignore) = (FI_ADDR_UNSPEC, 0, 0);
        let (kind, flags) = (MsgKind::Tagged, mode_flags(mode));
        let req = RecvReq { kind, buf: io, src, tag, ignore, context, flags };
        match node.post_recv(v.now, self.eps[e].id, req) {
            Ok(()) => Ok(()),
            Err(Error::Again) => {
                if let Some(buf) = v.ledger.unclaimed(context) {
                    self.arena.give(buf)?;
                }
                self.eps[e].peeked.push(context);
                Ok(())
            }
            Err(err) => Err(format!("claim refused: {err}")),
        }
    }

    fn cancel_one(&mut self, v: &mut View<'_>, node: &mut Node, e: usize) -> Checked {
        let ep = &mut self.eps[e];
        if ep.posted.is_empty() {
            return Ok(());
        }
        let context = ep.posted.swap_remove(self.rng.index(ep.posted.len()));
        let found = node.operations().cancel(ep.id, context);
        if found.is_ok() {
            v.ledger.cancelled(context)?;
        }
        Ok(())
    }

    /// Closes an endpoint with whatever is pending, and opens its successor of the same number.
    fn reopen(&mut self, v: &mut View<'_>, node: &mut Node, e: usize) -> Checked {
        let (number, cq) = (self.eps[e].number, self.eps[e].cq);
        self.close(v, node, e)?;
        self.open_ep(v, node, number, cq).map_err(|err| format!("reopening: {err}"))
    }

    pub(crate) fn close(&mut self, v: &mut View<'_>, node: &mut Node, e: usize) -> Checked {
        // What completed before the call may be read after it.
        self.read_all(v, node)?;
        v.ledger.ep_closing(self.eps[e].key);
        node.ep_close(v.now, self.eps[e].id).map_err(|err| format!("ep_close: {err}"))?;
        self.eps[e].open = false;
        self.read_all(v, node)?;
        v.ledger.ep_closed(self.eps[e].key)
    }

    /// Reads every queue to its end.
    pub(crate) fn read_all(&mut self, v: &mut View<'_>, node: &mut Node) -> Checked {
        for i in 0..self.cqs.len() {
            while self.read_some(v, node, self.cqs[i])? {}
        }
        Ok(())
    }

    /// Reads entries of a queue, by one of the ways. False if there is none.
    fn read_some(
        &mut self,
        v: &mut View<'_>,
        node: &mut Node,
        cq: CqId,
    ) -> std::result::Result<bool, Violation> {
        let n = self.rng.range(1, 16) as usize;
        let mut cqes = std::mem::take(&mut self.cqes);
        let got = match self.rng.below(3) {
            0 => {
                let mut to = cqes[..n].iter_mut();
                let put = |cqe: &Cqe| *to.next().expect("as many as were asked for") = *cqe;
                match node.cq_take(cq, n, put) {
                    None => Err(Error::Again),
                    Some(0) => node.cqs.empty_reason(cq),
                    Some(n) => Ok(n),
                }
            }
            1 => {
                match node.cqs.take_one(cq, CqReader { cq: &cq, put: |cqe: &Cqe| cqes[0] = *cqe }) {
                    None => Err(Error::Again),
                    Some(true) => Ok(1),
                    Some(false) => node.cq_read(cq, &mut cqes[..n]),
                }
            }
            _ => node.cq_read(cq, &mut cqes[..n]),
        };
        let done = match got {
            Ok(n) => {
                ensure!(n > 0, "cq_read gave nothing and no error");
                cqes[..n].iter().try_for_each(|cqe| self.completed(v, node, cqe)).map(|()| true)
            }
            Err(Error::Avail) => {
                let e = node.receiving().cq_readerr(cq).map_err(|e| format!("cq_readerr: {e}"))?;
                if v.trace {
                    eprintln!("{} err {e:x?}", v.host);
                }
                let src = self.source(v, node, &e.cqe)?;
                v.ledger.error(self.life, &e, src, &mut self.arena).map(|()| true)
            }
            Err(Error::Again) => Ok(false),
            Err(e) => Err(format!("cq_read: {e}")),
        };
        self.cqes = cqes;
        done
    }

    /// An entry was taken from a queue, or handed over by a turn of the loop.
    pub(crate) fn completed(&mut self, v: &mut View<'_>, node: &mut Node, cqe: &Cqe) -> Checked {
        if v.trace {
            eprintln!("{} cqe {cqe:x?}", v.host);
        }
        let src = self.source(v, node, cqe)?;
        v.ledger.success(self.life, cqe, src, &mut self.arena)
    }

    /// A queue that the application finds empty, and reads on by turning the loop.
    pub(crate) fn waits_at(
        &mut self,
        v: &mut View<'_>,
        node: &mut Node,
    ) -> std::result::Result<Option<CqId>, Violation> {
        let cq = self.cqs[self.rng.index(self.cqs.len())];
        if self.rng.chance(v.plan.caller.waits) {
            while self.read_some(v, node, cq)? {}
        }
        Ok((self.rng.chance(0.9) && node.cqs.is_empty(cq)).then_some(cq))
    }

    /// Translates the source of a completion by what was inserted.
    fn source(
        &self,
        v: &View<'_>,
        node: &mut Node,
        cqe: &Cqe,
    ) -> std::result::Result<Option<Addr>, Violation> {
        let from = CqFlags::RECV | CqFlags::REMOTE_READ | CqFlags::REMOTE_WRITE;
        if cqe.src == FI_ADDR_UNSPEC || !cqe.flags.intersects(from) {
            return Ok(None);
        }
        let a = node
            .objects()
            .av_lookup(self.av, cqe.src)
            .map_err(|e| format!("source {}: {e}", cqe.src))?;
        let host = Net::host(a.station);
        let is = |life: &u32| v.plan.incarnation(*life) == a.incarnation;
        let life = if a.incarnation == 0 { None } else { v.ledger.lives().find(is) };
        Ok(Some(Addr { host, number: a.ep, life }))
    }

    /// Keeps a wildcard receive of each kind posted on every endpoint, takes what peeks reserved.
    pub(crate) fn drain(&mut self, v: &mut View<'_>, node: &mut Node) -> Checked {
        self.read_all(v, node)?;
        if !self.draining {
            self.draining = true;
            self.cancel_posted(v, node)?;
        }
        for e in (0..self.eps.len()).filter(|&e| self.eps[e].open).collect::<Vec<_>>() {
            while let Some(context) = self.eps[e].peeked.pop() {
                let before = self.eps[e].peeked.len();
                self.claim(v, node, e, context)?;
                if self.eps[e].peeked.len() > before {
                    break;
                }
            }
            self.eps[e].drain.retain(|&(c, _)| !v.ledger.is_done(c));
            for tagged in [false, true] {
                for _ in self.eps[e].drain.iter().filter(|d| d.1 == tagged).count()..1 {
                    let len = v.plan.caller.len_max;
                    let mode = (0, u64::MAX, RecvMode::Plain);
                    if let Some(c) = self.recv_with(v, node, e, tagged, mode, None, len)? {
                        self.eps[e].drain.push((c, tagged));
                    }
                }
            }
        }
        Ok(())
    }

    /// Resolves every peer anew and sends each one message from the first open endpoint. Says
    /// whether all were accepted; call again with the rest if not.
    pub(crate) fn greet(
        &mut self,
        v: &mut View<'_>,
        node: &mut Node,
        to: &mut Vec<usize>,
    ) -> Checked {
        let Some(e) = (0..self.eps.len()).find(|&e| self.eps[e].open) else { return Ok(()) };
        while !self.removed.is_empty() {
            self.put_back(v, node)?;
        }
        let mut left = Vec::new();
        for host in to.drain(..) {
            if self.known[host] != v.residents[host].life {
                self.resolve(v, node, host).map_err(|e| format!("av_insert: {e}"))?;
            }
            let Some(&peer) = self.peers.iter().rev().find(|p| p.addr.host == host) else {
                continue;
            };
            let len = self.len(v.plan, v.host);
            if !self.send_to(v, node, e, peer, len.max(NAME_LEN), None, OpFlags::COMPLETION)? {
                left.push(host);
            }
        }
        *to = left;
        Ok(())
    }

    /// Cancels the receives that are still posted.
    fn cancel_posted(&mut self, v: &mut View<'_>, node: &mut Node) -> Checked {
        for e in 0..self.eps.len() {
            if !self.eps[e].open {
                continue;
            }
            for context in v.ledger.open_recvs(self.eps[e].key) {
                if node.operations().cancel(self.eps[e].id, context).is_ok() {
                    v.ledger.cancelled(context)?;
                }
                self.read_all(v, node)?;
            }
        }
        Ok(())
    }

    /// Cancels the receives that are still posted, of which none is being filled.
    pub(crate) fn cancel_all(&mut self, v: &mut View<'_>, node: &mut Node) -> Checked {
        self.cancel_posted(v, node)?;
        for ep in self.eps.iter().filter(|ep| ep.open) {
            let left = v.ledger.open_recvs(ep.key).len();
            ensure!(left == 0, "{left} receives of life {} could not be cancelled", self.life);
        }
        Ok(())
    }

    /// Compares the counters of what was issued with what the ledger saw.
    pub(crate) fn check_counters(&self, v: &View<'_>, node: &Node) -> Checked {
        for ep in self.eps.iter().filter(|ep| ep.open) {
            let all =
                [(ep.cntr, v.ledger.sends(ep.key)), (ep.remote_cntr, v.ledger.remote_ops(ep.key))];
            for (cntr, due) in all {
                let Some(c) = cntr else { continue };
                let read = |r: Result<u64>| r.map_err(|e| format!("cntr_read: {e}"));
                let seen = (read(node.cntrs.read(c))?, read(node.cntrs.readerr(c))?);
                // Messages that left without a record are counted as lost with their session.
                let counters = node.counters();
                let ends =
                    counters.sessions_dead + counters.sessions_reset + counters.sessions_stuck;
                let lost = if v.plan.link.has_lossless() { ends } else { 0 };
                let counted = seen.0 == due.0 && (due.1..=due.1 + lost).contains(&seen.1);
                ensure!(counted, "counter of {:?} shows {seen:?}, {due:?} happened", ep.key);
            }
        }
        Ok(())
    }
}

fn mode_flags(mode: RecvMode) -> OpFlags {
    match mode {
        RecvMode::Plain => OpFlags::COMPLETION,
        RecvMode::Multi => OpFlags::MULTI_RECV,
        RecvMode::Peek => OpFlags::PEEK,
        RecvMode::PeekClaim => OpFlags::PEEK | OpFlags::CLAIM,
        RecvMode::PeekDiscard => OpFlags::PEEK | OpFlags::DISCARD,
        RecvMode::Claim => OpFlags::CLAIM,
        RecvMode::ClaimDiscard => OpFlags::CLAIM | OpFlags::DISCARD,
    }
}
