//! What somebody who speaks the protocol well, and means harm, can take from the others.

use barewire_driver::frame::ETH_HDR_LEN;

use super::*;
use crate::psn::Psn;
use crate::rel::sent::WINDOW;
use crate::types::Tenant;
use crate::wire::{self, AckOp, Base, MsgMOp, MsgOp, Op, OpenOp, RndvOp, RstOp, RstReason, Ty};

/// A station that speaks to the second node of a pair, one packet at a time.
struct Puppet {
    station: u8,
    /// What the node calls the session.
    sid: u32,
    psn: u32,
    /// The next packet expected of the node.
    cack: u32,
}

impl Puppet {
    /// Opens a session.
    fn open(pair: &mut Pair, station: u8) -> Self {
        let mut puppet = Self { station, sid: 0, psn: 7000, cack: 0 };
        puppet.knock(pair, 900 + u64::from(station));
        pair.run(10_000);
        puppet.listen(pair);
        assert!(puppet.sid != 0, "no answer to an OPEN");
        puppet.put(pair, 0, &Op::Ping, &[]);
        puppet
    }

    /// Says OPEN in the life `inc`.
    fn knock(&self, pair: &mut Pair, inc: u64) {
        self.knock_with(pair, inc, 0);
    }

    fn knock_with(&self, pair: &mut Pair, inc: u64, cookie: u64) {
        let max_frame = pair.ends[1].node.port.frame_max;
        let (sid, epoch, window, grant) = (5, 1, 256, 64);
        let open = OpenOp { sid, epoch, inc, max_frame, window, grant, ..OpenOp::default() };
        self.put(pair, 0, &Op::Open(OpenOp { cookie, ..open }), &[]);
    }

    /// What the node answers to an OPEN.
    fn answer(&self, pair: &mut Pair) -> Option<OpenOp> {
        pair.run(10_000);
        let station = Station::at([2, 0, 0, 0, 0, self.station]);
        let mut heard = std::mem::take(&mut pair.stray);
        heard.retain(|bytes| bytes[..6] == station.mac.0);
        heard.iter().rev().find_map(|bytes| {
            let frame = RxFrame::new(bytes);
            OpenOp::parse(&frame, &Base::parse(&frame).ok()?).ok()
        })
    }

    /// A frame with the number `ahead` of the next. An OPEN has all the length that it announces.
    fn put(&self, pair: &mut Pair, ahead: u32, op: &Op, payload: &[u8]) {
        let node = &mut pair.ends[1].node;
        let base = Base {
            dst: node.port.station,
            src: Station::at([2, 0, 0, 0, 0, self.station]),
            ty: op.ty(),
            ar: false,
            rtx: false,
            ce: false,
            crc: node.port.far.has_crc(),
            dst_sid: self.sid,
            psn: Psn(self.psn.wrapping_add(ahead)),
            cack: Psn(self.cack),
            grant: 64,
            plen: 0,
        };
        let mut bytes = wire::frame(&base, op, payload);
        if base.ty == Ty::Open {
            bytes.resize(ETH_HDR_LEN + node.port.frame_max as usize, 0);
        }
        node.on_frame(pair.now, &RxFrame::new(&bytes));
    }

    /// The next packet.
    fn say(&mut self, pair: &mut Pair, op: &Op, payload: &[u8]) {
        self.put(pair, 0, op, payload);
        self.psn = self.psn.wrapping_add(1);
    }

    /// Takes what the node sent, and acknowledges it.
    fn listen(&mut self, pair: &mut Pair) {
        let station = Station::at([2, 0, 0, 0, 0, self.station]);
        let heard = std::mem::take(&mut pair.stray);
        for bytes in heard {
            let frame = RxFrame::new(&bytes);
            let Ok(base) = Base::parse(&frame) else { continue };
            if base.dst != station {
                pair.stray.push(bytes);
                continue;
            }
            match Op::parse(&frame, &base) {
                Ok(Op::Open(open)) => (self.sid, self.cack) = (open.sid, base.psn.0),
                Ok(_) if base.ty.is_reliable() => self.cack = base.psn.0.wrapping_add(1),
                _ => {}
            }
        }
        if self.sid != 0 {
            let newest = Psn(self.cack.wrapping_sub(1));
            let ack = AckOp { delay: 0, newest, count: 0, dups: 0, resent: false };
            self.put(pair, 0, &Op::Ack(ack, [0; AckOp::WORDS_MAX]), &[]);
        }
    }

