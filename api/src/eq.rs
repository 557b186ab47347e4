//! Event queues (fi_eq(3)): events of connections, joins and ports, and events that the application
//! writes.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use nix::sys::eventfd::{EfdFlags, EventFd};

use crate::errno::{self, Error, Result, refused_by_system};
use crate::info::ConnRequest;
use crate::wait::{WaitObj, timeout_of};

/// Attributes of an event queue (`struct fi_eq_attr`).
#[derive(Clone, Copy, Debug, Default)]
pub struct EqAttr {
    /// Entries; 0 means 256. Error events of the provider are stored even if the queue is full.
    pub size: usize,
    /// `FI_WRITE`: the application writes events ([`Eq::write`]).
    pub write: bool,
    /// Wait object of the queue.
    pub wait_obj: WaitObj,
}

/// `FI_JOIN_COMPLETE`, the event of a completed join.
pub const FI_JOIN_COMPLETE: u32 = 6;

/// An event queue (`struct fid_eq`).
///
/// Reading it turns the loop of every domain bound to it that has manual progress.
pub struct Eq(pub(crate) Arc<EqInner>);

/// A domain whose progress loop is turned by reads of an event queue.
pub(crate) trait ManualProgress: Send + Sync {
    /// Turns the loop if the domain has manual progress, and returns whether it has.
    fn turn_for_reader(&self) -> bool;
}

pub(crate) struct EqInner {
    attr: EqAttr,
    state: Mutex<State>,
    filled: Condvar,
    fd: Option<EventFd>,
    loops: Mutex<Vec<Weak<dyn ManualProgress>>>,
}

#[derive(Default)]
struct State {
    items: VecDeque<Item>,
    /// Endpoints (fids) that have accepted and are not connected yet, and until when connection
    /// requests are held back for them.
    accepting: Vec<(u64, Instant)>,
}

impl State {
    /// Index of the next item to read. Connection requests are skipped while an acceptance is
    /// pending.
    fn next_index(&mut self) -> Option<usize> {
        if !self.accepting.is_empty() {
            let now = Instant::now();
            self.accepting.retain(|(_, until)| *until > now);
        }
        let kept_back = !self.accepting.is_empty();
        self.items.iter().position(|item| !(kept_back && item.is_request()))
    }

    /// Index of the error event that is read next.
    ///
    /// # Errors
    /// [`Error::Again`]: the next item is no error event, or there is none.
    fn next_error(&mut self) -> Result<usize> {
        let at = self.next_index().ok_or(Error::Again)?;
        if matches!(self.items.get(at), Some(Item::Error(_))) { Ok(at) } else { Err(Error::Again) }
    }

    /// Notes the outcome of the acceptance by endpoint `fid`. True if the acceptance was pending.
    fn accept_done(&mut self, fid: u64) -> bool {
        let before = self.accepting.len();
        self.accepting.retain(|(of, _)| *of != fid);
        self.accepting.len() < before
    }
}

enum Item {
    Event(Event),
    Error(EqErr),
}

impl Item {
    fn is_request(&self) -> bool {
        matches!(self, Self::Event(Event { request: Some(_), .. }))
    }
}

#[derive(Default)]
struct Event {
    event: u32,
    bytes: Vec<u8>,
    /// Fid of the connected or listening endpoint or of the group; 0 for none.
    of: u64,
    /// The connection request of an `FI_CONNREQ`.
    request: Option<ConnRequest>,
}

impl Event {
    /// Address of the `fi_info` of a connection request, 0 before it is made.
    fn info(&self) -> Option<u64> {
        self.bytes.get(8..16)?.try_into().ok().map(u64::from_ne_bytes)
    }
}

/// A connection request that was not read.
pub(crate) struct UnreadRequest {
    pub(crate) request: ConnRequest,
    /// Address of its `fi_info`, if the request was peeked at.
    pub(crate) info: Option<u64>,
}

/// Whether a read removes the event.
enum ReadMode<'a> {
    Remove,
    /// The event stays. The closure makes the `fi_info` of a connection request from the listener's
    /// fid and the request.
    Peek(&'a mut dyn FnMut(u64, ConnRequest) -> Result<u64>),
}

