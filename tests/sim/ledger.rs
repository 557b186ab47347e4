//! The checker: knows every operation and what it may have done.
//!
//! Rules (reliability-security.md 4.3). Each accepted operation has one outcome and none after its
//! endpoint closed. A message is delivered at most once, whole, to the endpoint and the life that
//! it was addressed to, and if its send succeeded and the target lives, it is. Nothing outside lent
//! memory is written. Messages of one stream are matched in order (`FI_ORDER_SAS`), receives in
//! posting order. An error needs a cause that the simulator knows of. Who is not let in by a host
//! reaches nothing there, and who is reaches everything. What operations on remote memory must have
//! done stands in [`crate::remote`].

use std::collections::{HashMap, HashSet};

use barewire_dataplane::error::Error;
use barewire_dataplane::flags::CqFlags;
use barewire_dataplane::node::MsgKind;
use barewire_dataplane::types::{CqErr, Cqe, ProvErrno};

use crate::arena::{Arena, Buf, claimed_id, is_content};
use crate::entries::Entries;
use crate::plan::NodePlan;
use crate::remote::{Act, Remote, Remotes};
use crate::rng::mix;

/// What went wrong, for a person.
pub(crate) type Violation = String;

/// The outcome of what may find a violation.
pub(crate) type Checked = Result<(), Violation>;

/// Fails with a message built like `format!` unless the condition holds.
macro_rules! ensure {
    ($cond:expr, $($arg:tt)+) => {
        if !$cond {
            return Err(format!($($arg)+));
        }
    };
}
pub(crate) use ensure;

/// An endpoint of one life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct EpKey {
    pub(crate) life: u32,
    /// Which opening of which endpoint of that life.
    pub(crate) ep: u32,
}

/// To whom a message is addressed, or from whom a receive wants one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Addr {
    pub(crate) host: usize,
    pub(crate) number: u16,
    /// The life meant; `None` for whichever is there.
    pub(crate) life: Option<u32>,
}

/// A message sent.
#[derive(Clone, Debug)]
pub(crate) struct Msg {
    pub(crate) src: EpKey,
    pub(crate) src_host: usize,
    pub(crate) src_number: u16,
    pub(crate) dst: Addr,
    pub(crate) kind: MsgKind,
    pub(crate) tag: u64,
    pub(crate) len: usize,
    /// Carries its own id as remote CQ data.
    pub(crate) imm: bool,
    pub(crate) fence: bool,
    /// Its success tells that a receive has taken it.
    pub(crate) matched: bool,
    /// Its success tells only that its buffer may be reused.
    pub(crate) early: bool,
    /// Place among the accepted messages of the world, which orders those of one stream.
    pub(crate) seq: u64,
    pub(crate) sent: Sent,
    /// The receive it was placed by.
    pub(crate) taken: Option<Taken>,
}

/// What the sender knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Sent {
    /// A completion is due.
    Pending,
    /// No success completion will come.
    Silent,
    Ok,
    Failed(Error, ProvErrno),
    /// Its process or endpoint is gone.
    Orphan,
}

/// Where a message went.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) by: EpKey,
    op: usize,
    /// Place of the receive in posting order; of a multi-receive also the offset.
    post: (u64, u64),
    /// Taken by claim: out of order on purpose.
    claimed: bool,
}

/// A receive or a peek.
#[derive(Clone, Debug)]
pub(crate) struct Recv {
    pub(crate) kind: MsgKind,
    pub(crate) tag: u64,
    pub(crate) ignore: u64,
    pub(crate) src: Option<Addr>,
    pub(crate) mode: RecvMode,
}

/// What a receive call does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RecvMode {
    Plain,
    Multi,
    Peek,
    PeekClaim,
    PeekDiscard,
    Claim,
    ClaimDiscard,
}

#[derive(Clone, Debug)]
enum What {
    Send(usize),
    Recv(Recv),
    Remote(usize),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Pending,
    /// No success completion will come; an error may.
    Silent,
    Done,
    /// Its process is gone.
    Dead,
}

struct Op {
    at: EpKey,
    what: What,
    state: State,
    buf: Option<Buf>,
    seq: u64,
    cancelled: bool,
    /// Ended well.
    ok: bool,
    /// Upper half of its context.
    nonce: u64,
}

/// One life of one process.
struct Life {
    host: usize,
    alive: bool,
    /// Endpoints ever opened: number, and whether still open.
    eps: Vec<Ep>,
    /// Addresses that were out of its vector for a while: host, and number of the endpoint.
    renamed: Vec<(usize, u16)>,
    /// Addresses that it has inserted, and when.
    inserted: Vec<(Addr, u64)>,
    /// Hosts that have been in its vector.
    vector: HashMap<usize, Presence>,
    /// Lives that it has addressed by their incarnation.
    named: HashSet<u32>,
}

impl Life {
    fn new(host: usize, alive: bool) -> Self {
        let (eps, renamed, inserted, vector, named) = Default::default();
        Self { host, alive, eps, renamed, inserted, vector, named }
    }

    /// Whether it has had an address of the sender of `msg` since before that was sent.
    fn names(&self, msg: &Msg) -> bool {
        let is = |addr: &Addr| {
            (addr.host, addr.number) == (msg.src_host, msg.src_number)
                && addr.life.is_none_or(|life| life == msg.src.life)
        };
        let renamed = self.renamed.contains(&(msg.src_host, msg.src_number));
        !renamed && self.inserted.iter().any(|(addr, since)| is(addr) && *since <= msg.seq)
    }

    /// Whether `host` has been in the vector from `seq` until now.
    fn met(&self, host: usize, seq: u64) -> Met {
        match self.vector.get(&host) {
            _ if host == self.host => Met::Always,
            None => Met::Never,
            Some(p) => match (p.count > 0, p.changed > seq) {
                (true, false) => Met::Always,
                (false, false) => Met::Never,
                (_, true) => Met::Sometimes,
            },
        }
    }
}