    fn rndv(&mut self, pair: &mut Pair, n: u32, msg_len: u64) {
        let (dst_ep, src_ep, src_op, src_gen) = (end_number(pair), 1, n, 1);
        let (tagged, imm, tag) = (true, None, 5);
        let op = RndvOp { dst_ep, rx_ctx: 0, src_ep, tagged, imm, tag, msg_len, src_op, src_gen };
        self.say(pair, &Op::Rndv(op), &[]);
    }
}

fn end_number(pair: &Pair) -> u16 {
    let end = &pair.ends[1];
    end.node.addr_of(end.ep).unwrap().ep
}

/// Goal: who announces messages, acknowledges that they are asked for and never sends them takes
/// the window of all pulls from nobody, and the receives that wait for him end.
#[test]
fn announced_messages_that_never_come_hold_up_nobody_for_ever() {
    const LEN: usize = 256 << 10;
    let mut pair = Pair::new(9000, false);
    let mut puppet = Puppet::open(&mut pair, 9);
    for n in 0..24 {
        pair.recv(1, IoBuf::leaked(&vec![0; LEN]), 5, OpFlags::empty(), 100).unwrap();
        puppet.rndv(&mut pair, n, LEN as u64);
        pair.run(20_000);
        puppet.listen(&mut pair);
    }
    let half = pair.ends[1].node.settings.pull_window as u64 / 2;
    assert_eq!(
        pair.ends[1].node.statistics().levels().pull_bytes,
        half,
        "all that one peer may hold"
    );
    let (buf, look) = shared(2 * LEN);
    pair.recv(1, buf, 6, OpFlags::empty(), 7).unwrap();
    pair.send(0, IoBuf::leaked(&bytes(2 * LEN)), 6, OpFlags::empty(), 8).unwrap();
    pair.run(20_000_000);
    assert_eq!(pair.read(1).first().map(|c| c.op_context), Some(7), "somebody else's message");
    assert_eq!(contents(&look), bytes(2 * LEN));
    // It goes on to acknowledge, so it is never silent.
    let mut ended = 0;
    for _ in 0..60 {
        pair.run(10_000_000);
        puppet.listen(&mut pair);
        while let Ok(err) = pair.ends[1].node.receiving().cq_readerr(pair.ends[1].cq) {
            assert_eq!((err.err, err.cqe.op_context), (Error::HostUnreach, 100));
            ended += 1;
        }
    }
    assert_eq!((ended, pair.ends[1].node.statistics().levels().pulls), (24, 0));
}

/// Goal: who announces messages and acknowledges no END takes the last record of a pull from
/// nobody: a message of somebody else comes to the receive that waits for it. Method: empty
/// messages, which end at once, until ENDs that may not leave hold all records.
#[test]
fn ends_that_may_not_leave_hold_up_nobody() {
    let few = NodeSettings {
        tx_wr_max: 4,
        rx_wr_max: 4,
        unexpected_bytes: 16 << 10,
        ..NodeSettings::default()
    };
    let mut pair = Pair::of([end(1, 1500, false), end_with(2, 1500, false, few)]);
    let mut puppet = Puppet::open(&mut pair, 9);
    let mut taken = 0;
    loop {
        pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 100).unwrap();
        puppet.rndv(&mut pair, taken, 0);
        pair.run(5_000);
        if pair.read(1).is_empty() {
            break;
        }
        taken += 1;
    }
    assert!(taken > 70, "{taken} messages were taken");
    let (buf, look) = shared(100_000);
    pair.recv(1, buf, 6, OpFlags::empty(), 7).unwrap();
    pair.send(0, IoBuf::leaked(&bytes(100_000)), 6, OpFlags::empty(), 8).unwrap();
    pair.run(20_000_000);
    assert_eq!(pair.read(1).first().map(|c| c.op_context), Some(7));
    assert_eq!((contents(&look), pair.read(0).len()), (bytes(100_000), 1));
}

