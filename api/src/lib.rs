//! libfabric's calls over plain Ethernet, as Rust.
//!
//! One method per `fi_` call, with its name (searching the documentation for `fi_tsend` finds
//! [`Endpoint::tsend`]); constants and error codes are libfabric's. The *safe API* takes buffers
//! by value and its completions give them back; the *raw API* ([`raw`]) takes addresses and is for
//! the C provider.
//!
//! ```no_run
//! use barewire::*;
//!
//! let hints = Info { caps: flags::Caps::TAGGED, ..Info::default() };
//! let info = getinfo(API_VERSION, None, None, flags::InfoFlags::empty(), Some(&hints))?.remove(0);
//! let fabric = fabric(&info.fabric_attr)?;
//! let domain = fabric.domain(&info)?;
//! let (cq, av) = (domain.cq_open(CqAttr::default())?, domain.av_open(AvAttr::default())?);
//! let ep = domain.endpoint(&info)?;
//! ep.bind_cq(&cq, flags::BindFlags::TRANSMIT | flags::BindFlags::RECV)?;
//! ep.bind_av(&av)?;
//! ep.enable()?;
//! let mut myself = [0];
//! av.insert(&[ep.getname()?], &mut myself)?;
//! ep.trecv(Buf::zeroed(64), myself[0], 7, 0, 1)?;
//! ep.tsend(Buf::from(&b"hello"[..]), myself[0], 7, 2)?;
//! let mut done = [Completion::default()];
//! loop {
//!     match cq.read(&mut done) {
//!         Ok(_) if done[0].op_context == 1 => break,
//!         Ok(_) | Err(Error::Again) => {}
//!         Err(_) => return Err(cq.readerr()?.err.into()),
//!     }
//! }
//! assert_eq!(done[0].bytes(), b"hello");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod addr;
pub mod atomic;
mod auth_check;
mod auth_key;
pub mod av;
pub mod buf;
mod certificate;
pub mod cm;
pub mod cntr;
pub mod coll;
pub mod cq;
mod deferred;
pub mod domain;
pub mod ep;
pub mod eq;
pub mod errno;
pub mod fabric;
mod file_watch;
pub mod flags;
mod hosts;
pub mod info;
mod inner;
mod key;
mod key_file;
mod key_log;
pub mod kfi;
mod lock;
pub mod mr;
pub mod msg;
pub mod multicast;
pub mod names;
mod notice;
mod own_thread;
mod random;
pub mod raw;
mod rcvthread;
pub mod rma;
pub mod sep;
pub mod settings;
pub mod stats;
pub mod tagged;
pub mod tclass;
#[cfg(test)]
mod tests_openssl;
#[cfg(test)]
mod tests_python;
#[cfg(test)]
mod tests_sleep;
pub mod wait;
mod who;
pub mod work;

pub use atomic::{AtomicAttr, AtomicKind, AtomicMsg, AtomicOp, Datatype, TypedOp};
pub use av::{Av, AvAttr, AvType, FI_ADDR_NOTAVAIL, resolve, rx_addr};
pub use barewire_dataplane::node::RmaIov;
pub use barewire_dataplane::types::{EpAddr, FI_ADDR_UNSPEC, FiAddr, ProvErrno};
pub use buf::{Buf, Bufs, Piece, PostError, SharedBuf};
pub use certificate::{CertFacts, CertFiles, cert_facts, check_fit};
pub use cm::{ConnRequest, PassiveEndpoint};
pub use cntr::{Cntr, CntrAttr, CntrEvents};
pub use coll::{AvSet, AvSetAttr, CollAttr, CollKind, FI_JOIN_COMPLETE, Mc, Role};
pub use cq::{Completion, CompletionError, Cq, CqAttr, CqFormat, WaitCond};
pub use domain::{Domain, Levels};
pub use ep::{Endpoint, EpCommon, opt};
pub use eq::{Eq, EqAttr, EqErr};
pub use errno::{Error, OpenError, Result, strerror};
pub use fabric::{Fabric, Waitable, fabric};
pub use info::{
    API_VERSION, AddrFormat, AuthKey, DomainAttr, EndpointAttr, EpType, FabricAttr, Info,
    ResourceMgmt, RxAttr, TxAttr, check_port, getinfo, getinfo_with, port_device, version,
};
pub use key::{key_file_len, keyring};
pub use mr::{Mr, MrAttr, MrCommon, RawMr, Shared};
pub use msg::{Msg, PostResult};
pub use multicast::{Group, GroupAddr};
pub use rma::{Remote, RmaMsg};
pub use sep::ScalableEndpoint;
pub use settings::{Idle, Peers, Progress, SealMode, Settings, Threading};
pub use tagged::TaggedMsg;
pub use wait::WaitObj;
