//! Groups whose sessions end and whose tables are full. Their algorithms are simulated elsewhere
//! (`tests/sim/coll.rs`).

use barewire_driver::mem::Span;
use barewire_driver::mem::atomic::Datatype;
use barewire_driver::port::Presence;

use super::*;
use crate::idx::PeerIdx;
use crate::node::ep::SIDE;

/// An endpoint at each end of a pair with the addresses of both, in the order of the ends.
pub(super) struct Team {
    pub(super) pair: Pair,
    pub(super) eps: [EpId; 2],
    pub(super) members: [[FiAddr; 2]; 2],
}

impl Team {
    pub(super) fn new(settings: NodeSettings) -> Self {
        Self::of([1, 2].map(|station| end_with(station, 1500, false, settings.clone())))
    }

    fn of(ends: [End; 2]) -> Self {
        let mut pair = Pair::of(ends);
        let caps = Caps::MSG | Caps::TAGGED | Caps::COLLECTIVE;
        let eps = pair.ends.each_mut().map(|End { node, cq, av, .. }| {
            open_ep(node, (*cq, *av), EpAttr { caps, ..EpAttr::default() })
        });
        let addrs = [0, 1].map(|i| pair.ends[i].node.addr_of(eps[i]).unwrap());
        let members = pair.ends.each_mut().map(|End { node, av, .. }| {
            addrs.map(|addr| node.sessions().av_insert(Instant(1), *av, addr).unwrap())
        });
        Self { pair, eps, members }
    }

    pub(super) fn join(&mut self, i: usize, model: JoinModel) -> Result<GroupId> {
        let req = JoinReq { members: self.members[i].to_vec(), model, ..JoinReq::default() };
        self.pair.ends[i].node.collectives().coll_join(self.pair.now, self.eps[i], &req)
    }

    fn barrier(&mut self, i: usize, group: GroupId) {
        let (role, context, flags) = (None, 9, OpFlags::empty());
        let call = CollCall::barrier(group);
        let req = CollReq { call, role, context, flags };
        let lend = |_, _| (Span::EMPTY, Span::EMPTY);
        self.pair.ends[i].node.coll_post(self.eps[i], &req, lend).unwrap();
    }
}

/// Stations of members that are never there.
fn nobody(rank: u16) -> Station {
    let [a, b] = rank.to_be_bytes();
    Station::at([2, 7, 0, 0, a, b])
}

/// A team whose first end has joined a group of `n`: itself at rank 0, the second end at rank
/// `other`, and else members that are never there.
fn large_group(n: u16, other: u16) -> (Team, GroupId) {
    let mut team = Team::new(NodeSettings::default());
    let [own, second] = team.members[0];
    let End { node, av, .. } = &mut team.pair.ends[0];
    let member = |rank| match rank {
        0 => own,
        rank if rank == other => second,
        rank => {
            let addr = EpAddr { station: nobody(rank), ep: 3, incarnation: 7 };
            node.sessions().av_insert(Instant(1), *av, addr).unwrap()
        }
    };
    let members = (0..n).map(member).collect();
    let req = JoinReq { members, model: JoinModel::Key(1), ..JoinReq::default() };
    let group = node.collectives().coll_join(team.pair.now, team.eps[0], &req).unwrap();
    assert_eq!(node.coll.check(group), Ok(()));
    (team, group)
}

/// Ranks whom the first end of a team has something to tell of a group: ABORT (1) or LEAVE (2).
fn told_of(team: &Team, what: u64, other: u16) -> Vec<u16> {
    let [end, second] = &team.pair.ends;
    let is_told = |wr: &crate::node::ops::TxWr| wr.tag & 0xffff == 1 << 12 | what;
    let rank = |station| match station == second.node.port.station {
        true => other,
        false => (1..1000).find(|&rank| nobody(rank) == station).unwrap(),
    };
    let told = end.node.tx.wrs.iter().filter(|(_, wr)| is_told(wr));
    let mut ranks: Vec<u16> = told.map(|(_, wr)| rank(end.node.peers[wr.peer].station())).collect();
    ranks.sort_unstable();
    ranks
}

