//! The shared state of a domain's objects: the engine under its lock, the blocked waiters, and the
//! progress thread.

use std::ops::Deref;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Duration;

use barewire_dataplane::node::{
    CqId, EpId, FailedInject, GroupId, HoldWatch, NoReader, Node, Reader,
};
use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::Instant;
use barewire_driver::hint::cold;
use barewire_driver::own_thread::without_signals;
use barewire_driver::port::PortCaps;

use crate::auth_key::AuthKeys;
use crate::buf::OpTable;
use crate::cm::side::{Cm, Transport};
use crate::deferred::DeferredTable;
use crate::eq::{EqInner, ManualProgress};
use crate::errno::{Error, Result, refused_by_system};
use crate::file_watch::FileWatch;
use crate::key::{KeySource, KeyUpdate};
use crate::key_log::KeyLog;
use crate::lock::{ControlGuard, Entry, Guard, HasLock, Lock};
use crate::mr::table::MrTable;
use crate::notice::NoticeLog;
use crate::settings::{Idle, Settings};
use crate::stats::Publisher;
use crate::wait::{Sleep, Watch};

/// The state under the lock of a domain.
pub(crate) struct Core {
    pub(crate) engine: Engine,
    pub(crate) ops: OpTable,
    pub(crate) watch: Watch,
    pub(crate) mrs: MrTable,
    pub(crate) stats: Option<Publisher>,
    notice_log: NoticeLog,
    /// Keys that calls name by their bytes.
    pub(crate) auth_keys: AuthKeys,
    /// The traffic class that the domain was opened with.
    pub(crate) tclass: u32,
    /// Writes the secrets of sessions.
    pub(crate) key_log: Option<KeyLog>,
    /// Watches the files with keys, or with the certificate.
    pub(crate) key_watch: Option<FileWatch<KeyUpdate>>,
    /// When the program polled last, while the receive thread turns the loop.
    pub(crate) absent_since: Option<Instant>,
    /// Fids of groups with a pending join.
    pub(crate) join_fids: Vec<(GroupId, u64)>,
    /// A join is pending.
    pub(crate) joins: bool,
    /// The connection side, once there are connected endpoints.
    pub(crate) cm: Option<Box<Cm>>,
    /// Operations that wait for counters.
    pub(crate) deferred: DeferredTable,
    /// When the progress thread wakes by itself; `None` while it is awake.
    asleep_until: Option<Instant>,
    /// Reads with an entry until the loop is turned all the same.
    reads_to_turn: u32,
    /// Empty reads until one yields the processor.
    reads_to_yield: u32,
    /// The loss of the port was reported to the event queues.
    loss_reported: bool,
    /// When failed injects may be logged again.
    injects_from: Instant,
}

/// Reads of a non-empty queue after which the loop is turned all the same, so that a program that
/// takes entries one by one still acknowledges and retransmits.
const READS_PER_TURN: u32 = 64;

/// Empty reads (about 20 microseconds) after which a polling program yields the processor now and
/// then: the process it waits for may need it.
const READS_BEFORE_YIELD: u32 = 256;

/// One in so many further empty reads yields.
const READS_PER_YIELD: u32 = 32;

/// Turns that a blocking call polls before it sleeps: about as long as a wake-up costs.
const TURNS_BEFORE_SLEEP: u32 = 200;

/// How often a closing domain acknowledges received packets, since nothing answers afterwards. At a
/// loss of one frame in fifty, one domain in a hundred thousand leaves a peer without
/// acknowledgement.
const LAST_ACKS: u32 = 3;

/// How long a closing domain notifies its peers at most, nanoseconds.
const LEAVE_NS: u64 = 100_000_000;

/// Period of log lines about failed injects: at most one for each peer and cause, with their
/// number.
const INJECTS_PERIOD_NS: u64 = 1_000_000_000;

