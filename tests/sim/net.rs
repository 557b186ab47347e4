//! Virtual time and the segment between the stations: what was sent, when it arrives, if it does.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};

use barewire_dataplane::node::FrameSink;
use barewire_dataplane::psn::Psn;
use barewire_dataplane::wire::{
    self, BASE_LEN, Base, Op, OpenOp, RstOp, RstReason, Ty, VERSION, VERSIONS, sealed,
};
use barewire_driver::backend::any_board::AnyBoard;
use barewire_driver::board::Board;
use barewire_driver::frame::{ETH_HDR_LEN, RxFrame, TxFrame};
use barewire_driver::port::{MacAddr, Presence, Station, Tx};

use crate::board::{SimBoard, Slots};
use crate::plan::LinkPlan;
use crate::rng::{Rng, mix};
use crate::switches::Switches;
use crate::tcp::Tcp;

/// Preamble, start delimiter, frame check sequence and gap of a frame on a cable, bytes.
pub(crate) const ETH_GAP: u64 = 24;

/// How long a frame is on its way through memory.
const NEAR_NS: u64 = 200;

/// Between two looks of a switch at its rings, where one did not find anything.
const SWITCH_NS: u64 = 1_000;

/// Looks of a host at the ring from its switch in one poll.
const LOOKS: u32 = 4;

/// What can happen at a moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Event {
    /// Frame number `frame` of the pool reaches the station that had life `life` when it was sent.
    Arrive { to: usize, life: u32, frame: u32 },
    /// The frame reaches the port of the fabric's switch towards that station.
    Cross { to: usize, life: u32, frame: u32 },
    /// A poll turn; void unless `stamp` is the host's newest.
    Poll { host: usize, stamp: u32 },
    /// The application looks at the world; void unless it is still `life`.
    App { host: usize, life: u32 },
    /// A process starts at a station whose last one crashed.
    Restart { host: usize },
    /// A frame held back to be swapped with its successor that never came.
    Release { path: usize },
    /// The switch of a node looks for frames.
    Turn { node: usize },
    /// The next switch of a node starts.
    Switch { node: usize },
    /// A segment of TCP connection `n` was acknowledged, or is known to be lost.
    Tcp { n: usize, lost: bool },
}

/// One thing done to one frame, counted from the first of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Script {
    pub(crate) frame: u64,
    pub(crate) act: Act,
}

/// What a [`Script`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    Drop,
    Duplicate,
    /// Arrives right after the next frame of the same path.
    Swap,
    /// Bit `bit` counted from the end of the Ethernet header.
    Flip {
        bit: usize,
    },
}

/// Counts of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NetStats {
    pub(crate) events: u64,
    pub(crate) frames: u64,
    pub(crate) bytes: u64,
    /// Those of them that left a node.
    pub(crate) far_bytes: u64,
    pub(crate) dropped: u64,
    /// Those of them that found no room in a port of the fabric's switch.
    pub(crate) overflowed: u64,
    pub(crate) duplicated: u64,
    pub(crate) corrupted: u64,
    pub(crate) full: u64,
    pub(crate) marked: u64,
    /// Frames that somebody else made: of one through memory, and without the key.
    pub(crate) spoofed: u64,
    pub(crate) forged: u64,
    /// How long frames waited for a transmitter, all together.
    pub(crate) queued_ns: u64,
}

struct Place {
    /// The life that is there now, 0 if none.
    life: u32,
    /// When its transmitter is free again.
    tx_free: u64,
    /// The same of the port of the fabric's switch towards it.
    port_free: u64,
    /// Frames on their way to it and in its ring.
    queued: usize,
    /// Those of them that go through memory.
    near: usize,
    /// It is in no segment with other processes of its node.
    outside: bool,
}

#[derive(Clone, Default)]
struct Path {
    cut: bool,
    down_until: u64,
    clog_until: u64,
    last_arrival: u64,
    held: Option<(u32, u32)>,
    /// Bytes behind the Ethernet header that pass; longer frames are dropped.
    limit: Option<usize>,
}

