//! Tests of the headers together: any packet, every prefix, every flipped bit, every refusal, and
//! `docs/wire.md` itself.

mod doc;

use barewire_driver::frame::RxFrame;
use barewire_driver::port::{MacAddr, Station};
use proptest::prelude::*;

use super::*;
use crate::psn::Psn;
use crate::types::{GroupAddr, INCARNATION_MAX};

/// Base and operation header of a frame, if it is valid.
fn parse(frame: &[u8]) -> Result<(Base, Op), WireError> {
    let rx = RxFrame::new(frame);
    let base = Base::parse(&rx)?;
    Ok((base, Op::parse(&rx, &base)?))
}

fn a_base() -> Base {
    Base {
        dst: Station::at([2, 0, 0, 0, 0, 1]),
        src: Station::at([2, 0, 0, 0, 0, 2]),
        ty: Ty::Nop,
        ar: false,
        rtx: false,
        ce: false,
        crc: false,
        dst_sid: 0x0010_0003,
        psn: Psn(u32::MAX),
        cack: Psn(7),
        grant: 64,
        plen: 0,
    }
}

/// A PACK's payload. Records whose message ends in the middle of a word get zero padding.
fn records(ops: &[(MsgOp, Vec<u8>)]) -> Vec<u8> {
    let mut payload = Vec::new();
    for (op, message) in ops {
        let start = payload.len();
        let mut head = [0; 24];
        let len = op.emit(&mut head);
        payload.extend_from_slice(&head[..len]);
        payload.extend_from_slice(message);
        payload.resize(start + record_len(op.imm.is_some(), message.len()), 0);
    }
    payload
}

/// One valid packet of each type, with its payload; the PACK has a record with and one without
/// remote CQ data.
fn one_of_each() -> Vec<(Base, Op, Vec<u8>)> {
    let msg =
        MsgOp { dst_ep: 1, rx_ctx: 0, src_ep: 2, tagged: true, imm: Some(9), tag: 0x1234, len: 0 };
    let long = MsgMOp { imm: Some(3), msg_len: 100, offset: 0, ..MsgMOp::default() };
    let two = [
        (MsgOp { len: 3, ..msg }, b"abc".to_vec()),
        (MsgOp { imm: None, len: 8, ..msg }, b"12345678".to_vec()),
    ];
    let open = OpenOp {
        sid: 5,
        epoch: 1,
        inc: 0xfeed,
        echo_sid: 0x0010_0003,
        echo_epoch: 4,
        max_frame: 1500,
        window: 256,
        grant: 64,
        ..OpenOp::default()
    };
    let rst = RstOp {
        echo_sid: 1,
        echo_psn: Psn(2),
        life: 3,
        victim_inc: 4,
        victim_epoch: 5,
        reason: RstReason::Closed,
        versions: VERSIONS,
    };
    let pull = PullOp { src_op: 1, src_gen: 2, dst_op: 3, dst_gen: 4, offset: 5, len: 6 };
    let ack = AckOp { delay: 1, newest: Psn(2), count: 2, dups: 5, resent: true };
    let words = std::array::from_fn(|i| [3, u64::MAX].get(i).copied().unwrap_or(0));
    let end = EndOp { src_op: 1, src_gen: 2, status: EndStatus::Truncated };
    let mut all = vec![
        (Op::Ack(ack, words), vec![]),
        (Op::Msg(msg), b"hello".to_vec()),
        (Op::Pack(PackOp { count: 2 }), records(&two)),
        (Op::MsgM(long), vec![7; 50]),
        (Op::Rndv(RndvOp { imm: Some(1), msg_len: 1 << 33, ..RndvOp::default() }), vec![]),
        (Op::Pull(pull), vec![]),
        (Op::Data(DataOp { dst_op: 1, dst_gen: 2, offset: 3 }), vec![1, 2, 3]),
        (Op::End(end), vec![]),
        (Op::Nop(NopOp { units: 3, cuts: true, drops: None }), vec![]),
        (Op::Nack(NackOp { reason: NackReason::NoEndpoint }), vec![]),
        (Op::Who(a_who()), vec![]),
        (Op::Probe(ProbeOp { heard: 1500 }), vec![]),
        (Op::Ping, vec![]),
        (Op::Rst(rst), vec![]),
        (Op::Open(open), vec![]),
    ];
    all.extend(one_sided());
    assert!(all.iter().map(|(op, _)| op.ty()).eq(Ty::ALL));
    all.into_iter().map(|(op, payload)| (a_base(), op, payload)).collect()
}

