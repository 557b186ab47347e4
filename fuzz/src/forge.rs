//! Frames that nobody honest sends, made from what was overheard of a live session.

use std::ops::Range;

use barewire_dataplane::psn::Psn;
use barewire_dataplane::types::GroupAddr;
use barewire_dataplane::wire::{
    self, AckOp, AtomicOp, BASE_LEN, Base, DataOp, EndOp, EndStatus, Host, McastOp, MsgMOp, MsgOp,
    NackOp, NackReason, NopOp, Op, OpenOp, PackOp, ProbeOp, PullOp, ReadOp, RemoteRange, RespOp,
    RndvOp, RstOp, RstReason, TRAILER_LEN, Ty, WhoOp, WriteOp,
};
use barewire_driver::frame::RxFrame;
use barewire_driver::port::{MacAddr, Station};

use crate::input::Input;

/// Key of the region that peers may access.
pub(crate) const REGION_KEY: u64 = 17;

/// What somebody who hears everything that a node says to one station knows of their session.
#[derive(Clone, Debug, Default)]
pub(crate) struct Overheard {
    /// The node's name of the session, and the station's.
    sid: u32,
    remote_sid: u32,
    epoch: u32,
    /// The number that the node expects next, and that it will use next.
    next: u32,
    sent: u32,
    grant: u16,
    /// Operations of the node: announced sends, pulls, reads.
    ops: Vec<(u32, u32)>,
    /// The station's first requests and its last, from the operation header on: of such the node
    /// remembers parts.
    asked: Vec<(Ty, Vec<u8>)>,
    /// The node's packets carry a checksum.
    crc: bool,
    /// The node has refused a packet, and waits for what takes its place.
    refused: bool,
}

impl Overheard {
    /// Learns from a frame that the node sent to the station.
    pub(crate) fn listen(&mut self, bytes: &[u8]) {
        let frame = RxFrame::new(bytes);
        let Ok(base) = Base::parse(&frame) else { return };
        if base.ty == Ty::Rst {
            self.sid = 0;
            return;
        }
        if base.dst_sid != 0 {
            self.remote_sid = base.dst_sid;
        }
        // A NACK has the number of what it refuses.
        let own = base.ty != Ty::Nack && self.sent.wrapping_sub(base.psn.0) as i32 <= 0;
        if base.ty == Ty::Open || own {
            self.sent = base.psn.0.wrapping_add(u32::from(base.ty.is_reliable()));
        }
        if base.ty != Ty::Open {
            self.next = base.cack.0;
        }
        self.crc = base.crc;
        match Op::parse(&frame, &base) {
            Ok(Op::Open(o)) => (self.sid, self.epoch) = (o.sid, o.epoch),
            Ok(Op::Rndv(o)) => self.ops.push((o.src_op, o.src_gen)),
            Ok(Op::Pull(o)) => self.ops.push((o.dst_op, o.dst_gen)),
            Ok(Op::Read(o)) => self.ops.push((o.dst_op, o.dst_gen)),
            Ok(Op::Atomic(o)) => self.ops.push((o.dst_op, o.dst_gen)),
            Ok(Op::Nack(_)) => self.refused = true,
            _ => {}
        }
        if self.ops.len() > 8 {
            self.ops.remove(0);
        }
    }

    /// Learns from a frame of the station that is about to reach the node.
    pub(crate) fn hear(&mut self, bytes: &[u8]) {
        let Ok(base) = Base::parse(&RxFrame::new(bytes)) else { return };
        if base.ty == Ty::Open || base.ty.is_reliable() && base.psn.0 == self.next {
            self.next = base.psn.0.wrapping_add(u32::from(base.ty.is_reliable()));
        }
        self.note_asked(&base, bytes);
    }

    fn note_asked(&mut self, base: &Base, bytes: &[u8]) {
        if !matches!(base.ty, Ty::Write | Ty::Read | Ty::Atomic) {
            return;
        }
        let end = bytes.len() - if base.crc { TRAILER_LEN } else { 0 };
        self.asked.truncate(3);
        self.asked.push((base.ty, bytes[BASE_LEN..end].to_vec()));
    }

