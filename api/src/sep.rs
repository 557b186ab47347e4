//! Scalable endpoints: several transmit and several receive contexts under one address
//! (fi_endpoint(3), "SCALABLE ENDPOINTS").
//!
//! A context is an [`Endpoint`], or a [`RawEndpoint`], that only sends or only receives. Peers
//! insert the one address of the scalable endpoint. What is sent to it arrives at receive context
//! 0; [`rx_addr`] names another one, in a vector made with
//! [`AvAttr::rx_ctx_bits`](crate::AvAttr::rx_ctx_bits). The sender of a message is the scalable
//! endpoint, whichever transmit context it left by.
//!
//! Naming a context that the target does not have is an error at the initiator: at once for an
//! index that no endpoint has (the 257th and higher), else when the target has refused the
//! operation.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use barewire_dataplane::node::{EpAttr, EpId, SepId, receive_caps, transmit_caps};
use barewire_dataplane::types::EpAddr;

use crate::av::Av;
#[cfg(doc)]
use crate::av::rx_addr;
use crate::domain::Domain;
use crate::ep::{Endpoint, EpCommon, Parent};
use crate::eq::{Eq, EqInner};
use crate::errno::{Error, Result};
use crate::flags::Caps;
pub use crate::info::CTX_MAX;
use crate::info::{EpType, Info, RxAttr, SHARED_CONTEXT, TxAttr, check_rx, check_tx, usual_sizes};
use crate::inner::DomainRef;
use crate::mr::MrCommon;
use crate::names::ServiceClaim;
use crate::raw::RawEndpoint;

/// A scalable endpoint (`struct fid_ep` of `fi_scalable_ep`). It sends and receives nothing itself.
pub struct ScalableEndpoint(pub(crate) Arc<SepInner>);

pub(crate) struct SepInner {
    pub(crate) dom: DomainRef,
    pub(crate) id: SepId,
    info: Info,
    /// The service that it serves.
    _service_claim: Option<ServiceClaim>,
    av: Mutex<Option<Av>>,
    eqs: Mutex<Vec<Arc<EqInner>>>,
    enabled: AtomicBool,
    /// Which transmit contexts are open. The node knows which receive contexts are.
    tx_open: Mutex<Vec<bool>>,
}

/// The link of a context to its scalable endpoint, which it keeps open.
struct Context {
    of: Arc<SepInner>,
    /// Index of a transmit context; `None` for a receive context.
    tx: Option<usize>,
}

impl Domain {
    /// Makes a scalable endpoint with `info.ep_attr.tx_ctx_cnt` and `rx_ctx_cnt` contexts, at most
    /// [`CTX_MAX`] each; 0 and [`SHARED_CONTEXT`] mean one.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: too many contexts, too few endpoint numbers after the requested one,
    ///   or a key that is not the domain's.
    /// - [`Error::OpNotSupp`]: another type than `FI_EP_RDM`.
    /// - [`Error::AddrInUse`]: the number of `info.src_addr`, or one of those after it, is taken.
    ///   [`Error::AddrNotAvail`]: `info.src_addr` is an address of another port.
    /// - [`Error::NoMem`]: the domain has no room for another endpoint.
    ///
    /// Source: fi_endpoint(3), "fi_scalable_ep".
    #[doc(alias = "fi_scalable_ep")]
    pub fn scalable_endpoint(&self, info: &Info) -> Result<ScalableEndpoint> {
        if !matches!(info.ep_attr.ep_type, EpType::Unspec | EpType::Rdm) {
            return Err(Error::OpNotSupp("endpoint type: a scalable endpoint is FI_EP_RDM"));
        }
        EpCommon::check(&self.dom, info)?;
        let count = |asked: usize| if asked == SHARED_CONTEXT { 1 } else { asked.max(1) };
        let (tx, rx) = (count(info.ep_attr.tx_ctx_cnt), count(info.ep_attr.rx_ctx_cnt));
        if tx > CTX_MAX {
            return Err(Error::Invalid("tx_ctx_cnt: 1 to 256"));
        }
        let number = info.source_number(&self.dom.caps)?;
        let service_claim = self.dom.claim_service(info)?;
        let mut core = self.dom.enter_control()?;
        let id = core.node().eps.sep_open(number, rx)?;
        if info.src_addr.is_some() {
            core.node().control().reach_by_name();
        }
        core.serve(service_claim.as_ref());
        drop(core);
        Ok(ScalableEndpoint(Arc::new(SepInner {
            dom: self.dom.clone(),
            id,
            info: info.clone(),
            _service_claim: service_claim,
            av: Mutex::default(),
            eqs: Mutex::default(),
            enabled: AtomicBool::new(false),
            tx_open: Mutex::new(vec![false; tx]),
        })))
    }
}

