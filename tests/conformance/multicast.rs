//! Multicast (rows X18, MF12, R8): best effort, to whoever has joined.

use barewire::flags::{Caps, OpFlags};
use barewire::*;

use crate::harness::*;

const FI_SEND: u64 = coll::FI_SEND;
const FI_RECV: u64 = coll::FI_RECV;

fn plan() -> Plan {
    let hints = Info { caps: usual_caps() | Caps::MULTICAST, ..Info::default() };
    Plan { info: info(&hints), ..Plan::default() }
}

/// A group. Each test has numbers of its own: on a real port all tests share the link.
fn group(number: u16) -> GroupAddr {
    GroupAddr::of_v4([239, 1, 2, 3], number).unwrap()
}

/// Whether the ports that are tested have a broadcast.
fn has_groups() -> bool {
    let port = ports(1).remove(0);
    let kind = port.caps().name.clone();
    !["udp", "ip("].iter().any(|other| kind.starts_with(other))
}

fn pair() -> Option<Pair> {
    if has_groups() {
        return Some(Pair::new(&plan()));
    }
    let side = Side::new(ports(1).remove(0), &Plan::default());
    let refused = side.domain.endpoint(&plan().info).err().map(Error::fi_errno);
    assert_eq!(refused, Some(errno::FI_EOPNOTSUPP));
    None
}

/// Joins, and takes the event.
fn join(side: &Side, number: u16, flags: u64, context: u64) -> Group {
    let eq = the_fabric().eq_open(EqAttr::default()).unwrap();
    side.ep.bind_eq(&eq).unwrap();
    let joined = side.ep.join(group(number), flags, context).unwrap();
    let mut bytes = [0; 16];
    assert_eq!(eq.read(&mut bytes), Ok((FI_JOIN_COMPLETE, 8)));
    assert_eq!(bytes[..8], context.to_ne_bytes());
    joined
}

/// X18, MF12: a member receives what another sends to the group, with source and remote CQ data,
/// by every untagged call, from no byte to the longest length; the sender does not receive it, and
/// whoever has left does not either.
#[test]
fn x18_members_of_a_group_receive() {
    let Some(p) = pair() else { return };
    let (at_a, at_b) = (join(&p.a, 7, 0, 1), join(&p.b, 7, 0, 2));
    let (max, to) = (at_a.max_msg_size(), at_a.addr());
    let data = OpFlags::REMOTE_CQ_DATA | OpFlags::MULTICAST;
    let calls = (0..4).flat_map(|call| [0, 100, max].map(|len| (call, len)));
    for (call, len) in calls {
        let len = match call {
            1 => len.min(256),
            0 => len,
            _ => len.min(max - 8),
        };
        p.a.ep.recv(buf(len, 0), FI_ADDR_UNSPEC, 10).unwrap();
        p.b.ep.recv(buf(len, 0), FI_ADDR_UNSPEC, 11).unwrap();
        let bytes = pattern(len, call);
        match call {
            0 => p.a.ep.send(buf(len, call), to, 12).unwrap(),
            1 => p.a.ep.inject(&bytes, to).unwrap(),
            2 => p.a.ep.senddata(buf(len, call), 99, to, 12).unwrap(),
            _ => {
                let msg = Msg { data: 99, ..untagged(buf(len, call), to, 12) };
                p.a.ep.sendmsg(msg, data).unwrap();
            }
        }
        let got = p.at_b();
        assert_eq!((got.op_context, got.len, got.src), (11, len, p.b.peer));
        assert_eq!(got.data, if call < 2 { 0 } else { 99 });
        assert!(matches!(&got.bufs, Bufs::One(b) if b[..] == bytes[..]));
        if call != 1 {
            assert_eq!(p.at_a().op_context, 12);
        }
        p.settle();
        assert!(p.a.read().is_none(), "the sender has received its own message");
        assert_eq!(p.a.ep.cancel(10), Ok(()));
        assert_eq!(p.error_at_a().err, Error::Canceled);
    }
    at_b.close();
    p.b.ep.recv(buf(100, 0), FI_ADDR_UNSPEC, 11).unwrap();
    p.a.ep.send(buf(100, 1), to, 12).unwrap();
    assert_eq!(p.at_a().op_context, 12);
    p.settle();
    assert!(p.b.read().is_none(), "who has left has received");
    assert_eq!(p.b.ep.cancel(11), Ok(()));
    assert_eq!(p.error_at_b().err, Error::Canceled);
    p.all_is_back();
}

