//! An endpoint with its queue and address vector, and calls that wait with a timeout.

use std::collections::VecDeque;
use std::fmt::Display;
use std::time::{Duration, Instant};

use barewire::flags::{BindFlags, Caps, CqFlags, InfoFlags};
use barewire::names::Names;
use barewire::{
    API_VERSION, Av, AvAttr, Buf, Completion, Cq, CqAttr, Domain, DomainAttr, Endpoint, EpAddr,
    Error, FI_ADDR_UNSPEC, FiAddr, Info, PostError, PostResult, Progress, Settings, Threading,
    fabric, getinfo_with,
};

use super::Common;
use super::control::{CONTROL_TAG, Control, DATA_TAG, LEN};
use crate::fail::Fail;

/// A client gives up after so long without a completion. Longer than the dataplane needs to find a
/// peer dead, so that a dead peer is reported as such.
pub(super) const CLIENT_TIMEOUT: Duration = Duration::from_secs(10);
/// A server gives up a client after so long without a completion. Shorter, so that the next waiting
/// client is served.
pub(super) const SERVER_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the final message may take to arrive, or a receive to find room; and how long a
/// finished side keeps turning the loop: longer than an acknowledgement is delayed on a slow path.
const FINAL_TIMEOUT: Duration = Duration::from_secs(1);
const SETTLE: Duration = Duration::from_millis(40);

/// Empty reads after which the processor is offered to others: the peer may need it.
const SPINS: u32 = 2000;

/// Contexts from here on are control receives; below are the measured messages: the number of the
/// run times [`SLOTS`] plus the slot.
const CONTROL_AT: u64 = 1 << 48;
/// More than any window.
const SLOTS: u64 = 1 << 16;
const CONTROL_BUFS: u64 = 4;

/// An event of the current run. Events of earlier runs are dropped.
pub(super) enum Event {
    /// A control message of the peer, which names its sender.
    Control(Control),
    /// A measured message arrived in `buf`, `len` bytes of it.
    Received { slot: usize, buf: Buf, len: usize },
    /// A measured message left `buf`, or a one-sided operation ended, whose answer is in `buf`.
    Sent { slot: usize, buf: Buf },
    /// A measured message with a buffer failed.
    Failed(Fail),
    /// An injected message, of this run or an earlier one, failed.
    InjectFailed(Fail),
}

/// One endpoint, used by one thread.
pub(super) struct Link {
    ep: Endpoint,
    cq: Cq,
    av: Av,
    domain: Domain,
    inject_size: usize,
    batch: Vec<Completion>,
    /// Number of the current run.
    run: u64,
    /// Events that were read and not yet returned.
    waiting: VecDeque<Event>,
    spins: u32,
    timeout: Duration,
    /// Time of the last event, while waiting.
    quiet_since: Option<Instant>,
    /// Control messages that say nothing we understand.
    dropped: u64,
}

/// Opens an endpoint; with `by_name` one that clients find by host and service, if the port has
/// such names.
fn open_endpoint(domain: &Domain, info: &mut Info, by_name: bool) -> barewire::Result<Endpoint> {
    let names = Names::of(&domain.port().name);
    for service in names.services().filter(|_| by_name) {
        info.src_addr = Some(names.here(service).to_bytes().to_vec());
        match domain.endpoint(info) {
            // Another process of this host has it.
            Err(Error::AddrInUse) => {}
            opened => return opened,
        }
    }
    info.src_addr = None;
    domain.endpoint(info)
}

/// The remedy for an operation that ended with `error`, if it is at the other side.
fn mend_of(error: Error) -> Option<&'static str> {
    match error {
        Error::HostUnreach | Error::ConnRefused => {
            Some("is the other side still there? start it with barewire pingpong --listen")
        }
        Error::ConnReset => Some(
            "the other side restarted or ended: take the address that it prints now, or start it \
             with barewire pingpong --listen",
        ),
        Error::NoKey | Error::Access => {
            Some("give both sides the same --key-file, or certificates of the same --roots")
        }
        Error::NoSpace => Some("enlarge /dev/shm: mount -o remount,size=1G /dev/shm"),
        _ => None,
    }
}

impl Link {
    /// Opens an endpoint on the port of the options.
    ///
    /// # Errors
    /// The line says what is missing.
    pub(super) fn open(args: &Common, timeout: Duration) -> Result<Self, Fail> {
        Self::open_as(args, timeout, false)
    }

    /// As [`open`](Self::open), reachable by host and service if the port has such names.
    pub(super) fn open_by_name(args: &Common, timeout: Duration) -> Result<Self, Fail> {
        Self::open_as(args, timeout, true)
    }

