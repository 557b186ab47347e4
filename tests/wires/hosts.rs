//! What else a port is asked that has an IP address to itself: whether it is there, and which
//! groups it hears.

use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::thread;
use std::time::{Duration, Instant};

use barewire_driver::frame::RxFrame;
use barewire_driver::open::open;
use barewire_tests::nodes::{FABRIC, Nodes, or_skip};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, recv, sendto,
    setsockopt, socket, sockopt::ReceiveTimeout,
};
use nix::sys::time::{TimeVal, TimeValLike};

/// How long a ping may go unanswered: the kernel asks for a neighbour once a second.
const PATIENCE: Duration = Duration::from_secs(8);

/// Node 0, whose kernel has addresses, and node 1, whose kernel has none, joined by a bridge in
/// node 2.
fn nodes() -> Option<Nodes> {
    let made = Nodes::new(3).and_then(|nodes| {
        nodes.bridge(2, "br0", 1500)?;
        for (node, port) in ["port0", "port1"].into_iter().enumerate() {
            nodes.veth([(node, FABRIC), (2, port)], 1500)?;
            nodes.plug(2, port, "br0")?;
        }
        for ip in ["10.78.0.1/24", "2001:db8::a4e:1/96"] {
            let nodad = if ip.contains(':') { "nodad" } else { "" };
            nodes.ip(0, &format!("addr add {ip} dev {FABRIC} {nodad}"))?;
        }
        Ok(nodes)
    });
    or_skip(made)
}

/// Has a thread in node 1 poll the port `spec` while `work` runs.
fn beside(nodes: &Nodes, spec: &str, work: impl FnOnce()) {
    let (is_over, is_open) = (AtomicBool::new(false), AtomicBool::new(false));
    thread::scope(|scope| {
        let polls = scope.spawn(|| {
            nodes.enter(1).unwrap();
            let mut port = open(spec).unwrap();
            is_open.store(true, Relaxed);
            while !is_over.load(Relaxed) {
                port.rx_burst(64, &mut |_: &RxFrame<'_>| panic!("nobody sends")).unwrap();
                thread::sleep(Duration::from_micros(200));
            }
        });
        while !is_open.load(Relaxed) && !polls.is_finished() {
            thread::sleep(Duration::from_millis(1));
        }
        // The thread ends if that panics, too.
        let done = catch_unwind(AssertUnwindSafe(work));
        is_over.store(true, Relaxed);
        done.unwrap_or_else(|why| resume_unwind(why));
    });
}

/// Has the kernel of node 0 ask `to`, and says whether that answers the very bytes.
fn pings(nodes: &Nodes, to: &str, len: usize) -> bool {
    let to: IpAddr = to.parse().unwrap();
    thread::scope(|scope| {
        scope
            .spawn(|| {
                nodes.enter(0).unwrap();
                ping(to, len)
            })
            .join()
            .unwrap()
    })
}

fn ping(to: IpAddr, len: usize) -> bool {
    let (family, protocol, question, answer, skip) = match to {
        IpAddr::V4(_) => (AddressFamily::Inet, SockProtocol::Icmp, 8, 0, 20),
        IpAddr::V6(_) => (AddressFamily::Inet6, SockProtocol::IcmpV6, 128, 129, 0),
    };
    let fd = socket(family, SockType::Raw, SockFlag::SOCK_CLOEXEC, protocol).unwrap();
    setsockopt(&fd, ReceiveTimeout, &TimeVal::milliseconds(200)).unwrap();
    let mut message: Vec<u8> = (0..len).map(|n| n as u8).collect();
    message[..4].copy_from_slice(&[question, 0, 0, 0]);
    if to.is_ipv4() {
        // The kernel writes that of IPv6.
        let words =
            message.chunks(2).map(|w| u32::from(w[0]) << 8 | u32::from(*w.get(1).unwrap_or(&0)));
        let sum: u32 = words.sum();
        let sum = (sum & 0xffff) + (sum >> 16);
        message[2..4].copy_from_slice(&(!(sum + (sum >> 16)) as u16).to_be_bytes());
    }
    let at = SockaddrStorage::from(SocketAddr::new(to, 0));
    let until = Instant::now() + PATIENCE;
    while Instant::now() < until {
        let _ = sendto(fd.as_raw_fd(), &message, &at, MsgFlags::empty());
        let mut bytes = [0; 2048];
        while let Ok(got) = recv(fd.as_raw_fd(), &mut bytes, MsgFlags::empty()) {
            let heard = bytes.get(skip..got).unwrap_or_default();
            if heard.first() == Some(&answer) && heard.get(4..) == Some(&message[4..]) {
                return true;
            }
        }
    }
    false
}

/// Goal: a ping of an address that no kernel has is answered by the port, up to what a frame holds.
#[test]
fn a_ping_finds_a_port() {
    let Some(nodes) = nodes() else { return };
    for (spec, at, headers) in [
        ("ip(10.78.0.101/24):afpacket:fab0", "10.78.0.101", 20),
        ("ip([2001:db8::a4e:65]/96):afpacket:fab0", "2001:db8::a4e:65", 40),
    ] {
        beside(&nodes, spec, || {
            for len in [8, 9, 64, 1500 - headers] {
                assert!(pings(&nodes, at, len), "{at}: {len} bytes");
            }
        });
    }
}

/// Goal: through a switch that lets only members hear a group, a port is found by its neighbours,
/// also long after it has opened, since it answers the switch's questions for members.
#[test]
fn a_switch_that_snoops_lets_questions_through() {
    let Some(nodes) = nodes() else { return };
    // In hundredths of a second: members are asked each second and forgotten after three.
    let bridge = "link set br0 type bridge mcast_snooping 1 mcast_querier 1 mcast_query_interval \
                  100 mcast_startup_query_interval 100 mcast_query_response_interval 50 \
                  mcast_membership_interval 300";
    if or_skip(nodes.ip(2, bridge)).is_none() {
        return;
    }
    let member = "grp ff02::1:ff4e:65";
    let members = || nodes.run(2, "bridge mdb show dev br0").unwrap();
    // The bridge begins to ask once it has an address of its own.
    thread::sleep(Duration::from_secs(4));
    beside(&nodes, "ip([2001:db8::a4e:65]/96):afpacket:fab0", || {
        thread::sleep(Duration::from_millis(200));
        assert!(members().contains(member), "{}", members());
        thread::sleep(Duration::from_secs(5));
        assert!(members().contains(member), "{}", members());
        assert!(pings(&nodes, "2001:db8::a4e:65", 64));
    });
}