/// Goal: memory that was promised to a peer which has gone is for those who wait for some. Method:
/// as many sessions as there is first credit for, and one more, with a message that waits until
/// another session ends.
#[test]
fn credit_of_who_has_gone_is_for_who_waits() {
    let few = NodeSettings { unexpected_bytes: 16 << 10, ..NodeSettings::default() };
    let mut pair = Pair::of([end(1, 1500, false), end_with(2, 1500, false, few)]);
    let puppets: Vec<Puppet> = (20..24).map(|station| Puppet::open(&mut pair, station)).collect();
    assert_eq!(pair.ends[1].node.blocks.unpromised, 0);
    pair.send(0, IoBuf::leaked(&bytes(100)), 5, OpFlags::empty(), 8).unwrap();
    pair.run(20_000_000);
    assert_eq!(pair.read(0), [], "sent without credit");
    let puppet = &puppets[0];
    let rst = RstOp {
        echo_sid: 5,
        echo_psn: Psn(puppet.cack),
        life: wire::life_of(900 + u64::from(puppet.station)),
        victim_inc: 0,
        victim_epoch: 0,
        reason: RstReason::Closed,
        versions: wire::VERSIONS,
    };
    puppet.put(&mut pair, 0, &Op::Rst(rst), &[]);
    pair.run(1_000_000);
    assert_eq!(pair.read(0).len(), 1);
}

/// Goal: nobody takes the last of the memory for packets that came early. Method: more sessions
/// than fill it, each of which leaves out one packet.
#[test]
fn early_packets_of_some_leave_room_for_those_of_others() {
    let mut pair = Pair::new(1500, false);
    let msg = MsgOp { dst_ep: end_number(&pair), src_ep: 1, ..MsgOp::default() };
    for station in 20..32 {
        let puppet = Puppet::open(&mut pair, station);
        for ahead in 1..500 {
            puppet.put(&mut pair, ahead, &Op::Msg(msg), &[]);
        }
    }
    let reorder_buf = pair.ends[1].node.statistics().levels().reorder_buf;
    assert!((3000..4000).contains(&reorder_buf), "{reorder_buf} of 4,096 are kept");
    pair.drop = 4;
    for i in 0..20 {
        pair.recv(1, IoBuf::leaked(&[0; 100]), 9, OpFlags::empty(), i).unwrap();
        pair.send(0, IoBuf::leaked(&bytes(100)), 9, OpFlags::empty(), i).unwrap();
    }
    pair.run(400_000_000);
    assert_eq!(pair.read(1).len(), 20);
}

/// Goal: a stranger's OPEN costs as much with many peers as with few, whether one of them can be
/// forgotten or not. Method: full tables, and how far each further OPEN has looked.
#[test]
fn an_open_of_a_stranger_does_not_walk_the_table() {
    const PEERS: u32 = 4096;
    for named in [0, 1, PEERS] {
        let (peer_max, incarnation, seed) = (PEERS as usize, 1, 1);
        let settings = NodeSettings { incarnation, seed, peer_max, ..NodeSettings::default() };
        let mut node = Node::new(settings, &caps(1, 1500, false)).unwrap();
        let av = node.sessions().av_open(1).unwrap();
        let station = |n: u32| {
            let [a, b, c, d] = n.to_be_bytes();
            Station::at([6, 0, a, b, c, d])
        };
        for n in 0..named {
            let addr = crate::types::EpAddr { station: station(n), ep: 1, incarnation: 0 };
            node.sessions().av_insert(Instant(1000), av, addr).unwrap();
        }
        for n in named..3 * PEERS {
            let before = node.by_station.evict_hand;
            let now = Instant(u64::from(n + 1) * 1_000_000);
            if let Some(cookie) = open_from(&mut node, now, station(n), 0) {
                assert_eq!(open_from(&mut node, now, station(n), cookie), None);
            }
            let looks = (node.by_station.evict_hand + PEERS - before) % PEERS;
            assert!(looks <= 16, "OPEN {n} looked at {looks} peers");
        }
        assert_eq!(node.statistics().levels().peers, peer_max);
        let last = node.by_station.get(&node.peers, station(3 * PEERS - 1), Tenant::NONE);
        assert_eq!(last.is_some(), named < PEERS, "{named} of the peers stay");
    }
}

