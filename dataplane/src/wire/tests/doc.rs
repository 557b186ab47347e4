//! `docs/wire.md` compared with the code.

use std::collections::BTreeMap;

use super::*;

const DOC: &str = include_str!("../../../../docs/wire.md");

/// The hex block with the heading `name`: bytes, field name and value of each line.
fn example(name: &str) -> Vec<(Vec<u8>, String, Option<String>)> {
    let head = format!("```hex {name}\n");
    let block = DOC.split(&head).nth(1).expect(name).split("```").next().unwrap();
    let line = |line: &str| {
        let (hex, what) = line.split_once('#').expect(line);
        let bytes = hex.split_whitespace().map(|b| u8::from_str_radix(b, 16).unwrap()).collect();
        let (field, value) = match what.split_once('=') {
            Some((field, value)) => (field, Some(value.trim().to_owned())),
            None => (what, None),
        };
        (bytes, field.trim().to_owned(), value)
    };
    block.lines().map(line).collect()
}

/// The fields of a packet by their names in the document.
fn fields(base: &Base, op: &Op) -> BTreeMap<&'static str, u64> {
    let mut map = BTreeMap::from([
        ("dst_sid", base.dst_sid.into()),
        ("psn", base.psn.0.into()),
        ("cack", base.cack.0.into()),
        ("grant", base.grant.into()),
        ("plen", base.plen.into()),
        ("dst_station", base.dst.number.into()),
        ("src_station", base.src.number.into()),
    ]);
    match op {
        Op::Msg(op) => map.extend([
            ("dst_ep", op.dst_ep.into()),
            ("rx_ctx", op.rx_ctx.into()),
            ("src_ep", op.src_ep.into()),
            ("flags", u64::from(op.tagged) | u64::from(op.imm.is_some()) << 1),
            ("len", op.len.into()),
            ("tag", op.tag),
        ]),
        Op::Who(WhoOp { nonce, here, host: Host::V4(host), service, versions }) => map.extend([
            ("nonce", *nonce),
            ("kind", (*here).into()),
            ("host_kind", 4),
            ("service", (*service).into()),
            ("version_min", versions.min.into()),
            ("version_max", versions.max.into()),
            ("host", u32::from_le_bytes(*host).into()),
        ]),
        Op::Probe(op) => map.extend([("heard", op.heard.into())]),
        Op::Mcast(op) => map.extend(mcast_fields(op)),
        Op::Ack(op, words) => map.extend([
            ("delay", op.delay.into()),
            ("count", op.count.into()),
            ("newest", op.newest.0.into()),
            ("sack[0]", words[0]),
        ]),
        Op::Open(op) => map.extend([
            ("sid", op.sid.into()),
            ("epoch", op.epoch.into()),
            ("inc", op.inc),
            ("target_inc", op.target_inc),
            ("echo_sid", op.echo_sid.into()),
            ("echo_epoch", op.echo_epoch.into()),
            ("caps", op.caps.into()),
            ("max_frame", op.max_frame.into()),
            ("window", op.window.into()),
            ("minor", op.minor.into()),
            ("open.grant", op.grant.into()),
            ("cookie", op.cookie),
            ("frame", op.frame.into()),
            ("version_min", op.versions.min.into()),
            ("version_max", op.versions.max.into()),
        ]),
        Op::Rst(op) => map.extend([
            ("echo_sid", op.echo_sid.into()),
            ("echo_psn", op.echo_psn.0.into()),
            ("life", op.life),
            ("victim_inc", op.victim_inc),
            ("victim_epoch", op.victim_epoch.into()),
            ("reason", op.reason as u64),
            ("version_min", op.versions.min.into()),
            ("version_max", op.versions.max.into()),
        ]),
        other => panic!("no example of {other:?}"),
    }
    map
}

fn mcast_fields(op: &McastOp) -> [(&'static str, u64); 5] {
    [
        ("src_ep", op.src_ep.into()),
        ("flags", u64::from(op.imm.is_some()) << 1),
        ("inc", op.inc),
        ("group_mac", op.group.mac().frame_word()),
        ("group_number", op.group.number().into()),
    ]
}

fn number(text: &str) -> u64 {
    match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).unwrap(),
        None => text.parse().expect(text),
    }
}

