//! Nodes: network namespaces joined by virtual wires, and processes in them.
//!
//! A namespace has no name and no process of its own. It is kept by a descriptor of ours and by
//! what runs in it, and processes started here are killed when the thread that started them ends.
//! So the kernel removes everything, interfaces included, however the test ends, by a panic or by
//! kill -9 too; nothing has to be cleaned up.
//!
//! Root makes the namespaces in place; anybody else makes them inside a user namespace, as
//! `unshare -Urn` does, in which he is root. Nothing changes outside of them.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::{Command, Stdio};

// Named, since xtask has this file too.
#[path = "bpf.rs"]
mod bpf;
use bpf::draw_queues;

/// Name of the interface that [`Nodes::pair`] gives each node.
pub const FABRIC: &str = "fab0";

/// Network namespaces, numbered from 0.
pub struct Nodes {
    user: Option<File>,
    nets: Vec<File>,
    /// Programs that run in the nodes as long as these are open.
    programs: Vec<OwnedFd>,
}

impl Nodes {
    /// `count` namespaces that have nothing but `lo`, which is up.
    ///
    /// # Errors
    /// Why this machine does not let us, and what to do, in one line.
    pub fn new(count: usize) -> Result<Self, String> {
        Self::inside(count, false).or_else(|_not_root| Self::unprivileged(count))
    }

