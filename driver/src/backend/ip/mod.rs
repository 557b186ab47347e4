//! IP and UDP of our own around a port that writes Ethernet frames: what [`udp`](super::udp) does
//! through the kernel, without it.
//!
//! A frame of the fabric travels whole in a UDP datagram, the very one that `udp:` sends: the two
//! talk to each other, and a port's address is its place in the same way. So the fabric reaches
//! whatever IP reaches, through routers and over networks that forward nothing else. With an IPv6
//! address it reaches the hosts of its prefix ([`Prefix`](super::inet::Prefix)). What differs
//! between the two is in `headers`; all else is the same code.
//!
//! # The way of a frame
//! `tx` finds the next hop (the host itself on the segment, else the gateway), its hardware address
//! (`neighbours`), writes 42 or 62 bytes of headers and the frame's own head behind them
//! (`datagram`, `datagram6`),
//! and the port below copies that with the frame's body into one frame of its own. Headers stay for
//! the next frame, if that goes to the same peer, until something is heard of neighbours or it is
//! time to look at them: so each look finds whether a peer is still sent to. What comes is
//! checked and lent where it lies; but several frames in one piece are copied first (`train`).
//!
//! # Neighbours
//! Asked for by ARP or neighbour discovery when a frame is to be sent there, and answered (`arp`,
//! `ndp`). Frames to one whose
//! address is not known yet are lost, as on a wire; the fabric repeats them. So are those to one
//! who does not answer, which the log tells once.
//!
//! Where no kernel has the address, echo requests are answered (`echo`), and of IPv6 the segment's
//! switches are told that the port hears questions for its address (`mld`).
//!
//! # Trust
//! That of [`udp`](super::udp): a frame is taken only if its addresses are the places that the
//! datagram came from and went to. Both believe who
//! answers.
//!
//! # Congestion
//! Datagrams say that they may be marked (ECT(0), RFC 3168), and a frame of one that a router has
//! marked says so ([`RxFrame::is_marked`]).
//!
//! # What it does not do
//! Fragments, IPv4 options and more headers of IPv6, and what routers tell by ICMP: a path that
//! carries less is found by the fabric's probes, which need no router's word and believe nobody's.

mod adversary;
mod arp;
mod datagram;
mod datagram6;
mod echo;
mod headers;
mod mld;
mod ndp;
mod neighbours;
mod place;
#[cfg(test)]
mod tests;
mod train;

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
use datagram::{HEADERS_LEN, Refused};
use headers::{Headers, Notice, Packet, Seen, as_long, headers_len, look};
use neighbours::{Budget, Due, Host, Learned, Neighbours};
use place::Net;
use train::Train;

pub use adversary::wild_segment;
pub use place::{IpSettings, Place};

/// Polls between two looks at the clock, if nobody sleeps between them.
const LOOK_EVERY: u32 = 256;
/// Time between two looks at the neighbours.
const LOOK_NS: u64 = 5_000_000;
/// Bursts of the port below that may hold nothing for us before a poll ends.
const BURSTS: usize = 16;
/// Packets about neighbours that are kept of one burst.
const NOTICES: usize = 16;
/// Frames to ourselves that may wait.
const OWN_FRAMES: usize = 64;
/// How often opening asks whether somebody has the address, and how long it listens each time.
const PROBES: usize = 3;
const PROBE_NS: u64 = 30_000_000;
/// Time between two lines about somebody else who has our address.
const TELL_NS: u64 = 60_000_000_000;
/// Lines of the log about other hosts in that time: a sender that forges addresses would fill it.
const TOLD_MAX: u32 = 16;

/// Datagrams that were not passed on, by cause.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IpDrops {
    /// They had IPv4 options, or more headers of IPv6.
    pub options: u64,
    /// They were parts of a longer one.
    pub fragments: u64,
    /// The sum over their IPv4 header was wrong, or that of UDP over IPv6 was left out.
    pub sums: u64,
    /// Their lengths contradicted each other.
    pub lengths: u64,
    /// They held no frame from where they came from to here.
    pub frames: u64,
    /// They were to be sent to somebody whose hardware address was not known.
    pub unresolved: u64,
}

/// No word of an address, as none has the upper 16 bits.
const NOWHERE: u64 = u64::MAX;
/// Where the source of a frame begins.
const SRC_AT: usize = 6;
/// What of a word is an address, and the fabric's EtherType in the rest of it.
const MAC_WORD: u64 = u64::MAX >> 16;
const ETHERTYPE_WORD: u64 = (ETHERTYPE.swap_bytes() as u64) << 48;

