//! A user-space IP and UDP stack over a port that sends Ethernet frames: the same encapsulation as
//! [`udp`](super::udp), without the kernel.
//!
//! Each UDP datagram carries one whole frame of the fabric, exactly as `udp:` sends it, so the two
//! kinds of ports interoperate, and a station's MAC encodes its IP address and UDP port in the same
//! way. The fabric thus reaches every host that IP reaches, through routers and over networks that
//! forward nothing else. An IPv6 port reaches the hosts of its prefix
//! ([`Prefix`](super::inet::Prefix)). The differences between IPv4 and IPv6 are in `headers`; all
//! other code is shared.
//!
//! # Transmit and receive
//! `tx` looks up the next hop (the host itself on the segment, else the gateway) and its MAC
//! (`neighbours`), writes 42 or 62 bytes of headers and the frame's own head behind them
//! (`datagram`, `datagram6`), and the port below copies both and the frame's body into one frame of
//! its own. The headers are cached for further frames to the same peer. A neighbour message or a
//! poll of the neighbour cache invalidates them, so that each poll sees which peers are still in
//! use. Received datagrams are validated in place and their frames lent to the sink without a copy;
//! only datagrams that GRO has coalesced from several frames are copied first (`gro`).
//!
//! # Neighbours
//! Next hops are resolved on demand by ARP or neighbour discovery, and requests for the port's own
//! address are answered (`arp`, `ndp`). Frames to a next hop that is not resolved yet are lost, as
//! on a wire; the fabric retransmits them. Frames to an unreachable next hop are lost as well,
//! which is logged once.
//!
//! If no kernel shares the address, the port also answers echo requests (`echo`), and over IPv6
//! reports its membership in its solicited-node multicast group to the segment's switches (`mld`).
//!
//! # Trust
//! As in [`udp`](super::udp): a frame is accepted only if its source and destination MAC encode
//! the source and destination of the datagram. ARP and neighbour discovery are not authenticated.
//!
//! # Congestion
//! Datagrams are sent as ECN-capable (ECT(0), RFC 3168); a frame of a datagram that a router has
//! marked is marked ([`RxFrame::is_marked`]).
//!
//! # Not supported
//! Fragments, IPv4 options, IPv6 extension headers and path MTU messages of ICMP: the fabric's own
//! MTU probes, which depend on no router and trust none, find paths that carry less.

mod address;
mod arp;
mod datagram;
mod datagram6;
mod echo;
mod fuzz;
mod gro;
mod headers;
mod mld;
mod ndp;
mod neighbours;
#[cfg(test)]
mod tests;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, SocketAddrV4};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use super::frame_queue::FrameQueue;
use super::inet::{addr_of, tos_of, word_of};
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, ETHERTYPE, RxFrame, TxFrame};
use crate::mem::copy_to_start;
use crate::port::{
    MacAddr, Port, PortCaps, PortCounters, PortGone, PortWaiter, RxSink, Station, Tx,
};
use address::Net;
use datagram::{HEADERS_LEN, RejectReason};
use gro::GroBuffer;
use headers::{
    ControlPacket, Headers, NeighbourMessage, RxDatagram, as_long, headers_len, parse_datagram,
};
use neighbours::{CacheUpdate, Due, Host, NeighbourCache, RateLimiter};

pub use address::{AddressClaim, IpSettings};
pub use fuzz::fuzz_segment;

/// Polls between two readings of the clock, unless a thread has slept in between.
const POLLS_PER_CLOCK_READ: u32 = 256;
/// Time between two polls of the neighbour cache.
const NEIGHBOUR_POLL_NS: u64 = 5_000_000;
/// Bursts of the port below that one poll takes at most while none holds a frame of the fabric.
const BURSTS_PER_POLL: usize = 16;
/// Neighbour messages that are kept of one burst.
const MESSAGES_MAX: usize = 16;
/// Frames to the port itself that may wait.
const HAIRPIN_FRAMES: usize = 64;
/// Duplicate address detection: number of probes, and how long opening waits after each.
const PROBES: usize = 3;
const PROBE_NS: u64 = 30_000_000;
/// Time between two log lines about a duplicate address; also the window of [`LogLimiter`].
const LOG_INTERVAL_NS: u64 = 60_000_000_000;
/// Log lines about other hosts in that time: a sender that forges addresses would fill the log.
const LOG_LINES_MAX: u32 = 16;

