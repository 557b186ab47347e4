//! A process with a near and a far peer at once: messages of both are matched in the order in which
//! they come, and both change the same memory. All three are domains of this process.

use std::time::{Duration, Instant};

use barewire::flags::{Access, Caps, OpFlags};
use barewire::*;
use barewire_tests::rng::Rng;

use crate::worker::{Node, open_with, pattern, settings};

const KEY: u64 = 3;
const MEMORY: usize = 20_000;
/// The sender that is near, and the one that is far.
const SENDERS: [&str; 2] = ["near", "far"];
const ROUNDS: u64 = 60;
const CONTEXT_OF_PEEK: u64 = u64::MAX;
const PATIENCE: Duration = Duration::from_secs(20);

/// One that receives and has memory, and those that send to it and change that.
struct House {
    host: Node,
    mr: Mr,
    senders: [Node; 2],
    /// The host's address at each of them, and theirs at the host.
    to: [FiAddr; 2],
    from: [FiAddr; 2],
}

/// A message that the host received: the number of the receive, its sender's address, its number.
type Got = (u64, FiAddr, u64);

impl House {
    fn new(name: &str) -> Self {
        let caps = Caps::TAGGED | Caps::SOURCE | Caps::RMA | Caps::ATOMIC;
        let near = format!("udp:127.0.0.1,near=shm:mixed-{name}-{}", std::process::id());
        let open = |port: &str| open_with(port, settings(), caps);
        let (host, senders) = (open(&near), [open(&near), open("udp:127.0.0.1,near=no")]);
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let attr = MrAttr { access, requested_key: Some(KEY), ..MrAttr::default() };
        let mr = host.domain.mr_reg(Buf::zeroed(MEMORY), &attr).unwrap();
        let addr = |node: &Node| node.ep.getname().unwrap().to_string();
        let to = [0, 1].map(|i: usize| senders[i].knows(&addr(&host)));
        let from = [0, 1].map(|i: usize| host.knows(&addr(&senders[i])));
        for sender in &senders {
            // What has ended is there for whoever looks next.
            sender.ep.set_tx_op_flags(OpFlags::DELIVERY_COMPLETE).unwrap();
        }
        Self { host, mr, senders, to, from }
    }

    fn at(&self, sender: usize, addr: u64) -> Remote {
        Remote { dest: self.to[sender], addr, key: KEY }
    }

    /// What a sender's next operation came to, with all turning meanwhile.
    fn ended(&self, sender: usize) -> Completion {
        let begun = Instant::now();
        loop {
            assert!(self.turn().is_none(), "nothing is received here");
            if let Some(completion) = read(&self.senders[sender]) {
                return completion;
            }
            assert!(begun.elapsed() < PATIENCE, "an operation of the {} one", SENDERS[sender]);
        }
    }

    /// What the host has received.
    fn turn(&self) -> Option<Got> {
        let completion = read(&self.host)?;
        let (tag, len) = (completion.tag, completion.len);
        assert!(completion.bytes() == pattern(len, tag), "{len} bytes of {tag:x} changed");
        Some((completion.op_context, completion.src, tag))
    }

    /// Whether a message that no receive has taken has come.
    fn has(&self, tag: u64) -> bool {
        let bufs = Bufs::from(());
        let context = CONTEXT_OF_PEEK;
        let msg = TaggedMsg { bufs, addr: FI_ADDR_UNSPEC, tag, ignore: 0, context, data: 0 };
        self.host.ep.trecvmsg(msg, OpFlags::PEEK).unwrap();
        let mut one = [Completion::default()];
        match self.host.cq.read(&mut one) {
            Ok(_) => {
                assert_eq!(one[0].op_context, CONTEXT_OF_PEEK);
                true
            }
            Err(_) => {
                assert_eq!(self.host.cq.readerr().unwrap().err, Error::NoMsg);
                false
            }
        }
    }

    fn post(&self, number: u64) {
        let any = (FI_ADDR_UNSPEC, u64::MAX);
        self.host.ep.trecv(Buf::zeroed(100_000), any.0, 0, any.1, number).unwrap();
    }
}

fn read(node: &Node) -> Option<Completion> {
    let mut one = [Completion::default()];
    match node.cq.read(&mut one) {
        Ok(_) => Some(std::mem::take(&mut one[0])),
        Err(Error::Again) => None,
        Err(e) => panic!("{e}: {:?}", node.cq.readerr()),
    }
}

