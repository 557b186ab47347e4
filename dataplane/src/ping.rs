//! The state machine behind `barewire ping`: tests a station, whatever its process does. Without
//! IO, like a node: frames and time in, frames and a report out.
//!
//! Uses the session layer only. The OPEN in answer contains incarnation, version and frame length.
//! PINGs of the resulting session are padded to the tested lengths (every node ignores bytes behind
//! the packet). They show which frame lengths arrive and the round trip until the ACK. Between a
//! length that passes and one that does not, a binary search finds the longest. An RST ends the
//! session, so no state remains. The test uses no endpoint of the station and ends none of its
//! other sessions: a node that has an open session with another process of this address answers
//! with a PING of that session.
//!
//! The return path is tested with short frames only. If the station has a key, all frames are
//! sealed as between nodes (`ping/seal.rs`). Unauthenticated frames then neither end nor delay the
//! test: they decide the verdict only if no answer arrived.

mod seal;

use std::collections::BTreeSet;

use barewire_driver::frame::{ETH_HDR_LEN, RxFrame};
use barewire_driver::port::{Station, Tx};

use self::seal::Seal;
use crate::psn::Psn;
use crate::seal::Keyring;
use crate::types::{INCARNATION_MAX, Instant};
use crate::wire::{self, Base, Op, OpenOp, RstOp, RstReason, Ty};

/// OPENs that are sent within the timeout before the station counts as unreachable.
const OPENS: u64 = 4;

/// Tries per length of the binary search: one loss must not decide.
const TRIES: u32 = 3;

/// Least Ethernet frame without its FCS, bytes.
const FRAME_MIN: usize = 60;

/// Parameters of a ping.
#[derive(Clone, Copy, Debug)]
pub struct PingSettings {
    /// Source station of the pings.
    pub me: Station,
    /// Target station.
    pub target: Station,
    /// Expected incarnation of the target, 0 for any.
    pub incarnation: u64,
    /// Random number, not 0.
    pub seed: u64,
    /// Whether frames carry a checksum: set if the port may damage frames.
    pub crc: bool,
    /// Whether the target is near, on a port that knows ([`Port::is_near`]).
    ///
    /// [`Port::is_near`]: barewire_driver::port::Port::is_near
    pub near: bool,
    /// Most bytes behind the Ethernet header that the port carries.
    pub mtu: usize,
    /// Pings of each length.
    pub count: u32,
    /// Interval between pings, ns.
    pub interval_ns: u64,
    /// Timeout of an answer, ns.
    pub timeout_ns: u64,
}

/// Result of a ping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All pings of all lengths were answered.
    Answered,
    /// Some pings of every length were lost.
    Loss,
    /// Frames up to this many bytes, Ethernet header included, are answered and longer ones are
    /// not.
    OnlyShort(usize),
    /// The station speaks this version of the protocol.
    OtherVersion(u8),
    /// The station has another incarnation than the address names.
    OtherIncarnation,
    /// The station accepts sessions only from peers that name its incarnation, and the address
    /// names none.
    Unnamed,
    /// The port knows that no station has the address.
    NoRoute,
    /// Several nodes answer to the address.
    Duplicate,
    /// The station has a session with another process that uses the source address of the pings.
    AddressInUse,
    /// The station has another key, or refuses the certificate.
    OtherKey,
    /// Only one of the two stations has a key.
    NoKey,
    /// The station answered the OPEN but no ping.
    OnlyOpenAnswered,
    /// No frame came back.
    NoAnswer,
}

/// Results of the pings of one length.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LengthReport {
    /// Bytes of the frame, Ethernet header included.
    pub frame_len: usize,
    /// Pings sent.
    pub sent: u32,
    /// Round trips of the pings that were answered in time, ns, ascending.
    pub rtts_ns: Vec<u64>,
}

impl LengthReport {
    /// The round trip that `per_mille` of the answered pings did not exceed; `None` if none was
    /// answered.
    pub fn percentile(&self, per_mille: usize) -> Option<u64> {
        let last = self.rtts_ns.len().checked_sub(1)?;
        Some(self.rtts_ns[(last * per_mille).div_ceil(1000)])
    }
}

/// All results of a ping.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PingReport {
    /// The summary.
    pub verdict: Verdict,
    /// Incarnations that answered.
    pub incarnations: Vec<u64>,
    /// Most bytes behind the Ethernet header that the station accepts, 0 if unknown.
    pub max_frame: usize,
    /// Minor version of the protocol that the station speaks.
    pub minor: u16,
    /// Time from the first OPEN to its answer, ns; 0 if none came.
    pub open_ns: u64,
    /// Results by length, the shortest first.
    pub lengths: Vec<LengthReport>,
    /// Frames that the port had no room for, or that it could not deliver.
    pub not_sent: u32,
}

/// What refusals and frames of other versions tell of the station.
#[derive(Clone, Copy, Debug, Default)]
struct StationReport {
    /// The protocol version of the station.
    other_version: Option<u8>,
    /// The station has another incarnation.
    other_life: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Opening,
    Pinging,
    /// The binary search: the longest frame that passes is at least the first and below the second
    /// length, bytes.
    Bisecting(usize, usize),
    Closing,
    Done,
}

