//! What one seed decides: sizes, faults and their strength, the callers' manners.

use barewire_dataplane::node::NodeSettings;
use barewire_dataplane::seal::{Keyring, Mode, PreSharedKey};

use crate::rng::{Rng, mix};

/// Everything about a run that is fixed before it starts.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    pub(crate) seed: u64,
    pub(crate) hosts: usize,
    /// Endpoints per host.
    pub(crate) eps: usize,
    /// Calls that post something, accepted or not.
    pub(crate) ops: u64,
    pub(crate) link: LinkPlan,
    pub(crate) faults: FaultPlan,
    pub(crate) node: NodePlan,
    pub(crate) caller: CallerPlan,
}

/// The segment.
#[derive(Clone, Debug)]
pub(crate) struct LinkPlan {
    /// `PortCaps::lossless`, and a link that keeps the promise.
    pub(crate) lossless: bool,
    /// `PortCaps::tells_presence`: the segment is memory, and the kernel knows who lives.
    pub(crate) presence: bool,
    /// Into how many nodes the hosts are divided whose processes reach each other through memory as
    /// well: host by host, in turn. `None` if there is no such memory.
    pub(crate) nodes: Option<usize>,
    /// Whether the processes of a node share its NIC through a switch.
    pub(crate) switched: bool,
    /// Bytes of a ring between a process and its switch.
    pub(crate) switch_ring: usize,
    /// Whether hosts of one node share boards; without nodes all hosts are of one.
    pub(crate) boards: bool,
    /// `PortCaps::near_mtu`, if there is.
    pub(crate) near_mtu: usize,
    /// Chance that a frame through memory is copied, changed and sent by the wire as well.
    pub(crate) spoofs: f64,
    /// If hosts seal their frames, the chance that somebody without a key makes another frame of
    /// one on the wire, and sends it.
    pub(crate) forges: Option<f64>,
    /// Largest frame after the Ethernet header, per host.
    pub(crate) mtu: Vec<usize>,
    pub(crate) bps: u64,
    /// Whether the ports of hosts say different things of their links and kernels.
    pub(crate) ports_differ: bool,
    pub(crate) latency_ns: u64,
    /// Frames in a host's transmit ring, and in its receive ring.
    pub(crate) tx_ring: usize,
    pub(crate) rx_ring: usize,
    pub(crate) loss: f64,
    pub(crate) dup: f64,
    /// Whether copies may come seconds later.
    pub(crate) dup_late: bool,
    /// Mean of the exponential extra delay, 0 for a link in order.
    pub(crate) jitter_ns: f64,
    /// Chance of a delay spike, and its limit.
    pub(crate) spike: f64,
    pub(crate) spike_ns: u64,
    pub(crate) corrupt: f64,
    /// Chance that a full transmit ring is played although there is room.
    pub(crate) full: f64,
    /// How long a frame waits for its host's transmitter, or in a port of the fabric's switch,
    /// until it is marked (ECN), if any is.
    pub(crate) mark_ns: Option<u64>,
    /// Bytes that the port of the fabric's switch towards a host holds, which sends at `bps`; what
    /// finds no room there is dropped. `None` if the fabric does not block.
    pub(crate) port_bytes: Option<u64>,
}

impl LinkPlan {
    /// Between two hosts: nothing is wrong with it.
    fn calm() -> Self {
        Self {
            lossless: false,
            presence: false,
            nodes: None,
            switched: false,
            switch_ring: 1 << 16,
            boards: false,
            near_mtu: 0,
            spoofs: 0.0,
            forges: None,
            mtu: vec![1500; 2],
            bps: 10_000_000_000,
            ports_differ: false,
            latency_ns: 5 * US,
            tx_ring: 256,
            rx_ring: 512,
            loss: 0.0,
            dup: 0.0,
            dup_late: false,
            jitter_ns: 0.0,
            spike: 0.0,
            spike_ns: 0,
            corrupt: 0.0,
            full: 0.0,
            mark_ns: None,
            port_bytes: None,
        }
    }

