//! A session under attack by a station without its key: two nodes in one thread, whose frames pass
//! through memory, and forged frames that are inserted for one of them.

use std::collections::VecDeque;

use barewire_dataplane::flags::{CqFlags, OpFlags};
use barewire_dataplane::node::{
    AvId, CqId, EpId, MsgKind, Node, NodeCounters, NodeSettings, RecvReq, SendReq,
};
use barewire_dataplane::seal::{Keyring, Mode, PreSharedKey};
use barewire_dataplane::types::{Cqe, FI_ADDR_UNSPEC, FiAddr, Instant};
use barewire_driver::backend::fault::{Fault, FaultSettings};
use barewire_driver::backend::loopback::Loopback;
use barewire_driver::clock::now_ns;
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::port::{Port, PortCaps, Tx};

use crate::end::{BenchResult, Memory, node, node_settings};

/// Messages in flight.
const WINDOW: usize = 16;

/// Offset of the source MAC.
const SOURCE: usize = 6;

/// Offset of the byte whose highest bit marks a sealed frame.
const SEALED: usize = 15;

/// How an attacker changes a frame that it has captured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forgery {
    /// Flips a bit of the payload: the whole tag is verified.
    Changed,
    /// Replays the frame.
    Repeated,
    /// Clears the mark of a sealed frame.
    Unsealed,
    /// Truncates the frame to half of its length.
    Cut,
    /// The OPEN of the session, from another source station each time.
    Opening,
}

impl Forgery {
    /// All forgeries, with their names.
    pub const ALL: [(&str, Self); 5] = [
        ("changed", Self::Changed),
        ("repeated", Self::Repeated),
        ("unsealed", Self::Unsealed),
        ("cut", Self::Cut),
        ("opening", Self::Opening),
    ];

    /// Turns a frame into forgery number `n`.
    fn forge(self, frame: &mut Vec<u8>, n: u64) {
        match self {
            Self::Changed => {
                let at = frame.len() / 2;
                frame[at] ^= 1;
            }
            Self::Repeated => {}
            Self::Unsealed => frame[SEALED] &= 0x7f,
            Self::Cut => frame.truncate(frame.len() / 2),
            // The first octet marks a locally administered MAC.
            Self::Opening => {
                frame[SOURCE..][..6].copy_from_slice(&(n << 16 | 2).to_le_bytes()[..6]);
            }
        }
    }
}

/// One end of the session.
struct Station {
    node: Node,
    ep: EpId,
    cq: CqId,
    av: AvId,
    peer: FiAddr,
    memory: Memory,
    /// Frames sent and not yet delivered.
    out: VecDeque<Vec<u8>>,
    /// Unused frame buffers.
    spare: Vec<Vec<u8>>,
}

/// The two ends of a sealed session.
pub struct Attacked {
    ends: [Station; 2],
    len: usize,
    /// The sender's first frame.
    opening: Vec<u8>,
    /// The forged frame.
    forged: Vec<u8>,
}

impl Attacked {
    /// A session with messages of `len` bytes, sealed with AES-256-GCM.
    ///
    /// # Errors
    /// The node's error.
    pub fn open(len: usize) -> BenchResult<Self> {
        let (a, b) = Loopback::pair();
        let open = |port, number| {
            // Only a port that may lose frames leads out of the machine.
            let loses = FaultSettings { loss: f64::MIN_POSITIVE, ..FaultSettings::default() };
            Station::open(number, Fault::new(Box::new(port), loses, "fault()").caps(), len)
        };
        let (ends, opening, forged) = ([open(a, 1)?, open(b, 2)?], Vec::new(), Vec::new());
        let mut this = Self { ends, len, opening, forged };
        for i in 0..2 {
            let peer = this.ends[1 - i].node.addr_of(this.ends[1 - i].ep);
            let peer = peer.map_err(|e| format!("node: {e}"))?;
            let Station { node, av, .. } = &mut this.ends[i];
            let inserted = node.sessions().av_insert(Instant(now_ns()), *av, peer);
            this.ends[i].peer = inserted.map_err(|e| format!("node: {e}"))?;
        }
        Ok(this)
    }

    /// Counters of the receiver.
    pub fn counted(&self) -> NodeCounters {
        self.ends[1].node.counters()
    }

