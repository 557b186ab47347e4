//! How many packets of a session may be under way.
//!
//! One algorithm is in a build, by its type, so that asking it costs nothing:
//! [`Controller`] names it. Another one is a file beside [`delay`] and that name.
//!
//! It rules sessions on ports that may lose frames. On a port that loses nothing a session has its
//! [whole](CongestionControl::whole) window: there the receiver's credit is the limit.

pub mod delay;

use crate::rel::rtt::Rtt;
use crate::types::Instant;

/// Packets a session may have in flight, if its peer accepts as many: 100 Gbit/s for a millisecond
/// in frames of 3,000 bytes.
pub const WINDOW: u32 = 4096;

/// The same on a path that loses nothing: there the receiver's credit is the limit.
pub const WINDOW_LOSSLESS: u32 = 256;

/// The algorithm of this build.
pub type Controller = delay::DelayWindow;

/// A congestion control. Lives in the record of each session: at most 14 bytes, at any even
/// address, no allocation, no clock of its own. The default is a session that has just been opened.
pub trait CongestionControl: Default {
    /// The window of a session on a port that loses nothing: no limit, for good.
    fn whole() -> Self;

    /// Packets that may be under way, 1 to [`WINDOW`]. Asked for every packet that is sent.
    fn window(&self) -> u32;

    /// An acknowledgement came at `now`. `rtt` has its round trip already, and the path's least and
    /// smoothed ones, and may be told that the path has become longer; `floor_ns` is what the port
    /// adds by itself, such as the kernel's scheduling.
    fn on_ack(&mut self, now: Instant, ack: Acked, rtt: &mut Rtt, floor_ns: u64);

    /// An acknowledgement came at `now` that says that packets met a long queue: a router has
    /// marked them (ECN). Told of each such acknowledgement, which may be many a round trip; its
    /// `on_ack` came before.
    fn on_mark(&mut self, now: Instant, rtt: &Rtt);

    /// `lost` packets were found lost at `now`: overtaken by later ones, or by time. Packets that
    /// are sent again as probes, or since the peer refused them, are not told. There may be many
    /// such calls a round trip.
    fn on_loss(&mut self, now: Instant, lost: u32, rtt: &Rtt);

    /// The retransmission timer expired at `now`, the `nth` time in a row: neither the packets
    /// under way nor the probe after them were acknowledged. The intervals grow.
    fn on_timeout(&mut self, now: Instant, nth: u8);
}

/// What an acknowledgement says.
#[derive(Clone, Copy, Debug)]
pub struct Acked {
    /// Packets that it is for.
    pub packets: u32,
    /// Packets that were under way when it came, those included.
    pub under_way: u32,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::idx::TxIdx;
    use crate::psn::Psn;
    use crate::rel::sent::{BodyRef, RELIABLE_OP_MAX, SendWindow, Sent, SentPool};
    use crate::wire::Ty;

    /// Notes what it is told.
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

    /// Goal: an algorithm of one's own is told of each lost packet once, whether others overtook it
    /// or its time ran out.
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
        // The third of them has arrived, and says so twice.
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