/// How many addresses of a host are in a vector, and when there last came to be one, or none.
#[derive(Clone, Copy, Debug, Default)]
struct Presence {
    count: u32,
    changed: u64,
}

/// When somebody has been in a vector, of a time that lasts until now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Met {
    Never,
    Sometimes,
    Always,
}

struct Ep {
    number: u16,
    open: bool,
    /// Its close has been called: what is pending ends now.
    closing: bool,
    pending: u64,
    sends_ok: u64,
    sends_failed: u64,
    /// Operations on remote memory.
    remote_ok: u64,
    remote_failed: u64,
    /// Messages thrown away by peeks, by tag and length.
    discards: HashMap<(u64, u64), u64>,
    source: bool,
}

/// What is known to have gone wrong between two hosts, and excuses errors and losses.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Excuse {
    /// Operations may fail.
    pub(crate) errors: bool,
    /// A completed message may be lost (a session dropped with frames in a lossless ring).
    pub(crate) loss: bool,
}

/// Counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    pub(crate) accepted: u64,
    pub(crate) refused: u64,
    pub(crate) ok: u64,
    pub(crate) failed: u64,
    pub(crate) delivered: u64,
    pub(crate) delivered_bytes: u64,
    pub(crate) truncated: u64,
    /// Operations that ended because the peer was taken for dead.
    pub(crate) deaths: u64,
    /// Operations on remote memory that succeeded.
    pub(crate) remote: u64,
    /// Operations on remote memory that failed, refused ones included.
    pub(crate) remote_failed: u64,
    /// Those that a target refused, as it had to.
    pub(crate) denied: u64,
    /// Sends whose success told that they were taken by a receive.
    pub(crate) matched: u64,
    /// Sends whose success told that their buffer may be reused.
    pub(crate) early: u64,
    pub(crate) entries: Entries,
}

/// All operations of a run.
pub(crate) struct Ledger {
    pub(crate) tally: Tally,
    pub(crate) remotes: Remotes,
    msgs: Vec<Msg>,
    ops: Vec<Op>,
    lives: Vec<Life>,
    excuses: Vec<Excuse>,
    hosts: usize,
    seq: u64,
    salt: u64,
    /// Calls that posted, accepted or not.
    posts: u64,
    /// For each pair of hosts (who, of whom): the newest life that it has told its node of, on a
    /// link that loses nothing.
    superseded: Vec<u32>,
    /// An endpoint was closed: messages it had begun to send may end half way at their receivers.
    withdrawn: bool,
    /// Hosts that are not reached by name.
    strict: Vec<usize>,
    /// Hosts that only peers in their vector reach.
    closed: Vec<usize>,
}

impl Ledger {
    pub(crate) fn new(seed: u64, hosts: usize, plan: &NodePlan) -> Self {
        // Life 0 stands for nobody.
        let nobody = Life::new(usize::MAX, false);
        Self {
            tally: Tally::default(),
            remotes: Remotes::default(),
            msgs: Vec::new(),
            ops: Vec::new(),
            lives: vec![nobody],
            excuses: vec![Excuse::default(); hosts * hosts],
            superseded: vec![0; hosts * hosts],
            hosts,
            seq: 0,
            salt: seed,
            posts: 0,
            withdrawn: false,
            strict: plan.strict.clone(),
            closed: plan.inserted.clone(),
        }
    }

    pub(crate) fn life_new(&mut self, host: usize) -> u32 {
        self.lives.push(Life::new(host, true));
        (self.lives.len() - 1) as u32
    }

    /// All lives that there were.
    pub(crate) fn lives(&self) -> std::ops::Range<u32> {
        0..self.lives.len() as u32
    }

    /// `life` puts this address into its vector.
    pub(crate) fn inserted(&mut self, life: u32, addr: Addr) {
        self.seq += 1;
        let life = &mut self.lives[life as usize];
        life.inserted.push((addr, self.seq));
        life.named.extend(addr.life);
        let presence = life.vector.entry(addr.host).or_default();
        if presence.count == 0 {
            presence.changed = self.seq;
        }
        presence.count += 1;
    }

    /// `life` takes this address out of its vector.
    pub(crate) fn removed(&mut self, life: u32, addr: Addr) {
        self.unnamed(life, addr);
        self.seq += 1;
        let presence = self.lives[life as usize].vector.entry(addr.host).or_default();
        presence.count -= 1;
        if presence.count == 0 {
            presence.changed = self.seq;
        }
    }

    /// This address has not been in the vector of `life` all the time.
    pub(crate) fn unnamed(&mut self, life: u32, addr: Addr) {
        self.lives[life as usize].renamed.push((addr.host, addr.number));
    }

    /// Whether what was posted by life `src` at `seq` may have reached life `dst`: that is not a
    /// matter of chance where strangers are kept out.
    fn may_reach(&self, src: u32, dst: u32, seq: u64) -> bool {
        let (from, to) = (&self.lives[src as usize], &self.lives[dst as usize]);
        let met = !self.closed.contains(&to.host) || to.met(from.host, seq) != Met::Never;
        // One of the two has to begin the session, and who has no address of the other cannot.
        let named = from.named.contains(&dst) || to.vector.contains_key(&from.host);
        met && (named || from.host == to.host || !self.strict.contains(&to.host))
    }

    /// As [`may_reach`](Self::may_reach), any of the lives meant by `dst`.
    fn may_reach_any(&self, src: u32, dst: Addr, seq: u64) -> bool {
        self.meant(dst).any(|life| self.may_reach(src, life, seq))
    }

    /// Whether what `src` posted at `seq` may have been refused since its host is not, or was not,
    /// in the vector there.
    fn may_be_refused(&self, src: usize, dst: Addr, seq: u64) -> bool {
        let met = |life: u32| self.lives[life as usize].met(src, seq) == Met::Always;
        self.closed.contains(&dst.host) && !self.meant(dst).all(met)
    }

