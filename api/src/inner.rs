//! What the objects of a domain share: the engine under its lock, the sleepers, and the thread
//! that turns the loop if the application does not.

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
use crate::deferred::Works;
use crate::eq::{EqInner, Turns};
use crate::errno::{Error, Result, refused_by_system};
use crate::file_watch::FileWatch;
use crate::key::{Files, News};
use crate::key_log::KeyLog;
use crate::lock::{Beside, Entry, Guard, HasLock, Lock};
use crate::mr::table::MrTable;
use crate::notice::Teller;
use crate::settings::{Idle, Settings};
use crate::stats::Publisher;
use crate::wait::{Sleep, Watch};

/// What the lock of a domain guards.
pub(crate) struct Core {
    pub(crate) engine: Engine,
    pub(crate) ops: OpTable,
    pub(crate) watch: Watch,
    pub(crate) mrs: MrTable,
    pub(crate) stats: Option<Publisher>,
    teller: Teller,
    /// Keys that are asked for by their bytes.
    pub(crate) auth_keys: AuthKeys,
    /// The traffic class that the domain was opened with.
    pub(crate) tclass: u32,
    /// Writes the secrets of sessions.
    pub(crate) key_log: Option<KeyLog>,
    /// Looks at the files with keys, or with the certificate.
    pub(crate) key_watch: Option<FileWatch<News>>,
    /// When the program polled last, while a thread turns the loop in its place.
    pub(crate) absent_since: Option<Instant>,
    /// What C knows groups by whose join goes on.
    pub(crate) join_fids: Vec<(GroupId, u64)>,
    /// A join goes on: its outcome is looked for.
    pub(crate) joins: bool,
    /// The connection side, once there are connected endpoints.
    pub(crate) cm: Option<Box<Cm>>,
    /// What waits for counters.
    pub(crate) works: Works,
    /// Until when the progress thread sleeps if nobody wakes it; `None` while it is awake.
    asleep_until: Option<Instant>,
    /// Reads that may find an entry before the loop is turned.
    reads_left: u32,
    /// Reads in vain that are left until one yields.
    reads_to_yield: u32,
    /// The event queues have been told that the port is gone.
    mourned: bool,
    /// When failed injects may be told of again.
    injects_from: Instant,
}

/// Reads of a non-empty queue after which the loop is turned all the same, so that somebody who
/// takes entries one by one still acknowledges and retransmits.
const READS_PER_TURN: u32 = 64;

/// Reads in vain, some 20 microseconds, after which a program that polls lets others have the
/// processor now and then: who it waits for may be among them.
const READS_BEFORE_YIELD: u32 = 256;

/// One in so many further reads yields.
const READS_PER_YIELD: u32 = 32;

/// Turns that a blocking call polls before it sleeps: about as long as a wake-up costs.
const TURNS_BEFORE_SLEEP: u32 = 200;

/// How often a domain that closes acknowledges what has arrived, since nobody answers afterwards.
/// Where one frame in fifty gets lost, one domain in a hundred thousand leaves a peer in doubt.
const LAST_ACKS: u32 = 3;

/// How long a domain that closes tells its peers at most, nanoseconds.
const LEAVE_NS: u64 = 100_000_000;

/// At most one line for a peer and cause in this time, which says how many there were.
const INJECTS_PERIOD_NS: u64 = 1_000_000_000;

