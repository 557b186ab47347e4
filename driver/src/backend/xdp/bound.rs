//! Opening: the memory, a socket on each queue, and the program that gives them frames.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use super::super::lock::NotInChildren;
use super::super::netdev::{Link, Wanted};
use super::program::{self, Take};
use super::queue::Queue;
use super::socket::{self, Memory, Sending};
use super::umem::Umem;
use super::{
    CHUNK_LENS, HEADROOM, RING_COUNTS, RX_LEN, RX_LEN_ALL, TX_COUNT, XdpMode, XdpSettings, bpf,
};
use crate::clock::now_ns;
use crate::error::OpenError;
use crate::frame::{ETH_HDR_LEN, ETHERTYPE};
use crate::mem::{Arena, Hugepages};
use crate::port::Station;

/// How long opening waits for the kernel to clean up after a process that has just ended: to detach
/// its program, which it does at once, and to give its queue back, for which every processor has to
/// have been idle or switched.
const DETACHED: Duration = Duration::from_secs(1);
const UNBOUND: Duration = Duration::from_secs(5);

/// Sockets with their program and their memory.
pub(super) struct Bound {
    /// Those of `queues`, in their order; frames leave by the first.
    pub(super) sockets: Vec<NotInChildren>,
    pub(super) queues: Vec<Queue>,
    pub(super) sending: Sending,
    pub(super) umem: Umem,
    pub(super) link: NotInChildren,
    pub(super) map: OwnedFd,
    pub(super) mode: XdpMode,
    /// Frames that can wait in each queue.
    pub(super) ring_count: usize,
}

/// Memory for the frames of `count` queues, a socket that has it, and how many frames can wait in
/// each queue.
fn memory(
    settings: &XdpSettings,
    wanted: &Wanted<'_>,
    link: &Link,
    count: usize,
) -> Result<(NotInChildren, Umem, usize), OpenError> {
    let chunk_len = CHUNK_LENS
        .into_iter()
        .find(|len| HEADROOM + ETH_HDR_LEN + link.mtu <= *len)
        .unwrap_or(CHUNK_LENS[1]);
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

/// A socket on each of `queues`, to which the interface gives frames to `station`.
pub(super) fn bind(
    settings: &XdpSettings,
    wanted: &Wanted<'_>,
    link: &Link,
    numbers: RangeInclusive<u32>,
    station: Station,
) -> Result<Bound, OpenError> {
    let os = |e: io::Error| wanted.os("cannot set up the socket", &e);
    let (first, mut umem, ring_count) = memory(settings, wanted, link, numbers.clone().count())?;
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
    let map = bpf::socket_map(numbers.end() + 1).map_err(|e| no_xdp(wanted, &e))?;
    let take = match settings.place {
        Some(place) => Take::Datagrams(place),
        None => Take::Frames(ETHERTYPE, settings.accept.filter(station)),
    };
    let program = program::program(map.as_raw_fd(), take, settings.vlan);
    let program = bpf::load(&program).map_err(|e| no_xdp(wanted, &e))?;
    let (program, mode) = attach(settings, wanted, link, &program)?;
    let copies = mode == XdpMode::Generic || !settings.may_zero_copy(&numbers);
    for (queue, socket) in numbers.zip(&sockets) {
        let (fd, first) = (socket.as_raw_fd(), sockets[0].as_raw_fd());
        let memory = if fd == first { Memory::Own { copies } } else { Memory::Of(first) };
        patient(UNBOUND, || socket::bind(fd, link.index, queue, memory))
            .map_err(|e| unbound(wanted, queue, fd != first && socket::is_zero_copy(first), &e))?;
        bpf::put(&map, queue, fd).map_err(os)?;
    }
    socket::enlarge(sockets[0].as_raw_fd());
    Ok(Bound { sockets, queues, sending, umem, link: program, map, mode, ring_count })
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

/// Attaches the program where it can run.
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
        match patient(DETACHED, || bpf::attach(program, link.index, XdpMode::Native)) {
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
    match patient(DETACHED, || bpf::attach(program, link.index, XdpMode::Generic)) {
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

/// Why the interface is not ours to take.
pub(super) fn taken(wanted: &Wanted<'_>, e: &io::Error) -> OpenError {
    if e.raw_os_error() != Some(libc::EADDRINUSE) {
        return wanted.os("cannot claim the interface", e);
    }
    let mend = format!(
        "let a switch have it, which processes then share by the same name: barewire switch \
         --port xdp:{}",
        wanted.interface
    );
    wanted.refuse(libc::EBUSY, "a process has the interface already", mend)
}