    /// Whether who is addressed so need not take a session for it.
    fn is_nameless(&self, dst: Addr) -> bool {
        dst.life.is_none() && self.strict.contains(&dst.host)
    }

    /// The lives that an address may mean.
    fn meant(&self, dst: Addr) -> impl Iterator<Item = u32> {
        let lives = self.lives.iter().zip(0..);
        lives
            .filter(move |(life, n)| {
                life.host == dst.host && dst.life.is_none_or(|meant| meant == *n)
            })
            .map(|(_, n)| n)
    }

    pub(crate) fn life_dead(&mut self, life: u32) {
        self.lives[life as usize].alive = false;
        for i in 0..self.ops.len() {
            let op = &self.ops[i];
            if op.at.life == life && matches!(op.state, State::Pending | State::Silent) {
                self.orphan(i);
            }
        }
    }

    /// Nobody will hear of the outcome of operation `i`.
    fn orphan(&mut self, i: usize) {
        self.ops[i].state = State::Dead;
        match self.ops[i].what {
            What::Send(m) => self.msgs[m].sent = Sent::Orphan,
            What::Remote(n) => {
                let Ok(()) = self.remotes.failed(n, true) else { unreachable!("it may have been") };
            }
            What::Recv(_) => {}
        }
    }

    pub(crate) fn ep_new(&mut self, life: u32, number: u16, source: bool) -> EpKey {
        let eps = &mut self.lives[life as usize].eps;
        let discards = HashMap::new();
        let (open, closing) = (true, false);
        let (pending, sends_ok, sends_failed) = (0, 0, 0);
        let (remote_ok, remote_failed) = (0, 0);
        eps.push(Ep {
            number,
            open,
            closing,
            pending,
            sends_ok,
            sends_failed,
            remote_ok,
            remote_failed,
            discards,
            source,
        });
        EpKey { life, ep: (eps.len() - 1) as u32 }
    }

    /// The endpoint is about to be closed: what is pending may end in `Canceled`.
    pub(crate) fn ep_closing(&mut self, at: EpKey) {
        self.ep_mut(at).closing = true;
        self.withdrawn = true;
    }

    /// The endpoint was closed and its queue read to the end: nothing may be pending any more.
    pub(crate) fn ep_closed(&mut self, at: EpKey) -> Checked {
        self.ep_mut(at).open = false;
        for i in (0..self.ops.len()).filter(|&i| self.ops[i].at == at).collect::<Vec<_>>() {
            let state = self.ops[i].state;
            ensure!(state != State::Pending, "op {i} has no outcome after its endpoint closed");
            if state == State::Silent {
                self.orphan(i);
            }
        }
        Ok(())
    }

    pub(crate) fn excuse(&mut self, a: usize, b: usize, e: Excuse) {
        for i in [a * self.hosts + b, b * self.hosts + a] {
            self.excuses[i].errors |= e.errors;
            self.excuses[i].loss |= e.loss;
        }
    }

    /// The application of `at` has told its node that `life` lives at `host` now, over a link that
    /// loses nothing. Sends of earlier lives are done when the frame has left, and what of them is
    /// still on its way then is lost. A real port has no way: what it took lies in the receiver's
    /// memory, where the loop finds it first.
    pub(crate) fn supersede(&mut self, at: usize, host: usize, life: u32) {
        let newest = &mut self.superseded[at * self.hosts + host];
        *newest = life.max(*newest);
    }

    /// Whether something is known to have gone wrong between `host` and another.
    pub(crate) fn troubled(&self, host: usize) -> bool {
        (0..self.hosts).any(|h| self.excused(host, h).errors)
    }

    fn excused(&self, a: usize, b: usize) -> Excuse {
        self.excuses[a * self.hosts + b]
    }

    fn ep(&self, at: EpKey) -> &Ep {
        &self.lives[at.life as usize].eps[at.ep as usize]
    }

    fn ep_mut(&mut self, at: EpKey) -> &mut Ep {
        &mut self.lives[at.life as usize].eps[at.ep as usize]
    }

    /// The id of the next message.
    pub(crate) fn next_msg(&self) -> u64 {
        self.msgs.len() as u64
    }

    /// Notes a send that is about to be posted, and gives its context.
    pub(crate) fn send(&mut self, at: EpKey, mut msg: Msg, buf: Option<Buf>) -> u64 {
        self.seq += 1;
        msg.seq = self.seq;
        let state = if msg.sent == Sent::Silent { State::Silent } else { State::Pending };
        self.msgs.push(msg);
        self.op(at, What::Send(self.msgs.len() - 1), state, buf)
    }

    /// Notes a receive that is about to be posted, and gives its context.
    pub(crate) fn recv(&mut self, at: EpKey, recv: Recv, buf: Option<Buf>) -> u64 {
        self.seq += 1;
        self.op(at, What::Recv(recv), State::Pending, buf)
    }

    /// Notes an operation on remote memory that is about to be posted, and gives its context.
    pub(crate) fn remote(&mut self, at: EpKey, mut op: Remote, buf: Option<Buf>) -> u64 {
        self.seq += 1;
        let state = if op.silent { State::Silent } else { State::Pending };
        (op.src, op.seq) = (at.life, self.seq);
        self.remotes.ops.push(op);
        self.op(at, What::Remote(self.remotes.ops.len() - 1), state, buf)
    }

    fn op(&mut self, at: EpKey, what: What, state: State, buf: Option<Buf>) -> u64 {
        self.posts += 1;
        let nonce = mix(self.salt ^ self.posts) << 32;
        self.ops.push(Op {
            at,
            what,
            state,
            buf,
            seq: self.seq,
            cancelled: false,
            ok: false,
            nonce,
        });
        self.ep_mut(at).pending += 1;
        self.tally.accepted += 1;
        self.context(self.ops.len() - 1)
    }

