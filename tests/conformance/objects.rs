//! Sections C.1 to C.3: information, domains, endpoints, options, addresses.

use std::time::Duration;

use barewire::flags::{Caps, InfoFlags, Mode, MrMode, OpFlags, Order};
use barewire::info::{CAPS, MAX_MSG_SIZE, SINCE_2_0};
use barewire::opt::*;
use barewire::*;
use proptest::prelude::*;

use crate::harness::*;

fn ask(hints: &Info) -> Result<Info> {
    let none = InfoFlags::empty();
    getinfo_with(&settings(), API_VERSION, None, None, none, Some(hints)).map(|mut v| v.remove(0))
}

/// X1, X83: without hints everything is told, and what is told is enough for the middleware.
#[test]
fn x1_x83_everything_there_is() {
    let none = InfoFlags::empty();
    let all = getinfo_with(&settings(), version(1, 17), None, None, none, None).unwrap();
    let info = &all[0];
    let asked_alone = Caps::SOURCE_ERR | Caps::NAMED_RX_CTX | Caps::MULTICAST;
    assert_eq!(info.caps, CAPS - asked_alone - SINCE_2_0);
    assert_eq!((info.mode, info.ep_attr.ep_type), (Mode::empty(), EpType::Rdm));
    assert_eq!(info.fabric_attr.api_version, version(1, 17));
    assert_eq!(info.fabric_attr.prov_name.as_deref(), Some("barewire"));
    assert_eq!(info.domain_attr.name.as_deref(), Some("shm"));
    assert!(info.tx_attr.inject_size >= 192 && info.tx_attr.iov_limit >= 8);
    assert!(info.tx_attr.size >= 1024 && info.rx_attr.size >= 1024);
    assert_eq!((info.domain_attr.cq_data_size, info.ep_attr.max_msg_size), (8, MAX_MSG_SIZE));
    assert_eq!((info.tx_attr.msg_order, info.tx_attr.comp_order), (Order::SAS, Order::empty()));
    assert_eq!(info.domain_attr.resource_mgmt, ResourceMgmt::Enabled);
    assert_eq!(info.domain_attr.mr_mode, MrMode::empty());
}

/// X1: primary capabilities only if asked for; a direction alone stays alone.
#[test]
fn x1_primary_capabilities_are_asked_for() {
    let caps = |caps| ask(&Info { caps, ..Info::default() }).unwrap().caps;
    let got = caps(Caps::TAGGED);
    assert!(got.contains(Caps::TAGGED | Caps::SEND | Caps::RECV));
    assert!(!got.intersects(Caps::MSG | Caps::DIRECTED_RECV | Caps::SOURCE_ERR));
    let got = caps(Caps::MSG | Caps::SEND);
    assert!(!got.intersects(Caps::RECV | Caps::TAGGED));
    assert!(caps(Caps::MSG | Caps::SOURCE_ERR).contains(Caps::SOURCE_ERR));
    let one_way = ask(&Info { caps: Caps::MSG | Caps::TAGGED, ..Info::default() }).unwrap();
    assert!(!one_way.tx_attr.caps.contains(Caps::RECV));
    assert!(!one_way.rx_attr.caps.contains(Caps::SEND));
}

