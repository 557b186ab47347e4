//! Two nodes with keys that open sessions with each other, whose lists of keys change, and an
//! adversary on the wire who may have a key as well: the bytes are the program of all three. Or two
//! with certificates, where everybody can make a tag; or one who looks at a certificate of any
//! bytes.

use std::collections::VecDeque;
use std::sync::{Arc, OnceLock};

use barewire_dataplane::flags::{BindFlags, Caps, OpFlags};
use barewire_dataplane::node::{
    AvId, CqId, EpAttr, EpId, MsgKind, Node, NodeSettings, RecvReq, SendReq,
};
use barewire_dataplane::seal::{Credentials, Keyring, Mode, PreSharedKey, TagKey, examine, sample};
use barewire_dataplane::types::{Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, Instant};
use barewire_dataplane::wire::sealed::{self, OPEN_END, TAG_LEN};
use barewire_dataplane::wire::{BASE_LEN, Ty};
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::mem::IoBuf;
use barewire_driver::port::{PortCaps, Station, Tx};

use crate::input::Input;

/// A longer program says nothing that a shorter one does not.
const PROGRAM_MAX: usize = 200;

/// Silence after which a peer is dead.
const T_DEAD_NS: u64 = 100_000_000;

/// Frames that are remembered, to be sent once more.
const SEEN_MAX: usize = 64;

/// The keys that there are.
const KEYS: [u8; 3] = [b'a', b'b', b'c'];

/// Two nodes with keys, a wire that does what the program says, and OPENs of its making, with right
/// tags and with wrong ones.
///
/// Whatever the program: no panic; every operation that was posted ends once; and once both have
/// the same key and the wire is left alone, the second message each way arrives.
pub fn handshake(data: &[u8]) {
    let Some((&[setup], program)) = data.split_first_chunk() else { return };
    if setup & PAYLOAD == PAYLOAD {
        return payload(program);
    }
    let mut input = Input::new(&program[..program.len().min(PROGRAM_MAX)]);
    let mut world = World::new(setup);
    while !input.is_empty() {
        world.step(&mut input);
    }
    world.end();
}

/// Bits of the first byte: nodes have certificates; only their payload is looked at.
const CERTIFIED: u8 = 0x80;
const PAYLOAD: u8 = 0xc0;

/// Any day in the life of the certificates, seconds since 1970.
const DAY: u64 = 1_893_456_000;

/// The certificate of this number: two that are trusted, and one of another root.
fn own(n: u8) -> Arc<Credentials> {
    static ALL: OnceLock<[Arc<Credentials>; 3]> = OnceLock::new();
    let all = ALL.get_or_init(|| {
        let (root, other) =
            (include_bytes!("../papers/root.pem"), include_bytes!("../papers/other.pem"));
        let papers: [(&[u8], &[u8], &[u8]); 3] = [
            (include_bytes!("../papers/a.pem"), include_bytes!("../papers/a.key"), root),
            (include_bytes!("../papers/b.pem"), include_bytes!("../papers/b.key"), root),
            (include_bytes!("../papers/c.pem"), include_bytes!("../papers/c.key"), other),
        ];
        papers.map(|(cert, key, root)| {
            let made = Credentials::from_pem(cert, key, root, Vec::new(), Arc::new(|| DAY));
            Arc::new(made.expect("good papers"))
        })
    });
    Arc::clone(&all[usize::from(n) % 3])
}

/// A payload with bytes changed, left out and put in: refused, unless it is what it was.
fn payload(program: &[u8]) {
    let own = own(0);
    let good = sample(&own);
    let mut bytes = good.clone();
    for step in program.chunks_exact(4) {
        let at = usize::from(u16::from_le_bytes([step[0], step[1]])) % bytes.len().max(1);
        match step[2] % 4 {
            _ if bytes.is_empty() => break,
            0 => bytes[at] = step[3],
            1 => bytes.truncate(at),
            2 => bytes.insert(at, step[3]),
            _ => bytes[at] ^= 1 << (step[3] % 8),
        }
    }
    assert_eq!(examine(&own, &bytes).is_ok(), bytes == good);
}

struct Side {
    node: Node,
    cq: CqId,
    av: AvId,
    ep: EpId,
    dest: FiAddr,
    inbox: VecDeque<Vec<u8>>,
    /// Operations that were accepted, and that have ended.
    posted: u64,
    ended: u64,
    /// Messages that have arrived.
    arrived: u64,
}

struct World {
    now: Instant,
    sides: [Side; 2],
    seen: Vec<Vec<u8>>,
}

fn key(n: u8) -> PreSharedKey {
    let bytes = [KEYS[usize::from(n) % KEYS.len()]; 32];
    PreSharedKey::with_key_frames(&bytes, Mode::Encrypted, 4).expect("a key of 32 bytes")
}

/// The list of keys that `byte` names: one to four.
fn list(byte: u8) -> Vec<PreSharedKey> {
    (0..1 + byte % 4).map(|i| key(byte >> (2 + i) & 3)).collect()
}

