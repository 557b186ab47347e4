//! Address vector sets, groups and collectives through the safe API.

use std::collections::VecDeque;

use barewire::coll::{FI_NOOP, FI_UNIVERSE, FI_VOID};
use barewire::flags::{BindFlags, Caps, CqFlags, OpFlags};
use barewire::*;
use barewire_driver::backend::loopback::LoopbackSettings;
use barewire_driver::port::{Port, Station};
use proptest::prelude::*;

use crate::harness::*;

/// Domains of one process, each with an endpoint that knows all others in the same order.
struct Crew {
    sides: Vec<Side>,
    eqs: Vec<Eq>,
    addrs: Vec<Vec<FiAddr>>,
}

fn coll_plan() -> Plan {
    let caps = usual_caps() | Caps::COLLECTIVE;
    Plan { info: info(&Info { caps, ..Info::default() }), ..Plan::default() }
}

impl Crew {
    fn new(n: usize) -> Self {
        Self::of((0..n).map(|_| coll_plan()).collect())
    }

    fn of(plans: Vec<Plan>) -> Self {
        Self::on(ports(plans.len()), plans)
    }

    fn on(ports: Vec<Box<dyn Port>>, plans: Vec<Plan>) -> Self {
        let sides: Vec<Side> =
            (ports.into_iter()).zip(&plans).map(|(port, p)| Side::new(port, p)).collect();
        let names: Vec<EpAddr> = sides.iter().map(|s| s.ep.getname().unwrap()).collect();
        let addrs = sides.iter().map(|s| names.iter().map(|&a| s.knows(a)).collect()).collect();
        let eq = |s: &Side| {
            let eq = the_fabric().eq_open(EqAttr::default()).unwrap();
            s.ep.bind_eq(&eq).unwrap();
            eq
        };
        let eqs = sides.iter().map(eq).collect();
        Self { sides, eqs, addrs }
    }

    fn turn(&self) {
        for s in &self.sides {
            s.domain.progress().unwrap();
        }
    }

    /// The set of `members` at side `of`.
    fn set(&self, of: usize, members: &[usize]) -> AvSet {
        let mut set = self.sides[of].av.av_set(&AvSetAttr::default()).unwrap();
        members.iter().for_each(|&m| set.insert(self.addrs[of][m]).unwrap());
        set
    }

    /// All of `members` join, the members agreeing on the group.
    fn join(&self, members: &[usize]) -> Vec<Mc> {
        let join = |&of: &usize| {
            let set = self.set(of, members);
            self.sides[of].ep.join_collective(set.addr(), &set, 0, 1000 + of as u64).unwrap()
        };
        let mcs: Vec<Mc> = members.iter().map(join).collect();
        members.iter().for_each(|&of| self.await_join(of));
        mcs
    }

    fn await_join(&self, of: usize) {
        let mut bytes = [0; 8];
        let event = until("the end of a join", || {
            self.turn();
            self.eqs[of].read(&mut bytes).ok()
        });
        assert_eq!(event, (FI_JOIN_COMPLETE, 8));
        assert_eq!(u64::from_le_bytes(bytes), 1000 + of as u64);
    }

    /// The next completion of side `of`.
    fn done(&self, of: usize) -> Completion {
        until("a completion", || {
            self.turn();
            self.sides[of].read()
        })
    }

    fn failed(&self, of: usize) -> CompletionError {
        until("an error entry", || {
            self.turn();
            self.sides[of].read_error()
        })
    }
}

fn words(values: &[u64]) -> Buf {
    Buf::from(values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>())
}

fn numbers(buf: &Buf) -> Vec<u64> {
    buf.chunks(8).map(|w| u64::from_le_bytes(w.try_into().unwrap())).collect()
}

/// The result of a call, which is the second of its buffers.
fn result(c: Completion) -> Vec<u64> {
    numbers(&c.bufs.into_many().unwrap()[1])
}

#[derive(Clone, Debug)]
enum SetOp {
    Insert(u64),
    Remove(u64),
    Union(Vec<u64>),
    Intersect(Vec<u64>),
    Diff(Vec<u64>),
}

fn set_op() -> impl Strategy<Value = SetOp> {
    let list = || prop::collection::vec(0_u64..12, 0..8);
    prop_oneof![
        (0_u64..14).prop_map(SetOp::Insert),
        (0_u64..14).prop_map(SetOp::Remove),
        list().prop_map(SetOp::Union),
        list().prop_map(SetOp::Intersect),
        list().prop_map(SetOp::Diff),
    ]
}

