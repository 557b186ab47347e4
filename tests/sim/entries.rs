//! The entries by which a program reaches a node, as the engine has them: those that ask the fewest
//! questions and decline the most first, and behind them the one that knows every case.

use barewire_dataplane::error::Result;
use barewire_dataplane::flags::OpFlags;
use barewire_dataplane::node::{EpId, FrameSink, InPlaceFrame, Message, Node, RecvReq, SendReq};
use barewire_dataplane::types::Instant;
use barewire_driver::frame::TxFrame;
use barewire_driver::mem::SHORT;
use barewire_driver::port::Tx;

use crate::net::Egress;
use crate::rng::Rng;

/// How often each entry took what it was asked to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entries {
    pub(crate) try_send_cached: u64,
    pub(crate) try_send_inline: u64,
    pub(crate) try_send: u64,
    pub(crate) try_post_recv_reserved: u64,
    pub(crate) try_post_recv: u64,
    /// Completions that went to a reader and never lay in a queue.
    pub(crate) read: u64,
}

impl Entries {
    pub(crate) fn add(&mut self, other: &Self) {
        self.try_send_cached += other.try_send_cached;
        self.try_send_inline += other.try_send_inline;
        self.try_send += other.try_send;
        self.try_post_recv_reserved += other.try_post_recv_reserved;
        self.try_post_recv += other.try_post_recv;
        self.read += other.read;
    }

    /// Whether none was left out.
    pub(crate) fn all(&self) -> bool {
        let short = [self.try_send_cached, self.try_send_inline, self.try_send];
        let all = [self.try_post_recv_reserved, self.try_post_recv, self.read];
        short.iter().chain(&all).all(|&n| n > 0)
    }
}

/// Sends by some of the entries, one after the other.
pub(crate) fn send(
    node: &mut Node,
    ep: EpId,
    mut req: SendReq,
    (now, mut out): (Instant, Egress<'_>),
    (rng, count): (&mut Rng, &mut Entries),
) -> Result<()> {
    if rng.chance(0.4) && node.try_send_cached(ep, &req, &mut CachedOnly(out.again())) {
        count.try_send_cached += 1;
        return Ok(());
    }
    if rng.chance(0.4) && node.try_send_inline(ep, &req, &mut out, || now) {
        count.try_send_inline += 1;
        return Ok(());
    }
    if rng.chance(0.6) && node.try_send(ep, &mut req, &mut out, || now) {
        count.try_send += 1;
        return Ok(());
    }
    let more = req.flags.contains(OpFlags::MORE);
    let posted = node.post_send(now, ep, req);
    if !more && rng.chance(0.7) {
        // The engine does so always. What is left to the next turn is as if the port was full.
        node.transmit(now, &mut out);
    }
    posted
}

/// Posts a receive by some of the entries, one after the other.
pub(crate) fn recv(
    node: &mut Node,
    ep: EpId,
    req: RecvReq,
    now: Instant,
    (rng, count): (&mut Rng, &mut Entries),
) -> Result<()> {
    if rng.chance(0.5) && node.objects().try_post_recv_reserved(ep, &req) {
        count.try_post_recv_reserved += 1;
        return Ok(());
    }
    if rng.chance(0.6) && node.objects().try_post_recv(ep, &req) {
        count.try_post_recv += 1;
        return Ok(());
    }
    node.post_recv(now, ep, req)
}

/// A port that takes a message that is short and in one piece, and nothing else.
struct CachedOnly<'a>(Egress<'a>);

impl FrameSink for CachedOnly<'_> {
    fn is_lossless(&self) -> bool {
        self.0.is_lossless()
    }

    fn send(&mut self, _: &TxFrame<'_>) -> Tx {
        Tx::Full
    }

    fn send_msg(&mut self, msg: &impl Message) -> Tx {
        let body = msg.body();
        let short = body.len() <= SHORT && body.as_one().is_some();
        if short { self.0.send_msg(msg) } else { Tx::Full }
    }
}

/// The way back from a port that lends a frame: short frames alone, and not always.
pub(crate) struct Back<'a> {
    pub(crate) out: Egress<'a>,
    pub(crate) free: bool,
}

impl FrameSink for Back<'_> {
    fn is_lossless(&self) -> bool {
        self.out.is_lossless()
    }

    fn send(&mut self, _: &TxFrame<'_>) -> Tx {
        Tx::Full
    }

    fn send_in_place<const H: usize>(&mut self, frame: &impl InPlaceFrame<H>) -> Tx {
        if self.free { self.out.send_in_place(frame) } else { Tx::Full }
    }
}
