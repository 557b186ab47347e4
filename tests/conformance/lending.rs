//! Buffers of the safe API: each is lent to one operation and comes back once.

use std::collections::{HashMap, VecDeque};

use barewire::flags::{BindFlags, OpFlags};
use barewire::*;
use barewire_driver::open::open;
use barewire_tests::rng::Rng;

use crate::harness::*;

/// Longer than any message here.
const ROOM: usize = 8192;

/// Lengths about those at which a message changes the way it goes.
const LENS: &[usize] = &[0, 1, 8, 64, 79, 80, 81, 500, 5000];

/// What an operation holds.
struct Lent {
    /// Where its buffers lie.
    at: Vec<*const u8>,
    /// Of a receive, which it is in the order of posting.
    recv: Option<u64>,
    /// Its success is shown.
    shown: bool,
}

/// One side of a run, with all that it has lent.
struct Lender {
    side: Side,
    lent: HashMap<u64, Lent>,
    /// Places that completions are read to, with what earlier ones left there.
    out: Vec<Completion>,
    posted: u64,
    sent: u64,
    /// Lengths of the messages on their way here.
    coming: VecDeque<usize>,
}

impl Lender {
    fn new(side: Side) -> Self {
        let out = (0..4).map(|_| Completion::default()).collect();
        Self { side, lent: HashMap::new(), out, posted: 0, sent: 0, coming: VecDeque::new() }
    }

    /// Notes what an accepted operation holds; a refused one has given all back.
    fn note(&mut self, context: u64, lent: Lent, posted: PostResult) -> bool {
        let Err(refused) = posted else {
            assert!(self.lent.insert(context, lent).is_none());
            return true;
        };
        assert_eq!((refused.error, places(&refused.bufs)), (Error::Again, lent.at));
        false
    }

    fn recv(&mut self, rng: &mut Rng, context: u64, selective: bool) {
        let flags = if rng.chance(0.5) { OpFlags::COMPLETION } else { OpFlags::empty() };
        let bufs = draw_bufs(rng, Buf::zeroed(ROOM));
        let lent = Lent {
            at: places(&bufs),
            recv: Some(self.posted),
            shown: !selective || flags.contains(OpFlags::COMPLETION),
        };
        let msg = TaggedMsg { ignore: rng.below(2), ..tagged(bufs, FI_ADDR_UNSPEC, 7, context) };
        let posted = self.side.ep.trecvmsg(msg, flags);
        self.posted += u64::from(self.note(context, lent, posted));
    }

    /// Says how long the message is, if it was sent.
    fn send(&mut self, rng: &mut Rng, context: u64, selective: bool) -> Option<usize> {
        let flags = if rng.chance(0.5) { OpFlags::COMPLETION } else { OpFlags::empty() };
        let len = rng.pick(LENS);
        let (peer, bytes) = (self.side.peer, buf(len, self.sent));
        let sent = if len <= 64 && rng.chance(0.2) {
            self.side.ep.tinject(&bytes, peer, 7).is_ok()
        } else {
            let bufs = draw_bufs(rng, bytes);
            let shown = !selective || flags.contains(OpFlags::COMPLETION);
            let lent = Lent { at: places(&bufs), recv: None, shown };
            let posted = self.side.ep.tsendmsg(tagged(bufs, peer, 7, context), flags);
            self.note(context, lent, posted)
        };
        self.sent += u64::from(sent);
        sent.then_some(len)
    }

    /// Reads some, and says whether there were any.
    fn read(&mut self, rng: &mut Rng) -> bool {
        let n = 1 + rng.index(self.out.len());
        let got = match self.side.cq.read(&mut self.out[..n]) {
            Ok(got) => got,
            Err(e) => {
                assert_eq!(e, Error::Again);
                return false;
            }
        };
        assert!((1..=n).contains(&got));
        for i in 0..got {
            let done = &mut self.out[i];
            let lent = self.lent.remove(&done.op_context).expect("a context that was lent, once");
            assert!(lent.shown, "{done:?} was not asked for");
            assert_eq!(places(&done.bufs), lent.at, "other buffers came back: {done:?}");
            if let Some(recv) = lent.recv {
                // In order, as all have the same tag.
                assert_eq!(done.len, self.coming[recv as usize]);
                assert!(gathered(&done.bufs, done.len) == pattern(done.len, recv));
            }
            // Some are left there, to be written over.
            if rng.chance(0.7) {
                done.bufs = Bufs::None;
            }
        }
        true
    }
}

