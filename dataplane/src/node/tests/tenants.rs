//! Nodes whose keys are of tenants: one station under two keys is two peers.

use super::*;
use crate::error::Error;
use crate::seal::{Keyring, Mode, PreSharedKey};
use crate::types::Tenant;

const MS: u64 = 1_000_000;

fn key(n: u8) -> PreSharedKey {
    PreSharedKey::new(&[n; 32], Mode::Encrypted).unwrap()
}

/// An end whose node has the keys of these tenants, or with `single` the one key of everybody.
fn end_of(station: u8, numbers: &[u8], single: bool) -> (End, Vec<Tenant>) {
    let entropy = [station; 32];
    let keys = match single {
        true => Keyring::new(numbers.iter().map(|&n| key(n)).collect(), entropy),
        false => Some(Keyring::of_tenants(entropy)),
    };
    let mut end = end_with(station, 1500, false, NodeSettings { keys, ..NodeSettings::default() });
    let keys = numbers.iter().filter(|_| !single);
    let tenants = keys.map(|&n| end.node.openings.add_tenant(key(n)).unwrap()).collect();
    (end, tenants)
}

fn add(pair: &mut Pair, i: usize, tenant: Tenant) -> FiAddr {
    let addr = pair.ends[1 - i].node.addr_of(pair.ends[1 - i].ep).unwrap();
    let end = &mut pair.ends[i];
    end.node.sessions().av_insert_of(pair.now, end.av, addr, tenant).unwrap()
}

fn send(pair: &mut Pair, i: usize, to: FiAddr, byte: u8) {
    pair.ends[i].peer = to;
    pair.send(i, IoBuf::leaked(&[byte; 8]), 5, OpFlags::empty(), byte.into()).unwrap();
}

/// Posts a receive at end `i` and returns the memory that it fills.
fn recv_from(pair: &mut Pair, i: usize, src: FiAddr, flags: OpFlags, context: u64) -> IoBuf {
    let (buf, look) = shared(8);
    let req = RecvReq { kind: MsgKind::Tagged, buf, src, tag: 5, ignore: 0, context, flags };
    let end = &mut pair.ends[i];
    end.node.post_recv(pair.now, end.ep, req).unwrap();
    look
}

/// Ends all sessions of end `i` without a word.
fn drop_all(pair: &mut Pair, i: usize) {
    let node = &mut pair.ends[i].node;
    let peers: Vec<_> = node.peers.iter().map(|(p, _)| p).collect();
    for p in peers {
        node.sessions().end_session(pair.now, p, crate::node::EndReason::Dropped);
    }
}

/// Goal: the same two endpoints meet under two keys in two sessions; a receive for a key takes
/// messages of that tenant alone, also one that was there before, and the source says whose it is.
#[test]
fn one_endpoint_under_two_keys_is_two_peers() {
    let (a, of_a) = end_of(1, &[1, 2], false);
    let (b, of_b) = end_of(2, &[2, 1], false);
    let mut pair = Pair::of([a, b]);
    let to = [add(&mut pair, 0, of_a[0]), add(&mut pair, 0, of_a[1])];
    // The other end lists them the other way round.
    let from = [add(&mut pair, 1, of_b[1]), add(&mut pair, 1, of_b[0])];
    assert!(to[0] != to[1] && from[0] != from[1]);
    for early in [false, true] {
        let handle = of_b[0].handle();
        let post = |pair: &mut Pair| recv_from(pair, 1, handle, OpFlags::AUTH_KEY, 7);
        let look = (!early).then(|| post(&mut pair));
        for round in 0..4 {
            send(&mut pair, 0, to[0], 10 + round);
        }
        pair.run(50 * MS);
        send(&mut pair, 0, to[1], 20);
        pair.run(50 * MS);
        let look = look.unwrap_or_else(|| post(&mut pair));
        pair.run(50 * MS);
        let got = pair.read(1);
        let seen: Vec<_> = got.iter().map(|c| (c.op_context, c.src)).collect();
        assert_eq!((seen, contents(&look)), (vec![(7, from[1])], vec![20; 8]), "early {early}");
        for round in 0..4 {
            let look = recv_from(&mut pair, 1, FI_ADDR_UNSPEC, OpFlags::empty(), round);
            pair.run(MS);
            let got = pair.read(1);
            let seen: Vec<_> = got.iter().map(|c| (c.op_context, c.src)).collect();
            let want = (vec![(round, from[0])], vec![10 + round as u8; 8]);
            assert_eq!((seen, contents(&look)), want, "early {early}");
        }
        assert_eq!(pair.read(0).len(), 5);
    }
    for end in &pair.ends {
        let c = end.node.counters();
        assert_eq!((c.sessions_opened, c.sessions_dead), (2, 0), "one for each key");
    }
}