/// The segment and the clock.
pub(crate) struct Net {
    pub(crate) now: u64,
    pub(crate) stats: NetStats,
    /// Hash of everything that was sent, when and by whom.
    pub(crate) trace: u64,
    pub(crate) script: Option<Script>,
    /// Copies of all frames, if somebody wants them.
    pub(crate) tap: Option<Vec<Vec<u8>>>,
    /// Events that are more than any sane run has.
    pub(crate) events_max: u64,
    queue: BinaryHeap<Reverse<(u64, u64, Event)>>,
    pushed: u64,
    pool: Vec<Vec<u8>>,
    /// Whether a frame of the pool goes through memory.
    near: Vec<bool>,
    /// Whether it met a long queue.
    marked: Vec<bool>,
    free: Vec<u32>,
    rng: Rng,
    pub(crate) link: LinkPlan,
    stations: Vec<Place>,
    paths: Vec<Path>,
    slots: Slots,
    /// Those between hosts and the wire, if there are.
    pub(crate) switches: Option<Switches>,
    /// Connections of others through ports of the fabric's switch.
    pub(crate) tcps: Vec<Tcp>,
    /// Whether each session is near, by incarnation and epoch of who made it.
    paths_of: HashMap<(u64, u32), bool>,
    /// Print every frame and completion.
    pub(crate) print: bool,
}

impl Net {
    pub(crate) fn new(seed: u64, hosts: usize, link: LinkPlan) -> Self {
        let place =
            |_| Place { life: 0, tx_free: 0, port_free: 0, queued: 0, near: 0, outside: false };
        let stations = (0..hosts).map(place).collect();
        let switches = link.switched.then(|| Switches::new(hosts, &link));
        Self {
            now: 1_000_000,
            stats: NetStats::default(),
            trace: seed,
            script: None,
            tap: None,
            events_max: 100_000_000,
            queue: BinaryHeap::new(),
            pushed: 0,
            pool: Vec::new(),
            near: Vec::new(),
            marked: Vec::new(),
            free: Vec::new(),
            rng: Rng::new(seed, 2),
            link,
            stations,
            // Those through memory stand behind the others.
            paths: vec![Path::default(); 2 * hosts * hosts],
            slots: Slots::default(),
            switches,
            tcps: Vec::new(),
            paths_of: HashMap::new(),
            print: std::env::var_os("SIM_TRACE").is_some(),
        }
    }

    /// The station that a host is: two of them share a MAC.
    pub(crate) fn station(host: usize) -> Station {
        let [a, b] = (host as u16 / 2).to_be_bytes();
        Station { number: host as u16 % 2, ..Station::at([2, 0, 0, 0, a, b]) }
    }

    /// The host that is a station.
    pub(crate) fn host(station: Station) -> usize {
        Self::host_if_any(station).unwrap_or_else(|| panic!("{station} is nobody"))
    }

    fn host_if_any(station: Station) -> Option<usize> {
        let MacAddr([first @ .., a, b]) = station.mac;
        let host = usize::from(u16::from_be_bytes([a, b])) * 2 + usize::from(station.number);
        (first == [2, 0, 0, 0] && station.number < 2).then_some(host)
    }

    pub(crate) fn set_life(&mut self, host: usize, life: u32) {
        self.stations[host].life = life;
        if life == 0 && self.switches.is_none() {
            self.stations[host].tx_free = self.now;
        }
        self.stations[host].outside = false;
        if let Some(switches) = &mut self.switches {
            switches.set_host(host, (life != 0).then(|| Self::station(host)));
        }
    }

    /// The process at `host` is in no segment with others any more.
    pub(crate) fn leave_segment(&mut self, host: usize) {
        self.stations[host].outside = true;
    }

    /// The switch of `node` ends, with the frames that it and its NIC hold.
    pub(crate) fn end_switch(&mut self, node: usize) {
        if let Some(switches) = &mut self.switches {
            switches.end(node);
        }
    }