/// A vector with addresses 0 to 11.
fn twelve() -> Side {
    let side = Side::new(ports(1).remove(0), &coll_plan());
    for i in 1..12 {
        let name = side.ep.getname().unwrap();
        assert_eq!(side.knows(EpAddr { ep: name.ep + i, ..name }), u64::from(i));
    }
    side
}

/// X25, CO12, CO13, CO14: a set against a plain list, whatever is done to it.
#[test]
fn a_set_is_a_list_without_repetitions() {
    let side = twelve();
    let of = |members: &[u64]| {
        let mut set = side.av.av_set(&AvSetAttr::default()).unwrap();
        for &m in members {
            // A repetition is refused.
            let _ = set.insert(m);
        }
        set
    };
    proptest!(|(ops in prop::collection::vec(set_op(), 1..40))| {
        let (mut set, mut model) = (of(&[]), VecDeque::<u64>::new());
        for op in ops {
            match op {
                SetOp::Insert(m) => {
                    let fits = m < 12 && !model.contains(&m);
                    prop_assert_eq!(set.insert(m).is_ok(), fits);
                    if fits { model.push_back(m) }
                }
                SetOp::Remove(m) => {
                    let there = model.contains(&m);
                    prop_assert_eq!(set.remove(m).is_ok(), there);
                    model.retain(|&x| x != m);
                }
                SetOp::Union(other) => {
                    let other = of(&other);
                    set.union(&other).unwrap();
                    for &m in other.members() {
                        if !model.contains(&m) { model.push_back(m) }
                    }
                }
                SetOp::Intersect(other) => {
                    set.intersect(&of(&other)).unwrap();
                    model.retain(|m| other.contains(m));
                }
                SetOp::Diff(other) => {
                    set.diff(&of(&other)).unwrap();
                    model.retain(|m| !other.contains(m));
                }
            }
            prop_assert!(set.members().iter().eq(model.iter()));
        }
    });
}

/// CO12, and row 8 of what is known to go wrong elsewhere (B.7.1).
#[test]
fn sets_are_made_of_ranges_and_keep_their_order() {
    let side = twelve();
    let range = |start_addr, end_addr, stride| {
        let attr = AvSetAttr { start_addr, end_addr, stride, ..AvSetAttr::default() };
        side.av.av_set(&attr)
    };
    assert_eq!(range(2, 9, 3).unwrap().members(), [2, 5, 8]);
    assert_eq!(range(0, 0, 1).unwrap().members(), [0]);
    assert_eq!(range(3, 4, 0).unwrap().members(), [3, 4]);
    for (start, end) in [(4, 3), (0, 12), (0, FI_ADDR_NOTAVAIL)] {
        assert_eq!(range(start, end, 1).err().map(|e| e.fi_errno()), Some(22), "{start}..{end}");
    }
    let all = AvSetAttr { flags: FI_UNIVERSE, ..AvSetAttr::default() };
    assert_eq!(side.av.av_set(&all).unwrap().members(), (0..12).collect::<Vec<u64>>());
    let odd = AvSetAttr { flags: 1, ..AvSetAttr::default() };
    assert_eq!(side.av.av_set(&odd).err(), Some(Error::BadFlags));

    let mut four = range(0, 3, 1).unwrap();
    four.diff(&range(1, 1, 1).unwrap()).unwrap();
    assert_eq!(four.members(), [0, 2, 3], "the others stay as they are");
    let mut four = range(0, 3, 1).unwrap();
    let mut two = range(2, 2, 1).unwrap();
    two.insert(0).unwrap();
    four.intersect(&two).unwrap();
    assert_eq!(four.members(), [0, 2], "in the order of the set that is changed");
    two.union(&range(0, 3, 1).unwrap()).unwrap();
    assert_eq!(two.members(), [2, 0, 1, 3], "the missing ones behind");
    let other = twelve();
    assert!(two.union(&other.av.av_set(&all).unwrap()).is_err(), "another vector");
}