/// Reads an entry of a queue in place, or as it is made, and may need the table of lent buffers.
pub(crate) trait EntryReader {
    /// Turns the loop: see [`Engine::fast_turn`].
    fn turn(self, engine: &mut Engine, ops: &mut OpTable) -> Option<usize>;

    /// Takes the entry that is next: see `take_one` of the node's queues.
    fn take_one(self, cq: CqId, node: &mut Node, ops: &mut OpTable) -> Option<bool>;
}

impl<R: Reader> EntryReader for R {
    #[inline(always)]
    fn turn(self, engine: &mut Engine, _: &mut OpTable) -> Option<usize> {
        engine.fast_turn(self)
    }

    #[inline(always)]
    fn take_one(self, cq: CqId, node: &mut Node, _: &mut OpTable) -> Option<bool> {
        node.cqs.take_one(cq, self)
    }
}

impl Core {
    #[inline]
    pub(crate) fn node(&mut self) -> &mut Node {
        self.engine.node_mut()
    }

    /// Turns the loop once and notifies waiters.
    #[inline(never)]
    pub(crate) fn turn(&mut self, shared: &Shared) -> usize {
        let moved = self.turn_and_notify(shared);
        self.note_moved(shared, moved);
        moved
    }

    /// Inlined [`turn`](Self::turn) without watchers. The caller has to call
    /// [`note_moved`](Self::note_moved). The first completion may go to `reader`.
    #[inline(always)]
    fn quick_turn(&mut self, shared: &Shared, reader: impl EntryReader) -> usize {
        self.reads_to_turn = READS_PER_TURN;
        reader.turn(&mut self.engine, &mut self.ops).unwrap_or_else(|| {
            cold(());
            self.other_turn(shared)
        })
    }

    /// As [`turn`](Self::turn), but the caller has to call [`note_moved`](Self::note_moved).
    fn turn_and_notify(&mut self, shared: &Shared) -> usize {
        let moved = self.quick_turn(shared, NoReader);
        if self.watch.has_watchers() {
            self.run_housekeeping(shared);
        }
        moved
    }

    /// As [`quick_turn`](Self::quick_turn), for ports other than a segment, or to read the clock.
    /// (Not inlined, so that a turn on a segment saves no registers for it.)
    #[inline(never)]
    fn other_turn(&mut self, shared: &Shared) -> usize {
        self.engine.fast_turn_other().unwrap_or_else(|| self.full_turn(shared))
    }

    /// A full turn: takes new keys, reads the clock, and runs the housekeeping that is due.
    #[inline(never)]
    fn full_turn(&mut self, shared: &Shared) -> usize {
        // New keys are taken before frames are received, which may have waited for long.
        if let Some(update) = self.key_watch.as_ref().and_then(FileWatch::take) {
            self.take_keys(update);
        }
        let moved = match self.engine.turn() {
            Ok(moved) => moved,
            Err(_gone) => self.report_port_loss(shared),
        };
        if moved > 0 {
            self.note_progress();
        }
        if self.engine.is_timed() {
            self.run_housekeeping(shared);
        }
        moved
    }

    /// Turns the loop in a domain with manual progress.
    #[inline(never)]
    pub(crate) fn turn_if_manual(&mut self, shared: &Shared) {
        let moved = self.turn_here_if_manual(shared, NoReader);
        self.note_moved(shared, moved);
    }

    /// As [`turn_if_manual`](Self::turn_if_manual), inlined. The caller has to call
    /// [`note_moved`](Self::note_moved). The first completion may go to `reader`.
    #[inline(always)]
    pub(crate) fn turn_here_if_manual(
        &mut self,
        shared: &Shared,
        reader: impl EntryReader,
    ) -> usize {
        if self.watch.is_idle() {
            return self.quick_turn(shared, reader);
        }
        cold(());
        self.turn_watched(shared)
    }

