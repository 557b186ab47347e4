//! Statistics for tests.

use barewire::stats::switch::{NIC_NAMES, SWITCH_NAMES, StationRow, SwitchSnapshot};
use barewire::stats::{EpRow, LEVEL_NAMES, NODE_NAMES, PORT_NAMES, SessionRow, Snapshot};
use barewire_dataplane::node::{Claim, RoundTrips};
use barewire_dataplane::wire::WireError;
use barewire_driver::port::Station;

pub(crate) const fn station(n: u8) -> Station {
    Station::at([2, 0, 0, 0, 0, n])
}

/// A session with station `n`, with figures of its own in every place.
pub(crate) fn session(n: u8) -> SessionRow {
    SessionRow {
        station: station(n),
        incarnation: 5,
        state: "open",
        in_flight: 1,
        srtt_ns: 1500,
        credits: 64,
        waiting: 2,
        wait: "credit",
        rtt_min_ns: 1200,
        age_ns: 3_000_000_000,
        silent_ns: 1_500_000_000,
        tx_packets: 900,
        rx_packets: 800,
        tx_bytes: Some(2048),
        rx_bytes: None,
        retransmits: 5,
        timeouts: 1,
        window: 32,
        frame_max: 1500,
        rto_ns: 2_000_000,
        rtt_var_ns: 300,
        is_near: false,
        is_lossless: false,
    }
}

/// A domain of process `pid` with every counter, each with a value of its own, and one session.
pub(crate) fn domain(pid: u32, updated_ns: u64) -> Snapshot {
    let counted = |names: &[&'static str], from: u64| {
        names.iter().zip(from..).map(|(name, value)| (*name, value)).collect::<Vec<_>>()
    };
    let causes: Vec<&str> = WireError::ALL.iter().map(|e| e.name()).collect();
    let endpoint = EpRow {
        number: 3,
        sent: 7,
        sent_bytes: 4096,
        received: 8,
        received_bytes: 1,
        errors: 0,
        unexpected: 0,
        posted: 2,
    };
    Snapshot {
        path: format!("domain-{pid}").into(),
        pid,
        alive: true,
        opened_ns: 1_000_000_000,
        updated_ns,
        polled_ns: updated_ns,
        port_name: "afpacket:eth0".to_owned(),
        station: station(1),
        mtu: 1500,
        incarnation: 4,
        t_dead_ns: 5_000_000_000,
        port: counted(&PORT_NAMES, 1000),
        node: counted(&NODE_NAMES, 2000),
        refused: counted(&causes, 0),
        levels: counted(&LEVEL_NAMES, 3000),
        round_trips: (0..RoundTrips::COUNT as u64).collect(),
        round_trips_ns: 4_000_000_000,
        claims: vec![Claim { station: station(6), counts: [41, 42, 43, 44], others: 45 }],
        endpoints: vec![endpoint],
        sessions: vec![session(9)],
    }
}

/// A switch with one station.
pub(crate) fn switch(pid: u32, updated_ns: u64) -> SwitchSnapshot {
    let row = StationRow {
        station: station(1),
        pid: 12,
        uid: 1000,
        sent_bytes: 6000,
        received_bytes: 7000,
        sent: 60,
        received: 70,
        full: 3,
        spoofed: 2,
        malformed: 1,
        is_relayed: true,
    };
    let counted = |names: &[&'static str]| {
        names.iter().zip(500..).map(|(name, value)| (*name, value)).collect::<Vec<_>>()
    };
    SwitchSnapshot {
        path: format!("switch-{pid}").into(),
        owner: 0,
        pid,
        alive: true,
        opened_ns: 1_000_000_000,
        updated_ns,
        port_name: "vfio:0000:05:00.0".to_owned(),
        station: station(200),
        mtu: 9000,
        segment: "shm:switch-vfio".to_owned(),
        counters: counted(&SWITCH_NAMES),
        nic: counted(&NIC_NAMES),
        stations: vec![row],
    }
}
