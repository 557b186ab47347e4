//! Fault injection: a port that wraps another and loses, duplicates, reorders, corrupts and delays
//! sent frames.
//!
//! Received frames are passed on unchanged: for faults in both directions, both ends wrap their
//! ports. All decisions follow from the seed and the order of calls. A frame's fate is drawn once:
//! a frame that the port below has no room for keeps it for the retry, so that a full ring does not
//! raise the loss rate.
//!
//! Frames held back lie in memory reserved at the start; when that is full, [`Tx::Full`].

use crate::clock::now_ns;
use crate::frame::{ETH_HDR_LEN, RxFrame, TxFrame};
use crate::port::{Port, PortCaps, PortCounters, PortGone, Presence, RxSink, Station, Tx};

/// Settings of a [`Fault`]. All probabilities are per frame, 0 to 1, default 0.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct FaultSettings {
    /// The frame is dropped.
    pub loss: f64,
    /// The frame is sent twice.
    pub dup: f64,
    /// The frame is held until one to three later ones have passed it, or 100 us have.
    pub reorder: f64,
    /// One to three bits behind the Ethernet addresses are flipped.
    pub corrupt: f64,
    /// Every frame is held for so many microseconds. Default 0.
    pub delay_us: u64,
    /// MTU limit; default that of the port below.
    pub mtu: Option<usize>,
    /// Frames that can be held at a time. Default 256; each costs a frame of address space.
    pub hold_count: usize,
    /// Seed of all random decisions. Default 1.
    pub seed: u64,
}

impl Default for FaultSettings {
    fn default() -> Self {
        Self {
            loss: 0.0,
            dup: 0.0,
            reorder: 0.0,
            corrupt: 0.0,
            delay_us: 0,
            mtu: None,
            hold_count: 256,
            seed: 1,
        }
    }
}

/// How long a reordered frame waits for others at most.
const REORDER_NS: u64 = 100_000;

/// See the module's documentation.
pub struct Fault {
    inner: Box<dyn Port>,
    caps: PortCaps,
    settings: FaultSettings,
    rng: u64,
    /// Drawn for a frame that the port below had no room for.
    fate: Option<Fate>,
    held: Vec<HeldFrame>,
    free: Vec<usize>,
    bytes: Vec<u8>,
    scratch: Vec<u8>,
    frame_max: usize,
    /// Frames passed on or dropped so far, by which reordered ones are released.
    passed: u64,
    own: PortCounters,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Fate {
    is_lost: bool,
    is_doubled: bool,
    /// Number of later frames that overtake it; 0: none.
    overtaken_by: u64,
    /// Bits to flip, as random numbers; 0: none.
    flips: [u64; 3],
}

#[derive(Clone, Copy)]
struct HeldFrame {
    due_ns: u64,
    /// Released when so many frames have passed, even before `due_ns`; `u64::MAX`: by time only.
    due_passed: u64,
    slot: usize,
    len: usize,
}

impl Fault {
    /// Wraps `inner`. The port's name is that of `inner` with `spec` before it.
    pub fn new(inner: Box<dyn Port>, settings: FaultSettings, spec: &str) -> Self {
        let mut caps = inner.caps().clone();
        caps.mtu = settings.mtu.map_or(caps.mtu, |mtu| mtu.min(caps.mtu));
        caps.name = format!("{spec}:{}", caps.name);
        let FaultSettings { loss, dup, reorder, corrupt, delay_us, .. } = settings;
        caps.lossless &= loss == 0.0 && dup == 0.0 && reorder == 0.0 && corrupt == 0.0;
        // A delayed frame was answered Sent and does not survive its sender.
        caps.lossless &= delay_us == 0;
        caps.gather = false;
        // Frames with faults must not take the near side.
        caps.near_mtu = 0;
        caps.rto_floor_ns += 2 * delay_us * 1000;
        let frame_max = ETH_HDR_LEN + caps.mtu;
        let hold_count = settings.hold_count.max(2);
        Self {
            inner,
            caps,
            settings,
            rng: splitmix(settings.seed).max(1),
            fate: None,
            held: Vec::with_capacity(hold_count),
            free: (0..hold_count).rev().collect(),
            bytes: vec![0; hold_count * frame_max],
            scratch: vec![0; frame_max],
            frame_max,
            passed: 0,
            own: PortCounters::default(),
        }
    }