/// Dropped datagrams, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpDrops {
    /// Received with IPv4 options or IPv6 extension headers.
    pub options: u64,
    /// Received fragments.
    pub fragments: u64,
    /// Received with a wrong IPv4 header checksum, or over IPv6 without a UDP checksum.
    pub sums: u64,
    /// Received with contradicting lengths.
    pub lengths: u64,
    /// Received without a frame of the fabric from the datagram's source to this station.
    pub frames: u64,
    /// Not sent, since the next hop was not resolved.
    pub unresolved: u64,
}

/// Not a MAC as [`MacAddr::frame_word`] has it: the upper 16 bits of such a word are zero.
const NO_DESTINATION: u64 = u64::MAX;
/// Offset of a frame's source MAC, bytes.
const SRC_AT: usize = 6;
/// The bits of a word that hold a MAC, and the fabric's EtherType in its other bits.
const MAC_WORD: u64 = u64::MAX >> 16;
const ETHERTYPE_WORD: u64 = (ETHERTYPE.swap_bytes() as u64) << 48;

/// See the module's documentation.
pub struct Ip {
    /// `None` if the port below can only be polled. Dropped before that port, whose sockets it may
    /// hold.
    sleep_tracker: Option<Arc<SleepTracker>>,
    inner: Box<dyn Port>,
    caps: PortCaps,
    frame_max: usize,
    net: Net,
    /// The NIC's MAC and the port's IP address.
    own: (MacAddr, IpAddr),
    template: Headers,
    /// Bytes of the Ethernet, IP and UDP headers.
    headers_len: usize,
    sums: bool,
    neighbours: NeighbourCache,
    reply_limit: RateLimiter,
    echo_limit: RateLimiter,
    report_limit: RateLimiter,
    /// The cached headers, and behind them room for a frame.
    head: Box<[u8]>,
    /// Destination MAC that the cached headers are for, as [`MacAddr::frame_word`] has it, and
    /// their partial checksum ([`Headers::write_destination`]). [`NO_DESTINATION`]: none cached.
    cached_dst: (u64, u16),
    rx_filter: RxFilter,
    hairpin: FrameQueue,
    counters: PortCounters,
    unresolved: u64,
    polls: u32,
    neighbours_polled_ns: u64,
    /// When a duplicate of the port's address was logged last; 0: never.
    duplicate_logged_ns: u64,
    /// Limits log lines about other hosts.
    host_log: LogLimiter,
    /// A destination without a route has been logged.
    no_route_logged: bool,
    claim: AddressClaim,
}

impl fmt::Debug for Ip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ip").field(&self.caps.name).finish()
    }
}

impl Ip {
    /// Opens a port at the address of `claim`, which was acquired for `settings`, over `inner`.
    /// Takes a tenth of a second for duplicate address detection.
    ///
    /// # Errors
    /// [`OpenError`]: another host has the address, `inner` carries too little, or has gone.
    pub fn open(
        settings: &IpSettings,
        claim: AddressClaim,
        inner: Box<dyn Port>,
    ) -> Result<Self, OpenError> {
        let mut port = Self::open_unprobed(settings, claim, inner)?;
        port.claim_address(settings)?;
        tracing::debug!(port = %port.caps.name, mac = %port.own.0, mtu = port.caps.mtu, "opened");
        Ok(port)
    }

