//! A segment of ports within one process, for tests.
//!
//! Frames keep their order per pair of ports, are never lost, and meet back-pressure when the
//! receiver's ring is full. All memory is reserved when the segment is made.

use std::collections::VecDeque;
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::frame::{ETH_HDR_LEN, RxFrame, TxFrame};
use crate::port::{MacAddr, Port, PortCaps, PortCounters, PortGone, PortWaiter, RxSink, Tx, brief};

/// Settings of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoopbackSettings {
    /// Largest number of bytes after the Ethernet header. Default 9,000, the usual jumbo frame.
    pub mtu: usize,
    /// Frames that can wait at a port; the next one is [`Tx::Full`]. Default 256. Costs
    /// `mtu` + 14 bytes of address space each, and memory once used.
    pub ring_count: usize,
}

impl Default for LoopbackSettings {
    fn default() -> Self {
        Self { mtu: 9000, ring_count: 256 }
    }
}

/// One port of a segment within this process.
pub struct Loopback {
    caps: PortCaps,
    me: usize,
    rx_queues: Arc<[RxQueue]>,
    counters: PortCounters,
    lent: Vec<Slot>,
}

struct RxQueue {
    mac: MacAddr,
    state: Mutex<State>,
    arrived: Condvar,
}

struct State {
    queue: VecDeque<Slot>,
    free: Vec<Slot>,
    waiting: usize,
    woken: bool,
    open: bool,
}

struct Slot {
    bytes: Box<[u8]>,
    len: usize,
}

impl RxQueue {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic of another port's owner leaves the queues whole: every change is one push or pop.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn push(&self, frame: &TxFrame<'_>) -> Tx {
        let mut state = self.lock();
        if !state.open {
            return Tx::NoRoute;
        }
        let Some(mut slot) = state.free.pop() else { return Tx::Full };
        slot.len = frame.copy_to(&mut slot.bytes);
        state.queue.push_back(slot);
        if state.waiting > 0 {
            self.arrived.notify_all();
        }
        Tx::Sent
    }
}

impl Loopback {
    /// A segment of two ports.
    pub fn pair() -> (Self, Self) {
        let mut ports = Self::segment(2, LoopbackSettings::default());
        let b = ports.pop().expect("two were made");
        let a = ports.pop().expect("two were made");
        (a, b)
    }

    /// A segment of `port_count` ports. Their MACs are 02:00:00:00:00:01 and up.
    ///
    /// # Panics
    /// If there are more than 65,535, or `ring_count` is 0.
    pub fn segment(port_count: usize, settings: LoopbackSettings) -> Vec<Self> {
        assert!(port_count < 0x1_0000 && settings.ring_count > 0);
        let rx_queues: Arc<[RxQueue]> =
            (0..port_count).map(|i| RxQueue::new(i, settings)).collect();
        (0..port_count)
            .map(|me| Self {
                caps: PortCaps {
                    lossless: true,
                    ..PortCaps::new(rx_queues[me].mac, settings.mtu, format!("loopback:{me}"))
                },
                me,
                rx_queues: Arc::clone(&rx_queues),
                counters: PortCounters::default(),
                lent: Vec::with_capacity(settings.ring_count),
            })
            .collect()
    }

    fn tx_group(&self, frame: &TxFrame<'_>) -> u64 {
        let others = self.rx_queues.iter().enumerate().filter(|&(i, _)| i != self.me);
        others.filter(|(_, rx_queue)| rx_queue.push(frame) == Tx::Full).count() as u64
    }
}

impl RxQueue {
    fn new(port_idx: usize, settings: LoopbackSettings) -> Self {
        let slot = || Slot { bytes: vec![0; ETH_HDR_LEN + settings.mtu].into(), len: 0 };
        Self {
            mac: MacAddr::from_u64(0x0200_0000_0001 + port_idx as u64),
            state: Mutex::new(State {
                queue: VecDeque::with_capacity(settings.ring_count),
                free: (0..settings.ring_count).map(|_| slot()).collect(),
                waiting: 0,
                woken: false,
                open: true,
            }),
            arrived: Condvar::new(),
        }
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.rx_queues[self.me].lock().open = false;
    }
}

