//! The applications' operations on each other's memory.

use barewire_dataplane::error::{Error, Result};
use barewire_dataplane::flags::{Caps, MrAccess, OpFlags};
use barewire_dataplane::node::{AtomicReq, MrId, MrReq, Node, ReadReq, RmaIov, RmaList, WriteReq};
use barewire_dataplane::proto::atomic::{AtomicKind, AtomicOp, Datatype, Sharing};
use barewire_dataplane::types::FiAddr;
use barewire_driver::mem::IoBuf;

use crate::arena::Buf;
use crate::caller::{App, Peer, View};
use crate::ledger::{Checked, Violation};
use crate::net::Egress;
use crate::remote::{Act, Part, Region, Remote, Words};

/// What an endpoint needs for all of this.
pub(crate) const ONE_SIDED: Caps = Caps::RMA
    .union(Caps::ATOMIC)
    .union(Caps::READ)
    .union(Caps::WRITE)
    .union(Caps::REMOTE_READ)
    .union(Caps::REMOTE_WRITE);

const ALL: MrAccess = MrAccess::REMOTE_READ.union(MrAccess::REMOTE_WRITE);
const READ_ONLY: MrAccess = MrAccess::REMOTE_READ;

/// The open regions of one life: which of the ledger's, and its handle.
#[derive(Default)]
pub(crate) struct Regions(Vec<(usize, MrId)>);

/// One call before it is made.
struct Call {
    act: Act,
    /// Remote ranges: addresses, and bytes or, of an atomic operation, elements.
    rma: RmaList,
    /// Of an atomic operation, else `None`.
    atomic: Option<(AtomicKind, AtomicOp)>,
    /// Operands, or what is written.
    out: Vec<u8>,
    compare: Vec<u8>,
    /// Bytes that come back.
    back: usize,
}

impl App {
    /// Registers one region that peers may do everything with, and one that they may only read.
    pub(crate) fn open_regions(&mut self, v: &mut View<'_>, node: &mut Node) -> Result<()> {
        for access in [ALL, READ_ONLY] {
            self.open_region(v, node, access)?;
        }
        Ok(())
    }

    fn open_region(&mut self, v: &mut View<'_>, node: &mut Node, access: MrAccess) -> Result<()> {
        let remotes = &mut v.ledger.remotes;
        let opened = remotes.open(self.life, v.plan.caller.len_max, access);
        let (region, buf) = opened.map_err(|_| Error::NoMem)?;
        let own_key = self.rng.chance(0.2).then_some(1000 + region as u64);
        // Addresses of ours would make two runs of a seed differ.
        let virt_addr = false;
        let sharing = self.rng.pick(&[Sharing::Single, Sharing::Shared]);
        let req = MrReq { buf, access, requested_key: own_key, virt_addr, ep: None, sharing };
        let id = node.responder().mr_reg(req)?;
        v.ledger.remotes.registered(region, node.mrs.key(id)?, virt_addr);
        self.regions.0.push((region, id));
        Ok(())
    }

    /// Closes a region whatever is done to it meanwhile, and registers another.
    fn renew_region(&mut self, v: &mut View<'_>, node: &mut Node) -> Checked {
        let (region, id) = self.regions.0.remove(0);
        let access = v.ledger.remotes.regions[region].access;
        node.responder().mr_close(id).map_err(|e| format!("mr_close: {e}"))?;
        v.ledger.remotes.closed(region);
        self.open_region(v, node, access).map_err(|e| format!("mr_reg: {e}"))
    }