/// CO1, CO16: what a join refuses, and that it says so.
#[test]
fn a_join_refuses_what_can_be_no_group() {
    let crew = Crew::new(3);
    let (ep, set) = (&crew.sides[0].ep, crew.set(0, &[0, 1]));
    let join = |set: &AvSet| ep.join_collective(set.addr(), set, 0, 0).map(drop);
    let invalid = |r: Result<()>| assert_eq!(r.unwrap_err().fi_errno(), 22);
    invalid(join(&crew.set(0, &[])));
    invalid(join(&crew.set(0, &[1, 2])));
    invalid(ep.join_collective(12345, &set, 0, 0).map(drop));
    invalid(ep.join_collective(crew.set(0, &[0]).addr(), &set, 0, 0).map(drop));
    let flags = ep.join_collective(set.addr(), &set, 1, 0).map(drop);
    assert_eq!(flags, Err(Error::BadFlags));
    // An endpoint without an event queue, and one without the capability.
    let bare = Side::new(ports(1).remove(0), &coll_plan());
    let own = bare.av.av_set(&AvSetAttr { flags: FI_UNIVERSE, ..AvSetAttr::default() }).unwrap();
    assert_eq!(bare.ep.join_collective(own.addr(), &own, 0, 0).err(), Some(Error::NoEq));
    let plain = Side::new(ports(1).remove(0), &Plan::default());
    let eq = the_fabric().eq_open(EqAttr::default()).unwrap();
    plain.ep.bind_eq(&eq).unwrap();
    let own = plain.av.av_set(&AvSetAttr { flags: FI_UNIVERSE, ..AvSetAttr::default() }).unwrap();
    let refused = plain.ep.join_collective(own.addr(), &own, 0, 0).err().unwrap();
    assert_eq!(refused.fi_errno(), 95);
    // A member of a part must be one of the whole.
    let whole = crew.join(&[0, 1]);
    let part = crew.set(0, &[0, 2]);
    invalid(ep.join_collective(whole[0].addr(), &part, 0, 0).map(drop));
}

/// CO1: endpoints of any number may be members, with one exception that says so.
#[test]
fn any_number_of_an_endpoint_will_do() {
    let numbered = |number: u16| {
        let mut plan = coll_plan();
        let own = EpAddr { station: Station::at([0; 6]), ep: number, incarnation: 0 };
        plan.info.src_addr = Some(own.to_bytes().to_vec());
        plan
    };
    let crew = Crew::of([47_592, 5, 65_535].map(numbered).into());
    let mcs = crew.join(&[1, 0, 2]);
    for (of, mc) in [1, 0, 2].into_iter().zip(&mcs) {
        assert_eq!(crew.sides[of].ep.getname().unwrap().ep, [47_592, 5, 65_535][of]);
        let bufs = (words(&[of as u64]), words(&[0; 3]));
        crew.sides[of].ep.allgather(bufs, mc.addr(), Datatype::Uint64, 9).unwrap();
    }
    (0..3).for_each(|of| assert_eq!(result(crew.done(of)), [1, 0, 2]));
    // The hidden endpoint beside number 5 has 32773.
    let taken = crew.sides[1].domain.endpoint(&numbered(32_773).info).err().unwrap();
    assert_eq!(taken, Error::AddrInUse);
    drop(mcs);
    // An endpoint without collectives is no obstacle before, but leaves no room beside it.
    let side = Side::new(ports(1).remove(0), &Plan::default());
    let number = side.ep.getname().unwrap().ep;
    let ep = side.domain.endpoint(&numbered(number ^ 0x8000).info).unwrap();
    let eq = the_fabric().eq_open(EqAttr::default()).unwrap();
    ep.bind_cq(&side.cq, BOTH).unwrap();
    ep.bind_av(&side.av).unwrap();
    ep.bind_eq(&eq).unwrap();
    ep.enable().unwrap();
    side.knows(ep.getname().unwrap());
    let all = side.av.av_set(&AvSetAttr { flags: FI_UNIVERSE, ..AvSetAttr::default() }).unwrap();
    let refused = ep.join_collective(all.addr(), &all, 0, 0).err().unwrap();
    assert_eq!(refused.fi_errno(), 95, "{refused}");
}

/// CO1: a group that the application manages takes its name from the lives of its members, which a
/// member that is known by name alone does not tell until it was met.
#[test]
fn a_group_without_a_word_needs_full_addresses() {
    let crew = Crew::new(2);
    let join = |of: usize| {
        let other = crew.sides[1 - of].ep.getname().unwrap();
        let by_name = crew.sides[of].knows(EpAddr { incarnation: 0, ..other });
        let attr = AvSetAttr { comm_key: Some(9), ..AvSetAttr::default() };
        let mut set = crew.sides[of].av.av_set(&attr).unwrap();
        let mut members = [crew.addrs[of][of], by_name];
        members[..].rotate_left(of);
        members.iter().for_each(|&m| set.insert(m).unwrap());
        crew.sides[of].ep.join_collective(FI_ADDR_NOTAVAIL, &set, 0, 1000 + of as u64)
    };
    // All that are here were inserted by full address before, so they count as met.
    let mcs = [join(0).unwrap(), join(1).unwrap()];
    (0..2).for_each(|of| crew.await_join(of));
    for (s, mc) in crew.sides.iter().zip(&mcs) {
        s.ep.barrier(mc.addr(), 3).unwrap();
    }
    (0..2).for_each(|of| assert_eq!(crew.done(of).op_context, 3));
    // And one that nobody knows anything of.
    let side = &crew.sides[0];
    let stranger = EpAddr { station: Station::at([2, 9, 9, 9, 9, 9]), ep: 0, incarnation: 0 };
    let mut set = side.av.av_set(&AvSetAttr::default()).unwrap();
    [side.me, side.knows(stranger)].iter().for_each(|&m| set.insert(m).unwrap());
    let refused = side.ep.join_collective(FI_ADDR_NOTAVAIL, &set, 0, 0).err().unwrap();
    assert_eq!(refused.fi_errno(), 22);
    assert!(refused.to_string().contains("getname"), "{refused}");
}