/// The buffer, alone or cut in two.
fn draw_bufs(rng: &mut Rng, whole: Buf) -> Bufs {
    if rng.chance(0.8) {
        return whole.into();
    }
    let at = rng.index(whole.len() + 1);
    vec![Buf::from(&whole[..at]), Buf::from(&whole[at..])].into()
}

fn places(bufs: &Bufs) -> Vec<*const u8> {
    match bufs {
        Bufs::None => Vec::new(),
        Bufs::One(buf) => vec![buf.as_ptr()],
        Bufs::Many(bufs) => bufs.iter().map(|buf| buf.as_ptr()).collect(),
        Bufs::Shared(_) => unreachable!("none is posted here"),
    }
}

fn gathered(bufs: &Bufs, len: usize) -> Vec<u8> {
    let mut all: Vec<u8> = match bufs {
        Bufs::One(buf) => buf.to_vec(),
        Bufs::Many(bufs) => bufs.iter().flat_map(|buf| buf.to_vec()).collect(),
        _ => Vec::new(),
    };
    all.truncate(len);
    all
}

/// Goal: whatever way an operation goes, its buffers come back once, with its context and, for a
/// receive, the message; those of one that is not shown are freed, and nothing stays lent. Method:
/// operations of both sides drawn at random, lists and long messages among them, over a segment
/// (where most leave in the call that posts them) and over a port that may lose frames; read a few
/// at a time to places where older completions lie.
#[test]
fn buffers_come_back_once() {
    for seed in 0..24 {
        for (shm, threading) in
            [(true, Threading::Domain), (true, Threading::Safe), (false, Threading::Domain)]
        {
            for selective in [false, true] {
                println!("seed {seed}, shm {shm}, {threading:?}, selective {selective}");
                run(seed, shm, threading, selective);
            }
        }
    }
}

fn run(seed: u64, shm: bool, threading: Threading, selective: bool) {
    let mut rng = Rng::new(seed, 61);
    let mut plan = Plan::default();
    plan.info.domain_attr.threading = threading;
    if selective {
        plan.bind |= BindFlags::SELECTIVE_COMPLETION;
    }
    let spec = format!("shm:lending-{}", std::process::id());
    let ports = if shm { (0..2).map(|_| open(&spec).unwrap()).collect() } else { ports(2) };
    let Pair { a, b, .. } = Pair::with(&plan, &plan, ports);
    let mut both = [Lender::new(a), Lender::new(b)];
    for context in 0..600 {
        let at = rng.index(2);
        match rng.below(8) {
            0..3 => both[at].recv(&mut rng, context, selective),
            3..6 => {
                if let Some(len) = both[at].send(&mut rng, context, selective) {
                    both[1 - at].coming.push_back(len);
                }
            }
            _ => while both[at].read(&mut rng) && rng.chance(0.7) {},
        }
    }
    for (at, context) in [(0, 1_000), (1, 100_000)] {
        let mut more = context..;
        // Where more were posted than came, the rest comes now.
        while both[at].posted != both[1 - at].sent {
            let context = more.next().expect("no end");
            if both[at].posted < both[1 - at].sent {
                both[at].recv(&mut rng, context, selective);
            } else if let Some(len) = both[1 - at].send(&mut rng, context, selective) {
                both[at].coming.push_back(len);
            }
            both.iter_mut().for_each(|side| while side.read(&mut rng) {});
        }
    }
    until("the end of all that is shown", || {
        both.iter_mut().for_each(|side| while side.read(&mut rng) {});
        both.iter().all(|side| side.lent.values().all(|lent| !lent.shown)).then_some(())
    });
    let [a, b] = both.map(|lender| lender.side);
    Pair::of(a, b).all_is_back();
}
