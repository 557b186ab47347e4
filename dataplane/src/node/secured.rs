//! Sealed sessions, where the domain has a key: the one place that every frame passes when it
//! leaves, and the one when it arrives (`docs/wire.md`, "Sealed frames").
//!
//! Session code does not know of sealing: it builds and parses frames as without a key and without
//! a checksum. [`SealingSink`] is between the node and its port; [`Node::on_frame_secured`] is in
//! front of the receive path. Near frames pass both unchanged, since they stay in this machine's
//! memory.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use barewire_driver::backend::any_board::AnyBoard;
use barewire_driver::frame::{ETH_HDR_LEN, RxFrame, TxFrame};
use barewire_driver::port::{PortCaps, Presence, Station, Tx};

use super::backoff::Backoff;
use super::certificates::CertBudget;
use super::claims::SealFault;
use super::keys::Age;
use super::peer::{Peer, State, slot_of};
use super::{Control, FrameSink, Node, NodeSettings, Openings};
use crate::idx::PeerIdx;
use crate::plant::{Bug, planted};
use crate::seal::{
    Answer, Ending, Finished, Initiator, KEYS_MAX, KeyId, Keyring, Message, OpenError, Refused,
    SessionKeys, SessionNames, SessionSecret, TagKey, UnboundSecret, respond,
};
use crate::types::{Instant, Tenant};
use crate::wire::{
    BASE_LEN, Base, OpenOp, RawBase, RstOp, RstReason, TAG_LEN, TRAILER_LEN, Ty, WireError, sealed,
    sealed::OpenKind,
};

/// Bytes of an OPEN before the handshake message. No other frame without a session has more.
const OPEN_END: usize = BASE_LEN + OpenOp::LEN;
const _: () = assert!(BASE_LEN + RstOp::LEN <= OPEN_END);

/// A session whose ends have agreed on keys.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) keys: SessionKeys,
    /// The sid that the peer chose, in frames.
    remote_sid: u32,
    /// The epoch that the peer chose.
    remote_epoch: u32,
    /// The tenant whose key the session was opened under.
    tenant: Tenant,
    /// The answer to the peer's OPEN, if the peer began, until the session is open. Boxed, as the
    /// key of its tag is longer than the session's keys.
    answer: Option<Box<Answered>>,
    /// The secrets that the keys are derived from, this end's and the peer's, until they are
    /// exported once the session is open.
    pending: Option<[UnboundSecret; 2]>,
    pub(super) age: Age,
    /// When the next frame is sealed, after the port had no room for one. A frame that the port
    /// refuses has used up a counter: tried again with each poll, a port that stands still for
    /// T_dead would cost more keys than the peer follows.
    backoff: Backoff,
}

/// What an OPEN that answers one ends with.
#[derive(Clone, Debug)]
struct Answered {
    message: Message,
    /// What makes the tag behind that.
    finished: Finished,
    /// What makes the tag of the frame.
    tag_key: TagKey,
    /// The key that this is of.
    key: KeyId,
}

/// Names of a session that has ended: the peer's [`Station::word`], and for each end its `sid` (for
/// the peer's end the number under which the session is kept here) and `epoch`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EndedSession {
    pub(super) peer: u64,
    pub(super) tenant: Tenant,
    pub(super) ours: (u32, u32),
    pub(super) theirs: (u32, u32),
}

/// Sessions by the peer's [`Station::word`] and the sid that the peer chose, looked up for each
/// frame. Where a session of another tenant with the same station has that sid, the next free
/// number is used. Only peers with a listed key have entries, so a fast hash is safe.
pub(super) type Sessions = HashMap<(u64, u32), Box<Session>, foldhash::fast::RandomState>;

/// Sessions that one station can have: one under each key, and one that is about to replace it.
const STATION_SESSIONS: u32 = 2 * KEYS_MAX as u32;