/// CO2 to CO10, CR3, CR4, CR6: what each member gets, in the order of the set.
#[test]
fn the_nine_do_what_they_say() {
    let crew = Crew::new(3);
    // Ranks 0, 1, 2 are sides 2, 0, 1.
    let members = [2, 0, 1];
    let mcs = crew.join(&members);
    let u64s = Datatype::Uint64;
    let sum = (AtomicOp::Sum, u64s);
    let each = |call: &dyn Fn(&Endpoint, FiAddr, u64, FiAddr) -> PostResult| -> Vec<Vec<u64>> {
        for (rank, &of) in members.iter().enumerate() {
            let (root, context) = (crew.addrs[of][0], 500 + rank as u64);
            call(&crew.sides[of].ep, mcs[rank].addr(), rank as u64, root).unwrap();
            assert_eq!(context, 500 + rank as u64);
        }
        let get = |(rank, &of): (usize, &usize)| {
            let c = crew.done(of);
            assert_eq!((c.op_context, c.flags, c.len), (500 + rank as u64, CqFlags::COLLECTIVE, 0));
            result(c)
        };
        members.iter().enumerate().map(get).collect()
    };
    let cx = |rank: u64| 500 + rank;
    // The root is side 0, which is rank 1.
    let got = each(&|ep, mc, r, _| ep.barrier(mc, cx(r)));
    assert_eq!(got, [[], [], []]);
    let got = each(&|ep, mc, r, root| {
        ep.broadcast(words(&[r, r + 10, r + 20]), mc, root, u64s, None, cx(r))
    });
    assert_eq!(got, [[1, 11, 21]; 3]);
    let got = each(&|ep, mc, r, _| {
        ep.alltoall((words(&[10 * r, 10 * r + 1, 10 * r + 2]), words(&[9; 3])), 1, mc, u64s, cx(r))
    });
    assert_eq!(got, [[0, 10, 20], [1, 11, 21], [2, 12, 22]]);
    let got = each(&|ep, mc, r, _| ep.allreduce((words(&[r, 7]), words(&[0; 2])), mc, sum, cx(r)));
    assert_eq!(got, [[3, 21]; 3]);
    let got = each(&|ep, mc, r, _| ep.allreduce((Buf::default(), words(&[r])), mc, sum, cx(r)));
    assert_eq!(got, [[3]; 3], "in place");
    let got = each(&|ep, mc, r, _| ep.allgather((words(&[r]), words(&[0; 3])), mc, u64s, cx(r)));
    assert_eq!(got, [[0, 1, 2]; 3]);
    let got = each(&|ep, mc, r, _| {
        ep.reduce_scatter((words(&[r, 10 + r, 20]), words(&[0])), mc, sum, cx(r))
    });
    assert_eq!(got, [[3], [33], [60]]);
    let got = each(&|ep, mc, r, root| {
        let result = if r == 1 { words(&[0]) } else { Buf::default() };
        ep.reduce((words(&[r + 1]), result), mc, root, sum, cx(r))
    });
    assert_eq!(got, [vec![], vec![6], vec![]]);
    let got = each(&|ep, mc, r, root| {
        let source = if r == 1 { words(&[4, 5, 6]) } else { Buf::default() };
        ep.scatter((source, words(&[0])), mc, root, u64s, cx(r))
    });
    assert_eq!(got, [[4], [5], [6]]);
    let got = each(&|ep, mc, r, root| {
        let result = if r == 1 { words(&[0; 3]) } else { Buf::default() };
        ep.gather((words(&[r + 5]), result), mc, root, u64s, cx(r))
    });
    assert_eq!(got, [vec![], vec![5, 6, 7], vec![]]);
}

