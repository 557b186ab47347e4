//! What a `barewire switch` publishes, in a block as a domain's: [`MAGIC`](super::MAGIC),
//! [`LAYOUT`](super::LAYOUT) and the header are the same, the kind is 1. Behind the name of its
//! NIC's port:
//!
//! | words | hold |
//! |---|---|
//! | 32 .. 48 | the segment of its stations, zero-padded |
//! | then | [`SWITCH_NAMES`], [`NIC_NAMES`] |
//! | then | room for 4,096 stations of 16 words |

use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use barewire_driver::backend::switch::{StationCounters, Switch};
use barewire_driver::port::Station;

use super::file::{HEADER_LEN, Loaded, NAME_LEN, Shape, Table, Writer};
use super::record::Backoff;
use super::{DIR, PORT_NAMES, no_statistics, port_words, put_port, record};

/// Counters of a switch: frames by direction, then dropped frames by cause.
pub const SWITCH_NAMES: [&str; 7] =
    ["to_nic", "from_nic", "between", "spoofed", "malformed", "unknown", "full"];

/// Counters of the NIC's port.
pub const NIC_NAMES: [&str; PORT_NAMES.len() / 2] = {
    let [a, b, c, d, e, f, g, h, ..] = PORT_NAMES;
    [a, b, c, d, e, f, g, h]
};

/// Least time between two updates.
const PERIOD: Duration = Duration::from_millis(200);

const SEGMENT_AT: usize = HEADER_LEN + NAME_LEN;
const SWITCH_AT: usize = SEGMENT_AT + NAME_LEN;
const NIC_AT: usize = SWITCH_AT + SWITCH_NAMES.len();
const HEAD_LEN: usize = NIC_AT + NIC_NAMES.len();
const STATIONS: usize = 0;
const STATION_LEN: usize = 16;

pub(super) const SHAPE: Shape = {
    let stations = Table { at: HEAD_LEN, row_len: STATION_LEN, max: 4096 };
    let none = Table { at: HEAD_LEN, row_len: 1, max: 0 };
    Shape { kind: 1, head_len: HEAD_LEN, tables: [stations, none] }
};

/// The writer of a switch's block.
pub struct SwitchPublisher {
    writer: Writer,
    backoff: Backoff,
    published: Instant,
}

impl SwitchPublisher {
    /// Creates the file of a switch. A failure is logged.
    pub fn create(switch: &mut Switch) -> Option<Self> {
        let mut publisher = Self::try_create(Path::new(DIR)).map_err(no_statistics).ok()?;
        publisher.publish(switch);
        Some(publisher)
    }

    fn try_create(dir: &Path) -> io::Result<Self> {
        let writer = Writer::create(dir, SHAPE)?;
        Ok(Self { writer, backoff: Backoff::default(), published: Instant::now() })
    }

    /// [`publish`](Self::publish), if the last update is older than a period at `now`.
    pub fn publish_if_due(&mut self, switch: &mut Switch, now: Instant) {
        if now.duration_since(self.published) >= PERIOD {
            self.publish(switch);
        }
    }

    /// Writes the counters of `switch`.
    pub fn publish(&mut self, switch: &mut Switch) {
        self.published = Instant::now();
        let counted = switch.counters();
        let counters: [u64; SWITCH_NAMES.len()] = [
            counted.to_nic,
            counted.from_nic,
            counted.between,
            counted.spoofed,
            counted.malformed,
            counted.unknown,
            counted.full,
        ];
        let stations = switch.stations();
        self.writer.update(|block, _| {
            put_port(switch.nic(), block);
            block.put_name(SEGMENT_AT, switch.segment());
            block.put_all(SWITCH_AT, &counters);
            block.put_all(NIC_AT, &port_words(switch.nic_counters()));
            for (row, station) in stations.iter().enumerate() {
                block.put_row(STATIONS, row, &words(station));
            }
            for row in stations.len()..block.used(STATIONS) {
                block.put_row(STATIONS, row, &[0; STATION_LEN]);
            }
        });
        record::serve_request(&self.writer, &mut self.backoff, |segment| switch.record(segment));
    }
}

