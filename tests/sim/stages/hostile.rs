//! Frames from those who mean harm.

use std::time::Instant;

use barewire_dataplane::node::{Levels, SessionInfo};
use barewire_dataplane::psn::Psn;
use barewire_dataplane::rel::sent::WINDOW;
use barewire_dataplane::types::FiAddr;
use barewire_dataplane::wire::{
    self, AckOp, Base, DataOp, EndOp, EndStatus, MsgMOp, MsgOp, NackOp, NackReason, NopOp, Op,
    OpenOp, PackOp, PullOp, RndvOp, RstOp, RstReason, Ty,
};
use barewire_driver::frame::RxFrame;
use barewire_tests::forge::Forger;

use super::{for_seeds, nightly};
use crate::arena::{Buf, is_content};
use crate::ledger::{Checked, ensure};
use crate::net::Net;
use crate::plan::Plan;
use crate::rig::{EP, Rig};
use crate::rng::Rng;
use crate::world::guarded;

const MS: u64 = 1_000_000;

/// Goal: who does not know a session cannot touch it (B14). Method: between messages of two honest
/// nodes one of them is given random frames, copies of real frames with bits flipped, and real
/// frames as if from a third station. Nothing but counters may change, and the messages arrive.
#[test]
fn forged_frames() {
    let start = Instant::now();
    let (seeds, each) = if nightly() { (100, 100_000) } else { (20, 50_000) };
    let sum = for_seeds("forged_frames", seeds, |seed, sum| {
        guarded(|| forged(seed, each))?;
        sum.runs += 1;
        sum.frames += each;
        Ok(())
    });
    sum.print("forged_frames", start);
}

pub(crate) fn forged(seed: u64, count: u64) -> Checked {
    let mut r = Rng::new(seed, 7);
    let mut plan = Plan::calm(seed, 0);
    (plan.hosts, plan.link.mtu) = (3, vec![1500; 3]);
    plan.link.lossless = r.chance(0.3);
    let mut rig = Rig::new(plan, 2);
    rig.net.tap = Some(Vec::new());
    let mut pair = Pair::new(&mut rig);
    pair.exchange(&mut rig, &mut r, 20)?;
    let mut live = rig.net.tap.take().unwrap_or_default();
    live.retain(|f| RxFrame::new(f).stations().is_some_and(|[dst, _]| dst == Net::station(0)));
    let quiet = rig.net.now + 3000 * MS;
    rig.run_to(quiet);
    let before = state(&mut rig);
    let now = rig.now();
    let [victim, honest, third] = [0, 1, 2].map(Net::station);
    let mut forger = Forger { rng: r.clone(), victim, honest, third, crc: true, ep: EP };
    for i in 0..count {
        let bytes = forger.frame(&live);
        rig.at(0).node.on_frame(now, &RxFrame::new(&bytes));
        if i % 1000 == 0 {
            // Whatever it answers goes to the third station, who says nothing.
            let t = rig.net.now;
            rig.poll_by(0, t);
            rig.run_to(t + MS);
        }
    }
    let after = state(&mut rig);
    ensure!(before == after, "forged frames changed {before:?} to {after:?}");
    pair.exchange(&mut rig, &mut r, 20)
}

/// Sessions with honest peers, and all levels but the number of peers.
fn state(rig: &mut Rig) -> (Vec<SessionInfo>, Levels) {
    let node = &rig.at(0).node;
    let mut sessions: Vec<_> =
        node.statistics().session_infos().filter(|s| s.station == Net::station(1)).collect();
    sessions.iter_mut().for_each(|s| s.srtt_ns = 0);
    (sessions, Levels { peers: 0, ..node.statistics().levels() })
}

/// Two honest nodes that send each other checked messages.
pub(super) struct Pair {
    pub(super) peers: [FiAddr; 2],
    sent: u64,
}

impl Pair {
    pub(super) fn new(rig: &mut Rig) -> Self {
        let peers = [rig.peer(0, 1, 2), rig.peer(1, 0, 1)];
        Self { peers, sent: 0 }
    }

