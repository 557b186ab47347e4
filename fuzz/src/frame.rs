//! The frame parser.

use barewire_dataplane::wire::{
    BASE_LEN, Base, Op, PROLOGUE_OFF, PackRecords, TRAILER_LEN, WireError, crc_of_head, frame,
};
use barewire_driver::frame::RxFrame;

/// A frame, as it is and with its checksum put right.
///
/// Whatever the bytes: no panic. If they are taken: everything that was taken lies within them, and
/// encoding it again gives the same bytes, so nothing was overlooked.
pub fn frame_parser(data: &[u8]) {
    let first = take(data);
    if first != Err(WireError::Crc) {
        return;
    }
    // The payload ends where a checksum makes the frame good, if there is such a place.
    for end in BASE_LEN..=data.len() - TRAILER_LEN {
        let mut repaired = data.to_vec();
        let crc = crc_of_head(&data[..end]);
        repaired[end..end + TRAILER_LEN].copy_from_slice(&crc.to_le_bytes());
        if take(&repaired) != Err(WireError::Crc) {
            return;
        }
    }
    panic!("refused for a checksum that cannot be right");
}

fn take(data: &[u8]) -> Result<(), WireError> {
    let rx = RxFrame::new(data);
    let raw = Base::parse_raw(&rx);
    assert_eq!(raw.is_some(), data.len() >= BASE_LEN);
    let base = Base::parse(&rx)?;
    assert!(data.len() >= base.end(BASE_LEN + base.ty.op_len()));
    // What a node would do without looking at errors before.
    for (op, off, len) in PackRecords::new(&rx, BASE_LEN + 8, base.plen, 255).flatten() {
        assert!(off + len <= data.len() && usize::from(op.len) == len);
    }
    let op = Op::parse(&rx, &base)?;
    assert_eq!(op.ty(), base.ty);
    let mut head = [0; 128];
    let payload_off = BASE_LEN + op.emit(&mut head);
    let end = base.end(payload_off);
    assert!(end <= data.len() && end > PROLOGUE_OFF);
    let payload = &data[payload_off..payload_off + usize::from(base.plen)];
    assert_eq!(frame(&base, &op, payload), &data[..end], "encoded again it differs");
    Ok(())
}