fn words(s: &StationCounters) -> [u64; STATION_LEN] {
    let f = &s.frames;
    let mut words = [0; STATION_LEN];
    // An address is never 0.
    words[..11].copy_from_slice(&[
        s.station.word(),
        s.pid.into(),
        s.sent,
        s.received,
        f.sent,
        f.received,
        f.full,
        f.spoofed,
        f.malformed,
        s.uid.into(),
        s.is_relayed.into(),
    ]);
    words
}

/// Published statistics of a switch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwitchSnapshot {
    /// Its file.
    pub path: PathBuf,
    /// The user whose file it is. The rest is as trustworthy as that user.
    pub owner: u32,
    /// Its process.
    pub pid: u32,
    /// Whether it runs.
    pub alive: bool,
    /// When it started, ns since 1970.
    pub opened_ns: u64,
    /// When the block was written, ns since 1970. A running switch writes it five times a second.
    pub updated_ns: u64,
    /// The NIC's port.
    pub port_name: String,
    /// The NIC's address.
    pub station: Station,
    /// Bytes of a frame after its Ethernet header.
    pub mtu: usize,
    /// The segment of its stations.
    pub segment: String,
    /// Frames by direction, and dropped frames by cause: [`SWITCH_NAMES`].
    pub counters: Vec<(&'static str, u64)>,
    /// Counters of the NIC's port: [`NIC_NAMES`].
    pub nic: Vec<(&'static str, u64)>,
    /// Its stations.
    pub stations: Vec<StationRow>,
}

/// One station of a switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StationRow {
    /// Its address.
    pub station: Station,
    /// Its process, as numbered where it lives.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// Bytes that it sent, with the overhead of its ring.
    pub sent_bytes: u64,
    /// Bytes that it received, with the overhead of its ring.
    pub received_bytes: u64,
    /// Frames from it that the switch accepted.
    pub sent: u64,
    /// Unicast frames delivered to it.
    pub received: u64,
    /// Unicast frames to it that its ring had no room for.
    pub full: u64,
    /// Frames from it with another station's source address.
    pub spoofed: u64,
    /// Frames from it that are not barewire frames, or too long.
    pub malformed: u64,
    /// Whether its frames pass a socket, since its process is of a build with another segment
    /// layout.
    pub is_relayed: bool,
}

pub(super) fn parse(loaded: &Loaded) -> SwitchSnapshot {
    SwitchSnapshot {
        path: loaded.path.clone(),
        owner: loaded.owner,
        pid: loaded.pid,
        alive: loaded.alive,
        opened_ns: loaded.opened_ns,
        updated_ns: loaded.updated_ns,
        port_name: loaded.name(HEADER_LEN),
        station: Station::from_word(loaded.head[7]),
        mtu: loaded.head[8] as usize,
        segment: loaded.name(SEGMENT_AT),
        counters: loaded.named(&SWITCH_NAMES, SWITCH_AT),
        nic: loaded.named(&NIC_NAMES, NIC_AT),
        stations: loaded.rows(STATIONS).map(station_row).collect(),
    }
}

fn station_row(r: &[u64; STATION_LEN]) -> StationRow {
    StationRow {
        station: Station::from_word(r[0]),
        pid: r[1] as u32,
        sent_bytes: r[2],
        received_bytes: r[3],
        sent: r[4],
        received: r[5],
        full: r[6],
        spoofed: r[7],
        malformed: r[8],
        uid: r[9] as u32,
        is_relayed: r[10] != 0,
    }
}

#[cfg(test)]
mod tests {
    use barewire_driver::backend::fault::{Fault, FaultSettings};
    use barewire_driver::backend::loopback::Loopback;
    use barewire_driver::backend::pcap::Direction;
    use barewire_driver::backend::shm::{Monitor, ShmSettings};
    use barewire_driver::backend::switch::SwitchedPort;
    use barewire_driver::frame::{ETHERTYPE, RxFrame, TxFrame, address};
    use barewire_driver::port::Port;

