//! Two processes on the two ends of a memif of ours: what DPDK's has no counterpart of.

use std::os::unix::fs::PermissionsExt;

use barewire::errno::{FI_EACCES, FI_EADDRINUSE, FI_ENODEV};

use crate::lengths::{fewer_sizes, there_and_back};
use crate::supervisor::Worker;

/// Options for the largest frames, and some others.
pub(crate) const HUGE: &str = "mtu=65522,id=7,secret=open";

/// Without loss, by short rings.
pub(crate) const NARROW: &str = "lossless=yes,rsize=4,mtu=4000";

/// The port of the server (0) or the client (1) of a memif of its own for each test.
pub(crate) fn port(test: &str, place: usize, options: &str) -> String {
    let role = ["server", "client"][place];
    let comma = if options.is_empty() { "" } else { "," };
    format!("memif:@barewire-test-{test}-{},role={role}{comma}{options}", std::process::id())
}

/// On a socket that is a file, whose server died before.
#[test]
fn every_length_on_a_socket_that_is_a_file() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memif.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let start = |place: usize, role: &str| {
        let side = ["server", "client"][place];
        Worker::start(role, role, &format!("memif:{},role={side}", path.display()))
    };
    there_and_back(start, fewer_sizes);
    assert!(!path.exists(), "the server left its socket");
}

/// The server's frames are longer than the client's buffers: the smaller MTU rules.
#[test]
fn every_length_between_unequal_memifs() {
    let options = ["mtu=9000", "bsize=512,rsize=5"];
    let start = |place: usize, role: &str| {
        Worker::start(role, role, &port("unequal", place, options[place]))
    };
    there_and_back(start, fewer_sizes);
}

/// What opening `port` in a process comes to: a code and the line.
fn outcome(role: &str, port: &str) -> (i32, String) {
    let mut opener = Worker::start(role, role, port);
    opener.say("END");
    let said = opener.addr.clone();
    opener.finish();
    let (code, line) = said.split_once(' ').unwrap();
    (code.parse().unwrap(), line.to_owned())
}

fn refused(role: &str, port: &str, code: i32, says: &[&str]) {
    let (got, line) = outcome(role, port);
    assert_eq!(got, code, "{port}: {line}");
    for part in says {
        assert!(line.contains(part), "{port}: {line}");
    }
}

#[test]
fn memifs_that_cannot_be_opened() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memif.sock").display().to_string();
    let there = format!("memif:{path}");
    let server = format!("{there},role=server,id=3,secret=open");
    let mut first = Worker::start("server", "opener", &server);
    refused("opener", &server, FI_EADDRINUSE, &["a server is there already", "ss -xlp"]);
    refused("opener", &format!("{there},id=3"), FI_EACCES, &["Secret required", "secret="]);
    let port = format!("{there},id=3,secret=wrong");
    refused("opener", &port, FI_EACCES, &["Incorrect secret", "give both ends the same secret="]);
    let port = format!("{there},id=4,secret=open");
    refused("opener", &port, FI_ENODEV, &["ID not found", "no memif 4", "id="]);
    let port = format!("{there},id=3,secret=open");
    let client = Worker::start("client", "opener", &port);
    assert!(client.addr.starts_with("0 "), "{}", client.addr);
    refused("opener", &port, FI_EADDRINUSE, &["Already connected", "id=", "ss -xp"]);
    for mut worker in [std::mem::replace(&mut first, opened(&there)), client] {
        worker.say("END");
        worker.finish();
    }
    first.kill();
    let missing = format!("memif:{}/none/x.sock", dir.path().display());
    refused("opener", &missing, FI_ENODEV, &["no directory", "mkdir -p"]);
    refused("opener", &format!("{missing},role=server"), FI_ENODEV, &["no directory", "mkdir -p"]);
    std::fs::write(dir.path().join("file"), "x").unwrap();
    let file = format!("memif:{}/file,role=server", dir.path().display());
    refused("opener", &file, FI_EADDRINUSE, &["no socket", "rm "]);
}

/// Opened by somebody, whether or not its server is there.
fn opened(port: &str) -> Worker {
    let worker = Worker::start("late", "opener", &port.replace("memif.sock", "other.sock"));
    assert!(worker.addr.starts_with("0 "), "{}", worker.addr);
    worker
}

/// Processes that gave up the rights of root, before a directory and a socket that are not theirs.
#[test]
fn memifs_without_permission() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("memif.sock").display().to_string();
    let mut server = Worker::start("server", "opener", &format!("memif:{path},role=server"));
    let mode = |path: &str, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    mode(&path, 0o400);
    mode(&dir.path().display().to_string(), 0o500);
    refused("powerless", &format!("memif:{path}"), FI_EACCES, &["no permission", "chmod g+w"]);
    let other = format!("memif:{}/other.sock,role=server", dir.path().display());
    refused("powerless", &other, FI_EACCES, &["no permission", "ls -ld"]);
    mode(&dir.path().display().to_string(), 0o700);
    server.say("END");
    server.finish();
}