impl ScalableEndpoint {
    /// The attributes that a transmit context opened with `asked` gets. Values that `asked` leaves
    /// open are those of the scalable endpoint.
    ///
    /// # Errors
    /// [`Error::OpNotSupp`]: a capability that the scalable endpoint has not got.
    /// [`Error::BadFlags`]: a default flag that is none of transmit calls. [`Error::Invalid`]: more
    /// than `fi_getinfo` offers.
    pub fn tx_attr(&self, asked: Option<&TxAttr>) -> Result<TxAttr> {
        let info = &self.0.info;
        let asked = asked.unwrap_or(&info.tx_attr);
        check_tx(asked, &self.0.dom.settings)?;
        let usual = usual_sizes(&self.0.dom.settings).0;
        let size = [asked.size, info.tx_attr.size, usual].into_iter().find(|&n| n != 0);
        Ok(TxAttr {
            caps: transmit_caps(self.granted(asked.caps)?),
            op_flags: asked.op_flags,
            size: size.unwrap_or_default(),
            ..info.tx_attr.clone()
        })
    }

    /// The attributes of a receive context, as [`tx_attr`](Self::tx_attr) gives those of a transmit
    /// context.
    ///
    /// # Errors
    /// As there.
    pub fn rx_attr(&self, asked: Option<&RxAttr>) -> Result<RxAttr> {
        let info = &self.0.info;
        let asked = asked.unwrap_or(&info.rx_attr);
        check_rx(asked, &self.0.dom.settings)?;
        let usual = usual_sizes(&self.0.dom.settings).1;
        let size = [asked.size, info.rx_attr.size, usual].into_iter().find(|&n| n != 0);
        Ok(RxAttr {
            caps: receive_caps(self.granted(asked.caps)?),
            op_flags: asked.op_flags,
            size: size.unwrap_or_default(),
            ..info.rx_attr.clone()
        })
    }

    fn granted(&self, asked: Caps) -> Result<Caps> {
        let info = &self.0.info;
        if asked.is_empty() {
            return Ok(info.caps);
        }
        let all = info.caps | info.tx_attr.caps | info.rx_attr.caps;
        if crate::info::with_directions(all).contains(asked) {
            Ok(asked)
        } else {
            Err(Error::OpNotSupp("caps: beyond those of the scalable endpoint"))
        }
    }

    /// Opens transmit context `idx`. It needs a queue of its own for its sends; the address vector
    /// is the scalable endpoint's.
    ///
    /// # Errors
    /// - [`Error::Invalid`]: there are not as many. [`Error::Busy`]: it is open.
    /// - [`Error::NoMem`]: the domain has no room for another endpoint.
    ///
    /// Else as [`tx_attr`](Self::tx_attr).
    #[doc(alias = "fi_tx_context")]
    pub fn tx_context(&self, idx: usize, attr: Option<&TxAttr>) -> Result<Endpoint> {
        self.open_tx(idx, attr).map(Endpoint::of_common)
    }

    /// As [`tx_context`](Self::tx_context), of the raw API.
    ///
    /// # Errors
    /// As there.
    pub fn raw_tx_context(&self, idx: usize, attr: Option<&TxAttr>) -> Result<RawEndpoint> {
        self.open_tx(idx, attr).map(RawEndpoint::of_common)
    }

    /// Opens receive context `idx`. It needs a queue of its own for its receives; the address
    /// vector is the scalable endpoint's.
    ///
    /// # Errors
    /// As [`tx_context`](Self::tx_context).
    #[doc(alias = "fi_rx_context")]
    pub fn rx_context(&self, idx: usize, attr: Option<&RxAttr>) -> Result<Endpoint> {
        self.open_rx(idx, attr).map(Endpoint::of_common)
    }

    /// As [`rx_context`](Self::rx_context), of the raw API.
    ///
    /// # Errors
    /// As there.
    pub fn raw_rx_context(&self, idx: usize, attr: Option<&RxAttr>) -> Result<RawEndpoint> {
        self.open_rx(idx, attr).map(RawEndpoint::of_common)
    }

    fn open_tx(&self, idx: usize, attr: Option<&TxAttr>) -> Result<EpCommon> {
        let tx = self.tx_attr(attr)?;
        let it = &self.0;
        let mut open = it.tx_open.lock().unwrap_or_else(PoisonError::into_inner);
        match open.get_mut(idx) {
            None => Err(Error::Invalid("index: the scalable endpoint has fewer contexts")),
            Some(true) => Err(Error::Busy),
            Some(open) => {
                let attr = EpAttr { rx_size: 1, tx_size: tx.size, ..it.attr(tx.caps) };
                let attr = EpAttr { tx_op_flags: tx.op_flags, ..attr };
                let id = it.dom.enter_control()?.node().eps.sep_tx_open(it.id, attr)?;
                *open = true;
                Ok(self.context(id, &attr, Some(idx)))
            }
        }
    }

    fn open_rx(&self, idx: usize, attr: Option<&RxAttr>) -> Result<EpCommon> {
        let rx = self.rx_attr(attr)?;
        let it = &self.0;
        let attr = EpAttr { tx_size: 1, rx_size: rx.size, ..it.attr(rx.caps) };
        let attr = EpAttr { rx_op_flags: rx.op_flags, ..attr };
        let id = it.dom.enter_control()?.node().eps.sep_rx_open(it.id, idx, attr)?;
        Ok(self.context(id, &attr, None))
    }