fn a_who() -> WhoOp {
    WhoOp { nonce: 3, here: true, host: Host::V4([10, 1, 1, 1]), service: 7, versions: VERSIONS }
}

fn one_sided() -> Vec<(Op, Vec<u8>)> {
    let range =
        RemoteRange { dst_ep: 1, rx_ctx: 7, src_ep: 2, seq: 3, last: true, rkey: 4, addr: 5 };
    let atomic = AtomicOp {
        range,
        imm: Some(6),
        end: true,
        fetch: true,
        compare: true,
        count: 1,
        op: 12,
        ty: 7,
        ..AtomicOp::default()
    };
    vec![
        (
            Op::Write(WriteOp {
                range,
                imm: Some(4),
                answer: true,
                dst_op: 1,
                dst_gen: 2,
                left: 5,
            }),
            b"bytes".to_vec(),
        ),
        (
            Op::Read(ReadOp {
                range,
                end: true,
                answer: false,
                dst_op: 1,
                dst_gen: 2,
                offset: 3,
                len: 4,
            }),
            vec![],
        ),
        (Op::Atomic(atomic), vec![9; 16]),
        (Op::Resp(RespOp { dst_op: 1, dst_gen: 2, offset: 8, status: None }), vec![1; 8]),
        (Op::Mcast(a_mcast()), b"to all".to_vec()),
    ]
}

fn a_mcast() -> McastOp {
    let group = GroupAddr::new(MacAddr([1, 0, 0x5e, 1, 2, 3]), 7471).unwrap();
    McastOp { group, src_ep: 2, inc: 0xfeed, imm: Some(9) }
}

prop_compose! {
    fn any_base()(
        macs in any::<([u8; 6], [u8; 6])>(),
        numbers in (any::<u16>(), 0..Station::EVERY),
        (ar, rtx, crc) in any::<(bool, bool, bool)>(),
        dst_sid in 1..=u32::MAX,
        (psn, cack, grant) in any::<(u32, u32, u16)>(),
    ) -> Base {
        let mut src = macs.1;
        src[0] = src[0] & !1 | 2;
        let dst = Station { number: numbers.0, ..Station::at(macs.0) };
        let src = Station { number: numbers.1, ..Station::at(src) };
        let (psn, cack) = (Psn(psn), Psn(cack));
        Base { dst, src, ty: Ty::Nop, ar, rtx, ce: false, crc, dst_sid, psn, cack, grant, plen: 0 }
    }
}

prop_compose! {
    fn any_msg()(
        (dst_ep, rx_ctx, src_ep) in any::<(u16, u8, u16)>(),
        tag in any::<Option<u64>>(),
        imm in any::<Option<u64>>(),
    ) -> MsgOp {
        let (tagged, tag) = (tag.is_some(), tag.unwrap_or(0));
        MsgOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, len: 0 }
    }
}

fn any_bytes(least: usize) -> impl Strategy<Value = Vec<u8>> {
    proptest::collection::vec(any::<u8>(), least..200)
}

fn any_pack() -> impl Strategy<Value = (Op, Vec<u8>)> {
    proptest::collection::vec((any_msg(), any_bytes(0)), 1..20).prop_map(|mut all| {
        for (op, message) in &mut all {
            op.len = message.len() as u16;
        }
        (Op::Pack(PackOp { count: all.len() as u16 }), records(&all))
    })
}