    /// A frame for the node as if from the station, chosen by `input`.
    pub(crate) fn forge(&mut self, input: &mut Input<'_>, to: Station, from: Station) -> Vec<u8> {
        let how = input.byte();
        let ahead = match how % 16 {
            0..=9 => 0,
            10..=12 => u32::from(how >> 4),
            13 => 252 + u32::from(how >> 4) % 8,
            14 => u32::from(how >> 4).wrapping_neg(),
            _ => u32::from(how) << 20,
        };
        // Without a name of the session nothing but an OPEN goes far.
        let (op, payload) = if self.sid == 0 {
            (Some(Op::Open(self.open(input))), Vec::new())
        } else if std::mem::take(&mut self.refused) && !input.chance(4) {
            (Some(Op::Nop(NopOp { units: 0, cuts: false, drops: None })), Vec::new())
        } else {
            self.op(input)
        };
        let bits = input.byte();
        let acked = if bits & 0x30 == 0x30 {
            input.pick(&[u32::MAX, 1 << 31, 39, 300])
        } else {
            u32::from(bits & 1)
        };
        let cack = self.sent.wrapping_sub(acked);
        let grant = self.grant.wrapping_add(if bits & 0xc == 0 { 0x7fff } else { 16 });
        let to_group = matches!(op, Some(Op::Mcast(_)));
        let base = Base {
            dst: if to_group { Station::BROADCAST } else { to },
            src: from,
            ty: Ty::Nop,
            ar: bits & 1 != 0,
            rtx: bits & 2 != 0,
            ce: bits & 7 == 5,
            crc: self.crc != (bits & 0x3f == 4),
            dst_sid: if matches!(op, Some(Op::Open(o)) if o.echo_sid == 0) { 0 } else { self.sid },
            psn: Psn(self.next.wrapping_add(ahead)),
            cack: Psn(cack),
            grant,
            plen: 0,
        };
        // Unless a real frame says otherwise, it was taken.
        self.next = self.next.wrapping_add(u32::from(ahead == 0));
        self.grant = grant;
        let mut bytes = match op {
            Some(op) => wire::frame(&base, &op, &payload),
            None if input.chance(2) => self.like_before(&base, input),
            None => raw(&base, input, &payload, &self.ops),
        };
        if bits & 0xc0 == 0xc0 {
            change(&mut bytes, input);
        }
        if let Ok(base) = Base::parse(&RxFrame::new(&bytes)) {
            self.note_asked(&base, &bytes);
        }
        bytes
    }

    fn handle(&self, input: &mut Input<'_>) -> (u32, u32) {
        let n = usize::from(input.byte());
        if self.ops.is_empty() || n.is_multiple_of(8) {
            (n as u32 / 8 % 4, 1 + n as u32 / 64)
        } else {
            self.ops[n % self.ops.len()]
        }
    }

    /// A request like one before, or as one might be kept that never was, but for some of what it
    /// says: with such is compared what a target remembers.
    fn like_before(&self, base: &Base, input: &mut Input<'_>) -> Vec<u8> {
        let which = usize::from(input.byte());
        let (ty, mut op) = match self.asked.get(which % 8) {
            Some((ty, op)) => (*ty, op.clone()),
            None => {
                let ty = input.pick(&[Ty::Atomic, Ty::Atomic, Ty::Write, Ty::Read]);
                let mut op = vec![0; ty.op_len()];
                op[..8].fill(input.pick(&[0xff, 0]));
                (ty, op)
            }
        };
        for _ in 0..input.byte() % 4 {
            let field = &FIELDS[usize::from(input.byte()) % FIELDS.len()];
            let Some(field) = op.get_mut(field.clone()) else { continue };
            match input.byte() {
                0..64 => field.fill(0),
                64..128 => field.fill(0xff),
                128..160 => field[0] = field[0].wrapping_add(1),
                n => field[usize::from(n) % field.len()] ^= 1 << (n % 8),
            }
        }
        let len = op.len();
        op.resize(input.pick(&[len, len, len + 1, len + 8, ty.op_len()]), 0x77);
        let plen = (op.len() - ty.op_len()) as u16;
        let plen = input.pick(&[plen, plen, plen, plen, 8, plen.wrapping_sub(8)]);
        whole(&Base { plen, ..*base }, ty as u8, &op)
    }