    /// A claim reuses the context of the peek that reserved the message.
    pub(crate) fn claim(&mut self, context: u64, mode: RecvMode, buf: Option<Buf>) {
        let Ok(i) = self.find(context) else { unreachable!("our own context") };
        let op = &mut self.ops[i];
        op.state = State::Pending;
        op.ok = false;
        op.buf = buf;
        if let What::Recv(r) = &mut op.what {
            r.mode = mode;
        }
        let at = op.at;
        self.ep_mut(at).pending += 1;
    }

    /// The last call was refused: it has no side effect and no completion. Gives the buffer back.
    pub(crate) fn refused(&mut self, context: u64) -> Option<Buf> {
        let Ok(i) = self.find(context) else { unreachable!("our own context") };
        self.tally.accepted -= 1;
        self.tally.refused += 1;
        // Its context is never given again, so that a completion of it is found out.
        assert!(i + 1 == self.ops.len(), "only the last call can be refused");
        let op = self.ops.pop()?;
        match op.what {
            What::Send(m) => {
                assert!(m + 1 == self.msgs.len(), "only the last message can be refused");
                self.msgs.pop();
            }
            What::Remote(_) => drop(self.remotes.ops.pop()),
            What::Recv(_) => {}
        }
        self.ep_mut(op.at).pending -= 1;
        op.buf
    }

    /// `Node::cancel` said that it found the operation.
    pub(crate) fn cancelled(&mut self, context: u64) -> Checked {
        let i = self.find(context)?;
        let op = &mut self.ops[i];
        ensure!(op.state == State::Pending, "cancel found op {i}, which is {:?}", op.state);
        op.cancelled = true;
        Ok(())
    }

    /// Verbatim return is part of the check, so a context is an index in disguise.
    fn context(&self, i: usize) -> u64 {
        self.ops[i].nonce | i as u64
    }

    fn find(&self, context: u64) -> Result<usize, Violation> {
        let i = (context & 0xffff_ffff) as usize;
        let known = i < self.ops.len() && self.context(i) == context;
        ensure!(known, "completion with a context that nobody gave: {context:#x}");
        Ok(i)
    }

    /// Contexts of receives posted at `at` and not completed.
    pub(crate) fn open_recvs(&self, at: EpKey) -> Vec<u64> {
        let open =
            |op: &Op| op.at == at && op.state == State::Pending && matches!(op.what, What::Recv(_));
        (0..self.ops.len()).filter(|&i| open(&self.ops[i])).map(|i| self.context(i)).collect()
    }

    /// Whether everything has ended that must end without another receive: sends, claims and
    /// cancelled receives of living processes, and messages that a living target must get.
    pub(crate) fn settled(&self) -> bool {
        self.ops.iter().all(|op| !self.must_end(op))
            && self.msgs.iter().all(|m| !self.missing(m))
            && self.remotes.ops.iter().all(|op| !self.untold(op))
    }

    /// What [`settled`](Self::settled) still waits for, for a person.
    pub(crate) fn unsettled(&self) -> String {
        let ops = self.ops.iter().enumerate().filter(|(_, op)| self.must_end(op));
        let ops: Vec<_> = ops.map(|(i, op)| format!("op {i} {:?} {:?}", op.at, op.what)).collect();
        let msgs = self.msgs.iter().enumerate().filter(|(_, m)| self.missing(m));
        let msgs: Vec<_> = msgs.map(|(i, m)| format!("message {i} {m:?}")).collect();
        format!("{} ops {:.3?}; {} msgs {:.3?}", ops.len(), first(&ops), msgs.len(), first(&msgs))
    }

    fn must_end(&self, op: &Op) -> bool {
        let send = match &op.what {
            What::Send(_) | What::Remote(_) => true,
            What::Recv(r) => !matches!(r.mode, RecvMode::Plain | RecvMode::Multi),
        };
        op.state == State::Pending && (send || op.cancelled)
    }

    /// Whether a message has to be delivered and was not yet.
    fn missing(&self, m: &Msg) -> bool {
        if m.taken.is_some() || !matches!(m.sent, Sent::Ok | Sent::Silent) {
            return false;
        }
        let sender_lives = self.lives[m.src.life as usize].alive;
        let unconfirmed = m.early || m.sent == Sent::Silent;
        let excuse = self.excused(m.src_host, m.dst.host);
        if excuse.loss || (unconfirmed && !sender_lives) {
            return false;
        }
        // What completed before it was acknowledged is lost, untold, with its session or endpoint.
        if m.early && (excuse.errors || self.ep(m.src).closing) {
            return false;
        }
        if self.superseded[m.dst.host * self.hosts + m.src_host] > m.src.life {
            return false;
        }
        // Somebody who was there when it was sent and has been since.
        let target = self.lives.iter().enumerate().find(|(_, l)| l.host == m.dst.host && l.alive);
        let Some((life, target)) = target else { return false };
        if self.may_be_refused(m.src_host, m.dst, m.seq) {
            return false;
        }
        let first = !self.lives[..life].iter().any(|l| l.host == m.dst.host);
        let meant = m.dst.life.map_or(first, |l| l == life as u32);
        let mut eps = target.eps.iter().filter(|e| e.number == m.dst.number);
        let (Some(ep), None) = (eps.next(), eps.next()) else { return false };
        meant && ep.open && !ep.discards.contains_key(&(m.tag, m.len as u64))
    }

