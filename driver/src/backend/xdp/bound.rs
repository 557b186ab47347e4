//! Opening: the memory, a socket on each queue, and the programs that give them frames.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;

use super::super::lock::NotInChildren;
use super::super::netdev::{Asker, Link, Wanted, xdp_features};
use super::door::{self, Claims, Common, Door, Found};
use super::program::{self, Take};
use super::queue::Queue;
use super::socket::{self, Memory, Sending};
use super::umem::Umem;
use super::{
    CHUNK_LENS, HEADROOM, Queues, RING_COUNTS, RX_LEN, RX_LEN_ALL, TX_COUNT, XdpMode, XdpSettings,
    bpf, range_text,
};
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, ETHERTYPE};
use crate::mem::{Arena, Hugepages};
use crate::port::Station;

/// Queues that the program of an interface knows.
const KNOWN: u32 = 1024;
/// How long opening waits for the kernel to clean up after a process that has just ended: to detach
/// its program, which it does at once, and to give its queue back, for which every processor has to
/// have been idle or switched. The first also for a process that opens it at the same time.
const DETACHED: Duration = Duration::from_secs(1);
const UNBOUND: Duration = Duration::from_secs(5);

/// The queues of a port, and how many there are.
pub(super) struct Part {
    pub(super) numbers: RangeInclusive<u32>,
    pub(super) count: u32,
    /// Frames that come by other queues are heard from the kernel's stack, and those to groups.
    pub(super) has_strays: bool,
}

impl Part {
    /// Takes the queues that are wanted, for this process alone.
    pub(super) fn take(
        settings: &XdpSettings,
        wanted: &Wanted<'_>,
        asker: &Asker,
        link: &Link,
    ) -> Result<(Self, Claims), OpenError> {
        let count = asker.rx_queues(&link.name);
        let of = |numbers: RangeInclusive<u32>| {
            let is_part = numbers.clone().count() < count as usize;
            let has_strays = is_part && settings.place.is_none() && settings.vlan.is_none();
            Self { numbers, count, has_strays }
        };
        let refuse = |e: Errno| refused_queues(wanted, link, count, e);
        if settings.queues != Queues::Free {
            let numbers = settings.queues_of(count, link, wanted)?;
            let claims = Claims::take(link.index, &numbers).map_err(refuse)?;
            return Ok((of(numbers), claims));
        }
        for queue in 0..count {
            match Claims::take(link.index, &(queue..=queue)) {
                Err(Errno::EADDRINUSE) => {}
                claims => return Ok((of(queue..=queue), claims.map_err(refuse)?)),
            }
        }
        Err(refuse(Errno::EADDRINUSE))
    }
}

/// Sockets with their program and their memory.
pub(super) struct Bound {
    /// Those of `queues`, in their order; frames leave by the first.
    pub(super) sockets: Vec<NotInChildren>,
    pub(super) queues: Vec<Queue>,
    pub(super) sending: Sending,
    pub(super) umem: Umem,
    pub(super) map: OwnedFd,
    pub(super) mode: XdpMode,
    pub(super) door: Door,
    /// Frames that can wait in each queue.
    pub(super) ring_count: usize,
}

/// Length of a chunk for frames of an interface with this MTU.
///
/// With zero-copy a page: some drivers (igb, igc) tell the card in whole KiB how much room a chunk
/// has behind the headroom. Of 2 KiB that is one, and a longer frame arrives in pieces.
pub(super) fn chunk_len(mtu: usize, may_zero_copy: bool) -> usize {
    let [half, page] = CHUNK_LENS;
    if may_zero_copy || HEADROOM + ETH_HDR_LEN + mtu > half { page } else { half }
}