    /// `count` messages each way, one after the other, content checked.
    pub(super) fn exchange(&mut self, rig: &mut Rig, r: &mut Rng, count: u64) -> Checked {
        for _ in 0..count {
            for from in 0..2 {
                let len = r.pick(&[0, 8, 256, 2000, 4000, 20_000]);
                self.sent += 1;
                self.message(rig, from, len)?;
            }
        }
        Ok(())
    }

    pub(super) fn message(&mut self, rig: &mut Rig, from: usize, len: usize) -> Checked {
        let (to, id) = (1 - from, self.sent);
        let into: Buf = rig.at(to).arena.take(len)?;
        let src = Some(self.peers[to]);
        ensure!(rig.recv(to, src, into, id), "receive {id} refused");
        let buf = rig.at(from).arena.take(len)?;
        rig.at(from).arena.write_message(buf, id);
        let limit = rig.net.now + 2000 * MS;
        while !rig.send(from, self.peers[from], buf, id) {
            ensure!(rig.step(limit).0, "message {id} is refused for ever");
        }
        let (mut sent, mut got) = (false, false);
        while !(sent && got) {
            if let Some(c) = rig.read(from) {
                ensure!(c.op_context == id, "{c:?} instead of message {id}");
                sent = true;
            } else if let Some(c) = rig.read(to) {
                ensure!(c.op_context == id && c.len == len as u64, "{c:?}, sent {len} bytes");
                got = true;
            } else {
                let more = rig.step(limit).0;
                let stuck = (rig.error(from), rig.error(to));
                ensure!(more, "message {id} of {len} bytes stuck: {sent} {got} {stuck:?}");
            }
        }
        let whole = is_content(rig.at(to).arena.bytes(into), id);
        ensure!(whole, "message {id} of {len} bytes arrived damaged");
        rig.at(to).arena.give(into)?;
        rig.at(from).arena.give(buf)
    }
}

/// Goal: a peer with a session of its own can harm only itself. Method: a third station opens a
/// session and sends well-formed nonsense: a packet beyond the window, pieces at bad offsets and
/// overlapping, wrong lengths, pulls and data of operations that are not, acknowledgements of what
/// was never sent, more than its credit, resets. Honest messages go on, memory keeps its edges, and
/// when it falls silent everything it took comes back.
#[test]
fn hostile_peer() {
    let start = Instant::now();
    let (seeds, each) = if nightly() { (1000, 20_000) } else { (200, 3_000) };
    let sum = for_seeds("hostile_peer", seeds, |seed, sum| {
        guarded(|| hostile(seed, each))?;
        sum.runs += 1;
        sum.frames += each;
        Ok(())
    });
    sum.print("hostile_peer", start);
}

/// What it sends, whatever the message.
const PAYLOAD: u8 = 0x77;

/// The third station.
struct Villain {
    rng: Rng,
    /// What the victim calls the session.
    sid: u32,
    mine: u32,
    epoch: u32,
    psn: u32,
    /// What was last seen of the victim.
    cack: u32,
    victim_epoch: u32,
    /// Operations of the victim: announced sends and pulls.
    ops: Vec<(u32, u32)>,
}