/// Goal: in a small group everybody is told that it is over; in a large one those a power of two
/// apart, and who leaves tells all with whom it has a session. Method: a group that is given up
/// while a call is under way, or left while none is; the second end has a session.
#[test]
fn members_are_notified_of_the_end_of_a_group() {
    const OTHER: u16 = 37;
    let apart: Vec<u16> = vec![1, 2, 4, 8, 16, 32, 64, 100 - 64, 100 - 32, 84, 92, 96, 98, 99];
    for (n, is_busy) in [(64, true), (64, false), (100, true), (100, false)] {
        let (mut team, group) = large_group(n, OTHER);
        team.pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
        team.pair.run(1_000_000);
        assert_eq!(team.pair.read(0).len(), 1, "a session");
        if is_busy {
            team.barrier(0, group);
        }
        let now = team.pair.now;
        team.pair.ends[0].node.collectives().coll_close(now, group).unwrap();
        let mut expected = if n == 64 { (1..64).collect() } else { apart.clone() };
        if !is_busy && n > 64 {
            expected.push(OTHER);
        }
        expected.sort_unstable();
        let what = if is_busy { 1 } else { 2 };
        assert_eq!(told_of(&team, what, OTHER), expected, "{n} members, busy: {is_busy}");
        assert_eq!(told_of(&team, 3 - what, OTHER), [0; 0]);
    }
}

/// Goal: the blocks of all members together are as long as a message at most.
#[test]
fn a_call_is_as_long_as_a_message_at_most() {
    const BLOCK: u64 = 1 << 32;
    for (n, error) in [(256, None), (257, Some(Error::MsgTooLong))] {
        let (mut team, group) = large_group(n, 1);
        let what = CollWord::new(CollKind::Alltoall, None, Some(Datatype::Uint8));
        let call = CollCall { what, group, count: BLOCK, root: 0 };
        let req = CollReq { call, role: None, context: 9, flags: OpFlags::empty() };
        let mut asked = None;
        let lend = |source, result| {
            asked = Some((source, result));
            (Span::EMPTY, Span::EMPTY)
        };
        let posted = team.pair.ends[0].node.coll_post(team.eps[0], &req, lend);
        let short = Error::Invalid("a buffer is too short");
        assert_eq!(posted, Err(error.unwrap_or(short)), "{n} members");
        let all = (BLOCK * u64::from(n)) as usize;
        assert_eq!(asked, error.is_none().then_some((all, all)), "{n} members");
    }
}

/// Goal: who waits in a call for a member that was never heard of learns within T_dead, and no
/// question later, that it is not there. Method: a broadcast, of which a member only receives.
#[test]
fn a_member_that_was_never_heard_of_is_found_dead() {
    let (mut team, group) = large_group(2, 1);
    let End { node, peer, .. } = &mut team.pair.ends[0];
    let what = CollWord::new(CollKind::Broadcast, None, Some(Datatype::Uint8));
    let root = team.members[0][1];
    let call = CollCall { what, group, count: 8, root };
    let req = CollReq { call, role: None, context: 9, flags: OpFlags::empty() };
    let lend = |_, _| (Span::EMPTY, IoBuf::leaked(&[7; 8]).take_one().unwrap());
    node.coll_post(team.eps[0], &req, lend).unwrap();
    assert_ne!(*peer, root, "another name of it");
    team.pair.drop = 1;
    team.pair.run(560_000_000);
    let err = team.pair.read_err(0);
    assert_eq!((err.cqe.op_context, err.err), (9, Error::HostUnreach));
}

/// Goal: calls of another group go on when a group is given up, on the same endpoints.
#[test]
fn a_group_that_is_given_up_takes_no_calls_of_another_with_it() {
    let mut team = Team::new(NodeSettings::default());
    let [left, kept] = [1, 2].map(|key| [0, 1].map(|i| team.join(i, JoinModel::Key(key)).unwrap()));
    team.barrier(0, left[0]);
    team.barrier(0, kept[0]);
    team.pair.run(5_000_000);
    let now = team.pair.now;
    team.pair.ends[0].node.collectives().coll_close(now, left[0]).unwrap();
    assert_eq!(team.pair.read_err(0).err, Error::Canceled);
    team.pair.run(5_000_000);
    team.barrier(1, kept[1]);
    team.pair.run(5_000_000);
    for (i, group) in kept.into_iter().enumerate() {
        assert_eq!(team.pair.ends[i].node.coll.check(group), Ok(()), "{i}");
        assert_eq!(team.pair.read(i).len(), 1, "the barrier of {i}");
    }
    assert_eq!(team.pair.ends[1].node.coll.check(left[1]), Err(Error::Canceled));
}