    /// Sends `count` messages from one end to the other. With `attack`, the receiver gets one
    /// forged frame of that kind per the given number of messages: made of a message's frame and
    /// delivered before it, or behind it for a replay. Returns the number of forged frames.
    ///
    /// # Errors
    /// A message was refused or did not arrive.
    pub fn run(&mut self, count: u64, attack: Option<(Forgery, u64)>) -> BenchResult<u64> {
        let (mut posted, mut sent, mut received, mut frames, mut forged) = (0, 0, 0, 0, 0);
        for _ in 0..count * 100_000 {
            while posted < count && posted - received.min(sent) < WINDOW as u64 {
                let at = posted as usize % WINDOW * self.len;
                if !self.ends[1].recv(at, self.len) || !self.ends[0].send(at, self.len) {
                    return Err("refused in steady state".to_owned());
                }
                posted += 1;
            }
            for from in 0..2 {
                self.ends[from].transmit();
                while let Some(frame) = self.ends[from].out.pop_front() {
                    if self.opening.is_empty() {
                        self.opening.clone_from(&frame);
                    }
                    let is_message = from == 0 && frame.len() > self.len;
                    frames += u64::from(is_message);
                    let forgery = attack.filter(|(_, one_in)| is_message && frames % one_in == 0);
                    let is_repeated = matches!(forgery, Some((Forgery::Repeated, _)));
                    if is_repeated {
                        self.ends[1].take(&frame);
                    }
                    if let Some((forgery, _)) = forgery {
                        let opens = forgery == Forgery::Opening;
                        self.forged.clone_from(if opens { &self.opening } else { &frame });
                        forgery.forge(&mut self.forged, frames);
                        self.ends[1].take(&self.forged);
                        forged += 1;
                    }
                    if !is_repeated {
                        self.ends[1 - from].take(&frame);
                    }
                    self.ends[from].spare.push(frame);
                }
            }
            received += self.ends[1].read(CqFlags::RECV);
            sent += self.ends[0].read(CqFlags::SEND);
            if received == count && sent == count {
                return Ok(forged);
            }
        }
        Err("a message did not arrive".to_owned())
    }
}

impl Station {
    fn open(number: u64, caps: &PortCaps, len: usize) -> BenchResult<Self> {
        let key = PreSharedKey::new(&[7; 32], Mode::Encrypted).ok_or("not a key")?;
        let keys = Keyring::new(vec![key], [number as u8; 32]);
        let (node, ep, cq, av) = node(NodeSettings { keys, ..node_settings(number) }, caps)?;
        let memory = Memory::new(WINDOW * len);
        let (out, spare, peer) = (VecDeque::new(), Vec::new(), FI_ADDR_UNSPEC);
        Ok(Self { node, ep, cq, av, peer, memory, out, spare })
    }

    fn recv(&mut self, at: usize, len: usize) -> bool {
        let (kind, buf, src) = (MsgKind::Tagged, self.memory.lend(at, len), FI_ADDR_UNSPEC);
        let flags = OpFlags::empty();
        let req = RecvReq { kind, buf, src, tag: 1, ignore: 0, context: 0, flags };
        self.node.post_recv(Instant(now_ns()), self.ep, req).is_ok()
    }

    fn send(&mut self, at: usize, len: usize) -> bool {
        let (kind, buf, dest) = (MsgKind::Tagged, self.memory.lend(at, len), self.peer);
        let (flags, no_completion) = (OpFlags::empty(), false);
        let mut req =
            SendReq { kind, buf, dest, tag: 1, data: 0, context: 0, flags, no_completion };
        let Self { node, out, spare, .. } = self;
        let now = || Instant(now_ns());
        node.try_send(self.ep, &mut req, &mut to(out, spare), now)
            || node.post_send(now(), self.ep, req).is_ok()
    }

    fn transmit(&mut self) {
        let Self { node, out, spare, .. } = self;
        node.transmit(Instant(now_ns()), &mut to(out, spare));
    }

    fn take(&mut self, frame: &[u8]) {
        self.node.on_frame(Instant(now_ns()), &RxFrame::new(frame));
    }

    fn read(&mut self, kind: CqFlags) -> u64 {
        let mut entries = [Cqe::default(); WINDOW];
        let n = self.node.cq_read(self.cq, &mut entries).unwrap_or(0);
        entries[..n].iter().filter(|entry| entry.flags.contains(kind)).count() as u64
    }
}

/// A frame sink that appends to `out`, with buffers of `spare`.
fn to<'a>(
    out: &'a mut VecDeque<Vec<u8>>,
    spare: &'a mut Vec<Vec<u8>>,
) -> impl FnMut(&TxFrame<'_>) -> Tx + 'a {
    |frame| {
        let mut bytes = spare.pop().unwrap_or_default();
        bytes.resize(frame.len(), 0);
        frame.copy_to(&mut bytes);
        out.push_back(bytes);
        Tx::Sent
    }
}
