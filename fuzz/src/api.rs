//! Calls of the `fi_*` face, in any order and with any arguments.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use barewire::flags::{Access, BindFlags, Caps, CqFlags, InfoFlags, OpFlags};
use barewire::*;
use barewire_driver::backend::loopback::{Loopback, LoopbackSettings};
use barewire_driver::open::open;
use barewire_driver::port::Port;

use crate::input::Input;

/// A longer program says nothing that a shorter one does not.
const PROGRAM_MAX: usize = 500;

/// Objects of each kind that a side may have.
const SLOTS: usize = 3;

/// Two domains of one process, and a caller who does anything with them. What joins them the setup
/// says: a queue of frames, a segment of memory, or a memif, which promises nothing.
///
/// Whatever the calls: no panic; a refused one returns an error that its kind of call may return
/// and completes nothing; an accepted operation completes at most once; an object closes unless
/// another that is open needs it; and at the end everything does, with nothing left in the tables.
pub fn api_calls(data: &[u8]) {
    let Some((&[setup], program)) = data.split_first_chunk() else { return };
    let mut input = Input::new(&program[..program.len().min(PROGRAM_MAX)]);
    let mut world = World::new(setup);
    while !input.is_empty() {
        world.step(&mut input);
    }
    world.end();
}

/// Bits of the setup: 1 is for less capabilities, 2 and 4 for the port.
const LOCKLESS: u8 = 8;
const INSERTED: u8 = 16;

/// Two ports that see each other.
fn ports(setup: u8) -> [Box<dyn Port>; 2] {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let (process, count) = (std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
    let open = |spec: String| open(&spec).unwrap_or_else(|e| panic!("{spec}: {e}"));
    match setup >> 1 & 3 {
        // On these messages leave in the call that posts them.
        1 => [(); 2].map(|()| open(format!("shm:fuzz-{process}-{count}"))),
        2 => ["server", "client"]
            .map(|role| open(format!("memif:@fuzz-api-{process}-{count},role={role}"))),
        _ => {
            let settings = LoopbackSettings { mtu: 1500, ring_count: 32 };
            let mut ports = Loopback::segment(2, settings).into_iter();
            std::array::from_fn(|_| Box::new(ports.next().expect("a segment of two")) as _)
        }
    }
}

struct World {
    sides: [Side; 2],
    /// What may still come of the operation of a context.
    ops: HashMap<u64, Left>,
    context: u64,
}

/// Outcomes that an operation may still have.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Left {
    /// It was refused, or is over.
    None,
    One,
    /// It is a buffer for many messages.
    Many,
}

struct Side {
    eps: [Option<Endpoint>; SLOTS],
    cqs: [Option<Cq>; SLOTS],
    cntrs: [Option<Cntr>; SLOTS],
    avs: [Option<Av>; SLOTS],
    mrs: [Option<Mr>; SLOTS],
    eq: Eq,
    info: Info,
    domain: Domain,
}

impl Side {
    fn new(setup: u8, port: Box<dyn Port>) -> Self {
        let caps = if setup & 1 == 0 {
            let messages = Caps::MSG | Caps::TAGGED | Caps::DIRECTED_RECV | Caps::MULTI_RECV;
            messages | Caps::SOURCE | Caps::RMA | Caps::ATOMIC
        } else {
            Caps::TAGGED | Caps::SEND
        };
        let mut hints = Info { caps, ..Info::default() };
        if setup & LOCKLESS != 0 {
            hints.domain_attr.threading = Threading::Domain;
        }
        let settings = Settings {
            t_dead: Duration::from_millis(if setup & 6 == 0 { 200 } else { 5000 }),
            peers: if setup & INSERTED != 0 { Peers::Inserted } else { Peers::Named },
            progress: Progress::Manual,
            peer_max: Some(8),
            tx_max: Some(16),
            rx_max: Some(16),
            unexpected_bytes: Some(64 << 10),
            stats: false,
            ..Settings::default()
        };
        let none = InfoFlags::empty();
        let info = getinfo_with(&settings, API_VERSION, None, None, none, Some(&hints));
        let info = info.expect("such an endpoint is offered").remove(0);
        let fabric = fabric(&FabricAttr::default()).expect("a fabric opens");
        let eq = fabric.eq_open(EqAttr::default()).expect("a queue opens");
        let domain = fabric.domain_on(&info, settings, port).expect("a domain opens");
        let mut side = Self {
            eps: Default::default(),
            cqs: Default::default(),
            cntrs: Default::default(),
            avs: Default::default(),
            mrs: Default::default(),
            eq,
            info,
            domain,
        };
        // One endpoint works from the start.
        let cq = side.domain.cq_open(CqAttr { size: 8, ..CqAttr::default() }).expect("room");
        let av = side.domain.av_open(AvAttr::default()).expect("room");
        let ep = side.domain.endpoint(&side.info).expect("room");
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).expect("nothing is bound");
        ep.bind_av(&av).expect("nothing is bound");
        ep.enable().expect("all is bound");
        (side.eps[0], side.cqs[0], side.avs[0]) = (Some(ep), Some(cq), Some(av));
        side
    }
}