/// Keys and handshakes of a node.
#[derive(Debug)]
pub(crate) struct Seals {
    pub(super) ring: Keyring,
    /// Handshakes that this node initiated, by the peer's [`Station::word`] and its tenant.
    pub(super) offers: HashMap<(u64, Tenant), Initiator>,
    /// Sessions with keys.
    pub(super) sessions: Sessions,
    /// When the age of keys is checked next.
    pub(super) key_check_at: Instant,
    /// The key that verified the tag of the current OPEN, if that OPEN has a handshake message.
    verified_key: Option<KeyId>,
    /// That OPEN as received, up to the tag.
    verified_open: Vec<u8>,
    /// Budget of certificate verifications.
    pub(super) cert_budget: CertBudget,
    /// The tenant whose key verified the tag of the current frame.
    frame_tenant: Tenant,
    /// Buffers for the frame being sent and the frame being received.
    tx: Vec<u8>,
    rx: Vec<u8>,
    /// Longest frame of the port, bytes.
    longest: usize,
    station: Station,
    /// Secrets of opened sessions that wait for export; `None` if export is not enabled.
    exported: Option<Vec<SessionSecret>>,
    /// The node's time at the current send.
    now: Instant,
    /// How long the session of the frame in `tx` had waited for room in the port, ns.
    waited_ns: u32,
}

/// Maximum number of secrets that wait for export.
const PENDING_SECRETS_MAX: usize = 1 << 12;

/// How a frame leaves.
enum Sealing {
    /// Unchanged.
    Clear,
    /// Replaced by this many bytes of [`Seals::tx`].
    Sealed(usize),
    /// Deferred: the port had no room a moment ago.
    Deferred,
    /// Dropped: there is no key for it.
    Dropped,
}

impl Seals {
    /// For a node with these settings on a port for frames of `frame_len` bytes. `None` if the node
    /// has no key or needs none.
    pub(super) fn of(s: &NodeSettings, caps: &PortCaps, frame_len: usize) -> Option<Box<Self>> {
        let ring = s.keys.clone().filter(|_| !caps.lossless)?;
        let room = ring.message_and_finished_max() + TAG_LEN + TRAILER_LEN;
        let buf = || vec![0; frame_len + room];
        Some(Box::new(Self {
            ring,
            offers: HashMap::new(),
            sessions: Sessions::default(),
            key_check_at: Instant(0),
            verified_key: None,
            verified_open: Vec::new(),
            cert_budget: CertBudget::default(),
            frame_tenant: Tenant::NONE,
            tx: buf(),
            rx: buf(),
            longest: caps.mtu + ETH_HDR_LEN,
            station: caps.station,
            exported: s.export_secrets.then(Vec::new),
            now: Instant(0),
            waited_ns: 0,
        }))
    }

    /// Whether the port's frames have room for the handshake messages of this key list.
    pub(super) fn takes(&self, ring: &Keyring) -> bool {
        ring.open_len() <= self.longest
    }

    /// Prepares `frame` for sending. `near` returns whether the port reaches its destination
    /// through memory.
    fn prepare(&mut self, frame: &TxFrame<'_>, mut near: impl FnMut() -> bool) -> Sealing {
        let is = |ty: Ty| sealed::ty_of(frame.head) == Some(ty);
        self.waited_ns = 0;
        if is(Ty::Who) {
            self.append_checksum(frame)
        } else if is(Ty::Open) {
            self.prepare_open(frame)
        } else if !is(Ty::Rst) {
            self.seal(frame, near)
        } else if near() {
            Sealing::Clear
        } else if sealed::is_key_refusal(frame.head) {
            self.append_checksum(frame)
        } else {
            let tag_key = self.ring.tag_key_for(sealed::tenant(frame.head)).cloned();
            tag_key.map_or(Sealing::Dropped, |tag_key| {
                self.append_ending(
                    frame,
                    &Ending { message: &[], finished: None, tag_key: &tag_key },
                )
            })
        }
    }

    /// Seals a frame of a session.
    fn seal(&mut self, frame: &TxFrame<'_>, mut near: impl FnMut() -> bool) -> Sealing {
        let sid = sealed::dst_sid(frame.head);
        let Some(session) = self.sessions.get_mut(&(frame.dst().word(), sid)) else {
            return if near() { Sealing::Clear } else { Sealing::Dropped };
        };
        if self.now < session.backoff.not_before {
            return Sealing::Deferred;
        }
        self.waited_ns = std::mem::take(&mut session.backoff.wait_ns);
        // A packet without payload may be followed by padding, which tests the path.
        let body = if sealed::plen(frame.head) == 0 { 0 } else { frame.body.len() };
        let end = frame.head.len() + body;
        let len = frame.len().max(end + TAG_LEN);
        let Some(bytes) = self.tx.get_mut(..len) else { return Sealing::Dropped };
        let (head, rest) = bytes.split_at_mut(frame.head.len());
        head.copy_from_slice(frame.head);
        if body > 0 {
            frame.body.copy_to(&mut rest[..body]);
        }
        sealed::mark(head, end - BASE_LEN);
        sealed::set_dst_sid(head, session.remote_sid);
        session.keys.seal(&mut bytes[..end + TAG_LEN]);
        bytes[end + TAG_LEN..].fill(0);
        Sealing::Sealed(len)
    }