/// X1: node and service are the peer's address, with FI_SOURCE ours, in the format asked for.
#[test]
fn x1_x19_node_and_service() {
    let s = settings();
    let get = |node, service, flags, format| {
        let hints = Info { addr_format: format, ..Info::default() };
        getinfo_with(&s, API_VERSION, node, service, flags, Some(&hints)).map(|mut v| v.remove(0))
    };
    let (station, native) = ("02:00:00:00:00:09", AddrFormat::Unspec);
    let info = get(Some(station), Some("3"), InfoFlags::empty(), native).unwrap();
    let dest = info.dest().unwrap().unwrap();
    assert_eq!((dest.to_string(), info.src_addr), (format!("barewire://{station}/3"), None));
    assert_eq!(info.dest_addr.map(|a| a.len()), Some(16));
    let info = get(Some(station), Some("3"), InfoFlags::empty(), AddrFormat::Str).unwrap();
    assert_eq!(info.dest_addr.as_deref(), Some(format!("barewire://{station}/3").as_bytes()));
    assert_eq!(info.dest().unwrap(), Some(dest));
    let info = get(None, Some("3"), InfoFlags::SOURCE, native).unwrap();
    assert!(info.src_addr.is_some() && info.dest_addr.is_none());
    assert_eq!(get(Some("nowhere"), None, InfoFlags::empty(), native).unwrap_err().fi_errno(), 22);
    assert_eq!(get(None, Some("3"), InfoFlags::empty(), native).unwrap_err().fi_errno(), 22);
    let only = get(None, None, InfoFlags::PROV_ATTR_ONLY, AddrFormat::Other(3)).unwrap();
    assert_eq!(only.fabric_attr.prov_name.as_deref(), Some("barewire"));
}

fn within(asked: usize, got: usize) -> bool {
    asked <= got
}

proptest! {
    /// X1: whatever is asked, an answer holds all of it and grants no primary capability beyond it.
    #[test]
    fn x1_answers_hold_what_was_asked(
        caps in any::<u64>(),
        sizes in proptest::array::uniform8(0_usize..5000),
        (op_flags, order) in (any::<u64>(), 0_u64..0x200),
        (threading, progress) in (0_usize..3, 0_usize..3),
    ) {
        let mut hints = Info { caps: Caps::from_bits_truncate(caps), ..Info::default() };
        hints.tx_attr.inject_size = sizes[0] / 10;
        hints.tx_attr.size = sizes[1];
        hints.tx_attr.iov_limit = sizes[2] / 500;
        hints.rx_attr.size = sizes[3];
        hints.rx_attr.iov_limit = sizes[4] / 500;
        hints.ep_attr.max_msg_size = sizes[5] as u64;
        hints.domain_attr.cq_data_size = sizes[6] / 500;
        hints.domain_attr.mr_iov_limit = sizes[7] / 500;
        if op_flags % 4 == 0 {
            hints.tx_attr.op_flags = OpFlags::from_bits_truncate(op_flags);
        }
        if order % 3 == 0 {
            hints.rx_attr.msg_order = Order::from_bits_truncate(order);
        }
        let threads = [Threading::Unspec, Threading::Safe, Threading::Domain];
        hints.domain_attr.threading = threads[threading];
        let turns = [Progress::Unspec, Progress::Auto, Progress::Manual];
        hints.domain_attr.data_progress = turns[progress];
        let got = match ask(&hints) {
            Ok(got) => got,
            Err(e) => {
                prop_assert_eq!(e, Error::NoData);
                return Ok(());
            }
        };
        prop_assert!(got.caps.contains(hints.caps));
        let primary = Caps::MSG | Caps::TAGGED | Caps::DIRECTED_RECV | Caps::RMA | Caps::ATOMIC;
        if !hints.caps.is_empty() {
            prop_assert!(hints.caps.contains(got.caps & primary), "{:?}", got.caps);
        }
        prop_assert!(got.caps.contains(got.tx_attr.caps | got.rx_attr.caps));
        prop_assert!(within(hints.tx_attr.inject_size, got.tx_attr.inject_size));
        prop_assert!(within(hints.tx_attr.size, got.tx_attr.size));
        prop_assert!(within(hints.tx_attr.iov_limit, got.tx_attr.iov_limit));
        prop_assert!(within(hints.rx_attr.size, got.rx_attr.size));
        prop_assert!(within(hints.rx_attr.iov_limit, got.rx_attr.iov_limit));
        prop_assert!(within(hints.domain_attr.cq_data_size, got.domain_attr.cq_data_size));
        prop_assert!(within(hints.domain_attr.mr_iov_limit, got.domain_attr.mr_iov_limit));
        prop_assert_eq!(got.tx_attr.op_flags, hints.tx_attr.op_flags);
        prop_assert!(got.rx_attr.msg_order.contains(hints.rx_attr.msg_order));
        if threading > 0 {
            prop_assert_eq!(got.domain_attr.threading, threads[threading]);
        }
        if progress > 0 {
            prop_assert_eq!(got.domain_attr.data_progress, turns[progress]);
        }
        // An answer is a hint that is answered by itself.
        prop_assert_eq!(ask(&got).map(|again| again.caps), Ok(got.caps));
    }
}

