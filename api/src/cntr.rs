//! Counters (fi_cntr(3)): numbers of completed operations or transferred bytes, without an entry
//! for each.

use std::os::fd::RawFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

pub use barewire_dataplane::node::CntrEvents;
use barewire_dataplane::node::CntrId;

use crate::errno::{Error, Result};
use crate::inner::{Core, DomainRef};
use crate::wait::{Target, WaitObj, timeout_of};

/// Attributes of a counter (`struct fi_cntr_attr`).
#[derive(Clone, Copy, Debug)]
pub struct CntrAttr {
    /// What the counter counts: successful operations, or their bytes. Default
    /// [`CntrEvents::Comp`].
    pub events: CntrEvents,
    /// Wait object of the counter. Default `FI_WAIT_UNSPEC`.
    pub wait_obj: WaitObj,
}

impl Default for CntrAttr {
    fn default() -> Self {
        Self { events: CntrEvents::Comp, wait_obj: WaitObj::Unspec }
    }
}

pub(crate) struct CntrInner {
    pub(crate) dom: DomainRef,
    pub(crate) id: CntrId,
    wait_obj: WaitObj,
    watch: Option<usize>,
    /// The error count that the application has read or got from a wait.
    told: AtomicU64,
}

/// A counter (`struct fid_cntr`): of operations, or of the bytes that they transferred
/// ([`CntrEvents`]). Failed operations are counted separately, one by one in either case.
///
/// Counted bytes are those of a sent or received message, those that a one-sided operation wrote or
/// read (at both ends), and those of an atomic operation's elements. A byte counter counts a
/// collective call as 0. Operations are counted when they have ended, with two exceptions: a target
/// counts the bytes of a read as they arrive at the initiator, and a region's counter counts the
/// bytes of a write as they are written.
///
/// Reading it turns the loop of a domain with manual progress. It wraps at 2^64.
pub struct Cntr(pub(crate) Arc<CntrInner>);

impl Cntr {
    pub(crate) fn open(dom: &DomainRef, attr: CntrAttr) -> Result<Self> {
        let waits = attr.wait_obj.waits()?;
        if attr.wait_obj == WaitObj::Fd {
            dom.prepare_wait(attr.wait_obj)?;
        }
        let mut core = dom.enter_control()?;
        let id = core.node().cntrs.open(attr.events)?;
        let mut watch = None;
        if waits {
            match core.watch.open(Target::Cntr(id), attr.wait_obj == WaitObj::Fd) {
                Ok(idx) => watch = Some(idx),
                Err(e) => {
                    core.node().objects().cntr_close(id)?;
                    return Err(e);
                }
            }
        }
        drop(core);
        let told = AtomicU64::new(0);
        let inner = CntrInner { dom: dom.clone(), id, wait_obj: attr.wait_obj, watch, told };
        Ok(Self(Arc::new(inner)))
    }

    /// The number of operations that succeeded, or of their bytes.
    ///
    /// # Errors
    /// [`Error::OpBadState`]: the domain is closed to this caller.
    #[doc(alias = "fi_cntr_read")]
    pub fn read(&self) -> Result<u64> {
        let mut core = self.0.dom.enter()?;
        core.turn_if_manual(&self.0.dom);
        core.node().cntrs.read(self.0.id)
    }

    /// The number of operations that failed.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    #[doc(alias = "fi_cntr_readerr")]
    pub fn readerr(&self) -> Result<u64> {
        let mut core = self.0.dom.enter()?;
        core.turn_if_manual(&self.0.dom);
        let failed = core.node().cntrs.readerr(self.0.id)?;
        self.0.told.store(failed, Ordering::Relaxed);
        Ok(failed)
    }

    /// Adds `value` to the number that [`read`](Self::read) returns.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    #[doc(alias = "fi_cntr_add")]
    pub fn add(&self, value: u64) -> Result<()> {
        self.change(|core, id| core.node().cntrs.add(id, value))
    }

    /// Adds `value` to the failures.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    #[doc(alias = "fi_cntr_adderr")]
    pub fn adderr(&self, value: u64) -> Result<()> {
        self.change(|core, id| core.node().cntrs.adderr(id, value))
    }

    /// Sets the number that [`read`](Self::read) returns to `value`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    #[doc(alias = "fi_cntr_set")]
    pub fn set(&self, value: u64) -> Result<()> {
        self.change(|core, id| core.node().cntrs.set(id, value))
    }

