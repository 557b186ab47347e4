//! Scalable endpoints: contexts that send, contexts that receive, one address.

use barewire::flags::{Access, BindFlags, Caps, OpFlags};
use barewire::sep::CTX_MAX;
use barewire::*;
use barewire_driver::port::Port;

use crate::harness::*;

const TX: usize = 2;
const RX: usize = 3;
const BITS: u32 = 2;

/// A domain with a scalable endpoint, all of whose contexts are enabled.
struct Side {
    tx: Vec<(Endpoint, Cq)>,
    rx: Vec<(Endpoint, Cq)>,
    sep: ScalableEndpoint,
    av: Av,
    domain: Domain,
    peer: FiAddr,
}

fn scalable() -> Info {
    let caps = usual_caps() | Caps::RMA | Caps::NAMED_RX_CTX;
    let ep_attr = EndpointAttr { tx_ctx_cnt: TX, rx_ctx_cnt: RX, ..EndpointAttr::default() };
    info(&Info { caps, ep_attr, ..Info::default() })
}

impl Side {
    fn new(port: Box<dyn Port>) -> Self {
        let domain = the_fabric().domain_on(&scalable(), settings(), port).unwrap();
        let attr = AvAttr { rx_ctx_bits: BITS, ..AvAttr::default() };
        let av = domain.av_open(attr).unwrap();
        let sep = domain.scalable_endpoint(&scalable()).unwrap();
        assert_eq!(sep.enable(), Err(Error::NoAv));
        let cq = || domain.cq_open(CqAttr::default()).unwrap();
        let open = |ep: Endpoint, way| {
            let cq = cq();
            assert_eq!(ep.enable(), Err(Error::NoAv));
            ep.bind_cq(&cq, way).unwrap();
            (ep, cq)
        };
        let tx = |i| open(sep.tx_context(i, None).unwrap(), BindFlags::TRANSMIT);
        let rx = |i| open(sep.rx_context(i, None).unwrap(), BindFlags::RECV);
        let (tx, rx): (Vec<_>, Vec<_>) = ((0..TX).map(tx).collect(), (0..RX).map(rx).collect());
        sep.bind_av(&av).unwrap();
        tx.iter().chain(&rx).for_each(|(ep, _)| ep.enable().unwrap());
        sep.enable().unwrap();
        Self { tx, rx, sep, av, domain, peer: 0 }
    }

    fn knows(&mut self, addr: EpAddr) {
        let mut at = [FI_ADDR_NOTAVAIL];
        assert_eq!(self.av.insert(&[addr], &mut at), Ok(1));
        self.peer = at[0];
    }
}

/// The next completion of a queue.
fn next(sides: [&Side; 2], cq: &Cq) -> Completion {
    until("a completion", || {
        for side in sides {
            side.domain.progress().unwrap();
        }
        let mut one = [Completion::default()];
        match cq.read(&mut one) {
            Ok(_) => Some(std::mem::take(&mut one[0])),
            Err(Error::Again) => None,
            Err(e) => panic!("{e}: {:?}", cq.readerr()),
        }
    })
}

fn pair() -> [Side; 2] {
    let mut ports = ports(2).into_iter();
    let [mut a, mut b] = [0, 1].map(|_| Side::new(ports.next().expect("two ports")));
    a.knows(b.sep.getname().unwrap());
    b.knows(a.sep.getname().unwrap());
    [a, b]
}

/// X14: every transmit context reaches every receive context by `rx_addr`, and no other; the
/// sender is the scalable endpoint, for `FI_SOURCE` and `FI_DIRECTED_RECV`.
#[test]
fn x14_contexts_are_named() {
    let [a, b] = pair();
    for (t, (tx, tx_cq)) in a.tx.iter().enumerate() {
        for (r, (rx, rx_cq)) in b.rx.iter().enumerate() {
            let bytes = pattern(2000 * r, (t * RX + r) as u64);
            let from = rx_addr(b.peer, 1, BITS);
            rx.trecv(Buf::zeroed(5000), from, 7, 0, 1).unwrap();
            tx.tsend(Buf::from(&bytes[..]), rx_addr(a.peer, r, BITS), 7, 2).unwrap();
            let got = next([&a, &b], rx_cq);
            assert_eq!((got.op_context, got.src, got.bytes()), (1, b.peer, &bytes[..]));
            assert_eq!(next([&a, &b], tx_cq).op_context, 2);
        }
    }
    b.rx[0].0.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 8, 0, 3).unwrap();
    a.tx[1].0.tinject(b"unnamed", a.peer, 8).unwrap();
    assert_eq!(next([&a, &b], &b.rx[0].1).bytes(), b"unnamed");
}