    /// The same with the hosts in so many nodes, each behind a switch.
    pub(crate) fn of_nodes(self, nodes: usize, seed: u64) -> Self {
        let near_mtu = [256, 1500, 65_536][(seed % 3) as usize];
        Self { nodes: Some(nodes), switched: true, near_mtu, ..self }
    }

    /// Whether the two are processes of one node, and reach each other through its memory.
    pub(crate) fn is_near(&self, a: usize, b: usize) -> bool {
        a != b && self.nodes.is_some_and(|nodes| a % nodes == b % nodes)
    }

    /// Whether nothing is lost between the two while both live.
    pub(crate) fn is_lossless(&self, a: usize, b: usize) -> bool {
        self.lossless || self.is_near(a, b)
    }

    /// Whether there is anybody between whom nothing is lost.
    pub(crate) fn has_lossless(&self) -> bool {
        self.lossless || self.nodes.is_some()
    }
}

/// What happens to hosts and paths, and after how many calls.
#[derive(Clone, Debug, Default)]
pub(crate) struct FaultPlan {
    /// Sorted by call number.
    pub(crate) at: Vec<(u64, Fault)>,
    /// How long faults go on after the last call.
    pub(crate) linger_ns: u64,
}

/// One fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The process is gone; `back_ns` later another starts at the same station, or never.
    Crash { host: usize, back_ns: Option<u64> },
    /// `host` forgets its session with `peer`.
    SessionLoss { host: usize, peer: usize },
    /// Nothing from `from` reaches `to`, never again.
    CutOneWay { from: usize, to: usize },
    /// Nothing passes between the two, never again.
    Cut { a: usize, b: usize },
    /// Nothing passes between the two for a while.
    Flap { a: usize, b: usize, ns: u64 },
    /// What `from` sends to `to` arrives this much later, but does.
    Clog { from: usize, to: usize, ns: u64 },
    /// The host's clock jumps ahead.
    Jump { host: usize, ns: u64 },
    /// The host is not polled: its process is stopped, or, on a segment of memory, computes.
    Starve { host: usize, ns: u64 },
    /// The application does not call; a thread beside it answers, if late.
    Compute { host: usize, ns: u64 },
    /// The host's list of keys is the next of [`KEY_LISTS`].
    Keys { host: usize },
    /// The switch of a node is gone with the frames in it; `back_ns` later the next one starts.
    SwitchEnd { node: usize, back_ns: u64 },
    /// A process is in no segment with others of its node any more, and lives. The next one at its
    /// station is.
    Leave { host: usize },
}

impl Fault {
    /// Names of all, in order of declaration.
    pub(crate) const NAMES: [&str; 12] = [
        "Crash",
        "SessionLoss",
        "CutOneWay",
        "Cut",
        "Flap",
        "Clog",
        "Jump",
        "Starve",
        "Compute",
        "Keys",
        "SwitchEnd",
        "Leave",
    ];

    /// Its place in [`NAMES`](Self::NAMES).
    pub(crate) fn kind(self) -> usize {
        match self {
            Self::Crash { .. } => 0,
            Self::SessionLoss { .. } => 1,
            Self::CutOneWay { .. } => 2,
            Self::Cut { .. } => 3,
            Self::Flap { .. } => 4,
            Self::Clog { .. } => 5,
            Self::Jump { .. } => 6,
            Self::Starve { .. } => 7,
            Self::Compute { .. } => 8,
            Self::Keys { .. } => 9,
            Self::SwitchEnd { .. } => 10,
            Self::Leave { .. } => 11,
        }
    }
}

/// The lists of keys that a host has one after the other while another key comes.
pub(crate) const KEY_LISTS: [&[u8]; 4] = [&[0], &[0, 1], &[1, 0], &[1]];