/// Who takes an entry of a queue from where it lies or is made, and may need the table of the
/// buffers that are lent.
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

    /// One turn of the loop, and what follows from it for those who wait.
    #[inline(never)]
    pub(crate) fn turn(&mut self, shared: &Shared) -> usize {
        let moved = self.turn_and_tell(shared);
        self.note_moved(shared, moved);
        moved
    }

    /// As [`turn`](Self::turn), without a call, and what it moved is left to the caller to
    /// [note](Self::note_moved), if nobody has to be told. The first completion may go to
    /// `reader`.
    #[inline(always)]
    fn calm_turn(&mut self, shared: &Shared, reader: impl EntryReader) -> usize {
        self.reads_left = READS_PER_TURN;
        reader.turn(&mut self.engine, &mut self.ops).unwrap_or_else(|| {
            cold(());
            self.other_turn(shared)
        })
    }

    /// As [`turn`](Self::turn), and what it moved is left to the caller to
    /// [note](Self::note_moved).
    fn turn_and_tell(&mut self, shared: &Shared) -> usize {
        let moved = self.calm_turn(shared, NoReader);
        if self.watch.any() {
            self.look_now(shared);
        }
        moved
    }

    /// As [`calm_turn`](Self::calm_turn), for other ports than a segment, or to read the clock. (By
    /// itself, so that a turn on a segment need not keep what is asked here.)
    #[inline(never)]
    fn other_turn(&mut self, shared: &Shared) -> usize {
        self.engine.fast_turn_other().unwrap_or_else(|| self.full_turn(shared))
    }

    /// A turn with all that there may be to do.
    #[inline(never)]
    fn full_turn(&mut self, shared: &Shared) -> usize {
        // Before frames are taken, which may have waited for long.
        if let Some(news) = self.key_watch.as_ref().and_then(FileWatch::take) {
            self.take_keys(news);
        }
        let moved = match self.engine.turn() {
            Ok(moved) => moved,
            Err(_gone) => self.mourn(shared),
        };
        if moved > 0 {
            self.found();
        }
        if self.engine.is_timed() {
            self.look_now(shared);
        }
        moved
    }

    /// Turns the loop if the application is the one who has to.
    #[inline(never)]
    pub(crate) fn turn_if_manual(&mut self, shared: &Shared) {
        let moved = self.turn_here_if_manual(shared, NoReader);
        self.note_moved(shared, moved);
    }

    /// As [`turn_if_manual`](Self::turn_if_manual), without a call, and what it moved is left to
    /// the caller to [note](Self::note_moved). The first completion may go to `reader`.
    #[inline(always)]
    pub(crate) fn turn_here_if_manual(
        &mut self,
        shared: &Shared,
        reader: impl EntryReader,
    ) -> usize {
        if self.watch.is_calm() {
            return self.calm_turn(shared, reader);
        }
        cold(());
        self.turn_watched(shared)
    }

    /// As [`turn_here_if_manual`](Self::turn_here_if_manual), if somebody has to be told or the
    /// loop is not the application's to turn.
    #[inline(never)]
    fn turn_watched(&mut self, shared: &Shared) -> usize {
        if self.watch.is_driven() {
            self.turn_if_asleep(shared);
            return 0;
        }
        self.turn_and_tell(shared)
    }

    /// Follows a turn that handed nothing out. One that moves something is not in vain, also where
    /// peers work on this side's memory, which writes no entry. Another turn comes at once if the
    /// clock was not read for long: then true.
    #[inline(always)]
    pub(crate) fn note_moved(&mut self, shared: &Shared, moved: usize) -> bool {
        if moved > 0 {
            self.found();
        }
        let is_late = self.engine.is_late();
        if is_late {
            cold(());
            self.turn_late(shared);
        }
        is_late
    }

    /// A turn that reads the clock, after one of a program that polls seldom and did not.
    #[inline(never)]
    fn turn_late(&mut self, shared: &Shared) {
        if self.watch.is_calm() {
            self.full_turn(shared);
        } else if !self.watch.is_driven() {
            self.turn_and_tell(shared);
        }
    }

    /// Turns the loop if the thread that does sleeps.
    fn turn_if_asleep(&mut self, shared: &Shared) {
        if let Some(until) = self.asleep_until {
            // Whoever polls is faster than the thread's wake-up. What the turn made due is the
            // thread's again, since the caller may go to sleep now.
            self.turn(shared);
            self.wake_if_due(shared, until);
        }
    }

    /// Counts a read that found something, and turns the loop now and then.
    #[inline]
    pub(crate) fn read_something(&mut self, shared: &Shared) {
        self.found();
        self.reads_left -= 1;
        if self.reads_left == 0 {
            self.reads_left = READS_PER_TURN;
            cold(());
            self.turn_if_manual(shared);
        }
    }

    /// Takes the entry that is next, as a read that finds something, if there is nothing to do
    /// besides: see `take_one` of the node's queues.
    #[inline(always)]
    pub(crate) fn take_one(&mut self, cq: CqId, reader: impl EntryReader) -> Option<bool> {
        if self.node().cqs.is_empty(cq) {
            return None;
        }
        // The loop is to be turned.
        if self.reads_left <= 1 {
            return cold(Some(false));
        }
        let taken = reader.take_one(cq, self.engine.node_mut(), &mut self.ops);
        if taken == Some(true) {
            self.reads_left -= 1;
            self.found();
        }
        taken
    }

    /// A read has not been in vain.
    #[inline(always)]
    pub(crate) fn found(&mut self) {
        self.reads_to_yield = READS_BEFORE_YIELD + READS_PER_YIELD;
    }

    /// Counts a read that found nothing, and says whether it is time to yield.
    #[inline(always)]
    pub(crate) fn reads_in_vain(&mut self) -> bool {
        self.reads_to_yield -= 1;
        let yields = self.reads_to_yield == 0;
        if yields {
            self.reads_to_yield = READS_PER_YIELD;
        }
        yields
    }

    /// What a post may have changed: entries of queues, and the next deadline.
    #[inline(always)]
    pub(crate) fn posted(&mut self, shared: &Shared) {
        if self.watch.any() {
            cold(());
            self.tell_watchers(shared);
        }
    }

    #[inline(never)]
    fn tell_watchers(&mut self, shared: &Shared) {
        self.notify(shared);
        if let Some(until) = self.asleep_until {
            self.wake_if_due(shared, until);
        }
    }

    /// Wakes whoever sleeps and has something now, or will have to turn the loop earlier than it
    /// knows of.
    fn notify(&mut self, shared: &Shared) {
        self.watch.notify(self.engine.node(), &shared.sleep);
        if self.watch.has_turners()
            && self.next_deadline().is_some_and(|d| self.watch.oversleeps(d))
        {
            shared.sleep.notify();
        }
    }

    /// The connection side, if there is one, and what it sends through.
    pub(crate) fn cm(&mut self) -> Option<(&mut Cm, Transport<'_>)> {
        let Self { cm, engine, ops, .. } = self;
        cm.as_deref_mut().map(|cm| (cm, Transport { engine, ops }))
    }

    /// When the loop has to be turned at the latest.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let cm = self.cm.as_ref().map(|cm| cm.next_deadline());
        [self.engine.next_deadline(), cm].into_iter().flatten().min()
    }

    /// The progress thread is awake.
    fn note_awake(&mut self) {
        if self.asleep_until.take().is_some() {
            self.watch.ignore();
        }
    }

    /// The progress thread sleeps until then, unless a post has something due earlier.
    fn note_asleep(&mut self, until: Instant) {
        self.watch.attend();
        self.asleep_until = Some(until);
    }

    #[cold]
    fn wake_if_due(&mut self, shared: &Shared, until: Instant) {
        if self.works.any() {
            self.release();
        }
        if self.next_deadline().is_some_and(|d| d < until) {
            self.note_awake();
            shared.sleep.wake_port();
        }
    }

    #[inline(never)]
    fn look_now(&mut self, shared: &Shared) {
        if self.engine.node().coll.has_event() {
            self.look_for_joins(shared);
        }
        if self.teller.is_due(&self.engine) {
            self.teller.tell(&mut self.engine);
        }
        if self.engine.node().observed.has_failed_injects() {
            self.tell_failed_injects();
        }
        if self.engine.node().openings.has_secrets() {
            self.log_secrets();
        }
        let now = self.engine.last_now();
        if self.cm.as_ref().is_some_and(|cm| cm.is_due(self.engine.node(), now))
            && let Some((cm, mut io)) = self.cm()
        {
            cm.look(&mut io);
        }
        if self.works.any() {
            self.release();
        }
        if self.watch.any() {
            self.notify(shared);
        }
        if let Some(stats) = &mut self.stats
            && stats.is_due(self.engine.last_now())
        {
            stats.publish(&mut self.engine, self.absent_since);
        }
    }

    /// Takes the keys, or the certificate, from the files again whenever one has changed. Best
    /// effort: without a thread the domain keeps what it has.
    pub(crate) fn watch_keys(&mut self, mut files: Files) {
        if let Files::Certificate(files) = &mut files {
            files.is_for(self.engine.caps());
        }
        match FileWatch::start(move || files.look()) {
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
    fn take_keys(&mut self, news: News) {
        let now = Engine::now();
        // What the node would refuse was refused when the files were read.
        let (what, taken) = match news {
            News::Keys(keys) => {
                let what = format!("key files have changed: {} keys", keys.len());
                (what, self.node().sessions().set_keys(now, keys))
            }
            News::Certificate(own) => {
                let what = format!("certificate has changed: {}", own.identity());
                (what, self.node().sessions().set_certificate(now, own))
            }
        };
        match taken {
            Ok(()) => tracing::info!("the {what}"),
            Err(why) => tracing::warn!("the {what}, and is not taken: {why}"),
        }
    }

    /// Hands the outcomes of joins to the event queues.
    #[cold]
    pub(crate) fn look_for_joins(&mut self, shared: &Shared) {
        while let Some(event) = self.node().coll.event() {
            let at = self.join_fids.iter().position(|(group, _)| *group == event.group);
            let fid = at.map(|at| self.join_fids.swap_remove(at).1);
            if let Some(eq) = shared.joiner(event.ep) {
                eq.push_join(fid, event.context, event.result);
            }
            if self.joins && !self.node().coll.is_joining() {
                self.joins = false;
                self.watch.ignore();
            }
        }
    }

    /// Tells of failed operations that no completion tells of, once in [`INJECTS_PERIOD_NS`].
    #[cold]
    fn tell_failed_injects(&mut self) {
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
    fn mourn(&mut self, shared: &Shared) -> usize {
        if !std::mem::replace(&mut self.mourned, true) {
            let why = self.engine.gone().map(ToString::to_string).unwrap_or_default();
            tracing::error!("{why}: every operation of its domain ends with FI_ENETDOWN");
            for eq in shared.event_queues() {
                eq.push_error(Error::NetDown);
            }
            // No later turn looks by time.
            self.tell_failed_injects();
        }
        // No later turn is one that looks by time.
        if self.teller.is_due(&self.engine) {
            self.teller.tell(&mut self.engine);
        }
        0
    }
}

impl Drop for Core {
    /// What failed in the last second, and secrets of sessions, are told before the domain goes.
    fn drop(&mut self) {
        self.injects_from = Instant(0);
        self.tell_failed_injects();
        self.log_secrets();
    }
}

/// A domain, as its objects and its progress thread see it.
pub(crate) struct Shared {
    pub(crate) lock: Lock<Core>,
    pub(crate) sleep: Sleep,
    /// The application turns the loop.
    pub(crate) manual: AtomicBool,
    pub(crate) caps: PortCaps,
    /// What the domain holds, for the receive thread.
    pub(crate) holds: Arc<HoldWatch>,
    pub(crate) settings: Settings,
    /// Numbers endpoint objects.
    pub(crate) ep_count: AtomicU32,
    /// Numbers address vector sets.
    sets: AtomicU32,
    /// The event queues of endpoints, for the outcomes of joins.
    joiners: Mutex<Vec<(EpId, Weak<EqInner>)>>,
    eqs: Mutex<Vec<Weak<EqInner>>>,
    stop: AtomicBool,
}

impl HasLock for Shared {
    type Value = Core;

    fn lock(&self) -> &Lock<Core> {
        &self.lock
    }
}

impl Turns for Shared {
    fn turn_for_reader(&self) -> bool {
        // Event queues belong to the fabric, so the promise of `FI_THREAD_DOMAIN` does not hold for
        // a thread that reads one.
        let enters = self.manual.load(Ordering::Relaxed).then(|| self.enter_control());
        let Some(Ok(mut core)) = enters else { return false };
        core.turn(self);
        true
    }
}

impl Shared {
    /// Whether the domain is being closed.
    pub(crate) fn stops(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }

    /// For a data call: posts, reads of queues and counters, waits.
    #[inline]
    pub(crate) fn enter(&self) -> Result<Guard<'_, Core>> {
        self.lock.enter()
    }

    /// For a control call, which opens, binds, registers, inserts, asks or closes: from any thread.
    pub(crate) fn enter_control(&self) -> Result<Beside<'_, Core>> {
        self.lock.enter_control()
    }

    /// Tells domains apart.
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

    /// Outcomes of joins of endpoint `ep` go to `eq` from now on.
    pub(crate) fn tell_joins_to(&self, ep: EpId, eq: &Arc<EqInner>) {
        let mut joiners = self.joiners.lock().unwrap_or_else(PoisonError::into_inner);
        joiners.retain(|(other, eq)| *other != ep && eq.strong_count() > 0);
        joiners.push((ep, Arc::downgrade(eq)));
    }

    fn joiner(&self, ep: EpId) -> Option<Arc<EqInner>> {
        let joiners = self.joiners.lock().unwrap_or_else(PoisonError::into_inner);
        joiners.iter().find(|(other, _)| *other == ep).and_then(|(_, eq)| eq.upgrade())
    }

    pub(crate) fn bind_eq(&self, eq: &Arc<EqInner>) {
        let mut eqs = self.eqs.lock().unwrap_or_else(PoisonError::into_inner);
        eqs.push(Arc::downgrade(eq));
    }

    /// Runs `attempt` until it answers, a signal or the end of `timeout` comes (`None`), sleeping
    /// in between while entry `idx` of the watch list has no more than `attempt` saw.
    ///
    /// `attempt` gets the chance to turn the loop; `want` says above which level of value and at
    /// which error count to wake again.
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

    /// Ends a wait. Who sleeps on may have counted on this thread for what is due next.
    fn leave_wait<R>(&self, mut core: Guard<'_, Core>, answer: Option<R>) -> Option<R> {
        core.posted(self);
        answer
    }
}

