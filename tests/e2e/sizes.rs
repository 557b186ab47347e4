//! Messages of all lengths between two processes, there and back, byte for byte.

use barewire::*;

use crate::supervisor::{Segment, Worker};
use crate::worker::{Node, open, pattern, settings};

fn wait(node: &Node, context: u64) -> Completion {
    let mut one = [Completion::default()];
    let start = std::time::Instant::now();
    loop {
        match node.cq.read(&mut one) {
            Ok(_) if one[0].op_context == context => return std::mem::take(&mut one[0]),
            Ok(_) | Err(Error::Again) => {}
            Err(_) => panic!("{}", node.cq.readerr().unwrap()),
        }
        assert!(start.elapsed() < crate::supervisor::PATIENCE, "no completion");
    }
}

fn there_and_back(port: &str, sizes: impl Fn(usize) -> Vec<usize>) {
    let mut quiet = settings();
    quiet.t_dead = std::time::Duration::from_secs(10);
    let node = open(port, quiet);
    let mut echo = Worker::start("echo", "echo", port);
    echo.say(&format!("PEER {}", node.ep.getname().unwrap()));
    let peer = node.knows(&echo.addr.clone());
    for len in sizes(node.domain.port().mtu) {
        echo.say(&format!("SIZE {len}"));
        node.ep.trecv(Buf::zeroed(len), peer, len as u64, 0, 1).unwrap();
        let sent = pattern(len, len as u64);
        node.ep.tsend(Buf::from(sent.clone()), peer, len as u64, 2).unwrap();
        let got = wait(&node, 1);
        assert_eq!((got.len, got.src), (len, peer));
        assert!(got.bytes() == sent, "{len} bytes came back changed");
        // The echo's send needs us until it has ended.
        while !echo_done(&mut echo, &node) {}
    }
    echo.say("END");
    echo.finish();
}

fn echo_done(echo: &mut Worker, node: &Node) -> bool {
    let _ = node.domain.progress();
    echo.try_answer("ECHOED")
}

/// Lengths around every limit of the shared-memory port and the protocol.
#[test]
fn every_length_survives_the_round_trip() {
    let segment = Segment::new("sizes");
    there_and_back(&segment.port(), |mtu| {
        let mut sizes = vec![0, 1, 255, 256, 257, 16_383, 16_384, 16_385];
        sizes.extend([mtu - 48, mtu - 1, mtu, mtu + 1, 1 << 20, 64 << 20]);
        sizes
    });
}

/// The same with small frames over a link that loses one in twenty.
#[test]
fn every_length_survives_a_bad_link() {
    let segment = Segment::new("sizes-bad");
    let port = format!("fault(loss=0.05,seed=3):{},mtu=1500", segment.port());
    there_and_back(&port, |mtu| vec![0, 1, 256, 257, mtu - 1, mtu, mtu + 1, 16_385, 1 << 20]);
}
