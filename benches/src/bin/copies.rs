//! Cost of copying a long frame into a NIC's transmit buffer, against zero-copy transmission from
//! the application's memory.
//!
//! *Copied* is the driver of virtio-net as it is. *In place* uses the same rings with three
//! descriptors a frame: header, payload, checksum. The payload's descriptor is written for each
//! frame, from one region at a constant distance to the device's addresses, which is the least
//! possible cost. The model of the device completes both, and is not timed. *Cold* payload comes
//! from more memory than any cache holds, *warm* payload from 128 KiB. *Checked* means that the
//! checksum of the payload is computed before, as for every packet on a wire.
//!
//! `64KiB` are messages over a memif, both ends in one thread, each end's turns timed: the slower
//! one limits a stream.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU16;

use barewire_benches::duo::Rounds;
use barewire_benches::end::{BenchResult, End, Memory, NodeEnd};
use barewire_benches::pair::joined;
use barewire_benches::{Args, Report, Sample};
use barewire_driver::backend::vfio::VfioPort;
use barewire_driver::backend::vfio::netq::{Doorbell, NetQueues, QueueMemory};
use barewire_driver::backend::vfio::nic::NicCaps;
use barewire_driver::backend::vfio::ring::model::VirtqDevice;
use barewire_driver::backend::vfio::ring::virtq::Virtq;
use barewire_driver::clock::now_ns;
use barewire_driver::frame::{Body, TxFrame};
use barewire_driver::mem::{Arena, Block, Hugepages};
use barewire_driver::port::{MacAddr, Port, Tx};

/// Frames in flight, and bytes of a buffer of copied frames.
const COUNT: u16 = 256;
const STRIDE: usize = 9216;
/// Bytes of the headers and of the trailer of a frame.
const HEAD: usize = 68;
const TAIL: usize = 4;
/// Length of a virtio-net header, bytes.
const NET: usize = 12;
const BURST: usize = 32;
/// Payload memory, bytes.
const COLD: usize = 256 << 20;
const WARM: usize = 128 << 10;

fn main() {
    let args = Args::read();
    let mut report = Report::new("copies", &args);
    let memory = Memory::from_page(args.size(COLD as u64, 4 << 20) as usize);
    for len in [4096, 8192] {
        for (heat, of) in [("cold", memory.len()), ("warm", WARM)] {
            for (name, checked) in [("", false), ("-checked", true)] {
                let case = format!("{len}B-{heat}{name}");
                if args.wants(&case) {
                    let how = Payload { memory: &memory, of, len, checked };
                    match frames(&how, &args) {
                        Ok(rounds) => report.row(rounds.row(&case, "ns/frame", "copied")),
                        Err(why) => report.skip(&case, &why),
                    }
                }
            }
        }
    }
    if args.wants("64KiB") {
        match both_ends(&args, &mut report) {
            Ok(()) => {}
            Err(why) => report.skip("64KiB", &why),
        }
    }
}

/// Source of the payload.
struct Payload<'a> {
    memory: &'a Memory,
    /// Bytes that are used, and bytes per frame.
    of: usize,
    len: usize,
    checked: bool,
}

impl Payload<'_> {
    /// Offset of frame `i`'s payload: consecutive, wrapping around.
    fn offset(&self, i: usize) -> usize {
        i * self.len % self.of
    }
}

/// Nanoseconds per frame sent in place, against a copied one, interleaved: of each round the median
/// burst, since the scheduler preempts some.
fn frames(payload: &Payload<'_>, args: &Args) -> BenchResult<Rounds> {
    let bursts = args.size(64, 8) as usize;
    let (mut copied, mut in_place) = (Copied::new()?, InPlace::new()?);
    let mut next = 0;
    Rounds::measure(args.size(41, 2), || {
        let mut spent = [(); 2].map(|()| Sample::default());
        for burst in 0..2 * bursts {
            // Either mode begins as often after the other's burst.
            let which = (burst + burst / 2) % 2;
            let begun = now_ns();
            for i in next..next + BURST {
                let at = payload.offset(i);
                match which {
                    0 => in_place.send(payload, at),
                    _ => copied.send(payload, at)?,
                }
            }
            if which == 0 {
                in_place.flush()
            } else {
                copied.flush()?
            }
            spent[which].push((now_ns() - begun) as f64 / BURST as f64);
            if which == 0 {
                in_place.complete()
            } else {
                copied.complete()
            }
            next += BURST;
        }
        let [ours, theirs] = spent.map(|of| of.median());
        Ok((ours, theirs))
    })
}