/// Goal: what comes of a group that was left holds no memory, though the endpoint is in another.
#[test]
fn late_messages_of_a_left_group_are_dropped() {
    let mut team = Team::new(NodeSettings::default());
    let [left, kept] = [1, 2].map(|key| [0, 1].map(|i| team.join(i, JoinModel::Key(key)).unwrap()));
    (0..2).for_each(|i| team.barrier(i, kept[i]));
    team.pair.run(5_000_000);
    assert_eq!([0, 1].map(|i| team.pair.read(i).len()), [1, 1]);
    // It is called while the other end leaves.
    team.barrier(1, left[1]);
    let now = team.pair.now;
    let End { node, out, .. } = &mut team.pair.ends[1];
    node.transmit(now, &mut sink(out));
    assert!(!out.is_empty());
    team.pair.ends[0].node.collectives().coll_close(now, left[0]).unwrap();
    team.pair.run(5_000_000);
    assert_eq!(team.pair.read_err(1).err, Error::ConnRefused);
    assert_eq!(team.pair.ends[0].node.statistics().levels().unexpected, 0);
    (0..2).for_each(|i| team.barrier(i, kept[i]));
    team.pair.run(5_000_000);
    assert_eq!([0, 1].map(|i| team.pair.read(i).len()), [1, 1]);
}

/// Goal: that a group was given up is known to who joins it later, however often its members tell
/// of another one.
#[test]
fn an_abandoned_group_is_recorded_once() {
    let mut team = Team::new(NodeSettings::default());
    let given_up = team.join(1, JoinModel::Key(3)).unwrap();
    team.barrier(1, given_up);
    let now = team.pair.now;
    team.pair.ends[1].node.collectives().coll_close(now, given_up).unwrap();
    team.pair.run(5_000_000);
    let own = team.pair.ends[0].node.addr_of(team.eps[0]).unwrap();
    let End { node, av, .. } = &mut team.pair.ends[1];
    let dest = node.sessions().av_insert(now, *av, EpAddr { ep: own.ep ^ SIDE, ..own }).unwrap();
    for context in 0..300 {
        // ABORT of group 7.
        let (tag, data) = (7 << 32 | 1 << 12 | 1, 0);
        let (kind, buf, flags) = (MsgKind::Tagged, IoBuf::EMPTY, OpFlags::REMOTE_CQ_DATA);
        let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion: true };
        team.pair.ends[1].node.post_send(team.pair.now, team.eps[1], req).unwrap();
        team.pair.run(20_000);
    }
    let late = team.join(0, JoinModel::Key(3)).unwrap();
    assert_eq!(team.pair.ends[0].node.coll.check(late), Err(Error::Canceled));
}

/// Goal: a name of a group in which the bit of joins is set is none. Method: the words in which a
/// member names the group are changed on their way.
#[test]
fn a_group_has_no_name_of_a_join() {
    const JOIN: u64 = 1 << 31;
    // Name, hash and its complement, no layout.
    let is_words = |b: &[u8]| {
        let are_alike = b[8..16].iter().zip(&b[16..24]).all(|(a, b)| *a == !*b);
        are_alike && b[..8] == [0; 8] && b[24..32] == [0; 8] && b[32..40] == [0xff; 8]
    };
    for name in [JOIN - 1, JOIN, JOIN + 1, 1 << 32] {
        let settings = NodeSettings { crc: Some(false), ..NodeSettings::default() };
        let mut team = Team::new(settings);
        let groups = [0, 1].map(|i| team.join(i, JoinModel::Collective(1)).unwrap());
        let mut changed = 0;
        for _ in 0..1000 {
            for i in 0..2 {
                let End { node, out, .. } = &mut team.pair.ends[i];
                node.transmit(team.pair.now, &mut sink(out));
                for mut bytes in std::mem::take(out) {
                    let at = bytes.windows(40).position(is_words).filter(|_| i == 1);
                    if let Some(at) = at {
                        bytes[at..at + 8].copy_from_slice(&name.to_le_bytes());
                        changed += 1;
                    }
                    team.pair.ends[1 - i].node.on_frame(team.pair.now, &RxFrame::new(&bytes));
                }
            }
            team.pair.now = team.pair.now + 5_000;
        }
        assert_eq!(changed, 1, "{name:#x}");
        let result = team.pair.ends[0].node.coll.event().unwrap().result;
        assert_eq!(result.is_ok(), name < JOIN, "{name:#x}: {result:?}");
        assert_eq!(team.pair.ends[0].node.coll.check(groups[0]), result, "{name:#x}");
    }
}