/// The state machine of one ping.
#[derive(Debug)]
pub struct Ping {
    settings: PingSettings,
    seal: Option<Seal>,
    /// Reason of a refusal of the key. Such a refusal is not authenticated, so it ends nothing.
    key_refusal: Option<Verdict>,
    state: State,
    begun: Option<Instant>,
    /// Time of the next frame.
    due: Instant,
    /// The outstanding ping: send time and index of its length.
    outstanding: Option<(Instant, usize)>,
    /// Tries so far of the current length of the binary search.
    tries: u32,
    /// Our name of the session; and the OPEN of the peer with its name, incarnation and epoch.
    sid: u32,
    peer: Option<OpenOp>,
    /// The peer's first PSN: what our packets acknowledge.
    cack: Psn,
    no_route: bool,
    /// The cookie that the station requests in an OPEN.
    cookie: u64,
    /// Reports of the station; not authenticated where frames are not sealed.
    reported: StationReport,
    /// Reports in the station's name without authentication, where frames are sealed.
    unproven: StationReport,
    address_in_use: bool,
    lives: BTreeSet<u64>,
    longest: Option<usize>,
    report: PingReport,
}

impl Ping {
    /// A ping that is ready to be polled.
    ///
    /// # Panics
    /// If `seed` is 0 or `count` is.
    pub fn new(settings: PingSettings) -> Self {
        assert!(settings.seed != 0 && settings.count > 0);
        Self {
            settings,
            seal: None,
            key_refusal: None,
            state: State::Opening,
            begun: None,
            due: Instant(0),
            outstanding: None,
            tries: 0,
            // A session slot so high that no node has assigned it.
            sid: settings.seed as u32 | 1 << 31,
            peer: None,
            cack: Psn(0),
            no_route: false,
            cookie: 0,
            reported: StationReport::default(),
            unproven: StationReport::default(),
            address_in_use: false,
            lives: BTreeSet::new(),
            longest: None,
            report: PingReport {
                verdict: Verdict::NoAnswer,
                incarnations: Vec::new(),
                max_frame: 0,
                minor: 0,
                open_ns: 0,
                lengths: Vec::new(),
                not_sent: 0,
            },
        }
    }

    /// [`new`](Self::new) with frames that are sealed under the first key of `ring` or its
    /// certificate. `aes`: this processor has AES instructions.
    ///
    /// # Panics
    /// As [`new`](Self::new); and if an OPEN with the certificate of `ring`
    /// ([`Keyring::open_len`]) does not fit a frame of `mtu`.
    pub fn sealed(settings: PingSettings, ring: Keyring, aes: bool) -> Self {
        // The tag of a sealed frame replaces the checksum.
        let settings = PingSettings { crc: false, ..settings };
        let seal = Seal::new(ring, aes);
        assert!(seal.open_len() <= settings.mtu + ETH_HDR_LEN, "the OPEN fits a frame");
        Self { seal: Some(seal), ..Self::new(settings) }
    }

    /// Whether the test is complete.
    pub fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Time of the next [`poll`](Self::poll) if no frame arrives.
    pub fn next_deadline(&self) -> Instant {
        self.due
    }

    /// The next frame to send, if one is due; report the outcome with [`sent`](Self::sent).
    pub fn poll(&mut self, now: Instant) -> Option<Vec<u8>> {
        let frame = self.poll_clear(now)?;
        match &mut self.seal {
            Some(seal) => seal.seal(frame),
            None => Some(frame),
        }
    }

    fn poll_clear(&mut self, now: Instant) -> Option<Vec<u8>> {
        if now < self.due {
            return None;
        }
        let begun = *self.begun.get_or_insert(now);
        match self.state {
            State::Opening => {
                if now.since(begun) >= self.settings.timeout_ns || self.is_refused() {
                    self.state = State::Closing;
                    return self.poll_clear(now);
                }
                self.due = now + (self.settings.timeout_ns / OPENS).max(1);
                Some(self.open())
            }
            State::Pinging => self.poll_ping(now),
            State::Bisecting(passes, fails) => self.poll_bisecting(now, passes, fails),
            State::Closing => {
                self.state = State::Done;
                self.peer.map(|peer| self.close(&peer))
            }
            State::Done => {
                self.due = Instant(u64::MAX);
                None
            }
        }
    }

    /// Reports the outcome of the frame that [`poll`](Self::poll) returned last.
    pub fn sent(&mut self, tx: Tx) {
        self.report.not_sent += u32::from(tx != Tx::Sent);
        if tx == Tx::NoRoute && self.state == State::Opening {
            self.no_route = true;
            self.due = Instant(0);
        }
    }