    /// An operation header, and a payload that fits it more or less; `None` for the types that
    /// [`raw`] makes.
    fn op(&self, input: &mut Input<'_>) -> (Option<Op>, Vec<u8>) {
        // The numbers of others stay when one is added.
        let ty = match input.byte() {
            u8::MAX => 28,
            0xfe => 29,
            n => n % 28,
        };
        let plen = input.pick(&[0, 1, 8, 200, 257, 1000]);
        let payload = vec![0x77; if matches!(ty, 6..=9 | 11..=15) { 0 } else { plen }];
        let (src_op, src_gen) = self.handle(input);
        let offset = input.pick(&[0, 0, 1, 200, 1000, 4096, u64::MAX - 2000]);
        let tagged = input.chance(3);
        let dst_ep = input.pick(&[0, 0, 1, 1, 2, u16::MAX]);
        let src_ep = input.pick(&[0, 1, 5]);
        let msg = MsgOp {
            dst_ep,
            rx_ctx: u8::from(src_ep == 5),
            src_ep,
            tagged,
            imm: input.chance(6).then_some(1),
            tag: if tagged { input.pick(&[1, 2]) } else { 0 },
            len: 0,
        };
        let MsgOp { rx_ctx, imm, tag, .. } = msg;
        let msg_len = match input.byte() {
            n @ 0..128 => n.into(),
            n @ 128..250 => u64::from(n) << (n % 8),
            n => u64::MAX >> (n % 3 * 20),
        };
        let op = match ty {
            0..=2 => Op::Msg(msg),
            3..=5 => {
                let msg_len = if offset == 0 { msg_len.max(plen as u64) } else { msg_len };
                let imm = imm.filter(|_| offset == 0);
                Op::MsgM(MsgMOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, msg_len, offset })
            }
            6 | 7 => {
                let names = RndvOp { src_op, src_gen, msg_len, ..RndvOp::default() };
                Op::Rndv(RndvOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, ..names })
            }
            8 => {
                let (dst_op, dst_gen) = (u32::from(tagged), 1);
                let len = (msg_len as u32).clamp(1, 1 << 20);
                Op::Pull(PullOp { src_op, src_gen, dst_op, dst_gen, offset, len })
            }
            9 => {
                let all = [EndStatus::Ok, EndStatus::Truncated, EndStatus::Discarded];
                let status = input.pick(&[all[0], all[1], all[2], EndStatus::Closed]);
                Op::End(EndOp { src_op, src_gen, status })
            }
            10 => Op::Data(DataOp { dst_op: src_op, dst_gen: src_gen, offset }),
            11 => Op::Nop(NopOp {
                units: input.pick(&[0, 1, 8, u32::MAX]),
                cuts: input.pick(&[false, true]),
                drops: input.pick(&[None, Some(0), Some(1), Some(u16::MAX)]),
            }),
            12 => Op::Nack(NackOp { reason: nack_reason(input) }),
            13 => self.ack(input),
            14 => Op::Rst(self.rst(input)),
            15 => Op::Open(self.open(input)),
            16 | 17 => return pack(input, &msg),
            18..=25 => return one_sided(input, ty, (dst_ep, src_ep), (src_op, src_gen)),
            28 => Op::Who(who(input)),
            29 => Op::Mcast(mcast(input, (src_ep, imm))),
            27 => Op::Probe(ProbeOp { heard: input.pick(&[0, 256, 1500, u16::MAX]) }),
            _ => return (None, payload),
        };
        (Some(op), payload)
    }

    fn ack(&self, input: &mut Input<'_>) -> Op {
        let newest = Psn(self.sent.wrapping_sub(u32::from(input.byte() % 32)));
        let few = [input.u64(), u64::from(input.byte())];
        let delay = u16::from(input.byte()) * 257;
        let (count, dups) = (input.byte() % 65, input.byte());
        let words = std::array::from_fn(|i| if i < count.into() { few[i % 2] } else { 0 });
        Op::Ack(AckOp { delay, newest, count, dups, resent: dups & 1 == 1 }, words)
    }

    fn rst(&self, input: &mut Input<'_>) -> RstOp {
        let knows = input.chance(3);
        RstOp {
            echo_sid: if knows { self.remote_sid } else { 0 },
            echo_psn: Psn(self.sent),
            life: wire::life_of(input.pick(&[101, 102, 103])),
            victim_inc: input.pick(&[0, 101, 102]),
            victim_epoch: self.epoch,
            reason: input.pick(&[
                RstReason::Closed,
                RstReason::UnknownSession,
                RstReason::WrongIncarnation,
                RstReason::Version,
            ]),
            versions: wire::VERSIONS,
        }
    }

    fn open(&self, input: &mut Input<'_>) -> OpenOp {
        let answers = input.chance(2);
        // A challenge names no session of its own.
        let names = !answers || self.sid == 0 || input.chance(3);
        OpenOp {
            sid: if names { input.pick(&[7, 8, self.remote_sid.max(1)]) } else { 0 },
            epoch: if names { 1 + u32::from(input.byte() % 8) } else { 0 },
            inc: input.pick(&[101, 102, 103]),
            target_inc: input.pick(&[0, 101, 102, 103]),
            echo_sid: if answers { self.sid } else { 0 },
            echo_epoch: if answers && self.sid != 0 { self.epoch } else { 0 },
            caps: 0,
            max_frame: input.pick(&[256, 257, 1500, u32::MAX]),
            window: input.pick(&[1, 256]),
            minor: 0,
            grant: input.pick(&[0, 8, 4096, u32::MAX]),
            cookie: if names { input.pick(&[0, 0, 1, u64::MAX]) } else { 1 },
            frame: input.pick(&[0, 86, 256, u16::MAX]),
            versions: wire::VERSIONS,
        }
    }
}