    /// As [`open`](Self::open), without duplicate address detection or an announcement.
    fn open_unprobed(
        settings: &IpSettings,
        claim: AddressClaim,
        inner: Box<dyn Port>,
    ) -> Result<Self, OpenError> {
        let below = inner.caps();
        let mtu = settings.mtu_over(below.mtu, headers_len(claim.addr()))?;
        let (mac, addr) = (below.station.mac, claim.addr());
        let echo_max = if claim.is_shared_with_kernel() { 0 } else { ETH_HDR_LEN + below.mtu };
        let net = Net::of(settings);
        let station = net.prefix.mac_of(addr).expect("a claim has an address of the fabric");
        let (frame_max, headers_len) = (ETH_HDR_LEN + mtu, headers_len(addr));
        let sleep_tracker = inner.waiter().map(|below| {
            let has_slept = AtomicBool::new(false);
            Arc::new(SleepTracker { below, has_slept })
        });
        let caps = PortCaps {
            rto_floor_ns: below.rto_floor_ns,
            via_kernel: below.via_kernel,
            link_bps: below.link_bps,
            ..PortCaps::new(station, mtu, format!("{}:{}", settings.text(addr.port()), below.name))
        };
        Ok(Self {
            sleep_tracker,
            inner,
            frame_max,
            net,
            own: (mac, addr.ip()),
            headers_len,
            template: Headers::new(mac, addr, settings.ttl, tos_of(settings.dscp, settings.ecn)),
            sums: settings.sums || addr.is_ipv6(),
            neighbours: NeighbourCache::new(),
            reply_limit: RateLimiter::new(),
            echo_limit: RateLimiter::new(),
            report_limit: RateLimiter::new(),
            head: vec![0; headers_len + frame_max].into(),
            cached_dst: (NO_DESTINATION, 0),
            rx_filter: RxFilter::new(addr, station, frame_max, echo_max),
            hairpin: FrameQueue::new(HAIRPIN_FRAMES, frame_max),
            counters: PortCounters::default(),
            unresolved: 0,
            polls: 0,
            neighbours_polled_ns: 0,
            duplicate_logged_ns: 0,
            host_log: LogLimiter::default(),
            no_route_logged: false,
            caps,
            claim,
        })
    }

