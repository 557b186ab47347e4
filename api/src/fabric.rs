//! The fabric object (fi_fabric(3)), and how ports of its domains are opened.

use barewire_driver::open::{open_in_node, with_mark};
use barewire_driver::port::Port;

use crate::cntr::Cntr;
use crate::cq::Cq;
use crate::domain::Domain;
use crate::eq::{Eq, EqAttr};
use crate::errno::{Error, OpenError, Result, open_error};
use crate::info::{FABRIC_NAME, FabricAttr, Info, PROV_NAME};
use crate::lock::Entry;
use crate::names::Names;
use crate::raw::RawCq;
pub use crate::settings::DEFAULT_PORT;
use crate::settings::{Settings, Threading};
use crate::tclass;

/// What to do when another domain has the port that a source address names.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum AddrInUsePolicy {
    /// Open another port: only an endpoint that requests the same address fails, later.
    UseOther,
    /// Fail with [`Error::AddrInUse`].
    Fail,
}

/// Opens the port of a domain.
pub(crate) fn open_port(
    info: &Info,
    settings: &Settings,
    in_use: AddrInUsePolicy,
) -> std::result::Result<Box<dyn Port>, OpenError> {
    let name = info.domain_attr.name.as_deref().or(settings.port.as_deref());
    let name = name.unwrap_or(DEFAULT_PORT);
    let class = tclass::of_domain(info.domain_attr.tclass, info.tx_attr.tclass);
    let marked = tclass::mark_of(class).map(|mark| with_mark(name, mark)).transpose();
    let marked = marked.map_err(open_error)?;
    let name = marked.as_deref().unwrap_or(name);
    // Frames through shared memory are not sealed, so they cannot be told apart by tenant.
    let near = settings.near && !info.domain_attr.av_auth_key;
    let open = |name: &str| open_in_node(name, near).map_err(open_error);
    let source = info.source().ok().flatten();
    let named = source.and_then(|source| Names::of(name).port_for(name, source));
    match named.map(|named| open(&named)) {
        Some(Err(e)) if e.error == Error::AddrInUse && in_use == AddrInUsePolicy::UseOther => {
            tracing::info!("the domain gets another address: {e}");
            open(name)
        }
        Some(opened) => opened,
        None => open(name),
    }
}

/// A fabric (`struct fid_fabric`), in which domains and event queues are opened.
#[derive(Clone, Debug)]
pub struct Fabric {
    attr: FabricAttr,
}

/// Opens the fabric.
///
/// # Errors
/// [`Error::NoData`]: `attr` names another fabric or provider.
///
/// Source: fi_fabric(3).
#[doc(alias = "fi_fabric")]
pub fn fabric(attr: &FabricAttr) -> Result<Fabric> {
    let is = |hint: &Option<String>, ours: &str| hint.as_deref().is_none_or(|h| h == ours);
    if !is(&attr.name, FABRIC_NAME) || !is(&attr.prov_name, PROV_NAME) {
        return Err(Error::NoData);
    }
    Ok(Fabric { attr: attr.clone() })
}