    /// The same inside a user namespace, whoever we are: what works there works without privilege.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn unprivileged(count: usize) -> Result<Self, String> {
        Self::inside(count, true).map_err(|why| {
            let mend = "run as root, or: sudo sysctl -w user.max_user_namespaces=10000 \
                        kernel.unprivileged_userns_clone=1";
            format!("no network namespaces here: {why}; {mend}")
        })
    }

    fn inside(count: usize, own_user: bool) -> Result<Self, String> {
        let mut nodes = Self { user: None, nets: Vec::new(), programs: Vec::new() };
        for _ in 0..count {
            nodes.add(own_user)?;
        }
        for node in 0..count {
            nodes.ip(node, "link set lo up")?;
        }
        Ok(nodes)
    }

    /// Two nodes whose interfaces [`FABRIC`] are the ends of one wire, with the addresses
    /// [`address`] of 0 and 1.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn pair(mtu: usize) -> Result<Self, String> {
        Self::new(2)?.joined(mtu)
    }

    /// [`pair`](Self::pair) as anybody.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn unprivileged_pair(mtu: usize) -> Result<Self, String> {
        Self::unprivileged(2)?.joined(mtu)
    }

    /// [`pair`](Self::pair) whose wire has so many queues each way.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn pair_of_queues(mtu: usize, queues: u32) -> Result<Self, String> {
        Self::new(2)?.joined_by(mtu, queues)
    }

    fn joined(self, mtu: usize) -> Result<Self, String> {
        self.joined_by(mtu, 1)
    }

    fn joined_by(self, mtu: usize, queues: u32) -> Result<Self, String> {
        self.veth_of_queues([(0, FABRIC), (1, FABRIC)], mtu, queues)?;
        for node in [0, 1] {
            self.ip(node, &format!("addr add {}/24 dev {FABRIC}", address(node)))?;
        }
        Ok(self)
    }

    /// Makes one namespace with the help of a process that enters it and then ends.
    fn add(&mut self, own_user: bool) -> Result<(), String> {
        let mut command = self.outside();
        if own_user && self.user.is_none() {
            command.args(["--user", "--map-root-user"]);
        }
        let piped = command.args(["--net", "cat"]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child =
            piped.stderr(Stdio::piped()).spawn().map_err(|e| format!("unshare: {e}"))?;
        let (mut to, mut from) = (child.stdin.take(), child.stdout.take());
        let mut echo = [0];
        // What comes back was written by `cat`, so by then the namespaces are new.
        let inside = to.as_mut().is_some_and(|to| to.write_all(b"x").is_ok())
            && from.as_mut().is_some_and(|from| from.read_exact(&mut echo).is_ok());
        let open = |kind: &str| {
            let path = format!("/proc/{}/ns/{kind}", child.id());
            File::open(&path).map_err(|e| format!("{path}: {e}"))
        };
        let opened = if inside { Some((open("net"), open("user"))) } else { None };
        drop(to);
        let ended = child.wait_with_output().map_err(|e| format!("unshare: {e}"))?;
        let Some((net, user)) = opened else {
            let said = String::from_utf8_lossy(&ended.stderr);
            return Err(said.split_whitespace().collect::<Vec<_>>().join(" "));
        };
        self.nets.push(net?);
        if own_user && self.user.is_none() {
            self.user = Some(user?);
        }
        Ok(())
    }

    /// `unshare`, inside the user namespace if there is one.
    fn outside(&self) -> Command {
        let mut command = Command::new("unshare");
        entering(&mut command, self.user.as_ref().map(File::as_raw_fd), None, None);
        command
    }

    /// A command that runs `program` in a node. It ends with the thread that spawns it.
    pub fn command(&self, node: usize, program: impl AsRef<std::ffi::OsStr>) -> Command {
        self.command_that_sees(node, program, None)
    }

    fn command_that_sees(
        &self,
        node: usize,
        program: impl AsRef<std::ffi::OsStr>,
        other: Option<usize>,
    ) -> Command {
        let mut command = Command::new(program);
        let net = self.nets[node].as_raw_fd();
        let other = other.map(|other| self.nets[other].as_raw_fd());
        entering(&mut command, self.user.as_ref().map(File::as_raw_fd), Some(net), other);
        command
    }

    /// Runs `ip ARGS` in a node.
    ///
    /// # Errors
    /// What it said.
    pub fn ip(&self, node: usize, args: &str) -> Result<String, String> {
        self.run(node, &format!("ip {args}"))
    }

    /// Runs a command of words without quotes in a node and returns what it printed.
    ///
    /// # Errors
    /// What it said.
    pub fn run(&self, node: usize, words: &str) -> Result<String, String> {
        self.run_seeing(node, words, None)
    }

    fn run_seeing(&self, node: usize, words: &str, other: Option<usize>) -> Result<String, String> {
        let mut words_of = words.split_whitespace();
        let program = words_of.next().ok_or("no command")?;
        let mut command = self.command_that_sees(node, program, other);
        let output = command.args(words_of).stdin(Stdio::null()).output();
        let output = output.map_err(|e| format!("{words}: {e}"))?;
        if output.status.success() {
            return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
        }
        let said = String::from_utf8_lossy(&output.stderr);
        Err(format!("{words}: {}", said.split_whitespace().collect::<Vec<_>>().join(" ")))
    }

    /// A wire: two interfaces, each a node and a name, that carry `mtu` bytes and are up.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn veth(&self, ends: [(usize, &str); 2], mtu: usize) -> Result<(), String> {
        self.veth_of_queues(ends, mtu, 1)
    }

    /// The same with so many queues each way at either end. A frame arrives at the queue with the
    /// number of that by which it was sent.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn veth_of_queues(
        &self,
        ends: [(usize, &str); 2],
        mtu: usize,
        queues: u32,
    ) -> Result<(), String> {
        let [(a, name_a), (b, name_b)] = ends;
        let there = self.nets[b].as_raw_fd();
        let of = format!("mtu {mtu} numrxqueues {queues} numtxqueues {queues}");
        let words = format!(
            "ip link add {name_a} {of} type veth peer {of} name {name_b} netns \
             /proc/self/fd/{there}"
        );
        self.run_seeing(a, &words, Some(b))?;
        for (node, name) in ends {
            self.ip(node, &format!("link set {name} up"))?;
        }
        Ok(())
    }

    /// A bridge in a node, up, that learns at once. Interfaces join it by
    /// [`plug`](Self::plug).
    ///
    /// # Errors
    /// What `ip` said.
    pub fn bridge(&self, node: usize, name: &str, mtu: usize) -> Result<(), String> {
        self.ip(node, &format!("link add {name} mtu {mtu} type bridge forward_delay 0"))?;
        self.ip(node, &format!("link set {name} up"))?;
        Ok(())
    }

    /// Makes an interface of a node (a tap, or one end of a wire) a port of a bridge there.
    ///
    /// # Errors
    /// What `ip` said.
    pub fn plug(&self, node: usize, interface: &str, bridge: &str) -> Result<(), String> {
        self.ip(node, &format!("link set {interface} master {bridge} up"))?;
        Ok(())
    }

    /// Drops one in `1 / of` of our frames that arrive at an interface, drawn by the kernel.
    ///
    /// # Errors
    /// There is no `nft`, or the kernel has no such hook.
    pub fn lose(&self, node: usize, interface: &str, percent: u32) -> Result<(), String> {
        self.run(node, "nft add table netdev wires")?;
        let chain = format!(
            "nft add chain netdev wires loss {{ type filter hook ingress device {interface} \
             priority 0 ; }}"
        );
        self.run(node, &chain)?;
        let rule = format!("nft add rule netdev wires loss numgen random mod 100 < {percent} drop");
        self.run(node, &rule)?;
        Ok(())
    }

    /// Drops our frames of more than `len` bytes behind the Ethernet header that arrive at an
    /// interface, as a switch or a policer on the way would.
    ///
    /// # Errors
    /// As [`lose`](Self::lose).
    pub fn drop_longer(&self, node: usize, interface: &str, len: usize) -> Result<(), String> {
        self.run(node, "nft add table netdev wires")?;
        let chain = format!(
            "nft add chain netdev wires long {{ type filter hook ingress device {interface} \
             priority 0 ; }}"
        );
        self.run(node, &chain)?;
        self.run(node, &format!("nft add rule netdev wires long meta length > {len} drop"))?;
        Ok(())
    }

    /// Three nodes, of which the last is a switch: its ports to the interfaces [`FABRIC`] of the
    /// other two, which take `mtu` bytes, carry as many as `ports` says. Addresses as in
    /// [`pair`](Self::pair).
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn switched(mtu: usize, ports: [usize; 2]) -> Result<Self, String> {
        let nodes = Self::new(3)?;
        nodes.bridge(2, "br0", mtu)?;
        for (node, (port, carries)) in ["port0", "port1"].into_iter().zip(ports).enumerate() {
            nodes.veth([(node, FABRIC), (2, port)], mtu)?;
            nodes.ip(2, &format!("link set {port} mtu {carries}"))?;
            nodes.plug(2, port, "br0")?;
            nodes.ip(node, &format!("addr add {}/24 dev {FABRIC}", address(node)))?;
        }
        Ok(nodes)
    }

    /// [`switched`](Self::switched) by interfaces of so many queues, a power of two, of which the
    /// switch draws one for each frame.
    ///
    /// # Errors
    /// As [`new`](Self::new); the kernel is older than 6.6, or we are not the machine's root.
    pub fn scattered(mtu: usize, queues: u32) -> Result<Self, String> {
        let mut nodes = Self::new(3)?;
        nodes.bridge(2, "br0", mtu)?;
        for (node, port) in ["port0", "port1"].into_iter().enumerate() {
            nodes.veth_of_queues([(node, FABRIC), (2, port)], mtu, queues)?;
            nodes.plug(2, port, "br0")?;
            nodes.ip(node, &format!("addr add {}/24 dev {FABRIC}", address(node)))?;
            let drawn = std::thread::scope(|scope| {
                let draw = || {
                    nodes.enter(2)?;
                    draw_queues(port, queues).map_err(|e| format!("no program at {port}: {e}"))
                };
                scope.spawn(draw).join().map_err(|_| "the thread failed".to_owned())?
            });
            nodes.programs.push(drawn?);
        }
        Ok(nodes)
    }

    /// Moves the calling thread into a node. Inside a user namespace the kernel allows it only to
    /// a process with one thread.
    ///
    /// # Errors
    /// What the system said.
    pub fn enter(&self, node: usize) -> Result<(), String> {
        let user = self.user.as_ref().map(File::as_raw_fd);
        enter_all([user, Some(self.nets[node].as_raw_fd())]).map_err(|e| format!("setns: {e}"))
    }
}

