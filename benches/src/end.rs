//! Endpoints to measure, at three levels: [`RawEnd`] uses the raw API of the `api` crate, which the
//! C provider uses, [`SafeEnd`] its safe API, [`NodeEnd`] a node directly on a port.

use std::slice;

use barewire::raw::{IoVec, RawCq, RawEndpoint, RawRecv, RawSend, SerialPromise};
use barewire::{
    AuthKey, Av, AvAttr, Buf, Completion, Cq, CqAttr, Domain, Endpoint, Info, Peers, PostError,
    Progress, SealMode, Settings,
};
use barewire_dataplane::error::Error;
use barewire_dataplane::flags::{BindFlags, Caps, CqFlags, OpFlags};
use barewire_dataplane::node::{
    AvId, CqId, EpAttr, EpId, MsgKind, Node, NodeSettings, RecvReq, SendReq,
};
use barewire_dataplane::types::{Cqe, EpAddr, FI_ADDR_UNSPEC, FiAddr, Instant};
use barewire_driver::clock::now_ns;
use barewire_driver::frame::{RxFrame, TxFrame};
use barewire_driver::mem::{IoBuf, Span};
use barewire_driver::port::{Port, PortCaps, RxSink, Station, Tx};

/// The tag of every message.
pub const TAG: u64 = 7;

/// Numbers of completed operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Completed sends.
    pub sent: u64,
    /// Completed receives.
    pub received: u64,
}

/// An endpoint with memory of its own that exchanges tagged messages with one peer.
pub trait End {
    /// Address of the endpoint.
    fn addr(&self) -> EpAddr;

    /// Sets the peer of later messages.
    fn connect(&mut self, peer: EpAddr);

    /// Connects to the endpoint of the other process: the same endpoint number at the station that
    /// `exchange_station` returns for this one.
    fn join(&mut self, exchange_station: impl FnOnce(Station) -> Station)
    where
        Self: Sized,
    {
        let own = self.addr();
        self.connect(EpAddr { station: exchange_station(own.station), incarnation: 0, ..own });
    }

    /// Posts a receive of `len` bytes at offset `at` of the memory. False if it must be repeated.
    fn recv(&mut self, at: usize, len: usize) -> bool;

    /// Sends `len` bytes from offset `at`, with a completion; `more`: another send follows at once.
    /// False if it must be repeated.
    fn send(&mut self, at: usize, len: usize, more: bool) -> bool;

    /// [`send`](Self::send) injected and without a completion.
    fn inject(&mut self, at: usize, len: usize) -> bool;

    /// Reads completions, and turns the progress engine if there are none.
    fn poll(&mut self) -> Done;
}

/// Memory for the operations of a benchmark: mapped and touched until the process exits.
#[derive(Debug)]
pub struct Memory {
    base: *mut u8,
    len: usize,
}

impl Memory {
    /// Memory of `len` bytes.
    pub fn new(len: usize) -> Self {
        let bytes = Box::leak(vec![0x5a_u8; len].into_boxed_slice());
        Self { base: bytes.as_mut_ptr(), len }
    }

    /// Memory of `len` bytes that begins with a page: the speed of a C library's copy may depend on
    /// the offsets in the pages (`driver/src/mem/copy_long.rs`).
    pub fn from_page(len: usize) -> Self {
        const PAGE: usize = 4096;
        let bytes = Box::leak(vec![0x5a_u8; len + PAGE].into_boxed_slice());
        let start = bytes.as_ptr().align_offset(PAGE);
        Self { base: bytes[start..].as_mut_ptr(), len }
    }

    /// Length, bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// The address of `len` bytes at offset `at`.
    ///
    /// # Panics
    /// If they are not within the memory.
    pub fn at(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at <= self.len && len <= self.len - at);
        // SAFETY: within the allocation, as was just checked.
        unsafe { self.base.add(at) }
    }

    /// Lends a part of the memory to an operation.
    #[inline]
    pub fn lend(&self, at: usize, len: usize) -> IoBuf {
        // SAFETY: `from_raw` needs memory that stays mapped and has no references: it was leaked,
        // and its only reference became `base`.
        IoBuf::one(unsafe { Span::from_raw(self.at(at, len), len) })
    }
}