    use super::*;
    use crate::stats::published_in;

    /// Goal: a switch, its NIC and each of its stations are read as they are, and a station that
    /// has left no more.
    #[test]
    fn a_switch_is_read_as_it_is() {
        let segment = ShmSettings::named(&format!("stats-switch-{}", std::process::id()));
        let (nic, far) = Loopback::pair();
        let far = far.caps().station;
        let nic =
            Fault::new(Box::new(nic), FaultSettings { loss: 1e-12, ..Default::default() }, "x");
        let mut switch = Switch::open(&segment, Box::new(nic)).unwrap();
        let join = || SwitchedPort::open(&segment, "station".into()).unwrap().unwrap();
        let (mut a, b) = (join(), join());
        let (station, other) = (a.caps().station, b.caps().station);
        let mut send = |switch: &mut Switch| {
            for dst in [other, far] {
                let mut bytes = [&[0; 12][..], &ETHERTYPE.to_be_bytes()].concat();
                bytes.resize(100, 0);
                address(&mut bytes, dst, station);
                a.tx(&TxFrame::whole(&bytes)).unwrap();
            }
            a.flush().unwrap();
            let moved: usize = (0..1000).map(|_| switch.turn().unwrap()).sum();
            assert_eq!(moved, 2);
        };
        send(&mut switch);
        let dir = std::env::temp_dir().join(format!("barewire-of-switch-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let mut publisher = SwitchPublisher::try_create(&dir).unwrap();
        publisher.publish(&mut switch);
        let read = || published_in(&dir).unwrap().switches.remove(0);
        let seen = read();
        assert_eq!((seen.pid, seen.alive), (std::process::id(), true));
        assert_eq!((&*seen.port_name, seen.station), (&*switch.nic().name, switch.nic().station));
        assert_eq!(seen.segment, format!("shm:{}", segment.name));
        assert_eq!(seen.counters[..3], [("to_nic", 1), ("from_nic", 0), ("between", 1)]);
        assert_eq!((seen.nic[2], seen.nic.len()), (("tx_frames", 1), NIC_NAMES.len()));
        let of = |station| *seen.stations.iter().find(|s| s.station == station).unwrap();
        assert_eq!((of(station).sent, of(other).received), (2, 1));
        assert!(!of(station).is_relayed);
        assert!(of(station).sent_bytes >= 200 && of(other).received_bytes >= 100);
        let me = nix::unistd::getuid().as_raw();
        let asked = |publisher: &mut SwitchPublisher, switch: &mut Switch| {
            record::request(&publisher.writer.path, me).unwrap();
            publisher.publish(switch);
            publisher.writer.is_recording_requested()
        };
        assert!(!asked(&mut publisher, &mut switch), "nobody looks");
        let shown = record::segment(&publisher.writer.path).unwrap();
        let mut monitor = Monitor::open(&shown).unwrap();
        assert!(asked(&mut publisher, &mut switch));
        send(&mut switch);
        let mut seen_by_it = Vec::new();
        for _ in 0..100 {
            let mut each = |_, way, frame: &RxFrame<'_>, len| {
                seen_by_it.push((way, frame.stations().unwrap()[0], len));
            };
            monitor.read(64, &mut each).unwrap();
        }
        seen_by_it.sort_by_key(|(way, ..)| *way == Direction::Out);
        assert_eq!(seen_by_it, [(Direction::In, other, 100), (Direction::Out, far, 100)]);
        drop(monitor);
        publisher.publish(&mut switch);
        assert!(!publisher.writer.is_recording_requested());
        drop(b);
        let seen = read();
        publisher.publish_if_due(&mut switch, publisher.published);
        assert_eq!(read(), seen);
        publisher.publish_if_due(&mut switch, publisher.published + PERIOD);
        assert_eq!(read().stations.iter().map(|s| s.station).collect::<Vec<_>>(), [station]);
        drop(publisher);
        std::fs::remove_dir(&dir).unwrap();
    }
}