    /// Handles a received frame.
    pub fn on_frame(&mut self, now: Instant, frame: &RxFrame<'_>) {
        let Some(raw) = Base::parse_raw(frame) else { return };
        if raw.src != self.settings.target || raw.dst != self.settings.me {
            return;
        }
        if raw.version != wire::VERSION {
            self.note(now, self.seal.is_none(), |report| report.other_version = Some(raw.version));
            return;
        }
        let opened = self.seal.as_mut().map(|seal| seal.open(frame));
        match &opened {
            None => self.on_plain_frame(now, frame),
            Some(Some(bytes)) => self.on_plain_frame(now, &RxFrame::new(bytes)),
            Some(None) => self.on_key_refusal(frame),
        }
        if self.seal.as_ref().is_some_and(Seal::refuses) {
            self.key_refusal.get_or_insert(Verdict::OtherKey);
        }
    }

    /// Handles an unsealed frame where frames are sealed: it may be a refusal of the key.
    fn on_key_refusal(&mut self, frame: &RxFrame<'_>) {
        let Ok(base) = Base::parse(frame) else { return };
        if let Ok(Op::Rst(op)) = Op::parse(frame, &base) {
            self.note_key_refusal(&op);
        }
    }

    fn note_key_refusal(&mut self, op: &RstOp) {
        if op.reason.is_of_key() && op.victim_inc == self.life() {
            let other = op.reason == RstReason::OtherKey;
            self.key_refusal = Some(if other { Verdict::OtherKey } else { Verdict::NoKey });
        }
    }

    /// Handles a frame after its seal was opened.
    fn on_plain_frame(&mut self, now: Instant, frame: &RxFrame<'_>) {
        let Ok(base) = Base::parse(frame) else { return };
        match Op::parse(frame, &base) {
            Ok(Op::Open(op)) => self.on_open(now, base.psn, &op),
            Ok(Op::Rst(op)) => self.on_rst(now, &op),
            Ok(_) if base.dst_sid == self.sid && base.ty == Ty::Ack => self.on_answer(now),
            // A packet of another session: one with another process of our address.
            Ok(_) => self.address_in_use |= base.dst_sid != self.sid,
            Err(_) => {}
        }
    }

    /// Notes a report about the station. If it is `proven` and ends the current step, the next step
    /// becomes due.
    fn note(&mut self, now: Instant, proven: bool, set: impl FnOnce(&mut StationReport)) {
        if !proven {
            return set(&mut self.unproven);
        }
        set(&mut self.reported);
        let ends = match self.state {
            State::Opening => self.is_refused(),
            State::Pinging => self.reported.other_life,
            State::Bisecting(..) | State::Closing | State::Done => false,
        };
        if ends {
            self.due = now;
        }
    }

    /// The result.
    pub fn report(mut self) -> PingReport {
        self.report.lengths.iter_mut().for_each(|length| length.rtts_ns.sort_unstable());
        self.report.incarnations = self.lives.iter().copied().collect();
        self.report.verdict = self.verdict();
        self.report
    }

    fn verdict(&self) -> Verdict {
        let lengths = &self.report.lengths;
        let lost = |l: &LengthReport| l.rtts_ns.len() < l.sent as usize;
        if self.lives.len() > 1 {
            Verdict::Duplicate
        } else if let Some(longest) = self.longest {
            Verdict::OnlyShort(longest)
        } else if self.peer.is_some() {
            match lengths.iter().all(|l| l.rtts_ns.is_empty()) {
                true if self.reported.other_life || self.unproven.other_life => {
                    Verdict::OtherIncarnation
                }
                true => Verdict::OnlyOpenAnswered,
                false if lengths.iter().any(lost) => Verdict::Loss,
                false => Verdict::Answered,
            }
        } else if let Some(refusal) = self.refusal(&self.reported) {
            refusal
        } else if self.address_in_use {
            Verdict::AddressInUse
        } else if self.no_route {
            Verdict::NoRoute
        } else {
            let claimed = self.refusal(&self.unproven);
            claimed.or(self.key_refusal).unwrap_or(Verdict::NoAnswer)
        }
    }

    /// The verdict that follows from `said`, if it excludes a session.
    fn refusal(&self, said: &StationReport) -> Option<Verdict> {
        let of_life = match self.settings.incarnation {
            0 => Verdict::Unnamed,
            _ => Verdict::OtherIncarnation,
        };
        said.other_version.map(Verdict::OtherVersion).or(said.other_life.then_some(of_life))
    }

    /// Whether no session can result.
    fn is_refused(&self) -> bool {
        self.no_route || self.refusal(&self.reported).is_some()
    }

    fn on_open(&mut self, now: Instant, psn: Psn, op: &OpenOp) {
        if op.echo_sid == self.sid && op.is_challenge() {
            if self.state == State::Opening && op.cookie != self.cookie {
                (self.cookie, self.due) = (op.cookie, now);
            }
            return;
        }
        if op.echo_sid != self.sid {
            return;
        }
        self.lives.insert(op.inc);
        if self.state != State::Opening {
            return;
        }
        (self.peer, self.cack) = (Some(*op), psn);
        self.report.open_ns = now.since(self.begun.unwrap_or(now)).max(1);
        (self.report.max_frame, self.report.minor) = (op.max_frame as usize, op.minor);
        let longest = self.settings.mtu.min(op.max_frame as usize) + ETH_HDR_LEN;
        let lengths = BTreeSet::from([FRAME_MIN, longest.min(1500 + ETH_HDR_LEN), longest]);
        let report = |frame_len| LengthReport { frame_len, ..LengthReport::default() };
        self.report.lengths = lengths.into_iter().map(report).collect();
        (self.state, self.due) = (State::Pinging, now);
    }

