//! Tests of ports on a wire inside the process, with a raw station that sends arbitrary frames.

use std::thread;

use super::super::inet::mac_of;
use super::arp::{self, Arp};
use super::datagram::HEADERS_LEN;
use super::datagram6::HEADERS6_LEN;
use super::echo::tests::request as ping;
use super::ndp::{self, Ndp};
use super::neighbours::FRESH_NS;
use super::*;
use crate::backend::logged::Logged;
use crate::backend::loopback::{Loopback, LoopbackSettings};

const NET: [u8; 3] = [10, 9, 8];

fn ip(host: u8) -> Ipv4Addr {
    let [a, b, c] = NET;
    Ipv4Addr::new(a, b, c, host)
}

/// Every test has hosts of its own: addresses are claimed per process.
fn settings(host: u8) -> IpSettings {
    IpSettings { port: Some(52_000), ..IpSettings::at(ip(host), 24) }
}

fn wire(count: usize) -> Vec<Loopback> {
    Loopback::segment(count, LoopbackSettings { mtu: 1500, ring_count: 256 })
}

fn open(settings: &IpSettings, inner: impl Port) -> Result<Ip, OpenError> {
    let claim = AddressClaim::acquire(settings, false)?;
    Ip::open(settings, claim, Box::new(inner))
}

/// Two ports and a raw station on a wire.
fn pair(first: u8) -> (Ip, Ip, Loopback) {
    pair_of(settings, first)
}

fn pair_of(settings: fn(u8) -> IpSettings, first: u8) -> (Ip, Ip, Loopback) {
    let mut wire = wire(3);
    let raw = wire.pop().unwrap();
    let (b, a) = (wire.pop().unwrap(), wire.pop().unwrap());
    let other = thread::spawn(move || open(&settings(first + 1), b).unwrap());
    let a = open(&settings(first), a).unwrap();
    (a, other.join().unwrap(), raw)
}

fn ip6(host: u8) -> std::net::Ipv6Addr {
    let IpAddr::V6(ip) = prefix().ip(ip(host)) else { unreachable!() };
    ip
}

fn prefix() -> super::super::inet::Prefix {
    super::super::inet::Prefix::of("2001:db8::".parse().unwrap())
}

/// The same hosts behind a prefix of IPv6.
fn settings6(host: u8) -> IpSettings {
    IpSettings { port: Some(52_000), ..IpSettings::at(ip6(host), 120) }
}

/// A frame of the fabric, as `len` bytes.
fn frame(dst: MacAddr, src: MacAddr, len: usize) -> Vec<u8> {
    let mut frame = vec![0x5a; len];
    frame[..6].copy_from_slice(&dst.0);
    frame[6..12].copy_from_slice(&src.0);
    frame[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
    frame
}

fn take(port: &mut impl Port) -> Vec<Vec<u8>> {
    let mut got = Vec::new();
    port.rx_burst(64, &mut |f: &RxFrame<'_>| {
        let mut bytes = vec![0; f.len()];
        assert!(f.copy_to(0, &mut bytes));
        got.push(bytes);
    })
    .unwrap();
    got
}

/// Sends `frame` from `a`, and polls both until `b` has received it.
fn send(a: &mut Ip, b: &mut Ip, frame: &[u8]) -> Vec<u8> {
    let until = now_ns() + 3_000_000_000;
    let mut tries = 0;
    while now_ns() < until {
        if tries % 50 == 0 {
            assert_eq!(a.tx(&TxFrame::whole(frame)).unwrap(), Tx::Sent);
        }
        tries += 1;
        a.flush().unwrap();
        take(a);
        if let Some(got) = take(b).pop() {
            return got;
        }
        thread::sleep(Duration::from_micros(100));
    }
    panic!("nothing arrived in {tries} polls");
}

fn mac(port: &Ip) -> MacAddr {
    port.caps.station.mac
}

#[test]
fn frames_of_every_length_arrive_once_the_neighbour_is_known() {
    frames_of_every_length(settings, 42, "ip(10.9.8.1/24,port=52000):");
}

#[test]
fn frames_of_every_length_arrive_by_ipv6() {
    frames_of_every_length(settings6, 62, "ip([2001:db8::a09:801]/120,port=52000):");
}