    /// As [`turn_here_if_manual`](Self::turn_here_if_manual), with watchers or a progress thread.
    #[inline(never)]
    fn turn_watched(&mut self, shared: &Shared) -> usize {
        if self.watch.is_driven() {
            self.turn_if_asleep(shared);
            return 0;
        }
        self.turn_and_notify(shared)
    }

    /// Has to follow a turn that returned no entry. A turn that moved frames counts as progress:
    /// one-sided operations of peers write no entry. If the clock was not read for long a second
    /// turn reads it, and the result is true.
    #[inline(always)]
    pub(crate) fn note_moved(&mut self, shared: &Shared, moved: usize) -> bool {
        if moved > 0 {
            self.note_progress();
        }
        let is_late = self.engine.is_late();
        if is_late {
            cold(());
            self.turn_late(shared);
        }
        is_late
    }

    /// A turn that reads the clock, in a program that polls rarely.
    #[inline(never)]
    fn turn_late(&mut self, shared: &Shared) {
        if self.watch.is_idle() {
            self.full_turn(shared);
        } else if !self.watch.is_driven() {
            self.turn_and_notify(shared);
        }
    }

    /// Turns the loop if the progress thread sleeps.
    fn turn_if_asleep(&mut self, shared: &Shared) {
        if let Some(until) = self.asleep_until {
            // A polling thread is faster than a wake-up of the progress thread. Deadlines of this
            // turn are left to the progress thread, since the caller may go to sleep.
            self.turn(shared);
            self.wake_if_due(shared, until);
        }
    }

    /// Counts a read that found an entry, and turns the loop once in [`READS_PER_TURN`].
    #[inline]
    pub(crate) fn note_entry_read(&mut self, shared: &Shared) {
        self.note_progress();
        self.reads_to_turn -= 1;
        if self.reads_to_turn == 0 {
            self.reads_to_turn = READS_PER_TURN;
            cold(());
            self.turn_if_manual(shared);
        }
    }

    /// Takes the next entry, if the loop need not be turned before: see `take_one` of the node's
    /// queues.
    #[inline(always)]
    pub(crate) fn take_one(&mut self, cq: CqId, reader: impl EntryReader) -> Option<bool> {
        if self.node().cqs.is_empty(cq) {
            return None;
        }
        // The loop is to be turned.
        if self.reads_to_turn <= 1 {
            return cold(Some(false));
        }
        let taken = reader.take_one(cq, self.engine.node_mut(), &mut self.ops);
        if taken == Some(true) {
            self.reads_to_turn -= 1;
            self.note_progress();
        }
        taken
    }

    /// A read or turn has made progress: restarts the count of empty reads.
    #[inline(always)]
    pub(crate) fn note_progress(&mut self) {
        self.reads_to_yield = READS_BEFORE_YIELD + READS_PER_YIELD;
    }

    /// Counts an empty read and returns whether to yield the processor.
    #[inline(always)]
    pub(crate) fn note_empty_read(&mut self) -> bool {
        self.reads_to_yield -= 1;
        let yields = self.reads_to_yield == 0;
        if yields {
            self.reads_to_yield = READS_PER_YIELD;
        }
        yields
    }

    /// Notifies watchers after a post, which may have changed queues and the next deadline.
    #[inline(always)]
    pub(crate) fn posted(&mut self, shared: &Shared) {
        if self.watch.has_watchers() {
            cold(());
            self.notify_watchers(shared);
        }
    }

    #[inline(never)]
    fn notify_watchers(&mut self, shared: &Shared) {
        self.notify(shared);
        if let Some(until) = self.asleep_until {
            self.wake_if_due(shared, until);
        }
    }

    /// Wakes sleepers whose target is ready, and sleepers that turn the loop if the next deadline
    /// is earlier than they know.
    fn notify(&mut self, shared: &Shared) {
        self.watch.notify(self.engine.node(), &shared.sleep);
        if self.watch.has_pollers()
            && self.next_deadline().is_some_and(|d| self.watch.oversleeps(d))
        {
            shared.sleep.notify();
        }
    }