    /// Appends the handshake message and the tag to an OPEN.
    fn prepare_open(&mut self, frame: &TxFrame<'_>) -> Sealing {
        let (kind, dst) = (sealed::open_kind(frame.head), frame.dst().word());
        if kind.is_near {
            return Sealing::Clear;
        }
        // A challenge echoes an OPEN too.
        if kind.is_answer && !kind.is_challenge {
            let session = self.sessions.get(&(dst, sealed::dst_sid(frame.head)));
            let answer = session.and_then(|s| Some((s.answer.clone()?, s.remote_sid)));
            let Some((answer, sid)) = answer else { return Sealing::Dropped };
            let Answered { message, finished, tag_key, .. } = &*answer;
            let finished = finished.tag_key();
            let ending = Ending { message, finished: Some(&finished), tag_key };
            return self.append_ending_with(frame, &ending, |head| sealed::set_answered(head, sid));
        }
        let tenant = sealed::tenant(frame.head);
        let Some(tag_key) = self.ring.tag_key_for(tenant).cloned() else { return Sealing::Dropped };
        let message = match kind.is_challenge {
            true => Some(Message::new()),
            false => self.offer((dst, tenant), &kind),
        };
        let Some(message) = message else { return Sealing::Dropped };
        self.append_ending(frame, &Ending { message: &message, finished: None, tag_key: &tag_key })
    }

    /// The first handshake message of this session to a peer. `None` if the key of its tenant is
    /// not listed.
    fn offer(&mut self, to: (u64, Tenant), kind: &OpenKind) -> Option<Message> {
        let OpenKind { inc, sid, epoch, psn, params, .. } = *kind;
        let opener = self.station.word();
        let names = SessionNames { opener, answerer: to.0, inc, sid, epoch, psn, params };
        let known = self.offers.get(&to).filter(|offer| *offer.names() == names);
        if let Some(offer) = known {
            return Some(offer.message().clone());
        }
        let key = self.ring.key_for(to.1)?;
        let offer = Initiator::under(&mut self.ring, key, names)?;
        let message = offer.message().clone();
        self.offers.insert(to, offer);
        Some(message)
    }

    /// The port refused `frame`, which was sealed.
    #[cold]
    fn on_refused(&mut self, frame: &TxFrame<'_>) {
        let session = (frame.dst().word(), sealed::dst_sid(frame.head));
        if let Some(session) = self.sessions.get_mut(&session) {
            session.backoff.refused(self.now, self.waited_ns);
        }
    }

    /// Copies a frame without a session and appends `ending` to its header.
    fn append_ending(&mut self, frame: &TxFrame<'_>, ending: &Ending<'_>) -> Sealing {
        self.append_ending_with(frame, ending, |_| {})
    }

    /// As [`append_ending`](Self::append_ending), after `edit` has changed the header.
    fn append_ending_with(
        &mut self,
        frame: &TxFrame<'_>,
        ending: &Ending<'_>,
        edit: impl FnOnce(&mut [u8]),
    ) -> Sealing {
        let head = frame.head.len();
        let is_open = sealed::ty_of(frame.head) == Some(Ty::Open);
        let len = frame.len().max(head + ending.len(is_open));
        let Some(bytes) = self.tx.get_mut(..len) else { return Sealing::Dropped };
        bytes[..head].copy_from_slice(frame.head);
        edit(&mut bytes[..head]);
        ending.put(bytes, head);
        Sealing::Sealed(len)
    }

