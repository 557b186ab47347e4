//! Static dispatch to the ports that are worth it.
//!
//! A small message over shared memory costs some hundred instructions. A virtual call, which needs
//! the frame's description in memory, would be a large part of that. So an owner of a port resolves
//! its type once. Methods of the shared segment are then inlined at every use, and those of the
//! other known ports in one place ([`AnyPort::on_wire`]).

use std::any::Any;
use std::ops::{Deref, DerefMut};

#[cfg(feature = "dpdk")]
use super::dpdk::DpdkPort;
use super::memif::Memif;
use super::near::{FarPort, Near};
use super::shm::{MonitorFeed, ShmPort, ShmSettings};
use super::switch::port::SwitchedPort;
use super::tapped::{Direction, Record, Tapped};
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::TxFrame;
use crate::hint::cold;
use crate::port::{FastPort, Port, PortGone, RxSink};

/// A port of a known type, or any other.
pub enum AnyPort {
    /// A shared-memory segment.
    Shm(Box<ShmPort>),
    /// A memif.
    Memif(Box<Memif>),
    /// A DPDK device.
    #[cfg(feature = "dpdk")]
    Dpdk(Box<DpdkPort>),
    /// A port of a switch.
    Switched(Box<SwitchedPort>),
    /// A port with a near and a far side.
    Near(Box<Near<AnyPort>>),
    /// Any other port.
    Other(Box<dyn Port>),
}

/// An operation on a port of known type, generic over that type (which a closure cannot be).
pub trait PortVisitor {
    /// Result of the operation.
    type Done;

    /// Runs the operation.
    fn visit<P: FastPort>(self, port: &mut Box<P>) -> Self::Done;
}

impl From<Box<dyn Port>> for AnyPort {
    fn from(port: Box<dyn Port>) -> Self {
        macro_rules! known {
            ($port:ident, $($(#[$cfg:meta])? $kind:ident),*) => {$(
                $(#[$cfg])?
                let $port = match downcast($port) {
                    Ok(known) => return Self::$kind(known),
                    Err(port) => port,
                };
            )*};
        }
        known!(
            port,
            Shm,
            #[cfg(feature = "dpdk")]
            Dpdk,
            Near,
            Switched,
            Memif
        );
        Self::Other(port)
    }
}

/// Evaluates the expression for the port of any variant.
macro_rules! each {
    ($any:expr, $port:ident => $done:expr) => {
        match $any {
            AnyPort::Shm($port) => $done,
            AnyPort::Memif($port) => $done,
            #[cfg(feature = "dpdk")]
            AnyPort::Dpdk($port) => $done,
            AnyPort::Switched($port) => $done,
            AnyPort::Near($port) => $done,
            AnyPort::Other($port) => $done,
        }
    };
}

impl From<AnyPort> for Box<dyn Port> {
    fn from(port: AnyPort) -> Self {
        each!(port, port => port)
    }
}

/// `AnyPort` as the far side of [`Near`].
impl FarPort for AnyPort {
    #[inline]
    fn receive(&mut self, max: usize, sink: &mut impl RxSink) -> Result<usize, PortGone> {
        self.rx_burst(max, sink)
    }

    #[inline(always)]
    fn rx_poll(&mut self, sink: &mut impl RxSink) -> Option<usize> {
        self.rx_poll_wire(sink)
    }

    fn count_polls(&mut self, polls: u32) {
        self.count(polls);
    }
}

/// [`FastPort::rx_poll`] of a port whose type is known.
struct VisitRxPoll<'a, S>(&'a mut S);

impl<S: RxSink> PortVisitor for VisitRxPoll<'_, S> {
    type Done = Option<usize>;

    #[inline(always)]
    fn visit<P: FastPort>(self, port: &mut Box<P>) -> Option<usize> {
        port.rx_poll(self.0)
    }
}