    fn on_rst(&mut self, now: Instant, op: &RstOp) {
        if op.victim_inc != self.life() && op.victim_inc != 0 {
            return;
        }
        self.note_key_refusal(op);
        // An RST that names no incarnation may be a replay.
        let is_named = op.victim_inc == self.life();
        let proven = self.seal.as_ref().is_none_or(|seal| seal.proves_rst() && is_named);
        match op.reason {
            RstReason::Version => {
                self.note(now, proven, |report| report.other_version = Some(op.versions.max));
            }
            RstReason::WrongIncarnation => {
                self.note(now, proven, |report| report.other_life = true)
            }
            // The process restarted during the pings. Before them, it will answer the next OPEN.
            _ if self.lives.iter().any(|&life| wire::life_of(life) != op.life) => {
                self.note(now, proven, |report| report.other_life = true);
            }
            _ => {}
        }
    }

    fn on_answer(&mut self, now: Instant) {
        let Some((left, length)) = self.outstanding.take() else { return };
        match self.state {
            State::Pinging => {
                self.report.lengths[length].rtts_ns.push(now.since(left).max(1));
                self.due = left + self.settings.interval_ns;
            }
            State::Bisecting(passes, fails) => {
                (self.state, self.tries) = (State::Bisecting((passes + fails) / 2, fails), 0);
                self.due = now;
            }
            _ => {}
        }
    }

    fn poll_ping(&mut self, now: Instant) -> Option<Vec<u8>> {
        // The outstanding ping timed out: it is lost.
        self.outstanding = None;
        if self.reported.other_life {
            self.state = State::Closing;
            return self.poll_clear(now);
        }
        let next = self.report.lengths.iter().enumerate().min_by_key(|(i, l)| (l.sent, *i));
        let (length, frame_len) = next.map(|(i, l)| (i, l.frame_len)).unwrap_or_default();
        if self.report.lengths[length].sent == self.settings.count {
            self.state = self.after_pings();
            return self.poll_clear(now);
        }
        self.report.lengths[length].sent += 1;
        self.outstanding = Some((now, length));
        self.due = now + self.settings.timeout_ns.max(self.settings.interval_ns);
        Some(self.ping(frame_len))
    }

    /// Starts the binary search if some length passes and a longer one never does.
    fn after_pings(&self) -> State {
        let lengths = &self.report.lengths;
        let fails = lengths.iter().position(|l| l.rtts_ns.is_empty());
        match fails.filter(|&at| at > 0) {
            Some(at) => State::Bisecting(lengths[at - 1].frame_len, lengths[at].frame_len),
            None => State::Closing,
        }
    }

    fn poll_bisecting(&mut self, now: Instant, passes: usize, fails: usize) -> Option<Vec<u8>> {
        if self.outstanding.take().is_some() {
            self.tries += 1;
        }
        if self.tries == TRIES {
            self.tries = 0;
            self.state = State::Bisecting(passes, (passes + fails) / 2);
            return self.poll_clear(now);
        }
        if fails - passes <= 1 {
            self.longest = Some(passes);
            self.state = State::Closing;
            return self.poll_clear(now);
        }
        self.outstanding = Some((now, 0));
        self.due = now + self.answer_timeout_ns();
        Some(self.ping((passes + fails) / 2))
    }

    /// Timeout of an answer once the usual round trip is known.
    fn answer_timeout_ns(&self) -> u64 {
        let slowest = self.report.lengths.iter().flat_map(|l| &l.rtts_ns).max();
        let slowest = slowest.copied().unwrap_or(self.settings.timeout_ns);
        slowest.saturating_mul(4).max(20_000_000).min(self.settings.timeout_ns)
    }

    fn base(&self, ty: Ty, dst_sid: u32) -> Base {
        Base {
            dst: self.settings.target,
            src: self.settings.me,
            ty,
            ar: ty == Ty::Ping,
            rtx: false,
            ce: false,
            crc: self.settings.crc,
            dst_sid,
            psn: Psn(1),
            cack: self.cack,
            grant: 0,
            plen: 0,
        }
    }

    /// The incarnation that names this ping.
    fn life(&self) -> u64 {
        (self.settings.seed & INCARNATION_MAX).max(1)
    }

    fn open(&self) -> Vec<u8> {
        let op = OpenOp {
            sid: self.sid,
            epoch: self.settings.seed as u32 | 1,
            inc: self.life(),
            target_inc: self.settings.incarnation,
            // The least length: the pings find out which lengths pass.
            max_frame: wire::MAX_FRAME_MIN,
            cookie: self.cookie,
            caps: match &self.seal {
                Some(seal) => seal.caps(),
                None if self.settings.near => OpenOp::NEAR,
                None => 0,
            },
            window: 1,
            ..OpenOp::default()
        };
        let mut frame = wire::frame(&self.base(Ty::Open, 0), &Op::Open(op), &[]);
        frame.resize(wire::MAX_FRAME_MIN as usize + ETH_HDR_LEN, 0);
        frame
    }

