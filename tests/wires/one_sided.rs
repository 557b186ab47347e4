//! Operations on the memory of another domain of this process, over ports that lose nothing: many
//! of every kind at once and both ways, through rings too short for them, and a peer that goes.

use std::collections::{BTreeMap, HashMap};
use std::time::{Duration, Instant};

use barewire::flags::{Access, Caps};
use barewire::*;
use barewire_tests::rng::Rng;

use crate::worker::{Node, open_as, pattern, settings};

const KEY: u64 = 5;
/// Memory of an end: a word that the peer counts in, and places that it writes and reads.
const PLACES: usize = 24;
const PLACE_LEN: usize = 6000;
const PLACES_AT: usize = 64;

/// Operations that an end begins.
const COUNT: u64 = 6000;

const SUM: TypedOp = TypedOp::new(AtomicOp::Sum, Datatype::Uint64);

/// What an operation underway is to come to.
enum Wanted {
    /// Word 0 before it was raised by one.
    Fetched,
    /// It was raised by one as well.
    Added,
    Written(usize),
    Read(usize, usize),
}

/// One end, and what it knows of the other's memory.
struct End {
    node: Node,
    peer: FiAddr,
    mr: Mr,
    /// What the peer's places hold; none of one that is being written or read.
    places: Vec<Option<Vec<u8>>>,
    /// Kept while it is in use.
    busy: HashMap<usize, Vec<u8>>,
    underway: HashMap<u64, Wanted>,
    begun: u64,
    /// By how much word 0 was raised, for all that is known, and what was fetched by which.
    raised: u64,
    fetched: BTreeMap<u64, u64>,
    refused: u64,
}

impl End {
    fn open(port: &str) -> Self {
        let caps = Caps::TAGGED | Caps::RMA | Caps::ATOMIC;
        let mut hints = Info { caps, ..Info::default() };
        hints.domain_attr.data_progress = Progress::Manual;
        let quiet = Settings { t_dead: Duration::from_secs(2), ..settings() };
        let node = open_as(port, quiet, hints);
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let attr = MrAttr { access, requested_key: Some(KEY), ..MrAttr::default() };
        let memory = Buf::zeroed(PLACES_AT + PLACES * PLACE_LEN);
        let mr = node.domain.mr_reg(memory, &attr).unwrap();
        Self {
            node,
            peer: FI_ADDR_UNSPEC,
            mr,
            places: vec![Some(vec![0; PLACE_LEN]); PLACES],
            busy: HashMap::new(),
            underway: HashMap::new(),
            begun: 0,
            raised: 0,
            fetched: BTreeMap::new(),
            refused: 0,
        }
    }

    fn at(&self, addr: usize) -> Remote {
        Remote { dest: self.peer, addr: addr as u64, key: KEY }
    }

    /// Begins an operation, or says that there is no room for one.
    fn begin(&mut self, rng: &mut Rng) -> bool {
        let (context, one) = (self.begun, 1_u64.to_le_bytes());
        let place = rng.index(PLACES);
        // Most are short.
        let most = rng.pick(&[16, 100, 400, PLACE_LEN]);
        let len = 1 + rng.index(most);
        let to = self.at(PLACES_AT + place * PLACE_LEN);
        let what = rng.below(5);
        let (wanted, posted) = if what == 0 || self.places[place].is_none() {
            (
                Wanted::Fetched,
                self.node.ep.fetch_atomic(SUM, &one, Buf::zeroed(8), self.at(0), context),
            )
        } else if what == 1 {
            (Wanted::Added, self.node.ep.atomic(SUM, &one, self.at(0), context))
        } else if what < 4 {
            let bytes = Buf::from(pattern(len, context));
            (Wanted::Written(place), self.node.ep.write(bytes, to, context))
        } else {
            (Wanted::Read(place, len), self.node.ep.read(Buf::zeroed(len), to, context))
        };
        match posted {
            Ok(()) => {}
            Err(PostError { error: Error::Again, .. }) => {
                self.refused += 1;
                return false;
            }
            Err(refused) => panic!("{refused}"),
        }
        if let Wanted::Written(place) | Wanted::Read(place, _) = wanted {
            let mut bytes = self.places[place].take().unwrap();
            if matches!(wanted, Wanted::Written(_)) {
                bytes[..len].copy_from_slice(&pattern(len, context));
            }
            self.busy.insert(place, bytes);
        }
        self.underway.insert(context, wanted);
        self.begun += 1;
        true
    }