pub(crate) fn hostile(seed: u64, count: u64) -> Checked {
    let mut r = Rng::new(seed, 8);
    let mut plan = Plan::calm(seed, 0);
    (plan.hosts, plan.link.mtu) = (3, vec![1500; 3]);
    plan.node.unexpected_bytes = 64 << 10;
    plan.node.t_dead_ns = 200 * MS;
    let mut rig = Rig::new(plan, 2);
    rig.stray = Some(Vec::new());
    rig.net.events_max = 500_000 + 200 * count;
    let mut pair = Pair::new(&mut rig);
    let mut v = Villain::new(seed);
    // The victim also sends to it, and takes some of what it says.
    let to_villain = rig.peer(0, 2, 0);
    for i in 0..count {
        if i % 64 == 0 {
            v.listen(&mut rig);
            v.knock(&mut rig);
            let over = rig
                .at(0)
                .node
                .statistics()
                .session_infos()
                .find(|session| session.in_flight > WINDOW);
            ensure!(over.is_none(), "what was never sent is acknowledged: {over:?}");
        }
        if i % 100 == 0 {
            let buf = rig.at(0).arena.take(r.pick(&[10, 9000]))?;
            rig.send(0, to_villain, buf, BAIT + i);
        }
        let bytes = v.nonsense();
        rig.net.inject(0, &bytes);
        if r.chance(0.1) {
            let t = rig.net.now;
            rig.run_to(t + r.below(100_000));
        }
        if i % 100 == 50 {
            let into = rig.at(0).arena.take(3000)?;
            rig.recv(0, Some(to_villain), into, BAIT + i);
        }
    }
    // It falls silent: everything of it ends, everything comes back.
    let t = rig.net.now;
    rig.run_to(t + 2000 * MS);
    rig.forget(0, BAIT)?;
    pair.exchange(&mut rig, &mut r, 4)?;
    let t = rig.net.now;
    rig.run_to(t + 2000 * MS);
    let levels = rig.at(0).node.statistics().levels();
    // Whole messages that it had credit for wait for a receive as anybody's do.
    let kept = Levels {
        peers: levels.peers,
        unexpected: levels.unexpected,
        blocks: levels.blocks,
        ..Levels::default()
    };
    ensure!(levels == kept, "a peer that fell silent still holds {levels:?}");
    rig.at(0).arena.check_all()?;
    half_messages(seed)
}

/// A third station sends the first piece of a message and then one that does not follow it: at an
/// offset beyond or before, or of a message of another length. What is told as received holds the
/// bytes of that station from end to end.
fn half_messages(seed: u64) -> Checked {
    const LEN: usize = 3000;
    // The second of three pieces: its offset, the length of its message, its own.
    let seconds = [
        (1400, LEN, 1400),
        (0, LEN, 1400),
        (2799, LEN, 201),
        (2800, LEN, 200),
        (1600, LEN, 1400),
        (1401, LEN, 1400),
        (1399, LEN, 1400),
        (1400, 2800, 1400),
        (1400, LEN + 1, 1400),
    ];
    for (i, second) in seconds.into_iter().enumerate() {
        let mut plan = Plan::calm(seed, 0);
        (plan.hosts, plan.link.mtu) = (3, vec![1500; 3]);
        let mut rig = Rig::new(plan, 2);
        rig.stray = Some(Vec::new());
        let mut v = Villain::new(seed);
        let villain = rig.peer(0, 2, 0);
        v.open(&mut rig);
        let into = rig.at(0).arena.take(LEN)?;
        ensure!(rig.recv(0, Some(villain), into, BAIT), "the receive is refused");
        for (offset, msg_len, len) in [(0, LEN, 1400), second, (2800, LEN, 200)] {
            v.piece(&mut rig, offset as u64, msg_len as u64, len);
        }
        let told = rig.read(0);
        let whole = rig.at(0).arena.bytes(into).iter().all(|&b| b == PAYLOAD);
        ensure!(told.is_none() || whole, "with {second:?} a message has a hole: {told:?}");
        ensure!(told.is_some() == (i == 0), "with {second:?}: {told:?}");
    }
    Ok(())
}

/// Contexts from here on belong to dealings with the villain.
const BAIT: u64 = 1 << 32;

impl Villain {
    fn new(seed: u64) -> Self {
        let rng = Rng::new(seed, 9);
        let (sid, mine, epoch, psn) = (0, 5, 0, 0);
        let (cack, victim_epoch) = (0, 0);
        Self { rng, sid, mine, epoch, psn, cack, victim_epoch, ops: Vec::new() }
    }

    fn base(&self) -> Base {
        Base {
            dst: Net::station(0),
            src: Net::station(2),
            ty: Ty::Open,
            ar: false,
            rtx: false,
            ce: false,
            crc: true,
            dst_sid: self.sid,
            psn: Psn(self.psn),
            cack: Psn(self.cack),
            grant: 64,
            plen: 0,
        }
    }

