//! Where keys are in the memory of a process: a test of its own, which has the process to itself.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use aws_lc_rs::hmac;
use barewire::flags::{BindFlags, Caps, InfoFlags};
use barewire::info::getinfo_with;
use barewire::{
    API_VERSION, Av, AvAttr, Buf, Completion, Cq, CqAttr, Domain, Endpoint, Error, FI_ADDR_UNSPEC,
    FiAddr, Info, Settings, fabric,
};

struct Node {
    ep: Endpoint,
    cq: Cq,
    av: Av,
    _domain: Domain,
}

fn open(settings: Settings) -> Node {
    let mut hints = Info { caps: Caps::TAGGED, ..Info::default() };
    hints.domain_attr.name = Some("udp:127.0.0.1".to_owned());
    let none = InfoFlags::empty();
    let info = getinfo_with(&settings, API_VERSION, None, None, none, Some(&hints));
    let info = info.unwrap().remove(0);
    let domain = fabric(&info.fabric_attr).unwrap().domain_with(&info, settings).unwrap();
    let cq = domain.cq_open(CqAttr::default()).unwrap();
    let av = domain.av_open(AvAttr::default()).unwrap();
    let ep = domain.endpoint(&info).unwrap();
    ep.bind_cq(&cq, BindFlags::TRANSMIT | BindFlags::RECV).unwrap();
    ep.bind_av(&av).unwrap();
    ep.enable().unwrap();
    Node { ep, cq, av, _domain: domain }
}

/// Exchanges messages until both have some.
fn talk(nodes: &[Node; 2]) {
    let addr = |node: &Node| node.ep.getname().unwrap();
    let knows = |a: usize| -> FiAddr {
        let mut at = [0];
        assert_eq!(nodes[a].av.insert(&[addr(&nodes[1 - a])], &mut at), Ok(1));
        at[0]
    };
    let peers = [knows(0), knows(1)];
    let (begun, mut left) = (Instant::now(), 0);
    for _ in 0..20 {
        for (node, peer) in nodes.iter().zip(peers) {
            node.ep.trecv(Buf::zeroed(8), FI_ADDR_UNSPEC, 7, 0, 1).unwrap();
            node.ep.tsend(Buf::from(vec![7; 8]), peer, 7, 2).unwrap();
            left += 2;
        }
        while left > 0 {
            assert!(begun.elapsed() < Duration::from_secs(60));
            for node in nodes {
                match node.cq.read(&mut [Completion::default()]) {
                    Ok(_) => left -= 1,
                    Err(Error::Again) => std::thread::yield_now(),
                    Err(e) => panic!("{e}: {:?}", node.cq.readerr()),
                }
            }
        }
    }
}

/// What this process has in memory that it can write to, of which the flags of the mapping
/// (proc_pid_smaps(5)) are as wanted, as a core dump would have it: a file of all blocks that are
/// not zero, and the mapping of each.
struct Dump {
    at: PathBuf,
    blocks: Vec<String>,
}

const BLOCK_LEN: usize = 64 << 10;

impl Dump {
    fn take(at: PathBuf, wants: impl Fn(&[&str]) -> bool) -> Self {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut memory = File::open("/proc/self/mem").unwrap();
        let mut core = File::create(&at).unwrap();
        let (mut range, mut head, mut blocks) = ([0, 0], "", Vec::new());
        let mut block = vec![0; BLOCK_LEN];
        for line in smaps.lines() {
            let first = line.split(' ').next().unwrap();
            if let Some((from, to)) = first.split_once('-') {
                (range, head) = ([from, to].map(|n| u64::from_str_radix(n, 16).unwrap()), line);
            }
            let Some(flags) = line.strip_prefix("VmFlags:") else { continue };
            let flags: Vec<_> = flags.split_whitespace().collect();
            if !flags.contains(&"wr") || flags.contains(&"io") || !wants(&flags) {
                continue;
            }
            for from in (range[0]..range[1]).step_by(BLOCK_LEN) {
                block.fill(0);
                let len = BLOCK_LEN.min((range[1] - from) as usize);
                memory.seek(SeekFrom::Start(from)).unwrap();
                // Some pages of the kernel's cannot be read.
                let read = memory.read_exact(&mut block[..len]);
                if read.is_ok() && block.iter().any(|&byte| byte != 0) {
                    core.write_all(&block).unwrap();
                    blocks.push(format!("{head}, at {from:x}"));
                }
            }
        }
        Self { at, blocks }
    }