    fn open_as(args: &Common, timeout: Duration, by_name: bool) -> Result<Self, Fail> {
        let port = args.port.as_str();
        let mut settings = Settings::from_env().map_err(Fail::usage)?;
        args.set_keys(&mut settings)?;
        settings.port = Some(port.to_owned());
        barewire::check_port(port).map_err(Fail::new)?;
        let hints = Info {
            caps: Caps::MSG | Caps::TAGGED | Caps::RMA | Caps::ATOMIC,
            domain_attr: DomainAttr {
                name: Some(port.to_owned()),
                threading: Threading::Domain,
                data_progress: Progress::Manual,
                ..DomainAttr::default()
            },
            ..Info::default()
        };
        let none = InfoFlags::empty();
        let infos = getinfo_with(&settings, API_VERSION, None, None, none, Some(&hints));
        let mut info = infos
            .map_err(|why| Fail::new(format!("port {port}: {why}")))?
            .into_iter()
            .next()
            .ok_or_else(|| Fail::new(format!("port {port}: nothing offers messages on it")))?;
        let fabric = fabric(&info.fabric_attr).map_err(Fail::new)?;
        let domain = fabric.domain_with(&info, settings).map_err(Fail::new)?;
        let cq = domain.cq_open(CqAttr::default()).map_err(Fail::new)?;
        let av = domain.av_open(AvAttr::default()).map_err(Fail::new)?;
        let ep = open_endpoint(&domain, &mut info, by_name).map_err(Fail::new)?;
        ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).map_err(Fail::new)?;
        ep.bind_av(&av).map_err(Fail::new)?;
        ep.enable().map_err(Fail::new)?;
        let batch = (0..32).map(|_| Completion::default()).collect();
        let mut link = Self {
            ep,
            cq,
            av,
            domain,
            inject_size: info.tx_attr.inject_size,
            batch,
            run: 0,
            waiting: VecDeque::new(),
            spins: 0,
            timeout,
            quiet_since: None,
            dropped: 0,
        };
        for i in 0..CONTROL_BUFS {
            link.post_control(Buf::zeroed(LEN), CONTROL_AT + i)?;
        }
        Ok(link)
    }

    /// Begins a run: events of earlier ones are not reported any more.
    pub(super) fn begin(&mut self) {
        self.run += 1;
        self.quiet_since = None;
        self.waiting.retain(|event| matches!(event, Event::Control(_)));
    }

    fn context(&self, slot: usize) -> u64 {
        self.run * SLOTS + slot as u64
    }

    /// Our address.
    pub(super) fn addr(&self) -> Result<EpAddr, Fail> {
        self.ep.getname().map_err(Fail::new)
    }

    /// The port's name.
    pub(super) fn port(&self) -> &str {
        &self.domain.port().name
    }

    /// Longest message that [`inject`](Self::inject) takes.
    pub(super) fn inject_size(&self) -> usize {
        self.inject_size
    }

    /// Makes `addr` a destination.
    pub(super) fn add_peer(&self, addr: EpAddr) -> Result<FiAddr, Fail> {
        let mut fi_addr = [FI_ADDR_UNSPEC];
        self.av.insert(&[addr], &mut fi_addr).map_err(Fail::new)?;
        if fi_addr[0] == FI_ADDR_UNSPEC {
            return Err(Fail::new(format!("{addr} cannot be reached from port {}", self.port())));
        }
        Ok(fi_addr[0])
    }

    /// Forgets a destination.
    pub(super) fn remove_peer(&self, peer: FiAddr) -> Result<(), Fail> {
        self.av.remove(&[peer]).map_err(Fail::new)
    }

    /// Sends control message `what` to `peer`; waits for room.
    pub(super) fn send_control(&mut self, peer: FiAddr, what: Control) -> Result<(), Fail> {
        let bytes = what.to_bytes();
        loop {
            match self.ep.tinject(&bytes, peer, CONTROL_TAG) {
                Err(Error::Again) => self.wait_for_room()?,
                done => return done.map_err(Fail::new),
            }
        }
    }

    /// Sends the final control message and waits for its delivery, at most [`FINAL_TIMEOUT`].
    pub(super) fn send_final(&mut self, peer: FiAddr, what: Control) -> Result<(), Fail> {
        self.begin();
        let started = Instant::now();
        let mut buf = Buf::from(what.to_bytes().to_vec());
        while let Some(refused) =
            self.try_post(0, |ep, context| ep.tsend(buf, peer, CONTROL_TAG, context))?
        {
            buf = refused;
            self.wait_for_room()?;
        }
        while started.elapsed() < FINAL_TIMEOUT {
            match self.poll()? {
                Some(Event::Sent { .. } | Event::Failed(_)) => break,
                _ => std::hint::spin_loop(),
            }
        }
        self.settle()
    }

    /// Turns the loop for a moment, so that acknowledgements leave before the endpoint closes.
    pub(super) fn settle(&mut self) -> Result<(), Fail> {
        let started = Instant::now();
        while started.elapsed() < SETTLE {
            self.read()?;
        }
        self.read()
    }

    /// Sends a small measured message, waiting for room as long as it takes.
    pub(super) fn inject(&mut self, bytes: &[u8], peer: FiAddr, tagged: bool) -> Result<(), Fail> {
        loop {
            let posted = if tagged {
                self.ep.tinject(bytes, peer, DATA_TAG)
            } else {
                self.ep.inject(bytes, peer)
            };
            match posted {
                Err(Error::Again) => self.wait_for_room()?,
                done => return done.map_err(Fail::new),
            }
        }
    }

    /// Sends a measured message, or gives it back because there is no room now.
    pub(super) fn try_send(
        &mut self,
        buf: Buf,
        peer: FiAddr,
        tagged: bool,
        slot: usize,
    ) -> Result<Option<Buf>, Fail> {
        self.try_post(slot, |ep, context| {
            if tagged {
                ep.tsend(buf, peer, DATA_TAG, context)
            } else {
                ep.send(buf, peer, context)
            }
        })
    }

    /// Posts a measured operation, or gives its buffer back because there is no room now.
    pub(super) fn try_post(
        &self,
        slot: usize,
        post: impl FnOnce(&Endpoint, u64) -> PostResult,
    ) -> Result<Option<Buf>, Fail> {
        match post(&self.ep, self.context(slot)) {
            Ok(()) => Ok(None),
            Err(PostError { error: Error::Again, bufs }) => Ok(bufs.into_one()),
            Err(PostError { error, .. }) => Err(Fail::new(error)),
        }
    }

    /// The domain, for what a server lends.
    pub(super) fn domain(&self) -> &Domain {
        &self.domain
    }

    /// Notes activity at `when` that is no event, for the timeout.
    pub(super) fn note_activity(&mut self, when: Instant) {
        if let Some(since) = &mut self.quiet_since {
            *since = (*since).max(when);
        }
    }

    /// Sends a measured message, waiting for room as long as it takes.
    pub(super) fn send(
        &mut self,
        buf: Buf,
        peer: FiAddr,
        tagged: bool,
        slot: usize,
    ) -> Result<(), Fail> {
        let mut buf = buf;
        while let Some(refused) = self.try_send(buf, peer, tagged, slot)? {
            buf = refused;
            self.wait_for_room()?;
        }
        Ok(())
    }

    /// Posts a receive for a measured message.
    pub(super) fn recv(&mut self, buf: Buf, tagged: bool, slot: usize) -> Result<(), Fail> {
        let mut buf = buf;
        let context = self.context(slot);
        loop {
            let posted = if tagged {
                self.ep.trecv(buf, FI_ADDR_UNSPEC, DATA_TAG, 0, context)
            } else {
                self.ep.recv(buf, FI_ADDR_UNSPEC, context)
            };
            match posted {
                Ok(()) => return Ok(()),
                Err(PostError { error: Error::Again, bufs }) => {
                    buf = bufs.into_one().unwrap_or_default();
                    self.wait_for_room()?;
                }
                Err(PostError { error, .. }) => return Err(Fail::new(error)),
            }
        }
    }

    /// Cancels the receive of a slot.
    pub(super) fn cancel(&self, slot: usize) {
        // What it says is whether there was one, which the caller cannot know either.
        let _ = self.ep.cancel(self.context(slot));
    }

    /// The next event, if there is one. Turns the loop.
    pub(super) fn poll(&mut self) -> Result<Option<Event>, Fail> {
        if self.waiting.is_empty() {
            self.read()?;
        }
        Ok(self.waiting.pop_front())
    }

    /// Waits for the next event.
    ///
    /// # Errors
    /// No event within the timeout.
    pub(super) fn next(&mut self) -> Result<Event, Fail> {
        loop {
            if let Some(event) = self.poll()? {
                return Ok(event);
            }
            self.check_timeout()?;
        }
    }

    /// Gives the other side up if nothing has happened for too long.
    pub(super) fn wait(&mut self) -> Result<(), Fail> {
        self.check_timeout()
    }

    /// Takes in what has happened while a call waits for room.
    fn wait_for_room(&mut self) -> Result<(), Fail> {
        let before = self.waiting.len();
        self.read()?;
        if self.waiting.len() == before {
            self.check_timeout()?;
        }
        Ok(())
    }

    fn check_timeout(&mut self) -> Result<(), Fail> {
        self.spins += 1;
        if self.spins < SPINS {
            std::hint::spin_loop();
            return Ok(());
        }
        self.spins = 0;
        std::thread::yield_now();
        let since = *self.quiet_since.get_or_insert_with(Instant::now);
        if since.elapsed() < self.timeout {
            return Ok(());
        }
        let what = format!("nothing came from the other side for {} s", self.timeout.as_secs());
        Err(Fail::new(what).mend(match self.timeout {
            SERVER_TIMEOUT => "has its process ended? see there: barewire stats",
            _ => "does `barewire pingpong --listen` run there, on the same port?",
        }))
    }

    fn read(&mut self) -> Result<(), Fail> {
        match self.cq.read(&mut self.batch) {
            Ok(count) => {
                self.spins = 0;
                self.quiet_since = None;
                for i in 0..count {
                    let completion = std::mem::take(&mut self.batch[i]);
                    self.take_in(completion)?;
                }
                Ok(())
            }
            Err(Error::Again) => Ok(()),
            Err(Error::Avail) => self.read_error(),
            Err(why) => Err(Fail::new(why)),
        }
    }

    fn take_in(&mut self, mut completion: Completion) -> Result<(), Fail> {
        let context = completion.op_context;
        let len = completion.len;
        let buf = completion.take_buf().unwrap_or_default();
        if context >= CONTROL_AT {
            let said = Control::from_bytes(&buf[..len.min(buf.len())]);
            self.post_control(buf, context)?;
            match said {
                Ok(said) => self.waiting.push_back(Event::Control(said)),
                Err(why) => self.drop_control(&why),
            }
            return Ok(());
        }
        if context / SLOTS != self.run {
            return Ok(());
        }
        let slot = (context % SLOTS) as usize;
        let ours = CqFlags::SEND | CqFlags::RMA | CqFlags::ATOMIC;
        let sent = completion.flags.intersects(ours);
        let event =
            if sent { Event::Sent { slot, buf } } else { Event::Received { slot, buf, len } };
        self.waiting.push_back(event);
        Ok(())
    }

    /// Counts a control message that is passed over, as anybody who knows our address may have sent
    /// it, and tells the first one. What the peer itself should have said is missed in time.
    pub(super) fn drop_control(&mut self, why: &dyn Display) {
        self.dropped += 1;
        match self.dropped {
            1 => tracing::warn!("a control message is dropped, as further ones will be: {why}"),
            count => tracing::debug!("control message dropped, {count} in all: {why}"),
        }
    }

    fn read_error(&mut self) -> Result<(), Fail> {
        match self.cq.readerr() {
            // One that is longer than any of ours.
            Ok(mut failed) if failed.entry.op_context >= CONTROL_AT => {
                let buf = failed.entry.take_buf().unwrap_or_default();
                let buf = if buf.len() == LEN { buf } else { Buf::zeroed(LEN) };
                self.post_control(buf, failed.entry.op_context)?;
                self.drop_control(&failed.err);
                Ok(())
            }
            Ok(failed) => {
                let why = Fail::new(failed.err);
                let why = mend_of(failed.err).map_or(why.clone(), |mend| why.mend(mend));
                let context = failed.entry.op_context;
                if context == 0 {
                    self.waiting.push_back(Event::InjectFailed(why));
                } else if context / SLOTS == self.run && failed.err != Error::Canceled {
                    self.waiting.push_back(Event::Failed(why));
                }
                Ok(())
            }
            Err(Error::Again) => Ok(()),
            Err(why) => Err(Fail::new(why)),
        }
    }

    fn post_control(&mut self, buf: Buf, context: u64) -> Result<(), Fail> {
        let (started, mut buf) = (Instant::now(), buf);
        loop {
            match self.ep.trecv(buf, FI_ADDR_UNSPEC, CONTROL_TAG, 0, context) {
                Ok(()) => return Ok(()),
                Err(PostError { error: Error::Again, bufs }) => {
                    buf = bufs.into_one().unwrap_or_default();
                    // Not `breathe`, which could come back here.
                    self.domain.progress().map_err(Fail::new)?;
                    if started.elapsed() > FINAL_TIMEOUT {
                        let what = "there is no room for one more receive";
                        return Err(Fail::new(what).mend("set a larger BAREWIRE_RX_MAX"));
                    }
                }
                Err(PostError { error, .. }) => return Err(Fail::new(error)),
            }
        }
    }
}
