//! Opening of a port: umem, a socket on each queue, and the programs that redirect frames.

use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsRawFd, OwnedFd};
use std::time::Duration;

use nix::errno::Errno;

use super::super::lock::NotInChildren;
use super::super::netdev::{Link, LinkQuery, PortRequest, xdp_features};
use super::program::{self, Match};
use super::queue::Queue;
use super::sharing::{self, Discovery, QueueClaims, QueueShare, SharedProgram};
use super::socket::{self, TxRings, UmemSource};
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

/// Entries of the dispatcher's map: queues of an interface at most.
const PROGRAM_QUEUES: u32 = 1024;
/// How long opening waits for the kernel to clean up after a process that has just ended: to detach
/// its program, which is immediate, and to release its queue, which takes an RCU grace period. The
/// first also for a process that opens the interface at the same time.
const DETACH_TIMEOUT: Duration = Duration::from_secs(1);
const UNBIND_TIMEOUT: Duration = Duration::from_secs(5);

/// The queues of a port, and the number of all.
pub(super) struct QueueSet {
    pub(super) numbers: RangeInclusive<u32>,
    pub(super) count: u32,
    /// Frames to groups, and those that arrive by other queues, are received from the kernel's
    /// stack.
    pub(super) uses_stack_rx: bool,
}

impl QueueSet {
    /// Claims the queues of `settings` for this process.
    pub(super) fn acquire(
        settings: &XdpSettings,
        request: &PortRequest<'_>,
        query: &LinkQuery,
        link: &Link,
    ) -> Result<(Self, QueueClaims), OpenError> {
        let count = query.rx_queues(&link.name);
        let of = |numbers: RangeInclusive<u32>| {
            let is_part = numbers.clone().count() < count as usize;
            let uses_stack_rx = is_part && settings.udp_addr.is_none() && settings.vlan.is_none();
            Self { numbers, count, uses_stack_rx }
        };
        let refuse = |e: Errno| claim_error(request, link, count, e);
        if settings.queues != Queues::Free {
            let numbers = settings.queues_of(count, link, request)?;
            let claims = QueueClaims::acquire(link.index, &numbers).map_err(refuse)?;
            return Ok((of(numbers), claims));
        }
        for queue in 0..count {
            match QueueClaims::acquire(link.index, &(queue..=queue)) {
                Err(Errno::EADDRINUSE) => {}
                claims => return Ok((of(queue..=queue), claims.map_err(refuse)?)),
            }
        }
        Err(refuse(Errno::EADDRINUSE))
    }
}

/// Bound sockets with their programs and umem.
pub(super) struct BoundSockets {
    /// In the order of `queues`; frames leave by the first.
    pub(super) sockets: Vec<NotInChildren>,
    pub(super) queues: Vec<Queue>,
    pub(super) tx_rings: TxRings,
    pub(super) umem: Umem,
    pub(super) map: OwnedFd,
    pub(super) mode: XdpMode,
    pub(super) share: QueueShare,
    /// Frames that can wait in each queue.
    pub(super) ring_count: usize,
}

/// Length of a chunk for frames of an interface with this MTU.
///
/// A page with zero-copy: some drivers (igb, igc) give the card the room behind the headroom in
/// whole KiB. With 2 KiB chunks that is 1 KiB, and a longer frame arrives in pieces.
pub(super) fn chunk_len(mtu: usize, may_zero_copy: bool) -> usize {
    let [half, page] = CHUNK_LENS;
    if may_zero_copy || HEADROOM + ETH_HDR_LEN + mtu > half { page } else { half }
}