/// Sizes of every node.
#[derive(Clone, Debug)]
pub(crate) struct NodePlan {
    pub(crate) t_dead_ns: u64,
    pub(crate) eager_max: usize,
    pub(crate) tx_wr_max: usize,
    pub(crate) rx_wr_max: usize,
    pub(crate) unexpected_bytes: usize,
    pub(crate) pull_window: usize,
    /// Packets in flight: host `i` is set to number `i % 4`.
    pub(crate) windows: [u32; 4],
    pub(crate) peer_max: usize,
    pub(crate) cq_size: usize,
    pub(crate) crc: Option<bool>,
    /// What all hosts seal their frames with: the mode, and how many frames to a key, as a power of
    /// two.
    pub(crate) seal: Option<(Mode, u32)>,
    /// When a session's key is left for the next one.
    pub(crate) rekey_ns: u64,
    /// Hosts whose processors do not encrypt with AES themselves.
    pub(crate) without_aes: Vec<usize>,
    /// Hosts that are not reached by name: their sessions begin with their incarnation.
    pub(crate) strict: Vec<usize>,
    /// Hosts whose endpoints and regions only peers in their vector reach.
    pub(crate) inserted: Vec<usize>,
    /// Who never has whom in its vector.
    pub(crate) strangers: Vec<(usize, usize)>,
}

impl NodePlan {
    /// Ordinary sizes, no keys, and nobody is kept out.
    fn calm() -> Self {
        Self {
            t_dead_ns: 500 * MS,
            eager_max: 4096,
            tx_wr_max: 64,
            rx_wr_max: 128,
            unexpected_bytes: 1 << 20,
            pull_window: 64 << 10,
            windows: [4096; 4],
            peer_max: 16,
            cq_size: 256,
            crc: Some(true),
            seal: None,
            rekey_ns: 3_600_000 * MS,
            without_aes: Vec::new(),
            strict: Vec::new(),
            inserted: Vec::new(),
            strangers: Vec::new(),
        }
    }

    /// Nobody is kept out by anybody.
    pub(crate) fn let_all_in(&mut self) {
        (self.strict, self.inserted, self.strangers) = Default::default();
    }

    /// Whether `host` never has `other` in its vector.
    pub(crate) fn is_stranger(&self, host: usize, other: usize) -> bool {
        self.strangers.contains(&(host, other))
    }

    /// Whether `host` knows `other` by its name alone, which does not let it in there.
    pub(crate) fn is_nameless(&self, host: usize, other: usize) -> bool {
        self.strict.contains(&other) && self.is_stranger(other, host)
    }

    /// The settings of one life of `host`.
    pub(crate) fn settings_at(&self, host: usize, incarnation: u64, seed: u64) -> NodeSettings {
        let inserted = self.inserted.contains(&host);
        let by_name = !self.strict.contains(&host);
        let window = self.windows[host % 4];
        let aes = !self.without_aes.contains(&host);
        NodeSettings { inserted, by_name, window, aes, ..self.settings(incarnation, seed) }
    }

    /// The keys of these numbers, if hosts seal.
    pub(crate) fn keys(&self, numbers: &[u8]) -> Option<Vec<PreSharedKey>> {
        let (mode, bits) = self.seal?;
        let key = |n: &u8| PreSharedKey::with_key_frames(&[b'k' + n; 32], mode, bits);
        numbers.iter().map(key).collect()
    }

    /// The settings of one life, whoever may reach it.
    pub(crate) fn settings(&self, incarnation: u64, seed: u64) -> NodeSettings {
        NodeSettings {
            incarnation,
            seed,
            t_dead_ns: self.t_dead_ns,
            eager_max: Some(self.eager_max),
            peer_max: self.peer_max,
            tx_wr_max: self.tx_wr_max,
            rx_wr_max: self.rx_wr_max,
            unexpected_bytes: self.unexpected_bytes,
            pull_window: self.pull_window,
            window: self.windows[0],
            mr_max: 64,
            crc: self.crc,
            keys: self.keys(KEY_LISTS[0]).and_then(|keys| {
                let entropy = std::array::from_fn(|i| (incarnation ^ seed >> i) as u8);
                Keyring::new(keys, entropy)
            }),
            rekey_ns: self.rekey_ns,
            ..NodeSettings::default()
        }
    }
}

