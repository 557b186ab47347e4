//! The stations of other users behind a switch: who they are, and the segments made for them.

use std::fs::File;
use std::time::{Duration, Instant};

use nix::sys::epoll::Epoll;

use super::Stations;
use super::door::{Asking, Door, Event, GUESTS_MAX};
use super::greeting::Refusal;
use super::reserved::Reserved;
use crate::backend::shm::{ShmPort, ShmSettings, Uplink, sealed};
use crate::error::OpenError;
use crate::port::{MacAddr, Station};

/// How long a segment stays without a station: to make one takes some 100 us of the switch, which
/// nobody is to cost it as often as he likes.
const LINGER: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 2000 });

/// What a switch says of itself.
pub(super) struct House<'a> {
    /// Its own user's segment.
    pub(super) settings: &'a ShmSettings,
    pub(super) uplink: Uplink,
    /// The NIC's address.
    pub(super) nic: MacAddr,
}

/// See the module.
pub(super) struct Lobby {
    /// Before the door, also when they are dropped: a record that is old and has no socket beside
    /// it is removed by whoever sweeps ([`sweep`](super::left::sweep)).
    reserved: Reserved,
    pub(super) door: Door,
    pub(super) users: Vec<User>,
    guests: Vec<Guest>,
    /// Where the search for a free number begins: by turns, so that one is not another's a moment
    /// later.
    next: usize,
}

/// A user with a segment: that of [`Stations`] in the same order, behind the first.
pub(super) struct User {
    uid: u32,
    pub(super) file: File,
    /// When its last station left.
    empty: Option<Instant>,
}

/// A process that is a station.
struct Guest {
    number: u64,
    uid: u32,
    pid: u32,
    station: Station,
}

impl Lobby {
    pub(super) fn new(reserved: Reserved, door: Door) -> Self {
        Self { reserved, door, users: Vec::new(), guests: Vec::new(), next: 0 }
    }

    /// All stations: address, process, and the number of its segment in `segments`.
    pub(super) fn stations<'a>(
        &'a self,
        segments: &'a [Stations],
    ) -> impl Iterator<Item = (Station, u32, usize)> + 'a {
        self.guests.iter().filter_map(|guest| {
            let i = segments.iter().skip(1).position(|of| of.uid == guest.uid)?;
            Some((guest.station, guest.pid, i + 1))
        })
    }

    /// Lets some come and go. Says whether any did.
    pub(super) fn attend(
        &mut self,
        segments: &mut Vec<Stations>,
        epoll: &Epoll,
        house: &House<'_>,
    ) -> bool {
        let mut is_changed = false;
        for event in self.door.look(epoll) {
            match event {
                Event::Left(number) => {
                    self.guests.retain(|guest| guest.number != number);
                    is_changed = true;
                }
                Event::Asked(asking) => {
                    let answer = self.admit(&asking, segments, epoll, house);
                    let station = answer.as_ref().ok().map(|(station, _)| *station);
                    let Asking { guest: number, uid, pid, .. } = asking;
                    if self.door.answer(number, answer)
                        && let Some(station) = station
                    {
                        self.guests.push(Guest { number, uid, pid, station });
                        is_changed = true;
                    }
                }
            }
        }
        if is_changed {
            let given = self.guests.iter().map(|guest| (guest.station, guest.uid));
            self.reserved.write(given);
        }
        is_changed | self.tidy(segments)
    }

    /// The address of a new station, and an open file of its own of its user's segment.
    fn admit(
        &mut self,
        asking: &Asking,
        segments: &mut Vec<Stations>,
        epoll: &Epoll,
        house: &House<'_>,
    ) -> Result<(Station, File), Refusal> {
        let is_free = |station: Station, own: &mut ShmPort| {
            let is_taken = self.guests.iter().any(|guest| guest.station == station)
                || self.reserved.is_kept_from(asking.uid, station);
            !(is_taken || own.has(station))
        };
        let own = &mut segments[0].port;
        let station = match asking.station {
            Some(station) if !self.may_have(asking.uid, station, house) => {
                return Err(Refusal::NotYours);
            }
            Some(station) if is_free(station, own) => station,
            Some(_) => return Err(Refusal::AddressInUse),
            None => Station::OF_GUESTS
                .skip(self.next)
                .chain(Station::OF_GUESTS.take(self.next))
                .map(|number| Station { mac: house.nic, number })
                .find(|&station| is_free(station, own) && !self.reserved.is_kept(station))
                .ok_or(Refusal::AddressInUse)?,
        };
        let given = station.number.wrapping_sub(Station::OF_GUESTS.start);
        self.next = (usize::from(given) + 1) % Station::OF_GUESTS.len();
        let no_room = |why: &dyn std::fmt::Display| {
            tracing::warn!(uid = asking.uid, "no segment for a process of this user: {why}");
            Refusal::NoRoom
        };
        if !self.users.iter().any(|user| user.uid == asking.uid) {
            let made = segment_for(asking.uid, epoll, house);
            let (file, stations) = made.map_err(|why| no_room(&why))?;
            segments.push(stations);
            self.users.push(User { uid: asking.uid, file, empty: None });
        }
        let user = self.users.iter_mut().find(|user| user.uid == asking.uid);
        let user = user.ok_or(Refusal::NoRoom)?;
        let file = sealed::another(&user.file).map_err(|why| no_room(&why))?;
        Ok((station, file))
    }

    /// Whether a process of this user may ask for an address: one of a guest's numbers behind the
    /// NIC's MAC, or what the last switch gave its user.
    fn may_have(&self, uid: u32, station: Station, house: &House<'_>) -> bool {
        let is_guests = station.mac == house.nic && Station::OF_GUESTS.contains(&station.number);
        is_guests || self.reserved.is_kept(station) && !self.reserved.is_kept_from(uid, station)
    }

    /// Lets go of segments that nobody has been in for a while.
    fn tidy(&mut self, segments: &mut Vec<Stations>) -> bool {
        let mut is_changed = false;
        for i in (0..self.users.len()).rev() {
            let user = &mut self.users[i];
            if self.guests.iter().any(|guest| guest.uid == user.uid) {
                user.empty = None;
            } else if user.empty.get_or_insert_with(Instant::now).elapsed() > LINGER {
                self.users.remove(i);
                segments.remove(i + 1);
                is_changed = true;
            }
        }
        is_changed
    }
}

/// A segment for processes of a user, and the switch's place in it.
fn segment_for(uid: u32, epoll: &Epoll, house: &House<'_>) -> Result<(File, Stations), OpenError> {
    let settings =
        ShmSettings { members: Some(GUESTS_MAX + 1), station: None, ..house.settings.clone() };
    let file = sealed::make(&settings)?;
    let cannot = |e| OpenError::os("cannot open anew", "/proc/self/fd", e, "; mount /proc");
    // The lock of our place must not be that of the file which is opened for others.
    let mine = sealed::another(&file).map_err(cannot)?;
    let port = ShmPort::open_switch_of(mine, &settings, house.uplink)?;
    Ok((file, Stations::new(port, uid, epoll)?))
}