    /// The next switch of `node` starts, if none runs.
    pub(crate) fn start_switch(&mut self, node: usize) {
        if let Some(switches) = &mut self.switches {
            switches.start(node);
            self.wake(node);
        }
    }

    /// The switch of `node` has something to do.
    fn wake(&mut self, node: usize) {
        if self.switches.as_mut().is_some_and(|switches| switches.wake(node)) {
            let at = self.now + self.rng.below(SWITCH_NS);
            self.at(at, Event::Turn { node });
        }
    }

    /// The switch of `node` looks for frames. Whether its hosts may have got any.
    pub(crate) fn turn(&mut self, node: usize) -> bool {
        let Some(mut switches) = self.switches.take() else { return false };
        let (moved, again) = switches.turn(node);
        // The transmitter of a node's NIC is that of its first host.
        while !self.has_backlog(node)
            && let Some(bytes) = switches.next_out(node)
        {
            let frame = RxFrame::new(&bytes);
            let raw = Base::parse_raw(&frame).expect("a switch forwards frames of the fabric");
            let [from, to] = [raw.src, raw.dst].map(Self::host);
            let (frame, len) = (self.alloc(), bytes.len());
            self.pool[frame as usize] = bytes;
            self.carry(from, to, frame, len);
        }
        let again = again || self.has_backlog(node) && switches.wake(node);
        self.switches = Some(switches);
        if again {
            self.at(self.now + SWITCH_NS, Event::Turn { node });
        }
        moved
    }

    /// What the switch has for `host` goes to `rx`: as much as makes `max` there. Whether there may
    /// be more.
    pub(crate) fn take_switched(
        &mut self,
        host: usize,
        rx: &mut VecDeque<u32>,
        max: usize,
    ) -> bool {
        let Some(mut switches) = self.switches.take() else { return false };
        for _ in 0..LOOKS {
            let room = max.saturating_sub(rx.len());
            let got = switches.receive(host, room, |bytes| {
                let frame = self.alloc();
                self.pool[frame as usize].extend_from_slice(bytes);
                self.stations[host].queued += 1;
                rx.push_back(frame);
            });
            if got > 0 {
                break;
            }
        }
        self.switches = Some(switches);
        rx.len() >= max
    }

    pub(crate) fn at(&mut self, time: u64, event: Event) {
        self.pushed += 1;
        self.queue.push(Reverse((time.max(self.now), self.pushed, event)));
    }

    /// Advances time to the next event.
    pub(crate) fn pop(&mut self) -> Option<Event> {
        let Reverse((time, _, event)) = self.queue.pop()?;
        debug_assert!(time >= self.now);
        self.now = time;
        self.stats.events += 1;
        assert!(self.stats.events < self.events_max, "{} events: a storm", self.events_max);
        Some(event)
    }

    /// When the next event is.
    pub(crate) fn next_at(&self) -> Option<u64> {
        self.queue.peek().map(|Reverse((t, _, _))| *t)
    }

    pub(crate) fn frame(&self, frame: u32) -> &[u8] {
        &self.pool[frame as usize]
    }

    /// Whether a frame came through memory.
    pub(crate) fn is_near_frame(&self, frame: u32) -> bool {
        self.near[frame as usize]
    }

    /// Whether a frame met a long queue.
    pub(crate) fn is_marked_frame(&self, frame: u32) -> bool {
        self.marked[frame as usize]
    }

    /// Whether frames between the two go through memory now. A forged frame may come from a station
    /// that is nobody's.
    fn is_near(&self, from: usize, to: usize) -> bool {
        let is_here = |host: usize| self.stations.get(host).is_some_and(|s| !s.outside);
        let lives = self.stations.get(to).is_some_and(|station| station.life != 0);
        lives && self.link.is_near(from, to) && is_here(from) && is_here(to)
    }

    /// A frame has left the receive ring of `host`.
    pub(crate) fn consumed(&mut self, host: usize, frame: u32) {
        self.stations[host].queued -= 1;
        self.stations[host].near -= usize::from(self.near[frame as usize]);
        self.free.push(frame);
    }

