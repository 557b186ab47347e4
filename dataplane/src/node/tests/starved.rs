//! A peer that lives, and for whose frames the port has no memory.

use barewire_driver::port::Presence;

use super::*;
use crate::error::Error;
use crate::node::path::Path;

/// A port over which both see that the other lives, and what of memory it has.
struct Small<'a> {
    out: &'a mut VecDeque<Vec<u8>>,
    has_memory: bool,
}

impl FrameSink for Small<'_> {
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        if self.has_memory { sink(self.out)(frame) } else { Tx::Full }
    }

    fn presence(&mut self, _: Station) -> Presence {
        if self.has_memory { Presence::Present } else { Presence::Starved }
    }

    fn lacks_memory(&self) -> bool {
        !self.has_memory
    }
}

/// Turns of both ends until `end`, of which the first has memory or not.
fn turns(pair: &mut Pair, end: Instant, has_memory: bool) {
    while pair.now < end {
        for (i, has_memory) in [(0, has_memory), (1, true)] {
            let End { node, out, .. } = &mut pair.ends[i];
            node.transmit(pair.now, &mut Small { out, has_memory });
            for bytes in std::mem::take(&mut pair.ends[i].out) {
                pair.ends[1 - i].node.on_frame(pair.now, &RxFrame::new(&bytes));
            }
        }
        pair.now = pair.now + 1_000_000;
    }
}

fn seen(station: u8) -> End {
    let mut end = end(station, 1500, true);
    end.node.port.far |= Path::PRESENCE;
    end
}

/// Goal: an operation for which the port has no memory ends with `FI_ENOSPC` after T_dead, although
/// its peer lives; it is done if there is memory before.
#[test]
fn an_operation_without_memory_ends() {
    for comes_back in [false, true] {
        let mut pair = Pair::of([seen(1), seen(2)]);
        let t_dead = pair.ends[0].node.settings.t_dead_ns;
        for n in 1..=2 {
            pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), n).unwrap();
        }
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 3).unwrap();
        let opened = pair.now + t_dead / 10;
        turns(&mut pair, opened, true);
        assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 4).unwrap();
        let begun = pair.now;
        turns(&mut pair, begun + t_dead * 8 / 10, false);
        assert_eq!((pair.read(0).len(), pair.ends[0].node.counters().sessions_stuck), (0, 0));
        turns(&mut pair, begun + t_dead * 2, comes_back);
        if comes_back {
            assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
            continue;
        }
        let failed = pair.read_err(0);
        assert_eq!((failed.err, failed.cqe.op_context), (Error::NoSpace, 4));
        assert_eq!(pair.ends[0].node.counters().sessions_stuck, 1);
    }
}

/// A port that tells that the other lives, and which takes frames, for nobody, or does not.
struct Alone {
    takes: bool,
    has_memory: bool,
}

impl FrameSink for Alone {
    fn send(&mut self, _: &TxFrame<'_>) -> Tx {
        if self.takes { Tx::Sent } else { Tx::Full }
    }

    fn presence(&mut self, _: Station) -> Presence {
        Presence::Present
    }

    fn lacks_memory(&self) -> bool {
        !self.has_memory
    }
}

/// Goal: a process that lives and computes is waited for beyond T_dead, before its session is open
/// too. Method: an OPEN that the port takes although it lacks memory for others, and one for which
/// the port is full although it has memory.
#[test]
fn a_live_peer_is_waited_for_before_the_session_opens() {
    for takes in [true, false] {
        let mut pair = Pair::of([seen(1), seen(2)]);
        let t_dead = pair.ends[0].node.settings.t_dead_ns;
        pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 2).unwrap();
        pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 3).unwrap();
        let end = pair.now + 4 * t_dead;
        while pair.now < end {
            let mut out = Alone { takes, has_memory: !takes };
            pair.ends[0].node.transmit(pair.now, &mut out);
            pair.now = pair.now + 1_000_000;
        }
        assert_eq!(pair.ends[0].node.cqs.ready(pair.ends[0].cq), Ok(0), "takes: {takes}");
        let end = pair.now + 20 * t_dead;
        turns(&mut pair, end, true);
        assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1), "takes: {takes}");
    }
}