/// Registers a umem for the queues `numbers`. Returns its socket, the umem, and how many frames can
/// wait in each queue.
fn allocate_umem(
    settings: &XdpSettings,
    request: &PortRequest<'_>,
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
    let socket = socket::open().map_err(|e| xdp_error(request, &e))?;
    loop {
        let len = (count * ring_count + TX_COUNT as usize) * chunk_len;
        let arena = Arena::new(len, Hugepages::IfFree);
        let block = arena.ok().and_then(|arena| arena.block(len));
        let block = block.ok_or_else(|| {
            let why = format!("no memory for buffers of {len} bytes");
            request.refuse(libc::ENOMEM, why, "write a smaller ring=, such as ring=256")
        })?;
        let umem = Umem::new(block, chunk_len, count * ring_count);
        match socket::register(socket.as_raw_fd(), &umem, chunk_len) {
            Ok(()) => return Ok((socket, umem, ring_count)),
            Err(e) if e.raw_os_error() != Some(libc::ENOBUFS) => {
                return Err(request.os("cannot set up the socket", &e));
            }
            // As much as may be locked.
            Err(_) if settings.ring_count.is_none() && ring_count > *RING_COUNTS.start() => {
                ring_count /= 2;
            }
            Err(_) => {
                let why = format!("its buffers of {len} bytes are more than this process may lock");
                let mend = "raise the limit: ulimit -l unlimited";
                return Err(request.refuse(libc::ENOBUFS, why, mend));
            }
        }
    }
}

/// Binds a socket on each queue of `set` and redirects frames to `station` there.
pub(super) fn bind(
    settings: &XdpSettings,
    request: &PortRequest<'_>,
    link: &Link,
    station: Station,
    (set, claims): (&QueueSet, QueueClaims),
) -> Result<BoundSockets, OpenError> {
    let os = |e: io::Error| request.os("cannot set up the socket", &e);
    let numbers = set.numbers.clone();
    let (first, mut umem, ring_count) = allocate_umem(settings, request, link, &numbers)?;
    let tx_rings = socket::tx_rings(&first, TX_COUNT).map_err(os)?;
    let mut sockets = vec![first];
    for _ in numbers.clone().skip(1) {
        let socket = socket::open().map_err(|e| xdp_error(request, &e))?;
        socket::set_receive_only(socket.as_raw_fd()).map_err(os)?;
        sockets.push(socket);
    }
    let rings = sockets.iter().map(|socket| socket::rx_rings(socket, ring_count as u32));
    let rings = rings.collect::<io::Result<Vec<_>>>().map_err(os)?;
    let queues = rings.into_iter().zip(0..).map(|(rings, at)| {
        let mut queue = Queue::new(rings, sockets[at].as_raw_fd());
        let chunks = at * ring_count..(at + 1) * ring_count;
        chunks.for_each(|chunk| queue.rings.fill.put(umem.lend_rx(chunk as u32)));
        queue.rings.fill.publish();
        queue
    });
    let queues = queues.collect();
    let (map, program) = load_program(settings, request, station, set)?;
    let shared = join_or_attach(settings, request, link, set.count)?;
    let mode = shared.mode;
    let copies = mode == XdpMode::Generic || !settings.may_zero_copy(&numbers);
    for (queue, socket) in numbers.clone().zip(&sockets) {
        let (fd, first) = (socket.as_raw_fd(), sockets[0].as_raw_fd());
        let memory =
            if fd == first { UmemSource::Own { copies } } else { UmemSource::SharedWith(first) };
        retry_busy(UNBIND_TIMEOUT, || socket::bind(fd, link.index, queue, memory)).map_err(
            |e| bind_error(request, queue, fd != first && socket::is_zero_copy(first), &e),
        )?;
        bpf::put(&map, queue, fd).map_err(os)?;
    }
    socket::enlarge(sockets[0].as_raw_fd());
    for queue in numbers {
        bpf::put(&shared.programs, queue, program.as_raw_fd()).map_err(os)?;
    }
    let share = claims.serve(shared).map_err(os)?;
    Ok(BoundSockets { sockets, queues, tx_rings, umem, map, mode, share, ring_count })
}

/// The map of the port's sockets, and the program of its queues.
fn load_program(
    settings: &XdpSettings,
    request: &PortRequest<'_>,
    station: Station,
    set: &QueueSet,
) -> Result<(OwnedFd, OwnedFd), OpenError> {
    let unable = |e: io::Error| xdp_error(request, &e);
    let map = bpf::socket_map(set.numbers.end() + 1).map_err(unable)?;
    let take = match settings.udp_addr {
        Some(udp_addr) => Match::Datagrams(udp_addr),
        None => Match::Frames(ETHERTYPE, settings.accept.filter(station), !set.uses_stack_rx),
    };
    let program = program::queue_program(map.as_raw_fd(), take, settings.vlan);
    let program = bpf::load(&program).map_err(unable)?;
    Ok((map, program))
}

