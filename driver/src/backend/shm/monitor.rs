//! A member that gets a copy of every frame of the segment and sends none.

use super::role::Role;
use super::{ShmPort, ShmSettings};
use crate::error::OpenError;
use crate::frame::{RxFrame, TxFrame};
use crate::port::{Port, PortGone};

use std::sync::atomic::Ordering::Relaxed;

/// Bytes behind a copied frame: when it was sent, little-endian.
pub(super) const STAMP_LEN: usize = 8;
/// Longest tail of a frame, with its stamp.
pub(super) const TAIL_MAX: usize = 64;

/// `frame` with `at` behind it, or `None` if its tail is longer than any that we send.
pub(super) fn stamped<'a>(
    frame: &TxFrame<'a>,
    at: u64,
    tail: &'a mut [u8; TAIL_MAX],
) -> Option<TxFrame<'a>> {
    let len = frame.tail.len();
    let stamp = tail.get_mut(len..len + STAMP_LEN)?;
    stamp.copy_from_slice(&at.to_le_bytes());
    tail[..len].copy_from_slice(frame.tail);
    Some(TxFrame { tail: &tail[..len + STAMP_LEN], ..*frame })
}

/// Sees what all members of a segment send, from soon after it joined: they notice it the next time
/// they sweep, after 64 polls at most.
///
/// It takes a place of the segment and, with every member that sends, the memory of a ring. Each
/// sender copies a frame once more; one that finds the monitor's ring full goes on without.
pub struct Monitor {
    pub(super) port: ShmPort,
}

impl Monitor {
    /// Joins the segment, making it if there is none: who waits for the first frame may come first.
    /// Of `settings`, the address and the MTU do not matter.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(settings: &ShmSettings) -> Result<Self, OpenError> {
        let settings = ShmSettings { station: None, mtu: None, ..settings.clone() };
        let mut port = ShmPort::open_as(&settings, Role::Monitor)?;
        // Others may carry more than this machine's default.
        port.frame_max = port.shared.seg.layout.frame_max + STAMP_LEN;
        Ok(Self { port })
    }

    /// The segment, as `shm:NAME`.
    pub fn name(&self) -> &str {
        &self.port.caps().name
    }

    /// Lends at most `max` frames to `each`, with the time of sending (`CLOCK_MONOTONIC`, ns) and
    /// the length without what this adds behind the frame. Frames of one sender come in order; of
    /// several, the times say which was first. Never blocks.
    ///
    /// # Errors
    /// [`PortGone`]: no further frame will come.
    pub fn read(
        &mut self,
        max: usize,
        mut each: impl FnMut(u64, &RxFrame<'_>, usize),
    ) -> Result<usize, PortGone> {
        self.port.rx_burst(max, &mut |frame: &RxFrame<'_>| {
            let Some(len) = frame.len().checked_sub(STAMP_LEN) else { return };
            if let Some(stamp) = frame.chunk_at(len) {
                each(u64::from_le_bytes(stamp), frame, len);
            }
        })
    }

    /// Frames that were sent while our ring was full, and so were missed.
    pub fn missed(&self) -> u64 {
        self.port.shared.seg.missed(self.port.shared.me).load(Relaxed)
    }
}