/// A session that ended before a group was joined says nothing of its members.
#[test]
fn a_group_is_not_ended_by_what_ended_before_it() {
    let mut team = Team::new(NodeSettings::default());
    team.pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
    team.pair.run(1_000_000);
    assert_eq!(team.pair.read(0).len(), 1);
    let now = team.pair.now;
    for end in &mut team.pair.ends {
        end.node.sessions().end_session(now, PeerIdx::of(0), EndReason::Died);
    }
    let groups = [0, 1].map(|i| team.join(i, JoinModel::Key(3)).unwrap());
    (0..2).for_each(|i| team.barrier(i, groups[i]));
    team.pair.run(5_000_000);
    for (i, group) in groups.into_iter().enumerate() {
        assert_eq!(team.pair.ends[i].node.coll.check(group), Ok(()));
        assert_eq!(team.pair.read(i).len(), 1, "the barrier of {i}");
    }
}

/// Goal: what a member says of a join in the next session with it stays when the end of the one
/// before is looked at, also if both came in one burst; what it had said before goes. Method: its
/// frames come without a turn between.
#[test]
fn a_join_of_the_next_session_outlives_the_one_before() {
    for is_next in [true, false] {
        let mut team = Team::new(NodeSettings::default());
        team.join(0, JoinModel::Key(9)).unwrap();
        team.pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).unwrap();
        team.pair.run(1_000_000);
        assert_eq!(team.pair.read(0).len(), 1, "a session");
        while team.pair.ends[0].node.coll.event().is_some() {}
        let End { node, av, .. } = &mut team.pair.ends[0];
        let p = node.avs[av.0.idx()].av.lookup(team.members[0][1]).unwrap().peer;
        if is_next {
            node.coll.peer_lost(p, Error::ConnReset);
        }
        team.join(1, JoinModel::Collective(1)).unwrap();
        let (mut came, now) = (0, team.pair.now);
        for _ in 0..4 {
            let End { node, out, .. } = &mut team.pair.ends[1];
            node.transmit(now, &mut sink(out));
            for bytes in std::mem::take(out) {
                team.pair.ends[0].node.on_frame(now, &RxFrame::new(&bytes));
                came += 1;
            }
        }
        assert_ne!((came, team.pair.ends[0].node.statistics().levels().unexpected), (0, 0));
        if !is_next {
            team.pair.ends[0].node.coll.peer_lost(p, Error::ConnReset);
        }
        let group = team.join(0, JoinModel::Collective(1)).unwrap();
        team.pair.run(5_000_000);
        assert_eq!(team.pair.ends[0].node.coll.check(group).is_ok(), is_next);
    }
}

/// Goal: a program that joins groups and leaves them for as long as it runs, each with another key,
/// takes no more memory; a key that is used again stands for another group, also while the one
/// before is open.
#[test]
fn groups_that_were_left_are_forgotten_at_last() {
    let mut team = Team::new(NodeSettings::default());
    let own = team.members[0][0];
    let req =
        |key| JoinReq { members: vec![own], model: JoinModel::Key(key), ..JoinReq::default() };
    let End { node, .. } = &mut team.pair.ends[0];
    let (now, ep) = (Instant(2), team.eps[0]);
    let kept = node.collectives().coll_join(now, ep, &req(7)).unwrap();
    for key in 0..70_000 {
        let group = node.collectives().coll_join(now, ep, &req(key)).unwrap();
        assert_eq!(node.coll.check(group), Ok(()), "{key}");
        node.collectives().coll_close(now, group).unwrap();
        while node.coll.event().is_some() {}
    }
    assert_eq!(node.coll.counted_joins(), (1 << 16) + 1, "and the one that is open");
    let again = node.collectives().coll_join(now, ep, &req(7)).unwrap();
    assert_eq!([kept, again].map(|group| node.coll.check(group)), [Ok(()); 2]);
    for group in [kept, again] {
        node.collectives().coll_close(now, group).unwrap();
    }
    let again = node.collectives().coll_join(now, ep, &req(7)).unwrap();
    assert_eq!(node.coll.check(again), Ok(()), "no group that was left has its name");
}

