//! Settings of a domain, parsed once from strings or the environment into types that cannot hold an
//! invalid value.

use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use barewire_dataplane::node::Node;
use barewire_dataplane::proto::coll::plan::Force;
pub use barewire_dataplane::seal::Mode as SealMode;

pub use crate::certificate::CertFiles;

/// Which thread turns the progress loop (`fi_domain_attr.progress`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Progress {
    /// `FI_PROGRESS_UNSPEC`: manual.
    #[default]
    Unspec,
    /// `FI_PROGRESS_AUTO`: a progress thread of the domain.
    Auto,
    /// `FI_PROGRESS_MANUAL`: the threads that read a completion queue, event queue or counter.
    Manual,
}

/// The default port: the default segment of this user on this machine.
pub const DEFAULT_PORT: &str = "shm";

/// Threading level: which calls the application makes from several threads at once
/// (`fi_domain_attr.threading`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Threading {
    /// `FI_THREAD_UNSPEC`: the same as `Safe`.
    #[default]
    Unspec,
    /// `FI_THREAD_SAFE`: all calls.
    Safe,
    /// `FI_THREAD_FID`: one thread at a time per object. Objects share their domain, so this takes
    /// the same lock as `Safe`.
    Fid,
    /// `FI_THREAD_DOMAIN`: one thread at a time per domain, with all its objects. No lock.
    Domain,
    /// `FI_THREAD_COMPLETION`: one thread at a time per completion queue and its bound objects; as
    /// `Safe`.
    Completion,
    /// `FI_THREAD_ENDPOINT`: one thread at a time per endpoint; as `Safe`.
    Endpoint,
}

/// Idle policy of the progress thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Idle {
    /// Keeps polling: lowest latency, occupies one core.
    Spin,
    /// Keeps polling, and yields the core after some empty turns.
    #[default]
    Yield,
    /// Polls for a few microseconds, then sleeps until a frame arrives. A wake-up by the kernel
    /// costs about 5 to 50 microseconds.
    Sleep,
}

/// Which peers may open sessions with a domain and reach its endpoints.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Peers {
    /// Peers that name this incarnation of the domain: 48 random bits of the address that
    /// `fi_getname` returns. A station without this address cannot open a session. A domain that is
    /// reachable by name ([`Settings::by_name`]) accepts every station that can send it frames.
    #[default]
    Named,
    /// Every station that can send it frames.
    Any,
    /// As `Named`; in addition an endpoint, or a region through it, is reached only by peers in the
    /// endpoint's address vector. Others are refused (`FI_ECONNREFUSED`, `FI_EACCES`). Not the
    /// default, since servers learn the addresses of clients from their first message.
    Inserted,
}

/// The provider's name in libfabric, for programs that select a provider by name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum KnownAs {
    /// `barewire`.
    #[default]
    Barewire,
    /// `tcp`, in place of libfabric's own.
    Tcp,
    /// `tcp;ofi_rxm`, the name for `FI_EP_RDM` before libfabric 1.18, in place of libfabric's own.
    TcpRxm,
}