fn station_of(n: usize) -> Station {
    Station::at([2, 0, 0, 0, 0, n as u8 + 1])
}

impl Side {
    fn new(i: usize, setup: u8) -> Self {
        let mtu = [256, 1500][usize::from(setup >> 1 & 1 | setup >> 7)];
        let caps = PortCaps::new(station_of(i), mtu, "fuzz");
        let entropy = [i as u8; 32];
        let keys = match setup & CERTIFIED {
            0 => Keyring::new(list(setup), entropy),
            _ => Keyring::of_certificate_with(own(setup >> i), Mode::Encrypted, 4, entropy),
        };
        let settings = NodeSettings {
            incarnation: 101 + i as u64,
            seed: 7 + i as u64,
            t_dead_ns: T_DEAD_NS,
            peer_max: 4,
            tx_wr_max: 8,
            rx_wr_max: 64,
            unexpected_bytes: 64 * 256,
            mr_max: 1,
            keys,
            rekey_ns: 1_000_000,
            ..NodeSettings::default()
        };
        let mut node = Node::new(settings, &caps).expect("settings are good");
        let cq = node.cqs.open(128).expect("room for a queue");
        let av = node.sessions().av_open(4).expect("room for a vector");
        let caps = Caps::MSG | Caps::TAGGED | Caps::SEND | Caps::RECV;
        let ep = node.eps.open(EpAttr { number: Some(0), caps, ..EpAttr::default() });
        let ep = ep.expect("the number is free");
        let flags = BindFlags::TRANSMIT | BindFlags::RECV;
        node.objects().ep_bind_cq(ep, cq, flags).expect("nothing is bound");
        node.objects().ep_bind_av(ep, av).expect("nothing is bound");
        node.ep_enable(ep).expect("all is bound");
        let incarnation = if setup & 1 == 0 { 0 } else { 102 - i as u64 };
        let addr = EpAddr { station: station_of(1 - i), ep: 0, incarnation };
        let dest = node.sessions().av_insert(Instant(1), av, addr).expect("room for a peer");
        let inbox = VecDeque::new();
        Self { node, cq, av, ep, dest, inbox, posted: 0, ended: 0, arrived: 0 }
    }

    fn send(&mut self, now: Instant) {
        let req = SendReq {
            kind: MsgKind::Tagged,
            buf: IoBuf::leaked(b"message!"),
            dest: self.dest,
            tag: 1,
            data: 0,
            context: 1,
            flags: OpFlags::empty(),
            no_completion: false,
        };
        self.posted += u64::from(self.node.post_send(now, self.ep, req).is_ok());
    }

    fn recv(&mut self, now: Instant) {
        let req = RecvReq {
            kind: MsgKind::Tagged,
            buf: IoBuf::leaked(&[0; 8]),
            src: FI_ADDR_UNSPEC,
            tag: 1,
            ignore: 0,
            context: 2,
            flags: OpFlags::empty(),
        };
        // A receive that no message comes for does not end.
        let _ = self.node.post_recv(now, self.ep, req);
    }

    fn read(&mut self) {
        let mut some = [Cqe::default(); 16];
        loop {
            match self.node.cq_read(self.cq, &mut some) {
                Ok(n) => some[..n].iter().for_each(|entry| self.take(entry.op_context)),
                Err(_) => match self.node.receiving().cq_readerr(self.cq) {
                    Ok(failed) => {
                        assert_eq!(failed.cqe.op_context, 1, "a receive fails of nothing");
                        self.ended += 1;
                    }
                    Err(_) => return,
                },
            }
            assert!(self.ended <= self.posted, "an operation ended twice");
        }
    }

    fn take(&mut self, context: u64) {
        match context {
            1 => self.ended += 1,
            _ => self.arrived += 1,
        }
    }
}

impl World {
    fn new(setup: u8) -> Self {
        let sides = [Side::new(0, setup), Side::new(1, setup)];
        Self { now: Instant(1), sides, seen: Vec::new() }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let b = input.byte();
        let i = usize::from(b & 1);
        match b >> 1 & 15 {
            0..=2 => self.deliver(i),
            3 => drop(self.sides[i].inbox.pop_front()),
            4 | 5 => self.transmit(i),
            6 => self.now = self.now + (1 << (input.byte() % 27)),
            7 | 8 => {
                self.sides[i].send(self.now);
                self.sides[1 - i].recv(self.now);
            }
            9 => {
                self.set(i, input.byte());
            }
            10 => {
                let other = station_of(1 - i);
                self.sides[i].node.sessions().drop_session(self.now, other);
            }
            11 => self.forge(i, input, false),
            12 => self.forge(i, input, true),
            13 => {
                // Once more, to whoever.
                let old = self.seen.get(usize::from(input.byte()) % self.seen.len().max(1));
                self.sides[i].inbox.extend(old.cloned());
            }
            14 => {
                let at = usize::from(input.byte());
                let inbox = &mut self.sides[i].inbox;
                if at < inbox.len() {
                    inbox.swap(0, at);
                }
            }
            _ => self.turn(),
        }
        self.sides.iter_mut().for_each(Side::read);
    }

