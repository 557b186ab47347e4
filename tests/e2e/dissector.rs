//! `docs/barewire.lua` in tshark against the codec: every type decodes with the right fields, and
//! what the codec refuses the dissector refuses for the same cause.

use std::fs;
use std::path::Path;
use std::process::Command;

use barewire_dataplane::psn::Psn;
use barewire_dataplane::wire::*;
use barewire_driver::frame::RxFrame;
use barewire_driver::port::Station;

/// Whether tshark is there. Where it must be (`CI=true`) its absence fails the test.
fn tshark_is_there() -> bool {
    if Command::new("tshark").arg("--version").output().is_ok_and(|out| out.status.success()) {
        return true;
    }
    assert!(std::env::var("CI").as_deref() != Ok("true"), "tshark is missing");
    println!("SKIPPED: tshark missing (apt-get install tshark)");
    false
}

/// A pcapng file of Ethernet frames, as short as the format allows.
fn pcapng(frames: &[Vec<u8>]) -> Vec<u8> {
    fn block(out: &mut Vec<u8>, ty: u32, body: &[u8]) {
        let len = (12 + body.len().next_multiple_of(4)) as u32;
        out.extend_from_slice(&ty.to_le_bytes());
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(body);
        out.resize(out.len().next_multiple_of(4), 0);
        out.extend_from_slice(&len.to_le_bytes());
    }
    let mut out = Vec::new();
    // Byte order, version 1.0, length of the section unknown.
    let mut section = 0x1a2b_3c4d_u32.to_le_bytes().to_vec();
    section.extend_from_slice(&[1, 0, 0, 0]);
    section.extend_from_slice(&[0xff; 8]);
    block(&mut out, 0x0a0d_0d0a, &section);
    block(&mut out, 1, &[1, 0, 0, 0, 0, 0, 1, 0]); // Ethernet, 64 KiB
    for frame in frames {
        let mut body = vec![0; 12]; // interface 0 at time 0
        body.extend_from_slice(&(frame.len() as u32).to_le_bytes());
        body.extend_from_slice(&(frame.len() as u32).to_le_bytes());
        body.extend_from_slice(frame);
        block(&mut out, 6, &body);
    }
    out
}

/// The values of `fields`, one row a frame; a field that is not there is empty.
fn tshark(frames: &[Vec<u8>], fields: &[&str]) -> Vec<Vec<String>> {
    let dir = tempfile::tempdir().unwrap();
    let capture = dir.path().join("frames.pcapng");
    fs::write(&capture, pcapng(frames)).unwrap();
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/barewire.lua");
    let mut command = Command::new("tshark");
    command.arg("-X").arg(format!("lua_script:{}", script.display()));
    command.arg("-r").arg(&capture);
    // Neither names nor the settings of whoever runs the test.
    command.arg("-n").env("HOME", dir.path()).env("XDG_CONFIG_HOME", dir.path());
    command.args(["-T", "fields", "-E", "separator=|", "-E", "aggregator=,"]);
    for field in fields {
        command.args(["-e", field]);
    }
    let out = command.output().unwrap();
    let errors = String::from_utf8_lossy(&out.stderr);
    assert!(out.status.success() && !errors.contains("Lua"), "{errors}");
    let text = String::from_utf8(out.stdout).unwrap();
    let rows: Vec<_> =
        text.lines().map(|row| row.split('|').map(str::to_owned).collect()).collect();
    assert_eq!(rows.len(), frames.len(), "{errors}");
    rows
}

fn a_base() -> Base {
    Base {
        dst: Station::at([2, 0, 0, 0, 0, 1]),
        src: Station::at([2, 0, 0, 0, 0, 2]),
        ty: Ty::Nop,
        ar: false,
        rtx: true,
        ce: false,
        crc: false,
        dst_sid: 0x0010_0003,
        psn: Psn(u32::MAX),
        cack: Psn(7),
        grant: 65_535,
        plen: 0,
    }
}

/// The payload of a PACK of two messages.
fn records(msg: MsgOp) -> Vec<u8> {
    let mut payload = vec![0; 24];
    MsgOp { len: 3, ..msg }.emit(&mut payload);
    payload.extend_from_slice(b"abc\0\0\0\0\0");
    let mut head = [0; 16];
    MsgOp { len: 8, imm: None, ..msg }.emit(&mut head);
    payload.extend_from_slice(&head);
    payload.extend_from_slice(b"12345678");
    payload
}