/// A node on a port, with one endpoint.
pub struct NodeEnd {
    node: Node,
    port: Box<dyn Port>,
    ep: EpId,
    cq: CqId,
    av: AvId,
    peer: FiAddr,
    memory: Memory,
}

/// A result whose error is text.
pub type BenchResult<T> = Result<T, String>;

/// Settings of node `number`.
pub fn node_settings(number: u64) -> NodeSettings {
    NodeSettings { incarnation: 0xbe9c_0000 + number, seed: 77 + number, ..NodeSettings::default() }
}

/// A node with one endpoint for tagged messages.
///
/// # Errors
/// The node's error.
pub fn node(settings: NodeSettings, caps: &PortCaps) -> BenchResult<(Node, EpId, CqId, AvId)> {
    let said = |e: Error| format!("node: {e}");
    let mut node = Node::new(settings, caps).map_err(said)?;
    let cq = node.cqs.open(4096).map_err(said)?;
    let av = node.sessions().av_open(16).map_err(said)?;
    let caps = Caps::MSG | Caps::TAGGED | Caps::SEND | Caps::RECV;
    let ep = node.eps.open(EpAttr { caps, ..EpAttr::default() }).map_err(said)?;
    node.objects().ep_bind_cq(ep, cq, BindFlags::TRANSMIT | BindFlags::RECV).map_err(said)?;
    node.objects().ep_bind_av(ep, av).map_err(said)?;
    node.ep_enable(ep).map_err(said)?;
    Ok((node, ep, cq, av))
}

impl NodeEnd {
    /// Opens an end on `port` with `memory` bytes of memory.
    ///
    /// # Errors
    /// The node's error.
    pub fn open(port: Box<dyn Port>, number: u64, memory: usize) -> BenchResult<Self> {
        let (node, ep, cq, av) = node(node_settings(number), port.caps())?;
        let memory = Memory::new(memory);
        Ok(Self { node, port, ep, cq, av, peer: FI_ADDR_UNSPEC, memory })
    }

    /// Opens the port of `spec` and an endpoint on it.
    ///
    /// # Errors
    /// The error of the port or the node.
    pub fn open_on(spec: &str, number: u64, memory: usize) -> BenchResult<Self> {
        let port = barewire_driver::open::open(spec).map_err(|e| e.to_string())?;
        Self::open(port, number, memory)
    }

    /// The node, for its counters.
    pub fn node(&self) -> &Node {
        &self.node
    }

    #[inline]
    fn transmit(&mut self, now: Instant) {
        let port = &mut self.port;
        let sent =
            self.node.transmit(now, &mut |frame: &TxFrame<'_>| port.tx(frame).unwrap_or(Tx::Full));
        if sent > 0 {
            // A port that is gone shows in the next `poll`, which moves nothing.
            let _ = self.port.flush();
        }
    }

    #[inline(always)]
    fn try_send(&mut self, req: &mut SendReq) -> bool {
        let port = &mut self.port;
        let mut out = |frame: &TxFrame<'_>| port.tx(frame).unwrap_or(Tx::Full);
        let sent = self.node.try_send(self.ep, req, &mut out, || Instant(now_ns()));
        if sent {
            let _ = self.port.flush();
        }
        sent
    }

    #[inline]
    fn turn(&mut self) {
        let now = Instant(now_ns());
        let mut sink = ToNode { node: &mut self.node, now };
        let _ = self.port.rx_burst(32, &mut sink);
        self.transmit(now);
    }

    #[inline]
    fn read(&mut self) -> Done {
        let mut entries = [Cqe::default(); 8];
        let n = self.node.cq_read(self.cq, &mut entries).unwrap_or(0);
        count(&entries[..n])
    }

    #[inline]
    fn post(&mut self, at: usize, len: usize, flags: OpFlags, no_completion: bool) -> bool {
        let mut req = SendReq {
            kind: MsgKind::Tagged,
            buf: self.memory.lend(at, len),
            dest: self.peer,
            tag: TAG,
            data: 0,
            context: 0,
            flags,
            no_completion,
        };
        if self.try_send(&mut req) {
            return true;
        }
        let now = Instant(now_ns());
        let posted = self.node.post_send(now, self.ep, req);
        if !flags.contains(OpFlags::MORE) || posted.is_err() {
            self.transmit(now);
        }
        posted.is_ok()
    }
}

/// Counts sends and receives separately.
#[inline]
pub fn count(entries: &[Cqe]) -> Done {
    let mut done = Done::default();
    entries.iter().for_each(|entry| done.note(entry));
    done
}

impl Done {
    #[inline]
    fn note(&mut self, entry: &Cqe) {
        if entry.flags.contains(CqFlags::RECV) {
            self.received += 1;
        } else {
            self.sent += 1;
        }
    }

