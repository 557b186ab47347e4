//! A port whose type is known where it is used.
//!
//! A message of a few bytes over shared memory costs some hundred instructions, and a call through
//! a table of functions, with a frame put together in memory to be described to it, a good part of
//! that. So who holds a port for long asks once whether it is the shared segment, whose functions
//! then become part of his own.

use std::any::Any;
use std::ops::{Deref, DerefMut};

use super::shm::ShmPort;
use crate::port::{Port, PortGone, RxSink};

/// Any port, or one of the segment in shared memory.
pub enum KnownPort {
    /// The segment.
    Shm(Box<ShmPort>),
    /// Another.
    Other(Box<dyn Port>),
}

impl From<Box<dyn Port>> for KnownPort {
    fn from(port: Box<dyn Port>) -> Self {
        let any: &dyn Any = &*port;
        if !any.is::<ShmPort>() {
            return Self::Other(port);
        }
        let any: Box<dyn Any> = port;
        Self::Shm(any.downcast().expect("its type was seen"))
    }
}

impl KnownPort {
    /// As [`Port::rx_burst`], with a sink of known type.
    ///
    /// # Errors
    /// As there.
    #[inline(always)]
    pub fn rx_burst(&mut self, max: usize, sink: &mut impl RxSink) -> Result<usize, PortGone> {
        match self {
            Self::Shm(port) => Ok(port.receive(max, sink)),
            Self::Other(port) => port.rx_burst(max, sink),
        }
    }
}

impl Deref for KnownPort {
    type Target = dyn Port;

    #[inline]
    fn deref(&self) -> &(dyn Port + 'static) {
        match self {
            Self::Shm(port) => &**port,
            Self::Other(port) => &**port,
        }
    }
}

impl DerefMut for KnownPort {
    #[inline]
    fn deref_mut(&mut self) -> &mut (dyn Port + 'static) {
        match self {
            Self::Shm(port) => &mut **port,
            Self::Other(port) => &mut **port,
        }
    }
}