/// The IPv4 address of a node of a pair.
pub fn address(node: usize) -> String {
    format!("10.78.0.{}", node + 1)
}

fn setns(fd: RawFd) -> std::io::Result<()> {
    // SAFETY: `setns` takes numbers and touches no memory. 0: any kind of namespace.
    if unsafe { libc::setns(fd, 0) } < 0 { Err(std::io::Error::last_os_error()) } else { Ok(()) }
}

/// Enters a user and a network namespace, where given. Makes system calls only.
fn enter_all([user, net]: [Option<RawFd>; 2]) -> std::io::Result<()> {
    if let Some(user) = user {
        match setns(user) {
            // We are in it already, which is refused. If it is another, the next call fails.
            Err(e) if e.raw_os_error() == Some(libc::EINVAL) => {}
            other => other?,
        }
    }
    net.map_or(Ok(()), setns)
}

/// Makes the child enter the namespaces before it becomes the program, keep `kept` open, and die
/// with the thread that started it.
fn entering(command: &mut Command, user: Option<RawFd>, net: Option<RawFd>, kept: Option<RawFd>) {
    let enter = move || {
        enter_all([user, net])?;
        // SAFETY: both take numbers and touch no memory. The signal is forgotten when a process
        // gains rights, so it is set after that.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            if let Some(kept) = kept {
                libc::fcntl(kept, libc::F_SETFD, 0);
            }
        }
        Ok(())
    };
    // SAFETY: between fork and exec only calls that a signal handler may make are allowed: `enter`
    // makes system calls and allocates nothing.
    unsafe { command.pre_exec(enter) };
}