fn nack_reason(input: &mut Input<'_>) -> NackReason {
    input.pick(&[
        NackReason::NoEndpoint,
        NackReason::UnknownType,
        NackReason::Malformed,
        NackReason::Overdrawn,
    ])
}

/// WRITE, READ, ATOMIC or RESP.
fn one_sided(
    input: &mut Input<'_>,
    ty: u8,
    (dst_ep, src_ep): (u16, u16),
    (dst_op, dst_gen): (u32, u32),
) -> (Option<Op>, Vec<u8>) {
    let bits = input.byte();
    let range = RemoteRange {
        dst_ep,
        rx_ctx: u8::from(src_ep == 5),
        src_ep,
        seq: u16::from(bits >> 6),
        last: bits & 1 == 0,
        rkey: input.pick(&[REGION_KEY, REGION_KEY, REGION_KEY, 1, 2]),
        addr: input.pick(&[0, 8, 100, 4088, 4096, u64::MAX - 9000]),
    };
    let len = input.pick(&[0, 8, 16, 100, 1000]);
    let offset = input.pick(&[0, 8, 1000, 1 << 31]);
    let imm = (bits & 2 != 0 && range.last).then_some(1);
    let op = match ty {
        18 | 19 => {
            let left = len as u64 + input.pick(&[0, 0, 8, 3000]);
            let answer = bits & 4 != 0;
            Op::Write(WriteOp { range, imm, answer, dst_op, dst_gen, left })
        }
        20 | 21 => {
            let len = input.pick(&[0, 1, 200, 4096, 1 << 20]);
            let offset = u64::from(offset);
            let (end, answer) = (bits & 4 != 0, bits & 8 != 0);
            let op = ReadOp { range, end, answer, dst_op, dst_gen, offset, len };
            return (Some(Op::Read(op)), Vec::new());
        }
        22..=24 => Op::Atomic(AtomicOp {
            range,
            imm,
            end: bits & 4 != 0,
            fetch: bits & 8 != 0,
            compare: bits & 16 != 0,
            tagged: bits & 0xe0 == 0x20,
            void: bits & 0xe0 == 0x40,
            answer: bits & 0xe8 == 0x80,
            dst_op,
            dst_gen,
            count: (len / 8) as u16 / if bits & 16 != 0 { 2 } else { 1 },
            op: input.byte() % 24,
            ty: input.pick(&[7, 7, 7, 6, 3, 15, 40]),
            offset,
        }),
        _ => {
            let failed = bits & 24 == 8;
            let status = failed.then(|| nack_reason(input));
            let payload = if failed { Vec::new() } else { vec![0x66; len] };
            return (Some(Op::Resp(RespOp { dst_op, dst_gen, offset, status })), payload);
        }
    };
    (Some(op), vec![0x77; len])
}

/// A message to a group, of which the node is a member or not.
fn mcast(input: &mut Input<'_>, (src_ep, imm): (u16, Option<u64>)) -> McastOp {
    let mac = MacAddr(input.pick(&[[1, 0, 0x5e, 0, 0, 1], [3, 0, 0, 0, 0, 1]]));
    let group = GroupAddr::new(mac, 1).expect("a group address");
    McastOp { group, src_ep, inc: input.pick(&[1, 101, 102]), imm }
}