    /// Probes for a duplicate of the address, and announces the address if there is none. No
    /// probes if the kernel has the address too: the kernel has probed already, and would answer
    /// ours by its other interfaces.
    fn claim_address(&mut self, settings: &IpSettings) -> Result<(), OpenError> {
        let gone =
            |gone: PortGone| settings.refuse(libc::ENODEV, gone.why().to_owned(), "open it again");
        let probe = ControlPacket::probe(self.own.0, self.own.1);
        let (probes, waiter) =
            (if self.claim.is_shared_with_kernel() { 0 } else { PROBES }, self.inner.waiter());
        // The solicited-node group is joined before the first probe (RFC 4862).
        let joins = ControlPacket::report(self.own.0, self.own.1, true)
            .filter(|_| self.rx_filter.owns_address());
        for _ in 0..probes {
            if let Some(joins) = &joins {
                self.send_packet(joins).map_err(gone)?;
            }
            self.send_packet(&probe).map_err(gone)?;
            let until = now_ns() + PROBE_NS;
            while now_ns() < until {
                let heard = self.poll_duplicate_address(&mut |_: &RxFrame<'_>| {}).map_err(gone)?;
                if let Some(mac) = heard {
                    let why = format!("{} has the address {}", mac, self.own.1);
                    let mend = "choose one that is free, or end what has it";
                    return Err(settings.refuse(libc::EADDRINUSE, why, mend));
                }
                let nap = Duration::from_millis(1);
                waiter.as_ref().map_or_else(|| std::thread::sleep(nap), |waiter| waiter.wait(nap));
            }
        }
        self.send_packet(&ControlPacket::announcement(self.own)).map_err(gone)
    }

    /// Receives a burst. Returns the MAC of another host that claims the port's address, if any.
    fn poll_duplicate_address(
        &mut self,
        sink: &mut dyn RxSink,
    ) -> Result<Option<MacAddr>, PortGone> {
        self.inner
            .rx_burst(MESSAGES_MAX, &mut DecapSink { rx_filter: &mut self.rx_filter, sink })?;
        let own = self.own;
        let other =
            self.rx_filter.messages().iter().find(|n| n.sender.1 == own.1 && n.sender.0 != own.0);
        let other = other.map(|message| message.sender.0);
        self.process_messages(true)?;
        Ok(other)
    }

    /// Dropped datagrams, by cause.
    pub fn drops(&self) -> IpDrops {
        IpDrops { unresolved: self.unresolved, ..self.rx_filter.drops }
    }

    /// Sends a packet at once. The packet is lost if the port below has no room.
    #[cold]
    fn send_packet(&mut self, frame: &ControlPacket) -> Result<(), PortGone> {
        self.inner.tx(&TxFrame::whole(frame))?;
        self.inner.flush()
    }

    /// Updates the neighbour cache from received messages, and replies to requests. While the
    /// address is `tentative` (RFC 4862), only probes for the same address are answered.
    #[cold]
    fn process_messages(&mut self, tentative: bool) -> Result<(), PortGone> {
        let now = now_ns();
        self.answer_queries(tentative, now)?;
        let (messages, count) = (self.rx_filter.messages, self.rx_filter.count);
        self.rx_filter.count = 0;
        self.cached_dst.0 = NO_DESTINATION;
        for message in &messages[..count] {
            let (mac, ip) = message.sender;
            let is_to_us = message.target == self.own.1;
            let asks_us = message.is_request && is_to_us;
            if ip == self.own.1 {
                if mac != self.own.0 {
                    self.warn_duplicate_address(mac, now);
                }
            } else if let Some(host) = self.net.neighbour_key(ip)
                // A message without the override flag only confirms a known MAC (RFC 4861, 7.2.5).
                && (message.overrides || self.neighbours.known(host).is_none_or(|is| is == mac))
                && let CacheUpdate::Moved(was) = self.neighbours.learn(host, mac, now, asks_us)
                && self.host_log.allow(now)
            {
                let port = &self.caps.name;
                tracing::info!(%port, "{ip} is at {mac} now, and was at {was}");
            }
            let answers = asks_us && (!tentative || ip.is_unspecified());
            if answers && mac != self.own.0 && self.reply_limit.allow(now) {
                self.send_packet(&ControlPacket::reply(self.own, message.sender))?;
            }
        }
        Ok(())
    }

    /// Replies to a kept echo request, and to a query for group members.
    fn answer_queries(&mut self, tentative: bool, now: u64) -> Result<(), PortGone> {
        let (asks, len) = (self.rx_filter.has_mld_query, self.rx_filter.echo_len);
        (self.rx_filter.has_mld_query, self.rx_filter.echo_len) = (false, 0);
        if asks
            && self.report_limit.allow(now)
            && let Some(report) = ControlPacket::report(self.own.0, self.own.1, false)
        {
            self.send_packet(&report)?;
        }
        let echo = &mut self.rx_filter.echo[..len];
        if !tentative
            && len > 0
            && self.echo_limit.allow(now)
            && let Some(answer) = echo::reply(echo, self.own)
        {
            self.inner.tx(&TxFrame::whole(answer))?;
            self.inner.flush()?;
        }
        Ok(())
    }

    fn warn_duplicate_address(&mut self, mac: MacAddr, now: u64) {
        if self.duplicate_logged_ns == 0
            || now.saturating_sub(self.duplicate_logged_ns) >= LOG_INTERVAL_NS
        {
            self.duplicate_logged_ns = now;
            let port = &self.caps.name;
            tracing::warn!(
                %port,
                "{mac} has the address {} as well, and receives our frames: stop it there, or \
                 choose another address here", self.own.1
            );
        }
    }

    /// Polls the neighbour cache if that is due, and sends its requests.
    #[cold]
    fn poll_neighbours(&mut self) -> Result<(), PortGone> {
        let now = now_ns();
        if now.saturating_sub(self.neighbours_polled_ns) < NEIGHBOUR_POLL_NS {
            return Ok(());
        }
        self.neighbours_polled_ns = now;
        self.cached_dst.0 = NO_DESTINATION;
        let Self { neighbours, inner, own, caps, net, host_log, .. } = self;
        let mut done = Ok(());
        neighbours.poll(now, |due| match due {
            Due::Request((host, to)) if done.is_ok() => {
                let request = ControlPacket::request(*own, net.ip_of(host), to);
                let asked = inner.tx(&TxFrame::whole(&request));
                done = asked.map(drop);
            }
            Due::Request(_) => {}
            Due::Unreachable(_) if !host_log.allow(now) => {}
            Due::Unreachable(host) => tracing::warn!(
                port = %caps.name,
                "{} does not answer, frames through it are lost: is it up, and on this segment?",
                net.ip_of(host)
            ),
        });
        done?;
        self.inner.flush()
    }

    /// Drops a frame whose next hop is not resolved, and requests the next hop's MAC.
    #[cold]
    fn drop_unresolved(&mut self, hop: Host) -> Result<Tx, PortGone> {
        self.cached_dst.0 = NO_DESTINATION;
        self.unresolved += 1;
        self.counters.tx_dropped += 1;
        if let Some((host, to)) = self.neighbours.resolve(hop, now_ns()) {
            self.send_packet(&ControlPacket::request(self.own, self.net.ip_of(host), to))?;
        }
        Ok(Tx::Sent)
    }

    /// Counts a frame to a destination without a route, and logs the first one.
    #[cold]
    fn no_route(&mut self, to: Option<SocketAddrV4>) -> Tx {
        self.counters.tx_no_route += 1;
        if let (Some(to), false) = (to, self.no_route_logged) {
            self.no_route_logged = true;
            let (port, to) = (&self.caps.name, self.net.prefix.socket_addr(to));
            if to.ip() == self.own.1 {
                tracing::warn!(
                    %port,
                    "{to} is another process at this address, which no frame of ours reaches: near \
                     peers meet in shared memory, see near= in docs/wires.md"
                );
                return Tx::NoRoute;
            }
            tracing::warn!(
                %port,
                "{} is outside of the network of {}, and no gateway leads there: write \
                 gw=ADDRESS-OF-THE-ROUTER, or a shorter prefix", to.ip(), self.own.1
            );
        }
        Tx::NoRoute
    }

    /// Writes and caches the headers for the destination of `frame`. Returns the outcome instead if
    /// the frame does not leave by the port below.
    #[inline(never)]
    fn cache_headers(&mut self, frame: &TxFrame<'_>) -> Result<Option<Tx>, PortGone> {
        let mac = frame.dst().mac;
        let Some(to) = addr_of(mac) else {
            if mac.is_group() {
                // There is no list of all stations.
                self.counters.tx_dropped += 1;
                return Ok(Some(Tx::Sent));
            }
            return Ok(Some(self.no_route(None)));
        };
        if mac == self.caps.station.mac {
            return Ok(Some(self.hairpin.tx(frame, &mut self.counters)));
        }
        let hop = self.net.next_hop(*to.ip()).filter(|_| !self.net.is_own(*to.ip()));
        let Some(hop) = hop else { return Ok(Some(self.no_route(Some(to)))) };
        let Some(hop) = self.neighbours.find(hop) else {
            return self.drop_unresolved(hop).map(Some);
        };
        let sum = self.template.write_destination(&mut self.head[..self.headers_len], hop, to);
        self.cached_dst = (mac.frame_word(), sum);
        Ok(None)
    }

    /// Sends a frame in a datagram with a UDP checksum, mandatory over IPv6. Copies the frame.
    fn tx_with_sum(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let (head, rest) = self.head.split_at_mut(self.headers_len);
        let len = frame.copy_to(rest);
        self.template.write_lengths(head, self.cached_dst.1, len);
        self.template.write_sum(head, &rest[..len]);
        let sent = self.inner.tx(&TxFrame::whole(&self.head[..self.headers_len + len]));
        sent.map(|sent| self.counters.tried(sent, len))
    }
}

/// Limits log lines about other hosts to [`LOG_LINES_MAX`] per [`LOG_INTERVAL_NS`].
#[derive(Default)]
struct LogLimiter {
    since_ns: u64,
    count: u32,
}

impl LogLimiter {
    /// Whether one more line may be logged; counts it.
    fn allow(&mut self, now: u64) -> bool {
        if self.count == 0 || now.saturating_sub(self.since_ns) >= LOG_INTERVAL_NS {
            (self.since_ns, self.count) = (now, 0);
        }
        self.count = self.count.saturating_add(1);
        self.count <= LOG_LINES_MAX
    }
}

/// Destination MAC of a frame with this head, as [`MacAddr::frame_word`] has it.
#[inline]
fn mac_word(head: &[u8]) -> u64 {
    let head: &[u8; ETH_HDR_LEN] = head.first_chunk().expect("a whole Ethernet header");
    u64::from_le_bytes(*head.first_chunk().expect("less than that")) & MAC_WORD
}

/// Classifies received frames: datagrams for this port, control packets, and frames to ignore.
struct RxFilter {
    own_addr: SocketAddr,
    headers_len: usize,
    /// The port's own MAC, as [`MacAddr::frame_word`] has it.
    station: u64,
    frame_max: usize,
    counters: PortCounters,
    drops: IpDrops,
    lent: usize,
    gro: GroBuffer,
    messages: [NeighbourMessage; MESSAGES_MAX],
    count: usize,
    /// Buffer for the first echo request of a burst; empty if the kernel shares the address and
    /// answers.
    echo: Box<[u8]>,
    echo_len: usize,
    /// A query for group members was received (MLD).
    has_mld_query: bool,
}

impl RxFilter {
    fn new(own_addr: SocketAddr, station: MacAddr, frame_max: usize, echo_max: usize) -> Self {
        let nobody = (MacAddr::default(), Ipv4Addr::UNSPECIFIED.into());
        let none = NeighbourMessage {
            is_request: false,
            sender: nobody,
            target: nobody.1,
            overrides: false,
        };
        Self {
            own_addr,
            headers_len: headers_len(own_addr),
            station: station.frame_word(),
            frame_max,
            counters: PortCounters::default(),
            drops: IpDrops::default(),
            lent: 0,
            gro: GroBuffer::new(),
            messages: [none; MESSAGES_MAX],
            count: 0,
            echo: vec![0; echo_max].into(),
            echo_len: 0,
            has_mld_query: false,
        }
    }