    /// Copies a broadcast frame and appends a checksum.
    fn append_checksum(&mut self, frame: &TxFrame<'_>) -> Sealing {
        let len = frame.len();
        frame.copy_to(&mut self.tx[..len]);
        Sealing::Sealed(sealed::put_crc(&mut self.tx, len))
    }

    /// The number here of the session of `tenant` for which `peer` chose `sid`, if there is one.
    fn local_sid(&self, peer: u64, tenant: Tenant, sid: u32) -> Option<u32> {
        let is_it = |name: &u32| {
            let session = self.sessions.get(&(peer, *name));
            session.is_some_and(|s| (s.tenant, s.remote_sid) == (tenant, sid))
        };
        local_sids(sid).find(is_it)
    }

    /// Stores a session with `peer`, in place of a previous one of the same sid. False if the
    /// station has too many sessions, which the limit on keys rules out.
    fn insert_session(&mut self, peer: u64, session: Box<Session>) -> bool {
        let (tenant, sid) = (session.tenant, session.remote_sid);
        let is_free = |name: &u32| !self.sessions.contains_key(&(peer, *name));
        let name = self.local_sid(peer, tenant, sid).or_else(|| local_sids(sid).find(is_free));
        name.map(|name| self.sessions.insert((peer, name), session)).is_some()
    }

    /// Erases the keys and the handshake of a session, not those of a newer one.
    fn forget(&mut self, over: &EndedSession) {
        let is_over = |o: &mut Initiator| (o.names().sid, o.names().epoch) == over.ours;
        if let Entry::Occupied(mut offer) = self.offers.entry((over.peer, over.tenant))
            && is_over(offer.get_mut())
        {
            offer.remove();
        }
        let (sid, epoch) = over.theirs;
        if let Entry::Occupied(session) = self.sessions.entry((over.peer, sid))
            && (session.get().remote_epoch, session.get().tenant) == (epoch, over.tenant)
        {
            session.remove();
        }
    }
}

/// The numbers under which a session may be kept whose peer chose `sid`.
fn local_sids(sid: u32) -> impl Iterator<Item = u32> {
    (0..=STATION_SESSIONS).map(move |i| sid.wrapping_add(i)).filter(|&name| name != 0)
}

/// The sink between the node and a port: seals outgoing frames.
pub(crate) struct SealingSink<'a> {
    pub(super) out: &'a mut dyn FrameSink,
    pub(super) seals: &'a mut Seals,
}

impl SealingSink<'_> {
    fn seal_and_send(&mut self, frame: &TxFrame<'_>, alone: bool) -> Tx {
        let Self { out, seals } = self;
        let sealing = seals.prepare(frame, || out.is_near(frame.dst()));
        let sealed = match &sealing {
            Sealing::Clear => *frame,
            Sealing::Sealed(len) => TxFrame::whole(&seals.tx[..*len]),
            Sealing::Deferred => return Tx::Full,
            Sealing::Dropped => return Tx::NoRoute,
        };
        let sent = if alone { out.send_alone(&sealed) } else { out.send(&sealed) };
        if sent != Tx::Sent {
            seals.on_refused(frame);
        }
        sent
    }
}

impl FrameSink for SealingSink<'_> {
    fn send(&mut self, frame: &TxFrame<'_>) -> Tx {
        self.seal_and_send(frame, false)
    }

    fn send_alone(&mut self, frame: &TxFrame<'_>) -> Tx {
        self.seal_and_send(frame, true)
    }

    fn presence(&mut self, station: Station) -> Presence {
        self.out.presence(station)
    }

    fn is_near(&mut self, station: Station) -> bool {
        self.out.is_near(station)
    }

    fn board(&mut self, members: &[Station]) -> Option<AnyBoard> {
        self.out.board(members)
    }

    fn lacks_memory(&self) -> bool {
        self.out.lacks_memory()
    }
}

impl Openings {
    /// Takes out the keys of the session that `op` of `peer` begins, while another session, which
    /// may have the same sid, is dropped.
    pub(super) fn take_keys(&mut self, peer: Station, op: &OpenOp) -> Option<Box<Session>> {
        let seals = self.seals.as_mut()?;
        let name = seals.local_sid(peer.word(), seals.frame_tenant, op.sid)?;
        seals.sessions.remove(&(peer.word(), name))
    }