    /// Counts at most eight entries of `cq`, each read in place, as the provider does.
    #[inline]
    pub fn read(cq: &RawCq) -> Self {
        let mut done = Self::default();
        // An empty queue is no error here.
        let _ = cq.take(8, |entry| done.note(entry));
        done
    }
}

impl End for NodeEnd {
    fn addr(&self) -> EpAddr {
        self.node.addr_of(self.ep).expect("the endpoint is open")
    }

    fn connect(&mut self, peer: EpAddr) {
        let inserted = self.node.sessions().av_insert(Instant(now_ns()), self.av, peer);
        self.peer = inserted.expect("the address vector has room");
    }

    #[inline]
    fn recv(&mut self, at: usize, len: usize) -> bool {
        let req = RecvReq {
            kind: MsgKind::Tagged,
            buf: self.memory.lend(at, len),
            src: FI_ADDR_UNSPEC,
            tag: TAG,
            ignore: 0,
            context: 0,
            flags: OpFlags::empty(),
        };
        self.node.objects().try_post_recv(self.ep, &req)
            || self.node.post_recv(Instant(now_ns()), self.ep, req).is_ok()
    }

    #[inline]
    fn send(&mut self, at: usize, len: usize, more: bool) -> bool {
        self.post(at, len, if more { OpFlags::MORE } else { OpFlags::empty() }, false)
    }

    #[inline]
    fn inject(&mut self, at: usize, len: usize) -> bool {
        self.post(at, len, OpFlags::INJECT, true)
    }

    #[inline]
    fn poll(&mut self) -> Done {
        let done = self.read();
        if done != Done::default() {
            return done;
        }
        self.turn();
        self.read()
    }
}

/// The receive sink: passes frames to the node.
struct ToNode<'a> {
    node: &'a mut Node,
    now: Instant,
}

impl RxSink for ToNode<'_> {
    #[inline]
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        self.node.prefetch(frame);
    }

    #[inline]
    fn frame(&mut self, frame: &RxFrame<'_>) {
        self.node.on_frame(self.now, frame);
    }
}