/// How the applications behave.
#[derive(Clone, Debug)]
pub(crate) struct CallerPlan {
    /// Mean time between two looks of an application at the world.
    pub(crate) think_ns: f64,
    /// Calls per look, at most.
    pub(crate) batch: u64,
    /// Mean time from the arrival of a frame to the poll that finds it.
    pub(crate) poll_ns: f64,
    /// Chance that a look reads the completion queue.
    pub(crate) reads: f64,
    /// Chance that who turns the loop has read a queue to its end, and waits for the next entry.
    pub(crate) waits: f64,
    /// Share of sends among sends and receives.
    pub(crate) sends: f64,
    /// Share of messages that are short, plain and to the same peer as the last, and of receives
    /// for such.
    pub(crate) short: f64,
    /// Longest message.
    pub(crate) len_max: usize,
    /// Tags in use: few make many messages alike.
    pub(crate) tags: u64,
    /// Share of tagged traffic.
    pub(crate) tagged: f64,
    /// Share of receives that name their sender.
    pub(crate) directed: f64,
    /// Share of sends to an address without incarnation.
    pub(crate) any_life: f64,
    /// Share of sends that complete only when a receive has taken them.
    pub(crate) matched: f64,
    /// Share of sends that complete as soon as their buffer may be reused.
    pub(crate) early: f64,
    /// Share of endpoints with selective completion.
    pub(crate) selective: f64,
    /// Whether rare calls (close, peek, multi-receive, cancel) are in the mix.
    pub(crate) rare: f64,
    /// Chance that a look begins with closing an endpoint, whatever is pending, and opening another
    /// in its place; and the hosts, counted from the first, whose applications do that.
    pub(crate) closes: f64,
    pub(crate) closers: usize,
    /// Chance that a look takes addresses out of the vector and puts others back.
    pub(crate) renames: f64,
    /// Share of operations on remote memory. Without any there is no region.
    pub(crate) remote: f64,
    /// Share of atomic operations on one word; the others have up to 512.
    pub(crate) one: f64,
    /// Share of operations on remote memory whose target is told of them.
    pub(crate) told: f64,
    /// Nothing but additions and swaps from all other hosts onto one word of the first.
    pub(crate) one_word: bool,
}

const US: u64 = 1_000;
const MS: u64 = 1_000_000;

impl Plan {
    /// By which a life is told from others.
    pub(crate) fn incarnation(&self, life: u32) -> u64 {
        mix(self.seed ^ mix(u64::from(life))) >> 16 | 1
    }

    /// A quiet segment and an ordinary load, the base of the directed stages.
    pub(crate) fn calm(seed: u64, ops: u64) -> Self {
        Self {
            seed,
            hosts: 2,
            eps: 1,
            ops,
            link: LinkPlan::calm(),
            faults: FaultPlan::default(),
            node: NodePlan::calm(),
            caller: CallerPlan {
                think_ns: 20_000.0,
                batch: 4,
                poll_ns: 500.0,
                reads: 0.7,
                waits: 0.0,
                sends: 0.5,
                short: 0.0,
                len_max: 32 << 10,
                tags: 3,
                tagged: 0.5,
                directed: 0.2,
                any_life: 0.3,
                matched: 0.0,
                early: 0.0,
                selective: 0.2,
                rare: 0.0,
                closes: 0.0,
                closers: 0,
                renames: 0.0,
                remote: 0.0,
                one: 0.8,
                told: 0.2,
                one_word: false,
            },
        }
    }