    /// Puts the keys back.
    pub(super) fn put_keys(&mut self, peer: Station, keys: Option<Box<Session>>) {
        if let (Some(seals), Some(keys)) = (&mut self.seals, keys) {
            seals.insert_session(peer.word(), keys);
        }
    }

    /// Records under which number the session is kept for which `peer` chose `sid`, and returns
    /// that number.
    pub(super) fn name_session(&mut self, peer: &Peer, sid: u32) -> u32 {
        let seals = self.seals.as_ref();
        let name = seals.and_then(|seals| seals.local_sid(peer.addr, peer.tenant, sid));
        let name = name.unwrap_or(sid);
        if name != sid {
            self.other_names.insert(peer.slot(), sid);
        }
        name
    }

    /// The sid that `peer` chose for the session.
    pub(super) fn remote_sid(&self, peer: &Peer) -> u32 {
        self.other_names.get(&peer.slot()).copied().unwrap_or(peer.remote_sid)
    }

    /// The tenant whose key verified the current frame.
    pub(super) fn frame_tenant(&self) -> Tenant {
        self.seals.as_ref().map_or(Tenant::NONE, |seals| seals.frame_tenant)
    }

    /// Whether [`take_secrets`](Self::take_secrets) would return any.
    #[inline]
    pub fn has_secrets(&self) -> bool {
        let exported = self.seals.as_ref().and_then(|seals| seals.exported.as_ref());
        exported.is_some_and(|exported| !exported.is_empty())
    }

    /// Takes the secrets, for both directions, of the sessions that have opened since the last
    /// call: all frames of these sessions can be decrypted with them. Empty unless
    /// [`export_secrets`](super::NodeSettings::export_secrets) is set; at most 2,048 sessions
    /// between two calls.
    pub fn take_secrets(&mut self) -> Vec<SessionSecret> {
        let exported = self.seals.as_mut().and_then(|seals| seals.exported.as_mut());
        exported.map(std::mem::take).unwrap_or_default()
    }

    /// Whether the OPEN of `peer` was answered under a key that is no longer listed.
    pub(super) fn is_answer_outdated(&self, peer: &Peer) -> bool {
        let Some(seals) = &self.seals else { return false };
        let answer = seals.sessions.get(&peer.session()).and_then(|s| s.answer.as_ref());
        answer.is_some_and(|answer| !seals.ring.lists(answer.key))
    }

    /// Drops the answer to the OPEN of `peer`: the session is open.
    pub(super) fn forget_answer(&mut self, peer: &Peer) {
        if let Some(seals) = &mut self.seals
            && let Some(session) = seals.sessions.get_mut(&peer.session())
        {
            session.answer = None;
        }
    }

    /// Stores the secrets of the session with `peer`, which has opened, for
    /// [`take_secrets`](Self::take_secrets), if export is enabled.
    pub(super) fn queue_secrets(&mut self, peer: &Peer) {
        let Some(seals) = &mut self.seals else { return };
        let Some(exported) = &mut seals.exported else { return };
        let Some(session) = seals.sessions.get_mut(&peer.session()) else { return };
        if let Some([ours, theirs]) = session.pending.take()
            && exported.len() < PENDING_SECRETS_MAX
        {
            let (own, station) = (seals.station, peer.station());
            exported.push(ours.bind(own, station, session.remote_sid));
            exported.push(theirs.bind(station, own, peer.sid));
        }
    }
}

impl Node {
    /// Calls `send` with `out`, through the seals if the node has a key. If the seals are absent, a
    /// caller higher in the stack holds them, and `out` already seals.
    pub(super) fn through_seals<T>(
        &mut self,
        out: &mut dyn FrameSink,
        send: impl FnOnce(&mut Self, &mut dyn FrameSink) -> T,
    ) -> T {
        let Some(mut seals) = self.openings.seals.take() else { return send(self, out) };
        seals.now = self.turn.polled_at;
        let sent = send(self, &mut SealingSink { out, seals: &mut seals });
        // Sessions that ended during the send.
        while let Some(over) = self.openings.ended_sealed.pop() {
            seals.forget(&over);
        }
        self.openings.seals = Some(seals);
        sent
    }

