//! Section A.0.1: the code of every bad input or state that messages can meet. Rows of that table
//! have no ids, so tests name them by their text.

use std::time::{Duration, Instant};

use barewire::flags::{Access, BindFlags, Caps, CqFlags, InfoFlags, OpFlags};
use barewire::*;

use crate::harness::*;

/// "message above max_msg_size, inject above inject_size": FI_EMSGSIZE. (A message above 2^40 bytes
/// does not fit this machine.)
#[test]
fn inject_above_its_size_is_emsgsize() {
    let p = Pair::default();
    let (long, to) = ([0; 257], p.a.peer);
    assert_eq!(p.a.ep.inject(&long, to), Err(Error::MsgTooLong));
    assert_eq!(p.a.ep.injectdata(&long, 1, to), Err(Error::MsgTooLong));
    assert_eq!(p.a.ep.tinject(&long, to, 1), Err(Error::MsgTooLong));
    let e = refusal(p.a.ep.tsendmsg(tagged(buf(257, 1), to, 1, 1), OpFlags::INJECT), 257);
    assert_eq!(e.fi_errno(), errno::FI_EMSGSIZE);
    p.all_is_back();
}

/// "iov_count above iov_limit": FI_EINVAL.
#[test]
fn nine_pieces_are_einval() {
    let p = Pair::default();
    let list = || (0..9).map(|_| buf(1, 1)).collect::<Vec<_>>();
    let posts = [
        p.a.ep.sendv(list(), p.a.peer, 1),
        p.a.ep.tsendv(list(), p.a.peer, 1, 1),
        p.a.ep.recvv(list(), FI_ADDR_UNSPEC, 1),
        p.a.ep.trecvv(list(), FI_ADDR_UNSPEC, 1, 0, 1),
    ];
    for posted in posts {
        assert_eq!(refusal(posted, 9).fi_errno(), errno::FI_EINVAL);
    }
    p.all_is_back();
}

/// "fi_addr not in the AV": FI_EINVAL, for data calls, lookup and remove.
#[test]
fn addresses_not_inserted_are_einval() {
    let p = Pair::default();
    for addr in [77, u64::MAX - 1, FI_ADDR_UNSPEC] {
        assert_eq!(refusal(p.a.ep.send(buf(1, 1), addr, 1), 1).fi_errno(), errno::FI_EINVAL);
        assert_eq!(p.a.av.lookup(addr).unwrap_err().fi_errno(), errno::FI_EINVAL);
        assert_eq!(p.a.av.remove(&[addr]).unwrap_err().fi_errno(), errno::FI_EINVAL);
    }
    p.a.av.remove(&[p.a.peer]).unwrap();
    assert_eq!(refusal(p.a.ep.send(buf(1, 1), p.a.peer, 1), 1).fi_errno(), errno::FI_EINVAL);
    p.all_is_back();
}

/// "capability not requested": FI_EOPNOTSUPP.
#[test]
fn capabilities_not_requested_are_eopnotsupp() {
    let with = |caps| {
        let mut plan = Plan { info: info(&Info { caps, ..Info::default() }), ..Plan::default() };
        plan.bind = BOTH;
        Pair::new(&plan)
    };
    let p = with(Caps::MSG);
    let not = |posted| assert_eq!(refusal(posted, 2).fi_errno(), errno::FI_EOPNOTSUPP);
    not(p.a.ep.tsend(buf(2, 1), p.a.peer, 1, 1));
    not(p.a.ep.trecv(buf(2, 1), FI_ADDR_UNSPEC, 1, 0, 1));
    assert_eq!(p.a.ep.tinject(&[], p.a.peer, 1).unwrap_err().fi_errno(), errno::FI_EOPNOTSUPP);
    let p = with(Caps::TAGGED);
    not(p.a.ep.send(buf(2, 1), p.a.peer, 1));
    not(p.a.ep.recv(buf(2, 1), FI_ADDR_UNSPEC, 1));
    let p = with(Caps::MSG | Caps::SEND);
    not(p.a.ep.recv(buf(2, 1), FI_ADDR_UNSPEC, 1));
    p.a.ep.inject(&[], p.a.peer).unwrap();
    let p = with(Caps::MSG | Caps::RECV);
    not(p.a.ep.send(buf(2, 1), p.a.peer, 1));
    p.a.ep.recv(buf(2, 1), FI_ADDR_UNSPEC, 1).unwrap();
}