    /// Any mixture of faults, sizes and manners: each seed draws which are on and how strong.
    pub(crate) fn swarm(seed: u64, ops: u64) -> Self {
        let mut r = Rng::new(seed, 1);
        let mut p = Self::calm(seed, ops);
        p.hosts = 2 + r.pick(&[0, 0, 1, 1, 2, 3]);
        p.eps = 1 + r.index(3);
        p.draw_link(&mut r);
        p.draw_node(&mut r);
        p.draw_caller(&mut r);
        p.draw_faults(&mut r);
        p.draw_computing(&mut Rng::new(seed, 12));
        p.caller.remote = Rng::new(seed, 6).pick(&[0.0, 0.2, 0.4, 0.8]);
        p.caller.matched = Rng::new(seed, 25).pick(&[0.3, 0.0, 0.0, 0.1]);
        p.caller.early = Rng::new(seed, 26).pick(&[0.0, 0.5, 0.0, 0.2]);
        p.draw_haste(&mut Rng::new(seed, 13));
        p.link.mark_ns = Rng::new(seed, 19).pick(&[None, None, Some(0), Some(20 * US)]);
        p.draw_nodes(&mut Rng::new(seed, 14));
        p.draw_strangers(&mut Rng::new(seed, 15));
        p.draw_key(&mut Rng::new(seed, 16));
        p.draw_other_keys(&mut Rng::new(seed, 17));
        p
    }

    /// Nodes of two or three processes, each node with a segment, and a switch before its NIC; and
    /// any mixture of faults on the wire, of processes and of switches.
    pub(crate) fn nodes(seed: u64, ops: u64) -> Self {
        let mut r = Rng::new(seed, 20);
        let mut p = Self::calm(seed, ops);
        let nodes = r.pick(&[2, 2, 3]);
        p.hosts = nodes * r.range(2, 3) as usize;
        p.eps = 1 + r.index(2);
        p.draw_link(&mut r);
        while p.link.lossless {
            p.draw_link(&mut r);
        }
        let mtus: Vec<_> = (0..nodes).map(|_| r.pick(&[256, 512, 1500, 9000])).collect();
        let one = r.chance(0.7);
        p.link.mtu = (0..p.hosts).map(|host| mtus[if one { 0 } else { host % nodes }]).collect();
        let least = 4 * (p.link.mtu.iter().copied().max().unwrap_or(0) + 64);
        p.link.switch_ring = least.next_power_of_two().max(r.pick(&[4096, 1 << 16, 1 << 20]));
        p.draw_node(&mut r);
        p.draw_caller(&mut r);
        p.draw_faults(&mut r);
        p.draw_computing(&mut r);
        p.caller.remote = r.pick(&[0.0, 0.2, 0.4, 0.8]);
        p.draw_haste(&mut r);
        p.caller.think_ns = p.caller.think_ns.max(10e3);
        p.be_nodes(nodes, &mut r);
        p.link.switched = true;
        p.draw_strangers(&mut r);
        p.draw_key(&mut r);
        p.draw_other_keys(&mut r);
        p.draw_moves(nodes, &mut r);
        p
    }

    /// As [`calm`](Self::calm), of two nodes with two processes each.
    pub(crate) fn calm_nodes(seed: u64, ops: u64) -> Self {
        let mut p = Self::calm(seed, ops);
        p.hosts = 4;
        p.link = LinkPlan { mtu: vec![1500; p.hosts], ..p.link.of_nodes(2, seed) };
        p.node.crc = None;
        p
    }