/// X2: names are stable; several domains in a process, and one closed leaves the others alone.
#[test]
fn x2_several_domains_in_a_process() {
    let f = the_fabric();
    let wrong = FabricAttr { name: Some("tcp".into()), ..FabricAttr::default() };
    assert_eq!(barewire::fabric(&wrong).err(), Some(Error::NoData));
    let plan = Plan::default();
    let mut sides: Vec<Side> = ports(3).into_iter().map(|p| Side::new(p, &plan)).collect();
    let third = sides.pop().unwrap();
    drop(third);
    let (a, b) = (&sides[0], &sides[1]);
    let to_b = a.knows(b.ep.getname().unwrap());
    b.ep.recv(Buf::zeroed(3), FI_ADDR_UNSPEC, 1).unwrap();
    a.ep.inject(&[1, 2, 3], to_b).unwrap();
    let got = until("the message", || {
        a.domain.progress().unwrap();
        b.read()
    });
    assert_eq!(got.bytes(), [1, 2, 3]);
    let again = info(&Info::default());
    assert_eq!(again.fabric_attr.name, info(&Info::default()).fabric_attr.name);
    assert!(f.attr().name.is_none());
}

/// X6: options that are known are read and set, others are FI_ENOPROTOOPT.
#[test]
fn x6_options() {
    let side = Side::new(ports(1).remove(0), &Plan::default());
    let ep = &side.ep;
    for (name, value) in [
        (FI_OPT_CM_DATA_SIZE, 0),
        (FI_OPT_MAX_MSG_SIZE, 1 << 40),
        (FI_OPT_MAX_TAGGED_SIZE, 1 << 40),
        (FI_OPT_MAX_RMA_SIZE, 0),
        (FI_OPT_MAX_ATOMIC_SIZE, 0),
        (FI_OPT_INJECT_MSG_SIZE, 256),
        (FI_OPT_INJECT_TAGGED_SIZE, 256),
        (FI_OPT_INJECT_RMA_SIZE, 0),
        (FI_OPT_INJECT_ATOMIC_SIZE, 0),
        (FI_OPT_TX_SIZE, 1024),
        (FI_OPT_RX_SIZE, 4096),
        (FI_OPT_CUDA_API_PERMITTED, 0),
    ] {
        assert_eq!(ep.getopt(name), Ok(value), "option {name}");
    }
    for name in [FI_OPT_MAX_MSG_SIZE, FI_OPT_BUFFERED_MIN, FI_OPT_TX_SIZE, 4, 5, 8, 9, 99, -1] {
        assert_eq!(ep.setopt(name, 1), Err(Error::NoProtoOpt), "option {name}");
    }
    for name in [FI_OPT_BUFFERED_MIN, 4, 8, 99, -1] {
        assert_eq!(ep.getopt(name), Err(Error::NoProtoOpt), "option {name}");
    }
    ep.setopt(FI_OPT_MIN_MULTI_RECV, 4096).unwrap();
    assert_eq!(ep.getopt(FI_OPT_MIN_MULTI_RECV), Ok(4096));
    ep.setopt(FI_OPT_CUDA_API_PERMITTED, 0).unwrap();
    assert!(ep.setopt(FI_OPT_CUDA_API_PERMITTED, 1).is_err());
    assert_eq!(ep.set_tx_op_flags(OpFlags::PEEK), Err(Error::BadFlags));
    ep.set_tx_op_flags(OpFlags::DELIVERY_COMPLETE).unwrap();
    assert_eq!(ep.tx_op_flags(), OpFlags::DELIVERY_COMPLETE);
}