/// CO11, CR11: a query says what the calls take. Rows 4 to 6 of what goes wrong elsewhere (B.7.1).
#[test]
fn collective_queries_match_the_accepted_calls() {
    let crew = Crew::new(1);
    let mcs = crew.join(&[0]);
    let (side, mc) = (&crew.sides[0], mcs[0].addr());
    let query = |coll, op, ty| side.domain.query_collective(coll, op, ty, 0);
    let mut pairs = 0;
    for op in 0..22 {
        for ty in 0..22 {
            let known = AtomicOp::try_from(op).ok().zip(Datatype::try_from(ty).ok());
            for kind in [CollKind::Allreduce, CollKind::Reduce, CollKind::ReduceScatter] {
                let answer = query(kind, op, ty);
                if let Some((op, ty)) = known {
                    let bufs = (Buf::zeroed(ty.size()), Buf::zeroed(ty.size()));
                    let posted = match kind {
                        CollKind::Allreduce => side.ep.allreduce(bufs, mc, (op, ty), 1),
                        CollKind::Reduce => side.ep.reduce(bufs, mc, crew.addrs[0][0], (op, ty), 1),
                        _ => side.ep.reduce_scatter(bufs, mc, (op, ty), 1),
                    };
                    assert_eq!(answer.is_ok(), posted.is_ok(), "{kind:?} {op:?} {ty:?}");
                    if let Ok(attr) = answer {
                        assert_eq!(attr.size, ty.size());
                        assert_eq!(attr.count, (1 << 32) / ty.size() as u64);
                        crew.done(0);
                        pairs += u32::from(kind == CollKind::Allreduce);
                    } else {
                        assert_eq!(Error::from(posted.unwrap_err()).fi_errno(), 95);
                    }
                }
                assert!(answer.is_ok() || answer.unwrap_err().fi_errno() == 95);
                assert!(known.is_some() || answer.is_err(), "{op} {ty}");
            }
        }
    }
    assert_eq!(pairs, 164);
    for kind in [CollKind::Broadcast, CollKind::Alltoall, CollKind::Gather] {
        assert_eq!((0..30).filter(|&ty| query(kind, FI_NOOP, ty).is_ok()).count(), 20);
        assert!(query(kind, FI_NOOP, FI_VOID).is_err());
    }
    assert!(query(CollKind::Barrier, FI_NOOP, FI_VOID).is_ok());
    assert!(query(CollKind::Barrier, FI_NOOP, 3).is_err());
    let scatter = side.domain.query_collective(CollKind::Reduce, 2, 7, 7);
    assert_eq!(
        scatter,
        query(CollKind::ReduceScatter, 2, 7),
        "FI_SCATTER asks for a reduce-scatter"
    );
    assert_eq!(side.domain.query_collective(CollKind::Gather, 2, 7, 7), Err(Error::BadFlags));
}

/// CO3, CR2, CR5: calls that contradict themselves are refused, and nothing completes (R1).
#[test]
fn a_contradiction_is_refused() {
    let crew = Crew::new(2);
    let mcs = crew.join(&[0, 1]);
    let (ep, mc, own) = (&crew.sides[0].ep, mcs[0].addr(), &crew.addrs[0]);
    let ty = Datatype::Uint64;
    let code = |posted: PostResult| Error::from(posted.unwrap_err()).fi_errno();
    let bcast = |root, role| ep.broadcast(words(&[1]), mc, root, ty, role, 1);
    assert_eq!(code(bcast(own[0], Some(Role::Recv))), 22);
    assert_eq!(code(bcast(own[1], Some(Role::Send))), 22);
    assert_eq!(code(bcast(77, None)), 22, "a root that is no member");
    let one = || words(&[1]);
    assert_eq!(code(ep.allgather((one(), one()), mc, ty, 1)), 22, "the result is too short");
    assert_eq!(code(ep.barrier(own[1], 1)), 22, "an endpoint is no group");
    assert_eq!(code(ep.barrier(mcs[1].addr() + 5, 1)), 22, "no such group");
    assert_eq!(code(ep.barrier2(mc, OpFlags::MULTI_RECV, 1)), 260);
    crew.turn();
    assert!(crew.sides[0].read().is_none());
    // All of it changed nothing: the group still works.
    for (s, mc) in crew.sides.iter().zip(&mcs) {
        s.ep.barrier2(mc.addr(), OpFlags::COMPLETION, 3).unwrap();
    }
    assert_eq!((crew.done(0).op_context, crew.done(1).op_context), (3, 3));
}