fn downcast<P: Port>(port: Box<dyn Port>) -> Result<Box<P>, Box<dyn Port>> {
    let any: &dyn Any = &*port;
    if !any.is::<P>() {
        return Err(port);
    }
    let any: Box<dyn Any> = port;
    Ok(any.downcast().expect("its type was seen"))
}

impl AnyPort {
    /// As [`Port::rx_burst`], with a sink of known type.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn rx_burst(&mut self, max: usize, sink: &mut impl RxSink) -> Result<usize, PortGone> {
        match self {
            Self::Shm(port) => Ok(port.receive(max, sink)),
            Self::Memif(port) => Ok(port.receive(max, sink)),
            #[cfg(feature = "dpdk")]
            Self::Dpdk(port) => port.receive(max, sink),
            Self::Switched(port) => Ok(port.receive(max, sink)),
            Self::Near(port) => port.receive(max, sink),
            Self::Other(port) => port.rx_burst(max, sink),
        }
    }

    /// The shared-memory segment of the port: itself, or its near side.
    #[inline(always)]
    pub fn segment(&mut self) -> Option<&mut Box<ShmPort>> {
        match self {
            Self::Shm(port) => Some(port),
            Self::Near(port) => Some(port.segment()),
            #[cfg(feature = "dpdk")]
            Self::Dpdk(_) => cold(None),
            Self::Memif(_) | Self::Switched(_) | Self::Other(_) => cold(None),
        }
    }

    /// Runs `visitor` on the port, or its side, that a frame to `dst`
    /// ([`Station::word`](crate::port::Station::word)) takes. `None` if the side is unknown, or its
    /// type is not static.
    #[inline(always)]
    pub fn with_fast<K: PortVisitor>(&mut self, dst: u64, visitor: K) -> Option<K::Done> {
        let on_segment = if let Self::Near(port) = self { port.is_last_near(dst) } else { true };
        if on_segment && let Some(port) = self.segment() {
            return Some(visitor.visit(port));
        }
        cold(());
        let wire = if let Self::Near(port) = self { port.wire_to(dst)? } else { self };
        wire.on_wire(visitor)
    }

    /// Runs `visitor` on the port, if its type is known and it has no shared-memory segment.
    #[inline(always)]
    pub fn on_wire<K: PortVisitor>(&mut self, visitor: K) -> Option<K::Done> {
        match self {
            Self::Memif(port) => Some(visitor.visit(port)),
            #[cfg(feature = "dpdk")]
            Self::Dpdk(port) => Some(visitor.visit(port)),
            Self::Switched(port) => Some(visitor.visit(port)),
            Self::Shm(_) | Self::Near(_) | Self::Other(_) => None,
        }
    }

    /// [`FastPort::rx_poll`] of a port other than a shared-memory segment. `None` also if its type
    /// is not known.
    #[inline(always)]
    pub fn rx_poll_wire(&mut self, sink: &mut impl RxSink) -> Option<usize> {
        self.on_wire(VisitRxPoll(sink)).flatten()
    }

    /// As [`FastPort::count`], if the port's type is known.
    #[inline(always)]
    pub fn count(&mut self, polls: u32) {
        match self {
            Self::Shm(port) => port.count(polls),
            Self::Memif(port) => port.count(polls),
            #[cfg(feature = "dpdk")]
            Self::Dpdk(port) => port.count(polls),
            Self::Switched(port) => port.count(polls),
            Self::Near(port) => port.count(polls),
            Self::Other(_) => {}
        }
    }
}