/// A first OPEN of the station `src`, and the cookie that it is asked for, if any.
fn open_from(node: &mut Node, now: Instant, src: Station, cookie: u64) -> Option<u64> {
    let base = Base {
        dst: node.port.station,
        src,
        ty: Ty::Open,
        ar: false,
        rtx: false,
        ce: false,
        crc: node.port.far.has_crc(),
        dst_sid: 0,
        psn: Psn(1),
        cack: Psn(0),
        grant: 0,
        plen: 0,
    };
    let (sid, epoch, inc, max_frame, window) = (5, 1, 77, 1500, 256);
    let op = OpenOp { sid, epoch, inc, max_frame, window, cookie, ..OpenOp::default() };
    let bytes = wire::frame(&base, &Op::Open(op), &[]);
    node.on_frame(now, &RxFrame::new(&bytes));
    let mut answers = Vec::new();
    node.transmit(now, &mut |frame: &TxFrame<'_>| {
        let mut bytes = vec![0; frame.len()];
        frame.copy_to(&mut bytes);
        answers.push(bytes);
        Tx::Sent
    });
    // What is pushed out of a full table is told so.
    answers.retain(|answer| answer[..6] == src.mac.0);
    let answer = answers.first()?;
    assert!(answers.len() == 1 && answer.len() <= bytes.len(), "more than was received");
    let frame = RxFrame::new(answer);
    let open = OpenOp::parse(&frame, &Base::parse(&frame).ok()?).ok()?;
    open.is_challenge().then_some(open.cookie)
}

/// Goal: a message of which pieces are still to come is placed where its multi-receive has room for
/// it, behind what came before it.
#[test]
fn half_a_message_goes_behind_the_one_before_in_a_multi_receive() {
    let mut pair = Pair::new(1500, false);
    let mut puppet = Puppet::open(&mut pair, 9);
    let (dst_ep, src_ep) = (end_number(&pair), 1);
    puppet.say(&mut pair, &Op::Msg(MsgOp { dst_ep, src_ep, ..MsgOp::default() }), &bytes(100));
    let data = bytes(2000);
    let piece = |offset: u64| {
        let (tagged, imm, tag, msg_len) = (false, None, 0, 2000);
        Op::MsgM(MsgMOp { dst_ep, rx_ctx: 0, src_ep, tagged, imm, tag, msg_len, offset })
    };
    puppet.say(&mut pair, &piece(0), &data[..1200]);
    let (buf, look) = shared(8192);
    pair.recv(1, buf, u64::MAX, OpFlags::MULTI_RECV, 3).unwrap();
    puppet.say(&mut pair, &piece(1200), &data[1200..]);
    let got = pair.read(1);
    assert_eq!(got.iter().map(|c| c.len).collect::<Vec<_>>(), [100, 2000]);
    assert_eq!(got[1].buf - got[0].buf, 100);
    assert_eq!(&contents(&look)[..100], bytes(100));
    assert_eq!(&contents(&look)[100..2100], data);
}

/// Goal: what is meant for one life of a peer never reaches the next. Method: the peer restarts
/// after we answered its OPEN and before it said anything else, while a message for it waits.
#[test]
fn a_message_for_a_life_that_never_confirmed_ends_with_it() {
    let mut pair = Pair::new(1500, false);
    let puppet = Puppet { station: 9, sid: 0, psn: 7000, cack: 0 };
    puppet.knock(&mut pair, 901);
    pair.run(10_000);
    let end = &mut pair.ends[1];
    let station = Station::at([2, 0, 0, 0, 0, 9]);
    let addr = crate::types::EpAddr { station, ep: 1, incarnation: 901 };
    end.peer = end.node.sessions().av_insert(pair.now, end.av, addr).unwrap();
    pair.send(1, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 4).unwrap();
    // Anybody can have sent an OPEN of another life.
    puppet.knock(&mut pair, 902);
    let challenge = puppet.answer(&mut pair).unwrap();
    assert!(challenge.is_challenge());
    let asked = (challenge.target_inc, challenge.echo_sid, challenge.echo_epoch);
    assert_eq!(asked, (902, 5, 1), "the OPEN that it is for");
    assert!(pair.ends[1].node.cqs.ready(pair.ends[1].cq).unwrap() == 0, "ended by a stranger");
    puppet.knock_with(&mut pair, 902, challenge.cookie);
    let err = pair.read_err(1);
    assert_eq!((err.err, err.cqe.op_context), (Error::ConnReset, 4));
    assert_eq!(err.prov_errno, crate::types::ProvErrno::NotExecuted);
}

