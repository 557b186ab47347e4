//! Reattachment of a station: the thread that keeps the connection to its switch.
//!
//! When the switch ends, the kernel closes its end of the connection. The thread, which sleeps
//! until then, asks at the same socket until a switch answers, of this build or another. The thread
//! joins the segment of the new switch, or takes the connection itself where segments have another
//! layout, and stores the [`Attachment`] for the port to take. The new switch gets nothing but the
//! address: it has to trust no state of the old one. Frames in the old segment or connection are
//! lost, as on a wire. A process of the switch's own user stays in its segment, which has a name,
//! unless it was replaced.

use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::attach::{self, Grant, Request, Way};
use super::relayed::{Connection, RelayedPort};
use crate::backend::shm::{FileId, MTU, MTU_MAX, ShmPort, ShmSettings, Uplink, WakeSocket};
use crate::backend::{self, readable, sleep};
use crate::error::OpenError;
use crate::own_thread::without_signals;
use crate::port::{MTU_MIN, Port, Station};

/// Pause between two attempts to reach a switch: for the first [`FAST_RETRIES`], and after them.
const RETRY: Duration = Duration::from_millis(2);
const RETRY_LATER: Duration = Duration::from_millis(50);
const FAST_RETRIES: u32 = 500;

/// The way to a switch.
pub(super) struct Attachment {
    pub(super) link: Link,
    pub(super) bell: Bell,
    pub(super) station: Station,
    pub(super) uplink: Uplink,
}

/// Where frames to and from the switch pass.
#[expect(clippy::large_enum_variant, reason = "the large one is the usual one")]
pub(super) enum Link {
    /// Through a segment.
    Segment(ShmPort),
    /// Through the connection.
    Relayed(RelayedPort),
}

/// What a station sleeps on.
pub(super) enum Bell {
    Segment(WakeSocket),
    Relayed(Arc<Connection>),
}

impl Attachment {
    /// As a member of a segment.
    ///
    /// # Errors
    /// Those of making a socket to sleep on.
    pub(super) fn in_segment(port: ShmPort, uplink: Uplink) -> Result<Self, OpenError> {
        let (bell, station) = (Bell::Segment(port.wake_socket()?), port.caps().station);
        Ok(Self { link: Link::Segment(port), bell, station, uplink })
    }

    fn relayed(connection: &Arc<Connection>, at: Station, uplink: Uplink, mtu: usize) -> Self {
        tracing::warn!(
            station = %at,
            "the switch is of a build with another segment layout: frames pass a socket, slower"
        );
        let mtu = mtu.min(uplink.mtu as usize).clamp(MTU_MIN, MTU_MAX);
        let link = Link::Relayed(RelayedPort::new(Arc::clone(connection), mtu));
        Self { link, bell: Bell::Relayed(Arc::clone(connection)), station: at, uplink }
    }
}

/// Mailbox of one attachment from the thread to the port.
pub(super) struct NextAttachment {
    is_ready: AtomicBool,
    slot: Mutex<Option<Attachment>>,
}

impl NextAttachment {
    /// An empty mailbox.
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
    /// Attaches to a switch by `request`, with segments that `settings` describe, and starts the
    /// thread. `None` without a switch, as for [`attach::attach`].
    ///
    /// # Errors
    /// Those of attaching and joining.
    pub(super) fn open(
        request: Request,
        settings: &ShmSettings,
        patience: Duration,
    ) -> Result<Option<(Attachment, Arc<NextAttachment>, Self)>, OpenError> {
        let Some(grant) = attach::attach(&request, patience)? else {
            return Ok(None);
        };
        let mut membership = Membership { settings: settings.clone(), named: None };
        let (connection, attachment) = membership.take(grant)?;
        let Some(attachment) = attachment else { return Ok(None) };
        let request = Request { station: Some(attachment.station), ..request };
        let (next, handle) = Self::spawn(request, membership, Some(connection))?;
        Ok(Some((attachment, next, handle)))
    }

    /// Starts the thread for `port`, a member of the segment that `settings` name. It attaches to
    /// the switch when there is one.
    ///
    /// # Errors
    /// Those of starting a thread.
    pub(super) fn of_member(
        request: Request,
        settings: &ShmSettings,
        port: &ShmPort,
    ) -> Result<(Arc<NextAttachment>, Self), OpenError> {
        let station = Some(port.caps().station);
        let membership = Membership { settings: settings.clone(), named: port.file_id() };
        Self::spawn(Request { station, ..request }, membership, None)
    }