/// Capturing.
impl AnyPort {
    /// Shows the frames of this port (of a port with two sides: the far one) to the
    /// [`Monitor`](super::shm::Monitor)s of `segment`, from now on and while a monitor is attached;
    /// returns whether one is. To be called periodically, since the end is detected here. Meanwhile
    /// the port is dispatched dynamically. A segment shows its frames itself: false.
    ///
    /// # Errors
    /// Errors of joining the segment; the port is unchanged.
    pub fn record(&mut self, segment: &ShmSettings) -> Result<bool, OpenError> {
        match self {
            Self::Shm(_) => return Ok(false),
            Self::Near(port) => return port.far().record(segment),
            #[cfg(feature = "dpdk")]
            Self::Dpdk(_) => {}
            Self::Memif(_) | Self::Switched(_) | Self::Other(_) => {}
        }
        if let Some(tap) = self.tap() {
            if tap.record.is_watched() {
                return Ok(true);
            }
            if let Some(inner) = tap.inner.take() {
                *self = inner.into();
            }
            return Ok(false);
        }
        let mut show = MonitorFeed::open(segment)?;
        if !show.is_watched() {
            return Ok(false);
        }
        let tap = Tapped::new(None, self.caps().clone(), show);
        let inner = std::mem::replace(self, Self::Other(Box::new(tap)));
        if let Some(tap) = self.tap() {
            tap.inner = Some(inner.into());
        }
        Ok(true)
    }

    /// Shows a frame that bypasses a [captured](Self::record) port.
    pub(super) fn show(&mut self, frame: &TxFrame<'_>) {
        if let Some(tap) = self.tap() {
            tap.record.note(now_ns(), Direction::In, frame);
        }
    }

    fn tap(&mut self) -> Option<&mut Tapped<MonitorFeed>> {
        let Self::Other(port) = self else { return None };
        let any: &mut dyn Any = &mut **port;
        any.downcast_mut()
    }
}

impl Deref for AnyPort {
    type Target = dyn Port;

    #[inline]
    fn deref(&self) -> &(dyn Port + 'static) {
        each!(self, port => &**port)
    }
}

impl DerefMut for AnyPort {
    #[inline]
    fn deref_mut(&mut self) -> &mut (dyn Port + 'static) {
        each!(self, port => &mut **port)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::frame::{ETH_HDR_LEN, HeadBuf, RxFrame, WriteHead};
    use crate::mem::{InlineBytes, IoBuf};
    use crate::port::{InPlaceTx, Tx};

    /// An Ethernet header.
    struct Eth([u8; ETH_HDR_LEN]);

    impl WriteHead<ETH_HDR_LEN> for Eth {
        fn fill(&self, out: &mut HeadBuf<ETH_HDR_LEN>) {
            out.set::<0, ETH_HDR_LEN>(self.0);
        }
    }

    /// All pending frames, received by `take`.
    fn drain(mut take: impl FnMut(&mut dyn RxSink) -> usize) -> Vec<Vec<u8>> {
        let mut got = Vec::new();
        let mut sink = |frame: &RxFrame<'_>| {
            let mut bytes = vec![0; frame.len()];
            assert!(frame.copy_to(0, &mut bytes));
            got.push(bytes);
        };
        while take(&mut sink) > 0 {}
        got
    }

    fn rx_poll_all<P: FastPort>(port: &mut P) -> Vec<Vec<u8>> {
        drain(|mut sink| port.rx_poll(&mut sink).unwrap_or(0))
    }

    fn rx_burst_all<P: FastPort>(port: &mut P) -> Vec<Vec<u8>> {
        drain(|sink| port.rx_burst(32, sink).expect("it is there"))
    }

