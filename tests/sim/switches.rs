//! Real switches between the processes of a node and the wire, over rings in real memory.
//!
//! What is driven here step by step is the driver's own: a process has a [`SwitchedPort`], and the
//! [`Switch`] forwards between those and a NIC, which is the model's. It ends as one that is
//! closed, without a turn more: what lies in its rings, and what its NIC has taken and not sent, is
//! lost.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use barewire_driver::backend::shm::ShmSettings;
use barewire_driver::backend::switch::{Switch, SwitchCounters, SwitchedPort};
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::port::{Port, PortCaps, PortCounters, PortGone, RxSink, Station, Tx};

use crate::plan::LinkPlan;

/// Turns of a switch in one event. Its senders need not ring, so it looks at some rings only now
/// and then.
const TURNS: u32 = 256;
/// Events without a frame after which it may sleep: all rings have been looked at.
const IDLE_MAX: u32 = 8;

/// The switches of all nodes, and the ports of the processes that live.
pub(crate) struct Switches {
    nodes: Vec<Node>,
    ports: Vec<Option<SwitchedPort>>,
    /// What switches that have ended counted.
    past: Vec<SwitchCounters>,
}

struct Node {
    segment: ShmSettings,
    nic: Ends,
    switch: Option<Switch>,
    /// A process that does nothing: with the last one the segment would go.
    _idle: SwitchedPort,
    /// Whether an event for its next turns is due.
    is_due: bool,
    idle: u32,
}

impl Switches {
    /// A switch for each node of `link`, and no process yet.
    pub(crate) fn new(hosts: usize, link: &LinkPlan) -> Self {
        let nodes = link.nodes.unwrap_or(1);
        let ports = (0..hosts).map(|_| None).collect();
        Self { nodes: (0..nodes).map(|n| Node::new(n, link)).collect(), ports, past: Vec::new() }
    }

    pub(crate) fn node_of(&self, host: usize) -> usize {
        host % self.nodes.len()
    }

    /// A process is at `station` now, or none is.
    pub(crate) fn set_host(&mut self, host: usize, station: Option<Station>) {
        let node = self.node_of(host);
        // Both are not in the segment at once.
        self.ports[host] = None;
        self.ports[host] = station.map(|station| self.nodes[node].join(station));
    }

    /// What [`Port::tx`] of `host` answers.
    pub(crate) fn send(&mut self, host: usize, frame: &TxFrame<'_>) -> Tx {
        let port = self.ports[host].as_mut().expect("a sender is alive");
        let sent = port.tx(frame).expect("a segment does not go");
        port.flush().expect("a segment does not go");
        sent
    }

    /// What came for `host`, as bytes.
    pub(crate) fn receive(&mut self, host: usize, max: usize, each: impl FnMut(&[u8])) -> usize {
        let Some(port) = &mut self.ports[host] else { return 0 };
        port.receive(max, &mut Bytes { each, bytes: Vec::new() })
    }

    /// Whether an event has to be made for the next turns of `node`, which has something to do.
    pub(crate) fn wake(&mut self, node: usize) -> bool {
        let node = &mut self.nodes[node];
        node.idle = 0;
        node.switch.is_some() && !std::mem::replace(&mut node.is_due, true)
    }

    /// Some turns of the switch of `node`: whether it moved frames, and whether more turns are due.
    pub(crate) fn turn(&mut self, node: usize) -> (bool, bool) {
        let node = &mut self.nodes[node];
        node.is_due = false;
        let Some(switch) = &mut node.switch else { return (false, false) };
        let turn = |_| switch.turn().expect("the NIC does not go");
        let moved = (0..TURNS).map(turn).any(|moved| moved > 0);
        node.idle = if moved { 0 } else { node.idle + 1 };
        node.is_due = node.idle < IDLE_MAX;
        (moved, node.is_due)
    }

    /// The next frame that the NIC of `node` has to send, if there is one.
    pub(crate) fn next_out(&mut self, node: usize) -> Option<Vec<u8>> {
        self.nodes[node].nic.lock().out.pop_front()
    }

    /// A frame reaches the NIC of `node`. Whether it has room.
    pub(crate) fn arrive(&mut self, node: usize, bytes: &[u8]) -> bool {
        let node = &self.nodes[node];
        let mut nic = node.nic.lock();
        let has_room = node.switch.is_some() && nic.inward.len() < nic.rx_ring;
        if has_room {
            nic.inward.push_back(bytes.to_vec());
        }
        has_room
    }