/// A domain of the `api` crate on the port of `spec`, for one thread, with the objects around it.
/// Messages longer than `eager_max` bytes use rendezvous, if that is set. All domains with sealed
/// frames have the same key.
pub(crate) fn domain(
    spec: &str,
    caps: Caps,
    progress: Progress,
    eager_max: Option<usize>,
    seal: Option<SealMode>,
) -> BenchResult<(Domain, Info, Av)> {
    let said = |e: barewire::Error| format!("{spec}: {e}");
    let mut hints = Info { caps, ..Info::default() };
    hints.domain_attr.data_progress = progress;
    // A progress thread of the domain is a second thread.
    hints.domain_attr.threading = match progress {
        Progress::Auto => barewire::Threading::Safe,
        _ => barewire::Threading::Domain,
    };
    hints.domain_attr.name = Some(spec.to_owned());
    if seal.is_some() {
        hints.domain_attr.auth_key = AuthKey::new(&[7; 32]);
    }
    let version = barewire::API_VERSION;
    let none = barewire::flags::InfoFlags::empty();
    // Ends in different processes exchange MACs only.
    let by_name = true;
    // Only the named port is measured.
    let near = false;
    // The cost of looking peers up is measured separately.
    let inserted = std::env::var("BAREWIRE_PEERS").is_ok_and(|peers| peers == "inserted");
    let peers = if inserted { Peers::Inserted } else { Peers::Named };
    let seal = seal.unwrap_or_default();
    let settings =
        Settings { stats: false, eager_max, by_name, near, peers, seal, ..Settings::default() };
    let info = barewire::getinfo_with(&settings, version, None, None, none, Some(&hints));
    let info = info.map_err(said)?.into_iter().next().ok_or("no info")?;
    let fabric = barewire::fabric(&info.fabric_attr).map_err(said)?;
    let port = barewire_driver::open::open(spec).map_err(|e| e.to_string())?;
    // SAFETY: an end owns all objects of its domain and is used by one thread.
    let promise = unsafe { SerialPromise::new() };
    let domain = fabric.domain_serial(&info, settings, port, promise);
    let domain = domain.map_err(|e| e.to_string())?;
    let av = domain.av_open(AvAttr::default()).map_err(said)?;
    Ok((domain, info, av))
}

/// An endpoint of the raw API.
pub struct RawEnd {
    ep: RawEndpoint,
    cq: RawCq,
    av: Av,
    peer: FiAddr,
    memory: Memory,
}

impl RawEnd {
    /// Opens the port of `spec` and an endpoint on it, with `memory` bytes of memory.
    ///
    /// # Errors
    /// The error of the port or the API.
    pub fn open(spec: &str, memory: usize) -> BenchResult<Self> {
        Self::open_sealed(spec, memory, None)
    }

    /// [`open`](Self::open) with sealed frames if `seal` is set.
    ///
    /// # Errors
    /// Those of [`open`](Self::open).
    pub fn open_sealed(spec: &str, memory: usize, seal: Option<SealMode>) -> BenchResult<Self> {
        let said = |e: barewire::Error| format!("{spec}: {e}");
        let (domain, info, av) = domain(spec, Caps::TAGGED, Progress::Manual, None, seal)?;
        let cq = domain.raw_cq_open(CqAttr::default()).map_err(said)?;
        let ep = domain.raw_endpoint(&info).map_err(said)?;
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).map_err(said)?;
        ep.bind_av(&av).map_err(said)?;
        ep.enable().map_err(said)?;
        Ok(Self { ep, cq, av, peer: FI_ADDR_UNSPEC, memory: Memory::new(memory) })
    }

    #[inline]
    fn read(&mut self) -> Done {
        Done::read(&self.cq)
    }
}

/// Inserts the only peer of an endpoint.
pub(crate) fn insert(av: &Av, peer: EpAddr) -> FiAddr {
    let mut to = [FI_ADDR_UNSPEC];
    av.insert(&[peer], &mut to).expect("the address vector has room");
    to[0]
}

impl End for RawEnd {
    fn addr(&self) -> EpAddr {
        self.ep.getname().expect("the endpoint is open")
    }

    fn connect(&mut self, peer: EpAddr) {
        self.peer = insert(&self.av, peer);
    }

    #[inline]
    fn recv(&mut self, at: usize, len: usize) -> bool {
        let iov = [IoVec { base: self.memory.at(at, len), len }];
        let recv = RawRecv {
            kind: MsgKind::Tagged,
            iov: &iov,
            src: FI_ADDR_UNSPEC,
            tag: TAG,
            ignore: 0,
            context: 0,
        };
        // SAFETY: the memory stays mapped and has no other user.
        unsafe { self.ep.recv(recv) }.is_ok()
    }