    /// Switches end, and processes leave their segments or are killed.
    fn draw_moves(&mut self, nodes: usize, r: &mut Rng) {
        let t_dead_ns = self.node.t_dead_ns;
        let mut at = Vec::new();
        for _ in 0..r.pick(&[0, 1, 3, 6]) {
            let back_ns = r.pick(&[50 * US, 2 * MS, 20 * MS, t_dead_ns / 8, 2 * t_dead_ns]);
            at.push(Fault::SwitchEnd { node: r.index(nodes), back_ns });
        }
        for _ in 0..r.pick(&[0, 0, 1, 3]) {
            at.push(Fault::Leave { host: r.index(self.hosts) });
        }
        for _ in 0..r.pick(&[0, 0, 1, 3]) {
            let back_ns = r.chance(0.8).then(|| r.exp(20e6));
            at.push(Fault::Crash { host: r.index(self.hosts), back_ns });
        }
        self.faults.at.extend(at.into_iter().map(|fault| (r.below(self.ops), fault)));
        self.faults.at.sort_by_key(|&(k, _)| k);
    }

    /// All hosts have a key, and somebody without it is on a link that may lose frames.
    fn draw_key(&mut self, r: &mut Rng) {
        if self.link.lossless || r.chance(0.7) {
            return;
        }
        let mode = r.pick(&[Mode::Encrypted, Mode::Authenticated]);
        self.node.seal = Some((mode, r.pick(&[4, 6, 10, 22])));
        self.link.forges = Some(r.pick(&[0.0, 0.02, 0.2]));
        let mut r = Rng::new(self.seed, 23);
        let share = r.pick(&[0.0, 0.3]);
        self.node.without_aes = (0..self.hosts).filter(|_| r.chance(share)).collect();
    }

    /// Keys of sessions are left by time, and another key may come.
    fn draw_other_keys(&mut self, r: &mut Rng) {
        if self.node.seal.is_none() {
            return;
        }
        self.node.rekey_ns = r.pick(&[MS, 20 * MS, 3_600_000 * MS]);
        if r.chance(0.5) {
            self.roll_out(r);
        }
    }

    /// Another key comes, to one host after the other.
    pub(crate) fn roll_out(&mut self, r: &mut Rng) {
        let steps = KEY_LISTS.len() - 1;
        let mut calls: Vec<u64> = (0..steps * self.hosts).map(|_| r.below(self.ops)).collect();
        calls.sort_unstable();
        for (i, call) in calls.into_iter().enumerate() {
            // Every host takes one step before any takes the next; who is first changes.
            let host = (i + i / self.hosts) % self.hosts;
            self.faults.at.push((call, Fault::Keys { host }));
        }
        self.faults.at.sort_by_key(|&(k, _)| k);
    }

    /// Some hosts do not let everybody in.
    fn draw_strangers(&mut self, r: &mut Rng) {
        if r.chance(0.75) {
            return;
        }
        let n = &mut self.node;
        for host in 0..self.hosts {
            let (strict, inserted) = (r.chance(0.4), r.chance(0.4));
            if strict {
                n.strict.push(host);
            }
            if inserted {
                n.inserted.push(host);
            }
            for other in (0..self.hosts).filter(|&other| other != host) {
                if (strict || inserted) && r.chance(0.3) {
                    n.strangers.push((host, other));
                }
            }
        }
    }

    /// Some of the hosts are processes of one node, on a link that may lose frames.
    fn draw_nodes(&mut self, r: &mut Rng) {
        if self.link.lossless || r.chance(0.5) {
            return;
        }
        let nodes = r.pick(&[1, 1, 2, 2, 3]);
        self.be_nodes(nodes, r);
    }

    /// The hosts are processes of so many nodes.
    fn be_nodes(&mut self, nodes: usize, r: &mut Rng) {
        self.link.nodes = Some(nodes);
        self.link.near_mtu = r.pick(&[256, 1500, 4160, 65_536]);
        self.link.spoofs = r.pick(&[0.0, 0.02]);
        self.node.crc = None;
        let smallest = self.link.mtu.iter().copied().min().unwrap_or(1500);
        self.caller.len_max = self.caller.len_max.min(100 * smallest.min(self.link.near_mtu));
    }

