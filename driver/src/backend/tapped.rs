//! A tap: a port that wraps another and records every frame that the port below accepts or lends.

use crate::clock::now_ns;
use crate::frame::{Body, ETH_HDR_LEN, RxFrame, TxFrame};
use crate::port::{Port, PortCaps, PortCounters, PortGone, Presence, RxSink, Station, Tx};

/// Direction of a frame, numbered as in pcapng.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Received.
    In = 1,
    /// Sent.
    Out = 2,
}

/// A recorder of the frames that pass a port.
pub(super) trait Record: Send + 'static {
    /// Records a frame that passed at `at_ns` of [`now_ns`].
    fn note(&mut self, at_ns: u64, way: Direction, frame: &TxFrame<'_>);

    /// Called in every poll.
    fn tick(&mut self) {}
}

/// See the module's documentation.
pub(super) struct Tapped<R> {
    caps: PortCaps,
    /// `None` only while [`AnyPort`](super::any_port::AnyPort) exchanges it.
    pub(super) inner: Option<Box<dyn Port>>,
    pub(super) record: R,
}

impl<R: Record> Tapped<R> {
    /// Wraps `inner`, with its capabilities or the same with another name.
    pub(super) fn new(inner: Option<Box<dyn Port>>, caps: PortCaps, record: R) -> Self {
        Self { caps, inner, record }
    }

    fn port(&self) -> &dyn Port {
        &**self.inner.as_ref().expect("a port is around another one")
    }

    fn port_mut(&mut self) -> &mut dyn Port {
        &mut **self.inner.as_mut().expect("a port is around another one")
    }
}

impl<R: Record> Port for Tapped<R> {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        // Before it is sent: a reply to it must not have an earlier time.
        let at = now_ns();
        let sent = self.port_mut().tx(frame)?;
        if sent == Tx::Sent {
            self.record.note(at, Direction::Out, frame);
        }
        Ok(sent)
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        self.port_mut().flush()
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        let Self { inner, record, .. } = self;
        record.tick();
        let mut recording = RecordingSink { sink, record, now: now_ns() };
        inner.as_mut().expect("a port is around another one").rx_burst(max, &mut recording)
    }

    fn counters(&self) -> PortCounters {
        self.port().counters()
    }

    fn below(&self) -> Option<&dyn Port> {
        Some(self.port())
    }

    fn near_counters(&self) -> Option<PortCounters> {
        self.port().near_counters()
    }

    fn presence(&mut self, station: Station) -> Presence {
        self.port_mut().presence(station)
    }

    fn is_near(&mut self, station: Station) -> bool {
        self.port_mut().is_near(station)
    }

    fn set_wire_filter(&mut self, may_leave: fn(&[u8]) -> bool) {
        self.port_mut().set_wire_filter(may_leave);
    }

    fn damages(&self) -> bool {
        self.port().damages()
    }
}

struct RecordingSink<'a, R> {
    sink: &'a mut dyn RxSink,
    record: &'a mut R,
    now: u64,
}