    #[inline]
    fn send(&mut self, at: usize, len: usize, more: bool) -> bool {
        let iov = [IoVec { base: self.memory.at(at, len), len }];
        let send = RawSend {
            kind: MsgKind::Tagged,
            iov: &iov,
            dest: self.peer,
            tag: TAG,
            data: 0,
            context: 0,
        };
        let flags = if more { OpFlags::MORE } else { OpFlags::empty() };
        // SAFETY: as in `recv`.
        unsafe { self.ep.send(send, flags) }.is_ok()
    }

    #[inline]
    fn inject(&mut self, at: usize, len: usize) -> bool {
        let bytes = (self.memory.at(at, len).cast_const(), len);
        // SAFETY: as in `recv`.
        unsafe { self.ep.inject(MsgKind::Tagged, bytes, self.peer, TAG, None) }.is_ok()
    }

    #[inline]
    fn poll(&mut self) -> Done {
        self.read()
    }
}

/// An endpoint of the safe API, whose buffers are returned by completions.
pub struct SafeEnd {
    ep: Endpoint,
    cq: Cq,
    av: Av,
    peer: FiAddr,
    spare: Vec<Buf>,
    /// The last read completion.
    done: Completion,
    bytes: Vec<u8>,
}

impl SafeEnd {
    /// Opens the port of `spec` and an endpoint on it, with `count` buffers of `len` bytes, the
    /// length of all operations.
    ///
    /// # Errors
    /// The error of the port or the API.
    pub fn open(spec: &str, count: usize, len: usize) -> BenchResult<Self> {
        let said = |e: barewire::Error| format!("{spec}: {e}");
        let (domain, info, av) = domain(spec, Caps::TAGGED, Progress::Manual, None, None)?;
        let cq = domain.cq_open(CqAttr::default()).map_err(said)?;
        let ep = domain.endpoint(&info).map_err(said)?;
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).map_err(said)?;
        ep.bind_av(&av).map_err(said)?;
        ep.enable().map_err(said)?;
        let spare = (0..count).map(|_| Buf::zeroed(len)).collect();
        let done = Completion::default();
        Ok(Self { ep, cq, av, peer: FI_ADDR_UNSPEC, spare, done, bytes: vec![0x5a; len] })
    }
}

impl SafeEnd {
    /// Whether a call was accepted. The buffer of a rejected call is returned.
    #[inline]
    fn is_posted(&mut self, posted: std::result::Result<(), PostError>) -> bool {
        match posted {
            Ok(()) => true,
            Err(refused) => {
                self.spare.extend(refused.bufs.into_one());
                false
            }
        }
    }
}

impl End for SafeEnd {
    fn addr(&self) -> EpAddr {
        self.ep.getname().expect("the endpoint is open")
    }

    fn connect(&mut self, peer: EpAddr) {
        self.peer = insert(&self.av, peer);
    }

    #[inline]
    fn recv(&mut self, _at: usize, _len: usize) -> bool {
        let Some(buf) = self.spare.pop() else { return false };
        let posted = self.ep.trecv(buf, FI_ADDR_UNSPEC, TAG, 0, 0);
        self.is_posted(posted)
    }

    #[inline]
    fn send(&mut self, _at: usize, _len: usize, _more: bool) -> bool {
        let Some(buf) = self.spare.pop() else { return false };
        let posted = self.ep.tsend(buf, self.peer, TAG, 0);
        self.is_posted(posted)
    }

    #[inline]
    fn inject(&mut self, _at: usize, len: usize) -> bool {
        self.ep.tinject(&self.bytes[..len], self.peer, TAG).is_ok()
    }

    #[inline]
    fn poll(&mut self) -> Done {
        let mut done = Done::default();
        if self.cq.read(slice::from_mut(&mut self.done)).is_err() {
            return done;
        }
        if let Some(buf) = self.done.take_buf() {
            self.spare.push(buf);
        }
        if self.done.flags.contains(CqFlags::RECV) {
            done.received = 1;
        } else {
            done.sent = 1;
        }
        done
    }
}