    /// Whether an arriving frame finds the life it was sent to and room; frees it if not.
    pub(crate) fn accept(&mut self, to: usize, life: u32, frame: u32, ring: usize) -> bool {
        let here = self.stations[to].life;
        let lossless = self.link.lossless || self.is_near_frame(frame);
        let left = self.is_near_frame(frame) && self.stations[to].outside;
        let gone = here == 0 || (lossless && here != life) || left;
        if !self.is_near_frame(frame)
            && let Some(switches) = &mut self.switches
        {
            let node = switches.node_of(to);
            let taken = switches.arrive(node, &self.pool[frame as usize]);
            self.stats.dropped += u64::from(!taken);
            self.consumed(to, frame);
            self.wake(node);
            return false;
        }
        if gone || (!lossless && ring >= self.link.rx_ring) {
            self.stats.dropped += 1;
            self.consumed(to, frame);
            return false;
        }
        true
    }

    /// The held frame of `path` comes after all, alone.
    pub(crate) fn release(&mut self, path: usize) {
        if let Some((frame, life)) = self.paths[path].held.take() {
            let to = path % self.stations.len();
            self.at(self.now, Event::Arrive { to, life, frame });
        }
    }

    pub(crate) fn cut(&mut self, from: usize, to: usize) {
        let p = self.path(from, to);
        self.paths[p].cut = true;
    }

    pub(crate) fn is_cut(&self, from: usize, to: usize) -> bool {
        self.paths[self.path(from, to)].cut
    }

    /// From now on frames of more than `len` bytes behind the Ethernet header do not get from
    /// `from` to `to`, as if a switch between them carried less than both ends.
    pub(crate) fn narrow(&mut self, from: usize, to: usize, len: usize) {
        let p = self.path(from, to);
        self.paths[p].limit = Some(len);
    }

    pub(crate) fn flap(&mut self, a: usize, b: usize, ns: u64) {
        for p in [self.path(a, b), self.path(b, a)] {
            self.paths[p].down_until = self.now + ns;
        }
    }

    pub(crate) fn clog(&mut self, from: usize, to: usize, ns: u64) {
        let p = self.path(from, to);
        self.paths[p].clog_until = self.now + ns;
    }