/// "fi_enable without CQ / AV": FI_ENOCQ, FI_ENOAV (X17); and what binding refuses.
#[test]
fn x17_enabling_needs_queue_and_vector() {
    let plan = Plan::default();
    let port = ports(1).remove(0);
    let domain = the_fabric().domain_on(&plan.info, plan.settings.clone(), port).unwrap();
    let cq = domain.cq_open(plan.cq).unwrap();
    let av = domain.av_open(AvAttr::default()).unwrap();
    let ep = domain.endpoint(&plan.info).unwrap();
    ep.bind_cq(&cq, BindFlags::TRANSMIT).unwrap();
    assert_eq!(ep.enable(), Err(Error::NoAv));
    ep.bind_av(&av).unwrap();
    assert_eq!(ep.enable(), Err(Error::NoCq));
    assert_eq!(ep.bind_cq(&cq, BindFlags::empty()), Err(Error::BadFlags));
    assert_eq!(ep.bind_cq(&cq, BindFlags::REMOTE_READ), Err(Error::BadFlags));
    assert_eq!(ep.bind_cq(&cq, BindFlags::TRANSMIT).unwrap_err().fi_errno(), errno::FI_EINVAL);
    ep.bind_cq(&cq, BindFlags::RECV).unwrap();
    ep.enable().unwrap();
    assert_eq!(ep.enable(), Err(Error::OpBadState));
    assert_eq!(ep.bind_av(&av), Err(Error::OpBadState));
    let other = Side::new(ports(1).remove(0), &plan);
    let ep = domain.endpoint(&plan.info).unwrap();
    assert_eq!(ep.bind_cq(&other.cq, BOTH).unwrap_err().fi_errno(), errno::FI_EINVAL);
}

/// "read of empty CQ / EQ": FI_EAGAIN; "with an error entry at the head": FI_EAVAIL.
#[test]
fn empty_queues_and_errors_at_the_head() {
    let p = Pair::default();
    let mut out = [Completion::default()];
    assert_eq!(p.a.cq.read(&mut out), Err(Error::Again));
    assert_eq!(p.a.cq.readerr().err(), Some(Error::Again));
    p.a.ep.recv(buf(4, 1), FI_ADDR_UNSPEC, 5).unwrap();
    p.a.ep.cancel(5).unwrap();
    assert_eq!(p.a.cq.read(&mut out), Err(Error::Avail));
    assert_eq!(p.a.cq.read(&mut out), Err(Error::Avail));
    let e = p.a.cq.readerr().unwrap();
    assert_eq!((e.entry.op_context, e.err), (5, Error::Canceled));
    assert_eq!(p.a.cq.read(&mut out), Err(Error::Again));
    let eq = the_fabric().eq_open(EqAttr::default()).unwrap();
    assert_eq!(eq.read(&mut []), Err(Error::Again));
    assert_eq!(eq.readerr().err(), Some(Error::Again));
}

/// "message longer than receive buffer": FI_ETRUNC with `len` placed and `olen` lost; the sender
/// succeeds. For a message of one frame, of several, and one that is pulled.
#[test]
fn truncation_tells_what_was_lost() {
    let p = Pair::default();
    for (len, room) in [(64, 16), (64, 0), (12_000, 9_500), (300_000, 1_000), (300_000, 299_999)] {
        for late in [false, true] {
            let post = || p.b.ep.recv(Buf::zeroed(room), FI_ADDR_UNSPEC, 3).unwrap();
            if !late {
                post();
            }
            p.a.ep.send(buf(len, 6), p.a.peer, 4).unwrap();
            if late {
                p.settle();
                post();
            }
            let e = p.error_at_b();
            assert_eq!((e.err, e.entry.len, e.olen), (Error::Trunc, room, len - room), "{late}");
            assert_eq!((e.entry.op_context, e.err.fi_errno()), (3, errno::FI_ETRUNC));
            let placed = e.entry.bufs.into_one().unwrap();
            assert!(placed[..] == pattern(len, 6)[..room], "{len} into {room}");
            assert_eq!(p.at_a().op_context, 4);
        }
    }
    p.all_is_back();
}

/// "cancelled receive": FI_ECANCELED; nothing to cancel is told.
#[test]
fn cancelled_receives_are_ecanceled() {
    let p = Pair::default();
    p.a.ep.trecv(buf(40, 1), FI_ADDR_UNSPEC, 1, 0, 8).unwrap();
    p.a.ep.cancel(8).unwrap();
    let e = p.error_at_a();
    assert_eq!((e.err.fi_errno(), e.entry.op_context), (errno::FI_ECANCELED, 8));
    assert_eq!(e.entry.bufs.into_one().unwrap().len(), 40);
    assert!(p.a.ep.cancel(8).is_err());
    // One context for several receives: each call cancels one of them.
    for _ in 0..3 {
        p.a.ep.recv(buf(1, 1), FI_ADDR_UNSPEC, 9).unwrap();
    }
    for _ in 0..3 {
        p.a.ep.cancel(9).unwrap();
    }
    assert_eq!(p.a.ep.cancel(9), Err(Error::NoData));
    for _ in 0..3 {
        assert_eq!(p.error_at_a().entry.op_context, 9);
    }
    p.all_is_back();
}

