//! TCP connections of other tenants, which pass the same port of the fabric's switch: Reno, which
//! fills a port until it overflows, as CUBIC does.

use crate::net::{ETH_GAP, Event, Net};

/// A full frame, bytes.
const FRAME: u64 = 1514;

/// One connection.
#[derive(Clone, Debug)]
pub(crate) struct Tcp {
    /// The station whose port it passes.
    to: usize,
    /// Segments that may be under way, and those that are.
    cwnd: f64,
    under_way: u32,
    /// Above it the window grows by one segment a round trip.
    threshold: f64,
    /// Losses until then belong to the round trip of one that has halved the window.
    cut_until: u64,
    /// Segments that have arrived.
    pub(crate) arrived: u64,
}

impl Net {
    /// Opens a connection through the port towards `to`, with as many bytes to send as it can.
    pub(crate) fn open_tcp(&mut self, to: usize) {
        let (cwnd, threshold) = (10.0, f64::MAX);
        self.tcps.push(Tcp { to, cwnd, under_way: 0, threshold, cut_until: 0, arrived: 0 });
        self.send_tcp(self.tcps.len() - 1);
    }

    /// A segment of connection `n` was acknowledged, or is known to be lost.
    pub(crate) fn tcp_news(&mut self, n: usize, lost: bool) {
        let (now, round_ns) = (self.now, self.tcp_round_ns(n));
        let tcp = &mut self.tcps[n];
        tcp.under_way -= 1;
        if !lost {
            tcp.arrived += 1;
            tcp.cwnd += if tcp.cwnd < tcp.threshold { 1.0 } else { 1.0 / tcp.cwnd };
        } else if now >= tcp.cut_until {
            tcp.cwnd = (tcp.cwnd / 2.0).max(1.0);
            (tcp.threshold, tcp.cut_until) = (tcp.cwnd, now + round_ns);
        }
        self.send_tcp(n);
    }

    /// Sends what the window allows. (The sender's own transmitter is not modelled: the
    /// acknowledgements that let a segment go come at the pace of the port.)
    fn send_tcp(&mut self, n: usize) {
        while self.tcps[n].under_way < self.tcps[n].cwnd as u32 {
            self.tcps[n].under_way += 1;
            let (to, back_ns) = (self.tcps[n].to, 2 * self.link.latency_ns);
            let lost_at = self.now + self.tcp_round_ns(n);
            match self.enter_port(to, FRAME + ETH_GAP) {
                Some((_, leaves_at)) => self.at(leaves_at + back_ns, Event::Tcp { n, lost: false }),
                None => self.at(lost_at, Event::Tcp { n, lost: true }),
            }
        }
    }

    /// How long a segment that is sent now and its acknowledgement take.
    fn tcp_round_ns(&self, n: usize) -> u64 {
        2 * self.link.latency_ns + self.port_wait_ns(self.tcps[n].to)
    }
}