fn slot(input: &mut Input<'_>) -> usize {
    // The first is the one that works.
    usize::from(input.byte() % 8).saturating_sub(8 - SLOTS)
}

fn flags(input: &mut Input<'_>) -> OpFlags {
    let known = [
        OpFlags::empty(),
        OpFlags::COMPLETION,
        OpFlags::INJECT,
        OpFlags::MULTI_RECV,
        OpFlags::PEEK,
        OpFlags::PEEK | OpFlags::CLAIM,
        OpFlags::PEEK | OpFlags::DISCARD,
        OpFlags::CLAIM,
        OpFlags::DISCARD,
        OpFlags::REMOTE_CQ_DATA | OpFlags::DELIVERY_COMPLETE,
        OpFlags::MATCH_COMPLETE,
        OpFlags::FENCE,
        OpFlags::MORE,
    ];
    match input.byte() {
        n @ 0..208 => known[usize::from(n) % known.len()],
        208..232 => OpFlags::from_bits_retain(1 << (input.byte() % 64)),
        _ => OpFlags::from_bits_retain(input.u64()),
    }
}

fn addr(input: &mut Input<'_>) -> FiAddr {
    match input.byte() {
        n @ 0..200 => u64::from(n % 3),
        200..220 => FI_ADDR_UNSPEC,
        220..240 => FI_ADDR_NOTAVAIL,
        _ => input.u64(),
    }
}

fn len(input: &mut Input<'_>) -> usize {
    input.pick(&[0, 1, 8, 64, 256, 257, 2000, 9000, 16_385, 70_000])
}

/// Fails if a call was refused with a code that its kind never returns.
fn allow<T>(result: std::result::Result<T, Error>, codes: &[i32]) -> Option<T> {
    match result {
        Ok(value) => Some(value),
        Err(err) => {
            assert!(codes.contains(&err.fi_errno()), "a call was refused with {err:?}");
            None
        }
    }
}

const EAGAIN: i32 = 11;
const ENOMEM: i32 = 12;
const EBUSY: i32 = 16;
const EINVAL: i32 = 22;
const ENOSYS: i32 = 38;
const ENODATA: i32 = 61;
const EMSGSIZE: i32 = 90;
const ENOPROTOOPT: i32 = 92;
const EOPNOTSUPP: i32 = 95;
const EADDRINUSE: i32 = 98;
const ETIMEDOUT: i32 = 110;
const ETOOSMALL: i32 = 257;
const EOPBADSTATE: i32 = 258;
const EAVAIL: i32 = 259;
const EBADFLAGS: i32 = 260;
const ENOCQ: i32 = 263;
const ENOAV: i32 = 267;
const ENOKEY: i32 = 266;

/// What a data call may return.
const POST: &[i32] = &[EAGAIN, EINVAL, EMSGSIZE, EBADFLAGS, EOPNOTSUPP, EOPBADSTATE, EBUSY];

/// What a bind may return.
const BIND: &[i32] = &[EINVAL, EBADFLAGS, EOPBADSTATE, EOPNOTSUPP, EBUSY];