    /// Ends every fault but the cuts, which are for ever.
    pub(crate) fn heal(&mut self) {
        let l = &mut self.link;
        (l.loss, l.dup, l.jitter_ns, l.spike, l.corrupt, l.full) = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0);
        (l.spoofs, l.forges) = (0.0, l.forges.map(|_| 0.0));
        for p in &mut self.paths {
            (p.down_until, p.clog_until) = (0, 0);
        }
    }

    /// Whether no frame that cannot get lost is on its way or in a ring.
    pub(crate) fn is_empty(&self) -> bool {
        (0..self.stations.len()).all(|host| self.kept(host) == 0)
    }

    /// Frames that cannot get lost, on their way to `host` and in its ring.
    fn kept(&self, host: usize) -> usize {
        let place = &self.stations[host];
        if self.link.lossless { place.queued } else { place.near }
    }

    /// Puts bytes on the segment that no node sent.
    pub(crate) fn inject(&mut self, to: usize, bytes: &[u8]) {
        let frame = self.alloc();
        self.pool[frame as usize].extend_from_slice(bytes);
        self.stations[to].queued += 1;
        let life = self.stations[to].life;
        self.at(self.now, Event::Arrive { to, life, frame });
    }

    fn path(&self, from: usize, to: usize) -> usize {
        from * self.stations.len() + to
    }

    fn alloc(&mut self) -> u32 {
        let frame = self.free.pop().unwrap_or_else(|| {
            self.pool.push(Vec::new());
            self.near.push(false);
            self.marked.push(false);
            (self.pool.len() - 1) as u32
        });
        self.pool[frame as usize].clear();
        self.near[frame as usize] = false;
        self.marked[frame as usize] = false;
        frame
    }

    /// What `Port::tx` of host `from` answers.
    fn transmit(&mut self, from: usize, tx: &TxFrame<'_>) -> Tx {
        let len = tx.len();
        let here = Self::host_if_any(tx.dst()).filter(|&to| to < self.stations.len());
        let Some(to) = here else {
            // A frame whose station was damaged, which shows by the tag of a session alone.
            assert!(self.link.forges.is_some(), "frame to nobody: {}", tx.dst());
            return Tx::Sent;
        };
        let near = self.is_near(from, to);
        let mtu = if near { self.link.near_mtu } else { self.link.mtu[from] };
        if len > ETH_HDR_LEN + mtu && self.link.is_near(from, to) {
            // Of a session with a process that has just gone: the NIC could not carry it.
            return Tx::NoRoute;
        }
        assert!(len <= ETH_HDR_LEN + mtu, "frame of {len} bytes is over the MTU");
        if self.no_room(from, to, near) || self.rng.chance(self.link.full) {
            self.stats.full += 1;
            return Tx::Full;
        }
        if self.link.lossless && self.stations[to].life == 0 {
            return Tx::NoRoute;
        }
        if !near && let Some(switches) = &mut self.switches {
            let node = switches.node_of(from);
            if switches.send(from, tx) == Tx::Full {
                self.stats.full += 1;
                return Tx::Full;
            }
            self.wake(node);
        }
        let frame = self.alloc();
        let mut bytes = std::mem::take(&mut self.pool[frame as usize]);
        bytes.resize(len, 0);
        tx.copy_to(&mut bytes);
        self.stats.frames += 1;
        self.stats.bytes += len as u64;
        self.stats.far_bytes += if near { 0 } else { len as u64 };
        self.trace = trace(self.trace, self.now, from, &bytes);
        if self.print {
            eprintln!("{:>12} {from} -> {to} {len:>5} {:02x?}", self.now, &bytes[14..len.min(64)]);
        }
        if let Some(tap) = &mut self.tap {
            tap.push(bytes.clone());
        }
        self.check_path(&bytes);
        self.pool[frame as usize] = bytes;
        self.near[frame as usize] = near;
        if near {
            self.carry_near(from, to, frame);
        } else if self.switches.is_some() {
            // It lies in the ring.
            self.free.push(frame);
        } else {
            self.carry(from, to, frame, len);
        }
        Tx::Sent
    }

    /// A session has one path from its beginning to its end.
    fn check_path(&mut self, bytes: &[u8]) {
        let frame = RxFrame::new(bytes);
        let open = Base::parse(&frame).ok().filter(|base| base.ty == Ty::Open);
        let open = open.and_then(|base| OpenOp::parse(&frame, &base).ok());
        let Some(open) = open.filter(|open| !open.is_challenge()) else { return };
        let was = *self.paths_of.entry((open.inc, open.epoch)).or_insert(open.is_near());
        assert!(was == open.is_near(), "a session goes on on another path: {open:?}");
    }

    /// Carries a frame through memory: at once, in order, and whole.
    fn carry_near(&mut self, from: usize, to: usize, frame: u32) {
        if self.rng.chance(self.link.spoofs) {
            self.spoof(to, frame);
        }
        let p = self.path(from, to) + self.stations.len() * self.stations.len();
        let at = (self.now + NEAR_NS).max(self.paths[p].last_arrival);
        self.paths[p].last_arrival = at;
        self.stations[to].queued += 1;
        self.stations[to].near += 1;
        self.arrive_at(at, to, frame);
    }

    /// A stranger sends a copy of a near frame by the wire, with another last byte, and is faster.
    fn spoof(&mut self, to: usize, frame: u32) {
        self.stats.spoofed += 1;
        let copy = self.alloc();
        let bytes = self.pool[frame as usize].clone();
        let spoofed = &mut self.pool[copy as usize];
        spoofed.extend_from_slice(&bytes);
        if let Some(last) = spoofed.last_mut() {
            *last ^= 0x55;
        }
        self.stations[to].queued += 1;
        self.arrive_at(self.now, to, copy);
    }

    fn no_room(&self, from: usize, to: usize, near: bool) -> bool {
        if self.link.lossless || near {
            return self.stations[to].queued >= self.link.rx_ring;
        }
        // QueryPort a switch the ring is asked, when it is tried.
        self.switches.is_none() && self.has_backlog(from)
    }

    /// Whether the transmit ring of `from` is full.
    fn has_backlog(&self, from: usize) -> bool {
        let backlog_ns = self.stations[from].tx_free.saturating_sub(self.now);
        let frame_ns = (self.link.mtu[from] as u64 + ETH_GAP) * 8_000_000_000 / self.link.bps;
        backlog_ns > frame_ns * self.link.tx_ring as u64
    }

    /// Somebody without the key has seen a frame from `from` to `to`, makes another one of it, and
    /// is faster: bytes that differ, a packet that is not sealed, or a reset of the session.
    fn forge(&mut self, from: usize, to: usize, frame: u32) {
        let mut bytes = self.pool[frame as usize].clone();
        let Some(raw) = Base::parse_raw(&RxFrame::new(&bytes)) else { return };
        let mut victim = to;
        match self.rng.index(4) {
            0 => {
                // Not the addresses: answers go to somebody.
                let at = self.rng.index(bytes.len());
                let is_address = at < 14 || (32..36).contains(&at);
                bytes[if is_address { 20 } else { at }] ^= self.rng.range(1, 255) as u8;
            }
            1 => bytes.truncate(self.rng.index(bytes.len())),
            2 if raw.dst_sid != 0 => {
                let ty = self.rng.pick(&[Ty::Nop, Ty::Ping, Ty::Ack, Ty::Nack]);
                bytes.truncate(BASE_LEN + ty.op_len());
                bytes.resize(BASE_LEN + ty.op_len() + 4, 0);
                bytes[BASE_LEN..].fill(0);
                (bytes[14], bytes[15]) = (VERSION << 5 | ty as u8, 0);
                sealed::set_counter(&mut bytes, 0);
                sealed::set_plen(&mut bytes, 0);
                sealed::put_crc(&mut bytes, BASE_LEN + ty.op_len());
            }
            _ => {
                victim = from;
                let reason = self.rng.pick(&[RstReason::UnknownSession, RstReason::OtherKey]);
                let (echo_sid, echo_psn) = (raw.dst_sid, raw.psn);
                let rst = RstOp {
                    echo_sid,
                    echo_psn,
                    life: 7,
                    victim_inc: 0,
                    victim_epoch: 0,
                    reason,
                    versions: VERSIONS,
                };
                let base = Base {
                    dst: raw.src,
                    src: raw.dst,
                    ty: Ty::Rst,
                    ar: false,
                    rtx: false,
                    ce: false,
                    crc: true,
                    dst_sid: 0,
                    psn: Psn(0),
                    cack: Psn(0),
                    grant: 0,
                    plen: 0,
                };
                bytes = wire::frame(&base, &Op::Rst(rst), &[]);
            }
        }
        self.stats.forged += 1;
        let forged = self.alloc();
        self.pool[forged as usize].extend_from_slice(&bytes);
        self.stations[victim].queued += 1;
        self.arrive_at(self.now, victim, forged);
    }

    /// Sends a frame through serialisation, latency and whatever is wrong with the path.
    fn carry(&mut self, from: usize, to: usize, frame: u32, len: usize) {
        if self.link.forges.is_some_and(|chance| chance > 0.0 && self.rng.chance(chance)) {
            self.forge(from, to, frame);
        }
        let wire_ns = (len.max(60) as u64 + ETH_GAP) * 8_000_000_000 / self.link.bps;
        let nic = self.switches.as_ref().map_or(from, |switches| switches.node_of(from));
        let start = self.stations[nic].tx_free.max(self.now);
        self.stations[nic].tx_free = start + wire_ns;
        self.stats.queued_ns += start - self.now;
        if self.link.mark_ns.is_some_and(|long| start - self.now > long) {
            self.stats.marked += 1;
            self.marked[frame as usize] = true;
        }
        let mut at = start + wire_ns + self.link.latency_ns;
        let p = self.path(from, to);
        let down = self.paths[p].cut || self.paths[p].down_until > self.now;
        let scripted = self.script.filter(|s| s.frame + 1 == self.stats.frames).map(|s| s.act);
        let most = self.paths[p].limit.unwrap_or(usize::MAX).min(self.link.mtu[to]);
        let long = len > ETH_HDR_LEN + most;
        let lost = self.rng.chance(self.link.loss) || scripted == Some(Act::Drop);
        self.stations[to].queued += 1;
        if down || lost || long {
            self.stats.dropped += 1;
            self.consumed(to, frame);
            return;
        }
        let copies = self.copies(scripted);
        for _ in 0..copies {
            let copy = self.alloc();
            let bytes = std::mem::take(&mut self.pool[frame as usize]);
            self.near[copy as usize] = self.near[frame as usize];
            self.marked[copy as usize] = self.marked[frame as usize];
            self.pool[copy as usize].extend_from_slice(&bytes);
            self.pool[frame as usize] = bytes;
            self.stations[to].queued += 1;
            self.stats.duplicated += 1;
            let late = self.link.dup_late && self.rng.chance(0.02);
            let mean = if late { 1e9 } else { 20_000.0 };
            let at = at + self.rng.exp(mean);
            self.arrive_at(at, to, copy);
        }
        self.damage(frame, scripted);
        if self.link.jitter_ns > 0.0 {
            at += self.rng.exp(self.link.jitter_ns);
        } else {
            at = at.max(self.paths[p].last_arrival);
        }
        if self.rng.chance(self.link.spike) {
            at += self.rng.below(self.link.spike_ns);
        }
        at = at.max(self.paths[p].clog_until);
        if self.link.jitter_ns == 0.0 && self.link.spike == 0.0 {
            self.paths[p].last_arrival = at;
        }
        let life = self.stations[to].life;
        if scripted == Some(Act::Swap) {
            self.paths[p].held = Some((frame, life));
            self.at(at + 1_000_000, Event::Release { path: p });
            return;
        }
        if self.link.port_bytes.is_some() {
            self.at(at, Event::Cross { to, life, frame });
        } else {
            self.arrive_at(at, to, frame);
        }
        if let Some((held, life)) = self.paths[p].held.take() {
            self.at(at, Event::Arrive { to, life, frame: held });
        }
    }

    /// A frame waits in the port of the fabric's switch towards `to`. It has its latency behind it.
    pub(crate) fn cross(&mut self, to: usize, life: u32, frame: u32) {
        let len = self.pool[frame as usize].len().max(60) as u64 + ETH_GAP;
        let Some((wait_ns, at)) = self.enter_port(to, len) else {
            self.stats.dropped += 1;
            self.stats.overflowed += 1;
            self.consumed(to, frame);
            return;
        };
        self.stats.queued_ns += wait_ns;
        if self.link.mark_ns.is_some_and(|long| wait_ns > long) {
            self.stats.marked += 1;
            self.marked[frame as usize] = true;
        }
        self.at(at, Event::Arrive { to, life, frame });
    }

    /// A frame of `len` bytes on the cable enters the port towards `to`. Returns how long it waits
    /// there and when it has left, `None` if there is no room for it.
    pub(crate) fn enter_port(&mut self, to: usize, len: u64) -> Option<(u64, u64)> {
        let (bps, wait_ns) = (self.link.bps, self.port_wait_ns(to));
        let waiting = u128::from(wait_ns) * u128::from(bps) / 8_000_000_000;
        if waiting as u64 + len > self.link.port_bytes.unwrap_or(u64::MAX) {
            return None;
        }
        let leaves_at = self.now + wait_ns + len * 8_000_000_000 / bps;
        self.stations[to].port_free = leaves_at;
        Some((wait_ns, leaves_at))
    }

    /// How long a frame waits that enters the port towards `to` now.
    pub(crate) fn port_wait_ns(&self, to: usize) -> u64 {
        self.stations[to].port_free.saturating_sub(self.now)
    }

    /// What `host` learns of the process that is `station` on a segment that tells.
    fn presence(&self, host: usize, station: Station) -> Presence {
        let of = (0..self.stations.len()).find(|&other| Self::station(other) == station);
        let is_there = |other: usize| {
            let apart = self.stations[other].outside || self.stations[host].outside;
            let near = self.link.is_near(host, other);
            if apart && near { 0 } else { self.stations[other].life }
        };
        match of.map(is_there) {
            None => Presence::Absent,
            // Something is still to be received, perhaps from there.
            Some(0) if self.kept(host) > 0 => Presence::Unknown,
            Some(0) => Presence::Absent,
            Some(_) => Presence::Present,
        }
    }

    fn arrive_at(&mut self, at: u64, to: usize, frame: u32) {
        let life = self.stations[to].life;
        self.at(at, Event::Arrive { to, life, frame });
    }

    fn copies(&mut self, scripted: Option<Act>) -> u64 {
        if scripted == Some(Act::Duplicate) {
            return 1;
        }
        if self.rng.chance(self.link.dup) { self.rng.range(1, 3) } else { 0 }
    }

    /// Flips bits behind the Ethernet addresses, as a switch or a bus could after the frame check
    /// sequence was verified.
    fn damage(&mut self, frame: u32, scripted: Option<Act>) {
        let bytes = &mut self.pool[frame as usize];
        if let Some(Act::Flip { bit }) = scripted {
            if let Some(b) = bytes.get_mut(ETH_HDR_LEN + bit / 8) {
                *b ^= 1 << (bit % 8);
                self.stats.corrupted += 1;
            }
            return;
        }
        if !self.rng.chance(self.link.corrupt) {
            return;
        }
        self.stats.corrupted += 1;
        for _ in 0..self.rng.range(1, 3) {
            let at = 12 + self.rng.index(bytes.len() - 12);
            bytes[at] ^= 1 << self.rng.below(8);
        }
    }
}