/// Settings of a domain. [`Settings::from_env`] reads them from the environment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The port, such as `shm:job7`, or a pattern that selects a port on each node, such as
    /// `udp:10.1.0.0/16` (`BAREWIRE_PORT`). Default: none, which means [`DEFAULT_PORT`]. A domain
    /// name in the hints takes precedence.
    pub port: Option<String>,
    /// The provider's name in libfabric (`BAREWIRE_AS`: `barewire`, `tcp`, `tcp;ofi_rxm`).
    pub known_as: KnownAs,
    /// Silence after which a peer with outstanding work is dead (`BAREWIRE_T_DEAD_MS`), at least
    /// 100 ms. Default 5 s, longer than the pauses of a swapping process.
    pub t_dead: Duration,
    /// Progress model (`BAREWIRE_PROGRESS`: `manual`, `auto`). `auto` overrides hints for manual
    /// progress; `manual` applies to hints that leave it open.
    pub progress: Progress,
    /// Whether a thread answers peers on a wire while a program with manual progress computes
    /// (`BAREWIRE_RCVTHREAD`: `0`, `1`). Default yes: the thread sleeps while the program polls.
    /// Without it, peers take a program that does not poll for T_dead for dead.
    pub rcvthread: bool,
    /// Whether small messages of a stream share packets without `FI_MORE` on ports whose frames
    /// pass a kernel (`BAREWIRE_NAGLE`: `0`, `1`). Default yes: a message may wait 10 us for the
    /// next ones. Off without the receive thread.
    pub nagle: bool,
    /// Default of `near=` for a port that leaves the node (`BAREWIRE_NEAR`: `0`, `1`): with
    /// `near=yes`, processes of this user in this network namespace are reached through shared
    /// memory, all others by the port. Default yes.
    pub near: bool,
    /// Threading level if the hints leave it open (`BAREWIRE_THREADING`: `safe`, `domain`).
    pub threading: Threading,
    /// Processor that the progress thread is pinned to (`BAREWIRE_CPU`). Default: not pinned.
    pub cpu: Option<usize>,
    /// Idle policy of the progress thread (`BAREWIRE_IDLE`: `spin`, `yield`, `sleep`).
    pub idle: Idle,
    /// Longest message that is sent eagerly, without a rendezvous, bytes (`BAREWIRE_EAGER_MAX`).
    /// Default: 64 KiB if a frame holds 8 KiB, else 16 KiB. A larger value saves a round trip, and
    /// costs the receiver a copy if no receive is posted.
    pub eager_max: Option<usize>,
    /// Most peers known at once (`BAREWIRE_PEER_MAX`), 1 to 1,048,576. Default: room for 4,096,
    /// which grows with the inserted addresses up to 1,048,576.
    pub peer_max: Option<usize>,
    /// Memory for unexpected messages, bytes (`BAREWIRE_UNEXPECTED_BYTES`), 16 KiB to 512 GiB.
    /// Default 256 MiB, touched only when used.
    pub unexpected_bytes: Option<usize>,
    /// Most operations in flight of all endpoints together (`BAREWIRE_TX_MAX`), 1 to 16,777,216.
    /// Default 65,536.
    pub tx_max: Option<usize>,
    /// Most posted receives of all endpoints together (`BAREWIRE_RX_MAX`), 1 to 16,777,216. Default
    /// 262,144.
    pub rx_max: Option<usize>,
    /// Algorithms of collectives (`BAREWIRE_COLL`: `auto`, `latency`, `bandwidth`), the same in all
    /// processes. Default: the cheapest of the cost model.
    pub coll: Force,
    /// Which peers may open sessions and reach endpoints (`BAREWIRE_PEERS`: `named`, `any`,
    /// `inserted`).
    pub peers: Peers,
    /// Whether peers may reach the domain by a name without its incarnation: a port number, a
    /// `sockaddr_in`, a MAC alone. Default no; yes if the `Info` that the domain or one of its
    /// endpoints is opened with has a source address (`FI_SOURCE`).
    pub by_name: bool,
    /// The files that hold the domain's keys (`BAREWIRE_KEY_FILE`, names separated by colons), at
    /// most 4, each of 16 to 1,024 bytes that only its owner may read. With keys, frames on a wire
    /// are sealed, and only peers with one of the keys have sessions with the domain. Sessions are
    /// opened with the first key and accepted with any; all files but the first may be missing. The
    /// files are checked once a second while the domain is open, and read again if one has changed.
    /// A key in the domain's attributes takes precedence. Default none: frames are not sealed.
    pub key_files: Vec<PathBuf>,
    /// The files that hold the domain's certificate (`BAREWIRE_CERT_FILE`,
    /// `BAREWIRE_CERT_KEY_FILE`, `BAREWIRE_ROOTS_FILE`, `BAREWIRE_PEER_IDS` with names separated by
    /// commas), instead of keys. Frames on a wire are sealed, and only peers with a certificate of
    /// the roots and an accepted name have sessions with the domain. The files are checked once a
    /// second while the domain is open. Default none.
    pub certificate: Option<CertFiles>,
    /// Age at which a session replaces its key (`BAREWIRE_REKEY_S`), at least 1 s: older recordings
    /// cannot be decrypted with the memory of a process later. Default one hour; a key is replaced
    /// after 2^22 frames in any case. The cost is not measurable.
    pub rekey: Duration,
    /// The file to which the secrets of sessions are written (`BAREWIRE_KEY_LOG`), for `barewire
    /// capture --keys`: a reader of the file can decrypt recordings. The file is created with mode
    /// 600, and a domain does not open if other users have access to it. Default none.
    pub key_log: Option<PathBuf>,
    /// Mode of sealing (`BAREWIRE_SEAL`: `encrypted`, `authenticated`); the same at both ends.
    pub seal: SealMode,
    /// Whether counters are published for `barewire stats` (`BAREWIRE_STATS`: `0`, `1`). Default
    /// yes: about 30 KiB of memory and a few hundred stores every 10 ms.
    pub stats: bool,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            port: None,
            known_as: KnownAs::Barewire,
            t_dead: Duration::from_secs(5),
            progress: Progress::Unspec,
            rcvthread: true,
            nagle: true,
            near: true,
            threading: Threading::Unspec,
            cpu: None,
            idle: Idle::Yield,
            eager_max: None,
            peer_max: None,
            unexpected_bytes: None,
            tx_max: None,
            rx_max: None,
            coll: Force::No,
            peers: Peers::Named,
            by_name: false,
            key_files: Vec::new(),
            certificate: None,
            key_log: None,
            rekey: Duration::from_secs(3600),
            seal: SealMode::Encrypted,
            stats: true,
        }
    }
}