/// Each type once: header, payload, and what tshark must say, as `name=value` without the prefix
/// `barewire.`.
fn each_type() -> Vec<(Op, Vec<u8>, &'static str)> {
    let (imm, tag) = (Some(9), 0xbeef);
    let msg = MsgOp { dst_ep: 1, rx_ctx: 3, src_ep: 2, tagged: true, imm, tag, len: 0 };
    let piece = MsgMOp { dst_ep: 65_535, msg_len: 1 << 40, offset: 1 << 39, ..MsgMOp::default() };
    let rndv = RndvOp {
        imm: Some(u64::MAX),
        msg_len: 1 << 33,
        src_op: 5,
        src_gen: 6,
        ..RndvOp::default()
    };
    let ack = AckOp { delay: 20, newest: Psn(10), count: 2, dups: 3, resent: true };
    let rst = RstOp {
        echo_sid: 1,
        echo_psn: Psn(2),
        life: 3,
        victim_inc: 4,
        victim_epoch: 5,
        reason: RstReason::WrongIncarnation,
        versions: VERSIONS,
    };
    let open = OpenOp {
        sid: 5,
        epoch: 1,
        inc: 0xfeed,
        target_inc: 0xf00d,
        echo_sid: 0x0010_0003,
        echo_epoch: 4,
        caps: 0,
        max_frame: 1500,
        window: 256,
        minor: 0,
        grant: 64,
        cookie: 0,
        frame: 1500,
        versions: VERSIONS,
    };
    let pull = PullOp { src_op: 1, src_gen: 2, dst_op: 3, dst_gen: 4, offset: 5, len: 6 };
    let end = EndOp { src_op: 1, src_gen: 2, status: EndStatus::Discarded };
    vec![
        (
            Op::Ack(ack, std::array::from_fn(|i| [5, 1 << 63].get(i).copied().unwrap_or(0))),
            vec![],
            "delay=20 sack_count=2 newest=10 \
            sack=0x0000000000000005,0x8000000000000000",
        ),
        (
            Op::Msg(msg),
            b"hello".to_vec(),
            "dst_ep=1 rx_ctx=3 src_ep=2 flags=0x03 flags.tagged=1 \
            flags.imm=1 tag=0x000000000000beef imm=0x0000000000000009 payload=68656c6c6f",
        ),
        (
            Op::Pack(PackOp { count: 2 }),
            records(msg),
            "count=2 len=3,8 dst_ep=1,1 flags=0x03,0x01 \
            imm=0x0000000000000009 payload=616263,3132333435363738",
        ),
        (
            Op::MsgM(piece),
            vec![7; 3],
            "dst_ep=65535 tag=0x0000000000000000 \
            msg_len=1099511627776 offset=549755813888 payload=070707",
        ),
        (Op::Rndv(rndv), vec![], "msg_len=8589934592 src_op=5 src_gen=6 imm=0xffffffffffffffff"),
        (Op::Pull(pull), vec![], "src_op=1 src_gen=2 dst_op=3 dst_gen=4 offset=5 pull_len=6"),
        (
            Op::Data(DataOp { dst_op: 1, dst_gen: 2, offset: 3 }),
            vec![1, 2],
            "dst_op=1 dst_gen=2 \
            offset=3 payload=0102",
        ),
        (Op::End(end), vec![], "src_op=1 src_gen=2 status=2"),
        (Op::Nop(NopOp { units: 3, cuts: true, drops: Some(7) }), vec![], "drop_seq=7 units=3"),
        (Op::Nack(NackOp { reason: NackReason::NoEndpoint }), vec![], "nack_reason=2"),
        (
            Op::Who(who(Host::V4([10, 1, 1, 1]))),
            vec![],
            "nonce=0x0000000000000003 who_kind=1 host_kind=4 service=7471 version_min=3 \
            version_max=3 host.v4=10.1.1.1",
        ),
        (Op::Probe(ProbeOp { heard: 9000 }), vec![], "heard=9000"),
        (Op::Ping, vec![], ""),
        (
            Op::Rst(rst),
            vec![],
            "echo_sid=0x00000001 echo_psn=2 life=0x0000000000000003 \
            victim_inc=0x0000000000000004 victim_epoch=5 rst_reason=4 version_min=3 version_max=3",
        ),
        (
            Op::Open(open),
            vec![],
            "sid=0x00000005 epoch=1 inc=0x000000000000feed \
            target_inc=0x000000000000f00d echo_sid=0x00100003 echo_epoch=4 caps=0x00000000 \
            max_frame=1500 window=256 minor=0 open_grant=64 cookie=0x0000000000000000 \
            frame=1500 version_min=3 version_max=3",
        ),
    ]
    .into_iter()
    .chain(one_sided())
    .collect()
}