    fn context(&self, id: EpId, attr: &EpAttr, tx: Option<usize>) -> EpCommon {
        let context = Context { of: Arc::clone(&self.0), tx };
        EpCommon::context(&self.0.dom, id, attr, Box::new(context))
    }

    /// Binds the address vector of all contexts (`fi_scalable_ep_bind`), before they are enabled.
    ///
    /// # Errors
    /// [`Error::Invalid`]: it is of another domain, or there is one. [`Error::OpBadState`]: the
    /// endpoint is enabled.
    #[doc(alias = "fi_scalable_ep_bind")]
    pub fn bind_av(&self, av: &Av) -> Result<()> {
        if self.0.dom.name() != av.0.dom.name() {
            return Err(Error::Invalid("bind: the object is of another domain"));
        }
        if self.0.enabled.load(Ordering::Relaxed) {
            return Err(Error::OpBadState);
        }
        let mut bound = self.0.av.lock().unwrap_or_else(PoisonError::into_inner);
        if bound.is_some() {
            return Err(Error::Invalid("an address vector is bound"));
        }
        *bound = Some(Av(Arc::clone(&av.0)));
        Ok(())
    }

    /// Binds an event queue, which gets an error event if the port is lost.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    #[doc(alias = "fi_scalable_ep_bind")]
    pub fn bind_eq(&self, eq: &Eq) -> Result<()> {
        self.0.dom.bind_domain_eq(&eq.0)?;
        let mut eqs = self.0.eqs.lock().unwrap_or_else(PoisonError::into_inner);
        eqs.push(Arc::clone(&eq.0));
        Ok(())
    }

    /// Enables the scalable endpoint. The contexts, which send and receive, are enabled one by one,
    /// before or after.
    ///
    /// # Errors
    /// [`Error::NoAv`]: no address vector is bound. [`Error::OpBadState`]: the endpoint is already
    /// enabled.
    #[doc(alias = "fi_enable")]
    pub fn enable(&self) -> Result<()> {
        drop(self.0.dom.enter_control()?);
        if self.0.av.lock().unwrap_or_else(PoisonError::into_inner).is_none() {
            return Err(Error::NoAv);
        }
        if self.0.enabled.swap(true, Ordering::Relaxed) { Err(Error::OpBadState) } else { Ok(()) }
    }

    /// The address of the endpoint and of all its contexts, for peers to insert.
    ///
    /// # Errors
    /// [`Error::OpBadState`] as for every call.
    #[doc(alias = "fi_getname")]
    pub fn getname(&self) -> Result<EpAddr> {
        self.0.addr()
    }

    /// Closes the endpoint.
    ///
    /// # Errors
    /// [`Error::Busy`]: a context is open. The endpoint is given back.
    #[doc(alias = "fi_close")]
    pub fn close(self) -> std::result::Result<(), (Error, Self)> {
        if Arc::strong_count(&self.0) > 1 { Err((Error::Busy, self)) } else { Ok(()) }
    }
}

impl MrCommon {
    /// As [`bind_ep`](Self::bind_ep), to all receive contexts of a scalable endpoint.
    ///
    /// # Errors
    /// As there.
    #[doc(alias = "fi_mr_bind")]
    pub fn bind_sep(&self, sep: &ScalableEndpoint) -> Result<()> {
        if !Arc::ptr_eq(self.dom.arc(), sep.0.dom.arc()) {
            return Err(Error::Invalid("the endpoint is of another domain"));
        }
        self.dom.enter_control()?.node().responder().mr_bind_sep(self.id, sep.0.id)
    }
}

impl SepInner {
    /// The attributes that all contexts have in common.
    fn attr(&self, caps: Caps) -> EpAttr {
        let buffered_recv = self.info.mode.contains(crate::flags::Mode::BUFFERED_RECV);
        EpAttr { number: None, caps, buffered_recv, ..EpAttr::default() }
    }

    fn addr(&self) -> Result<EpAddr> {
        self.dom.enter_control()?.node().objects().sep_addr(self.id)
    }
}

impl Parent for Context {
    fn addr(&self) -> Result<EpAddr> {
        self.of.addr()
    }

    fn av(&self) -> Option<Av> {
        let bound = self.of.av.lock().unwrap_or_else(PoisonError::into_inner);
        bound.as_ref().map(|av| Av(Arc::clone(&av.0)))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        let mut open = self.of.tx_open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(open) = self.tx.and_then(|idx| open.get_mut(idx)) {
            *open = false;
        }
    }
}

impl Drop for SepInner {
    fn drop(&mut self) {
        let Ok(mut core) = self.dom.lock.enter_to_close() else { return };
        core.engine.send_held();
        if let Err(e) = core.node().eps.sep_close(self.id) {
            tracing::error!("closing a scalable endpoint: {e}");
        }
    }
}
