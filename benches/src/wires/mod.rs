//! What the bench `wires` plays ping-pong over: a fabric's port and what it is compared with.

mod kernel;
mod libfabric;
mod port;
mod raw;
mod xsk;

pub use kernel::{Tcp, Udp};
pub use libfabric::Pingpong;
pub use port::{Absent, Raw};
pub use raw::{Ring, Socket};
pub use xsk::Xsk;

use barewire_driver::clock::now_ns;

use crate::Sample;
use crate::end::{End, RawEnd};

/// Payload bytes.
pub const LEN: usize = 64;

/// One end of something that carries [`LEN`] bytes to the other end.
pub trait Wire {
    /// Sends them.
    fn send(&mut self);

    /// Whether as many have come since the last time it said so. Never blocks.
    fn arrived(&mut self) -> bool;

    /// Whether it can play here.
    fn is_there(&self) -> bool {
        true
    }

    /// Called while nothing is measured.
    fn idle(&mut self) {}
}

/// A fabric's end, which always has one receive posted.
pub struct Fabric(pub RawEnd);

impl Fabric {
    /// An end on the port that `spec` names; not connected yet.
    ///
    /// # Errors
    /// What the port or the api refused.
    pub fn open(spec: &str) -> Result<Self, String> {
        let mut end = RawEnd::open(spec, 64 << 10)?;
        if !end.recv(0, LEN) {
            return Err(format!("{spec}: no receive can be posted"));
        }
        Ok(Self(end))
    }
}

impl Wire for Fabric {
    #[inline]
    fn send(&mut self) {
        while !self.0.inject(1024, LEN) {
            self.0.poll();
        }
        self.0.recv(0, LEN);
    }

    #[inline]
    fn arrived(&mut self) -> bool {
        self.0.poll().received > 0
    }

    fn idle(&mut self) {
        self.0.poll();
    }
}

/// Half round trips, nanoseconds, the mean of every `chunk` of them. Something that loses what it
/// carries would wait for ever, so it is an error if nothing comes for a second.
///
/// # Errors
/// Nothing came.
pub fn ping(wire: &mut dyn Wire, count: u64, chunk: u64) -> Result<Sample, String> {
    let mut chunks = Sample::with_capacity((count / chunk) as usize);
    let mut at = now_ns();
    for i in 1..=count {
        wire.send();
        wait(wire)?;
        if i.is_multiple_of(chunk) {
            let now = now_ns();
            chunks.push((now - at) as f64 / (2 * chunk) as f64);
            at = now;
        }
    }
    Ok(chunks)
}

/// The other side of [`ping`].
///
/// # Errors
/// Nothing came.
pub fn pong(wire: &mut dyn Wire, count: u64) -> Result<(), String> {
    for _ in 0..count {
        wait(wire)?;
        wire.send();
    }
    Ok(())
}

#[inline]
fn wait(wire: &mut dyn Wire) -> Result<(), String> {
    let mut polls = 0_u64;
    let mut since = 0;
    while !wire.arrived() {
        polls += 1;
        if polls.is_multiple_of(1 << 16) {
            let now = now_ns();
            since = if since == 0 { now } else { since };
            if now - since > 5_000_000_000 {
                return Err("nothing came for five seconds".to_owned());
            }
        }
    }
    Ok(())
}