    /// The switch of `node` ends, with what its NIC holds.
    pub(crate) fn end(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        self.past.extend(node.switch.take().map(|switch| switch.counters()));
        let mut nic = node.nic.lock();
        nic.out.clear();
        nic.inward.clear();
    }

    /// The next switch of `node` starts, if none runs.
    pub(crate) fn start(&mut self, node: usize) {
        let node = &mut self.nodes[node];
        if node.switch.is_none() {
            node.switch = Some(node.nic.switch(&node.segment));
        }
    }

    pub(crate) fn has_switch(&self, node: usize) -> bool {
        self.nodes[node].switch.is_some()
    }

    /// What all switches counted: frames to NICs, from NICs, between stations, and dropped.
    pub(crate) fn sums(&self) -> [u64; 4] {
        let now = self.nodes.iter().filter_map(|node| node.switch.as_ref().map(Switch::counters));
        let mut sums = [0; 4];
        for c in self.past.iter().copied().chain(now) {
            let dropped = c.spoofed + c.malformed + c.unknown + c.full;
            let of = [c.to_nic, c.from_nic, c.between, dropped];
            sums.iter_mut().zip(of).for_each(|(sum, n)| *sum += n);
        }
        sums
    }
}

impl Node {
    fn new(number: usize, link: &LinkPlan) -> Self {
        static SERIAL: AtomicU64 = AtomicU64::new(0);
        let serial = SERIAL.fetch_add(1, Ordering::Relaxed);
        let segment = ShmSettings {
            ring_len: Some(link.switch_ring),
            members: Some(16),
            ..ShmSettings::named(&format!("sim-{}-{serial}", std::process::id()))
        };
        let ends = Nic { rx_ring: link.rx_ring, tx_ring: link.tx_ring, ..Nic::default() };
        let caps = PortCaps {
            link_bps: link.bps,
            ..PortCaps::new(
                Station::at([2, 1, 0, 0, 0, number as u8]),
                link.mtu[number],
                format!("sim:nic{number}"),
            )
        };
        let nic = Ends { caps, ends: Arc::new(Mutex::new(ends)) };
        let switch = Some(nic.switch(&segment));
        let idle = Station { number: 7, ..nic.caps.station };
        let idle = member(&segment, idle);
        Self { segment, nic, switch, _idle: idle, is_due: false, idle: 0 }
    }

    fn join(&self, station: Station) -> SwitchedPort {
        let port = member(&self.segment, station);
        let (has, due) = (port.caps().mtu, self.nic.caps.mtu);
        assert_eq!(has, due, "rings of {:?} bytes are too small", self.segment.ring_len);
        port
    }
}

fn member(segment: &ShmSettings, station: Station) -> SwitchedPort {
    let segment = ShmSettings { station: Some(station), ..segment.clone() };
    let port = SwitchedPort::open(&segment, "sim".into()).expect("room for a member");
    port.expect("there was a switch")
}

/// What a NIC holds.
#[derive(Default)]
struct Nic {
    out: VecDeque<Vec<u8>>,
    inward: VecDeque<Vec<u8>>,
    rx_ring: usize,
    tx_ring: usize,
}

/// A NIC as its switch has it, and as the wire does.
#[derive(Clone)]
struct Ends {
    caps: PortCaps,
    ends: Arc<Mutex<Nic>>,
}

impl Ends {
    fn lock(&self) -> MutexGuard<'_, Nic> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn switch(&self, segment: &ShmSettings) -> Switch {
        Switch::open(segment, Box::new(self.clone())).expect("a switch opens")
    }
}

impl Port for Ends {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let mut nic = self.lock();
        if nic.out.len() >= nic.tx_ring {
            return Ok(Tx::Full);
        }
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        nic.out.push_back(bytes);
        Ok(Tx::Sent)
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        Ok(())
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        let mut nic = self.lock();
        let count = max.min(nic.inward.len());
        for bytes in nic.inward.drain(..count) {
            sink.frame(&RxFrame::new(&bytes));
        }
        Ok(count)
    }

    fn counters(&self) -> PortCounters {
        PortCounters::default()
    }
}

/// Takes frames as bytes.
struct Bytes<F> {
    each: F,
    bytes: Vec<u8>,
}

impl<F: FnMut(&[u8])> RxSink for Bytes<F> {
    fn frame(&mut self, frame: &RxFrame<'_>) {
        self.bytes.resize(frame.len(), 0);
        assert!(frame.copy_to(0, &mut self.bytes) && !frame.is_near());
        (self.each)(&self.bytes);
    }
}
