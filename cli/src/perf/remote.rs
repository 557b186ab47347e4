//! One-sided operations of a measurement: their posting and verification at the client, and the
//! registered memory at the server.

use std::time::Instant;

use barewire::flags::{Access, BindFlags};
use barewire::{
    AtomicOp, Buf, Cntr, CntrAttr, Datatype, Domain, Endpoint, FiAddr, Mr, MrAttr, PostResult,
    Remote, TypedOp,
};

use super::control::{Mode, Run};
use super::pattern;
use crate::fail::Fail;

/// Bytes of the words that atomic operations work on.
const WORD: usize = 8;

impl Mode {
    /// Whether the server only registers memory.
    pub(super) fn is_one_sided(self) -> bool {
        !matches!(self, Self::PingPong | Self::Stream)
    }

    /// Names of the mode and of one operation.
    pub(super) fn names(self) -> (&'static str, &'static str) {
        match self {
            Self::PingPong => ("pingpong", "messages"),
            Self::Stream => ("stream", "messages"),
            Self::Write => ("write", "writes"),
            Self::Read => ("read", "reads"),
            Self::Fadd => ("fadd", "fetch-and-adds"),
            Self::Cswap => ("cswap", "compare-and-swaps"),
        }
    }
}

/// The server's memory, at the client.
pub(super) struct Target {
    run: Run,
    to: Remote,
    /// Number of the last operation of each slot.
    last: Vec<Option<u64>>,
    /// Expected word of each slot, for compare-and-swap.
    words: Vec<u64>,
    /// Number of wrong results.
    pub(super) wrong: u64,
}

impl Target {
    pub(super) fn new(run: Run, dest: FiAddr, key: u64) -> Self {
        let slots = run.window as usize;
        let (last, words) = (vec![None; slots], vec![0; slots]);
        Self { run, to: Remote { dest, addr: 0, key }, last, words, wrong: 0 }
    }

    /// The remote memory of `slot`.
    fn at(&self, slot: usize) -> Remote {
        let each = if self.run.mode == Mode::Fadd { 0 } else { self.run.size };
        Remote { addr: slot as u64 * each, ..self.to }
    }

    /// Posts operation `number` from or to `buf`.
    pub(super) fn post(
        &mut self,
        ep: &Endpoint,
        mut buf: Buf,
        slot: usize,
        number: u64,
        context: u64,
    ) -> PostResult {
        const SUM: TypedOp = TypedOp::new(AtomicOp::Sum, Datatype::Uint64);
        const CSWAP: TypedOp = TypedOp::new(AtomicOp::Cswap, Datatype::Uint64);
        let to = self.at(slot);
        let posted = match self.run.mode {
            Mode::Read => ep.read(buf, to, context),
            Mode::Fadd => ep.fetch_atomic(SUM, &1_u64.to_le_bytes(), buf, to, context),
            Mode::Cswap => {
                let is = self.words[slot];
                let (old, new) = (is.to_le_bytes(), (is + 1).to_le_bytes());
                ep.compare_atomic(CSWAP, &new, &old, buf, to, context)
            }
            Mode::Write | Mode::PingPong | Mode::Stream => {
                if self.run.verify {
                    pattern::fill(number, &mut buf);
                }
                ep.write(buf, to, context)
            }
        };
        if posted.is_ok() {
            self.last[slot] = Some(number);
        }
        posted
    }

    /// Handles the completion of the operation of `slot`, with its buffer `buf`.
    pub(super) fn ended(&mut self, slot: usize, buf: &[u8]) {
        let word = || buf.first_chunk().map(|b| u64::from_le_bytes(*b));
        let right = match self.run.mode {
            Mode::Read => !self.run.verify || pattern::holds(slot as u64, buf),
            // There is one initiator, so operations are executed in the order of posting.
            Mode::Fadd => !self.run.verify || word() == self.last[slot],
            Mode::Cswap => {
                let found = word() == Some(self.words[slot]);
                self.words[slot] += 1;
                found
            }
            Mode::Write | Mode::PingPong | Mode::Stream => true,
        };
        self.wrong += u64::from(!right);
    }

    /// Slots whose last write has to be verified, and the number of that write.
    pub(super) fn to_compare(&self) -> Vec<(usize, u64)> {
        if self.run.mode != Mode::Write || !self.run.verify {
            return Vec::new();
        }
        let used = self.last.iter().enumerate();
        used.filter_map(|(slot, number)| Some((slot, (*number)?))).collect()
    }

    /// Posts the read that verifies `slot`.
    pub(super) fn read_back(
        &self,
        ep: &Endpoint,
        buf: Buf,
        slot: usize,
        context: u64,
    ) -> PostResult {
        ep.read(buf, self.at(slot), context)
    }
}

/// Registered memory of a server for one run.
pub(super) struct LentRegion {
    mr: Mr,
    /// Counts the client's operations.
    cntr: Cntr,
    seen: u64,
    since: Instant,
}

impl LentRegion {
    /// Registers the memory of `run`.
    ///
    /// # Errors
    /// The run requests more memory than allowed, or the domain has no room.
    pub(super) fn new(domain: &Domain, run: &Run) -> Result<Self, Fail> {
        let size = usize::try_from(run.size).map_err(Fail::new)?.max(WORD);
        let slots = run.window.clamp(1, 512) as usize;
        let bytes = size.checked_mul(slots).filter(|bytes| *bytes <= LENT_MAX);
        let bytes = bytes.ok_or_else(|| Fail::new("the client asks for too much memory"))?;
        let mut buf = Buf::zeroed(bytes);
        if run.mode == Mode::Read {
            for slot in 0..slots {
                pattern::fill(slot as u64, &mut buf[slot * size..][..run.size as usize]);
            }
        }
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let attr = MrAttr { access, ..MrAttr::default() };
        let mr = domain.mr_reg(buf, &attr).map_err(Fail::new)?;
        let cntr = domain.cntr_open(CntrAttr::default()).map_err(Fail::new)?;
        let both = BindFlags::REMOTE_READ | BindFlags::REMOTE_WRITE;
        mr.bind_cntr(&cntr, both).map_err(Fail::new)?;
        Ok(Self { mr, cntr, seen: 0, since: Instant::now() })
    }

    pub(super) fn key(&self) -> u64 {
        self.mr.key()
    }

    /// Since when the client has made no operation.
    pub(super) fn untouched_since(&mut self) -> Result<Instant, Fail> {
        let count = self.cntr.read().map_err(Fail::new)?;
        if count != self.seen {
            (self.seen, self.since) = (count, Instant::now());
        }
        Ok(self.since)
    }
}

/// Most memory that one run may have: two buffers of the longest size, as in the other modes.
const LENT_MAX: usize = 16 << 30;
