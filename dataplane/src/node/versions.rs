//! Frames of another protocol version: their sender is refused, and reported once.

use barewire_driver::frame::RxFrame;
use barewire_driver::port::Station;

use super::{Notice, Sessions};
use crate::types::{Instant, Tenant};
use crate::wire::{OtherVersionFrame, RstOp, RstReason, Ty, VERSIONS};

/// Number of stations that are reported. Further ones are not: a sender of frames can invent
/// addresses.
const STATIONS_MAX: usize = 64;

/// Stations already reported.
#[derive(Debug, Default)]
pub(crate) struct LoggedStations {
    stations: Vec<Station>,
}

impl LoggedStations {
    /// Records `station`. Returns whether it is to be reported: once per station.
    pub(super) fn insert(&mut self, station: Station) -> bool {
        let is_new = self.stations.len() < STATIONS_MAX && !self.stations.contains(&station);
        if is_new {
            self.stations.push(station);
        }
        is_new
    }
}

impl Sessions<'_> {
    /// Processes a frame of another version: an RST, whose format all versions share, or a frame to
    /// refuse. A frame that may be damaged is dropped.
    #[cold]
    pub(super) fn on_other_version(&mut self, now: Instant, frame: &RxFrame<'_>) {
        let Some(other) = OtherVersionFrame::parse(frame) else { return };
        let from_us = other.base.dst != self.port.station || other.base.src == self.port.station;
        if from_us || self.port.far.has_crc() && !other.crc {
            return;
        }
        if other.base.ty == Ty::Rst as u8 {
            match RstOp::parse(frame) {
                Ok(op) => self.on_rst(now, other.base.src, &op),
                Err(err) => self.counters.rx_wire[err.index()] += 1,
            }
            return;
        }
        if !other.may_be_refused() {
            return;
        }
        let (station, theirs) = (other.base.src, other.base.version);
        if self.openings.other_versions.insert(station) {
            self.observed.note(Notice::OtherVersion { station, theirs });
        }
        let rst = RstOp {
            echo_sid: other.base.dst_sid,
            echo_psn: other.base.psn,
            life: crate::wire::life_of(self.settings.incarnation),
            victim_inc: other.inc,
            victim_epoch: other.epoch,
            reason: RstReason::Version,
            versions: VERSIONS,
        };
        self.control().reply_rst(now, (station, Tenant::NONE), other.sid, rst, frame.len());
    }
}