/// See the module's documentation.
pub struct Ip {
    /// None if the port below can only be polled. Before that, whose sockets it may have.
    waiting: Option<Arc<Waiting>>,
    inner: Box<dyn Port>,
    caps: PortCaps,
    frame_max: usize,
    net: Net,
    /// The NIC's address, and ours.
    own: (MacAddr, IpAddr),
    template: Headers,
    /// Bytes of the headers.
    headers_len: usize,
    sums: bool,
    neighbours: Neighbours,
    answers: Budget,
    echoes: Budget,
    reports: Budget,
    /// Where the headers are written, and the frame's head behind them.
    head: Box<[u8]>,
    /// Whom those headers lead to: the destination of frames, as [`MacAddr::frame_word`] has it,
    /// and the sum that goes with them. [`NOWHERE`] if what is known of neighbours has changed.
    aimed: (u64, u16),
    ear: Ear,
    hairpin: FrameQueue,
    counters: PortCounters,
    unresolved: u64,
    polls: u32,
    looked_ns: u64,
    /// When the log was told of somebody else with our address.
    told_ns: u64,
    /// What it was told of other hosts.
    told: Told,
    /// The log was told of somebody whom no gateway leads to.
    told_far: bool,
    place: Place,
}

impl fmt::Debug for Ip {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Ip").field(&self.caps.name).finish()
    }
}

impl Ip {
    /// Puts `place`, which was claimed for `settings`, on `inner`. Takes a tenth of a second, to
    /// hear whether another host has the address.
    ///
    /// # Errors
    /// [`OpenError`]: another host has the address, `inner` carries too little, or has gone.
    pub fn open(
        settings: &IpSettings,
        place: Place,
        inner: Box<dyn Port>,
    ) -> Result<Self, OpenError> {
        let mut port = Self::unsettled(settings, place, inner)?;
        port.settle(settings)?;
        tracing::debug!(port = %port.caps.name, mac = %port.own.0, mtu = port.caps.mtu, "opened");
        Ok(port)
    }

    /// As [`open`](Self::open), without asking anybody.
    fn unsettled(
        settings: &IpSettings,
        place: Place,
        inner: Box<dyn Port>,
    ) -> Result<Self, OpenError> {
        let below = inner.caps();
        let mtu = settings.mtu_over(below.mtu, headers_len(place.addr()))?;
        let (mac, addr) = (below.station.mac, place.addr());
        let echo_max = if place.is_kernels() { 0 } else { ETH_HDR_LEN + below.mtu };
        let net = Net::of(settings);
        let station = net.prefix.mac_of(addr).expect("a place has an address of the fabric");
        let (frame_max, headers_len) = (ETH_HDR_LEN + mtu, headers_len(addr));
        let waiting = inner.waiter().map(|below| {
            let has_slept = AtomicBool::new(false);
            Arc::new(Waiting { below, has_slept })
        });
        let caps = PortCaps {
            rto_floor_ns: below.rto_floor_ns,
            via_kernel: below.via_kernel,
            link_bps: below.link_bps,
            ..PortCaps::new(station, mtu, format!("{}:{}", settings.text(addr.port()), below.name))
        };
        Ok(Self {
            waiting,
            inner,
            frame_max,
            net,
            own: (mac, addr.ip()),
            headers_len,
            template: Headers::new(mac, addr, settings.ttl, tos_of(settings.dscp, settings.ecn)),
            sums: settings.sums || addr.is_ipv6(),
            neighbours: Neighbours::new(),
            answers: Budget::new(),
            echoes: Budget::new(),
            reports: Budget::new(),
            head: vec![0; headers_len + frame_max].into(),
            aimed: (NOWHERE, 0),
            ear: Ear::new(addr, station, frame_max, echo_max),
            hairpin: FrameQueue::new(OWN_FRAMES, frame_max),
            counters: PortCounters::default(),
            unresolved: 0,
            polls: 0,
            looked_ns: 0,
            told_ns: 0,
            told: Told::default(),
            told_far: false,
            caps,
            place,
        })
    }