    /// Goal: frames sent and received by `FastPort` equal those by `Port`, for every length,
    /// several at a time, and until the ring is full. `a` and `b` are connected and used by this
    /// thread, and no frame may get lost between them.
    pub(in crate::backend) fn fast_is_the_same<P: FastPort>(a: &mut P, b: &mut P) {
        let head: [u8; ETH_HDR_LEN] = std::array::from_fn(|i| 2 * i as u8);
        let whole = |bytes: &[u8]| [&head[..], bytes].concat();
        let mut at_once = 0;
        for len in (0..=200).cycle().take(2000) {
            let bytes: Vec<u8> = (0..len).map(|i| (i * 11 + len) as u8).collect();
            let body = IoBuf::leaked(&bytes);
            let (number, few_bytes) = (len as u64 * 77, InlineBytes::one(0x77, 9).to_bytes());
            let mut sent = Vec::new();
            let mut put = |is_sent: bool, a: &mut P, rest: &[u8]| {
                at_once += usize::from(is_sent);
                if !is_sent {
                    assert_eq!(a.tx(&TxFrame::whole(&whole(rest))), Ok(Tx::Sent), "{len}");
                    a.flush().unwrap();
                }
                sent.push(whole(rest));
            };
            let is_sent = a.tx_short(0, &body, None, &Eth(head));
            put(is_sent, a, &bytes);
            if len % 3 == 0 {
                let is_sent = a.tx_short(0, &body, Some(number), &Eth(head));
                put(is_sent, a, &[&number.to_le_bytes()[..], &bytes].concat());
                let is_sent = a.tx_inline(0, &Eth(head), InlineBytes::one(0x77, 9));
                put(is_sent, a, &few_bytes[..9]);
            }
            if len % 5 < 2 {
                let (word, crc) = ((len % 5 == 1).then_some(number), 0x8765_4321_u32);
                let is_sent = a.tx_checked(0, (&body, Some(crc)), word, &Eth(head));
                let before = word.map_or(Vec::new(), |word| word.to_le_bytes().to_vec());
                put(is_sent, a, &[&before[..], &bytes, &crc.to_le_bytes()].concat());
            }
            if len % 4 == 1 {
                let is_sent = a.tx_part(0, &Eth(head), &body, 1, len - 1);
                put(is_sent, a, &bytes[1..]);
                assert!(!a.tx_part(0, &Eth(head), &body, 1, len));
            }
            let mut got = rx_poll_all(b);
            got.extend(rx_burst_all(b));
            assert!(got == sent, "{len}: {} of {}", got.len(), sent.len());
        }
        assert!(at_once > 2000, "{at_once} left at once");
        let mut pieces = IoBuf::leaked(b"in two");
        assert!(pieces.append(IoBuf::leaked(b" pieces")));
        assert!(!a.tx_short(0, &pieces, None, &Eth(head)));
        let body = IoBuf::leaked(b"fills it");
        let room = (0..).take_while(|_| a.tx_short(0, &body, None, &Eth(head))).count();
        let mut more = 0;
        while more < 100_000 && a.tx(&TxFrame::whole(&whole(b"fills it"))) == Ok(Tx::Sent) {
            more += 1;
        }
        a.flush().unwrap();
        assert!(!a.tx_short(0, &body, None, &Eth(head)), "the ring was full");
        let mut got = rx_poll_all(b);
        got.extend(rx_burst_all(b));
        assert_eq!(got.len(), room + more);
        assert!(got.iter().all(|frame| *frame == whole(b"fills it")));
        assert_eq!(tx_rx_counters(a, b)[0], tx_rx_counters(a, b)[1]);
        long_parts(a, b, &head);
        for _ in 0..3 {
            replies_while_lent(a, b, &head);
        }
    }

    /// Frames and bytes that `a` sent and that `b` received.
    fn tx_rx_counters<P: FastPort>(a: &P, b: &P) -> [(u64, u64); 2] {
        let (a, b) = (a.counters(), b.counters());
        [(a.tx_frames, a.tx_bytes), (b.rx_frames, b.rx_bytes)]
    }