/// Whoever leaves a group tells the others, also if it has no room to send at that time.
#[test]
fn a_member_that_leaves_is_heard_later_if_it_cannot_send_now() {
    let settings = NodeSettings { tx_wr_max: 8, ..NodeSettings::default() };
    let mut team = Team::new(settings);
    let groups = [0, 1].map(|i| team.join(i, JoinModel::Collective(1)).unwrap());
    team.pair.run(5_000_000);
    for (i, group) in groups.into_iter().enumerate() {
        assert_eq!(team.pair.ends[i].node.coll.check(group), Ok(()));
    }
    let mut posted = 0;
    while team.pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1).is_ok() {
        posted += 1;
    }
    assert_eq!(posted, 8, "the table is full");
    let now = team.pair.now;
    team.pair.ends[0].node.collectives().coll_close(now, groups[0]).unwrap();
    team.barrier(1, groups[1]);
    team.pair.run(5_000_000);
    assert_eq!(team.pair.ends[1].node.coll.check(groups[1]), Err(Error::ConnRefused));
    assert_eq!(team.pair.read_err(1).cqe.op_context, 9);
}

/// A member's side is asked by whom it does not know of a group that it never joined, again and
/// again, and the other end takes none of the answers: requests are left for everybody else.
#[test]
fn queries_without_a_reader_of_the_answers_use_up_no_requests() {
    let settings = NodeSettings { tx_wr_max: 64, unexpected_bytes: 1 << 16, ..Default::default() };
    let mut team = Team::new(settings);
    let own = team.pair.ends[0].node.addr_of(team.eps[0]).unwrap();
    let End { node, av, .. } = &mut team.pair.ends[1];
    let side = EpAddr { ep: own.ep ^ SIDE, ..own };
    let dest = node.sessions().av_insert(Instant(1), *av, side).unwrap();
    for gid in 1..1000_u64 {
        let (tag, data) = (gid << 32 | 1 << 12 | 3, 1 << 32);
        let (kind, buf, flags) = (MsgKind::Tagged, IoBuf::EMPTY, OpFlags::REMOTE_CQ_DATA);
        let (context, no_completion) = (gid, true);
        let req = SendReq { kind, buf, dest, tag, data, context, flags, no_completion };
        team.pair.ends[1].node.post_send(team.pair.now, team.eps[1], req).unwrap();
        team.pair.run(20_000);
    }
    let node = &team.pair.ends[0].node;
    assert!(node.counters().rx_coll_unknown == 0 && !node.tx.wrs.is_empty(), "answers wait");
    assert_eq!(team.pair.send(0, IoBuf::leaked(&[1; 8]), 1, OpFlags::empty(), 1), Ok(()));
}