/// X10: one endpoint talks to many peers, and the death of one does not touch the others.
#[test]
fn x10_one_endpoint_and_many_peers() {
    let mut plan = Plan::default();
    plan.settings.t_dead = Duration::from_secs(5);
    plan.settings.unexpected_bytes = Some(1 << 20);
    let mut sides: Vec<Side> = ports(21).into_iter().map(|p| Side::new(p, &plan)).collect();
    let hub = sides.remove(0);
    let to: Vec<FiAddr> = sides.iter().map(|s| hub.knows(s.ep.getname().unwrap())).collect();
    for round in 0..10_u64 {
        for (side, &to) in sides.iter().zip(&to) {
            side.ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, round).unwrap();
            hub.ep.send(buf(8, round), to, round).unwrap();
        }
        if round == 5 {
            drop(sides.pop());
        }
        for side in &sides {
            let got = until("a message at every peer", || {
                hub.domain.progress().unwrap();
                side.read()
            });
            assert_eq!((got.op_context, got.bytes()), (round, &pattern(8, round)[..]));
        }
        while sides.len() == 20 && hub.read().is_some() {}
        if round >= 5 {
            // The lost one's operations end in errors, the others' do not.
            let mut out = [Completion::default()];
            loop {
                match hub.cq.read(&mut out) {
                    Ok(_) => {}
                    Err(Error::Avail) => drop(hub.cq.readerr().unwrap()),
                    Err(_) => break,
                }
            }
        }
    }
}

/// X16: a cancelled receive ends once, as cancelled or as received, whichever came first.
#[test]
fn x16_cancel_races_with_arrival() {
    let p = Pair::default();
    let (mut cancelled, mut received) = (0, 0);
    for n in 0..400_u64 {
        p.b.ep.recv(Buf::zeroed(4), FI_ADDR_UNSPEC, n).unwrap();
        p.a.ep.send(buf(4, n), p.a.peer, n).unwrap();
        for _ in 0..n % 5 {
            p.b.domain.progress().unwrap();
            p.a.domain.progress().unwrap();
        }
        let asked = p.b.ep.cancel(n);
        let mut out = [Completion::default()];
        let ended = until("the end of the receive", || match p.b.cq.read(&mut out) {
            Ok(_) => Some(true),
            Err(Error::Avail) => {
                let e = p.b.cq.readerr().unwrap();
                assert_eq!((e.err, e.entry.op_context), (Error::Canceled, n));
                Some(false)
            }
            Err(_) => {
                p.turn();
                None
            }
        });
        assert_eq!(asked.is_ok(), !ended, "cancel said {asked:?}");
        if ended {
            received += 1;
        } else {
            cancelled += 1;
            // The message is not lost: the next receive gets it.
            p.b.ep.recv(Buf::zeroed(4), FI_ADDR_UNSPEC, n).unwrap();
            assert_eq!(p.at_b().bytes(), pattern(4, n));
        }
        p.at_a();
    }
    assert!(cancelled > 10 && received > 10, "{cancelled} cancelled, {received} received");
    p.all_is_back();
}

/// X19, X21: an address is 16 bytes or text, and one is the other.
#[test]
fn x19_x21_addresses() {
    let side = Side::new(ports(1).remove(0), &Plan::default());
    let addr = side.ep.getname().unwrap();
    let text = side.av.straddr(&addr);
    assert_eq!(text.parse(), Ok(addr));
    assert_eq!(resolve(&text, None), Ok(addr));
    let at = side.av.insertsvc("02:00:00:00:00:77", "12").unwrap();
    let found = side.av.lookup(at).unwrap();
    assert_eq!((found.ep, found.station.to_string().as_str()), (12, "02:00:00:00:00:77"));
    let mut many = [0; 6];
    assert_eq!(side.av.insertsym("02:00:00:00:01:00", 2, "5", 3, &mut many), Ok(6));
    let found: Vec<_> = many.iter().map(|&a| side.av.lookup(a).unwrap().to_string()).collect();
    assert_eq!(found[0], "barewire://02:00:00:00:01:00/5");
    assert_eq!(found[5], "barewire://02:00:00:00:01:01/7");
    assert!(side.av.insertsym("02:00:00:00:01:00", 1, "65535", 2, &mut []).is_err());
}