/// "peer unreachable / declared dead": FI_EHOSTUNREACH or FI_ECONNRESET within a bounded time; the
/// endpoint stays enabled. Also M7: an injected message that fails is an error entry.
#[test]
fn m7_a_dead_peer_ends_everything_in_time() {
    let mut plan = Plan::default();
    plan.settings.t_dead = Duration::from_millis(300);
    let mut p =
        Pair::with(&plan, &plan, crate::rules::bad_ports(3, 9).into_iter().take(2).collect());
    p.b.ep.recv(Buf::zeroed(1), FI_ADDR_UNSPEC, 0).unwrap();
    p.a.ep.send(buf(1, 1), p.a.peer, 0).unwrap();
    p.at_a();
    p.at_b();
    // B stops: nobody turns its loop any more.
    p.a.ep.send(buf(100, 1), p.a.peer, 1).unwrap();
    p.a.ep.send(buf(100_000, 1), p.a.peer, 2).unwrap();
    p.a.ep.inject(&[1; 10], p.a.peer).unwrap();
    let start = Instant::now();
    let mut contexts = Vec::new();
    let mut polls = Polls::new();
    while contexts.len() < 3 {
        polls.mark();
        if let Some(e) = p.a.read_error() {
            let code = e.err.fi_errno();
            assert!(code == errno::FI_EHOSTUNREACH || code == errno::FI_ECONNRESET, "{e}");
            contexts.push(e.entry.op_context);
        }
        assert!(start.elapsed() < Duration::from_secs(3), "still waiting: {contexts:?}");
    }
    let took = start.elapsed() - polls.starved;
    // A stretch of starvation costs its own length, and once more by the probe that it delays.
    let bound = Duration::from_millis(330) + polls.starved;
    assert!(
        took < bound,
        "{took:?} of our own time for T_dead 300 ms, {:?} starved",
        polls.starved
    );
    contexts.sort_unstable();
    assert_eq!(contexts, [0, 1, 2]);
    // The endpoint works on, with itself and with a new B.
    p.a.ep.recv(Buf::zeroed(1), FI_ADDR_UNSPEC, 7).unwrap();
    p.a.ep.inject(&[9], p.a.me).unwrap();
    assert_eq!(until("a message to ourselves", || p.a.read()).op_context, 7);
    p.a.peer = p.a.me;
}

/// "unknown source with FI_SOURCE_ERR": FI_EADDRNOTAVAIL, and `err_data` fit for insertion.
#[test]
fn x32_unknown_sources() {
    let mut plan = Plan::default();
    plan.info.caps |= Caps::SOURCE_ERR;
    let mut ports = ports(2).into_iter();
    let (a, b) = (
        Side::new(ports.next().unwrap(), &Plan::default()),
        Side::new(ports.next().unwrap(), &plan),
    );
    let to_b = a.knows(b.ep.getname().unwrap());
    b.ep.recv(Buf::zeroed(4), FI_ADDR_UNSPEC, 1).unwrap();
    a.ep.send(buf(4, 8), to_b, 1).unwrap();
    let e = until("the error", || {
        a.domain.progress().unwrap();
        b.read_error()
    });
    assert_eq!((e.err.fi_errno(), e.entry.len), (errno::FI_EADDRNOTAVAIL, 4));
    assert_eq!(e.entry.bufs.into_one().unwrap()[..], pattern(4, 8)[..]);
    let from = e.err_data.expect("the raw address");
    assert_eq!(from, a.ep.getname().unwrap());
    let known = b.knows(from);
    b.ep.recv(Buf::zeroed(4), FI_ADDR_UNSPEC, 2).unwrap();
    a.ep.send(buf(4, 8), to_b, 2).unwrap();
    let (mut out, mut src) = ([Completion::default()], [0]);
    until("the message", || {
        a.domain.progress().unwrap();
        b.cq.readfrom(&mut out, &mut src).ok()
    });
    assert_eq!((src[0], out[0].len), (known, 4));
}

/// "close with dependents": FI_EBUSY.
#[test]
fn closing_what_is_in_use_is_ebusy() {
    let Side { ep, cq, av, domain, .. } = Side::new(ports(1).remove(0), &Plan::default());
    let (e, cq) = cq.close().unwrap_err();
    assert_eq!(e, Error::Busy);
    let (e, av) = av.close().unwrap_err();
    assert_eq!(e, Error::Busy);
    let (e, domain) = domain.close().unwrap_err();
    assert_eq!(e, Error::Busy);
    ep.close();
    assert!(cq.close().is_ok() && av.close().is_ok());
    assert!(domain.close().is_ok());
}