impl<R: Record> RxSink for RecordingSink<'_, R> {
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        self.sink.prefetch(frame);
    }

    fn frame(&mut self, frame: &RxFrame<'_>) {
        if let Some(head) = frame.first_chunk::<ETH_HDR_LEN>() {
            let body = Body::Frame { frame, offset: ETH_HDR_LEN };
            self.record.note(self.now, Direction::In, &TxFrame { head: &head, body, tail: &[] });
        }
        self.sink.frame(frame);
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::time::{Duration, Instant};

    use super::*;
    use crate::backend::any_port::AnyPort;
    use crate::backend::lock::Guard;
    use crate::backend::loopback::Loopback;
    use crate::backend::near::Near;
    use crate::backend::shm::{Monitor, ShmSettings};

    fn segment(name: &str) -> ShmSettings {
        ShmSettings::named(&format!("tap-{name}-{}", std::process::id()))
    }

    /// Directions of the recorded frames, and a byte of their payloads.
    fn seen(monitor: &mut Monitor) -> Vec<(Direction, u8)> {
        let mut seen = Vec::new();
        let mut each = |_, way, frame: &RxFrame<'_>, len| {
            let mut bytes = vec![0; len];
            assert!(frame.copy_to(0, &mut bytes) && len == 40);
            seen.push((way, bytes[20]));
        };
        // Some polls only discover a ring.
        for _ in 0..100 {
            monitor.read(64, &mut each).unwrap();
        }
        seen
    }

    /// Sends a frame with `byte` and receives it.
    fn pass(from: &mut dyn Port, to: &mut dyn Port, byte: u8) {
        let mac = to.caps().station.mac.0;
        let frame = [&mac[..], &[0; 6], &[0x88, 0xb5], &[byte; 26]].concat();
        assert_eq!(from.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
        from.flush().unwrap();
        let got = to.rx_burst(8, &mut |_: &RxFrame<'_>| {}).unwrap();
        assert_eq!(got, 1);
    }

    /// Goal: a port is recorded while a monitor is open, both ways and every frame once, for each
    /// monitor; before and after that the port is not wrapped. With a near side, frames of the far
    /// side are recorded.
    #[test]
    fn a_port_is_recorded_while_a_monitor_is_open() {
        let near = segment("near");
        for has_near in [false, true] {
            let segment = segment("frames");
            let (a, b) = Loopback::pair();
            let mut a = AnyPort::from(Box::new(a) as Box<dyn Port>);
            if has_near {
                let made =
                    Near::join(&near, a, "near".into()).unwrap_or_else(|e| panic!("{}", e.1));
                a = AnyPort::Near(Box::new(made));
            }
            let mut b = b;
            assert!(!a.record(&segment).unwrap(), "nobody looks");
            pass(&mut *a, &mut b, 1);
            let mut monitors = [(); 2].map(|()| Monitor::open(&segment).unwrap());
            assert!(a.record(&segment).unwrap());
            for _ in 0..2 {
                pass(&mut *a, &mut b, 2);
                pass(&mut b, &mut *a, 3);
                assert!(a.record(&segment).unwrap());
            }
            let once = [(Direction::Out, 2), (Direction::In, 3)];
            for monitor in &mut monitors {
                assert_eq!(seen(monitor), once.repeat(2));
                assert!(monitor.has_senders() && monitor.missed() == 0);
            }
            let [first, last] = monitors;
            drop(first);
            assert!(a.record(&segment).unwrap());
            drop(last);
            assert!(!a.record(&segment).unwrap());
            assert!(!segment.path().exists(), "it is left");
            pass(&mut *a, &mut b, 4);
            pass(&mut b, &mut *a, 5);
            let counters = a.counters();
            assert_eq!((counters.tx_frames, counters.rx_frames), (4, 3));
        }
    }

    /// Goal: a stopped monitor does not block the recorded process. Method: the segment's lock is
    /// held while recording begins, and while it ends.
    #[test]
    fn a_port_does_not_wait_for_a_monitor() {
        let segment = segment("locked");
        let (a, _b) = Loopback::pair();
        let mut a = AnyPort::from(Box::new(a) as Box<dyn Port>);
        let monitor = Monitor::open(&segment).unwrap();
        let file = File::options().read(true).write(true).open(segment.path()).unwrap();
        let at_once = |a: &mut AnyPort| {
            let begun = Instant::now();
            let is_recorded = a.record(&segment).ok();
            assert!(begun.elapsed() < Duration::from_millis(500), "{:?}", begun.elapsed());
            is_recorded
        };
        let held = Guard::try_take(&file).unwrap();
        assert_eq!(at_once(&mut a), None);
        drop(held);
        assert_eq!(at_once(&mut a), Some(true));
        drop(monitor);
        let _held = Guard::try_take(&file).unwrap();
        assert_eq!(at_once(&mut a), Some(false));
        let _ = std::fs::remove_file(segment.path());
    }
}
