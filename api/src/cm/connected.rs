//! What makes an endpoint a connected one.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Instant;

use crate::av::{Av, AvAttr};
use crate::errno::Result;
use crate::info::{ConnRequest, EpType, Info};
use crate::inner::{Core, DomainRef};

/// What a connected endpoint has besides.
pub(crate) struct Connected {
    /// For the peer alone.
    pub(super) av: Av,
    pub(super) request: Option<ConnRequest>,
    pub(super) fid: AtomicU64,
    /// The number of its connection; 0 before there is one.
    pub(super) number: AtomicU32,
}

impl Connected {
    /// That of an endpoint which is opened with `info`, if its type is `FI_EP_MSG`.
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

    /// Ends the connection, if there is one.
    pub(crate) fn close(&self, core: &mut Core) {
        let number = self.number.load(Ordering::Relaxed);
        if let Some((cm, mut io)) = core.cm() {
            cm.close(&mut io, number);
        }
    }
}

/// Turns the loop until connection sides have said what they have to, at most as long as a silent
/// peer is taken for alive.
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