    /// Makes one call on somebody's memory.
    pub(crate) fn call_remote(
        &mut self,
        v: &mut View<'_>,
        node: &mut Node,
        e: usize,
        more: bool,
    ) -> Checked {
        if v.plan.caller.one_word {
            return self.on_one_word(v, node, e);
        }
        if self.rng.chance(0.01) {
            return self.renew_region(v, node);
        }
        let peer = self.peers[self.rng.index(self.peers.len())];
        if peer.addr.host == v.host && self.rng.chance(0.7) {
            return Ok(());
        }
        let life = peer.addr.life.unwrap_or(v.residents[peer.addr.host].life);
        let Some(region) = v.ledger.remotes.find(life, ALL) else { return Ok(()) };
        let number = v.ledger.remotes.ops.len();
        let r = &v.ledger.remotes.regions[region];
        let (len_max, one) = (v.plan.caller.len_max, v.plan.caller.one);
        let (mut region, mut bad) = (region, None);
        let mut act = match self.rng.below(100) {
            0..=24 => Act::Write(r.choose(true, len_max, &mut self.rng)),
            25..=44 => Act::Read(r.choose(false, len_max, &mut self.rng)),
            45..=54 => Act::Add(r.some_words(one, &mut self.rng)),
            55..=74 => Act::FetchAdd(r.some_words(one, &mut self.rng)),
            75..=88 => {
                let words = r.some_words(one, &mut self.rng);
                let guess = r.guess(&words, &mut self.rng);
                Act::Cswap(words, guess)
            }
            89..=93 => Act::Fetch(r.some_words(one, &mut self.rng)),
            _ => {
                let (of, range, err, act) = self.bad_range(v, life, region);
                (region, bad) = (of, Some((range, err)));
                act
            }
        };
        let r = &v.ledger.remotes.regions[region];
        let mut call = Call::new(act.clone(), r, number, &mut self.rng);
        if let Some((range, err)) = bad {
            call.rma = RmaList::default();
            call.rma.push(range);
            act = Act::Bad(err);
        }
        call.act = act;
        let flags = self.remote_flags(&call, v.plan.caller.told, more);
        self.post_remote(v, node, e, peer, region, call, flags).map(|_| ())
    }

    /// A range that the target must refuse, the error, and an act to try it with.
    fn bad_range(&mut self, v: &View<'_>, life: u32, region: usize) -> (usize, RmaIov, Error, Act) {
        let remotes = &v.ledger.remotes;
        let r = &remotes.regions[region];
        let read_only = remotes.find(life, READ_ONLY).unwrap_or(region);
        let closed = remotes.regions.iter().rposition(|r| r.life == life && r.is_closed());
        let one = r.words_at(0, 1);
        let long = Part { slot: 8, at: 0, len: self.rng.range(1, 600) as usize };
        let act = match self.rng.below(4) {
            0 => Act::Write(vec![long]),
            1 => Act::Read(vec![long]),
            2 => Act::Add(one),
            _ => Act::FetchAdd(one),
        };
        let atomic = matches!(act, Act::Add(_) | Act::FetchAdd(_));
        let len = if atomic { 1 } else { long.len as u64 };
        let at = |of: usize, addr: u64| (of, RmaIov { addr, len, key: remotes.regions[of].key });
        let end = r.base + r.len() as u64;
        let ((of, range), err) = match self.rng.below(6) {
            0 => {
                let key = self.rng.next();
                ((region, RmaIov { addr: r.base, len, key }), Error::KeyRejected)
            }
            1 => (at(region, end), Error::Access),
            2 => (at(region, r.base.wrapping_sub(8)), Error::Access),
            3 if !matches!(act, Act::Read(_)) => {
                (at(read_only, remotes.regions[read_only].base), Error::Access)
            }
            4 if atomic => (at(region, r.base + 4), Error::Invalid("misaligned")),
            _ => match closed {
                Some(of) => (at(of, remotes.regions[of].base), Error::KeyRejected),
                None => (at(region, end - 1), Error::Access),
            },
        };
        // One byte before the end is inside for one byte.
        let inside = !atomic && len == 1 && range.addr == end - 1 && of == region;
        if inside {
            return (of, RmaIov { addr: end, ..range }, Error::Access, act);
        }
        (of, range, err, act)
    }

    /// Adds one to the one word, or swaps it for its successor.
    fn on_one_word(&mut self, v: &mut View<'_>, node: &mut Node, e: usize) -> Checked {
        if v.host == 0 {
            return Ok(());
        }
        let Some(&peer) = self.peers.iter().rev().find(|p| p.addr.host == 0) else {
            return Ok(());
        };
        let life = peer.addr.life.unwrap_or(v.residents[0].life);
        let Some(region) = v.ledger.remotes.find(life, ALL) else { return Ok(()) };
        let r = &v.ledger.remotes.regions[region];
        let words = r.words_at(0, 1);
        let act = if self.rng.chance(0.5) {
            Act::FetchAdd(words)
        } else {
            let guess = r.guess(&words, &mut self.rng);
            Act::Cswap(words, guess)
        };
        let call = Call::new(act, r, v.ledger.remotes.ops.len(), &mut self.rng);
        self.post_remote(v, node, e, peer, region, call, OpFlags::COMPLETION).map(|_| ())
    }

