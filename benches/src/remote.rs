//! An endpoint whose peer reads, writes and changes its memory: the raw API of the `api` crate for
//! one-sided operations, and the tagged messages that they are compared with.

use barewire::flags::{Access, BindFlags, Caps};
use barewire::raw::{IoVec, RawAtomic, RawCq, RawEndpoint, RawRecv, RawRma, RawSend};
use barewire::{
    AtomicKind, AtomicOp, Av, CqAttr, Datatype, Domain, EpAddr, FI_ADDR_UNSPEC, FiAddr, MrAttr,
    Progress, RawMr, RmaIov, TypedOp,
};
use barewire_dataplane::flags::OpFlags;
use barewire_dataplane::node::MsgKind;
use barewire_driver::port::Station;

use crate::count::{instructions, steady, warm_up};
use crate::end::{BenchResult, Done, Memory, TAG, domain, insert};
use crate::{Args, Report, Row};

/// Key of every end's memory region.
const KEY: u64 = 7;

/// Eager limit, bytes, so that a transfer of 64 KiB is compared with a rendezvous message, which
/// does the same: one side requests, and the other's memory is read or written directly.
const PULLED: usize = 16 << 10;

/// One endpoint.
pub struct RemoteEnd {
    ep: RawEndpoint,
    cq: RawCq,
    av: Av,
    peer: FiAddr,
    memory: Memory,
    // Declared before its domain, so that it is dropped first.
    _region: RawMr,
    _domain: Domain,
}

