//! Tests of the headers together.

use barewire_driver::frame::RxFrame;
use barewire_driver::port::MacAddr;

use super::*;
use crate::psn::Psn;

/// A MSG goes out and comes back as it was, at the offsets that `docs/wire.md` names.
#[test]
fn msg_round_trip() {
    let base = Base {
        dst: MacAddr([2, 0, 0, 0, 0, 1]),
        src: MacAddr([2, 0, 0, 0, 0, 2]),
        ty: Ty::Msg,
        ar: true,
        rtx: false,
        crc: true,
        dst_sid: 0x0010_0003,
        psn: Psn(u32::MAX),
        cack: Psn(7),
        grant: 64,
        plen: 3,
    };
    let op = MsgOp { dst_ep: 1, src_ep: 2, tagged: true, imm: Some(9), tag: 0x1234, len: 0 };
    let mut frame = vec![0; HEAD_MAX];
    base.emit(frame.first_chunk_mut().unwrap());
    let head = BASE_LEN + op.emit(&mut frame[BASE_LEN..]);
    frame.truncate(head);
    let body = barewire_driver::frame::Body::Bytes(b"abc");
    let tail = trailer(&frame, &body);
    frame.extend_from_slice(b"abc");
    frame.extend_from_slice(&tail);
    let rx = RxFrame::new(&frame);
    let got = Base::parse(&rx).unwrap();
    assert_eq!(got, base);
    let got_op = MsgOp::parse(&rx, &got).unwrap();
    assert_eq!(got_op, op);
    assert_eq!(got_op.payload_off(), 56);
    assert!(verify_crc(&rx, 59));
}