    /// Whether no kernel shares the address.
    fn owns_address(&self) -> bool {
        !self.echo.is_empty()
    }

    /// Whether control packets wait to be processed.
    #[inline]
    fn has_control_packets(&self) -> bool {
        self.count > 0 || self.echo_len > 0 || self.has_mld_query
    }

    fn messages(&self) -> &[NeighbourMessage] {
        &self.messages[..self.count]
    }

    /// The fabric frame inside `frame`, marked if its datagram is; else counts the cause.
    #[inline]
    fn check<'a>(&mut self, frame: &RxFrame<'a>) -> Option<RxFrame<'a>> {
        let RxDatagram { from, inside, marked } = match parse_datagram(frame, &self.own_addr) {
            Ok(seen) => seen,
            Err(why) => {
                self.reject(why, frame);
                return None;
            }
        };
        // Two overlapping words; of the first only the destination is compared.
        let word = |at| inside.chunk_at(at).map(u64::from_le_bytes);
        let is_ours = word(SRC_AT).is_some_and(|it| {
            word_of(from).is_some_and(|src| src | ETHERTYPE_WORD == it)
                && word(0).is_some_and(|dst| dst & MAC_WORD == self.station)
        });
        if !is_ours {
            self.drop_frame();
            return None;
        }
        Some(inside.with_mark(marked))
    }

    #[cold]
    fn drop_frame(&mut self) {
        self.drops.frames += 1;
        self.counters.rx_dropped += 1;
    }

    /// Copies the payload of a datagram, longer than a frame, if GRO has coalesced it.
    #[cold]
    fn buffer_gro(&mut self, payload: &RxFrame<'_>) {
        if !self.gro.store(payload, self.frame_max) {
            self.drop_frame();
        }
    }

    /// Lends frames of the GRO buffer, until `max` frames of this poll have been lent.
    #[cold]
    fn lend_gro(&mut self, max: usize, sink: &mut dyn RxSink) {
        while self.lent < max
            && let Some(frame) = self.gro.next()
        {
            self.lent += 1;
            self.counters.received(frame.len());
            sink.frame(&frame);
        }
    }

    #[cold]
    fn reject(&mut self, why: RejectReason, frame: &RxFrame<'_>) {
        let count = match why {
            RejectReason::Foreign => return self.keep_control_packet(frame),
            RejectReason::Options => &mut self.drops.options,
            RejectReason::Fragment => &mut self.drops.fragments,
            RejectReason::Sum => &mut self.drops.sums,
            RejectReason::Length => &mut self.drops.lengths,
            RejectReason::ForeignPrefix => &mut self.drops.frames,
        };
        *count += 1;
        self.counters.rx_dropped += 1;
    }

    /// Keeps a neighbour message, if there is room, and if no kernel shares the address an echo
    /// request or a query; ignores everything else.
    #[cold]
    fn keep_control_packet(&mut self, frame: &RxFrame<'_>) {
        if self.owns_address() {
            self.keep_query(frame);
        }
        if self.count == MESSAGES_MAX {
            return;
        }
        if let Some(message) = NeighbourMessage::parse(frame, self.own_addr) {
            self.messages[self.count] = message;
            self.count += 1;
        }
    }
}