/// Any valid operation header and payload.
fn any_op() -> impl Strategy<Value = (Op, Vec<u8>)> {
    let none = |op| (op, Vec::new());
    prop_oneof![
        any::<(u16, u32, u64, u8)>().prop_map(move |(delay, newest, word, n)| {
            let (count, newest) = (n % 65, Psn(newest));
            let (dups, resent) = (count, count & 1 == 1);
            let sent = |i| if i < usize::from(count) { word.rotate_left(i as u32) } else { 0 };
            let words = std::array::from_fn(sent);
            none(Op::Ack(AckOp { delay, newest, count, dups, resent }, words))
        }),
        (any_msg(), any_bytes(0)).prop_map(|(op, payload)| (Op::Msg(op), payload)),
        any_pack(),
        (any_msg(), any_bytes(1), any::<(u32, u32)>()).prop_map(|(op, payload, (at, more))| {
            let MsgOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, .. } = op;
            let offset = if imm.is_some() { 0 } else { u64::from(at) << 8 };
            let msg_len = offset + payload.len() as u64 + u64::from(more);
            (
                Op::MsgM(MsgMOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, msg_len, offset }),
                payload,
            )
        }),
        (any_msg(), any::<(u64, u32, u32)>()).prop_map(move |(op, (msg_len, src_op, src_gen))| {
            let MsgOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, .. } = op;
            none(Op::Rndv(RndvOp {
                dst_ep,
                rx_ctx,
                src_ep,
                tagged,
                imm,
                tag,
                msg_len,
                src_op,
                src_gen,
            }))
        }),
        (any::<(u32, u32, u32, u32)>(), any::<u32>(), 1..=PULL_MAX).prop_map(
            move |((src_op, src_gen, dst_op, dst_gen), at, len)| {
                let offset = u64::from(at) << 16;
                none(Op::Pull(PullOp { src_op, src_gen, dst_op, dst_gen, offset, len }))
            }
        ),
        (any::<(u32, u32, u32)>(), any_bytes(1)).prop_map(|((dst_op, dst_gen, at), payload)| {
            (Op::Data(DataOp { dst_op, dst_gen, offset: u64::from(at) << 16 }), payload)
        }),
        any::<(u32, u32, u16)>().prop_map(move |(src_op, src_gen, status)| {
            let status = (status % 4).try_into().unwrap();
            none(Op::End(EndOp { src_op, src_gen, status }))
        }),
        any::<(u32, bool, Option<u16>)>()
            .prop_map(move |(units, cuts, drops)| none(Op::Nop(NopOp { units, cuts, drops }))),
        (1..=9_u16).prop_map(move |r| none(Op::Nack(NackOp { reason: r.try_into().unwrap() }))),
        any::<u16>().prop_map(move |heard| none(Op::Probe(ProbeOp { heard }))),
        (any::<(bool, [u8; 16], u64)>(), 1..=u64::MAX, 1..=u16::MAX, 0..3_u8).prop_map(
            move |((here, ip, hash), nonce, service, kind)| {
                let host = match kind {
                    0 => Host::Name(hash),
                    1 => Host::V4([ip[0], ip[1], ip[2], ip[3]]),
                    _ => Host::V6(ip),
                };
                none(Op::Who(WhoOp { nonce, here, host, service, versions: VERSIONS }))
            }
        ),
        Just(none(Op::Ping)),
        any_rst().prop_map(move |op| none(Op::Rst(op))),
        any_open().prop_map(move |op| none(Op::Open(op))),
        any_one_sided(),
        any_mcast(),
    ]
}

fn any_mcast() -> impl Strategy<Value = (Op, Vec<u8>)> {
    let names = (any::<([u8; 6], u16, u16)>(), 1..=INCARNATION_MAX, any::<Option<u64>>());
    (names, any_bytes(0)).prop_map(|(((mut mac, number, src_ep), inc, imm), payload)| {
        mac[0] |= 1;
        let group = GroupAddr::new(MacAddr(mac), number).unwrap_or(a_mcast().group);
        (Op::Mcast(McastOp { group, src_ep, inc, imm }), payload)
    })
}

prop_compose! {
    fn any_range()(
        (dst_ep, rx_ctx, src_ep, seq, last) in any::<(u16, u8, u16, u16, bool)>(),
        (rkey, addr) in any::<(u64, u64)>(),
    ) -> RemoteRange {
        RemoteRange { dst_ep, rx_ctx, src_ep, seq, last, rkey, addr: addr >> 1 }
    }
}

/// WRITE, READ, ATOMIC and RESP.
fn any_one_sided() -> impl Strategy<Value = (Op, Vec<u8>)> {
    let names = || any::<(u32, u32)>();
    prop_oneof![
        (any_range(), any::<(Option<u64>, bool)>(), names(), any_bytes(0), any::<u32>()).prop_map(
            |(range, (imm, answer), (dst_op, dst_gen), payload, more)| {
                let (imm, answer) = (imm.filter(|_| range.last), answer && range.last);
                let left = payload.len() as u64 + u64::from(more);
                let op = WriteOp { range, imm, answer, dst_op, dst_gen, left };
                (Op::Write(op), payload)
            }
        ),
        (any_range(), names(), any::<(bool, bool, u32)>(), 0..=READ_MAX).prop_map(
            |(range, (dst_op, dst_gen), (end, answer, at), len)| {
                let answer = answer && range.last && end;
                let offset = if answer { 0 } else { u64::from(at) << 16 };
                let len = if answer { len.clamp(1, READ_ANSWER_MAX) } else { len };
                (Op::Read(ReadOp { range, end, answer, dst_op, dst_gen, offset, len }), vec![])
            }
        ),
        (
            any_range(),
            any::<(Option<u64>, bool)>(),
            any::<(bool, bool, bool, bool, bool)>(),
            names(),
            any::<(u16, u8, u8, u32)>(),
            any_bytes(0),
        )
            .prop_map(
                |(range, (imm, answer), flags, (dst_op, dst_gen), numbers, payload)| {
                    let (imm, answer) = (imm.filter(|_| range.last), answer && range.last);
                    let (end, fetch, compare, tagged, void) = flags;
                    let (count, op, ty, offset) = numbers;
                    let op = AtomicOp {
                        range,
                        imm,
                        end,
                        fetch,
                        compare,
                        tagged,
                        void,
                        answer: answer && !fetch,
                        dst_op,
                        dst_gen,
                        count,
                        op,
                        ty,
                        offset,
                    };
                    (Op::Atomic(op), payload)
                }
            ),
        (names(), any::<u32>(), proptest::option::of(1..=9_u16), any_bytes(0)).prop_map(
            |((dst_op, dst_gen), offset, status, payload)| {
                let status = status.map(|r| r.try_into().unwrap());
                (Op::Resp(RespOp { dst_op, dst_gen, offset, status }), payload)
            }
        ),
    ]
}