    fn draw_link(&mut self, r: &mut Rng) {
        let l = &mut self.link;
        l.lossless = r.chance(0.5);
        let mtu = r.pick(&[256, 512, 1500, 1500, 4160, 9000, 65_536]);
        l.mtu = vec![mtu; self.hosts];
        if r.chance(0.15) {
            l.mtu = (0..self.hosts).map(|_| r.pick(&[256, 600, 1500, 9000])).collect();
        }
        l.bps = r.pick(&[1, 10, 10, 100]) * 1_000_000_000;
        l.latency_ns = r.pick(&[300, 2 * US, 5 * US, 50 * US]);
        l.tx_ring = r.pick(&[2, 16, 256, 256]);
        l.rx_ring = r.pick(&[8, 64, 512, 512]);
        l.full = if r.chance(0.3) { r.unit() * 0.3 } else { 0.0 };
        if l.lossless {
            return;
        }
        let on = |r: &mut Rng, p: f64, most: f64| {
            if r.chance(p) { most * r.unit() * r.unit() } else { 0.0 }
        };
        l.loss = on(r, 0.6, 0.3);
        l.dup = on(r, 0.5, 0.5);
        l.dup_late = r.chance(0.5);
        l.jitter_ns = on(r, 0.5, 50_000.0);
        l.spike = on(r, 0.4, 0.05);
        l.spike_ns = 20 * MS;
        l.corrupt = on(r, 0.4, 0.05);
    }

    /// Applications that send short messages, and wait for what comes.
    fn draw_haste(&mut self, r: &mut Rng) {
        let c = &mut self.caller;
        c.renames = r.pick(&[0.0, 0.0, 0.05, 0.2]);
        c.waits = r.pick(&[0.0, 0.3, 0.9]);
        c.short = r.pick(&[0.0, 0.0, 0.5, 0.9]);
        if c.short == 0.0 {
            return;
        }
        // A session has to be open, and not to be waited for, before anything is quick.
        c.think_ns = c.think_ns.max(r.pick(&[5e3, 20e3, 100e3]));
        // A stream has several packets in flight before the program looks again.
        let streams = !self.link.lossless && r.chance(0.3);
        c.batch = if streams { 32 } else { c.batch.min(4) };
        c.tags = c.tags.min(3);
        c.remote = c.remote.min(0.4);
        c.rare = c.rare.min(0.1);
        self.link.full = self.link.full.min(0.05);
        self.node.tx_wr_max = self.node.tx_wr_max.max(self.node.cq_size / 2);
    }

    /// Applications compute for up to many T_dead between two calls.
    fn draw_computing(&mut self, r: &mut Rng) {
        self.link.presence = self.link.lossless && r.chance(0.7);
        if r.chance(0.7) {
            return;
        }
        for _ in 0..r.range(1, 3) {
            self.compute(r);
        }
    }

    /// One application computes for up to four times T_dead, unless nobody would answer for it.
    pub(crate) fn compute(&mut self, r: &mut Rng) {
        let (host, ns) = (r.index(self.hosts), r.below(4 * self.node.t_dead_ns));
        let fault = match (self.link.presence, self.link.lossless) {
            (true, _) => Fault::Starve { host, ns },
            (false, false) => Fault::Compute { host, ns },
            (false, true) => return,
        };
        self.faults.at.push((r.below(self.ops), fault));
        self.faults.at.sort_by_key(|&(k, _)| k);
    }

    fn draw_node(&mut self, r: &mut Rng) {
        let n = &mut self.node;
        n.t_dead_ns = r.pick(&[300 * MS, 1000 * MS, 2000 * MS]);
        if self.link.loss > 0.1 {
            n.t_dead_ns = 2000 * MS;
        }
        n.eager_max = r.pick(&[256, 1500, 4096, 16 << 10, 64 << 10]);
        n.pull_window = r.pick(&[4 << 10, 64 << 10, 4 << 20]);
        n.windows = std::array::from_fn(|_| r.pick(&[64, 64, 256, 4096]));
        n.peer_max = if r.chance(0.2) { self.hosts + 1 } else { 64 };
        n.cq_size = r.pick(&[16, 64, 512, 512]);
        // Sends that wait for a receive must leave room in the queue to post one.
        n.tx_wr_max = r.pick(&[4, 64, 512, 512]).min(n.cq_size / 2);
        n.rx_wr_max = r.pick(&[16, 128, 1024, 1024]);
        n.unexpected_bytes = r.pick(&[64 << 10, 256 << 10, 4 << 20]);
        n.crc = (!self.link.lossless || r.chance(0.3)).then_some(true);
    }

