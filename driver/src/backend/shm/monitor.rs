//! Monitors: members that get a copy of every frame of a segment and send none; and the feed of
//! frames from another port of a process to them.

use super::role::{Role, is_monitor};
use super::{ShmPort, ShmSettings};
use crate::backend::tapped::{Direction, Record};
use crate::error::OpenError;
use crate::frame::{RxFrame, TxFrame};
use crate::port::{Port, PortGone};

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Bytes appended to a copied frame: its time of sending, little-endian.
pub(super) const STAMP_LEN: usize = 8;
/// The bit of the time that marks a frame of another port as sent, not received.
const OUT: u64 = 1 << 63;
/// How long a feed waits for the segment's lock: its thread polls, and opening is retried.
const FEED_PATIENCE: Duration = Duration::from_millis(1);
/// Longest tail of a frame, with its stamp.
pub(super) const TAIL_MAX: usize = 64;

/// `frame` with `at` appended; `None` if its tail is longer than any that we send.
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

/// Receives a copy of every frame that members of a segment send. Members notice a new monitor in
/// their next sweep, after 64 polls at most.
///
/// A monitor takes a place of the segment and, for every member that sends, the memory of a ring.
/// Each sender copies a frame once more, and skips the copy while the monitor's ring is full.
pub struct Monitor {
    pub(super) port: ShmPort,
}

impl Monitor {
    /// Joins the segment, making it if there is none, so that a monitor may start before the first
    /// member. The address and the MTU in `settings` are ignored.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub fn open(settings: &ShmSettings) -> Result<Self, OpenError> {
        let settings = ShmSettings { station: None, mtu: None, ..settings.clone() };
        let mut port = ShmPort::open_as(&settings, Role::Monitor)?;
        // Other members' MTU may be larger than the default.
        port.frame_max = port.shared.seg.layout.frame_max + STAMP_LEN;
        Ok(Self { port })
    }

    /// The segment, as `shm:NAME`.
    pub fn name(&self) -> &str {
        &self.port.caps().name
    }

    /// Whether the segment has other members, whose frames would be seen.
    pub fn has_senders(&self) -> bool {
        self.port.stations().next().is_some()
    }

    /// Lends at most `max` frames to `each`, with the time of sending (`CLOCK_MONOTONIC`, ns), the
    /// direction of a frame from another port ([`Direction::In`] for all others), and the frame's
    /// length without the stamp. Frames of one sender come in order; the times order frames of
    /// several. Never blocks.
    ///
    /// # Errors
    /// [`PortGone`]: no further frame will come.
    pub fn read(
        &mut self,
        max: usize,
        mut each: impl FnMut(u64, Direction, &RxFrame<'_>, usize),
    ) -> Result<usize, PortGone> {
        self.port.rx_burst(max, &mut |frame: &RxFrame<'_>| {
            let Some(len) = frame.len().checked_sub(STAMP_LEN) else { return };
            if let Some(stamp) = frame.chunk_at(len) {
                let stamp = u64::from_le_bytes(stamp);
                let way = if stamp & OUT == 0 { Direction::In } else { Direction::Out };
                each(stamp & !OUT, way, frame, len);
            }
        })
    }

    /// Frames missed because our ring was full.
    pub fn missed(&self) -> u64 {
        self.port.shared.seg.missed(self.port.shared.me).load(Relaxed)
    }
}

/// A member that copies frames of another port to the segment's monitors.
pub(in crate::backend) struct MonitorFeed {
    port: ShmPort,
}

impl MonitorFeed {
    /// Joins the segment; fails if its lock is not free within [`FEED_PATIENCE`].
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub(in crate::backend) fn open(settings: &ShmSettings) -> Result<Self, OpenError> {
        Ok(Self { port: ShmPort::open_within(settings, Role::Station, FEED_PATIENCE)? })
    }

    /// Whether a monitor lives. Takes a system call.
    pub(in crate::backend) fn is_watched(&mut self) -> bool {
        self.port.refresh();
        let ShmPort { monitors, peers, shared, .. } = &self.port;
        monitors.iter().any(|&m| is_monitor(peers[m].state) && shared.seg.lives(m))
    }
}

impl Record for MonitorFeed {
    fn note(&mut self, at_ns: u64, way: Direction, frame: &TxFrame<'_>) {
        self.port.refresh();
        let out = if way == Direction::Out { OUT } else { 0 };
        self.port.mirror(frame, at_ns | out);
    }
}