/// Goal: receives from anybody take what a near and a far peer send in the order in which it comes,
/// whether they were posted before or after. Method: messages of all kinds of length, each of which
/// has come before the next is sent by either.
#[test]
fn receives_from_anybody_take_what_comes_first() {
    let house = House::new("order");
    let mut rng = Rng::new(29, 0);
    let (mut posted, mut sent, mut got) = (0, Vec::new(), Vec::new());
    let mut underway = [0; 2];
    for round in 0..ROUNDS {
        let before = sent.len() as u64 + rng.below(4);
        while posted < before {
            house.post(posted);
            posted += 1;
        }
        for _ in 0..rng.below(8) {
            let (sender, number) = (rng.index(2), sent.len() as u64);
            let most = rng.pick(&[1, 8, 600, 5000, 70_000]);
            let (len, tag) = (rng.index(most + 1), round << 32 | number);
            let Node { ep, .. } = &house.senders[sender];
            ep.tsend(Buf::from(pattern(len, tag)), house.to[sender], tag, 0).unwrap();
            underway[sender] += 1;
            sent.push((number, house.from[sender], tag));
            let begun = Instant::now();
            while !(number < posted && got.len() > sent.len() - 1
                || number >= posted && house.has(tag))
            {
                if number < posted {
                    got.extend(house.turn());
                }
                for (sender, underway) in underway.iter_mut().enumerate() {
                    *underway -= i32::from(read(&house.senders[sender]).is_some());
                }
                assert!(begun.elapsed() < PATIENCE, "message {number} does not come");
            }
        }
        // What is left over goes into the next round, first.
        while posted < sent.len() as u64 {
            house.post(posted);
            posted += 1;
        }
        let begun = Instant::now();
        while got.len() < sent.len() || underway != [0; 2] {
            got.extend(house.turn());
            for (sender, underway) in underway.iter_mut().enumerate() {
                *underway -= i32::from(read(&house.senders[sender]).is_some());
            }
            assert!(begun.elapsed() < PATIENCE, "{} of {}", got.len(), sent.len());
        }
    }
    // Long ones end later than short ones that came after them.
    got.sort_unstable();
    let wrong = got.iter().zip(&sent).find(|(got, sent)| got != sent);
    assert!(wrong.is_none() && got.len() == sent.len(), "received and sent: {wrong:x?}");
    for from in house.from {
        assert!(sent.iter().filter(|of| of.1 == from).count() > 40);
    }
    let near = house.host.domain.near_counters().unwrap().unwrap().rx_frames;
    let all = house.host.domain.port_counters().unwrap().rx_frames;
    assert!(near > 100 && all > near + 100, "{near} near frames of {all}");
}

const SUM: TypedOp = TypedOp::new(AtomicOp::Sum, Datatype::Uint64);
const SWAP_IF: TypedOp = TypedOp::new(AtomicOp::Cswap, Datatype::Uint64);

fn word(completion: &mut Completion) -> u64 {
    let bytes = std::mem::take(&mut completion.bufs).into_one().unwrap();
    u64::from_le_bytes(bytes[..].try_into().unwrap())
}

/// Goal: atomic operations of a near and a far peer on one word are one after the other, each seen
/// by the next of either. Method: additions, many underway; then conditional swaps that succeed by
/// turns alone.
#[test]
fn atomics_of_near_and_far_are_of_one_domain() {
    const EACH: u64 = 400;
    let house = House::new("atomics");
    let (mut begun, mut seen) = ([0; 2], [Vec::new(), Vec::new()]);
    let since = Instant::now();
    while seen.iter().any(|of| of.len() < EACH as usize) {
        house.turn();
        for (sender, Node { ep, .. }) in house.senders.iter().enumerate() {
            if begun[sender] < EACH && begun[sender] < seen[sender].len() as u64 + 16 {
                let (one, result) = (1_u64.to_le_bytes(), Buf::zeroed(8));
                ep.fetch_atomic(SUM, &one, result, house.at(sender, 0), 0).unwrap();
                begun[sender] += 1;
            }
            seen[sender].extend(read(&house.senders[sender]).map(|mut ended| word(&mut ended)));
        }
        assert!(since.elapsed() < PATIENCE, "{begun:?} begun");
    }
    let [near, far] = &seen;
    let overlap = near.iter().max().unwrap() > far.iter().min().unwrap();
    assert!(overlap && far.iter().max().unwrap() > near.iter().min().unwrap(), "one at a time");
    let mut all: Vec<u64> = seen.concat();
    all.sort_unstable();
    assert_eq!(all, (0..2 * EACH).collect::<Vec<_>>());
    for value in 2 * EACH..2 * EACH + 100 {
        // One comes too early, and too late.
        let (one, other) = ((value % 2) as usize, 1 - (value % 2) as usize);
        for (sender, expects, finds) in
            [(other, value + 1, value), (one, value, value), (other, value, value + 1)]
        {
            let (new, old) = ((expects + 1).to_le_bytes(), expects.to_le_bytes());
            let (ep, at) = (&house.senders[sender].ep, house.at(sender, 0));
            ep.compare_atomic(SWAP_IF, &new, &old, Buf::zeroed(8), at, 0).unwrap();
            assert_eq!(word(&mut house.ended(sender)), finds, "{} one", SENDERS[sender]);
        }
    }
    let mut last = [0; 8];
    house.mr.load(0, &mut last).unwrap();
    assert_eq!(u64::from_le_bytes(last), 2 * EACH + 100);
}

/// Goal: what a near peer has written a far one reads, and the other way round.
#[test]
fn near_and_far_read_what_the_other_wrote() {
    let house = House::new("rma");
    let mut rng = Rng::new(7, 0);
    let mut holds = vec![0; MEMORY];
    for round in 0..120 {
        let writer = round as usize % 2;
        let most = rng.pick(&[8, 600, 5000, MEMORY]);
        let len = 1 + rng.index(most);
        let at = rng.index(MEMORY - len + 1);
        let bytes = pattern(len, round);
        holds[at..at + len].copy_from_slice(&bytes);
        let to = house.at(writer, at as u64);
        house.senders[writer].ep.write(Buf::from(bytes), to, 0).unwrap();
        house.ended(writer);
        let reader = 1 - writer;
        house.senders[reader].ep.read(Buf::zeroed(MEMORY), house.at(reader, 0), 0).unwrap();
        let read = std::mem::take(&mut house.ended(reader).bufs).into_one().unwrap();
        assert!(read[..] == holds[..], "round {round}: {len} bytes at {at} by {writer}");
    }
}
