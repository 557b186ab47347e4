//! Selective acknowledgement, from the receiver's bitmap over the wire to what the sender reads.

use std::collections::BTreeSet;

use barewire_dataplane::psn::Psn;
use barewire_dataplane::rel::sack::RcvBitmap;
use barewire_dataplane::wire::{AckOp, Base, Op, Ty, frame};
use barewire_driver::frame::RxFrame;
use barewire_driver::port::MacAddr;

/// Packets that arrive in an order that the bytes choose, against a set of numbers that do not
/// wrap. The first two bytes place the start, so that runs cross the wrap.
///
/// Whatever the order: a packet counts once, `cack` stands at the first that is missing, and the
/// sender reads from the ACK just those that have arrived.
pub fn sack(data: &[u8]) {
    let Some((&[high, low], moves)) = data.split_first_chunk() else { return };
    let first = u32::from_be_bytes([high, high, low, low]);
    let mut window = RcvBitmap::default();
    let mut model = BTreeSet::new();
    let mut rcv_nxt = 0_u64;
    // Longer inputs say nothing new, and a set is slow.
    let moves = &moves[..moves.len().min(200)];
    for (i, &byte) in moves.iter().enumerate() {
        // Low distances are likely, so that the window moves.
        let dist = if byte & 1 == 0 { byte / 32 } else { byte };
        let fresh = model.insert(rcv_nxt + u64::from(dist));
        assert_eq!(window.is_set(dist.into()), !fresh);
        assert_eq!(window.set(dist.into()), fresh);
        let mut run = 0;
        while model.remove(&rcv_nxt) {
            rcv_nxt += 1;
            run += 1;
        }
        assert_eq!(window.take_run(), run);
        assert_eq!(window.is_empty(), model.is_empty());
        if i % 16 != 15 && i + 1 != moves.len() {
            continue; // making and reading a whole frame is what costs
        }
        let cack = Psn(first).add(rcv_nxt as u32);
        let read = over_the_wire(&window, cack);
        let want: BTreeSet<Psn2> =
            model.iter().map(|n| Psn2(first.wrapping_add(*n as u32))).collect();
        assert_eq!(read, want);
    }
}

/// A PSN that can be put in a set: here order does not matter, only equality.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Psn2(u32);

/// The PSNs that an ACK of `window` names, read from its bytes.
fn over_the_wire(window: &RcvBitmap, cack: Psn) -> BTreeSet<Psn2> {
    let (count, words) = window.sack_words();
    let ack = AckOp { delay: 0, newest: cack, words, count, dups: 0, resent: false };
    let mac = MacAddr([2, 0, 0, 0, 0, 1]);
    let base = Base {
        dst: mac,
        src: mac,
        ty: Ty::Ack,
        ar: false,
        rtx: false,
        crc: true,
        dst_sid: 1,
        psn: Psn(0),
        cack,
        grant: 0,
        plen: 0,
    };
    let bytes = frame(&base, &Op::Ack(ack), &[]);
    let rx = RxFrame::new(&bytes);
    let base = Base::parse(&rx).expect("just made");
    let ack = AckOp::parse(&rx, &base).expect("just made");
    let bits = (0..256).filter(|n| ack.words[n / 64] >> (n % 64) & 1 == 1);
    bits.map(|n| Psn2(base.cack.add(1 + n as u32).0)).collect()
}