/// Goal: a member that gives a group up while a message to it is half there takes the rest: its
/// sender learns why from what it is told of the group, and not from a send that fails.
#[test]
fn a_message_that_is_half_there_is_taken_when_its_group_is_given_up() {
    let mut team = Team::new(NodeSettings::default());
    let groups = [0, 1].map(|i| team.join(i, JoinModel::Collective(1)).unwrap());
    team.pair.run(5_000_000);
    let root = team.members.map(|members| members[0]);
    for i in [1, 0] {
        let what = CollWord::new(CollKind::Broadcast, None, Some(Datatype::Uint8));
        let call = CollCall { what, group: groups[i], count: 4000, root: root[i] };
        let req = CollReq { call, role: None, context: 9, flags: OpFlags::empty() };
        let lend = |_, _| (Span::EMPTY, IoBuf::leaked(&[7; 4000]).take_one().unwrap());
        team.pair.ends[i].node.coll_post(team.eps[i], &req, lend).unwrap();
    }
    while team.pair.ends[1].node.reassemblies.is_empty() {
        for i in [0, 1] {
            let End { node, out, .. } = &mut team.pair.ends[i];
            node.transmit(team.pair.now, &mut sink(out));
            let bytes = out.pop_front();
            if let Some(bytes) = bytes {
                team.pair.ends[1 - i].node.on_frame(team.pair.now, &RxFrame::new(&bytes));
            }
        }
        team.pair.now = team.pair.now + 5_000;
        assert!(team.pair.now < Instant(100_000_000), "the message does not begin");
    }
    let (now, to) = (team.pair.now, &mut team.pair.ends[1]);
    to.node.collectives().coll_close(now, groups[1]).unwrap();
    team.pair.run(5_000_000);
    assert_eq!(team.pair.ends[1].node.counters().rx_refused, 0);
    let err = team.pair.read_err(0);
    assert_eq!((err.cqe.op_context, err.err), (9, Error::Canceled));
    assert_eq!(team.pair.ends[0].node.coll.check(groups[0]), Err(Error::Canceled));
    assert!(team.pair.ends[1].node.reassemblies.is_empty());
}

/// Goal: an address of an earlier life of a member, which is still in the vector, ends nothing of
/// the present one: a join that names it is refused, and one that names the present life goes on.
#[test]
fn a_join_with_an_address_of_an_earlier_life_ends_nothing() {
    let mut team = Team::new(NodeSettings::default());
    let other = team.pair.ends[1].node.addr_of(team.eps[1]).unwrap();
    let earlier = EpAddr { incarnation: other.incarnation ^ 1, ..other };
    let End { node, av, .. } = &mut team.pair.ends[0];
    let [earlier, present] =
        [earlier, other].map(|a| node.sessions().av_insert(Instant(1), *av, a).unwrap());
    let own = team.members[0][0];
    team.members[0] = [own, present];
    let groups = [0, 1].map(|i| team.join(i, JoinModel::Collective(1)).unwrap());
    team.pair.run(5_000_000);
    team.members[0] = [own, earlier];
    for model in [JoinModel::Collective(1), JoinModel::Key(1)] {
        assert_eq!(team.join(0, model), Err(Error::ConnReset));
    }
    (0..2).for_each(|i| team.barrier(i, groups[i]));
    team.pair.run(5_000_000);
    for (i, group) in groups.into_iter().enumerate() {
        assert_eq!(team.pair.ends[i].node.coll.check(group), Ok(()));
        assert_eq!(team.pair.read(i).len(), 1, "the barrier of {i}");
    }
}

/// A port that tells who lives.
struct Alive<'a>(&'a mut VecDeque<Vec<u8>>);

impl FrameSink for Alive<'_> {
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        sink(self.0)(frame)
    }

    fn presence(&mut self, _: Station) -> Presence {
        Presence::Present
    }
}

/// Goal: a member that computes for long, and takes nothing meanwhile, is not asked again before it
/// has heard the first question: requests are left for everybody else, whoever waits and how long.
#[test]
fn a_computing_member_is_queried_once() {
    let port = |station| PortCaps { tells_presence: true, ..caps(station, 1500, true) };
    let settings = NodeSettings { tx_wr_max: 64, ..NodeSettings::default() };
    let mut team = Team::of([1, 2].map(|station| end_on(port(station), settings.clone())));
    let groups = [0, 1].map(|i| team.join(i, JoinModel::Collective(1)).unwrap());
    team.pair.run(5_000_000);
    team.barrier(0, groups[0]);
    let turns = |team: &mut Team, seconds: u64| {
        for _ in 0..100 * seconds {
            team.pair.now = team.pair.now + 10_000_000;
            let End { node, out, .. } = &mut team.pair.ends[0];
            node.transmit(team.pair.now, &mut Alive(out));
        }
        team.pair.ends[0].node.tx.wrs.iter().count()
    };
    let few = turns(&mut team, 3);
    assert!(few > 0, "it is asked");
    assert_eq!(turns(&mut team, 100), few);
    team.barrier(1, groups[1]);
    team.pair.run(5_000_000);
    for (i, group) in groups.into_iter().enumerate() {
        assert_eq!(team.pair.ends[i].node.coll.check(group), Ok(()));
        assert_eq!(team.pair.read(i).len(), 1, "the barrier of {i}");
    }
    // It is asked again, now that it has heard.
    team.barrier(0, groups[0]);
    assert_eq!(turns(&mut team, 3), few);
}

