//! Section A.1: the nine calls of fi_msg, their flags, and buffered receive.

use barewire::flags::CqFlags;
use barewire::*;

use crate::harness::*;

/// Sizes around every limit: inject 256, the loopback's frame of 9,000 bytes, eager 16 KiB, and
/// one that is pulled in several pieces.
const SIZES: &[usize] = &[0, 1, 255, 256, 257, 8_950, 8_999, 9_000, 9_001, 16_383, 16_384, 16_385];

/// M1, M4: one message for one posted buffer, whole, of any length; the completion says how long it
/// was and gives the buffers back.
#[test]
fn m1_m4_a_message_of_any_length_arrives_whole() {
    let p = Pair::default();
    for &len in SIZES.iter().chain(&[1 << 20]) {
        p.b.ep.recv(Buf::zeroed(len + 7), FI_ADDR_UNSPEC, 11).unwrap();
        p.a.ep.send(buf(len, 3), p.a.peer, 22).unwrap();
        let got = p.at_b();
        assert_eq!((got.op_context, got.len), (11, len));
        assert_eq!(got.flags, CqFlags::RECV | CqFlags::MSG);
        assert!(got.bytes() == &pattern(len, 3)[..], "{len} bytes arrived changed");
        let sent = p.at_a();
        assert_eq!((sent.op_context, sent.flags), (22, CqFlags::SEND | CqFlags::MSG));
        assert!(sent.bufs.into_one().unwrap()[..] == pattern(len, 3)[..]);
    }
    p.all_is_back();
}