prop_compose! {
    fn any_rst()(
        (echo_sid, echo_psn) in any::<(u32, u32)>(),
        (victim_inc, victim_epoch) in any::<(u64, u32)>(),
        versions in any_versions(),
        inc in 1..=u64::MAX,
        reason in 1..=5_u16,
    ) -> RstOp {
        let (echo_psn, reason) = (Psn(echo_psn), reason.try_into().unwrap());
        RstOp { echo_sid, echo_psn, life: inc, victim_inc, victim_epoch, reason, versions }
    }
}

prop_compose! {
    fn any_versions()(a in 1..8_u8, b in 1..8_u8) -> Versions {
        Versions { min: a.min(b), max: a.max(b) }
    }
}

prop_compose! {
    fn any_open()(
        (mut sid, mut epoch, inc) in (1..=u32::MAX, 1..=u32::MAX, 1..=INCARNATION_MAX),
        target_inc in 0..=INCARNATION_MAX,
        (caps, minor, grant, cookie) in any::<(u32, u16, u32, u64)>(),
        (frame, versions, challenge) in (any::<u16>(), any_versions(), any::<bool>()),
        echo in proptest::option::of((1..=u32::MAX, 1..=u32::MAX)),
        (max_frame, window) in (MAX_FRAME_MIN..=u32::MAX, 1..=u16::MAX),
    ) -> OpenOp {
        let (echo_sid, echo_epoch) = echo.unwrap_or((0, 0));
        if challenge && echo.is_some() && cookie != 0 {
            (sid, epoch) = (0, 0);
        }
        OpenOp {
            sid, epoch, inc, target_inc, echo_sid, echo_epoch, caps, max_frame, window, minor,
            grant, cookie, frame, versions,
        }
    }
}