/// Goal: a join that follows one which was given up meets the others, who have heard of both.
#[test]
fn a_join_behind_one_that_was_given_up_is_not_thrown_away_with_it() {
    let mut team = Team::new(NodeSettings::default());
    let given_up = team.join(0, JoinModel::Collective(1)).unwrap();
    team.pair.run(5_000_000);
    let now = team.pair.now;
    team.pair.ends[0].node.collectives().coll_close(now, given_up).unwrap();
    let first = team.join(0, JoinModel::Collective(1)).unwrap();
    team.pair.run(5_000_000);
    let groups = [first, team.join(1, JoinModel::Collective(1)).unwrap()];
    team.pair.run(5_000_000);
    for (i, group) in groups.into_iter().enumerate() {
        assert_eq!(team.pair.ends[i].node.coll.check(group), Ok(()), "{i}");
        team.barrier(i, group);
    }
    team.pair.run(5_000_000);
    assert_eq!([0, 1].map(|i| team.pair.read(i).len()), [1, 1], "they have one name for it");
}

/// Goal: who takes itself for the root of a broadcast and is not, or the other way round, is told.
#[test]
fn a_broadcast_has_one_sender() {
    let mut team = Team::new(NodeSettings::default());
    let groups = [0, 1].map(|i| team.join(i, JoinModel::Collective(1)).unwrap());
    team.pair.run(5_000_000);
    for (i, roles) in [[Role::Recv, Role::Send], [Role::Send, Role::Recv]].into_iter().enumerate() {
        let root = team.members[i][0];
        for (role, is_right) in roles.into_iter().zip([false, true]) {
            let what = CollWord::new(CollKind::Broadcast, None, Some(Datatype::Uint8));
            let call = CollCall { what, group: groups[i], count: 8, root };
            let req = CollReq { call, role: Some(role), context: 9, flags: OpFlags::empty() };
            let lend = |_, _| (Span::EMPTY, IoBuf::leaked(&[7; 8]).take_one().unwrap());
            let posted = team.pair.ends[i].node.coll_post(team.eps[i], &req, lend);
            match is_right {
                true => assert_eq!(posted, Ok(())),
                false => assert!(matches!(posted, Err(Error::Invalid(_))), "{i}: {posted:?}"),
            }
        }
    }
    team.pair.run(5_000_000);
    assert_eq!([0, 1].map(|i| team.pair.read(i).len()), [1, 1]);
}

/// Goal: a group that was left holds no record of its members. Method: a table that others fill
/// when the address vector names nobody any more.
#[test]
fn a_group_that_was_left_names_nobody() {
    let settings = NodeSettings { peer_max: 8, peer_limit: 8, ..NodeSettings::default() };
    let mut team = Team::new(settings);
    let groups = [0, 1].map(|i| team.join(i, JoinModel::Collective(1)).unwrap());
    team.pair.run(5_000_000);
    for (i, group) in groups.into_iter().enumerate() {
        let now = team.pair.now;
        team.pair.ends[i].node.collectives().coll_close(now, group).unwrap();
    }
    team.pair.run(600_000_000);
    let now = team.pair.now;
    let End { node, av, peer, .. } = &mut team.pair.ends[0];
    for addr in team.members[0].into_iter().chain([*peer]) {
        node.objects().av_remove(*av, addr).unwrap();
    }
    let addr = |n| EpAddr { station: Station::at([2, 7, 0, 0, 0, n]), ep: 3, incarnation: 0 };
    let room =
        (0..20).take_while(|&n| node.sessions().av_insert(now, *av, addr(n)).is_ok()).count();
    assert_eq!(room, 8);
}