/// The checksum behind a payload, if it has one.
fn tail(payload: &Payload<'_>, body: &Body<'_>) -> [u8; TAIL] {
    if payload.checked { body.crc32c(0).to_le_bytes() } else { [7; TAIL] }
}

/// The headers of a frame.
const HEADER: [u8; HEAD] = {
    let mut head = [0x5a; HEAD];
    (head[0], head[6]) = (2, 2);
    head
};

fn block(len: usize) -> BenchResult<Block> {
    let arena = Arena::new(len, Hugepages::IfFree).map_err(|e| e.to_string())?;
    arena.block(len).ok_or_else(|| "a new arena has no room".into())
}

fn at(block: &Block, offset: usize) -> BenchResult<NonNull<u8>> {
    NonNull::new(block.as_mut_ptr().wrapping_add(offset)).ok_or_else(|| "no memory".into())
}

/// The driver with copied payload.
struct Copied {
    port: VfioPort<NetQueues>,
    device: VirtqDevice,
    _memory: [Block; 2],
    _doorbell: Box<AtomicU16>,
}

impl Copied {
    fn new() -> BenchResult<Self> {
        let queue_len = NetQueues::queue_len(COUNT).next_multiple_of(4096);
        let buffers_len = usize::from(COUNT) * STRIDE;
        let (queues, buffers) = (block(2 * queue_len)?, block(2 * buffers_len)?);
        let doorbell = Box::new(AtomicU16::new(0));
        let register = NonNull::new(doorbell.as_ptr()).ok_or("no memory")?;
        let memory = |n: usize| -> BenchResult<QueueMemory> {
            Ok(QueueMemory {
                queue: at(&queues, n * queue_len)?,
                count: COUNT,
                buffers: at(&buffers, n * buffers_len)?,
                buffers_iova: (1 + n as u64) << 32,
                stride: STRIDE,
                doorbell: Doorbell { register, queue: n as u16 },
            })
        };
        let (rx, tx) = (memory(0)?, memory(1)?);
        // SAFETY: both blocks live as long as their users, are zeroed, page aligned, of the
        // requested length, and accessed by the driver and its model only. So is the doorbell.
        let (queues_of_driver, device) =
            unsafe { (NetQueues::new(&rx, &tx), VirtqDevice::new(tx.queue, COUNT)) };
        device.set_kicks(false);
        let facts = NicCaps { mac: MacAddr([2, 0, 0, 0, 0, 1]), mtu: 9000, link_bps: 0 };
        let port = VfioPort::over(queues_of_driver, facts, "model");
        Ok(Self { port, device, _memory: [queues, buffers], _doorbell: doorbell })
    }

    fn send(&mut self, payload: &Payload<'_>, offset: usize) -> BenchResult<()> {
        let buf = payload.memory.lend(offset, payload.len);
        let body = Body::Io { buf: &buf, offset: 0, len: payload.len };
        let tail = tail(payload, &body);
        match self.port.tx(&TxFrame { head: &HEADER, body, tail: &tail }) {
            Ok(Tx::Sent) => Ok(()),
            other => Err(format!("a frame was not sent: {other:?}")),
        }
    }

    fn flush(&mut self) -> BenchResult<()> {
        self.port.flush().map_err(|gone| gone.to_string())
    }

    fn complete(&mut self) {
        while let Some(id) = self.device.next_id() {
            self.device.used(id.into(), 0);
        }
    }
}

/// Three descriptors a frame, without a copy.
struct InPlace {
    queue: Virtq,
    device: VirtqDevice,
    /// Headers, each with its frame's trailer behind it.
    heads: Block,
    _queue: Block,
}

/// Distance from a local address of payload memory to the device's.
const DISTANCE: u64 = 1 << 44;
/// Bytes for a header and a trailer.
const HEAD_STRIDE: usize = 128;

