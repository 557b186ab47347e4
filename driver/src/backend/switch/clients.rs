//! The switch's clients: stations of other users, and the segments made for those users.

use std::fs::File;
use std::time::{Duration, Instant};

use nix::sys::epoll::Epoll;

use super::SegmentPort;
use super::handshake::Refusal;
use super::listener::{AttachRequest, CLIENTS_MAX, Event, Listener};
use super::reserved::Reserved;
use crate::backend::shm::{ShmPort, ShmSettings, Uplink, sealed};
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
}

/// All clients, their users' segments and the listener that accepts them.
pub(super) struct Clients {
    /// Dropped before the listener: an old record without a socket beside it would be removed by
    /// the [`sweep`](super::stale::sweep) of another switch.
    reserved: Reserved,
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

/// A process of another user, which is one station.
struct Client {
    number: u64,
    uid: u32,
    pid: u32,
    station: Station,
}

impl Clients {
    pub(super) fn new(reserved: Reserved, listener: Listener) -> Self {
        Self { reserved, listener, users: Vec::new(), clients: Vec::new(), next_number: 0 }
    }

    /// All stations of clients: address, pid, and index in `segments`.
    pub(super) fn stations<'a>(
        &'a self,
        segments: &'a [SegmentPort],
    ) -> impl Iterator<Item = (Station, u32, usize)> + 'a {
        self.clients.iter().filter_map(|client| {
            let i = segments.iter().skip(1).position(|of| of.uid == client.uid)?;
            Some((client.station, client.pid, i + 1))
        })
    }

    /// Admits clients that ask and removes those that disconnected. True if any was.
    pub(super) fn process_events(
        &mut self,
        segments: &mut Vec<SegmentPort>,
        epoll: &Epoll,
        template: &SegmentTemplate<'_>,
    ) -> bool {
        let mut is_changed = false;
        for event in self.listener.poll(epoll) {
            match event {
                Event::Disconnected(number) => {
                    self.clients.retain(|client| client.number != number);
                    is_changed = true;
                }
                Event::Attach(asking) => {
                    let answer = self.admit(&asking, segments, epoll, template);
                    let station = answer.as_ref().ok().map(|(station, _)| *station);
                    let AttachRequest { client: number, uid, pid, .. } = asking;
                    if self.listener.answer(number, answer)
                        && let Some(station) = station
                    {
                        self.clients.push(Client { number, uid, pid, station });
                        is_changed = true;
                    }
                }
            }
        }
        if is_changed {
            let given = self.clients.iter().map(|client| (client.station, client.uid));
            self.reserved.write(given);
        }
        is_changed | self.remove_idle_segments(segments)
    }

    /// Chooses the address of a new station and opens its user's segment for it, as an open file of
    /// its own. Makes the segment if the user has none.
    fn admit(
        &mut self,
        asking: &AttachRequest,
        segments: &mut Vec<SegmentPort>,
        epoll: &Epoll,
        template: &SegmentTemplate<'_>,
    ) -> Result<(Station, File), Refusal> {
        let is_free = |station: Station, own: &mut ShmPort| {
            let is_taken = self.clients.iter().any(|client| client.station == station)
                || self.reserved.is_reserved_for_other(asking.uid, station);
            !(is_taken || own.has(station))
        };
        let own = &mut segments[0].port;
        let station = match asking.station {
            Some(station) if !self.may_have(asking.uid, station, template) => {
                return Err(Refusal::AddressNotAllowed);
            }
            Some(station) if is_free(station, own) => station,
            Some(_) => return Err(Refusal::AddressInUse),
            None => Station::OF_CLIENTS
                .skip(self.next_number)
                .chain(Station::OF_CLIENTS.take(self.next_number))
                .map(|number| Station { mac: template.nic, number })
                .find(|&station| is_free(station, own) && !self.reserved.is_reserved(station))
                .ok_or(Refusal::AddressInUse)?,
        };
        let given = station.number.wrapping_sub(Station::OF_CLIENTS.start);
        self.next_number = (usize::from(given) + 1) % Station::OF_CLIENTS.len();
        let no_room = |why: &dyn std::fmt::Display| {
            tracing::warn!(uid = asking.uid, "no segment for a process of this user: {why}");
            Refusal::NoResources
        };
        if !self.users.iter().any(|user| user.uid == asking.uid) {
            let made = segment_for(asking.uid, epoll, template);
            let (file, stations) = made.map_err(|why| no_room(&why))?;
            segments.push(stations);
            self.users.push(User { uid: asking.uid, file, empty_since: None });
        }
        let user = self.users.iter_mut().find(|user| user.uid == asking.uid);
        let user = user.ok_or(Refusal::NoResources)?;
        let file = sealed::reopen(&user.file).map_err(|why| no_room(&why))?;
        Ok((station, file))
    }

    /// Whether a process of this user may ask for an address: a client's number behind the NIC's
    /// MAC, or an address that the previous switch gave to this user.
    fn may_have(&self, uid: u32, station: Station, template: &SegmentTemplate<'_>) -> bool {
        let is_guests =
            station.mac == template.nic && Station::OF_CLIENTS.contains(&station.number);
        is_guests
            || self.reserved.is_reserved(station)
                && !self.reserved.is_reserved_for_other(uid, station)
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