    fn spawn(
        request: Request,
        mut membership: Membership,
        connection: Option<Arc<Connection>>,
    ) -> Result<(Arc<NextAttachment>, Self), OpenError> {
        let path = request.path.clone();
        let hint = "; raise the limits on open files and threads: ulimit -n 65536 -u 65536";
        let os = |source| OpenError::os("cannot watch", &path, source, hint);
        let wake = backend::WakeEvent::new().map_err(os)?;
        let control = Arc::new(Control { is_stopping: AtomicBool::new(false), wake });
        let next = NextAttachment::empty();
        membership.settings.station = request.station;
        let (next_of_worker, control_of_worker) = (Arc::clone(&next), Arc::clone(&control));
        let worker = Worker {
            request,
            membership,
            control: control_of_worker,
            next: next_of_worker,
            last_warning: None,
        };
        let named = std::thread::Builder::new().name("barewire-switch".to_owned());
        let thread = without_signals(|| named.spawn(move || worker.run(connection))).map_err(os)?;
        Ok((next, Self { control, thread: Some(thread), pid: std::process::id() }))
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

/// How the port reaches the switch, and how it would join a segment.
struct Membership {
    settings: ShmSettings,
    /// The file of the named segment that the port is a member of.
    named: Option<FileId>,
}

impl Membership {
    /// Takes what a switch granted. No attachment if the port is a member of the segment already.
    fn take(&mut self, grant: Grant) -> Result<(Arc<Connection>, Option<Attachment>), OpenError> {
        let Grant { socket, way } = grant;
        let (connection, settings) = (Connection::new(socket), self.settings.clone());
        let (attachment, named) = match way {
            Way::Named if self.named.is_some() && self.named == settings.file_id() => {
                return Ok((connection, None));
            }
            Way::Named => {
                let (port, uplink) = ShmPort::open_leaf(&settings)?;
                let named = port.file_id();
                (Attachment::in_segment(port, uplink)?, named)
            }
            Way::Segment(file, station) => {
                let settings = ShmSettings { station: Some(station), ..settings };
                let (port, uplink) = ShmPort::open_leaf_of(file, &settings)?;
                (Attachment::in_segment(port, uplink)?, None)
            }
            Way::Relayed(station, uplink) => {
                let mtu = settings.mtu.unwrap_or(MTU);
                (Attachment::relayed(&connection, station, uplink, mtu), None)
            }
        };
        self.named = named;
        Ok((connection, Some(attachment)))
    }
}

/// State of the thread.
struct Worker {
    request: Request,
    membership: Membership,
    control: Arc<Control>,
    next: Arc<NextAttachment>,
    /// The last warning in the log.
    last_warning: Option<String>,
}

impl Worker {
    fn run(mut self, mut connection: Option<Arc<Connection>>) {
        let hour = Duration::from_secs(3600);
        while !self.control.is_stopping.load(Acquire) {
            if let Some(connection) = &connection {
                // Its end alone: frames are the port's.
                let end = libc::pollfd { events: 0, ..readable(connection.socket.fd()) };
                let mut fds = [end, readable(self.control.wake.fd())];
                sleep(&mut fds, hour);
                if fds[0].revents == 0 {
                    continue;
                }
                connection.set_ended();
                let path = self.request.path.display();
                tracing::info!(%path, "the switch has gone: frames are lost until the next one");
            }
            connection = self.reattach();
            if connection.is_none() {
                return;
            }
        }
    }

    /// Attaches to the next switch; `None` if the port is closed before.
    fn reattach(&mut self) -> Option<Arc<Connection>> {
        for attempt in 0_u32.. {
            if self.control.is_stopping.load(Acquire) {
                break;
            }
            let granted = attach::attach(&self.request, Duration::ZERO);
            let taken = granted
                .and_then(|grant| grant.map(|grant| self.membership.take(grant)).transpose());
            match taken {
                Ok(Some((connection, attachment))) => {
                    attachment.into_iter().for_each(|new| self.next.put(new));
                    return Some(connection);
                }
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