    fn random(&mut self) -> u64 {
        self.rng ^= self.rng << 13;
        self.rng ^= self.rng >> 7;
        self.rng ^= self.rng << 17;
        self.rng.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    fn chance(&mut self, p: f64) -> bool {
        // 53 bits are what a double holds exactly.
        p > 0.0 && ((self.random() >> 11) as f64) < p * (1_u64 << 53) as f64
    }

    fn draw_fate(&mut self) -> Fate {
        let FaultSettings { loss, dup, reorder, corrupt, .. } = self.settings;
        let mut fate = Fate {
            is_lost: self.chance(loss),
            is_doubled: self.chance(dup),
            overtaken_by: 0,
            flips: [0; 3],
        };
        if self.chance(reorder) {
            fate.overtaken_by = 1 + self.random() % 3;
        }
        if self.chance(corrupt) {
            let count = 1 + self.random() % 3;
            for flip in &mut fate.flips[..count as usize] {
                *flip = self.random() | 1;
            }
        }
        fate
    }

    /// Applies `fate`. Frames that are changed or held are copied once more.
    fn apply(&mut self, frame: &TxFrame<'_>, fate: Fate) -> Result<Tx, PortGone> {
        if fate.is_lost {
            self.own.tx_dropped += 1;
            return Ok(Tx::Sent);
        }
        let copies = 1 + usize::from(fate.is_doubled);
        let is_held = self.settings.delay_us > 0 || fate.overtaken_by > 0;
        let is_changed = fate.flips[0] != 0;
        if !is_held && !is_changed && !fate.is_doubled {
            return self.inner.tx(frame);
        }
        if self.free.len() < copies {
            return Ok(Tx::Full);
        }
        let len = frame.copy_to(&mut self.scratch);
        for flip in fate.flips.into_iter().filter(|&flip| flip != 0) {
            // Not the MACs: a misdirected frame is another kind of fault.
            let bits = (len - 12) as u64 * 8;
            let at = (flip >> 8) % bits;
            self.scratch[12 + (at / 8) as usize] ^= 1 << (at % 8);
        }
        let mut sent = Tx::Sent;
        let mut left = copies;
        if !is_held {
            sent = self.inner.tx(&TxFrame::whole(&self.scratch[..len]))?;
            left = if sent == Tx::Sent { copies - 1 } else { 0 };
        }
        for _ in 0..left {
            self.hold(len, is_held.then_some(fate));
        }
        Ok(sent)
    }

    /// Holds the frame in `scratch` as its fate says, or without a fate until the next poll.
    fn hold(&mut self, len: usize, fate: Option<Fate>) {
        let slot = self.free.pop().expect("the caller saw room");
        self.bytes[slot * self.frame_max..][..len].copy_from_slice(&self.scratch[..len]);
        let overtaken_by = fate.map_or(0, |fate| fate.overtaken_by);
        let wait = if overtaken_by > 0 { REORDER_NS } else { 0 };
        let wait = wait + fate.map_or(0, |_| self.settings.delay_us * 1000);
        let due_passed = if overtaken_by > 0 { self.passed + 1 + overtaken_by } else { u64::MAX };
        self.held.push(HeldFrame { due_ns: now_ns() + wait, due_passed, slot, len });
    }

    /// Sends held frames that are due, oldest first.
    fn release_due(&mut self) -> Result<(), PortGone> {
        if self.held.is_empty() {
            return Ok(());
        }
        let now = now_ns();
        let mut i = 0;
        while i < self.held.len() {
            let h = self.held[i];
            let is_overtaken = self.settings.delay_us == 0 && self.passed >= h.due_passed;
            if now < h.due_ns && !is_overtaken {
                i += 1;
                continue;
            }
            let bytes = &self.bytes[h.slot * self.frame_max..][..h.len];
            match self.inner.tx(&TxFrame::whole(bytes))? {
                // Frames behind it wait too, so that delay alone does not reorder.
                Tx::Full => return Ok(()),
                Tx::Sent => {}
                Tx::NoRoute => self.own.tx_dropped += 1,
            }
            self.free.push(h.slot);
            self.held.remove(i);
        }
        Ok(())
    }
}

fn splitmix(seed: u64) -> u64 {
    let z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Port for Fault {
    fn caps(&self) -> &PortCaps {
        &self.caps
    }

    fn tx(&mut self, frame: &TxFrame<'_>) -> Result<Tx, PortGone> {
        let len = frame.len();
        assert!(frame.head.len() >= ETH_HDR_LEN && len <= self.frame_max, "frame of {len} bytes");
        self.release_due()?;
        let fate = match self.fate.take() {
            Some(fate) => fate,
            None => self.draw_fate(),
        };
        let sent = self.apply(frame, fate)?;
        match sent {
            Tx::Sent => self.passed += 1,
            Tx::Full => self.fate = Some(fate),
            Tx::NoRoute => {}
        }
        Ok(self.own.tried(sent, len))
    }

    fn flush(&mut self) -> Result<(), PortGone> {
        self.release_due()?;
        self.inner.flush()
    }

    fn rx_burst(&mut self, max: usize, sink: &mut dyn RxSink) -> Result<usize, PortGone> {
        if !self.held.is_empty() {
            self.release_due()?;
            self.inner.flush()?;
        }
        if self.inner.caps().near_mtu != 0 {
            return self.inner.rx_burst(max, &mut FarSink(sink));
        }
        self.inner.rx_burst(max, sink)
    }

    /// Frames of this port; drops are injected ones and those of the port below.
    fn counters(&self) -> PortCounters {
        let below = self.inner.counters();
        PortCounters {
            rx_frames: below.rx_frames,
            rx_bytes: below.rx_bytes,
            rx_dropped: below.rx_dropped,
            tx_dropped: self.own.tx_dropped + below.tx_dropped,
            ..self.own
        }
    }

    fn below(&self) -> Option<&dyn Port> {
        Some(&*self.inner)
    }

    fn presence(&mut self, station: Station) -> Presence {
        self.inner.presence(station)
    }

    /// Loss, duplicates and delay do not change a frame's bytes.
    fn damages(&self) -> bool {
        self.settings.corrupt > 0.0 || self.inner.damages()
    }

    fn next_deadline_ns(&self) -> Option<u64> {
        let own = self.held.iter().map(|h| h.due_ns).min();
        own.into_iter().chain(self.inner.next_deadline_ns()).min()
    }
}

/// Lends frames of near stations like those of far ones.
struct FarSink<'a>(&'a mut dyn RxSink);

impl RxSink for FarSink<'_> {
    fn prefetch(&mut self, frame: &RxFrame<'_>) {
        self.0.prefetch(&frame.as_far());
    }

