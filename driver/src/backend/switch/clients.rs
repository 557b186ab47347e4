//! The switch's clients: stations of other users, the segments made for those users, and stations
//! whose segments have another layout than those of this build, of any user.

use std::fs::File;
use std::time::{Duration, Instant};

use nix::sys::epoll::Epoll;

use super::SegmentPort;
use super::handshake::Refusal;
use super::listener::{AttachRequest, CLIENTS_MAX, Event, Grant, Listener};
use super::relays::Relays;
use super::reserved::Reserved;
use crate::backend::shm::{self, AddressLease, ShmPort, ShmSettings, Uplink, sealed};
use crate::error::OpenError;
use crate::port::{MacAddr, Station};

/// How long a segment outlives its last station. Making one costs the switch some 100 us: a client
/// that leaves and comes back must not cost that each time.
const LINGER: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 2000 });

/// What a new user's segment is made from.
pub(super) struct SegmentTemplate<'a> {
    /// Its own user's segment.
    pub(super) settings: &'a ShmSettings,
    pub(super) uplink: Uplink,
    /// The NIC's address.
    pub(super) nic: MacAddr,
    /// Longest frame that is forwarded.
    pub(super) frame_max: usize,
}

/// All clients, their users' segments and the listener that accepts them.
pub(super) struct Clients {
    /// Dropped before the listener: an old record without a socket beside it would be removed by
    /// the [`sweep`](super::stale::sweep) of another switch.
    pub(super) reserved: Option<Reserved>,
    pub(super) listener: Listener,
    pub(super) users: Vec<User>,
    clients: Vec<Client>,
    /// Where the search for a free station number starts. Round robin, so that a number is not
    /// given to another station right after it was freed.
    next_number: usize,
}

/// A user with a segment. In the order of `Switch::segments`, from its second element on.
pub(super) struct User {
    uid: u32,
    pub(super) file: File,
    /// When the last station left; `None` while there is one.
    empty_since: Option<Instant>,
}

/// A process that is a station by the switch's knowledge: not one in the switch's own segment.
struct Client {
    number: u64,
    uid: u32,
    pid: u32,
    station: Station,
    /// Keeps the address from members of the switch's own segment; of its own user alone.
    lease: Option<AddressLease>,
}

impl Clients {
    pub(super) fn new() -> Self {
        let (reserved, listener) = (None, Listener::new());
        Self { reserved, listener, users: Vec::new(), clients: Vec::new(), next_number: 0 }
    }