prop_compose! {
    /// Any valid packet.
    fn any_packet()(mut base in any_base(), (op, payload) in any_op()) -> (Base, Op, Vec<u8>) {
        if let Op::Open(open) = op {
            base.dst_sid = open.echo_sid;
        }
        (Base { ty: op.ty(), plen: payload.len() as u16, ..base }, op, payload)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// Encoding and parsing are inverse, whatever padding Ethernet appends.
    #[test]
    fn every_packet_comes_back((base, op, payload) in any_packet(), pad in any_bytes(0)) {
        let mut bytes = frame(&base, &op, &payload);
        prop_assert_eq!(parse(&bytes), Ok((base, op)));
        let len = bytes.len();
        bytes.extend_from_slice(&pad);
        prop_assert_eq!(parse(&bytes), Ok((base, op)));
        if base.crc {
            prop_assert!(verify_crc(&RxFrame::new(&bytes), len - TRAILER_LEN));
            prop_assert_eq!(base.end(len - TRAILER_LEN - payload.len()), len);
        }
    }

    /// A truncated frame is refused as truncated, never accepted.
    #[test]
    fn every_prefix_is_refused((base, op, payload) in any_packet()) {
        let bytes = frame(&base, &op, &payload);
        for len in 0..bytes.len() {
            let err = parse(&bytes[..len]).unwrap_err();
            let cut = matches!(
                err,
                WireError::Short
                    | WireError::OpTruncated
                    | WireError::PayloadTruncated
                    | WireError::TrailerTruncated
            );
            prop_assert!(cut, "{len} of {}: {err}", bytes.len());
        }
    }

    /// With a checksum any flipped bit behind the addresses is detected.
    #[test]
    fn every_flip_under_a_checksum_is_refused(
        (base, op, payload) in any_packet(),
        bit in any::<proptest::sample::Index>(),
    ) {
        let mut bytes = frame(&Base { crc: true, ..base }, &op, &payload);
        let bit = 12 * 8 + bit.index((bytes.len() - 12) * 8);
        bytes[bit / 8] ^= 1 << (bit % 8);
        prop_assert!(parse(&bytes).is_err(), "bit {bit}");
    }

    /// Arbitrary bytes behind a valid prologue: no panic, and accepted headers are within the
    /// frame.
    #[test]
    fn accepted_headers_are_within_the_frame(
        ty in 0..32_u8,
        trailer in prop::bool::ANY,
        rest in proptest::collection::vec(prop_oneof![Just(0), Just(1), any::<u8>()], 0..300),
        plen in 0..300_u16,
    ) {
        let mut bytes = frame(&a_base(), &Op::Ping, &[]);
        bytes[14] = VERSION << 5 | ty;
        bytes[15] = u8::from(trailer) * 3;
        bytes[30..32].copy_from_slice(&plen.to_le_bytes());
        bytes.extend_from_slice(&rest);
        let rx = RxFrame::new(&bytes);
        if let Ok(base) = Base::parse(&rx) {
            let payload_off = match Op::parse(&rx, &base) {
                Ok(Op::Msg(op)) => op.payload_off(),
                Ok(Op::MsgM(op)) => op.payload_off(),
                Ok(Op::Data(op)) => op.payload_off(),
                Ok(Op::Rndv(op)) => op.payload_off(),
                Ok(Op::Pack(op)) => op.payload_off(),
                Ok(Op::Write(op)) => op.payload_off(),
                Ok(Op::Atomic(op)) => op.payload_off(),
                Ok(Op::Resp(op)) => op.payload_off(),
                Ok(Op::Mcast(op)) => op.payload_off(),
                _ => BASE_LEN,
            };
            prop_assert!(base.end(payload_off) <= bytes.len());
            for (op, off, len) in PackRecords::new(&rx, 48, plen, 255).flatten() {
                prop_assert!(off + len <= (48 + usize::from(plen)).min(bytes.len()));
                prop_assert_eq!(usize::from(op.len), len);
            }
        }
    }
}

/// Every bit flip of every sample packet, with and without a checksum: no panic; with one, all are
/// refused except flips in the two addresses.
#[test]
fn every_bit_of_every_type_flipped() {
    for crc in [false, true] {
        for (base, op, payload) in one_of_each() {
            let good = frame(&Base { crc, ..base }, &op, &payload);
            parse(&good).unwrap_or_else(|e| panic!("{:?}: {e}", op.ty()));
            for bit in 0..good.len() * 8 {
                let mut bytes = good.clone();
                bytes[bit / 8] ^= 1 << (bit % 8);
                let taken = parse(&bytes).is_ok();
                assert!(!(crc && taken && bit >= 12 * 8), "{:?}: bit {bit} taken", op.ty());
            }
        }
    }
}

#[test]
fn records_come_back() {
    let (base, op, payload) = one_of_each().swap_remove(2);
    let bytes = frame(&base, &op, &payload);
    let rx = RxFrame::new(&bytes);
    let all: Result<Vec<_>, _> = PackRecords::new(&rx, 48, payload.len() as u16, 2).collect();
    let all = all.unwrap();
    let texts: Vec<_> = all.iter().map(|&(_, off, len)| &bytes[off..off + len]).collect();
    assert_eq!(texts, [b"abc".as_slice(), b"12345678"]);
    assert_eq!((all[0].0.imm, all[1].0.imm, all[1].0.tag), (Some(9), None, 0x1234));
}

/// The sample packet of a type, changed at `at` by `change`, is refused for `cause`.
fn refused(ty: Ty, at: usize, change: &[u8], cause: WireError) {
    refused_all(ty, &[(at, change)], cause);
}

/// [`refused`] for several changes at once.
fn refused_all(ty: Ty, changes: &[(usize, &[u8])], cause: WireError) {
    let sample = one_of_each().into_iter().find(|(_, op, _)| op.ty() == ty).unwrap();
    let mut bytes = frame(&sample.0, &sample.1, &sample.2);
    for &(at, change) in changes {
        bytes[at..at + change.len()].copy_from_slice(change);
    }
    assert_eq!(parse(&bytes), Err(cause), "{}: {changes:?}", ty.name());
}

/// Goal: only an ACK may echo congestion.
#[test]
fn acknowledgements_alone_echo_a_mark() {
    for (base, op, payload) in one_of_each() {
        for crc in [false, true] {
            let bytes = frame(&Base { ce: true, crc, ..base }, &op, &payload);
            let parsed = Base::parse(&RxFrame::new(&bytes)).map(|base| base.ce);
            let is_ack = op.ty() == Ty::Ack;
            assert_eq!(parsed, if is_ack { Ok(true) } else { Err(WireError::CongestionEcho) });
            assert!(!is_ack || BaseWords::ack(&RxFrame::new(&bytes), crc).is_none());
        }
    }
}

/// Each error of the base, each once.
#[test]
fn bases_are_refused_for_their_own_cause() {
    use WireError as E;
    refused(Ty::Nop, 12, &[0x08, 0x00], E::EtherType);
    refused(Ty::Nop, 6, &[3], E::Source);
    refused(Ty::Nop, 6, &[0; 6], E::Source);
    refused(Ty::Nop, 34, &[0xff, 0xff], E::Source);
    for at in 36..40 {
        refused(Ty::Nop, at, &[0x10], E::Source);
    }
    for version in [0, 2, 4, 7] {
        refused(Ty::Nop, 14, &[version << 5 | 9], E::Version);
    }
    refused(Ty::Nop, 15, &[0x80], E::Secured);
    refused(Ty::Nop, 15, &[0x10], E::CongestionEcho);
    refused(Ty::Nop, 15, &[0x08], E::PrologueReserved);
    refused(Ty::Nop, 15, &[0x04], E::PrologueReserved);
    refused(Ty::Nop, 15, &[0x01], E::TrailerCode);
    refused(Ty::Nop, 15, &[0x02], E::TrailerCode);
    refused(Ty::Nop, 15, &[0x03], E::TrailerTruncated);
    refused(Ty::Nop, 14, &[VERSION << 5], E::ReservedType);
    for ty in (20..32).filter(|ty| *ty != Ty::Mcast as u8) {
        refused(Ty::Nop, 14, &[VERSION << 5 | ty], E::UnknownType);
    }
    for ty in Ty::ALL {
        let cause = if ty == Ty::Open { E::OpenEcho } else { E::NoSid };
        if !matches!(ty, Ty::Rst | Ty::Who | Ty::Mcast) {
            refused(ty, 16, &[0; 4], cause);
        }
        if !ty.has_payload() {
            refused(ty, 30, &[1, 0], E::StrayPayload);
        }
    }
    refused(Ty::Msg, 30, &[6], E::PayloadTruncated);
    refused(Ty::Ping, 14, &[VERSION << 5 | 1], E::OpTruncated);
}

/// An incarnation has 48 bits, as in an address.
#[test]
fn a_long_incarnation_is_refused() {
    for at in [54, 55, 62, 63] {
        refused(Ty::Open, at, &[1], WireError::Nameless);
    }
}

/// Each error of the operation headers, each once.
#[test]
fn operations_are_refused_for_their_own_cause() {
    use WireError as E;
    let zeros: &[(Ty, &[usize])] = &[
        (Ty::Pack, &[2, 3, 4, 5, 6, 7]),
        (Ty::MsgM, &[6, 7]),
        (Ty::Rndv, &[6, 7]),
        (Ty::Pull, &[28, 29, 30, 31]),
        (Ty::Probe, &[2, 3, 4, 5, 6, 7]),
        (Ty::End, &[10, 11, 12, 13, 14, 15]),
        (Ty::Nop, &[5, 6, 7]),
        (Ty::Nack, &[2, 3, 4, 5, 6, 7]),
        (Ty::Open, &[60, 61, 62, 63]),
        (Ty::Read, &[44, 45, 46, 47]),
        (Ty::Resp, &[14, 15]),
    ];
    for (ty, at) in zeros {
        for at in *at {
            for bit in 0..8 {
                refused(*ty, BASE_LEN + at, &[1 << bit], E::OpReserved);
            }
        }
    }
    for ty in [Ty::Msg, Ty::MsgM, Ty::Rndv] {
        for bit in 2..8 {
            refused(ty, 44, &[1 << bit], E::MsgFlags);
        }
    }
    refused(Ty::Msg, 44, &[2], E::StrayTag);
    refused(Ty::Rndv, 48, &[1], E::StrayTag);
    refused(Ty::Msg, 46, &[1], E::StrayLen);
    refused(Ty::Msg, 47, &[1], E::StrayLen);
    refused(Ty::MsgM, 30, &[0], E::EmptyPiece);
    refused(Ty::MsgM, 56, &[49], E::PieceRange);
    refused(Ty::MsgM, 64, &[0xff; 8], E::PieceRange);
    refused(Ty::Data, 48, &[0xff; 8], E::PieceRange);
    refused(Ty::MsgM, 64, &[1], E::LateImm);
    refused(Ty::Pack, 40, &[0], E::PackCount);
    refused(Ty::Pack, 41, &[1], E::PackCount);
    refused(Ty::Pack, 40, &[3], E::PackRecord);
    refused(Ty::Pack, 40, &[1], E::PackTrailing);
    refused(Ty::Pack, 54, &[100], E::PackRecord);
    refused(Ty::Pack, 75, &[1], E::PackPadding);
    refused(Ty::Pack, 79, &[0x80], E::PackPadding);
    refused(Ty::Pull, 64, &[0; 4], E::PullRange);
    refused(Ty::Pull, 64, &(PULL_MAX + 1).to_le_bytes(), E::PullRange);
    refused(Ty::Pull, 56, &[0xff; 8], E::PullRange);
    refused(Ty::End, 48, &[4], E::EndStatus);
    refused(Ty::Nack, 40, &[0], E::NackReason);
    refused(Ty::Nack, 40, &[10], E::NackReason);
    refused(Ty::Ack, 42, &[65], E::SackCount);
    refused(Ty::Ack, 42, &[3], E::OpTruncated);
    refused(Ty::Rst, 68, &[0], E::RstReason);
    refused(Ty::Rst, 68, &[8], E::RstReason);
    refused(Ty::Rst, 48, &[0; 8], E::Nameless);
    refused(Ty::Open, 40, &[0; 4], E::Nameless);
    refused(Ty::Open, 44, &[0; 4], E::Nameless);
    refused(Ty::Open, 48, &[0; 8], E::Nameless);
    refused(Ty::Open, 64, &[0; 4], E::OpenEcho);
    refused(Ty::Open, 68, &[0; 4], E::OpenEcho);
    refused(Ty::Open, 80, &[0; 2], E::OpenWindow);
    refused(Ty::Open, 76, &255_u32.to_le_bytes(), E::OpenMaxFrame);
    refused(Ty::Open, 40, &[0; 8], E::OpenChallenge);
    for (ty, at) in [(Ty::Rst, 70), (Ty::Open, 98)] {
        for versions in [[0, 2], [3, 2], [2, 8], [0, 0]] {
            refused(ty, at, &versions, E::Versions);
        }
    }
}

/// Each error of a WHO, each once.
#[test]
fn questions_are_refused_for_their_own_cause() {
    use WireError as E;
    for at in [14, 15, 20, 24, 31] {
        refused(Ty::Who, BASE_LEN + at, &[1], E::OpReserved);
    }
    refused(Ty::Who, 50, &[0; 2], E::Nameless);
    refused(Ty::Who, 40, &[0; 9], E::Nameless);
    refused(Ty::Who, 48, &[2], E::WhoKind);
    refused(Ty::Who, 49, &[5], E::WhoKind);
    for versions in [[0, 2], [3, 2], [2, 8], [0, 0]] {
        refused(Ty::Who, 52, &versions, E::Versions);
    }
}

/// Each error of a MCAST, each once.
#[test]
fn messages_to_groups_are_refused_for_their_own_cause() {
    use WireError as E;
    for at in [0, 1, 5, 6, 7] {
        refused(Ty::Mcast, BASE_LEN + at, &[1], E::OpReserved);
    }
    for bit in [0, 2, 3, 4, 5, 6, 7] {
        refused(Ty::Mcast, 44, &[1 << bit | 2], E::MsgFlags);
    }
    refused(Ty::Mcast, 48, &[0; 8], E::Nameless);
    refused(Ty::Mcast, 54, &[1], E::Nameless);
    refused(Ty::Mcast, 56, &[2], E::McastGroup);
    refused(Ty::Mcast, 56, &[0xff; 6], E::McastGroup);
    refused(Ty::Mcast, 30, &[7], E::PayloadTruncated);
}

/// Each error of the one-sided operations, each once.
#[test]
fn one_sided_operations_are_refused_for_their_own_cause() {
    use WireError as E;
    for (ty, known) in [(Ty::Write, 0x83), (Ty::Read, 0x85), (Ty::Atomic, 0xff)] {
        for bit in (0..8).filter(|bit| known & 1 << bit == 0) {
            refused(ty, 44, &[1 << bit], E::RmaFlags);
        }
    }
    refused(Ty::Write, 44, &[2], E::LateImm);
    refused(Ty::Atomic, 44, &[2], E::LateImm);
    refused(Ty::Write, 44, &[0x80], E::RmaFlags);
    refused(Ty::Atomic, 44, &[0x80], E::RmaFlags);
    refused(Ty::Atomic, 44, &[0x89], E::RmaFlags);
    refused(Ty::Read, 44, &[0x80], E::RmaFlags);
    refused(Ty::Read, 44, &[0x81], E::RmaFlags);
    refused(Ty::Read, 44, &[0x84], E::RmaFlags);
    refused(Ty::Write, 72, &[4], E::RmaRange);
    // A requested RESP for another part than the first, for no byte, and for too many.
    refused(Ty::Read, 44, &[0x85], E::RmaRange);
    for len in [0, READ_ANSWER_MAX + 1] {
        let changes: [(usize, &[u8]); 3] = [(44, &[0x85]), (72, &[0]), (80, &len.to_le_bytes())];
        refused_all(Ty::Read, &changes, E::RmaRange);
    }
    refused(Ty::Read, 72, &[0xff; 8], E::RmaRange);
    refused(Ty::Read, 80, &(READ_MAX + 1).to_le_bytes(), E::RmaRange);
    refused(Ty::Resp, 52, &[10], E::RespStatus);
}

/// A packet of a later minor version is refused as unknown; a damaged packet is not taken for one.
#[test]
fn unknown_types_are_known_from_damaged_ones() {
    let (base, op, payload) = one_of_each().swap_remove(1);
    let mut bytes = frame(&Base { crc: true, ..base }, &op, &payload);
    bytes[14] ^= 24; // MSG becomes type 26
    assert_eq!(parse(&bytes), Err(WireError::Crc));
    let end = bytes.len() - TRAILER_LEN;
    let crc = crc_of_head(&bytes[..end]);
    bytes[end..].copy_from_slice(&crc.to_le_bytes());
    assert_eq!(parse(&bytes), Err(WireError::UnknownType));
    bytes.resize(100, 0xaa);
    assert_eq!(parse(&bytes), Err(WireError::UnknownType));
    let raw = Base::parse_raw(&RxFrame::new(&bytes)).unwrap();
    assert_eq!((raw.version, raw.ty, raw.dst_sid, raw.psn), (VERSION, 26, base.dst_sid, base.psn));
    assert_eq!((raw.dst, raw.src), (base.dst, base.src));
}

/// A reserved trailer code is refused even if a correct checksum follows.
#[test]
fn reserved_trailer_codes_are_refused() {
    for code in [1, 2] {
        let mut bytes = frame(&Base { crc: true, ..a_base() }, &Op::Ping, &[]);
        bytes[15] = code;
        let crc = crc_of_head(&bytes[..BASE_LEN]);
        bytes[BASE_LEN..].copy_from_slice(&crc.to_le_bytes());
        assert_eq!(parse(&bytes), Err(WireError::TrailerCode));
    }
}

/// Missing remote CQ data is detected although the base's check cannot see it.
#[test]
fn imm_beyond_the_frame_is_refused() {
    for ty in [Ty::Msg, Ty::MsgM, Ty::Rndv, Ty::Write, Ty::Atomic] {
        let (base, op, payload) =
            one_of_each().into_iter().find(|(_, op, _)| op.ty() == ty).unwrap();
        let bytes = frame(&base, &op, &payload);
        let rx = RxFrame::new(&bytes[..bytes.len() - 8]);
        let base = Base::parse(&rx).unwrap();
        assert!(Op::parse(&rx, &base).is_err(), "{}", ty.name());
    }
}

#[test]
fn causes_have_a_place_and_a_name_each() {
    let mut names: Vec<_> = WireError::ALL.iter().map(|e| e.name()).collect();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), WireError::COUNT);
    for (i, cause) in WireError::ALL.iter().enumerate() {
        assert_eq!(cause.index(), i);
    }
    assert!(WireError::OpReserved.is_malformed_op() && WireError::PullRange.is_malformed_op());
    assert!(!WireError::Crc.is_malformed_op() && !WireError::PayloadTruncated.is_malformed_op());
}

#[test]
fn units_round_up() {
    let units: Vec<_> = [0, 1, 256, 257, 512, 16384].into_iter().map(units_of).collect();
    assert_eq!(units, [1, 1, 1, 2, 2, 64]);
}
