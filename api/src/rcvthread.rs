//! The receive thread of a domain with manual progress: it makes progress while the program
//! computes.
//!
//! Over a wire, peers know by its answers that a process is alive. A program that does not poll
//! gives none: its peers would declare it dead after T_dead, and its socket would overflow. This
//! thread runs the progress loop while the program does not: it receives, stores, acknowledges,
//! answers and retransmits. It sleeps while the program polls, and never completes anything that a
//! poll would not have completed.
//!
//! It is in one of two states:
//! - *watching*: the program polls. The thread checks this after 10 ms, and after twice as long
//!   each time while the program polls, up to 100 ms or a tenth of T_dead. A peer's send whose
//!   acknowledgement was pending when the program stopped polling waits for two checks.
//! - *standing in*: the program has not polled for that long. The thread sleeps on the port and
//!   turns the loop when frames arrive; a port without an interrupt is polled every tenth of
//!   T_dead.
//!
//! While the program streams small messages over a port whose frames pass a kernel, messages are
//! held to share packets ([`HoldWatch`]). Then this thread checks every 40 us for a packet that the
//! program did not send.
//!
//! The program pays one load per call for it: see [`Lock::try_enter_control`](crate::lock::Lock). A
//! port that knows which processes are alive ([`PortCaps::tells_presence`]) needs no such thread.
//!
//! Every domain has its own thread: it sleeps on the port itself, as that port's driver requires,
//! and a domain that is slow, locked or being closed does not delay the answers of another.
//! `docs/provider.md` has its cost.
//!
//! [`HoldWatch`]: barewire_dataplane::node::HoldWatch
//! [`PortCaps::tells_presence`]: barewire_driver::port::PortCaps::tells_presence

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use barewire_dataplane::poll::Engine;
use barewire_dataplane::types::Instant;
use nix::sched::CpuSet;
use nix::unistd::Pid;

use crate::inner::{DomainRef, Shared};
use crate::own_thread;

/// First pause between two checks whether the program polls.
const FIRST_LOOK: Duration = Duration::from_millis(10);

/// Longest pause between two of them.
const LAST_LOOK: Duration = Duration::from_millis(100);

/// How long a packet of shared messages may be held before this thread sends it, and the period of
/// the checks for one.
const HOLD_LOOK: Duration = Duration::from_micros(40);

/// Number of checks in a row without a newly held packet, after which the thread stops checking.
const HOLD_LOOKS: u32 = 250;

/// Most turns per entry into the lock, so that the program does not wait for long.
const TURNS: u32 = 16;

/// Stack of the thread, bytes. The C library also places the program's thread-local variables in
/// it.
const STACK_LEN: usize = 256 << 10;

/// Longest sleep, which in practice only a frame ends.
const UNTIL_A_FRAME: Duration = Duration::from_secs(3600);

impl DomainRef {
    /// Starts the receive thread. Without it the domain works, but peers take it for dead if the
    /// program does not poll for T_dead.
    pub(crate) fn start_receive_thread(&self) {
        match start(self.arc()) {
            Ok(thread) => self.set_receive_thread(thread),
            Err(e) => tracing::warn!(
                "no receive thread ({e}): peers declare this process dead if it does not poll for \
                 {} ms; raise the limit on threads (ulimit -u, the pids limit of a container), or \
                 let the filter pass membarrier(2)",
                self.settings.t_dead.as_millis()
            ),
        }
    }
}

/// Starts the receive thread of a domain.
///
/// # Errors
/// The system has no thread left, or a kernel without `membarrier` cannot keep this thread and a
/// program that takes no lock apart. Nothing runs then.
fn start(shared: &Arc<Shared>) -> io::Result<JoinHandle<()>> {
    shared.lock.allow_service_threads()?;
    let shared = Arc::clone(shared);
    own_thread::spawn("barewire-rcv", STACK_LEN, move || run(&shared))
}

fn run(shared: &Shared) {
    be_schedulable();
    // Best effort: sleeps take up to 50 us longer without it.
    let _ = nix::sys::prctl::set_timerslack(1_000);
    let period = shared.settings.t_dead / 10;
    let (first, last) = (FIRST_LOOK.min(period), LAST_LOOK.min(period));
    let (mut pause, mut seen) = (first, None);
    while may_run(shared) {
        std::thread::park_timeout(pause);
        let is_held = shared.holds.look().0.is_some();
        if shared.settings.nagle && (is_held || shared.holds.is_wanted()) {
            watch_holds(shared);
        }
        let now = last_turn(shared);
        if now.is_some() && now == seen {
            stand_in(shared, period);
            shared.sleep.pass_on();
            (pause, seen) = (first, None);
        } else {
            pause = if seen.is_some() { (pause * 2).min(last) } else { first };
            seen = now.or(Some(Instant(0)));
        }
    }
    // The progress thread may sleep on the port by now, and this thread may have consumed its
    // wake-up.
    shared.sleep.wake_port();
}

