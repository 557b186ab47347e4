//! Who speaks another version: both ends know it at once.

use super::*;
use crate::psn::Psn;
use crate::wire::{self, Base, Op, OpenOp, RstOp, RstReason, Ty, VERSION, VERSIONS, Versions};

/// `frame` as a node of `version` sends it.
fn of_version(mut frame: Vec<u8>, version: u8) -> Vec<u8> {
    frame[14] = version << 5 | frame[14] & 31;
    let end = wire::BASE_LEN + if frame[14] & 31 == 15 { OpenOp::LEN } else { RstOp::LEN };
    let crc = wire::crc_of_head(&frame[..end]).to_le_bytes();
    frame[end..end + wire::TRAILER_LEN].copy_from_slice(&crc);
    frame
}

/// The frames that node `i` of the pair sends now.
fn sent(pair: &mut Pair, i: usize) -> Vec<Vec<u8>> {
    let End { node, out, .. } = &mut pair.ends[i];
    node.transmit(pair.now, &mut sink(out));
    out.drain(..).collect()
}

fn notices(pair: &mut Pair, i: usize) -> Vec<Notice> {
    std::iter::from_fn(|| pair.ends[i].node.observed.notice()).collect()
}

/// Goal: another version is not taken for a dead host. Method: a node's OPEN reaches one that finds
/// another version in it, and that one's refusal comes back as if from a later version.
#[test]
fn another_version_is_told_at_both_ends_at_once() {
    let mut pair = Pair::new(1500, false);
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 1).unwrap();
    let open = sent(&mut pair, 0).remove(0);
    for _ in 0..3 {
        let foreign = of_version(open.clone(), VERSION - 1);
        pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&foreign));
    }
    let station = pair.ends[0].node.port.station;
    assert_eq!(notices(&mut pair, 1), [Notice::OtherVersion { station, theirs: VERSION - 1 }]);
    let refusals = sent(&mut pair, 1);
    assert!(refusals.len() == 3 && refusals[0].len() <= open.len());
    let rst = RstOp::parse(&RxFrame::new(&refusals[0])).unwrap();
    assert_eq!((rst.reason, rst.versions), (RstReason::Version, VERSIONS));
    let refusal = of_version(refusals[0].clone(), VERSION + 1);
    pair.ends[0].node.on_frame(pair.now, &RxFrame::new(&refusal));
    let err = pair.read_err(0);
    assert_eq!((err.err, err.cqe.op_context), (Error::NoProtoOpt, 1));
    let [Notice::SessionEnded(end)] = &notices(&mut pair, 0)[..] else { panic!("one notice") };
    let spoken = Versions { min: VERSION, max: VERSION };
    assert_eq!((end.reason, end.waited.sends), (EndReason::Version(spoken), 1));
}

/// Goal: what may be damaged, or is an answer itself, is not refused; nor does a refusal that
/// anybody can make end a session.
#[test]
fn a_damaged_version_is_not_refused() {
    let mut pair = Pair::new(1500, false);
    pair.send(0, IoBuf::leaked(&[1; 8]), 5, OpFlags::empty(), 1).unwrap();
    let open = sent(&mut pair, 0).remove(0);
    let mut damaged = open.clone();
    damaged[14] ^= 0x20;
    pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&damaged));
    for ty in [Ty::Ack, Ty::Nack, Ty::Rst] {
        let mut answer = open.clone();
        answer[14] = 1 << 5 | ty as u8;
        pair.ends[1].node.on_frame(pair.now, &RxFrame::new(&of_version(answer, 1)));
    }
    assert!(sent(&mut pair, 1).is_empty() && notices(&mut pair, 1).is_empty());
    let base = Base { src: pair.ends[1].node.port.station, ..base_to(&pair, 0) };
    let inc = pair.ends[0].node.settings.incarnation;
    let rst = RstOp {
        echo_sid: 0,
        echo_psn: Psn(0),
        life: 9,
        victim_inc: inc,
        victim_epoch: 0xdead,
        reason: RstReason::Version,
        versions: VERSIONS,
    };
    let forged = of_version(wire::frame(&base, &Op::Rst(rst), &[]), 3);
    pair.ends[0].node.on_frame(pair.now, &RxFrame::new(&forged));
    assert_eq!(pair.ends[0].node.counters().rx_bad_rst, 1);
    assert!(pair.ends[0].node.cqs.ready(pair.ends[0].cq).unwrap() == 0);
}

fn base_to(pair: &Pair, i: usize) -> Base {
    Base {
        dst: pair.ends[i].node.port.station,
        src: Station::at([2, 0, 0, 0, 0, 9]),
        ty: Ty::Rst,
        ar: false,
        rtx: false,
        ce: false,
        crc: true,
        dst_sid: 0,
        psn: Psn(0),
        cack: Psn(0),
        grant: 0,
        plen: 0,
    }
}