/// Memory for the frames of `count` queues, a socket that has it, and how many frames can wait in
/// each queue.
fn memory(
    settings: &XdpSettings,
    wanted: &Wanted<'_>,
    link: &Link,
    numbers: &RangeInclusive<u32>,
) -> Result<(NotInChildren, Umem, usize), OpenError> {
    let count = numbers.clone().count();
    let may_zero_copy = settings.may_zero_copy(numbers)
        && settings.mode != Some(XdpMode::Generic)
        && xdp_features(link.index).is_none_or(|features| features.zero_copy);
    let chunk_len = chunk_len(link.mtu, may_zero_copy);
    let rx_len = RX_LEN.min(RX_LEN_ALL / count.next_power_of_two());
    let mut ring_count = settings.ring_count.unwrap_or(rx_len / chunk_len);
    let socket = socket::open().map_err(|e| no_xdp(wanted, &e))?;
    loop {
        let len = (count * ring_count + TX_COUNT as usize) * chunk_len;
        let arena = Arena::new(len, Hugepages::IfFree);
        let block = arena.ok().and_then(|arena| arena.block(len));
        let block = block.ok_or_else(|| {
            let why = format!("no memory for buffers of {len} bytes");
            wanted.refuse(libc::ENOMEM, why, "write a smaller ring=, such as ring=256")
        })?;
        let umem = Umem::new(block, chunk_len, count * ring_count);
        match socket::register(socket.as_raw_fd(), &umem, chunk_len) {
            Ok(()) => return Ok((socket, umem, ring_count)),
            Err(e) if e.raw_os_error() != Some(libc::ENOBUFS) => {
                return Err(wanted.os("cannot set up the socket", &e));
            }
            // As many as may be locked.
            Err(_) if settings.ring_count.is_none() && ring_count > *RING_COUNTS.start() => {
                ring_count /= 2;
            }
            Err(_) => {
                let why = format!("its buffers of {len} bytes are more than this process may lock");
                let mend = "raise the limit: ulimit -l unlimited";
                return Err(wanted.refuse(libc::ENOBUFS, why, mend));
            }
        }
    }
}

/// A socket on each queue of `part`, to which the interface gives frames to `station`.
pub(super) fn bind(
    settings: &XdpSettings,
    wanted: &Wanted<'_>,
    link: &Link,
    station: Station,
    (part, claims): (&Part, Claims),
) -> Result<Bound, OpenError> {
    let os = |e: io::Error| wanted.os("cannot set up the socket", &e);
    let numbers = part.numbers.clone();
    let (first, mut umem, ring_count) = memory(settings, wanted, link, &numbers)?;
    let sending = socket::sending(&first, TX_COUNT).map_err(os)?;
    let mut sockets = vec![first];
    for _ in numbers.clone().skip(1) {
        let socket = socket::open().map_err(|e| no_xdp(wanted, &e))?;
        socket::sends_nothing(socket.as_raw_fd()).map_err(os)?;
        sockets.push(socket);
    }
    let rings = sockets.iter().map(|socket| socket::receiving(socket, ring_count as u32));
    let rings = rings.collect::<io::Result<Vec<_>>>().map_err(os)?;
    let queues = rings.into_iter().zip(0..).map(|(rings, at)| {
        let mut queue = Queue::new(rings, sockets[at].as_raw_fd());
        let chunks = at * ring_count..(at + 1) * ring_count;
        chunks.for_each(|chunk| queue.rings.fill.put(umem.give(chunk as u32)));
        queue.rings.fill.publish();
        queue
    });
    let queues = queues.collect();
    let (map, program) = own_program(settings, wanted, station, part)?;
    let common = enter(settings, wanted, link, part.count)?;
    let mode = common.mode;
    let copies = mode == XdpMode::Generic || !settings.may_zero_copy(&numbers);
    for (queue, socket) in numbers.clone().zip(&sockets) {
        let (fd, first) = (socket.as_raw_fd(), sockets[0].as_raw_fd());
        let memory = if fd == first { Memory::Own { copies } } else { Memory::Of(first) };
        patient(UNBOUND, || socket::bind(fd, link.index, queue, memory))
            .map_err(|e| unbound(wanted, queue, fd != first && socket::is_zero_copy(first), &e))?;
        bpf::put(&map, queue, fd).map_err(os)?;
    }
    socket::enlarge(sockets[0].as_raw_fd());
    for queue in numbers {
        bpf::put(&common.programs, queue, program.as_raw_fd()).map_err(os)?;
    }
    let door = claims.share(common).map_err(os)?;
    Ok(Bound { sockets, queues, sending, umem, map, mode, door, ring_count })
}