    /// Learns from what the victim sent.
    fn listen(&mut self, rig: &mut Rig) {
        let heard = std::mem::take(rig.stray.get_or_insert_default());
        for (_, bytes) in heard {
            let frame = RxFrame::new(&bytes);
            let Ok(base) = Base::parse(&frame) else { continue };
            match Op::parse(&frame, &base) {
                Ok(Op::Open(o)) => {
                    (self.sid, self.victim_epoch, self.cack) = (o.sid, o.epoch, base.psn.0);
                }
                Ok(Op::Rst(_)) => self.sid = 0,
                Ok(Op::Rndv(o)) => self.ops.push((o.src_op, o.src_gen)),
                Ok(Op::Pull(o)) => self.ops.push((o.dst_op, o.dst_gen)),
                _ => {}
            }
            if base.ty.is_reliable() && self.rng.chance(0.7) {
                self.cack = base.psn.0.wrapping_add(1);
            }
            if base.ty != Ty::Open && base.ty != Ty::Rst && self.rng.chance(0.8) {
                self.psn = base.cack.0;
            }
        }
        if self.ops.len() > 8 {
            self.ops.drain(..4);
        }
    }

    /// Opens a session if there is none.
    fn knock(&mut self, rig: &mut Rig) {
        if self.sid != 0 && self.rng.chance(0.9) {
            return;
        }
        self.epoch += u32::from(self.rng.chance(0.8));
        self.psn = self.rng.next() as u32;
        let open = OpenOp {
            sid: self.mine,
            epoch: self.epoch.max(1),
            inc: self.rng.pick(&[3, 3, 3, 4]),
            target_inc: self.rng.pick(&[0, 1, 1, 9]),
            max_frame: self.rng.pick(&[256, 1500, u32::MAX]),
            window: self.rng.pick(&[1, 256, 4096, u16::MAX]),
            grant: self.rng.pick(&[0, 16, u32::MAX]),
            ..OpenOp::default()
        };
        let bytes = wire::frame(&Base { dst_sid: 0, ..self.base() }, &Op::Open(open), &[]);
        rig.net.inject(0, &bytes);
        let t = rig.net.now;
        rig.run_to(t + 100_000);
        self.listen(rig);
    }

    /// Opens a session as anybody would.
    fn open(&mut self, rig: &mut Rig) {
        (self.epoch, self.psn) = (self.epoch + 1, self.rng.next() as u32);
        let open = OpenOp {
            sid: self.mine,
            epoch: self.epoch,
            inc: 3,
            max_frame: 1500,
            window: 256,
            grant: 16,
            ..OpenOp::default()
        };
        self.say(rig, Op::Open(open), &[]);
        self.listen(rig);
    }

    /// A piece of a message, as the next packet in order.
    fn piece(&mut self, rig: &mut Rig, offset: u64, msg_len: u64, len: usize) {
        let (dst_ep, src_ep) = (EP, EP);
        let op = MsgMOp { dst_ep, src_ep, msg_len, offset, ..MsgMOp::default() };
        self.say(rig, Op::MsgM(op), &vec![PAYLOAD; len]);
        self.psn = self.psn.wrapping_add(1);
    }

    fn say(&self, rig: &mut Rig, op: Op, payload: &[u8]) {
        let dst_sid = if matches!(op, Op::Open(_)) { 0 } else { self.sid };
        let bytes = wire::frame(&Base { dst_sid, ..self.base() }, &op, payload);
        rig.net.inject(0, &bytes);
        let t = rig.net.now;
        rig.run_to(t + 100_000);
    }

    /// A well-formed packet that nobody sane would send.
    fn nonsense(&mut self) -> Vec<u8> {
        let payload = vec![PAYLOAD; self.rng.pick(&[0, 1, 8, 300, 1400])];
        let (op, payload) = self.op(payload);
        let mut base = self.base();
        let ahead = match self.rng.below(10) {
            0..=5 => 0,
            6 => 1 + self.rng.below(3),
            7 => u64::from(self.rng.pick(&[WINDOW, 256])) - 2 + self.rng.below(5),
            8 => self.rng.below(1 << 20),
            _ => self.rng.below(300).wrapping_neg(),
        };
        base.psn = Psn(self.psn.wrapping_add(ahead as u32));
        if ahead == 0 && op.ty().is_reliable() {
            self.psn = self.psn.wrapping_add(1);
        }
        base.cack = Psn(self.cack.wrapping_add(self.rng.pick(&[0, 0, 0, 0, 1, 300, 1 << 31])));
        base.grant = self.rng.pick(&[64, 64, 0, 0xffff, 0x8000]);
        base.ar = self.rng.chance(0.3);
        base.rtx = self.rng.chance(0.1);
        wire::frame(&base, &op, &payload)
    }