    fn remote_flags(&mut self, call: &Call, told: f64, more: bool) -> OpFlags {
        let r = &mut self.rng;
        let mut f = OpFlags::empty();
        let read = call.atomic.is_none() && call.back > 0 || matches!(call.act, Act::Read(_));
        f.set(OpFlags::INJECT, !read && call.out.len() <= Node::INJECT_SIZE && r.chance(0.3));
        f.set(OpFlags::REMOTE_CQ_DATA, !read && r.chance(told));
        // What comes back is looked at, so its arrival has to be told.
        f.set(OpFlags::COMPLETION, call.back > 0 || read || r.chance(0.5));
        f.set(OpFlags::DELIVERY_COMPLETE, r.chance(0.15));
        f.set(OpFlags::FENCE, r.chance(0.03));
        f.set(OpFlags::MORE, more && r.chance(0.7));
        f
    }

    /// Posts one operation, and says whether it was accepted.
    #[expect(clippy::too_many_arguments, reason = "the arguments of a call")]
    fn post_remote(
        &mut self,
        v: &mut View<'_>,
        node: &mut Node,
        e: usize,
        peer: Peer,
        region: usize,
        call: Call,
        flags: OpFlags,
    ) -> std::result::Result<bool, Violation> {
        let (ep, key, selective) = (self.eps[e].id, self.eps[e].key, self.eps[e].selective);
        let completion = flags.contains(OpFlags::COMPLETION);
        let inject = flags.contains(OpFlags::INJECT);
        let no_completion = inject && !completion && self.rng.chance(0.5);
        let mut op = call.remote(v.host, peer, region, flags);
        op.silent = no_completion || selective && !completion;
        let number = v.ledger.remotes.ops.len();
        // A write lends its source, all others the memory for what comes back.
        let write = call.atomic.is_none() && call.back == 0 && !call.out.is_empty();
        let buf = self.arena.take(if write { call.out.len() } else { call.back })?;
        if write {
            self.arena.write(buf, &call.out);
        }
        let context = v.ledger.remote(key, op, Some(buf));
        let pieces = self.rng.chance(0.2);
        let io = self.arena.lend(buf, pieces, &mut self.rng);
        let (dest, rma, data) = (peer.fi, call.rma, number as u64);
        let mut out = Egress { net: v.net, from: v.host, full: false, no_route: false };
        let short = self.rng.chance(0.5);
        let now = v.now;
        let answer = match call.atomic {
            None if call.back == 0 && !matches!(call.act, Act::Read(_)) => {
                let req = WriteReq { buf: io, dest, rma, data, context, flags, no_completion };
                let one = req.fast().filter(|_| short);
                let left = one.is_some_and(|mut r| node.try_write(ep, &mut r, &mut out, || now));
                if left { Ok(()) } else { node.posting().post_write(now, ep, req) }
            }
            None => {
                let mut req = ReadReq { buf: io, dest, rma, context, flags };
                let one = req.fast().filter(|_| short);
                let left = one.is_some_and(|mut r| node.try_read(ep, &mut r, &mut out, || now));
                if left { Ok(()) } else { node.posting().post_read(now, ep, req) }
            }
            Some(what) => {
                let (operand, operands) = self.lent(&call.out)?;
                let (compare, compares) = self.lent(&call.compare)?;
                let lent = [operands, compares, io];
                let all = atomic_req(what, lent, (dest, rma), (data, context));
                let mut req = AtomicReq { flags, no_completion, ..all };
                let one = req.fast().filter(|_| short);
                let left = one.is_some_and(|mut r| node.try_atomic(ep, &mut r, &mut out, || now));
                let answer = if left { Ok(()) } else { node.posting().post_atomic(now, ep, req) };
                // Both are the application's again: what is sent must be copies.
                self.arena.give(operand)?;
                self.arena.give(compare)?;
                answer
            }
        };
        if !flags.contains(OpFlags::MORE) && self.rng.chance(0.7) {
            node.transmit(
                now,
                &mut Egress { net: v.net, from: v.host, full: false, no_route: false },
            );
        }
        if inject && write {
            self.arena.fill(buf, 0, 0xee);
        }
        self.posted_remote(v, answer, number, context)
            .map_err(|e| format!("{:?} with {flags:?} refused: {e}", call.act))
    }