/// X18: a message without a posted receive is lost, and nothing of it is kept.
#[test]
fn x18_what_is_not_awaited_is_lost() {
    let Some(p) = pair() else { return };
    let (at_a, _at_b) = (join(&p.a, 8, FI_SEND, 1), join(&p.b, 8, FI_RECV, 2));
    p.a.ep.send(buf(8, 1), at_a.addr(), 1).unwrap();
    assert_eq!(p.at_a().op_context, 1);
    p.settle();
    p.b.ep.recv(buf(8, 0), FI_ADDR_UNSPEC, 2).unwrap();
    p.settle();
    assert!(p.b.read().is_none(), "a message was stored");
    p.a.ep.send(buf(8, 2), at_a.addr(), 3).unwrap();
    assert_eq!((p.at_b().op_context, p.at_a().op_context), (2, 3));
    p.all_is_back();
}

/// X18: who leaves while messages arrive receives none after that, and who joins again does.
#[test]
fn x18_who_leaves_while_messages_arrive_receives_no_more() {
    let mut auto = plan();
    auto.info.domain_attr.data_progress = Progress::Auto;
    if !has_groups() {
        return;
    }
    let p = Pair::with(&plan(), &auto, ports(2));
    let at_a = join(&p.a, 9, FI_SEND, 1);
    let eq = the_fabric().eq_open(EqAttr::default()).unwrap();
    p.b.ep.bind_eq(&eq).unwrap();
    // A thread drives B, and places messages beside these calls.
    let send = |n| {
        until("room for a message", || p.a.ep.send(buf(8, n), at_a.addr(), n).ok());
        while p.a.read().is_some() {}
    };
    let (mut posted, mut number) = (0, 0);
    for _ in 0..30 {
        let at_b = p.b.ep.join(group(9), FI_RECV, 2).unwrap();
        while posted < 16 {
            p.b.ep.recv(buf(8, 0), FI_ADDR_UNSPEC, 3).unwrap();
            posted += 1;
        }
        until("a message", || {
            number += 1;
            send(number);
            p.b.read().map(|_| posted -= 1)
        });
        at_b.close();
        while p.b.read().is_some() {
            posted -= 1;
        }
        for n in 0..20 {
            send(n);
        }
        p.settle();
        assert!(p.b.read().is_none(), "a message came to one who had left");
    }
    while posted > 0 {
        assert_eq!(p.b.ep.cancel(3), Ok(()));
        assert_eq!(p.error_at_b().err, Error::Canceled);
        posted -= 1;
    }
    p.all_is_back();
}

/// R8, MF12: what a group does not have is refused, and so is FI_MULTICAST for what is no group.
#[test]
fn r8_what_a_group_does_not_have_is_refused() {
    let Some(p) = pair() else { return };
    assert_eq!(p.a.ep.join(group(1), 0, 0).err(), Some(Error::NoEq));
    let both = join(&p.a, 1, 0, 1);
    let listens = p.a.ep.join(group(2), FI_RECV, 2).unwrap();
    assert_eq!(p.a.ep.join(group(3), 1 << 40, 0).err(), Some(Error::BadFlags));
    let again = p.a.ep.join(group(1), 0, 0).err().map(Error::fi_errno);
    assert_eq!(again, Some(errno::FI_EINVAL));
    let sent = |dest, len, flags| {
        refusal(p.a.ep.sendmsg(untagged(buf(len, 1), dest, 1), flags), len).fi_errno()
    };
    let multicast = OpFlags::MULTICAST;
    assert_eq!(sent(p.a.peer, 4, multicast), errno::FI_EINVAL);
    assert_eq!(sent(both.addr() + 99, 4, multicast), errno::FI_EINVAL);
    assert_eq!(sent(listens.addr(), 4, multicast), errno::FI_EOPNOTSUPP);
    assert_eq!(sent(both.addr(), both.max_msg_size() + 1, PLAIN), errno::FI_EMSGSIZE);
    assert_eq!(sent(both.addr(), 4, OpFlags::DELIVERY_COMPLETE), errno::FI_EBADFLAGS);
    assert_eq!(sent(both.addr(), 4, OpFlags::FENCE), errno::FI_EBADFLAGS);
    let tagged = refusal(p.a.ep.tsend(buf(4, 1), both.addr(), 1, 1), 4);
    assert_eq!(tagged.fi_errno(), errno::FI_EOPNOTSUPP);
    // Of another endpoint's membership nothing can be sent.
    assert_eq!(refusal(p.b.ep.send(buf(4, 1), both.addr(), 1), 4).fi_errno(), errno::FI_EINVAL);
    let at = both.addr();
    both.close();
    assert_eq!(sent(at, 4, multicast), errno::FI_EINVAL);
    p.all_is_back();
}
