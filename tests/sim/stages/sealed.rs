//! What sessions with keys, and strangers, make a node hold of the heap and of the memory for keys.

use std::process::Command;

use barewire_dataplane::node::Node;
use barewire_dataplane::psn::Psn;
use barewire_dataplane::seal::{Initiator, Keyring, Mode, PreSharedKey, SessionNames, has_aes};
use barewire_dataplane::types::Instant as Moment;
use barewire_dataplane::wire::{self, AckOp, Base, Op, OpenOp, TAG_LEN, Ty, sealed};
use barewire_driver::frame::{ETH_HDR_LEN, RxFrame, TxFrame};
use barewire_driver::mem::KeyMemory;
use barewire_driver::port::{MacAddr, Station, Tx};

use crate::alloc;
use crate::net::Net;
use crate::plan::Plan;
use crate::world::caps;

const MS: u64 = 1_000_000;

/// Set in a process that runs one of these tests alone.
const ALONE: &str = "SIM_ALONE";

/// Bytes in use of the heap, and of the memory for keys.
fn in_use() -> i64 {
    alloc::in_use() + KeyMemory::now().used as i64
}

/// Whether this process runs the test of this name alone, since the heap of the ciphers is all
/// threads'. If it does not, another one has run it.
fn is_alone(name: &str) -> bool {
    if std::env::var_os(ALONE).is_some() {
        return true;
    }
    let mut test = Command::new(std::env::current_exe().expect("this program"));
    let name = format!("stages::sealed::{name}");
    let ran = test.args(["--exact", &name, "--nocapture"]).env(ALONE, "1").status();
    assert!(ran.expect("a process").success());
    false
}

fn ring(key: u8, entropy: u8) -> Keyring {
    let key = PreSharedKey::new(&[key; 32], Mode::Encrypted).expect("long enough");
    Keyring::new(vec![key], [entropy; 32]).expect("one key")
}

fn node(peers: usize, is_keyed: bool) -> Node {
    let mut plan = Plan::calm(1, 0);
    plan.node.peer_max = peers;
    let mut settings = plan.node.settings(1, 1);
    settings.keys = is_keyed.then(|| ring(7, 1));
    Node::new(settings, &caps(&plan, 0)).expect("a valid plan")
}

fn station(number: usize) -> Station {
    MacAddr::from_u64(0x0200_1000_0000 + number as u64).into()
}

/// The peer at `src`, which opens a session with the node.
struct Opener {
    base: Base,
    open: OpenOp,
}

impl Opener {
    fn new(src: Station, is_keyed: bool) -> Self {
        let aes = if is_keyed && has_aes() { OpenOp::AES } else { 0 };
        let base = Base {
            dst: Net::station(0),
            src,
            ty: Ty::Open,
            ar: false,
            rtx: false,
            ce: false,
            crc: !is_keyed,
            dst_sid: 0,
            psn: Psn(7),
            cack: Psn(0),
            grant: 0,
            plen: 0,
        };
        let open = OpenOp {
            sid: 5,
            epoch: 1,
            inc: src.mac.to_u64(),
            target_inc: 1,
            caps: aes,
            max_frame: 1500,
            window: 256,
            grant: 16,
            ..OpenOp::default()
        };
        Self { base, open }
    }

    /// The handshake with keys of `ring`, and the OPEN.
    fn offer(&self, ring: &mut Keyring) -> (Initiator, Vec<u8>) {
        let Self { base, open } = self;
        let (opener, answerer) = (base.src.word(), base.dst.word());
        let OpenOp { inc, sid, epoch, .. } = *open;
        let names = SessionNames {
            opener,
            answerer,
            inc,
            sid,
            epoch,
            psn: base.psn.0,
            params: open.params(),
        };
        let handshake = Initiator::new(ring, names);
        let mut bytes = wire::frame(base, &Op::Open(*open), &[]);
        bytes.extend(handshake.message());
        let plen = bytes.len() - wire::BASE_LEN;
        sealed::mark(&mut bytes, plen);
        bytes.extend(ring.tag_key().tag(&bytes));
        let end = bytes.len();
        bytes.resize(self.full().max(end + 4), 0);
        sealed::append_crc(&mut bytes, end);
        (handshake, bytes)
    }

    /// The length of an OPEN of full length, which so is known to pass.
    fn full(&self) -> usize {
        ETH_HDR_LEN + self.open.max_frame as usize
    }

    /// Opens a session, with keys of `ring` if there is one. The node's name of it.
    fn run(&self, node: &mut Node, now: Moment, ring: Option<&mut Keyring>) -> u32 {
        let base = &self.base;
        let (handshake, bytes) = match ring {
            Some(ring) => Some(self.offer(ring)).unzip(),
            None => {
                let mut bytes = wire::frame(base, &Op::Open(self.open), &[]);
                bytes.resize(self.full(), 0);
                (None, Some(bytes))
            }
        };
        node.on_frame(now, &RxFrame::new(&bytes.expect("an OPEN")));
        let answers = sent(node, now);
        let answer = answers.iter().find(|bytes| sealed::ty_of(bytes) == Some(Ty::Open));
        let answer = answer.expect("an OPEN is answered");
        let frame = RxFrame::new(answer);
        let (got, theirs) = sealed::open_in(&frame).unwrap_or_else(|| {
            let got = Base::parse(&frame).expect("our own frame");
            (got, OpenOp::parse(&frame, &got).expect("an OPEN in answer"))
        });
        let base = Base { ty: Ty::Ack, dst_sid: theirs.sid, cack: got.psn, ..*base };
        let ack = AckOp { newest: Psn(got.psn.0.wrapping_sub(1)), ..AckOp::default() };
        let mut bytes = wire::frame(&base, &Op::Ack(ack, [0; AckOp::WORDS_MAX]), &[]);
        if let Some(mut handshake) = handshake {
            let end = wire::BASE_LEN + usize::from(sealed::plen(answer));
            let aes = self.open.caps & theirs.caps & OpenOp::AES != 0;
            let keys = handshake.finish(&answer[..end], aes);
            let plen = bytes.len() - wire::BASE_LEN;
            sealed::mark(&mut bytes, plen);
            bytes.extend([0; TAG_LEN]);
            keys.expect("the handshake of the node").seal(&mut bytes);
        }
        node.on_frame(now, &RxFrame::new(&bytes));
        theirs.sid
    }