    /// The connection side, if it is open, and its transport.
    pub(crate) fn cm(&mut self) -> Option<(&mut Cm, Transport<'_>)> {
        let Self { cm, engine, ops, .. } = self;
        cm.as_deref_mut().map(|cm| (cm, Transport { engine, ops }))
    }

    /// When the loop has to be turned at the latest.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let cm = self.cm.as_ref().map(|cm| cm.next_deadline());
        [self.engine.next_deadline(), cm].into_iter().flatten().min()
    }

    /// Notes that the progress thread is awake.
    fn note_awake(&mut self) {
        if self.asleep_until.take().is_some() {
            self.watch.remove_watcher();
        }
    }

    /// Notes that the progress thread sleeps until `until`. A post with an earlier deadline wakes
    /// it.
    fn note_asleep(&mut self, until: Instant) {
        self.watch.add_watcher();
        self.asleep_until = Some(until);
    }

    #[cold]
    fn wake_if_due(&mut self, shared: &Shared, until: Instant) {
        if self.deferred.any() {
            self.release();
        }
        if self.next_deadline().is_some_and(|d| d < until) {
            self.note_awake();
            shared.sleep.wake_port();
        }
    }

    #[inline(never)]
    fn run_housekeeping(&mut self, shared: &Shared) {
        if self.engine.node().coll.has_event() {
            self.poll_joins(shared);
        }
        if self.notice_log.is_due(&self.engine) {
            self.notice_log.drain(&mut self.engine);
        }
        if self.engine.node().observed.has_failed_injects() {
            self.warn_failed_injects();
        }
        if self.engine.node().openings.has_secrets() {
            self.log_secrets();
        }
        let now = self.engine.last_now();
        if self.cm.as_ref().is_some_and(|cm| cm.is_due(self.engine.node(), now))
            && let Some((cm, mut io)) = self.cm()
        {
            cm.poll(&mut io);
        }
        if self.deferred.any() {
            self.release();
        }
        if self.watch.has_watchers() {
            self.notify(shared);
        }
        if let Some(stats) = &mut self.stats
            && stats.is_due(self.engine.last_now())
        {
            stats.publish(&mut self.engine, self.absent_since);
        }
    }

    /// Starts to watch the files with keys or certificate. Best effort: without a thread the domain
    /// keeps its keys.
    pub(crate) fn watch_keys(&mut self, mut files: KeySource) {
        if let KeySource::Certificate(files) = &mut files {
            files.set_port(self.engine.caps());
        }
        match FileWatch::start(move || files.poll()) {
            Ok(watch) => self.key_watch = Some(watch),
            Err(e) => {
                tracing::warn!("no thread watches the key files ({e}): they are not read again")
            }
        }
    }

    #[cold]
    fn log_secrets(&mut self) {
        if let Some(log) = &mut self.key_log {
            log.write(self.engine.node_mut());
        }
    }

    #[cold]
    fn take_keys(&mut self, update: KeyUpdate) {
        let now = Engine::now();
        // Invalid keys were refused when the files were read.
        let (what, taken) = match update {
            KeyUpdate::Keys(keys) => {
                let what = format!("key files have changed: {} keys", keys.len());
                (what, self.node().sessions().set_keys(now, keys))
            }
            KeyUpdate::Certificate(own) => {
                let what = format!("certificate has changed: {}", own.identity());
                (what, self.node().sessions().set_certificate(now, own))
            }
        };
        match taken {
            Ok(()) => tracing::info!("the {what}"),
            Err(why) => tracing::warn!("the {what}, and is not taken: {why}"),
        }
    }

    /// Writes the outcomes of joins to the event queues.
    #[cold]
    pub(crate) fn poll_joins(&mut self, shared: &Shared) {
        while let Some(event) = self.node().coll.event() {
            let at = self.join_fids.iter().position(|(group, _)| *group == event.group);
            let fid = at.map(|at| self.join_fids.swap_remove(at).1);
            if let Some(eq) = shared.join_eq(event.ep) {
                eq.push_join(fid, event.context, event.result);
            }
            if self.joins && !self.node().coll.is_joining() {
                self.joins = false;
                self.watch.remove_watcher();
            }
        }
    }

    /// Logs failed injects, which write no completion, at most once in [`INJECTS_PERIOD_NS`].
    #[cold]
    fn warn_failed_injects(&mut self) {
        let now = self.engine.last_now();
        if now < self.injects_from {
            return;
        }
        self.injects_from = now + INJECTS_PERIOD_NS;
        for FailedInject { station, err, count } in self.node().observed.failed_injects() {
            tracing::warn!(
                "{count} injects to {station} failed, which no completion reports: {err}"
            );
        }
    }

    #[cold]
    fn report_port_loss(&mut self, shared: &Shared) -> usize {
        if !std::mem::replace(&mut self.loss_reported, true) {
            let why = self.engine.gone().map(ToString::to_string).unwrap_or_default();
            tracing::error!("{why}: every operation of its domain ends with FI_ENETDOWN");
            for eq in shared.event_queues() {
                eq.push_error(Error::NetDown);
            }
            // No later turn runs the housekeeping by time.
            self.warn_failed_injects();
        }
        // No later turn runs the housekeeping by time.
        if self.notice_log.is_due(&self.engine) {
            self.notice_log.drain(&mut self.engine);
        }
        0
    }
}