    /// Sets the failures to `value`.
    ///
    /// # Errors
    /// As [`read`](Self::read).
    #[doc(alias = "fi_cntr_seterr")]
    pub fn seterr(&self, value: u64) -> Result<()> {
        self.0.told.store(value, Ordering::Relaxed);
        self.change(|core, id| core.node().cntrs.seterr(id, value))
    }

    fn change(&self, f: impl FnOnce(&mut Core, CntrId) -> Result<()>) -> Result<()> {
        let mut core = self.0.dom.enter()?;
        f(&mut core, self.0.id)?;
        if core.deferred.any() {
            core.release();
        }
        core.posted(&self.0.dom);
        Ok(())
    }

    /// Sleeps until the number that [`read`](Self::read) returns has reached `threshold`, at most
    /// `timeout_ms` milliseconds (negative: for ever).
    ///
    /// # Errors
    /// - [`Error::TimedOut`]: the threshold was not reached in time.
    /// - [`Error::Avail`]: the error count has changed since [`readerr`](Self::readerr) or an
    ///   earlier wait returned it, also if it changed before the call.
    /// - [`Error::NoSys`]: the counter was opened with `FI_WAIT_NONE`.
    ///
    /// Source: fi_cntr(3), "fi_cntr_wait".
    #[doc(alias = "fi_cntr_wait")]
    pub fn wait(&self, threshold: u64, timeout_ms: i32) -> Result<()> {
        let CntrInner { dom, id, watch, told, .. } = &*self.0;
        let Some(idx) = *watch else { return Err(Error::NoSys) };
        let errors = told.load(Ordering::Relaxed);
        let attempt = |core: &mut Core| {
            core.turn_if_manual(dom);
            match (core.node().cntrs.read(*id), core.node().cntrs.readerr(*id)) {
                (Ok(value), _) if value >= threshold => Some(Ok(())),
                (Ok(_), Ok(now)) if now == errors => None,
                (Ok(_), Ok(now)) => {
                    told.store(now, Ordering::Relaxed);
                    Some(Err(Error::Avail))
                }
                (Err(e), _) | (_, Err(e)) => Some(Err(e)),
            }
        };
        let want = |_| (threshold.saturating_sub(1), errors);
        dom.wait_for(idx, timeout_of(timeout_ms), attempt, want)?.unwrap_or(Err(Error::TimedOut))
    }

    /// The eventfd of a counter opened with `FI_WAIT_FD` (`FI_GETWAIT`).
    ///
    /// # Errors
    /// [`Error::NoSys`]: the counter was opened with another wait object.
    pub fn wait_fd(&self) -> Result<RawFd> {
        let CntrInner { dom, watch, wait_obj, .. } = &*self.0;
        let idx = watch.filter(|_| *wait_obj == WaitObj::Fd).ok_or(Error::NoSys)?;
        dom.enter_control()?.watch.fd(idx).ok_or(Error::NoSys)
    }

    pub(crate) fn trywait(&self) -> Result<()> {
        let CntrInner { dom, watch, .. } = &*self.0;
        let Some(idx) = *watch else { return Err(Error::NoSys) };
        let mut core = dom.enter()?;
        core.turn_if_manual(dom);
        let Core { engine, watch, .. } = &mut *core;
        let changed = watch.pending(idx, engine.node());
        // Unlike an entry of a queue, a change is reported once.
        watch.clear_fd(idx, engine.node());
        if changed { Err(Error::Again) } else { Ok(()) }
    }

    /// Closes the counter.
    ///
    /// # Errors
    /// [`Error::Busy`]: an endpoint is bound to the counter, or deferred work waits for it or will
    /// be counted by it. The counter is given back.
    #[doc(alias = "fi_close")]
    pub fn close(self) -> std::result::Result<(), (Error, Self)> {
        let id = self.0.id;
        let used = self.0.dom.enter_control().is_ok_and(|mut core| {
            core.deferred.uses(id) || core.node().objects().cntr_in_use(id) == Ok(true)
        });
        if used || Arc::strong_count(&self.0) > 1 { Err((Error::Busy, self)) } else { Ok(()) }
    }
}

impl Drop for CntrInner {
    fn drop(&mut self) {
        let Ok(mut core) = self.dom.lock.enter_to_close() else { return };
        if let Some(idx) = self.watch {
            core.watch.close(idx);
        }
        if let Err(e) = core.node().objects().cntr_close(self.id) {
            tracing::error!("closing a counter: {e}");
        }
    }
}
