//! Transports of the benchmark `wires`: a fabric's port, and its references.

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

/// One end of a transport of [`LEN`]-byte messages.
pub trait Wire {
    /// Sends a message.
    fn send(&mut self);

    /// Whether a message has arrived since the last call that returned true. Never blocks.
    fn arrived(&mut self) -> bool;

    /// Whether the transport is available.
    fn is_there(&self) -> bool {
        true
    }

    /// Called outside of measurements.
    fn idle(&mut self) {}
}

/// A fabric endpoint, which always has one receive posted.
pub struct Fabric(pub RawEnd);

impl Fabric {
    /// An endpoint on the port of `spec`; not connected yet.
    ///
    /// # Errors
    /// The error of the port or the API.
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

/// Half round trips in nanoseconds, the mean of every `chunk` of them. A transport may lose
/// messages, so waiting for one is limited to a second.
///
/// # Errors
/// No message arrived.
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
/// No message arrived.
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