/// A setting with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}=\"{value}\": expected {expected}")]
pub struct BadSetting {
    /// Name of the variable.
    pub name: &'static str,
    /// Value of the variable.
    pub value: String,
    /// Values that the variable may have.
    pub expected: &'static str,
}

/// Name, meaning and default of each variable, for `barewire info` and `fi_info -e`.
/// `docs/settings.md` and `docs/man/fi_barewire.7` have each of them.
pub const VARIABLES: &[(&str, &str, &str)] = &[
    ("BAREWIRE_PORT", "port, such as shm:job7, udp:10.1.0.0/16 or afpacket:en*|shm", "shm"),
    ("BAREWIRE_AS", "barewire, tcp or tcp;ofi_rxm: the provider's name in libfabric", "barewire"),
    ("BAREWIRE_T_DEAD_MS", "milliseconds of silence after which a peer is dead, from 100", "5000"),
    ("BAREWIRE_PROGRESS", "manual or auto: the program or a thread polls", "manual"),
    ("BAREWIRE_RCVTHREAD", "0 or 1: a thread answers on a wire while the program computes", "1"),
    ("BAREWIRE_NAGLE", "0 or 1: small messages of a stream share packets", "1"),
    ("BAREWIRE_NEAR", "0 or 1: processes of this node are reached through memory", "1"),
    ("BAREWIRE_THREADING", "safe or domain: threading level if a program names none", "safe"),
    ("BAREWIRE_CPU", "processor of the progress thread", "any"),
    ("BAREWIRE_IDLE", "spin, yield or sleep: what that thread does when idle", "yield"),
    (
        "BAREWIRE_EAGER_MAX",
        "bytes of the longest message that is sent eagerly",
        "65536; MTU below 8192: 16384",
    ),
    ("BAREWIRE_PEER_MAX", "peers known at once, at most", "4096, more as they are inserted"),
    ("BAREWIRE_UNEXPECTED_BYTES", "memory for messages without a receive", "268435456"),
    ("BAREWIRE_TX_MAX", "operations in flight, at most", "65536"),
    ("BAREWIRE_RX_MAX", "posted receives, at most", "262144"),
    ("BAREWIRE_COLL", "auto, latency or bandwidth: algorithms of collectives", "auto"),
    (
        "BAREWIRE_PEERS",
        "named, any or inserted: who may open a session or reach an endpoint",
        "named",
    ),
    ("BAREWIRE_KEY_FILE", "up to 4 files with keys for frames on a wire, colons between", "none"),
    ("BAREWIRE_CERT_FILE", "certificate instead of a key, PEM", "none"),
    ("BAREWIRE_CERT_KEY_FILE", "private key of the certificate, PEM", "none"),
    ("BAREWIRE_ROOTS_FILE", "roots that verify the certificates of peers, PEM", "none"),
    ("BAREWIRE_PEER_IDS", "accepted names of peers, as in spiffe://domain/job/*", "all"),
    (
        "BAREWIRE_KEY_LOG",
        "file to which the secrets of sessions are written, to decrypt recordings",
        "none",
    ),
    ("BAREWIRE_REKEY_S", "seconds after which a session replaces its keys, from 1", "3600"),
    ("BAREWIRE_SEAL", "encrypted or authenticated: what a key does", "encrypted"),
    ("BAREWIRE_STATS", "0 or 1: publish counters for barewire stats", "1"),
];

