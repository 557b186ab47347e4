//! State of a connected endpoint (`FI_EP_MSG`).

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use crate::av::{Av, AvAttr};
use crate::errno::Result;
use crate::info::{ConnRequest, EpType, Info};
use crate::inner::{Core, DomainRef};

/// State of a connected endpoint, besides that of every endpoint.
pub(crate) struct Connected {
    /// Address vector of the peer alone.
    pub(super) av: Av,
    pub(super) request: Option<ConnRequest>,
    pub(super) fid: AtomicU64,
    /// The number of its connection; 0 before there is one.
    pub(super) number: AtomicU32,
}

impl Connected {
    /// The state of an endpoint that is opened with `info`, if its type is `FI_EP_MSG`.
    pub(crate) fn of(dom: &DomainRef, info: &Info) -> Result<Option<Self>> {
        if info.ep_attr.ep_type != EpType::Msg {
            return Ok(None);
        }
        let av = Av::open(dom, AvAttr { count: 1, ..AvAttr::default() })?;
        let request = info.handle.clone();
        Ok(Some(Self { av, request, fid: AtomicU64::new(0), number: AtomicU32::new(0) }))
    }

    pub(crate) fn av(&self) -> &Av {
        &self.av
    }

    /// Ends the connection, if the endpoint has one.
    pub(crate) fn close(&self, core: &mut Core) {
        let number = self.number.load(Ordering::Relaxed);
        if let Some((cm, mut io)) = core.cm() {
            cm.close(&mut io, number);
        }
    }
}

/// Turns the loop until the final messages of the connection side have left, at most for T_dead.
pub(crate) fn linger(dom: &DomainRef) {
    let end = Instant::now() + dom.settings.t_dead;
    while Instant::now() < end {
        let Ok(mut core) = dom.enter_control() else { return };
        if !core.cm().is_some_and(|(cm, _)| cm.is_busy()) {
            return;
        }
        core.turn_if_manual(dom);
        drop(core);
        std::thread::yield_now();
    }
}