/// X11, X19: an endpoint has another number from `setname` on, until it is enabled; the MAC is the
/// port's.
#[test]
fn x19_an_endpoint_is_named_anew() {
    let plan = Plan::default();
    let pair = Pair::default();
    let (domain, cq, av) = (&pair.b.domain, &pair.b.cq, &pair.b.av);
    let ep = domain.endpoint(&plan.info).unwrap();
    let (old, station) = (ep.getname().unwrap(), pair.b.ep.getname().unwrap().station);
    let named = |ep, station| EpAddr { station, ep, incarnation: 0 }.to_bytes();
    assert_eq!(
        ep.setname_bytes(&named(pair.b.ep.getname().unwrap().ep, station)),
        Err(Error::AddrInUse)
    );
    let other = "02:00:00:00:00:77".parse().unwrap();
    assert_eq!(ep.setname_bytes(&named(9, other)), Err(Error::AddrNotAvail));
    assert!(matches!(ep.setname_bytes(&[0; 15]), Err(Error::Invalid(_))));
    assert_eq!(ep.getname(), Ok(old));
    let mut zero = [0; 16];
    zero[6] = 200;
    ep.setname_bytes(&zero).unwrap();
    assert_eq!(ep.setname_bytes(&named(200, station)), Ok(()), "it has it");
    assert_eq!(ep.getname().unwrap(), EpAddr { ep: 200, ..old });
    ep.bind_cq(cq, BOTH).unwrap();
    ep.bind_av(av).unwrap();
    ep.enable().unwrap();
    assert_eq!(ep.setname_bytes(&named(201, station)), Err(Error::OpBadState));
    ep.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, 5).unwrap();
    let there = pair.a.knows(ep.getname().unwrap());
    pair.a.ep.inject(b"there", there).unwrap();
    assert_eq!(pair.at_b().bytes(), b"there");
    // The old number is free again.
    let next = domain.endpoint(&plan.info).unwrap();
    assert_eq!(next.getname(), Ok(old));
}

