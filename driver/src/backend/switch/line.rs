//! The connection of a process to the switch of another user, and the thread that makes it anew.
//!
//! When the switch ends, however it ends, the kernel closes its end of the connection. The thread,
//! which sleeps until then, asks at the same socket for as long as it takes, joins the segment that
//! the next switch gives, and lays it out for the port to take. Nothing is handed to the new
//! switch but the address: so it has nothing to believe, and its segments may have another layout.
//! What was in the old segment is lost, as frames on a wire are.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::greeting::{Came, Socket};
use super::guest::{self, Welcome};
use crate::backend::shm::{Bell, ShmPort, ShmSettings, Uplink};
use crate::backend::{self, readable, sleep};
use crate::error::OpenError;
use crate::own_thread::without_signals;
use crate::port::Port;

/// Between two attempts to reach a switch: at first, and after the first [`SOON`] of them.
const RETRY: Duration = Duration::from_millis(2);
const RETRY_LATER: Duration = Duration::from_millis(50);
const SOON: u32 = 500;

/// A place in a segment that a switch gave.
pub(super) struct Place {
    pub(super) port: ShmPort,
    pub(super) bell: Bell,
    pub(super) uplink: Uplink,
}

/// What the thread lays out for the port.
pub(super) struct Next {
    is_there: AtomicBool,
    place: Mutex<Option<Place>>,
}

impl Next {
    /// Of a port whose place does not change.
    pub(super) fn never() -> Arc<Self> {
        Arc::new(Self { is_there: AtomicBool::new(false), place: Mutex::new(None) })
    }

    /// Whether there is another place. Costs a load.
    #[inline(always)]
    pub(super) fn is_there(&self) -> bool {
        self.is_there.load(Relaxed)
    }

    /// Takes it.
    pub(super) fn take(&self) -> Option<Place> {
        let mut place = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        // Under the lock, here and below: or the one could hide what the other has just laid out.
        self.is_there.store(false, Relaxed);
        place.take()
    }

    fn put(&self, place: Place) {
        let mut is = self.place.lock().unwrap_or_else(PoisonError::into_inner);
        let old = is.replace(place);
        self.is_there.store(true, Relaxed);
        drop(is);
        drop(old);
    }
}

/// The thread's other end. It ends with this.
pub(super) struct Line {
    orders: Arc<Orders>,
    thread: Option<JoinHandle<()>>,
    /// A forked child has no such thread.
    pid: u32,
}

struct Orders {
    is_over: AtomicBool,
    bell: backend::Bell,
}

impl Line {
    /// Asks at `path` for a place in the segment that `settings` describe, and keeps it. `None` if
    /// there is no switch, as [`guest::ask`] has it.
    ///
    /// # Errors
    /// Those of asking and joining.
    pub(super) fn open(
        path: PathBuf,
        settings: &ShmSettings,
        patience: Duration,
    ) -> Result<Option<(Place, Arc<Next>, Self)>, OpenError> {
        let Some(welcome) = guest::ask(&path, settings.station, patience)? else { return Ok(None) };
        let (socket, place) = join(welcome, settings)?;
        let hint = "; raise the limits on open files and threads: ulimit -n 65536 -u 65536";
        let os = |source| OpenError::os("cannot watch", &path, source, hint);
        let bell = backend::Bell::new().map_err(os)?;
        let orders = Arc::new(Orders { is_over: AtomicBool::new(false), bell });
        let next = Next::never();
        let settings = ShmSettings { station: Some(place.port.caps().station), ..settings.clone() };
        let keeper = Keeper {
            path: path.clone(),
            settings,
            orders: Arc::clone(&orders),
            next: Arc::clone(&next),
            said: None,
        };
        let named = std::thread::Builder::new().name("barewire-switch".to_owned());
        let thread = without_signals(|| named.spawn(move || keeper.keep(socket))).map_err(os)?;
        let line = Self { orders, thread: Some(thread), pid: std::process::id() };
        Ok(Some((place, next, line)))
    }
}

impl Drop for Line {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.orders.is_over.store(true, Release);
        self.orders.bell.ring();
        // It has nothing to panic over; if it did, there is nothing left to do.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Takes the place that a switch gives.
fn join(welcome: Welcome, settings: &ShmSettings) -> Result<(Socket, Place), OpenError> {
    let Welcome { socket, file, station } = welcome;
    let settings = ShmSettings { station: Some(station), ..settings.clone() };
    let (port, uplink) = ShmPort::open_leaf_of(file, &settings)?;
    let bell = port.bell()?;
    Ok((socket, Place { port, bell, uplink }))
}

/// The thread.
struct Keeper {
    path: PathBuf,
    settings: ShmSettings,
    orders: Arc<Orders>,
    next: Arc<Next>,
    /// What the log has last been told.
    said: Option<String>,
}

impl Keeper {
    fn keep(mut self, mut socket: Socket) {
        let hour = Duration::from_secs(3600);
        while !self.orders.is_over.load(Acquire) {
            sleep(&mut [readable(socket.fd()), readable(self.orders.bell.fd())], hour);
            if matches!(socket.hear(false), Came::Nothing) {
                continue;
            }
            let path = self.path.display();
            tracing::info!(%path, "the switch has gone: frames are lost until the next one");
            match self.again() {
                Some((new, place)) => {
                    socket = new;
                    self.next.put(place);
                }
                None => return,
            }
        }
    }

    /// A place that the next switch gives; `None` if it is over before.
    fn again(&mut self) -> Option<(Socket, Place)> {
        for attempt in 0_u32.. {
            if self.orders.is_over.load(Acquire) {
                break;
            }
            let asked = guest::ask(&self.path, self.settings.station, Duration::ZERO);
            let joined = match asked {
                Ok(Some(welcome)) => join(welcome, &self.settings).map(Some),
                Ok(None) => Ok(None),
                Err(why) => Err(why),
            };
            match joined {
                Ok(Some(new)) => return Some(new),
                Ok(None) => {}
                Err(why) => self.say(&why.to_string()),
            }
            let pause = if attempt < SOON { RETRY } else { RETRY_LATER };
            sleep(&mut [readable(self.orders.bell.fd())], pause);
        }
        None
    }

    /// Tells the log what stands in the way, once.
    fn say(&mut self, why: &str) {
        if self.said.as_deref() != Some(why) {
            tracing::warn!("no switch for this process: {why}");
            self.said = Some(why.to_owned());
        }
    }
}