    /// Asks whether somebody has the address; if not, tells everybody that it is ours. Where the
    /// kernel has it too, it has asked, and would answer us by its other interfaces.
    fn settle(&mut self, settings: &IpSettings) -> Result<(), OpenError> {
        let gone =
            |gone: PortGone| settings.refuse(libc::ENODEV, gone.why().to_owned(), "open it again");
        let probe = Packet::probe(self.own.0, self.own.1);
        let (probes, waiter) =
            (if self.place.is_kernels() { 0 } else { PROBES }, self.inner.waiter());
        // Questions for the address have to be heard before it is asked for (RFC 4862).
        let joins = Packet::report(self.own.0, self.own.1, true).filter(|_| self.ear.is_alone());
        for _ in 0..probes {
            if let Some(joins) = &joins {
                self.send_packet(joins).map_err(gone)?;
            }
            self.send_packet(&probe).map_err(gone)?;
            let until = now_ns() + PROBE_NS;
            while now_ns() < until {
                let heard = self.listen(&mut |_: &RxFrame<'_>| {}).map_err(gone)?;
                if let Some(mac) = heard {
                    let why = format!("{} has the address {}", mac, self.own.1);
                    let mend = "choose one that is free, or end what has it";
                    return Err(settings.refuse(libc::EADDRINUSE, why, mend));
                }
                let nap = Duration::from_millis(1);
                waiter.as_ref().map_or_else(|| std::thread::sleep(nap), |waiter| waiter.wait(nap));
            }
        }
        self.send_packet(&Packet::announcement(self.own)).map_err(gone)
    }

    /// Takes a burst, and says who else has our address, if somebody says so.
    fn listen(&mut self, sink: &mut dyn RxSink) -> Result<Option<MacAddr>, PortGone> {
        self.inner.rx_burst(NOTICES, &mut Taker { ear: &mut self.ear, sink })?;
        let own = self.own;
        let other = self.ear.notices().iter().find(|n| n.sender.1 == own.1 && n.sender.0 != own.0);
        let other = other.map(|notice| notice.sender.0);
        self.hear(true)?;
        Ok(other)
    }

    /// Datagrams that were not passed on, by cause.
    pub fn drops(&self) -> IpDrops {
        IpDrops { unresolved: self.unresolved, ..self.ear.drops }
    }

    /// Sends a packet at once. One that finds no room is lost.
    #[cold]
    fn send_packet(&mut self, frame: &Packet) -> Result<(), PortGone> {
        self.inner.tx(&TxFrame::whole(frame))?;
        self.inner.flush()
    }

    /// Learns from what was heard about neighbours, and answers. While the address is `tentative`,
    /// only who probes for the same one is answered: it is not known to be ours.
    #[cold]
    fn hear(&mut self, tentative: bool) -> Result<(), PortGone> {
        let now = now_ns();
        self.hear_others(tentative, now)?;
        let (notices, count) = (self.ear.notices, self.ear.count);
        self.ear.count = 0;
        self.aimed.0 = NOWHERE;
        for notice in &notices[..count] {
            let (mac, ip) = notice.sender;
            let is_to_us = notice.target == self.own.1;
            let asks_us = notice.is_question && is_to_us;
            if ip == self.own.1 {
                if mac != self.own.0 {
                    self.tell_double(mac, now);
                }
            } else if let Some(host) = self.net.hop_at(ip)
                // One that does not override confirms what is known (RFC 4861, 7.2.5).
                && (notice.overrides || self.neighbours.known(host).is_none_or(|is| is == mac))
                && let Learned::Moved(was) = self.neighbours.learn(host, mac, now, asks_us)
                && self.told.one_more(now)
            {
                let port = &self.caps.name;
                tracing::info!(%port, "{ip} is at {mac} now, and was at {was}");
            }
            let answers = asks_us && (!tentative || ip.is_unspecified());
            if answers && mac != self.own.0 && self.answers.take(now) {
                self.send_packet(&Packet::answer(self.own, notice.sender))?;
            }
        }
        Ok(())
    }

    /// Answers hosts that ask whether the address is in use, and routers that ask for groups.
    fn hear_others(&mut self, tentative: bool, now: u64) -> Result<(), PortGone> {
        let (asks, len) = (self.ear.asks_members, self.ear.echo_len);
        (self.ear.asks_members, self.ear.echo_len) = (false, 0);
        if asks
            && self.reports.take(now)
            && let Some(report) = Packet::report(self.own.0, self.own.1, false)
        {
            self.send_packet(&report)?;
        }
        let echo = &mut self.ear.echo[..len];
        if !tentative
            && len > 0
            && self.echoes.take(now)
            && let Some(answer) = echo::answer(echo, self.own)
        {
            self.inner.tx(&TxFrame::whole(answer))?;
            self.inner.flush()?;
        }
        Ok(())
    }

    fn tell_double(&mut self, mac: MacAddr, now: u64) {
        if self.told_ns == 0 || now.saturating_sub(self.told_ns) >= TELL_NS {
            self.told_ns = now;
            let port = &self.caps.name;
            tracing::warn!(
                %port,
                "{mac} has the address {} as well, and receives our frames: stop it there, or \
                 choose another address here", self.own.1
            );
        }
    }

    /// Asks for neighbours if it is time to.
    #[cold]
    fn look(&mut self) -> Result<(), PortGone> {
        let now = now_ns();
        if now.saturating_sub(self.looked_ns) < LOOK_NS {
            return Ok(());
        }
        self.looked_ns = now;
        self.aimed.0 = NOWHERE;
        let Self { neighbours, inner, own, caps, net, told, .. } = self;
        let mut done = Ok(());
        neighbours.turn(now, |due| match due {
            Due::Ask((host, of)) if done.is_ok() => {
                let question = Packet::question(*own, net.ip_of(host), of);
                let asked = inner.tx(&TxFrame::whole(&question));
                done = asked.map(drop);
            }
            Due::Ask(_) => {}
            Due::Silent(_) if !told.one_more(now) => {}
            Due::Silent(host) => tracing::warn!(
                port = %caps.name,
                "{} does not answer, frames through it are lost: is it up, and on this segment?",
                net.ip_of(host)
            ),
        });
        done?;
        self.inner.flush()
    }

    /// The next hop of a frame to `to` has no known address: asks for it. The frame is lost.
    #[cold]
    fn unresolved(&mut self, hop: Host) -> Result<Tx, PortGone> {
        self.aimed.0 = NOWHERE;
        self.unresolved += 1;
        self.counters.tx_dropped += 1;
        if let Some((host, of)) = self.neighbours.want(hop, now_ns()) {
            self.send_packet(&Packet::question(self.own, self.net.ip_of(host), of))?;
        }
        Ok(Tx::Sent)
    }

    /// A frame goes to nobody whom this port reaches.
    #[cold]
    fn no_route(&mut self, to: Option<SocketAddrV4>) -> Tx {
        self.counters.tx_no_route += 1;
        if let (Some(to), false) = (to, self.told_far) {
            self.told_far = true;
            let (port, to) = (&self.caps.name, self.net.prefix.place(to));
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

    /// Has the headers lead to where `frame` goes; if it is not to be sent, what became of it.
    #[inline(never)]
    fn aim(&mut self, frame: &TxFrame<'_>) -> Result<Option<Tx>, PortGone> {
        let mac = frame.dst().mac;
        let Some(to) = addr_of(mac) else {
            if mac.is_group() {
                // Nobody keeps a list of the others.
                self.counters.tx_dropped += 1;
                return Ok(Some(Tx::Sent));
            }
            return Ok(Some(self.no_route(None)));
        };
        if mac == self.caps.station.mac {
            return Ok(Some(self.hairpin.tx(frame, &mut self.counters)));
        }
        let hop = self.net.hop(*to.ip()).filter(|_| !self.net.is_own(*to.ip()));
        let Some(hop) = hop else { return Ok(Some(self.no_route(Some(to)))) };
        let Some(hop) = self.neighbours.find(hop) else { return self.unresolved(hop).map(Some) };
        let sum = self.template.aim(&mut self.head[..self.headers_len], hop, to);
        self.aimed = (mac.frame_word(), sum);
        Ok(None)
    }

    /// Sends a frame whose datagram has a sum, as all of IPv6 have, which takes a copy.
    fn tx_with_sum(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let (head, rest) = self.head.split_at_mut(self.headers_len);
        let len = frame.copy_to(rest);
        self.template.measure(head, self.aimed.1, len);
        self.template.write_sum(head, &rest[..len]);
        let sent = self.inner.tx(&TxFrame::whole(&self.head[..self.headers_len + len]));
        sent.map(|sent| self.counters.tried(sent, len))
    }
}

/// Lines of the log about other hosts.
#[derive(Default)]
struct Told {
    since_ns: u64,
    count: u32,
}

impl Told {
    /// Whether there may be one more.
    fn one_more(&mut self, now: u64) -> bool {
        if self.count == 0 || now.saturating_sub(self.since_ns) >= TELL_NS {
            (self.since_ns, self.count) = (now, 0);
        }
        self.count = self.count.saturating_add(1);
        self.count <= TOLD_MAX
    }
}

/// The destination of a frame with this head, as [`MacAddr::frame_word`] has it.
#[inline]
fn mac_word(head: &[u8]) -> u64 {
    let head: &[u8; ETH_HDR_LEN] = head.first_chunk().expect("a whole Ethernet header");
    u64::from_le_bytes(*head.first_chunk().expect("less than that")) & MAC_WORD
}

/// What tells datagrams to us from everything else that comes.
struct Ear {
    place: SocketAddr,
    headers_len: usize,
    /// As [`MacAddr::frame_word`] has it.
    station: u64,
    frame_max: usize,
    counters: PortCounters,
    drops: IpDrops,
    lent: usize,
    train: Train,
    notices: [Notice; NOTICES],
    count: usize,
    /// The first echo request of a burst, which begins there; no bytes where a kernel answers.
    echo: Box<[u8]>,
    echo_len: usize,
    /// Somebody asked which groups are heard.
    asks_members: bool,
}

impl Ear {
    fn new(place: SocketAddr, station: MacAddr, frame_max: usize, echo_max: usize) -> Self {
        let nobody = (MacAddr::default(), Ipv4Addr::UNSPECIFIED.into());
        let none =
            Notice { is_question: false, sender: nobody, target: nobody.1, overrides: false };
        Self {
            place,
            headers_len: headers_len(place),
            station: station.frame_word(),
            frame_max,
            counters: PortCounters::default(),
            drops: IpDrops::default(),
            lent: 0,
            train: Train::new(),
            notices: [none; NOTICES],
            count: 0,
            echo: vec![0; echo_max].into(),
            echo_len: 0,
            asks_members: false,
        }
    }

    /// Whether no kernel has the address as well.
    fn is_alone(&self) -> bool {
        !self.echo.is_empty()
    }

    /// Whether something was kept to be heard.
    #[inline]
    fn has_heard(&self) -> bool {
        self.count > 0 || self.echo_len > 0 || self.asks_members
    }

    fn notices(&self) -> &[Notice] {
        &self.notices[..self.count]
    }

    /// The frame of ours that `frame` holds, marked if its datagram is.
    #[inline]
    fn check<'a>(&mut self, frame: &RxFrame<'a>) -> Option<RxFrame<'a>> {
        let Seen { from, inside, marked } = match look(frame, &self.place) {
            Ok(seen) => seen,
            Err(why) => {
                self.refused(why, frame);
                return None;
            }
        };
        // Two words that overlap: of the first only the destination counts.
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

    /// Keeps the payload of a datagram, more than a frame has, if it is a train.
    #[cold]
    fn take_train(&mut self, payload: &RxFrame<'_>) {
        if !self.train.take(payload, self.frame_max) {
            self.drop_frame();
        }
    }

    /// Lends frames of the train, until `max` have been lent.
    #[cold]
    fn lend_train(&mut self, max: usize, sink: &mut dyn RxSink) {
        while self.lent < max
            && let Some(frame) = self.train.next()
        {
            self.lent += 1;
            self.counters.received(frame.len());
            sink.frame(&frame);
        }
    }

    #[cold]
    fn refused(&mut self, why: Refused, frame: &RxFrame<'_>) {
        let count = match why {
            Refused::Foreign => return self.other(frame),
            Refused::Options => &mut self.drops.options,
            Refused::Fragment => &mut self.drops.fragments,
            Refused::Sum => &mut self.drops.sums,
            Refused::Length => &mut self.drops.lengths,
            Refused::Outside => &mut self.drops.frames,
        };
        *count += 1;
        self.counters.rx_dropped += 1;
    }

    /// Keeps what is about neighbours, if there is room, and where no kernel has the address what
    /// it would answer; nothing else is ours.
    #[cold]
    fn other(&mut self, frame: &RxFrame<'_>) {
        if self.is_alone() {
            self.keep_question(frame);
        }
        if self.count == NOTICES {
            return;
        }
        if let Some(notice) = Notice::parse(frame, self.place) {
            self.notices[self.count] = notice;
            self.count += 1;
        }
    }
}

impl Ear {
    fn keep_question(&mut self, frame: &RxFrame<'_>) {
        let ip = self.place.ip();
        let len = frame.len();
        if let IpAddr::V6(ip) = ip {
            self.asks_members |= mld::is_query(frame, ip);
        }
        if self.echo_len == 0 && len <= self.echo.len() && echo::may_be_question(frame, ip) {
            let is_copied = frame.copy_to(0, &mut self.echo[..len]);
            self.echo_len = if is_copied { len } else { 0 };
        }
    }
}

/// Lends the frames inside of datagrams.
struct Taker<'a> {
    ear: &'a mut Ear,
    sink: &'a mut dyn RxSink,
}

impl RxSink for Taker<'_> {
    #[inline]
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        // Whatever it is: what is fetched is not believed.
        let at = self.ear.headers_len;
        let Some(len) = frame.len().checked_sub(at) else { return };
        if let Some(inside) = frame.part(at, len) {
            self.sink.prefetch(&inside);
        }
    }

    fn frame(&mut self, frame: &RxFrame<'_>) {
        let Some(inside) = self.ear.check(frame) else { return };
        if inside.len() > self.ear.frame_max {
            return self.ear.take_train(&inside);
        }
        self.ear.lent += 1;
        self.ear.counters.received(inside.len());
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
        if mac_word(frame.head) != self.aimed.0
            && let Some(done) = self.aim(frame)?
        {
            return Ok(done);
        }
        if self.sums {
            return self.tx_with_sum(frame);
        }
        // Without a sum it is IPv4.
        let head = &mut self.head[..HEADERS_LEN + frame.head.len()];
        datagram::measure(as_long(head), self.aimed.1, len);
        copy_to_start(frame.head, &mut head[HEADERS_LEN..]);
        let sent = self.inner.tx(&TxFrame { head, ..*frame });
        sent.map(|sent| self.counters.tried(sent, len))
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        self.inner.flush()
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        self.polls = self.polls.wrapping_add(1);
        let has_slept = self.waiting.as_ref().is_some_and(|waiting| waiting.has_slept());
        if has_slept || self.polls.is_multiple_of(LOOK_EVERY) || self.neighbours.is_asking() {
            self.look()?;
        }
        self.ear.lent = 0;
        for _ in 0..BURSTS {
            if !self.ear.train.is_empty() {
                self.ear.lend_train(max, sink);
                break;
            }
            // One train at a time.
            let has_trains = self.ear.train.may_come();
            let left = if has_trains { 1.min(max) } else { max };
            let got = self.inner.rx_burst(left, &mut Taker { ear: &mut self.ear, sink })?;
            if got > 0 {
                self.ear.train.note_burst();
            }
            if self.ear.has_heard() {
                self.hear(false)?;
            }
            let has_lent = self.ear.lent > 0 && self.ear.train.is_empty();
            if got == 0 || has_lent && !has_trains || self.ear.lent >= max {
                break;
            }
        }
        let mut count = self.ear.lent;
        if !self.hairpin.is_empty() {
            count += self.hairpin.rx_burst(max - count, sink, &mut self.counters);
        }
        Ok(count)
    }

    /// Frames of ours; drops are those of the port below besides.
    fn counters(&self) -> PortCounters {
        let below = self.inner.counters();
        let all = self.counters + self.ear.counters;
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
        let waiting = self.waiting.as_ref()?;
        Some(Arc::clone(waiting) as Arc<dyn PortWaiter>)
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        if !self.hairpin.is_empty() || !self.ear.train.is_empty() {
            return Some(now_ns());
        }
        let asks = self.neighbours.is_asking().then(|| self.looked_ns + LOOK_NS);
        asks.into_iter().chain(self.inner.next_deadline_ns()).min()
    }
}

/// Sleeps on the port below. Who sleeps polls seldom, and looks at the clock with each poll.
struct Waiting {
    below: Arc<dyn PortWaiter>,
    /// Somebody has since the last poll.
    has_slept: AtomicBool,
}

impl Waiting {
    /// Whether somebody has slept since this was asked last. A load, if not.
    #[inline]
    fn has_slept(&self) -> bool {
        self.has_slept.load(Relaxed) && self.has_slept.swap(false, Relaxed)
    }
}

impl PortWaiter for Waiting {
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