fn frames_of_every_length(settings: fn(u8) -> IpSettings, outer: usize, name: &str) {
    let (mut a, mut b, _raw) = pair_of(settings, 1);
    assert_eq!(a.caps().mtu, 1500 - outer);
    assert!(a.caps().name.starts_with(name), "{}", a.caps().name);
    let unknown = a.drops().unresolved;
    for len in [14, 15, 40, 59, 60, 61, 1000, 1500 - outer + 14] {
        let sent = frame(mac(&b), mac(&a), len);
        // The wire may pad the frame; the datagram states its length.
        assert_eq!(send(&mut a, &mut b, &sent), sent, "{len}");
    }
    let back = frame(mac(&a), mac(&b), 100);
    assert_eq!(send(&mut b, &mut a, &back), back);
    assert!(a.drops().unresolved <= unknown + 1);
    // A frame in three pieces, and one to the port itself.
    let whole = frame(mac(&b), mac(&a), 500);
    take(&mut b);
    let pieces = TxFrame {
        head: &whole[..48],
        body: crate::frame::Body::Bytes(&whole[48..490]),
        tail: &whole[490..],
    };
    assert_eq!(a.tx(&pieces).unwrap(), Tx::Sent);
    a.flush().unwrap();
    assert_eq!(take(&mut b), [whole]);
    let own = frame(mac(&a), mac(&a), 77);
    assert_eq!(a.tx(&TxFrame::whole(&own)).unwrap(), Tx::Sent);
    assert!(a.next_deadline_ns().is_some());
    assert_eq!(take(&mut a), [own]);
}

#[test]
fn checksums_are_valid() {
    let mut wire = wire(2);
    let (mut raw, inner) = (wire.pop().unwrap(), wire.pop().unwrap());
    let with_sums = IpSettings { sums: true, ..settings(10) };
    let mut a = open(&with_sums, inner).unwrap();
    let hop = raw.caps().station.mac;
    a.neighbours.learn(ip(11).into(), hop, now_ns(), true);
    let to = mac_of(SocketAddrV4::new(ip(11), 52_001)).unwrap();
    take(&mut raw);
    for len in [40, 41, 700] {
        let sent = frame(to, mac(&a), len);
        assert_eq!(a.tx(&TxFrame::whole(&sent)).unwrap(), Tx::Sent);
        a.flush().unwrap();
        let got = take(&mut raw).pop().unwrap();
        let packet = etherparse::SlicedPacket::from_ethernet(&got).unwrap();
        let Some(etherparse::NetSlice::Ipv4(ip)) = packet.net else { panic!() };
        let Some(etherparse::TransportSlice::Udp(udp)) = packet.transport else { panic!() };
        let header = ip.header().to_header();
        let want = udp.to_header().calc_checksum_ipv4(&header, udp.payload()).unwrap();
        assert_eq!((udp.checksum(), udp.payload()), (want, &sent[..]));
    }
}