impl World {
    fn new(setup: u8) -> Self {
        let sides = ports(setup).map(|port| Side::new(setup, port));
        let world = Self { sides, ops: HashMap::new(), context: 0 };
        for from in 0..2 {
            // 0 is the other side, 1 this one.
            for to in [1 - from, from] {
                let ep = world.sides[to].eps[0].as_ref().expect("it was opened");
                let av = world.sides[from].avs[0].as_ref().expect("it was opened");
                let name = ep.getname().expect("an endpoint has a name");
                av.insert(&[name], &mut [0]).expect("room for an address");
            }
        }
        world
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let b = input.byte();
        let i = usize::from(b & 1);
        match b >> 1 & 31 {
            0..=4 => self.send(i, input),
            5..=9 => self.recv(i, input),
            10..=12 => self.turn(),
            13..=15 => self.read(i, slot(input)),
            16..=17 => self.open_object(i, input),
            18..=19 => self.bind(i, input),
            20 => self.enable(i, input),
            21 => self.close_object(i, input),
            22 | 23 => self.address(i, input),
            24 => self.counter(i, input),
            25 => self.cancel(i, input),
            26 | 27 => self.option(i, input),
            28 => self.event(i, input),
            29 | 30 => self.remote(i, input),
            _ => self.turn(),
        }
    }

    fn turn(&self) {
        for _ in 0..3 {
            for side in &self.sides {
                side.domain.progress().expect("the domain is open");
            }
        }
    }

    fn posted(&mut self, context: u64, many: bool, result: std::result::Result<(), Error>) {
        let left = match result {
            Err(_) => Left::None,
            Ok(()) if many => Left::Many,
            Ok(()) => Left::One,
        };
        self.ops.insert(context, left);
        allow(result, POST);
    }

    fn send(&mut self, i: usize, input: &mut Input<'_>) {
        self.context += 1;
        let context = self.context;
        let Some(ep) = &self.sides[i].eps[slot(input)] else { return };
        let (dest, len, how) = (addr(input), len(input), input.byte());
        let tag = u64::from(how >> 6);
        let bytes = vec![how; len];
        let result = match how % 10 {
            0 => ep.send(Buf::from(bytes), dest, context).map_err(|r| r.error),
            1 => ep.tsend(Buf::from(bytes), dest, tag, context).map_err(|r| r.error),
            2 => ep.senddata(Buf::from(bytes), 5, dest, context).map_err(|r| r.error),
            3 => {
                allow(ep.inject(&bytes, dest), POST);
                return;
            }
            4 => {
                allow(ep.tinjectdata(&bytes, 6, dest, tag), POST);
                return;
            }
            5 => {
                let pieces = (0..how % 12).map(|_| Buf::from(vec![1; len / 8])).collect();
                ep.sendv(pieces, dest, context).map_err(|r| r.error)
            }
            6 | 7 => {
                let msg = Msg { bufs: Buf::from(bytes).into(), addr: dest, context, data: 7 };
                ep.sendmsg(msg, flags(input)).map_err(|r| r.error)
            }
            _ => {
                let bufs = Buf::from(bytes).into();
                let msg = TaggedMsg { bufs, addr: dest, tag, ignore: 0, context, data: 8 };
                ep.tsendmsg(msg, flags(input)).map_err(|r| r.error)
            }
        };
        self.posted(context, false, result);
    }

    fn recv(&mut self, i: usize, input: &mut Input<'_>) {
        self.context += 1;
        let Some(ep) = &self.sides[i].eps[slot(input)] else { return };
        let (src, len, how) = (addr(input), len(input), input.byte());
        // A claim or a discard names an operation before it.
        let back = if how & 0x30 == 0x30 { u64::from(input.byte() % 4) } else { 0 };
        let context = self.context.saturating_sub(back);
        let (tag, ignore) = (u64::from(how >> 6), u64::from(how & 1) * 3);
        let buf = Buf::zeroed(len);
        let result = match how % 8 {
            0 => ep.recv(buf, src, context).map_err(|r| r.error),
            1 => ep.trecv(buf, src, tag, ignore, context).map_err(|r| r.error),
            2 | 3 => {
                let msg = Msg { bufs: buf.into(), addr: src, context, data: 0 };
                ep.recvmsg(msg, flags(input)).map_err(|r| r.error)
            }
            4 => {
                let msg = Msg { bufs: SharedBuf::from(buf).into(), addr: src, context, data: 0 };
                ep.recvmsg(msg, OpFlags::MULTI_RECV | flags(input)).map_err(|r| r.error)
            }
            _ => {
                let msg = TaggedMsg { bufs: buf.into(), addr: src, tag, ignore, context, data: 0 };
                ep.trecvmsg(msg, flags(input)).map_err(|r| r.error)
            }
        };
        if back == 0 {
            self.posted(context, how % 8 < 5, result);
        } else {
            // Several operations of one context: how many outcomes it has is not followed.
            self.ops.remove(&context);
            allow(result, POST);
        }
    }