/// Goal: a piece that is not the next of its message, or of a message of another length, is
/// refused, and nothing of it is placed.
#[test]
fn a_piece_of_another_message_is_refused() {
    for (offset, msg_len) in [(1199, 2000), (1201, 2000), (1200, 1999), (1200, 2001), (1199, 1999)]
    {
        let mut pair = Pair::new(1500, false);
        let mut puppet = Puppet::open(&mut pair, 9);
        let (buf, look) = shared(4000);
        pair.recv(1, buf, u64::MAX, OpFlags::empty(), 3).unwrap();
        let (dst_ep, src_ep) = (end_number(&pair), 1);
        let piece = |offset: u64, msg_len: u64| {
            let (rx_ctx, tagged, imm, tag) = (0, false, None, 0);
            Op::MsgM(MsgMOp { dst_ep, rx_ctx, src_ep, tagged, imm, tag, msg_len, offset })
        };
        puppet.say(&mut pair, &piece(0, 2000), &[1; 1200]);
        puppet.say(&mut pair, &piece(offset, msg_len), &[2; 700]);
        let what = format!("{offset} of {msg_len}");
        assert_eq!(pair.ends[1].node.counters().rx_refused, 1, "{what}");
        assert_eq!(contents(&look), [[1; 1200].as_slice(), &[0xEE; 2800]].concat(), "{what}");
        assert_eq!(pair.read(1).len(), 0, "{what}");
    }
}

/// The reset that proves most: it echoes the newest packet of the first node, and names that node's
/// incarnation and the session's epoch.
fn proven_reset(pair: &Pair) -> RstOp {
    let node = &pair.ends[0].node;
    let peer = node.peers.iter().next().unwrap().1;
    RstOp {
        echo_sid: node.openings.remote_sid(peer),
        echo_psn: peer.snd.nxt,
        life: wire::life_of(peer.inc),
        victim_inc: node.settings.incarnation,
        victim_epoch: peer.epoch,
        reason: RstReason::Closed,
        versions: wire::VERSIONS,
    }
}

/// Hands the first node this reset from the second one's station. Sessions that it ended, and
/// resets that were refused.
fn reset(pair: &mut Pair, rst: &RstOp) -> (u64, u64) {
    let (now, src) = (pair.now, pair.ends[1].node.port.station);
    let node = &mut pair.ends[0].node;
    let before = (node.counters.sessions_reset, node.counters.rx_bad_rst);
    node.sessions().on_rst(now, src, rst);
    (node.counters.sessions_reset - before.0, node.counters.rx_bad_rst - before.1)
}

/// Opens the session of a pair, and leaves packets of the first node in flight, whose number is
/// returned.
fn with_packets_in_flight(pair: &mut Pair) -> u32 {
    pair.recv(1, IoBuf::leaked(&[0; 8]), 1, OpFlags::empty(), 1).unwrap();
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
    pair.run(50_000_000);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 3).unwrap();
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    let in_flight = node.peers.iter().next().unwrap().1.snd.in_flight();
    assert_ne!(in_flight, 0);
    in_flight
}