/// X20: indexes are 0, 1, 2 ... in the order of insertion, and used again after removal; a map is
/// accepted.
#[test]
fn x20_tables_and_maps() {
    let plan = Plan::default();
    let port = ports(1).remove(0);
    let domain = the_fabric().domain_on(&plan.info, plan.settings.clone(), port).unwrap();
    for av_type in [AvType::Table, AvType::Map, AvType::Unspec] {
        let av = domain.av_open(AvAttr { av_type, count: 4, ..AvAttr::default() }).unwrap();
        let addr = |n: u16| resolve("02:00:00:00:00:44", Some(&n.to_string())).unwrap();
        let all: Vec<_> = (0..10).map(addr).collect();
        let mut at = [99; 10];
        assert_eq!(av.insert(&all, &mut at), Ok(10));
        assert_eq!(at, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        av.remove(&[3, 7]).unwrap();
        assert!(av.lookup(3).is_err() && av.lookup(4).is_ok());
        assert_eq!(av.insert(&[addr(20), addr(21), addr(22)], &mut at[..3]), Ok(3));
        assert_eq!(at[..3], [3, 7, 10]);
        assert_eq!(av.lookup(7).unwrap().ep, 21);
    }
}

/// X21: of several addresses the good ones are inserted, the failed slots say so, and the reasons
/// are told when asked for.
#[test]
fn x21_partial_inserts() {
    let side = Side::new(ports(1).remove(0), &Plan::default());
    let good = side.ep.getname().unwrap().to_bytes();
    let mut bytes = [good, [0xff; 16], good].concat();
    let (mut at, mut why) = ([0; 3], [9; 3]);
    assert_eq!(side.av.insert_bytes(&bytes, &mut at, Some(&mut why)), Ok(2));
    assert_eq!((at[1], why), (FI_ADDR_NOTAVAIL, [0, errno::FI_EINVAL, 0]));
    assert_eq!(side.av.lookup(at[2]).unwrap().to_bytes(), good);
    assert_eq!(side.av.insert_bytes(&bytes, &mut [], None), Ok(2));
    assert!(side.av.insert_bytes(&bytes, &mut at[..2], None).is_err());
    bytes.pop();
    assert!(side.av.insert_bytes(&bytes, &mut at, None).is_err());
}

/// X22: the same address twice gives usable indexes, and directed receives match by both.
#[test]
fn x22_duplicate_inserts() {
    let p = Pair::default();
    let again = p.b.knows(p.a.ep.getname().unwrap());
    for src in [p.b.peer, again] {
        p.b.ep.recv(Buf::zeroed(4), src, 6).unwrap();
        p.a.ep.send(buf(4, 1), p.a.peer, 1).unwrap();
        assert_eq!(p.at_b().op_context, 6);
        p.at_a();
    }
    for dest in [p.b.peer, again] {
        p.a.ep.recv(Buf::zeroed(4), FI_ADDR_UNSPEC, 7).unwrap();
        p.b.ep.send(buf(4, 1), dest, 1).unwrap();
        assert_eq!(p.at_a().op_context, 7);
        p.at_b();
    }
    p.all_is_back();
}

/// X24: completions call a sender what the user calls its address, and nobody else sees it.
#[test]
fn x24_names_of_the_users() {
    let p = Pair::default();
    let source = |p: &Pair| {
        p.b.ep.recv(Buf::zeroed(4), p.b.peer, 6).unwrap();
        p.a.ep.send(buf(4, 1), p.a.peer, 1).unwrap();
        p.at_a();
        p.at_b().src
    };
    let (named, plain) = (AvAttr { user_id: true, ..AvAttr::default() }, AvAttr::default());
    let av = p.b.domain.av_open(named).unwrap();
    let addr = p.a.ep.getname().unwrap();
    let mut at = [0];
    assert_eq!(av.insert(&[addr], &mut at), Ok(1));
    assert!(matches!(p.b.av.set_user_id(p.b.peer, 9), Err(Error::Invalid(_))), "opened without");
    assert!(matches!(av.set_user_id(at[0] + 1, 9), Err(Error::Invalid(_))));
    assert_eq!(av.set_user_id(at[0], 9), Ok(()));
    assert_eq!(source(&p), p.b.peer, "another vector has other names");
    let mut ids = [77];
    let bytes = addr.to_bytes();
    assert!(matches!(av.insert_named(&bytes, &mut ids, None), Err(Error::Invalid(_))));
    let other = p.b.domain.av_open(plain).unwrap();
    assert!(other.insert_named(&bytes, &mut [], None).is_err());
    // The newest index of an endpoint counts.
    assert_eq!(p.b.av.insert_named(&bytes, &mut ids, None), Ok(1));
    assert_eq!((source(&p), p.b.av.lookup(ids[0])), (77, Ok(addr)));
    p.b.av.remove(&ids).unwrap();
    assert_eq!(source(&p), p.b.peer);
    p.all_is_back();
}

/// Two endpoints of one domain cannot have one number, and one that asks gets it.
#[test]
fn endpoint_numbers() {
    let plan = Plan::default();
    let port = ports(1).remove(0);
    let domain = the_fabric().domain_on(&plan.info, plan.settings.clone(), port).unwrap();
    let number = |n: &str| {
        let hints = Some(&plan.info);
        getinfo_with(&settings(), API_VERSION, None, Some(n), InfoFlags::SOURCE, hints)
            .unwrap()
            .remove(0)
    };
    let first = domain.endpoint(&number("7")).unwrap();
    assert_eq!(first.getname().unwrap().ep, 7);
    assert_eq!(domain.endpoint(&number("7")).err(), Some(Error::AddrInUse));
    drop(first);
    assert!(domain.endpoint(&number("7")).is_ok());
}