/// "getinfo: nothing matches / newer API asked / bad flags": FI_ENODATA, FI_ENOSYS, FI_EBADFLAGS.
#[test]
fn getinfo_codes() {
    let ask = |version, flags, hints: &Info| {
        getinfo_with(&settings(), version, None, None, flags, Some(hints)).map(|v| v.len())
    };
    let wild = Info::default();
    assert_eq!(ask(API_VERSION, InfoFlags::empty(), &wild), Ok(1));
    assert_eq!(ask(API_VERSION + 1, InfoFlags::empty(), &wild), Err(Error::NoSys));
    let unknown = InfoFlags::from_bits_retain(1 << 3);
    assert_eq!(ask(API_VERSION, unknown, &wild), Err(Error::BadFlags));
    let none = Info { caps: Caps::MULTICAST, ..Info::default() };
    assert_eq!(ask(API_VERSION, InfoFlags::empty(), &none), Err(Error::NoData));
    assert_eq!(info::getinfo_raw(API_VERSION, None, None, 1, None), Err(Error::BadFlags));
}

/// "MR: requested key in use / bad flags / getname too small": FI_ENOKEY, FI_EBADFLAGS,
/// FI_ETOOSMALL.
#[test]
fn registration_and_name_codes() {
    let side = Side::new(ports(1).remove(0), &Plan::default());
    let attr = MrAttr { access: Access::SEND, requested_key: Some(5), ..MrAttr::default() };
    let mr = side.domain.mr_reg(buf(100, 1), &attr).unwrap();
    assert_eq!((mr.key(), mr.access()), (5, Access::SEND));
    assert_eq!(side.domain.mr_reg(buf(1, 1), &attr).err(), Some(Error::NoKey));
    let flagged = MrAttr { flags: 1, requested_key: None, ..attr };
    assert_eq!(side.domain.mr_reg(buf(1, 1), &flagged).err(), Some(Error::BadFlags));
    let empty = MrAttr { requested_key: None, ..attr };
    let e = side.domain.mr_reg(buf(0, 1), &empty).err().unwrap();
    assert_eq!(e.fi_errno(), errno::FI_EINVAL);
    // A region that nobody may touch is allowed, as with every provider of libfabric.
    drop(side.domain.mr_reg(buf(1, 1), &MrAttr { access: Access::empty(), ..empty }).unwrap());
    assert_eq!(side.domain.levels().unwrap().regions, 1);
    assert_eq!(mr.close().remove(0)[..], pattern(100, 1)[..]);
    let again = side.domain.mr_regv(vec![buf(1, 1), buf(2, 2)], &attr).unwrap();
    drop(again);
    assert_eq!(side.domain.levels().unwrap().regions, 0);
    assert_eq!(side.ep.getname_bytes(&mut [0; 15]), Err(Error::TooSmall));
    let mut name = [0; 20];
    assert_eq!(side.ep.getname_bytes(&mut name), Ok(16));
    assert_eq!(name[..16], side.ep.getname().unwrap().to_bytes());
}

/// "peek, no match": FI_ENOMSG (X51).
#[test]
fn peeking_at_nothing_is_enomsg() {
    let p = Pair::default();
    p.a.ep.trecvmsg(tagged((), FI_ADDR_UNSPEC, 3, 4), OpFlags::PEEK).unwrap();
    let e = p.error_at_a();
    assert_eq!((e.err.fi_errno(), e.entry.op_context), (errno::FI_ENOMSG, 4));
    assert!(e.entry.flags.contains(CqFlags::TAGGED));
    p.all_is_back();
}

/// Endpoint types, keys and groups that are not offered are refused where they are asked for.
#[test]
fn what_is_not_offered_is_refused() {
    let side = Side::new(ports(1).remove(0), &Plan::default());
    let usual = Plan::default().info;
    let refused = |change: fn(&mut Info)| {
        let mut info = usual.clone();
        change(&mut info);
        side.domain.endpoint(&info).err().map(Error::fi_errno)
    };
    let not = Some(errno::FI_EOPNOTSUPP);
    assert_eq!(refused(|i| i.ep_attr.ep_type = EpType::Msg), not);
    assert_eq!(refused(|i| i.ep_attr.ep_type = EpType::Dgram), not);
    let invalid = Some(errno::FI_EINVAL);
    assert_eq!(refused(|i| i.ep_attr.auth_key = AuthKey::new(&[1; 32])), invalid);
    assert_eq!(
        side.domain.cq_open(CqAttr { wait_obj: WaitObj::Set, ..CqAttr::default() }).err(),
        Some(Error::NoSys)
    );
    assert_eq!(
        side.domain.av_open(AvAttr { event: true, ..AvAttr::default() }).err(),
        Some(Error::NoSys)
    );
}
