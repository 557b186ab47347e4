//! A port without a fabric: the reference of the fabric on the same port.

use barewire_driver::frame::{ETHERTYPE, RxFrame, TxFrame};
use barewire_driver::open::open;
use barewire_driver::port::{Port, Tx};

use super::{LEN, Wire};

/// A port with only one other station, which receives every frame.
pub struct Raw {
    port: Box<dyn Port>,
    frame: [u8; LEN],
}

impl Raw {
    /// Opens the port of `spec`.
    ///
    /// # Errors
    /// Why the port does not open.
    pub fn open(spec: &str) -> Result<Self, String> {
        let mut frame = [0; LEN];
        frame[..6].fill(0xff);
        frame[6] = 2;
        frame[12..14].copy_from_slice(&ETHERTYPE.to_be_bytes());
        Ok(Self { port: open(spec).map_err(|e| e.to_string())?, frame })
    }
}

impl Wire for Raw {
    #[inline]
    fn send(&mut self) {
        while self.port.tx(&TxFrame::whole(&self.frame)) == Ok(Tx::Full) {}
        // The waiting side notices a port that is gone: no message arrives.
        let _ = self.port.flush();
    }

    #[inline]
    fn arrived(&mut self) -> bool {
        let mut whole = 0;
        let mut sink = |frame: &RxFrame<'_>| whole += usize::from(frame.len() == LEN);
        let _ = self.port.rx_burst(32, &mut sink);
        whole > 0
    }
}

/// A transport that is not available to this machine or user.
pub struct Absent;

impl Wire for Absent {
    fn send(&mut self) {}

    fn arrived(&mut self) -> bool {
        false
    }

    fn is_there(&self) -> bool {
        false
    }
}
