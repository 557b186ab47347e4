//! Where keys are in the memory of a process: a test of its own, which has the process to itself.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use aws_lc_rs::{digest, hmac};
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

/// What SHA-256 (FIPS 180-4) has come to after its first block, as x86 and ARM have it in memory.
fn after_block(block: &[u8; 64]) -> Vec<u8> {
    // The first bits of the fractional parts of the roots of the first primes.
    let is_prime = |n: &u64| (2..*n).take_while(|d| d * d <= *n).all(|d| !n.is_multiple_of(d));
    let primes: Vec<u64> = (2..).filter(is_prime).take(64).collect();
    let root = |n: u128, degree: u32| {
        let n = n << (32 * degree);
        let (mut low, mut high) = (0_u128, 1 << 36);
        while high - low > 1 {
            let mid = (low + high) / 2;
            let is_over = (0..degree).try_fold(1_u128, |of, _| of.checked_mul(mid));
            if is_over.is_none_or(|power| power > n) { high = mid } else { low = mid }
        }
        low as u32
    };
    let first: Vec<u32> = primes.iter().take(8).map(|&n| root(n.into(), 2)).collect();
    let mut words: Vec<u32> =
        block.chunks(4).map(|word| u32::from_be_bytes(word.try_into().unwrap())).collect();
    for i in 16..64 {
        let (a, b) = (words[i - 15], words[i - 2]);
        let a = a.rotate_right(7) ^ a.rotate_right(18) ^ a >> 3;
        let b = b.rotate_right(17) ^ b.rotate_right(19) ^ b >> 10;
        let sum = words[i - 16].wrapping_add(words[i - 7]);
        words.push(sum.wrapping_add(a).wrapping_add(b));
    }
    let mut h = first.clone();
    for (word, &prime) in words.iter().zip(&primes) {
        let (a, e) = (h[0], h[4]);
        let sum = e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25);
        let chosen = e & h[5] ^ !e & h[6];
        let one = [h[7], sum, chosen, root(prime.into(), 3), *word];
        let one = one.into_iter().fold(0, u32::wrapping_add);
        let sum = a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22);
        let two = sum.wrapping_add(a & h[1] ^ a & h[2] ^ h[1] & h[2]);
        h.rotate_right(1);
        h[4] = h[4].wrapping_add(one);
        h[0] = one.wrapping_add(two);
    }
    let sums = first.iter().zip(h).map(|(before, after)| before.wrapping_add(after));
    sums.flat_map(u32::to_ne_bytes).collect()
}

/// What HMAC with SHA-256 (RFC 2104) makes of a key before it reads anything: with it tags are made
/// as well as with the key.
fn hmac_states(key: &[u8]) -> [Vec<u8>; 2] {
    [0x36, 0x5c].map(|pad| {
        let mut block = [pad; 64];
        block.iter_mut().zip(key).for_each(|(byte, key)| *byte ^= key);
        after_block(&block)
    })
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
    let tag = expand(&root, b"tag\x00\x16");
    assert_eq!(core.find(&tag), nowhere, "the key of tags");
    let block = [&b"abc\x80"[..], &[0; 59], &[24]].concat();
    let words = after_block(block[..].try_into().unwrap());
    let digest = words.chunks(4).flat_map(|word| word.iter().rev().copied());
    let want = digest::digest(&digest::SHA256, b"abc");
    assert!(cfg!(target_endian = "big") || digest.eq(want.as_ref().iter().copied()));
    for state in hmac_states(&tag) {
        assert_ne!(kept.find(&state), nowhere, "what makes tags is where it is meant to be");
        assert_eq!(core.find(&state), nowhere, "what makes tags");
    }
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