/// Goal: a reset ends an open session only if it echoes a packet that this node may have sent, or
/// names both the incarnation and the epoch (S4). Method: one proof is changed at a time.
#[test]
fn a_reset_ends_only_a_session_that_it_proves_to_know() {
    type Change = fn(&mut RstOp);
    const ENDS: (u64, u64) = (1, 0);
    const BAD: (u64, u64) = (0, 1);
    let echo = |rst: &mut RstOp, back: u32| {
        rst.victim_inc = 0;
        rst.echo_psn = Psn(rst.echo_psn.0.wrapping_sub(back));
    };
    let cases: [(&str, Change, (u64, u64)); 7] = [
        ("both", |_| (), ENDS),
        ("names", |rst| rst.echo_sid = 0, ENDS),
        ("nothing", |rst| (rst.echo_sid, rst.victim_inc) = (0, 0), BAD),
        ("another epoch", |rst| (rst.echo_sid, rst.victim_epoch) = (0, rst.victim_epoch + 1), BAD),
        ("another life", |rst| (rst.echo_sid, rst.victim_inc) = (0, rst.victim_inc + 1), BAD),
        ("another session", |rst| (rst.echo_sid, rst.victim_inc) = (rst.echo_sid + 1, 0), BAD),
        ("life unknown", |rst| rst.life += 1, ENDS),
    ];
    for lossless in [true, false] {
        for (what, change, expected) in cases {
            let mut pair = Pair::new(1500, lossless);
            with_packets_in_flight(&mut pair);
            let mut rst = proven_reset(&pair);
            change(&mut rst);
            assert_eq!(reset(&mut pair, &rst), expected, "{what}");
        }
        for (over, expected) in [(None, ENDS), (Some(0), ENDS), (Some(1), BAD), (Some(9999), BAD)] {
            let mut pair = Pair::new(1500, lossless);
            let in_flight = with_packets_in_flight(&mut pair);
            let mut rst = proven_reset(&pair);
            echo(&mut rst, over.map_or(0, |over: u32| in_flight + WINDOW + over));
            assert_eq!(reset(&mut pair, &rst), expected, "{over:?} beyond the window");
        }
    }
}

/// Goal: a session that is not open has no packet to echo, one that has ended is not reset again,
/// and a peer whose incarnation is known and unchanged has not restarted.
#[test]
fn a_reset_of_no_open_session_has_to_name_it() {
    let mut pair = Pair::new(1500, false);
    pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 2).unwrap();
    let End { node, out, .. } = &mut pair.ends[0];
    node.transmit(pair.now, &mut sink(out));
    let echoes = RstOp { victim_inc: 0, ..proven_reset(&pair) };
    assert_eq!((echoes.echo_sid, reset(&mut pair, &echoes)), (0, (0, 1)), "an OPEN is under way");

    let mut pair = Pair::new(1500, false);
    with_packets_in_flight(&mut pair);
    let named = proven_reset(&pair);
    let unnamed = RstOp { reason: RstReason::WrongIncarnation, ..named };
    assert_eq!(reset(&mut pair, &unnamed), (0, 1), "the incarnation that is known");
    let (now, other) = (pair.now, pair.ends[1].node.port.station);
    pair.ends[0].node.sessions().drop_session(now, other);
    assert_eq!(reset(&mut pair, &named), (0, 1), "the session has ended");

    let mut pair = Pair::new(1500, false);
    with_packets_in_flight(&mut pair);
    let restarted = RstOp { life: unnamed.life + 1, ..unnamed };
    assert_eq!(reset(&mut pair, &restarted), (1, 0), "another incarnation");
}

/// Goal: under a key a reset has to name the incarnation and the epoch: an echo alone ends nothing.
#[test]
fn a_sealed_session_is_reset_by_its_names() {
    use crate::seal::{Keyring, Mode, PreSharedKey};
    for (names, expected) in [(true, (1, 0)), (false, (0, 0))] {
        let ends = [1, 2].map(|station| {
            let key = PreSharedKey::with_key_frames(&[7; 32], Mode::Encrypted, 20).unwrap();
            let keys = Keyring::new(vec![key], [station; 32]);
            end_with(station, 1500, false, NodeSettings { keys, ..NodeSettings::default() })
        });
        let mut pair = Pair::of(ends);
        with_packets_in_flight(&mut pair);
        let proven = proven_reset(&pair);
        let rst = match names {
            true => RstOp { echo_sid: 0, ..proven },
            false => RstOp { victim_inc: 0, ..proven },
        };
        assert_eq!(reset(&mut pair, &rst), expected, "names: {names}");
    }
}