/// Whether the domain is open and has manual progress.
fn may_run(shared: &Shared) -> bool {
    !shared.is_closing() && shared.manual.load(Ordering::Relaxed)
}

/// Allows the domain to hold packets, and sends those that the program leaves unsent, until none
/// was held for a while.
fn watch_holds(shared: &Shared) {
    let ((_, mut seen), mut idle) = (shared.holds.look(), 0);
    shared.holds.watch(true);
    while may_run(shared) && idle < HOLD_LOOKS {
        std::thread::park_timeout(HOLD_LOOK);
        let held = send_late(shared);
        idle = if held == seen { idle + 1 } else { 0 };
        seen = held;
    }
    shared.holds.watch(false);
    std::thread::park_timeout(HOLD_LOOK);
    send_late(shared);
}

/// Sends the held packet when it is late, unless the program does. Returns the number of packets
/// held so far.
fn send_late(shared: &Shared) -> u64 {
    let (since, held) = shared.holds.look();
    let Some(since) = since else { return held };
    let age = Duration::from_nanos(Engine::now().since(since));
    std::thread::park_timeout(HOLD_LOOK.saturating_sub(age));
    if shared.holds.look() == (Some(since), held)
        && let Some(mut core) = shared.lock.try_enter_control()
    {
        core.engine.send_held();
        core.posted(shared);
    }
    held
}

/// When the loop was turned last; `None` if another thread turns it now or sleeps on the port.
fn last_turn(shared: &Shared) -> Option<Instant> {
    if shared.sleep.is_led() {
        return None;
    }
    shared.lock.try_enter_control().map(|core| core.engine.last_turn_at())
}

/// Turns the loop until the program does.
fn stand_in(shared: &Shared, period: Duration) {
    let (mut ours, mut polled_at) = (None, None);
    while may_run(shared) && !shared.sleep.is_led() {
        let Some(mut core) = shared.lock.try_enter_control() else { return };
        if ours.is_some_and(|at| at != core.engine.last_turn_at()) {
            return;
        }
        // The last turn before the first of this thread.
        core.absent_since = Some(*polled_at.get_or_insert(core.engine.last_turn_at()));
        let idle = (0..TURNS).any(|_| core.turn(shared) == 0);
        core.absent_since = None;
        if core.engine.gone().is_some() {
            return;
        }
        ours = Some(core.engine.last_turn_at());
        let due = core.next_deadline();
        let peers = core.engine.node().statistics().knows_peers();
        drop(core);
        if idle {
            sleep(shared, period, due, peers);
        }
    }
}

/// Sleeps until a frame arrives or the next deadline. The program may post meanwhile, which does
/// not wake this thread: while there are peers it checks deadlines once a period.
fn sleep(shared: &Shared, period: Duration, due: Option<Instant>, peers: bool) {
    let most = if peers { period } else { UNTIL_A_FRAME };
    let left = due.map_or(most, |due| Duration::from_nanos(due.since(Engine::now())).min(most));
    if !shared.sleep.wait_port_long(left) {
        std::thread::park_timeout(left.max(FIRST_LOOK).min(period));
    }
}

/// Unpins the thread from its creator's processor, and gives it the next higher priority if the
/// creator has a real-time policy, which would starve it otherwise. Best effort: without the
/// permission the thread keeps its creator's settings.
fn be_schedulable() {
    let mut all = CpuSet::new();
    for cpu in 0..CpuSet::count() {
        let _ = all.set(cpu);
    }
    let _ = nix::sched::sched_setaffinity(Pid::from_raw(0), &all);
    // SAFETY: plain calls on the calling thread (0), with a structure that lives through them.
    unsafe {
        let policy = libc::sched_getscheduler(0);
        if policy == libc::SCHED_FIFO || policy == libc::SCHED_RR {
            let mut param = std::mem::zeroed::<libc::sched_param>();
            libc::sched_getparam(0, &mut param);
            param.sched_priority =
                (param.sched_priority + 1).min(libc::sched_get_priority_max(policy));
            libc::sched_setscheduler(0, policy, &param);
        }
    }
}