    /// Processes a received frame at a node with a key, unless it is of a near session.
    #[inline(never)]
    pub(super) fn on_frame_secured(&mut self, now: Instant, frame: &RxFrame<'_>) {
        match sealed::is_sealed(frame) {
            Some(true) => self.on_sealed(now, frame),
            Some(false) => self.on_clear(now, frame),
            None => {
                if let Err(err) = Base::parse(frame) {
                    self.counters.rx_wire[err.index()] += 1;
                }
            }
        }
    }

    /// Opens a sealed frame and processes its contents.
    fn on_sealed(&mut self, now: Instant, frame: &RxFrame<'_>) {
        let Some(seals) = &mut self.openings.seals else { return };
        let (mut bytes, len) = (std::mem::take(&mut seals.rx), frame.len());
        if len <= bytes.len() && frame.copy_to(0, &mut bytes[..len]) {
            if self.unseal(now, &mut bytes[..len]) {
                let opened = RxFrame::new(&bytes[..len]);
                if frame.is_marked() {
                    self.note_mark(now, &opened);
                }
                self.on_frame_plain(now, &opened);
            }
        } else {
            self.counters.rx_no_buffer += 1;
        }
        if let Some(seals) = &mut self.openings.seals {
            (seals.rx, seals.verified_key, seals.frame_tenant) = (bytes, None, Tenant::NONE);
        }
    }

    /// Verifies and decrypts a sealed frame in place. False if it is to be dropped.
    fn unseal(&mut self, now: Instant, bytes: &mut [u8]) -> bool {
        let end = BASE_LEN + usize::from(sealed::plen(bytes));
        let Some(raw) = Base::parse_raw(&RxFrame::new(bytes)) else { return false };
        if bytes.len() < end + TAG_LEN {
            self.counters.rx_wire[WireError::TrailerTruncated.index()] += 1;
            return false;
        }
        if raw.dst != self.port.station || raw.src == self.port.station {
            self.counters.rx_not_ours += 1;
            return false;
        }
        let is = |ty: Ty| raw.ty == ty as u8;
        let taken = if is(Ty::Who) || is(Ty::Mcast) {
            self.counters.rx_wire[WireError::Secured.index()] += 1;
            false
        } else if is(Ty::Open) || is(Ty::Rst) {
            self.control().is_tagged(now, raw.src, bytes, end)
        } else {
            self.control().is_of_session(now, &raw, &mut bytes[..end + TAG_LEN])
        };
        if !taken {
            return false;
        }
        let whole = sealed::unmark(bytes);
        if let Err(err) = whole {
            // A type of a later minor version is refused, as without a key.
            self.sessions().on_malformed(now, &RxFrame::new(bytes), err);
        }
        whole.is_ok()
    }

    /// Processes a frame that is not sealed: a near one, a name query or its answer, or the refusal
    /// of a key. An OPEN is refused; any other frame is dropped.
    fn on_clear(&mut self, now: Instant, frame: &RxFrame<'_>) {
        let base = match Base::parse(frame) {
            Ok(base) => base,
            Err(err) => {
                self.counters.rx_wire[err.index()] += 1;
                return;
            }
        };
        let src = self.by_station.get(&self.peers, base.src, Tenant::NONE);
        let far = src.is_some_and(|p| {
            let peer = &self.peers[p];
            peer.state != State::Idle && !peer.path.is_near()
        });
        let through_memory = frame.is_near() && (!far || matches!(base.ty, Ty::Open | Ty::Rst));
        if base.ty == Ty::Who || through_memory || planted(Bug::UnsealedAccepted) {
            return self.on_frame_slow(now, frame);
        }
        if base.ty == Ty::Mcast {
            // Multicast comes from any station on the link, with or without a key: it claims none.
            self.counters.rx_clear += 1;
            return;
        }
        self.observed.note_claim(&mut self.counters, base.src, SealFault::Clear);
        if base.dst != self.port.station {
            return;
        }
        if base.ty == Ty::Rst {
            self.sessions().on_clear_rst(now, base.src, frame);
        } else if base.ty == Ty::Open
            && let Ok(op) = OpenOp::parse(frame, &base)
        {
            self.control().refuse_key(now, &base, &op, RstReason::NoKey);
        }
    }
}