impl RxFilter {
    fn keep_query(&mut self, frame: &RxFrame<'_>) {
        let ip = self.own_addr.ip();
        let len = frame.len();
        if let IpAddr::V6(ip) = ip {
            self.has_mld_query |= mld::is_query(frame, ip);
        }
        if self.echo_len == 0 && len <= self.echo.len() && echo::may_be_request(frame, ip) {
            let is_copied = frame.copy_to(0, &mut self.echo[..len]);
            self.echo_len = if is_copied { len } else { 0 };
        }
    }
}

/// Lends the frames inside received datagrams to `sink`.
struct DecapSink<'a> {
    rx_filter: &'a mut RxFilter,
    sink: &'a mut dyn RxSink,
}

impl RxSink for DecapSink<'_> {
    #[inline]
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        // Not validated yet: a prefetch of wrong bytes has no effect.
        let at = self.rx_filter.headers_len;
        let Some(len) = frame.len().checked_sub(at) else { return };
        if let Some(inside) = frame.part(at, len) {
            self.sink.prefetch(&inside);
        }
    }

    fn frame(&mut self, frame: &RxFrame<'_>) {
        let Some(inside) = self.rx_filter.check(frame) else { return };
        if inside.len() > self.rx_filter.frame_max {
            return self.rx_filter.buffer_gro(&inside);
        }
        self.rx_filter.lent += 1;
        self.rx_filter.counters.received(inside.len());
        self.sink.frame(&inside);
    }
}

