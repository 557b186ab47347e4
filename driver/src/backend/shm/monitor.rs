//! A member that gets a copy of every frame of the segment and sends none; and one that shows it
//! frames of another port.

use super::role::{Role, is_monitor};
use super::{ShmPort, ShmSettings};
use crate::backend::tapped::{Direction, Record};
use crate::error::OpenError;
use crate::frame::{RxFrame, TxFrame};
use crate::port::{Port, PortGone};

use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

/// Bytes behind a copied frame: when it was sent, little-endian.
pub(super) const STAMP_LEN: usize = 8;
/// The bit of the time that says that a frame of another port was sent by that.
const OUT: u64 = 1 << 63;
/// How long who shows frames waits for other members: its thread polls, and it is asked again.
const SHOW_PATIENCE: Duration = Duration::from_millis(1);
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

    /// Whether there is anybody else, whose frames it would see.
    pub fn has_senders(&self) -> bool {
        self.port.stations().next().is_some()
    }

    /// Lends at most `max` frames to `each`, with the time of sending (`CLOCK_MONOTONIC`, ns), the
    /// way that one took which another port showed, and the length without what this adds
    /// behind the frame. Frames of one sender come in order; of several, the times say which was
    /// first. Never blocks.
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

    /// Frames that were sent while our ring was full, and so were missed.
    pub fn missed(&self) -> u64 {
        self.port.shared.seg.missed(self.port.shared.me).load(Relaxed)
    }
}

/// A member that shows monitors frames which pass another port.
pub(in crate::backend) struct Show {
    port: ShmPort,
}

impl Show {
    /// Joins the segment, unless a member is about to join or to leave for longer than a moment.
    ///
    /// # Errors
    /// [`OpenError`]; nothing is left behind.
    pub(in crate::backend) fn open(settings: &ShmSettings) -> Result<Self, OpenError> {
        Ok(Self { port: ShmPort::open_within(settings, Role::Station, SHOW_PATIENCE)? })
    }

    /// Whether a monitor lives that sees it. Takes a system call.
    pub(in crate::backend) fn is_watched(&mut self) -> bool {
        self.port.refresh();
        let ShmPort { monitors, peers, shared, .. } = &self.port;
        monitors.iter().any(|&m| is_monitor(peers[m].state) && shared.seg.lives(m))
    }
}

impl Record for Show {
    fn note(&mut self, at_ns: u64, way: Direction, frame: &TxFrame<'_>) {
        self.port.refresh();
        let out = if way == Direction::Out { OUT } else { 0 };
        self.port.mirror(frame, at_ns | out);
    }
}