/// Joins the processes that share the interface, or attaches the dispatcher as the first.
fn join_or_attach(
    settings: &XdpSettings,
    request: &PortRequest<'_>,
    link: &Link,
    count: u32,
) -> Result<SharedProgram, OpenError> {
    let until = now_ns() + DETACH_TIMEOUT.as_nanos() as u64;
    let os = |e: io::Error| request.os("cannot set up the socket", &e);
    loop {
        let found = sharing::discover(link.index, count).map_err(|e| os(e.into()))?;
        if let Discovery::Shared(shared) = found {
            return check_mode(settings, request, shared);
        }
        let unable = |e: io::Error| xdp_error(request, &e);
        let programs = bpf::program_map(PROGRAM_QUEUES).map_err(unable)?;
        let program = bpf::load(&program::dispatcher(programs.as_raw_fd())).map_err(unable)?;
        match attach(settings, request, link, &program) {
            Err(e) if e.errno() == libc::EBUSY => {
                if now_ns() > until {
                    return Err(sharing_error(request, &found).unwrap_or(e));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            Err(e) => return Err(e),
            Ok((link, mode)) => return Ok(SharedProgram { programs: programs.into(), link, mode }),
        }
    }
}

/// Refuses a shared program that runs in another mode than `settings` ask for.
fn check_mode(
    settings: &XdpSettings,
    request: &PortRequest<'_>,
    shared: SharedProgram,
) -> Result<SharedProgram, OpenError> {
    if settings.mode.is_some_and(|mode| mode != shared.mode) {
        let place = shared.mode.place();
        let why = format!("other processes have the interface, whose program runs in {place}");
        return Err(request.refuse(libc::EINVAL, why, "leave out mode="));
    }
    Ok(shared)
}

/// The error for an interface whose process does not share it.
fn sharing_error(request: &PortRequest<'_>, found: &Discovery) -> Option<OpenError> {
    let (queue, why, mend) = match found {
        Discovery::Shared(_) | Discovery::Nobody => return None,
        Discovery::Unresponsive(queue) => {
            (queue, "does not answer", "is it stopped, or in a debugger?")
        }
        Discovery::OtherUser(queue) => (queue, "is another user's", ""),
        Discovery::OtherBuild(queue) => (queue, "is of another build, which shares otherwise", ""),
    };
    let name = request.interface;
    let why = format!("the process with queue {queue} of {name} {why}");
    let mend = if mend.is_empty() { switch_of(name) } else { mend.to_owned() };
    Some(request.refuse(libc::EBUSY, why, mend))
}

/// Advice: share the interface by a switch.
fn switch_of(name: &str) -> String {
    format!(
        "let a switch have it, which processes then share by the same name: barewire switch \
         --port xdp:{name}"
    )
}

/// The error for a socket that cannot bind its queue. `zero_copy`: those before it are zero-copy.
pub(super) fn bind_error(
    request: &PortRequest<'_>,
    queue: u32,
    zero_copy: bool,
    e: &io::Error,
) -> OpenError {
    let name = request.interface;
    match e.raw_os_error() {
        Some(libc::EBUSY) => {
            let why = format!("another AF_XDP socket has queue {queue} of {name}");
            request.refuse(libc::EBUSY, why, "see who: ss --xdp -p")
        }
        errno if zero_copy => {
            let why = format!("queue {queue} of {name} has no zero-copy, those before have: {e}");
            request.refuse(errno.unwrap_or(libc::EIO), why, "leave out zerocopy=yes")
        }
        Some(libc::EINVAL) => {
            let why = format!("queue {queue} of {name} is not in use");
            request.refuse(libc::EINVAL, why, "write those that are, as in queue=0")
        }
        _ => request.os("cannot set up the socket", e),
    }
}

/// Attaches the program in the driver if possible, else in the stack. `EBUSY`: another is attached.
fn attach(
    settings: &XdpSettings,
    request: &PortRequest<'_>,
    link: &Link,
    program: &OwnedFd,
) -> Result<(NotInChildren, XdpMode), OpenError> {
    let name = &link.name;
    let is_taken = |e: &io::Error| matches!(e.raw_os_error(), Some(libc::EBUSY | libc::EEXIST));
    let busy = || {
        let why = "another XDP program is attached to the interface";
        let mend = format!("see which and end it: ip link show dev {name}; bpftool link");
        request.refuse(libc::EBUSY, why, mend)
    };
    if settings.mode != Some(XdpMode::Generic) {
        match bpf::attach(program, link.index, XdpMode::Native) {
            Ok(link) => return Ok((link, XdpMode::Native)),
            Err(e) if is_taken(&e) => return Err(busy()),
            Err(e) if settings.mode == Some(XdpMode::Native) => {
                let why = format!("its driver takes no XDP program at mtu {}: {e}", link.mtu);
                let mend =
                    format!("lower its mtu (ip link set {name} mtu 3498), or leave out mode=");
                return Err(request.refuse(libc::EOPNOTSUPP, why, mend));
            }
            Err(error) => {
                let port = &request.port;
                tracing::info!(%port, mtu = link.mtu, %error, "its driver takes no XDP program");
            }
        }
    }
    match bpf::attach(program, link.index, XdpMode::Generic) {
        Ok(link) => Ok((link, XdpMode::Generic)),
        Err(e) if is_taken(&e) => Err(busy()),
        Err(e) => Err(request.os("cannot attach a program", &e)),
    }
}

/// Repeats `attempt` while it is busy, for at most `long`: the kernel cleans up after a killed
/// process with delay.
fn retry_busy<T>(long: Duration, mut attempt: impl FnMut() -> io::Result<T>) -> io::Result<T> {
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

/// The error for a socket, map or program that cannot be made.
pub(super) fn xdp_error(request: &PortRequest<'_>, e: &io::Error) -> OpenError {
    let name = request.interface;
    match e.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            let why = "AF_XDP needs CAP_NET_RAW, CAP_NET_ADMIN and CAP_BPF";
            let mend = format!(
                "sudo setcap cap_net_raw,cap_net_admin,cap_bpf+ep PROGRAM, or run it as root, or \
                 start a switch as root, which this port then uses: sudo barewire switch \
                 --port xdp:{name}"
            );
            request.refuse(libc::EPERM, why, mend)
        }
        Some(libc::EAFNOSUPPORT | libc::EINVAL) => {
            let why = format!("this kernel has no AF_XDP (CONFIG_XDP_SOCKETS, 5.9 or newer): {e}");
            request.refuse(libc::EAFNOSUPPORT, why, format!("use afpacket:{name}"))
        }
        _ => request.os("cannot open an AF_XDP socket", e),
    }
}

/// The error for queues that cannot be claimed.
fn claim_error(request: &PortRequest<'_>, link: &Link, count: u32, e: Errno) -> OpenError {
    if e != Errno::EADDRINUSE {
        return request.os("cannot claim the interface", &e.into());
    }
    let (name, switch) = (request.interface, switch_of(request.interface));
    let taken = sharing::claimed_queues(link.index);
    let is_free = |queue: &u32| !taken.contains(queue);
    let Some(first) = (0..count).find(is_free) else {
        let why = match count {
            1 => "a process has the interface already".to_owned(),
            _ => format!("processes have the interface already, all {count} queues"),
        };
        return request.refuse(libc::EBUSY, why, switch);
    };
    let last = (first..count).take_while(is_free).last().unwrap_or(first);
    let all: Vec<String> = taken.iter().map(u32::to_string).collect();
    let why = format!("processes have queues of the interface already: {}", all.join(", "));
    let free = range_text(&(first..=last));
    let mend = format!("take others, as in xdp:{name},queue={free} or queue=free; or {switch}");
    request.refuse(libc::EBUSY, why, mend)
}