/// The transmitter of one host.
pub(crate) struct Egress<'a> {
    pub(crate) net: &'a mut Net,
    pub(crate) from: usize,
    /// Whether a frame was turned away for lack of room, and whether for lack of a receiver.
    pub(crate) full: bool,
    pub(crate) no_route: bool,
}

impl Egress<'_> {
    /// The same port, for as long as that is not used.
    pub(crate) fn again(&mut self) -> Egress<'_> {
        Egress { net: self.net, from: self.from, full: false, no_route: false }
    }
}

impl FrameSink for Egress<'_> {
    fn is_lossless(&self) -> bool {
        self.net.link.lossless
    }

    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        let answer = self.net.transmit(self.from, frame);
        self.full |= answer == Tx::Full;
        self.no_route |= answer == Tx::NoRoute;
        answer
    }

    fn presence(&mut self, station: Station) -> Presence {
        self.net.presence(self.from, station)
    }

    fn is_near(&mut self, station: Station) -> bool {
        Net::host_if_any(station).is_some_and(|to| self.net.is_near(self.from, to))
    }

    fn board(&mut self, members: &[Station]) -> Option<AnyBoard> {
        let nodes = self.net.link.nodes.unwrap_or(1);
        let is_here = |station: &Station| Net::host(*station) % nodes == self.from % nodes;
        let all = self.net.link.boards && members.iter().all(is_here);
        let board = all.then(|| Box::new(SimBoard::new(&self.net.slots)) as Box<dyn Board>);
        board.map(AnyBoard::from)
    }
}

fn trace(hash: u64, now: u64, from: usize, bytes: &[u8]) -> u64 {
    let mut h = mix(hash ^ now ^ ((from as u64) << 56) ^ ((bytes.len() as u64) << 40));
    for chunk in bytes.chunks(8).take(9) {
        let mut w = [0; 8];
        w[..chunk.len()].copy_from_slice(chunk);
        h = mix(h ^ u64::from_le_bytes(w));
    }
    h
}
