//! Notices: events for an operator that no completion reports. The node keeps a few of them until
//! its owner reads them ([`Observed::notice`]); it writes no log itself.

use std::collections::VecDeque;
use std::fmt;

use barewire_driver::port::Station;

use super::fast_op::Form;
use super::ops::{RmaKind, WrFlags};
use super::peer::State;
use super::{Observed, Operations};
use crate::error::Error;
use crate::idx::{EpIdx, PeerIdx, PullIdx, ReassemblyIdx, RecvIdx, TxIdx};
use crate::seal::{CertFault, Identity};
use crate::types::Instant;
use crate::wire::{self, Versions};

/// Number of notices that a node keeps. Further ones are only counted ([`Notice::Missed`]).
const KEPT_MAX: usize = 64;

/// An event in a node. Notices are in the order of the events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Notice {
    /// A session ended.
    SessionEnded(SessionEnd),
    /// A station uses another version of the protocol. Reported once for each of the first 64.
    OtherVersion {
        /// The station.
        station: Station,
        /// The version of its frame.
        theirs: u8,
    },
    /// A station has another key, or only one of the two nodes has a key. Reported once for each of
    /// the first 64 stations.
    OtherKey {
        /// The station.
        station: Station,
        /// Both have a key.
        has_key: bool,
    },
    /// The certificate of a station is refused. Reported once for each of the first 64 stations; no
    /// other notice about keys follows for them.
    BadCertificate {
        /// The station.
        station: Station,
        /// Why.
        fault: CertFault,
        /// The name in the certificate, if it leads to a root.
        name: Option<Identity>,
    },
    /// A session uses shorter frames than both ends accept, as longer ones are lost.
    ShortFrames {
        /// The peer.
        station: Station,
        /// Bytes of the longest frame that passes, Ethernet header included.
        passed: u32,
        /// Bytes of the longest that both ends accept, likewise.
        most: u32,
    },
    /// A station announced a service of this node, at a host of this node. Reported once for each
    /// of the first 16 stations.
    NameTwice {
        /// The station.
        station: Station,
        /// The service.
        service: u16,
    },
    /// A peer has this node's MAC, and the two share no memory: another process behind this NIC, or
    /// a host with the same address. Reported once for each of the first 64 peers.
    SameMac {
        /// The peer.
        station: Station,
    },
    /// A service of this node is queried, and the names of this host may have changed: the query
    /// waits a moment for [`set_hosts`](super::Control::set_hosts). At most once a second.
    HostAsked,
    /// This many notices after the previous ones were dropped for lack of room.
    Missed(u32),
}

/// Why a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EndReason {
    /// No OPEN was answered for T_dead.
    NoAnswer,
    /// The peer owed an answer and was silent for T_dead.
    Silent,
    /// The port knows that the peer's process has ended.
    Died,
    /// The peer answers, but none of the requested data arrived for T_dead.
    NoProgress,
    /// RST of the peer: it knows no such session (it restarted, or ended the session while this
    /// node could not receive).
    Reset,
    /// RST of the peer: it closed the session.
    Closed,
    /// RST of the peer: it declared this node dead.
    TakenForDead,
    /// RST of the peer: it supports these versions of the protocol.
    Version(Versions),
    /// The peer has another key, and nothing authentic has arrived from it.
    OtherKey,
    /// Only one of the two nodes has a key, and nothing authentic has arrived.
    NoKey,
    /// The peer answers, but a frame of this many bytes, Ethernet header included, has not reached
    /// it for T_dead. 0 on a lossless port, whose ring must be damaged then.
    Stuck(u32),
    /// The port has had no memory for the next frame to the peer for T_dead.
    Starved,
    /// The peer accepts sessions only from stations that name its incarnation, and the address
    /// named none.
    Unnamed,
    /// Another incarnation answers at the address: the peer restarted.
    Restarted,
    /// The application inserted the address of another incarnation.
    Superseded,
    /// The table of peers was full, and this one was idle.
    Evicted,
    /// The peer had more operations under way than the protocol allows or than there is memory for.
    Excess,
    /// This node is about to close.
    Left,
    /// The port is gone.
    PortGone,
    /// A test dropped it.
    Dropped,
}

impl EndReason {
    /// The error with which operations end that the session ends.
    pub const fn error(self) -> Error {
        match self {
            Self::NoAnswer | Self::Silent | Self::Died | Self::NoProgress | Self::Stuck(_) => {
                Error::HostUnreach
            }
            Self::Starved => Error::NoSpace,
            Self::Version(_) => Error::NoProtoOpt,
            Self::OtherKey => Error::Access,
            Self::NoKey => Error::NoKey,
            Self::PortGone => Error::NetDown,
            Self::Reset
            | Self::Closed
            | Self::TakenForDead
            | Self::Unnamed
            | Self::Restarted
            | Self::Superseded
            | Self::Evicted
            | Self::Excess
            | Self::Left
            | Self::Dropped => Error::ConnReset,
        }
    }

