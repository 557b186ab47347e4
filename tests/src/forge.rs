//! Frames that nobody honest sent, for the suites that throw them at a node.

use barewire_dataplane::psn::Psn;
use barewire_dataplane::wire::{
    self, Base, Host, MsgOp, Op, OpenOp, ProbeOp, RstOp, RstReason, Ty, WhoOp,
};
use barewire_driver::frame::{RxFrame, address};
use barewire_driver::port::Station;

use crate::rng::Rng;

/// Makes them, from a seed.
#[derive(Debug)]
pub struct Forger {
    /// What is drawn comes from here.
    pub rng: Rng,
    /// Whom the frames are for.
    pub victim: Station,
    /// Who has a session with the victim.
    pub honest: Station,
    /// Who has none.
    pub third: Station,
    /// Frames have a checksum. Where they have none, a damaged copy of a real frame comes from the
    /// third station: from under the honest one's address it would be the real frame's equal.
    pub crc: bool,
    /// The endpoint that messages are for.
    pub ep: u16,
}

impl Forger {
    /// The next frame: noise, a copy of one of the `live` frames to the victim that is damaged or
    /// comes from a station without a session, or a whole one under a stolen address, of somebody
    /// who has to guess the names of the session. None is an undamaged OPEN: everybody may open a
    /// session.
    pub fn frame(&mut self, live: &[Vec<u8>]) -> Vec<u8> {
        loop {
            let frame = self.any(live);
            let opens = Base::parse(&RxFrame::new(&frame)).is_ok_and(|base| base.ty == Ty::Open);
            if !opens {
                return frame;
            }
        }
    }

    fn any(&mut self, live: &[Vec<u8>]) -> Vec<u8> {
        if self.rng.chance(0.1) {
            return self.guess();
        }
        if self.rng.chance(0.2) || live.is_empty() {
            return self.noise();
        }
        let r = &mut self.rng;
        let mut f = live[r.index(live.len())].clone();
        if r.chance(0.3) {
            set_source(&mut f, self.third);
            return f;
        }
        if !self.crc {
            set_source(&mut f, self.third);
        }
        // Up to three flipped bits are always found by the checksum.
        let from = if r.chance(0.5) { 14 } else { 14.max(f.len() - 8) };
        let at = from + r.index(f.len() - from);
        f[at] ^= 1 << r.below(8);
        if r.chance(0.3) {
            f.truncate(r.index(f.len()));
        }
        f
    }

    fn noise(&mut self) -> Vec<u8> {
        let r = &mut self.rng;
        let mut f: Vec<u8> = (0..r.range(0, 200)).map(|_| r.next() as u8).collect();
        if f.len() >= 16 && r.chance(0.8) {
            let src = r.pick(&[self.victim, self.honest, self.third]);
            address(&mut f, self.victim, src);
            f[12..14].copy_from_slice(&wire::ETHERTYPE.to_be_bytes());
            f[14] = wire::VERSION << 5 | (f[14] & 0x1f);
        }
        f
    }

    fn guess(&mut self) -> Vec<u8> {
        let r = &mut self.rng;
        let base = Base {
            dst: self.victim,
            src: self.honest,
            ty: Ty::Rst,
            ar: r.chance(0.5),
            rtx: false,
            ce: false,
            crc: self.crc,
            dst_sid: r.next() as u32 | 1 << 31,
            psn: Psn(r.next() as u32),
            cack: Psn(r.next() as u32),
            grant: r.next() as u16,
            plen: 0,
        };
        let rst = RstOp {
            echo_sid: r.next() as u32 | 1,
            echo_psn: Psn(r.next() as u32),
            life: wire::life_of(r.pick(&[2, 3])),
            victim_inc: r.pick(&[0, 1]),
            victim_epoch: r.next() as u32 | 1 << 20,
            reason: r.pick(&[RstReason::Closed, RstReason::UnknownSession, RstReason::Dead]),
            versions: wire::VERSIONS,
        };
        let probe = Op::Probe(ProbeOp { heard: r.pick(&[0, 256, 1500, u16::MAX]) });
        let who = Op::Who(WhoOp {
            nonce: r.next(),
            here: r.chance(0.5),
            host: Host::V4([10, 0, 0, r.below(4) as u8]),
            service: 1 + r.below(4) as u16,
            versions: wire::VERSIONS,
        });
        let msg = MsgOp { dst_ep: self.ep, src_ep: self.ep, ..MsgOp::default() };
        let op = r.pick(&[Op::Rst(rst), Op::Rst(rst), Op::Msg(msg), Op::Ping, probe, who]);
        wire::frame(&base, &op, &[])
    }
}

/// Makes a frame come from another station.
fn set_source(frame: &mut [u8], src: Station) {
    if let Some([dst, _]) = RxFrame::new(frame).stations() {
        address(frame, dst, src);
    }
}

/// Stations that [`open_of_nobody`] comes from: few enough that a bridge can learn them all.
const STATIONS: u64 = 200;

/// An OPEN for `victim` from a station that does not exist, with a cookie that nobody made or none,
/// and as long as what it announces or as short as can be. `target_inc` is the life that it names,
/// and `crc` whether frames have a checksum.
pub fn open_of_nobody(rng: &mut Rng, victim: Station, target_inc: u64, crc: bool) -> Vec<u8> {
    let base = Base {
        dst: victim,
        src: Station::at([2, 0xf0, 0, 0, 0, rng.below(STATIONS) as u8]),
        ty: Ty::Open,
        ar: false,
        rtx: false,
        ce: false,
        crc,
        dst_sid: 0,
        psn: Psn(rng.next() as u32),
        cack: Psn(0),
        grant: 0,
        plen: 0,
    };
    let op = OpenOp {
        sid: rng.next() as u32 | 1,
        epoch: rng.next() as u32 | 1,
        inc: rng.next() | 1,
        target_inc,
        max_frame: 1500,
        window: 256,
        grant: 16,
        cookie: if rng.chance(0.3) { rng.next() } else { 0 },
        ..OpenOp::default()
    };
    let mut bytes = wire::frame(&base, &Op::Open(op), &[]);
    let len = rng.pick(&[0, 0, 300, 1514]).max(bytes.len());
    bytes.resize(len, 0);
    bytes
}
