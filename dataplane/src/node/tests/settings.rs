//! What a node accepts as its settings, and what it makes of them.

use super::*;

/// Goal: each setting is accepted up to its bounds and refused past them. Method: one setting at a
/// time, at a bound and one past it.
#[test]
fn settings_past_their_bounds_are_refused() {
    type Set = fn(&mut NodeSettings, u64);
    let none = u64::MAX;
    let rows: [(Set, [u64; 2], [u64; 2]); 11] = [
        (|s, n| s.incarnation = n, [1, INCARNATION_MAX], [0, INCARNATION_MAX + 1]),
        (|s, n| s.t_dead_ns = n, [100_000_000, 1 << 40], [99_999_999, 0]),
        (|s, n| s.peer_max = n as usize, [1, 1 << 20], [0, (1 << 20) + 1]),
        (|s, n| s.tx_wr_max = n as usize, [1, 1 << 16], [0, 0]),
        (|s, n| s.rx_wr_max = n as usize, [1, 1 << 16], [0, 0]),
        (|s, n| s.unexpected_bytes = n as usize, [16 << 10, 1 << 28], [(16 << 10) - 1, 0]),
        (|s, n| s.eager_max = Some(n as usize), [0, 1 << 20], [(1 << 20) + 1, none]),
        (|s, n| s.mr_max = n as usize, [0, 1 << 20], [(1 << 20) + 1, none]),
        (|s, n| s.window = n as u32, [64, 4096], [32, 8192]),
        (|s, n| s.rekey_ns = n, [1_000_000, none], [999_999, 0]),
        (|s, n| s.pull_window = n as usize, [1, 1 << 22], [0, 0]),
    ];
    for (row, (set, good, bad)) in rows.into_iter().enumerate() {
        let with = |value| {
            let mut settings = NodeSettings { incarnation: 1, ..NodeSettings::default() };
            set(&mut settings, value);
            settings.check().map(|_| ())
        };
        for value in good {
            assert_eq!(with(value), Ok(()), "row {row}: {value}");
        }
        for value in bad {
            assert!(matches!(with(value), Err(Error::Invalid(_))), "row {row}: {value}");
        }
    }
    let odd = NodeSettings { incarnation: 1, window: 96, ..NodeSettings::default() };
    assert!(matches!(odd.check(), Err(Error::Invalid(_))));
}

/// Goal: messages are eager up to what the settings say, by default more where frames are long; one
/// frame always takes 4 KiB.
#[test]
fn the_longest_eager_message_is_of_the_settings_and_the_frame() {
    let max = |eager_max, mtu| NodeSettings { eager_max, ..NodeSettings::default() }.eager_max(mtu);
    for mtu in [1500, 4096, 8191] {
        assert_eq!(max(None, mtu), [16 << 10; 2], "{mtu}");
    }
    for mtu in [8192, 9000, 65_535] {
        assert_eq!(max(None, mtu), [64 << 10; 2], "{mtu}");
    }
    assert_eq!(max(Some(100), 9000), [4096, 100]);
    assert_eq!(max(Some(5000), 1500), [5000, 5000]);
}

/// Goal: a node on a port that loses nothing is asked to transmit when there is something to send,
/// or the port has gone; any other one always, as it may owe acknowledgements.
#[test]
fn a_node_says_whether_it_has_something_to_send() {
    let mut pair = Pair::new(1500, true);
    pair.run(1_000_000);
    let has_due = |pair: &Pair| pair.ends[0].node.has_due();
    assert!(pair.ends[0].node.is_lossless() && !has_due(&pair));
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
    assert!(has_due(&pair));
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.run(1_000_000);
    assert_eq!((pair.read(0).len(), has_due(&pair)), (1, false));
    let now = pair.now;
    pair.ends[0].node.port_gone(now);
    assert!(has_due(&pair));
    let pair = Pair::new(1500, false);
    assert!(!pair.ends[0].node.is_lossless());
}