    /// A success entry was read from a queue of `life`.
    pub(crate) fn success(
        &mut self,
        life: u32,
        cqe: &Cqe,
        src: Option<Addr>,
        arena: &mut Arena,
    ) -> Checked {
        if cqe.flags.intersects(CqFlags::REMOTE_READ | CqFlags::REMOTE_WRITE) {
            return self.remote_told(life, cqe, src);
        }
        let i = self.find(cqe.op_context)?;
        let op = &mut self.ops[i];
        op.ok = true;
        ensure!(op.at.life == life, "op {i} of life {} completed in life {life}", op.at.life);
        ensure!(op.state == State::Pending, "op {i} completed, but is {:?}: {cqe:?}", op.state);
        // What a cancelled multi-receive had begun to take still arrives.
        let multi = matches!(&op.what, What::Recv(r) if r.mode == RecvMode::Multi);
        ensure!(!op.cancelled || multi, "op {i} was cancelled and succeeded");
        let (at, what) = (op.at, op.what.clone());
        ensure!(self.ep(at).open, "op {i} completed after its endpoint closed");
        match what {
            What::Send(m) => self.send_done(i, m, cqe, arena),
            What::Recv(r) => self.recv_done(i, &r, cqe, src, arena),
            What::Remote(n) => self.remote_done(i, n, cqe, arena),
        }
    }

    fn remote_done(&mut self, i: usize, n: usize, cqe: &Cqe, arena: &mut Arena) -> Checked {
        let op = &self.remotes.ops[n];
        let reached = self.may_reach_any(op.src, op.dst, op.seq);
        ensure!(reached, "operation {i} of a stranger succeeded: {op}");
        let way = if op.reads() { CqFlags::READ } else { CqFlags::WRITE };
        let family = match op.act {
            Act::Write(_) | Act::Read(_) => CqFlags::RMA,
            _ => CqFlags::ATOMIC,
        };
        ensure!(cqe.flags == family | way, "op {i} completed with {:?}: {op:?}", cqe.flags);
        if op.fence {
            self.check_fence(i)?;
        }
        let got = match (self.ops[i].buf, op.reads()) {
            (Some(buf), true) => arena.bytes(buf).to_vec(),
            _ => Vec::new(),
        };
        let done = self.remotes.succeeded(n, &got);
        done.map_err(|e| format!("op {i}: {e}: {}", self.remotes.ops[n]))?;
        let at = self.ops[i].at;
        self.ep_mut(at).remote_ok += 1;
        self.tally.remote += 1;
        self.end(i, arena)
    }

    /// An application is told of an operation on its memory.
    fn remote_told(&mut self, life: u32, cqe: &Cqe, src: Option<Addr>) -> Checked {
        let n = self.remotes.told(cqe.data, life)?;
        let op = &self.remotes.ops[n];
        let reached = self.may_reach(op.src, life, op.seq);
        ensure!(reached, "operation {n} of a stranger was told of in life {life}: {op}");
        let way = if op.reads() { CqFlags::REMOTE_READ } else { CqFlags::REMOTE_WRITE };
        let family = match op.act {
            Act::Write(_) => CqFlags::RMA,
            _ => CqFlags::ATOMIC,
        };
        let flags = family | way | CqFlags::REMOTE_CQ_DATA;
        ensure!(cqe.flags == flags, "operation {n} was told of with {:?}", cqe.flags);
        if let Act::Write(parts) = &op.act {
            let len: usize = parts.iter().map(|part| part.len).sum();
            ensure!(cqe.len == len as u64, "operation {n} of {len} bytes told with {}", cqe.len);
        }
        let from = src.is_none_or(|src| src.host == op.src_host);
        ensure!(from, "operation {n} of host {} reported from {src:?}", op.src_host);
        Ok(())
    }

    /// The target of what the operation does to a living host knows it only by the memory: is it
    /// certain that it was executed?
    fn surely_executed(&self, op: &Remote) -> bool {
        let life = self.remotes.regions[op.region].life;
        let closed = self.remotes.regions[op.region].is_closed();
        let calm = !self.excused(op.src_host, op.dst.host).errors;
        let calm = calm && !self.may_be_refused(op.src_host, op.dst, op.seq);
        calm && self.lives[life as usize].alive && !closed && self.ep_always_open(op.dst)
    }

    /// Operations on memory whose target has still to tell its application of them.
    fn untold(&self, op: &Remote) -> bool {
        op.imm && !op.told && op.is_ok() && self.surely_executed(op)
    }

    fn send_done(
        &mut self,
        i: usize,
        m: usize,
        cqe: &Cqe,
        arena: &mut Arena,
    ) -> Result<(), String> {
        let flags = CqFlags::SEND | kind_flag(self.msgs[m].kind);
        ensure!(cqe.flags == flags, "send {i} completed with {:?}, not {flags:?}", cqe.flags);
        self.msgs[m].sent = Sent::Ok;
        if self.msgs[m].fence {
            self.check_fence(i)?;
        }
        if self.msgs[m].matched {
            self.tally.matched += 1;
            ensure!(self.is_matched(m), "message {m} is matched by nobody: {:?}", self.msgs[m]);
        }
        self.tally.early += u64::from(self.msgs[m].early);
        self.tally.ok += 1;
        let at = self.ops[i].at;
        self.ep_mut(at).sends_ok += 1;
        self.end(i, arena)
    }

    /// Whether a message has been taken, or one of the receives that were posted for such can have
    /// taken it and has not told its application yet.
    fn is_matched(&self, m: usize) -> bool {
        let msg = &self.msgs[m];
        let takers: HashSet<usize> =
            self.msgs.iter().filter_map(|other| other.taken).map(|taken| taken.op).collect();
        let may = |(i, op): (usize, &Op)| {
            let What::Recv(r) = &op.what else { return false };
            let multi = r.mode == RecvMode::Multi;
            let is_free = multi || !takers.contains(&i) && !op.cancelled;
            let is_there = self.lives[op.at.life as usize].host == msg.dst.host
                && self.ep(op.at).number == msg.dst.number;
            is_there && is_free && r.mode != RecvMode::Peek && eligible(msg, r)
        };
        msg.taken.is_some() || self.ops.iter().enumerate().any(may)
    }