    /// Whether an RST is sent to the peer.
    pub const fn sends_rst(self) -> bool {
        matches!(
            self,
            Self::Silent
                | Self::NoProgress
                | Self::Stuck(_)
                | Self::Starved
                | Self::Superseded
                | Self::Evicted
                | Self::Excess
                | Self::Left
        )
    }

    /// Whether messages may be lost with the session that the application regards as sent: not if
    /// the peer closed. After a restart the address names the incarnation, and posts to the earlier
    /// one are refused.
    pub const fn is_loss(self) -> bool {
        matches!(
            self,
            Self::Silent
                | Self::Died
                | Self::NoProgress
                | Self::Stuck(_)
                | Self::Starved
                | Self::Reset
                | Self::TakenForDead
        )
    }

    /// Whether no session opened, and none will until a setting changes at the peer or here.
    pub const fn is_refusal(self) -> bool {
        matches!(
            self,
            Self::NoAnswer | Self::Version(_) | Self::OtherKey | Self::NoKey | Self::Unnamed
        )
    }

    /// Whether the end is a normal event: nothing is wrong unless an operation waited.
    pub const fn is_orderly(self) -> bool {
        matches!(self, Self::Closed | Self::Superseded | Self::Evicted | Self::Left | Self::Dropped)
    }
}

impl fmt::Display for EndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NoAnswer => "it has not answered",
            Self::Silent => "it has been silent",
            Self::Died => "its process has ended",
            Self::NoProgress => "it answers, but none of the data asked for has come",
            Self::Reset => "it does not know the session: it restarted or ended it earlier",
            Self::Closed => "it closed the session",
            Self::TakenForDead => "it took this side for dead",
            Self::Version(theirs) => {
                let ours = wire::VERSIONS;
                return write!(f, "it speaks version {theirs} of the protocol, this side {ours}");
            }
            Self::OtherKey => "it has another key, or one of the two certificates is refused",
            Self::NoKey => "one of the two has a key and the other has none",
            Self::Starved => {
                "there was no memory for frames to it: mount -o remount,size=1G /dev/shm"
            }
            Self::Stuck(0) => {
                "it speaks, but takes nothing from its ring: the ring is damaged; start both again"
            }
            Self::Stuck(len) if *len <= 1514 => {
                return write!(
                    f,
                    "it speaks, but frames of {len} bytes do not reach it: something \
                    on the way drops them"
                );
            }
            Self::Stuck(len) => {
                return write!(
                    f,
                    "frames of {len} bytes do not reach it, short ones do: a switch on \
                    the way carries less; set mtu=1500"
                );
            }
            Self::Unnamed => {
                "it accepts sessions only from peers that name its incarnation; insert its \
                 complete address"
            }
            Self::Restarted => "it restarted: another incarnation answers",
            Self::Superseded => "the address of another incarnation was inserted",
            Self::Evicted => "its record was needed for another peer",
            Self::Excess => "it has more under way than there is memory for",
            Self::Left => "this side is closing",
            Self::PortGone => "the port is gone",
            Self::Dropped => "it was dropped",
        })
    }
}

/// The end of a session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionEnd {
    /// The peer.
    pub station: Station,
    /// Its incarnation, 0 if not known.
    pub incarnation: u64,
    /// Why.
    pub reason: EndReason,
    /// Whether both ends had established the session, so that operations may have been executed.
    pub was_open: bool,
    /// Time since its first OPEN, nanoseconds.
    pub age_ns: u64,
    /// Time since the last packet of the peer or since an operation began to wait for it,
    /// whichever is later, nanoseconds.
    pub silent_ns: u64,
    /// Packets sent again.
    pub retransmits: u64,
    /// Packets in flight: sent, and not known to have arrived.
    pub in_flight: u32,
    /// The operations that ended with the session.
    pub waited: Waited,
}

/// Operations that wait for a peer, by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waited {
    /// Messages to be sent, or sent and not known to have arrived.
    pub sends: u32,
    /// Messages whose send was completed early (`fi_inject`, `FI_INJECT_COMPLETE`) and that may not
    /// have arrived: no completion reports them.
    pub told: u32,
    /// Messages being received: announced and pulled, or partly arrived.
    pub receives: u32,
    /// Writes.
    pub writes: u32,
    /// Reads.
    pub reads: u32,
    /// Atomic operations.
    pub atomics: u32,
    /// Messages of collectives.
    pub collectives: u32,
}