/// Goal: who has the key of one tenant meets him and nobody else; a receive for another tenant
/// does not see him.
#[test]
fn a_tenant_with_one_key_meets_a_node_with_several() {
    for (key, first) in [(1, 0), (1, 1), (2, 0), (2, 1)] {
        let (a, of_a) = end_of(1, &[1, 2], false);
        let (b, _) = end_of(2, &[key], true);
        let mut pair = Pair::of([a, b]);
        let mine = usize::from(key) - 1;
        let to = add(&mut pair, 0, of_a[mine]);
        let back = pair.ends[1].peer;
        let other = recv_from(&mut pair, 0, of_a[1 - mine].handle(), OpFlags::AUTH_KEY, 8);
        let look = recv_from(&mut pair, 0, of_a[mine].handle(), OpFlags::AUTH_KEY, 9);
        let answer = recv_from(&mut pair, 1, FI_ADDR_UNSPEC, OpFlags::empty(), 1);
        if first == 0 {
            send(&mut pair, 0, to, 3);
            pair.run(20 * MS);
        }
        send(&mut pair, 1, back, 4);
        pair.run(50 * MS);
        if first == 1 {
            send(&mut pair, 0, to, 3);
            pair.run(20 * MS);
        }
        let got: Vec<_> = pair.read(0).iter().map(|c| (c.op_context, c.src)).collect();
        assert!(got.contains(&(9, to)) && got.len() == 2, "{got:?}");
        assert_eq!([look, answer, other].map(|b| contents(&b)[0]), [4, 3, 0xEE]);
        assert_eq!(pair.ends.each_ref().map(|e| e.node.counters().sessions_opened), [1, 1]);
        // And his reset is believed: it is under his key.
        drop_all(&mut pair, 0);
        assert_eq!(pair.read(1).len(), 2);
        send(&mut pair, 1, back, 5);
        pair.run(1_200 * MS);
        assert_eq!(pair.read_err(1).err, Error::ConnReset);
    }
}

#[test]
fn a_key_of_no_tenant_is_refused() {
    let (a, of_a) = end_of(1, &[1, 2], false);
    let (b, _) = end_of(2, &[3], true);
    let mut pair = Pair::of([a, b]);
    let to = add(&mut pair, 0, of_a[1]);
    let back = pair.ends[1].peer;
    send(&mut pair, 0, to, 1);
    send(&mut pair, 1, back, 2);
    pair.run(1_100 * MS);
    for i in 0..2 {
        assert_eq!(pair.read_err(i).err, Error::Access);
    }
    // From now on it is one.
    let third = pair.ends[0].node.openings.add_tenant(key(3)).unwrap();
    let to = add(&mut pair, 0, third);
    let look = recv_from(&mut pair, 1, FI_ADDR_UNSPEC, OpFlags::empty(), 1);
    send(&mut pair, 0, to, 6);
    pair.run(50 * MS);
    assert_eq!(contents(&look), [6; 8]);
}

#[test]
fn an_unknown_key_is_refused_and_a_key_in_use_stays() {
    let (a, of_a) = end_of(1, &[1, 2], false);
    let (b, _) = end_of(2, &[1], true);
    let mut pair = Pair::of([a, b]);
    let to = add(&mut pair, 0, of_a[0]);
    let addr = pair.ends[1].node.addr_of(pair.ends[1].ep).unwrap();
    let now = pair.now;
    let End { node, ep, av, .. } = &mut pair.ends[0];
    let invalid = |got: Result<FiAddr>| assert!(matches!(got, Err(Error::Invalid(_))), "{got:?}");
    invalid(node.sessions().av_insert(now, *av, addr));
    let nobody = Tenant::of_handle(of_a[0].handle() + 9).unwrap();
    invalid(node.sessions().av_insert_of(now, *av, addr, nobody));
    for src in [to, nobody.handle(), FI_ADDR_UNSPEC, FI_ADDR_UNSPEC - 1, 1 << 40] {
        let (buf, kind, flags) = (IoBuf::leaked(&[0; 8]), MsgKind::Tagged, OpFlags::AUTH_KEY);
        let req = RecvReq { kind, buf, src, tag: 5, ignore: 0, context: 1, flags };
        let got = node.post_recv(now, *ep, req);
        assert!(matches!(got, Err(Error::Invalid(_))), "{src:#x}: {got:?}");
    }
    assert_eq!(node.openings.add_tenant(key(2)), Ok(of_a[1]), "the same key is the same tenant");
    assert!(node.openings.add_tenant(key(3)).is_ok() && node.openings.add_tenant(key(4)).is_ok());
    assert_eq!(node.openings.add_tenant(key(5)), Err(Error::NoMem));
    assert!(matches!(node.sessions().set_keys(now, vec![key(1)]), Err(Error::OpNotSupp(_))));
    assert_eq!(node.sessions().remove_tenant(now, of_a[0]), Err(Error::Busy));
    assert!(matches!(node.sessions().remove_tenant(now, nobody), Err(Error::Invalid(_))));

    send(&mut pair, 0, to, 1);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    pair.run(50 * MS);
    assert_eq!((pair.read(0).len(), pair.read(1).len()), (1, 1));
    let End { node, av, .. } = &mut pair.ends[0];
    node.objects().av_remove(*av, to).unwrap();
    node.sessions().remove_tenant(pair.now, of_a[0]).unwrap();
    invalid(node.sessions().av_insert_of(pair.now, *av, addr, of_a[0]));
    assert!(
        node.openings.add_tenant(key(5)).is_ok_and(|new| !of_a.contains(&new)),
        "no number twice"
    );
    let back = pair.ends[1].peer;
    send(&mut pair, 1, back, 2);
    pair.run(2_500 * MS);
    let (got, told) = (pair.read(1).len(), pair.read_err(1).err);
    assert_eq!((got, told), (0, Error::HostUnreach), "who has the key still is not answered");
}