/// An object that [`Fabric::trywait`] checks.
#[derive(Clone, Copy)]
pub enum Waitable<'a> {
    /// A completion queue.
    Cq(&'a Cq),
    /// A completion queue of the raw API.
    RawCq(&'a RawCq),
    /// A counter.
    Cntr(&'a Cntr),
    /// An event queue.
    Eq(&'a Eq),
}

impl Fabric {
    /// The attributes that the fabric was opened with.
    pub fn attr(&self) -> &FabricAttr {
        &self.attr
    }

    /// Opens the domain of `info` ([`crate::getinfo`]) on its port, with the settings of the
    /// environment.
    ///
    /// With `FI_THREAD_DOMAIN` and manual progress the domain takes no lock. It then belongs to the
    /// thread that uses it first, and calls from others return `FI_EOPBADSTATE`, until
    /// [`Domain::disown`].
    ///
    /// # Errors
    /// [`OpenError`]: an error code, and a line that says what is missing. Nothing was opened.
    ///
    /// Source: fi_domain(3).
    #[doc(alias = "fi_domain")]
    pub fn domain(&self, info: &Info) -> std::result::Result<Domain, OpenError> {
        let settings = Settings::from_env()
            .map_err(|e| OpenError::new(Error::Invalid("environment"), e.to_string()))?;
        self.domain_with(info, settings)
    }

    /// As [`domain`](Self::domain), with given settings.
    ///
    /// # Errors
    /// As [`domain`](Self::domain).
    pub fn domain_with(
        &self,
        info: &Info,
        settings: Settings,
    ) -> std::result::Result<Domain, OpenError> {
        let port = open_port(info, &settings, AddrInUsePolicy::UseOther)?;
        self.domain_on(info, settings, port)
    }

    /// As [`domain_with`](Self::domain_with), on a port that is open already.
    ///
    /// # Errors
    /// As [`domain`](Self::domain).
    pub fn domain_on(
        &self,
        info: &Info,
        settings: Settings,
        port: Box<dyn Port>,
    ) -> std::result::Result<Domain, OpenError> {
        let entry = match info.domain_attr.threading {
            Threading::Domain => Entry::Owned,
            _ => Entry::Shared,
        };
        Domain::open(info, settings, port, entry)
    }

    /// As [`domain_on`](Self::domain_on), for a program of several threads that keeps the promise
    /// of `FI_THREAD_DOMAIN` itself, such as a C application. Where the kernel has no
    /// membarrier(2), before Linux 4.14, the domain takes its lock all the same.
    ///
    /// # Errors
    /// As [`domain`](Self::domain).
    pub fn domain_serial(
        &self,
        info: &Info,
        settings: Settings,
        port: Box<dyn Port>,
        promise: crate::raw::SerialPromise,
    ) -> std::result::Result<Domain, OpenError> {
        let entry = match info.domain_attr.threading {
            Threading::Domain => promise.entry(),
            _ => Entry::Shared,
        };
        Domain::open(info, settings, port, entry)
    }

    /// As [`domain_serial`](Self::domain_serial), on the port that `info` names.
    ///
    /// # Errors
    /// As [`domain`](Self::domain).
    pub fn domain_serial_with(
        &self,
        info: &Info,
        settings: Settings,
        promise: crate::raw::SerialPromise,
    ) -> std::result::Result<Domain, OpenError> {
        let port = open_port(info, &settings, AddrInUsePolicy::UseOther)?;
        self.domain_serial(info, settings, port, promise)
    }

    /// Opens an event queue.
    ///
    /// # Errors
    /// [`Error::NoSys`]: the wait object is not supported. [`Error::NoMem`]: the process has no
    /// descriptor left.
    #[doc(alias = "fi_eq_open")]
    pub fn eq_open(&self, attr: EqAttr) -> Result<Eq> {
        Eq::open(attr)
    }

    /// Checks that the calling thread may sleep on the descriptors of all these objects: each
    /// object is empty, and its descriptor becomes readable when it no longer is.
    ///
    /// # Errors
    /// - [`Error::Again`]: an object has an entry. Read it instead of sleeping.
    /// - [`Error::NoSys`]: an object has no wait object.
    ///
    /// Source: fi_poll(3), "fi_trywait".
    #[doc(alias = "fi_trywait")]
    pub fn trywait(&self, objects: &[Waitable<'_>]) -> Result<()> {
        for object in objects {
            match object {
                Waitable::Cq(cq) => cq.0.trywait()?,
                Waitable::RawCq(cq) => cq.0.trywait()?,
                Waitable::Cntr(cntr) => cntr.trywait()?,
                Waitable::Eq(eq) if !eq.0.is_empty() => return Err(Error::Again),
                Waitable::Eq(_) => {}
            }
        }
        Ok(())
    }
}