impl Drop for Core {
    /// Logs the failed injects of the last second, and the last secrets, before the domain is
    /// closed.
    fn drop(&mut self) {
        self.injects_from = Instant(0);
        self.warn_failed_injects();
        self.log_secrets();
    }
}

/// A domain, as its objects and its progress thread see it.
pub(crate) struct Shared {
    pub(crate) lock: Lock<Core>,
    pub(crate) sleep: Sleep,
    /// Manual progress: the application turns the loop.
    pub(crate) manual: AtomicBool,
    pub(crate) caps: PortCaps,
    /// Held packets of the domain, for the receive thread.
    pub(crate) holds: Arc<HoldWatch>,
    pub(crate) settings: Settings,
    /// Numbers endpoint objects.
    pub(crate) ep_count: AtomicU32,
    /// Numbers address vector sets.
    sets: AtomicU32,
    /// The event queues of endpoints, for the outcomes of joins.
    join_eqs: Mutex<Vec<(EpId, Weak<EqInner>)>>,
    eqs: Mutex<Vec<Weak<EqInner>>>,
    stop: AtomicBool,
}

impl HasLock for Shared {
    type Value = Core;

    fn lock(&self) -> &Lock<Core> {
        &self.lock
    }
}

impl ManualProgress for Shared {
    fn turn_for_reader(&self) -> bool {
        // Event queues belong to the fabric, so `FI_THREAD_DOMAIN` does not cover threads that read
        // them.
        let enters = self.manual.load(Ordering::Relaxed).then(|| self.enter_control());
        let Some(Ok(mut core)) = enters else { return false };
        core.turn(self);
        true
    }
}

impl Shared {
    /// Whether the domain is being closed.
    pub(crate) fn is_closing(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// Enters for a data call: posts, reads of queues and counters, waits.
    #[inline]
    pub(crate) fn enter(&self) -> Result<Guard<'_, Core>> {
        self.lock.enter()
    }