    /// A call on memory of either side, or on none.
    fn remote(&mut self, i: usize, input: &mut Input<'_>) {
        self.context += 1;
        let context = self.context;
        let (of, how, at) = (usize::from(input.chance(4)) ^ (1 - i), input.byte(), input.byte());
        let region = self.sides[of].mrs[slot(input)].as_ref();
        let key = region.map_or_else(|| u64::from(input.byte()), |mr| mr.key());
        let Some(ep) = &self.sides[i].eps[slot(input)] else { return };
        let to = Remote { dest: addr(input), addr: u64::from(at) % 80, key };
        let op = TypedOp { op: u32::from(input.byte() % 21), datatype: u32::from(at % 16) };
        let (len, bytes) = (len(input) % 5000, [how; 5000]);
        let (bytes, buf) = (&bytes[..len], Buf::zeroed(len));
        let operands = [bytes];
        let rma_iov = vec![RmaIov { addr: to.addr, len: len as u64, key }; usize::from(how % 10)];
        let atomic = || AtomicMsg {
            operands: &operands,
            addr: to.dest,
            rma_iov: rma_iov.clone(),
            op,
            context,
            data: 9,
        };
        let rma = |bufs| RmaMsg { bufs, addr: to.dest, rma_iov: rma_iov.clone(), context, data: 9 };
        let result = match how % 11 {
            0 => ep.write(buf, to, context).map_err(|r| r.error),
            1 => ep.read(buf, to, context).map_err(|r| r.error),
            2 => ep.atomic(op, bytes, to, context).map_err(|r| r.error),
            3 => ep.fetch_atomic(op, bytes, buf, to, context).map_err(|r| r.error),
            4 => ep.compare_atomic(op, bytes, bytes, buf, to, context).map_err(|r| r.error),
            5 => ep.writemsg(rma(buf.into()), flags(input)).map_err(|r| r.error),
            6 => ep.readmsg(rma(buf.into()), flags(input)).map_err(|r| r.error),
            7 => ep.atomicmsg(atomic(), flags(input)).map_err(|r| r.error),
            8 => ep.compare_atomicmsg(atomic(), &operands, buf, flags(input)).map_err(|r| r.error),
            9 => {
                allow(ep.inject_writedata(bytes, 4, to), POST);
                return;
            }
            _ => {
                allow(ep.inject_atomic(op, bytes, to), POST);
                return;
            }
        };
        self.posted(context, false, result);
    }

    fn read(&mut self, i: usize, n: usize) {
        let Some(cq) = &self.sides[i].cqs[n] else { return };
        let mut out: [Completion; 4] = Default::default();
        let mut done = Vec::new();
        match cq.read(&mut out) {
            Ok(count) => done.extend(out[..count].iter().map(|c| (c.op_context, c.flags))),
            Err(Error::Avail) => {
                let err = cq.readerr().expect("an error is next");
                done.push((err.entry.op_context, err.entry.flags));
            }
            Err(err) => assert_eq!(err, Error::Again),
        }
        for (context, flags) in done {
            let Some(left) = self.ops.get_mut(&context) else { continue };
            assert_ne!(*left, Left::None, "{context} was refused or is over, and completes");
            if *left == Left::One || flags.contains(CqFlags::MULTI_RECV) {
                *left = Left::None;
            }
        }
    }