    /// A fenced operation completes after everything posted before it to the same peer.
    fn check_fence(&self, i: usize) -> Checked {
        let fenced = self.dst(&self.ops[i]);
        for (j, op) in self.ops[..i].iter().enumerate().rev().take(300) {
            let same = op.at == self.ops[i].at && fenced.is_some() && self.dst(op) == fenced;
            let late = same && op.state == State::Pending;
            ensure!(!late, "fenced operation {i} completed before {j} to the same peer");
        }
        Ok(())
    }

    /// Whom an operation goes to.
    fn dst(&self, op: &Op) -> Option<Addr> {
        match op.what {
            What::Send(m) => Some(self.msgs[m].dst),
            What::Remote(n) => Some(self.remotes.ops[n].dst),
            What::Recv(_) => None,
        }
    }

    fn recv_done(
        &mut self,
        i: usize,
        r: &Recv,
        cqe: &Cqe,
        src: Option<Addr>,
        arena: &mut Arena,
    ) -> Checked {
        let known = CqFlags::RECV | kind_flag(r.kind) | CqFlags::REMOTE_CQ_DATA;
        let known = known | CqFlags::MULTI_RECV | CqFlags::CLAIM;
        ensure!(known.contains(cqe.flags), "receive {i} completed with {:?}", cqe.flags);
        match r.mode {
            RecvMode::Peek | RecvMode::PeekClaim => return self.end(i, arena),
            RecvMode::PeekDiscard | RecvMode::ClaimDiscard => {
                let at = self.ops[i].at;
                *self.ep_mut(at).discards.entry((cqe.tag, cqe.len)).or_default() += 1;
                return self.end(i, arena);
            }
            RecvMode::Plain | RecvMode::Multi | RecvMode::Claim => {}
        }
        let multi = r.mode == RecvMode::Multi;
        let released = !multi || cqe.flags.contains(CqFlags::MULTI_RECV);
        let buf = self.ops[i].buf.ok_or("a receive without a buffer")?;
        // The entry that only gives the buffer back names no place in it.
        let alone = multi && released && cqe.buf == 0;
        if !alone {
            let at = if multi { cqe.buf.wrapping_sub(arena.addr(buf)) } else { 0 };
            let end = at.checked_add(cqe.len);
            let inside = end.is_some_and(|e| e <= buf.len as u64);
            ensure!(inside, "receive {i}: {} bytes at {at} of {}", cqe.len, buf.len);
            let placed = arena.bytes(buf)[at as usize..][..cqe.len as usize].to_vec();
            self.delivered(i, r, cqe, cqe.len as usize, &placed, at, src)?;
            let rest = arena.untouched(buf, cqe.len as usize);
            ensure!(multi || rest, "receive {i} wrote behind its {} bytes", cqe.len);
        }
        arena.guards(buf).map_err(|e| format!("receive {i}: {e}"))?;
        if released { self.end(i, arena) } else { Ok(()) }
    }

    /// A message arrived: which one is it, and may it be here?
    #[expect(clippy::too_many_arguments, reason = "the facts of one delivery")]
    fn delivered(
        &mut self,
        i: usize,
        r: &Recv,
        cqe: &Cqe,
        len: usize,
        placed: &[u8],
        offset: u64,
        src: Option<Addr>,
    ) -> Checked {
        let at = self.ops[i].at;
        let m = self.identify(cqe, placed)?;
        let host = self.lives[at.life as usize].host;
        let number = self.ep(at).number;
        let msg = &self.msgs[m];
        let dup = msg.taken.map(|t| t.by);
        ensure!(dup.is_none(), "message {m} arrived twice: at {dup:?} and {at:?}: {msg:?}");
        let right = msg.dst.host == host && msg.dst.number == number;
        ensure!(right, "message {m} for {:?} arrived at host {host} ep {number}", msg.dst);
        let life = msg.dst.life.is_none_or(|l| l == at.life);
        ensure!(life, "message {m} for {:?} arrived in life {}", msg.dst, at.life);
        let reached = self.may_reach(msg.src.life, at.life, msg.seq);
        ensure!(reached, "message {m} of a stranger arrived at {at:?}: {msg:?}");
        let clean = !matches!(msg.sent, Sent::Failed(_, ProvErrno::NotExecuted));
        ensure!(clean, "message {m} was reported as not executed and arrived");
        ensure!(eligible(msg, r), "message {m} {msg:?} matched {r:?}");
        ensure!(msg.len == len, "message {m} has {} bytes, {len} reported", msg.len);
        ensure!(cqe.tag == msg.tag, "message {m}: tag {:#x}, {:#x} sent", cqe.tag, msg.tag);
        ensure!(is_content(placed, m as u64), "message {m}: {} bytes are wrong", placed.len());
        let imm = cqe.flags.contains(CqFlags::REMOTE_CQ_DATA);
        let data = imm == msg.imm && (!imm || cqe.data == m as u64);
        ensure!(data, "message {m}: data {:#x} {imm}, {} sent", cqe.data, msg.imm);
        if let Some(src) = src {
            let from = src.host == msg.src_host && src.number == msg.src_number;
            let from = from && src.life.is_none_or(|l| l == msg.src.life);
            ensure!(from, "message {m} {msg:?} reported from {src:?} to {at:?}");
        } else {
            let named = self.lives[at.life as usize].names(msg);
            ensure!(!(self.ep(at).source && named), "message {m} has no source: {msg:?}");
        }
        let post = (self.ops[i].seq, offset);
        let claimed = r.mode == RecvMode::Claim;
        self.msgs[m].taken = Some(Taken { by: at, op: i, post, claimed });
        self.tally.delivered += 1;
        self.tally.delivered_bytes += placed.len() as u64;
        Ok(())
    }