/// An error event (`struct fi_eq_err_entry`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EqErr {
    /// Fid of the endpoint of a refused connection ([`crate::EpCommon::set_fid`]), or of the group
    /// of a failed join ([`crate::EpCommon::join_with`]); else 0.
    pub fid: u64,
    /// Data that the peer passed to its `reject`.
    pub err_data: Vec<u8>,
    /// The error. [`Error::NetDown`]: the port of a bound domain is gone.
    pub err: Error,
    /// The context of the object, 0 if it has none.
    pub context: u64,
    /// Depends on the event.
    pub data: u64,
}

/// Longest sleep of a blocking read between two turns of a domain with manual progress.
const PERIOD: Duration = Duration::from_millis(1);

/// How long a pending acceptance holds back connection requests at most. Longer than a live process
/// takes to poll.
const ACCEPT_MAX: Duration = Duration::from_millis(500);

impl Eq {
    pub(crate) fn open(attr: EqAttr) -> Result<Self> {
        attr.wait_obj.waits()?;
        let fd = match attr.wait_obj {
            WaitObj::Fd => {
                let flags = EfdFlags::EFD_NONBLOCK | EfdFlags::EFD_CLOEXEC;
                Some(EventFd::from_value_and_flags(0, flags).map_err(|errno| {
                    refused_by_system("the descriptor of an event queue", errno as i32)
                })?)
            }
            _ => None,
        };
        let size = if attr.size == 0 { 256 } else { attr.size };
        Ok(Self(Arc::new(EqInner {
            attr: EqAttr { size, ..attr },
            state: Mutex::default(),
            filled: Condvar::new(),
            fd,
            loops: Mutex::default(),
        })))
    }

    /// Copies the oldest event to `buf`, removes it, and returns its number and length.
    ///
    /// # Errors
    /// - [`Error::Again`]: the queue is empty.
    /// - [`Error::Avail`]: the oldest entry is an error; [`readerr`](Self::readerr) takes it.
    /// - [`Error::TooSmall`]: the event does not fit `buf`. It stays.
    ///
    /// Source: fi_eq(3), "fi_eq_read".
    #[doc(alias = "fi_eq_read")]
    pub fn read(&self, buf: &mut [u8]) -> Result<(u32, usize)> {
        self.read_cm(buf).map(|(event, len, _)| (event, len))
    }

    /// As [`read`](Self::read), and also returns the request of a connection request event
    /// ([`FI_CONNREQ`](crate::cm::FI_CONNREQ)).
    ///
    /// # Errors
    /// As there.
    pub fn read_cm(&self, buf: &mut [u8]) -> Result<(u32, usize, Option<ConnRequest>)> {
        self.0.progress();
        self.0.take(buf, &mut ReadMode::Remove)
    }

    /// As [`read`](Self::read), but the event stays (`FI_PEEK`).
    pub fn peek(&self, buf: &mut [u8]) -> Result<(u32, usize)> {
        self.peek_cm(buf, |_, _| Ok(0))
    }

    /// As [`peek`](Self::peek). For a connection request that was not peeked at before, `make`
    /// makes the `fi_info` from the listener's fid and the request. Its address stays in the event.
    ///
    /// # Errors
    /// As there, and those of `make`.
    pub fn peek_cm(
        &self,
        buf: &mut [u8],
        mut make: impl FnMut(u64, ConnRequest) -> Result<u64>,
    ) -> Result<(u32, usize)> {
        self.0.progress();
        self.0.take(buf, &mut ReadMode::Peek(&mut make)).map(|(event, len, _)| (event, len))
    }

    /// As [`read`](Self::read), but waits up to `timeout_ms` milliseconds (negative: for ever) for
    /// an event.
    ///
    /// # Errors
    /// As [`read`](Self::read); [`Error::Again`] when the time is over. [`Error::NoSys`] if the
    /// queue was opened with `FI_WAIT_NONE`.
    #[doc(alias = "fi_eq_sread")]
    pub fn sread(&self, buf: &mut [u8], timeout_ms: i32) -> Result<(u32, usize)> {
        self.sread_cm(buf, timeout_ms).map(|(event, len, _)| (event, len))
    }

    /// As [`sread`](Self::sread), and also returns the request of a connection request event.
    ///
    /// # Errors
    /// As there.
    pub fn sread_cm(
        &self,
        buf: &mut [u8],
        timeout_ms: i32,
    ) -> Result<(u32, usize, Option<ConnRequest>)> {
        self.wait(buf, timeout_ms, &mut ReadMode::Remove)
    }