    fn open_object(&mut self, i: usize, input: &mut Input<'_>) {
        let n = 1 + usize::from(input.byte() % (SLOTS as u8 - 1));
        let (what, size) = (input.byte(), input.pick(&[0, 1, 5, 64]));
        let Side { eps, cqs, cntrs, avs, mrs, info, domain, .. } = &mut self.sides[i];
        let codes = [EINVAL, ENOMEM, ENOSYS, EADDRINUSE, EBADFLAGS, EOPNOTSUPP, ENOKEY];
        match what % 5 {
            0 if eps[n].is_none() => eps[n] = allow(domain.endpoint(info), &codes),
            1 if cqs[n].is_none() => {
                cqs[n] = allow(domain.cq_open(CqAttr { size, ..CqAttr::default() }), &codes);
            }
            2 if cntrs[n].is_none() => {
                cntrs[n] = allow(domain.cntr_open(CntrAttr::default()), &codes);
            }
            3 if avs[n].is_none() => {
                let event = input.chance(8);
                let attr = AvAttr { count: size, event, ..AvAttr::default() };
                avs[n] = allow(domain.av_open(attr), &codes);
            }
            4 if mrs[n].is_none() => {
                let key = input.chance(2).then_some(u64::from(what));
                let access = Access::from_bits_truncate(input.u64());
                let attr = MrAttr { requested_key: key, access, ..MrAttr::default() };
                mrs[n] = allow(domain.mr_reg(Buf::zeroed(size), &attr), &codes);
            }
            _ => {}
        }
    }

    /// Binds something, perhaps of the other domain, perhaps for the second time.
    fn bind(&mut self, i: usize, input: &mut Input<'_>) {
        let (what, raw) = (input.byte(), input.byte());
        let of = if what & 0x38 == 0x38 { 1 - i } else { i };
        let (n, m) = (slot(input), slot(input));
        let Some(ep) = &self.sides[i].eps[n] else { return };
        let flags = match raw {
            0..128 => BindFlags::TRANSMIT | BindFlags::RECV,
            128..160 => BindFlags::TRANSMIT,
            160..192 => BindFlags::RECV | BindFlags::SELECTIVE_COMPLETION,
            _ => BindFlags::from_bits_retain(1 << (raw % 64)),
        };
        let other = &self.sides[of];
        match what % 4 {
            0 => drop(other.cqs[m].as_ref().map(|cq| allow(ep.bind_cq(cq, flags), BIND))),
            1 => drop(other.avs[m].as_ref().map(|av| allow(ep.bind_av(av), BIND))),
            2 => drop(other.cntrs[m].as_ref().map(|c| allow(ep.bind_cntr(c, flags), BIND))),
            _ => drop(allow(ep.bind_eq(&other.eq), BIND)),
        }
    }

    fn enable(&mut self, i: usize, input: &mut Input<'_>) {
        let Some(ep) = &self.sides[i].eps[slot(input)] else { return };
        allow(ep.enable(), &[ENOCQ, ENOAV, EOPBADSTATE]);
    }

    /// Closes something; what is needed by an endpoint stays and works.
    fn close_object(&mut self, i: usize, input: &mut Input<'_>) {
        let (what, n) = (input.byte(), slot(input));
        let endpoints = self.sides.iter().flat_map(|side| side.eps.iter().flatten()).count();
        let side = &mut self.sides[i];
        match what % 6 {
            0 if n > 0 => drop(side.eps[n].take().map(Endpoint::close)),
            1 => close(&mut side.cqs[n], Cq::close, endpoints),
            2 => close(&mut side.cntrs[n], Cntr::close, endpoints),
            3 => close(&mut side.avs[n], Av::close, endpoints),
            4 => drop(side.mrs[n].take().map(Mr::close)),
            _ => {}
        }
    }

    fn address(&mut self, i: usize, input: &mut Input<'_>) {
        let Some(av) = &self.sides[i].avs[slot(input)] else { return };
        let how = input.byte();
        match how % 6 {
            0 => {
                let name =
                    self.sides[1 - i].eps[slot(input)].as_ref().and_then(|ep| ep.getname().ok());
                let Some(mut name) = name else { return };
                if how & 64 != 0 {
                    name.ep = u16::from(input.byte());
                }
                let mut at = [0; 2];
                allow(av.insert(&[name, name], &mut at), &[EINVAL, ENOMEM]);
            }
            1 => {
                let bytes: Vec<u8> = (0..input.byte() % 40).map(|_| input.byte()).collect();
                allow(av.insert_bytes(&bytes, &mut [0; 4], None), &[EINVAL, ENOMEM, ETOOSMALL]);
            }
            2 if how & 64 != 0 => {
                allow(av.remove(&[addr(input)]), &[EINVAL]);
            }
            3 => drop(allow(av.insertsvc("barewire://", "x"), &[EINVAL, ENODATA, ENOSYS])),
            _ => drop(allow(av.lookup(addr(input)), &[EINVAL])),
        }
    }