    fn frame(&mut self, frame: &RxFrame<'_>) {
        self.0.frame(&frame.as_far());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::loopback::{Loopback, LoopbackSettings};

    const COUNT: u32 = 20_000;

    /// Sends `COUNT` numbered frames through a fault port and returns those that arrive.
    fn run(settings: FaultSettings) -> (Vec<Vec<u8>>, PortCounters, bool) {
        let mut ports = Loopback::segment(2, LoopbackSettings { mtu: 256, ring_count: 64 });
        let mut b = ports.pop().unwrap();
        let to = b.caps().station.mac;
        let mut a = Fault::new(Box::new(ports.pop().unwrap()), settings, "fault()");
        let mut got = Vec::new();
        let mut sink = |f: &RxFrame<'_>| {
            let mut bytes = vec![0; f.len()];
            assert!(f.copy_to(0, &mut bytes));
            got.push(bytes);
        };
        for i in 0..COUNT {
            let frame = [&to.0[..], &[0; 8], &i.to_be_bytes(), &[0x5a; 40]].concat();
            let mut tries = 0;
            while a.tx(&TxFrame::whole(&frame)) == Ok(Tx::Full) {
                tries += 1;
                if tries % 3 == 0 {
                    b.rx_burst(64, &mut sink).unwrap();
                }
            }
        }
        while a.next_deadline_ns().is_some() || b.rx_burst(64, &mut sink).unwrap() > 0 {
            a.rx_burst(1, &mut |_: &RxFrame<'_>| {}).unwrap();
            b.rx_burst(64, &mut sink).unwrap();
        }
        (got, a.counters(), a.caps().lossless)
    }

    fn serials(got: &[Vec<u8>]) -> Vec<u32> {
        got.iter().map(|f| u32::from_be_bytes([f[14], f[15], f[16], f[17]])).collect()
    }

    #[test]
    fn default_settings_inject_no_faults() {
        let (got, counters, lossless) = run(FaultSettings::default());
        assert!(lossless && counters.tx_dropped == 0 && counters.tx_full > 0);
        assert_eq!(serials(&got), (0..COUNT).collect::<Vec<_>>());
    }

    #[test]
    fn loss_is_as_frequent_as_asked_and_repeats_with_its_seed() {
        let settings = FaultSettings { loss: 0.05, ..FaultSettings::default() };
        let (got, counters, lossless) = run(settings);
        let lost = COUNT as usize - got.len();
        // Binomial, n = 20,000, p = 0.05: 1000 +- 31; a redraw per retry would lose three times
        // that.
        assert!(!lossless && (850..1150).contains(&lost), "{lost} lost");
        assert_eq!(counters.tx_dropped, lost as u64);
        assert_eq!(run(settings).0, got);
        assert_ne!(run(FaultSettings { seed: 2, ..settings }).0, got);
    }

    #[test]
    fn doubles_reorders_and_flips_are_seen_and_lose_nothing() {
        let settings = FaultSettings { dup: 0.1, ..FaultSettings::default() };
        let mut seen = serials(&run(settings).0);
        let extra = seen.len() - COUNT as usize;
        assert!((1800..2200).contains(&extra), "{extra} doubled");
        seen.sort_unstable();
        seen.dedup();
        assert_eq!(seen.len(), COUNT as usize);

        let settings = FaultSettings { reorder: 0.1, ..FaultSettings::default() };
        let mut seen = serials(&run(settings).0);
        let late = seen.windows(2).filter(|w| w[0] > w[1]).count();
        assert!((1000..2200).contains(&late), "{late} out of order");
        assert!(seen.iter().enumerate().all(|(i, &n)| n.abs_diff(i as u32) <= 64));
        seen.sort_unstable();
        assert_eq!(seen, (0..COUNT).collect::<Vec<_>>());

        assert!(!Fault::new(Box::new(Loopback::pair().0), settings, "fault()").damages());
        let settings = FaultSettings { corrupt: 0.1, ..FaultSettings::default() };
        assert!(Fault::new(Box::new(Loopback::pair().0), settings, "fault()").damages());
        let got = run(settings).0;
        assert_eq!(got.len(), COUNT as usize);
        let changed = got.iter().enumerate().filter(|(i, f)| {
            f[12..] != [&[0; 2], &(*i as u32).to_be_bytes()[..], &[0x5a; 40]].concat()
        });
        let changed = changed.count();
        assert!((1800..2200).contains(&changed), "{changed} changed");
        assert!(got.iter().all(|f| f[..12] == got[0][..12]), "addresses stay");
    }

    #[test]
    fn delay_keeps_order_and_takes_its_time() {
        let settings = FaultSettings { delay_us: 2000, ..FaultSettings::default() };
        let (mut a, mut b) = {
            let (a, b) = Loopback::pair();
            (Fault::new(Box::new(a), settings, "fault()"), b)
        };
        let frame = [&b.caps().station.mac.0[..], &[0; 60]].concat();
        let began = now_ns();
        assert_eq!(a.tx(&TxFrame::whole(&frame)), Ok(Tx::Sent));
        let due = a.next_deadline_ns().expect("a frame is held");
        assert!(due >= began + 2_000_000);
        let mut nothing = |_: &RxFrame<'_>| {};
        while b.rx_burst(1, &mut nothing).unwrap() == 0 {
            a.rx_burst(1, &mut nothing).unwrap();
        }
        assert!(now_ns() - began >= 2_000_000);
        assert_eq!(a.next_deadline_ns(), None);
        assert_eq!(serials(&run(settings).0), (0..COUNT).collect::<Vec<_>>());
    }
}
