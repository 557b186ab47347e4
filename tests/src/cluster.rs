//! A cluster on one machine: hosts with a name, a `/dev/shm` and a NIC of their own on one Ethernet
//! segment, and a head from which jobs are started, as a launcher finds them elsewhere.
//!
//! A host is a network, a mount and a UTS namespace, kept by a process. Instead of ssh, launchers
//! are given a script that enters a host. Everything ends with the value, or with the process.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::nodes::{FABRIC, Nodes};

/// Interface of hosts and head that launchers use among themselves.
pub const CONTROL: &str = "ctl0";

/// A directory that each host finds at the same place, and that is its own.
const OWN: &str = "own";

/// What keeps a host, told its name and the cluster's directory; says when it is there.
const HOLD: &str = "hostname \"$0\" && mount -t tmpfs -o mode=1777 shm /dev/shm && \
                    mount --bind \"$1/names\" /etc/hosts && \
                    mount --bind \"$1/$0\" \"$1/own\" && echo up && exec sleep infinity";

/// Hosts `node0`, `node1` ... and the head, whose bridges join them.
pub struct Cluster {
    nodes: Nodes,
    holders: Vec<Child>,
    dir: PathBuf,
}

impl Cluster {
    /// `count` hosts. `dir` takes their files; it is absolute and outlives the cluster.
    ///
    /// # Errors
    /// Why this machine does not let us, in one line.
    pub fn new(count: usize, dir: &Path) -> Result<Self, String> {
        let (nodes, head) = (Nodes::new(count + 1)?, count);
        nodes.bridge(head, "br0", 1500)?;
        nodes.bridge(head, CONTROL, 1500)?;
        nodes.ip(head, &format!("addr add 10.79.0.100/24 dev {CONTROL}"))?;
        let mut names = "127.0.0.1 localhost\n10.79.0.100 head\n".to_owned();
        for node in 0..count {
            let (port, control) = (format!("port{node}"), format!("line{node}"));
            nodes.veth([(node, FABRIC), (head, &port)], 1500)?;
            nodes.veth([(node, CONTROL), (head, &control)], 1500)?;
            nodes.plug(head, &port, "br0")?;
            nodes.plug(head, &control, CONTROL)?;
            let address = crate::nodes::address(node);
            nodes.ip(node, &format!("addr add {address}/24 dev {FABRIC}"))?;
            nodes.ip(node, &format!("addr add 10.79.0.{}/24 dev {CONTROL}", node + 1))?;
            names += &format!("10.79.0.{} {}\n", node + 1, name(node));
        }
        let mut cluster = Self { nodes, holders: Vec::new(), dir: dir.to_owned() };
        cluster.write("names", &names)?;
        for node in 0..=count {
            let name = if node == head { "head".to_owned() } else { name(node) };
            for dir in [name.as_str(), OWN] {
                std::fs::create_dir_all(cluster.dir.join(dir))
                    .map_err(|e| format!("{dir}: {e}"))?;
            }
            cluster.hold(node, &name)?;
        }
        cluster.write_agent("")?;
        Ok(cluster)
    }

    /// From now on what the [agent](Self::agent) starts is this user's, without any privilege.
    ///
    /// # Errors
    /// We cannot be that user, or he cannot run `program`.
    pub fn log_in(&self, uid: u32, program: &Path) -> Result<(), String> {
        let user = format!("setpriv --reuid {uid} --regid {uid} --clear-groups");
        self.write_agent(&format!("env HOME=/tmp {user} "))?;
        let program = program.display().to_string();
        let mut command = self.on_head(self.agent());
        let ran = command.args([&name(0), "test", "-x", &program]).output();
        let ran = ran.map_err(|e| format!("the agent: {e}"))?;
        if ran.status.success() {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&ran.stderr);
        Err(format!("user {uid} cannot run {program} here: {}", said.trim()))
    }