    fn ping(&self, frame_len: usize) -> Vec<u8> {
        let peer = self.peer.expect("there is a session");
        let mut frame = wire::frame(&self.base(Ty::Ping, peer.sid), &Op::Ping, &[]);
        frame.resize(frame_len.max(frame.len()), 0);
        frame
    }

    fn close(&self, peer: &OpenOp) -> Vec<u8> {
        let op = RstOp {
            echo_sid: 0,
            echo_psn: Psn(0),
            life: wire::life_of(self.life()),
            victim_inc: peer.inc,
            victim_epoch: peer.epoch,
            reason: RstReason::Closed,
            versions: wire::VERSIONS,
        };
        wire::frame(&self.base(Ty::Rst, peer.sid), &Op::Rst(op), &[])
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use barewire_driver::frame::TxFrame;
    use barewire_driver::port::PortCaps;

    use super::*;
    use crate::node::{EndReason, Node, NodeSettings, Notice};
    use crate::seal::test_certs::{Root, credentials};
    use crate::seal::{Mode, PreSharedKey};
    use crate::wire::{TAG_LEN, VERSION, sealed};

    const ME: Station = Station::at([2, 0, 0, 0, 0, 1]);
    const TARGET: Station = Station::at([2, 0, 0, 0, 0, 2]);
    const MTU: usize = 9000;
    const MS: u64 = 1_000_000;

    fn node(incarnation: u64) -> Node {
        node_with(incarnation, None)
    }

    fn node_with(incarnation: u64, keys: Option<Keyring>) -> Node {
        let caps = PortCaps::new(TARGET, MTU, "test");
        let settings =
            NodeSettings { incarnation, seed: incarnation, keys, ..NodeSettings::default() };
        Node::new(settings, &caps).unwrap()
    }

    fn settings() -> PingSettings {
        PingSettings {
            me: ME,
            target: TARGET,
            incarnation: 0,
            seed: 0x1234_5678_9abc,
            crc: true,
            near: false,
            mtu: MTU,
            count: 5,
            interval_ns: 10 * MS,
            timeout_ns: 100 * MS,
        }
    }

    /// Pings `nodes`, which all have the target's address and are turned every 5 us. `wire` decides
    /// which frames pass, those to the target first, and may change them.
    fn ask(
        settings: PingSettings,
        nodes: &mut [Node],
        wire: impl FnMut(bool, &mut Vec<u8>) -> bool,
    ) -> PingReport {
        ask_by(Ping::new(settings), nodes, wire)
    }

    fn ask_by(
        ping: Ping,
        nodes: &mut [Node],
        wire: impl FnMut(bool, &mut Vec<u8>) -> bool,
    ) -> PingReport {
        ask_among(ping, nodes, wire, |_| Vec::new())
    }

    /// [`ask_by`] while a third station sends frames with the target's address before the answers
    /// arrive.
    fn ask_among(
        mut ping: Ping,
        nodes: &mut [Node],
        mut wire: impl FnMut(bool, &mut Vec<u8>) -> bool,
        mut stranger: impl FnMut(&Ping) -> Vec<Vec<u8>>,
    ) -> PingReport {
        const WAY: u64 = 10_000;
        let mut now = Instant(1);
        let mut back = VecDeque::new();
        while !ping.is_done() || !back.is_empty() {
            while let Some(mut frame) = ping.poll(now) {
                ping.sent(Tx::Sent);
                assert!((FRAME_MIN..=MTU + ETH_HDR_LEN).contains(&frame.len()));
                if wire(true, &mut frame) {
                    nodes.iter_mut().for_each(|n| n.on_frame(now, &RxFrame::new(&frame)));
                }
            }
            for node in nodes.iter_mut() {
                node.transmit(now, &mut |frame: &TxFrame<'_>| {
                    let mut bytes = vec![0; frame.len()];
                    frame.copy_to(&mut bytes);
                    back.push_back((now + WAY, bytes));
                    Tx::Sent
                });
            }
            now = now + WAY / 2;
            for frame in stranger(&ping) {
                ping.on_frame(now, &RxFrame::new(&frame));
            }
            while let Some((_, mut frame)) = back.pop_front_if(|(at, _)| *at <= now) {
                if wire(false, &mut frame) {
                    ping.on_frame(now, &RxFrame::new(&frame));
                }
            }
            assert!(now.0 < 60_000 * MS, "it comes to an end");
        }
        ping.report()
    }

    #[test]
    fn a_node_that_is_well_answers_all_and_keeps_nothing() {
        // Incarnations with different first PSNs.
        for life in 1..20 {
            let report = ask(settings(), &mut [node(life)], |_, _| true);
            assert_eq!(
                (report.verdict, &report.incarnations[..]),
                (Verdict::Answered, &[life][..])
            );
        }
        let mut nodes = [node(77)];
        let report = ask(settings(), &mut nodes, |_, _| true);
        assert_eq!((report.max_frame, report.minor, report.not_sent), (MTU, 0, 0));
        let lengths: Vec<_> =
            report.lengths.iter().map(|l| (l.frame_len, l.rtts_ns.len())).collect();
        assert_eq!(lengths, [(60, 5), (1514, 5), (9014, 5)]);
        assert_eq!(report.lengths[0].percentile(500), Some(10_000));
        assert_eq!(report.open_ns, 10_000);
        // No session is left, and no error was reported.
        let Some(Notice::SessionEnded(end)) = nodes[0].observed.notice() else {
            panic!("it ended")
        };
        assert_eq!((end.reason, end.waited.is_empty()), (EndReason::Closed, true));
        assert_eq!(
            nodes[0].statistics().session_infos().map(|s| s.state).collect::<Vec<_>>(),
            ["idle"]
        );
    }