/// Goal: cached headers are those of each frame's peer; a neighbour message applies from the next
/// frame on; and a neighbour in use is revalidated.
#[test]
fn cached_headers_are_those_of_the_peer() {
    let mut wire = wire(3);
    let mut raws = wire.split_off(1);
    let mut a = open(&settings(70), wire.pop().unwrap()).unwrap();
    let hops: Vec<_> = raws.iter().map(|raw| raw.caps().station.mac).collect();
    let hosts = [71, 72];
    for (host, hop) in hosts.iter().zip(&hops) {
        a.neighbours.learn(ip(*host).into(), *hop, now_ns(), true);
    }
    raws.iter_mut().for_each(|raw| drop(take(raw)));
    let send_to = |a: &mut Ip, host: u8, len: usize| {
        let to = mac_of(SocketAddrV4::new(ip(host), 52_000)).unwrap();
        assert_eq!(a.tx(&TxFrame::whole(&frame(to, mac(a), len))).unwrap(), Tx::Sent);
        a.flush().unwrap();
    };
    let heard = |raw: &mut Loopback| {
        let host = |bytes: Vec<u8>| (bytes[33], u16::from_be_bytes([bytes[16], bytes[17]]));
        take(raw).into_iter().map(host).collect::<Vec<_>>()
    };
    for (len, times) in [(100, 1), (900, 3), (60, 2)] {
        for _ in 0..times {
            hosts.iter().for_each(|host| send_to(&mut a, *host, len));
        }
        for (raw, host) in raws.iter_mut().zip(hosts) {
            assert_eq!(heard(raw), vec![(host, len as u16 + 28); times]);
        }
    }
    // The host 71 has another NIC.
    send_to(&mut a, 71, 100);
    assert_eq!(heard(&mut raws[0]), [(71, 128)]);
    let moved = ControlPacket::announcement((hops[1], ip(71).into()));
    raws[1].tx(&TxFrame::whole(&moved)).unwrap();
    raws[1].flush().unwrap();
    take(&mut a);
    take(&mut raws[0]);
    send_to(&mut a, 71, 100);
    assert_eq!((heard(&mut raws[0]), heard(&mut raws[1])), (vec![], vec![(71, 128)]));
    // The entry is in use as long as frames are sent there.
    let mut now = now_ns();
    for uses in [true, true, false] {
        a.neighbours_polled_ns = 0;
        a.poll_neighbours().unwrap();
        if uses {
            send_to(&mut a, 71, 100);
        }
        now += FRESH_NS + 1;
        let mut asked = 0;
        a.neighbours.poll(now, |due| {
            asked += u32::from(due == Due::Request((ip(71).into(), Some(hops[1]))));
        });
        assert_eq!(asked, u32::from(uses));
        a.neighbours.learn(ip(71).into(), hops[1], now, false);
    }
    // No reply: the next frame is lost.
    send_to(&mut a, 71, 100);
    (0..20).for_each(|n| a.neighbours.poll(now + FRESH_NS + (n << 30), |_| {}));
    a.neighbours_polled_ns = 0;
    a.poll_neighbours().unwrap();
    let lost = a.drops().unresolved;
    send_to(&mut a, 71, 100);
    assert_eq!(a.drops().unresolved, lost + 1);
}

/// Goal: invalid datagrams are dropped and counted, each by its cause.
#[test]
fn invalid_datagrams_are_counted_and_dropped() {
    let (mut a, mut b, mut raw) = pair(20);
    let sent = frame(mac(&b), mac(&a), 100);
    send(&mut a, &mut b, &sent);
    let mut head = [0; HEADERS_LEN];
    let below = b.own.0;
    a.template.write(&mut head, below, SocketAddrV4::new(ip(21), 52_000), 100);
    let good = [&head[..], &sent].concat();
    let mut push = |bytes: &[u8]| {
        assert_eq!(raw.tx(&TxFrame::whole(bytes)).unwrap(), Tx::Sent);
        raw.flush().unwrap();
        take(&mut b).len()
    };
    let summed = |mut bytes: Vec<u8>| {
        let mut ip = etherparse::Ipv4Header::from_slice(&bytes[14..]).unwrap().0;
        ip.header_checksum = ip.calc_header_checksum();
        let header = ip.to_bytes();
        bytes[14..14 + header.len()].copy_from_slice(&header);
        bytes
    };
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    assert_eq!(push(&good), 1);
    for (bytes, taken) in [
        (summed(with(20, 0x20)), 0),         // more fragments
        (summed(with(21, 9)), 0),            // a later fragment
        (with(24, !good[24]), 0),            // the sum
        (summed(with(17, 0)), 0),            // the length of IP
        (with(39, 7), 0),                    // the length of UDP
        (summed(with(29, 99)), 0),           // from another host than the frame says
        (with(35, 99), 0),                   // from another port
        (with(42 + 5, !good[47]), 0),        // to another station than the datagram
        (with(42 + 13, 0), 0),               // of another EtherType
        (with(36, 7), 0),                    // to another port, not counted
        (good[..60].to_vec(), 0),            // truncated
        (summed(with(22, 3)), 1),            // after many hops
        ([&good[..], &[0; 20]].concat(), 1), // padded
    ] {
        assert_eq!(push(&bytes), taken, "{bytes:02x?}");
    }
    let options = summed([&good[..14], &[0x46], &good[15..34], &[1; 4], &good[34..]].concat());
    assert_eq!(push(&options), 0);
    // Less than an Ethernet header inside, in a padded frame.
    a.template.write(&mut head, below, SocketAddrV4::new(ip(21), 52_000), 13);
    assert_eq!(push(&[&head[..], &sent].concat()), 0);
    let want = IpDrops { options: 1, fragments: 2, sums: 1, lengths: 3, frames: 5, unresolved: 0 };
    assert_eq!(b.drops(), IpDrops { unresolved: 0, ..want });
    assert_eq!(b.counters().rx_dropped, 12);
}