    fn write_agent(&self, user: &str) -> Result<(), String> {
        let agent = self.write("agent", &self.agent_script(user))?;
        use std::os::unix::fs::PermissionsExt;
        let mode = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&agent, mode).map_err(|e| format!("{agent:?}: {e}"))
    }

    fn hold(&mut self, node: usize, name: &str) -> Result<(), String> {
        let mut command = self.nodes.command(node, "unshare");
        command.args(["--mount", "--uts", "sh", "-c", HOLD, name]).arg(&self.dir);
        let piped = command.stdin(Stdio::null()).stdout(Stdio::piped());
        let mut holder = piped.spawn().map_err(|e| format!("unshare: {e}"))?;
        let said = holder.stdout.take().and_then(|out| BufReader::new(out).lines().next());
        self.holders.push(holder);
        match said {
            Some(Ok(up)) if up == "up" => Ok(()),
            _ => Err(format!("no host {name} with a name and a /dev/shm of its own")),
        }
    }

    fn write(&self, name: &str, text: &str) -> Result<PathBuf, String> {
        let path = self.dir.join(name);
        std::fs::write(&path, text).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(path)
    }

    /// How many hosts there are.
    pub fn count(&self) -> usize {
        self.holders.len() - 1
    }

    /// What stands in for ssh: `agent HOST WORD...` has a shell there read the words.
    pub fn agent(&self) -> PathBuf {
        self.dir.join("agent")
    }

    /// `user` begins the command that runs as one.
    fn agent_script(&self, user: &str) -> String {
        let hosts =
            (0..self.count()).map(|node| format!("{}) pid={} ;;\n", name(node), self.pid(node)));
        format!(
            "#!/bin/sh\n\
             while :; do case $1 in -*) shift ;; *) break ;; esac; done\n\
             host=$1\nshift\n\
             case $host in\n{}*) echo \"no host $host\" >&2; exit 255 ;;\nesac\n\
             ns=/proc/$pid/ns\n\
             exec nsenter --net=$ns/net --mount=$ns/mnt --uts=$ns/uts {user}sh -c \"$*\"\n",
            hosts.collect::<String>()
        )
    }

    fn pid(&self, node: usize) -> u32 {
        self.holders[node].id()
    }

    /// A file that names the hosts, a line each, and behind each name `suffix`.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn hosts_file(&self, suffix: &str) -> Result<PathBuf, String> {
        let lines = (0..self.count()).map(|node| format!("{}{suffix}\n", name(node)));
        self.write("hosts", &lines.collect::<String>())
    }

    /// A directory of host `node`, which it finds at [`own`](Self::own).
    pub fn dir_of(&self, node: usize) -> PathBuf {
        self.dir.join(name(node))
    }

    /// The directory that each host finds at this place, and that is its own.
    pub fn own(&self) -> PathBuf {
        self.dir.join(OWN)
    }

    /// A command that runs `program` on a host, in the directory where it is started. It ends with
    /// the thread that spawns it.
    pub fn command(&self, node: usize, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let ns = |kind: &str| format!("/proc/{}/ns/{kind}", self.pid(node));
        let mut command = self.nodes.command(node, "nsenter");
        command.arg(format!("--mount={}", ns("mnt"))).arg(format!("--uts={}", ns("uts")));
        command.args(["sh", "-c", "cd \"$0\" && exec \"$@\""]);
        command.arg(std::env::current_dir().unwrap_or_else(|_| "/".into())).arg(program);
        command
    }

    /// As [`command`](Self::command), on the head.
    pub fn on_head(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        self.command(self.count(), program)
    }

    /// Kills what runs on the hosts, such as a launcher's daemons, which have left its group.
    fn end_what_runs(&self) {
        let uts = |pid: u32| std::fs::read_link(format!("/proc/{pid}/ns/uts")).ok();
        let ours: Vec<_> = (0..self.holders.len()).filter_map(|node| uts(self.pid(node))).collect();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let pid = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok());
            if let Some(pid) = pid.filter(|&pid| uts(pid).is_some_and(|uts| ours.contains(&uts))) {
                let pid = nix::unistd::Pid::from_raw(pid as i32);
                let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
            }
        }
    }

    /// The namespaces.
    pub fn nodes(&self) -> &Nodes {
        &self.nodes
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.end_what_runs();
        for holder in &mut self.holders {
            // It may have ended, which is as good.
            let _ = holder.kill();
            let _ = holder.wait();
        }
    }
}

/// Name of a host.
pub fn name(node: usize) -> String {
    format!("node{node}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nodes::or_skip;

    /// Goal: a host has its name, memory, NIC and directory, and the agent reaches it from the
    /// head.
    #[test]
    fn hosts_are_apart_and_the_agent_reaches_them() {
        let dir = tempfile::tempdir().unwrap();
        let Some(cluster) = or_skip(Cluster::new(2, dir.path())) else { return };
        std::fs::write(cluster.dir_of(1).join("here"), "one").unwrap();
        let words = format!(
            "touch /dev/shm/of-one; hostname; ip -o link show {FABRIC} | wc -l; cat {}/here",
            cluster.own().display()
        );
        let mut command = cluster.on_head(cluster.agent());
        let said = command.args(["node1", &words]).output().unwrap();
        assert_eq!(String::from_utf8_lossy(&said.stdout), "node1\n1\none", "{said:?}");
        let mut command = cluster.command(0, "ls");
        let said = command.args(["/dev/shm"]).output().unwrap();
        assert!(said.status.success() && said.stdout.is_empty(), "{said:?}");
        let said = cluster.on_head(cluster.agent()).args(["node7", "true"]).status().unwrap();
        assert_eq!(said.code(), Some(255));
    }
}