    /// A frame of the session that the node names so, with this counter, by somebody without its
    /// keys.
    fn forged(&self, dst_sid: u32, counter: u32) -> Vec<u8> {
        let base = Base { ty: Ty::Ack, dst_sid, ..self.base };
        let ack = Op::Ack(AckOp::default(), [0; AckOp::WORDS_MAX]);
        let mut bytes = wire::frame(&base, &ack, &[]);
        let plen = bytes.len() - wire::BASE_LEN;
        sealed::mark(&mut bytes, plen);
        sealed::set_counter(&mut bytes, counter);
        bytes.extend([counter as u8; TAG_LEN]);
        bytes
    }
}

/// What the node sends now.
fn sent(node: &mut Node, now: Moment) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    node.transmit(now, &mut |frame: &TxFrame<'_>| {
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        all.push(bytes);
        Tx::Sent
    });
    all
}

/// Bytes of the heap that a node takes with so many idle sessions.
fn bytes_with(sessions: usize, is_keyed: bool) -> i64 {
    let before = in_use();
    let (mut node, mut now) = (node(sessions, is_keyed), Moment(MS));
    let mut ring = is_keyed.then(|| ring(7, 2));
    for i in 0..sessions {
        now = now + MS;
        Opener::new(station(i), is_keyed).run(&mut node, now, ring.as_mut());
    }
    for _ in 0..100 {
        now = now + MS;
        drop(sent(&mut node, now));
    }
    let open = node.statistics().session_infos().filter(|s| s.state == "open").count();
    assert_eq!(open, sessions, "sessions open");
    in_use() - before
}

/// Goal: an idle session with keys takes at most 2 KiB more of the heap than one without. Method:
/// what a node holds more with 5,000 sessions than with one, of all heaps, that of the ciphers too.
#[test]
fn memory_per_sealed_peer() {
    const PEERS: usize = 5_000;
    if !is_alone("memory_per_sealed_peer") {
        return;
    }
    let each = |is_keyed| {
        let more = bytes_with(PEERS, is_keyed) - bytes_with(1, is_keyed);
        more as f64 / (PEERS - 1) as f64
    };
    let [clear, sealed] = [false, true].map(each);
    println!(
        "memory_per_sealed_peer: peers {PEERS} bytes per idle session {clear:.0} without keys, \
         {sealed:.0} with (bar 2048 more)"
    );
    assert!(sealed - clear <= 2048.0, "{clear:.0} bytes without keys, {sealed:.0} with");
}

/// Goal: what strangers make a node with a key hold is bounded. Method: OPENs of 10^5 stations, as
/// fast as they are looked at: not sealed; under another key; and under the node's, as somebody may
/// have recorded them, of which nobody answers. And as many forged frames of a session that is
/// open, which stays so.
#[test]
fn memory_under_attack() {
    const STATIONS: usize = 100_000;
    /// What docs/security.md tells.
    const MOST: i64 = 64 << 10;
    if !is_alone("memory_under_attack") {
        return;
    }
    let mut most = [0; 4];
    for (kind, most) in most.iter_mut().enumerate() {
        let (mut node, mut now) = (node(4096, true), Moment(MS));
        let mut ring = ring(7 + u8::from(kind == 1), 3);
        let live = Opener::new(station(STATIONS), true);
        let live_sid = match kind {
            3 => live.run(&mut node, now, Some(&mut ring)),
            _ => 0,
        };
        let before = in_use();
        for i in 0..STATIONS {
            now = now + MS / 16;
            let bytes = {
                let opener = Opener::new(station(i), kind > 0);
                match kind {
                    0 => wire::frame(&opener.base, &Op::Open(opener.open), &[]),
                    3 => live.forged(live_sid, i as u32),
                    _ => opener.offer(&mut ring).1,
                }
            };
            node.on_frame(now, &RxFrame::new(&bytes));
            drop(bytes);
            node.transmit(now, &mut |_: &TxFrame<'_>| Tx::Sent);
            *most = (in_use() - before).max(*most);
        }
        let c = node.counters();
        let seen = [c.rx_clear, c.rx_forged, c.tx_challenges + c.rx_open_limited, c.rx_forged];
        let seen = seen[kind];
        assert!(seen as usize > STATIONS - STATIONS / 10, "{seen} of kind {kind}");
        assert_eq!((c.sessions_opened, c.sessions_reset), (u64::from(kind == 3), 0));
    }
    println!("memory_under_attack: stations {STATIONS} bytes held {most:?} (bar {MOST})");
    assert!(most.iter().all(|&held| held <= MOST), "{most:?} bytes");
}