/// Goal: a call completes with its context, is counted, and its place in the transmit queue and in
/// the completion queue is free again: more calls than places follow each other.
#[test]
fn calls_that_have_completed_leave_their_places() {
    let mut team = Team::new(NodeSettings::default());
    let groups = [0, 1].map(|i| team.join(i, JoinModel::Key(1)).unwrap());
    let cntrs = [0, 1].map(|i| {
        let End { node, .. } = &mut team.pair.ends[i];
        let cntr = node.cntrs.open(CntrEvents::Comp).unwrap();
        node.operations().ep_bind_cntr(team.eps[i], cntr, BindFlags::TRANSMIT).unwrap();
        cntr
    });
    let reserved = |team: &Team, i: usize| {
        let End { node, cq, .. } = &team.pair.ends[i];
        (node.eps[team.eps[i].0.idx()].tx_used, node.cqs[cq.0.idx()].cq.reserved())
    };
    let before = [0, 1].map(|i| reserved(&team, i));
    for round in 1..=10 {
        (0..2).for_each(|i| team.barrier(i, groups[i]));
        team.pair.run(5_000_000);
        for i in 0..2 {
            let got: Vec<_> = team.pair.read(i).iter().map(|c| (c.op_context, c.flags)).collect();
            assert_eq!(got, [(9, CqFlags::COLLECTIVE)], "round {round} at {i}");
            assert_eq!(team.pair.ends[i].node.cntrs.read(cntrs[i]), Ok(round));
            assert_eq!(reserved(&team, i), before[i], "round {round} at {i}");
        }
    }
}

/// Goal: members that two groups share stay known until the second one is left, and a join that is
/// refused names nobody. Method: a table of peers that addresses without a group fill.
#[test]
fn a_group_keeps_the_members_that_another_one_leaves() {
    let settings = NodeSettings { peer_max: 8, peer_limit: 8, ..NodeSettings::default() };
    let mut team = Team::new(settings);
    let [first, second] =
        [1, 2].map(|key| [0, 1].map(|i| team.join(i, JoinModel::Key(key)).unwrap()));
    team.pair.run(5_000_000);
    let close = |team: &mut Team, groups: [GroupId; 2]| {
        for (i, group) in groups.into_iter().enumerate() {
            let now = team.pair.now;
            team.pair.ends[i].node.collectives().coll_close(now, group).unwrap();
        }
        team.pair.run(600_000_000);
    };
    let room = |team: &mut Team| {
        let now = team.pair.now;
        let End { node, av, .. } = &mut team.pair.ends[0];
        let addr = |n| EpAddr { station: Station::at([2, 7, 0, 0, 0, n]), ep: 3, incarnation: 0 };
        let added = (0..20).map_while(|n| node.sessions().av_insert(now, *av, addr(n)).ok());
        let added: Vec<FiAddr> = added.collect();
        added.iter().for_each(|&addr| node.objects().av_remove(*av, addr).unwrap());
        added.len()
    };
    close(&mut team, first);
    (0..2).for_each(|i| team.barrier(i, second[i]));
    team.pair.run(5_000_000);
    assert_eq!([0, 1].map(|i| team.pair.read(i).len()), [1, 1], "a call of the other group");
    close(&mut team, second);

    // The last member is of an earlier life; the one before it is in no group.
    let other = team.pair.ends[1].node.addr_of(team.eps[1]).unwrap();
    let End { node, av, peer, .. } = &mut team.pair.ends[0];
    let stranger = EpAddr { station: Station::at([2, 8, 0, 0, 0, 1]), ep: 3, incarnation: 5 };
    let earlier = EpAddr { incarnation: other.incarnation ^ 1, ..other };
    // The present life is inserted last.
    let [stranger, earlier, present] =
        [stranger, earlier, other].map(|a| node.sessions().av_insert(Instant(1), *av, a).unwrap());
    let peer = *peer;
    let own = team.members[0];
    let refused = {
        let members = vec![own[0], stranger, earlier];
        let req = JoinReq { members, model: JoinModel::Key(3), ..JoinReq::default() };
        let now = team.pair.now;
        team.pair.ends[0].node.collectives().coll_join(now, team.eps[0], &req)
    };
    assert_eq!(refused, Err(Error::ConnReset));
    let End { node, av, .. } = &mut team.pair.ends[0];
    let inserted = [own[0], own[1], peer, stranger, earlier, present];
    for addr in std::collections::BTreeSet::from(inserted) {
        node.objects().av_remove(*av, addr).unwrap();
    }
    assert_eq!(room(&mut team), 8, "nobody is named any more");
}