    /// Other keys, or another certificate.
    fn set(&mut self, i: usize, byte: u8) {
        let node = &mut self.sides[i].node;
        let set = match node.openings.has_certificate() {
            true => node.sessions().set_certificate(self.now, own(byte)),
            false => node.sessions().set_keys(self.now, list(byte)),
        };
        set.expect("one to four keys, or a certificate that fits");
    }

    fn transmit(&mut self, i: usize) {
        let mut out = Vec::new();
        self.sides[i].node.transmit(self.now, &mut |frame: &TxFrame<'_>| {
            let mut bytes = vec![0; frame.len()];
            frame.copy_to(&mut bytes);
            out.push(bytes);
            Tx::Sent
        });
        if self.seen.len() < SEEN_MAX {
            self.seen.extend(out.iter().cloned());
        }
        self.sides[1 - i].inbox.extend(out);
    }

    fn deliver(&mut self, i: usize) {
        if let Some(bytes) = self.sides[i].inbox.pop_front() {
            self.sides[i].node.on_frame(self.now, &RxFrame::new(&bytes));
        }
    }

    fn turn(&mut self) {
        for i in 0..2 {
            self.transmit(i);
            while !self.sides[i].inbox.is_empty() {
                self.deliver(i);
            }
        }
    }

    /// A frame that was seen, with some bytes changed behind its MACs. `tags`: by somebody who has
    /// a key, if it is an OPEN or RST.
    fn forge(&mut self, i: usize, input: &mut Input<'_>, tags: bool) {
        let Some(old) = self.seen.get(usize::from(input.byte()) % self.seen.len().max(1)) else {
            return;
        };
        let mut bytes = old.clone();
        for _ in 0..1 + input.byte() % 4 {
            let at = 12 + usize::from(input.byte()) % (bytes.len().min(OPEN_END + 96) - 12);
            bytes[at] ^= input.byte();
        }
        if tags {
            let n = input.byte();
            let tag_key = match self.sides[i].node.openings.has_certificate() {
                true => everybodys(),
                false => key(n).tag_key().clone(),
            };
            tag(&mut bytes, &tag_key);
        }
        self.sides[i].inbox.push_front(bytes);
        self.deliver(i);
    }

    /// Both get the same key, and the wire is left alone.
    fn end(mut self) {
        for side in &mut self.sides {
            let set = match side.node.openings.has_certificate() {
                true => side.node.sessions().set_certificate(self.now, own(0)),
                false => side.node.sessions().set_keys(self.now, vec![key(0)]),
            };
            set.expect("one key");
        }
        for i in [0, 1, 2, 3] {
            if i >= 2 {
                // What came before has ended. The first of these may find out that one end has
                // forgotten its session and the other has not, and fail by it; the second arrive.
                assert!(self.sides.iter().all(|side| side.posted == side.ended), "one never ends");
                self.greet();
            }
            for _ in 0..200 {
                self.turn();
                self.sides.iter_mut().for_each(Side::read);
                self.now = self.now + T_DEAD_NS / 50;
            }
        }
        for side in &self.sides {
            assert_eq!(side.posted, side.ended, "the last one ends");
            assert!(side.arrived > 0, "the last one arrives");
        }
    }

    fn greet(&mut self) {
        for side in &mut self.sides {
            let other = side.node.objects().av_lookup(side.av, side.dest).expect("it was inserted");
            // The peer may have been taken for another life.
            let addr = EpAddr { incarnation: 0, ..other };
            side.dest =
                side.node.sessions().av_insert(self.now, side.av, addr).expect("room for a peer");
            side.arrived = 0;
            side.recv(self.now);
            side.send(self.now);
        }
    }
}

/// What makes tags where nodes have certificates.
fn everybodys() -> TagKey {
    let ring = Keyring::of_certificate_with(own(0), Mode::Encrypted, 4, [0; 32]);
    ring.expect("16 frames to a key").tag_key().clone()
}

/// Puts the right tag and checksum on an OPEN or RST, if there is room.
fn tag(bytes: &mut [u8], tag_key: &TagKey) {
    let is_bare = |ty| matches!(ty, Some(Ty::Open | Ty::Rst));
    if bytes.len() < BASE_LEN || !is_bare(sealed::ty_of(bytes)) {
        return;
    }
    let end = BASE_LEN + usize::from(sealed::plen(bytes));
    let is_open = sealed::ty_of(bytes) == Some(Ty::Open);
    let whole = end + TAG_LEN + if is_open { 4 } else { 0 };
    if bytes.len() < whole {
        return;
    }
    let tag = tag_key.tag(&bytes[..end]);
    bytes[end..end + TAG_LEN].copy_from_slice(&tag);
    if is_open {
        sealed::append_crc(bytes, end + TAG_LEN);
    }
}