impl InPlace {
    fn new() -> BenchResult<Self> {
        // A power of two, for three descriptors per frame.
        let count = 4 * COUNT;
        let memory = block(NetQueues::queue_len(count).next_multiple_of(4096))?;
        let heads = block(usize::from(COUNT) * HEAD_STRIDE)?;
        // SAFETY: as above.
        let (mut queue, device) = unsafe {
            let base = at(&memory, 0)?;
            (Virtq::new(base, count), VirtqDevice::new(base, count))
        };
        for id in 0..COUNT {
            let head = (2 << 32) + u64::from(id) * HEAD_STRIDE as u64;
            queue.describe(id, head, (NET + HEAD) as u32, false);
            queue.describe(id + 2 * COUNT, head + (NET + HEAD) as u64, TAIL as u32, false);
            queue.chain(id, id + COUNT);
        }
        device.set_kicks(false);
        Ok(Self { queue, device, heads, _queue: memory })
    }

    #[inline(never)]
    fn send(&mut self, payload: &Payload<'_>, offset: usize) {
        let (queue, len) = (&mut self.queue, payload.len);
        let buf = payload.memory.lend(offset, len);
        let tail = tail(payload, &Body::Io { buf: &buf, offset: 0, len });
        let id = queue.next().expect("completed by now");
        assert!(id < COUNT, "the last ones that came back are those that were posted");
        queue.describe(
            id + COUNT,
            payload.memory.at(offset, len) as u64 + DISTANCE,
            len as u32,
            false,
        );
        queue.chain(id + COUNT, id + 2 * COUNT);
        let to = self.heads.as_mut_ptr().wrapping_add(usize::from(id) * HEAD_STRIDE + NET);
        // SAFETY: the `HEAD_STRIDE` bytes of one frame, which the device does not own.
        unsafe {
            to.copy_from_nonoverlapping(HEADER.as_ptr(), HEAD);
            to.add(HEAD).copy_from_nonoverlapping(tail.as_ptr(), TAIL);
        }
        queue.post();
    }

    fn flush(&mut self) {
        self.queue.publish();
        std::hint::black_box(self.queue.wants_kick());
        // Frees the frames that the device has sent.
        self.queue.take_burst(usize::MAX).expect("a model does no wrong");
    }

    fn complete(&mut self) {
        while let Some(id) = self.device.next_id() {
            self.device.used(id.into(), 0);
        }
    }
}

/// Nanoseconds of a turn beyond which the scheduler must have preempted it.
const TURN_MAX: u64 = 300_000;

/// Processor time of each end of a stream for a message of 64 KiB, in frames of 9,000 bytes.
fn both_ends(args: &Args, report: &mut Report) -> BenchResult<()> {
    let memory = args.size(COLD as u64, 4 << 20) as usize;
    let spec = format!("memif:@bench-copies-{},mtu=9000,crc=yes", std::process::id());
    let open = |role: &str, n| NodeEnd::open_on(&format!("{spec},role={role}"), n, memory);
    let mut pair = joined([open("server", 1)?, open("client", 2)?]);
    let count = args.size(1_000, 32);
    let rounds = Rounds::measure(args.size(41, 1), || stream(&mut pair, memory, count))?;
    report.row(rounds.row("64KiB-sender", "ns/message", "the receiver").note(rounds.span()));
    Ok(())
}

/// Nanoseconds per message of the sender's and of the receiver's turns, for `count` messages.
fn stream(pair: &mut [NodeEnd; 2], memory: usize, count: u64) -> BenchResult<(f64, f64)> {
    const LEN: usize = 64 << 10;
    const WINDOW: u64 = 16;
    let [a, b] = pair;
    let offset = |i: u64| i as usize * LEN % memory;
    let ([mut sent, mut done, mut posted, mut received], mut spent) = ([0; 4], [0; 2]);
    let until = now_ns() + 60_000_000_000;
    while done < count || received < count {
        let begun = now_ns();
        if begun > until {
            return Err("a message did not arrive".to_owned());
        }
        while posted < count.min(received + 2 * WINDOW) && b.recv(offset(posted), LEN) {
            posted += 1;
        }
        received += b.poll().received;
        let between = now_ns();
        while sent < posted.min(done + WINDOW) && a.send(offset(sent), LEN, false) {
            sent += 1;
        }
        done += a.poll().sent;
        let turns = [now_ns() - between, between - begun];
        if turns.iter().all(|ns| *ns < TURN_MAX) {
            (0..2).for_each(|end| spent[end] += turns[end]);
        }
    }
    let [sender, receiver] = spent.map(|ns| ns as f64 / count as f64);
    Ok((sender, receiver))
}