/// Goal: who has a key takes no name away from another tenant: sessions at one station that have
/// the same name under two keys go on beside each other. Method: two processes that draw the same
/// names and take turns at the station, since both ends of the pair hear all frames that are for
/// them.
#[test]
fn one_name_under_two_keys_is_two_sessions() {
    let (a, of_a) = end_of(1, &[1, 2], false);
    let (b, _) = end_of(2, &[1], true);
    let mut pair = Pair::of([a, b]);
    let to = add(&mut pair, 0, of_a[0]);
    pair.recv(1, IoBuf::leaked(&[0; 8]), 5, OpFlags::empty(), 1).unwrap();
    send(&mut pair, 0, to, 1);
    pair.run(50 * MS);
    assert_eq!(pair.read(1).len(), 1);
    let name = |pair: &Pair| pair.ends[1].node.peers.iter().next().unwrap().1.sid;
    let first = name(&pair);
    // The same seed draws the same names.
    let (mut b, _) = end_of(2, &[2], true);
    b.node.settings.incarnation = 777;
    let addr = pair.ends[0].node.addr_of(pair.ends[0].ep).unwrap();
    b.peer = b.node.sessions().av_insert(pair.now, b.av, addr).unwrap();
    let mut away = std::mem::replace(&mut pair.ends[1], b);
    let under_second = add(&mut pair, 0, of_a[1]);
    for round in 0..4 {
        for (tenant, to) in [(1, under_second), (0, to)] {
            let look = recv_from(&mut pair, 0, of_a[tenant].handle(), OpFlags::AUTH_KEY, 9);
            let got = recv_from(&mut pair, 1, FI_ADDR_UNSPEC, OpFlags::empty(), 8);
            let back = pair.ends[1].peer;
            send(&mut pair, 1, back, 40 + round);
            send(&mut pair, 0, to, 20 + round);
            pair.run(5 * MS);
            assert_eq!(name(&pair), first, "the test tests what it says");
            assert_eq!([look, got].map(|buf| contents(&buf)), [40, 20].map(|n| vec![n + round; 8]));
            pair.read(0);
            pair.read(1);
            std::mem::swap(&mut pair.ends[1], &mut away);
        }
    }
    let c = pair.ends[0].node.counters();
    assert_eq!((c.sessions_opened, c.sessions_reset, c.sessions_dead), (2, 0, 0));
    // The end of one is told by the name that its peer knows it by, and the other goes on.
    let node = &mut pair.ends[0].node;
    let p = node.peers.iter().find(|(_, peer)| peer.tenant == of_a[1]).unwrap().0;
    node.sessions().end_session(pair.now, p, crate::node::EndReason::Evicted);
    pair.run(5 * MS);
    let c = pair.ends[1].node.counters();
    assert_eq!((c.sessions_reset, c.rx_bad_rst), (1, 0));
    std::mem::swap(&mut pair.ends[1], &mut away);
    let got = recv_from(&mut pair, 1, FI_ADDR_UNSPEC, OpFlags::empty(), 8);
    send(&mut pair, 0, to, 60);
    pair.run(5 * MS);
    assert_eq!(contents(&got), [60; 8]);
}

/// Goal: a station with the key of no tenant is reported once, and again when a tenant was added;
/// a node whose keys are of no tenant, or that has none, gets no tenant.
#[test]
fn another_key_is_reported_again_when_a_tenant_is_added() {
    let (a, _) = end_of(1, &[1], false);
    let (b, _) = end_of(2, &[3], true);
    let mut pair = Pair::of([a, b]);
    let back = pair.ends[1].peer;
    let station = pair.ends[1].node.port.station;
    for added in [2, 4] {
        for expected in [1, 0] {
            send(&mut pair, 1, back, 1);
            pair.run(1_100 * MS);
            assert_eq!(pair.read_err(1).err, Error::Access);
            let observed = &mut pair.ends[0].node.observed;
            let reported: Vec<Notice> = std::iter::from_fn(|| observed.notice()).collect();
            let notice = Notice::OtherKey { station, has_key: true };
            assert_eq!(reported, vec![notice; expected], "before key {added}");
        }
        pair.ends[0].node.openings.add_tenant(key(added)).unwrap();
    }
    for mut end in [end_of(1, &[1], true).0, end(1, 1500, false)] {
        let added = end.node.openings.add_tenant(key(2));
        assert!(matches!(added, Err(Error::OpNotSupp(_))), "{added:?}");
    }
}
