//! Cost of many peers: bytes per idle session, nanoseconds per message from one of many peers
//! against one of one peer, and a turn with nothing to do.
//!
//! One node has 100,000 peers. Each was a node of its own while the session was established; from
//! then on its messages are made by hand, since only the one node is measured.

use std::collections::VecDeque;

use barewire_benches::count::{Counting, live_bytes, resident_bytes};
use barewire_benches::duo::Rounds;
use barewire_benches::end::{BenchResult, Memory, TAG, node_settings};
use barewire_benches::{Args, Report, Row, Sample};
use barewire_dataplane::flags::{BindFlags, Caps, OpFlags};
use barewire_dataplane::node::{
    AvId, CqId, EpAttr, EpId, MsgKind, Node, NodeSettings, RecvReq, SendReq,
};
use barewire_dataplane::psn::Psn;
use barewire_dataplane::types::{Cqe, EpAddr, FI_ADDR_UNSPEC, Instant};
use barewire_dataplane::wire::{EagerMsg, FrameHead, MsgOp};
use barewire_driver::clock::now_ns;
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::mem::IoBuf;
use barewire_driver::port::{MacAddr, PortCaps, Station, Tx};

#[global_allocator]
static ALLOC: Counting = Counting;

const LEN: usize = 64;

/// Frames per burst, as in the progress engine.
const BURST: usize = 32;

/// A node with an endpoint, and its names.
struct Host {
    node: Node,
    ep: EpId,
    cq: CqId,
    av: AvId,
}

/// The remains of a peer after its session was established: the fields of its next message.
struct Remote {
    head: FrameHead,
    sid: u32,
    psn: u32,
    cack: u32,
    granted: u16,
}

fn main() {
    let args = Args::read();
    let mut report = Report::new("peers", &args);
    if let Err(why) = measure(&args, &mut report) {
        report.skip("all", &why);
    }
}

fn measure(args: &Args, report: &mut Report) -> BenchResult<()> {
    let count = args.size(100_000, 1000) as usize;
    // SAFETY: sets a parameter of the allocator and touches no memory. Otherwise malloc would keep
    // the first nodes' freed tables on its heap for the next ones, where zeroed memory is written,
    // and so counts as resident.
    unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, 128 << 10) };
    let mut few = HostWithPeers::connect(1)?;
    let (before, live) = (resident_bytes(), live_bytes());
    let mut host = Host::open(0, count)?;
    let fixed = (resident_bytes() - before, live_bytes() - live);
    let many = HostWithPeers::join(&mut host, count)?;
    let resident = resident_bytes().saturating_sub(before + fixed.0 + many.own_bytes());
    let per = resident as f64 / count as f64;
    let row = Row::new("bytes-idle", per, "B/session").against("bar", 512.0, per / 512.0);
    let note = format!("RSS; the node alone has {} KiB, aim 256", fixed.0 >> 10);
    report.row(row.count(count as u64).note(note));
    let mut many = many.with(host);
    messages(args, report, &mut few, &mut many)?;
    idle_turns(args, report, &mut few, &mut many);
    Ok(())
}

/// Time per message from random peers.
fn messages(
    args: &Args,
    report: &mut Report,
    few: &mut HostWithPeers,
    many: &mut HostWithPeers,
) -> BenchResult<()> {
    let (rounds, bursts) = (args.size(15, 2), args.size(2000, 20));
    let (mut pairs, mut all) = (Rounds::default(), Sample::default());
    for round in 0..=rounds {
        let one = few.receive(bursts)?;
        let random = many.receive(bursts)?;
        if round > 0 {
            pairs.push(random, one);
            all.push(random);
        }
    }
    let name = format!("ns-{}-over-1", many.remotes.len());
    let row = pairs.row(&name, "ns/message", "one peer").spread(&all);
    report.row(row.note(format!("bar 2.0, aim 1.3; {}", pairs.span())));
    Ok(())
}

/// Time of a transmit with nothing to do.
fn idle_turns(args: &Args, report: &mut Report, few: &mut HostWithPeers, many: &mut HostWithPeers) {
    let (rounds, turns) = (args.size(15, 2), args.size(20_000, 100));
    let mut pairs = Rounds::default();
    for _ in 0..rounds {
        let one = few.host.idle(turns);
        pairs.push(many.host.idle(turns), one);
    }
    let name = format!("empty-turn-{}-over-1", many.remotes.len());
    report.row(pairs.row(&name, "ns/turn", "one peer").note("bar 1.05"));
}