impl Settings {
    /// Reads the environment variables. A variable that is unset or empty keeps its default, with
    /// the exceptions of [`is_unset`](Self::is_unset).
    ///
    /// # Errors
    /// [`BadSetting`]: of the first invalid variable.
    pub fn from_env() -> Result<Self, BadSetting> {
        Self::parse(|name| std::env::var_os(name).map(|v| v.to_string_lossy().into_owned()))
    }

    /// Whether a variable of this name and value counts as unset: its value is empty or blank. The
    /// variables of keys, certificates and peers never do: a domain refuses to open with an empty
    /// one, since a restriction was intended.
    #[must_use]
    pub fn is_unset(name: &str, value: &str) -> bool {
        const NEVER: [&str; 5] = [
            "BAREWIRE_KEY_FILE",
            "BAREWIRE_CERT_FILE",
            "BAREWIRE_CERT_KEY_FILE",
            "BAREWIRE_ROOTS_FILE",
            "BAREWIRE_PEER_IDS",
        ];
        value.trim().is_empty() && !NEVER.contains(&name)
    }

    /// Reads settings from `lookup`, which knows variables by name.
    ///
    /// # Errors
    /// [`BadSetting`]: of the first invalid variable.
    pub fn parse(lookup: impl Fn(&str) -> Option<String>) -> Result<Self, BadSetting> {
        let get = |name: &'static str| {
            lookup(name).map(|v| v.trim().to_owned()).filter(|v| !v.is_empty()).map(|v| (name, v))
        };
        let mut s = Self { port: get("BAREWIRE_PORT").map(|(_, v)| v), ..Self::default() };
        let names = [
            ("barewire", KnownAs::Barewire),
            ("tcp", KnownAs::Tcp),
            ("tcp;ofi_rxm", KnownAs::TcpRxm),
        ];
        if let Some(v) = word(get("BAREWIRE_AS"), &names, "barewire, tcp or tcp;ofi_rxm")? {
            s.known_as = v;
        }
        if let Some(ms) =
            number(get("BAREWIRE_T_DEAD_MS"), 100..=NUMBER_MAX, "milliseconds, at least 100")?
        {
            s.t_dead = Duration::from_millis(ms as u64);
        }
        let progress = [("manual", Progress::Manual), ("auto", Progress::Auto)];
        if let Some(v) = word(get("BAREWIRE_PROGRESS"), &progress, "manual or auto")? {
            s.progress = v;
        }
        let threading = [("safe", Threading::Safe), ("domain", Threading::Domain)];
        if let Some(v) = word(get("BAREWIRE_THREADING"), &threading, "safe or domain")? {
            s.threading = v;
        }
        let idle = [("spin", Idle::Spin), ("yield", Idle::Yield), ("sleep", Idle::Sleep)];
        if let Some(v) = word(get("BAREWIRE_IDLE"), &idle, "spin, yield or sleep")? {
            s.idle = v;
        }
        let switch = [("0", false), ("1", true)];
        for (name, setting) in [
            ("BAREWIRE_STATS", &mut s.stats),
            ("BAREWIRE_RCVTHREAD", &mut s.rcvthread),
            ("BAREWIRE_NAGLE", &mut s.nagle),
            ("BAREWIRE_NEAR", &mut s.near),
        ] {
            if let Some(v) = word(get(name), &switch, "0 or 1")? {
                *setting = v;
            }
        }
        let coll =
            [("auto", Force::No), ("latency", Force::Latency), ("bandwidth", Force::Bandwidth)];
        if let Some(v) = word(get("BAREWIRE_COLL"), &coll, "auto, latency or bandwidth")? {
            s.coll = v;
        }
        let peers = [("named", Peers::Named), ("any", Peers::Any), ("inserted", Peers::Inserted)];
        if let Some(v) = word(get("BAREWIRE_PEERS"), &peers, "named, any or inserted")? {
            s.peers = v;
        }
        let seals =
            [("encrypted", SealMode::Encrypted), ("authenticated", SealMode::Authenticated)];
        if let Some(v) = word(get("BAREWIRE_SEAL"), &seals, "encrypted or authenticated")? {
            s.seal = v;
        }
        if let Some(secs) = number(get("BAREWIRE_REKEY_S"), 1..=NUMBER_MAX, "seconds, at least 1")?
        {
            s.rekey = Duration::from_secs(secs as u64);
        }
        // An empty file name is refused when the domain opens, not ignored: a key was intended.
        let files = lookup("BAREWIRE_KEY_FILE");
        let split = |list: String| std::env::split_paths(list.trim()).collect();
        s.key_files = files.map_or(Vec::new(), split);
        s.certificate = certificate(&lookup);
        s.key_log = get("BAREWIRE_KEY_LOG").map(|(_, path)| path.into());
        s.cpu = number(get("BAREWIRE_CPU"), 0..=NUMBER_MAX, "the number of a processor")?;
        s.parse_sizes(get)?;
        Ok(s)
    }

    /// Reads the sizes of tables and of messages.
    fn parse_sizes(&mut self, get: impl Fn(&'static str) -> RawSetting) -> Result<(), BadSetting> {
        let bytes = "bytes, at most 1048576";
        self.eager_max = number(get("BAREWIRE_EAGER_MAX"), 0..=1 << 20, bytes)?;
        let peers = "a number of peers, 1 to 1048576";
        self.peer_max = number(get("BAREWIRE_PEER_MAX"), 1..=Node::PEER_MAX, peers)?;
        let bytes = "bytes, 16384 to 549755813888";
        let range = Node::UNEXPECTED_BYTES;
        self.unexpected_bytes = number(get("BAREWIRE_UNEXPECTED_BYTES"), range, bytes)?;
        let range = 1..=Node::WR_MAX;
        let operations = "a number of operations, 1 to 16777216";
        self.tx_max = number(get("BAREWIRE_TX_MAX"), range.clone(), operations)?;
        let receives = "a number of receives, 1 to 16777216";
        self.rx_max = number(get("BAREWIRE_RX_MAX"), range, receives)?;
        Ok(())
    }
}