#[test]
fn noise_panics_nowhere() {
    let (mut a, mut b, mut raw) = pair(30);
    let mut state = 3_u64;
    let mut next = |n: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % n
    };
    let arp = arp::request((MacAddr([2, 7, 7, 7, 7, 7]), ip(99)), ip(31), None);
    for _ in 0..20_000 {
        let mut bytes: Vec<u8> = (0..14 + next(80)).map(|_| next(256) as u8).collect();
        bytes[..6].copy_from_slice(&b.own.0.0);
        if next(2) == 0 {
            let len = bytes.len().min(arp.len());
            bytes[6..len].copy_from_slice(&arp[6..len]);
            let at = 12 + next(len as u64 - 12) as usize;
            bytes[at] = next(256) as u8;
        } else {
            let head: &[u8] = &[8, 0, 0x45];
            bytes[12..].iter_mut().zip(head).for_each(|(to, from)| *to = *from);
        }
        raw.tx(&TxFrame::whole(&bytes)).unwrap();
        raw.flush().unwrap();
        assert!(take(&mut b).is_empty());
        take(&mut raw);
    }
    let sent = frame(mac(&b), mac(&a), 60);
    assert_eq!(send(&mut a, &mut b, &sent), sent);
}

#[test]
fn an_address_that_another_host_has_is_refused() {
    let (a, mut b, _raw) = pair(40);
    let mut wire = wire(2);
    let (inner, mut other) = (wire.pop().unwrap(), wire.pop().unwrap());
    drop(a);
    // The other host answers from this wire.
    let taken = other.caps().station.mac;
    let host = thread::spawn(move || {
        let until = now_ns() + 80_000_000;
        while now_ns() < until {
            for asked in take(&mut other) {
                let asked = Arp::parse(&asked[14..]).unwrap();
                assert_eq!(asked.sender.1, Ipv4Addr::UNSPECIFIED);
                let answer = arp::reply((taken, asked.target), asked.sender);
                other.tx(&TxFrame::whole(&answer)).unwrap();
                other.flush().unwrap();
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
    let error = open(&settings(40), inner).unwrap_err().to_string();
    assert!(error.contains(&format!("{taken} has the address 10.9.8.40")), "{error}");
    host.join().unwrap();
    take(&mut b);
}

#[test]
fn hosts_off_link_are_reached_by_the_gateway_or_have_no_route() {
    let mut wire = wire(2);
    let (mut raw, inner) = (wire.pop().unwrap(), wire.pop().unwrap());
    let far = mac_of(SocketAddrV4::new([10, 200, 0, 1].into(), 52_000)).unwrap();
    let with = IpSettings { gateway: Some(ip(1).into()), dscp: 46, ..settings(50) };
    let mut a = open(&with, inner).unwrap();
    take(&mut raw);
    let sent = frame(far, mac(&a), 60);
    assert_eq!(a.tx(&TxFrame::whole(&sent)).unwrap(), Tx::Sent);
    let asked = take(&mut raw);
    assert_eq!(Arp::parse(&asked[0][14..]).unwrap().target, ip(1));
    let router = (raw.caps().station.mac, ip(1));
    raw.tx(&TxFrame::whole(&arp::reply(router, (a.own.0, ip(50))))).unwrap();
    raw.flush().unwrap();
    take(&mut a);
    assert_eq!(a.tx(&TxFrame::whole(&sent)).unwrap(), Tx::Sent);
    a.flush().unwrap();
    let got = take(&mut raw).pop().unwrap();
    assert_eq!(
        (&got[..6], &got[30..34], got[15]),
        (&router.0.0[..], &[10, 200, 0, 1][..], 46 << 2 | 2)
    );
    // The router has another NIC, and announces that.
    let moved = (MacAddr([2, 5, 5, 5, 5, 5]), ip(1));
    raw.tx(&TxFrame::whole(&arp::request(moved, ip(1), None))).unwrap();
    raw.flush().unwrap();
    take(&mut a);
    assert_eq!(a.neighbours.find(ip(1).into()), Some(moved.0));

    let mut alone = open(&settings(51), self::wire(1).pop().unwrap()).unwrap();
    assert_eq!(alone.tx(&TxFrame::whole(&sent)).unwrap(), Tx::NoRoute);
    assert_eq!(alone.counters().tx_no_route, 1);
    // The zero MAC has no route, also with cached headers.
    for port in [&mut alone, &mut a] {
        let nobody = frame(MacAddr::default(), mac(port), 60);
        assert_eq!(port.tx(&TxFrame::whole(&nobody)).unwrap(), Tx::NoRoute);
    }
}

/// Goal: the first poll after a sleep requests an expired neighbour again, and a busy poll without
/// frames does not read the clock for that.
#[test]
fn a_poll_after_a_sleep_revalidates_neighbours() {
    let (mut a, mut b, _raw) = pair(180);
    let sent = frame(mac(&b), mac(&a), 60);
    send(&mut a, &mut b, &sent);
    let waiter = a.waiter().unwrap();
    let (hop, at) = (Host::from(ip(181)), b.own.0);
    a.neighbours.poll(now_ns(), |_| ());
    for sleeps in [false, true] {
        a.neighbours.learn(hop, at, now_ns() - FRESH_NS - 1, false);
        assert_eq!(a.neighbours.find(hop), Some(at));
        (a.neighbours_polled_ns, a.polls) = (0, 1);
        if sleeps {
            waiter.wait(Duration::from_millis(1));
        }
        take(&mut a);
        assert_eq!(a.neighbours.is_resolving(), sleeps);
    }
    take(&mut b);
    take(&mut a);
    assert_eq!(a.neighbours.find(hop), Some(at));
}

/// Goal: a host that claims another MAC again and again does not fill the log.
#[test]
fn log_lines_about_moved_hosts_are_limited() {
    let mut wire = wire(2);
    let (mut raw, inner) = (wire.pop().unwrap(), wire.pop().unwrap());
    let mut a = open(&settings(66), inner).unwrap();
    let lines = Logged::by(|| {
        for n in 0..100 {
            let requester = (MacAddr([2, 3, 3, 3, 3, n]), ip(67));
            raw.tx(&TxFrame::whole(&arp::request(requester, ip(66), None))).unwrap();
            raw.flush().unwrap();
            take(&mut a);
            assert_eq!(a.neighbours.find(ip(67).into()), Some(requester.0));
        }
    });
    let moves = lines.iter().filter(|(_, line)| line.contains("and was at")).count();
    assert_eq!(moves, LOG_LINES_MAX as usize);
    assert!(a.host_log.allow(now_ns() + LOG_INTERVAL_NS));
}

/// A port on a wire that carries long datagrams, and the raw other end of that.
fn on_long_wire(host: u8) -> (Ip, Loopback) {
    let mut wire = Loopback::segment(2, LoopbackSettings { mtu: 60_000, ring_count: 64 });
    let (mut raw, inner) = (wire.pop().unwrap(), wire.pop().unwrap());
    let a = open(&IpSettings { mtu: Some(1000), ..settings(host) }, inner).unwrap();
    take(&mut raw);
    (a, raw)
}

/// 40 frames to a port, the last of them shorter, and a datagram that coalesces them.
fn coalesced_for(a: &Ip, host: u8) -> (Vec<Vec<u8>>, Vec<u8>) {
    let from = SocketAddrV4::new(ip(61), 52_000);
    let frames: Vec<_> = (0..40)
        .map(|n| {
            let mut one = frame(mac(a), mac_of(from).unwrap(), if n == 39 { 300 } else { 900 });
            one[20..].fill(n);
            one
        })
        .collect();
    let payload = frames.concat();
    let mut head = [0; HEADERS_LEN];
    let template = Headers::new(MacAddr([2, 3, 3, 3, 3, 3]), from.into(), 64, 0);
    template.write(&mut head, a.own.0, SocketAddrV4::new(ip(host), 52_000), payload.len());
    (frames, [&head[..], &payload].concat())
}

/// Goal: after one coalesced datagram, several at once are lent whole, also after empty polls.
#[test]
fn consecutive_coalesced_datagrams_are_lent_whole() {
    let (mut a, mut raw) = on_long_wire(64);
    let (frames, datagram) = coalesced_for(&a, 64);
    for count in [1, 3] {
        for _ in 0..count {
            raw.tx(&TxFrame::whole(&datagram)).unwrap();
        }
        let mut got = Vec::new();
        for _ in 0..10_000 {
            got.extend(take(&mut a));
        }
        assert!(got == vec![&frames[..]; count].concat(), "{} of {count}", got.len());
        assert_eq!(a.counters().rx_dropped, 0);
    }
}

/// Goal: frames of a coalesced datagram are lent one by one, no more per poll than requested.
#[test]
fn a_coalesced_datagram_is_lent_in_bursts() {
    let (mut a, mut raw) = on_long_wire(60);
    let (frames, datagram) = coalesced_for(&a, 60);
    let payload = &datagram[HEADERS_LEN..];
    raw.tx(&TxFrame::whole(&datagram)).unwrap();
    raw.flush().unwrap();
    let mut got = Vec::new();
    for _ in 0..5 {
        let before = got.len();
        let mut sink = |f: &RxFrame<'_>| {
            let mut bytes = vec![0; f.len()];
            assert!(f.copy_to(0, &mut bytes));
            got.push(bytes);
        };
        let count = a.rx_burst(8, &mut sink).unwrap();
        assert_eq!((count, got.len() - before), (8, 8));
    }
    assert_eq!(got, frames);
    assert!(a.next_deadline_ns().is_none() && take(&mut a).is_empty());
    // A long datagram without a valid segment length.
    let noise = [&datagram[..HEADERS_LEN + 900], &vec![3; payload.len() - 900]].concat();
    raw.tx(&TxFrame::whole(&noise)).unwrap();
    raw.flush().unwrap();
    assert!(take(&mut a).is_empty());
    assert_eq!((a.drops().frames, a.counters().rx_dropped), (1, 1));
}

/// Goal: over IPv6 invalid datagrams are dropped and counted, each by its cause.
#[test]
fn invalid_datagrams_of_ipv6_are_counted_and_dropped() {
    let (mut a, mut b, mut raw) = pair_of(settings6, 120);
    let sent = frame(mac(&b), mac(&a), 100);
    send(&mut a, &mut b, &sent);
    let mut head = [0; HEADERS6_LEN];
    a.template.write(&mut head, b.own.0, SocketAddrV4::new(ip(121), 52_000), 100);
    a.template.write_sum(&mut head, &sent);
    let good = [&head[..], &sent].concat();
    let mut push = |bytes: &[u8]| {
        assert_eq!(raw.tx(&TxFrame::whole(bytes)).unwrap(), Tx::Sent);
        raw.flush().unwrap();
        take(&mut b).len()
    };
    let with = |at: usize, byte: u8| {
        let mut bytes = good.clone();
        bytes[at] = byte;
        bytes
    };
    assert_eq!(push(&good), 1);
    for (bytes, taken) in [
        (with(20, 44), 0),                                 // a fragment
        (with(20, 0), 0),                                  // options
        (with(20, 6), 0),                                  // of another protocol, not counted
        ([&good[..60], &[0; 2], &good[62..]].concat(), 0), // no sum
        (with(19, 0), 0),                                  // the length of IP
        (with(59, 7), 0),                                  // the length of UDP
        (with(37, 99), 0),                                 // from another host than the frame says
        (with(23, 99), 0),                                 // from outside of the prefix
        (with(55, 99), 0),                                 // from another port
        (with(62 + 5, !good[67]), 0),                      // to another station than the datagram
        (with(62 + 13, 0), 0),                             // of another EtherType
        (with(53, 7), 0),                                  // to another host, not counted
        (with(56, 7), 0),                                  // to another port, likewise
        (good[..80].to_vec(), 0),                          // truncated
        (with(21, 3), 1),                                  // after many hops
        ([&good[..], &[0; 20]].concat(), 1),               // padded
    ] {
        assert_eq!(push(&bytes), taken, "{bytes:02x?}");
    }
    let want = IpDrops { options: 1, fragments: 1, sums: 1, lengths: 3, frames: 5, unresolved: 0 };
    assert_eq!(b.drops(), want);
    assert_eq!(b.counters().rx_dropped, 11);
    // A datagram that a router has marked.
    let mut marked = Vec::new();
    raw.tx(&TxFrame::whole(&with(15, 0x30))).unwrap();
    raw.flush().unwrap();
    b.rx_burst(8, &mut |f: &RxFrame<'_>| marked.push(f.is_marked())).unwrap();
    assert_eq!(marked, [true]);
}

#[test]
fn noise_by_ipv6_panics_nowhere() {
    let (mut a, mut b, mut raw) = pair_of(settings6, 130);
    let mut state = 3_u64;
    let mut next = |n: u64| {
        state = state.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
        (state >> 33) % n
    };
    let question = ndp::solicitation((MacAddr([2, 7, 7, 7, 7, 7]), ip6(99)), ip6(131), None);
    let mut head = [0; HEADERS6_LEN];
    a.template.write(&mut head, b.own.0, SocketAddrV4::new(ip(131), 52_000), 60);
    for _ in 0..20_000 {
        let mut bytes: Vec<u8> = (0..14 + next(120)).map(|_| next(256) as u8).collect();
        let like: &[u8] = if next(2) == 0 { &question } else { &head };
        let len = bytes.len().min(like.len());
        bytes[..len].copy_from_slice(&like[..len]);
        let at = 12 + next(len as u64 - 12) as usize;
        bytes[at] = next(256) as u8;
        raw.tx(&TxFrame::whole(&bytes)).unwrap();
        raw.flush().unwrap();
        assert!(take(&mut b).is_empty());
        take(&mut raw);
    }
    let sent = frame(mac(&b), mac(&a), 60);
    assert_eq!(send(&mut a, &mut b, &sent), sent);
}

/// Goal: the port solicits its router, answers solicitations of its own address, and an
/// advertisement without the override flag replaces no MAC.
#[test]
fn neighbours_of_ipv6_are_solicited_and_answered() {
    let mut wire = wire(2);
    let (mut raw, inner) = (wire.pop().unwrap(), wire.pop().unwrap());
    let far = mac_of(SocketAddrV4::new([10, 200, 0, 1].into(), 52_000)).unwrap();
    let router: std::net::Ipv6Addr = "fe80::1".parse().unwrap();
    let with = IpSettings { gateway: Some(router.into()), dscp: 46, ..settings6(150) };
    let mut a = open(&with, inner).unwrap();
    let heard = take(&mut raw);
    // The group is joined before each probe, in case a report was lost.
    let joins = mld::report(a.own.0, ip6(150), true);
    assert_eq!(heard.iter().filter(|bytes| **bytes == joins).count(), PROBES);
    assert_eq!(heard[0], joins);
    let parsed = heard.iter().filter(|bytes| **bytes != joins);
    let parsed: Vec<_> = parsed.map(|bytes| Ndp::parse(bytes).unwrap()).collect();
    let [probes @ .., announced] = &parsed[..] else { panic!() };
    assert!(probes.len() == PROBES && probes.iter().all(|p| p.sender.1.is_unspecified()));
    assert!(probes.iter().all(|probe| probe.is_request && probe.target == ip6(150)));
    assert!(!announced.is_request && announced.sender == (a.own.0, ip6(150)));
    // Hosts off link are reached by the router, whose address is link-local.
    let sent = frame(far, mac(&a), 60);
    assert_eq!(a.tx(&TxFrame::whole(&sent)).unwrap(), Tx::Sent);
    let asked = take(&mut raw);
    assert_eq!(Ndp::parse(&asked[0]).unwrap().target, router);
    let at = raw.caps().station.mac;
    let mut inject = |a: &mut Ip, bytes: &[u8]| {
        raw.tx(&TxFrame::whole(bytes)).unwrap();
        raw.flush().unwrap();
        take(a);
        take(&mut raw)
    };
    let own = (a.own.0, ip6(150));
    inject(&mut a, &ndp::advertisement((at, router), own));
    assert_eq!(a.tx(&TxFrame::whole(&sent)).unwrap(), Tx::Sent);
    a.flush().unwrap();
    let hop = a.net.neighbour_key(router.into()).unwrap();
    assert_eq!(a.neighbours.find(hop), Some(at));
    // The router has another NIC, and advertises that without the override flag, then with it.
    let moved = MacAddr([2, 5, 5, 5, 5, 5]);
    let weak = |mac| {
        let mut weak = ndp::announcement((mac, router));
        weak[58] = 0;
        let sum = u32::from(u16::from_be_bytes([weak[56], weak[57]])) + 0x2000;
        weak[56..58].copy_from_slice(&((sum + (sum >> 16)) as u16).to_be_bytes());
        assert!(!Ndp::parse(&weak).unwrap().overrides);
        weak
    };
    let got = inject(&mut a, &weak(moved));
    assert_eq!(a.neighbours.find(hop), Some(at));
    // A known MAC is confirmed without the flag: no solicitation when it would have expired.
    let before = now_ns();
    thread::sleep(Duration::from_millis(5));
    inject(&mut a, &weak(at));
    a.neighbours.poll(before + FRESH_NS, |_| panic!("{router} is asked"));
    let sent = got.iter().find(|bytes| bytes[20] == 17).unwrap();
    assert_eq!((&sent[..6], sent[15] >> 4 | sent[14] << 4), (&at.0[..], 46 << 2 | 2));
    assert_eq!(sent[38..54], "2001:db8::ac8:1".parse::<std::net::Ipv6Addr>().unwrap().octets());
    inject(&mut a, &ndp::announcement((moved, router)));
    assert_eq!(a.neighbours.find(hop), Some(moved));
    // A solicitation is answered to its sender, a probe to all nodes.
    let peer = (at, ip6(151));
    let answer = inject(&mut a, &ndp::solicitation(peer, ip6(150), None));
    assert_eq!(answer[0][..6], peer.0.0);
    assert_eq!(Ndp::parse(&answer[0]).unwrap().sender, (a.own.0, ip6(150)));
    let nobody = (peer.0, std::net::Ipv6Addr::UNSPECIFIED);
    let answer = inject(&mut a, &ndp::solicitation(nobody, ip6(150), None));
    assert_eq!(answer[0][..6], [0x33, 0x33, 0, 0, 0, 1]);
}

#[test]
fn an_ipv6_address_that_another_host_has_is_refused() {
    let mut wire = wire(2);
    let (inner, mut other) = (wire.pop().unwrap(), wire.pop().unwrap());
    let taken = other.caps().station.mac;
    let host = thread::spawn(move || {
        let until = now_ns() + 80_000_000;
        while now_ns() < until {
            for asked in take(&mut other) {
                let Some(asked) = Ndp::parse(&asked) else { continue };
                let answer = ndp::advertisement((taken, asked.target), asked.sender);
                other.tx(&TxFrame::whole(&answer)).unwrap();
                other.flush().unwrap();
            }
            thread::sleep(Duration::from_millis(1));
        }
    });
    let error = open(&settings6(140), inner).unwrap_err().to_string();
    assert!(error.contains(&format!("{taken} has the address 2001:db8::a09:88c")), "{error}");
    host.join().unwrap();
}

/// Goal: echo requests are answered to their sender if no kernel shares the address, and replies to
/// a flood are limited.
#[test]
fn echo_requests_are_answered_unless_the_kernel_does() {
    for settings in [settings, settings6] {
        let mut wire = wire(2);
        let (mut raw, inner) = (wire.pop().unwrap(), wire.pop().unwrap());
        let mut a = open(&settings(160), inner).unwrap();
        take(&mut raw);
        let from = (raw.caps().station.mac, a.net.prefix.ip(ip(161)));
        let asked = ping(a.own, from);
        let mut inject = |a: &mut Ip, count: usize| {
            for _ in 0..count {
                raw.tx(&TxFrame::whole(&asked)).unwrap();
                assert!(take(a).is_empty());
            }
            take(&mut raw).iter().filter(|bytes| bytes.len() == asked.len()).count()
        };
        assert_eq!(inject(&mut a, 1), 1);
        assert!(a.neighbours.known(ip(161).into()).is_none());
        let answers = inject(&mut a, 200);
        assert!((RateLimiter::BURST as usize - 1..200).contains(&answers), "{answers}");
        // The kernel shares the address, and answers.
        a.rx_filter.echo = [].into();
        assert_eq!(inject(&mut a, 10), 0);
        assert_eq!(a.counters().rx_dropped, 0);
    }
}

#[test]
fn queries_for_group_members_are_answered() {
    let mut wire = wire(2);
    let (mut raw, inner) = (wire.pop().unwrap(), wire.pop().unwrap());
    let mut a = open(&settings6(170), inner).unwrap();
    take(&mut raw);
    for group in [std::net::Ipv6Addr::UNSPECIFIED, ip6(171)] {
        raw.tx(&TxFrame::whole(&mld::tests::query(group, true))).unwrap();
        assert!(take(&mut a).is_empty());
        let report = mld::report(a.own.0, ip6(170), false).to_vec();
        let want = if group.is_unspecified() { vec![report] } else { vec![] };
        assert_eq!(take(&mut raw), want);
    }
}