impl Waited {
    /// Whether nothing waited.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }

    /// The counts that are not 0, with their names.
    pub fn kinds(&self) -> impl Iterator<Item = (u32, &'static str)> {
        [
            (self.sends, "sends"),
            (self.told, "sends reported as done"),
            (self.receives, "receives"),
            (self.writes, "writes"),
            (self.reads, "reads"),
            (self.atomics, "atomics"),
            (self.collectives, "messages of collectives"),
        ]
        .into_iter()
        .filter(|(count, _)| *count > 0)
    }
}

/// The notices that have not been read yet.
#[derive(Debug)]
pub(crate) struct Notices {
    kept: VecDeque<Notice>,
    /// Notices dropped after those kept, for lack of room.
    missed: u32,
}

impl Notices {
    pub(super) fn new() -> Self {
        Self { kept: VecDeque::with_capacity(KEPT_MAX), missed: 0 }
    }

    /// Keeps `notice`; if there is no room, counts it.
    fn push(&mut self, notice: Notice) {
        if self.kept.len() < KEPT_MAX {
            self.kept.push_back(notice);
        } else {
            self.missed = self.missed.saturating_add(1);
        }
    }
}

impl Observed {
    /// Whether [`notice`](Self::notice) would return one.
    #[inline(always)]
    pub fn has_notice(&self) -> bool {
        !self.notices.kept.is_empty()
    }

    /// Takes the oldest notice.
    #[cold]
    pub fn notice(&mut self) -> Option<Notice> {
        let Notices { kept, missed } = &mut self.notices;
        let notice = kept.pop_front();
        // Notices are dropped only while others are kept, so a caller that takes all of those gets
        // here.
        if notice.is_none() && *missed > 0 {
            return Some(Notice::Missed(std::mem::take(missed)));
        }
        notice
    }

    /// Keeps `notice` until the owner reads it.
    #[cold]
    pub(super) fn note(&mut self, notice: Notice) {
        self.notices.push(notice);
    }
}

impl Operations<'_> {
    /// Records the end of the session with `p`, before any of its operations has been ended.
    #[cold]
    pub(super) fn note_end(&mut self, now: Instant, p: PeerIdx, reason: EndReason) {
        let peer = &self.objects.peers[p];
        let waited = self.waited(p);
        if peer.state == State::Idle && waited.is_empty()
            || peer.station() == self.objects.port.station
        {
            return;
        }
        let tally = &self.objects.observed.tallies[p.at()];
        let end = SessionEnd {
            station: peer.station(),
            incarnation: peer.inc,
            reason,
            was_open: peer.state == State::Open,
            age_ns: now.since(tally.begun),
            silent_ns: self.turn.polled_at.since(peer.last_rx),
            retransmits: tally.retransmits.into(),
            in_flight: peer.snd.in_flight(),
            waited,
        };
        self.objects.observed.note(Notice::SessionEnded(end));
    }

    /// The operations that wait for `p`. Iterates over all of them.
    fn waited(&self, p: PeerIdx) -> Waited {
        let peer = &self.objects.peers[p];
        let mut waited = Waited { collectives: peer.coll_waits, ..Waited::default() };
        let mut at = peer.wrs.head;
        while at != TxIdx::NONE {
            let wr = &self.tx[at];
            at = wr.of_peer.next;
            if wr.ep == EpIdx::NONE {
                continue;
            }
            let kind = if wr.flags.contains(WrFlags::REPORTED) {
                &mut waited.told
            } else if !wr.flags.contains(WrFlags::RMA) {
                &mut waited.sends
            } else {
                match self.tx.rma[wr.rma()].kind {
                    RmaKind::Write => &mut waited.writes,
                    RmaKind::Read => &mut waited.reads,
                    RmaKind::Atomic(_) => &mut waited.atomics,
                }
            };
            *kind += if wr.flags.contains(WrFlags::GROUP) { wr.tag as u32 } else { 1 };
        }
        if peer.fast_ops() > 0 {
            for form in self.fast_op_forms(p) {
                *match form {
                    Form::Write => &mut waited.writes,
                    Form::Read => &mut waited.reads,
                    Form::Change | Form::Fetch => &mut waited.atomics,
                } += 1;
            }
        }
        let mut at = peer.pulls.head;
        while at != PullIdx::NONE {
            let pull = &self.pulls[at];
            at = pull.of_peer.next;
            // A read has a request of its own, and an ended operation waits for nothing.
            waited.receives +=
                u32::from(!pull.read && pull.recv != RecvIdx::NONE && pull.end.is_none());
        }
        waited.receives += u32::from(peer.reassembly != ReassemblyIdx::NONE);
        waited
    }
}