    /// As [`sread`](Self::sread), but the event stays (`FI_PEEK`). `make` is as in
    /// [`peek_cm`](Self::peek_cm).
    ///
    /// # Errors
    /// As [`sread`](Self::sread), and those of `make`.
    pub fn speek_cm(
        &self,
        buf: &mut [u8],
        timeout_ms: i32,
        mut make: impl FnMut(u64, ConnRequest) -> Result<u64>,
    ) -> Result<(u32, usize)> {
        let mode = &mut ReadMode::Peek(&mut make);
        self.wait(buf, timeout_ms, mode).map(|(event, len, _)| (event, len))
    }

    fn wait(
        &self,
        buf: &mut [u8],
        timeout_ms: i32,
        mode: &mut ReadMode<'_>,
    ) -> Result<(u32, usize, Option<ConnRequest>)> {
        let eq = &*self.0;
        if !eq.attr.wait_obj.waits()? {
            return Err(Error::NoSys);
        }
        let end = timeout_of(timeout_ms).map(|t| Instant::now() + t);
        loop {
            let drive = eq.progress();
            match eq.take(buf, mode) {
                Err(Error::Again) => {}
                other => return other,
            }
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(Error::Again);
            }
            let mut state = eq.lock();
            let drive = drive || !state.accepting.is_empty();
            let longest = if drive { PERIOD } else { Duration::from_secs(1) };
            if state.next_index().is_none() {
                let time = left.map_or(longest, |l| l.min(longest));
                drop(eq.filled.wait_timeout(state, time).unwrap_or_else(PoisonError::into_inner));
            }
        }
    }

    /// Appends event number `event` with the bytes `buf`, which the reader gets unchanged.
    ///
    /// # Errors
    /// - [`Error::OpNotSupp`]: the queue was opened without [`EqAttr::write`].
    /// - [`Error::Again`]: the queue is full. Nothing was appended.
    #[doc(alias = "fi_eq_write")]
    pub fn write(&self, event: u32, buf: &[u8]) -> Result<usize> {
        if !self.0.attr.write {
            return Err(Error::OpNotSupp("fi_eq_write: the queue was opened without FI_WRITE"));
        }
        let mut state = self.0.lock();
        if state.items.len() >= self.0.attr.size {
            return Err(Error::Again);
        }
        let bytes = buf.to_vec();
        state.items.push_back(Item::Event(Event { event, bytes, ..Event::default() }));
        self.0.signal(&state);
        Ok(buf.len())
    }

    /// Removes the error entry at the head.
    ///
    /// # Errors
    /// [`Error::Again`]: the oldest entry is no error entry, or the queue is empty.
    #[doc(alias = "fi_eq_readerr")]
    pub fn readerr(&self) -> Result<EqErr> {
        let mut state = self.0.lock();
        let at = state.next_error()?;
        let Some(Item::Error(err)) = state.items.remove(at) else { return Err(Error::Again) };
        self.0.clear_signal(&state);
        Ok(err)
    }

    /// As [`readerr`](Self::readerr), but the entry stays (`FI_PEEK`).
    ///
    /// # Errors
    /// As there.
    pub fn peekerr(&self) -> Result<EqErr> {
        let mut state = self.0.lock();
        let at = state.next_error()?;
        match state.items.get(at) {
            Some(Item::Error(err)) => Ok(err.clone()),
            _ => Err(Error::Again),
        }
    }

    /// The text of a provider error number, which equals the `fi_errno`.
    #[doc(alias = "fi_eq_strerror")]
    pub fn strerror(&self, prov_errno: i32) -> &'static str {
        errno::strerror(prov_errno)
    }

    /// The descriptor of a queue opened with `FI_WAIT_FD` (`FI_GETWAIT`).
    ///
    /// # Errors
    /// [`Error::NoSys`]: the queue was opened with another wait object.
    pub fn wait_fd(&self) -> Result<RawFd> {
        self.0.fd.as_ref().map(AsRawFd::as_raw_fd).ok_or(Error::NoSys)
    }
}

