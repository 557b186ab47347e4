//! Domains with keys over a port of the kernel's: another key comes while they talk.

use std::fs::{Permissions, hard_link, remove_file, rename, set_permissions, write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use barewire::*;

use crate::worker::{Node, open};

/// Context of a receive; a send has the number of its destination.
const RECV: u64 = 1000;

/// Receives that a node has posted.
const RECVS: usize = 32;

/// From a look at a file to the next, and some time to read it.
const LOOK: Duration = Duration::from_millis(1_500);

fn open_with(files: Vec<PathBuf>) -> Node {
    let t_dead = Duration::from_secs(10);
    let settings = Settings { key_files: files, near: false, t_dead, ..Settings::default() };
    open("udp:127.0.0.1", settings)
}

/// Nodes of which each has a message on its way to each other.
struct Talk {
    nodes: Vec<Node>,
    /// Time in which the nodes had a processor.
    now: Duration,
    /// When the message from the first to the second was sent.
    sent: Vec<Vec<Option<Duration>>>,
    arrived: u64,
    longest: Duration,
    failed: Option<Error>,
}

impl Talk {
    fn new() -> Self {
        let (nodes, sent, now) = (Vec::new(), Vec::new(), Duration::ZERO);
        Self { nodes, now, sent, arrived: 0, longest: now, failed: None }
    }

    /// `node` takes part: it is the last from now on.
    fn join(&mut self, node: Node) {
        let me = self.nodes.len();
        let addr = node.ep.getname().unwrap().to_string();
        for (i, other) in self.nodes.iter().enumerate() {
            assert_eq!(node.knows(&other.ep.getname().unwrap().to_string()), i as u64);
            assert_eq!(other.knows(&addr), me as u64);
        }
        assert_eq!(node.knows(&addr), me as u64);
        for _ in 0..RECVS {
            node.ep.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 7, 0, RECV).unwrap();
        }
        self.nodes.push(node);
        self.sent.iter_mut().for_each(|to| to.push(None));
        self.sent.push(vec![None; me + 1]);
    }

    /// Talks for that long, or until an operation fails.
    fn go_on(&mut self, long: Duration) {
        let (begun, mut turned) = (Instant::now(), Instant::now());
        while begun.elapsed() < long && self.failed.is_none() {
            // What takes longer is a pause.
            self.now += turned.elapsed().min(Duration::from_millis(10));
            turned = Instant::now();
            for a in 0..self.nodes.len() {
                for b in (0..self.nodes.len()).filter(|&b| b != a) {
                    if self.sent[a][b].is_none() {
                        let buf = Buf::from(vec![7; 8]);
                        self.nodes[a].ep.tsend(buf, b as FiAddr, 7, b as u64).unwrap();
                        self.sent[a][b] = Some(self.now);
                    }
                }
                self.read(a);
            }
        }
        let waits = self.sent.iter().flatten().flatten().map(|&sent| self.now - sent);
        self.longest = waits.chain([self.longest]).max().unwrap_or_default();
    }

    fn read(&mut self, a: usize) {
        let mut one = [Completion::default()];
        match self.nodes[a].cq.read(&mut one) {
            Ok(_) if one[0].op_context == RECV => {
                self.arrived += 1;
                self.nodes[a].ep.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 7, 0, RECV).unwrap();
            }
            Ok(_) => {
                let sent = self.sent[a][one[0].op_context as usize].take().expect("it was sent");
                self.longest = self.longest.max(self.now - sent);
            }
            Err(Error::Again) => std::thread::yield_now(),
            Err(_) => self.failed = Some(self.nodes[a].cq.readerr().unwrap().err),
        }
    }
}

fn put(path: &Path, byte: u8) {
    let beside = path.with_extension("tmp");
    write(&beside, [byte; 32]).unwrap();
    set_permissions(&beside, Permissions::from_mode(0o600)).unwrap();
    rename(beside, path).unwrap();
}

/// The files of one node.
fn files(dir: &Path) -> Vec<PathBuf> {
    ["job.key", "next.key", "old.key"].map(|name| dir.join(name)).to_vec()
}

/// What an operator does in a step, and the list that a program would set.
fn step(n: usize, dir: &Path) -> &'static [&'static [u8]] {
    const KEYS: [&[u8]; 2] = [&[1; 32], &[2; 32]];
    let [job, next, old] = &files(dir)[..] else { panic!("three files") };
    match n {
        0 => {
            put(next, 2);
            &KEYS
        }
        1 => {
            hard_link(job, old).unwrap();
            rename(next, job).unwrap();
            &[&[2; 32], &[1; 32]]
        }
        _ => {
            remove_file(old).unwrap();
            &[&[2; 32]]
        }
    }
}

/// Goal: another key comes to three nodes that talk all the time, node by node and step by step, as
/// `docs/security.md` has it: two that look at files and one whose program sets its list. No
/// operation fails or waits for as long as a refused key takes, whoever opens sessions meanwhile;
/// who has the old key alone is refused at the end.
#[test]
fn another_key_comes_to_nodes_that_talk() {
    let dir = tempfile::tempdir().unwrap();
    let dirs = [0, 1, 2].map(|n| dir.path().join(n.to_string()));
    let mut talk = Talk::new();
    for dir in &dirs {
        std::fs::create_dir(dir).unwrap();
        put(&dir.join("job.key"), 1);
        talk.join(open_with(files(dir)));
    }
    talk.go_on(Duration::from_millis(100));
    for n in 0..3 {
        for (i, dir) in dirs.iter().enumerate() {
            let keys = step(n, dir);
            if i == 2 {
                talk.nodes[i].domain.set_keys(keys).unwrap();
            } else {
                talk.go_on(LOOK);
            }
            // Somebody comes who was changed already, and opens a session with each and is opened
            // one by each.
            talk.join(open_with(files(dir)));
            talk.go_on(Duration::from_millis(100));
        }
    }
    assert_eq!(talk.failed, None);
    assert!(talk.longest < Duration::from_secs(1), "{:?}", talk.longest);
    assert!(talk.arrived > 1000, "{} messages", talk.arrived);
    let nodes = talk.nodes.len();
    assert_eq!(nodes, 12);
    put(&dir.path().join("gone"), 1);
    talk.join(open_with(vec![dir.path().join("gone")]));
    talk.go_on(Duration::from_secs(8));
    assert_eq!(talk.failed, Some(Error::Access));
}

/// Goal: a program's list is refused whole, and where there is nothing to seal.
#[test]
fn a_list_of_keys_is_refused_with_its_reason() {
    let dir = tempfile::tempdir().unwrap();
    put(&dir.path().join("key"), 1);
    let sealed = open_with(vec![dir.path().join("key")]);
    for bad in [
        &[][..],
        &[&[1; 15][..]],
        &[&[1; 1025]],
        &[&[1; 16], &[2; 16], &[3; 16], &[4; 16], &[5; 16]],
    ] {
        assert!(matches!(sealed.domain.set_keys(bad), Err(Error::Invalid(_))), "{bad:?}");
    }
    assert_eq!(sealed.domain.set_keys(&[&[1; 16]]), Ok(()));
    let open = open_with(Vec::new());
    assert!(matches!(open.domain.set_keys(&[&[1; 16]]), Err(Error::OpNotSupp(_))));
}