/// X14: what a context is not for is refused, and so is one that is not there or there already.
#[test]
fn x14_what_contexts_refuse() {
    let [a, _b] = pair();
    let refused = |posted: PostResult| posted.unwrap_err().error;
    let ((tx, _), (rx, _)) = (&a.tx[0], &a.rx[0]);
    assert!(matches!(refused(tx.recv((), FI_ADDR_UNSPEC, 0)), Error::OpNotSupp(_)));
    assert!(matches!(refused(rx.send((), a.peer, 0)), Error::OpNotSupp(_)));
    assert!(matches!(refused(tx.send((), rx_addr(9, 1, BITS), 0)), Error::Invalid(_)));
    let tx_context = |i| a.sep.tx_context(i, None).map(drop);
    let rx_context = |i| a.sep.rx_context(i, None).map(drop);
    assert!(matches!(tx_context(TX), Err(Error::Invalid(_))));
    assert!(matches!(rx_context(RX), Err(Error::Invalid(_))));
    assert_eq!((tx_context(0), rx_context(2)), (Err(Error::Busy), Err(Error::Busy)));
    assert_eq!(a.sep.bind_av(&a.av), Err(Error::OpBadState));
    assert!(matches!(rx.setname_bytes(&[0; 16]), Err(Error::Invalid(_))));
    let fewer = TxAttr { caps: Caps::TAGGED, ..TxAttr::default() };
    assert_eq!(a.sep.tx_attr(Some(&fewer)).unwrap().caps, Caps::TAGGED | Caps::SEND);
    let more = RxAttr { caps: Caps::ATOMIC, ..RxAttr::default() };
    assert!(matches!(a.sep.rx_attr(Some(&more)), Err(Error::OpNotSupp(_))));
    assert!(matches!(a.domain.endpoint(&scalable()), Err(Error::Invalid(_) | Error::OpNotSupp(_))));
    let ask = |count| {
        let mut info = scalable();
        info.ep_attr.tx_ctx_cnt = count;
        a.domain.scalable_endpoint(&info).map(drop)
    };
    assert_eq!(ask(CTX_MAX), Ok(()));
    assert!(matches!(ask(CTX_MAX + 1), Err(Error::Invalid(_))));
    let wide = AvAttr { rx_ctx_bits: 17, ..AvAttr::default() };
    assert!(matches!(a.domain.av_open(wide).map(drop), Err(Error::Invalid(_))));
}

/// X14: no operation that names a context which the target has not got reaches anybody, also not an
/// endpoint whose number lies where such a context would have its own. It ends with an error.
#[test]
fn x14_a_context_that_is_not_there_is_nobody() {
    let [a, b] = pair();
    let neighbour = b.domain.endpoint(&Plan::default().info).unwrap();
    let number = b.sep.getname().unwrap().ep + RX as u16;
    assert_eq!(neighbour.getname().unwrap().ep, number);
    let cq = b.domain.cq_open(CqAttr::default()).unwrap();
    neighbour.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
    neighbour.bind_av(&b.av).unwrap();
    neighbour.enable().unwrap();
    neighbour.trecv(Buf::zeroed(100_000), FI_ADDR_UNSPEC, 7, 0, 1).unwrap();
    neighbour.recv(Buf::zeroed(100_000), FI_ADDR_UNSPEC, 2).unwrap();
    let region = b.domain.mr_reg(
        Buf::zeroed(100_000),
        &MrAttr { access: Access::REMOTE_READ | Access::REMOTE_WRITE, ..MrAttr::default() },
    );
    let region = region.unwrap();
    let (tx, tx_cq) = &a.tx[0];
    tx.set_tx_op_flags(OpFlags::DELIVERY_COMPLETE).unwrap();
    let fails = |context| {
        let failed = || {
            a.domain.progress().unwrap();
            b.domain.progress().unwrap();
            let e = tx_cq.read(&mut [Completion::default()]);
            (e == Err(Error::Avail)).then(|| tx_cq.readerr().unwrap())
        };
        let err = until("an error", failed);
        assert_eq!((err.err, err.entry.op_context), (Error::ConnRefused, context));
    };
    let nobody = rx_addr(a.peer, RX, BITS);
    for len in [0, 8, 3000, 99_000] {
        tx.tsend(Buf::zeroed(len), nobody, 7, 3).unwrap();
        fails(3);
        tx.send(Buf::zeroed(len), nobody, 4).unwrap();
        fails(4);
        let to = Remote { dest: nobody, addr: 0, key: region.key() };
        tx.write(Buf::zeroed(len), to, 5).unwrap();
        fails(5);
        tx.read(Buf::zeroed(len), to, 6).unwrap();
        fails(6);
    }
    let mut none = [Completion::default()];
    assert_eq!(cq.read(&mut none), Err(Error::Again));
    // It lives, and is reached by its own address.
    let mut own = [FI_ADDR_NOTAVAIL];
    assert_eq!(a.av.insert(&[neighbour.getname().unwrap()], &mut own), Ok(1));
    tx.tsend(Buf::zeroed(8), own[0], 7, 3).unwrap();
    assert_eq!(next([&a, &b], &cq).op_context, 1);
    assert_eq!(next([&a, &b], tx_cq).op_context, 3);
    // Nor has an ordinary endpoint contexts, though another one has the number.
    let before = b.domain.endpoint(&Plan::default().info).unwrap();
    tx.tsend(Buf::zeroed(8), rx_addr(own[0], 1, BITS), 7, 3).unwrap();
    fails(3);
    drop(before);
}