    fn draw_caller(&mut self, r: &mut Rng) {
        let c = &mut self.caller;
        c.think_ns = r.pick(&[2e3, 20e3, 20e3, 200e3, 2e6]);
        c.batch = r.pick(&[1, 4, 16, 64]);
        c.poll_ns = r.pick(&[50.0, 500.0, 500.0, 20e3]);
        c.reads = r.pick(&[1.0, 0.7, 0.2, 0.02]);
        c.sends = r.pick(&[0.5, 0.5, 0.35, 0.65]);
        c.len_max = r.pick(&[2 << 10, 16 << 10, 64 << 10, 200 << 10]);
        let smallest = self.link.mtu.iter().copied().min().unwrap_or(1500);
        c.len_max = c.len_max.min(100 * smallest);
        c.tags = r.pick(&[1, 3, 3, 20]);
        c.tagged = r.pick(&[0.0, 0.5, 0.5, 1.0]);
        c.directed = r.pick(&[0.0, 0.3, 0.8]);
        c.any_life = r.pick(&[0.0, 0.3, 1.0]);
        c.selective = r.pick(&[0.0, 0.0, 0.5, 1.0]);
        c.rare = r.pick(&[0.0, 0.1, 0.1, 0.3]);
    }

    fn draw_faults(&mut self, r: &mut Rng) {
        self.faults.linger_ns = r.pick(&[0, MS, 50 * MS]);
        let mut at = Vec::new();
        let two = |r: &mut Rng, n: usize| {
            let a = r.index(n);
            (a, (a + 1 + r.index(n - 1)) % n)
        };
        let n = self.hosts;
        if r.chance(0.35) {
            for _ in 0..r.range(1, 4) {
                let back_ns = r.chance(0.7).then(|| r.exp(20e6));
                at.push(Fault::Crash { host: r.index(n), back_ns });
            }
        }
        if r.chance(0.3) {
            for _ in 0..r.range(1, 4) {
                let (host, peer) = two(r, n);
                at.push(Fault::SessionLoss { host, peer });
            }
        }
        let lossless = self.link.lossless;
        if r.chance(0.15) && !lossless {
            let (a, b) = two(r, n);
            let cut = Fault::Cut { a, b };
            at.push(if r.chance(0.5) { cut } else { Fault::CutOneWay { from: a, to: b } });
        }
        if r.chance(0.3) && !lossless {
            for _ in 0..r.range(1, 6) {
                let (a, b) = two(r, n);
                at.push(Fault::Flap { a, b, ns: r.exp(2e6) });
            }
        }
        if r.chance(0.2) && !lossless {
            let (from, to) = two(r, n);
            let ns = r.pick(&[MS, 20 * MS, 500 * MS, 5000 * MS]);
            at.push(Fault::Clog { from, to, ns });
        }
        if r.chance(0.2) {
            at.push(Fault::Jump { host: r.index(n), ns: r.range(1, 3000) * MS });
        }
        if r.chance(0.3) {
            for _ in 0..r.range(1, 3) {
                let long = r.chance(0.1);
                let ns = if long { r.range(1, 5000) * MS } else { r.exp(300e3) };
                at.push(Fault::Starve { host: r.index(n), ns });
            }
        }
        self.faults.at = at.into_iter().map(|f| (r.below(self.ops), f)).collect();
        self.faults.at.sort_by_key(|&(k, _)| k);
    }
}
