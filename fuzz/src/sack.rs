//! Selective acknowledgement, from the receiver's bitmap over the wire to what the sender reads.

use std::collections::BTreeSet;

use barewire_dataplane::psn::Psn;
use barewire_dataplane::rel::sack::{BitmapPool, RcvBitmap};
use barewire_dataplane::wire::{AckOp, Base, Op, Ty, frame};
use barewire_driver::frame::RxFrame;
use barewire_driver::port::Station;

/// Packets that arrive in an order that the bytes choose, against a set of numbers that do not
/// wrap. The first two bytes place the start, so that runs cross the wrap, and choose the window.
///
/// Whatever the order: a packet counts once, `cack` stands at the first that is missing, and the
/// sender reads from the ACK just those that have arrived.
pub fn sack(data: &[u8]) {
    let Some((&[high, low], moves)) = data.split_first_chunk() else { return };
    let first = u32::from_be_bytes([high, high, low, low]);
    let len = if low % 2 == 0 { 256 } else { 4096 };
    let mut pool = BitmapPool::new(len);
    let mut window = RcvBitmap::default();
    let mut model = BTreeSet::new();
    let mut rcv_nxt = 0_u64;
    let psn = |n: u64| Psn(first).add(n as u32);
    // Longer inputs say nothing new, and a set is slow.
    let moves = &moves[..moves.len().min(200)];
    for (i, &byte) in moves.iter().enumerate() {
        // Low distances are likely, so that the window moves.
        let dist = if byte & 1 == 0 { byte / 32 } else { byte };
        let far = if byte % 16 == 15 { len / 256 } else { 1 };
        let at = rcv_nxt + u64::from(dist) * u64::from(far);
        let fresh = model.insert(at);
        assert_eq!(window.is_set(psn(at)), !fresh);
        assert_eq!(window.set((psn(rcv_nxt), psn(at)), &mut pool), fresh);
        while model.remove(&rcv_nxt) {
            assert!(window.is_set(psn(rcv_nxt)));
            window.clear(psn(rcv_nxt), &mut pool);
            rcv_nxt += 1;
        }
        assert!(!window.is_set(psn(rcv_nxt)));
        assert_eq!(window.is_empty(), model.is_empty());
        if i % 16 != 15 && i + 1 != moves.len() {
            continue; // making and reading a whole frame is what costs
        }
        let read = over_the_wire(&window, psn(rcv_nxt));
        let want: BTreeSet<u32> = model.iter().map(|&n| psn(n).0).collect();
        assert_eq!(read, want);
    }
}

/// The PSNs that an ACK of `window` names, read from its bytes.
fn over_the_wire(window: &RcvBitmap, cack: Psn) -> BTreeSet<u32> {
    let mut words = [0; AckOp::WORDS_MAX];
    let count = window.sack(cack, &mut words) as u8;
    let ack = AckOp { delay: 0, newest: cack, count, dups: 0, resent: false };
    let station = Station::at([2, 0, 0, 0, 0, 1]);
    let base = Base {
        dst: station,
        src: station,
        ty: Ty::Ack,
        ar: false,
        rtx: false,
        ce: false,
        crc: true,
        dst_sid: 1,
        psn: Psn(0),
        cack,
        grant: 0,
        plen: 0,
    };
    let bytes = frame(&base, &Op::Ack(ack, words), &[]);
    let rx = RxFrame::new(&bytes);
    let base = Base::parse(&rx).expect("just made");
    let ack = AckOp::parse(&rx, &base).expect("just made");
    let mut read = [0; AckOp::WORDS_MAX];
    let read = ack.sack(&rx, &mut read);
    let bits = (0..64 * read.len()).filter(|n| read[n / 64] >> (n % 64) & 1 == 1);
    bits.map(|n| base.cack.add(1 + n as u32).0).collect()
}