/// A question, an answer or an announcement.
fn who(input: &mut Input<'_>) -> WhoOp {
    let here = input.pick(&[false, true]);
    WhoOp {
        nonce: input.pick(&[1, 2, u64::MAX]) * u64::from(!here || input.pick(&[false, true])),
        here,
        host: input.pick(&[Host::V4([10, 0, 0, 1]), Host::name("fuzz"), Host::V6([0xff; 16])]),
        service: u16::from(here) + input.pick(&[0, 1, 7470]),
        versions: wire::VERSIONS,
    }
}

/// A few messages in one packet, and a count that need not be theirs.
fn pack(input: &mut Input<'_>, msg: &MsgOp) -> (Option<Op>, Vec<u8>) {
    let records = 1 + u16::from(input.byte() % 4);
    let mut bytes = Vec::new();
    for _ in 0..records {
        let len = input.pick(&[0, 1, 40, 300]);
        let dst_ep = input.pick(&[msg.dst_ep, 0, 1, 9]);
        let at = bytes.len();
        bytes.resize(at + wire::record_len(msg.imm.is_some(), len), 0);
        MsgOp { dst_ep, len: len as u16, ..*msg }.emit(&mut bytes[at..]);
    }
    let count = input.pick(&[records, records, records, records + 1, 255]);
    (Some(Op::Pack(PackOp { count })), bytes)
}

/// A frame of any type from 0 to 31 with a header of words that something here might mean.
fn raw(base: &Base, input: &mut Input<'_>, payload: &[u8], ops: &[(u32, u32)]) -> Vec<u8> {
    let ty = input.byte() % 32;
    let mut rest = Vec::new();
    for _ in 0..input.byte() % 13 {
        let word = match input.byte() {
            0 => u64::MAX,
            n @ 1..32 => ops
                .get(usize::from(n) % 8)
                .map_or(1, |&(op, generation)| u64::from(generation) << 32 | u64::from(op)),
            n @ 32..64 => u64::from(n - 32) << (n % 8 * 8),
            n => n.into(),
        };
        rest.extend_from_slice(&word.to_le_bytes());
    }
    rest.extend_from_slice(payload);
    whole(&Base { plen: payload.len() as u16, ..*base }, ty, &rest)
}

/// A frame of type `ty`, whatever its base says, with `rest` behind the base, and a checksum if
/// that says so.
fn whole(base: &Base, ty: u8, rest: &[u8]) -> Vec<u8> {
    let mut head = [0; BASE_LEN];
    base.emit(&mut head);
    head[PROLOGUE] = head[PROLOGUE] & 0xe0 | ty;
    let mut bytes = head.to_vec();
    bytes.extend_from_slice(rest);
    if base.crc {
        bytes.extend_from_slice(&[0; TRAILER_LEN]);
        mend(&mut bytes);
    }
    bytes
}

/// Where version and type stand.
const PROLOGUE: usize = 14;

/// What the header of a request says, as it stands there: endpoints, flags, receive context,
/// number, key, address, slot and its generation or what is left; of an ATOMIC count, operation,
/// type and offset, of a READ its length; and what comes first.
const FIELDS: [Range<usize>; 16] = [
    0..2,
    2..4,
    4..5,
    5..6,
    6..8,
    8..16,
    16..24,
    24..28,
    28..32,
    32..34,
    34..35,
    35..36,
    36..40,
    40..44,
    8..9,
    0..8,
];

/// Changes a byte behind the addresses, and puts the checksum right.
pub(crate) fn change(bytes: &mut [u8], input: &mut Input<'_>) {
    let (at, by) = (usize::from(input.byte()), input.byte());
    let len = bytes.len();
    if len <= PROLOGUE {
        return;
    }
    let at = PROLOGUE + at % (len - PROLOGUE);
    bytes[at] = if by.is_multiple_of(4) { by.wrapping_mul(85) } else { bytes[at] ^ by };
    mend(bytes);
}

/// Puts the checksum right, if the frame has one, which then stands last.
fn mend(bytes: &mut [u8]) {
    if bytes.len() < BASE_LEN + TRAILER_LEN || bytes[PROLOGUE + 1] & 3 == 0 {
        return;
    }
    let end = bytes.len() - TRAILER_LEN;
    let crc = wire::crc_of_head(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
}