/// Ends the progress thread and the domain when its last object goes.
pub(crate) struct Owner {
    shared: Arc<Shared>,
    thread: Mutex<Option<JoinHandle<()>>>,
    /// The receive thread, where there is one.
    receiver: Mutex<Option<JoinHandle<()>>>,
}

/// What every object of a domain holds.
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
    /// [`drive`](Self::drive) is called.
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
            teller: Teller::default(),
            auth_keys: AuthKeys::default(),
            tclass: crate::tclass::TC_UNSPEC,
            key_log: None,
            key_watch: None,
            absent_since: None,
            join_fids: Vec::new(),
            joins: false,
            cm: None,
            works: Works::default(),
            asleep_until: None,
            reads_left: READS_PER_TURN,
            reads_to_yield: READS_BEFORE_YIELD + READS_PER_YIELD,
            mourned: false,
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
            joiners: Mutex::default(),
            eqs: Mutex::default(),
            stop: AtomicBool::new(false),
        });
        Lock::shut_in_child(&shared);
        let owner = Arc::new(Owner {
            shared: Arc::clone(&shared),
            thread: Mutex::default(),
            receiver: Mutex::default(),
        });
        Self { shared, owner }
    }

    /// The shared part alone, for those who must not keep the domain open.
    pub(crate) fn arc(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// How many objects of the domain exist, this one included.
    pub(crate) fn objects(&self) -> usize {
        Arc::strong_count(&self.owner)
    }

    /// Whether the domain's silence is its death: something answers peers whatever the program
    /// does, or the port tells which processes live.
    pub(crate) fn answers(&self) -> bool {
        let receiver =
            || self.owner.receiver.lock().unwrap_or_else(PoisonError::into_inner).is_some();
        self.caps.tells_presence || !self.manual.load(Ordering::Relaxed) || receiver()
    }

    /// Keeps the receive thread, which ends with the domain.
    pub(crate) fn keep_receiver(&self, thread: JoinHandle<()>) {
        let receiver = self.owner.receiver.lock();
        *receiver.unwrap_or_else(PoisonError::into_inner) = Some(thread);
    }

    /// Starts the progress thread, unless it runs.
    ///
    /// # Errors
    /// [`Error::NoMem`] if the system has no thread left, [`Error::Invalid`] if the processor it
    /// shall stay on does not exist. [`Error::OpBadState`] as for every call.
    pub(crate) fn drive(&self, idle: Idle) -> Result<()> {
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
        self.enter()?.watch.drive();
        // A leader among the sleepers waits on the port, which is the thread's now.
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
                // It panics only by our own bug, which it has told already.
                let _ = thread.join();
                // The other may have taken the wake-up.
                self.shared.sleep.wake_port();
            }
        }
        // What arrived is acknowledged, also while the objects were closed.
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

/// Turns the loop until the domain goes or its port has gone.
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
        shared.lock.let_others_in();
        if let Some(time) = sleep {
            shared.sleep.wait_port(time);
        } else if idle != Idle::Spin && empty > IDLE_TURNS {
            std::thread::yield_now();
        } else {
            // Leaves the lock free for a moment, for those who come without waiting.
            for _ in 0..8 {
                std::hint::spin_loop();
            }
        }
    }
}