impl Port for Loopback {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        assert!(frame.head.len() >= ETH_HDR_LEN && len <= ETH_HDR_LEN + self.caps.mtu);
        let dst = frame.dst();
        let sent = if dst.is_group() {
            self.counters.tx_dropped += self.tx_group(frame);
            Tx::Sent
        } else {
            // MACs are consecutive, so the receiver is found without a search.
            let at = dst.mac.to_u64().wrapping_sub(self.rx_queues[0].mac.to_u64());
            let rx_queue = usize::try_from(at).ok().and_then(|at| self.rx_queues.get(at));
            rx_queue.map_or(Tx::NoRoute, |rx_queue| rx_queue.push(frame))
        };
        Ok(self.counters.tried(sent, len))
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        Ok(())
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        let rx_queue = &self.rx_queues[self.me];
        {
            let mut state = rx_queue.lock();
            let n = max.min(state.queue.len());
            self.lent.extend(state.queue.drain(..n));
        }
        // The lock is not held here, so that a sink may send on another port of the segment.
        for slot in &self.lent {
            sink.prefetch(&RxFrame::new(&slot.bytes[..slot.len]));
        }
        for slot in &self.lent {
            sink.frame(&RxFrame::new(&slot.bytes[..slot.len]));
            self.counters.received(slot.len);
        }
        let n = self.lent.len();
        if n > 0 {
            rx_queue.lock().free.append(&mut self.lent);
        }
        Ok(n)
    }

    fn counters(&self) -> PortCounters {
        self.counters
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        Some(Arc::new(Waiter { rx_queues: Arc::clone(&self.rx_queues), me: self.me }))
    }
}

struct Waiter {
    rx_queues: Arc<[RxQueue]>,
    me: usize,
}

impl PortWaiter for Waiter {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let rx_queue = &self.rx_queues[self.me];
        let until = Instant::now() + brief(also, timeout);
        let mut state = rx_queue.lock();
        state.waiting += 1;
        while state.queue.is_empty() && !state.woken {
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                break;
            }
            let waited = rx_queue.arrived.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        state.woken = false;
        state.waiting -= 1;
        true
    }

    fn wake(&self) {
        let rx_queue = &self.rx_queues[self.me];
        rx_queue.lock().woken = true;
        rx_queue.arrived.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame_to(dst: MacAddr, payload: &[u8]) -> Vec<u8> {
        [&dst.0[..], &[0; 8], payload].concat()
    }

    fn drain(port: &mut Loopback) -> Vec<Vec<u8>> {
        let mut got = Vec::new();
        let mut sink = |f: &RxFrame<'_>| {
            let mut bytes = vec![0; f.len()];
            assert!(f.copy_to(0, &mut bytes));
            got.push(bytes);
        };
        while port.rx_burst(3, &mut sink).expect("loopback is never gone") > 0 {}
        got
    }

    #[test]
    fn unicast_arrives_in_order_and_a_full_ring_pushes_back() {
        let settings = LoopbackSettings { ring_count: 5, mtu: 256 };
        let mut ports = Loopback::segment(3, settings);
        let dst = ports[1].caps().station.mac;
        for round in 0..3_u8 {
            let frames: Vec<_> = (0..5).map(|i| frame_to(dst, &[round, i])).collect();
            for f in &frames {
                assert_eq!(ports[0].tx(&TxFrame::whole(f)), Ok(Tx::Sent));
            }
            assert_eq!(ports[0].tx(&TxFrame::whole(&frames[0])), Ok(Tx::Full));
            assert_eq!(drain(&mut ports[1]), frames);
            assert!(drain(&mut ports[2]).is_empty() && drain(&mut ports[0]).is_empty());
        }
        assert_eq!(ports[0].counters().tx_full, 3);
    }

    #[test]
    fn group_frames_reach_everybody_else_and_nobody_twice() {
        let mut ports = Loopback::segment(4, LoopbackSettings::default());
        let f = frame_to(MacAddr::BROADCAST, b"all");
        assert_eq!(ports[2].tx(&TxFrame::whole(&f)), Ok(Tx::Sent));
        for (i, port) in ports.iter_mut().enumerate() {
            assert_eq!(drain(port).len(), usize::from(i != 2));
        }
    }

    #[test]
    fn a_dropped_port_and_an_unknown_mac_have_no_route() {
        let (mut a, b) = Loopback::pair();
        let mac = b.caps().station.mac;
        drop(b);
        assert_eq!(a.tx(&TxFrame::whole(&frame_to(mac, b"x"))), Ok(Tx::NoRoute));
        let f = frame_to(MacAddr([2, 9, 9, 9, 9, 9]), b"x");
        assert_eq!(a.tx(&TxFrame::whole(&f)), Ok(Tx::NoRoute));
    }

    #[test]
    fn a_waiter_returns_when_a_frame_comes() {
        let (mut a, b) = Loopback::pair();
        let f = frame_to(b.caps().station.mac, b"x");
        let waiter = b.waiter().expect("loopback can wait");
        let t = std::thread::spawn(move || {
            let began = Instant::now();
            waiter.wait(Duration::from_secs(20));
            began.elapsed()
        });
        std::thread::sleep(Duration::from_millis(20));
        assert_eq!(a.tx(&TxFrame::whole(&f)), Ok(Tx::Sent));
        assert!(t.join().unwrap() < Duration::from_secs(10));
    }
}