/// The namespaces, or a line that says why the test is skipped. With `CI=true` there is no reason
/// good enough.
pub fn or_skip<T>(made: Result<T, String>) -> Option<T> {
    match made {
        Ok(made) => Some(made),
        Err(why) => {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "{why}");
            println!("SKIPPED: {why}");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn links(nodes: &Nodes, node: usize) -> String {
        nodes.ip(node, "-o link").unwrap()
    }

    #[test]
    fn two_nodes_have_one_wire_and_nothing_else() {
        for made in [Nodes::pair(1500), Nodes::unprivileged_pair(9000)] {
            let Some(nodes) = or_skip(made) else { return };
            for node in [0, 1] {
                let seen = links(&nodes, node);
                assert!(
                    seen.contains(&format!("{FABRIC}@")) && seen.lines().count() == 2,
                    "{seen}"
                );
                assert!(seen.contains("LOWER_UP"), "{seen}");
            }
            let said = nodes.run(0, &format!("ip route get {}", address(1))).unwrap();
            assert!(said.contains(FABRIC), "{said}");
        }
    }

    /// Goal: nothing of a node outlives its maker, killed or not.
    #[test]
    fn a_process_in_a_node_ends_with_who_started_it() {
        let Some(nodes) = or_skip(Nodes::new(1)) else { return };
        let sleeper = std::thread::scope(|scope| {
            let started = scope.spawn(|| {
                let mut command = nodes.command(0, "sleep");
                command.arg("1000").spawn().unwrap()
            });
            started.join().unwrap()
        });
        let mut sleeper = sleeper;
        let start = std::time::Instant::now();
        while sleeper.try_wait().unwrap().is_none() {
            assert!(start.elapsed().as_secs() < 20, "it still sleeps");
            std::thread::yield_now();
        }
    }
}