impl EqInner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(
        &self,
        buf: &mut [u8],
        mode: &mut ReadMode<'_>,
    ) -> Result<(u32, usize, Option<ConnRequest>)> {
        let mut state = self.lock();
        let next = state.next_index().ok_or(Error::Again)?;
        let (event, len, request) = match state.items.get_mut(next) {
            None => return Err(Error::Again),
            Some(Item::Error(_)) => return Err(Error::Avail),
            Some(Item::Event(Event { event, bytes, of, request })) => {
                let to = buf.get_mut(..bytes.len()).ok_or(Error::TooSmall)?;
                let request = match mode {
                    ReadMode::Remove => request.take(),
                    ReadMode::Peek(make) => {
                        if let Some(request) = request
                            && let Some(info) = bytes.get_mut(8..16)
                            && *info == [0; 8]
                        {
                            info.copy_from_slice(&make(*of, request.clone())?.to_ne_bytes());
                        }
                        None
                    }
                };
                to.copy_from_slice(bytes);
                (*event, bytes.len(), request)
            }
        };
        if matches!(mode, ReadMode::Remove) {
            state.items.remove(next);
            self.clear_signal(&state);
        }
        Ok((event, len, request))
    }

    fn push(&self, item: Item) {
        let mut state = self.lock();
        state.items.push_back(item);
        self.signal(&state);
    }

    pub(crate) fn push_error(&self, err: Error) {
        self.push(Item::Error(EqErr { fid: 0, err_data: Vec::new(), err, context: 0, data: 0 }));
    }

    /// Appends an event of a connected or listening endpoint: a `struct fi_eq_cm_entry` with a null
    /// `info`. False if the queue is full and the event is a request, which is then dropped.
    pub(crate) fn push_cm(
        &self,
        event: u32,
        fid: u64,
        data: &[u8],
        request: Option<ConnRequest>,
    ) -> bool {
        if request.is_some() && self.lock().items.len() >= self.attr.size {
            return false;
        }
        let mut bytes = [fid, 0].map(u64::to_ne_bytes).concat();
        bytes.extend(data);
        let item = Item::Event(Event { event, bytes, of: fid, request });
        let mut state = self.lock();
        let at = if state.accept_done(fid) {
            state.items.iter().position(Item::is_request)
        } else {
            None
        };
        let at = at.unwrap_or(state.items.len());
        state.items.insert(at, item);
        self.signal(&state);
        true
    }

    /// Notes that endpoint `fid` has accepted. Connection requests are held back until the queue
    /// has the outcome: the listener has its own node, so a further request of the same peer may
    /// arrive before this side knows that the first connection is established.
    pub(crate) fn accept_pending(&self, fid: u64) {
        self.lock().accepting.push((fid, Instant::now() + ACCEPT_MAX));
    }

    /// Appends the error event of a refused connection.
    pub(crate) fn push_refused(&self, fid: u64, err_data: Vec<u8>) {
        let err = Error::ConnRefused;
        self.push(Item::Error(EqErr { fid, err_data, err, context: 0, data: 0 }));
    }

    /// Drops the unread events of endpoint or group `fid`, and returns the connection requests
    /// among them.
    pub(crate) fn forget(&self, fid: u64) -> Vec<UnreadRequest> {
        let mut requests = Vec::new();
        if fid == 0 {
            return requests;
        }
        let mut state = self.lock();
        state.accept_done(fid);
        state.items.retain_mut(|item| match item {
            Item::Event(event) if event.of == fid => {
                let info = event.info().filter(|&info| info != 0);
                requests
                    .extend(event.request.take().map(|request| UnreadRequest { request, info }));
                false
            }
            Item::Error(err) => err.fid != fid,
            Item::Event(_) => true,
        });
        self.clear_signal(&state);
        requests
    }

    pub(crate) fn has_fd(&self) -> bool {
        self.fd.is_some()
    }

    /// Appends the outcome of a join: an event with the context (8 bytes), or with `fid` a `struct
    /// fi_eq_entry`.
    pub(crate) fn push_join(&self, fid: Option<u64>, context: u64, result: Result<()>) {
        let of = fid.unwrap_or(0);
        let item = match result {
            Ok(()) => Item::Event(Event {
                event: FI_JOIN_COMPLETE,
                of,
                bytes: match fid {
                    None => context.to_ne_bytes().to_vec(),
                    Some(fid) => [fid, context, 0].map(u64::to_ne_bytes).concat(),
                },
                ..Event::default()
            }),
            Err(err) => Item::Error(EqErr { fid: of, err_data: Vec::new(), err, context, data: 0 }),
        };
        self.push(item);
    }

    /// Wakes waiting threads and makes the descriptor readable. The state stays locked: otherwise
    /// the descriptor could become readable after a reader has taken the last event and cleared it.
    fn signal(&self, _state: &MutexGuard<'_, State>) {
        self.filled.notify_all();
        if let Some(fd) = &self.fd {
            // Fails only if the count would pass 2^64 - 2.
            let _ = fd.write(1);
        }
    }

    fn clear_signal(&self, state: &State) {
        if let Some(fd) = self.fd.as_ref().filter(|_| state.items.is_empty()) {
            // Fails only if it is clear already.
            let _ = fd.read();
        }
    }

    pub(crate) fn bind(&self, of: Weak<dyn ManualProgress>) {
        self.loops.lock().unwrap_or_else(PoisonError::into_inner).push(of);
    }

    /// Turns the loops of domains with manual progress, and returns whether there are any.
    fn progress(&self) -> bool {
        let mut loops = self.loops.lock().unwrap_or_else(PoisonError::into_inner);
        loops.retain(|of| of.strong_count() > 0);
        let alive: Vec<_> = loops.iter().filter_map(Weak::upgrade).collect();
        drop(loops);
        alive.iter().fold(false, |any, of| of.turn_for_reader() | any)
    }

    /// Turns the loops, then returns whether the queue is empty, so that a thread may sleep on the
    /// descriptor.
    pub(crate) fn is_empty(&self) -> bool {
        self.progress();
        self.lock().items.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use barewire_dataplane::types::EpAddr;

    use super::*;

    fn eq(wait_obj: WaitObj) -> Eq {
        Eq::open(EqAttr { size: 4, write: true, wait_obj }).unwrap()
    }

    #[test]
    fn events_come_back_in_order_and_whole() {
        let q = eq(WaitObj::None);
        let mut buf = [0; 8];
        assert_eq!(q.read(&mut buf), Err(Error::Again));
        for n in 0..4 {
            assert_eq!(q.write(n, &[n as u8; 5]), Ok(5));
        }
        assert_eq!(q.write(9, &[]), Err(Error::Again));
        assert_eq!(q.read(&mut buf[..4]), Err(Error::TooSmall));
        for n in 0..4 {
            assert_eq!(q.peek(&mut buf), Ok((n, 5)));
            assert_eq!(q.read(&mut buf), Ok((n, 5)));
            assert_eq!(buf[..5], [n as u8; 5]);
        }
        assert_eq!(q.read(&mut buf), Err(Error::Again));
    }

    #[test]
    fn an_error_stands_in_line() {
        let q = eq(WaitObj::None);
        q.write(1, b"x").unwrap();
        q.0.push_error(Error::NetDown);
        q.write(2, b"y").unwrap();
        let mut buf = [0; 8];
        assert_eq!(q.readerr(), Err(Error::Again));
        assert_eq!(q.read(&mut buf), Ok((1, 1)));
        assert_eq!(q.read(&mut buf), Err(Error::Avail));
        assert_eq!(q.peekerr().map(|e| e.err), Ok(Error::NetDown));
        assert_eq!(q.readerr().map(|e| e.err), Ok(Error::NetDown));
        assert_eq!(q.peekerr(), Err(Error::Again));
        assert_eq!(q.read(&mut buf), Ok((2, 1)));
    }

    #[test]
    fn a_request_is_kept_back_until_it_is_known_that_the_last_one_stands() {
        let q = eq(WaitObj::Unspec);
        let addr = EpAddr { station: "02:00:00:00:00:05".parse().unwrap(), ep: 1, incarnation: 2 };
        let request = || Some(ConnRequest::of(3, addr));
        let mut buf = [0; 64];
        let mut next = |q: &Eq| q.read(&mut buf).map(|(event, _)| event);
        q.0.accept_pending(7);
        q.0.push_cm(1, 5, &[], request());
        assert_eq!(next(&q), Err(Error::Again));
        q.0.push_cm(2, 7, &[], None);
        assert_eq!([next(&q), next(&q), next(&q)], [Ok(2), Ok(1), Err(Error::Again)]);
        // Nor for ever.
        q.0.accept_pending(8);
        q.0.push_cm(1, 5, &[], request());
        assert_eq!(next(&q), Err(Error::Again));
        assert_eq!(q.sread(&mut [0; 64], 60_000).map(|(event, _)| event), Ok(1));
        // An error behind it is told at once, and taken by who is told.
        q.0.accept_pending(8);
        q.0.push_cm(1, 5, &[], request());
        q.0.push_error(Error::NetDown);
        assert_eq!(next(&q), Err(Error::Avail));
        assert_eq!(q.peekerr().map(|e| e.err), Ok(Error::NetDown));
        assert_eq!(q.readerr().map(|e| e.err), Ok(Error::NetDown));
        assert_eq!((q.readerr().err(), next(&q)), (Some(Error::Again), Err(Error::Again)));
        q.0.push_cm(2, 8, &[], None);
        assert_eq!([next(&q), next(&q)], [Ok(2), Ok(1)]);
        // What is forgotten holds nobody up.
        q.0.accept_pending(9);
        q.0.push_cm(1, 5, &[], request());
        q.0.forget(9);
        assert_eq!(next(&q), Ok(1));
    }

    /// Goal: the outcome of a join names the group, also if it is an error; that of a group which
    /// was closed is not there any more.
    #[test]
    fn the_outcome_of_a_join_goes_with_its_group() {
        let q = eq(WaitObj::None);
        let tell = || {
            q.0.push_join(Some(7), 70, Err(Error::TimedOut));
            q.0.push_join(Some(8), 80, Ok(()));
            q.0.push_join(None, 90, Err(Error::Canceled));
        };
        let failed = || q.readerr().map(|e| (e.fid, e.context, e.err));
        tell();
        assert_eq!(failed(), Ok((7, 70, Error::TimedOut)));
        let mut entry = [0; 24];
        assert_eq!(q.read(&mut entry), Ok((FI_JOIN_COMPLETE, 24)));
        assert_eq!(entry, *[8, 80, 0].map(u64::to_ne_bytes).concat());
        assert_eq!(failed(), Ok((0, 90, Error::Canceled)));
        tell();
        q.0.forget(7);
        q.0.forget(8);
        assert_eq!(failed(), Ok((0, 90, Error::Canceled)));
        assert_eq!(q.read(&mut entry), Err(Error::Again));
    }

    #[test]
    fn a_descriptor_is_not_readable_when_the_queue_is_empty() {
        use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
        use std::os::fd::AsFd;
        const EVENTS: u32 = 50_000;

        let q = Arc::new(eq(WaitObj::Fd));
        let there = Arc::clone(&q);
        let writer = std::thread::spawn(move || {
            let mut told = 0;
            while told < EVENTS {
                told += u32::from(there.write(told, &[]).is_ok());
            }
        });
        let mut heard = 0;
        while heard < EVENTS {
            heard += u32::from(q.read(&mut []).is_ok());
            if q.0.lock().items.is_empty() {
                // The writer is kept out while the descriptor is asked.
                let state = q.0.lock();
                let mut fds = [PollFd::new(q.0.fd.as_ref().unwrap().as_fd(), PollFlags::POLLIN)];
                let readable = poll(&mut fds, PollTimeout::ZERO).unwrap() > 0;
                assert!(!readable || !state.items.is_empty(), "readable after {heard} events");
            }
        }
        writer.join().unwrap();
    }

    #[test]
    fn a_blocking_read_waits_for_the_event_or_the_end_of_time() {
        let q = Arc::new(eq(WaitObj::Unspec));
        let start = Instant::now();
        assert_eq!(q.sread(&mut [0; 8], 30), Err(Error::Again));
        assert!(start.elapsed() >= Duration::from_millis(30));
        let there = Arc::clone(&q);
        let reader = std::thread::spawn(move || there.sread(&mut [0; 8], 10_000));
        std::thread::sleep(Duration::from_millis(20));
        q.write(7, b"abc").unwrap();
        assert_eq!(reader.join().unwrap(), Ok((7, 3)));
        assert!(start.elapsed() < Duration::from_secs(5));
    }

    #[test]
    fn calls_on_an_event_queue_without_the_feature_are_refused() {
        let q = Eq::open(EqAttr::default()).unwrap();
        assert_eq!(q.write(0, &[]).unwrap_err().fi_errno(), 95);
        assert_eq!(q.sread(&mut [], 0), Err(Error::NoSys));
        assert_eq!(q.wait_fd(), Err(Error::NoSys));
        let set = EqAttr { wait_obj: WaitObj::Set, ..EqAttr::default() };
        assert_eq!(Eq::open(set).err(), Some(Error::NoSys));
    }
}