    /// Takes what has ended; an error if that is how one did.
    fn poll(&mut self) -> Option<Error> {
        let mut one = [Completion::default()];
        match self.node.cq.read(&mut one) {
            Ok(_) => self.ended(&mut one[0]),
            Err(Error::Again) => {}
            Err(_) => {
                let error = self.node.cq.readerr().unwrap();
                let known = self.underway.remove(&error.entry.op_context);
                assert!(known.is_some(), "told twice: {error}");
                return Some(error.err);
            }
        }
        None
    }

    fn ended(&mut self, completion: &mut Completion) {
        let context = completion.op_context;
        let wanted = self.underway.remove(&context).expect("told once");
        let bytes = std::mem::take(&mut completion.bufs).into_one();
        match wanted {
            Wanted::Added => {}
            Wanted::Fetched => {
                let old = u64::from_le_bytes(bytes.unwrap().as_ref().try_into().unwrap());
                self.fetched.insert(context, old);
            }
            Wanted::Written(place) => self.places[place] = self.busy.remove(&place),
            Wanted::Read(place, len) => {
                let held = self.busy.remove(&place).unwrap();
                assert!(bytes.unwrap()[..] == held[..len], "read {len} of place {place}");
                self.places[place] = Some(held);
            }
        }
        self.raised += u64::from(matches!(wanted, Wanted::Added | Wanted::Fetched));
    }

    /// Compares this end's memory with what its peer says it made of it.
    fn check(&self, peer: &Self) {
        let mut word = [0; 8];
        self.mr.load(0, &mut word).unwrap();
        assert_eq!(u64::from_le_bytes(word), peer.raised);
        // Each found what those before it had made of it, in the order in which they were begun.
        assert!(peer.fetched.values().is_sorted_by(|a, b| a < b));
        for (i, place) in peer.places.iter().enumerate() {
            let mut bytes = vec![0; PLACE_LEN];
            self.mr.load(PLACES_AT + i * PLACE_LEN, &mut bytes).unwrap();
            assert!(place.as_ref() == Some(&bytes), "place {i}");
        }
    }
}

fn join(ports: [String; 2]) -> [End; 2] {
    let mut ends = ports.map(|port| End::open(&port));
    for i in 0..2 {
        let addr = ends[1 - i].node.ep.getname().unwrap().to_string();
        ends[i].peer = ends[i].node.knows(&addr);
    }
    ends
}

/// Goal: each operation is executed once and ends once, whatever fits into the rings. Method: the
/// ends post until nothing more is taken and poll seldom, each for itself, as the seed has it.
pub(crate) fn many_both_ways(ports: [String; 2]) {
    let (mut ends, mut rng) = (join(ports), Rng::new(11, 0));
    let mut quiet_since = Instant::now();
    while ends.iter().any(|end| end.begun < COUNT || !end.underway.is_empty()) {
        let i = rng.below(2) as usize;
        let before = ends[i].underway.len();
        let end = &mut ends[i];
        for _ in 0..rng.below(120) {
            if end.begun == COUNT || !end.begin(&mut rng) {
                break;
            }
        }
        // Most often too few to keep up.
        let polls_max = if rng.below(20) == 0 { 400 } else { 4 };
        for _ in 0..rng.below(polls_max) {
            assert_eq!(end.poll(), None);
        }
        if end.underway.len() != before {
            quiet_since = Instant::now();
        }
        assert!(quiet_since.elapsed() < Duration::from_secs(30), "nothing ends");
    }
    assert!(ends.iter().all(|end| end.refused > 0), "there was always room");
    ends[0].check(&ends[1]);
    ends[1].check(&ends[0]);
}

/// Goal: operations end with an error, each once, if their peer goes while they are underway.
pub(crate) fn a_peer_that_goes(ports: [String; 2]) {
    let ([mut end, mut peer], mut rng) = (join(ports), Rng::new(12, 0));
    while end.begun < 300 || end.underway.len() < 20 {
        for _ in 0..40 {
            end.begin(&mut rng);
        }
        for _ in 0..rng.below(60) {
            assert_eq!((end.poll(), peer.poll()), (None, None));
        }
    }
    for _ in 0..100 {
        end.begin(&mut rng);
    }
    drop(peer);
    let (start, mut failed) = (Instant::now(), 0);
    while !end.underway.is_empty() {
        failed += u64::from(end.poll().is_some());
        assert!(start.elapsed() < Duration::from_secs(30), "{} never end", end.underway.len());
    }
    assert!(failed > 0);
    for _ in 0..1000 {
        assert_eq!(end.poll(), None, "an entry too many");
    }
}