    /// Goal: parts of a long buffer are sent unchanged, up to the longest frame.
    fn long_parts<P: FastPort>(a: &mut P, b: &mut P, head: &[u8; ETH_HDR_LEN]) {
        let frame_max = a.caps().mtu + ETH_HDR_LEN;
        let bytes: Vec<u8> = (0..frame_max + 100).map(|i| (i * 7 + i / 256) as u8).collect();
        let body = IoBuf::leaked(&bytes);
        let room = frame_max - ETH_HDR_LEN;
        let mut at_once = 0;
        for len in (100..room).step_by(37).chain(room - 2..=room) {
            let at = len % 64;
            let part = &bytes[at..at + len];
            let frame = [&head[..], part].concat();
            if a.tx_part(0, &Eth(*head), &body, at, len) {
                at_once += 1;
            } else {
                assert_eq!(a.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent), "{len}");
                a.flush().unwrap();
            }
            let mut got = rx_poll_all(b);
            got.extend(rx_burst_all(b));
            assert!(got == [frame], "{len}: {} frames", got.len());
        }
        assert!(at_once > 10, "{at_once} left at once");
        let before = tx_rx_counters(a, b);
        assert!(!a.tx_part(0, &Eth(*head), &body, 3, room + 1), "longer than a frame");
        assert!(!a.tx_part(0, &Eth(*head), &body, bytes.len() - 200, 201), "not there");
        assert_eq!((rx_poll_all(b).len(), rx_burst_all(b).len()), (0, 0));
        assert_eq!(tx_rx_counters(a, b), before);
    }

    /// Replies to each frame during its loan, and compares the frame before and after.
    struct ReplySink<'a> {
        head: [u8; ETH_HDR_LEN],
        body: &'a IoBuf,
        answered: Vec<bool>,
    }

    impl RxSink for ReplySink<'_> {
        fn frame(&mut self, _: &RxFrame<'_>) {
            panic!("a port that takes one frame lends its sending side as well");
        }

        fn frame_with(&mut self, frame: &RxFrame<'_>, mut back: impl InPlaceTx) {
            let (mut before, mut after) = (vec![0; frame.len()], vec![0; frame.len()]);
            assert!(frame.copy_to(0, &mut before));
            let number = before[ETH_HDR_LEN];
            // Alternates short and long replies.
            self.answered.push(match number % 2 {
                0 => back.tx_inline(0, &Eth(self.head), InlineBytes::one(u128::from(number), 9)),
                _ => back.tx_part(0, &Eth(self.head), self.body, usize::from(number), 300),
            });
            assert!(frame.copy_to(0, &mut after));
            assert!(before == after, "the answer was written over what it answers");
        }
    }

    /// Goal: replies can be sent during the loan of a frame, until the reverse ring is full,
    /// without changing the frame; exactly the replies that were reported as sent arrive.
    pub(in crate::backend) fn replies_while_lent<P: FastPort>(
        a: &mut P,
        b: &mut P,
        head: &[u8; ETH_HDR_LEN],
    ) {
        let bytes: Vec<u8> = (0..1000).map(|i| (i * 3 + i / 256) as u8).collect();
        let body = IoBuf::leaked(&bytes);
        let (mut sink, mut sent, mut want) =
            (ReplySink { head: *head, body: &body, answered: Vec::new() }, 0, Vec::new());
        while sink.answered.iter().filter(|is_sent| !**is_sent).count() < 20 {
            let number = sent as u8;
            let frame = [&head[..], &[number; 50]].concat();
            assert_eq!(a.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
            a.flush().unwrap();
            assert_eq!(b.rx_poll(&mut sink), Some(1));
            sent += 1;
            assert_eq!(sink.answered.len(), sent, "lent once");
            if sink.answered[sent - 1] {
                let few = InlineBytes::one(u128::from(number), 9).to_bytes();
                let part = match number % 2 {
                    0 => &few[..9],
                    _ => &bytes[usize::from(number)..usize::from(number) + 300],
                };
                want.push([&head[..], part].concat());
            }
            assert!(sent < 100_000, "the ring is never full");
        }
        assert!(want.len() > 20, "{} answers", want.len());
        let mut got = rx_poll_all(a);
        got.extend(rx_burst_all(a));
        assert!(got == want, "{} of {} answers", got.len(), want.len());
    }
}