/// CR7: three groups, each with several calls under way, and messages in between.
#[test]
fn groups_and_messages_do_not_disturb_each_other() {
    let crew = Crew::new(4);
    let groups = [vec![0, 1, 2, 3], vec![3, 1], vec![2, 0, 1]];
    let mcs: Vec<Vec<Mc>> = groups.iter().map(|g| crew.join(g)).collect();
    let sum = (AtomicOp::Sum, Datatype::Uint64);
    let mut expect: Vec<Vec<(u64, u64)>> = vec![Vec::new(); 4];
    for round in 0..20_u64 {
        for (g, members) in groups.iter().enumerate() {
            for (rank, &of) in members.iter().enumerate() {
                let mine = round * 100 + of as u64;
                let context = round << 8 | g as u64;
                let bufs = (words(&[mine]), words(&[0]));
                crew.sides[of].ep.allreduce(bufs, mcs[g][rank].addr(), sum, context).unwrap();
                let total: u64 = members.iter().map(|&m| round * 100 + m as u64).sum();
                expect[of].push((context, total));
            }
        }
        for of in 0..4 {
            let next = (of + 1) % 4;
            let before = (of + 3) % 4;
            crew.sides[of]
                .ep
                .trecv(Buf::zeroed(8), crew.addrs[of][before], round, 0, 1 << 40)
                .unwrap();
            crew.sides[of].ep.tsend(words(&[round]), crew.addrs[of][next], round, 1 << 41).unwrap();
        }
    }
    for (of, expect) in expect.iter_mut().enumerate() {
        let calls = expect.len();
        let mut messages = 0;
        let mut got = Vec::new();
        for _ in 0..calls + 40 {
            let c = crew.done(of);
            if c.flags.contains(CqFlags::COLLECTIVE) {
                got.push((c.op_context, result(c)[0]));
            } else {
                messages += 1;
            }
        }
        assert_eq!(messages, 40);
        got.sort_unstable();
        expect.sort_unstable();
        assert_eq!(got, *expect, "side {of}");
    }
}

/// CO1: a group that the application names needs no word, a part of a group is one of its own, and
/// a group can be joined again.
#[test]
fn groups_of_both_models_and_parts_of_groups() {
    let crew = Crew::new(3);
    let own = |of: usize, key| {
        let attr = AvSetAttr { flags: FI_UNIVERSE, comm_key: Some(key), ..AvSetAttr::default() };
        let mut set = crew.sides[of].av.av_set(&attr).unwrap();
        // The side itself stands in its vector twice: as itself and as one of all.
        set.remove(crew.sides[of].me).unwrap();
        set
    };
    for round in 0..3 {
        let join = |of: usize| {
            let set = own(of, 42);
            crew.sides[of].ep.join_collective(FI_ADDR_NOTAVAIL, &set, 0, 1000 + of as u64).unwrap()
        };
        let mcs: Vec<Mc> = (0..3).map(join).collect();
        (0..3).for_each(|of| crew.await_join(of));
        for (s, mc) in crew.sides.iter().zip(&mcs) {
            s.ep.barrier(mc.addr(), round).unwrap();
        }
        (0..3).for_each(|of| assert_eq!(crew.done(of).op_context, round));
        let part: Vec<Mc> = [0, 2]
            .into_iter()
            .map(|of| {
                let set = crew.set(of, &[2, 0]);
                let ep = &crew.sides[of].ep;
                ep.join_collective(mcs[of].addr(), &set, 0, 1000 + of as u64).unwrap()
            })
            .collect();
        [0, 2].into_iter().for_each(|of| crew.await_join(of));
        for (of, mc) in [0, 2].into_iter().zip(&part) {
            let bufs = (words(&[of as u64]), words(&[0; 2]));
            crew.sides[of].ep.allgather(bufs, mc.addr(), Datatype::Uint64, 9).unwrap();
        }
        for of in [0, 2] {
            assert_eq!(result(crew.done(of)), [2, 0], "in the order of the set");
        }
    }
}

/// CR8, CO16: a member that is closed ends what waits for it, once, and the group says so.
#[test]
fn a_member_that_leaves_ends_the_group() {
    let mut crew = Crew::new(3);
    let mut mcs = crew.join(&[0, 1, 2]);
    for of in [0, 1] {
        crew.sides[of].ep.barrier(mcs[of].addr(), 7).unwrap();
    }
    for _ in 0..50 {
        crew.turn();
    }
    drop(mcs.pop());
    for of in [0, 1] {
        let e = crew.failed(of);
        assert_eq!((e.entry.op_context, e.entry.flags), (7, CqFlags::COLLECTIVE));
        assert!(crew.sides[of].read().is_none());
        let late = Error::from(crew.sides[of].ep.barrier(mcs[of].addr(), 8).unwrap_err());
        assert_eq!(late, e.err, "the group says why it is of no more use");
        assert_eq!(mcs[of].check(), Err(e.err));
    }
    drop(mcs);
    // The same members, another group; and this time the whole process of one is gone.
    let mcs = crew.join(&[0, 1, 2]);
    for of in [0, 1] {
        crew.sides[of].ep.barrier(mcs[of].addr(), 9).unwrap();
    }
    let gone = crew.sides.pop();
    let last = mcs.into_iter().last();
    drop((last, gone));
    for of in [0, 1] {
        assert_eq!(crew.failed(of).entry.op_context, 9);
    }
}