fn caps(number: usize) -> PortCaps {
    PortCaps { lossless: true, ..PortCaps::new(station(number), 1500, "bench") }
}

fn station(number: usize) -> Station {
    MacAddr::from_u64(0x0200_0000_0000 + number as u64).into()
}

impl Host {
    /// A node for `peers` peers.
    fn open(number: usize, peers: usize) -> BenchResult<Self> {
        let said = |e| format!("node {number}: {e}");
        let settings = NodeSettings {
            peer_max: peers.max(1),
            tx_wr_max: 64,
            rx_wr_max: 64,
            unexpected_bytes: if peers > 1 { 1 << 30 } else { 64 << 10 },
            ..node_settings(number as u64)
        };
        let mut node = Node::new(settings, &caps(number)).map_err(said)?;
        let cq = node.cqs.open(128).map_err(said)?;
        let av = node.sessions().av_open(peers).map_err(said)?;
        let caps = Caps::MSG | Caps::TAGGED | Caps::SEND | Caps::RECV | Caps::SOURCE;
        let ep = node.eps.open(EpAttr { caps, ..EpAttr::default() }).map_err(said)?;
        node.objects().ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV).map_err(said)?;
        node.objects().ep_bind_av(ep, av).map_err(said)?;
        node.ep_enable(ep).map_err(said)?;
        Ok(Self { node, ep, cq, av })
    }

    fn addr(&self) -> BenchResult<EpAddr> {
        self.node.addr_of(self.ep).map_err(|e| e.to_string())
    }

    /// Appends the frames that are due to `out`.
    fn transmit(&mut self, out: &mut VecDeque<Vec<u8>>) {
        let mut sink = |frame: &TxFrame<'_>| {
            let mut bytes = vec![0; frame.len()];
            frame.copy_to(&mut bytes);
            out.push_back(bytes);
            Tx::Sent
        };
        self.node.transmit(Instant(now_ns()), &mut sink);
    }

    /// Receives the frames in `frames`.
    fn receive(&mut self, frames: &mut VecDeque<Vec<u8>>) {
        while let Some(bytes) = frames.pop_front() {
            self.node.on_frame(Instant(now_ns()), &RxFrame::new(&bytes));
        }
    }

    /// Nanoseconds of a transmit with nothing to do.
    fn idle(&mut self, turns: u64) -> f64 {
        let start = now_ns();
        for i in 0..turns {
            let sent = self.node.transmit(Instant(start + i), &mut |_: &TxFrame<'_>| Tx::Sent);
            std::hint::black_box(sent);
        }
        (now_ns() - start) as f64 / turns as f64
    }
}

/// Peers with a session each with a node, without the node.
struct EstablishedPeers {
    remotes: Vec<Remote>,
}

impl EstablishedPeers {
    /// Bytes that the benchmark itself uses for them.
    fn own_bytes(&self) -> u64 {
        (self.remotes.capacity() * size_of::<Remote>()) as u64
    }

    fn with(self, host: Host) -> HostWithPeers {
        let memory = Memory::new(LEN);
        let frames = vec![[0; EagerMsg::LEN + LEN]; BURST];
        HostWithPeers { host, remotes: self.remotes, memory, frames, rng: 88_172_645_463_325_252 }
    }
}

/// A node and its peers.
struct HostWithPeers {
    host: Host,
    remotes: Vec<Remote>,
    memory: Memory,
    frames: Vec<[u8; EagerMsg::LEN + LEN]>,
    rng: u64,
}

impl HostWithPeers {
    fn connect(count: usize) -> BenchResult<Self> {
        let mut host = Host::open(0, count)?;
        let joined = Self::join(&mut host, count)?;
        Ok(joined.with(host))
    }