fn who(host: Host) -> WhoOp {
    WhoOp { nonce: 3, here: true, host, service: 7471, versions: VERSIONS }
}

fn one_sided() -> Vec<(Op, Vec<u8>, &'static str)> {
    let range =
        RemoteRange { dst_ep: 1, rx_ctx: 0, src_ep: 2, seq: 3, last: true, rkey: 4, addr: 0x50 };
    let atomic = AtomicOp {
        range,
        imm: Some(6),
        fetch: true,
        dst_op: 7,
        dst_gen: 8,
        count: 1,
        op: 2,
        ty: 7,
        offset: 16,
        ..AtomicOp::default()
    };
    let status = Some(NackReason::BadKey);
    vec![
        (
            Op::Write(WriteOp {
                range,
                imm: Some(6),
                answer: true,
                dst_op: 7,
                dst_gen: 8,
                left: 5,
            }),
            b"hello".to_vec(),
            "rma_flags=0x83 rma_flags.last=1 rma_flags.imm=1 rma_flags.end=0 rma_flags.fetch=0 \
            rma_flags.compare=0 rma_flags.tagged=0 rma_flags.void=0 rma_flags.answer=1 seq=3 \
            rkey=0x0000000000000004 addr=0x0000000000000050 dst_op=7 dst_gen=8 left=5 \
            imm=0x0000000000000006 \
            payload=68656c6c6f",
        ),
        (
            Op::Read(ReadOp {
                range,
                end: true,
                answer: false,
                dst_op: 7,
                dst_gen: 8,
                offset: 9,
                len: 10,
            }),
            vec![],
            "rma_flags=0x05 rma_flags.last=1 rma_flags.imm=0 rma_flags.end=1 rma_flags.fetch=0 \
            rma_flags.compare=0 rma_flags.tagged=0 rma_flags.void=0 rma_flags.answer=0 seq=3 \
            rkey=0x0000000000000004 addr=0x0000000000000050 dst_op=7 dst_gen=8 offset=9 \
            read_len=10",
        ),
        (
            Op::Atomic(atomic),
            vec![1; 8],
            "rma_flags=0x0b rma_flags.last=1 rma_flags.imm=1 rma_flags.end=0 rma_flags.fetch=1 \
            rma_flags.compare=0 rma_flags.tagged=0 rma_flags.void=0 rma_flags.answer=0 seq=3 \
            rkey=0x0000000000000004 addr=0x0000000000000050 dst_op=7 dst_gen=8 elements=1 \
            atomic_op=2 datatype=7 result_at=16 imm=0x0000000000000006 payload=0101010101010101",
        ),
        (
            Op::Resp(RespOp { dst_op: 7, dst_gen: 8, offset: 16, status }),
            vec![2],
            "dst_op=7 dst_gen=8 result_at=16 resp_status=5 payload=02",
        ),
        (
            Op::Mcast(mcast()),
            b"all".to_vec(),
            "src_ep=2 flags=0x02 flags.imm=1 inc=0x000000000000feed \
            group_mac=01:00:5e:01:02:03 group_number=7471 imm=0x0000000000000006 payload=616c6c",
        ),
    ]
}

fn mcast() -> McastOp {
    let group = "barewire://01:00:5e:01:02:03/7471".parse().unwrap();
    McastOp { group, src_ep: 2, inc: 0xfeed, imm: Some(6) }
}