impl Control<'_> {
    /// Erases the keys of the session with `p`, which is about to end.
    pub(super) fn forget_keys(&mut self, p: PeerIdx) {
        if !self.port.far.is_sealed() {
            return;
        }
        let peer = &self.peers[p];
        let (ours, theirs) = ((peer.sid, peer.epoch), (peer.remote_sid, peer.peer_epoch));
        let over = EndedSession { peer: peer.addr, tenant: peer.tenant, ours, theirs };
        match &mut self.openings.seals {
            Some(seals) => seals.forget(&over),
            // The seals are taken out while frames are sent. The next handshake may be offered
            // before they are back.
            None => self.openings.ended_sealed.push(over),
        }
    }

    /// Whether the tag of an OPEN or RST verifies under a key. Keeps the bytes of an OPEN with a
    /// handshake message.
    fn is_tagged(&mut self, now: Instant, src: Station, bytes: &mut [u8], end: usize) -> bool {
        let Some(seals) = &mut self.openings.seals else { return false };
        // Otherwise a forger would choose how many bytes are authenticated, once for each key.
        let is_short = end <= OPEN_END + seals.ring.peer_message_and_finished_max();
        let (frame, tag) = (&bytes[..end], &bytes[end..end + TAG_LEN]);
        let key = is_short.then(|| seals.ring.key_of(frame, tag)).flatten();
        let Some(key) = key else {
            self.observed.note_claim(self.counters, src, SealFault::Forged);
            if let Some((base, op)) = sealed::open_in(&RxFrame::new(bytes)) {
                self.refuse_key(now, &base, &op, RstReason::OtherKey);
            }
            return false;
        };
        seals.frame_tenant = match planted(Bug::WrongTenant) {
            false => seals.ring.tenant_of(key),
            true => seals.ring.tenants().next().unwrap_or_default(),
        };
        if sealed::ty_of(bytes) == Some(Ty::Open) && end > OPEN_END {
            seals.verified_key = Some(key);
            seals.verified_open.clear();
            seals.verified_open.extend_from_slice(&bytes[..end]);
            sealed::set_plen(bytes, OpenOp::LEN as u16);
        }
        true
    }

    /// Decrypts a frame of an existing session in place. Any other is answered as without a key.
    fn is_of_session(&mut self, now: Instant, raw: &RawBase, bytes: &mut [u8]) -> bool {
        let peer = self.peers.get(slot_of(raw.dst_sid)).filter(|peer| {
            let paired = matches!(peer.state, State::Answered | State::Open);
            paired && peer.sid == raw.dst_sid && peer.station() == raw.src
        });
        let Some(peer) = peer.filter(|peer| !peer.path.is_near()) else {
            if matches!(Ty::try_from(raw.ty), Ok(Ty::Ack | Ty::Nack)) {
                self.counters.rx_no_session += 1;
            } else {
                self.on_no_session(now, raw.src, raw.dst_sid, raw.psn);
            }
            return false;
        };
        let session =
            self.openings.seals.as_mut().and_then(|seals| seals.sessions.get_mut(&peer.session()));
        let session = session.filter(|session| session.tenant == peer.tenant);
        let opened = session.map_or(Err(OpenError::Forged), |session| session.keys.open(bytes));
        match opened {
            Ok(()) => {
                let p = peer.slot();
                self.openings.cancel_reset(p);
            }
            Err(OpenError::Forged) => {
                self.observed.note_claim(self.counters, raw.src, SealFault::Forged)
            }
            Err(OpenError::Replayed) => {
                self.observed.note_claim(self.counters, raw.src, SealFault::Replayed)
            }
        }
        opened.is_ok()
    }

    /// Answers the handshake message of `op`, an OPEN of peer `peer_id`: the session has keys from
    /// now on. False, and nothing has happened, if the message does not verify or the certificate
    /// is refused. True without a key.
    pub(super) fn respond(&mut self, peer_id: (Station, Tenant), base: &Base, op: &OpenOp) -> bool {
        if !self.port.is_sealed(op) {
            return true;
        }
        if !self.may_verify_certificate(base) {
            return false;
        }
        let (peer, tenant) = (peer_id.0.word(), peer_id.1);
        let aes = self.settings.aes && op.has_aes();
        let Some(seals) = &mut self.openings.seals else { return false };
        let OpenOp { inc, sid, epoch, .. } = *op;
        let (answerer, psn) = (seals.station.word(), base.psn.0);
        let params = op.params();
        let names = SessionNames { opener: peer, answerer, inc, sid, epoch, psn, params };
        let Seals { ring, verified_key, verified_open, .. } = &mut **seals;
        let answered = verified_key.ok_or(Refused::Forged).and_then(|key| {
            let first = &verified_open[OPEN_END..];
            respond(ring, key, names, first, aes).map(|answer| (answer, key))
        });
        let (Answer { keys, message, finished, tag_key }, key) = match answered {
            Ok(answered) => answered,
            Err(why) => {
                self.refuse_message(base, op, why);
                return false;
            }
        };
        let answer = Some(Box::new(Answered { message, finished, tag_key, key }));
        let age = Age::new(self.turn.polled_at);
        let pending = seals.exported.is_some().then(|| keys.secrets(aes));
        let backoff = Backoff::default();
        let (remote_sid, remote_epoch) = (sid, epoch);
        let session =
            Session { keys, remote_sid, remote_epoch, tenant, answer, pending, age, backoff };
        if !seals.insert_session(peer, Box::new(session)) {
            self.counters.rx_bad_open += 1;
            return false;
        }
        seals.offers.remove(&(peer, tenant));
        self.openings.note_verified(self.turn.polled_at, base, true);
        true
    }

    /// Completes the handshake that this node initiated, with the peer's answer `op`. Returns as
    /// [`respond`](Self::respond).
    pub(super) fn finish_handshake(&mut self, p: PeerIdx, base: &Base, op: &OpenOp) -> bool {
        if !self.port.is_sealed(op) {
            return true;
        }
        if !self.may_verify_certificate(base) {
            return false;
        }
        let Peer { sid, epoch, addr: peer, tenant, .. } = self.peers[p];
        let aes = self.settings.aes && op.has_aes();
        let Some(seals) = &mut self.openings.seals else { return false };
        let Seals { offers, verified_key, verified_open, .. } = &mut **seals;
        let offer = offers.get_mut(&(peer, tenant));
        let offer = offer.filter(|o| (o.names().sid, o.names().epoch) == (sid, epoch));
        let offer = offer.filter(|_| verified_key.is_some()).ok_or(Refused::Forged);
        let keys = match offer.and_then(|offer| offer.finish(verified_open, aes)) {
            Ok(keys) => keys,
            Err(why) => {
                if self.refuse_message(base, op, why) {
                    self.refuse_answer(p);
                }
                return false;
            }
        };
        offers.remove(&(peer, tenant));
        let age = Age::new(self.turn.polled_at);
        let pending = seals.exported.is_some().then(|| keys.secrets(aes));
        let (remote_sid, remote_epoch) = (op.sid, op.epoch);
        let (answer, backoff) = (None, Backoff::default());
        let session =
            Session { keys, remote_sid, remote_epoch, tenant, answer, pending, age, backoff };
        if !seals.insert_session(peer, Box::new(session)) {
            self.counters.rx_bad_open += 1;
            return false;
        }
        self.openings.note_verified(self.turn.polled_at, base, true);
        true
    }

    /// Whether our OPEN to `p` prevails over `op`, which crosses it: there is one handshake, so
    /// both ends must choose the same. An OPEN that names the other's incarnation prevails over one
    /// that does not; otherwise that of the greater station does.
    pub(super) fn open_prevails(&mut self, p: PeerIdx, op: &OpenOp) -> bool {
        let peer = &self.peers[p];
        let crosses = peer.state == State::Opening
            && self.openings.has_opened(p)
            && !op.is_answer()
            && (peer.inc == 0 || peer.inc == op.inc);
        let (ours, theirs) = (peer.inc != 0, op.target_inc != 0);
        let first = if ours == theirs { self.port.addr > peer.addr } else { ours };
        if !self.port.is_sealed(op) || !crosses || !first {
            return false;
        }
        self.counters.rx_bad_open += 1;
        if self.peers[p].inc == 0 {
            // The peer may accept only OPENs that name its incarnation: now ours does.
            self.note_life(p, op.inc);
            let peer = &mut self.peers[p];
            (peer.is_life_claimed, peer.want_open) = (true, true);
            self.due.make_ready(self.peers, p);
        }
        true
    }
}