impl Port for Ip {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        assert!(len <= self.frame_max, "frame of {len} bytes");
        if mac_word(frame.head) != self.cached_dst.0
            && let Some(done) = self.cache_headers(frame)?
        {
            return Ok(done);
        }
        if self.sums {
            return self.tx_with_sum(frame);
        }
        // Only IPv4 datagrams may leave without a UDP checksum.
        let head = &mut self.head[..HEADERS_LEN + frame.head.len()];
        datagram::write_lengths(as_long(head), self.cached_dst.1, len);
        copy_to_start(frame.head, &mut head[HEADERS_LEN..]);
        let sent = self.inner.tx(&TxFrame { head, ..*frame });
        sent.map(|sent| self.counters.tried(sent, len))
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        self.inner.flush()
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        self.polls = self.polls.wrapping_add(1);
        let has_slept =
            self.sleep_tracker.as_ref().is_some_and(|sleep_tracker| sleep_tracker.has_slept());
        if has_slept
            || self.polls.is_multiple_of(POLLS_PER_CLOCK_READ)
            || self.neighbours.is_resolving()
        {
            self.poll_neighbours()?;
        }
        self.rx_filter.lent = 0;
        for _ in 0..BURSTS_PER_POLL {
            if !self.rx_filter.gro.is_empty() {
                self.rx_filter.lend_gro(max, sink);
                break;
            }
            // The GRO buffer holds one datagram.
            let expects_gro = self.rx_filter.gro.is_expected();
            let left = if expects_gro { 1.min(max) } else { max };
            let got = self
                .inner
                .rx_burst(left, &mut DecapSink { rx_filter: &mut self.rx_filter, sink })?;
            if got > 0 {
                self.rx_filter.gro.note_burst();
            }
            if self.rx_filter.has_control_packets() {
                self.process_messages(false)?;
            }
            let has_lent = self.rx_filter.lent > 0 && self.rx_filter.gro.is_empty();
            if got == 0 || has_lent && !expects_gro || self.rx_filter.lent >= max {
                break;
            }
        }
        let mut count = self.rx_filter.lent;
        if !self.hairpin.is_empty() {
            count += self.hairpin.rx_burst(max - count, sink, &mut self.counters);
        }
        Ok(count)
    }

    /// Frames of the fabric; drops include those of the port below.
    fn counters(&self) -> PortCounters {
        let below = self.inner.counters();
        let all = self.counters + self.rx_filter.counters;
        PortCounters {
            rx_dropped: all.rx_dropped + below.rx_dropped,
            tx_dropped: all.tx_dropped + below.tx_dropped,
            ..all
        }
    }

    fn below(&self) -> Option<&dyn Port> {
        Some(&*self.inner)
    }

    fn station(&self, station: Station) -> Option<String> {
        self.net.prefix.addr_of(station.mac).map(|addr| addr.to_string())
    }

    fn waiter(&self) -> Option<Arc<dyn PortWaiter>> {
        let sleep_tracker = self.sleep_tracker.as_ref()?;
        Some(Arc::clone(sleep_tracker) as Arc<dyn PortWaiter>)
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        if !self.hairpin.is_empty() || !self.rx_filter.gro.is_empty() {
            return Some(now_ns());
        }
        let asks =
            self.neighbours.is_resolving().then(|| self.neighbours_polled_ns + NEIGHBOUR_POLL_NS);
        asks.into_iter().chain(self.inner.next_deadline_ns()).min()
    }
}

/// The waiter of the port below, with a note of each sleep: after a sleep the next poll reads the
/// clock.
struct SleepTracker {
    below: Arc<dyn PortWaiter>,
    /// A thread has slept since the last poll.
    has_slept: AtomicBool,
}

impl SleepTracker {
    /// Whether a thread has slept since the last call; clears that. One load if none has.
    #[inline]
    fn has_slept(&self) -> bool {
        self.has_slept.load(Relaxed) && self.has_slept.swap(false, Relaxed)
    }
}

impl PortWaiter for SleepTracker {
    fn wait_or(&self, also: Option<BorrowedFd<'_>>, timeout: Duration) -> bool {
        let came = self.below.wait_or(also, timeout);
        self.has_slept.store(true, Relaxed);
        came
    }

    fn wake(&self) {
        self.below.wake();
    }

    fn has_interrupt(&self) -> bool {
        self.below.has_interrupt()
    }
}
