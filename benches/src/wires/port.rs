//! A port without a fabric: what the fabric on that port is measured against.

use barewire_driver::frame::{ETHERTYPE, RxFrame, TxFrame};
use barewire_driver::open::open;
use barewire_driver::port::{Port, Tx};

use super::{LEN, Wire};

/// A port whose only other station hears every frame.
pub struct Raw {
    port: Box<dyn Port>,
    frame: [u8; LEN],
}

impl Raw {
    /// Opens the port that `spec` names.
    ///
    /// # Errors
    /// Why it does not open.
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
        // A port that has gone is seen by the one who waits: nothing comes.
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

/// Something that this machine or this user has not got.
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