    /// Finds the message by its first bytes, or by its remote CQ data: callers see to it that there
    /// is one of them.
    fn identify(&self, cqe: &Cqe, placed: &[u8]) -> Result<usize, Violation> {
        let imm = cqe.flags.contains(CqFlags::REMOTE_CQ_DATA);
        let id = claimed_id(placed).or(imm.then_some(cqe.data));
        let id = id.ok_or(format!("{} bytes without a name arrived: {cqe:?}", placed.len()))?;
        let known = usize::try_from(id).ok().filter(|&m| m < self.msgs.len());
        known.ok_or(format!("a message {id} arrived that was never sent, or refused: {cqe:?}"))
    }

    /// An error entry was read from a queue of `life`.
    pub(crate) fn error(
        &mut self,
        life: u32,
        e: &CqErr,
        src: Option<Addr>,
        arena: &mut Arena,
    ) -> Checked {
        let i = self.find(e.cqe.op_context)?;
        let op = &self.ops[i];
        ensure!(op.at.life == life, "op {i} of life {} failed in life {life}", op.at.life);
        let live = matches!(op.state, State::Pending | State::Silent);
        ensure!(live, "op {i} failed, but is {:?}: {e:?}", op.state);
        self.tally.failed += 1;
        match op.what.clone() {
            What::Send(m) => self.send_failed(i, m, e, arena),
            What::Recv(r) => self.recv_failed(i, &r, e, src, arena),
            What::Remote(n) => self.remote_failed(i, n, e, arena),
        }
    }

    fn remote_failed(&mut self, i: usize, n: usize, e: &CqErr, arena: &mut Arena) -> Checked {
        let at = self.ops[i].at;
        let closing = self.ep(at).closing;
        let op = &self.remotes.ops[n];
        let region = &self.remotes.regions[op.region];
        let gone = region.is_closed() || !self.lives[region.life as usize].alive;
        let broken = self.excused(op.src_host, op.dst.host).errors;
        let due = matches!(op.act, Act::Bad(err) if err.fi_errno() == e.err.fi_errno());
        let nameless = self.is_nameless(op.dst);
        let fair = match e.err {
            Error::Canceled => closing || self.ops[i].cancelled,
            Error::HostUnreach => broken,
            Error::ConnReset => broken || nameless || !self.ep_always_open(op.dst),
            Error::ConnRefused => !self.ep_always_open(op.dst),
            Error::KeyRejected => gone || due,
            Error::Access => due || self.may_be_refused(op.src_host, op.dst, op.seq),
            _ => due,
        };
        ensure!(fair, "operation {i} failed without a cause: {e:?} {op}");
        self.tally.deaths += u64::from(e.err == Error::HostUnreach);
        self.tally.denied += u64::from(due);
        let executed = e.prov_errno != ProvErrno::NotExecuted;
        ensure!(!(due && executed), "operation {i} was refused and may have been executed: {e:?}");
        if let Some(buf) = self.ops[i].buf {
            arena.guards(buf).map_err(|w| format!("operation {i}: {w}"))?;
        }
        self.remotes.failed(n, executed).map_err(|w| format!("operation {i}: {w}"))?;
        self.ep_mut(at).remote_failed += 1;
        self.tally.remote_failed += 1;
        self.end(i, arena)
    }

    fn send_failed(
        &mut self,
        i: usize,
        m: usize,
        e: &CqErr,
        arena: &mut Arena,
    ) -> Result<(), String> {
        let at = self.ops[i].at;
        let closing = self.ep(at).closing;
        let msg = &self.msgs[m];
        let broken = self.excused(msg.src_host, msg.dst.host).errors;
        let refused = self.may_be_refused(msg.src_host, msg.dst, msg.seq);
        let nameless = self.is_nameless(msg.dst);
        let fair = match e.err {
            Error::Canceled => closing || self.ops[i].cancelled,
            Error::HostUnreach => broken,
            // An endpoint that closes in the middle of a message is as good as gone.
            Error::ConnReset => broken || nameless || !self.ep_always_open(msg.dst),
            Error::ConnRefused => refused || !self.ep_always_open(msg.dst),
            _ => false,
        };
        ensure!(fair, "send {i} failed without a cause: {e:?} {msg:?}");
        let no = e.prov_errno == ProvErrno::NotExecuted && msg.taken.is_some();
        ensure!(!no, "message {m} was delivered and reported as not executed");
        self.tally.deaths += u64::from(e.err == Error::HostUnreach);
        self.msgs[m].sent = Sent::Failed(e.err, e.prov_errno);
        self.ep_mut(at).sends_failed += 1;
        self.end(i, arena)
    }

    /// Whether every life of that host has had that endpoint open all the time.
    fn ep_always_open(&self, to: Addr) -> bool {
        let mut lives = self.lives.iter().filter(|l| l.host == to.host);
        lives.all(|l| l.eps.iter().filter(|e| e.number == to.number).all(|e| !e.closing))
    }