/// The program of our queues, and the map of their sockets.
fn own_program(
    settings: &XdpSettings,
    wanted: &Wanted<'_>,
    station: Station,
    part: &Part,
) -> Result<(OwnedFd, OwnedFd), OpenError> {
    let unable = |e: io::Error| no_xdp(wanted, &e);
    let map = bpf::socket_map(part.numbers.end() + 1).map_err(unable)?;
    let take = match settings.place {
        Some(place) => Take::Datagrams(place),
        None => Take::Frames(ETHERTYPE, settings.accept.filter(station), !part.has_strays),
    };
    let program = program::program(map.as_raw_fd(), take, settings.vlan);
    let program = bpf::load(&program).map_err(unable)?;
    Ok((map, program))
}

/// Joins the processes that share the interface, or is the first.
fn enter(
    settings: &XdpSettings,
    wanted: &Wanted<'_>,
    link: &Link,
    count: u32,
) -> Result<Common, OpenError> {
    let until = now_ns() + DETACHED.as_nanos() as u64;
    let os = |e: io::Error| wanted.os("cannot set up the socket", &e);
    loop {
        let found = door::find(link.index, count).map_err(|e| os(e.into()))?;
        if let Found::Common(common) = found {
            return joined(settings, wanted, common);
        }
        let unable = |e: io::Error| no_xdp(wanted, &e);
        let programs = bpf::program_map(KNOWN).map_err(unable)?;
        let program = bpf::load(&program::by_queue(programs.as_raw_fd())).map_err(unable)?;
        match attach(settings, wanted, link, &program) {
            Err(e) if e.errno() == libc::EBUSY => {
                if now_ns() > until {
                    return Err(not_shared(wanted, &found).unwrap_or(e));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(e) => return Err(e),
            Ok((link, mode)) => return Ok(Common { programs: programs.into(), link, mode }),
        }
    }
}

/// What others share, if it is as wanted.
fn joined(
    settings: &XdpSettings,
    wanted: &Wanted<'_>,
    common: Common,
) -> Result<Common, OpenError> {
    if settings.mode.is_some_and(|mode| mode != common.mode) {
        let place = common.mode.place();
        let why = format!("other processes have the interface, whose program runs in {place}");
        return Err(wanted.refuse(libc::EINVAL, why, "leave out mode="));
    }
    Ok(common)
}

/// Why a process that has the interface does not share it.
fn not_shared(wanted: &Wanted<'_>, found: &Found) -> Option<OpenError> {
    let (queue, why, mend) = match found {
        Found::Common(_) | Found::Nobody => return None,
        Found::Silent(queue) => (queue, "does not answer", "is it stopped, or in a debugger?"),
        Found::Foreign(queue) => (queue, "is another user's", ""),
        Found::Other(queue) => (queue, "is of another build, which shares otherwise", ""),
    };
    let name = wanted.interface;
    let why = format!("the process with queue {queue} of {name} {why}");
    let mend = if mend.is_empty() { switch_of(name) } else { mend.to_owned() };
    Some(wanted.refuse(libc::EBUSY, why, mend))
}

/// How a switch shares an interface.
fn switch_of(name: &str) -> String {
    format!(
        "let a switch have it, which processes then share by the same name: barewire switch \
         --port xdp:{name}"
    )
}

/// Why a socket has not got its queue. `zero_copy`: those before it are not copied.
pub(super) fn unbound(
    wanted: &Wanted<'_>,
    queue: u32,
    zero_copy: bool,
    e: &io::Error,
) -> OpenError {
    let name = wanted.interface;
    match e.raw_os_error() {
        Some(libc::EBUSY) => {
            let why = format!("another AF_XDP socket has queue {queue} of {name}");
            wanted.refuse(libc::EBUSY, why, "see who: ss --xdp -p")
        }
        errno if zero_copy => {
            let why = format!("queue {queue} of {name} has no zero-copy, those before have: {e}");
            wanted.refuse(errno.unwrap_or(libc::EIO), why, "leave out zerocopy=yes")
        }
        Some(libc::EINVAL) => {
            let why = format!("queue {queue} of {name} is not in use");
            wanted.refuse(libc::EINVAL, why, "write those that are, as in queue=0")
        }
        _ => wanted.os("cannot set up the socket", e),
    }
}

/// Attaches the program where it can run. `EBUSY`: there is one.
fn attach(
    settings: &XdpSettings,
    wanted: &Wanted<'_>,
    link: &Link,
    program: &OwnedFd,
) -> Result<(NotInChildren, XdpMode), OpenError> {
    let name = &link.name;
    let is_taken = |e: &io::Error| matches!(e.raw_os_error(), Some(libc::EBUSY | libc::EEXIST));
    let busy = || {
        let why = "another XDP program is attached to the interface";
        let mend = format!("see which and end it: ip link show dev {name}; bpftool link");
        wanted.refuse(libc::EBUSY, why, mend)
    };
    if settings.mode != Some(XdpMode::Generic) {
        match bpf::attach(program, link.index, XdpMode::Native) {
            Ok(link) => return Ok((link, XdpMode::Native)),
            Err(e) if is_taken(&e) => return Err(busy()),
            Err(e) if settings.mode == Some(XdpMode::Native) => {
                let why = format!("its driver takes no XDP program at mtu {}: {e}", link.mtu);
                let mend =
                    format!("lower its mtu (ip link set {name} mtu 3498), or leave out mode=");
                return Err(wanted.refuse(libc::EOPNOTSUPP, why, mend));
            }
            Err(error) => {
                let port = &wanted.port;
                tracing::info!(%port, mtu = link.mtu, %error, "its driver takes no XDP program");
            }
        }
    }
    match bpf::attach(program, link.index, XdpMode::Generic) {
        Ok(link) => Ok((link, XdpMode::Generic)),
        Err(e) if is_taken(&e) => Err(busy()),
        Err(e) => Err(wanted.os("cannot attach a program", &e)),
    }
}

/// Tries until it is not busy any more: the kernel takes a moment to clean up after a process that
/// was killed.
fn patient<T>(long: Duration, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    let until = now_ns() + long.as_nanos() as u64;
    loop {
        match attempt() {
            Err(e) if e.raw_os_error() == Some(libc::EBUSY) && now_ns() < until => {
                std::thread::sleep(Duration::from_millis(1));
            }
            done => return done,
        }
    }
}

/// Why there is no socket, map or program.
pub(super) fn no_xdp(wanted: &Wanted<'_>, e: &io::Error) -> OpenError {
    let name = wanted.interface;
    match e.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            let why = "AF_XDP needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF";
            let mend = format!(
                "sudo setcap cap_net_raw,cap_net_admin,cap_bpf+ep PROGRAM, or run it as root, or \
                 start a switch as root, which this port then uses: sudo barewire switch \
                 --port xdp:{name}"
            );
            wanted.refuse(libc::EPERM, why, mend)
        }
        Some(libc::EAFNOSUPPORT | libc::EINVAL) => {
            let why = format!("this kernel has no AF_XDP (CONFIG_XDP_SOCKETS, 5.9 or newer): {e}");
            wanted.refuse(libc::EAFNOSUPPORT, why, format!("use afpacket:{name}"))
        }
        _ => wanted.os("cannot open an AF_XDP socket", e),
    }
}

/// Why the queues are not ours to take.
fn refused_queues(wanted: &Wanted<'_>, link: &Link, count: u32, e: Errno) -> OpenError {
    if e != Errno::EADDRINUSE {
        return wanted.os("cannot claim the interface", &e.into());
    }
    let (name, switch) = (wanted.interface, switch_of(wanted.interface));
    let taken = door::taken(link.index);
    let is_free = |queue: &u32| !taken.contains(queue);
    let Some(first) = (0..count).find(is_free) else {
        let why = match count {
            1 => "a process has the interface already".to_owned(),
            _ => format!("processes have the interface already, all {count} queues"),
        };
        return wanted.refuse(libc::EBUSY, why, switch);
    };
    let last = (first..count).take_while(is_free).last().unwrap_or(first);
    let all: Vec<String> = taken.iter().map(u32::to_string).collect();
    let why = format!("processes have queues of the interface already: {}", all.join(", "));
    let free = range_text(&(first..=last));
    let mend = format!("take others, as in xdp:{name},queue={free} or queue=free; or {switch}");
    wanted.refuse(libc::EBUSY, why, mend)
}