impl RemoteEnd {
    /// Opens the port of `spec` and an endpoint on it, with `memory` bytes for its own operations
    /// and the peer's.
    ///
    /// # Errors
    /// The error of the port or the API.
    pub fn open(spec: &str, memory: usize, progress: Progress) -> BenchResult<Self> {
        let said = |e: barewire::Error| format!("{spec}: {e}");
        let caps = Caps::TAGGED | Caps::RMA | Caps::ATOMIC;
        let (domain, info, av) = domain(spec, caps, progress, Some(PULLED), None)?;
        let cq = domain.raw_cq_open(CqAttr::default()).map_err(said)?;
        let ep = domain.raw_endpoint(&info).map_err(said)?;
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).map_err(said)?;
        ep.bind_av(&av).map_err(said)?;
        ep.enable().map_err(said)?;
        let memory = Memory::new(memory.next_multiple_of(8));
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let attr = MrAttr { access, requested_key: Some(KEY), ..MrAttr::default() };
        let iov = [IoVec { base: memory.at(0, memory.len()), len: memory.len() }];
        // SAFETY: the memory stays mapped and has no references.
        let region = unsafe { domain.raw_mr_reg(&iov, &attr) }.map_err(said)?;
        let (peer, _region, _domain) = (FI_ADDR_UNSPEC, region, domain);
        Ok(Self { ep, cq, av, peer, memory, _region, _domain })
    }

    /// Address of the endpoint.
    pub fn addr(&self) -> EpAddr {
        self.ep.getname().expect("the endpoint is open")
    }

    /// Sets the peer of later operations.
    pub fn connect(&mut self, peer: EpAddr) {
        self.peer = insert(&self.av, peer);
    }

    /// Connects to the endpoint of the other process, as [`End::join`](crate::end::End::join).
    pub fn join(&mut self, exchange_station: impl FnOnce(Station) -> Station) {
        let own = self.addr();
        self.connect(EpAddr { station: exchange_station(own.station), incarnation: 0, ..own });
    }

    /// Posts a tagged receive of `len` bytes at offset `at`.
    pub fn recv(&mut self, at: usize, len: usize) -> bool {
        let iov = [self.iov(at, len)];
        let (kind, src) = (MsgKind::Tagged, FI_ADDR_UNSPEC);
        let recv = RawRecv { kind, iov: &iov, src, tag: TAG, ignore: 0, context: 0 };
        // SAFETY: the memory stays mapped and has no references.
        unsafe { self.ep.recv(recv) }.is_ok()
    }

    /// Sends `len` bytes from offset `at` as a tagged message.
    pub fn send(&mut self, at: usize, len: usize) -> bool {
        let iov = [self.iov(at, len)];
        let (kind, dest) = (MsgKind::Tagged, self.peer);
        let send = RawSend { kind, iov: &iov, dest, tag: TAG, data: 0, context: 0 };
        // SAFETY: as in `recv`.
        unsafe { self.ep.send(send, OpFlags::empty()) }.is_ok()
    }

    /// Writes `len` bytes from offset `at` to the same offset of the peer's memory.
    pub fn write(&mut self, at: usize, len: usize) -> bool {
        let (iov, rma) =
            ([self.iov(at, len)], [RmaIov { addr: at as u64, len: len as u64, key: KEY }]);
        let call = RawRma { iov: &iov, dest: self.peer, rma_iov: &rma, data: 0, context: 0 };
        // SAFETY: as in `recv`.
        unsafe { self.ep.write(call, OpFlags::empty()) }.is_ok()
    }

    /// Reads `len` bytes from offset `at` of the peer's memory to the same offset.
    pub fn read(&mut self, at: usize, len: usize) -> bool {
        let (iov, rma) =
            ([self.iov(at, len)], [RmaIov { addr: at as u64, len: len as u64, key: KEY }]);
        let call = RawRma { iov: &iov, dest: self.peer, rma_iov: &rma, data: 0, context: 0 };
        // SAFETY: as in `recv`.
        unsafe { self.ep.read(call) }.is_ok()
    }

    /// Adds the word at offset 0 to the peer's word at offset 0; with `fetch` the old value is
    /// stored behind the operands and compare values of [`atomic`](Self::atomic).
    #[inline(always)]
    fn add(&mut self, fetch: bool) -> bool {
        let (operands, results) = ([self.iov(0, 8)], [self.iov(2 * (32 << 10), 8)]);
        let call = RawAtomic {
            kind: if fetch { AtomicKind::Fetch } else { AtomicKind::Base },
            op: TypedOp::new(AtomicOp::Sum, Datatype::Uint64),
            operands: &operands,
            compares: &[],
            results: if fetch { &results } else { &[] },
            dest: self.peer,
            rma_iov: &[RmaIov { addr: 0, len: 1, key: KEY }],
            data: 0,
            context: 0,
        };
        // SAFETY: as in `recv`.
        unsafe { self.ep.atomic(call) }.is_ok()
    }

    /// Changes `count` elements at offset 0 of the peer's memory. Operands, compare values and
    /// results are in the own memory, 32 KiB apart.
    #[inline(never)]
    pub fn atomic(
        &mut self,
        (kind, op, ty): (AtomicKind, AtomicOp, Datatype),
        count: usize,
    ) -> bool {
        let len = count * ty.size();
        let part = |i: usize| [self.iov(i * (32 << 10), len)];
        let (operands, compares, results) = (part(0), part(1), part(2));
        let used = |list: &'static [AtomicKind]| list.contains(&kind);
        let call = RawAtomic {
            kind,
            op: TypedOp::new(op, ty),
            operands: if op == AtomicOp::Read { &[] } else { &operands },
            compares: if used(&[AtomicKind::Compare]) { &compares } else { &[] },
            results: if used(&[AtomicKind::Fetch, AtomicKind::Compare]) { &results } else { &[] },
            dest: self.peer,
            rma_iov: &[RmaIov { addr: 0, len: count as u64, key: KEY }],
            data: 0,
            context: 0,
        };
        // SAFETY: as in `recv`.
        unsafe { self.ep.atomic(call) }.is_ok()
    }

    /// Reads completions, and turns the progress engine if there are none and progress is manual.
    pub fn poll(&mut self) -> Done {
        Done::read(&self.cq)
    }

    /// The 8 bytes at offset `at`, which the peer may be writing.
    pub fn word(&self, at: usize) -> u64 {
        // SAFETY: `at` checks that 8 bytes are there; they are read at once and as they are.
        unsafe { self.memory.at(at, 8).cast::<u64>().read_volatile() }
    }

    /// Sets the 8 bytes at offset `at`.
    pub fn set_word(&mut self, at: usize, value: u64) {
        // SAFETY: as in `word`.
        unsafe { self.memory.at(at, 8).cast::<u64>().write_volatile(value) };
    }

    fn iov(&self, at: usize, len: usize) -> IoVec {
        IoVec { base: self.memory.at(at, len), len }
    }
}

/// Fetch-and-add of a 64-bit word.
pub const FADD: (AtomicKind, AtomicOp, Datatype) =
    (AtomicKind::Fetch, AtomicOp::Sum, Datatype::Uint64);

/// Memory of an endpoint of [`steady_case`], bytes.
const MEMORY: usize = 3 * (32 << 10);

/// Two endpoints in one thread, on the ports `specs`.
///
/// # Errors
/// The error of the port or the API.
pub fn pair(specs: [&str; 2], memory: usize) -> BenchResult<[RemoteEnd; 2]> {
    let open = |spec| RemoteEnd::open(spec, memory, Progress::Manual);
    let mut pair = [open(specs[0])?, open(specs[1])?];
    for i in 0..2 {
        let addr = pair[1 - i].addr();
        pair[i].connect(addr);
    }
    Ok(pair)
}