    /// Establishes a session of `host` with each of `count` peers, by one message from each.
    fn join(host: &mut Host, count: usize) -> BenchResult<EstablishedPeers> {
        let mut remotes = Vec::with_capacity(count);
        let memory = Memory::new(LEN);
        let addr = host.addr()?;
        for number in 1..=count {
            let mut peer = Host::open(number, 1)?;
            let to = peer.node.sessions().av_insert(Instant(now_ns()), peer.av, addr);
            let dest = to.map_err(|e| e.to_string())?;
            let known = host.node.sessions().av_insert(Instant(now_ns()), host.av, peer.addr()?);
            known.map_err(|e| e.to_string())?;
            host.post(&memory)?;
            let req = SendReq {
                kind: MsgKind::Tagged,
                buf: IoBuf::EMPTY,
                dest,
                tag: TAG,
                data: 0,
                context: 0,
                flags: OpFlags::empty(),
                no_completion: false,
            };
            let posted = peer.node.post_send(Instant(now_ns()), peer.ep, req);
            posted.map_err(|e| e.to_string())?;
            remotes.push(Remote::establish(host, &mut peer)?);
        }
        Ok(EstablishedPeers { remotes })
    }

    /// Nanoseconds per message, in bursts of messages from random peers.
    fn receive(&mut self, bursts: u64) -> BenchResult<f64> {
        let mut spent = 0;
        for _ in 0..bursts {
            for i in 0..BURST {
                self.rng ^= self.rng << 13;
                self.rng ^= self.rng >> 7;
                self.rng ^= self.rng << 17;
                let who = (self.rng % self.remotes.len() as u64) as usize;
                self.remotes[who].message(&mut self.frames[i]);
                self.host.post(&self.memory)?;
            }
            let start = now_ns();
            let now = Instant(start);
            for bytes in &self.frames {
                self.host.node.prefetch(&RxFrame::new(bytes));
            }
            for bytes in &self.frames {
                self.host.node.on_frame(now, &RxFrame::new(bytes));
            }
            // The credit grants are dropped: no peer here needs them.
            self.host.node.transmit(now, &mut |_: &TxFrame<'_>| Tx::Sent);
            spent += now_ns() - start;
            self.host.drain()?;
        }
        Ok(spent as f64 / (bursts * BURST as u64) as f64)
    }
}

impl Host {
    fn post(&mut self, memory: &Memory) -> BenchResult<()> {
        let req = RecvReq {
            kind: MsgKind::Tagged,
            buf: memory.lend(0, LEN),
            src: FI_ADDR_UNSPEC,
            tag: TAG,
            ignore: 0,
            context: 0,
            flags: OpFlags::empty(),
        };
        self.node.post_recv(Instant(now_ns()), self.ep, req).map_err(|e| e.to_string())
    }

    /// Reads the completions of a burst.
    fn drain(&mut self) -> BenchResult<()> {
        let mut entries = [Cqe::default(); BURST];
        let n = self.node.cq_read(self.cq, &mut entries).map_err(|e| e.to_string())?;
        if n == BURST { Ok(()) } else { Err(format!("{n} of {BURST} messages were taken")) }
    }
}

impl Remote {
    /// Delivers the first message of `peer`, and keeps the fields of its next one.
    fn establish(host: &mut Host, peer: &mut Host) -> BenchResult<Self> {
        let (mut to_host, mut to_peer) = (VecDeque::new(), VecDeque::new());
        let mut last = None;
        for _ in 0..20 {
            peer.transmit(&mut to_host);
            for bytes in &to_host {
                let frame = RxFrame::new(bytes);
                if let Some((_, msg)) = EagerMsg::parse(&frame, false) {
                    last = frame.first_chunk().map(|head| (FrameHead::from(head), msg));
                }
            }
            host.receive(&mut to_host);
            host.transmit(&mut to_peer);
            peer.receive(&mut to_peer);
        }
        let mut entry = [Cqe::default()];
        host.node.cq_read(host.cq, &mut entry).map_err(|e| format!("no session: {e}"))?;
        let (head, msg) = last.ok_or("the first message did not leave")?;
        Ok(Self {
            head,
            sid: msg.dst_sid,
            psn: msg.psn.0.wrapping_add(1),
            cack: msg.cack.0,
            granted: msg.grant,
        })
    }

    /// Writes the next message.
    fn message(&mut self, frame: &mut [u8; EagerMsg::LEN + LEN]) {
        let op = MsgOp { tagged: true, tag: TAG, ..MsgOp::default() };
        let (psn, cack) = (Psn(self.psn), Psn(self.cack));
        // The peers' grant to the node is constant, since the node sends acknowledgements only.
        let grant = self.granted;
        let msg = EagerMsg { dst_sid: self.sid, psn, cack, grant, plen: LEN as u16, op };
        let (head, len) = msg.emit(&self.head, false);
        frame[..len].copy_from_slice(&head[..len]);
        self.psn = self.psn.wrapping_add(1);
    }
}