/// X14, S7: a region that is bound to the scalable endpoint is reached through each of its receive
/// contexts, also one that is opened later, and through no other endpoint.
#[test]
fn x14_a_region_is_bound_to_all_contexts() {
    let [a, mut b] = pair();
    let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let attr = MrAttr { access, ..MrAttr::default() };
    let region = b.domain.mr_reg(Buf::zeroed(64), &attr).unwrap();
    assert!(matches!(region.bind_sep(&a.sep), Err(Error::Invalid(_))));
    region.bind_sep(&b.sep).unwrap();
    let (tx, tx_cq) = &a.tx[0];
    let write = |dest| {
        let to = Remote { dest, addr: 0, key: region.key() };
        tx.write(Buf::zeroed(8), to, 1).unwrap();
        until("an outcome", || {
            a.domain.progress().unwrap();
            b.domain.progress().unwrap();
            match tx_cq.read(&mut [Completion::default()]) {
                Ok(_) => Some(Ok(())),
                Err(Error::Again) => None,
                Err(_) => Some(Err(tx_cq.readerr().unwrap().err)),
            }
        })
    };
    for r in 0..RX {
        assert_eq!(write(rx_addr(a.peer, r, BITS)), Ok(()));
    }
    b.rx.truncate(2);
    assert_eq!(write(rx_addr(a.peer, 2, BITS)), Err(Error::ConnRefused));
    let again = b.sep.rx_context(2, None).unwrap();
    again.bind_cq(&b.rx[0].1, BindFlags::RECV).unwrap();
    again.enable().unwrap();
    assert_eq!(write(rx_addr(a.peer, 2, BITS)), Ok(()));
    let other = b.domain.endpoint(&Plan::default().info).unwrap();
    other.bind_cq(&b.rx[0].1, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
    other.bind_av(&b.av).unwrap();
    other.enable().unwrap();
    let mut own = [FI_ADDR_NOTAVAIL];
    assert_eq!(a.av.insert(&[other.getname().unwrap()], &mut own), Ok(1));
    assert_eq!(write(own[0]), Err(Error::Access));
    region.bind_ep(&again).unwrap();
    assert_eq!(write(rx_addr(a.peer, 1, BITS)), Err(Error::Access));
    assert_eq!(write(rx_addr(a.peer, 2, BITS)), Ok(()));
}

/// X14: a context closes and opens again, and meanwhile nobody else gets its number; the endpoint
/// closes last.
#[test]
fn x14_contexts_come_and_go() {
    let [mut a, b] = pair();
    let first = a.sep.getname().unwrap().ep;
    assert_eq!(a.rx[2].0.getname().unwrap().ep, first);
    a.rx.truncate(1);
    a.tx.clear();
    let usual = Plan::default().info;
    let others: Vec<_> = (0..4).map(|_| a.domain.endpoint(&usual).unwrap()).collect();
    let kept = first..first + RX as u16;
    assert!(others.iter().all(|ep| !kept.contains(&ep.getname().unwrap().ep)));
    let second = a.domain.scalable_endpoint(&scalable()).unwrap().getname().unwrap().ep;
    assert!(second >= first + RX as u16);
    let cq = a.domain.cq_open(CqAttr::default()).unwrap();
    let again = a.sep.rx_context(2, None).unwrap();
    again.bind_cq(&cq, BindFlags::RECV).unwrap();
    again.enable().unwrap();
    again.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, 1).unwrap();
    b.tx[0].0.inject(b"again", rx_addr(b.peer, 2, BITS)).unwrap();
    assert_eq!(next([&a, &b], &cq).bytes(), b"again");
    // Transmit contexts have gone, and had the number of this one.
    a.rx[0].0.recv(Buf::zeroed(8), FI_ADDR_UNSPEC, 1).unwrap();
    b.tx[1].0.inject(b"still", b.peer).unwrap();
    assert_eq!(next([&a, &b], &a.rx[0].1).bytes(), b"still");
    let Side { rx, sep, av, domain, .. } = a;
    let (e, sep) = sep.close().unwrap_err();
    assert_eq!(e, Error::Busy);
    drop((rx, again, others));
    let (e, av) = av.close().unwrap_err();
    assert_eq!(e, Error::Busy);
    sep.close().map_err(|(e, _)| e).unwrap();
    av.close().map_err(|(e, _)| e).unwrap();
    drop(cq);
    domain.close().map_err(|(e, _)| e).unwrap();
}