/// Runs `count` operations of `post` one after the other, each to its completion.
///
/// # Errors
/// An operation was refused, or did not complete.
// Instantiated per operation, so that none has the others' registers.
#[inline(never)]
pub fn each(
    [a, b]: &mut [RemoteEnd; 2],
    count: u64,
    mut post: impl FnMut(&mut RemoteEnd) -> bool,
) -> BenchResult<()> {
    for _ in 0..count {
        if !post(a) {
            return Err("refused".to_owned());
        }
        let mut turns = 0;
        loop {
            b.poll();
            if a.poll().sent > 0 {
                break;
            }
            turns += 1;
            if turns > 100_000_000 {
                return Err("an operation never completes".to_owned());
            }
        }
    }
    Ok(())
}

/// Sends `count` messages of `len` bytes one after the other.
#[inline(never)]
fn messages([a, b]: &mut [RemoteEnd; 2], len: usize, count: u64) -> BenchResult<()> {
    for _ in 0..count {
        if !b.recv(0, len) || !a.send(0, len) {
            return Err("refused in steady state".to_owned());
        }
        let (mut received, mut sent) = (0, 0);
        for turn in 0.. {
            if received == 0 {
                received += b.poll().received;
            }
            if sent == 0 {
                sent += a.poll().sent;
            }
            if received + sent == 2 {
                break;
            }
            if turn > 100_000_000 {
                return Err("a message did not arrive".to_owned());
            }
        }
    }
    Ok(())
}

/// The eager message as a reference of operations.
const MESSAGE: &str = "message-64B";

/// Repeats `case`, one of [`count_instructions`].
#[inline(never)]
fn repeat(pair: &mut [RemoteEnd; 2], case: &str, count: u64) -> BenchResult<()> {
    match case {
        "fadd-u64" => each(pair, count, |end| end.add(true)),
        "add-u64" => each(pair, count, |end| end.add(false)),
        "write-8B" => each(pair, count, |end| end.write(0, 8)),
        "write-64B" => each(pair, count, |end| end.write(0, 64)),
        "write-1KiB" => each(pair, count, |end| end.write(0, 1024)),
        "read-8B" => each(pair, count, |end| end.read(0, 8)),
        "read-64B" => each(pair, count, |end| end.read(0, 64)),
        "read-1KiB" => each(pair, count, |end| end.read(0, 1024)),
        MESSAGE => messages(pair, 64, count),
        "message-1KiB" => messages(pair, 1024, count),
        _ => Err("no such case".to_owned()),
    }
}

/// Runs `case` for `count` operations in the function whose instructions are counted: for a
/// benchmark that [`count_instructions`] runs again.
///
/// # Errors
/// The error of the port or the API.
pub fn steady_case(case: &str, count: u64) -> BenchResult<()> {
    let spec = format!("shm:bench-steady-{}", std::process::id());
    steady_case_on([&spec, &spec], case, count)
}

/// [`steady_case`] on the ports `specs`.
///
/// # Errors
/// Those of [`steady_case`].
pub fn steady_case_on(specs: [&str; 2], case: &str, count: u64) -> BenchResult<()> {
    let mut pair = pair(specs, MEMORY)?;
    repeat(&mut pair, case, warm_up(count))?;
    steady(|| repeat(&mut pair, case, count))
}

/// Adds a row `CASE-instructions` for each requested one of `cases`: instructions of one operation
/// against an eager message. The second text of a case is its note.
pub fn count_instructions(cases: &[(&str, &str)], args: &Args, report: &mut Report) {
    let (few, many) = (args.size(10_000, 100), args.size(60_000, 200));
    let mut message = None;
    for (case, note) in cases {
        let name = format!("{case}-instructions");
        if !args.wants(&name) {
            continue;
        }
        let counted = instructions(case, few, many);
        let against = match message.take() {
            Some(cost) => Ok(cost),
            None => instructions(MESSAGE, few, many),
        };
        match (counted, against) {
            (Ok(cost), Ok(of)) => {
                let row = Row::new(name, cost, "instr/op");
                let row = row.against("eager message of 64 B", of, cost / of);
                report.row(row.count(many - few).note(*note));
                message = Some(of);
            }
            (Err(why), _) | (_, Err(why)) => report.skip(&name, &why),
        }
    }
}
