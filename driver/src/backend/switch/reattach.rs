//! Reattachment of a client: the thread that keeps the connection to the switch of another user.
//!
//! When the switch ends, the kernel closes its end of the connection. The thread, which sleeps
//! until then, asks at the same socket until a switch answers, joins the segment of that switch,
//! and stores the [`Attachment`] for the port to take. The new switch gets nothing but the address:
//! it has to trust no state of the old one, and its segments may have another layout. Frames in the
//! old segment are lost, as on a wire.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::attach::{self, Grant};
use super::handshake::{Incoming, Socket};
use crate::backend::shm::{ShmPort, ShmSettings, Uplink, WakeSocket};
use crate::backend::{self, readable, sleep};
use crate::error::OpenError;
use crate::own_thread::without_signals;
use crate::port::Port;

/// Pause between two attempts to reach a switch: for the first [`FAST_RETRIES`], and after them.
const RETRY: Duration = Duration::from_millis(2);
const RETRY_LATER: Duration = Duration::from_millis(50);
const FAST_RETRIES: u32 = 500;

/// Membership of a segment that a switch granted.
pub(super) struct Attachment {
    pub(super) port: ShmPort,
    pub(super) bell: WakeSocket,
    pub(super) uplink: Uplink,
}

/// Mailbox of one attachment from the thread to the port.
pub(super) struct NextAttachment {
    is_ready: AtomicBool,
    slot: Mutex<Option<Attachment>>,
}

impl NextAttachment {
    /// An empty mailbox, which stays empty for a port of the switch's own user.
    pub(super) fn empty() -> Arc<Self> {
        Arc::new(Self { is_ready: AtomicBool::new(false), slot: Mutex::new(None) })
    }

    /// Whether an attachment is waiting. Costs a load.
    #[inline(always)]
    pub(super) fn is_ready(&self) -> bool {
        self.is_ready.load(Relaxed)
    }

    /// Takes the attachment, if one is waiting.
    pub(super) fn take(&self) -> Option<Attachment> {
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        // Under the lock, here and in `put`: this store must not overwrite that of a later `put`.
        self.is_ready.store(false, Relaxed);
        slot.take()
    }

    fn put(&self, attachment: Attachment) {
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        let old = slot.replace(attachment);
        self.is_ready.store(true, Relaxed);
        drop(slot);
        drop(old);
    }
}

/// Handle of the thread, which ends when this is dropped.
pub(super) struct ReattachThread {
    control: Arc<Control>,
    thread: Option<JoinHandle<()>>,
    /// A forked child has no such thread.
    pid: u32,
}

struct Control {
    is_stopping: AtomicBool,
    wake: backend::WakeEvent,
}

impl ReattachThread {
    /// Asks the switch at `path` for the segment that `settings` describe, joins it, and starts the
    /// thread. `None` without a switch, as for [`attach::attach`].
    ///
    /// # Errors
    /// Those of attaching and joining.
    pub(super) fn open(
        path: PathBuf,
        settings: &ShmSettings,
        patience: Duration,
    ) -> Result<Option<(Attachment, Arc<NextAttachment>, Self)>, OpenError> {
        let Some(grant) = attach::attach(&path, settings.station, patience)? else {
            return Ok(None);
        };
        let (socket, attachment) = join(grant, settings)?;
        let hint = "; raise the limits on open files and threads: ulimit -n 65536 -u 65536";
        let os = |source| OpenError::os("cannot watch", &path, source, hint);
        let wake = backend::WakeEvent::new().map_err(os)?;
        let control = Arc::new(Control { is_stopping: AtomicBool::new(false), wake });
        let next = NextAttachment::empty();
        let settings =
            ShmSettings { station: Some(attachment.port.caps().station), ..settings.clone() };
        let worker = Worker {
            path: path.clone(),
            settings,
            control: Arc::clone(&control),
            next: Arc::clone(&next),
            last_warning: None,
        };
        let named = std::thread::Builder::new().name("barewire-switch".to_owned());
        let thread = without_signals(|| named.spawn(move || worker.run(socket))).map_err(os)?;
        let handle = Self { control, thread: Some(thread), pid: std::process::id() };
        Ok(Some((attachment, next, handle)))
    }
}

impl Drop for ReattachThread {
    fn drop(&mut self) {
        if self.pid != std::process::id() {
            std::mem::forget(self.thread.take());
            return;
        }
        self.control.is_stopping.store(true, Release);
        self.control.wake.ring();
        // The thread does not panic; if it did, there would be nothing left to do.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

/// Joins the granted segment.
fn join(grant: Grant, settings: &ShmSettings) -> Result<(Socket, Attachment), OpenError> {
    let Grant { socket, file, station } = grant;
    let settings = ShmSettings { station: Some(station), ..settings.clone() };
    let (port, uplink) = ShmPort::open_leaf_of(file, &settings)?;
    let bell = port.wake_socket()?;
    Ok((socket, Attachment { port, bell, uplink }))
}

/// State of the thread.
struct Worker {
    path: PathBuf,
    settings: ShmSettings,
    control: Arc<Control>,
    next: Arc<NextAttachment>,
    /// The last warning in the log.
    last_warning: Option<String>,
}

impl Worker {
    fn run(mut self, mut socket: Socket) {
        let hour = Duration::from_secs(3600);
        while !self.control.is_stopping.load(Acquire) {
            sleep(&mut [readable(socket.fd()), readable(self.control.wake.fd())], hour);
            if matches!(socket.recv(false), Incoming::Empty) {
                continue;
            }
            let path = self.path.display();
            tracing::info!(%path, "the switch has gone: frames are lost until the next one");
            match self.reattach() {
                Some((new, attachment)) => {
                    socket = new;
                    self.next.put(attachment);
                }
                None => return,
            }
        }
    }

    /// Attaches to the next switch; `None` if the port is closed before.
    fn reattach(&mut self) -> Option<(Socket, Attachment)> {
        for attempt in 0_u32.. {
            if self.control.is_stopping.load(Acquire) {
                break;
            }
            let granted = attach::attach(&self.path, self.settings.station, Duration::ZERO);
            let joined = match granted {
                Ok(Some(grant)) => join(grant, &self.settings).map(Some),
                Ok(None) => Ok(None),
                Err(why) => Err(why),
            };
            match joined {
                Ok(Some(new)) => return Some(new),
                Ok(None) => {}
                Err(why) => self.warn_once(&why.to_string()),
            }
            let pause = if attempt < FAST_RETRIES { RETRY } else { RETRY_LATER };
            sleep(&mut [readable(self.control.wake.fd())], pause);
        }
        None
    }

    /// Logs a warning unless it repeats the last one.
    fn warn_once(&mut self, why: &str) {
        if self.last_warning.as_deref() != Some(why) {
            tracing::warn!("no switch for this process: {why}");
            self.last_warning = Some(why.to_owned());
        }
    }
}
