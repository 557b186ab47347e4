//! Messages of all lengths between a caller and an echo, there and back, byte for byte.

use crate::supervisor::Worker;

/// What the caller counted.
#[derive(Debug)]
pub(crate) struct Counts {
    /// Frames that its port dropped.
    #[allow(dead_code)]
    pub(crate) rx_dropped: u64,
    /// Frames that its node refused.
    #[allow(dead_code)]
    pub(crate) refused: u64,
    /// Frames that came to it with a mark of congestion, and acknowledgements that echoed one.
    #[allow(dead_code)]
    pub(crate) marked: u64,
    #[allow(dead_code)]
    pub(crate) echoes: u64,
    /// Length of its session's frames behind the Ethernet header.
    #[allow(dead_code)]
    pub(crate) frame_max: u64,
}

/// Sends every length there and back between a `caller` in place 0 and an `echo` in place 1, which
/// `start` starts; `sizes` gets the MTU.
pub(crate) fn there_and_back(
    start: impl Fn(usize, &str) -> Worker,
    mut sizes: impl FnMut(usize) -> Vec<usize>,
) -> Counts {
    let mut echo = start(1, "echo");
    let mut caller = start(0, "caller");
    let (addr, mtu) = caller.addr.split_once(" mtu ").unwrap();
    let mtu = mtu.parse().unwrap();
    echo.say(&format!("PEER {addr}"));
    let to = format!("PEER {}", echo.addr);
    caller.say(&to);
    for len in sizes(mtu) {
        echo.say(&format!("SIZE {len}"));
        caller.say(&format!("CALL {len}"));
        caller.answer("BACK");
        echo.answer("ECHOED");
    }
    echo.say("END");
    caller.say("COUNT");
    let counts = caller.answer("COUNTS");
    let mut counts = counts.split_whitespace().map(|n| n.parse().unwrap());
    let mut next = || counts.next().unwrap();
    let (rx_dropped, refused) = (next(), next());
    let (marked, echoes, frame_max) = (next(), next(), next());
    let counts = Counts { rx_dropped, refused, marked, echoes, frame_max };
    caller.say("END");
    echo.finish();
    caller.finish();
    counts
}

/// Lengths around every limit of the port and the protocol.
pub(crate) fn all_sizes(mtu: usize) -> Vec<usize> {
    let mut sizes = vec![0, 1, 12, 13, 255, 256, 257, 16_383, 16_384, 16_385];
    sizes.extend([mtu - 48, mtu - 38, mtu - 1, mtu, mtu + 1, 1 << 20, 16 << 20]);
    sizes
}

/// A few of them, for links that make each one slow.
pub(crate) fn fewer_sizes(mtu: usize) -> Vec<usize> {
    vec![0, 1, 256, 257, mtu - 38, mtu, mtu + 1, 16_385, 1 << 20]
}