    fn op(&mut self, payload: Vec<u8>) -> (Op, Vec<u8>) {
        let r = &mut self.rng;
        let (src_op, src_gen) = if self.ops.is_empty() || r.chance(0.3) {
            (r.below(64) as u32, r.below(4) as u32)
        } else {
            self.ops[r.index(self.ops.len())]
        };
        let offset = r.pick(&[0, 0, 1, 300, 700, 1400, 2800, 9000, u64::MAX - 100]);
        let msg_len = r.pick(&[0, 1, 1400, 1401, 3000, 9000, 1 << 40, u64::MAX]);
        let (dst_ep, src_ep) = (r.pick(&[EP, EP, EP, 9, u16::MAX]), r.pick(&[EP, 5]));
        let (tagged, imm) = (r.chance(0.1), r.chance(0.1).then_some(1));
        let (rx_ctx, tag) = (u8::from(src_ep == 5), if tagged { r.below(3) } else { 0 });
        let op = match r.below(16) {
            0..=3 => Op::Msg(MsgOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, len: 0 }),
            4..=7 => {
                // Mostly pieces of one message that the first credit covers, so that some begin
                // where another ended, and some do not.
                let msg_len = if r.chance(0.7) { 3000 } else { msg_len };
                let imm = imm.filter(|_| offset == 0);
                Op::MsgM(MsgMOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, msg_len, offset })
            }
            8 => {
                let op = RndvOp { src_op, src_gen, msg_len, ..RndvOp::default() };
                let op = RndvOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, ..op };
                return (Op::Rndv(op), Vec::new());
            }
            9 => {
                let (dst_op, dst_gen) = (r.below(64) as u32, r.below(4) as u32);
                let len = r.pick(&[1, 1000, 1 << 20]);
                let op = PullOp { src_op, src_gen, dst_op, dst_gen, offset, len };
                return (Op::Pull(op), Vec::new());
            }
            10 => Op::Data(DataOp { dst_op: src_op, dst_gen: src_gen, offset }),
            11 => {
                let all = [EndStatus::Ok, EndStatus::Truncated, EndStatus::Discarded];
                let status = r.pick(&all);
                return (Op::End(EndOp { src_op, src_gen, status }), Vec::new());
            }
            12 => {
                let newest = Psn(self.cack.wrapping_add(r.pick(&[0, 1, 1000])));
                let count = r.pick(&[1, 4, 64]);
                let delay = r.next() as u16;
                let mut words = [0; AckOp::WORDS_MAX];
                words[..count].fill_with(|| r.next() & r.next());
                let count = count as u8;
                let op = AckOp { delay, newest, count, dups: 0, resent: false };
                return (Op::Ack(op, words), Vec::new());
            }
            13 => {
                let all = [NackReason::UnknownType, NackReason::NoEndpoint, NackReason::Malformed];
                return (Op::Nack(NackOp { reason: r.pick(&all) }), Vec::new());
            }
            14 if r.chance(0.1) => return (self.reset(), Vec::new()),
            14 => return (Op::Pack(PackOp { count: r.pick(&[1, 2, 255]) }), payload),
            _ => {
                return (
                    Op::Nop(NopOp {
                        units: r.pick(&[0, 1, u32::MAX]),
                        cuts: r.chance(0.5),
                        drops: r.pick(&[None, Some(0), Some(1), Some(u16::MAX)]),
                    }),
                    Vec::new(),
                );
            }
        };
        (op, payload)
    }

    fn reset(&mut self) -> Op {
        let r = &mut self.rng;
        Op::Rst(RstOp {
            echo_sid: r.pick(&[self.mine, 0]),
            echo_psn: Psn(self.cack),
            life: r.pick(&[barewire_dataplane::wire::life_of(3), 4, 0]),
            victim_inc: r.pick(&[1, 0, 9]),
            victim_epoch: r.pick(&[self.victim_epoch, 0, 77]),
            reason: RstReason::Closed,
            versions: wire::VERSIONS,
        })
    }
}