#[test]
fn every_type_decodes() {
    if !tshark_is_there() {
        return;
    }
    let all = each_type();
    assert!(all.iter().map(|(op, ..)| op.ty()).eq(Ty::ALL));
    let mut names: Vec<_> = all
        .iter()
        .flat_map(|(_, _, want)| want.split_whitespace())
        .map(|want| format!("barewire.{}", want.split_once('=').unwrap().0))
        .collect();
    names.sort();
    names.dedup();
    let fixed = "type=T version=3 rtx=1 ar=0 dst_sid=0x00100003 psn=4294967295 cack=7 grant=65535 \
        plen=P trailer=3 crc_ok=1 refused=";
    let mut fields: Vec<_> = names.iter().map(String::as_str).collect();
    let fixed_names: Vec<_> = fixed
        .split_whitespace()
        .map(|want| format!("barewire.{}", want.split_once('=').unwrap().0))
        .collect();
    fields.extend(fixed_names.iter().map(String::as_str));
    fields.extend(["_ws.expert", "_ws.col.Info"]);
    let base = Base { crc: true, ..a_base() };
    let frames: Vec<_> = all.iter().map(|(op, payload, _)| frame(&base, op, payload)).collect();
    for (row, (op, payload, want)) in tshark(&frames, &fields).iter().zip(&all) {
        let name = op.ty().name();
        let value = |field: &str| {
            let at = fields.iter().position(|f| f.strip_prefix("barewire.") == Some(field));
            row[at.unwrap()].as_str()
        };
        for want in fixed.split_whitespace().chain(want.split_whitespace()) {
            let (field, want) = want.split_once('=').unwrap();
            let want = match want {
                "T" => (op.ty() as u8).to_string(),
                "P" => payload.len().to_string(),
                want => want.to_owned(),
            };
            assert_eq!(value(field), want, "{name}: {field}");
        }
        let [expert, info] = &row[row.len() - 2..] else { unreachable!() };
        assert_eq!(expert, "", "{name}");
        assert!(info.starts_with(&format!("{name} psn=4294967295 cack=7")), "{name}: {info}");
        // No header field but those that are listed: what does not belong to a type stays empty.
        for (field, value) in fields.iter().zip(row).take(names.len()) {
            let field = format!("{}=", field.strip_prefix("barewire.").unwrap());
            let listed = want.split_whitespace().any(|want| want.starts_with(&field));
            let shared =
                ["src_ep=", "dst_ep=", "rx_ctx=", "flags=", "flags.tagged=", "flags.imm=", "tag="];
            assert!(listed || value.is_empty() || shared.contains(&&*field), "{name}: {field}");
        }
    }
}

/// A small generator, so that a failure repeats.
struct Rng(u64);

impl Rng {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.0 >> 33) as usize % n
    }
}

/// Good frames with one to three bytes changed, cut or repaired: dissector and codec agree which
/// are refused, and why.
#[test]
fn dissector_and_codec_refuse_the_same() {
    if !tshark_is_there() {
        return;
    }
    let mut rng = Rng(1);
    let mut frames = Vec::new();
    for round in 0..4_000 {
        let all = each_type();
        let (op, payload, _) = &all[round % all.len()];
        let crc = rng.below(4) == 0;
        let mut bytes = frame(&Base { crc, ..a_base() }, op, payload);
        for _ in 0..rng.below(3) {
            // Not the addresses nor the EtherType: another one is another dissector's.
            let at = 14 + rng.below(bytes.len() - 14);
            bytes[at] = [0, 1, 2, 3, 0x80, 0xff, rng.below(256) as u8][rng.below(7)];
        }
        if crc && rng.below(2) == 0 {
            let end = bytes.len() - TRAILER_LEN;
            let crc = crc_of_head(&bytes[..end]);
            bytes[end..].copy_from_slice(&crc.to_le_bytes());
        }
        if rng.below(8) == 0 {
            let len = 15 + rng.below(bytes.len() - 14);
            bytes.truncate(len);
        }
        frames.push(bytes);
    }
    // Two faults of one header: unknown flags, and a zero field that is not.
    for (op, payload, _) in each_type() {
        if matches!(op, Op::MsgM(_) | Op::Rndv(_)) {
            let mut bytes = frame(&a_base(), &op, &payload);
            (bytes[BASE_LEN + 4], bytes[BASE_LEN + 6]) = (0x80, 1);
            frames.push(bytes);
        }
    }
    let rows = tshark(&frames, &["barewire.refused", "_ws.expert"]);
    let mut refused = 0;
    let mut kinds = [false; WireError::COUNT];
    for (bytes, row) in frames.iter().zip(rows) {
        let rx = RxFrame::new(bytes);
        let mut cause = Base::parse(&rx).and_then(|base| Op::parse(&rx, &base)).err();
        // A node takes an RST of every version.
        let is_rst = bytes[14] & 31 == Ty::Rst as u8 && bytes.len() >= BASE_LEN + RstOp::LEN;
        if cause == Some(WireError::Version) && is_rst {
            cause = RstOp::parse(&rx).err();
        }
        let want = cause.map_or("", WireError::name);
        assert_eq!(row[0], want, "{bytes:02x?}");
        assert_eq!(row[1].is_empty(), cause.is_none(), "{bytes:02x?}");
        if let Some(cause) = cause {
            refused += 1;
            kinds[cause.index()] = true;
        }
    }
    let kinds = kinds.iter().filter(|k| **k).count();
    println!("{} frames, {refused} refused for {kinds} causes", frames.len());
    assert!(refused > 1_000 && kinds > 20, "{refused} refused, {kinds} causes");
}
