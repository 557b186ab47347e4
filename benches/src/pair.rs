//! Two endpoints in one thread with messages between them: nothing idles, so that the count or time
//! is that of the message.

use crate::end::{BenchResult, End, RawEnd};

/// How a message is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// With a completion.
    Send,
    /// Injected, without a completion.
    Inject,
}

/// Two endpoints of the raw API on one segment, with `memory` bytes each.
///
/// # Errors
/// The error of the port or the API.
pub fn shm_pair(bench: &str, memory: usize) -> BenchResult<[RawEnd; 2]> {
    let spec = segment(bench);
    Ok(joined([RawEnd::open(&spec, memory)?, RawEnd::open(&spec, memory)?]))
}

/// The specification of a segment of this process alone, which is removed with its last member.
pub fn segment(bench: &str) -> String {
    format!("shm:bench-{bench}-{}", std::process::id())
}

/// Connects the two endpoints.
pub fn joined<E: End>(mut pair: [E; 2]) -> [E; 2] {
    for i in 0..2 {
        let addr = pair[1 - i].addr();
        pair[i].connect(addr);
    }
    pair
}

/// Sends `count` messages of `len` bytes from the first to the second endpoint, one after the
/// other.
///
/// # Errors
/// A call was refused, or a message did not arrive.
#[inline(never)]
pub fn exchange<E: End>(
    pair: &mut [E; 2],
    (how, len): (How, usize),
    count: u64,
) -> BenchResult<()> {
    let [a, b] = pair;
    for _ in 0..count {
        let posted = b.recv(0, len);
        let sent = match how {
            How::Send => a.send(0, len, false),
            How::Inject => a.inject(0, len),
        };
        if !posted || !sent {
            return Err("refused in steady state".to_owned());
        }
        let mut received = 0;
        let mut done = u64::from(how == How::Inject);
        for _ in 0..100_000_000 {
            if received == 0 {
                received += b.poll().received;
            }
            if done == 0 {
                done += a.poll().sent;
            }
            if received + done == 2 {
                break;
            }
            if received == 0 {
                // Needed only before the session is open, or while the sender waits for credit.
                done += a.poll().sent;
            } else {
                // Needed only while the sender waits for an acknowledgement.
                b.poll();
            }
        }
        if received + done != 2 {
            return Err("a message did not arrive".to_owned());
        }
    }
    Ok(())
}