    /// Takes the answer of the call that would be operation `number`.
    fn posted_remote(
        &mut self,
        v: &mut View<'_>,
        answer: Result<()>,
        number: usize,
        context: u64,
    ) -> std::result::Result<bool, Violation> {
        match answer {
            Ok(()) => v.ledger.remotes.accepted(number),
            Err(err)
                if err == Error::Again || err == Error::ConnReset && v.ledger.troubled(v.host) =>
            {
                let buf = v.ledger.refused(context).ok_or("no buffer")?;
                self.arena.give(buf)?;
            }
            Err(err) => return Err(err.to_string()),
        }
        Ok(answer.is_ok())
    }

    /// A buffer with these bytes, to be lent for the length of a call.
    fn lent(&mut self, bytes: &[u8]) -> std::result::Result<(Buf, IoBuf), Violation> {
        let buf = self.arena.take(bytes.len())?;
        self.arena.write(buf, bytes);
        let pieces = self.rng.chance(0.2);
        let io = self.arena.lend(buf, pieces, &mut self.rng);
        Ok((buf, io))
    }
}

impl Call {
    /// What the ledger is to know of it.
    fn remote(&self, host: usize, peer: Peer, region: usize, flags: OpFlags) -> Remote {
        let mut op = Remote::new(host, peer.addr, region, self.act.clone());
        op.fence = flags.contains(OpFlags::FENCE);
        op.imm = flags.contains(OpFlags::REMOTE_CQ_DATA);
        op
    }

    /// `act` as operation `number` on `region`.
    fn new(act: Act, region: &Region, number: usize, rng: &mut crate::rng::Rng) -> Self {
        let mut call = Self {
            act,
            rma: RmaList::default(),
            atomic: None,
            out: Vec::new(),
            compare: Vec::new(),
            back: 0,
        };
        let bytes = |parts: &[Part]| parts.iter().map(|p| p.len).sum();
        match &call.act {
            Act::Write(parts) => {
                call.out = vec![0; bytes(parts)];
                crate::arena::write_content(&mut call.out, number as u64);
                call.rma = ranges(parts, region);
            }
            Act::Read(parts) => {
                call.back = bytes(parts);
                call.rma = ranges(parts, region);
            }
            Act::Add(words) | Act::FetchAdd(words) => {
                let fetch = matches!(call.act, Act::FetchAdd(_));
                let kind = if fetch { AtomicKind::Fetch } else { AtomicKind::Base };
                call.atomic = Some((kind, AtomicOp::Sum));
                call.out = [1, 0, 0, 0, 0, 0, 0, 0].repeat(words.len());
                call.back = if fetch { words.len() * 8 } else { 0 };
                call.rma = word_ranges(words, region, rng);
            }
            Act::Cswap(words, guesses) => {
                call.atomic = Some((AtomicKind::Compare, AtomicOp::Cswap));
                call.out = guesses.iter().flat_map(|g| (g + 1).to_le_bytes()).collect();
                call.compare = guesses.iter().flat_map(|g| g.to_le_bytes()).collect();
                call.back = words.len() * 8;
                call.rma = word_ranges(words, region, rng);
            }
            Act::Fetch(words) => {
                call.atomic = Some((AtomicKind::Fetch, AtomicOp::Read));
                call.back = words.len() * 8;
                call.rma = word_ranges(words, region, rng);
            }
            Act::Bad(_) => {}
        }
        call
    }
}

/// An operation on 64-bit words without flags.
fn atomic_req(
    (kind, op): (AtomicKind, AtomicOp),
    [operand, compare, result]: [IoBuf; 3],
    (dest, rma): (FiAddr, RmaList),
    (data, context): (u64, u64),
) -> AtomicReq {
    AtomicReq {
        kind,
        op: op as u32,
        ty: Datatype::Uint64 as u32,
        operand,
        compare,
        result,
        dest,
        rma,
        data,
        context,
        flags: OpFlags::empty(),
        no_completion: false,
    }
}

fn ranges(parts: &[Part], region: &Region) -> RmaList {
    let mut list = RmaList::default();
    for p in parts {
        list.push(RmaIov { addr: region.addr(p), len: p.len as u64, key: region.key });
    }
    list
}

/// The words in one range, or in two.
fn word_ranges(words: &Words, region: &Region, rng: &mut crate::rng::Rng) -> RmaList {
    let mut list = RmaList::default();
    let first = if rng.chance(0.3) { rng.index(words.len() + 1) } else { 0 };
    for (from, n) in [(0, first), (first, words.len() - first)] {
        let addr = region.base + 8 * (words.first + from) as u64;
        if n > 0 {
            list.push(RmaIov { addr, len: n as u64, key: region.key });
        }
    }
    list
}