    /// Where these bytes are, once for each time.
    fn find(&self, needle: &[u8]) -> Vec<&str> {
        let core = std::fs::read(&self.at).unwrap();
        let first = u64::from_ne_bytes(needle[..8].try_into().unwrap());
        let is = |&(i, word): &(usize, &[u8])| {
            u64::from_ne_bytes(word.try_into().unwrap()) == first && core[i..].starts_with(needle)
        };
        let found = core.windows(8).enumerate().filter(is);
        found.map(|(i, _)| &self.blocks[i / BLOCK_LEN][..]).collect()
    }
}

/// HKDF with SHA-256 (RFC 5869) of one block.
fn expand(root: &[u8], info: &[u8]) -> Vec<u8> {
    mac(root, &[info, &[1]].concat())
}

fn mac(key: &[u8], of: &[u8]) -> Vec<u8> {
    hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, key), of).as_ref().to_vec()
}

/// Goal: the pre-shared key, what is derived from it, and the secrets of open sessions are nowhere
/// in memory that a core dump has or that may be swapped; nor is the file's content. Method: all of
/// this process's memory is searched for them, while sessions are open. Nothing of the test knows
/// them before.
#[test]
fn secrets_are_nowhere_else() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name);
    let (key, log) = (at("job.key"), at("secrets.log"));
    let made = std::process::Command::new("dd")
        .args(["if=/dev/urandom", "bs=32", "count=1", "status=none"])
        .arg(format!("of={}", key.display()))
        .status();
    assert!(made.unwrap().success());
    std::fs::set_permissions(&key, std::fs::Permissions::from_mode(0o600)).unwrap();
    let settings = Settings {
        key_files: vec![key.clone()],
        key_log: Some(log.clone()),
        near: false,
        ..Settings::default()
    };
    let nodes = [(); 2].map(|()| open(settings.clone()));
    talk(&nodes);
    let core = Dump::take(at("core"), |flags| !flags.contains(&"dd"));
    let kept = Dump::take(at("kept"), |flags| flags.contains(&"dd"));

    let key = std::fs::read(&key).unwrap();
    let root = mac(b"barewire 3 pre-shared key", &key);
    let psk = expand(&root, b"psk\x00\x16");
    let lines = std::fs::read_to_string(&log).unwrap();
    let secret = |line: &str| -> Vec<u8> {
        let hex = line.split(' ').next_back().unwrap().as_bytes();
        let digit = |c: u8| char::from(c).to_digit(16).unwrap() as u8;
        hex.chunks(2).map(|pair| digit(pair[0]) << 4 | digit(pair[1])).collect()
    };
    let secrets: Vec<_> = lines.lines().map(secret).collect();
    assert!(secrets.len() >= 4, "two directions at two ends");
    assert!(core.blocks.len() > 16);
    let nowhere = Vec::<&str>::new();
    assert_eq!(core.find(&key), nowhere, "the file's content");
    assert_eq!(core.find(&root), nowhere, "what the pre-shared key is derived from");
    assert_eq!(core.find(&psk), nowhere, "the pre-shared key");
    assert_ne!(kept.find(&psk), nowhere, "it is where it is meant to be");
    for secret in &secrets {
        assert_eq!(core.find(secret), nowhere, "a session's secret");
        assert_ne!(kept.find(secret), nowhere);
        let lies = core.find(&expand(secret, b"key")).len();
        println!("a key of frames is {lies} times in memory, that of the cipher library");
    }
    drop(nodes);
    let kept = Dump::take(at("kept"), |flags| flags.contains(&"dd"));
    assert_eq!(kept.find(&psk), nowhere, "it is overwritten");
    assert!(secrets.iter().all(|secret| kept.find(secret).is_empty()));
}
