//! Writes and reads over a real segment, and whether they took the fast path.

use std::time::Instant;

use barewire_dataplane::flags::{Caps, MrAccess, OpFlags};
use barewire_dataplane::node::{
    EpAttr, FastCall, FastRead, FastWrite, MrReq, ReadReq, RmaList, WriteReq,
};
use barewire_dataplane::proto::atomic::Sharing;
use barewire_dataplane::wire::{RespOp, WriteOp};
use barewire_driver::backend::shm::ShmSettings;
use barewire_driver::frame::ETH_HDR_LEN;
use barewire_driver::mem::IoBuf;

use crate::forged::Station;
use crate::supervisor::{PATIENCE, Segment};
use crate::worker::pattern;

/// What a read of the fast path asks for at most.
const READ_MAX: usize = 4096;

/// Where the bytes are in a region, and how much of it and of a buffer is behind them.
const GUARD: usize = 64;

/// What guards hold.
const CANARY: u8 = 0xc5;

/// Memory with guards, and another handle to look at it.
struct Guarded {
    look: IoBuf,
    len: usize,
}

impl Guarded {
    /// And the memory between the guards.
    fn new(len: usize) -> (Self, IoBuf) {
        let (whole, look) = IoBuf::leaked_pair(&vec![CANARY; len + 2 * GUARD]);
        (Self { look, len }, whole.piece(GUARD, len))
    }

    /// What lies behind the first guard, if no more of it was touched than `bytes` bytes.
    fn bytes(&self, bytes: usize) -> Vec<u8> {
        let mut all = vec![0; self.len + 2 * GUARD];
        self.look.read_at(0, &mut all);
        let touched = GUARD..GUARD + bytes;
        let other = all.iter().enumerate().find(|(at, b)| !touched.contains(at) && **b != CANARY);
        assert_eq!(other, None, "written outside of {bytes} bytes");
        all[touched].to_vec()
    }
}

/// What went on at both ends until an operation had its outcome.
#[derive(Debug, PartialEq, Eq)]
struct Took {
    /// It left in the call that posted it, on the fast path.
    posted_short: bool,
    /// Its answer or acknowledgement left while it was read, not with what a turn sends.
    answered_short: bool,
    /// Frames that either side sent.
    frames: [u64; 2],
}

struct Pair {
    a: Station,
    b: Station,
    key: u64,
    region: Guarded,
}

impl Pair {
    fn new(settings: &ShmSettings, region_len: usize) -> Self {
        let caps = Caps::MSG | Caps::TAGGED | Caps::RMA;
        let attr = || EpAttr { caps, ..EpAttr::default() };
        let [mut a, mut b] = [11, 22].map(|n| Station::join_as(settings, n, attr()));
        a.knows(&b);
        let (region, buf) = Guarded::new(region_len);
        let access = MrAccess::REMOTE_READ | MrAccess::REMOTE_WRITE;
        let (virt_addr, requested_key, ep) = (false, Some(5), None);
        let sharing = Sharing::Single;
        let req = MrReq { buf, access, requested_key, virt_addr, ep, sharing };
        let node = b.engine.node_mut();
        let mr = node.responder().mr_reg(req).unwrap();
        let key = node.mrs.key(mr).unwrap();
        Self { a, b, key, region }
    }

    /// Posts with `short`, else with `long`, and carries on until it has completed and nobody has
    /// anything to send.
    fn run(
        &mut self,
        short: impl FnOnce(&mut Station) -> bool,
        long: impl FnOnce(&mut Station),
    ) -> Took {
        let before = self.sent();
        let posted_short = short(&mut self.a);
        if !posted_short {
            long(&mut self.a);
        }
        let (mut completed, mut answered_short, start) = (false, false, Instant::now());
        while !completed || !self.is_quiet() {
            let counts = |of: &Station| {
                let counters = of.engine.node().counters();
                counters.rx_frames + counters.tx_frames
            };
            let (at, moved) = (counts(&self.b), self.b.engine.turn().unwrap());
            // A turn counts what it takes and what it sends, and not what leaves meanwhile.
            answered_short |= counts(&self.b) - at > moved as u64;
            completed |= self.a.completed();
            assert!(start.elapsed() < PATIENCE, "no outcome");
        }
        let after = self.sent();
        Took { posted_short, answered_short, frames: [0, 1].map(|i| after[i] - before[i]) }
    }