    /// Goal: the longest frame that passes is found to the byte, although one frame in four is
    /// lost.
    #[test]
    fn only_short_frames_pass() {
        for most in [600, 1514, 4000, 9013] {
            let mut seen = 0_u32;
            let report = ask(PingSettings { count: 20, ..settings() }, &mut [node(77)], |_, f| {
                seen += 1;
                f.len() <= most && (f.len() > 1600 || seen % 7 != 3)
            });
            assert_eq!(report.verdict, Verdict::OnlyShort(most), "{report:?}");
        }
    }

    #[test]
    fn loss_is_counted() {
        let mut n = 0;
        let report = ask(PingSettings { count: 40, ..settings() }, &mut [node(77)], |_, _| {
            n += 1;
            n % 5 != 4
        });
        assert_eq!(report.verdict, Verdict::Loss);
        let answered: usize = report.lengths.iter().map(|l| l.rtts_ns.len()).sum();
        assert!((60..110).contains(&answered), "{answered} of 120");
    }

    #[test]
    fn other_lives_and_versions_are_told() {
        let named = PingSettings { incarnation: 5, ..settings() };
        assert_eq!(ask(named, &mut [node(77)], |_, _| true).verdict, Verdict::OtherIncarnation);
        let right = PingSettings { incarnation: 77, ..settings() };
        assert_eq!(ask(right, &mut [node(77)], |_, _| true).verdict, Verdict::Answered);
        let other = VERSION % 7 + 1;
        let report = ask(settings(), &mut [node(77)], |to, frame| {
            if !to {
                frame[14] = frame[14] & 0x1f | other << 5;
            }
            true
        });
        assert_eq!(report.verdict, Verdict::OtherVersion(other));
    }

    #[test]
    fn silence_has_its_kinds() {
        assert_eq!(ask(settings(), &mut [node(77)], |_, _| false).verdict, Verdict::NoAnswer);
        let mut frames = 0;
        let mute = ask(settings(), &mut [node(77)], |_, _| {
            frames += 1;
            frames <= 2
        });
        assert_eq!(mute.verdict, Verdict::OnlyOpenAnswered);
        let mut ping = Ping::new(settings());
        ping.poll(Instant(1)).unwrap();
        ping.sent(Tx::NoRoute);
        assert_eq!(ping.poll(Instant(1)), None);
        assert!(ping.is_done(), "at once");
        assert_eq!(ping.report().verdict, Verdict::NoRoute);
    }

    #[test]
    fn two_that_answer_are_told() {
        let report = ask(settings(), &mut [node(77), node(78)], |_, _| true);
        assert_eq!(report.verdict, Verdict::Duplicate);
        assert_eq!(report.incarnations, [77, 78]);
    }