type RawSetting = Option<(&'static str, String)>;

/// Largest value of a number without a limit of its own, so that sums cannot overflow.
const NUMBER_MAX: usize = 1 << 40;

fn number(
    setting: RawSetting,
    range: RangeInclusive<usize>,
    expected: &'static str,
) -> Result<Option<usize>, BadSetting> {
    let Some((name, value)) = setting else { return Ok(None) };
    match value.parse() {
        Ok(n) if range.contains(&n) => Ok(Some(n)),
        _ => Err(BadSetting { name, value, expected }),
    }
}

/// The files of a certificate, if a variable names one. A missing one is reported when the domain
/// opens.
fn certificate(lookup: impl Fn(&str) -> Option<String>) -> Option<CertFiles> {
    let names = ["BAREWIRE_CERT_FILE", "BAREWIRE_CERT_KEY_FILE", "BAREWIRE_ROOTS_FILE"];
    let ids = lookup("BAREWIRE_PEER_IDS");
    let named = names.map(lookup);
    let has_ids = ids.as_ref().is_some_and(|ids| !ids.trim().is_empty());
    if !has_ids && named.iter().all(Option::is_none) {
        return None;
    }
    let [cert, key, roots] = named.map(|path| path.unwrap_or_default().trim().to_owned());
    let files = CertFiles::new(cert, key, roots);
    // An empty list accepts no peer and is reported, rather than accepting all.
    Some(ids.iter().fold(files, |files, ids| files.with_peers(ids.split(',').map(str::trim))))
}

fn word<T: Copy>(
    setting: RawSetting,
    words: &[(&str, T)],
    expected: &'static str,
) -> Result<Option<T>, BadSetting> {
    let Some((name, value)) = setting else { return Ok(None) };
    match words.iter().find(|(w, _)| value.eq_ignore_ascii_case(w)) {
        Some(&(_, v)) => Ok(Some(v)),
        None => Err(BadSetting { name, value, expected }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(vars: &[(&str, &str)]) -> Result<Settings, BadSetting> {
        Settings::parse(|n| vars.iter().find(|(k, _)| *k == n).map(|(_, v)| (*v).to_owned()))
    }

    /// An empty list of peers accepts no peer, and no domain opens with it: it does not mean all.
    #[test]
    fn an_empty_list_of_peers_is_not_all_of_them() {
        let of = |names: &'static [&str], ids: &'static str| {
            certificate(move |name| match name {
                "BAREWIRE_PEER_IDS" => Some(ids.to_owned()),
                _ => names.contains(&name).then(|| "/run/x.pem".to_owned()),
            })
        };
        let files = ["BAREWIRE_CERT_FILE", "BAREWIRE_CERT_KEY_FILE", "BAREWIRE_ROOTS_FILE"];
        let files: &'static [&str] = Box::leak(Box::new(files));
        assert_eq!(of(files, "").unwrap().peer_ids, [""]);
        assert_eq!(of(files, "a.org, b.org").unwrap().peer_ids, ["a.org", "b.org"]);
        assert!(of(&[], " ").is_none(), "nothing is set");
    }

    #[test]
    fn nothing_set_is_the_default() {
        assert_eq!(parse(&[]), Ok(Settings::default()));
        assert_eq!(parse(&[("BAREWIRE_PORT", ""), ("BAREWIRE_CPU", " ")]), Ok(Settings::default()));
    }

    #[test]
    fn every_variable_is_read() {
        let s = parse(&[
            ("BAREWIRE_PORT", "shm:job7"),
            ("BAREWIRE_AS", "tcp;ofi_rxm"),
            ("BAREWIRE_T_DEAD_MS", "500"),
            ("BAREWIRE_PROGRESS", "Auto"),
            ("BAREWIRE_THREADING", "domain"),
            ("BAREWIRE_CPU", "1"),
            ("BAREWIRE_CERT_FILE", "/run/c.pem"),
            ("BAREWIRE_CERT_KEY_FILE", "/run/k.pem"),
            ("BAREWIRE_ROOTS_FILE", "/run/r.pem"),
            ("BAREWIRE_PEER_IDS", "spiffe://a/x, n7"),
            ("BAREWIRE_IDLE", "sleep"),
            ("BAREWIRE_EAGER_MAX", "4096"),
            ("BAREWIRE_PEER_MAX", "100000"),
            ("BAREWIRE_UNEXPECTED_BYTES", "1048576"),
            ("BAREWIRE_TX_MAX", "16"),
            ("BAREWIRE_RX_MAX", "32"),
            ("BAREWIRE_COLL", "bandwidth"),
            ("BAREWIRE_PEERS", "inserted"),
            ("BAREWIRE_STATS", "0"),
            ("BAREWIRE_RCVTHREAD", "0"),
            ("BAREWIRE_NAGLE", "0"),
            ("BAREWIRE_NEAR", "0"),
            ("BAREWIRE_KEY_FILE", "/run/job/key:/run/job/next"),
            ("BAREWIRE_REKEY_S", "60"),
            ("BAREWIRE_KEY_LOG", "/run/secrets.log"),
            ("BAREWIRE_SEAL", "authenticated"),
        ]);
        let want = Settings {
            port: Some("shm:job7".into()),
            known_as: KnownAs::TcpRxm,
            t_dead: Duration::from_millis(500),
            progress: Progress::Auto,
            rcvthread: false,
            nagle: false,
            near: false,
            threading: Threading::Domain,
            cpu: Some(1),
            idle: Idle::Sleep,
            eager_max: Some(4096),
            peer_max: Some(100_000),
            unexpected_bytes: Some(1 << 20),
            tx_max: Some(16),
            rx_max: Some(32),
            coll: Force::Bandwidth,
            peers: Peers::Inserted,
            by_name: false,
            key_files: vec!["/run/job/key".into(), "/run/job/next".into()],
            certificate: Some(
                CertFiles::new("/run/c.pem", "/run/k.pem", "/run/r.pem")
                    .with_peers(["spiffe://a/x", "n7"]),
            ),
            rekey: Duration::from_secs(60),
            key_log: Some("/run/secrets.log".into()),
            seal: SealMode::Authenticated,
            stats: false,
        };
        assert_eq!(s, Ok(want));
    }

    #[test]
    fn a_value_that_means_nothing_names_itself_and_what_would_do() {
        for (name, value) in [
            ("BAREWIRE_T_DEAD_MS", "99"),
            ("BAREWIRE_T_DEAD_MS", "5s"),
            ("BAREWIRE_REKEY_S", "0"),
            ("BAREWIRE_PROGRESS", "maybe"),
            ("BAREWIRE_THREADING", "endpoint?"),
            ("BAREWIRE_CPU", "-1"),
            ("BAREWIRE_IDLE", "never"),
            ("BAREWIRE_EAGER_MAX", "1048577"),
            ("BAREWIRE_PEER_MAX", "0"),
            ("BAREWIRE_PEER_MAX", "1048577"),
            ("BAREWIRE_TX_MAX", "16777217"),
            ("BAREWIRE_RX_MAX", "16777217"),
            ("BAREWIRE_RX_MAX", "0"),
            ("BAREWIRE_UNEXPECTED_BYTES", "16383"),
            ("BAREWIRE_UNEXPECTED_BYTES", "549755813889"),
            ("BAREWIRE_REKEY_S", "1099511627777"),
            ("BAREWIRE_PEERS", "all"),
            ("BAREWIRE_AS", "tcp;ofi_rxd"),
            ("BAREWIRE_STATS", "yes"),
        ] {
            let e = parse(&[(name, value)]).expect_err(name);
            assert_eq!((e.name, e.value.as_str()), (name, value));
            let line = e.to_string();
            assert!(line.starts_with(&format!("{name}=\"{value}\": expected ")), "{line}");
        }
    }
}
