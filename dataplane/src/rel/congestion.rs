//! Congestion control: how many packets a session may have in flight.
//!
//! A build has one algorithm, selected by the type [`Controller`], so that calls are not virtual.
//! Another algorithm is a file beside [`delay`] and a change of that type.
//!
//! It applies to sessions on ports that may lose frames. On a lossless port a session has its
//! [whole](CongestionControl::whole) window: there the receiver's credit is the limit.

pub mod delay;

use crate::rel::rtt::Rtt;
use crate::types::Instant;

/// Most packets that a session has in flight, if its peer accepts as many: 100 Gbit/s for a
/// millisecond in frames of 3,000 bytes.
pub const WINDOW: u32 = 4096;

/// [`WINDOW`] on a lossless path, where the receiver's credit is the limit.
pub const WINDOW_LOSSLESS: u32 = 256;

/// The congestion control of this build.
pub type Controller = delay::DelayWindow;

/// A congestion control. It is part of each session's record: at most 14 bytes, at any even
/// address, no allocation, no clock of its own. The default is the state of a new session.
pub trait CongestionControl: Default {
    /// The window of a session on a lossless port: unlimited, permanently.
    fn whole() -> Self;

    /// Packets that may be in flight, 1 to [`WINDOW`]. Called for every packet that is sent.
    fn window(&self) -> u32;

    /// An acknowledgement arrived at `now`. `rtt` already includes its sample, and the path's
    /// minimum and the smoothed round trip; the controller may tell it that the path has become
    /// longer. `floor_ns` is the delay that the port itself adds, such as the kernel's scheduling.
    fn on_ack(&mut self, now: Instant, ack: Acked, rtt: &mut Rtt, floor_ns: u64);

    /// An acknowledgement with a congestion echo arrived at `now`: a router marked packets (ECN).
    /// Called for each such acknowledgement, after its `on_ack`; there may be many per round trip.
    fn on_mark(&mut self, now: Instant, rtt: &Rtt);

    /// `lost` packets were declared lost at `now`, overtaken by later ones or by time. Not called
    /// for packets that are retransmitted as probes or since the peer refused them. There may be
    /// many calls per round trip.
    fn on_loss(&mut self, now: Instant, lost: u32, rtt: &Rtt);

    /// The retransmission timer expired at `now`, the `nth` time in a row: neither the packets in
    /// flight nor the probe after them were acknowledged. The intervals grow.
    fn on_timeout(&mut self, now: Instant, nth: u8);
}

/// An acknowledgement, as the congestion control sees it.
#[derive(Clone, Copy, Debug)]
pub struct Acked {
    /// Packets that it newly acknowledges.
    pub packets: u32,
    /// Packets in flight before it arrived, the acknowledged ones included.
    pub under_way: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idx::TxIdx;
    use crate::psn::Psn;
    use crate::rel::sent::{BodyRef, RELIABLE_OP_MAX, SendWindow, Sent, SentPool};
    use crate::wire::Ty;

    /// Records the calls.
    #[derive(Debug, Default)]
    struct Noted {
        losses: Vec<(Instant, u32)>,
    }

    impl CongestionControl for Noted {
        fn whole() -> Self {
            Self::default()
        }

        fn window(&self) -> u32 {
            WINDOW
        }

        fn on_ack(&mut self, _: Instant, _: Acked, _: &mut Rtt, _: u64) {}

        fn on_mark(&mut self, _: Instant, _: &Rtt) {}

        fn on_loss(&mut self, now: Instant, lost: u32, _: &Rtt) {
            self.losses.push((now, lost));
        }

        fn on_timeout(&mut self, _: Instant, _: u8) {}
    }

    /// Goal: a custom algorithm is informed of each lost packet once, whether later packets
    /// overtook it or a timer expired.
    #[test]
    fn a_loss_is_told_once() {
        let mut pool = SentPool::with_capacity(8);
        let mut snd = SendWindow::<Noted>::new(Psn(1));
        let mut rtt = Rtt::default();
        rtt.sample(10_000);
        for i in 0..5 {
            let (psn, at) = (snd.number(), Instant(1_000_000 * (i + 1)));
            let sent =
                Sent::new(psn, Ty::Msg, (&[0; RELIABLE_OP_MAX], 0), BodyRef::None, TxIdx::NONE, at);
            snd.keep(&mut pool, sent);
        }
        // The third packet has arrived, and is acknowledged twice.
        for now in [Instant(9_000_000), Instant(9_500_000)] {
            let news = snd.on_sack(&mut pool, now, &[2], Psn(1), &mut rtt);
            if let Some(newest) = news.newest {
                snd.detect(&mut pool, now, newest, &rtt);
            }
        }
        assert_eq!(snd.cwnd.losses, [(Instant(9_000_000), 2)]);
        for _ in 0..2 {
            snd.expire(&mut pool, Instant(20_000_000), Instant(4_000_000), &rtt);
        }
        assert_eq!(snd.cwnd.losses[1..], [(Instant(20_000_000), 1)]);
        assert_eq!(snd.lost, 3);
    }
}