    /// Enters for a control call (open, bind, register, insert, query, close), from any thread.
    pub(crate) fn enter_control(&self) -> Result<ControlGuard<'_, Core>> {
        self.lock.enter_control()
    }

    /// Identifies the domain in the process.
    pub(crate) fn name(&self) -> usize {
        std::ptr::from_ref(self).addr()
    }

    /// The event queues bound to the domain that still exist.
    pub(crate) fn event_queues(&self) -> Vec<Arc<EqInner>> {
        let mut eqs = self.eqs.lock().unwrap_or_else(PoisonError::into_inner);
        eqs.retain(|eq| eq.strong_count() > 0);
        eqs.iter().filter_map(Weak::upgrade).collect()
    }

    /// A number for an address vector set.
    pub(crate) fn next_set(&self) -> u64 {
        u64::from(self.sets.fetch_add(1, Ordering::Relaxed))
    }

    /// Sets the event queue for the outcomes of joins of endpoint `ep`.
    pub(crate) fn set_join_eq(&self, ep: EpId, eq: &Arc<EqInner>) {
        let mut join_eqs = self.join_eqs.lock().unwrap_or_else(PoisonError::into_inner);
        join_eqs.retain(|(other, eq)| *other != ep && eq.strong_count() > 0);
        join_eqs.push((ep, Arc::downgrade(eq)));
    }

    fn join_eq(&self, ep: EpId) -> Option<Arc<EqInner>> {
        let join_eqs = self.join_eqs.lock().unwrap_or_else(PoisonError::into_inner);
        join_eqs.iter().find(|(other, _)| *other == ep).and_then(|(_, eq)| eq.upgrade())
    }

    pub(crate) fn bind_eq(&self, eq: &Arc<EqInner>) {
        let mut eqs = self.eqs.lock().unwrap_or_else(PoisonError::into_inner);
        eqs.push(Arc::downgrade(eq));
    }

    /// Runs `attempt` until it returns a result, or until a signal or the end of `timeout`
    /// (`None`). Sleeps in between while entry `idx` of the watch list has not risen above the
    /// level that `attempt` saw.
    ///
    /// `attempt` may turn the loop. `want` maps the current value and error count to the value
    /// above which, and the error count other than which, to wake.
    pub(crate) fn wait_for<R>(
        &self,
        idx: usize,
        timeout: Option<Duration>,
        mut attempt: impl FnMut(&mut Core) -> Option<R>,
        want: impl Fn((u64, u64)) -> (u64, u64),
    ) -> Result<Option<R>> {
        let end = timeout.map(|t| Engine::now() + u64::try_from(t.as_nanos()).unwrap_or(u64::MAX));
        let mut turns = 0;
        loop {
            let epoch = self.sleep.epoch();
            let mut core = self.enter()?;
            let answer = attempt(&mut core);
            if answer.is_some() || core.watch.take_signal(idx) {
                return Ok(self.leave_wait(core, answer));
            }
            let now = Engine::now();
            if end.is_some_and(|end| end <= now) {
                return Ok(self.leave_wait(core, None));
            }
            turns += 1;
            if turns < TURNS_BEFORE_SLEEP {
                drop(core);
                std::hint::spin_loop();
                continue;
            }
            let manual = self.manual.load(Ordering::Relaxed);
            let due = if manual { core.next_deadline() } else { None };
            let Core { engine, watch, .. } = &mut *core;
            let (above, errors) = want(watch.level(idx, engine.node()));
            watch.sleep_on(idx, above, errors);
            if manual {
                watch.sleeps_until(due.unwrap_or(Instant(u64::MAX)));
            }
            drop(core);
            let until = [end, due].into_iter().flatten().min();
            let left = until.map_or(Duration::MAX, |u| Duration::from_nanos(u.since(now)));
            self.sleep.sleep(epoch, left, manual);
            self.enter()?.watch.awake(idx);
        }
    }

    /// Ends a wait. Other sleepers may have relied on this thread for the next deadline.
    fn leave_wait<R>(&self, mut core: Guard<'_, Core>, answer: Option<R>) -> Option<R> {
        core.posted(self);
        answer
    }
}