    /// Goal: a session with another process of the source address is not touched, and is reported.
    /// Method: the node has a session with one running ping when another begins.
    #[test]
    fn a_session_of_another_process_here_is_left_alone() {
        let mut nodes = [node(77)];
        let mut first = Ping::new(settings());
        let mut exchange = |first: &mut Ping, now: Instant| {
            if let Some(frame) = first.poll(now) {
                nodes[0].on_frame(now, &RxFrame::new(&frame));
            }
            let mut back = Vec::new();
            nodes[0].transmit(now, &mut |frame: &TxFrame<'_>| {
                let mut bytes = vec![0; frame.len()];
                frame.copy_to(&mut bytes);
                back.push(bytes);
                Tx::Sent
            });
            back.iter().for_each(|frame| first.on_frame(now, &RxFrame::new(frame)));
        };
        for at in 1..4 {
            exchange(&mut first, Instant(at * 20 * MS));
        }
        assert!(first.report.lengths[0].rtts_ns.len() == 1, "the session is open");
        let other = PingSettings { seed: 99, ..settings() };
        assert_eq!(ask(other, &mut nodes, |_, _| true).verdict, Verdict::AddressInUse);
        assert_eq!(
            nodes[0].statistics().session_infos().map(|s| s.state).collect::<Vec<_>>(),
            ["open"]
        );
        assert!(!nodes[0].observed.has_notice());
    }

    fn ring(key: u8, mode: Mode, entropy: u8) -> Keyring {
        Keyring::new(vec![PreSharedKey::new(&[key; 32], mode).unwrap()], [entropy; 32]).unwrap()
    }

    fn certified(root: &Root, name: &str, entropy: u8) -> Keyring {
        let own = credentials(&root.leaf(name), root, &[]).unwrap();
        Keyring::of_certificate(own, Mode::Encrypted, [entropy; 32])
    }

    /// Goal: a node with a key answers a holder of the key, in each mode, with each cipher, and
    /// with a certificate; all frames of both are sealed, and no session is left.
    #[test]
    fn a_node_with_a_key_answers_who_has_it() {
        let root = Root::new();
        let certs = [1, 2].map(|n| certified(&root, &format!("spiffe://a.org/{n}"), n));
        let keys =
            [Mode::Encrypted, Mode::Authenticated].map(|mode| [1, 2].map(|n| ring(7, mode, n)));
        for ([here, there], aes) in
            keys.into_iter().chain([certs]).flat_map(|r| [(r.clone(), true), (r, false)])
        {
            let mut nodes = [node_with(77, Some(there))];
            let report = ask_by(Ping::sealed(settings(), here, aes), &mut nodes, |_, frame| {
                assert_eq!(sealed::is_sealed(&RxFrame::new(frame)), Some(true));
                true
            });
            assert_eq!((report.verdict, &report.incarnations[..]), (Verdict::Answered, &[77][..]));
            let lengths: Vec<_> =
                report.lengths.iter().map(|l| (l.frame_len, l.rtts_ns.len())).collect();
            assert_eq!(lengths, [(60, 5), (1514, 5), (9014, 5)]);
            let now = Instant(4_000 * MS);
            nodes[0].transmit(now, &mut |_: &TxFrame<'_>| Tx::Sent);
            nodes[0].transmit(now + 2_000 * MS, &mut |_: &TxFrame<'_>| Tx::Sent);
            assert_eq!(
                nodes[0].statistics().session_infos().map(|s| s.state).collect::<Vec<_>>(),
                ["idle"]
            );
        }
    }

    /// Goal: a different key, a key on one side only, and a refused certificate are reported.
    #[test]
    fn another_key_is_told() {
        let (root, other) = (Root::new(), Root::new());
        let key = |n| Some(ring(n, Mode::Encrypted, n));
        let cert = |root: &Root, n| Some(certified(root, "spiffe://a.org/1", n));
        // Refused by this side, which does not tell the other side.
        let own = credentials(&root.leaf("spiffe://a.org/2"), &root, &["spiffe://a.org/9"]);
        let picky = Some(Keyring::of_certificate(own.unwrap(), Mode::Encrypted, [1; 32]));
        for (here, there, want) in [
            (key(7), key(8), Verdict::OtherKey),
            (key(7), Some(ring(7, Mode::Authenticated, 2)), Verdict::OtherKey),
            (key(7), None, Verdict::NoKey),
            (None, key(7), Verdict::NoKey),
            (key(7), cert(&root, 2), Verdict::OtherKey),
            (cert(&other, 1), cert(&root, 2), Verdict::OtherKey),
            (picky, cert(&root, 2), Verdict::OtherKey),
        ] {
            let ping = match here {
                Some(ring) => Ping::sealed(settings(), ring, true),
                None => Ping::new(settings()),
            };
            let report = ask_by(ping, &mut [node_with(77, there)], |_, _| true);
            assert_eq!(report.verdict, want);
        }
    }

    /// Offset of the tag of a sealed OPEN in answer; `None` for other frames.
    fn answer_end(frame: &[u8]) -> Option<usize> {
        let (_, op) = sealed::open_in(&RxFrame::new(frame))?;
        op.is_answer().then_some(())?;
        (!op.is_challenge()).then(|| wire::BASE_LEN + usize::from(sealed::plen(frame)))
    }

    /// Appends the publicly computable tag to the first `end` bytes of a frame.
    fn tag_again(tags: &Keyring, frame: &mut Vec<u8>, end: usize) {
        frame.resize(end, 0);
        frame.extend(tags.tag_key().tag(frame));
        let len = frame.len();
        frame.resize((len + wire::TRAILER_LEN).max(FRAME_MIN), 0);
        sealed::append_crc(frame, len);
    }

    /// Pings a node with `rings` whose answers are changed in transit. Returns the report and the
    /// number of changed answers.
    fn ask_changed(
        rings: &[Keyring; 2],
        mut change: impl FnMut(&mut Vec<u8>, usize),
    ) -> (PingReport, usize) {
        let [here, there] = rings.clone();
        let ping = Ping::sealed(PingSettings { count: 1, ..settings() }, here, true);
        let mut changed = 0;
        let report = ask_by(ping, &mut [node_with(77, Some(there))], |to, frame| {
            if let Some(end) = answer_end(frame).filter(|_| !to) {
                changed += 1;
                change(frame, end);
            }
            true
        });
        (report, changed)
    }

    /// Goal: an OPEN in answer that was changed in transit, in any byte before its tag or in the
    /// tag, opens no session; with certificates, where anybody can make the tag, also with a
    /// correct tag, and with a truncated handshake message.
    #[test]
    fn a_changed_answer_opens_nothing() {
        let root = Root::new();
        let keys = [1, 2].map(|n| ring(7, Mode::Encrypted, n));
        let certs = [1, 2].map(|n| certified(&root, &format!("spiffe://a.org/{n}"), n));
        let mut end = 0;
        for rings in [&keys, &certs] {
            let (report, changed) = ask_changed(rings, |_, at| end = at);
            assert_eq!((report.verdict, changed), (Verdict::Answered, 1), "unchanged");
            let is_public = rings[0].has_certificate();
            let tag_len = if is_public { 0 } else { TAG_LEN };
            for at in 12..end + tag_len {
                let (report, changed) = ask_changed(rings, |frame, end| {
                    frame[at] ^= 1;
                    if is_public {
                        tag_again(&rings[0], frame, end);
                    }
                });
                assert!(changed > 0 && report.lengths.is_empty(), "byte {at}, {is_public}");
            }
        }
        let (report, changed) = ask_changed(&certs, |frame, _| {
            sealed::set_plen(frame, OpenOp::LEN as u16);
            tag_again(&certs[0], frame, sealed::OPEN_END);
        });
        assert!(changed > 0 && report.incarnations.is_empty(), "without a message");
        assert_eq!(report.verdict, Verdict::NoAnswer);
    }

    /// An RST in the target's name, with a tag that `tags` makes.
    fn rst_of(tags: &Keyring, ping: &Ping, victim_inc: u64, reason: RstReason) -> Vec<u8> {
        let op = RstOp {
            echo_sid: ping.sid,
            echo_psn: Psn(1),
            life: 3,
            victim_inc,
            victim_epoch: 0,
            reason,
            versions: wire::Versions { min: 1, max: 1 },
        };
        let base = Base { dst: ME, src: TARGET, ..ping.base(Ty::Rst, 0) };
        let mut frame = wire::frame(&base, &Op::Rst(op), &[]);
        sealed::mark(&mut frame, RstOp::LEN);
        tag_again(tags, &mut frame, wire::BASE_LEN + RstOp::LEN);
        frame
    }

    /// Goal: frames that anybody can send in the name of a station with a key or a certificate do
    /// not disturb a ping that the station answers, and are the verdict only if it does not answer:
    /// frames of another version, replayed RSTs, RSTs with a publicly computable tag.
    #[test]
    fn forged_frames_do_not_disturb_a_ping() {
        let root = Root::new();
        let keys = [1, 2].map(|n| ring(7, Mode::Encrypted, n));
        let certs = [1, 2].map(|n| certified(&root, &format!("spiffe://a.org/{n}"), n));
        let reasons =
            [RstReason::Version, RstReason::WrongIncarnation, RstReason::Dead, RstReason::NoKey];
        for rings in [&keys, &certs] {
            let is_public = rings[0].has_certificate();
            let say = |ping: &Ping| {
                let victim = if is_public { ping.life() } else { 0 };
                let base = Base { dst: ME, src: TARGET, ..ping.base(Ty::Ping, ping.sid) };
                let mut other = wire::frame(&base, &Op::Ping, &[]);
                other[14] = other[14] & 0x1f | (VERSION % 7 + 1) << 5;
                let mut said = vec![other];
                said.extend(reasons.map(|reason| rst_of(&rings[0], ping, victim, reason)));
                said
            };
            let [here, there] = rings.clone();
            let ping = Ping::sealed(settings(), here.clone(), true);
            let mut nodes = [node_with(77, Some(there))];
            let report = ask_among(ping, &mut nodes, |_, _| true, say);
            assert_eq!((report.verdict, &report.incarnations[..]), (Verdict::Answered, &[77][..]));
            assert!(report.lengths.iter().all(|l| (l.sent, l.rtts_ns.len()) == (5, 5)));
            let life = |ping: &Ping| vec![rst_of(&rings[0], ping, ping.life(), reasons[1])];
            let ping = Ping::sealed(settings(), here.clone(), true);
            let report = ask_among(ping, &mut [], |_, _| true, life);
            assert_eq!(report.verdict, Verdict::Unnamed, "nobody has answered");
            let mut opens = 0;
            let version = |ping: &Ping| say(ping)[..1].to_vec();
            let ping = Ping::sealed(settings(), here, true);
            let report =
                ask_among(ping, &mut [], |to, _| (opens += usize::from(to), true).1, version);
            assert_eq!(report.verdict, Verdict::OtherVersion(VERSION % 7 + 1));
            assert_eq!(opens as u64, OPENS, "it is asked for as long as without them");
        }
    }

    #[test]
    #[should_panic(expected = "the OPEN fits a frame")]
    fn a_certificate_that_fits_no_frame_is_an_error_of_the_caller() {
        let here = certified(&Root::new(), "spiffe://a.org/1", 1);
        Ping::sealed(PingSettings { mtu: 300, ..settings() }, here, true);
    }

    /// Goal: no frame of a station can cause a panic or keep the ping from ending. Method: answers
    /// with one byte changed, each in turn.
    #[test]
    fn a_ping_ends_whatever_frames_arrive() {
        for at in 0..104 {
            for flip in [1, 0x80, 0xff] {
                ask(
                    PingSettings { count: 1, crc: false, ..settings() },
                    &mut [node(77)],
                    |to, f| {
                        if !to && at < f.len() {
                            f[at] ^= flip;
                        }
                        true
                    },
                );
            }
        }
    }
}
