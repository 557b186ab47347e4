//! Multicast between processes of one node and of others: each member hears a message, and once,
//! whichever ways lead to it.

use std::sync::mpsc::RecvTimeoutError;
use std::time::Duration;

use barewire::flags::Caps;
use barewire::*;
use barewire_tests::nodes::{Nodes, or_skip};

use crate::start;
use crate::supervisor::Worker;
use crate::switch::{PORT, switches};
use crate::users::{ALICE, BOB, start_as};
use crate::worker::{open_with, orders, say, settings};

const LEN: usize = 64;
/// Context of a send; receives count from 0.
const SEND: u64 = 1 << 40;
const RECEIVES: u64 = 8;
/// Messages of each member.
const ROUNDS: usize = 3;

/// A member: hears `SEND n` and answers `SENT`, hears `COUNT` and answers `COUNT n`; tells `GOT n`
/// of each message.
pub(crate) fn run() {
    let orders = orders();
    let port = std::env::var("BAREWIRE_E2E_PORT").unwrap();
    let node = open_with(&port, settings(), Caps::MSG | Caps::MULTICAST);
    let eq = fabric(&FabricAttr::default()).unwrap().eq_open(EqAttr::default()).unwrap();
    node.ep.bind_eq(&eq).unwrap();
    let group = node.ep.join(GroupAddr::of_v4([239, 1, 2, 3], 7).unwrap(), 0, 0).unwrap();
    let receive = |i| node.ep.recv(Buf::zeroed(LEN), FI_ADDR_UNSPEC, i).unwrap();
    (0..RECEIVES).for_each(receive);
    say(&format!("ADDR {}", node.ep.getname().unwrap()));
    let (mut count, mut one) = (0, [Completion::default()]);
    loop {
        match orders.recv_timeout(Duration::from_micros(100)) {
            Ok(order) if order == "COUNT" => say(&format!("COUNT {count}")),
            Ok(order) => {
                let Some(n) = order.strip_prefix("SEND ") else { return };
                let bytes = vec![n.parse().unwrap(); LEN];
                node.ep.send(Buf::from(bytes), group.addr(), SEND).unwrap();
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        match node.cq.read(&mut one) {
            Ok(_) if one[0].op_context == SEND => say("SENT"),
            Ok(_) => {
                count += 1;
                let bytes = one[0].bytes();
                assert!(bytes.len() == LEN && bytes.iter().all(|&b| b == bytes[0]));
                say(&format!("GOT {}", bytes[0]));
                receive(one[0].op_context);
            }
            Err(Error::Again) => {}
            Err(_) => panic!("{}", node.cq.readerr().unwrap()),
        }
    }
}

/// Each member sends by turns, and all others hear it once.
fn all_hear(mut members: Vec<Worker>) {
    for n in 0..ROUNDS * members.len() {
        let from = n % members.len();
        members[from].say(&format!("SEND {n}"));
        members[from].answer("SENT");
        for (i, member) in members.iter_mut().enumerate().filter(|(i, _)| *i != from) {
            assert_eq!(member.answer("GOT"), n.to_string(), "member {i}");
        }
    }
    // What came by another way as well would be here by now.
    std::thread::sleep(Duration::from_millis(200));
    let all = ROUNDS * (members.len() - 1);
    for (i, member) in members.iter_mut().enumerate() {
        member.say("COUNT");
        assert_eq!(member.answer("COUNT"), all.to_string(), "member {i}");
    }
    for mut member in members {
        member.say("END");
        member.finish();
    }
}

/// Goal (row X18): two processes that memory joins, beside one that the wire does.
#[test]
fn members_of_a_group_near_and_far_hear_a_message_once() {
    let Some(nodes) = or_skip(Nodes::pair(1500)) else { return };
    let member = |node| start(&nodes, node, "listener", "afpacket:fab0,near=yes");
    all_hear([0, 0, 1].map(member).into());
}

/// Goal (row X18): the same of two users behind switches, who have no memory in common.
#[test]
fn members_of_a_group_behind_switches_hear_a_message_once() {
    let Some(nodes) = crate::users::nodes() else { return };
    let switches = switches(&nodes);
    let places = [(0, ALICE), (0, ALICE), (0, BOB), (1, BOB)];
    let member = |(node, user)| start_as(&nodes, node, user, "listener", PORT);
    all_hear(places.map(member).into());
    for mut switch in switches {
        switch.say("END");
        switch.finish();
    }
}