    fn counter(&mut self, i: usize, input: &mut Input<'_>) {
        let n = 1 + usize::from(input.byte() % (SLOTS as u8 - 1));
        let Some(cntr) = &self.sides[i].cntrs[n] else { return };
        let value = input.u64();
        let codes = [EINVAL, EAGAIN, ETIMEDOUT, EAVAIL, ENOSYS];
        match value % 7 {
            0 => drop(allow(cntr.add(value), &codes)),
            1 => drop(allow(cntr.set(value), &codes)),
            2 => drop(allow(cntr.adderr(value), &codes)),
            3 => drop(allow(cntr.seterr(value), &codes)),
            4 => drop(allow(cntr.wait(value, 0), &codes)),
            5 => drop(allow(cntr.readerr(), &codes)),
            _ => drop(allow(cntr.read(), &codes)),
        }
    }

    fn cancel(&mut self, i: usize, input: &mut Input<'_>) {
        let Some(ep) = &self.sides[i].eps[slot(input)] else { return };
        let context = self.context.saturating_sub(u64::from(input.byte() % 8));
        allow(ep.cancel(context), &[ENODATA]);
    }

    fn option(&mut self, i: usize, input: &mut Input<'_>) {
        let Some(ep) = &self.sides[i].eps[slot(input)] else { return };
        let (how, name) = (input.byte(), i32::from(input.byte() % 24) - 2);
        let codes = [EINVAL, ENOPROTOOPT, EOPBADSTATE, EBUSY, EOPNOTSUPP, EBADFLAGS];
        match how % 5 {
            0 => drop(allow(ep.getopt(name), &codes)),
            1 => drop(allow(ep.setopt(name, usize::from(how)), &codes)),
            2 => drop(allow(ep.setopt(name, usize::MAX - usize::from(how)), &codes)),
            3 => drop(allow(ep.set_tx_op_flags(flags(input)), &codes)),
            _ => drop(allow(ep.set_rx_op_flags(flags(input)), &codes)),
        }
    }

    fn event(&mut self, i: usize, input: &mut Input<'_>) {
        let eq = &self.sides[i].eq;
        let codes = [EINVAL, EAGAIN, EAVAIL, ETOOSMALL, ENOSYS, EOPBADSTATE, EOPNOTSUPP];
        let mut bytes = vec![0; usize::from(input.byte() % 64)];
        match input.byte() % 4 {
            0 => drop(allow(eq.write(u32::from(input.byte()), &bytes), &codes)),
            1 => drop(allow(eq.read(&mut bytes), &codes)),
            2 => drop(allow(eq.peek(&mut bytes), &codes)),
            _ => drop(allow(eq.readerr(), &codes)),
        }
    }

    /// Everything closes, in the order of who needs whom.
    fn end(mut self) {
        for i in 0..2 {
            self.sides[i].eps = Default::default();
        }
        for i in 0..2 {
            for n in 0..SLOTS {
                for _ in 0..1000 {
                    self.read(i, n);
                }
            }
        }
        for side in self.sides {
            let levels = side.domain.levels().expect("the domain is open");
            assert_eq!(levels.node.posted, 0, "{levels:?}");
            assert_eq!(levels.node.unexpected, 0, "{levels:?}");
            assert_eq!(levels.node.cq_reserved, 0, "{levels:?}");
            drop((side.eps, side.cqs, side.cntrs, side.avs, side.mrs));
            let levels = side.domain.levels().expect("the domain is open");
            assert_eq!((levels.ops, levels.regions), (0, 0), "{levels:?}");
            if let Err((err, _)) = side.domain.close() {
                panic!("nothing needs the domain any more: {err}");
            }
        }
    }
}

/// Closes an object; without endpoints nothing may need it.
fn close<T>(
    object: &mut Option<T>,
    close: impl FnOnce(T) -> std::result::Result<(), (Error, T)>,
    endpoints: usize,
) {
    let Some(open) = object.take() else { return };
    if let Err((err, open)) = close(open) {
        assert_eq!(err, Error::Busy);
        assert!(endpoints > 0, "nobody needs it");
        *object = Some(open);
    }
}