/// The set of both members at side `of`, with a key of its own.
fn set_of_two(crew: &Crew, of: usize, key: u64) -> AvSet {
    let attr = AvSetAttr { comm_key: Some(key), ..AvSetAttr::default() };
    let mut set = crew.sides[of].av.av_set(&attr).unwrap();
    crew.addrs[of].iter().for_each(|&member| set.insert(member).unwrap());
    set
}

/// CR8, CO16: a member gives up a join that another has completed under the group's new name, of
/// which it has not heard. Who then waits for it is told, and does not wait for ever.
#[test]
fn a_join_given_up_ends_those_who_have_joined() {
    let crew = Crew::new(2);
    let warm = crew.join(&[0, 1]);
    let join = |of: usize| {
        let set = set_of_two(&crew, of, 2);
        crew.sides[of].ep.join_collective(set.addr(), &set, 0, 1000 + of as u64).unwrap()
    };
    // Its word is with the other before it looks for the other's.
    let (second, first) = (join(1), join(0));
    let mut bytes = [0; 8];
    let joined = until("the first's join", || {
        crew.sides[0].domain.progress().unwrap();
        crew.eqs[0].read(&mut bytes).ok()
    });
    assert_eq!(joined.0, FI_JOIN_COMPLETE);
    drop(second);
    crew.sides[0].ep.barrier(first.addr(), 9).unwrap();
    assert_eq!(crew.failed(0).entry.op_context, 9);
    assert!(first.check().is_err());
    // It goes on with the same members.
    let bar = |of: usize| crew.sides[of].ep.barrier(warm[of].addr(), 10).unwrap();
    (0..2).for_each(bar);
    (0..2).for_each(|of| assert_eq!(crew.done(of).op_context, 10));
}

/// CR8: in a group of more than 64 members not everybody tells everybody. Who waits for a member
/// that has left asks it.
#[test]
fn a_waiting_member_of_a_large_group_queries_the_leaver() {
    const MEMBERS: usize = 70;
    const LEAVES: usize = 8;
    let plans = || (0..MEMBERS).map(|_| coll_plan()).collect();
    let crew = Crew::on(ports_with(MEMBERS, LoopbackSettings::default()), plans());
    let all: Vec<usize> = (0..MEMBERS).collect();
    let mut mcs: Vec<Option<Mc>> = crew.join(&all).into_iter().map(Some).collect();
    mcs[LEAVES] = None;
    (0..20).for_each(|_| crew.turn());
    for (of, mc) in mcs.iter().enumerate() {
        let Some(mc) = mc else { continue };
        let (sum, root) = ((AtomicOp::Sum, Datatype::Uint64), crew.addrs[of][0]);
        crew.sides[of].ep.reduce((words(&[1]), words(&[0])), mc.addr(), root, sum, 9).unwrap();
    }
    assert_eq!(crew.failed(0).entry.op_context, 9, "the sum is never whole");
}

/// CO16: a member that has made its calls may leave before another has joined: what it sent is
/// there, and the group is not over for that.
#[test]
fn a_member_may_leave_after_its_calls_before_another_joins() {
    let crew = Crew::new(2);
    let _warm = crew.join(&[0, 1]);
    let join = |of: usize| {
        let set = set_of_two(&crew, of, 7);
        crew.sides[of].ep.join_collective(FI_ADDR_NOTAVAIL, &set, 0, 1000 + of as u64).unwrap()
    };
    let bcast = |of: usize, mc: &Mc, value: u64| {
        let root = crew.addrs[of][0];
        crew.sides[of].ep.broadcast(words(&[value]), mc.addr(), root, Datatype::Uint64, None, 1)
    };
    let first = join(0);
    bcast(0, &first, 77).unwrap();
    crew.done(0);
    drop(first);
    (0..200).for_each(|_| crew.turn());
    let second = join(1);
    assert_eq!(second.check(), Ok(()));
    bcast(1, &second, 0).unwrap();
    assert_eq!(result(crew.done(1)), [77]);
    // Of what it owes after that nothing can come.
    let late = bcast(1, &second, 0);
    assert!(late.is_err() || crew.failed(1).entry.op_context == 1);
}