    fn recv_failed(
        &mut self,
        i: usize,
        r: &Recv,
        e: &CqErr,
        src: Option<Addr>,
        arena: &mut Arena,
    ) -> Checked {
        let at = self.ops[i].at;
        let host = self.lives[at.life as usize].host;
        let broken = self.troubled(host);
        let peek = matches!(r.mode, RecvMode::Peek | RecvMode::PeekClaim | RecvMode::PeekDiscard);
        let claim = matches!(r.mode, RecvMode::Claim | RecvMode::ClaimDiscard);
        let fair = match e.err {
            Error::Canceled => self.ep(at).closing || self.ops[i].cancelled || self.withdrawn,
            Error::NoMsg => peek || (claim && broken),
            Error::Trunc => matches!(r.mode, RecvMode::Plain | RecvMode::Multi | RecvMode::Claim),
            Error::HostUnreach => broken,
            Error::ConnReset => broken || self.withdrawn,
            _ => false,
        };
        ensure!(fair, "receive {i} {r:?} at {at:?} failed without a cause: {e:?}");
        let multi = r.mode == RecvMode::Multi;
        let buf = self.ops[i].buf;
        if let (Error::Trunc, Some(buf)) = (e.err, buf) {
            let at = if multi { e.cqe.buf.wrapping_sub(arena.addr(buf)) } else { 0 };
            let len = e.cqe.len as usize;
            let full = at.checked_add(e.cqe.len) == Some(buf.len as u64);
            ensure!(full, "receive {i}: {len} bytes placed at {at} of {}: {e:?}", buf.len);
            ensure!(e.olen > 0, "receive {i} was truncated by nothing");
            let placed = arena.bytes(buf)[at as usize..][..len].to_vec();
            self.delivered(i, r, &e.cqe, len + e.olen as usize, &placed, at, src)?;
            self.tally.truncated += 1;
        }
        if let Some(buf) = buf {
            arena.guards(buf).map_err(|w| format!("receive {i}: {w}"))?;
        }
        if !multi || e.cqe.flags.contains(CqFlags::MULTI_RECV) {
            return self.end(i, arena);
        }
        Ok(())
    }

    fn end(&mut self, i: usize, arena: &mut Arena) -> Checked {
        self.ops[i].state = State::Done;
        let at = self.ops[i].at;
        self.ep_mut(at).pending -= 1;
        match self.ops[i].buf.take() {
            Some(buf) => arena.give(buf).map_err(|e| format!("op {i}: {e}")),
            None => Ok(()),
        }
    }

    /// Whether the peek with this context found a message.
    pub(crate) fn peek_found(&self, context: u64) -> bool {
        self.find(context).is_ok_and(|i| self.ops[i].state == State::Done && self.ops[i].ok)
    }

    /// A claim was refused for lack of room: the reservation stands. Gives the buffer back.
    pub(crate) fn unclaimed(&mut self, context: u64) -> Option<Buf> {
        let Ok(i) = self.find(context) else { unreachable!("our own context") };
        let op = &mut self.ops[i];
        op.state = State::Done;
        let (at, buf) = (op.at, op.buf.take());
        self.ep_mut(at).pending -= 1;
        buf
    }

    /// Whether the operation has ended.
    pub(crate) fn is_done(&self, context: u64) -> bool {
        self.find(context).is_ok_and(|i| self.ops[i].state == State::Done)
    }

    /// Successes and failures that the endpoint's transmit counter must show.
    pub(crate) fn sends(&self, at: EpKey) -> (u64, u64) {
        let (silent, _) = self.silent(at);
        let ep = self.ep(at);
        (ep.sends_ok + silent, ep.sends_failed)
    }

    /// As [`sends`](Self::sends), of the counter of operations on remote memory.
    pub(crate) fn remote_ops(&self, at: EpKey) -> (u64, u64) {
        let (_, silent) = self.silent(at);
        let ep = self.ep(at);
        (ep.remote_ok + silent, ep.remote_failed)
    }

    /// Sends, and operations on remote memory, whose success nobody was told.
    fn silent(&self, at: EpKey) -> (u64, u64) {
        let silent = self.ops.iter().filter(|op| op.at == at && op.state == State::Silent);
        let (sends, remote): (Vec<&Op>, _) =
            silent.partition(|op| matches!(op.what, What::Send(_)));
        (sends.len() as u64, remote.len() as u64)
    }

    /// The rules that can only be judged when all is over.
    pub(crate) fn verdict(&mut self) -> Checked {
        self.check_order()?;
        let ops = self.remotes.ops.iter();
        let known = |op: &Remote| match self.surely_executed(op) {
            true => Some(true),
            false if self.may_reach_any(op.src, op.dst, op.seq) => None,
            false => Some(false),
        };
        let sure: Vec<Option<bool>> = ops.map(known).collect();
        self.remotes.verdict(&sure)?;
        for (m, msg) in self.msgs.iter().enumerate() {
            ensure!(!self.missing(msg), "message {m} was sent and never arrived: {msg:?}");
        }
        Ok(())
    }

    /// Of two messages of one stream, the older one gets the older of the receives that both could
    /// have had.
    fn check_order(&self) -> Checked {
        let mut streams: HashMap<(EpKey, EpKey, bool), Vec<usize>> = HashMap::new();
        for (m, msg) in self.msgs.iter().enumerate() {
            if let Some(t) = msg.taken.filter(|t| !t.claimed) {
                let key = (msg.src, t.by, msg.kind == MsgKind::Tagged);
                streams.entry(key).or_default().push(m);
            }
        }
        for stream in streams.values() {
            for (n, &m) in stream.iter().enumerate() {
                let Some(t) = self.msgs[m].taken else { continue };
                let What::Recv(r) = &self.ops[t.op].what else { continue };
                for &older in stream[..n].iter().rev().take(200) {
                    let (old, young) = (&self.msgs[older], &self.msgs[m]);
                    let Some(o) = old.taken else { continue };
                    let fair = o.post <= t.post || !eligible(old, r);
                    ensure!(
                        fair,
                        "messages {older} and {m} overtook: {old:?} in receive {}, {young:?} in {}",
                        o.op,
                        t.op
                    );
                }
            }
        }
        Ok(())
    }
}

fn first(v: &[String]) -> &[String] {
    &v[..v.len().min(3)]
}

fn kind_flag(kind: MsgKind) -> CqFlags {
    match kind {
        MsgKind::Msg => CqFlags::MSG,
        MsgKind::Tagged => CqFlags::TAGGED,
    }
}

/// Whether the receive may take the message.
fn eligible(m: &Msg, r: &Recv) -> bool {
    // A directed receive names a station and an endpoint: it does not tell lives apart.
    let src = r.src.is_none_or(|s| s.host == m.src_host && s.number == m.src_number);
    m.kind == r.kind && src && (m.tag ^ r.tag) & !r.ignore == 0
}