/// Every example decodes to its documented fields, which are all fields of the packet, and encodes
/// to the same bytes.
#[test]
fn the_worked_examples_are_true() {
    for (name, ty) in [
        ("MSG", Ty::Msg),
        ("ACK", Ty::Ack),
        ("OPEN", Ty::Open),
        ("OPEN challenge", Ty::Open),
        ("RST", Ty::Rst),
        ("WHO", Ty::Who),
        ("PROBE", Ty::Probe),
        ("MCAST", Ty::Mcast),
    ] {
        let lines = example(name);
        let bytes: Vec<u8> = lines.iter().flat_map(|(bytes, ..)| bytes.clone()).collect();
        let plain = frame_without_crc_check(&bytes);
        assert_eq!(plain, bytes, "{name}: the checksum is not the one in the document");
        let (base, op) = parse(&bytes).unwrap_or_else(|e| panic!("{name}: {e}"));
        assert_eq!(op.ty(), ty);
        let mut fields = fields(&base, &op);
        let mut payload = Vec::new();
        for (bytes, field, value) in lines {
            match (field.as_str(), value) {
                ("eth.dst", Some(station)) => assert_eq!(station, base.dst.to_string()),
                ("eth.src", Some(station)) => assert_eq!(station, base.src.to_string()),
                ("eth.type" | "prologue", Some(value)) => {
                    let n = bytes.iter().fold(0, |n, b| n << 8 | u64::from(*b));
                    assert_eq!(number(&value), n);
                }
                ("zero", None) => assert!(bytes.iter().all(|b| *b == 0)),
                ("payload", None) => payload = bytes,
                ("crc", None) => assert!(base.crc),
                (field, value) => {
                    let value = number(&value.expect(field));
                    assert_eq!(fields.remove(field), Some(value), "{name}: {field}");
                    let n = bytes.iter().rev().fold(0, |n, b| n << 8 | u64::from(*b));
                    assert_eq!(n, value, "{name}: bytes of {field}");
                }
            }
        }
        assert!(fields.is_empty(), "{name}: not in the example: {fields:?}");
        assert_eq!(frame(&base, &op, &payload), bytes, "{name}");
    }
}

/// `bytes` with the correct checksum, so that a wrong one in the document is reported with the
/// correct one.
fn frame_without_crc_check(bytes: &[u8]) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    if bytes[15] & 3 == 3 {
        let end = bytes.len() - TRAILER_LEN;
        let crc = crc_of_head(&bytes[..end]);
        bytes[end..].copy_from_slice(&crc.to_le_bytes());
    }
    bytes
}

/// The rows of the table whose heading row starts with `head`, as cells.
fn table(head: &str) -> Vec<Vec<String>> {
    let rest = DOC.split(head).nth(1).expect(head);
    let rows = rest.lines().skip(2).take_while(|line| line.starts_with('|'));
    rows.map(|row| row.trim_matches('|').split(" | ").map(|c| c.trim().to_owned()).collect())
        .collect()
}

/// The document lists each error's counter once, and no other; and the errors that are answered by
/// a NACK are those that the code calls malformed and that a reliable packet can have.
#[test]
fn every_refusal_is_documented() {
    let rows = table("| counter | cause |");
    let listed: Vec<_> = rows.iter().map(|row| row[0].trim_matches('`')).collect();
    for cause in WireError::ALL {
        let count = listed.iter().filter(|name| **name == cause.name()).count();
        assert_eq!(count, 1, "{}", cause.name());
    }
    assert_eq!(listed.len(), WireError::COUNT);
    for row in &rows {
        let cause = WireError::ALL.iter().find(|c| c.name() == row[0].trim_matches('`')).unwrap();
        if row[2] == "NACK 3" {
            assert!(cause.is_malformed_op(), "{}", row[0]);
        }
    }
}

/// The document's table of types equals the code's.
#[test]
fn every_type_is_documented() {
    let rows = table("| type | name | class |");
    assert_eq!(rows.len(), Ty::ALL.len());
    for (row, ty) in rows.iter().zip(Ty::ALL) {
        let class = if ty.is_reliable() { "reliable" } else { "control" };
        let payload = if ty.has_payload() { "yes" } else { "no" };
        let op_len = ty.op_len().to_string();
        assert_eq!(row[0], (ty as u8).to_string());
        assert_eq!((&*row[1], &*row[2], &*row[4]), (ty.name(), class, payload));
        assert_eq!(row[3].split(' ').next(), Some(&*op_len), "{}", ty.name());
        assert!(DOC.contains(ty.name()));
    }
}