/// CO15: with `FI_BAREWIRE_PEERS=inserted` members join in any order, like all others.
#[test]
fn members_that_know_each_other_join_in_any_order() {
    for order in [[0, 1], [1, 0]] {
        let plan = || {
            let mut plan = coll_plan();
            plan.settings.peers = Peers::Inserted;
            plan
        };
        let crew = Crew::of(vec![plan(), plan()]);
        let mcs: Vec<Mc> = (order.iter())
            .map(|&of| {
                let set = crew.set(of, &[0, 1]);
                let context = 1000 + of as u64;
                let mc = crew.sides[of].ep.join_collective(set.addr(), &set, 0, context).unwrap();
                (0..200).for_each(|_| crew.turn());
                mc
            })
            .collect();
        order.iter().for_each(|&of| crew.await_join(of));
        for (&of, mc) in order.iter().zip(&mcs) {
            crew.sides[of].ep.barrier(mc.addr(), 3).unwrap();
        }
        order.iter().for_each(|&of| assert_eq!(crew.done(of).op_context, 3));
    }
}

/// CO11: two endpoints of one domain are members of a group that the application manages.
#[test]
fn members_of_one_domain_meet_in_a_group_by_key() {
    let crew = Crew::new(2);
    let (plan, domain) = (coll_plan(), &crew.sides[0].domain);
    let (cq, av) = (domain.cq_open(plan.cq).unwrap(), domain.av_open(AvAttr::default()).unwrap());
    let third = domain.endpoint(&plan.info).unwrap();
    third.bind_cq(&cq, BOTH).unwrap();
    third.bind_av(&av).unwrap();
    let eq = the_fabric().eq_open(EqAttr::default()).unwrap();
    third.bind_eq(&eq).unwrap();
    third.enable().unwrap();
    let eps = [&crew.sides[0].ep, &crew.sides[1].ep, &third];
    let names = eps.map(|ep| ep.getname().unwrap());
    let avs = [&crew.sides[0].av, &crew.sides[1].av, &av];
    for round in 0..2 {
        let mcs: Vec<Mc> = (eps.iter().zip(avs))
            .map(|(ep, av)| {
                let mut members = [FI_ADDR_NOTAVAIL; 3];
                assert_eq!(av.insert(&names, &mut members), Ok(3));
                let attr = AvSetAttr { comm_key: Some(3), ..AvSetAttr::default() };
                let mut set = av.av_set(&attr).unwrap();
                members.iter().for_each(|&member| set.insert(member).unwrap());
                ep.join_collective(FI_ADDR_NOTAVAIL, &set, 0, 1).unwrap()
            })
            .collect();
        eps.iter().zip(&mcs).for_each(|(ep, mc)| ep.barrier(mc.addr(), round).unwrap());
        (0..2).for_each(|of| assert_eq!(crew.done(of).op_context, round));
        let done = until("the third's barrier", || {
            crew.turn();
            let mut one = [Completion::default()];
            cq.read(&mut one).ok().map(|_| one[0].op_context)
        });
        assert_eq!(done, round);
    }
}

/// CR13: a counter of sends counts each collective once, successes and failures.
#[test]
fn a_counter_counts_each_call_once() {
    let plan = coll_plan();
    let domain =
        the_fabric().domain_on(&plan.info, plan.settings.clone(), ports(1).remove(0)).unwrap();
    let (cq, av) = (domain.cq_open(plan.cq).unwrap(), domain.av_open(AvAttr::default()).unwrap());
    let cntr = domain.cntr_open(CntrAttr::default()).unwrap();
    let eq = the_fabric().eq_open(EqAttr::default()).unwrap();
    let ep = domain.endpoint(&plan.info).unwrap();
    ep.bind_cq(&cq, BOTH | BindFlags::SELECTIVE_COMPLETION).unwrap();
    ep.bind_cntr(&cntr, BindFlags::TRANSMIT).unwrap();
    ep.bind_av(&av).unwrap();
    ep.bind_eq(&eq).unwrap();
    ep.enable().unwrap();
    av.insert(&[ep.getname().unwrap()], &mut []).unwrap();
    let set = av.av_set(&AvSetAttr { flags: FI_UNIVERSE, ..AvSetAttr::default() }).unwrap();
    let mc = ep.join_collective(set.addr(), &set, 0, 5).unwrap();
    for context in 0..3 {
        ep.barrier(mc.addr(), context).unwrap();
    }
    ep.barrier2(mc.addr(), OpFlags::COMPLETION, 99).unwrap();
    assert_eq!(cntr.read().unwrap(), 4);
    let mut one = [Completion::default()];
    assert_eq!(cq.read(&mut one), Ok(1));
    assert_eq!(one[0].op_context, 99, "only the one that asked for it is reported");
    assert_eq!(cq.read(&mut one), Err(Error::Again));
}