    fn sent(&self) -> [u64; 2] {
        [&self.a, &self.b].map(|of| of.engine.node().counters().tx_frames)
    }

    fn is_quiet(&self) -> bool {
        !self.a.engine.node().has_due() && !self.b.engine.node().has_due()
    }

    fn write(&mut self, bytes: &[u8]) -> Took {
        let (dest, key) = (self.a.peer, self.key);
        let rma = || RmaList::one(0, bytes.len() as u64, key);
        let (context, flags, no_completion) = (1, OpFlags::empty(), false);
        let buf = IoBuf::leaked(bytes);
        let again = buf.again();
        self.run(
            |a| {
                let range = rma().as_slice()[0];
                let call = FastCall { dest, range, context, flags, no_completion };
                a.engine.try_write(a.ep, &mut FastWrite { buf: &buf, call })
            },
            |a| {
                let (buf, rma, data) = (again, rma(), 0);
                let req = WriteReq { buf, dest, rma, data, context, flags, no_completion };
                a.engine.post_write(a.ep, req).unwrap();
            },
        )
    }

    fn read(&mut self, mut buf: IoBuf) -> Took {
        let (dest, key, len) = (self.a.peer, self.key, buf.len() as u64);
        let rma = || RmaList::one(0, len, key);
        let (context, flags, no_completion) = (2, OpFlags::empty(), false);
        let again = buf.again();
        self.run(
            |a| {
                let range = rma().as_slice()[0];
                let call = FastCall { dest, range, context, flags, no_completion };
                a.engine.try_read(a.ep, &mut FastRead { buf: &mut buf, call })
            },
            |a| {
                let req = ReadReq { buf: again, dest, rma: rma(), context, flags };
                a.engine.post_read(a.ep, req).unwrap();
            },
        )
    }
}

/// Goal: a write of one frame, and a read of up to 4 KiB that one frame answers, take the fast path
/// at both ends, in one frame there and one back, and others do not; either way every byte arrives
/// and none beside. Method: lengths around every bound, on a segment with frames of 64 KiB and on
/// one with small ones, between two nodes on one thread.
#[test]
fn writes_and_reads_take_the_short_way() {
    for mtu in [None, Some(1050)] {
        let segment = Segment::new("short");
        let settings = ShmSettings { mtu, ..ShmSettings::named(&segment.0) };
        let mut pair = Pair::new(&settings, 5000);
        let frame = pair.a.engine.caps().mtu + ETH_HDR_LEN;
        let (write_max, read_max) = (frame - WriteOp::HEAD, READ_MAX.min(frame - RespOp::HEAD));
        let mut lens = vec![1, 8, 80, 81, 128, 129, 1000, 4095, 4096, 4097, 5000];
        let bounds = [write_max, write_max + 1, read_max, read_max + 1];
        lens.extend(bounds.into_iter().filter(|&len| len <= 5000));
        // The session and what each side remembers of the other, and rings that are long by then:
        // in a short one every thirtieth frame or so goes the other way.
        for _ in 0..1000 {
            pair.write(&pattern(8, 1));
            pair.read(Guarded::new(8).1);
        }
        let mut before = 8;
        for len in lens {
            let sent = pattern(len, len as u64);
            let took = pair.write(&sent);
            before = before.max(len);
            assert!(pair.region.bytes(before)[..len] == sent, "{len} bytes were written changed");
            check("write", len, write_max, &took);

            let (got, buf) = Guarded::new(len);
            let took = pair.read(buf);
            assert!(got.bytes(len) == sent, "{len} bytes were read changed");
            check("read", len, read_max, &took);
        }
    }
}

fn check(what: &str, len: usize, max: usize, took: &Took) {
    let short = len <= max;
    let of = format!("a {what} of {len} bytes, at most {max} short: {took:?}");
    assert_eq!(took.posted_short, short, "{of}");
    if short {
        assert_eq!((took.answered_short, took.frames), (true, [1, 1]), "{of}");
    }
}