    /// All stations of clients: address, pid, and index in `segments`.
    pub(super) fn stations<'a>(
        &'a self,
        segments: &'a [SegmentPort],
    ) -> impl Iterator<Item = (Station, u32, usize)> + 'a {
        self.clients.iter().filter_map(|client| {
            let i = segment_of(client, segments)?;
            Some((client.station, client.pid, i))
        })
    }

    /// Admits clients that ask and removes those that disconnected. True if any was.
    pub(super) fn process_events(
        &mut self,
        segments: &mut Vec<SegmentPort>,
        epoll: &Epoll,
        template: &SegmentTemplate<'_>,
    ) -> bool {
        let mut ended: Vec<u64> = segments
            .iter_mut()
            .flat_map(|of| of.relays.as_mut())
            .flat_map(Relays::take_ended)
            .collect();
        ended.iter().for_each(|&number| self.listener.remove(number));
        let mut is_changed = false;
        for event in self.listener.poll(epoll) {
            match event {
                Event::Disconnected(number) => ended.push(number),
                Event::Attach(asking) => {
                    is_changed |= self.attach(&asking, segments, epoll, template);
                }
            }
        }
        let before = self.clients.len();
        self.clients.retain(|client| !ended.contains(&client.number));
        is_changed |= self.clients.len() < before;
        if is_changed && let Some(reserved) = &mut self.reserved {
            let others = self.clients.iter().filter(|client| client.lease.is_none());
            reserved.write(others.map(|client| (client.station, client.uid)));
        }
        is_changed | self.remove_idle_segments(segments)
    }

    /// Answers a request. True if there is a new station.
    fn attach(
        &mut self,
        asking: &AttachRequest,
        segments: &mut Vec<SegmentPort>,
        epoll: &Epoll,
        template: &SegmentTemplate<'_>,
    ) -> bool {
        let &AttachRequest { client: number, uid, pid, version, is_own, .. } = asking;
        if is_own && version == shm::version() {
            self.listener.answer(number, &Ok(Grant::Named));
            return false;
        }
        let admitted = self.admit(asking, segments, epoll, template);
        let (grant, lease) = match admitted {
            Ok((grant, lease)) => (Ok(grant), lease),
            Err(why) => (Err(why), None),
        };
        if !self.listener.answer(number, &grant) {
            return false;
        }
        let station = match grant {
            Ok(Grant::Segment(station, _) | Grant::Relayed(station, _)) => station,
            Ok(Grant::Named) | Err(_) => return false,
        };
        let client = Client { number, uid, pid, station, lease };
        if matches!(grant, Ok(Grant::Relayed(..))) {
            tracing::warn!(
                uid,
                pid,
                %station,
                version,
                "a process of a build with another segment layout: its frames pass a socket, slower"
            );
            let socket = self.listener.take_over(number, epoll);
            let of = segment_of(&client, segments).map(|i| &mut segments[i]);
            let added = of.zip(socket).is_some_and(|(of, socket)| {
                of.relays(template.frame_max, epoll)
                    .is_some_and(|relays| relays.add(number, station, socket))
            });
            if !added {
                self.listener.remove(number);
                return false;
            }
        }
        self.clients.push(client);
        true
    }

    /// Chooses the address of a new station. Opens its user's segment for it, as an open file of
    /// its own, if it knows the layout. Makes the segment if the user has none.
    fn admit(
        &mut self,
        asking: &AttachRequest,
        segments: &mut Vec<SegmentPort>,
        epoll: &Epoll,
        template: &SegmentTemplate<'_>,
    ) -> Result<(Grant, Option<AddressLease>), Refusal> {
        let station = self.choose_station(asking, segments, template)?;
        let relayed = Grant::Relayed(station, template.uplink);
        if asking.is_own {
            let lease = AddressLease::take(template.settings, station);
            let lease = lease.map_err(|why| match why {
                OpenError::AddressInUse { .. } => Refusal::AddressInUse,
                _ => no_room(asking.uid, &why),
            })?;
            return Ok((relayed, Some(lease)));
        }
        let no_room = |why: &dyn std::fmt::Display| no_room(asking.uid, why);
        if !self.users.iter().any(|user| user.uid == asking.uid) {
            let made = segment_for(asking.uid, epoll, template);
            let (file, stations) = made.map_err(|why| no_room(&why))?;
            segments.push(stations);
            self.users.push(User { uid: asking.uid, file, empty_since: None });
        }
        if asking.version != shm::version() {
            return Ok((relayed, None));
        }
        let user = self.users.iter_mut().find(|user| user.uid == asking.uid);
        let user = user.ok_or(Refusal::NoResources)?;
        let file = sealed::reopen(&user.file).map_err(|why| no_room(&why))?;
        Ok((Grant::Segment(station, file), None))
    }

    /// The address of a new station: what it asks for, or a free one.
    fn choose_station(
        &mut self,
        asking: &AttachRequest,
        segments: &mut [SegmentPort],
        template: &SegmentTemplate<'_>,
    ) -> Result<Station, Refusal> {
        let reserved = self.reserved.as_ref();
        let is_free = |station: Station, own: &mut ShmPort| {
            let is_taken = self.clients.iter().any(|client| client.station == station)
                || reserved.is_some_and(|it| it.is_reserved_for_other(asking.uid, station));
            !(is_taken || own.has(station))
        };
        let own = &mut segments[0].port;
        // Each way to an address has a range of its own.
        let numbers = if asking.is_own { Station::OF_SWITCH } else { Station::OF_CLIENTS };
        let skipped = self.next_number % numbers.len();
        let station = match asking.station {
            Some(station) if !asking.is_own && !self.may_have(asking.uid, station, template) => {
                return Err(Refusal::AddressNotAllowed);
            }
            Some(station) if is_free(station, own) => station,
            Some(_) => return Err(Refusal::AddressInUse),
            None => (numbers.clone().skip(skipped).chain(numbers.clone().take(skipped)))
                .map(|number| Station { mac: template.nic, number })
                .find(|&station| {
                    let is_reserved = reserved.is_some_and(|it| it.is_reserved(station));
                    !is_reserved && is_free(station, own)
                })
                .ok_or(Refusal::AddressInUse)?,
        };
        let given = station.number.wrapping_sub(numbers.start);
        self.next_number = (usize::from(given) + 1) % Station::OF_CLIENTS.len();
        Ok(station)
    }

    /// Whether a process of this user may ask for an address: a client's number behind the NIC's
    /// MAC, or an address that the previous switch gave to this user.
    fn may_have(&self, uid: u32, station: Station, template: &SegmentTemplate<'_>) -> bool {
        let is_guests =
            station.mac == template.nic && Station::OF_CLIENTS.contains(&station.number);
        is_guests
            || self.reserved.as_ref().is_some_and(|reserved| {
                reserved.is_reserved(station) && !reserved.is_reserved_for_other(uid, station)
            })
    }

    /// Drops segments without a station for [`LINGER`]. True if any was.
    fn remove_idle_segments(&mut self, segments: &mut Vec<SegmentPort>) -> bool {
        let mut is_changed = false;
        for i in (0..self.users.len()).rev() {
            let user = &mut self.users[i];
            if self.clients.iter().any(|client| client.uid == user.uid) {
                user.empty_since = None;
            } else if user.empty_since.get_or_insert_with(Instant::now).elapsed() > LINGER {
                self.users.remove(i);
                segments.remove(i + 1);
                is_changed = true;
            }
        }
        is_changed
    }
}

/// Index of a client's segment.
fn segment_of(client: &Client, segments: &[SegmentPort]) -> Option<usize> {
    let of_user = || segments.iter().skip(1).position(|of| of.uid == client.uid);
    if client.lease.is_some() { Some(0) } else { of_user().map(|i| i + 1) }
}

fn no_room(uid: u32, why: &dyn std::fmt::Display) -> Refusal {
    tracing::warn!(uid, "no segment for a process of this user: {why}");
    Refusal::NoResources
}

/// Makes a segment for processes of a user, and joins it as its switch.
fn segment_for(
    uid: u32,
    epoll: &Epoll,
    template: &SegmentTemplate<'_>,
) -> Result<(File, SegmentPort), OpenError> {
    let settings =
        ShmSettings { members: Some(CLIENTS_MAX + 1), station: None, ..template.settings.clone() };
    let file = sealed::create(&settings)?;
    let cannot = |e| OpenError::os("cannot open anew", "/proc/self/fd", e, "; mount /proc");
    // Locks belong to an open file: ours must not be that of the file opened for clients.
    let mine = sealed::reopen(&file).map_err(cannot)?;
    let port = ShmPort::open_switch_of(mine, &settings, template.uplink)?;
    Ok((file, SegmentPort::new(port, uid, epoll)?))
}