/// Ends the threads and the domain when its last object is dropped.
pub(crate) struct Owner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The receive thread, where there is one.
    receiver: Mutex<Option<JoinHandle<()>>>,
}

/// The reference of an object to its domain.
#[derive(Clone)]
pub(crate) struct DomainRef {
    shared: Arc<Shared>,
    owner: Arc<Owner>,
}

impl Deref for DomainRef {
    type Target = Shared;

    #[inline]
    fn deref(&self) -> &Shared {
        &self.shared
    }
}

impl DomainRef {
    /// Makes the shared part of a domain around `engine`. Manual progress until
    /// [`start_progress_thread`](Self::start_progress_thread) is called.
    pub(crate) fn new(
        engine: Engine,
        settings: Settings,
        entry: Entry,
        stats: Option<Publisher>,
    ) -> Self {
        let node = engine.node().settings();
        let room = node.tx_wr_max + node.rx_wr_max;
        let (caps, waiter) = (engine.caps().clone(), engine.waiter());
        let holds = engine.node().hold_watch();
        let core = Core {
            engine,
            ops: OpTable::new(room),
            watch: Watch::default(),
            mrs: MrTable::default(),
            stats,
            notice_log: NoticeLog::default(),
            auth_keys: AuthKeys::default(),
            tclass: crate::tclass::TC_UNSPEC,
            key_log: None,
            key_watch: None,
            absent_since: None,
            join_fids: Vec::new(),
            joins: false,
            cm: None,
            deferred: DeferredTable::default(),
            asleep_until: None,
            reads_to_turn: READS_PER_TURN,
            reads_to_yield: READS_BEFORE_YIELD + READS_PER_YIELD,
            loss_reported: false,
            injects_from: Instant(0),
        };
        let shared = Arc::new(Shared {
            lock: Lock::new(core, entry),
            sleep: Sleep::new(waiter),
            manual: AtomicBool::new(true),
            caps,
            holds,
            settings,
            ep_count: AtomicU32::new(0),
            sets: AtomicU32::new(0),
            join_eqs: Mutex::default(),
            eqs: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        Lock::close_in_child(&shared);
        let owner = Arc::new(Owner {
            shared: Arc::clone(&shared),
            thread: Mutex::default(),
            receiver: Mutex::default(),
        });
        Self { shared, owner }
    }

    /// The shared part alone, which does not keep the domain open.
    pub(crate) fn arc(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// How many objects of the domain exist, this one included.
    pub(crate) fn objects(&self) -> usize {
        Arc::strong_count(&self.owner)
    }

    /// Whether silence of the domain means that its process is dead: a thread answers peers
    /// whatever the program does, or the port knows which processes live.
    pub(crate) fn answers(&self) -> bool {
        let receiver =
            || self.owner.receiver.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        self.caps.tells_presence || !self.manual.load(Ordering::Relaxed) || receiver()
    }

    /// Stores the receive thread, which ends with the domain.
    pub(crate) fn set_receive_thread(&self, thread: JoinHandle<()>) {
        let receiver = self.owner.receiver.lock();
        *receiver.unwrap_or_else(PoisonError::into_inner) = Some(thread);
    }

    /// Starts the progress thread, unless it runs.
    ///
    /// # Errors
    /// [`Error::NoMem`] if the system has no thread left, [`Error::Invalid`] if the processor to
    /// pin it to does not exist. [`Error::OpBadState`] as for every call.
    pub(crate) fn start_progress_thread(&self, idle: Idle) -> Result<()> {
        let mut thread = self.owner.thread.lock().unwrap_or_else(PoisonError::into_inner);
        if thread.is_some() {
            return Ok(());
        }
        if let Some(cpu) = self.settings.cpu {
            cpu_set(cpu)?;
        }
        self.enter_control()?.share();
        let shared = Arc::clone(&self.shared);
        let named = std::thread::Builder::new().name("barewire".to_owned());
        let started = without_signals(|| named.spawn(move || drive(&shared, idle)))
            .map_err(|e| refused_by_system("the progress thread", e.raw_os_error().unwrap_or(0)))?;
        *thread = Some(started);
        self.manual.store(false, Ordering::Relaxed);
        self.enter()?.watch.set_driven();
        // A leading waiter may sleep on the port, which the progress thread waits on from now on.
        self.sleep.notify();
        Ok(())
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        if self.shared.lock.forked() {
            // The port is the parent's: even to close it would write to shared memory.
            std::mem::forget(Arc::clone(&self.shared));
            return;
        }
        self.shared.stop.store(true, Ordering::Relaxed);
        self.shared.sleep.wake_port();
        for thread in [&mut self.thread, &mut self.receiver] {
            let thread = thread.get_mut().unwrap_or_else(PoisonError::into_inner);
            if let Some(thread) = thread.take() {
                thread.thread().unpark();
                // A thread panics only by a bug of barewire, and has printed the panic.
                let _ = thread.join();
                // The other thread may have consumed the wake-up.
                self.shared.sleep.wake_port();
            }
        }
        // Received packets are acknowledged, also those that arrived while the objects were closed.
        if let Ok(mut core) = self.shared.lock.enter_to_close() {
            core.turn(&self.shared);
            for _ in 0..LAST_ACKS {
                core.node().control().acknowledge_all();
                core.turn(&self.shared);
            }
            let end = Engine::now() + LEAVE_NS;
            while core.node().sessions().leave_sessions()
                && core.engine.gone().is_none()
                && Engine::now() < end
            {
                core.turn(&self.shared);
            }
            core.turn(&self.shared);
        }
    }
}

fn cpu_set(cpu: usize) -> Result<nix::sched::CpuSet> {
    let bad = |_errno| Error::Invalid("BAREWIRE_CPU: no such processor");
    let mut set = nix::sched::CpuSet::new();
    set.set(cpu).map_err(bad)?;
    let allowed = nix::sched::sched_getaffinity(nix::unistd::Pid::from_raw(0)).map_err(bad)?;
    if allowed.is_set(cpu).map_err(bad)? {
        Ok(set)
    } else {
        Err(Error::Invalid("BAREWIRE_CPU: no such processor"))
    }
}

/// Empty turns after which the thread yields or sleeps.
const IDLE_TURNS: u32 = 200;

/// Turns the loop until the domain is closed or its port is lost.
fn drive(shared: &Shared, idle: Idle) {
    if let Some(set) = shared.settings.cpu.and_then(|cpu| cpu_set(cpu).ok())
        && let Err(e) = nix::sched::sched_setaffinity(nix::unistd::Pid::from_raw(0), &set)
    {
        tracing::warn!("progress thread is not pinned: {e}");
    }
    let mut empty = 0_u32;
    while !shared.stop.load(Ordering::Relaxed) {
        let Ok(mut core) = shared.enter() else { return };
        core.note_awake();
        let moved = core.turn(shared);
        if core.engine.gone().is_some() {
            return;
        }
        empty = if moved > 0 { 0 } else { empty.saturating_add(1) };
        let mut sleep = None;
        if idle == Idle::Sleep && empty > IDLE_TURNS {
            let now = Engine::now();
            let until = core.next_deadline().unwrap_or(Instant(u64::MAX)).min(now + 1_000_000_000);
            core.note_asleep(until);
            sleep = Some(Duration::from_nanos(until.since(now)));
        }
        drop(core);
        shared.lock.yield_to_waiters();
        if let Some(time) = sleep {
            shared.sleep.wait_port(time);
        } else if idle != Idle::Spin && empty > IDLE_TURNS {
            std::thread::yield_now();
        } else {
            // Leaves the lock free for a moment, for threads that enter without waiting.
            for _ in 0..8 {
                std::hint::spin_loop();
            }
        }
    }
}
